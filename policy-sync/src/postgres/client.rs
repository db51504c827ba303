//! A [`Session`] on glommio: the socket, and how long anything may take.

use std::{
    fmt, io,
    net::{IpAddr, SocketAddr, ToSocketAddrs},
    time::Duration,
};

use futures_lite::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, future};
use glommio::{
    executor,
    net::{TcpStream, UnixStream},
    timer::Timer,
};

use super::{
    config::{Config, Host},
    error::Error,
    rows::Rows,
    session::{Notification, Session},
    tls::TlsSettings,
};

/// Bytes that one read takes at most.
const READ_BYTES: usize = 64 << 10;
/// How long asking the server to stop a query may take.
const CANCEL_DEADLINE: Duration = Duration::from_secs(1);
/// The longest that anything may take where nobody says how long: a day.
const FOREVER: Duration = Duration::from_secs(24 * 3600);

trait Socket: AsyncRead + AsyncWrite + Unpin {}
impl<T: AsyncRead + AsyncWrite + Unpin> Socket for T {}

/// A connection. Dropping it closes it.
pub struct Client {
    session: Session,
    socket: Box<dyn Socket>,
    host: Host,
    buffer: Vec<u8>,
}

impl Client {
    /// Connects and logs in. It takes no longer than `deadline`, and than the settings' own bound.
    ///
    /// # Errors
    ///
    /// Whatever is in the way; see [`Error`].
    pub async fn connect(config: &Config, deadline: Duration) -> Result<Self, Error> {
        let deadline = config.connect_timeout.map_or(deadline, |own| own.min(deadline));
        within(deadline, "connecting", Self::connect_at_leisure(config)).await
    }

    async fn connect_at_leisure(config: &Config) -> Result<Self, Error> {
        // It reads files, and where they are may be slow.
        let settings = config.clone();
        let tls = executor().spawn_blocking(move || TlsSettings::read(&settings)).await?;
        let socket = open(&config.host).await?;
        let session = Session::new(config, tls);
        let mut client = Self { session, socket, host: config.host.clone(), buffer: vec![0; READ_BYTES] };
        while !client.session.is_ready() {
            client.exchange("logging in").await?;
        }
        Ok(client)
    }

    /// Asks a query with parameters as texts (`$1`, `$2`, …; `None` is NULL) and waits for all of its rows.
    ///
    /// When `deadline` is over the server is asked to stop, and the connection is closed.
    ///
    /// # Errors
    ///
    /// See [`Error`]; [`Error::is_survivable`] says whether the connection goes on.
    pub async fn query(&mut self, sql: &str, params: &[Option<&str>], deadline: Duration) -> Result<Rows, Error> {
        self.session.query(sql, params)?;
        // A query that is dropped before its end leaves a session that is busy, and so refuses the next one.
        let outcome = within(deadline, "a query", self.result()).await;
        if let Err(error) = &outcome
            && !error.is_survivable()
        {
            if matches!(error, Error::Timeout { .. }) {
                self.cancel().await;
            }
            self.session.break_off();
        }
        outcome
    }

    async fn result(&mut self) -> Result<Rows, Error> {
        loop {
            if let Some(result) = self.session.take_result() {
                return result;
            }
            self.exchange("a query").await?;
        }
    }

    /// Hears what is said on a channel from now on.
    ///
    /// # Errors
    ///
    /// As for [`query`](Self::query).
    pub async fn listen(&mut self, channel: &str, deadline: Duration) -> Result<(), Error> {
        let statement = Session::listen_statement(channel)?;
        self.query(&statement, &[], deadline).await.map(drop)
    }

    /// The next notification, or `None` when none has come within `patience`.
    ///
    /// # Errors
    ///
    /// When the connection ends.
    pub async fn wait_notification(&mut self, patience: Option<Duration>) -> Result<Option<Notification>, Error> {
        if let Some(notification) = self.session.next_notification() {
            return Ok(Some(notification));
        }
        if !self.session.is_ready() {
            return Err(Error::Broken);
        }
        let heard = within(patience.unwrap_or(FOREVER), "waiting for a notification", async {
            loop {
                if let Some(notification) = self.session.next_notification() {
                    return Ok(notification);
                }
                self.exchange("waiting for a notification").await?;
            }
        });
        match heard.await {
            Ok(notification) => Ok(Some(notification)),
            Err(Error::Timeout { .. }) => Ok(None),
            Err(error) => {
                self.session.break_off();
                Err(error)
            }
        }
    }

    /// Notifications that were dropped for newer ones, because nobody took them.
    pub fn notifications_dropped(&self) -> u64 {
        self.session.notifications_dropped()
    }

    /// Whether nothing more can be asked of it.
    pub fn is_broken(&self) -> bool {
        !self.session.is_ready()
    }

    /// The server's version, as it says it.
    pub fn server_version(&self) -> &str {
        self.session.server_version()
    }

    /// Sends what is to be sent, and takes in what comes next.
    async fn exchange(&mut self, doing: &'static str) -> Result<(), Error> {
        let failed = |source| Error::Io { doing, source };
        let output = self.session.take_output();
        if !output.is_empty() {
            self.socket.write_all(&output).await.map_err(failed)?;
        }
        let length = self.socket.read(&mut self.buffer).await.map_err(failed)?;
        if length == 0 {
            return Err(Error::Closed { doing });
        }
        let outcome = self.session.received(&self.buffer[..length]);
        // An alert, or what belongs to TLS itself, leaves whatever became of it.
        let output = self.session.take_output();
        if !output.is_empty() {
            let sent = self.socket.write_all(&output).await.map_err(failed);
            outcome?;
            return sent;
        }
        outcome
    }

    /// Asks the server to stop the query, as well as that goes.
    async fn cancel(&self) {
        let Some(key) = self.session.cancel_key() else { return };
        let stop = async {
            let mut socket = open(&self.host).await?;
            let failed = |source| Error::Io { doing: "stopping a query", source };
            socket.write_all(&key.request()).await.map_err(failed)?;
            // The server closes when it has done it.
            socket.read(&mut [0; 1]).await.map_err(failed)
        };
        let _ = within(CANCEL_DEADLINE, "stopping a query", stop).await;
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("host", &self.host).field("is_broken", &self.is_broken()).finish_non_exhaustive()
    }
}

async fn within<T>(
    deadline: Duration,
    doing: &'static str,
    work: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    let late = async {
        Timer::new(deadline).await;
        Err(Error::Timeout { doing, deadline })
    };
    future::or(work, late).await
}

async fn open(host: &Host) -> Result<Box<dyn Socket>, Error> {
    let failed = |to: String, error: io::Error| Error::Connect { to, source: error };
    match host {
        Host::Unix { .. } => {
            let path = host.socket_path().unwrap_or_default();
            let stream = UnixStream::connect(&path).await;
            Ok(Box::new(stream.map_err(|error| failed(path.display().to_string(), error.into()))?))
        }
        Host::Tcp { host, port } => {
            let mut last = failed(format!("{host}:{port}"), io::Error::other("the name has no address"));
            for address in look_up(host, *port).await? {
                match TcpStream::connect(address).await {
                    Ok(stream) => {
                        // It matters for speed alone.
                        let _ = stream.set_nodelay(true);
                        return Ok(Box::new(stream));
                    }
                    Err(error) => last = failed(address.to_string(), error.into()),
                }
            }
            Err(last)
        }
    }
}

/// The addresses of a host. Looking up a name may take seconds, so it is done elsewhere.
async fn look_up(host: &str, port: u16) -> Result<Vec<SocketAddr>, Error> {
    if let Ok(address) = host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(address, port)]);
    }
    let name = host.to_owned();
    let found = executor().spawn_blocking(move || (name.as_str(), port).to_socket_addrs().map(Vec::from_iter)).await;
    found.map_err(|source| Error::LookUp { host: host.into(), source })
}
