//! Questions from requests to the engine, and its answers back: what a service may ask, and how it waits.
//!
//! ```text
//!   service ── ask ──► Exchange::asked ──► engine: match, decide or ask the store
//!           ◄─ Answered ── Exchange::answer ◄──┘
//! ```
//!
//! One exchange per core, shared by its connections' services and the engine. A request may ask several checks: each for
//! itself, or together, where one that is denied leaves the others untaken.

use std::{
    cell::RefCell,
    future::Future,
    pin::Pin,
    rc::Rc,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use policy_sync::rate::Rate;
use slab::Slab;
use smallvec::SmallVec;

use crate::{decision::Verdict, policy::LoadedPolicy, resp::command::CommandError};

/// What one request asks.
#[derive(Debug, Default)]
pub(crate) struct Asking {
    /// All names and values, one after the other.
    bytes: Vec<u8>,
    /// Where the last name ends in `bytes`.
    name_end: usize,
    /// Where each name and each value ends in `bytes`.
    ends: Vec<(u32, u32)>,
    pub(crate) checks: SmallVec<[Check; 1]>,
    /// Where one is denied, nothing is taken for the others.
    pub(crate) together: bool,
    /// The asker waits no longer than this, if it says so.
    pub(crate) timeout_us: Option<u64>,
}

/// One check of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Check {
    /// Where its pairs end in [`Asking::ends`].
    pairs_end: u32,
    /// How much; 0 only looks.
    pub(crate) cost: u32,
    pub(crate) kind: Kind,
}

/// What is done with the buckets.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kind {
    /// The cost is taken.
    Take,
    /// The cost is given back, and then looked.
    Refund,
    /// The cost is taken from the bucket of all its attributes, which has this limit, whatever the policy says of a domain
    /// that it knows; `None` denies everything.
    Limited(Option<Rate>),
}

impl Asking {
    /// Nothing yet; several checks are decided together, or each for itself.
    pub(crate) fn of(together: bool) -> Self {
        Self { together, ..Self::default() }
    }

    /// Adds an attribute to the check that [`check`](Self::check) will end.
    pub(crate) fn attribute(&mut self, name: &[u8], value: &[u8]) {
        self.name(name);
        self.value(value);
    }

    /// Adds an attribute whose value is written in place.
    pub(crate) fn attribute_with(&mut self, name: &[u8], write: impl FnOnce(&mut Vec<u8>)) {
        self.name(name);
        write(&mut self.bytes);
        self.value(&[]);
    }

    /// The first half of [`attribute`](Self::attribute).
    pub(crate) fn name(&mut self, name: &[u8]) {
        self.bytes.extend_from_slice(name);
        self.name_end = self.bytes.len();
    }

    /// The second half.
    pub(crate) fn value(&mut self, value: &[u8]) {
        self.bytes.extend_from_slice(value);
        // A request is bounded far below 4 GiB.
        self.ends.push((self.name_end as u32, self.bytes.len() as u32));
    }

    /// Ends a check.
    pub(crate) fn check(&mut self, cost: u32, kind: Kind) {
        self.checks.push(Check { pairs_end: self.ends.len() as u32, cost, kind });
    }

    /// The names and values of a check.
    pub(crate) fn pairs(&self, check: usize) -> impl Iterator<Item = (&[u8], &[u8])> {
        let first = check.checked_sub(1).map_or(0, |before| self.checks[before].pairs_end as usize);
        let mut at = first.checked_sub(1).map_or(0, |before| self.ends[before].1 as usize);
        self.ends[first..self.checks[check].pairs_end as usize].iter().map(move |&(name_end, value_end)| {
            let name = &self.bytes[at..name_end as usize];
            at = value_end as usize;
            (name, &self.bytes[name_end as usize..at])
        })
    }
}

/// What a check is told.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Said {
    pub(crate) verdict: Verdict,
    /// The limit in force of the bucket that decided.
    pub(crate) rate: Option<Rate>,
}

/// What a request is told.
pub(crate) enum Answered {
    /// Of each check, in order; the rules are this policy's.
    Verdicts(Arc<LoadedPolicy>, SmallVec<[Said; 1]>),
    /// A check cannot be meant: its place, and why.
    Wrong(usize, CommandError),
}

/// A request's place in the exchange.
pub(crate) type Ticket = usize;

/// Where services and engine meet.
#[derive(Default)]
pub(crate) struct Exchange {
    /// What the engine has not taken yet.
    pub(crate) asked: Vec<(Ticket, Asking)>,
    waiting: Slab<Waiting>,
}

enum Waiting {
    /// Nobody has looked yet.
    New,
    /// The service waits.
    Asleep(Waker),
    Answered(Answered),
    /// The request is gone; its answer is for nobody.
    Gone,
}

impl Exchange {
    /// Answers a request.
    pub(crate) fn answer(&mut self, ticket: Ticket, answer: Answered) {
        let Some(waiting) = self.waiting.get_mut(ticket) else { return };
        match std::mem::replace(waiting, Waiting::Answered(answer)) {
            Waiting::Asleep(waker) => waker.wake(),
            Waiting::Gone => drop(self.waiting.remove(ticket)),
            Waiting::New | Waiting::Answered(_) => {}
        }
    }

    /// Nobody will answer a request: its connection is gone.
    pub(crate) fn forget(&mut self, ticket: Ticket) {
        self.waiting.try_remove(ticket);
    }
}

/// Asks, and waits for the answer.
pub(crate) fn ask(exchange: &Rc<RefCell<Exchange>>, asking: Asking) -> Reply {
    let mut inside = exchange.borrow_mut();
    let ticket = inside.waiting.insert(Waiting::New);
    inside.asked.push((ticket, asking));
    drop(inside);
    Reply { exchange: Rc::clone(exchange), ticket: Some(ticket) }
}

/// The answer that a request waits for.
pub(crate) struct Reply {
    exchange: Rc<RefCell<Exchange>>,
    /// `None` once it was read.
    ticket: Option<Ticket>,
}

impl Future for Reply {
    type Output = Answered;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Answered> {
        let Some(ticket) = self.ticket else { return Poll::Pending };
        let mut exchange = self.exchange.borrow_mut();
        let waiting = &mut exchange.waiting[ticket];
        match waiting {
            Waiting::Answered(_) => {
                let Waiting::Answered(answer) = exchange.waiting.remove(ticket) else {
                    unreachable!("it was just looked at");
                };
                drop(exchange);
                self.ticket = None;
                Poll::Ready(answer)
            }
            _ => {
                *waiting = Waiting::Asleep(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        let Some(ticket) = self.ticket else { return };
        let mut exchange = self.exchange.borrow_mut();
        if let Some(waiting) = exchange.waiting.get_mut(ticket) {
            if matches!(waiting, Waiting::Answered(_)) {
                exchange.waiting.remove(ticket);
            } else {
                *waiting = Waiting::Gone;
            }
        }
    }
}
