//! How a cluster's topology is learned, and learned anew.
//!
//! One question at a time, to one node at a time, and not before the shortest time since the last one has passed: a
//! thousand redirections lead to one question. Whatever hints at a change only sets `wanted`; a question that is not
//! answered goes to the next node. Seeds are connected at the start, and again when no other node is up. While a node that
//! has slots is not up, the question is asked again and again: nothing else tells who takes them over, since no call goes
//! where nobody is.

use super::{Client, NONE};
use crate::{
    clock::Micros,
    config::Mode,
    error::{Code, LinkError},
    link::{Asked, Link},
    reply::{ProtocolError, Reply},
    topology::{self, Range},
};

/// Where the looks at the topology stand.
#[derive(Debug, Default)]
pub(super) struct Refresh {
    /// Something hints at a change.
    pub(super) wanted: bool,
    /// The link that was asked.
    asked: Option<usize>,
    /// The next question is not asked before.
    not_before: Micros,
    /// The next question is asked then without a hint.
    next_at: Micros,
    /// The link that is asked next, if it is up.
    turn: usize,
    /// Why the last question had no usable answer.
    problem: Option<LinkError>,
}

impl Client {
    fn is_cluster(&self) -> bool {
        matches!(self.config.mode, Mode::Cluster { .. })
    }

    /// Why the last question for the topology had no usable answer: the node is in no cluster, or the cluster has no
    /// slots.
    pub fn topology_problem(&self) -> Option<&LinkError> {
        self.refresh.problem.as_ref()
    }

    /// Something hints at a change of the topology: looks as soon as it may.
    pub(super) fn refresh_soon(&mut self, now: Micros) {
        self.refresh.wanted = true;
        self.watch.wanted = true;
        self.look_around(now);
        self.chores_at = self.chores_at.min(self.next_look());
    }

    /// A link is gone.
    pub(super) fn lost(&mut self, index: usize, was_up: bool, now: Micros) {
        if self.refresh.asked == Some(index) {
            self.refresh.asked = None;
            self.refresh.wanted = true;
            self.counters.refresh_failures += 1;
        }
        self.sentinel_lost(index);
        // Also when it cannot be reached again: another node may take its slots over only some time after it was lost.
        if was_up || self.links[index].wanted || self.sentinels > 0 {
            self.refresh_soon(now);
        }
    }

    /// Asks for the topology, or for the primary, if that is due.
    pub(super) fn look_around(&mut self, now: Micros) {
        if self.sentinels > 0 {
            return self.look_at_sentinel(now);
        }
        if !self.is_cluster() || self.refresh.asked.is_some() {
            return;
        }
        let Some(index) = self.next_in_turn() else { return self.want_seeds() };
        if now < self.due_at() {
            return;
        }
        self.refresh.turn = index + 1;
        self.refresh.wanted = false;
        self.refresh.asked = Some(index);
        let pause = self.chance.spread(Micros::from_millis(self.config.refresh_ms_min), 50);
        self.refresh.not_before = now + pause;
        self.refresh.next_at = now + self.chance.spread(Micros(self.config.refresh_secs * 1_000_000), 10);
        self.counters.refreshes += 1;
        self.links[index].push_words(&[b"CLUSTER", b"SHARDS"], Asked::Shards, now);
        self.list(index);
    }

    /// When the next look is due.
    pub(super) fn next_look(&self) -> Micros {
        if self.sentinels > 0 {
            return self.next_look_at_sentinel();
        }
        // While a question is open or no link is up, something else comes first.
        if !self.is_cluster() || self.refresh.asked.is_some() || !self.links.iter().any(|link| link.is_up()) {
            return Micros::NEVER;
        }
        self.due_at()
    }

    /// When the next question is to be asked, if a node is up and no other question is open.
    fn due_at(&self) -> Micros {
        let is_away = |link: &Link| link.wanted && !link.is_up();
        if self.refresh.wanted || self.links.iter().any(is_away) {
            self.refresh.not_before.min(self.refresh.next_at)
        } else {
            self.refresh.next_at
        }
    }

    fn next_in_turn(&mut self) -> Option<usize> {
        let count = self.links.len();
        let index =
            (0..count).map(|step| (self.refresh.turn + step) % count).find(|&index| self.links[index].is_up())?;
        self.refresh.turn = index + 1;
        Some(index)
    }

    fn want_seeds(&mut self) {
        let Mode::Cluster { seeds } = &self.config.mode else { return };
        for link in &mut self.links {
            if !link.wanted && seeds.contains(&link.address) {
                link.wanted = true;
                self.chores_at = Micros(0);
            }
        }
    }

    pub(super) fn topology_answered(&mut self, index: usize, asked: Asked, reply: &Reply<'_>, now: Micros) {
        if self.refresh.asked != Some(index) {
            return;
        }
        let host = self.links[index].address.host().unwrap_or_default();
        let about = topology::Asked { host, tls: self.config.tls.is_some() };
        let ranges = match asked {
            Asked::Shards if matches!(reply, Reply::Error(_)) => {
                // Redis before 7.0 does not know SHARDS.
                self.links[index].push_words(&[b"CLUSTER", b"SLOTS"], Asked::Slots, now);
                return self.list(index);
            }
            Asked::Shards => topology::shards(reply, about),
            _ => topology::slots(reply, about),
        };
        self.refresh.asked = None;
        match ranges {
            Some(ranges) if !ranges.is_empty() => {
                self.refresh.problem = None;
                self.apply(&ranges);
                // No call goes to a slot that nobody has, so nothing else would tell when somebody has it.
                self.refresh.wanted |= self.slots.contains(&NONE);
            }
            _ => {
                self.refresh.problem = Some(match reply {
                    Reply::Error(text) => LinkError::Refused { code: Code::of(text), text: text.to_vec() },
                    _ => LinkError::Protocol(ProtocolError::Unexpected),
                });
                self.counters.refresh_failures += 1;
                self.refresh.wanted = true;
                self.want_seeds();
            }
        }
        self.chores_at = Micros(0);
    }

    /// The table becomes what a node said; links that nobody needs any more are closed when they are idle.
    fn apply(&mut self, ranges: &[Range]) {
        let mut wanted = vec![false; self.config.shards_max];
        let mut changed = false;
        let mut slots = Box::new([NONE; crate::slot::SLOTS as usize]);
        for range in ranges {
            let Some(shard) = self.shard_at(range.primary.clone()) else { continue };
            slots[usize::from(range.first)..=usize::from(range.last)].fill(shard);
            wanted[usize::from(shard)] = true;
            // At once, or the next new address could take the same index.
            self.shard_link(shard).wanted = true;
        }
        if *slots != *self.slots {
            self.slots = slots;
            changed = true;
        }
        for (shard, link) in self.links[self.sentinels..].iter_mut().enumerate() {
            link.wanted = wanted[shard] || !link.waiting.is_empty();
            if link.wanted {
                link.hurry();
            }
        }
        self.counters.topology_changes += u64::from(changed);
    }
}
