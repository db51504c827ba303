//! One connection, without its socket: what it said so far, what it is still to be told, and what it agreed on.

use super::{remote::Waiting, web::WebSession};

/// A connection's number on its core: an index into the engine's sessions and the transport's sockets alike.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ConnId(pub u32);

impl ConnId {
    /// As an index.
    #[inline(always)]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// What a connection has agreed on, and its bytes in both directions.
#[derive(Default)]
pub(super) struct Session {
    /// The beginning of a request whose end has not come; or, while paused, whatever came.
    pub(super) input: Vec<u8>,
    /// Replies that the transport has not taken yet.
    pub(super) output: Vec<u8>,
    /// Replies that must not leave before a check that the store has not answered.
    pub(super) waiting: Waiting,
    /// The number that CLIENT ID tells; unique within the process.
    pub(super) id: u64,
    /// The name that the client gave itself.
    pub(super) name: Vec<u8>,
    /// RESP3 was agreed on by HELLO 3.
    pub(super) resp3: bool,
    /// No password is set, or the client gave it.
    pub(super) authenticated: bool,
    /// Nothing more is read; the connection closes when its output is sent.
    pub(super) closing: bool,
    /// The output backlog is full; nothing more is decided until the client has read.
    pub(super) paused: bool,
    /// The session is in the list of those that have something for the transport.
    pub(super) dirty: bool,
    /// The connection speaks HTTP.
    pub(super) web: Option<Box<WebSession>>,
    /// The slot is in use.
    pub(super) open: bool,
}
