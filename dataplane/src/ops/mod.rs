//! The ops port: `/metrics`, `/healthz`, `/readyz` and `/v1/status`, on the control executor.
//!
//! `io` lets hyper speak over glommio's streams; `status` is the JSON page. What is scraped is in
//! [`metrics::exposition`](crate::metrics::exposition).

mod io;
mod status;

use std::{
    cell::Cell,
    convert::Infallible,
    future::{Future, poll_fn},
    net::TcpListener,
    os::fd::{AsFd, OwnedFd},
    pin::{Pin, pin},
    rc::Rc,
    sync::{Arc, atomic::Ordering},
    task::Poll,
    time::Duration,
};

use glommio::timer::Timer;
use http_body_util::Full;
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Bytes, Incoming},
    header::{ALLOW, CONTENT_TYPE},
    server::conn::http1,
    service::service_fn,
};

use self::io::HyperStream;
use crate::{lifecycle::Stage, listener::park, metrics::exposition, server::Process};

/// How long a connection may take to ask for the first time: nobody holds a slot by sending nothing, or slowly.
const FIRST_REQUEST_MS_MAX: u64 = 10_000;
/// And how long from one answer to the next. Longer than the usual intervals of scrapes and probes.
const BETWEEN_ANSWERS_MS_MAX: u64 = 75_000;
/// How often a connection's times are looked at.
const LOOK: Duration = Duration::from_secs(1);
/// Bytes of a request's head.
const HEAD_BYTES_MAX: usize = 16 * 1024;

const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const TEXT: &str = "text/plain; charset=utf-8";
const JSON: &str = "application/json";
const PATHS: &str = "there are /metrics, /healthz, /readyz and /v1/status\n";

/// Serves until the executor ends.
pub async fn serve(listener: TcpListener, process: Arc<Process>) {
    let connections = Rc::new(Cell::new(0));
    let descriptor: OwnedFd = match listener.try_clone() {
        Ok(copy) => copy.into(),
        Err(error) => {
            tracing::error!(%error, "the ops port cannot be served");
            return;
        }
    };
    loop {
        match listener.accept() {
            // Beyond the limit the socket is dropped, and so closed.
            Ok(_) if connections.get() >= process.settings.ops.connections_max => {
                process.tallies.ops_refused.fetch_add(1, Ordering::Relaxed);
            }
            Ok((socket, _)) => {
                connections.set(connections.get() + 1);
                let (process, connections) = (Arc::clone(&process), Rc::clone(&connections));
                glommio::spawn_local(async move {
                    converse(socket.into(), process).await;
                    connections.set(connections.get() - 1);
                })
                .detach();
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                park::sleep(descriptor.as_fd(), None).await;
            }
            Err(error) => {
                tracing::warn!(%error, "the ops port cannot accept");
                glommio::timer::sleep(Duration::from_millis(250)).await;
            }
        }
    }
}

async fn converse(socket: OwnedFd, process: Arc<Process>) {
    let Ok(stream) = HyperStream::new(socket) else { return };
    let clock = process.clock;
    let now_ms = move || clock.now().mono_ms;
    let deadline_ms = Rc::new(Cell::new(now_ms() + FIRST_REQUEST_MS_MAX));
    let for_service = Rc::clone(&deadline_ms);
    let service = service_fn(move |request| {
        for_service.set(now_ms() + BETWEEN_ANSWERS_MS_MAX);
        let process = Arc::clone(&process);
        async move { Ok::<_, Infallible>(answer(&request, &process)) }
    });
    let connection = http1::Builder::new().max_buf_size(HEAD_BYTES_MAX).serve_connection(stream, service);
    while_in_time(connection, || now_ms() < deadline_ms.get()).await;
}

/// Runs a connection to its end, or drops it when its time is over. A peer that breaks off is no news.
async fn while_in_time(connection: impl Future<Output = hyper::Result<()>>, in_time: impl Fn() -> bool) {
    let mut connection = pin!(connection);
    let mut look = Timer::new(LOOK);
    poll_fn(|context| {
        if connection.as_mut().poll(context).is_ready() {
            return Poll::Ready(());
        }
        while Pin::new(&mut look).poll(context).is_ready() {
            if !in_time() {
                return Poll::Ready(());
            }
            look = Timer::new(LOOK);
        }
        Poll::Pending
    })
    .await;
}

fn answer(request: &Request<Incoming>, process: &Process) -> Response<Full<Bytes>> {
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        let mut refusal = reply(StatusCode::METHOD_NOT_ALLOWED, TEXT, "only GET and HEAD\n".into());
        refusal.headers_mut().insert(ALLOW, hyper::header::HeaderValue::from_static("GET, HEAD"));
        return refusal;
    }
    match request.uri().path() {
        "/metrics" => match exposition::encode(process) {
            Ok(text) => reply(StatusCode::OK, OPENMETRICS, text),
            Err(error) => reply(StatusCode::INTERNAL_SERVER_ERROR, TEXT, format!("{error}\n")),
        },
        "/healthz" => reply(StatusCode::OK, TEXT, "ok\n".into()),
        "/readyz" => match process.lifecycle.stage() {
            Stage::Serving => reply(StatusCode::OK, TEXT, "ready\n".into()),
            Stage::Starting if process.policy_store.is_some() && process.policy.load().policy.version == 0 => {
                unready("starting: there is no policy yet, neither from the policy store nor from disk\n")
            }
            Stage::Starting => unready("starting: not every core listens yet\n"),
            Stage::Draining => unready("leaving: still serving, for shutdown.drain_ms\n"),
            Stage::Closing => unready("leaving: listeners are closed\n"),
        },
        "/v1/status" => reply(StatusCode::OK, JSON, status::page(process)),
        _ => reply(StatusCode::NOT_FOUND, TEXT, PATHS.into()),
    }
}

fn unready(why: &str) -> Response<Full<Bytes>> {
    reply(StatusCode::SERVICE_UNAVAILABLE, TEXT, why.into())
}

fn reply(status: StatusCode, content_type: &'static str, body: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, hyper::header::HeaderValue::from_static(content_type));
    response
}
