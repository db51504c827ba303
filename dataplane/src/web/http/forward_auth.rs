//! `/v1/forward-auth`: a gateway asks for each of its requests whether it may pass.
//!
//! Two ways to say which request that is:
//!
//! * nginx `auth_request`, Traefik, Caddy: the request comes to `/v1/forward-auth` itself, and `X-Forwarded-Method`,
//!   `X-Forwarded-Uri` and `X-Forwarded-Host` describe the original;
//! * Envoy ext_authz: the original's path follows `/v1/forward-auth`, and method and host are its own.
//!
//! A request that may pass is answered 200 without a body, one that may not 429 (503 where nobody can say) with problem
//! details, `Retry-After` and the headers of the setting. nginx takes everything but 401 and 403 for an error, so with
//! `?deny=403` a deny is a 403, and in any case `X-Sluice-Status` carries the real status.

use hyper::{
    HeaderMap, Request, Response, StatusCode,
    body::Incoming,
    header::{COOKIE, HOST, HeaderName, HeaderValue},
};

use super::{
    cookies::{cookie, parameter},
    path,
};
use crate::{
    decision::Answer,
    policy::LoadedPolicy,
    web::{
        asking::{self, Answered, Asking, Kind, Said},
        headers,
        reply::{Problem, Reply, of_problem, problem},
        service::Desk,
    },
};

const METHOD: &str = "x-forwarded-method";
const URI: &str = "x-forwarded-uri";
const FORWARDED_HOST: &str = "x-forwarded-host";
const STATUS: HeaderName = HeaderName::from_static("x-sluice-status");
/// The problem type of the draft for requests beyond a quota.
const QUOTA_EXCEEDED: &str = "https://iana.org/assignments/http-problem-types#quota-exceeded";
const TEMPORARY: &str = "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity";

/// Answers a request whose own path goes up to `begins`.
pub(in crate::web) async fn forward_auth(desk: &Desk, request: Request<Incoming>, begins: usize) -> Response<Reply> {
    let (asking, denied_as) = match describe(desk, &request, begins) {
        Ok(described) => described,
        Err(detail) => return problem(StatusCode::BAD_REQUEST, "The request is not described", &detail),
    };
    match asking::ask(&desk.web.exchange, asking).await {
        Answered::Wrong(_, error) => {
            let text = error.to_string();
            problem(StatusCode::BAD_REQUEST, "The check cannot be meant", text.strip_prefix("ERR ").unwrap_or(&text))
        }
        Answered::Verdicts(policy, said) => match said.first() {
            Some(said) => say(desk, &policy, said, denied_as),
            None => problem(StatusCode::INTERNAL_SERVER_ERROR, "No verdict", ""),
        },
    }
}

fn say(desk: &Desk, policy: &LoadedPolicy, said: &Said, denied_as: Option<StatusCode>) -> Response<Reply> {
    let rule = headers::rule_name(policy, &said.verdict);
    let violated = rule.as_slice();
    let (status, mut response) = match said.verdict.answer {
        Answer::Allow => (StatusCode::OK, Response::new(Reply::default())),
        Answer::Deny => {
            let wait_s = headers::retry_after_s(&said.verdict);
            let detail = format!("too many requests: try again in {wait_s} s");
            let status = StatusCode::TOO_MANY_REQUESTS;
            let (title, shown) = ("Too many requests", denied_as.unwrap_or(status).as_u16());
            let problem = Problem { kind: QUOTA_EXCEEDED, title, status: shown, detail: &detail, violated };
            (status, of_problem(&problem))
        }
        Answer::Unavailable => {
            let detail = "nobody can say at the moment whether this request may pass";
            let status = StatusCode::SERVICE_UNAVAILABLE;
            let (title, shown) = ("Unavailable", denied_as.unwrap_or(status).as_u16());
            (status, of_problem(&Problem { kind: TEMPORARY, title, status: shown, detail, violated }))
        }
    };
    let out = response.headers_mut();
    out.insert(STATUS, HeaderValue::from(status.as_u16()));
    out.extend(headers::fields(desk.web.settings.headers, policy, said));
    response
}

/// What is asked, and the status of a deny if it is not that of the verdict.
fn describe(desk: &Desk, request: &Request<Incoming>, begins: usize) -> Result<(Asking, Option<StatusCode>), String> {
    let (uri, given) = (request.uri(), request.headers());
    let original = uri.path().as_bytes().get(begins..).filter(|rest| !rest.is_empty());
    let own_query = uri.query().unwrap_or_default().as_bytes();
    let settings = &desk.web.settings;
    let mut denied_as = None;
    let (method, target, query, host);
    if let Some(original) = original {
        (method, target, query) = (request.method().as_str().as_bytes(), original, own_query);
        // HTTP/2 has it in the URI.
        host = uri.authority().map(|authority| authority.as_str().as_bytes()).or_else(|| value(given, HOST.as_str()));
    } else {
        denied_as = match parameter(own_query, "deny").as_deref() {
            None => None,
            Some(b"403") => Some(StatusCode::FORBIDDEN),
            Some(b"429") => Some(StatusCode::TOO_MANY_REQUESTS),
            Some(other) => {
                return Err(format!("deny={} can be 403 or 429", String::from_utf8_lossy(other)));
            }
        };
        let forwarded = value(given, URI).ok_or_else(|| {
            format!(
                "the header {URI} is missing: it says which request this is about. Gateways that ask under the original's \
                 path use the prefix /v1/forward-auth (Envoy ext_authz: path_prefix)"
            )
        })?;
        let place = memchr::memchr(b'?', forwarded);
        target = &forwarded[..place.unwrap_or(forwarded.len())];
        query = place.map_or(&[][..], |place| &forwarded[place + 1..]);
        method = value(given, METHOD).unwrap_or(b"GET");
        host = value(given, FORWARDED_HOST).or_else(|| value(given, HOST.as_str()));
    }
    let mut asking = Asking::default();
    asking.attribute(b"method", method);
    asking.attribute_with(b"path", |out| path::normalize(target, out));
    if let Some(host) = host {
        asking.attribute_with(b"host", |out| out.extend(host.to_ascii_lowercase()));
    }
    let peers = &settings.peers;
    let words = given.get_all(&peers.header).iter().map(|value| value.as_bytes()).collect::<Vec<_>>();
    if let Some(address) = peers.client(desk.visit.peer, words.into_iter()) {
        asking.attribute_with(b"ip", |out| peers.write(address, out));
    }
    for (attribute, header) in &settings.forward_auth.headers {
        if let Some(value) = value(given, header) {
            asking.attribute(attribute.as_bytes(), value);
        }
    }
    for (attribute, name) in &settings.forward_auth.cookies {
        let mut cookies = given.get_all(COOKIE).iter();
        if let Some(value) = cookies.find_map(|header| cookie(header.as_bytes(), name)) {
            asking.attribute(attribute.as_bytes(), value);
        }
    }
    for (attribute, name) in &settings.forward_auth.query {
        if let Some(value) = parameter(query, name) {
            asking.attribute(attribute.as_bytes(), &value);
        }
    }
    asking.check(1, Kind::Take);
    Ok((asking, denied_as))
}

fn value<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a [u8]> {
    headers.get(name).map(|value| value.as_bytes())
}
