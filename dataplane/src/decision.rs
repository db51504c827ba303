//! The decision: from the rules that apply to a check to one verdict.
//!
//! Plain functions over (snapshot, buckets, time, check). All enforcing rules must pass, and a denied check takes
//! nothing:
//!
//! ```text
//!   probe every enforcing rule's bucket; nothing is written
//!   if one does not hold the cost:  deny, with the longest wait among those that do not
//!   take from each; if another core was faster somewhere, give back what was taken, and deny
//!   then the shadow rules: each takes for itself if the check was allowed, and only looks if it was not
//! ```
//!
//! Nothing is ever over-granted. What two cores can do to each other is a refusal by one token that the other is just
//! giving back; it takes a check with several rules, of which one runs out between two instructions.
//!
//! What a verdict reports: a deny, the rule with the longest wait (so that waiting for it is enough); an allow, the rule
//! with the least remaining, the first in the policy's order among equals.

use policy_sync::{
    model::Mode,
    rate::Rate,
    snapshot::{Applied, Grant, RULES_PER_CHECK_MAX, Snapshot},
};
use smallvec::SmallVec;

use crate::buckets::{BucketTable, Level, Probe, TableCounts, table::Moment};

/// Whether a request may pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It may.
    Allow,
    /// It may not: HTTP 429.
    Deny,
    /// Nobody can say, and the rule says that it then may not: HTTP 503.
    Unavailable,
}

/// The answer to a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// Whether the request may pass.
    pub answer: Answer,
    /// The capacity of the bucket that decided; [`UNLIMITED`] where nothing limits.
    pub limit: i64,
    /// What the bucket holds after the check; [`UNLIMITED`] where nothing limits.
    pub remaining: i64,
    /// 0 for an allow; for a deny the milliseconds until the same check would pass, or [`NEVER`].
    pub retry_after_ms: i64,
    /// Milliseconds until the bucket is full again.
    pub reset_after_ms: i64,
    /// Index of the rule that decided, if any did.
    pub rule: Option<u32>,
}

/// No limit applies.
pub const UNLIMITED: i64 = -1;
/// The check will never pass: its cost exceeds the capacity, or the rule denies everything.
pub const NEVER: i64 = -1;

/// What one rule said of one check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Reason {
    /// An enforcing rule let the check pass.
    Allowed,
    /// An enforcing rule denied the check.
    Denied,
    /// A shadow rule would have let the check pass.
    ShadowAllowed,
    /// A shadow rule would have denied the check.
    ShadowDenied,
    /// The rule applies, but the identity (or the rule) is exempt.
    Exempt,
}

impl Reason {
    /// How many reasons there are.
    pub const COUNT: usize = 5;
    /// All reasons, in the order of their numbers.
    pub const ALL: [Self; Self::COUNT] =
        [Self::Allowed, Self::Denied, Self::ShadowAllowed, Self::ShadowDenied, Self::Exempt];
}

/// Who answered for a rule that the store counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum By {
    /// The store.
    Redis,
    /// What the store has said before: the bucket is still empty.
    Rejection,
    /// Tokens that were taken in advance.
    Lease,
    /// Nobody, for this check: another one is asked for several.
    Sample,
    /// A bucket in this gateway's memory, because the store did not.
    Local,
    /// Nobody: the rule is open on failure.
    Open,
    /// Nobody: the rule is closed on failure.
    Closed,
}

impl By {
    /// How many there are.
    pub const COUNT: usize = 7;
    /// All of them, in the order of their numbers.
    pub const ALL: [Self; Self::COUNT] =
        [Self::Redis, Self::Rejection, Self::Lease, Self::Sample, Self::Local, Self::Open, Self::Closed];

    /// The word for metrics.
    pub fn word(self) -> &'static str {
        match self {
            Self::Redis => "redis",
            Self::Rejection => "rejection",
            Self::Lease => "lease",
            Self::Sample => "sample",
            Self::Local => "local",
            Self::Open => "open",
            Self::Closed => "closed",
        }
    }
}

/// Why the store did not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Why {
    /// No reply by the deadline.
    Timeout,
    /// The shard's breaker is open.
    BreakerOpen,
    /// There is no connection to the shard, or it ended with the call on its way.
    Down,
    /// As much is on its way as may be.
    Overloaded,
    /// The shard answered with an error.
    Refused,
}

impl Why {
    /// How many there are.
    pub const COUNT: usize = 5;
    /// All of them, in the order of their numbers.
    pub const ALL: [Self; Self::COUNT] =
        [Self::Timeout, Self::BreakerOpen, Self::Down, Self::Overloaded, Self::Refused];

    /// The word for metrics.
    pub fn word(self) -> &'static str {
        match self {
            Self::Timeout => "timeout",
            Self::BreakerOpen => "breaker_open",
            Self::Down => "down",
            Self::Overloaded => "overloaded",
            Self::Refused => "refused",
        }
    }
}

/// Where a decision records what each rule said.
pub trait Tally {
    /// Counts one check of the rule with this index.
    fn count(&self, rule: u32, reason: Reason);

    /// Counts one check of a shadow rule, and whether it would have passed.
    fn shadow(&self, one: &Applied, passes: bool);
}

/// What a decision works on: everything outside the check itself.
pub struct Ground<'a, T> {
    /// The policy.
    pub snapshot: &'a Snapshot,
    /// The buckets.
    pub table: &'a BucketTable,
    /// The time.
    pub moment: Moment,
    /// Per-rule counters.
    pub tally: &'a T,
}

/// The verdict where no rule applies.
pub const UNRULED: Verdict = Verdict {
    answer: Answer::Allow,
    limit: UNLIMITED,
    remaining: UNLIMITED,
    retry_after_ms: 0,
    reset_after_ms: 0,
    rule: None,
};

/// Decides a check of `cost` (0 only looks) to which the rules `applied` apply.
#[inline]
pub fn decide<T: Tally>(ground: &Ground<'_, T>, applied: &[Applied], cost: u32, counts: &mut TableCounts) -> Verdict {
    match applied {
        [] => UNRULED,
        [only] => {
            let rule = &ground.snapshot.rules()[only.rule as usize];
            match (rule.mode, ground.snapshot.grant(*only)) {
                (Mode::Enforce, Grant::Limit(rate)) => {
                    let outcome = take(ground.table, only.key, rate, cost, ground.moment, counts);
                    ground.tally.count(only.rule, if outcome.is_ok() { Reason::Allowed } else { Reason::Denied });
                    verdict(outcome, rate, cost, only.rule, ground.moment.now_ms)
                }
                _ => decide_all(ground, applied, cost, counts),
            }
        }
        several => decide_all(ground, several, cost, counts),
    }
}

/// The common case in a hurry: takes `cost` from a bucket that is there and holds it, if nobody interferes.
///
/// `None` where any of that is not so; nothing has happened then, and [`decide`] decides.
#[inline(always)]
pub fn take_one(table: &BucketTable, key: u64, rate: &Rate, cost: u32, now_ms: u64) -> Option<Level> {
    let (take, level) = table.prepare(key, rate, cost, now_ms)?;
    take.commit().then_some(level)
}

/// The same for several buckets: from all of them or from none. Returns the level with the fewest tokens and its place,
/// the first among equals.
#[inline(always)]
pub fn take_several<const N: usize>(
    table: &BucketTable,
    buckets: [(u64, &Rate); N],
    cost: u32,
    now_ms: u64,
) -> Option<(Level, usize)> {
    let (key, rate) = buckets[0];
    let (take, mut tightest) = table.prepare(key, rate, cost, now_ms)?;
    let (mut takes, mut at) = ([take; N], 0);
    for next in 1..N {
        let (key, rate) = buckets[next];
        let (take, level) = table.prepare(key, rate, cost, now_ms)?;
        takes[next] = take;
        if level.tokens < tightest.tokens {
            (tightest, at) = (level, next);
        }
    }
    for next in 0..N {
        if !takes[next].commit() {
            takes[..next].iter().zip(buckets).for_each(|(take, (_, rate))| take.give_back(rate, cost));
            return None;
        }
    }
    Some((tightest, at))
}

/// Checks one bucket by itself: the whole of `CL.THROTTLE` and `THROTTLE`.
#[inline]
pub fn take(
    table: &BucketTable,
    key: u64,
    rate: &Rate,
    cost: u32,
    moment: Moment,
    counts: &mut TableCounts,
) -> Result<Level, Level> {
    let probe = table.probe(key, rate, moment.now_ms);
    if probe.level.tokens < cost {
        Err(probe.level)
    } else if cost == 0 {
        Ok(probe.level)
    } else {
        table.take(probe, rate, cost, moment, counts)
    }
}

/// What became of one bucket, as a verdict.
#[inline]
pub fn verdict(outcome: Result<Level, Level>, rate: &Rate, cost: u32, rule: u32, now_ms: u64) -> Verdict {
    let (answer, level, retry_after_ms) = match outcome {
        Ok(level) => (Answer::Allow, level, 0),
        Err(level) if cost > rate.capacity => (Answer::Deny, level, NEVER),
        Err(level) => (Answer::Deny, level, millis(level.wait_ms(rate, cost, now_ms))),
    };
    Verdict {
        answer,
        limit: i64::from(rate.capacity),
        remaining: i64::from(level.tokens),
        retry_after_ms,
        reset_after_ms: millis(level.wait_ms(rate, rate.capacity, now_ms)),
        rule: Some(rule),
    }
}

/// A wait as the wire carries it; a bucket's longest wait is far below 2^63 ms.
fn millis(wait_ms: u64) -> i64 {
    i64::try_from(wait_ms).unwrap_or(i64::MAX)
}

/// An enforcing rule with its bucket.
struct Stake<'a> {
    applied: Applied,
    rate: &'a Rate,
    probe: Probe<'a>,
}

#[inline(never)]
fn decide_all<T: Tally>(ground: &Ground<'_, T>, applied: &[Applied], cost: u32, counts: &mut TableCounts) -> Verdict {
    let mut stakes: SmallVec<[Stake<'_>; RULES_PER_CHECK_MAX]> = SmallVec::new();
    let mut denied: Option<Verdict> = None;
    let mut exempt: Option<u32> = None;
    let mut shadows = false;
    for one in applied {
        let rule = &ground.snapshot.rules()[one.rule as usize];
        match (rule.mode, ground.snapshot.grant(*one)) {
            (Mode::Shadow, _) => shadows = true,
            (Mode::Enforce, Grant::Limit(rate)) => {
                let probe = ground.table.probe(one.key, rate, ground.moment.now_ms);
                if probe.level.tokens < cost {
                    let refusal = verdict(Err(probe.level), rate, cost, one.rule, ground.moment.now_ms);
                    denied = Some(longer(denied, refusal));
                    ground.tally.count(one.rule, Reason::Denied);
                } else {
                    stakes.push(Stake { applied: *one, rate, probe });
                }
            }
            (Mode::Enforce, Grant::Deny) => {
                denied = Some(longer(denied, refuse_always(one.rule)));
                ground.tally.count(one.rule, Reason::Denied);
            }
            (Mode::Enforce, Grant::Exempt) => {
                exempt = exempt.or(Some(one.rule));
                ground.tally.count(one.rule, Reason::Exempt);
            }
            // The snapshot never finds a rule that is off.
            (Mode::Off, _) => {}
        }
    }
    let verdict = match denied {
        Some(refusal) => refusal,
        None => take_all(ground, &stakes, cost, counts).unwrap_or(Verdict { rule: exempt, ..UNRULED }),
    };
    if shadows {
        observe(ground, applied, cost, verdict.answer, counts);
    }
    verdict
}

/// Takes from every stake, or from none. `None` where there is no stake.
#[inline]
fn take_all<T: Tally>(
    ground: &Ground<'_, T>,
    stakes: &[Stake<'_>],
    cost: u32,
    counts: &mut TableCounts,
) -> Option<Verdict> {
    let now_ms = ground.moment.now_ms;
    let mut tightest: Option<(Level, &Stake<'_>)> = None;
    for (at, stake) in stakes.iter().enumerate() {
        let outcome = if cost == 0 {
            Ok(stake.probe.level)
        } else {
            ground.table.take(stake.probe, stake.rate, cost, ground.moment, counts)
        };
        match outcome {
            Ok(level) if tightest.is_none_or(|(least, _)| level.tokens < least.tokens) => {
                tightest = Some((level, stake));
            }
            Ok(_) => {}
            Err(_) => {
                for undo in &stakes[..at] {
                    ground.table.give_back(undo.applied.key, undo.rate, cost, ground.moment, counts);
                }
                ground.tally.count(stake.applied.rule, Reason::Denied);
                return Some(verdict(outcome, stake.rate, cost, stake.applied.rule, now_ms));
            }
        }
    }
    for stake in stakes {
        ground.tally.count(stake.applied.rule, Reason::Allowed);
    }
    tightest.map(|(level, stake)| verdict(Ok(level), stake.rate, cost, stake.applied.rule, now_ms))
}

/// Evaluates the shadow rules behind the verdict: each for itself, never touching it.
#[inline(never)]
fn observe<T: Tally>(ground: &Ground<'_, T>, applied: &[Applied], cost: u32, answer: Answer, counts: &mut TableCounts) {
    for one in applied {
        if ground.snapshot.rules()[one.rule as usize].mode != Mode::Shadow {
            continue;
        }
        let passes = match ground.snapshot.grant(*one) {
            Grant::Limit(rate) if answer == Answer::Allow => {
                take(ground.table, one.key, rate, cost, ground.moment, counts).is_ok()
            }
            Grant::Limit(rate) => ground.table.probe(one.key, rate, ground.moment.now_ms).level.tokens >= cost,
            Grant::Deny => false,
            Grant::Exempt => {
                ground.tally.count(one.rule, Reason::Exempt);
                continue;
            }
        };
        ground.tally.shadow(one, passes);
    }
}

/// Of two allows the one with less remaining; the first among equals. What nothing limits is never the tighter one.
pub fn tighter(allowed: Option<Verdict>, other: Verdict) -> Verdict {
    let room = |verdict: &Verdict| {
        if verdict.remaining == UNLIMITED { i64::MAX } else { verdict.remaining }
    };
    match allowed {
        Some(allowed) if room(&allowed) <= room(&other) => allowed,
        _ => other,
    }
}

/// Of two refusals the one with the longer wait; the first among equals.
pub fn longer(refused: Option<Verdict>, other: Verdict) -> Verdict {
    let wait = |verdict: &Verdict| {
        if verdict.retry_after_ms == NEVER { i64::MAX } else { verdict.retry_after_ms }
    };
    match refused {
        Some(refusal) if wait(&refusal) >= wait(&other) => refusal,
        _ => other,
    }
}

/// The refusal by a rule that grants nothing.
pub fn refuse_always(rule: u32) -> Verdict {
    Verdict {
        answer: Answer::Deny,
        limit: 0,
        remaining: 0,
        retry_after_ms: NEVER,
        reset_after_ms: NEVER,
        rule: Some(rule),
    }
}
