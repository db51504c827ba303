//! Tells gateways through Redis that there is a new version: publishes its number after the commit.
//!
//! A push only saves time. Whoever misses one hears NOTIFY, or asks within the poll interval. So the newest number is all that
//! is kept, and it is given up when Redis does not take it for a while.

use std::{
    fs,
    path::PathBuf,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use redis::{Client, Connection, ConnectionAddr, ConnectionInfo, RedisConnectionInfo, TlsCertificates};
use resp_client::{Address, Config, Credentials, Mode};
use serde::Serialize;
use thiserror::Error;

/// How long making a connection, and one command on it, may take.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long a number that Redis does not take is tried again.
const GIVE_UP: Duration = Duration::from_secs(30);
/// The pause between attempts.
const RETRY: Duration = Duration::from_millis(250);

/// Where and how versions are published.
#[derive(Clone, Debug)]
pub struct PushSettings {
    /// As a gateway has them.
    pub urls: Vec<String>,
    /// The channel; gateways have the same setting.
    pub channel: String,
    /// In place of the URLs' password.
    pub password_file: Option<PathBuf>,
    /// Authorities that the certificate of Redis may come from, in place of the system's.
    pub ca_file: Option<PathBuf>,
}

/// Why nothing can be published.
#[derive(Debug, Error)]
pub enum PushError {
    /// A setting is wrong.
    #[error("{setting}: {why}")]
    Setting {
        /// Which.
        setting: &'static str,
        /// What is wrong with it.
        why: String,
    },
    /// There can be no thread for it.
    #[error("the thread that publishes cannot be started: {0}")]
    Thread(#[from] std::io::Error),
}

/// How publishing goes, for `/readyz` and people.
#[derive(Clone, Debug, Default, Serialize)]
pub struct PushStatus {
    /// Versions that Redis took.
    pub published: u64,
    /// Versions that it did not take in time; gateways that hear only Redis find them by polling.
    pub given_up: u64,
    /// Why the newest was not taken yet, or at all.
    pub problem: Option<String>,
}

#[derive(Debug, Default)]
struct State {
    wanted: Option<u64>,
    is_ending: bool,
    status: PushStatus,
}

/// Publishes from a thread of its own.
#[derive(Debug)]
pub struct Push {
    shared: Arc<(Mutex<State>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

impl Push {
    /// Starts; connects when there is something to publish.
    ///
    /// # Errors
    ///
    /// What is wrong with the settings.
    pub fn start(settings: &PushSettings) -> Result<Self, PushError> {
        let target = Target::new(settings)?;
        let shared = Arc::new((Mutex::new(State::default()), Condvar::new()));
        let for_thread = Arc::clone(&shared);
        let thread = thread::Builder::new().name("sluice-push".into()).spawn(move || run(&target, &for_thread))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Publishes this version, unless a newer one comes first.
    pub fn publish(&self, version: u64) {
        let (state, changed) = &*self.shared;
        let mut state = locked(state);
        state.wanted = state.wanted.max(Some(version));
        changed.notify_one();
    }

    /// How it goes.
    pub fn status(&self) -> PushStatus {
        locked(&self.shared.0).status.clone()
    }
}

impl Drop for Push {
    /// Waits until what was to be published is, or until that fails once.
    fn drop(&mut self) {
        locked(&self.shared.0).is_ending = true;
        self.shared.1.notify_one();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn locked(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

fn run(target: &Target, (state, changed): &(Mutex<State>, Condvar)) {
    let mut connection = None;
    let mut since: Option<Instant> = None;
    loop {
        let version = {
            let mut state = locked(state);
            loop {
                match (state.wanted, state.is_ending) {
                    (Some(version), _) => break version,
                    (None, true) => return,
                    (None, false) => state = changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                }
            }
        };
        let outcome = target.publish(&mut connection, version);
        let began = *since.get_or_insert_with(now);
        let mut state = locked(state);
        let is_newest = state.wanted == Some(version);
        match outcome {
            Ok(()) => {
                state.status.published += 1;
                state.status.problem = None;
                since = None;
                if is_newest {
                    state.wanted = None;
                }
            }
            Err(why) => {
                if state.status.problem.as_ref() != Some(&why) {
                    tracing::warn!(version, "a new version cannot be published on Redis: {why}");
                }
                state.status.problem = Some(why);
                if state.is_ending || began.elapsed() > GIVE_UP {
                    state.status.given_up += 1;
                    state.wanted = None;
                    since = None;
                } else {
                    // A newer version is tried at once.
                    drop(changed.wait_timeout(state, RETRY).unwrap_or_else(PoisonError::into_inner));
                }
            }
        }
    }
}

#[allow(clippy::disallowed_methods, reason = "the admin API is the shell: it has the system's clock")]
fn now() -> Instant {
    Instant::now()
}

/// Where versions go.
struct Target {
    config: Config,
    channel: String,
    password: Option<String>,
    certificates: TlsCertificates,
}

impl Target {
    fn new(settings: &PushSettings) -> Result<Self, PushError> {
        let wrong = |setting, why| PushError::Setting { setting, why };
        let config = Config::from_urls(&settings.urls).map_err(|error| wrong("--redis", error.to_string()))?;
        let read = |setting, path: &PathBuf| {
            fs::read(path).map_err(|error| wrong(setting, format!("{} cannot be read: {error}", path.display())))
        };
        let password = settings.password_file.as_ref().map(|path| read("--redis-password-file", path)).transpose()?;
        let password = password.map(|bytes| String::from_utf8_lossy(&bytes).trim_end_matches(['\r', '\n']).to_owned());
        let root_cert = settings.ca_file.as_ref().map(|path| read("--redis-ca-file", path)).transpose()?;
        let certificates = TlsCertificates { client_tls: None, root_cert };
        let target = Self { config, channel: settings.channel.clone(), password, certificates };
        // What is wrong with certificates shows here.
        for address in target.config.addresses() {
            target.client(address, false).map_err(|why| wrong("--redis", why))?;
        }
        Ok(target)
    }

    fn publish(&self, kept: &mut Option<Connection>, version: u64) -> Result<(), String> {
        let mut connection = match kept.take() {
            Some(connection) => connection,
            None => self.connect()?,
        };
        let mut command = redis::cmd("PUBLISH");
        let said: Result<i64, _> = command.arg(&self.channel).arg(version).query(&mut connection);
        said.map_err(|error| error.to_string())?;
        *kept = Some(connection);
        Ok(())
    }

    /// Any node of a cluster tells all others; a primary tells its replicas, but not the other way round.
    fn connect(&self) -> Result<Connection, String> {
        let mut why = "there is no address".to_owned();
        for address in self.config.addresses() {
            let found = match &self.config.mode {
                Mode::Single(_) | Mode::Cluster { .. } => Ok(address.clone()),
                Mode::Sentinel { master, .. } => self.primary(address, master),
            };
            match found.and_then(|address| self.open(&address, false)) {
                Ok(connection) => return Ok(connection),
                Err(error) => why = format!("{address}: {error}"),
            }
        }
        Err(why)
    }

    fn primary(&self, sentinel: &Address, master: &str) -> Result<Address, String> {
        let mut command = redis::cmd("SENTINEL");
        command.arg("get-master-addr-by-name").arg(master);
        let found: Option<(String, u16)> =
            command.query(&mut self.open(sentinel, true)?).map_err(|error| error.to_string())?;
        let (host, port) = found.ok_or_else(|| format!("it knows no primary named {master}"))?;
        Ok(Address::tcp(host, port))
    }

    fn open(&self, address: &Address, is_sentinel: bool) -> Result<Connection, String> {
        let client = self.client(address, is_sentinel)?;
        let connection = client.get_connection_with_timeout(PATIENCE).map_err(|error| error.to_string())?;
        let bound =
            connection.set_read_timeout(Some(PATIENCE)).and_then(|()| connection.set_write_timeout(Some(PATIENCE)));
        bound.map_err(|error| error.to_string())?;
        Ok(connection)
    }

    fn client(&self, address: &Address, is_sentinel: bool) -> Result<Client, String> {
        let config = &self.config;
        let credentials = if is_sentinel { &config.sentinel_credentials } else { &config.credentials };
        let mut login = RedisConnectionInfo::default();
        if let Some(Credentials { user, password }) = credentials {
            if let Some(user) = user {
                login = login.set_username(user);
            }
            login = login.set_password(String::from_utf8_lossy(password.reveal()));
        }
        if let (Some(password), false) = (&self.password, is_sentinel) {
            login = login.set_password(password);
        }
        let is_tls = config.tls.is_some();
        let address = match address {
            Address::Unix(path) => ConnectionAddr::Unix(path.into()),
            Address::Tcp { host, port } if is_tls => {
                ConnectionAddr::TcpTls { host: host.clone(), port: *port, insecure: false, tls_params: None }
            }
            Address::Tcp { host, port } => ConnectionAddr::Tcp(host.clone(), *port),
        };
        let info = address_info(address, login);
        let client = if is_tls { Client::build_with_tls(info, self.certificates.clone()) } else { Client::open(info) };
        client.map_err(|error| error.to_string())
    }
}

fn address_info(address: ConnectionAddr, login: RedisConnectionInfo) -> ConnectionInfo {
    redis::IntoConnectionInfo::into_connection_info(address)
        .map(|info| info.set_redis_settings(login))
        .unwrap_or_else(|_| unreachable!("an address is one"))
}
