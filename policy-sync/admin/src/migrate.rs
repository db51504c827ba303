//! Makes the policy store, and brings it to this version's form.
//!
//! Every file of `migrations` is applied once, in order, each in a transaction of its own with its row in `sluice.migration`.
//! A lock lets two that migrate at once go one after the other. A store that knows a file which this program does not, or
//! another text of one, is left alone.

use sha2::{Digest, Sha256};
use thiserror::Error;
use tokio_postgres::Client;

use crate::connect::explained;

/// One file.
struct Migration {
    number: i32,
    name: &'static str,
    text: &'static str,
}

const MIGRATIONS: &[Migration] =
    &[Migration { number: 1, name: "policy_store", text: include_str!("../migrations/0001_policy_store.sql") }];

/// Any number, as long as nobody else locks it in this database.
const LOCK: i64 = 0x51_0c_e0_01;

/// Why the store was not migrated.
#[derive(Debug, Error)]
pub enum MigrateError {
    /// The store refuses.
    #[error("migration {number} ({name}): {why}")]
    Refused {
        /// Which file.
        number: i32,
        /// Its name.
        name: &'static str,
        /// What the store says.
        why: String,
    },
    /// It cannot be asked.
    #[error("the policy store: {0}")]
    Store(String),
    /// The schema is not one that this program made.
    #[error("there is a schema `sluice` that no migration made; use another database, or remove it")]
    Foreign,
    /// A newer program was here.
    #[error("the store is at migration {found}, and this program knows {known}: use the newer sluice-admin")]
    Newer {
        /// The store's newest.
        found: i32,
        /// This program's newest.
        known: i32,
    },
    /// A file that was applied had another text.
    #[error("migration {number} was applied with another text than this program has: use the sluice-admin that fits")]
    Altered {
        /// Which file.
        number: i32,
    },
}

/// Applies what is missing; returns the names of what was applied.
///
/// # Errors
///
/// See [`MigrateError`]. What was applied before the error stays.
pub async fn run(client: &mut Client) -> Result<Vec<String>, MigrateError> {
    let store = |error: tokio_postgres::Error| MigrateError::Store(explained(&error));
    let mut applied = Vec::new();
    loop {
        let transaction = client.transaction().await.map_err(store)?;
        transaction.execute("SELECT pg_advisory_xact_lock($1)", &[&LOCK]).await.map_err(store)?;
        let done = done(&transaction).await?;
        let Some(next) = next(&done)? else { return Ok(applied) };
        let Migration { number, name, text } = *next;
        let refused = |error: tokio_postgres::Error| MigrateError::Refused { number, name, why: explained(&error) };
        transaction.batch_execute(text).await.map_err(refused)?;
        transaction
            .execute(
                "INSERT INTO sluice.migration (number, name, sha256) VALUES ($1, $2, $3)",
                &[&number, &name, &sha256(text)],
            )
            .await
            .map_err(refused)?;
        transaction.commit().await.map_err(refused)?;
        applied.push(format!("{number:04}_{name}"));
    }
}

/// Whether the store has the form that this program works with.
///
/// # Errors
///
/// What is wrong with it.
pub async fn check(client: &impl tokio_postgres::GenericClient) -> Result<(), MigrateError> {
    match next(&done(client).await?)? {
        None => Ok(()),
        Some(_) => Err(MigrateError::Store("it lacks migrations: run `sluice-admin migrate`".into())),
    }
}

/// The files that were applied: number and hash.
async fn done(client: &impl tokio_postgres::GenericClient) -> Result<Vec<(i32, Vec<u8>)>, MigrateError> {
    let store = |error: tokio_postgres::Error| MigrateError::Store(explained(&error));
    let there = "SELECT to_regnamespace('sluice') IS NOT NULL, to_regclass('sluice.migration') IS NOT NULL";
    let row = client.query_one(there, &[]).await.map_err(store)?;
    match (row.get(0), row.get(1)) {
        (false, _) => return Ok(Vec::new()),
        (true, false) => return Err(MigrateError::Foreign),
        (true, true) => {}
    }
    let rows = client.query("SELECT number, sha256 FROM sluice.migration ORDER BY number", &[]).await.map_err(store)?;
    Ok(rows.iter().map(|row| (row.get(0), row.get(1))).collect())
}

/// What is to be applied after these.
fn next(done: &[(i32, Vec<u8>)]) -> Result<Option<&'static Migration>, MigrateError> {
    let known = MIGRATIONS.last().map_or(0, |last| last.number);
    if let Some((found, _)) = done.iter().find(|(number, _)| *number > known) {
        return Err(MigrateError::Newer { found: *found, known });
    }
    for migration in MIGRATIONS {
        match done.iter().find(|(number, _)| *number == migration.number) {
            None => return Ok(Some(migration)),
            Some((number, hash)) if *hash != sha256(migration.text) => {
                return Err(MigrateError::Altered { number: *number });
            }
            Some(_) => {}
        }
    }
    Ok(None)
}

fn sha256(text: &str) -> Vec<u8> {
    Sha256::digest(text).to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn migrations_go_in_order_and_a_store_of_another_program_is_left_alone() {
        assert!(MIGRATIONS.iter().zip(1..).all(|(migration, number)| migration.number == number));
        assert!(matches!(next(&[]), Ok(Some(Migration { number: 1, .. }))));
        let all: Vec<_> = MIGRATIONS.iter().map(|one| (one.number, sha256(one.text))).collect();
        assert!(matches!(next(&all), Ok(None)));
        let newer = [all.clone(), vec![(99, Vec::new())]].concat();
        assert!(matches!(next(&newer), Err(MigrateError::Newer { found: 99, .. })));
        assert!(matches!(next(&[(1, vec![7])]), Err(MigrateError::Altered { number: 1 })));
    }
}
