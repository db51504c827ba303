//! Which values make sense: every bound of a setting, in one place.

use std::{fmt::Display, net::SocketAddr, ops::RangeInclusive};

use tracing_subscriber::EnvFilter;

use super::{Cores, Settings};
use crate::{heat::HEAT_KEYS_MAX, limits::CORES_MAX, resp::command::is_attribute_name, store::breaker::PROBES_MAX};

/// Bytes of a request beside its longest word: the other words and the framing.
const REQUEST_BYTES_BESIDE_WORD: usize = 64;
/// The longest name of a gateway, in bytes.
const GATEWAY_NAME_BYTES_MAX: usize = 200;
/// The longest duration of a setting: a day.
const DURATION_MS_MAX: u64 = 24 * 3600 * 1000;

/// A value out of its bounds.
pub(super) struct Violation {
    /// The setting.
    pub(super) setting: &'static str,
    /// What it must be, and what it is.
    pub(super) message: String,
}

/// All values of these settings that are out of their bounds.
pub(super) fn violations(settings: &Settings) -> Vec<Violation> {
    let mut found = Violations(Vec::new());
    found.cores(&settings.cores);
    found.redis(&settings.redis);
    found.postgres(settings);
    found.shadow(settings);
    found.within("hot.rejections", settings.hot.rejections, 1..=100_000_000);
    found.within("hot.leases", settings.hot.leases, 2..=1_000_000);
    let share = settings.hot.lease_share;
    found.must((0.001..=1.0).contains(&share), "hot.lease_share", "from 0.001 to 1", &share);
    found.within("hot.lease_quiet_ms", settings.hot.lease_quiet_ms, 100..=3_600_000);
    found.within("hot.heat_keys", settings.hot.heat_keys, 16..=HEAT_KEYS_MAX);
    found.within("hot.lease_auto_above", settings.hot.lease_auto_above, 10..=100_000_000);
    found.resp(&settings.resp);
    let limits = &settings.limits;
    found.within("limits.connections_max", limits.connections_max, 1..=1_000_000);
    found.within("limits.buckets", limits.buckets, 1024..=1 << 32);
    found.within("limits.rules_max", limits.rules_max, 1..=policy_sync::model::RULES_MAX);
    found.within("limits.idle_timeout_ms", limits.idle_timeout_ms, 0..=DURATION_MS_MAX);
    found.within("limits.stall_timeout_ms", limits.stall_timeout_ms, 0..=DURATION_MS_MAX);
    found.transport(&settings.transport);
    found.within("ops.connections_max", settings.ops.connections_max, 1..=4096);
    found.http(&settings.http);
    found.addresses(settings);
    found.within("shutdown.drain_ms", settings.shutdown.drain_ms, 0..=DURATION_MS_MAX);
    found.within("shutdown.grace_ms", settings.shutdown.grace_ms, 0..=DURATION_MS_MAX);
    let level = &settings.log.level;
    let rule = "off, error, warn, info, debug or trace, or target=level pairs such as \"warn,sluice=debug\"";
    found.must(is_log_filter(level), "log.level", rule, &format!("{level:?}"));
    found.0
}

/// Whether this says what to log: levels and `target=level` pairs, with commas between them. A bare word that is no level
/// is refused: the log would take it for the name of a target, and fall silent.
pub fn is_log_filter(text: &str) -> bool {
    const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
    let is_level = |word: &str| LEVELS.iter().any(|level| word.eq_ignore_ascii_case(level));
    text.split(',').all(|part| part.contains('=') || is_level(part.trim())) && EnvFilter::try_new(text).is_ok()
}

struct Violations(Vec<Violation>);

impl Violations {
    fn must(&mut self, holds: bool, setting: &'static str, rule: &str, value: &dyn Display) {
        if !holds {
            self.0.push(Violation { setting, message: format!("must be {rule}, not {value}") });
        }
    }

    fn within<T: PartialOrd + Display + Copy>(&mut self, setting: &'static str, value: T, bounds: RangeInclusive<T>) {
        let rule = format!("from {} to {}", bounds.start(), bounds.end());
        self.must(bounds.contains(&value), setting, &rule, &value);
    }

    fn cores(&mut self, cores: &Cores) {
        match cores {
            Cores::Count(count) => self.within("cores", *count, 0..=CORES_MAX),
            Cores::List(list) => {
                let rule = format!("a list of 1 to {CORES_MAX} cores");
                self.must((1..=CORES_MAX).contains(&list.len()), "cores", &rule, &format!("{} cores", list.len()));
            }
        }
    }

    fn redis(&mut self, redis: &super::Redis) {
        if let Err(error) = redis.seeds() {
            self.0.push(Violation { setting: "redis.urls", message: error.to_string() });
        }
        self.within("redis.deadline_ms", redis.deadline_ms, 1..=1_000);
        self.within("redis.connect_timeout_ms", redis.connect_timeout_ms, 1..=60_000);
        self.within("redis.waiting_max", redis.waiting_max, 64..=1 << 20);
        self.within("redis.shards_max", redis.shards_max, 1..=1024);
        let share = redis.local_share;
        self.must((0.001..=1.0).contains(&share), "redis.local_share", "from 0.001 to 1", &share);
        self.within("redis.local_idle_ms", redis.local_idle_ms, 1_000..=DURATION_MS_MAX);
        let breaker = &redis.breaker;
        self.within("redis.breaker.window_ms", breaker.window_ms, 100..=600_000);
        self.within("redis.breaker.calls_min", breaker.calls_min, 1..=1_000_000);
        self.within("redis.breaker.failures_pct", breaker.failures_pct, 1..=100);
        self.within("redis.breaker.open_ms", breaker.open_ms, 10..=3_600_000);
        self.within("redis.breaker.probes", breaker.probes, 1..=PROBES_MAX);
    }

    fn postgres(&mut self, settings: &Settings) {
        let postgres = &settings.postgres;
        if let Some(url) = &postgres.url {
            if let Err(error) = policy_sync::postgres::Config::parse(url) {
                self.0.push(Violation { setting: "postgres.url", message: error.to_string() });
            }
            if settings.policy.is_some() {
                let message = "excludes postgres.url: the policy comes from a file or from the store; leave one out";
                self.0.push(Violation { setting: "policy", message: message.into() });
            }
        }
        self.within("postgres.poll_ms", postgres.poll_ms, 100..=DURATION_MS_MAX);
        self.within("postgres.deadline_ms", postgres.deadline_ms, 10..=600_000);
        self.within("postgres.connect_timeout_ms", postgres.connect_timeout_ms, 10..=60_000);
        let name = postgres.gateway.as_deref().unwrap_or("-");
        let holds = (1..=GATEWAY_NAME_BYTES_MAX).contains(&name.len()) && !name.contains(char::is_control);
        let rule = format!("1 to {GATEWAY_NAME_BYTES_MAX} bytes without control characters");
        self.must(holds, "postgres.gateway", &rule, &format!("{name:?}"));
    }

    fn shadow(&mut self, settings: &Settings) {
        let shadow = &settings.shadow;
        self.within("shadow.flush_ms", shadow.flush_ms, 100..=600_000);
        self.within("shadow.identities", shadow.identities, 8..=1_000_000);
        self.within("shadow.identities_kept", shadow.identities_kept, 1..=100_000);
    }

    /// Both faces on one port would look like another process that listens there.
    /// No two faces have the same address.
    fn addresses(&mut self, settings: &Settings) {
        let faces = [
            ("resp.listen", Some(settings.resp.listen)),
            ("http.listen", settings.http.listen.0),
            ("grpc.listen", settings.grpc.listen.0),
            ("ops.listen", Some(settings.ops.listen)),
        ];
        let overlaps = |one: SocketAddr, other: SocketAddr| {
            let is_host_shared = one.ip() == other.ip() || one.ip().is_unspecified() || other.ip().is_unspecified();
            is_host_shared && one.port() == other.port() && other.port() != 0
        };
        for (at, &(setting, address)) in faces.iter().enumerate() {
            let Some(address) = address else { continue };
            for &(earlier, other) in &faces[..at] {
                let Some(other) = other else { continue };
                let rule = format!("another address than {earlier} ({other})");
                self.must(!overlaps(other, address), setting, &rule, &address);
            }
        }
    }

    fn http(&mut self, http: &super::Http) {
        self.within("http.head_bytes_max", http.head_bytes_max, 8192..=1 << 20);
        self.within("http.body_bytes_max", http.body_bytes_max, 1024..=1 << 24);
        self.within("http.checks_max", http.checks_max, 1..=1024);
        self.within("http.streams_max", http.streams_max, 1..=65_536);
        self.within("http.request_timeout_ms", http.request_timeout_ms, 10..=DURATION_MS_MAX);
        self.within("http.idle_timeout_ms", http.idle_timeout_ms, 0..=DURATION_MS_MAX);
        self.within("http.ipv6_prefix_bits", http.ipv6_prefix_bits, 1..=128);
        let header = &http.client_address_header;
        let is_header = |name: &str| hyper::header::HeaderName::from_bytes(name.as_bytes()).is_ok();
        self.must(is_header(header), "http.client_address_header", "the name of a header", &format!("{header:?}"));
        let auth = &http.forward_auth;
        const OWN: [&str; 4] = ["method", "path", "host", "ip"];
        let mut seen = OWN.to_vec();
        for (attribute, source) in auth.headers.iter().chain(&auth.cookies).chain(&auth.query) {
            let setting = "http.forward_auth";
            let rule = "attributes with names of a-z, 0-9, _, - and .";
            self.must(is_attribute_name(attribute.as_bytes()), setting, rule, &format!("{attribute:?}"));
            let rule =
                "attributes that come from one place each, and not method, path, host or ip, which are always there";
            self.must(!seen.contains(&attribute.as_str()), setting, rule, &format!("{attribute:?} once more"));
            self.must(!source.is_empty(), setting, "names of headers, cookies or parameters", &format!("{source:?}"));
            seen.push(attribute);
        }
        for header in auth.headers.values() {
            self.must(is_header(header), "http.forward_auth.headers", "names of headers", &format!("{header:?}"));
        }
    }

    fn resp(&mut self, resp: &super::Resp) {
        self.must(resp.unix_mode <= 0o777, "resp.unix_mode", "from 0o000 to 0o777", &format!("{:#o}", resp.unix_mode));
        self.within("resp.args_max", resp.args_max, 8..=4096);
        self.within("resp.arg_bytes_max", resp.arg_bytes_max, 64..=1 << 24);
        let least = resp.arg_bytes_max.saturating_add(REQUEST_BYTES_BESIDE_WORD);
        let rule = format!("at least {least}, which is resp.arg_bytes_max + {REQUEST_BYTES_BESIDE_WORD}");
        self.must(resp.request_bytes_max >= least, "resp.request_bytes_max", &rule, &resp.request_bytes_max);
        self.must(
            resp.request_bytes_max <= 1 << 26,
            "resp.request_bytes_max",
            "at most 67108864",
            &resp.request_bytes_max,
        );
        self.within("resp.output_backlog_bytes", resp.output_backlog_bytes, 4096..=1 << 30);
    }

    fn transport(&mut self, transport: &super::Transport) {
        self.within("transport.busy_poll_us", transport.busy_poll_us, 0..=1_000_000);
        let (buffers, bytes, entries) = (transport.ring_buffers, transport.ring_buffer_bytes, transport.ring_entries);
        let holds = buffers.is_power_of_two() && (16..=32_768).contains(&buffers);
        self.must(holds, "transport.ring_buffers", "a power of two from 16 to 32768", &buffers);
        let holds = bytes.is_multiple_of(4096) && (4096..=1 << 20).contains(&bytes);
        self.must(holds, "transport.ring_buffer_bytes", "a multiple of 4096 from 4096 to 1048576", &bytes);
        let holds = entries.is_power_of_two() && (64..=32_768).contains(&entries);
        self.must(holds, "transport.ring_entries", "a power of two from 64 to 32768", &entries);
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_filter_names_levels() {
        for right in ["info", "WARN", "warn,sluice=debug", "off", "sluice::ops=trace"] {
            assert!(is_log_filter(right), "{right:?}");
        }
        for wrong in ["", "inof", "info,", "sluice=loud", "warn sluice"] {
            assert!(!is_log_filter(wrong), "{wrong:?}");
        }
    }

    #[test]
    fn every_bound_is_checked() {
        let mut settings = Settings::default();
        assert!(violations(&settings).is_empty());
        settings.cores = Cores::List(vec![]);
        settings.resp.request_bytes_max = settings.resp.arg_bytes_max;
        settings.resp.unix_mode = 0o1777;
        settings.limits.buckets = 0;
        settings.hot.heat_keys = HEAT_KEYS_MAX + 1;
        settings.hot.lease_auto_above = 0;
        settings.transport.ring_buffers = 100;
        settings.transport.ring_buffer_bytes = 5000;
        settings.log.level = "loud".into();
        settings.ops.listen = settings.resp.listen;
        let found: Vec<_> = violations(&settings).iter().map(|one| one.setting).collect();
        let expected = [
            "cores",
            "hot.heat_keys",
            "hot.lease_auto_above",
            "resp.unix_mode",
            "resp.request_bytes_max",
            "limits.buckets",
            "transport.ring_buffers",
            "transport.ring_buffer_bytes",
            "ops.listen",
            "log.level",
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn the_two_faces_have_addresses_of_their_own() {
        let refused = |resp: &str, ops: &str| {
            let mut settings = Settings::default();
            (settings.resp.listen, settings.ops.listen) = (resp.parse().unwrap(), ops.parse().unwrap());
            violations(&settings).iter().any(|one| one.setting == "ops.listen")
        };
        assert!(refused("127.0.0.1:7000", "127.0.0.1:7000"));
        assert!(refused("0.0.0.0:7000", "127.0.0.1:7000"));
        assert!(!refused("127.0.0.1:7000", "127.0.0.2:7000"));
        assert!(!refused("127.0.0.1:0", "127.0.0.1:0"));
    }
}
