//! The private io_uring of one core: the few operations that the driver needs, and nothing unsafe beyond this file and
//! `buffers`.
//!
//! What may be in flight, and what keeps it sound: a send points into a buffer that its socket owns, and the driver keeps
//! the socket until the send's completion has come (`SendBuffer`); a connect reads an address that its link keeps
//! likewise; a receive writes into the leaked memory of `buffers`.
#![allow(unsafe_code)]

use std::{
    io,
    os::fd::{AsRawFd, OwnedFd},
};

use io_uring::{IoUring, cqueue, opcode, squeue, types::Fd};
use socket2::SockAddr;

use super::buffers::{self, Buffers};

/// What a completion belongs to: an operation, and the socket's slot and generation.
///
/// ```text
///  63    60 59            32 31        0
/// ┌────────┬────────────────┬───────────┐
/// │ kind 4 │ generation 28  │ slot 32   │
/// └────────┴────────────────┴───────────┘
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tag {
    pub(super) kind: Kind,
    pub(super) generation: u32,
    pub(super) slot: u32,
}

/// Operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Accept = 1,
    Receive = 2,
    Send = 3,
    Cancel = 4,
    LinkConnect = 5,
    LinkReceive = 6,
    LinkSend = 7,
}

/// Generations are counted in 28 bits.
pub(super) const GENERATION_MASK: u32 = (1 << 28) - 1;

impl Tag {
    fn pack(self) -> u64 {
        (self.kind as u64) << 60 | u64::from(self.generation & GENERATION_MASK) << 32 | u64::from(self.slot)
    }

    fn unpack(word: u64) -> Option<Self> {
        let kind = match word >> 60 {
            1 => Kind::Accept,
            2 => Kind::Receive,
            3 => Kind::Send,
            4 => Kind::Cancel,
            5 => Kind::LinkConnect,
            6 => Kind::LinkReceive,
            7 => Kind::LinkSend,
            _ => return None,
        };
        // Masked or shifted to 28 and 32 bits.
        Some(Self { kind, generation: (word >> 32) as u32 & GENERATION_MASK, slot: word as u32 })
    }
}

/// One completed operation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Completion {
    pub(super) tag: Tag,
    /// What the operation returned: a length, a descriptor, or a negated errno.
    pub(super) result: i32,
    /// The operation goes on and will complete again.
    pub(super) more: bool,
    /// The receive buffer with the bytes.
    pub(super) buffer: Option<u16>,
}

/// Bytes being sent. They stay where they are until the kernel is done with them.
#[derive(Default)]
pub(super) struct SendBuffer {
    pub(super) bytes: Vec<u8>,
    sent: usize,
    in_flight: bool,
}

impl SendBuffer {
    /// Whether the kernel may still read from it.
    pub(super) fn is_in_flight(&self) -> bool {
        self.in_flight
    }

    /// The kernel is done with `len` bytes. Returns whether all are sent; the buffer is then empty.
    pub(super) fn completed(&mut self, len: usize) -> bool {
        self.in_flight = false;
        self.sent += len;
        let done = self.sent >= self.bytes.len();
        if done {
            self.sent = 0;
            self.bytes.clear();
        }
        done
    }
}

impl Drop for SendBuffer {
    fn drop(&mut self) {
        if self.in_flight {
            // Only when the server gives up on its grace time: rather lose the memory than let the kernel read what
            // is somebody else's by then.
            std::mem::forget(std::mem::take(&mut self.bytes));
        }
    }
}

/// The ring.
pub(super) struct Uring {
    ring: IoUring,
    pub(super) buffers: Buffers,
    /// Completions that were taken out to make room while operations were being queued; see `push`.
    early: Vec<Completion>,
}

impl Uring {
    /// A ring for this thread, with its receive buffers, ringing `doorbell` for each completion while it is asked to.
    pub(super) fn new(entries: u32, buffers: u16, buffer_bytes: u32, doorbell: &OwnedFd) -> io::Result<Self> {
        let ring = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_taskrun_flag()
            .setup_clamp()
            .setup_cqsize(entries * 4)
            .build(entries)?;
        let mut probe = io_uring::Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        for code in [
            opcode::Accept::CODE,
            opcode::RecvMulti::CODE,
            opcode::Send::CODE,
            opcode::Connect::CODE,
            opcode::AsyncCancel::CODE,
        ] {
            if !probe.is_supported(code) {
                return Err(io::Error::new(io::ErrorKind::Unsupported, format!("io_uring operation {code}")));
            }
        }
        let buffers = Buffers::register(&ring.submitter(), buffers, buffer_bytes)?;
        ring.submitter().register_eventfd(doorbell.as_raw_fd())?;
        let mut uring = Self { ring, buffers, early: Vec::new() };
        uring.completion().disable_eventfd();
        Ok(uring)
    }

    fn completion(&mut self) -> cqueue::CompletionQueue<'_> {
        self.ring.completion()
    }

    /// Accepts one connection, when one comes.
    pub(super) fn accept(&mut self, listener: &OwnedFd, tag: Tag) -> io::Result<()> {
        // Nobody asks for the peer's address.
        let (address, len) = (std::ptr::null_mut(), std::ptr::null_mut());
        let accept = opcode::Accept::new(Fd(listener.as_raw_fd()), address, len);
        self.push(accept.flags(libc::SOCK_CLOEXEC).build(), tag)
    }

    /// Receives into provided buffers until the peer closes, buffers run out, or it is cancelled.
    pub(super) fn receive(&mut self, socket: &OwnedFd, tag: Tag) -> io::Result<()> {
        let receive = opcode::RecvMulti::new(Fd(socket.as_raw_fd()), buffers::GROUP).build();
        self.push(receive, tag)
    }

    /// Connects. The caller keeps `peer` where it is until the completion has come.
    #[allow(clippy::borrowed_box, reason = "the address must stay where it is, which a box says")]
    pub(super) fn connect(
        &mut self,
        socket: &OwnedFd,
        peer: &Box<SockAddr>,
        slot: u32,
        generation: u32,
    ) -> io::Result<()> {
        let connect = opcode::Connect::new(Fd(socket.as_raw_fd()), peer.as_ptr().cast(), peer.len()).build();
        self.push(connect, Tag { kind: Kind::LinkConnect, generation, slot })
    }

    /// Sends what is left of a buffer.
    pub(super) fn send(&mut self, socket: &OwnedFd, buffer: &mut SendBuffer, tag: Tag) -> io::Result<()> {
        debug_assert!(!buffer.in_flight, "one send at a time per socket");
        let rest = &buffer.bytes[buffer.sent..];
        let len = u32::try_from(rest.len()).unwrap_or(u32::MAX);
        let send = opcode::Send::new(Fd(socket.as_raw_fd()), rest.as_ptr(), len).flags(libc::MSG_NOSIGNAL).build();
        self.push(send, tag)?;
        buffer.in_flight = true;
        Ok(())
    }

    /// Stops an accept or a receive; it completes once more, with ECANCELED.
    pub(super) fn cancel(&mut self, tag: Tag) -> io::Result<()> {
        let cancel = opcode::AsyncCancel::new(tag.pack()).build();
        self.push(cancel, Tag { kind: Kind::Cancel, ..tag })
    }

    fn push(&mut self, entry: squeue::Entry, tag: Tag) -> io::Result<()> {
        let entry = entry.user_data(tag.pack());
        // SAFETY: descriptors are open while their operations are in flight, since the driver drops a socket only after
        // its last completion; send buffers, addresses and receive buffers outlive their operations (see the top of this file).
        while unsafe { self.ring.submission().push(&entry) }.is_err() {
            // The queue is full. A kernel that takes nothing more while it has completions to show gets rid of those.
            self.enter()?;
            let mut early = std::mem::take(&mut self.early);
            self.collect(&mut early);
            self.early = early;
        }
        Ok(())
    }

    /// Hands over what was queued and runs what the kernel has deferred: one system call.
    pub(super) fn enter(&mut self) -> io::Result<()> {
        self.buffers.publish();
        let submitted = self.ring.submission().len();
        let flags = 1; // IORING_ENTER_GETEVENTS
        // SAFETY: no argument structure is passed; the counts are within the queue's.
        match unsafe { self.ring.submitter().enter::<libc::sigset_t>(submitted as u32, 0, flags, None) } {
            Ok(_) => Ok(()),
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Whether entering the kernel would do anything.
    pub(super) fn has_work(&mut self) -> bool {
        let submission = self.ring.submission();
        let waiting = submission.taskrun() || !submission.is_empty() || submission.cq_overflow();
        drop(submission);
        waiting || !self.early.is_empty() || !self.completion().is_empty()
    }

    /// Moves the completions that are there into `into`.
    pub(super) fn drain(&mut self, into: &mut Vec<Completion>) {
        into.append(&mut self.early);
        self.collect(into);
    }

    fn collect(&mut self, into: &mut Vec<Completion>) {
        for entry in self.completion() {
            let Some(tag) = Tag::unpack(entry.user_data()) else {
                continue;
            };
            into.push(Completion {
                tag,
                result: entry.result(),
                more: cqueue::more(entry.flags()),
                buffer: cqueue::buffer_select(entry.flags()),
            });
        }
    }

    /// Whether the doorbell rings for each completion. It costs time, so only while the driver sleeps.
    pub(super) fn ring_doorbell(&mut self, on: bool) {
        if on {
            self.completion().enable_eventfd();
        } else {
            self.completion().disable_eventfd();
        }
    }
}
