//! Requests that begin as an earlier one did: a small cache from a CHECK's bytes up to its last value to the rules that apply.
//!
//! Parsing and matching are two thirds of a check, and gateways repeat themselves: the same path and method, another
//! key. So a core remembers, for a few dozen beginnings, the recipe that the snapshot made of them. A request whose
//! bytes begin the same needs one comparison, its last word read, and that word's hash. The comparison is of all bytes, and
//! a recipe is only made where the last value decides nothing but whose bucket it is, so the outcome is the same; a test
//! holds both ways against each other. A new policy makes every entry stale at once, by its generation.

use policy_sync::{identity, snapshot::recipe::Recipe};

/// Beginnings that a core remembers; a power of two. Each takes half a kilobyte.
const SLOTS: usize = 64;
/// Longer beginnings, in bytes, are not remembered.
const PREFIX_BYTES_MAX: usize = 256;
/// The bytes that choose the slot: after `*N CHECK`, mostly the first attribute.
const WINDOW: std::ops::Range<usize> = 16..40;
/// Bytes that are compared at once.
const CHUNK_BYTES: usize = 32;
/// How many other beginnings must come by before a slot that is in use is given away.
const PATIENCE_MAX: u8 = 16;

/// What is remembered of a beginning.
#[derive(Clone, Copy)]
pub(super) struct Entry {
    /// The policy that the recipe is from; 0 marks an empty slot.
    generation: u64,
    pub(super) recipe: Recipe,
    pub(super) cost: u32,
    /// The rule, where it is the only one and enforces its own limit.
    pub(super) one: Option<u32>,
    /// Where the store counts: how the identity begins.
    pub(super) head: Option<IdentityHead>,
    len: u16,
    patience: u8,
    prefix: [u8; PREFIX_BYTES_MAX],
}

/// The encoded identity of a check's rules up to the last value.
#[derive(Clone, Copy)]
pub(super) struct IdentityHead {
    bytes: [u8; HEAD_BYTES_MAX],
    len: u8,
    /// Whether the value follows.
    value_follows: bool,
}

/// Longer beginnings of an identity are not remembered.
const HEAD_BYTES_MAX: usize = 64;

impl IdentityHead {
    pub(super) fn new(head: &[u8], value_follows: bool) -> Option<Self> {
        let mut bytes = [0; HEAD_BYTES_MAX];
        bytes.get_mut(..head.len())?.copy_from_slice(head);
        Some(Self { bytes, len: head.len() as u8, value_follows })
    }

    /// Appends the identity with this last value.
    #[inline]
    pub(super) fn write(&self, value: &[u8], out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(&self.bytes[..usize::from(self.len)]);
        if self.value_follows {
            identity::encode_value(value, out);
            identity::shorten(start, out);
        }
    }
}

/// The cache of one core.
pub(super) struct Recall {
    slots: Box<[Entry]>,
}

impl Recall {
    pub(super) fn new() -> Self {
        let empty = Entry {
            generation: 0,
            recipe: Recipe::default(),
            cost: 0,
            one: None,
            head: None,
            len: 0,
            patience: 0,
            prefix: [0; PREFIX_BYTES_MAX],
        };
        Self { slots: vec![empty; SLOTS].into() }
    }

    /// What is remembered of the beginning of `bytes`, and how long it is.
    #[inline(always)]
    pub(super) fn find(&mut self, bytes: &[u8], generation: u64) -> Option<(&Entry, usize)> {
        let entry = &mut self.slots[slot(bytes)?];
        let len = usize::from(entry.len);
        if entry.generation == generation && begins_with(bytes, &entry.prefix, len) {
            entry.patience = PATIENCE_MAX;
            Some((entry, len))
        } else {
            None
        }
    }

    /// Remembers the recipe of the request that begins with `prefix`, unless its slot is in good use.
    pub(super) fn learn(
        &mut self,
        prefix: &[u8],
        cost: u32,
        (one, head): (Option<u32>, Option<IdentityHead>),
        generation: u64,
        recipe: impl FnOnce() -> Option<Recipe>,
    ) {
        let (Some(at), Ok(len)) = (slot(prefix), u16::try_from(prefix.len())) else { return };
        if !(CHUNK_BYTES..=PREFIX_BYTES_MAX).contains(&prefix.len()) {
            return;
        }
        let entry = &mut self.slots[at];
        if entry.generation == generation && entry.patience > 0 {
            entry.patience -= 1;
            return;
        }
        if let Some(recipe) = recipe() {
            *entry = Entry { generation, recipe, cost, one, head, len, patience: 1, prefix: entry.prefix };
            entry.prefix[..prefix.len()].copy_from_slice(prefix);
        }
    }
}

/// The slot of a request; `None` for those too short to be worth it.
#[inline(always)]
fn slot(bytes: &[u8]) -> Option<usize> {
    let window: &[u8; 24] = bytes.get(WINDOW)?.first_chunk()?;
    let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| window[at + byte]));
    let mixed = word(0) ^ word(8).rotate_left(21) ^ word(16).rotate_left(42);
    Some((mixed.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> (64 - SLOTS.trailing_zeros())) as usize)
}

/// Whether `bytes` begins with the first `len` bytes of `prefix`, at least [`CHUNK_BYTES`]: whole chunks, the last one
/// overlapping.
#[inline(always)]
fn begins_with(bytes: &[u8], prefix: &[u8; PREFIX_BYTES_MAX], len: usize) -> bool {
    let (Some(bytes), Some(prefix)) = (bytes.get(..len), prefix.get(..len)) else { return false };
    let (Some(last), Some(last_wanted)) = (bytes.last_chunk::<CHUNK_BYTES>(), prefix.last_chunk::<CHUNK_BYTES>())
    else {
        return false;
    };
    if last != last_wanted {
        return false;
    }
    let chunks = bytes.as_chunks::<CHUNK_BYTES>().0.iter().zip(prefix.as_chunks::<CHUNK_BYTES>().0);
    chunks.into_iter().all(|(chunk, wanted)| chunk == wanted)
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn begins_with_is_starts_with(
            prefix in prop::collection::vec(0u8..2, CHUNK_BYTES..=PREFIX_BYTES_MAX),
            more in prop::collection::vec(0u8..2, 0..40),
            flip in any::<prop::sample::Index>(),
        ) {
            let mut padded = [0; PREFIX_BYTES_MAX];
            padded[..prefix.len()].copy_from_slice(&prefix);
            let mut bytes = [prefix.clone(), more].concat();
            prop_assert!(begins_with(&bytes, &padded, prefix.len()));
            let at = flip.index(bytes.len());
            bytes[at] ^= 1;
            prop_assert_eq!(begins_with(&bytes, &padded, prefix.len()), bytes.starts_with(&prefix));
            prop_assert!(!begins_with(&bytes[..prefix.len() - 1], &padded, prefix.len()));
        }
    }
}
