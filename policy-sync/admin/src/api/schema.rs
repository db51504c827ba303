//! The JSON that the API takes and gives.

use jiff::Timestamp;
use policy_sync::stored::{Body, Key, Remark};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{
    held::Item,
    plan::Difference,
    store::{Entry, Outcome},
};

/// The most differences that one response lists; further ones are counted.
pub const DIFFERENCES_MAX: usize = 1_000;

/// Which rule or override: one of the two fields.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum KeyView {
    /// A rule.
    Rule {
        /// Its name.
        rule: String,
    },
    /// An override.
    Override {
        /// Which.
        #[serde(rename = "override")]
        over: OverrideKey,
    },
}

/// Which override.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct OverrideKey {
    /// The rule's name, or `*` for all rules.
    pub rule: String,
    /// The values of the rule's `per` attributes, in the order of `per`.
    pub identity: Vec<String>,
}

impl From<&Key> for KeyView {
    fn from(key: &Key) -> Self {
        match key.clone() {
            Key::Rule(rule) => Self::Rule { rule },
            Key::Override { rule, identity } => Self::Override { over: OverrideKey { rule, identity } },
        }
    }
}

/// A limit.
#[derive(Debug, ToSchema)]
pub struct LimitBody {
    /// The most tokens that a bucket holds.
    pub capacity: u64,
    /// How many come back in a period.
    pub refill: u64,
    /// The period, such as `1m`.
    pub period: String,
}

/// A calendar total in UTC.
#[derive(Debug, ToSchema)]
pub struct QuotaBody {
    /// How much.
    pub amount: u64,
    /// `day` or `month`.
    pub every: String,
    /// Whether what is allowed while the store is away is added to it afterwards.
    pub billed: Option<bool>,
}

/// How hot keys are met.
#[derive(Debug, ToSchema)]
pub struct HotBody {
    /// `auto`, `off`, or how many tokens a gateway takes at once.
    #[schema(value_type = serde_json::Value)]
    pub lease: Option<String>,
    /// Into how many parts a bucket is split.
    pub split: Option<u32>,
    /// One check in so many is asked.
    pub sample: Option<u32>,
}

/// What a rule says: the fields that `[[rule]]` of a policy file has, but for the name.
#[derive(Debug, ToSchema)]
pub struct RuleBody {
    /// Attribute name to pattern (exact, `prefix*`, `*`); all must hold.
    #[schema(value_type = std::collections::BTreeMap<String, String>)]
    pub r#match: Option<()>,
    /// No other attributes allowed.
    pub match_all: Option<bool>,
    /// The attributes that form the identity; none: one bucket for everybody.
    pub per: Option<Vec<String>>,
    /// What is allowed. One of `limit`, `quota`, `deny`, `exempt`.
    pub limit: Option<LimitBody>,
    /// What is allowed, by the calendar.
    pub quota: Option<QuotaBody>,
    /// `true`: nothing is allowed.
    pub deny: Option<bool>,
    /// `true`: everything is allowed.
    pub exempt: Option<bool>,
    /// `enforce`, `shadow` or `off`.
    pub mode: Option<String>,
    /// The share of identities that the rule covers, 0 to 100 in steps of 0.01.
    pub rollout_pct: Option<f64>,
    /// `local`, `open` or `closed`: what answers while Redis does not.
    pub on_failure: Option<String>,
    /// The bucket of one gateway while Redis is away.
    pub local: Option<LimitBody>,
    /// How hot keys are met.
    pub hot: Option<HotBody>,
}

/// What an override says: the fields that `[[override]]` of a policy file has, but for `rule` and `identity`.
#[derive(Debug, ToSchema)]
pub struct OverrideBody {
    /// What is allowed in place of the rule's. One of `limit`, `quota`, `deny`, `exempt`.
    pub limit: Option<LimitBody>,
    /// What is allowed, by the calendar.
    pub quota: Option<QuotaBody>,
    /// `true`: nothing is allowed.
    pub deny: Option<bool>,
    /// `true`: the rule does not apply.
    pub exempt: Option<bool>,
    /// How hot keys are met, in place of the rule's.
    pub hot: Option<HotBody>,
    /// Until when it holds, such as `2027-01-01T00:00:00Z`.
    pub expires: Option<String>,
}

/// A rule of the policy.
#[derive(Debug, Serialize, ToSchema)]
pub struct RuleView {
    /// Its name.
    pub name: String,
    /// The version that changed it last; its ETag.
    pub version: u64,
    /// What it says.
    #[schema(value_type = RuleBody)]
    pub rule: Body,
    /// Why gateways refuse it, and with it the whole policy. Only somebody who writes into the store by hand can make one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
}

/// An override of the policy.
#[derive(Debug, Serialize, ToSchema)]
pub struct OverrideView {
    /// The rule's name, or `*`.
    pub rule: String,
    /// For whom.
    pub identity: Vec<String>,
    /// The version that changed it last; its ETag.
    pub version: u64,
    /// What it says.
    #[serde(rename = "override")]
    #[schema(value_type = OverrideBody)]
    pub body: Body,
    /// Why gateways refuse it, and with it the whole policy.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
}

fn problems(item: &Item) -> Vec<String> {
    let text = |remark: &Remark| remark.to_string();
    item.entry.as_ref().err().map(|wrong| wrong.list.iter().map(text).collect()).unwrap_or_default()
}

impl RuleView {
    /// A rule as it stands in the policy.
    pub fn new(name: &str, item: &Item) -> Self {
        Self { name: name.into(), version: item.version, rule: item.body.clone(), problems: problems(item) }
    }
}

impl OverrideView {
    /// An override as it stands in the policy.
    pub fn new(rule: &str, identity: &[String], item: &Item) -> Self {
        let (rule, identity) = (rule.into(), identity.to_vec());
        Self { rule, identity, version: item.version, body: item.body.clone(), problems: problems(item) }
    }
}

/// A page of rules.
#[derive(Debug, Serialize, ToSchema)]
pub struct RuleList {
    /// The policy's version.
    pub version: u64,
    /// The rules, by name.
    pub rules: Vec<RuleView>,
    /// `after` for the next page; nothing on the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// A page of overrides.
#[derive(Debug, Serialize, ToSchema)]
pub struct OverrideList {
    /// The policy's version.
    pub version: u64,
    /// The overrides, by rule and identity.
    pub overrides: Vec<OverrideView>,
    /// `after` for the next page; nothing on the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// What happens to one rule or override, in a change of several.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct OperationBody {
    /// Put or delete.
    pub op: Op,
    /// The rule; or
    pub rule: Option<String>,
    /// the override.
    #[serde(rename = "override")]
    pub over: Option<OverrideKey>,
    /// What it is to say.
    #[schema(value_type = serde_json::Value)]
    pub body: Option<Body>,
    /// The version that changed it last when it was read; 0: it must not exist yet. May be left out where If-Match says
    /// which version of the policy was read.
    pub if_version: Option<u64>,
}

/// What happens.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Op {
    /// It is to say this from now on, new or not.
    Put,
    /// It goes.
    Delete,
}

/// Several at once: all of them, or none.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ChangeBody {
    /// Why, for the history.
    #[serde(default)]
    pub comment: String,
    /// What happens.
    pub operations: Vec<OperationBody>,
}

/// A way back.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RollbackBody {
    /// To this version.
    pub to: u64,
    /// Only this rule with its overrides; left out: everything.
    pub rule: Option<String>,
    /// Why, for the history.
    #[serde(default)]
    pub comment: String,
}

/// What differs.
#[derive(Debug, Serialize, ToSchema)]
pub struct DifferenceView {
    /// Where.
    #[serde(flatten)]
    pub key: KeyView,
    /// `added`, `changed` or `removed`.
    pub kind: &'static str,
    /// The fields that differ.
    pub fields: Vec<String>,
    /// What it said.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = serde_json::Value)]
    pub before: Option<Body>,
    /// What it says.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = serde_json::Value)]
    pub after: Option<Body>,
}

/// What differs between two versions.
#[derive(Debug, Serialize, ToSchema)]
pub struct Differences {
    /// What differs, rules first.
    pub differences: Vec<DifferenceView>,
    /// How many more there are.
    pub more: usize,
}

impl From<Vec<Difference>> for Differences {
    fn from(list: Vec<Difference>) -> Self {
        let more = list.len().saturating_sub(DIFFERENCES_MAX);
        let view = |difference: Difference| DifferenceView {
            key: KeyView::from(&difference.key),
            kind: match (&difference.before, &difference.after) {
                (None, _) => "added",
                (_, None) => "removed",
                _ => "changed",
            },
            fields: difference.fields(),
            before: difference.before,
            after: difference.after,
        };
        Self { differences: list.into_iter().take(DIFFERENCES_MAX).map(view).collect(), more }
    }
}

/// What a change did.
#[derive(Debug, Serialize, ToSchema)]
pub struct ChangeView {
    /// The version that the policy has afterwards.
    pub version: u64,
    /// Whether that is a new version. Not, if nothing differs, or it was a dry run.
    pub changed: bool,
    /// Whether it was a dry run.
    pub dry_run: bool,
    /// What differs.
    #[serde(flatten)]
    pub differences: Differences,
}

impl ChangeView {
    /// An outcome.
    pub fn new(outcome: Outcome, dry_run: bool) -> Self {
        let Outcome { version, is_changed, differences } = outcome;
        Self { version, changed: is_changed, dry_run, differences: differences.into() }
    }
}

/// An entry of the history.
#[derive(Debug, Serialize, ToSchema)]
pub struct EntryView {
    /// The version that it made.
    pub version: u64,
    /// Who: the name of a token, or of whoever wrote into the store by hand.
    pub author: String,
    /// Why.
    pub comment: String,
    /// When.
    #[schema(value_type = String, format = DateTime)]
    pub made_at: Timestamp,
    /// The version that it brought back, if any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rolled_back_to: Option<u64>,
    /// How many rules it changed.
    pub rules: u64,
    /// How many overrides it changed.
    pub overrides: u64,
}

impl From<Entry> for EntryView {
    fn from(entry: Entry) -> Self {
        let Entry { version, author, comment, made_at, rolled_back_to, rules, overrides } = entry;
        Self { version, author, comment, made_at, rolled_back_to, rules, overrides }
    }
}

/// A page of the history.
#[derive(Debug, Serialize, ToSchema)]
pub struct History {
    /// Newest first.
    pub changes: Vec<EntryView>,
    /// `before` for the next page; nothing on the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next: Option<u64>,
}

/// One change with what it did.
#[derive(Debug, Serialize, ToSchema)]
pub struct EntryInFull {
    /// The entry.
    #[serde(flatten)]
    pub entry: EntryView,
    /// What it did.
    #[serde(flatten)]
    pub differences: Differences,
}

/// Who runs which version.
#[derive(Debug, Serialize, ToSchema)]
pub struct Gateways {
    /// The policy's version.
    pub version: u64,
    /// How many gateways were seen lately.
    pub live: usize,
    /// How many of those run the policy's version.
    pub current: usize,
    /// All that are remembered, by name.
    pub gateways: Vec<GatewayView>,
}

/// A gateway.
#[derive(Debug, Serialize, ToSchema)]
pub struct GatewayView {
    /// Its name.
    pub name: String,
    /// The version that it runs.
    pub policy_version: u64,
    /// Whether that is the policy's.
    pub is_current: bool,
    /// Whether it was seen lately.
    pub is_live: bool,
    /// What runs there.
    pub software: String,
    /// Why it does not take the newest policy, if it does not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// Since when it runs.
    #[schema(value_type = String, format = DateTime)]
    pub started_at: Timestamp,
    /// When it was seen last.
    #[schema(value_type = String, format = DateTime)]
    pub seen_at: Timestamp,
    /// How many seconds ago that was.
    pub seen_secs_ago: f64,
}

/// What shadow rules would have done.
#[derive(Debug, Serialize, ToSchema)]
pub struct ShadowReport {
    /// Of each rule at each version of it, newest first.
    pub rules: Vec<ShadowRule>,
}

/// What a shadow rule would have done at one version of it.
#[derive(Debug, Serialize, ToSchema)]
pub struct ShadowRule {
    /// The rule.
    pub rule: String,
    /// The version that changed the rule last.
    pub rule_version: u64,
    /// How many checks it saw. Exact.
    pub checks: u64,
    /// How many of them it would have denied. Exact.
    pub denied: u64,
    /// The same as a share, in percent.
    pub denied_pct: f64,
    /// The first and the last hour in which it saw any.
    #[schema(value_type = String, format = DateTime)]
    pub first_hour: Timestamp,
    /// See `first_hour`.
    #[schema(value_type = String, format = DateTime)]
    pub last_hour: Timestamp,
    /// Who would have been denied most.
    pub identities: Vec<ShadowIdentity>,
    /// How many more identities are known.
    pub identities_more: u64,
}

/// What a shadow rule would have done to one identity. Of the identities only those that were denied most are followed;
/// their figures are never too high.
#[derive(Debug, Serialize, ToSchema)]
pub struct ShadowIdentity {
    /// As gateways encode it (`key=ak_1`), or a keyed hash of that.
    pub identity: String,
    /// How many checks the rule saw of it.
    pub checks: u64,
    /// How many of them it would have denied.
    pub denied: u64,
    /// The same as a share of this identity's checks, in percent.
    pub denied_pct: f64,
    /// When the rule saw it first.
    #[schema(value_type = String, format = DateTime)]
    pub first_seen: Timestamp,
    /// When the rule saw it last.
    #[schema(value_type = String, format = DateTime)]
    pub last_seen: Timestamp,
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on must stop")]

    use policy_sync::stored;
    use serde_json::{Value, json};
    use utoipa::PartialSchema;

    use super::*;

    /// The fields that a body may have, as reading one with an unknown field lists them.
    fn known(key: &Key) -> Vec<String> {
        let body = json!({ "zzzzzzzzzzzz": 1 }).as_object().cloned().unwrap();
        let wrong = stored::read(key, &body).unwrap_err();
        let text = wrong.list.iter().map(|one| one.message.clone()).find(|text| text.contains("known here")).unwrap();
        let list = text.split("known here are ").nth(1).unwrap();
        list.split(", ")
            .map(str::to_owned)
            .filter(|name| !["name", "rule", "identity"].contains(&name.as_str()))
            .collect()
    }

    fn described<T: PartialSchema>() -> Vec<String> {
        let schema: Value = serde_json::to_value(T::schema()).unwrap();
        schema["properties"].as_object().unwrap().keys().cloned().collect()
    }

    #[test]
    fn the_description_of_bodies_names_the_fields_that_are_read() {
        let sorted = |mut list: Vec<String>| {
            list.sort();
            list
        };
        assert_eq!(sorted(described::<RuleBody>()), sorted(known(&Key::Rule("r".into()))));
        let over = Key::Override { rule: "r".into(), identity: vec!["a".into()] };
        assert_eq!(sorted(described::<OverrideBody>()), sorted(known(&over)));
    }
}
