//! Counters of one core: written by that core alone, read by whoever scrapes.
//!
//! A single writer needs no atomic addition: a relaxed load and store, one or two nanoseconds. The ops page adds the
//! cores up.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use crate::{
    buckets::TableCounts,
    decision::{By, Reason, Why},
};

/// A counter with one writer.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds, on the writer's thread.
    #[inline(always)]
    pub fn add(&self, more: u64) {
        self.0.store(self.0.load(Relaxed).wrapping_add(more), Relaxed);
    }

    /// Sets, on the writer's thread.
    #[inline(always)]
    pub fn set(&self, value: u64) {
        self.0.store(value, Relaxed);
    }

    /// The value, on any thread.
    pub fn value(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// What one core counts.
#[derive(Debug)]
pub struct CoreCounters {
    /// Checks decided, whatever the verdict.
    pub checks: Counter,
    /// Checks that were denied.
    pub denied: Counter,
    /// Checks that nobody could decide, under a rule that is closed on failure.
    pub unavailable: Counter,
    /// Checks to which no rule applied.
    pub unruled: Counter,
    /// CL.THROTTLE and THROTTLE calls that were allowed.
    pub throttles_allowed: Counter,
    /// CL.THROTTLE and THROTTLE calls that were denied.
    pub throttles_denied: Counter,
    /// Requests answered with an error; the connection went on.
    pub command_errors: Counter,
    /// Connections closed because their bytes were not RESP, or beyond a limit.
    pub protocol_errors: Counter,
    /// Connections opened.
    pub connections_opened: Counter,
    /// Connections closed, for whatever reason.
    pub connections_closed: Counter,
    /// Connections refused because `connections_max` was reached.
    pub connections_refused: Counter,
    /// Connections closed because nothing came for `idle_timeout_ms`.
    pub connections_idle: Counter,
    /// Connections closed because their client did not read for `stall_timeout_ms`.
    pub connections_stalled: Counter,
    /// Times that reading from a connection stopped because its client did not read.
    pub output_backlogs: Counter,
    /// Identities put into the bucket table.
    pub buckets_inserted: Counter,
    /// Buckets dropped when they were full again anyway.
    pub buckets_evicted_full: Counter,
    /// Buckets dropped before they were full again.
    pub buckets_evicted_in_use: Counter,
    /// CL.THROTTLE and THROTTLE calls that the store did not answer.
    pub throttle_fallbacks: Counter,
    /// Checks of which a shadow rule never learned what it would have said, because the store did not answer.
    pub shadow_unknown: Counter,
    /// gRPC requests of a domain of which no rule speaks.
    pub unknown_domains: Counter,
    /// HTTP answers by [`HTTP_STATUSES`], the last for all others.
    http: [Counter; HTTP_STATUSES.len() + 1],
    /// gRPC answers by their code.
    grpc: [Counter; GRPC_CODES],
    /// [`RULE_COUNTERS`] for each rule slot; see [`RuleSlots`](crate::policy::RuleSlots).
    rules: Box<[Counter]>,
}

/// The statuses of HTTP answers that are counted by themselves.
pub const HTTP_STATUSES: [u16; 9] = [200, 400, 401, 403, 404, 405, 413, 429, 503];
/// gRPC has codes from 0 to 16.
pub const GRPC_CODES: usize = 17;

/// Counters of one rule: by what it said, then by who answered where the store counts, then by why the store did not.
pub const RULE_COUNTERS: usize = WHY_AT + Why::COUNT;
const BY_AT: usize = Reason::COUNT;
const WHY_AT: usize = BY_AT + By::COUNT;

/// What all cores counted of one rule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RuleCounts([u64; RULE_COUNTERS]);

impl RuleCounts {
    /// The sum over cores.
    pub fn of(cores: &[Arc<CoreCounters>], slot: u32) -> Self {
        let first = slot as usize * RULE_COUNTERS;
        Self(std::array::from_fn(|at| cores.iter().map(|core| core.rules[first + at].value()).sum()))
    }

    /// What was counted since.
    #[must_use]
    pub fn since(&self, base: &Self) -> Self {
        Self(std::array::from_fn(|at| self.0[at].saturating_sub(base.0[at])))
    }

    /// How often the rule said this.
    pub fn reason(&self, reason: Reason) -> u64 {
        self.0[reason as usize]
    }

    /// How often it was answered for by this, where the store counts.
    pub fn by(&self, by: By) -> u64 {
        self.0[BY_AT + by as usize]
    }

    /// How often the store did not answer for it, for this reason.
    pub fn why(&self, why: Why) -> u64 {
        self.0[WHY_AT + why as usize]
    }
}

impl CoreCounters {
    /// Zeros for `rule_slots` rules.
    pub fn new(rule_slots: usize) -> Arc<Self> {
        Arc::new(Self {
            checks: Counter::default(),
            denied: Counter::default(),
            unavailable: Counter::default(),
            unruled: Counter::default(),
            throttles_allowed: Counter::default(),
            throttles_denied: Counter::default(),
            command_errors: Counter::default(),
            protocol_errors: Counter::default(),
            connections_opened: Counter::default(),
            connections_closed: Counter::default(),
            connections_refused: Counter::default(),
            connections_idle: Counter::default(),
            connections_stalled: Counter::default(),
            output_backlogs: Counter::default(),
            buckets_inserted: Counter::default(),
            buckets_evicted_full: Counter::default(),
            buckets_evicted_in_use: Counter::default(),
            throttle_fallbacks: Counter::default(),
            shadow_unknown: Counter::default(),
            unknown_domains: Counter::default(),
            http: Default::default(),
            grpc: Default::default(),
            rules: (0..rule_slots * RULE_COUNTERS).map(|_| Counter::default()).collect(),
        })
    }

    /// The counter of HTTP answers with this status.
    pub fn http(&self, status: u16) -> &Counter {
        let at = HTTP_STATUSES.iter().position(|known| *known == status);
        &self.http[at.unwrap_or(HTTP_STATUSES.len())]
    }

    /// The counter of gRPC answers with this code.
    pub fn grpc(&self, code: usize) -> &Counter {
        &self.grpc[code.min(GRPC_CODES - 1)]
    }

    /// The counter of a rule's slot and a reason.
    #[inline(always)]
    pub fn rule(&self, slot: u32, reason: Reason) -> &Counter {
        &self.rules[slot as usize * RULE_COUNTERS + reason as usize]
    }

    /// The counter of a rule's slot and who answered for it, where the store counts.
    #[inline(always)]
    pub fn decided_by(&self, slot: u32, by: By) -> &Counter {
        &self.rules[slot as usize * RULE_COUNTERS + BY_AT + by as usize]
    }

    /// The counter of a rule's slot and why the store did not answer for it.
    #[inline(always)]
    pub fn fallback(&self, slot: u32, why: Why) -> &Counter {
        &self.rules[slot as usize * RULE_COUNTERS + WHY_AT + why as usize]
    }

    /// Publishes what happened to the table on this core.
    pub fn set_table(&self, counts: &TableCounts) {
        self.buckets_inserted.set(counts.inserted);
        self.buckets_evicted_full.set(counts.evicted_full);
        self.buckets_evicted_in_use.set(counts.evicted_in_use);
    }
}
