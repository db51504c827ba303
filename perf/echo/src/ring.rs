//! A private io_uring for one thread: multishot accept and receive into provided buffers, plain sends, one system call
//! per round.
//!
//! ```text
//!   loop:
//!     enter(want)       hand over everything that was queued, run what the kernel has deferred, wait for `want`
//!     drain             read the completions
//!     queue             sends, receives and accepts; `give` buffers back
//! ```
//!
//! The ring belongs to the thread that made it (SINGLE_ISSUER), and the kernel works for it only inside `enter`
//! (DEFER_TASKRUN), so nothing interrupts the thread between two rounds. The receive buffers lie in one huge page where
//! the system has one to give, and live as long as the process: the kernel can never write to memory with another owner.
#![allow(unsafe_code)]

use std::{
    alloc::{Layout, alloc_zeroed},
    io,
    os::fd::RawFd,
    ptr::NonNull,
    sync::atomic::{AtomicU16, Ordering},
    time::Duration,
};

use io_uring::{
    EnterFlags, IoUring, cqueue, opcode, squeue,
    types::{BufRingEntry, Fd, SubmitArgs, Timespec},
};

/// The buffer group that receives name.
const GROUP: u16 = 0;
/// Alignment of the receive buffers.
const HUGE_PAGE_BYTES: usize = 2 * 1024 * 1024;
/// Alignment of the buffer ring.
const PAGE_BYTES: usize = 4096;

/// One completed operation.
#[derive(Clone, Copy, Debug)]
pub struct Completion {
    /// What the operation was queued with.
    pub tag: u64,
    /// What it returned: a length, a descriptor, or a negated errno.
    pub result: i32,
    /// The receive buffer that it filled.
    pub buffer: Option<u16>,
    /// It goes on and will complete again.
    pub more: bool,
}

/// The ring with its receive buffers.
pub struct Ring {
    ring: IoUring,
    entries: NonNull<BufRingEntry>,
    memory: NonNull<u8>,
    buffers: u16,
    buffer_bytes: u32,
    tail: u16,
    out: u16,
}

impl Ring {
    /// A ring with `queue` submission entries and `buffers` receive buffers of `buffer_bytes` each; both counts are powers
    /// of two.
    ///
    /// # Errors
    ///
    /// When the kernel lacks io_uring or one of its features, or memory is short.
    pub fn new(queue: u32, buffers: u16, buffer_bytes: u32) -> io::Result<Self> {
        if !buffers.is_power_of_two() || buffer_bytes == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the number of buffers must be a power of two"));
        }
        let mut builder = IoUring::builder();
        builder.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag().setup_clamp().setup_cqsize(queue * 4);
        let plain = builder.clone();
        // Saves an indirection per submission since Linux 6.6.
        let ring = builder.setup_no_sqarray().build(queue).or_else(|_| plain.build(queue))?;
        let entries = leak(usize::from(buffers) * size_of::<BufRingEntry>(), PAGE_BYTES)?.cast();
        let memory = leak(usize::from(buffers) * buffer_bytes as usize, HUGE_PAGE_BYTES)?;
        // SAFETY: the entries are page-aligned, long enough for `buffers` of them, and never freed.
        unsafe { ring.submitter().register_buf_ring_with_flags(entries.as_ptr() as u64, buffers, GROUP, 0)? };
        let mut ring = Self { ring, entries, memory, buffers, buffer_bytes, tail: 0, out: buffers };
        for id in 0..buffers {
            ring.give(id);
        }
        Ok(ring)
    }

    /// Queues: accept connections for ever.
    ///
    /// # Errors
    ///
    /// When the ring fails.
    pub fn accept(&mut self, listener: RawFd, tag: u64) -> io::Result<()> {
        self.push(&opcode::AcceptMulti::new(Fd(listener)).flags(libc::SOCK_CLOEXEC).build().user_data(tag))
    }

    /// Queues: receive into provided buffers until the peer closes or buffers run out.
    ///
    /// # Errors
    ///
    /// When the ring fails.
    pub fn receive(&mut self, socket: RawFd, tag: u64) -> io::Result<()> {
        self.push(&opcode::RecvMulti::new(Fd(socket), GROUP).build().user_data(tag))
    }

    /// Queues: send part of a receive buffer, which must not be given back before the completion.
    ///
    /// # Errors
    ///
    /// When the ring fails.
    ///
    /// # Panics
    ///
    /// When the part is not within the buffer.
    pub fn send_buffer(&mut self, socket: RawFd, id: u16, part: std::ops::Range<u32>, tag: u64) -> io::Result<()> {
        assert!(id < self.buffers && part.start <= part.end && part.end <= self.buffer_bytes, "no such part");
        // SAFETY: within the memory by the check above; that memory is never freed.
        unsafe {
            let start = self.buffer(id).add(part.start as usize);
            self.send(socket, start, part.end - part.start, tag)
        }
    }

    /// Queues: send these bytes.
    ///
    /// # Errors
    ///
    /// When the ring fails.
    ///
    /// # Safety
    ///
    /// The bytes must stay allocated until the completion has come.
    pub unsafe fn send(&mut self, socket: RawFd, bytes: *const u8, len: u32, tag: u64) -> io::Result<()> {
        self.push(&opcode::Send::new(Fd(socket), bytes, len).flags(libc::MSG_NOSIGNAL).build().user_data(tag))
    }

    fn push(&mut self, entry: &squeue::Entry) -> io::Result<()> {
        // SAFETY: receives write only to buffers that are never freed; sends read from those or from bytes that the caller
        // of `send` vouches for.
        while unsafe { self.ring.submission().push(entry) }.is_err() {
            self.ring.submit()?;
        }
        Ok(())
    }

    /// One system call: hands over what was queued, runs what the kernel has deferred, and waits for `want` completions,
    /// or for the time that is given.
    ///
    /// # Errors
    ///
    /// When the ring fails. An interrupted or expired wait is none.
    pub fn enter(&mut self, want: u32, timeout: Option<Duration>) -> io::Result<()> {
        let entered = match timeout {
            Some(timeout) if want > 0 => {
                let timeout = Timespec::from(timeout);
                self.ring.submitter().submit_with_args(want as usize, &SubmitArgs::new().timespec(&timeout))
            }
            _ => {
                let queued = u32::try_from(self.ring.submission().len()).unwrap_or(u32::MAX);
                let flags = EnterFlags::GETEVENTS.bits();
                // SAFETY: no argument structure is passed, and the count is the queue's own.
                unsafe { self.ring.submitter().enter::<libc::sigset_t>(queued, want, flags, None) }
            }
        };
        match entered {
            Ok(_) => Ok(()),
            Err(error)
                if matches!(error.raw_os_error(), Some(libc::ETIME | libc::EINTR | libc::EAGAIN | libc::EBUSY)) =>
            {
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Whether `enter` or `drain` would find anything; looks at shared memory only.
    pub fn has_work(&mut self) -> bool {
        let submission = self.ring.submission();
        let deferred = submission.taskrun() || submission.cq_overflow();
        drop(submission);
        deferred || !self.ring.completion().is_empty()
    }

    /// Appends the completions that are there.
    pub fn drain(&mut self, into: &mut Vec<Completion>) {
        for entry in self.ring.completion() {
            let buffer = cqueue::buffer_select(entry.flags());
            self.out += u16::from(buffer.is_some());
            into.push(Completion {
                tag: entry.user_data(),
                result: entry.result(),
                buffer,
                more: cqueue::more(entry.flags()),
            });
        }
    }

    /// The first `len` bytes of a buffer that a completion named.
    ///
    /// # Panics
    ///
    /// When there is no such buffer, or it is shorter.
    pub fn bytes(&self, id: u16, len: usize) -> &[u8] {
        assert!(id < self.buffers && len <= self.buffer_bytes as usize, "no such buffer");
        // SAFETY: within the memory by the check above. The kernel handed the buffer over with the completion and does
        // not write to it before `give`, which needs `&mut self` while this borrow is shared.
        unsafe { std::slice::from_raw_parts(self.buffer(id), len) }
    }

    /// Gives a buffer back to the kernel.
    ///
    /// # Panics
    ///
    /// When there is no such buffer.
    pub fn give(&mut self, id: u16) {
        assert!(id < self.buffers, "no such buffer");
        let at = usize::from(self.tail & (self.buffers - 1));
        let address = self.buffer(id) as u64;
        // SAFETY: `at` is below the number of entries, and the kernel reads only entries before the published tail, which
        // this one is not. The tail lies in a reserved field of the first entry, which is not written here.
        let entry = unsafe { &mut *self.entries.as_ptr().add(at) };
        entry.set_addr(address);
        entry.set_len(self.buffer_bytes);
        entry.set_bid(id);
        self.tail = self.tail.wrapping_add(1);
        self.out -= 1;
        // SAFETY: the address of the tail: a u16, aligned, in memory that is never freed, written by this thread only.
        let tail = unsafe { AtomicU16::from_ptr(BufRingEntry::tail(self.entries.as_ptr()).cast_mut()) };
        tail.store(self.tail, Ordering::Release);
    }

    /// Whether the kernel has a buffer left to receive into.
    pub fn has_buffers(&self) -> bool {
        self.out < self.buffers
    }

    fn buffer(&self, id: u16) -> *mut u8 {
        // SAFETY: every caller checks that `id` is one of the buffers, so this is within the memory.
        unsafe { self.memory.as_ptr().add(usize::from(id) * self.buffer_bytes as usize) }
    }
}

/// Memory for as long as the process lives, touched, and in huge pages if it is large and the system has some.
fn leak(bytes: usize, align: usize) -> io::Result<NonNull<u8>> {
    let layout = Layout::from_size_align(bytes.max(1), align).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: the size is not zero.
    let memory = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or(io::ErrorKind::OutOfMemory)?;
    if align == HUGE_PAGE_BYTES {
        // SAFETY: advice about memory that was just allocated; whether it is taken does not matter.
        unsafe { libc::madvise(memory.as_ptr().cast(), bytes, libc::MADV_HUGEPAGE) };
    }
    for page in (0..bytes).step_by(PAGE_BYTES) {
        // SAFETY: below `bytes`, so within the allocation.
        unsafe { memory.as_ptr().add(page).write_volatile(0) };
    }
    Ok(memory)
}
