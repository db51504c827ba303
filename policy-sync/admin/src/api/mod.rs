//! The API over HTTP: paths to handlers, bounds, and its own description at `/openapi.json`.
//!
//! Read in this order: `request` (who calls, and what was seen), `rules`, `overrides`, `changes`, `policy`, `reports`; `schema`
//! is the JSON, `problem` what goes wrong.

mod changes;
mod overrides;
mod policy;
pub mod problem;
mod reports;
mod request;
mod rules;
pub mod schema;

use std::{sync::Arc, time::Duration};

use axum::{
    Router,
    body::{Bytes, to_bytes},
    extract::{FromRequest, Path, Request, State as Of},
    http::{HeaderMap, HeaderValue, StatusCode, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::get,
};
use serde::Serialize;
use utoipa::{
    Modify, OpenApi,
    openapi::security::{Http, HttpAuthScheme, SecurityScheme},
};
use utoipa_axum::{router::OpenApiRouter, routes};

use self::problem::{KINDS, Problem};
use crate::{
    plan::Refusal,
    push::Push,
    store::{ChangeError, Note, Outcome, Store},
};

/// What handlers share.
#[derive(Debug)]
pub struct State {
    /// The policy store.
    pub store: Store,
    /// Tells gateways of new versions; nothing, where they hear only NOTIFY.
    pub push: Option<Push>,
    /// A gateway that was not seen for so long counts as gone.
    pub live_secs: u32,
    /// The largest body of a request.
    pub body_bytes_max: usize,
    /// The longest that a request may take.
    pub request_timeout: Duration,
    /// How many are answered at a time.
    pub requests: tokio::sync::Semaphore,
}

impl State {
    /// Makes a change, or tries it, and tells gateways.
    async fn change(
        &self,
        note: Note,
        dry_run: bool,
        plan: impl FnOnce(&crate::held::Held) -> Result<Vec<crate::plan::Difference>, Refusal> + Send + 'static,
    ) -> Result<Outcome, ChangeError> {
        if dry_run {
            return self.store.dry_run(plan).await;
        }
        let outcome = self.store.change(note, plan).await?;
        if let (Some(push), true) = (&self.push, outcome.is_changed) {
            push.publish(outcome.version);
        }
        Ok(outcome)
    }
}

/// The description without paths, which the router adds.
#[derive(OpenApi)]
#[openapi(
    info(
        title = "Sluice admin API",
        description = "Rules and overrides of Sluice's policy, their history, and what gateways make of them."
    ),
    security(("token" = [])),
    modifiers(&Tokens),
    tags(
        (name = "rules"), (name = "overrides"), (name = "changes", description = "Several at once, history, rollback"),
        (name = "policy", description = "The whole as a policy file"), (name = "reports"),
    )
)]
struct Description;

struct Tokens;

impl Modify for Tokens {
    fn modify(&self, openapi: &mut utoipa::openapi::OpenApi) {
        let components = openapi.components.get_or_insert_default();
        components.add_security_scheme("token", SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer)));
    }
}

/// Everything that is served.
pub fn router(state: Arc<State>) -> Router {
    let (router, description) = OpenApiRouter::with_openapi(Description::openapi())
        .routes(routes!(rules::list))
        .routes(routes!(rules::get, rules::put, rules::delete))
        .routes(routes!(overrides::list))
        .routes(routes!(overrides::get, overrides::put, overrides::delete))
        .routes(routes!(changes::history, changes::make))
        .routes(routes!(changes::one))
        .routes(routes!(changes::diff))
        .routes(routes!(changes::rollback))
        .routes(routes!(policy::export, policy::import, policy::merge))
        .routes(routes!(reports::gateways))
        .routes(routes!(reports::shadow))
        .split_for_parts();
    let description = Arc::new(serde_json::to_value(description).unwrap_or_default());
    router
        .route("/openapi.json", get(move || async move { axum::Json(Arc::unwrap_or_clone(description)) }))
        .route("/livez", get(|| async { "live\n" }))
        .route("/readyz", get(ready))
        .route("/problems/{kind}", get(explain))
        .fallback(|| async { Problem::missing("there is nothing at this path; /openapi.json describes what there is") })
        .method_not_allowed_fallback(|| async {
            Problem::new(StatusCode::METHOD_NOT_ALLOWED, "invalid-request", "this path does not have that method")
        })
        .layer(middleware::from_fn_with_state(Arc::clone(&state), in_time))
        .with_state(state)
}

/// Ends what takes too long.
async fn in_time(Of(state): Of<Arc<State>>, request: Request, next: Next) -> Response {
    let answer = async {
        // Never closed.
        let _turn = state.requests.acquire().await;
        next.run(request).await
    };
    match tokio::time::timeout(state.request_timeout, answer).await {
        Ok(response) => response,
        Err(_) => {
            let detail = format!("it took longer than {} ms", state.request_timeout.as_millis());
            Problem::new(StatusCode::SERVICE_UNAVAILABLE, "timeout", detail).into_response()
        }
    }
}

#[derive(Serialize)]
struct Ready {
    ready: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    push: Option<crate::push::PushStatus>,
}

/// Whether the store answers. That Redis does not take pushes is shown, but gateways hear of a change in other ways.
async fn ready(Of(state): Of<Arc<State>>) -> (StatusCode, axum::Json<Ready>) {
    let problem = state.store.check().await.err().map(|error| error.to_string());
    let status = if problem.is_none() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let push = state.push.as_ref().map(Push::status);
    (status, axum::Json(Ready { ready: problem.is_none(), problem, push }))
}

async fn explain(Path(kind): Path<String>) -> Result<String, Problem> {
    let found = KINDS.iter().find(|(name, ..)| *name == kind);
    let (_, title, what_to_do) = found.ok_or_else(|| Problem::missing("there is no such kind of problem"))?;
    Ok(format!("{title}.\n{what_to_do}\n"))
}

/// A body within the bound.
struct Body(Bytes);

impl FromRequest<Arc<State>> for Body {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &Arc<State>) -> Result<Self, Problem> {
        let most = state.body_bytes_max;
        let bytes = to_bytes(request.into_body(), most).await.map_err(|error| {
            // The two cannot be told apart but by their cause.
            let is_bound =
                std::error::Error::source(&error).is_some_and(|cause| cause.to_string().contains("length limit"));
            match is_bound {
                true => {
                    let detail = format!("the body has more than {most} bytes");
                    Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "too-large", detail)
                }
                false => Problem::invalid("the body ended early"),
            }
        })?;
        Ok(Self(bytes))
    }
}

/// JSON with the version that it shows as its ETag.
fn tagged(version: u64, value: &impl Serialize) -> Response {
    let mut headers = HeaderMap::new();
    // A number in quotes is a header.
    if let Ok(tag) = HeaderValue::from_str(&format!("\"{version}\"")) {
        headers.insert(header::ETAG, tag);
    }
    (headers, axum::Json(value)).into_response()
}

/// How many entries a page has.
fn page(limit: Option<u32>, default: u32, most: u32) -> Result<usize, Problem> {
    match limit.unwrap_or(default) {
        limit if (1..=most).contains(&limit) => Ok(limit as usize),
        limit => Err(Problem::field("limit", format!("is {limit}; it can be 1 to {most}"))),
    }
}

/// The answer to a change.
fn changed(outcome: Outcome, dry_run: bool) -> Response {
    let version = outcome.version;
    tagged(version, &schema::ChangeView::new(outcome, dry_run))
}
