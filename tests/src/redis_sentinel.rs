//! A primary and a replica that three sentinels watch.
//!
//! Two of the three must find the primary silent for half a second; about two seconds after the primary died, all of
//! them name the replica in its place. Until the sentinels have found the replica and each other, which takes them about two seconds, no
//! switch would work: the start waits for that.

use std::net::SocketAddr;

use crate::{Reply, redis_server::Redis, text, until};

/// The name that the sentinels know the primary by.
const MASTER: &str = "mymaster";

/// How many sentinels there are.
const SENTINELS: usize = 3;

/// Three sentinels and what they watch. Killed when dropped.
pub struct Sentinel {
    nodes: Vec<Redis>,
    sentinels: Vec<Redis>,
}

impl Sentinel {
    /// Starts all five, and waits until every sentinel knows the replica and the other sentinels.
    pub fn start() -> Self {
        let soon = ["--repl-diskless-sync-delay", "0"];
        let primary = Redis::start(&soon);
        let port = primary.port().to_string();
        let replica = Redis::start(&[&soon[..], &["--replicaof", "127.0.0.1", &port]].concat());
        // The sentinels ask the primary for its replicas at once and then only every ten seconds.
        until("the replica follows", || follows(&replica));
        let config = format!(
            "sentinel monitor {MASTER} 127.0.0.1 {port} 2\nsentinel down-after-milliseconds {MASTER} 500\n\
             sentinel failover-timeout {MASTER} 3000\n"
        );
        let sentinels = (0..SENTINELS).map(|_| Redis::start_sentinel(&config)).collect();
        let started = Self { nodes: vec![primary, replica], sentinels };
        until("the sentinels know everybody", || started.up().all(knows_everybody));
        started
    }

    /// Where the sentinels serve.
    pub fn sentinels(&self) -> Vec<SocketAddr> {
        self.sentinels.iter().map(Redis::address).collect()
    }

    /// The sentinels themselves, in the same order, for tests that kill some.
    pub fn sentinel_nodes(&self) -> &[Redis] {
        &self.sentinels
    }

    /// The two servers. The first one is the primary until a switch.
    pub fn nodes(&self) -> &[Redis] {
        &self.nodes
    }

    /// The server of this address.
    pub fn node_at(&self, address: SocketAddr) -> &Redis {
        self.nodes.iter().find(|node| node.address() == address).expect("one of the two servers")
    }

    /// `redis+sentinel://<the first sentinel>/mymaster`.
    pub fn url(&self) -> String {
        format!("redis+sentinel://{}/{MASTER}", self.sentinels[0].address())
    }

    /// The primary, as the first sentinel that is up says it.
    pub fn master(&self) -> SocketAddr {
        master_of(self.up().next().expect("a sentinel that is up"))
    }

    /// Makes the sentinels switch although nothing is broken; returns the new primary. The old one goes on as a primary
    /// that takes writes, until [`wait_until_follows`](Self::wait_until_follows).
    pub fn fail_over(&self) -> SocketAddr {
        let old = self.master();
        // A sentinel refuses while it does not know a replica that is fit, as for a while after the last switch.
        until("a sentinel begins to switch", || {
            let sentinel = self.up().next().expect("a sentinel that is up");
            matches!(sentinel.command(&["SENTINEL", "FAILOVER", MASTER]), Reply::SimpleString(_))
        });
        self.wait_for_switch(old)
    }

    /// Waits until the server of this address is a replica that is in step. The sentinels take ten to twenty seconds
    /// before they tell so to an old primary that is up, or up again; a test in a hurry sends it REPLICAOF.
    pub fn wait_until_follows(&self, address: SocketAddr) {
        until("the server follows", || follows(self.node_at(address)));
    }

    /// Waits until all sentinels that are up name another primary than this one, and it is one; returns it.
    pub fn wait_for_switch(&self, old: SocketAddr) -> SocketAddr {
        until("the sentinels name another primary", || self.up().all(|sentinel| master_of(sentinel) != old));
        let new = self.master();
        until("it is a primary", || self.node_at(new).info_field("replication", "role") == "master");
        new
    }

    fn up(&self) -> impl Iterator<Item = &Redis> {
        self.sentinels.iter().filter(|sentinel| sentinel.is_up())
    }
}

fn follows(replica: &Redis) -> bool {
    replica.info_field("replication", "master_link_status") == "up"
}

fn master_of(sentinel: &Redis) -> SocketAddr {
    let reply = sentinel.command(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", MASTER]);
    let Reply::Array(host_and_port) = &reply else { panic!("not an address: {reply:?}") };
    let [host, port] = [0, 1].map(|at| text(&host_and_port[at]));
    format!("{host}:{port}").parse().expect("an address")
}

/// Whether a sentinel has the replica, the other sentinels, and no doubt about any of them.
fn knows_everybody(sentinel: &Redis) -> bool {
    let has_quorum = matches!(sentinel.command(&["SENTINEL", "CKQUORUM", MASTER]), Reply::SimpleString(_));
    let count = |what| {
        let reply = sentinel.command(&["SENTINEL", what, MASTER]);
        let Reply::Array(known) = reply else { panic!("not a list: {reply:?}") };
        known.len()
    };
    has_quorum && count("REPLICAS") == 1 && count("SENTINELS") == SENTINELS - 1
}
