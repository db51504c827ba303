//! What a hot key's tokens and calls do when several share them: gateways, shards, and the keys beside it.

use policy_sync::model::Limit;
use sluice::decision::By;

use super::{Lab, Row};
use crate::{
    ledger::{Exactness, OnFailure, RuleFacts},
    world::{Quirk, Stream},
};

/// A bucket that does not refill while anybody looks.
const fn filled_once(capacity: u64) -> Limit {
    Limit { capacity, refill: 1, period_ms: 3_600_000 }
}

/// Ten gateways each lease 100 from a bucket of 100.
pub(super) fn leases_of_100(seed: u64) -> Vec<Row> {
    let world = Lab::new(seed, filled_once(100), "lease = 100", (10, 2, 1)).asked(1_000.0, 10.0).run();
    let told = &world.told()[0];
    vec![Row::new(
        "10 gateways",
        &[("checks", told.checks as f64), ("admitted in all", told.allowed as f64), ("of a bucket of", 100.0)],
    )]
}

/// Leases of 50: what they spare, and what they strand.
pub(super) fn leases_of_50(seed: u64) -> Vec<Row> {
    let limit = Limit { capacity: 3_000, refill: 3_000, period_ms: 1_000 };
    let run = |gateways: usize| {
        let below = Lab::new(seed, limit, "lease = 50", (gateways, 2, 1)).asked(2_000.0, 20.0).run();
        let spared = below.told()[0].checks as f64 / below.calls()[0] as f64;
        let mut above = Lab::new(seed, limit, "lease = 50", (gateways, 2, 1)).asked(6_000.0, 20.0);
        above.settings.watch_leases = true;
        let above = above.run();
        let stranded = above.stranded();
        let mut once = Lab::new(seed, filled_once(3_000), "lease = 50", (gateways, 2, 1)).asked(6_000.0, 2.0);
        once.settings.watch_leases = true;
        let once = once.run();
        Row::new(
            format!("{gateways} gateways"),
            &[
                ("checks for each call, below the limit", spared),
                ("admitted at twice the limit, %", 100.0 * above.told()[0].allowed as f64 / 63_000.0),
                ("denies then while tokens are leased, %", percent(stranded.with_tokens_held, stranded.denies)),
                ("tokens leased at a deny", stranded.tokens as f64 / stranded.denies as f64),
                (
                    "of 3,000 that do not refill: before the first deny",
                    once.told()[0].allowed_at_first_deny.unwrap_or(3_000) as f64,
                ),
                ("in all", once.told()[0].allowed as f64),
            ],
        )
    };
    [1, 3, 10, 30].map(run).into()
}

/// A key that is split in ten, over ten shards.
pub(super) fn split(seed: u64) -> Vec<Row> {
    let mut lines = Vec::new();
    for capacity in [100, 1_000, 10_000] {
        let runs = 20;
        let (mut before, mut shares) = (0, vec![0; 10]);
        for run in 0..runs {
            let lab = Lab::new(seed * 1_000 + run, filled_once(capacity), "split = 10", (3, 2, 10));
            let world = lab.asked(capacity as f64 * 2.0, 1.0).run();
            before += world.told()[0].allowed_at_first_deny.unwrap_or(capacity);
            let mut calls = world.calls()[..10].to_vec();
            calls.sort_unstable();
            shares.iter_mut().zip(calls).for_each(|(share, calls)| *share += calls);
        }
        let all: u64 = shares.iter().sum();
        lines.push(Row::new(
            format!("a limit of {capacity}"),
            &[
                ("of it before the first deny, %", percent(before, capacity * runs)),
                ("shards that share the calls", shares.iter().filter(|calls| **calls > 0).count() as f64),
                ("calls of the busiest, %", percent(shares[9], all)),
            ],
        ));
    }
    lines
}

/// How long 10,000 cold keys wait next to a hot one, on its shard.
pub(super) fn cold_keys(seed: u64) -> Vec<Row> {
    let far = Limit { capacity: 10_000_000, refill: 10_000_000, period_ms: 1_000 };
    let over = Limit { capacity: 100, refill: 100, period_ms: 1_000 };
    let run = |name: &str, limit: Limit, hot: &str, per_second: f64, quirk: Option<Quirk>| {
        let mut lab = Lab::new(seed, limit, hot, (30, 4, 4));
        lab.settings.policy += "[[rule]]\nname = \"cold\"\nper = [\"ip\"]\n\
                                limit = { capacity = 1000, refill = 1000, period = \"1s\" }\nhot = { lease = \"off\" }\n";
        lab.settings.rules.push(RuleFacts {
            name: "cold".into(),
            attribute: "ip",
            limit: Limit { capacity: 1_000, refill: 1_000, period_ms: 1_000 },
            on_failure: OnFailure::Local(Limit { capacity: 500, refill: 500, period_ms: 1_000 }),
            is_split: false,
            exactness: Exactness::NeverOver,
        });
        lab.settings.quirk = quirk;
        let mut lab = lab.asked(per_second.max(1.0), 2.0);
        let mut cold = Stream { identities: 10_000, only_on: Some(0), ..Stream::of_one("ip", 10_000.0) };
        // When leases that begin by themselves have begun.
        (cold.from_us, cold.until_us) = (lab.settings.streams[0].from_us + 1_000_000, lab.settings.run_us);
        // The hot key's shard.
        let world = crate::world::World::new(lab.settings.clone());
        cold.only_on = Some(world.shard_of((0, 0)));
        lab.settings.streams.push(cold);
        let world = lab.run();
        let (hot, cold) = (&world.told()[0], &world.told()[1].latency_us);
        let quantile = |share| cold.value_at_quantile(share) as f64;
        let calls: u64 = world.calls().iter().sum::<u64>() - world.told()[1].checks.min(world.calls().iter().sum());
        Row::new(
            name,
            &[
                ("cold keys' p50, µs", quantile(0.5)),
                ("p99, µs", quantile(0.99)),
                ("hot checks", hot.checks as f64),
                ("calls for it", calls as f64),
                ("of these without the store, %", percent(world.decided(0, By::Local), hot.checks)),
            ],
        )
    };
    vec![
        run("no hot key", far, "lease = \"off\"", 0.0, None),
        run("coalescing alone", far, "lease = \"off\"", 300_000.0, None),
        run("lease = \"auto\"", far, "lease = \"auto\"", 300_000.0, None),
        run("lease = 1000", far, "lease = 1000", 300_000.0, None),
        run("split = 4", far, "split = 4", 300_000.0, None),
        run("sample = 10", far, "sample = 10", 300_000.0, None),
        run("3,000 times its limit, rejection cache off", over, "lease = \"off\"", 300_000.0, Some(Quirk::SaysNoWaits)),
        run("3,000 times its limit, rejection cache on", over, "lease = \"off\"", 300_000.0, None),
    ]
}

fn percent(part: u64, whole: u64) -> f64 {
    100.0 * part as f64 / whole.max(1) as f64
}
