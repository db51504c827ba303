//! A flag that one task of this executor waits for.

use std::{
    cell::{Cell, RefCell},
    future::poll_fn,
    task::{Poll, Waker},
};

/// Set by anybody, taken by whoever waits. Several may wait; all look again when it is set.
#[derive(Default)]
pub(super) struct LocalEvent {
    set: Cell<bool>,
    waiting: RefCell<Vec<Waker>>,
}

impl LocalEvent {
    pub(super) fn set(&self) {
        self.set.set(true);
        for waker in self.waiting.borrow_mut().drain(..) {
            waker.wake();
        }
    }

    /// Waits until it is set, and takes it.
    pub(super) async fn wait(&self) {
        let mut waited = false;
        poll_fn(|context| {
            if self.set.replace(false) || std::mem::replace(&mut waited, true) {
                return Poll::Ready(());
            }
            self.waiting.borrow_mut().push(context.waker().clone());
            Poll::Pending
        })
        .await;
    }
}
