//! A reply that owns its bytes.

use std::fmt;

use super::Reply;

/// A reply that owns its bytes; [`Reply`] says what each kind is.
#[derive(Clone, PartialEq)]
#[allow(missing_docs, reason = "the kinds are those of `Reply`")]
pub enum OwnedReply {
    Nil,
    Integer(i64),
    Boolean(bool),
    Double(f64),
    BigNumber(Vec<u8>),
    Simple(Vec<u8>),
    Bulk(Vec<u8>),
    Verbatim { format: Vec<u8>, text: Vec<u8> },
    Error(Vec<u8>),
    Array(Vec<Self>),
    Set(Vec<Self>),
    Map(Vec<(Self, Self)>),
    Push(Vec<Self>),
}

impl OwnedReply {
    /// The integer, if it is one.
    pub fn as_integer(&self) -> Option<i64> {
        match self {
            Self::Integer(value) => Some(*value),
            _ => None,
        }
    }

    /// The bytes, if it is any kind of string (errors are none).
    pub fn as_bytes(&self) -> Option<&[u8]> {
        match self {
            Self::Simple(bytes) | Self::Bulk(bytes) | Self::BigNumber(bytes) | Self::Verbatim { text: bytes, .. } => {
                Some(bytes)
            }
            _ => None,
        }
    }
}

impl From<Reply<'_>> for OwnedReply {
    fn from(reply: Reply<'_>) -> Self {
        match reply {
            Reply::Nil => Self::Nil,
            Reply::Integer(value) => Self::Integer(value),
            Reply::Boolean(value) => Self::Boolean(value),
            Reply::Double(value) => Self::Double(value),
            Reply::BigNumber(digits) => Self::BigNumber(digits.to_vec()),
            Reply::Simple(text) => Self::Simple(text.to_vec()),
            Reply::Bulk(bytes) => Self::Bulk(bytes.to_vec()),
            Reply::Verbatim { format, text } => Self::Verbatim { format: format.to_vec(), text: text.to_vec() },
            Reply::Error(text) => Self::Error(text.to_vec()),
            Reply::Array(items) => Self::Array(items.map(Self::from).collect()),
            Reply::Set(items) => Self::Set(items.map(Self::from).collect()),
            Reply::Push(items) => Self::Push(items.map(Self::from).collect()),
            Reply::Map(mut items) => {
                let mut pairs = Vec::with_capacity(items.len() / 2);
                while let (Some(key), Some(value)) = (items.next(), items.next()) {
                    pairs.push((Self::from(key), Self::from(value)));
                }
                Self::Map(pairs)
            }
        }
    }
}

impl fmt::Debug for OwnedReply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nil => f.write_str("nil"),
            Self::Integer(value) => write!(f, "{value}"),
            Self::Boolean(value) => write!(f, "{value}"),
            Self::Double(value) => write!(f, "{value:?}"),
            Self::BigNumber(digits) => write!(f, "{}", digits.escape_ascii()),
            Self::Simple(text) => write!(f, "+{}", text.escape_ascii()),
            Self::Error(text) => write!(f, "-{}", text.escape_ascii()),
            Self::Bulk(bytes) | Self::Verbatim { text: bytes, .. } => write!(f, "\"{}\"", bytes.escape_ascii()),
            Self::Array(items) => f.debug_list().entries(items).finish(),
            Self::Set(items) => f.debug_set().entries(items).finish(),
            Self::Map(pairs) => f.debug_map().entries(pairs.iter().map(|(key, value)| (key, value))).finish(),
            Self::Push(items) => {
                f.write_str("push")?;
                f.debug_list().entries(items).finish()
            }
        }
    }
}
