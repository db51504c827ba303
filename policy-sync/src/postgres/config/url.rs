//! URLs to settings. An error shows what stands after the user and password, never what stands there.

use std::{path::PathBuf, time::Duration};

use percent_encoding::percent_decode_str;
use thiserror::Error;

use super::{Config, Host, RootCerts, Secret, SslMode};
use crate::check::{nearest, quoted};

/// PostgreSQL's port.
const DEFAULT_PORT: u16 = 5432;
/// All parameters.
const PARAMETERS: [&str; 8] =
    ["sslmode", "sslrootcert", "application_name", "connect_timeout", "host", "port", "user", "dbname"];
/// All modes of TLS.
const MODES: [SslMode; 5] =
    [SslMode::Disable, SslMode::Prefer, SslMode::Require, SslMode::VerifyCa, SslMode::VerifyFull];

/// What is wrong with a URL.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum UrlError {
    /// Another scheme, or none.
    #[error("the URL of PostgreSQL must begin with postgres://, as in postgres://user@host/database")]
    Scheme,
    /// No user.
    #[error("the URL of PostgreSQL has no user: postgres://USER@host/database")]
    NoUser,
    /// No host.
    #[error(
        "the URL of PostgreSQL has no host: postgres://user@HOST/database, or …@/database?host=/directory/of/the/socket"
    )]
    NoHost,
    /// Two hosts, one before the path and one in the parameters.
    #[error("the URL of PostgreSQL names {0} twice: before the ? and after it")]
    Twice(&'static str),
    /// Several hosts.
    #[error("the URL of PostgreSQL names several hosts; one is supported: a name or address that leads to the primary")]
    ManyHosts,
    /// A port that is none.
    #[error("the port in the URL of PostgreSQL must be a number from 1 to 65535")]
    Port,
    /// An IPv6 address without brackets, or with one of them.
    #[error("an IPv6 address in the URL of PostgreSQL stands in brackets: [::1]:5432")]
    Brackets,
    /// More than one part of a path.
    #[error("the path of the URL of PostgreSQL is the name of the database: one part, with / written as %2F")]
    Path,
    /// An escape that gives no text.
    #[error("%-escapes in the URL of PostgreSQL must give UTF-8 without a byte 0 ({0})")]
    Text(&'static str),
    /// A parameter that is not known.
    #[error("{}", unknown(name, suggestion.as_deref()))]
    Parameter {
        /// Its name.
        name: String,
        /// Which it may have been meant to be.
        suggestion: Option<String>,
    },
    /// A parameter that is not known, and that may be the end of a password.
    #[error(
        "the URL of PostgreSQL has an unknown parameter, or a user or password in which ?, @, / or : are not escaped (write %3F, %40, %2F, %3A)"
    )]
    Unescaped,
    /// A parameter without a value.
    #[error("the parameter {0} in the URL of PostgreSQL has no value")]
    NoValue(String),
    /// A parameter that stands there twice.
    #[error("the parameter {0} stands twice in the URL of PostgreSQL")]
    Repeated(String),
    /// A password where logs show it.
    #[error(
        "the password does not stand among the parameters of the URL of PostgreSQL: put it into a file, or before the @ (postgres://user:password@host)"
    )]
    Password,
    /// A mode of TLS that is not known.
    #[error("sslmode is {}; it can be disable, prefer, require, verify-ca or verify-full{}", quoted(value), meant(suggestion.as_deref()))]
    SslMode {
        /// What it is.
        value: String,
        /// What it may have been meant to be.
        suggestion: Option<String>,
    },
    /// A mode that needs authorities of its own.
    #[error(
        "sslmode=verify-ca needs sslrootcert=FILE: everybody can get a certificate from the system's authorities; or use verify-full"
    )]
    NeedsRootCert,
    /// A mode that makes no sense with the system's authorities.
    #[error(
        "sslrootcert=system needs sslmode=verify-full: everybody can get a certificate from the system's authorities"
    )]
    SystemNeedsFull,
    /// A timeout that is none.
    #[error("connect_timeout must be a whole number of seconds (0 for none)")]
    Timeout,
}

fn unknown(name: &str, suggestion: Option<&str>) -> String {
    let known = PARAMETERS.join(", ");
    format!("the URL of PostgreSQL has an unknown parameter {}{}; known are {known}", quoted(name), meant(suggestion))
}

fn meant(suggestion: Option<&str>) -> String {
    suggestion.map_or_else(String::new, |suggestion| format!(" (meant {suggestion}?)"))
}

/// What the parameters say.
#[derive(Default)]
struct Parameters {
    found: Vec<(&'static str, String)>,
}

pub(super) fn parse(url: &str) -> Result<Config, UrlError> {
    let rest = url.strip_prefix("postgres://").or_else(|| url.strip_prefix("postgresql://")).ok_or(UrlError::Scheme)?;
    let (before, query) = rest.split_once('?').unwrap_or((rest, ""));
    // The last @ ends the password, since one that was not escaped may have others; a host has none.
    let (login, rest) = before.rsplit_once('@').map_or((None, before), |(login, rest)| (Some(login), rest));
    // A password with a ? that was not escaped makes its end look like a parameter, which must not be shown then.
    let may_show = login.is_some() && !query.contains('@');
    let mut parameters = Parameters::read(query, may_show)?;
    let (hosts, path) = rest.split_once('/').unwrap_or((rest, ""));
    let (user, password) = match login.map(|login| login.split_once(':').unwrap_or((login, ""))) {
        None => (None, None),
        Some((user, password)) => {
            let password = Some(percent_decode_str(password).collect::<Vec<u8>>()).filter(|bytes| !bytes.is_empty());
            (Some(text(user, "user")?).filter(|user| !user.is_empty()), password)
        }
    };
    if password.as_ref().is_some_and(|password| password.contains(&0)) {
        return Err(UrlError::Text("password"));
    }
    let user = parameters.either("user", user)?.ok_or(UrlError::NoUser)?;
    if path.contains('/') {
        return Err(UrlError::Path);
    }
    let database = parameters.either("dbname", Some(text(path, "database")?).filter(|name| !name.is_empty()))?;
    let host = host(hosts, &mut parameters)?;
    // A user's own database has the user's name, as everywhere in PostgreSQL.
    let mut config = Config::new(host, user.clone(), database.unwrap_or(user));
    config.password = password.map(Secret::new);
    parameters.settings(&mut config)?;
    Ok(config)
}

fn host(hosts: &str, parameters: &mut Parameters) -> Result<Host, UrlError> {
    if hosts.contains(',') {
        return Err(UrlError::ManyHosts);
    }
    let (host, port) = if let Some(rest) = hosts.strip_prefix('[') {
        let (host, port) = rest.split_once(']').ok_or(UrlError::Brackets)?;
        match port.strip_prefix(':') {
            Some(port) => (host, Some(port)),
            None if port.is_empty() => (host, None),
            None => return Err(UrlError::Port),
        }
    } else {
        match hosts.split_once(':') {
            Some((_, port)) if port.contains(':') => return Err(UrlError::Brackets),
            Some((host, port)) => (host, Some(port)),
            None => (hosts, None),
        }
    };
    let host = Some(text(host, "host")?).filter(|host| !host.is_empty());
    let host = parameters.either("host", host)?.ok_or(UrlError::NoHost)?;
    if host.contains(',') {
        return Err(UrlError::ManyHosts);
    }
    let port = match parameters.either("port", port.map(str::to_owned))? {
        None => DEFAULT_PORT,
        Some(port) => port.parse().ok().filter(|&port| port != 0).ok_or(UrlError::Port)?,
    };
    if host.starts_with('/') {
        Ok(Host::Unix { directory: PathBuf::from(host), port })
    } else {
        Ok(Host::Tcp { host, port })
    }
}

impl Parameters {
    fn read(query: &str, may_show: bool) -> Result<Self, UrlError> {
        let mut parameters = Self::default();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let name = text(name, "parameters")?;
            if matches!(name.as_str(), "password" | "passfile" | "sslpassword") {
                return Err(UrlError::Password);
            }
            let Some(&known) = PARAMETERS.iter().find(|&&known| known == name) else {
                if !may_show {
                    return Err(UrlError::Unescaped);
                }
                let suggestion = nearest(&name, PARAMETERS).map(str::to_owned);
                return Err(UrlError::Parameter { name, suggestion });
            };
            if parameters.found.iter().any(|&(other, _)| other == known) {
                return Err(UrlError::Repeated(name));
            }
            if value.is_empty() {
                return Err(UrlError::NoValue(name));
            }
            parameters.found.push((known, text(value, known)?));
        }
        Ok(parameters)
    }

    fn take(&mut self, name: &str) -> Option<String> {
        let at = self.found.iter().position(|&(known, _)| known == name)?;
        Some(self.found.swap_remove(at).1)
    }

    /// What stands either before the parameters or among them.
    fn either(&mut self, name: &'static str, before: Option<String>) -> Result<Option<String>, UrlError> {
        match (before, self.take(name)) {
            (Some(_), Some(_)) => Err(UrlError::Twice(name)),
            (before, among) => Ok(before.or(among)),
        }
    }

    fn settings(mut self, config: &mut Config) -> Result<(), UrlError> {
        if let Some(value) = self.take("sslmode") {
            config.ssl_mode = mode(value)?;
        }
        match self.take("sslrootcert").as_deref() {
            Some("system") if config.ssl_mode != SslMode::VerifyFull => return Err(UrlError::SystemNeedsFull),
            Some("system") => {}
            Some(file) => config.root_certs = RootCerts::File(file.into()),
            None if config.ssl_mode == SslMode::VerifyCa => return Err(UrlError::NeedsRootCert),
            None => {}
        }
        if let Some(name) = self.take("application_name") {
            config.application_name = name;
        }
        if let Some(seconds) = self.take("connect_timeout") {
            let seconds: u32 = seconds.parse().map_err(|_| UrlError::Timeout)?;
            config.connect_timeout = (seconds > 0).then(|| Duration::from_secs(seconds.into()));
        }
        Ok(())
    }
}

fn mode(value: String) -> Result<SslMode, UrlError> {
    MODES.into_iter().find(|mode| mode.name() == value).ok_or_else(|| {
        let suggestion = nearest(&value, MODES.map(SslMode::name)).map(str::to_owned);
        UrlError::SslMode { value, suggestion }
    })
}

fn text(escaped: &str, part: &'static str) -> Result<String, UrlError> {
    let text = percent_decode_str(escaped).decode_utf8().map_err(|_| UrlError::Text(part))?;
    if text.contains('\0') { Err(UrlError::Text(part)) } else { Ok(text.into_owned()) }
}
