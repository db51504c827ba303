//! What can go wrong with a connection or a query, and what it means for the connection.
//!
//! No text holds a password, and none of a server's texts is longer than [`ERROR_TEXT_BYTES_MAX`].

use std::{fmt, io, path::PathBuf, time::Duration};

use thiserror::Error as ThisError;

use super::limits::{CHANNEL_BYTES_MAX, ERROR_TEXT_BYTES_MAX, PARAMS_MAX};

/// Why there is no connection, or no result.
#[derive(Debug, ThisError)]
#[non_exhaustive]
pub enum Error {
    /// The settings of TLS are wrong.
    #[error(transparent)]
    TlsSettings(#[from] TlsError),
    /// The host's name has no address that the system knows.
    #[error("the host `{host}` cannot be looked up: {source}")]
    LookUp {
        /// Which.
        host: String,
        /// What the system says.
        source: io::Error,
    },
    /// No connection was made.
    #[error("cannot connect to {to}: {source}")]
    Connect {
        /// The address that was tried last.
        to: String,
        /// What the system says.
        source: io::Error,
    },
    /// The connection broke.
    #[error("the connection broke while {doing}: {source}")]
    Io {
        /// What was being done.
        doing: &'static str,
        /// What the system says.
        source: io::Error,
    },
    /// The server closed the connection.
    #[error("the server closed the connection while {doing}")]
    Closed {
        /// What was being done.
        doing: &'static str,
    },
    /// It took too long. A query may have been executed, or may still be: it was asked to stop.
    #[error("{doing} took longer than {deadline:?}")]
    Timeout {
        /// What was being done.
        doing: &'static str,
        /// How long it was allowed to take.
        deadline: Duration,
    },
    /// The server said no.
    #[error(transparent)]
    Server(Box<ServerError>),
    /// The server broke the protocol, or is no PostgreSQL.
    #[error("{0}")]
    Protocol(#[from] ProtocolError),
    /// The server has no TLS, and the settings want it.
    #[error(
        "the server does not offer TLS, and sslmode={mode} wants it: switch `ssl` on in the server, or choose another sslmode"
    )]
    NoTls {
        /// The mode of the settings.
        mode: &'static str,
    },
    /// TLS failed: most often the server's certificate was refused.
    #[error("TLS: {0}")]
    Tls(String),
    /// The server wants the password as it is, and the connection is not encrypted.
    #[error(
        "the server wants the password in clear text over a connection without TLS, so it was not sent: use sslmode=require or above, or \
         scram-sha-256 in the server's pg_hba.conf"
    )]
    ClearText,
    /// The server wants a password, and there is none.
    #[error("the server wants a password ({method}), and none is set")]
    NoPassword {
        /// How the server wants it.
        method: &'static str,
    },
    /// The server wants to be shown who we are in a way that this client does not know.
    #[error(
        "the server wants authentication by {method}, which is not supported: use scram-sha-256, md5 or trust in its pg_hba.conf"
    )]
    Authentication {
        /// Which way.
        method: String,
    },
    /// The server did not prove that it knows the password, so it may be another.
    #[error("the server did not prove that it knows the password (SCRAM): {0}")]
    NotTheServer(String),
    /// The statement copies data to or from the client, which this client does not do.
    #[error("COPY to or from the client is not supported: use INSERT or SELECT")]
    Copy,
    /// An answer is larger than the settings allow.
    #[error(transparent)]
    TooLarge(#[from] TooLarge),
    /// The query cannot be sent as it is. Nothing was sent.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// An earlier error closed the connection, or a query was dropped before its end. Nothing was sent.
    #[error("the connection is closed, because of an earlier error: connect anew")]
    Broken,
}

impl Error {
    /// Whether the connection goes on: true when the server refused a query and went on itself, and when nothing was sent.
    pub fn is_survivable(&self) -> bool {
        match self {
            Self::Server(error) => !error.is_fatal(),
            Self::Request(_) => true,
            _ => false,
        }
    }

    /// The server's error, if it is one.
    pub fn server(&self) -> Option<&ServerError> {
        match self {
            Self::Server(error) => Some(error),
            _ => None,
        }
    }

    /// The five characters that say which error of the server it is.
    pub fn sqlstate(&self) -> Option<&str> {
        self.server().map(|error| error.sqlstate.as_str())
    }
}

/// An error in the server's words.
#[derive(Clone, Debug, Default, PartialEq, Eq, ThisError)]
pub struct ServerError {
    /// Which error, in five characters (PostgreSQL's manual, appendix A); `?????` where the server gave none.
    pub sqlstate: String,
    /// `ERROR`, `FATAL` or `PANIC`.
    pub severity: String,
    /// What is wrong, in one line.
    pub message: String,
    /// More about it.
    pub detail: Option<String>,
    /// What may help.
    pub hint: Option<String>,
}

impl ServerError {
    /// Whether the server closes the connection over it.
    pub fn is_fatal(&self) -> bool {
        self.severity == "FATAL" || self.severity == "PANIC"
    }
}

impl fmt::Display for ServerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PostgreSQL says {}: {} (SQLSTATE {})", self.severity, self.message, self.sqlstate)?;
        if let Some(detail) = &self.detail {
            write!(f, "; detail: {detail}")?;
        }
        match &self.hint {
            Some(hint) => write!(f, "; hint: {hint}"),
            None => Ok(()),
        }
    }
}

/// What a server sent that PostgreSQL would not.
#[derive(Clone, Debug, PartialEq, Eq, ThisError)]
#[non_exhaustive]
pub enum ProtocolError {
    /// The answer to the question for TLS is none.
    #[error("the server answered the question for TLS with byte 0x{0:02x}: it is no PostgreSQL, or a very old one")]
    TlsAnswer(u8),
    /// Bytes came before TLS had begun, which somebody on the way may have put there.
    #[error(
        "the server sent bytes between its answer to the question for TLS and TLS itself: somebody may be in the way"
    )]
    BytesBeforeTls,
    /// A message of a kind that cannot come now.
    #[error("the server sent a message of type {} while {doing}: it is no PostgreSQL, or speaks another version", shown(*.tag))]
    Unexpected {
        /// Its first byte.
        tag: u8,
        /// What was being done.
        doing: &'static str,
    },
    /// A message that says of itself that it is longer than allowed.
    #[error("the server announced a message (type {}) of {bytes} bytes, and {max} are allowed{}", shown(*.tag), hint(*.tag))]
    Length {
        /// Its first byte.
        tag: u8,
        /// How long it says it is.
        bytes: u64,
        /// How long it may be.
        max: usize,
    },
    /// A message that is not what its kind should be.
    #[error("the server sent a message of type {} that cannot be read: {why}", shown(*.tag))]
    Malformed {
        /// Its first byte.
        tag: u8,
        /// What is wrong with it.
        why: String,
    },
    /// A text that is not UTF-8, though the client asked for UTF-8.
    #[error(
        "the server sent text that is not UTF-8: the database's encoding may be SQL_ASCII, which does not check what it stores"
    )]
    NotUtf8,
    /// A row that has another number of values than there are columns.
    #[error("the server sent a row of {values} values for {columns} columns")]
    Columns {
        /// Values of the row.
        values: usize,
        /// Columns of the result.
        columns: usize,
    },
}

/// A message's type as people know it.
fn shown(tag: u8) -> String {
    if tag.is_ascii_graphic() { format!("`{}`", char::from(tag)) } else { format!("0x{tag:02x}") }
}

/// Rows are the only messages that somebody may want to be longer.
fn hint(tag: u8) -> &'static str {
    if tag == b'D' { " (setting message_bytes_max)" } else { "" }
}

/// What is larger than the settings allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ThisError)]
#[non_exhaustive]
pub enum TooLarge {
    /// The number of rows.
    #[error("the result has more than {max} rows (setting rows_max): ask for less at a time")]
    Rows {
        /// How many may be.
        max: usize,
    },
    /// Their size.
    #[error("the result has more than {max} bytes (setting result_bytes_max): ask for less at a time")]
    ResultBytes {
        /// How many may be.
        max: usize,
    },
}

/// Why a query cannot be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ThisError)]
#[non_exhaustive]
pub enum RequestError {
    /// A text has a byte 0, which ends texts on the wire.
    #[error("the query or a parameter has a byte 0, which PostgreSQL's texts cannot have")]
    Nul,
    /// Too many parameters.
    #[error("{0} parameters; a query has at most {PARAMS_MAX}")]
    Params(usize),
    /// The query is too long.
    #[error("the query and its parameters are longer than {max} bytes (setting request_bytes_max)")]
    Bytes {
        /// How long they may be.
        max: usize,
    },
    /// The name of the channel is empty or too long.
    #[error("the name of the channel has {0} bytes; it may have 1 to {CHANNEL_BYTES_MAX}")]
    Channel(usize),
}

/// What is wrong with the settings of TLS.
#[derive(Debug, ThisError)]
#[non_exhaustive]
pub enum TlsError {
    /// The file of authorities cannot be read.
    #[error("sslrootcert {}: {source}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// No certificate can be read from it.
    #[error("sslrootcert: no certificate can be read: {0}; it must be PEM")]
    Certificate(String),
    /// The system's certificate authorities cannot be read.
    #[error("the system's certificate authorities cannot be read: {0}; give a file with sslrootcert=")]
    System(String),
    /// The host is no name that a certificate can have.
    #[error("`{0}` is no name that a certificate can have: use sslmode=verify-ca, or a proper name")]
    Name(String),
    /// rustls refuses the settings.
    #[error(transparent)]
    Rustls(#[from] rustls::Error),
}

/// Text from a server, cut and without control characters, which could make a log lie.
pub(crate) fn bounded(bytes: &[u8]) -> String {
    let cut = &bytes[..bytes.len().min(ERROR_TEXT_BYTES_MAX)];
    let mut text: String = String::from_utf8_lossy(cut).chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    // Cutting may have split a character, and a replacement is longer than what it replaces.
    if bytes.len() > cut.len() || text.len() > ERROR_TEXT_BYTES_MAX {
        let mut end = text.len().min(ERROR_TEXT_BYTES_MAX);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
        text.push('…');
    }
    text
}
