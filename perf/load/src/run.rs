//! What the threads of a run share, and what each has to show for it.

use std::{
    sync::{
        Barrier,
        atomic::{AtomicBool, AtomicU64},
    },
    time::Duration,
};

use hdrhistogram::Histogram;

use crate::{
    args::Args,
    replies::{Expectations, Ledger, Tally},
};

/// Latencies beyond a minute count as a minute.
const LATENCY_NS_MAX: u64 = 60_000_000_000;

/// What all threads share.
pub(crate) struct Run {
    /// The command line.
    pub args: Args,
    /// What replies must be like.
    pub expectations: Expectations,
    /// Somebody has asked to stop, or some thread has failed.
    pub stop: AtomicBool,
    /// Passed when all threads are ready.
    pub ready: Barrier,
}

/// How far a thread is, for the progress line. Written by the thread only.
#[repr(align(128))]
#[derive(Default)]
pub(crate) struct Progress {
    /// Replies since the start.
    pub replies: AtomicU64,
    /// Checks allowed since the start.
    pub allowed: AtomicU64,
    /// Checks denied since the start.
    pub denied: AtomicU64,
}

/// What a thread has done.
pub(crate) struct Outcome {
    /// What came while measuring.
    pub ledger: Ledger,
    /// What came before.
    pub warmup: Tally,
    /// Latency of each reply while measuring.
    pub latencies_ns: Histogram<u64>,
    /// How long it measured.
    pub elapsed: Duration,
    /// CPU time in user space while measuring.
    pub cpu_user: Duration,
    /// CPU time in the kernel while measuring.
    pub cpu_system: Duration,
    /// Time spent looking for replies without sleeping; part of the CPU time.
    pub spin: Duration,
    /// Bytes sent while measuring.
    pub bytes_sent: u64,
    /// Bytes received while measuring.
    pub bytes_received: u64,
    /// Requests of an open loop that were due and not sent.
    pub unsent: u64,
    /// Why the run failed.
    pub failure: Option<String>,
}

impl Default for Outcome {
    fn default() -> Self {
        Self {
            ledger: Ledger::default(),
            warmup: Tally::default(),
            latencies_ns: latencies(),
            elapsed: Duration::ZERO,
            cpu_user: Duration::ZERO,
            cpu_system: Duration::ZERO,
            spin: Duration::ZERO,
            bytes_sent: 0,
            bytes_received: 0,
            unsent: 0,
            failure: None,
        }
    }
}

/// An empty latency histogram.
pub(crate) fn latencies() -> Histogram<u64> {
    Histogram::new_with_bounds(1, LATENCY_NS_MAX, 3).unwrap_or_else(|_| unreachable!("the bounds are right"))
}
