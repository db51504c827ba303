//! One `redis-server` in its own process and folder, on a free port of 127.0.0.1; it can be frozen, killed and started
//! again.
//!
//! The rig talks to it over its Unix socket, on one connection that it keeps: that works with TLS too, needs no port, and
//! lets a test count what others did. Clusters and sentinels are made of these.

use std::{
    collections::hash_map::RandomState,
    fs::{self, File},
    hash::BuildHasher,
    io::{self, ErrorKind},
    net::{Ipv4Addr, SocketAddr, TcpListener},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Mutex, MutexGuard, OnceLock,
        atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering},
    },
};

use tempfile::TempDir;

use crate::{Client, PATIENCE, Reply, certificates, text, until};

/// The name of the Unix socket in the server's folder.
const SOCKET: &str = "redis.sock";

/// What every server is told before its own arguments, which therefore win: nothing on disk, and DEBUG for tests.
const QUIET: &[&str] = &["--save", "", "--appendonly", "no", "--enable-debug-command", "yes"];

/// A running `redis-server`. Killed when dropped.
pub struct Redis {
    port: u16,
    tls: bool,
    /// Everything after the program's name, so that a restart is the same again.
    args: Vec<String>,
    folder: TempDir,
    process: Mutex<Child>,
    frozen: AtomicBool,
    /// The rig's own connection, made when it is needed.
    control: Mutex<Option<Client<UnixStream>>>,
    /// How many of those the present process has accepted.
    own_connections: AtomicU64,
}

impl Redis {
    /// Starts a server with these further arguments on a free port, and waits until it answers. An error is an answer:
    /// it may be loading or want a password. With `--requirepass` the rig knows the password.
    pub fn start(args: &[&str]) -> Self {
        Self::start_on(free_port(), args)
    }

    /// Starts a server on this port.
    pub fn start_on(port: u16, args: &[&str]) -> Self {
        let listen = ["--port", &port.to_string()].map(str::to_owned);
        Self::launch(port, false, new_folder(), [owned(QUIET), listen.to_vec(), owned(args)].concat())
    }

    /// Starts a server that speaks nothing but TLS on its port. Its certificate is for `localhost`, not for 127.0.0.1,
    /// and comes from the authority in [`ca_file`](Self::ca_file), both made on the spot.
    pub fn start_tls() -> Self {
        let folder = new_folder();
        certificates::make(folder.path());
        let port = free_port();
        let listen = ["--port", "0", "--tls-port", &port.to_string()].map(str::to_owned);
        let files = ["--tls-cert-file", "server.crt", "--tls-key-file", "server.key", "--tls-ca-cert-file", "ca.crt"];
        let args = [owned(QUIET), listen.to_vec(), owned(&files), owned(&["--tls-auth-clients", "no"])].concat();
        Self::launch(port, true, folder, args)
    }

    /// Starts a sentinel with this configuration, which it goes on to change.
    pub(crate) fn start_sentinel(config: &str) -> Self {
        let (folder, port) = (new_folder(), free_port());
        fs::write(folder.path().join("sentinel.conf"), config).expect("writing the configuration");
        let args = owned(&["sentinel.conf", "--port", &port.to_string(), "--sentinel"]);
        Self::launch(port, false, folder, args)
    }

    fn launch(port: u16, tls: bool, folder: TempDir, args: Vec<String>) -> Self {
        let process = Mutex::new(spawn(folder.path(), &args));
        let (control, own_connections) = (Mutex::new(None), AtomicU64::new(0));
        let redis = Self { port, tls, args, folder, process, frozen: AtomicBool::new(false), control, own_connections };
        redis.wait_until_up();
        redis
    }

    /// Where it serves.
    pub fn address(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port).into()
    }

    /// The port that it serves on; with TLS, that of TLS.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The path of its Unix socket.
    pub fn unix_socket(&self) -> PathBuf {
        self.folder.path().join(SOCKET)
    }

    /// `redis://127.0.0.1:<port>`, or `rediss://localhost:<port>` with TLS. Never with a password.
    pub fn url(&self) -> String {
        if self.tls { format!("rediss://localhost:{}", self.port) } else { format!("redis://{}", self.address()) }
    }

    /// The authority that signed the server's certificate, as a PEM file.
    pub fn ca_file(&self) -> PathBuf {
        assert!(self.tls, "only a server with TLS has a certificate");
        self.folder.path().join("ca.crt")
    }

    /// Stops it where it stands (SIGSTOP): the kernel goes on accepting connections and bytes, and nothing answers.
    pub fn freeze(&self) {
        self.frozen.store(true, Ordering::Relaxed);
        self.signal("STOP");
        let stat = format!("/proc/{}/stat", self.process().id());
        // The signal may arrive after `kill` has returned. The state is the word after the name in parentheses.
        until("Redis is stopped", || {
            let line = fs::read_to_string(&stat).expect("the state of the process");
            line.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'))
        });
    }

    /// Lets it go on (SIGCONT): it answers what has gathered.
    pub fn thaw(&self) {
        self.signal("CONT");
        self.frozen.store(false, Ordering::Relaxed);
    }

    /// Kills it (SIGKILL) and waits for its end.
    pub fn kill(&self) {
        let mut process = self.process();
        process.kill().expect("killing Redis");
        process.wait().expect("waiting for its end");
        drop(process);
        self.frozen.store(false, Ordering::Relaxed);
        *self.control() = None;
    }

    /// Kills it, if it still runs, and starts it again: same port, arguments and folder, without the data.
    pub fn restart(&self) {
        self.kill();
        *self.process() = spawn(self.folder.path(), &self.args);
        self.own_connections.store(0, Ordering::Relaxed);
        self.wait_until_up();
    }

    /// Whether it runs and is not frozen.
    pub fn is_up(&self) -> bool {
        !self.frozen.load(Ordering::Relaxed) && self.process().try_wait().expect("asking for Redis").is_none()
    }

    /// Sends a command on the rig's own connection. An error reply is a reply; no reply at all is a panic.
    pub fn command(&self, words: &[&str]) -> Reply {
        self.try_command(words).unwrap_or_else(|error| panic!("{words:?}: {error}\n{}", self.log()))
    }

    /// Sends a command on the rig's own connection to a server that may be gone. One that is frozen is waited for.
    pub fn try_command(&self, words: &[&str]) -> io::Result<Reply> {
        let mut control = self.control();
        // A sentinel has the clients of a server cut when it changes its role. Either error says that Redis closed the
        // connection before it read the request, which may therefore be sent again.
        if let Some(mut client) = control.take() {
            match client.try_ask(words) {
                Err(error) if matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) => {}
                outcome => {
                    *control = outcome.is_ok().then_some(client);
                    return outcome;
                }
            }
        }
        let mut client = self.connect()?;
        let reply = client.try_ask(words)?;
        // Kept only now: a connection that failed is never used again.
        *control = Some(client);
        Ok(reply)
    }

    /// How often it executed a command of this name, in lower case and with all subcommands, since it started; what it
    /// refused is not counted. The rig's own commands are, which are mostly PING, INFO, CLUSTER and SENTINEL.
    pub fn calls(&self, command_name: &str) -> u64 {
        let info = self.info("commandstats");
        let of_command = |line: &str| {
            let (name, counts) = line.strip_prefix("cmdstat_")?.split_once(":calls=")?;
            let is_it = name == command_name || name.strip_prefix(command_name)?.starts_with('|');
            is_it.then(|| counts.split(',').next().and_then(|calls| calls.parse::<u64>().ok()).expect("a number"))
        };
        info.lines().filter_map(of_command).sum()
    }

    /// How many connections it accepted since it started, without the rig's own. Those of its replicas, of sentinels and
    /// of `redis-cli` do count.
    pub fn connections_received(&self) -> u64 {
        let all: u64 = self.info_field("stats", "total_connections_received").parse().expect("a number");
        all - self.own_connections.load(Ordering::Relaxed)
    }

    /// One section of INFO.
    pub fn info(&self, section: &str) -> String {
        text(&self.command(&["INFO", section])).to_owned()
    }

    /// One field of a section of INFO; empty where there is none.
    pub fn info_field(&self, section: &str, field: &str) -> String {
        field_of(&self.info(section), field).to_owned()
    }

    /// What it has logged so far.
    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("redis.log")).unwrap_or_default()
    }

    fn connect(&self) -> io::Result<Client<UnixStream>> {
        let stream = UnixStream::connect(self.unix_socket())?;
        self.own_connections.fetch_add(1, Ordering::Relaxed);
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let mut client = Client::new(stream);
        if let Some(at) = self.args.iter().position(|arg| arg == "--requirepass") {
            client.try_ask(&["AUTH", &self.args[at + 1]])?;
        }
        Ok(client)
    }

    fn wait_until_up(&self) {
        until("Redis answers", || {
            assert!(self.is_up(), "Redis ended at once:\n{}", self.log());
            self.try_command(&["PING"]).is_ok()
        });
    }

    fn signal(&self, name: &str) {
        let status = Command::new("kill").args(["-s", name, &self.process().id().to_string()]).status();
        assert!(status.expect("running kill").success());
    }

    fn process(&self) -> MutexGuard<'_, Child> {
        self.process.lock().expect("no panic while it was held")
    }

    /// Usable after a command that panicked too: such a connection is not put back.
    fn control(&self) -> MutexGuard<'_, Option<Client<UnixStream>>> {
        self.control.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        let process = self.process.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner());
        let _ = process.kill();
        let _ = process.wait();
    }
}

/// A port of 127.0.0.1 that nobody listens on and that this process has not given out before.
///
/// It lies below the range that the kernel takes ports from for outgoing connections and for port 0 (32768 and up):
/// nothing takes it by accident while its server is down between a kill and a restart. Processes begin in different
/// places.
pub fn free_port() -> u16 {
    const FIRST: u16 = 10_000;
    const PORTS: u16 = 20_000;
    static NEXT: OnceLock<AtomicU16> = OnceLock::new();
    // `RandomState` is the standard library's only source of chance.
    let next = NEXT.get_or_init(|| AtomicU16::new(RandomState::new().hash_one(0) as u16));
    (0..PORTS)
        .map(|_| FIRST + next.fetch_add(1, Ordering::Relaxed) % PORTS)
        .find(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok())
        .expect("a free port")
}

/// The value of a `field:value` line, as INFO and CLUSTER INFO have them; empty where there is none.
pub(crate) fn field_of<'a>(info: &'a str, field: &str) -> &'a str {
    info.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':')).unwrap_or_default()
}

fn spawn(folder: &Path, args: &[String]) -> Child {
    let log = File::options().create(true).append(true).open(folder.join("redis.log")).expect("opening the log");
    Command::new("redis-server")
        .args(args)
        .args(["--bind", "127.0.0.1", "--unixsocket", SOCKET])
        .current_dir(folder)
        .stdin(Stdio::null())
        .stderr(log.try_clone().expect("a second handle of the log"))
        .stdout(log)
        .spawn()
        .expect("starting redis-server (`tests/run tools` installs it)")
}

fn new_folder() -> TempDir {
    tempfile::tempdir().expect("a temporary folder")
}

fn owned(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}
