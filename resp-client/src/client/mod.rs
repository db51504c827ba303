//! The client: calls in, completions out, and bytes of numbered links on the other side.
//!
//! A call is encoded once, into a buffer of the in-flight table, and copied from there to the output of the link that
//! its slot names; when it has to go elsewhere it is copied again. Its completion comes from whatever ends it: a reply
//! ([`Client::received`]), its deadline ([`Client::tick`]), or the end of its link ([`Client::closed`]).
//!
//! Here are the face and the way of a call; `events` has what the sockets report, `replies` what replies mean, `chores`
//! what time brings, `cluster` and `sentinel` how the shards are found, `shards` their numbers, `calls` the table.

mod calls;
mod chores;
mod cluster;
mod events;
mod replies;
mod sentinel;
mod shards;

use std::{collections::VecDeque, fmt};

pub(crate) use self::calls::CallId;
use self::{calls::Calls, cluster::Refresh, sentinel::Watch};
use crate::{
    clock::{Chance, Micros},
    command::Encoder,
    config::{Address, Config, Mode},
    counters::Counters,
    error::{CallError, Error},
    link::{Asked, Link, LinkId},
    reply::Reply,
    script::ScriptId,
    slot::SLOTS,
    tls::{TlsClient, TlsError},
};

/// No shard.
const NONE: u16 = u16::MAX;

/// A shard by number: that of an address, for as long as the client knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ShardIndex(pub u16);

/// The end of a call. Each accepted call has exactly one.
#[derive(Clone, Copy, Debug)]
pub struct Completion<'a> {
    /// What the caller gave.
    pub token: u64,
    /// The shard that answered, or that was to.
    pub shard: Option<ShardIndex>,
    /// When the call was sent, the last time if it was sent several times: no later than Redis executed it.
    pub sent_at: Micros,
    /// The reply, which is never [`Reply::Error`], or what went wrong.
    pub outcome: Result<Reply<'a>, Error<'a>>,
}

/// What the owner of the sockets is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Connect, and report [`Client::connected`] or [`Client::connect_failed`].
    Connect {
        /// Which link.
        link: LinkId,
        /// Where to.
        address: Address,
    },
    /// Close the connection, or give up making it. Nothing needs to be reported.
    Close {
        /// Which link.
        link: LinkId,
    },
}

/// A client of one Redis, of the primary that Sentinel names, or of a cluster. One per core.
pub struct Client {
    config: Config,
    tls: Option<TlsClient>,
    chance: Chance,
    calls: Calls,
    /// The sentinels, then the shards in the order of their index.
    links: Vec<Link>,
    sentinels: usize,
    /// By slot the shard's index; everywhere the same one if there is no cluster.
    slots: Box<[u16; SLOTS as usize]>,
    /// The shard that the next call without a slot may begin to look at.
    any: usize,
    refresh: Refresh,
    watch: Watch,
    /// Calls that met a slot on the move, and when each is tried again.
    paused: VecDeque<(Micros, CallId)>,
    actions: VecDeque<Action>,
    /// Links that got something to send since they were last asked for.
    with_output: VecDeque<LinkId>,
    /// When `chores` looks at the links next.
    chores_at: Micros,
    counters: Counters,
}

impl Client {
    /// A client that knows where to begin; its first tick makes it want connects, so the time that these may take does
    /// not begin before somebody is there to make them. `seed` spreads what should not happen on all
    /// cores and hosts at once: give each client its own.
    pub fn new(config: Config, seed: u64, now: Micros) -> Result<Self, TlsError> {
        let tls = config.tls.as_ref().map(TlsClient::new).transpose()?;
        let mut client = Self {
            tls,
            chance: Chance::new(seed),
            calls: Calls::new(config.in_flight_max, config.call_bytes, now),
            links: Vec::new(),
            sentinels: 0,
            slots: Box::new([NONE; SLOTS as usize]),
            any: 0,
            refresh: Refresh::default(),
            watch: Watch::default(),
            paused: VecDeque::new(),
            actions: VecDeque::new(),
            with_output: VecDeque::new(),
            chores_at: now,
            counters: Counters::default(),
            config,
        };
        client.begin();
        Ok(client)
    }

    fn begin(&mut self) {
        match self.config.mode.clone() {
            Mode::Single(address) => {
                let shard = self.shard_at(address);
                self.set_only_shard(shard);
            }
            Mode::Cluster { seeds } => {
                for seed in seeds {
                    if let Some(shard) = self.shard_at(seed) {
                        self.shard_link(shard).wanted = true;
                    }
                }
                self.refresh.wanted = true;
            }
            Mode::Sentinel { sentinels, .. } => {
                for address in sentinels {
                    let index = u16::try_from(self.links.len()).unwrap_or(NONE);
                    self.links.push(Link::new(index, address, 0));
                }
                self.sentinels = self.links.len();
            }
        }
    }

    /// Makes a call of any command. `slot` is that of its key ([`crate::key_slot`]); without one any shard will do.
    /// `write` writes the words of the command. `token` comes back in the completion, which comes by the deadline.
    #[inline]
    pub fn call(
        &mut self,
        now: Micros,
        slot: Option<u16>,
        token: u64,
        deadline: Micros,
        write: impl FnOnce(&mut Encoder<'_>),
    ) -> Result<(), CallError> {
        let link = self.route(now, slot, deadline)?;
        let command = self.calls.prepare(|buffer| {
            let mut encoder = Encoder::new(buffer);
            write(&mut encoder);
            encoder.finish()
        });
        let bytes = command.map(<[u8]>::len);
        self.post(now, link, bytes, |calls| calls.accept(token, deadline, slot, None))
    }

    /// Makes a call of a script, or of a function where the settings say so: the first `keys` words that `write` writes
    /// are its keys, which must all be in `slot`. A script that the shard does not know is loaded and called again.
    #[inline]
    #[expect(clippy::too_many_arguments, reason = "one more than `call`, and all of them differ at every call")]
    pub fn evalsha(
        &mut self,
        now: Micros,
        slot: Option<u16>,
        token: u64,
        deadline: Micros,
        script: ScriptId,
        keys: usize,
        write: impl FnOnce(&mut Encoder<'_>),
    ) -> Result<(), CallError> {
        let link = self.route(now, slot, deadline)?;
        let source = self.config.scripts.get(usize::from(script.0)).ok_or(CallError::UnknownScript)?;
        let command = self.calls.prepare(|buffer| {
            let mut encoder = Encoder::new(buffer);
            encoder.written(source.prefix(), 2).integer(keys);
            write(&mut encoder);
            encoder.finish()
        });
        let bytes = command.map(<[u8]>::len);
        self.post(now, link, bytes, |calls| calls.accept(token, deadline, slot, Some(script)))
    }

    /// The link for a new call.
    #[inline]
    fn route(&mut self, now: Micros, slot: Option<u16>, deadline: Micros) -> Result<usize, CallError> {
        if deadline <= now {
            return Err(CallError::TooLate);
        }
        let found = match slot {
            Some(slot) => self.link_of(slot).ok_or(CallError::NoShard),
            None => self.link_of_any().ok_or(CallError::NotConnected),
        };
        match found {
            Ok(link) if self.links[link].is_up() => Ok(link),
            Ok(_) => Err(self.refuse(CallError::NotConnected)),
            Err(why) => Err(self.refuse(why)),
        }
    }

    /// Sends the call that was prepared in the table, unless it has no room.
    #[inline]
    fn post(
        &mut self,
        now: Micros,
        link: usize,
        bytes: Option<usize>,
        accept: impl FnOnce(&mut Calls) -> CallId,
    ) -> Result<(), CallError> {
        let Some(bytes) = bytes else { return Err(self.refuse(CallError::InFlightFull)) };
        if !self.links[link].has_room(bytes, &self.config) {
            return Err(self.refuse(CallError::OutputFull));
        }
        let id = accept(&mut self.calls);
        self.send(id, link, now);
        self.counters.shards[link - self.sentinels].calls += 1;
        self.counters.in_flight = self.calls.len();
        Ok(())
    }

    #[cold]
    fn refuse(&mut self, why: CallError) -> CallError {
        match why {
            CallError::InFlightFull => self.counters.refused_in_flight += 1,
            CallError::OutputFull => self.counters.refused_output += 1,
            _ => self.counters.refused_not_connected += 1,
        }
        why
    }

    /// Copies a call to a link.
    #[inline]
    fn send(&mut self, id: CallId, link: usize, now: Micros) {
        let Some(call) = self.calls.find_mut(id) else { return };
        call.attempts = call.attempts.saturating_add(1);
        call.sent_at = now;
        let target = &mut self.links[link];
        call.link = u16::try_from(link).unwrap_or(NONE);
        if call.asking {
            target.push_words(&[b"ASKING"], Asked::Asking, now);
        }
        target.push(call.command(), Asked::Call(id), now);
        if !target.listed {
            self.list(link);
        }
    }

    /// Puts a link on the list of those with something to send.
    fn list(&mut self, link: usize) {
        let link = &mut self.links[link];
        if !link.listed && link.is_open() {
            link.listed = true;
            self.with_output.push_back(link.id());
        }
    }

    #[inline]
    fn link_of(&self, slot: u16) -> Option<usize> {
        match self.slots.get(usize::from(slot)) {
            Some(&shard) if shard != NONE => Some(self.sentinels + usize::from(shard)),
            _ => None,
        }
    }

    /// The next shard in turn that is up.
    fn link_of_any(&mut self) -> Option<usize> {
        let shards = self.links.len() - self.sentinels;
        for step in 0..shards {
            let link = self.sentinels + (self.any + step) % shards;
            if self.links[link].is_up() && self.links[link].wanted {
                self.any = (self.any + step + 1) % shards;
                return Some(link);
            }
        }
        None
    }

    /// Ends a call: the only place that does.
    #[inline]
    fn complete(
        &mut self,
        id: CallId,
        outcome: Result<Reply<'_>, Error<'_>>,
        on: &mut (impl FnMut(Completion<'_>) + ?Sized),
    ) {
        let Some(call) = self.calls.find(id) else { return };
        let (token, sent_at) = (call.token, call.sent_at);
        let shard = usize::from(call.link).checked_sub(self.sentinels);
        self.calls.free(id);
        self.counters.in_flight = self.calls.len();
        if let Some(counters) = shard.and_then(|shard| self.counters.shards.get_mut(shard)) {
            match &outcome {
                Ok(_) => counters.replies += 1,
                Err(Error::Server { .. }) => {
                    counters.replies += 1;
                    counters.errors += 1;
                }
                Err(Error::Timeout) => counters.timeouts += 1,
                Err(_) => counters.disconnected += 1,
            }
        }
        let shard = shard.and_then(|shard| u16::try_from(shard).ok()).map(ShardIndex);
        on(Completion { token, shard, sent_at, outcome });
    }

    /// Links there can be at most, for tables by [`LinkId::index`].
    pub fn links_max(&self) -> usize {
        self.sentinels + self.config.shards_max
    }

    /// The settings.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// What was done so far.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Calls in flight.
    #[inline]
    pub fn in_flight(&self) -> usize {
        self.calls.len()
    }

    /// Whether the in-flight table is full.
    #[inline]
    pub fn is_full(&self) -> bool {
        self.calls.is_full()
    }

    /// What is to be done next with the sockets.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// The next link that got something to send; each link comes once, until more is written to it after that.
    #[inline]
    pub fn poll_output(&mut self) -> Option<LinkId> {
        while let Some(id) = self.with_output.pop_front() {
            if let Some(link) = self.live(id) {
                self.links[link].listed = false;
                return Some(id);
            }
        }
        None
    }

    /// The index of a link, unless the connection is one of before.
    #[inline]
    fn live(&self, id: LinkId) -> Option<usize> {
        let link = self.links.get(id.index())?;
        (link.id() == id && link.is_open()).then_some(id.index())
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let links = self.links.iter().map(|link| (&link.name, link.state));
        f.debug_struct("Client").field("links", &links.collect::<Vec<_>>()).finish_non_exhaustive()
    }
}
