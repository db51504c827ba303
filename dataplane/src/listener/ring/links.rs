//! The connections to the store's shards, on the same ring as the clients'.
//!
//! What is sent and when, and what the bytes mean, is the RESP client's business (through the engine); here its links get
//! sockets. A link is a number that the client gives out anew for each attempt, so an answer to one that is gone finds
//! nothing.

use std::{
    io,
    net::{Shutdown, SocketAddr},
    os::fd::OwnedFd,
};

use resp_client::{Action, Address, LinkId};
use slab::Slab;
use socket2::{Domain, SockAddr, Socket, Type};

use super::{
    Driver,
    uring::{Completion, GENERATION_MASK, Kind, SendBuffer, Tag},
};
use crate::listener::{names::Names, sockets};

/// A link's socket.
pub(super) struct LinkSocket {
    link: LinkId,
    /// `None` while its host's name is looked up.
    descriptor: Option<OwnedFd>,
    generation: u32,
    /// The kernel reads it until the connect has completed.
    peer: Option<Box<SockAddr>>,
    /// Where to try next if that fails.
    others: Vec<SocketAddr>,
    send: SendBuffer,
    connecting: bool,
    receiving: bool,
    /// Shut down; kept until its last completion.
    leaving: bool,
}

/// All links of a core.
pub(super) struct Links {
    sockets: Slab<LinkSocket>,
    /// By the link's index: its socket's slot.
    slots: Vec<Option<usize>>,
    names: Names,
    generation: u32,
}

impl Links {
    pub(super) fn new() -> Self {
        Self { sockets: Slab::new(), slots: Vec::new(), names: Names::new(), generation: 0 }
    }

    pub(super) fn has_work(&self) -> bool {
        self.names.has_answer()
    }

    /// The slot of a link that is in use.
    fn slot(&self, link: LinkId) -> Option<usize> {
        let slot = self.slots.get(link.index()).copied().flatten()?;
        self.sockets.get(slot).is_some_and(|socket| socket.link == link && !socket.leaving).then_some(slot)
    }

    fn insert(&mut self, link: LinkId) -> usize {
        self.generation = (self.generation + 1) & GENERATION_MASK;
        let slot = self.sockets.insert(LinkSocket {
            link,
            descriptor: None,
            generation: self.generation,
            peer: None,
            others: Vec::new(),
            send: SendBuffer::default(),
            connecting: false,
            receiving: false,
            leaving: false,
        });
        if self.slots.len() <= link.index() {
            self.slots.resize(link.index() + 1, None);
        }
        self.slots[link.index()] = Some(slot);
        slot
    }

    fn of(&mut self, tag: Tag) -> Option<&mut LinkSocket> {
        self.sockets.get_mut(tag.slot as usize).filter(|socket| socket.generation == tag.generation)
    }
}

impl Driver {
    /// Does what the client wants done with its links: connect, close, send.
    pub(super) fn move_links(&mut self) -> io::Result<()> {
        while let Some(action) = self.engine.next_link_action() {
            match action {
                Action::Connect { link, address } => self.connect_link(link, address)?,
                Action::Close { link } => {
                    if let Some(slot) = self.links.slot(link) {
                        self.leave_link(slot);
                    }
                }
            }
        }
        while let Some((link, found)) = self.links.names.next() {
            let Some(slot) = self.links.slot(link) else { continue };
            match found {
                Ok(addresses) => self.try_addresses(slot, addresses)?,
                Err(error) => self.link_failed(slot, &error),
            }
        }
        while let Some(link) = self.engine.next_link_output() {
            if let Some(slot) = self.links.slot(link) {
                self.send_link(slot)?;
            }
        }
        Ok(())
    }

    fn connect_link(&mut self, link: LinkId, address: Address) -> io::Result<()> {
        let slot = self.links.insert(link);
        match address {
            Address::Tcp { host, port } => {
                self.links.names.ask(link, &host, port, &self.port.placement, self.port.core);
                Ok(())
            }
            Address::Unix(path) => match SockAddr::unix(&path) {
                Ok(peer) => self.try_address(slot, Domain::UNIX, peer),
                Err(error) => {
                    self.link_failed(slot, &error);
                    Ok(())
                }
            },
        }
    }

    /// Connects to the first of these addresses that takes it.
    fn try_addresses(&mut self, slot: usize, mut addresses: Vec<SocketAddr>) -> io::Result<()> {
        if addresses.is_empty() {
            self.link_failed(slot, &io::Error::other("the host has no address"));
            return Ok(());
        }
        let first = addresses.remove(0);
        self.links.sockets[slot].others = addresses;
        self.try_address(slot, Domain::for_address(first), first.into())
    }

    fn try_address(&mut self, slot: usize, domain: Domain, peer: SockAddr) -> io::Result<()> {
        let descriptor: OwnedFd = match Socket::new(domain, Type::STREAM, None) {
            Ok(socket) => socket.into(),
            Err(error) => {
                self.link_failed(slot, &error);
                return Ok(());
            }
        };
        sockets::send_at_once(&descriptor);
        let socket = &mut self.links.sockets[slot];
        socket.connecting = true;
        let peer = socket.peer.insert(Box::new(peer));
        let descriptor = socket.descriptor.insert(descriptor);
        self.uring.connect(descriptor, peer, slot as u32, socket.generation)
    }

    /// The kernel is done with an operation of a link.
    pub(super) fn link_completed(&mut self, completion: Completion) -> io::Result<()> {
        let Some(socket) = self.links.of(completion.tag) else { return Ok(()) };
        let slot = completion.tag.slot as usize;
        match completion.tag.kind {
            Kind::LinkConnect => {
                (socket.connecting, socket.peer) = (false, None);
                self.link_connected(slot, completion.result)?;
            }
            Kind::LinkReceive => self.link_received(slot, completion)?,
            _ => match usize::try_from(completion.result) {
                Ok(len) => {
                    socket.send.completed(len);
                    if !socket.leaving {
                        self.send_link(slot)?;
                    }
                }
                Err(_) => {
                    socket.send.completed(0);
                    self.link_closed(slot, completion.result);
                }
            },
        }
        self.reap_link(slot);
        Ok(())
    }

    fn link_connected(&mut self, slot: usize, result: i32) -> io::Result<()> {
        let socket = &mut self.links.sockets[slot];
        if socket.leaving {
            return Ok(());
        }
        if result >= 0 {
            let (link, generation) = (socket.link, socket.generation);
            socket.receiving = true;
            if let Some(descriptor) = &socket.descriptor {
                self.uring.receive(descriptor, Tag { kind: Kind::LinkReceive, generation, slot: slot as u32 })?;
            }
            self.engine.link_connected(link);
            return Ok(());
        }
        let others = std::mem::take(&mut socket.others);
        if others.is_empty() {
            self.link_failed(slot, &io::Error::from_raw_os_error(-result));
            return Ok(());
        }
        self.try_addresses(slot, others)
    }

    fn link_received(&mut self, slot: usize, completion: Completion) -> io::Result<()> {
        let socket = &mut self.links.sockets[slot];
        let (link, generation, leaving) = (socket.link, socket.generation, socket.leaving);
        if let Some(id) = completion.buffer {
            if let Ok(len) = usize::try_from(completion.result)
                && !leaving
                && let Some(bytes) = self.uring.buffers.bytes(id, len)
            {
                self.engine.link_bytes_in(link, bytes);
            }
            self.uring.buffers.give(id);
        }
        if completion.more {
            return Ok(());
        }
        let Some(socket) = self.links.sockets.get_mut(slot) else { return Ok(()) };
        socket.receiving = false;
        match completion.result {
            _ if socket.leaving => {}
            // Out of buffers for a moment, or the kernel's own choice.
            len if len > 0 || -len == libc::ENOBUFS => {
                socket.receiving = true;
                if let Some(descriptor) = &socket.descriptor {
                    let tag = Tag { kind: Kind::LinkReceive, generation, slot: slot as u32 };
                    self.uring.receive(descriptor, tag)?;
                }
            }
            result => self.link_closed(slot, result),
        }
        Ok(())
    }

    /// Sends what the client has for a link, unless a send is under way: then it goes with the next.
    fn send_link(&mut self, slot: usize) -> io::Result<()> {
        let socket = &mut self.links.sockets[slot];
        let Some(descriptor) = &socket.descriptor else { return Ok(()) };
        if socket.send.is_in_flight() || socket.connecting {
            return Ok(());
        }
        if socket.send.bytes.is_empty() {
            self.engine.take_link_output(socket.link, &mut socket.send.bytes);
        }
        if socket.send.bytes.is_empty() {
            return Ok(());
        }
        let tag = Tag { kind: Kind::LinkSend, generation: socket.generation, slot: slot as u32 };
        self.uring.send(descriptor, &mut socket.send, tag)
    }

    fn link_failed(&mut self, slot: usize, error: &io::Error) {
        let link = self.links.sockets[slot].link;
        self.engine.link_failed(link, &error.to_string());
        self.leave_link(slot);
    }

    fn link_closed(&mut self, slot: usize, result: i32) {
        let socket = &self.links.sockets[slot];
        if !socket.leaving {
            let why =
                if result == 0 { "by the peer".into() } else { io::Error::from_raw_os_error(-result).to_string() };
            self.engine.link_closed(socket.link, &why);
            self.leave_link(slot);
        }
    }

    fn leave_link(&mut self, slot: usize) {
        let socket = &mut self.links.sockets[slot];
        socket.leaving = true;
        if let Some(descriptor) = &socket.descriptor {
            // Makes the receive complete, and a connect or send that waits fail.
            let _ = socket2::SockRef::from(descriptor).shutdown(Shutdown::Both);
        }
        self.reap_link(slot);
    }

    fn reap_link(&mut self, slot: usize) {
        let Some(socket) = self.links.sockets.get(slot) else { return };
        if socket.leaving && !socket.connecting && !socket.receiving && !socket.send.is_in_flight() {
            let socket = self.links.sockets.remove(slot);
            if self.links.slots.get(socket.link.index()) == Some(&Some(slot)) {
                self.links.slots[socket.link.index()] = None;
            }
        }
    }
}
