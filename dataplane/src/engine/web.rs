//! HTTP connections on a core: their bytes go to hyper, what their requests ask is decided here.
//!
//! ```text
//!   bytes_in ─► Connection::put, poll ─► asked ─► decide at once ──────────────┐
//!                     ▲                     └───► ask the store ─► Outstanding │
//!                     └───────── answered ◄────── deliver_web ◄────┘ ◄─────────┘
//! ```
//!
//! A request whose checks are asked together takes from none of their buckets where one is denied: what was taken from the
//! others is given back as soon as that is known.

use std::{cell::RefCell, net::IpAddr, rc::Rc, sync::Arc};

use policy_sync::{
    identity,
    model::Mode,
    rate::Rate,
    snapshot::{Applied, Attributes, Grant},
};
use smallvec::SmallVec;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::{ConnId, Engine, RuleTally, Session, mark, pause_behind, push_attribute, remote::Remote};
use crate::{
    buckets::{TableCounts, table::Moment},
    decision::{self, Answer, Ground, UNRULED, Verdict},
    metrics::counters::CoreCounters,
    policy::LoadedPolicy,
    resp::command::CommandError,
    store::{Asked, CheckId, Question, Surroundings, ThrottleBucket},
    web::{
        Web,
        asking::{Answered, Asking, Check, Exchange, Kind, Said, Ticket},
        connection::Connection,
        settings::WebSettings,
    },
};

/// The name of the buckets whose limit comes with the request.
const FAMILY: &str = "descriptor";
/// The attribute that names a request's domain.
const DOMAIN: &[u8] = b"domain";

/// A connection, and what its requests wait for.
pub(super) struct WebSession {
    connection: Connection,
    outstanding: Vec<Outstanding>,
}

impl WebSession {
    /// Whether requests wait for the store.
    pub(super) fn waits(&self) -> bool {
        !self.outstanding.is_empty()
    }

    /// See [`Connection::is_overdue`].
    pub(super) fn is_overdue(&self, now_ms: u64) -> bool {
        self.connection.is_overdue(now_ms)
    }
}

/// A request that waits for the store.
struct Outstanding {
    ticket: Ticket,
    together: bool,
    parts: SmallVec<[Part; 1]>,
    /// When the asker has waited for long enough, where that is before the store's own deadline.
    until_us: Option<u64>,
    policy: Arc<LoadedPolicy>,
}

/// One of its checks.
struct Part {
    state: State,
    applied: Rules,
    /// The key of its bucket, where its limit came along.
    limited_key: u64,
    cost: u32,
    kind: Kind,
}

type Rules = SmallVec<[Applied; 4]>;

#[derive(Clone, Copy)]
enum State {
    /// The store has it.
    Waits(CheckId),
    /// It has its verdict, and the store keeps what it took until all are known.
    Held(CheckId, Verdict),
    Decided(Verdict),
}

impl Part {
    fn verdict(&self) -> Verdict {
        match self.state {
            State::Waits(_) => UNRULED,
            State::Held(_, verdict) | State::Decided(verdict) => verdict,
        }
    }

    /// What the asker is told, where all is allowed or not.
    fn said(&self, policy: &LoadedPolicy, gives_back: bool) -> Said {
        let mut verdict = self.verdict();
        if gives_back && verdict.answer == Answer::Allow && verdict.remaining >= 0 && self.kind != Kind::Refund {
            verdict.remaining = (verdict.remaining + i64::from(self.cost)).min(verdict.limit);
        }
        let of_rule = || {
            let one = self.applied.iter().find(|one| Some(one.rule) == verdict.rule)?;
            if let Grant::Limit(rate) = policy.snapshot.grant(*one) { Some(*rate) } else { None }
        };
        let rate = if let Kind::Limited(rate) = self.kind { rate } else { of_rule() };
        Said { verdict, rate }
    }
}

/// Whether a part that is not allowed keeps the others from taking.
fn is_refused(together: bool, mut verdicts: impl Iterator<Item = Verdict>) -> bool {
    together && verdicts.any(|verdict| verdict.answer != Answer::Allow)
}

/// A check without a limit to take from, whatever comes.
fn refused_always() -> Verdict {
    Verdict { rule: None, ..decision::refuse_always(0) }
}

impl Engine {
    /// HTTP is served, by these settings.
    #[must_use]
    pub fn with_web(mut self, settings: WebSettings) -> Self {
        let web = Web::new(settings, Arc::clone(&self.counters), Arc::clone(&self.facts));
        self.web = Some(Rc::new(web));
        self
    }

    /// A connection to an HTTP port was accepted under this number.
    pub fn opened_web(&mut self, conn: ConnId, peer: Option<IpAddr>) {
        self.opened(conn);
        let Some(web) = &self.web else { return };
        let connection = Connection::new(web, peer, self.now.mono_ms);
        self.sessions[conn.index()].web = Some(Box::new(WebSession { connection, outstanding: Vec::new() }));
    }

    /// The server leaves: a client that can be told so is.
    pub fn part(&mut self, conn: ConnId) {
        let Some(session) = self.sessions.get_mut(conn.index()) else { return };
        if let Some(web) = &session.web {
            web.connection.part();
            if web.connection.is_awake() {
                self.drive_web(conn);
            }
        }
    }

    /// Whether a connection's client takes too long over a request, or has asked nothing for too long.
    pub fn is_overdue(&self, conn: ConnId) -> bool {
        let web = self.sessions.get(conn.index()).and_then(|session| session.web.as_ref());
        web.is_some_and(|web| web.is_overdue(self.now.mono_ms))
    }

    /// Bytes of an HTTP connection.
    #[inline(never)]
    pub(super) fn web_bytes_in(&mut self, conn: ConnId, bytes: &[u8]) {
        if let Some(web) = &mut self.sessions[conn.index()].web {
            if let Some(shared) = &self.web {
                shared.now_ms.set(self.now.mono_ms);
            }
            web.connection.put(bytes);
            self.drive_web(conn);
        }
    }

    /// Lets a connection do what it can, decides what it asks, and takes what it sends.
    fn drive_web(&mut self, conn: ConnId) {
        let Some(shared) = self.web.clone() else { return };
        let Some(mut web) = self.sessions[conn.index()].web.take() else { return };
        shared.now_ms.set(self.now.mono_ms);
        let mut goes_on = true;
        while goes_on {
            goes_on = web.connection.poll();
            let mut asked = std::mem::take(&mut self.web_asked);
            std::mem::swap(&mut asked, &mut shared.exchange.borrow_mut().asked);
            for (ticket, asking) in asked.drain(..) {
                self.decide_web(conn, &shared.exchange, &mut web.outstanding, ticket, &asking);
            }
            self.web_asked = asked;
            if !web.connection.is_awake() {
                break;
            }
        }
        let session = &mut self.sessions[conn.index()];
        if session.output.capacity() == 0 {
            session.output = self.spare_buffers.pop().unwrap_or_default();
        }
        web.connection.take_output(&mut session.output);
        // While a request waits for the store, HTTP/1.1 reads nothing more.
        let has_enough = web.waits() && web.connection.unread_bytes() > shared.settings.unread_bytes_max();
        session.web = Some(web);
        session.paused |= has_enough;
        session.closing |= !goes_on;
        if !session.output.is_empty() || session.closing {
            mark(&mut self.dirty, session, conn);
        }
        pause_behind(session, self.settings.output_backlog_bytes, &self.counters);
    }

    /// Decides what a request asks, or sends it on its way to the store.
    fn decide_web(
        &mut self,
        conn: ConnId,
        exchange: &RefCell<Exchange>,
        outstanding: &mut Vec<Outstanding>,
        ticket: Ticket,
        asking: &Asking,
    ) {
        let together = asking.together && asking.checks.len() > 1;
        // All of them first: where one cannot be meant, none is decided. And their buckets are on their way meanwhile.
        let mut found: SmallVec<[(Attributes<'_>, Rules); 1]> = SmallVec::with_capacity(asking.checks.len());
        for at in 0..asking.checks.len() {
            match self.find_rules(asking, at) {
                Ok(rules) => found.push(rules),
                Err(error) => {
                    self.counters.command_errors.add(1);
                    exchange.borrow_mut().answer(ticket, Answered::Wrong(at, error));
                    return;
                }
            }
        }
        let decided = found.into_iter().enumerate();
        let parts =
            decided.map(|(at, (attributes, rules))| self.decide_part(conn, asking, at, (&attributes, rules), together));
        let parts: SmallVec<[Part; 1]> = parts.collect();
        let deadline_us = self.remote.as_ref().map_or(0, |remote| remote.store.deadline_us());
        let timeout_us = asking.timeout_us.filter(|&timeout_us| timeout_us < deadline_us);
        let until_us = timeout_us.map(|timeout_us| self.now.mono_us + timeout_us);
        let request = Outstanding { ticket, together, parts, until_us, policy: Arc::clone(&self.policy) };
        if request.parts.iter().any(|part| matches!(part.state, State::Waits(_))) {
            if let Some(until_us) = until_us {
                self.web_deadlines.push((until_us, conn));
            }
            outstanding.push(request);
        } else {
            self.finish(exchange, request);
        }
    }

    /// The rules that apply to a check, and its attributes.
    fn find_rules<'a>(&mut self, asking: &'a Asking, at: usize) -> Result<(Attributes<'a>, Rules), CommandError> {
        let mut attributes = Attributes::default();
        for (name, value) in asking.pairs(at) {
            push_attribute(&mut attributes, &self.policy.snapshot, name, value)?;
        }
        if let Kind::Limited(_) = asking.checks[at].kind {
            return Ok((attributes, Rules::new()));
        }
        let before = self.applied.len();
        self.policy.snapshot.applying(&attributes, self.now.unix_ms, &mut self.scratch, &mut self.applied)?;
        let rules = Rules::from_slice(&self.applied[before..]);
        self.applied.truncate(before);
        if self.remote.is_none() {
            rules.iter().for_each(|one| self.table.prefetch(one.key));
        }
        Ok((attributes, rules))
    }

    fn decide_part(
        &mut self,
        conn: ConnId,
        asking: &Asking,
        at: usize,
        (attributes, applied): (&Attributes<'_>, Rules),
        is_together: bool,
    ) -> Part {
        let Check { cost, kind, .. } = asking.checks[at];
        if let Kind::Limited(rate) = kind {
            let (state, limited_key) = self.decide_limited(conn, asking, at, (rate, cost), is_together);
            return Part { state, applied, limited_key, cost, kind };
        }
        let before = self.applied.len();
        self.applied.extend_from_slice(&applied);
        let is_sampled = self.sample(before, attributes);
        if self.book.is_some() {
            self.meet_shadows(before, attributes);
        }
        self.applied.truncate(before);
        let is_refund = kind == Kind::Refund;
        let part = |state, applied| Part { state, applied, limited_key: 0, cost, kind };
        let Some(remote) = &mut self.remote else {
            let verdict = self.with_table(|ground, counts| {
                if is_refund {
                    give_back(ground, &applied, cost, counts);
                }
                decision::decide(ground, &applied, if is_refund { 0 } else { cost }, counts)
            });
            return part(State::Decided(verdict), applied);
        };
        let mut question = Question { conn, cost, now_us: self.now.mono_us, is_sampled, is_together };
        if is_refund {
            remote.store.refund(&remote.redis, question, &applied, attributes);
            question.cost = 0;
        }
        let mut around = Surroundings::new(&self.table, &mut self.table_counts, &self.counters, self.now)
            .with_heat(&mut self.heat)
            .with_book(self.book.as_ref());
        let asked = remote.store.ask(&mut around, &remote.redis, question, &applied, attributes);
        part(state_of(asked), applied)
    }

    /// A check whose limit comes along: all its attributes are its identity.
    fn decide_limited(
        &mut self,
        conn: ConnId,
        asking: &Asking,
        at: usize,
        (rate, cost): (Option<Rate>, u32),
        is_together: bool,
    ) -> (State, u64) {
        let domain = asking.pairs(at).find(|(name, _)| *name == DOMAIN).map_or(&b""[..], |(_, value)| value);
        if !std::str::from_utf8(domain).is_ok_and(|domain| self.policy.knows_domain(domain)) {
            return (State::Decided(UNRULED), 0);
        }
        let Some(rate) = rate else { return (State::Decided(refused_always()), 0) };
        let (key, hash) = self.limited_key(asking, at);
        let Some(remote) = &mut self.remote else {
            self.longest_fill.see(rate.fill_ms());
            let verdict = self.with_table(|ground, counts| {
                let outcome = decision::take(ground.table, hash, &rate, cost, ground.moment, counts);
                Verdict { rule: None, ..decision::verdict(outcome, &rate, cost, 0, ground.moment.now_ms) }
            });
            return (State::Decided(verdict), hash);
        };
        let question = Question { conn, cost, now_us: self.now.mono_us, is_sampled: false, is_together };
        let mut around = Surroundings::new(&self.table, &mut self.table_counts, &self.counters, self.now)
            .with_heat(&mut self.heat)
            .with_book(self.book.as_ref());
        let bucket = ThrottleBucket { family: FAMILY, key: &key, hash, rate };
        (state_of(remote.store.throttle(&mut around, &remote.redis, question, &bucket)), hash)
    }

    /// The key of the bucket of all attributes of a check, and its hash.
    fn limited_key(&self, asking: &Asking, at: usize) -> (Vec<u8>, u64) {
        let mut key = Vec::new();
        for (name, value) in asking.pairs(at) {
            identity::encode_value(name, &mut key);
            key.push(b'=');
            identity::encode_value(value, &mut key);
            key.push(b',');
        }
        let hash = xxh3_64_with_seed(&key, self.descriptor_seed);
        (key, hash)
    }

    /// Does something with the buckets in memory.
    fn with_table<R>(&mut self, act: impl FnOnce(&Ground<'_, RuleTally<'_>>, &mut TableCounts) -> R) -> R {
        let now_ms = self.now.mono_ms;
        let moment = Moment { now_ms, fill_ms_max: self.longest_fill.at(now_ms) };
        let tally = RuleTally { counters: &self.counters, cards: &self.policy.cards, book: self.book.as_ref(), now_ms };
        let ground = Ground { snapshot: &self.policy.snapshot, table: &self.table, moment, tally: &tally };
        let done = act(&ground, &mut self.table_counts);
        self.counters.set_table(&self.table_counts);
        done
    }

    /// All checks of a request have their verdicts.
    fn finish(&mut self, exchange: &RefCell<Exchange>, request: Outstanding) {
        let Outstanding { ticket, together, parts, policy, .. } = request;
        let is_refused = is_refused(together, parts.iter().map(Part::verdict));
        if self.remote.is_some() {
            self.settle_parts(&parts, is_refused);
        } else if is_refused {
            self.undo(&parts);
        }
        let mut said = SmallVec::with_capacity(parts.len());
        for part in &parts {
            count(&self.counters, &part.verdict());
            said.push(part.said(&policy, is_refused));
        }
        exchange.borrow_mut().answer(ticket, Answered::Verdicts(policy, said));
    }

    /// What these checks took from buckets in memory goes back.
    fn undo(&mut self, parts: &[Part]) {
        for part in parts.iter().filter(|part| part.verdict().answer == Answer::Allow) {
            self.with_table(|ground, counts| match part.kind {
                Kind::Take => give_back(ground, &part.applied, part.cost, counts),
                Kind::Limited(Some(rate)) => {
                    ground.table.give_back(part.limited_key, &rate, part.cost, ground.moment, counts);
                }
                Kind::Limited(None) | Kind::Refund => {}
            });
        }
    }

    /// Lets the store go on with what it kept for these checks: what they took stays taken, unless `is_refused`.
    fn settle_parts(&mut self, parts: &[Part], is_refused: bool) {
        self.with_remote(|_, store, around| {
            for part in parts {
                match part.state {
                    State::Held(check, verdict) => {
                        store.settle(around, check, if is_refused { Answer::Deny } else { verdict.answer });
                        store.release(check);
                    }
                    State::Waits(check) => store.abandon(check),
                    State::Decided(_) => {}
                }
            }
        });
    }

    /// Hands out what the store has decided for a connection.
    pub(super) fn deliver_web(&mut self, conn: ConnId) {
        let Some(shared) = self.web.clone() else { return };
        let Some(session) = self.sessions.get_mut(conn.index()) else { return };
        let Some(web) = &mut session.web else { return };
        let Some(Remote { store, .. }) = &mut self.remote else { return };
        let mut done: SmallVec<[Outstanding; 8]> = SmallVec::new();
        let mut at = 0;
        while let Some(request) = web.outstanding.get_mut(at) {
            let mut waits = false;
            for part in &mut request.parts {
                let State::Waits(check) = part.state else { continue };
                let Some((verdict, _)) = store.verdict(check) else {
                    waits = true;
                    continue;
                };
                if request.together {
                    part.state = State::Held(check, verdict);
                } else {
                    part.state = State::Decided(verdict);
                    store.release(check);
                }
            }
            if waits {
                at += 1;
            } else {
                done.push(web.outstanding.swap_remove(at));
            }
        }
        for request in done {
            self.finish(&shared.exchange, request);
        }
        self.drive_web(conn);
    }

    /// Answers by the failure policies what its askers have waited for long enough.
    pub(super) fn expire_web(&mut self) {
        let now_us = self.now.mono_us;
        let (sessions, deadlines) = (&self.sessions, &mut self.web_deadlines);
        let mut checks: SmallVec<[CheckId; 8]> = SmallVec::new();
        deadlines.retain(|&(until_us, conn)| {
            if until_us > now_us {
                return true;
            }
            let web = sessions.get(conn.index()).and_then(|session| session.web.as_ref());
            for request in web.iter().flat_map(|web| &web.outstanding) {
                if request.until_us.is_some_and(|until_us| until_us <= now_us) {
                    checks.extend(request.parts.iter().filter_map(|part| match part.state {
                        State::Waits(check) => Some(check),
                        State::Held(..) | State::Decided(_) => None,
                    }));
                }
            }
            false
        });
        self.with_remote(|_, store, around| checks.into_iter().for_each(|check| store.give_up(around, check)));
    }

    /// The connection is gone: nobody waits for its checks.
    pub(super) fn forget_web(&mut self, session: &mut Session) {
        let Some(web) = session.web.take() else { return };
        let WebSession { connection, outstanding } = *web;
        drop(connection);
        for request in outstanding {
            self.settle_parts(&request.parts, false);
            if let Some(shared) = &self.web {
                shared.exchange.borrow_mut().forget(request.ticket);
            }
        }
    }
}

fn state_of(asked: Asked) -> State {
    match asked {
        Asked::Now(verdict) => State::Decided(verdict),
        Asked::Later(check) => State::Waits(check),
    }
}

/// Gives back to the buckets of the rules that enforce a limit.
fn give_back(ground: &Ground<'_, RuleTally<'_>>, applied: &[Applied], cost: u32, counts: &mut TableCounts) {
    for one in applied {
        if let (Mode::Enforce, Grant::Limit(rate)) =
            (ground.snapshot.rules()[one.rule as usize].mode, ground.snapshot.grant(*one))
        {
            ground.table.give_back(one.key, rate, cost, ground.moment, counts);
        }
    }
}

fn count(counters: &CoreCounters, verdict: &Verdict) {
    counters.checks.add(1);
    match verdict.answer {
        Answer::Allow => counters.unruled.add(u64::from(verdict.rule.is_none())),
        Answer::Deny => counters.denied.add(1),
        Answer::Unavailable => counters.unavailable.add(1),
    }
}
