//! Randomness that is passed in: a small generator with a seed, so that a simulated world is the same each time.

/// SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
#[derive(Clone, Debug)]
pub struct Chance {
    state: u64,
}

impl Chance {
    /// The generator of this seed.
    pub fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// A number below `range`, each about as likely as the others; 0 where the range is 0 or 1.
    #[inline(always)]
    pub fn below(&mut self, range: u32) -> u32 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^= mixed >> 31;
        // The top of the product with the range: below the range, so it fits.
        ((u128::from(mixed) * u128::from(range)) >> 64) as u32
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_number_is_about_as_likely() {
        let mut chance = Chance::new(3);
        let mut seen = [0u32; 10];
        (0..100_000).for_each(|_| seen[chance.below(10) as usize] += 1);
        // 10,000 expected; five standard deviations are about 480.
        assert!(seen.iter().all(|count| (9_520..=10_480).contains(count)), "{seen:?}");
        assert_eq!((chance.below(1), chance.below(0)), (0, 0));
    }
}
