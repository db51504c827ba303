//! What shadow rules saw: for each rule how many checks, and how many of them it would have denied; and whom.
//!
//! ```text
//!   each core: Book ── every shadow.flush_ms, and at the full hour ──► Exchange ──► Pending ──► the policy store
//!              ledger: totals, identities      ◄── an empty ledger ──               batch, until the store has it
//! ```
//!
//! The totals are exact. Identities are followed in a table of fixed size, whose places go to those that were denied most; an
//! identity's figures are exact while it has its place, and never too high.

pub mod ledger;
pub mod pending;

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use crossbeam_queue::ArrayQueue;

use self::ledger::Ledger;
use crate::clock::Now;

/// Milliseconds of an hour.
pub const HOUR_MS: i64 = 3_600_000;
/// How long the answer to a check may be on its way: the longest deadline that can be set, and some.
const CARRY_MS: u64 = 2_000;
/// Ledgers for each core: the one that it writes, and others on their way to the store and back.
const LEDGERS_PER_CORE: usize = 3;

/// A shadow rule at one version of it. What it sees is counted under both.
#[derive(Debug, PartialEq, Eq)]
pub struct Tag {
    /// Unique within the process.
    pub id: u64,
    /// The rule's name.
    pub rule: Box<str>,
    /// The version of the policy that changed the rule last.
    pub version: u64,
}

/// Where ledgers change hands.
#[derive(Debug)]
pub struct Exchange {
    sealed: ArrayQueue<Ledger>,
    spare: ArrayQueue<Ledger>,
    flush_ms: u64,
    identities: usize,
    /// Identities that lost their place in a ledger, or found none.
    pub dropped: AtomicU64,
}

impl Exchange {
    /// For this many cores, each of which follows `identities` and hands its ledger over every `flush_ms`.
    pub fn new(cores: usize, flush_ms: u64, identities: usize) -> Arc<Self> {
        let exchange = Self {
            sealed: ArrayQueue::new(cores * LEDGERS_PER_CORE),
            spare: ArrayQueue::new(cores * LEDGERS_PER_CORE),
            flush_ms,
            identities,
            dropped: AtomicU64::new(0),
        };
        for _ in 0..cores * (LEDGERS_PER_CORE - 1) {
            exchange.give_back(Ledger::new(identities));
        }
        Arc::new(exchange)
    }

    /// A ledger that a core has written; the caller gives it back when it has been read.
    pub fn take(&self) -> Option<Ledger> {
        self.sealed.pop()
    }

    /// A ledger that has been read.
    pub fn give_back(&self, mut ledger: Ledger) {
        ledger.clear();
        // There is room for every ledger that exists.
        let _ = self.spare.push(ledger);
    }
}

/// What one core writes down.
#[derive(Debug)]
pub struct Book {
    ledger: Ledger,
    exchange: Arc<Exchange>,
    seal_at_ms: u64,
}

impl Book {
    /// An empty book.
    pub fn new(exchange: Arc<Exchange>) -> Self {
        Self { ledger: Ledger::new(exchange.identities), exchange, seal_at_ms: 0 }
    }

    /// The identity of a check that a shadow rule sees: it gets a place, if there is one, and with it its name.
    #[inline]
    pub fn meet(&mut self, tag: &Arc<Tag>, key: u64, now_ms: u64, name: impl FnOnce(&mut Vec<u8>)) {
        self.ledger.meet(tag, key, now_ms, name);
    }

    /// What a shadow rule said of a check.
    #[inline]
    pub fn count(&mut self, tag: &Arc<Tag>, key: u64, is_denied: bool, now_ms: u64) {
        self.ledger.count(tag, key, is_denied, now_ms);
    }

    /// To be called at each wake-up: hands the ledger over when its time has come.
    #[inline]
    pub fn look(&mut self, now: Now) {
        if now.mono_ms >= self.seal_at_ms {
            self.turn_page(now);
        }
    }

    #[cold]
    fn turn_page(&mut self, now: Now) {
        if self.ledger.is_empty() || self.seal(now.mono_ms) {
            let to_the_hour = HOUR_MS - now.unix_ms.rem_euclid(HOUR_MS);
            self.ledger.hour_unix_ms = now.unix_ms - now.unix_ms.rem_euclid(HOUR_MS);
            self.seal_at_ms = now.mono_ms + self.exchange.flush_ms.min(to_the_hour.unsigned_abs());
        }
        // Without a spare one the ledger goes on, and nothing is lost: it is looked at again at the next wake-up.
    }

    /// Hands the ledger over, if there is another one to go on with.
    fn seal(&mut self, now_ms: u64) -> bool {
        let Some(spare) = self.exchange.spare.pop() else { return false };
        let written = std::mem::replace(&mut self.ledger, spare);
        self.ledger.carry(&written, now_ms.saturating_sub(CARRY_MS));
        self.exchange.dropped.fetch_add(written.dropped(), Relaxed);
        // There is room for every ledger that exists.
        let _ = self.exchange.sealed.push(written);
        true
    }
}

impl Drop for Book {
    fn drop(&mut self) {
        if !self.ledger.is_empty() {
            self.seal(u64::MAX);
        }
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;

    fn tag() -> Arc<Tag> {
        Arc::new(Tag { id: 1, rule: "r".into(), version: 3 })
    }

    fn denied(exchange: &Exchange) -> Option<(i64, u64)> {
        let ledger = exchange.take()?;
        let found = (ledger.hour_unix_ms, ledger.totals().map(|total| total.denied).sum());
        exchange.give_back(ledger);
        Some(found)
    }

    #[test]
    fn ledgers_change_hands_each_interval_and_at_the_full_hour() {
        let exchange = Exchange::new(1, 10_000, 16);
        let mut book = Book::new(Arc::clone(&exchange));
        // Four seconds before the full hour.
        let hour = 100 * HOUR_MS;
        book.look(Now::of_ms(1_000, hour - 4_000));
        book.count(&tag(), 7, true, 1_000);
        book.look(Now::of_ms(4_999, hour - 1));
        assert_eq!(denied(&exchange), None);
        book.look(Now::of_ms(5_000, hour));
        assert_eq!(denied(&exchange), Some((hour - HOUR_MS, 1)));
        book.count(&tag(), 7, true, 6_000);
        book.look(Now::of_ms(14_999, hour + 9_999));
        assert_eq!(denied(&exchange), None);
        book.look(Now::of_ms(15_000, hour + 10_000));
        assert_eq!(denied(&exchange), Some((hour, 1)));
    }

    #[test]
    fn nothing_is_lost_while_nobody_reads_or_when_the_core_ends() {
        let exchange = Exchange::new(1, 1_000, 16);
        let mut book = Book::new(Arc::clone(&exchange));
        for second in 0..100 {
            book.look(Now::of_ms(second * 1_000, 0));
            book.count(&tag(), second, true, second * 1_000);
        }
        drop(book);
        let mut sum = 0;
        while let Some((_, denied)) = denied(&exchange) {
            sum += denied;
        }
        // The last ledger found no spare one when the core ended.
        assert!((0..=100).contains(&sum) && sum > 0, "{sum}");
        let mut book = Book::new(Arc::clone(&exchange));
        book.count(&tag(), 1, true, 0);
        drop(book);
        assert_eq!(denied(&exchange).map(|(_, denied)| denied), Some(1));
    }
}
