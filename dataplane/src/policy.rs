//! The policy in force: the snapshot with what the data plane adds to it, and the one place where all cores find it.
//!
//! A new policy replaces the old as a whole. Each core looks at the start of a wake-up and keeps what it found until
//! the end of it, so no check sees two policies.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use arc_swap::ArcSwap;
use policy_sync::{
    model::{Hot, Lease, Limit, Mode, OnFailure, Pattern, Policy, Rule},
    rate::Rate,
    snapshot::{CompiledRule, Grant, Snapshot, compile::CompileError},
};
use thiserror::Error;

use crate::{
    decision::UNLIMITED,
    hot::{self, rejections},
    resp::reply::RuleReply,
    shadow::Tag,
    store::{parts, wire::LimitWords},
};

/// A policy ready to decide with.
pub struct LoadedPolicy {
    /// The compiled policy.
    pub snapshot: Snapshot,
    /// The policy as it was read, for people.
    pub policy: Policy,
    /// By rule: what deciding and answering need of it.
    pub cards: Box<[RuleCard]>,
    /// By override: the limit of its buckets in memory while the store does not answer. Meaningless where it grants none.
    override_locals: Box<[Rate]>,
    /// By override: how its key is met where it is hot, if that is not as the rule says.
    override_meets: Box<[Option<Hot>]>,
    /// The values of the attribute `domain` that rules ask for.
    domains: Domains,
}

/// Which domains a policy knows: those of Envoy's requests become the attribute `domain`.
#[derive(Default)]
struct Domains {
    exact: HashSet<Box<str>>,
    prefixes: Vec<Box<str>>,
    /// A rule applies whatever the domain is.
    any: bool,
}

impl Domains {
    fn of(policy: &Policy) -> Self {
        let mut domains = Self::default();
        for rule in policy.rules.iter().filter(|rule| rule.mode != Mode::Off) {
            match rule.matches.get("domain") {
                Some(Pattern::Exact(domain)) => drop(domains.exact.insert(domain.as_str().into())),
                Some(Pattern::Prefix(prefix)) => domains.prefixes.push(prefix.as_str().into()),
                Some(Pattern::Present) | None => domains.any = true,
            }
        }
        domains
    }
}

/// How the buckets are made that stand in, in this gateway's memory, while the store does not answer; settings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LocalTerms {
    /// What they get of a limit where the rule does not say it, above 0 and at most 1.
    pub share: f64,
    /// They are full again when nothing was asked of them for this long, in milliseconds.
    pub idle_ms: u64,
}

impl Default for LocalTerms {
    fn default() -> Self {
        Self { share: 0.5, idle_ms: 300_000 }
    }
}

impl LocalTerms {
    /// The share of a rate.
    pub fn rate(&self, rate: &Rate) -> Rate {
        // A share of a limit that is valid is valid; see `Limit::share`.
        self.idle(Rate::new(rate.limit().share(self.share)).unwrap_or(*rate))
    }

    fn idle(&self, mut rate: Rate) -> Rate {
        rate.ticks_to_full = rate.ticks_to_full.min(self.idle_ms / u64::from(rate.tick_ms)).max(1);
        rate
    }
}

/// What deciding and answering need of a rule, side by side.
pub struct RuleCard {
    /// The rule's own limit, where it is one that the rule enforces: all that a check without an override needs.
    pub enforced: Option<Rate>,
    /// What is needed of that limit to answer without a call.
    pub hot: HotTerms,
    /// Whether it enforces, only records, or sleeps.
    pub mode: Mode,
    /// See [`CompiledRule::identity_group`].
    pub identity_group: u32,
    /// The rule's own limit as the store's script takes it, where it grants one.
    pub limit_words: Option<LimitWords>,
    /// What answers while the store does not.
    pub on_failure: OnFailure,
    /// The limit of its buckets in memory while the store does not answer. Meaningless where it grants no limit.
    local: Rate,
    /// How its hot keys are met.
    meets: Hot,
    /// Its counters' slot.
    pub slot: u32,
    /// Its part of a check's reply.
    pub reply: RuleReply,
    /// Under what it is written down whom it would have denied: only a shadow rule out of a policy store.
    pub shadow: Option<Arc<Tag>>,
}

/// What a check needs of a rule's own limit where it may be answered without a call.
#[derive(Clone, Copy, Debug, Default)]
pub struct HotTerms {
    /// See [`hot::limit_key`].
    pub limit_key: u64,
    /// How long all tokens but one take to come.
    pub rest_us: u64,
    /// Whether tokens may be taken in advance.
    pub may_lease: bool,
}

impl HotTerms {
    fn new(rate: &Rate, meets: &Hot) -> Self {
        Self {
            limit_key: hot::limit_key(rate),
            rest_us: rejections::fill_us(rate, rate.capacity.saturating_sub(1)),
            may_lease: meets.lease != Lease::Off,
        }
    }
}

/// Where the cores find the policy in force.
pub type PolicyInForce = Arc<ArcSwap<LoadedPolicy>>;

/// Why a policy cannot be put in force.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum LoadError {
    /// It does not compile.
    #[error(transparent)]
    Compile(#[from] CompileError),
    /// Its rules, with those before it, need more counters than there are.
    #[error("the policy has {rules} rules; the most is {max} (setting limits.rules_max)")]
    TooManyRules {
        /// How many it has.
        rules: usize,
        /// How many slots there are.
        max: usize,
    },
}

/// Which counters belong to which rule name.
///
/// A rule keeps its slot, and so its counts, through every change of the policy. When a rule is gone its slot is kept
/// for its return until slots run out; then the slot that was unused for longest is given to another name.
pub struct RuleSlots {
    by_name: HashMap<Box<str>, Slot>,
    max: usize,
    generation: u64,
}

#[derive(Clone, Copy)]
struct Slot {
    index: u32,
    /// The last policy that had the rule.
    generation: u64,
}

impl RuleSlots {
    /// At most `max` names.
    pub fn new(max: usize) -> Self {
        Self { by_name: HashMap::new(), max, generation: 0 }
    }

    /// How many slots there are.
    pub fn max(&self) -> usize {
        self.max
    }

    /// Gives each of a policy's rules its slot. Returns those that were taken from another name.
    fn assign(&mut self, names: &[&str]) -> Result<(Vec<u32>, Vec<u32>), LoadError> {
        if names.len() > self.max {
            return Err(LoadError::TooManyRules { rules: names.len(), max: self.max });
        }
        self.generation += 1;
        let mut missing = Vec::new();
        for &name in names {
            match self.by_name.get_mut(name) {
                Some(slot) => slot.generation = self.generation,
                None => missing.push(name),
            }
        }
        let mut reused = Vec::new();
        for name in missing {
            let index = if self.by_name.len() < self.max {
                self.by_name.len() as u32
            } else {
                let index = self.take_oldest();
                reused.push(index);
                index
            };
            self.by_name.insert(name.into(), Slot { index, generation: self.generation });
        }
        Ok((names.iter().map(|&name| self.by_name[name].index).collect(), reused))
    }

    /// Takes the slot of the name that has been out of the policy for longest. There is one: the policy has no more
    /// rules than there are slots.
    fn take_oldest(&mut self) -> u32 {
        let oldest = self.by_name.iter().min_by_key(|(_, slot)| slot.generation);
        let (name, index) = oldest.map(|(name, slot)| (name.clone(), slot.index)).unwrap_or_default();
        self.by_name.remove(&name);
        index
    }

    /// Every name that has a slot, for the scrape.
    pub fn names(&self) -> impl Iterator<Item = (&str, u32)> {
        self.by_name.iter().map(|(name, slot)| (&**name, slot.index))
    }
}

impl LoadedPolicy {
    /// Compiles a policy. Also returns the counter slots that changed their name, which start from zero.
    ///
    /// # Errors
    ///
    /// See [`LoadError`]; the slots are then as before.
    pub fn load(
        policy: Policy,
        seed: u64,
        local: LocalTerms,
        slots: &mut RuleSlots,
    ) -> Result<(Self, Vec<u32>), LoadError> {
        let snapshot = Snapshot::compile(&policy, seed)?;
        let names: Vec<&str> = policy.rules.iter().map(|rule| rule.name.as_str()).collect();
        let (slots, reused) = slots.assign(&names)?;
        let rules = snapshot.rules().iter().zip(&policy.rules).zip(slots);
        let cards = rules.map(|((rule, written), slot)| RuleCard::new(rule, written, local, slot)).collect();
        let override_locals = snapshot.override_grants().map(|grant| stand_in(grant, None, local)).collect();
        let override_meets: Box<[Option<Hot>]> = policy.overrides.iter().map(|over| over.hot).collect();
        let written = policy.rules.iter().map(|rule| &rule.hot).chain(override_meets.iter().flatten());
        if written.into_iter().any(|hot| hot.split.is_some()) {
            parts::prepare();
        }
        let domains = Domains::of(&policy);
        Ok((Self { snapshot, cards, override_locals, override_meets, domains, policy }, reused))
    }

    /// Whether any rule can apply to a request of this domain.
    pub fn knows_domain(&self, domain: &str) -> bool {
        let Domains { exact, prefixes, any } = &self.domains;
        *any || exact.contains(domain) || prefixes.iter().any(|prefix| domain.starts_with(&**prefix))
    }

    /// What its shadow rules see is written down under these tags, by the rule's name.
    pub fn follow_shadows(&mut self, mut tag: impl FnMut(&str) -> Option<Arc<Tag>>) {
        for (card, rule) in self.cards.iter_mut().zip(&self.policy.rules) {
            card.shadow = if rule.mode == Mode::Shadow { tag(&rule.name) } else { None };
        }
    }

    /// The limit of a bucket in memory, while the store does not answer: of a rule, or of an override of it.
    pub fn local_rate(&self, rule: u32, override_index: u32) -> &Rate {
        self.override_locals.get(override_index as usize).unwrap_or_else(|| &self.cards[rule as usize].local)
    }

    /// Whether each check of a rule asks one bucket, and asks for itself.
    pub fn is_whole(&self, rule: u32) -> bool {
        let meets = &self.cards[rule as usize].meets;
        meets.split.is_none() && meets.sample.is_none()
    }

    /// How a key is met where it is hot: of a rule, or of an override of it.
    #[inline(always)]
    pub fn meets(&self, rule: u32, override_index: u32) -> &Hot {
        let over = self.override_meets.get(override_index as usize).and_then(Option::as_ref);
        over.unwrap_or_else(|| &self.cards[rule as usize].meets)
    }
}

/// A rate that grants as little as a rate can; it stands where there is no limit.
const LEAST: Rate =
    Rate { capacity: 1, units_per_token: 1, units_per_tick: 1, ticks_to_full: 1, tick_ms: 1, refill: 1, period_ms: 1 };

/// What a bucket in memory gets: what the rule says, or its share of the limit.
fn stand_in(grant: &Grant, written: Option<Limit>, local: LocalTerms) -> Rate {
    match (written.and_then(|limit| Rate::new(limit).ok()), grant) {
        (Some(rate), _) => local.idle(rate),
        (None, Grant::Limit(rate)) => local.rate(rate),
        (None, Grant::Deny | Grant::Exempt) => LEAST,
    }
}

impl RuleCard {
    fn new(rule: &CompiledRule, written: &Rule, local: LocalTerms, slot: u32) -> Self {
        let (limit, enforced) = match rule.allowance {
            Grant::Limit(rate) => (i64::from(rate.capacity), (rule.mode == Mode::Enforce).then_some(rate)),
            Grant::Deny | Grant::Exempt => (UNLIMITED, None),
        };
        Self {
            enforced,
            hot: enforced.as_ref().map(|rate| HotTerms::new(rate, &written.hot)).unwrap_or_default(),
            mode: rule.mode,
            identity_group: rule.identity_group,
            limit_words: match &rule.allowance {
                Grant::Limit(rate) => Some(LimitWords::new(rate)),
                Grant::Deny | Grant::Exempt => None,
            },
            on_failure: written.on_failure,
            local: stand_in(&rule.allowance, written.local, local),
            meets: written.hot,
            slot,
            reply: RuleReply::new(&rule.name, limit),
            shadow: None,
        }
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_keeps_its_slot_and_a_gone_one_is_reused_last() {
        let mut slots = RuleSlots::new(3);
        assert_eq!(slots.assign(&["a", "b"]).unwrap(), (vec![0, 1], vec![]));
        assert_eq!(slots.assign(&["b"]).unwrap(), (vec![1], vec![]));
        assert_eq!(slots.assign(&["b", "c"]).unwrap(), (vec![1, 2], vec![]));
        assert_eq!(slots.assign(&["a", "c"]).unwrap(), (vec![0, 2], vec![]));
        assert_eq!(slots.assign(&["d", "c"]).unwrap(), (vec![1, 2], vec![1]), "b was out for longest");
        let names = ["1", "2", "3", "4"];
        assert_eq!(slots.assign(&names), Err(LoadError::TooManyRules { rules: 4, max: 3 }));
    }
}
