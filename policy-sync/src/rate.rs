//! A limit as the integers that a bucket computes with, exact and without drift.
//!
//! A bucket holds whole tokens and a fraction of one. The fraction is counted in *units*: a token has
//! [`Rate::units_per_token`] of them, and each *tick* (a millisecond, or a second for slow limits) brings
//! [`Rate::units_per_tick`]. Both come from `refill / period` reduced to lowest terms, so what `n` ticks bring is
//! exactly `n × units_per_tick`, whoever looks and however often: nothing is ever rounded away.
//!
//! Example: 10 tokens a minute is 1 token in 6,000 ms, so 6,000 units make a token and a tick brings one. Both are
//! then multiplied by the largest factor that keeps a token within [`UNITS_PER_TOKEN_MAX`]. That changes no result;
//! it makes every rate's token about the same number of units, so a bucket that is read at a new rate after a
//! rule change keeps its fraction to within half a token, and its whole tokens exactly.

use thiserror::Error;

use crate::model::{CAPACITY_MAX, Limit, PERIOD_MS_MAX};

/// The most units a token may have: the packed word of a bucket keeps the fraction in 24 bits.
pub const UNITS_PER_TOKEN_MAX: u64 = 1 << 24;

const _: () = assert!(PERIOD_MS_MAX <= u32::MAX as u64, "a period fits 32 bits");

/// Longer periods than this, in milliseconds, must be whole seconds, so that their fraction fits.
pub const MILLISECOND_TICK_PERIOD_MS_MAX: u64 = UNITS_PER_TOKEN_MAX;

/// A limit compiled for the bucket arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// The most tokens that the bucket holds.
    pub capacity: u32,
    /// Units in a token; above half of [`UNITS_PER_TOKEN_MAX`], and no more than it.
    pub units_per_token: u32,
    /// Units that a tick brings.
    pub units_per_tick: u64,
    /// Ticks after which an empty bucket is full again.
    pub ticks_to_full: u64,
    /// A tick in milliseconds: 1 or 1,000.
    pub tick_ms: u32,
    /// The limit's refill as it was written, for the store's script.
    pub refill: u32,
    /// The limit's period as it was written, in milliseconds.
    pub period_ms: u32,
}

/// Why a limit cannot be computed with.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum RateError {
    /// The capacity is 0 or does not fit.
    #[error("capacity must be from 1 to {CAPACITY_MAX}")]
    Capacity,
    /// The refill is 0 or does not fit.
    #[error("refill must be from 1 to {CAPACITY_MAX}")]
    Refill,
    /// The period is 0 or too long.
    #[error("the period must be from 1 ms to {PERIOD_MS_MAX} ms")]
    Period,
    /// A long period that is not a whole number of seconds.
    #[error("a period over {MILLISECOND_TICK_PERIOD_MS_MAX} ms must be a whole number of seconds")]
    Fraction,
}

impl Rate {
    /// Compiles a limit.
    ///
    /// # Errors
    ///
    /// What is out of its bounds; see [`RateError`].
    pub fn new(limit: Limit) -> Result<Self, RateError> {
        if limit.capacity == 0 || limit.capacity > CAPACITY_MAX {
            return Err(RateError::Capacity);
        }
        if limit.refill == 0 || limit.refill > CAPACITY_MAX {
            return Err(RateError::Refill);
        }
        if limit.period_ms == 0 || limit.period_ms > PERIOD_MS_MAX {
            return Err(RateError::Period);
        }
        let (tick_ms, period_ticks) = if limit.period_ms <= MILLISECOND_TICK_PERIOD_MS_MAX {
            (1, limit.period_ms)
        } else if limit.period_ms.is_multiple_of(1000) {
            (1000, limit.period_ms / 1000)
        } else {
            return Err(RateError::Fraction);
        };
        let divisor = gcd(limit.refill, period_ticks);
        let (units_per_tick, units_per_token) = (limit.refill / divisor, period_ticks / divisor);
        let scale = UNITS_PER_TOKEN_MAX / units_per_token;
        let (units_per_tick, units_per_token) = (units_per_tick * scale, units_per_token * scale);
        let capacity = u32::try_from(limit.capacity).map_err(|_| RateError::Capacity)?;
        Ok(Self {
            capacity,
            units_per_token: u32::try_from(units_per_token).map_err(|_| RateError::Period)?,
            units_per_tick,
            ticks_to_full: (u64::from(capacity) * units_per_token).div_ceil(units_per_tick),
            tick_ms,
            refill: u32::try_from(limit.refill).map_err(|_| RateError::Refill)?,
            period_ms: u32::try_from(limit.period_ms).map_err(|_| RateError::Period)?,
        })
    }

    /// The limit as it was written.
    pub fn limit(&self) -> Limit {
        Limit {
            capacity: u64::from(self.capacity),
            refill: u64::from(self.refill),
            period_ms: u64::from(self.period_ms),
        }
    }

    /// The rate of one of `of` parts, `part` counting from 0. Together they have the whole capacity and the whole refill;
    /// where there is less to refill than parts, each gets it all in `of` periods. `None` for fewer tokens than parts, and
    /// where a part would wait for longer than a period may be.
    pub fn part(&self, part: u32, of: u32) -> Option<Self> {
        let share = |whole: u32| u64::from(whole / of + u32::from(part < whole % of));
        if of == 0 || self.capacity < of {
            return None;
        }
        let (refill, mut period_ms) = if self.refill >= of {
            (share(self.refill), u64::from(self.period_ms))
        } else {
            (u64::from(self.refill), u64::from(self.period_ms) * u64::from(of))
        };
        if period_ms > MILLISECOND_TICK_PERIOD_MS_MAX {
            // A long period is of whole seconds; a moment more grants no more.
            period_ms = period_ms.next_multiple_of(1_000);
        }
        Self::new(Limit { capacity: share(self.capacity), refill, period_ms }).ok()
    }

    /// How long an empty bucket takes to be full again, in milliseconds.
    pub fn fill_ms(&self) -> u64 {
        self.ticks_to_full * u64::from(self.tick_ms)
    }
}

/// The greatest common divisor.
pub fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(capacity: u64, refill: u64, period_ms: u64) -> Result<Rate, RateError> {
        Rate::new(Limit { capacity, refill, period_ms })
    }

    #[test]
    fn ten_a_minute_is_a_token_each_six_seconds() {
        let rate = rate(10, 10, 60_000).unwrap();
        assert_eq!(u64::from(rate.units_per_token), rate.units_per_tick * 6_000);
        assert_eq!((rate.fill_ms(), rate.tick_ms), (60_000, 1));
    }

    #[test]
    fn parts_add_up_to_the_whole() {
        let whole = rate(103, 57, 1_000).unwrap();
        let parts: Vec<_> = (0..10).map(|part| whole.part(part, 10).unwrap()).collect();
        assert_eq!(parts.iter().map(|part| part.capacity).sum::<u32>(), 103);
        assert_eq!(parts.iter().map(|part| part.refill).sum::<u32>(), 57);
        assert!(parts.iter().all(|part| (10..=11).contains(&part.capacity) && part.period_ms == 1_000));
        let slow = rate(10, 1, 60_000).unwrap().part(3, 10).unwrap();
        assert_eq!((slow.capacity, slow.refill, slow.period_ms), (1, 1, 600_000));
        assert_eq!(rate(9, 9, 1_000).unwrap().part(0, 10), None, "a part without a token");
        assert_eq!(rate(10, 1, PERIOD_MS_MAX).unwrap().part(0, 10), None, "a part that waits for a year");
    }

    #[test]
    fn a_month_is_counted_in_seconds() {
        let month = 31 * 24 * 3_600_000;
        let rate = rate(1, 1, month).unwrap();
        assert_eq!((rate.fill_ms(), rate.tick_ms), (month, 1000));
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        assert_eq!(rate(0, 1, 1), Err(RateError::Capacity));
        assert_eq!(rate(1 << 31, 1, 1), Err(RateError::Capacity));
        assert_eq!(rate(1, 0, 1), Err(RateError::Refill));
        assert_eq!(rate(1, 1, 0), Err(RateError::Period));
        assert_eq!(rate(1, 1, PERIOD_MS_MAX + 1), Err(RateError::Period));
        assert_eq!(rate(1, 1, MILLISECOND_TICK_PERIOD_MS_MAX + 1), Err(RateError::Fraction));
    }

    #[test]
    fn a_token_is_always_about_as_many_units() {
        for (refill, period_ms) in [(1, 1), (7, 60_000), (1_000_000, 1_000), (3, 16_777_213), (1, 7 * 86_400_000)] {
            let rate = rate(100, refill, period_ms).unwrap();
            assert!(u64::from(rate.units_per_token) <= UNITS_PER_TOKEN_MAX, "{rate:?}");
            assert!(u64::from(rate.units_per_token) > UNITS_PER_TOKEN_MAX / 2, "{rate:?}");
        }
    }
}
