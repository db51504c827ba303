//! Real checks over real sockets get the right verdicts.
#![allow(missing_docs)]

use std::sync::Barrier;

use sluice_e2e::{Server, Setup, Verdict, error, integers};

const TEN: &str = r#"
[[rule]]
name = "ten"
match = { path = "/login" }
per = ["key"]
limit = { capacity = 10, refill = 1, period = "1h" }
"#;

#[test]
fn of_eleven_checks_from_four_connections_exactly_ten_pass() {
    for setup in Setup::all() {
        let server = Server::start(&setup, TEN);
        for round in 0..40 {
            let key = format!("key-{round}");
            let barrier = Barrier::new(4);
            let allowed: i64 = std::thread::scope(|scope| {
                let threads: Vec<_> = [3, 3, 3, 2]
                    .map(|checks| {
                        let (mut client, barrier, key) = (server.connect(), &barrier, &key);
                        scope.spawn(move || -> i64 {
                            barrier.wait();
                            (0..checks).map(|_| client.check(&["path", "/login", "key", key]).allowed).sum()
                        })
                    })
                    .into();
                threads.into_iter().map(|thread| thread.join().unwrap()).sum()
            });
            assert_eq!(allowed, 10, "{setup:?}, {key}");
        }
    }
}

#[test]
fn a_verdict_says_what_is_left_and_when_to_come_back() {
    for setup in Setup::transports() {
        let server = Server::start(&setup, TEN);
        let mut client = server.connect();
        let first = client.check(&["path", "/login", "key", "a"]);
        assert_eq!((first.allowed, first.limit, first.remaining, first.retry_after_ms), (1, 10, 9, 0));
        assert!(first.reset_after_ms > 3_599_000 && first.reset_after_ms <= 3_600_000, "{first:?}");
        assert_eq!(first.rule, "ten");
        let rest = client.check(&["COST", "9", "path", "/login", "key", "a"]);
        assert_eq!((rest.allowed, rest.remaining), (1, 0));
        let denied = client.check(&["path", "/login", "key", "a"]);
        assert_eq!((denied.allowed, denied.remaining), (0, 0));
        assert!(denied.retry_after_ms > 3_500_000 && denied.retry_after_ms <= 3_600_000, "{denied:?}");
        let look = client.check(&["COST", "0", "path", "/login", "key", "a"]);
        assert_eq!((look.allowed, look.remaining), (1, 0));
        let never = client.check(&["COST", "11", "path", "/login", "key", "b"]);
        assert_eq!((never.allowed, never.remaining, never.retry_after_ms), (0, 10, -1));
        let unruled = client.check(&["path", "/other", "key", "a"]);
        let nothing =
            Verdict { allowed: 1, limit: -1, remaining: -1, retry_after_ms: 0, reset_after_ms: 0, rule: String::new() };
        assert_eq!(unruled, nothing);
        assert_eq!(client.check(&["path", "/login"]), nothing, "the rule's `per` attribute is missing");
        assert_eq!(server.metric("sluice_checks_unruled_total"), 2);
        assert_eq!(server.metric(r#"sluice_rule_checks_total{rule="ten",reason="denied"}"#), 2);
    }
}

#[test]
fn a_shadow_rule_is_recorded_and_changes_nothing() {
    let policy = r#"
[[rule]]
name = "enforced"
per = ["key"]
limit = { capacity = 3, refill = 1, period = "1h" }
[[rule]]
name = "stricter"
per = ["key"]
limit = { capacity = 1, refill = 1, period = "1h" }
mode = "shadow"
"#;
    for setup in Setup::transports() {
        let server = Server::start(&setup, policy);
        let mut client = server.connect();
        let verdicts: Vec<_> = (0..4).map(|_| client.check(&["key", "a"])).collect();
        assert_eq!(verdicts.iter().map(|verdict| verdict.allowed).collect::<Vec<_>>(), [1, 1, 1, 0]);
        assert!(verdicts.iter().all(|verdict| verdict.rule == "enforced" && verdict.limit == 3));
        let count =
            |rule, reason| server.metric(&format!("sluice_rule_checks_total{{rule=\"{rule}\",reason=\"{reason}\"}}"));
        assert_eq!((count("enforced", "allowed"), count("enforced", "denied")), (3, 1));
        assert_eq!((count("stricter", "shadow_allowed"), count("stricter", "shadow_denied")), (1, 3));
        assert_eq!((count("stricter", "allowed"), count("stricter", "denied")), (0, 0));
    }
}

#[test]
fn all_rules_must_pass_and_a_denied_check_takes_nothing() {
    let policy = r#"
[[rule]]
name = "wide"
per = ["tenant"]
limit = { capacity = 10, refill = 1, period = "1h" }
[[rule]]
name = "narrow"
per = ["key"]
limit = { capacity = 2, refill = 1, period = "1h" }
"#;
    for setup in Setup::transports() {
        let server = Server::start(&setup, policy);
        let mut client = server.connect();
        for expected in [1, 1, 0, 0, 0] {
            let verdict = client.check(&["tenant", "t", "key", "a"]);
            assert_eq!((verdict.allowed, verdict.rule.as_str()), (expected, "narrow"));
        }
        let left = client.check(&["COST", "0", "tenant", "t"]);
        assert_eq!((left.remaining, left.rule.as_str()), (8, "wide"), "the denied checks took nothing");
    }
}

#[test]
fn overrides_expiry_exemption_and_denial() {
    let policy = r#"
[[rule]]
name = "base"
match = { path = "/a" }
per = ["key"]
limit = { capacity = 1, refill = 1, period = "1h" }
[[rule]]
name = "closed"
match = { path = "/closed" }
per = ["key"]
deny = true
[[rule]]
name = "asleep"
match = { path = "/a" }
per = ["key"]
deny = true
mode = "off"
[[override]]
rule = "*"
identity = ["everywhere"]
limit = { capacity = 5, refill = 1, period = "1h" }
[[override]]
rule = "base"
identity = ["special"]
limit = { capacity = 7, refill = 1, period = "1h" }
[[override]]
rule = "*"
identity = ["special"]
exempt = true
[[override]]
rule = "base"
identity = ["expired"]
limit = { capacity = 9, refill = 1, period = "1h" }
expires = "2020-01-01T00:00:00Z"
[[override]]
rule = "base"
identity = ["lasting"]
limit = { capacity = 9, refill = 1, period = "1h" }
expires = "2999-01-01T00:00:00Z"
[[override]]
rule = "base"
identity = ["free"]
exempt = true
"#;
    for setup in Setup::transports() {
        let server = Server::start(&setup, policy);
        let mut client = server.connect();
        let mut limit = |path, key| {
            let verdict = client.check(&["path", path, "key", key]);
            (verdict.allowed, verdict.limit, verdict.rule)
        };
        assert_eq!(limit("/a", "plain"), (1, 1, "base".into()));
        assert_eq!(limit("/a", "everywhere"), (1, 5, "base".into()));
        assert_eq!(limit("/closed", "everywhere"), (1, 5, "closed".into()));
        assert_eq!(limit("/a", "special"), (1, 7, "base".into()), "the rule's own override before the one for all");
        assert_eq!(limit("/closed", "special"), (1, -1, "closed".into()));
        assert_eq!(limit("/a", "expired"), (1, 1, "base".into()));
        assert_eq!(limit("/a", "lasting"), (1, 9, "base".into()));
        assert_eq!(limit("/a", "free"), (1, -1, "base".into()));
        assert_eq!(limit("/closed", "plain"), (0, 0, "closed".into()));
        assert_eq!(server.metric(r#"sluice_rule_checks_total{rule="base",reason="exempt"}"#), 1);
        assert_eq!(server.metric(r#"sluice_rule_checks_total{rule="asleep",reason="denied"}"#), 0);
    }
}

#[test]
fn throttle_commands_answer_as_their_originals() {
    for setup in Setup::transports() {
        let server = Server::start(&setup, TEN);
        let mut client = server.connect();
        // redis-cell: limited, max_burst + 1, remaining, retry after or -1, reset after.
        assert_eq!(integers(&client.ask(&["CL.THROTTLE", "u", "2", "1", "60"])), [0, 3, 2, -1, 60]);
        assert_eq!(integers(&client.ask(&["cl.throttle", "u", "2", "1", "60", "2"])), [0, 3, 0, -1, 180]);
        assert_eq!(integers(&client.ask(&["CL.THROTTLE", "u", "2", "1", "60"])), [1, 3, 0, 60, 180]);
        assert_eq!(integers(&client.ask(&["CL.THROTTLE", "u", "2", "1", "60", "0"])), [0, 3, 0, -1, 180]);
        assert_eq!(integers(&client.ask(&["CL.THROTTLE", "v", "2", "1", "60", "9"])), [1, 3, 3, -1, 0]);
        // throttlecrab: allowed, max_burst, remaining, reset after, retry after; a key of its own.
        assert_eq!(integers(&client.ask(&["THROTTLE", "u", "2", "1", "60"])), [1, 2, 1, 60, 0]);
        assert_eq!(integers(&client.ask(&["THROTTLE", "u", "2", "1", "60"])), [1, 2, 0, 120, 0]);
        assert_eq!(integers(&client.ask(&["THROTTLE", "u", "2", "1", "60"])), [0, 2, 0, 120, 60]);
        assert!(error(&client.ask(&["CL.THROTTLE", "u", "2", "0", "60"])).contains("count must be at least 1"));
        assert!(error(&client.ask(&["THROTTLE", "u"])).contains("wrong number of arguments for 'throttle'"));
        assert_eq!(server.metric("sluice_throttles_allowed_total"), 5);
        assert_eq!(server.metric("sluice_throttles_denied_total"), 3);
    }
}

#[test]
fn the_unix_socket_shares_the_buckets() {
    for setup in Setup::all() {
        let server = Server::start(&setup, TEN);
        let unix = std::os::unix::net::UnixStream::connect(server.unix()).unwrap();
        let mut unix = sluice_e2e::Client::new(unix);
        let mut tcp = server.connect();
        assert_eq!(unix.check(&["path", "/login", "key", "a"]).remaining, 9);
        assert_eq!(tcp.check(&["path", "/login", "key", "a"]).remaining, 8);
        assert_eq!(unix.check(&["path", "/login", "key", "a"]).remaining, 7);
    }
}
