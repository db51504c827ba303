//! The world: virtual time, a network, shards, gateways, and those who ask them.
//!
//! One queue of events in the order of their time. Nothing here knows what a limit is: bytes go from clients to gateways
//! to nodes and back, faults happen when they are due, and the [`Ledger`] is told what was said and what was moved.

mod faults;
mod network;

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap, VecDeque},
};

use hdrhistogram::Histogram;
use resp_client::{Action, Address, Limits, LinkId, Reply, tag_slot};
use sluice::{
    decision::{By, UNLIMITED},
    engine::ConnId,
};

pub use self::faults::Fault;
use self::network::Network;
use crate::{
    bucket::Take,
    gateway::{Gateway, GatewaySettings, Input, Outcome},
    ledger::{BucketId, Circumstances, Ledger, OnFailure, RuleFacts, Verdict, Violation},
    random::Random,
    redis::{Moved, Node, SlotMap, node_of_port, port},
};

/// How requests arrive.
#[derive(Clone, Copy, Debug)]
pub enum Arrivals {
    /// At random, on average so many a second.
    Poisson(f64),
    /// So many at once, and again after so many microseconds.
    Bursts(u32, u64),
}

/// Some who ask.
#[derive(Clone, Debug)]
pub struct Stream {
    /// When their requests arrive, at all gateways together.
    pub arrivals: Arrivals,
    /// The attributes of each request; all rules of these apply.
    pub attributes: Vec<&'static str>,
    /// Each attribute's value is a number below this.
    pub identities: u32,
    /// Only identities whose buckets are on this shard, if one is given; there must be some.
    pub only_on: Option<usize>,
    /// The least and the most that a check costs.
    pub cost: (u32, u32),
    /// They ask from here on, in microseconds.
    pub from_us: u64,
    /// And until here.
    pub until_us: u64,
}

impl Stream {
    /// Checks of cost 1, for one identity of one attribute, from the beginning to the end.
    pub fn of_one(attribute: &'static str, per_second: f64) -> Self {
        Self {
            arrivals: Arrivals::Poisson(per_second),
            attributes: vec![attribute],
            identities: 1,
            only_on: None,
            cost: (1, 1),
            from_us: 0,
            until_us: u64::MAX,
        }
    }
}

/// A world before it begins.
#[derive(Clone, Debug)]
pub struct WorldSettings {
    /// All that happens by chance comes from it.
    pub seed: u64,
    /// How many gateways there are.
    pub gateways: usize,
    /// How each of them is set up.
    pub gateway: GatewaySettings,
    /// How many shards there are.
    pub shards: usize,
    /// Their policy. Rules that the ledger does not know are watched by nobody.
    pub policy: String,
    /// The same policy in other words, for reloads.
    pub reloaded: String,
    /// The policy's rules, in its order.
    pub rules: Vec<RuleFacts>,
    /// Who asks.
    pub streams: Vec<Stream>,
    /// From a gateway to a node, or back, in microseconds: the least and the most.
    pub one_way_us: (u64, u64),
    /// What a node needs for a command, in microseconds.
    pub service_us: u64,
    /// What a core needs for a wake-up, and for each thing that happened to it, in microseconds.
    pub work_us: u64,
    /// What goes wrong, and when.
    pub faults: Vec<(u64, Fault)>,
    /// How long all of this goes on, in microseconds.
    pub run_us: u64,
    /// One request in so many is an ECHO, whose answer shows that replies come in order; 0 for none.
    pub echo_one_in: u32,
    /// Note at each deny what leases hold.
    pub watch_leases: bool,
    /// Something is not as it should be, to see what follows.
    pub quirk: Option<Quirk>,
}

/// Something that is not as it should be: the ledger must notice, but for the last one, which is for measuring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quirk {
    /// Nodes forget their buckets now and then.
    Forgets,
    /// Nodes deny now and then what they hold.
    Denies,
    /// What is given back arrives twice.
    GivesBackTwice,
    /// Cores are not woken while they wait.
    Sleeps,
    /// Nodes never say how long to wait, so nothing is known to be empty: a world without the rejection cache.
    SaysNoWaits,
}

/// What was counted of a stream.
#[derive(Clone, Debug)]
pub struct Told {
    /// Checks that were asked.
    pub checks: u64,
    /// Of these, those that pass.
    pub allowed: u64,
    /// Those that do not.
    pub denied: u64,
    /// Those that nobody knows about.
    pub unavailable: u64,
    /// Those whose gateway went away.
    pub lost: u64,
    /// How many passed before the first was denied.
    pub allowed_at_first_deny: Option<u64>,
    /// From arrival to verdict, in microseconds.
    pub latency_us: Histogram<u64>,
}

/// What leases held when checks were denied.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stranded {
    /// Denies.
    pub denies: u64,
    /// Denies at a time when leases held at least one token.
    pub with_tokens_held: u64,
    /// The sum of the tokens held.
    pub tokens: u64,
    /// The most of them.
    pub tokens_max: u64,
}

/// What a client waits for.
enum Expect {
    Check { stream: usize, arrived_us: u64, cost: u64, buckets: Vec<BucketId> },
    Echo(u64),
}

/// Where a gateway stands.
struct Place {
    gateway: Option<Gateway>,
    /// Counts the gateways of the world, from 1: the one that stands here now.
    life: u64,
    is_leaving: bool,
    /// By core: when it is woken next, and when it is done with the last time.
    cores: Vec<(Option<u64>, u64)>,
    /// By core and connection.
    expects: Vec<Vec<VecDeque<Expect>>>,
    /// By rule: checks that the failure policies answered here; and in lives before, how many buckets there may have been.
    fallbacks: Vec<u64>,
    past_fillings: Vec<u64>,
    past_lives: Vec<u64>,
    opened: Vec<u64>,
    past_opened: Vec<u64>,
}

/// The clock of a shard, as its buckets have seen it.
#[derive(Clone, Copy, Default)]
struct ShardClock {
    last_ms: u64,
    refilled_ms: u64,
}

enum Event {
    Ask(usize),
    Wake { place: usize, life: u64, core: usize },
    ToCore { place: usize, life: u64, core: usize, input: Input },
    ToNode { pipe: usize, bytes: Vec<u8> },
    Connect { pipe: usize },
    Serve { node: usize },
    Fault(Fault),
    Leaving { place: usize, life: u64, until_us: u64 },
}

/// An event, by its time and by when it was planned.
struct Planned {
    at_us: u64,
    number: u64,
    event: Event,
}

impl PartialEq for Planned {
    fn eq(&self, other: &Self) -> bool {
        (self.at_us, self.number) == (other.at_us, other.number)
    }
}

impl Eq for Planned {}

impl PartialOrd for Planned {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Planned {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at_us, self.number).cmp(&(other.at_us, other.number))
    }
}

/// The world.
pub struct World {
    settings: WorldSettings,
    now_us: u64,
    number: u64,
    events: BinaryHeap<Reverse<Planned>>,
    random: Random,
    arrivals: Random,
    places: Vec<Place>,
    lives: u64,
    network: Network,
    slots: SlotMap,
    clocks: Vec<ShardClock>,
    ledger: Ledger,
    told: Vec<Told>,
    stranded: Stranded,
    has_faulted: bool,
    echoes: u64,
    /// A hash of everything that was said: two runs of one seed have the same.
    fingerprint: u64,
}

/// After the last request, everything that is in hand is answered within this time.
const REST_US: u64 = 100_000;
/// What a core may be late with, beyond the deadline: a tick, and what it is busy with.
const LATE_US: u64 = 1_500;
/// A gateway that leaves goes within this time.
const LEAVE_US: u64 = 200_000;

impl World {
    /// A world that is about to begin: all gateways start, and ask their shards.
    pub fn new(mut settings: WorldSettings) -> Self {
        let mut random = Random::new(settings.seed);
        let nodes = 2 * settings.shards;
        let urls: Vec<String> = (0..nodes).map(|node| format!("redis:{}", port(node))).collect();
        settings.gateway.redis.urls = vec![format!("redis+cluster://{}", urls.join(","))];
        let deadline_us = settings.gateway.redis.deadline_ms * 1_000 + LATE_US;
        let rules = settings.rules.len();
        let histogram = || Histogram::new(3).unwrap_or_else(|_| unreachable!("three digits can be had"));
        let told = || Told {
            checks: 0,
            allowed: 0,
            denied: 0,
            unavailable: 0,
            lost: 0,
            allowed_at_first_deny: None,
            latency_us: histogram(),
        };
        let place = || Place {
            gateway: None,
            life: 0,
            is_leaving: false,
            cores: vec![(None, 0); settings.gateway.cores],
            expects: Vec::new(),
            fallbacks: vec![0; rules],
            past_fillings: vec![0; rules],
            past_lives: vec![0; rules],
            opened: vec![0; rules],
            past_opened: vec![0; rules],
        };
        let mut world = Self {
            now_us: 0,
            number: 0,
            events: BinaryHeap::new(),
            arrivals: random.split(),
            places: (0..settings.gateways).map(|_| place()).collect(),
            lives: 0,
            network: Network::new(nodes, random.split(), settings.one_way_us, settings.service_us),
            slots: SlotMap { primaries: (0..settings.shards).collect() },
            clocks: vec![ShardClock::default(); settings.shards],
            ledger: Ledger::new(settings.rules.clone(), deadline_us),
            told: settings.streams.iter().map(|_| told()).collect(),
            stranded: Stranded::default(),
            has_faulted: false,
            echoes: 0,
            fingerprint: settings.seed,
            random,
            settings,
        };
        for shard in 0..world.slots.primaries.len() {
            world.network.nodes[world.settings.shards + shard].node.is_up = false;
            world.clocks[shard].last_ms = world.network.nodes[shard].node.clock_ms(0);
        }
        for place in 0..world.places.len() {
            world.start(place);
        }
        for at in 0..world.settings.streams.len() {
            world.plan_next(at, world.settings.streams[at].from_us);
        }
        for (at_us, fault) in std::mem::take(&mut world.settings.faults) {
            // A promoted replica has what it had heard by then.
            if let Fault::Failover { shard, lag_us, .. } = fault {
                world.plan(at_us.saturating_sub(lag_us), Event::Fault(Fault::Replicated { shard }));
            }
            world.plan(at_us, Event::Fault(fault));
        }
        world
    }

    /// Runs to the end.
    ///
    /// # Errors
    ///
    /// What does not hold, at the moment when it does not.
    pub fn run(&mut self) -> Result<(), Violation> {
        self.run_until(self.settings.run_us + REST_US)?;
        let waiting =
            self.places.iter().flat_map(|place| place.expects.iter().flatten()).map(VecDeque::len).sum::<usize>();
        if waiting > 0 {
            return Err(self.violation(format!("{waiting} requests were never answered")));
        }
        Ok(())
    }

    /// Runs until then.
    ///
    /// # Errors
    ///
    /// What does not hold, at the moment when it does not.
    pub fn run_until(&mut self, end_us: u64) -> Result<(), Violation> {
        while let Some(Reverse(next)) = self.events.peek()
            && next.at_us <= end_us
            && let Some(Reverse(Planned { at_us, event, .. })) = self.events.pop()
        {
            self.now_us = at_us;
            self.happen(event)?;
        }
        self.now_us = end_us;
        Ok(())
    }

    /// What was counted of each stream.
    pub fn told(&self) -> &[Told] {
        &self.told
    }

    /// What leases held when checks were denied.
    pub fn stranded(&self) -> Stranded {
        self.stranded
    }

    /// By node: calls of the script that it carried out.
    pub fn calls(&self) -> Vec<u64> {
        self.network.nodes.iter().map(|node| node.calls).collect()
    }

    /// A hash of every verdict and its time.
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    /// What was admitted of a bucket.
    pub fn admitted(&self, bucket: BucketId) -> u64 {
        self.ledger.admitted(bucket)
    }

    /// Checks of a rule that something decided, at all gateways that stand now.
    pub fn decided(&self, rule: usize, by: By) -> u64 {
        self.places.iter().filter_map(|place| place.gateway.as_ref()).map(|gateway| gateway.decided(rule, by)).sum()
    }

    /// Leases that are open at all gateways, and the tokens that they hold.
    pub fn leased(&self) -> (usize, u64) {
        let held = self.places.iter().filter_map(|place| place.gateway.as_ref()).map(Gateway::leased);
        held.fold((0, 0), |sum, held| (sum.0 + held.0, sum.1 + held.1))
    }

    /// Events that are planned: bounded, whatever happens.
    pub fn planned(&self) -> usize {
        self.events.len()
    }

    fn violation(&self, what: String) -> Violation {
        Violation { at_us: self.now_us, what }
    }

    fn plan(&mut self, at_us: u64, event: Event) {
        self.number += 1;
        self.events.push(Reverse(Planned { at_us, number: self.number, event }));
    }

    fn plan_next(&mut self, stream: usize, after_us: u64) {
        let settings = &self.settings.streams[stream];
        let pause_us = match settings.arrivals {
            Arrivals::Poisson(per_second) => self.arrivals.pause_us(per_second),
            Arrivals::Bursts(_, every_us) => every_us,
        };
        let at_us = after_us + pause_us;
        if at_us < settings.until_us.min(self.settings.run_us) {
            self.plan(at_us, Event::Ask(stream));
        }
    }

    fn happen(&mut self, event: Event) -> Result<(), Violation> {
        match event {
            Event::Ask(stream) => {
                let requests = match self.settings.streams[stream].arrivals {
                    Arrivals::Poisson(_) => 1,
                    Arrivals::Bursts(size, _) => size,
                };
                (0..requests).for_each(|_| self.ask(stream));
                self.plan_next(stream, self.now_us);
            }
            Event::Wake { place, life, core } => {
                if self.places[place].life == life && self.places[place].cores[core].0 == Some(self.now_us) {
                    return self.wake(place, core);
                }
            }
            Event::ToCore { place, life, core, input } => {
                let here = &mut self.places[place];
                if here.life == life
                    && let Some(gateway) = &mut here.gateway
                {
                    gateway.put(core, input);
                    self.wake_at(place, core, self.now_us);
                }
            }
            Event::ToNode { pipe, bytes } => {
                if let Some(at_us) = self.network.arrive(pipe, &bytes, self.now_us) {
                    let node = self.network.pipes[pipe].node;
                    self.plan(at_us, Event::Serve { node });
                }
            }
            Event::Connect { pipe } => self.connect(pipe),
            Event::Serve { node } => return self.serve(node),
            Event::Fault(fault) => self.fault(fault),
            Event::Leaving { place, life, until_us } => self.leaving(place, life, until_us),
        }
        Ok(())
    }

    /// A gateway starts where there is none.
    fn start(&mut self, place: usize) {
        self.lives += 1;
        let (life, seed) = (self.lives, u64::from(self.random.below(u32::MAX)));
        let gateway = Gateway::new(&self.settings.gateway, &self.settings.policy, 1, seed, self.now_us);
        let GatewaySettings { cores, conns, .. } = self.settings.gateway;
        let here = &mut self.places[place];
        (here.gateway, here.life, here.is_leaving) = (Some(gateway), life, false);
        here.cores = vec![(None, 0); cores];
        here.expects = (0..cores).map(|_| (0..conns).map(|_| VecDeque::new()).collect()).collect();
        for core in 0..cores {
            // The threads of a process do not start at once.
            let late_us = u64::from(self.random.below(1_000));
            self.wake_at(place, core, self.now_us + late_us);
        }
    }

    fn wake_at(&mut self, place: usize, core: usize, at_us: u64) {
        let (planned, busy_until_us) = &mut self.places[place].cores[core];
        let at_us = at_us.max(*busy_until_us);
        if planned.is_none_or(|planned| at_us < planned) {
            *planned = Some(at_us);
            let life = self.places[place].life;
            self.plan(at_us, Event::Wake { place, life, core });
        }
    }

    /// One request, at some gateway.
    fn ask(&mut self, stream: usize) {
        let random = &mut self.arrivals;
        let place = random.index(self.places.len());
        let (core, conn) = (random.index(self.settings.gateway.cores), random.index(self.settings.gateway.conns));
        let settings = &self.settings.streams[stream];
        let cost = random.within(settings.cost.0.into(), settings.cost.1.into());
        let is_echo = self.settings.echo_one_in > 0 && random.below(self.settings.echo_one_in) == 0;
        let mut words: Vec<String> = vec!["CHECK".into()];
        if cost != 1 {
            words.extend(["COST".into(), cost.to_string()]);
        }
        let mut buckets = Vec::new();
        for &attribute in &settings.attributes {
            let mut identity = random.below(settings.identities);
            while settings.only_on.is_some_and(|shard| shard_of(&self.slots, attribute, identity) != shard) {
                identity = random.below(settings.identities);
            }
            words.extend([attribute.to_owned(), identity.to_string()]);
            let rules = self.settings.rules.iter().enumerate();
            buckets.extend(rules.filter(|(_, rule)| rule.attribute == attribute).map(|(rule, _)| (rule, identity)));
        }
        let here = &mut self.places[place];
        let Some(gateway) = here.gateway.as_mut().filter(|_| !here.is_leaving) else { return };
        let expect = if is_echo {
            self.echoes += 1;
            words = vec!["ECHO".into(), self.echoes.to_string()];
            Expect::Echo(self.echoes)
        } else {
            self.told[stream].checks += 1;
            Expect::Check { stream, arrived_us: self.now_us, cost, buckets }
        };
        here.expects[core][conn].push_back(expect);
        let mut bytes = format!("*{}\r\n", words.len());
        words.iter().for_each(|word| bytes += &format!("${}\r\n{word}\r\n", word.len()));
        gateway.put(core, Input::Request(ConnId(conn as u32), bytes.into_bytes()));
        self.wake_at(place, core, self.now_us);
    }

    fn wake(&mut self, place: usize, core: usize) -> Result<(), Violation> {
        let here = &mut self.places[place];
        here.cores[core].0 = None;
        let Some(gateway) = &mut here.gateway else { return Ok(()) };
        let Outcome { replies, calls, actions, wake_in_us } = gateway.wake(core, self.now_us);
        let work = replies.len() + calls.len() + 1;
        here.cores[core].1 = self.now_us + self.settings.work_us * work as u64;
        let life = here.life;
        let deciders = here.fallbacks.iter_mut().zip(&mut here.opened).enumerate();
        deciders.for_each(|(rule, (fallbacks, opened))| {
            (*fallbacks, *opened) = (gateway.fallbacks(rule), gateway.decided(rule, By::Open));
        });
        let wake_in_us = if self.settings.quirk == Some(Quirk::Sleeps) { 50_000 } else { wake_in_us };
        self.wake_at(place, core, self.now_us + wake_in_us);
        for action in actions {
            match action {
                Action::Connect { link, address } => {
                    let node = match address {
                        Address::Tcp { port, .. } => node_of_port(port),
                        Address::Unix(path) => unreachable!("no node is at {path}"),
                    };
                    let (pipe, at_us) = self.network.dial((place, life, core), link, node, self.now_us);
                    self.plan(at_us, Event::Connect { pipe });
                }
                Action::Close { link } => self.network.hang_up((place, life, core), link),
            }
        }
        for (link, bytes) in calls {
            if let Some((pipe, at_us)) = self.network.send_to_node((place, life, core), link, self.now_us) {
                self.plan(at_us, Event::ToNode { pipe, bytes });
            }
        }
        for (conn, bytes) in replies {
            self.hear(place, core, conn, &bytes)?;
        }
        Ok(())
    }

    /// A node is asked for a connection, and says yes, or is not there.
    fn connect(&mut self, pipe: usize) {
        let now_us = self.now_us;
        let is_up = self.network.nodes[self.network.pipes[pipe].node].node.is_up;
        self.network.pipes[pipe].is_open = is_up;
        let input: fn(LinkId) -> Input = if is_up { Input::Connected } else { Input::Failed };
        self.tell_core(pipe, now_us, input);
    }

    /// Something reaches the core at the other end of a pipe.
    fn tell_core(&mut self, pipe: usize, now_us: u64, input: impl FnOnce(LinkId) -> Input) {
        if let Some(at_us) = self.network.send_to_core(pipe, now_us) {
            let (place, life, core) = self.network.pipes[pipe].owner;
            let input = input(self.network.pipes[pipe].link);
            self.plan(at_us, Event::ToCore { place, life, core, input });
        }
    }

    fn serve(&mut self, node: usize) -> Result<(), Violation> {
        let Some((pipe, words)) = self.network.next_command(node, self.now_us) else {
            if let Some(at_us) = self.network.serves_next(node, self.now_us) {
                self.plan(at_us, Event::Serve { node });
            }
            return Ok(());
        };
        let mut reply = Vec::new();
        let at = &mut self.network.nodes[node];
        let moved = at.node.execute(self.now_us, &self.slots, &words, &mut reply);
        let moved =
            self.settings.quirk.map_or(moved.clone(), |quirk| self.oddly(quirk, node, &words, moved, &mut reply));
        let at = &mut self.network.nodes[node];
        at.calls += u64::from(!moved.is_empty());
        let life = self.network.pipes[pipe].owner.1;
        self.look_at_clock_of(node);
        for moved in &moved {
            if let Some(bucket) = self.bucket_of(moved) {
                self.ledger.moved(self.now_us, life, bucket, moved)?;
            }
        }
        if self.network.pipes[pipe].is_open {
            self.tell_core(pipe, self.now_us, |link| Input::Bytes(link, reply));
        }
        if let Some(at_us) = self.network.serves_next(node, self.now_us) {
            self.plan(at_us, Event::Serve { node });
        }
        Ok(())
    }

    /// What a node does that is not as it should be, after a call that was.
    fn oddly(
        &mut self,
        quirk: Quirk,
        node: usize,
        words: &[Vec<u8>],
        moved: Vec<Moved>,
        reply: &mut Vec<u8>,
    ) -> Vec<Moved> {
        let Some(first) = moved.first().cloned() else { return moved };
        let now_us = self.now_us;
        let at = &mut self.network.nodes[node];
        match quirk {
            Quirk::Forgets if at.calls % 50 == 49 => at.node.buckets.clear(),
            Quirk::Denies if at.calls % 50 == 49 && first.answer.granted > 0 => {
                let deny = |reply: &mut Vec<u8>| reply.extend_from_slice(b":0\r\n:0\r\n:40\r\n:40\r\n");
                reply.clear();
                reply.extend_from_slice(format!("*{}\r\n", 4 * moved.len()).as_bytes());
                moved.iter().for_each(|_| deny(reply));
            }
            Quirk::GivesBackTwice if first.take == Take::Back => {
                return [moved, at.node.execute(now_us, &self.slots, words, &mut Vec::new())].concat();
            }
            Quirk::SaysNoWaits => {
                reply.clear();
                reply.extend_from_slice(format!("*{}\r\n", 4 * moved.len()).as_bytes());
                for Moved { answer, .. } in &moved {
                    let (granted, remaining) = (answer.granted, answer.remaining);
                    let retry_ms = answer.retry_ms.min(1);
                    reply.extend_from_slice(format!(":{granted}\r\n:{remaining}\r\n:{retry_ms}\r\n:0\r\n").as_bytes());
                }
            }
            _ => {}
        }
        moved
    }

    /// `rl:{<attribute>=<identity>[#<part>]}:<rule>`; rules that the ledger does not know are nobody's.
    fn bucket_of(&self, moved: &Moved) -> Option<BucketId> {
        let (tag, rule) = moved.key.strip_prefix("rl:{")?.split_once("}:")?;
        let (_, identity) = tag.split_once('=')?;
        let identity = identity.split_once('#').map_or(identity, |(whole, _)| whole);
        let rule = self.settings.rules.iter().position(|known| known.name == rule)?;
        Some((rule, identity.parse().ok()?))
    }

    /// The shard of a bucket that is not split.
    pub fn shard_of(&self, (rule, identity): BucketId) -> usize {
        shard_of(&self.slots, self.settings.rules[rule].attribute, identity)
    }

    /// Notes what has passed on the clock of a shard.
    fn look_at_clock(&mut self, shard: usize) -> u64 {
        let node = self.slots.primaries[shard];
        let clock_ms = self.network.nodes[node].node.clock_ms(self.now_us);
        let clock = &mut self.clocks[shard];
        clock.refilled_ms += clock_ms.saturating_sub(clock.last_ms);
        clock.last_ms = clock_ms;
        clock.refilled_ms
    }

    fn look_at_clock_of(&mut self, node: usize) {
        if let Some(shard) = self.slots.primaries.iter().position(|&primary| primary == node) {
            self.look_at_clock(shard);
        }
    }

    /// A client reads replies.
    fn hear(&mut self, place: usize, core: usize, conn: ConnId, mut bytes: &[u8]) -> Result<(), Violation> {
        while !bytes.is_empty() {
            let (reply, len) = match Reply::parse(bytes, &Limits::default()) {
                Ok(Some(parsed)) => parsed,
                _ => return Err(self.violation(format!("no reply: {}", bytes.escape_ascii()))),
            };
            bytes = &bytes[len..];
            let expect = self.places[place].expects[core][conn.0 as usize].pop_front();
            match expect {
                None => return Err(self.violation(format!("nobody asked for {reply:?}"))),
                Some(Expect::Echo(token)) => {
                    if reply.as_bytes() != Some(token.to_string().as_bytes()) {
                        return Err(self.violation(format!("{reply:?} is not the echo of {token}")));
                    }
                }
                Some(Expect::Check { stream, arrived_us, cost, buckets }) => {
                    let allowed = self.judge(&reply, cost, &buckets)?;
                    self.note(stream, allowed, arrived_us);
                    let around = self.circumstances(&buckets);
                    self.ledger.said(
                        Verdict { allowed, arrived_us, cost, life: self.places[place].life },
                        &buckets,
                        &around,
                    )?;
                }
            }
        }
        Ok(())
    }

    /// What a reply says, if it makes sense.
    fn judge(&self, reply: &Reply<'_>, cost: u64, buckets: &[BucketId]) -> Result<i64, Violation> {
        let nonsense = || self.violation(format!("{reply:?} makes no sense for a check of cost {cost}"));
        let mut items = reply.items().ok_or_else(nonsense)?;
        let mut number = || items.next().and_then(|item| item.as_integer()).ok_or_else(nonsense);
        let (allowed, limit, remaining) = (number()?, number()?, number()?);
        let (retry_ms, reset_ms) = (number()?, number()?);
        let rule = items.next().and_then(|name| name.as_bytes()).ok_or_else(nonsense)?;
        let of =
            |name: &[u8]| buckets.iter().map(|&(at, _)| &self.settings.rules[at]).find(|r| r.name.as_bytes() == name);
        let rule = of(rule).ok_or_else(nonsense)?;
        let in_bounds = (0..=limit).contains(&remaining) && reset_ms >= 0 && items.next().is_none();
        let is_sane = match allowed {
            // Nobody has looked how much is left.
            1 if rule.on_failure == OnFailure::Open && remaining == UNLIMITED => retry_ms == 0,
            1 => in_bounds && retry_ms == 0,
            0 => in_bounds && (retry_ms > 0 || retry_ms == -1),
            -1 => rule.on_failure == OnFailure::Closed,
            _ => false,
        };
        if is_sane { Ok(allowed) } else { Err(nonsense()) }
    }

    fn note(&mut self, stream: usize, allowed: i64, arrived_us: u64) {
        let told = &mut self.told[stream];
        match allowed {
            1 => told.allowed += 1,
            0 => {
                told.denied += 1;
                told.allowed_at_first_deny = told.allowed_at_first_deny.or(Some(told.allowed));
            }
            _ => told.unavailable += 1,
        }
        told.latency_us.saturating_record(self.now_us - arrived_us);
        // FNV-1a, by words.
        for word in [self.now_us, stream as u64, allowed.cast_unsigned()] {
            self.fingerprint = (self.fingerprint ^ word).wrapping_mul(0x100_0000_01B3);
        }
        if allowed == 0 && self.settings.watch_leases {
            let (_, tokens) = self.leased();
            self.stranded.denies += 1;
            self.stranded.with_tokens_held += u64::from(tokens > 0);
            self.stranded.tokens += tokens;
            self.stranded.tokens_max = self.stranded.tokens_max.max(tokens);
        }
    }

    fn circumstances(&mut self, buckets: &[BucketId]) -> Vec<Circumstances> {
        let cost_max = self.settings.streams.iter().map(|stream| u64::from(stream.cost.1)).max().unwrap_or(1);
        let each = buckets.iter().map(|&bucket| {
            let rule = bucket.0;
            let refilled_ms = if self.settings.rules[rule].is_split {
                (0..self.clocks.len()).map(|shard| self.look_at_clock(shard)).max().unwrap_or(0)
            } else {
                self.look_at_clock(self.shard_of(bucket))
            };
            let mut around = Circumstances {
                now_us: self.now_us,
                refilled_ms,
                local_fillings: 0,
                local_gateways: 0,
                opened: 0,
                is_healthy: !self.has_faulted,
            };
            for place in &self.places {
                let needed = place.fallbacks[rule] > 0;
                let fillings = place.gateway.as_ref().filter(|_| needed).map_or(0, Gateway::fillings);
                around.local_fillings += place.past_fillings[rule] + fillings;
                around.local_gateways += place.past_lives[rule] + u64::from(needed);
                around.opened += cost_max * (place.past_opened[rule] + place.opened[rule]);
                around.is_healthy &= place.past_lives[rule] == 0 && !needed;
            }
            around
        });
        each.collect()
    }
}

fn shard_of(slots: &SlotMap, attribute: &str, identity: u32) -> usize {
    slots.shard_of(tag_slot(format!("{attribute}={identity}").as_bytes()))
}

/// Where a link's two ends are: place, life, core.
type Owner = (usize, u64, usize);

/// By owner and link: the pipe.
type Pipes = HashMap<(Owner, usize), usize>;
