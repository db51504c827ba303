//! What the end-to-end tests stand on: a server in its own process on free ports, and a client that says exactly what it
//! is told to.
//!
//! Every test of the RESP face runs on both transports and, where cores matter, on one and on two; see [`Setup::all`].
//!
//! What stands behind the server is real too, and breaks on command: one Redis ([`redis_server`]), a cluster
//! ([`redis_cluster`]), a primary that sentinels watch ([`redis_sentinel`]), PostgreSQL ([`postgres`]), and a network that delays, garbles and cuts
//! ([`proxy`]). `tests/rig.rs` shows each of them by itself.
#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test that cannot go on must stop, with the reason")]
#![allow(clippy::disallowed_methods, reason = "tests wait for real processes")]

pub mod admin;
mod certificates;
pub mod http;
pub mod lateness;
pub mod load;
pub mod postgres;
pub mod proxy;
pub mod redis_cluster;
pub mod redis_sentinel;
pub mod redis_server;

use std::{
    fs::File,
    io::{self, BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::OnceLock,
    time::{Duration, Instant},
};

use redis_protocol::resp2::decode::decode;
pub use redis_protocol::resp2::types::OwnedFrame as Reply;
use tempfile::TempDir;

/// How long anything may take before a test gives up on it. Generous: it is only reached when something is broken.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// A policy of one rule, `one`, whose buckets no test empties.
pub const AMPLE: &str = r#"
[[rule]]
name = "one"
per = ["key"]
limit = { capacity = 1000000, refill = 1000000, period = "1s" }
"#;

/// How a server is started.
#[derive(Clone, Debug)]
pub struct Setup {
    /// `ring` or `plain`.
    pub transport: &'static str,
    /// How many cores.
    pub cores: usize,
    /// More lines for the config file.
    pub config: String,
    /// Whether the log goes into a pipe that nobody reads.
    pub log_stalls: bool,
}

impl Setup {
    /// One core, this transport.
    pub fn new(transport: &'static str) -> Self {
        Self { transport, cores: 1, config: String::new(), log_stalls: false }
    }

    /// Both transports, on one and on two cores.
    pub fn all() -> Vec<Self> {
        let two = |setup: Self| [setup.clone(), Self { cores: 2, ..setup }];
        Self::transports().into_iter().flat_map(two).collect()
    }

    /// Both transports, on one core.
    pub fn transports() -> Vec<Self> {
        vec![Self::new("ring"), Self::new("plain")]
    }

    /// With more lines in the config file.
    pub fn with(mut self, config: &str) -> Self {
        self.config.push_str(config);
        self
    }

    /// With the counts in Redis, and more lines for that section.
    pub fn with_redis(self, urls: &[String], settings: &str) -> Self {
        self.with(&format!("[redis]\nurls = {urls:?}\n{settings}\n"))
    }
}

/// What a server logs to, in its folder. Not beside the policy: it watches that folder.
const LOG: &str = "log/sluice.log";

/// A running server. Killed when dropped; a test that fails shows what it logged.
pub struct Server {
    child: Child,
    /// Where it serves RESP.
    pub resp: SocketAddr,
    /// Where it serves HTTP.
    pub http: SocketAddr,
    /// Where it serves gRPC.
    pub grpc: SocketAddr,
    /// Where it serves the ops port.
    pub ops: SocketAddr,
    folder: TempDir,
}

impl Server {
    /// Starts a server with this policy and waits until it says that it serves.
    pub fn start(setup: &Setup, policy: &str) -> Self {
        Self::launch(setup, Some(policy))
    }

    /// Starts a server that has its policy from the store that its config names, and waits until it says that it serves.
    pub fn start_with_store(setup: &Setup) -> Self {
        Self::launch(setup, None)
    }

    fn launch(setup: &Setup, policy: Option<&str>) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        if let Some(policy) = policy {
            std::fs::write(folder.path().join("policy.toml"), policy).expect("writing the policy");
        }
        std::fs::write(folder.path().join("sluice.toml"), &setup.config).expect("writing the config");
        std::fs::create_dir(folder.path().join("log")).expect("a folder for the log");
        let began = Instant::now();
        let (child, lines, first) = loop {
            let mut child = spawn(setup, folder.path());
            let mut lines = BufReader::new(child.stdout.take().expect("stdout is piped")).lines();
            if let Some(first) = lines.next() {
                break (child, lines, first.expect("reading its output"));
            }
            let _ = child.wait();
            // What a ring of another server has locked comes back only some time after that server's end, and the limit
            // (ulimit -l) holds for all of a user's processes together.
            let log = read_log(folder.path());
            let may_help = log.contains("Cannot allocate memory") && began.elapsed() < PATIENCE;
            assert!(may_help, "the server ended at once:\n{log}");
            std::thread::park_timeout(Duration::from_millis(100));
        };
        // Goes on reading, so that the server never waits for us.
        std::thread::spawn(move || lines.for_each(drop));
        let address = |after: &str| -> SocketAddr {
            let rest = first.split(after).nth(1).unwrap_or_else(|| panic!("{after:?} in {first:?}"));
            rest.split([' ', ',']).next().expect("a word").parse().expect("an address")
        };
        Self {
            child,
            resp: address("RESP on "),
            http: address("HTTP on "),
            grpc: address("gRPC on "),
            ops: address("http://"),
            folder,
        }
    }

    /// The path of the Unix socket.
    pub fn unix(&self) -> PathBuf {
        self.folder.path().join("sluice.sock")
    }

    /// A new connection.
    pub fn connect(&self) -> Client<TcpStream> {
        let stream = TcpStream::connect(self.resp).expect("connecting");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        stream.set_nodelay(true).expect("no delay");
        Client::new(stream)
    }

    /// Replaces the policy file as a whole, as careful people do.
    pub fn write_policy(&self, policy: &str) {
        let path = self.folder.path();
        std::fs::write(path.join("policy.new"), policy).expect("writing the policy");
        std::fs::rename(path.join("policy.new"), path.join("policy.toml")).expect("renaming the policy");
    }

    /// Writes into the policy file in place, as editors do.
    pub fn overwrite_policy(&self, policy: &str) {
        std::fs::write(self.folder.path().join("policy.toml"), policy).expect("writing the policy");
    }

    /// Deletes the policy file.
    pub fn remove_policy(&self) {
        std::fs::remove_file(self.folder.path().join("policy.toml")).expect("removing the policy");
    }

    /// Asks the ops port; returns status and body.
    pub fn get(&self, path: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(self.ops).expect("connecting to the ops port");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        write!(stream, "GET {path} HTTP/1.1\r\nHost: sluice\r\nConnection: close\r\n\r\n").expect("asking");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("reading the answer");
        let (head, body) = text.split_once("\r\n\r\n").expect("a head and a body");
        let status = head.split(' ').nth(1).expect("a status").parse().expect("a number");
        (status, body.to_owned())
    }

    /// `/v1/status`.
    pub fn status(&self) -> serde_json::Value {
        serde_json::from_str(&self.get("/v1/status").1).expect("JSON")
    }

    /// The value of one line of `/metrics`, such as `sluice_rule_checks_total{rule="a",reason="denied"}`. 0 where there
    /// is none; lines that differ only in the core are added up when the name is given without labels.
    pub fn metric(&self, name: &str) -> u64 {
        let text = self.get("/metrics").1;
        assert!(text.ends_with("# EOF\n"), "OpenMetrics ends so: {text}");
        let is_it = |line: &&str| {
            line.strip_prefix(name)
                .is_some_and(|rest| rest.starts_with(' ') || (rest.starts_with('{') && !name.contains('{')))
        };
        let value = |line: &str| line.rsplit(' ').next().and_then(|word| word.parse::<f64>().ok()).expect("a number");
        text.lines().filter(is_it).map(value).sum::<f64>() as u64
    }

    /// How many decisions of a rule were made by `redis`, `local`, `open` or `closed`.
    pub fn decisions(&self, rule: &str, by: &str) -> u64 {
        self.metric(&format!("sluice_rule_decisions_total{{rule=\"{rule}\",by=\"{by}\"}}"))
    }

    /// How often something happened on the way to Redis, such as `moved` or `connected`.
    pub fn redis_events(&self, event: &str) -> u64 {
        self.metric(&format!("sluice_redis_events_total{{event=\"{event}\"}}"))
    }

    /// How often the breaker of a shard entered a state: `closed`, `open` or `half_open`.
    pub fn breaker_entered(&self, shard: SocketAddr, state: &str) -> u64 {
        self.metric(&format!("sluice_redis_breaker_transitions_total{{shard=\"{shard}\",to=\"{state}\"}}"))
    }

    /// What it has logged so far.
    pub fn log(&self) -> String {
        read_log(self.folder.path())
    }

    /// Waits until `holds`.
    pub fn until(&self, what: &str, mut holds: impl FnMut(&Self) -> bool) {
        until(what, || holds(self));
    }

    /// The number of its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal by name.
    pub fn signal(&self, name: &str) {
        let status = Command::new("kill").args(["-s", name, &self.child.id().to_string()]).status();
        assert!(status.expect("running kill").success());
    }

    /// Lets it open so many files from now on.
    pub fn limit_files(&self, count: usize) {
        let mut prlimit = Command::new("prlimit");
        prlimit.args(["--pid", &self.child.id().to_string(), &format!("--nofile={count}:")]);
        assert!(prlimit.status().expect("running prlimit").success());
    }

    /// Whether it still runs.
    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().expect("asking for the server").is_none()
    }

    /// Waits for its end.
    pub fn wait(&mut self) -> ExitStatus {
        let began = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().expect("asking for the server") {
                return status;
            }
            assert!(began.elapsed() < PATIENCE, "the server does not end");
            std::thread::park_timeout(Duration::from_millis(5));
        }
    }
}

impl Drop for Server {
    #[expect(clippy::print_stderr, reason = "the log of a server whose test fails says why")]
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("the server's log:\n{}", self.log());
        }
    }
}

fn spawn(setup: &Setup, folder: &Path) -> Child {
    let log = || File::create(folder.join(LOG)).expect("creating the log").into();
    sluice()
        .args(["--config", "sluice.toml", "--transport", setup.transport])
        .args(folder.join("policy.toml").exists().then_some(["--policy", "policy.toml"]).iter().flatten())
        .args(["--cores", &setup.cores.to_string(), "--listen-unix", "sluice.sock"])
        .args(["--listen-resp", "127.0.0.1:0", "--listen-ops", "127.0.0.1:0"])
        .current_dir(folder)
        .stdout(Stdio::piped())
        .stderr(if setup.log_stalls { Stdio::piped() } else { log() })
        .spawn()
        .expect("starting the server")
}

fn read_log(folder: &Path) -> String {
    std::fs::read_to_string(folder.join(LOG)).unwrap_or_default()
}

/// Waits until `holds`, looking every few milliseconds; gives up after [`PATIENCE`].
pub fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < PATIENCE, "waited in vain until {what}");
        std::thread::park_timeout(Duration::from_millis(5));
    }
}

/// A command of the server's binary. Wherever it serves, its HTTP and gRPC ports are free ones.
pub fn sluice() -> Command {
    let mut command = Command::new(binary());
    command.envs(["SLUICE_LISTEN_HTTP", "SLUICE_LISTEN_GRPC"].map(|name| (name, "127.0.0.1:0")));
    command
}

/// The server's binary, built if need be.
pub fn binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| built("sluice"))
}

/// The load generator's binary, built if need be.
pub fn load_generator() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| built("sluice-load"))
}

/// The admin API's binary, built if need be.
pub fn admin_binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| built("sluice-admin"))
}

/// Builds a package, in the profile of this test; returns its binary, which has the same name.
fn built(package: &str) -> PathBuf {
    let exe = std::env::current_exe().expect("the test knows its own path");
    let profile = exe.ancestors().nth(2).expect("target/<profile>/deps/<test>");
    let mut build = Command::new(env!("CARGO"));
    build.args(["build", "--quiet", "--package", package]);
    // Cargo tells a test which package it is of. Build scripts would take that for a change, and all be built again.
    let of_package = |name: &str| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(of_package)) {
        build.env_remove(name);
    }
    if profile.ends_with("release") {
        build.arg("--release");
    }
    assert!(build.status().expect("running cargo").success(), "{package} must build");
    profile.join(package)
}

/// A connection that sends exactly what it is told and reads one reply at a time.
pub struct Client<S> {
    stream: S,
    buffer: Vec<u8>,
}

impl<S: Read + Write> Client<S> {
    /// Over this stream.
    pub fn new(stream: S) -> Self {
        Self { stream, buffer: Vec::new() }
    }

    /// The stream.
    pub fn stream(&mut self) -> &mut S {
        &mut self.stream
    }

    /// The stream, for bytes that are not RESP.
    pub fn into_stream(self) -> S {
        self.stream
    }

    /// Sends bytes.
    pub fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).expect("sending");
    }

    /// Reads one reply; `None` at the end of the connection.
    pub fn receive(&mut self) -> Option<Reply> {
        match self.try_receive() {
            Ok(reply) => reply,
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => None,
            Err(error) => panic!("receiving: {error}"),
        }
    }

    /// Reads one reply; `None` at the end of the connection. What is not RESP is `InvalidData`.
    pub fn try_receive(&mut self) -> io::Result<Option<Reply>> {
        loop {
            let decoded = decode(&self.buffer).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
            if let Some((reply, len)) = decoded {
                self.buffer.drain(..len);
                return Ok(Some(reply));
            }
            let mut bytes = [0; 16 * 1024];
            match self.stream.read(&mut bytes) {
                Ok(0) => return Ok(None),
                Ok(len) => self.buffer.extend_from_slice(&bytes[..len]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Sends one request and reads its reply.
    pub fn ask(&mut self, words: &[&str]) -> Reply {
        self.send(&request(words));
        self.receive().expect("a reply")
    }

    /// Sends one request and reads its reply, where the other side may fail. An end instead of a reply is
    /// `UnexpectedEof`.
    pub fn try_ask(&mut self, words: &[&str]) -> io::Result<Reply> {
        self.stream.write_all(&request(words))?;
        self.try_receive()?.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }

    /// Sends a CHECK and reads its verdict.
    pub fn check(&mut self, words: &[&str]) -> Verdict {
        Verdict::of(&self.ask(&[&["CHECK"], words].concat()))
    }
}

/// A request as an array of bulk strings.
pub fn request(words: &[&str]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        bytes.extend_from_slice(format!("${}\r\n{word}\r\n", word.len()).as_bytes());
    }
    bytes
}

/// The reply to a CHECK.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// 1, 0 or -1.
    pub allowed: i64,
    /// The capacity, or -1.
    pub limit: i64,
    /// What is left, or -1.
    pub remaining: i64,
    /// Milliseconds, or -1.
    pub retry_after_ms: i64,
    /// Milliseconds.
    pub reset_after_ms: i64,
    /// The rule that decided, or nothing.
    pub rule: String,
}

impl Verdict {
    /// Reads a reply.
    pub fn of(reply: &Reply) -> Self {
        let Reply::Array(values) = reply else { panic!("not an array: {reply:?}") };
        let [a, b, c, d, e, Reply::BulkString(rule)] = values.as_slice() else { panic!("not a verdict: {reply:?}") };
        let [allowed, limit, remaining, retry_after_ms, reset_after_ms] = [a, b, c, d, e].map(integer);
        let rule = String::from_utf8(rule.clone()).expect("a rule's name");
        Self { allowed, limit, remaining, retry_after_ms, reset_after_ms, rule }
    }
}

/// The integer that a reply is.
pub fn integer(reply: &Reply) -> i64 {
    match reply {
        Reply::Integer(value) => *value,
        other => panic!("not an integer: {other:?}"),
    }
}

/// The integers of an array.
pub fn integers(reply: &Reply) -> Vec<i64> {
    match reply {
        Reply::Array(values) => values.iter().map(integer).collect(),
        other => panic!("not an array: {other:?}"),
    }
}

/// The text of a simple or bulk string.
pub fn text(reply: &Reply) -> &str {
    match reply {
        Reply::SimpleString(bytes) | Reply::BulkString(bytes) => std::str::from_utf8(bytes).expect("UTF-8"),
        other => panic!("not a string: {other:?}"),
    }
}

/// The text of an error.
pub fn error(reply: &Reply) -> &str {
    match reply {
        Reply::Error(text) => text,
        other => panic!("not an error: {other:?}"),
    }
}
