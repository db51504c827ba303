//! Where the buckets live: a fixed array of groups, each two cache lines.
//!
//! ```text
//!   0        16       32                                            128
//!  ┌────────┬────────┬────────┬────────┬────────┬────────┬────────┬────────┐
//!  │ claim  │ slot 0 │ slot 1 │ slot 2 │ slot 3 │ slot 4 │ slot 5 │ slot 6 │
//!  └────────┴────────┴────────┴────────┴────────┴────────┴────────┴────────┘
//! ```
//!
//! An identity has a *home* group, given by its key, and a second one derived from home and fingerprint; it sits in
//! any slot of the two. Checks of an identity that is there touch its slot alone: load, compute, compare-and-swap.
//!
//! **Putting a new identity in** must not end with two copies of it, each full. All identities with the same home go
//! in one at a time, through the home's *claim* word:
//!
//! ```text
//!   insert(key):
//!     claim := home.claim                          (1) read before looking
//!     if claim is taken: finish it for its owner; again
//!     if key is in one of the 14 slots: done       (2)
//!     victim := an empty slot of the emptier group, else the one untouched for longest
//!     CAS home.claim: claim → taken(fingerprint, victim, version+1)    (3)
//!     finish: CAS victim: what is there → fresh bucket; CAS home.claim: taken → free(version+1)
//! ```
//!
//! (3) succeeds only if nothing with this home was put in since (1), so (2) cannot have become wrong. Whoever finds
//! a taken claim finishes it, so a core that stalls in the middle holds nobody up: no lock. The one finisher that
//! could do harm, one that stalls just before its last compare-and-swap, fails there, because the slot's word has
//! changed meanwhile: it carries the fingerprint and the time.
//!
//! **Bounded**: when all fourteen slots are taken the bucket that was untouched for longest goes. If it had time to
//! become full again nothing is lost; if not, its identity starts full, and that is counted apart ([`TableCounts`]).

use policy_sync::rate::Rate;

use super::word::{FINGERPRINT_BITS, Level, fingerprint};
use crate::{
    prefetch::prefetch,
    sync::{AtomicU64, AtomicU128, Ordering},
};

/// Slots of a group.
#[cfg(not(loom))]
pub const SLOTS_PER_GROUP: usize = 7;
#[cfg(loom)]
pub const SLOTS_PER_GROUP: usize = 1;

/// Bytes of a group.
pub const GROUP_BYTES: usize = 128;

#[repr(C, align(128))]
struct Group {
    claim: AtomicU64,
    slots: [AtomicU128; SLOTS_PER_GROUP],
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<Group>() == GROUP_BYTES && align_of::<Group>() == GROUP_BYTES);

/// A home's claim word:
///
/// ```text
///  63        42 41         40         39        36 35             0
/// ┌────────────┬───────────┬──────────┬────────────┬────────────────┐
/// │ version 22 │ to empty 1│ taken 1  │ slot 4     │ fingerprint 36 │
/// └────────────┴───────────┴──────────┴────────────┴────────────────┘
/// ```
///
/// The version makes a claim differ from the ones before; it would take 4 million insertions into one group during one
/// stalled compare-and-swap for it to come round. `to empty` says that the slot was empty when it was chosen: identities
/// of two homes can choose the same slot, and the later must not put out the earlier, which is in use.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Claim(u64);

impl Claim {
    const SLOT_SHIFT: u32 = FINGERPRINT_BITS;
    const TAKEN: u64 = 1 << 40;
    const TO_EMPTY: u64 = 1 << 41;
    const VERSION_SHIFT: u32 = 42;

    fn is_taken(self) -> bool {
        self.0 & Self::TAKEN != 0
    }

    fn take(self, fingerprint: u64, victim: Victim) -> Self {
        let to_empty = if victim.is_empty { Self::TO_EMPTY } else { 0 };
        Self(self.next_version() | to_empty | Self::TAKEN | (victim.slot as u64) << Self::SLOT_SHIFT | fingerprint)
    }

    fn is_to_empty(self) -> bool {
        self.0 & Self::TO_EMPTY != 0
    }

    fn free(self) -> Self {
        Self(self.next_version())
    }

    fn next_version(self) -> u64 {
        ((self.0 >> Self::VERSION_SHIFT) + 1) << Self::VERSION_SHIFT
    }

    fn fingerprint(self) -> u64 {
        self.0 & ((1 << FINGERPRINT_BITS) - 1)
    }

    fn slot(self) -> usize {
        (self.0 >> Self::SLOT_SHIFT) as usize & 0xF
    }
}

const _: () = assert!(2 * SLOTS_PER_GROUP <= 16, "a claim names a slot in 4 bits");

/// What happened to the table on one core; the core owns it and the shell adds the cores up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableCounts {
    /// Identities put in.
    pub inserted: u64,
    /// Buckets dropped after they had time to become full again: nothing was lost.
    pub evicted_full: u64,
    /// Buckets dropped before that: their identities start full. The table is too small for the load.
    pub evicted_in_use: u64,
}

/// All buckets of the process.
pub struct BucketTable {
    groups: Box<[Group]>,
    mask: usize,
}

/// A bucket as it was a moment ago, brought up to date but not written back.
#[derive(Clone, Copy)]
pub struct Probe<'t> {
    /// The level at the time of the probe, refilled.
    pub level: Level,
    key: u64,
    seen: u128,
    slot: Option<&'t AtomicU128>,
}

/// A taking that was worked out, see [`BucketTable::prepare`].
#[derive(Clone, Copy)]
pub struct Take<'t> {
    slot: &'t AtomicU128,
    seen: u128,
    word: u128,
}

impl Take<'_> {
    /// Takes, unless the bucket has changed since.
    #[inline(always)]
    pub fn commit(&self) -> bool {
        self.slot.compare_exchange(self.seen, self.word, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Undoes a commit. Should the bucket have been dropped for another identity meanwhile, there is nothing to undo.
    #[cold]
    pub fn give_back(&self, rate: &Rate, cost: u32) {
        let mut seen = self.slot.load(Ordering::Acquire);
        while fingerprint(seen) == fingerprint(self.word) {
            let level = Level::unpack(seen).with_back(rate, cost);
            let word = level.pack(fingerprint(seen));
            match self.slot.compare_exchange(seen, word, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return,
                Err(now) => seen = now,
            }
        }
    }
}

/// The slot that an identity is put in, and whether there was nothing in it.
#[derive(Clone, Copy)]
struct Victim {
    slot: usize,
    is_empty: bool,
}

impl Victim {
    fn empty(slot: usize) -> Self {
        Self { slot, is_empty: true }
    }

    fn occupied(slot: usize) -> Self {
        Self { slot, is_empty: false }
    }
}

/// What an insertion must know of a group.
struct Survey {
    /// How many slots are empty.
    empty: usize,
    /// The first of them.
    first_empty: usize,
    /// When the slot that was untouched for longest was touched, and which it is.
    oldest: (u64, usize),
}

/// What a core knows when it writes to the table.
#[derive(Clone, Copy, Debug)]
pub struct Moment {
    /// Milliseconds since the process began.
    pub now_ms: u64,
    /// How long a bucket must have been untouched for sure to be full again.
    pub fill_ms_max: u64,
}

impl BucketTable {
    /// A table for at least `buckets` identities, rounded up to a power of two of groups. All of its memory is
    /// touched here, so it does not grow later.
    pub fn new(buckets: usize) -> Self {
        let groups = buckets.div_ceil(SLOTS_PER_GROUP).next_power_of_two();
        let groups: Box<[Group]> = (0..groups)
            .map(|_| Group { claim: AtomicU64::new(0), slots: std::array::from_fn(|_| AtomicU128::new(0)) })
            .collect();
        Self { mask: groups.len() - 1, groups }
    }

    /// How many buckets fit.
    pub fn capacity(&self) -> usize {
        self.groups.len() * SLOTS_PER_GROUP
    }

    /// Starts loading the lines that a check of `key` will read.
    #[inline(always)]
    pub fn prefetch(&self, key: u64) {
        let group: *const Group = &raw const self.groups[self.home(key)];
        prefetch(group.cast());
        prefetch(group.cast::<u8>().wrapping_add(64).cast());
    }

    /// Reads a bucket, brought up to `now_ms`. A bucket that is not there is full.
    #[inline(always)]
    pub fn probe(&self, key: u64, rate: &Rate, now_ms: u64) -> Probe<'_> {
        match self.find(key) {
            Some((slot, seen)) => {
                Probe { level: Level::unpack(seen).refilled(rate, now_ms), key, seen, slot: Some(slot) }
            }
            None => Probe { level: Level::fresh(now_ms).refilled(rate, now_ms), key, seen: 0, slot: None },
        }
    }

    /// Works out taking `cost` tokens, at least one, from a bucket that is there and holds them, without doing it. Also
    /// returns the level that would be left.
    #[inline(always)]
    pub fn prepare(&self, key: u64, rate: &Rate, cost: u32, now_ms: u64) -> Option<(Take<'_>, Level)> {
        debug_assert!(cost > 0, "who only looks writes nothing");
        let (slot, seen) = self.find(key)?;
        let level = Level::unpack(seen).refilled(rate, now_ms);
        let level = Level { tokens: level.tokens.checked_sub(cost)?, ..level };
        Some((Take { slot, seen, word: level.pack(fingerprint_of(key)) }, level))
    }

    /// Takes `cost` tokens, at most the capacity, from a probed bucket. If the bucket changed since, it is probed
    /// again.
    ///
    /// # Errors
    ///
    /// The level, where it holds fewer tokens; then nothing was taken.
    #[inline(always)]
    pub fn take(
        &self,
        probe: Probe<'_>,
        rate: &Rate,
        cost: u32,
        moment: Moment,
        counts: &mut TableCounts,
    ) -> Result<Level, Level> {
        if let Some(slot) = probe.slot
            && probe.level.tokens >= cost
        {
            let level = Level { tokens: probe.level.tokens - cost, ..probe.level };
            let word = level.pack(fingerprint_of(probe.key));
            if slot.compare_exchange(probe.seen, word, Ordering::AcqRel, Ordering::Acquire).is_ok() {
                return Ok(level);
            }
        }
        self.take_slowly(probe.key, rate, cost, moment, counts)
    }

    #[cold]
    #[inline(never)]
    fn take_slowly(
        &self,
        key: u64,
        rate: &Rate,
        cost: u32,
        moment: Moment,
        counts: &mut TableCounts,
    ) -> Result<Level, Level> {
        self.update(key, moment, counts, |level| {
            let level = level.refilled(rate, moment.now_ms);
            if level.tokens >= cost { Ok(Level { tokens: level.tokens - cost, ..level }) } else { Err(level) }
        })
    }

    /// Gives back what a check took before another rule denied it; capped at the capacity.
    pub fn give_back(&self, key: u64, rate: &Rate, cost: u32, moment: Moment, counts: &mut TableCounts) {
        let _ = self.update(key, moment, counts, |level| Ok(level.refilled(rate, moment.now_ms).with_back(rate, cost)));
    }

    /// Replaces a bucket's level by `change` of it, atomically; an `Err` of `change` changes nothing.
    fn update(
        &self,
        key: u64,
        moment: Moment,
        counts: &mut TableCounts,
        change: impl Fn(Level) -> Result<Level, Level>,
    ) -> Result<Level, Level> {
        loop {
            let Some((slot, seen)) = self.find(key) else {
                // An identity whose first check does not fit leaves no trace.
                change(Level::fresh(moment.now_ms))?;
                self.insert(key, moment, counts);
                continue;
            };
            let level = change(Level::unpack(seen))?;
            let word = level.pack(fingerprint_of(key));
            if slot.compare_exchange(seen, word, Ordering::AcqRel, Ordering::Acquire).is_ok() {
                return Ok(level);
            }
        }
    }

    #[inline(always)]
    fn find(&self, key: u64) -> Option<(&AtomicU128, u128)> {
        let (home, wanted) = (self.home(key), fingerprint_of(key));
        find_in(&self.groups[home], wanted).or_else(|| find_in(&self.groups[self.second(home, wanted)], wanted))
    }

    #[cold]
    #[inline(never)]
    fn insert(&self, key: u64, moment: Moment, counts: &mut TableCounts) {
        let (home, wanted) = (self.home(key), fingerprint_of(key));
        loop {
            let claim = Claim(self.groups[home].claim.load(Ordering::Acquire));
            if claim.is_taken() {
                self.finish(home, claim, moment, counts);
                continue;
            }
            if self.find(key).is_some() {
                return;
            }
            let taken = claim.take(wanted, self.victim(home, wanted, moment));
            let word = &self.groups[home].claim;
            if word.compare_exchange(claim.0, taken.0, Ordering::AcqRel, Ordering::Acquire).is_ok() {
                self.finish(home, taken, moment, counts);
                return;
            }
        }
    }

    /// Completes a taken claim, one's own or another core's.
    fn finish(&self, home: usize, claim: Claim, moment: Moment, counts: &mut TableCounts) {
        let wanted = claim.fingerprint();
        let slot = self.slot(home, wanted, claim.slot());
        let word = &self.groups[home].claim;
        loop {
            let seen = slot.load(Ordering::Acquire);
            if fingerprint(seen) == wanted {
                break;
            }
            // Read after the slot: if the claim still stands, `seen` is from before its completion.
            if word.load(Ordering::Acquire) != claim.0 {
                return;
            }
            if claim.is_to_empty() && seen != 0 {
                // An identity of another home was faster. Whoever made this claim looks for another slot.
                break;
            }
            let fresh = Level::fresh(moment.now_ms).pack(wanted);
            if slot.compare_exchange(seen, fresh, Ordering::AcqRel, Ordering::Acquire).is_ok() {
                counts.inserted += 1;
                if seen != 0 {
                    let full = is_full_again(Level::unpack(seen), moment);
                    *(if full { &mut counts.evicted_full } else { &mut counts.evicted_in_use }) += 1;
                }
                break;
            }
        }
        let _ = word.compare_exchange(claim.0, claim.free().0, Ordering::AcqRel, Ordering::Acquire);
    }

    /// The slot to put a new identity in: the home group's while that is at most half full, so that most checks touch
    /// one group; then the emptier group's; then the one untouched for longest.
    fn victim(&self, home: usize, wanted: u64, moment: Moment) -> Victim {
        let at_home = self.survey(home, wanted, 0);
        if at_home.empty > SLOTS_PER_GROUP / 2 {
            return Victim::empty(at_home.first_empty);
        }
        if at_home.empty == 0 && moment.now_ms.saturating_sub(at_home.oldest.0) > moment.fill_ms_max {
            return Victim::occupied(at_home.oldest.1);
        }
        let away = self.survey(home, wanted, SLOTS_PER_GROUP);
        match (at_home.empty, away.empty) {
            (0, 0) => Victim::occupied(at_home.oldest.min(away.oldest).1),
            (here, there) if here >= there => Victim::empty(at_home.first_empty),
            _ => Victim::empty(away.first_empty),
        }
    }

    fn survey(&self, home: usize, wanted: u64, from: usize) -> Survey {
        let mut survey = Survey { empty: 0, first_empty: from, oldest: (u64::MAX, from) };
        for at in (from..from + SLOTS_PER_GROUP).rev() {
            match self.slot(home, wanted, at).load(Ordering::Acquire) {
                0 => (survey.empty, survey.first_empty) = (survey.empty + 1, at),
                word => survey.oldest = survey.oldest.min((Level::unpack(word).at_ms, at)),
            }
        }
        survey
    }

    /// The slots of the home group are 0.., those of the second group follow.
    fn slot(&self, home: usize, wanted: u64, at: usize) -> &AtomicU128 {
        if at < SLOTS_PER_GROUP {
            &self.groups[home].slots[at]
        } else {
            &self.groups[self.second(home, wanted)].slots[at - SLOTS_PER_GROUP]
        }
    }

    #[inline(always)]
    fn home(&self, key: u64) -> usize {
        (key >> 20) as usize & self.mask
    }

    #[inline(always)]
    fn second(&self, home: usize, wanted: u64) -> usize {
        // Odd, so never the home itself (unless there is one group only).
        let step = (wanted.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as usize | 1;
        (home ^ step) & self.mask
    }
}

fn is_full_again(level: Level, moment: Moment) -> bool {
    moment.now_ms.saturating_sub(level.at_ms) > moment.fill_ms_max
}

#[inline(always)]
fn find_in(group: &Group, wanted: u64) -> Option<(&AtomicU128, u128)> {
    for slot in &group.slots {
        let word = slot.load(Ordering::Acquire);
        if fingerprint(word) == wanted {
            return Some((slot, word));
        }
    }
    None
}

/// The fingerprint of a key: its lowest and highest bits, never 0. The home comes from the bits between, and up.
#[inline(always)]
fn fingerprint_of(key: u64) -> u64 {
    let bits = key.rotate_left(16) & ((1 << FINGERPRINT_BITS) - 1);
    if bits == 0 { 1 } else { bits }
}
