//! How the primary is found that Sentinel watches over, and followed when it changes.
//!
//! One sentinel is connected at a time. It is asked again and again, and at once when something hints at a change:
//! the primary's link went down, or it answered READONLY. A sentinel that is down, does not answer or does not know the
//! name makes room for the next one. A sentinel may be behind, so the node it names must say itself that it is a primary
//! (`link::handshake`).

use super::{Client, NONE};
use crate::{clock::Micros, config::Mode, error::LinkError, link::Asked, reply::Reply, topology};

/// The shortest time between two questions.
const PAUSE_MS: u64 = 50;

/// Where the looks at the sentinels stand.
#[derive(Debug, Default)]
pub(super) struct Watch {
    /// Something hints at a change.
    pub(super) wanted: bool,
    /// The sentinel whose turn it is.
    turn: usize,
    /// Whether it was asked, and has not answered.
    asked: bool,
    not_before: Micros,
    next_at: Micros,
    /// Sentinels that were lost or not reached, one after the other, since one has answered.
    lost: usize,
    /// Why the last one of them was, when all were.
    problem: Option<LinkError>,
}

impl Client {
    /// Why the last sentinel that was tried cannot be reached, while none can: all were tried since one has answered. The
    /// primary that is known serves on, but nobody would tell of another.
    pub fn sentinel_problem(&self) -> Option<&LinkError> {
        self.watch.problem.as_ref()
    }

    pub(super) fn look_at_sentinel(&mut self, now: Micros) {
        let turn = self.watch.turn;
        for index in 0..self.sentinels {
            self.links[index].wanted = index == turn;
        }
        if !self.links[turn].is_up() {
            if !self.links[turn].is_open() {
                self.chores_at = Micros(0);
            }
            return;
        }
        let due = self.watch.wanted && now >= self.watch.not_before || now >= self.watch.next_at;
        let Mode::Sentinel { master, .. } = &self.config.mode else { return };
        if !due || self.watch.asked {
            return;
        }
        let words: [&[u8]; 3] = [b"SENTINEL", b"get-master-addr-by-name", master.as_bytes()];
        self.links[turn].push_words(&words, Asked::Master, now);
        self.watch.wanted = false;
        self.watch.asked = true;
        self.watch.not_before = now + self.chance.spread(Micros::from_millis(PAUSE_MS), 50);
        self.watch.next_at = now + self.chance.spread(Micros::from_millis(self.config.sentinel_ms), 10);
        self.counters.refreshes += 1;
        self.list(turn);
    }

    pub(super) fn next_look_at_sentinel(&self) -> Micros {
        if self.watch.asked || !self.links[self.watch.turn].is_up() {
            return Micros::NEVER;
        }
        if self.watch.wanted { self.watch.not_before.min(self.watch.next_at) } else { self.watch.next_at }
    }

    /// A link is gone; if it was that of the sentinel, the next one's turn comes.
    pub(super) fn sentinel_lost(&mut self, index: usize) {
        if index < self.sentinels && index == self.watch.turn {
            self.counters.refresh_failures += 1;
            self.watch.lost = self.watch.lost.saturating_add(1);
            if self.watch.lost >= self.sentinels {
                self.counters.sentinels_lost += u64::from(self.watch.problem.is_none());
                self.watch.problem.clone_from(&self.links[index].problem);
            }
            self.next_sentinel();
        }
    }

    fn next_sentinel(&mut self) {
        self.watch.asked = false;
        self.watch.wanted = true;
        self.watch.turn = (self.watch.turn + 1) % self.sentinels;
        self.chores_at = Micros(0);
    }

    pub(super) fn master_answered(&mut self, index: usize, reply: &Reply<'_>, now: Micros) {
        if index != self.watch.turn {
            return;
        }
        self.watch.asked = false;
        self.watch.lost = 0;
        self.watch.problem = None;
        let Some(address) = topology::master(reply) else {
            self.counters.refresh_failures += 1;
            self.next_sentinel();
            return self.look_at_sentinel(now);
        };
        let Some(shard) = self.shard_at(address) else { return };
        let before = self.slots[0];
        if before == shard {
            return;
        }
        self.counters.topology_changes += 1;
        if before != NONE {
            self.shard_link(before).wanted = false;
        }
        self.set_only_shard(Some(shard));
        self.shard_link(shard).hurry();
        self.chores_at = Micros(0);
    }
}
