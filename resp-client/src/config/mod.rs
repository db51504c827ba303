//! Settings of a client.

mod secret;
mod url;
#[cfg(test)]
mod url_tests;

use std::fmt;

pub use self::{secret::Secret, url::UrlError};
use crate::{clock::Micros, reply::Limits, script::Script, tls::TlsConfig};

/// Where a node listens.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Address {
    /// A host's name or address, and a port.
    Tcp {
        /// The name, or the address without brackets.
        host: String,
        /// The port.
        port: u16,
    },
    /// The path of a Unix socket.
    Unix(String),
}

impl Address {
    /// A host and a port.
    pub fn tcp(host: impl Into<String>, port: u16) -> Self {
        Self::Tcp { host: host.into(), port }
    }

    /// The host, if it has one.
    pub fn host(&self) -> Option<&str> {
        match self {
            Self::Tcp { host, .. } => Some(host),
            Self::Unix(_) => None,
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "{host}:{port}"),
            Self::Unix(path) => f.write_str(path),
        }
    }
}

/// How the shards are found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mode {
    /// One Redis.
    Single(Address),
    /// The primary that Sentinel names.
    Sentinel {
        /// Sentinels, in the order in which they are asked.
        sentinels: Vec<Address>,
        /// The name they know the primary by.
        master: String,
    },
    /// A cluster.
    Cluster {
        /// Nodes to learn the others from; one that answers is enough.
        seeds: Vec<Address>,
    },
}

/// Who the client is to a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// The ACL user; without one, the password is that of the user `default`.
    pub user: Option<String>,
    /// The password.
    pub password: Secret,
}

/// Which version of the protocol is asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Protocol {
    /// RESP2, without HELLO: for proxies that do not know it.
    Resp2,
    /// RESP3 where the server knows it, and RESP2 where not.
    #[default]
    Resp3,
}

/// Settings of a client. [`Config::from_urls`] fills in where to connect to; the rest has defaults.
#[derive(Clone, Debug)]
pub struct Config {
    /// How the shards are found.
    pub mode: Mode,
    /// User and password for the shards.
    pub credentials: Option<Credentials>,
    /// User and password for the sentinels, which have their own.
    pub sentinel_credentials: Option<Credentials>,
    /// The database to select; a cluster has only 0.
    pub database: u32,
    /// The name under which CLIENT LIST shows the connections.
    pub client_name: Option<String>,
    /// Which version of the protocol is asked for.
    pub protocol: Protocol,
    /// TLS on all connections but those of Unix sockets.
    pub tls: Option<TlsConfig>,
    /// The scripts that calls may name.
    pub scripts: Vec<Script>,

    /// Calls in flight: the size of the in-flight table, which is allocated at start.
    pub in_flight_max: usize,
    /// Bytes of a call for which the table has room; longer calls allocate.
    pub call_bytes: usize,
    /// Bytes that may wait to be sent on one link.
    pub output_bytes_max: usize,
    /// Shards (and seeds) that the client knows at a time.
    pub shards_max: usize,
    /// What one reply may be at most.
    pub limits: Limits,

    /// How long making a connection may take, name lookup included.
    pub connect_ms: u64,
    /// How long the handshake may take after that.
    pub handshake_ms: u64,
    /// A link whose oldest command has waited so long for its reply is closed and made anew.
    pub stall_ms: u64,
    /// The pause before the first reconnect; doubled at each failure, and spread by half.
    pub backoff_ms_min: u64,
    /// The longest pause between reconnects.
    pub backoff_ms_max: u64,
    /// The pause before a call that met a slot on the move is tried again.
    pub try_again_ms: u64,
    /// How often a call may be sent anew before its last error is handed out.
    pub attempts_max: u8,
    /// How often a cluster's topology is asked for when nothing hints at a change; spread by a tenth.
    pub refresh_secs: u64,
    /// The shortest time between two of these; spread by half.
    pub refresh_ms_min: u64,
    /// How often Sentinel is asked for the primary.
    pub sentinel_ms: u64,
}

impl Config {
    /// Settings for a way to find the shards, everything else by default.
    pub fn new(mode: Mode) -> Self {
        Self {
            mode,
            credentials: None,
            sentinel_credentials: None,
            database: 0,
            client_name: None,
            protocol: Protocol::default(),
            tls: None,
            scripts: Vec::new(),
            in_flight_max: 4096,
            call_bytes: 256,
            output_bytes_max: 4 << 20,
            shards_max: 256,
            limits: Limits::default(),
            connect_ms: 50,
            handshake_ms: 500,
            stall_ms: 1000,
            backoff_ms_min: 20,
            backoff_ms_max: 2000,
            try_again_ms: 1,
            attempts_max: 8,
            refresh_secs: 60,
            refresh_ms_min: 500,
            sentinel_ms: 1000,
        }
    }

    /// Settings from URLs: one, or several of the same kind, which are then seeds of one cluster or sentinels of one
    /// primary.
    ///
    /// `redis://[user:password@]host[:port][/db]` · `rediss://…` with TLS · `redis+unix:///path[?db=n]`, also `unix://` ·
    /// `redis+cluster://host[:port][,host[:port]]…` · `redis+sentinel://host[:port][,…]/master[/db]` · and
    /// `rediss+cluster`, `rediss+sentinel`. Users and passwords may have any byte as `%XX`. Several `redis://` are
    /// seeds of one cluster.
    ///
    /// TLS checks the server by the system's certificate authorities; [`Config::tls`] sets others.
    pub fn from_urls<U: AsRef<str>>(urls: &[U]) -> Result<Self, UrlError> {
        url::config(urls)
    }

    /// Where to connect to first: the Redis, the sentinels, or the seeds.
    pub fn addresses(&self) -> &[Address] {
        match &self.mode {
            Mode::Single(address) => std::slice::from_ref(address),
            Mode::Sentinel { sentinels, .. } => sentinels,
            Mode::Cluster { seeds } => seeds,
        }
    }

    pub(crate) fn backoff_max(&self) -> Micros {
        Micros::from_millis(self.backoff_ms_max.max(self.backoff_ms_min).max(1))
    }
}
