//! The breaker of one shard, shared by all cores: one word says whether the shard is asked at all.
//!
//! ```text
//!                 half of at least `calls_min` calls of a window failed
//!      closed ───────────────────────────────────────────────────────────► open
//!        ▲                                                                 │  ▲
//!        │ `probes` calls succeeded                        `open_ms` later │  │ a probe failed
//!        └──────────────────────────── half-open ◄─────────────────────────┘  │
//!                                          └──────────────────────────────────┘
//! ```
//!
//! The word, from the highest bit to the lowest:
//!
//! ```text
//!  63     62 61        56 55         50 49        38 37              0
//! ┌─────────┬────────────┬─────────────┬────────────┬─────────────────┐
//! │ state 2 │ started 6  │ succeeded 6 │ epoch 12   │ since_ms 38     │
//! └─────────┴────────────┴─────────────┴────────────┴─────────────────┘
//! ```
//!
//! * `started` and `succeeded` count the probes of a half-open breaker.
//! * `epoch` counts how often it has closed: local buckets are keyed by it, so closing drops them all at once.
//! * `since_ms` is when the state began, in milliseconds since the process began (8 years fit).
//!
//! Failures are counted in ten cells, a tenth of the window each; a cell is reset by whoever first needs it again. Cores
//! report once per wake-up, not per call, so the words are rarely contended. Nothing here reads a clock.

use serde::{Deserialize, Serialize};

use crate::sync::{AtomicU64, Ordering};

/// How a breaker judges; settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BreakerSettings {
    /// How far back failures count, in milliseconds.
    pub window_ms: u64,
    /// Fewer calls than this within a window never open the breaker.
    pub calls_min: u32,
    /// The share of failed calls, in percent, at which it opens.
    pub failures_pct: u32,
    /// How long it stays open before it lets probes through, in milliseconds.
    pub open_ms: u64,
    /// How many probes must succeed for it to close, 1..=[`PROBES_MAX`]; no more than these are let through.
    pub probes: u32,
}

impl Default for BreakerSettings {
    fn default() -> Self {
        Self { window_ms: 10_000, calls_min: 20, failures_pct: 50, open_ms: 30_000, probes: 3 }
    }
}

/// The most probes that the word can count.
pub const PROBES_MAX: u32 = (1 << COUNT_BITS) - 1;

const STATE_SHIFT: u32 = 62;
const COUNT_BITS: u32 = 6;
const STARTED_SHIFT: u32 = 56;
const SUCCEEDED_SHIFT: u32 = 50;
const EPOCH_SHIFT: u32 = 38;
const EPOCH_MASK: u64 = (1 << 12) - 1;
const SINCE_MASK: u64 = (1 << EPOCH_SHIFT) - 1;

const _: () = assert!(STARTED_SHIFT + COUNT_BITS == STATE_SHIFT && SUCCEEDED_SHIFT + COUNT_BITS == STARTED_SHIFT);
const _: () = assert!(EPOCH_SHIFT + 12 == SUCCEEDED_SHIFT);

/// Whether a shard is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It is.
    Closed,
    /// It is not.
    Open,
    /// A few calls try it.
    HalfOpen,
}

impl State {
    /// The word for logs, metrics and pages.
    pub fn word(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Open => "open",
            Self::HalfOpen => "half_open",
        }
    }
}

/// What becomes of a call that wants to go out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// It goes.
    Go,
    /// It goes, and its outcome decides.
    Probe,
    /// It does not; the failure policy answers.
    Refused,
}

/// The calls of one wake-up that have ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// How many ended.
    pub calls: u32,
    /// How many of them say that the shard cannot serve.
    pub failures: u32,
    /// Probes that succeeded.
    pub probes_ok: u32,
    /// Probes that failed.
    pub probes_failed: u32,
}

/// A shard's breaker.
#[derive(Debug)]
pub struct Breaker {
    word: AtomicU64,
    cells: [AtomicU64; CELLS],
    opened: AtomicU64,
    half_opened: AtomicU64,
    closed: AtomicU64,
}

#[cfg(not(loom))]
const CELLS: usize = 10;
#[cfg(loom)]
const CELLS: usize = 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Word {
    state: State,
    started: u32,
    succeeded: u32,
    epoch: u16,
    since_ms: u64,
}

impl Word {
    fn unpack(word: u64) -> Self {
        let count = |shift: u32| (word >> shift) as u32 & PROBES_MAX;
        Self {
            state: match word >> STATE_SHIFT {
                0 => State::Closed,
                1 => State::Open,
                _ => State::HalfOpen,
            },
            started: count(STARTED_SHIFT),
            succeeded: count(SUCCEEDED_SHIFT),
            epoch: ((word >> EPOCH_SHIFT) & EPOCH_MASK) as u16,
            since_ms: word & SINCE_MASK,
        }
    }

    fn pack(self) -> u64 {
        (self.state as u64) << STATE_SHIFT
            | u64::from(self.started.min(PROBES_MAX)) << STARTED_SHIFT
            | u64::from(self.succeeded.min(PROBES_MAX)) << SUCCEEDED_SHIFT
            | (u64::from(self.epoch) & EPOCH_MASK) << EPOCH_SHIFT
            | self.since_ms & SINCE_MASK
    }

    fn half_open(self, now_ms: u64) -> Self {
        Self { state: State::HalfOpen, started: 1, succeeded: 0, since_ms: now_ms, ..self }
    }

    fn open(self, now_ms: u64) -> Self {
        Self { state: State::Open, started: 0, succeeded: 0, since_ms: now_ms, ..self }
    }

    fn close(self, now_ms: u64) -> Self {
        Self { state: State::Closed, started: 0, succeeded: 0, epoch: self.epoch.wrapping_add(1), since_ms: now_ms }
    }
}

/// A tenth of a window: which one it is, and what ended in it.
///
/// ```text
///  63          44 43          22 21         0
/// ┌──────────────┬──────────────┬────────────┐
/// │ number 20    │ calls 22     │ failures 22│
/// └──────────────┴──────────────┴────────────┘
/// ```
#[derive(Clone, Copy)]
struct Cell {
    number: u64,
    calls: u64,
    failures: u64,
}

impl Cell {
    const COUNT_BITS: u32 = 22;
    const COUNT_MAX: u64 = (1 << Self::COUNT_BITS) - 1;
    const NUMBER_MASK: u64 = (1 << 20) - 1;

    fn unpack(word: u64) -> Self {
        Self {
            number: word >> (2 * Self::COUNT_BITS),
            calls: (word >> Self::COUNT_BITS) & Self::COUNT_MAX,
            failures: word & Self::COUNT_MAX,
        }
    }

    /// Counts stop at four million per cell, by when the breaker has long made up its mind.
    fn pack(self) -> u64 {
        self.number << (2 * Self::COUNT_BITS)
            | self.calls.min(Self::COUNT_MAX) << Self::COUNT_BITS
            | self.failures.min(Self::COUNT_MAX)
    }
}

impl Default for Breaker {
    fn default() -> Self {
        Self {
            word: AtomicU64::new(0),
            cells: std::array::from_fn(|_| AtomicU64::new(0)),
            opened: AtomicU64::new(0),
            half_opened: AtomicU64::new(0),
            closed: AtomicU64::new(0),
        }
    }
}

impl Breaker {
    /// Whether a call may go out now.
    pub fn admit(&self, settings: &BreakerSettings, now_ms: u64) -> Admission {
        let mut seen = self.word.load(Ordering::Acquire);
        loop {
            let word = Word::unpack(seen);
            let waited = now_ms.saturating_sub(word.since_ms) >= settings.open_ms;
            let next = match word.state {
                State::Closed => return Admission::Go,
                State::Open if waited => word.half_open(now_ms),
                State::HalfOpen if word.started < settings.probes => Word { started: word.started + 1, ..word },
                // Probes whose outcome nobody reported: the core that sent them is gone. Begin again.
                State::HalfOpen if waited => word.half_open(now_ms),
                State::Open | State::HalfOpen => return Admission::Refused,
            };
            match self.word.compare_exchange(seen, next.pack(), Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => {
                    if word.state == State::Open {
                        self.half_opened.fetch_add(1, Ordering::Relaxed);
                    }
                    return Admission::Probe;
                }
                Err(now) => seen = now,
            }
        }
    }

    /// Takes note of calls that have ended. Returns the state that this brought about, if it changed.
    pub fn report(&self, settings: &BreakerSettings, now_ms: u64, report: Report) -> Option<State> {
        if report.calls > 0 {
            self.count(settings, now_ms, report);
        }
        let mut seen = self.word.load(Ordering::Acquire);
        loop {
            let word = Word::unpack(seen);
            let next = match word.state {
                State::Closed if report.failures > 0 && self.is_failing(settings, now_ms) => word.open(now_ms),
                State::HalfOpen if report.probes_failed > 0 => word.open(now_ms),
                State::HalfOpen if report.probes_ok > 0 => {
                    let succeeded = word.succeeded + report.probes_ok;
                    if succeeded >= settings.probes { word.close(now_ms) } else { Word { succeeded, ..word } }
                }
                State::Closed | State::Open | State::HalfOpen => return None,
            };
            match self.word.compare_exchange(seen, next.pack(), Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) if next.state == word.state => return None,
                Ok(_) => {
                    match next.state {
                        State::Open => self.opened.fetch_add(1, Ordering::Relaxed),
                        State::Closed => {
                            // What failed before it opened must not open it again.
                            self.cells.iter().for_each(|cell| cell.store(0, Ordering::Release));
                            self.closed.fetch_add(1, Ordering::Relaxed)
                        }
                        State::HalfOpen => 0,
                    };
                    return Some(next.state);
                }
                Err(now) => seen = now,
            }
        }
    }

    /// The state.
    pub fn state(&self) -> State {
        Word::unpack(self.word.load(Ordering::Acquire)).state
    }

    /// How often it has closed; what was kept for an outage belongs to the epoch in which it began.
    pub fn epoch(&self) -> u16 {
        Word::unpack(self.word.load(Ordering::Acquire)).epoch
    }

    /// How often it entered a state.
    pub fn transitions(&self, into: State) -> u64 {
        match into {
            State::Closed => &self.closed,
            State::Open => &self.opened,
            State::HalfOpen => &self.half_opened,
        }
        .load(Ordering::Relaxed)
    }

    fn count(&self, settings: &BreakerSettings, now_ms: u64, report: Report) {
        let number = cell_number(settings, now_ms);
        let cell = &self.cells[number as usize % CELLS];
        let mut seen = cell.load(Ordering::Acquire);
        loop {
            let known = Cell::unpack(seen);
            let base = if known.number == number & Cell::NUMBER_MASK {
                known
            } else {
                Cell { number: number & Cell::NUMBER_MASK, calls: 0, failures: 0 }
            };
            let next = Cell {
                calls: base.calls + u64::from(report.calls),
                failures: base.failures + u64::from(report.failures),
                ..base
            };
            match cell.compare_exchange(seen, next.pack(), Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return,
                Err(now) => seen = now,
            }
        }
    }

    /// Whether enough of enough calls within the window failed.
    fn is_failing(&self, settings: &BreakerSettings, now_ms: u64) -> bool {
        let number = cell_number(settings, now_ms);
        let (mut calls, mut failures) = (0, 0);
        for cell in &self.cells {
            let cell = Cell::unpack(cell.load(Ordering::Acquire));
            if number.wrapping_sub(cell.number) & Cell::NUMBER_MASK < CELLS as u64 {
                calls += cell.calls;
                failures += cell.failures;
            }
        }
        calls >= u64::from(settings.calls_min) && failures * 100 >= calls * u64::from(settings.failures_pct)
    }
}

/// Cells are numbered from 1, so that an empty one is never the current one.
fn cell_number(settings: &BreakerSettings, now_ms: u64) -> u64 {
    now_ms / (settings.window_ms / CELLS as u64).max(1) + 1
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;

    const SETTINGS: BreakerSettings =
        BreakerSettings { window_ms: 10_000, calls_min: 20, failures_pct: 50, open_ms: 30_000, probes: 3 };

    fn ended(calls: u32, failures: u32) -> Report {
        Report { calls, failures, ..Report::default() }
    }

    fn opened_at(now_ms: u64) -> Breaker {
        let breaker = Breaker::default();
        assert_eq!(breaker.report(&SETTINGS, now_ms, ended(20, 20)), Some(State::Open));
        breaker
    }

    #[test]
    fn it_opens_at_the_threshold_and_not_below() {
        let breaker = Breaker::default();
        assert_eq!(breaker.report(&SETTINGS, 0, ended(19, 19)), None, "too few calls to judge by");
        let breaker = Breaker::default();
        assert_eq!(breaker.report(&SETTINGS, 0, ended(101, 50)), None, "less than half");
        assert_eq!(breaker.report(&SETTINGS, 0, ended(1, 1)), Some(State::Open), "51 of 102");
        assert_eq!(breaker.admit(&SETTINGS, 1), Admission::Refused);
    }

    #[test]
    fn failures_older_than_the_window_do_not_count() {
        let breaker = Breaker::default();
        breaker.report(&SETTINGS, 0, ended(19, 19));
        assert_eq!(breaker.report(&SETTINGS, 9_999, ended(1, 1)), Some(State::Open));
        let breaker = Breaker::default();
        breaker.report(&SETTINGS, 0, ended(19, 19));
        assert_eq!(breaker.report(&SETTINGS, 10_000, ended(1, 1)), None);
    }

    #[test]
    fn while_open_nothing_goes_out_and_then_only_the_probes() {
        let breaker = opened_at(5);
        assert_eq!(breaker.admit(&SETTINGS, 30_004), Admission::Refused);
        for _ in 0..3 {
            assert_eq!(breaker.admit(&SETTINGS, 30_005), Admission::Probe);
        }
        assert_eq!(breaker.admit(&SETTINGS, 30_006), Admission::Refused);
        assert_eq!(breaker.transitions(State::HalfOpen), 1);
    }

    #[test]
    fn it_closes_when_all_probes_succeed_and_starts_with_a_clean_window() {
        let breaker = opened_at(0);
        (0..3).for_each(|_| assert_eq!(breaker.admit(&SETTINGS, 30_000), Admission::Probe));
        let ok = |count| Report { calls: count, probes_ok: count, ..Report::default() };
        assert_eq!(breaker.report(&SETTINGS, 30_001, ok(2)), None);
        assert_eq!(breaker.report(&SETTINGS, 30_002, ok(1)), Some(State::Closed));
        assert_eq!((breaker.admit(&SETTINGS, 30_003), breaker.epoch()), (Admission::Go, 1));
        assert_eq!(breaker.report(&SETTINGS, 30_004, ended(19, 19)), None, "what failed before is forgotten");
    }

    #[test]
    fn a_failed_probe_opens_it_again_for_the_whole_time() {
        let breaker = opened_at(0);
        breaker.admit(&SETTINGS, 30_000);
        let failed = Report { calls: 1, failures: 1, probes_failed: 1, ..Report::default() };
        assert_eq!(breaker.report(&SETTINGS, 30_001, failed), Some(State::Open));
        assert_eq!(breaker.admit(&SETTINGS, 60_000), Admission::Refused);
        assert_eq!(breaker.admit(&SETTINGS, 60_001), Admission::Probe);
        assert_eq!((breaker.epoch(), breaker.transitions(State::Open)), (0, 2));
    }

    #[test]
    fn probes_that_are_never_heard_of_are_sent_again() {
        let breaker = opened_at(0);
        (0..3).for_each(|_| assert_eq!(breaker.admit(&SETTINGS, 30_000), Admission::Probe));
        assert_eq!(breaker.admit(&SETTINGS, 59_999), Admission::Refused);
        assert_eq!(breaker.admit(&SETTINGS, 60_000), Admission::Probe);
    }

    #[test]
    fn late_reports_of_calls_from_before_do_not_disturb_an_open_breaker() {
        let breaker = opened_at(0);
        assert_eq!(breaker.report(&SETTINGS, 1, ended(50, 50)), None);
        assert_eq!(breaker.report(&SETTINGS, 2, ended(50, 0)), None);
        assert_eq!(breaker.state(), State::Open);
    }
}

#[cfg(loom)]
#[cfg(test)]
mod loom_tests {
    use loom::{sync::Arc, thread};

    use super::*;

    const SETTINGS: BreakerSettings =
        BreakerSettings { window_ms: 10_000, calls_min: 2, failures_pct: 50, open_ms: 100, probes: 1 };

    /// Two cores report a failure each: together they reach the threshold, and exactly one of them opens the breaker.
    #[test]
    fn it_opens_once_and_no_failure_is_lost() {
        loom::model(|| {
            let breaker = Arc::new(Breaker::default());
            let report = |breaker: &Breaker| {
                let failed = Report { calls: 1, failures: 1, ..Report::default() };
                u32::from(breaker.report(&SETTINGS, 1, failed) == Some(State::Open))
            };
            let other = {
                let breaker = Arc::clone(&breaker);
                thread::spawn(move || report(&breaker))
            };
            let here = report(&breaker);
            assert_eq!(here + other.join().unwrap(), 1);
            assert_eq!(breaker.state(), State::Open);
        });
    }

    /// Two cores want to go out when the breaker has been open for long enough: one probe goes.
    #[test]
    fn only_the_probes_go_out() {
        loom::model(|| {
            let breaker = Arc::new(Breaker::default());
            breaker.report(&SETTINGS, 1, Report { calls: 2, failures: 2, ..Report::default() });
            let admitted = |breaker: &Breaker| u32::from(breaker.admit(&SETTINGS, 150) == Admission::Probe);
            let other = {
                let breaker = Arc::clone(&breaker);
                thread::spawn(move || admitted(&breaker))
            };
            let here = admitted(&breaker);
            assert_eq!(here + other.join().unwrap(), 1);
        });
    }
}
