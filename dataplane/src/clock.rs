//! The time, read once per wake-up by the shell and handed to everything else.
#![allow(clippy::disallowed_methods)]

use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// A moment, by both clocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Now {
    /// Milliseconds since the process began; never goes back.
    pub mono_ms: u64,
    /// Microseconds since the process began.
    pub mono_us: u64,
    /// Milliseconds since the Unix epoch; may jump. Only what people wrote as a date is compared with it.
    pub unix_ms: i64,
}

impl Now {
    /// A moment given in milliseconds, for tests and benches.
    pub const fn of_ms(mono_ms: u64, unix_ms: i64) -> Self {
        Self { mono_ms, mono_us: 1000 * mono_ms, unix_ms }
    }
}

/// Reads the clocks. Copies share the origin, so all cores mean the same milliseconds.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    origin: Instant,
    origin_unix_ms: i64,
}

impl Clock {
    /// A clock that starts now.
    pub fn start() -> Self {
        Self { origin: Instant::now(), origin_unix_ms: unix_ms() }
    }

    /// The moment, with the wall clock as it was at the start plus the time since: one cheap read. Use [`Clock::resync`]
    /// now and then to follow the wall clock's corrections.
    pub fn now(&self) -> Now {
        let mono_us = self.micros();
        let mono_ms = mono_us / 1000;
        Now { mono_ms, mono_us, unix_ms: self.origin_unix_ms.saturating_add_unsigned(mono_ms) }
    }

    /// When the process began, in milliseconds since the Unix epoch.
    pub fn started_unix_ms(&self) -> i64 {
        self.origin_unix_ms
    }

    /// Microseconds since the process began.
    pub fn micros(&self) -> u64 {
        u64::try_from(self.origin.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    /// Reads the wall clock again, so that its corrections are followed.
    pub fn resync(&mut self) {
        self.origin_unix_ms = unix_ms().saturating_sub_unsigned(self.now().mono_ms);
    }
}

fn unix_ms() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| i64::try_from(since.as_millis()).unwrap_or(i64::MAX))
}
