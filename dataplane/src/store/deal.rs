//! From what the script said of a group's buckets to what each check gets of it.
//!
//! One check alone is asked *exactly*: it gets its cost or nothing. Several are asked as one, *up to* the sum of their
//! costs, and the grant is dealt out in the order in which they came: each that fits what is left passes. What is then left
//! over goes back. So coalescing grants no more than separate calls would have, and refuses nobody that the
//! script, asked one by one in this order, would have let pass.

use policy_sync::rate::Rate;

use crate::decision::{Answer, NEVER, Verdict};

/// What the script says of one bucket; four integers on the wire.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct BucketReply {
    /// What was taken.
    pub(super) granted: u32,
    /// Whole tokens after that.
    pub(super) remaining: u32,
    /// 0 where the bucket holds the cost; else until it does, in milliseconds; -1 for never.
    pub(super) retry_after_ms: i64,
    /// Until the bucket is full, in milliseconds.
    pub(super) reset_after_ms: i64,
}

impl BucketReply {
    /// `None` for integers that the script cannot have returned.
    pub(super) fn read(integers: [i64; 4]) -> Option<Self> {
        let [granted, remaining, retry_after_ms, reset_after_ms] = integers;
        let (Ok(granted), Ok(remaining)) = (u32::try_from(granted), u32::try_from(remaining)) else { return None };
        (retry_after_ms >= NEVER && reset_after_ms >= 0).then_some(Self {
            granted,
            remaining,
            retry_after_ms,
            reset_after_ms,
        })
    }

    /// What the bucket says of a check of `cost` that finds `more` tokens beside what remains, and takes them if `takes`.
    pub(super) fn verdict(&self, more: u32, cost: u32, takes: bool, rate: &Rate, rule: u32) -> Verdict {
        let level = self.remaining.saturating_add(more).min(rate.capacity);
        let (answer, retry_after_ms, taken) = match cost {
            _ if level >= cost => (Answer::Allow, 0, if takes { cost } else { 0 }),
            _ if cost > rate.capacity => (Answer::Deny, NEVER, 0),
            // At least a moment: it does not hold the cost now.
            _ => (Answer::Deny, self.until(cost, more, rate).max(1), 0),
        };
        Verdict {
            answer,
            limit: i64::from(rate.capacity),
            remaining: i64::from(level - taken),
            retry_after_ms,
            reset_after_ms: self.until(rate.capacity, more.saturating_sub(taken), rate),
            rule: Some(rule),
        }
    }

    /// Milliseconds until the bucket, with `more` tokens in it, holds `tokens`. Worked out back from the time to full,
    /// which knows the fraction of a token; rounded so that waiting for it is enough.
    fn until(&self, tokens: u32, more: u32, rate: &Rate) -> i64 {
        let time_of = |tokens: u32| {
            let ms = u128::from(tokens) * u128::from(rate.period_ms) / u128::from(rate.refill);
            i64::try_from(ms).unwrap_or(i64::MAX)
        };
        (self.reset_after_ms - time_of(rate.capacity - tokens)).saturating_sub(time_of(more)).max(0)
    }
}

/// Deals a grant out.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deal {
    /// What is left of the grant.
    left: u32,
}

impl Deal {
    pub(super) fn new(granted: u32) -> Self {
        Self { left: granted }
    }

    /// What is left of the grant; at the end it goes back.
    pub(super) fn left(self) -> u32 {
        self.left
    }

    /// Whether a check of this cost passes, and takes its share if so.
    pub(super) fn take(&mut self, cost: u32) -> bool {
        match self.left.checked_sub(cost) {
            Some(left) => {
                self.left = left;
                true
            }
            None => false,
        }
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use policy_sync::model::Limit;

    use super::*;

    fn rate(capacity: u64, refill: u64, period_ms: u64) -> Rate {
        Rate::new(Limit { capacity, refill, period_ms }).unwrap()
    }

    #[test]
    fn a_grant_is_dealt_in_order_and_the_rest_is_left() {
        let mut deal = Deal::new(5);
        assert_eq!(
            [deal.take(2), deal.take(4), deal.take(2), deal.take(0), deal.take(2)],
            [true, false, true, true, false]
        );
        assert_eq!(deal.left(), 1);
    }

    #[test]
    fn integers_that_no_script_returns_are_refused() {
        assert!(BucketReply::read([1, 9, 0, 100]).is_some());
        for wrong in [[-1, 0, 0, 0], [0, -1, 0, 0], [0, 0, -2, 0], [0, 0, 0, -1], [1 << 40, 0, 0, 0]] {
            assert_eq!(BucketReply::read(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn the_wait_of_one_check_follows_from_the_time_to_full() {
        // 10 a minute: a token each 6 s. 2 whole tokens and half of one: full in 7.5 tokens' time.
        let bucket = BucketReply { granted: 0, remaining: 2, retry_after_ms: 3_000, reset_after_ms: 45_000 };
        let verdict = bucket.verdict(0, 3, true, &rate(10, 10, 60_000), 0);
        assert_eq!((verdict.answer, verdict.remaining, verdict.retry_after_ms), (Answer::Deny, 2, 3_000));
        // With one token of the grant left over it waits for half a token less.
        let verdict = bucket.verdict(1, 4, true, &rate(10, 10, 60_000), 0);
        assert_eq!((verdict.remaining, verdict.retry_after_ms, verdict.reset_after_ms), (3, 3_000, 39_000));
        let never = bucket.verdict(0, 11, true, &rate(10, 10, 60_000), 0);
        assert_eq!((never.answer, never.retry_after_ms), (Answer::Deny, NEVER));
    }

    #[test]
    fn those_dealt_first_saw_a_fuller_bucket() {
        // Three of cost 1 were granted, 7 of 10 remain: the first found 10 and left 9.
        let bucket = BucketReply { granted: 3, remaining: 7, retry_after_ms: 0, reset_after_ms: 18_000 };
        let seen: Vec<_> = [3, 2, 1]
            .map(|more| bucket.verdict(more, 1, true, &rate(10, 10, 60_000), 0))
            .map(|verdict| (verdict.remaining, verdict.reset_after_ms))
            .into();
        assert_eq!(seen, [(9, 6_000), (8, 12_000), (7, 18_000)]);
    }

    #[test]
    fn who_only_looks_leaves_what_is_there() {
        let bucket = BucketReply { granted: 0, remaining: 7, retry_after_ms: 0, reset_after_ms: 18_000 };
        let verdict = bucket.verdict(0, 5, false, &rate(10, 10, 60_000), 0);
        assert_eq!((verdict.answer, verdict.remaining, verdict.reset_after_ms), (Answer::Allow, 7, 18_000));
    }
}
