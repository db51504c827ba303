//! Putting policies in force: compiled aside, swapped as a whole, and freed when no core looks at them any more.

use std::sync::{Arc, atomic::Ordering};

use arc_swap::ArcSwap;
use policy_sync::{check, model::Policy};

use crate::{
    policy::{LoadError, LoadedPolicy, LocalTerms, PolicyInForce, RuleSlots},
    server::Process,
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
        Ok(Self { seed, local, slots, in_force: Arc::new(ArcSwap::from_pointee(loaded)), retired: Vec::new() })
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

fn warn_of_stars(policy: &Policy) {
    if let Some(remark) = check::stars_in_identities(policy) {
        tracing::warn!("{remark}");
    }
}
