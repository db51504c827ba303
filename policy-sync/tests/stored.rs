//! The policy as the store keeps it: what a body says, how the rows of a fetch bring a policy forward, and the file of the
//! last good one.
#![allow(missing_docs)]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on must stop")]

use std::{collections::BTreeMap, fs};

use policy_sync::{
    file,
    model::{
        Allowance, Hot, Lease, Limit, Mode, OnFailure, Override, Pattern, Policy, Quota, QuotaPeriod, ROLLOUT_BP_ALL,
        Rule,
    },
    stored::{
        self, ApplyError, Body, Entry, Key, Row, StoredPolicy,
        last_good::{self, LastGoodError},
    },
};
use proptest::{collection::vec, option, prelude::*};
use serde_json::{Value, json};

fn body(value: Value) -> Body {
    match value {
        Value::Object(body) => body,
        other => panic!("{other} is no object"),
    }
}

fn rule_key() -> Key {
    Key::Rule("login".into())
}

fn override_key() -> Key {
    Key::Override { rule: "login".into(), identity: vec!["ak_1".into()] }
}

fn remarks(key: &Key, fields: Value) -> String {
    stored::read(key, &body(fields)).unwrap_err().to_string()
}

fn row(kind: &str, version: u64, name: &str, body: Option<Value>) -> Row {
    Row { kind: kind.into(), version, name: name.into(), identity: None, body: body.map(|body| body.to_string()) }
}

fn head(version: u64, token: &str, body: &str) -> Row {
    Row { kind: "policy".into(), version, name: token.into(), identity: None, body: Some(body.into()) }
}

fn override_row(version: u64, rule: &str, identity: &str, body: Option<Value>) -> Row {
    Row { identity: Some(identity.into()), ..row("override", version, rule, body) }
}

fn limit_of(capacity: u64) -> Value {
    json!({ "per": ["key"], "limit": { "capacity": capacity, "refill": 1, "period": "1s" } })
}

fn applied(policy: &StoredPolicy, rows: &[Row]) -> StoredPolicy {
    policy.apply(rows).unwrap().unwrap()
}

fn refused(policy: &StoredPolicy, rows: &[Row]) -> String {
    policy.apply(rows).unwrap_err().to_string()
}

#[test]
fn a_body_is_read_by_the_code_that_reads_files() {
    let cases = [
        (
            json!({ "per": ["key"] }),
            "rule \"login\": does not say what it allows (write limit = { … }, deny = true or exempt = true)",
        ),
        (json!({ "deny": true, "nam": 1 }), "rule \"login\": nam: unknown field (did you mean `name`?)"),
        (
            json!({ "deny": true, "mode": "enforced" }),
            "rule \"login\": mode: \"enforced\" is not one of \"enforce\", \"shadow\", \"off\" (did you mean \"enforce\"?)",
        ),
        (
            json!({ "limit": { "capacity": "10", "refill": 1, "period": "1m" } }),
            "rule \"login\": limit.capacity: expected a whole number, found the string \"10\" (remove the quotes)",
        ),
        (
            json!({ "limit": { "capacity": 1.5, "refill": 1, "period": "1m" } }),
            "rule \"login\": limit.capacity: expected a whole number, found the number 1.5",
        ),
        (
            json!({ "limit": { "capacity": 1, "refill": 1, "period": 60 } }),
            "rule \"login\": limit.period: expected a duration such as \"1m\", found the number 60 (write \"60s\" for seconds or \"60ms\" for milliseconds)",
        ),
        (json!({ "deny": true, "mode": null }), "rule \"login\": mode: has a null (leave out what has no value)"),
        (
            json!({ "deny": true, "name": "login" }),
            "rule \"login\": name: is what tells which one it is, and has no place in the body (remove it)",
        ),
        (
            json!({ "deny": true, "match": { "path": "a\u{0}" } }),
            "rule \"login\": match: has a NUL character, which the store cannot keep",
        ),
    ];
    for (fields, said) in cases {
        assert_eq!(remarks(&rule_key(), fields.clone()), said, "{fields}");
    }
    let said = "override of \"login\" for [\"ak_1\"]: expires: \"2027-01-01\" is not a point in time with its offset from UTC (write \"2027-01-01T00:00:00Z\" if you mean UTC)";
    assert_eq!(remarks(&override_key(), json!({ "deny": true, "expires": "2027-01-01" })), said);
    let nul = Key::Override { rule: "login".into(), identity: vec!["\0".into()] };
    assert!(
        remarks(&nul, json!({ "deny": true })).ends_with("identity: has a NUL character, which the store cannot keep")
    );
}

#[test]
fn numbers_beyond_every_bound_are_refused_by_the_bound() {
    let fields = body(json!({ "limit": { "capacity": u64::MAX, "refill": -1, "period": "1s" } }));
    let Entry::Rule(rule) = stored::read(&rule_key(), &fields).unwrap() else { panic!("a rule") };
    let policy = Policy { version: 1, rules: vec![rule], overrides: vec![] };
    let said = stored::check(&policy).unwrap_err().to_string();
    assert!(said.contains("rule \"login\": limit.capacity: must be at most 2147483647"), "{said}");
    assert!(said.contains("rule \"login\": limit.refill: must be at least 1"), "{said}");
}

#[test]
fn a_finding_names_the_other_place_too() {
    let stored = StoredPolicy::default();
    let rows = [
        head(2, "t", "whole"),
        row("rule", 1, "login", Some(limit_of(10))),
        override_row(2, "login", r#"["a","b"]"#, Some(json!({ "deny": true }))),
    ];
    assert_eq!(
        refused(&stored, &rows),
        "override of \"login\" for [\"a\", \"b\"]: identity: has 2 values; the rule's per has 1: [\"key\"], see rule \"login\""
    );
}

#[test]
fn a_fetch_brings_the_policy_forward_as_a_whole_or_not_at_all() {
    let start =
        [head(1, "t1", "whole"), row("rule", 1, "a", Some(limit_of(1))), row("rule", 1, "b", Some(limit_of(2)))];
    let one = applied(&StoredPolicy::default(), &start);
    assert_eq!((one.version(), one.token()), (1, "t1"));
    assert_eq!(one.apply(&[head(1, "t1", "since")]), Ok(None));
    let changes = [
        head(4, "t4", "since"),
        row("rule", 3, "a", Some(limit_of(10))),
        row("rule", 4, "b", None),
        override_row(2, "a", r#"["ak_1"]"#, Some(json!({ "exempt": true }))),
    ];
    let four = applied(&one, &changes);
    assert_eq!(four.version(), 4);
    assert_eq!(four.rules().keys().collect::<Vec<_>>(), ["a"]);
    assert_eq!(four.rules()["a"].version, 3);
    assert_eq!(four.overrides_count(), 1);
    // Twice is once, and nothing is half.
    assert_eq!(applied(&one, &[&changes[..], &changes[1..]].concat()), four);
    let with_a_bad_one =
        [head(5, "t5", "since"), row("rule", 5, "a", Some(limit_of(20))), row("rule", 5, "c", Some(limit_of(0)))];
    assert_eq!(
        refused(&four, &with_a_bad_one),
        "rule \"c\": limit.capacity: must be at least 1 (write deny = true to refuse everything)"
    );
    // A rule with an override cannot go alone.
    let alone = [head(5, "t5", "since"), row("rule", 5, "a", None)];
    assert!(refused(&four, &alone).contains("there is no rule \"a\""));
    // The store was restored from a backup: everything there is replaces everything there was.
    let restored = applied(&four, &[head(2, "other", "whole"), row("rule", 2, "z", Some(limit_of(5)))]);
    assert_eq!((restored.version(), restored.rules().len(), restored.overrides_count()), (2, 1, 0));
}

#[test]
fn rows_that_no_store_answers_are_refused() {
    let one = applied(&StoredPolicy::default(), &[head(3, "t", "whole"), row("rule", 1, "a", Some(limit_of(1)))]);
    let cases = [
        (vec![], "row 1 of the store's answer: is missing"),
        (vec![row("rule", 1, "a", None)], "row 1 of the store's answer: does not say the policy's version"),
        (vec![head(4, "t", "half")], "row 1 of the store's answer: does not say the policy's version"),
        (vec![head(2, "t", "since")], "row 1 of the store's answer: goes back behind the version that was asked for"),
        (
            vec![head(4, "t", "since"), head(4, "t", "since")],
            "row 2 of the store's answer: is neither a rule nor an override",
        ),
        (
            vec![head(4, "t", "since"), row("rule", 5, "a", None)],
            "row 2 of the store's answer: is newer than the policy",
        ),
        (
            vec![head(4, "t", "whole"), row("rule", 4, "a", None)],
            "row 2 of the store's answer: has no body, in an answer that holds all there is",
        ),
        (
            vec![head(4, "t", "since"), row("override", 4, "a", None)],
            "row 2 of the store's answer: has an identity that is no JSON array of strings",
        ),
        (
            vec![head(4, "t", "since"), override_row(4, "a", "{\"a\": 1}", None)],
            "row 2 of the store's answer: has an identity that is no JSON array of strings",
        ),
        (
            vec![head(4, "t", "since"), row("rule", 4, "a", Some(json!([1])))],
            "rule \"a\": its body is no JSON object: invalid type: sequence, expected a map at line 1 column 0",
        ),
    ];
    for (rows, said) in cases {
        assert_eq!(refused(&one, &rows), said);
    }
    assert!(matches!(
        StoredPolicy::default().apply(&[head(1, "t", "since")]),
        Err(ApplyError::Malformed { row: 1, .. })
    ));
}

#[test]
fn many_remarks_are_counted() {
    let rows = (0..1000).map(|number| row("rule", 1, &format!("r{number}"), Some(json!({}))));
    let rows: Vec<Row> = std::iter::once(head(1, "t", "whole")).chain(rows).collect();
    let Err(ApplyError::Refused(remarks)) = StoredPolicy::default().apply(&rows) else { panic!("accepted") };
    assert_eq!((remarks.list.len(), remarks.more), (file::PROBLEMS_MAX, 1000 - file::PROBLEMS_MAX));
}

fn some_policy() -> StoredPolicy {
    let rows = [
        head(7, "0b1c", "whole"),
        row("rule", 5, "login", Some(limit_of(10))),
        override_row(
            7,
            "login",
            r#"["ak \"1\"\n"]"#,
            Some(json!({ "exempt": true, "expires": "2027-01-01T00:00:00Z" })),
        ),
    ];
    applied(&StoredPolicy::default(), &rows)
}

#[test]
fn the_last_good_policy_comes_back_from_disk() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("policy.last-good");
    assert!(last_good::read(&path).unwrap().is_none());
    last_good::write(&path, &some_policy()).unwrap();
    assert_eq!(last_good::read(&path).unwrap().unwrap(), some_policy());
    last_good::write(&path, &some_policy()).unwrap();
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left beside it");
    let nowhere = folder.path().join("none/policy");
    assert!(matches!(last_good::write(&nowhere, &some_policy()), Err(LastGoodError::Io { .. })));
}

#[test]
fn a_last_good_file_that_was_cut_or_changed_anywhere_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("policy.last-good");
    last_good::write(&path, &some_policy()).unwrap();
    let good = fs::read(&path).unwrap();
    for length in 0..good.len() {
        // Without its last newline it says all that it has to say.
        if length + 1 < good.len() {
            fs::write(&path, &good[..length]).unwrap();
            assert!(last_good::read(&path).is_err(), "cut to {length} bytes");
        }
        let mut changed = good.clone();
        changed[length] ^= 1;
        fs::write(&path, &changed).unwrap();
        let read = last_good::read(&path);
        assert!(read.is_err() || length + 1 == good.len(), "byte {length} changed: {read:?}");
    }
    fs::write(&path, String::from_utf8(good).unwrap().replacen("\"layout\":1", "\"layout\":2", 1)).unwrap();
    let said = last_good::read(&path).unwrap_err().to_string();
    assert!(said.contains("has layout 2 of \"sluice last good policy\"; this is 1"), "{said}");
    let folder_itself = last_good::read(folder.path()).unwrap_err().to_string();
    assert!(folder_itself.contains("is not a regular file"), "{folder_itself}");
}

prop_compose! {
    fn limit()(capacity in 1_u64..1 << 31, refill in 1_u64..1 << 31, period_ms in 1_u64..15_000_000) -> Limit {
        Limit { capacity, refill, period_ms }
    }
}

fn quota() -> impl Strategy<Value = Quota> {
    (1_u64..1 << 40, any::<bool>(), any::<bool>()).prop_map(|(amount, day, billed)| Quota {
        amount,
        every: if day { QuotaPeriod::Day } else { QuotaPeriod::Month },
        billed,
    })
}

fn allowance() -> impl Strategy<Value = Allowance> {
    prop_oneof![
        limit().prop_map(Allowance::Limit),
        quota().prop_map(Allowance::Quota),
        Just(Allowance::Deny),
        Just(Allowance::Exempt)
    ]
}

fn hot() -> impl Strategy<Value = Hot> {
    let lease = prop_oneof![Just(Lease::Auto), Just(Lease::Off), (1_u32..100).prop_map(Lease::Batch)];
    (lease, option::of(2_u32..100), option::of(2_u32..100)).prop_map(|(lease, split, sample)| Hot {
        lease,
        split,
        sample,
    })
}

fn value() -> impl Strategy<Value = String> {
    any::<String>().prop_map(|text| text.replace(['*', '\0'], "-"))
}

fn pattern() -> impl Strategy<Value = Pattern> {
    let prefix = value().prop_filter("a prefix is never empty", |prefix| !prefix.is_empty());
    prop_oneof![value().prop_map(Pattern::Exact), prefix.prop_map(Pattern::Prefix), Just(Pattern::Present)]
}

fn rule() -> impl Strategy<Value = Rule> {
    let mode = prop_oneof![Just(Mode::Enforce), Just(Mode::Shadow), Just(Mode::Off)];
    let on_failure = prop_oneof![Just(OnFailure::Local), Just(OnFailure::Open), Just(OnFailure::Closed)];
    let matches = vec((value(), pattern()), 0..3).prop_map(BTreeMap::from_iter);
    let what = (value(), matches, any::<bool>(), vec(value(), 0..3), allowance());
    (what, mode, 0..=ROLLOUT_BP_ALL, on_failure, option::of(limit()), hot()).prop_map(
        |((name, matches, match_all, per, allowance), mode, rollout_bp, on_failure, local, hot)| Rule {
            name,
            matches,
            match_all,
            per,
            allowance,
            mode,
            rollout_bp,
            on_failure,
            local,
            hot,
        },
    )
}

fn over() -> impl Strategy<Value = Override> {
    let expires = option::of((0_i64..4_000_000_000).prop_map(|secs| jiff::Timestamp::from_second(secs).unwrap()));
    (value(), vec(value(), 0..3), allowance(), option::of(hot()), expires)
        .prop_map(|(rule, identity, allowance, hot, expires)| Override { rule, identity, allowance, hot, expires })
}

proptest! {
    #[test]
    fn a_body_says_all_of_a_rule(rule in rule()) {
        let read = stored::read(&Key::Rule(rule.name.clone()), &stored::body_of_rule(&rule));
        prop_assert_eq!(read, Ok(Entry::Rule(rule)));
    }

    #[test]
    fn a_body_says_all_of_an_override(over in over()) {
        let read = stored::read(&stored::key_of_override(&over), &stored::body_of_override(&over));
        prop_assert_eq!(read, Ok(Entry::Override(over)));
    }

    #[test]
    fn an_exported_policy_is_a_policy_file(names in vec("[a-z]{1,8}", 1..4), limit in limit(), patterns in vec(pattern(), 3)) {
        let names = std::collections::BTreeSet::from_iter(names);
        let rules = names.iter().zip(patterns).map(|(name, pattern)| Rule {
            name: name.clone(),
            matches: [("path".into(), pattern)].into(),
            match_all: false,
            per: vec!["key".into()],
            allowance: Allowance::Limit(limit),
            mode: Mode::Shadow,
            rollout_bp: 1234,
            on_failure: OnFailure::Open,
            local: None,
            hot: Hot { lease: Lease::Off, ..Hot::default() },
        });
        let rules: Vec<Rule> = rules.collect();
        let overrides = vec![Override {
            rule: rules[0].name.clone(),
            identity: vec!["a \"quoted\"\nvalue".into()],
            allowance: Allowance::Exempt,
            hot: None,
            expires: Some(jiff::Timestamp::from_second(1_800_000_000).unwrap()),
        }];
        let policy = Policy { version: file::FIRST_VERSION, rules, overrides };
        prop_assume!(stored::check(&policy).is_ok());
        let text = stored::to_toml(&policy);
        prop_assert_eq!(file::parse(&text, "exported").map_err(|problems| format!("{problems}\n{text}")), Ok(policy));
    }

    #[test]
    fn no_rows_panic(kind in "policy|rule|override|x", version in any::<u64>(), name in any::<String>(),
            identity in option::of(any::<String>()), body in option::of(any::<String>())) {
        let rows = [head(5, "t", "whole"), Row { kind, version, name, identity, body }];
        let _ = StoredPolicy::default().apply(&rows);
        let _ = StoredPolicy::default().apply(&rows[1..]);
    }
}
