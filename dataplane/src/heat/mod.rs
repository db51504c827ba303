//! Heat: which buckets are asked for most, who answers for them, and what that saved.
//!
//! One [`Heat`] per core, without a lock, a clock or an allocation on the way of a check:
//!
//! ```text
//!   check ─► sampler     one check in 16 by chance, so 15 of 16 cost a countdown
//!              │
//!              ▼
//!           sketch       Space-Saving: a fixed number of keys; the hottest are in it for certain
//!              │ tick, some times a second: what is counted fades, and is published
//!              ▼
//!           board        a page per core, for whoever reads: `/v1/status`, `sluice hot`, and the other cores
//! ```
//!
//! What is counted fades with a time constant of [`FADES_WITHIN_MS`], so a count divided by that time is a rate, and a key
//! that has gone quiet leaves. All counts are those of sampled checks; [`SAMPLE_EVERY`] turns them into checks.
//!
//! Leases that are on `auto` follow it: [`Heat::touch`] says, for the checks that it samples and for no other, how warm
//! their bucket is, which is when a lease may begin; [`Heat::warmth`] says whether one that there is goes on. Between the
//! two thresholds neither happens, so nothing flaps.

pub mod board;
mod sampler;
mod sketch;

use std::sync::Arc;

use self::{
    board::{Board, Record},
    sampler::Sampler,
    sketch::{Entry, Sketch},
};
use crate::{decision::By, hot::HotSettings};

/// One check in so many is looked at, on average.
pub const SAMPLE_EVERY: u32 = 16;
/// What was counted this long ago counts e times less.
pub const FADES_WITHIN_MS: u64 = 2_000;
/// How often counts fade and are published.
const STEP_MS: u64 = 250;
/// The most keys that a core may count: each step copies all of them.
pub const HEAT_KEYS_MAX: usize = 4_096;
/// The most bytes of a key's name: as many as an encoded identity has.
pub const NAME_BYTES_MAX: usize = policy_sync::identity::ENCODED_BYTES_MAX;
/// Checks a second of one sampled check.
const PER_SECOND: f32 = SAMPLE_EVERY as f32 * 1000.0 / FADES_WITHIN_MS as f32;
/// Keys with fewer checks a second are not published: less than a sampled check in the last seconds.
const PUBLISHED_PER_SECOND_MIN: f32 = 0.5;

/// Who answered a check for a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum DecidedBy {
    /// The bucket itself, in this process, where there is no store.
    Memory,
    /// The store.
    Redis,
    /// The rejection cache.
    Rejection,
    /// A lease.
    Lease,
    /// Nobody, for this check: another one is asked for several.
    Sample,
    /// A bucket in memory, because the store did not answer.
    Local,
    /// Nobody: the rule is open on failure.
    Open,
    /// Nobody: the rule is closed on failure.
    Closed,
    /// Nobody waits: the rule is a shadow.
    Shadow,
}

impl DecidedBy {
    /// How many there are.
    pub const COUNT: usize = 9;
    /// All of them, in the order of their numbers.
    pub const ALL: [Self; Self::COUNT] = [
        Self::Memory,
        Self::Redis,
        Self::Rejection,
        Self::Lease,
        Self::Sample,
        Self::Local,
        Self::Open,
        Self::Closed,
        Self::Shadow,
    ];

    /// The word for people and programs.
    pub fn word(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Redis => By::Redis.word(),
            Self::Rejection => By::Rejection.word(),
            Self::Lease => By::Lease.word(),
            Self::Sample => By::Sample.word(),
            Self::Local => By::Local.word(),
            Self::Open => By::Open.word(),
            Self::Closed => By::Closed.word(),
            Self::Shadow => "shadow",
        }
    }
}

impl From<By> for DecidedBy {
    fn from(by: By) -> Self {
        match by {
            By::Redis => Self::Redis,
            By::Rejection => Self::Rejection,
            By::Lease => Self::Lease,
            By::Sample => Self::Sample,
            By::Local => Self::Local,
            By::Open => Self::Open,
            By::Closed => Self::Closed,
        }
    }
}

/// Whose bucket it is: a rule's, by its counters' slot, which survives changes of the policy; or a throttle command's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// See [`RuleSlots`](crate::policy::RuleSlots).
    Rule(u32),
    /// The command.
    Throttle(&'static str),
}

/// How hot a bucket is, to a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Warmth {
    /// Below half of `lease_auto_above`, or not among the hottest: a lease ends.
    Cold,
    /// Between: a lease that there is goes on, and none begins.
    Warm,
    /// Above `lease_auto_above`: a lease may begin.
    Hot,
}

impl Warmth {
    /// The word for people and programs.
    pub fn word(self) -> &'static str {
        match self {
            Self::Cold => "cold",
            Self::Warm => "warm",
            Self::Hot => "hot",
        }
    }
}

/// Where leases begin and end, in checks a second.
#[derive(Clone, Copy, Debug)]
pub struct Thresholds {
    above: f32,
}

impl Thresholds {
    /// Of these settings.
    pub fn new(settings: &HotSettings) -> Self {
        Self { above: settings.lease_auto_above as f32 }
    }

    /// What so many checks a second are.
    pub fn judge(self, checks_per_second: f32) -> Warmth {
        if checks_per_second > self.above {
            Warmth::Hot
        } else if checks_per_second > self.above / 2.0 {
            Warmth::Warm
        } else {
            Warmth::Cold
        }
    }
}

/// A bucket of a sampled check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Touched {
    /// How warm it is now.
    pub warmth: Warmth,
    /// It has come often enough to be worth a name, and has none: see [`Heat::name`].
    pub is_nameless: bool,
}

/// One core's heat.
pub struct Heat {
    sampler: Sampler,
    sketch: Sketch,
    thresholds: Thresholds,
    board: Arc<Board>,
    core: usize,
    stepped_ms: u64,
    step_at_ms: u64,
    /// The check in hand is sampled and counted, and is read once more so that its buckets get their names.
    wants_names: bool,
}

impl Heat {
    /// The heat of this core of the board. The seed chooses which checks are sampled.
    pub fn new(settings: &HotSettings, board: &Arc<Board>, core: usize, seed: u64) -> Self {
        Self {
            sampler: Sampler::new(seed ^ (core as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15)),
            sketch: Sketch::new(settings.heat_keys),
            thresholds: Thresholds::new(settings),
            board: Arc::clone(board),
            core,
            stepped_ms: 0,
            step_at_ms: 0,
            wants_names: false,
        }
    }

    /// Whether the check in hand is one of those that are looked at. To be asked once for each check.
    #[inline(always)]
    pub fn samples(&mut self) -> bool {
        self.sampler.samples()
    }

    /// Counts a sampled check for one of its buckets.
    pub fn touch(&mut self, key: u64, owner: Owner) -> Touched {
        let entry = self.sketch.add(key);
        entry.facts.owner = owner;
        // At the second time: most keys of a wide stream come in, are met by no other sampled check, and go.
        let is_nameless = entry.facts.name_len == 0 && entry.count - entry.error > 1.01;
        Touched { warmth: warmth(self.thresholds, entry), is_nameless }
    }

    /// Counts who answered a sampled check for a bucket, and how much of a call to the store that took: one that answered
    /// four checks is a quarter for each.
    pub fn decided(&mut self, key: u64, by: DecidedBy, calls: f32) {
        if let Some(entry) = self.sketch.find(key) {
            entry.facts.by[by as usize] += 1.0;
            entry.facts.calls += calls;
        }
    }

    /// Gives a bucket the name that people read: an encoded identity, whose characters are harmless everywhere.
    pub fn name(&mut self, key: u64, identity: &[u8]) {
        if let Some(entry) = self.sketch.find(key) {
            let len = identity.len().min(NAME_BYTES_MAX);
            entry.facts.name[..len].copy_from_slice(&identity[..len]);
            // At most `NAME_BYTES_MAX`.
            entry.facts.name_len = len as u8;
        }
    }

    /// How warm a bucket is. For those that have a lease: what is cold is not worth the search.
    pub fn warmth(&mut self, key: u64) -> Warmth {
        let thresholds = self.thresholds;
        self.sketch.find(key).map_or(Warmth::Cold, |entry| warmth(thresholds, entry))
    }

    /// Remembers that the check in hand, which is counted, comes once more to name its buckets.
    pub(crate) fn want_names(&mut self) {
        self.wants_names = true;
    }

    /// Whether the check in hand is one that is counted and comes for the names.
    #[inline(always)]
    pub(crate) fn take_want(&mut self) -> bool {
        std::mem::take(&mut self.wants_names)
    }

    /// Lets counts fade and publishes them, when it is time.
    #[inline(always)]
    pub fn tick(&mut self, now_ms: u64) {
        if now_ms >= self.step_at_ms {
            self.step(now_ms);
        }
    }

    #[inline(never)]
    fn step(&mut self, now_ms: u64) {
        let elapsed_ms = now_ms.saturating_sub(self.stepped_ms);
        (self.stepped_ms, self.step_at_ms) = (now_ms, now_ms + STEP_MS);
        // What came since the last step is half of it old, on average.
        let unit = PER_SECOND * faded(elapsed_ms / 2);
        let records = self.sketch.entries().filter_map(|entry| Record::of(entry, unit));
        self.board.publish(self.core, now_ms, records.filter(|record| record.per_second >= PUBLISHED_PER_SECOND_MIN));
        self.sketch.fade(faded(elapsed_ms));
        self.hear_others(now_ms);
    }

    /// A lease belongs to the gateway, so its rate is that of all cores: adds what the others have published.
    fn hear_others(&mut self, now_ms: u64) {
        let (board, sketch) = (&self.board, &mut self.sketch);
        let mut is_complete = true;
        for other in (0..board.cores()).filter(|&other| other != self.core) {
            is_complete &= board.look(other, now_ms, |record, fade| {
                if let Some(entry) = sketch.find(record.key) {
                    entry.heard_per_second += record.per_second * fade;
                }
            });
        }
        for entry in sketch.entries_mut() {
            let heard = std::mem::take(&mut entry.heard_per_second);
            // Where a page could not be read, it is likely as it was.
            entry.elsewhere_per_second = if is_complete { heard } else { heard.max(entry.elsewhere_per_second) };
        }
    }
}

fn warmth(thresholds: Thresholds, entry: &Entry) -> Warmth {
    thresholds.judge((entry.count - entry.error) * PER_SECOND + entry.elsewhere_per_second)
}

/// What is left of a count after so long.
fn faded(elapsed_ms: u64) -> f32 {
    (-(elapsed_ms as f32) / FADES_WITHIN_MS as f32).exp()
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests;
