//! Answers to bytes. Each function appends one complete RESP value.

use crate::{
    decision::{Answer, Verdict},
    limits::CHECK_HEAD_BYTES_MAX,
};

/// Bytes that are copied as one block, whatever their number: the copy is a few wide moves and no call.
const BLOCK_BYTES: usize = 64;

/// Bytes of an allow up to its limit: the framing and at most 20 characters.
const ALLOW_BYTES: usize = 32;

/// The last part of a check's reply: the rule's name as a bulk string. Made once per policy.
#[derive(Debug)]
pub struct RuleTail {
    /// The beginning of an allow with the rule's own limit, which needs no digits to be made.
    allow: [u8; ALLOW_BYTES],
    allow_len: usize,
    allow_limit: i64,
    /// The bytes, where they fit; the rest is never shown.
    block: [u8; BLOCK_BYTES],
    len: usize,
    /// The bytes, where they do not.
    long: Box<[u8]>,
}

impl RuleTail {
    /// The tail for a rule's name and its own limit; an empty name and [`UNLIMITED`](crate::decision::UNLIMITED) where
    /// no rule decided.
    pub fn new(name: &str, limit: i64) -> Self {
        let mut allow = [0; ALLOW_BYTES];
        let head = format!("*6\r\n:1\r\n:{limit}\r\n");
        allow[..head.len()].copy_from_slice(head.as_bytes());
        let (allow_len, allow_limit) = (head.len(), limit);
        let bytes = format!("${}\r\n{name}\r\n", name.len()).into_bytes();
        let mut block = [0; BLOCK_BYTES];
        if bytes.len() <= BLOCK_BYTES {
            block[..bytes.len()].copy_from_slice(&bytes);
            return Self { allow, allow_len, allow_limit, block, len: bytes.len(), long: [].into() };
        }
        Self { allow, allow_len, allow_limit, block, len: bytes.len(), long: bytes.into() }
    }

    #[inline(always)]
    fn append(&self, out: &mut Vec<u8>) {
        if self.len <= BLOCK_BYTES {
            append_block(&self.block, self.len, out);
        } else {
            out.extend_from_slice(&self.long);
        }
    }
}

/// Appends the first `len` bytes of a block.
#[inline(always)]
fn append_block(block: &[u8; BLOCK_BYTES], len: usize, out: &mut Vec<u8>) {
    let end = out.len() + len;
    out.extend_from_slice(block);
    out.truncate(end);
}

/// A reply's integers under construction on the stack, so that the output buffer is touched once.
struct Scratch {
    bytes: [u8; CHECK_HEAD_BYTES_MAX],
    len: usize,
}

impl Scratch {
    #[inline(always)]
    fn new<const N: usize>(head: [u8; N]) -> Self {
        let mut scratch = Self { bytes: [0; CHECK_HEAD_BYTES_MAX], len: 0 };
        scratch.put(head, N);
        scratch
    }

    /// Writes all of `bytes` and counts the first `len` of them.
    #[inline(always)]
    fn put<const N: usize>(&mut self, bytes: [u8; N], len: usize) {
        self.bytes[self.len..self.len + N].copy_from_slice(&bytes);
        self.len += len;
    }

    #[inline(always)]
    fn integer(&mut self, value: i64) {
        match u32::try_from(value) {
            Ok(small @ 0..10) => self.put([b':', b'0' + small as u8, b'\r', b'\n'], 4),
            Ok(small @ 10..100_000_000) => {
                let digits = eight_digits(small);
                // Little endian: the first digit is the lowest byte, and leading zeros are trailing ones.
                let zeros = digits.trailing_zeros() / 8;
                self.put([b':'], 1);
                self.put(((digits | 0x3030_3030_3030_3030) >> (8 * zeros)).to_le_bytes(), 8 - zeros as usize);
                self.put(*b"\r\n", 2);
            }
            _ => self.long_integer(value),
        }
    }

    #[cold]
    #[inline(never)]
    fn long_integer(&mut self, value: i64) {
        let mut buffer = itoa::Buffer::new();
        let text = buffer.format(value).as_bytes();
        self.put([b':'], 1);
        self.bytes[self.len..self.len + text.len()].copy_from_slice(text);
        self.len += text.len();
        self.put(*b"\r\n", 2);
    }

    #[inline(always)]
    fn append(&self, out: &mut Vec<u8>) {
        if let Some(block) = self.bytes.first_chunk()
            && self.len <= BLOCK_BYTES
        {
            append_block(block, self.len, out);
        } else {
            out.extend_from_slice(&self.bytes[..self.len]);
        }
    }
}

/// The eight decimal digits of a number below 100,000,000, one per byte, the first in the lowest.
///
/// Splits four-digit halves into two-digit quarters and those into digits, all lanes at once; the multiplications by
/// 10486 / 2^20 and 103 / 2^10 are divisions by 100 and 10, exact for the lanes' ranges.
#[inline(always)]
fn eight_digits(number: u32) -> u64 {
    let halves = u64::from(number / 10_000) | u64::from(number % 10_000) << 32;
    let hundreds = ((halves * 10_486) >> 20) & 0x0000_007F_0000_007F;
    let pairs = hundreds | (halves - 100 * hundreds) << 16;
    let tens = ((pairs * 103) >> 10) & 0x000F_000F_000F_000F;
    tens | (pairs - 10 * tens) << 8
}

/// CHECK: `allowed(1/0), limit, remaining, retry_after_ms, reset_after_ms, rule`.
#[inline(always)]
pub fn check(verdict: &Verdict, rule_tail: &RuleTail, out: &mut Vec<u8>) {
    let mut scratch = Scratch { bytes: [0; CHECK_HEAD_BYTES_MAX], len: 0 };
    if verdict.answer == Answer::Allow && verdict.limit == rule_tail.allow_limit {
        scratch.put(rule_tail.allow, rule_tail.allow_len);
        scratch.integer(verdict.remaining);
        scratch.put(*b":0\r\n", 4);
    } else {
        scratch.put(if verdict.answer == Answer::Allow { *b"*6\r\n:1\r\n" } else { *b"*6\r\n:0\r\n" }, 8);
        scratch.integer(verdict.limit);
        scratch.integer(verdict.remaining);
        scratch.integer(verdict.retry_after_ms);
    }
    scratch.integer(verdict.reset_after_ms);
    scratch.append(out);
    rule_tail.append(out);
}

/// CL.THROTTLE, as redis-cell: `limited(0/1), max_burst + 1, remaining, retry_after_s or -1, reset_after_s`.
pub fn cl_throttle(verdict: &Verdict, out: &mut Vec<u8>) {
    let (limited, retry_after) = match verdict.answer {
        Answer::Allow => (0, -1),
        Answer::Deny => (1, seconds(verdict.retry_after_ms)),
    };
    integers([limited, verdict.limit, verdict.remaining, retry_after, seconds(verdict.reset_after_ms)], out);
}

/// THROTTLE, as throttlecrab: `allowed(1/0), max_burst, remaining, reset_after_s, retry_after_s`.
pub fn throttle(verdict: &Verdict, out: &mut Vec<u8>) {
    let (allowed, retry_after) = match verdict.answer {
        Answer::Allow => (1, 0),
        Answer::Deny => (0, seconds(verdict.retry_after_ms)),
    };
    integers([allowed, verdict.limit, verdict.remaining, seconds(verdict.reset_after_ms), retry_after], out);
}

/// Milliseconds as whole seconds, rounded up so that waiting for them is enough; -1 (never) stays.
fn seconds(ms: i64) -> i64 {
    if ms <= 0 { ms } else { (ms - 1) / 1000 + 1 }
}

fn integers(values: [i64; 5], out: &mut Vec<u8>) {
    let mut scratch = Scratch::new(*b"*5\r\n");
    for value in values {
        scratch.integer(value);
    }
    scratch.append(out);
}

/// `+text`. The text must hold no line break.
pub fn simple(text: &str, out: &mut Vec<u8>) {
    out.push(b'+');
    out.extend_from_slice(text.as_bytes());
    out.extend_from_slice(b"\r\n");
}

/// `-text`. Line breaks and other control characters, which may come from a client, are replaced.
pub fn error(text: &str, out: &mut Vec<u8>) {
    out.push(b'-');
    out.extend(text.bytes().map(|byte| if byte.is_ascii_control() { b'?' } else { byte }));
    out.extend_from_slice(b"\r\n");
}

/// `:value`.
pub fn integer(value: i64, out: &mut Vec<u8>) {
    out.push(b':');
    out.extend_from_slice(itoa::Buffer::new().format(value).as_bytes());
    out.extend_from_slice(b"\r\n");
}

/// A bulk string.
pub fn bulk(bytes: &[u8], out: &mut Vec<u8>) {
    header(b'$', bytes.len(), out);
    out.extend_from_slice(bytes);
    out.extend_from_slice(b"\r\n");
}

/// The header of an array of `len` values, which must follow.
pub fn array(len: usize, out: &mut Vec<u8>) {
    header(b'*', len, out);
}

/// The header of a map of `len` pairs, which must follow: a map in RESP3, a flat array in RESP2.
pub fn map(len: usize, resp3: bool, out: &mut Vec<u8>) {
    if resp3 {
        header(b'%', len, out);
    } else {
        header(b'*', 2 * len, out);
    }
}

/// Nothing: `_` in RESP3, a null bulk string in RESP2.
pub fn null(resp3: bool, out: &mut Vec<u8>) {
    out.extend_from_slice(if resp3 { b"_\r\n" } else { b"$-1\r\n" });
}

fn header(marker: u8, len: usize, out: &mut Vec<u8>) {
    out.push(marker);
    out.extend_from_slice(itoa::Buffer::new().format(len).as_bytes());
    out.extend_from_slice(b"\r\n");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_round_up_and_never_stays() {
        assert_eq!([-1, 0, 1, 1000, 1001].map(seconds), [-1, 0, 1, 1, 2]);
    }

    #[test]
    fn the_longest_reply_fits_the_scratch() {
        let name = "n".repeat(policy_sync::model::NAME_BYTES_MAX);
        let verdict = Verdict {
            answer: Answer::Deny,
            limit: i64::MIN,
            remaining: i64::MIN,
            retry_after_ms: i64::MIN,
            reset_after_ms: i64::MIN,
            rule: Some(0),
        };
        let mut out = Vec::new();
        check(&verdict, &RuleTail::new(&name, 5), &mut out);
        integers([i64::MIN; 5], &mut out);
        let text = String::from_utf8(out).unwrap();
        assert!(text.starts_with("*6\r\n:0\r\n:-9223372036854775808\r\n") && text.contains(&name));
    }

    proptest::proptest! {
        #[test]
        fn integers_are_written_as_they_are(value in proptest::prelude::prop_oneof![0i64..200, 0i64..1 << 40, proptest::prelude::any::<i64>()]) {
            let mut scratch = Scratch::new([]);
            scratch.integer(value);
            let text = std::str::from_utf8(&scratch.bytes[..scratch.len]).unwrap();
            proptest::prop_assert_eq!(text, format!(":{value}\r\n"));
        }
    }

    #[test]
    fn an_error_cannot_carry_a_line_break() {
        let mut out = Vec::new();
        error("ERR a\r\n+OK", &mut out);
        assert_eq!(out, b"-ERR a??+OK\r\n");
    }
}
