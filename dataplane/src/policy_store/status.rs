//! How following the policy store goes, for `/v1/status` and `/metrics`: written by its executor, read by the ops port.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::Relaxed},
};

use arc_swap::ArcSwapOption;
use serde_json::json;

use crate::metrics::counters::Counter;

/// What is counted and known of the policy store.
#[derive(Debug)]
pub struct Status {
    /// Where it is, without the password.
    pub place: String,
    /// Fetches that brought another policy, which is in force.
    pub changed: Counter,
    /// Fetches that brought nothing new.
    pub unchanged: Counter,
    /// Fetches whose policy was refused.
    pub refused: Counter,
    /// Fetches that the store did not answer.
    pub failed: Counter,
    /// Why the last fetch failed; nothing once one was answered.
    pub problem: ArcSwapOption<String>,
    /// Why the store does not know which version runs here, though it answers.
    pub report_problem: ArcSwapOption<String>,
    /// When the store answered last, in milliseconds since the Unix epoch; 0 before.
    pub answered_unix_ms: AtomicI64,
    /// Pushes by NOTIFY.
    pub notify: Way,
    /// Pushes by Redis.
    pub redis: Way,
    /// Times that the last good policy was written to disk.
    pub kept: Counter,
    /// Times that it could not be written.
    pub keep_failures: Counter,
    /// Why the last good policy is not on disk, if it is not.
    pub keep_problem: ArcSwapOption<String>,
    /// Batches of what shadow rules saw that the store has.
    pub shadow_batches: Counter,
    /// Times that a batch could not be told.
    pub shadow_failures: Counter,
    /// Rows of what shadow rules saw that wait for the store.
    pub shadow_waiting: AtomicU64,
    /// Why the store is not told what shadow rules saw, if it is not.
    pub shadow_problem: ArcSwapOption<String>,
    /// Rows that PostgreSQL sent, over all fetches.
    pub rows: Counter,
    /// How long the last fetch that brought another policy took: asking, compiling.
    pub last_change_us: [AtomicU64; 2],
}

/// One way in which pushes come.
#[derive(Debug, Default)]
pub struct Way {
    /// Whether it is in use at all.
    pub is_used: bool,
    /// Whether there is a connection on which nothing is missed.
    pub is_up: AtomicBool,
    /// Pushes heard.
    pub heard: Counter,
    /// Why there is no connection; nothing while there is one.
    pub problem: ArcSwapOption<String>,
}

impl Status {
    /// Nothing has happened yet.
    pub fn new(place: String, by_notify: bool, by_redis: bool) -> Self {
        let way = |is_used| Way { is_used, ..Way::default() };
        Self {
            place,
            changed: Counter::default(),
            unchanged: Counter::default(),
            refused: Counter::default(),
            failed: Counter::default(),
            problem: ArcSwapOption::empty(),
            report_problem: ArcSwapOption::empty(),
            answered_unix_ms: AtomicI64::new(0),
            notify: way(by_notify),
            redis: way(by_redis),
            kept: Counter::default(),
            keep_failures: Counter::default(),
            keep_problem: ArcSwapOption::empty(),
            shadow_batches: Counter::default(),
            shadow_failures: Counter::default(),
            shadow_waiting: AtomicU64::new(0),
            shadow_problem: ArcSwapOption::empty(),
            rows: Counter::default(),
            last_change_us: Default::default(),
        }
    }

    /// The ways in which pushes come, with their names.
    pub fn ways(&self) -> [(&'static str, &Way); 2] {
        [("notify", &self.notify), ("redis", &self.redis)]
    }

    /// How long ago the store answered last, in milliseconds; `None` if it never did.
    pub fn age_ms(&self, unix_ms: i64) -> Option<u64> {
        let answered = self.answered_unix_ms.load(Relaxed);
        (answered != 0).then(|| u64::try_from(unix_ms.saturating_sub(answered)).unwrap_or(0))
    }

    /// For `/v1/status`.
    pub fn page(&self, unix_ms: i64) -> serde_json::Value {
        let text = |slot: &ArcSwapOption<String>| slot.load_full().map(|text| text.to_string());
        let pushes: serde_json::Map<_, _> = self
            .ways()
            .into_iter()
            .filter(|(_, way)| way.is_used)
            .map(|(name, way)| {
                let page = json!({
                    "listening": way.is_up.load(Relaxed),
                    "heard": way.heard.value(),
                    "problem": text(&way.problem),
                });
                (name.to_owned(), page)
            })
            .collect();
        let answered = self.answered_unix_ms.load(Relaxed);
        json!({
            "place": self.place,
            "last_answer_unix_ms": (answered != 0).then_some(answered),
            "age_ms": self.age_ms(unix_ms),
            "problem": text(&self.problem),
            "report_problem": text(&self.report_problem),
            "fetches": {
                "changed": self.changed.value(),
                "unchanged": self.unchanged.value(),
                "refused": self.refused.value(),
                "failed": self.failed.value(),
            },
            "last_change_fetch_ms": self.last_change_us[0].load(Relaxed) as f64 / 1000.0,
            "last_change_compile_ms": self.last_change_us[1].load(Relaxed) as f64 / 1000.0,
            "pushes": pushes,
            "shadow": {
                "batches": self.shadow_batches.value(),
                "failures": self.shadow_failures.value(),
                "rows_waiting": self.shadow_waiting.load(Relaxed),
                "problem": text(&self.shadow_problem),
            },
            "last_good": {
                "written": self.kept.value(),
                "failures": self.keep_failures.value(),
                "problem": text(&self.keep_problem),
            },
        })
    }
}

/// Notes what is wrong, and says so when it is news: a store that is away for an hour is one line, and not a thousand.
pub(super) fn note(slot: &ArcSwapOption<String>, what: &str, problem: Option<String>) {
    let before = slot.load_full();
    match (&problem, before.as_deref()) {
        (Some(now), Some(before)) if now == before => return,
        (Some(now), _) => tracing::warn!("{what}: {now}"),
        (None, Some(_)) => tracing::info!("{what}: good again"),
        (None, None) => return,
    }
    slot.store(problem.map(Arc::new));
}
