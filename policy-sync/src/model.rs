//! What a policy says, as plain data.
//!
//! These types carry meaning and no behaviour: a file, the admin API and the store all produce them, `check` says
//! whether they make sense, and `snapshot` compiles them. Every bound named here is checked in `check`.

use std::{borrow::Cow, collections::BTreeMap};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// The most tokens a bucket can hold. The bucket's packed word has 31 bits for them.
pub const CAPACITY_MAX: u64 = (1 << 31) - 1;
/// The longest period of a limit, in milliseconds: 31 days.
pub const PERIOD_MS_MAX: u64 = 31 * 24 * 3600 * 1000;
/// The most rules a policy may hold.
pub const RULES_MAX: usize = 65_536;
/// The most overrides a policy may hold.
pub const OVERRIDES_MAX: usize = 1_000_000;
/// The most distinct attribute names that all rules of a policy may mention.
pub const ATTRIBUTE_NAMES_MAX: usize = 255;
/// The longest rule or attribute name, in bytes.
pub const NAME_BYTES_MAX: usize = 128;
/// The most matchers, and the most `per` attributes, of one rule.
pub const ATTRIBUTES_PER_RULE_MAX: usize = 16;

/// The attribute name that stands for a key of a protocol whose keys may be anything, as Envoy's descriptor entries: ASCII
/// upper case becomes lower case, and each byte that no attribute name has becomes `_`. Whatever receives such keys and
/// whatever writes rules for them must agree, so this is the one place that says it. It does not look at the length, which
/// `check` bounds.
#[must_use]
pub fn attribute_name(key: &str) -> Cow<'_, str> {
    let allowed = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'-' | b'.');
    if key.bytes().all(allowed) {
        return Cow::Borrowed(key);
    }
    let mapped = key.bytes().map(|byte| byte.to_ascii_lowercase()).map(|byte| if allowed(byte) { byte } else { b'_' });
    Cow::Owned(mapped.map(char::from).collect())
}

/// All rules and overrides at one version.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Policy {
    /// The version number; a file's policy counts up from 1 with each successful load.
    pub version: u64,
    /// The rules, in the order in which they were written.
    pub rules: Vec<Rule>,
    /// The overrides, in the order in which they were written.
    pub overrides: Vec<Override>,
}

/// One rule: which requests it applies to, what identifies their sender, and what is allowed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rule {
    /// Unique; letters, digits, `-`, `_` and `.`.
    pub name: String,
    /// Attribute name to pattern; all must hold.
    #[serde(rename = "match", default)]
    pub matches: BTreeMap<String, Pattern>,
    /// No attributes beyond those in `match` and `per` are allowed in the request.
    #[serde(default)]
    pub match_all: bool,
    /// The attributes whose values are the identity; empty means one bucket for everybody.
    #[serde(default)]
    pub per: Vec<String>,
    /// What is allowed.
    pub allowance: Allowance,
    /// Whether the rule decides, only records, or sleeps.
    #[serde(default)]
    pub mode: Mode,
    /// The share of identities that the rule covers, in hundredths of a percent (0..=10 000).
    #[serde(default = "everybody")]
    pub rollout_bp: u16,
    /// What answers while the store does not.
    #[serde(default)]
    pub on_failure: OnFailure,
    /// The limit of one gateway's own bucket while the store does not answer; absent means the limit times `local_share`.
    #[serde(default)]
    pub local: Option<Limit>,
    /// How hot keys are met.
    #[serde(default)]
    pub hot: Hot,
}

/// The whole population, in hundredths of a percent.
pub const ROLLOUT_BP_ALL: u16 = 10_000;

fn everybody() -> u16 {
    ROLLOUT_BP_ALL
}

/// A token bucket: it starts full, refills continuously, and holds at most `capacity`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Limit {
    /// The most tokens that the bucket holds, 1..=[`CAPACITY_MAX`].
    pub capacity: u64,
    /// Tokens that come back each period, 1..=[`CAPACITY_MAX`].
    pub refill: u64,
    /// The period in milliseconds, 1..=[`PERIOD_MS_MAX`]; beyond 4 hours a whole number of seconds.
    pub period_ms: u64,
}

impl Limit {
    /// A share of the limit, above 0 and at most 1: of the capacity and of the rate, at least one token of each.
    ///
    /// The rate's share is exact to a thousandth where a longer period can say it, so that small limits keep their shape.
    #[must_use]
    pub fn share(self, share: f64) -> Self {
        // Between 1 and 1000, and so are the products far below 2^63.
        let thousandths = (share * 1000.0).round().clamp(1.0, 1000.0) as u64;
        let capacity = (self.capacity * thousandths / 1000).max(1);
        let (refill, period_ms) = (self.refill * thousandths, self.period_ms * 1000);
        let divisor = crate::rate::gcd(refill, period_ms);
        let exact = Self { capacity, refill: refill / divisor, period_ms: period_ms / divisor };
        if crate::rate::Rate::new(exact).is_ok() {
            return exact;
        }
        Self { capacity, refill: (self.refill * thousandths / 1000).max(1), ..self }
    }
}

/// What a rule or an override grants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Allowance {
    /// A token bucket.
    Limit(Limit),
    /// A calendar total.
    Quota(Quota),
    /// Nothing at all; written out as `deny = true`.
    Deny,
    /// Everything; written out as `exempt = true`.
    Exempt,
}

/// A total per calendar day or month, in UTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quota {
    /// How much each period allows.
    pub amount: u64,
    /// The calendar period.
    pub every: QuotaPeriod,
    /// Whether the total is billed, so that it must survive an outage to the last request.
    #[serde(default)]
    pub billed: bool,
}

/// A calendar period of a quota, in UTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QuotaPeriod {
    /// From midnight to midnight.
    Day,
    /// From the first of a month to the first of the next.
    Month,
}

/// What a matcher asks of an attribute's value. In a file: `"value"`, `"prefix*"` or `"*"`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pattern {
    /// The value is exactly this.
    Exact(String),
    /// The value starts with this (never empty).
    Prefix(String),
    /// The attribute is there.
    Present,
}

/// Whether a rule decides, only records, or sleeps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// The rule decides.
    #[default]
    Enforce,
    /// The rule is evaluated and recorded, and never changes a verdict.
    Shadow,
    /// The rule is not looked at.
    Off,
}

/// What answers while the store does not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnFailure {
    /// Allow.
    Open,
    /// Answer unavailable (503).
    Closed,
    /// A token bucket in this gateway's memory.
    #[default]
    Local,
}

/// How a rule meets hot keys; see the design's section 7.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hot {
    /// Whether batches are taken and spent locally.
    #[serde(default)]
    pub lease: Lease,
    /// Into how many parts the bucket is split; `None` leaves it whole.
    #[serde(default)]
    pub split: Option<u32>,
    /// One check in this many is asked, at as many times its cost; `None` asks each.
    #[serde(default)]
    pub sample: Option<u32>,
}

/// Whether a gateway takes batches of tokens and spends them locally.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Lease {
    /// For keys above a rate.
    #[default]
    Auto,
    /// Never.
    Off,
    /// Always, in batches of this many tokens.
    Batch(u32),
}

/// Another allowance for one identity of one rule, or of all rules.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Override {
    /// The rule's name, or `*` for every rule whose identity has these values.
    pub rule: String,
    /// The values of the rule's `per` attributes, in the order of `per`.
    pub identity: Vec<String>,
    /// What this identity gets instead.
    pub allowance: Allowance,
    /// How this identity's key is met where it is hot; `None` leaves it to the rule.
    #[serde(default)]
    pub hot: Option<Hot>,
    /// When the override ends; absent means never.
    #[serde(default)]
    pub expires: Option<Timestamp>,
}

#[cfg(test)]
mod tests {
    use super::attribute_name;

    #[test]
    fn any_key_has_an_attribute_name() {
        assert_eq!(attribute_name("remote_address"), "remote_address");
        assert_eq!(attribute_name("X-User.Id"), "x-user.id");
        assert_eq!(attribute_name(":path"), "_path");
        assert_eq!(attribute_name("größe x"), "gr____e_x");
    }
}
