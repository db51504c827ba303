//! Leases: tokens that this gateway has taken in advance, in a batch, and spends without a call.
//!
//! A lease belongs to the gateway: every core spends from it, and whichever finds it low asks for the next batch, one at
//! a time. The store has counted its tokens as taken, so however many gateways lease, together they never admit more than
//! the limit. What is left over is given back, and what a crash loses is lost.
//!
//! ```text
//!   batch   ┤╲          ╲            asked again at half a batch, so that no check waits for the next one
//!   batch/2 ┤ ╲ - - - -╱ ╲ - - -
//!         0 ┼──╲──────╱───╲─────── time
//! ```
//!
//! A table of fixed size, a cache line each:
//!
//! ```text
//!   key        64   which buckets at which limits, under which policy; 0: nobody's
//!   tokens     64   epoch 32 │ tokens 32
//!   deposited  64   tokens that have come in all; less those that are there, it is what was spent
//!   told       64   tokens left in the store 32 │ rule 32: the tightest bucket, as of the last batch
//!   full_at    64   when that bucket would be full, µs since process start
//!   ask        64   asked 1 │ not before, in ms, 31 │ size of the last batch 32
//!   spent      64   what was spent when a batch was last asked for,
//!   asked_at   64   and when that was, µs since process start
//! ```
//!
//! Tokens are only moved by compare-and-swap, and closing a lease changes its epoch in the same word, so nobody can spend
//! from a line that has become another's, and each token is spent, given back, or there: see the loom tests.

use crate::sync::{AtomicU64, Ordering};

/// Lines in which a key may be.
const WAYS: usize = 2;
/// A batch should last for so long.
const BATCH_US: u64 = 100_000;
/// After a batch that did not come, or brought nothing, the next is asked for no sooner.
const AGAIN_MS: u64 = 20;

const ASKED: u64 = 1 << 63;

/// Leases of all cores.
pub struct Leases {
    lines: Box<[Line]>,
}

#[repr(align(64))]
struct Line {
    key: AtomicU64,
    tokens: AtomicU64,
    deposited: AtomicU64,
    told: AtomicU64,
    full_at_us: AtomicU64,
    ask: AtomicU64,
    spent: AtomicU64,
    asked_at_us: AtomicU64,
}

/// What a lease knows of its tightest bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Told {
    /// Tokens in the store and in the lease.
    pub remaining: u32,
    /// When it would be full, in microseconds since the process began.
    pub full_at_us: u64,
    /// Its rule.
    pub rule: u32,
}

/// What a bucket said with a batch.
#[derive(Clone, Copy, Debug)]
pub struct Batch {
    /// Tokens that came.
    pub tokens: u32,
    /// What is left in the store, of the tightest bucket.
    pub remaining: u32,
    /// When that bucket would be full.
    pub full_at_us: u64,
    /// Its rule.
    pub rule: u32,
}

/// A check was paid from a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spent {
    /// What its reply tells.
    pub told: Told,
    /// It is low: whoever gets this asks for a batch, and nobody else does until that has come.
    pub asks: bool,
}

/// An open lease, for whoever opened it and closes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseId(usize);

impl Leases {
    /// Room for so many leases.
    pub fn new(leases: usize) -> Self {
        let word = || AtomicU64::new(0);
        let line = || Line {
            key: word(),
            tokens: word(),
            deposited: word(),
            told: word(),
            full_at_us: word(),
            ask: word(),
            spent: word(),
            asked_at_us: word(),
        };
        Self { lines: (0..leases.next_power_of_two().max(WAYS)).map(|_| line()).collect() }
    }

    /// Pays for a check, if there is a lease that holds its cost.
    #[inline]
    pub fn spend(&self, key: u64, cost: u32, now_ms: u64) -> Option<Spent> {
        let line = self.find(key)?;
        let left = line.take(key, cost)?;
        let told = line.told.load(Ordering::Relaxed);
        Some(Spent {
            told: Told {
                // The upper half.
                remaining: ((told >> 32) as u32).saturating_add(left),
                full_at_us: line.full_at_us.load(Ordering::Relaxed),
                rule: told as u32,
            },
            asks: line.is_low(left) && line.begin_ask(now_ms),
        })
    }

    /// Opens a lease. `None` where there is one, or no room.
    pub fn open(&self, key: u64, now_us: u64) -> Option<LeaseId> {
        if self.find(key).is_some() {
            return None;
        }
        let at = self.places(key).find(|&at| {
            let line = &self.lines[at];
            line.key.compare_exchange(0, key, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        })?;
        // It has no tokens, so nobody reads these yet.
        let line = &self.lines[at];
        for word in [&line.deposited, &line.told, &line.full_at_us, &line.ask, &line.spent] {
            word.store(0, Ordering::Relaxed);
        }
        line.asked_at_us.store(now_us, Ordering::Relaxed);
        Some(LeaseId(at))
    }

    /// Whether there is a lease.
    pub fn is_open(&self, key: u64) -> bool {
        self.find(key).is_some()
    }

    /// Whether there is a lease that has something to spend.
    pub fn has_tokens(&self, key: u64) -> bool {
        self.find(key).is_some_and(|line| line.tokens.load(Ordering::Acquire) as u32 > 0)
    }

    /// Whether a lease is to have its next batch.
    pub fn is_low(&self, key: u64) -> bool {
        self.find(key).is_some_and(|line| line.is_low(line.tokens.load(Ordering::Relaxed) as u32))
    }

    /// Begins to ask for a batch, unless somebody does, or one did not come a moment ago. A batch that was begun is
    /// ended, by [`Leases::deposit`] or [`Leases::fail`].
    pub fn begin_ask(&self, key: u64, now_ms: u64) -> bool {
        self.find(key).is_some_and(|line| line.begin_ask(now_ms))
    }

    /// How large the next batch should be: as much as was spent in the last 100 ms, within these bounds.
    pub fn next_batch(&self, key: u64, now_us: u64, (least, most): (u32, u32)) -> u32 {
        let Some(line) = self.find(key) else { return least };
        let spent = line.spent_so_far();
        let before = line.spent.swap(spent, Ordering::Relaxed);
        let elapsed_us = now_us.saturating_sub(line.asked_at_us.swap(now_us, Ordering::Relaxed)).max(1);
        let wanted = u128::from(spent.saturating_sub(before)) * u128::from(BATCH_US) / u128::from(elapsed_us);
        let batch = u32::try_from(wanted).unwrap_or(u32::MAX).clamp(least.min(most), most);
        line.ask.fetch_and(!u64::from(u32::MAX), Ordering::Relaxed);
        line.ask.fetch_or(u64::from(batch), Ordering::Relaxed);
        batch
    }

    /// A batch has come. Returns whether there is still a lease to put it in; if not, it is to be given back.
    pub fn deposit(&self, key: u64, batch: &Batch, now_ms: u64) -> bool {
        let Some(line) = self.find(key) else { return false };
        if !line.put(key, batch.tokens) {
            return false;
        }
        line.told.store(u64::from(batch.remaining) << 32 | u64::from(batch.rule), Ordering::Relaxed);
        line.full_at_us.store(batch.full_at_us, Ordering::Relaxed);
        line.deposited.fetch_add(u64::from(batch.tokens), Ordering::Relaxed);
        line.end_ask(if batch.tokens == 0 { now_ms + AGAIN_MS } else { 0 });
        true
    }

    /// Puts back what a check was paid with that does not pass after all. Returns whether there is still a lease.
    pub fn put_back(&self, key: u64, tokens: u32) -> bool {
        self.find(key).is_some_and(|line| line.put(key, tokens))
    }

    /// A batch that was asked for did not come.
    pub fn fail(&self, key: u64, now_ms: u64) {
        if let Some(line) = self.find(key) {
            line.end_ask(now_ms + AGAIN_MS);
        }
    }

    /// What was spent of a lease in all; it changes while the lease is in use.
    pub fn spent(&self, id: LeaseId) -> u64 {
        self.lines[id.0].spent_so_far()
    }

    /// Closes a lease. Returns the tokens that are to be given back.
    pub fn close(&self, id: LeaseId) -> u32 {
        let line = &self.lines[id.0];
        let mut word = line.tokens.load(Ordering::Relaxed);
        loop {
            let next = (word >> 32).wrapping_add(1) << 32;
            match line.tokens.compare_exchange_weak(word, next, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => break,
                Err(now) => word = now,
            }
        }
        line.key.store(0, Ordering::Release);
        word as u32
    }

    /// How many leases are open, and how many tokens they hold; both change meanwhile.
    pub fn held(&self) -> (usize, u64) {
        let open = self.lines.iter().filter(|line| line.key.load(Ordering::Relaxed) != 0);
        open.fold((0, 0), |(leases, tokens), line| {
            (leases + 1, tokens + (line.tokens.load(Ordering::Relaxed) & u64::from(u32::MAX)))
        })
    }

    #[inline(always)]
    fn places(&self, key: u64) -> impl Iterator<Item = usize> {
        // The number of lines is a power of two.
        let mask = self.lines.len() - 1;
        (0..WAYS).map(move |way| (key as usize).wrapping_add(way) & mask)
    }

    #[inline(always)]
    fn find(&self, key: u64) -> Option<&Line> {
        self.places(key).map(|at| &self.lines[at]).find(|line| line.key.load(Ordering::Acquire) == key)
    }
}

impl Line {
    /// Takes tokens of this key's lease. Returns how many are left.
    #[inline]
    fn take(&self, key: u64, cost: u32) -> Option<u32> {
        self.change(key, |tokens| tokens.checked_sub(cost))
    }

    fn put(&self, key: u64, more: u32) -> bool {
        self.change(key, |tokens| Some(tokens.saturating_add(more))).is_some()
    }

    /// Changes the tokens, if the line is this key's, and was all the while.
    #[inline]
    fn change(&self, key: u64, to: impl Fn(u32) -> Option<u32>) -> Option<u32> {
        let mut word = self.tokens.load(Ordering::Acquire);
        loop {
            // After the epoch was read: if the line becomes another's from here on, the epoch is another one too.
            if self.key.load(Ordering::Acquire) != key {
                return None;
            }
            let tokens = to(word as u32)?;
            let next = word & !u64::from(u32::MAX) | u64::from(tokens);
            match self.tokens.compare_exchange_weak(word, next, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Some(tokens),
                Err(now) => word = now,
            }
        }
    }

    #[inline(always)]
    fn is_low(&self, left: u32) -> bool {
        let ask = self.ask.load(Ordering::Relaxed);
        // The size of the last batch is in the lower half.
        ask & ASKED == 0 && left <= ask as u32 / 2
    }

    #[cold]
    fn begin_ask(&self, now_ms: u64) -> bool {
        let ask = self.ask.load(Ordering::Relaxed);
        let not_before = ask >> 32 & 0x7FFF_FFFF;
        ask & ASKED == 0
            && not_before <= now_ms & 0x7FFF_FFFF
            && self.ask.compare_exchange(ask, ask | ASKED, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    fn end_ask(&self, not_before_ms: u64) {
        let batch = self.ask.load(Ordering::Relaxed) & u64::from(u32::MAX);
        self.ask.store((not_before_ms & 0x7FFF_FFFF) << 32 | batch, Ordering::Release);
    }

    fn spent_so_far(&self) -> u64 {
        let deposited = self.deposited.load(Ordering::Relaxed);
        deposited.saturating_sub(self.tokens.load(Ordering::Relaxed) & u64::from(u32::MAX))
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;

    const KEY: u64 = 0x77;

    fn batch(tokens: u32) -> Batch {
        Batch { tokens, remaining: 900, full_at_us: 5_000, rule: 3 }
    }

    #[test]
    fn a_batch_is_spent_and_asked_for_at_half() {
        let leases = Leases::new(8);
        assert_eq!(leases.spend(KEY, 1, 0), None);
        let id = leases.open(KEY, 0).unwrap();
        assert_eq!(leases.open(KEY, 0), None, "there is one");
        assert!(leases.begin_ask(KEY, 0) && !leases.begin_ask(KEY, 0));
        assert_eq!(leases.next_batch(KEY, 0, (10, 10)), 10);
        assert!(leases.deposit(KEY, &batch(10), 0));
        let spent: Vec<_> = (0..5).map(|_| leases.spend(KEY, 1, 0).unwrap()).collect();
        assert_eq!(spent[0].told, Told { remaining: 909, full_at_us: 5_000, rule: 3 });
        assert_eq!(spent.iter().map(|spent| spent.asks).collect::<Vec<_>>(), [false, false, false, false, true]);
        assert!(!leases.spend(KEY, 1, 0).unwrap().asks, "one asks at a time");
        assert_eq!(leases.spend(KEY, 5, 0), None, "it holds four");
        assert!(leases.put_back(KEY, 1));
        assert_eq!((leases.held(), leases.spent(id), leases.close(id)), ((1, 5), 5, 5));
        assert_eq!(leases.held(), (0, 0));
        assert!(!leases.put_back(KEY, 1) && !leases.deposit(KEY, &batch(10), 0), "it is closed");
        assert_eq!(leases.spend(KEY, 1, 0), None);
    }

    #[test]
    fn a_batch_is_what_a_tenth_of_a_second_takes() {
        let leases = Leases::new(8);
        leases.open(KEY, 0);
        leases.begin_ask(KEY, 0);
        assert_eq!(leases.next_batch(KEY, 10, (4, 1_000)), 4, "nothing was spent yet");
        leases.deposit(KEY, &batch(500), 0);
        assert!((0..100).all(|_| leases.spend(KEY, 1, 0).is_some()));
        assert_eq!(leases.next_batch(KEY, 20_010, (4, 1_000)), 500, "100 in 20 ms");
        assert!((0..300).all(|_| leases.spend(KEY, 1, 0).is_some()));
        assert_eq!(leases.next_batch(KEY, 40_010, (4, 1_000)), 1_000, "at most that");
    }

    #[test]
    fn what_did_not_come_is_asked_for_again_after_a_while() {
        let leases = Leases::new(8);
        leases.open(KEY, 0);
        assert!(leases.begin_ask(KEY, 100));
        leases.fail(KEY, 100);
        assert!(!leases.begin_ask(KEY, 119) && leases.begin_ask(KEY, 120));
    }

    #[test]
    fn there_is_room_for_as_many_as_there_are_lines() {
        let leases = Leases::new(2);
        let ids = [1, 2].map(|key| leases.open(key, 0).unwrap());
        assert_eq!(leases.open(3, 0), None);
        leases.close(ids[0]);
        assert!(leases.open(3, 0).is_some());
    }
}
