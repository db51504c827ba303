//! The counts in Redis: from the rules that apply to a check to calls, and from their replies to a verdict.
//!
//! One per core, without a socket, a clock or a lock. A check comes in with the rules that apply to it and is answered at
//! once or later:
//!
//! ```text
//!   ask(question)        the rules with a limit, by identity: one *part* per identity, in the *group* of its buckets
//!   flush(calls)         each group that has parts waiting and no call in flight: one script call for all of them
//!   completed(reply)     the grant is dealt out to the parts; a check whose parts are all there has its verdict
//!   expire(now)          checks whose deadline has come: the failure policy answers what is missing
//!   next_decided()       what the engine writes to its clients
//! ```
//!
//! That is coalescing: parts that arrive in one wake-up for the same buckets leave as one call, those that arrive while it
//! is in flight leave as the next. `deal` splits a grant, `leases` takes tokens in advance, `parts`
//! spreads split buckets, `fallback` answers what no store answered, `shards` is what all
//! cores know of the shards, `breaker` decides whether one is asked, `pool` bounds it all, `wire` speaks to the client.
//!
//! Shadow rules have parts of their own that nobody waits for: they lie dormant until the verdict, and then take (if the
//! check was allowed) or look (if it was not), each for itself.

pub mod breaker;
mod deal;
mod fallback;
mod leases;
pub mod parts;
mod pool;
pub mod setup;
pub mod shards;
mod tables;
pub mod wire;

use std::{cell::RefCell, collections::VecDeque, sync::Arc};

use policy_sync::{
    identity,
    model::{Lease, Mode, OnFailure},
    rate::Rate,
    snapshot::{Applied, Attributes, Grant, RULES_PER_CHECK_MAX},
};
use smallvec::SmallVec;

use self::{
    breaker::{Admission, Report, State},
    deal::{BucketReply, Deal},
    fallback::Missing,
    leases::{Owned, Said, begin_batch},
    pool::Handle,
    shards::{ShardId, Shards},
    tables::{Group, PartState, Tables},
    wire::LimitWords,
};
use crate::{
    buckets::{BucketTable, TableCounts},
    chance::Chance,
    clock::Now,
    decision::{self, Answer, By, Reason, UNRULED, Verdict, Why},
    engine::ConnId,
    heat::{Heat, Warmth},
    hot::{
        self, Hot,
        leases::Spent,
        mix,
        rejections::{self, Rejection},
    },
    metrics::counters::CoreCounters,
    policy::{LoadedPolicy, LocalTerms, RuleCard},
    shadow::Book,
};

/// What a core's store is allowed; settings.
#[derive(Clone, Copy, Debug)]
pub struct StoreSettings {
    /// How long a check waits for the store, in microseconds, counted from its arrival.
    pub deadline_us: u64,
    /// Checks of a core that may wait at once; beyond, the failure policy answers.
    pub waiting_max: usize,
    /// How the shards' breakers judge.
    pub breaker: breaker::BreakerSettings,
    /// What answers a throttle call that the store does not.
    pub throttle_on_failure: OnFailure,
    /// How the buckets in memory are made.
    pub local: LocalTerms,
    /// How leases are taken and given back.
    pub leases: LeaseTerms,
}

/// How leases are taken and given back; settings.
#[derive(Clone, Copy, Debug)]
pub struct LeaseTerms {
    /// The most of a bucket's capacity that a lease on `auto` takes at once.
    pub share: f64,
    /// How long a lease is kept of which nothing is spent, in microseconds.
    pub quiet_us: u64,
}

/// The way to the shards: what this module asks of a client, and what a simulator can be in its place.
pub trait Calls {
    /// The slot of a key's hash tag.
    fn slot(&self, tag: &[u8]) -> u16;

    /// The shard that serves a slot, if any is known.
    fn shard(&mut self, slot: u16) -> Option<ShardId>;

    /// Sends a call; its outcome comes back through [`Store::completed`] with the token, unless that is [`NOBODY`]. After
    /// an error none comes.
    ///
    /// # Errors
    ///
    /// Why it cannot be sent.
    fn send(&mut self, token: u64, call: &Call<'_>) -> Result<(), Why>;
}

/// One call of `lua/token_bucket.lua`.
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    /// The slot of all its keys.
    pub slot: u16,
    /// How to take.
    pub take: TakeMode,
    /// How much, from each bucket.
    pub cost: u32,
    /// All keys, one after the other.
    pub keys: &'a [u8],
    /// Where each key ends, and its bucket's limit.
    pub buckets: &'a [Bucket],
}

/// A bucket of a call.
#[derive(Clone, Copy, Debug)]
pub struct Bucket {
    /// Where its key ends in [`Call::keys`].
    pub key_end: u32,
    /// The limit in force.
    pub rate: Rate,
    /// The same as the script's arguments.
    pub limit: LimitWords,
    /// Index of its rule, or [`NO_RULE`].
    rule: u32,
    /// The override in force, or [`Applied::NO_OVERRIDE`].
    override_index: u32,
    /// The key of its stand-in in memory.
    local_key: u64,
    /// The key under which it is remembered to be empty.
    hot_key: u64,
}

/// How a call takes from its buckets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TakeMode {
    /// The whole cost from every bucket, or nothing.
    Exactly,
    /// The most that every bucket grants, up to the cost.
    UpTo,
    /// Gives back.
    Back,
}

/// A throttle call brings its limit along and belongs to no rule.
const NO_RULE: u32 = u32::MAX;
/// The token of calls whose outcome nobody waits for.
pub const NOBODY: u64 = u64::MAX;

/// A check that waits for the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckId(Handle);

/// What became of a question.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Asked {
    /// The verdict.
    Now(Verdict),
    /// It comes through [`Store::next_decided`].
    Later(CheckId),
}

/// What is known without a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Known {
    /// The bucket does not hold the cost.
    Denied(Rejection),
    /// The check passes: a lease has paid.
    Paid(Spent),
    /// Nothing: the store is to be asked.
    Nothing,
}

/// Who asks, how much, and when.
#[derive(Clone, Copy, Debug)]
pub struct Question {
    /// The connection.
    pub conn: ConnId,
    /// The cost; 0 only looks.
    pub cost: u32,
    /// When it arrived, in microseconds since the process began.
    pub now_us: u64,
    /// Heat looks at it.
    pub is_sampled: bool,
    /// It is asked together with others: what it took is kept until [`Store::settle`].
    pub is_together: bool,
}

/// A throttle call: its own limit, whatever the policy says.
#[derive(Clone, Copy, Debug)]
pub struct ThrottleBucket<'a> {
    /// The command's name, which keeps the dialects' buckets apart.
    pub family: &'static str,
    /// Whose bucket.
    pub key: &'a [u8],
    /// The key, hashed with the process's seed.
    pub hash: u64,
    /// The limit.
    pub rate: Rate,
}

/// What a core works with beside the store's own state.
pub struct Surroundings<'a> {
    /// The buckets that stand in while the store does not answer.
    pub table: &'a BucketTable,
    /// What happened to them.
    pub table_counts: &'a mut TableCounts,
    /// This core's counters.
    pub counters: &'a CoreCounters,
    /// The time, in milliseconds since the process began.
    pub now_ms: u64,
    /// The same in microseconds.
    pub now_us: u64,
    /// What is told who answered the checks that are sampled.
    pub heat: Option<&'a mut Heat>,
    /// Where it is written down what shadow rules see.
    pub book: Option<&'a RefCell<Book>>,
}

impl<'a> Surroundings<'a> {
    /// As an engine has them.
    #[inline]
    pub fn new(
        table: &'a BucketTable,
        table_counts: &'a mut TableCounts,
        counters: &'a CoreCounters,
        now: Now,
    ) -> Self {
        Self { table, table_counts, counters, now_ms: now.mono_ms, now_us: now.mono_us, heat: None, book: None }
    }

    /// The same with a heat.
    #[inline]
    #[must_use]
    pub fn with_heat(mut self, heat: &'a mut Heat) -> Self {
        self.heat = Some(heat);
        self
    }

    /// The same with a book, if there is one.
    #[inline]
    #[must_use]
    pub fn with_book(mut self, book: Option<&'a RefCell<Book>>) -> Self {
        self.book = book;
        self
    }

    /// How warm a bucket is, by its key in [`Applied`]: may a lease begin, go on, must it end? Worth asking for checks that
    /// are sampled ([`Question::is_sampled`]), since no other can have made a bucket hot, and for buckets that have a lease.
    pub fn warmth(&mut self, key: u64) -> Warmth {
        self.heat.as_mut().map_or(Warmth::Cold, |heat| heat.warmth(key))
    }

    /// Tells the heat who answered a sampled check for a bucket, and how much of a call that took.
    #[inline]
    fn sampled(&mut self, is_sampled: bool, bucket: &Bucket, by: By, calls: f32) {
        if is_sampled && let Some(heat) = &mut self.heat {
            heat.decided(bucket.local_key, by.into(), calls);
        }
    }

    /// Counts who decided for a rule without a call.
    #[inline]
    fn decided(&mut self, policy: &LoadedPolicy, one: &Applied, by: By, is_sampled: bool) {
        self.counters.decided_by(policy.cards[one.rule as usize].slot, by).add(1);
        if is_sampled && let Some(heat) = &mut self.heat {
            heat.decided(one.key, by.into(), 0.0);
        }
    }

    fn count(&self, policy: &LoadedPolicy, rule: u32, reason: Reason) {
        self.counters.rule(policy.cards[rule as usize].slot, reason).add(1);
    }

    /// Counts what a shadow rule said of a check, by its key in [`Applied`].
    fn count_shadow(&self, policy: &LoadedPolicy, rule: u32, key: u64, passes: bool) {
        self.count(policy, rule, if passes { Reason::ShadowAllowed } else { Reason::ShadowDenied });
        if let (Some(book), Some(tag)) = (self.book, &policy.cards[rule as usize].shadow) {
            book.borrow_mut().count(tag, key, !passes, self.now_ms);
        }
    }

    /// Counts for the rules of these buckets that they let a check pass.
    fn count_allowed(&self, policy: &LoadedPolicy, buckets: &[Bucket]) {
        for bucket in buckets.iter().filter(|bucket| bucket.rule != NO_RULE) {
            self.count(policy, bucket.rule, Reason::Allowed);
        }
    }
}

/// The asker of one core.
pub struct Store {
    settings: StoreSettings,
    shards: Arc<Shards>,
    tables: Tables,
    /// Checks in the order of their deadlines, which is that of their arrival.
    arrivals: VecDeque<(u64, Handle)>,
    decided: Vec<ConnId>,
    /// By shard: what ended since the last flush.
    reports: Box<[Report]>,
    /// The policies that waiting checks are under; the last one is in force.
    policies: VecDeque<(u64, Arc<LoadedPolicy>)>,
    identity: Vec<u8>,
    /// The leases that this core has opened, and closes.
    leases: Owned,
    chance: Chance,
    rooms: Rooms,
}

/// Room for checks to which more rules apply than the stack has room for: kept from one to the next.
#[derive(Default)]
struct Rooms {
    wants: [Vec<Want>; 3],
    spent: Vec<Option<Spent>>,
    replies: Vec<BucketReply>,
}

impl Store {
    /// A store with everything that it will ever need.
    pub fn new(
        settings: StoreSettings,
        shards: Arc<Shards>,
        policy: &Arc<LoadedPolicy>,
        generation: u64,
        chance: Chance,
    ) -> Self {
        Self {
            tables: Tables::new(settings.waiting_max),
            arrivals: VecDeque::with_capacity(settings.waiting_max),
            decided: Vec::with_capacity(settings.waiting_max),
            reports: vec![Report::default(); shards.len()].into(),
            policies: VecDeque::from([(generation, Arc::clone(policy))]),
            identity: Vec::with_capacity(1024),
            leases: Owned::default(),
            chance,
            rooms: Rooms::default(),
            settings,
            shards,
        }
    }

    /// A new policy is in force. Checks that wait go on under theirs, which is kept as long as one of them does.
    pub fn adopt(&mut self, policy: &Arc<LoadedPolicy>, generation: u64) {
        let tables = &self.tables;
        self.policies.retain(|&(known, _)| {
            tables.checks.iter().any(|check| check.policy == known)
                || tables.groups.iter().any(|group| group.policy == known)
        });
        self.policies.push_back((generation, Arc::clone(policy)));
        self.leases.look_soon();
    }

    /// How long a check waits for the store, in microseconds.
    pub fn deadline_us(&self) -> u64 {
        self.settings.deadline_us
    }

    /// Checks that wait.
    pub fn waiting(&self) -> usize {
        self.tables.checks.used()
    }

    /// Decides a check to which `applied` apply, or sends it on its way.
    #[inline]
    pub fn ask(
        &mut self,
        around: &mut Surroundings<'_>,
        calls: &impl Calls,
        question: Question,
        applied: &[Applied],
        attributes: &Attributes<'_>,
    ) -> Asked {
        self.desk().ask(around, calls, question, applied, attributes)
    }

    /// The same where an earlier check has shown that all its rules enforce limits of their own, for one identity, which
    /// `write_identity` writes.
    #[inline]
    pub fn ask_known(
        &mut self,
        around: &mut Surroundings<'_>,
        calls: &impl Calls,
        question: Question,
        applied: &[Applied],
        write_identity: impl Fn(&mut Vec<u8>),
    ) -> Asked {
        self.desk().ask_known(around, calls, question, applied, write_identity)
    }

    /// What is known of a check of one rule that enforces its own limit, without a call.
    #[inline(always)]
    pub fn known(&self, card: &RuleCard, key: u64, question: &Question) -> Known {
        let (hot, bucket_key) = (self.shards.hot(), hot::key_with_limit(key, card.hot.limit_key));
        if let Some(full_at_us) = hot.rejections.full_at_us(bucket_key) {
            let said = if question.cost == 1 {
                Rejection::of_one(card.hot.rest_us, full_at_us, question.now_us)
            } else {
                card.enforced.as_ref().and_then(|rate| Rejection::of(rate, full_at_us, question.now_us, question.cost))
            };
            if let Some(said) = said {
                return Known::Denied(said);
            }
        }
        if card.hot.may_lease
            && let Some((_, policy)) = self.policies.back()
        {
            let key = lease_key(policy, [bucket_key]);
            if let Some(spent) = hot.leases.spend(key, question.cost, question.now_us / 1_000) {
                return Known::Paid(spent);
            }
        }
        Known::Nothing
    }

    /// The lease that a check of one rule was paid from is low, and gets its next batch.
    #[cold]
    pub fn go_on(
        &mut self,
        calls: &impl Calls,
        one: &Applied,
        question: Question,
        spent: &Spent,
        write_identity: impl Fn(&mut Vec<u8>),
    ) {
        let mut desk = self.desk();
        let Grant::Limit(rate) = desk.policy.snapshot.grant(*one) else { return };
        let want = desk.want(one, rate, question.cost);
        match desk.group(calls, &[want], |_, _, identity| write_identity(identity)) {
            Some(group) => desk.go_on(group, spent, question.now_us),
            None => desk.hot.leases.fail(desk.lease_key(&[want]), question.now_us / 1_000),
        }
    }

    /// Gives back what a check would cost to the buckets of all rules that enforce a limit. Nobody waits for it; what
    /// exceeds a bucket's capacity is dropped, and where the store does not answer, all of it.
    pub fn refund(&mut self, calls: &impl Calls, question: Question, applied: &[Applied], attributes: &Attributes<'_>) {
        if question.cost == 0 {
            return;
        }
        let mut desk = self.desk();
        let mut wants = list_for(applied.len(), &mut desk.rooms.wants[0]);
        for one in applied {
            if let (Mode::Enforce, Grant::Limit(rate)) =
                (desk.policy.cards[one.rule as usize].mode, desk.policy.snapshot.grant(*one))
            {
                wants.push(desk.want(one, rate, question.cost));
            }
        }
        for at in 0..wants.len() {
            if wants[..at].iter().any(|other| wants[at].shares_call(desk.policy, other)) {
                continue;
            }
            let write_identity = |policy: &LoadedPolicy, rule: u32, identity: &mut Vec<u8>| {
                policy.snapshot.encode_identity(rule, attributes, identity);
            };
            if let Some(group) = desk.group(calls, &wants[at..], write_identity) {
                desk.tables.give_back(group, question.cost);
            }
        }
        keep_room(wants, &mut desk.rooms.wants[0]);
    }

    /// The same for a throttle call.
    pub fn throttle(
        &mut self,
        around: &mut Surroundings<'_>,
        calls: &impl Calls,
        question: Question,
        bucket: &ThrottleBucket<'_>,
    ) -> Asked {
        self.desk().throttle(around, calls, question, bucket)
    }

    #[inline]
    fn desk(&mut self) -> Desk<'_> {
        let Some((generation, policy)) = self.policies.back() else {
            unreachable!("the policy in force is always there");
        };
        Desk {
            settings: &self.settings,
            tables: &mut self.tables,
            arrivals: &mut self.arrivals,
            identity: &mut self.identity,
            generation: *generation,
            policy,
            hot: self.shards.hot(),
            chance: &mut self.chance,
            rooms: &mut self.rooms,
        }
    }

    /// Sends what the wake-up has produced: one call for each group of buckets that has something to ask and no call
    /// in flight; and tells the breakers what has ended.
    pub fn flush(&mut self, around: &mut Surroundings<'_>, calls: &mut impl Calls) {
        self.report(around);
        self.close_leases(around);
        for at in 0.. {
            let Some(&group) = self.tables.dirty.get(at) else { break };
            self.tables.groups[group].is_dirty = false;
            self.send(around, calls, group);
        }
        self.tables.dirty.clear();
        while let Some((group, tokens)) = self.tables.backs.pop() {
            let entry = &self.tables.groups[group];
            for bucket in &entry.buckets {
                self.shards.hot().rejections.forget(bucket.hot_key, around.now_us);
            }
            let shard = calls.shard(entry.slot);
            let reachable = shard.is_some_and(|shard| self.shards.breaker(shard).state() == State::Closed);
            if reachable {
                let call = call_of(entry, TakeMode::Back, tokens);
                // What cannot be given back refills by itself.
                let _ = calls.send(NOBODY, &call);
            }
            self.tables.let_go(group);
        }
        self.report(around);
    }

    /// Takes what a call has brought, which that shard was sent at that time. `Err` says why it brought nothing, and whether the shard is to blame.
    pub fn completed(
        &mut self,
        around: &mut Surroundings<'_>,
        token: u64,
        (shard, sent_at_us): (Option<ShardId>, u64),
        outcome: Result<&[i64], (Why, bool)>,
    ) {
        let handle = Handle::unpack(token);
        let is_probe = self.tables.groups.find(handle).is_some_and(|group| group.is_probe);
        if let Some(report) = shard.and_then(|shard| self.reports.get_mut(shard.index())) {
            let failed = matches!(outcome, Err((_, true)));
            report.calls += 1;
            report.failures += u32::from(failed);
            report.probes_ok += u32::from(is_probe && !failed);
            report.probes_failed += u32::from(is_probe && failed);
        }
        if token == NOBODY || self.tables.groups.find(handle).is_none() {
            return;
        }
        // The group stays while its parts go.
        self.tables.hold(handle);
        let group = &mut self.tables.groups[handle];
        (group.is_in_flight, group.is_probe) = (false, false);
        let buckets = group.buckets.len();
        match outcome.map(|integers| read_replies(integers, buckets, &mut self.rooms.replies)) {
            Ok(Some(replies)) => {
                self.deal(around, handle, &replies, sent_at_us);
                keep_room(replies, &mut self.rooms.replies);
            }
            // The script's answer makes no sense: somebody else's function under its name.
            Ok(None) => self.fail(around, handle, Why::Refused),
            Err((why, _)) => self.fail(around, handle, why),
        }
        if !self.tables.groups[handle].waiting.is_empty() {
            self.tables.mark(handle);
        }
        self.tables.let_go(handle);
    }

    /// Decides the checks whose deadline has come.
    pub fn expire(&mut self, around: &mut Surroundings<'_>, now_us: u64) {
        while let Some(&(deadline_us, check)) = self.arrivals.front() {
            let Some(entry) = self.tables.checks.find(check) else {
                self.arrivals.pop_front();
                continue;
            };
            if entry.verdict.is_none() {
                if deadline_us > now_us {
                    return;
                }
                self.conclude(around, check);
            }
            self.arrivals.pop_front();
        }
    }

    /// Who asked the next check that has got its verdict.
    pub fn next_decided(&mut self) -> Option<ConnId> {
        self.decided.pop()
    }

    /// A check's verdict, and the policy that its rule is of; `None` while it waits.
    pub fn verdict(&mut self, check: CheckId) -> Option<(Verdict, &LoadedPolicy)> {
        let entry = self.tables.checks.find(check.0)?;
        let (verdict, generation) = (entry.verdict?, entry.policy);
        Some((verdict, policy_of(&self.policies, generation)))
    }

    /// Decides a check now, with what is there: its asker waits no longer.
    pub fn give_up(&mut self, around: &mut Surroundings<'_>, check: CheckId) {
        if self.tables.checks.find(check.0).is_some_and(|entry| entry.verdict.is_none()) {
            self.conclude(around, check.0);
        }
    }

    /// Everything is decided that was asked together with this check, and this is its answer after all. What it took
    /// stays taken, or goes back where that is not to allow.
    pub fn settle(&mut self, around: &mut Surroundings<'_>, check: CheckId, answer: Answer) {
        let Some(entry) = self.tables.checks.find(check.0) else { return };
        if let (Some(verdict), true) = (&mut entry.verdict, std::mem::take(&mut entry.is_together)) {
            // What comes late sees this.
            verdict.answer = answer;
            self.settle_parts(around, check.0, answer);
            self.wake_shadows(check.0, answer);
        }
    }

    /// Nobody waits for a check that has no verdict yet: it is decided for itself.
    pub fn abandon(&mut self, check: CheckId) {
        if let Some(entry) = self.tables.checks.find(check.0) {
            entry.is_together = false;
        }
        self.release(check);
    }

    /// The verdict is no longer needed: it was read, or its connection is gone.
    pub fn release(&mut self, check: CheckId) {
        if let Some(entry) = self.tables.checks.find(check.0) {
            entry.is_read = true;
            self.tables.release_check_if_done(check.0);
        }
    }

    /// Tells the breakers what has ended since the last time.
    fn report(&mut self, around: &Surroundings<'_>) {
        for (at, report) in self.reports.iter_mut().enumerate() {
            if report.calls > 0 {
                self.shards.report(ShardId(at as u16), &self.settings.breaker, around.now_ms, std::mem::take(report));
            }
        }
    }

    /// One call for all parts that wait in a group, unless one is in flight.
    fn send(&mut self, around: &mut Surroundings<'_>, calls: &mut impl Calls, handle: Handle) {
        self.tables.hold(handle);
        self.drop_answered(handle);
        let group = &self.tables.groups[handle];
        if !group.is_in_flight && !group.waiting.is_empty() {
            self.take_in_advance(around, handle);
            self.send_waiting(around, calls, handle);
        }
        self.tables.let_go(handle);
    }

    fn send_waiting(&mut self, around: &mut Surroundings<'_>, calls: &mut impl Calls, handle: Handle) {
        let group = &self.tables.groups[handle];
        let (mut sum, mut takers, mut parts, mut next) = (0u64, 0, 0, group.waiting.first());
        while let Some(part) = next {
            let share = group.share(&self.tables.parts[part]);
            sum += u64::from(share);
            takers += usize::from(share > 0);
            parts += 1;
            next = self.tables.parts[part].next_of_group;
        }
        // At most the capacity, which is 32 bits wide.
        let cost = sum.min(u64::from(group.capacity())) as u32;
        let take = if takers > 1 || group.has_batch { TakeMode::UpTo } else { TakeMode::Exactly };
        let shard = calls.shard(group.slot);
        (self.tables.groups[handle].shard, self.tables.groups[handle].parts_of_call) = (shard, parts);
        let group = &self.tables.groups[handle];
        let admission = shard
            .map_or(Admission::Go, |shard| self.shards.breaker(shard).admit(&self.settings.breaker, around.now_ms));
        let sent = match admission {
            Admission::Refused => Err(Why::BreakerOpen),
            Admission::Go | Admission::Probe if shard.is_none() => Err(Why::Down),
            Admission::Go | Admission::Probe => calls.send(handle.pack(), &call_of(group, take, cost)),
        };
        let group = &mut self.tables.groups[handle];
        (group.flying, group.waiting) = (group.waiting, group.flying);
        match sent {
            Ok(()) => (group.is_in_flight, group.is_probe) = (true, admission == Admission::Probe),
            Err(why) => {
                if let (Why::Down, Some(report)) = (why, shard.and_then(|shard| self.reports.get_mut(shard.index()))) {
                    report.calls += 1;
                    report.failures += 1;
                    report.probes_failed += u32::from(admission == Admission::Probe);
                }
                self.fail(around, handle, why);
            }
        }
    }

    /// Takes those out of the line whose check was answered while they waited.
    fn drop_answered(&mut self, handle: Handle) {
        let mut line = std::mem::take(&mut self.tables.groups[handle].waiting);
        let mut kept = tables::List::default();
        while let Some(part) = line.pop(&mut self.tables.parts) {
            let check = self.tables.parts[part].check;
            match check {
                Some(check) if self.tables.checks[check].verdict.is_some() => self.leave(check, part),
                _ => kept.push(&mut self.tables.parts, part),
            }
        }
        self.tables.groups[handle].waiting = kept;
    }

    /// A part of a check that has its verdict is gone.
    fn leave(&mut self, check: Handle, part: Handle) {
        self.tables.checks[check].outstanding -= 1;
        self.tables.release_part(part);
        self.tables.release_check_if_done(check);
    }

    /// Deals out what a call granted, in the order in which the parts came.
    fn deal(&mut self, around: &mut Surroundings<'_>, handle: Handle, replies: &[BucketReply], sent_at_us: u64) {
        let granted = replies.iter().map(|reply| reply.granted).min().unwrap_or(0);
        let mut deal = Deal::new(granted);
        let mut flying = std::mem::take(&mut self.tables.groups[handle].flying);
        let mut batch = None;
        while let Some(part) = flying.pop(&mut self.tables.parts) {
            if self.tables.parts[part].is_batch {
                batch = Some(part);
            } else {
                self.deal_to(around, handle, part, &mut deal, replies);
            }
        }
        let mut left = deal.left();
        if let Some(part) = batch {
            if self.deposit(around, handle, left, &Said { replies, sent_at_us }) {
                left = 0;
            }
            self.tables.release_part(part);
        }
        self.tables.give_back(handle, left);
        // What a lease holds can be spent, whatever the store says.
        if deal.left() == 0 && !self.has_tokens(handle) {
            self.remember(around, handle, replies, sent_at_us);
        }
    }

    /// Remembers which of a group's buckets are empty, or did not hold what was asked.
    fn remember(&self, around: &Surroundings<'_>, handle: Handle, replies: &[BucketReply], sent_at_us: u64) {
        for (bucket, reply) in self.tables.groups[handle].buckets.iter().zip(replies) {
            if reply.remaining == 0 || reply.retry_after_ms > 0 {
                // Rounded up to milliseconds, in which many tokens may come; by what remains it is at most this.
                let reset_us = reply.reset_after_ms.cast_unsigned().saturating_mul(1_000);
                let missing = bucket.rate.capacity.saturating_sub(reply.remaining);
                let full_at_us = sent_at_us.saturating_add(reset_us.min(rejections::fill_us(&bucket.rate, missing)));
                self.shards.hot().rejections.remember(bucket.hot_key, sent_at_us, full_at_us, around.now_us);
            }
        }
    }

    fn deal_to(
        &mut self,
        around: &mut Surroundings<'_>,
        group: Handle,
        part: Handle,
        deal: &mut Deal,
        replies: &[BucketReply],
    ) {
        let Tables { checks, parts, groups, .. } = &mut self.tables;
        let (group, entry) = (&groups[group], &mut parts[part]);
        let (left, cost, takes) = (deal.left(), entry.cost, entry.takes);
        let fits = cost <= group.capacity();
        let policy = policy_of(&self.policies, group.policy);
        let Some(check) = entry.check else {
            // A shadow rule's: one bucket, one count.
            let passes =
                if takes { fits && deal.take(cost) } else { replies[0].remaining.saturating_add(left) >= cost };
            let bucket = &group.buckets[0];
            around.count_shadow(policy, bucket.rule, bucket.local_key, passes);
            self.tables.release_part(part);
            return;
        };
        let asker = &mut checks[check];
        if let Some(verdict) = asker.verdict {
            // Too late. What it was allowed to do meanwhile is paid for; what it was not goes back with the rest.
            if verdict.answer == Answer::Allow {
                deal.take(cost);
            }
            self.leave(check, part);
            return;
        }
        let passes = fits && deal.take(cost);
        entry.state = if passes { PartState::Granted } else { PartState::Denied };
        for (bucket, reply) in group.buckets.iter().zip(replies) {
            around.sampled(asker.is_sampled, bucket, By::Redis, group.call_share());
            let rule = (bucket.rule != NO_RULE).then_some(bucket.rule);
            let said = Verdict { rule, ..reply.verdict(left, cost, passes, &bucket.rate, 0) };
            if let Some(rule) = rule {
                around.counters.decided_by(policy.cards[rule as usize].slot, By::Redis).add(1);
            }
            match said.answer {
                Answer::Allow if passes => asker.allowed = Some(decision::tighter(asker.allowed, said)),
                Answer::Deny => {
                    asker.denied = Some(decision::longer(asker.denied, said));
                    if let Some(rule) = rule {
                        around.count(policy, rule, Reason::Denied);
                    }
                }
                Answer::Allow | Answer::Unavailable => {}
            }
        }
        if !passes && asker.denied.is_none() {
            // Another part of the same wake-up had the last token: the wait is a token's.
            asker.denied =
                asker.allowed.or(Some(UNRULED)).map(|said| Verdict { answer: Answer::Deny, retry_after_ms: 1, ..said });
        }
        asker.outstanding -= 1;
        if asker.outstanding == 0 || !passes {
            self.conclude(around, check);
        }
    }

    /// The call of a group brought nothing.
    fn fail(&mut self, around: &mut Surroundings<'_>, handle: Handle, why: Why) {
        let mut flying = std::mem::take(&mut self.tables.groups[handle].flying);
        while let Some(part) = flying.pop(&mut self.tables.parts) {
            let Some(check) = self.tables.parts[part].check else {
                if self.tables.parts[part].is_batch {
                    self.lose_batch(around, handle);
                } else {
                    around.counters.shadow_unknown.add(1);
                }
                self.tables.release_part(part);
                continue;
            };
            if self.tables.checks[check].verdict.is_some() {
                self.leave(check, part);
                continue;
            }
            self.tables.parts[part].state = PartState::Failed(why);
            self.tables.checks[check].outstanding -= 1;
            if self.tables.checks[check].outstanding == 0 {
                self.conclude(around, check);
            }
        }
    }

    /// Gives a check its verdict, with what is there. What is missing is answered by the failure policies.
    fn conclude(&mut self, around: &mut Surroundings<'_>, check: Handle) {
        let asker = &self.tables.checks[check];
        let (cost, conn, policy) = (asker.cost, asker.conn, policy_of(&self.policies, asker.policy));
        let verdict = asker.denied.or_else(|| {
            let parts = std::iter::successors(asker.parts, |part| self.tables.parts[*part].next_of_check);
            let missing = parts.flat_map(|part| self.missing(part));
            match fallback::answer(around, policy, &self.settings, missing, cost) {
                Some(said) if said.answer == Answer::Allow => Some(decision::tighter(asker.allowed, said)),
                said => said.or(asker.allowed),
            }
        });
        let verdict = verdict.unwrap_or(UNRULED);
        if self.tables.checks[check].is_together {
            self.keep_answered(check);
        } else {
            self.settle_parts(around, check, verdict.answer);
            self.wake_shadows(check, verdict.answer);
        }
        self.tables.checks[check].verdict = Some(verdict);
        self.decided.push(conn);
        self.tables.release_check_if_done(check);
    }

    /// The buckets of a part that the store has not answered.
    fn missing(&self, part: Handle) -> impl Iterator<Item = Missing<'_>> {
        let part = &self.tables.parts[part];
        let why = match part.state {
            PartState::Granted | PartState::Denied => None,
            PartState::Failed(why) => Some(why),
            PartState::Out => Some(Why::Timeout),
        };
        let (group, is_sampled) =
            (&self.tables.groups[part.group], part.check.is_some_and(|check| self.tables.checks[check].is_sampled));
        let calls = if matches!(why, Some(Why::Timeout | Why::Refused)) { group.call_share() } else { 0.0 };
        let epoch = group.shard.map_or(0, |shard| self.shards.breaker(shard).epoch());
        let cost = part.cost;
        why.into_iter().flat_map(move |why| {
            group.buckets.iter().map(move |bucket| Missing { bucket, epoch, why, is_sampled, calls, cost })
        })
    }

    /// A check that is decided together with others keeps the parts that were answered. Those that were not belong to their
    /// groups, which let them go.
    fn keep_answered(&mut self, check: Handle) {
        let mut next = self.tables.checks[check].parts.take();
        let mut kept = None;
        while let Some(part) = next {
            let entry = &mut self.tables.parts[part];
            next = entry.next_of_check;
            if entry.state != PartState::Out {
                entry.next_of_check = kept;
                kept = Some(part);
            }
        }
        self.tables.checks[check].parts = kept;
    }

    /// Lets the parts of a decided check go. What was granted counts, or goes back where the check does not pass.
    fn settle_parts(&mut self, around: &Surroundings<'_>, check: Handle, answer: Answer) {
        let asker = &mut self.tables.checks[check];
        let policy = policy_of(&self.policies, asker.policy);
        let mut next = asker.parts.take();
        while let Some(part) = next {
            let entry = &self.tables.parts[part];
            let (group, cost) = (entry.group, entry.cost);
            next = entry.next_of_check;
            if answer == Answer::Allow {
                around.count_allowed(policy, &self.tables.groups[group].buckets);
            }
            match entry.state {
                // Its group has it in line, or in flight, and lets it go.
                PartState::Out => continue,
                PartState::Granted if answer != Answer::Allow => {
                    let (buckets, hot) = (&self.tables.groups[group], self.shards.hot());
                    if entry.is_leased && hot.leases.put_back(buckets.lease_key, cost) {
                        // It may have been the last one, and its bucket be known to be empty since.
                        buckets.buckets.iter().for_each(|bucket| hot.rejections.forget(bucket.hot_key, around.now_us));
                    } else {
                        self.tables.give_back(group, cost);
                    }
                }
                PartState::Granted | PartState::Denied | PartState::Failed(_) => {}
            }
            self.tables.release_part(part);
        }
    }

    /// The shadow rules see what became of the check, and ask for themselves.
    fn wake_shadows(&mut self, check: Handle, answer: Answer) {
        let mut next = self.tables.checks[check].shadows.take();
        while let Some(part) = next {
            let entry = &mut self.tables.parts[part];
            next = entry.next_of_check.take();
            (entry.check, entry.takes) = (None, answer == Answer::Allow);
            self.tables.queue(part);
        }
    }
}

/// What shadow rules wait for.
#[derive(Clone, Copy)]
enum Behind {
    /// The verdict of a check that waits.
    Check(Handle),
    /// Nothing: this is the answer.
    Answer(Answer),
}

/// Where questions are taken: the store without what has nothing to do with a new one, under the policy in force.
struct Desk<'a> {
    settings: &'a StoreSettings,
    tables: &'a mut Tables,
    arrivals: &'a mut VecDeque<(u64, Handle)>,
    identity: &'a mut Vec<u8>,
    generation: u64,
    policy: &'a LoadedPolicy,
    hot: &'a Hot,
    chance: &'a mut Chance,
    rooms: &'a mut Rooms,
}

/// Rules of a check for which the stack has room.
const FEW: usize = 4;

/// A list for so many: on the stack where they are few, and else in this room, which it takes.
#[inline(always)]
fn list_for<T>(count: usize, room: &mut Vec<T>) -> SmallVec<[T; FEW]> {
    if count <= FEW { SmallVec::new() } else { roomy(room) }
}

#[cold]
fn roomy<T>(room: &mut Vec<T>) -> SmallVec<[T; FEW]> {
    room.reserve(RULES_PER_CHECK_MAX);
    SmallVec::from_vec(std::mem::take(room))
}

/// Gives the room back that a list took.
#[inline(always)]
fn keep_room<T>(list: SmallVec<[T; FEW]>, room: &mut Vec<T>) {
    if list.spilled() {
        *room = list.into_vec();
        room.clear();
    }
}

impl Desk<'_> {
    #[inline]
    fn ask(
        &mut self,
        around: &mut Surroundings<'_>,
        calls: &impl Calls,
        question: Question,
        applied: &[Applied],
        attributes: &Attributes<'_>,
    ) -> Asked {
        let (mut refused, mut exempt): (Option<Verdict>, Option<u32>) = (None, None);
        let (mut shadows, mut rejected) = (false, None);
        let mut wants = list_for(applied.len(), &mut self.rooms.wants[0]);
        for one in applied {
            match (self.policy.cards[one.rule as usize].mode, self.policy.snapshot.grant(*one)) {
                (Mode::Enforce, Grant::Limit(rate)) => {
                    let want = self.want(one, rate, question.cost);
                    rejected = self.rejected(around, question, &want, rejected);
                    wants.push(want);
                }
                (Mode::Enforce, Grant::Deny) => {
                    refused = refused.or(Some(decision::refuse_always(one.rule)));
                    around.count(self.policy, one.rule, Reason::Denied);
                }
                (Mode::Enforce, Grant::Exempt) => {
                    exempt = exempt.or(Some(one.rule));
                    around.count(self.policy, one.rule, Reason::Exempt);
                }
                (Mode::Shadow, Grant::Limit(_)) => shadows = true,
                (Mode::Shadow, Grant::Deny) => around.count_shadow(self.policy, one.rule, one.key, false),
                (Mode::Shadow, Grant::Exempt) => around.count(self.policy, one.rule, Reason::Exempt),
                (Mode::Off, _) => {}
            }
        }
        let write_identity = |policy: &LoadedPolicy, rule: u32, identity: &mut Vec<u8>| {
            policy.snapshot.encode_identity(rule, attributes, identity);
        };
        let asked = match refused.or(rejected) {
            Some(verdict) => Asked::Now(verdict),
            None if wants.is_empty() => Asked::Now(Verdict { rule: exempt, ..UNRULED }),
            None => self.ask_for(around, calls, question, &wants, write_identity),
        };
        keep_room(wants, &mut self.rooms.wants[0]);
        if shadows {
            let behind = match asked {
                Asked::Now(verdict) => Behind::Answer(verdict.answer),
                Asked::Later(CheckId(check)) => Behind::Check(check),
            };
            self.shadows(around, calls, question, applied, attributes, behind);
        }
        asked
    }

    /// What a check wants of a rule's bucket, by how the rule meets hot keys.
    #[inline]
    fn want(&mut self, one: &Applied, rate: &Rate, cost: u32) -> Want {
        let meets = self.policy.meets(one.rule, one.override_index);
        let whole = Want { one: *one, rate: *rate, key: one.key, part: None, cost, one_in: 1, lease: meets.lease };
        match (meets.split, meets.sample) {
            (None, None) => whole,
            (Some(of), _) => {
                let part = self.chance.below(of);
                // Checked with the policy.
                let rate = rate.part(part, of).unwrap_or(*rate);
                Want {
                    rate,
                    key: mix(one.key, u64::from(part) + 1),
                    part: Some((part, of)),
                    lease: Lease::Off,
                    ..whole
                }
            }
            // As many as its cost lets a bucket hold; who only looks, or never fits, asks for itself.
            (None, Some(one_in)) => {
                let one_in = one_in.min(rate.capacity.checked_div(cost).unwrap_or(1)).max(1);
                Want { one_in, cost: cost.saturating_mul(one_in), lease: Lease::Off, ..whole }
            }
        }
    }

    /// Asks the store for a check with these wants, but for what leases pay and what is not sampled.
    fn ask_for(
        &mut self,
        around: &mut Surroundings<'_>,
        calls: &impl Calls,
        question: Question,
        wants: &[Want],
        write_identity: impl Fn(&LoadedPolicy, u32, &mut Vec<u8>),
    ) -> Asked {
        let [mut asked, mut passed] = [1, 2].map(|at| list_for(wants.len(), &mut self.rooms.wants[at]));
        for want in wants {
            // Not sampled: such a rule passes without being asked.
            let is_asked = want.one_in == 1 || self.chance.below(want.one_in) == 0;
            if is_asked { &mut asked } else { &mut passed }.push(*want);
        }
        let mut spent = list_for(wants.len(), &mut self.rooms.spent);
        let outcome = self.ask_or_pass(around, calls, question, (&asked, &passed), &mut spent, write_identity);
        keep_room(spent, &mut self.rooms.spent);
        keep_room(passed, &mut self.rooms.wants[2]);
        keep_room(asked, &mut self.rooms.wants[1]);
        outcome
    }

    /// Asks the store for the first of these wants, but for what leases pay (which becomes `spent`); the others pass.
    fn ask_or_pass(
        &mut self,
        around: &mut Surroundings<'_>,
        calls: &impl Calls,
        question: Question,
        (asked, passed): (&[Want], &[Want]),
        spent: &mut SmallVec<[Option<Spent>; FEW]>,
        write_identity: impl Fn(&LoadedPolicy, u32, &mut Vec<u8>),
    ) -> Asked {
        let mut allowed = None;
        for want in passed {
            around.decided(self.policy, &want.one, By::Sample, question.is_sampled);
            allowed = Some(decision::tighter(allowed, want.passes_unasked(question.cost)));
        }
        if asked.is_empty() {
            passed.iter().for_each(|want| around.count(self.policy, want.one.rule, Reason::Allowed));
            return Asked::Now(allowed.unwrap_or(UNRULED));
        }
        // One part for all rules of an identity, when the first of them comes.
        let is_first = |at: usize| !asked[..at].iter().any(|other| asked[at].shares_call(self.policy, other));
        for at in 0..asked.len() {
            spent.push(is_first(at).then(|| self.spend(&asked[at..], question)).flatten());
        }
        if !question.is_together && (0..asked.len()).all(|at| !is_first(at) || spent[at].is_some()) {
            return self.paid(around, calls, question, asked, spent, (passed, allowed), write_identity);
        }
        let Some(check) = self.begin(question) else {
            self.unspend(asked, spent, 0);
            return self.overloaded(around, question, &self.buckets(asked));
        };
        self.tables.checks[check].allowed = allowed;
        for (at, paid) in spent.iter().enumerate().filter(|(at, _)| is_first(*at)) {
            let group = self.group(calls, &asked[at..], &write_identity);
            let part = group.and_then(|group| self.tables.part(Some(check), group, asked[at].cost));
            let Some(part) = part else {
                self.unspend(asked, spent, at);
                self.unwind(check);
                return self.overloaded(around, question, &self.buckets(asked));
            };
            let entry = &mut self.tables.checks[check];
            self.tables.parts[part].next_of_check = entry.parts.replace(part);
            match paid {
                None => entry.outstanding += 1,
                Some(spent) => {
                    let said = tell(&asked[at..], spent, question.now_us);
                    entry.allowed = Some(decision::tighter(entry.allowed, said));
                    let part = &mut self.tables.parts[part];
                    (part.state, part.is_leased) = (PartState::Granted, true);
                    let group = part.group;
                    self.decided_by_lease(around, &asked[at..], question.is_sampled);
                    self.go_on(group, spent, question.now_us);
                }
            }
        }
        passed.iter().for_each(|want| around.count(self.policy, want.one.rule, Reason::Allowed));
        self.go(check, question)
    }

    /// Puts back what leases have paid for the wants from this one on: the check does not come to be.
    fn unspend(&self, asked: &[Want], spent: &[Option<Spent>], from: usize) {
        for at in (from..asked.len()).filter(|&at| spent[at].is_some()) {
            // Where the lease is closed by now, its tokens are lost.
            self.hot.leases.put_back(self.lease_key(&asked[at..]), asked[at].cost);
        }
    }

    /// All that a check wants was paid from leases, or is not asked for.
    #[allow(clippy::too_many_arguments, reason = "the two halves of `ask_for`")]
    fn paid(
        &mut self,
        around: &mut Surroundings<'_>,
        calls: &impl Calls,
        question: Question,
        asked: &[Want],
        spent: &[Option<Spent>],
        (passed, mut allowed): (&[Want], Option<Verdict>),
        write_identity: impl Fn(&LoadedPolicy, u32, &mut Vec<u8>),
    ) -> Asked {
        for (at, spent) in spent.iter().enumerate() {
            let Some(spent) = spent else { continue };
            allowed = Some(decision::tighter(allowed, tell(&asked[at..], spent, question.now_us)));
            self.decided_by_lease(around, &asked[at..], question.is_sampled);
            if spent.asks {
                match self.group(calls, &asked[at..], &write_identity) {
                    Some(group) => self.go_on(group, spent, question.now_us),
                    None => self.hot.leases.fail(self.lease_key(&asked[at..]), around.now_ms),
                }
            }
        }
        for want in asked.iter().chain(passed) {
            around.count(self.policy, want.one.rule, Reason::Allowed);
        }
        Asked::Now(allowed.unwrap_or(UNRULED))
    }

    fn decided_by_lease(&self, around: &mut Surroundings<'_>, wants: &[Want], is_sampled: bool) {
        for want in members(self.policy, wants) {
            around.decided(self.policy, &want.one, By::Lease, is_sampled);
        }
    }

    /// Pays for the first want, and those that share its call, from their lease.
    #[inline]
    fn spend(&self, wants: &[Want], question: Question) -> Option<Spent> {
        if question.cost == 0 || lease_of(self.policy, wants) == Lease::Off {
            return None;
        }
        self.hot.leases.spend(self.lease_key(wants), wants[0].cost, question.now_us / 1_000)
    }

    /// The key of the lease of the first want and those that share its call: the same on all cores.
    #[inline]
    fn lease_key(&self, wants: &[Want]) -> u64 {
        lease_key(self.policy, members(self.policy, wants).map(Want::bucket_key))
    }

    /// A lease that is low gets its next batch.
    fn go_on(&mut self, group: Handle, spent: &Spent, now_us: u64) {
        if spent.asks {
            begin_batch(self.tables, self.hot, self.settings, group, now_us);
        }
    }

    /// A check of which it is known that all its rules enforce limits of their own, for one identity.
    #[inline]
    fn ask_known(
        &mut self,
        around: &mut Surroundings<'_>,
        calls: &impl Calls,
        question: Question,
        applied: &[Applied],
        write_identity: impl Fn(&mut Vec<u8>),
    ) -> Asked {
        let mut rejected = None;
        let mut wants = list_for(applied.len(), &mut self.rooms.wants[0]);
        for one in applied {
            if let Grant::Limit(rate) = self.policy.snapshot.grant(*one) {
                let want = self.want(one, rate, question.cost);
                rejected = self.rejected(around, question, &want, rejected);
                wants.push(want);
            }
        }
        let asked = match rejected {
            Some(verdict) => Asked::Now(verdict),
            None => self.ask_for_one(around, calls, question, &wants, write_identity),
        };
        keep_room(wants, &mut self.rooms.wants[0]);
        asked
    }

    /// Asks the store for a check with these wants, which are all of one identity and sampled by none, unless a lease pays.
    #[inline]
    fn ask_for_one(
        &mut self,
        around: &mut Surroundings<'_>,
        calls: &impl Calls,
        question: Question,
        wants: &[Want],
        write_identity: impl Fn(&mut Vec<u8>),
    ) -> Asked {
        if let Some(spent) = self.spend(wants, question) {
            let write = |_: &LoadedPolicy, _: u32, identity: &mut Vec<u8>| write_identity(identity);
            return self.paid(around, calls, question, wants, &[Some(spent)], (&[], None), write);
        }
        let group = |desk: &mut Self| desk.group(calls, wants, |_, _, identity| write_identity(identity));
        match self.ask_group(question, group) {
            Some(check) => check,
            None => self.overloaded(around, question, &self.buckets(wants)),
        }
    }

    /// The longest wait of what denied so far and of this rule, if its bucket is known to be empty.
    #[inline]
    fn rejected(
        &self,
        around: &mut Surroundings<'_>,
        question: Question,
        want: &Want,
        so_far: Option<Verdict>,
    ) -> Option<Verdict> {
        let known = self.hot.rejection(want.bucket_key(), &want.rate, want.cost, question.now_us);
        let Some(said) = known else { return so_far };
        around.count(self.policy, want.one.rule, Reason::Denied);
        around.decided(self.policy, &want.one, By::Rejection, question.is_sampled);
        Some(decision::longer(so_far, said.verdict(&want.rate, Some(want.one.rule))))
    }

    fn throttle(
        &mut self,
        around: &mut Surroundings<'_>,
        calls: &impl Calls,
        question: Question,
        throttle: &ThrottleBucket<'_>,
    ) -> Asked {
        let bucket = Bucket {
            key_end: 0,
            rate: throttle.rate,
            limit: LimitWords::new(&throttle.rate),
            rule: NO_RULE,
            override_index: Applied::NO_OVERRIDE,
            local_key: throttle.hash,
            hot_key: hot::bucket_key(throttle.hash, &throttle.rate),
        };
        if let Some(said) = self.hot.rejection(bucket.hot_key, &throttle.rate, question.cost, question.now_us) {
            return Asked::Now(said.verdict(&throttle.rate, None));
        }
        // The limit is the caller's: another one is another group, though the same bucket.
        let limit = u64::from(throttle.rate.capacity) << 32
            ^ u64::from(throttle.rate.refill) << 16
            ^ u64::from(throttle.rate.period_ms);
        let hash = mix(mix(self.generation, throttle.hash), limit);
        let group = |Self { tables, identity, generation, .. }: &mut Self| {
            tables.group(hash, |group| {
                identity.clear();
                identity::encode_key(throttle.key, identity);
                (group.policy, group.slot) = (*generation, calls.slot(identity));
                append_bucket(group, identity, throttle.family, bucket);
            })
        };
        match self.ask_group(question, group) {
            Some(check) => check,
            None => self.overloaded(around, question, &[bucket]),
        }
    }

    /// A check that asks one group. `None` when there is no room.
    #[inline]
    fn ask_group(&mut self, question: Question, group: impl FnOnce(&mut Self) -> Option<Handle>) -> Option<Asked> {
        let check = self.begin(question)?;
        let part = group(self).and_then(|group| self.tables.part(Some(check), group, question.cost));
        let Some(part) = part else {
            self.unwind(check);
            return None;
        };
        let entry = &mut self.tables.checks[check];
        (entry.parts, entry.outstanding) = (Some(part), 1);
        Some(self.go(check, question))
    }

    /// A new check. `None` when as many wait as may.
    fn begin(&mut self, question: Question) -> Option<Handle> {
        let check = self.tables.checks.take()?;
        self.tables.checks[check] = tables::Check {
            conn: question.conn,
            cost: question.cost,
            policy: self.generation,
            is_sampled: question.is_sampled,
            is_together: question.is_together,
            ..tables::Check::default()
        };
        Some(check)
    }

    /// All parts are there: they go in line.
    fn go(&mut self, check: Handle, question: Question) -> Asked {
        let mut next = self.tables.checks[check].parts;
        while let Some(part) = next {
            if !self.tables.parts[part].is_leased {
                self.tables.queue(part);
            }
            next = self.tables.parts[part].next_of_check;
        }
        if self.tables.checks[check].outstanding == 0 {
            // Leases have paid for all of it, so it is decided as soon as anybody looks.
            self.arrivals.push_front((question.now_us, check));
        } else {
            self.arrivals.push_back((question.now_us + self.settings.deadline_us, check));
        }
        Asked::Later(CheckId(check))
    }

    /// There is no room for all parts of a check: those that there are go again.
    fn unwind(&mut self, check: Handle) {
        let mut next = self.tables.checks[check].parts.take();
        while let Some(part) = next {
            let entry = &self.tables.parts[part];
            next = entry.next_of_check;
            if entry.is_leased {
                // Where the lease is closed by now, the token is lost.
                self.hot.leases.put_back(self.tables.groups[entry.group].lease_key, entry.cost);
            }
            self.tables.release_part(part);
        }
        self.tables.checks.give(check);
    }

    /// As many checks wait as may: the failure policies answer.
    #[cold]
    fn overloaded(&self, around: &mut Surroundings<'_>, question: Question, buckets: &[Bucket]) -> Asked {
        let is_sampled = question.is_sampled;
        let (why, cost) = (Why::Overloaded, question.cost);
        let missing = buckets.iter().map(|bucket| Missing { bucket, epoch: 0, why, is_sampled, calls: 0.0, cost });
        let verdict = fallback::answer(around, self.policy, self.settings, missing, question.cost).unwrap_or(UNRULED);
        if verdict.answer == Answer::Allow {
            around.count_allowed(self.policy, buckets);
        }
        Asked::Now(verdict)
    }

    fn buckets(&self, wants: &[Want]) -> SmallVec<[Bucket; 8]> {
        wants.iter().map(|want| want.bucket(self.policy)).collect()
    }

    /// The parts of the shadow rules: dormant behind a check, or on their way at once where the answer is known.
    fn shadows(
        &mut self,
        around: &Surroundings<'_>,
        calls: &impl Calls,
        question: Question,
        applied: &[Applied],
        attributes: &Attributes<'_>,
        behind: Behind,
    ) {
        let check = if let Behind::Check(check) = behind { Some(check) } else { None };
        for one in applied {
            let Grant::Limit(rate) = self.policy.snapshot.grant(*one) else { continue };
            if self.policy.cards[one.rule as usize].mode != Mode::Shadow {
                continue;
            }
            let want = self.want(one, rate, question.cost);
            if self.hot.rejection(want.bucket_key(), &want.rate, want.cost, question.now_us).is_some() {
                around.count_shadow(self.policy, one.rule, one.key, false);
                continue;
            }
            if want.one_in > 1 && self.chance.below(want.one_in) > 0 {
                around.count_shadow(self.policy, one.rule, one.key, true);
                continue;
            }
            let (cost, want) = (want.cost, Want { lease: Lease::Off, ..want });
            let group = self.group(calls, std::slice::from_ref(&want), |policy, rule, identity| {
                policy.snapshot.encode_identity(rule, attributes, identity);
            });
            let Some(part) = group.and_then(|group| self.tables.part(check, group, cost)) else {
                around.counters.shadow_unknown.add(1);
                continue;
            };
            match behind {
                Behind::Check(check) => {
                    self.tables.parts[part].next_of_check = self.tables.checks[check].shadows.replace(part);
                }
                Behind::Answer(answer) => {
                    self.tables.parts[part].takes = answer == Answer::Allow;
                    self.tables.queue(part);
                }
            }
        }
    }

    /// The group of the buckets of the first want, and of those that share its call.
    #[inline]
    fn group(
        &mut self,
        calls: &impl Calls,
        wants: &[Want],
        write_identity: impl Fn(&LoadedPolicy, u32, &mut Vec<u8>),
    ) -> Option<Handle> {
        let (policy, generation) = (self.policy, self.generation);
        let first = wants.first()?;
        let hash = members(policy, wants)
            .fold(generation, |hash, want| mix(hash, want.key ^ u64::from(want.one.override_index)));
        let (lease, identity) = (lease_of(policy, wants), &mut *self.identity);
        self.tables.group(hash, |group| {
            identity.clear();
            write_identity(policy, first.one.rule, identity);
            let slot = match first.part {
                Some((part, of)) => parts::append_part(identity, part, of),
                None => calls.slot(identity),
            };
            (group.policy, group.slot, group.lease) = (generation, slot, lease);
            for want in members(policy, wants) {
                let bucket = want.bucket(policy);
                append_bucket(group, identity, &policy.snapshot.rules()[bucket.rule as usize].name, bucket);
            }
            if lease != Lease::Off {
                group.lease_key = lease_key(policy, group.buckets.iter().map(|bucket| bucket.hot_key));
            }
        })
    }
}

/// What a check wants of one rule's bucket.
#[derive(Clone, Copy)]
struct Want {
    one: Applied,
    /// That of the bucket, which may be a part of a whole.
    rate: Rate,
    /// The bucket's key.
    key: u64,
    /// Which part of a whole it is, and of how many.
    part: Option<(u32, u32)>,
    /// What is asked for where it is asked.
    cost: u32,
    /// One check in so many is asked, for all of them.
    one_in: u32,
    lease: Lease,
}

impl Want {
    /// The key of the bucket and its limit.
    #[inline]
    fn bucket_key(&self) -> u64 {
        hot::bucket_key(self.key, &self.rate)
    }

    /// Whether one call covers both: their identity is one, and so is what they ask for.
    #[inline]
    fn shares_call(&self, policy: &LoadedPolicy, other: &Self) -> bool {
        let group = |want: &Self| policy.cards[want.one.rule as usize].identity_group;
        let is_usual = |want: &Self| want.part.is_none() && want.one_in == 1;
        group(self) == group(other) && is_usual(self) && is_usual(other)
    }

    fn bucket(&self, policy: &LoadedPolicy) -> Bucket {
        let limit = match policy.cards[self.one.rule as usize].limit_words {
            Some(words) if self.one.override_index == Applied::NO_OVERRIDE && self.part.is_none() => words,
            _ => LimitWords::new(&self.rate),
        };
        Bucket {
            key_end: 0,
            rate: self.rate,
            limit,
            rule: self.one.rule,
            override_index: self.one.override_index,
            local_key: self.one.key,
            hot_key: self.bucket_key(),
        }
    }

    /// What a check is told that is not asked: nobody has looked how much there is.
    fn passes_unasked(&self, cost: u32) -> Verdict {
        Verdict {
            answer: Answer::Allow,
            limit: i64::from(self.rate.capacity),
            remaining: i64::from(self.rate.capacity.saturating_sub(cost)),
            retry_after_ms: 0,
            reset_after_ms: 0,
            rule: Some(self.one.rule),
        }
    }
}

/// The first want and those that share its call.
#[inline]
fn members<'w>(policy: &'w LoadedPolicy, wants: &'w [Want]) -> impl Iterator<Item = &'w Want> {
    let (first, rest) = wants.split_at(wants.len().min(1));
    first.iter().chain(rest.iter().filter(|want| first[0].shares_call(policy, want)))
}

/// The key of the lease of buckets that one call covers, under this policy: the same on all cores.
#[inline(always)]
fn lease_key(policy: &LoadedPolicy, bucket_keys: impl IntoIterator<Item = u64>) -> u64 {
    // 0 stands for none.
    bucket_keys.into_iter().fold(policy.policy.version, mix).max(1)
}

/// How the buckets are leased that one call covers: as carefully as the most careful of them.
fn lease_of(policy: &LoadedPolicy, wants: &[Want]) -> Lease {
    let both = |one: Option<Lease>, other: Lease| match (one, other) {
        (None, other) => other,
        (Some(Lease::Off), _) | (_, Lease::Off) => Lease::Off,
        (Some(Lease::Batch(one)), Lease::Batch(other)) => Lease::Batch(one.min(other)),
        (Some(Lease::Batch(tokens)), Lease::Auto) | (Some(Lease::Auto), Lease::Batch(tokens)) => Lease::Batch(tokens),
        (Some(Lease::Auto), Lease::Auto) => Lease::Auto,
    };
    members(policy, wants).fold(None, |so_far, want| Some(both(so_far, want.lease))).unwrap_or(Lease::Off)
}

/// What a check is told that was paid from a lease.
fn tell(wants: &[Want], spent: &Spent, now_us: u64) -> Verdict {
    let told = spent.told;
    // What was put back into a new lease is there before its first batch, which tells whose it is.
    let tightest = wants.iter().find(|want| want.one.rule == told.rule).or(wants.first());
    let capacity = tightest.map_or(0, |want| want.rate.capacity);
    Verdict {
        answer: Answer::Allow,
        limit: i64::from(capacity),
        remaining: i64::from(told.remaining.min(capacity)),
        retry_after_ms: 0,
        reset_after_ms: told.full_at_us.saturating_sub(now_us).div_ceil(1_000).cast_signed(),
        rule: tightest.map(|want| want.one.rule),
    }
}

/// Appends a bucket, and its key: `rl:{<identity>}:<rule>`.
fn append_bucket(group: &mut Group, identity: &[u8], rule: &str, bucket: Bucket) {
    group.keys.extend_from_slice(b"rl:{");
    group.keys.extend_from_slice(identity);
    group.keys.extend_from_slice(b"}:");
    group.keys.extend_from_slice(rule.as_bytes());
    // An identity has at most 128 bytes and a name too, so this is far below 2^32.
    group.buckets.push(Bucket { key_end: group.keys.len() as u32, ..bucket });
}

fn call_of(group: &Group, take: TakeMode, cost: u32) -> Call<'_> {
    Call { slot: group.slot, take, cost, keys: &group.keys, buckets: &group.buckets }
}

/// Four integers for each bucket. `None` where they are not, or cannot be.
fn read_replies(integers: &[i64], buckets: usize, room: &mut Vec<BucketReply>) -> Option<SmallVec<[BucketReply; FEW]>> {
    let (fours, rest) = integers.as_chunks::<4>();
    if fours.len() != buckets || !rest.is_empty() {
        return None;
    }
    let mut replies = list_for(buckets, room);
    for four in fours {
        replies.push(BucketReply::read(*four)?);
    }
    Some(replies)
}

fn policy_of(policies: &VecDeque<(u64, Arc<LoadedPolicy>)>, generation: u64) -> &LoadedPolicy {
    // Nearly always the last.
    let found = policies.iter().rev().find(|(known, _)| *known == generation);
    found.map_or_else(|| unreachable!("the policy of a waiting check is kept"), |(_, policy)| policy)
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests;
