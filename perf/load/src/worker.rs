//! The I/O of one thread: its connections on one io_uring, and when each sends.
//!
//! ```text
//!   loop:
//!     dispatch          batches for the connections that are free: all (closed loop), or those that are due (open loop)
//!     enter             one system call: all sends of this round; it also runs what the kernel has deferred
//!     nothing to send?  look for completions for spin_us, then sleep
//!     complete          bytes to the verifier of their connection; a connection is free when its batch is answered
//! ```
//!
//! Closed loop: a request's latency counts from when its batch is handed to the kernel. Open loop: batches are due at
//! fixed times, whatever the server does; one that finds no free connection waits for one, and its latency still counts
//! from when it was due, so a server that stalls does not hide it (no coordinated omission).
#![allow(unsafe_code)]

use std::{
    collections::VecDeque,
    io,
    os::fd::OwnedFd,
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use sluice_echo::{
    cpu,
    ring::{Completion, Ring},
};

use crate::{
    connection::Connection,
    identities::Identities,
    requests::{Template, probe_plan},
    run::{Outcome, Progress, Run},
};

/// Receive buffers of a thread, and bytes of each.
const BUFFERS: u16 = 256;
const BUFFER_BYTES: u32 = 16 * 1024;
/// A sleeping thread looks this often whether it shall stop.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// An open loop does not sleep for less than this: waking up takes as long.
const SLEEP_NS_MIN: u64 = 60_000;
/// Looking at the ring once takes less than this.
const SPIN_TURN_NS_MAX: u64 = 1_000;

/// What a completion is for, in the upper half of its tag; the connection's place is in the lower.
const RECEIVE: u64 = 1;
const SEND: u64 = 2;

/// The open loop's timetable.
struct Timetable {
    due_ns: f64,
    interval_ns: f64,
}

/// One thread of the load generator.
pub(crate) struct Worker<'a> {
    run: &'a Run,
    progress: &'a Progress,
    ring: Ring,
    connections: Vec<Connection>,
    identities: Identities,
    /// Free connections, the one that has been free for longest first.
    free: VecDeque<usize>,
    /// Connections whose batch goes out in this round.
    fresh: Vec<usize>,
    queued: bool,
    /// Requests that are still to be sent, if there is a number to send.
    left: Option<u64>,
    timetable: Option<Timetable>,
    began: Instant,
    measure_ns: u64,
    end_ns: u64,
    measuring: bool,
    dispatching: bool,
    measured_since_ns: u64,
    heard_ns: u64,
    cpu_before: (Duration, Duration),
    outcome: Outcome,
}

impl<'a> Worker<'a> {
    /// Prepares one thread's part: `sockets` with their numbers among all.
    ///
    /// # Errors
    ///
    /// When the thread cannot be pinned or has no io_uring.
    pub(crate) fn new(
        run: &'a Run,
        progress: &'a Progress,
        thread: u16,
        sockets: Vec<(u16, OwnedFd)>,
    ) -> io::Result<Self> {
        let args = &run.args;
        if !args.cpus.is_empty() {
            cpu::pin(&[args.cpus[usize::from(thread) % args.cpus.len()]])?;
        }
        cpu::exact_timers();
        let template = Template::new(args);
        let (probes, probe_every) = probe_plan(args.depth, args.probe_every());
        let connections: Vec<Connection> = sockets
            .into_iter()
            .map(|(number, descriptor)| {
                Connection::new(descriptor, number, &template, args.depth, &probes, probe_every)
            })
            .collect();
        let share = |total: u64, thread: u16| total * u64::from(thread) / u64::from(args.threads);
        Ok(Self {
            run,
            progress,
            ring: Ring::new(4096, BUFFERS, BUFFER_BYTES)?,
            identities: Identities::new(
                args.distribution,
                args.zipf_exponent,
                args.identities,
                thread,
                args.threads,
                args.seed,
            ),
            free: (0..connections.len()).collect(),
            fresh: Vec::new(),
            queued: false,
            left: args.requests.map(|total| share(total, thread + 1) - share(total, thread)),
            timetable: args.rate.map(|rate| {
                let interval_ns = f64::from(args.depth) * 1e9 / rate;
                Timetable {
                    due_ns: interval_ns * f64::from(thread),
                    interval_ns: interval_ns * f64::from(args.threads),
                }
            }),
            connections,
            began: Instant::now(),
            measure_ns: nanos(args.warmup_secs()),
            end_ns: if args.requests.is_some() { u64::MAX } else { nanos(args.warmup_secs() + args.duration_secs) },
            measuring: false,
            dispatching: true,
            measured_since_ns: 0,
            heard_ns: 0,
            cpu_before: (Duration::ZERO, Duration::ZERO),
            outcome: Outcome::default(),
        })
    }

    /// Sends and verifies until it is over.
    pub(crate) fn run(mut self) -> Outcome {
        self.began = Instant::now();
        if let Err(Failure(failure)) = self.try_run() {
            self.run.stop.store(true, Ordering::Relaxed);
            self.outcome.failure = Some(failure);
        }
        self.finish();
        self.outcome
    }

    fn try_run(&mut self) -> Result<(), Failure> {
        for at in 0..self.connections.len() {
            self.receive(at)?;
        }
        self.queued = true;
        let mut completions = Vec::with_capacity(1024);
        let mut now_ns = self.now_ns();
        loop {
            self.turn_phase(now_ns);
            self.dispatch(now_ns)?;
            if self.run.stop.load(Ordering::Relaxed) || (!self.dispatching && self.free.len() == self.connections.len())
            {
                return Ok(());
            }
            if std::mem::take(&mut self.queued) {
                self.stamp();
                self.ring.enter(0, None)?;
            } else {
                self.rest(now_ns)?;
            }
            now_ns = self.now_ns();
            self.ring.drain(&mut completions);
            for completion in completions.drain(..) {
                self.complete(completion, now_ns)?;
            }
            self.publish();
            self.look_for_stall(now_ns)?;
        }
    }

    fn now_ns(&self) -> u64 {
        // 64 bits of nanoseconds are 584 years.
        self.began.elapsed().as_nanos() as u64
    }

    /// From warm-up to measuring, and from measuring to waiting for the last replies.
    fn turn_phase(&mut self, now_ns: u64) {
        if !self.measuring && now_ns >= self.measure_ns {
            self.measuring = true;
            self.measured_since_ns = now_ns;
            self.cpu_before = cpu::thread_time();
            self.outcome.warmup = std::mem::take(&mut self.outcome.ledger.tally);
            self.outcome.latencies_ns.reset();
            (self.outcome.spin, self.outcome.bytes_sent, self.outcome.bytes_received) = (Duration::ZERO, 0, 0);
        }
        if self.dispatching && (now_ns >= self.end_ns || self.left == Some(0)) {
            self.dispatching = false;
            if let Some(timetable) = &self.timetable
                && self.left.is_none()
            {
                // Not negative: the next one due is never long after now.
                let overdue_ns = (self.end_ns as f64 - timetable.due_ns).max(0.0);
                self.outcome.unsent = (overdue_ns / timetable.interval_ns) as u64 * u64::from(self.run.args.depth);
            }
        }
    }

    /// Starts a batch on each connection that is free and has something to send.
    fn dispatch(&mut self, now_ns: u64) -> io::Result<()> {
        while self.dispatching && self.left != Some(0) {
            let origin_ns = match &mut self.timetable {
                None => None,
                Some(timetable) if timetable.due_ns > now_ns as f64 => return Ok(()),
                Some(timetable) => Some(timetable.due_ns as u64),
            };
            let Some(at) = self.free.pop_front() else {
                return Ok(());
            };
            if let Some(timetable) = &mut self.timetable {
                timetable.due_ns += timetable.interval_ns;
            }
            self.start(at, origin_ns)?;
        }
        Ok(())
    }

    fn start(&mut self, at: usize, origin_ns: Option<u64>) -> io::Result<()> {
        let connection = &mut self.connections[at];
        let checks = connection.renew(&mut self.identities, self.left.unwrap_or(u64::MAX));
        if let Some(left) = &mut self.left {
            *left -= checks;
        }
        match origin_ns {
            Some(origin_ns) => connection.origin_ns = origin_ns,
            None => self.fresh.push(at),
        }
        self.send(at)
    }

    /// Queues what is left of a connection's batch.
    fn send(&mut self, at: usize) -> io::Result<()> {
        let connection = &mut self.connections[at];
        connection.sending();
        self.queued = true;
        let unsent = connection.unsent();
        let (start, len) = (unsent.as_ptr(), u32::try_from(unsent.len()).unwrap_or(u32::MAX));
        // SAFETY: the batch stays allocated, and is not written to, until this send's completion: `start` is called only
        // for a free connection, and `finish` keeps the batch when the run ends before.
        unsafe { self.ring.send(connection.socket(), start, len, SEND << 32 | at as u64) }
    }

    fn receive(&mut self, at: usize) -> io::Result<()> {
        self.ring.receive(self.connections[at].socket(), RECEIVE << 32 | at as u64)
    }

    /// The latency of a closed loop's batches begins now.
    fn stamp(&mut self) {
        if !self.fresh.is_empty() {
            let now_ns = self.now_ns();
            // Waiting begins anew.
            self.heard_ns = now_ns;
            for at in self.fresh.drain(..) {
                self.connections[at].origin_ns = now_ns;
            }
        }
    }

    /// Nothing to send: waits for a completion or for what is due next.
    fn rest(&mut self, now_ns: u64) -> io::Result<()> {
        let due_ns = match &self.timetable {
            Some(timetable) if self.dispatching && !self.free.is_empty() => timetable.due_ns as u64,
            _ => u64::MAX,
        };
        let spin_until_ns = if due_ns.saturating_sub(now_ns) < SLEEP_NS_MIN {
            due_ns
        } else {
            due_ns.min(now_ns + u64::from(self.run.args.spin_us) * 1000)
        };
        let (mut at_ns, mut spin_ns) = (now_ns, 0);
        while at_ns < spin_until_ns && !self.ring.has_work() {
            std::hint::spin_loop();
            let before_ns = std::mem::replace(&mut at_ns, self.now_ns());
            // A longer turn means that something else had the core, and this thread used no CPU.
            spin_ns += (at_ns - before_ns).min(SPIN_TURN_NS_MAX);
        }
        self.outcome.spin += Duration::from_nanos(spin_ns);
        if self.ring.has_work() || at_ns >= due_ns {
            return self.ring.enter(0, None);
        }
        let sleep = Duration::from_nanos(due_ns.saturating_sub(at_ns + SLEEP_NS_MIN / 2).max(1)).min(LOOK_EVERY);
        self.ring.enter(1, Some(sleep))
    }

    fn complete(&mut self, completion: Completion, now_ns: u64) -> Result<(), Failure> {
        // The lower half.
        let at = completion.tag as u32 as usize;
        if completion.tag >> 32 == SEND {
            self.sent(at, completion.result)
        } else {
            self.received(at, completion, now_ns)
        }
    }

    fn sent(&mut self, at: usize, result: i32) -> Result<(), Failure> {
        let connection = &mut self.connections[at];
        let Ok(len) = usize::try_from(result) else {
            connection.sent(0);
            let error = io::Error::from_raw_os_error(-result);
            return Err(failed(connection, &format!("cannot send: {error}")));
        };
        connection.sent(len);
        self.outcome.bytes_sent += len as u64;
        if !connection.unsent().is_empty() {
            return Ok(self.send(at)?);
        }
        if connection.is_answered() {
            self.free.push_back(at);
        }
        Ok(())
    }

    fn received(&mut self, at: usize, completion: Completion, now_ns: u64) -> Result<(), Failure> {
        let connection = &mut self.connections[at];
        if let (Some(id), Ok(len)) = (completion.buffer, usize::try_from(completion.result)) {
            let was_answered = connection.is_answered();
            let replies = connection
                .feed(self.ring.bytes(id, len), &self.run.expectations, &mut self.outcome.ledger)
                .map_err(|wrong| Failure(format!("{}, {wrong}", connection.describe())))?;
            self.ring.give(id);
            self.outcome.bytes_received += len as u64;
            self.heard_ns = now_ns;
            self.outcome
                .latencies_ns
                .saturating_record_n(now_ns.saturating_sub(connection.origin_ns).max(1), u64::from(replies));
            if !was_answered && connection.is_answered() && !connection.is_sending() {
                self.free.push_back(at);
            }
        }
        if completion.more {
            return Ok(());
        }
        match completion.result {
            0 => Err(failed(connection, "the server closed it")),
            // Out of buffers for a moment, or the kernel's own choice.
            result if result > 0 || -result == libc::ENOBUFS => {
                self.queued = true;
                Ok(self.receive(at)?)
            }
            result => {
                let error = io::Error::from_raw_os_error(-result);
                Err(failed(connection, &format!("cannot receive: {error}")))
            }
        }
    }

    fn look_for_stall(&self, now_ns: u64) -> Result<(), Failure> {
        let waiting = self.free.len() < self.connections.len();
        let silent_ns = now_ns.saturating_sub(self.heard_ns);
        if !waiting || silent_ns < nanos(self.run.args.timeout_secs) {
            return Ok(());
        }
        let oldest = self.connections.iter().filter(|one| !one.is_answered()).min_by_key(|one| one.origin_ns);
        match oldest {
            Some(one) if now_ns.saturating_sub(one.origin_ns) >= nanos(self.run.args.timeout_secs) => {
                Err(failed(one, &format!("nothing came for {:.1} s", silent_ns as f64 / 1e9)))
            }
            _ => Ok(()),
        }
    }

    fn publish(&self) {
        let (tally, warmup) = (&self.outcome.ledger.tally, &self.outcome.warmup);
        self.progress.replies.store(tally.replies + warmup.replies, Ordering::Relaxed);
        self.progress.allowed.store(tally.allowed + warmup.allowed, Ordering::Relaxed);
        self.progress.denied.store(tally.denied + warmup.denied, Ordering::Relaxed);
    }

    fn finish(&mut self) {
        if self.measuring {
            let (user, system) = cpu::thread_time();
            self.outcome.cpu_user = user.saturating_sub(self.cpu_before.0);
            self.outcome.cpu_system = system.saturating_sub(self.cpu_before.1);
            self.outcome.elapsed = Duration::from_nanos(self.now_ns() - self.measured_since_ns);
        } else {
            // Nothing was measured: what came belongs to the warm-up.
            self.outcome.warmup = std::mem::take(&mut self.outcome.ledger.tally);
            self.outcome.latencies_ns.reset();
        }
        for connection in self.connections.drain(..) {
            if connection.is_sending() {
                // The kernel may still read the batch; the process ends soon.
                std::mem::forget(connection);
            }
        }
    }
}

fn nanos(seconds: f64) -> u64 {
    // Not negative, and saturating.
    (seconds * 1e9) as u64
}

fn failed(connection: &Connection, what: &str) -> Failure {
    Failure(format!("{}: {what}; {}", connection.describe(), connection.describe_state()))
}

/// Why a run failed, for people.
struct Failure(String);

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self(format!("io_uring: {error}"))
    }
}
