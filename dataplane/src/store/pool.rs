//! Entries that are made once and used again and again, with handles that know when their entry has another owner.
//!
//! Everything that waits for the store lives in such pools: they are allocated at start and never grow, so an outage
//! cannot take more memory than the settings say, and an entry keeps its buffers' memory for its next owner.

/// Where an entry is, and which of its owners is meant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Handle {
    pub(super) at: u32,
    owner: u32,
}

impl Handle {
    /// As one word, for the token of a call.
    pub(super) fn pack(self) -> u64 {
        u64::from(self.owner) << 32 | u64::from(self.at)
    }

    pub(super) fn unpack(word: u64) -> Self {
        // Both halves are 32 bits.
        Self { at: word as u32, owner: (word >> 32) as u32 }
    }
}

/// A fixed number of entries.
pub(super) struct Pool<T> {
    entries: Box<[Entry<T>]>,
    free: Vec<u32>,
}

struct Entry<T> {
    /// Even while free, odd while in use; so every owner has a number of its own.
    owner: u32,
    value: T,
}

impl<T: Default> Pool<T> {
    /// A pool of `len` entries.
    pub(super) fn new(len: usize) -> Self {
        Self {
            entries: (0..len).map(|_| Entry { owner: 0, value: T::default() }).collect(),
            // The last one is taken first, so a quiet pool stays on few cache lines.
            free: (0..len as u32).rev().collect(),
        }
    }

    /// Takes an entry as its last owner left it. `None` when all are in use.
    pub(super) fn take(&mut self) -> Option<Handle> {
        let at = self.free.pop()?;
        let entry = &mut self.entries[at as usize];
        entry.owner = entry.owner.wrapping_add(1);
        Some(Handle { at, owner: entry.owner })
    }

    /// Gives an entry back.
    pub(super) fn give(&mut self, handle: Handle) {
        let entry = &mut self.entries[handle.at as usize];
        debug_assert_eq!(entry.owner, handle.owner, "an entry is given back once, by its owner");
        if entry.owner == handle.owner {
            entry.owner = entry.owner.wrapping_add(1);
            self.free.push(handle.at);
        }
    }

    /// The entry, unless it has been given back since.
    pub(super) fn find(&mut self, handle: Handle) -> Option<&mut T> {
        let entry = self.entries.get_mut(handle.at as usize)?;
        (entry.owner == handle.owner).then_some(&mut entry.value)
    }

    /// All entries that are in use.
    pub(super) fn iter(&self) -> impl Iterator<Item = &T> {
        self.entries.iter().filter(|entry| entry.owner % 2 == 1).map(|entry| &entry.value)
    }

    /// How many entries are in use.
    pub(super) fn used(&self) -> usize {
        self.entries.len() - self.free.len()
    }
}

impl<T> std::ops::Index<Handle> for Pool<T> {
    type Output = T;

    fn index(&self, handle: Handle) -> &T {
        debug_assert_eq!(self.entries[handle.at as usize].owner, handle.owner, "a handle is used by its owner");
        &self.entries[handle.at as usize].value
    }
}

impl<T> std::ops::IndexMut<Handle> for Pool<T> {
    fn index_mut(&mut self, handle: Handle) -> &mut T {
        debug_assert_eq!(self.entries[handle.at as usize].owner, handle.owner, "a handle is used by its owner");
        &mut self.entries[handle.at as usize].value
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_is_worth_nothing_after_its_entry_was_given_back() {
        let mut pool: Pool<u32> = Pool::new(1);
        let first = pool.take().unwrap();
        pool[first] = 7;
        assert_eq!(pool.take(), None, "all are in use");
        pool.give(first);
        assert_eq!(pool.find(first), None);
        let second = pool.take().unwrap();
        assert_eq!(pool.find(first), None);
        assert_eq!(pool.find(second), Some(&mut 7));
        assert_eq!(Handle::unpack(second.pack()), second);
        assert_eq!(pool.used(), 1);
    }
}
