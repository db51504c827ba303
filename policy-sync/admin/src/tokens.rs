//! Who may call the API. A token is 256 random bits; the store keeps its SHA-256, so whoever reads the store cannot call.

use jiff::Timestamp;
use serde::Serialize;
use sha2::{Digest, Sha256};
use thiserror::Error;
use tokio_postgres::{Client, error::SqlState};

use crate::connect::explained;

/// What every token begins with, so that scanners for leaked secrets can find it.
const PREFIX: &str = "sluice_";
/// The longest name.
const NAME_BYTES_MAX: usize = 128;

/// Why nothing was done to a token.
#[derive(Debug, Error)]
pub enum TokenError {
    /// The name is none.
    #[error("{0:?} is no name for a token: write 1 to {NAME_BYTES_MAX} printable characters")]
    Name(String),
    /// There is one of this name already.
    #[error("there is a token {0:?} already (or was: a name stands for one caller in the history); use another name")]
    Exists(String),
    /// There is none of this name.
    #[error("there is no token {0:?} that could be revoked; `sluice-admin token list` shows all")]
    Missing(String),
    /// The store refuses.
    #[error("the policy store: {0}")]
    Store(String),
    /// The system gives no random numbers.
    #[error("the system gives no random numbers: {0}")]
    Random(#[from] getrandom::Error),
}

impl From<tokio_postgres::Error> for TokenError {
    fn from(error: tokio_postgres::Error) -> Self {
        Self::Store(explained(&error))
    }
}

/// A token as people see it afterwards.
#[derive(Debug, Serialize)]
pub struct Listed {
    /// Its name, which changes are attributed to.
    pub name: String,
    /// `read` or `write`.
    pub scope: &'static str,
    /// When it was made.
    pub created_at: Timestamp,
    /// When it was revoked, if it was.
    pub revoked_at: Option<Timestamp>,
}

/// The hash that the store keeps.
pub fn hash(token: &str) -> Vec<u8> {
    Sha256::digest(token).to_vec()
}

/// Makes a token; returns it, which nobody can do again.
///
/// # Errors
///
/// See [`TokenError`].
pub async fn create(client: &Client, name: &str, can_write: bool) -> Result<String, TokenError> {
    if name.is_empty() || name.len() > NAME_BYTES_MAX || name.chars().any(char::is_control) {
        return Err(TokenError::Name(name.into()));
    }
    let mut random = [0; 32];
    getrandom::fill(&mut random)?;
    let digits: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
    let token = format!("{PREFIX}{digits}");
    let sql = "INSERT INTO sluice.api_token (name, sha256, can_write) VALUES ($1, $2, $3)";
    match client.execute(sql, &[&name, &hash(&token), &can_write]).await {
        Ok(_) => Ok(token),
        Err(error) if error.code() == Some(&SqlState::UNIQUE_VIOLATION) => Err(TokenError::Exists(name.into())),
        Err(error) => Err(error.into()),
    }
}

/// All tokens, by name.
///
/// # Errors
///
/// When the store cannot be asked.
pub async fn list(client: &Client) -> Result<Vec<Listed>, TokenError> {
    let sql = "SELECT name, can_write, extract(epoch FROM created_at)::float8, extract(epoch FROM revoked_at)::float8 \
               FROM sluice.api_token ORDER BY name";
    let rows = client.query(sql, &[]).await?;
    Ok(rows
        .iter()
        .map(|row| Listed {
            name: row.get(0),
            scope: if row.get(1) { "write" } else { "read" },
            created_at: time(row.get(2)),
            revoked_at: row.get::<_, Option<f64>>(3).map(time),
        })
        .collect())
}

/// Revokes a token: from now on it opens nothing.
///
/// # Errors
///
/// See [`TokenError`].
pub async fn revoke(client: &Client, name: &str) -> Result<(), TokenError> {
    let sql = "UPDATE sluice.api_token SET revoked_at = clock_timestamp() WHERE name = $1 AND revoked_at IS NULL";
    match client.execute(sql, &[&name]).await? {
        0 => Err(TokenError::Missing(name.into())),
        _ => Ok(()),
    }
}

/// A time from seconds since the Unix epoch, to the millisecond. One that no calendar has becomes its beginning.
pub fn time(seconds: f64) -> Timestamp {
    #[allow(clippy::cast_possible_truncation, reason = "out of range it saturates, and is no time either way")]
    Timestamp::from_millisecond((seconds * 1000.0).round() as i64).unwrap_or(Timestamp::UNIX_EPOCH)
}
