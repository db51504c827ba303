//! Appending a reply of bounded size, piece by piece, with one look at the buffer's capacity.
//!
//! Replies on the hot path are a few short pieces: a head, integers, a rule's name. `Vec::extend_from_slice` looks at the
//! capacity for each and calls the C library for lengths it cannot know. Here room for the longest reply is reserved
//! once, and each piece is copied as a block of fixed size, a move or two, of which only the first bytes count:
//!
//! ```text
//!   head              integer    more       integer    tail
//!  ┌────────┬┄┄┄┄┄┄┐
//!           ┌────────┬┄┄┄┐                                        ┄ is overwritten by the next piece
//!                    ┌──────────┐
//! ```
//!
//! The bound is kept in whole blocks, so after inlining it is a sum of constants and its checks cost nothing.
#![allow(unsafe_code)]

/// Bytes that one [`Writer`] may append, counted in whole blocks.
pub(super) const ROOM_BYTES: usize = 320;

/// Appends to a buffer; what was put is there once [`Writer::finish`] is called.
pub(super) struct Writer<'v> {
    out: &'v mut Vec<u8>,
    /// Bytes put so far that count.
    len: usize,
    /// Bytes of all blocks put so far; never less than `len`.
    blocks: usize,
}

impl<'v> Writer<'v> {
    #[inline(always)]
    pub(super) fn new(out: &'v mut Vec<u8>) -> Self {
        out.reserve(ROOM_BYTES);
        Self { out, len: 0, blocks: 0 }
    }

    /// Appends the first `len` bytes of a block; all of it where `len` is more.
    #[inline(always)]
    pub(super) fn put<const N: usize>(&mut self, block: &[u8; N], len: usize) {
        assert!(self.blocks + N <= ROOM_BYTES, "a reply is longer than the room for it");
        // SAFETY: `new` reserved ROOM_BYTES beyond the vector's length, and nothing else touches the vector while it is
        // borrowed here. `len <= blocks`, since each `put` adds N to the one and at most N to the other, so these N
        // bytes end at most at `blocks + N`, which is within the room. The block is not in the vector's spare capacity:
        // it is a shared borrow, and the vector is borrowed exclusively.
        unsafe {
            let end = self.out.as_mut_ptr().add(self.out.len() + self.len);
            std::ptr::copy_nonoverlapping(block.as_ptr(), end, N);
        }
        self.len += len.min(N);
        self.blocks += N;
    }

    /// Where pieces end that depend on a value: whichever are put until [`Writer::reach`], their blocks count as `N` bytes,
    /// so that the bound stays a sum of constants, which the compiler checks.
    #[inline(always)]
    pub(super) fn bound<const N: usize>(&self) -> usize {
        self.blocks + N
    }

    /// The pieces are put.
    #[inline(always)]
    pub(super) fn reach(&mut self, bound: usize) {
        assert!(self.blocks <= bound, "the pieces are longer than their bound");
        self.blocks = bound;
    }

    /// Makes what was put part of the buffer, and appends what no block can hold.
    #[cold]
    pub(super) fn finish_with(self, rest: &[u8]) {
        let Self { out, len, .. } = self;
        Writer { out: &mut *out, len, blocks: 0 }.finish();
        out.extend_from_slice(rest);
    }

    /// Makes what was put part of the buffer.
    #[inline(always)]
    pub(super) fn finish(self) {
        // SAFETY: all bytes below `len` were written by `put`: each piece begins where the counted part of the one before
        // ends. They are within the reserved capacity, as above.
        unsafe { self.out.set_len(self.out.len() + self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_follow_each_other() {
        let mut out = b"before ".to_vec();
        let mut writer = Writer::new(&mut out);
        writer.put(b"one, and what does not count", 5);
        writer.put(b"two", 9);
        writer.put(b"....", 0);
        writer.finish();
        assert_eq!(out, b"before one, two");
    }

    #[test]
    fn what_is_not_finished_was_not_written() {
        let mut out = b"before".to_vec();
        Writer::new(&mut out).put(b" and after", 10);
        assert_eq!(out, b"before");
    }

    #[test]
    #[should_panic(expected = "longer than the room")]
    fn more_than_the_room_is_refused() {
        let mut out = Vec::new();
        let mut writer = Writer::new(&mut out);
        for _ in 0..=ROOM_BYTES / 64 {
            writer.put(&[0; 64], 64);
        }
    }
}
