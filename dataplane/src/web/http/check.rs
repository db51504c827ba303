//! `POST /v1/check`: checks as JSON.
//!
//! ```text
//!   {"attributes": {"path": "/v1/login", "key": "ak_1"}, "cost": 1}
//!   {"checks": [{"attributes": …}, {"attributes": …, "cost": 3}], "together": true}
//! ```
//!
//! One check: the status is the verdict's (200, 429, 503). Several: 200, with the verdict of each in its place; with
//! `together`, where one is not allowed the others take nothing.

use std::{borrow::Cow, fmt, marker::PhantomData};

use hyper::{
    Request, Response, StatusCode,
    body::Incoming,
    header::{CONTENT_TYPE, HeaderValue},
};
use serde::{
    Deserialize, Deserializer, Serialize,
    de::{MapAccess, Visitor},
};

use crate::{
    decision::{Answer, NEVER, UNLIMITED},
    policy::LoadedPolicy,
    resp::command,
    web::{
        asking::{self, Answered, Asking, Kind, Said},
        headers,
        reply::{Reply, problem},
        service::Desk,
    },
};

const JSON: HeaderValue = HeaderValue::from_static("application/json");

/// A request's body.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Body<'a> {
    #[serde(borrow)]
    attributes: Option<Pairs<'a>>,
    cost: Option<u64>,
    #[serde(borrow)]
    checks: Option<Vec<Check<'a>>>,
    #[serde(default)]
    together: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Check<'a> {
    #[serde(borrow)]
    attributes: Pairs<'a>,
    cost: Option<u64>,
}

/// Names and values in their order; an object whose names may come twice, which is for the engine to refuse.
struct Pairs<'a>(Vec<(Text<'a>, Text<'a>)>);

/// Borrowed where nothing in it was escaped.
#[derive(Deserialize)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

impl<'de: 'a, 'a> Deserialize<'de> for Pairs<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object<'a>(PhantomData<Pairs<'a>>);
        impl<'de: 'a, 'a> Visitor<'de> for Object<'a> {
            type Value = Pairs<'a>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of attributes with strings as values, such as {\"path\":\"/v1/login\"}")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Pairs<'a>, A::Error> {
                let mut pairs = Vec::with_capacity(4);
                while let Some(pair) = map.next_entry()? {
                    pairs.push(pair);
                }
                Ok(Pairs(pairs))
            }
        }
        deserializer.deserialize_map(Object(PhantomData))
    }
}

/// What a check is told.
#[derive(Serialize)]
struct Told<'a> {
    allowed: bool,
    /// allow, deny or unavailable.
    verdict: &'static str,
    /// `null` where nothing limits.
    limit: Option<i64>,
    remaining: Option<i64>,
    /// `null` where waiting does not help.
    retry_after_ms: Option<i64>,
    reset_after_ms: Option<i64>,
    rule: Option<&'a str>,
}

impl<'a> Told<'a> {
    fn new(policy: &'a LoadedPolicy, said: &Said) -> Self {
        let verdict = &said.verdict;
        let bounded = |value: i64, without: i64| (value != without).then_some(value);
        Self {
            allowed: verdict.answer == Answer::Allow,
            verdict: match verdict.answer {
                Answer::Allow => "allow",
                Answer::Deny => "deny",
                Answer::Unavailable => "unavailable",
            },
            limit: bounded(verdict.limit, UNLIMITED),
            remaining: bounded(verdict.remaining, UNLIMITED),
            retry_after_ms: bounded(verdict.retry_after_ms, NEVER),
            reset_after_ms: bounded(verdict.reset_after_ms, NEVER),
            rule: headers::rule_name(policy, verdict),
        }
    }
}

#[derive(Serialize)]
struct Results<'a> {
    allowed: bool,
    results: Vec<Told<'a>>,
}

/// Answers a request.
pub(in crate::web) async fn check(desk: &Desk, request: Request<Incoming>) -> Response<Reply> {
    let Some(body) = desk.body(request.into_body()).await else {
        let max = desk.web.settings.body_bytes_max;
        let detail = format!("the body is longer than {max} bytes (setting http.body_bytes_max), or breaks off");
        return problem(StatusCode::PAYLOAD_TOO_LARGE, "Body too large", &detail);
    };
    let (asking, is_single) = match read(&body, desk.web.settings.checks_max) {
        Ok(asking) => asking,
        Err(detail) => return problem(StatusCode::BAD_REQUEST, "The body cannot be understood", &detail),
    };
    match asking::ask(&desk.web.exchange, asking).await {
        Answered::Wrong(at, error) => {
            let text = error.to_string();
            let why = text.strip_prefix("ERR ").unwrap_or(&text);
            let detail = if is_single { why.to_owned() } else { format!("checks[{at}]: {why}") };
            problem(StatusCode::BAD_REQUEST, "The check cannot be meant", &detail)
        }
        Answered::Verdicts(policy, said) if is_single => {
            let Some(said) = said.first() else { return problem(StatusCode::INTERNAL_SERVER_ERROR, "No verdict", "") };
            let mut response = json(&Told::new(&policy, said));
            *response.status_mut() = match said.verdict.answer {
                Answer::Allow => StatusCode::OK,
                Answer::Deny => StatusCode::TOO_MANY_REQUESTS,
                Answer::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            };
            response.headers_mut().extend(headers::fields(desk.web.settings.headers, &policy, said));
            response
        }
        Answered::Verdicts(policy, said) => {
            let results: Vec<_> = said.iter().map(|said| Told::new(&policy, said)).collect();
            json(&Results { allowed: results.iter().all(|told| told.allowed), results })
        }
    }
}

fn json(value: &impl Serialize) -> Response<Reply> {
    let mut response = Response::new(Reply::of(serde_json::to_vec(value).unwrap_or_default()));
    response.headers_mut().insert(CONTENT_TYPE, JSON);
    response
}

/// What is asked, and whether that is one check by itself.
fn read(body: &[u8], checks_max: usize) -> Result<(Asking, bool), String> {
    let body: Body<'_> = serde_json::from_slice(body).map_err(|error| error.to_string())?;
    let mut asking = Asking::of(body.together);
    match (body.attributes, body.checks) {
        (Some(attributes), None) if !body.together => {
            add(&mut asking, &attributes, body.cost)?;
            Ok((asking, true))
        }
        (None, Some(checks)) if body.cost.is_none() && (1..=checks_max).contains(&checks.len()) => {
            for check in &checks {
                add(&mut asking, &check.attributes, check.cost)?;
            }
            Ok((asking, false))
        }
        (None, Some(_)) if body.cost.is_some() => Err("`cost` belongs into each of `checks`".into()),
        (None, Some(_)) => Err(format!("`checks` must have from 1 to {checks_max} (setting http.checks_max)")),
        (Some(_), None) => Err("`together` is for several `checks`".into()),
        (Some(_), Some(_)) => Err("either `attributes` (with `cost`) or `checks`, not both".into()),
        (None, None) => Err("`attributes` or `checks` is missing".into()),
    }
}

fn add(asking: &mut Asking, attributes: &Pairs<'_>, cost: Option<u64>) -> Result<(), String> {
    if attributes.0.is_empty() {
        return Err("a check needs at least one attribute".into());
    }
    for (name, value) in &attributes.0 {
        asking.attribute(name.0.as_bytes(), value.0.as_bytes());
    }
    asking.check(command::cost(cost.unwrap_or(1)), Kind::Take);
    Ok(())
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;

    fn error(body: &str) -> String {
        read(body.as_bytes(), 2).unwrap_err()
    }

    #[test]
    fn one_check_and_several_are_read() {
        let (asking, is_single) = read(br#"{"attributes":{"path":"/a\"b","key":"x"},"cost":3}"#, 2).unwrap();
        assert!(is_single && !asking.together);
        let pairs: Vec<_> = asking.pairs(0).collect();
        assert_eq!(pairs, [(&b"path"[..], &b"/a\"b"[..]), (b"key", b"x")]);
        assert_eq!(asking.checks[0].cost, 3);
        let text = br#"{"checks":[{"attributes":{"a":"1"}},{"attributes":{"b":"2"},"cost":0}],"together":true}"#;
        let (asking, is_single) = read(text, 2).unwrap();
        assert!(!is_single && asking.together);
        assert_eq!(asking.pairs(1).collect::<Vec<_>>(), [(&b"b"[..], &b"2"[..])]);
        assert_eq!(asking.checks.iter().map(|check| check.cost).collect::<Vec<_>>(), [1, 0]);
    }

    #[test]
    fn what_is_wrong_is_said() {
        assert_eq!(error("{}"), "`attributes` or `checks` is missing");
        assert_eq!(error(r#"{"checks":[]}"#), "`checks` must have from 1 to 2 (setting http.checks_max)");
        assert_eq!(error(r#"{"attributes":{}}"#), "a check needs at least one attribute");
        assert_eq!(
            error(r#"{"attributes":{"a":"1"},"checks":[]}"#),
            "either `attributes` (with `cost`) or `checks`, not both"
        );
        assert!(error(r#"{"attribute":{}}"#).starts_with("unknown field `attribute`"));
        assert!(error(r#"{"attributes":{"a":1}}"#).contains("expected a string"));
        assert!(error(r#"{"attributes":{"a":"1"},"cost":-1}"#).contains("expected u64"));
    }
}
