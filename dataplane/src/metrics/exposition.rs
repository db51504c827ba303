//! `/metrics`: the counters of all cores, added up where they are scraped, as OpenMetrics.
//!
//! Every name is here and nowhere else. Labels are cores, rule names and fixed words: nothing that a client chooses.

use std::{fmt, sync::atomic::Ordering::Relaxed};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::{counter::ConstCounter, gauge::ConstGauge},
    registry::Registry,
};

use super::counters::CoreCounters;
use crate::{decision::Reason, server::Process};

/// The text of `/metrics`.
///
/// # Errors
///
/// When the encoder fails, which it does only for lack of memory.
pub fn encode(process: &Process) -> Result<String, fmt::Error> {
    let mut text = String::new();
    let mut registry = Registry::with_prefix("sluice");
    registry.register_collector(Box::new(Scrape(Snapshot::of(process))));
    prometheus_client::encoding::text::encode(&mut text, &registry)?;
    Ok(text)
}

/// A counter that each core keeps: name, help, value.
type PerCore = (&'static str, &'static str, fn(&CoreCounters) -> u64);

const PER_CORE: &[PerCore] = &[
    ("checks", "Checks decided, whatever the verdict", |core| core.checks.value()),
    ("checks_denied", "Checks that were denied", |core| core.denied.value()),
    ("checks_unruled", "Checks to which no rule applied; they are allowed", |core| core.unruled.value()),
    ("throttles_allowed", "CL.THROTTLE and THROTTLE calls that were allowed", |core| core.throttles_allowed.value()),
    ("throttles_denied", "CL.THROTTLE and THROTTLE calls that were denied", |core| core.throttles_denied.value()),
    ("command_errors", "Requests answered with an error", |core| core.command_errors.value()),
    ("protocol_errors", "Connections closed because their bytes were not RESP or beyond a limit", |core| {
        core.protocol_errors.value()
    }),
    ("connections_opened", "Connections opened", |core| core.connections_opened.value()),
    ("connections_closed", "Connections closed", |core| core.connections_closed.value()),
    ("connections_refused", "Connections refused at limits.connections_max", |core| core.connections_refused.value()),
    ("connections_idle", "Connections closed at limits.idle_timeout_ms", |core| core.connections_idle.value()),
    ("connections_stalled", "Connections closed at limits.stall_timeout_ms: the client did not read", |core| {
        core.connections_stalled.value()
    }),
    ("output_backlogs", "Times that a connection's requests had to wait until its client read", |core| {
        core.output_backlogs.value()
    }),
];

/// What is shown, read once.
#[derive(Debug)]
struct Snapshot {
    /// By entry of [`PER_CORE`], by core.
    per_core: Vec<Vec<u64>>,
    connections: Vec<usize>,
    /// Rule name and counts by reason.
    rules: Vec<(String, [u64; Reason::COUNT])>,
    inserted: u64,
    evicted_full: u64,
    evicted_in_use: u64,
    buckets_capacity: usize,
    policy_version: u64,
    reloads_applied: u64,
    reloads_refused: u64,
    uptime_seconds: f64,
}

impl Snapshot {
    fn of(process: &Process) -> Self {
        let cores = &process.counters;
        let sum = |read: fn(&CoreCounters) -> u64| cores.iter().map(|core| read(core)).sum();
        let rules = process.reloads.names.load();
        Self {
            per_core: PER_CORE.iter().map(|(_, _, read)| cores.iter().map(|core| read(core)).collect()).collect(),
            connections: (0..cores.len()).map(|core| process.placement.connections(core)).collect(),
            rules: rules
                .iter()
                .map(|rule| {
                    let count = |reason: Reason| -> u64 {
                        let total: u64 = cores.iter().map(|core| core.rule(rule.slot, reason).value()).sum();
                        total.saturating_sub(rule.base[reason as usize])
                    };
                    (rule.name.to_string(), Reason::ALL.map(count))
                })
                .collect(),
            inserted: sum(|core| core.buckets_inserted.value()),
            evicted_full: sum(|core| core.buckets_evicted_full.value()),
            evicted_in_use: sum(|core| core.buckets_evicted_in_use.value()),
            buckets_capacity: process.table.capacity(),
            policy_version: process.policy.load().policy.version,
            reloads_applied: process.reloads.applied.load(Relaxed),
            reloads_refused: process.reloads.refused.load(Relaxed),
            uptime_seconds: process.clock.now().mono_ms as f64 / 1000.0,
        }
    }
}

#[derive(Debug)]
struct Scrape(Snapshot);

/// The word that a reason has in a label.
fn word(reason: Reason) -> &'static str {
    match reason {
        Reason::Allowed => "allowed",
        Reason::Denied => "denied",
        Reason::ShadowAllowed => "shadow_allowed",
        Reason::ShadowDenied => "shadow_denied",
        Reason::Exempt => "exempt",
    }
}

impl Collector for Scrape {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let seen = &self.0;
        let out = &mut encoder;
        for ((name, help, _), values) in PER_CORE.iter().zip(&seen.per_core) {
            let values = values.iter().enumerate().map(|(core, &value)| ([("core", core.to_string())], value));
            counters(out, name, help, values)?;
        }
        let connections = seen.connections.iter().enumerate();
        let help = "Connections open";
        gauges(out, "connections", help, connections.map(|(core, &open)| ([("core", core.to_string())], open as f64)))?;
        let by_reason = seen.rules.iter().flat_map(|(name, counts)| {
            let labels = move |reason| [("rule", name.clone()), ("reason", word(reason).to_owned())];
            Reason::ALL.into_iter().zip(counts).map(move |(reason, &count)| (labels(reason), count))
        });
        counters(out, "rule_checks", "What each rule said of the checks it applied to", by_reason)?;
        let none: [(&str, String); 0] = [];
        counters(out, "buckets_inserted", "Identities put into the bucket table", [(none.clone(), seen.inserted)])?;
        let help = "Buckets dropped for others: full ones lost nothing, in_use ones start full again (table too small)";
        let states = [("full", seen.evicted_full), ("in_use", seen.evicted_in_use)];
        counters(out, "buckets_evicted", help, states.map(|(state, count)| ([("state", state.to_owned())], count)))?;
        for (name, help, value) in [
            ("buckets_capacity", "Identities that fit the bucket table", seen.buckets_capacity as f64),
            ("policy_version", "Version of the policy in force", seen.policy_version as f64),
            ("uptime_seconds", "Seconds since the process began", seen.uptime_seconds),
        ] {
            gauges(out, name, help, [(none.clone(), value)])?;
        }
        let help = "Policies read again after the first, by what became of them";
        let outcomes = [("applied", seen.reloads_applied), ("refused", seen.reloads_refused)];
        counters(
            out,
            "policy_reloads",
            help,
            outcomes.map(|(outcome, count)| ([("outcome", outcome.to_owned())], count)),
        )?;
        gauges(
            out,
            "build_info",
            "The version, as a label",
            [([("version", env!("CARGO_PKG_VERSION").to_owned())], 1.0)],
        )
    }
}

fn counters<const N: usize>(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    values: impl IntoIterator<Item = ([(&'static str, String); N], u64)>,
) -> fmt::Result {
    let kind = ConstCounter::new(0u64).metric_type();
    let mut metric = encoder.encode_descriptor(name, help, None, kind)?;
    for (labels, value) in values {
        ConstCounter::new(value).encode(metric.encode_family(&labels)?)?;
    }
    Ok(())
}

fn gauges<const N: usize>(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    values: impl IntoIterator<Item = ([(&'static str, String); N], f64)>,
) -> fmt::Result {
    let kind = ConstGauge::new(0f64).metric_type();
    let mut metric = encoder.encode_descriptor(name, help, None, kind)?;
    for (labels, value) in values {
        ConstGauge::new(value).encode(metric.encode_family(&labels)?)?;
    }
    Ok(())
}
