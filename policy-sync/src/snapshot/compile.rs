//! Builds a snapshot from a policy that `check` has passed.
//!
//! Each rule is hung on the condition that the fewest rules share, so that the candidate lists stay short whatever
//! the policy looks like: ten thousand rules that share a path but differ in a tenant hang on the tenant.

use std::collections::{BTreeMap, BTreeSet};

use thiserror::Error;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::{
    CompiledOverride, CompiledRule, Condition, Grant, Lookup, Matcher, Snapshot, exact_key, fold, index::Index,
    names::NameTable, prefix_key, share, star_salt,
};
use crate::{
    model::{Allowance, Mode, Override, Pattern, Policy, ROLLOUT_BP_ALL, Rule},
    rate::{Rate, RateError},
    snapshot::NameId,
};

/// Why a policy does not compile. `check` finds all of these first, with the place and a suggestion.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum CompileError {
    /// A limit is out of its bounds.
    #[error("rule {rule:?}: {error}")]
    Rate {
        /// The rule's name.
        rule: String,
        /// What is out of bounds.
        error: RateError,
    },
    /// A quota, which needs the store.
    #[error("rule {rule:?}: quota is not served yet")]
    Quota {
        /// The rule's name.
        rule: String,
    },
    /// More attribute names than a snapshot can number.
    #[error("the rules mention {count} attribute names; the most is {}", crate::model::ATTRIBUTE_NAMES_MAX)]
    AttributeNames {
        /// How many there are.
        count: usize,
    },
    /// An override for a rule that is not there.
    #[error("an override names the rule {rule:?}, which does not exist")]
    UnknownRule {
        /// The name that it gives.
        rule: String,
    },
}

impl Snapshot {
    /// Compiles a policy. `seed` is the process's, random, the same for every snapshot of the process.
    ///
    /// # Errors
    ///
    /// See [`CompileError`]; a policy that `check` passed has none.
    pub fn compile(policy: &Policy, seed: u64) -> Result<Self, CompileError> {
        let names = attribute_names(policy)?;
        let mut rules = Vec::with_capacity(policy.rules.len());
        for rule in &policy.rules {
            rules.push(compile_rule(rule, &names, seed)?);
        }
        number_identity_groups(&mut rules);
        let (overrides, override_index) = compile_overrides(policy, &mut rules, seed)?;
        let (lookups, unconditional, index) = hang(&rules, &names, seed);
        let longest_fill_ms = rules
            .iter()
            .map(|rule| rule.allowance)
            .chain(overrides.iter().map(|over| over.allowance))
            .map(|grant| if let Grant::Limit(rate) = grant { rate.fill_ms() } else { 0 })
            .max()
            .unwrap_or(0);
        Ok(Self {
            version: policy.version,
            seed,
            names,
            lookups,
            unconditional,
            index,
            rules: rules.into(),
            overrides: overrides.into(),
            override_index,
            longest_fill_ms,
        })
    }
}

fn attribute_names(policy: &Policy) -> Result<NameTable, CompileError> {
    let names: BTreeSet<&str> =
        policy.rules.iter().flat_map(|rule| rule.matches.keys().chain(&rule.per)).map(String::as_str).collect();
    if names.len() > crate::model::ATTRIBUTE_NAMES_MAX {
        return Err(CompileError::AttributeNames { count: names.len() });
    }
    Ok(NameTable::new(names.into_iter().map(Into::into).collect()))
}

fn compile_rule(rule: &Rule, names: &NameTable, seed: u64) -> Result<CompiledRule, CompileError> {
    // Every name of the policy is in the table: it was built from them.
    let id = |name: &str| names.find(name.as_bytes()).unwrap_or_default();
    let mut per_sorted: Vec<u8> = (0..rule.per.len() as u8).collect();
    per_sorted.sort_by_key(|&position| &rule.per[usize::from(position)]);
    let salt = xxh3_64_with_seed(rule.name.as_bytes(), seed);
    Ok(CompiledRule {
        name: rule.name.as_str().into(),
        mode: rule.mode,
        allowance: grant(rule.allowance, &rule.name)?,
        rollout_bp: rule.rollout_bp,
        matchers: rule
            .matches
            .iter()
            .map(|(name, pattern)| Matcher { name: id(name), condition: condition(pattern) })
            .collect(),
        match_all: rule.match_all,
        per: rule.per.iter().map(|name| id(name)).collect(),
        per_sorted: per_sorted.into(),
        identity_group: 0,
        // A bucket's key must not be the key salt itself where `per` is empty, nor meet another rule's.
        key_salt: fold(salt, 0x6275_636B_6574),
        override_salt: fold(salt, 0x6F76_6572),
        has_overrides: false,
        has_star_overrides: false,
    })
}

fn number_identity_groups(rules: &mut [CompiledRule]) {
    let mut numbers: BTreeMap<Vec<NameId>, u32> = BTreeMap::new();
    for rule in rules {
        let sorted = rule.per_sorted.iter().map(|&position| rule.per[usize::from(position)]).collect();
        let next = numbers.len() as u32;
        rule.identity_group = *numbers.entry(sorted).or_insert(next);
    }
}

fn grant(allowance: Allowance, rule: &str) -> Result<Grant, CompileError> {
    match allowance {
        Allowance::Limit(limit) => {
            Rate::new(limit).map(Grant::Limit).map_err(|error| CompileError::Rate { rule: rule.into(), error })
        }
        Allowance::Quota(_) => Err(CompileError::Quota { rule: rule.into() }),
        Allowance::Deny => Ok(Grant::Deny),
        Allowance::Exempt => Ok(Grant::Exempt),
    }
}

fn condition(pattern: &Pattern) -> Condition {
    match pattern {
        Pattern::Exact(value) => Condition::Exact(value.as_bytes().into()),
        Pattern::Prefix(prefix) => Condition::Prefix(prefix.as_bytes().into()),
        Pattern::Present => Condition::Present,
    }
}

fn compile_overrides(
    policy: &Policy,
    rules: &mut [CompiledRule],
    seed: u64,
) -> Result<(Vec<CompiledOverride>, Index), CompileError> {
    let by_name: BTreeMap<&str, u32> =
        policy.rules.iter().enumerate().map(|(index, rule)| (rule.name.as_str(), index as u32)).collect();
    let mut overrides = Vec::with_capacity(policy.overrides.len());
    let mut pairs = Vec::with_capacity(policy.overrides.len());
    for over in &policy.overrides {
        let rule = if over.rule == "*" {
            for rule in rules.iter_mut().filter(|rule| rule.per.len() == over.identity.len()) {
                rule.has_star_overrides = true;
            }
            None
        } else {
            let Some(&index) = by_name.get(over.rule.as_str()) else {
                return Err(CompileError::UnknownRule { rule: over.rule.clone() });
            };
            rules[index as usize].has_overrides = true;
            Some(index)
        };
        let salt = rule.map_or_else(|| star_salt(seed), |index| rules[index as usize].override_salt);
        pairs.push((override_key(salt, &over.identity, seed), overrides.len() as u32));
        overrides.push(compile_override(over, rule)?);
    }
    Ok((overrides, Index::new(pairs)))
}

fn compile_override(over: &Override, rule: Option<u32>) -> Result<CompiledOverride, CompileError> {
    Ok(CompiledOverride {
        rule,
        identity: over.identity.iter().map(|value| value.as_bytes().into()).collect(),
        allowance: grant(over.allowance, &over.rule)?,
        expires_unix_ms: over.expires.map_or(i64::MAX, |expires| expires.as_millisecond()),
    })
}

fn override_key(salt: u64, identity: &[String], seed: u64) -> u64 {
    identity.iter().enumerate().fold(salt, |key, (position, value)| {
        key.wrapping_add(share(position, xxh3_64_with_seed(value.as_bytes(), seed)))
    })
}

/// The condition that a rule hangs on, in the order of preference where equally many rules share it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Hook<'a> {
    Exact(NameId, &'a [u8]),
    Prefix(NameId, &'a [u8]),
    Present(NameId),
}

fn hooks(rule: &CompiledRule) -> impl Iterator<Item = Hook<'_>> {
    let matchers = rule.matchers.iter().map(|matcher| match &matcher.condition {
        Condition::Exact(value) => Hook::Exact(matcher.name, value),
        Condition::Prefix(prefix) => Hook::Prefix(matcher.name, prefix),
        Condition::Present => Hook::Present(matcher.name),
    });
    matchers.chain(rule.per.iter().map(|&name| Hook::Present(name)))
}

/// Hangs every rule that is not off on its rarest condition.
fn hang(rules: &[CompiledRule], names: &NameTable, seed: u64) -> (Box<[Lookup]>, Box<[u32]>, Index) {
    let mut lookups: Vec<Lookup> = (0..names.len())
        .map(|id| Lookup {
            salt: fold(xxh3_64_with_seed(names.name(id as NameId).as_bytes(), seed), 0x6E61_6D65),
            ..Lookup::default()
        })
        .collect();
    let live = || rules.iter().enumerate().filter(|(_, rule)| rule.mode != Mode::Off);
    let mut shared: BTreeMap<Hook<'_>, usize> = BTreeMap::new();
    for hook in live().flat_map(|(_, rule)| hooks(rule)) {
        *shared.entry(hook).or_default() += 1;
    }
    let mut present: Vec<Vec<u32>> = vec![Vec::new(); names.len()];
    let mut prefix_lens: Vec<BTreeSet<u32>> = vec![BTreeSet::new(); names.len()];
    let (mut pairs, mut unconditional) = (Vec::new(), Vec::new());
    for (index, rule) in live() {
        let index = index as u32;
        match hooks(rule).min_by_key(|hook| (shared[hook], *hook)) {
            Some(Hook::Exact(name, value)) => {
                let lookup = &mut lookups[usize::from(name)];
                lookup.exact = true;
                pairs.push((exact_key(lookup.salt, xxh3_64_with_seed(value, seed)), index));
            }
            Some(Hook::Prefix(name, prefix)) => {
                prefix_lens[usize::from(name)].insert(prefix.len() as u32);
                pairs.push((prefix_key(lookups[usize::from(name)].salt, xxh3_64_with_seed(prefix, seed)), index));
            }
            Some(Hook::Present(name)) => present[usize::from(name)].push(index),
            None => unconditional.push(index),
        }
    }
    for ((lookup, present), prefix_lens) in lookups.iter_mut().zip(present).zip(prefix_lens) {
        lookup.others = !present.is_empty() || !prefix_lens.is_empty();
        lookup.present = present.into();
        lookup.prefix_lens = prefix_lens.into_iter().collect();
    }
    for &name in live().flat_map(|(_, rule)| &rule.per) {
        lookups[usize::from(name)].hashed = true;
    }
    for lookup in &mut lookups {
        lookup.hashed |= lookup.exact;
        lookup.opaque = true;
    }
    for (_, rule) in live() {
        let asked = rule.matchers.iter().filter(|matcher| !matches!(matcher.condition, Condition::Present));
        asked.for_each(|matcher| lookups[usize::from(matcher.name)].opaque = false);
        if rule.has_overrides || rule.has_star_overrides || rule.rollout_bp != ROLLOUT_BP_ALL {
            rule.per.iter().for_each(|&name| lookups[usize::from(name)].opaque = false);
        }
    }
    (lookups.into(), unconditional.into(), Index::new(pairs))
}
