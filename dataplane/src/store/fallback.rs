//! What answers when the store does not: each rule's failure policy.
//!
//! * `open`: the rule lets the check pass.
//! * `closed`: the check is answered *unavailable* (503).
//! * `local`: a token bucket in this gateway's memory decides, of the size that the rule's `local` or the setting
//!   `redis.local_share` gives it. It is keyed by the breaker's epoch, so it is gone when the breaker closes, and it is
//!   full again when it was idle for `redis.local_idle_ms`.
//!
//! All rules must pass here too: a local bucket that denies gives back what the others took. Where one rule denies and
//! another is closed, the check is denied: it would not have passed in any case.

use policy_sync::{model::OnFailure, rate::Rate, snapshot::RULES_PER_CHECK_MAX};
use smallvec::SmallVec;

use super::{Bucket, NO_RULE, StoreSettings, Surroundings};
use crate::{
    buckets::table::Moment,
    decision::{self, Answer, By, Reason, UNLIMITED, Verdict, Why},
    policy::LoadedPolicy,
};

/// A bucket that the store did not answer for.
pub(super) struct Missing<'a> {
    pub(super) bucket: &'a Bucket,
    /// That of its shard's breaker.
    pub(super) epoch: u16,
    pub(super) why: Why,
    /// Heat looks at its check.
    pub(super) is_sampled: bool,
    /// How much of a call it took all the same.
    pub(super) calls: f32,
    /// What was asked of it: more than the check's cost where one check is asked for several.
    pub(super) cost: u32,
}

/// Answers for all that is missing of a check, so that what is taken here is taken from all or from none. `None` where
/// nothing is missing.
pub(super) fn answer<'a>(
    around: &mut Surroundings<'_>,
    policy: &LoadedPolicy,
    settings: &StoreSettings,
    missing: impl IntoIterator<Item = Missing<'a>>,
    cost: u32,
) -> Option<Verdict> {
    let mut taken: SmallVec<[(u64, Rate, u32); RULES_PER_CHECK_MAX]> = SmallVec::new();
    let (mut allowed, mut denied, mut closed): (Option<Verdict>, Option<Verdict>, Option<Verdict>) = (None, None, None);
    for Missing { bucket, epoch, why, is_sampled, calls, cost: asked } in missing {
        let (on_failure, local) = terms(policy, settings, bucket);
        let by = match on_failure {
            OnFailure::Open => By::Open,
            OnFailure::Closed => By::Closed,
            OnFailure::Local => By::Local,
        };
        count(around, policy, bucket, by, why);
        around.sampled(is_sampled, bucket, by, calls);
        let rule = (bucket.rule != NO_RULE).then_some(bucket.rule);
        match on_failure {
            OnFailure::Open => {
                allowed = allowed.or(Some(unmeasured(Answer::Allow, bucket, rule)));
            }
            OnFailure::Closed => {
                closed = closed.or(Some(unmeasured(Answer::Unavailable, bucket, rule)));
            }
            OnFailure::Local => {
                let key = local_key(bucket.local_key, epoch);
                let moment = Moment { now_ms: around.now_ms, fill_ms_max: settings.local.idle_ms };
                // A bucket in memory may be too small for what is asked for several checks: then all it has.
                let cost = cost.max(asked.min(local.capacity));
                let outcome = decision::take(around.table, key, &local, cost, moment, around.table_counts);
                if outcome.is_ok() && cost > 0 {
                    taken.push((key, local, cost));
                }
                let verdict = Verdict { rule, ..decision::verdict(outcome, &local, cost, 0, around.now_ms) };
                if outcome.is_ok() {
                    allowed = Some(decision::tighter(allowed, verdict));
                } else {
                    denied = Some(decision::longer(denied, verdict));
                    if let Some(rule) = rule {
                        around.count(policy, rule, Reason::Denied);
                    }
                }
            }
        }
    }
    let verdict = denied.or(closed).or(allowed)?;
    if verdict.answer != Answer::Allow {
        let moment = Moment { now_ms: around.now_ms, fill_ms_max: settings.local.idle_ms };
        for (key, rate, cost) in taken {
            around.table.give_back(key, &rate, cost, moment, around.table_counts);
        }
    }
    Some(verdict)
}

/// What holds for a bucket while the store does not answer: the failure policy, and the rate of its stand-in in memory.
fn terms(policy: &LoadedPolicy, settings: &StoreSettings, bucket: &Bucket) -> (OnFailure, Rate) {
    if bucket.rule == NO_RULE {
        return (settings.throttle_on_failure, settings.local.rate(&bucket.rate));
    }
    (policy.cards[bucket.rule as usize].on_failure, *policy.local_rate(bucket.rule, bucket.override_index))
}

fn local_key(key: u64, epoch: u16) -> u64 {
    key ^ (u64::from(epoch) + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

/// A verdict that no bucket stands behind.
fn unmeasured(answer: Answer, bucket: &Bucket, rule: Option<u32>) -> Verdict {
    Verdict {
        answer,
        limit: i64::from(bucket.rate.capacity),
        remaining: UNLIMITED,
        retry_after_ms: 0,
        reset_after_ms: 0,
        rule,
    }
}

fn count(around: &Surroundings<'_>, policy: &LoadedPolicy, bucket: &Bucket, by: By, why: Why) {
    if bucket.rule == NO_RULE {
        around.counters.throttle_fallbacks.add(1);
    } else {
        let slot = policy.cards[bucket.rule as usize].slot;
        around.counters.decided_by(slot, by).add(1);
        around.counters.fallback(slot, why).add(1);
    }
}
