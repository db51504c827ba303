//! One connection: bytes to send, commands that wait for their reply, and the way up and down.
//!
//! ```text
//!           connect            connected          last step answered
//!   Down ────────────► Connecting ────────► Handshake ────────► Up
//!    ▲  after a pause       │                   │               │
//!    └──────────────────────┴───────────────────┴───────────────┘
//!                failed, closed, too late, protocol broken
//! ```
//!
//! Replies carry no name: the n-th reply answers the n-th command. So whatever is written leaves an [`Entry`] in
//! `asked`, and whatever arrives takes the oldest; an entry whose call has ended meanwhile still takes its reply, and
//! thus a late reply never reaches another call. A connection that lost count is closed.
//!
//! Offsets count the plain bytes of a connection from its start. An entry ends at an offset, and bytes below `offered`
//! have been shown to the caller for sending: what ends above was certainly not executed.

mod handshake;

use std::collections::VecDeque;

pub(crate) use self::handshake::{Handshake, Progress, Step, answered, begin};
use crate::{
    client::CallId,
    clock::{Chance, Micros},
    command,
    config::{Address, Config},
    error::LinkError,
    reply::Scanner,
    tls::{Tls, TlsClient},
};

/// One connection of one link: a link that connects anew has the same index and another generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LinkId {
    index: u16,
    generation: u32,
}

impl LinkId {
    /// A number below [`crate::Client::links_max`], for tables by link.
    pub fn index(self) -> usize {
        usize::from(self.index)
    }

    /// Which connection of the link.
    pub fn generation(self) -> u32 {
        self.generation
    }
}

/// What a command in `asked` was for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asked {
    Call(CallId),
    /// A step of the handshake.
    Step(Step),
    /// The next command may go to a slot that is being moved.
    Asking,
    /// A script to be loaded.
    Script,
    /// CLUSTER SHARDS.
    Shards,
    /// CLUSTER SLOTS.
    Slots,
    /// SENTINEL get-master-addr-by-name.
    Master,
}

/// A command that waits for its reply.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    pub(crate) asked: Asked,
    /// When it was written.
    pub(crate) at: Micros,
    /// The offset of its end.
    pub(crate) end: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// No connection; the next attempt is due then, if the link is wanted.
    Down {
        retry_at: Micros,
    },
    Connecting {
        until: Micros,
    },
    Handshake {
        until: Micros,
    },
    Up,
}

/// A node and the connection to it.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) address: Address,
    /// The address as text.
    pub(crate) name: String,
    index: u16,
    generation: u32,
    pub(crate) state: State,
    /// Whether it is to be up.
    pub(crate) wanted: bool,
    /// Why it is not up, or was not the last time.
    pub(crate) problem: Option<LinkError>,
    /// Attempts that failed since it was up.
    failures: u32,
    pub(crate) handshake: Handshake,
    pub(crate) tls: Option<Box<Tls>>,

    /// Plain bytes to send; those below `head` are sent.
    output: Vec<u8>,
    head: usize,
    /// The offset of the end of `output`.
    end: u64,
    /// The offset below which bytes have been shown for sending.
    offered: u64,
    /// Whether it is in the list of links that have something to send.
    pub(crate) listed: bool,
    pub(crate) asked: VecDeque<Entry>,
    /// Calls for when it is up.
    pub(crate) waiting: Vec<CallId>,
    /// By script: the offset of the end of the command that loaded it; 0 if none did.
    pub(crate) loaded: Vec<u64>,

    /// The front of a reply of which the rest is missing.
    pub(crate) partial: Vec<u8>,
    pub(crate) scanner: Scanner,
    /// Decrypted bytes.
    pub(crate) plain: Vec<u8>,
}

impl Link {
    pub(crate) fn new(index: u16, address: Address, scripts: usize) -> Self {
        Self {
            name: address.to_string(),
            address,
            index,
            generation: 0,
            state: State::Down { retry_at: Micros(0) },
            wanted: false,
            problem: None,
            failures: 0,
            handshake: Handshake::default(),
            tls: None,
            output: Vec::new(),
            head: 0,
            end: 0,
            offered: 0,
            listed: false,
            asked: VecDeque::new(),
            waiting: Vec::new(),
            loaded: vec![0; scripts],
            partial: Vec::new(),
            scanner: Scanner::default(),
            plain: Vec::new(),
        }
    }

    /// Gives the index of a link that nobody needs to another node.
    pub(crate) fn rename(&mut self, address: Address) {
        self.name = address.to_string();
        self.address = address;
        self.problem = None;
        self.failures = 0;
        self.state = State::Down { retry_at: Micros(0) };
    }

    #[inline]
    pub(crate) fn id(&self) -> LinkId {
        LinkId { index: self.index, generation: self.generation }
    }

    #[inline]
    pub(crate) fn is_up(&self) -> bool {
        self.state == State::Up
    }

    /// Whether a connection exists or is being made.
    pub(crate) fn is_open(&self) -> bool {
        !matches!(self.state, State::Down { .. })
    }

    /// Whether so many bytes and one more command have room.
    #[inline]
    pub(crate) fn has_room(&self, bytes: usize, config: &Config) -> bool {
        let encrypted = self.tls.as_ref().map_or(0, |tls| tls.waiting());
        self.output.len() - self.head + encrypted + bytes <= config.output_bytes_max
            && self.asked.len() < config.in_flight_max
    }

    /// Writes a command.
    #[inline]
    pub(crate) fn push(&mut self, command: &[u8], asked: Asked, now: Micros) {
        self.output.extend_from_slice(command);
        self.end += command.len() as u64;
        self.asked.push_back(Entry { asked, at: now, end: self.end });
    }

    /// Writes a command that is not encoded yet.
    pub(crate) fn push_words(&mut self, words: &[&[u8]], asked: Asked, now: Micros) {
        let start = self.output.len();
        command::append(&mut self.output, words);
        self.end += (self.output.len() - start) as u64;
        self.asked.push_back(Entry { asked, at: now, end: self.end });
    }

    /// Loads a script, unless the command written at that offset comes before a load that was written already.
    pub(crate) fn load(&mut self, script: usize, command: &[&[u8]], asked_end: u64, now: Micros) -> bool {
        if self.loaded[script] > asked_end {
            return false;
        }
        self.push_words(command, Asked::Script, now);
        self.loaded[script] = self.end;
        true
    }

    /// Whether that command may have reached the peer.
    pub(crate) fn may_have_left(&self, entry: &Entry) -> bool {
        entry.end <= self.offered
    }

    /// What is to be sent; from now on it counts as possibly sent.
    #[inline]
    pub(crate) fn output(&mut self) -> Result<&[u8], String> {
        self.offered = self.end;
        match &mut self.tls {
            None => Ok(&self.output[self.head..]),
            Some(tls) => {
                tls.encrypt(&mut self.output)?;
                Ok(tls.output())
            }
        }
    }

    /// So many bytes of the output are sent.
    #[inline]
    pub(crate) fn sent(&mut self, bytes: usize) {
        if let Some(tls) = &mut self.tls {
            let output = tls.output();
            output.drain(..bytes.min(output.len()));
            return;
        }
        self.head = (self.head + bytes).min(self.output.len());
        if self.head == self.output.len() {
            self.output.clear();
            self.head = 0;
        } else if self.head > self.output.len() / 2 {
            // At most as many bytes move as were sent since the last move.
            self.output.drain(..self.head);
            self.head = 0;
        }
    }

    /// Hands over the whole output in exchange for an empty buffer. All of it counts as sent.
    pub(crate) fn swap_output(&mut self, buffer: &mut Vec<u8>) -> Result<(), String> {
        buffer.clear();
        self.offered = self.end;
        if let Some(tls) = &mut self.tls {
            tls.encrypt(&mut self.output)?;
            std::mem::swap(tls.output(), buffer);
            return Ok(());
        }
        if self.head > 0 {
            self.output.drain(..self.head);
            self.head = 0;
        }
        std::mem::swap(&mut self.output, buffer);
        Ok(())
    }

    /// Starts an attempt to connect.
    pub(crate) fn connect(&mut self, until: Micros) -> LinkId {
        self.generation = self.generation.wrapping_add(1);
        self.state = State::Connecting { until };
        self.listed = false;
        self.id()
    }

    /// The connection is made: TLS and the handshake begin.
    pub(crate) fn connected(&mut self, tls: Option<&TlsClient>, until: Micros) -> Result<(), String> {
        self.state = State::Handshake { until };
        self.tls = match (tls, &self.address) {
            (Some(tls), Address::Tcp { .. }) => Some(Box::new(tls.connect(&self.address)?)),
            _ => None,
        };
        Ok(())
    }

    /// The last step of the handshake is done.
    pub(crate) fn up(&mut self) {
        self.state = State::Up;
        self.problem = None;
        self.failures = 0;
    }

    /// The connection is gone: forgets everything but the calls in `asked` and `waiting`, which are the caller's to
    /// take. The pause doubles with each failure, and lasts anything between half of that and all of it; the first
    /// attempt after the link was up comes sooner, at any time within the shortest pause.
    pub(crate) fn down(&mut self, why: LinkError, now: Micros, config: &Config, chance: &mut Chance) {
        let min = Micros::from_millis(config.backoff_ms_min.max(1)).0;
        let pause = if self.is_up() {
            chance.below(min + 1)
        } else {
            let doubled = min.saturating_mul(1 << self.failures.min(30));
            let longest = doubled.min(config.backoff_max().0);
            self.failures = self.failures.saturating_add(1);
            longest / 2 + chance.below(longest / 2 + 1)
        };
        self.state = State::Down { retry_at: now + Micros(pause) };
        self.problem = Some(why);
        self.tls = None;
        self.output.clear();
        self.head = 0;
        self.end = 0;
        self.offered = 0;
        self.loaded.fill(0);
        self.partial.clear();
        self.plain.clear();
        self.scanner = Scanner::default();
        self.handshake = Handshake::default();
    }

    /// Whether the next attempt is the first since it was up.
    pub(crate) fn may_come_up(&self) -> bool {
        self.failures == 0
    }

    /// Lets the next attempt begin at once.
    pub(crate) fn hurry(&mut self) {
        if let State::Down { retry_at } = &mut self.state
            && self.failures == 0
        {
            *retry_at = Micros(0);
        }
    }

    /// When the link wants attention.
    pub(crate) fn next_tick(&self, config: &Config) -> Micros {
        match self.state {
            State::Down { retry_at } if self.wanted => retry_at,
            State::Down { .. } => Micros::NEVER,
            State::Connecting { until } | State::Handshake { until } => until,
            State::Up => match self.asked.front() {
                Some(oldest) => oldest.at + Micros::from_millis(config.stall_ms),
                None => Micros::NEVER,
            },
        }
    }
}
