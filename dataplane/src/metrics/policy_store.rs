//! `/metrics` of following the policy store.

use std::{fmt, sync::atomic::Ordering::Relaxed};

use prometheus_client::{collector::Collector, encoding::DescriptorEncoder, registry::Unit};

use super::exposition::{UNLABELLED, counters, gauges, one};
use crate::{policy_store::status::Status, server::Process};

/// What is shown, read once.
#[derive(Debug)]
pub(super) struct PolicyStoreSnapshot {
    fetches: [(&'static str, u64); 4],
    /// By way: its name, whether it is up, and what was heard.
    pushes: Vec<(&'static str, bool, u64)>,
    /// `None` until the store has answered.
    age_seconds: Option<f64>,
    is_refused: bool,
    kept: [(&'static str, u64); 2],
    keep_failing: bool,
    shadow_batches: [(&'static str, u64); 2],
    shadow_rows_waiting: u64,
    shadow_identities_dropped: u64,
}

impl PolicyStoreSnapshot {
    pub(super) fn of(process: &Process, status: &Status) -> Self {
        let ways = status.ways().into_iter().filter(|(_, way)| way.is_used);
        Self {
            fetches: [
                ("changed", status.changed.value()),
                ("unchanged", status.unchanged.value()),
                ("refused", status.refused.value()),
                ("failed", status.failed.value()),
            ],
            pushes: ways.map(|(name, way)| (name, way.is_up.load(Relaxed), way.heard.value())).collect(),
            age_seconds: status.age_ms(process.clock.now().unix_ms).map(|ms| ms as f64 / 1000.0),
            is_refused: process.reloads.refusal.load().is_some(),
            kept: [("written", status.kept.value()), ("failed", status.keep_failures.value())],
            keep_failing: status.keep_problem.load().is_some(),
            shadow_batches: [("arrived", status.shadow_batches.value()), ("failed", status.shadow_failures.value())],
            shadow_rows_waiting: status.shadow_waiting.load(Relaxed),
            shadow_identities_dropped: process.shadow.as_ref().map_or(0, |exchange| exchange.dropped.load(Relaxed)),
        }
    }
}

impl Collector for PolicyStoreSnapshot {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let out = &mut encoder;
        let flag = |is: bool| f64::from(u8::from(is));
        let help = "Times that the policy store was asked for changes, by what came of it";
        let fetches = self.fetches.iter().map(|&(outcome, count)| one("outcome", outcome, count));
        counters(out, ("policy_store_fetches", help, None), fetches)?;
        let help = "Pushes heard that the policy may have changed, by the way in which they came";
        let heard = self.pushes.iter().map(|&(way, _, heard)| one("way", way, heard));
        counters(out, ("policy_store_pushes", help, None), heard)?;
        let help = "1 while pushes are listened to in this way";
        let up = self.pushes.iter().map(|&(way, is_up, _)| one("way", way, flag(is_up)));
        gauges(out, ("policy_store_listening", help, None), up)?;
        if let Some(age) = self.age_seconds {
            let help = "Time since the policy store last answered: how old the policy can be";
            gauges(out, ("policy_store_age", help, Some(&Unit::Seconds)), [(UNLABELLED, age)])?;
        }
        let help = "1 while the newest policy of the store is refused, and an older one goes on";
        gauges(out, ("policy_store_refused", help, None), [(UNLABELLED, flag(self.is_refused))])?;
        let help = "Times that the last good policy was written to disk, or could not be";
        let kept = self.kept.iter().map(|&(outcome, count)| one("outcome", outcome, count));
        counters(out, ("policy_last_good_writes", help, None), kept)?;
        let help = "1 while the policy in force could not be written to disk";
        gauges(out, ("policy_last_good_failing", help, None), [(UNLABELLED, flag(self.keep_failing))])?;
        let help = "Batches of what shadow rules saw that the policy store has, or could not be told";
        let batches = self.shadow_batches.iter().map(|&(outcome, count)| one("outcome", outcome, count));
        counters(out, ("shadow_batches", help, None), batches)?;
        let help = "Rows of what shadow rules saw that wait for the policy store";
        gauges(out, ("shadow_rows_waiting", help, None), [(UNLABELLED, self.shadow_rows_waiting as f64)])?;
        let help = "Identities that shadow rules saw and that found no place, or lost it; totals are not affected";
        counters(out, ("shadow_identities_dropped", help, None), [(UNLABELLED, self.shadow_identities_dropped)])
    }
}
