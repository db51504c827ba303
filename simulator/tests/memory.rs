//! Memory is fixed from the start, whatever comes: counted by this test's own allocator, of all that lives.
#![allow(missing_docs)]
#![allow(unsafe_code)]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::atomic::{AtomicI64, Ordering::Relaxed},
};

use resp_client::Action;
use sluice::engine::ConnId;
use sluice_simulator::{
    gateway::{Gateway, Input},
    scenario::{Weather, of_seed},
    world::{Arrivals, Fault, Stream, World},
};

struct Counting;

static LIVE_BYTES: AtomicI64 = AtomicI64::new(0);

// SAFETY: every call goes to the system's allocator unchanged; counting touches no memory but the counter's.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE_BYTES.fetch_add(layout.size().cast_signed() as i64, Relaxed);
        // SAFETY: the caller keeps `alloc`'s contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        LIVE_BYTES.fetch_sub(layout.size().cast_signed() as i64, Relaxed);
        // SAFETY: `memory` came from `alloc` above, with this layout.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn live_bytes() -> i64 {
    LIVE_BYTES.load(Relaxed)
}

/// One after the other: there is one allocator.
#[test]
fn memory_is_fixed_from_the_start() {
    identities_without_end_while_no_store_answers();
    a_world_that_goes_on_and_on();
}

/// New identities all the time, none of which the store answers for.
fn identities_without_end_while_no_store_answers() {
    let mut settings = of_seed(3, Weather::Fair).gateway;
    settings.redis.urls = vec!["redis+cluster://redis:7000".into()];
    let policy = "[[rule]]\nname = \"r\"\nper = [\"key\"]\nlimit = { capacity = 3, refill = 3, period = \"1h\" }\n";
    let (mut gateway, mut now_us) = (Gateway::new(&settings, policy, 1, 7, 0), 0);
    let mut ask = |identities: std::ops::Range<u32>| {
        for identity in identities {
            let request = format!("*3\r\n$5\r\nCHECK\r\n$3\r\nkey\r\n$8\r\n{identity:08}\r\n");
            gateway.put(0, Input::Request(ConnId(0), request.into_bytes()));
            now_us += 500;
            let outcome = gateway.wake(0, now_us);
            assert_eq!(outcome.replies.len(), 1, "it is answered at once");
            for action in outcome.actions {
                if let Action::Connect { link, .. } = action {
                    gateway.put(0, Input::Failed(link));
                }
            }
        }
        live_bytes()
    };
    let early = ask(0..20_000);
    let late = ask(20_000..100_000);
    assert!((late - early).abs() < 4_096, "{early} bytes, and after 80,000 further identities {late}");
}

/// The same identities for a long time, with an outage in the middle: gateways, nodes and the world's own accounts.
fn a_world_that_goes_on_and_on() {
    let mut settings = of_seed(3, Weather::Fair);
    let arrivals = Arrivals::Poisson(1_000.0);
    let attribute = settings.rules[0].attribute;
    settings.streams = vec![Stream { identities: 50, arrivals, ..Stream::of_one(attribute, 1_000.0) }];
    settings.faults = vec![(6_000_000, Fault::Kill { shard: 0, for_us: 1_000_000, keeps: true })];
    settings.run_us = 20_000_000;
    let mut world = World::new(settings);
    let mut at = |us| {
        world.run_until(us).unwrap_or_else(|violation| panic!("{violation}"));
        (live_bytes(), world.planned())
    };
    let (early, planned) = at(5_000_000);
    let (late, planned_late) = at(19_000_000);
    // The world remembers each connection that there was, and plans a few events more or less at a time.
    assert!((late - early).abs() < 65_536, "{early} bytes after 5 s and {late} after 19 s");
    assert!(planned_late < 2 * planned + 100, "{planned} events planned after 5 s and {planned_late} after 19 s");
}
