//! `/v1/status`: what an operator asks first, as JSON.

use serde_json::json;

use crate::{
    control,
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
    let cores = || (0..plan.shards.cores()).map(|core| plan.shards.links(core));
    json!({
        "deadline_ms": plan.asker.deadline_us / 1000,
        "waiting": cores().map(|links| links.waiting.value()).sum::<u64>(),
        "in_flight": cores().map(|links| links.in_flight.value()).sum::<u64>(),
        "shards": shards,
    })
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
        "ops": process.ops_address.to_string(),
        "unix": process.settings.resp.listen_unix,
        "started_unix_ms": process.clock.started_unix_ms(),
        "process_id": std::process::id(),
        "cores": cores,
        "policy": {
            "version": loaded.policy.version,
            "source": control::source_name(process.settings.policy.as_deref()),
            "rules": loaded.policy.rules.len(),
            "overrides": loaded.policy.overrides.len(),
            "reloads_applied": process.reloads.applied.load(std::sync::atomic::Ordering::Relaxed),
            "reloads_refused": process.reloads.refused.load(std::sync::atomic::Ordering::Relaxed),
            "last_refusal": refusal.as_ref().map(|refusal| &refusal.why),
            "last_refusal_unix_ms": refusal.as_ref().map(|refusal| refusal.unix_ms),
        },
        "limits": {
            "connections_max": limits.connections_max,
            "rules_max": limits.rules_max,
            "idle_timeout_ms": limits.idle_timeout_ms,
            "stall_timeout_ms": limits.stall_timeout_ms,
        },
        "store": process.store.as_ref().map(store),
        "buckets": {
            "capacity": process.table.capacity(),
            "inserted": sum(|core| core.buckets_inserted.value()),
            "evicted_full": sum(|core| core.buckets_evicted_full.value()),
            "evicted_in_use": sum(|core| core.buckets_evicted_in_use.value()),
        },
    });
    format!("{status:#}\n")
}
