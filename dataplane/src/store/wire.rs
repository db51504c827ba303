//! The asker's calls as calls of the RESP client, and the client's completions as answers for the asker.
//!
//! The contract of `lua/token_bucket.lua`: `mode` first, then for each key `capacity refill period_ms cost`; the reply is
//! one flat array of integers, four for each key.

use std::sync::Arc;

use policy_sync::rate::Rate;
use resp_client::{
    Action, CallError, Client, Completion, Config, Encoder, Error, LinkId, Micros, Reply, Script, ScriptId, ShardIndex,
};

use super::{
    Call, Calls, Store, Surroundings, TakeMode,
    shards::{ShardCounters, ShardId, Shards},
};
use crate::decision::Why;

/// The script.
pub const TOKEN_BUCKET: &str = include_str!("../../../lua/token_bucket.lua");

/// Where the script is among the client's.
const TOKEN_BUCKET_ID: ScriptId = ScriptId(0);

/// Integers of a reply for which there is room from the start; a call covers the rules of one identity.
const INTEGERS: usize = 4 * 64;

/// The script as the settings want it called.
pub fn token_bucket(as_function: bool) -> Script {
    if as_function {
        let library = format!(
            "#!lua name=sluice\nredis.register_function('sluice_token_bucket', function(KEYS, ARGV)\n{TOKEN_BUCKET}\nend)\n"
        );
        Script::as_function(library, "sluice_token_bucket")
    } else {
        Script::by_hash(TOKEN_BUCKET)
    }
}

/// A limit as the script's arguments, as they go over the wire: made once, and copied as one block.
#[derive(Clone, Copy, Debug)]
pub struct LimitWords {
    bytes: [u8; LIMIT_WORDS_BYTES],
    len: u8,
}

/// Three words of at most ten digits each, with their framing: `$10\r\n2147483647\r\n`.
const LIMIT_WORDS_BYTES: usize = 3 * 17;

impl LimitWords {
    /// The words of a limit.
    pub fn new(rate: &Rate) -> Self {
        let mut words = Self { bytes: [0; LIMIT_WORDS_BYTES], len: 0 };
        let mut digits = itoa::Buffer::new();
        for number in [rate.capacity, rate.refill, rate.period_ms] {
            let text = digits.format(number).as_bytes();
            words.put(b"$");
            words.put(itoa::Buffer::new().format(text.len()).as_bytes());
            words.put(b"\r\n");
            words.put(text);
            words.put(b"\r\n");
        }
        words
    }

    fn put(&mut self, bytes: &[u8]) {
        let at = usize::from(self.len);
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
        // At most `LIMIT_WORDS_BYTES`.
        self.len += bytes.len() as u8;
    }

    fn append(&self, command: &mut Encoder<'_>) {
        command.written(&self.bytes[..usize::from(self.len)], 3);
    }
}

/// One core's way to the shards.
pub struct Redis {
    client: Client,
    book: Book,
    deadline_us: u64,
    now: Micros,
}

/// What is known of the shards by the client's numbers.
struct Book {
    shards: Arc<Shards>,
    core: usize,
    /// By the client's number: the address that it stood for, and that one's number in the process.
    numbers: Vec<Option<(Box<str>, ShardId)>>,
    integers: Vec<i64>,
    /// When the client's counters were last shown to other threads.
    published_at: Micros,
    /// By the client's number: what was last logged about the shard.
    said: Vec<Said>,
    /// Whether it was logged that no sentinel can be reached, and nothing else since.
    said_no_sentinel: bool,
    /// That no sentinel can be reached is not said before.
    no_sentinel_not_before: Micros,
    /// When an error of a shard was last logged.
    complained_at: Option<Micros>,
}

/// What was logged about a shard.
#[derive(Clone)]
struct Said {
    is_up: bool,
    /// Why it was not.
    why: String,
    /// Another reason why is not said before.
    not_before: Micros,
}

/// A shard that is reached again within this time is no news.
const SETTLE_US: u64 = 1_000_000;

/// Errors of shards are logged no more often than this; the metrics count them all.
const COMPLAIN_EVERY_US: u64 = 10_000_000;

/// How often they are.
const PUBLISH_EVERY_US: u64 = 50_000;

impl Redis {
    /// A client for core `core`.
    ///
    /// # Errors
    ///
    /// When the certificates of the settings cannot be used.
    pub fn new(
        config: Config,
        shards: &Arc<Shards>,
        core: usize,
        seed: u64,
        (deadline_us, now_us): (u64, u64),
    ) -> Result<Self, resp_client::TlsError> {
        let now = Micros(now_us);
        Ok(Self {
            client: Client::new(config, seed, now)?,
            book: Book {
                shards: Arc::clone(shards),
                core,
                numbers: Vec::new(),
                integers: Vec::with_capacity(INTEGERS),
                published_at: now,
                said: Vec::new(),
                said_no_sentinel: false,
                no_sentinel_not_before: now,
                complained_at: None,
            },
            deadline_us,
            now,
        })
    }

    /// The client, for its counters.
    pub fn client(&mut self) -> &mut Client {
        &mut self.client
    }

    /// The time for all that follows.
    pub fn at(&mut self, now_us: u64) {
        self.now = Micros(now_us);
    }

    /// Ends calls whose deadline has come, and does what time brings.
    pub fn tick(&mut self, store: &mut Store, around: &mut Surroundings<'_>) {
        let Self { client, book, now, .. } = self;
        client.tick(*now, &mut |done| book.completed(store, around, *now, &done));
        if now.since(book.published_at).0 >= PUBLISH_EVERY_US {
            book.published_at = *now;
            book.shards.links(book.core).publish(client.counters(), store.waiting());
            book.say_what_changed(client, *now);
            book.say_of_sentinels(client, *now);
        }
    }

    /// Bytes from a shard.
    pub fn received(&mut self, store: &mut Store, around: &mut Surroundings<'_>, link: LinkId, bytes: &[u8]) {
        let Self { client, book, now, .. } = self;
        client.received(link, bytes, *now, &mut |done| book.completed(store, around, *now, &done));
    }

    /// A connection was made.
    pub fn connected(&mut self, store: &mut Store, around: &mut Surroundings<'_>, link: LinkId) {
        let Self { client, book, now, .. } = self;
        client.connected(link, *now, &mut |done| book.completed(store, around, *now, &done));
    }

    /// A connection could not be made.
    pub fn connect_failed(&mut self, store: &mut Store, around: &mut Surroundings<'_>, link: LinkId, why: &str) {
        let Self { client, book, now, .. } = self;
        client.connect_failed(link, *now, why, &mut |done| book.completed(store, around, *now, &done));
    }

    /// A connection is gone.
    pub fn closed(&mut self, store: &mut Store, around: &mut Surroundings<'_>, link: LinkId, why: &str) {
        let Self { client, book, now, .. } = self;
        client.closed(link, *now, why, &mut |done| book.completed(store, around, *now, &done));
    }

    /// What the owner of the sockets is to do next.
    pub fn next_action(&mut self) -> Option<Action> {
        self.client.poll_action()
    }

    /// The next link with something to send.
    pub fn next_output(&mut self) -> Option<LinkId> {
        self.client.poll_output()
    }

    /// All that a link has to send, in exchange for an empty buffer.
    pub fn take_output(&mut self, link: LinkId, buffer: &mut Vec<u8>) {
        self.client.swap_output(link, buffer);
    }

    /// Whether calls are in flight.
    pub fn is_busy(&self) -> bool {
        self.client.in_flight() > 0
    }

    /// Whether the client wants a tick within this time.
    pub fn wants_tick_within(&self, us: u64) -> bool {
        self.client.in_flight() > 0 || self.client.next_tick().is_some_and(|at| at.since(self.now).0 <= us)
    }
}

impl Calls for Redis {
    #[inline]
    fn slot(&self, tag: &[u8]) -> u16 {
        // Of the tag alone: its braces are added later, and there are none within.
        resp_client::tag_slot(tag)
    }

    #[inline]
    fn shard(&mut self, slot: u16) -> Option<ShardId> {
        let index = self.client.shard_of(slot)?;
        let name = self.client.shard_name(index);
        match self.book.numbers.get(usize::from(index.0)) {
            Some(Some((known, shard))) if **known == *name => Some(*shard),
            _ => self.book.meet(usize::from(index.0), name),
        }
    }

    #[inline]
    fn send(&mut self, token: u64, call: &Call<'_>) -> Result<(), Why> {
        let deadline = Micros(self.now.0 + self.deadline_us);
        let sent = self.client.evalsha(
            self.now,
            Some(call.slot),
            token,
            deadline,
            TOKEN_BUCKET_ID,
            call.buckets.len(),
            |command| {
                let mut from = 0;
                for bucket in call.buckets {
                    let end = bucket.key_end as usize;
                    command.word(&call.keys[from..end]);
                    from = end;
                }
                match call.take {
                    TakeMode::Exactly => command.written(b"$5\r\nexact\r\n", 1),
                    TakeMode::UpTo => command.written(b"$4\r\nupto\r\n", 1),
                    TakeMode::Back => command.written(b"$4\r\nback\r\n", 1),
                };
                for bucket in call.buckets {
                    bucket.limit.append(command);
                    match call.cost {
                        1 => command.written(b"$1\r\n1\r\n", 1),
                        cost => command.integer(cost),
                    };
                }
            },
        );
        sent.map_err(|error| match error {
            CallError::NotConnected | CallError::NoShard => Why::Down,
            CallError::InFlightFull | CallError::OutputFull => Why::Overloaded,
            CallError::TooLate => Why::Timeout,
            _ => Why::Refused,
        })
    }
}

impl Book {
    /// Gives an address its number in the process.
    #[cold]
    fn meet(&mut self, index: usize, name: &str) -> Option<ShardId> {
        let shard = self.shards.number(name)?;
        if self.numbers.len() <= index {
            self.numbers.resize(index + 1, None);
        }
        self.numbers[index] = Some((name.into(), shard));
        Some(shard)
    }

    /// Logs which shards this core has reached and which it has lost since the last time, and now and then why one cannot be
    /// reached.
    fn say_what_changed(&mut self, client: &Client, now: Micros) {
        let settled = Micros(now.0 + SETTLE_US);
        self.said.resize(client.shards(), Said { is_up: false, why: String::new(), not_before: settled });
        for (index, said) in self.said.iter_mut().enumerate() {
            // There are at most 1,024; see the setting's bound.
            let shard = ShardIndex(index as u16);
            let (core, name, was_up) = (self.core, client.shard_name(shard), said.is_up);
            said.is_up = client.shard_is_up(shard);
            if said.is_up {
                if !was_up {
                    tracing::info!(core, shard = name, "connected to Redis");
                }
                continue;
            }
            let why = client.shard_problem(shard).map(ToString::to_string).unwrap_or_default();
            if was_up {
                tracing::warn!(core, shard = name, why, "the connection to Redis is gone");
                *said = Said { is_up: false, why, not_before: settled };
            } else if why != said.why && now >= said.not_before {
                tracing::warn!(core, shard = name, why, "Redis cannot be reached");
                *said = Said { is_up: false, why, not_before: Micros(now.0 + COMPLAIN_EVERY_US) };
            }
        }
    }

    /// Logs that no sentinel can be reached, now and then, and that one has answered since.
    fn say_of_sentinels(&mut self, client: &Client, now: Micros) {
        let core = self.core;
        match client.sentinel_problem() {
            Some(why) if !self.said_no_sentinel && now >= self.no_sentinel_not_before => {
                self.said_no_sentinel = true;
                self.no_sentinel_not_before = Micros(now.0 + COMPLAIN_EVERY_US);
                tracing::warn!(core, %why, "no sentinel can be reached: nobody would tell of another primary");
            }
            None if std::mem::take(&mut self.said_no_sentinel) => tracing::info!(core, "a sentinel answers again"),
            _ => {}
        }
    }

    /// Logs an error of a shard, now and then.
    #[cold]
    fn complain(&mut self, now: Micros, shard: Option<ShardId>, error: &Error<'_>) {
        if self.complained_at.is_none_or(|at| now.since(at).0 >= COMPLAIN_EVERY_US) {
            self.complained_at = Some(now);
            let known = self.shards.known();
            let name = shard.and_then(|shard| known.get(shard.index())).map_or("?", |(_, name)| name);
            tracing::warn!(shard = name, %error, "Redis answers with an error; further ones are only counted for 10 s");
        }
    }

    fn completed(&mut self, store: &mut Store, around: &mut Surroundings<'_>, now: Micros, done: &Completion<'_>) {
        let numbers = &self.numbers;
        let shard = done.shard.and_then(|index| numbers.get(usize::from(index.0))?.as_ref()).map(|(_, shard)| *shard);
        let counters = shard.map(|shard| self.shards.counters(shard, self.core));
        match &done.outcome {
            Ok(reply) => {
                if let Some(counters) = counters {
                    counters.round_trip(now.since(done.sent_at).0);
                }
                self.integers.clear();
                if let Reply::Array(items) = reply {
                    self.integers.extend(items.integers().map_while(|integer| integer));
                }
                store.completed(around, done.token, (shard, done.sent_at.0), Ok(&self.integers));
            }
            Err(error) => {
                let why = why(error);
                if let Some(counters) = counters {
                    count(counters, why);
                }
                if why == Why::Refused {
                    self.complain(now, shard, error);
                }
                let sent = (shard, done.sent_at.0);
                store.completed(around, done.token, sent, Err((why, error.is_shard_failure())));
            }
        }
    }
}

fn count(counters: &ShardCounters, why: Why) {
    match why {
        Why::Timeout => &counters.timeouts,
        Why::Down => &counters.down,
        _ => &counters.errors,
    }
    .add(1);
}

fn why(error: &Error<'_>) -> Why {
    match error {
        Error::Timeout => Why::Timeout,
        Error::OutputFull => Why::Overloaded,
        Error::Server { .. } => Why::Refused,
        _ => Why::Down,
    }
}
