//! The command `hot`: the hottest keys of a running server, as its ops port tells them.
//!
//! One GET of `/v1/status` for each table, over a connection of its own: it is asked once a second, and a server that is
//! started anew in between is found again.

use std::{
    io::{self, Read, Write},
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use serde::Deserialize;
use serde_json::Value;
use signal_hook::consts::{SIGINT, SIGTERM};
use thiserror::Error;

use crate::{
    cli::HotArgs,
    config::{ConfigError, Settings},
};

/// How long the server may take to accept, to send, to take what is sent.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often a pause looks whether it is to end.
const BLINK: Duration = Duration::from_millis(50);
/// The most bytes of an answer.
const ANSWER_BYTES_MAX: usize = 16 << 20;
/// How it begins.
const HTTP: &[u8] = b"HTTP/";
/// The most characters of a key in a table. JSON has all of them.
const KEY_CHARS_MAX: usize = 48;
/// Puts the cursor to the top left, and clears what is behind it.
const HOME: &str = "\x1b[H\x1b[J";
/// Clears the whole terminal.
const CLEAR: &str = "\x1b[2J";

/// Why there is no table.
#[derive(Debug, Error)]
pub enum HotError {
    /// The config has problems.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Nobody answers.
    #[error(
        "nothing listens at {0}. Is the server up, and its ops port another one? See `listen` under `[ops]` in its config, \
         and give it with --ops ADDR, or the config with --config FILE"
    )]
    Nobody(SocketAddr),
    /// There is somebody, who cannot be spoken with.
    #[error("{address} does not answer: {error}")]
    Silent {
        /// Who.
        address: SocketAddr,
        /// Why.
        error: io::Error,
    },
    /// It is no ops port of ours.
    #[error("{address} answers, but not as the ops port of a sluice with `sluice hot`: {why}. Is it another port?")]
    Stranger {
        /// Who.
        address: SocketAddr,
        /// What is not as it should be.
        why: String,
    },
    /// The table could not be written.
    #[error("cannot write: {0}")]
    Write(#[from] io::Error),
}

/// Whether it is time to end.
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// It is, once somebody presses Ctrl-C.
    ///
    /// # Errors
    ///
    /// When the system does not let signals be caught.
    pub fn on_signals() -> io::Result<Self> {
        let flag = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM] {
            // The second time it ends at once, wherever it hangs.
            signal_hook::flag::register_conditional_shutdown(signal, 0, Arc::clone(&flag))?;
            signal_hook::flag::register(signal, Arc::clone(&flag))?;
        }
        Ok(Self(flag))
    }

    fn has_come(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Waits; not longer than until it is time to end.
    fn pause(&self, mut left: Duration) {
        while !left.is_zero() && !self.has_come() {
            let blink = left.min(BLINK);
            std::thread::park_timeout(blink);
            left = left.saturating_sub(blink);
        }
    }
}

/// A key as `/v1/status` tells it.
#[derive(Debug, Deserialize)]
struct Row {
    key: String,
    rule: String,
    checks_per_second: f64,
    heat: String,
    decided_by: std::collections::BTreeMap<String, f64>,
    /// None where there is no store.
    saved_calls_per_second: Option<f64>,
}

/// Shows tables until it is time to end; with `once`, one.
///
/// # Errors
///
/// When the server cannot be asked, or the table not be written.
pub fn show(args: &HotArgs, is_terminal: bool, stop: &Stop, out: &mut impl Write) -> Result<(), HotError> {
    let address = address(args.ops, args.config.clone())?;
    let is_live = is_terminal && !args.json && !args.once;
    let mut is_first = true;
    loop {
        let keys = hottest(address, usize::from(args.top), stop);
        if stop.has_come() {
            return Ok(());
        }
        if is_live && std::mem::take(&mut is_first) {
            write!(out, "{CLEAR}")?;
        }
        let text = match keys {
            Ok(keys) if args.json => format!("{}\n", Value::Array(keys)),
            Ok(keys) => table(&rows(address, keys)?),
            // Whoever watches a server that is started anew wants to see it come back.
            Err(error) if is_live => format!("{error}\n"),
            Err(error) => return Err(error),
        };
        if is_live {
            write!(out, "{HOME}sluice hot: {address}, Ctrl-C ends it\n\n")?;
        }
        out.write_all(text.as_bytes())?;
        out.flush()?;
        if args.once {
            return Ok(());
        }
        stop.pause(Duration::from_secs_f64(args.interval));
        if stop.has_come() {
            return Ok(());
        }
        if !is_live && !args.json {
            writeln!(out)?;
        }
    }
}

/// Where the ops port is: what was said, or what the config says. One that listens everywhere listens here.
fn address(said: Option<SocketAddr>, config: Option<PathBuf>) -> Result<SocketAddr, HotError> {
    let mut address = match (said, config) {
        (Some(address), _) => address,
        (None, Some(path)) => Settings::read(&path)?.ops.listen,
        (None, None) => Settings::default().ops.listen,
    };
    match address {
        SocketAddr::V4(ref mut v4) if v4.ip().is_unspecified() => v4.set_ip(Ipv4Addr::LOCALHOST),
        SocketAddr::V6(ref mut v6) if v6.ip().is_unspecified() => v6.set_ip(Ipv6Addr::LOCALHOST),
        _ => {}
    }
    Ok(address)
}

/// Asks for the keys.
fn hottest(address: SocketAddr, top: usize, stop: &Stop) -> Result<Vec<Value>, HotError> {
    let text = get(address, stop).map_err(|error| match error.kind() {
        io::ErrorKind::ConnectionRefused => HotError::Nobody(address),
        _ => HotError::Silent { address, error },
    })?;
    let stranger = |why: &str| HotError::Stranger { address, why: why.into() };
    let (head, body) = text
        .split_once("\r\n\r\n")
        .filter(|_| text.as_bytes().starts_with(HTTP))
        .ok_or_else(|| stranger("that is not HTTP"))?;
    let status = head.lines().next().unwrap_or_default();
    if status.split(' ').nth(1) != Some("200") {
        return Err(stranger(&format!("/v1/status gives {:?}", printable(status))));
    }
    let page: Value = serde_json::from_str(body).map_err(|_| stranger("/v1/status is not JSON"))?;
    let Some(Value::Array(keys)) = page.get("hot") else { return Err(stranger("/v1/status has no `hot`")) };
    Ok(keys.iter().take(top).cloned().collect())
}

/// One request, and all that is answered until the server closes.
fn get(address: SocketAddr, stop: &Stop) -> io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    // At once: who closes after the first piece would not be heard out.
    let request = format!("GET /v1/status HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes())?;
    let (mut bytes, mut piece) = (Vec::new(), [0; 16 * 1024]);
    // What is no HTTP need not end.
    while bytes.len() <= ANSWER_BYTES_MAX && (bytes.len() < HTTP.len() || bytes.starts_with(HTTP)) {
        match stream.read(&mut piece) {
            Ok(0) => break,
            Ok(len) => bytes.extend_from_slice(&piece[..len]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted && !stop.has_come() => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Err(io::Error::new(io::ErrorKind::TimedOut, format!("nothing came for {PATIENCE:?}")));
            }
            Err(error) => return Err(error),
        }
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn rows(address: SocketAddr, keys: Vec<Value>) -> Result<Vec<Row>, HotError> {
    let rows = keys.into_iter().map(serde_json::from_value).collect::<Result<_, _>>();
    rows.map_err(|error| HotError::Stranger { address, why: error.to_string() })
}

/// A table for people.
fn table(rows: &[Row]) -> String {
    if rows.is_empty() {
        return "no key is asked for often enough to be seen\n".into();
    }
    let head = ["KEY", "RULE", "CHECKS/S", "SAVED CALLS/S", "HEAT", "DECIDED BY"].map(String::from);
    let lines: Vec<[String; 6]> = rows
        .iter()
        .map(|row| {
            let saved = row.saved_calls_per_second.map_or_else(|| "-".into(), rate);
            let heat = printable(&row.heat);
            [shortened(&row.key), printable(&row.rule), rate(row.checks_per_second), saved, heat, shares(row)]
        })
        .collect();
    let width =
        |column: usize| lines.iter().chain([&head]).map(|line| line[column].chars().count()).max().unwrap_or_default();
    let (key_width, rule_width, rate_width, saved_width) = (width(0), width(1), width(2), width(3));
    [&head]
        .into_iter()
        .chain(&lines)
        .map(|[key, rule, checks, saved, heat, by]| {
            format!(
                "{key:key_width$}  {rule:rule_width$}  {checks:>rate_width$}  {saved:>saved_width$}  {heat:4}  {by}\n"
            )
        })
        .collect()
}

/// Who decided how much, the greatest share first.
fn shares(row: &Row) -> String {
    let mut shares: Vec<_> = row.decided_by.iter().collect();
    shares.sort_by(|one, other| other.1.total_cmp(one.1));
    let words: Vec<_> = shares.iter().map(|(by, share)| format!("{} {:.0}%", printable(by), *share * 100.0)).collect();
    words.join(", ")
}

fn rate(per_second: f64) -> String {
    if per_second < 10.0 { format!("{per_second:.1}") } else { format!("{per_second:.0}") }
}

/// Whatever a server may send, a terminal is told nothing but characters to show.
fn printable(text: &str) -> String {
    text.chars().map(|character| if character.is_control() { '\u{FFFD}' } else { character }).collect()
}

fn shortened(key: &str) -> String {
    let key = printable(key);
    if key.chars().count() <= KEY_CHARS_MAX {
        return key;
    }
    key.chars().take(KEY_CHARS_MAX - 1).chain(['…']).collect()
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_for_reading_whatever_the_server_says() {
        let row = |key: &str, saved| Row {
            key: key.into(),
            rule: "login".into(),
            checks_per_second: 1234.5,
            heat: "hot".into(),
            decided_by: [("redis".to_owned(), 0.25), ("lease".to_owned(), 0.75)].into(),
            saved_calls_per_second: saved,
        };
        let text = table(&[row("key=\u{1b}[2Ja\n\u{9b}1", Some(900.4)), row(&"k".repeat(100), None)]);
        assert!(text.chars().all(|character| character == '\n' || !character.is_control()), "{text:?}");
        assert_eq!(text.lines().count(), 3);
        assert!(text.contains("lease 75%, redis 25%") && text.contains("900") && text.contains("1234"), "{text}");
        assert!(text.lines().nth(2).unwrap().starts_with(&format!("{}…", "k".repeat(47))), "{text}");
    }

    #[test]
    fn an_ops_port_that_listens_everywhere_is_asked_here() {
        let of = |text: &str| address(Some(text.parse().unwrap()), None).unwrap().to_string();
        assert_eq!(of("0.0.0.0:9390"), "127.0.0.1:9390");
        assert_eq!(of("[::]:9390"), "[::1]:9390");
        assert_eq!(of("10.0.0.1:9390"), "10.0.0.1:9390");
    }
}
