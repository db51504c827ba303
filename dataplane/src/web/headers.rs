//! The headers that tell a client about its limit: the IETF draft's, the legacy ones, and `Retry-After`.
//!
//! Draft: draft-ietf-httpapi-ratelimit-headers-10. Its quota `q` is the bucket's capacity and its window `w` the seconds that
//! an empty bucket takes to be full again; `r` is what is left and `t` the seconds until a request like this one passes
//! (after a deny) or until all is there again (after an allow).

use hyper::header::{HeaderName, HeaderValue, RETRY_AFTER};
use smallvec::SmallVec;

use super::{asking::Said, settings::HeaderStyle};
use crate::{
    decision::{Answer, NEVER, Verdict},
    policy::LoadedPolicy,
};

/// Where waiting does not help (the rule denies everything, or never holds as much as was asked) a client is told to come
/// back after a day.
const NEVER_S: u64 = 86_400;
/// What a bucket is called that belongs to no rule.
const NAMELESS: &str = "request";

const POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
const RATELIMIT: HeaderName = HeaderName::from_static("ratelimit");
const LEGACY: [HeaderName; 3] = [
    HeaderName::from_static("ratelimit-limit"),
    HeaderName::from_static("ratelimit-remaining"),
    HeaderName::from_static("ratelimit-reset"),
];
const X: [HeaderName; 3] = [
    HeaderName::from_static("x-ratelimit-limit"),
    HeaderName::from_static("x-ratelimit-remaining"),
    HeaderName::from_static("x-ratelimit-reset"),
];

/// Names and values.
pub(super) type Fields = SmallVec<[(HeaderName, HeaderValue); 4]>;

/// The name of the rule that decided.
pub(super) fn rule_name<'a>(policy: &'a LoadedPolicy, verdict: &Verdict) -> Option<&'a str> {
    verdict.rule.map(|rule| &*policy.snapshot.rules()[rule as usize].name)
}

/// Whole seconds, rounded up.
pub(super) fn seconds(ms: i64) -> u64 {
    if ms == NEVER { NEVER_S } else { ms.max(0).cast_unsigned().div_ceil(1000) }
}

/// How long whoever was denied is to wait: at least a second.
pub(super) fn retry_after_s(verdict: &Verdict) -> u64 {
    seconds(verdict.retry_after_ms).max(1)
}

/// What a client is told by this style, and `Retry-After` where it was denied.
pub(super) fn fields(style: HeaderStyle, policy: &LoadedPolicy, said: &Said) -> Fields {
    let verdict = &said.verdict;
    let mut fields = Fields::new();
    let is_denied = verdict.answer == Answer::Deny;
    if let Some(rate) = &said.rate
        && style != HeaderStyle::None
    {
        let name = rule_name(policy, verdict).unwrap_or(NAMELESS);
        let (limit, remaining) = (verdict.limit.max(0), verdict.remaining.max(0));
        match style {
            HeaderStyle::Draft10 => {
                let window_s = rate.fill_ms().div_ceil(1000).max(1);
                let until_s = if is_denied { retry_after_s(verdict) } else { seconds(verdict.reset_after_ms) };
                push(&mut fields, POLICY, format_args!("\"{name}\";q={limit};w={window_s}"));
                push(&mut fields, RATELIMIT, format_args!("\"{name}\";r={remaining};t={until_s}"));
            }
            HeaderStyle::Legacy | HeaderStyle::X => {
                let names = if style == HeaderStyle::X { X } else { LEGACY };
                let reset_s = seconds(verdict.reset_after_ms);
                for (name, value) in names.into_iter().zip([limit.cast_unsigned(), remaining.cast_unsigned(), reset_s])
                {
                    fields.push((name, HeaderValue::from(value)));
                }
            }
            HeaderStyle::None => {}
        }
    }
    if is_denied {
        fields.push((RETRY_AFTER, HeaderValue::from(retry_after_s(verdict))));
    }
    fields
}

fn push(fields: &mut Fields, name: HeaderName, value: std::fmt::Arguments<'_>) {
    // Names of rules have letters, digits, `-`, `_` and `.` only, so this is a header's value.
    if let Ok(value) = HeaderValue::try_from(value.to_string()) {
        fields.push((name, value));
    }
}
