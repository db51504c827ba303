//! Where the calling thread runs, and how much CPU it has used.
#![allow(unsafe_code)]

use std::{io, time::Duration};

/// Pins the calling thread, and those that it starts later, to these cores.
///
/// # Errors
///
/// When the process may not use any of them.
pub fn pin(cores: &[usize]) -> io::Result<()> {
    // SAFETY: a set of CPUs is plain bits, for which all zero is valid.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    for &core in cores {
        if core >= libc::CPU_SETSIZE as usize {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("there is no core {core}")));
        }
        // SAFETY: the core is within the set, by the check above.
        unsafe { libc::CPU_SET(core, &mut set) };
    }
    // SAFETY: the set lives through the call and has the size that is given.
    match unsafe { libc::sched_setaffinity(0, size_of_val(&set), &raw const set) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// CPU time of the calling thread: in user space, in the kernel.
pub fn thread_time() -> (Duration, Duration) {
    // SAFETY: resource usage is plain numbers, for which all zero is valid.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the structure lives through the call. With these arguments the call cannot fail.
    unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
    let duration = |time: libc::timeval| {
        Duration::from_secs(u64::try_from(time.tv_sec).unwrap_or(0))
            + Duration::from_micros(u64::try_from(time.tv_usec).unwrap_or(0))
    };
    (duration(usage.ru_utime), duration(usage.ru_stime))
}

/// Lets timeouts of the calling thread end on time instead of up to 50 µs late.
pub fn exact_timers() {
    // SAFETY: takes numbers only.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1_u64) };
}
