//! A Redis Cluster behind a server on each transport: identities spread over the shards, slots that move, nodes that come
//! and go. Every change happens under load.
#![allow(missing_docs)]
#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test that cannot go on must stop, with the reason")]
#![allow(clippy::disallowed_methods, reason = "tests wait for real processes")]
#![allow(clippy::print_stdout, reason = "what was measured is shown with --nocapture")]

use std::{
    net::{SocketAddr, TcpStream},
    ops::Range,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use sluice_e2e::{
    Client, Server, Setup, Verdict,
    load::under_load,
    redis_cluster::Cluster,
    redis_server::{Redis, free_port},
    request, until,
};

/// No limit comes back while a test runs. Where Redis decides and where the failure policy does, shows in the limit that a
/// verdict names.
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

[[rule]]
name = "many"
match = { kind = "many" }
per = ["key"]
limit = { capacity = 300, refill = 1, period = "24h" }
local = { capacity = 1, refill = 1, period = "24h" }

[[rule]]
name = "short"
match = { kind = "two" }
per = ["key"]
limit = { capacity = 4, refill = 1, period = "24h" }
local = { capacity = 2, refill = 1, period = "24h" }

[[rule]]
name = "long"
match = { kind = "two" }
per = ["key"]
limit = { capacity = 40, refill = 1, period = "24h" }

[[rule]]
name = "mine"
match = { kind = "apart" }
per = ["key"]
limit = { capacity = 3, refill = 1, period = "24h" }
on_failure = "closed"

[[rule]]
name = "ours"
match = { kind = "apart" }
per = ["tenant"]
limit = { capacity = 100, refill = 1, period = "24h" }

[[rule]]
name = "shut"
match = { kind = "shut" }
per = ["key"]
limit = { capacity = 10, refill = 1, period = "24h" }
on_failure = "closed"
"#;

/// What `few` lets through by Redis, and what it lets through each time that a server is on its own.
const FEW: i64 = 10;
const FEW_LOCAL: i64 = 2;
/// What `many` lets through.
const MANY: i64 = 300;

/// More checks than that.
const ENOUGH: usize = 350;

/// For tests of what Redis decides: a busy machine keeps it.
const PATIENT: &str = "deadline_ms = 1000";
/// For tests of what happens without Redis. The deadline is ten times the default, so that a busy machine alone does not
/// make half of the calls of a shard that is well fail.
const BRISK: &str = "deadline_ms = 50\nbreaker = { open_ms = 300, calls_min = 10, probes = 2 }";

/// A server on each transport that knows these nodes.
fn servers(urls: &[String], settings: &str) -> Vec<Server> {
    let servers: Vec<_> =
        Setup::transports().into_iter().map(|setup| Server::start(&setup.with_redis(urls, settings), POLICY)).collect();
    for server in &servers {
        for shard in 0..3 {
            wait_for_redis(server, &keys_of(shard, "is-it-there").next().unwrap());
        }
    }
    servers
}

fn wait_for_redis(server: &Server, key: &str) {
    let mut client = server.connect();
    until("Redis decides", || look(&mut client, key).limit == FEW);
}

/// The slot of the identity `key=<key>`.
fn slot_of(key: &str) -> u16 {
    Cluster::slot_of(&format!("rl:{{key={key}}}:"))
}

/// The slots of a shard of three, as the rig shares them out.
fn slots_of(shard: u16) -> Range<u16> {
    let border = |shard: u16| u32::from(shard) * 16_384 / 3;
    border(shard) as u16..border(shard + 1) as u16
}

/// Keys whose identity is in a shard.
fn keys_of(shard: u16, prefix: &str) -> impl Iterator<Item = String> {
    let slots = slots_of(shard);
    (0..).map(move |number| format!("{prefix}-{number}")).filter(move |key| slots.contains(&slot_of(key)))
}

/// A tenant whose identity is in a shard.
fn tenant_of(shard: u16, prefix: &str) -> String {
    let is_there = |tenant: &String| slots_of(shard).contains(&Cluster::slot_of(&format!("rl:{{tenant={tenant}}}:")));
    (0..).map(|number| format!("{prefix}-{number}")).find(is_there).unwrap()
}

/// Keys whose identity is in a slot.
fn keys_in(slot: u16, prefix: &str) -> impl Iterator<Item = String> {
    (0..).map(move |number| format!("{prefix}-{number}")).filter(move |key| slot_of(key) == slot)
}

fn few(client: &mut Client<TcpStream>, key: &str) -> Verdict {
    client.check(&["kind", "few", "key", key])
}

/// What the bucket holds. Once Redis has said that it is empty no check that takes something goes there, but a look does.
fn look(client: &mut Client<TcpStream>, key: &str) -> Verdict {
    client.check(&["COST", "0", "kind", "few", "key", key])
}

/// Sends checks in one write; returns their verdicts.
fn pipeline(client: &mut Client<TcpStream>, checks: &[Vec<&str>]) -> Vec<Verdict> {
    let bytes: Vec<u8> = checks.iter().flat_map(|words| request(&[&["CHECK"], &words[..]].concat())).collect();
    client.send(&bytes);
    checks.iter().map(|_| Verdict::of(&client.receive().expect("a reply to each"))).collect()
}

fn passed(verdicts: &[Verdict]) -> i64 {
    verdicts.iter().map(|verdict| i64::from(verdict.allowed == 1)).sum()
}

fn calls(cluster: &Cluster) -> Vec<u64> {
    cluster.nodes().iter().map(|node| if node.is_up() { node.calls("evalsha") } else { 0 }).collect()
}

/// Asks for one identity of `many` over each server while something happens, and on until the last one had enough.
/// Returns how many passed, and what limits the verdicts named.
fn hammer(servers: &[Server], key: &str, act: impl FnOnce()) -> (i64, Vec<i64>) {
    let done = AtomicBool::new(false);
    let asks = |server: &Server| {
        let (mut client, mut verdicts) = (server.connect(), Vec::new());
        while !done.load(Ordering::Acquire) || verdicts.len() < ENOUGH {
            verdicts
                .extend(pipeline(&mut client, &[vec!["kind", "many", "key", key], vec!["kind", "many", "key", key]]));
            std::thread::park_timeout(Duration::from_millis(2));
        }
        verdicts
    };
    let verdicts: Vec<Verdict> = std::thread::scope(|scope| {
        let askers: Vec<_> = servers.iter().map(|server| scope.spawn(move || asks(server))).collect();
        act();
        done.store(true, Ordering::Release);
        askers.into_iter().flat_map(|asker| asker.join().expect("every check was answered")).collect()
    });
    let mut limits: Vec<_> = verdicts.iter().map(|verdict| verdict.limit).collect();
    limits.sort_unstable();
    limits.dedup();
    (passed(&verdicts), limits)
}

#[test]
fn a_cluster_counts_exactly_while_slots_move_and_scripts_are_lost() {
    let mut cluster = Cluster::start(3, 0);
    let servers = servers(&cluster.urls(), PATIENT);
    identities_of_three_shards_get_exactly_their_limits(&cluster, &servers);
    rules_of_one_identity_are_one_call(&cluster, &servers);
    what_another_shard_denied_goes_back(&servers);
    lost_scripts_are_loaded_and_lost_counts_begin_anew(&cluster, &servers);
    a_slot_moves(&cluster, &servers, 1);
    a_call_about_keys_on_both_sides_waits_no_longer_than_its_deadline(&cluster, &servers);
    let added = cluster.add_node();
    a_slot_moves(&cluster, &servers, added);
    any_seed_may_be_down(&cluster);
}

fn identities_of_three_shards_get_exactly_their_limits(cluster: &Cluster, servers: &[Server]) {
    let before = calls(cluster);
    let keys: Vec<_> = (0..3).flat_map(|shard| keys_of(shard, "exact").take(8)).collect();
    let verdicts: Vec<Vec<Verdict>> = std::thread::scope(|scope| {
        let ask = |server: &Server| {
            let checks: Vec<_> = (0..7).flat_map(|_| keys.iter().map(|key| vec!["kind", "few", "key", key])).collect();
            pipeline(&mut server.connect(), &checks)
        };
        let clients = servers.iter().flat_map(|server| [server, server]);
        let askers: Vec<_> = clients.map(|server| scope.spawn(move || ask(server))).collect();
        askers.into_iter().map(|asker| asker.join().unwrap()).collect()
    });
    for (at, key) in keys.iter().enumerate() {
        let of_key: Vec<_> = verdicts.iter().flat_map(|all| all.iter().skip(at).step_by(keys.len()).cloned()).collect();
        assert_eq!((of_key.len(), passed(&of_key)), (28, 10), "{key}");
        assert!(of_key.iter().all(|verdict| verdict.limit == FEW), "Redis decided: {of_key:?}");
    }
    for (node, (before, after)) in before.iter().zip(calls(cluster)).enumerate() {
        assert!(after - before >= 8, "shard {node} was asked for its eight");
    }
}

fn rules_of_one_identity_are_one_call(cluster: &Cluster, servers: &[Server]) {
    let sum = || calls(cluster).iter().sum::<u64>();
    for (number, server) in servers.iter().enumerate() {
        for shard in 0..3 {
            let key = keys_of(shard, &format!("one-call-{number}")).next().unwrap();
            let mut client = server.connect();
            let before = sum();
            let verdict = client.check(&["kind", "two", "key", &key]);
            assert_eq!((verdict.allowed, verdict.limit, verdict.remaining), (1, 4, 3));
            assert_eq!(sum() - before, 1, "both rules in one call");
        }
    }
}

fn what_another_shard_denied_goes_back(servers: &[Server]) {
    for (number, server) in servers.iter().enumerate() {
        for (mine, ours) in [(0, 1), (2, 0), (1, 1)] {
            let key = keys_of(mine, &format!("mine-{number}")).next().unwrap();
            let tenant = tenant_of(ours, &format!("tenant-{number}-{mine}"));
            let mut client = server.connect();
            let verdicts = pipeline(&mut client, &vec![vec!["kind", "apart", "key", &key, "tenant", &tenant]; 10]);
            assert_eq!(passed(&verdicts), 3);
            assert!(verdicts.iter().filter(|verdict| verdict.allowed == 0).all(|verdict| verdict.rule == "mine"));
            let mut left = || client.check(&["COST", "0", "kind", "apart", "tenant", &tenant]);
            until("what the denied ones took is back", || left().remaining == 97);
            std::thread::park_timeout(Duration::from_millis(20));
            assert_eq!((left().rule.as_str(), left().remaining), ("ours", 97), "and no more than that");
        }
    }
}

fn lost_scripts_are_loaded_and_lost_counts_begin_anew(cluster: &Cluster, servers: &[Server]) {
    let keys: Vec<_> = (0..3).map(|shard| keys_of(shard, "flushed").next().unwrap()).collect();
    let mut clients: Vec<_> = servers.iter().map(Server::connect).collect();
    let mut looker = servers[0].connect();
    let mut ask_14_times = |key: &str| -> Vec<Verdict> {
        let checks = vec![vec!["kind", "few", "key", key]; 7];
        clients.iter_mut().flat_map(|client| pipeline(client, &checks)).collect()
    };
    assert!(keys.iter().all(|key| passed(&ask_14_times(key)) == 10));
    // Before they were connected, they decided locally.
    let local = || servers.iter().map(|server| server.decisions("few", "local")).collect::<Vec<_>>();
    let local_before = local();
    under_load("SCRIPT FLUSH and FLUSHALL", servers, || {
        for _ in 0..5 {
            cluster.nodes().iter().for_each(|node| drop(node.command(&["SCRIPT", "FLUSH"])));
            for key in &keys {
                let verdicts = ask_14_times(key);
                let right = verdicts.iter().all(|verdict| (verdict.allowed, verdict.limit) == (0, FEW));
                assert!(right, "the counts are still there: {verdicts:?}");
                let verdict = look(&mut looker, key);
                assert_eq!((verdict.remaining, verdict.limit), (0, FEW), "and Redis says so");
            }
        }
        for round in 0..3 {
            // Others than those that are known to be empty, which Redis is not asked about.
            let keys: Vec<_> =
                (0..3).map(|shard| keys_of(shard, &format!("flushed-{round}")).next().unwrap()).collect();
            for key in &keys {
                let verdicts = pipeline(&mut looker, &vec![vec!["kind", "few", "key", key.as_str()]; 9]);
                assert_eq!((passed(&verdicts), verdicts[8].remaining), (9, 1));
            }
            cluster.nodes().iter().for_each(|node| {
                node.command(&["SCRIPT", "FLUSH"]);
                node.command(&["FLUSHALL"]);
            });
            assert!(keys.iter().all(|key| passed(&ask_14_times(key)) == 10), "exactly the limit, from the start");
        }
    });
    for server in servers {
        assert!(server.redis_events("no_script") > 0 && server.redis_events("script_loaded") >= 3);
        assert_eq!(server.decisions("load", "local"), 0, "Redis made every decision");
    }
    assert_eq!(local(), local_before, "Redis made every decision");
}

/// A slot moves, key by key, and back, while its identities are asked for.
fn a_slot_moves(cluster: &Cluster, servers: &[Server], to: usize) {
    let key = keys_of(0, &format!("moved-{to}")).next().unwrap();
    let slot = slot_of(&key);
    let new: Vec<_> = keys_in(slot, &format!("new-{to}")).take(servers.len()).collect();
    let events = |event: &str| servers.iter().map(|server| server.redis_events(event)).collect::<Vec<_>>();
    let (asked, moved) = (events("ask"), events("moved"));
    let from = cluster.primary_of(slot);
    let (passed, limits) = under_load(&format!("a slot moves to node {to}"), servers, || {
        hammer(servers, &key, || {
            std::thread::park_timeout(Duration::from_millis(100));
            let moving = cluster.begin_move(slot, from, to);
            for (server, new) in servers.iter().zip(&new) {
                // Not there yet, so it begins where the slot goes to.
                let verdicts = pipeline(&mut server.connect(), &vec![vec!["kind", "few", "key", new]; 12]);
                assert_eq!((passed(&verdicts), verdicts[0].limit), (10, FEW));
            }
            std::thread::park_timeout(Duration::from_millis(50));
            moving.finish();
            std::thread::park_timeout(Duration::from_millis(50));
            cluster.move_slot(slot, to, from);
            cluster.move_slot(slot, from, to);
            std::thread::park_timeout(Duration::from_millis(50));
        })
    });
    assert_eq!((passed, limits), (MANY, vec![MANY]), "exactly the limit, and Redis made every decision");
    assert!(cluster.nodes()[to].calls("evalsha") > 0);
    assert!(events("ask").iter().zip(&asked).all(|(after, before)| after > before), "both were sent on by ASK");
    assert!(events("moved").iter().zip(&moved).all(|(after, before)| after > before), "and by MOVED");
    for (server, new) in servers.iter().zip(&new) {
        assert_eq!(few(&mut server.connect(), new).allowed, 0, "its count came along");
    }
}

fn a_call_about_keys_on_both_sides_waits_no_longer_than_its_deadline(cluster: &Cluster, servers: &[Server]) {
    let key = keys_of(0, "halfway").next().unwrap();
    let slot = slot_of(&key);
    let other = keys_of(0, "not-halfway").find(|other| slot_of(other) != slot).unwrap();
    let ask = |server: &Server| server.connect().check(&["kind", "two", "key", &key]);
    let from = cluster.primary_of(slot);
    let to = (from + 1) % 3;
    assert_eq!((ask(&servers[0]).remaining, ask(&servers[1]).remaining), (3, 2));
    under_load("a slot is half-way", servers, || {
        let moving = cluster.begin_move(slot, from, to);
        moving.carry(&[&format!("rl:{{key={key}}}:short")]);
        for server in servers {
            let began = Instant::now();
            let verdict = ask(server);
            let took = began.elapsed();
            println!("half-way: {took:?} until the failure policy answered");
            assert_eq!((verdict.allowed, verdict.limit), (1, 2), "the failure policy");
            assert!(took < Duration::from_millis(1500), "{took:?}");
            assert!(server.redis_events("try_again") > 0);
            assert_eq!(few(&mut server.connect(), &other).limit, FEW, "the rest of the shard goes on");
        }
        // A call that waits is answered by Redis as soon as the other key has come along.
        let late = std::thread::scope(|scope| {
            let late = scope.spawn(|| ask(&servers[0]));
            std::thread::park_timeout(Duration::from_millis(100));
            moving.finish();
            late.join().unwrap()
        });
        assert_eq!((late.allowed, late.limit), (1, 4), "{late:?}");
    });
    let left: i64 = servers.iter().map(|server| ask(server).allowed + ask(server).allowed).sum();
    assert_eq!(left, 1, "of four, two had passed before and one late");
    cluster.move_slot(slot, to, from);
}

fn any_seed_may_be_down(cluster: &Cluster) {
    let frozen = Redis::start(&[]);
    let dead = format!("redis://127.0.0.1:{}", free_port());
    let live = cluster.urls();
    frozen.freeze();
    for seeds in [[&dead, &live[0], &live[1]], [&live[2], &dead, &dead], [&frozen.url(), &live[1], &dead]] {
        let seeds = seeds.map(String::clone);
        let began = Instant::now();
        let servers = servers(&seeds, PATIENT);
        println!("two servers with one good seed of {seeds:?}: all shards serve after {:?}", began.elapsed());
        under_load("seeds are down", &servers, || {});
    }
}

/// What one identity may get at most: its limit, and the local one in each time between two closings of the breaker.
fn most(server: &Server, shard: SocketAddr) -> i64 {
    FEW + FEW_LOCAL * (1 + server.breaker_entered(shard, "closed").cast_signed())
}

#[test]
fn one_shard_of_three_is_down() {
    let cluster = Cluster::start(3, 0);
    let servers = servers(&cluster.urls(), BRISK);
    shard_fails(&cluster, &servers, "killed", Redis::kill, Redis::restart);
    shard_fails(&cluster, &servers, "frozen", Redis::freeze, Redis::thaw);
    a_slot_is_served_by_nobody(&cluster, &servers);
    the_cluster_is_down(&cluster, &servers);
}

fn shard_fails(cluster: &Cluster, servers: &[Server], how: &str, fail: fn(&Redis), mend: fn(&Redis)) {
    let address = |node: usize| cluster.nodes()[node].address();
    let opened: Vec<_> = servers.iter().map(|server| server.breaker_entered(address(0), "open")).collect();
    let mut passed = vec![0; servers.len()];
    under_load(&format!("one shard of three {how}"), servers, || {
        let before = calls(cluster);
        fail(&cluster.nodes()[0]);
        for (number, server) in servers.iter().enumerate() {
            let [gone, there, elsewhere] =
                [0, 1, 2].map(|shard| keys_of(shard, &format!("{how}-{number}")).next().unwrap());
            let mut client = server.connect();
            let mut ask = |client: &mut Client<TcpStream>, times: usize| {
                let verdicts: Vec<_> = (0..times).map(|_| few(client, &gone)).collect();
                passed[number] += self::passed(&verdicts);
                verdicts
            };
            assert!(ask(&mut client, 6).iter().all(|verdict| verdict.limit == FEW_LOCAL), "decided locally");
            until("its breaker opens", || {
                ask(&mut client, 1);
                server.breaker_entered(address(0), "open") > opened[number]
            });
            for key in [&there, &elsewhere] {
                let by_redis = (0..12).map(|_| few(&mut client, key)).filter(|verdict| verdict.limit == FEW).count();
                assert!(by_redis >= 6, "{by_redis} of 12 of a shard that is well were decided by Redis");
            }
            let shut = keys_of(0, &format!("shut-{how}-{number}")).next().unwrap();
            assert_eq!(client.check(&["kind", "shut", "key", &shut]).allowed, -1);
            what_was_granted_beside_a_closed_rule_goes_back(&mut client, &format!("{how}-{number}"));
        }
        let after = calls(cluster);
        assert!(
            [1, 2].iter().all(|&node| after[node] >= before[node] + 20),
            "the others are asked: {before:?} {after:?}"
        );
        mend(&cluster.nodes()[0]);
        let began = Instant::now();
        servers.iter().for_each(|server| wait_for_redis(server, &keys_of(0, "is-it-there").next().unwrap()));
        println!("one shard of three {how}: mended, and Redis decides after {:?}", began.elapsed());
    });
    for (number, server) in servers.iter().enumerate() {
        let gone = keys_of(0, &format!("{how}-{number}")).next().unwrap();
        let mut client = server.connect();
        passed[number] += self::passed(&(0..12).map(|_| few(&mut client, &gone)).collect::<Vec<_>>());
        let most = most(server, address(0));
        assert!(passed[number] <= most, "{} of one identity passed, at most {most} may", passed[number]);
        assert_eq!([1, 2].map(|node| server.breaker_entered(address(node), "open")), [0, 0], "the others' breakers");
    }
}

/// The rule that is closed answers unavailable, so what the other shard granted for it goes back.
fn what_was_granted_beside_a_closed_rule_goes_back(client: &mut Client<TcpStream>, name: &str) {
    let gone = keys_of(0, &format!("beside-{name}")).next().unwrap();
    let tenant = tenant_of(1, &format!("beside-{name}"));
    let verdicts = pipeline(client, &vec![vec!["kind", "apart", "key", &gone, "tenant", &tenant]; 10]);
    assert!(verdicts.iter().all(|verdict| (verdict.allowed, verdict.rule.as_str()) == (-1, "mine")), "{verdicts:?}");
    until("it is back", || client.check(&["COST", "0", "kind", "apart", "tenant", &tenant]).remaining == 100);
}

/// CLUSTERDOWN for one slot.
fn a_slot_is_served_by_nobody(cluster: &Cluster, servers: &[Server]) {
    let lost = keys_of(2, "lost").next().unwrap();
    let slot = slot_of(&lost);
    let there = keys_of(2, "not-lost").find(|key| slot_of(key) != slot).unwrap();
    let number = slot.to_string();
    under_load("a slot is lost", servers, || {
        cluster.nodes()[2].command(&["CLUSTER", "DELSLOTS", &number]);
        for server in servers {
            let mut client = server.connect();
            assert_eq!((few(&mut client, &lost).limit, few(&mut client, &lost).limit), (FEW_LOCAL, FEW_LOCAL));
            assert_eq!(client.check(&["kind", "shut", "key", &lost]).allowed, -1);
            until("the shard's other slots are served", || few(&mut client, &there).limit == FEW);
            // Every node's view of the slots is seen, that of the one which has lost the slot too.
            let looks = server.redis_events("refreshed") + 4;
            until("the topology was asked for at each node", || {
                few(&mut client, &lost);
                server.redis_events("refreshed") >= looks
            });
        }
        cluster.nodes()[2].command(&["CLUSTER", "ADDSLOTS", &number]);
        let began = Instant::now();
        servers.iter().for_each(|server| wait_for_redis(server, &lost));
        println!("a lost slot is there again: Redis decides after {:?}", began.elapsed());
    });
}

/// CLUSTERDOWN for all slots: a cluster that wants to be whole has lost a shard.
fn the_cluster_is_down(cluster: &Cluster, servers: &[Server]) {
    let key = |shard: u16| keys_of(shard, "down").next().unwrap();
    under_load("the cluster is down", servers, || {
        let set = ["CONFIG", "SET", "cluster-require-full-coverage", "yes"];
        cluster.nodes().iter().for_each(|node| drop(node.command(&set)));
        cluster.nodes()[0].kill();
        for server in servers {
            let mut client = server.connect();
            for shard in 0..3 {
                until("the failure policy answers", || look(&mut client, &key(shard)).limit == FEW_LOCAL);
                until("a closed rule is closed", || client.check(&["kind", "shut", "key", &key(shard)]).allowed == -1);
            }
            let log = server.log();
            assert!(log.contains("CLUSTERDOWN"), "the log says why");
        }
        cluster.nodes()[0].restart();
        let began = Instant::now();
        servers.iter().for_each(|server| (0..3).for_each(|shard| wait_for_redis(server, &key(shard))));
        println!("a cluster is up again: Redis decides on all shards after {:?}", began.elapsed());
    });
}

#[test]
fn a_primary_dies_and_its_replica_takes_over() {
    let cluster = Cluster::start(3, 1);
    let servers = servers(&cluster.urls(), BRISK);
    // The one that is frozen comes back as a replica when it thaws.
    for (how, fail) in [("killed", Redis::kill as fn(&Redis)), ("frozen", Redis::freeze)] {
        let key = |number: usize| keys_of(0, &format!("spent-{how}-{number}")).next().unwrap();
        let old = cluster.primary_of(slot_of(&key(0)));
        let address = cluster.nodes()[old].address();
        let mut clients: Vec<_> = servers.iter().map(Server::connect).collect();
        let mut passed = vec![0; servers.len()];
        for (number, client) in clients.iter_mut().enumerate() {
            until("the limit is spent in Redis", || {
                let verdict = few(client, &key(number));
                passed[number] += i64::from(verdict.allowed == 1);
                (verdict.allowed, verdict.limit) == (0, FEW)
            });
        }
        // Redis may lose what it had not passed on, and so the replica must have it first.
        cluster.nodes()[old].command(&["WAIT", "1", "5000"]);
        let promoted = under_load(&format!("a primary is {how}"), &servers, || {
            let began = Instant::now();
            fail(&cluster.nodes()[old]);
            let promoted = cluster.wait_for_promotion(old);
            let took = began.elapsed();
            for (number, client) in clients.iter_mut().enumerate() {
                until("the promoted replica decides, and knows what was spent", || {
                    let verdict = few(client, &key(number));
                    passed[number] += i64::from(verdict.allowed == 1);
                    assert!(began.elapsed() - took < Duration::from_secs(10), "it has been there for long");
                    let held = look(client, &key(number));
                    (held.remaining, held.limit) == (0, FEW)
                });
            }
            println!("a primary is {how}: promotion took {took:?}, service {:?} more", began.elapsed() - took);
            promoted
        });
        assert!(cluster.nodes()[promoted].calls("evalsha") > 0);
        for (number, server) in servers.iter().enumerate() {
            assert_eq!(few(&mut clients[number], &key(number)).allowed, 0, "spent is spent");
            let most = most(server, address) + FEW_LOCAL;
            assert!(passed[number] <= most, "{} of one identity passed, at most {most} may", passed[number]);
        }
        if how == "killed" {
            cluster.nodes()[old].restart();
        } else {
            cluster.nodes()[old].thaw();
        }
        cluster.settle();
        under_load("the old primary is back as a replica", &servers, || {
            std::thread::park_timeout(Duration::from_millis(300));
        });
        for (number, client) in clients.iter_mut().enumerate() {
            until("Redis decides", || {
                let held = look(client, &key(number));
                (held.remaining, held.limit) == (0, FEW)
            });
        }
    }
}
