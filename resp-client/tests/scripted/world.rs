//! A client, the links it asked for, and what came out of it.

use std::collections::VecDeque;

use resp_client::{Action, CallError, Client, Code, Config, Error, LinkId, Micros, OwnedReply, key_slot};

pub(crate) const DEADLINE_MS: u64 = 5;

/// How a call ended.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Done {
    pub(crate) token: u64,
    pub(crate) shard: String,
    pub(crate) outcome: Result<OwnedReply, Failure>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    Timeout,
    Disconnected,
    NotConnected,
    OutputFull,
    Protocol,
    Server(Code),
}

pub(crate) struct World {
    pub(crate) client: Client,
    pub(crate) now: Micros,
    pub(crate) done: Vec<Done>,
    actions: VecDeque<Action>,
}

impl World {
    pub(crate) fn new(config: Config) -> Self {
        let now = Micros(1_000_000);
        let mut client = Client::new(config, 1, now).expect("settings");
        client.tick(now, &mut |_| ());
        Self { client, now, done: Vec::new(), actions: VecDeque::new() }
    }

    pub(crate) fn of(url: &str) -> Self {
        Self::new(Config::from_urls(&[url]).expect("URL"))
    }

    /// A client of one Redis at `h:1` that is up.
    pub(crate) fn single() -> (Self, LinkId) {
        Self::single_with(|_| ())
    }

    pub(crate) fn single_with(set: impl FnOnce(&mut Config)) -> (Self, LinkId) {
        let mut config = Config::from_urls(&["redis://h:1"]).expect("URL");
        set(&mut config);
        let mut world = Self::new(config);
        let link = world.up("h:1");
        (world, link)
    }

    /// A client of a cluster of `a:1` (slots below 8192) and `b:2`, both up.
    pub(crate) fn cluster() -> (Self, LinkId, LinkId) {
        Self::cluster_with(|_| ())
    }

    pub(crate) fn cluster_with(set: impl FnOnce(&mut Config)) -> (Self, LinkId, LinkId) {
        let mut config = Config::from_urls(&["redis+cluster://a:1"]).expect("URL");
        set(&mut config);
        let mut world = Self::new(config);
        let a = world.up("a:1");
        assert_eq!(world.sent(a), [["CLUSTER", "SHARDS"]]);
        world.reply(a, &shards(&[(0, 8191, "a", 1), (8192, 16_383, "b", 2)]));
        let b = world.up("b:2");
        (world, a, b)
    }

    /// The next thing asked for that no `wants` has taken.
    pub(crate) fn action(&mut self) -> Option<Action> {
        self.actions.extend(std::iter::from_fn(|| self.client.poll_action()));
        self.actions.pop_front()
    }

    fn take_action(&mut self, which: impl Fn(&Action) -> bool) -> Action {
        self.actions.extend(std::iter::from_fn(|| self.client.poll_action()));
        let at = self.actions.iter().position(which);
        at.and_then(|at| self.actions.remove(at)).unwrap_or_else(|| panic!("not asked for: {:?}", self.actions))
    }

    /// A connect to that address is asked for.
    pub(crate) fn wants(&mut self, name: &str) -> LinkId {
        self.pass_ms(0);
        let named = |action: &Action| matches!(action, Action::Connect { address, .. } if address.to_string() == name);
        match self.take_action(named) {
            Action::Connect { link, .. } | Action::Close { link } => link,
        }
    }

    pub(crate) fn wants_close(&mut self, link: LinkId) {
        self.take_action(|action| *action == Action::Close { link });
    }

    /// Connects to that address, with a handshake that succeeds.
    pub(crate) fn up(&mut self, name: &str) -> LinkId {
        let link = self.wants(name);
        self.connected(link);
        let sent = self.sent(link);
        assert_eq!(sent.len(), 1, "{sent:?}");
        assert_eq!(sent[0][..2], ["HELLO", "3"]);
        self.reply(link, "%1\r\n+proto\r\n:3\r\n");
        link
    }

    /// Takes what is to be sent, as commands.
    pub(crate) fn sent(&mut self, link: LinkId) -> Vec<Vec<String>> {
        let bytes = self.client.output(link).to_vec();
        self.client.sent(link, bytes.len());
        commands(&bytes)
    }

    pub(crate) fn reply(&mut self, link: LinkId, bytes: &str) {
        self.reply_bytes(link, bytes.as_bytes());
    }

    pub(crate) fn reply_bytes(&mut self, link: LinkId, bytes: &[u8]) {
        let Self { client, done, now, .. } = self;
        let mut found = Vec::new();
        client.received(link, bytes, *now, &mut |completion| found.push(own(completion)));
        done.extend(found.into_iter().map(|(done, shard)| named(client, done, shard)));
    }

    pub(crate) fn closed(&mut self, link: LinkId) {
        let Self { client, done, now, .. } = self;
        let mut found = Vec::new();
        client.closed(link, *now, "end of stream", &mut |completion| found.push(own(completion)));
        done.extend(found.into_iter().map(|(done, shard)| named(client, done, shard)));
    }

    pub(crate) fn connected(&mut self, link: LinkId) {
        let Self { client, done, now, .. } = self;
        let mut found = Vec::new();
        client.connected(link, *now, &mut |completion| found.push(own(completion)));
        done.extend(found.into_iter().map(|(done, shard)| named(client, done, shard)));
    }

    pub(crate) fn connect_failed(&mut self, link: LinkId) {
        let Self { client, done, now, .. } = self;
        let mut found = Vec::new();
        client.connect_failed(link, *now, "refused", &mut |completion| found.push(own(completion)));
        done.extend(found.into_iter().map(|(done, shard)| named(client, done, shard)));
    }

    /// Time passes, and one tick comes.
    pub(crate) fn pass(&mut self, micros: u64) {
        self.now = self.now + Micros(micros);
        let Self { client, done, now, .. } = self;
        let mut found = Vec::new();
        client.tick(*now, &mut |completion| found.push(own(completion)));
        done.extend(found.into_iter().map(|(done, shard)| named(client, done, shard)));
    }

    pub(crate) fn pass_ms(&mut self, millis: u64) {
        self.pass(millis * 1000);
    }

    /// GET of a key.
    pub(crate) fn get(&mut self, token: u64, key: &str) -> Result<(), CallError> {
        self.get_at(token, Some(key_slot(key.as_bytes())), key)
    }

    pub(crate) fn get_at(&mut self, token: u64, slot: Option<u16>, key: &str) -> Result<(), CallError> {
        let deadline = self.now + Micros::from_millis(DEADLINE_MS);
        self.client.call(self.now, slot, token, deadline, |command| {
            command.word(b"GET").word(key.as_bytes());
        })
    }

    /// What ended since the last time.
    pub(crate) fn ended(&mut self) -> Vec<Done> {
        std::mem::take(&mut self.done)
    }

    /// What ended since the last time: tokens and outcomes.
    pub(crate) fn outcomes(&mut self) -> Vec<(u64, Result<OwnedReply, Failure>)> {
        self.ended().into_iter().map(|done| (done.token, done.outcome)).collect()
    }
}

fn own(completion: resp_client::Completion<'_>) -> (Done, Option<resp_client::ShardIndex>) {
    let outcome = match completion.outcome {
        Ok(reply) => Ok(reply.into()),
        Err(Error::Timeout) => Err(Failure::Timeout),
        Err(Error::Disconnected) => Err(Failure::Disconnected),
        Err(Error::NotConnected) => Err(Failure::NotConnected),
        Err(Error::OutputFull) => Err(Failure::OutputFull),
        Err(Error::Protocol(_)) => Err(Failure::Protocol),
        Err(Error::Server { code, .. }) => Err(Failure::Server(code)),
        Err(other) => panic!("{other}"),
    };
    (Done { token: completion.token, shard: String::new(), outcome }, completion.shard)
}

fn named(client: &Client, done: Done, shard: Option<resp_client::ShardIndex>) -> Done {
    Done { shard: shard.map_or(String::new(), |shard| client.shard_name(shard).to_owned()), ..done }
}

/// The words of each command.
pub(crate) fn commands(mut bytes: &[u8]) -> Vec<Vec<String>> {
    let mut commands = Vec::new();
    while !bytes.is_empty() {
        let (reply, end) = resp_client::Reply::parse(bytes, &Default::default()).expect("RESP").expect("whole");
        let words = reply.items().expect("an array");
        let text =
            |word: resp_client::Reply<'_>| String::from_utf8_lossy(word.as_bytes().expect("a word")).into_owned();
        commands.push(words.map(text).collect());
        bytes = &bytes[end..];
    }
    commands
}

/// An answer to CLUSTER SHARDS.
pub(crate) fn shards(ranges: &[(u16, u16, &str, u16)]) -> String {
    let mut text = format!("*{}\r\n", ranges.len());
    for (first, last, host, port) in ranges {
        text += &format!("%2\r\n+slots\r\n*2\r\n:{first}\r\n:{last}\r\n+nodes\r\n*1\r\n");
        text +=
            &format!("%4\r\n+port\r\n:{port}\r\n+endpoint\r\n+{host}\r\n+role\r\n+master\r\n+health\r\n+online\r\n");
    }
    text
}

pub(crate) fn ok(value: i64) -> Result<OwnedReply, Failure> {
    Ok(OwnedReply::Integer(value))
}
