//! Everything between bytes in and bytes out on one core, without a socket: the transport's other half.
//!
//! A wake-up goes like this, whichever transport drives it:
//!
//! ```text
//!   tick(now)                 the time, and the policy for this wake-up
//!   bytes_in(conn, bytes) …   requests are parsed, matched, hashed; their buckets' cache lines are asked for
//!   settle()                  what was parsed is decided, in order, and encoded
//!   next_dirty() …            connections with something to send, to close, or to stop reading from
//! ```
//!
//! Parsing ahead of deciding matters because a cache miss costs more than a decision: the lines of up to
//! [`BATCH_CHECKS_MAX`] checks load while the next ones are parsed.
//!
//! `recall` knows requests that begin as an earlier one did, `session` is one connection, `commands` is every command that is not on the hot path, `sampled` is the one check in sixteen that heat looks at.

mod commands;
mod longest_fill;
mod recall;
mod remote;
mod sampled;
mod session;
mod web;

use std::{cell::RefCell, rc::Rc, sync::Arc};

use arc_swap::cache::Cache;
use policy_sync::snapshot::{ATTRIBUTES_FEW, Applied, Attributes, AttributesError, Room};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use self::{longest_fill::LongestFill, recall::Recall, session::Session};
pub use self::{remote::Remote, session::ConnId};
use crate::{
    buckets::{AT_MS_MAX, BucketTable, TableCounts, table::Moment},
    chance::Chance,
    clock::Now,
    decision::{self, Answer, Ground, Reason, Tally},
    heat::{Heat, board::Board},
    hot::HotSettings,
    limits::{BATCH_CHECKS_MAX, SPARE_BUFFER_BYTES_MAX, SPARE_BUFFERS_MAX},
    metrics::counters::CoreCounters,
    policy::{LoadedPolicy, PolicyInForce, RuleCard},
    resp::{
        command::{self, CommandError, Dialect, Throttle},
        frame::{ArgsRoom, Cursor, ProtocolError, RequestLimits},
        reply::{self, RuleReply},
    },
    shadow::Book,
    store::{Store, StoreSettings, shards::Shards, wire::Redis},
    web::{
        Web,
        asking::{Asking, Ticket},
    },
};
use policy_sync::rate::Rate;

/// What the RESP face of a core is allowed and told; settings.
#[derive(Clone)]
pub struct RespSettings {
    /// What a request may be at most.
    pub request: RequestLimits,
    /// Bytes of replies that may wait for a client; beyond, nothing more of its requests is decided until it reads.
    pub output_backlog_bytes: usize,
    /// The password that AUTH must give, if one is set.
    pub password: Option<Arc<str>>,
}

/// What the process tells through INFO and HELLO.
pub trait Facts {
    /// The text of INFO.
    fn info(&self) -> String;

    /// What someone who speaks HTTP should know: which port speaks what.
    fn ports(&self) -> String;

    /// Whether the server is ready, and not leaving.
    fn is_serving(&self) -> bool;
}

/// One core's share of the server.
pub struct Engine {
    settings: RespSettings,
    facts: Arc<dyn Facts + Send + Sync>,
    policy_cache: Cache<PolicyInForce, Arc<LoadedPolicy>>,
    policy: Arc<LoadedPolicy>,
    table: Arc<BucketTable>,
    /// Where the counts are, if not in `table`.
    remote: Option<Remote>,
    counters: Arc<CoreCounters>,
    table_counts: TableCounts,
    throttle_seeds: [u64; 2],
    now: Now,
    longest_fill: LongestFill,
    sessions: Vec<Session>,
    /// Sessions with output, or to be closed, in the order in which that came about.
    dirty: Vec<ConnId>,
    pending: Vec<Pending>,
    /// The rules that apply to the pending checks, one check's after the other's.
    applied: Vec<Applied>,
    /// The pending throttle calls.
    throttles: Vec<PendingThrottle>,
    scratch: Vec<u8>,
    /// For requests of many words.
    words_room: ArgsRoom,
    /// For checks of many attributes.
    attributes_room: Room,
    spare_buffers: Vec<Vec<u8>>,
    no_rule: RuleReply,
    recall: Recall,
    heat: Heat,
    /// Where it is written down what shadow rules see, if anybody reads it.
    book: Option<RefCell<Book>>,
    /// The HTTP face, if there is one.
    web: Option<Rc<Web>>,
    /// What HTTP requests have asked in this moment.
    web_asked: Vec<(Ticket, Asking)>,
    /// When askers stop waiting who do so before the store's deadline, and their connections.
    web_deadlines: Vec<(u64, ConnId)>,
    descriptor_seed: u64,
    /// Counts the policies that this core has seen, from 1.
    generation: u64,
    first_id: u64,
    id_step: u64,
}

/// What a core shares with the others.
pub struct Shared {
    /// The policy in force.
    pub policy: PolicyInForce,
    /// The buckets.
    pub table: Arc<BucketTable>,
    /// The process's random seed, the one that snapshots are compiled with.
    pub seed: u64,
    /// What INFO tells.
    pub facts: Arc<dyn Facts + Send + Sync>,
}

/// A request that was parsed and waits for its decision.
#[derive(Clone, Copy)]
struct Pending {
    conn: ConnId,
    cost: u32,
    ask: Ask,
}

#[derive(Clone, Copy)]
enum Ask {
    /// A CHECK to which one rule applies that enforces its own limit; the bucket's key.
    One { rule: u32, key: u64 },
    /// A CHECK; this many of `Engine::applied` are its rules.
    Check { rules: u32 },
    /// A throttle call, the next of `Engine::throttles`.
    Throttle,
}

/// A throttle call, with its bucket's key and rate.
#[derive(Clone, Copy)]
struct PendingThrottle {
    dialect: Dialect,
    key: u64,
    rate: Rate,
}

/// The counters of a core with the slots of a policy.
struct RuleTally<'a> {
    counters: &'a CoreCounters,
    cards: &'a [RuleCard],
    book: Option<&'a RefCell<Book>>,
    now_ms: u64,
}

impl Tally for RuleTally<'_> {
    #[inline(always)]
    fn count(&self, rule: u32, reason: Reason) {
        self.counters.rule(self.cards[rule as usize].slot, reason).add(1);
    }

    fn shadow(&self, one: &Applied, passes: bool) {
        self.count(one.rule, if passes { Reason::ShadowAllowed } else { Reason::ShadowDenied });
        if let (Some(book), Some(tag)) = (self.book, &self.cards[one.rule as usize].shadow) {
            book.borrow_mut().count(tag, one.key, !passes, self.now_ms);
        }
    }
}

/// What a transport must do for a connection after a wake-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// Send the output, go on reading.
    Open,
    /// Send the output, read nothing until [`Engine::resume`].
    Paused,
    /// Send the output, then close.
    Closing,
}

/// How one request of a buffer came out.
enum Parsed {
    /// A request was read; it ends here.
    Request(usize),
    /// The request's end has not come yet.
    Incomplete,
}

impl Engine {
    /// An engine for core `index` of `cores`, with room for `sessions_max` connections.
    pub fn new(
        shared: &Shared,
        settings: RespSettings,
        counters: Arc<CoreCounters>,
        (index, cores): (usize, usize),
    ) -> Self {
        let mut policy_cache = Cache::new(Arc::clone(&shared.policy));
        let policy = Arc::clone(policy_cache.load());
        Self {
            settings,
            facts: Arc::clone(&shared.facts),
            longest_fill: LongestFill::new(policy.snapshot.longest_fill_ms()),
            policy,
            policy_cache,
            table: Arc::clone(&shared.table),
            remote: None,
            counters,
            table_counts: TableCounts::default(),
            throttle_seeds: [b"cl.throttle", &b"throttle"[..]].map(|name| xxh3_64_with_seed(name, shared.seed)),
            now: Now::default(),
            sessions: Vec::new(),
            dirty: Vec::new(),
            pending: Vec::with_capacity(BATCH_CHECKS_MAX),
            applied: Vec::with_capacity(4 * BATCH_CHECKS_MAX),
            throttles: Vec::with_capacity(BATCH_CHECKS_MAX),
            scratch: Vec::with_capacity(1024),
            words_room: ArgsRoom::default(),
            attributes_room: Room::default(),
            spare_buffers: Vec::new(),
            no_rule: RuleReply::new("", decision::UNLIMITED),
            recall: Recall::new(),
            heat: Heat::new(
                &HotSettings::default(),
                &Arc::new(Board::new(1, HotSettings::default().heat_keys)),
                0,
                shared.seed,
            ),
            book: None,
            web: None,
            web_asked: Vec::new(),
            web_deadlines: Vec::new(),
            descriptor_seed: xxh3_64_with_seed(b"descriptor", shared.seed),
            generation: 1,
            first_id: index as u64 + 1,
            id_step: cores as u64,
        }
    }

    /// The counts are in this store.
    #[must_use]
    pub fn with_store(mut self, store: StoreSettings, shards: &Arc<Shards>, redis: Redis) -> Self {
        let chance = Chance::new(self.throttle_seeds[0].wrapping_add(self.first_id));
        let store = Store::new(store, Arc::clone(shards), &self.policy, self.generation, chance);
        self.remote = Some(Remote { store, redis });
        self
    }

    /// Its heat is published; without this it has one of its own that nobody reads.
    #[must_use]
    pub fn with_heat(mut self, heat: Heat) -> Self {
        self.heat = heat;
        self
    }

    /// What its shadow rules see is written down.
    #[must_use]
    pub fn with_book(mut self, book: Book) -> Self {
        self.book = Some(RefCell::new(book));
        self
    }

    /// The way to the shards, for the transport, which moves its bytes.
    pub fn remote(&mut self) -> Option<&mut Remote> {
        self.remote.as_mut()
    }

    /// Begins a wake-up: the time, and the policy that holds until the next one.
    #[inline]
    pub fn tick(&mut self, now: Now) {
        self.now = Now { mono_ms: now.mono_ms.min(AT_MS_MAX), ..now };
        self.heat.tick(self.now.mono_ms);
        if let Some(book) = &mut self.book {
            book.get_mut().look(self.now);
        }
        if let Some(remote) = &mut self.remote {
            remote.redis.at(self.now.mono_us);
        }
        let in_force = self.policy_cache.load();
        if !Arc::ptr_eq(in_force, &self.policy) {
            self.policy = Arc::clone(in_force);
            self.generation += 1;
            if let Some(remote) = &mut self.remote {
                remote.store.adopt(&self.policy, self.generation);
            }
            self.longest_fill.adopt(self.policy.snapshot.longest_fill_ms());
        }
    }

    /// A connection was accepted under this number.
    pub fn opened(&mut self, conn: ConnId) {
        if self.sessions.len() <= conn.index() {
            self.sessions.resize_with(conn.index() + 1, Session::default);
        }
        self.sessions[conn.index()] = Session {
            id: self.first_id,
            authenticated: self.settings.password.is_none(),
            open: true,
            ..Session::default()
        };
        self.first_id += self.id_step;
        self.counters.connections_opened.add(1);
    }

    /// The connection is gone; its number may be used again.
    pub fn closed(&mut self, conn: ConnId) {
        // What it still asked is answered into nothing, and before the number has another owner.
        self.settle();
        let mut session = std::mem::take(&mut self.sessions[conn.index()]);
        self.forget(&mut session);
        self.forget_web(&mut session);
        self.keep(session.input);
        self.keep(session.output);
        self.counters.connections_closed.add(1);
    }

    /// Reads the requests in `bytes`; what remains of an unfinished one is kept.
    #[inline]
    pub fn bytes_in(&mut self, conn: ConnId, bytes: &[u8]) {
        let session = &mut self.sessions[conn.index()];
        if !session.open || session.closing {
            return;
        }
        if session.web.is_some() && !session.paused {
            return self.web_bytes_in(conn, bytes);
        }
        if session.input.is_empty() && !session.paused {
            let rest = self.read(conn, bytes);
            if rest < bytes.len() {
                self.stash(conn, &bytes[rest..]);
                self.check_input_bound(conn);
            }
        } else {
            self.stash(conn, bytes);
            if !self.sessions[conn.index()].paused {
                self.read_stashed(conn);
            }
        }
    }

    /// The client has read enough for the connection to go on.
    pub fn resume(&mut self, conn: ConnId) {
        let session = &mut self.sessions[conn.index()];
        if std::mem::take(&mut session.paused) && !session.closing {
            self.read_stashed(conn);
        }
    }

    fn read_stashed(&mut self, conn: ConnId) {
        let mut input = std::mem::take(&mut self.sessions[conn.index()].input);
        if self.sessions[conn.index()].web.is_some() {
            self.web_bytes_in(conn, &input);
            return self.keep(input);
        }
        let rest = self.read(conn, &input);
        input.drain(..rest);
        if input.is_empty() {
            self.keep(input);
        } else {
            self.sessions[conn.index()].input = input;
            self.check_input_bound(conn);
        }
    }

    fn stash(&mut self, conn: ConnId, bytes: &[u8]) {
        if self.sessions[conn.index()].input.capacity() == 0 {
            self.sessions[conn.index()].input = self.spare_buffers.pop().unwrap_or_default();
        }
        self.sessions[conn.index()].input.extend_from_slice(bytes);
    }

    /// What is left is the beginning of one request. While a connection is paused its input is bounded by what its transport still had in flight.
    fn check_input_bound(&mut self, conn: ConnId) {
        let session = &mut self.sessions[conn.index()];
        if !session.paused && session.input.len() > self.settings.request.request_bytes_max {
            self.refuse(conn, ProtocolError::RequestTooLong(self.settings.request.request_bytes_max));
        }
    }

    /// Reads whole requests from the front of `bytes`; returns where the first unfinished one begins.
    fn read(&mut self, conn: ConnId, bytes: &[u8]) -> usize {
        let mut at = 0;
        while at < bytes.len() {
            if self.sessions[conn.index()].authenticated {
                // The run of requests that begin as earlier ones did; nothing in it can change the session.
                if self.remote.is_some() {
                    while !self.sessions[conn.index()].paused
                        && let Some(len) = self.recall_remote(conn, &bytes[at..])
                    {
                        at += len;
                    }
                }
                while self.pending.len() < BATCH_CHECKS_MAX
                    && self.remote.is_none()
                    && let Some(len) = self.recall_check(conn, &bytes[at..])
                {
                    at += len;
                }
            }
            if self.pending.len() == BATCH_CHECKS_MAX {
                self.settle();
            } else if at < bytes.len() {
                let max = self.settings.request.request_bytes_max;
                let end = bytes.len().min(at.saturating_add(max));
                match self.read_one(conn, &bytes[at..end]) {
                    Ok(Parsed::Request(len)) => at += len,
                    Ok(Parsed::Incomplete) if end < bytes.len() => {
                        self.refuse(conn, ProtocolError::RequestTooLong(max));
                        return bytes.len();
                    }
                    Ok(Parsed::Incomplete) => break,
                    Err(error) => {
                        self.refuse(conn, error);
                        return bytes.len();
                    }
                }
            }
            let session = &self.sessions[conn.index()];
            if session.closing {
                return bytes.len();
            }
            if session.paused {
                break;
            }
        }
        at
    }

    #[inline]
    fn read_one(&mut self, conn: ConnId, bytes: &[u8]) -> Result<Parsed, ProtocolError> {
        let limits = self.settings.request;
        let mut cursor = Cursor::new(bytes);
        if cursor.peek() != Some(b'*') {
            let mut args = self.words_room.lend(limits.args_max);
            let outcome = cursor.inline(&limits, &mut args)?;
            if outcome.is_some() {
                self.execute(conn, &args);
            }
            self.words_room.take_back(args);
            return Ok(outcome.map_or(Parsed::Incomplete, |()| Parsed::Request(cursor.consumed())));
        }
        let Some(count) = cursor.array(&limits)? else {
            return Ok(Parsed::Incomplete);
        };
        if count == 0 {
            return Ok(Parsed::Request(cursor.consumed()));
        }
        let Some(name) = cursor.bulk(&limits)? else {
            return Ok(Parsed::Incomplete);
        };
        if name == b"CHECK" && self.sessions[conn.index()].authenticated {
            let words = count - 1;
            let outcome = if words > 2 * ATTRIBUTES_FEW {
                self.read_long_check(conn, bytes, &mut cursor, words)?
            } else {
                self.read_check(conn, bytes, &mut cursor, words, &mut Attributes::default())?
            };
            return Ok(outcome.map_or(Parsed::Incomplete, |()| Parsed::Request(cursor.consumed())));
        }
        let mut args = self.words_room.lend(count);
        args.push(name);
        let outcome = cursor.words(count - 1, &limits, &mut args)?;
        if outcome.is_some() {
            self.execute(conn, &args);
        }
        self.words_room.take_back(args);
        Ok(outcome.map_or(Parsed::Incomplete, |()| Parsed::Request(cursor.consumed())))
    }

    /// A CHECK that may have more attributes than fit the stack.
    #[cold]
    #[inline(never)]
    fn read_long_check<'b>(
        &mut self,
        conn: ConnId,
        bytes: &'b [u8],
        cursor: &mut Cursor<'b>,
        words: usize,
    ) -> Result<Option<()>, ProtocolError> {
        let mut attributes = Attributes::in_room(std::mem::take(&mut self.attributes_room));
        let outcome = self.read_check(conn, bytes, cursor, words, &mut attributes);
        self.attributes_room = attributes.into_room();
        outcome
    }

    /// Reads the words of a CHECK as they are parsed: each pair is resolved and hashed at once.
    #[inline(always)]
    fn read_check<'b>(
        &mut self,
        conn: ConnId,
        bytes: &'b [u8],
        cursor: &mut Cursor<'b>,
        mut words: usize,
        attributes: &mut Attributes<'b>,
    ) -> Result<Option<()>, ProtocolError> {
        let limits = self.settings.request;
        let snapshot = &self.policy.snapshot;
        let mut cost = 1;
        // The first error of the request; the rest of it must be read all the same.
        let mut wrong: Option<CommandError> = None;
        let mut first = true;
        // Where the last attribute's value begins, and whether the policy mentions it. COST may only come first, so unless
        // it is all there is the last pair is an attribute.
        let (mut last_at, mut last_is_known) = (0, false);
        while words > 0 {
            let Some(name) = cursor.bulk(&limits)? else {
                return Ok(None);
            };
            words -= 1;
            if words == 0 {
                wrong.get_or_insert(CommandError::UnpairedAttribute);
                break;
            }
            let value_at = cursor.consumed();
            let Some(value) = cursor.bulk(&limits)? else {
                return Ok(None);
            };
            words -= 1;
            if first && name == b"COST" {
                match command::number("COST", value) {
                    Ok(number) => cost = command::cost(number),
                    Err(error) => wrong = Some(error),
                }
            } else {
                last_at = value_at;
                match push_attribute(attributes, snapshot, name, value) {
                    Ok(is_known) => last_is_known = is_known,
                    Err(error) => {
                        wrong.get_or_insert(error);
                    }
                }
            }
            first = false;
        }
        if attributes.is_empty() {
            wrong.get_or_insert(CommandError::NoAttributes);
        }
        let before = self.applied.len();
        if wrong.is_none()
            && let Err(error) = snapshot.applying(attributes, self.now.unix_ms, &mut self.scratch, &mut self.applied)
        {
            wrong = Some(error.into());
        }
        if let Some(error) = wrong {
            self.fail(conn, &error);
            return Ok(Some(()));
        }
        let is_sampled = self.sample(before, attributes);
        let is_followed = self.book.is_some() && self.meet_shadows(before, attributes);
        let snapshot = &self.policy.snapshot;
        if self.remote.is_some() {
            let head = self.identity_head(before, attributes, last_is_known, cost);
            let (snapshot, applied) = (&self.policy.snapshot, &self.applied[before..]);
            if head.is_some() {
                let recipe = || snapshot.recipe(attributes, last_is_known, applied);
                let one = if let [only] = applied { Some(only.rule) } else { None };
                self.recall.learn(&bytes[..last_at], cost, (one, head), self.generation, recipe);
            }
            self.ask((conn, is_sampled), cost, before, attributes);
            return Ok(Some(()));
        }
        let applied = &self.applied[before..];
        for one in applied {
            self.table.prefetch(one.key);
        }
        // In a hurry are only those that take something from a limit of the rule's own.
        let one = match applied {
            [only] if cost > 0 && self.policy.cards[only.rule as usize].enforced.is_some() => Some(only.rule),
            _ => None,
        };
        // Whoever is followed has a name, which only the attributes have.
        if !is_followed {
            let recipe = || snapshot.recipe(attributes, last_is_known, applied);
            self.recall.learn(&bytes[..last_at], cost, (one, None), self.generation, recipe);
        }
        // At most `RULES_PER_CHECK_MAX`.
        self.pending.push(Pending { conn, cost, ask: Ask::Check { rules: applied.len() as u32 } });
        Ok(Some(()))
    }

    /// A CHECK that begins as an earlier one did; returns where it ends. `None` where it does not, or is not complete.
    #[inline(always)]
    fn recall_check(&mut self, conn: ConnId, bytes: &[u8]) -> Option<usize> {
        let (entry, head) = self.recall.find(bytes, self.generation)?;
        let mut cursor = Cursor::new(&bytes[head..]);
        // What is wrong, incomplete or too long is for the long way to say.
        let value = cursor.bulk(&self.settings.request).ok()??;
        let len = head + cursor.consumed();
        if len > self.settings.request.request_bytes_max {
            return None;
        }
        let cost = entry.cost;
        let ask = if let Some(rule) = entry.one {
            let key = self.policy.snapshot.follow_one(&entry.recipe, value);
            self.table.prefetch(key);
            if self.heat.samples() {
                let one = Applied { rule, override_index: Applied::NO_OVERRIDE, key };
                if sampled::touch(&mut self.heat, &self.policy, false, &[one]) {
                    self.heat.want_names();
                    return None;
                }
            }
            Ask::One { rule, key }
        } else {
            let before = self.applied.len();
            self.policy.snapshot.follow(&entry.recipe, value, &mut self.applied);
            for one in &self.applied[before..] {
                self.table.prefetch(one.key);
            }
            if self.heat.samples() && sampled::touch(&mut self.heat, &self.policy, false, &self.applied[before..]) {
                self.heat.want_names();
                self.applied.truncate(before);
                return None;
            }
            Ask::Check { rules: (self.applied.len() - before) as u32 }
        };
        self.pending.push(Pending { conn, cost, ask });
        Some(len)
    }

    /// CHECK by whatever spelling the fast path did not take: lower case, or typed inline.
    fn check(&mut self, conn: ConnId, words: &[&[u8]]) -> Result<(), CommandError> {
        let (cost, pairs) = match words {
            [b"COST", number, rest @ ..] => (command::cost(command::number("COST", number)?), rest),
            _ => (1, words),
        };
        if pairs.len() % 2 != 0 {
            return Err(CommandError::UnpairedAttribute);
        }
        if pairs.is_empty() {
            return Err(CommandError::NoAttributes);
        }
        let mut attributes = if pairs.len() > 2 * ATTRIBUTES_FEW {
            Attributes::in_room(std::mem::take(&mut self.attributes_room))
        } else {
            Attributes::default()
        };
        let outcome = self.check_pairs(conn, cost, pairs, &mut attributes);
        if pairs.len() > 2 * ATTRIBUTES_FEW {
            self.attributes_room = attributes.into_room();
        }
        outcome
    }

    fn check_pairs<'b>(
        &mut self,
        conn: ConnId,
        cost: u32,
        pairs: &[&'b [u8]],
        attributes: &mut Attributes<'b>,
    ) -> Result<(), CommandError> {
        let snapshot = &self.policy.snapshot;
        for pair in pairs.chunks_exact(2) {
            push_attribute(attributes, snapshot, pair[0], pair[1])?;
        }
        let before = self.applied.len();
        snapshot.applying(attributes, self.now.unix_ms, &mut self.scratch, &mut self.applied)?;
        let is_sampled = self.sample(before, attributes);
        if self.book.is_some() {
            self.meet_shadows(before, attributes);
        }
        if self.remote.is_some() {
            self.ask((conn, is_sampled), cost, before, attributes);
            return Ok(());
        }
        let rules = (self.applied.len() - before) as u32;
        self.pending.push(Pending { conn, cost, ask: Ask::Check { rules } });
        Ok(())
    }

    /// Gives the identity of a check a place in the book, for each shadow rule that is followed. Returns whether one is.
    #[inline(never)]
    fn meet_shadows(&mut self, first: usize, attributes: &Attributes<'_>) -> bool {
        let Some(book) = &mut self.book else { return false };
        let (policy, now_ms) = (&self.policy, self.now.mono_ms);
        let mut is_followed = false;
        for one in &self.applied[first..] {
            let Some(tag) = &policy.cards[one.rule as usize].shadow else { continue };
            is_followed = true;
            let name = |out: &mut Vec<u8>| policy.snapshot.encode_identity(one.rule, attributes, out);
            book.get_mut().meet(tag, one.key, now_ms, name);
        }
        is_followed
    }

    /// A throttle call: its bucket is named by the key and the dialect, its rate comes with the call.
    fn throttle(&mut self, conn: ConnId, dialect: Dialect, call: &Throttle<'_>) {
        let key = xxh3_64_with_seed(call.key, self.throttle_seeds[dialect as usize]);
        let is_sampled = self.sample_throttle(dialect, call.key, key);
        if self.remote.is_some() {
            return self.ask_throttle((conn, is_sampled), dialect, call, key);
        }
        self.table.prefetch(key);
        self.longest_fill.see(call.rate.fill_ms());
        self.throttles.push(PendingThrottle { dialect, key, rate: call.rate });
        self.pending.push(Pending { conn, cost: call.cost, ask: Ask::Throttle });
    }

    /// Decides everything that was parsed, in order, and encodes the answers.
    #[inline]
    pub fn settle(&mut self) {
        if self.pending.is_empty() {
            return;
        }
        let now_ms = self.now.mono_ms;
        let moment = Moment { now_ms, fill_ms_max: self.longest_fill.at(now_ms) };
        let tally = RuleTally { counters: &self.counters, cards: &self.policy.cards, book: self.book.as_ref(), now_ms };
        let ground = Ground { snapshot: &self.policy.snapshot, table: &self.table, moment, tally: &tally };
        let mut desk = Desk {
            ground,
            cards: &self.policy.cards,
            no_rule: &self.no_rule,
            applied: &self.applied,
            throttles: &self.throttles,
            table_counts: &mut self.table_counts,
            totals: Totals::default(),
        };
        for run in self.pending.chunk_by(|one, next| one.conn == next.conn) {
            let conn = run[0].conn;
            let session = &mut self.sessions[conn.index()];
            if session.output.capacity() == 0 {
                session.output = self.spare_buffers.pop().unwrap_or_default();
            }
            for pending in run {
                desk.answer(*pending, &mut session.output);
            }
            mark(&mut self.dirty, session, conn);
            pause_behind(session, self.settings.output_backlog_bytes, &self.counters);
        }
        desk.totals.publish(&self.counters);
        self.counters.set_table(&self.table_counts);
        self.pending.clear();
        self.applied.clear();
        self.throttles.clear();
    }

    /// The next connection that the transport must look at, and what to do with it.
    #[inline]
    pub fn next_dirty(&mut self) -> Option<(ConnId, Flow)> {
        let conn = self.dirty.pop()?;
        let session = &mut self.sessions[conn.index()];
        session.dirty = false;
        Some((conn, session.flow()))
    }

    /// What to do with a connection.
    pub fn flow(&self, conn: ConnId) -> Flow {
        self.sessions[conn.index()].flow()
    }

    /// Whether replies wait for the transport.
    #[inline]
    pub fn has_output(&self, conn: ConnId) -> bool {
        !self.sessions[conn.index()].output.is_empty()
    }

    /// Whether the connection is still to be told something, now or when the store has answered.
    #[inline]
    pub fn owes(&self, conn: ConnId) -> bool {
        let session = &self.sessions[conn.index()];
        let waits = || session.web.as_ref().is_some_and(|web| web.waits());
        !session.output.is_empty() || !session.waiting.is_empty() || waits()
    }

    /// Moves the waiting replies into `buffer`, which must be empty and gives its memory in exchange.
    #[inline]
    pub fn take_output(&mut self, conn: ConnId, buffer: &mut Vec<u8>) {
        debug_assert!(buffer.is_empty(), "the last output was sent before the next is taken");
        std::mem::swap(&mut self.sessions[conn.index()].output, buffer);
    }

    /// Takes back a buffer that the transport is done with.
    pub fn keep(&mut self, mut buffer: Vec<u8>) {
        let capacity = buffer.capacity();
        if capacity > 0 && capacity <= SPARE_BUFFER_BYTES_MAX && self.spare_buffers.len() < SPARE_BUFFERS_MAX {
            buffer.clear();
            self.spare_buffers.push(buffer);
        }
    }

    /// How many bytes of replies may wait before a connection is paused.
    pub fn output_backlog_bytes(&self) -> usize {
        self.settings.output_backlog_bytes
    }

    /// The core's counters.
    pub fn counters(&self) -> &CoreCounters {
        &self.counters
    }

    /// Answers with an error; the connection goes on.
    fn fail(&mut self, conn: ConnId, error: &CommandError) {
        self.settle();
        self.counters.command_errors.add(1);
        self.reply(conn, |out| reply::error(&error.to_string(), out));
    }

    /// Answers with an error and closes: the bytes that follow cannot be understood.
    fn refuse(&mut self, conn: ConnId, error: ProtocolError) {
        self.settle();
        self.counters.protocol_errors.add(1);
        if let ProtocolError::Http { has_body } = error {
            let text = self.facts.ports();
            self.reply(conn, |out| reply::http_refusal(&text, has_body, out));
        } else {
            self.reply(conn, |out| reply::error(&format!("ERR {error}"), out));
        }
        self.sessions[conn.index()].closing = true;
    }

    /// Writes a reply in its place: after everything that was asked before.
    fn reply(&mut self, conn: ConnId, write: impl FnOnce(&mut Vec<u8>)) {
        self.settle();
        let session = &mut self.sessions[conn.index()];
        session.tell(&mut self.scratch, write);
        mark(&mut self.dirty, session, conn);
        pause_behind(session, self.settings.output_backlog_bytes, &self.counters);
    }
}

impl Session {
    fn flow(&self) -> Flow {
        if self.closing {
            Flow::Closing
        } else if self.paused {
            Flow::Paused
        } else {
            Flow::Open
        }
    }
}

/// Pauses a session whose client has more replies waiting than it may.
#[inline(always)]
fn pause_behind(session: &mut Session, output_backlog_bytes: usize, counters: &CoreCounters) {
    if session.output.len() + session.waiting.bytes() > output_backlog_bytes && !session.paused {
        session.paused = true;
        counters.output_backlogs.add(1);
    }
}

#[inline(always)]
fn mark(dirty: &mut Vec<ConnId>, session: &mut Session, conn: ConnId) {
    if !session.dirty {
        session.dirty = true;
        dirty.push(conn);
    }
}

/// Adds an attribute; returns whether the policy mentions it.
#[inline(always)]
fn push_attribute<'a>(
    attributes: &mut Attributes<'a>,
    snapshot: &policy_sync::snapshot::Snapshot,
    name: &[u8],
    value: &'a [u8],
) -> Result<bool, CommandError> {
    match attributes.push(snapshot, name, value) {
        Ok(true) => Ok(true),
        Ok(false) if command::is_attribute_name(name) => Ok(false),
        Ok(false) => Err(CommandError::AttributeName(command::excerpt(name))),
        Err(AttributesError::Duplicate) => Err(AttributesError::Duplicate.into()),
        Err(error) => Err(error.into()),
    }
}

/// Stands for a rate until the real one is known.
const NO_RATE: Rate =
    Rate { capacity: 0, units_per_token: 1, units_per_tick: 1, ticks_to_full: 0, tick_ms: 1, refill: 0, period_ms: 1 };

/// Where pending requests are decided and answered, one after the other.
struct Desk<'a> {
    ground: Ground<'a, RuleTally<'a>>,
    cards: &'a [RuleCard],
    no_rule: &'a RuleReply,
    /// The rules of the checks that are still to come.
    applied: &'a [Applied],
    /// The throttle calls that are still to come.
    throttles: &'a [PendingThrottle],
    table_counts: &'a mut TableCounts,
    totals: Totals,
}

impl Desk<'_> {
    #[inline(always)]
    fn answer(&mut self, pending: Pending, out: &mut Vec<u8>) {
        match pending.ask {
            Ask::One { rule, key } => self.one(rule, key, pending.cost, out),
            Ask::Check { rules } => {
                let (these, rest) = self.applied.split_at(rules as usize);
                self.applied = rest;
                self.check(these, pending.cost, out);
            }
            Ask::Throttle => self.throttle(pending.cost, out),
        }
    }

    /// One rule that enforces its own limit: takes and allows, or leaves it to the long way.
    #[inline(always)]
    fn one(&mut self, rule: u32, key: u64, cost: u32, out: &mut Vec<u8>) {
        let card = &self.cards[rule as usize];
        let now_ms = self.ground.moment.now_ms;
        if let Some(rate) = &card.enforced
            && let Some(level) = decision::take_one(self.ground.table, key, rate, cost, now_ms)
        {
            self.totals.checks += 1;
            self.ground.tally.counters.rule(card.slot, Reason::Allowed).add(1);
            card.reply.allow(level.tokens, level.wait_ms(rate, rate.capacity, now_ms), out);
        } else {
            self.long_way(&[Applied { rule, override_index: Applied::NO_OVERRIDE, key }], cost, out);
        }
    }

    /// Any number of rules; in a hurry where they are few and all enforce their own limits.
    #[inline(always)]
    fn check(&mut self, applied: &[Applied], cost: u32, out: &mut Vec<u8>) {
        let done = match *applied {
            [a, b] => self.several([a, b], cost, out),
            [a, b, c] => self.several([a, b, c], cost, out),
            [a, b, c, d] => self.several([a, b, c, d], cost, out),
            _ => None,
        };
        if done.is_none() {
            self.long_way(applied, cost, out);
        }
    }

    #[inline(never)]
    fn several<const N: usize>(&mut self, applied: [Applied; N], cost: u32, out: &mut Vec<u8>) -> Option<()> {
        let (cards, now_ms) = (self.cards, self.ground.moment.now_ms);
        let mut buckets = [(0, &NO_RATE); N];
        for (bucket, one) in buckets.iter_mut().zip(applied) {
            let rate = cards[one.rule as usize].enforced.as_ref()?;
            if cost == 0 || one.override_index != Applied::NO_OVERRIDE {
                return None;
            }
            *bucket = (one.key, rate);
        }
        let (level, at) = decision::take_several(self.ground.table, buckets, cost, now_ms)?;
        self.totals.checks += 1;
        applied.iter().for_each(|one| self.ground.tally.count(one.rule, Reason::Allowed));
        let (card, (_, rate)) = (&cards[applied[at].rule as usize], buckets[at]);
        card.reply.allow(level.tokens, level.wait_ms(rate, rate.capacity, now_ms), out);
        Some(())
    }

    #[inline(never)]
    fn long_way(&mut self, applied: &[Applied], cost: u32, out: &mut Vec<u8>) {
        let verdict = decision::decide(&self.ground, applied, cost, self.table_counts);
        self.totals.check(&verdict, applied.is_empty());
        let rule = verdict.rule.map_or(self.no_rule, |rule| &self.cards[rule as usize].reply);
        reply::check(&verdict, rule, out);
    }

    #[inline(never)]
    fn throttle(&mut self, cost: u32, out: &mut Vec<u8>) {
        let (PendingThrottle { dialect, key, rate }, rest) = self
            .throttles
            .split_first()
            .map_or_else(|| unreachable!("each pending throttle call has its entry"), |(first, rest)| (*first, rest));
        self.throttles = rest;
        let Ground { table, moment, .. } = self.ground;
        let outcome = decision::take(table, key, &rate, cost, moment, self.table_counts);
        let verdict = decision::verdict(outcome, &rate, cost, 0, moment.now_ms);
        self.totals.throttle(&verdict);
        reply::in_dialect(dialect, &verdict, out);
    }
}

/// What one wake-up adds to the core's totals; written once at its end.
#[derive(Default)]
struct Totals {
    checks: u64,
    denied: u64,
    unruled: u64,
    throttles_allowed: u64,
    throttles_denied: u64,
}

impl Totals {
    #[inline(always)]
    fn check(&mut self, verdict: &decision::Verdict, unruled: bool) {
        self.checks += 1;
        self.denied += u64::from(verdict.answer == Answer::Deny);
        self.unruled += u64::from(unruled);
    }

    fn throttle(&mut self, verdict: &decision::Verdict) {
        match verdict.answer {
            Answer::Allow => self.throttles_allowed += 1,
            Answer::Deny | Answer::Unavailable => self.throttles_denied += 1,
        }
    }

    fn publish(&self, counters: &CoreCounters) {
        counters.checks.add(self.checks);
        counters.denied.add(self.denied);
        counters.unruled.add(self.unruled);
        counters.throttles_allowed.add(self.throttles_allowed);
        counters.throttles_denied.add(self.throttles_denied);
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests;
