//! A pipelined RESP client for one Redis, for the primary that Sentinel names, and for a cluster.
//!
//! Everything that thinks is **sans-I/O**: bytes, the time and the seed of chance come in as arguments; completions and
//! bytes go out. So the same code runs under an io_uring driver, under glommio (the module `runner`), and in a test with a scripted
//! peer and a clock of its own. In the steady state nothing allocates: calls live in a table of fixed size, replies are
//! read in the buffer they arrived in.
//!
//! ```
//! use resp_client::{Action, Client, Config, Micros, Reply, key_slot};
//!
//! let config = Config::from_urls(&["redis://127.0.0.1:6379"]).unwrap();
//! let mut client = Client::new(config, 7, Micros(0)).unwrap();
//!
//! // Whoever owns the sockets tells it the time, does what it asks for,
//! client.tick(Micros(0), &mut |_| ());
//! let Some(Action::Connect { link, .. }) = client.poll_action() else { panic!("it wants to connect") };
//! client.connected(link, Micros(50), &mut |_| ());
//! // sends its output (here the handshake),
//! let sent = client.output(link).len();
//! client.sent(link, sent);
//! // and hands over what arrives.
//! client.received(link, b"%1\r\n+proto\r\n:3\r\n", Micros(90), &mut |_| ());
//!
//! // A call is accepted or refused at once,
//! let deadline = Micros(100) + Micros::from_millis(5);
//! client
//!     .call(Micros(100), Some(key_slot(b"n")), 42, deadline, |command| {
//!         command.word(b"INCRBY").word(b"n").integer(2);
//!     })
//!     .unwrap();
//! assert_eq!(client.output(link), b"*3\r\n$6\r\nINCRBY\r\n$1\r\nn\r\n$1\r\n2\r\n");
//!
//! // and completed exactly once: by its reply, or by its deadline.
//! let mut answer = None;
//! client.received(link, b":2\r\n", Micros(140), &mut |done| {
//!     answer = Some((done.token, done.outcome.unwrap().as_integer()));
//! });
//! assert_eq!(answer, Some((42, Some(2))));
//! ```
//!
//! Read in this order, the way a call goes and its reply comes back:
//!
//! 1. [`config`]: settings, and URLs to settings.
//! 2. [`command`]: words to bytes.
//! 3. `client`: where a call goes, and what ends it.
//! 4. `link`: one connection, its handshake, and the commands that wait on it.
//! 5. [`reply`]: bytes to replies.
//! 6. [`error`]: what an error means for the caller.
//! 7. `topology`: which node has which slots.
//!
//! Beside that way stand [`pubsub`], a subscriber of its own, `tls`, [`script`] and [`counters`].

mod client;
mod clock;
pub mod command;
pub mod config;
pub mod counters;
pub mod error;
mod link;
pub mod pubsub;
pub mod reply;
#[cfg(feature = "glommio")]
pub mod runner;
pub mod script;
mod slot;
mod tls;
mod topology;

pub use self::{
    client::{Action, Client, Completion, ShardIndex},
    clock::Micros,
    command::Encoder,
    config::{Address, Config, Credentials, Mode, Protocol, Secret, UrlError},
    counters::{Counters, ShardCounters},
    error::{CallError, Code, Error, LinkError, Meaning, OwnedError},
    link::LinkId,
    reply::{Limits, OwnedReply, ProtocolError, Reply},
    script::{Script, ScriptId},
    slot::{SLOTS, key_slot, tag_slot},
    tls::{TlsConfig, TlsError},
};
