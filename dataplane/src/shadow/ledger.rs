//! One core's record of what its shadow rules saw in some seconds.

use std::sync::Arc;

use policy_sync::identity;

use super::Tag;
use crate::hot::mix;

/// Identities that compete for the same places.
const WAYS: usize = 8;

/// How often a rule was asked, and how often it would have denied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Total {
    /// The rule at its version.
    pub tag: Arc<Tag>,
    /// Checks that it saw.
    pub checks: u64,
    /// Of those, the ones that it would have denied.
    pub denied: u64,
}

/// The same of one identity.
#[derive(Clone, Debug)]
pub struct Identity {
    /// 0: the place is free.
    key: u64,
    /// The index of the rule's total.
    total: u32,
    name_bytes: u16,
    name: [u8; identity::ENCODED_BYTES_MAX],
    /// Checks of this identity that the rule saw.
    pub checks: u64,
    /// Of those, the ones that it would have denied.
    pub denied: u64,
    /// When the first of them came, in milliseconds since the process began.
    pub first_ms: u64,
    /// When the last of them came.
    pub last_ms: u64,
}

const FREE: Identity = Identity {
    key: 0,
    total: 0,
    name_bytes: 0,
    name: [0; identity::ENCODED_BYTES_MAX],
    checks: 0,
    denied: 0,
    first_ms: 0,
    last_ms: 0,
};

impl Identity {
    /// The encoded identity.
    pub fn name(&self) -> &[u8] {
        &self.name[..usize::from(self.name_bytes)]
    }
}

/// A record of fixed size.
#[derive(Debug)]
pub struct Ledger {
    /// The hour in which it began, in milliseconds since the Unix epoch.
    pub hour_unix_ms: i64,
    totals: Vec<Total>,
    /// Sets of [`WAYS`] places each.
    places: Box<[Identity]>,
    dropped: u64,
    scratch: Vec<u8>,
}

impl Ledger {
    /// Room for about this many identities.
    pub fn new(identities: usize) -> Self {
        let sets = identities.div_ceil(WAYS).next_power_of_two();
        Self {
            hour_unix_ms: 0,
            totals: Vec::new(),
            places: vec![FREE; sets * WAYS].into(),
            dropped: 0,
            scratch: Vec::new(),
        }
    }

    /// Whether nothing was counted.
    pub fn is_empty(&self) -> bool {
        self.totals.iter().all(|total| total.checks == 0)
    }

    /// Identities that lost their place, and checks of such as found none.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// What the rules saw.
    pub fn totals(&self) -> impl Iterator<Item = &Total> {
        self.totals.iter()
    }

    /// The identities of the rules, with the rule of each.
    pub fn identities(&self) -> impl Iterator<Item = (&Tag, &Identity)> {
        let used = self.places.iter().filter(|place| place.key != 0 && place.checks > 0);
        used.filter_map(|place| Some((&*self.totals.get(place.total as usize)?.tag, place)))
    }

    /// Forgets everything and keeps the room.
    pub fn clear(&mut self) {
        if !self.totals.is_empty() || self.dropped > 0 {
            self.places.iter_mut().for_each(|place| place.key = 0);
        }
        self.totals.clear();
        self.dropped = 0;
    }

    pub(super) fn meet(&mut self, tag: &Arc<Tag>, key: u64, now_ms: u64, name: impl FnOnce(&mut Vec<u8>)) {
        let key = place_key(tag, key);
        let set = self.set(key);
        if let Some(place) = self.places[set..set + WAYS].iter_mut().find(|place| place.key == key) {
            // It may have been carried over; and it is to be carried over again while this check waits for its answer.
            (place.first_ms, place.last_ms) = (place.first_ms.min(now_ms), place.last_ms.max(now_ms));
            return;
        }
        // A newcomer takes a free place, or that of who was never denied and came last the longest ago. Whoever was denied keeps
        // its place: those who come most, come first in each ledger.
        let worst = (set..set + WAYS).min_by_key(|&at| {
            let place = &self.places[at];
            (place.key != 0, place.denied, place.last_ms)
        });
        let Some(at) = worst else { return };
        if self.places[at].key != 0 && self.places[at].checks > 0 {
            self.dropped += 1;
            if self.places[at].denied > 0 {
                return;
            }
        }
        let total = self.total(tag);
        self.scratch.clear();
        name(&mut self.scratch);
        let bytes = self.scratch.len().min(identity::ENCODED_BYTES_MAX);
        let place = &mut self.places[at];
        place.name[..bytes].copy_from_slice(&self.scratch[..bytes]);
        // At most `ENCODED_BYTES_MAX`, so it fits.
        (place.key, place.total, place.name_bytes) = (key, total, bytes as u16);
        (place.checks, place.denied, place.first_ms, place.last_ms) = (0, 0, now_ms, now_ms);
    }

    pub(super) fn count(&mut self, tag: &Arc<Tag>, key: u64, is_denied: bool, now_ms: u64) {
        let key = place_key(tag, key);
        let total = self.total(tag);
        let denied = u64::from(is_denied);
        let total = &mut self.totals[total as usize];
        total.checks += 1;
        total.denied += denied;
        let set = self.set(key);
        if let Some(place) = self.places[set..set + WAYS].iter_mut().find(|place| place.key == key) {
            place.checks += 1;
            place.denied += denied;
            place.first_ms = place.first_ms.min(now_ms);
            place.last_ms = place.last_ms.max(now_ms);
        }
    }

    /// Takes over the identities that were met lately, with nothing counted: the answers to some of their checks are still
    /// to come, and are counted here.
    pub(super) fn carry(&mut self, from: &Self, since_ms: u64) {
        for (at, place) in from.places.iter().enumerate() {
            let Some(total) = from.totals.get(place.total as usize) else { continue };
            if place.key == 0 || place.last_ms < since_ms {
                continue;
            }
            let total = self.total(&total.tag);
            // Both have as many places, so an identity has the same ones.
            if let Some(here) = self.places.get_mut(at) {
                here.clone_from(place);
                (here.total, here.checks, here.denied, here.first_ms) = (total, 0, 0, u64::MAX);
            }
        }
    }

    fn set(&self, key: u64) -> usize {
        let sets = self.places.len() / WAYS;
        // A power of two.
        (key as usize & (sets - 1)) * WAYS
    }

    /// The index of a rule's total. Shadow rules are few, and the newest is asked for most.
    fn total(&mut self, tag: &Arc<Tag>) -> u32 {
        let at = self.totals.iter().position(|total| total.tag.id == tag.id).unwrap_or_else(|| {
            self.totals.push(Total { tag: Arc::clone(tag), checks: 0, denied: 0 });
            self.totals.len() - 1
        });
        // There are at most as many as rules.
        at as u32
    }
}

/// The same identity of another version of the rule is another one here.
fn place_key(tag: &Tag, key: u64) -> u64 {
    mix(key, tag.id).max(1)
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;

    fn tag(id: u64) -> Arc<Tag> {
        Arc::new(Tag { id, rule: format!("r{id}").into(), version: id })
    }

    fn check(ledger: &mut Ledger, tag: &Arc<Tag>, identity: u64, is_denied: bool, now_ms: u64) {
        ledger.meet(tag, identity, now_ms, |name| name.extend(format!("key={identity}").bytes()));
        ledger.count(tag, identity, is_denied, now_ms);
    }

    fn figures(ledger: &Ledger) -> Vec<(String, String, u64, u64)> {
        let mut all: Vec<_> = ledger
            .identities()
            .map(|(tag, one)| {
                (tag.rule.to_string(), String::from_utf8(one.name().to_vec()).unwrap(), one.checks, one.denied)
            })
            .collect();
        all.sort();
        all
    }

    #[test]
    fn a_few_identities_are_followed_exactly() {
        let mut ledger = Ledger::new(64);
        let (one, two) = (tag(1), tag(2));
        for round in 0..10 {
            check(&mut ledger, &one, 1, round >= 5, 100 + round);
            check(&mut ledger, &one, 2, false, 100 + round);
            check(&mut ledger, &two, 1, true, 100 + round);
        }
        let expected = [("r1", "key=1", 10, 5), ("r1", "key=2", 10, 0), ("r2", "key=1", 10, 10)];
        let expected = expected.map(|(rule, name, checks, denied)| (rule.to_owned(), name.to_owned(), checks, denied));
        assert_eq!(figures(&ledger), expected);
        let totals: Vec<_> = ledger.totals().map(|total| (total.tag.id, total.checks, total.denied)).collect();
        assert_eq!(totals, [(1, 20, 5), (2, 10, 10)]);
        let (_, first) = ledger.identities().next().unwrap();
        assert_eq!((first.first_ms, first.last_ms), (100, 109));
        ledger.clear();
        assert!(ledger.is_empty() && figures(&ledger).is_empty());
    }

    #[test]
    fn an_answer_that_comes_after_the_page_was_turned_finds_its_identity() {
        let (mut old, mut new, one) = (Ledger::new(64), Ledger::new(64), tag(1));
        check(&mut old, &one, 1, false, 1_000);
        check(&mut old, &one, 2, false, 5_000);
        old.meet(&one, 3, 9_000, |name| name.extend(b"key=3"));
        new.carry(&old, 5_000);
        assert!(new.is_empty() && figures(&new).is_empty());
        new.count(&one, 3, true, 9_010);
        new.count(&one, 1, false, 9_020);
        assert_eq!(figures(&new), [("r1".to_owned(), "key=3".to_owned(), 1, 1)], "1 was not met lately");
        let (_, three) = new.identities().next().unwrap();
        assert_eq!((three.first_ms, three.last_ms), (9_010, 9_010));
        assert_eq!(new.totals().map(|total| total.checks).sum::<u64>(), 2);
    }

    #[test]
    fn among_many_the_ones_that_are_denied_keep_their_places_and_totals_stay_exact() {
        let mut ledger = Ledger::new(256);
        let one = tag(1);
        // Ten that are denied now and then, among a hundred thousand that come once and are not.
        for number in 0..100_000_u64 {
            check(&mut ledger, &one, 1_000_000 + number, false, number);
            if number.is_multiple_of(100) {
                (0..10).for_each(|identity| check(&mut ledger, &one, identity, true, number));
            }
        }
        let total = ledger.totals().next().unwrap();
        assert_eq!((total.checks, total.denied), (110_000, 10_000));
        let denied: Vec<_> = figures(&ledger).into_iter().filter(|(.., denied)| *denied > 0).collect();
        assert_eq!(denied.len(), 10);
        assert!(denied.iter().all(|(_, _, checks, denied)| (*checks, *denied) == (1_000, 1_000)), "{denied:?}");
        assert!(ledger.dropped() > 0);
    }
}
