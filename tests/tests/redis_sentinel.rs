//! A primary that sentinels watch, behind a server on each transport: found by its name, followed when it changes.
#![allow(missing_docs)]
#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test that cannot go on must stop, with the reason")]
#![allow(clippy::disallowed_methods, reason = "tests wait for real processes")]
#![allow(clippy::print_stdout, reason = "what was measured is shown with --nocapture")]

use std::{
    net::{SocketAddr, TcpStream},
    time::{Duration, Instant},
};

use sluice_e2e::{Client, Server, Setup, load::under_load, redis_sentinel::Sentinel, redis_server::Redis, until};

/// No limit comes back while a test runs. Who decides shows in the limit that a verdict names.
const POLICY: &str = r#"
[[rule]]
name = "load"
match = { kind = "load" }
per = ["key"]
limit = { capacity = 10000, refill = 1, period = "24h" }

[[rule]]
name = "few"
match = { kind = "few" }
per = ["key"]
limit = { capacity = 10, refill = 1, period = "24h" }
local = { capacity = 2, refill = 1, period = "24h" }
"#;

const FEW: i64 = 10;
const FEW_LOCAL: i64 = 2;

/// A deadline that a busy machine keeps as long as Redis answers.
const SETTINGS: &str = "deadline_ms = 50\nbreaker = { open_ms = 300, calls_min = 10, probes = 2 }";

/// From when another primary serves until it is asked: Sentinel is asked every second.
const FOUND: Duration = Duration::from_secs(10);

#[test]
fn the_primary_is_found_by_name_and_followed_without_a_restart() {
    let sentinel = Sentinel::start();
    // The first seed is dead from the start.
    sentinel.sentinel_nodes()[0].kill();
    let sentinels: Vec<_> = sentinel.sentinels().iter().map(ToString::to_string).collect();
    let urls = [format!("redis+sentinel://{}/mymaster", sentinels.join(","))];
    let start = |setup: Setup| Server::start(&setup.with_redis(&urls, SETTINGS), POLICY);
    let servers: Vec<_> = Setup::transports().into_iter().map(start).collect();
    only_the_primary_is_asked(&sentinel, &servers);
    switched("switched by command", &sentinel, &servers, |old| {
        let new = sentinel.fail_over();
        // The old one still takes writes: two counts of one limit, until it is told.
        let port = new.port().to_string();
        sentinel.node_at(old).command(&["REPLICAOF", "127.0.0.1", &port]);
        new
    });
    sentinel.wait_until_follows(sentinel.nodes()[0].address());
    switched("killed", &sentinel, &servers, |old| {
        sentinel.node_at(old).kill();
        sentinel.wait_for_switch(old)
    });
    // The one that the servers ask goes too. What is left is no quorum, but knows the primary.
    under_load("another sentinel dies", &servers, || {
        sentinel.sentinel_nodes()[1].kill();
        for server in &servers {
            // The primary is lost for a moment, which it takes a sentinel to find again.
            sentinel.node_at(sentinel.master()).command(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
            wait_for_redis(&mut server.connect(), "after");
        }
    });
    no_sentinel_is_said_and_that_one_is_back(&sentinel, &servers);
}

fn no_sentinel_is_said_and_that_one_is_back(sentinel: &Sentinel, servers: &[Server]) {
    let [lost, back] = ["no sentinel can be reached", "a sentinel answers again"];
    assert!(servers.iter().all(|server| !server.log().contains(lost)));
    let last = &sentinel.sentinel_nodes()[2];
    last.kill();
    for server in servers {
        server.until("it says that there is none", |server| server.log().contains(lost));
        server.until("it is counted", |server| server.redis_events("sentinels_lost") >= 1);
        assert!(!server.log().contains(back));
        wait_for_redis(&mut server.connect(), "without");
    }
    last.restart();
    for server in servers {
        server.until("it says that one is back", |server| server.log().contains(back));
    }
}

fn wait_for_redis(client: &mut Client<TcpStream>, key: &str) {
    until("Redis decides", || client.check(&["COST", "0", "kind", "few", "key", key]).limit == FEW);
}

fn only_the_primary_is_asked(sentinel: &Sentinel, servers: &[Server]) {
    let calls = |node: &Redis| node.calls("evalsha");
    for (number, server) in servers.iter().enumerate() {
        let mut client = server.connect();
        wait_for_redis(&mut client, "first");
        let key = format!("exact-{number}");
        let passed: i64 = (0..30).map(|_| client.check(&["kind", "few", "key", &key]).allowed).sum();
        // A call that a busy machine makes late is answered locally too.
        assert!((FEW..=FEW + FEW_LOCAL).contains(&passed), "{passed} passed");
    }
    assert!(calls(sentinel.node_at(sentinel.master())) > 0);
    assert_eq!(calls(&sentinel.nodes()[1]), 0, "the replica");
}

/// The primary is replaced under load; its successor decides soon, and knows what was spent.
fn switched(how: &str, sentinel: &Sentinel, servers: &[Server], switch: impl FnOnce(SocketAddr) -> SocketAddr) {
    let old = sentinel.master();
    let mut clients: Vec<_> = servers.iter().map(Server::connect).collect();
    let mut passed = vec![0; servers.len()];
    let mut ask = |number: usize, client: &mut Client<TcpStream>| {
        let verdict = client.check(&["kind", "few", "key", &format!("{how}-{number}")]);
        passed[number] += i64::from(verdict.allowed == 1);
        verdict
    };
    for (number, client) in clients.iter_mut().enumerate() {
        until("the limit is spent in Redis", || {
            let verdict = ask(number, client);
            (verdict.allowed, verdict.limit) == (0, FEW)
        });
    }
    // Redis may lose what it had not passed on, and so the replica must have it first.
    sentinel.node_at(old).command(&["WAIT", "1", "5000"]);
    under_load(&format!("a primary under Sentinel {how}"), servers, || {
        let before: Vec<_> = sentinel.nodes().iter().map(|node| node.calls("evalsha")).collect();
        let began = Instant::now();
        let new = switch(old);
        let took = began.elapsed();
        let asked_before = before[sentinel.nodes().iter().position(|node| node.address() == new).unwrap()];
        until("the new primary is asked", || {
            clients.iter_mut().enumerate().for_each(|(number, client)| drop(ask(number, client)));
            assert!(began.elapsed() - took < FOUND, "it has been there for long");
            sentinel.node_at(new).calls("evalsha") > asked_before
        });
        for (number, client) in clients.iter_mut().enumerate() {
            until("it decides", || ask(number, client).limit == FEW);
            assert!(began.elapsed() - took < FOUND, "it has been there for long");
        }
        println!("a primary under Sentinel {how}: the switch took {took:?}, service {:?} more", began.elapsed() - took);
    });
    for (number, client) in clients.iter_mut().enumerate() {
        assert_eq!(ask(number, client).allowed, 0, "spent is spent");
    }
    for (server, passed) in servers.iter().zip(passed) {
        let closings: u64 = sentinel.nodes().iter().map(|node| server.breaker_entered(node.address(), "closed")).sum();
        // Each shard, which is an address, has a breaker and so local buckets of its own.
        let most = FEW + FEW_LOCAL * (2 + closings.cast_signed());
        assert!(passed <= most, "{passed} of one identity passed, at most {most} may");
    }
}
