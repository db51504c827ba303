//! Every interleaving of cores that meet in one line of the rejection cache, or in one lease, by loom.

use std::sync::Arc;

use loom::thread;

use super::{
    leases::{Batch, Leases},
    rejections::Rejections,
};

/// Two buckets of one line, and what is told of them: never what was told of the other.
#[test]
fn nobody_reads_what_was_said_of_another_bucket() {
    loom::model(|| {
        // One line of three entries, two of which are taken: the writers fight for the third.
        let table = Arc::new(Rejections::new(1));
        table.remember(1, 0, 1_000, 0);
        table.remember(2, 0, 2_000, 0);
        let writers = [(3, 3_000), (4, 4_000)].map(|(key, full_at_us)| {
            let table = Arc::clone(&table);
            thread::spawn(move || table.remember(key, 0, full_at_us, 0))
        });
        for (key, full_at_us) in [(3, 3_000), (4, 4_000), (1, 1_000)] {
            let known = table.full_at_us(key);
            assert!(known.is_none_or(|known| known == full_at_us), "{key}: {known:?}");
        }
        writers.into_iter().for_each(|writer| writer.join().expect("it does not panic"));
    });
}

/// What is given back is known to all who look afterwards, whatever was being written.
#[test]
fn what_was_given_back_is_not_denied_afterwards() {
    loom::model(|| {
        let table = Arc::new(Rejections::new(1));
        table.remember(1, 0, 1_000, 0);
        let other = Arc::clone(&table);
        // The reply to a call that was sent before.
        let writer = thread::spawn(move || other.remember(1, 5, 1_500, 10));
        table.forget(1, 10);
        writer.join().expect("it does not panic");
        assert_eq!(table.full_at_us(1), None);
    });
}

fn batch(tokens: u32) -> Batch {
    Batch { tokens, remaining: 0, full_at_us: 0, rule: 0 }
}

/// Each token that came is spent or given back, once.
#[test]
fn a_lease_that_is_closed_while_it_is_spent_loses_and_doubles_nothing() {
    loom::model(|| {
        let leases = Arc::new(Leases::new(2));
        let id = leases.open(2, 0).expect("there is room");
        assert!(leases.deposit(2, &batch(2), 0));
        let other = Arc::clone(&leases);
        let spender = thread::spawn(move || (0..2).filter(|_| other.spend(2, 1, 0).is_some()).count());
        let here = u32::from(leases.spend(2, 1, 0).is_some());
        let left = leases.close(id);
        let there = spender.join().expect("it does not panic") as u32;
        assert_eq!(here + there + left, 2);
    });
}

/// A line that becomes another key's: nobody spends what is not theirs.
#[test]
fn nobody_spends_from_a_lease_that_has_become_anothers() {
    loom::model(|| {
        let leases = Arc::new(Leases::new(2));
        let id = leases.open(2, 0).expect("there is room");
        assert!(leases.deposit(2, &batch(1), 0));
        let other = Arc::clone(&leases);
        let spender = thread::spawn(move || u32::from(other.spend(2, 1, 0).is_some()));
        let left = leases.close(id);
        let theirs = leases.open(4, 0).expect("there is room");
        assert!(leases.deposit(4, &batch(1), 0));
        let spent = spender.join().expect("it does not panic");
        assert_eq!((spent + left, leases.close(theirs)), (1, 1));
    });
}

/// One core asks at a time.
#[test]
fn one_core_asks_for_a_batch() {
    loom::model(|| {
        let leases = Arc::new(Leases::new(2));
        leases.open(2, 0).expect("there is room");
        let other = Arc::clone(&leases);
        let asker = thread::spawn(move || other.begin_ask(2, 0));
        let here = leases.begin_ask(2, 0);
        assert!(here != asker.join().expect("it does not panic"));
    });
}
