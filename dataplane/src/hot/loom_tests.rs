//! Every interleaving of cores that read and write one line of the rejection cache, by loom.

use std::sync::Arc;

use loom::thread;

use super::rejections::Rejections;

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
