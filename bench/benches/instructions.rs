//! Instructions per check, bytes to bytes, counted by callgrind: `cargo bench -p sluice-bench --bench instructions`.
//!
//! Each function runs 1,000 checks (or 1,000 / depth rounds), so the count divided by 1,000 is a check's.
#![allow(missing_docs)]
#![allow(unused_qualifications, reason = "the macro's own")]

use std::hint::black_box;

use iai_callgrind::{library_benchmark, library_benchmark_group, main};
use sluice_bench::{
    DENIED, GRANTED, LEASED, LEASED_RULE, ONE_RULE, Rig, SLOW_RULE, THREE_OF_ONE, THREE_RULES, many_rules, pipeline,
};

const CHECKS: u64 = 1_000;

/// A rig that has seen every identity of the pipeline, and the pipeline.
fn warm(policy: &str, depth: u64) -> (Rig, Vec<u8>) {
    let mut rig = Rig::new(policy, 1 << 16);
    let requests = pipeline(depth);
    for _ in 0..3 {
        rig.round(&requests);
    }
    (rig, requests)
}

/// The same under a policy of so many rules, 100 deep.
fn warm_many(rules: usize) -> (Rig, Vec<u8>) {
    warm(&many_rules(rules), 100)
}

#[library_benchmark]
#[bench::one_rule_depth_1(args = (ONE_RULE, 1), setup = warm)]
#[bench::one_rule_depth_16(args = (ONE_RULE, 16), setup = warm)]
#[bench::one_rule_depth_100(args = (ONE_RULE, 100), setup = warm)]
#[bench::three_rules_depth_1(args = (THREE_RULES, 1), setup = warm)]
#[bench::three_rules_depth_100(args = (THREE_RULES, 100), setup = warm)]
#[bench::of_10_rules_depth_100(args = (10), setup = warm_many)]
#[bench::of_10000_rules_depth_100(args = (10_000), setup = warm_many)]
fn checks((mut rig, requests): (Rig, Vec<u8>)) -> (Rig, Vec<u8>) {
    let depth = (requests.len() / sluice_bench::request(0).len()) as u64;
    for _ in 0..CHECKS / depth {
        black_box(rig.round(black_box(&requests)));
    }
    (rig, requests)
}

/// A rig whose counts are in Redis, a pipeline, and what Redis answers to its calls.
fn warm_remote(policy: &str, depth: u64, rules: usize) -> (Rig, Vec<u8>, Vec<u8>) {
    let mut rig = Rig::with_redis(policy);
    let requests = pipeline(depth);
    let reply = format!("*{}\r\n{}", 4 * rules, GRANTED.repeat(rules));
    let replies = reply.repeat(depth as usize).into_bytes();
    for _ in 0..3 {
        rig.remote_round(&requests, &replies);
    }
    (rig, requests, replies)
}

/// The same where Redis has said that the buckets are empty.
fn warm_rejected(policy: &str, depth: u64) -> (Rig, Vec<u8>) {
    let mut rig = Rig::with_redis(policy);
    let requests = pipeline(depth);
    rig.remote_round(&requests, format!("*4\r\n{DENIED}").repeat(depth as usize).as_bytes());
    (rig, requests)
}

#[library_benchmark]
#[bench::one_rule_depth_16(args = (SLOW_RULE, 16), setup = warm_rejected)]
#[bench::one_rule_depth_100(args = (SLOW_RULE, 100), setup = warm_rejected)]
fn rejected((mut rig, requests): (Rig, Vec<u8>)) -> (Rig, Vec<u8>) {
    let depth = (requests.len() / sluice_bench::request(0).len()) as u64;
    for _ in 0..CHECKS / depth {
        let answers = black_box(rig.remote_round(black_box(&requests), &[]));
        assert!(answers.len() as u64 > 20 * depth, "all checks were answered");
    }
    (rig, requests)
}

#[library_benchmark]
#[bench::one_rule_depth_16(args = (ONE_RULE, 16, 1), setup = warm_remote)]
#[bench::one_rule_depth_100(args = (ONE_RULE, 100, 1), setup = warm_remote)]
#[bench::three_rules_of_one_identity_depth_100(args = (THREE_OF_ONE, 100, 3), setup = warm_remote)]
fn redis_backed((mut rig, requests, replies): (Rig, Vec<u8>, Vec<u8>)) -> (Rig, Vec<u8>, Vec<u8>) {
    let depth = (requests.len() / sluice_bench::request(0).len()) as u64;
    for _ in 0..CHECKS / depth {
        let answers = black_box(rig.remote_round(black_box(&requests), black_box(&replies)));
        assert!(answers.len() as u64 > 20 * depth, "all checks were answered");
    }
    (rig, requests, replies)
}

/// The same where tokens were taken in advance, and enough of them.
fn warm_leased(depth: u64) -> (Rig, Vec<u8>) {
    let mut rig = Rig::with_redis(LEASED_RULE);
    let requests = pipeline(depth);
    rig.remote_round(&requests, format!("*4\r\n{LEASED}").repeat(depth as usize).as_bytes());
    (rig, requests)
}

#[library_benchmark]
#[bench::one_rule_depth_16(args = (16), setup = warm_leased)]
#[bench::one_rule_depth_100(args = (100), setup = warm_leased)]
fn leased((mut rig, requests): (Rig, Vec<u8>)) -> (Rig, Vec<u8>) {
    let depth = (requests.len() / sluice_bench::request(0).len()) as u64;
    for _ in 0..CHECKS / depth {
        let answers = black_box(rig.remote_round(black_box(&requests), &[]));
        assert!(answers.len() as u64 > 20 * depth, "all checks were answered");
    }
    (rig, requests)
}

library_benchmark_group!(name = hot_path; benchmarks = checks, redis_backed, rejected, leased);
main!(library_benchmark_groups = hot_path);
