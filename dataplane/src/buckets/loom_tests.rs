//! Every interleaving of two cores that meet in the table, by loom. Run with `RUSTFLAGS="--cfg loom"`.
//!
//! Under loom a group has one slot, so two identities that share a group also fight for it.

use std::sync::Arc;

use loom::thread;
use policy_sync::{model::Limit, rate::Rate};

use super::{BucketTable, TableCounts, table::Moment};

fn rate(capacity: u64) -> Rate {
    Rate::new(Limit { capacity, refill: 1, period_ms: 3_600_000 }).expect("the limit is within its bounds")
}

fn take(table: &BucketTable, key: u64, rate: &Rate, counts: &mut TableCounts) -> bool {
    let moment = Moment { now_ms: 1, fill_ms_max: 1_000 };
    crate::decision::take(table, key, rate, 1, moment, counts).is_ok()
}

/// Keys with different fingerprints.
const A: u64 = 1 << 48;
const B: u64 = 2 << 48;

#[test]
fn a_new_identity_is_put_in_once() {
    loom::model(|| {
        let table = Arc::new(BucketTable::new(2));
        let other = Arc::clone(&table);
        let thread = thread::spawn(move || {
            let mut counts = TableCounts::default();
            (take(&other, A, &rate(1), &mut counts), counts)
        });
        let mut counts = TableCounts::default();
        let here = take(&table, A, &rate(1), &mut counts);
        let (there, their_counts) = thread.join().expect("the thread does not panic");
        assert!(here != there, "the one token was granted {} times", u8::from(here) + u8::from(there));
        assert_eq!(counts.inserted + their_counts.inserted, 1);
    });
}

#[test]
fn two_new_identities_in_one_home_both_get_in() {
    loom::model(|| {
        let table = Arc::new(BucketTable::new(2));
        let other = Arc::clone(&table);
        let thread = thread::spawn(move || {
            let mut counts = TableCounts::default();
            assert!(take(&other, B, &rate(1), &mut counts));
            assert!(!take(&other, B, &rate(1), &mut counts));
            counts
        });
        let mut counts = TableCounts::default();
        assert!(take(&table, A, &rate(1), &mut counts));
        let theirs = thread.join().expect("the thread does not panic");
        assert_eq!(counts.inserted + theirs.inserted, 2);
        assert_eq!(counts.evicted_in_use + theirs.evicted_in_use, 0);
        assert!(!take(&table, A, &rate(1), &mut counts));
        assert!(!take(&table, B, &rate(1), &mut counts));
    });
}

#[test]
fn taking_and_giving_back_add_up() {
    loom::model(|| {
        let table = Arc::new(BucketTable::new(2));
        let mut counts = TableCounts::default();
        assert!(take(&table, A, &rate(2), &mut counts));
        let other = Arc::clone(&table);
        let thread = thread::spawn(move || {
            let mut counts = TableCounts::default();
            let moment = Moment { now_ms: 1, fill_ms_max: 1_000 };
            other.give_back(A, &rate(2), 1, moment, &mut counts);
        });
        let second = take(&table, A, &rate(2), &mut counts);
        thread.join().expect("the thread does not panic");
        let left = table.probe(A, &rate(2), 1).level.tokens;
        assert_eq!(left, 2 - u32::from(second));
    });
}
