//! What must always hold, checked at each step: the ledger knows every verdict and every token that moved.
//!
//! For each bucket of a rule:
//!
//! * **never over**: what was admitted since the beginning is at most the capacity, what has refilled by the shards' own
//!   clocks, what a shard has forgotten (lost writes), and what the failure policies may add;
//! * **never over in between**, where the shards are healthy and nothing is taken in advance: the same for every interval,
//!   give or take what a check may wait;
//! * **no wrong reject**, in the same case: a check is denied only if its bucket did not hold its cost at some moment of
//!   the check's life, or a few milliseconds before. What *another* gateway gives back, a gateway that has heard that the
//!   bucket is empty learns of when the wait is over, so such buckets are left out until then;
//! * **nothing out of nothing**: no gateway gives back more of a bucket than it has taken.
//!
//! And for each check: one verdict, in order, that makes sense, within its deadline.

use std::{
    collections::{HashMap, VecDeque},
    fmt,
};

use policy_sync::model::Limit;

use crate::{bucket::Take, redis::Moved};

/// What does not hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// When, in microseconds of the world's time.
    pub at_us: u64,
    /// What.
    pub what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at {} µs: {}", self.at_us, self.what)
    }
}

/// How exact a rule is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exactness {
    /// At every moment; see the module.
    Exact,
    /// Never over since the beginning; in between, what was taken in advance may be spent later. It may reject early.
    NeverOver,
    /// Only roughly: nothing is checked but that verdicts make sense.
    Roughly,
}

/// What answers where the store does not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnFailure {
    /// The check passes.
    Open,
    /// The check is unavailable.
    Closed,
    /// A bucket in each gateway's memory, with this limit.
    Local(Limit),
}

/// What a ledger must know of a rule.
#[derive(Clone, Debug)]
pub struct RuleFacts {
    /// Its name.
    pub name: String,
    /// The attribute that is the identity.
    pub attribute: &'static str,
    /// Its limit.
    pub limit: Limit,
    /// What answers without the store.
    pub on_failure: OnFailure,
    /// Its buckets are split, and their parts anywhere.
    pub is_split: bool,
    /// How exact it is.
    pub exactness: Exactness,
}

/// Whose bucket: a rule by its number, and the identity's value.
pub type BucketId = (usize, u32);

/// What the world is like at the moment: what a bucket may have got beside its own tokens.
#[derive(Clone, Copy, Debug)]
pub struct Circumstances {
    /// The time, in microseconds.
    pub now_us: u64,
    /// Milliseconds that have passed on the clocks of the bucket's shard, steps included.
    pub refilled_ms: u64,
    /// How often a gateway's bucket in memory may have been full, all gateways together; 0 where none was needed.
    pub local_fillings: u64,
    /// For how many gateways there are buckets in memory that refill.
    pub local_gateways: u64,
    /// The most that checks of the rule cost which were let through without any bucket.
    pub opened: u64,
    /// No fault has happened so far.
    pub is_healthy: bool,
}

/// What was said to one check.
#[derive(Clone, Copy, Debug)]
pub struct Verdict {
    /// 1, 0 or −1.
    pub allowed: i64,
    /// When it arrived.
    pub arrived_us: u64,
    /// What it cost.
    pub cost: u64,
    /// Which gateway's life said it.
    pub life: u64,
}

/// How long after a bucket has refilled a check may still be denied: waits are rounded up to milliseconds, twice.
const LATE_US: u64 = 2_500;

struct Bucket {
    admitted: u64,
    /// Tokens that a shard has forgotten that it had given.
    forgotten: u64,
    /// For every interval: units of 1/period of a token that may still be admitted, and as of when.
    units: i128,
    as_of_us: u64,
    /// What the bucket held after each call of the last moments, and when: whole tokens.
    recent: VecDeque<(u64, u64)>,
    /// By gateway's life: when it last gave something back.
    backs: HashMap<u64, u64>,
}

/// All of it.
pub struct Ledger {
    rules: Vec<RuleFacts>,
    buckets: HashMap<BucketId, Bucket>,
    /// What a gateway's life has taken and given back, by bucket.
    taken: HashMap<(u64, BucketId), (u64, u64)>,
    /// A check's verdict may come so late, in microseconds, and is still within its deadline.
    pub deadline_us: u64,
}

impl Ledger {
    /// An empty one.
    pub fn new(rules: Vec<RuleFacts>, deadline_us: u64) -> Self {
        Self { rules, buckets: HashMap::new(), taken: HashMap::new(), deadline_us }
    }

    /// The rules.
    pub fn rules(&self) -> &[RuleFacts] {
        &self.rules
    }

    /// What was admitted of a bucket so far.
    pub fn admitted(&self, bucket: BucketId) -> u64 {
        self.buckets.get(&bucket).map_or(0, |bucket| bucket.admitted)
    }

    fn bucket(&mut self, id: BucketId) -> &mut Bucket {
        let (limit, deadline_us) = (self.rules[id.0].limit, self.deadline_us);
        self.buckets.entry(id).or_insert_with(|| Bucket {
            admitted: 0,
            forgotten: 0,
            units: most_units(limit, deadline_us),
            as_of_us: 0,
            recent: VecDeque::new(),
            backs: HashMap::new(),
        })
    }

    /// A shard has moved tokens of a bucket, for a gateway's life.
    ///
    /// # Errors
    ///
    /// When more is given back than was taken.
    pub fn moved(&mut self, now_us: u64, life: u64, id: BucketId, moved: &Moved) -> Result<(), Violation> {
        let (taken, back) = self.taken.entry((life, id)).or_default();
        match moved.take {
            Take::Back => *back += moved.cost,
            _ => *taken += moved.answer.granted.unsigned_abs(),
        }
        if back > taken {
            let what = format!("{}: {back} given back of {taken} that the gateway has taken", moved.key);
            return Err(Violation { at_us: now_us, what });
        }
        let bucket = self.bucket(id);
        if moved.take == Take::Back {
            bucket.backs.insert(life, now_us);
        }
        let recent = &mut bucket.recent;
        recent.push_back((now_us, moved.answer.remaining.unsigned_abs()));
        while recent.len() > 2 && recent[1].0 + 50_000 < now_us {
            recent.pop_front();
        }
        Ok(())
    }

    /// A shard has forgotten that it gave these tokens.
    pub fn forgot(&mut self, id: BucketId, tokens: u64) {
        self.bucket(id).forgotten += tokens;
    }

    /// A check was told its verdict, which concerns these buckets of rules that apply to it.
    ///
    /// # Errors
    ///
    /// What does not hold any more.
    pub fn said(&mut self, verdict: Verdict, buckets: &[BucketId], around: &[Circumstances]) -> Result<(), Violation> {
        let Some(first) = around.first() else { return Ok(()) };
        let latency_us = first.now_us - verdict.arrived_us;
        if latency_us > self.deadline_us {
            let what = format!("a check had its verdict after {latency_us} µs");
            return Err(Violation { at_us: first.now_us, what });
        }
        if verdict.allowed == 1 {
            for (&id, around) in buckets.iter().zip(around) {
                self.admit(id, verdict.cost, around)?;
            }
        } else if verdict.allowed == 0 && around.iter().all(|around| around.is_healthy) {
            self.check_deny(verdict, buckets, first.now_us)?;
        }
        Ok(())
    }

    fn admit(&mut self, id: BucketId, cost: u64, around: &Circumstances) -> Result<(), Violation> {
        let rule = self.rules[id.0].clone();
        let deadline_us = self.deadline_us;
        let bucket = self.bucket(id);
        bucket.admitted += cost;
        if rule.exactness == Exactness::Roughly {
            return Ok(());
        }
        let refilled = |limit: Limit, ms: u64| ms.saturating_mul(limit.refill) / limit.period_ms;
        let local = match rule.on_failure {
            OnFailure::Local(local) => {
                let refills = refilled(local, around.now_us / 1_000) + 1;
                around.local_fillings * local.capacity + around.local_gateways * refills
            }
            OnFailure::Open | OnFailure::Closed => 0,
        };
        let most = rule.limit.capacity + refilled(rule.limit, around.refilled_ms) + bucket.forgotten + local;
        let most = most.saturating_add(around.opened);
        let over = |over: String| Violation { at_us: around.now_us, what: format!("{} {}: {over}", rule.name, id.1) };
        if bucket.admitted > most {
            let forgotten = bucket.forgotten;
            return Err(over(format!(
                "{} admitted, at most {most} ({forgotten} forgotten, {local} local, {} opened)",
                bucket.admitted, around.opened
            )));
        }
        if rule.exactness == Exactness::Exact && around.is_healthy {
            let elapsed = i128::from(around.now_us - bucket.as_of_us) * i128::from(rule.limit.refill);
            bucket.units = (bucket.units + elapsed).min(most_units(rule.limit, deadline_us));
            bucket.as_of_us = around.now_us;
            bucket.units -= i128::from(cost) * i128::from(rule.limit.period_ms) * 1_000;
            if bucket.units < 0 {
                return Err(over("more than its limit was admitted within an interval".into()));
            }
        }
        Ok(())
    }

    /// A check must have had a reason to be denied: a bucket that did not hold its cost.
    fn check_deny(&self, verdict: Verdict, buckets: &[BucketId], now_us: u64) -> Result<(), Violation> {
        let from_us = verdict.arrived_us.saturating_sub(LATE_US);
        let mut why = String::new();
        for &id in buckets {
            let rule = &self.rules[id.0];
            if rule.exactness != Exactness::Exact {
                return Ok(());
            }
            let Some(bucket) = self.buckets.get(&id) else { continue };
            let limit = rule.limit;
            let fill_us = 1_000 * limit.capacity * limit.period_ms / limit.refill;
            let is_foreign = |(life, at_us): (&u64, &u64)| *life != verdict.life && at_us + fill_us >= from_us;
            if bucket.backs.iter().any(is_foreign) {
                return Ok(());
            }
            let level = |&(at_us, tokens): &(u64, u64)| {
                // By the shard's clock, which shows whole milliseconds.
                let ms = (from_us / 1_000).saturating_sub(at_us / 1_000);
                (tokens + ms.saturating_mul(limit.refill) / limit.period_ms).min(limit.capacity)
            };
            let before = bucket.recent.iter().rev().find(|(at_us, _)| *at_us <= from_us).map(level);
            let since = bucket.recent.iter().filter(|(at_us, _)| *at_us > from_us).map(|(_, tokens)| *tokens);
            if before.into_iter().chain(since).any(|tokens| tokens < verdict.cost) {
                return Ok(());
            }
            why += &format!("; {} {}: {before:?}, then {:?}", rule.name, id.1, bucket.recent);
        }
        let what = format!("a check of cost {} was denied that every bucket held{why}", verdict.cost);
        Err(Violation { at_us: now_us, what })
    }
}

/// What may be admitted at once: the capacity, and what refills while a check waits.
fn most_units(limit: Limit, wait_us: u64) -> i128 {
    i128::from(limit.capacity) * i128::from(limit.period_ms) * 1_000
        + i128::from(wait_us + 1_000) * i128::from(limit.refill)
}
