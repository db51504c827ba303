//! Sockets to bytes and back: one driver per core, between the kernel and [`engine`](crate::engine).
//!
//! Two transports stand behind the same seam, which is the engine's surface: `opened`, `bytes_in`, `settle`,
//! `next_dirty`, `take_output`, `closed`, `tick`.
//!
//! * [`ring`]: a private io_uring per core, driven by one glommio task: multishot receives into provided
//!   buffers, and one system call for all sends and receives of a round. The default.
//! * [`plain`]: glommio's own streams, a task per connection. For kernels that lack what the ring needs.
//!
//! [`placement`] spreads connections over cores, [`park`] lets a driver sleep inside glommio, [`sockets`] binds.

mod names;
pub mod park;
pub mod placement;
pub mod plain;
pub mod ring;
pub mod sockets;

use std::{os::fd::OwnedFd, sync::Arc};

use serde::{Deserialize, Serialize};

use self::{
    placement::{Gate, Placement},
    sockets::SocketFile,
};
use crate::{clock::Clock, lifecycle::Lifecycle};

/// How bytes move between sockets and engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum TransportChoice {
    /// `ring` where the kernel has what it needs, else `plain`.
    #[default]
    Auto,
    /// A private io_uring per core.
    Ring,
    /// glommio's own streams.
    Plain,
}

/// What is spoken on a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Face {
    /// RESP.
    Resp,
    /// HTTP, and gRPC over it.
    Web,
}

/// What a transport is allowed; settings.
#[derive(Clone, Copy, Debug)]
pub struct TransportSettings {
    /// A connection on which nothing comes for this long is closed; 0 means never.
    pub idle_timeout_ms: u64,
    /// A connection whose client reads nothing of what waits for it for this long is closed; 0 means never.
    pub stall_timeout_ms: u64,
    /// How long a driver with nothing to do looks for work before it sleeps, in microseconds.
    pub busy_poll_us: u64,
    /// Receive buffers of a core's ring.
    pub ring_buffers: u16,
    /// Bytes of one receive buffer.
    pub ring_buffer_bytes: u32,
    /// Entries of a core's submission queue.
    pub ring_entries: u32,
}

/// What the driver of one core works with.
pub struct Port {
    /// This core's number among the data cores, from 0.
    pub core: usize,
    /// The file of the Unix socket, on the first core. Removed before that listener closes: then nobody else can have
    /// put a socket of its own there, whose file it would be.
    pub socket_file: Option<SocketFile>,
    /// Listening sockets: this core's share of TCP, and on the first core the Unix socket; and what is spoken there.
    pub listeners: Vec<(OwnedFd, Face)>,
    /// Held until the last of them is closed.
    pub gate: Option<Gate>,
    /// Where connections go.
    pub placement: Arc<Placement>,
    /// Limits and sizes.
    pub settings: TransportSettings,
    /// Whether the server is leaving, and how much time is left.
    pub lifecycle: Arc<Lifecycle>,
    /// The time.
    pub clock: Clock,
}

/// What a refused connection is told before it is closed.
pub const REFUSAL: &[u8] = b"-ERR max number of clients reached\r\n";
/// The same over HTTP.
pub const WEB_REFUSAL: &[u8] =
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";

/// A client that seems to take none of its replies for this long is looked at more closely.
pub(crate) const STUCK_MS: u64 = 250;
/// So long before the end of the grace time, what was taken in advance is given back to the store, whoever still asks.
pub(crate) const GIVE_BACK_MS: u64 = 100;
/// While leaving, a connection on which nothing came for this long has nothing in hand.
pub(crate) const QUIET_MS: u64 = 100;
/// And this long after we have closed our half, the connection is closed whether the client has done so or not. What
/// it sends meanwhile is thrown away, since closing with bytes unread would be a reset, and lose it our last replies.
pub(crate) const GOODBYE_MS: u64 = 500;
/// No more than this is thrown away: a client that goes on for so long does not look at what it is sent.
pub(crate) const GOODBYE_BYTES_MAX: usize = 16 << 20;
