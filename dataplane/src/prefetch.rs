//! Asking the processor to load a cache line early. A hint: it reads nothing, and any address is fine.
#![allow(unsafe_code)]

/// Starts loading the cache line of `address`.
#[inline(always)]
pub(crate) fn prefetch(address: *const i8) {
    #[cfg(all(target_arch = "x86_64", not(loom)))]
    // SAFETY: PREFETCHT0 is a hint that never faults, whatever the address; SSE is part of x86-64.
    unsafe {
        core::arch::x86_64::_mm_prefetch::<{ core::arch::x86_64::_MM_HINT_T0 }>(address);
    }
    #[cfg(not(all(target_arch = "x86_64", not(loom))))]
    let _ = address;
}
