//! The compiled snapshot against the plain walk over all rules, and the promises of rollout and overrides.
#![allow(missing_docs)]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on must stop")]

use std::collections::BTreeSet;

use policy_sync::{
    explain::{Outcome, explain},
    file,
    model::{Allowance, Hot, Limit, Mode, OnFailure, Override, Pattern, Policy, Rule},
    rate::Rate,
    snapshot::{Attributes, AttributesError, Grant, RULES_PER_CHECK_MAX, Snapshot},
};
use proptest::prelude::*;

const SEED: u64 = 7;

/// The names of the rules that apply, with what they grant.
fn applying(snapshot: &Snapshot, attributes: &[(&str, &[u8])], unix_ms: i64) -> Vec<(String, Grant, u64)> {
    let mut resolved = Attributes::default();
    for (name, value) in attributes {
        resolved.push(snapshot, name.as_bytes(), value).unwrap();
    }
    let mut applied = Vec::new();
    snapshot.applying(&resolved, unix_ms, &mut Vec::new(), &mut applied).unwrap();
    let name = |rule: u32| snapshot.rules()[rule as usize].name.to_string();
    applied.iter().map(|one| (name(one.rule), *snapshot.grant(*one), one.key)).collect()
}

fn granted(allowance: Allowance) -> Grant {
    match allowance {
        Allowance::Limit(limit) => Grant::Limit(Rate::new(limit).unwrap()),
        Allowance::Deny => Grant::Deny,
        Allowance::Exempt => Grant::Exempt,
        Allowance::Quota(_) => panic!("quotas are not served yet"),
    }
}

fn limit(capacity: u64) -> Allowance {
    Allowance::Limit(Limit { capacity, refill: 1, period_ms: 1000 })
}

fn rule(name: &str, per: &[&str]) -> Rule {
    Rule {
        name: name.into(),
        matches: Default::default(),
        match_all: false,
        per: per.iter().map(|&name| name.into()).collect(),
        allowance: limit(10),
        mode: Mode::Enforce,
        rollout_bp: 10_000,
        on_failure: OnFailure::Local,
        local: None,
        hot: Hot::default(),
    }
}

const NAMES: [&str; 4] = ["path", "method", "key", "a-name-longer-than-sixteen"];
const VALUES: [&str; 7] = ["", "/", "/v1", "/v1/login", "GET", "a-value-longer-than-sixteen", "/v1/login/and/further"];

fn pattern() -> impl Strategy<Value = Pattern> {
    let value = || prop::sample::select(&VALUES[..]).prop_map(String::from);
    prop_oneof![
        value().prop_map(Pattern::Exact),
        value().prop_filter("a prefix is not empty", |text| !text.is_empty()).prop_map(Pattern::Prefix),
        Just(Pattern::Present),
    ]
}

fn rules() -> impl Strategy<Value = Vec<Rule>> {
    let names = || prop::sample::select(&NAMES[..]).prop_map(String::from);
    let one = (
        prop::collection::btree_map(names(), pattern(), 0..3),
        prop::collection::btree_set(names(), 0..3),
        any::<bool>(),
        prop::sample::select(vec![Mode::Enforce, Mode::Enforce, Mode::Shadow, Mode::Off]),
        prop::sample::select(vec![0u16, 5_000, 10_000, 10_000]),
        any::<bool>(),
    );
    prop::collection::vec(one, 0..20).prop_map(|parts| {
        let rule = |(index, (matches, per, match_all, mode, rollout_bp, reversed)): (usize, _)| {
            let per: BTreeSet<String> = per;
            let mut per: Vec<String> = per.into_iter().collect();
            if reversed {
                per.reverse();
            }
            Rule {
                matches,
                per,
                match_all: match_all && index % 3 == 0,
                mode,
                rollout_bp,
                ..rule(&format!("r{index}"), &[])
            }
        };
        parts.into_iter().enumerate().map(rule).collect()
    })
}

#[test]
fn the_head_of_an_identity_and_the_last_value_are_the_identity() {
    let policy = Policy { rules: vec![rule("r", &["key", "ip"]), rule("other", &["key"])], ..Policy::default() };
    let snapshot = Snapshot::compile(&policy, SEED).unwrap();
    // (attributes, rule, what is known of the identity when the last value is not)
    type Case<'a> = (&'a [(&'a str, &'a [u8])], u32, Option<(&'a str, bool)>);
    let cases: [Case<'_>; 4] = [
        (&[("ip", b"1.2.3.4"), ("key", b"a b")], 0, Some(("ip=1.2.3.4&key=", true))),
        (&[("key", b"a b"), ("ip", b"1.2.3.4")], 0, None),
        (&[("key", b"a b"), ("ip", b"1.2.3.4")], 1, Some(("key=a%20b", false))),
        (&[("ip", b""), ("key", b"")], 1, Some(("key=", true))),
    ];
    for (pairs, rule, expected) in cases {
        let mut attributes = Attributes::default();
        pairs.iter().for_each(|(name, value)| {
            attributes.push(&snapshot, name.as_bytes(), value).unwrap();
        });
        let mut head = Vec::new();
        let follows = snapshot.identity_head(rule, &attributes, true, &mut head);
        assert_eq!(follows.map(|follows| (std::str::from_utf8(&head).unwrap(), follows)), expected);
        if let Some(follows) = follows {
            if follows {
                policy_sync::identity::encode_value(pairs[1].1, &mut head);
            }
            let mut whole = Vec::new();
            snapshot.encode_identity(rule, &attributes, &mut whole);
            assert_eq!(head, whole);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    /// Hash and prefix lookup find exactly the rules that a walk over all rules finds, in its order, with its overrides.
    #[test]
    fn the_snapshot_agrees_with_the_walk(
        rules in rules(),
        overridden in prop::collection::vec((0usize..25, prop::collection::vec(prop::sample::select(&VALUES[..]), 0..3), 1u64..100, any::<bool>()), 0..20),
        request in prop::collection::btree_map(prop::sample::select(&["path", "method", "key", "a-name-longer-than-sixteen", "unknown"][..]), prop::sample::select(&VALUES[..]), 0..5),
    ) {
        let mut seen = BTreeSet::new();
        let overrides: Vec<Override> = overridden
            .into_iter()
            .filter_map(|(at, identity, capacity, expired)| {
                let identity: Vec<String> = identity.into_iter().map(String::from).collect();
                let rule = rules.get(at).filter(|rule| rule.per.len() == identity.len()).map_or("*".into(), |rule| rule.name.clone());
                let expires = expired.then(|| "2020-01-01T00:00:00Z".parse().unwrap());
                seen.insert((rule.clone(), identity.clone())).then(|| Override { rule, identity, allowance: limit(capacity), hot: None, expires })
            })
            .collect();
        let policy = Policy { version: 1, rules, overrides };
        let snapshot = Snapshot::compile(&policy, SEED).unwrap();
        let attributes: Vec<(&str, &[u8])> = request.iter().map(|(name, value)| (*name, value.as_bytes())).collect();
        let now = 1_800_000_000_000;
        let expected: Vec<(String, Grant)> = explain(&policy, &attributes, now)
            .into_iter()
            .filter_map(|one| match one.outcome {
                Outcome::Applies { allowance, .. } => Some((one.rule, granted(allowance))),
                _ => None,
            })
            .collect();
        let found: Vec<(String, Grant)> =
            applying(&snapshot, &attributes, now).into_iter().map(|(rule, grant, _)| (rule, grant)).collect();
        prop_assert_eq!(found, expected);
    }
}

#[test]
fn rollout_covers_its_share_and_raising_it_only_adds() {
    let identities: Vec<String> = (0..100_000).map(|index| format!("ak_{index}")).collect();
    let covered = |rollout_bp: u16| -> Vec<bool> {
        let policy =
            Policy { version: 1, rules: vec![Rule { rollout_bp, ..rule("login", &["key"]) }], overrides: vec![] };
        let snapshot = Snapshot::compile(&policy, SEED).unwrap();
        identities.iter().map(|key| !applying(&snapshot, &[("key", key.as_bytes())], 0).is_empty()).collect()
    };
    let mut before = covered(0);
    assert!(!before.contains(&true));
    for rollout_bp in [1_000, 1_050, 2_500, 9_999, 10_000] {
        let now = covered(rollout_bp);
        let share = now.iter().filter(|&&covered| covered).count() as f64 / identities.len() as f64 * 100.0;
        assert!((share - f64::from(rollout_bp) / 100.0).abs() <= 0.5, "{rollout_bp}: {share} %");
        assert!(before.iter().zip(&now).all(|(&was, &is)| is || !was), "{rollout_bp}: an identity was dropped");
        before = now;
    }
    assert!(!before.contains(&false));
}

#[test]
fn rollout_is_the_same_on_every_gateway_whatever_its_seed() {
    let policy =
        Policy { version: 1, rules: vec![Rule { rollout_bp: 5_000, ..rule("half", &["b", "a"]) }], overrides: vec![] };
    let (one, other) = (Snapshot::compile(&policy, 1).unwrap(), Snapshot::compile(&policy, 2).unwrap());
    for index in 0..1_000 {
        let value = index.to_string();
        let attributes = [("a", value.as_bytes()), ("b", &b"x"[..])];
        assert_eq!(applying(&one, &attributes, 0).len(), applying(&other, &attributes, 0).len());
    }
}

#[test]
fn every_rule_and_identity_has_its_own_bucket_and_keeps_it() {
    let rules = vec![rule("one", &["a", "b"]), rule("two", &["a", "b"]), rule("three", &["b", "a"]), rule("all", &[])];
    let policy = Policy { version: 1, rules, overrides: vec![] };
    let snapshot = Snapshot::compile(&policy, SEED).unwrap();
    let keys = |snapshot: &Snapshot, a: &str, b: &str| -> Vec<u64> {
        let found = applying(snapshot, &[("a", a.as_bytes()), ("b", b.as_bytes())], 0);
        found.into_iter().map(|(_, _, key)| key).collect()
    };
    let mut all = BTreeSet::new();
    for (a, b) in [("x", "y"), ("y", "x"), ("xy", ""), ("", "xy"), ("x", "x")] {
        all.extend(keys(&snapshot, a, b));
    }
    assert_eq!(all.len(), 3 * 5 + 1, "three rules by five identities, and one bucket for everybody");
    let mut changed = policy;
    changed.version = 2;
    changed.rules.reverse();
    changed.rules.iter_mut().for_each(|rule| rule.allowance = limit(99));
    let changed = Snapshot::compile(&changed, SEED).unwrap();
    let mut after = keys(&changed, "x", "y");
    after.reverse();
    assert_eq!(after, keys(&snapshot, "x", "y"), "a changed and moved rule keeps its buckets");
}

#[test]
fn more_rules_than_a_check_may_have_are_refused_not_cut_off() {
    let rules = (0..=RULES_PER_CHECK_MAX).map(|index| rule(&format!("r{index}"), &["key"])).collect();
    let snapshot = Snapshot::compile(&Policy { version: 1, rules, overrides: vec![] }, SEED).unwrap();
    let mut attributes = Attributes::default();
    attributes.push(&snapshot, b"key", b"a").unwrap();
    let outcome = snapshot.applying(&attributes, 0, &mut Vec::new(), &mut Vec::new());
    assert_eq!(outcome, Err(AttributesError::TooManyRules));
    assert_eq!(attributes.push(&snapshot, b"key", b"b"), Err(AttributesError::Duplicate));
    // What no rule mentions is not remembered.
    assert_eq!([b"a", b"b"].map(|value| attributes.push(&snapshot, b"other", value)), [Ok(false); 2]);
}

#[test]
fn the_example_policy_compiles() {
    let policy = file::parse(include_str!("../../policy.toml"), "policy.toml").unwrap();
    let snapshot = Snapshot::compile(&policy, SEED).unwrap();
    let found =
        applying(&snapshot, &[("path", b"/v1/login"), ("method", b"POST"), ("key", b"ak_1"), ("ip", b"::1")], 0);
    assert!(found.iter().any(|(rule, ..)| rule == "login-per-key"), "{found:?}");
}
