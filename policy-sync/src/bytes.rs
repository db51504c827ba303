//! Comparing short byte strings without a call.
//!
//! Attribute names and values are mostly shorter than 17 bytes. A slice comparison of unknown length is a call into
//! the C library, about twenty instructions before it looks at the first byte; two overlapping eight-byte loads cover
//! any string of 8 to 16 bytes, two four-byte loads any of 4 to 7, and three single bytes any of 1 to 3.

/// All bytes of a string of at most 16 bytes, in two words; longer strings give their first and last eight bytes.
///
/// Two strings of the same length, at most 16, are equal exactly when their images are.
#[inline(always)]
pub(crate) fn image(bytes: &[u8]) -> (u64, u64) {
    if let (Some(first), Some(last)) = (bytes.first_chunk::<8>(), bytes.last_chunk::<8>()) {
        (u64::from_le_bytes(*first), u64::from_le_bytes(*last))
    } else if let (Some(first), Some(last)) = (bytes.first_chunk::<4>(), bytes.last_chunk::<4>()) {
        (u64::from(u32::from_le_bytes(*first)), u64::from(u32::from_le_bytes(*last)))
    } else if let (Some(&first), Some(&last)) = (bytes.first(), bytes.last()) {
        (u64::from(first), u64::from(last) | u64::from(bytes[bytes.len() / 2]) << 8)
    } else {
        (0, 0)
    }
}

/// Whether two byte strings are equal.
#[inline(always)]
pub(crate) fn equal(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && if a.len() <= 16 { image(a) == image(b) } else { a == b }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn equal_is_slice_equality(a in prop::collection::vec(0u8..3, 0..20), b in prop::collection::vec(0u8..3, 0..20)) {
            prop_assert_eq!(equal(&a, &b), a == b);
            prop_assert!(equal(&a, &a.clone()));
        }

        #[test]
        fn one_changed_byte_is_seen(a in prop::collection::vec(any::<u8>(), 1..40), at in any::<prop::sample::Index>()) {
            let mut b = a.clone();
            let at = at.index(a.len());
            b[at] ^= 1;
            prop_assert!(!equal(&a, &b));
        }
    }
}
