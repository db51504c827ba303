//! Measures how fast a change of the policy is live, and what a large policy costs. Ignored, since it measures and asserts
//! little; `perf/results.md` has the figures:
//!
//! `cargo test --release -p sluice-e2e --test policy_store_figures -- --ignored --nocapture --test-threads 1`
#![allow(missing_docs)]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on must stop, with the reason")]
#![allow(clippy::print_stdout, reason = "figures are to be read")]
#![allow(clippy::disallowed_methods, reason = "tests have the system's clock")]

use std::{
    fs,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    time::{Duration, Instant},
};

use serde_json::json;
use sluice_e2e::{Server, Setup, admin::Admin, postgres::Postgres, redis_server::Redis};

const GATEWAYS: usize = 3;
const ANY: &[(&str, &str)] = &[("if-match", "*")];

fn body(capacity: usize) -> String {
    json!({ "per": ["key"], "limit": { "capacity": capacity, "refill": 1, "period": "1m" } }).to_string()
}

fn at(sorted: &[Duration], share: f64) -> f64 {
    let place = ((sorted.len() as f64 * share).ceil() as usize).clamp(1, sorted.len()) - 1;
    sorted[place].as_secs_f64() * 1000.0
}

/// From the answer of the API, which comes after the commit, until each gateway decides by the new limit.
fn until_live(name: &str, admin: &Admin, servers: &[Server], changes: usize, first: usize) {
    let mut times = Vec::new();
    for capacity in first..first + changes {
        let answer = admin.ask("PUT", "/v1/rules/one", ANY, &body(capacity));
        let committed = Instant::now();
        assert_eq!(answer.status, 200, "{answer:?}");
        let each: Vec<Duration> = std::thread::scope(|scope| {
            let wait = |server: &Server| {
                let mut client = server.connect();
                while client.check(&["COST", "0", "key", "a"]).limit.unsigned_abs() != capacity as u64 {
                    std::thread::park_timeout(Duration::from_micros(200));
                }
                committed.elapsed()
            };
            let all: Vec<_> = servers.iter().map(|server| scope.spawn(move || wait(server))).collect();
            all.into_iter().map(|one| one.join().unwrap()).collect()
        });
        times.extend(each);
    }
    times.sort();
    println!("| {name} | {changes} | {:.1} | {:.1} | {:.1} |", at(&times, 0.5), at(&times, 0.99), at(&times, 1.0));
}

#[test]
#[ignore = "measures"]
fn from_commit_to_live() {
    let (postgres, redis) = (Postgres::with_store(), Redis::start(&[]));
    let admin = Admin::start(&postgres, &["--redis", &redis.url()]);
    assert_eq!(admin.ask("PUT", "/v1/rules/one", &[("if-none-match", "*")], &body(1)).status, 200);
    println!("| way | changes | p50 ms | p99 ms | longest ms |\n| --- | ---: | ---: | ---: | ---: |");
    let ways = [
        ("NOTIFY", "redis_channel = \"\"\npoll_ms = 3600000", 300),
        ("Redis Pub/Sub", "notify = false\npoll_ms = 3600000", 300),
        ("both", "poll_ms = 3600000", 300),
        ("poll every 1 s", "notify = false\nredis_channel = \"\"\npoll_ms = 1000", 30),
    ];
    for (number, (name, settings, changes)) in ways.into_iter().enumerate() {
        let config = format!("[postgres]\nurl = {:?}\n{settings}\n", postgres.gateway_url());
        let setup = Setup::new("ring").with(&config).with_redis(&[redis.url()], "deadline_ms = 1000");
        let servers: Vec<Server> = (0..GATEWAYS).map(|_| Server::start_with_store(&setup)).collect();
        for server in &servers {
            server.until("it listens", |server| {
                let pushes = server.status()["policy"]["store"]["pushes"].clone();
                pushes.as_object().unwrap().values().all(|way| way["listening"] == true)
            });
        }
        until_live(name, &admin, &servers, changes, 1000 * (number + 1));
    }
}

fn rss_mb(server: &Server) -> f64 {
    let text = fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<f64>().unwrap() / 1024.0
}

/// Checks, one after the other, while something else happens; the times that they took.
fn meanwhile(server: &Server, work: impl FnOnce()) -> Vec<Duration> {
    let (is_done, mut client) = (AtomicBool::new(false), server.connect());
    std::thread::scope(|scope| {
        let checks = scope.spawn(|| {
            let mut times = Vec::new();
            while !is_done.load(Relaxed) {
                let began = Instant::now();
                client.check(&["path", "/v1/path7", "key", "k3"]);
                times.push(began.elapsed());
            }
            times.sort();
            times
        });
        work();
        is_done.store(true, Relaxed);
        checks.join().unwrap()
    })
}

#[test]
#[ignore = "measures"]
fn a_large_policy() {
    let postgres = Postgres::with_store();
    postgres.put_rules(&[("one", &body(1))]);
    let config = format!("[postgres]\nurl = {:?}\nredis_channel = \"\"\npoll_ms = 3600000\n", postgres.gateway_url());
    let server = Server::start_with_store(&Setup::new("ring").with(&config));
    let show = |what: &str, times: &[Duration], server: &Server| {
        let store = server.status()["policy"]["store"].clone();
        println!(
            "| {what} | {:.0} | {:.0} | {:.1} | {} | {:.3} | {:.3} | {:.3} |",
            store["last_change_fetch_ms"].as_f64().unwrap(),
            store["last_change_compile_ms"].as_f64().unwrap(),
            rss_mb(server),
            times.len(),
            at(times, 0.5),
            at(times, 0.99),
            at(times, 1.0),
        );
    };
    println!("| what | fetch ms | check and compile ms | RSS MB | checks meanwhile | p50 ms | p99 ms | longest ms |");
    println!("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |");
    let times = meanwhile(&server, || std::thread::sleep(Duration::from_secs(3)));
    show("one rule, nothing happens", &times, &server);
    let live = |version: u64| {
        server.until("it is live", |server| server.status()["policy"]["version"] == version);
    };
    let times = meanwhile(&server, || {
        let version = postgres.change(
            "INSERT INTO sluice.rule (name, version, body) SELECT 'r' || n, :version, jsonb_build_object( \
               'match', jsonb_build_object('path', '/v1/path' || n), 'per', jsonb_build_array('key'), \
               'limit', jsonb_build_object('capacity', 100, 'refill', 100, 'period', '1m')) \
             FROM generate_series(1, 10000) AS n;\n\
             INSERT INTO sluice.override (rule, identity, version, body) SELECT 'r' || (n % 10000 + 1), ARRAY['k' || n], \
               :version, '{\"exempt\": true}' FROM generate_series(1, 100000) AS n",
        );
        live(version);
    });
    show("10,000 rules and 100,000 overrides come", &times, &server);
    let times = meanwhile(&server, || std::thread::sleep(Duration::from_secs(3)));
    show("nothing happens", &times, &server);
    let times = meanwhile(&server, || {
        let version = postgres.put_rules(&[("r7", &body(7))]);
        live(version);
    });
    show("one of the rules changes", &times, &server);
}
