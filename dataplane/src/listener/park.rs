//! Sleeping inside glommio until a foreign descriptor is readable, and the heartbeat that keeps executors alive.
//!
//! glommio 0.9 has no way to wait for a descriptor that is not its own. But its stream, when made from one, arms a poll
//! for it, and when that fires it tries to receive; on an eventfd that fails at once with ENOTSOCK, which is all the
//! answer that is needed. (A listening socket fails with ENOTCONN.) The stream is made anew for each sleep and thrown away after it.
//!
//! The executor itself may sleep with runnable tasks (its run loop sleeps when preemption was due before the first
//! queue ran). So a plain thread wakes every data core each millisecond, and the control executor each ten, through a
//! task that does nothing else. That is how late a wake-up can be at most.
#![allow(unsafe_code)]

use std::{
    future::{Future, poll_fn},
    os::fd::{FromRawFd, IntoRawFd, OwnedFd},
    pin::Pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::{Poll, Waker},
    time::Duration,
};

use futures_lite::AsyncRead;
use glommio::net::TcpStream;

/// A nap in place of a sleep that no descriptor could be had for: as late as work may be noticed then.
const NAP: Duration = Duration::from_millis(2);

/// One executor's pulse, held by the heartbeat thread and the executor.
#[derive(Debug, Default)]
pub struct Pulse {
    executor: Mutex<Option<Waker>>,
    driver: Mutex<Option<Waker>>,
    /// Tells a nudge from any other reason for which a sleeping driver is polled.
    nudges: AtomicU64,
    /// Whether the sleeping driver has deadlines to keep, and so wants a nudge with each beat.
    eager: AtomicBool,
}

impl Pulse {
    /// Wakes the executor's run loop; called each millisecond, and each ten for the control executor.
    pub fn beat(&self) {
        wake(&self.executor);
        if self.eager.load(Ordering::Acquire) {
            self.nudge();
        }
    }

    /// Whether the driver is to be nudged with each beat: something that it waits for has a deadline.
    pub fn be_eager(&self, eager: bool) {
        self.eager.store(eager, Ordering::Release);
    }

    /// Wakes the driver, so that it looks at the clock and at the lifecycle.
    pub fn nudge(&self) {
        self.nudges.fetch_add(1, Ordering::Release);
        wake(&self.driver);
    }

    /// Sleeps until the next nudge.
    pub fn until_nudged(&self) -> impl Future<Output = ()> {
        let mut first = true;
        poll_fn(move |context| {
            register(&self.driver, context.waker());
            if std::mem::take(&mut first) { Poll::Pending } else { Poll::Ready(()) }
        })
    }

    /// Never ends; spawn it on the executor.
    pub fn keep_alive(self: Arc<Self>) -> impl Future<Output = ()> {
        poll_fn(move |context| {
            register(&self.executor, context.waker());
            Poll::Pending
        })
    }
}

fn wake(slot: &Mutex<Option<Waker>>) {
    // Cloned, so that the lock is not held while the executor is woken.
    let waker = slot.lock().unwrap_or_else(PoisonError::into_inner).clone();
    if let Some(waker) = waker {
        waker.wake();
    }
}

fn register(slot: &Mutex<Option<Waker>>, waker: &Waker) {
    let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
    if !slot.as_ref().is_some_and(|known| known.will_wake(waker)) {
        *slot = Some(waker.clone());
    }
}

/// Sleeps until the descriptor (an eventfd or a listening socket) is readable, or a nudge of the pulse comes. Where the
/// descriptor cannot be duplicated, because the process or the system is out of files, it is a nap instead: the caller
/// looks whether there is work, as after any sleep, and sleeps again.
pub async fn until_readable(descriptor: &OwnedFd, pulse: Option<&Pulse>) {
    let Ok(copy) = descriptor.try_clone() else {
        return glommio::timer::sleep(NAP).await;
    };
    // SAFETY: `copy` is an open descriptor that nothing else owns, and the stream becomes its only owner. That it is no
    // socket only makes the receive fail, which is what we wait for.
    let mut stream = unsafe { TcpStream::from_raw_fd(copy.into_raw_fd()) };
    let nudges = || pulse.map_or(0, |pulse| pulse.nudges.load(Ordering::Acquire));
    let slept_at = nudges();
    poll_fn(|context| {
        if let Some(pulse) = pulse {
            register(&pulse.driver, context.waker());
        }
        let mut byte = [0];
        match Pin::new(&mut stream).poll_read(context, &mut byte) {
            Poll::Ready(_) => Poll::Ready(()),
            Poll::Pending if nudges() != slept_at => Poll::Ready(()),
            // The first time; or woken by neither, as when the poll of the stream before this one ends in being
            // cancelled. Returning then would cancel again, and so the core would never sleep.
            Poll::Pending => Poll::Pending,
        }
    })
    .await;
}
