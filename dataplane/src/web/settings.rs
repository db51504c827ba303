//! What the web faces are allowed and told; settings.

use std::{collections::BTreeMap, sync::Arc};

use serde::{Deserialize, Serialize};

use super::peers::Peers;

/// Which headers tell a client about its limit. `Retry-After` comes with every 429 in any case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HeaderStyle {
    /// `RateLimit-Policy` and `RateLimit`: draft-ietf-httpapi-ratelimit-headers-10.
    #[default]
    Draft10,
    /// `RateLimit-Limit`, `RateLimit-Remaining`, `RateLimit-Reset`: the earlier drafts.
    Legacy,
    /// `X-RateLimit-Limit`, `X-RateLimit-Remaining`, `X-RateLimit-Reset` (in seconds from now).
    X,
    /// None.
    None,
}

/// Where forward-auth finds attributes beside `method`, `path`, `host` and `ip`: the attribute's name, and that of a header,
/// a cookie or a query parameter.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ForwardAuth {
    /// From headers.
    pub headers: BTreeMap<String, String>,
    /// From cookies.
    pub cookies: BTreeMap<String, String>,
    /// From the parameters of the query.
    pub query: BTreeMap<String, String>,
}

/// All of it.
#[derive(Clone)]
pub struct WebSettings {
    /// What a request must bring along, if anything.
    pub token: Option<Arc<str>>,
    /// Bytes of a request's head.
    pub head_bytes_max: usize,
    /// Bytes of a request's body.
    pub body_bytes_max: usize,
    /// Checks of one request.
    pub checks_max: usize,
    /// Requests that an HTTP/2 connection may have in hand.
    pub streams_max: u32,
    /// How long a request may take to come.
    pub request_timeout_ms: u64,
    /// How long a connection may be without a request; 0 means for ever.
    pub idle_timeout_ms: u64,
    /// The headers of HTTP answers.
    pub headers: HeaderStyle,
    /// Whose word is taken for a client's address.
    pub peers: Peers,
    /// Attributes of forward-auth.
    pub forward_auth: ForwardAuth,
    /// gRPC: a request whose descriptors are not all allowed takes from those that are, as the reference does.
    pub count_all: bool,
    /// gRPC: descriptors may give back.
    pub allow_refunds: bool,
    /// gRPC: the headers that Envoy is to add to its answer.
    pub grpc_headers: HeaderStyle,
}

impl WebSettings {
    /// Bytes that may wait to be read while a request waits for the store: a whole request more.
    pub(crate) fn unread_bytes_max(&self) -> usize {
        self.head_bytes_max + self.body_bytes_max
    }
}
