//! Requests to meaning: which command, and its arguments as values. The hot `CHECK` is read by `engine` itself, word by
//! word as it is parsed; everything else comes here with its words collected.

use policy_sync::{
    model::{CAPACITY_MAX, Limit, PERIOD_MS_MAX},
    rate::{MILLISECOND_TICK_PERIOD_MS_MAX, Rate},
};
use thiserror::Error;

/// Why a request that is well formed means nothing. The connection goes on.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum CommandError {
    /// No such command.
    #[error("ERR unknown command '{0}'")]
    Unknown(String),
    /// No such subcommand.
    #[error("ERR unknown subcommand '{subcommand}'. Try {command} HELP.")]
    UnknownSubcommand {
        /// The command.
        command: &'static str,
        /// What came.
        subcommand: String,
    },
    /// Too few or too many words.
    #[error("ERR wrong number of arguments for '{0}' command")]
    Arity(&'static str),
    /// CHECK's words are not pairs.
    #[error("ERR CHECK takes `[COST n] name value [name value ...]`: a name without a value")]
    UnpairedAttribute,
    /// CHECK without any attribute: nothing could apply but rules for everybody, so it is most likely a mistake.
    #[error("ERR CHECK needs at least one attribute: `[COST n] name value [name value ...]`")]
    NoAttributes,
    /// A number is not one, or out of range.
    #[error("ERR {0} is not an integer or out of range")]
    NotANumber(&'static str),
    /// An attribute's name can never match.
    #[error("ERR attribute name '{0}' must be 1 to 128 of a-z 0-9 _ - . (names are lower case)")]
    AttributeName(String),
    /// An attribute came twice, or too many rules apply.
    #[error("ERR {0}")]
    Attributes(#[from] policy_sync::snapshot::AttributesError),
    /// A throttle's parameters mean no bucket.
    #[error("ERR invalid rate: {0}")]
    Rate(&'static str),
    /// The password is wrong, or none is set.
    #[error("{0}")]
    Auth(&'static str),
    /// HELLO asks for another protocol.
    #[error("NOPROTO unsupported protocol version")]
    Protocol,
    /// SELECT of another database.
    #[error("ERR DB index is out of range")]
    Database,
    /// HELLO with words that it does not know.
    #[error("ERR syntax error in {0}")]
    Syntax(&'static str),
    /// A name that cannot be shown.
    #[error("ERR Client names cannot contain spaces, newlines or special characters, or be longer than 128 bytes")]
    ClientName,
}

/// The two dialects of throttling a key with a rate in the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// `CL.THROTTLE` of redis-cell: the bucket holds `max_burst + 1`.
    RedisCell,
    /// `THROTTLE` of throttlecrab: the bucket holds `max_burst`.
    Throttlecrab,
}

impl Dialect {
    /// The command's name, in lower case: what its buckets are called in the store.
    pub fn family(self) -> &'static str {
        match self {
            Self::RedisCell => "cl.throttle",
            Self::Throttlecrab => "throttle",
        }
    }
}

/// A throttle call: a key, a rate and a cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Throttle<'a> {
    /// Whose bucket.
    pub key: &'a [u8],
    /// The rate, as the call gives it.
    pub rate: Rate,
    /// How much is taken; 0 only looks.
    pub cost: u32,
}

/// Reads `key max_burst count period [quantity]`, the words after the command's name. The period is in seconds.
///
/// # Errors
///
/// [`CommandError::Arity`], [`CommandError::NotANumber`], or [`CommandError::Rate`] for a bucket that cannot be.
pub fn throttle<'a>(dialect: Dialect, words: &[&'a [u8]]) -> Result<Throttle<'a>, CommandError> {
    let (name, extra) = match dialect {
        Dialect::RedisCell => ("cl.throttle", 1),
        Dialect::Throttlecrab => ("throttle", 0),
    };
    let (&[key, burst, count, period], rest) = words.split_first_chunk::<4>().ok_or(CommandError::Arity(name))?;
    let quantity: u64 = match rest {
        [] => 1,
        [quantity] => number("quantity", quantity)?,
        _ => return Err(CommandError::Arity(name)),
    };
    let burst: u64 = number("max_burst", burst)?;
    let count: u64 = number("count", count)?;
    let period_secs: u64 = number("period", period)?;
    let limit = Limit {
        capacity: burst.saturating_add(extra),
        refill: count,
        period_ms: period_secs.checked_mul(1000).ok_or(CommandError::NotANumber("period"))?,
    };
    Ok(Throttle { key, rate: rate(limit)?, cost: cost(quantity) })
}

fn rate(limit: Limit) -> Result<Rate, CommandError> {
    const _: () = assert!(MILLISECOND_TICK_PERIOD_MS_MAX < PERIOD_MS_MAX);
    let text = match limit {
        Limit { refill: 0, .. } => "count must be at least 1",
        Limit { period_ms: 0, .. } => "period must be at least 1 second",
        Limit { capacity: 0, .. } => "max_burst must be at least 1",
        Limit { capacity, refill, .. } if capacity > CAPACITY_MAX || refill > CAPACITY_MAX => {
            "max_burst and count must be below 2147483647"
        }
        _ => "period must be at most 2678400 seconds (31 days)",
    };
    Rate::new(limit).map_err(|_| CommandError::Rate(text))
}

/// A cost as the decision takes it: what exceeds every capacity is all the same.
#[inline(always)]
pub fn cost(quantity: u64) -> u32 {
    u32::try_from(quantity).unwrap_or(u32::MAX)
}

/// A whole number without a sign. A negative or fractional one is refused, as is what does not fit `T`.
///
/// # Errors
///
/// [`CommandError::NotANumber`] with the argument's name.
pub fn number<T: std::str::FromStr>(argument: &'static str, word: &[u8]) -> Result<T, CommandError> {
    if word.is_empty() || !word.iter().all(u8::is_ascii_digit) {
        return Err(CommandError::NotANumber(argument));
    }
    std::str::from_utf8(word).ok().and_then(|text| text.parse().ok()).ok_or(CommandError::NotANumber(argument))
}

/// At most 64 bytes of what a client sent, for an error text.
pub fn excerpt(word: &[u8]) -> String {
    String::from_utf8_lossy(&word[..word.len().min(64)]).into_owned()
}

/// Whether an attribute's name can be one at all. Only asked for names that no rule mentions.
pub fn is_attribute_name(name: &[u8]) -> bool {
    (1..=policy_sync::model::NAME_BYTES_MAX).contains(&name.len())
        && name.iter().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'-' | b'.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_throttle_call_is_read() {
        let call = throttle(Dialect::RedisCell, &[b"user", b"15", b"30", b"60", b"2"]).unwrap();
        assert_eq!((call.key, call.rate.capacity, call.rate.fill_ms(), call.cost), (&b"user"[..], 16, 32_000, 2));
        let call = throttle(Dialect::Throttlecrab, &[b"user", b"15", b"30", b"60"]).unwrap();
        assert_eq!((call.rate.capacity, call.cost), (15, 1));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let refused = |words: &[&[u8]]| throttle(Dialect::RedisCell, words).unwrap_err().to_string();
        assert_eq!(refused(&[b"k", b"1", b"1"]), "ERR wrong number of arguments for 'cl.throttle' command");
        assert_eq!(refused(&[b"k", b"x", b"1", b"1"]), "ERR max_burst is not an integer or out of range");
        assert_eq!(refused(&[b"k", b"1", b"0", b"1"]), "ERR invalid rate: count must be at least 1");
        assert_eq!(refused(&[b"k", b"1", b"1", b"0"]), "ERR invalid rate: period must be at least 1 second");
        assert_eq!(refused(&[b"k", b"1", b"-1", b"1"]), "ERR count is not an integer or out of range");
        assert_eq!(
            refused(&[b"k", b"1", b"1", b"99999999999999999999"]),
            "ERR period is not an integer or out of range"
        );
    }
}
