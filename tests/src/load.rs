//! Load in the background of a test, which checks every answer: each request has exactly one, in its place.
//!
//! A thread per connection sends batches of CHECKs of identities that nobody else asks for, and behind each batch an ECHO
//! of its number: if a reply were missing, double or out of order, the ECHO would come back in the wrong place. Between
//! batches it pauses, so that a debug build on a busy machine is not saturated and what is measured is the deadline, not
//! a queue.
#![allow(clippy::print_stdout, reason = "what was measured is shown with --nocapture")]

#![allow(clippy::print_stdout, reason = "what was measured is shown with --nocapture")]

use std::{
    net::TcpStream,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use redis_protocol::resp2::types::OwnedFrame;

use crate::{Client, Server, Verdict, request};

/// Checks of one batch.
const DEPTH: usize = 8;
/// Between the batches of a connection.
const PAUSE: Duration = Duration::from_millis(4);

/// Far beyond the deadline of 5 ms, for a debug build on a machine with something else to do; far below what waiting for a
/// broken Redis would take.
const LATE: Duration = Duration::from_millis(500);

/// A rule for the load, and one whose identities have 5 in Redis and 2 in the memory of a gateway.
pub const RULES: &str = r#"
[[rule]]
name = "load"
match = { kind = "load" }
per = ["key"]
limit = { capacity = 100, refill = 100, period = "1h" }

[[rule]]
name = "few"
match = { kind = "few" }
per = ["key"]
limit = { capacity = 5, refill = 1, period = "24h" }
local = { capacity = 2, refill = 1, period = "24h" }
"#;

/// Load that runs until it is stopped.
pub struct Load {
    stop: Arc<AtomicBool>,
    /// Batches that were answered, over all connections.
    batches: Arc<AtomicU64>,
    threads: Vec<JoinHandle<Tally>>,
}

/// What a load came to.
#[derive(Debug, Default)]
pub struct Tally {
    /// Checks that were allowed, denied, and answered as unavailable.
    pub allowed: u64,
    /// See `allowed`.
    pub denied: u64,
    /// See `allowed`.
    pub unavailable: u64,
    /// How long each batch took, in the order of their ends.
    pub took: Vec<Duration>,
}

impl Load {
    /// Starts loading over so many connections. `attributes` are the words of each CHECK beside the identity, which is
    /// the attribute `key`.
    pub fn start(server: &Server, connections: usize, attributes: &'static [&'static str]) -> Self {
        let (stop, batches) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let threads = (0..connections)
            .map(|number| {
                let (stop, batches, client) = (Arc::clone(&stop), Arc::clone(&batches), server.connect());
                std::thread::spawn(move || run(client, number, attributes, &stop, &batches))
            })
            .collect();
        Self { stop, batches, threads }
    }

    /// Waits until so many more batches were answered.
    pub fn wait_for(&self, batches: u64) {
        let until = self.batches.load(Ordering::Acquire) + batches;
        crate::until("the load goes on", || self.batches.load(Ordering::Acquire) >= until);
    }

    /// Stops; every request that was sent has been answered then.
    pub fn stop(self) -> Tally {
        self.stop.store(true, Ordering::Release);
        let mut all = Tally::default();
        for thread in self.threads {
            let one = thread.join().expect("every reply of this connection was right");
            all.allowed += one.allowed;
            all.denied += one.denied;
            all.unavailable += one.unavailable;
            all.took.extend(one.took);
        }
        all.took.sort_unstable();
        all
    }
}

/// Far beyond the deadlines of 5 to 50 ms, for a debug build on a machine with something else to do; far below what
/// waiting for a broken Redis would take.
const LATE: Duration = Duration::from_millis(500);

/// The same for one batch in a thousand, of which there is hardly one while a load is short.
const VERY_LATE: Duration = Duration::from_millis(900);

/// Loads these servers, which have a rule that only counts for `kind=load` and is wide enough, while something happens.
/// Holds that each check was answered once, in order, in time and by allowing it; shows how long they took. A machine that
/// halts for a moment is not the server's fault: what a thread that only sleeps was late, the checks may be too.
pub fn under_load<T>(what: &str, servers: &[Server], act: impl FnOnce() -> T) -> T {
    let watch = Watch::start();
    let loads: Vec<_> = servers.iter().map(|server| Load::start(server, 2, &["kind", "load"])).collect();
    loads.iter().for_each(|load| load.wait_for(20));
    let outcome = act();
    loads.iter().for_each(|load| load.wait_for(20));
    let tallies: Vec<_> = loads.into_iter().map(Load::stop).collect();
    let halted = watch.stop();
    for (number, tally) in tallies.iter().enumerate() {
        let [half, late, very_late, last] = [0.5, 0.99, 0.999, 1.0].map(|share| tally.quantile(share));
        println!(
            "{what}, server {number}: {} checks in batches, p50 {half:?}, p99 {late:?}, p99.9 {very_late:?}, longest {last:?}; \
             the machine halted for {halted:?}",
            tally.checks()
        );
        assert_eq!((tally.denied, tally.unavailable), (0, 0), "{what}: each identity asks for less than it may");
        assert!(late < LATE + halted && very_late < VERY_LATE + halted, "{what}: p99 {late:?}, p99.9 {very_late:?}");
    }
    outcome
}

/// A thread that only sleeps, and knows by how much it slept too long.
struct Watch {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Duration>,
}

impl Watch {
    fn start() -> Self {
        let stop = Arc::<AtomicBool>::default();
        let asked = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut longest = Duration::ZERO;
            while !asked.load(Ordering::Acquire) {
                let began = Instant::now();
                std::thread::park_timeout(PAUSE);
                longest = longest.max(began.elapsed().saturating_sub(PAUSE));
            }
            longest
        });
        Self { stop, thread }
    }

    fn stop(self) -> Duration {
        self.stop.store(true, Ordering::Release);
        self.thread.join().expect("it only sleeps")
    }
}

impl Tally {
    /// Checks in all.
    fn checks(&self) -> u64 {
        self.allowed + self.denied + self.unavailable
    }

    /// Shows what was measured, and holds it against the promises: nobody is denied, since each identity asks once, nobody
    /// is unavailable, and nobody waits for a broken Redis.
    ///
    /// A shared machine may stand still for half a second, with all of this on it: p99.9 is shown, p90 is held to. During an
    /// outage a hundred batches are waited for, so if checks hung for as long as Redis does, p90 would be far beyond.
    pub fn hold_to_its_promises(&self, what: &str) {
        let [half, most, late] = [0.5, 0.9, 0.999].map(|share| self.quantile(share));
        println!("{what}: {} checks, p50 {half:?}, p99.9 {late:?}", self.checks());
        assert_eq!((self.denied, self.unavailable), (0, 0), "{what}: each identity asks once");
        assert!(most < LATE, "{what}: p90 {most:?}");
    }

    /// The time that this share of the batches did not exceed.
    fn quantile(&self, share: f64) -> Duration {
        let at = (self.took.len() as f64 * share) as usize;
        self.took.get(at.min(self.took.len().saturating_sub(1))).copied().unwrap_or_default()
    }
}

fn run(
    mut client: Client<TcpStream>,
    number: usize,
    attributes: &[&str],
    stop: &AtomicBool,
    batches: &AtomicU64,
) -> Tally {
    let mut tally = Tally::default();
    let mut batch = 0_u64;
    while !stop.load(Ordering::Acquire) {
        let mut bytes = Vec::new();
        for at in 0..DEPTH {
            let key = format!("load-{number}-{batch}-{at}");
            bytes.extend(request(&[&["CHECK"], attributes, &["key", &key]].concat()));
        }
        let mark = format!("{number}-{batch}");
        bytes.extend(request(&["ECHO", &mark]));
        let began = Instant::now();
        client.send(&bytes);
        for _ in 0..DEPTH {
            let verdict = Verdict::of(&client.receive().expect("each check is answered"));
            match verdict.allowed {
                1 => tally.allowed += 1,
                0 => tally.denied += 1,
                _ => tally.unavailable += 1,
            }
        }
        assert_eq!(client.receive(), Some(OwnedFrame::BulkString(mark.into_bytes())), "replies come in order");
        tally.took.push(began.elapsed());
        batch += 1;
        batches.fetch_add(1, Ordering::AcqRel);
        std::thread::park_timeout(PAUSE);
    }
    tally
}
