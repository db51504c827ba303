//! What a policy must satisfy beyond its syntax, for whichever way it came in: a file, the admin API, the store.
//!
//! A finding names the rule or override and the field; whoever read the policy knows the line. Everything that is
//! wrong is found in one pass.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::{
    model::{
        ATTRIBUTE_NAMES_MAX, ATTRIBUTES_PER_RULE_MAX, Allowance, CAPACITY_MAX, Lease, Limit, NAME_BYTES_MAX,
        OVERRIDES_MAX, OnFailure, Override, PERIOD_MS_MAX, Pattern, Policy, ROLLOUT_BP_ALL, RULES_MAX, Rule,
    },
    rate::MILLISECOND_TICK_PERIOD_MS_MAX,
};

/// The longest value of a matcher or an override's identity, in bytes.
pub const VALUE_BYTES_MAX: usize = 4096;
/// The most parts of a split bucket, and the sparsest sample.
pub const PARTS_MAX: u32 = 1024;

/// Where a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// The policy as a whole.
    Policy,
    /// The rule with this index.
    Rule(usize),
    /// The override with this index.
    Override(usize),
}

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The rule or override.
    pub place: Place,
    /// The field within it, such as `limit.capacity`; empty for the whole.
    pub field: String,
    /// What is wrong.
    pub message: String,
    /// What to write instead, where that is known.
    pub suggestion: Option<String>,
}

/// Finds everything that is wrong with a policy; nothing means that it compiles.
pub fn check(policy: &Policy) -> Vec<Finding> {
    let mut checker = Checker::default();
    checker.sizes(policy);
    let mut seen: HashMap<&str, usize> = HashMap::new();
    for (index, rule) in policy.rules.iter().enumerate() {
        checker.place = Some(Place::Rule(index));
        if let Some(first) = seen.insert(&rule.name, index) {
            checker.find("name", format!("{:?} is taken by rule number {}", rule.name, first + 1));
        }
        checker.rule(rule);
    }
    let rules: HashMap<&str, &Rule> = policy.rules.iter().map(|rule| (rule.name.as_str(), rule)).collect();
    let lengths: BTreeSet<usize> = policy.rules.iter().map(|rule| rule.per.len()).collect();
    let mut identities: BTreeMap<(&str, &[String]), usize> = BTreeMap::new();
    for (index, over) in policy.overrides.iter().enumerate() {
        checker.place = Some(Place::Override(index));
        if let Some(first) = identities.insert((&over.rule, &over.identity), index) {
            checker.find("identity", format!("override number {} has the same rule and identity", first + 1));
        }
        checker.overriding(over, &rules, &lengths);
    }
    checker.findings
}

/// The known name that is nearest to what was written, if it is near enough to be meant.
pub fn nearest<'a>(written: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let (name, likeness) = known
        .into_iter()
        .map(|name| (name, strsim::jaro_winkler(written, name)))
        .max_by(|a, b| a.1.total_cmp(&b.1))?;
    (likeness >= 0.75).then_some(name)
}

#[derive(Default)]
struct Checker {
    place: Option<Place>,
    findings: Vec<Finding>,
}

impl Checker {
    fn find(&mut self, field: impl Into<String>, message: impl Into<String>) {
        self.suggest(field, message, None);
    }

    fn suggest(&mut self, field: impl Into<String>, message: impl Into<String>, suggestion: Option<String>) {
        let place = self.place.unwrap_or(Place::Policy);
        self.findings.push(Finding { place, field: field.into(), message: message.into(), suggestion });
    }

    fn sizes(&mut self, policy: &Policy) {
        if policy.rules.len() > RULES_MAX {
            self.find("rule", format!("{} rules; the most is {RULES_MAX}", policy.rules.len()));
        }
        if policy.overrides.len() > OVERRIDES_MAX {
            self.find("override", format!("{} overrides; the most is {OVERRIDES_MAX}", policy.overrides.len()));
        }
        let names: BTreeSet<&str> =
            policy.rules.iter().flat_map(|rule| rule.matches.keys().chain(&rule.per)).map(String::as_str).collect();
        if names.len() > ATTRIBUTE_NAMES_MAX {
            let count = names.len();
            self.find("", format!("the rules mention {count} attribute names; the most is {ATTRIBUTE_NAMES_MAX}"));
        }
    }

    fn rule(&mut self, rule: &Rule) {
        let is_name = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
        if rule.name.is_empty() || rule.name.len() > NAME_BYTES_MAX || !rule.name.bytes().all(is_name) {
            self.find("name", format!("must be 1 to {NAME_BYTES_MAX} letters, digits, - _ ."));
        }
        if rule.matches.len() > ATTRIBUTES_PER_RULE_MAX || rule.per.len() > ATTRIBUTES_PER_RULE_MAX {
            self.find("", format!("at most {ATTRIBUTES_PER_RULE_MAX} matchers and as many `per` attributes"));
        }
        for (name, pattern) in &rule.matches {
            self.attribute(&format!("match.{name}"), name);
            if let Pattern::Exact(text) | Pattern::Prefix(text) = pattern
                && text.len() > VALUE_BYTES_MAX
            {
                self.find(format!("match.{name}"), format!("longer than {VALUE_BYTES_MAX} bytes"));
            }
        }
        for (at, name) in rule.per.iter().enumerate() {
            self.attribute("per", name);
            if rule.per[..at].contains(name) {
                self.find("per", format!("{name:?} is there twice"));
            }
        }
        if rule.rollout_bp > ROLLOUT_BP_ALL {
            self.find("rollout_pct", "must be from 0 to 100");
        }
        self.allowance(rule.allowance);
        if let Some(local) = rule.local {
            if rule.on_failure != OnFailure::Local {
                self.find("local", "means something only with on_failure = \"local\"");
            }
            self.limit("local", local);
        }
        self.hot(rule);
    }

    fn attribute(&mut self, field: &str, name: &str) {
        let is_name = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'-' | b'.');
        if name.is_empty() || name.len() > NAME_BYTES_MAX || !name.bytes().all(is_name) {
            let lower = name.to_ascii_lowercase();
            let suggestion = (lower != name && lower.bytes().all(is_name)).then_some(lower);
            let message = format!("attribute name {name:?} must be 1 to {NAME_BYTES_MAX} of a-z 0-9 _ - .");
            self.suggest(field, message, suggestion);
        }
    }

    fn allowance(&mut self, allowance: Allowance) {
        match allowance {
            Allowance::Limit(limit) => self.limit("limit", limit),
            Allowance::Quota(_) => {
                self.suggest("quota", "is not served yet", Some("limit with a period of up to 31d".into()));
            }
            Allowance::Deny | Allowance::Exempt => {}
        }
    }

    fn limit(&mut self, field: &str, limit: Limit) {
        if limit.capacity == 0 {
            let suggestion = (field == "limit").then(|| "deny = true, to refuse everything".into());
            self.suggest(format!("{field}.capacity"), "must be at least 1", suggestion);
        } else if limit.capacity > CAPACITY_MAX {
            self.find(format!("{field}.capacity"), format!("must be at most {CAPACITY_MAX}"));
        }
        if limit.refill == 0 || limit.refill > CAPACITY_MAX {
            self.find(format!("{field}.refill"), format!("must be from 1 to {CAPACITY_MAX}"));
        }
        if limit.period_ms == 0 || limit.period_ms > PERIOD_MS_MAX {
            self.find(format!("{field}.period"), "must be from 1ms to 31d");
        } else if limit.period_ms > MILLISECOND_TICK_PERIOD_MS_MAX && limit.period_ms % 1000 != 0 {
            let whole = format!("\"{}s\"", limit.period_ms / 1000);
            self.suggest(format!("{field}.period"), "beyond four hours must be whole seconds", Some(whole));
        }
    }

    fn hot(&mut self, rule: &Rule) {
        let capacity = match rule.allowance {
            Allowance::Limit(limit) => limit.capacity,
            _ => CAPACITY_MAX,
        };
        if let Lease::Batch(batch) = rule.hot.lease
            && (batch == 0 || u64::from(batch) > capacity)
        {
            self.find("hot.lease", "a batch must be from 1 to the capacity");
        }
        for (field, value) in [("hot.split", rule.hot.split), ("hot.sample", rule.hot.sample)] {
            let Some(value) = value else { continue };
            if !(2..=PARTS_MAX).contains(&value) {
                self.find(field, format!("must be from 2 to {PARTS_MAX}"));
            } else if u64::from(value) > capacity {
                self.find(field, "must not exceed the capacity: each part needs a token");
            }
        }
        if rule.hot.split.is_some() && rule.hot.sample.is_some() {
            self.find("hot", "split and sample exclude each other");
        }
    }

    fn overriding(&mut self, over: &Override, rules: &HashMap<&str, &Rule>, lengths: &BTreeSet<usize>) {
        let len = over.identity.len();
        if over.rule == "*" {
            if !lengths.contains(&len) {
                self.find("identity", format!("has {len} values, and no rule's `per` has as many"));
            }
        } else if let Some(rule) = rules.get(over.rule.as_str()) {
            if rule.per.len() != len {
                let wanted = rule.per.join(", ");
                let count = rule.per.len();
                self.find("identity", format!("has {len} values, and the rule's `per` has {count} ({wanted})"));
            }
        } else {
            let suggestion = nearest(&over.rule, rules.keys().copied()).map(Into::into);
            self.suggest("rule", format!("no rule is named {:?}", over.rule), suggestion);
        }
        if over.identity.iter().any(|value| value.len() > VALUE_BYTES_MAX) {
            self.find("identity", format!("a value is longer than {VALUE_BYTES_MAX} bytes"));
        }
        self.allowance(over.allowance);
    }
}
