//! A change before it is made: operations on the policy, what they presuppose, and the difference that they make.

use std::{collections::BTreeSet, sync::Arc};

use policy_sync::stored::{Body, Key, Remarks};
use serde_json::Value;
use thiserror::Error;

use crate::held::{Held, Item};

/// The longest comment, in bytes.
pub const COMMENT_BYTES_MAX: usize = 2_000;

/// What happens to one rule or override.
#[derive(Clone, Debug, PartialEq)]
pub struct Operation {
    /// To which.
    pub key: Key,
    /// What it is to say; `None`: it goes.
    pub body: Option<Body>,
}

/// What somebody saw of the policy when deciding on a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expect {
    /// The policy is at this version.
    Policy(u64),
    /// The item was changed last by this version.
    Item(Key, u64),
    /// The item exists, whatever it says.
    Exists(Key),
    /// The item does not exist.
    Absent(Key),
}

/// Why a change is not made.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum Refusal {
    /// Somebody else changed it meanwhile.
    #[error("{0}")]
    Conflict(String),
    /// There is no such rule or override.
    #[error("there is no {0}")]
    Missing(Key),
    /// Two operations are about the same rule or override.
    #[error("two operations are about {0}")]
    Twice(Key),
    /// What would come out is no policy that gateways take.
    #[error(transparent)]
    Invalid(#[from] Remarks),
}

/// What a change makes of one rule or override.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    /// Of which.
    pub key: Key,
    /// What it said; `None`: it is new.
    pub before: Option<Body>,
    /// What it says; `None`: it is gone.
    pub after: Option<Body>,
}

impl Difference {
    /// The fields that differ, as a policy file spells them (`limit.capacity`).
    pub fn fields(&self) -> Vec<String> {
        let empty = Body::new();
        let mut fields = Vec::new();
        differing("", self.before.as_ref().unwrap_or(&empty), self.after.as_ref().unwrap_or(&empty), &mut fields);
        fields
    }
}

fn differing(path: &str, before: &Body, after: &Body, fields: &mut Vec<String>) {
    let names: BTreeSet<&String> = before.keys().chain(after.keys()).collect();
    for name in names {
        let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        match (before.get(name), after.get(name)) {
            (one, other) if one == other => {}
            (Some(Value::Object(one)), Some(Value::Object(other))) => differing(&path, one, other, fields),
            _ => fields.push(path),
        }
    }
}

/// The differences between two policies, rules first.
pub fn differences(before: &Held, after: &Held) -> Vec<Difference> {
    let body = |item: Option<&Arc<Item>>| item.map(|item| item.body.clone());
    let keys: BTreeSet<&Key> = before.items().keys().chain(after.items().keys()).collect();
    let is_same = |key: &Key| match (before.items().get(key), after.items().get(key)) {
        (Some(one), Some(other)) => Arc::ptr_eq(one, other) || one.body == other.body,
        _ => false,
    };
    keys.into_iter()
        .filter(|key| !is_same(key))
        .map(|key| Difference {
            key: key.clone(),
            before: body(before.items().get(key)),
            after: body(after.items().get(key)),
        })
        .collect()
}

/// What the operations make of the policy, and in which it then differs. A policy in which nothing differs is not looked at
/// again: it may be one that gateways refuse.
///
/// # Errors
///
/// When somebody else was faster, an item to be deleted does not exist, or what comes out is no policy.
pub fn plan(before: &Held, operations: Vec<Operation>, expected: &[Expect]) -> Result<Vec<Difference>, Refusal> {
    expected.iter().try_for_each(|expect| holds(before, expect))?;
    let mut after = before.clone();
    let mut seen = BTreeSet::new();
    for Operation { key, body } in operations {
        if !seen.insert(key.clone()) {
            return Err(Refusal::Twice(key));
        }
        match body {
            Some(body) => after.put(key, body),
            None if before.items().contains_key(&key) => after.remove(&key),
            None => return Err(Refusal::Missing(key)),
        }
    }
    let differences = differences(before, &after);
    if !differences.is_empty() {
        after.validate()?;
    }
    Ok(differences)
}

/// Whether what somebody saw still holds.
fn holds(held: &Held, expect: &Expect) -> Result<(), Refusal> {
    let version = |key: &Key| held.items().get(key).map(|item| item.version);
    let conflict = |text: String| Err(Refusal::Conflict(text));
    match expect {
        Expect::Policy(seen) if *seen != held.version() => {
            conflict(format!("the policy is at version {}, not {seen}: somebody else changed it", held.version()))
        }
        Expect::Item(key, seen) => match version(key) {
            Some(now) if now == *seen => Ok(()),
            Some(now) => conflict(format!("{key} was changed by version {now}, after version {seen}")),
            None => conflict(format!("{key} does not exist, or not any more")),
        },
        Expect::Exists(key) if version(key).is_none() => Err(Refusal::Missing(key.clone())),
        Expect::Absent(key) => match version(key) {
            None => Ok(()),
            Some(now) => conflict(format!("{key} exists already, since version {now}")),
        },
        Expect::Policy(_) | Expect::Exists(_) => Ok(()),
    }
}

/// The operations that make the policy say what it said in `then`: all of it, or of one rule and its overrides.
pub fn rollback(now: &Held, then: &Held, rule: Option<&str>) -> Vec<Operation> {
    let is_meant = |key: &Key| match (rule, key) {
        (None, _) => true,
        (Some(wanted), Key::Rule(name) | Key::Override { rule: name, .. }) => name == wanted,
    };
    differences(now, then)
        .into_iter()
        .filter(|difference| is_meant(&difference.key))
        .map(|Difference { key, after, .. }| Operation { key, body: after })
        .collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on must stop")]

    use policy_sync::stored::Row;
    use serde_json::json;

    use super::*;

    fn body(capacity: u32) -> Body {
        let body = json!({ "per": ["key"], "limit": { "capacity": capacity, "refill": 10, "period": "1m" } });
        body.as_object().unwrap().clone()
    }

    fn rule(name: &str) -> Key {
        Key::Rule(name.into())
    }

    fn over(identity: &str) -> Key {
        Key::Override { rule: "a".into(), identity: vec![identity.into()] }
    }

    fn exempt() -> Body {
        json!({ "exempt": true }).as_object().unwrap().clone()
    }

    /// A rule `a` of version 3 in a policy of version 5.
    fn held() -> Held {
        let head = Row { kind: "policy".into(), version: 5, body: Some("whole".into()), ..Row::default() };
        let a = Row {
            kind: "rule".into(),
            version: 3,
            name: "a".into(),
            body: Some(Value::Object(body(100)).to_string()),
            ..Row::default()
        };
        Held::default().apply(&[head, a]).unwrap()
    }

    fn put(key: Key, body: Body) -> Operation {
        Operation { key, body: Some(body) }
    }

    #[test]
    fn a_plan_names_the_fields_that_differ() {
        let differences = plan(&held(), vec![put(rule("a"), body(10)), put(rule("b"), body(1))], &[]).unwrap();
        let fields: Vec<_> = differences.iter().map(|one| (one.key.to_string(), one.fields())).collect();
        assert_eq!(fields[0], ("rule \"a\"".to_owned(), vec!["limit.capacity".to_owned()]));
        assert_eq!(fields[1].1, ["limit", "per"]);
        assert_eq!(plan(&held(), vec![put(rule("a"), body(100))], &[]).unwrap(), []);
    }

    #[test]
    fn what_somebody_else_changed_is_not_overwritten() {
        let is_conflict = |expect: Expect| match plan(&held(), vec![put(rule("a"), body(10))], &[expect]) {
            Ok(_) => false,
            Err(Refusal::Conflict(_)) => true,
            Err(other) => panic!("{other}"),
        };
        assert!(!is_conflict(Expect::Policy(5)));
        assert!(is_conflict(Expect::Policy(4)));
        assert!(!is_conflict(Expect::Item(rule("a"), 3)));
        assert!(is_conflict(Expect::Item(rule("a"), 2)));
        assert!(is_conflict(Expect::Item(rule("b"), 2)));
        assert!(!is_conflict(Expect::Exists(rule("a"))));
        assert!(is_conflict(Expect::Absent(rule("a"))));
        assert!(!is_conflict(Expect::Absent(rule("b"))));
        assert_eq!(plan(&held(), vec![], &[Expect::Exists(rule("b"))]), Err(Refusal::Missing(rule("b"))));
    }

    #[test]
    fn what_comes_out_must_be_a_policy() {
        let delete = |key| Operation { key, body: None };
        assert!(matches!(plan(&held(), vec![put(rule("b"), body(0))], &[]), Err(Refusal::Invalid(_))));
        assert_eq!(plan(&held(), vec![delete(rule("b"))], &[]), Err(Refusal::Missing(rule("b"))));
        // An override cannot outlive its rule.
        assert_eq!(plan(&held(), vec![put(over("k"), exempt())], &[]).unwrap().len(), 1);
        let without = vec![put(rule("b"), body(1)), delete(rule("a")), put(over("k"), exempt())];
        assert!(matches!(plan(&held(), without, &[]), Err(Refusal::Invalid(_))));
        let twice = vec![put(rule("a"), body(1)), put(rule("a"), body(2))];
        assert_eq!(plan(&held(), twice, &[]), Err(Refusal::Twice(rule("a"))));
    }

    #[test]
    fn a_rollback_brings_back_a_rule_with_its_overrides_or_everything() {
        let then = held();
        let mut now = then.clone();
        now.put(rule("a"), body(10));
        now.put(over("k"), exempt());
        now.put(rule("b"), body(1));
        let keys = |rule| rollback(&now, &then, rule).into_iter().map(|one| one.key).collect::<Vec<_>>();
        assert_eq!(keys(Some("a")), [rule("a"), over("k")]);
        assert_eq!(keys(Some("b")), [rule("b")]);
        assert_eq!(keys(None), [rule("a"), rule("b"), over("k")]);
    }
}
