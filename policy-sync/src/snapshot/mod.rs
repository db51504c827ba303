//! The policy compiled: from the attributes of a request to the rules that apply, without walking all rules.
//!
//! Each rule hangs on one of its conditions, the rarest in the policy: an exact value, a prefix, or the mere presence
//! of an attribute. A request asks one hash probe per attribute for the exact values, one per distinct prefix length
//! that the policy uses with that attribute, and gets the candidates, which are then verified byte by byte. So the
//! cost follows the request and the rules that apply, not the number of rules.
//!
//! Everything a request costs twice is paid once: an attribute's value is hashed when it is resolved
//! ([`Attributes::push`]), and the same hash finds rules and overrides and forms the bucket's key. That hash is
//! seeded per process, so that nobody can choose values that collide; rollout hashes with no seed (`identity`), so
//! that all gateways agree.
//!
//! `compile` builds a snapshot, `names` and `index` are its two tables, [`recipe`] saves the search where the last request
//! has already made it.

pub mod compile;
mod index;
mod names;
pub mod recipe;

use smallvec::SmallVec;
use thiserror::Error;
use xxhash_rust::xxh3::xxh3_64_with_seed;

pub use self::names::NameId;
use self::{index::Index, names::NameTable};
use crate::{
    bytes, identity,
    model::{Mode, ROLLOUT_BP_ALL},
    rate::Rate,
};

/// The most rules that may apply to one check. A check to which more apply is refused, not decided by some of them.
pub const RULES_PER_CHECK_MAX: usize = 64;

/// A policy compiled for the hot path. Immutable; shared by all cores.
pub struct Snapshot {
    version: u64,
    seed: u64,
    names: NameTable,
    /// By `NameId`: where to look for candidates when the attribute is there.
    lookups: Box<[Lookup]>,
    /// Rules that no attribute is needed for.
    unconditional: Box<[u32]>,
    index: Index,
    rules: Box<[CompiledRule]>,
    overrides: Box<[CompiledOverride]>,
    override_index: Index,
    longest_fill_ms: u64,
}

/// How the value of one attribute finds candidates.
#[derive(Default)]
struct Lookup {
    /// Tells the same value of different attributes apart.
    salt: u64,
    /// Whether any rule hangs on an exact value.
    exact: bool,
    /// Whether the value's hash is ever asked for.
    hashed: bool,
    /// Whether the value decides nothing but whose bucket it is: no rule asks for an exact value or a prefix of it, and
    /// no rule that has it in `per` has overrides or a rollout.
    opaque: bool,
    /// Whether any rule hangs on a prefix, or on the attribute being there.
    others: bool,
    /// The distinct lengths of the prefixes that rules hang on, ascending.
    prefix_lens: Box<[u32]>,
    /// Rules that hang on the attribute being there.
    present: Box<[u32]>,
}

/// A rule as the hot path sees it.
pub struct CompiledRule {
    /// The rule's name.
    pub name: Box<str>,
    /// Whether the rule decides or only records; rules that are off are kept for `explain` and never found.
    pub mode: Mode,
    /// What the rule grants to whoever has no override.
    pub allowance: Grant,
    /// The share of identities that it covers, in hundredths of a percent.
    pub rollout_bp: u16,
    matchers: Box<[Matcher]>,
    match_all: bool,
    per: Box<[NameId]>,
    /// Positions in `per`, sorted by attribute name: the order of the encoded identity.
    per_sorted: Box<[u8]>,
    /// Rules with the same attributes in `per`, in whatever order, have the same number: in one request their identities
    /// are the same, and so their buckets live on one shard.
    pub identity_group: u32,
    /// Starts the bucket's key; the same for the same name within the process, so a changed rule keeps its buckets.
    key_salt: u64,
    /// Starts the key of this rule's own overrides.
    override_salt: u64,
    has_overrides: bool,
    /// Whether overrides for `*` have identities of this length.
    has_star_overrides: bool,
}

struct Matcher {
    name: NameId,
    condition: Condition,
}

enum Condition {
    Exact(Box<[u8]>),
    Prefix(Box<[u8]>),
    Present,
}

impl Condition {
    #[inline(always)]
    fn holds(&self, value: &[u8]) -> bool {
        match self {
            Self::Exact(expected) => bytes::equal(expected, value),
            Self::Prefix(prefix) => value.len() >= prefix.len() && bytes::equal(prefix, &value[..prefix.len()]),
            Self::Present => true,
        }
    }
}

struct CompiledOverride {
    /// `None` stands for every rule.
    rule: Option<u32>,
    identity: Box<[Box<[u8]>]>,
    allowance: Grant,
    expires_unix_ms: i64,
}

/// What an identity gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grant {
    /// A token bucket.
    Limit(Rate),
    /// Nothing.
    Deny,
    /// Everything.
    Exempt,
}

/// Attributes for which [`Attributes`] has room of its own; more need a [`Room`], or an allocation.
pub const ATTRIBUTES_FEW: usize = 16;

/// Room for many attributes, kept from one request to the next.
#[derive(Default)]
pub struct Room(Vec<Attribute<'static>>);

/// The attributes of one request that the policy mentions, resolved and hashed.
#[derive(Default)]
pub struct Attributes<'a> {
    known: SmallVec<[Attribute<'a>; ATTRIBUTES_FEW]>,
    seen: [u64; 4],
    total: usize,
}

#[derive(Clone, Copy)]
struct Attribute<'a> {
    name: NameId,
    hash: u64,
    value: &'a [u8],
}

/// Why attributes cannot be decided on.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum AttributesError {
    /// One attribute came with two values.
    #[error("an attribute was given twice")]
    Duplicate,
    /// More rules apply than a check may have.
    #[error("more than {RULES_PER_CHECK_MAX} rules apply to this request")]
    TooManyRules,
}

/// A rule that applies to a request, with what its identity gets.
#[derive(Clone, Copy, Debug)]
pub struct Applied {
    /// Index into [`Snapshot::rules`].
    pub rule: u32,
    /// Index of the override that replaces the rule's allowance, or [`Applied::NO_OVERRIDE`].
    pub override_index: u32,
    /// The bucket's key: the rule and the identity, hashed with the process's seed.
    pub key: u64,
}

impl Applied {
    /// The rule's own allowance holds.
    pub const NO_OVERRIDE: u32 = u32::MAX;
}

impl<'a> Attributes<'a> {
    /// None yet, with this room for many.
    pub fn in_room(room: Room) -> Self {
        Self { known: SmallVec::from_vec(room.0), ..Self::default() }
    }

    /// The room, for the next request.
    pub fn into_room(mut self) -> Room {
        if !self.known.spilled() {
            return Room::default();
        }
        self.known.clear();
        // Collects nothing, and so into the same memory.
        let empty = self.known.into_vec().into_iter().map(|attribute| Attribute { value: &[], ..attribute });
        Room(empty.collect())
    }

    /// Forgets the last request.
    #[inline(always)]
    pub fn clear(&mut self) {
        self.known.clear();
        self.seen = [0; 4];
        self.total = 0;
    }

    /// Adds one attribute. Returns whether the policy mentions it; those that it does not only count for `match_all`.
    ///
    /// # Errors
    ///
    /// [`AttributesError::Duplicate`] where the policy mentions the name and it was there before.
    #[inline(always)]
    pub fn push(&mut self, snapshot: &Snapshot, name: &[u8], value: &'a [u8]) -> Result<bool, AttributesError> {
        self.total += 1;
        let Some(name) = snapshot.names.find(name) else {
            return Ok(false);
        };
        let (word, bit) = (usize::from(name >> 6), 1 << (name & 63));
        if self.seen[word] & bit != 0 {
            return Err(AttributesError::Duplicate);
        }
        self.seen[word] |= bit;
        let hashed = snapshot.lookups[usize::from(name)].hashed;
        let hash = if hashed { xxh3_64_with_seed(value, snapshot.seed) } else { 0 };
        self.known.push(Attribute { name, hash, value });
        Ok(true)
    }

    /// Whether the request has none.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.total == 0
    }

    #[inline(always)]
    fn view(&self) -> Known<'_, 'a> {
        Known { list: &self.known, total: self.total }
    }
}

/// The attributes as the search sees them: looked up by number, of which a request has a handful.
#[derive(Clone, Copy)]
struct Known<'v, 'a> {
    list: &'v [Attribute<'a>],
    total: usize,
}

impl<'v, 'a> Known<'v, 'a> {
    #[inline(always)]
    fn find(self, name: NameId) -> Option<&'v Attribute<'a>> {
        self.list.iter().find(|attribute| attribute.name == name)
    }
}

impl Snapshot {
    /// The policy's version.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// All rules, in the policy's order.
    pub fn rules(&self) -> &[CompiledRule] {
        &self.rules
    }

    /// The longest time that any bucket of this policy takes to be full again, in milliseconds. A bucket that was
    /// not touched for longer holds nothing worth remembering.
    pub fn longest_fill_ms(&self) -> u64 {
        self.longest_fill_ms
    }

    /// What an applied rule grants.
    #[inline(always)]
    pub fn grant(&self, applied: Applied) -> &Grant {
        if applied.override_index == Applied::NO_OVERRIDE {
            &self.rules[applied.rule as usize].allowance
        } else {
            &self.overrides[applied.override_index as usize].allowance
        }
    }

    /// Appends the rules that apply, in the policy's order: matched, not off, inside the rollout, overrides resolved.
    ///
    /// `scratch` carries its capacity from call to call.
    ///
    /// # Errors
    ///
    /// [`AttributesError::TooManyRules`]; `applied` is then as before.
    #[inline]
    pub fn applying(
        &self,
        attributes: &Attributes<'_>,
        unix_ms: i64,
        scratch: &mut Vec<u8>,
        applied: &mut Vec<Applied>,
    ) -> Result<(), AttributesError> {
        let start = applied.len();
        let mut search = Search { snapshot: self, known: attributes.view(), unix_ms, scratch, applied };
        for attribute in search.known.list {
            let lookup = &self.lookups[usize::from(attribute.name)];
            if lookup.exact {
                search.verify(self.index.find(exact_key(lookup.salt, attribute.hash)));
            }
            if lookup.others {
                search.beyond_exact(lookup, attribute);
            }
        }
        if !self.unconditional.is_empty() {
            search.verify(&self.unconditional);
        }
        match applied.len() - start {
            0 | 1 => Ok(()),
            found if found <= RULES_PER_CHECK_MAX => {
                sort_by_rule(&mut applied[start..]);
                Ok(())
            }
            _ => {
                applied.truncate(start);
                Err(AttributesError::TooManyRules)
            }
        }
    }

    /// What the overrides grant, by their index.
    pub fn override_grants(&self) -> impl Iterator<Item = &Grant> {
        self.overrides.iter().map(|over| &over.allowance)
    }

    /// Appends the encoded identity that a rule which applies has in a request; see [`identity`].
    #[inline]
    pub fn encode_identity(&self, rule: u32, attributes: &Attributes<'_>, out: &mut Vec<u8>) {
        identity::encode(self.identity(&self.rules[rule as usize], attributes.view()), out);
    }

    #[inline(never)]
    fn rollout_point(&self, rule: &CompiledRule, attributes: Known<'_, '_>, scratch: &mut Vec<u8>) -> u16 {
        identity::rollout_point(&rule.name, self.identity(rule, attributes), scratch)
    }

    /// The pairs of a rule's identity, sorted by name. Attributes that are missing are left out.
    fn identity<'b>(
        &'b self,
        rule: &'b CompiledRule,
        attributes: Known<'b, 'b>,
    ) -> impl Iterator<Item = (&'b str, &'b [u8])> + 'b {
        rule.per_sorted.iter().filter_map(move |&position| {
            let name = rule.per[usize::from(position)];
            attributes.find(name).map(|attribute| (self.names.name(name), attribute.value))
        })
    }

    /// The override in force for the identity: the rule's own before one for every rule.
    #[inline(never)]
    fn find_override(&self, index: u32, attributes: Known<'_, '_>, unix_ms: i64) -> Option<u32> {
        let rule = &self.rules[index as usize];
        let find = |salt, wanted: Option<u32>| {
            let key = identity_key(salt, rule, attributes);
            let found = self.override_index.find(key);
            found.iter().copied().find(|&candidate| {
                let candidate = &self.overrides[candidate as usize];
                candidate.rule == wanted
                    && candidate.expires_unix_ms > unix_ms
                    && candidate.identity.len() == rule.per.len()
                    && candidate.identity.iter().zip(&rule.per).all(|(value, &name)| {
                        attributes.find(name).is_some_and(|attribute| bytes::equal(attribute.value, value))
                    })
            })
        };
        let own = if rule.has_overrides { find(rule.override_salt, Some(index)) } else { None };
        own.or_else(|| if rule.has_star_overrides { find(star_salt(self.seed), None) } else { None })
    }
}

/// One request's search for the rules that apply.
struct Search<'s, 'v, 'a, 'o> {
    snapshot: &'s Snapshot,
    known: Known<'v, 'a>,
    unix_ms: i64,
    scratch: &'o mut Vec<u8>,
    applied: &'o mut Vec<Applied>,
}

impl Search<'_, '_, '_, '_> {
    /// Adds those of the candidates that apply.
    #[inline(always)]
    fn verify(&mut self, candidates: &[u32]) {
        for &index in candidates {
            let rule = &self.snapshot.rules[index as usize];
            if let Some(key) = self.key_if_applies(rule) {
                let overridden = rule.has_overrides || rule.has_star_overrides;
                let found = if overridden { self.find_override(index) } else { None };
                let override_index = found.unwrap_or(Applied::NO_OVERRIDE);
                self.applied.push(Applied { rule: index, override_index, key });
            }
        }
    }

    #[inline(never)]
    fn find_override(&self, index: u32) -> Option<u32> {
        self.snapshot.find_override(index, self.known, self.unix_ms)
    }

    /// The candidates that hang on prefixes of the value, and on the attribute being there.
    #[inline(never)]
    fn beyond_exact(&mut self, lookup: &Lookup, attribute: &Attribute<'_>) {
        for &len in &lookup.prefix_lens {
            let Some(prefix) = attribute.value.get(..len as usize) else { break };
            let key = prefix_key(lookup.salt, xxh3_64_with_seed(prefix, self.snapshot.seed));
            self.verify(self.snapshot.index.find(key));
        }
        self.verify(&lookup.present);
    }

    /// The bucket's key, if the rule applies.
    #[inline(always)]
    fn key_if_applies(&mut self, rule: &CompiledRule) -> Option<u64> {
        for matcher in &rule.matchers {
            if !matcher.condition.holds(self.known.find(matcher.name)?.value) {
                return None;
            }
        }
        let mut key = rule.key_salt;
        for (position, &name) in rule.per.iter().enumerate() {
            key = key.wrapping_add(share(position, self.known.find(name)?.hash));
        }
        let whole = !rule.match_all && rule.rollout_bp == ROLLOUT_BP_ALL;
        (whole || self.inside(rule)).then_some(key)
    }

    /// The conditions that few rules have.
    #[inline(never)]
    fn inside(&mut self, rule: &CompiledRule) -> bool {
        (!rule.match_all || self.known.total == rule.mentioned())
            && (rule.rollout_bp == ROLLOUT_BP_ALL
                || self.snapshot.rollout_point(rule, self.known, self.scratch) < rule.rollout_bp)
    }
}

impl CompiledRule {
    /// How many distinct attributes the rule mentions: all that `match_all` lets a request have.
    fn mentioned(&self) -> usize {
        self.matchers.len()
            + self.per.iter().filter(|&&name| self.matchers.iter().all(|matcher| matcher.name != name)).count()
    }
}

/// Rules come out grouped by attribute; nearly always there are one to three, so insertion sort is the fast one.
#[inline]
fn sort_by_rule(applied: &mut [Applied]) {
    for end in 1..applied.len() {
        let mut at = end;
        while at > 0 && applied[at - 1].rule > applied[at].rule {
            applied.swap(at - 1, at);
            at -= 1;
        }
    }
}

#[inline(always)]
fn exact_key(salt: u64, hash: u64) -> u64 {
    salt ^ hash
}

#[inline(always)]
fn prefix_key(salt: u64, hash: u64) -> u64 {
    salt.rotate_left(31) ^ hash
}

fn star_salt(seed: u64) -> u64 {
    xxh3_64_with_seed(b"*", seed ^ 0x6F76_6572_7269_6465)
}

/// The key of a rule's identity: a salt, and a share for each `per` value that depends on its position.
#[inline(always)]
fn identity_key(salt: u64, rule: &CompiledRule, attributes: Known<'_, '_>) -> u64 {
    rule.per.iter().enumerate().fold(salt, |key, (position, &name)| {
        // A rule that applies has every `per` attribute.
        key.wrapping_add(share(position, attributes.find(name).map_or(0, |attribute| attribute.hash)))
    })
}

/// What one value adds to an identity's key. A sum of these is as good as a chain, and a part of it can be kept.
#[inline(always)]
fn share(position: usize, hash: u64) -> u64 {
    fold(position_salt(position), hash)
}

/// Tells the same value in different positions apart.
#[inline(always)]
fn position_salt(position: usize) -> u64 {
    (position as u64 + 1).wrapping_mul(0xD6E8_FEB8_6659_FD93)
}

/// The high and the low half of a 128-bit product, as in wyhash and xxh3's short inputs.
#[inline(always)]
fn fold(key: u64, hash: u64) -> u64 {
    let product = u128::from(key ^ hash) * u128::from(0xA076_1D64_78BD_642F_u64);
    (product as u64) ^ ((product >> 64) as u64).rotate_left(17)
}
