//! One limit, shared through Redis: by two gateways, by all cores, by every command, and exactly.
#![allow(missing_docs)]
#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test that cannot go on must stop, with the reason")]

use sluice_e2e::{
    Reply, Server, Setup, integers,
    load::{Load, Question},
    redis_server::Redis,
    request, until,
};

const POLICY: &str = r#"
[[rule]]
name = "shared"
match = { kind = "shared" }
per = ["key"]
limit = { capacity = 100, refill = 1, period = "24h" }

[[rule]]
name = "both"
match = { kind = "both" }
per = ["ip"]
limit = { capacity = 3, refill = 1, period = "24h" }

[[rule]]
name = "both-key"
match = { kind = "both" }
per = ["key"]
limit = { capacity = 1000, refill = 1, period = "24h" }

[[rule]]
name = "watched"
match = { kind = "watched" }
per = ["key"]
mode = "shadow"
limit = { capacity = 2, refill = 1, period = "24h" }

[[override]]
rule = "shared"
identity = ["big"]
limit = { capacity = 200, refill = 1, period = "24h" }

[[override]]
rule = "shared"
identity = ["hotter"]
limit = { capacity = 1000, refill = 1, period = "24h" }

[[override]]
rule = "shared"
identity = ["free"]
exempt = true
"#;

fn gateway(setup: &Setup, redis: &Redis) -> Server {
    gateway_under(POLICY, setup, redis)
}

fn gateway_under(policy: &str, setup: &Setup, redis: &Redis) -> Server {
    // A deadline that a busy machine keeps: what is tested here is that Redis decides.
    let server = Server::start(
        &setup.clone().with(&format!("[redis]\nurls = [\"{}\"]\ndeadline_ms = 1000\n", redis.url())),
        policy,
    );
    let connected = "sluice_redis_events_total{event=\"connected\"}";
    until("every core is connected", || server.metric(connected) >= setup.cores as u64);
    server
}

/// Asks from four connections of each server at once; returns how many passed.
fn passed(servers: &[&Server], each: usize, words: &[&str]) -> usize {
    let ask = |server: &Server| {
        let mut client = server.connect();
        let bytes = request(&[&["CHECK"], words].concat()).repeat(each);
        client.send(&bytes);
        (0..each).filter(|_| is_allowed(&client.receive().expect("a reply"))).count()
    };
    std::thread::scope(|scope| {
        let askers: Vec<_> =
            servers.iter().flat_map(|&server| (0..4).map(move |_| scope.spawn(move || ask(server)))).collect();
        askers.into_iter().map(|asker| asker.join().expect("an asker")).sum()
    })
}

fn is_allowed(reply: &Reply) -> bool {
    matches!(reply, Reply::Array(values) if values.first() == Some(&Reply::Integer(1)))
}

#[test]
fn two_gateways_together_let_exactly_the_limit_through() {
    for setup in Setup::all() {
        let redis = Redis::start(&[]);
        let servers = [gateway(&setup, &redis), gateway(&setup, &redis)];
        let both = [&servers[0], &servers[1]];
        assert_eq!(passed(&both, 50, &["kind", "shared", "key", "a"]), 100, "{setup:?}");
        assert_eq!(passed(&both, 50, &["kind", "shared", "key", "big"]), 200, "{setup:?}");
        assert_eq!(passed(&both, 50, &["kind", "shared", "key", "free"]), 400, "{setup:?}");
        assert_eq!(passed(&both, 10, &["COST", "30", "kind", "shared", "key", "c"]), 3, "{setup:?}");
    }
}

#[test]
fn two_gateways_under_load_let_exactly_each_limit_through() {
    const IDENTITIES: usize = 10;
    for setup in Setup::all() {
        let redis = Redis::start(&[]);
        let servers = [gateway(&setup, &redis), gateway(&setup, &redis)];
        let loads = servers.each_ref().map(|server| {
            Load::asking(server, 3, |number| {
                let identity = number as usize % IDENTITIES;
                Question::new(identity, &["kind", "shared", "key", &format!("id-{identity}")]).about("shared")
            })
        });
        // Each alone asks for more than all limits together.
        loads.iter().for_each(|load| load.wait_for(150));
        let tallies = loads.map(Load::stop);
        for identity in 0..IDENTITIES {
            let allowed: u64 = tallies.iter().map(|tally| tally.class(identity).allowed).sum();
            assert_eq!(allowed, 100, "{setup:?}, identity {identity}");
        }
        let both = tallies.iter().all(|tally| tally.allowed > 50);
        assert!(both, "{setup:?}: one gateway had it all: {} and {}", tallies[0], tallies[1]);
    }
}

#[test]
fn throttle_calls_at_once_through_two_gateways_are_exact() {
    for setup in Setup::all() {
        let redis = Redis::start(&[]);
        let servers = [gateway(&setup, &redis), gateway(&setup, &redis)];
        for (command, allowed, capacity) in [("THROTTLE", 1, 60), ("CL.THROTTLE", 0, 61)] {
            let ask = |server: &Server| {
                let mut client = server.connect();
                client.send(&request(&[command, "crowd", "60", "1", "86400"]).repeat(40));
                let passed = |reply: &Reply| integers(reply)[0] == allowed;
                (0..40).filter(|_| passed(&client.receive().expect("a reply"))).count()
            };
            let passed: usize = std::thread::scope(|scope| {
                let askers: Vec<_> = (0..4)
                    .map(|at| {
                        let server = &servers[at % 2];
                        scope.spawn(move || ask(server))
                    })
                    .collect();
                askers.into_iter().map(|asker| asker.join().expect("an asker")).sum()
            });
            assert_eq!(passed, capacity, "{setup:?}, {command}");
        }
    }
}

#[test]
fn a_hot_key_is_counted_exactly_with_few_calls() {
    for setup in Setup::transports() {
        let redis = Redis::start(&[]);
        let server = gateway(&setup, &redis);
        let before = redis.calls("evalsha");
        assert_eq!(passed(&[&server], 500, &["kind", "shared", "key", "hot"]), 100);
        let calls = redis.calls("evalsha") - before;
        assert!(calls < 500, "{calls} calls for 2,000 checks");
        // A thousand of these are granted: what saves the calls is that many checks share one.
        let before = redis.calls("evalsha");
        assert_eq!(passed(&[&server], 500, &["kind", "shared", "key", "hotter"]), 1000);
        let calls = redis.calls("evalsha") - before;
        assert!(calls < 500, "{calls} calls for 2,000 checks");
    }
}

#[test]
fn a_check_that_one_identity_denies_takes_nothing_from_the_other() {
    for setup in Setup::transports() {
        let redis = Redis::start(&[]);
        let server = gateway(&setup, &redis);
        assert_eq!(passed(&[&server], 25, &["kind", "both", "ip", "1", "key", "k"]), 3);
        let mut client = server.connect();
        let left = |client: &mut sluice_e2e::Client<_>| {
            // Of another address, so that only the key's bucket is tight.
            client.check(&["COST", "0", "kind", "both", "ip", "2", "key", "k"])
        };
        let level = || match redis.command(&["EXISTS", "rl:{key=k}:both-key"]) {
            Reply::Integer(exists) => exists,
            other => panic!("{other:?}"),
        };
        assert_eq!((left(&mut client).allowed, level()), (1, 1));
        // What was taken for the denied ones came back: 997 are left, and one check can have them all.
        until("everything is back", || {
            client.check(&["COST", "997", "kind", "both-probe", "key", "k"]);
            let verdict = client.check(&["COST", "0", "kind", "both", "ip", "3", "key", "k"]);
            verdict.allowed == 1
        });
        let key = ["kind", "both", "ip", "9", "key", "k"];
        let verdict = client.check(&[&["COST", "3"], &key[..]].concat());
        assert_eq!(verdict.allowed, 1, "{verdict:?}");
    }
}

#[test]
fn throttle_calls_are_shared_too() {
    for setup in Setup::transports() {
        let redis = Redis::start(&[]);
        let servers = [gateway(&setup, &redis), gateway(&setup, &redis)];
        let mut clients = servers.each_ref().map(Server::connect);
        let integers = |reply: Reply| match reply {
            Reply::Array(values) => {
                values.iter().map(|value| if let Reply::Integer(n) = value { *n } else { -9 }).collect::<Vec<_>>()
            }
            other => panic!("{other:?}"),
        };
        for (command, allowed, capacity) in [("THROTTLE", 1, 4), ("CL.THROTTLE", 0, 5)] {
            let mut answers = Vec::new();
            for at in 0..8 {
                answers.push(integers(clients[at % 2].ask(&[command, "user", "4", "1", "3600"]))[0]);
            }
            assert_eq!(answers.iter().filter(|&&answer| answer == allowed).count(), capacity, "{command}: {answers:?}");
        }
    }
}

#[test]
fn shadow_rules_are_counted_behind_the_answer() {
    for setup in Setup::transports() {
        let redis = Redis::start(&[]);
        let server = gateway(&setup, &redis);
        assert_eq!(passed(&[&server], 5, &["kind", "watched", "key", "w"]), 20);
        let counted =
            |reason: &str| server.metric(&format!("sluice_rule_checks_total{{rule=\"watched\",reason=\"{reason}\"}}"));
        until("all are recorded", || counted("shadow_allowed") + counted("shadow_denied") == 20);
        assert_eq!(counted("shadow_allowed"), 2);
    }
}

/// The settings for a Redis.
type Written = fn(&Redis) -> String;

#[test]
fn by_socket_with_tls_with_passwords_and_as_a_function() {
    for setup in Setup::transports() {
        let secret = ["--requirepass", "s3cr:et/"];
        let cases: [(Redis, Written); 4] = [
            (Redis::start(&[]), |redis| format!("urls = [\"unix://{}\"]\n", redis.unix_socket().display())),
            (Redis::start_tls(), |redis| {
                format!("urls = [\"{}\"]\nca_file = \"{}\"\n", redis.url(), redis.ca_file().display())
            }),
            (Redis::start(&secret), |redis| format!("urls = [\"redis://:s3cr%3Aet%2F@{}\"]\n", redis.address())),
            (Redis::start(&[]), |redis| format!("urls = [\"{}/2\"]\nfunctions = true\n", redis.url())),
        ];
        for (redis, urls) in cases {
            let config = format!("[redis]\ndeadline_ms = 1000\n{}", urls(&redis));
            let server = Server::start(&setup.clone().with(&config), POLICY);
            let connected = "sluice_redis_events_total{event=\"connected\"}";
            until("it is connected", || server.metric(connected) >= 1);
            assert_eq!(passed(&[&server], 50, &["kind", "shared", "key", "a"]), 100, "{config}");
            let by_redis = "sluice_rule_decisions_total{rule=\"shared\",by=\"redis\"}";
            assert_eq!(server.metric(by_redis), 200, "{config}");
            for page in ["/metrics", "/v1/status"] {
                let text = server.get(page).1;
                assert!(!text.contains("s3cr"), "{page} shows the password: {text}");
            }
        }
    }
}

/// Checks that wait for Redis are under the policy that they came under.
#[test]
fn reload_under_load_loses_no_reply() {
    let policy = |version: u64| {
        format!(
            r#"
[[rule]]
name = "tight-{version}"
per = ["key"]
limit = {{ capacity = {tight}, refill = 1000000, period = "1ms" }}
[[rule]]
name = "wide-{version}"
per = ["tenant"]
limit = {{ capacity = 2000000, refill = 1000000, period = "1ms" }}
"#,
            tight = 1_000_000 + version
        )
    };
    for setup in Setup::all() {
        let redis = Redis::start(&[]);
        let server = gateway_under(&policy(0), &setup, &redis);
        // Its ECHOs show that each check is answered once and in its place.
        let load = Load::asking(&server, 4, |number| {
            Question::new(0, &["key", &format!("key-{}", number % 16), "tenant", &format!("tenant-{}", number % 4)])
        });
        for version in 1..=10 {
            server.write_policy(&policy(version));
            server.until("the policy is in force", |server| {
                server.status()["policy"]["version"].as_u64() == Some(version + 1)
            });
            load.wait_for(10);
        }
        let verdict = server.connect().check(&["key", "a", "tenant", "t"]);
        assert_eq!((verdict.limit, verdict.rule.as_str()), (1_000_010, "tight-10"), "{setup:?}");
        let tally = load.stop();
        assert_eq!((tally.denied, tally.unavailable), (0, 0), "{setup:?}: {tally}");
    }
}
