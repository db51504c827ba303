//! When to ask the policy store: at once after a push, now and then without one, and with growing pauses while it fails.

use crate::chance::Chance;

/// The least time from one fetch to the next that a push asks for: what a flood of pushes can cost.
pub const PUSH_GAP_MS: u64 = 50;
/// The pause after the first failure; each further one doubles it, up to the poll interval.
pub const RETRY_MS_MIN: u64 = 500;
/// How far a pause is from what it should be, at most, in percent: gateways must not all ask at once.
const SPREAD_PCT: u32 = 10;

/// When the next fetch is due. Time comes in as milliseconds that never go back.
#[derive(Debug)]
pub struct Schedule {
    poll_ms: u64,
    chance: Chance,
    pull_at_ms: u64,
    pushed: bool,
    /// No push is followed before this.
    push_at_ms: u64,
    failures: u32,
}

impl Schedule {
    /// A fetch is due at once, and then every `poll_ms`, give or take a tenth.
    pub fn new(poll_ms: u64, now_ms: u64, seed: u64) -> Self {
        Self { poll_ms, chance: Chance::new(seed), pull_at_ms: now_ms, pushed: false, push_at_ms: 0, failures: 0 }
    }

    /// Something may have changed. Whatever comes before the next fetch begins is answered by that one.
    pub fn pushed(&mut self) {
        self.pushed = true;
    }

    /// When the next fetch is due.
    pub fn due_ms(&self) -> u64 {
        if self.pushed { self.pull_at_ms.min(self.push_at_ms) } else { self.pull_at_ms }
    }

    /// A fetch begins.
    pub fn begun(&mut self, now_ms: u64) {
        self.pushed = false;
        self.push_at_ms = now_ms + PUSH_GAP_MS;
    }

    /// A fetch has ended, and the store answered or not.
    pub fn ended(&mut self, has_answered: bool, now_ms: u64) {
        self.failures = if has_answered { 0 } else { self.failures.saturating_add(1) };
        let pause_ms = match self.failures.checked_sub(1) {
            None => self.poll_ms,
            Some(before) => RETRY_MS_MIN.saturating_mul(1 << before.min(20)).min(self.poll_ms),
        };
        let spread_ms = pause_ms * u64::from(SPREAD_PCT) / 100;
        // Not larger than a tenth of the longest poll interval, a day.
        let range = u32::try_from(2 * spread_ms + 1).unwrap_or(u32::MAX);
        self.pull_at_ms = now_ms + pause_ms - spread_ms + u64::from(self.chance.below(range));
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pulls_come_every_interval_give_or_take_a_tenth() {
        let mut schedule = Schedule::new(30_000, 5, 1);
        assert_eq!(schedule.due_ms(), 5);
        let (mut now_ms, mut pauses) = (5, Vec::new());
        for _ in 0..1000 {
            schedule.begun(now_ms);
            schedule.ended(true, now_ms);
            pauses.push(schedule.due_ms() - now_ms);
            now_ms = schedule.due_ms();
        }
        assert!(pauses.iter().all(|pause| (27_000..=33_000).contains(pause)), "{pauses:?}");
        assert!(pauses.iter().any(|pause| *pause < 27_500) && pauses.iter().any(|pause| *pause > 32_500));
    }

    #[test]
    fn a_burst_of_pushes_costs_one_fetch_or_two() {
        let mut schedule = Schedule::new(30_000, 0, 1);
        schedule.begun(0);
        schedule.ended(true, 1);
        let mut fetches = 0;
        // A hundred pushes within 20 ms, long after the last fetch; each fetch takes 5 ms.
        for now_ms in 1000..2000 {
            if now_ms < 1020 {
                (0..5).for_each(|_| schedule.pushed());
            }
            if schedule.due_ms() <= now_ms {
                schedule.begun(now_ms);
                schedule.ended(true, now_ms + 5);
                fetches += 1;
            }
        }
        assert_eq!(fetches, 2, "one at the first push, and one for all that came meanwhile");
    }

    #[test]
    fn a_store_that_fails_is_asked_less_and_less_and_a_push_is_followed_all_the_same() {
        let mut schedule = Schedule::new(30_000, 0, 1);
        let mut now_ms = 0;
        let mut pauses = Vec::new();
        for _ in 0..10 {
            schedule.begun(now_ms);
            schedule.ended(false, now_ms);
            pauses.push(schedule.due_ms() - now_ms);
            now_ms = schedule.due_ms();
        }
        assert!((450..=550).contains(&pauses[0]) && (900..=1100).contains(&pauses[1]), "{pauses:?}");
        assert!((27_000..=33_000).contains(&pauses[9]), "{pauses:?}");
        schedule.begun(now_ms);
        schedule.ended(false, now_ms);
        schedule.pushed();
        assert_eq!(schedule.due_ms(), now_ms + PUSH_GAP_MS);
    }
}
