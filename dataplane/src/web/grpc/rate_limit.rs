//! `ShouldRateLimit`: each descriptor is a check, whose attributes are the request's `domain` and the descriptor's entries.
//!
//! What differs from the reference (envoyproxy/ratelimit), and why:
//!
//! * all descriptors of a request are decided together: where one is over its limit, nothing is taken from the others
//!   (`grpc.count_all` counts them all, as the reference does);
//! * a decision that could not be made is the rule's failure policy: `closed` is UNAVAILABLE, which Envoy's own failure mode
//!   then answers; UNKNOWN is never sent, which Envoy would take for a pass;
//! * `duration_until_reset` of a descriptor that is over its limit is the time until this cost fits, which Envoy makes
//!   `Retry-After` of.

use policy_sync::{
    model::{Limit, attribute_name},
    rate::Rate,
};

use super::{
    proto::{
        Code, CurrentLimit, Descriptor, DescriptorStatus, Duration, Header, RateLimitRequest, RateLimitResponse, Unit,
    },
    status::{Code as Grpc, Status},
};
use crate::{
    decision::{Answer, NEVER, UNLIMITED},
    policy::LoadedPolicy,
    resp::command,
    web::{
        asking::{self, Answered, Asking, Kind, Said},
        headers,
        service::Desk,
        settings::HeaderStyle,
    },
};

/// The attribute that a request's domain becomes.
const DOMAIN: &str = "domain";
/// What is left where nothing limits.
const UNLIMITED_REMAINING: u32 = u32::MAX;
/// The units in which a limit can be told, shortest first.
const TOLD: [Unit; 6] = [Unit::Second, Unit::Minute, Unit::Hour, Unit::Day, Unit::Week, Unit::Month];

/// Answers a call.
pub(super) async fn should_rate_limit(
    desk: &Desk,
    request: &RateLimitRequest,
    timeout_us: Option<u64>,
) -> Result<RateLimitResponse, Status> {
    let mut asking = read(desk, request)?;
    asking.timeout_us = timeout_us;
    match asking::ask(&desk.web.exchange, asking).await {
        Answered::Wrong(at, error) => {
            let text = error.to_string();
            let why = text.strip_prefix("ERR ").unwrap_or(&text);
            Err(Status::new(Grpc::InvalidArgument, format!("descriptor {at}: {why}")))
        }
        Answered::Verdicts(policy, said) => {
            if !policy.knows_domain(&request.domain) {
                desk.web.counters.unknown_domains.add(1);
            }
            say(desk, &policy, &said)
        }
    }
}

/// What a request asks.
fn read(desk: &Desk, request: &RateLimitRequest) -> Result<Asking, Status> {
    let settings = &desk.web.settings;
    let wrong = |text: &str| Err(Status::new(Grpc::InvalidArgument, text));
    if request.domain.is_empty() {
        return wrong("the domain is empty");
    }
    if request.descriptors.is_empty() {
        return wrong("there are no descriptors");
    }
    if request.descriptors.len() > settings.checks_max {
        let text = format!("there are more than {} descriptors (setting http.checks_max)", settings.checks_max);
        return Err(Status::new(Grpc::InvalidArgument, text));
    }
    let mut asking = Asking::of(!settings.count_all);
    for (at, descriptor) in request.descriptors.iter().enumerate() {
        if descriptor.entries.is_empty() {
            return Err(Status::new(Grpc::InvalidArgument, format!("descriptor {at} has no entries")));
        }
        asking.attribute(DOMAIN.as_bytes(), request.domain.as_bytes());
        for (place, entry) in descriptor.entries.iter().enumerate() {
            name(&mut asking, descriptor, place);
            asking.value(entry.value.as_bytes());
        }
        let hits = descriptor.hits_addend.map_or(u64::from(request.hits_addend.max(1)), |hits| hits.value);
        let kind = kind(descriptor, settings.allow_refunds)
            .map_err(|why| Status::new(Grpc::InvalidArgument, format!("descriptor {at}: {why}")))?;
        asking.check(command::cost(hits), kind);
    }
    Ok(asking)
}

/// Writes the attribute name of an entry's key. A name that came before in its descriptor is counted: `key.2`, `key.3`.
fn name(asking: &mut Asking, descriptor: &Descriptor, place: usize) {
    let name = attribute_name(&descriptor.entries[place].key);
    let earlier = descriptor.entries[..place].iter().filter(|entry| attribute_name(&entry.key) == name).count();
    match earlier + usize::from(name == DOMAIN) {
        0 => asking.name(name.as_bytes()),
        before => asking.name(format!("{name}.{}", before + 1).as_bytes()),
    }
}

/// What is done with a descriptor's bucket.
fn kind(descriptor: &Descriptor, allow_refunds: bool) -> Result<Kind, String> {
    match (descriptor.is_negative_hits, &descriptor.limit) {
        (true, _) if !allow_refunds => Err("giving back is not allowed (setting grpc.allow_refunds)".into()),
        (true, Some(_)) => Err("a descriptor with a limit of its own cannot give back".into()),
        (true, None) => Ok(Kind::Refund),
        (false, None) => Ok(Kind::Take),
        (false, Some(limit)) if limit.requests_per_unit == 0 => Ok(Kind::Limited(None)),
        (false, Some(limit)) => {
            let unit = limit.unit();
            let rate = rate_of(limit.requests_per_unit, unit.seconds());
            rate.map(|rate| Kind::Limited(Some(rate)))
                .ok_or_else(|| format!("a limit of {} per {unit:?} cannot be served", limit.requests_per_unit))
        }
    }
}

/// So many in so many seconds. A longer time than a period may be is reduced together with the number, if that can be.
fn rate_of(requests: u32, seconds: u64) -> Option<Rate> {
    let (capacity, mut refill, mut period_ms) = (u64::from(requests), u64::from(requests), seconds * 1_000);
    if period_ms > policy_sync::model::PERIOD_MS_MAX {
        let divisor = policy_sync::rate::gcd(refill, seconds);
        (refill, period_ms) = (refill / divisor, seconds / divisor * 1_000);
    }
    Rate::new(Limit { capacity, refill, period_ms }).ok()
}

/// What a request is told.
fn say(desk: &Desk, policy: &LoadedPolicy, said: &[Said]) -> Result<RateLimitResponse, Status> {
    if let Some(undecided) = said.iter().find(|said| said.verdict.answer == Answer::Unavailable) {
        let rule = headers::rule_name(policy, &undecided.verdict).unwrap_or("of the request");
        let text = format!("the store does not answer, and the rule {rule} is closed on failure");
        return Err(Status::new(Grpc::Unavailable, text));
    }
    let is_over = said.iter().any(|said| said.verdict.answer == Answer::Deny);
    let tightest = said.iter().filter(|said| (said.verdict.answer == Answer::Deny) == is_over).min_by_key(|said| {
        (u64::MAX - headers::seconds(said.verdict.retry_after_ms), said.verdict.remaining.cast_unsigned())
    });
    let style = desk.web.settings.grpc_headers;
    let fields = tightest.filter(|_| style != HeaderStyle::None);
    let fields = fields.map(|said| headers::fields(style, policy, said)).unwrap_or_default();
    let text = |value: &[u8]| String::from_utf8_lossy(value).into_owned();
    let header = |(name, value): (hyper::header::HeaderName, hyper::header::HeaderValue)| Header {
        key: name.as_str().to_owned(),
        value: text(value.as_bytes()),
    };
    Ok(RateLimitResponse {
        overall_code: if is_over { Code::OverLimit } else { Code::Ok } as i32,
        statuses: said.iter().map(|said| status(policy, said)).collect(),
        response_headers_to_add: fields.into_iter().map(header).collect(),
    })
}

fn status(policy: &LoadedPolicy, said: &Said) -> DescriptorStatus {
    let verdict = &said.verdict;
    let is_over = verdict.answer == Answer::Deny;
    let wait_ms = if is_over { verdict.retry_after_ms } else { verdict.reset_after_ms };
    let is_unlimited = verdict.remaining == UNLIMITED && verdict.rule.is_some();
    let remaining = if is_unlimited {
        UNLIMITED_REMAINING
    } else {
        u32::try_from(verdict.remaining.max(0)).unwrap_or(UNLIMITED_REMAINING)
    };
    DescriptorStatus {
        code: if is_over { Code::OverLimit } else { Code::Ok } as i32,
        current_limit: said.rate.map(|rate| {
            let (requests_per_unit, unit) = told(&rate);
            let name = headers::rule_name(policy, verdict).unwrap_or_default().to_owned();
            CurrentLimit { requests_per_unit, unit: unit as i32, name }
        }),
        limit_remaining: remaining,
        duration_until_reset: (said.rate.is_some() || is_over).then(|| {
            let ms = if wait_ms == NEVER { headers::seconds(NEVER).cast_signed() * 1_000 } else { wait_ms };
            // Below 1,000 million.
            Duration { seconds: ms / 1_000, nanos: (ms % 1_000) as i32 * 1_000_000 }
        }),
    }
}

/// A rate as so many in a unit: in the shortest unit in which it is a whole number, and at least as long as its own period.
fn told(rate: &Rate) -> (u32, Unit) {
    let (refill, period_ms) = (u64::from(rate.refill), u64::from(rate.period_ms));
    let whole = TOLD.into_iter().find_map(|unit| {
        let unit_ms = unit.seconds() * 1_000;
        let is_whole = unit_ms >= period_ms && (refill * unit_ms).is_multiple_of(period_ms);
        is_whole.then(|| u32::try_from(refill * unit_ms / period_ms).ok().map(|requests| (requests, unit)))
    });
    whole.flatten().unwrap_or((rate.capacity, Unit::Unknown))
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_told_in_the_unit_that_fits() {
        let told = |refill, period_ms| told(&Rate::new(Limit { capacity: 100, refill, period_ms }).unwrap());
        assert_eq!(told(10, 60_000), (10, Unit::Minute));
        assert_eq!(told(100, 10_000), (600, Unit::Minute));
        assert_eq!(told(5, 500), (10, Unit::Second));
        assert_eq!(told(7, 45 * 60_000), (224, Unit::Day));
        assert_eq!(told(1, 7 * 86_400_000), (1, Unit::Week));
        assert_eq!(told(1, 31 * 86_400_000), (100, Unit::Unknown));
    }

    #[test]
    fn a_limit_of_a_descriptor_is_a_bucket() {
        assert_eq!(rate_of(10, 60).map(|rate| (rate.capacity, rate.fill_ms())), Some((10, 60_000)));
        let yearly = rate_of(36_500, Unit::Year.seconds()).unwrap();
        assert_eq!((yearly.capacity, yearly.refill, yearly.period_ms), (36_500, 1, 864_000));
        assert_eq!(rate_of(1, Unit::Year.seconds()), None);
        assert_eq!(rate_of(10, Unit::Unknown.seconds()), None);
    }
}
