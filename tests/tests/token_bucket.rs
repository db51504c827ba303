//! `lua/token_bucket.lua` in a real Redis, beside an exact model of a token bucket.
//!
//! Most tests set the clock: the script's text runs inside a wrapper in which the one thing that differs is where the
//! time comes from. The clock starts in the year 2100, so that Redis, which expires keys by the real time, never does;
//! the wrapper does it by the clock of the test. What depends on the real time is tested on the text as it is.
#![allow(missing_docs)]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on must stop, with the reason")]

use std::collections::HashMap;

use redis::{Connection, RedisResult, cmd};
use sluice_e2e::{redis_server::Redis, until};

const SCRIPT: &str = include_str!("../../lua/token_bucket.lua");
/// The year 2100, in milliseconds.
const START_MS: u64 = 4_102_444_800_000;
const INTEGER_MAX: u64 = (1 << 31) - 1;
const MONTH_MS: u64 = 31 * 24 * 3_600_000;
const WAIT_MS_MAX: u128 = 1 << 52;
const KEY: &str = "rl:{a}:login";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Limit {
    capacity: u64,
    refill: u64,
    period_ms: u64,
}

const fn limit(capacity: u64, refill: u64, period_ms: u64) -> Limit {
    Limit { capacity, refill, period_ms }
}

const TEN_A_MINUTE: Limit = limit(10, 10, 60_000);

/// What the script says about one bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Answer {
    granted: i64,
    remaining: i64,
    retry_ms: i64,
    reset_ms: i64,
}

const fn answer(granted: i64, remaining: i64, retry_ms: i64, reset_ms: i64) -> Answer {
    Answer { granted, remaining, retry_ms, reset_ms }
}

fn answers(numbers: &[i64]) -> Vec<Answer> {
    numbers.chunks(4).map(|four| answer(four[0], four[1], four[2], four[3])).collect()
}

/// One bucket's part of a call.
type Part<'a> = (&'a str, Limit, u64);

fn arguments(mode: &str, parts: &[Part<'_>]) -> Vec<String> {
    let numbers = parts.iter().flat_map(|(_, limit, cost)| [limit.capacity, limit.refill, limit.period_ms, *cost]);
    std::iter::once(mode.to_owned()).chain(numbers.map(|number| number.to_string())).collect()
}

/// A Redis, and how the script is called in it.
struct Store {
    _redis: Redis,
    connection: Connection,
    call: Vec<String>,
    /// The time of the test's clock; without one, Redis's own counts.
    now_ms: Option<u64>,
}

impl Store {
    /// With the script as it is.
    fn real() -> Self {
        let mut store = Self::connect();
        let sha: String = store.run(&["SCRIPT", "LOAD", SCRIPT]).unwrap();
        store.call = vec!["EVALSHA".into(), sha];
        store
    }

    /// With the script as a function.
    fn function() -> Self {
        let mut store = Self::connect();
        let library = format!(
            "#!lua name=sluice\nredis.register_function('token_bucket', function(KEYS, ARGV)\n{SCRIPT}\nend)\n"
        );
        let name: String = store.run(&["FUNCTION", "LOAD", &library]).unwrap();
        assert_eq!(name, "sluice");
        store.call = vec!["FCALL".into(), "token_bucket".into()];
        store
    }

    /// With the test's clock. The reply has one more number for each key: when it expires (-2: there is none).
    fn with_clock() -> Self {
        let mut store = Self::connect();
        let wrapper = format!(
            "local clock = {{ARGV[1], ARGV[2]}}
             local now_ms = ARGV[1] * 1000 + math.floor(ARGV[2] / 1000)
             for _, key in ipairs(KEYS) do
                 local expires_ms = redis.call('PEXPIRETIME', key)
                 if expires_ms >= 0 and expires_ms < now_ms then redis.call('DEL', key) end
             end
             local reply = {}(KEYS, {{unpack(ARGV, 3)}})
             for _, key in ipairs(KEYS) do
                 if not reply.err then table.insert(reply, redis.call('PEXPIRETIME', key)) end
             end
             return reply",
            clocked()
        );
        let sha: String = store.run(&["SCRIPT", "LOAD", &wrapper]).unwrap();
        store.call = vec!["EVALSHA".into(), sha];
        store.now_ms = Some(START_MS);
        store
    }

    fn connect() -> Self {
        let redis = Redis::start(&[]);
        let connection = redis::Client::open(format!("redis://{}", redis.address())).unwrap().get_connection().unwrap();
        Self { _redis: redis, connection, call: Vec::new(), now_ms: None }
    }

    fn run<T: redis::FromRedisValue>(&mut self, words: &[&str]) -> RedisResult<T> {
        cmd(words[0]).arg(&words[1..]).query(&mut self.connection)
    }

    /// Calls the script with any arguments.
    fn call_raw(&mut self, keys: &[&str], arguments: &[String]) -> RedisResult<Vec<i64>> {
        let mut command = cmd(&self.call[0]);
        command.arg(&self.call[1]).arg(keys.len()).arg(keys);
        if let Some(now_ms) = self.now_ms {
            // Some microseconds, which must not count.
            command.arg(now_ms / 1000).arg(now_ms % 1000 * 1000 + now_ms % 1000);
        }
        command.arg(arguments).query(&mut self.connection)
    }

    fn try_ask(&mut self, mode: &str, parts: &[Part<'_>]) -> RedisResult<Vec<Answer>> {
        let keys: Vec<_> = parts.iter().map(|part| part.0).collect();
        let numbers = self.call_raw(&keys, &arguments(mode, parts))?;
        Ok(answers(&numbers[..4 * parts.len()]))
    }

    fn ask(&mut self, mode: &str, parts: &[Part<'_>]) -> Vec<Answer> {
        self.try_ask(mode, parts).unwrap()
    }

    /// One bucket under `KEY`.
    fn one(&mut self, mode: &str, limit: Limit, cost: u64) -> Answer {
        self.ask(mode, &[(KEY, limit, cost)])[0]
    }

    fn advance(&mut self, ms: u64) {
        self.now_ms = self.now_ms.map(|now_ms| now_ms + ms);
    }

    fn set_back(&mut self, ms: u64) {
        self.now_ms = self.now_ms.map(|now_ms| now_ms - ms);
    }

    /// All that Redis holds: each key with its value and when it expires.
    fn contents(&mut self) -> Vec<(String, Vec<u8>, i64)> {
        let mut keys: Vec<String> = self.run(&["KEYS", "*"]).unwrap();
        keys.sort();
        let each = keys.into_iter().map(|key| {
            let value = self.run(&["DUMP", &key]).unwrap();
            let expires_ms = self.run(&["PEXPIRETIME", &key]).unwrap();
            (key, value, expires_ms)
        });
        each.collect()
    }
}

/// The script as a function expression whose time is in the local variable `clock`.
fn clocked() -> String {
    let time = "redis.call('TIME')";
    assert_eq!(SCRIPT.matches("TIME'").count(), 2, "the short way and the long way ask for the time once each");
    assert_eq!(SCRIPT.matches(time).count(), 2);
    format!("(function(KEYS, ARGV)\n{}\nend)", SCRIPT.replace(time, "clock"))
}

/// A bucket as it should be: its level in units of 1/period of a token, in integers that hold anything.
#[derive(Clone, Copy, Debug)]
struct ModelBucket {
    limit: Limit,
    units: u128,
    at_ms: u64,
    expires_ms: u64,
}

#[derive(Default)]
struct Model {
    buckets: HashMap<String, ModelBucket>,
}

fn full(limit: Limit) -> u128 {
    u128::from(limit.capacity) * u128::from(limit.period_ms)
}

impl Model {
    /// What a bucket holds now in units of the limit's period, and whether it must be written anyway.
    fn level(&mut self, now_ms: u64, key: &str, limit: Limit) -> (u128, bool) {
        if self.buckets.get(key).is_some_and(|bucket| bucket.expires_ms < now_ms) {
            self.buckets.remove(key);
        }
        let Some(bucket) = self.buckets.get(key) else { return (full(limit), false) };
        let elapsed_ms = u128::from(now_ms.saturating_sub(bucket.at_ms));
        let units = (bucket.units + elapsed_ms * u128::from(bucket.limit.refill)).min(full(bucket.limit));
        // Whole tokens stay, the fraction is rounded down.
        let (old, new) = (u128::from(bucket.limit.period_ms), u128::from(limit.period_ms));
        let units = units / old * new + units % old * new / old;
        (units.min(full(limit)), bucket.limit != limit || now_ms < bucket.at_ms)
    }

    fn ask(&mut self, now_ms: u64, mode: &str, parts: &[Part<'_>]) -> Vec<Answer> {
        let levels: Vec<_> = parts.iter().map(|(key, limit, _)| self.level(now_ms, key, *limit)).collect();
        let holds: Vec<u128> =
            levels.iter().zip(parts).map(|(level, part)| level.0 / u128::from(part.1.period_ms)).collect();
        let all_give = holds.iter().zip(parts).all(|(tokens, part)| *tokens >= u128::from(part.2));
        let least = *holds.iter().min().unwrap();
        let each = parts.iter().zip(levels).zip(holds).map(|(((key, limit, cost), (units, must_write)), tokens)| {
            let (cost, token, refill) = (u128::from(*cost), u128::from(limit.period_ms), u128::from(limit.refill));
            let (granted, left) = if mode == "back" {
                let granted = cost.min(u128::from(limit.capacity) - tokens);
                (granted, (units + granted * token).min(full(*limit)))
            } else {
                let granted = match mode {
                    "exact" if all_give => cost,
                    "each" if tokens >= cost => cost,
                    "upto" => cost.min(least),
                    _ => 0,
                };
                (granted, units - granted * token)
            };
            let wait_ms = |wanted: u128| wanted.saturating_sub(left).div_ceil(refill).min(WAIT_MS_MAX);
            let retry_ms = match () {
                () if mode == "back" || tokens >= cost => 0,
                () if cost > u128::from(limit.capacity) => -1,
                () => i64::try_from(wait_ms(cost * token)).unwrap(),
            };
            let reset_ms = wait_ms(full(*limit));
            if granted > 0 || must_write {
                let expires_ms = now_ms + u64::try_from(reset_ms).unwrap();
                let bucket = ModelBucket { limit: *limit, units: left, at_ms: now_ms, expires_ms };
                self.buckets.insert((*key).to_owned(), bucket);
                if reset_ms == 0 {
                    self.buckets.remove(*key);
                }
            }
            let whole = |number: u128| i64::try_from(number).unwrap();
            answer(whole(granted), whole(left / token), retry_ms, whole(reset_ms))
        });
        each.collect()
    }

    fn expires_ms(&self, key: &str) -> i64 {
        self.buckets.get(key).map_or(-2, |bucket| i64::try_from(bucket.expires_ms).unwrap())
    }
}

/// Numbers that look random and are the same in every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Below `bound`.
    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    fn one_of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[usize::try_from(self.below(choices.len() as u64)).unwrap()]
    }

    /// From 1 to `max`, every order of magnitude as likely as the next, and the ends more often.
    fn magnitude(&mut self, max: u64) -> u64 {
        match self.below(8) {
            0 => 1,
            1 => max - self.below(3).min(max - 1),
            _ => {
                let bits = self.below(u64::from(max.ilog2()) + 1);
                ((1 << bits) + self.below(1 << bits)).min(max)
            }
        }
    }

    fn limit(&mut self) -> Limit {
        limit(self.magnitude(INTEGER_MAX), self.magnitude(INTEGER_MAX), self.magnitude(MONTH_MS))
    }

    /// A limit under which a few tokens and milliseconds matter.
    fn small_limit(&mut self) -> Limit {
        limit(1 + self.below(12), 1 + self.below(12), 1 + self.below(50))
    }
}

#[test]
fn the_script_does_what_the_exact_model_does() {
    let mut store = Store::with_clock();
    for seed in 0..400 {
        let mut random = Random(seed);
        let mut model = Model::default();
        let small = seed % 2 == 0;
        store.run::<()>(&["FLUSHALL"]).unwrap();
        store.now_ms = Some(START_MS);
        let names = ["rl:{a}:one", "rl:{a}:two", "rl:{a}:three"];
        let mut limits = [(); 3].map(|()| if small { random.small_limit() } else { random.limit() });
        for step in 0..50 {
            let count = if random.below(2) == 0 { 1 } else { 1 + usize::try_from(random.below(3)).unwrap() };
            let first = usize::try_from(random.below(3)).unwrap();
            let mode = random.one_of(&["exact", "exact", "each", "upto", "back"]);
            if random.below(10) == 0 {
                limits[first] = match random.below(3) {
                    0 => Limit { capacity: random.magnitude(INTEGER_MAX), ..limits[first] },
                    1 => random.limit(),
                    _ => random.small_limit(),
                };
            }
            let mut parts: Vec<Part<'_>> = Vec::new();
            for index in 0..count {
                let at = (first + index) % 3;
                let most = limits[at].capacity + limits[at].capacity / 8 + 1;
                let cost = if small { random.below(most) } else { random.magnitude(most) - random.below(2) };
                let cost = if mode == "upto" && index > 0 { parts[0].2 } else { cost };
                parts.push((names[at], limits[at], cost));
            }
            let keys: Vec<_> = parts.iter().map(|part| part.0).collect();
            let told = store.call_raw(&keys, &arguments(mode, &parts)).unwrap();
            let (told, expires_ms) = told.split_at(4 * count);
            let now_ms = store.now_ms.unwrap();
            let expected = model.ask(now_ms, mode, &parts);
            assert_eq!(answers(told), expected, "seed {seed}, step {step}, at {now_ms}: {mode} {parts:?}");
            let expected: Vec<_> = keys.iter().map(|key| model.expires_ms(key)).collect();
            assert_eq!(expires_ms, expected, "expiry; seed {seed}, step {step}, at {now_ms}: {mode} {parts:?}");
            match random.below(12) {
                0 => store.set_back(random.below(if small { 40 } else { MONTH_MS })),
                1 | 2 => {}
                3..8 => store.advance(random.below(30)),
                8..10 => store.advance(random.magnitude(MONTH_MS)),
                // To a moment at which something is due, or just before it.
                _ => store.advance(
                    u64::try_from(told[3]).unwrap().min(MONTH_MS) - random.below(2).min(told[3].unsigned_abs()),
                ),
            }
        }
    }
}

#[test]
fn a_million_takes_at_odd_moments_do_not_drift() {
    let mut store = Store::with_clock();
    // 7 tokens in 61 ms come out even in no binary fraction. About as much is asked for as comes in.
    let limit = limit(50, 7, 61);
    let script = format!(
        "local take, granted, random = nil, 0, 1
         local clock = {{}}
         take = {}
         local now_ms, last = tonumber(ARGV[1]), nil
         local arguments = {{'upto', '50', '7', '61', '0'}}
         for step = 1, tonumber(ARGV[2]) do
             random = random * 16807 % 2147483647
             now_ms = now_ms + random % 19
             clock[1], clock[2] = math.floor(now_ms / 1000), now_ms % 1000 * 1000
             arguments[5] = tostring(random % 3)
             last = take(KEYS, arguments)
             granted = granted + last[1]
         end
         return {{granted, last[2], last[4], now_ms - ARGV[1]}}",
        clocked()
    );
    const TAKES: u64 = 1_000_000;
    let told: Vec<u128> =
        cmd("EVAL").arg(script).arg(1).arg(KEY).arg(START_MS).arg(TAKES).query(&mut store.connection).unwrap();

    let (mut random, mut units, mut granted, mut elapsed_ms) = (1_u128, full(limit), 0, 0);
    for _ in 0..TAKES {
        random = random * 16_807 % 2_147_483_647;
        elapsed_ms += random % 19;
        units = (units + random % 19 * 7).min(full(limit));
        let take = (random % 3).min(units / 61);
        units -= take * 61;
        granted += take;
    }
    assert_eq!(told, [granted, units / 61, (full(limit) - units).div_ceil(7), elapsed_ms]);
}

#[test]
fn many_small_takes_are_worth_as_much_as_one_long_wait() {
    let mut store = Store::with_clock();
    assert_eq!(store.one("exact", limit(3, 1, 3_000), 3).granted, 3);
    let mut granted = 0;
    for _ in 0..9_000 {
        store.advance(1);
        granted += store.one("upto", limit(3, 1, 3_000), 3).granted;
    }
    assert_eq!(granted, 3, "one token in three seconds, though asked a thousand times a second");
}

#[test]
fn a_bucket_starts_full_and_says_when_to_come_back() {
    let mut store = Store::with_clock();
    assert_eq!(store.one("exact", TEN_A_MINUTE, 3), answer(3, 7, 0, 18_000));
    assert_eq!(store.one("exact", TEN_A_MINUTE, 8), answer(0, 7, 6_000, 18_000));
    store.advance(5_999);
    assert_eq!(store.one("exact", TEN_A_MINUTE, 8), answer(0, 7, 1, 12_001));
    store.advance(1);
    assert_eq!(store.one("exact", TEN_A_MINUTE, 8), answer(8, 0, 0, 60_000));
    assert_eq!(store.one("exact", TEN_A_MINUTE, 1), answer(0, 0, 6_000, 60_000));
    store.advance(600_000);
    assert_eq!(store.one("exact", TEN_A_MINUTE, 0), answer(0, 10, 0, 0));
}

#[test]
fn a_cost_above_the_capacity_is_never_given() {
    let mut store = Store::with_clock();
    assert_eq!(store.one("exact", TEN_A_MINUTE, 11), answer(0, 10, -1, 0));
    assert_eq!(store.one("each", TEN_A_MINUTE, 1 << 52), answer(0, 10, -1, 0));
    assert!(store.contents().is_empty());
    assert_eq!(store.one("upto", TEN_A_MINUTE, 11), answer(10, 0, -1, 60_000), "but a part of it is");
}

#[test]
fn a_lower_capacity_caps_and_a_raised_one_gives_nothing_at_once() {
    let mut store = Store::with_clock();
    let (hundred, forty) = (limit(100, 1, 1_000), limit(40, 1, 1_000));
    assert_eq!(store.one("exact", hundred, 10), answer(10, 90, 0, 10_000));
    assert_eq!(store.one("exact", forty, 0), answer(0, 40, 0, 0), "capped by a look");
    assert_eq!(store.one("exact", forty, 5), answer(5, 35, 0, 5_000));
    assert_eq!(store.one("exact", hundred, 50), answer(0, 35, 15_000, 65_000), "raised, but it holds what it held");
    store.advance(15_000);
    assert_eq!(store.one("exact", hundred, 50), answer(50, 0, 0, 100_000));

    // Ten of ten: full at the old capacity when the new one comes.
    let (ten, more) = (limit(10, 1, 1_000), limit(100, 1, 1_000));
    let bucket = |store: &mut Store, limit, cost| store.ask("exact", &[("rl:{b}:login", limit, cost)])[0];
    bucket(&mut store, ten, 1);
    store.advance(1_000);
    assert_eq!(bucket(&mut store, more, 20), answer(0, 10, 10_000, 90_000));
    store.advance(10_000);
    assert_eq!(bucket(&mut store, more, 20), answer(20, 0, 0, 100_000));
}

#[test]
fn a_bucket_that_only_denies_is_kept_until_it_is_full_at_the_new_limit() {
    let mut store = Store::with_clock();
    let (second, hour) = (limit(10, 10, 1_000), limit(10, 10, 3_600_000));
    assert_eq!(store.one("exact", second, 10).granted, 10);
    assert_eq!(store.one("exact", hour, 1), answer(0, 0, 360_000, 3_600_000));
    store.advance(5_000);
    assert_eq!(store.one("exact", hour, 1), answer(0, 0, 355_000, 3_595_000), "it did not expire after a second");
}

#[test]
fn a_new_rate_counts_from_the_call_that_brings_it() {
    let mut store = Store::with_clock();
    assert_eq!(store.one("exact", limit(10, 1, 1_000), 10).granted, 10);
    store.advance(2_500);
    // Two and a half tokens came at the old rate; half a token more at the new one takes an hour.
    assert_eq!(store.one("exact", limit(10, 1, 7_200_000), 3), answer(0, 2, 3_600_000, 54_000_000));
    store.advance(3_600_000);
    assert_eq!(store.one("exact", limit(10, 1, 7_200_000), 3), answer(3, 0, 0, 72_000_000));
}

#[test]
fn a_fraction_is_rounded_down_when_the_period_changes() {
    let mut store = Store::with_clock();
    assert_eq!(store.one("exact", limit(2, 1, 1_000), 2).granted, 2);
    store.advance(999);
    // 0.999 of a token is 9 tenths and a bit: one tenth is missing, and a tenth takes a millisecond.
    assert_eq!(store.one("exact", limit(2, 1, 10), 1), answer(0, 0, 1, 11));
    // Back at the old period the bit is gone: 900 thousandths.
    assert_eq!(store.one("exact", limit(2, 1, 1_000), 1), answer(0, 0, 100, 1_100));
}

#[test]
fn a_clock_that_went_back_neither_freezes_nor_fills_a_bucket() {
    let mut store = Store::with_clock();
    assert_eq!(store.one("exact", TEN_A_MINUTE, 10).granted, 10);
    store.set_back(3_600_000);
    assert_eq!(store.one("exact", TEN_A_MINUTE, 1), answer(0, 0, 6_000, 60_000), "no time passed");
    let expires_ms: u64 = store.run(&["PEXPIRETIME", KEY]).unwrap();
    assert_eq!(expires_ms, store.now_ms.unwrap() + 60_000, "the deny wrote the new time");
    store.advance(6_000);
    assert_eq!(store.one("exact", TEN_A_MINUTE, 1), answer(1, 0, 0, 60_000), "and from there time counts");
}

#[test]
fn three_buckets_give_all_or_nothing() {
    let mut store = Store::with_clock();
    let limits = [limit(10, 1, 1_000), limit(5, 1, 1_000), limit(2, 1, 1_000)];
    let parts = |cost| [("rl:{a}:x", limits[0], cost), ("rl:{a}:y", limits[1], cost), ("rl:{a}:z", limits[2], cost)];
    assert_eq!(store.ask("exact", &parts(2)), [answer(2, 8, 0, 2_000), answer(2, 3, 0, 2_000), answer(2, 0, 0, 2_000)]);
    let before = store.contents();
    assert_eq!(before.len(), 3);
    assert_eq!(
        store.ask("exact", &parts(1)),
        [answer(0, 8, 0, 2_000), answer(0, 3, 0, 2_000), answer(0, 0, 1_000, 2_000)],
        "the one that denied says when to come back; the others would have given"
    );
    assert_eq!(store.contents(), before, "a deny writes nothing");
}

#[test]
fn each_bucket_gives_for_itself() {
    let mut store = Store::with_clock();
    let parts = [
        ("rl:{a}:x", limit(10, 1, 1_000), 4),
        ("rl:{a}:y", limit(3, 1, 1_000), 4),
        ("rl:{a}:z", limit(4, 2, 1_000), 4),
    ];
    assert_eq!(store.ask("each", &parts), [answer(4, 6, 0, 4_000), answer(0, 3, -1, 0), answer(4, 0, 0, 2_000)]);
    assert_eq!(store.ask("each", &parts), [answer(4, 2, 0, 8_000), answer(0, 3, -1, 0), answer(0, 0, 2_000, 2_000)]);
}

#[test]
fn upto_takes_from_every_bucket_what_the_poorest_can_give() {
    let mut store = Store::with_clock();
    let parts = [("rl:{a}:x", limit(10, 1, 1_000), 8), ("rl:{a}:y", limit(8, 1, 1_000), 8)];
    store.ask("exact", &[("rl:{a}:y", limit(8, 1, 1_000), 5)]);
    assert_eq!(store.ask("upto", &parts), [answer(3, 7, 0, 3_000), answer(3, 0, 8_000, 8_000)]);
    assert_eq!(store.ask("upto", &parts), [answer(0, 7, 1_000, 3_000), answer(0, 0, 8_000, 8_000)]);
    assert_eq!(store.one("upto", TEN_A_MINUTE, 25), answer(10, 0, -1, 60_000));
}

#[test]
fn what_goes_back_is_capped_at_the_capacity() {
    let mut store = Store::with_clock();
    assert_eq!(store.one("exact", TEN_A_MINUTE, 7), answer(7, 3, 0, 42_000));
    assert_eq!(store.one("back", TEN_A_MINUTE, 2), answer(2, 5, 0, 30_000));
    store.advance(3_000);
    assert_eq!(store.one("back", TEN_A_MINUTE, 100), answer(5, 10, 0, 0), "the half token is over the top");
    assert!(store.contents().is_empty(), "a full bucket is not stored");
    assert_eq!(store.one("back", TEN_A_MINUTE, 1), answer(0, 10, 0, 0));
    assert!(store.contents().is_empty());
    store.ask("exact", &[("rl:{a}:x", TEN_A_MINUTE, 5), ("rl:{a}:y", TEN_A_MINUTE, 1)]);
    assert_eq!(
        store.ask("back", &[("rl:{a}:x", TEN_A_MINUTE, 3), ("rl:{a}:y", TEN_A_MINUTE, 3)]),
        [answer(3, 8, 0, 12_000), answer(1, 10, 0, 0)]
    );
}

#[test]
fn a_look_and_a_deny_write_nothing() {
    let mut store = Store::with_clock();
    for mode in ["exact", "each", "upto", "back"] {
        assert_eq!(store.one(mode, TEN_A_MINUTE, 0), answer(0, 10, 0, 0), "{mode}");
        assert!(store.contents().is_empty(), "{mode} of a bucket that nobody has used");
    }
    store.one("exact", TEN_A_MINUTE, 4);
    let before = store.contents();
    store.advance(4_000);
    for mode in ["exact", "each", "upto", "back"] {
        assert_eq!(store.one(mode, TEN_A_MINUTE, 0), answer(0, 6, 0, 20_000), "{mode}");
    }
    assert_eq!(store.one("exact", TEN_A_MINUTE, 9).retry_ms, 14_000);
    assert_eq!(store.one("each", TEN_A_MINUTE, 11).retry_ms, -1);
    assert_eq!(store.contents(), before);
}

#[test]
fn the_largest_limits_are_exact() {
    let mut store = Store::with_clock();
    let slowest = limit(INTEGER_MAX, 1, MONTH_MS);
    let max = i64::try_from(INTEGER_MAX).unwrap();
    let wait_max = 1 << 52;
    assert_eq!(store.one("exact", slowest, INTEGER_MAX), answer(max, 0, 0, wait_max));
    assert_eq!(store.one("exact", slowest, 1).retry_ms, i64::try_from(MONTH_MS).unwrap());
    store.advance(MONTH_MS - 1);
    assert_eq!(store.one("exact", slowest, 1), answer(0, 0, 1, wait_max));
    store.advance(1);
    assert_eq!(store.one("exact", slowest, 1), answer(1, 0, 0, wait_max));
    let bucket = |store: &mut Store, limit, cost| store.ask("exact", &[("rl:{b}:login", limit, cost)])[0];
    let prime = limit(INTEGER_MAX, 2_147_483_629, 2_678_399_999);
    assert_eq!(bucket(&mut store, prime, INTEGER_MAX), answer(max, 0, 0, 2_678_400_022));
    store.advance(2_678_400_021);
    assert_eq!(bucket(&mut store, prime, INTEGER_MAX), answer(0, max - 1, 1, 1));
    store.advance(1);
    assert_eq!(bucket(&mut store, prime, INTEGER_MAX).granted, max);
    let fastest = limit(INTEGER_MAX, INTEGER_MAX, 1);
    store.advance(10 * MONTH_MS);
    assert_eq!(bucket(&mut store, fastest, INTEGER_MAX), answer(max, 0, 0, 1));
    store.advance(1);
    assert_eq!(bucket(&mut store, fastest, INTEGER_MAX), answer(max, 0, 0, 1));
}

#[test]
fn malformed_arguments_are_errors_that_say_what_is_wrong() {
    for mut store in [Store::real(), Store::function()] {
        let numbers = "capacity and refill from 1 to 2147483647, period_ms from 1 to 2678400000";
        let count = "after the mode, capacity refill period_ms cost for each key";
        let cases = [
            ("take 10 10 1000 1", "the mode must be exact, each, upto or back"),
            ("", "the mode must be exact, each, upto or back"),
            ("exact", count),
            ("exact 10 10 1000", count),
            ("exact 10 10 1000 1 1", count),
            ("exact 0 10 1000 1", numbers),
            ("exact 2147483648 10 1000 1", numbers),
            ("exact 10 0 1000 1", numbers),
            ("exact 10 2147483648 1000 1", numbers),
            ("exact 10 10 0 1", numbers),
            ("exact 10 10 2678400001 1", numbers),
            ("exact 10 10 1000 -1", numbers),
            ("exact 10 10 1000 4503599627370497", numbers),
            ("exact 10 10 1000 0.5", numbers),
            ("exact 10.5 10 1000 1", numbers),
            ("each nan 10 1000 1", numbers),
            ("upto 10 inf 1000 1", numbers),
            ("back 10 10 many 1", numbers),
            ("exact 10 10 1000 {}", numbers),
        ];
        for (arguments, wanted) in cases {
            let arguments: Vec<_> = arguments.split_whitespace().map(str::to_owned).collect();
            let error = store.call_raw(&[KEY], &arguments).unwrap_err().to_string();
            assert!(error.contains("token_bucket: ") && error.contains(wanted), "{arguments:?}: {error}");
        }
        let error = store.try_ask("exact", &[]).unwrap_err().to_string();
        assert!(error.contains("from 1 to 1000 keys"), "{error}");
        let ok = (KEY, TEN_A_MINUTE, 1);
        let second = store.try_ask("exact", &[ok, ("rl:{a}:x", limit(0, 1, 1), 1)]).unwrap_err().to_string();
        assert!(second.contains("key 2 needs whole numbers"), "{second}");
        let unequal = store.try_ask("upto", &[ok, ("rl:{a}:x", TEN_A_MINUTE, 2)]).unwrap_err().to_string();
        assert!(unequal.contains("the costs must be equal"), "{unequal}");
        assert!(store.contents().is_empty(), "nothing was changed");
    }
}

#[test]
fn a_thousand_keys_go_into_one_call() {
    let mut store = Store::real();
    let names: Vec<_> = (0..1_000).map(|index| format!("rl:{{a}}:{index}")).collect();
    let parts: Vec<Part<'_>> = names.iter().map(|name| (name.as_str(), TEN_A_MINUTE, 1)).collect();
    assert_eq!(store.ask("exact", &parts), vec![answer(1, 9, 0, 6_000); 1_000]);
}

#[test]
fn what_is_no_bucket_counts_as_none_and_is_written_over() {
    let mut store = Store::with_clock();
    store.one("exact", TEN_A_MINUTE, 1);
    let value: Vec<u8> = store.run(&["GET", KEY]).unwrap();
    assert_eq!(value.len(), 27, "the format in the script's header");
    let with = |at: usize, byte: u8| {
        let mut value = value.clone();
        value[at] = byte;
        value
    };
    let longer = [value.clone(), vec![0]].concat();
    let foreign = [
        b"hello".to_vec(),
        Vec::new(),
        vec![0; 27],
        vec![0xff; 27],
        longer,
        value[..26].to_vec(),
        with(0, 2),     // another version
        with(7, 0xff),  // more tokens than the capacity
        with(11, 0xff), // a fraction of more than a token
        with(23, 0xff), // a period that is too long
    ];
    for value in foreign {
        for parts in [&[(KEY, TEN_A_MINUTE, 4)][..], &[(KEY, TEN_A_MINUTE, 4), ("rl:{a}:other", TEN_A_MINUTE, 0)]] {
            cmd("SET").arg(KEY).arg(&value).exec(&mut store.connection).unwrap();
            assert_eq!(store.ask("exact", parts)[0], answer(4, 6, 0, 24_000), "{value:?}");
            assert_eq!(store.ask("exact", parts)[0], answer(4, 2, 0, 48_000), "{value:?}");
        }
    }
    for parts in [&[(KEY, TEN_A_MINUTE, 4)][..], &[(KEY, TEN_A_MINUTE, 4), ("rl:{a}:other", TEN_A_MINUTE, 0)]] {
        store.run::<()>(&["DEL", KEY]).unwrap();
        store.run::<()>(&["RPUSH", KEY, "a list"]).unwrap();
        assert_eq!(store.ask("exact", parts)[0], answer(4, 6, 0, 24_000), "a list");
        assert_eq!(store.ask("exact", parts)[0], answer(4, 2, 0, 48_000), "a list");
    }
}

#[test]
fn a_user_who_may_not_read_hears_so() {
    let mut store = Store::real();
    store.run::<()>(&["ACL", "SETUSER", "default", "-get", "-mget"]).unwrap();
    let other = [(KEY, TEN_A_MINUTE, 1), ("rl:{a}:x", TEN_A_MINUTE, 1)];
    for parts in [&other[..1], &other] {
        let error = store.try_ask("exact", parts).unwrap_err().to_string();
        assert!(error.contains("can't run this command"), "{error}");
    }
}

#[test]
fn a_key_expires_when_its_bucket_is_full() {
    for mut store in [Store::real(), Store::function()] {
        let before = store.one("exact", TEN_A_MINUTE, 4);
        assert_eq!(before, answer(4, 6, 0, 24_000));
        let ttl_ms: i64 = store.run(&["PTTL", KEY]).unwrap();
        assert!((14_000..=24_000).contains(&ttl_ms), "{ttl_ms}");
        // With a short period it is gone in no time, and full again.
        let short = limit(1_000, 1_000, 50);
        assert_eq!(store.ask("exact", &[("rl:{b}:x", short, 1_000)])[0], answer(1_000, 0, 0, 50));
        until("the key expires", || store.run::<i64>(&["EXISTS", "rl:{b}:x"]).unwrap() == 0);
        assert_eq!(store.ask("exact", &[("rl:{b}:x", short, 0)])[0], answer(0, 1_000, 0, 0));
    }
}

#[test]
fn redis_own_time_is_what_refills() {
    for mut store in [Store::real(), Store::function()] {
        let (capacity, per_ms) = (1_000_000, 100);
        let limit = limit(capacity, per_ms, 1);
        let millis = |store: &mut Store| {
            let (secs, micros): (u64, u64) = store.run(&["TIME"]).unwrap();
            secs * 1_000 + micros / 1_000
        };
        let earliest = millis(&mut store);
        assert_eq!(store.one("exact", limit, capacity).granted, 1_000_000);
        let latest = millis(&mut store);
        until("time passes by Redis's clock", || millis(&mut store) >= latest + 20);
        let least = (millis(&mut store) - latest) * per_ms;
        let holds = u64::try_from(store.one("exact", limit, 0).remaining).unwrap();
        let most = (millis(&mut store) - earliest) * per_ms;
        assert!((least..=most).contains(&holds), "{least} ≤ {holds} ≤ {most}");
    }
}

#[test]
fn the_function_answers_as_the_script_does() {
    let mut answers = Vec::new();
    for mut store in [Store::real(), Store::function()] {
        // A limit so slow that no moment between two calls shows.
        let slow = limit(10, 1, MONTH_MS / 10);
        let two = [(KEY, slow, 2), ("rl:{a}:x", limit(5, 1, MONTH_MS), 2)];
        let modes = ["exact", "upto", "each", "exact", "back", "upto"];
        let told = modes.map(|mode| (store.one(mode, slow, 2), store.ask(mode, &two)));
        answers.push(told.map(|(one, two)| {
            let essence = |answer: &Answer| (answer.granted, answer.remaining, answer.retry_ms.signum());
            (essence(&one), two.iter().map(essence).collect::<Vec<_>>())
        }));
    }
    assert_eq!(answers[0], answers[1]);
}
