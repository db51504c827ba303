//! What all cores' ledgers add up to, until the policy store has it.
//!
//! It leaves in batches with a number. A batch is sent until the store has answered, and the store adds each number once; so
//! what is counted arrives once, whatever happens to connections. While the store is away, figures of the same rule, version,
//! hour and identity add up in place, so memory is bounded by how many of those there are.

use std::collections::{BTreeMap, HashMap};

use jiff::Timestamp;
use serde_json::{Value, json};

use super::ledger::Ledger;

/// The most identities that wait for the store. Further ones are dropped, and counted; totals are not affected.
pub const IDENTITIES_MAX: usize = 100_000;
/// The most totals (rules at their versions, by hour) that wait: more than a year of a rule. Further ones are dropped, and
/// counted.
pub const TOTALS_MAX: usize = 10_000;
/// The most identities of one batch.
const BATCH_IDENTITIES_MAX: usize = 5_000;

/// A rule at its version in an hour, the latter in milliseconds since the Unix epoch.
type RuleHour = (Box<str>, u64, i64);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Figures {
    checks: u64,
    denied: u64,
    first_unix_ms: i64,
    last_unix_ms: i64,
}

/// What waits for the store.
#[derive(Debug, Default)]
pub struct Pending {
    totals: BTreeMap<RuleHour, (u64, u64)>,
    identities: HashMap<(RuleHour, Box<str>), Figures>,
    batch: Option<Batch>,
    sequence: u64,
    /// Identities and totals that found no room.
    pub dropped: u64,
}

/// What is sent at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Its number; the store adds each number of a process once.
    pub sequence: u64,
    /// The totals, as the store takes them (a JSON array).
    pub totals: String,
    /// The identities, as the store takes them (a JSON array).
    pub identities: String,
}

impl Pending {
    /// How many rows wait.
    pub fn rows(&self) -> usize {
        self.totals.len() + self.identities.len()
    }

    /// Adds a ledger. `started_unix_ms` is when the process began; `written` is how an identity is written down.
    pub fn add(&mut self, ledger: &Ledger, started_unix_ms: i64, written: impl Fn(&[u8]) -> Box<str>) {
        let hour = |rule: &str, version| (Box::<str>::from(rule), version, ledger.hour_unix_ms);
        for total in ledger.totals().filter(|total| total.checks > 0) {
            let key = hour(&total.tag.rule, total.tag.version);
            if self.totals.len() < TOTALS_MAX || self.totals.contains_key(&key) {
                let sums = self.totals.entry(key).or_default();
                *sums = (sums.0 + total.checks, sums.1 + total.denied);
            } else {
                self.dropped += 1;
            }
        }
        let unix_ms = |mono_ms: u64| started_unix_ms.saturating_add_unsigned(mono_ms);
        for (tag, one) in ledger.identities() {
            let key = (hour(&tag.rule, tag.version), written(one.name()));
            let (first, last) = (unix_ms(one.first_ms), unix_ms(one.last_ms));
            if self.identities.len() < IDENTITIES_MAX || self.identities.contains_key(&key) {
                let new = Figures { first_unix_ms: first, last_unix_ms: last, ..Figures::default() };
                let figures = self.identities.entry(key).or_insert(new);
                figures.checks += one.checks;
                figures.denied += one.denied;
                figures.first_unix_ms = figures.first_unix_ms.min(first);
                figures.last_unix_ms = figures.last_unix_ms.max(last);
            } else {
                self.dropped += 1;
            }
        }
    }

    /// The batch that is to be sent: the one that was not answered yet, or else a new one. `None`: nothing waits.
    pub fn batch(&mut self) -> Option<&Batch> {
        if self.batch.is_none() && self.rows() > 0 {
            self.sequence += 1;
            let totals = std::mem::take(&mut self.totals);
            let totals: Vec<Value> = totals
                .into_iter()
                .map(|((rule, version, hour), (checks, denied))| {
                    json!({ "rule": rule, "rule_version": version, "hour": time(hour), "checks": checks, "denied": denied })
                })
                .collect();
            let keys: Vec<_> = self.identities.keys().take(BATCH_IDENTITIES_MAX).cloned().collect();
            let identities = keys.into_iter().filter_map(|key| self.identities.remove_entry(&key));
            let identities: Vec<Value> = identities
                .map(|(((rule, version, hour), identity), figures)| {
                    json!({
                        "rule": rule,
                        "rule_version": version,
                        "hour": time(hour),
                        "identity": identity,
                        "checks": figures.checks,
                        "denied": figures.denied,
                        "first_seen": time(figures.first_unix_ms),
                        "last_seen": time(figures.last_unix_ms),
                    })
                })
                .collect();
            self.batch = Some(Batch {
                sequence: self.sequence,
                totals: Value::Array(totals).to_string(),
                identities: Value::Array(identities).to_string(),
            });
        }
        self.batch.as_ref()
    }

    /// The store has the batch.
    pub fn arrived(&mut self) {
        self.batch = None;
    }
}

/// A time as the store reads it. One that no calendar has becomes its beginning.
fn time(unix_ms: i64) -> String {
    Timestamp::from_millisecond(unix_ms).unwrap_or(Timestamp::UNIX_EPOCH).to_string()
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::shadow::{HOUR_MS, Tag};

    fn ledger(hour: i64, identity: u64, checks: u64, denied: u64) -> Ledger {
        let tag = Arc::new(Tag { id: 1, rule: "r".into(), version: 3 });
        let mut ledger = Ledger::new(16);
        ledger.hour_unix_ms = hour * HOUR_MS;
        for number in 0..checks {
            ledger.meet(&tag, identity, number, |name| name.extend(format!("key={identity}").bytes()));
            ledger.count(&tag, identity, number < denied, number);
        }
        ledger
    }

    fn text(name: &[u8]) -> Box<str> {
        String::from_utf8_lossy(name).into()
    }

    #[test]
    fn figures_of_one_hour_add_up_and_leave_in_a_batch_until_it_has_arrived() {
        let mut pending = Pending::default();
        assert_eq!(pending.batch(), None);
        pending.add(&ledger(10, 1, 4, 1), 1_000, text);
        pending.add(&ledger(10, 1, 6, 2), 2_000, text);
        pending.add(&ledger(11, 1, 1, 0), 3_000, text);
        let batch = pending.batch().cloned().unwrap();
        let totals: Value = serde_json::from_str(&batch.totals).unwrap();
        let hour = |hour: &str| format!("1970-01-01T{hour}:00:00Z");
        let expected = json!([
            { "rule": "r", "rule_version": 3, "hour": hour("10"), "checks": 10, "denied": 3 },
            { "rule": "r", "rule_version": 3, "hour": hour("11"), "checks": 1, "denied": 0 },
        ]);
        assert_eq!(totals, expected);
        let identities: Value = serde_json::from_str(&batch.identities).unwrap();
        let first = identities.as_array().unwrap().iter().find(|one| one["hour"] == hour("10")).unwrap();
        assert_eq!((first["checks"].as_u64(), first["denied"].as_u64()), (Some(10), Some(3)));
        assert_eq!(first["first_seen"], "1970-01-01T00:00:01Z");
        assert_eq!(first["last_seen"], "1970-01-01T00:00:02.005Z");
        // What comes meanwhile is not in it, and the number stays until it has arrived.
        pending.add(&ledger(10, 2, 1, 1), 0, text);
        assert_eq!(pending.batch(), Some(&batch));
        pending.arrived();
        let next = pending.batch().unwrap();
        assert_eq!(next.sequence, batch.sequence + 1);
        assert!(next.identities.contains("key=2") && !next.identities.contains("key=1"));
        pending.arrived();
        assert_eq!(pending.batch(), None);
    }

    #[test]
    fn a_store_that_stays_away_costs_bounded_memory() {
        let mut pending = Pending::default();
        for hour in (0..).take(TOTALS_MAX + 10) {
            pending.add(&ledger(hour, 1, 1, 1), 0, text);
        }
        assert_eq!((pending.totals.len(), pending.dropped), (TOTALS_MAX, 10));
        pending.add(&ledger(0, 1, 1, 1), 0, text);
        assert_eq!(pending.dropped, 10);
    }
}
