//! The command line.

use std::{net::SocketAddr, path::PathBuf};

use clap::{Parser, ValueEnum};

use crate::identities::IDENTITIES_MAX;

const AFTER_HELP: &str = "\
Examples:
  sluice-load --depth 100 --cpus 1                        CHECKs against 127.0.0.1:6390, 100 deep on 50 connections
  sluice-load --protocol ping --target 127.0.0.1:6379     PINGs against Redis
  sluice-load --rate 20000 --connections 200              open loop: latency from when a request was due
  sluice-load --requests 5000 --identities 1 --max-allowed 1000   fails if more than 1000 were allowed

Exit codes: 0 done, 1 a reply was wrong or did not come, 2 usage, 130 interrupted.";

/// Sends checks as fast as asked and verifies every reply.
#[derive(Clone, Debug, Parser)]
#[command(name = "sluice-load", version, after_help = AFTER_HELP)]
pub(crate) struct Args {
    /// Server to load.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:6390", conflicts_with = "unix")]
    pub target: SocketAddr,
    /// The server's Unix socket, in place of --target.
    #[arg(long, value_name = "PATH")]
    pub unix: Option<PathBuf>,
    /// Threads, each with its share of the connections.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub threads: u16,
    /// Cores to pin the threads to, in turn, by the kernel's numbers, as in 1,3.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub cpus: Vec<usize>,
    /// Connections in all.
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u16).range(1..))]
    pub connections: u16,
    /// Requests in one batch; the next batch of a connection goes out when all its replies are back.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub depth: u32,
    /// How long to measure, after the warm-up.
    #[arg(long, value_name = "SECS", default_value_t = 10.0, value_parser = seconds)]
    pub duration_secs: f64,
    /// Send exactly this many requests (not counting probes) in place of running for a time.
    #[arg(long, value_name = "N", conflicts_with = "duration_secs")]
    pub requests: Option<u64>,
    /// How long to load before measuring [default: 1; with --requests 0].
    #[arg(long, value_name = "SECS", value_parser = seconds)]
    pub warmup_secs: Option<f64>,
    /// Open loop: this many requests a second in all, sent when due whether or not earlier replies are back. Without it,
    /// closed loop.
    #[arg(long, value_name = "N", value_parser = rate)]
    pub rate: Option<f64>,
    /// What to send, and what to expect.
    #[arg(long, value_enum, default_value_t = Protocol::Check)]
    pub protocol: Protocol,
    /// Distinct identities.
    #[arg(long, value_name = "N", default_value_t = 100_000, value_parser = clap::value_parser!(u32).range(1..=i64::from(IDENTITIES_MAX)))]
    pub identities: u32,
    /// How identities are drawn.
    #[arg(long, value_enum, default_value_t = Distribution::Uniform)]
    pub distribution: Distribution,
    /// Exponent of the Zipf distribution; identity 0 is the most frequent.
    #[arg(long, value_name = "S", default_value_t = 1.0, value_parser = exponent)]
    pub zipf_exponent: f64,
    /// What an identity begins with; eight digits follow.
    #[arg(long, value_name = "TEXT", default_value = "ak_")]
    pub identity_prefix: String,
    /// A fixed attribute of each check; may be repeated [default: path=/v1/login method=POST].
    #[arg(long = "attr", value_name = "NAME=VALUE", value_parser = attribute)]
    pub attributes: Vec<(String, String)>,
    /// The attribute whose value is the identity.
    #[arg(long, value_name = "NAME", default_value = "key")]
    pub identity_attr: String,
    /// COST of each check [default: not sent].
    #[arg(long, value_name = "N")]
    pub cost: Option<u32>,
    /// Burst of cl-throttle and throttle.
    #[arg(long, value_name = "N", default_value_t = 1000)]
    pub burst: u32,
    /// Count of cl-throttle and throttle.
    #[arg(long, value_name = "N", default_value_t = 1000)]
    pub count: u32,
    /// Period of cl-throttle and throttle, in seconds.
    #[arg(long, value_name = "SECS", default_value_t = 1)]
    pub period: u32,
    /// Seed of the identities drawn.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// One request in about this many is an ECHO of a unique token, which must come back at exactly its place; 0 for none.
    /// Not with throttle and echo-bytes.
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub verify_every: u32,
    /// Fail unless every check was decided by this rule.
    #[arg(long, value_name = "NAME")]
    pub expect_rule: Option<String>,
    /// Fail if the whole run, warm-up included, was allowed more than this.
    #[arg(long, value_name = "N")]
    pub max_allowed: Option<u64>,
    /// Count error replies instead of failing.
    #[arg(long)]
    pub allow_errors: bool,
    /// Accept different limits under one rule name, as overrides give.
    #[arg(long)]
    pub varying_limits: bool,
    /// Fail when nothing came for this long while replies are due.
    #[arg(long, value_name = "SECS", default_value_t = 10.0, value_parser = seconds)]
    pub timeout_secs: f64,
    /// Without work, look for replies for this long before sleeping: spares the server the cost of waking this process.
    /// The time is reported apart from the CPU used.
    #[arg(long, value_name = "US", default_value_t = 50)]
    pub spin_us: u32,
    /// No progress on standard error.
    #[arg(long)]
    pub quiet: bool,
    /// One JSON object for programs instead of a table for people.
    #[arg(long)]
    pub json: bool,
}

/// What is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Protocol {
    /// Sluice's CHECK.
    Check,
    /// CL.THROTTLE, as redis-cell.
    ClThrottle,
    /// THROTTLE, as throttlecrab.
    Throttle,
    /// PING.
    Ping,
    /// INCR of the identity, on Redis.
    Incr,
    /// The bytes of CHECK, and the same bytes back.
    EchoBytes,
}

impl Protocol {
    /// As on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Check => "check",
            Self::ClThrottle => "cl-throttle",
            Self::Throttle => "throttle",
            Self::Ping => "ping",
            Self::Incr => "incr",
            Self::EchoBytes => "echo-bytes",
        }
    }

    /// Whether the server also answers ECHO.
    pub(crate) fn has_echo(self) -> bool {
        !matches!(self, Self::Throttle | Self::EchoBytes)
    }
}

/// How identities are drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Distribution {
    /// Each as often as any other.
    Uniform,
    /// Few of them most of the time.
    Zipf,
    /// One after the other, from the first again after the last.
    Sequential,
}

impl Args {
    /// The fixed attributes of a check.
    pub(crate) fn fixed_attributes(&self) -> Vec<(String, String)> {
        if self.attributes.is_empty() {
            return vec![("path".into(), "/v1/login".into()), ("method".into(), "POST".into())];
        }
        self.attributes.clone()
    }

    /// How long to load before measuring.
    pub(crate) fn warmup_secs(&self) -> f64 {
        self.warmup_secs.unwrap_or(if self.requests.is_some() { 0.0 } else { 1.0 })
    }

    /// Distance of the probes; 0 for none.
    pub(crate) fn probe_every(&self) -> u32 {
        if self.protocol.has_echo() { self.verify_every } else { 0 }
    }
}

fn attribute(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.into(), value.into())),
        _ => Err("an attribute is written name=value".into()),
    }
}

fn number(text: &str, least: f64, most: f64) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if (least..=most).contains(&value) => Ok(value),
        _ => Err(format!("must be a number from {least} to {most}")),
    }
}

fn seconds(text: &str) -> Result<f64, String> {
    number(text, 0.0, 1e6)
}

fn rate(text: &str) -> Result<f64, String> {
    number(text, 0.001, 1e9)
}

fn exponent(text: &str) -> Result<f64, String> {
    number(text, 0.01, 10.0)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        Args::command().debug_assert();
    }

    #[test]
    fn a_given_attribute_replaces_the_default_ones() {
        let args = Args::parse_from(["sluice-load", "--attr", "path=/x=y"]);
        assert_eq!(args.fixed_attributes(), [("path".to_owned(), "/x=y".to_owned())]);
        assert_eq!(Args::parse_from(["sluice-load"]).fixed_attributes().len(), 2);
    }
}
