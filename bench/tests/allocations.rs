//! A check allocates nothing once the engine is warm: counted by this test's own allocator.
//!
//! Without the test harness, whose threads allocate when they like.
#![allow(unsafe_code)]
#![allow(clippy::print_stdout, reason = "it reports like a test")]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use sluice_bench::{ONE_RULE, Rig, THREE_OF_ONE, THREE_RULES, all_apply, many_attributes, pipeline, request};

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call goes to the system's allocator unchanged; counting touches no memory but the counter's.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Relaxed);
        // SAFETY: the caller keeps `alloc`'s contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: `memory` came from `alloc` or `realloc` above, with this layout.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Relaxed);
        // SAFETY: `memory` came from `alloc` or `realloc`, with this layout; the caller keeps the rest of the contract.
        unsafe { System.realloc(memory, layout, bytes) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const EVERYTHING: &str = r#"
[[rule]]
name = "prefix"
match = { path = "/v1/*" }
per = ["key"]
limit = { capacity = 5, refill = 1, period = "1h" }
[[rule]]
name = "shadow"
match = { method = "*" }
per = ["key", "path"]
limit = { capacity = 3, refill = 1, period = "1h" }
mode = "shadow"
[[rule]]
name = "partly"
match = { path = "/v1/login" }
per = ["key"]
limit = { capacity = 100, refill = 1, period = "1h" }
rollout_pct = 50
[[override]]
rule = "*"
identity = ["ak_00000003"]
exempt = true
"#;

fn main() {
    let throttles: Vec<u8> = (0..100)
        .flat_map(|at| {
            format!("*5\r\n$11\r\nCL.THROTTLE\r\n$3\r\nk{at:02}\r\n$2\r\n15\r\n$2\r\n30\r\n$2\r\n60\r\n").into_bytes()
        })
        .collect();
    let cut: Vec<u8> = pipeline(100);
    let (ten_names, ten_lower) = many_attributes(10, "check");
    let (forty_names, forty) = many_attributes(40, "CHECK");
    let forty_lower = many_attributes(40, "check").1;
    // Ten and sixty-four rules that apply: more than the stack has room for, and as many as may.
    let [ten_rules, all_rules] = [10, 64].map(all_apply);
    let cases: [(&str, &str, Vec<Vec<u8>>); 11] = [
        ("one rule, depth 1", ONE_RULE, vec![request(7)]),
        ("one rule, depth 100", ONE_RULE, vec![pipeline(100)]),
        ("three rules, depth 100", THREE_RULES, vec![pipeline(100)]),
        ("prefix, shadow, rollout, override, denied", EVERYTHING, vec![pipeline(100)]),
        ("CL.THROTTLE, depth 100", ONE_RULE, vec![throttles]),
        ("requests cut in the middle", ONE_RULE, cut.chunks(997).map(<[u8]>::to_vec).collect()),
        ("ten attributes, in lower case", &ten_names, vec![ten_lower]),
        ("forty attributes", &forty_names, vec![forty.clone()]),
        ("forty attributes, in lower case, cut", &forty_names, forty_lower.chunks(101).map(<[u8]>::to_vec).collect()),
        ("ten rules", &ten_rules, vec![pipeline(100)]),
        ("as many rules as may apply", &all_rules, vec![pipeline(100)]),
    ];
    for (name, policy, rounds) in &cases {
        let mut rig = Rig::new(policy, 1 << 16);
        allocates_nothing(name, 20, || rounds.iter().map(|requests| rig.round(requests).len()).sum());
    }
    let remote = [
        ("Redis-backed, one rule, depth 1", ONE_RULE, request(7)),
        ("Redis-backed, one rule, depth 100", ONE_RULE, pipeline(100)),
        ("Redis-backed, three rules of one identity", THREE_OF_ONE, pipeline(100)),
        ("Redis-backed, three identities, one of them hot", THREE_RULES, pipeline(100)),
        ("Redis-backed: prefix, shadow, rollout, override", EVERYTHING, pipeline(100)),
        ("Redis-backed, forty attributes", &forty_names, forty),
        ("Redis-backed, forty attributes, in lower case", &forty_names, forty_lower),
        ("Redis-backed, ten rules of one identity", &ten_rules, request(7)),
        ("Redis-backed, as many rules as may apply", &all_rules, request(7)),
    ];
    for (name, policy, requests) in &remote {
        let mut rig = Rig::with_redis(policy);
        // Every entry of the store's pools has a buffer of its own, which its first owners make.
        allocates_nothing(name, 50, || rig.remote_round_trip(requests).len());
    }
    let count = cases.len() + remote.len();
    println!("\ntest result: ok. {count} passed; 0 failed; 0 ignored; 0 measured; 0 filtered out");
}

/// `pass` answers with some bytes, and without an allocation once it was done so often.
fn allocates_nothing(name: &str, warm_after: usize, mut pass: impl FnMut() -> usize) {
    for _ in 0..warm_after {
        pass();
    }
    let before = ALLOCATIONS.load(Relaxed);
    let replies: usize = (0..100).map(|_| pass()).sum();
    let allocations = ALLOCATIONS.load(Relaxed) - before;
    assert!(replies > 0, "{name}: nothing was answered");
    assert_eq!(allocations, 0, "{name}: allocations after warm-up");
    println!("test {name} ... ok");
}
