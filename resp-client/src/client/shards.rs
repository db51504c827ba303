//! The shards by number: an address keeps its index for as long as it is needed.

use super::{Client, NONE, ShardIndex};
use crate::{
    config::{Address, Mode},
    error::LinkError,
    link::{Link, State},
};

impl Client {
    /// The shard that has a slot, as far as is known. Without a cluster it is the same for all slots.
    #[inline]
    pub fn shard_of(&self, slot: u16) -> Option<ShardIndex> {
        self.slots.get(usize::from(slot)).copied().filter(|&shard| shard != NONE).map(ShardIndex)
    }

    /// A shard's address: `host:port`, or the path of a Unix socket. Empty for a shard that was never there.
    pub fn shard_name(&self, shard: ShardIndex) -> &str {
        self.links.get(self.sentinels + usize::from(shard.0)).map_or("", |link| &link.name)
    }

    /// A shard's address.
    pub fn shard_address(&self, shard: ShardIndex) -> Option<&Address> {
        self.links.get(self.sentinels + usize::from(shard.0)).map(|link| &link.address)
    }

    /// Shards that have an index: all below this number. At most [`crate::Config::shards_max`].
    pub fn shards(&self) -> usize {
        self.links.len() - self.sentinels
    }

    /// Whether calls to a shard are taken.
    pub fn shard_is_up(&self, shard: ShardIndex) -> bool {
        self.links.get(self.sentinels + usize::from(shard.0)).is_some_and(Link::is_up)
    }

    /// Why a shard is not up.
    pub fn shard_problem(&self, shard: ShardIndex) -> Option<&LinkError> {
        let link = self.links.get(self.sentinels + usize::from(shard.0))?;
        link.problem.as_ref().filter(|_| !link.is_up())
    }

    /// Whether every slot has a shard that is up.
    pub fn is_ready(&self) -> bool {
        let up = |&shard: &u16| shard != NONE && self.links[self.sentinels + usize::from(shard)].is_up();
        // Neighbours mostly have the same shard.
        let mut last = NONE;
        self.slots.iter().all(|shard| {
            let known = *shard == last || up(shard);
            last = *shard;
            known && last != NONE
        })
    }

    pub(super) fn shard_link(&mut self, shard: u16) -> &mut Link {
        &mut self.links[self.sentinels + usize::from(shard)]
    }

    /// Sends every slot to one shard.
    pub(super) fn set_only_shard(&mut self, shard: Option<u16>) {
        self.slots.fill(shard.unwrap_or(NONE));
        if let Some(shard) = shard {
            self.shard_link(shard).wanted = true;
        }
    }

    /// The index of an address; a new one takes a new index, or that of a shard that nobody needs any more.
    pub(super) fn shard_at(&mut self, address: Address) -> Option<u16> {
        let shards = &self.links[self.sentinels..];
        if let Some(known) = shards.iter().position(|link| link.address == address) {
            return u16::try_from(known).ok();
        }
        let scripts = self.config.scripts.len();
        if shards.len() < self.config.shards_max.min(usize::from(NONE) - self.sentinels) {
            let index = u16::try_from(self.links.len()).ok()?;
            self.links.push(Link::new(index, address, scripts));
            self.counters.shards.push(Default::default());
            return u16::try_from(self.links.len() - 1 - self.sentinels).ok();
        }
        let Some(gone) = shards.iter().position(|link| self.is_gone(link)) else {
            self.counters.shards_refused += 1;
            return None;
        };
        self.links[self.sentinels + gone].rename(address);
        self.counters.shards[gone] = Default::default();
        u16::try_from(gone).ok()
    }

    fn is_gone(&self, link: &Link) -> bool {
        let seed = matches!(&self.config.mode, Mode::Cluster { seeds } if seeds.contains(&link.address));
        !seed && !link.wanted && matches!(link.state, State::Down { .. }) && link.waiting.is_empty()
    }
}
