//! Which gateway runs which version, and what shadow rules would have done.

use std::{collections::HashMap, sync::Arc};

use axum::extract::State as Of;
use jiff::Timestamp;
use serde::Deserialize;

use super::{
    State, page,
    problem::Problem,
    request::Params,
    schema::{GatewayView, Gateways, ShadowIdentity, ShadowReport, ShadowRule},
};
use crate::{store::Caller, tokens::time};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NoParams {}

/// Which gateway runs which version, and when it was seen last.
#[utoipa::path(get, path = "/v1/gateways", tag = "reports",
    responses((status = 200, body = Gateways), (status = "default", body = Problem)))]
pub(super) async fn gateways(
    _: Caller,
    Of(state): Of<Arc<State>>,
    Params(NoParams {}): Params<NoParams>,
) -> Result<axum::Json<Gateways>, Problem> {
    let sql = "SELECT p.version, g.name, g.policy_version, g.software, g.problem, \
                 extract(epoch FROM g.started_at)::float8, extract(epoch FROM g.seen_at)::float8, \
                 extract(epoch FROM clock_timestamp() - g.seen_at)::float8 \
               FROM sluice.policy p LEFT JOIN sluice.gateway g ON true ORDER BY g.name";
    let rows = state.store.query(sql, &[]).await?;
    let number = |number: i64| u64::try_from(number).unwrap_or(0);
    let version = rows.first().map_or(0, |row| number(row.get(0)));
    let gateways: Vec<GatewayView> = rows
        .iter()
        .filter_map(|row| {
            let (policy_version, ago) = (number(row.get::<_, Option<i64>>(2)?), row.get::<_, f64>(7).max(0.0));
            Some(GatewayView {
                name: row.get(1),
                policy_version,
                is_current: policy_version == version,
                is_live: ago <= f64::from(state.live_secs),
                software: row.get(3),
                problem: row.get(4),
                started_at: time(row.get(5)),
                seen_at: time(row.get(6)),
                seen_secs_ago: (ago * 10.0).round() / 10.0,
            })
        })
        .collect();
    let live = gateways.iter().filter(|one| one.is_live).count();
    let current = gateways.iter().filter(|one| one.is_live && one.is_current).count();
    Ok(axum::Json(Gateways { version, live, current, gateways }))
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ShadowParams {
    rule: Option<String>,
    from: Option<Timestamp>,
    to: Option<Timestamp>,
    limit: Option<u32>,
}

/// What shadow rules would have done: who would have been denied, how often, out of how many. Counted by hour (UTC).
#[utoipa::path(get, path = "/v1/shadow", tag = "reports",
    params(("rule" = Option<String>, Query, description = "Only this rule"),
        ("from" = Option<String>, Query, description = "From this hour on, such as 2027-01-01T00:00:00Z; left out: since 24 hours ago"),
        ("to" = Option<String>, Query, description = "Only hours that begin before"),
        ("limit" = Option<u32>, Query, description = "How many identities of each rule, 1 to 1000; 20 by default")),
    responses((status = 200, body = ShadowReport), (status = "default", body = Problem)))]
pub(super) async fn shadow(
    _: Caller,
    Of(state): Of<Arc<State>>,
    Params(params): Params<ShadowParams>,
) -> Result<axum::Json<ShadowReport>, Problem> {
    let limit = page(params.limit, 20, 1_000)?;
    if params.rule.as_ref().is_some_and(|rule| rule.contains('\0')) {
        return Err(Problem::field("rule", "has a NUL character"));
    }
    #[allow(clippy::cast_precision_loss, reason = "seconds since 1970 are exact in a double")]
    let seconds = |time: Timestamp| time.as_second() as f64;
    let (from, to) = (params.from.map(seconds), params.to.map(seconds));
    let hours = "($1::text IS NULL OR rule = $1) \
                 AND hour >= coalesce(date_trunc('hour', to_timestamp($2::float8), 'UTC'), date_trunc('hour', now(), 'UTC') - interval '24 hours') \
                 AND ($3::float8 IS NULL OR hour < to_timestamp($3))";
    let totals = format!(
        "SELECT rule, rule_version, sum(checks)::bigint, sum(denied)::bigint, \
           extract(epoch FROM min(hour))::float8, extract(epoch FROM max(hour))::float8 \
         FROM sluice.shadow_total WHERE {hours} GROUP BY 1, 2 ORDER BY 1, 2 DESC LIMIT 1000"
    );
    let identities = format!(
        "SELECT * FROM (SELECT rule, rule_version, identity, sum(checks)::bigint, sum(denied)::bigint, \
           extract(epoch FROM min(first_seen))::float8, extract(epoch FROM max(last_seen))::float8, \
           row_number() OVER (PARTITION BY rule, rule_version ORDER BY sum(denied) DESC, sum(checks) DESC, identity), \
           count(*) OVER (PARTITION BY rule, rule_version) \
         FROM sluice.shadow_identity WHERE {hours} GROUP BY 1, 2, 3) AS ranked \
         WHERE row_number <= $4 ORDER BY rule, rule_version, row_number"
    );
    let totals = state.store.query(&totals, &[&params.rule, &from, &to]).await?;
    let most = i64::try_from(limit).unwrap_or(i64::MAX);
    let rows = state.store.query(&identities, &[&params.rule, &from, &to, &most]).await?;
    let number = |number: i64| u64::try_from(number).unwrap_or(0);
    let mut known: HashMap<(String, i64), (Vec<ShadowIdentity>, u64)> = HashMap::new();
    for row in &rows {
        let (list, all) = known.entry((row.get(0), row.get(1))).or_default();
        let (checks, denied) = (number(row.get(3)), number(row.get(4)));
        *all = number(row.get(8));
        list.push(ShadowIdentity {
            identity: row.get(2),
            checks,
            denied,
            denied_pct: percent(denied, checks),
            first_seen: time(row.get(5)),
            last_seen: time(row.get(6)),
        });
    }
    let rules = totals
        .iter()
        .map(|row| {
            let (rule, version): (String, i64) = (row.get(0), row.get(1));
            let (checks, denied) = (number(row.get(2)), number(row.get(3)));
            let (identities, all) = known.remove(&(rule.clone(), version)).unwrap_or_default();
            let identities_more = all - identities.len() as u64;
            ShadowRule {
                rule,
                rule_version: number(version),
                checks,
                denied,
                denied_pct: percent(denied, checks),
                first_hour: time(row.get(4)),
                last_hour: time(row.get(5)),
                identities,
                identities_more,
            }
        })
        .collect();
    Ok(axum::Json(ShadowReport { rules }))
}

/// A share in percent, to a hundredth.
#[allow(clippy::cast_precision_loss, reason = "a share to a hundredth")]
fn percent(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { (part as f64 / whole as f64 * 10_000.0).round() / 100.0 }
}
