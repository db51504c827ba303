//! From an attribute's name to its number, without hashing more than sixteen bytes.
//!
//! A policy mentions at most 255 names, nearly all shorter than 17 bytes. Their image (see `bytes`) is mixed by one
//! multiplication; the builder tries multipliers until no two names share a slot, so a lookup is mostly one probe.

use crate::bytes;

/// The number of an attribute name within one snapshot.
pub type NameId = u8;

#[derive(Clone, Copy)]
struct Slot {
    image: (u64, u64),
    /// Length of the name; `u16::MAX` marks an empty slot.
    len: u16,
    id: NameId,
}

/// Multipliers that the builder tries.
const TRIES: usize = 64;

const EMPTY: Slot = Slot { image: (0, 0), len: u16::MAX, id: 0 };

/// The attribute names that a policy mentions.
pub(super) struct NameTable {
    slots: Box<[Slot]>,
    shift: u32,
    multiplier: u64,
    names: Box<[Box<str>]>,
}

impl NameTable {
    /// Numbers the names by their order, which must be without repetition and at most 255 long.
    pub(super) fn new(names: Vec<Box<str>>) -> Self {
        let bits = (names.len().max(1) * 8).next_power_of_two().trailing_zeros();
        let mut table =
            Self { slots: [].into(), shift: 64 - bits, multiplier: 0x9E37_79B9_7F4A_7C15, names: names.into() };
        let mut fewest = usize::MAX;
        let mut multiplier = table.multiplier;
        for _ in 0..TRIES {
            let (slots, collisions) = table.fill(multiplier, 1 << bits);
            if collisions < fewest {
                (table.slots, table.multiplier, fewest) = (slots, multiplier, collisions);
            }
            if collisions == 0 {
                break;
            }
            // Another odd multiplier. Collisions that remain cost a second probe, nothing else.
            multiplier = multiplier.wrapping_mul(0xD134_2543_DE82_EF95) | 1;
        }
        table
    }

    fn fill(&self, multiplier: u64, size: usize) -> (Box<[Slot]>, usize) {
        let mut slots = vec![EMPTY; size];
        let mut collisions = 0;
        for (id, name) in self.names.iter().enumerate() {
            let image = bytes::image(name.as_bytes());
            // Names are at most 128 bytes and at most 255 in number (`check`).
            let (len, id) = (name.len() as u16, id as NameId);
            let mut at = slot(image, len, multiplier, self.shift);
            while slots[at].len != u16::MAX {
                collisions += 1;
                at = (at + 1) & (size - 1);
            }
            slots[at] = Slot { image, len, id };
        }
        (slots.into(), collisions)
    }

    /// The number of `name`, if any rule mentions it.
    #[inline(always)]
    pub(super) fn find(&self, name: &[u8]) -> Option<NameId> {
        let image = bytes::image(name);
        // The longest length of all marks an empty slot, and no name has it.
        let len = u16::try_from(name.len()).ok().filter(|&len| len != u16::MAX)?;
        let mask = self.slots.len() - 1;
        let mut at = slot(image, len, self.multiplier, self.shift) & mask;
        loop {
            let slot = &self.slots[at];
            if slot.image == image
                && slot.len == len
                && (name.len() <= 16 || self.names[usize::from(slot.id)].as_bytes() == name)
            {
                return Some(slot.id);
            }
            if slot.len == u16::MAX {
                return None;
            }
            at = (at + 1) & mask;
        }
    }

    /// The name with this number.
    pub(super) fn name(&self, id: NameId) -> &str {
        &self.names[usize::from(id)]
    }

    /// How many names there are.
    pub(super) fn len(&self) -> usize {
        self.names.len()
    }
}

#[inline(always)]
fn slot(image: (u64, u64), len: u16, multiplier: u64, shift: u32) -> usize {
    let mixed = image.0 ^ image.1.rotate_left(27) ^ u64::from(len);
    (mixed.wrapping_mul(multiplier) >> shift) as usize
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_name_is_found_and_no_other(
            names in prop::collection::btree_set("[a-c._-]{1,20}", 0..255),
            others in prop::collection::vec("[a-c._-]{0,20}", 50),
        ) {
            let names: BTreeSet<String> = names;
            let table = NameTable::new(names.iter().map(|name| name.as_str().into()).collect());
            for (id, name) in names.iter().enumerate() {
                prop_assert_eq!(table.find(name.as_bytes()).map(usize::from), Some(id));
            }
            for other in others.iter().filter(|other| !names.contains(*other)) {
                prop_assert_eq!(table.find(other.as_bytes()), None);
            }
        }
    }
}
