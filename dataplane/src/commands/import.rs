//! The command `import`: the rules of another rate limiter as a policy.
//!
//! One limiter so far: envoyproxy/ratelimit, the reference implementation of Envoy's rate limit service. Three steps:
//!
//! 1. `import/tree.rs`: a YAML file into a tree of descriptors, each field looked at.
//! 2. `import/routes.rs`: which descriptor answers which requests there, and what else of the tree a rule would match here.
//! 3. `import/rules.rs`: a rule for each descriptor with a limit, and the overrides that keep it to its own requests.
//!
//! Whoever migrates must be able to trust the result. So what the reference does and a policy cannot say is a *problem*, and
//! a configuration with a problem gives no policy at all; what changes no verdict is a *note*. Both name file and line.

use std::{
    collections::HashSet,
    fmt,
    fs::{self, File},
    io::{self, Read, Write},
    path::{Path, PathBuf},
};

use policy_sync::{file, model::Policy, stored};
use serde::Serialize;
use thiserror::Error;

use self::{rules::Translation, tree::Tree};
use super::counted;
use crate::{cli::ImportArgs, config::Settings};

mod routes;
mod rules;
#[cfg(not(loom))]
#[cfg(test)]
mod tests;
mod tree;

/// The largest file that is read, in bytes.
const FILE_BYTES_MAX: u64 = 16 << 20;

/// Why nothing was imported.
#[derive(Debug, Error)]
pub enum ImportError {
    /// There are problems: this is their list, for whom it was asked for.
    #[error("{}", .report.shown(*.json))]
    Problems {
        /// The list.
        report: Report,
        /// Whether programs read it.
        json: bool,
    },
    /// The policy cannot be put into its file.
    #[error("{}: cannot be written: {error}", path.display())]
    Output {
        /// The file.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// The answer could not be written.
    #[error("cannot write: {0}")]
    Write(#[from] io::Error),
}

/// What is to be known about an import.
#[derive(Debug, Default, Serialize)]
pub struct Report {
    /// What cannot be expressed, or is no configuration.
    problems: Vec<Remark>,
    /// What becomes of fields that change no verdict.
    notes: Vec<Remark>,
}

/// One problem or note.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
struct Remark {
    /// The file; `None` where it is about all of them together.
    file: Option<String>,
    /// The line of the file, from 1.
    line: Option<u64>,
    /// Domain and descriptors, outermost first; empty for the whole file.
    path: String,
    /// What is so.
    message: String,
    /// What to do about it.
    suggestion: Option<String>,
}

/// Imports the configuration of envoyproxy/ratelimit. The policy goes to `out` or into the file that was asked for, the
/// notes to `err`.
///
/// # Errors
///
/// Everything that cannot be expressed; nothing is written then.
pub fn envoy_ratelimit(args: &ImportArgs, out: &mut impl Write, err: &mut impl Write) -> Result<(), ImportError> {
    let mut report = Report::default();
    let mut sources = Vec::new();
    let mut unread = Vec::new();
    for path in &args.files {
        let name = path.display().to_string();
        match read_bounded(path) {
            Ok(text) => sources.push((name, text)),
            Err(error) => unread.push(Remark {
                file: Some(name),
                line: None,
                path: String::new(),
                message: format!("cannot be read: {error}"),
                suggestion: None,
            }),
        }
    }
    let sources: Vec<_> = sources.iter().map(|(name, text)| (name.as_str(), text.as_str())).collect();
    let policy = translate(&sources, &mut report);
    report.problems.extend(unread);
    if !report.problems.is_empty() {
        return Err(ImportError::Problems { report, json: args.json });
    }
    let names: Vec<_> = sources.iter().map(|(name, _)| name.escape_debug().to_string()).collect();
    let text = format!(
        "# Imported from the envoyproxy/ratelimit configuration {}.\n\n{}",
        names.join(", "),
        stored::to_toml(&policy)
    );
    match &args.output {
        None => out.write_all(text.as_bytes())?,
        Some(path) => {
            fs::write(path, text).map_err(|error| ImportError::Output { path: path.clone(), error })?;
            let (rules, overrides) = (counted(policy.rules.len(), "rule"), counted(policy.overrides.len(), "override"));
            writeln!(out, "ok: {} is a policy file with {rules} and {overrides}", path.display())?;
        }
    }
    if args.json || !report.notes.is_empty() {
        writeln!(err, "{}", report.shown(args.json))?;
    }
    out.flush()?;
    Ok(())
}

fn read_bounded(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    // One byte more than allowed tells a file that is too large.
    File::open(path)?.take(FILE_BYTES_MAX + 1).read_to_string(&mut text)?;
    if text.len() as u64 > FILE_BYTES_MAX {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("it has more than {FILE_BYTES_MAX} bytes")));
    }
    Ok(text)
}

/// The policy of these files, by name and text. It means something only where no problem was reported.
fn translate(sources: &[(&str, &str)], report: &mut Report) -> Policy {
    let mut trees: Vec<Tree> = Vec::new();
    for (name, text) in sources {
        let Some(tree) = Tree::parse(name, text, report) else {
            continue;
        };
        if let Some(first) = trees.iter().find(|first| first.domain == tree.domain) {
            let message =
                format!("the domain is already that of {}, and the reference refuses a second one", first.file);
            let suggestion = Some("put all its descriptors into one file".into());
            report.problems.push(Remark { suggestion, ..tree.remark_on_domain(message) });
            continue;
        }
        trees.push(tree);
    }
    let mut translation = Translation::default();
    for tree in &trees {
        translation.add(tree, report);
    }
    // What is wrong with a descriptor shows in each limit below it.
    let mut seen = HashSet::new();
    report.problems.retain(|problem| seen.insert(problem.clone()));
    // As somebody goes through the files.
    let place = |remark: &Remark| {
        let file = remark.file.as_ref().and_then(|file| sources.iter().position(|(name, _)| name == file));
        (file, remark.line)
    };
    report.problems.sort_by_key(place);
    report.notes.sort_by_key(place);
    let policy = translation.policy(file::FIRST_VERSION);
    // Whatever a policy must satisfy that was not looked at, such as the number of attributes.
    if report.problems.is_empty()
        && let Err(remarks) = stored::check(&policy)
    {
        report.problems.extend(remarks.list.iter().map(|remark| Remark {
            file: None,
            line: None,
            path: String::new(),
            message: format!("the policy that comes out would be refused: {remark}"),
            suggestion: None,
        }));
    }
    let rules_max = Settings::default().limits.rules_max;
    if policy.rules.len() > rules_max {
        let count = policy.rules.len();
        let message = format!("there are {count} rules, and a server takes {rules_max} by default");
        let suggestion = Some(format!("set limits.rules_max to {count} or more"));
        report.notes.push(Remark { file: None, line: None, path: String::new(), message, suggestion });
    }
    policy
}

impl Report {
    /// All of it, for people or for programs, without a newline at the end.
    fn shown(&self, json: bool) -> String {
        if json {
            // Strings and numbers in lists: there is nothing in it that JSON could not say.
            return serde_json::to_string_pretty(self).unwrap_or_default();
        }
        let problems = self.problems.iter().map(ToString::to_string);
        let notes = self.notes.iter().map(|note| format!("note: {note}"));
        let problem_count = self.problems.len();
        let count =
            (problem_count > 0).then(|| format!("{}, so no policy is written", counted(problem_count, "problem")));
        problems.chain(notes).chain(count).collect::<Vec<_>>().join("\n")
    }
}

impl fmt::Display for Remark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(file) = &self.file {
            write!(f, "{file}")?;
            if let Some(line) = self.line {
                write!(f, ":{line}")?;
            }
            f.write_str(": ")?;
        }
        if !self.path.is_empty() {
            write!(f, "{}: ", self.path)?;
        }
        f.write_str(&self.message)?;
        match &self.suggestion {
            Some(suggestion) => write!(f, " ({suggestion})"),
            None => Ok(()),
        }
    }
}
