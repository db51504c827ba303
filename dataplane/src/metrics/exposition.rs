//! `/metrics`: the counters of all cores, read where they are scraped, as OpenMetrics.
//!
//! Every name is here and nowhere else. Labels are cores, rule names and fixed words: nothing that a client chooses.

use std::{fmt, sync::atomic::Ordering::Relaxed};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeCounterValue, EncodeMetric, MetricEncoder, text},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
    registry::{Registry, Unit},
};

use super::{
    counters::{CoreCounters, GRPC_CODES, HTTP_STATUSES, RuleCounts},
    policy_store::PolicyStoreSnapshot,
    store::StoreSnapshot,
    system::System,
};
use crate::{decision::Reason, log, server::Process};

/// The text of `/metrics`.
///
/// # Errors
///
/// When the encoder fails, which it does only for lack of memory.
pub fn encode(process: &Process) -> Result<String, fmt::Error> {
    let (mut ours, mut conventional) = (Registry::with_prefix("sluice"), Registry::default());
    ours.register_collector(Box::new(Snapshot::of(process)));
    if let Some(plan) = &process.store {
        ours.register_collector(Box::new(StoreSnapshot::of(process, plan)));
    }
    if let Some(status) = &process.policy_store {
        ours.register_collector(Box::new(PolicyStoreSnapshot::of(process, status)));
    }
    conventional.register_collector(Box::new(Conventional::of(process)));
    let mut out = String::new();
    text::encode_registry(&mut out, &ours)?;
    text::encode_registry(&mut out, &conventional)?;
    text::encode_eof(&mut out)?;
    Ok(out)
}

/// A counter that each core keeps: name, help, value.
type PerCore = (&'static str, &'static str, fn(&CoreCounters) -> u64);

const PER_CORE: &[PerCore] = &[
    ("checks", "Checks decided, whatever the verdict", |core| core.checks.value()),
    ("checks_denied", "Checks that were denied", |core| core.denied.value()),
    ("checks_unavailable", "Checks answered 503: Redis away, and a rule closed on failure", |core| {
        core.unavailable.value()
    }),
    ("checks_unruled", "Checks to which no rule applied; they are allowed", |core| core.unruled.value()),
    ("throttles_allowed", "CL.THROTTLE and THROTTLE calls that were allowed", |core| core.throttles_allowed.value()),
    ("throttles_denied", "CL.THROTTLE and THROTTLE calls that were denied", |core| core.throttles_denied.value()),
    ("command_errors", "Requests answered with an error", |core| core.command_errors.value()),
    ("protocol_errors", "Connections closed because their bytes were not RESP or beyond a limit", |core| {
        core.protocol_errors.value()
    }),
    ("grpc_unknown_domains", "gRPC requests of a domain of which no rule speaks; they are allowed", |core| {
        core.unknown_domains.value()
    }),
    ("connections_opened", "Connections opened", |core| core.connections_opened.value()),
    ("connections_refused", "Connections refused at limits.connections_max", |core| core.connections_refused.value()),
    ("output_backlogs", "Times that a connection's requests had to wait until its client read", |core| {
        core.output_backlogs.value()
    }),
];

/// What is shown under our own prefix, read once.
#[derive(Debug)]
struct Snapshot {
    /// By entry of [`PER_CORE`], by core.
    per_core: Vec<Vec<u64>>,
    /// By core.
    connections: Vec<usize>,
    /// Why connections were closed, and how many, by core.
    closed: Vec<[(&'static str, u64); 3]>,
    /// By [`HTTP_STATUSES`], the last for all others.
    http: Vec<u64>,
    /// By gRPC's codes.
    grpc: Vec<u64>,
    ops_refused: u64,
    log_dropped: u64,
    /// Rule name and counts by reason.
    rules: Vec<(String, [u64; Reason::COUNT])>,
    inserted: u64,
    evicted_full: u64,
    evicted_in_use: u64,
    reloads_applied: u64,
    reloads_refused: u64,
    /// Single values: name, help, unit, value.
    gauges: Vec<(&'static str, &'static str, Option<Unit>, f64)>,
}

impl Snapshot {
    fn of(process: &Process) -> Self {
        let cores = &process.counters;
        let sum = |read: fn(&CoreCounters) -> u64| cores.iter().map(|core| read(core)).sum();
        let loaded = process.policy.load();
        let uptime_seconds = process.clock.now().mono_ms as f64 / 1000.0;
        Self {
            per_core: PER_CORE.iter().map(|(_, _, read)| cores.iter().map(|core| read(core)).collect()).collect(),
            connections: (0..cores.len()).map(|core| process.placement.connections(core)).collect(),
            closed: (0..cores.len()).map(|core| closed(process, core)).collect(),
            http: (0..=HTTP_STATUSES.len())
                .map(|at| {
                    let status = HTTP_STATUSES.get(at).copied().unwrap_or_default();
                    cores.iter().map(|core| core.http(status).value()).sum()
                })
                .collect(),
            grpc: (0..GRPC_CODES).map(|code| cores.iter().map(|core| core.grpc(code).value()).sum()).collect(),
            ops_refused: process.tallies.ops_refused.load(Relaxed),
            log_dropped: log::lines_dropped(),
            rules: rules(process),
            inserted: sum(|core| core.buckets_inserted.value()),
            evicted_full: sum(|core| core.buckets_evicted_full.value()),
            evicted_in_use: sum(|core| core.buckets_evicted_in_use.value()),
            reloads_applied: process.reloads.applied.load(Relaxed),
            reloads_refused: process.reloads.refused.load(Relaxed),
            gauges: vec![
                ("buckets_capacity", "Identities that fit the bucket table", None, process.table.capacity() as f64),
                (
                    "connections_max",
                    "Connections that may be open at once, on all cores together",
                    None,
                    process.settings.limits.connections_max as f64,
                ),
                (
                    "policy_file_refused",
                    "1 while the policy file, as it was last read, is refused",
                    None,
                    f64::from(u8::from(process.reloads.refusal.load().is_some())),
                ),
                ("policy_version", "Version of the policy in force", None, loaded.policy.version as f64),
                ("policy_rules", "Rules of the policy in force", None, loaded.policy.rules.len() as f64),
                ("policy_overrides", "Overrides of the policy in force", None, loaded.policy.overrides.len() as f64),
                ("uptime", "Time since the process began", Some(Unit::Seconds), uptime_seconds),
            ],
        }
    }
}

/// Why a core's connections were closed. The sum of all is read first: what happens meanwhile is then missing from the
/// difference until the next scrape, and never there too much.
fn closed(process: &Process, core: usize) -> [(&'static str, u64); 3] {
    let counters = &process.counters[core];
    let all = counters.connections_closed.value();
    let (idle, stalled) = (counters.connections_idle.value(), counters.connections_stalled.value());
    let otherwise = all.saturating_sub(idle + stalled);
    let before = process.tallies.closed_otherwise[core].fetch_max(otherwise, Relaxed);
    [("other", otherwise.max(before)), ("idle", idle), ("stalled", stalled)]
}

/// What each rule said, over all cores, since its name got its counters.
fn rules(process: &Process) -> Vec<(String, [u64; Reason::COUNT])> {
    let cores = &process.counters;
    let names = process.reloads.names.load();
    let counts = names.iter().map(|rule| {
        let counts = RuleCounts::of(cores, rule.slot).since(&rule.base);
        (rule.name.to_string(), Reason::ALL.map(|reason| counts.reason(reason)))
    });
    counts.collect()
}

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

impl Collector for Snapshot {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let out = &mut encoder;
        for ((name, help, _), values) in PER_CORE.iter().zip(&self.per_core) {
            let values = values.iter().enumerate().map(|(core, &value)| ([("core", core.to_string())], value));
            counters(out, (name, help, None), values)?;
        }
        let connections = self.connections.iter().enumerate();
        let connections = connections.map(|(core, &open)| ([("core", core.to_string())], open as f64));
        gauges(out, ("connections", "Connections open", None), connections)?;
        let by_why = self.closed.iter().enumerate().flat_map(|(core, counts)| {
            counts.iter().map(move |&(why, count)| ([("core", core.to_string()), ("why", why.to_owned())], count))
        });
        let help = "Connections closed: idle at limits.idle_timeout_ms, stalled (the client did not read) at \
                    limits.stall_timeout_ms, other by the client, by QUIT, for bad bytes, or while leaving";
        counters(out, ("connections_closed", help, None), by_why)?;
        let statuses = HTTP_STATUSES.map(|status| status.to_string()).into_iter().chain(["other".to_owned()]);
        let by_status = statuses.zip(&self.http).map(|(status, &count)| ([("status", status)], count));
        counters(out, ("http_answers", "HTTP requests answered, by status", None), by_status)?;
        let by_code = self.grpc.iter().enumerate().filter(|&(code, &count)| code == 0 || count > 0);
        let by_code = by_code.map(|(code, &count)| ([("code", code.to_string())], count));
        counters(out, ("grpc_answers", "gRPC requests answered, by gRPC's status code", None), by_code)?;
        let help = "Connections of the ops port refused at ops.connections_max";
        counters(out, ("ops_connections_refused", help, None), [(UNLABELLED, self.ops_refused)])?;
        let help = "Lines of the log that were dropped because standard error did not take them";
        counters(out, ("log_lines_dropped", help, None), [(UNLABELLED, self.log_dropped)])?;
        let by_reason = self.rules.iter().flat_map(|(name, counts)| {
            let labels = move |reason| [("rule", name.clone()), ("reason", word(reason).to_owned())];
            Reason::ALL.into_iter().zip(counts).map(move |(reason, &count)| (labels(reason), count))
        });
        counters(out, ("rule_checks", "What each rule said of the checks it applied to", None), by_reason)?;
        let head = ("buckets_inserted", "Identities put into the bucket table", None);
        counters(out, head, [(UNLABELLED, self.inserted)])?;
        let help = "Buckets dropped for others: full ones lost nothing, in_use ones start full again (table too small)";
        let states = [one("state", "full", self.evicted_full), one("state", "in_use", self.evicted_in_use)];
        counters(out, ("buckets_evicted", help, None), states)?;
        let help = "Policies read again after the first, by what became of them";
        let outcomes =
            [one("outcome", "applied", self.reloads_applied), one("outcome", "refused", self.reloads_refused)];
        counters(out, ("policy_reloads", help, None), outcomes)?;
        for (name, help, unit, value) in &self.gauges {
            gauges(out, (name, help, unit.as_ref()), [(UNLABELLED, *value)])?;
        }
        let version = [one("version", env!("CARGO_PKG_VERSION"), 1.0)];
        gauges(out, ("build_info", "The version, as a label", None), version)
    }
}

/// What every process is expected to show, under the names that it is expected under.
#[derive(Debug)]
struct Conventional {
    system: System,
    start_time_seconds: f64,
}

impl Conventional {
    fn of(process: &Process) -> Self {
        Self { system: System::read(), start_time_seconds: process.clock.started_unix_ms() as f64 / 1000.0 }
    }
}

impl Collector for Conventional {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let out = &mut encoder;
        let System { cpu_seconds, resident_bytes, open_files, open_files_max } = self.system;
        let (seconds, bytes) = (Some(&Unit::Seconds), Some(&Unit::Bytes));
        if let Some(value) = cpu_seconds {
            let head = ("process_cpu", "User and system time of all threads", seconds);
            counters(out, head, [(UNLABELLED, value)])?;
        }
        let whole = |value: Option<u64>| value.map(|value| value as f64);
        for (name, help, unit, value) in [
            (
                "process_start_time",
                "When the process began, since the Unix epoch",
                seconds,
                Some(self.start_time_seconds),
            ),
            ("process_resident_memory", "Memory in use", bytes, whole(resident_bytes)),
            ("process_open_fds", "Open files, sockets included", None, whole(open_files)),
            ("process_max_fds", "Files that may be open at once", None, whole(open_files_max)),
        ] {
            if let Some(value) = value {
                gauges(out, (name, help, unit), [(UNLABELLED, value)])?;
            }
        }
        Ok(())
    }
}

pub(super) const UNLABELLED: [(&str, String); 0] = [];

/// Name, help and unit of a family.
type Head<'a> = (&'a str, &'a str, Option<&'a Unit>);

/// A value with one label.
pub(super) fn one<T>(label: &'static str, word: &str, value: T) -> ([(&'static str, String); 1], T) {
    ([(label, word.to_owned())], value)
}

pub(super) fn counters<const N: usize, T: EncodeCounterValue>(
    encoder: &mut DescriptorEncoder<'_>,
    (name, help, unit): Head<'_>,
    values: impl IntoIterator<Item = ([(&'static str, String); N], T)>,
) -> fmt::Result {
    let metric = encoder.encode_descriptor(name, help, unit, MetricType::Counter)?;
    family(metric, values.into_iter().map(|(labels, value)| (labels, ConstCounter::new(value))))
}

pub(super) fn gauges<const N: usize>(
    encoder: &mut DescriptorEncoder<'_>,
    (name, help, unit): Head<'_>,
    values: impl IntoIterator<Item = ([(&'static str, String); N], f64)>,
) -> fmt::Result {
    let metric = encoder.encode_descriptor(name, help, unit, MetricType::Gauge)?;
    family(metric, values.into_iter().map(|(labels, value)| (labels, ConstGauge::new(value))))
}

fn family<const N: usize>(
    mut encoder: MetricEncoder<'_>,
    values: impl IntoIterator<Item = ([(&'static str, String); N], impl EncodeMetric)>,
) -> fmt::Result {
    for (labels, value) in values {
        match N {
            // Without this there would be an empty pair of braces.
            0 => return value.encode(encoder),
            _ => value.encode(encoder.encode_family(&labels)?)?,
        }
    }
    Ok(())
}
