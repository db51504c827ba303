//! Answers to bytes. Each function appends one complete RESP value.

use crate::{
    decision::{Answer, Verdict},
    limits::CHECK_REPLY_BYTES_MAX,
};

/// The last part of a check's reply: the rule's name as a bulk string. Made once per policy.
pub fn rule_tail(name: &str) -> Box<[u8]> {
    format!("${}\r\n{name}\r\n", name.len()).into_bytes().into()
}

/// The tail where no rule decided: an empty name.
pub const NO_RULE_TAIL: &[u8] = b"$0\r\n\r\n";

/// A reply under construction on the stack, so that the output buffer is touched once per reply.
struct Scratch {
    bytes: [u8; CHECK_REPLY_BYTES_MAX],
    len: usize,
}

impl Scratch {
    #[inline(always)]
    fn new(head: &[u8]) -> Self {
        let mut scratch = Self { bytes: [0; CHECK_REPLY_BYTES_MAX], len: 0 };
        scratch.push(head);
        scratch
    }

    #[inline(always)]
    fn push(&mut self, bytes: &[u8]) {
        self.bytes[self.len..self.len + bytes.len()].copy_from_slice(bytes);
        self.len += bytes.len();
    }

    #[inline(always)]
    fn integer(&mut self, value: i64) {
        if (0..10).contains(&value) {
            // In 0..10, so the digit fits.
            self.push(&[b':', b'0' + value as u8, b'\r', b'\n']);
        } else {
            self.push(b":");
            self.push(itoa::Buffer::new().format(value).as_bytes());
            self.push(b"\r\n");
        }
    }
}

/// CHECK: `allowed(1/0), limit, remaining, retry_after_ms, reset_after_ms, rule`.
#[inline(always)]
pub fn check(verdict: &Verdict, rule_tail: &[u8], out: &mut Vec<u8>) {
    let head: &[u8] = match verdict.answer {
        Answer::Allow => b"*6\r\n:1\r\n",
        Answer::Deny => b"*6\r\n:0\r\n",
    };
    let mut scratch = Scratch::new(head);
    scratch.integer(verdict.limit);
    scratch.integer(verdict.remaining);
    scratch.integer(verdict.retry_after_ms);
    scratch.integer(verdict.reset_after_ms);
    scratch.push(rule_tail);
    out.extend_from_slice(&scratch.bytes[..scratch.len]);
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
    let mut scratch = Scratch::new(b"*5\r\n");
    for value in values {
        scratch.integer(value);
    }
    out.extend_from_slice(&scratch.bytes[..scratch.len]);
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
        check(&verdict, &rule_tail(&name), &mut out);
        assert!(out.len() <= CHECK_REPLY_BYTES_MAX, "{}", out.len());
    }

    #[test]
    fn an_error_cannot_carry_a_line_break() {
        let mut out = Vec::new();
        error("ERR a\r\n+OK", &mut out);
        assert_eq!(out, b"-ERR a??+OK\r\n");
    }
}
