//! Overrides. Which one is said in the query, since an identity is a list of any texts: `?rule=login&identity=ak_1`, with one
//! `identity` for each of the rule's `per` attributes, in their order.

use std::{ops::Bound, sync::Arc};

use axum::{
    extract::{Query, State as Of},
    http::{HeaderMap, Uri},
    response::Response,
};
use policy_sync::stored::Key;
use serde::Deserialize;

use super::{
    Body, State, changed, page,
    problem::{Problem, no_such},
    request::{ChangeParams, Params, expected_of_item, json},
    schema::{ChangeView, OverrideBody, OverrideList, OverrideView},
    tagged,
};
use crate::{
    plan::{Operation, plan},
    store::Caller,
};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ListParams {
    rule: Option<String>,
    after: Option<String>,
    limit: Option<u32>,
}

/// Which override, and what changes have in common: a query in which `identity` may stand several times.
struct Which {
    key: Key,
    params: ChangeParams,
}

fn which(uri: &Uri, is_change: bool) -> Result<Which, Problem> {
    let Query(pairs) = Query::<Vec<(String, String)>>::try_from_uri(uri)
        .map_err(|error| Problem::invalid(format!("the query cannot be understood: {}", error.body_text())))?;
    let (mut rule, mut identity, mut params) = (None, Vec::new(), ChangeParams::default());
    for (name, value) in pairs {
        if value.contains('\0') {
            return Err(Problem::field(&name, "has a NUL character, which the store cannot keep"));
        }
        match name.as_str() {
            "rule" => rule = Some(value),
            "identity" => identity.push(value),
            "comment" if is_change => params.comment = value,
            "dry_run" if is_change => {
                params.dry_run = value.parse().map_err(|_| Problem::field("dry_run", "can be true or false"))?;
            }
            _ => return Err(Problem::invalid(format!("the query has an unknown parameter {name:?}"))),
        }
    }
    let rule = rule.ok_or_else(|| Problem::field("rule", "is missing in the query"))?;
    Ok(Which { key: Key::Override { rule, identity }, params })
}

/// All overrides, by rule and identity.
#[utoipa::path(get, path = "/v1/overrides", tag = "overrides",
    params(("rule" = Option<String>, Query, description = "Only of this rule, or of `*`"),
        ("after" = Option<String>, Query, description = "`next` of the page before"),
        ("limit" = Option<u32>, Query, description = "How many, 1 to 10000; 1000 by default")),
    responses((status = 200, body = OverrideList), (status = "default", body = Problem)))]
pub(super) async fn list(
    _: Caller,
    Of(state): Of<Arc<State>>,
    Params(params): Params<ListParams>,
) -> Result<Response, Problem> {
    let limit = page(params.limit, 1_000, 10_000)?;
    let start = match &params.after {
        Some(after) => {
            let (rule, identity) = serde_json::from_str(after)
                .map_err(|_| Problem::field("after", "is not what `next` of a page before was"))?;
            Bound::Excluded(Key::Override { rule, identity })
        }
        None => Bound::Included(Key::Override { rule: params.rule.clone().unwrap_or_default(), identity: Vec::new() }),
    };
    let held = state.store.current().await?;
    let mut overrides = held
        .items()
        .range((start, Bound::Unbounded))
        .filter_map(|(key, item)| match key {
            Key::Override { rule, identity } => Some((rule, identity, item)),
            Key::Rule(_) => None,
        })
        .take_while(|(rule, ..)| params.rule.as_ref().is_none_or(|wanted| wanted == *rule))
        .map(|(rule, identity, item)| OverrideView::new(rule, identity, item));
    let list: Vec<_> = overrides.by_ref().take(limit).collect();
    let cursor = |last: &OverrideView| serde_json::json!([last.rule, last.identity]).to_string();
    let next = overrides.next().and(list.last()).map(cursor);
    Ok(tagged(held.version(), &OverrideList { version: held.version(), overrides: list, next }))
}

/// One override. Its ETag is for If-Match.
#[utoipa::path(get, path = "/v1/override", tag = "overrides",
    params(("rule" = String, Query, description = "The rule's name, or `*`"),
        ("identity" = Vec<String>, Query, description = "Once for each `per` attribute, in their order")),
    responses((status = 200, body = OverrideView), (status = "default", body = Problem)))]
pub(super) async fn get(_: Caller, Of(state): Of<Arc<State>>, uri: Uri) -> Result<Response, Problem> {
    let Which { key, .. } = which(&uri, false)?;
    let held = state.store.current().await?;
    match (&key, held.items().get(&key)) {
        (Key::Override { rule, identity }, Some(item)) => {
            Ok(tagged(item.version, &OverrideView::new(rule, identity, item)))
        }
        _ => Err(no_such(&key)),
    }
}

/// Replaces an override (`If-Match`), or creates one (`If-None-Match: *`).
#[utoipa::path(put, path = "/v1/override", tag = "overrides", request_body = OverrideBody,
    params(("rule" = String, Query, description = "The rule's name, or `*`"),
        ("identity" = Vec<String>, Query, description = "Once for each `per` attribute, in their order"),
        ("dry_run" = Option<bool>, Query, description = "Only show what would differ"),
        ("comment" = Option<String>, Query, description = "Why, for the history"),
        ("If-Match" = Option<String>, Header, description = "The ETag that was read, or *"),
        ("If-None-Match" = Option<String>, Header, description = "`*`: there must be no such override yet")),
    responses((status = 200, body = ChangeView), (status = "default", body = Problem)))]
pub(super) async fn put(
    caller: Caller,
    Of(state): Of<Arc<State>>,
    uri: Uri,
    headers: HeaderMap,
    Body(body): Body,
) -> Result<Response, Problem> {
    let which = which(&uri, true)?;
    let body = Some(json(&body)?);
    make(caller, &state, which, &headers, body).await
}

/// Deletes an override.
#[utoipa::path(delete, path = "/v1/override", tag = "overrides",
    params(("rule" = String, Query, description = "The rule's name, or `*`"),
        ("identity" = Vec<String>, Query, description = "Once for each `per` attribute, in their order"),
        ("dry_run" = Option<bool>, Query, description = "Only show what would differ"),
        ("comment" = Option<String>, Query, description = "Why, for the history"),
        ("If-Match" = String, Header, description = "The ETag that was read, or *")),
    responses((status = 200, body = ChangeView), (status = "default", body = Problem)))]
pub(super) async fn delete(
    caller: Caller,
    Of(state): Of<Arc<State>>,
    uri: Uri,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    let which = which(&uri, true)?;
    make(caller, &state, which, &headers, None).await
}

async fn make(
    caller: Caller,
    state: &State,
    Which { key, params }: Which,
    headers: &HeaderMap,
    body: Option<policy_sync::stored::Body>,
) -> Result<Response, Problem> {
    let note = caller.note(&params.comment, params.dry_run)?;
    let expected = expected_of_item(headers, &key)?;
    let operation = Operation { key, body };
    let outcome = state.change(note, params.dry_run, move |held| plan(held, vec![operation], &[expected])).await?;
    Ok(changed(outcome, params.dry_run))
}
