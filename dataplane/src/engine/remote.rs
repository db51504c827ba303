//! Checks whose counts are in the store: they are asked while the wake-up's requests are read, and answered later.
//!
//! Replies leave in request order. So a session that waits for the store keeps everything that it is to be told after
//! the first unanswered check: checks by their number, other replies as bytes.
//!
//! ```text
//!   output ◄── held: [check 7] [bytes 5] [check 9] …      what is at the front and decided moves to the output
//! ```

use std::collections::VecDeque;

use policy_sync::snapshot::{Applied, Attributes};
use resp_client::{Action, LinkId};

use super::{ConnId, Engine, RuleReply, mark, pause_behind, recall::IdentityHead, sampled};
use crate::{
    decision::{Answer, By, Reason, Verdict},
    engine::session::Session,
    metrics::counters::CoreCounters,
    policy::LoadedPolicy,
    resp::{
        command::{Dialect, Throttle},
        frame::Cursor,
        reply,
    },
    store::{Asked, CheckId, Known, Question, Store, Surroundings, ThrottleBucket, wire::Redis},
};

/// The store, as one core has it.
pub struct Remote {
    /// What waits.
    pub store: Store,
    /// The way to the shards.
    pub redis: Redis,
}

/// What a session owes, in order.
#[derive(Clone, Copy, Debug)]
pub(super) enum Held {
    /// The reply to a check.
    Check(CheckId, Asker),
    /// So many bytes of [`Waiting::bytes`].
    Bytes(usize),
}

/// In which words a check is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Asker {
    Check,
    Throttle(Dialect),
}

/// What a session is to be told behind its first unanswered check.
#[derive(Default)]
pub(super) struct Waiting {
    held: VecDeque<Held>,
    bytes: VecDeque<u8>,
}

impl Waiting {
    pub(super) fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Bytes that wait behind a check.
    pub(super) fn bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Keeps a reply behind the checks that were asked before.
    pub(super) fn keep(&mut self, reply: &[u8]) {
        self.bytes.extend(reply);
        match self.held.back_mut() {
            Some(Held::Bytes(len)) => *len += reply.len(),
            _ => self.held.push_back(Held::Bytes(reply.len())),
        }
    }

    /// The checks that nobody waits for any more.
    pub(super) fn forget(&mut self) -> impl Iterator<Item = CheckId> + '_ {
        self.bytes.clear();
        self.held.drain(..).filter_map(|held| match held {
            Held::Check(check, _) => Some(check),
            Held::Bytes(_) => None,
        })
    }
}

/// A driver that sleeps is woken this often in any case; see `server`.
const NUDGE_US: u64 = 100_000;

impl Session {
    /// Writes a reply in its place: behind the checks that wait, if any do. `scratch` carries its capacity.
    #[inline]
    pub(super) fn tell(&mut self, scratch: &mut Vec<u8>, write: impl FnOnce(&mut Vec<u8>)) {
        if self.waiting.is_empty() {
            write(&mut self.output);
        } else {
            scratch.clear();
            write(scratch);
            self.waiting.keep(scratch);
        }
    }
}

/// The same, where most sessions wait for nothing.
#[inline(always)]
fn tell_at_once(session: &mut Session, scratch: &mut Vec<u8>, write: impl FnOnce(&mut Vec<u8>)) {
    if session.waiting.is_empty() {
        write(&mut session.output);
    } else {
        session.tell(scratch, write);
    }
}

impl Engine {
    /// Asks the store for a check whose rules are `Engine::applied` from `first`.
    #[inline]
    pub(super) fn ask(
        &mut self,
        (conn, is_sampled): (ConnId, bool),
        cost: u32,
        first: usize,
        attributes: &Attributes<'_>,
    ) {
        let Some(remote) = &mut self.remote else { return };
        let question = Question { conn, cost, now_us: self.now.mono_us, is_sampled, is_together: false };
        let mut around = Surroundings::new(&self.table, &mut self.table_counts, &self.counters, self.now)
            .with_heat(&mut self.heat)
            .with_book(self.book.as_ref());
        let asked = remote.store.ask(&mut around, &remote.redis, question, &self.applied[first..], attributes);
        self.applied.truncate(first);
        self.answered(conn, Asker::Check, asked);
    }

    /// How the identity begins that all rules of a check have, where they all enforce limits of their own and it is one.
    pub(super) fn identity_head(
        &mut self,
        first: usize,
        attributes: &Attributes<'_>,
        last_is_known: bool,
        cost: u32,
    ) -> Option<IdentityHead> {
        let applied = &self.applied[first..];
        let policy = &self.policy;
        let group = policy.cards[applied.first()?.rule as usize].identity_group;
        let is_plain = |one: &Applied| {
            let card = &policy.cards[one.rule as usize];
            let is_own = one.override_index == Applied::NO_OVERRIDE && card.enforced.is_some();
            is_own && card.identity_group == group && policy.is_whole(one.rule)
        };
        if cost == 0 || !applied.iter().all(is_plain) {
            return None;
        }
        self.scratch.clear();
        let (rule, snapshot) = (applied[0].rule, &self.policy.snapshot);
        let follows = snapshot.identity_head(rule, attributes, last_is_known, &mut self.scratch)?;
        IdentityHead::new(&self.scratch, follows)
    }

    /// A CHECK that begins as an earlier one did, and goes to the store the same way; returns where it ends. `None` where
    /// it does not, or is not complete.
    #[inline]
    pub(super) fn recall_remote(&mut self, conn: ConnId, bytes: &[u8]) -> Option<usize> {
        let (entry, begins) = self.recall.find(bytes, self.generation)?;
        let head = entry.head.as_ref()?;
        let mut cursor = Cursor::new(&bytes[begins..]);
        // What is wrong, incomplete or too long is for the long way to say.
        let value = cursor.bulk(&self.settings.request).ok()??;
        let len = begins + cursor.consumed();
        if len > self.settings.request.request_bytes_max {
            return None;
        }
        let remote = self.remote.as_mut()?;
        let is_sampled = self.heat.samples();
        let question = Question { conn, cost: entry.cost, now_us: self.now.mono_us, is_sampled, is_together: false };
        if let Some(rule) = entry.one
            && !is_sampled
        {
            let key = self.policy.snapshot.follow_one(&entry.recipe, value);
            let card = &self.policy.cards[rule as usize];
            match remote.store.known(card, key, &question) {
                Known::Denied(said) => {
                    self.counters.denied.add(1);
                    self.counters.rule(card.slot, Reason::Denied).add(1);
                    self.counters.decided_by(card.slot, By::Rejection).add(1);
                    let write = |out: &mut Vec<u8>| {
                        card.reply.deny(said.remaining, said.retry_after_ms, said.reset_after_ms, out);
                    };
                    tell_at_once(&mut self.sessions[conn.index()], &mut self.scratch, write);
                }
                Known::Paid(spent) => {
                    self.counters.rule(card.slot, Reason::Allowed).add(1);
                    self.counters.decided_by(card.slot, By::Lease).add(1);
                    let told = spent.told;
                    let capacity = card.enforced.as_ref().map_or(0, |rate| rate.capacity);
                    let reset_after_ms = told.full_at_us.saturating_sub(self.now.mono_us).div_ceil(1_000);
                    let write = |out: &mut Vec<u8>| card.reply.allow(told.remaining.min(capacity), reset_after_ms, out);
                    tell_at_once(&mut self.sessions[conn.index()], &mut self.scratch, write);
                    if spent.asks {
                        let one = Applied { rule, override_index: Applied::NO_OVERRIDE, key };
                        let write = |identity: &mut Vec<u8>| head.write(value, identity);
                        remote.store.go_on(&remote.redis, &one, question, &spent, write);
                    }
                }
                Known::Nothing => return self.recall_asked(conn, bytes, is_sampled),
            }
            self.counters.checks.add(1);
            let session = &mut self.sessions[conn.index()];
            mark(&mut self.dirty, session, conn);
            pause_behind(session, self.settings.output_backlog_bytes, &self.counters);
            return Some(len);
        }
        self.recall_asked(conn, bytes, is_sampled)
    }

    /// The same where that is not known.
    fn recall_asked(&mut self, conn: ConnId, bytes: &[u8], is_sampled: bool) -> Option<usize> {
        let (entry, begins) = self.recall.find(bytes, self.generation)?;
        let head = entry.head.as_ref()?;
        let mut cursor = Cursor::new(&bytes[begins..]);
        let value = cursor.bulk(&self.settings.request).ok()??;
        let len = begins + cursor.consumed();
        let remote = self.remote.as_mut()?;
        let question = Question { conn, cost: entry.cost, now_us: self.now.mono_us, is_sampled, is_together: false };
        let first = self.applied.len();
        self.policy.snapshot.follow(&entry.recipe, value, &mut self.applied);
        if is_sampled && sampled::touch(&mut self.heat, &self.policy, true, &self.applied[first..]) {
            self.heat.want_names();
            self.applied.truncate(first);
            return None;
        }
        let mut around = Surroundings::new(&self.table, &mut self.table_counts, &self.counters, self.now)
            .with_heat(&mut self.heat)
            .with_book(self.book.as_ref());
        let applied = &self.applied[first..];
        let write = |identity: &mut Vec<u8>| head.write(value, identity);
        let asked = remote.store.ask_known(&mut around, &remote.redis, question, applied, write);
        self.applied.truncate(first);
        self.answered(conn, Asker::Check, asked);
        Some(len)
    }

    /// Asks the store for a throttle call.
    pub(super) fn ask_throttle(
        &mut self,
        (conn, is_sampled): (ConnId, bool),
        dialect: Dialect,
        call: &Throttle<'_>,
        hash: u64,
    ) {
        let Some(remote) = &mut self.remote else { return };
        let question = Question { conn, cost: call.cost, now_us: self.now.mono_us, is_sampled, is_together: false };
        let mut around = Surroundings::new(&self.table, &mut self.table_counts, &self.counters, self.now)
            .with_heat(&mut self.heat)
            .with_book(self.book.as_ref());
        let bucket = ThrottleBucket { family: dialect.family(), key: call.key, hash, rate: call.rate };
        let asked = remote.store.throttle(&mut around, &remote.redis, question, &bucket);
        self.answered(conn, Asker::Throttle(dialect), asked);
    }

    fn answered(&mut self, conn: ConnId, asker: Asker, asked: Asked) {
        let session = &mut self.sessions[conn.index()];
        match asked {
            Asked::Later(check) => session.waiting.held.push_back(Held::Check(check, asker)),
            Asked::Now(verdict) => {
                let words = Words { policy: &self.policy, no_rule: &self.no_rule, counters: &self.counters };
                session.tell(&mut self.scratch, |out| words.say(asker, &verdict, out));
                mark(&mut self.dirty, session, conn);
                pause_behind(session, self.settings.output_backlog_bytes, &self.counters);
            }
        }
    }

    /// Sends the store what this wake-up has asked, and hands out what it has answered. Returns whether that gave any
    /// connection something to do.
    pub fn flush_store(&mut self) -> bool {
        if self.remote.is_none() {
            return false;
        }
        let now_us = self.now.mono_us;
        if !self.web_deadlines.is_empty() {
            self.expire_web();
        }
        self.with_remote(|redis, store, around| {
            redis.tick(store, around);
            store.expire(around, now_us);
            store.flush(around, redis);
        });
        self.counters.set_table(&self.table_counts);
        while let Some(conn) = self.remote.as_mut().and_then(|remote| remote.store.next_decided()) {
            if self.sessions.get(conn.index()).is_some_and(|session| session.web.is_some()) {
                self.deliver_web(conn);
            } else {
                self.deliver(conn);
            }
        }
        !self.dirty.is_empty()
    }

    /// What is to be done next with the connections to the shards.
    pub fn next_link_action(&mut self) -> Option<Action> {
        self.remote.as_mut()?.redis.next_action()
    }

    /// The next connection to a shard with something to send.
    pub fn next_link_output(&mut self) -> Option<LinkId> {
        self.remote.as_mut()?.redis.next_output()
    }

    /// All that is to be sent to a shard, in exchange for an empty buffer.
    pub fn take_link_output(&mut self, link: LinkId, buffer: &mut Vec<u8>) {
        if let Some(remote) = &mut self.remote {
            remote.redis.take_output(link, buffer);
        }
    }

    /// Bytes from a shard. What they decide comes out of [`Engine::flush_store`].
    pub fn link_bytes_in(&mut self, link: LinkId, bytes: &[u8]) {
        self.with_remote(|redis, store, around| redis.received(store, around, link, bytes));
    }

    /// A connection to a shard was made.
    pub fn link_connected(&mut self, link: LinkId) {
        self.with_remote(|redis, store, around| redis.connected(store, around, link));
    }

    /// A connection to a shard could not be made.
    pub fn link_failed(&mut self, link: LinkId, why: &str) {
        self.with_remote(|redis, store, around| redis.connect_failed(store, around, link, why));
    }

    /// A connection to a shard is gone.
    pub fn link_closed(&mut self, link: LinkId, why: &str) {
        self.with_remote(|redis, store, around| redis.closed(store, around, link, why));
    }

    /// Whether a sleeping driver must be woken every millisecond: a check or a call has a deadline.
    pub fn needs_ticks(&self) -> bool {
        let wants = |remote: &Remote| remote.store.waiting() > 0 || remote.redis.wants_tick_within(NUDGE_US);
        self.remote.as_ref().is_some_and(wants)
    }

    /// The server leaves, and nobody asks any more: what this core has taken in advance is given back.
    pub fn leave(&mut self) {
        if let Some(remote) = &mut self.remote {
            remote.store.give_back_leases();
        }
    }

    /// Whether that has reached the store, or will not.
    pub fn has_left(&self) -> bool {
        self.remote.as_ref().is_none_or(|remote| remote.store.has_given_back() && !remote.redis.is_busy())
    }

    pub(super) fn with_remote(&mut self, act: impl FnOnce(&mut Redis, &mut Store, &mut Surroundings<'_>)) {
        let Some(Remote { redis, store }) = &mut self.remote else { return };
        let mut around = Surroundings::new(&self.table, &mut self.table_counts, &self.counters, self.now)
            .with_heat(&mut self.heat)
            .with_book(self.book.as_ref());
        act(redis, store, &mut around);
    }

    /// Moves what is decided at the front of a session's queue to its output.
    fn deliver(&mut self, conn: ConnId) {
        let Self { remote: Some(remote), sessions, dirty, counters, no_rule, settings, spare_buffers, .. } = self
        else {
            return;
        };
        let Some(session) = sessions.get_mut(conn.index()) else { return };
        let Session { waiting, output, .. } = session;
        let before = output.len();
        while let Some(&front) = waiting.held.front() {
            if output.capacity() == 0 {
                *output = spare_buffers.pop().unwrap_or_default();
            }
            match front {
                Held::Bytes(len) => output.extend(waiting.bytes.drain(..len)),
                Held::Check(check, asker) => {
                    let Some((verdict, policy)) = remote.store.verdict(check) else { break };
                    Words { policy, no_rule, counters }.say(asker, &verdict, output);
                    remote.store.release(check);
                }
            }
            waiting.held.pop_front();
        }
        if output.len() > before {
            mark(dirty, session, conn);
            pause_behind(session, settings.output_backlog_bytes, counters);
        }
    }

    /// The connection is gone: nobody waits for its checks.
    pub(super) fn forget(&mut self, session: &mut Session) {
        let Some(remote) = &mut self.remote else { return };
        for check in session.waiting.forget() {
            remote.store.release(check);
        }
    }
}

/// How a verdict is said, and counted.
struct Words<'a> {
    policy: &'a LoadedPolicy,
    no_rule: &'a RuleReply,
    counters: &'a CoreCounters,
}

impl Words<'_> {
    fn say(&self, asker: Asker, verdict: &Verdict, out: &mut Vec<u8>) {
        let counters = self.counters;
        match asker {
            Asker::Check => {
                counters.checks.add(1);
                match verdict.answer {
                    Answer::Allow => counters.unruled.add(u64::from(verdict.rule.is_none())),
                    Answer::Deny => counters.denied.add(1),
                    Answer::Unavailable => counters.unavailable.add(1),
                }
                let rule = verdict.rule.map_or(self.no_rule, |rule| &self.policy.cards[rule as usize].reply);
                reply::check(verdict, rule, out);
            }
            Asker::Throttle(dialect) => {
                match verdict.answer {
                    Answer::Allow => counters.throttles_allowed.add(1),
                    Answer::Deny | Answer::Unavailable => counters.throttles_denied.add(1),
                }
                reply::in_dialect(dialect, verdict, out);
            }
        }
    }
}
