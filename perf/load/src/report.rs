//! What a run came to: a table for people or JSON for programs.

use std::{fmt::Write, time::Duration};

use hdrhistogram::Histogram;
use serde::Serialize;

use crate::{
    args::Args,
    replies::{Expectations, Ledger},
    run::{self, Outcome},
};

/// The figures of a run. Units are in the names.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    protocol: &'static str,
    threads: u16,
    connections: u16,
    depth: u32,
    /// Requests a second that an open loop was asked for.
    rate_asked: Option<f64>,
    /// From the end of the warm-up to the last reply.
    seconds: f64,
    /// Replies, probes included.
    requests: u64,
    requests_per_sec: f64,
    /// Replies without probes.
    checks: u64,
    checks_per_sec: f64,
    allowed: u64,
    denied: u64,
    unavailable: u64,
    errors: u64,
    probes: u64,
    /// Requests of an open loop that were due before the end and found no free connection.
    unsent: u64,
    latency_us: Latency,
    load_cpu: Cpu,
    bytes_sent: u64,
    bytes_received: u64,
    interrupted: bool,
    /// What was wrong, if anything was.
    failure: Option<String>,
}

/// From when a request was written (closed loop) or due (open loop) until its reply was read.
#[derive(Debug, Serialize)]
struct Latency {
    p50: f64,
    p90: f64,
    p99: f64,
    p99_9: f64,
    max: f64,
}

/// What the load generator itself used.
#[derive(Debug, Serialize)]
struct Cpu {
    user_secs: f64,
    system_secs: f64,
    /// Part of the above that went into waiting for replies without sleeping.
    spin_secs: f64,
    /// Share of the time that its threads were at work: near 1, they are the limit.
    busy_share: f64,
    /// Work for each request.
    us_per_request: f64,
}

impl Report {
    /// Puts together what the threads have seen.
    pub(crate) fn new(args: &Args, expectations: &Expectations, outcomes: &[Outcome], interrupted: bool) -> Self {
        let mut ledger = Ledger::default();
        let mut failure = outcomes.iter().find_map(|outcome| outcome.failure.clone());
        let mut allowed_whole = 0;
        for outcome in outcomes {
            if let Err(wrong) = ledger.merge(&outcome.ledger, expectations) {
                failure.get_or_insert(format!("expected {wrong}"));
            }
            allowed_whole += outcome.ledger.tally.allowed + outcome.warmup.allowed;
        }
        if let Some(max) = args.max_allowed.filter(|&max| allowed_whole > max) {
            failure.get_or_insert(format!("expected at most {max} allowed in the whole run, came {allowed_whole}"));
        }
        let tally = ledger.tally;
        let seconds = outcomes.iter().map(|outcome| outcome.elapsed).max().unwrap_or_default().as_secs_f64();
        let per_sec = |count: u64| if seconds > 0.0 { count as f64 / seconds } else { 0.0 };
        let sum = |part: fn(&Outcome) -> u64| outcomes.iter().map(part).sum();
        let checks = tally.replies - tally.probes;
        Self {
            protocol: args.protocol.name(),
            threads: args.threads,
            connections: args.connections,
            depth: args.depth,
            rate_asked: args.rate,
            seconds,
            requests: tally.replies,
            requests_per_sec: per_sec(tally.replies),
            checks,
            checks_per_sec: per_sec(checks),
            allowed: tally.allowed,
            denied: tally.denied,
            unavailable: tally.unavailable,
            errors: tally.errors,
            probes: tally.probes,
            unsent: sum(|outcome| outcome.unsent),
            latency_us: latency(outcomes),
            load_cpu: cpu(outcomes, tally.replies, seconds),
            bytes_sent: sum(|outcome| outcome.bytes_sent),
            bytes_received: sum(|outcome| outcome.bytes_received),
            interrupted,
            failure,
        }
    }

    /// What was wrong, if anything was.
    pub(crate) fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }

    /// For programs.
    ///
    /// # Errors
    ///
    /// Never in practice.
    pub(crate) fn json(&self) -> serde_json::Result<String> {
        serde_json::to_string_pretty(self)
    }

    /// For people.
    pub(crate) fn table(&self) -> String {
        let latency = &self.latency_us;
        let cpu = &self.load_cpu;
        let mut rows = vec![
            ("checks/s", format!("{:.0}", self.checks_per_sec)),
            ("checks", format!("{} in {:.2} s, and {} probes", self.checks, self.seconds, self.probes)),
            ("allowed", self.allowed.to_string()),
            ("denied", self.denied.to_string()),
            ("unavailable", self.unavailable.to_string()),
            ("errors", self.errors.to_string()),
            (
                "latency µs",
                format!(
                    "p50 {:.1}  p90 {:.1}  p99 {:.1}  p99.9 {:.1}  max {:.1}",
                    latency.p50, latency.p90, latency.p99, latency.p99_9, latency.max
                ),
            ),
            (
                "load generator",
                format!(
                    "{:.2} s CPU and {:.2} s looking for replies; {:.3} µs a request; {:.0} % busy",
                    cpu.user_secs + cpu.system_secs - cpu.spin_secs,
                    cpu.spin_secs,
                    cpu.us_per_request,
                    cpu.busy_share * 100.0
                ),
            ),
            ("bytes", format!("{} sent, {} received", self.bytes_sent, self.bytes_received)),
        ];
        if let Some(rate) = self.rate_asked {
            rows.push(("open loop", format!("{rate:.0}/s asked for; {} were due and not sent", self.unsent)));
        }
        let mut table = format!(
            "{}: {} connections, depth {}, {} threads{}\n",
            self.protocol,
            self.connections,
            self.depth,
            self.threads,
            if self.interrupted { " (interrupted)" } else { "" }
        );
        for (name, value) in rows {
            let _ = writeln!(table, "  {name:<15} {value}");
        }
        table
    }
}

fn latency(outcomes: &[Outcome]) -> Latency {
    let all: Histogram<u64> = outcomes.first().map_or_else(run::latencies, |first| {
        let mut all = first.latencies_ns.clone();
        for outcome in &outcomes[1..] {
            // All have the same bounds, so this cannot fail.
            let _ = all.add(&outcome.latencies_ns);
        }
        all
    });
    let us = |ns: u64| ns as f64 / 1000.0;
    Latency {
        p50: us(all.value_at_quantile(0.5)),
        p90: us(all.value_at_quantile(0.9)),
        p99: us(all.value_at_quantile(0.99)),
        p99_9: us(all.value_at_quantile(0.999)),
        max: us(all.max()),
    }
}

fn cpu(outcomes: &[Outcome], requests: u64, seconds: f64) -> Cpu {
    let sum = |part: fn(&Outcome) -> Duration| outcomes.iter().map(part).sum::<Duration>().as_secs_f64();
    let (user_secs, system_secs) = (sum(|outcome| outcome.cpu_user), sum(|outcome| outcome.cpu_system));
    let spin_secs = sum(|outcome| outcome.spin);
    let work = (user_secs + system_secs - spin_secs).max(0.0);
    Cpu {
        user_secs,
        system_secs,
        spin_secs,
        busy_share: work / (seconds * outcomes.len() as f64).max(f64::MIN_POSITIVE),
        us_per_request: work * 1e6 / (requests as f64).max(1.0),
    }
}
