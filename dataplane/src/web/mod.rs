//! HTTP/1.1, HTTP/2 and gRPC on a data core, without a socket: bytes of a connection go in, bytes come out.
//!
//! ```text
//!   engine ── bytes ──► Connection (hyper over a Pipe) ──► service ──► http:: or grpc::
//!      ▲                                                                  │ Asking
//!      └──────────── Exchange: what is asked, and the answers ◄───────────┘
//! ```
//!
//! The same connections, the same decision and the same transports as RESP; see `engine::web` for the other half.
//! `asking` is what services may ask, `connection` runs hyper, `pipe` is its socket, `service` finds who answers a path;
//! `http` has the JSON face and forward-auth, `grpc` Envoy's rate limit service and the health service, `headers` the
//! rate-limit headers of both, `peers` says whose address a request has.

pub(crate) mod asking;
pub(crate) mod connection;
mod grpc;
mod headers;
mod http;
pub mod peers;
mod pipe;
mod reply;
mod service;
pub mod settings;

use std::{
    cell::{Cell, RefCell},
    net::IpAddr,
    rc::Rc,
    sync::Arc,
};

use self::{asking::Exchange, settings::WebSettings};
use crate::{engine::Facts, metrics::counters::CoreCounters};

/// What the web faces of one core share.
pub(crate) struct Web {
    pub(crate) settings: WebSettings,
    pub(crate) exchange: Rc<RefCell<Exchange>>,
    pub(crate) counters: Arc<CoreCounters>,
    pub(crate) facts: Arc<dyn Facts + Send + Sync>,
    /// The time of this wake-up.
    pub(crate) now_ms: Cell<u64>,
}

impl Web {
    pub(crate) fn new(settings: WebSettings, counters: Arc<CoreCounters>, facts: Arc<dyn Facts + Send + Sync>) -> Self {
        Self { settings, exchange: Rc::default(), counters, facts, now_ms: Cell::new(0) }
    }
}

/// What is known of a connection beside its bytes: who, and since when it has done what.
pub(crate) struct Visit {
    /// The other end of the socket; `None` for a Unix socket.
    pub(crate) peer: Option<IpAddr>,
    pub(crate) is_http2: Cell<bool>,
    /// The server leaves.
    pub(crate) is_parting: Cell<bool>,
    /// When a request last came to be handled or was answered; at first, when the connection came.
    moved_ms: Cell<u64>,
    /// Since when bytes have come that are no whole request head yet.
    head_since_ms: Cell<Option<u64>>,
    /// Requests whose bodies are being read, and since when there are some.
    bodies: Cell<u32>,
    bodies_since_ms: Cell<u64>,
    /// Requests in hand.
    open: Cell<u32>,
    /// Whether there ever was one.
    has_asked: Cell<bool>,
}

impl Visit {
    fn new(peer: Option<IpAddr>, now_ms: u64) -> Self {
        Self {
            peer,
            is_http2: Cell::new(false),
            is_parting: Cell::new(false),
            moved_ms: Cell::new(now_ms),
            head_since_ms: Cell::new(None),
            bodies: Cell::new(0),
            bodies_since_ms: Cell::new(0),
            open: Cell::new(0),
            has_asked: Cell::new(false),
        }
    }

    fn heard(&self, now_ms: u64) {
        // Of HTTP/2 not every frame begins a request: a ping does not.
        if !self.is_http2.get() && self.bodies.get() == 0 && self.head_since_ms.get().is_none() {
            self.head_since_ms.set(Some(now_ms));
        }
    }

    /// A request's head is here.
    fn begins(&self, now_ms: u64) {
        self.head_since_ms.set(None);
        self.has_asked.set(true);
        self.moved_ms.set(now_ms);
        self.open.set(self.open.get() + 1);
    }

    /// A request's body is being read.
    fn reads(&self, now_ms: u64) {
        if self.bodies.replace(self.bodies.get() + 1) == 0 {
            self.bodies_since_ms.set(now_ms);
        }
    }

    /// Its body is here.
    fn has_come(&self, now_ms: u64) {
        self.bodies.set(self.bodies.get().saturating_sub(1));
        self.bodies_since_ms.set(now_ms);
    }

    /// It has its answer, or is gone.
    fn ends(&self, now_ms: u64) {
        self.open.set(self.open.get().saturating_sub(1));
        self.moved_ms.set(now_ms);
    }

    fn is_overdue(&self, settings: &WebSettings, now_ms: u64) -> bool {
        let is_past = |since_ms: u64, limit_ms: u64| limit_ms > 0 && now_ms.saturating_sub(since_ms) >= limit_ms;
        let request_ms = settings.request_timeout_ms;
        let idle_ms = if self.has_asked.get() { settings.idle_timeout_ms } else { request_ms };
        self.head_since_ms.get().is_some_and(|since_ms| is_past(since_ms, request_ms))
            || (self.bodies.get() > 0 && is_past(self.bodies_since_ms.get(), request_ms))
            || (self.open.get() == 0 && is_past(self.moved_ms.get(), idle_ms))
    }
}
