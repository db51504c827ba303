//! From starting to gone: one word that every part of the server looks at.
//!
//! ```text
//!   starting ──► serving ──► draining ──────► closing ──────► gone
//!                            /readyz is 503   listeners are   grace time is over, or
//!                            for drain_ms     closed; what is every connection is closed
//!                                             in hand is answered
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
    /// Listeners are closed; what is in hand is answered.
    Closing,
}

/// The server's stage, shared by all its threads.
#[derive(Debug)]
pub struct Lifecycle {
    stage: AtomicU8,
    /// When connections that are still busy are closed all the same, in milliseconds since the process began.
    closing_until_ms: AtomicU64,
}

impl Default for Lifecycle {
    fn default() -> Self {
        Self { stage: AtomicU8::new(Stage::Starting as u8), closing_until_ms: AtomicU64::new(u64::MAX) }
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

    /// Listeners close now, and connections by the given moment at the latest.
    pub fn close(&self, until_ms: u64) {
        self.closing_until_ms.store(until_ms, Ordering::Release);
        self.advance(Stage::Closing);
    }

    /// When connections that are still busy are closed all the same.
    pub fn closing_until_ms(&self) -> u64 {
        self.closing_until_ms.load(Ordering::Acquire)
    }
}
