//! What answers while Redis does not: each failure policy, and buckets in memory that have their size and take no more
//! memory than that. How Redis fails is in `redis_faults`.
#![allow(missing_docs)]
#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test that cannot go on must stop, with the reason")]
#![allow(clippy::print_stdout, reason = "what was measured is shown with --nocapture")]

use sluice_e2e::{Reply, Server, Setup, integers, redis_server::Redis, until};

const POLICY: &str = r#"
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

[[rule]]
name = "closed"
match = { kind = "closed" }
per = ["key"]
limit = { capacity = 5, refill = 1, period = "24h" }
on_failure = "closed"

[[rule]]
name = "open"
match = { kind = "open" }
per = ["key"]
limit = { capacity = 5, refill = 1, period = "24h" }
on_failure = "open"

[[rule]]
name = "of-ten"
match = { kind = "of-ten" }
per = ["key"]
limit = { capacity = 100, refill = 100, period = "1m" }
local = { capacity = 50, refill = 50, period = "1m" }
"#;

fn config(url: &str) -> String {
    format!("[redis]\nurls = [\"{url}\"]\nbreaker = {{ open_ms = 200, calls_min = 10 }}\n")
}

/// Decisions that Redis made, of all rules.
fn by_redis(server: &Server) -> u64 {
    ["load", "few", "closed", "open", "of-ten"]
        .iter()
        .map(|rule| server.metric(&format!("sluice_rule_decisions_total{{rule=\"{rule}\",by=\"redis\"}}")))
        .sum()
}

fn wait_for_redis(server: &Server) {
    let mut client = server.connect();
    until("Redis decides", || {
        let before = by_redis(server);
        client.check(&["kind", "load", "key", "is-it-there"]);
        by_redis(server) > before
    });
}

#[test]
fn each_failure_policy_answers_its_own_way() {
    for setup in Setup::transports() {
        let redis = Redis::start(&[]);
        let server = Server::start(&setup.with(&config(&redis.url())), POLICY);
        wait_for_redis(&server);
        redis.kill();
        let mut client = server.connect();
        let mut ask = |kind: &str, count: usize| -> Vec<i64> {
            (0..count).map(|_| client.check(&["kind", kind, "key", "a"]).allowed).collect()
        };
        assert_eq!(ask("closed", 3), [-1; 3]);
        assert_eq!(ask("open", 8), [1; 8]);
        assert_eq!(ask("few", 3), [1, 1, 0]);
        // One of ten gateways lets half of the limit through, as it is told to.
        assert_eq!(ask("of-ten", 80).iter().filter(|&&allowed| allowed == 1).count(), 50);
        let by = |rule, by| server.metric(&format!("sluice_rule_decisions_total{{rule=\"{rule}\",by=\"{by}\"}}"));
        assert_eq!(
            [by("closed", "closed"), by("open", "open"), by("few", "local"), by("of-ten", "local")],
            [3, 8, 3, 80]
        );
    }
}

#[test]
fn without_limits_of_their_own_local_buckets_have_their_share() {
    let policy = r#"
[[rule]]
name = "shared"
per = ["key"]
limit = { capacity = 100, refill = 100, period = "24h" }

[[override]]
rule = "shared"
identity = ["big"]
limit = { capacity = 200, refill = 200, period = "24h" }

[[override]]
rule = "shared"
identity = ["free"]
exempt = true

[[override]]
rule = "shared"
identity = ["nobody"]
deny = true
"#;
    for setup in Setup::transports() {
        for (throttle_on_failure, first, second) in [("local", 3, 0), ("open", 40, 40), ("closed", 0, 0)] {
            let redis = Redis::start(&[]);
            redis.kill();
            let more = format!("local_share = 0.1\nthrottle_on_failure = \"{throttle_on_failure}\"\n");
            let server = Server::start(&setup.clone().with(&config(&redis.url())).with(&more), policy);
            let mut client = server.connect();
            let mut passed = |key: &str| (0..40).filter(|_| client.check(&["key", key]).allowed == 1).count();
            assert_eq!(["a", "b", "big", "free", "nobody"].map(&mut passed), [10, 10, 20, 40, 0], "{setup:?}");
            // The limit of a throttle call is 30 here.
            let mut passed = |words: &[&str], allowed: i64| {
                (0..40)
                    .filter(|_| match client.ask(words) {
                        Reply::Error(text) => {
                            assert!(throttle_on_failure == "closed" && text.starts_with("UNAVAILABLE"), "{text}");
                            false
                        }
                        reply => integers(&reply)[0] == allowed,
                    })
                    .count()
            };
            assert_eq!(passed(&["THROTTLE", "u", "30", "30", "86400"], 1), first, "{setup:?}, {throttle_on_failure}");
            assert_eq!(
                passed(&["CL.THROTTLE", "u", "29", "30", "86400"], 0),
                first,
                "{setup:?}, {throttle_on_failure}"
            );
            let again = passed(&["THROTTLE", "u", "30", "30", "86400"], 1);
            assert_eq!(again, second, "{setup:?}, {throttle_on_failure}");
        }
    }
}

/// `OUTAGE_IDENTITIES=10000000` for as many as the budget names, which takes a debug build most of ten minutes; the default
/// takes seconds.
#[test]
fn an_outage_takes_no_memory() {
    let identities: usize =
        std::env::var("OUTAGE_IDENTITIES").ok().and_then(|count| count.parse().ok()).unwrap_or(100_000);
    let redis = Redis::start(&[]);
    let server =
        Server::start(&Setup::new("ring").with(&config(&redis.url())).with("[limits]\nbuckets = 20000\n"), POLICY);
    wait_for_redis(&server);
    redis.kill();
    let mut client = server.connect();
    let mut ask = |from: usize, count: usize| {
        for start in (from..from + count).step_by(500) {
            let bytes: Vec<u8> = (start..start + 500)
                .flat_map(|at| sluice_e2e::request(&["CHECK", "kind", "load", "key", &format!("identity-{at}")]))
                .collect();
            client.send(&bytes);
            (0..500).for_each(|_| drop(client.receive().expect("each is answered")));
        }
    };
    let memory = || server.metric("process_resident_memory_bytes");
    ask(0, 20_000);
    let before = memory();
    ask(20_000, identities);
    let after = memory();
    println!("{identities} identities: {before} bytes before, {after} after");
    assert!(after < before + before / 20, "{before} bytes before {identities} identities, {after} after");
}
