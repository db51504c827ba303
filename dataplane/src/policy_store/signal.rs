//! A flag that tasks of one executor wait for.

use std::{
    cell::{Cell, RefCell},
    future::poll_fn,
    task::{Poll, Waker},
};

/// Set by anybody, taken by whoever waits. Where several wait, all look again when it is set.
#[derive(Default)]
pub(super) struct Signal {
    is_set: Cell<bool>,
    waiting: RefCell<Vec<Waker>>,
}

impl Signal {
    pub(super) fn set(&self) {
        self.is_set.set(true);
        self.waiting.take().into_iter().for_each(Waker::wake);
    }

    /// Waits until it is set, and takes it.
    pub(super) async fn wait(&self) {
        let mut has_waited = false;
        poll_fn(|context| {
            if self.is_set.take() || std::mem::replace(&mut has_waited, true) {
                return Poll::Ready(());
            }
            self.waiting.borrow_mut().push(context.waker().clone());
            Poll::Pending
        })
        .await;
    }
}
