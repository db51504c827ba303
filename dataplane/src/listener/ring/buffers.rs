//! The receive buffers of one ring: a provided-buffer ring (io_uring_register_buf_ring(3)).
//!
//! The kernel takes a buffer from the ring when bytes arrive and names it in the completion; the driver reads the bytes in
//! place and puts the buffer back. The memory is leaked on purpose: it lives as long as the process, so the kernel can
//! never write to memory that has another owner.
#![allow(unsafe_code)]

use std::{
    alloc::{Layout, alloc_zeroed},
    io,
    ptr::NonNull,
    sync::atomic::{AtomicU16, Ordering},
};

use io_uring::{Submitter, types::BufRingEntry};

/// The group that receives name.
pub(super) const GROUP: u16 = 0;

/// Kernel and driver agree on pages of this size for the ring's address.
const PAGE_BYTES: usize = 4096;

/// The buffers, and the ring through which they go to the kernel.
pub(super) struct Buffers {
    ring: NonNull<BufRingEntry>,
    memory: NonNull<u8>,
    count: u16,
    bytes_each: u32,
    tail: u16,
}

impl Buffers {
    /// Registers `count` (a power of two, at most 32,768) buffers of `bytes_each` bytes.
    pub(super) fn register(submitter: &Submitter<'_>, count: u16, bytes_each: u32) -> io::Result<Self> {
        let ring = leak(usize::from(count) * size_of::<BufRingEntry>())?.cast::<BufRingEntry>();
        let memory = leak(usize::from(count) * bytes_each as usize)?;
        // SAFETY: the ring's memory is page-aligned, long enough for `count` entries, and never freed.
        unsafe { submitter.register_buf_ring_with_flags(ring.as_ptr() as u64, count, GROUP, 0)? };
        let mut buffers = Self { ring, memory, count, bytes_each, tail: 0 };
        for id in 0..count {
            buffers.give(id);
        }
        buffers.publish();
        Ok(buffers)
    }

    /// The first `len` bytes of a buffer that a completion named. `None` for numbers that no buffer has.
    pub(super) fn bytes(&self, id: u16, len: usize) -> Option<&[u8]> {
        if id >= self.count || len > self.bytes_each as usize {
            return None;
        }
        // SAFETY: in bounds by the check above. The kernel has handed this buffer over with the completion and does not
        // write to it until `give` and `publish` hand it back, which need `&mut self` while this borrow is shared.
        Some(unsafe {
            std::slice::from_raw_parts(self.memory.as_ptr().add(usize::from(id) * self.bytes_each as usize), len)
        })
    }

    /// Puts a buffer back; the kernel sees it after `publish`.
    pub(super) fn give(&mut self, id: u16) {
        if id >= self.count {
            // The kernel names none that it was not given.
            return;
        }
        let at = usize::from(self.tail & (self.count - 1));
        // SAFETY: `at` is below `count`, so the entry is within the ring. The kernel reads only entries below the
        // published tail, and this one is not. The tail shares the first entry's reserved field, which is not written.
        let entry = unsafe { &mut *self.ring.as_ptr().add(at) };
        // SAFETY: `id` is below `count`, by the check above.
        let address = unsafe { self.memory.as_ptr().add(usize::from(id) * self.bytes_each as usize) };
        entry.set_addr(address as u64);
        entry.set_len(self.bytes_each);
        entry.set_bid(id);
        self.tail = self.tail.wrapping_add(1);
    }

    /// Shows the kernel what was put back.
    pub(super) fn publish(&self) {
        // SAFETY: `tail` gives the address of the ring's tail, a u16 within the first entry, aligned, written by us only.
        let tail = unsafe { AtomicU16::from_ptr(BufRingEntry::tail(self.ring.as_ptr()).cast_mut()) };
        tail.store(self.tail, Ordering::Release);
    }
}

fn leak(bytes: usize) -> io::Result<NonNull<u8>> {
    let layout = Layout::from_size_align(bytes, PAGE_BYTES).map_err(|_| io::ErrorKind::InvalidInput)?;
    if bytes == 0 {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: the layout's size is not zero.
    let memory = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or(io::ErrorKind::OutOfMemory)?;
    // Touched here, so that memory does not grow with the load later.
    for page in (0..bytes).step_by(PAGE_BYTES) {
        // SAFETY: `page` is below `bytes`, so this byte is within the allocation.
        unsafe { memory.as_ptr().add(page).write_volatile(0) };
    }
    Ok(memory)
}
