//! What is claimed of hot keys, in the simulated world; `bench/README.md` has the table.
#![allow(missing_docs)]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on must stop, with the reason")]

use sluice_simulator::experiments::{Row, named};

const SEED: u64 = 1;

fn rows(name: &str) -> Vec<Row> {
    named(name).unwrap()(SEED)
}

#[test]
fn a_key_over_its_limit_gets_exactly_that_and_few_calls() {
    for row in rows("over-its-limit") {
        // The last token may be on its way when the world ends.
        assert!((row.figure("limit") - row.figure("admitted")).abs() <= 1.0, "{row}");
        let least = match () {
            () if row.name.ends_with("off") => 1.0,
            () if row.name.starts_with("10 ") => 5.0,
            () => 15.0,
        };
        assert!(row.figure("checks for each call") >= least, "{row}");
    }
}

#[test]
fn gateways_that_lease_the_whole_bucket_admit_it_once() {
    for row in rows("leases-of-100") {
        assert_eq!(row.figure("admitted in all"), row.figure("of a bucket of"), "{row}");
    }
}

#[test]
fn parts_of_a_split_bucket_are_on_as_many_shards() {
    for row in rows("split") {
        assert_eq!(row.figure("shards that share the calls"), 10.0, "{row}");
        assert!(row.figure("calls of the busiest, %") < 15.0, "{row}");
        assert!(row.figure("of it before the first deny, %") > 50.0, "{row}");
    }
}

#[test]
fn a_sampled_key_gets_about_twice_its_limit_and_much_more_without_the_block() {
    let rows = rows("sample");
    let [with, without] = [0, 1].map(|at| rows[at].figure("admitted, times the limit"));
    assert!((1.0..2.3).contains(&with), "{}", rows[0]);
    assert!((7.0..10.0).contains(&without), "{}", rows[1]);
}
