//! The rules and overrides of a policy file, field by field.
//!
//! Whatever is wrong, reading goes on: a refused value leaves a placeholder in the model that `check` has no objection
//! to, and the collector remembers where, so that no problem is reported twice in two ways.

use std::collections::BTreeMap;

use jiff::Timestamp;
use toml::de::{DeTable, DeValue};

use super::{
    problem::{Collector, Place, Refusal},
    table::{Entry, Section, Shape, clamped_integer},
    words,
};
use crate::{
    check::Item,
    model::{
        Allowance, CAPACITY_MAX, Hot, Lease, Limit, Mode, OnFailure, Override, Pattern, Policy, Quota, QuotaPeriod,
        ROLLOUT_BP_ALL, Rule,
    },
};

const DOCUMENT: Shape = Shape { fields: &["rule", "override"], inside: &[] };
const RULE: Shape = Shape {
    fields: &[
        "name",
        "match",
        "match_all",
        "per",
        "limit",
        "quota",
        "deny",
        "exempt",
        "mode",
        "rollout_pct",
        "on_failure",
        "local",
        "hot",
    ],
    inside: &[
        ("capacity", "limit"),
        ("refill", "limit"),
        ("period", "limit"),
        ("amount", "quota"),
        ("every", "quota"),
        ("billed", "quota"),
        ("lease", "hot"),
        ("split", "hot"),
        ("sample", "hot"),
    ],
};
const OVERRIDE: Shape = Shape {
    fields: &["rule", "identity", "limit", "quota", "deny", "exempt", "hot", "expires"],
    inside: &[
        ("capacity", "limit"),
        ("refill", "limit"),
        ("period", "limit"),
        ("lease", "hot"),
        ("split", "hot"),
        ("sample", "hot"),
    ],
};
const LIMIT: Shape = Shape { fields: &["capacity", "refill", "period"], inside: &[] };
const QUOTA: Shape = Shape { fields: &["amount", "every", "billed"], inside: &[] };
const HOT: Shape = Shape { fields: &["lease", "split", "sample"], inside: &[] };

/// The fields of a `[[rule]]` or `[[override]]`.
pub(super) fn fields_of(section: &str) -> &'static [&'static str] {
    if section == "rule" { RULE.fields } else { OVERRIDE.fields }
}

/// The fields that say what is allowed; a rule or override has exactly one.
const ALLOWANCES: [&str; 4] = ["limit", "quota", "deny", "exempt"];

const MODES: [(&str, Mode); 3] = [("enforce", Mode::Enforce), ("shadow", Mode::Shadow), ("off", Mode::Off)];
const FAILURES: [(&str, OnFailure); 3] =
    [("open", OnFailure::Open), ("closed", OnFailure::Closed), ("local", OnFailure::Local)];
const LEASES: [(&str, Lease); 2] = [("auto", Lease::Auto), ("off", Lease::Off)];
const QUOTA_PERIODS: [(&str, QuotaPeriod); 2] = [("day", QuotaPeriod::Day), ("month", QuotaPeriod::Month)];

/// Stands in for a limit that was refused; `check` finds nothing wrong with it, in whatever rule.
const PLACEHOLDER: Limit = Limit { capacity: CAPACITY_MAX, refill: 1, period_ms: 1000 };

/// A whole file. `None`: its outline is wrong, so that looking further would only confuse.
pub(super) fn policy(root: &DeTable<'_>, version: u64, problems: &mut Collector) -> Option<Policy> {
    let section = Section::new(root, 0, Place::new(Item::Policy), &DOCUMENT, problems);
    let rules = items(&section, "rule", Item::Rule, problems);
    let overrides = items(&section, "override", Item::Override, problems);
    let rules = rules.map(|entries| entries.iter().map(|entry| rule(entry, problems)).collect());
    let overrides = overrides.map(|entries| entries.iter().map(|entry| override_(entry, problems)).collect());
    // A misspelled [[rule]] leaves every override without its rule; one report is enough.
    let whole = !section.is_meant("rule") && !section.is_meant("override");
    Some(Policy { version, rules: rules?, overrides: overrides? }).filter(|_| whole)
}

/// The entries of `[[name]]`; `None` when that is something else.
fn items<'a, 'i>(
    section: &Section<'a, 'i>,
    name: &'static str,
    item: fn(usize) -> Item,
    problems: &mut Collector,
) -> Option<Vec<Entry<'a, 'i>>> {
    let Some(entry) = section.get(name) else {
        return Some(Vec::new());
    };
    if entry.table().is_some() {
        let refusal = Refusal::new("expected an array of tables, found a table");
        entry.refuse(refusal.suggest(format!("write [[{name}]] with two brackets")), problems);
        return None;
    }
    let entries = entry.array("tables", problems)?;
    let entries = entries.into_iter().enumerate();
    Some(entries.map(|(index, entry)| Entry { place: Place::new(item(index)), ..entry }).collect())
}

fn rule(entry: &Entry<'_, '_>, problems: &mut Collector) -> Rule {
    let mut rule = Rule {
        name: String::new(),
        matches: BTreeMap::new(),
        match_all: false,
        per: Vec::new(),
        allowance: Allowance::Limit(PLACEHOLDER),
        mode: Mode::default(),
        rollout_bp: ROLLOUT_BP_ALL,
        on_failure: OnFailure::default(),
        local: None,
        hot: Hot::default(),
    };
    let Some(section) = entry.section(&RULE, problems) else {
        return rule;
    };
    if let Some(name) = section.require("name", problems).and_then(|entry| entry.string(problems)) {
        rule.name = name.to_owned();
    }
    if let Some(entry) = section.get("match") {
        rule.matches = matches(&entry, problems);
    }
    if let Some(match_all) = section.get("match_all").and_then(|entry| entry.boolean(problems)) {
        rule.match_all = match_all;
    }
    if let Some(per) = section.get("per").and_then(|entry| entry.strings(problems)) {
        rule.per = per;
    }
    rule.allowance = allowance(&section, problems);
    if let Some(mode) = section.get("mode").and_then(|entry| entry.word(&MODES, problems)) {
        rule.mode = mode;
    }
    if let Some(bp) = section.get("rollout_pct").and_then(|entry| rollout_bp(&entry, problems)) {
        rule.rollout_bp = bp;
    }
    if let Some(on_failure) = section.get("on_failure").and_then(|entry| entry.word(&FAILURES, problems)) {
        rule.on_failure = on_failure;
    }
    rule.local = section.get("local").map(|entry| limit(&entry, problems));
    if let Some(entry) = section.get("hot") {
        rule.hot = hot(&entry, problems);
    }
    rule
}

fn override_(entry: &Entry<'_, '_>, problems: &mut Collector) -> Override {
    let mut over = Override {
        rule: "*".into(),
        identity: Vec::new(),
        allowance: Allowance::Limit(PLACEHOLDER),
        hot: None,
        expires: None,
    };
    let Some(section) = entry.section(&OVERRIDE, problems) else {
        return over;
    };
    if let Some(rule) = section.require("rule", problems).and_then(|entry| entry.string(problems)) {
        over.rule = rule.to_owned();
    }
    if let Some(identity) = section.require("identity", problems).and_then(|entry| entry.strings(problems)) {
        over.identity = identity;
    }
    over.allowance = allowance(&section, problems);
    over.hot = section.get("hot").map(|entry| hot(&entry, problems));
    over.expires = section.get("expires").and_then(|entry| expires(&entry, problems));
    over
}

fn matches(entry: &Entry<'_, '_>, problems: &mut Collector) -> BTreeMap<String, Pattern> {
    let Some(table) = entry.table() else {
        let refusal = entry.unexpected("a table of attribute names and values");
        entry.refuse(refusal.suggest("write it as in match = { path = \"/v1/login\" }"), problems);
        return BTreeMap::new();
    };
    let mut matches = BTreeMap::new();
    // The names are the user's own, so there is no shape to hold them against.
    for (name, entry) in Section::open(table, entry).entries() {
        let pattern = match entry.value.get_ref() {
            DeValue::Table(_) => {
                let refusal = entry.unexpected("a string");
                let suggestion = "an attribute name with a dot is written in quotes, as in \"user.id\" = \"7\"";
                entry.refuse(refusal.suggest(suggestion), problems);
                None
            }
            DeValue::Array(_) => {
                let suggestion = "write one rule for each; they do not share a bucket";
                entry.refuse(entry.unexpected("a string").suggest(suggestion), problems);
                None
            }
            _ => entry.parsed(words::pattern, problems),
        };
        matches.insert(name.to_owned(), pattern.unwrap_or(Pattern::Present));
    }
    matches
}

/// What a rule or override allows: exactly one of [`ALLOWANCES`].
fn allowance(section: &Section<'_, '_>, problems: &mut Collector) -> Allowance {
    let given: Vec<_> = ALLOWANCES.into_iter().filter_map(|name| Some((name, section.get(name)?))).collect();
    if let [(first, _), others @ ..] = &given[..] {
        for (name, other) in others {
            let refusal = Refusal::new(format!("excludes {first}")).suggest("keep one of them");
            problems.report(other.value.span().start, section.place().key(*name), refusal);
        }
    } else {
        problems.mark_refused(section.place().key("limit"));
        if !ALLOWANCES.into_iter().any(|name| section.is_meant(name)) {
            let refusal = Refusal::new("does not say what it allows");
            let refusal = refusal.suggest("write limit = { … }, deny = true or exempt = true");
            problems.report(section.start(), section.place().clone(), refusal);
        }
    }
    // All are read, so that their own problems are reported; the first counts.
    let mut allowances = given.iter().map(|(name, entry)| match *name {
        "limit" => Allowance::Limit(limit(entry, problems)),
        "quota" => Allowance::Quota(quota(entry, problems)),
        "deny" => flag(entry, Allowance::Deny, problems),
        _ => flag(entry, Allowance::Exempt, problems),
    });
    let first = allowances.next();
    allowances.for_each(drop);
    first.unwrap_or(Allowance::Limit(PLACEHOLDER))
}

/// `deny` and `exempt` are there to be said, so there is no `false`.
fn flag(entry: &Entry<'_, '_>, allowance: Allowance, problems: &mut Collector) -> Allowance {
    match entry.boolean(problems) {
        Some(true) => return allowance,
        Some(false) => entry.refuse(Refusal::new("can only be true").suggest("leave it out otherwise"), problems),
        None => {}
    }
    Allowance::Limit(PLACEHOLDER)
}

fn limit(entry: &Entry<'_, '_>, problems: &mut Collector) -> Limit {
    let mut limit = PLACEHOLDER;
    let Some(section) = entry.section(&LIMIT, problems) else {
        return limit;
    };
    if let Some(capacity) = section.require("capacity", problems).and_then(|entry| entry.number(problems)) {
        limit.capacity = capacity;
    }
    if let Some(refill) = section.require("refill", problems).and_then(|entry| entry.number(problems)) {
        limit.refill = refill;
    }
    if let Some(period_ms) = section.require("period", problems).and_then(|entry| period_ms(&entry, problems)) {
        limit.period_ms = period_ms;
    }
    limit
}

fn period_ms(entry: &Entry<'_, '_>, problems: &mut Collector) -> Option<u64> {
    if let DeValue::Integer(number) = entry.value.get_ref() {
        let refusal = entry.unexpected("a duration such as \"1m\"");
        let suggestion = format!("write \"{number}s\" for seconds or \"{number}ms\" for milliseconds");
        entry.refuse(refusal.suggest(suggestion), problems);
        return None;
    }
    entry.parsed(words::duration, problems)
}

fn quota(entry: &Entry<'_, '_>, problems: &mut Collector) -> Quota {
    let mut quota = Quota { amount: 1, every: QuotaPeriod::Day, billed: false };
    let Some(section) = entry.section(&QUOTA, problems) else {
        return quota;
    };
    if let Some(amount) = section.require("amount", problems).and_then(|entry| entry.number(problems)) {
        quota.amount = amount;
    }
    if let Some(every) = section.require("every", problems).and_then(|entry| entry.word(&QUOTA_PERIODS, problems)) {
        quota.every = every;
    }
    if let Some(billed) = section.get("billed").and_then(|entry| entry.boolean(problems)) {
        quota.billed = billed;
    }
    quota
}

fn hot(entry: &Entry<'_, '_>, problems: &mut Collector) -> Hot {
    let Some(section) = entry.section(&HOT, problems) else {
        return Hot::default();
    };
    Hot {
        lease: section.get("lease").and_then(|entry| lease(&entry, problems)).unwrap_or_default(),
        split: section.get("split").and_then(|entry| entry.small_number(problems)),
        sample: section.get("sample").and_then(|entry| entry.small_number(problems)),
    }
}

fn lease(entry: &Entry<'_, '_>, problems: &mut Collector) -> Option<Lease> {
    match entry.value.get_ref() {
        DeValue::Integer(_) => entry.small_number(problems).map(Lease::Batch),
        DeValue::String(_) => entry.word(&LEASES, problems),
        _ => {
            entry.refuse(entry.unexpected("\"auto\", \"off\" or a number of tokens"), problems);
            None
        }
    }
}

fn rollout_bp(entry: &Entry<'_, '_>, problems: &mut Collector) -> Option<u16> {
    let percent = match entry.value.get_ref() {
        DeValue::Float(float) => float.as_str().parse::<f64>().ok(),
        // Beyond what a float has exactly, it is out of range anyway.
        value if value.as_integer().is_some_and(|integer| integer.as_str().starts_with('-')) => Some(-1.0),
        value => clamped_integer(value).map(|percent| percent as f64),
    };
    let result = percent.ok_or_else(|| entry.unexpected("a number from 0 to 100")).and_then(words::rollout);
    entry.accept(result, problems)
}

fn expires(entry: &Entry<'_, '_>, problems: &mut Collector) -> Option<Timestamp> {
    match entry.value.get_ref() {
        DeValue::Datetime(datetime) => entry.accept(words::timestamp(&datetime.to_string()), problems),
        DeValue::String(_) => entry.parsed(words::timestamp, problems),
        _ => {
            let refusal = entry.unexpected("a point in time").suggest("write it as in \"2027-01-01T00:00:00Z\"");
            entry.refuse(refusal, problems);
            None
        }
    }
}
