//! The breaker, seen from outside: what it lets through to Redis, counted in Redis, and when.
//!
//! Redis stays up and is told to be full: it counts each call that reaches it, and fails it at once. Deadlines are long, so
//! that what fails does so because a test wants it to, not because the machine is busy.
#![allow(missing_docs)]
#![allow(clippy::disallowed_methods, reason = "tests wait for real processes")]

use std::{net::TcpStream, time::Duration};

use sluice_e2e::{
    Client, Server, Setup, Verdict,
    proxy::{Fault, Proxy},
    redis_server::Redis,
    request, text, until,
};

/// Without Redis each identity has three checks.
const POLICY: &str = r#"
[[rule]]
name = "local"
match = { path = "/local" }
per = ["key"]
limit = { capacity = 100, refill = 1, period = "1d" }
local = { capacity = 3, refill = 1, period = "1d" }
[[rule]]
name = "closed"
match = { path = "/closed" }
per = ["key"]
limit = { capacity = 100, refill = 1, period = "1d" }
on_failure = "closed"
"#;

/// A server with a Redis that can be full, and far away.
struct Stage {
    server: Server,
    client: Client<TcpStream>,
    redis: Redis,
    proxy: Proxy,
    identities: usize,
}

impl Stage {
    /// One call was made, and succeeded.
    fn new(setup: Setup, breaker: &str) -> Self {
        let redis = Redis::start(&[]);
        let proxy = Proxy::start(redis.address());
        let urls = format!("urls = [\"redis://{}\"]", proxy.address());
        let config = format!("[redis]\n{urls}\ndeadline_ms = 1000\nbreaker = {breaker}\n[log]\nlevel = \"error\"\n");
        let cores = setup.cores as u64;
        let server = Server::start(&setup.with(&config), POLICY);
        until("every core is connected", || server.metric("sluice_redis_events_total{event=\"connected\"}") >= cores);
        let client = server.connect();
        let mut stage = Self { server, client, redis, proxy, identities: 0 };
        stage.expect(1, ALLOWED);
        stage
    }

    /// From now on all calls fail.
    fn break_redis(&self) {
        assert_eq!(text(&self.redis.command(&["CONFIG", "SET", "maxmemory", "1"])), "OK");
    }

    fn mend_redis(&self) {
        assert_eq!(text(&self.redis.command(&["CONFIG", "SET", "maxmemory", "0"])), "OK");
    }

    /// Asks for so many identities that were never asked for, at once: as many calls, if they are made.
    fn ask(&mut self, checks: usize) -> Vec<Verdict> {
        let mut bytes = Vec::new();
        for _ in 0..checks {
            self.identities += 1;
            bytes.extend(request(&["CHECK", "path", "/closed", "key", &format!("key-{}", self.identities)]));
        }
        self.client.send(&bytes);
        (0..checks).map(|_| Verdict::of(&self.client.receive().expect("a reply"))).collect()
    }

    /// The same; all of them must end like this.
    fn expect(&mut self, checks: usize, allowed: i64) {
        let verdicts = self.ask(checks);
        let all = verdicts.iter().all(|verdict| verdict.allowed == allowed);
        assert!(all, "not all {allowed}: {verdicts:?}\n{}", self.store_metrics());
    }

    /// What `/metrics` says about Redis, and who decided why.
    fn store_metrics(&self) -> String {
        let text = self.server.get("/metrics").1;
        let tells = |line: &&str| ["sluice_redis_", "sluice_rule_"].iter().any(|start| line.starts_with(start));
        text.lines().filter(tells).filter(|line| !line.ends_with(" 0")).collect::<Vec<_>>().join("\n")
    }

    /// Whether `/metrics` says so.
    fn is_in(&self, state: &str) -> bool {
        let shard = self.proxy.address();
        self.server.metric(&format!("sluice_redis_breaker{{shard=\"{shard}\",state=\"{state}\"}}")) == 1
    }

    /// How many calls have reached Redis.
    fn calls(&self) -> u64 {
        self.redis.calls("evalsha")
    }

    /// How many more calls reached Redis by this. All of them have been answered, or were not made.
    fn calls_of(&mut self, act: impl FnOnce(&mut Self)) -> u64 {
        let before = self.calls();
        act(self);
        self.calls() - before
    }
}

const ALLOWED: i64 = 1;
const UNAVAILABLE: i64 = -1;

#[test]
fn opens_at_half_and_not_below_it() {
    for setup in Setup::transports() {
        let breaker = "{ window_ms = 60000, calls_min = 5, failures_pct = 50, open_ms = 60000, probes = 1 }";
        let mut stage = Stage::new(setup.clone(), breaker);
        assert_eq!(stage.calls_of(|stage| stage.expect(30, ALLOWED)), 30);
        assert!(stage.is_in("closed"), "{setup:?}");
        stage.break_redis();
        // As many as have succeeded, the first one included.
        let failed = stage.calls_of(|stage| (0..60).for_each(|_| stage.expect(1, UNAVAILABLE)));
        assert_eq!(failed, 31, "{setup:?}: it opens with the one that makes half");
        assert_eq!(stage.calls_of(|stage| stage.expect(100, UNAVAILABLE)), 0, "{setup:?}: it is open");
        assert!(stage.is_in("open"), "{setup:?}");
    }
}

#[test]
fn stays_closed_below_the_least_number_of_calls() {
    for setup in Setup::transports() {
        let breaker = "{ window_ms = 60000, calls_min = 11, failures_pct = 50, open_ms = 60000, probes = 1 }";
        let mut stage = Stage::new(setup.clone(), breaker);
        stage.break_redis();
        assert_eq!(stage.calls_of(|stage| stage.expect(9, UNAVAILABLE)), 9);
        assert_eq!(stage.calls_of(|stage| stage.expect(1, UNAVAILABLE)), 1, "{setup:?}: nine of ten do not open it");
        assert_eq!(stage.calls_of(|stage| stage.expect(10, UNAVAILABLE)), 0, "{setup:?}: ten of eleven do");
    }
}

#[test]
fn what_failed_before_the_window_is_forgotten() {
    for setup in Setup::transports() {
        let breaker = "{ window_ms = 1000, calls_min = 10, failures_pct = 50, open_ms = 60000, probes = 1 }";
        let mut stage = Stage::new(setup.clone(), breaker);
        stage.break_redis();
        for _ in 0..3 {
            std::thread::sleep(Duration::from_millis(1_200));
            assert_eq!(stage.calls_of(|stage| stage.expect(8, UNAVAILABLE)), 8, "{setup:?}");
        }
        // Those at once, of which the machine may have spread the first ones too far.
        stage.expect(20, UNAVAILABLE);
        assert_eq!(stage.calls_of(|stage| stage.expect(20, UNAVAILABLE)), 0, "{setup:?}: it is open");
    }
}

#[test]
fn while_it_is_open_nothing_touches_redis() {
    for setup in Setup::all() {
        let breaker = "{ window_ms = 60000, calls_min = 10, failures_pct = 50, open_ms = 60000, probes = 1 }";
        let mut stage = Stage::new(setup.clone(), breaker);
        stage.break_redis();
        stage.expect(40, UNAVAILABLE);
        let touched = |stage: &Stage| {
            let (redis, proxy) = (&stage.redis, &stage.proxy);
            (redis.connections_received(), stage.calls(), proxy.connections(), proxy.bytes_up())
        };
        let before = touched(&stage);
        // From another core too: they share the breaker.
        let mut others = [(); 3].map(|()| stage.server.connect());
        for _ in 0..20 {
            stage.expect(50, UNAVAILABLE);
            for other in &mut others {
                assert_eq!(other.check(&["path", "/closed", "key", "other"]).allowed, UNAVAILABLE, "{setup:?}");
            }
        }
        assert_eq!(touched(&stage), before, "{setup:?}");
    }
}

#[test]
fn half_open_lets_the_probes_through_and_they_decide() {
    const OPEN: Duration = Duration::from_millis(1_200);
    for setup in Setup::all() {
        let breaker = "{ window_ms = 60000, calls_min = 10, failures_pct = 50, open_ms = 1000, probes = 3 }";
        let mut stage = Stage::new(setup.clone(), breaker);
        stage.break_redis();
        stage.expect(60, UNAVAILABLE);
        assert_eq!(stage.calls_of(|stage| stage.expect(20, UNAVAILABLE)), 0, "{setup:?}: open");
        // Long enough for all checks to come while the probes are out.
        stage.proxy.set(Fault::Delay(Duration::from_millis(150)));
        std::thread::sleep(OPEN);
        assert_eq!(stage.calls_of(|stage| stage.expect(50, UNAVAILABLE)), 3, "{setup:?}: three try, and fail");
        assert_eq!(stage.calls_of(|stage| stage.expect(50, UNAVAILABLE)), 0, "{setup:?}: open again");
        stage.mend_redis();
        std::thread::sleep(OPEN);
        let mut allowed = 0;
        let calls = stage.calls_of(|stage| allowed = stage.ask(50).iter().map(|v| i64::from(v.allowed == 1)).sum());
        assert_eq!((calls, allowed), (3, 3), "{setup:?}: three try, and succeed");
        assert_eq!(stage.calls_of(|stage| stage.expect(50, ALLOWED)), 50, "{setup:?}: closed");
        assert!(stage.is_in("closed"), "{setup:?}");
    }
}

#[test]
fn local_buckets_are_gone_once_it_closes() {
    let local = |stage: &mut Stage| -> Vec<i64> {
        (0..5).map(|_| stage.client.check(&["path", "/local", "key", "a"]).allowed).collect()
    };
    for setup in Setup::transports() {
        let breaker = "{ window_ms = 500, calls_min = 10, failures_pct = 50, open_ms = 500, probes = 1 }";
        let mut stage = Stage::new(setup.clone(), breaker);
        for round in 0..3 {
            stage.break_redis();
            // Whatever succeeded before, this opens it.
            until("it is open", || stage.calls_of(|stage| stage.expect(60, UNAVAILABLE)) <= 1);
            assert_eq!(local(&mut stage), [1, 1, 1, 0, 0], "{setup:?}, outage {round}: a new bucket each time");
            stage.mend_redis();
            until("it is closed", || stage.ask(1)[0].allowed == ALLOWED);
            stage.expect(10, ALLOWED);
        }
        // Redis has granted none of those.
        let verdict = stage.client.check(&["path", "/local", "key", "a"]);
        assert_eq!((verdict.allowed, verdict.remaining), (ALLOWED, 99), "{setup:?}: {verdict:?}");
    }
}
