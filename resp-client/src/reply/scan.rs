//! Where a frame ends: the half of the parser that remembers.
//!
//! ```text
//! scan(buffer):                         # buffer starts where the frame starts, and only ever grows
//!     loop:
//!         item = the item at `position`, or return "not yet"
//!         position += its bytes
//!         an aggregate pushes the number of its items; anything else counts as one item done
//!         while the innermost aggregate is complete: pop it, it counts as one item done of the next
//!         if none is left: the frame ends at `position`
//! ```
//!
//! `position` only moves over whole items, so a frame that arrives in many pieces is walked once, plus one look at the
//! item that is not complete yet: a bulk string's header says where to look next, and a line remembers how far it was
//! searched. A whole frame has been checked in every place when its end is known, so reading it cannot fail.

use memchr::memchr;

use super::{Limits, ProtocolError};

/// Aggregates within aggregates that any setting may allow.
pub(crate) const DEPTH_CAP: usize = 16;

/// Where the scanning of one frame stands.
#[derive(Clone, Debug, Default)]
pub(crate) struct Scanner {
    /// Bytes of the frame that are whole items.
    position: usize,
    /// Bytes of the frame that were searched for the end of the line at `position`.
    searched: usize,
    /// Items seen.
    items: usize,
    /// Aggregates that are open.
    depth: usize,
    /// Items that each open aggregate still lacks.
    missing: [usize; DEPTH_CAP],
}

impl Scanner {
    /// The length of the frame at the front of `buffer`, or `None` while it is incomplete. Then the scanner stands where
    /// it stopped, and wants the same bytes again with more behind them; after `Some` it stands at the next frame.
    #[inline]
    pub(crate) fn scan(&mut self, buffer: &[u8], limits: &Limits) -> Result<Option<usize>, ProtocolError> {
        loop {
            match self.item(buffer, limits)? {
                Item::Incomplete => {
                    return if buffer.len() > limits.reply_bytes_max {
                        Err(ProtocolError::ReplyTooLong { bytes_max: limits.reply_bytes_max })
                    } else {
                        Ok(None)
                    };
                }
                Item::Whole(end) => {
                    self.position = end;
                    if self.done() {
                        return Ok(Some(self.finish()));
                    }
                }
                Item::Aggregate { end, items, counts } => {
                    self.position = end;
                    if self.open(items, counts, limits)? {
                        return Ok(Some(self.finish()));
                    }
                }
            }
        }
    }

    fn finish(&mut self) -> usize {
        let end = self.position;
        self.position = 0;
        self.searched = 0;
        self.items = 0;
        end
    }

    /// One item is done: was it the last one of the frame?
    #[inline(always)]
    fn done(&mut self) -> bool {
        while let Some(level) = self.depth.checked_sub(1) {
            self.missing[level] -= 1;
            if self.missing[level] > 0 {
                return false;
            }
            self.depth = level;
        }
        true
    }

    /// An aggregate begins. An attribute does not count as an item of what it stands in: it comes in front of one.
    fn open(&mut self, items: usize, counts: bool, limits: &Limits) -> Result<bool, ProtocolError> {
        self.items = self.items.saturating_add(items);
        if self.items > limits.items_max {
            return Err(ProtocolError::TooManyItems { items_max: limits.items_max });
        }
        // An attribute stands for itself and what follows it.
        let items = if counts { items } else { items + 1 };
        if items == 0 {
            return Ok(self.done());
        }
        if self.depth >= limits.depth_max.min(DEPTH_CAP) {
            return Err(ProtocolError::TooDeep { depth_max: limits.depth_max.min(DEPTH_CAP) });
        }
        self.missing[self.depth] = items;
        self.depth += 1;
        Ok(false)
    }

    #[inline(always)]
    fn item(&mut self, buffer: &[u8], limits: &Limits) -> Result<Item, ProtocolError> {
        let rest = &buffer[self.position..];
        let Some(&kind) = rest.first() else { return Ok(Item::Incomplete) };
        match rest {
            [b':', digits @ ..] => {
                if let Some(length) = short_integer(digits) {
                    return Ok(Item::Whole(self.position + 1 + length));
                }
            }
            [b'*', digit @ b'0'..=b'9', b'\r', b'\n', ..] => {
                let items = usize::from(digit - b'0');
                return Ok(Item::Aggregate { end: self.position + 4, items, counts: true });
            }
            _ => {}
        }
        self.any_item(buffer, kind, limits)
    }

    fn any_item(&mut self, buffer: &[u8], kind: u8, limits: &Limits) -> Result<Item, ProtocolError> {
        let Some((line, end)) = self.line(buffer, limits)? else { return Ok(Item::Incomplete) };
        match kind {
            b'+' | b'-' => Ok(Item::Whole(end)),
            b':' => integer(line).map(|_| Item::Whole(end)).ok_or(ProtocolError::Number),
            b'$' | b'!' | b'=' => bulk(buffer, kind, line, end, limits),
            b'_' => check(line.is_empty(), end),
            b'#' => check(matches!(line, b"t" | b"f"), end),
            b',' => check(double(line).is_some(), end),
            b'(' => check(big_number(line), end),
            b'*' | b'~' | b'>' | b'%' | b'|' => aggregate(kind, line, end),
            other => Err(ProtocolError::UnknownKind { byte: other }),
        }
    }

    /// The line at `position` without its first byte and its end, and where the next one starts.
    fn line<'b>(&mut self, buffer: &'b [u8], limits: &Limits) -> Result<Option<(&'b [u8], usize)>, ProtocolError> {
        let from = self.searched.max(self.position + 1);
        let Some(found) = buffer.get(from..).and_then(|rest| memchr(b'\n', rest)) else {
            self.searched = buffer.len().max(from);
            return if buffer.len() - self.position > limits.line_bytes_max {
                Err(ProtocolError::LineTooLong { bytes_max: limits.line_bytes_max })
            } else {
                Ok(None)
            };
        };
        let newline = from + found;
        if newline - self.position > limits.line_bytes_max {
            return Err(ProtocolError::LineTooLong { bytes_max: limits.line_bytes_max });
        }
        // The item is looked at again when its bulk string is incomplete: then its line ends here again.
        self.searched = newline;
        match buffer[self.position + 1..newline].split_last() {
            Some((b'\r', line)) => Ok(Some((line, newline + 1))),
            _ => Err(ProtocolError::LineEnd),
        }
    }
}

enum Item {
    Incomplete,
    /// An item that ends there.
    Whole(usize),
    /// The header of an aggregate ends there.
    Aggregate {
        end: usize,
        items: usize,
        counts: bool,
    },
}

fn check(well_formed: bool, end: usize) -> Result<Item, ProtocolError> {
    if well_formed { Ok(Item::Whole(end)) } else { Err(ProtocolError::Scalar) }
}

fn bulk(buffer: &[u8], kind: u8, line: &[u8], start: usize, limits: &Limits) -> Result<Item, ProtocolError> {
    if kind == b'$' && line == b"-1" {
        return Ok(Item::Whole(start));
    }
    let length = length(line).ok_or(ProtocolError::Length)?;
    if length > limits.bulk_bytes_max {
        return Err(ProtocolError::BulkTooLong { bytes_max: limits.bulk_bytes_max });
    }
    let end = start + length;
    let Some(tail) = buffer.get(end..end + 2) else { return Ok(Item::Incomplete) };
    if tail != b"\r\n" {
        return Err(ProtocolError::BulkEnd);
    }
    if kind == b'=' && (length < 4 || buffer[start + 3] != b':') {
        return Err(ProtocolError::Scalar);
    }
    Ok(Item::Whole(end + 2))
}

fn aggregate(kind: u8, line: &[u8], end: usize) -> Result<Item, ProtocolError> {
    if kind == b'*' && line == b"-1" {
        return Ok(Item::Whole(end));
    }
    let count = length(line).ok_or(ProtocolError::Length)?;
    let pairs = matches!(kind, b'%' | b'|');
    let items = if pairs { count.saturating_mul(2) } else { count };
    Ok(Item::Aggregate { end, items, counts: kind != b'|' })
}

/// The bytes of `digits\r\n` with at most 18 digits, the form nearly every integer has.
#[inline(always)]
fn short_integer(rest: &[u8]) -> Option<usize> {
    let sign = usize::from(rest.first() == Some(&b'-'));
    let mut end = sign;
    while rest.get(end)?.is_ascii_digit() {
        end += 1;
    }
    let ends = rest[end] == b'\r' && rest.get(end + 1) == Some(&b'\n');
    (ends && (1..=18).contains(&(end - sign))).then_some(end + 2)
}

/// A number as RESP writes it: an optional sign and decimal digits.
#[inline]
pub(super) fn integer(line: &[u8]) -> Option<i64> {
    let (negative, digits) = match line {
        [b'-', digits @ ..] => (true, digits),
        [b'+', digits @ ..] => (false, digits),
        digits => (false, digits),
    };
    if digits.is_empty() {
        return None;
    }
    let mut value = 0_i64;
    for &byte in digits {
        let digit = byte.wrapping_sub(b'0');
        if digit > 9 {
            return None;
        }
        // Downwards, because that side reaches one further.
        value = value.checked_mul(10)?.checked_sub(i64::from(digit))?;
    }
    if negative { Some(value) } else { value.checked_neg() }
}

/// The length in a header: decimal digits, few enough for any `usize`.
#[inline]
pub(super) fn length(line: &[u8]) -> Option<usize> {
    if line.is_empty() || line.len() > 10 {
        return None;
    }
    line.iter().try_fold(0_usize, |value, byte| byte.is_ascii_digit().then(|| value * 10 + usize::from(byte - b'0')))
}

pub(super) fn double(line: &[u8]) -> Option<f64> {
    std::str::from_utf8(line).ok()?.parse().ok()
}

fn big_number(line: &[u8]) -> bool {
    let digits = line.strip_prefix(b"-").unwrap_or(line);
    !digits.is_empty() && digits.iter().all(u8::is_ascii_digit)
}
