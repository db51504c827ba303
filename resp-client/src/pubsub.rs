//! Pub/Sub: one connection that hears what is published.
//!
//! A [`Subscriber`] is sans-I/O like the client, and simpler: its owner connects to an address, reports
//! [`Subscriber::connected`], carries the bytes, and connects anew after an error, when it subscribes again by itself.
//! Messages that were published in between are gone, so an owner asks for the state of things after each
//! [`Event::Subscribed`].
//!
//! With RESP3 messages come as pushes, with RESP2 as arrays; both look the same here. A peer that is silent is asked for
//! a sign of life, and given up when it gives none.

use crate::{
    clock::Micros,
    config::{Address, Config},
    error::{Code, LinkError},
    link::{self, Asked, Link, Progress},
    reply::{ProtocolError, Reply},
    tls::{TlsClient, TlsError},
};

/// What a subscriber hears.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// All channels are subscribed: from now on nothing is missed until the connection ends.
    Subscribed,
    /// A message.
    Message {
        /// The channel.
        channel: &'a [u8],
        /// What was published.
        payload: &'a [u8],
    },
}

/// One connection that hears what is published on some channels.
#[derive(Debug)]
pub struct Subscriber {
    config: Config,
    tls: Option<TlsHolder>,
    link: Link,
    channels: Vec<Vec<u8>>,
    /// Channels that are subscribed.
    subscribed: usize,
    /// When something arrived last.
    heard_at: Micros,
    /// Whether a sign of life was asked for since.
    asked: bool,
}

/// rustls's settings, which print much and say little.
struct TlsHolder(TlsClient);

impl std::fmt::Debug for TlsHolder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TlsClient")
    }
}

impl Subscriber {
    /// A subscriber to these channels at a node of the settings ([`Config::addresses`]), or at any other: in a cluster
    /// all nodes hear all messages.
    pub fn new(config: Config, address: Address, channels: &[&[u8]]) -> Result<Self, TlsError> {
        let tls = config.tls.as_ref().map(TlsClient::new).transpose()?.map(TlsHolder);
        Ok(Self {
            config,
            tls,
            link: Link::new(0, address, 0),
            channels: channels.iter().map(|channel| channel.to_vec()).collect(),
            subscribed: 0,
            heard_at: Micros(0),
            asked: false,
        })
    }

    /// Where it connects to.
    pub fn address(&self) -> &Address {
        &self.link.address
    }

    /// From the next connection on it is another node.
    pub fn set_address(&mut self, address: Address) {
        self.link.rename(address);
    }

    /// Whether all channels are subscribed.
    pub fn is_subscribed(&self) -> bool {
        self.link.is_up() && self.subscribed >= self.channels.len()
    }

    /// The connection is gone.
    pub fn disconnected(&mut self) {
        let address = self.link.address.clone();
        self.link = Link::new(0, address, 0);
        self.subscribed = 0;
    }

    /// A new connection is made; whatever was before is forgotten.
    pub fn connected(&mut self, now: Micros) -> Result<(), LinkError> {
        self.disconnected();
        self.heard_at = now;
        self.asked = false;
        self.link.connect(Micros::NEVER);
        let tls = self.tls.as_ref().map(|tls| &tls.0);
        self.link.connected(tls, Micros::NEVER).map_err(LinkError::Tls)?;
        let progress = link::begin(&mut self.link, &self.config, now);
        self.progress(progress, now)
    }

    /// What is to be sent.
    pub fn output(&mut self) -> &[u8] {
        self.link.output().unwrap_or_default()
    }

    /// So many bytes of the output are sent.
    pub fn sent(&mut self, bytes: usize) {
        self.link.sent(bytes);
    }

    /// Bytes arrived. After an error the connection is to be closed, and made anew after a pause.
    pub fn received(&mut self, bytes: &[u8], now: Micros, on: &mut impl FnMut(Event<'_>)) -> Result<(), LinkError> {
        self.heard_at = now;
        self.asked = false;
        let mut plain = std::mem::take(&mut self.link.plain);
        let decrypted = match &mut self.link.tls {
            Some(tls) => tls.decrypt(bytes, &mut plain),
            None => {
                plain.extend_from_slice(bytes);
                Ok(())
            }
        };
        let mut at = 0;
        while let Some(length) =
            self.link.scanner.scan(&plain[at..], &self.config.limits).map_err(LinkError::Protocol)?
        {
            self.heard(&Reply::of_whole(&plain[at..at + length]), now, on)?;
            at += length;
        }
        plain.drain(..at);
        self.link.plain = plain;
        decrypted.map_err(LinkError::Tls)
    }

    /// To be called a few times a second or less: asks a silent peer for a sign of life, and says when there was none.
    pub fn tick(&mut self, now: Micros) -> Result<(), LinkError> {
        let silent = now.since(self.heard_at);
        if !self.link.is_up() {
            let handshake = Micros::from_millis(self.config.handshake_ms);
            let late = self.link.is_open() && silent > handshake;
            return if late { Err(LinkError::HandshakeTimeout) } else { Ok(()) };
        }
        let patience = Micros::from_millis(self.config.stall_ms);
        if self.asked && silent > patience + patience {
            return Err(LinkError::Stalled);
        }
        if !self.asked && silent > patience {
            self.asked = true;
            self.link.push_words(&[b"PING"], Asked::Asking, now);
            self.link.asked.clear();
        }
        Ok(())
    }

    fn heard(&mut self, reply: &Reply<'_>, now: Micros, on: &mut impl FnMut(Event<'_>)) -> Result<(), LinkError> {
        if !self.link.is_up() {
            let Some(Asked::Step(step)) = self.link.asked.pop_front().map(|entry| entry.asked) else {
                return Err(LinkError::Protocol(ProtocolError::Unasked));
            };
            let progress = link::answered(&mut self.link, step, reply, &self.config, now);
            return self.progress(progress, now);
        }
        if let Reply::Error(text) = reply {
            return Err(LinkError::Refused { code: Code::of(text), text: text.to_vec() });
        }
        // Anything else but these is a sign of life.
        let Some(mut items) = reply.items() else { return Ok(()) };
        let mut word = || items.next().and_then(|item| item.as_bytes());
        match word() {
            Some(b"message") => {
                let (Some(channel), Some(payload)) = (word(), word()) else {
                    return Err(LinkError::Protocol(ProtocolError::Unexpected));
                };
                on(Event::Message { channel, payload });
            }
            Some(b"subscribe") => {
                self.subscribed += 1;
                if self.subscribed == self.channels.len() {
                    on(Event::Subscribed);
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn progress(&mut self, progress: Progress, now: Micros) -> Result<(), LinkError> {
        match progress {
            Progress::Waiting => Ok(()),
            Progress::Failed(why) => Err(why),
            Progress::Done => {
                self.link.up();
                let mut words: Vec<&[u8]> = vec![b"SUBSCRIBE"];
                words.extend(self.channels.iter().map(|channel| &channel[..]));
                if words.len() > 1 {
                    self.link.push_words(&words, Asked::Asking, now);
                }
                // Nothing is matched from here on: one command has many answers, and messages have no command.
                self.link.asked.clear();
                Ok(())
            }
        }
    }
}
