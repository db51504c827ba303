//! How hot keys are met, against a real Redis: rejection cache, leases, split and sampled buckets.
//!
//! Limits that do not refill while a test runs, so that every token can be accounted for.
#![allow(missing_docs)]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on must stop, with the reason")]

use std::{net::TcpStream, time::Duration};

use sluice_e2e::{Client, Server, Setup, Verdict, redis_cluster::Cluster, redis_server::Redis, request, until};

fn policy(hot: &str) -> String {
    format!(
        "[[rule]]\nname = \"r\"\nper = [\"key\"]\nlimit = {{ capacity = 100, refill = 1, period = \"24h\" }}\nhot = {{ {hot} }}\n"
    )
}

/// A deadline that a busy machine keeps: what is tested here is that Redis decides.
const PATIENT: &str = "deadline_ms = 1000\nbreaker = { calls_min = 1000000 }\n";

fn gateway(setup: &Setup, redis: &Redis, policy: &str, more: &str) -> Server {
    let server = Server::start(&setup.clone().with(more).with_redis(&[redis.url()], PATIENT), policy);
    until("every core is connected", || server.redis_events("connected") >= setup.cores as u64);
    server
}

/// Checks of one key in one write, and how many passed.
fn pipeline(client: &mut Client<TcpStream>, key: &str, count: usize) -> usize {
    client.send(&request(&["CHECK", "key", key]).repeat(count));
    (0..count).filter(|_| Verdict::of(&client.receive().unwrap()).allowed == 1).count()
}

#[test]
fn an_empty_bucket_is_asked_for_once() {
    for setup in Setup::all() {
        let redis = Redis::start(&[]);
        let server = gateway(&setup, &redis, &policy("lease = \"off\""), "");
        let mut clients: Vec<_> = (0..3).map(|_| server.connect()).collect();
        assert_eq!(pipeline(&mut clients[0], "a", 300), 100);
        let calls = redis.calls("evalsha");
        for client in &mut clients {
            assert_eq!(pipeline(client, "a", 1_000), 0, "{setup:?}");
        }
        assert_eq!(redis.calls("evalsha"), calls, "{setup:?}: all cores know");
        assert_eq!(server.decisions("r", "rejection"), 3_000, "{setup:?}");
        // It is known by its limit, so another one frees it at once.
        server.write_policy(&policy("lease = \"off\"").replace("capacity = 100", "capacity = 101"));
        server.until("the new limit is in force", |_| clients[0].check(&["key", "a"]).limit == 101);
        assert!(redis.calls("evalsha") > calls, "{setup:?}");
    }
}

#[test]
fn gateways_that_lease_admit_exactly_the_limit_together() {
    for setup in Setup::all() {
        let redis = Redis::start(&[]);
        let gateways: Vec<_> =
            (0..3).map(|_| gateway(&setup, &redis, &policy("lease = 20"), "[hot]\nlease_quiet_ms = 200\n")).collect();
        let mut clients: Vec<_> = gateways.iter().map(Server::connect).collect();
        let mut passed = 0;
        // What one gateway holds the others do not find, until it is given back.
        until("the limit is spent", || {
            passed += clients.iter_mut().map(|client| pipeline(client, "a", 10)).sum::<usize>();
            std::thread::park_timeout(Duration::from_millis(20));
            passed >= 100
        });
        std::thread::park_timeout(Duration::from_millis(500));
        passed += clients.iter_mut().map(|client| pipeline(client, "a", 50)).sum::<usize>();
        assert_eq!(passed, 100, "{setup:?}");
        let leased: u64 = gateways.iter().map(|server| server.decisions("r", "lease")).sum();
        assert!(leased >= 10, "{setup:?}: {leased} were paid from leases");
    }
}

#[test]
fn a_lease_goes_back_when_it_is_quiet_when_the_policy_changes_and_at_the_end() {
    for setup in Setup::all() {
        let redis = Redis::start(&[]);
        let witness = gateway(&setup, &redis, &policy("lease = \"off\""), "");
        let mut look = witness.connect();
        let mut left = |key: &str| look.check(&["COST", "0", "key", key]).remaining;
        let mut quiet = gateway(&setup, &redis, &policy("lease = 50"), "[hot]\nlease_quiet_ms = 300\n");
        assert_eq!(quiet.connect().check(&["key", "a"]).allowed, 1);
        assert_eq!(left("a"), 49, "{setup:?}: it is taken in advance");
        until("it is given back", || left("a") == 99);
        assert_eq!((quiet.metric("sluice_leases"), quiet.metric("sluice_lease_tokens")), (0, 0), "{setup:?}");

        let mut patient = gateway(&setup, &redis, &policy("lease = 50"), "[hot]\nlease_quiet_ms = 3600000\n");
        for key in ["b", "c"] {
            assert_eq!(patient.connect().check(&["key", key]).allowed, 1);
            assert_eq!(left(key), 49, "{setup:?}");
        }
        assert_eq!((patient.metric("sluice_leases"), patient.metric("sluice_lease_tokens")), (2, 100), "{setup:?}");
        assert_eq!(patient.status()["store"]["lease_tokens"], 100, "{setup:?}");
        patient.write_policy(&policy("lease = 51"));
        until("a changed policy gives it back", || left("b") == 99 && left("c") == 99);
        assert_eq!(patient.connect().check(&["key", "d"]).allowed, 1);
        assert_eq!(left("d"), 48, "{setup:?}");
        for server in [&mut quiet, &mut patient] {
            server.signal("TERM");
            assert!(server.wait().success());
        }
        assert_eq!(left("d"), 99, "{setup:?}: whoever leaves gives back");
    }
}

#[test]
fn a_hot_key_is_leased_by_itself() {
    for setup in Setup::all() {
        let redis = Redis::start(&[]);
        let policy = "[[rule]]\nname = \"r\"\nper = [\"key\"]\n\
                      limit = { capacity = 1000000, refill = 1000000, period = \"1s\" }\n";
        let server = gateway(&setup, &redis, policy, "[hot]\nlease_auto_above = 100\n");
        let mut client = server.connect();
        until("its checks are paid from a lease", || {
            assert_eq!(pipeline(&mut client, "a", 200), 200, "{setup:?}");
            server.decisions("r", "lease") > 1_000
        });
        let (calls, by_lease) = (redis.calls("evalsha"), server.decisions("r", "lease"));
        (0..20).for_each(|_| assert_eq!(pipeline(&mut client, "a", 100), 100));
        assert_eq!(server.decisions("r", "lease") - by_lease, 2_000, "{setup:?}: all of them");
        assert!(redis.calls("evalsha") - calls < 200, "{setup:?}");
    }
}

#[test]
fn one_customer_is_split_over_all_shards_and_the_others_are_not() {
    for setup in Setup::transports() {
        let cluster = Cluster::start(3, 0);
        let policy = policy("lease = \"off\"")
            + "[[override]]\nrule = \"r\"\nidentity = [\"big\"]\n\
               limit = { capacity = 1000, refill = 1, period = \"24h\" }\nhot = { split = 30 }\n";
        let server = Server::start(&setup.clone().with_redis(&cluster.urls(), PATIENT), &policy);
        let mut client = server.connect();
        until("every shard is connected", || server.redis_events("connected") >= 3);
        let calls = || cluster.nodes().iter().map(|node| node.calls("evalsha")).collect::<Vec<_>>();
        let before = calls();
        let passed = pipeline(&mut client, "big", 5_000);
        assert!((900..=1000).contains(&passed), "{setup:?}: {passed} of 1000");
        assert!(calls().iter().zip(&before).all(|(after, before)| after > before), "{setup:?}: {:?}", calls());
        let before = calls();
        assert_eq!(pipeline(&mut client, "small", 200), 100, "{setup:?}");
        let asked = calls().iter().zip(&before).filter(|(after, before)| after > before).count();
        assert_eq!(asked, 1, "{setup:?}: its bucket is one");
    }
}

#[test]
fn one_check_in_ten_is_asked_for_all_of_them() {
    for setup in Setup::transports() {
        let redis = Redis::start(&[]);
        let server = gateway(&setup, &redis, &policy("sample = 10"), "");
        let mut client = server.connect();
        let passed: usize = (0..50).map(|_| pipeline(&mut client, "a", 20)).sum();
        assert!((40..=250).contains(&passed), "{setup:?}: {passed} of 100");
        assert!(redis.calls("evalsha") <= server.decisions("r", "redis"), "{setup:?}: those of a wake-up go together");
        let [asked, unasked, rejected] = ["redis", "sample", "rejection"].map(|by| server.decisions("r", by));
        assert!(
            (10..=60).contains(&asked),
            "{setup:?}: {asked} of 1000 were asked, {unasked} not, {rejected} rejected"
        );
        assert!(unasked > 20 && rejected > 500, "{setup:?}: {asked} were asked, {unasked} not, {rejected} rejected");
    }
}
