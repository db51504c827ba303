//! Where the parts of a split bucket live: evenly spread over the slots, from the whole bucket's own slot on.
//!
//! A part's tag is `<identity>#<part>.<salt>`. Without the salt, tags that differ in a digit would share a quarter of the
//! cluster: CRC-16 moves a digit at the end to only a few slots. The salt is four letters that bring the tag to its slot.
//! CRC-16 is linear (Redis uses the variant that begins with 0), so what four letters do to the slot of whatever stands
//! before them is always the same difference, and a table of all differences finds the salt without a search. Every
//! gateway has the same table, and so the same keys.

use std::sync::LazyLock;

use resp_client::{SLOTS, tag_slot};

const LETTERS: usize = 4;
type Salt = [u8; LETTERS];
const FIRST: Salt = *b"aaaa";

/// By the difference that it makes to the slot: the first salt in the order of the alphabet.
static SALTS: LazyLock<Box<[Salt]>> = LazyLock::new(|| {
    let mut salts = vec![[0; LETTERS]; usize::from(SLOTS)];
    let (first, mut salt, mut missing) = (tag_slot(&FIRST), FIRST, salts.len());
    // All 16,384 differences are among the 456,976 salts; a test shows it.
    while missing > 0 {
        let known = &mut salts[usize::from(first ^ tag_slot(&salt))];
        if known[0] == 0 {
            *known = salt;
            missing -= 1;
        }
        if !next(&mut salt) {
            break;
        }
    }
    salts.into()
});

/// The next in the order of the alphabet, if there is one.
fn next(salt: &mut Salt) -> bool {
    for letter in salt.iter_mut().rev() {
        if *letter < b'z' {
            *letter += 1;
            return true;
        }
        *letter = b'a';
    }
    false
}

/// Makes the table, which takes some milliseconds: for whoever has the time, before a check needs it.
pub fn prepare() {
    LazyLock::force(&SALTS);
}

/// Turns the encoded identity of a whole bucket into the tag of one of its `of` parts. Returns its slot.
pub(super) fn append_part(tag: &mut Vec<u8>, part: u32, of: u32) -> u16 {
    let home = u32::from(tag_slot(tag));
    let slots = u32::from(SLOTS);
    // There are at most 1,024 parts. Below the number of slots, so it fits.
    let slot = ((home + part * slots / of.max(1)) % slots) as u16;
    tag.push(b'#');
    tag.extend_from_slice(itoa::Buffer::new().format(part).as_bytes());
    tag.push(b'.');
    let at = tag.len();
    tag.extend_from_slice(&FIRST);
    let salt = SALTS[usize::from(tag_slot(tag) ^ slot)];
    tag[at..].copy_from_slice(&salt);
    slot
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_where_they_should_be() {
        for (identity, of) in [("key=a", 10), ("key=a", 1_024), ("*", 3), ("ip=10.0.0.1&path=%2Fv1", 7)] {
            let home = tag_slot(identity.as_bytes());
            for part in 0..of {
                let mut tag = identity.as_bytes().to_vec();
                let slot = append_part(&mut tag, part, of);
                assert_eq!(tag_slot(&tag), slot, "{}", tag.escape_ascii());
                assert_eq!(u32::from(slot), (u32::from(home) + part * 16_384 / of) % 16_384);
            }
        }
    }

    #[test]
    fn keys_are_the_same_for_ever() {
        let tag = |part| {
            let mut tag = b"key=a".to_vec();
            append_part(&mut tag, part, 10);
            String::from_utf8(tag).unwrap()
        };
        assert_eq!([tag(0), tag(1), tag(9)], ["key=a#0.bhmd", "key=a#1.bgxx", "key=a#9.ahtn"]);
    }
}
