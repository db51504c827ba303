//! The policy as the store keeps it: of each rule and override a JSON body with the fields that a policy file has for it.
//!
//! What tells which rule or override it is (its [`Key`]) stands beside the body, and not in it. A body is read by the very
//! code that reads a file, so the two have the same fields, bounds and messages; only lines are missing, which a
//! [`Remark`] replaces by the key.
//!
//! A gateway holds a [`StoredPolicy`] and brings it forward by the rows of a fetch, as a whole or not at all.
//! [`last_good`] keeps it on disk.
//!
//! ```
//! use policy_sync::stored::{self, Entry, Key};
//!
//! let key = Key::Rule("login-per-key".into());
//! let body = serde_json::from_str(r#"{"per": ["key"], "limit": {"capacity": 10, "refill": 10, "period": "1m"}}"#)?;
//! let Entry::Rule(rule) = stored::read(&key, &body)? else { unreachable!("the key is a rule's") };
//! assert_eq!(rule.name, "login-per-key");
//! assert_eq!(stored::body_of_rule(&rule), body);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::{error::Error, fmt};

use serde_json::{Map, Value, json};
use toml::{Table, Value as TomlValue};

pub use self::policy::{ApplyError, Row, StoredPolicy, StoredRule};
use crate::{
    check::{self, Finding, Item, quoted, written_duration},
    file::{self, PROBLEMS_MAX},
    model::{
        Allowance, Hot, Lease, Limit, Mode, OnFailure, Override, Pattern, Policy, QuotaPeriod, ROLLOUT_BP_ALL, Rule,
    },
};

pub mod last_good;
mod policy;

/// What a rule or override says, field by field, without what its [`Key`] says.
pub type Body = Map<String, Value>;

/// Which rule or override.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Key {
    /// The rule of this name.
    Rule(String),
    /// The override of this rule, or of all (`*`), for this identity.
    Override {
        /// The rule's name, or `*`.
        rule: String,
        /// The values of the rule's `per` attributes, in the order of `per`.
        identity: Vec<String>,
    },
}

/// What a key and a body make.
#[derive(Clone, Debug, PartialEq)]
pub enum Entry {
    /// A rule.
    Rule(Rule),
    /// An override.
    Override(Override),
}

/// One thing that is wrong with a policy that has no lines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remark {
    /// The rule or override; `None` for the policy as a whole.
    pub key: Option<Key>,
    /// The field of it, as a policy file spells it (`limit.period`); empty for the whole.
    pub field: String,
    /// What is wrong, to be read after the field's name.
    pub message: String,
    /// What to write instead.
    pub suggestion: Option<String>,
}

/// All that is wrong; at least one remark, at most [`PROBLEMS_MAX`], and how many more there are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remarks {
    /// The remarks.
    pub list: Vec<Remark>,
    /// How many more were only counted.
    pub more: usize,
}

impl Remarks {
    fn collect(remarks: impl IntoIterator<Item = Remark>) -> Result<(), Self> {
        let mut all = Self { list: Vec::new(), more: 0 };
        remarks.into_iter().for_each(|remark| all.add(remark));
        if all.list.is_empty() { Ok(()) } else { Err(all) }
    }

    fn add(&mut self, remark: Remark) {
        if self.list.len() < PROBLEMS_MAX {
            self.list.push(remark);
        } else {
            self.more += 1;
        }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rule(name) => write!(f, "rule {}", quoted(name)),
            Self::Override { rule, identity } => {
                let values: Vec<String> = identity.iter().map(|value| quoted(value)).collect();
                write!(f, "override of {} for [{}]", quoted(rule), values.join(", "))
            }
        }
    }
}

impl fmt::Display for Remark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.key {
            Some(key) => write!(f, "{key}: ")?,
            None => f.write_str("policy: ")?,
        }
        if !self.field.is_empty() {
            write!(f, "{}: ", self.field)?;
        }
        f.write_str(&self.message)?;
        match &self.suggestion {
            Some(suggestion) => write!(f, " ({suggestion})"),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Remarks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, remark) in self.list.iter().enumerate() {
            let newline = if index > 0 { "\n" } else { "" };
            write!(f, "{newline}{remark}")?;
        }
        match self.more {
            0 => Ok(()),
            more => write!(f, "\nand {more} more"),
        }
    }
}

impl Error for Remarks {}

/// Reads one rule or override. What it must satisfy together with the others, and its bounds, are for [`check()`].
///
/// # Errors
///
/// Everything in it that is missing, unknown or of the wrong type.
pub fn read(key: &Key, body: &Body) -> Result<Entry, Remarks> {
    let remark = |field: &str, message: String, suggestion: Option<String>| Remark {
        key: Some(key.clone()),
        field: field.into(),
        message,
        suggestion,
    };
    let (mut table, section) = key_fields(key);
    let mut remarks = Vec::new();
    for (name, value) in body {
        if table.contains_key(name) {
            let message = "is what tells which one it is, and has no place in the body".into();
            remarks.push(remark(name, message, Some("remove it".into())));
        } else {
            match to_toml_value(value) {
                Some(value) => {
                    table.insert(name.clone(), value);
                }
                None => {
                    remarks.push(remark(name, "has a null".into(), Some("leave out what has no value".into())));
                }
            }
        }
    }
    if let Some(field) = field_with_nul(key, body) {
        remarks.push(remark(&field, "has a NUL character, which the store cannot keep".into(), None));
    }
    Remarks::collect(remarks)?;
    let mut document = Table::new();
    document.insert(section.into(), TomlValue::Array(vec![TomlValue::Table(table)]));
    let refused = |message| Remarks { list: vec![remark("", message, None)], more: 0 };
    // A table that came out of JSON has nothing that TOML could not write.
    let text = toml::to_string(&document).map_err(|error| refused(error.to_string()))?;
    let policy = file::parse_alone(&text).map_err(|problems| Remarks {
        more: problems.len().saturating_sub(PROBLEMS_MAX),
        list: problems
            .into_iter()
            .take(PROBLEMS_MAX)
            .map(|problem| remark(&problem.field.to_string(), problem.message, problem.suggestion))
            .collect(),
    })?;
    let entry =
        policy.rules.into_iter().map(Entry::Rule).chain(policy.overrides.into_iter().map(Entry::Override)).next();
    entry.ok_or_else(|| refused("says nothing".into()))
}

/// Checks a whole policy, as a file is checked.
///
/// # Errors
///
/// Everything that [`check::check`] finds.
pub fn check(policy: &Policy) -> Result<(), Remarks> {
    let key = |item| match item {
        Item::Policy => None,
        Item::Rule(index) => Some(Key::Rule(policy.rules[index].name.clone())),
        Item::Override(index) => Some(key_of_override(&policy.overrides[index])),
    };
    Remarks::collect(check::check(policy).into_iter().map(|Finding { item, field, message, suggestion, related }| {
        let other = related.filter(|(other, _)| *other != item).and_then(|(other, _)| key(other));
        Remark {
            key: key(item),
            field: field.to_string(),
            message: match other {
                Some(other) => format!("{message}, see {other}"),
                None => message,
            },
            suggestion,
        }
    }))
}

/// The key of an override.
pub fn key_of_override(over: &Override) -> Key {
    Key::Override { rule: over.rule.clone(), identity: over.identity.clone() }
}

/// The body of a rule: what [`read`] makes this rule of. Fields that say what is so anyway are left out.
pub fn body_of_rule(rule: &Rule) -> Body {
    let mut body = Body::new();
    if !rule.matches.is_empty() {
        let matches = rule.matches.iter().map(|(name, pattern)| (name.clone(), pattern_text(pattern).into()));
        body.insert("match".into(), Value::Object(matches.collect()));
    }
    if rule.match_all {
        body.insert("match_all".into(), true.into());
    }
    if !rule.per.is_empty() {
        body.insert("per".into(), json!(rule.per));
    }
    insert_allowance(&mut body, rule.allowance);
    let mode = match rule.mode {
        Mode::Enforce => None,
        Mode::Shadow => Some("shadow"),
        Mode::Off => Some("off"),
    };
    let on_failure = match rule.on_failure {
        OnFailure::Local => None,
        OnFailure::Open => Some("open"),
        OnFailure::Closed => Some("closed"),
    };
    body.extend(mode.map(|mode| ("mode".into(), mode.into())));
    if rule.rollout_bp != ROLLOUT_BP_ALL {
        let (percent, hundredths) = (rule.rollout_bp / 100, rule.rollout_bp % 100);
        let share = if hundredths == 0 { percent.into() } else { (f64::from(rule.rollout_bp) / 100.0).into() };
        body.insert("rollout_pct".into(), share);
    }
    body.extend(on_failure.map(|on_failure| ("on_failure".into(), on_failure.into())));
    body.extend(rule.local.map(|local| ("local".into(), limit_value(local))));
    if rule.hot != Hot::default() {
        body.insert("hot".into(), hot_value(rule.hot));
    }
    body
}

/// The body of an override: what [`read`] makes this override of.
pub fn body_of_override(over: &Override) -> Body {
    let mut body = Body::new();
    insert_allowance(&mut body, over.allowance);
    body.extend(over.hot.map(|hot| ("hot".into(), hot_value(hot))));
    body.extend(over.expires.map(|expires| ("expires".into(), expires.to_string().into())));
    body
}

/// A policy as the text of a policy file.
pub fn to_toml(policy: &Policy) -> String {
    let rules = policy.rules.iter().map(|rule| (Key::Rule(rule.name.clone()), body_of_rule(rule)));
    let overrides = policy.overrides.iter().map(|over| (key_of_override(over), body_of_override(over)));
    let mut text = String::new();
    for (key, body) in rules.chain(overrides) {
        let (key_fields, section) = key_fields(&key);
        let newline = if text.is_empty() { "" } else { "\n" };
        text.push_str(&format!("{newline}[[{section}]]\n"));
        // In the order in which people write them.
        for &field in file::fields_of(section) {
            let value = body.get(field).and_then(to_toml_value);
            if let Some(value) = key_fields.get(field).or(value.as_ref()) {
                // Every name of a field stands without quotes.
                text.push_str(&format!("{field} = {value}\n"));
            }
        }
    }
    text
}

/// What a file says in place of the key, and in which section.
fn key_fields(key: &Key) -> (Table, &'static str) {
    let mut table = Table::new();
    let section = match key {
        Key::Rule(name) => {
            table.insert("name".into(), name.as_str().into());
            "rule"
        }
        Key::Override { rule, identity } => {
            table.insert("rule".into(), rule.as_str().into());
            table.insert("identity".into(), identity.clone().into());
            "override"
        }
    };
    (table, section)
}

/// `None`: there is a null in it, which TOML does not have.
fn to_toml_value(value: &Value) -> Option<TomlValue> {
    Some(match value {
        Value::Null => return None,
        Value::Bool(flag) => (*flag).into(),
        Value::Number(number) => match (number.as_i64(), number.as_u64(), number.as_f64()) {
            (Some(integer), ..) => integer.into(),
            // Beyond every bound, which `check` tells.
            (_, Some(_), _) => i64::MAX.into(),
            (.., float) => float?.into(),
        },
        Value::String(text) => text.as_str().into(),
        Value::Array(elements) => TomlValue::Array(elements.iter().map(to_toml_value).collect::<Option<_>>()?),
        Value::Object(fields) => {
            let fields = fields.iter().map(|(name, value)| Some((name.clone(), to_toml_value(value)?)));
            TomlValue::Table(fields.collect::<Option<_>>()?)
        }
    })
}

/// The field that has a NUL, at the top of the body or in the key.
fn field_with_nul(key: &Key, body: &Body) -> Option<String> {
    fn has_nul(value: &Value) -> bool {
        match value {
            Value::String(text) => text.contains('\0'),
            Value::Array(elements) => elements.iter().any(has_nul),
            Value::Object(fields) => fields.iter().any(|(name, value)| name.contains('\0') || has_nul(value)),
            Value::Null | Value::Bool(_) | Value::Number(_) => false,
        }
    }
    let in_key = match key {
        Key::Rule(name) => name.contains('\0').then_some("name"),
        Key::Override { rule, .. } if rule.contains('\0') => Some("rule"),
        Key::Override { identity, .. } => identity.iter().any(|value| value.contains('\0')).then_some("identity"),
    };
    let in_body =
        || body.iter().find(|(name, value)| name.contains('\0') || has_nul(value)).map(|(name, _)| name.clone());
    in_key.map(Into::into).or_else(in_body)
}

fn insert_allowance(body: &mut Body, allowance: Allowance) {
    let (name, value) = match allowance {
        Allowance::Limit(limit) => ("limit", limit_value(limit)),
        Allowance::Quota(quota) => {
            let every = match quota.every {
                QuotaPeriod::Day => "day",
                QuotaPeriod::Month => "month",
            };
            let mut value = json!({ "amount": quota.amount, "every": every });
            if quota.billed {
                value["billed"] = true.into();
            }
            ("quota", value)
        }
        Allowance::Deny => ("deny", true.into()),
        Allowance::Exempt => ("exempt", true.into()),
    };
    body.insert(name.into(), value);
}

fn limit_value(limit: Limit) -> Value {
    json!({ "capacity": limit.capacity, "refill": limit.refill, "period": written_duration(limit.period_ms) })
}

fn hot_value(hot: Hot) -> Value {
    let mut fields = Body::new();
    match hot.lease {
        Lease::Auto => {}
        Lease::Off => drop(fields.insert("lease".into(), "off".into())),
        Lease::Batch(tokens) => drop(fields.insert("lease".into(), tokens.into())),
    }
    fields.extend(hot.split.map(|split| ("split".into(), split.into())));
    fields.extend(hot.sample.map(|sample| ("sample".into(), sample.into())));
    Value::Object(fields)
}

fn pattern_text(pattern: &Pattern) -> String {
    match pattern {
        Pattern::Exact(value) => value.clone(),
        Pattern::Prefix(prefix) => format!("{prefix}*"),
        Pattern::Present => "*".into(),
    }
}
