//! The ops port.

use std::{net::TcpListener, sync::Arc};

use crate::server::Process;

/// Serves.
pub async fn serve(listener: TcpListener, process: Arc<Process>) {
    let _ = (listener, process);
    std::future::pending::<()>().await;
}
