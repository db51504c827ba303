//! Worlds that are made up to measure something: what each way of meeting a hot key does to it, to the store, and to
//! everybody else. The figures are those of virtual time, so they say nothing about how fast the code is.

mod lab;
mod over;
mod sharing;

use std::fmt;

use self::lab::Lab;

/// What one world of an experiment showed.
#[derive(Clone, Debug)]
pub struct Row {
    /// What was different in this world.
    pub name: String,
    /// Figures by what they are, with their unit.
    pub figures: Vec<(&'static str, f64)>,
}

impl Row {
    fn new(name: impl Into<String>, figures: &[(&'static str, f64)]) -> Self {
        Self { name: name.into(), figures: figures.to_vec() }
    }

    /// A figure by what it is.
    ///
    /// # Panics
    ///
    /// Where there is none.
    pub fn figure(&self, what: &str) -> f64 {
        let found = self.figures.iter().find(|(name, _)| *name == what);
        found.unwrap_or_else(|| panic!("{}: there is no figure `{what}`", self.name)).1
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<44}", self.name)?;
        for (what, figure) in &self.figures {
            // As many digits as mean something.
            let digits = if figure.fract() == 0.0 {
                0
            } else if *figure < 10.0 {
                2
            } else {
                1
            };
            write!(f, "  {what}: {figure:.digits$}")?;
        }
        Ok(())
    }
}

/// An experiment: its rows, from a seed.
pub type Experiment = fn(u64) -> Vec<Row>;

/// An experiment by its name.
pub fn named(name: &str) -> Option<Experiment> {
    ALL.iter().find(|(known, _)| *known == name).map(|(_, run)| *run)
}

/// All of them, by name.
pub const ALL: &[(&str, Experiment)] = &[
    ("over-its-limit", over::over_its_limit),
    ("leases-of-100", sharing::leases_of_100),
    ("leases-of-50", sharing::leases_of_50),
    ("split", sharing::split),
    ("sample", over::sample),
    ("coalescing", over::coalescing),
    ("cold-keys", sharing::cold_keys),
];
