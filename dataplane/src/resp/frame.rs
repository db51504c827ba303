//! Bytes to requests: RESP arrays of bulk strings, and the inline protocol that people type.
//!
//! Specification: the Redis serialization protocol (redis.io, "RESP protocol description"); error texts are Redis's
//! own where it has one, since that is what people search for. Every step returns `Ok(None)` while bytes are missing,
//! and the whole request is then parsed again when more have come: parsing skips over bulk strings without looking at
//! them, so even a client that sends byte by byte costs little, and no state is kept between reads.

use memchr::memchr;
use smallvec::SmallVec;
use thiserror::Error;

use crate::limits::{HEADER_DIGITS_MAX, INLINE_BYTES_MAX};

/// What a request may be at most; settings.
#[derive(Clone, Copy, Debug)]
pub struct RequestLimits {
    /// Words of a request, the command included.
    pub args_max: usize,
    /// Bytes of one word.
    pub arg_bytes_max: usize,
    /// Bytes of a whole request.
    pub request_bytes_max: usize,
}

/// Why the bytes are not a request. The connection cannot go on: nobody knows where the next request begins.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum ProtocolError {
    /// An array's length is not a number.
    #[error("Protocol error: invalid multibulk length")]
    ArrayLength,
    /// An array announces more words than the limit.
    #[error("Protocol error: a request may have at most {0} words (setting resp.args_max)")]
    TooManyArgs(usize),
    /// A word of an array does not begin with `$`.
    #[error("Protocol error: expected '$', got '{}'", Printable(*.0))]
    NotABulkString(u8),
    /// A bulk string's length is not a number.
    #[error("Protocol error: invalid bulk length")]
    BulkLength,
    /// A bulk string announces more bytes than the limit.
    #[error("Protocol error: a word may have at most {0} bytes (setting resp.arg_bytes_max)")]
    ArgTooLong(usize),
    /// A bulk string does not end where it said.
    #[error("Protocol error: a bulk string must end with CRLF")]
    BulkEnd,
    /// A request is longer than the limit.
    #[error("Protocol error: a request may have at most {0} bytes (setting resp.request_bytes_max)")]
    RequestTooLong(usize),
    /// An inline request is longer than the limit.
    #[error("Protocol error: too big inline request")]
    InlineTooLong,
    /// A client that speaks HTTP. `has_body` says whether it expects one in the answer.
    #[error("Protocol error: this is HTTP, and the port speaks RESP")]
    Http {
        /// Not to HEAD.
        has_body: bool,
    },
    /// An inline request uses quotes.
    #[error("Protocol error: inline requests cannot quote; send an array of bulk strings")]
    InlineQuotes,
}

/// How requests of HTTP begin. Read as words, the first line would be an unknown command, and a line that follows could be a
/// known one.
const HTTP_STARTS: [&[u8]; 11] = [
    b"GET /",
    b"POST /",
    b"PUT /",
    b"HEAD /",
    b"OPTIONS /",
    b"OPTIONS *",
    b"DELETE /",
    b"PATCH /",
    b"TRACE /",
    b"CONNECT /",
    b"PRI * HTTP/2",
];

/// A byte as an error text can carry it.
struct Printable(u8);

impl std::fmt::Display for Printable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.0.is_ascii_graphic() { write!(f, "{}", char::from(self.0)) } else { write!(f, "\\x{:02x}", self.0) }
    }
}

/// A step of parsing: `Ok(None)` while bytes are missing.
pub type Step<T> = Result<Option<T>, ProtocolError>;

/// The words of a request. Sixteen have room of their own; for more there is [`ArgsRoom`].
pub type Args<'a> = SmallVec<[&'a [u8]; ARGS_FEW]>;

/// See [`Args`].
const ARGS_FEW: usize = 16;

/// Room for many words, kept from one request to the next.
#[derive(Default)]
pub struct ArgsRoom(Vec<&'static [u8]>);

impl ArgsRoom {
    /// No words yet, with this room if there may be so many that they need it.
    pub fn lend<'a>(&mut self, words_max: usize) -> Args<'a> {
        if words_max <= ARGS_FEW { Args::new() } else { Args::from_vec(std::mem::take(&mut self.0)) }
    }

    /// Takes the room back.
    pub fn take_back(&mut self, mut args: Args<'_>) {
        if args.spilled() {
            args.clear();
            // Collects nothing, and so into the same memory.
            self.0 = args.into_vec().into_iter().map(|_| &[][..]).collect();
        }
    }
}

/// Reads requests from the front of a buffer.
#[derive(Clone, Copy)]
pub struct Cursor<'a> {
    rest: &'a [u8],
    len: usize,
}

impl<'a> Cursor<'a> {
    /// Starts at the front.
    #[inline(always)]
    pub fn new(buf: &'a [u8]) -> Self {
        Self { rest: buf, len: buf.len() }
    }

    /// Bytes read so far.
    #[inline(always)]
    pub fn consumed(&self) -> usize {
        self.len - self.rest.len()
    }

    /// The next byte, unread.
    #[inline(always)]
    pub fn peek(&self) -> Option<u8> {
        self.rest.first().copied()
    }

    /// An array's header: how many words follow. 0 and less mean an empty request, which is skipped.
    #[inline(always)]
    pub fn array(&mut self, limits: &RequestLimits) -> Step<usize> {
        // One digit is by far the most frequent.
        let count = match self.rest {
            [b'*', digit @ b'0'..=b'9', b'\r', b'\n', rest @ ..] => {
                self.rest = rest;
                i64::from(digit - b'0')
            }
            _ => match self.long_header(ProtocolError::ArrayLength)? {
                Some(count) => count,
                None => return Ok(None),
            },
        };
        match usize::try_from(count) {
            Ok(count) if count > limits.args_max => Err(ProtocolError::TooManyArgs(limits.args_max)),
            Ok(count) => Ok(Some(count)),
            Err(_) => Ok(Some(0)),
        }
    }

    /// One bulk string.
    #[inline(always)]
    pub fn bulk(&mut self, limits: &RequestLimits) -> Step<&'a [u8]> {
        // A length of one or two digits, read with its frame as one word: all that the hot path meets. Whatever is
        // different, incomplete or wrong is for `long_bulk`.
        if let Some(head) = self.rest.first_chunk::<8>() {
            let head = u64::from_le_bytes(*head);
            let digit = |at: u32| ((head >> (8 * at)) as u8).wrapping_sub(b'0');
            let (len, start) = if head & 0xFFFF_00FF == u64::from(u32::from_le_bytes(*b"$\0\r\n")) {
                (usize::from(digit(1)), 4)
            } else if head & 0xFF_FF00_00FF == u64::from_le_bytes(*b"$\0\0\r\n\0\0\0") && digit(1) < 10 {
                (usize::from(digit(1)) * 10 + usize::from(digit(2)), 5)
            } else {
                return self.long_bulk(limits);
            };
            let last = if start == 4 { digit(1) } else { digit(2) };
            let end = start + len;
            if last < 10 && len <= limits.arg_bytes_max && self.rest.get(end..end + 2) == Some(b"\r\n") {
                let word = &self.rest[start..end];
                self.rest = &self.rest[end + 2..];
                return Ok(Some(word));
            }
        }
        self.long_bulk(limits)
    }

    /// A bulk string of any length, complete or not.
    #[cold]
    #[inline(never)]
    fn long_bulk(&mut self, limits: &RequestLimits) -> Step<&'a [u8]> {
        match self.peek() {
            Some(b'$') => {}
            Some(other) => return Err(ProtocolError::NotABulkString(other)),
            None => return Ok(None),
        }
        let Some(len) = self.long_header(ProtocolError::BulkLength)? else { return Ok(None) };
        let Ok(len) = usize::try_from(len) else { return Err(ProtocolError::BulkLength) };
        if len > limits.arg_bytes_max {
            return Err(ProtocolError::ArgTooLong(limits.arg_bytes_max));
        }
        let Some((word, end)) = self.rest.split_at_checked(len) else { return Ok(None) };
        match end {
            [b'\r', b'\n', rest @ ..] => {
                self.rest = rest;
                Ok(Some(word))
            }
            [] | [b'\r'] => Ok(None),
            _ => Err(ProtocolError::BulkEnd),
        }
    }

    /// The number between a marker and CRLF.
    #[inline(never)]
    fn long_header(&mut self, error: ProtocolError) -> Step<i64> {
        let rest = &self.rest[1..];
        let negative = rest.first() == Some(&b'-');
        let digits = &rest[usize::from(negative)..];
        let mut value = 0i64;
        for (at, &byte) in digits.iter().enumerate() {
            match byte {
                b'0'..=b'9' if at < HEADER_DIGITS_MAX => value = value * 10 + i64::from(byte - b'0'),
                b'\r' if at > 0 => {
                    return match digits.get(at + 1) {
                        Some(b'\n') => {
                            self.rest = &digits[at + 2..];
                            Ok(Some(if negative { -value } else { value }))
                        }
                        Some(_) => Err(error),
                        None => Ok(None),
                    };
                }
                _ => return Err(error),
            }
        }
        Ok(None)
    }

    /// The remaining `count` words of an array whose header was read.
    pub fn words(&mut self, count: usize, limits: &RequestLimits, args: &mut Args<'a>) -> Step<()> {
        for _ in 0..count {
            match self.bulk(limits)? {
                Some(word) => args.push(word),
                None => return Ok(None),
            }
        }
        Ok(Some(()))
    }

    /// A line of words: what people type into a terminal.
    pub fn inline(&mut self, limits: &RequestLimits, args: &mut Args<'a>) -> Step<()> {
        let rest = self.rest;
        if HTTP_STARTS.iter().any(|start| rest.starts_with(start)) {
            return Err(ProtocolError::Http { has_body: !rest.starts_with(b"HEAD") });
        }
        let Some(end) = memchr(b'\n', rest) else {
            return if rest.len() > INLINE_BYTES_MAX { Err(ProtocolError::InlineTooLong) } else { Ok(None) };
        };
        let line = &rest[..end];
        if line.iter().any(|byte| matches!(byte, b'"' | b'\'')) {
            return Err(ProtocolError::InlineQuotes);
        }
        for word in line.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty()) {
            if args.len() == limits.args_max {
                return Err(ProtocolError::TooManyArgs(limits.args_max));
            }
            if word.len() > limits.arg_bytes_max {
                return Err(ProtocolError::ArgTooLong(limits.arg_bytes_max));
            }
            args.push(word);
        }
        self.rest = &rest[end + 1..];
        Ok(Some(()))
    }
}
