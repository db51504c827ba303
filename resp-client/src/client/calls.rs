//! Calls in flight: a table of fixed size, and when each is due.
//!
//! A slot of the table keeps its buffer when its call has ended, and its generation goes up: an id from before finds
//! nothing. So a table that is warm allocates nothing, and what arrives late finds no call.
//!
//! Deadlines hang in a wheel of 512 lists, each a span of 256 µs; a call is in the list of its deadline, so it enters
//! and leaves in a few instructions whatever the other deadlines are. A turn takes 131 ms: a list may hold calls of later
//! turns, which stay when it is their list's time and not theirs.
//!
//! ```text
//!   list = deadline >> 8 & 511        lists:    head ⇄ call ⇄ call
//!                                     occupied: one bit a list, so that the next one is found by counting zeros
//! ```

use crate::{clock::Micros, script::ScriptId};

const LISTS: usize = 512;
const SPAN_BITS: u32 = 8;
/// No call.
const NONE: u32 = u32::MAX;
/// A buffer that grew beyond that is given back when its call ends.
const KEPT_BYTES_MAX: usize = 16 << 10;

/// A call in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CallId {
    index: u32,
    generation: u32,
}

/// What is known of a call.
pub(crate) struct Call {
    generation: u32,
    /// The list's neighbours; in a free slot, `next` is the next free one.
    previous: u32,
    next: u32,
    /// Bytes of `buffer` before the command.
    start: u32,
    pub(crate) token: u64,
    pub(crate) deadline: Micros,
    pub(crate) sent_at: Micros,
    /// The key slot; `None` where any node will do.
    pub(crate) slot: Option<u16>,
    pub(crate) script: Option<ScriptId>,
    /// The link it was sent on last.
    pub(crate) link: u16,
    /// Times it was sent.
    pub(crate) attempts: u8,
    /// Whether it goes to a node that is taking over its slot.
    pub(crate) asking: bool,
    buffer: Vec<u8>,
}

impl Call {
    /// The encoded command.
    #[inline]
    pub(crate) fn command(&self) -> &[u8] {
        &self.buffer[self.start as usize..]
    }
}

pub(crate) struct Calls {
    table: Vec<Call>,
    free: u32,
    in_flight: usize,
    heads: Box<[u32; LISTS]>,
    occupied: [u64; LISTS / 64],
    /// Everything due before has been handed out.
    turned_to: Micros,
    buffer_bytes: usize,
}

impl Calls {
    pub(crate) fn new(in_flight_max: usize, buffer_bytes: usize, now: Micros) -> Self {
        let count = u32::try_from(in_flight_max).unwrap_or(NONE - 1).min(NONE - 1);
        let slot = |index| Call {
            generation: 0,
            previous: NONE,
            next: if index + 1 < count { index + 1 } else { NONE },
            start: 0,
            token: 0,
            deadline: Micros(0),
            sent_at: Micros(0),
            slot: None,
            script: None,
            link: 0,
            attempts: 0,
            asking: false,
            buffer: Vec::with_capacity(buffer_bytes),
        };
        Self {
            table: (0..count).map(slot).collect(),
            free: if count == 0 { NONE } else { 0 },
            in_flight: 0,
            heads: Box::new([NONE; LISTS]),
            occupied: [0; LISTS / 64],
            turned_to: now,
            buffer_bytes,
        }
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.in_flight
    }

    #[inline]
    pub(crate) fn is_full(&self) -> bool {
        self.free == NONE
    }

    /// The buffer of the slot that the next call takes; `None` when the table is full. `write` says where the command
    /// starts in it.
    #[inline]
    pub(crate) fn prepare(&mut self, write: impl FnOnce(&mut Vec<u8>) -> usize) -> Option<&[u8]> {
        let call = self.table.get_mut(self.free as usize)?;
        let start = write(&mut call.buffer);
        call.start = u32::try_from(start).unwrap_or_default();
        Some(call.command())
    }

    /// Accepts the call that was prepared.
    #[inline]
    pub(crate) fn accept(
        &mut self,
        token: u64,
        deadline: Micros,
        slot: Option<u16>,
        script: Option<ScriptId>,
    ) -> CallId {
        let index = self.free;
        let call = &mut self.table[index as usize];
        self.free = call.next;
        self.in_flight += 1;
        call.token = token;
        call.deadline = deadline;
        call.slot = slot;
        call.script = script;
        call.attempts = 0;
        call.asking = false;
        let id = CallId { index, generation: call.generation };
        self.hang(index, deadline);
        id
    }

    #[inline]
    pub(crate) fn find(&self, id: CallId) -> Option<&Call> {
        self.table.get(id.index as usize).filter(|call| call.generation == id.generation)
    }

    #[inline]
    pub(crate) fn find_mut(&mut self, id: CallId) -> Option<&mut Call> {
        self.table.get_mut(id.index as usize).filter(|call| call.generation == id.generation)
    }

    /// Ends a call that was found.
    #[inline]
    pub(crate) fn free(&mut self, id: CallId) {
        self.unhang(id.index);
        let call = &mut self.table[id.index as usize];
        call.generation = call.generation.wrapping_add(1);
        call.next = self.free;
        if call.buffer.capacity() > KEPT_BYTES_MAX {
            call.buffer = Vec::with_capacity(self.buffer_bytes);
        }
        self.free = id.index;
        self.in_flight -= 1;
    }

    #[inline]
    fn hang(&mut self, index: u32, deadline: Micros) {
        // What is due already goes where the next look will be.
        let list = list_of(deadline.max(self.turned_to));
        let head = std::mem::replace(&mut self.heads[list], index);
        let call = &mut self.table[index as usize];
        call.previous = NONE;
        call.next = head;
        if let Some(head) = self.table.get_mut(head as usize) {
            head.previous = index;
        }
        self.occupied[list / 64] |= 1 << (list % 64);
    }

    #[inline]
    fn unhang(&mut self, index: u32) {
        let Call { previous, next, .. } = self.table[index as usize];
        if let Some(next) = self.table.get_mut(next as usize) {
            next.previous = previous;
        }
        match self.table.get_mut(previous as usize) {
            Some(previous) => previous.next = next,
            None => {
                let list = self.list_with_head(index);
                self.heads[list] = next;
                if next == NONE {
                    self.occupied[list / 64] &= !(1 << (list % 64));
                }
            }
        }
    }

    /// The list that a call heads: that of its deadline, unless it was due when it came.
    #[inline]
    fn list_with_head(&self, index: u32) -> usize {
        let list = list_of(self.table[index as usize].deadline);
        if self.heads[list] == index {
            return list;
        }
        self.heads.iter().position(|&head| head == index).unwrap_or(list)
    }

    /// A call whose deadline has come. To be asked until there is none.
    pub(crate) fn due(&mut self, now: Micros) -> Option<CallId> {
        if self.in_flight == 0 {
            self.turned_to = self.turned_to.max(now);
            return None;
        }
        let first = self.turned_to.0 >> SPAN_BITS;
        let last = now.0 >> SPAN_BITS;
        // One turn sees every list.
        for span in first..=last.min(first.saturating_add(LISTS as u64 - 1)) {
            let list = list_of(Micros(span << SPAN_BITS));
            if self.occupied[list / 64] & (1 << (list % 64)) == 0 {
                continue;
            }
            if let Some(id) = self.due_in(list, now) {
                // Lists before this one are done, and this one may have more.
                self.turned_to = self.turned_to.max(Micros(span << SPAN_BITS)).min(now);
                return Some(id);
            }
        }
        self.turned_to = self.turned_to.max(now);
        None
    }

    fn due_in(&self, list: usize, now: Micros) -> Option<CallId> {
        let mut index = self.heads[list];
        while let Some(call) = self.table.get(index as usize) {
            if call.deadline <= now {
                return Some(CallId { index, generation: call.generation });
            }
            index = call.next;
        }
        None
    }

    /// When [`Calls::due`] is to be asked next, at the latest: never later than the earliest deadline.
    pub(crate) fn next_due(&self) -> Micros {
        if self.in_flight == 0 {
            return Micros::NEVER;
        }
        let first = self.turned_to.0 >> SPAN_BITS;
        for ahead in 0..LISTS as u64 {
            let span = first + ahead;
            let list = list_of(Micros(span << SPAN_BITS));
            if self.occupied[list / 64] == 0 || self.occupied[list / 64] & (1 << (list % 64)) == 0 {
                continue;
            }
            if let Some(deadline) = self.earliest_in(list, (span + 1) << SPAN_BITS) {
                return deadline;
            }
        }
        Micros((first + LISTS as u64) << SPAN_BITS)
    }

    /// The earliest deadline in a list, if it is before that time.
    fn earliest_in(&self, list: usize, before: u64) -> Option<Micros> {
        let mut index = self.heads[list];
        let mut earliest = Micros::NEVER;
        while let Some(call) = self.table.get(index as usize) {
            earliest = earliest.min(call.deadline);
            index = call.next;
        }
        (earliest.0 < before).then_some(earliest)
    }
}

#[inline]
fn list_of(time: Micros) -> usize {
    usize::try_from(time.0 >> SPAN_BITS & (LISTS as u64 - 1)).unwrap_or_default()
}
