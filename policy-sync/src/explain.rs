//! Why each rule applies to a request, or does not: the walk of `snapshot` for people.
//!
//! It looks at every rule and gives one reason against, a value that does not match before one that is missing. A
//! test holds both walks against each other.

use std::fmt;

use crate::{
    identity,
    model::{Allowance, Limit, Mode, Pattern, Policy, ROLLOUT_BP_ALL, Rule},
};

/// What becomes of one rule for one request.
#[derive(Clone, Debug, PartialEq)]
pub struct Explanation {
    /// The rule's name.
    pub rule: String,
    /// Whether it decides or only records.
    pub mode: Mode,
    /// Applies, or why not.
    pub outcome: Outcome,
}

/// Whether a rule applies.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// The rule applies.
    Applies {
        /// The encoded identity, as stores and rollout see it.
        identity: String,
        /// What the identity gets, after overrides.
        allowance: Allowance,
        /// Whose override it is: the rule's name or `*`; `None` without one.
        overridden_by: Option<String>,
        /// Where the identity stands in the rollout, 0..10,000.
        point: u16,
        /// What the rule covers: points below this.
        rollout_bp: u16,
    },
    /// `mode = "off"`.
    Off,
    /// A matcher's attribute, or one of `per`, is not in the request.
    Missing {
        /// The attribute.
        attribute: String,
    },
    /// A matcher does not hold.
    Mismatch {
        /// The attribute.
        attribute: String,
        /// What the rule asks for, as a policy file writes it.
        wanted: String,
        /// What the request has.
        found: String,
    },
    /// `match_all` and the request has more.
    Extra {
        /// The attribute that the rule does not mention.
        attribute: String,
    },
    /// The identity is outside the rollout.
    OutsideRollout {
        /// The encoded identity.
        identity: String,
        /// Where it stands, 0..10,000.
        point: u16,
        /// What the rule covers: points below this.
        rollout_bp: u16,
    },
}

impl Explanation {
    /// Whether the rule applies.
    pub fn applies(&self) -> bool {
        matches!(self.outcome, Outcome::Applies { .. })
    }
}

/// Explains every rule of the policy for these attributes at this time.
pub fn explain(policy: &Policy, attributes: &[(&str, &[u8])], unix_ms: i64) -> Vec<Explanation> {
    policy
        .rules
        .iter()
        .map(|rule| Explanation {
            rule: rule.name.clone(),
            mode: rule.mode,
            outcome: outcome(policy, rule, attributes, unix_ms),
        })
        .collect()
}

fn outcome(policy: &Policy, rule: &Rule, attributes: &[(&str, &[u8])], unix_ms: i64) -> Outcome {
    if rule.mode == Mode::Off {
        return Outcome::Off;
    }
    let value = |name: &str| attributes.iter().find(|(given, _)| *given == name).map(|&(_, value)| value);
    // A mismatch first: adding what is missing would not make the rule apply.
    for (attribute, pattern) in &rule.matches {
        if let Some(found) = value(attribute).filter(|found| !holds(pattern, found)) {
            return Outcome::Mismatch {
                attribute: attribute.clone(),
                wanted: written(pattern),
                found: String::from_utf8_lossy(found).into_owned(),
            };
        }
    }
    if let Some(attribute) = rule.matches.keys().chain(&rule.per).find(|name| value(name).is_none()) {
        return Outcome::Missing { attribute: attribute.clone() };
    }
    let mentioned = |name: &str| rule.matches.contains_key(name) || rule.per.iter().any(|per| per == name);
    if rule.match_all
        && let Some((extra, _)) = attributes.iter().find(|(name, _)| !mentioned(name))
    {
        return Outcome::Extra { attribute: (*extra).to_owned() };
    }
    let mut pairs: Vec<(&str, &[u8])> =
        rule.per.iter().filter_map(|name| value(name).map(|value| (name.as_str(), value))).collect();
    pairs.sort_by_key(|&(name, _)| name);
    let mut encoded = Vec::new();
    identity::encode(pairs.iter().copied(), &mut encoded);
    let identity = String::from_utf8_lossy(&encoded).into_owned();
    let point = identity::rollout_point(&rule.name, pairs, &mut encoded);
    if rule.rollout_bp != ROLLOUT_BP_ALL && point >= rule.rollout_bp {
        return Outcome::OutsideRollout { identity, point, rollout_bp: rule.rollout_bp };
    }
    let over = ["", "*"].iter().find_map(|&star| {
        let wanted = if star.is_empty() { rule.name.as_str() } else { star };
        policy.overrides.iter().find(|over| {
            over.rule == wanted
                && over.expires.is_none_or(|expires| expires.as_millisecond() > unix_ms)
                && over.identity.len() == rule.per.len()
                && over.identity.iter().zip(&rule.per).all(|(wanted, name)| value(name) == Some(wanted.as_bytes()))
        })
    });
    Outcome::Applies {
        identity,
        allowance: over.map_or(rule.allowance, |over| over.allowance),
        overridden_by: over.map(|over| over.rule.clone()),
        point,
        rollout_bp: rule.rollout_bp,
    }
}

fn holds(pattern: &Pattern, value: &[u8]) -> bool {
    match pattern {
        Pattern::Exact(wanted) => value == wanted.as_bytes(),
        Pattern::Prefix(prefix) => value.starts_with(prefix.as_bytes()),
        Pattern::Present => true,
    }
}

/// A pattern as a policy file writes it.
fn written(pattern: &Pattern) -> String {
    match pattern {
        Pattern::Exact(value) => value.clone(),
        Pattern::Prefix(prefix) => format!("{prefix}*"),
        Pattern::Present => "*".into(),
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at once, {} each ", self.capacity, self.refill)?;
        // The largest unit that divides the period.
        let units = [(86_400_000, "d"), (3_600_000, "h"), (60_000, "m"), (1000, "s"), (1, "ms")];
        match units.iter().find(|(unit_ms, _)| self.period_ms.is_multiple_of(*unit_ms)) {
            Some((unit_ms, unit)) => write!(f, "{}{unit}", self.period_ms / unit_ms),
            None => Ok(()),
        }
    }
}
