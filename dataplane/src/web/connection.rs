//! One HTTP connection without its socket: hyper over a [`Pipe`], polled by the engine whenever bytes or answers have come.
//!
//! Whether it speaks HTTP/1.1 or HTTP/2 shows from its first bytes. The streams of HTTP/2 are futures of their own, which
//! hyper hands to an executor: here they are kept with their connection and polled with it, so a connection that goes takes
//! everything of its own along.

use std::{
    cell::RefCell,
    future::Future,
    net::IpAddr,
    pin::Pin,
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    task::{Context, Poll, Wake, Waker},
};

use futures_util::stream::{FuturesUnordered, Stream};
use hyper::{
    rt::Executor,
    server::conn::{http1, http2},
    service::service_fn,
};

use super::{Visit, Web, pipe::Pipe, service};

/// How an HTTP/2 connection begins; RFC 9113, section 3.4.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Bytes of HTTP/2 frames: the smallest that the protocol allows, and enough for any check.
const FRAME_BYTES_MAX: u32 = 16_384;
/// Bytes that a client may send on all streams of a connection before it must wait.
const CONNECTION_WINDOW_BYTES: u32 = 1 << 20;
/// Bytes of answers that wait in a stream.
const SEND_BYTES_MAX: usize = 64 * 1024;
/// Streams that a client may open and reset before they were looked at; then it is sent away (CVE-2023-44487).
const PENDING_RESETS_MAX: usize = 20;
/// Streams that may be reset because of the client's errors.
const LOCAL_RESETS_MAX: usize = 64;
/// Header fields of a request.
const FIELDS_MAX: usize = 100;

type Driving = Pin<Box<dyn Future<Output = ()>>>;

/// Says that a connection has something to do.
struct Bell(AtomicBool);

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Relaxed);
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.0.store(true, Relaxed);
    }
}

/// Where hyper puts the futures of streams.
#[derive(Clone, Default)]
struct Streams(Rc<RefCell<Vec<Driving>>>);

impl<F: Future<Output = ()> + 'static> Executor<F> for Streams {
    fn execute(&self, future: F) {
        self.0.borrow_mut().push(Box::pin(future));
    }
}

/// A connection.
pub(crate) struct Connection {
    web: Rc<Web>,
    pipe: Pipe,
    /// `None` until the first bytes tell the protocol.
    driving: Option<Driving>,
    /// The first bytes, while they are too few to tell.
    first: Vec<u8>,
    spawned: Streams,
    streams: FuturesUnordered<Driving>,
    bell: Arc<Bell>,
    waker: Waker,
    visit: Rc<Visit>,
}

impl Connection {
    /// A connection of this peer.
    pub(crate) fn new(web: &Rc<Web>, peer: Option<IpAddr>, now_ms: u64) -> Self {
        let bell = Arc::new(Bell(AtomicBool::new(false)));
        Self {
            web: Rc::clone(web),
            pipe: Pipe::default(),
            driving: None,
            first: Vec::new(),
            spawned: Streams::default(),
            streams: FuturesUnordered::new(),
            waker: Waker::from(Arc::clone(&bell)),
            bell,
            visit: Rc::new(Visit::new(peer, now_ms)),
        }
    }

    /// Bytes have come.
    pub(crate) fn put(&mut self, bytes: &[u8]) {
        self.bell.0.store(true, Relaxed);
        self.visit.heard(self.web.now_ms.get());
        if self.driving.is_some() {
            return self.pipe.put(bytes);
        }
        self.first.extend_from_slice(bytes);
        let len = self.first.len().min(PREFACE.len());
        if self.first[..len] == PREFACE[..len] {
            if len == PREFACE.len() {
                self.visit.is_http2.set(true);
                self.driving = Some(self.http2());
            }
        } else {
            self.driving = Some(self.http1());
        }
        if self.driving.is_some() {
            self.pipe.put(&std::mem::take(&mut self.first));
        }
    }

    /// Does what can be done now. Returns whether the connection goes on.
    pub(crate) fn poll(&mut self) -> bool {
        let mut context = Context::from_waker(&self.waker);
        while self.bell.0.swap(false, Relaxed) {
            let Some(driving) = &mut self.driving else { return true };
            if driving.as_mut().poll(&mut context).is_ready() {
                return false;
            }
            let has_new = !self.spawned.0.borrow().is_empty();
            if has_new {
                self.streams.extend(self.spawned.0.borrow_mut().drain(..));
            }
            while let Poll::Ready(Some(())) = Pin::new(&mut self.streams).poll_next(&mut context) {}
        }
        !self.pipe.is_closed()
    }

    /// Whether something is to be polled.
    pub(crate) fn is_awake(&self) -> bool {
        self.bell.0.load(Relaxed)
    }

    /// Moves what is to be sent.
    pub(crate) fn take_output(&mut self, into: &mut Vec<u8>) {
        self.pipe.take(into);
    }

    /// Bytes that have come and that hyper has not read.
    pub(crate) fn unread_bytes(&self) -> usize {
        self.pipe.unread_bytes()
    }

    /// The server leaves: what was asked is answered, and nothing more is taken.
    pub(crate) fn part(&self) {
        if !self.visit.is_parting.replace(true) {
            self.bell.0.store(true, Relaxed);
        }
    }

    /// Whether it has been without a request, or with an unfinished one, for too long.
    pub(crate) fn is_overdue(&self, now_ms: u64) -> bool {
        self.visit.is_overdue(&self.web.settings, now_ms)
    }

    fn http1(&self) -> Driving {
        let service = service_fn(service::of(&self.web, &self.visit));
        let mut connection = Box::pin(
            http1::Builder::new()
                .auto_date_header(false)
                .header_read_timeout(None)
                .half_close(true)
                .max_buf_size(self.web.settings.head_bytes_max.max(8192))
                .max_headers(FIELDS_MAX)
                .pipeline_flush(true)
                .serve_connection(self.pipe.clone(), service),
        );
        let visit = Rc::clone(&self.visit);
        let mut parted = false;
        Box::pin(std::future::poll_fn(move |context| {
            if visit.is_parting.get() && !std::mem::replace(&mut parted, true) {
                connection.as_mut().graceful_shutdown();
            }
            // A peer that breaks off, or speaks something else, is no news.
            connection.as_mut().poll(context).map(drop)
        }))
    }

    fn http2(&self) -> Driving {
        let settings = &self.web.settings;
        let service = service_fn(service::of(&self.web, &self.visit));
        let body_bytes_max = u32::try_from(settings.body_bytes_max).unwrap_or(u32::MAX);
        let mut connection = Box::pin(
            http2::Builder::new(self.spawned.clone())
                .auto_date_header(false)
                .max_frame_size(FRAME_BYTES_MAX)
                .max_concurrent_streams(settings.streams_max)
                .max_header_list_size(u32::try_from(settings.head_bytes_max).unwrap_or(u32::MAX))
                .max_pending_accept_reset_streams(PENDING_RESETS_MAX)
                .max_local_error_reset_streams(LOCAL_RESETS_MAX)
                .initial_stream_window_size(body_bytes_max.max(FRAME_BYTES_MAX))
                .initial_connection_window_size(CONNECTION_WINDOW_BYTES.max(body_bytes_max))
                .max_send_buf_size(SEND_BYTES_MAX)
                .serve_connection(self.pipe.clone(), service),
        );
        let visit = Rc::clone(&self.visit);
        let mut parted = false;
        Box::pin(std::future::poll_fn(move |context| {
            if visit.is_parting.get() && !std::mem::replace(&mut parted, true) {
                connection.as_mut().graceful_shutdown();
            }
            connection.as_mut().poll(context).map(drop)
        }))
    }
}
