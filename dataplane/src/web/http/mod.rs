//! HTTP: `POST /v1/check` (JSON) and `/v1/forward-auth`.

mod check;
mod cookies;
mod forward_auth;
mod path;

pub(super) use self::{check::check, forward_auth::forward_auth};

/// Where checks are asked.
pub(super) const CHECK: &str = "/v1/check";
/// Where gateways ask for each of their requests.
pub(super) const FORWARD_AUTH: &str = "/v1/forward-auth";
