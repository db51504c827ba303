//! A small PostgreSQL client: one connection, one query at a time, and what others NOTIFY.
//!
//! Everything that thinks is sans-I/O: the [`Session`] takes the bytes that arrived and gives the bytes to send, with TLS
//! or without; a glommio runner, [`Client`], moves them. Whatever a server sends, however hostile, ends in rows or in a
//! typed [`Error`], within the memory that [`Limits`] allows.
//!
//! ```no_run
//! use std::time::Duration;
//! use policy_sync::postgres::{Client, Config};
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let config = Config::parse("postgres://sluice@db.internal/sluice?sslmode=verify-full")?.with_password("from a file");
//! let deadline = Duration::from_secs(5);
//! let mut client = Client::connect(&config, deadline).await?;
//! client.listen("policy", deadline).await?;
//! let rows = client.query("SELECT name, body FROM rules WHERE version > $1::bigint", &[Some("7")], deadline).await?;
//! for row in &rows {
//!     println!("{:?} {:?}", row.get(0), row.get(1));
//! }
//! while let Some(notification) = client.wait_notification(Some(Duration::from_secs(30))).await? {
//!     println!("{}: {}", notification.channel, notification.payload);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! Read in this order, the way a query goes and its rows come back:
//!
//! 1. [`config`]: a URL to settings.
//! 2. [`client`]: sockets and deadlines.
//! 3. [`session`]: bytes to messages, through TLS; who we are, and then one query at a time.
//! 4. [`rows`]: what a query gave.
//! 5. [`error`]: what can go wrong, and what it means for the connection.

pub mod client;
pub mod config;
pub mod error;
pub mod limits;
pub mod rows;
pub mod session;
mod tls;

pub use self::{
    client::Client,
    config::{Config, Host, RootCerts, Secret, SslMode, UrlError},
    error::{Error, ProtocolError, RequestError, ServerError, TlsError, TooLarge},
    limits::Limits,
    rows::{Column, Row, Rows},
    session::{CancelKey, Notification, Session},
    tls::TlsSettings,
};
