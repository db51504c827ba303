//! A Redis Cluster on this machine, whose slots move and whose primaries are replaced while tests look on.
//!
//! It is formed by hand instead of by `redis-cli --cluster create`: that is quicker, and every step can be waited for.
//! What takes its time then, about two seconds, is Redis: a primary lets that much pass after its start before it
//! serves.
//!
//! Nodes are named by their index: the primaries first, then the replicas, round by round. A node stays in the shard
//! that it was started in (replicas do not migrate), whichever role it has there. Each question goes to the nodes that
//! are up, and what they say must agree before anything counts as ready.

use std::{net::SocketAddr, ops::RangeInclusive};

use crate::{
    Reply,
    redis_server::{Redis, field_of, free_port},
    text, until,
};

/// How many slots a cluster has.
const SLOTS: u16 = 16_384;

/// Soon to notice a dead node (all know its successor two to three seconds after it fell silent), whatever the replica has missed, and
/// without the pause before the first synchronization. Slots that nobody serves do not stop the other shards. A lost
/// primary is only replaced while most of the primaries live: three is the least.
const SETTINGS: &[&str] = &[
    "--cluster-enabled",
    "yes",
    "--cluster-node-timeout",
    "1000",
    "--cluster-replica-validity-factor",
    "0",
    "--cluster-require-full-coverage",
    "no",
    "--cluster-allow-replica-migration",
    "no",
    "--cluster-announce-ip",
    "127.0.0.1",
    "--repl-diskless-sync-delay",
    "0",
];

/// A running cluster. Killed when dropped.
pub struct Cluster {
    nodes: Vec<Redis>,
    /// By node: the name that the cluster has for it.
    ids: Vec<String>,
    /// By node: the primary that it began as or with.
    shards: Vec<usize>,
    /// What each node is told beside [`SETTINGS`].
    args: Vec<String>,
}

impl Cluster {
    /// Starts a cluster whose slots are shared out evenly, and waits until all nodes serve and all replicas follow.
    pub fn start(primaries: usize, replicas_each: usize) -> Self {
        Self::start_with(primaries, replicas_each, &[])
    }

    /// The same, with more arguments for each node, such as `--requirepass` together with `--masterauth`.
    pub fn start_with(primaries: usize, replicas_each: usize, args: &[&str]) -> Self {
        let args = args.iter().map(|arg| (*arg).to_owned()).collect();
        let mut cluster = Self { nodes: Vec::new(), ids: Vec::new(), shards: Vec::new(), args };
        for node in 0..primaries * (1 + replicas_each) {
            cluster.start_node(node % primaries);
        }
        for node in 0..primaries {
            let border = |shard: usize| usize::from(SLOTS) * shard / primaries;
            let (first, last) = (border(node).to_string(), (border(node + 1) - 1).to_string());
            cluster.tell(node, &["CLUSTER", "ADDSLOTSRANGE", &first, &last]);
            // Without it they all begin at 0 and must first quarrel about who is ahead.
            cluster.tell(node, &["CLUSTER", "SET-CONFIG-EPOCH", &(node + 1).to_string()]);
        }
        for node in 0..cluster.nodes.len() {
            (0..node).for_each(|other| cluster.meet(other, node));
        }
        until("all nodes know each other", || cluster.know_each_other());
        for replica in primaries..cluster.nodes.len() {
            cluster.tell(replica, &["CLUSTER", "REPLICATE", &cluster.ids[cluster.shards[replica]]]);
        }
        cluster.settle();
        cluster
    }

    /// The nodes.
    pub fn nodes(&self) -> &[Redis] {
        &self.nodes
    }

    /// The URL of each node.
    pub fn urls(&self) -> Vec<String> {
        self.nodes.iter().map(Redis::url).collect()
    }

    /// The slot of a key: CRC16 (XMODEM) of its hash tag, if it has one that is not empty, or else of all of it.
    /// <https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/#hash-tags>
    pub fn slot_of(key: &str) -> u16 {
        let tag = key.split_once('{').and_then(|(_, rest)| rest.split_once('}')).map(|(tag, _)| tag);
        let hashed = tag.filter(|tag| !tag.is_empty()).unwrap_or(key);
        let shift = |crc: u16, _| if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 };
        let crc = hashed.bytes().fold(0, |crc, byte| (0..8).fold(crc ^ (u16::from(byte) << 8), shift));
        crc % SLOTS
    }

    /// The primary that serves this slot now. Where two say so, as a primary does that was replaced and comes back, it
    /// is the later one.
    pub fn primary_of(&self, slot: u16) -> usize {
        let claims = self.up().filter_map(|node| {
            let me = self.self_of(node);
            (!me.is_replica() && me.serves(slot)).then_some((me.epoch, node))
        });
        claims.max().unwrap_or_else(|| panic!("nobody serves slot {slot}")).1
    }

    /// The nodes that serve slots now.
    pub fn primaries(&self) -> Vec<usize> {
        let is_primary = |node: &usize| {
            let me = self.self_of(*node);
            !me.is_replica() && !me.slots.is_empty()
        };
        self.up().filter(is_primary).collect()
    }

    /// The first node that follows this one now.
    pub fn replica_of(&self, primary: usize) -> usize {
        let follows = |node: &usize| self.self_of(*node).primary == self.ids[primary];
        self.up().find(follows).unwrap_or_else(|| panic!("node {primary} has no replica"))
    }

    /// Moves a slot and its keys, and waits until all nodes know.
    pub fn move_slot(&self, slot: u16, from: usize, to: usize) {
        self.begin_move(slot, from, to).finish();
    }

    /// Begins to move a slot. From now on the old primary answers ASK for keys that it does not have, TRYAGAIN for a
    /// command about several keys of which it has but some, and serves the others. The new one serves those that ASKING
    /// precedes.
    pub fn begin_move(&self, slot: u16, from: usize, to: usize) -> Move<'_> {
        let name = slot.to_string();
        self.tell(to, &["CLUSTER", "SETSLOT", &name, "IMPORTING", &self.ids[from]]);
        self.tell(from, &["CLUSTER", "SETSLOT", &name, "MIGRATING", &self.ids[to]]);
        Move { cluster: self, slot, from, to }
    }

    /// Sends clients and replicas to this address, which must lead to the node, such as a proxy's; waits until all nodes
    /// name it. The node's own address goes on to work.
    pub fn announce(&self, node: usize, address: SocketAddr) {
        self.tell(node, &["CONFIG", "SET", "cluster-announce-port", &address.port().to_string()]);
        self.settle();
    }

    /// Adds a primary without slots; returns its index once all nodes know it and it serves. All nodes must be up.
    pub fn add_node(&mut self) -> usize {
        let added = self.nodes.len();
        self.start_node(added);
        self.up().filter(|node| *node != added).for_each(|node| self.meet(node, added));
        self.settle();
        added
    }

    /// Waits until a replica has taken the place of this primary and all nodes that are up know; returns the replica.
    pub fn wait_for_promotion(&self, old_primary: usize) -> usize {
        let mut promoted = None;
        until("a replica is promoted", || {
            let of_shard = |node: &usize| self.shards[*node] == self.shards[old_primary] && *node != old_primary;
            promoted = self.primaries().into_iter().find(of_shard);
            promoted.is_some()
        });
        self.settle();
        promoted.expect("found just now")
    }

    /// Waits until all nodes that are up serve and agree about the cluster, and their replicas follow.
    pub fn settle(&self) {
        until("the cluster has settled", || self.is_settled());
    }

    fn start_node(&mut self, shard: usize) {
        // Without a port of its own, the bus takes one that may be in use.
        let bus = free_port().to_string();
        let own = self.args.iter().map(String::as_str);
        let args: Vec<&str> = SETTINGS.iter().copied().chain(["--cluster-port", &bus]).chain(own).collect();
        let node = Redis::start(&args);
        self.ids.push(text(&node.command(&["CLUSTER", "MYID"])).to_owned());
        self.nodes.push(node);
        self.shards.push(shard);
    }

    fn meet(&self, node: usize, other: usize) {
        let bus = self.nodes[other].command(&["CONFIG", "GET", "cluster-port"]);
        let Reply::Array(name_and_value) = bus else { panic!("not an array: {bus:?}") };
        let port = self.nodes[other].port().to_string();
        self.tell(node, &["CLUSTER", "MEET", "127.0.0.1", &port, text(&name_and_value[1])]);
    }

    fn tell(&self, node: usize, words: &[&str]) {
        let reply = self.nodes[node].command(words);
        assert!(!matches!(reply, Reply::Error(_)), "{words:?}: {reply:?}");
    }

    fn up(&self) -> impl Iterator<Item = usize> {
        (0..self.nodes.len()).filter(|node| self.nodes[*node].is_up())
    }

    fn know_each_other(&self) -> bool {
        self.up().all(|node| {
            let known = self.known_by(node);
            known.len() == self.nodes.len() && known.iter().all(|peer| peer.is_certain)
        })
    }

    fn is_settled(&self) -> bool {
        let serves = |node: usize| {
            let info = self.nodes[node].command(&["CLUSTER", "INFO"]);
            field_of(text(&info), "cluster_state") == "ok"
        };
        let follows = |node: usize| {
            let primary = self.self_of(node).primary;
            let Some(primary) = self.ids.iter().position(|id| *id == primary) else { return true };
            !self.nodes[primary].is_up() || self.nodes[node].info_field("replication", "master_link_status") == "up"
        };
        let views: Vec<_> = self.up().map(|node| self.known_by(node)).collect();
        let agree = views.windows(2).all(|two| two[0] == two[1]);
        agree && self.know_each_other() && self.up().all(serves) && self.up().all(follows)
    }

    /// What a node knows about itself.
    fn self_of(&self, node: usize) -> Known {
        let mine = |known: &Known| known.id == self.ids[node];
        self.known_by(node).into_iter().find(mine).expect("a node knows itself")
    }

    /// What a node knows about all nodes, sorted.
    fn known_by(&self, node: usize) -> Vec<Known> {
        let reply = self.nodes[node].command(&["CLUSTER", "NODES"]);
        let mut known: Vec<_> = text(&reply).lines().map(Known::of).collect();
        known.sort_by(|a, b| a.id.cmp(&b.id));
        known
    }
}

/// A slot on its way from one primary to another. Nothing is undone when it is dropped.
#[must_use]
pub struct Move<'a> {
    cluster: &'a Cluster,
    slot: u16,
    from: usize,
    to: usize,
}

impl Move<'_> {
    /// Moves these keys only.
    pub fn carry(&self, keys: &[&str]) {
        let port = self.cluster.nodes[self.to].port().to_string();
        let mut words = vec!["MIGRATE", "127.0.0.1", &port, "", "0", "5000"];
        let password = self.cluster.args.iter().position(|arg| arg == "--requirepass");
        if let Some(at) = password {
            words.extend(["AUTH", &self.cluster.args[at + 1]]);
        }
        words.push("KEYS");
        words.extend(keys);
        self.cluster.tell(self.from, &words);
    }

    /// Moves the keys that are left, and the slot; waits until all nodes know.
    pub fn finish(self) {
        let slot = self.slot.to_string();
        loop {
            let reply = self.cluster.nodes[self.from].command(&["CLUSTER", "GETKEYSINSLOT", &slot, "100"]);
            let Reply::Array(keys) = &reply else { panic!("not an array: {reply:?}") };
            if keys.is_empty() {
                break;
            }
            self.carry(&keys.iter().map(text).collect::<Vec<_>>());
        }
        // The new primary first: were it the old one, nobody would serve the slot in between. Replicas hear it from
        // their primaries.
        let others = self.cluster.primaries().into_iter().filter(|node| *node != self.to && *node != self.from);
        for node in [self.to, self.from].into_iter().chain(others) {
            self.cluster.tell(node, &["CLUSTER", "SETSLOT", &slot, "NODE", &self.cluster.ids[self.to]]);
        }
        self.cluster.settle();
    }
}

/// One line of CLUSTER NODES: `id address flags primary ping pong epoch link slots…`.
#[derive(PartialEq, Eq)]
struct Known {
    id: String,
    /// Where clients, and where other nodes, are sent.
    address: String,
    /// The node that it follows, or `-`.
    primary: String,
    /// Its configuration epoch: of two that claim a slot, the higher one has it.
    epoch: u64,
    /// Slots that are on their way are not marked here.
    slots: Vec<RangeInclusive<u16>>,
    /// Not just met.
    is_certain: bool,
}

impl Known {
    fn of(line: &str) -> Self {
        let words: Vec<_> = line.split(' ').collect();
        let [id, address, flags, primary, _, _, epoch, _, slots @ ..] = words.as_slice() else { panic!("{line:?}") };
        let range = |word: &str| {
            let (first, last) = word.split_once('-').unwrap_or((word, word));
            first.parse().expect("a slot")..=last.parse().expect("a slot")
        };
        let slots = slots.iter().filter(|word| !word.starts_with('[')).map(|word| range(word)).collect();
        let is_certain = !flags.contains("handshake") && !flags.contains("noaddr");
        let epoch = epoch.parse().expect("an epoch");
        let [id, address, primary] = [id, address, primary].map(|word| (*word).to_owned());
        Self { id, address, primary, epoch, slots, is_certain }
    }

    fn is_replica(&self) -> bool {
        self.primary != "-"
    }

    fn serves(&self, slot: u16) -> bool {
        self.slots.iter().any(|range| range.contains(&slot))
    }
}
