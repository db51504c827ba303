//! How long a bucket must have been untouched to be surely full again: the longest fill of what is in use.
//!
//! Buckets of the policy in force are known. Those of throttle calls, and of policies that were in force, are not: their
//! rates came and went. So the longest of them is remembered for the rest of a span and the whole of the next, and then
//! forgotten: one call with a monthly rate must not make every later eviction look like a loss until the restart.

/// What is remembered is forgotten after one to two of these.
const SPAN_MS: u64 = 10 * 60 * 1000;

/// The longest fills of a core.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LongestFill {
    policy_ms: u64,
    /// Of the current span and the one before.
    seen_ms: [u64; 2],
    span: u64,
}

impl LongestFill {
    /// With this policy in force.
    pub(super) fn new(policy_ms: u64) -> Self {
        Self { policy_ms, ..Self::default() }
    }

    /// Another policy is in force; buckets of the last one are still there.
    pub(super) fn adopt(&mut self, policy_ms: u64) {
        let before = std::mem::replace(&mut self.policy_ms, policy_ms);
        self.see(before);
    }

    /// A bucket with this fill is in use.
    #[inline]
    pub(super) fn see(&mut self, fill_ms: u64) {
        self.seen_ms[0] = self.seen_ms[0].max(fill_ms);
    }

    /// The longest one.
    #[inline]
    pub(super) fn at(&mut self, now_ms: u64) -> u64 {
        let span = now_ms / SPAN_MS;
        if span != self.span {
            self.seen_ms = if span == self.span + 1 { [0, self.seen_ms[0]] } else { [0; 2] };
            self.span = span;
        }
        self.policy_ms.max(self.seen_ms[0]).max(self.seen_ms[1])
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_seen_is_forgotten_after_two_spans() {
        let mut longest = LongestFill::new(1_000);
        longest.see(9_000);
        assert_eq!([0, SPAN_MS, 2 * SPAN_MS].map(|now_ms| longest.at(now_ms)), [9_000, 9_000, 1_000]);
        longest.see(9_000);
        assert_eq!(longest.at(9 * SPAN_MS), 1_000);
    }

    #[test]
    fn the_last_policy_s_buckets_are_still_there() {
        let mut longest = LongestFill::new(9_000);
        longest.adopt(1_000);
        assert_eq!([longest.at(0), longest.at(2 * SPAN_MS)], [9_000, 1_000]);
    }
}
