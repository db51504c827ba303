//! `lua/token_bucket.lua` in a real Redis, beside an exact model of a token bucket.
//!
//! Most tests set the clock: the script's text runs inside a wrapper in which the one thing that differs is where the
//! time comes from. The clock starts in the year 2100, so that Redis, which expires keys by the real time, never does;
//! the wrapper does it by the clock of the test. What depends on the real time is tested on the text as it is.
#![allow(missing_docs)]

use std::collections::HashMap;

use redis::{Connection, RedisResult, cmd};
use sluice_e2e::redis::Redis;

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
