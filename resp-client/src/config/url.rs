//! URLs to settings.
//!
//! An error shows the URL up to its scheme and from the host on, never what stands between: there are the passwords.

use percent_encoding::percent_decode_str;
use thiserror::Error;

use super::{Address, Config, Credentials, Mode, Secret};
use crate::tls::TlsConfig;

/// What is wrong with a URL. `url` is the URL without user and password.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum UrlError {
    /// No URL at all.
    #[error("no URL; one like redis://127.0.0.1:6379 is needed")]
    None,
    /// No `://`, or a scheme that is not known.
    #[error(
        "`{url}`: the scheme must be one of redis, rediss, redis+unix, unix, redis+cluster, rediss+cluster, redis+sentinel, rediss+sentinel"
    )]
    Scheme {
        /// Which.
        url: String,
    },
    /// No host.
    #[error("`{url}`: a host is missing")]
    NoHost {
        /// Which.
        url: String,
    },
    /// Several hosts where one is meant.
    #[error("`{url}`: several hosts need redis+cluster:// or redis+sentinel://")]
    ManyHosts {
        /// Which.
        url: String,
    },
    /// A port that is none.
    #[error("`{url}`: the port must be a number from 1 to 65535")]
    Port {
        /// Which.
        url: String,
    },
    /// An IPv6 address without brackets, or with one of them.
    #[error("`{url}`: an IPv6 address stands in brackets: [::1]:6379")]
    Brackets {
        /// Which.
        url: String,
    },
    /// No absolute path.
    #[error("`{url}`: a Unix socket needs an absolute path: redis+unix:///run/redis.sock")]
    UnixPath {
        /// Which.
        url: String,
    },
    /// A database that is no number.
    #[error("`{url}`: the database must be a number")]
    Database {
        /// Which.
        url: String,
    },
    /// A database in a cluster.
    #[error("`{url}`: a cluster has only database 0")]
    ClusterDatabase {
        /// Which.
        url: String,
    },
    /// No name of the primary.
    #[error("`{url}`: the name of the primary is missing: redis+sentinel://host:port/NAME")]
    NoMaster {
        /// Which.
        url: String,
    },
    /// A user without a password.
    #[error("`{url}`: a user needs a password: user:password@host (a password alone is :password@host)")]
    UserOnly {
        /// Which.
        url: String,
    },
    /// A user, host or path that is no text.
    #[error("`{url}`: %-escapes outside the password must be UTF-8")]
    Utf8 {
        /// Which.
        url: String,
    },
    /// A path or a query where there can be none.
    #[error("`{url}`: nothing known by `{part}`")]
    Surplus {
        /// Which.
        url: String,
        /// The part.
        part: String,
    },
    /// URLs that do not belong together.
    #[error("`{url}` and the URLs before it differ in more than their hosts")]
    Mixed {
        /// Which.
        url: String,
    },
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Single,
    Unix,
    Cluster,
    Sentinel,
}

/// One URL in its parts.
#[derive(PartialEq, Eq)]
struct Parts {
    kind: Kind,
    tls: bool,
    credentials: Option<Credentials>,
    hosts: Vec<Address>,
    master: Option<String>,
    database: u32,
}

pub(super) fn config<U: AsRef<str>>(urls: &[U]) -> Result<Config, UrlError> {
    let mut urls = urls.iter().map(AsRef::as_ref);
    let mut all = parse(urls.next().ok_or(UrlError::None)?)?;
    for url in urls {
        let mut more = parse(url)?;
        let hosts = std::mem::take(&mut more.hosts);
        let same = Parts { hosts: Vec::new(), ..more } == Parts { hosts: Vec::new(), ..clone_without_hosts(&all) };
        if !same || all.kind == Kind::Unix {
            return Err(UrlError::Mixed { url: shown(url) });
        }
        all.hosts.extend(hosts);
    }
    Ok(settings(all))
}

fn clone_without_hosts(parts: &Parts) -> Parts {
    Parts { credentials: parts.credentials.clone(), hosts: Vec::new(), master: parts.master.clone(), ..*parts }
}

fn settings(parts: Parts) -> Config {
    let mut hosts = parts.hosts;
    let mode = match (parts.kind, parts.master) {
        (Kind::Sentinel, Some(master)) => Mode::Sentinel { sentinels: hosts, master },
        (Kind::Single | Kind::Unix, _) if hosts.len() == 1 => Mode::Single(hosts.remove(0)),
        _ => Mode::Cluster { seeds: hosts },
    };
    let mut config = Config::new(mode);
    config.credentials = parts.credentials;
    config.database = parts.database;
    config.tls = parts.tls.then(TlsConfig::default);
    config
}

fn parse(url: &str) -> Result<Parts, UrlError> {
    let url_shown = || shown(url);
    let (scheme, rest) = url.split_once("://").ok_or_else(|| UrlError::Scheme { url: url_shown() })?;
    let (kind, tls) = match scheme {
        "redis" => (Kind::Single, false),
        "rediss" => (Kind::Single, true),
        "redis+unix" | "unix" => (Kind::Unix, false),
        "redis+cluster" => (Kind::Cluster, false),
        "rediss+cluster" => (Kind::Cluster, true),
        "redis+sentinel" => (Kind::Sentinel, false),
        "rediss+sentinel" => (Kind::Sentinel, true),
        _ => return Err(UrlError::Scheme { url: url_shown() }),
    };
    let (rest, query) = rest.split_once('?').map_or((rest, None), |(rest, query)| (rest, Some(query)));
    let (user, rest) = split_user(rest);
    let credentials = user.map(|user| credentials(user, url)).transpose()?;
    let mut parts = Parts { kind, tls, credentials, hosts: Vec::new(), master: None, database: 0 };
    match kind {
        Kind::Unix => unix(&mut parts, rest, query, url)?,
        _ if query.is_some_and(|query| !query.is_empty()) => {
            return Err(UrlError::Surplus { url: url_shown(), part: "a query (?…)".to_owned() });
        }
        _ => network(&mut parts, rest, url)?,
    }
    Ok(parts)
}

/// What stands before the host: up to the last `@`, since a password that was not escaped may have others.
fn split_user(rest: &str) -> (Option<&str>, &str) {
    match rest.rsplit_once('@') {
        Some((user, rest)) => (Some(user), rest),
        None => (None, rest),
    }
}

fn credentials(user: &str, url: &str) -> Result<Credentials, UrlError> {
    let (user, password) = user.split_once(':').ok_or_else(|| UrlError::UserOnly { url: shown(url) })?;
    let user = if user.is_empty() { None } else { Some(text(user, url)?) };
    Ok(Credentials { user, password: Secret::new(percent_decode_str(password).collect::<Vec<u8>>()) })
}

fn unix(parts: &mut Parts, path: &str, query: Option<&str>, url: &str) -> Result<(), UrlError> {
    if !path.starts_with('/') || path.len() == 1 {
        return Err(UrlError::UnixPath { url: shown(url) });
    }
    parts.hosts.push(Address::Unix(text(path, url)?));
    match query.unwrap_or_default() {
        "" => Ok(()),
        query => {
            let Some(number) = query.strip_prefix("db=") else {
                return Err(UrlError::Surplus {
                    url: shown(url),
                    part: "this query; a Unix socket has ?db=n".to_owned(),
                });
            };
            parts.database = database(number, url)?;
            Ok(())
        }
    }
}

fn network(parts: &mut Parts, rest: &str, url: &str) -> Result<(), UrlError> {
    let mut path = rest.split('/');
    let hosts = path.next().unwrap_or_default();
    let default_port = if parts.kind == Kind::Sentinel { 26_379 } else { 6379 };
    for host in hosts.split(',') {
        parts.hosts.push(address(host, default_port, url)?);
    }
    if parts.hosts.len() > 1 && parts.kind == Kind::Single {
        return Err(UrlError::ManyHosts { url: shown(url) });
    }
    if parts.kind == Kind::Sentinel {
        let master = path.next().filter(|name| !name.is_empty());
        parts.master = Some(text(master.ok_or_else(|| UrlError::NoMaster { url: shown(url) })?, url)?);
    }
    if let Some(number) = path.next().filter(|number| !number.is_empty()) {
        parts.database = database(number, url)?;
        if parts.kind == Kind::Cluster && parts.database != 0 {
            return Err(UrlError::ClusterDatabase { url: shown(url) });
        }
    }
    match path.next() {
        None => Ok(()),
        Some(part) => Err(UrlError::Surplus { url: shown(url), part: format!("/{part}") }),
    }
}

fn address(host: &str, default_port: u16, url: &str) -> Result<Address, UrlError> {
    let (host, port) = if let Some(rest) = host.strip_prefix('[') {
        let (host, port) = rest.split_once(']').ok_or_else(|| UrlError::Brackets { url: shown_host(url) })?;
        match port.strip_prefix(':') {
            Some(port) => (host, Some(port)),
            None if port.is_empty() => (host, None),
            None => return Err(UrlError::Port { url: shown_host(url) }),
        }
    } else {
        match host.split_once(':') {
            Some((_, port)) if port.contains(':') => return Err(UrlError::Brackets { url: shown_host(url) }),
            Some((host, port)) => (host, Some(port)),
            None => (host, None),
        }
    };
    if host.is_empty() {
        return Err(UrlError::NoHost { url: shown(url) });
    }
    let port = match port {
        None => default_port,
        Some(port) => {
            port.parse().ok().filter(|&port| port != 0).ok_or_else(|| UrlError::Port { url: shown_host(url) })?
        }
    };
    Ok(Address::Tcp { host: text(host, url)?, port })
}

fn database(number: &str, url: &str) -> Result<u32, UrlError> {
    number.parse().map_err(|_| UrlError::Database { url: shown(url) })
}

fn text(escaped: &str, url: &str) -> Result<String, UrlError> {
    let text = percent_decode_str(escaped).decode_utf8().map_err(|_| UrlError::Utf8 { url: shown(url) })?;
    Ok(text.into_owned())
}

/// The URL up to its first host's name: what stands in a port's place may be a password whose `@` was forgotten.
fn shown_host(url: &str) -> String {
    let shown = shown(url);
    let begin = shown.find('@').or_else(|| shown.find("://").map(|at| at + 2)).map_or(0, |at| at + 1);
    match shown[begin..].find(':') {
        Some(at) => format!("{}:…", &shown[..begin + at]),
        None => shown,
    }
}

/// The URL as an error may show it: without anything that could be a password. What has no scheme may be anything.
fn shown(url: &str) -> String {
    match url.split_once("://") {
        None if url.contains('@') => "…".to_owned(),
        None => url.to_owned(),
        Some((scheme, rest)) => match rest.rsplit_once('@') {
            Some((_, host)) => format!("{scheme}://…@{host}"),
            None => url.to_owned(),
        },
    }
}
