//! Load in the background of a test, which checks every answer: each request has exactly one, in its place.
//!
//! A thread per connection sends batches of CHECKs, each with an ECHO of its number among them, at another place each
//! time: if a reply were missing, double or out of order, the ECHO would come back in the wrong place. A verdict that is
//! none, or of a rule that was not asked, ends the test too. Between batches it pauses, so that a debug build on a busy
//! machine is not saturated and what is measured is the deadline, not a queue.
#![allow(clippy::print_stdout, reason = "what was measured is shown with --nocapture")]

use std::{
    fmt,
    net::TcpStream,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use redis_protocol::resp2::types::OwnedFrame;

use crate::{Client, Server, Verdict, lateness::Watch, request};

/// Checks of one batch.
const DEPTH: u64 = 8;
/// Between the batches of a connection.
const PAUSE: Duration = Duration::from_millis(4);

/// Far beyond the deadlines of 5 to 50 ms, for a debug build on a machine with something else to do; far below what
/// waiting for a broken Redis would take.
const LATE: Duration = Duration::from_millis(500);

/// One check.
#[derive(Clone, Debug)]
pub struct Question {
    class: usize,
    rule: Option<&'static str>,
    bytes: Vec<u8>,
}

impl Question {
    /// A CHECK with these words. The class is what a tally can tell apart.
    pub fn new(class: usize, words: &[&str]) -> Self {
        Self { class, rule: None, bytes: request(&[&["CHECK"], words].concat()) }
    }

    /// The rule that the verdict must name.
    pub fn about(self, rule: &'static str) -> Self {
        Self { rule: Some(rule), ..self }
    }
}

/// Load that runs until it is stopped.
pub struct Load {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<Vec<Sample>>>,
}

struct Shared {
    question: Box<dyn Fn(u64) -> Question + Send + Sync>,
    began: Instant,
    stop: AtomicBool,
    /// Questions that were given out.
    asked: AtomicU64,
    /// Batches that were answered, over all connections.
    batches: AtomicU64,
}

/// One check that was answered.
#[derive(Clone, Copy, Debug)]
struct Sample {
    class: usize,
    /// When its batch was sent.
    at: Duration,
    /// From then until its reply was read.
    took: Duration,
    allowed: i64,
}

/// What a load came to, or a part of it.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// Checks that were allowed, denied, and answered as unavailable.
    pub allowed: u64,
    /// See `allowed`.
    pub denied: u64,
    /// See `allowed`.
    pub unavailable: u64,
    /// From the quickest to the slowest.
    samples: Vec<Sample>,
}

impl Load {
    /// Starts loading over so many connections. `attributes` are the words of each CHECK beside the identity, which is
    /// the attribute `key`; nobody else asks for these identities.
    pub fn start(server: &Server, connections: usize, attributes: &'static [&'static str]) -> Self {
        Self::asking(server, connections, move |number| {
            Question::new(0, &[attributes, &["key", &format!("load-{number}")]].concat())
        })
    }

    /// Starts loading with these questions. Each number is asked for once, about in order.
    pub fn asking(
        server: &Server,
        connections: usize,
        question: impl Fn(u64) -> Question + Send + Sync + 'static,
    ) -> Self {
        let shared = Arc::new(Shared {
            question: Box::new(question),
            began: Instant::now(),
            stop: AtomicBool::new(false),
            asked: AtomicU64::new(0),
            batches: AtomicU64::new(0),
        });
        let threads = (0..connections)
            .map(|number| {
                let (shared, client) = (Arc::clone(&shared), server.connect());
                std::thread::spawn(move || run(client, number, &shared))
            })
            .collect();
        Self { shared, threads }
    }

    /// Waits until so many more batches were answered.
    pub fn wait_for(&self, batches: u64) {
        let until = self.shared.batches.load(Ordering::Acquire) + batches;
        crate::until("the load goes on", || self.shared.batches.load(Ordering::Acquire) >= until);
    }

    /// The time since it began, to tell parts of it apart.
    pub fn now(&self) -> Duration {
        self.shared.began.elapsed()
    }

    /// Stops; every request that was sent has been answered then.
    pub fn stop(self) -> Tally {
        self.shared.stop.store(true, Ordering::Release);
        let samples = self.threads.into_iter().flat_map(|thread| match thread.join() {
            Ok(samples) => samples,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        Tally::of(samples.collect())
    }
}

/// Loads these servers, which have a rule that only counts for `kind=load` and is wide enough, while something happens.
/// Holds that each check was answered once, in order, in time and by allowing it; shows how long they took. How late the
/// machine itself was is not held against them.
pub fn under_load<T>(what: &str, servers: &[Server], act: impl FnOnce() -> T) -> T {
    let watches: Vec<_> = servers.iter().map(Watch::start).collect();
    let loads: Vec<_> = servers.iter().map(|server| Load::start(server, 2, &["kind", "load"])).collect();
    loads.iter().for_each(|load| load.wait_for(20));
    let outcome = act();
    loads.iter().for_each(|load| load.wait_for(20));
    let tallies: Vec<_> = loads.into_iter().map(Load::stop).collect();
    for (number, (tally, watch)) in tallies.iter().zip(watches).enumerate() {
        let machine_late = watch.stop();
        println!("{what}, server {number}: {tally}; machine late by {machine_late:.1?} at most");
        assert_eq!((tally.denied, tally.unavailable), (0, 0), "{what}: each identity asks for less than it may");
        let late = tally.quantile(0.999);
        assert!(late < LATE + machine_late, "{what}: p99.9 {late:?}, machine late by {machine_late:?}");
    }
    outcome
}

impl Tally {
    fn of(mut samples: Vec<Sample>) -> Self {
        samples.sort_unstable_by_key(|sample| sample.took);
        let count = |allowed: i64| samples.iter().filter(|sample| sample.allowed == allowed).count() as u64;
        Self { allowed: count(1), denied: count(0), unavailable: count(-1), samples }
    }

    /// Checks in all.
    pub fn checks(&self) -> u64 {
        self.allowed + self.denied + self.unavailable
    }

    /// The checks of this class.
    pub fn class(&self, class: usize) -> Self {
        Self::of(self.samples.iter().filter(|sample| sample.class == class).copied().collect())
    }

    /// The checks that were sent between these times.
    pub fn between(&self, from: Duration, to: Duration) -> Self {
        Self::of(self.samples.iter().filter(|sample| (from..to).contains(&sample.at)).copied().collect())
    }

    /// The time that this share of the checks did not exceed, from when their batch was sent until their reply was read.
    pub fn quantile(&self, share: f64) -> Duration {
        let at = (self.samples.len() as f64 * share) as usize;
        self.samples.get(at.min(self.samples.len().saturating_sub(1))).map(|sample| sample.took).unwrap_or_default()
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { allowed, denied, unavailable, .. } = self;
        let [p50, p99, p999, max] =
            [0.5, 0.99, 0.999, 1.0].map(|share| format!("{:.2}", self.quantile(share).as_secs_f64() * 1000.0));
        write!(
            out,
            "{:5} checks, {allowed:5} allowed, {denied:5} denied, {unavailable:5} unavailable; \
             p50 {p50} ms, p99 {p99} ms, p99.9 {p999} ms, longest {max} ms",
            self.checks()
        )
    }
}

fn run(mut client: Client<TcpStream>, number: usize, shared: &Shared) -> Vec<Sample> {
    let mut samples = Vec::new();
    let mut batch = 0;
    while !shared.stop.load(Ordering::Acquire) {
        let first = shared.asked.fetch_add(DEPTH, Ordering::Relaxed);
        let questions: Vec<_> = (first..first + DEPTH).map(|number| (shared.question)(number)).collect();
        let mark = format!("{number}-{batch}");
        let mark_at = batch % (questions.len() + 1);
        let mut requests: Vec<_> = questions.iter().map(|question| question.bytes.clone()).collect();
        requests.insert(mark_at, request(&["ECHO", &mark]));
        let began = Instant::now();
        client.send(&requests.concat());
        for at in 0..=questions.len() {
            if at == mark_at {
                let mark = OwnedFrame::BulkString(mark.clone().into_bytes());
                assert_eq!(client.receive(), Some(mark), "replies come in order");
            }
            let Some(question) = questions.get(at) else { break };
            let verdict = Verdict::of(&client.receive().expect("each check is answered"));
            assert!((-1..=1).contains(&verdict.allowed), "{verdict:?}");
            assert!(question.rule.is_none_or(|rule| rule == verdict.rule), "{verdict:?} to {question:?}");
            let at = began.saturating_duration_since(shared.began);
            samples.push(Sample { class: question.class, at, took: began.elapsed(), allowed: verdict.allowed });
        }
        batch += 1;
        shared.batches.fetch_add(1, Ordering::AcqRel);
        std::thread::park_timeout(PAUSE);
    }
    samples
}
