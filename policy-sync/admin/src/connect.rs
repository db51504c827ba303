//! A PostgreSQL URL to connections: one for a command, a pool for the API.
//!
//! URLs are read by the code that gateways read theirs with, so they mean the same here: libpq's names, and TLS by its modes.

use std::{fs, path::Path, time::Duration};

use deadpool_postgres::{Hook, HookError, Manager, ManagerConfig, Pool, RecyclingMethod, Runtime, Timeouts};
use policy_sync::postgres::{Config, Host, SslMode, TlsError, TlsSettings, UrlError};
use thiserror::Error;
use tokio_postgres::{Client, NoTls, config::SslMode as Mode};
use tokio_postgres_rustls::MakeRustlsConnect;

/// Why there can be no connection.
#[derive(Debug, Error)]
pub enum ConnectError {
    /// The URL is none.
    #[error("--postgres: {0}")]
    Url(#[from] UrlError),
    /// The password file cannot be read.
    #[error("--postgres-password-file: {0}")]
    Password(String),
    /// The settings of TLS are wrong.
    #[error("--postgres: {0}")]
    Tls(#[from] TlsError),
    /// The pool cannot be made.
    #[error("--postgres: {0}")]
    Pool(String),
    /// The server cannot be reached, or refuses.
    #[error("{place}: {why}")]
    Connect {
        /// Where, without the password.
        place: String,
        /// What it says.
        why: String,
    },
}

/// How long the store may take.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// For a connection.
    pub connect: Duration,
    /// For a statement.
    pub statement: Duration,
}

/// Reads the URL, and the password from a file in place of the URL's.
///
/// # Errors
///
/// What is wrong with them.
pub fn settings(url: &str, password_file: Option<&Path>) -> Result<Config, ConnectError> {
    let mut config = Config::parse(url)?;
    if let Some(path) = password_file {
        let text = fs::read_to_string(path)
            .map_err(|error| ConnectError::Password(format!("{} cannot be read: {error}", path.display())))?;
        let password = text.trim_end_matches(['\n', '\r']);
        if password.is_empty() {
            return Err(ConnectError::Password(format!("{} is empty", path.display())));
        }
        config = config.with_password(password);
    }
    Ok(config)
}

/// One connection, for a command. Ends with the client.
///
/// # Errors
///
/// When there is none in time.
pub async fn connect(config: &Config, patience: Patience) -> Result<Client, ConnectError> {
    let to = translated(config, patience);
    let failed = |why: String| ConnectError::Connect { place: config.to_string(), why };
    let connecting = async {
        // What the connection says is for its client.
        match TlsSettings::read(config)? {
            None => {
                let (client, connection) = to.connect(NoTls).await.map_err(|error| failed(explained(&error)))?;
                tokio::spawn(connection);
                Ok(client)
            }
            Some(tls) => {
                let tls = MakeRustlsConnect::new(tls.client_config().as_ref().clone());
                let (client, connection) = to.connect(tls).await.map_err(|error| failed(explained(&error)))?;
                tokio::spawn(connection);
                Ok(client)
            }
        }
    };
    match tokio::time::timeout(patience.connect, connecting).await {
        Ok(outcome) => outcome,
        Err(_) => Err(failed(format!("no connection within {} ms", patience.connect.as_millis()))),
    }
}

/// A pool of at most so many connections, none of which is made yet.
///
/// # Errors
///
/// What is wrong with the settings.
pub fn pool(config: &Config, connections_max: usize, patience: Patience) -> Result<Pool, ConnectError> {
    let to = translated(config, patience);
    // A connection that lay idle may be dead, or stand before a server that is frozen.
    let how = ManagerConfig { recycling_method: RecyclingMethod::Verified };
    let manager = match TlsSettings::read(config)? {
        None => Manager::from_config(to, NoTls, how),
        Some(tls) => Manager::from_config(to, MakeRustlsConnect::new(tls.client_config().as_ref().clone()), how),
    };
    let bounds = format!(
        "SET statement_timeout = {0}; SET lock_timeout = {0}; SET idle_in_transaction_session_timeout = {0}",
        patience.statement.as_millis()
    );
    let set = Hook::async_fn(move |client, _| {
        let bounds = bounds.clone();
        Box::pin(async move { client.batch_execute(&bounds).await.map_err(HookError::Backend) })
    });
    let timeouts =
        Timeouts { wait: Some(patience.connect), create: Some(patience.connect), recycle: Some(patience.connect) };
    Pool::builder(manager)
        .max_size(connections_max)
        .timeouts(timeouts)
        .post_create(set)
        .runtime(Runtime::Tokio1)
        .build()
        .map_err(|error| ConnectError::Pool(error.to_string()))
}

/// What went wrong, with its cause: tokio-postgres keeps what the server says for those who ask on.
pub fn explained(error: &tokio_postgres::Error) -> String {
    match (error.as_db_error(), std::error::Error::source(error)) {
        (Some(said), _) => format!("{} (SQLSTATE {})", said.message(), said.code().code()),
        (None, Some(cause)) => format!("{error}: {cause}"),
        (None, None) => error.to_string(),
    }
}

fn translated(config: &Config, patience: Patience) -> tokio_postgres::Config {
    let mut to = tokio_postgres::Config::new();
    match &config.host {
        Host::Tcp { host, port } => to.host(host).port(*port),
        Host::Unix { directory, port } => to.host_path(directory).port(*port),
    };
    to.user(&config.user).dbname(&config.database).application_name("sluice-admin");
    to.connect_timeout(patience.connect).tcp_user_timeout(patience.connect + patience.statement);
    to.ssl_mode(match config.ssl_mode {
        SslMode::Disable => Mode::Disable,
        SslMode::Prefer => Mode::Prefer,
        // The settings of TLS say how much of the certificate is checked.
        SslMode::Require | SslMode::VerifyCa | SslMode::VerifyFull => Mode::Require,
    });
    if let Some(password) = &config.password {
        to.password(password.reveal());
    }
    to
}
