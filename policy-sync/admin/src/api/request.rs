//! What a request says beside its path: who calls, query, body, and what the caller saw.

use std::sync::Arc;

use axum::{
    extract::{FromRequestParts, Path, Query, rejection::QueryRejection},
    http::{HeaderMap, StatusCode, header, request::Parts},
};
use policy_sync::stored::Key;
use serde::{Deserialize, de::DeserializeOwned};

use super::{State, problem::Problem};
use crate::{
    plan::{COMMENT_BYTES_MAX, Expect},
    store::{Caller, Note},
};

/// A caller whose token is known.
impl FromRequestParts<Arc<State>> for Caller {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &Arc<State>) -> Result<Self, Problem> {
        let refused = |detail: &'static str| Problem::new(StatusCode::UNAUTHORIZED, "no-token", detail);
        let value = parts.headers.get(header::AUTHORIZATION).ok_or_else(|| refused("the request has no token"))?;
        let token = value.to_str().ok().and_then(|text| {
            let (scheme, token) = text.split_once(' ')?;
            scheme.eq_ignore_ascii_case("bearer").then_some(token.trim())
        });
        let token = token.ok_or_else(|| refused("the header Authorization is not `Bearer <token>`"))?;
        state.store.caller(token).await?.ok_or_else(|| refused("the token is unknown, or was revoked"))
    }
}

impl Caller {
    /// The note of a change of this caller.
    ///
    /// # Errors
    ///
    /// When the token may only read and this is no dry run, or the comment cannot be kept.
    pub(super) fn note(self, comment: &str, dry_run: bool) -> Result<Note, Problem> {
        if !self.can_write && !dry_run {
            let detail = format!("the token {:?} may only read, and try changes with dry_run=true", self.name);
            return Err(Problem::new(StatusCode::FORBIDDEN, "read-only", detail));
        }
        if comment.len() > COMMENT_BYTES_MAX {
            return Err(Problem::field("comment", format!("is longer than {COMMENT_BYTES_MAX} bytes")));
        }
        if comment.contains('\0') {
            return Err(Problem::field("comment", "has a NUL character, which the store cannot keep"));
        }
        Ok(Note { author: self.name, comment: comment.into(), rolled_back_to: None })
    }
}

/// The query, all of whose parameters must be known: a misspelt `dry_run` would change what was only to be looked at.
pub(super) struct Params<T>(pub(super) T);

impl<T: DeserializeOwned> FromRequestParts<Arc<State>> for Params<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &Arc<State>) -> Result<Self, Problem> {
        let Query(params) = Query::try_from_uri(&parts.uri).map_err(|error: QueryRejection| {
            Problem::invalid(format!("the query cannot be understood: {}", error.body_text()))
        })?;
        Ok(Self(params))
    }
}

/// The one parameter of a path: a text that PostgreSQL can hold.
pub(super) struct InPath(pub(super) String);

impl FromRequestParts<Arc<State>> for InPath {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &Arc<State>) -> Result<Self, Problem> {
        let Path(text) = Path::<String>::from_request_parts(parts, state)
            .await
            .map_err(|error| Problem::invalid(format!("the path cannot be understood: {}", error.body_text())))?;
        if text.contains('\0') { Err(Problem::invalid("the path has a NUL character")) } else { Ok(Self(text)) }
    }
}

/// What changes have in common.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ChangeParams {
    /// Look at what it would do, and do nothing.
    #[serde(default)]
    pub(super) dry_run: bool,
    /// Why, for the history.
    #[serde(default)]
    pub(super) comment: String,
}

/// JSON out of a body.
///
/// # Errors
///
/// What is wrong with it, and where.
pub(super) fn json<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Problem> {
    serde_json::from_slice(bytes)
        .map_err(|error| Problem::invalid(format!("the body is not the JSON that is expected: {error}")))
}

/// UTF-8 out of a body.
///
/// # Errors
///
/// That it is none.
pub(super) fn text(bytes: &[u8]) -> Result<&str, Problem> {
    std::str::from_utf8(bytes).map_err(|error| Problem::invalid(format!("the body is not UTF-8: {error}")))
}

/// What `If-Match` says, or `If-None-Match: *`.
enum Condition {
    /// `If-Match: "7"`.
    Version(u64),
    /// `If-Match: *`.
    Any,
    /// `If-None-Match: *`.
    None,
}

fn condition(headers: &HeaderMap) -> Result<Option<Condition>, Problem> {
    let text = |name: header::HeaderName| match headers.get(&name).map(|value| value.to_str()) {
        None => Ok(None),
        Some(Ok(text)) => Ok(Some(text.trim())),
        Some(Err(_)) => Err(Problem::invalid(format!("the header {name} is not text"))),
    };
    match (text(header::IF_MATCH)?, text(header::IF_NONE_MATCH)?) {
        (None, None) => Ok(None),
        (None, Some("*")) => Ok(Some(Condition::None)),
        (None, Some(_)) => Err(Problem::invalid("the header If-None-Match can only be *")),
        (Some(_), Some(_)) => Err(Problem::invalid("If-Match and If-None-Match exclude each other")),
        (Some("*"), None) => Ok(Some(Condition::Any)),
        (Some(tag), None) => {
            let number = tag.strip_prefix('"').and_then(|tag| tag.strip_suffix('"')).and_then(|tag| tag.parse().ok());
            let wrong = || Problem::invalid("the header If-Match is no ETag of this API: they look like \"17\"");
            Ok(Some(Condition::Version(number.ok_or_else(wrong)?)))
        }
    }
}

fn required(what: &str) -> Problem {
    let detail = format!("{what} could have been changed by somebody else since you read it");
    Problem::new(StatusCode::PRECONDITION_REQUIRED, "precondition-required", detail)
}

/// What the caller saw of one rule or override.
///
/// # Errors
///
/// When the request does not say.
pub(super) fn expected_of_item(headers: &HeaderMap, key: &Key) -> Result<Expect, Problem> {
    match condition(headers)? {
        Some(Condition::Version(version)) => Ok(Expect::Item(key.clone(), version)),
        Some(Condition::Any) => Ok(Expect::Exists(key.clone())),
        Some(Condition::None) => Ok(Expect::Absent(key.clone())),
        None => Err(required(&key.to_string())),
    }
}

/// What the caller saw of the policy. `None`: it may be at any version.
///
/// # Errors
///
/// When the request does not say.
pub(super) fn expected_of_policy(headers: &HeaderMap) -> Result<Option<Expect>, Problem> {
    match condition(headers)? {
        Some(Condition::Version(version)) => Ok(Some(Expect::Policy(version))),
        Some(Condition::Any) => Ok(None),
        Some(Condition::None) => Err(Problem::invalid("there always is a policy: use If-Match")),
        None => Err(required("the policy")),
    }
}

/// As [`expected_of_policy`], where it need not be said.
///
/// # Errors
///
/// When it is said wrongly.
pub(super) fn expected_if_said(headers: &HeaderMap) -> Result<Option<Option<Expect>>, Problem> {
    match condition(headers)? {
        None => Ok(None),
        Some(_) => expected_of_policy(headers).map(Some),
    }
}
