//! The atomics of the lock-free types, swapped for loom's under `--cfg loom`.
//!
//! loom has no 16-byte atomics; its stand-in is a mutex around the value, which gives each operation the atomicity
//! that `cmpxchg16b` gives it, so loom still explores every interleaving of operations.

#[cfg(not(loom))]
pub(crate) use core::sync::atomic::{AtomicU64, Ordering, fence};

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU64, Ordering, fence};
#[cfg(not(loom))]
pub(crate) use portable_atomic::AtomicU128;

/// Lets whoever is waited for get on.
pub(crate) fn spin() {
    #[cfg(not(loom))]
    core::hint::spin_loop();
    #[cfg(loom)]
    loom::thread::yield_now();
}

#[cfg(loom)]
pub(crate) struct AtomicU128(loom::sync::Mutex<u128>);

#[cfg(loom)]
impl AtomicU128 {
    pub(crate) fn new(value: u128) -> Self {
        Self(loom::sync::Mutex::new(value))
    }

    pub(crate) fn load(&self, _: Ordering) -> u128 {
        *self.0.lock().expect("loom's mutex is never poisoned in a model")
    }

    pub(crate) fn compare_exchange(&self, old: u128, new: u128, _: Ordering, _: Ordering) -> Result<u128, u128> {
        let mut value = self.0.lock().expect("loom's mutex is never poisoned in a model");
        if *value == old {
            *value = new;
            Ok(old)
        } else {
            Err(*value)
        }
    }
}
