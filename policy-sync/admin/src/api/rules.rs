//! Rules.

use std::{ops::Bound, sync::Arc};

use axum::{extract::State as Of, http::HeaderMap, response::Response};
use policy_sync::stored::Key;
use serde::Deserialize;

use super::{
    Body, State, changed, page,
    problem::{Problem, no_such},
    request::{ChangeParams, InPath, Params, expected_of_item, json},
    schema::{ChangeView, RuleBody, RuleList, RuleView},
    tagged,
};
use crate::{
    plan::{Operation, plan},
    store::Caller,
};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ListParams {
    after: Option<String>,
    limit: Option<u32>,
}

/// All rules, by name.
#[utoipa::path(get, path = "/v1/rules", tag = "rules",
    params(("after" = Option<String>, Query, description = "The name after which to go on"),
        ("limit" = Option<u32>, Query, description = "How many, 1 to 10000; 1000 by default")),
    responses((status = 200, body = RuleList), (status = "default", body = Problem)))]
pub(super) async fn list(
    _: Caller,
    Of(state): Of<Arc<State>>,
    Params(params): Params<ListParams>,
) -> Result<Response, Problem> {
    let limit = page(params.limit, 1_000, 10_000)?;
    let held = state.store.current().await?;
    let start = params.after.map_or(Bound::Unbounded, |after| Bound::Excluded(Key::Rule(after)));
    let mut rules = held.items().range((start, Bound::Unbounded)).map_while(|(key, item)| match key {
        Key::Rule(name) => Some(RuleView::new(name, item)),
        Key::Override { .. } => None,
    });
    let list: Vec<_> = rules.by_ref().take(limit).collect();
    let next = rules.next().and(list.last()).map(|last| last.name.clone());
    Ok(tagged(held.version(), &RuleList { version: held.version(), rules: list, next }))
}

/// One rule. Its ETag is for If-Match.
#[utoipa::path(get, path = "/v1/rules/{name}", tag = "rules",
    responses((status = 200, body = RuleView), (status = "default", body = Problem)))]
pub(super) async fn get(_: Caller, Of(state): Of<Arc<State>>, InPath(path): InPath) -> Result<Response, Problem> {
    let key = Key::Rule(path);
    let held = state.store.current().await?;
    match (&key, held.items().get(&key)) {
        (Key::Rule(name), Some(item)) => Ok(tagged(item.version, &RuleView::new(name, item))),
        _ => Err(no_such(&key)),
    }
}

/// Replaces a rule (`If-Match`), or creates one (`If-None-Match: *`).
#[utoipa::path(put, path = "/v1/rules/{name}", tag = "rules", request_body = RuleBody,
    params(("dry_run" = Option<bool>, Query, description = "Only show what would differ"),
        ("comment" = Option<String>, Query, description = "Why, for the history"),
        ("If-Match" = Option<String>, Header, description = "The ETag that was read, or *"),
        ("If-None-Match" = Option<String>, Header, description = "`*`: there must be no such rule yet")),
    responses((status = 200, body = ChangeView), (status = "default", body = Problem)))]
pub(super) async fn put(
    caller: Caller,
    Of(state): Of<Arc<State>>,
    InPath(path): InPath,
    Params(params): Params<ChangeParams>,
    headers: HeaderMap,
    Body(body): Body,
) -> Result<Response, Problem> {
    let note = caller.note(&params.comment, params.dry_run)?;
    let key = Key::Rule(path);
    let expected = expected_of_item(&headers, &key)?;
    let operation = Operation { key, body: Some(json(&body)?) };
    let outcome = state.change(note, params.dry_run, move |held| plan(held, vec![operation], &[expected])).await?;
    Ok(changed(outcome, params.dry_run))
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DeleteParams {
    #[serde(default)]
    dry_run: bool,
    #[serde(default)]
    comment: String,
    #[serde(default)]
    with_overrides: bool,
}

/// Deletes a rule.
#[utoipa::path(delete, path = "/v1/rules/{name}", tag = "rules",
    params(("dry_run" = Option<bool>, Query, description = "Only show what would differ"),
        ("comment" = Option<String>, Query, description = "Why, for the history"),
        ("with_overrides" = Option<bool>, Query, description = "Delete its overrides too; they cannot be without it"),
        ("If-Match" = String, Header, description = "The ETag that was read, or *")),
    responses((status = 200, body = ChangeView), (status = "default", body = Problem)))]
pub(super) async fn delete(
    caller: Caller,
    Of(state): Of<Arc<State>>,
    InPath(path): InPath,
    Params(params): Params<DeleteParams>,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    let note = caller.note(&params.comment, params.dry_run)?;
    let rule = path;
    let key = Key::Rule(rule.clone());
    let expected = expected_of_item(&headers, &key)?;
    let outcome = state
        .change(note, params.dry_run, move |held| {
            let is_its = |other: &&Key| matches!(other, Key::Override { rule: name, .. } if *name == rule);
            let overrides = held.items().keys().filter(|_| params.with_overrides).filter(is_its).cloned();
            let all = std::iter::once(key).chain(overrides).map(|key| Operation { key, body: None }).collect();
            plan(held, all, &[expected])
        })
        .await?;
    Ok(changed(outcome, params.dry_run))
}
