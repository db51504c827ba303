//! The policy as the admin API holds it: what the store says of each rule and override, sound or not.
//!
//! A gateway takes a policy whole or not at all. Whoever is to mend one that gateways refuse must see it as it is, so here
//! each item stands by itself, with what is wrong with it. A policy that is to be written must be sound as a whole, by the
//! very code that gateways compile with ([`Held::validate`]).

use std::{collections::BTreeMap, sync::Arc};

use policy_sync::{
    model::Policy,
    snapshot::Snapshot,
    stored::{self, Body, Entry, Key, Remark, Remarks, Row},
};
use serde_json::Value;
use thiserror::Error;

/// One rule or override.
#[derive(Clone, Debug, PartialEq)]
pub struct Item {
    /// The version that changed it last.
    pub version: u64,
    /// What it says.
    pub body: Body,
    /// The same, read; or why it cannot be.
    pub entry: Result<Entry, Remarks>,
}

impl Item {
    /// An item of this body. What can be read is written down in one way only, so that equal ones are equal.
    pub fn new(key: &Key, version: u64, body: Body) -> Self {
        let entry = stored::read(key, &body);
        let body = match &entry {
            Ok(Entry::Rule(rule)) => stored::body_of_rule(rule),
            Ok(Entry::Override(over)) => stored::body_of_override(over),
            Err(_) => body,
        };
        Self { version, body, entry }
    }
}

/// The policy at one version.
#[derive(Clone, Debug, Default)]
pub struct Held {
    version: u64,
    token: String,
    items: BTreeMap<Key, Arc<Item>>,
}

/// The store's answer is not what a store answers.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("row {row} of the store's answer {what}")]
pub struct Malformed {
    row: usize,
    what: &'static str,
}

impl Held {
    /// The version.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Tells this version from one of another history under the same number.
    pub fn token(&self) -> &str {
        &self.token
    }

    /// Rules by name, and then overrides by rule and identity.
    pub fn items(&self) -> &BTreeMap<Key, Arc<Item>> {
        &self.items
    }

    /// This policy brought forward by the rows of `sluice.changes_after`.
    ///
    /// # Errors
    ///
    /// When the rows make no sense. What they say may be wrong in every other way.
    pub fn apply(&self, rows: &[Row]) -> Result<Self, Malformed> {
        let malformed = |row: usize, what| Malformed { row: row + 1, what };
        let Some((head, rows)) = rows.split_first().filter(|(head, _)| head.kind == "policy") else {
            return Err(malformed(0, "does not say the policy's version"));
        };
        let mut next = match head.body.as_deref() {
            Some("whole") => Self::default(),
            _ => self.clone(),
        };
        next.version = head.version;
        next.token.clone_from(&head.name);
        for (index, row) in rows.iter().enumerate() {
            let key = key(row).ok_or_else(|| malformed(index + 1, "is neither a rule nor an override"))?;
            match &row.body {
                None => drop(next.items.remove(&key)),
                Some(text) => {
                    // The column's type is jsonb, but nothing keeps it from being a number.
                    let body = match serde_json::from_str(text) {
                        Ok(Value::Object(body)) => body,
                        Ok(other) => Body::from_iter([("".to_owned(), other)]),
                        Err(_) => return Err(malformed(index + 1, "has a body that is no JSON")),
                    };
                    let item = Item::new(&key, row.version, body);
                    next.items.insert(key, Arc::new(item));
                }
            }
        }
        Ok(next)
    }

    /// Puts an item in the place of what was there.
    pub fn put(&mut self, key: Key, body: Body) {
        let item = Item::new(&key, 0, body);
        self.items.insert(key, Arc::new(item));
    }

    /// Takes an item away.
    pub fn remove(&mut self, key: &Key) {
        self.items.remove(key);
    }

    /// The policy, if gateways would take it.
    ///
    /// # Errors
    ///
    /// Everything that is wrong with it.
    pub fn validate(&self) -> Result<Policy, Remarks> {
        let policy = self.policy()?;
        stored::check(&policy)?;
        // The seed of a gateway's tables is its own.
        match Snapshot::compile(&policy, 0) {
            Ok(_) => Ok(policy),
            Err(error) => {
                let remark = Remark { key: None, field: String::new(), message: error.to_string(), suggestion: None };
                Err(Remarks { list: vec![remark], more: 0 })
            }
        }
    }

    /// The policy, whether or not its parts fit together.
    ///
    /// # Errors
    ///
    /// What is wrong with items that cannot be read.
    pub fn policy(&self) -> Result<Policy, Remarks> {
        let mut policy = Policy { version: self.version, ..Policy::default() };
        let mut wrong = Remarks { list: Vec::new(), more: 0 };
        for item in self.items.values() {
            match &item.entry {
                Ok(Entry::Rule(rule)) => policy.rules.push(rule.clone()),
                Ok(Entry::Override(over)) => policy.overrides.push(over.clone()),
                Err(remarks) => {
                    let room = policy_sync::file::PROBLEMS_MAX - wrong.list.len();
                    wrong.list.extend(remarks.list.iter().take(room).cloned());
                    wrong.more += remarks.more + remarks.list.len().saturating_sub(room);
                }
            }
        }
        if wrong.list.is_empty() { Ok(policy) } else { Err(wrong) }
    }
}

/// Which rule or override a row is about.
pub fn key(row: &Row) -> Option<Key> {
    match row.kind.as_str() {
        "rule" => Some(Key::Rule(row.name.clone())),
        "override" => {
            let identity = serde_json::from_str(row.identity.as_deref()?).ok()?;
            Some(Key::Override { rule: row.name.clone(), identity })
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on must stop")]

    use super::*;

    fn head(version: u64, kind: &str) -> Row {
        Row { kind: "policy".into(), version, name: format!("t{version}"), identity: None, body: Some(kind.into()) }
    }

    fn rule(name: &str, version: u64, body: &str) -> Row {
        Row { kind: "rule".into(), version, name: name.into(), identity: None, body: Some(body.into()) }
    }

    const GOOD: &str = r#"{"per": ["key"], "limit": {"capacity": 10, "refill": 10, "period": "60s"}}"#;

    #[test]
    fn what_gateways_refuse_is_held_and_can_be_mended() {
        let held = Held::default().apply(&[head(1, "whole"), rule("a", 1, GOOD), rule("b", 1, "7")]).unwrap();
        assert_eq!(held.items().len(), 2);
        let wrong = held.validate().unwrap_err();
        assert_eq!(wrong.list[0].key, Some(Key::Rule("b".into())), "{wrong}");
        let mut mended = held.clone();
        mended.put(Key::Rule("b".into()), serde_json::from_str(GOOD).unwrap());
        assert_eq!(mended.validate().unwrap().rules.len(), 2);
    }

    #[test]
    fn equal_items_are_written_down_equally() {
        let held = Held::default().apply(&[head(1, "whole"), rule("a", 1, GOOD)]).unwrap();
        let item = &held.items()[&Key::Rule("a".into())];
        assert_eq!(item.body["limit"]["period"], "1m");
    }

    #[test]
    fn answers_that_no_store_gives_are_refused() {
        let held = Held::default();
        assert!(held.apply(&[]).is_err());
        assert!(held.apply(&[rule("a", 1, GOOD)]).is_err());
        assert!(held.apply(&[head(1, "whole"), rule("a", 1, "{")]).is_err());
        let odd = Row { kind: "other".into(), ..rule("a", 1, GOOD) };
        assert!(held.apply(&[head(1, "whole"), odd]).is_err());
    }
}
