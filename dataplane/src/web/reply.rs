//! What goes back: an answer's body, which is one piece of bytes and perhaps trailers, and the answers that all faces share.

use std::{
    convert::Infallible,
    pin::Pin,
    task::{Context, Poll},
};

use http_body::{Body, Frame, SizeHint};
use hyper::{
    HeaderMap, Response, StatusCode,
    body::Bytes,
    header::{CONTENT_TYPE, HeaderValue},
};
use serde::Serialize;

/// RFC 9457.
pub(super) const PROBLEM: HeaderValue = HeaderValue::from_static("application/problem+json");

/// The body of an answer.
#[derive(Default)]
pub(crate) struct Reply {
    data: Option<Bytes>,
    trailers: Option<HeaderMap>,
}

impl Reply {
    pub(super) fn of(bytes: impl Into<Bytes>) -> Self {
        Self { data: Some(bytes.into()).filter(|bytes| !bytes.is_empty()), trailers: None }
    }

    pub(super) fn with_trailers(mut self, trailers: HeaderMap) -> Self {
        self.trailers = Some(trailers);
        self
    }
}

impl Body for Reply {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let data = self.data.take().map(Frame::data);
        Poll::Ready(data.or_else(|| self.trailers.take().map(Frame::trailers)).map(Ok))
    }

    fn is_end_stream(&self) -> bool {
        self.data.is_none() && self.trailers.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.data.as_ref().map_or(0, |data| data.len() as u64))
    }
}

/// Problem details.
#[derive(Serialize)]
pub(super) struct Problem<'a> {
    #[serde(rename = "type")]
    pub(super) kind: &'a str,
    pub(super) title: &'a str,
    pub(super) status: u16,
    pub(super) detail: &'a str,
    #[serde(rename = "violated-policies", skip_serializing_if = "<[_]>::is_empty")]
    pub(super) violated: &'a [&'a str],
}

/// An answer that says what was wrong.
pub(super) fn problem(status: StatusCode, title: &str, detail: &str) -> Response<Reply> {
    of_problem(&Problem { kind: "about:blank", title, status: status.as_u16(), detail, violated: &[] })
}

/// The same with everything that can be said.
pub(super) fn of_problem(problem: &Problem<'_>) -> Response<Reply> {
    let mut response = Response::new(Reply::of(serde_json::to_vec(problem).unwrap_or_default()));
    *response.status_mut() = StatusCode::from_u16(problem.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    response.headers_mut().insert(CONTENT_TYPE, PROBLEM);
    response
}
