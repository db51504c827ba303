//! A policy file (TOML) into the model, with every problem of the file reported at once.
//!
//! The file is first parsed into values that know where they stand. Then each table is read field by field: what
//! cannot be read is noted and reading goes on, so that one run shows everything. What could be read goes through
//! [`check`](mod@crate::check), and its findings get the line of their field.

use std::{collections::HashMap, fmt, io, ops::Range, path::Path};

use jiff::Timestamp;
use thiserror::Error;
use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

use crate::{
    check::{self, Place, nearest},
    model::{
        Allowance, Hot, Lease, Limit, Mode, OnFailure, Override, Pattern, Policy, Quota, QuotaPeriod, ROLLOUT_BP_ALL,
        Rule,
    },
};

/// The largest file that is read, in bytes.
pub const FILE_BYTES_MAX: u64 = 256 * 1024 * 1024;
/// Problems that are listed; beyond, only their number is told.
pub const PROBLEMS_LISTED_MAX: usize = 100;

const RULE_FIELDS: &[&str] = &[
    "name", "match", "match_all", "per", "limit", "quota", "deny", "exempt", "mode", "rollout_pct", "on_failure",
    "local", "hot",
];
const OVERRIDE_FIELDS: &[&str] = &["rule", "identity", "limit", "quota", "deny", "exempt", "expires"];

/// One thing that is wrong with a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The line, from 1; 0 where none can be named.
    pub line: usize,
    /// The rule or override it is in, such as `rule "login"`; empty for none.
    pub owner: String,
    /// The field, such as `limit.capacity`; empty for none.
    pub field: String,
    /// What is wrong.
    pub message: String,
    /// What was probably meant.
    pub suggestion: Option<String>,
}

/// Everything that is wrong with a file.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub struct Problems {
    /// The file's name.
    pub source_name: String,
    /// At most [`PROBLEMS_LISTED_MAX`], in the order of their lines.
    pub list: Vec<Problem>,
    /// How many more there are.
    pub more: usize,
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, problem) in self.list.iter().enumerate() {
            let separator = if at == 0 { "" } else { "\n" };
            write!(f, "{separator}{}", self.source_name)?;
            if problem.line > 0 {
                write!(f, ":{}", problem.line)?;
            }
            for part in [&problem.owner, &problem.field].into_iter().filter(|part| !part.is_empty()) {
                write!(f, ": {part}")?;
            }
            write!(f, ": {}", problem.message)?;
            if let Some(suggestion) = &problem.suggestion {
                write!(f, " (did you mean {suggestion}?)")?;
            }
        }
        if self.more > 0 {
            write!(f, "\n{}: and {} more", self.source_name, self.more)?;
        }
        Ok(())
    }
}

/// Reads a policy file. Its version is 0; whoever puts it in force numbers it.
///
/// # Errors
///
/// Everything that is wrong with the file, or why it could not be read.
pub fn read(path: &Path) -> Result<Policy, Problems> {
    let name = path.display().to_string();
    let load = || -> io::Result<String> {
        let len = std::fs::metadata(path)?.len();
        if len > FILE_BYTES_MAX {
            return Err(io::Error::other(format!("the file has {len} bytes; the most is {FILE_BYTES_MAX}")));
        }
        std::fs::read_to_string(path)
    };
    match load() {
        Ok(text) => parse(&text, &name),
        Err(error) => {
            let mut reader = Reader::new("");
            reader.note(None, "", format!("cannot be read: {error}"), None);
            Err(reader.problems(&name))
        }
    }
}

/// Reads the text of a policy file.
///
/// # Errors
///
/// Everything that is wrong with it.
pub fn parse(text: &str, source_name: &str) -> Result<Policy, Problems> {
    let mut reader = Reader::new(text);
    if text.trim().is_empty() {
        // An editor or a copy caught half-way leaves an empty file; that must not switch all limits off.
        reader.note(None, "", "the file is empty; a comment makes a policy without rules".into(), None);
        return Err(reader.problems(source_name));
    }
    let root = match DeTable::parse(text) {
        Ok(root) => root.into_inner(),
        Err(error) => {
            reader.note(error.span(), "", error.message().to_owned(), None);
            return Err(reader.problems(source_name));
        }
    };
    let policy = reader.policy(&root);
    if reader.list.is_empty() { Ok(policy) } else { Err(reader.problems(source_name)) }
}

/// Where the fields of a rule or an override stand.
#[derive(Default)]
struct Stand {
    owner: String,
    fields: HashMap<String, Range<usize>>,
    whole: Range<usize>,
}

struct Reader<'t> {
    text: &'t str,
    line_starts: Vec<usize>,
    list: Vec<Problem>,
    stand: Stand,
}

type Value<'t> = Spanned<DeValue<'t>>;

impl<'t> Reader<'t> {
    fn new(text: &'t str) -> Self {
        let breaks = text.bytes().enumerate().filter(|(_, byte)| *byte == b'\n').map(|(at, _)| at + 1);
        let line_starts = std::iter::once(0).chain(breaks).collect();
        Self { text, line_starts, list: Vec::new(), stand: Stand::default() }
    }

    fn note(&mut self, span: Option<Range<usize>>, field: &str, message: String, suggestion: Option<String>) {
        let line = span.map_or(0, |span| self.line_starts.partition_point(|&start| start <= span.start));
        let owner = self.stand.owner.clone();
        self.list.push(Problem { line, owner, field: field.into(), message, suggestion });
    }

    fn problems(mut self, source_name: &str) -> Problems {
        self.list.sort_by_key(|problem| problem.line);
        let more = self.list.len().saturating_sub(PROBLEMS_LISTED_MAX);
        self.list.truncate(PROBLEMS_LISTED_MAX);
        Problems { source_name: source_name.into(), list: self.list, more }
    }

    fn policy(&mut self, root: &DeTable<'t>) -> Policy {
        self.refuse_unknown(root, "", &["rule", "override"]);
        let mut stands = HashMap::new();
        let mut policy = Policy::default();
        for (index, table) in self.tables(root, "rule").into_iter().enumerate() {
            self.stand = Stand { owner: format!("rule {}", index + 1), whole: table.span(), ..Stand::default() };
            let rule = self.rule(table.get_ref());
            stands.insert(Place::Rule(index), std::mem::take(&mut self.stand));
            policy.rules.push(rule);
        }
        for (index, table) in self.tables(root, "override").into_iter().enumerate() {
            self.stand = Stand { owner: format!("override {}", index + 1), whole: table.span(), ..Stand::default() };
            let over = self.overriding(table.get_ref());
            stands.insert(Place::Override(index), std::mem::take(&mut self.stand));
            policy.overrides.push(over);
        }
        // A policy with unreadable parts would be checked with made-up values, and blamed for them.
        if self.list.is_empty() {
            self.check(&policy, &mut stands);
        }
        policy
    }

    fn check(&mut self, policy: &Policy, stands: &mut HashMap<Place, Stand>) {
        for finding in check::check(policy) {
            self.stand = stands.remove(&finding.place).unwrap_or_default();
            let known = |field: &str| self.stand.fields.get(field).cloned();
            let parent = finding.field.rsplit_once('.').and_then(|(parent, _)| known(parent));
            let span = known(&finding.field).or(parent).unwrap_or_else(|| self.stand.whole.clone());
            let span = (finding.place != Place::Policy).then_some(span);
            self.note(span, &finding.field, finding.message, finding.suggestion);
            let stand = std::mem::take(&mut self.stand);
            stands.insert(finding.place, stand);
        }
    }

    /// The tables of `[[name]]`.
    fn tables<'a>(&mut self, root: &'a DeTable<'t>, name: &str) -> Vec<Spanned<&'a DeTable<'t>>> {
        let Some(value) = root.get(name) else { return Vec::new() };
        let DeValue::Array(array) = value.get_ref() else {
            self.wrong(value, name, &format!("tables, each under [[{name}]]"));
            return Vec::new();
        };
        let mut tables = Vec::new();
        for item in array.iter() {
            match item.get_ref() {
                DeValue::Table(table) => tables.push(Spanned::new(item.span(), table)),
                _ => self.wrong(item, name, "a table"),
            }
        }
        tables
    }

    fn rule(&mut self, table: &DeTable<'t>) -> Rule {
        if let Some(name) = table.get("name").and_then(|value| value.get_ref().as_str()) {
            self.stand.owner = format!("rule {name:?}");
        }
        self.refuse_unknown(table, "", RULE_FIELDS);
        let name = self.required(table, "name").and_then(|value| self.string(value, "name")).unwrap_or_default();
        let allowance = self.allowance(table, &["limit", "quota", "deny", "exempt"]);
        Rule {
            name,
            matches: self.field(table, "match").map(|value| self.matches(value)).unwrap_or_default(),
            match_all: self.field(table, "match_all").and_then(|value| self.boolean(value, "match_all")).unwrap_or(false),
            per: self.field(table, "per").map(|value| self.strings(value, "per")).unwrap_or_default(),
            allowance,
            mode: self.choice(table, "mode", &[("enforce", Mode::Enforce), ("shadow", Mode::Shadow), ("off", Mode::Off)]),
            rollout_bp: self.field(table, "rollout_pct").map_or(ROLLOUT_BP_ALL, |value| self.rollout(value)),
            on_failure: self.choice(
                table,
                "on_failure",
                &[("open", OnFailure::Open), ("closed", OnFailure::Closed), ("local", OnFailure::Local)],
            ),
            local: self.field(table, "local").map(|value| self.limit(value, "local")),
            hot: self.field(table, "hot").map(|value| self.hot(value)).unwrap_or_default(),
        }
    }

    fn overriding(&mut self, table: &DeTable<'t>) -> Override {
        self.refuse_unknown(table, "", OVERRIDE_FIELDS);
        let rule = self.required(table, "rule").and_then(|value| self.string(value, "rule")).unwrap_or_default();
        let identity = self.required(table, "identity").map(|value| self.strings(value, "identity"));
        Override {
            rule,
            identity: identity.unwrap_or_default(),
            allowance: self.allowance(table, &["limit", "quota", "deny", "exempt"]),
            expires: self.field(table, "expires").and_then(|value| self.timestamp(value, "expires")),
        }
    }

    /// Exactly one of the ways to say what is allowed.
    fn allowance(&mut self, table: &DeTable<'t>, ways: &[&str]) -> Allowance {
        let given: Vec<&str> = ways.iter().copied().filter(|way| table.contains_key(*way)).collect();
        if given.len() != 1 {
            let said = if given.is_empty() { "none is there".into() } else { format!("{} are", given.join(" and ")) };
            let whole = self.stand.whole.clone();
            self.note(Some(whole), "", format!("needs exactly one of {}; {said}", ways.join(", ")), None);
            return Allowance::Exempt;
        }
        let way = given[0];
        let Some(value) = self.field(table, way) else { return Allowance::Exempt };
        match way {
            "limit" => Allowance::Limit(self.limit(value, "limit")),
            "quota" => Allowance::Quota(self.quota(value)),
            _ => {
                if self.boolean(value, way) == Some(false) {
                    self.note(Some(value.span()), way, "can only be true; leave it out otherwise".into(), None);
                }
                if way == "deny" { Allowance::Deny } else { Allowance::Exempt }
            }
        }
    }

    fn limit(&mut self, value: &Value<'t>, name: &str) -> Limit {
        // Stands in for what could not be read; the policy is refused anyway.
        let mut limit = Limit { capacity: 1, refill: 1, period_ms: 1000 };
        let Some(table) = self.table(value, name) else { return limit };
        self.refuse_unknown(table, name, &["capacity", "refill", "period"]);
        for (field, into) in [("capacity", &mut limit.capacity), ("refill", &mut limit.refill)] {
            let path = format!("{name}.{field}");
            if let Some(number) = self.required_in(value, table, field, &path).and_then(|v| self.integer(v, &path)) {
                *into = number;
            }
        }
        let path = format!("{name}.period");
        if let Some(period_ms) = self.required_in(value, table, "period", &path).and_then(|v| self.duration(v, &path)) {
            limit.period_ms = period_ms;
        }
        limit
    }

    fn quota(&mut self, value: &Value<'t>) -> Quota {
        let mut quota = Quota { amount: 1, every: QuotaPeriod::Day, billed: false };
        let Some(table) = self.table(value, "quota") else { return quota };
        self.refuse_unknown(table, "quota", &["amount", "every", "billed"]);
        if let Some(amount) =
            self.required_in(value, table, "amount", "quota.amount").and_then(|v| self.integer(v, "quota.amount"))
        {
            quota.amount = amount;
        }
        if let Some(every) = self.required_in(value, table, "every", "quota.every") {
            let ways = [("day", QuotaPeriod::Day), ("month", QuotaPeriod::Month)];
            quota.every = self.one_of(every, "quota.every", &ways).unwrap_or(QuotaPeriod::Day);
        }
        if let Some(billed) = table.get("billed") {
            quota.billed = self.boolean(billed, "quota.billed").unwrap_or(false);
        }
        quota
    }

    fn matches(&mut self, value: &Value<'t>) -> std::collections::BTreeMap<String, Pattern> {
        let Some(table) = self.table(value, "match") else { return Default::default() };
        let mut matches = std::collections::BTreeMap::new();
        for (name, value) in table {
            let path = format!("match.{}", name.get_ref());
            self.stand.fields.insert(path.clone(), value.span());
            if let Some(text) = self.string(value, &path)
                && let Some(pattern) = self.pattern(value, &path, &text)
            {
                matches.insert(name.get_ref().clone().into_owned(), pattern);
            }
        }
        matches
    }

    fn pattern(&mut self, value: &Value<'t>, path: &str, text: &str) -> Option<Pattern> {
        match text.split_once('*') {
            None => Some(Pattern::Exact(text.into())),
            Some(("", "")) => Some(Pattern::Present),
            Some((prefix, "")) => Some(Pattern::Prefix(prefix.into())),
            Some(_) => {
                let message = "`*` can only stand at the end (a prefix) or alone (any value)";
                self.note(Some(value.span()), path, message.into(), None);
                None
            }
        }
    }

    fn rollout(&mut self, value: &Value<'t>) -> u16 {
        let text = match value.get_ref() {
            DeValue::Integer(number) => number.as_str(),
            DeValue::Float(number) => number.as_str(),
            _ => {
                self.wrong(value, "rollout_pct", "a number");
                return 0;
            }
        };
        let share = text.replace('_', "").parse::<f64>().ok().map(|pct| pct * 100.0);
        match share {
            // In 0..=10,000 and whole to within what two decimals can be off in binary.
            Some(share) if (0.0..=10_000.0).contains(&share) && (share - share.round()).abs() < 1e-6 => {
                share.round() as u16
            }
            _ => {
                let message = "must be from 0 to 100 in steps of 0.01";
                self.note(Some(value.span()), "rollout_pct", message.into(), None);
                0
            }
        }
    }

    fn hot(&mut self, value: &Value<'t>) -> Hot {
        let mut hot = Hot::default();
        let Some(table) = self.table(value, "hot") else { return hot };
        self.refuse_unknown(table, "hot", &["lease", "split", "sample"]);
        if let Some(lease) = table.get("lease") {
            self.stand.fields.insert("hot.lease".into(), lease.span());
            hot.lease = match lease.get_ref() {
                DeValue::Integer(_) => self.small(lease, "hot.lease").map(Lease::Batch).unwrap_or_default(),
                _ => self
                    .one_of(lease, "hot.lease", &[("auto", Lease::Auto), ("off", Lease::Off)])
                    .unwrap_or_default(),
            };
        }
        for (field, into) in [("split", &mut hot.split), ("sample", &mut hot.sample)] {
            if let Some(value) = table.get(field) {
                let path = format!("hot.{field}");
                self.stand.fields.insert(path.clone(), value.span());
                *into = self.small(value, &path);
            }
        }
        hot
    }

    // What follows reads one value and notes what it is not.

    fn field<'a>(&mut self, table: &'a DeTable<'t>, name: &str) -> Option<&'a Value<'t>> {
        let value = table.get(name)?;
        self.stand.fields.insert(name.into(), value.span());
        Some(value)
    }

    fn required<'a>(&mut self, table: &'a DeTable<'t>, name: &str) -> Option<&'a Value<'t>> {
        let value = self.field(table, name);
        if value.is_none() {
            let whole = self.stand.whole.clone();
            self.note(Some(whole), name, "is missing".into(), None);
        }
        value
    }

    fn required_in<'a>(
        &mut self,
        parent: &Value<'t>,
        table: &'a DeTable<'t>,
        name: &str,
        path: &str,
    ) -> Option<&'a Value<'t>> {
        let value = table.get(name);
        match value {
            Some(value) => {
                self.stand.fields.insert(path.into(), value.span());
            }
            None => self.note(Some(parent.span()), path, "is missing".into(), None),
        }
        value
    }

    fn refuse_unknown(&mut self, table: &DeTable<'t>, parent: &str, known: &[&str]) {
        for key in table.keys() {
            let name: &str = key.get_ref();
            if !known.contains(&name) {
                let path = if parent.is_empty() { name.to_owned() } else { format!("{parent}.{name}") };
                let suggestion = nearest(name, known.iter().copied()).map(|near| format!("`{near}`"));
                let message = match suggestion {
                    Some(_) => "unknown field".to_owned(),
                    None => format!("unknown field; there are {}", known.join(", ")),
                };
                self.note(Some(key.span()), &path, message, suggestion);
            }
        }
    }

    fn wrong(&mut self, value: &Value<'t>, field: &str, expected: &str) {
        let found = value.get_ref().type_str();
        self.note(Some(value.span()), field, format!("must be {expected}, not {}", article(found)), None);
    }

    fn table<'a>(&mut self, value: &'a Value<'t>, field: &str) -> Option<&'a DeTable<'t>> {
        match value.get_ref() {
            DeValue::Table(table) => Some(table),
            _ => {
                self.wrong(value, field, "a table such as { name = value }");
                None
            }
        }
    }

    fn string(&mut self, value: &Value<'t>, field: &str) -> Option<String> {
        match value.get_ref() {
            DeValue::String(text) => Some(text.clone().into_owned()),
            _ => {
                self.wrong(value, field, "a string");
                None
            }
        }
    }

    fn strings(&mut self, value: &Value<'t>, field: &str) -> Vec<String> {
        match value.get_ref() {
            DeValue::Array(array) => array.iter().filter_map(|item| self.string(item, field)).collect(),
            _ => {
                self.wrong(value, field, "an array of strings");
                Vec::new()
            }
        }
    }

    fn boolean(&mut self, value: &Value<'t>, field: &str) -> Option<bool> {
        match value.get_ref() {
            DeValue::Boolean(flag) => Some(*flag),
            _ => {
                self.wrong(value, field, "true or false");
                None
            }
        }
    }

    fn integer(&mut self, value: &Value<'t>, field: &str) -> Option<u64> {
        let DeValue::Integer(number) = value.get_ref() else {
            self.wrong(value, field, "a whole number");
            return None;
        };
        let parsed = u64::from_str_radix(number.as_str().trim_start_matches('+'), number.radix());
        if parsed.is_err() {
            self.note(Some(value.span()), field, format!("{} is out of range", number.as_str()), None);
        }
        parsed.ok()
    }

    fn small(&mut self, value: &Value<'t>, field: &str) -> Option<u32> {
        let number = self.integer(value, field)?;
        let small = u32::try_from(number).ok();
        if small.is_none() {
            self.note(Some(value.span()), field, format!("{number} is out of range"), None);
        }
        small
    }

    fn choice<T: Copy + Default>(&mut self, table: &DeTable<'t>, field: &str, ways: &[(&str, T)]) -> T {
        self.field(table, field).and_then(|value| self.one_of(value, field, ways)).unwrap_or_default()
    }

    fn one_of<T: Copy>(&mut self, value: &Value<'t>, field: &str, ways: &[(&str, T)]) -> Option<T> {
        let text = self.string(value, field)?;
        if let Some((_, way)) = ways.iter().find(|(name, _)| *name == text) {
            return Some(*way);
        }
        let names: Vec<&str> = ways.iter().map(|(name, _)| *name).collect();
        let suggestion = nearest(&text, names.iter().copied()).map(|near| format!("{near:?}"));
        self.note(Some(value.span()), field, format!("{text:?} is none of {}", names.join(", ")), suggestion);
        None
    }

    fn duration(&mut self, value: &Value<'t>, field: &str) -> Option<u64> {
        if let DeValue::Integer(number) = value.get_ref() {
            let suggestion = Some(format!("\"{}s\"", number.as_str()));
            self.note(Some(value.span()), field, "needs a unit: ms, s, m, h or d".into(), suggestion);
            return None;
        }
        let text = self.string(value, field)?;
        let parsed = parse_duration_ms(&text);
        if parsed.is_none() {
            let message = format!("{text:?} is not a duration such as \"500ms\", \"10s\", \"1m30s\", \"1h\" or \"7d\"");
            self.note(Some(value.span()), field, message, None);
        }
        parsed
    }

    fn timestamp(&mut self, value: &Value<'t>, field: &str) -> Option<Timestamp> {
        let text = match value.get_ref() {
            DeValue::Datetime(_) => self.text[value.span()].to_owned(),
            DeValue::String(text) => text.clone().into_owned(),
            _ => {
                self.wrong(value, field, "a date and time");
                return None;
            }
        };
        let parsed = text.parse().ok();
        if parsed.is_none() {
            let message = format!("{text:?} is not a moment such as \"2027-01-01T00:00:00Z\" (with an offset)");
            self.note(Some(value.span()), field, message, None);
        }
        parsed
    }
}

fn article(noun: &str) -> String {
    let vowel = noun.starts_with(['a', 'e', 'i', 'o', 'u']);
    format!("{} {noun}", if vowel { "an" } else { "a" })
}

/// `1m30s` as milliseconds: numbers with the units d, h, m, s, ms, each at most once and from large to small.
fn parse_duration_ms(text: &str) -> Option<u64> {
    const UNITS: [(&str, u64); 5] = [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)];
    let mut total_ms: u64 = 0;
    let mut rest = text;
    let mut units = UNITS.iter();
    while !rest.is_empty() {
        let digits = rest.find(|character: char| !character.is_ascii_digit())?;
        let number: u64 = rest[..digits].parse().ok()?;
        rest = &rest[digits..];
        let len = rest.find(|character: char| character.is_ascii_digit()).unwrap_or(rest.len());
        let (_, unit_ms) = units.find(|(name, _)| *name == &rest[..len])?;
        rest = &rest[len..];
        total_ms = total_ms.checked_add(number.checked_mul(*unit_ms)?)?;
    }
    (!text.is_empty()).then_some(total_ms)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations() {
        let read = ["500ms", "1s", "1m30s", "7d", "1h1ms"].map(parse_duration_ms);
        assert_eq!(read, [Some(500), Some(1000), Some(90_000), Some(604_800_000), Some(3_600_001)]);
        for wrong in ["", "5", "s", "1s1m", "1s1s", "1 s", "-1s", "1.5s", "99999999999999999999s", "1w"] {
            assert_eq!(parse_duration_ms(wrong), None, "{wrong:?}");
        }
    }
}
