//! What an earlier request tells about the next: the rules that apply to requests that differ in their last value only.
//!
//! A gateway asks the same question over and over for other identities: same path, same method, another key. Where the
//! last value decides nothing but whose bucket it is (no rule matches on it, and no override or rollout depends on it),
//! the rules that apply are the same, and of each bucket's key only that value's share is new. A recipe keeps the rest.

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::{Applied, Attributes, Snapshot, fold, position_salt};

/// Rules that a recipe can hold. Requests to which more apply are decided without one.
pub const RECIPE_RULES_MAX: usize = 4;

/// The rules that apply to all requests that differ from one in their last value only.
#[derive(Clone, Copy, Debug, Default)]
pub struct Recipe {
    steps: [Step; RECIPE_RULES_MAX],
    len: u8,
    /// Whether the last value is in any rule's identity.
    hashed: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Step {
    rule: u32,
    /// Whether the last value is in this rule's identity.
    takes_share: bool,
    /// The key without the last value's share.
    base: u64,
    /// What the share depends on beside the value.
    salt: u64,
}

impl Snapshot {
    /// The recipe of a request to which `applied` apply. `last_is_known` tells whether the last attribute that was pushed
    /// is one that the policy mentions; where it is not, no value of it changes anything.
    ///
    /// `None` where the last value may decide something, an override may expire, or too many rules apply.
    pub fn recipe(&self, attributes: &Attributes<'_>, last_is_known: bool, applied: &[Applied]) -> Option<Recipe> {
        if applied.len() > RECIPE_RULES_MAX || applied.iter().any(|one| one.override_index != Applied::NO_OVERRIDE) {
            return None;
        }
        let last = if last_is_known { Some(attributes.known.last()?) } else { None };
        if last.is_some_and(|last| !self.lookups[usize::from(last.name)].opaque) {
            return None;
        }
        let mut recipe = Recipe { len: applied.len() as u8, ..Recipe::default() };
        for (step, one) in recipe.steps.iter_mut().zip(applied) {
            let rule = &self.rules[one.rule as usize];
            let position = last.and_then(|last| rule.per.iter().position(|&name| name == last.name));
            *step = Step { rule: one.rule, takes_share: position.is_some(), base: one.key, salt: 0 };
            if let (Some(position), Some(last)) = (position, last) {
                step.salt = position_salt(position);
                step.base = one.key.wrapping_sub(fold(step.salt, last.hash));
                recipe.hashed = true;
            }
        }
        Some(recipe)
    }

    /// Appends the encoded identity of a rule up to the last attribute's value, which is all of it where that attribute is
    /// not in it. Returns `None` where the value stands in the middle, else whether it has to follow.
    pub fn identity_head(
        &self,
        rule: u32,
        attributes: &Attributes<'_>,
        last_is_known: bool,
        out: &mut Vec<u8>,
    ) -> Option<bool> {
        let rule = &self.rules[rule as usize];
        let last = if last_is_known { attributes.known.last() } else { None };
        let place = last
            .and_then(|last| rule.per_sorted.iter().position(|&position| rule.per[usize::from(position)] == last.name));
        match place {
            Some(place) if place + 1 != rule.per_sorted.len() => None,
            Some(_) => {
                let pairs = self.identity(rule, attributes.view());
                let start = out.len();
                crate::identity::encode_unshortened(pairs, out);
                // The value is what goes again; how long it is shows when it is encoded once more.
                let end = out.len();
                crate::identity::encode_value(last.map_or(&[][..], |last| last.value), out);
                let value_bytes = out.len() - end;
                out.truncate(end.saturating_sub(value_bytes).max(start));
                Some(true)
            }
            None => {
                crate::identity::encode(self.identity(rule, attributes.view()), out);
                Some(false)
            }
        }
    }

    /// The bucket's key of the request with this last value, by a recipe of one rule.
    #[inline(always)]
    pub fn follow_one(&self, recipe: &Recipe, last_value: &[u8]) -> u64 {
        debug_assert_eq!(recipe.len, 1, "the recipe is of one rule");
        let [step, ..] = &recipe.steps;
        if step.takes_share {
            step.base.wrapping_add(fold(step.salt, xxh3_64_with_seed(last_value, self.seed)))
        } else {
            step.base
        }
    }

    /// Appends what applies to the request with this last value.
    #[inline(always)]
    pub fn follow(&self, recipe: &Recipe, last_value: &[u8], applied: &mut Vec<Applied>) {
        let hash = if recipe.hashed { xxh3_64_with_seed(last_value, self.seed) } else { 0 };
        for step in &recipe.steps[..usize::from(recipe.len).min(RECIPE_RULES_MAX)] {
            let share = if step.takes_share { fold(step.salt, hash) } else { 0 };
            let key = step.base.wrapping_add(share);
            applied.push(Applied { rule: step.rule, override_index: Applied::NO_OVERRIDE, key });
        }
    }
}
