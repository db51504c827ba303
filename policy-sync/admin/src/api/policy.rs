//! The whole policy as a policy file.

use std::sync::Arc;

use axum::{
    extract::State as Of,
    http::{HeaderMap, HeaderValue, header},
    response::{IntoResponse, Response},
};
use policy_sync::{file, model::Policy, stored};
use serde::Deserialize;

use super::{
    Body, State, changed,
    problem::Problem,
    request::{ChangeParams, Params, expected_if_said, expected_of_policy, text},
    schema::ChangeView,
};
use crate::{
    plan::{Expect, Operation, plan},
    store::Caller,
};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ExportParams {
    version: Option<u64>,
}

/// What problems call a file that was sent.
const SOURCE: &str = "body";

/// The policy as a file; its ETag is the policy's version.
#[utoipa::path(get, path = "/v1/policy.toml", tag = "policy",
    params(("version" = Option<u64>, Query, description = "As it was at this version; left out: as it is")),
    responses((status = 200, body = String, content_type = "application/toml"), (status = "default", body = Problem)))]
pub(super) async fn export(
    _: Caller,
    Of(state): Of<Arc<State>>,
    Params(params): Params<ExportParams>,
) -> Result<Response, Problem> {
    let held = match params.version {
        Some(version) => state.store.at(version).await?,
        None => state.store.current().await?,
    };
    let text = format!("# Sluice policy, version {}.\n\n{}", held.version(), stored::to_toml(&held.policy()?));
    let mut response = text.into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/toml"));
    if let Ok(tag) = HeaderValue::from_str(&format!("\"{}\"", held.version())) {
        headers.insert(header::ETAG, tag);
    }
    Ok(response)
}

/// Replaces the whole policy by a file: what it does not have goes.
#[utoipa::path(put, path = "/v1/policy.toml", tag = "policy", request_body(content = String, content_type = "application/toml"),
    params(("dry_run" = Option<bool>, Query, description = "Only show what would differ"),
        ("comment" = Option<String>, Query, description = "Why, for the history"),
        ("If-Match" = String, Header, description = "The version of the policy that was read, as its ETag, or *")),
    responses((status = 200, body = ChangeView), (status = "default", body = Problem)))]
pub(super) async fn import(
    caller: Caller,
    Of(state): Of<Arc<State>>,
    Params(params): Params<ChangeParams>,
    headers: HeaderMap,
    Body(body): Body,
) -> Result<Response, Problem> {
    let note = caller.note(&params.comment, params.dry_run)?;
    let expected: Vec<Expect> = expected_of_policy(&headers)?.into_iter().collect();
    let operations = operations(&file::parse(text(&body)?, SOURCE)?);
    let outcome = state
        .change(note, params.dry_run, move |held| {
            let mut all = operations;
            let kept: std::collections::BTreeSet<_> = all.iter().map(|one| one.key.clone()).collect();
            let gone = held.items().keys().filter(|key| !kept.contains(key)).cloned();
            all.extend(gone.map(|key| Operation { key, body: None }));
            plan(held, all, &expected)
        })
        .await?;
    Ok(changed(outcome, params.dry_run))
}

/// Puts the rules and overrides of a file into the policy; all others stay as they are. Without If-Match it is done
/// whatever the policy says.
#[utoipa::path(patch, path = "/v1/policy.toml", tag = "policy", request_body(content = String, content_type = "application/toml"),
    params(("dry_run" = Option<bool>, Query, description = "Only show what would differ"),
        ("comment" = Option<String>, Query, description = "Why, for the history"),
        ("If-Match" = Option<String>, Header, description = "The version of the policy that was read, as its ETag, or *")),
    responses((status = 200, body = ChangeView), (status = "default", body = Problem)))]
pub(super) async fn merge(
    caller: Caller,
    Of(state): Of<Arc<State>>,
    Params(params): Params<ChangeParams>,
    headers: HeaderMap,
    Body(body): Body,
) -> Result<Response, Problem> {
    let note = caller.note(&params.comment, params.dry_run)?;
    let expected: Vec<Expect> = expected_if_said(&headers)?.into_iter().flatten().collect();
    let operations = operations(&file::parse_part(text(&body)?, SOURCE)?);
    let outcome = state.change(note, params.dry_run, move |held| plan(held, operations, &expected)).await?;
    Ok(changed(outcome, params.dry_run))
}

fn operations(policy: &Policy) -> Vec<Operation> {
    let rules = policy
        .rules
        .iter()
        .map(|rule| Operation { key: stored::Key::Rule(rule.name.clone()), body: Some(stored::body_of_rule(rule)) });
    let overrides = policy
        .overrides
        .iter()
        .map(|over| Operation { key: stored::key_of_override(over), body: Some(stored::body_of_override(over)) });
    rules.chain(overrides).collect()
}
