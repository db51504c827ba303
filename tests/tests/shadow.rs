//! What shadow rules would have done, from checks on several gateways to the report of the admin API: exact totals, exact
//! identities, and what happens while the policy store is away.
#![allow(missing_docs)]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on must stop, with the reason")]

use serde_json::{Value, json};
use sluice_e2e::{Server, Setup, admin::Admin, postgres::Postgres, redis_server::Redis, until};

const NEW: &[(&str, &str)] = &[("if-none-match", "*")];
const ANY: &[(&str, &str)] = &[("if-match", "*")];
/// How many times each identity asks, of a limit of 50.
const TRAFFIC: [(&str, u64); 4] = [("calm", 20), ("even", 50), ("busy", 60), ("flood", 120)];

/// A rule whose buckets do not refill while a test runs.
fn body(capacity: u64, mode: &str) -> String {
    json!({ "per": ["key"], "limit": { "capacity": capacity, "refill": 1, "period": "720h" }, "mode": mode })
        .to_string()
}

fn gateway(postgres: &Postgres, redis: Option<&Redis>, more: &str) -> Server {
    let config = format!(
        "[postgres]\nurl = {:?}\npoll_ms = 3600000\nredis_channel = \"\"\nconnect_timeout_ms = 500\ndeadline_ms = 500\n\
         [shadow]\nflush_ms = 100\n{more}\n",
        postgres.gateway_url()
    );
    let setup = Setup { cores: 2, ..Setup::new("ring") }.with(&config);
    match redis {
        Some(redis) => Server::start_with_store(&setup.with_redis(&[redis.url()], "deadline_ms = 1000")),
        None => Server::start_with_store(&setup),
    }
}

/// Everybody asks, in turn at each gateway; returns how many checks were denied.
fn traffic(servers: &[Server]) -> u64 {
    let mut clients: Vec<_> = servers.iter().map(Server::connect).collect();
    let mut denied = 0;
    for (key, times) in TRAFFIC {
        for turn in 0..times as usize {
            let at = turn % clients.len();
            denied += u64::from(clients[at].check(&["key", key]).allowed == 0);
        }
    }
    denied
}

fn report(admin: &Admin) -> Value {
    admin.get("/v1/shadow?rule=tight").json()["rules"].clone()
}

/// The report once it has so many checks.
fn report_of(admin: &Admin, checks: u64) -> Value {
    until("the report is complete", || {
        report(admin).as_array().unwrap().iter().map(|rule| rule["checks"].as_u64().unwrap()).sum::<u64>() >= checks
    });
    report(admin)
}

/// `identity`, `denied`, `checks` of each.
fn identities(rule: &Value) -> Vec<(String, u64, u64)> {
    let of = |one: &Value| {
        (one["identity"].as_str().unwrap().to_owned(), one["denied"].as_u64().unwrap(), one["checks"].as_u64().unwrap())
    };
    rule["identities"].as_array().unwrap().iter().map(of).collect()
}

fn expected() -> Vec<(String, u64, u64)> {
    let mut all: Vec<_> =
        TRAFFIC.iter().map(|(key, times)| (format!("key={key}"), times.saturating_sub(50), *times)).collect();
    all.sort_by_key(|(name, denied, checks)| (std::cmp::Reverse((*denied, *checks)), name.clone()));
    all
}

#[test]
fn a_tighter_limit_is_tried_in_shadow_and_then_denies_exactly_whom_the_report_named() {
    let (postgres, redis) = (Postgres::with_store(), Redis::start(&[]));
    let admin = Admin::start(&postgres, &[]);
    assert_eq!(admin.ask("PUT", "/v1/rules/wide", NEW, &body(100_000, "enforce")).status, 200);
    assert_eq!(admin.ask("PUT", "/v1/rules/tight", NEW, &body(50, "shadow")).status, 200);
    let servers: Vec<Server> = (0..3).map(|_| gateway(&postgres, Some(&redis), "")).collect();
    servers.iter().for_each(|server| server.until("Redis is there", |server| server.redis_events("connected") >= 1));
    assert_eq!(traffic(&servers), 0, "a shadow rule never denies");
    let all: u64 = TRAFFIC.iter().map(|(_, times)| times).sum();
    let found = report_of(&admin, all);
    assert_eq!(
        (&found[0]["rule_version"], &found[0]["checks"], &found[0]["denied"]),
        (&json!(2), &json!(all), &json!(80))
    );
    assert_eq!(found[0]["denied_pct"], 32.0);
    assert_eq!(identities(&found[0]), expected());
    let flood = &found[0]["identities"][0];
    assert!(flood["first_seen"].as_str().unwrap() <= flood["last_seen"].as_str().unwrap());
    assert!(admin.printed(&["shadow"]).contains("would have denied 80 of 250 checks (32.0 %)"));
    // Nobody is denied more or less once it enforces: the same traffic on buckets that are full again, at gateways that do not
    // remember which were empty.
    let number = admin.ask("PUT", "/v1/rules/tight", ANY, &body(50, "enforce")).json()["version"].clone();
    for server in &servers {
        server.until("it enforces", |server| server.status()["policy"]["version"] == number);
    }
    drop(servers);
    redis.command(&["FLUSHALL"]);
    let servers: Vec<Server> = (0..3).map(|_| gateway(&postgres, Some(&redis), "")).collect();
    servers.iter().for_each(|server| server.until("Redis is there", |server| server.redis_events("connected") >= 1));
    assert_eq!(traffic(&servers), 80);
    for (key, times) in TRAFFIC {
        let denied = servers[0].connect().check(&["COST", "1", "key", key]).allowed == 0;
        assert_eq!(denied, times >= 50, "{key}");
    }
    assert_eq!(report(&admin)[0]["checks"], all, "what enforces is in no shadow");
}

#[test]
fn counts_in_memory_give_the_same_report_and_a_changed_rule_begins_anew() {
    let postgres = Postgres::with_store();
    let admin = Admin::start(&postgres, &[]);
    assert_eq!(admin.ask("PUT", "/v1/rules/tight", NEW, &body(50, "shadow")).status, 200);
    let servers = [gateway(&postgres, None, "")];
    assert_eq!(traffic(&servers), 0);
    let found = report_of(&admin, 250);
    assert_eq!(identities(&found[0]), expected());
    // The buckets are empty; a lower limit is another version of the rule.
    let number = admin.ask("PUT", "/v1/rules/tight", ANY, &body(40, "shadow")).json()["version"].clone();
    servers[0].until("it has it", |server| server.status()["policy"]["version"] == number);
    assert_eq!(traffic(&servers), 0);
    let found = report_of(&admin, 500);
    assert_eq!((&found[0]["rule_version"], &found[0]["checks"]), (&number, &json!(250)));
    assert_eq!((&found[1]["rule_version"], &found[1]["denied"]), (&json!(1), &json!(80)));
}

#[test]
fn nothing_is_lost_or_counted_twice_while_the_store_is_away_or_when_a_gateway_leaves() {
    let postgres = Postgres::with_store();
    let admin = Admin::start(&postgres, &[]);
    assert_eq!(admin.ask("PUT", "/v1/rules/tight", NEW, &body(50, "shadow")).status, 200);
    let mut servers = [gateway(&postgres, None, "")];
    postgres.freeze();
    traffic(&servers);
    let shadow = |server: &Server, field: &str| server.status()["policy"]["store"]["shadow"][field].clone();
    servers[0].until("it says so", |server| shadow(server, "problem").is_string());
    postgres.thaw();
    report_of(&admin, 250);
    servers[0].until("it is good again", |server| shadow(server, "problem").is_null());
    postgres.kill();
    traffic(&servers);
    servers[0].until("it says so", |server| shadow(server, "problem").is_string());
    postgres.restart();
    report_of(&admin, 500);
    assert!(servers[0].metric("sluice_shadow_batches_total{outcome=\"failed\"}") >= 2);
    // What was counted last leaves with it.
    traffic(&servers);
    servers[0].signal("TERM");
    assert!(servers[0].wait().success());
    let found = report(&admin);
    assert_eq!(found[0]["checks"], 750, "{found}");
    let checks: u64 = identities(&found[0]).iter().map(|(.., checks)| checks).sum();
    assert_eq!(checks, 750);
}

#[test]
fn secret_identities_leave_as_a_keyed_hash() {
    let postgres = Postgres::with_store();
    let admin = Admin::start(&postgres, &[]);
    assert_eq!(admin.ask("PUT", "/v1/rules/tight", NEW, &body(50, "shadow")).status, 200);
    let folder = tempfile::tempdir().unwrap();
    let key = folder.path().join("key");
    std::fs::write(&key, "a key\n").unwrap();
    let servers = [gateway(&postgres, None, &format!("identity_key_file = {:?}", key.display()))];
    traffic(&servers);
    let found = report_of(&admin, 250);
    let names: Vec<_> = identities(&found[0]).into_iter().map(|(name, denied, _)| (name, denied)).collect();
    assert!(names.iter().all(|(name, _)| name.starts_with("hmac:") && name.len() == 37), "{names:?}");
    assert_eq!(names.iter().map(|(_, denied)| denied).sum::<u64>(), 80);
    assert!(!postgres.sql("SELECT * FROM sluice.shadow_identity").contains("flood"));
}
