//! Replies: bytes in, counts out, or what was wrong.
//!
//! A [`Verifier`] is fed what came on one connection, cut anywhere, and holds it against the batch that was sent: each
//! reply must have the form of its protocol and numbers that can be true together, each probe's reply must be its token
//! and come at exactly its place, and there must be as many replies as requests. Bytes are scanned in place; no value is
//! built. Only a reply that is cut in two is copied.
//!
//! What a whole thread has seen, whichever connection it came on, is in its [`Ledger`].

use std::{collections::HashMap, fmt};

use crate::{
    args::{Args, Protocol},
    requests::Batch,
};

/// Longer replies are malformed, or not worth waiting for.
const REPLY_BYTES_MAX: usize = 64 * 1024;

/// How many replies of each kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    /// Replies in all, probes included.
    pub replies: u64,
    /// Checks that may pass.
    pub allowed: u64,
    /// Checks that may not.
    pub denied: u64,
    /// Checks that the server could not decide.
    pub unavailable: u64,
    /// Error replies.
    pub errors: u64,
    /// Probes.
    pub probes: u64,
}

/// What a thread has seen.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ledger {
    /// Since measuring began.
    pub tally: Tally,
    /// Limit by rule; the rule as the end of a reply, `$len\r\nname\r\n`.
    limits: HashMap<Box<[u8]>, i64>,
    last_rule: Vec<u8>,
    last_limit: i64,
}

/// What a reply must be like.
#[derive(Clone, Debug)]
pub(crate) struct Expectations {
    protocol: Protocol,
    /// The limit that a throttle must report.
    limit: i64,
    rule: Option<Box<[u8]>>,
    allow_errors: bool,
    varying_limits: bool,
}

/// Where the replies of one connection are.
#[derive(Debug, Default)]
pub(crate) struct Verifier {
    /// Requests whose replies are due.
    due: u32,
    /// Replies of this batch that have come.
    got: u32,
    /// The next probe of this batch.
    probe: usize,
    /// Replies before this batch.
    before: u64,
    /// The beginning of a reply whose end has not come.
    carry: Vec<u8>,
    /// Echoed bytes of this batch that have come.
    echoed: usize,
}

/// A reply that is not what it must be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Wrong {
    /// Which request of the connection, from 0.
    pub index: u64,
    /// What was expected.
    pub expected: String,
    /// What came.
    pub came: String,
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "request {}: expected {}, came {}", self.index, self.expected, self.came)
    }
}

/// Why a reply was not taken.
enum Stop {
    /// Its end has not come.
    Partial,
    /// It is wrong; what was expected.
    Wrong(String),
}

/// What a reply was.
enum Kind {
    Allowed,
    Denied,
    Unavailable,
    Error,
    Probe,
    Other,
}

impl Expectations {
    /// What the arguments lead to expect.
    pub(crate) fn new(args: &Args) -> Self {
        Self {
            protocol: args.protocol,
            limit: i64::from(args.burst) + i64::from(args.protocol == Protocol::ClThrottle),
            rule: args.expect_rule.as_ref().map(|name| format!("${}\r\n{name}\r\n", name.len()).into_bytes().into()),
            allow_errors: args.allow_errors,
            varying_limits: args.varying_limits,
        }
    }
}

impl Tally {
    /// Both together.
    pub(crate) fn add(&mut self, other: &Self) {
        self.replies += other.replies;
        self.allowed += other.allowed;
        self.denied += other.denied;
        self.unavailable += other.unavailable;
        self.errors += other.errors;
        self.probes += other.probes;
    }

    fn count(&mut self, kind: &Kind) {
        self.replies += 1;
        match kind {
            Kind::Allowed => self.allowed += 1,
            Kind::Denied => self.denied += 1,
            Kind::Unavailable => self.unavailable += 1,
            Kind::Error => self.errors += 1,
            Kind::Probe => self.probes += 1,
            Kind::Other => {}
        }
    }
}

impl Ledger {
    /// Takes over what another thread has seen.
    ///
    /// # Errors
    ///
    /// When the two have seen different limits under one rule.
    pub(crate) fn merge(&mut self, other: &Self, expectations: &Expectations) -> Result<(), String> {
        self.tally.add(&other.tally);
        for (rule, &limit) in &other.limits {
            if let Some(known) = self.limits.insert(rule.clone(), limit)
                && known != limit
                && !expectations.varying_limits
            {
                return Err(format!("one limit of rule {}, came {known} and {limit}", excerpt(rule)));
            }
        }
        Ok(())
    }

    /// Sees to it that a rule always has the same limit. `rule` is the rest of the input; returns the bytes taken.
    fn rule(&mut self, rest: &[u8], limit: i64, expectations: &Expectations) -> Result<usize, Stop> {
        if limit == self.last_limit && !self.last_rule.is_empty() && rest.starts_with(&self.last_rule) {
            return Ok(self.last_rule.len());
        }
        let mut cursor = Cursor { bytes: rest, at: 0 };
        cursor.bulk()?;
        let rule = &rest[..cursor.at];
        if let Some(expected) = &expectations.rule
            && rule != &**expected
        {
            return Err(Stop::Wrong(format!("rule {}", excerpt(expected))));
        }
        match self.limits.get(rule) {
            Some(&known) if known != limit && !expectations.varying_limits => {
                return Err(Stop::Wrong(format!("limit {known}, as this rule had before")));
            }
            Some(_) => {}
            None => {
                self.limits.insert(rule.into(), limit);
            }
        }
        self.last_rule = rule.to_vec();
        self.last_limit = limit;
        Ok(rule.len())
    }
}

impl Verifier {
    /// The first `requests` requests of the connection's batch are being sent.
    pub(crate) fn begin(&mut self, requests: u32) {
        self.before += u64::from(self.got);
        (self.due, self.got, self.probe, self.echoed) = (requests, 0, 0, 0);
    }

    /// Whether all replies of the batch have come.
    pub(crate) fn is_done(&self) -> bool {
        self.got == self.due
    }

    /// Replies that are due.
    pub(crate) fn missing(&self) -> u32 {
        self.due - self.got
    }

    /// Which request of the connection the next reply answers.
    pub(crate) fn index(&self) -> u64 {
        self.before + u64::from(self.got)
    }

    /// Takes what came. Returns how many replies it completed.
    ///
    /// # Errors
    ///
    /// The first reply that is wrong.
    pub(crate) fn feed(
        &mut self,
        bytes: &[u8],
        batch: &Batch,
        expectations: &Expectations,
        ledger: &mut Ledger,
    ) -> Result<u32, Wrong> {
        let before = self.got;
        if expectations.protocol == Protocol::EchoBytes {
            self.echo(bytes, batch, ledger)?;
        } else if self.carry.is_empty() {
            let taken = self.scan(bytes, batch, expectations, ledger)?;
            self.carry.extend_from_slice(&bytes[taken..]);
        } else {
            let mut carry = std::mem::take(&mut self.carry);
            carry.extend_from_slice(bytes);
            let taken = self.scan(&carry, batch, expectations, ledger)?;
            carry.drain(..taken);
            self.carry = carry;
        }
        if self.carry.len() > REPLY_BYTES_MAX {
            return Err(self.wrong("a reply with an end".into(), &self.carry));
        }
        Ok(self.got - before)
    }

    /// Takes all complete replies from the front; returns their bytes.
    fn scan(
        &mut self,
        bytes: &[u8],
        batch: &Batch,
        expectations: &Expectations,
        ledger: &mut Ledger,
    ) -> Result<usize, Wrong> {
        let mut cursor = Cursor { bytes, at: 0 };
        while cursor.at < bytes.len() {
            let start = cursor.at;
            if self.is_done() {
                return Err(self.wrong("no reply, since none is due".into(), &bytes[start..]));
            }
            let is_probe = self.got == batch.probe_index(self.probe);
            let reply = if is_probe { Some(batch.probe_reply(self.probe)) } else { None };
            match one(&mut cursor, reply, expectations, ledger) {
                Ok(kind) => ledger.tally.count(&kind),
                Err(Stop::Partial) => return Ok(start),
                Err(Stop::Wrong(expected)) => return Err(self.wrong(expected, &bytes[start..])),
            }
            self.probe += usize::from(is_probe);
            self.got += 1;
        }
        Ok(cursor.at)
    }

    /// Takes bytes that must be those that were sent.
    fn echo(&mut self, bytes: &[u8], batch: &Batch, ledger: &mut Ledger) -> Result<(), Wrong> {
        let sent = batch.bytes(self.due);
        let expected = &sent[self.echoed..sent.len().min(self.echoed + bytes.len())];
        if bytes != expected {
            let at = bytes.iter().zip(expected).take_while(|(came, sent)| came == sent).count();
            self.got = batch.requests_in(self.echoed + at).min(self.due);
            return Err(self.wrong(format!("the bytes that were sent, {}", excerpt(&expected[at..])), &bytes[at..]));
        }
        self.echoed += bytes.len();
        let got = batch.requests_in(self.echoed);
        ledger.tally.replies += u64::from(got - self.got);
        self.got = got;
        Ok(())
    }

    fn wrong(&self, expected: String, came: &[u8]) -> Wrong {
        Wrong { index: self.index(), expected, came: excerpt(came) }
    }
}

/// Takes one reply; `probe` is what it must be, if that is known.
#[inline]
fn one(
    cursor: &mut Cursor<'_>,
    probe: Option<&[u8]>,
    expectations: &Expectations,
    ledger: &mut Ledger,
) -> Result<Kind, Stop> {
    if cursor.bytes[cursor.at] == b'-' {
        cursor.line()?;
        return if expectations.allow_errors { Ok(Kind::Error) } else { Err(Stop::Wrong("no error".into())) };
    }
    if let Some(reply) = probe {
        cursor.literal(reply)?;
        return Ok(Kind::Probe);
    }
    match expectations.protocol {
        Protocol::Check => check(cursor, expectations, ledger),
        Protocol::ClThrottle | Protocol::Throttle => throttle(cursor, expectations),
        Protocol::Ping => cursor.literal(b"+PONG\r\n").map(|()| Kind::Other),
        Protocol::Incr => {
            cursor.literal(b":")?;
            let value = cursor.integer()?;
            demand(value > 0, "a positive integer")?;
            Ok(Kind::Other)
        }
        Protocol::EchoBytes => Err(Stop::Wrong("bytes, not replies".into())),
    }
}

/// `allowed, limit, remaining, retry_after_ms, reset_after_ms, rule`; a limit of -1 is none.
#[inline]
fn check(cursor: &mut Cursor<'_>, expectations: &Expectations, ledger: &mut Ledger) -> Result<Kind, Stop> {
    cursor.literal(b"*6\r\n:")?;
    let allowed = cursor.integer()?;
    cursor.literal(b":")?;
    let limit = cursor.integer()?;
    cursor.literal(b":")?;
    let remaining = cursor.integer()?;
    cursor.literal(b":")?;
    let retry_after = cursor.integer()?;
    cursor.literal(b":")?;
    let reset_after = cursor.integer()?;
    // Taken only when the reply is whole, so nothing is recorded twice.
    cursor.at += ledger.rule(&cursor.bytes[cursor.at..], limit, expectations)?;
    demand(limit >= -1 && remaining >= -1 && remaining <= limit, "remaining from 0 to the limit, or both -1")?;
    demand((remaining == -1) == (limit == -1), "remaining -1 only without a limit")?;
    demand(reset_after >= -1, "reset-after of at least -1")?;
    match allowed {
        1 => demand(retry_after == 0, "retry-after 0 with an allow").map(|()| Kind::Allowed),
        0 => demand(retry_after > 0 || retry_after == -1, "retry-after above 0, or -1, with a deny")
            .map(|()| Kind::Denied),
        -1 => Ok(Kind::Unavailable),
        _ => Err(Stop::Wrong("allowed as 1, 0 or -1".into())),
    }
}

/// CL.THROTTLE: `limited, burst + 1, remaining, retry-after or -1, reset-after`.
/// THROTTLE: `allowed, burst, remaining, reset-after, retry-after or 0`.
fn throttle(cursor: &mut Cursor<'_>, expectations: &Expectations) -> Result<Kind, Stop> {
    cursor.literal(b"*5\r\n:")?;
    let flag = cursor.integer()?;
    cursor.literal(b":")?;
    let limit = cursor.integer()?;
    cursor.literal(b":")?;
    let remaining = cursor.integer()?;
    cursor.literal(b":")?;
    let fourth = cursor.integer()?;
    cursor.literal(b":")?;
    let fifth = cursor.integer()?;
    demand(matches!(flag, 0 | 1), "a flag of 0 or 1")?;
    if limit != expectations.limit {
        return Err(Stop::Wrong(format!("limit {}", expectations.limit)));
    }
    let is_cell = expectations.protocol == Protocol::ClThrottle;
    // throttlecrab itself counts refill beyond the burst as remaining, so above the limit is no fault there.
    demand(remaining >= 0 && (remaining <= limit || !is_cell), "remaining from 0 to the limit")?;
    let (retry_after, reset_after) = if is_cell { (fourth, fifth) } else { (fifth, fourth) };
    demand(reset_after >= 0, "reset-after of at least 0")?;
    if (flag == 1) == is_cell {
        demand(retry_after >= -1, "retry-after of at least 0, or -1, with a deny").map(|()| Kind::Denied)
    } else {
        let none = if is_cell { -1 } else { 0 };
        demand(retry_after == none, "no retry-after with an allow").map(|()| Kind::Allowed)
    }
}

#[inline(always)]
fn demand(holds: bool, expected: &str) -> Result<(), Stop> {
    if holds { Ok(()) } else { unmet(expected) }
}

#[cold]
fn unmet(expected: &str) -> Result<(), Stop> {
    Err(Stop::Wrong(expected.into()))
}

/// A number of one to six digits and the end of its line at the front of a word (the first byte lowest); also how many
/// bytes these are. All eight bytes are looked at together, which is several times faster than one by one.
#[inline(always)]
fn short_number(word: u64) -> Option<(i64, usize)> {
    const EACH: u64 = 0x0101_0101_0101_0101;
    const LINE_END: u64 = 0x0a0d;
    // 0 to 9 where there is a digit; the high bit of a byte of `others` is set at the first byte that is none.
    let values = word ^ (EACH * 0x30);
    let others = ((values + EACH * 0x76) | values) & (EACH * 0x80);
    let digits = (others.trailing_zeros() / 8) as usize;
    if !(1..=6).contains(&digits) || (word >> (8 * digits)) & 0xffff != LINE_END {
        return None;
    }
    // Leading zeros up to eight digits, then pairs, fours, eight.
    let ones = values << (64 - 8 * digits);
    let pairs = (ones * 10 + (ones >> 8)) & 0x00ff_00ff_00ff_00ff;
    let fours = (pairs * 100 + (pairs >> 16)) & 0x0000_ffff_0000_ffff;
    let value = (fours * 10_000 + (fours >> 32)) & 0xffff_ffff;
    Some((value.cast_signed(), digits + 2))
}

/// Bytes, and how far they are read.
struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Cursor<'_> {
    /// These very bytes.
    #[inline(always)]
    fn literal(&mut self, expected: &[u8]) -> Result<(), Stop> {
        let rest = &self.bytes[self.at..];
        if rest.starts_with(expected) {
            self.at += expected.len();
            return Ok(());
        }
        self.not_literal(expected)
    }

    #[cold]
    fn not_literal(&self, expected: &[u8]) -> Result<(), Stop> {
        let partial = expected.starts_with(&self.bytes[self.at..]);
        Err(if partial { Stop::Partial } else { Stop::Wrong(excerpt(expected)) })
    }

    /// Digits, perhaps with a minus, and the end of the line.
    #[inline(always)]
    fn integer(&mut self) -> Result<i64, Stop> {
        if let Some(word) = self.bytes[self.at..].first_chunk()
            && let Some((value, len)) = short_number(u64::from_le_bytes(*word))
        {
            self.at += len;
            return Ok(value);
        }
        self.any_integer()
    }

    /// The same, byte by byte: for long numbers, negative ones, those at the end of the input, and wrong ones.
    #[inline(never)]
    fn any_integer(&mut self) -> Result<i64, Stop> {
        const DIGITS_MAX: usize = 18;
        let rest = &self.bytes[self.at..];
        let minus = usize::from(rest.first() == Some(&b'-'));
        let mut value = 0_i64;
        let mut at = minus;
        while let Some(digit) = rest.get(at).map(|byte| byte.wrapping_sub(b'0')).filter(|&digit| digit < 10) {
            if at == minus + DIGITS_MAX {
                return Err(Stop::Wrong("an integer of at most 18 digits".into()));
            }
            value = value * 10 + i64::from(digit);
            at += 1;
        }
        self.at += at;
        if at == minus && self.at < self.bytes.len() {
            return Err(Stop::Wrong("an integer".into()));
        }
        self.literal(b"\r\n").map_err(|stop| match stop {
            Stop::Wrong(_) => Stop::Wrong("an integer".into()),
            Stop::Partial => Stop::Partial,
        })?;
        Ok(if minus == 1 { -value } else { value })
    }

    /// `$len`, that many bytes, and the end of the line.
    fn bulk(&mut self) -> Result<(), Stop> {
        self.literal(b"$")?;
        let len = self.integer()?;
        let len = usize::try_from(len).ok().filter(|&len| len <= REPLY_BYTES_MAX);
        let len = len.ok_or_else(|| Stop::Wrong("the length of a word".into()))?;
        if self.bytes.len() - self.at < len {
            return Err(Stop::Partial);
        }
        self.at += len;
        self.literal(b"\r\n")
    }

    /// Up to the end of the line.
    fn line(&mut self) -> Result<(), Stop> {
        match memchr::memchr(b'\n', &self.bytes[self.at..]) {
            Some(end) => {
                self.at += end + 1;
                Ok(())
            }
            None => Err(Stop::Partial),
        }
    }
}

/// The beginning of some bytes, readable.
fn excerpt(bytes: &[u8]) -> String {
    const BYTES_MAX: usize = 120;
    let more = if bytes.len() > BYTES_MAX { "…" } else { "" };
    format!("\"{}\"{more}", bytes[..bytes.len().min(BYTES_MAX)].escape_ascii())
}

#[cfg(test)]
mod tests;
