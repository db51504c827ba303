//! One fetch: asks the store what happened after the version here, and puts it in force.

use std::sync::{Arc, atomic::Ordering::Relaxed};

use policy_sync::{
    postgres::{self, Client},
    stored::{Row, StoredPolicy},
};

use super::{Shared, status::note};
use crate::control::force::Force;

const CHANGES: &str = "SELECT kind, version, name, identity, body FROM sluice.changes_after($1::text::bigint, $2)";
const REPORT: &str = "SELECT sluice.report_gateway($1, $2::text::bigint, $3, nullif($4, ''), $5::text::float8)";

const REPORTING: &str = "telling the policy store which version runs here";

/// What people read when the store is away and when it is back.
const WHAT: &str = "the policy store";

/// Fetches, and says whether the store answered. `client` is the connection, if there is one; it is kept where it can be.
pub(super) async fn fetch(shared: &Shared, client: &mut Option<Client>, force: &mut Force) -> bool {
    match try_fetch(shared, client, force).await {
        Ok(()) => {
            shared.status.answered_unix_ms.store(shared.process.clock.now().unix_ms, Relaxed);
            note(&shared.status.problem, WHAT, None);
            true
        }
        Err(error) => {
            // Whatever it was, a new connection begins without it.
            *client = None;
            shared.status.failed.add(1);
            note(&shared.status.problem, WHAT, Some(error.to_string()));
            false
        }
    }
}

async fn try_fetch(shared: &Shared, client: &mut Option<Client>, force: &mut Force) -> Result<(), postgres::Error> {
    let connected = match client {
        Some(client) if !client.is_broken() => client,
        _ => client.insert(Client::connect(&shared.config, shared.connect_timeout()).await?),
    };
    let stored = Arc::clone(&shared.stored.borrow());
    let (version, began_us) = (stored.version().to_string(), shared.process.clock.micros());
    let rows = connected.query(CHANGES, &[Some(&version), Some(stored.token())], shared.deadline()).await?;
    let rows: Vec<Row> = rows.iter().map(|found| row(&found)).collect();
    shared.status.rows.add(rows.len() as u64);
    let fetched_us = shared.process.clock.micros();
    apply(shared, &stored, &rows, force);
    let done_us = shared.process.clock.micros();
    if !Arc::ptr_eq(&stored, &shared.stored.borrow()) {
        let [fetch, compile] = &shared.status.last_change_us;
        fetch.store(fetched_us - began_us, Relaxed);
        compile.store(done_us - fetched_us, Relaxed);
    }
    let version = shared.stored.borrow().version().to_string();
    let refusal = shared.process.reloads.refusal.load_full();
    let problem = refusal.as_ref().map_or("", |refusal| refusal.why.as_str());
    let up_secs = (shared.process.clock.now().mono_ms / 1000).to_string();
    let software = concat!("sluice ", env!("CARGO_PKG_VERSION"));
    let name = gateway_name(shared);
    let report = [Some(name.as_str()), Some(&version), Some(software), Some(problem), Some(&up_secs)];
    match connected.query(REPORT, &report, shared.deadline()).await {
        Ok(_) => note(&shared.status.report_problem, REPORTING, None),
        // The policy is there all the same, and that is what matters.
        Err(error) if error.is_survivable() => note(&shared.status.report_problem, REPORTING, Some(error.to_string())),
        Err(error) => return Err(error),
    }
    Ok(())
}

/// A row of the answer. What is missing or no number is told by what reads it.
fn row(row: &postgres::Row<'_>) -> Row {
    let text = |column| row.get(column).map(ToOwned::to_owned);
    Row {
        kind: text(0).unwrap_or_default(),
        version: row.get(1).and_then(|version| version.parse().ok()).unwrap_or(u64::MAX),
        name: text(2).unwrap_or_default(),
        identity: text(3),
        body: text(4),
    }
}

/// Puts in force what the rows say, or says why not.
fn apply(shared: &Shared, stored: &StoredPolicy, rows: &[Row], force: &mut Force) {
    let reloads = &shared.process.reloads;
    let refuse = |why: String| {
        shared.status.refused.add(1);
        let before = reloads.refusal.load_full();
        if before.is_none_or(|before| before.why != why) {
            let version = rows.first().map_or(0, |head| head.version);
            tracing::error!(
                version,
                in_force = stored.version(),
                "policy of the store refused, the old one goes on:\n{why}"
            );
        }
        reloads.refuse(why, shared.process.clock.now().unix_ms);
    };
    let next = match stored.apply(rows) {
        Ok(next) => next,
        Err(error) => return refuse(error.to_string()),
    };
    let Some(next) = next else {
        shared.status.unchanged.add(1);
        if reloads.refusal.swap(None).is_some() {
            tracing::info!(version = stored.version(), "the policy of the store is good again, and what is in force");
        }
        return;
    };
    if next.rules().is_empty() {
        let why = "the policy store has no rules, and would allow everything; to mean that, make one rule with mode = \"off\"";
        return refuse(why.into());
    }
    match force.compile_stored(&next) {
        Ok(compiled) => {
            force.put(compiled, &shared.process);
            reloads.refusal.store(None);
            shared.status.changed.add(1);
            *shared.stored.borrow_mut() = Arc::new(next);
            shared.to_keep.set();
        }
        Err(error) => refuse(error.to_string()),
    }
}

/// What the store calls this gateway.
fn gateway_name(shared: &Shared) -> String {
    shared.settings().gateway.clone().unwrap_or_else(|| {
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        format!("{}:{}", host.trim(), shared.process.resp_address.port())
    })
}
