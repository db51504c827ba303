//! The encoded identity: the one spelling of "whose bucket is it" that all gateways agree on.
//!
//! An identity is the rule's `per` attributes with the values of one request. It is encoded as
//! `name=value` pairs sorted by name and joined by `&`, each percent-encoded except for unreserved characters
//! (RFC 3986, section 2.3), so that two rules with the same `per` in another order share it. Over
//! [`ENCODED_BYTES_MAX`] bytes it is replaced by `xxh3:` and the 128-bit hash in hexadecimal. The empty identity is `*`.
//!
//! Rollout and store keys hash this text with fixed seeds, so every gateway comes to the same result.

use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

use crate::model::ROLLOUT_BP_ALL;

/// Longer encodings, in bytes, are replaced by their hash.
pub const ENCODED_BYTES_MAX: usize = 128;

/// Appends the encoded identity to `out`. The pairs must come sorted by name.
///
/// `out` grows to three times the pairs' bytes before a long encoding is replaced.
pub fn encode<'a>(pairs: impl IntoIterator<Item = (&'a str, &'a [u8])>, out: &mut Vec<u8>) {
    let start = out.len();
    encode_unshortened(pairs, out);
    shorten(start, out);
}

/// The same, and as long as it comes: [`shorten`] is for the caller.
pub(crate) fn encode_unshortened<'a>(pairs: impl IntoIterator<Item = (&'a str, &'a [u8])>, out: &mut Vec<u8>) {
    let start = out.len();
    for (name, value) in pairs {
        if out.len() > start {
            out.push(b'&');
        }
        percent_encode(name.as_bytes(), out);
        out.push(b'=');
        percent_encode(value, out);
    }
    if out.len() == start {
        out.push(b'*');
    }
}

/// Appends a value as an identity has it.
pub fn encode_value(value: &[u8], out: &mut Vec<u8>) {
    percent_encode(value, out);
}

/// Replaces an encoding that begins at `start` and is too long by its hash.
pub fn shorten(start: usize, out: &mut Vec<u8>) {
    if out.len() - start > ENCODED_BYTES_MAX {
        let hash = xxh3_128(&out[start..]);
        out.truncate(start);
        out.extend_from_slice(b"xxh3:");
        for shift in (0..128).step_by(4).rev() {
            out.push(HEX[(hash >> shift) as usize & 15]);
        }
    }
}

/// Appends the encoded identity of a throttle call, whose key is all there is. It meets no rule's: a rule's has `=` or is
/// `*`, and both are escaped here.
pub fn encode_key(key: &[u8], out: &mut Vec<u8>) {
    let start = out.len();
    percent_encode(key, out);
    shorten(start, out);
}

/// Where an identity stands in a rule's rollout: 0..10,000. The rule covers it when this is below `rollout_bp`.
///
/// `scratch` is overwritten; it carries its capacity from call to call so that the hot path does not allocate.
pub fn rollout_point<'a>(
    rule_name: &str,
    pairs: impl IntoIterator<Item = (&'a str, &'a [u8])>,
    scratch: &mut Vec<u8>,
) -> u16 {
    scratch.clear();
    scratch.extend_from_slice(rule_name.as_bytes());
    scratch.push(0);
    encode(pairs, scratch);
    // The remainder is below 10,000, so it fits.
    (xxh3_64(scratch) % u64::from(ROLLOUT_BP_ALL)) as u16
}

const HEX: &[u8; 16] = b"0123456789abcdef";
const HEX_UPPER: &[u8; 16] = b"0123456789ABCDEF";

/// Characters that stand for themselves.
const UNRESERVED: [bool; 256] = {
    let mut table = [false; 256];
    let mut byte = 0;
    while byte < 256 {
        let character = byte as u8;
        table[byte] = character.is_ascii_alphanumeric() || matches!(character, b'-' | b'_' | b'.' | b'~');
        byte += 1;
    }
    table
};

fn percent_encode(bytes: &[u8], out: &mut Vec<u8>) {
    // Most values need no escape, and are copied at once.
    if bytes.iter().all(|&byte| UNRESERVED[usize::from(byte)]) {
        out.extend_from_slice(bytes);
        return;
    }
    for &byte in bytes {
        if UNRESERVED[usize::from(byte)] {
            out.push(byte);
        } else {
            out.extend_from_slice(&[b'%', HEX_UPPER[usize::from(byte >> 4)], HEX_UPPER[usize::from(byte & 15)]]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encoded(pairs: &[(&str, &[u8])]) -> String {
        let mut out = Vec::new();
        encode(pairs.iter().copied(), &mut out);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn pairs_are_joined_and_escaped() {
        assert_eq!(encoded(&[("ip", b"10.0.0.1"), ("key", b"a=b&c%{}")]), "ip=10.0.0.1&key=a%3Db%26c%25%7B%7D");
        assert_eq!(encoded(&[("key", b"")]), "key=");
        assert_eq!(encoded(&[]), "*");
    }

    #[test]
    fn long_identities_become_their_hash() {
        let long = [b'a'; 200];
        let text = encoded(&[("key", &long)]);
        assert!(text.starts_with("xxh3:") && text.len() == 37, "{text}");
        assert_ne!(text, encoded(&[("key", &long[..199])]));
        assert_eq!(encoded(&[("key", &long[..124])]).len(), 128);
    }

    #[test]
    fn the_rollout_point_is_the_documented_hash() {
        let point = rollout_point("login", [("key", &b"ak"[..])], &mut Vec::new());
        assert_eq!(u64::from(point), xxh3_64(b"login\0key=ak") % 10_000);
    }
}
