//! Starts the API, keeps house, and ends it when it is told to: what is in hand is answered first.

use std::{
    io::{self, Write},
    sync::Arc,
    time::Duration,
};

use thiserror::Error;
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
};

use crate::{
    api::{self, State},
    cli::ServeArgs,
    connect::{self, ConnectError, Patience},
    push::{Push, PushError, PushSettings},
    store::Store,
};

/// How often what is too old is removed.
const HOUSEKEEPING: Duration = Duration::from_secs(3600);
/// The first time, so that restarts do not all do it at once.
const FIRST_HOUSEKEEPING: Duration = Duration::from_secs(60);

/// Why it does not serve.
#[derive(Debug, Error)]
pub enum ServeError {
    /// The settings of PostgreSQL are wrong.
    #[error(transparent)]
    Postgres(#[from] ConnectError),
    /// The settings of Redis are wrong.
    #[error(transparent)]
    Redis(#[from] PushError),
    /// The address cannot be had.
    #[error("--listen {address}: {source}")]
    Listen {
        /// Which.
        address: std::net::SocketAddr,
        /// What the system says.
        source: io::Error,
    },
    /// The system refuses something.
    #[error("{0}")]
    System(#[from] io::Error),
}

/// Serves until SIGTERM or SIGINT. PostgreSQL need not be there: it is asked for each request, and `/readyz` tells.
///
/// # Errors
///
/// What keeps it from starting.
pub async fn run(args: &ServeArgs) -> Result<(), ServeError> {
    let config = connect::settings(&args.postgres.url, args.postgres.password_file.as_deref())?;
    let patience = Patience {
        connect: Duration::from_millis(args.connect_timeout_ms.into()),
        statement: Duration::from_millis(args.statement_timeout_ms.into()),
    };
    let store = Store::new(connect::pool(&config, args.connections_max.into(), patience)?);
    let push = if args.redis.is_empty() {
        None
    } else {
        let settings = PushSettings {
            urls: args.redis.clone(),
            channel: args.redis_channel.clone(),
            password_file: args.redis_password_file.clone(),
            ca_file: args.redis_ca_file.clone(),
        };
        Some(Push::start(&settings)?)
    };
    let state = Arc::new(State {
        store,
        push,
        live_secs: args.live_secs,
        body_bytes_max: args.body_bytes_max as usize,
        request_timeout: Duration::from_millis(args.request_timeout_ms.into()),
        requests: tokio::sync::Semaphore::new(args.requests_max.into()),
    });
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let refused = |source| ServeError::Listen { address: args.listen, source };
    let listener = TcpListener::bind(args.listen).await.map_err(refused)?;
    let address = listener.local_addr()?;
    tracing::info!(%address, postgres = %config, "serving");
    if let Err(error) = state.store.check().await {
        tracing::warn!("not ready: {error}");
    }
    // A closed standard output is no reason not to serve.
    let _ = writeln!(io::stdout(), "sluice-admin serves on http://{address}, the policy store is {config}");
    let housekeeping = tokio::spawn(keep_house(Arc::clone(&state), args.forget_gateways_days, args.keep_shadow_days));
    let leave = async move {
        tokio::select! { _ = term.recv() => {}, _ = int.recv() => {} }
        tracing::info!("leaving");
    };
    axum::serve(listener, api::router(Arc::clone(&state))).with_graceful_shutdown(leave).await?;
    housekeeping.abort();
    tracing::info!("left");
    Ok(())
}

async fn keep_house(state: Arc<State>, gateway_days: u32, shadow_days: u32) {
    tokio::time::sleep(FIRST_HOUSEKEEPING).await;
    loop {
        match state.store.forget(gateway_days, shadow_days).await {
            Ok(0) => {}
            Ok(rows) => tracing::info!(rows, "removed what is older than it is kept"),
            Err(error) => tracing::warn!("what is too old cannot be removed, next try in an hour: {error}"),
        }
        tokio::time::sleep(HOUSEKEEPING).await;
    }
}
