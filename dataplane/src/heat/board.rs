//! What the cores have published of their heat: a page for each, for readers on other threads.
//!
//! A page is behind a mutex that a core only ever *tries* to take, some times a second and never for a check. Where a reader
//! has it at that moment the core leaves its page as it is until the next time, so no reader can hold a core up. A reader
//! may wait for a core for as long as that copies its records, some microseconds. There is room for all records from the
//! start, so publishing allocates nothing.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError, TryLockError},
};

use super::{DecidedBy, NAME_BYTES_MAX, Owner, STEP_MS, faded, sketch::Entry};

/// What a core says of one key.
#[derive(Clone)]
pub struct Record {
    /// The bucket's key.
    pub key: u64,
    /// Whose it is.
    pub owner: Owner,
    /// Checks a second, not counting what may be another key's.
    pub per_second: f32,
    /// The most that it may be.
    pub per_second_max: f32,
    /// Checks a second by who answered them.
    pub by_per_second: [f32; DecidedBy::COUNT],
    /// Calls to the store that they took, a second.
    pub calls_per_second: f32,
    name_len: u8,
    name: [u8; NAME_BYTES_MAX],
}

impl Record {
    /// Of an entry that has a name; a sampled check of it is so many a second.
    pub(super) fn of(entry: &Entry, unit: f32) -> Option<Self> {
        let facts = &entry.facts;
        (facts.name_len > 0).then(|| Self {
            key: entry.key,
            owner: facts.owner,
            per_second: (entry.count - entry.error) * unit,
            per_second_max: entry.count * unit,
            by_per_second: facts.by.map(|count| count * unit),
            calls_per_second: facts.calls * unit,
            name_len: facts.name_len,
            name: facts.name,
        })
    }

    fn name(&self) -> &[u8] {
        &self.name[..usize::from(self.name_len)]
    }
}

struct Page {
    at_ms: u64,
    records: Vec<Record>,
}

impl Page {
    /// What is left of its counts by now. A core publishes at every step, and may miss one; a page that is older is that of a
    /// core which sleeps.
    fn fade(&self, now_ms: u64) -> f32 {
        faded(now_ms.saturating_sub(self.at_ms + 2 * STEP_MS))
    }
}

/// All pages.
pub struct Board {
    pages: Box<[Mutex<Page>]>,
    records_max: usize,
}

/// A key, by what all cores say of it.
#[derive(Clone, Debug)]
pub struct HotKey {
    /// Whose bucket it is.
    pub owner: Owner,
    /// The encoded identity.
    pub name: String,
    /// Checks a second.
    pub per_second: f32,
    /// The most that it may be.
    pub per_second_max: f32,
    /// Checks a second by who answered them.
    pub by_per_second: [f32; DecidedBy::COUNT],
    /// Calls to the store that they took, a second.
    pub calls_per_second: f32,
}

impl HotKey {
    /// Who answered what share of its checks; nothing where nobody has yet.
    pub fn shares(&self) -> impl Iterator<Item = (DecidedBy, f32)> + '_ {
        let all: f32 = self.by_per_second.iter().sum();
        let shares = DecidedBy::ALL.into_iter().zip(self.by_per_second.map(|count| count / all));
        shares.filter(|(_, share)| *share > 0.0)
    }

    /// Calls to the store that its checks did not take, a second.
    pub fn saved_calls_per_second(&self) -> f32 {
        (self.by_per_second.iter().sum::<f32>() - self.calls_per_second).max(0.0)
    }
}

impl Board {
    /// A page for each of so many cores, with room for so many records.
    pub fn new(cores: usize, records_max: usize) -> Self {
        let page = |_| Mutex::new(Page { at_ms: 0, records: Vec::with_capacity(records_max) });
        Self { pages: (0..cores).map(page).collect(), records_max }
    }

    /// How many pages there are.
    pub fn cores(&self) -> usize {
        self.pages.len()
    }

    /// Replaces what is on a core's page, unless somebody reads it at this moment.
    pub(super) fn publish(&self, core: usize, now_ms: u64, records: impl Iterator<Item = Record>) {
        if let Some(mut page) = self.try_page(core) {
            page.at_ms = now_ms;
            page.records.clear();
            page.records.extend(records.take(self.records_max));
        }
    }

    /// Reads a core's page, with what is left of its counts by now. False where it is in use at this moment.
    pub(super) fn look(&self, core: usize, now_ms: u64, mut see: impl FnMut(&Record, f32)) -> bool {
        let Some(page) = self.try_page(core) else { return false };
        let fade = page.fade(now_ms);
        page.records.iter().for_each(|record| see(record, fade));
        true
    }

    fn try_page(&self, core: usize) -> Option<MutexGuard<'_, Page>> {
        match self.pages.get(core)?.try_lock() {
            Ok(page) => Some(page),
            // Whatever was left there is replaced, or is only an estimate.
            Err(TryLockError::Poisoned(page)) => Some(page.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// The hottest keys of all cores together, at most so many, the hottest first.
    pub fn hottest(&self, now_ms: u64, keys_max: usize) -> Vec<HotKey> {
        let mut by_key: HashMap<u64, HotKey> = HashMap::new();
        for page in &self.pages {
            let page = page.lock().unwrap_or_else(PoisonError::into_inner);
            let fade = page.fade(now_ms);
            for record in &page.records {
                by_key.entry(record.key).or_insert_with(|| HotKey::nothing_of(record)).add(record, fade);
            }
        }
        let mut keys: Vec<_> =
            by_key.into_values().filter(|key| key.per_second >= super::PUBLISHED_PER_SECOND_MIN).collect();
        keys.sort_by(|one, other| other.per_second.total_cmp(&one.per_second).then_with(|| one.name.cmp(&other.name)));
        keys.truncate(keys_max);
        keys
    }
}

impl HotKey {
    fn nothing_of(record: &Record) -> Self {
        Self {
            owner: record.owner,
            name: String::from_utf8_lossy(record.name()).into_owned(),
            per_second: 0.0,
            per_second_max: 0.0,
            by_per_second: [0.0; DecidedBy::COUNT],
            calls_per_second: 0.0,
        }
    }

    fn add(&mut self, record: &Record, fade: f32) {
        self.per_second += record.per_second * fade;
        self.per_second_max += record.per_second_max * fade;
        self.calls_per_second += record.calls_per_second * fade;
        for (sum, more) in self.by_per_second.iter_mut().zip(record.by_per_second) {
            *sum += more * fade;
        }
    }
}
