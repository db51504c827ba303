//! What all cores know of the shards: each one's name, its breaker, what every core measured of it, and which of their
//! keys are hot.
//!
//! A shard gets a number when a core first meets its address, and keeps it for the life of the process: an address that
//! comes back is the shard that it was. Numbers are given out under a lock, which no check ever takes.

use std::sync::{Arc, Mutex, PoisonError};

use super::breaker::{Breaker, BreakerSettings, Report, State};
use crate::{
    hot::{Hot, HotSettings},
    metrics::counters::Counter,
};

/// A shard's number within the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ShardId(pub(super) u16);

impl ShardId {
    /// As an index.
    #[inline(always)]
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// What happens on the connections to the shards, for one core; all shards together.
#[derive(Debug, Default)]
pub struct LinkCounters {
    /// Checks that wait.
    pub waiting: Counter,
    /// Calls in flight.
    pub in_flight: Counter,
    events: [Counter; LinkEvent::COUNT],
}

/// What can happen on the way to the shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
#[allow(missing_docs, reason = "`help` says what each is")]
pub enum LinkEvent {
    Connected,
    ConnectFailed,
    Disconnected,
    Stalled,
    ProtocolError,
    LateReply,
    Moved,
    Asked,
    TryAgain,
    NoScript,
    ScriptLoaded,
    Refreshed,
    TopologyChanged,
    SentinelsLost,
    RefusedNotConnected,
    RefusedFull,
}

impl LinkEvent {
    /// How many there are.
    pub const COUNT: usize = 16;
    /// All of them, in the order of their numbers.
    pub const ALL: [Self; Self::COUNT] = [
        Self::Connected,
        Self::ConnectFailed,
        Self::Disconnected,
        Self::Stalled,
        Self::ProtocolError,
        Self::LateReply,
        Self::Moved,
        Self::Asked,
        Self::TryAgain,
        Self::NoScript,
        Self::ScriptLoaded,
        Self::Refreshed,
        Self::TopologyChanged,
        Self::SentinelsLost,
        Self::RefusedNotConnected,
        Self::RefusedFull,
    ];

    /// The word for metrics.
    pub fn word(self) -> &'static str {
        match self {
            Self::Connected => "connected",
            Self::ConnectFailed => "connect_failed",
            Self::Disconnected => "disconnected",
            Self::Stalled => "stalled",
            Self::ProtocolError => "protocol_error",
            Self::LateReply => "late_reply",
            Self::Moved => "moved",
            Self::Asked => "ask",
            Self::TryAgain => "try_again",
            Self::NoScript => "no_script",
            Self::ScriptLoaded => "script_loaded",
            Self::Refreshed => "refreshed",
            Self::TopologyChanged => "topology_changed",
            Self::SentinelsLost => "sentinels_lost",
            Self::RefusedNotConnected => "refused_not_connected",
            Self::RefusedFull => "refused_full",
        }
    }
}

impl LinkCounters {
    /// The counter of an event.
    pub fn event(&self, event: LinkEvent) -> &Counter {
        &self.events[event as usize]
    }

    /// Publishes what a client has counted.
    pub fn publish(&self, client: &resp_client::Counters, waiting: usize) {
        let total = client.total();
        self.waiting.set(waiting as u64);
        self.in_flight.set(client.in_flight as u64);
        for event in LinkEvent::ALL {
            let count = match event {
                LinkEvent::Connected => total.connected,
                LinkEvent::ConnectFailed => total.connect_failures,
                LinkEvent::Disconnected => total.disconnects,
                LinkEvent::Stalled => total.stalls,
                LinkEvent::ProtocolError => total.protocol_errors,
                LinkEvent::LateReply => total.late_replies,
                LinkEvent::Moved => total.moved,
                LinkEvent::Asked => total.asked,
                LinkEvent::TryAgain => total.try_again,
                LinkEvent::NoScript => total.no_script,
                LinkEvent::ScriptLoaded => total.script_loads,
                LinkEvent::Refreshed => client.refreshes,
                LinkEvent::TopologyChanged => client.topology_changes,
                LinkEvent::SentinelsLost => client.sentinels_lost,
                LinkEvent::RefusedNotConnected => client.refused_not_connected,
                LinkEvent::RefusedFull => client.refused_in_flight + client.refused_output,
            };
            self.event(event).set(count);
        }
    }
}

/// All shards.
pub struct Shards {
    shards: Box<[Shard]>,
    links: Box<[LinkCounters]>,
    names: Mutex<Vec<Arc<str>>>,
    hot: Hot,
}

#[derive(Debug)]
struct Shard {
    breaker: Breaker,
    cores: Box<[ShardCounters]>,
}

/// What one core counts of one shard.
#[derive(Debug, Default)]
pub struct ShardCounters {
    /// Calls that were answered, in whatever way.
    pub replies: Counter,
    /// Calls without an answer by their deadline.
    pub timeouts: Counter,
    /// Calls that ended because the connection did, or that found none.
    pub down: Counter,
    /// Calls that the shard answered by an error.
    pub errors: Counter,
    /// Round trips by how long they took; the last one takes all that is longer than [`LATENCY_US_MAX`].
    latencies: [Counter; LATENCY_US_MAX.len() + 1],
    /// The sum of all round trips, in microseconds.
    pub latency_us_sum: Counter,
}

/// Upper ends of the latency histogram, in microseconds.
pub const LATENCY_US_MAX: [u64; 14] =
    [50, 100, 200, 300, 500, 750, 1_000, 1_500, 2_000, 3_000, 4_000, 5_000, 10_000, 50_000];

impl ShardCounters {
    /// Counts a round trip.
    pub fn round_trip(&self, us: u64) {
        let at = LATENCY_US_MAX.iter().position(|&max| us <= max).unwrap_or(LATENCY_US_MAX.len());
        self.latencies[at].add(1);
        self.latency_us_sum.add(us);
        self.replies.add(1);
    }

    /// The histogram's counts, not cumulative.
    pub fn latencies(&self) -> [u64; LATENCY_US_MAX.len() + 1] {
        std::array::from_fn(|at| self.latencies[at].value())
    }
}

impl Shards {
    /// Room for so many shards, and so many cores' counters of each.
    pub fn new(shards: usize, cores: usize, hot: &HotSettings) -> Self {
        let shard =
            |_| Shard { breaker: Breaker::default(), cores: (0..cores).map(|_| ShardCounters::default()).collect() };
        Self {
            shards: (0..shards).map(shard).collect(),
            links: (0..cores).map(|_| LinkCounters::default()).collect(),
            names: Mutex::default(),
            hot: Hot::new(hot),
        }
    }

    /// What is known of hot keys, whichever shard has them.
    #[inline(always)]
    pub fn hot(&self) -> &Hot {
        &self.hot
    }

    /// How many shards there is room for.
    pub fn len(&self) -> usize {
        self.shards.len()
    }

    /// How many cores count.
    pub fn cores(&self) -> usize {
        self.links.len()
    }

    /// What a core counts on its connections.
    pub fn links(&self, core: usize) -> &LinkCounters {
        &self.links[core]
    }

    /// Whether there is room for none.
    pub fn is_empty(&self) -> bool {
        self.shards.is_empty()
    }

    /// The number of the shard at this address. `None` when there are more addresses than room.
    pub fn number(&self, name: &str) -> Option<ShardId> {
        let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        let at = match names.iter().position(|known| **known == *name) {
            Some(at) => at,
            None if names.len() < self.shards.len() => {
                names.push(name.into());
                names.len() - 1
            }
            None => return None,
        };
        // There is room for at most 65,536; see `new` and the setting's bound.
        u16::try_from(at).ok().map(ShardId)
    }

    /// The breaker of a shard.
    pub fn breaker(&self, shard: ShardId) -> &Breaker {
        &self.shards[shard.index()].breaker
    }

    /// What a core counts of a shard.
    pub fn counters(&self, shard: ShardId, core: usize) -> &ShardCounters {
        &self.shards[shard.index()].cores[core]
    }

    /// All shards that any core has met: number, address.
    pub fn known(&self) -> Vec<(ShardId, Arc<str>)> {
        let names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        names.iter().enumerate().map(|(at, name)| (ShardId(at as u16), Arc::clone(name))).collect()
    }

    /// Tells a breaker what has ended, and people when that changes it.
    pub(super) fn report(&self, shard: ShardId, settings: &BreakerSettings, now_ms: u64, report: Report) {
        let Some(state) = self.breaker(shard).report(settings, now_ms, report) else { return };
        let known = self.known();
        let name = known.get(shard.index()).map_or("?", |(_, name)| name);
        match state {
            State::Open => tracing::warn!(
                shard = name,
                "breaker open: for {} ms nothing is asked of this shard, the failure policies answer",
                settings.open_ms
            ),
            State::Closed | State::HalfOpen => tracing::info!(shard = name, "breaker {}", state.word()),
        }
    }

    /// Adds up a counter over all cores.
    pub fn sum(&self, shard: ShardId, read: impl Fn(&ShardCounters) -> u64) -> u64 {
        self.shards[shard.index()].cores.iter().map(read).sum()
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_keeps_its_number_and_there_is_an_end_to_them() {
        let shards = Shards::new(2, 1, &HotSettings::default());
        let numbers: Vec<_> = ["a:1", "b:1", "a:1", "c:1"].map(|name| shards.number(name).map(ShardId::index)).into();
        assert_eq!(numbers, [Some(0), Some(1), Some(0), None]);
    }

    #[test]
    fn a_round_trip_is_counted_where_it_belongs() {
        let counters = ShardCounters::default();
        [50, 51, 1_000_000].into_iter().for_each(|us| counters.round_trip(us));
        let counts = counters.latencies();
        assert_eq!((counts[0], counts[1], counts[LATENCY_US_MAX.len()]), (1, 1, 1));
        assert_eq!(counters.latency_us_sum.value(), 1_000_101);
    }
}
