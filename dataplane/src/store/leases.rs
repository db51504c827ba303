//! Leases at the asker: when a group's call brings a batch along, and when a lease is given back.
//!
//! A lease begins with a call that is made anyway: it asks for the checks and for a batch, up to what there is, and what
//! the checks do not take is the lease's. From then on checks of the same buckets are paid from it on every core, and the
//! core that finds it low asks for the next batch. The core that opened it keeps the group, and with it the keys, and
//! gives back what is left when the key has gone quiet, when the policy changes, and when the server leaves.

use policy_sync::model::Lease;

use super::{NO_RULE, Store, StoreSettings, Surroundings, deal::BucketReply, pool::Handle, tables::Tables};
use crate::{
    heat::Warmth,
    hot::{
        Hot,
        leases::{Batch, LeaseId},
    },
};

/// How often a core looks whether its leases are still used.
const LOOK_EVERY_US: u64 = 50_000;

/// The leases that this core has opened.
#[derive(Default)]
pub(super) struct Owned {
    leases: Vec<OwnedLease>,
    look_at_us: u64,
    /// The server leaves: none is opened any more.
    is_leaving: bool,
}

struct OwnedLease {
    id: LeaseId,
    /// Held, for its keys.
    group: Handle,
    /// What was spent in all when that last changed, and when.
    spent: u64,
    spent_at_us: u64,
}

impl Owned {
    pub(super) fn look_soon(&mut self) {
        self.look_at_us = 0;
    }
}

/// What the store said of a group's buckets, and when it was asked.
pub(super) struct Said<'a> {
    pub(super) replies: &'a [BucketReply],
    pub(super) sent_at_us: u64,
}

/// Puts the next batch of a lease in line, which the caller has begun to ask for.
pub(super) fn begin_batch(tables: &mut Tables, hot: &Hot, settings: &StoreSettings, group: Handle, now_us: u64) {
    let entry = &tables.groups[group];
    let capacity = entry.capacity();
    let bounds = match entry.lease {
        Lease::Batch(tokens) => (tokens.min(capacity), tokens.min(capacity)),
        // At least one, and a share of 32 bits.
        Lease::Auto | Lease::Off => (1, ((f64::from(capacity) * settings.leases.share) as u32).max(1)),
    };
    let key = entry.lease_key;
    let tokens = hot.leases.next_batch(key, now_us, bounds);
    if entry.has_batch || tables.batch(group, tokens).is_none() {
        hot.leases.fail(key, now_us / 1_000);
    }
}

impl Store {
    /// Before a group's call: takes a batch along, where its buckets are leased and the lease is low or begins here.
    pub(super) fn take_in_advance(&mut self, around: &mut Surroundings<'_>, handle: Handle) {
        let group = &self.tables.groups[handle];
        let (key, lease) = (group.lease_key, group.lease);
        if lease == Lease::Off || group.has_batch {
            return;
        }
        let hot = self.shards.hot();
        if !hot.leases.is_open(key) {
            let begins = match lease {
                Lease::Batch(_) => true,
                // Whether the checks that wait are so many depends on all of their buckets alike.
                Lease::Auto => group.buckets.first().is_some_and(|first| around.warmth(first.local_key) == Warmth::Hot),
                Lease::Off => false,
            };
            if !begins || self.leases.is_leaving {
                return;
            }
            let Some(id) = hot.leases.open(key, around.now_us) else { return };
            self.tables.hold(handle);
            self.leases.leases.push(OwnedLease { id, group: handle, spent: 0, spent_at_us: around.now_us });
        }
        if hot.leases.is_low(key) && hot.leases.begin_ask(key, around.now_ms) {
            begin_batch(&mut self.tables, hot, &self.settings, handle, around.now_us);
        }
    }

    /// A batch has come: what is left of a grant is the lease's. Returns whether it took it.
    pub(super) fn deposit(&mut self, around: &Surroundings<'_>, handle: Handle, tokens: u32, said: &Said<'_>) -> bool {
        let group = &mut self.tables.groups[handle];
        group.has_batch = false;
        let tightest = group.buckets.iter().zip(said.replies).min_by_key(|(_, reply)| reply.remaining);
        let Some((bucket, reply)) = tightest else { return false };
        let hot = self.shards.hot();
        let batch = Batch {
            tokens,
            remaining: reply.remaining,
            full_at_us: said.sent_at_us.saturating_add(reply.reset_after_ms.cast_unsigned().saturating_mul(1_000)),
            rule: if bucket.rule == NO_RULE { 0 } else { bucket.rule },
        };
        let is_kept = hot.leases.deposit(group.lease_key, &batch, around.now_ms);
        if is_kept && tokens > 0 {
            // What was said of these buckets before is no reason to deny what is here to be spent.
            group.buckets.iter().for_each(|bucket| hot.rejections.forget(bucket.hot_key, around.now_us));
        }
        is_kept
    }

    /// Whether the lease of a group's buckets has something to spend.
    pub(super) fn has_tokens(&self, handle: Handle) -> bool {
        let group = &self.tables.groups[handle];
        group.lease != Lease::Off && self.shards.hot().leases.has_tokens(group.lease_key)
    }

    /// A batch does not come.
    pub(super) fn lose_batch(&mut self, around: &Surroundings<'_>, handle: Handle) {
        let group = &mut self.tables.groups[handle];
        group.has_batch = false;
        self.shards.hot().leases.fail(group.lease_key, around.now_ms);
    }

    /// Closes the leases of this core that nothing is spent of, or whose policy is no longer in force; what is left of
    /// them is given back.
    pub(super) fn close_leases(&mut self, around: &mut Surroundings<'_>) {
        if around.now_us < self.leases.look_at_us {
            return;
        }
        self.leases.look_at_us = around.now_us + LOOK_EVERY_US;
        let in_force = self.policies.back().map(|(generation, _)| *generation);
        let mut at = 0;
        while let Some(lease) = self.leases.leases.get_mut(at) {
            let spent = self.shards.hot().leases.spent(lease.id);
            if spent != lease.spent {
                (lease.spent, lease.spent_at_us) = (spent, around.now_us);
            }
            let group = &self.tables.groups[lease.group];
            let is_quiet = around.now_us.saturating_sub(lease.spent_at_us) >= self.settings.leases.quiet_us;
            let mut is_cold = || {
                let first = group.buckets.first();
                group.lease == Lease::Auto && first.is_some_and(|first| around.warmth(first.local_key) == Warmth::Cold)
            };
            if self.leases.is_leaving || is_quiet || Some(group.policy) != in_force || is_cold() {
                let lease = self.leases.leases.swap_remove(at);
                let left = self.shards.hot().leases.close(lease.id);
                self.tables.give_back(lease.group, left);
                self.tables.let_go(lease.group);
            } else {
                at += 1;
            }
        }
    }

    /// The server leaves: the next [`Store::flush`] gives back what leases hold, and none is opened any more.
    pub fn give_back_leases(&mut self) {
        self.leases.is_leaving = true;
        self.leases.look_soon();
    }

    /// Whether this core has no lease any more, and everything that it gives back is on its way.
    pub fn has_given_back(&self) -> bool {
        self.leases.leases.is_empty() && self.tables.backs.is_empty()
    }
}
