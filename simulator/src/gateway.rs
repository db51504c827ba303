//! One gateway: real engines, one per core, with sockets and clocks of the simulated world.
//!
//! This is the seam. An [`Engine`] sees what the listener's drivers would show it: the time, bytes of clients, bytes and
//! events of links to shards, a wake-up at least each millisecond while something has a deadline. What it wants to send
//! comes out as bytes.

use std::{collections::VecDeque, mem, sync::Arc};

use arc_swap::ArcSwap;
use policy_sync::file;
use resp_client::{Action, LinkId};
use sluice::{
    buckets::BucketTable,
    clock::Now,
    config::Redis,
    decision::{By, Why},
    engine::{ConnId, Engine, Facts, RespSettings, Shared},
    heat::{Heat, board::Board},
    hot::HotSettings,
    metrics::counters::CoreCounters,
    policy::{LoadedPolicy, LocalTerms, PolicyInForce, RuleSlots},
    resp::frame::RequestLimits,
    store::{setup::StorePlan, shards::Shards, wire},
};

/// Rules of a policy, at most.
const RULES_MAX: usize = 64;
/// A core that nothing happens to is woken this often, for what time brings.
const BEAT_US: u64 = 10_000;
/// The same while something has a deadline.
const TICK_US: u64 = 1_000;

/// How a gateway is set up.
#[derive(Clone, Debug)]
pub struct GatewaySettings {
    /// Its cores.
    pub cores: usize,
    /// Client connections of each core.
    pub conns: usize,
    /// The store's settings; the URLs are the world's.
    pub redis: Redis,
    /// Those of hot keys.
    pub hot: HotSettings,
    /// Buckets in memory.
    pub buckets: usize,
}

/// What happens to a core.
#[derive(Clone, Debug)]
pub enum Input {
    /// A client's bytes.
    Request(ConnId, Vec<u8>),
    /// A link has connected.
    Connected(LinkId),
    /// A link could not.
    Failed(LinkId),
    /// A link's connection is gone.
    Closed(LinkId),
    /// A shard's bytes.
    Bytes(LinkId, Vec<u8>),
}

/// What a wake-up has brought about.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Bytes for clients.
    pub replies: Vec<(ConnId, Vec<u8>)>,
    /// Bytes for shards.
    pub calls: Vec<(LinkId, Vec<u8>)>,
    /// Links to make and to close.
    pub actions: Vec<Action>,
    /// When the core is to be woken if nothing happens before.
    pub wake_in_us: u64,
}

/// One core.
struct Core {
    engine: Engine,
    inbox: VecDeque<Input>,
}

/// One gateway, from its start to its end.
pub struct Gateway {
    cores: Vec<Core>,
    shards: Arc<Shards>,
    counters: Vec<Arc<CoreCounters>>,
    policy: PolicyInForce,
    slots: RuleSlots,
    seed: u64,
    local: LocalTerms,
    version: u64,
    started_us: u64,
}

struct NoFacts;

impl Facts for NoFacts {
    fn is_serving(&self) -> bool {
        true
    }

    fn info(&self) -> String {
        String::new()
    }

    fn ports(&self) -> String {
        String::new()
    }
}

impl Gateway {
    /// A gateway that starts now.
    ///
    /// # Panics
    ///
    /// Where the settings or the policy are none: a world that is made up wrongly must stop.
    #[allow(clippy::expect_used, reason = "a world that is made up wrongly must stop")]
    pub fn new(settings: &GatewaySettings, policy: &str, version: u64, seed: u64, now_us: u64) -> Self {
        let plan = StorePlan::new(&settings.redis, &settings.hot, settings.cores, seed)
            .expect("the settings are valid")
            .expect("there are URLs");
        let mut slots = RuleSlots::new(RULES_MAX);
        let local = settings.redis.local_terms();
        let policy = Arc::new(ArcSwap::from_pointee(load(policy, version, seed, local, &mut slots)));
        let board = Arc::new(Board::new(settings.cores, settings.hot.heat_keys));
        let shared = Shared {
            policy: Arc::clone(&policy),
            table: Arc::new(BucketTable::new(settings.buckets)),
            seed,
            facts: Arc::new(NoFacts),
        };
        let resp = RespSettings {
            request: RequestLimits { args_max: 64, arg_bytes_max: 1_024, request_bytes_max: 16_384 },
            output_backlog_bytes: 1 << 20,
            password: None,
        };
        let counters: Vec<_> = (0..settings.cores).map(|_| CoreCounters::new(RULES_MAX)).collect();
        let core = |(core, counters): (usize, &Arc<CoreCounters>)| {
            let redis = wire::Redis::new(
                plan.client.clone(),
                &plan.shards,
                core,
                seed ^ core as u64,
                (plan.asker.deadline_us, 0),
            );
            let mut engine = Engine::new(&shared, resp.clone(), Arc::clone(counters), (core, settings.cores))
                .with_heat(Heat::new(&settings.hot, &board, core, seed))
                .with_store(plan.asker, &plan.shards, redis.expect("no certificates are needed"));
            // A few connections.
            (0..settings.conns).for_each(|conn| engine.opened(ConnId(conn as u32)));
            Core { engine, inbox: VecDeque::new() }
        };
        let cores = counters.iter().enumerate().map(core).collect();
        Self { cores, shards: plan.shards, counters, policy, slots, seed, local, version, started_us: now_us }
    }

    /// Its clock. The wall clock may be set by anybody; the other one begins with the process.
    fn now(&self, now_us: u64) -> Now {
        let mono_us = now_us - self.started_us + TICK_US;
        // By an overnight or so; nothing but dates in overrides may depend on it.
        let unix_ms = 1_800_000_000_000 + i64::try_from(now_us / 1_000).unwrap_or(0);
        Now { mono_ms: mono_us / 1_000, mono_us, unix_ms }
    }

    /// Something happened to a core, which has not been woken yet.
    pub fn put(&mut self, core: usize, input: Input) {
        self.cores[core].inbox.push_back(input);
    }

    /// Wakes a core: what happened to it is taken, and everything that follows.
    pub fn wake(&mut self, core: usize, now_us: u64) -> Outcome {
        let now = self.now(now_us);
        let Core { engine, inbox } = &mut self.cores[core];
        let mut outcome = Outcome::default();
        engine.tick(now);
        for input in inbox.drain(..) {
            match input {
                Input::Request(conn, bytes) => engine.bytes_in(conn, &bytes),
                Input::Connected(link) => engine.link_connected(link),
                Input::Failed(link) => engine.link_failed(link, "refused"),
                Input::Closed(link) => engine.link_closed(link, "closed"),
                Input::Bytes(link, bytes) => engine.link_bytes_in(link, &bytes),
            }
        }
        loop {
            engine.settle();
            while let Some((conn, _)) = engine.next_dirty() {
                let mut bytes = Vec::new();
                engine.take_output(conn, &mut bytes);
                outcome.replies.push((conn, mem::take(&mut bytes)));
            }
            if !engine.flush_store() {
                break;
            }
        }
        outcome.actions.extend(std::iter::from_fn(|| engine.next_link_action()));
        while let Some(link) = engine.next_link_output() {
            let mut bytes = Vec::new();
            engine.take_link_output(link, &mut bytes);
            outcome.calls.push((link, bytes));
        }
        outcome.wake_in_us = if engine.needs_ticks() { TICK_US } else { BEAT_US };
        outcome
    }

    /// The gateway leaves in good order.
    pub fn leave(&mut self) {
        self.cores.iter_mut().for_each(|core| core.engine.leave());
    }

    /// Whether it has.
    pub fn has_left(&self) -> bool {
        self.cores.iter().all(|core| core.engine.has_left())
    }

    /// Another policy is in force from the next wake-ups on.
    pub fn reload(&mut self, policy: &str) {
        self.version += 1;
        let loaded = load(policy, self.version, self.seed, self.local, &mut self.slots);
        self.policy.store(Arc::new(loaded));
    }

    /// Leases that are open, and the tokens that they hold.
    pub fn leased(&self) -> (usize, u64) {
        self.shards.hot().leases.held()
    }

    /// How often buckets in memory may have been new: once, and once for each closing of a breaker.
    pub fn fillings(&self) -> u64 {
        let closings = self.shards.known().into_iter().map(|(shard, _)| u64::from(self.shards.breaker(shard).epoch()));
        1 + closings.sum::<u64>()
    }

    /// Checks of a rule that something decided, all cores together.
    pub fn decided(&self, rule: usize, by: By) -> u64 {
        // Slots are given in the order of the rules, and a policy keeps its rules.
        self.counters.iter().map(|core| core.decided_by(rule as u32, by).value()).sum()
    }

    /// Checks of a rule that the failure policy answered, for whatever reason.
    pub fn fallbacks(&self, rule: usize) -> u64 {
        let of = |core: &Arc<CoreCounters>| Why::ALL.map(|why| core.fallback(rule as u32, why).value());
        self.counters.iter().flat_map(of).sum()
    }
}

#[allow(clippy::expect_used, reason = "a world that is made up wrongly must stop")]
fn load(policy: &str, version: u64, seed: u64, local: LocalTerms, slots: &mut RuleSlots) -> LoadedPolicy {
    let mut policy = file::parse(policy, "simulation").expect("the policy is valid");
    policy.version = version;
    LoadedPolicy::load(policy, seed, local, slots).expect("it compiles").0
}
