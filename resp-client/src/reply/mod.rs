//! Bytes to replies: RESP2 and RESP3, borrowed from the buffer they arrived in.
//!
//! Specification: the Redis serialization protocol (redis.io, "RESP protocol description"). Streamed strings and
//! aggregates (`$?`, `*?`), which no Redis sends, are refused.
//!
//! Two halves. The scanner (`scan`) finds where a frame ends, checks every byte of structure on the way, and remembers
//! where it stood when bytes are missing. [`Reply`] then reads a frame that is known to be whole: a [`Reply::Array`]
//! keeps the bytes of its items and reads each when it is asked for, so no reply allocates. [`OwnedReply`] is for those
//! who want to keep one.

mod owned;
mod scan;
#[cfg(test)]
mod tests;

use std::fmt;

use thiserror::Error;

pub use self::owned::OwnedReply;
pub(crate) use self::scan::Scanner;
use self::scan::{double, integer, length};

/// What one reply may be at most. A peer that sends more breaks the protocol, and its link is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Aggregates within aggregates; 16 is the most that can be set.
    pub depth_max: usize,
    /// Items of a reply, those of all its aggregates together.
    pub items_max: usize,
    /// Bytes of one bulk string.
    pub bulk_bytes_max: usize,
    /// Bytes of one line: a simple string, an error, a header.
    pub line_bytes_max: usize,
    /// Bytes of a reply of which a part is still missing, so what a link may have to keep.
    pub reply_bytes_max: usize,
}

impl Default for Limits {
    fn default() -> Self {
        // The largest reply that the client itself asks for is a cluster's topology: about 300 bytes a node.
        Self {
            depth_max: 8,
            items_max: 1 << 20,
            bulk_bytes_max: 8 << 20,
            line_bytes_max: 64 << 10,
            reply_bytes_max: 16 << 20,
        }
    }
}

/// Why the bytes are not a reply. The link cannot go on: nobody knows where the next reply begins.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum ProtocolError {
    /// A reply begins with a byte that names no kind.
    #[error("byte 0x{byte:02x} begins no kind of reply")]
    UnknownKind {
        /// The byte.
        byte: u8,
    },
    /// A line does not end with CRLF.
    #[error("a line must end with CRLF")]
    LineEnd,
    /// A bulk string does not end where it said.
    #[error("a bulk string must end with CRLF")]
    BulkEnd,
    /// An integer is none, or does not fit 64 bits.
    #[error("not an integer of 64 bits")]
    Number,
    /// A length is not a number.
    #[error("not a length")]
    Length,
    /// A null, boolean, double, big number or verbatim string is not written as one.
    #[error("a null, boolean, number or verbatim string is malformed")]
    Scalar,
    /// Aggregates are nested deeper than the limit.
    #[error("aggregates are nested deeper than {depth_max} (limit depth_max)")]
    TooDeep {
        /// The limit.
        depth_max: usize,
    },
    /// A reply has more items than the limit.
    #[error("a reply has more than {items_max} items (limit items_max)")]
    TooManyItems {
        /// The limit.
        items_max: usize,
    },
    /// A bulk string announces more bytes than the limit.
    #[error("a bulk string has more than {bytes_max} bytes (limit bulk_bytes_max)")]
    BulkTooLong {
        /// The limit.
        bytes_max: usize,
    },
    /// A line has more bytes than the limit.
    #[error("a line has more than {bytes_max} bytes (limit line_bytes_max)")]
    LineTooLong {
        /// The limit.
        bytes_max: usize,
    },
    /// A reply that is not complete yet has more bytes than the limit.
    #[error("a reply has more than {bytes_max} bytes (limit reply_bytes_max)")]
    ReplyTooLong {
        /// The limit.
        bytes_max: usize,
    },
    /// A reply arrived though nothing was asked.
    #[error("a reply to nothing that was asked")]
    Unasked,
    /// A reply to a command of the client's own is not what that command answers.
    #[error("not the answer that the command has")]
    Unexpected,
}

/// A reply, borrowed from the bytes that arrived.
#[derive(Clone, Copy, PartialEq)]
pub enum Reply<'a> {
    /// Nothing: RESP3's null, RESP2's null bulk string and null array.
    Nil,
    /// An integer.
    Integer(i64),
    /// A boolean.
    Boolean(bool),
    /// A floating point number.
    Double(f64),
    /// An integer of any size, as its digits.
    BigNumber(&'a [u8]),
    /// A short text: `OK`.
    Simple(&'a [u8]),
    /// A string of any bytes.
    Bulk(&'a [u8]),
    /// A text with its format: `txt` or `mkd`.
    Verbatim {
        /// Three bytes.
        format: &'a [u8],
        /// The text.
        text: &'a [u8],
    },
    /// An error: a word in capitals, and a text. [`crate::error::Code`] knows the words.
    Error(&'a [u8]),
    /// Items in order.
    Array(Items<'a>),
    /// Items without order.
    Set(Items<'a>),
    /// Keys and values in turn.
    Map(Items<'a>),
    /// Something nobody asked for: a message of a subscription.
    Push(Items<'a>),
}

impl<'a> Reply<'a> {
    /// Reads the reply at the front of `bytes`: `None` while it is incomplete, else the reply and its length.
    pub fn parse(bytes: &'a [u8], limits: &Limits) -> Result<Option<(Self, usize)>, ProtocolError> {
        let end = Scanner::default().scan(bytes, limits)?;
        Ok(end.map(|end| (Self::of_whole(&bytes[..end]), end)))
    }

    /// The reply in bytes that the scanner has walked.
    #[inline]
    pub(crate) fn of_whole(bytes: &'a [u8]) -> Self {
        // An aggregate that is a whole frame ends where the frame does: no need to walk it, as one within another needs.
        match bytes {
            [b'*', digit @ b'0'..=b'9', b'\r', b'\n', rest @ ..] => {
                Self::Array(Items { bytes: rest, left: usize::from(digit - b'0') })
            }
            [kind @ (b'*' | b'~' | b'>' | b'%'), ..] => {
                let (line, start) = line(bytes);
                let Some(count) = length(line) else { return read(bytes).0 };
                let left = if *kind == b'%' { count * 2 } else { count };
                read_aggregate(*kind, Items { bytes: &bytes[start..], left })
            }
            _ => read(bytes).0,
        }
    }

    /// The integer, if it is one.
    #[inline]
    pub fn as_integer(&self) -> Option<i64> {
        match self {
            Self::Integer(value) => Some(*value),
            _ => None,
        }
    }

    /// The bytes, if it is any kind of string (errors are none).
    #[inline]
    pub fn as_bytes(&self) -> Option<&'a [u8]> {
        match *self {
            Self::Simple(bytes) | Self::Bulk(bytes) | Self::BigNumber(bytes) | Self::Verbatim { text: bytes, .. } => {
                Some(bytes)
            }
            _ => None,
        }
    }

    /// The items, if it is any kind of aggregate.
    #[inline]
    pub fn items(&self) -> Option<Items<'a>> {
        match self {
            Self::Array(items) | Self::Set(items) | Self::Map(items) | Self::Push(items) => Some(*items),
            _ => None,
        }
    }

    /// Whether it says `OK`.
    pub fn is_ok(&self) -> bool {
        matches!(self, Self::Simple(b"OK"))
    }
}

impl fmt::Debug for Reply<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        OwnedReply::from(*self).fmt(f)
    }
}

/// The items of an aggregate: an iterator that reads them one by one.
#[derive(Clone, Copy)]
pub struct Items<'a> {
    bytes: &'a [u8],
    left: usize,
}

impl<'a> Items<'a> {
    /// The integers of a flat array; `None` in place of anything else.
    #[inline]
    pub fn integers(self) -> impl Iterator<Item = Option<i64>> + use<'a> {
        self.map(|item| item.as_integer())
    }
}

impl<'a> Iterator for Items<'a> {
    type Item = Reply<'a>;

    #[inline]
    fn next(&mut self) -> Option<Reply<'a>> {
        self.left = self.left.checked_sub(1)?;
        let (reply, end) = read(self.bytes);
        self.bytes = &self.bytes[end..];
        Some(reply)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl ExactSizeIterator for Items<'_> {}

impl PartialEq for Items<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.left == other.left && (*self).eq(*other)
    }
}

impl fmt::Debug for Items<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(*self).finish()
    }
}

/// Reads the item at the front of a whole frame, and says where the next one starts.
#[inline]
fn read(bytes: &[u8]) -> (Reply<'_>, usize) {
    if bytes.first() == Some(&b':')
        && let Some(read) = read_short_integer(bytes)
    {
        return read;
    }
    read_any(bytes)
}

#[inline(always)]
fn read_short_integer(bytes: &[u8]) -> Option<(Reply<'_>, usize)> {
    let negative = bytes.get(1) == Some(&b'-');
    let mut at = if negative { 2 } else { 1 };
    let mut value = 0_i64;
    while at < 20 {
        let digit = bytes.get(at)?.wrapping_sub(b'0');
        if digit > 9 {
            let value = if negative { -value } else { value };
            return (bytes[at] == b'\r').then_some((Reply::Integer(value), at + 2));
        }
        value = value * 10 + i64::from(digit);
        at += 1;
    }
    None
}

fn read_any(mut bytes: &[u8]) -> (Reply<'_>, usize) {
    let mut skipped = 0;
    while bytes[0] == b'|' {
        let end = after(bytes);
        bytes = &bytes[end..];
        skipped += end;
    }
    let (line, start) = line(bytes);
    let rest = &bytes[start..];
    let (reply, end) = match bytes[0] {
        b'+' => (Reply::Simple(line), start),
        b'-' => (Reply::Error(line), start),
        b':' => (Reply::Integer(integer(line).unwrap_or_default()), start),
        b'#' => (Reply::Boolean(line == b"t"), start),
        b',' => (Reply::Double(double(line).unwrap_or_default()), start),
        b'(' => (Reply::BigNumber(line), start),
        kind @ (b'$' | b'!' | b'=') => match length(line) {
            None => (Reply::Nil, start),
            Some(length) => (read_bulk(kind, &rest[..length]), start + length + 2),
        },
        kind @ (b'*' | b'~' | b'>' | b'%') => match length(line) {
            None => (Reply::Nil, start),
            Some(count) => {
                let count = if kind == b'%' { count * 2 } else { count };
                let end = after_items(rest, count);
                (read_aggregate(kind, Items { bytes: &rest[..end], left: count }), start + end)
            }
        },
        _ => (Reply::Nil, start),
    };
    (reply, skipped + end)
}

fn read_bulk(kind: u8, bytes: &[u8]) -> Reply<'_> {
    match kind {
        b'$' => Reply::Bulk(bytes),
        b'!' => Reply::Error(bytes),
        _ => Reply::Verbatim { format: &bytes[..3], text: &bytes[4..] },
    }
}

fn read_aggregate(kind: u8, items: Items<'_>) -> Reply<'_> {
    match kind {
        b'*' => Reply::Array(items),
        b'~' => Reply::Set(items),
        b'>' => Reply::Push(items),
        _ => Reply::Map(items),
    }
}

/// The line at the front without its first byte and its end, and where the next one starts.
#[inline]
fn line(bytes: &[u8]) -> (&[u8], usize) {
    let end = memchr::memchr(b'\n', bytes).unwrap_or(bytes.len() - 1);
    (&bytes[1..end - 1], end + 1)
}

/// Where the item at the front ends; of an attribute, only the attribute itself.
fn after(bytes: &[u8]) -> usize {
    let (line, start) = line(bytes);
    match bytes[0] {
        b'$' | b'!' | b'=' => start + length(line).map_or(0, |length| length + 2),
        b'*' | b'~' | b'>' => start + length(line).map_or(0, |count| after_items(&bytes[start..], count)),
        b'%' | b'|' => start + length(line).map_or(0, |count| after_items(&bytes[start..], count * 2)),
        _ => start,
    }
}

/// Where so many items end. At the end of a frame's last aggregate that is where the bytes end.
fn after_items(bytes: &[u8], count: usize) -> usize {
    let mut end = 0;
    for _ in 0..count {
        while bytes[end] == b'|' {
            end += after(&bytes[end..]);
        }
        end += after(&bytes[end..]);
    }
    end
}
