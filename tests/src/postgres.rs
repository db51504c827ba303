//! One PostgreSQL server in its own processes and folder, on a free port of 127.0.0.1; it can be frozen, killed and started
//! again, and it can hold a policy store.
//!
//! It refuses to run as root. Where the tests do, it runs as `postgres`, the user that its package makes. Whoever connects is
//! trusted, unless a test says otherwise.

use std::{
    fs::{self, File},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{Mutex, MutexGuard},
};

use tempfile::TempDir;

use crate::{admin, certificates, redis_server::free_port, until};

/// The user that the server runs as when the tests are root.
const USER: &str = "postgres";
/// The database that holds the policy store, and who owns it.
const DATABASE: &str = "sluice";
/// The role that [`Postgres::gateway_url`] logs in as.
pub const GATEWAY: &str = "gateway";

/// Nothing needs to survive the end of the machine (it does survive that of the server), everything is to start fast, and what a test does is to be read afterwards.
const SETTINGS: &[&str] = &[
    "fsync=off",
    "full_page_writes=off",
    "shared_buffers=32MB",
    "max_connections=64",
    "autovacuum=off",
    "listen_addresses=127.0.0.1",
    "log_min_messages=warning",
];

/// A running PostgreSQL. Killed when dropped.
pub struct Postgres {
    port: u16,
    folder: TempDir,
    settings: Vec<String>,
    process: Mutex<Child>,
}

impl Postgres {
    /// Starts an empty server that trusts everybody, and waits until it answers.
    pub fn start() -> Self {
        Self::start_with("host all all all trust\nlocal all all trust", &[])
    }

    /// Starts an empty server with this `pg_hba.conf` (a local connection as `postgres` is always trusted) and these further
    /// settings. `server.crt` and `server.key` in its
    /// folder are a certificate for `localhost`, for `ssl=on`; see [`ca_file`](Self::ca_file).
    pub fn start_with(hba: &str, settings: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let data = folder.path().join("data");
        certificates::make(folder.path());
        give(folder.path());
        let mut initdb = as_server("initdb");
        initdb.args([
            "--no-sync",
            "--auth",
            "trust",
            "--username",
            USER,
            "--encoding",
            "UTF8",
            "--locale",
            "C",
            "--pgdata",
        ]);
        let output = initdb.arg(&data).current_dir(folder.path()).output().expect("running initdb");
        assert!(output.status.success(), "initdb: {}", String::from_utf8_lossy(&output.stderr));
        fs::write(data.join("pg_hba.conf"), format!("local all {USER} trust\n{hba}\n")).expect("writing who may enter");
        let port = free_port();
        let socket = format!("unix_socket_directories={}", folder.path().display());
        let settings: Vec<String> =
            SETTINGS.iter().chain(settings).map(|setting| (*setting).to_owned()).chain([socket]).collect();
        let process = Mutex::new(spawn(folder.path(), port, &settings));
        let postgres = Self { port, folder, settings, process };
        postgres.wait_until_up();
        postgres
    }

    /// Starts a server with an empty policy store, and a gateway's role that can log in.
    pub fn with_store() -> Self {
        let postgres = Self::start();
        postgres.make_store();
        postgres
    }

    /// Makes the database of an empty policy store, and a gateway's role that can log in.
    pub fn make_store(&self) {
        self.run(USER, &format!("CREATE DATABASE {DATABASE}"));
        admin::printed(&admin::command(&["migrate", "--postgres", &self.local_url()]));
        self.sql(&format!("CREATE ROLE {GATEWAY} LOGIN IN ROLE sluice_gateway PASSWORD 'secret'"));
    }

    /// Makes an empty database of this name; returns the URL at which its owner finds it.
    pub fn make_database(&self, name: &str) -> String {
        self.run(USER, &format!("CREATE DATABASE {name}"));
        format!("postgres://{USER}@{}/{name}", self.address())
    }

    /// Where it serves.
    pub fn address(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port).into()
    }

    /// Where the policy store is for whoever may do everything.
    pub fn url(&self) -> String {
        format!("postgres://{USER}@{}/{DATABASE}", self.address())
    }

    /// The same by its Unix socket, where its owner is trusted whatever a test says of others.
    fn local_url(&self) -> String {
        format!("postgres://{USER}@/{DATABASE}?host={}&port={}", self.folder.path().display(), self.port)
    }

    /// Where the policy store is for a gateway.
    pub fn gateway_url(&self) -> String {
        format!("postgres://{GATEWAY}@{}/{DATABASE}", self.address())
    }

    /// The folder with its Unix socket.
    pub fn socket_folder(&self) -> &Path {
        self.folder.path()
    }

    /// The authority that signed the certificate for `localhost`, as a PEM file.
    pub fn ca_file(&self) -> PathBuf {
        self.folder.path().join("ca.crt")
    }

    /// Carries out SQL in the policy store's database; returns what it prints: a line for each row, `|` between columns.
    pub fn sql(&self, text: &str) -> String {
        self.run(DATABASE, text)
    }

    /// A change of the policy, by hand: these statements in the transaction of a new version, which they know as `:version`.
    /// Returns that version.
    pub fn change(&self, statements: &str) -> u64 {
        let text = format!(
            "BEGIN; SELECT sluice.begin_change('a test', '') AS version \\gset\n{statements}; COMMIT; SELECT :version;"
        );
        self.sql(&text).trim().parse().expect("a version")
    }

    /// A change that makes these the bodies of these rules, without regard for what they hold. Returns its version.
    pub fn put_rules(&self, rules: &[(&str, &str)]) -> u64 {
        let values: Vec<String> =
            rules.iter().map(|(name, body)| format!("('{name}', :version, '{}')", body.replace('\'', "''"))).collect();
        self.change(&format!("INSERT INTO sluice.rule (name, version, body) VALUES {}", values.join(", ")))
    }

    fn run(&self, database: &str, text: &str) -> String {
        let mut psql = Command::new("psql");
        psql.args(["-X", "-A", "-t", "-q", "-v", "ON_ERROR_STOP=1", "-U", USER, "-h"]).arg(self.folder.path());
        psql.args(["-p", &self.port.to_string(), "-d", database, "-f", "-"]);
        psql.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = psql.spawn().expect("running psql (`tests/run tools` installs it)");
        let mut input = child.stdin.take().expect("stdin is piped");
        let text = text.to_owned();
        let writer = std::thread::spawn(move || std::io::Write::write_all(&mut input, text.as_bytes()));
        let output = child.wait_with_output().expect("waiting for psql");
        let _ = writer.join();
        assert!(output.status.success(), "psql: {}\n{}", String::from_utf8_lossy(&output.stderr), self.log());
        String::from_utf8(output.stdout).expect("UTF-8")
    }

    /// Stops all of its processes where they stand (SIGSTOP): the kernel goes on accepting connections and bytes.
    pub fn freeze(&self) {
        self.signal_all("STOP");
    }

    /// Lets them go on (SIGCONT).
    pub fn thaw(&self) {
        self.signal_all("CONT");
    }

    /// Ends it at once, without a word to its clients, as a crash would.
    pub fn kill(&self) {
        let mut process = self.process();
        // Its other processes see that it has gone and end too, and a new one waits for them.
        let _ = process.kill();
        let _ = process.wait();
    }

    /// Kills it, if it still runs, and starts it again: same port, settings and data.
    pub fn restart(&self) {
        self.kill();
        *self.process() = spawn(self.folder.path(), self.port, &self.settings);
        self.wait_until_up();
    }

    /// What it has logged so far.
    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("postgres.log")).unwrap_or_default()
    }

    fn wait_until_up(&self) {
        until("PostgreSQL answers", || {
            let ended = self.process().try_wait().expect("asking for PostgreSQL");
            // One that was killed may leave processes that hold the data for a moment.
            if ended.is_some() {
                assert!(self.log().contains("in use"), "PostgreSQL ended at once:\n{}", self.log());
                *self.process() = spawn(self.folder.path(), self.port, &self.settings);
            }
            let mut ready = Command::new(program("pg_isready"));
            ready.args(["-q", "-h"]).arg(self.folder.path()).args(["-p", &self.port.to_string()]);
            ready.status().expect("running pg_isready").success() && TcpStream::connect(self.address()).is_ok()
        });
    }

    fn signal_all(&self, name: &str) {
        let first = self.process().id().to_string();
        // The parent before its children, so that it starts none meanwhile.
        let status = Command::new("kill").args(["-s", name, &first]).status();
        assert!(status.expect("running kill").success());
        let _ = Command::new("pkill").args([&format!("-{name}"), "-P", &first]).status().expect("running pkill");
    }

    fn process(&self) -> MutexGuard<'_, Child> {
        self.process.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        self.thaw();
        // Takes its other processes along.
        let pid = self.process().id().to_string();
        let _ = Command::new("kill").args(["-s", "QUIT", &pid]).stderr(Stdio::null()).status();
        let _ = self.process().wait();
    }
}

/// One of the programs of the newest version that is installed.
fn program(name: &str) -> PathBuf {
    let mut versions: Vec<(u32, PathBuf)> = fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten()
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            let version = path.file_name()?.to_str()?.parse().ok()?;
            path.join("bin/postgres").exists().then(|| (version, path.join("bin").join(name)))
        })
        .collect();
    versions.sort();
    // Elsewhere than on Debian they are where all programs are.
    versions.pop().map_or_else(|| name.into(), |(_, path)| path)
}

/// One of its programs, run as whoever may run it.
fn as_server(name: &str) -> Command {
    if !is_root() {
        return Command::new(program(name));
    }
    let mut command = Command::new("setpriv");
    command.args(["--reuid", USER, "--regid", USER, "--clear-groups", "--"]).arg(program(name));
    command
}

fn is_root() -> bool {
    // The owner of one's own entry there is who one is.
    std::os::unix::fs::MetadataExt::uid(&fs::metadata("/proc/self").expect("/proc")) == 0
}

/// Gives a folder with all that is in it to the server.
fn give(folder: &Path) {
    if is_root() {
        let status = Command::new("chown").args(["-R", &format!("{USER}:{USER}")]).arg(folder).status();
        assert!(status.expect("running chown").success(), "the user {USER} comes with PostgreSQL (`tests/run tools`)");
    }
}

fn spawn(folder: &Path, port: u16, settings: &[String]) -> Child {
    let log = File::options().create(true).append(true).open(folder.join("postgres.log")).expect("opening the log");
    let mut command = as_server("postgres");
    command.arg("-D").arg(folder.join("data")).args(["-p", &port.to_string()]);
    command
        .args(settings.iter().flat_map(|setting| ["-c", setting]))
        .current_dir(folder)
        .stdin(Stdio::null())
        .stderr(log.try_clone().expect("a second handle of the log"))
        .stdout(log)
        .spawn()
        .expect("starting postgres (`tests/run tools` installs it)")
}
