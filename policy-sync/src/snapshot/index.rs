//! From the hash of an attribute's value to the rules (or overrides) that hang on it, in one probe.
//!
//! A fixed open-addressing table, built once and at most a quarter full. A hit only names candidates: whoever asks
//! compares the bytes, so a collision costs a comparison and never an answer.

/// The range of candidates for one key.
#[derive(Clone, Copy, Default)]
struct Slot {
    /// 0 marks an empty slot; a key of 0 is stored as 1.
    key: u64,
    start: u32,
    len: u32,
}

/// Keys to lists of `u32`, immutable.
pub(super) struct Index {
    slots: Box<[Slot]>,
    shift: u32,
    items: Box<[u32]>,
}

impl Index {
    /// Builds the index; the items of a key keep their order.
    pub(super) fn new(mut pairs: Vec<(u64, u32)>) -> Self {
        for (key, _) in &mut pairs {
            *key = stored(*key);
        }
        pairs.sort_by_key(|&(key, _)| key);
        let bits = (pairs.len().max(1) * 4).next_power_of_two().trailing_zeros();
        let mut index = Self {
            slots: vec![Slot::default(); 1 << bits].into(),
            shift: 64 - bits,
            items: pairs.iter().map(|&(_, item)| item).collect(),
        };
        let mut start = 0;
        for run in pairs.chunk_by(|a, b| a.0 == b.0) {
            let key = run[0].0;
            let at = index.position(key);
            // A policy holds far fewer than 2^32 rules and overrides, see `model`.
            index.slots[at] = Slot { key, start, len: run.len() as u32 };
            start += run.len() as u32;
        }
        index
    }

    /// The items of `key`, mostly none or one.
    #[inline]
    pub(super) fn find(&self, key: u64) -> &[u32] {
        let slot = self.slots[self.position(stored(key))];
        &self.items[slot.start as usize..(slot.start + slot.len) as usize]
    }

    /// The slot that holds `key`, or the empty one where it would be.
    #[inline]
    fn position(&self, key: u64) -> usize {
        let mask = self.slots.len() - 1;
        // Keys are hashes; the multiplication lets every bit take part even where two were combined by XOR.
        let mut at = (key.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> self.shift) as usize & mask;
        while self.slots[at].key != key && self.slots[at].key != 0 {
            at = (at + 1) & mask;
        }
        at
    }
}

#[inline(always)]
fn stored(key: u64) -> u64 {
    if key == 0 { 1 } else { key }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn finds_what_a_map_finds(pairs in prop::collection::vec((0u64..40, any::<u32>()), 0..200)) {
            let index = Index::new(pairs.clone());
            let mut oracle: BTreeMap<u64, Vec<u32>> = BTreeMap::new();
            for (key, item) in pairs {
                oracle.entry(stored(key)).or_default().push(item);
            }
            for key in 0..60 {
                prop_assert_eq!(index.find(key), oracle.get(&stored(key)).map_or(&[][..], Vec::as_slice));
            }
        }
    }
}
