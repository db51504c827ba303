//! The ring transport: one task per core moves the bytes of all its connections through a private io_uring.
//!
//! A round is one system call: it hands over everything that the last round queued (sends, receives to start, accepts)
//! and runs what the kernel has deferred meanwhile. Then all completions are read, all bytes go to the engine, and what it
//! answers is queued for the next round.
//!
//! ```text
//!   loop:
//!     enter                        submit what is queued, run deferred work
//!     read completions             bytes to the engine; accepted sockets placed
//!     engine.settle                decide, encode
//!     queue sends
//!     nothing happened?            look at shared memory for busy_poll_us (no system call), then sleep in glommio on
//!                                  the doorbell, an eventfd that the ring rings only while it is switched on
//! ```
//!
//! Switching the doorbell on and looking once more before sleeping is what makes no wake-up get lost: a completion that
//! came before is seen by the look, one that comes after rings.
//!
//! `uring` and `buffers` hold all that is unsafe; `sockets` of this module is what is known of each connection.

mod buffers;
mod links;
mod uring;

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    time::Duration,
};

use slab::Slab;

use self::{
    links::Links,
    uring::{Completion, GENERATION_MASK, Kind, SendBuffer, Tag, Uring},
};
use super::{
    Face, GIVE_BACK_MS, GOODBYE_BYTES_MAX, GOODBYE_MS, Port, QUIET_MS, STUCK_MS, TransportSettings, park,
    park::Pulse,
    placement::{Placed, Placement},
    sockets,
};
use crate::{
    clock::Now,
    engine::{ConnId, Engine, Flow},
    lifecycle::Stage,
};

/// glommio's own timers and sockets get a turn at least this often while the driver is busy.
const YIELD_EVERY_US: u64 = 500;
/// Receive buffers of a ring that only asks what the kernel can do.
const PROBE_BUFFERS: u16 = 16;
/// See [`PROBE_BUFFERS`].
const PROBE_BUFFER_BYTES: u32 = 4096;
/// Accepts that each listener has in hand. Every one completes once and is queued anew, so no more sockets than these
/// are taken from the kernel before it is decided whether there is room for them; a multishot accept would take as many
/// as are waiting, and with them every file that the process may open. `files` keeps that many spare.
const ACCEPTS_AT_ONCE: u32 = 8;
/// How often connections are looked over for timeouts, and accepts that failed are tried again.
const SURVEY_EVERY_MS: u64 = 250;

/// One connection's socket.
struct Socket {
    descriptor: OwnedFd,
    generation: u32,
    send: SendBuffer,
    receiving: bool,
    /// A receive is being stopped because the client does not read.
    stopping: bool,
    /// The peer has sent everything that it will.
    finished: bool,
    /// Shut down; kept until its last completion.
    leaving: bool,
    /// When our side of the connection was closed after the last reply, if it was.
    said_goodbye_at_ms: Option<u64>,
    /// What came since and was thrown away.
    discarded_bytes: usize,
    heard_at_ms: u64,
    /// Since when replies wait without any of them being taken; only meaningful while a send is in flight.
    waiting_since_ms: u64,
    /// What the client had not taken when it was last suspected of taking nothing.
    untaken_bytes: u32,
}

impl Socket {
    /// Closes our half of a connection that is owed nothing: closing outright would throw away replies that the client has
    /// not read yet.
    fn say_goodbye(&mut self, now_ms: u64) {
        if self.said_goodbye_at_ms.is_none() {
            self.said_goodbye_at_ms = Some(now_ms);
            let _ = socket2::SockRef::from(&self.descriptor).shutdown(std::net::Shutdown::Write);
        }
    }
}

/// The driver of one core.
pub struct Driver {
    port: Port,
    engine: Engine,
    uring: Uring,
    sockets: Slab<Socket>,
    links: Links,
    completions: Vec<Completion>,
    now: Now,
    generation: u32,
    accepting: bool,
    /// Accepts that the kernel has in hand.
    accepts: usize,
    /// Accepts that failed; the next survey tries again.
    accepts_to_retry: Vec<Tag>,
    surveyed_at_ms: u64,
    /// The server leaves, and the time to read requests is over.
    is_deaf: bool,
    happened: bool,
}

impl Driver {
    /// Whether this kernel can do what the ring needs.
    ///
    /// # Errors
    ///
    /// What it cannot do.
    pub fn probe(settings: &TransportSettings) -> io::Result<()> {
        let placement = Placement::new(1, 1)?;
        // Few and small buffers: their memory is never given back.
        let (entries, doorbell) = (settings.ring_entries, placement.doorbell(0).descriptor());
        Uring::new(entries, PROBE_BUFFERS, PROBE_BUFFER_BYTES, doorbell).map(drop)
    }

    /// Sets up the ring on this thread.
    ///
    /// # Errors
    ///
    /// When the kernel has not enough of something.
    pub fn new(port: Port, engine: Engine) -> io::Result<Self> {
        let doorbell = port.placement.doorbell(port.core).descriptor();
        let settings = &port.settings;
        let uring = Uring::new(settings.ring_entries, settings.ring_buffers, settings.ring_buffer_bytes, doorbell)?;
        Ok(Self {
            now: port.clock.now(),
            port,
            engine,
            uring,
            sockets: Slab::new(),
            links: Links::new(),
            completions: Vec::with_capacity(1024),
            generation: 0,
            accepting: false,
            accepts: 0,
            accepts_to_retry: Vec::new(),
            surveyed_at_ms: 0,
            is_deaf: false,
            happened: false,
        })
    }

    /// Serves until the lifecycle says that it is over.
    ///
    /// # Errors
    ///
    /// When the ring itself fails, which no client can cause.
    pub async fn run(mut self, pulse: &Pulse) -> io::Result<()> {
        self.accepting = true;
        for slot in 0..self.port.listeners.len() {
            for generation in 0..ACCEPTS_AT_ONCE {
                self.accept(Tag { kind: Kind::Accept, generation, slot: slot as u32 })?;
            }
        }
        let mut yielded_at_us = self.port.clock.micros();
        loop {
            self.round()?;
            if self.is_over()? {
                return Ok(());
            }
            if !self.happened {
                self.rest(pulse).await?;
            }
            let now_us = self.port.clock.micros();
            if now_us.saturating_sub(yielded_at_us) >= YIELD_EVERY_US {
                glommio::timer::sleep(Duration::from_nanos(1)).await;
                yielded_at_us = self.port.clock.micros();
            }
        }
    }

    fn round(&mut self) -> io::Result<()> {
        self.uring.enter()?;
        self.now = self.port.clock.now();
        self.engine.tick(self.now);
        let closing = self.port.lifecycle.stage() == Stage::Closing;
        self.is_deaf = self.port.lifecycle.is_deaf(self.now.mono_ms);
        self.happened = false;
        while let Some((descriptor, face)) = self.port.placement.adopt(self.port.core) {
            self.open(descriptor, face)?;
        }
        let mut completions = std::mem::take(&mut self.completions);
        self.uring.drain(&mut completions);
        for completion in completions.drain(..) {
            self.happened = true;
            self.complete(completion)?;
        }
        self.completions = completions;
        self.flush()?;
        if closing || self.now.mono_ms.saturating_sub(self.surveyed_at_ms) >= SURVEY_EVERY_MS {
            self.survey(closing)?;
        }
        Ok(())
    }

    /// With nothing to do: looks for work for a while, then sleeps.
    async fn rest(&mut self, pulse: &Pulse) -> io::Result<()> {
        let began_us = self.port.clock.micros();
        while self.port.clock.micros().saturating_sub(began_us) < self.port.settings.busy_poll_us {
            if self.has_work() {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        self.uring.ring_doorbell(true);
        self.uring.enter()?;
        if !self.has_work() {
            pulse.be_eager(self.engine.needs_ticks());
            let doorbell = self.port.placement.doorbell(self.port.core);
            park::sleep(doorbell.descriptor().as_fd(), Some(pulse)).await;
            doorbell.silence();
        }
        self.uring.ring_doorbell(false);
        Ok(())
    }

    fn has_work(&mut self) -> bool {
        self.uring.has_work() || self.port.placement.has_waiting(self.port.core) || self.links.has_work()
    }

    fn complete(&mut self, completion: Completion) -> io::Result<()> {
        match completion.tag.kind {
            Kind::Accept => self.accepted(completion),
            Kind::Receive => self.received(completion),
            Kind::Send => self.sent(completion),
            Kind::Cancel => Ok(()),
            Kind::LinkConnect | Kind::LinkReceive | Kind::LinkSend => self.link_completed(completion),
        }
    }

    /// Queues one accept. Its slot is that of the listener, its generation tells it from the others there.
    fn accept(&mut self, tag: Tag) -> io::Result<()> {
        self.accepts += 1;
        self.uring.accept(&self.port.listeners[tag.slot as usize].0, tag)
    }

    fn accepted(&mut self, completion: Completion) -> io::Result<()> {
        self.accepts -= 1;
        if completion.result >= 0 {
            let (descriptor, slot) = (uring_descriptor(completion.result), completion.tag.slot as usize);
            match self.port.listeners.get(slot) {
                Some(&(_, face)) => self.place(descriptor, face)?,
                // Its listener is closed, as it is now.
                None => drop(descriptor),
            }
        }
        if !self.accepting {
            return Ok(());
        }
        if completion.result >= 0 {
            return self.accept(completion.tag);
        }
        // Out of files, most likely. Trying again at once would only burn the core.
        if self.accepts_to_retry.is_empty() {
            tracing::warn!(error = %io::Error::from_raw_os_error(-completion.result), "accept failed");
        }
        self.accepts_to_retry.push(completion.tag);
        Ok(())
    }

    fn place(&mut self, descriptor: OwnedFd, face: Face) -> io::Result<()> {
        match self.port.placement.place(self.port.core, descriptor, face) {
            Placed::Here(descriptor) => self.open(descriptor, face),
            Placed::There => Ok(()),
            Placed::Refused(descriptor) => {
                self.engine.counters().connections_refused.add(1);
                sockets::refuse(&descriptor, face);
                Ok(())
            }
        }
    }

    fn open(&mut self, descriptor: OwnedFd, face: Face) -> io::Result<()> {
        self.happened = true;
        let peer = if face == Face::Web { sockets::peer(&descriptor) } else { None };
        sockets::send_at_once(&descriptor);
        self.generation = (self.generation + 1) & GENERATION_MASK;
        let slot = self.sockets.insert(Socket {
            descriptor,
            generation: self.generation,
            send: SendBuffer::default(),
            receiving: true,
            stopping: false,
            finished: false,
            leaving: false,
            said_goodbye_at_ms: None,
            discarded_bytes: 0,
            heard_at_ms: self.now.mono_ms,
            waiting_since_ms: self.now.mono_ms,
            untaken_bytes: 0,
        });
        match face {
            Face::Resp => self.engine.opened(ConnId(slot as u32)),
            Face::Web => self.engine.opened_web(ConnId(slot as u32), peer),
        }
        let tag = Tag { kind: Kind::Receive, generation: self.generation, slot: slot as u32 };
        self.uring.receive(&self.sockets[slot].descriptor, tag)
    }

    /// The socket that a completion is for, unless its slot has another owner by now.
    fn socket(&mut self, tag: Tag) -> Option<&mut Socket> {
        self.sockets.get_mut(tag.slot as usize).filter(|socket| socket.generation == tag.generation)
    }

    fn received(&mut self, completion: Completion) -> io::Result<()> {
        let conn = ConnId(completion.tag.slot);
        if let Some(id) = completion.buffer {
            if let (Ok(len), Some(socket)) = (usize::try_from(completion.result), self.sockets.get_mut(conn.index()))
                && socket.generation == completion.tag.generation
                && !socket.leaving
                && let Some(bytes) = self.uring.buffers.bytes(id, len)
            {
                socket.heard_at_ms = self.now.mono_ms;
                if self.is_deaf || socket.said_goodbye_at_ms.is_some() {
                    socket.discarded_bytes += len;
                } else {
                    self.engine.bytes_in(conn, bytes);
                }
            }
            self.uring.buffers.give(id);
        }
        let Some(socket) = self.socket(completion.tag) else {
            return Ok(());
        };
        if socket.discarded_bytes > GOODBYE_BYTES_MAX && !socket.leaving {
            socket.receiving = completion.more;
            return self.leave(conn);
        }
        if completion.more {
            return Ok(());
        }
        socket.receiving = false;
        let stopped = std::mem::take(&mut socket.stopping);
        match completion.result {
            // The peer has sent its last byte; it may still read.
            0 => socket.finished = true,
            // Out of buffers for a moment, stopped on purpose, or the kernel's own choice: `attend` goes on from here.
            len if len > 0 => {}
            error if -error == libc::ENOBUFS => {}
            error if -error == libc::ECANCELED && stopped => {}
            _ => return self.leave(conn),
        }
        self.attend(conn)
    }

    fn sent(&mut self, completion: Completion) -> io::Result<()> {
        let conn = ConnId(completion.tag.slot);
        let now_ms = self.now.mono_ms;
        let Some(socket) = self.socket(completion.tag) else {
            return Ok(());
        };
        let Ok(len) = usize::try_from(completion.result) else {
            socket.send.completed(0);
            return self.leave(conn);
        };
        socket.waiting_since_ms = now_ms;
        if socket.send.completed(len) && !self.engine.has_output(conn) {
            let buffer = std::mem::take(&mut self.sockets[conn.index()].send.bytes);
            self.engine.keep(buffer);
        }
        self.attend(conn)
    }

    /// Decides what was read and sees to every connection that this touched.
    fn flush(&mut self) -> io::Result<()> {
        loop {
            self.engine.settle();
            let Some((conn, _)) = self.engine.next_dirty() else {
                // What the store has not answered yet is asked now; what needs no asking comes back at once.
                if self.engine.flush_store() {
                    continue;
                }
                return self.move_links();
            };
            if self.sockets.contains(conn.index()) {
                self.attend(conn)?;
            }
        }
    }

    /// Does what a connection needs next: send, start or stop receiving, close.
    fn attend(&mut self, conn: ConnId) -> io::Result<()> {
        if self.sockets.get(conn.index()).is_some_and(|socket| socket.finished) {
            // Its last requests may have come in this very round; they are answered before it is let go.
            self.engine.settle();
        }
        let Some(socket) = self.sockets.get_mut(conn.index()) else {
            return Ok(());
        };
        if socket.leaving {
            return self.reap(conn);
        }
        if !socket.send.is_in_flight() {
            if socket.send.bytes.is_empty() && self.engine.has_output(conn) {
                self.engine.take_output(conn, &mut socket.send.bytes);
                socket.waiting_since_ms = self.now.mono_ms;
            }
            if !socket.send.bytes.is_empty() {
                let tag = Tag { kind: Kind::Send, generation: socket.generation, slot: conn.0 };
                self.uring.send(&socket.descriptor, &mut socket.send, tag)?;
            }
        }
        let idle = !socket.send.is_in_flight() && !self.engine.owes(conn);
        let flow = self.engine.flow(conn);
        if flow == Flow::Closing && idle {
            socket.say_goodbye(self.now.mono_ms);
        }
        // One that is told goodbye is read from to see when its client has heard it.
        let may_read = flow == Flow::Open || socket.said_goodbye_at_ms.is_some();
        match flow {
            Flow::Open | Flow::Closing if socket.finished && idle => return self.leave(conn),
            Flow::Paused if idle => {
                self.engine.resume(conn);
                self.engine.settle();
                return self.attend(conn);
            }
            Flow::Paused if socket.receiving && !socket.stopping => {
                socket.stopping = true;
                let tag = Tag { kind: Kind::Receive, generation: socket.generation, slot: conn.0 };
                self.uring.cancel(tag)?;
            }
            Flow::Paused => {}
            Flow::Open | Flow::Closing if may_read && !socket.receiving && !socket.finished => {
                socket.receiving = true;
                let tag = Tag { kind: Kind::Receive, generation: socket.generation, slot: conn.0 };
                self.uring.receive(&socket.descriptor, tag)?;
            }
            Flow::Open | Flow::Closing => {}
        }
        Ok(())
    }

    /// Ends a connection; its slot is free after its last completion.
    fn leave(&mut self, conn: ConnId) -> io::Result<()> {
        let socket = &mut self.sockets[conn.index()];
        if !socket.leaving {
            socket.leaving = true;
            // Makes the receive complete, and a send that waits fail.
            let _ = socket2::SockRef::from(&socket.descriptor).shutdown(std::net::Shutdown::Both);
        }
        self.reap(conn)
    }

    fn reap(&mut self, conn: ConnId) -> io::Result<()> {
        let socket = &self.sockets[conn.index()];
        if !socket.receiving && !socket.send.is_in_flight() {
            let mut socket = self.sockets.remove(conn.index());
            self.engine.keep(std::mem::take(&mut socket.send.bytes));
            self.engine.closed(conn);
            self.port.placement.left(self.port.core);
        }
        Ok(())
    }

    /// Looks over all connections for those that have been silent or stuck for too long, and for those that can go
    /// while the server leaves.
    fn survey(&mut self, closing: bool) -> io::Result<()> {
        let now_ms = self.now.mono_ms;
        self.surveyed_at_ms = now_ms;
        self.port.clock.resync();
        while let Some(tag) = self.accepts_to_retry.pop() {
            self.accept(tag)?;
        }
        let settings = self.port.settings;
        let mut at = 0;
        while let Some(slot) = (at..self.sockets.capacity()).find(|&slot| self.sockets.contains(slot)) {
            at = slot + 1;
            let conn = ConnId(slot as u32);
            if closing {
                self.engine.part(conn);
            }
            let owes = self.engine.owes(conn);
            let socket = &mut self.sockets[slot];
            let busy = socket.send.is_in_flight() || owes;
            let silent_ms = now_ms.saturating_sub(socket.heard_at_ms);
            let waits = socket.send.is_in_flight() && now_ms.saturating_sub(socket.waiting_since_ms) >= STUCK_MS;
            if waits && let Some(bytes) = sockets::untaken_bytes(&socket.descriptor) {
                if bytes < socket.untaken_bytes {
                    socket.waiting_since_ms = now_ms;
                }
                socket.untaken_bytes = bytes;
            }
            let stuck_ms = if busy { now_ms.saturating_sub(socket.waiting_since_ms) } else { 0 };
            if let Some(at_ms) = socket.said_goodbye_at_ms {
                // A client that keeps its connection all the same has had time to read.
                if now_ms.saturating_sub(at_ms) >= GOODBYE_MS {
                    self.leave(conn)?;
                }
            } else if settings.stall_timeout_ms > 0 && stuck_ms >= settings.stall_timeout_ms {
                self.engine.counters().connections_stalled.add(u64::from(!socket.leaving));
                self.leave(conn)?;
            } else if self.engine.is_overdue(conn)
                || (settings.idle_timeout_ms > 0 && !busy && silent_ms >= settings.idle_timeout_ms)
            {
                self.engine.counters().connections_idle.add(u64::from(!socket.leaving));
                self.leave(conn)?;
            } else if closing
                && !busy
                // Not silent is whoever has not been heard because there was so much else to do.
                && (self.is_deaf || (silent_ms >= QUIET_MS && !sockets::has_unread(&socket.descriptor)))
            {
                socket.say_goodbye(now_ms);
            }
        }
        Ok(())
    }

    /// While leaving: stops listening, and tells when the last connection is gone or the time is up.
    fn is_over(&mut self) -> io::Result<bool> {
        if self.port.lifecycle.stage() != Stage::Closing {
            return Ok(false);
        }
        let left_ms = self.port.lifecycle.closing_until_ms().saturating_sub(self.now.mono_ms);
        if left_ms == 0 {
            return Ok(true);
        }
        if self.port.gate.is_some() {
            self.stop_accepting()?;
        }
        let nobody_asks = self.port.placement.is_over(self.port.core) && self.sockets.is_empty();
        if nobody_asks || left_ms <= GIVE_BACK_MS {
            self.engine.leave();
        }
        Ok(nobody_asks && self.engine.has_left())
    }

    /// Takes back the accepts, and when the last has completed, takes what still waits and closes the listeners: whoever
    /// has connected is served.
    fn stop_accepting(&mut self) -> io::Result<()> {
        if std::mem::take(&mut self.accepting) {
            self.port.socket_file = None;
            self.accepts_to_retry.clear();
            for slot in 0..self.port.listeners.len() {
                for generation in 0..ACCEPTS_AT_ONCE {
                    self.uring.cancel(Tag { kind: Kind::Accept, generation, slot: slot as u32 })?;
                }
            }
        }
        if self.accepts > 0 {
            return Ok(());
        }
        while let Some((listener, face)) = self.port.listeners.pop() {
            loop {
                match sockets::accept(&listener) {
                    Ok(Some(descriptor)) => self.place(descriptor, face)?,
                    Ok(None) => break,
                    // Out of files: those that leave make room.
                    Err(_) => {
                        self.port.listeners.push((listener, face));
                        return Ok(());
                    }
                }
            }
            sockets::close(&listener);
        }
        self.port.gate = None;
        Ok(())
    }
}

/// The descriptor that an accept returned.
#[allow(unsafe_code)]
fn uring_descriptor(result: i32) -> OwnedFd {
    use std::os::fd::FromRawFd;
    // SAFETY: a completed accept hands over a new open descriptor, once.
    unsafe { OwnedFd::from_raw_fd(result) }
}
