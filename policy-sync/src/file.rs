//! A policy file (TOML) into the model, with every problem of the file reported at once.
//!
//! ```
//! let policy = policy_sync::file::parse(
//!     r#"
//!     [[rule]]
//!     name = "login-per-key"
//!     match = { path = "/v1/login" }
//!     per = ["key"]
//!     limit = { capacity = 10, refill = 10, period = "1m" }
//!     "#,
//!     "policy.toml",
//! )?;
//! assert_eq!(policy.rules[0].name, "login-per-key");
//! # Ok::<(), policy_sync::file::Problems>(())
//! ```
//!
//! The file `policy.toml` at the root of the repository shows every field. Reading takes three steps:
//!
//! 1. The text into TOML values that know their bytes' positions. Syntax errors end it here.
//! 2. The values into the model: fields, types and the small languages of durations, patterns and times
//!    (`file/entries.rs`, `file/words.rs`). A refused value leaves a placeholder, and reading goes on.
//! 3. [`check`] looks at the model. What it finds gets its line by walking the values again, unless it
//!    is about a placeholder.
//!
//! Two things cannot be said in a file. A `*` stands only at the end of a pattern, and there is no way to write a value
//! that ends in a literal star. And values are TOML strings, so bytes that are not UTF-8 are met only by a prefix or `*`.

use std::{
    fs::File,
    io::{self, Read},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use thiserror::Error;
use toml::de::DeTable;

use self::problem::{Collector, Found, Lines, Place, Refusal};
pub use self::problem::{Problem, Problems};
use crate::{
    check::{self, Field, Finding, Item, Step, quoted},
    model::Policy,
};

mod entries;
mod problem;
mod table;
mod words;

/// The largest policy file, in bytes: 64 MiB. Reading takes up to about fifty times the file's size in memory.
pub const FILE_BYTES_MAX: u64 = 64 << 20;
/// The most problems that are reported one by one; further ones are counted.
pub const PROBLEMS_MAX: usize = 100;
/// In a larger file than this, 1 MiB, only the first syntax error is reported: going on costs some hundred bytes of memory
/// for each byte of a file that is no TOML at all.
const SYNTAX_RECOVERY_BYTES_MAX: usize = 1 << 20;
/// The version of a policy that was just read; whoever reloads a file counts up from here.
pub const FIRST_VERSION: u64 = 1;

/// Why a policy file gives no policy.
#[derive(Debug, Error)]
pub enum ReadError {
    /// The file cannot be read.
    #[error("{}: cannot be read: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// It is a pipe, a device, or a folder.
    #[error("{}: is not a regular file", path.display())]
    NotAFile {
        /// Which.
        path: PathBuf,
    },
    /// The file is too large.
    #[error("{}: larger than {FILE_BYTES_MAX} bytes, the most that a policy file may have", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
    },
    /// The file is not text.
    #[error("{}:{line}: not UTF-8 text", path.display())]
    NotUtf8 {
        /// The file.
        path: PathBuf,
        /// The line of the first byte that is not UTF-8, from 1.
        line: usize,
    },
    /// The file says something that cannot be meant.
    #[error(transparent)]
    Problems(#[from] Problems),
}

/// Reads a policy file.
///
/// # Errors
///
/// See [`ReadError`].
pub fn read(path: &Path) -> Result<Policy, ReadError> {
    let io_error = |source| ReadError::Io { path: path.into(), source };
    let mut bytes = Vec::new();
    // A pipe would make us wait for somebody to write to it, with everything else that this thread has to do.
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(io_error)?;
    if !file.metadata().map_err(io_error)?.is_file() {
        return Err(ReadError::NotAFile { path: path.into() });
    }
    // One byte more than allowed tells a file that is too large, whatever its metadata says.
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(io_error)?;
    parse_bytes(bytes, path)
}

/// As [`read`], of what was read from this file.
///
/// # Errors
///
/// See [`ReadError`].
pub fn parse_bytes(bytes: Vec<u8>, path: &Path) -> Result<Policy, ReadError> {
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(ReadError::TooLarge { path: path.into() });
    }
    let text = String::from_utf8(bytes).map_err(|error| {
        let before = &error.as_bytes()[..error.utf8_error().valid_up_to()];
        let line = 1 + before.iter().filter(|&&byte| byte == b'\n').count();
        ReadError::NotUtf8 { path: path.into(), line }
    })?;
    Ok(parse(&text, &path.display().to_string())?)
}

/// Parses the text of a policy file. `source_name` is what problems call it.
///
/// # Errors
///
/// Every problem of the file.
pub fn parse(text: &str, source_name: &str) -> Result<Policy, Problems> {
    let root = match DeTable::parse(text) {
        Ok(root) => root.into_inner(),
        Err(first) => return Err(located(syntax_errors(text, first), text, source_name, &DeTable::new())),
    };
    let mut problems = Collector::default();
    let policy = entries::policy(&root, FIRST_VERSION, &mut problems);
    if let Some(policy) = &policy {
        report_findings(policy, &root, &mut problems);
    }
    match policy {
        Some(policy) if problems.is_empty() => Ok(policy),
        _ => Err(located(problems, text, source_name, &root)),
    }
}

/// Parses the text of a policy file that is to be part of a policy: what its rules and overrides must satisfy together with
/// others is not looked at, which is for [`crate::stored::check()`] once they are together.
///
/// # Errors
///
/// Every problem of the file.
pub fn parse_part(text: &str, source_name: &str) -> Result<Policy, Problems> {
    let root = match DeTable::parse(text) {
        Ok(root) => root.into_inner(),
        Err(first) => return Err(located(syntax_errors(text, first), text, source_name, &DeTable::new())),
    };
    let mut problems = Collector::default();
    match entries::policy(&root, FIRST_VERSION, &mut problems) {
        Some(policy) if problems.is_empty() => Ok(policy),
        _ => Err(located(problems, text, source_name, &root)),
    }
}

/// What is wrong with a rule or override that did not come in a file.
pub(crate) struct FieldProblem {
    /// The field.
    pub(crate) field: Field,
    /// What is wrong.
    pub(crate) message: String,
    /// What to write instead.
    pub(crate) suggestion: Option<String>,
}

/// Parses the text of one rule or override without checking it: what it must satisfy together with others is not to be
/// seen here.
pub(crate) fn parse_alone(text: &str) -> Result<Policy, Vec<FieldProblem>> {
    let problem = |field, message: String, suggestion| FieldProblem { field, message, suggestion };
    let root = match DeTable::parse(text) {
        Ok(root) => root.into_inner(),
        Err(error) => return Err(vec![problem(Field::default(), error.message().into(), None)]),
    };
    let mut problems = Collector::default();
    let policy = entries::policy(&root, FIRST_VERSION, &mut problems);
    match policy {
        Some(policy) if problems.is_empty() => Ok(policy),
        _ => {
            let (found, _) = problems.into_sorted();
            let found = found.into_iter();
            Err(found
                .map(|found| problem(found.place.field, found.refusal.message, found.refusal.suggestion))
                .collect())
        }
    }
}

/// The fields of a `[[rule]]` or `[[override]]`, in the order in which people write them.
pub(crate) fn fields_of(section: &str) -> &'static [&'static str] {
    entries::fields_of(section)
}

/// All syntax errors of a file that is small enough to look for them, or else the first.
fn syntax_errors(text: &str, first: toml::de::Error) -> Collector {
    let errors = match text.len() {
        0..=SYNTAX_RECOVERY_BYTES_MAX => DeTable::parse_recoverable(text).1,
        _ => vec![first],
    };
    let mut problems = Collector::default();
    for error in errors {
        let offset = error.span().map_or(0, |span| span.start);
        problems.report(offset, Place::new(Item::Policy), Refusal::new(error.message()));
    }
    problems
}

fn report_findings(policy: &Policy, root: &DeTable<'_>, problems: &mut Collector) {
    for finding in check::check(policy) {
        let Finding { item, field, message, suggestion, related } = finding;
        let about_placeholder = problems.is_refused(item, &field)
            || related.as_ref().is_some_and(|(item, field)| problems.is_refused(*item, field));
        if !about_placeholder {
            let offset = offset_of(root, item, &field);
            let related = related.filter(|(other, _)| *other != item);
            let related = related.map(|(item, field)| offset_of(root, item, &field));
            problems.report_related(offset, Place { item, field }, Refusal { message, suggestion }, related);
        }
    }
}

/// Where a field, or as much of the way to it as there is, begins.
fn offset_of(root: &DeTable<'_>, item: Item, field: &Field) -> usize {
    let Some(value) = value_of(root, item) else {
        return 0;
    };
    let mut value = value;
    for step in field.steps() {
        let inner = match step {
            Step::Key(name) => value.get_ref().get(name.as_ref()),
            Step::Index(index) => value.get_ref().get(*index),
        };
        let Some(inner) = inner else {
            break;
        };
        value = inner;
    }
    value.span().start
}

fn value_of<'a, 'i>(root: &'a DeTable<'i>, item: Item) -> Option<&'a table::Value<'i>> {
    match item {
        Item::Policy => None,
        Item::Rule(index) => root.get("rule")?.get_ref().get(index),
        Item::Override(index) => root.get("override")?.get_ref().get(index),
    }
}

/// The rule or override as people find it.
fn subject(root: &DeTable<'_>, item: Item) -> String {
    let named = |field| value_of(root, item)?.get_ref().get(field)?.get_ref().as_str().filter(|name| !name.is_empty());
    match (item, named("name"), named("rule")) {
        (Item::Policy, ..) => String::new(),
        (Item::Rule(_), Some(name), _) => format!("rule {}", quoted(name)),
        (Item::Override(_), _, Some(rule)) => format!("override of {}", quoted(rule)),
        _ => item.to_string(),
    }
}

fn located(problems: Collector, text: &str, source_name: &str, root: &DeTable<'_>) -> Problems {
    let (found, more) = problems.into_sorted();
    let (lines, source) = (Lines::new(text), Arc::<str>::from(source_name));
    let located = found.into_iter().map(|Found { offset, place, refusal, related }| Problem {
        source: Arc::clone(&source),
        line: lines.line(offset),
        column: lines.column(offset),
        item: place.item,
        subject: subject(root, place.item),
        field: place.field,
        message: match related {
            Some(related) => format!("{}, see line {}", refusal.message, lines.line(related)),
            None => refusal.message,
        },
        suggestion: refusal.suggestion,
    });
    Problems::new(located.collect(), more)
}
