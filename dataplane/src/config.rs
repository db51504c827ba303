//! All settings of the server, with their defaults. `sluice.toml` at the root of the repository documents each; a test
//! holds the file and these defaults against each other.
//!
//! `reading` turns a file into settings, `bounds` says which values make sense, `machine` which of them this machine can
//! serve, `problem` how people are told.

mod bounds;
mod machine;
mod problem;
mod reading;

use std::{
    fmt,
    fs::File,
    io::{self, Read},
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    str::FromStr,
    sync::Arc,
};

use ipnet::IpNet;
use serde::{
    Deserialize, Deserializer, Serialize,
    de::{self, SeqAccess, Visitor},
};

pub use self::{
    bounds::is_log_filter,
    machine::read_password,
    problem::{ConfigError, Problem},
};
use policy_sync::model::OnFailure;

use crate::{
    hot::HotSettings,
    limits::CORES_MAX,
    listener::TransportChoice,
    policy::LocalTerms,
    store::breaker::BreakerSettings,
    web::{
        peers::Peers,
        settings::{ForwardAuth, HeaderStyle, WebSettings},
    },
};

/// The largest config file, in bytes: 1 MiB.
pub const FILE_BYTES_MAX: u64 = 1 << 20;

/// How an address is written.
pub const ADDRESS_HINT: &str = "write it as \"127.0.0.1:6390\" or \"[::1]:6390\"";

/// All settings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// Which cores serve checks.
    pub cores: Cores,
    /// The policy file; absent means the built-in example.
    pub policy: Option<PathBuf>,
    /// The store of the counts.
    pub redis: Redis,
    /// The policy store.
    pub postgres: Postgres,
    /// What shadow rules saw.
    pub shadow: Shadow,
    /// Heat, and what follows it.
    pub hot: HotSettings,
    /// The RESP face.
    pub resp: Resp,
    /// The HTTP face.
    pub http: Http,
    /// The gRPC face.
    pub grpc: Grpc,
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
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Cores {
    /// The first this many that the process may use; 0 means all.
    Count(usize),
    /// These, by the kernel's numbers.
    List(Vec<usize>),
}

/// Settings of the store of the counts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Redis {
    /// Where to begin; none means that the counts stay in this process.
    pub urls: Vec<String>,
    /// A file with the password, where the URLs do not hold it.
    pub password_file: Option<PathBuf>,
    /// A file with the certificates of the authorities that `rediss://` trusts; absent means the system's.
    pub ca_file: Option<PathBuf>,
    /// How long a check waits for the store.
    pub deadline_ms: u64,
    /// How long opening a connection may take.
    pub connect_timeout_ms: u64,
    /// Checks of a core that may wait for the store at once.
    pub waiting_max: usize,
    /// Shards that the process can know, over its life.
    pub shards_max: usize,
    /// Call the script as a function (FCALL).
    pub functions: bool,
    /// What the buckets in memory get of a limit, where the rule does not say it.
    pub local_share: f64,
    /// The buckets in memory are full again when nothing was asked of them for this long.
    pub local_idle_ms: u64,
    /// What answers CL.THROTTLE and THROTTLE while the store does not.
    pub throttle_on_failure: OnFailure,
    /// When a shard is no longer asked.
    pub breaker: BreakerSettings,
}

/// Settings of the policy store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Postgres {
    /// Where it is; none means that the policy comes from a file.
    pub url: Option<String>,
    /// A file with the password, where the URL does not hold it.
    pub password_file: Option<PathBuf>,
    /// What the store calls this gateway; absent means host name and RESP port.
    pub gateway: Option<String>,
    /// How often the store is asked without a push, give or take a tenth.
    pub poll_ms: u64,
    /// How long an answer of the store may take.
    pub deadline_ms: u64,
    /// How long opening a connection may take, to the store and to hear pushes.
    pub connect_timeout_ms: u64,
    /// Hear the store's NOTIFY, on a connection of its own.
    pub notify: bool,
    /// The channel of Redis on which the admin API publishes changes; empty means not to listen there.
    pub redis_channel: String,
    /// Where the last good policy is kept on disk; absent means nowhere.
    pub last_good: Option<PathBuf>,
    /// What to do at start when there is no policy at all: neither from the store nor from disk.
    pub without_policy: WithoutPolicy,
}

/// What to do at start when there is no policy at all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WithoutPolicy {
    /// Serve no checks until there is one.
    #[default]
    Wait,
    /// Serve, and allow everything.
    Serve,
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

/// Where a face listens: an address, or `off`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listen(pub Option<SocketAddr>);

impl FromStr for Listen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "off" {
            return Ok(Self(None));
        }
        let wrong = |error| format!("{error} ({ADDRESS_HINT}, or \"off\")");
        text.parse().map(|address| Self(Some(address))).map_err(wrong)
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(address) => address.fmt(f),
            None => f.write_str("off"),
        }
    }
}

impl<'de> Deserialize<'de> for Listen {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

impl Serialize for Listen {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Settings of the HTTP face; its limits hold for gRPC, too.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Http {
    /// The TCP address of `/v1/check` and `/v1/forward-auth`.
    pub listen: Listen,
    /// A file with the token that requests must bring along; absent means none.
    pub token_file: Option<PathBuf>,
    /// Which headers tell a client about its limit.
    pub headers: HeaderStyle,
    /// Bytes of a request's head.
    pub head_bytes_max: usize,
    /// Bytes of a request's body.
    pub body_bytes_max: usize,
    /// Checks of one request.
    pub checks_max: usize,
    /// Requests that an HTTP/2 connection may have in hand.
    pub streams_max: u32,
    /// How long a request may take to come.
    pub request_timeout_ms: u64,
    /// How long a connection may be without a request; 0 means for ever.
    pub idle_timeout_ms: u64,
    /// Proxies whose word is taken for a client's address.
    pub trusted_proxies: Vec<IpNet>,
    /// The header in which they give it.
    pub client_address_header: String,
    /// IPv6 addresses with so many leading bits in common are one client.
    pub ipv6_prefix_bits: u8,
    /// Where forward-auth finds attributes.
    pub forward_auth: ForwardAuth,
}

/// Settings of the gRPC face.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Grpc {
    /// The TCP address of Envoy's rate limit service.
    pub listen: Listen,
    /// A request with a descriptor over its limit takes from the others all the same, as the reference does.
    pub count_all: bool,
    /// Descriptors may give back (`is_negative_hits`).
    pub allow_refunds: bool,
    /// Which headers Envoy is to add to its answer.
    pub headers: HeaderStyle,
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
            redis: Redis::default(),
            postgres: Postgres::default(),
            shadow: Shadow::default(),
            hot: HotSettings::default(),
            resp: Resp::default(),
            http: Http::default(),
            grpc: Grpc::default(),
            limits: Limits::default(),
            transport: Transport::default(),
            ops: Ops::default(),
            shutdown: Shutdown::default(),
            log: Log::default(),
        }
    }
}

impl Default for Redis {
    fn default() -> Self {
        Self {
            urls: Vec::new(),
            password_file: None,
            ca_file: None,
            deadline_ms: 5,
            connect_timeout_ms: 50,
            waiting_max: 8_192,
            shards_max: 64,
            functions: false,
            local_share: 0.5,
            local_idle_ms: 300_000,
            throttle_on_failure: OnFailure::Local,
            breaker: BreakerSettings::default(),
        }
    }
}

/// How what shadow rules see is written down and reported to the policy store.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Shadow {
    /// How often it is reported.
    pub flush_ms: u64,
    /// Identities that each core follows between two reports.
    pub identities: usize,
    /// Identities that the store keeps of a rule's hour: those that were denied most.
    pub identities_kept: u32,
    /// A file with a key, with which identities are hashed before they leave; absent means that they are told as they are.
    pub identity_key_file: Option<PathBuf>,
}

impl Default for Shadow {
    fn default() -> Self {
        Self { flush_ms: 10_000, identities: 4_096, identities_kept: 1_000, identity_key_file: None }
    }
}

impl Default for Postgres {
    fn default() -> Self {
        Self {
            url: None,
            password_file: None,
            gateway: None,
            poll_ms: 30_000,
            deadline_ms: 5_000,
            connect_timeout_ms: 2_000,
            notify: true,
            redis_channel: "sluice:policy".into(),
            last_good: None,
            without_policy: WithoutPolicy::Wait,
        }
    }
}

impl Redis {
    /// How the shards are found; `None` where no URL is given, and the counts stay in this process.
    ///
    /// # Errors
    ///
    /// What is wrong with the URLs; never with a password of theirs.
    pub fn seeds(&self) -> Result<Option<resp_client::Config>, resp_client::UrlError> {
        if self.urls.is_empty() { Ok(None) } else { resp_client::Config::from_urls(&self.urls).map(Some) }
    }

    /// How the buckets in memory are made.
    pub fn local_terms(&self) -> LocalTerms {
        LocalTerms { share: self.local_share, idle_ms: self.local_idle_ms }
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

impl Default for Http {
    fn default() -> Self {
        Self {
            listen: Listen(Some(SocketAddr::from((Ipv4Addr::LOCALHOST, 8390)))),
            token_file: None,
            headers: HeaderStyle::Draft10,
            head_bytes_max: 16 * 1024,
            body_bytes_max: 64 * 1024,
            checks_max: 64,
            streams_max: 256,
            request_timeout_ms: 10_000,
            idle_timeout_ms: 3_900_000,
            trusted_proxies: LOOPBACK.map(IpNet::from).to_vec(),
            client_address_header: "x-forwarded-for".into(),
            ipv6_prefix_bits: 64,
            forward_auth: ForwardAuth::default(),
        }
    }
}

/// Networks of this host alone.
const LOOPBACK: [IpNet; 2] = [
    IpNet::new_assert(std::net::IpAddr::V4(Ipv4Addr::new(127, 0, 0, 0)), 8),
    IpNet::new_assert(std::net::IpAddr::V6(std::net::Ipv6Addr::LOCALHOST), 128),
];

impl Default for Grpc {
    fn default() -> Self {
        Self {
            listen: Listen(Some(SocketAddr::from((Ipv4Addr::LOCALHOST, 8391)))),
            count_all: false,
            allow_refunds: false,
            headers: HeaderStyle::None,
        }
    }
}

impl Http {
    /// What the web faces of a core are allowed and told.
    pub fn web(&self, grpc: &Grpc, token: Option<Arc<str>>) -> WebSettings {
        WebSettings {
            token,
            head_bytes_max: self.head_bytes_max,
            body_bytes_max: self.body_bytes_max,
            checks_max: self.checks_max,
            streams_max: self.streams_max,
            request_timeout_ms: self.request_timeout_ms,
            idle_timeout_ms: self.idle_timeout_ms,
            headers: self.headers,
            peers: Peers {
                trusted: self.trusted_proxies.clone(),
                header: self.client_address_header.to_ascii_lowercase(),
                ipv6_prefix_bits: self.ipv6_prefix_bits,
            },
            forward_auth: self.forward_auth.clone(),
            count_all: grpc.count_all,
            allow_refunds: grpc.allow_refunds,
            grpc_headers: grpc.headers,
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

impl Settings {
    /// Reads a config file and checks it; what it does not mention keeps its default.
    ///
    /// # Errors
    ///
    /// Everything that is wrong with it, each with its line.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let name = path.display().to_string();
        let mut bytes = Vec::new();
        // One byte more than allowed tells a file that is too large, whatever its metadata says.
        let read = File::open(path).and_then(|file| file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes));
        read.map_err(|error| ConfigError::unreadable(&name, &error))?;
        Self::of_bytes(&bytes, &name)
    }

    /// As [`parse`](Self::parse), of what was read from a file.
    ///
    /// # Errors
    ///
    /// Everything that is wrong with it, each with its line.
    pub fn of_bytes(bytes: &[u8], source: &str) -> Result<Self, ConfigError> {
        let unreadable = |why: String| ConfigError::unreadable(source, &io::Error::other(why));
        if bytes.len() as u64 > FILE_BYTES_MAX {
            return Err(unreadable(format!(
                "larger than {FILE_BYTES_MAX} bytes, the most that a config file may have"
            )));
        }
        let text = std::str::from_utf8(bytes).map_err(|_| unreadable("not UTF-8 text".into()))?;
        Self::parse(text, source)
    }

    /// Reads and checks the text of a config file. `source` is what problems call it.
    ///
    /// # Errors
    ///
    /// Everything that is wrong with it, each with its line.
    pub fn parse(text: &str, source: &str) -> Result<Self, ConfigError> {
        reading::parse(text, source)
    }

    /// Checks what the types cannot.
    ///
    /// # Errors
    ///
    /// All values that are out of their bounds.
    pub fn check(&self) -> Result<(), ConfigError> {
        let problems: Vec<_> = bounds::violations(self).into_iter().map(Problem::from).collect();
        if problems.is_empty() { Ok(()) } else { Err(ConfigError { problems }) }
    }

    /// Checks that this machine has the memory; all else that it may lack is found by whoever needs it.
    ///
    /// # Errors
    ///
    /// When it has not.
    pub fn check_memory(&self) -> Result<(), ConfigError> {
        let lack = machine::lacks_memory(self);
        lack.map_or(Ok(()), |lack| Err(ConfigError { problems: vec![lack.into()] }))
    }

    /// Checks, for settings that were read from this text, that this machine can serve them.
    ///
    /// # Errors
    ///
    /// All that it lacks, each with the line that asks for it.
    pub fn check_machine(&self, text: &str, source: &str) -> Result<(), ConfigError> {
        let problems = reading::placed(text, source, machine::lacks(self));
        if problems.is_empty() { Ok(()) } else { Err(ConfigError { problems }) }
    }
}

impl FromStr for Cores {
    type Err = String;

    /// `2` is a count, `0,2` and `0-3` are lists; `0,` is the list of core 0 alone.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.contains([',', '-']) {
            return Self::list(text);
        }
        let wrong = |_| format!("{text:?} is neither a count such as 2 nor a list such as 0,2 or 0-3");
        text.parse().map(Self::Count).map_err(wrong)
    }
}

impl Cores {
    /// Reads a list of core numbers, such as `0`, `0,2-3`; a comma at the end is allowed.
    ///
    /// # Errors
    ///
    /// What is wrong with it, for people.
    pub fn list(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is not a list of core numbers such as 0,2 or 0-3");
        let number = |text: &str| text.parse::<usize>().map_err(|_| wrong());
        let mut list = Vec::new();
        for part in text.strip_suffix(',').unwrap_or(text).split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = (number(first)?, number(last)?);
            if first > last || last - first >= CORES_MAX {
                return Err(wrong());
            }
            list.extend(first..=last);
        }
        Ok(Self::List(list))
    }
}

impl<'de> Deserialize<'de> for Cores {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(CoresVisitor)
    }
}

/// By hand, because the derived one would not say what is expected.
struct CoresVisitor;

impl<'de> Visitor<'de> for CoresVisitor {
    type Value = Cores;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a count such as 2 (0 = all) or a list of core numbers such as [0, 2]")
    }

    fn visit_i64<E: de::Error>(self, count: i64) -> Result<Cores, E> {
        let wrong = |_| E::invalid_value(de::Unexpected::Signed(count), &self);
        usize::try_from(count).map(Cores::Count).map_err(wrong)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut numbers: A) -> Result<Cores, A::Error> {
        let mut list = Vec::new();
        while let Some(number) = numbers.next_element()? {
            list.push(number);
        }
        Ok(Cores::List(list))
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;

    const ANNOTATED: &str = include_str!("../../sluice.toml");

    #[test]
    fn the_annotated_file_says_the_defaults() {
        assert_eq!(Settings::parse(ANNOTATED, "sluice.toml").unwrap(), Settings::default());
    }

    /// Uncommenting every optional setting must give all fields that there are.
    #[test]
    fn the_annotated_file_mentions_every_setting() {
        let optional = |line: &str| line.strip_prefix("#= ").unwrap_or(line).to_owned();
        let text: String = ANNOTATED.lines().map(|line| optional(line) + "\n").collect();
        // Not all of them go together, so only their names are looked at.
        let full = toml::Table::try_from(toml::from_str::<Settings>(&text).unwrap()).unwrap();
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
    fn cores_are_a_count_or_a_list() {
        assert_eq!("2".parse(), Ok(Cores::Count(2)));
        assert_eq!("0,".parse(), Ok(Cores::List(vec![0])));
        assert_eq!("0,2-4".parse(), Ok(Cores::List(vec![0, 2, 3, 4])));
        assert_eq!(Cores::list("0"), Ok(Cores::List(vec![0])));
        for wrong in ["", "a", ",", "3-1", "1-", "-1", "1,,2", "0-1000000"] {
            assert!(wrong.parse::<Cores>().is_err(), "{wrong:?}");
            assert!(Cores::list(wrong).is_err(), "{wrong:?}");
        }
    }
}
