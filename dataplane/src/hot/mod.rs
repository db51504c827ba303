//! What keeps a hot key from its shard: answers that this gateway can give by itself because the store has said enough.
//!
//! * [`rejections`]: a bucket that is known to be empty denies until it can hold the cost again. Exact, always on.
//! * [`leases`]: tokens that were taken in advance are spent without a call.

pub mod leases;
pub mod rejections;

use policy_sync::rate::Rate;
use serde::{Deserialize, Serialize};

use self::{
    leases::Leases,
    rejections::{Rejection, Rejections},
};

/// Settings of everything about hot keys.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HotSettings {
    /// Empty buckets that are remembered.
    pub rejections: usize,
    /// Leases that a gateway may have at once.
    pub leases: usize,
    /// The most of a bucket's capacity that a lease on `auto` takes at once, above 0 and at most 1.
    pub lease_share: f64,
    /// Leases on `auto` begin above so many checks a second of one bucket on this gateway, and end below half of it.
    pub lease_auto_above: u32,
    /// A lease that nothing was spent of for this long is given back, in milliseconds.
    pub lease_quiet_ms: u64,
    /// Keys that each core counts, half a kilobyte each.
    pub heat_keys: usize,
}

impl Default for HotSettings {
    fn default() -> Self {
        Self {
            rejections: 65_536,
            leases: 4_096,
            lease_share: 0.1,
            lease_auto_above: 1_000,
            lease_quiet_ms: 1_000,
            heat_keys: 128,
        }
    }
}

/// What the cores of a gateway share about hot keys.
pub struct Hot {
    /// Buckets that are empty.
    pub rejections: Rejections,
    /// Tokens that were taken in advance.
    pub leases: Leases,
}

impl Hot {
    /// Everything that it will ever need.
    pub fn new(settings: &HotSettings) -> Self {
        Self { rejections: Rejections::new(settings.rejections), leases: Leases::new(settings.leases) }
    }

    /// Whether a bucket is known not to hold this cost.
    #[inline(always)]
    pub fn rejection(&self, bucket_key: u64, rate: &Rate, cost: u32, now_us: u64) -> Option<Rejection> {
        Rejection::of(rate, self.rejections.full_at_us(bucket_key)?, now_us, cost)
    }
}

/// The key of a bucket with the limit in force: another limit is another key.
#[inline(always)]
pub fn bucket_key(key: u64, rate: &Rate) -> u64 {
    key_with_limit(key, limit_key(rate))
}

/// A limit's part of a bucket's key.
pub fn limit_key(rate: &Rate) -> u64 {
    mix(u64::from(rate.capacity) << 32 ^ u64::from(rate.refill), u64::from(rate.period_ms))
}

/// As [`bucket_key`], of the limit's part.
#[inline(always)]
pub fn key_with_limit(key: u64, limit_key: u64) -> u64 {
    // 0 stands for none.
    mix(key, limit_key).max(1)
}

/// Mixes a word into a hash of words that are hashes themselves.
#[inline(always)]
pub(crate) fn mix(hash: u64, word: u64) -> u64 {
    let product = u128::from(hash ^ word) * u128::from(0xA076_1D64_78BD_642F_u64);
    (product as u64 ^ (product >> 64) as u64).wrapping_add(word.rotate_left(29))
}

#[cfg(all(test, loom))]
mod loom_tests;
