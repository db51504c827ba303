//! What goes wrong, and what it does to the world.

use std::collections::BTreeMap;

use policy_sync::model::Limit;

use super::{Event, Expect, Input, LEAVE_US, World};
use crate::{bucket::Buckets, redis::Moved};

/// One thing that goes wrong, or that people do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A shard's node does nothing for a while; what was sent to it is carried out after that.
    Freeze {
        /// Which shard.
        shard: usize,
        /// How long.
        for_us: u64,
    },
    /// Everything to and from a shard's node takes longer for a while.
    Slow {
        /// Which shard.
        shard: usize,
        /// How much longer, each way.
        extra_us: u64,
        /// How long.
        for_us: u64,
    },
    /// Nothing arrives any more on the connections that a shard's node has, and nobody notices.
    Mute {
        /// Which shard.
        shard: usize,
    },
    /// A shard's node is killed, and comes back.
    Kill {
        /// Which shard.
        shard: usize,
        /// When it comes back.
        for_us: u64,
        /// Whether it still has its buckets then.
        keeps: bool,
    },
    /// A shard's node is killed, and another one takes its place, with what it had heard of by then.
    Failover {
        /// Which shard.
        shard: usize,
        /// What it had not heard of: the writes of the last so many microseconds.
        lag_us: u64,
        /// When it is promoted.
        after_us: u64,
        /// What its clock is ahead.
        ahead_ms: i64,
    },
    /// The clock of a shard's node is set.
    ClockStep {
        /// Which shard.
        shard: usize,
        /// By how much, forward or back.
        ms: i64,
    },
    /// A gateway ends, and another one takes its place.
    Restart {
        /// Which place.
        gateway: usize,
        /// In good order, or by a crash.
        in_order: bool,
        /// When the other one starts.
        after_us: u64,
    },
    /// Another version of the policy is in force at all gateways, each at its time.
    Reload,
    /// The same at one of them.
    ReloadAt {
        /// Which place.
        gateway: usize,
    },
    /// A replica has heard of everything up to here.
    Replicated {
        /// Of which shard.
        shard: usize,
    },
    /// A node that was killed is back.
    Back {
        /// Of which shard.
        shard: usize,
        /// Whether it has its buckets.
        keeps: bool,
    },
    /// A replica is promoted.
    Promoted {
        /// Of which shard.
        shard: usize,
        /// What its clock is ahead.
        ahead_ms: i64,
    },
    /// A gateway starts.
    Start {
        /// Where.
        gateway: usize,
    },
}

/// Gateways hear of another policy within this time.
const RELOAD_US: u32 = 30_000;

impl World {
    pub(super) fn fault(&mut self, fault: Fault) {
        match fault {
            Fault::Start { .. } | Fault::Reload | Fault::ReloadAt { .. } | Fault::Replicated { .. } => {}
            _ => self.has_faulted = true,
        }
        let now_us = self.now_us;
        match fault {
            Fault::Freeze { shard, for_us } => self.site(shard).frozen_until_us = now_us + for_us,
            Fault::Slow { shard, extra_us, for_us } => self.site(shard).slow = (extra_us, now_us + for_us),
            Fault::Mute { shard } => {
                for pipe in self.network.open_at(self.slots.primaries[shard]) {
                    self.network.pipes[pipe].is_mute = true;
                }
            }
            Fault::Kill { shard, for_us, keeps } => {
                self.kill(shard);
                self.plan(now_us + for_us, Event::Fault(Fault::Back { shard, keeps }));
            }
            Fault::Back { shard, keeps } => {
                if self.site(shard).node.is_up {
                    return;
                }
                if !keeps {
                    self.replace_buckets(shard, Buckets::default());
                }
                self.site(shard).node.start();
            }
            Fault::Replicated { shard } => {
                let buckets = self.site(shard).node.buckets.clone();
                let standby = self.standby(shard);
                self.network.nodes[standby].node.buckets = buckets;
            }
            Fault::Failover { shard, after_us, ahead_ms, .. } => {
                self.kill(shard);
                self.plan(now_us + after_us, Event::Fault(Fault::Promoted { shard, ahead_ms }));
            }
            Fault::Promoted { shard, ahead_ms } => self.promote(shard, ahead_ms),
            Fault::ClockStep { shard, ms } => {
                self.look_at_clock(shard);
                self.site(shard).node.ahead_ms += ms;
                self.look_at_clock(shard);
            }
            Fault::Restart { gateway, in_order, after_us } => self.restart(gateway, in_order, after_us),
            Fault::Start { gateway } => {
                if self.places[gateway].gateway.is_none() {
                    self.start(gateway);
                }
            }
            Fault::Reload => {
                for gateway in 0..self.places.len() {
                    let late_us = u64::from(self.random.below(RELOAD_US));
                    self.plan(now_us + late_us, Event::Fault(Fault::ReloadAt { gateway }));
                }
            }
            Fault::ReloadAt { gateway } => {
                if let Some(gateway) = &mut self.places[gateway].gateway {
                    gateway.reload(&self.settings.reloaded);
                }
            }
        }
    }

    fn site(&mut self, shard: usize) -> &mut super::network::Site {
        &mut self.network.nodes[self.slots.primaries[shard]]
    }

    /// The other node of a shard.
    fn standby(&self, shard: usize) -> usize {
        let primary = self.slots.primaries[shard];
        if primary == shard { self.settings.shards + shard } else { shard }
    }

    fn kill(&mut self, shard: usize) {
        let node = self.slots.primaries[shard];
        self.network.nodes[node].node.is_up = false;
        for pipe in self.network.open_at(node) {
            self.network.pipes[pipe].is_open = false;
            self.tell_core(pipe, self.now_us, Input::Closed);
        }
    }

    fn promote(&mut self, shard: usize, ahead_ms: i64) {
        // It may be back, from an earlier fault: there is one primary at a time.
        self.kill(shard);
        let standby = self.standby(shard);
        let (buckets, at) = (self.network.nodes[standby].node.buckets.clone(), self.now_us);
        self.look_at_clock(shard);
        self.network.nodes[standby].node.ahead_ms = ahead_ms;
        // By the clock by which it will be read.
        let (now_ms, old) = (self.network.nodes[standby].node.clock_ms(at), self.site(shard).node.buckets.clone());
        self.forget_between(now_ms, old, buckets);
        self.slots.primaries[shard] = standby;
        self.network.nodes[standby].node.start();
        self.look_at_clock(shard);
    }

    /// A shard has other buckets from now on.
    fn replace_buckets(&mut self, shard: usize, new: Buckets) {
        let now_us = self.now_us;
        let node = &mut self.site(shard).node;
        let (now_ms, old) = (node.clock_ms(now_us), std::mem::replace(&mut node.buckets, new.clone()));
        self.forget_between(now_ms, old, new);
    }

    /// Tells the ledger which tokens were given and are there again.
    fn forget_between(&mut self, now_ms: u64, mut old: Buckets, mut new: Buckets) {
        let keys: BTreeMap<String, Limit> =
            old.keys().chain(new.keys()).map(|(key, limit)| (key.to_owned(), limit)).collect();
        for (key, limit) in keys {
            let (before, after) = (old.tokens(now_ms, &key, limit), new.tokens(now_ms, &key, limit));
            let answer = crate::bucket::Answer { granted: 0, remaining: 0, retry_ms: 0, reset_ms: 0 };
            let moved = Moved { key, limit, take: crate::bucket::Take::Back, cost: 0, answer };
            if let Some(bucket) = self.bucket_of(&moved) {
                // And a fraction of one.
                self.ledger.forgot(bucket, (after + 1).saturating_sub(before));
            }
        }
    }

    fn restart(&mut self, gateway: usize, in_order: bool, after_us: u64) {
        let place = &mut self.places[gateway];
        if place.gateway.is_none() || place.is_leaving {
            return;
        }
        let (life, now_us) = (place.life, self.now_us);
        place.is_leaving = in_order;
        if in_order {
            self.plan(now_us, Event::Leaving { place: gateway, life, until_us: now_us + LEAVE_US });
        } else {
            self.end(gateway);
        }
        let from_us = now_us + if in_order { LEAVE_US } else { 0 };
        self.plan(from_us + after_us, Event::Fault(Fault::Start { gateway }));
    }

    /// A gateway that leaves answers what it was asked, and gives back what it has.
    pub(super) fn leaving(&mut self, place: usize, life: u64, until_us: u64) {
        let here = &mut self.places[place];
        let Some(gateway) = here.gateway.as_mut().filter(|_| here.life == life) else { return };
        let is_asked = here.expects.iter().flatten().any(|conn| !conn.is_empty());
        if !is_asked {
            gateway.leave();
        }
        if !is_asked && gateway.has_left() || self.now_us >= until_us {
            self.end(place);
            return;
        }
        for core in 0..self.settings.gateway.cores {
            self.wake_at(place, core, self.now_us);
        }
        self.plan(self.now_us + 1_000, Event::Leaving { place, life, until_us });
    }

    /// A gateway is gone, and what it knew.
    fn end(&mut self, place: usize) {
        let here = &mut self.places[place];
        let Some(gateway) = here.gateway.take() else { return };
        for rule in 0..here.fallbacks.len() {
            if here.fallbacks[rule] > 0 {
                here.past_fillings[rule] += gateway.fillings();
                here.past_lives[rule] += 1;
            }
            here.past_opened[rule] += here.opened[rule];
            (here.fallbacks[rule], here.opened[rule]) = (0, 0);
        }
        for expect in here.expects.iter_mut().flatten().flat_map(|conn| conn.drain(..)) {
            if let Expect::Check { stream, .. } = expect {
                self.told[stream].lost += 1;
            }
        }
        let life = here.life;
        here.is_leaving = false;
        self.network.forget(life);
    }
}
