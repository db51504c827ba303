//! The bucket against a simple model, and the table against what it promises.

use std::collections::HashMap;

use policy_sync::{model::Limit, rate::Rate};
use proptest::prelude::*;

use super::{
    BucketTable, Level, TableCounts,
    table::{Moment, SLOTS_PER_GROUP},
};

/// A bucket as one would write it down: a fraction with the period as its denominator, in exact integers.
struct Model {
    limit: Limit,
    /// Tokens × period.
    level: u128,
    at_ms: u64,
}

impl Model {
    fn new(limit: Limit, now_ms: u64) -> Self {
        Self { limit, level: u128::from(limit.capacity) * u128::from(limit.period_ms), at_ms: now_ms }
    }

    fn refill(&mut self, now_ms: u64) {
        let gained = u128::from(now_ms - self.at_ms) * u128::from(self.limit.refill);
        let full = u128::from(self.limit.capacity) * u128::from(self.limit.period_ms);
        self.level = (self.level + gained).min(full);
        self.at_ms = now_ms;
    }

    fn take(&mut self, cost: u64, now_ms: u64) -> bool {
        self.refill(now_ms);
        let cost = u128::from(cost) * u128::from(self.limit.period_ms);
        let fits = self.level >= cost;
        if fits {
            self.level -= cost;
        }
        fits
    }

    fn tokens(&self) -> u128 {
        self.level / u128::from(self.limit.period_ms)
    }
}

fn moment(now_ms: u64) -> Moment {
    Moment { now_ms, fill_ms_max: 1_000 }
}

fn limits() -> impl Strategy<Value = Limit> {
    let capacity = prop_oneof![1u64..20, 1u64..100_000, Just((1 << 31) - 1)];
    let refill = prop_oneof![1u64..20, 1u64..1_000_000, Just((1 << 31) - 1)];
    let period_ms = prop_oneof![1u64..2_000, 1u64..=1 << 24, Just(60_000)];
    (capacity, refill, period_ms).prop_map(|(capacity, refill, period_ms)| Limit { capacity, refill, period_ms })
}

/// Waiting time, cost.
fn steps() -> impl Strategy<Value = Vec<(u64, u32)>> {
    let wait_ms = prop_oneof![4 => 0u64..3, 3 => 0u64..5_000, 1 => 0u64..100_000_000];
    let cost = prop_oneof![4 => 0u32..4, 2 => 0u32..200, 1 => any::<u32>()];
    prop::collection::vec((wait_ms, cost), 1..100)
}

proptest! {
    /// Every verdict and every remaining count is the model's, whatever the rate and however the checks fall.
    #[test]
    fn a_bucket_is_its_model(limit in limits(), steps in steps(), looks in any::<u64>()) {
        let rate = Rate::new(limit).unwrap();
        let table = BucketTable::new(100);
        let mut counts = TableCounts::default();
        let mut now_ms = 5;
        let mut model = Model::new(limit, now_ms);
        for (step, (wait_ms, cost)) in steps.into_iter().enumerate() {
            now_ms += wait_ms;
            if looks >> (step % 64) & 1 == 1 {
                // Looking must change nothing.
                let seen = table.probe(7, &rate, now_ms).level;
                model.refill(now_ms);
                prop_assert_eq!(u128::from(seen.tokens), model.tokens());
            }
            let outcome = crate::decision::take(&table, 7, &rate, cost, moment(now_ms), &mut counts);
            let expected = model.take(u64::from(cost), now_ms);
            prop_assert_eq!(outcome.is_ok(), expected, "step {} at {} ms", step, now_ms);
            let level = outcome.unwrap_or_else(|level| level);
            prop_assert_eq!(u128::from(level.tokens), model.tokens());
        }
    }

    /// A refused check passes after retry-after, and not a millisecond earlier; a bucket is full after reset-after.
    #[test]
    fn waits_are_exact(limit in limits(), taken in any::<u32>(), asked in any::<u32>(), age_ms in 0u64..10_000) {
        let rate = Rate::new(limit).unwrap();
        let full = Level::fresh(0).refilled(&rate, 0);
        let level = Level { tokens: full.tokens - taken % (full.tokens + 1), ..full }.refilled(&rate, age_ms);
        let asked = asked % (rate.capacity + 1);
        for tokens in [asked, rate.capacity] {
            let wait_ms = level.wait_ms(&rate, tokens, age_ms);
            // Beyond the four years that a word's clock has, nothing refills any more.
            prop_assume!(age_ms + wait_ms <= super::word::AT_MS_MAX);
            prop_assert!(level.refilled(&rate, age_ms + wait_ms).tokens >= tokens);
            if wait_ms > 0 {
                prop_assert!(level.refilled(&rate, age_ms + wait_ms - 1).tokens < tokens);
            }
        }
    }

    /// Slow limits tick in seconds: never more than the model, never more than a second behind it.
    #[test]
    fn second_ticks_lag_by_less_than_a_second(
        capacity in 1u64..1000, refill in 1u64..1000, period_secs in 20_000u64..2_678_400,
        waits in prop::collection::vec(0u64..10_000_000, 1..50),
    ) {
        let limit = Limit { capacity, refill, period_ms: period_secs * 1000 };
        let rate = Rate::new(limit).unwrap();
        prop_assert_eq!(rate.tick_ms, 1000);
        let mut now_ms = 0;
        let mut model = Model { level: 0, ..Model::new(limit, 0) };
        let mut level = Level { tokens: 0, units: 0, at_ms: 0 };
        for wait_ms in waits {
            now_ms += wait_ms;
            level = level.refilled(&rate, now_ms);
            model.refill(now_ms);
            prop_assert!(u128::from(level.tokens) <= model.tokens());
            let second_ago = model.level.saturating_sub(u128::from(refill) * 1000) / u128::from(limit.period_ms);
            prop_assert!(u128::from(level.tokens) >= second_ago);
        }
    }

    /// The packed word carries every level and fingerprint.
    #[test]
    fn packing_loses_nothing(tokens in 0u32..1 << 31, units in 0u32..1 << 24, at_ms in 0u64..1 << 37, print in 0u64..1 << 36) {
        let level = Level { tokens, units, at_ms };
        let word = level.pack(print);
        prop_assert_eq!(Level::unpack(word), level);
        prop_assert_eq!(super::word::fingerprint(word), print);
    }

    /// A rule change keeps the whole tokens, caps them at a lower capacity, and keeps the fraction within half a token.
    #[test]
    fn a_changed_rule_keeps_the_bucket(old in limits(), new in limits(), taken in any::<u32>(), age_ms in 0u64..10_000) {
        let (old, new) = (Rate::new(old).unwrap(), Rate::new(new).unwrap());
        let full = Level::fresh(0).refilled(&old, 0);
        let before = Level { tokens: full.tokens - taken % (full.tokens + 1), ..full }.refilled(&old, age_ms);
        let after = before.refilled(&new, age_ms);
        prop_assert_eq!(after.tokens, before.tokens.min(new.capacity));
        if after.tokens < new.capacity {
            let fraction = |units: u32, rate: &Rate| f64::from(units) / f64::from(rate.units_per_token);
            prop_assert!((fraction(after.units, &new) - fraction(before.units, &old)).abs() <= 0.5);
        }
    }
}

fn per_hour(capacity: u64) -> Rate {
    Rate::new(Limit { capacity, refill: 1, period_ms: 3_600_000 }).unwrap()
}

#[test]
fn a_clock_that_went_back_counts_as_no_time() {
    let rate = Rate::new(Limit { capacity: 10, refill: 1, period_ms: 1 }).unwrap();
    let level = Level { tokens: 3, units: 0, at_ms: 100 };
    assert_eq!(level.refilled(&rate, 50), level);
    assert_eq!(level.refilled(&rate, 102).tokens, 5);
}

#[test]
fn giving_back_stops_at_the_capacity() {
    let (table, rate, mut counts) = (BucketTable::new(10), per_hour(5), TableCounts::default());
    crate::decision::take(&table, 1, &rate, 2, moment(0), &mut counts).unwrap();
    table.give_back(1, &rate, 1, moment(0), &mut counts);
    assert_eq!(table.probe(1, &rate, 0).level.tokens, 4);
    table.give_back(1, &rate, 100, moment(0), &mut counts);
    assert_eq!(table.probe(1, &rate, 0).level.tokens, 5);
}

/// Keys spread as hashes do.
fn key(index: u64) -> u64 {
    xxhash_rust::xxh3::xxh3_64(&index.to_le_bytes())
}

#[test]
fn identities_do_not_touch_each_other_until_the_table_is_nearly_full() {
    let (table, rate, mut counts) = (BucketTable::new(10_000), per_hour(1_000_000), TableCounts::default());
    let identities = table.capacity() as u64 * 6 / 10;
    for index in 0..identities {
        let cost = (index % 1000) as u32 + 1;
        crate::decision::take(&table, key(index), &rate, cost, moment(0), &mut counts).unwrap();
    }
    assert_eq!(counts, TableCounts { inserted: identities, ..TableCounts::default() });
    for index in 0..identities {
        let left = table.probe(key(index), &rate, 0).level.tokens;
        assert_eq!(left, 1_000_000 - (index % 1000) as u32 - 1, "identity {index}");
    }
}

#[test]
fn a_full_table_drops_the_longest_idle_and_says_so() {
    let (table, rate, mut counts) = (BucketTable::new(SLOTS_PER_GROUP), per_hour(5), TableCounts::default());
    let slots = table.capacity() as u64;
    for index in 0..slots {
        crate::decision::take(&table, key(index), &rate, 1, moment(index), &mut counts).unwrap();
    }
    assert_eq!((counts.evicted_in_use, counts.evicted_full), (0, 0));
    crate::decision::take(&table, key(slots), &rate, 1, moment(slots), &mut counts).unwrap();
    assert_eq!((counts.evicted_in_use, counts.evicted_full), (1, 0));
    assert_eq!(table.probe(key(0), &rate, slots).level.tokens, 5, "the first was the longest idle");
    assert_eq!(table.probe(key(1), &rate, slots).level.tokens, 4);
    let late = moment(slots + 2_000);
    crate::decision::take(&table, key(slots + 1), &rate, 1, late, &mut counts).unwrap();
    assert_eq!((counts.evicted_in_use, counts.evicted_full), (1, 1), "untouched for longer than any bucket takes");
}

#[test]
fn a_check_that_does_not_fit_leaves_no_trace() {
    let (table, rate, mut counts) = (BucketTable::new(10), per_hour(5), TableCounts::default());
    assert!(crate::decision::take(&table, 1, &rate, 6, moment(0), &mut counts).is_err());
    assert!(crate::decision::take(&table, 2, &rate, 0, moment(0), &mut counts).is_ok());
    assert_eq!(counts, TableCounts::default());
}

/// Threads race for identities that nobody has seen, in a table so small that they also race for slots: as long as
/// none is dropped in use, each identity gets exactly its capacity.
#[test]
fn racing_threads_are_granted_exactly_the_capacity() {
    const THREADS: usize = 4;
    const ROUNDS: u64 = 2_000;
    let (table, rate) = (BucketTable::new(SLOTS_PER_GROUP * 64), per_hour(10));
    let barrier = std::sync::Barrier::new(THREADS);
    let granted: Vec<HashMap<u64, u32>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|_| {
                scope.spawn(|| {
                    let mut granted = HashMap::new();
                    let mut counts = TableCounts::default();
                    for round in 0..ROUNDS {
                        barrier.wait();
                        // Rounds are an hour apart: what earlier rounds left behind is idle and may go.
                        let at = Moment { now_ms: round * 3_600_000, fill_ms_max: 1_000 };
                        for identity in 0..8 {
                            let key = key(round * 8 + identity);
                            for _ in 0..5 {
                                let outcome = crate::decision::take(&table, key, &rate, 1, at, &mut counts);
                                *granted.entry(key).or_default() += u32::from(outcome.is_ok());
                            }
                        }
                    }
                    assert_eq!(counts.evicted_in_use, 0);
                    granted
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for index in 0..ROUNDS * 8 {
        let total: u32 = granted.iter().map(|thread| thread[&key(index)]).sum();
        assert_eq!(total, 10, "identity {index}: 20 asked");
    }
}
