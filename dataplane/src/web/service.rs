//! Who answers a request: finds the face by path and content type, sees to the token, and counts what came of it.

use std::{convert::Infallible, future::Future, rc::Rc};

use http_body_util::BodyExt;
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Body, Bytes, Incoming},
    header::{ALLOW, AUTHORIZATION, CONNECTION, HeaderName, HeaderValue, WWW_AUTHENTICATE},
};

use super::{
    Visit, Web, grpc, http,
    reply::{Reply, problem},
};
use crate::secret::same_secret;

/// Where a token comes that is not in `Authorization`, which at forward-auth is the client's own.
const TOKEN: HeaderName = HeaderName::from_static("x-sluice-token");

/// A request's way through one core: who asks, and where.
pub(super) struct Desk {
    pub(super) web: Rc<Web>,
    pub(super) visit: Rc<Visit>,
}

/// The service of one connection.
pub(super) fn of(web: &Rc<Web>, visit: &Rc<Visit>) -> impl Fn(Request<Incoming>) -> Answering + use<> {
    let (web, visit) = (Rc::clone(web), Rc::clone(visit));
    move |request| {
        let desk = Desk { web: Rc::clone(&web), visit: Rc::clone(&visit) };
        Box::pin(desk.answer(request))
    }
}

/// An answer in the making.
pub(super) type Answering = std::pin::Pin<Box<dyn Future<Output = Result<Response<Reply>, Infallible>>>>;

/// A request in hand; dropped when it has its answer, or its client has gone.
struct InHand(Rc<Web>, Rc<Visit>);

impl Drop for InHand {
    fn drop(&mut self) {
        self.1.ends(self.0.now_ms.get());
    }
}

/// A body that is being read.
struct Reading<'a>(&'a Desk);

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        self.0.visit.has_come(self.0.web.now_ms.get());
    }
}

impl Desk {
    async fn answer(self, request: Request<Incoming>) -> Result<Response<Reply>, Infallible> {
        self.visit.begins(self.web.now_ms.get());
        let in_hand = InHand(Rc::clone(&self.web), Rc::clone(&self.visit));
        if grpc::is_grpc(&request) {
            // It counts for itself, by gRPC's own codes.
            return Ok(grpc::answer(self, request).await);
        }
        let web = Rc::clone(&self.web);
        let mut response = self.http(request).await;
        if in_hand.1.is_parting.get() && !in_hand.1.is_http2.get() {
            response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        }
        web.counters.http(response.status().as_u16()).add(1);
        Ok(response)
    }

    async fn http(self, request: Request<Incoming>) -> Response<Reply> {
        let path = request.uri().path();
        if path == http::CHECK {
            if !self.has_token(&request) {
                return unauthorized();
            }
            if *request.method() != Method::POST {
                let mut refusal = problem(
                    StatusCode::METHOD_NOT_ALLOWED,
                    "Method not allowed",
                    "ask by POST, with a JSON body such as {\"attributes\":{\"path\":\"/v1/login\",\"key\":\"ak_1\"}}",
                );
                refusal.headers_mut().insert(ALLOW, HeaderValue::from_static("POST"));
                return refusal;
            }
            return http::check(&self, request).await;
        }
        if let Some(rest) = path.strip_prefix(http::FORWARD_AUTH)
            && (rest.is_empty() || rest.starts_with('/'))
        {
            let begins = path.len() - rest.len();
            if !self.has_token_beside(&request) {
                return unauthorized();
            }
            return http::forward_auth(&self, request, begins).await;
        }
        problem(
            StatusCode::NOT_FOUND,
            "Not found",
            "there are POST /v1/check, /v1/forward-auth and, by gRPC, Envoy's rate limit service; health and metrics are on the ops port",
        )
    }

    /// Whether the request brings the token along, if one is asked for.
    pub(super) fn has_token(&self, request: &Request<Incoming>) -> bool {
        let Some(token) = &self.web.settings.token else { return true };
        let given = request.headers().get(AUTHORIZATION).and_then(|value| {
            let (scheme, given) = value.as_bytes().split_at_checked(7)?;
            scheme.eq_ignore_ascii_case(b"bearer ").then_some(given)
        });
        given.is_some_and(|given| same_secret(token.as_bytes(), given)) || self.has_token_beside(request)
    }

    /// The same where `Authorization` is not ours.
    fn has_token_beside(&self, request: &Request<Incoming>) -> bool {
        let Some(token) = &self.web.settings.token else { return true };
        request.headers().get(TOKEN).is_some_and(|given| same_secret(token.as_bytes(), given.as_bytes()))
    }

    /// The whole body. `None` where it is longer than it may be, or breaks off.
    pub(super) async fn body(&self, mut body: Incoming) -> Option<Bytes> {
        self.visit.reads(self.web.now_ms.get());
        let _reading = Reading(self);
        let max = self.web.settings.body_bytes_max;
        if body.size_hint().lower() > max as u64 {
            return None;
        }
        let mut whole = Bytes::new();
        let mut pieces = Vec::new();
        while let Some(frame) = body.frame().await {
            let Ok(data) = frame.ok()?.into_data() else { continue };
            // Nearly always there is one piece, which needs no copy.
            if whole.is_empty() && pieces.is_empty() {
                whole = data;
            } else {
                if pieces.is_empty() {
                    pieces.extend_from_slice(&whole);
                }
                pieces.extend_from_slice(&data);
            }
            if whole.len().max(pieces.len()) > max {
                return None;
            }
        }
        Some(if pieces.is_empty() { whole } else { pieces.into() })
    }
}

fn unauthorized() -> Response<Reply> {
    let mut refusal = problem(
        StatusCode::UNAUTHORIZED,
        "Unauthorized",
        "the token is missing or wrong: send it as `Authorization: Bearer` or as `X-Sluice-Token` (forward-auth: only the latter)",
    );
    refusal.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    refusal
}
