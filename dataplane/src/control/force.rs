//! Putting policies in force: compiled aside, swapped as a whole, and freed when no core looks at them any more.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, atomic::Ordering},
};

use arc_swap::ArcSwap;
use policy_sync::{check, model::Policy, stored::StoredPolicy};

use crate::{
    policy::{LoadError, LoadedPolicy, LocalTerms, PolicyInForce, RuleSlots},
    server::Process,
    shadow::Tag,
};

/// The policy in force, and what is needed to put another one there.
pub struct Force {
    seed: u64,
    local: LocalTerms,
    slots: RuleSlots,
    in_force: PolicyInForce,
    /// Policies that were in force, until the last core has let go of them: freeing a large one takes milliseconds, and no
    /// check may wait for that.
    retired: Vec<Arc<LoadedPolicy>>,
    tags: Tags,
}

/// Under what shadow rules are written down: a rule keeps its tag until a version changes it.
#[derive(Default)]
struct Tags {
    by_name: HashMap<Box<str>, Arc<Tag>>,
    last_id: u64,
}

impl Tags {
    fn of(&mut self, name: &str, version: u64) -> Arc<Tag> {
        if let Some(tag) = self.by_name.get(name).filter(|tag| tag.version == version) {
            return Arc::clone(tag);
        }
        self.last_id += 1;
        let tag = Arc::new(Tag { id: self.last_id, rule: name.into(), version });
        self.by_name.insert(name.into(), Arc::clone(&tag));
        tag
    }
}

/// A policy that is ready to be put in force.
pub(crate) struct Compiled {
    loaded: LoadedPolicy,
    /// Counter slots that change their name with it.
    reused: Vec<u32>,
}

impl Force {
    /// Puts the first policy in force. `rules_max` is how many rules may have counters at once.
    ///
    /// # Errors
    ///
    /// When it cannot be put in force.
    pub fn new(policy: Policy, seed: u64, local: LocalTerms, rules_max: usize) -> Result<Self, LoadError> {
        let mut slots = RuleSlots::new(rules_max);
        let (loaded, _) = LoadedPolicy::load(policy, seed, local, &mut slots)?;
        warn_of_stars(&loaded.policy);
        let in_force = Arc::new(ArcSwap::from_pointee(loaded));
        Ok(Self { seed, local, slots, in_force, retired: Vec::new(), tags: Tags::default() })
    }

    /// The same for the policy of a store: what its shadow rules see is written down.
    ///
    /// # Errors
    ///
    /// See [`Force::new`].
    pub fn of_store(stored: &StoredPolicy, seed: u64, local: LocalTerms, rules_max: usize) -> Result<Self, LoadError> {
        let mut slots = RuleSlots::new(rules_max);
        let (mut loaded, _) = LoadedPolicy::load(stored.policy(), seed, local, &mut slots)?;
        let mut tags = Tags::default();
        follow_shadows(&mut loaded, stored, &mut tags);
        warn_of_stars(&loaded.policy);
        let in_force = Arc::new(ArcSwap::from_pointee(loaded));
        Ok(Self { seed, local, slots, in_force, retired: Vec::new(), tags })
    }

    /// Where the cores find the policy in force.
    pub fn policy_in_force(&self) -> PolicyInForce {
        Arc::clone(&self.in_force)
    }

    /// The process's random seed.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    pub(crate) fn slots(&self) -> &RuleSlots {
        &self.slots
    }

    /// Whether the policy in force says the same.
    pub(crate) fn is_the_same(&self, policy: &Policy) -> bool {
        let old = self.in_force.load();
        policy.rules == old.policy.rules && policy.overrides == old.policy.overrides
    }

    /// Compiles a policy. Where it succeeds the counters of its rules are taken, so it is to be [`put`](Self::put).
    pub(crate) fn compile(&mut self, policy: Policy) -> Result<Compiled, LoadError> {
        let (loaded, reused) = LoadedPolicy::load(policy, self.seed, self.local, &mut self.slots)?;
        Ok(Compiled { loaded, reused })
    }

    /// The same for the policy of a store.
    pub(crate) fn compile_stored(&mut self, stored: &StoredPolicy) -> Result<Compiled, LoadError> {
        let mut compiled = self.compile(stored.policy())?;
        follow_shadows(&mut compiled.loaded, stored, &mut self.tags);
        Ok(compiled)
    }

    /// Puts a compiled policy in force.
    pub(crate) fn put(&mut self, Compiled { loaded, reused }: Compiled, process: &Process) {
        let version = loaded.policy.version;
        let (rules, overrides) = (loaded.policy.rules.len(), loaded.policy.overrides.len());
        process.reloads.rebase(&process.counters, &reused);
        process.reloads.publish_names(&self.slots);
        self.retired.push(self.in_force.swap(Arc::new(loaded)));
        process.reloads.applied.fetch_add(1, Ordering::Relaxed);
        warn_of_stars(&self.in_force.load().policy);
        tracing::info!(version, rules, overrides, "policy in force");
    }

    /// Frees the policies that no core looks at any more.
    pub(crate) fn release(&mut self) {
        self.retired.retain(|policy| Arc::strong_count(policy) > 1);
    }
}

fn follow_shadows(loaded: &mut LoadedPolicy, stored: &StoredPolicy, tags: &mut Tags) {
    let version = |name: &str| stored.rules().get(name).map(|rule| rule.version);
    loaded.follow_shadows(|name| Some(tags.of(name, version(name)?)));
    // Of rules that are gone, or in the shadow no more, nothing need be known.
    let used: HashSet<&str> = loaded.cards.iter().filter_map(|card| Some(&*card.shadow.as_ref()?.rule)).collect();
    tags.by_name.retain(|name, _| used.contains(&**name));
}

fn warn_of_stars(policy: &Policy) {
    if let Some(remark) = check::stars_in_identities(policy) {
        tracing::warn!("{remark}");
    }
}
