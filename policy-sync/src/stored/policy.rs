//! What a gateway has of the store, and how the rows of a fetch bring it forward.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use thiserror::Error;

use super::{Entry, Key, Remark, Remarks, body_of_override, body_of_rule, check, read};
use crate::{
    file::PROBLEMS_MAX,
    model::{Override, Policy, Rule},
};

/// One row of the store's answer to "what happened after version N" (`sluice.changes_after`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Row {
    /// `policy`, `rule` or `override`. The first row is the policy's, and no other is.
    pub kind: String,
    /// Of the policy: the version that the asker has afterwards. Of a rule or override: the version that changed it last.
    pub version: u64,
    /// The policy's token, the rule's name, or the name of the override's rule.
    pub name: String,
    /// An override's identity, as a JSON array of strings.
    pub identity: Option<String>,
    /// Of the policy: `whole` (the rows are all there is) or `since`. Of a rule or override: its body as JSON; none, and it
    /// is gone.
    pub body: Option<String>,
}

/// A rule, and the version that changed it last.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredRule {
    /// The version.
    pub version: u64,
    /// The rule.
    pub rule: Rule,
}

/// The policy of a store at one version.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StoredPolicy {
    version: u64,
    token: String,
    rules: BTreeMap<String, StoredRule>,
    overrides: BTreeMap<(String, Vec<String>), (u64, Override)>,
}

/// Why the rows of a fetch were not applied.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum ApplyError {
    /// They are not what a store answers.
    #[error("row {row} of the store's answer: {what}")]
    Malformed {
        /// Which row, from 1.
        row: usize,
        /// What is wrong with it.
        what: String,
    },
    /// What they say is not a policy.
    #[error(transparent)]
    Refused(#[from] Remarks),
}

impl StoredPolicy {
    /// The version; 0 before anything was fetched.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Tells this version from one of another history under the same number. Empty at version 0.
    pub fn token(&self) -> &str {
        &self.token
    }

    /// The rules by name.
    pub fn rules(&self) -> &BTreeMap<String, StoredRule> {
        &self.rules
    }

    /// How many overrides there are.
    pub fn overrides_count(&self) -> usize {
        self.overrides.len()
    }

    /// The policy: rules ordered by name, overrides by rule and identity.
    pub fn policy(&self) -> Policy {
        Policy {
            version: self.version,
            rules: self.rules.values().map(|stored| stored.rule.clone()).collect(),
            overrides: self.overrides.values().map(|(_, over)| over.clone()).collect(),
        }
    }

    /// This policy brought forward by the rows of a fetch: all of them, or none. `None`: the version is the same, so
    /// there is nothing new.
    ///
    /// # Errors
    ///
    /// When the rows make no sense, or what they make is not a policy that [`check()`] passes.
    pub fn apply(&self, rows: &[Row]) -> Result<Option<Self>, ApplyError> {
        let malformed = |row: usize, what: &str| ApplyError::Malformed { row: row + 1, what: what.into() };
        let Some((head, rows)) = rows.split_first() else {
            return Err(malformed(0, "is missing"));
        };
        let is_whole = match (head.kind.as_str(), head.body.as_deref()) {
            ("policy", Some("whole")) => true,
            ("policy", Some("since")) => false,
            _ => return Err(malformed(0, "does not say the policy's version")),
        };
        if !is_whole && (self.version == 0 || head.version < self.version) {
            return Err(malformed(0, "goes back behind the version that was asked for"));
        }
        if head.version == self.version && head.name == self.token && rows.is_empty() {
            return Ok(None);
        }
        let mut next = if is_whole { Self::default() } else { self.clone() };
        next.version = head.version;
        next.token.clone_from(&head.name);
        let mut remarks = Vec::new();
        let mut more = 0;
        for (index, row) in rows.iter().enumerate() {
            let index = index + 1;
            if row.version > head.version {
                return Err(malformed(index, "is newer than the policy"));
            }
            let key = match row.kind.as_str() {
                "rule" => Key::Rule(row.name.clone()),
                "override" => {
                    let identity = row.identity.as_deref().map(serde_json::from_str::<Vec<String>>);
                    let Some(Ok(identity)) = identity else {
                        return Err(malformed(index, "has an identity that is no JSON array of strings"));
                    };
                    Key::Override { rule: row.name.clone(), identity }
                }
                _ => return Err(malformed(index, "is neither a rule nor an override")),
            };
            match &row.body {
                None if is_whole => return Err(malformed(index, "has no body, in an answer that holds all there is")),
                None => next.remove(&key),
                Some(body) => match read_text(&key, body) {
                    Ok(entry) => next.insert(key, row.version, entry),
                    Err(wrong) => {
                        more += wrong.more;
                        for remark in wrong.list {
                            if remarks.len() < PROBLEMS_MAX {
                                remarks.push(remark);
                            } else {
                                more += 1;
                            }
                        }
                    }
                },
            }
        }
        if !remarks.is_empty() {
            return Err(Remarks { list: remarks, more }.into());
        }
        check(&next.policy())?;
        Ok(Some(next))
    }

    /// The rows that make this policy out of nothing, the policy's own first.
    pub fn rows(&self) -> impl Iterator<Item = Row> {
        let head = Row {
            kind: "policy".into(),
            version: self.version,
            name: self.token.clone(),
            identity: None,
            body: Some("whole".into()),
        };
        let rules = self.rules.iter().map(|(name, stored)| Row {
            kind: "rule".into(),
            version: stored.version,
            name: name.clone(),
            identity: None,
            body: Some(Value::Object(body_of_rule(&stored.rule)).to_string()),
        });
        let overrides = self.overrides.iter().map(|((rule, identity), (version, over))| Row {
            kind: "override".into(),
            version: *version,
            name: rule.clone(),
            identity: Some(Value::from(identity.clone()).to_string()),
            body: Some(Value::Object(body_of_override(over)).to_string()),
        });
        std::iter::once(head).chain(rules).chain(overrides)
    }

    fn insert(&mut self, key: Key, version: u64, entry: Entry) {
        match (key, entry) {
            (Key::Rule(name), Entry::Rule(rule)) => {
                self.rules.insert(name, StoredRule { version, rule });
            }
            (Key::Override { rule, identity }, Entry::Override(over)) => {
                self.overrides.insert((rule, identity), (version, over));
            }
            // `read` makes of a key what the key is.
            (Key::Rule(_), Entry::Override(_)) | (Key::Override { .. }, Entry::Rule(_)) => {}
        }
    }

    fn remove(&mut self, key: &Key) {
        match key {
            Key::Rule(name) => drop(self.rules.remove(name)),
            Key::Override { rule, identity } => drop(self.overrides.remove(&(rule.clone(), identity.clone()))),
        }
    }
}

fn read_text(key: &Key, body: &str) -> Result<Entry, Remarks> {
    let refused = |message: String| {
        let remark = Remark { key: Some(key.clone()), field: String::new(), message, suggestion: None };
        Remarks { list: vec![remark], more: 0 }
    };
    let body = serde_json::from_str(body).map_err(|error| refused(format!("its body is no JSON object: {error}")))?;
    read(key, &body)
}

/// A row on disk, with its body as it is and not as a text within the text.
#[derive(Deserialize, Serialize)]
pub(super) struct DiskRow {
    kind: String,
    version: u64,
    name: String,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    identity: Option<Vec<String>>,
    body: Value,
}

impl DiskRow {
    /// `None`: a row that `StoredPolicy::rows` does not make.
    pub(super) fn new(row: Row) -> Option<Self> {
        let body = row.body?;
        Some(Self {
            body: if row.kind == "policy" { Value::String(body) } else { serde_json::from_str(&body).ok()? },
            identity: row.identity.map(|text| serde_json::from_str(&text)).transpose().ok()?,
            kind: row.kind,
            version: row.version,
            name: row.name,
        })
    }

    pub(super) fn into_row(self) -> Row {
        Row {
            body: Some(match self.body {
                Value::String(text) => text,
                other => other.to_string(),
            }),
            identity: self.identity.map(|values| Value::from(values).to_string()),
            kind: self.kind,
            version: self.version,
            name: self.name,
        }
    }
}
