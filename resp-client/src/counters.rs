//! What a client has done, for metrics.

/// Counts of one shard; they only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShardCounters {
    /// Calls accepted, counted where they were first sent.
    pub calls: u64,
    /// Replies handed to the caller, errors of Redis included.
    pub replies: u64,
    /// Of those, errors of Redis.
    pub errors: u64,
    /// Calls that ended by their deadline.
    pub timeouts: u64,
    /// Replies that came after their call had ended, and were dropped.
    pub late_replies: u64,
    /// Calls that failed because the link went down.
    pub disconnected: u64,
    /// Redirections: another node has the slot.
    pub moved: u64,
    /// Redirections: another node has the key for this once.
    pub asked: u64,
    /// Calls tried again because a slot is being moved.
    pub try_again: u64,
    /// Calls that found their script or function missing.
    pub no_script: u64,
    /// Scripts and functions loaded.
    pub script_loads: u64,
    /// Connections asked for.
    pub connects: u64,
    /// Connections that came up, handshake included.
    pub connected: u64,
    /// Connections that were not made, or refused in the handshake.
    pub connect_failures: u64,
    /// Links that were up and went down.
    pub disconnects: u64,
    /// Of those, links closed because no reply came for too long.
    pub stalls: u64,
    /// Of those, links closed because the peer broke the protocol.
    pub protocol_errors: u64,
}

impl ShardCounters {
    fn add(&mut self, other: &Self) {
        self.calls += other.calls;
        self.replies += other.replies;
        self.errors += other.errors;
        self.timeouts += other.timeouts;
        self.late_replies += other.late_replies;
        self.disconnected += other.disconnected;
        self.moved += other.moved;
        self.asked += other.asked;
        self.try_again += other.try_again;
        self.no_script += other.no_script;
        self.script_loads += other.script_loads;
        self.connects += other.connects;
        self.connected += other.connected;
        self.connect_failures += other.connect_failures;
        self.disconnects += other.disconnects;
        self.stalls += other.stalls;
        self.protocol_errors += other.protocol_errors;
    }
}

/// Counts of a client.
#[derive(Clone, Debug, Default)]
pub struct Counters {
    /// By shard index.
    pub shards: Vec<ShardCounters>,
    /// Calls refused because no link was up or no shard known.
    pub refused_not_connected: u64,
    /// Calls refused because the in-flight table was full.
    pub refused_in_flight: u64,
    /// Calls refused because a link's output was full.
    pub refused_output: u64,
    /// Times the topology was asked for.
    pub refreshes: u64,
    /// Of those, times no usable answer came.
    pub refresh_failures: u64,
    /// Times that no sentinel was left that could be reached.
    pub sentinels_lost: u64,
    /// Times Sentinel named another primary, or a cluster's slots changed hands.
    pub topology_changes: u64,
    /// Nodes that found no room in the table of shards.
    pub shards_refused: u64,
    /// Calls in flight now.
    pub in_flight: usize,
}

impl Counters {
    /// The sum over all shards.
    pub fn total(&self) -> ShardCounters {
        let mut total = ShardCounters::default();
        for shard in &self.shards {
            total.add(shard);
        }
        total
    }
}
