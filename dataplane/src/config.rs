//! All settings of the server, with their defaults. `sluice.toml` at the root of the repository documents each; a test
//! holds the file and these defaults against each other.

use std::{
    net::{Ipv4Addr, SocketAddr},
    path::PathBuf,
};

use serde::{Deserialize, Serialize};

use crate::listener::TransportChoice;

/// All settings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// Which cores serve checks.
    pub cores: Cores,
    /// The policy file; absent means the built-in example.
    pub policy: Option<PathBuf>,
    /// The RESP face.
    pub resp: Resp,
    /// Bounds.
    pub limits: Limits,
    /// How bytes move between sockets and engine.
    pub transport: Transport,
    /// The ops port.
    pub ops: Ops,
    /// How the server leaves.
    pub shutdown: Shutdown,
    /// The log.
    pub log: Log,
}

/// Which cores serve checks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Cores {
    /// The first this many that the process may use; 0 means all.
    Count(usize),
    /// These, by the kernel's numbers.
    List(Vec<usize>),
}

/// Settings of the RESP face.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Resp {
    /// The TCP address.
    pub listen: SocketAddr,
    /// The Unix socket's path; absent means none.
    pub listen_unix: Option<PathBuf>,
    /// The Unix socket's permissions.
    pub unix_mode: u32,
    /// Listen even where another process listens on the same port and would take a share of the connections.
    pub share_port: bool,
    /// A file with the password that AUTH must give; absent means none.
    pub password_file: Option<PathBuf>,
    /// Words of a request, the command included.
    pub args_max: usize,
    /// Bytes of one word.
    pub arg_bytes_max: usize,
    /// Bytes of a whole request.
    pub request_bytes_max: usize,
    /// Bytes of replies that may wait for a client that does not read.
    pub output_backlog_bytes: usize,
}

/// Bounds of the process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Connections of all cores together.
    pub connections_max: usize,
    /// Buckets in memory, 18.3 bytes each; rounded up.
    pub buckets: usize,
    /// Rules that may have counters at once.
    pub rules_max: usize,
    /// A silent connection is closed after this; 0 means never.
    pub idle_timeout_ms: u64,
    /// A connection whose client does not read is closed after this; 0 means never.
    pub stall_timeout_ms: u64,
}

/// Settings of the transport.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Transport {
    /// Which one.
    pub kind: TransportChoice,
    /// How long an idle core looks for work before it sleeps, in microseconds.
    pub busy_poll_us: u64,
    /// Receive buffers of each core's ring; a power of two.
    pub ring_buffers: u16,
    /// Bytes of one receive buffer.
    pub ring_buffer_bytes: u32,
    /// Entries of each core's submission queue; a power of two.
    pub ring_entries: u32,
}

/// Settings of the ops port.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Ops {
    /// The address of `/metrics`, `/healthz`, `/readyz` and `/v1/status`.
    pub listen: SocketAddr,
}

/// Settings of leaving.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Shutdown {
    /// How long `/readyz` says 503 before listeners close, so that load balancers look away.
    pub drain_ms: u64,
    /// How long connections may then take to finish.
    pub grace_ms: u64,
}

/// Settings of the log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Log {
    /// What is logged: a level, or `target=level` pairs.
    pub level: String,
    /// `text` or `json`.
    pub format: LogFormat,
}

/// How log lines look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// For programs.
    Json,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            cores: Cores::Count(0),
            policy: None,
            resp: Resp::default(),
            limits: Limits::default(),
            transport: Transport::default(),
            ops: Ops::default(),
            shutdown: Shutdown::default(),
            log: Log::default(),
        }
    }
}

impl Default for Resp {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 6390)),
            listen_unix: None,
            unix_mode: 0o660,
            share_port: false,
            password_file: None,
            args_max: 256,
            arg_bytes_max: 16 * 1024,
            request_bytes_max: 64 * 1024,
            output_backlog_bytes: 1024 * 1024,
        }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections_max: 10_000,
            buckets: 1_000_000,
            rules_max: 16_384,
            idle_timeout_ms: 0,
            stall_timeout_ms: 30_000,
        }
    }
}

impl Default for Transport {
    fn default() -> Self {
        Self {
            kind: TransportChoice::Auto,
            busy_poll_us: 50,
            ring_buffers: 256,
            ring_buffer_bytes: 16 * 1024,
            ring_entries: 4096,
        }
    }
}

impl Default for Ops {
    fn default() -> Self {
        Self { listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 9390)) }
    }
}

impl Default for Shutdown {
    fn default() -> Self {
        Self { drain_ms: 0, grace_ms: 5_000 }
    }
}

impl Default for Log {
    fn default() -> Self {
        Self { level: "info".into(), format: LogFormat::Text }
    }
}
