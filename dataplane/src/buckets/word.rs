//! One bucket: how it is packed, and the arithmetic of refilling, taking and waiting.
//!
//! The word, from the highest bit to the lowest:
//!
//! ```text
//!  127          92 91                       55 54                 24 23        0
//! ┌───────────────┬───────────────────────────┬─────────────────────┬───────────┐
//! │ fingerprint 36│ at_ms 37                  │ tokens 31           │ units 24  │
//! └───────────────┴───────────────────────────┴─────────────────────┴───────────┘
//! ```
//!
//! * `fingerprint` tells identities in one place of the table apart; 0 marks an empty slot. A check compares it with at
//!   most 14 others, so it meets a stranger's with a chance below 14 / 2^36, about 2 in 10^10.
//! * `at_ms` is when the level was last brought up to date, in milliseconds since the process began (4 years fit).
//! * `tokens` and `units` are the level: whole tokens and a fraction, see [`policy_sync::rate`]. A fresh bucket holds
//!   [`TOKENS_MAX`], which every capacity caps: that is how "starts full" is written without knowing the rule.
//!
//! A level is only ever brought up to date when something is taken from it or given back, so what a bucket shows
//! does not depend on who looked at it, or how often.

use policy_sync::rate::{Rate, UNITS_PER_TOKEN_MAX};

/// Bits of the fingerprint.
pub const FINGERPRINT_BITS: u32 = 36;
const AT_BITS: u32 = 37;
const TOKENS_BITS: u32 = 31;
const UNITS_BITS: u32 = 24;

const _: () = assert!(FINGERPRINT_BITS + AT_BITS + TOKENS_BITS + UNITS_BITS == 128);
const _: () = assert!(UNITS_PER_TOKEN_MAX <= 1 << UNITS_BITS, "a fraction is below one token");
const _: () = assert!(policy_sync::model::CAPACITY_MAX <= TOKENS_MAX as u64);

/// The most tokens that the word can hold.
pub const TOKENS_MAX: u32 = (1 << TOKENS_BITS) - 1;
/// The last millisecond that the word can hold; a process that lives longer stops refilling. It is 4.3 years.
pub const AT_MS_MAX: u64 = (1 << AT_BITS) - 1;

/// What a bucket holds at a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Level {
    /// Whole tokens.
    pub tokens: u32,
    /// The fraction of a token, in the rate's units.
    pub units: u32,
    /// When that was so, in milliseconds since the process began.
    pub at_ms: u64,
}

impl Level {
    /// A bucket that nobody has taken from.
    pub const fn fresh(now_ms: u64) -> Self {
        Self { tokens: TOKENS_MAX, units: 0, at_ms: now_ms }
    }

    /// Packs the level under a fingerprint.
    #[inline(always)]
    pub const fn pack(self, fingerprint: u64) -> u128 {
        (fingerprint as u128) << (AT_BITS + TOKENS_BITS + UNITS_BITS)
            | (self.at_ms as u128) << (TOKENS_BITS + UNITS_BITS)
            | (self.tokens as u128) << UNITS_BITS
            | self.units as u128
    }

    /// The level in a word.
    #[inline(always)]
    pub const fn unpack(word: u128) -> Self {
        // The masks keep each part within its type.
        let low = word as u64;
        Self {
            tokens: (low >> UNITS_BITS) as u32 & TOKENS_MAX,
            units: low as u32 & ((1 << UNITS_BITS) - 1),
            at_ms: (word >> (TOKENS_BITS + UNITS_BITS)) as u64 & AT_MS_MAX,
        }
    }

    /// The level brought to `now_ms` at this rate: refilled, and capped at the capacity.
    ///
    /// A clock behind the level's own counts as no time passed. Where a tick is a second, `at_ms` advances by whole
    /// ticks only, so no part of a second is lost however often the bucket is used.
    #[inline(always)]
    pub fn refilled(self, rate: &Rate, now_ms: u64) -> Self {
        debug_assert!(now_ms <= AT_MS_MAX, "the clock stops at the last millisecond that a word can hold");
        let elapsed_ms = now_ms.saturating_sub(self.at_ms);
        let (ticks, at_ms) = match rate.tick_ms {
            1 => (elapsed_ms, self.at_ms + elapsed_ms),
            tick_ms => whole_ticks(elapsed_ms, self.at_ms, tick_ms),
        };
        if self.tokens < rate.capacity && ticks < rate.ticks_to_full {
            // A rule change may leave more units than the new rate's token has; see `policy_sync::rate`.
            let units = u64::from(self.units.min(rate.units_per_token - 1));
            if ticks == 0 {
                return Self { units: units as u32, ..self };
            }
            // Below capacity × 2^24 + one tick's units, so below 2^56; and whole tokens below capacity + 2^31.
            let units = units + ticks * rate.units_per_tick;
            let whole = units / u64::from(rate.units_per_token);
            let tokens = u64::from(self.tokens) + whole;
            if tokens < u64::from(rate.capacity) {
                // Both are below their bounds: tokens by the branch, units as a remainder.
                let units = units - whole * u64::from(rate.units_per_token);
                return Self { tokens: tokens as u32, units: units as u32, at_ms };
            }
        }
        Self { tokens: rate.capacity, units: 0, at_ms: self.at_ms + elapsed_ms }
    }

    /// The level after giving tokens back.
    #[inline]
    pub fn with_back(self, rate: &Rate, cost: u32) -> Self {
        let tokens = self.tokens.saturating_add(cost);
        if tokens >= rate.capacity { Self { tokens: rate.capacity, units: 0, ..self } } else { Self { tokens, ..self } }
    }

    /// Milliseconds from `now_ms` until this (refilled) level holds `tokens`; 0 when it does.
    ///
    /// `tokens` must not exceed the capacity.
    #[inline(always)]
    #[allow(
        clippy::manual_div_ceil,
        reason = "`div_ceil` divides, looks at the remainder and adds: five instructions more"
    )]
    pub fn wait_ms(self, rate: &Rate, tokens: u32, now_ms: u64) -> u64 {
        if self.tokens >= tokens {
            return 0;
        }
        let missing = u64::from(tokens - self.tokens) * u64::from(rate.units_per_token) - u64::from(self.units);
        // Rounded up; both are below 2^56.
        let ticks = (missing + rate.units_per_tick - 1) / rate.units_per_tick;
        (self.at_ms + ticks * u64::from(rate.tick_ms)).saturating_sub(now_ms)
    }
}

/// How many whole ticks have passed, and when the last of them ended.
#[inline(never)]
fn whole_ticks(elapsed_ms: u64, at_ms: u64, tick_ms: u32) -> (u64, u64) {
    let ticks = elapsed_ms / u64::from(tick_ms);
    (ticks, at_ms + ticks * u64::from(tick_ms))
}

/// The fingerprint in a word; 0 for an empty slot.
#[inline(always)]
pub(super) const fn fingerprint(word: u128) -> u64 {
    (word >> (AT_BITS + TOKENS_BITS + UNITS_BITS)) as u64
}
