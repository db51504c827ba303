//! The rejection cache: buckets of which the store has said that they are empty, and from when they will not be.
//!
//! A bucket that nobody takes from fills by its rate, and taking only makes it emptier. So once the store has said when
//! a bucket would be full again, no check can find more in it than that tells, until somebody gives back. A check that
//! asks for more is denied here, with no call. That is exact, and holds for every cost.
//!
//! ```text
//!   tokens
//!   capacity ┤                        ╭── full_at
//!            │                   ╭────╯
//!       cost ┤ - - - - - - ╭─────╯        before this moment a check of this cost is denied
//!            │      ╭──────╯
//!          0 ┼──────╯──────────────────── time
//!            sent_at
//! ```
//!
//! The key covers bucket and limit in force: a changed limit is another key, so it frees the bucket at once. What this
//! gateway gives back frees it too, and what was asked before that is not believed afterwards. What another gateway
//! gives back is seen when the entry has run out; until then a check may be denied that would have passed, never the
//! other way round.
//!
//! A table of fixed size that all cores share. A line is 64 bytes:
//!
//! ```text
//! ┌────────────┬─────────┬─────────┬─────────┬─────────┬─────────┬─────────┬────────┐
//! │ version 64 │ key 64  │ what 64 │ key 64  │ what 64 │ key 64  │ what 64 │   -    │
//! └────────────┴─────────┴─────────┴─────────┴─────────┴─────────┴─────────┴────────┘
//!   odd while somebody writes       what:  63        62                             0
//!                                         ┌─────────┬──────────────────────────────┐
//!                                         │ freed 1 │ time, µs since process start │
//!                                         └─────────┴──────────────────────────────┘
//!                                    the time when it is full; or, freed, when tokens were given back
//! ```
//!
//! Nobody ever waits: whoever finds the version odd, or changed after reading, knows nothing; whoever wants to write
//! and is not the first, does not, except giving back, which tries some times more. The keys are 64 bits of a seeded
//! hash, so a wrong reject needs two live keys that are equal in all of them: about one in 10^14 checks with a full
//! table.

use policy_sync::rate::Rate;

use crate::{
    decision::{Answer, Verdict},
    sync::{AtomicU64, Ordering, fence, spin},
};

/// Entries of a line.
const WAYS: usize = 3;
/// Tokens were given back at this time.
const FREED: u64 = 1 << 63;
/// That a bucket was given something back is known for so long: no call waits longer for its reply.
const FREED_FOR_US: u64 = 1_100_000;
/// How often giving back tries to get a line that others write to: each of them needs it for a few instructions.
const FREE_ATTEMPTS: usize = 100;

/// Empty buckets.
pub struct Rejections {
    lines: Box<[Line]>,
}

#[repr(align(64))]
struct Line {
    version: AtomicU64,
    entries: [Entry; WAYS],
}

struct Entry {
    /// 0 where there is none.
    key: AtomicU64,
    what: AtomicU64,
}

impl Rejections {
    /// A table for at least so many buckets.
    pub fn new(buckets: usize) -> Self {
        let lines = buckets.div_ceil(WAYS).next_power_of_two();
        let entry = || Entry { key: AtomicU64::new(0), what: AtomicU64::new(0) };
        let line = || Line { version: AtomicU64::new(0), entries: std::array::from_fn(|_| entry()) };
        Self { lines: (0..lines).map(|_| line()).collect() }
    }

    /// When a bucket will be full again as far as is known, in microseconds since the process began. `None` where
    /// nothing is known.
    #[inline]
    pub fn full_at_us(&self, key: u64) -> Option<u64> {
        let line = self.line(key);
        let version = line.version.load(Ordering::Acquire);
        let entry = line.entries.iter().find(|entry| entry.key.load(Ordering::Relaxed) == key)?;
        let what = entry.what.load(Ordering::Relaxed);
        // What was read before is as old as the version before, if that is still the one.
        fence(Ordering::Acquire);
        let is_whole = version.is_multiple_of(2) && line.version.load(Ordering::Relaxed) == version;
        (is_whole && what & FREED == 0).then_some(what)
    }

    /// Remembers what the store said of a bucket, if there is room: asked at `sent_at_us`, it will be full at `full_at_us`. What has run
    /// out by `now_us` makes room.
    pub fn remember(&self, key: u64, sent_at_us: u64, full_at_us: u64, now_us: u64) {
        let line = self.line(key);
        let Some(version) = line.try_begin() else { return };
        let age = |entry: &Entry| {
            let (known, what) = (entry.key.load(Ordering::Relaxed), entry.what.load(Ordering::Relaxed));
            match what & FREED {
                _ if known == key => 0,
                0 if what > now_us => what,
                // Run out, or given back before any call that is still on its way.
                0 => 1,
                _ if (what & !FREED).saturating_add(FREED_FOR_US) < now_us => 1,
                // Without it a reply from before would deny what is there; without another entry there is a call more.
                _ => what,
            }
        };
        if let Some(entry) = line.entries.iter().min_by_key(|entry| age(entry)) {
            let what = entry.what.load(Ordering::Relaxed);
            let is_own = entry.key.load(Ordering::Relaxed) == key;
            let is_needed = !is_own && age(entry) & FREED != 0;
            let is_outdated = is_own && what & FREED != 0 && sent_at_us <= what & !FREED;
            if !is_needed && !is_outdated {
                entry.key.store(key, Ordering::Relaxed);
                entry.what.store(full_at_us & !FREED, Ordering::Relaxed);
            }
        }
        line.end(version);
    }

    /// Tokens are given back to a bucket: what is known of it holds no longer, and neither does what was asked before.
    pub fn forget(&self, key: u64, now_us: u64) {
        let line = self.line(key);
        let Some(version) = (0..FREE_ATTEMPTS).find_map(|_| {
            let begun = line.try_begin();
            if begun.is_none() {
                spin();
            }
            begun
        }) else {
            // It runs out by itself.
            return;
        };
        let soonest = |entry: &Entry| (entry.key.load(Ordering::Relaxed) != key, entry.what.load(Ordering::Relaxed));
        if let Some(entry) = line.entries.iter().min_by_key(|entry| soonest(entry)) {
            entry.key.store(key, Ordering::Relaxed);
            entry.what.store(FREED | now_us, Ordering::Relaxed);
        }
        line.end(version);
    }

    /// Starts loading what is known of a bucket.
    #[inline(always)]
    pub fn prefetch(&self, key: u64) {
        crate::prefetch::prefetch(std::ptr::from_ref(self.line(key)).cast());
    }

    #[inline(always)]
    fn line(&self, key: u64) -> &Line {
        // The number of lines is a power of two.
        &self.lines[key as usize & (self.lines.len() - 1)]
    }
}

impl Line {
    /// Begins to write, unless somebody else does. Returns the version to end with.
    fn try_begin(&self) -> Option<u64> {
        let version = self.version.load(Ordering::Relaxed);
        if !version.is_multiple_of(2) {
            return None;
        }
        let odd = version.wrapping_add(1);
        self.version.compare_exchange(version, odd, Ordering::Acquire, Ordering::Relaxed).ok()?;
        // What is written from now on is not seen by readers that still see the version before.
        fence(Ordering::Release);
        Some(version.wrapping_add(2))
    }

    fn end(&self, version: u64) {
        self.version.store(version, Ordering::Release);
    }
}

/// What is known of a check that its bucket does not let pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rejection {
    /// Whole tokens that the bucket holds.
    pub remaining: u32,
    /// Until it holds the cost.
    pub retry_after_ms: u64,
    /// Until it is full.
    pub reset_after_ms: u64,
}

impl Rejection {
    /// Of a check of this cost, and a bucket that will be full at that time: `None` where it may well pass, or never will.
    #[inline(always)]
    pub fn of(rate: &Rate, full_at_us: u64, now_us: u64, cost: u32) -> Option<Self> {
        if cost == 0 {
            // Who only looks is never denied, however the time to full was rounded.
            return None;
        }
        let to_full_us = full_at_us.checked_sub(now_us)?;
        // It holds the cost once the time to full is down to what the other tokens take.
        let rest_us = fill_us(rate, rate.capacity.checked_sub(cost)?);
        if to_full_us <= rest_us {
            return None;
        }
        Some(Self {
            remaining: rate.capacity - missing(rate, to_full_us),
            retry_after_ms: (to_full_us - rest_us).div_ceil(1_000),
            reset_after_ms: to_full_us.div_ceil(1_000),
        })
    }

    /// Of a check of cost 1, where it is known how long all tokens but one take to come: a check that does not find a token
    /// finds none.
    #[inline(always)]
    pub fn of_one(rest_us: u64, full_at_us: u64, now_us: u64) -> Option<Self> {
        let to_full_us = full_at_us.checked_sub(now_us)?;
        (to_full_us > rest_us).then(|| Self {
            remaining: 0,
            retry_after_ms: (to_full_us - rest_us).div_ceil(1_000),
            reset_after_ms: to_full_us.div_ceil(1_000),
        })
    }

    /// The same as a verdict by this rule.
    pub fn verdict(&self, rate: &Rate, rule: Option<u32>) -> Verdict {
        Verdict {
            answer: Answer::Deny,
            limit: i64::from(rate.capacity),
            remaining: i64::from(self.remaining),
            retry_after_ms: self.retry_after_ms.cast_signed(),
            reset_after_ms: self.reset_after_ms.cast_signed(),
            rule,
        }
    }
}

/// How long so many tokens take to come, in microseconds, rounded up.
#[inline]
pub fn fill_us(rate: &Rate, tokens: u32) -> u64 {
    // Below 2^62, since a period is below 2^32 ms; times 1,000 it may not fit.
    let (units, refill) = (u64::from(tokens) * u64::from(rate.period_ms), u64::from(rate.refill));
    match units.checked_mul(1_000) {
        Some(units) => units.div_ceil(refill),
        None => u64::try_from((u128::from(units) * 1_000).div_ceil(u128::from(refill))).unwrap_or(u64::MAX),
    }
}

/// How many tokens a bucket lacks that is full after this time: at most its capacity.
#[inline]
fn missing(rate: &Rate, to_full_us: u64) -> u32 {
    let (refill, period_us) = (u64::from(rate.refill), u64::from(rate.period_ms) * 1_000);
    let tokens = match to_full_us.checked_mul(refill) {
        Some(units) => units.div_ceil(period_us),
        None => {
            let tokens = (u128::from(to_full_us) * u128::from(refill)).div_ceil(u128::from(period_us));
            u64::try_from(tokens).unwrap_or(u64::MAX)
        }
    };
    u32::try_from(tokens).unwrap_or(u32::MAX).min(rate.capacity)
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use policy_sync::model::Limit;
    use proptest::prelude::*;

    use super::*;

    fn deny(rate: &Rate, full_at_us: u64, now_us: u64, cost: u32) -> Option<Verdict> {
        let said = Rejection::of(rate, full_at_us, now_us, cost);
        if cost == 1 {
            let rest_us = fill_us(rate, rate.capacity - 1);
            assert_eq!(Rejection::of_one(rest_us, full_at_us, now_us), said, "the short way says the same");
        }
        Some(said?.verdict(rate, None))
    }

    fn rate(capacity: u64, refill: u64, period_ms: u64) -> Rate {
        Rate::new(Limit { capacity, refill, period_ms }).unwrap()
    }

    #[test]
    fn what_was_given_back_is_not_forgotten_for_what_is_empty() {
        let rejections = Rejections::new(WAYS);
        rejections.forget(1, 100);
        (2..10).for_each(|key| rejections.remember(key, 200, 50_000, 300));
        rejections.remember(1, 90, 50_000, 400);
        assert_eq!(rejections.full_at_us(1), None, "it was asked before");
        assert!(rejections.full_at_us(9).is_some(), "others find room beside it");
        // And when no reply from before can come any more, it makes room.
        let later = 100 + FREED_FOR_US + 1;
        (20..23).for_each(|key| rejections.remember(key, later, later + 50_000, later));
        assert!((20..23).all(|key| rejections.full_at_us(key).is_some()));
    }

    #[test]
    fn who_only_looks_is_not_denied() {
        // Full in a quarter of a millisecond, which the store reports as one.
        let rate = Rate::new(Limit { capacity: 1, refill: 400, period_ms: 100 }).unwrap();
        assert_eq!(Rejection::of(&rate, 1_000, 0, 0), None);
        assert!(Rejection::of(&rate, 1_000, 0, 1).is_some());
    }

    #[test]
    fn an_empty_bucket_denies_until_it_holds_the_cost() {
        // A token each 100 ms; empty at 0, so full at one second.
        let rate = rate(10, 10, 1_000);
        let at = |now_us, cost| deny(&rate, 1_000_000, now_us, cost);
        let said = at(0, 1).unwrap();
        assert_eq!((said.answer, said.limit, said.remaining), (Answer::Deny, 10, 0));
        assert_eq!((said.retry_after_ms, said.reset_after_ms), (100, 1_000));
        assert!(at(99_999, 1).is_some());
        assert_eq!(at(100_000, 1), None);
        let said = at(250_000, 4).unwrap();
        assert_eq!((said.remaining, said.retry_after_ms, said.reset_after_ms), (2, 150, 750));
        assert_eq!(
            [at(0, 0), at(0, 11), at(2_000_000, 10)],
            [None; 3],
            "what only looks, what never fits, what is over"
        );
    }

    #[test]
    fn what_is_remembered_is_found_and_forgotten() {
        let table = Rejections::new(100);
        assert_eq!(table.full_at_us(7), None);
        table.remember(7, 100, 5_000, 200);
        table.remember(8, 100, 6_000, 200);
        assert_eq!([table.full_at_us(7), table.full_at_us(8), table.full_at_us(9)], [Some(5_000), Some(6_000), None]);
        table.remember(7, 300, 5_500, 400);
        assert_eq!(table.full_at_us(7), Some(5_500));
        table.forget(7, 450);
        assert_eq!(table.full_at_us(7), None);
        table.remember(7, 420, 5_800, 500);
        assert_eq!(table.full_at_us(7), None, "it was asked before something was given back");
        table.remember(7, 460, 5_900, 600);
        assert_eq!(table.full_at_us(7), Some(5_900));
    }

    #[test]
    fn what_has_run_out_makes_room_first() {
        let table = Rejections::new(WAYS);
        let known = |keys: [u64; 4]| keys.map(|key| table.full_at_us(key).is_some());
        table.remember(1, 0, 900, 10);
        table.remember(2, 0, 200, 10);
        table.remember(3, 0, 800, 10);
        table.remember(4, 0, 700, 500);
        assert_eq!(known([1, 2, 3, 4]), [true, false, true, true]);
        table.remember(2, 0, 1_000, 500);
        assert_eq!(known([1, 2, 3, 4]), [true, true, true, false], "then what runs out soonest");
    }

    proptest! {
        /// Against a bucket that counts in fractions: no check is denied that would find its cost, whatever the rate; and
        /// whoever waits as long as it is told to finds it.
        #[test]
        fn nobody_is_denied_wrongly_or_for_long(
            (capacity, refill, period_ms) in (1u64..5_000, 1u64..5_000, 1u64..100_000),
            (level_pct, wait_us, cost_pct) in (0u64..100, 0u64..10_000_000, 1u64..=100),
        ) {
            let rate = rate(capacity, refill, period_ms);
            let (level, cost) = (capacity * level_pct / 100, (capacity * cost_pct / 100).max(1));
            // As the script says it: whole milliseconds, rounded up.
            let full_at_us = ((capacity - level) * period_ms).div_ceil(refill) * 1_000;
            let holds_at = |us: u64| level as f64 + us as f64 * refill as f64 / (period_ms * 1_000) as f64;
            let said = deny(&rate, full_at_us, wait_us, cost as u32);
            // One millisecond is what the script's rounding hides.
            if holds_at(wait_us.saturating_sub(1_001)) >= cost as f64 {
                prop_assert_eq!(said, None);
            }
            if let Some(said) = said {
                let after_us = wait_us + said.retry_after_ms as u64 * 1_000;
                prop_assert!(holds_at(after_us) >= cost as f64 - 1e-6);
                prop_assert!(said.remaining >= 0 && said.remaining < cost.cast_signed());
                prop_assert!(said.retry_after_ms > 0 && said.retry_after_ms <= said.reset_after_ms);
            } else {
                prop_assert!(holds_at(wait_us) >= cost as f64 - 1e-6);
            }
        }
    }
}
