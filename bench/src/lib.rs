//! The hot path without sockets: an engine, a connection, and requests as bytes.
//!
//! The benches measure exactly what a core does between receiving and sending: parse, match, hash, decide, encode.
#![allow(clippy::expect_used, reason = "a bench that cannot be set up must stop")]

use std::{io::Write, sync::Arc};

use arc_swap::ArcSwap;
use policy_sync::file;
use resp_client::{Action, LinkId};
use sluice::{
    buckets::BucketTable,
    clock::Now,
    config::Redis,
    engine::{ConnId, Engine, Facts, RespSettings, Shared},
    hot::HotSettings,
    metrics::counters::CoreCounters,
    policy::{LoadedPolicy, LocalTerms, RuleSlots},
    resp::frame::RequestLimits,
    store::{setup::StorePlan, wire},
};

/// An engine with one connection.
pub struct Rig {
    engine: Engine,
    output: Vec<u8>,
    now_ms: u64,
    /// The connection to the store, if the counts are there.
    link: Option<LinkId>,
    calls: Vec<u8>,
    replies: Vec<u8>,
}

struct NoFacts;

impl Facts for NoFacts {
    fn is_serving(&self) -> bool {
        true
    }

    fn info(&self) -> String {
        String::new()
    }

    fn ports(&self) -> String {
        String::new()
    }
}

const SEED: u64 = 0x5EED;
const CONN: ConnId = ConnId(0);

impl Rig {
    /// An engine for this policy, with room for `buckets` identities.
    pub fn new(policy: &str, buckets: usize) -> Self {
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
        Self {
            engine,
            output: Vec::with_capacity(1 << 20),
            now_ms: 1,
            link: None,
            calls: Vec::with_capacity(1 << 20),
            replies: Vec::with_capacity(1 << 20),
        }
    }

    /// The same with the counts in one Redis, whose part the rig plays.
    pub fn with_redis(policy: &str) -> Self {
        let mut rig = Self::new(policy, 1 << 10);
        let settings = Redis { urls: vec!["redis://127.0.0.1:6379".into()], ..Redis::default() };
        let plan = StorePlan::new(&settings, &HotSettings::default(), 1, SEED)
            .expect("the settings are valid")
            .expect("there is a URL");
        let redis = wire::Redis::new(plan.client, &plan.shards, 0, SEED, (plan.asker.deadline_us, 1_000))
            .expect("no certificates are needed");
        rig.engine = rig.engine.with_store(plan.asker, &plan.shards, redis);
        rig.tick();
        rig.engine.flush_store();
        let Some(Action::Connect { link, .. }) = rig.engine.next_link_action() else { panic!("it wants to connect") };
        rig.engine.link_connected(link);
        rig.take_calls(link);
        rig.engine.link_bytes_in(link, b"%1\r\n+proto\r\n:3\r\n");
        rig.link = Some(link);
        rig
    }

    /// One wake-up that asks, and one that brings the store's replies to it, which are given.
    pub fn remote_round(&mut self, requests: &[u8], replies: &[u8]) -> &[u8] {
        self.ask(requests);
        self.hear(replies)
    }

    /// The same where the rig makes the replies: every bucket holds what is asked of it.
    pub fn remote_round_trip(&mut self, requests: &[u8]) -> &[u8] {
        self.ask(requests);
        let mut replies = std::mem::take(&mut self.replies);
        replies.clear();
        grant_all(&self.calls, &mut replies);
        self.hear(&replies);
        self.replies = replies;
        &self.output
    }

    fn ask(&mut self, requests: &[u8]) {
        self.tick();
        self.engine.bytes_in(CONN, requests);
        self.settle();
        if let Some(link) = self.link {
            self.take_calls(link);
        }
    }

    fn hear(&mut self, replies: &[u8]) -> &[u8] {
        self.tick();
        if let Some(link) = self.link {
            self.engine.link_bytes_in(link, replies);
        }
        self.settle();
        self.output.clear();
        self.engine.take_output(CONN, &mut self.output);
        &self.output
    }

    fn settle(&mut self) {
        loop {
            self.engine.settle();
            while self.engine.next_dirty().is_some() {}
            if !self.engine.flush_store() {
                return;
            }
        }
    }

    fn take_calls(&mut self, link: LinkId) {
        self.calls.clear();
        while self.engine.next_link_output().is_some() {}
        self.engine.take_link_output(link, &mut self.calls);
    }

    fn tick(&mut self) {
        self.now_ms += 1;
        self.engine.tick(Now::of_ms(self.now_ms, 1_800_000_000_000));
    }

    /// One wake-up: these bytes in, the replies out.
    pub fn round(&mut self, requests: &[u8]) -> &[u8] {
        self.tick();
        self.engine.bytes_in(CONN, requests);
        self.engine.settle();
        while self.engine.next_dirty().is_some() {}
        self.output.clear();
        self.engine.take_output(CONN, &mut self.output);
        &self.output
    }
}

/// The replies of a store in which every bucket holds what is asked of it.
fn grant_all(calls: &[u8], replies: &mut Vec<u8>) {
    // Of each call: `EVALSHA sha n key… mode (capacity refill period cost)…`.
    for call in memchr::memmem::find_iter(calls, b"EVALSHA") {
        let mut words = calls[call..].split(|&byte| byte == b'\n').skip(4).step_by(2);
        let mut word = || words.next().map(|line| &line[..line.len() - 1]).expect("the call is whole");
        let keys = word().iter().fold(0, |number, digit| 10 * number + usize::from(digit - b'0'));
        for _ in 0..=keys {
            word();
        }
        write!(replies, "*{}\r\n", 4 * keys).expect("memory takes it");
        for _ in 0..keys {
            let cost = [word(), word(), word(), word()][3];
            write!(replies, ":{}\r\n:900\r\n:0\r\n:100\r\n", cost.escape_ascii()).expect("memory takes it");
        }
    }
}

/// A policy of `count` rules of one identity, which all apply to each [`request`].
pub fn all_apply(count: usize) -> String {
    let rule = |at: usize| {
        format!(
            "[[rule]]\nname = \"rule-{at}\"\nper = [\"key\"]\n\
             limit = {{ capacity = {}, refill = 1000, period = \"1s\" }}\n",
            1000 + at
        )
    };
    (0..count).map(rule).collect()
}

/// A policy that mentions so many attributes, and a check that has them all, with a command of this spelling.
pub fn many_attributes(count: usize, command: &str) -> (String, Vec<u8>) {
    let names: Vec<_> = (0..count).map(|at| format!("name{at:02}")).collect();
    let rule = |(at, names): (usize, &[String])| {
        let matching: Vec<_> = names.iter().map(|name| format!("{name} = \"*\"")).collect();
        format!(
            "[[rule]]\nname = \"rule-{at}\"\nmatch = {{ {} }}\nper = [\"name00\"]\n\
             limit = {{ capacity = {}, refill = 1000, period = \"1s\" }}\n",
            matching.join(", "),
            1000 + at
        )
    };
    // A rule may mention sixteen.
    let policy = names.chunks(15).enumerate().map(rule).collect();
    let mut request = format!("*{}\r\n$5\r\n{command}\r\n", 1 + 2 * count);
    names.iter().for_each(|name| request += &format!("$6\r\n{name}\r\n$1\r\nx\r\n"));
    (policy, request.into_bytes())
}

/// What the store says of one bucket that had a token to give.
pub const GRANTED: &str = ":1\r\n:999\r\n:0\r\n:1\r\n";

/// What it says of one bucket of [`LEASED_RULE`] that gave a token and a batch.
pub const LEASED: &str = ":10001\r\n:989999\r\n:0\r\n:10\r\n";

/// One rule that applies to [`request`], whose tokens are taken in advance.
pub const LEASED_RULE: &str = r#"
[[rule]]
name = "login-per-key"
match = { path = "/v1/login", method = "POST" }
per = ["key"]
limit = { capacity = 1000000, refill = 1000000, period = "1s" }
hot = { lease = 10000 }
"#;

/// What it says of one bucket of [`SLOW_RULE`] that is empty.
pub const DENIED: &str = ":0\r\n:0\r\n:6000\r\n:60000\r\n";

/// One rule that applies to [`request`], and a token that takes its time.
pub const SLOW_RULE: &str = r#"
[[rule]]
name = "login-per-key"
match = { path = "/v1/login", method = "POST" }
per = ["key"]
limit = { capacity = 10, refill = 10, period = "1m" }
"#;

/// Three rules of one identity, which one call covers, that apply to [`request`].
pub const THREE_OF_ONE: &str = r#"
[[rule]]
name = "per-second"
match = { path = "/v1/login", method = "POST" }
per = ["key"]
limit = { capacity = 1000, refill = 1000, period = "1s" }
[[rule]]
name = "per-minute"
match = { path = "/v1/login" }
per = ["key"]
limit = { capacity = 10000, refill = 10000, period = "1m" }
[[rule]]
name = "per-hour"
match = { method = "POST" }
per = ["key"]
limit = { capacity = 100000, refill = 100000, period = "1h" }
"#;

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
