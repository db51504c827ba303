//! What waits for the store on one core: checks, their parts, and the groups of buckets that the parts are for.
//!
//! ```text
//!   check ──► part ──► part             a part for each identity of the check's rules
//!               │        │
//!               ▼        ▼
//!             group    group            the buckets of one identity: one call covers them
//!               waiting ► part ► part   for the next call
//!               flying  ► part          of the call in flight
//! ```
//!
//! Parts are linked twice, in their check and in their group. All of it lives in pools of fixed size.

use std::{
    collections::HashMap,
    hash::{BuildHasherDefault, Hasher},
};

use policy_sync::model::Lease;
use smallvec::SmallVec;

use super::{
    Bucket,
    pool::{Handle, Pool},
    shards::ShardId,
};
use crate::{
    decision::{Verdict, Why},
    engine::ConnId,
};

/// Parts, and so groups, that a check may have on average.
const PARTS_PER_CHECK: usize = 4;

/// A check that waits.
#[derive(Default)]
pub(super) struct Check {
    pub(super) conn: ConnId,
    pub(super) cost: u32,
    /// The policy that its rules are of.
    pub(super) policy: u64,
    /// Heat looks at it.
    pub(super) is_sampled: bool,
    /// What it took is kept until those are decided, too, that were asked together with it.
    pub(super) is_together: bool,
    /// The parts of the rules that enforce.
    pub(super) parts: Option<Handle>,
    /// The parts of the shadow rules, dormant until the verdict.
    pub(super) shadows: Option<Handle>,
    /// How many of `parts` are still out.
    pub(super) outstanding: u32,
    /// The tightest of what granted.
    pub(super) allowed: Option<Verdict>,
    /// The longest wait of what denied.
    pub(super) denied: Option<Verdict>,
    pub(super) verdict: Option<Verdict>,
    /// The engine has the verdict, or nobody wants it any more.
    pub(super) is_read: bool,
}

/// What one check asks of one group.
#[derive(Default)]
pub(super) struct Part {
    /// Nobody, for a shadow rule's part once the verdict is known.
    pub(super) check: Option<Handle>,
    pub(super) group: Handle,
    pub(super) next_of_group: Option<Handle>,
    pub(super) next_of_check: Option<Handle>,
    pub(super) cost: u32,
    /// A batch for the group's lease: it gets what no check takes.
    pub(super) is_batch: bool,
    /// It was paid from the group's lease.
    pub(super) is_leased: bool,
    /// Whether it takes what it asks for. A shadow rule's only looks, where the check was denied.
    pub(super) takes: bool,
    pub(super) state: PartState,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum PartState {
    /// On its way, or dormant.
    #[default]
    Out,
    Granted,
    Denied,
    Failed(Why),
}

/// The buckets that one call covers, and the parts that want something from them.
#[derive(Default)]
pub(super) struct Group {
    pub(super) hash: u64,
    /// The policy that the buckets' rules are of.
    pub(super) policy: u64,
    pub(super) slot: u16,
    /// Whether tokens are taken in advance.
    pub(super) lease: Lease,
    /// The key of that lease, for all cores.
    pub(super) lease_key: u64,
    /// A part of it is a batch.
    pub(super) has_batch: bool,
    /// The shard that was last asked.
    pub(super) shard: Option<ShardId>,
    /// The buckets' keys, one after the other.
    pub(super) keys: Vec<u8>,
    pub(super) buckets: SmallVec<[Bucket; 4]>,
    pub(super) waiting: List,
    pub(super) flying: List,
    pub(super) is_in_flight: bool,
    /// How many parts the last call was for.
    pub(super) parts_of_call: u32,
    /// The call in flight decides about the breaker.
    pub(super) is_probe: bool,
    pub(super) is_dirty: bool,
    /// Who needs this group: its parts, and those that hold it.
    pub(super) parts: u32,
}

impl Group {
    /// The most that every bucket can ever grant.
    pub(super) fn capacity(&self) -> u32 {
        self.buckets.iter().map(|bucket| bucket.rate.capacity).min().unwrap_or(0)
    }

    /// How much of the last call each of its parts took.
    pub(super) fn call_share(&self) -> f32 {
        1.0 / self.parts_of_call.max(1) as f32
    }

    /// What a part adds to a call: nothing where it only looks or can never have it.
    pub(super) fn share(&self, part: &Part) -> u32 {
        if part.takes && part.cost <= self.capacity() { part.cost } else { 0 }
    }
}

/// A queue of parts, linked through them.
#[derive(Clone, Copy, Default)]
pub(super) struct List {
    ends: Option<(Handle, Handle)>,
}

impl List {
    pub(super) fn is_empty(&self) -> bool {
        self.ends.is_none()
    }

    pub(super) fn push(&mut self, parts: &mut Pool<Part>, part: Handle) {
        parts[part].next_of_group = None;
        self.ends = match self.ends {
            None => Some((part, part)),
            Some((first, last)) => {
                parts[last].next_of_group = Some(part);
                Some((first, part))
            }
        };
    }

    pub(super) fn pop(&mut self, parts: &mut Pool<Part>) -> Option<Handle> {
        let (first, last) = self.ends?;
        self.ends = parts[first].next_of_group.take().map(|next| (next, last));
        Some(first)
    }

    pub(super) fn first(&self) -> Option<Handle> {
        self.ends.map(|(first, _)| first)
    }
}

/// A hash that is one already.
#[derive(Default)]
pub(super) struct AsIs(u64);

impl Hasher for AsIs {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("only 64-bit hashes are looked up");
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }
}

/// All of it.
pub(super) struct Tables {
    pub(super) checks: Pool<Check>,
    pub(super) parts: Pool<Part>,
    pub(super) groups: Pool<Group>,
    /// Groups by the hash of their buckets: seeded, and 64 bits wide, so no two meet.
    by_hash: HashMap<u64, Handle, BuildHasherDefault<AsIs>>,
    /// Groups that may have something to send.
    pub(super) dirty: Vec<Handle>,
    /// What goes back to a group's buckets; each entry holds its group.
    pub(super) backs: Vec<(Handle, u32)>,
}

impl Tables {
    /// Room for so many checks.
    pub(super) fn new(checks: usize) -> Self {
        let parts = checks * PARTS_PER_CHECK;
        Self {
            checks: Pool::new(checks),
            parts: Pool::new(parts),
            groups: Pool::new(parts),
            by_hash: HashMap::with_capacity_and_hasher(2 * parts, BuildHasherDefault::default()),
            dirty: Vec::with_capacity(parts),
            backs: Vec::with_capacity(parts),
        }
    }

    /// The group of the buckets with this hash; `fill` makes a new one what it is. `None` when there is no room.
    pub(super) fn group(&mut self, hash: u64, fill: impl FnOnce(&mut Group)) -> Option<Handle> {
        if let Some(&group) = self.by_hash.get(&hash) {
            return Some(group);
        }
        let group = self.groups.take()?;
        let entry = &mut self.groups[group];
        entry.hash = hash;
        entry.shard = None;
        entry.keys.clear();
        entry.buckets.clear();
        (entry.waiting, entry.flying) = (List::default(), List::default());
        (entry.is_in_flight, entry.is_probe, entry.is_dirty, entry.parts) = (false, false, false, 0);
        (entry.lease, entry.lease_key, entry.has_batch) = (Lease::Off, 0, false);
        fill(entry);
        self.by_hash.insert(hash, group);
        Some(group)
    }

    /// A new part of a group, in no list yet. `None` when there is no room; the group is then let go if it has no other.
    pub(super) fn part(&mut self, check: Option<Handle>, group: Handle, cost: u32) -> Option<Handle> {
        let Some(part) = self.parts.take() else {
            self.release_group_if_idle(group);
            return None;
        };
        self.parts[part] = Part { check, group, cost, takes: true, ..Part::default() };
        self.groups[group].parts += 1;
        Some(part)
    }

    /// Puts a batch for a group's lease in line. `None` where there is no room.
    pub(super) fn batch(&mut self, group: Handle, tokens: u32) -> Option<()> {
        let part = self.part(None, group, tokens)?;
        self.parts[part].is_batch = true;
        self.groups[group].has_batch = true;
        self.queue(part);
        Some(())
    }

    /// Puts a part in line for its group's next call.
    pub(super) fn queue(&mut self, part: Handle) {
        let group = self.parts[part].group;
        self.groups[group].waiting.push(&mut self.parts, part);
        self.mark(group);
    }

    /// Remembers that a group may have something to send.
    pub(super) fn mark(&mut self, group: Handle) {
        if !std::mem::replace(&mut self.groups[group].is_dirty, true) {
            self.dirty.push(group);
        }
    }

    /// Lets a part go, and its group if nothing else needs it.
    pub(super) fn release_part(&mut self, part: Handle) {
        let group = self.parts[part].group;
        self.parts.give(part);
        self.groups[group].parts -= 1;
        self.release_group_if_idle(group);
    }

    /// Remembers to give tokens back to a group's buckets.
    pub(super) fn give_back(&mut self, group: Handle, tokens: u32) {
        if tokens > 0 {
            self.hold(group);
            self.backs.push((group, tokens));
        }
    }

    /// Keeps a group, as a part of it does, until `let_go`.
    pub(super) fn hold(&mut self, group: Handle) {
        self.groups[group].parts += 1;
    }

    /// See `hold`.
    pub(super) fn let_go(&mut self, group: Handle) {
        self.groups[group].parts -= 1;
        self.release_group_if_idle(group);
    }

    fn release_group_if_idle(&mut self, group: Handle) {
        let entry = &self.groups[group];
        if entry.parts == 0 && !entry.is_in_flight && !entry.is_dirty {
            self.by_hash.remove(&entry.hash);
            self.groups.give(group);
        }
    }

    /// Lets a check go once its verdict is read and nothing of it is out.
    pub(super) fn release_check_if_done(&mut self, check: Handle) {
        let entry = &self.checks[check];
        if entry.is_read && entry.outstanding == 0 && entry.verdict.is_some() {
            self.checks.give(check);
        }
    }
}
