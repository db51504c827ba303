//! What is wrong with the settings, and where.

use std::{error::Error, fmt, io};

use super::bounds::Violation;

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The file and the line in it, from 1; a line of 0 means the file as a whole. `None` for flags and the environment.
    pub place: Option<(String, usize)>,
    /// The setting, such as `resp.args_max`; empty when it is about none.
    pub setting: String,
    /// What is wrong.
    pub message: String,
    /// What to write instead.
    pub suggestion: Option<String>,
}

/// Everything that is wrong with the settings. There is at least one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    /// In the order of the file's lines.
    pub problems: Vec<Problem>,
}

impl ConfigError {
    pub(super) fn unreadable(source: &str, error: &io::Error) -> Self {
        let place = Some((source.to_owned(), 0));
        let message = format!("cannot be read: {error}");
        Self { problems: vec![Problem { place, setting: String::new(), message, suggestion: None }] }
    }
}

impl From<Violation> for Problem {
    fn from(violation: Violation) -> Self {
        Self { place: None, setting: violation.setting.into(), message: violation.message, suggestion: None }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.place {
            Some((source, 0)) => write!(f, "{source}: ")?,
            Some((source, line)) => write!(f, "{source}:{line}: ")?,
            None => {}
        }
        if !self.setting.is_empty() {
            write!(f, "{}: ", self.setting)?;
        }
        f.write_str(&self.message)?;
        match &self.suggestion {
            Some(suggestion) => write!(f, " ({suggestion})"),
            None => Ok(()),
        }
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, problem) in self.problems.iter().enumerate() {
            let newline = if index > 0 { "\n" } else { "" };
            write!(f, "{newline}{problem}")?;
        }
        Ok(())
    }
}

impl Error for ConfigError {}
