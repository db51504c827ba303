//! What went wrong, as RFC 9457 has it: `application/problem+json`, with the fields that are to blame.

use std::borrow::Cow;

use axum::{
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use policy_sync::{
    file::Problems,
    stored::{Key, Remark, Remarks},
};
use serde::Serialize;
use utoipa::ToSchema;

use super::schema::KeyView;
use crate::{
    plan::Refusal,
    store::{ChangeError, StoreError},
};

/// The kinds of problems: name, title, and what to do. `/problems/<name>` says the same.
pub(super) const KINDS: &[(&str, &str, &str)] = &[
    ("invalid-request", "The request cannot be understood", "Mend what `detail` and `errors` name."),
    (
        "invalid-policy",
        "Gateways would refuse this policy",
        "Mend the fields that `errors` names; nothing was changed.",
    ),
    ("no-token", "A token is needed", "Send `Authorization: Bearer <token>`; `sluice-admin token create` makes one."),
    ("read-only", "This token may only read", "Use one that was made with `--write`."),
    ("not-found", "There is no such thing", "Look at the list for what there is."),
    (
        "precondition-required",
        "Say what you saw",
        "Send If-Match with the ETag that you read (`*` for whatever it is), or `If-None-Match: *` to create.",
    ),
    (
        "conflict",
        "Somebody else changed it",
        "Read it again, look at what changed, and decide anew; nothing was changed.",
    ),
    ("too-large", "The request is too large", "Send less at once, or raise --body-bytes-max."),
    ("busy", "Another change is under way", "Try again; nothing was changed."),
    (
        "store-away",
        "The policy store does not answer",
        "Gateways go on with the policy they have. Look after PostgreSQL; nothing was changed.",
    ),
    ("unknown-outcome", "It is not known whether the change was made", "Look at the history before you try again."),
    ("timeout", "It took too long", "Look at the history before you try again."),
    ("internal", "Something is wrong with the policy store", "Look at `detail` and at the log of sluice-admin."),
];

/// A problem.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Problem {
    /// Which kind, as a link that explains it.
    #[serde(rename = "type")]
    #[schema(example = "/problems/conflict")]
    kind: String,
    /// The kind in words.
    title: &'static str,
    /// The status of the response.
    #[serde(serialize_with = "number")]
    #[schema(value_type = u16, example = 412)]
    status: StatusCode,
    /// What went wrong this time.
    detail: Cow<'static, str>,
    /// What exactly is wrong with the policy that was sent.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    errors: Vec<FieldError>,
    /// How many more there are.
    #[serde(skip_serializing_if = "is_zero")]
    errors_more: usize,
}

/// One thing that is wrong.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct FieldError {
    /// The rule or override; nothing for the policy as a whole.
    #[serde(flatten)]
    key: Option<KeyView>,
    /// The line of the file, if one was sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    line: Option<usize>,
    /// The field, as a policy file spells it; empty for the whole.
    #[schema(example = "limit.capacity")]
    field: String,
    /// What is wrong with it.
    message: String,
    /// What to write instead.
    #[serde(skip_serializing_if = "Option::is_none")]
    suggestion: Option<String>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks so")]
fn is_zero(number: &usize) -> bool {
    *number == 0
}

fn number<S: serde::Serializer>(status: &StatusCode, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u16(status.as_u16())
}

impl Problem {
    /// A problem of one of the [`KINDS`].
    pub(super) fn new(status: StatusCode, kind: &'static str, detail: impl Into<Cow<'static, str>>) -> Self {
        let title = KINDS.iter().find(|(name, ..)| *name == kind).map_or("", |(_, title, _)| title);
        let (kind, detail) = (format!("/problems/{kind}"), detail.into());
        Self { kind, title, status, detail, errors: Vec::new(), errors_more: 0 }
    }

    /// The request cannot be understood.
    pub(super) fn invalid(detail: impl Into<Cow<'static, str>>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid-request", detail)
    }

    /// There is no such thing.
    pub(super) fn missing(detail: impl Into<Cow<'static, str>>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "not-found", detail)
    }

    /// The problem is a field of the request that is no field of the policy.
    pub(super) fn field(field: &str, message: impl Into<String>) -> Self {
        let message = message.into();
        let mut problem = Self::invalid(format!("{field} {message}"));
        problem.errors.push(FieldError { key: None, line: None, field: field.into(), message, suggestion: None });
        problem
    }
}

impl From<Remarks> for Problem {
    fn from(Remarks { list, more }: Remarks) -> Self {
        let first = list.first().map(ToString::to_string).unwrap_or_default();
        let mut problem = Self::new(StatusCode::UNPROCESSABLE_ENTITY, "invalid-policy", first);
        let error = |Remark { key, field, message, suggestion }| FieldError {
            key: key.as_ref().map(KeyView::from),
            line: None,
            field,
            message,
            suggestion,
        };
        problem.errors = list.into_iter().map(error).collect();
        problem.errors_more = more;
        problem
    }
}

impl From<Problems> for Problem {
    fn from(problems: Problems) -> Self {
        let first = problems.list().first().map(ToString::to_string).unwrap_or_default();
        let mut problem = Self::new(StatusCode::UNPROCESSABLE_ENTITY, "invalid-policy", first);
        problem.errors = problems
            .list()
            .iter()
            .map(|one| FieldError {
                key: None,
                line: Some(one.line),
                field: one.field.to_string(),
                message: match one.subject.as_str() {
                    "" => one.message.clone(),
                    subject => format!("{subject}: {}", one.message),
                },
                suggestion: one.suggestion.clone(),
            })
            .collect();
        problem.errors_more = problems.more();
        problem
    }
}

impl From<StoreError> for Problem {
    fn from(error: StoreError) -> Self {
        let text = error.to_string();
        match error {
            StoreError::Away(_) => Self::new(StatusCode::SERVICE_UNAVAILABLE, "store-away", text),
            StoreError::Busy => Self::new(StatusCode::SERVICE_UNAVAILABLE, "busy", text),
            StoreError::Unknown(_) => Self::new(StatusCode::SERVICE_UNAVAILABLE, "unknown-outcome", text),
            StoreError::NoVersion { .. } => Self::missing(text),
            StoreError::Refused(_) | StoreError::Malformed(_) | StoreError::Form(_) => {
                tracing::error!("{text}");
                Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", text)
            }
        }
    }
}

impl From<ChangeError> for Problem {
    fn from(error: ChangeError) -> Self {
        match error {
            ChangeError::Store(error) => error.into(),
            ChangeError::Refused(Refusal::Conflict(detail)) => {
                Self::new(StatusCode::PRECONDITION_FAILED, "conflict", detail)
            }
            ChangeError::Refused(Refusal::Invalid(remarks)) => remarks.into(),
            ChangeError::Refused(refusal @ Refusal::Missing(_)) => Self::missing(refusal.to_string()),
            ChangeError::Refused(refusal @ Refusal::Twice(_)) => Self::field("operations", refusal.to_string()),
        }
    }
}

/// A rule or override that does not exist.
pub(super) fn no_such(key: &Key) -> Problem {
    Problem::missing(format!("there is no {key}"))
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let status = self.status;
        let text = serde_json::to_string(&self).unwrap_or_default();
        let mut response = (status, text).into_response();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        if status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if status == StatusCode::SERVICE_UNAVAILABLE {
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}
