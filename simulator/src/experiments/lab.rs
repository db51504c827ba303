//! A world with one rule and one hot key, for experiments to change.

use policy_sync::model::Limit;
use sluice::{config::Redis, hot::HotSettings};

use crate::{
    gateway::GatewaySettings,
    ledger::{Exactness, OnFailure, RuleFacts},
    world::{Stream, World, WorldSettings},
};

/// What an experiment begins with.
pub(super) struct Lab {
    pub(super) settings: WorldSettings,
}

impl Lab {
    /// One rule `hot` for the attribute `key`, with this limit and this `hot = { … }`; so many gateways with so many cores
    /// each; shards that serve 100,000 calls a second each, a round trip of 0.5 ms away.
    pub(super) fn new(seed: u64, limit: Limit, hot: &str, (gateways, cores, shards): (usize, usize, usize)) -> Self {
        let Limit { capacity, refill, period_ms } = limit;
        let policy = format!(
            "[[rule]]\nname = \"hot\"\nper = [\"key\"]\n\
             limit = {{ capacity = {capacity}, refill = {refill}, period = \"{period_ms}ms\" }}\nhot = {{ {hot} }}\n"
        );
        let exactness = if hot.contains("sample") { Exactness::Roughly } else { Exactness::NeverOver };
        let rule = RuleFacts {
            name: "hot".into(),
            attribute: "key",
            limit,
            on_failure: OnFailure::Local(limit),
            is_split: hot.contains("split"),
            exactness,
        };
        let redis = Redis { waiting_max: 4_096, shards_max: 64, ..Redis::default() };
        let hot = HotSettings { rejections: 4_096, leases: 64, ..HotSettings::default() };
        Self {
            settings: WorldSettings {
                seed,
                gateways,
                gateway: GatewaySettings { cores, conns: 4, redis, hot, buckets: 1 << 15 },
                shards,
                reloaded: policy.clone(),
                policy,
                rules: vec![rule],
                streams: Vec::new(),
                one_way_us: (230, 270),
                service_us: 10,
                work_us: 1,
                faults: Vec::new(),
                run_us: 10_000_000,
                echo_one_in: 0,
                watch_leases: false,
                quirk: None,
            },
        }
    }

    /// So many checks a second of the hot key, from the moment on at which all gateways have found their shards.
    pub(super) fn asked(mut self, per_second: f64, secs: f64) -> Self {
        const READY_US: u64 = 100_000;
        let until_us = READY_US + (secs * 1e6) as u64;
        self.settings.run_us = until_us;
        self.settings.streams.push(Stream { from_us: READY_US, until_us, ..Stream::of_one("key", per_second) });
        self
    }

    /// The world after its end.
    ///
    /// # Panics
    ///
    /// When something does not hold: then its figures mean nothing.
    pub(super) fn run(self) -> World {
        let mut world = World::new(self.settings);
        if let Err(violation) = world.run() {
            panic!("the experiment broke a rule of its world: {violation}");
        }
        world
    }
}
