//! Which identity the next request has.
//!
//! An identity is a number below [`IDENTITIES_MAX`], written as eight digits, so that all requests of a run have the same
//! length and only the digits of an encoded request change.
//!
//! Drawing must cost next to nothing beside a check. Uniform ones come from a xorshift generator. Zipf ones are drawn
//! beforehand, [`DRAWS`] of them, and then walked round and round: reading four bytes in order is cheaper than logarithms.
//! They are drawn by rejection-inversion (Hörmann and Derflinger, "Rejection-inversion to generate variates from monotone
//! discrete distributions", 1996), which needs no table over the identities.

use std::ops::Range;

use crate::args::Distribution;

/// Identities are written with eight digits.
pub(crate) const IDENTITIES_MAX: u32 = 100_000_000;
/// Digits of an identity.
pub(crate) const DIGITS: usize = 8;
/// Zipf draws that are made beforehand.
const DRAWS: usize = 1 << 21;

/// A source of identities.
pub(crate) struct Identities {
    source: Source,
}

enum Source {
    Uniform { count: u32, random: Random },
    Sequential { range: Range<u32>, next: u32 },
    Drawn { draws: Vec<u32>, next: usize },
}

impl Identities {
    /// The identities of one of `threads` threads. Sequential ones are divided among the threads; of the others each
    /// thread draws from all.
    pub(crate) fn new(
        distribution: Distribution,
        exponent: f64,
        count: u32,
        thread: u16,
        threads: u16,
        seed: u64,
    ) -> Self {
        let mut random = Random::new(seed ^ u64::from(thread).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let source = match distribution {
            Distribution::Uniform => Source::Uniform { count, random },
            Distribution::Sequential => {
                let share = |thread: u16| {
                    // At most `count`.
                    (u64::from(count) * u64::from(thread) / u64::from(threads)) as u32
                };
                let start = share(thread);
                Source::Sequential { range: start..share(thread + 1).max(start + 1), next: start }
            }
            Distribution::Zipf => {
                let zipf = Zipf::new(count, exponent);
                Source::Drawn { draws: (0..DRAWS).map(|_| zipf.draw(&mut random)).collect(), next: 0 }
            }
        };
        Self { source }
    }

    /// The next identity.
    pub(crate) fn draw(&mut self) -> u32 {
        match &mut self.source {
            Source::Uniform { count, random } => random.below(*count),
            Source::Sequential { range, next } => {
                let identity = *next;
                *next = if identity + 1 == range.end { range.start } else { identity + 1 };
                identity
            }
            Source::Drawn { draws, next } => {
                let identity = draws[*next];
                *next = (*next + 1) % DRAWS;
                identity
            }
        }
    }
}

/// Writes an identity's digits.
///
/// Three steps, each of which splits all parts at once: eight digits into two times four, four times two, eight times one
/// (Paul Khuong, "How to print integers really fast", 2017). The multiplications are divisions by 100 and by 10, exact for
/// numbers this small.
pub(crate) fn write_digits(identity: u32, into: &mut [u8; DIGITS]) {
    const ZEROS: u64 = 0x3030_3030_3030_3030;
    let fours = u64::from(identity / 10_000) | u64::from(identity % 10_000) << 32;
    let hundreds = ((fours * 10_486) >> 20) & 0x0000_007f_0000_007f;
    let twos = hundreds | (fours - hundreds * 100) << 16;
    let tens = ((twos * 103) >> 10) & 0x000f_000f_000f_000f;
    let ones = tens | (twos - tens * 10) << 8;
    *into = (ones + ZEROS).to_le_bytes();
}

/// xorshift64*: fast, and random enough for load.
pub(crate) struct Random(u64);

impl Random {
    /// A generator that this seed determines.
    pub(crate) fn new(seed: u64) -> Self {
        // One step of splitmix64, so that near seeds are far apart, and never zero.
        let mut state = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        Self((state ^ (state >> 31)) | 1)
    }

    fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `bound`.
    pub(crate) fn below(&mut self, bound: u32) -> u32 {
        // The upper 32 bits of a product of two 32-bit numbers.
        (((self.bits() >> 32) * u64::from(bound)) >> 32) as u32
    }

    /// A number in 0..1.
    fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// A Zipf distribution over 1..=count, by rejection-inversion.
struct Zipf {
    count: f64,
    exponent: f64,
    integral_first: f64,
    integral_last: f64,
    shortcut: f64,
}

impl Zipf {
    fn new(count: u32, exponent: f64) -> Self {
        let mut zipf =
            Self { count: f64::from(count), exponent, integral_first: 0.0, integral_last: 0.0, shortcut: 0.0 };
        zipf.integral_first = zipf.integral(1.5) - 1.0;
        zipf.integral_last = zipf.integral(zipf.count + 0.5);
        zipf.shortcut = 2.0 - zipf.inverse(zipf.integral(2.5) - zipf.weight(2.0));
        zipf
    }

    /// x^-s.
    fn weight(&self, x: f64) -> f64 {
        (-self.exponent * x.ln()).exp()
    }

    /// The antiderivative of `weight` that is zero at 1.
    fn integral(&self, x: f64) -> f64 {
        let log = x.ln();
        let scaled = (1.0 - self.exponent) * log;
        if scaled.abs() < 1e-9 { log } else { scaled.exp_m1() / scaled * log }
    }

    fn inverse(&self, y: f64) -> f64 {
        let scaled = (y * (1.0 - self.exponent)).max(-1.0);
        if scaled.abs() < 1e-9 { y.exp() } else { (scaled.ln_1p() / scaled * y).exp() }
    }

    /// A rank, from 0.
    fn draw(&self, random: &mut Random) -> u32 {
        loop {
            let y = self.integral_last + random.unit() * (self.integral_first - self.integral_last);
            let x = self.inverse(y);
            let rank = x.round().clamp(1.0, self.count);
            if rank - x <= self.shortcut || y >= self.integral(rank + 0.5) - self.weight(rank) {
                // From 0 to `count`, which has 32 bits.
                return rank as u32 - 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_fill_their_eight_places() {
        let mut digits = [0; DIGITS];
        write_digits(1234, &mut digits);
        assert_eq!(&digits, b"00001234");
        let mut random = Random::new(1);
        let picked = (0..100_000).map(|_| random.below(IDENTITIES_MAX));
        for identity in (0..=10_100).chain(picked).chain([9_999_999, 99_990_000, IDENTITIES_MAX - 1]) {
            write_digits(identity, &mut digits);
            assert_eq!(digits, format!("{identity:08}").as_bytes());
        }
    }

    #[test]
    fn sequential_ones_come_once_each_over_all_threads() {
        let mut seen = vec![0; 1001];
        for thread in 0..3 {
            let mut identities = Identities::new(Distribution::Sequential, 1.0, 1001, thread, 3, 7);
            let Source::Sequential { range, .. } = &identities.source else { unreachable!() };
            for _ in range.clone() {
                seen[identities.draw() as usize] += 1;
            }
            assert_eq!(identities.draw(), (1001 * u32::from(thread)) / 3, "it begins again");
        }
        assert!(seen.iter().all(|&times| times == 1));
    }

    #[test]
    fn uniform_ones_are_in_range_and_spread() {
        let mut identities = Identities::new(Distribution::Uniform, 1.0, 10, 0, 1, 7);
        let mut seen = [0_u32; 10];
        for _ in 0..100_000 {
            seen[identities.draw() as usize] += 1;
        }
        assert!(seen.iter().all(|times| (9_500..10_500).contains(times)), "{seen:?}");
    }

    #[test]
    fn zipf_frequencies_follow_the_exponent() {
        for exponent in [0.7, 1.0, 1.3] {
            let count = 1000;
            let zipf = Zipf::new(count, exponent);
            let mut random = Random::new(3);
            let mut seen = vec![0_u32; count as usize];
            let draws = 400_000;
            for _ in 0..draws {
                seen[zipf.draw(&mut random) as usize] += 1;
            }
            let weight = |rank: u32| f64::from(rank + 1).powf(-exponent);
            let total: f64 = (0..count).map(weight).sum();
            for rank in [0, 1, 2, 9, 99] {
                let expected = f64::from(draws) * weight(rank) / total;
                let off = (f64::from(seen[rank as usize]) - expected).abs();
                assert!(
                    off < 5.0 * expected.sqrt() + 1.0,
                    "s={exponent} rank {rank}: {} not {expected}",
                    seen[rank as usize]
                );
            }
        }
    }

    #[test]
    fn zipf_works_with_one_identity() {
        let mut identities = Identities::new(Distribution::Zipf, 1.0, 1, 0, 1, 7);
        assert!((0..100).all(|_| identities.draw() == 0));
    }

    #[test]
    fn a_seed_determines_the_draws() {
        let draw = |seed| {
            let mut identities = Identities::new(Distribution::Uniform, 1.0, 1_000_000, 0, 1, seed);
            [identities.draw(), identities.draw(), identities.draw()]
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
    }
}
