//! Time and chance, as arguments.
//!
//! Nothing in this crate but the runner reads a clock or draws a random number: a test or a simulator passes its own.

use std::{fmt, ops::Add};

/// A point on a monotone clock, or a span of it, in microseconds. Where it starts is the caller's choice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Micros(pub u64);

impl Micros {
    /// Later than anything.
    pub const NEVER: Self = Self(u64::MAX);

    /// A span of milliseconds.
    pub const fn from_millis(millis: u64) -> Self {
        Self(millis.saturating_mul(1000))
    }

    /// The span since `earlier`; none if that is later.
    pub const fn since(self, earlier: Self) -> Self {
        Self(self.0.saturating_sub(earlier.0))
    }
}

impl Add for Micros {
    type Output = Self;

    fn add(self, span: Self) -> Self {
        Self(self.0.saturating_add(span.0))
    }
}

impl fmt::Display for Micros {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} µs", self.0)
    }
}

/// Random numbers for spreading things in time: xorshift64*, whose quality is plenty for that.
#[derive(Clone, Debug)]
pub(crate) struct Chance(u64);

impl Chance {
    pub(crate) fn new(seed: u64) -> Self {
        // The state may be anything but 0.
        Self(seed ^ 0x9e37_79b9_7f4a_7c15).nonzero()
    }

    fn nonzero(self) -> Self {
        if self.0 == 0 { Self(1) } else { self }
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Less than `bound`, evenly; 0 if that is 0.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        let high = (u128::from(self.next()) * u128::from(bound)) >> 64;
        u64::try_from(high).unwrap_or_default()
    }

    /// The span, give or take `percent` of it.
    pub(crate) fn spread(&mut self, span: Micros, percent: u64) -> Micros {
        let reach = span.0 / 100 * percent;
        Micros(span.0 - reach + self.below(2 * reach + 1))
    }
}
