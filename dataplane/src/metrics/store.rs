//! `/metrics`, the part about the store of the counts; only there where one is configured.

use std::fmt;

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::MetricType,
    registry::Unit,
};

use super::{
    counters::{CoreCounters, RuleCounts},
    exposition::{UNLABELLED, counters, gauges, one},
};
use crate::{
    control::RuleCounters,
    decision::{By, Why},
    server::Process,
    store::{
        breaker::State,
        setup::StorePlan,
        shards::{LATENCY_US_MAX, LinkEvent, ShardId},
    },
};

/// What is shown, read once.
#[derive(Debug)]
pub(super) struct StoreSnapshot {
    /// Rule name and counts.
    rules: Vec<(String, RuleCounts)>,
    shards: Vec<ShardSnapshot>,
    /// By core: checks that wait, calls in flight.
    waiting: Vec<(u64, u64)>,
    /// By event of the connections to the shards.
    events: Vec<(&'static str, u64)>,
    throttle_fallbacks: u64,
    shadow_unknown: u64,
    /// Leases that are open, and the tokens that they hold.
    leased: (usize, u64),
}

#[derive(Debug)]
struct ShardSnapshot {
    name: String,
    state: State,
    /// By state that was entered.
    transitions: [u64; STATES.len()],
    /// Calls that failed, by why.
    failed: [(&'static str, u64); 3],
    latencies: [u64; LATENCY_US_MAX.len() + 1],
    latency_us_sum: u64,
}

const STATES: [State; 3] = [State::Closed, State::Open, State::HalfOpen];

impl StoreSnapshot {
    pub(super) fn of(process: &Process, plan: &StorePlan) -> Self {
        let cores = &process.counters;
        let sum = |read: fn(&CoreCounters) -> u64| cores.iter().map(|core| read(core)).sum();
        let names = process.reloads.names.load();
        let counts = |rule: &RuleCounters| (rule.name.to_string(), RuleCounts::of(cores, rule.slot).since(&rule.base));
        let known = plan.shards.known();
        let links = (0..cores.len()).map(|core| plan.shards.links(core));
        Self {
            rules: names.iter().map(counts).collect(),
            shards: known.iter().map(|(shard, name)| ShardSnapshot::of(plan, *shard, name)).collect(),
            waiting: links.clone().map(|links| (links.waiting.value(), links.in_flight.value())).collect(),
            events: LinkEvent::ALL
                .map(|event| (event.word(), links.clone().map(|links| links.event(event).value()).sum()))
                .into(),
            throttle_fallbacks: sum(|core| core.throttle_fallbacks.value()),
            shadow_unknown: sum(|core| core.shadow_unknown.value()),
            leased: plan.shards.hot().leases.held(),
        }
    }
}

impl ShardSnapshot {
    fn of(plan: &StorePlan, shard: ShardId, name: &str) -> Self {
        let (shards, breaker) = (&plan.shards, plan.shards.breaker(shard));
        let mut latencies = [0; LATENCY_US_MAX.len() + 1];
        for core in 0..shards.cores() {
            let counts = shards.counters(shard, core).latencies();
            latencies.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
        }
        Self {
            name: name.to_owned(),
            state: breaker.state(),
            transitions: STATES.map(|state| breaker.transitions(state)),
            failed: [
                ("timeout", shards.sum(shard, |core| core.timeouts.value())),
                ("down", shards.sum(shard, |core| core.down.value())),
                ("error", shards.sum(shard, |core| core.errors.value())),
            ],
            latencies,
            latency_us_sum: shards.sum(shard, |core| core.latency_us_sum.value()),
        }
    }
}

impl Collector for StoreSnapshot {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let out = &mut encoder;
        let rules = || self.rules.iter();
        let by = rules().flat_map(|(name, counts)| {
            By::ALL.map(|by| ([("rule", name.clone()), ("by", by.word().to_owned())], counts.by(by)))
        });
        counters(out, ("rule_decisions", "Who answered for a rule whose counts are in Redis", None), by)?;
        let why = rules().flat_map(|(name, counts)| {
            Why::ALL.map(|why| ([("rule", name.clone()), ("why", why.word().to_owned())], counts.why(why)))
        });
        let help = "Times that Redis did not answer for a rule and its on_failure did, by why";
        counters(out, ("rule_fallbacks", help, None), why)?;
        let help = "CL.THROTTLE and THROTTLE calls that redis.throttle_on_failure answered";
        counters(out, ("throttle_fallbacks", help, None), [(UNLABELLED, self.throttle_fallbacks)])?;
        let help = "Checks of which a shadow rule never learned what it would have said";
        counters(out, ("shadow_unknown", help, None), [(UNLABELLED, self.shadow_unknown)])?;
        let (leases, tokens) = (self.leased.0 as f64, self.leased.1 as f64);
        let help = "Leases that this gateway has (at most hot.leases)";
        gauges(out, ("leases", help, None), [(UNLABELLED, leases)])?;
        let help = "Tokens that this gateway has taken in advance and not spent; the other gateways do not find them";
        gauges(out, ("lease_tokens", help, None), [(UNLABELLED, tokens)])?;
        self.shards(out)?;
        let cores = || self.waiting.iter().enumerate();
        let waiting = cores().map(|(core, (waiting, _))| ([("core", core.to_string())], *waiting as f64));
        gauges(out, ("redis_waiting", "Checks that wait for Redis (at most redis.waiting_max)", None), waiting)?;
        let flying = cores().map(|(core, (_, flying))| ([("core", core.to_string())], *flying as f64));
        gauges(out, ("redis_in_flight", "Calls on their way to Redis and back", None), flying)?;
        let events = self.events.iter().map(|&(event, count)| one("event", event, count));
        counters(out, ("redis_events", "What happened on the way to Redis, by event", None), events)
    }
}

impl StoreSnapshot {
    fn shards(&self, out: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let states = self.shards.iter().flat_map(|shard| {
            STATES.map(|state| {
                let is_so = if shard.state == state { 1.0 } else { 0.0 };
                ([("shard", shard.name.clone()), ("state", state.word().to_owned())], is_so)
            })
        });
        gauges(out, ("redis_breaker", "Whether a shard's breaker is in a state (1) or not (0)", None), states)?;
        let transitions = self.shards.iter().flat_map(|shard| {
            let labels = |state: State| [("shard", shard.name.clone()), ("to", state.word().to_owned())];
            STATES.into_iter().zip(shard.transitions).map(move |(state, count)| (labels(state), count))
        });
        let help = "How often a shard's breaker entered a state";
        counters(out, ("redis_breaker_transitions", help, None), transitions)?;
        let failed = self.shards.iter().flat_map(|shard| {
            let labels = |why: &str| [("shard", shard.name.clone()), ("why", why.to_owned())];
            shard.failed.map(|(why, count)| (labels(why), count))
        });
        counters(out, ("redis_calls_failed", "Calls to a shard that brought nothing, by why", None), failed)?;
        let help = "Round trips to a shard";
        let mut metric =
            out.encode_descriptor("redis_round_trip", help, Some(&Unit::Seconds), MetricType::Histogram)?;
        for shard in &self.shards {
            let histogram = RoundTrips(shard);
            histogram.encode(metric.encode_family(&[("shard", shard.name.as_str())])?)?;
        }
        Ok(())
    }
}

/// A shard's latencies as a histogram.
struct RoundTrips<'a>(&'a ShardSnapshot);

impl EncodeMetric for RoundTrips<'_> {
    fn encode(&self, mut encoder: prometheus_client::encoding::MetricEncoder<'_>) -> fmt::Result {
        let seconds = |us: u64| us as f64 / 1e6;
        let ends = LATENCY_US_MAX.iter().map(|&us| seconds(us)).chain([f64::MAX]);
        let buckets: Vec<(f64, u64)> = ends.zip(self.0.latencies).collect();
        let count = self.0.latencies.iter().sum();
        encoder.encode_histogram::<[(&str, &str); 0]>(seconds(self.0.latency_us_sum), count, &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}
