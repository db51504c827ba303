//! What can go wrong, and what it means for the caller.
//!
//! A call is refused at once with a [`CallError`], or accepted and then completed with a reply or an [`Error`]. Each says
//! what it means: [`Meaning`]. No text of an error holds a password.

use std::fmt;

use thiserror::Error as ThisError;

use crate::reply::ProtocolError;

/// What an error means for the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meaning {
    /// The same call may work here in a moment; the shard itself is well.
    RetryHere,
    /// Another node has the key.
    GoThere,
    /// The shard cannot serve now. This alone counts as a failure of the shard.
    ShardCannotServe,
    /// The call or the settings are wrong; another try ends the same way.
    CallersFault,
}

/// Why a call was not accepted. Nothing was sent, and no completion follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ThisError)]
#[non_exhaustive]
pub enum CallError {
    /// No link to the shard is up.
    #[error("no link to the shard is up")]
    NotConnected,
    /// No shard is known for the slot: the topology is not known yet, or the cluster does not cover it.
    #[error("no shard is known for the slot")]
    NoShard,
    /// The in-flight table is full.
    #[error("the in-flight table is full (setting in_flight_max)")]
    InFlightFull,
    /// The link has more to send than it may, or more unanswered commands.
    #[error("the link's output is full (setting output_bytes_max)")]
    OutputFull,
    /// The deadline has passed already.
    #[error("the deadline has passed already")]
    TooLate,
    /// The script is not among those of the settings.
    #[error("the script is not among those of the settings")]
    UnknownScript,
}

impl CallError {
    /// What it means for the caller.
    pub fn meaning(self) -> Meaning {
        match self {
            Self::NotConnected | Self::NoShard | Self::OutputFull => Meaning::ShardCannotServe,
            Self::InFlightFull => Meaning::RetryHere,
            Self::TooLate | Self::UnknownScript => Meaning::CallersFault,
        }
    }

    /// Whether it counts as a failure of the shard.
    pub fn is_shard_failure(self) -> bool {
        self.meaning() == Meaning::ShardCannotServe
    }
}

/// How an accepted call failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ThisError)]
#[non_exhaustive]
pub enum Error<'a> {
    /// No reply came by the deadline. The command may have been executed, or may still be.
    #[error("no reply by the deadline")]
    Timeout,
    /// The link went down after the command was written. It may have been executed.
    #[error("the link went down before the reply")]
    Disconnected,
    /// No link came up; the command was not sent, or was refused unexecuted.
    #[error("no link to the shard is up")]
    NotConnected,
    /// The call had to go to another node, and its link cannot take more.
    #[error("the link's output is full (setting output_bytes_max)")]
    OutputFull,
    /// The peer broke the protocol, and its link was closed. The command may have been executed.
    #[error("protocol error: {0}")]
    Protocol(ProtocolError),
    /// Redis answered with an error.
    #[error("{text}")]
    Server {
        /// Which.
        code: Code,
        /// In its words.
        text: Text<'a>,
    },
}

impl Error<'_> {
    /// What it means for the caller.
    pub fn meaning(&self) -> Meaning {
        match self {
            Self::Server { code, .. } => code.meaning(),
            _ => Meaning::ShardCannotServe,
        }
    }

    /// Whether it counts as a failure of the shard.
    pub fn is_shard_failure(&self) -> bool {
        self.meaning() == Meaning::ShardCannotServe
    }

    /// Whether the command may have been executed all the same.
    pub fn may_have_been_executed(&self) -> bool {
        matches!(self, Self::Timeout | Self::Disconnected | Self::Protocol(_))
    }

    /// The server's error, if it is one.
    pub fn code(&self) -> Option<Code> {
        match self {
            Self::Server { code, .. } => Some(*code),
            _ => None,
        }
    }
}

/// Why a call did not get a reply, in a form that can be kept: either it was refused, or it failed.
#[derive(Clone, Debug, PartialEq, Eq, ThisError)]
#[non_exhaustive]
pub enum OwnedError {
    /// It was not accepted.
    #[error(transparent)]
    Refused(#[from] CallError),
    /// [`Error::Timeout`].
    #[error("no reply by the deadline")]
    Timeout,
    /// [`Error::Disconnected`].
    #[error("the link went down before the reply")]
    Disconnected,
    /// [`Error::NotConnected`].
    #[error("no link to the shard is up")]
    NotConnected,
    /// [`Error::OutputFull`].
    #[error("the link's output is full (setting output_bytes_max)")]
    OutputFull,
    /// [`Error::Protocol`].
    #[error("protocol error: {0}")]
    Protocol(ProtocolError),
    /// [`Error::Server`].
    #[error("{}", Text(text))]
    Server {
        /// Which.
        code: Code,
        /// In its words.
        text: Vec<u8>,
    },
}

impl From<Error<'_>> for OwnedError {
    fn from(error: Error<'_>) -> Self {
        match error {
            Error::Timeout => Self::Timeout,
            Error::Disconnected => Self::Disconnected,
            Error::NotConnected => Self::NotConnected,
            Error::OutputFull => Self::OutputFull,
            Error::Protocol(error) => Self::Protocol(error),
            Error::Server { code, text } => Self::Server { code, text: text.0.to_vec() },
        }
    }
}

/// The words of an error, which need not be text.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Text<'a>(pub &'a [u8]);

impl fmt::Display for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0.escape_ascii())
    }
}

impl fmt::Debug for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{self}\"")
    }
}

/// The errors of Redis that the client tells apart: the first word of the error, or what stands for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Code {
    /// Another node has the slot, for good. The client goes there itself; it shows when that failed.
    Moved,
    /// Another node has the key for this once, while the slot is moved. The client goes there itself.
    Ask,
    /// The keys of the call are on two nodes while the slot is moved. The client tries again itself.
    TryAgain,
    /// The cluster does not serve.
    ClusterDown,
    /// Redis reads its data set into memory.
    Loading,
    /// A replica, which does not write.
    ReadOnly,
    /// A replica that lost its primary and does not serve old data.
    MasterDown,
    /// A script or function has been running too long.
    Busy,
    /// Redis cannot write to disk, and so refuses writes.
    MisConf,
    /// Too few replicas are connected, and so Redis refuses writes.
    NoReplicas,
    /// Memory is full, and the command wants more.
    OutOfMemory,
    /// The script is not known. The client loads it itself; it shows when that failed.
    NoScript,
    /// The function is not known. The client loads it itself; it shows when that failed.
    NoFunction,
    /// A password is wanted.
    NoAuth,
    /// User or password are wrong.
    WrongPass,
    /// The user may not do that.
    NoPerm,
    /// The protocol's version is not known.
    NoProto,
    /// Redis does not talk to this address (protected mode).
    Denied,
    /// The keys of the call are in different slots.
    CrossSlot,
    /// The key holds a value of another type.
    WrongType,
    /// Redis has as many clients as it may.
    MaxClients,
    /// A sentinel does not know a master of that name that is up.
    NoMaster,
    /// Any other error.
    Other,
}

impl Code {
    /// Which error that is.
    pub fn of(text: &[u8]) -> Self {
        let word = text.split(|&byte| byte == b' ').next().unwrap_or_default();
        match word {
            b"MOVED" => Self::Moved,
            b"ASK" => Self::Ask,
            b"TRYAGAIN" => Self::TryAgain,
            b"CLUSTERDOWN" => Self::ClusterDown,
            b"LOADING" => Self::Loading,
            b"READONLY" => Self::ReadOnly,
            b"MASTERDOWN" => Self::MasterDown,
            b"BUSY" => Self::Busy,
            b"MISCONF" => Self::MisConf,
            b"NOREPLICAS" => Self::NoReplicas,
            b"OOM" => Self::OutOfMemory,
            b"NOSCRIPT" => Self::NoScript,
            b"NOAUTH" => Self::NoAuth,
            b"WRONGPASS" => Self::WrongPass,
            b"NOPERM" => Self::NoPerm,
            b"NOPROTO" => Self::NoProto,
            b"DENIED" => Self::Denied,
            b"CROSSSLOT" => Self::CrossSlot,
            b"WRONGTYPE" => Self::WrongType,
            b"NOGOODSLAVE" | b"IDONTKNOW" => Self::NoMaster,
            b"ERR" => Self::of_unnamed(&text[3..]),
            _ => Self::Other,
        }
    }

    /// Errors that only their text tells apart.
    fn of_unnamed(text: &[u8]) -> Self {
        let text = text.trim_ascii();
        match text {
            b"Function not found" => Self::NoFunction,
            b"max number of clients reached" => Self::MaxClients,
            b"invalid password" => Self::WrongPass,
            b"operation not permitted" => Self::NoAuth,
            // Redis wraps what went wrong in a script; before 7.0 the code stands in the middle.
            _ if text.starts_with(b"Error running script") => Self::of_script(text),
            _ => Self::Other,
        }
    }

    fn of_script(text: &[u8]) -> Self {
        let has = |word: &[u8]| memchr::memmem::find(text, word).is_some();
        if has(b"-OOM") || has(b"OOM command not allowed") {
            Self::OutOfMemory
        } else if has(b"-READONLY") {
            Self::ReadOnly
        } else {
            Self::Other
        }
    }

    /// What it means for the caller.
    pub fn meaning(self) -> Meaning {
        match self {
            Self::Moved | Self::Ask => Meaning::GoThere,
            Self::TryAgain | Self::NoScript | Self::NoFunction => Meaning::RetryHere,
            Self::ClusterDown
            | Self::Loading
            | Self::ReadOnly
            | Self::MasterDown
            | Self::Busy
            | Self::MisConf
            | Self::NoReplicas
            | Self::OutOfMemory
            | Self::MaxClients
            | Self::NoMaster => Meaning::ShardCannotServe,
            Self::NoAuth
            | Self::WrongPass
            | Self::NoPerm
            | Self::NoProto
            | Self::Denied
            | Self::CrossSlot
            | Self::WrongType
            | Self::Other => Meaning::CallersFault,
        }
    }

    /// Whether the node that says so is not the one that should be asked: a look at the topology is due.
    pub(crate) fn hints_at_a_change(self) -> bool {
        matches!(self, Self::Moved | Self::ReadOnly | Self::ClusterDown | Self::MasterDown)
    }
}

/// Why a link is not up.
#[derive(Clone, Debug, PartialEq, Eq, ThisError)]
#[non_exhaustive]
pub enum LinkError {
    /// The peer closed it, or the operating system did.
    #[error("closed: {0}")]
    Closed(String),
    /// The connection was not made.
    #[error("cannot connect: {0}")]
    Connect(String),
    /// The connection was not made in time.
    #[error("no connection within the connect timeout (setting connect_ms)")]
    ConnectTimeout,
    /// The handshake did not end in time.
    #[error("no end of the handshake in time (setting handshake_ms)")]
    HandshakeTimeout,
    /// The handshake was refused, in the server's words.
    #[error("the handshake was refused: {}", Text(text))]
    Refused {
        /// Which error.
        code: Code,
        /// In its words.
        text: Vec<u8>,
    },
    /// Sentinel named a node that is no primary.
    #[error("the node is no primary")]
    NotPrimary,
    /// The oldest call has been waiting too long.
    #[error("no reply for too long (setting stall_ms)")]
    Stalled,
    /// The peer broke the protocol.
    #[error("protocol error: {0}")]
    Protocol(ProtocolError),
    /// TLS failed.
    #[error("TLS: {0}")]
    Tls(String),
    /// Nobody needs it any more.
    #[error("not needed any more")]
    Retired,
}
