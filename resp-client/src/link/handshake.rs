//! From a fresh connection to one that takes calls.
//!
//! ```text
//! HELLO 3 [AUTH user password] [SETNAME name]
//!     answered: protocol, user and name are settled
//!     not known, or refused for another reason than the password: [AUTH …] [CLIENT SETNAME …], and RESP2 it is
//! [SELECT database] [ROLE]
//! ```
//!
//! ROLE is asked of a node that Sentinel named, since a sentinel may be behind: only a primary is taken. A name that is
//! refused does no harm; everything else must succeed.

use super::{Asked, Link};
use crate::{
    clock::Micros,
    config::{Config, Credentials, Protocol},
    error::{Code, LinkError},
    reply::Reply,
};

/// A command of the handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Hello,
    Auth,
    Name,
    Select,
    Role,
}

/// What the peer is, and so what is asked of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Peer {
    #[default]
    Shard,
    /// A shard that must be a primary.
    Primary,
    Sentinel,
}

/// Where the handshake stands.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Handshake {
    peer: Peer,
    /// Steps that are not answered yet.
    open: u8,
}

/// What an answer leads to.
#[derive(Debug)]
pub(crate) enum Progress {
    /// More answers are to come.
    Waiting,
    /// The link is up.
    Done,
    /// It will not be.
    Failed(LinkError),
}

impl Handshake {
    pub(crate) fn of_primary() -> Self {
        Self { peer: Peer::Primary, open: 0 }
    }

    pub(crate) fn of_sentinel() -> Self {
        Self { peer: Peer::Sentinel, open: 0 }
    }

    fn credentials(self, config: &Config) -> Option<&Credentials> {
        match self.peer {
            Peer::Sentinel => config.sentinel_credentials.as_ref(),
            Peer::Shard | Peer::Primary => config.credentials.as_ref(),
        }
    }
}

/// Writes the first commands.
pub(crate) fn begin(link: &mut Link, config: &Config, now: Micros) -> Progress {
    if config.protocol == Protocol::Resp2 {
        return old_way(link, config, now);
    }
    let mut words: Vec<&[u8]> = vec![b"HELLO", b"3"];
    if let Some(credentials) = link.handshake.credentials(config) {
        let user = credentials.user.as_deref().unwrap_or("default");
        words.extend_from_slice(&[b"AUTH", user.as_bytes(), credentials.password.reveal()]);
    }
    if let Some(name) = &config.client_name {
        words.extend_from_slice(&[b"SETNAME", name.as_bytes()]);
    }
    ask(link, &words, Step::Hello, now);
    Progress::Waiting
}

/// Takes the answer to a step.
pub(crate) fn answered(link: &mut Link, step: Step, reply: &Reply<'_>, config: &Config, now: Micros) -> Progress {
    link.handshake.open -= 1;
    match (step, reply) {
        (Step::Hello, Reply::Error(text)) => match Code::of(text) {
            Code::WrongPass | Code::NoAuth | Code::Denied | Code::MaxClients | Code::Loading => refused(text),
            _ => old_way(link, config, now),
        },
        (Step::Hello, _) => the_rest(link, config, now),
        (Step::Name, _) => settled(link),
        (Step::Role, Reply::Error(text)) if Code::of(text) == Code::NoPerm => settled(link),
        (_, Reply::Error(text)) => refused(text),
        (Step::Role, reply) => {
            let role = reply.items().and_then(|mut items| items.next());
            if role.and_then(|role| role.as_bytes()) == Some(b"master") {
                settled(link)
            } else {
                Progress::Failed(LinkError::NotPrimary)
            }
        }
        (Step::Auth | Step::Select, _) => settled(link),
    }
}

fn old_way(link: &mut Link, config: &Config, now: Micros) -> Progress {
    if let Some(credentials) = link.handshake.credentials(config) {
        let password = credentials.password.reveal();
        match &credentials.user {
            Some(user) => ask(link, &[b"AUTH", user.as_bytes(), password], Step::Auth, now),
            None => ask(link, &[b"AUTH", password], Step::Auth, now),
        }
    }
    if let Some(name) = &config.client_name {
        ask(link, &[b"CLIENT", b"SETNAME", name.as_bytes()], Step::Name, now);
    }
    the_rest(link, config, now)
}

fn the_rest(link: &mut Link, config: &Config, now: Micros) -> Progress {
    if config.database != 0 && link.handshake.peer != Peer::Sentinel {
        let number = itoa::Buffer::new().format(config.database).to_owned();
        ask(link, &[b"SELECT", number.as_bytes()], Step::Select, now);
    }
    if link.handshake.peer == Peer::Primary {
        ask(link, &[b"ROLE"], Step::Role, now);
    }
    settled(link)
}

fn ask(link: &mut Link, words: &[&[u8]], step: Step, now: Micros) {
    link.handshake.open += 1;
    link.push_words(words, Asked::Step(step), now);
}

fn settled(link: &Link) -> Progress {
    if link.handshake.open == 0 { Progress::Done } else { Progress::Waiting }
}

/// Redis repeats the words of a command that it does not know, and one of them may be the password.
fn refused(text: &[u8]) -> Progress {
    let end = memchr::memmem::find(text, b", with args").unwrap_or(text.len());
    Progress::Failed(LinkError::Refused { code: Code::of(text), text: text[..end].to_vec() })
}
