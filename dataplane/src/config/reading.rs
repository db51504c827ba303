//! A config file (TOML) into settings, with every problem of the file reported at once.
//!
//! serde stops at the first value that it cannot take. So that one is reported and removed from the parsed file, and the
//! rest is read again, until all of it is taken. Then the values are checked against their bounds.

use serde::Deserialize;
use toml::{
    Spanned,
    de::{DeTable, DeValue, Deserializer, Error},
};

use super::{
    Settings,
    bounds::{self, Violation},
    problem::{ConfigError, Problem},
};

/// The most problems that are looked for.
const PROBLEMS_MAX: usize = 100;
/// A suggestion must be at least this similar to what was written, 0..=1.
const SIMILARITY_MIN: f64 = 0.7;
/// The one setting whose number is easily written in the wrong base.
const UNIX_MODE: &str = "resp.unix_mode";

pub(super) fn parse(text: &str, source: &str) -> Result<Settings, ConfigError> {
    let file = File { text, source };
    let (root, mut syntax) = DeTable::parse_recoverable(text);
    if !syntax.is_empty() {
        syntax.sort_by_key(offset);
        let problem = |error: &Error| file.problem(offset(error), String::new(), one_line(error.message()), None);
        return Err(ConfigError { problems: syntax.iter().take(PROBLEMS_MAX).map(problem).collect() });
    }
    let root = root.into_inner();
    let mut rest = root.clone();
    // (where in the file, what is wrong there)
    let mut found: Vec<(usize, Problem)> = Vec::new();
    let mut settings = None;
    while settings.is_none() && found.len() < PROBLEMS_MAX {
        match Settings::deserialize(Deserializer::from(Spanned::new(0..text.len(), rest.clone()))) {
            Ok(read) => settings = Some(read),
            Err(error) => {
                let at = offset(&error);
                let path = path_at(&rest, at).unwrap_or_default();
                found.push((at, file.refused(&error, &path)));
                if !remove(&mut rest, &path) {
                    break;
                }
            }
        }
    }
    let octal = decimal_mode(&root);
    // A value that was refused has its default now, which is within its bounds.
    for violation in settings.iter().flat_map(bounds::violations) {
        if octal.is_none() || violation.setting != UNIX_MODE {
            let at = offset_of(&root, violation.setting);
            found.push((at, file.problem(at, violation.setting.into(), violation.message, None)));
        }
    }
    if let Some(digits) = octal {
        let at = offset_of(&root, UNIX_MODE);
        let message = "permissions are written in octal".to_owned();
        found.push((at, file.problem(at, UNIX_MODE.into(), message, Some(format!("write 0o{digits}")))));
    }
    found.sort_by_key(|&(at, _)| at);
    match settings {
        Some(settings) if found.is_empty() => Ok(settings),
        _ => Err(ConfigError { problems: found.into_iter().map(|(_, problem)| problem).collect() }),
    }
}

/// The permissions, where they are a decimal number whose digits were meant as octal ones: 440 is 0o670.
fn decimal_mode(root: &DeTable<'_>) -> Option<String> {
    let resp = root.get("resp")?.get_ref().as_table()?;
    let mode = resp.get("unix_mode")?.get_ref().as_integer()?;
    let is_octal = |digits: &str| digits.bytes().all(|byte| matches!(byte, b'0'..=b'7'));
    (mode.radix() == 10 && mode.as_str() != "0" && is_octal(mode.as_str())).then(|| mode.as_str().to_owned())
}

/// Problems that were found otherwise, in the order of the lines of this text.
pub(super) fn placed(text: &str, source: &str, violations: Vec<Violation>) -> Vec<Problem> {
    let (root, file) = (DeTable::parse_recoverable(text).0.into_inner(), File { text, source });
    let mut found: Vec<_> = violations.into_iter().map(|one| (offset_of(&root, one.setting), one)).collect();
    found.sort_by_key(|&(at, _)| at);
    found.into_iter().map(|(at, one)| file.problem(at, one.setting.into(), one.message, None)).collect()
}

struct File<'t> {
    text: &'t str,
    source: &'t str,
}

impl File<'_> {
    fn problem(&self, offset: usize, setting: String, message: String, suggestion: Option<String>) -> Problem {
        let before = &self.text.as_bytes()[..offset.min(self.text.len())];
        let line = 1 + before.iter().filter(|&&byte| byte == b'\n').count();
        Problem { place: Some((self.source.to_owned(), line)), setting, message, suggestion }
    }

    /// What serde says of a value, for people who do not know Rust.
    fn refused(&self, error: &Error, path: &[String]) -> Problem {
        let message = one_line(error.message());
        let setting = path.join(".");
        if let Some(choices) = message.strip_prefix("unknown field ") {
            let mut words = choices.split('`').skip(1).step_by(2);
            let written = words.next().unwrap_or_default();
            let known: Vec<&str> = words.collect();
            let suggestion = match nearest(written, &known) {
                _ if matches!(setting.as_str(), "rule" | "override") => {
                    "rules and overrides stand in a policy file of their own; name it with policy = \"FILE\"".into()
                }
                Some(name) => format!("did you mean `{name}`?"),
                None => format!("there are {}", known.join(", ")),
            };
            return self.problem(offset(error), setting, "there is no such setting".into(), Some(suggestion));
        }
        let suggestion = message.contains("socket address").then_some(super::ADDRESS_HINT);
        self.problem(offset(error), setting, plain(&message), suggestion.map(Into::into))
    }
}

fn offset(error: &Error) -> usize {
    error.span().map_or(0, |span| span.start)
}

fn one_line(message: &str) -> String {
    message.lines().collect::<Vec<_>>().join(", ")
}

/// Replaces what a type is called in Rust.
fn plain(message: &str) -> String {
    let (what, expected) = message.rsplit_once("expected ").unwrap_or((message, ""));
    match expected {
        "" => message.to_owned(),
        "usize" | "u64" | "u32" | "u16" => format!("{what}expected a whole number"),
        "a boolean" => format!("{what}expected true or false"),
        _ if expected.starts_with("struct ") => format!("{what}expected a section in square brackets"),
        _ => message.to_owned(),
    }
}

/// The most similar name, if one is similar at all.
fn nearest<'a>(written: &str, known: &[&'a str]) -> Option<&'a str> {
    let similar = known.iter().map(|name| (strsim::jaro_winkler(written, name), *name));
    similar.filter(|(score, _)| *score >= SIMILARITY_MIN).max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, name)| name)
}

/// The setting, as the keys that lead to it, whose key or value stands at this place of the file.
fn path_at(table: &DeTable<'_>, offset: usize) -> Option<Vec<String>> {
    for (key, value) in table {
        let name = || key.get_ref().to_string();
        // The inner tables first: the span of a section is its header.
        if let DeValue::Table(inner) = value.get_ref()
            && let Some(path) = path_at(inner, offset)
        {
            return Some([vec![name()], path].concat());
        }
        if key.span().contains(&offset) || value.span().contains(&offset) {
            return Some(vec![name()]);
        }
    }
    None
}

/// Removes a setting; false when it is not there.
fn remove(table: &mut DeTable<'_>, path: &[String]) -> bool {
    match path {
        [] => false,
        [name] => table.remove(name.as_str()).is_some(),
        [name, rest @ ..] => match table.get_mut(name.as_str()).map(Spanned::get_mut) {
            Some(DeValue::Table(inner)) => remove(inner, rest),
            _ => false,
        },
    }
}

/// Where a setting, or as much of the way to it as there is, stands in the file.
fn offset_of(table: &DeTable<'_>, setting: &str) -> usize {
    let (name, rest) = setting.split_once('.').unwrap_or((setting, ""));
    match table.get(name) {
        None => 0,
        Some(value) => match value.get_ref() {
            DeValue::Table(inner) if !rest.is_empty() => offset_of(inner, rest).max(value.span().start),
            _ => value.span().start,
        },
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;

    fn problems(text: &str) -> Vec<String> {
        parse(text, "c.toml").err().into_iter().flat_map(|error| error.problems).map(|one| one.to_string()).collect()
    }

    #[test]
    fn everything_that_is_wrong_is_told_with_its_line() {
        let text = "\
cores = -1
polcy = \"a\"
[resp]
listen = \"localhost\"
args_maximum = 3
share_port = 1
arg_bytes_max = \"many\"
[transport]
kind = \"tcp\"
ring_buffers = 100
[ops]
connections_max = 0
[logging]
";
        let expected = [
            "c.toml:1: cores: invalid value: integer `-1`, expected a count such as 2 (0 = all) or a list of core numbers \
             such as [0, 2]",
            "c.toml:2: polcy: there is no such setting (did you mean `policy`?)",
            "c.toml:4: resp.listen: invalid socket address syntax (write it as \"127.0.0.1:6390\" or \"[::1]:6390\")",
            "c.toml:5: resp.args_maximum: there is no such setting (did you mean `args_max`?)",
            "c.toml:6: resp.share_port: invalid type: integer `1`, expected true or false",
            "c.toml:7: resp.arg_bytes_max: invalid type: string \"many\", expected a whole number",
            "c.toml:9: transport.kind: unknown variant `tcp`, expected one of `auto`, `ring`, `plain`",
            "c.toml:10: transport.ring_buffers: must be a power of two from 16 to 32768, not 100",
            "c.toml:12: ops.connections_max: must be from 1 to 4096, not 0",
            "c.toml:13: logging: there is no such setting (did you mean `log`?)",
        ];
        assert_eq!(problems(text), expected);
    }

    #[test]
    fn permissions_are_octal() {
        for (written, meant) in [("660", "0o660"), ("440", "0o440")] {
            let found = problems(&format!("[resp]\nunix_mode = {written}\n"));
            let expected = format!("c.toml:2: resp.unix_mode: permissions are written in octal (write {meant})");
            assert_eq!(found, [expected]);
        }
        assert!(problems("[resp]\nunix_mode = 0o600\n").is_empty());
    }

    #[test]
    fn rules_are_sent_to_their_own_file() {
        let found = problems("cores = 1\n[[rule]]\nname = \"a\"\n");
        assert!(found[0].starts_with("c.toml:2: rule: there is no such setting (rules and overrides"), "{found:?}");
    }

    #[test]
    fn syntax_errors_have_their_line() {
        let found = problems("cores = 1\nx = \n[resp\n");
        assert!(found[0].starts_with("c.toml:2: "), "{found:?}");
        assert!(found.len() > 1 && found.iter().all(|problem| !problem.contains('\n')), "{found:?}");
    }

    #[test]
    fn every_shape_of_a_wrong_value_ends() {
        for text in [
            "resp = 3",
            "[[resp]]\nlisten = 1",
            "resp.listen.port = 1",
            "cores = [1, \"a\"]",
            "resp = { args_max = -1, x = 1 }",
        ] {
            assert!(!problems(text).is_empty(), "{text}");
        }
    }
}
