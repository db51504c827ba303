//! From starting to gone: one word that every part of the server looks at.
//!
//! ```text
//!   starting ──► serving ──► draining ──────► closing ──────► gone
//!                            /readyz is 503   listeners are   grace time is over, or
//!                            for drain_ms     drained and      every connection is closed
//!                                             closed; what is
//!                                             in hand is answered
//! ```
//!
//! Half of the grace time is for clients that come to an end by themselves. From then on nothing more is read from
//! anybody, so that those who never pause get their last answers and a proper end in the other half:
//!
//! ```text
//!   closing ── clients finish ──► reading_until ── last answers, goodbye ──► closing_until
//! ```

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// How far the server has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Stage {
    /// Not all cores listen yet.
    Starting,
    /// Everything works.
    Serving,
    /// Asked to leave; still serving, so that load balancers have time to look away.
    Draining,
    /// Listeners take what waits and close; what is in hand is answered.
    Closing,
}

/// The server's stage, shared by all its threads.
#[derive(Debug)]
pub struct Lifecycle {
    stage: AtomicU8,
    /// When requests are no longer read, in milliseconds since the process began.
    reading_until_ms: AtomicU64,
    /// When connections that are still busy are closed all the same, in milliseconds since the process began.
    closing_until_ms: AtomicU64,
}

impl Default for Lifecycle {
    fn default() -> Self {
        let never = || AtomicU64::new(u64::MAX);
        Self { stage: AtomicU8::new(Stage::Starting as u8), reading_until_ms: never(), closing_until_ms: never() }
    }
}

impl Lifecycle {
    /// The stage.
    #[inline]
    pub fn stage(&self) -> Stage {
        match self.stage.load(Ordering::Acquire) {
            0 => Stage::Starting,
            1 => Stage::Serving,
            2 => Stage::Draining,
            _ => Stage::Closing,
        }
    }

    /// Moves on; never back.
    pub fn advance(&self, stage: Stage) {
        self.stage.fetch_max(stage as u8, Ordering::AcqRel);
    }

    /// Listeners close now, and connections within the grace time.
    pub fn close(&self, now_ms: u64, grace_ms: u64) {
        self.reading_until_ms.store(now_ms + grace_ms / 2, Ordering::Release);
        self.closing_until_ms.store(now_ms + grace_ms, Ordering::Release);
        self.advance(Stage::Closing);
    }

    /// Whether requests are no longer read.
    pub fn is_deaf(&self, now_ms: u64) -> bool {
        now_ms >= self.reading_until_ms.load(Ordering::Acquire)
    }

    /// When connections that are still busy are closed all the same.
    pub fn closing_until_ms(&self) -> u64 {
        self.closing_until_ms.load(Ordering::Acquire)
    }
}
