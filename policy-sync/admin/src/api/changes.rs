//! Several operations in one change, the history, differences between versions, and ways back.

use std::sync::Arc;

use axum::{extract::State as Of, http::HeaderMap, response::Response};
use policy_sync::stored::Key;
use serde::Deserialize;

use super::{
    Body, State, changed, page,
    problem::Problem,
    request::{ChangeParams, InPath, Params, expected_if_said, expected_of_policy, json},
    schema::{
        ChangeBody, ChangeView, Differences, EntryInFull, EntryView, History, Op, OperationBody, OverrideKey,
        RollbackBody,
    },
};
use crate::{
    plan::{self, Expect, Operation, plan},
    store::Caller,
};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct HistoryParams {
    before: Option<u64>,
    rule: Option<String>,
    limit: Option<u32>,
}

/// Who changed what, when and why; newest first.
#[utoipa::path(get, path = "/v1/changes", tag = "changes",
    params(("before" = Option<u64>, Query, description = "Only versions below"),
        ("rule" = Option<String>, Query, description = "Only what touched this rule or its overrides"),
        ("limit" = Option<u32>, Query, description = "How many, 1 to 1000; 50 by default")),
    responses((status = 200, body = History), (status = "default", body = Problem)))]
pub(super) async fn history(
    _: Caller,
    Of(state): Of<Arc<State>>,
    Params(params): Params<HistoryParams>,
) -> Result<axum::Json<History>, Problem> {
    let limit = page(params.limit, 50, 1_000)?;
    if params.rule.as_ref().is_some_and(|rule| rule.contains('\0')) {
        return Err(Problem::field("rule", "has a NUL character"));
    }
    let before = params.before.unwrap_or(u64::MAX);
    // One more tells whether there is a next page.
    let entries = state.store.history(before, params.rule.as_deref(), limit as u32 + 1).await?;
    let mut changes: Vec<EntryView> = entries.into_iter().map(EntryView::from).collect();
    let next = (changes.len() > limit).then(|| changes[limit - 1].version);
    changes.truncate(limit);
    Ok(axum::Json(History { changes, next }))
}

/// One change, and what it did.
#[utoipa::path(get, path = "/v1/changes/{version}", tag = "changes",
    responses((status = 200, body = EntryInFull), (status = "default", body = Problem)))]
pub(super) async fn one(
    _: Caller,
    Of(state): Of<Arc<State>>,
    InPath(version): InPath,
) -> Result<axum::Json<EntryInFull>, Problem> {
    let missing = || Problem::missing(format!("there is no change {version:?}"));
    let number: u64 = version.parse().ok().filter(|number| *number > 0).ok_or_else(missing)?;
    let entries = state.store.history(number.saturating_add(1), None, 1).await?;
    let entry = entries.into_iter().next().filter(|entry| entry.version == number).ok_or_else(missing)?;
    let differences = plan::differences(&*state.store.at(number - 1).await?, &*state.store.at(number).await?);
    Ok(axum::Json(EntryInFull { entry: entry.into(), differences: differences.into() }))
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DiffParams {
    from: u64,
    to: Option<u64>,
}

/// What differs between two versions.
#[utoipa::path(get, path = "/v1/diff", tag = "changes",
    params(("from" = u64, Query, description = "The one version; 0 is the empty policy"),
        ("to" = Option<u64>, Query, description = "The other; left out: the newest")),
    responses((status = 200, body = Differences), (status = "default", body = Problem)))]
pub(super) async fn diff(
    _: Caller,
    Of(state): Of<Arc<State>>,
    Params(params): Params<DiffParams>,
) -> Result<axum::Json<Differences>, Problem> {
    let from = state.store.at(params.from).await?;
    let to = match params.to {
        Some(to) => state.store.at(to).await?,
        None => state.store.current().await?,
    };
    Ok(axum::Json(plan::differences(&from, &to).into()))
}

/// Several operations: all are done, or none. Each says which version of its item was read (`if_version`), or If-Match says it
/// of the whole policy.
#[utoipa::path(post, path = "/v1/changes", tag = "changes", request_body = ChangeBody,
    params(("dry_run" = Option<bool>, Query, description = "Only show what would differ"),
        ("If-Match" = Option<String>, Header, description = "The version of the policy that was read, as its ETag, or *")),
    responses((status = 200, body = ChangeView), (status = "default", body = Problem)))]
pub(super) async fn make(
    caller: Caller,
    Of(state): Of<Arc<State>>,
    Params(params): Params<ChangeParams>,
    headers: HeaderMap,
    Body(body): Body,
) -> Result<Response, Problem> {
    let ChangeBody { comment, operations } = json(&body)?;
    let note = caller.note(if comment.is_empty() { &params.comment } else { &comment }, params.dry_run)?;
    if operations.is_empty() {
        return Err(Problem::field("operations", "is empty"));
    }
    let of_policy = expected_if_said(&headers)?;
    let mut expected: Vec<Expect> = of_policy.iter().flatten().cloned().collect();
    let mut planned = Vec::with_capacity(operations.len());
    for (index, operation) in operations.into_iter().enumerate() {
        let at = |field: &str| format!("operations[{index}].{field}");
        let OperationBody { op, rule, over, body, if_version } = operation;
        let key = match (rule, over) {
            (Some(name), None) => Key::Rule(name),
            (None, Some(OverrideKey { rule, identity })) => Key::Override { rule, identity },
            _ => return Err(Problem::field(&at("rule"), "is to say which rule; or `override`, which override")),
        };
        match (op, &body) {
            (Op::Put, Some(_)) | (Op::Delete, None) => {}
            (Op::Put, None) => return Err(Problem::field(&at("body"), "is missing")),
            (Op::Delete, Some(_)) => return Err(Problem::field(&at("body"), "has no meaning in a delete")),
        }
        match if_version {
            Some(0) => expected.push(Expect::Absent(key.clone())),
            Some(version) => expected.push(Expect::Item(key.clone(), version)),
            None if of_policy.is_some() => {}
            None => {
                let status = axum::http::StatusCode::PRECONDITION_REQUIRED;
                let detail =
                    format!("{} is missing (0 for what does not exist yet), and so is If-Match", at("if_version"));
                return Err(Problem::new(status, "precondition-required", detail));
            }
        }
        planned.push(Operation { key, body });
    }
    let outcome = state.change(note, params.dry_run, move |held| plan(held, planned, &expected)).await?;
    Ok(changed(outcome, params.dry_run))
}

/// Brings back what the policy said at a version, as a new version: all of it, or one rule with its overrides.
#[utoipa::path(post, path = "/v1/rollback", tag = "changes", request_body = RollbackBody,
    params(("dry_run" = Option<bool>, Query, description = "Only show what would differ"),
        ("If-Match" = String, Header, description = "The version of the policy that was read, as its ETag, or *")),
    responses((status = 200, body = ChangeView), (status = "default", body = Problem)))]
pub(super) async fn rollback(
    caller: Caller,
    Of(state): Of<Arc<State>>,
    Params(params): Params<ChangeParams>,
    headers: HeaderMap,
    Body(body): Body,
) -> Result<Response, Problem> {
    let RollbackBody { to, rule, comment } = json(&body)?;
    let mut note = caller.note(if comment.is_empty() { &params.comment } else { &comment }, params.dry_run)?;
    note.rolled_back_to = Some(to);
    let expected: Vec<Expect> = expected_of_policy(&headers)?.into_iter().collect();
    let then = state.store.at(to).await?;
    if let Some(rule) = &rule {
        let key = Key::Rule(rule.clone());
        let now = state.store.current().await?;
        if !then.items().contains_key(&key) && !now.items().contains_key(&key) {
            return Err(Problem::missing(format!("there is no {key}, neither now nor at version {to}")));
        }
    }
    let outcome = state
        .change(note, params.dry_run, move |held| {
            let operations = plan::rollback(held, &then, rule.as_deref());
            plan(held, operations, &expected)
        })
        .await?;
    Ok(changed(outcome, params.dry_run))
}
