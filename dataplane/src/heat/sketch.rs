//! The hottest keys of a stream in fixed memory: Space-Saving (Metwally, Agrawal, El Abbadi 2005).
//!
//! ```text
//!   add(key):  known            count += 1
//!              room             a new entry, count 1
//!              neither          the entry with the least count goes: the key takes its place, and its count as `error`
//! ```
//!
//! With `m` entries and `n` added in all, every key that was added more than `n/m` times has an entry, and
//! `count - error <= added <= count` with `error <= n/m`. What is used as a key's rate is `count - error`: a key that has
//! just come by never looks hot.
//!
//! Counts fade all at once, by one factor, which changes neither the order nor the bounds (those are then of faded
//! sums). The least count is the root of a binary heap; keys are found by open addressing with linear probing in a table
//! that is at most a quarter full. Keys are hashes by a seed of the process: nobody can aim at a slot.

use super::{DecidedBy, NAME_BYTES_MAX, Owner};

/// Slots of the index for each entry.
const SLOTS_PER_ENTRY: usize = 4;
/// An empty slot of the index.
const EMPTY: u32 = u32::MAX;
/// What has faded below this is nothing; floats that small are slow.
const NOTHING: f32 = 1e-6;

/// A key that is counted. All counts are of sampled checks, faded.
#[derive(Clone)]
pub(super) struct Entry {
    pub(super) key: u64,
    /// Its place in the heap.
    at: u32,
    pub(super) count: f32,
    /// As much of `count` may be another key's.
    pub(super) error: f32,
    /// What the other cores count of it.
    pub(super) elsewhere_per_second: f32,
    /// The same while it is added up.
    pub(super) heard_per_second: f32,
    pub(super) facts: Facts,
}

/// What is known of a key beside its count.
#[derive(Clone)]
pub(super) struct Facts {
    pub(super) owner: Owner,
    pub(super) by: [f32; DecidedBy::COUNT],
    /// Calls to the store that its checks took.
    pub(super) calls: f32,
    pub(super) name_len: u8,
    pub(super) name: [u8; NAME_BYTES_MAX],
}

impl Facts {
    const NONE: Self =
        Self { owner: Owner::Rule(0), by: [0.0; DecidedBy::COUNT], calls: 0.0, name_len: 0, name: [0; NAME_BYTES_MAX] };

    /// Forgets the last key. The name's bytes may stay: nobody reads beyond its length.
    fn clear(&mut self) {
        (self.by, self.calls, self.name_len) = ([0.0; DecidedBy::COUNT], 0.0, 0);
    }
}

pub(super) struct Sketch {
    entries: Vec<Entry>,
    /// Numbers of entries, the one with the least count first.
    heap: Vec<u32>,
    /// By hash: numbers of entries.
    index: Box<[u32]>,
    /// Turns a product's top bits into a slot.
    shift: u32,
    entries_max: usize,
}

impl Sketch {
    /// Of at most so many keys.
    pub(super) fn new(entries_max: usize) -> Self {
        let entries_max = entries_max.max(1);
        let slots = (SLOTS_PER_ENTRY * entries_max).next_power_of_two();
        Self {
            entries: Vec::with_capacity(entries_max),
            heap: Vec::with_capacity(entries_max),
            index: vec![EMPTY; slots].into(),
            shift: 64 - slots.trailing_zeros(),
            entries_max,
        }
    }

    /// Counts a key once.
    #[inline]
    pub(super) fn add(&mut self, key: u64) -> &mut Entry {
        let number = match self.number(key) {
            Some(number) => number,
            None if self.entries.len() < self.entries_max => self.append(key),
            None => self.replace_least(key),
        };
        let entry = &mut self.entries[number as usize];
        entry.count += 1.0;
        let at = entry.at as usize;
        self.sink(at);
        &mut self.entries[number as usize]
    }

    /// The entry of a key.
    #[inline]
    pub(super) fn find(&mut self, key: u64) -> Option<&mut Entry> {
        self.number(key).map(|number| &mut self.entries[number as usize])
    }

    /// All entries, in no order.
    pub(super) fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.entries.iter()
    }

    /// The same, to be changed in all but key and count.
    pub(super) fn entries_mut(&mut self) -> impl Iterator<Item = &mut Entry> {
        self.entries.iter_mut()
    }

    /// Leaves of every count this share of it.
    pub(super) fn fade(&mut self, share: f32) {
        let fade = |count: &mut f32| {
            *count *= share;
            if *count < NOTHING {
                *count = 0.0;
            }
        };
        for entry in &mut self.entries {
            fade(&mut entry.count);
            fade(&mut entry.error);
            fade(&mut entry.facts.calls);
            entry.facts.by.iter_mut().for_each(fade);
        }
    }

    /// A new entry with nothing in its count, so at the root. It need not rise from the end: what it trades places with
    /// sinks.
    fn append(&mut self, key: u64) -> u32 {
        // At most `heat_keys`, far below 2^32.
        let number = self.entries.len() as u32;
        self.entries.push(Entry {
            key,
            at: number,
            count: 0.0,
            error: 0.0,
            elsewhere_per_second: 0.0,
            heard_per_second: 0.0,
            facts: Facts::NONE,
        });
        self.heap.push(number);
        self.rise(number as usize);
        self.link(key, number);
        number
    }

    fn replace_least(&mut self, key: u64) -> u32 {
        let number = self.heap[0];
        self.unlink(self.entries[number as usize].key);
        let entry = &mut self.entries[number as usize];
        (entry.key, entry.error, entry.elsewhere_per_second) = (key, entry.count, 0.0);
        entry.facts.clear();
        self.link(key, number);
        number
    }

    #[inline(always)]
    fn count(&self, at: usize) -> f32 {
        self.entries[self.heap[at] as usize].count
    }

    #[inline(always)]
    fn put(&mut self, at: usize, number: u32) {
        self.heap[at] = number;
        // At most `heat_keys`, far below 2^32.
        self.entries[number as usize].at = at as u32;
    }

    /// A count has grown: restores the heap below it.
    #[inline]
    fn sink(&mut self, mut at: usize) {
        let number = self.heap[at];
        let count = self.count(at);
        loop {
            let left = 2 * at + 1;
            if left >= self.heap.len() {
                break;
            }
            let right = left + 1;
            let least = if right < self.heap.len() && self.count(right) < self.count(left) { right } else { left };
            if self.count(least) >= count {
                break;
            }
            self.put(at, self.heap[least]);
            at = least;
        }
        self.put(at, number);
    }

    /// A count is new: restores the heap above it.
    fn rise(&mut self, mut at: usize) {
        let number = self.heap[at];
        let count = self.count(at);
        while at > 0 && self.count((at - 1) / 2) > count {
            self.put(at, self.heap[(at - 1) / 2]);
            at = (at - 1) / 2;
        }
        self.put(at, number);
    }

    #[inline(always)]
    fn slot(&self, key: u64) -> usize {
        (key.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> self.shift) as usize
    }

    #[inline(always)]
    fn next(&self, slot: usize) -> usize {
        (slot + 1) & (self.index.len() - 1)
    }

    #[inline(always)]
    fn number(&self, key: u64) -> Option<u32> {
        let mut slot = self.slot(key);
        loop {
            match self.index[slot] {
                EMPTY => return None,
                number if self.entries[number as usize].key == key => return Some(number),
                _ => slot = self.next(slot),
            }
        }
    }

    fn link(&mut self, key: u64, number: u32) {
        let mut slot = self.slot(key);
        while self.index[slot] != EMPTY {
            slot = self.next(slot);
        }
        self.index[slot] = number;
    }

    /// Takes a key out, and moves what was probed past it back, so that no search ends too early (Knuth 6.4, algorithm R).
    fn unlink(&mut self, key: u64) {
        let mut hole = self.slot(key);
        while self.entries[self.index[hole] as usize].key != key {
            hole = self.next(hole);
        }
        let mut slot = self.next(hole);
        while self.index[slot] != EMPTY {
            let home = self.slot(self.entries[self.index[slot] as usize].key);
            let distance = |from: usize, to: usize| to.wrapping_sub(from) & (self.index.len() - 1);
            if distance(home, slot) >= distance(hole, slot) {
                self.index[hole] = self.index[slot];
                hole = slot;
            }
            slot = self.next(slot);
        }
        self.index[hole] = EMPTY;
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests;
