//! `/v1/status`: what an operator asks first, as JSON.

use std::collections::HashMap;

use serde_json::json;

use crate::{
    control,
    heat::{Owner, Thresholds, board::HotKey},
    policy::LoadedPolicy,
    server::Process,
    store::{breaker::State, setup::StorePlan, shards::ShardCounters},
};

/// The store of the counts: its shards, and what each one's breaker is at.
fn store(plan: &StorePlan) -> serde_json::Value {
    let shards: Vec<_> = plan
        .shards
        .known()
        .iter()
        .map(|(shard, name)| {
            let breaker = plan.shards.breaker(*shard);
            let sum = |read: fn(&ShardCounters) -> u64| plan.shards.sum(*shard, read);
            json!({
                "address": &**name,
                "breaker": breaker.state().word(),
                "opened": breaker.transitions(State::Open),
                "replies": sum(|core| core.replies.value()),
                "timeouts": sum(|core| core.timeouts.value()),
                "down": sum(|core| core.down.value()),
                "errors": sum(|core| core.errors.value()),
            })
        })
        .collect();
    let (leases, lease_tokens) = plan.shards.hot().leases.held();
    let cores = || (0..plan.shards.cores()).map(|core| plan.shards.links(core));
    json!({
        "deadline_ms": plan.asker.deadline_us / 1000,
        "waiting": cores().map(|links| links.waiting.value()).sum::<u64>(),
        "in_flight": cores().map(|links| links.in_flight.value()).sum::<u64>(),
        "leases": leases,
        "lease_tokens": lease_tokens,
        "shards": shards,
    })
}

/// The most keys of the list of the hottest.
const HOT_LISTED_MAX: usize = 100;

/// The hottest keys of all cores. Those whose rule is gone are left out.
fn hot(process: &Process, policy: &LoadedPolicy) -> Vec<serde_json::Value> {
    let names: HashMap<u32, &str> =
        policy.cards.iter().zip(&policy.policy.rules).map(|(card, rule)| (card.slot, rule.name.as_str())).collect();
    let thresholds = Thresholds::new(&process.settings.hot);
    let keys = process.heat.hottest(process.clock.now().mono_ms, HOT_LISTED_MAX);
    let of_key = |key: HotKey| {
        let rule = match key.owner {
            Owner::Rule(slot) => *names.get(&slot)?,
            Owner::Throttle(command) => command,
        };
        let decided_by: serde_json::Map<_, _> =
            key.shares().map(|(by, share)| (by.word().to_owned(), json!(rounded(share)))).collect();
        Some(json!({
            "key": key.name,
            "rule": rule,
            "checks_per_second": rounded(key.per_second),
            "checks_per_second_max": rounded(key.per_second_max),
            "heat": thresholds.judge(key.per_second).word(),
            "decided_by": decided_by,
            "saved_calls_per_second": process.store.as_ref().map(|_| rounded(key.saved_calls_per_second())),
        }))
    };
    keys.into_iter().filter_map(of_key).collect()
}

/// To thousandths: no estimate is better, and 32-bit floats are ugly in 64 bits.
fn rounded(value: f32) -> f64 {
    (f64::from(value) * 1000.0).round() / 1000.0
}

/// The page.
pub(super) fn page(process: &Process) -> String {
    let loaded = process.policy.load();
    let cores: Vec<_> = process
        .cpus
        .iter()
        .zip(&process.counters)
        .enumerate()
        .map(|(core, (cpu, counters))| {
            json!({
                "core": core,
                "cpu": cpu,
                "connections": process.placement.connections(core),
                "checks": counters.checks.value(),
                "denied": counters.denied.value(),
                "unruled": counters.unruled.value(),
            })
        })
        .collect();
    let sum = |read: fn(&crate::metrics::counters::CoreCounters) -> u64| -> u64 {
        process.counters.iter().map(|counters| read(counters)).sum()
    };
    let refusal = process.reloads.refusal.load_full();
    let limits = &process.settings.limits;
    let status = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "stage": format!("{:?}", process.lifecycle.stage()).to_lowercase(),
        "uptime_ms": process.clock.now().mono_ms,
        "transport": process.transport,
        "resp": process.resp_address.to_string(),
        "http": process.http_address.map(|address| address.to_string()),
        "grpc": process.grpc_address.map(|address| address.to_string()),
        "ops": process.ops_address.to_string(),
        "unix": process.settings.resp.listen_unix,
        "started_unix_ms": process.clock.started_unix_ms(),
        "process_id": std::process::id(),
        "cores": cores,
        "policy": {
            "version": loaded.policy.version,
            "source": control::source(process),
            "rules": loaded.policy.rules.len(),
            "overrides": loaded.policy.overrides.len(),
            "reloads_applied": process.reloads.applied.load(std::sync::atomic::Ordering::Relaxed),
            "reloads_refused": process.reloads.refused.load(std::sync::atomic::Ordering::Relaxed),
            "last_refusal": refusal.as_ref().map(|refusal| &refusal.why),
            "last_refusal_unix_ms": refusal.as_ref().map(|refusal| refusal.unix_ms),
            "store": process.policy_store.as_ref().map(|store| store.page(process.clock.now().unix_ms)),
        },
        "limits": {
            "connections_max": limits.connections_max,
            "rules_max": limits.rules_max,
            "idle_timeout_ms": limits.idle_timeout_ms,
            "stall_timeout_ms": limits.stall_timeout_ms,
        },
        "store": process.store.as_ref().map(store),
        "hot": hot(process, &loaded),
        "buckets": {
            "capacity": process.table.capacity(),
            "inserted": sum(|core| core.buckets_inserted.value()),
            "evicted_full": sum(|core| core.buckets_evicted_full.value()),
            "evicted_in_use": sum(|core| core.buckets_evicted_in_use.value()),
        },
    });
    format!("{status:#}\n")
}
