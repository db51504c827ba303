//! One key, asked for far more than its limit or its shard would bear.

use policy_sync::model::Limit;

use super::{Lab, Row};
use crate::world::Quirk;

/// A key at 10 and at 50 times its limit, where the rejection cache is all there is.
pub(super) fn over_its_limit(seed: u64) -> Vec<Row> {
    let (limit, secs) = (Limit { capacity: 100, refill: 100, period_ms: 1_000 }, 30.0);
    let run = |times: u32, quirk: Option<Quirk>| {
        let mut lab = Lab::new(seed, limit, "lease = \"off\"", (1, 4, 1)).asked(f64::from(100 * times), secs);
        lab.settings.quirk = quirk;
        let world = lab.run();
        let (told, calls) = (&world.told()[0], world.calls()[0]);
        let name = format!("{times} times its limit, rejection cache {}", if quirk.is_some() { "off" } else { "on" });
        Row::new(
            name,
            &[
                ("checks", told.checks as f64),
                ("admitted", told.allowed as f64),
                ("limit", 100.0 + 100.0 * secs),
                ("calls", calls as f64),
                ("checks for each call", told.checks as f64 / calls as f64),
            ],
        )
    };
    [(10, None), (10, Some(Quirk::SaysNoWaits)), (50, None), (50, Some(Quirk::SaysNoWaits))]
        .map(|(times, quirk)| run(times, quirk))
        .into()
}

/// One check in ten is asked for all of them, at ten times the limit.
pub(super) fn sample(seed: u64) -> Vec<Row> {
    let (limit, secs) = (Limit { capacity: 1_000, refill: 1_000, period_ms: 1_000 }, 20.0);
    let run = |quirk: Option<Quirk>| {
        let mut lab = Lab::new(seed, limit, "sample = 10", (1, 4, 1)).asked(10_000.0, secs);
        lab.settings.quirk = quirk;
        let world = lab.run();
        let (told, calls) = (&world.told()[0], world.calls()[0]);
        let name = if quirk.is_some() { "without its local block" } else { "with its local block" };
        Row::new(
            name,
            &[
                ("admitted, times the limit", told.allowed as f64 / (1_000.0 + 1_000.0 * secs)),
                ("checks for each call", told.checks as f64 / calls as f64),
            ],
        )
    };
    vec![run(None), run(Some(Quirk::SaysNoWaits))]
}

/// Sixteen cores ask for one key that no way of meeting hot keys but coalescing helps.
pub(super) fn coalescing(seed: u64) -> Vec<Row> {
    let run = |name: &str, capacity: u64, per_second: f64| {
        // A tiny refill, so that what is admitted is counted to the token.
        let limit = Limit { capacity, refill: 1, period_ms: 3_600_000 };
        let mut lab = Lab::new(seed, limit, "lease = \"off\"", (1, 16, 1)).asked(per_second, 1.0);
        lab.settings.service_us = 5;
        let world = lab.run();
        let (told, calls) = (&world.told()[0], world.calls()[0]);
        Row::new(
            name,
            &[
                ("checks a second", told.checks as f64),
                ("calls a second", calls as f64),
                ("admitted", told.allowed as f64),
                ("of a bucket of", capacity as f64),
            ],
        )
    };
    [50_000.0, 200_000.0, 500_000.0]
        .into_iter()
        .map(|per_second| run("never empty", 10_000_000, per_second))
        .chain([run("empty after a while", 50_000, 200_000.0)])
        .collect()
}
