//! A cluster and a primary under Sentinel, whose nodes die, move and come back under load.
#![allow(missing_docs)]
#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test that cannot go on must stop, with the reason")]

use std::sync::{Mutex, PoisonError};

use sluice_e2e::{
    Server, Setup,
    load::{Load, RULES},
    redis_cluster::Cluster,
    redis_sentinel::Sentinel,
    until,
};

/// Beside [`RULES`].
const MORE_RULES: &str = r#"
[[rule]]
name = "pair-a"
match = { kind = "pair" }
per = ["a"]
limit = { capacity = 5, refill = 1, period = "24h" }

[[rule]]
name = "pair-b"
match = { kind = "pair" }
per = ["b"]
limit = { capacity = 1000, refill = 1, period = "24h" }
"#;

fn policy() -> String {
    format!("{RULES}{MORE_RULES}")
}

fn config(urls: &[String]) -> String {
    format!("[redis]\nurls = {urls:?}\nbreaker = {{ open_ms = 200, calls_min = 10 }}\n")
}

/// Waits until the identity is decided by Redis.
fn wait_for_redis(server: &Server, key: &str) {
    let mut client = server.connect();
    until("Redis decides", || client.check(&["COST", "0", "kind", "few", "key", key]).limit == 5);
}

fn breaker_is(server: &Server, address: std::net::SocketAddr, state: &str) -> bool {
    server.metric(&format!("sluice_redis_breaker{{shard=\"{address}\",state=\"{state}\"}}")) == 1
}

/// An identity whose slot this node has.
fn identity_on(cluster: &Cluster, node: usize, prefix: &str) -> String {
    let key = |at: usize| format!("{prefix}{at}");
    (0..)
        .map(key)
        .find(|key| cluster.primary_of(Cluster::slot_of(&format!("key={key}"))) == node)
        .expect("there is one")
}

/// Six servers and more start in each of these tests; one test at a time is enough for a small machine.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

#[test]
fn a_cluster_whose_nodes_die_and_whose_slots_move() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    for setup in Setup::transports() {
        let mut cluster = Cluster::start(3, 1);
        // The first seed is nobody: any of them being down is fine.
        let urls: Vec<String> = std::iter::once("redis+cluster://127.0.0.1:1".to_owned())
            .chain(cluster.nodes().iter().take(2).map(|node| format!("redis+cluster://{}", node.address())))
            .collect();
        let server = Server::start(&setup.clone().with(&config(&urls)), &policy());
        let on = [0, 1, 2].map(|node| identity_on(&cluster, node, "k"));
        on.iter().for_each(|key| wait_for_redis(&server, key));
        let mut client = server.connect();
        let mut passed = |key: &str, count: usize| {
            (0..count).filter(|_| client.check(&["kind", "few", "key", key]).allowed == 1).count()
        };
        assert_eq!(on.each_ref().map(|key| passed(key, 10)), [5; 3], "each identity on its shard");

        let load = Load::start(&server, 4, &["kind", "load"]);
        load.wait_for(50);
        cluster.nodes().iter().for_each(|node| drop(node.command(&["SCRIPT", "FLUSH"])));
        load.wait_for(50);
        cluster.primaries().iter().for_each(|&node| drop(cluster.nodes()[node].command(&["FLUSHALL"])));
        load.wait_for(50);
        let slot = Cluster::slot_of(&format!("key={}", on[0]));
        let moving = cluster.begin_move(slot, 0, 1);
        load.wait_for(50);
        moving.finish();
        load.wait_for(50);
        load.stop().hold_to_its_promises("scripts and data flushed, a slot moved");
        wait_for_redis(&server, &on[0]);
        cluster.move_slot(slot, 1, 0);

        // One shard of three is frozen: its identities are decided here, the others' in Redis.
        let lost = identity_on(&cluster, 0, "lost");
        let kept = identity_on(&cluster, 1, "kept");
        let load = Load::start(&server, 4, &["kind", "load"]);
        load.wait_for(20);
        cluster.nodes()[0].freeze();
        let address = cluster.nodes()[0].address();
        until("its breaker opens", || {
            breaker_is(&server, address, "open") || breaker_is(&server, address, "half_open")
        });
        let others = [1, 2].map(|node| breaker_is(&server, cluster.nodes()[node].address(), "closed"));
        assert_eq!((client_limit(&server, &lost), others), (2, [true, true]), "only its own");
        assert_eq!(client_limit(&server, &kept), 5);
        // Its replica takes over, and service returns.
        cluster.wait_for_promotion(0);
        wait_for_redis(&server, &lost);
        load.wait_for(50);
        load.stop().hold_to_its_promises("a primary frozen, its replica promoted");
        cluster.nodes()[0].thaw();
        cluster.settle();

        let load = Load::start(&server, 4, &["kind", "load"]);
        cluster.nodes()[1].kill();
        cluster.wait_for_promotion(1);
        wait_for_redis(&server, &kept);
        load.wait_for(50);
        load.stop().hold_to_its_promises("a primary killed, its replica promoted");
        cluster.nodes()[1].restart();
        cluster.settle();

        let load = Load::start(&server, 4, &["kind", "load"]);
        let owner = cluster.primary_of(slot);
        let node = cluster.add_node();
        cluster.move_slot(slot, owner, node);
        load.wait_for(50);
        load.stop().hold_to_its_promises("a node added");
        let before = cluster.nodes()[node].calls("evalsha");
        wait_for_redis(&server, &on[0]);
        until("the new node is asked", || {
            server.connect().check(&["kind", "few", "key", &on[0]]);
            cluster.nodes()[node].calls("evalsha") > before
        });

        // Rules with different identities live on different shards: a denied check takes nothing from either.
        let mut client = server.connect();
        let pair =
            |client: &mut sluice_e2e::Client<_>, a: &str| client.check(&["kind", "pair", "a", a, "b", "same"]).allowed;
        let allowed = (0..20).filter(|_| pair(&mut client, "x") == 1).count();
        assert_eq!(allowed, 5);
    }
}

fn client_limit(server: &Server, key: &str) -> i64 {
    server.connect().check(&["COST", "0", "kind", "few", "key", key]).limit
}

#[test]
fn a_primary_that_sentinel_replaces() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    for setup in Setup::transports() {
        let sentinel = Sentinel::start();
        let urls = [sentinel.url()];
        let server = Server::start(&setup.with(&config(&urls)), &policy());
        wait_for_redis(&server, "a");
        let load = Load::start(&server, 4, &["kind", "load"]);
        load.wait_for(20);
        let old = sentinel.master();
        sentinel.node_at(old).kill();
        sentinel.wait_for_switch(old);
        wait_for_redis(&server, "b");
        load.wait_for(50);
        load.stop().hold_to_its_promises("the primary killed, another one named");
    }
}
