//! The hot path without sockets: an engine, a connection, and requests as bytes.
//!
//! The benches measure exactly what a core does between receiving and sending: parse, match, hash, decide, encode.
#![allow(clippy::expect_used, reason = "a bench that cannot be set up must stop")]

use std::sync::Arc;

use arc_swap::ArcSwap;
use policy_sync::file;
use sluice::{
    buckets::BucketTable,
    clock::Now,
    engine::{ConnId, Engine, Facts, RespSettings, Shared},
    metrics::counters::CoreCounters,
    policy::{LoadedPolicy, LocalTerms, RuleSlots},
    resp::frame::RequestLimits,
};

/// An engine with one connection.
pub struct Rig {
    engine: Engine,
    output: Vec<u8>,
    now_ms: u64,
}

struct NoFacts;

impl Facts for NoFacts {
    fn info(&self) -> String {
        String::new()
    }
}

const CONN: ConnId = ConnId(0);

impl Rig {
    /// An engine for this policy, with room for `buckets` identities.
    pub fn new(policy: &str, buckets: usize) -> Self {
        const SEED: u64 = 0x5EED;
        let policy = file::parse(policy, "bench").expect("the bench's policy is valid");
        let rules = policy.rules.len();
        let (loaded, _) =
            LoadedPolicy::load(policy, SEED, LocalTerms::default(), &mut RuleSlots::new(rules)).expect("it compiles");
        let shared = Shared {
            policy: Arc::new(ArcSwap::from_pointee(loaded)),
            table: Arc::new(BucketTable::new(buckets)),
            seed: SEED,
            facts: Arc::new(NoFacts),
        };
        let settings = RespSettings {
            request: RequestLimits { args_max: 256, arg_bytes_max: 16 * 1024, request_bytes_max: 64 * 1024 },
            output_backlog_bytes: 1 << 20,
            password: None,
        };
        let mut engine = Engine::new(&shared, settings, CoreCounters::new(rules), (0, 1));
        engine.opened(CONN);
        Self { engine, output: Vec::with_capacity(1 << 20), now_ms: 1 }
    }

    /// One wake-up: these bytes in, the replies out.
    pub fn round(&mut self, requests: &[u8]) -> &[u8] {
        self.now_ms += 1;
        self.engine.tick(Now::of_ms(self.now_ms, 1_800_000_000_000));
        self.engine.bytes_in(CONN, requests);
        self.engine.settle();
        while self.engine.next_dirty().is_some() {}
        self.output.clear();
        self.engine.take_output(CONN, &mut self.output);
        &self.output
    }
}

/// One rule that applies to [`request`].
pub const ONE_RULE: &str = r#"
[[rule]]
name = "login-per-key"
match = { path = "/v1/login", method = "POST" }
per = ["key"]
limit = { capacity = 1000, refill = 1000, period = "1s" }
"#;

/// Three rules that apply to [`request`].
pub const THREE_RULES: &str = r#"
[[rule]]
name = "login-per-key"
match = { path = "/v1/login", method = "POST" }
per = ["key"]
limit = { capacity = 1000, refill = 1000, period = "1s" }
[[rule]]
name = "path-for-all"
match = { path = "/v1/login" }
per = []
limit = { capacity = 1000000, refill = 1000000, period = "1s" }
[[rule]]
name = "key-on-path"
match = { method = "POST" }
per = ["key", "path"]
limit = { capacity = 2000, refill = 2000, period = "1s" }
"#;

/// A policy of `count` rules, of which one applies to [`request`].
pub fn many_rules(count: usize) -> String {
    let rule = |at: usize| {
        let path = if at == count / 2 { "/v1/login".to_owned() } else { format!("/v1/service-{at}") };
        format!(
            "[[rule]]\nname = \"rule-{at}\"\nmatch = {{ path = \"{path}\", method = \"POST\" }}\nper = [\"key\"]\n\
             limit = {{ capacity = 1000, refill = 1000, period = \"1s\" }}\n"
        )
    };
    (0..count).map(rule).collect()
}

/// A CHECK of one identity.
pub fn request(identity: u64) -> Vec<u8> {
    let key = format!("ak_{identity:08}");
    let mut bytes = b"*7\r\n$5\r\nCHECK\r\n$4\r\npath\r\n$9\r\n/v1/login\r\n$6\r\nmethod\r\n$4\r\nPOST\r\n".to_vec();
    bytes.extend_from_slice(format!("$3\r\nkey\r\n${}\r\n{key}\r\n", key.len()).as_bytes());
    bytes
}

/// A pipeline of CHECKs, each of another identity.
pub fn pipeline(depth: u64) -> Vec<u8> {
    (0..depth).flat_map(request).collect()
}
