//! How many files the process may open, and what that leaves for connections; and how much memory it may lock.
#![allow(unsafe_code)]

use std::{io, num::NonZero};

use resp_client::Mode;
use thiserror::Error;

use crate::{
    config::{Cores, Settings},
    limits::CORES_MAX,
    listener::TransportChoice,
};

/// Files of the process beside connections: logs, the control executor, the file watch, what a scrape reads, room to spare.
const FILES_OF_PROCESS: u64 = 128;
/// Files of each core: its listeners, glommio's rings, our ring, eventfds, of which ten were counted; the copy that each
/// sleep makes of the doorbell; and the sockets that were accepted, four listeners' worth, and not yet refused.
const FILES_PER_CORE: u64 = 50;

/// The process may not open enough files to do anything.
#[derive(Debug, Error)]
#[error("the process may open {0} files, too few to serve; raise the limit (ulimit -n, LimitNOFILE=)")]
pub struct TooFewFiles(u64);

/// What glommio asks for.
const LOCKED_BYTES_MIN: u64 = 512 * 1024;

/// The process may not lock the memory that rings are made of.
#[derive(Debug, Error)]
#[error("needs 512 KiB of locked memory; raise ulimit -l or LimitMEMLOCK= (it is {} KiB)", .0 / 1024)]
pub struct TooLittleLockedMemory(u64);

/// Asks for the limit on locked memory, before glommio does.
///
/// # Errors
///
/// When it is too low.
pub fn check_locked_memory() -> Result<(), TooLittleLockedMemory> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the pointer is to a valid rlimit, which the call fills.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) } == 0;
    if known && limit.rlim_cur < LOCKED_BYTES_MIN { Err(TooLittleLockedMemory(limit.rlim_cur)) } else { Ok(()) }
}

/// Raises the soft limit to the hard one, and lowers `connections_max` to what fits.
///
/// # Errors
///
/// When not even a few connections would fit.
pub fn fit(settings: &mut Settings) -> Result<(), TooFewFiles> {
    let each = if settings.transport.kind == TransportChoice::Plain { 2 } else { 1 };
    let cores = match &settings.cores {
        Cores::Count(0) => std::thread::available_parallelism().map_or(CORES_MAX, NonZero::get),
        Cores::Count(count) => *count,
        Cores::List(list) => list.len(),
    };
    let per_core = FILES_PER_CORE + links_per_core(settings);
    let reserved = FILES_OF_PROCESS + per_core * cores as u64 + settings.ops.connections_max as u64;
    let wanted = settings.limits.connections_max as u64 * each + reserved;
    let allowed = raise(wanted);
    if allowed < reserved + each {
        return Err(TooFewFiles(allowed));
    }
    if allowed < wanted {
        let fit = ((allowed - reserved) / each).max(1);
        let fit = usize::try_from(fit).unwrap_or(usize::MAX);
        tracing::warn!(
            files = allowed,
            asked = settings.limits.connections_max,
            connections_max = fit,
            "the file limit (ulimit -n) allows fewer connections than limits.connections_max"
        );
        settings.limits.connections_max = fit;
    }
    Ok(())
}

/// The connections of a core to the store's shards: one each, and one that is being closed.
fn links_per_core(settings: &Settings) -> u64 {
    match settings.redis.seeds() {
        Ok(Some(client)) if matches!(client.mode, Mode::Cluster { .. }) => settings.redis.shards_max as u64,
        Ok(Some(client)) => client.addresses().len() as u64 + 1,
        // Wrong URLs are somebody else's to report.
        Ok(None) | Err(_) => 0,
    }
}

/// How many files may be opened after asking for `wanted`.
fn raise(wanted: u64) -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the pointer is to a valid rlimit, which the call fills.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } != 0 {
        tracing::warn!(error = %io::Error::last_os_error(), "the file limit cannot be read");
        return wanted;
    }
    if limit.rlim_cur < wanted && limit.rlim_cur < limit.rlim_max {
        let raised = libc::rlimit { rlim_cur: wanted.min(limit.rlim_max), ..limit };
        // SAFETY: the pointer is to a valid rlimit, which the call only reads.
        if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const raised) } == 0 {
            limit = raised;
        }
    }
    limit.rlim_cur
}
