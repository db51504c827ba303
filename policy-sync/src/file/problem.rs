//! What is wrong with a policy file, and where.

use std::{collections::HashSet, error::Error, fmt, sync::Arc};

use super::PROBLEMS_MAX;
use crate::check::{Field, Item};

/// One thing that is wrong with a policy file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The file's name, as the caller gave it.
    pub source: Arc<str>,
    /// The line, from 1.
    pub line: usize,
    /// The column in characters, from 1.
    pub column: usize,
    /// The rule or override, by position.
    pub item: Item,
    /// The rule or override as people find it, such as `rule "login-per-key"`; empty for the file as a whole.
    pub subject: String,
    /// The field in it; empty for a syntax error of TOML itself.
    pub field: Field,
    /// What is wrong.
    pub message: String,
    /// What to write instead.
    pub suggestion: Option<String>,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:", self.source, self.line)?;
        if self.item == Item::Policy && self.field.steps().is_empty() {
            write!(f, "{}:", self.column)?;
        }
        if !self.subject.is_empty() {
            write!(f, " {}:", self.subject)?;
        }
        if !self.field.steps().is_empty() {
            write!(f, " {}:", self.field)?;
        }
        write!(f, " {}", self.message)?;
        match &self.suggestion {
            Some(suggestion) => write!(f, " ({suggestion})"),
            None => Ok(()),
        }
    }
}

/// All that is wrong with a policy file, in the order of its lines. There is at least one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problems {
    list: Vec<Problem>,
    more: usize,
}

impl Problems {
    pub(super) fn new(list: Vec<Problem>, more: usize) -> Self {
        Self { list, more }
    }

    /// The problems, at most [`PROBLEMS_MAX`].
    pub fn list(&self) -> &[Problem] {
        &self.list
    }

    /// How many further problems were only counted.
    pub fn more(&self) -> usize {
        self.more
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, problem) in self.list.iter().enumerate() {
            let newline = if index > 0 { "\n" } else { "" };
            write!(f, "{newline}{problem}")?;
        }
        match self.more {
            0 => Ok(()),
            more => write!(f, "\nand {more} more"),
        }
    }
}

impl Error for Problems {}

/// A field of an item: where reading stands.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Place {
    pub(super) item: Item,
    pub(super) field: Field,
}

impl Place {
    pub(super) fn new(item: Item) -> Self {
        Self { item, field: Field::default() }
    }

    pub(super) fn key(&self, name: impl Into<std::borrow::Cow<'static, str>>) -> Self {
        Self { item: self.item, field: self.field.clone().key(name) }
    }

    pub(super) fn index(&self, index: usize) -> Self {
        Self { item: self.item, field: self.field.clone().index(index) }
    }
}

/// Why a value is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) message: String,
    pub(super) suggestion: Option<String>,
}

impl Refusal {
    pub(super) fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), suggestion: None }
    }

    pub(super) fn suggest(self, suggestion: impl Into<String>) -> Self {
        Self { suggestion: Some(suggestion.into()), ..self }
    }
}

/// A problem whose line is not worked out yet.
pub(super) struct Found {
    pub(super) offset: usize,
    pub(super) place: Place,
    pub(super) refusal: Refusal,
    /// The other place that it refers to.
    pub(super) related: Option<usize>,
}

/// The problems found so far, and the fields that have a placeholder in the model because of them.
#[derive(Default)]
pub(super) struct Collector {
    found: Vec<Found>,
    more: usize,
    refused: HashSet<Place>,
}

impl Collector {
    /// A value that did not make it into the model: what `check` says about its placeholder is not to be shown.
    pub(super) fn refuse(&mut self, offset: usize, place: Place, refusal: Refusal) {
        self.refused.insert(place.clone());
        self.report(offset, place, refusal);
    }

    /// A field without a value, the reason for which was reported elsewhere.
    pub(super) fn mark_refused(&mut self, place: Place) {
        self.refused.insert(place);
    }

    pub(super) fn report(&mut self, offset: usize, place: Place, refusal: Refusal) {
        self.report_related(offset, place, refusal, None);
    }

    pub(super) fn report_related(&mut self, offset: usize, place: Place, refusal: Refusal, related: Option<usize>) {
        if self.found.len() < PROBLEMS_MAX {
            self.found.push(Found { offset, place, refusal, related });
        } else {
            self.more += 1;
        }
    }

    /// Whether the model has a placeholder here, or for something that contains this.
    pub(super) fn is_refused(&self, item: Item, field: &Field) -> bool {
        !self.refused.is_empty() && field.ancestors().any(|field| self.refused.contains(&Place { item, field }))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.found.is_empty()
    }

    /// The problems in the order of the text, and how many more there were.
    pub(super) fn into_sorted(mut self) -> (Vec<Found>, usize) {
        self.found.sort_by_key(|found| found.offset);
        (self.found, self.more)
    }
}

/// From byte offsets to lines.
pub(super) struct Lines<'t> {
    text: &'t str,
    starts: Vec<usize>,
}

impl<'t> Lines<'t> {
    pub(super) fn new(text: &'t str) -> Self {
        let newlines = text.bytes().enumerate().filter(|&(_, byte)| byte == b'\n');
        Self { text, starts: std::iter::once(0).chain(newlines.map(|(at, _)| at + 1)).collect() }
    }

    /// The line of a byte offset, from 1.
    pub(super) fn line(&self, offset: usize) -> usize {
        self.starts.partition_point(|&start| start <= offset)
    }

    /// The column of a byte offset in characters, from 1.
    pub(super) fn column(&self, offset: usize) -> usize {
        let start = self.starts[self.line(offset) - 1];
        let before = self.text.as_bytes().get(start..offset).unwrap_or_default();
        // Every character has exactly one byte that is not a continuation byte.
        1 + before.iter().filter(|&&byte| byte & 0xC0 != 0x80).count()
    }
}
