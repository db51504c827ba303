//! Every reply cut at every byte, in the wrong order, and malformed.

use clap::Parser;

use super::*;
use crate::{args::Distribution, identities::Identities, requests::Template};

/// One connection with a batch in flight.
struct Bench {
    batch: Batch,
    expectations: Expectations,
    ledger: Ledger,
    verifier: Verifier,
}

impl Bench {
    fn new(args: &[&str], depth: u32, probes: &[u32]) -> Self {
        let args = Args::parse_from([&["sluice-load"], args].concat());
        let mut batch = Batch::new(&Template::new(&args), depth, probes);
        let mut identities = Identities::new(Distribution::Sequential, 1.0, 100, 0, 1, 1);
        batch.renew(&mut identities, 1, &mut 0);
        let mut verifier = Verifier::default();
        verifier.begin(depth);
        Self { batch, expectations: Expectations::new(&args), ledger: Ledger::default(), verifier }
    }

    fn feed(&mut self, bytes: &[u8]) -> Result<u32, Wrong> {
        self.verifier.feed(bytes, &self.batch, &self.expectations, &mut self.ledger)
    }
}

const ALLOW: &str = "*6\r\n:1\r\n:10\r\n:9\r\n:0\r\n:6000\r\n$5\r\nlogin\r\n";
const DENY: &str = "*6\r\n:0\r\n:10\r\n:0\r\n:512\r\n:60000\r\n$5\r\nlogin\r\n";
const AWAY: &str = "*6\r\n:-1\r\n:7\r\n:0\r\n:0\r\n:0\r\n$3\r\nips\r\n";
const UNRULED: &str = "*6\r\n:1\r\n:-1\r\n:-1\r\n:0\r\n:0\r\n$0\r\n\r\n";
const PROBE: &str = "$21\r\n0001-0000000000000001\r\n";

/// Protocol arguments, all replies of one batch, how many they are, where its probes are, and what must have been counted.
type Stream = (Vec<&'static str>, String, u32, Vec<u32>, Tally);

fn streams() -> Vec<Stream> {
    let tally = Tally::default();
    vec![
        (
            vec![],
            [ALLOW, DENY, PROBE, AWAY, UNRULED].concat(),
            5,
            vec![2],
            Tally { replies: 5, allowed: 2, denied: 1, unavailable: 1, probes: 1, ..tally },
        ),
        (
            vec!["--protocol", "cl-throttle", "--burst", "15"],
            ["*5\r\n:0\r\n:16\r\n:15\r\n:-1\r\n:2\r\n", PROBE, "*5\r\n:1\r\n:16\r\n:0\r\n:2\r\n:32\r\n"].concat(),
            3,
            vec![1],
            Tally { replies: 3, allowed: 1, denied: 1, probes: 1, ..tally },
        ),
        (
            vec!["--protocol", "throttle", "--burst", "15"],
            "*5\r\n:1\r\n:15\r\n:14\r\n:2\r\n:0\r\n*5\r\n:0\r\n:15\r\n:0\r\n:32\r\n:2\r\n".into(),
            2,
            vec![],
            Tally { replies: 2, allowed: 1, denied: 1, ..tally },
        ),
        (
            vec!["--protocol", "ping"],
            ["+PONG\r\n", "+PONG\r\n", PROBE].concat(),
            3,
            vec![2],
            Tally { replies: 3, probes: 1, ..tally },
        ),
        (
            vec!["--protocol", "incr"],
            [PROBE, ":1\r\n:123456\r\n"].concat(),
            3,
            vec![0],
            Tally { replies: 3, probes: 1, ..tally },
        ),
        (
            vec!["--allow-errors"],
            ["-ERR a\r\n", ALLOW, "-ERR b\r\n"].concat(),
            3,
            vec![2],
            Tally { replies: 3, allowed: 1, errors: 2, ..tally },
        ),
    ]
}

#[test]
fn right_replies_pass_whole_and_cut_at_each_byte() {
    for (args, stream, depth, probes, tally) in streams() {
        let stream = stream.as_bytes();
        for cut in 0..=stream.len() {
            let mut bench = Bench::new(&args, depth, &probes);
            let first = bench.feed(&stream[..cut]).unwrap_or_else(|wrong| panic!("{args:?} at {cut}: {wrong}"));
            let second = bench.feed(&stream[cut..]).unwrap_or_else(|wrong| panic!("{args:?} at {cut}: {wrong}"));
            assert_eq!(first + second, depth);
            assert!(bench.verifier.is_done());
            assert_eq!(bench.ledger.tally, tally);
        }
    }
}

#[test]
fn right_replies_pass_byte_by_byte() {
    for (args, stream, depth, probes, tally) in streams() {
        let mut bench = Bench::new(&args, depth, &probes);
        let got: u32 = stream.as_bytes().iter().map(|&byte| bench.feed(&[byte]).unwrap()).sum();
        assert_eq!((got, bench.ledger.tally), (depth, tally));
    }
}

#[test]
fn every_truncation_leaves_replies_missing() {
    for (args, stream, depth, probes, _) in streams() {
        let mut bench = Bench::new(&args, depth, &probes);
        bench.feed(&stream.as_bytes()[..stream.len() - 1]).unwrap();
        assert_eq!(bench.verifier.missing(), 1);
    }
}

#[test]
fn replies_out_of_order_are_found_by_the_probe() {
    let mut bench = Bench::new(&[], 3, &[1]);
    let wrong = bench.feed([ALLOW, ALLOW, PROBE].concat().as_bytes()).unwrap_err();
    assert_eq!(wrong.index, 1);
    assert!(wrong.expected.contains("0001-0000000000000001"), "{wrong}");
    assert!(wrong.came.starts_with("\"*6"), "{wrong}");

    let mut bench = Bench::new(&[], 3, &[1]);
    assert_eq!(bench.feed([PROBE, ALLOW, ALLOW].concat().as_bytes()).unwrap_err().index, 0);

    // Another connection's token.
    let mut bench = Bench::new(&[], 3, &[1]);
    let other = PROBE.replace("0001-", "0002-");
    assert_eq!(bench.feed([ALLOW, &other, ALLOW].concat().as_bytes()).unwrap_err().index, 1);
}

#[test]
fn the_index_counts_over_batches() {
    let mut bench = Bench::new(&[], 2, &[]);
    bench.feed([ALLOW, ALLOW].concat().as_bytes()).unwrap();
    bench.verifier.begin(2);
    bench.feed(ALLOW.as_bytes()).unwrap();
    assert_eq!(bench.feed(b"+OK\r\n").unwrap_err().index, 3);
}

#[test]
fn a_reply_too_many_is_wrong() {
    let mut bench = Bench::new(&[], 1, &[]);
    let wrong = bench.feed([ALLOW, ALLOW].concat().as_bytes()).unwrap_err();
    assert!(wrong.expected.contains("none is due"), "{wrong}");
}

#[test]
fn malformed_and_impossible_checks_are_wrong() {
    for bad in [
        "*5\r\n:1\r\n:10\r\n:9\r\n:0\r\n:6000\r\n",
        "+OK\r\n",
        "$3\r\nabc\r\n",
        "-ERR no\r\n",
        &ALLOW.replace(":1\r", ":2\r"),
        &ALLOW.replace(":9\r", ":11\r"),
        &ALLOW.replace(":9\r", ":-1\r"),
        &ALLOW.replace(":9\r", ":9x\r"),
        &ALLOW.replace(":9\r", ":\r"),
        &ALLOW.replace(":9\r", ":-\r"),
        &ALLOW.replace(":9\r", ":9999999999999999999\r"),
        &ALLOW.replace(":9\r", "$9\r"),
        &ALLOW.replace(":0\r", ":1\r"),
        &ALLOW.replace(":6000\r", ":-6\r"),
        &ALLOW.replace("$5", "$4"),
        &ALLOW.replace("$5", "$-1"),
        &ALLOW.replace("login\r\n", "login\n\n"),
        &DENY.replace(":512\r", ":0\r"),
        &DENY.replace(":512\r", ":-2\r"),
        &UNRULED.replace(":-1\r\n:-1", ":-1\r\n:0"),
    ] {
        let mut bench = Bench::new(&[], 2, &[]);
        let result = bench.feed([bad, ALLOW].concat().as_bytes());
        assert_eq!(result.expect_err(bad).index, 0, "{bad:?}");
    }
}

#[test]
fn a_rule_keeps_its_limit_unless_told_otherwise() {
    let other = ALLOW.replace(":10\r", ":20\r");
    let mut bench = Bench::new(&[], 3, &[]);
    assert!(bench.feed([ALLOW, UNRULED, &other].concat().as_bytes()).is_err());
    let mut bench = Bench::new(&["--varying-limits"], 3, &[]);
    assert_eq!(bench.feed([ALLOW, UNRULED, &other].concat().as_bytes()), Ok(3));

    let expectations = &bench.expectations;
    let (mut one, mut two) = (Ledger::default(), Ledger::default());
    one.limits.insert(b"$1\r\na\r\n".to_vec().into(), 1);
    two.limits.insert(b"$1\r\na\r\n".to_vec().into(), 2);
    assert!(one.clone().merge(&two, expectations).is_ok());
    assert!(one.merge(&two, &Expectations { varying_limits: false, ..expectations.clone() }).is_err());
}

#[test]
fn an_expected_rule_must_be_the_one() {
    let mut bench = Bench::new(&["--expect-rule", "login"], 2, &[]);
    assert_eq!(bench.feed(ALLOW.as_bytes()), Ok(1));
    assert!(bench.feed(UNRULED.as_bytes()).is_err());
}

#[test]
fn throttles_must_have_their_limit_and_their_own_flag() {
    let cell = &["--protocol", "cl-throttle", "--burst", "15"];
    for bad in [
        "*5\r\n:0\r\n:15\r\n:15\r\n:-1\r\n:2\r\n",
        "*5\r\n:0\r\n:16\r\n:17\r\n:-1\r\n:2\r\n",
        "*5\r\n:0\r\n:16\r\n:15\r\n:0\r\n:2\r\n",
        "*5\r\n:2\r\n:16\r\n:15\r\n:-1\r\n:2\r\n",
        "*6\r\n:0\r\n:16\r\n:15\r\n:-1\r\n:2\r\n",
    ] {
        assert!(Bench::new(cell, 1, &[]).feed(bad.as_bytes()).is_err(), "{bad:?}");
    }
    let crab = &["--protocol", "throttle", "--burst", "15"];
    for bad in ["*5\r\n:1\r\n:16\r\n:14\r\n:2\r\n:0\r\n", "*5\r\n:1\r\n:15\r\n:14\r\n:2\r\n:1\r\n"] {
        assert!(Bench::new(crab, 1, &[]).feed(bad.as_bytes()).is_err(), "{bad:?}");
    }
}

#[test]
fn echoed_bytes_are_compared_wherever_they_are_cut() {
    let sent = Bench::new(&["--protocol", "echo-bytes"], 3, &[]).batch.bytes(3).to_vec();
    for cut in 0..=sent.len() {
        let mut bench = Bench::new(&["--protocol", "echo-bytes"], 3, &[]);
        let got = bench.feed(&sent[..cut]).unwrap() + bench.feed(&sent[cut..]).unwrap();
        assert_eq!((got, bench.verifier.missing(), bench.ledger.tally.replies), (3, 0, 3));
        assert!(bench.feed(b"*").is_err(), "a byte too many");
        if cut < sent.len() {
            let mut changed = sent.clone();
            changed[cut] ^= 1;
            let mut bench = Bench::new(&["--protocol", "echo-bytes"], 3, &[]);
            let wrong = bench.feed(&changed).unwrap_err();
            assert_eq!(wrong.index, (cut / (sent.len() / 3)) as u64);
        }
    }
}

#[test]
fn short_numbers_are_read_like_any() {
    for number in (0..1_100).chain([9_999, 10_000, 99_999, 100_000, 999_999, 1_000_000, 12_345_678]) {
        for tail in ["\r\n:1\r\n$1", "\r\n", "\n\r:1234567", "\r:1234567", "x\r\n12345", "/\r\n12345", ""] {
            let text = format!("{number}{tail}");
            let read = |how: fn(&mut Cursor<'_>) -> Result<i64, Stop>| {
                let mut cursor = Cursor { bytes: text.as_bytes(), at: 0 };
                how(&mut cursor).ok().map(|value| (value, cursor.at))
            };
            assert_eq!(read(|cursor| cursor.integer()), read(|cursor| cursor.any_integer()), "{text:?}");
        }
    }
}
