//! A random world from a seed: rules of every kind, traffic of every kind, and faults.

use policy_sync::model::Limit;
use sluice::{config::Redis, hot::HotSettings, store::breaker::BreakerSettings};

use crate::{
    gateway::GatewaySettings,
    ledger::{Exactness, OnFailure, RuleFacts},
    random::Random,
    world::{Arrivals, Fault, Stream, WorldSettings},
};

/// Whether anything goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weather {
    /// Nothing: what is exact must be exact.
    Fair,
    /// Shards are slow, freeze, die, fail over and lose writes; clocks are set; gateways crash.
    Stormy,
}

/// A rule as the policy's text, and what the ledger must know of it.
fn rule(name: &str, attribute: &'static str, random: &mut Random, weather: Weather) -> (String, RuleFacts) {
    let capacity = random.one_of(&[1, 3, 10, 50, 100]);
    let refill = random.one_of(&[1, 5, 20, 100, 400]);
    let period_ms = random.one_of(&[100, 1_000, 1_000, 7_000]);
    let limit = Limit { capacity, refill, period_ms };
    let (hot, exactness) = match random.below(10) {
        0..4 => ("lease = \"off\"".to_owned(), Exactness::Exact),
        4..6 => ("lease = \"auto\"".to_owned(), Exactness::NeverOver),
        6..9 => (format!("lease = {}", random.within(1, capacity)), Exactness::NeverOver),
        _ if capacity >= 10 && refill >= 5 => ("split = 5".to_owned(), Exactness::NeverOver),
        _ => ("lease = \"off\"".to_owned(), Exactness::Exact),
    };
    let (failing, on_failure) = match random.below(4) {
        0 => ("on_failure = \"closed\"".to_owned(), OnFailure::Closed),
        1 => ("on_failure = \"open\"".to_owned(), OnFailure::Open),
        _ => {
            let (capacity, refill) = (random.within(1, capacity), random.within(1, refill));
            let words = format!("local = {{ capacity = {capacity}, refill = {refill}, period = \"{period_ms}ms\" }}");
            (words, OnFailure::Local(Limit { capacity, refill, period_ms }))
        }
    };
    let text = format!(
        "[[rule]]\nname = \"{name}\"\nper = [\"{attribute}\"]\n\
         limit = {{ capacity = {capacity}, refill = {refill}, period = \"{period_ms}ms\" }}\n{failing}\nhot = {{ {hot} }}\n"
    );
    // A policy that says the same with other words may come at any time; what is exact then stays so.
    let exactness =
        if weather == Weather::Stormy && exactness == Exactness::Exact { Exactness::NeverOver } else { exactness };
    (
        text,
        RuleFacts {
            name: name.to_owned(),
            attribute,
            limit,
            on_failure,
            is_split: hot.starts_with("split"),
            exactness,
        },
    )
}

fn stream(attributes: Vec<&'static str>, random: &mut Random) -> Stream {
    let arrivals = if random.happens(0.8) {
        Arrivals::Poisson(f64::from(random.one_of(&[50, 200, 1_000])))
    } else {
        Arrivals::Bursts(random.one_of(&[5, 40]), random.one_of(&[50_000, 300_000]))
    };
    let cost = if random.happens(0.7) { (1, 1) } else { (0, 1 + random.below(5)) };
    let from_us = random.one_of(&[0, 0, 300_000]);
    Stream {
        arrivals,
        attributes,
        identities: random.one_of(&[1, 2, 10]),
        only_on: None,
        cost,
        from_us,
        until_us: from_us + random.within(300_000, 2_000_000),
    }
}

fn fault(shards: usize, gateways: usize, random: &mut Random) -> Fault {
    let shard = random.index(shards);
    let for_us = random.within(1_000, 400_000);
    match random.below(11) {
        0 => Fault::Freeze { shard, for_us },
        1 => Fault::Slow { shard, extra_us: random.within(500, 20_000), for_us },
        2 => Fault::Mute { shard },
        3 | 4 => Fault::Kill { shard, for_us, keeps: random.happens(0.5) },
        5 | 6 => Fault::Failover {
            shard,
            lag_us: random.within(0, 200_000),
            after_us: for_us,
            ahead_ms: i64::from(random.below(4_000)) - 2_000,
        },
        7 => Fault::ClockStep { shard, ms: i64::from(random.below(4_000)) - 2_000 },
        8 => Fault::Restart { gateway: random.index(gateways), in_order: true, after_us: for_us },
        9 => Fault::Restart { gateway: random.index(gateways), in_order: false, after_us: for_us },
        _ => Fault::Reload,
    }
}

/// The world of a seed.
pub fn of_seed(seed: u64, weather: Weather) -> WorldSettings {
    let mut random = Random::new(seed);
    let random = &mut random;
    let (gateways, cores, shards) = (1 + random.index(3), 1 + random.index(3), 1 + random.index(3));
    let names = [("key-a", "key"), ("key-b", "key"), ("ip", "ip"), ("user", "user")];
    let count = 1 + random.index(names.len());
    let (texts, rules): (Vec<_>, Vec<_>) =
        names[..count].iter().map(|(name, attribute)| rule(name, attribute, random, weather)).unzip();
    let watched = "[[rule]]\nname = \"watched\"\nper = [\"key\"]\nmode = \"shadow\"\n\
                   limit = { capacity = 5, refill = 5, period = \"1s\" }\n";
    let policy = texts.concat() + if random.happens(0.3) { watched } else { "" };
    let mut attributes: Vec<&'static str> = rules.iter().map(|rule| rule.attribute).collect();
    attributes.dedup();
    let streams = (0..1 + random.index(3)).map(|at| {
        let only = if at == 0 || random.happens(0.3) { attributes.clone() } else { vec![random.one_of(&attributes)] };
        stream(only, random)
    });
    let streams = streams.collect();
    let redis = Redis {
        deadline_ms: random.one_of(&[2, 5, 5, 20]),
        waiting_max: random.one_of(&[4, 64, 256]),
        shards_max: 16,
        breaker: BreakerSettings { window_ms: 500, calls_min: 5, open_ms: 150, ..BreakerSettings::default() },
        ..Redis::default()
    };
    let hot = HotSettings {
        rejections: random.one_of(&[3, 64]),
        leases: random.one_of(&[2, 16]),
        lease_share: random.one_of(&[0.1, 1.0]),
        lease_auto_above: random.one_of(&[20, 200]),
        lease_quiet_ms: random.one_of(&[50, 400]),
        heat_keys: 16,
    };
    let faults = match weather {
        Weather::Fair if random.happens(0.3) => vec![(random.within(100_000, 1_500_000), Fault::Reload)],
        Weather::Fair => Vec::new(),
        Weather::Stormy => {
            let faults = 1 + random.index(4);
            (0..faults).map(|_| (random.within(50_000, 1_600_000), fault(shards, gateways, random))).collect()
        }
    };
    let one_way_us = random.one_of(&[(20, 30), (50, 400), (200, 300)]);
    WorldSettings {
        seed,
        gateways,
        gateway: GatewaySettings { cores, conns: 1 + random.index(3), redis, hot, buckets: 1_024 },
        shards,
        // The same rules in other words: their order counts for nothing but numbers, so a comment is all that differs.
        reloaded: policy.clone() + "# Read again.\n",
        policy,
        rules,
        streams,
        one_way_us,
        service_us: random.one_of(&[5, 20]),
        work_us: 2,
        faults,
        run_us: 2_000_000,
        echo_one_in: 20,
        watch_leases: false,
        quirk: None,
    }
}
