//! Which checks are looked at: one in [`SAMPLE_EVERY`] on average, at gaps that nobody can foresee.
//!
//! A fixed gap would meet a client's rhythm: of a pipeline of 16 requests it would always take the same one. So gaps are
//! uniform from 1 to 31, which makes each check as likely as any other to be taken, and costs a countdown.

use super::SAMPLE_EVERY;
use crate::chance::Chance;

/// The longest gap: with the shortest, 1, the mean is [`SAMPLE_EVERY`].
const GAP_MAX: u32 = 2 * SAMPLE_EVERY - 1;

pub(super) struct Sampler {
    countdown: u32,
    chance: Chance,
}

impl Sampler {
    pub(super) fn new(seed: u64) -> Self {
        let mut sampler = Self { countdown: 1, chance: Chance::new(seed) };
        sampler.countdown = sampler.gap();
        sampler
    }

    /// Whether this check is taken.
    #[inline(always)]
    pub(super) fn samples(&mut self) -> bool {
        self.countdown -= 1;
        if self.countdown > 0 {
            return false;
        }
        self.countdown = self.gap();
        true
    }

    #[inline(always)]
    fn gap(&mut self) -> u32 {
        1 + self.chance.below(GAP_MAX)
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_in_sixteen_is_taken_whatever_the_rhythm() {
        let mut sampler = Sampler::new(7);
        let mut taken = [0u32; 16];
        for check in 0..1_600_000 {
            taken[check % 16] += u32::from(sampler.samples());
        }
        for (place, &count) in taken.iter().enumerate() {
            // 6,250 expected; five standard deviations are about 400.
            assert!((5_850..=6_650).contains(&count), "place {place}: {count}");
        }
    }
}
