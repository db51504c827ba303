//! The checks that heat looks at: one in sixteen. What is here is off the way of the others.
//!
//! A bucket gets its name from the attributes of a check, which only the long way has. So a check that is sampled while it
//! is recalled, and of which a bucket is still to be named, goes that way after all.

use policy_sync::{
    identity,
    model::Mode,
    snapshot::{Applied, Attributes, Grant},
};

use super::Engine;
use crate::{
    heat::{DecidedBy, Heat, Owner},
    policy::LoadedPolicy,
    resp::command::Dialect,
};

/// Counts a sampled check for the buckets of its rules. Returns whether one of them is to be named.
#[inline(never)]
pub(super) fn touch(heat: &mut Heat, policy: &LoadedPolicy, has_store: bool, applied: &[Applied]) -> bool {
    let mut is_nameless = false;
    for one in applied {
        let Grant::Limit(_) = policy.snapshot.grant(*one) else { continue };
        let card = &policy.cards[one.rule as usize];
        is_nameless |= heat.touch(one.key, Owner::Rule(card.slot)).is_nameless;
        match card.mode {
            // What the store says of it is not waited for. It takes a call like any other, at most.
            Mode::Shadow => heat.decided(one.key, DecidedBy::Shadow, if has_store { 1.0 } else { 0.0 }),
            _ if !has_store => heat.decided(one.key, DecidedBy::Memory, 0.0),
            // The store tells when it knows.
            _ => {}
        }
    }
    is_nameless
}

impl Engine {
    /// Counts a check whose rules are `Engine::applied` from `first`, if it is sampled. Returns whether it is.
    #[inline(always)]
    pub(super) fn sample(&mut self, first: usize, attributes: &Attributes<'_>) -> bool {
        let is_touched = self.heat.take_want();
        if !is_touched && !self.heat.samples() {
            return false;
        }
        self.touch_and_name(first, attributes, is_touched);
        true
    }

    #[inline(never)]
    fn touch_and_name(&mut self, first: usize, attributes: &Attributes<'_>, is_touched: bool) {
        let applied = &self.applied[first..];
        if is_touched || touch(&mut self.heat, &self.policy, self.remote.is_some(), applied) {
            for one in applied {
                self.scratch.clear();
                self.policy.snapshot.encode_identity(one.rule, attributes, &mut self.scratch);
                self.heat.name(one.key, &self.scratch);
            }
        }
    }

    /// The same for a throttle call, whose bucket is named by its key.
    #[inline]
    pub(super) fn sample_throttle(&mut self, dialect: Dialect, key: &[u8], hash: u64) -> bool {
        if !self.heat.samples() {
            return false;
        }
        if self.heat.touch(hash, Owner::Throttle(dialect.family())).is_nameless {
            self.scratch.clear();
            identity::encode_key(key, &mut self.scratch);
            self.heat.name(hash, &self.scratch);
        }
        if self.remote.is_none() {
            self.heat.decided(hash, DecidedBy::Memory, 0.0);
        }
        true
    }
}
