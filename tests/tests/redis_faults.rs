//! Redis fails in every way that it has, under load: no reply is lost or late, nothing passes that the failure policies
//! do not grant, and Redis is used again as soon as it can be, without a restart.
//!
//! Each fault runs on both transports, one after the other: a busy machine is what makes replies late. The figures of each
//! are printed (`cargo test -p sluice-e2e --test redis_faults -- --nocapture`). With the breaker at work only the first
//! checks of an outage wait for their deadline; so the silent faults run once more with a breaker that never opens.
#![allow(missing_docs)]
#![allow(clippy::print_stdout, reason = "figures are for whoever runs the tests")]
#![allow(clippy::disallowed_methods, reason = "tests wait for real processes")]

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use sluice_e2e::{
    Server, Setup,
    lateness::Watch,
    load::{Load, Question, Tally},
    proxy::{Fault, Proxy},
    redis_server::{Redis, free_port},
    text, until,
};

/// What an answer may take at p99.9 while Redis is broken, on a machine that has nothing else to do.
const LATENCY_MAX: Duration = Duration::from_millis(DEADLINE_MS + 1);
const DEADLINE_MS: u64 = 5;
/// A debug build needs its time too; and what the machine itself was late is allowed for beside this.
const SLACK: u32 = 10;

/// Opens soon and tries again soon.
const BREAKER: &str = "{ window_ms = 1000, calls_min = 10, failures_pct = 50, open_ms = 150, probes = 2 }";
/// Never opens: every check of an outage waits for its deadline.
const NO_BREAKER: &str = "{ window_ms = 1000, calls_min = 1000000, failures_pct = 100, open_ms = 150, probes = 2 }";

/// Some thousand checks a second.
const CONNECTIONS: usize = 4;
/// How many batches show that all is well.
const BATCHES: u64 = 120;

/// Of one identity, as many pass while Redis counts: it takes longer than the test for the next one.
const CAPACITY: u64 = 50;
/// And as many more by the bucket in memory.
const LOCAL: u64 = 7;

const POLICY: &str = r#"
[[rule]]
name = "one"
match = { path = "/one" }
limit = { capacity = 50, refill = 1, period = "1d" }
local = { capacity = 7, refill = 1, period = "1d" }
[[rule]]
name = "each"
match = { path = "/each" }
per = ["key"]
limit = { capacity = 10, refill = 1, period = "1h" }
[[rule]]
name = "open"
match = { path = "/open" }
per = ["key"]
limit = { capacity = 10, refill = 1, period = "1h" }
on_failure = "open"
[[rule]]
name = "closed"
match = { path = "/closed" }
per = ["key"]
limit = { capacity = 10, refill = 1, period = "1h" }
on_failure = "closed"
"#;

/// Everybody in one bucket that is soon empty.
const ONE: usize = 0;
/// An identity for each check, decided locally while Redis is away.
const EACH: usize = 1;
/// The same, allowed then.
const OPEN: usize = 2;
/// The same, unavailable then.
const CLOSED: usize = 3;

fn question(number: u64) -> Question {
    let key = format!("key-{number}");
    match number as usize % 4 {
        ONE => Question::new(ONE, &["path", "/one"]).about("one"),
        EACH => Question::new(EACH, &["path", "/each", "key", &key]).about("each"),
        OPEN => Question::new(OPEN, &["path", "/open", "key", &key]).about("open"),
        _ => Question::new(CLOSED, &["path", "/closed", "key", &key]).about("closed"),
    }
}

/// A server with its counts in this Redis. The guard keeps other tests waiting.
fn serve(transport: &'static str, url: &str, breaker: &str) -> (Server, MutexGuard<'static, ()>) {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let redis = format!("[redis]\nurls = [\"{url}\"]\ndeadline_ms = {DEADLINE_MS}\nbreaker = {breaker}\n");
    let setup = Setup::new(transport).with(&redis).with("[log]\nlevel = \"error\"\n");
    (Server::start(&setup, POLICY), guard)
}

/// One failure of Redis.
struct Outage<'a> {
    name: &'a str,
    url: String,
    breaker: &'a str,
    /// What it takes away.
    redis_forgets: bool,
    /// Whether Redis is there at first.
    begins_well: bool,
}

impl<'a> Outage<'a> {
    fn new(name: &'a str, url: impl Into<String>) -> Self {
        Self { name, url: url.into(), breaker: BREAKER, redis_forgets: false, begins_well: true }
    }

    /// Runs load before, during and after the outage that `begin` begins and `end` ends.
    fn run(&self, transport: &'static str, begin: impl FnOnce(), end: impl FnOnce()) {
        let (server, _guard) = serve(transport, &self.url, self.breaker);
        if self.begins_well {
            wait_until_redis_decides(&server, "before");
        } else {
            assert_eq!(server.get("/readyz").0, 200, "it serves without Redis");
        }
        let load = Load::asking(&server, CONNECTIONS, question);
        if self.begins_well {
            load.wait_for(BATCHES);
        }
        let watch = Watch::start(&server);
        let broken_at = load.now();
        begin();
        // Time enough for the breaker to try again, in vain, some times.
        std::thread::sleep(Duration::from_millis(600));
        load.wait_for(BATCHES / 2);
        let ends_at = load.now();
        let machine_late = watch.stop();
        end();
        let ended = Instant::now();
        wait_until_redis_decides(&server, "after");
        let back_after = ended.elapsed();
        let well_at = load.now();
        load.wait_for(BATCHES);
        let all = load.stop();
        let [before, outage, after] = [
            all.between(Duration::ZERO, broken_at),
            all.between(broken_at, ends_at),
            all.between(well_at, Duration::MAX),
        ];
        let which = format!("{}, {transport}", self.name);
        println!("{which}: Redis decides again after {back_after:.0?}; machine late by {machine_late:.1?} at most");
        for (when, tally) in [("before", &before), ("outage", &outage), ("after", &after)] {
            println!("  {when:6} {tally}");
        }
        let closings = closings(&server, &self.url);
        self.judge(&which, &outage, &all, machine_late, closings);
    }

    fn judge(&self, which: &str, outage: &Tally, all: &Tally, machine_late: Duration, closings: u64) {
        // Nothing waits longer than its deadline.
        assert!(outage.checks() > 100, "{which}: {outage}");
        let late = |share: f64, most: Duration| outage.quantile(share) > most + machine_late;
        assert!(!late(0.5, LATENCY_MAX * 2), "{which}: machine late by {machine_late:?}: {outage}");
        assert!(!late(0.999, LATENCY_MAX * SLACK), "{which}: machine late by {machine_late:?}: {outage}");
        // What the failure policies say, and nothing else.
        let is_allowed = |class: usize| all.class(class).allowed == all.class(class).checks();
        assert!(is_allowed(OPEN), "{which}: `open` allows: {}", all.class(OPEN));
        assert!(is_allowed(EACH), "{which}: `local` has a bucket for each: {}", all.class(EACH));
        assert_eq!(all.class(CLOSED).denied, 0, "{which}: `closed` is unavailable");
        assert!(outage.class(CLOSED).unavailable > 0, "{which}: {}", outage.class(CLOSED));
        // No more pass than Redis and the bucket in memory hold; that is a new one each time the breaker closes.
        // Fewer may: what Redis took for a check that had its answer by then is spent.
        let passed = all.class(ONE).allowed;
        let fillings = if self.redis_forgets { 2 } else { 1 };
        let most = fillings * CAPACITY + (1 + closings) * LOCAL;
        assert!((LOCAL..=most).contains(&passed), "{which}: {passed} of one identity passed, not {LOCAL} to {most}");
    }
}

/// How often the breaker of the shard with this URL has closed.
fn closings(server: &Server, url: &str) -> u64 {
    let shard = url.rsplit(['@', '/']).next().expect("an address");
    server.metric(&format!("sluice_redis_breaker_transitions_total{{shard=\"{shard}\",to=\"closed\"}}"))
}

/// Waits until a rule that is `closed` without Redis is not, some times in a row.
fn wait_until_redis_decides(server: &Server, when: &str) {
    let mut client = server.connect();
    let (mut number, mut in_a_row) = (0, 0);
    until("Redis decides", || {
        number += 1;
        let key = format!("{when}-{number}");
        let is_decided = client.check(&["path", "/closed", "key", &key]).allowed == 1;
        in_a_row = if is_decided { in_a_row + 1 } else { 0 };
        in_a_row == 5
    });
}

const TRANSPORTS: [&str; 2] = ["ring", "plain"];

/// A fault that the network has, with the breaker and without.
fn through_a_proxy(name: &str, fault: Fault, breakers: &[&str]) {
    for transport in TRANSPORTS {
        for breaker in breakers {
            let redis = Redis::start(&[]);
            let proxy = Proxy::start(redis.address());
            let url = format!("redis://{}", proxy.address());
            let outage = Outage { breaker, ..Outage::new(name, url) };
            outage.run(transport, || proxy.set(fault), || proxy.set(Fault::None));
        }
    }
}

/// A fault that a command brings, and another one ends.
fn by_command(name: &str, begin: &[&str], end: &[&str]) {
    for transport in TRANSPORTS {
        let redis = Redis::start(&[]);
        let tell = |words: &[&str]| assert_eq!(text(&redis.command(words)), "OK", "{words:?}");
        Outage::new(name, redis.url()).run(transport, || tell(begin), || tell(end));
    }
}

#[test]
fn killed() {
    for transport in TRANSPORTS {
        let redis = Redis::start(&[]);
        let outage = Outage { redis_forgets: true, ..Outage::new("killed", redis.url()) };
        outage.run(transport, || redis.kill(), || redis.restart());
    }
}

#[test]
fn frozen_and_thawed() {
    for transport in TRANSPORTS {
        for (name, breaker) in [("frozen", BREAKER), ("frozen, no breaker", NO_BREAKER)] {
            let redis = Redis::start(&[]);
            let outage = Outage { breaker, ..Outage::new(name, redis.url()) };
            outage.run(transport, || redis.freeze(), || redis.thaw());
        }
    }
}

#[test]
fn every_reply_50_ms_late() {
    let late = Fault::Delay(Duration::from_millis(50));
    through_a_proxy("50 ms late", late, &[BREAKER]);
    through_a_proxy("50 ms late, no breaker", late, &[NO_BREAKER]);
}

/// The network swallows all replies, and delivers them in the end.
#[test]
fn silent() {
    through_a_proxy("silent", Fault::Freeze, &[BREAKER]);
}

#[test]
fn no_connections() {
    for transport in TRANSPORTS {
        let redis = Redis::start(&[]);
        let proxy = Proxy::start(redis.address());
        let refuse = || {
            proxy.set(Fault::RefuseConnections);
            proxy.reset_connections();
        };
        let url = format!("redis://{}", proxy.address());
        Outage::new("no connections", url).run(transport, refuse, || proxy.set(Fault::None));
    }
}

#[test]
fn connection_reset_in_mid_reply() {
    through_a_proxy("reset in mid-reply", Fault::ResetInReply { after_bytes: 5 }, &[BREAKER]);
}

#[test]
fn half_a_reply_then_silence() {
    through_a_proxy("half a reply", Fault::HalfReplyThenSilence, &[BREAKER]);
    through_a_proxy("half a reply, no breaker", Fault::HalfReplyThenSilence, &[NO_BREAKER]);
}

#[test]
fn garbage_as_a_reply() {
    through_a_proxy("garbage", Fault::Garbage, &[BREAKER]);
}

#[test]
fn full() {
    by_command("full", &["CONFIG", "SET", "maxmemory", "1"], &["CONFIG", "SET", "maxmemory", "0"]);
}

/// A replica of nobody: it has no data but its own, and does not write.
#[test]
fn read_only() {
    let nobody = free_port().to_string();
    by_command("read-only", &["REPLICAOF", "127.0.0.1", &nobody], &["REPLICAOF", "NO", "ONE"]);
}

/// It really loads: a dump of 6,000 keys, and Redis is told to take its time with each.
#[test]
fn loading() {
    for transport in TRANSPORTS {
        let redis = Redis::start(&["--loading-process-events-interval-bytes", "1024", "--key-load-delay", "150"]);
        assert_eq!(text(&redis.command(&["DEBUG", "POPULATE", "6000"])), "OK");
        assert_eq!(text(&redis.command(&["SAVE"])), "OK");
        let is_loading = || redis.info_field("persistence", "loading") == "1";
        let outage = Outage { redis_forgets: true, ..Outage::new("loading", redis.url()) };
        outage.run(
            transport,
            || {
                redis.restart();
                assert!(is_loading(), "{}", redis.log());
            },
            || until("Redis has loaded", || !is_loading()),
        );
    }
}

#[test]
fn another_password() {
    for transport in TRANSPORTS {
        let redis = Redis::start(&["--requirepass", "right"]);
        let set = |password: &str| {
            assert_eq!(text(&redis.command(&["CONFIG", "SET", "requirepass", password])), "OK");
            // Who has logged in may stay: only new connections meet the new password.
            redis.command(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
        };
        let url = format!("redis://:right@{}", redis.address());
        Outage::new("wrong password", url).run(transport, || set("another"), || set("right"));
    }
}

#[test]
fn away_at_start() {
    for transport in TRANSPORTS {
        let port = free_port();
        let url = format!("redis://127.0.0.1:{port}");
        let redis = Mutex::new(None);
        let outage = Outage { begins_well: false, ..Outage::new("away at start", url) };
        outage.run(transport, || (), || *redis.lock().unwrap() = Some(Redis::start_on(port, &[])));
    }
}

/// Who flushes Redis takes what it has counted, and the script. Nobody waits for either.
#[test]
fn scripts_and_data_flushed() {
    const FLUSHES: u64 = 5;
    for transport in TRANSPORTS {
        let redis = Redis::start(&[]);
        let (server, _guard) = serve(transport, &redis.url(), BREAKER);
        wait_until_redis_decides(&server, "before");
        let watch = Watch::start(&server);
        let load = Load::asking(&server, CONNECTIONS, question);
        for flush in 1..=FLUSHES {
            load.wait_for(BATCHES / 2);
            let loaded = server.redis_events("script_loaded");
            redis.command(&["SCRIPT", "FLUSH"]);
            redis.command(&["FLUSHALL"]);
            // Where the machine is so late that the breaker is open, nothing is asked of Redis for a while, and nothing is
            // loaded. It must come back by itself.
            wait_until_redis_decides(&server, &format!("flush-{flush}"));
            server.until("the script is loaded, and that is counted", |server| {
                server.redis_events("script_loaded") > loaded
            });
        }
        load.wait_for(BATCHES / 2);
        let all = load.stop();
        let machine_late = watch.stop();
        println!("flushed, {transport}:\n         {all}");
        let late = all.quantile(0.999);
        assert!(late <= LATENCY_MAX * SLACK + machine_late, "{transport}: machine late by {machine_late:?}: {all}");
        let passed = all.class(ONE).allowed;
        let most = (1 + FLUSHES) * CAPACITY + (1 + closings(&server, &redis.url())) * LOCAL;
        assert!(passed <= most, "{transport}: {passed} of one identity passed");
    }
}
