//! The world's randomness: everything that happens by chance comes from one seed.

use sluice::chance::Chance;

/// A generator with a seed.
#[derive(Clone, Debug)]
pub struct Random(Chance);

impl Random {
    /// The generator of this seed.
    pub fn new(seed: u64) -> Self {
        Self(Chance::new(seed))
    }

    /// A generator of its own, for a part of the world whose draws should not move those of others.
    pub fn split(&mut self) -> Self {
        Self::new(u64::from(self.below(u32::MAX)) << 32 | u64::from(self.below(u32::MAX)))
    }

    /// Below `range`, which is not 0.
    pub fn below(&mut self, range: u32) -> u32 {
        self.0.below(range)
    }

    /// From `least` to `most`, both included.
    pub fn within(&mut self, least: u64, most: u64) -> u64 {
        let range = u32::try_from(most - least + 1).unwrap_or(u32::MAX);
        least + u64::from(self.below(range))
    }

    /// An index of a list with `len` entries.
    pub fn index(&mut self, len: usize) -> usize {
        self.below(u32::try_from(len).unwrap_or(u32::MAX)) as usize
    }

    /// One of these.
    pub fn one_of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.index(choices.len())]
    }

    /// Above 0 and below 1.
    pub fn unit(&mut self) -> f64 {
        const STEPS: u32 = 1 << 31;
        (f64::from(self.below(STEPS)) + 0.5) / f64::from(STEPS)
    }

    /// True with this probability.
    pub fn happens(&mut self, probability: f64) -> bool {
        self.unit() < probability
    }

    /// The pause to the next event of a Poisson process, in microseconds.
    pub fn pause_us(&mut self, per_second: f64) -> u64 {
        // Rounded to the nearest, so that the rate is right on average.
        (-self.unit().ln() * 1e6 / per_second + 0.5) as u64
    }
}
