//! All settings of the server, with their defaults. `sluice.toml` at the root of the repository documents each; a test
//! holds the file and these defaults against each other.

use std::{
    fmt,
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    str::FromStr,
};

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::{limits::CORES_MAX, listener::TransportChoice};

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
    /// Connections at once; beyond, new ones are closed.
    pub connections_max: usize,
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
        Self { listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 9390)), connections_max: 64 }
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

/// What is wrong with the settings; everything that could be found at once.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub struct ConfigError {
    /// One line per problem: where, what, and what to do.
    pub problems: Vec<String>,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.problems.join("\n"))
    }
}

impl Settings {
    /// Reads a config file; what it does not mention keeps its default.
    ///
    /// # Errors
    ///
    /// When the file cannot be read, or a field is unknown or of the wrong kind.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let name = path.display();
        let one = |problem: String| ConfigError { problems: vec![problem] };
        let text = std::fs::read_to_string(path).map_err(|error| one(format!("{name}: cannot be read: {error}")))?;
        Self::parse(&text).map_err(|(line, message)| one(format!("{name}:{line}: {message}")))
    }

    /// Reads the text of a config file.
    ///
    /// # Errors
    ///
    /// The line, and what is wrong there.
    pub fn parse(text: &str) -> Result<Self, (usize, String)> {
        toml::from_str(text).map_err(|error| {
            let line = error.span().map_or(0, |span| text[..span.start].matches('\n').count() + 1);
            let message = error.message().lines().collect::<Vec<_>>().join(" ");
            (line, message)
        })
    }

    /// Checks what the types cannot.
    ///
    /// # Errors
    ///
    /// All values that are out of their bounds.
    pub fn check(&self) -> Result<(), ConfigError> {
        let mut problems = Vec::new();
        let mut must = |holds: bool, field: &str, rule: &str| {
            if !holds {
                problems.push(format!("{field}: must be {rule}"));
            }
        };
        let transport = &self.transport;
        match &self.cores {
            Cores::Count(count) => must(*count <= CORES_MAX, "cores", "at most 256"),
            Cores::List(list) => must((1..=CORES_MAX).contains(&list.len()), "cores", "a list of 1 to 256 cores"),
        }
        must((8..=4096).contains(&self.resp.args_max), "resp.args_max", "from 8 to 4096");
        must((64..=1 << 24).contains(&self.resp.arg_bytes_max), "resp.arg_bytes_max", "from 64 to 16777216");
        must(
            self.resp.request_bytes_max >= self.resp.arg_bytes_max + 64 && self.resp.request_bytes_max <= 1 << 26,
            "resp.request_bytes_max",
            "at least resp.arg_bytes_max + 64, and at most 67108864",
        );
        must(
            (4096..=1 << 30).contains(&self.resp.output_backlog_bytes),
            "resp.output_backlog_bytes",
            "from 4096 to 1073741824",
        );
        must(self.resp.unix_mode <= 0o777, "resp.unix_mode", "permissions from 0 to 0o777");
        must((1..=1_000_000).contains(&self.limits.connections_max), "limits.connections_max", "from 1 to 1000000");
        must((1024..=1 << 32).contains(&self.limits.buckets), "limits.buckets", "from 1024 to 4294967296");
        must((1..=65_536).contains(&self.limits.rules_max), "limits.rules_max", "from 1 to 65536");
        must(transport.busy_poll_us <= 1_000_000, "transport.busy_poll_us", "at most 1000000");
        must(
            transport.ring_buffers.is_power_of_two() && (16..=32_768).contains(&transport.ring_buffers),
            "transport.ring_buffers",
            "a power of two from 16 to 32768",
        );
        must(
            transport.ring_buffer_bytes.is_multiple_of(4096) && (4096..=1 << 20).contains(&transport.ring_buffer_bytes),
            "transport.ring_buffer_bytes",
            "a multiple of 4096 up to 1048576",
        );
        must(
            transport.ring_entries.is_power_of_two() && (64..=32_768).contains(&transport.ring_entries),
            "transport.ring_entries",
            "a power of two from 64 to 32768",
        );
        must((1..=4096).contains(&self.ops.connections_max), "ops.connections_max", "from 1 to 4096");
        must(
            tracing_subscriber::EnvFilter::try_new(&self.log.level).is_ok(),
            "log.level",
            "a level (error, warn, info, debug, trace) or target=level pairs",
        );
        if problems.is_empty() { Ok(()) } else { Err(ConfigError { problems }) }
    }
}

impl FromStr for Cores {
    type Err = String;

    /// `2` is a count, `0,2` and `0-3` are lists; `0,` is the list of core 0 alone.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || format!("{text:?} is neither a count such as 2 nor a list such as 0,2 or 0-3 (`0,` is core 0)");
        if !text.contains([',', '-']) {
            return text.parse().map(Self::Count).map_err(|_| wrong());
        }
        let mut list = Vec::new();
        for part in text.split(',').filter(|part| !part.is_empty()) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last): (usize, usize) =
                (first.parse().map_err(|_| wrong())?, last.parse().map_err(|_| wrong())?);
            if first > last || last - first >= CORES_MAX {
                return Err(wrong());
            }
            list.extend(first..=last);
        }
        if list.is_empty() { Err(wrong()) } else { Ok(Self::List(list)) }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const ANNOTATED: &str = include_str!("../../sluice.toml");

    #[test]
    fn the_annotated_file_says_the_defaults() {
        assert_eq!(Settings::parse(ANNOTATED).unwrap(), Settings::default());
        Settings::default().check().unwrap();
    }

    /// Uncommenting every optional setting must give all fields that there are.
    #[test]
    fn the_annotated_file_mentions_every_setting() {
        let optional = |line: &str| line.strip_prefix("#= ").unwrap_or(line).to_owned();
        let text: String = ANNOTATED.lines().map(|line| optional(line) + "\n").collect();
        let full = toml::Table::try_from(Settings::parse(&text).unwrap()).unwrap();
        let written: toml::Table = toml::from_str(&text).unwrap();
        let keys = |table: &toml::Table| -> Vec<String> {
            table
                .iter()
                .flat_map(|(key, value)| match value.as_table() {
                    Some(inner) => inner.keys().map(|inner| format!("{key}.{inner}")).collect(),
                    None => vec![key.clone()],
                })
                .collect()
        };
        assert_eq!(keys(&written), keys(&full));
    }

    #[test]
    fn what_is_wrong_is_told_with_its_line() {
        let (line, message) = Settings::parse("\n[resp]\nargs_maximum = 3\n").unwrap_err();
        assert_eq!(line, 3);
        assert!(message.contains("unknown field `args_maximum`") && message.contains("args_max"), "{message}");
        let mut settings = Settings::default();
        settings.transport.ring_buffers = 100;
        settings.limits.buckets = 0;
        assert_eq!(settings.check().unwrap_err().problems.len(), 2);
    }

    #[test]
    fn cores_are_a_count_or_a_list() {
        assert_eq!("2".parse(), Ok(Cores::Count(2)));
        assert_eq!("0,".parse(), Ok(Cores::List(vec![0])));
        assert_eq!("0,2-4".parse(), Ok(Cores::List(vec![0, 2, 3, 4])));
        for wrong in ["", "a", ",", "3-1", "1-", "-1"] {
            assert!(wrong.parse::<Cores>().is_err(), "{wrong:?}");
        }
    }
}
