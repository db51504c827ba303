//! `lua/token_bucket.lua` as an exact model: levels in whole units of 1/period of a token, in integers that hold anything.
//!
//! That the model is the script is shown against a real Redis, in `tests/tests/token_bucket.rs`.

use std::collections::HashMap;

use policy_sync::model::Limit;

/// Waits are reported up to this, in milliseconds.
pub const WAIT_MS_MAX: u128 = 1 << 52;

/// How a call takes from its buckets; see the script.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Take {
    /// All or nothing over all buckets.
    Exact,
    /// All or nothing, every bucket for itself.
    Each,
    /// What every bucket can give, up to the cost.
    UpTo,
    /// Gives back.
    Back,
}

impl Take {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Exact, Self::Each, Self::UpTo, Self::Back];

    /// As the script is told.
    pub fn word(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Each => "each",
            Self::UpTo => "upto",
            Self::Back => "back",
        }
    }

    /// The reverse.
    pub fn of_word(word: &[u8]) -> Option<Self> {
        Self::ALL.into_iter().find(|take| take.word().as_bytes() == word)
    }
}

/// What is said of one bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// What was taken, or went back.
    pub granted: i64,
    /// Whole tokens that it holds now.
    pub remaining: i64,
    /// When it holds the cost, in milliseconds from now; 0 where it did, −1 where it never will.
    pub retry_ms: i64,
    /// When it is full.
    pub reset_ms: i64,
}

/// A bucket's part of a call: key, limit, cost.
pub type Part<'a> = (&'a str, Limit, u64);

/// One bucket.
#[derive(Clone, Copy, Debug)]
struct Bucket {
    limit: Limit,
    /// Units of 1/period of a token.
    units: u128,
    at_ms: u64,
    expires_ms: u64,
}

/// The buckets of one Redis.
#[derive(Clone, Debug, Default)]
pub struct Buckets {
    by_key: HashMap<String, Bucket>,
}

fn full(limit: Limit) -> u128 {
    u128::from(limit.capacity) * u128::from(limit.period_ms)
}

impl Buckets {
    /// What a bucket holds now in units of the limit's period, and whether it must be written anyway.
    fn level(&mut self, now_ms: u64, key: &str, limit: Limit) -> (u128, bool) {
        if self.by_key.get(key).is_some_and(|bucket| bucket.expires_ms < now_ms) {
            self.by_key.remove(key);
        }
        let Some(bucket) = self.by_key.get(key) else { return (full(limit), false) };
        let elapsed_ms = u128::from(now_ms.saturating_sub(bucket.at_ms));
        let units = (bucket.units + elapsed_ms * u128::from(bucket.limit.refill)).min(full(bucket.limit));
        // Whole tokens stay, the fraction is rounded down.
        let (old, new) = (u128::from(bucket.limit.period_ms), u128::from(limit.period_ms));
        let units = units / old * new + units % old * new / old;
        (units.min(full(limit)), bucket.limit != limit || now_ms < bucket.at_ms)
    }

    /// Whole tokens that a bucket holds.
    pub fn tokens(&mut self, now_ms: u64, key: &str, limit: Limit) -> u64 {
        let whole = self.level(now_ms, key, limit).0 / u128::from(limit.period_ms);
        u64::try_from(whole).unwrap_or(u64::MAX)
    }

    /// Carries out a call.
    pub fn call(&mut self, now_ms: u64, take: Take, parts: &[Part<'_>]) -> Vec<Answer> {
        let levels: Vec<_> = parts.iter().map(|(key, limit, _)| self.level(now_ms, key, *limit)).collect();
        let holds: Vec<u128> =
            levels.iter().zip(parts).map(|(level, part)| level.0 / u128::from(part.1.period_ms)).collect();
        let all_give = holds.iter().zip(parts).all(|(tokens, part)| *tokens >= u128::from(part.2));
        let least = holds.iter().copied().min().unwrap_or(0);
        let each = parts.iter().zip(levels).zip(holds).map(|(((key, limit, cost), (units, must_write)), tokens)| {
            let (cost, token, refill) = (u128::from(*cost), u128::from(limit.period_ms), u128::from(limit.refill));
            let (granted, left) = if take == Take::Back {
                let granted = cost.min(u128::from(limit.capacity) - tokens);
                (granted, (units + granted * token).min(full(*limit)))
            } else {
                let granted = match take {
                    Take::Exact if all_give => cost,
                    Take::Each if tokens >= cost => cost,
                    Take::UpTo => cost.min(least),
                    _ => 0,
                };
                (granted, units - granted * token)
            };
            let wait_ms = |wanted: u128| wanted.saturating_sub(left).div_ceil(refill).min(WAIT_MS_MAX);
            let retry_ms = match () {
                () if take == Take::Back || tokens >= cost => 0,
                () if cost > u128::from(limit.capacity) => -1,
                () => whole(wait_ms(cost * token)),
            };
            let reset_ms = wait_ms(full(*limit));
            if granted > 0 || must_write {
                if reset_ms == 0 {
                    self.by_key.remove(*key);
                } else {
                    let expires_ms = now_ms + whole(reset_ms).unsigned_abs();
                    let bucket = Bucket { limit: *limit, units: left, at_ms: now_ms, expires_ms };
                    self.by_key.insert((*key).to_owned(), bucket);
                }
            }
            Answer { granted: whole(granted), remaining: whole(left / token), retry_ms, reset_ms: whole(reset_ms) }
        });
        each.collect()
    }

    /// When a key expires, if it is there.
    pub fn expires_ms(&self, key: &str) -> Option<u64> {
        self.by_key.get(key).map(|bucket| bucket.expires_ms)
    }

    /// The keys that are there, with the limits of their last writes.
    pub fn keys(&self) -> impl Iterator<Item = (&str, Limit)> {
        self.by_key.iter().map(|(key, bucket)| (key.as_str(), bucket.limit))
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.by_key.clear();
    }
}

/// At most 2^52, or a number of tokens.
fn whole(number: u128) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}
