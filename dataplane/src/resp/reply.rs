//! Answers to bytes. Each function appends one complete RESP value.

use super::{command::Dialect, writer::Writer};
use crate::decision::{Answer, Verdict};

/// Bytes of a reply's head: the framing and a limit of at most 20 characters.
const HEAD_BYTES: usize = 32;
/// Bytes of a reply's tail that are copied as one block.
const TAIL_BYTES: usize = 64;

/// What a check's reply says of the rule that decided, as bytes; made once per policy.
#[derive(Debug)]
pub struct RuleReply {
    /// An allow up to its limit and the next value's marker, for the rule's own limit: no digits need to be made.
    head: [u8; HEAD_BYTES],
    head_len: usize,
    limit: i64,
    /// From the last value's end: the rule's name as a bulk string.
    tail: [u8; TAIL_BYTES],
    tail_len: usize,
    /// The tail where it is longer than its block.
    long_tail: Box<[u8]>,
}

/// Where in a head the answer is.
const ANSWER_AT: usize = 5;

impl RuleReply {
    /// For a rule's name and its own limit; an empty name and [`UNLIMITED`](crate::decision::UNLIMITED) where no rule
    /// decided.
    pub fn new(name: &str, limit: i64) -> Self {
        let head = format!("*6\r\n:1\r\n:{limit}\r\n:");
        let tail = format!("\r\n${}\r\n{name}\r\n", name.len());
        let mut reply = Self {
            head: [0; HEAD_BYTES],
            head_len: head.len(),
            limit,
            tail: [0; TAIL_BYTES],
            tail_len: tail.len(),
            long_tail: [].into(),
        };
        reply.head[..head.len()].copy_from_slice(head.as_bytes());
        match reply.tail.get_mut(..tail.len()) {
            Some(block) => block.copy_from_slice(tail.as_bytes()),
            None => reply.long_tail = tail.into_bytes().into(),
        }
        reply
    }

    /// An allow by the rule's own limit.
    #[inline(always)]
    pub fn allow(&self, remaining: u32, reset_after_ms: u64, out: &mut Vec<u8>) {
        let mut writer = Writer::new(out);
        writer.put(&self.head, self.head_len);
        writer.digits(u64::from(remaining));
        writer.put(b"\r\n:0\r\n:", 7);
        writer.digits(reset_after_ms);
        self.end(writer);
    }

    /// A deny by the rule's own limit.
    #[inline(always)]
    pub fn deny(&self, remaining: u32, retry_after_ms: u64, reset_after_ms: u64, out: &mut Vec<u8>) {
        let mut writer = Writer::new(out);
        let mut head = self.head;
        head[ANSWER_AT] = b'0';
        writer.put(&head, self.head_len);
        writer.digits(u64::from(remaining));
        writer.put(b"\r\n:", 3);
        writer.digits(retry_after_ms);
        writer.put(b"\r\n:", 3);
        writer.digits(reset_after_ms);
        self.end(writer);
    }

    #[inline(always)]
    fn end(&self, mut writer: Writer<'_>) {
        if self.tail_len <= TAIL_BYTES {
            writer.put(&self.tail, self.tail_len);
            writer.finish();
        } else {
            writer.finish_with(&self.long_tail);
        }
    }
}

/// Decimal digits.
///
/// Three digits at a time from a table: most of what a reply counts is short. Each entry is the digits from its lowest
/// byte, and how many they are in its highest.
impl Writer<'_> {
    #[inline(always)]
    fn digits(&mut self, value: u64) {
        let bound = self.bound::<DIGITS_MAX>();
        if value < 1000 {
            self.entry(SHORT[value as usize]);
        } else if value < 1_000_000 {
            let value = value as u32;
            self.entry(SHORT[(value / 1000) as usize]);
            self.entry(THREE[(value % 1000) as usize]);
        } else {
            let (digits, len) = many_digits(value);
            self.put(&digits, len);
        }
        self.reach(bound);
    }

    #[inline(always)]
    fn entry(&mut self, entry: u32) {
        self.put(&entry.to_le_bytes(), (entry >> 24) as usize);
    }

    #[inline(always)]
    fn integer(&mut self, value: i64) {
        if value < 0 {
            self.put(b"-", 1);
        }
        self.digits(value.unsigned_abs());
    }
}

/// Digits of the longest number.
const DIGITS_MAX: usize = 20;

#[inline(never)]
fn many_digits(value: u64) -> ([u8; DIGITS_MAX], usize) {
    let mut buffer = itoa::Buffer::new();
    let text = buffer.format(value).as_bytes();
    let mut digits = [0; DIGITS_MAX];
    digits[..text.len()].copy_from_slice(text);
    (digits, text.len())
}

const SHORT: [u32; 1000] = digits_table(false);
const THREE: [u32; 1000] = digits_table(true);

/// The digits of 0..1000, with leading zeros or without.
const fn digits_table(padded: bool) -> [u32; 1000] {
    let mut table = [0; 1000];
    let mut value = 0;
    while value < 1000 {
        let digits = (value / 100 + 0x30) | (value / 10 % 10 + 0x30) << 8 | (value % 10 + 0x30) << 16;
        let len = if padded || value >= 100 {
            3
        } else if value >= 10 {
            2
        } else {
            1
        };
        table[value as usize] = digits >> (8 * (3 - len)) | len << 24;
        value += 1;
    }
    table
}

/// CHECK: `allowed(1/0/-1), limit, remaining, retry_after_ms, reset_after_ms, rule`.
pub fn check(verdict: &Verdict, rule: &RuleReply, out: &mut Vec<u8>) {
    let mut writer = Writer::new(out);
    let answer = match verdict.answer {
        Answer::Allow => 1,
        Answer::Deny => 0,
        Answer::Unavailable => -1,
    };
    if verdict.limit == rule.limit && answer >= 0 {
        let mut head = rule.head;
        head[ANSWER_AT] = b'0' + answer as u8;
        writer.put(&head, rule.head_len);
    } else {
        writer.put(b"*6\r\n:", 5);
        writer.integer(answer);
        writer.put(b"\r\n:", 3);
        writer.integer(verdict.limit);
        writer.put(b"\r\n:", 3);
    }
    writer.integer(verdict.remaining);
    writer.put(b"\r\n:", 3);
    writer.integer(verdict.retry_after_ms);
    writer.put(b"\r\n:", 3);
    writer.integer(verdict.reset_after_ms);
    rule.end(writer);
}

/// What a throttle call is told that nobody can decide: its replies have no word for that.
const UNAVAILABLE: &str = "UNAVAILABLE the store does not answer (setting redis.throttle_on_failure)";

/// A throttle call's answer, in the words of its dialect.
pub fn in_dialect(dialect: Dialect, verdict: &Verdict, out: &mut Vec<u8>) {
    match dialect {
        Dialect::RedisCell => cl_throttle(verdict, out),
        Dialect::Throttlecrab => throttle(verdict, out),
    }
}

/// CL.THROTTLE, as redis-cell: `limited(0/1), max_burst + 1, remaining, retry_after_s or -1, reset_after_s`.
fn cl_throttle(verdict: &Verdict, out: &mut Vec<u8>) {
    let (limited, retry_after) = match verdict.answer {
        Answer::Allow => (0, -1),
        Answer::Deny => (1, seconds(verdict.retry_after_ms)),
        Answer::Unavailable => return error(UNAVAILABLE, out),
    };
    integers([limited, verdict.limit, verdict.remaining, retry_after, seconds(verdict.reset_after_ms)], out);
}

/// THROTTLE, as throttlecrab: `allowed(1/0), max_burst, remaining, reset_after_s, retry_after_s`.
fn throttle(verdict: &Verdict, out: &mut Vec<u8>) {
    let (allowed, retry_after) = match verdict.answer {
        Answer::Allow => (1, 0),
        Answer::Deny => (0, seconds(verdict.retry_after_ms)),
        Answer::Unavailable => return error(UNAVAILABLE, out),
    };
    integers([allowed, verdict.limit, verdict.remaining, seconds(verdict.reset_after_ms), retry_after], out);
}

/// Milliseconds as whole seconds, rounded up so that waiting for them is enough; -1 (never) stays.
fn seconds(ms: i64) -> i64 {
    if ms <= 0 { ms } else { (ms - 1) / 1000 + 1 }
}

fn integers(values: [i64; 5], out: &mut Vec<u8>) {
    let mut writer = Writer::new(out);
    writer.put(b"*5\r\n", 4);
    for value in values {
        writer.put(b":", 1);
        writer.integer(value);
        writer.put(b"\r\n", 2);
    }
    writer.finish();
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

/// The answer to someone who speaks HTTP: that it is spoken elsewhere. The connection is closed behind it.
pub fn http_refusal(text: &str, has_body: bool, out: &mut Vec<u8>) {
    let head = "HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n";
    out.extend_from_slice(format!("{head}Content-Length: {}\r\n\r\n", text.len()).as_bytes());
    if has_body {
        out.extend_from_slice(text.as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_round_up_and_never_stays() {
        assert_eq!([-1, 0, 1, 1000, 1001].map(seconds), [-1, 0, 1, 1, 2]);
    }

    #[test]
    fn the_longest_reply_fits_its_room() {
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
        check(&verdict, &RuleReply::new(&name, 5), &mut out);
        integers([i64::MIN; 5], &mut out);
        let text = String::from_utf8(out).unwrap();
        assert!(text.starts_with("*6\r\n:0\r\n:-9223372036854775808\r\n") && text.contains(&name));
    }

    proptest::proptest! {
        #[test]
        fn integers_are_written_as_they_are(value in proptest::prelude::prop_oneof![0i64..200, 0i64..1 << 40, proptest::prelude::any::<i64>()]) {
            let mut out = Vec::new();
            let mut writer = Writer::new(&mut out);
            writer.integer(value);
            writer.finish();
            let text = std::str::from_utf8(&out).unwrap();
            proptest::prop_assert_eq!(text, value.to_string());
        }
    }

    #[test]
    fn an_allow_in_a_hurry_is_the_allow_of_a_verdict() {
        for (name, limit) in [("", 7), ("login-per-key", 1_000), (&"n".repeat(128), i64::from(u32::MAX))] {
            for (remaining, reset_after_ms) in
                [(0, 0), (9, 10), (999, 1_000), (1_000_000, 999_999), (u32::MAX, 1 << 40)]
            {
                let rule = RuleReply::new(name, limit);
                let verdict = Verdict {
                    answer: Answer::Allow,
                    limit,
                    remaining: i64::from(remaining),
                    retry_after_ms: 0,
                    reset_after_ms,
                    rule: Some(0),
                };
                let (mut short, mut long) = (Vec::new(), Vec::new());
                rule.allow(remaining, reset_after_ms as u64, &mut short);
                check(&verdict, &rule, &mut long);
                assert_eq!(short, long);
                let text = format!(
                    "*6\r\n:1\r\n:{limit}\r\n:{remaining}\r\n:0\r\n:{reset_after_ms}\r\n${}\r\n{name}\r\n",
                    name.len()
                );
                assert_eq!(String::from_utf8(long).unwrap(), text);
            }
        }
    }

    #[test]
    fn an_error_cannot_carry_a_line_break() {
        let mut out = Vec::new();
        error("ERR a\r\n+OK", &mut out);
        assert_eq!(out, b"-ERR a??+OK\r\n");
    }
}
