//! Settings of a connection, and URLs to settings.
//!
//! `postgres://user[:password]@host[:port]/database?parameter=value&…`, with libpq's names and meanings for what is
//! supported, and a refusal for what is not: a parameter that was ignored would be believed to work.

use std::{fmt, path::PathBuf, time::Duration};

pub use self::url::UrlError;
use super::limits::Limits;

mod url;

/// A password: it has no text form but `***`.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Vec<u8>);

impl Secret {
    /// Takes the password.
    pub fn new(password: impl Into<Vec<u8>>) -> Self {
        Self(password.into())
    }

    /// The password itself, for the wire.
    pub fn reveal(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

impl fmt::Display for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// Where the server is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Host {
    /// A name or an address.
    Tcp {
        /// Which.
        host: String,
        /// Its port.
        port: u16,
    },
    /// A Unix socket: `<directory>/.s.PGSQL.<port>`.
    Unix {
        /// The directory that it stands in.
        directory: PathBuf,
        /// The number in its name.
        port: u16,
    },
}

impl Host {
    /// The path of the Unix socket, if it is one.
    pub fn socket_path(&self) -> Option<PathBuf> {
        match self {
            Self::Tcp { .. } => None,
            Self::Unix { directory, port } => Some(directory.join(format!(".s.PGSQL.{port}"))),
        }
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "{host}:{port}"),
            Self::Unix { directory, port } => write!(f, "{}/.s.PGSQL.{port}", directory.display()),
        }
    }
}

/// Whether a connection over TCP is encrypted, and how the server is checked. Over a Unix socket there is never TLS.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SslMode {
    /// Never encrypted.
    Disable,
    /// Encrypted when the server says that it can be, and in the clear when it says that it cannot: no protection against
    /// somebody on the way, who may say so in the server's place. Once the server agreed, TLS must succeed.
    #[default]
    Prefer,
    /// Encrypted, whoever the server is. With `sslrootcert` it is [`VerifyCa`](Self::VerifyCa), as libpq has it.
    Require,
    /// The certificate must come from an authority of `sslrootcert`; its name does not matter.
    VerifyCa,
    /// The certificate must come from an authority that is trusted, and have the host's name.
    VerifyFull,
}

impl SslMode {
    /// Its name in a URL.
    pub fn name(self) -> &'static str {
        match self {
            Self::Disable => "disable",
            Self::Prefer => "prefer",
            Self::Require => "require",
            Self::VerifyCa => "verify-ca",
            Self::VerifyFull => "verify-full",
        }
    }
}

/// Authorities that certificates may come from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum RootCerts {
    /// Those of the operating system; only [`SslMode::VerifyFull`] asks for them, since everybody can have a certificate from them.
    #[default]
    System,
    /// Those of this file (PEM), which is read for each connection, so that it may change.
    File(PathBuf),
    /// These (PEM).
    Pem(Vec<u8>),
}

/// Settings of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Where the server is.
    pub host: Host,
    /// Who we are.
    pub user: String,
    /// The password, for servers that want one.
    pub password: Option<Secret>,
    /// The database.
    pub database: String,
    /// Whether there is TLS.
    pub ssl_mode: SslMode,
    /// Authorities that certificates may come from.
    pub root_certs: RootCerts,
    /// What `pg_stat_activity` shows. By default `sluice`.
    pub application_name: String,
    /// An upper bound of the deadline for connecting, beside the one given with each call.
    pub connect_timeout: Option<Duration>,
    /// Whether a server may be given the password in clear text over a connection that is not encrypted. By default not,
    /// and no URL can say so.
    pub allow_clear_text: bool,
    /// Bounds on what is kept.
    pub limits: Limits,
}

impl Config {
    /// Settings for a server, without a password, with the defaults of a URL that says no more.
    pub fn new(host: Host, user: impl Into<String>, database: impl Into<String>) -> Self {
        Self {
            host,
            user: user.into(),
            password: None,
            database: database.into(),
            ssl_mode: SslMode::default(),
            root_certs: RootCerts::default(),
            application_name: "sluice".to_owned(),
            connect_timeout: None,
            allow_clear_text: false,
            limits: Limits::default(),
        }
    }

    /// Settings from a URL.
    ///
    /// Parameters: `sslmode`, `sslrootcert` (a file, or `system`), `application_name`, `connect_timeout` (whole seconds, 0
    /// for none), `host` (a name, or the directory of a Unix socket), `port`, `user`, `dbname`.
    pub fn parse(url: &str) -> Result<Self, UrlError> {
        url::parse(url)
    }

    /// The same with this password, in place of the URL's.
    pub fn with_password(mut self, password: impl Into<Vec<u8>>) -> Self {
        self.password = Some(Secret::new(password));
        self
    }
}

/// The settings as a URL, without the password.
impl fmt::Display for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            Host::Tcp { .. } => {
                write!(f, "postgres://{}@{}/{}?sslmode={}", self.user, self.host, self.database, self.ssl_mode.name())
            }
            Host::Unix { directory, port } => {
                write!(f, "postgres://{}@/{}?host={}&port={port}", self.user, self.database, directory.display())
            }
        }
    }
}
