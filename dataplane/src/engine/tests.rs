//! The engine from bytes to bytes: however requests come, the answers are those of one request at a time.

use std::sync::Arc;

use arc_swap::ArcSwap;
use policy_sync::file;
use proptest::prelude::*;

use super::*;
use crate::{
    heat::Owner,
    metrics::counters::CoreCounters,
    policy::{LocalTerms, RuleSlots},
};

struct NoFacts;

impl Facts for NoFacts {
    fn is_serving(&self) -> bool {
        true
    }

    fn info(&self) -> String {
        "facts".into()
    }

    fn ports(&self) -> String {
        String::new()
    }
}

const POLICY: &str = r#"
[[rule]]
name = "login"
match = { path = "/v1/login", method = "POST" }
per = ["key"]
limit = { capacity = 3, refill = 1, period = "1h" }
[[rule]]
name = "everything"
match = { path = "/v1/*" }
per = []
limit = { capacity = 1000, refill = 1, period = "1h" }
[[rule]]
name = "tenants"
per = ["tenant", "key"]
limit = { capacity = 5, refill = 1, period = "1h" }
[[rule]]
name = "special"
match = { zone = "eu" }
per = ["key"]
limit = { capacity = 2, refill = 1, period = "1h" }
mode = "shadow"
[[override]]
rule = "tenants"
identity = ["big", "a"]
limit = { capacity = 50, refill = 1, period = "1h" }
"#;

const CONN: ConnId = ConnId(0);

fn engine(policy: &str) -> (Engine, PolicyInForce) {
    let policy = file::parse(policy, "test").unwrap();
    let (loaded, _) = LoadedPolicy::load(policy, 1, LocalTerms::default(), &mut RuleSlots::new(100)).unwrap();
    let in_force: PolicyInForce = Arc::new(ArcSwap::from_pointee(loaded));
    let shared = Shared {
        policy: Arc::clone(&in_force),
        table: Arc::new(BucketTable::new(10_000)),
        seed: 1,
        facts: Arc::new(NoFacts),
    };
    let settings = RespSettings {
        request: RequestLimits { args_max: 64, arg_bytes_max: 1024, request_bytes_max: 4096 },
        output_backlog_bytes: 1 << 20,
        password: None,
    };
    let mut engine = Engine::new(&shared, settings, CoreCounters::new(100), (0, 1));
    engine.opened(CONN);
    engine.tick(Now::of_ms(1, 1));
    (engine, in_force)
}

fn replies(engine: &mut Engine) -> Vec<u8> {
    engine.settle();
    while engine.next_dirty().is_some() {}
    let mut out = Vec::new();
    engine.take_output(CONN, &mut out);
    out
}

fn request(words: &[&str]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        bytes.extend_from_slice(format!("${}\r\n{word}\r\n", word.len()).as_bytes());
    }
    bytes
}

/// Requests that share beginnings, in every order of attributes, with costs, mistakes and other commands between.
fn requests() -> impl Strategy<Value = Vec<Vec<u8>>> {
    let attribute = || {
        prop_oneof![
            prop::sample::select(vec!["a", "b", "c"]).prop_map(|value| ["key", value]),
            prop::sample::select(vec!["/v1/login", "/v1/other", "/x"]).prop_map(|value| ["path", value]),
            prop::sample::select(vec!["POST", "GET"]).prop_map(|value| ["method", value]),
            prop::sample::select(vec!["big", "small"]).prop_map(|value| ["tenant", value]),
            prop::sample::select(vec!["eu", "us"]).prop_map(|value| ["zone", value]),
            prop::sample::select(vec!["1", "2"]).prop_map(|value| ["unknown-attribute", value]),
        ]
    };
    let check =
        (prop::option::weighted(0.3, 0u32..4), prop::collection::vec(attribute(), 1..5)).prop_map(|(cost, pairs)| {
            let cost = cost.map(|cost| cost.to_string());
            let mut words = vec!["CHECK"];
            if let Some(cost) = &cost {
                words.extend(["COST", cost]);
            }
            words.extend(pairs.iter().flatten());
            request(&words)
        });
    let other = prop::sample::select(vec![
        request(&["PING"]),
        request(&["CHECK", "key"]),
        request(&["CHECK", "COST", "2"]),
        request(&["CHECK", "COST", "3"]),
        request(&["check", "key", "a"]),
        request(&["CL.THROTTLE", "k", "2", "1", "3600"]),
        request(&["THROTTLE", "k", "2", "1", "3600"]),
        b"PING\r\n".to_vec(),
    ]);
    prop::collection::vec(prop_oneof![8 => check, 1 => other], 1..80)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    /// Cut anywhere, in batches or one by one, remembered or not: the replies are the same, byte by byte.
    #[test]
    fn replies_do_not_depend_on_how_requests_come(requests in requests(), cuts in prop::collection::vec(1usize..300, 1..50)) {
        // One at a time, and every check the long way: nothing is remembered by an engine that has just begun.
        let (mut slow, _) = engine(POLICY);
        let mut expected = Vec::new();
        for request in &requests {
            slow.recall = Recall::new();
            slow.bytes_in(CONN, request);
            expected.extend(replies(&mut slow));
        }
        let (mut fast, _) = engine(POLICY);
        let mut got = Vec::new();
        let bytes = requests.concat();
        let mut rest = &bytes[..];
        for cut in cuts.iter().cycle() {
            let (now, later) = rest.split_at((*cut).min(rest.len()));
            fast.bytes_in(CONN, now);
            got.extend(replies(&mut fast));
            rest = later;
            if rest.is_empty() {
                break;
            }
        }
        prop_assert_eq!(String::from_utf8(got), String::from_utf8(expected));
    }

    /// Whatever comes, the engine neither panics nor goes on after it has refused.
    #[test]
    fn any_bytes_are_survived(chunks in prop::collection::vec(prop::collection::vec(prop_oneof![Just(b'*'), Just(b'$'), Just(b'\r'), Just(b'\n'), Just(b'1'), Just(b'-'), any::<u8>()], 0..60), 0..20)) {
        let (mut engine, _) = engine(POLICY);
        for chunk in chunks {
            engine.bytes_in(CONN, &chunk);
            let out = replies(&mut engine);
            if engine.flow(CONN) == Flow::Closing {
                prop_assert!(out.windows(5).any(|window| window == b"-ERR ") || out.ends_with(b"+OK\r\n"));
                engine.bytes_in(CONN, &request(&["PING"]));
                prop_assert!(replies(&mut engine).is_empty());
                return Ok(());
            }
        }
    }
}

#[test]
fn a_new_policy_forgets_what_was_remembered() {
    let (mut engine, in_force) = engine(POLICY);
    let ask = request(&["CHECK", "path", "/v1/login", "method", "POST", "key", "a"]);
    for _ in 0..20 {
        engine.bytes_in(CONN, &ask);
    }
    assert!(String::from_utf8(replies(&mut engine)).unwrap().contains("login"));
    let (changed, _) = LoadedPolicy::load(
        file::parse(&POLICY.replace("\"login\"", "\"renamed\""), "test").unwrap(),
        1,
        LocalTerms::default(),
        &mut RuleSlots::new(100),
    )
    .unwrap();
    in_force.store(Arc::new(changed));
    engine.tick(Now::of_ms(2, 2));
    engine.bytes_in(CONN, &ask);
    assert!(String::from_utf8(replies(&mut engine)).unwrap().contains("renamed"));
}

#[test]
fn an_expired_override_ends_for_requests_that_begin_alike() {
    let policy = r#"
[[rule]]
name = "zone"
match = { key = "*" }
per = ["zone"]
limit = { capacity = 1, refill = 1, period = "1h" }
[[override]]
rule = "zone"
identity = ["eu"]
exempt = true
expires = "1970-01-01T00:00:01Z"
"#;
    let (mut engine, _) = engine(policy);
    let ask = |key| request(&["CHECK", "zone", "eu", "another-attribute", "to-be-long", "key", key]);
    engine.bytes_in(CONN, &[ask("a"), ask("b"), ask("c")].concat());
    assert!(replies(&mut engine).starts_with(b"*6\r\n:1\r\n:-1"));
    engine.tick(Now::of_ms(2_000, 2_000));
    engine.bytes_in(CONN, &ask("d"));
    assert!(replies(&mut engine).starts_with(b"*6\r\n:1\r\n:1\r\n:0\r\n"), "the override has expired");
}

/// A request may begin before the last one was decided; only the unfinished one counts against the bound.
#[test]
fn pipelined_requests_just_below_the_limit_are_served() {
    let (mut engine, _) = engine(POLICY);
    let word = "v".repeat(engine.settings.request.arg_bytes_max);
    let one = request(&["CHECK", "a", &word, "b", &word, "c", &word, "path", "/x"]);
    assert!(one.len() <= engine.settings.request.request_bytes_max, "a request may be this long");
    let all = one.repeat(3);
    // As a socket gives them: in pieces of which one holds the end of a request and most of the next.
    for piece in all.chunks(one.len() * 3 / 4) {
        engine.bytes_in(CONN, piece);
    }
    let text = String::from_utf8(replies(&mut engine)).unwrap();
    assert_eq!(text.matches("*6\r\n:1").count(), 3, "{text}");
}

#[test]
fn a_check_without_attributes_is_refused() {
    let (mut engine, _) = engine(POLICY);
    for words in [&["CHECK"][..], &["CHECK", "COST", "2"], &["check"]] {
        engine.bytes_in(CONN, &request(words));
        let text = String::from_utf8(replies(&mut engine)).unwrap();
        assert!(text.starts_with("-ERR CHECK needs at least one attribute"), "{text}");
    }
}

/// Remembered or not, alone or one of several, shadow or not: every bucket of a sampled check is counted, and has its name.
#[test]
fn heat_names_every_bucket_however_requests_come() {
    use crate::{
        heat::{DecidedBy, board::Board},
        hot::HotSettings,
    };

    let settings = HotSettings::default();
    let board = Arc::new(Board::new(1, settings.heat_keys));
    // Without overrides, so that requests are remembered.
    let (engine, in_force) = engine(POLICY.split("[[override]]").next().unwrap());
    let mut engine = engine.with_heat(Heat::new(&settings, &board, 0, 1));
    let alone = request(&["CHECK", "tenant", "small", "key", "b"]);
    let several = request(&["CHECK", "zone", "eu", "path", "/v1/login", "method", "POST", "key", "a\x1b"]);
    let typed = request(&["check", "tenant", "typed", "key", "c"]);
    let throttle = request(&["CL.THROTTLE", "user 1", "2", "1", "3600"]);
    let unruled = request(&["CHECK", "color", "red"]);
    let rounds = 2_000;
    for at in 0..rounds {
        engine.tick(Now::of_ms(1 + at, 1));
        engine.bytes_in(CONN, &[&alone[..], &several, &typed, &throttle, &unruled].concat());
        assert_eq!(String::from_utf8(replies(&mut engine)).unwrap().matches("*6\r\n").count(), 4);
    }
    engine.tick(Now::of_ms(rounds + 1_000, 1));
    let cards = &in_force.load().cards;
    let rule = |index: usize| Owner::Rule(cards[index].slot);
    let expected = [
        (rule(0), "key=a%1B", DecidedBy::Memory),
        (rule(1), "*", DecidedBy::Memory),
        (rule(2), "key=b&tenant=small", DecidedBy::Memory),
        (rule(2), "key=c&tenant=typed", DecidedBy::Memory),
        (rule(3), "key=a%1B", DecidedBy::Shadow),
        (Owner::Throttle("cl.throttle"), "user%201", DecidedBy::Memory),
    ];
    let found = board.hottest(rounds + 1_000, 100);
    assert_eq!(found.len(), expected.len(), "{found:?}");
    for (owner, name, by) in expected {
        let key = found.iter().find(|key| key.owner == owner && key.name == name);
        let key = key.unwrap_or_else(|| panic!("{name} in {found:?}"));
        assert_eq!(key.shares().collect::<Vec<_>>(), [(by, 1.0)]);
        // 1,000 a second for two seconds, and nothing for one.
        assert!((150.0..1_000.0).contains(&key.per_second), "{name}: {}", key.per_second);
    }
}
