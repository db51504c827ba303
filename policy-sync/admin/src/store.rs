//! The policy store: what the API reads of it, and the one transaction that a change is.
//!
//! The policy is kept in memory and brought forward by what happened since, as gateways do it: so a look at it costs one small
//! query, however large it is.

use std::sync::{Arc, Mutex, PoisonError};

use deadpool_postgres::{GenericClient, Object, Pool, PoolError};
use jiff::Timestamp;
use policy_sync::stored::{Body, Key, Row};
use serde_json::{Value, json};
use thiserror::Error;
use tokio_postgres::error::SqlState;

use crate::{
    connect::explained,
    held::{Held, Malformed},
    migrate::{self, MigrateError},
    plan::{Difference, Refusal},
    tokens::{self, time},
};

/// Why the store did not do what it was asked to.
#[derive(Debug, Error)]
pub enum StoreError {
    /// It does not answer, or not in time.
    #[error("the policy store does not answer: {0}")]
    Away(String),
    /// Another change took too long.
    #[error("another change has been under way for too long")]
    Busy,
    /// It refuses.
    #[error("the policy store refuses: {0}")]
    Refused(String),
    /// It answers what no store does.
    #[error(transparent)]
    Malformed(#[from] Malformed),
    /// Its form is not this program's.
    #[error(transparent)]
    Form(#[from] MigrateError),
    /// It went away while the change was being committed.
    #[error("the policy store went away before it said whether the change is made: {0}")]
    Unknown(String),
    /// There is no such version.
    #[error("there is no version {asked}; the policy is at version {newest}")]
    NoVersion {
        /// What was asked for.
        asked: u64,
        /// The newest.
        newest: u64,
    },
}

impl From<tokio_postgres::Error> for StoreError {
    fn from(error: tokio_postgres::Error) -> Self {
        let text = explained(&error);
        match error.code() {
            Some(code) if [SqlState::LOCK_NOT_AVAILABLE, SqlState::T_R_DEADLOCK_DETECTED].contains(code) => Self::Busy,
            Some(code) if *code == SqlState::QUERY_CANCELED => Self::Away(text),
            // Classes 08, 53, 57: connections, resources, an operator who stops it.
            Some(code) if ["08", "53", "57"].iter().any(|class| code.code().starts_with(class)) => Self::Away(text),
            Some(_) => Self::Refused(text),
            None => Self::Away(text),
        }
    }
}

impl From<PoolError> for StoreError {
    fn from(error: PoolError) -> Self {
        match error {
            PoolError::Backend(error) => error.into(),
            other => Self::Away(other.to_string()),
        }
    }
}

/// Why a change was not made.
#[derive(Debug, Error)]
pub enum ChangeError {
    /// Because of the store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Because of the change.
    #[error(transparent)]
    Refused(#[from] Refusal),
}

/// A caller of the API.
#[derive(Clone, Debug)]
pub struct Caller {
    /// The token's name.
    pub name: String,
    /// Whether it may change the policy.
    pub can_write: bool,
}

/// What is written down with a change.
#[derive(Clone, Debug, Default)]
pub struct Note {
    /// Who makes it.
    pub author: String,
    /// Why.
    pub comment: String,
    /// The version that it brings back, if any.
    pub rolled_back_to: Option<u64>,
}

/// What a change did, or would do.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The version that the policy has afterwards. Of a dry run: the one that it has.
    pub version: u64,
    /// Whether there is a new version.
    pub is_changed: bool,
    /// What differs.
    pub differences: Vec<Difference>,
}

/// One entry of the history.
#[derive(Clone, Debug)]
pub struct Entry {
    /// The version that it made.
    pub version: u64,
    /// Who made it.
    pub author: String,
    /// Why.
    pub comment: String,
    /// When.
    pub made_at: Timestamp,
    /// The version that it brought back, if any.
    pub rolled_back_to: Option<u64>,
    /// How many rules it changed.
    pub rules: u64,
    /// How many overrides it changed.
    pub overrides: u64,
}

/// The store, by a pool of connections.
#[derive(Debug)]
pub struct Store {
    pool: Pool,
    held: Mutex<Arc<Held>>,
}

impl Store {
    /// A store that was not asked yet.
    pub fn new(pool: Pool) -> Self {
        Self { pool, held: Mutex::default() }
    }

    /// A connection.
    ///
    /// # Errors
    ///
    /// When there is none in time.
    pub async fn connection(&self) -> Result<Object, StoreError> {
        Ok(self.pool.get().await?)
    }

    /// Whether the store answers and has the form that this program works with.
    ///
    /// # Errors
    ///
    /// Why not.
    pub async fn check(&self) -> Result<(), StoreError> {
        let client = self.connection().await?;
        // A connection's own type, which the migrations work on.
        let client: &tokio_postgres::Client = &client;
        Ok(migrate::check(client).await?)
    }

    /// Whose token this is. `None`: nobody's, or revoked.
    ///
    /// # Errors
    ///
    /// When the store cannot be asked.
    pub async fn caller(&self, token: &str) -> Result<Option<Caller>, StoreError> {
        let sql = "SELECT name, can_write FROM sluice.api_token WHERE sha256 = $1 AND revoked_at IS NULL";
        let client = self.connection().await?;
        let statement = client.prepare_cached(sql).await?;
        let row = client.query_opt(&statement, &[&tokens::hash(token)]).await?;
        Ok(row.map(|row| Caller { name: row.get(0), can_write: row.get(1) }))
    }

    /// The policy as it is now.
    ///
    /// # Errors
    ///
    /// When the store cannot be asked.
    pub async fn current(&self) -> Result<Arc<Held>, StoreError> {
        let client = self.connection().await?;
        self.brought_forward(&**client).await
    }

    async fn brought_forward(
        &self,
        client: &(impl tokio_postgres::GenericClient + Sync),
    ) -> Result<Arc<Held>, StoreError> {
        let held = Arc::clone(&self.held.lock().unwrap_or_else(PoisonError::into_inner));
        let sql = "SELECT kind, version, name, identity, body FROM sluice.changes_after($1, $2)";
        let rows = client.query(sql, &[&signed(held.version()), &held.token()]).await?;
        let rows: Vec<Row> = rows.iter().map(row).collect();
        let is_same = rows.len() == 1 && rows[0].version == held.version() && rows[0].name == held.token();
        if is_same && held.version() > 0 {
            return Ok(held);
        }
        let next = Arc::new(working(move || held.apply(&rows)).await?);
        let mut kept = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        *kept = Arc::clone(&next);
        Ok(next)
    }

    /// The policy as it was at a version.
    ///
    /// # Errors
    ///
    /// When there is no such version, or the store cannot be asked.
    pub async fn at(&self, version: u64) -> Result<Arc<Held>, StoreError> {
        let now = self.current().await?;
        if version == now.version() {
            return Ok(now);
        }
        if version > now.version() {
            return Err(StoreError::NoVersion { asked: version, newest: now.version() });
        }
        let sql = "SELECT 'policy', $1::bigint, coalesce((SELECT token::text FROM sluice.change WHERE version = $1), ''), \
                   NULL::text, 'whole'::text \
                   UNION ALL SELECT 'rule', r.version, r.name, NULL, r.body::text FROM ( \
                     SELECT DISTINCT ON (name) name, version, body FROM sluice.rule WHERE version <= $1 \
                     ORDER BY name, version DESC) r WHERE r.body IS NOT NULL \
                   UNION ALL SELECT 'override', o.version, o.rule, to_json(o.identity)::text, o.body::text FROM ( \
                     SELECT DISTINCT ON (rule, identity) rule, identity, version, body FROM sluice.override \
                     WHERE version <= $1 ORDER BY rule, identity, version DESC) o WHERE o.body IS NOT NULL";
        let rows = self.connection().await?.query(sql, &[&signed(version)]).await?;
        let mut rows: Vec<Row> = rows.iter().map(row).collect();
        // A union promises no order.
        rows.sort_by_key(|row| row.kind != "policy");
        Ok(Arc::new(working(move || Held::default().apply(&rows)).await?))
    }

    /// Makes a change, in one transaction: `plan` sees the policy, and nobody else changes it meanwhile.
    ///
    /// # Errors
    ///
    /// What `plan` says, or the store. Except for [`StoreError::Unknown`], nothing was changed then.
    pub async fn change(
        &self,
        note: Note,
        plan: impl FnOnce(&Held) -> Result<Vec<Difference>, Refusal> + Send + 'static,
    ) -> Result<Outcome, ChangeError> {
        let mut client = self.connection().await?;
        let transaction = client.transaction().await.map_err(StoreError::from)?;
        let lock = "SELECT version FROM sluice.policy FOR NO KEY UPDATE";
        transaction.query_one(lock, &[]).await.map_err(StoreError::from)?;
        let before = self.brought_forward(&*transaction).await?;
        let version = before.version();
        let differences = working(move || plan(&before)).await?;
        if differences.is_empty() {
            return Ok(Outcome { version, is_changed: false, differences });
        }
        let version = write(&transaction, &note, &differences).await?;
        transaction.commit().await.map_err(|error| match StoreError::from(error) {
            StoreError::Away(why) => StoreError::Unknown(why),
            other => other,
        })?;
        tracing::info!(
            version,
            author = note.author,
            comment = note.comment,
            differences = differences.len(),
            "changed"
        );
        Ok(Outcome { version, is_changed: true, differences })
    }

    /// What a change would do.
    ///
    /// # Errors
    ///
    /// What `plan` says, or the store.
    pub async fn dry_run(
        &self,
        plan: impl FnOnce(&Held) -> Result<Vec<Difference>, Refusal> + Send + 'static,
    ) -> Result<Outcome, ChangeError> {
        let before = self.current().await?;
        let version = before.version();
        let differences = working(move || plan(&before)).await?;
        Ok(Outcome { version, is_changed: false, differences })
    }

    /// The history, newest first: changes before a version, of all or of those that touched a rule or its overrides.
    ///
    /// # Errors
    ///
    /// When the store cannot be asked.
    pub async fn history(&self, before: u64, rule: Option<&str>, limit: u32) -> Result<Vec<Entry>, StoreError> {
        let sql = "SELECT c.version, c.author, c.comment, extract(epoch FROM c.made_at)::float8, c.rolled_back_to, \
                     (SELECT count(*) FROM sluice.rule r WHERE r.version = c.version), \
                     (SELECT count(*) FROM sluice.override o WHERE o.version = c.version) \
                   FROM sluice.change c WHERE c.version < $1 AND ($2::text IS NULL \
                     OR EXISTS (SELECT FROM sluice.rule r WHERE r.version = c.version AND r.name = $2) \
                     OR EXISTS (SELECT FROM sluice.override o WHERE o.version = c.version AND o.rule = $2)) \
                   ORDER BY c.version DESC LIMIT $3";
        let client = self.connection().await?;
        let rows = client.query(sql, &[&signed(before), &rule, &i64::from(limit)]).await?;
        let entry = |row: &tokio_postgres::Row| Entry {
            version: unsigned(row.get(0)),
            author: row.get(1),
            comment: row.get(2),
            made_at: time(row.get(3)),
            rolled_back_to: row.get::<_, Option<i64>>(4).map(unsigned),
            rules: unsigned(row.get(5)),
            overrides: unsigned(row.get(6)),
        };
        Ok(rows.iter().map(entry).collect())
    }

    /// Runs a query that takes parameters, for a report.
    ///
    /// # Errors
    ///
    /// When the store cannot be asked.
    pub async fn query(
        &self,
        sql: &str,
        parameters: &[&(dyn tokio_postgres::types::ToSql + Sync)],
    ) -> Result<Vec<tokio_postgres::Row>, StoreError> {
        Ok(self.connection().await?.query(sql, parameters).await?)
    }

    /// Removes what is older than so many days: gateways that were not seen, and what shadow rules saw. Returns how many rows.
    ///
    /// # Errors
    ///
    /// When the store cannot be asked.
    pub async fn forget(&self, gateway_days: u32, shadow_days: u32) -> Result<u64, StoreError> {
        let client = self.connection().await?;
        let (gateways, shadow) = (f64::from(gateway_days), f64::from(shadow_days));
        let mut rows = 0;
        for (table, time, days) in [
            ("gateway", "seen_at", gateways),
            // Longer than any process keeps a batch that was not answered.
            ("shadow_source", "seen_at", gateways),
            ("shadow_total", "hour", shadow),
            ("shadow_identity", "hour", shadow),
        ] {
            let sql = format!("DELETE FROM sluice.{table} WHERE {time} < now() - make_interval(secs => $1 * 86400)");
            rows += client.execute(&sql, &[&days]).await?;
        }
        Ok(rows)
    }
}

/// Work that takes a while for a large policy, beside the threads that serve.
async fn working<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    }
}

/// Writes the differences under the next version.
async fn write(
    transaction: &deadpool_postgres::Transaction<'_>,
    note: &Note,
    differences: &[Difference],
) -> Result<u64, StoreError> {
    let begin = "SELECT sluice.begin_change($1, $2, $3)";
    let back = note.rolled_back_to.map(signed);
    let version: i64 = transaction.query_one(begin, &[&note.author, &note.comment, &back]).await?.get(0);
    let text = |body: &Option<Body>| body.as_ref().map(|body| Value::Object(body.clone()).to_string());
    let (mut names, mut bodies) = (Vec::new(), Vec::new());
    let (mut rules, mut identities, mut override_bodies) = (Vec::new(), Vec::new(), Vec::new());
    for difference in differences {
        match &difference.key {
            Key::Rule(name) => {
                names.push(name.as_str());
                bodies.push(text(&difference.after));
            }
            Key::Override { rule, identity } => {
                rules.push(rule.as_str());
                identities.push(json!(identity).to_string());
                override_bodies.push(text(&difference.after));
            }
        }
    }
    if !names.is_empty() {
        let sql = "INSERT INTO sluice.rule (name, version, body) \
                   SELECT n.name, $3, n.body::jsonb FROM unnest($1::text[], $2::text[]) AS n (name, body)";
        transaction.execute(sql, &[&names, &bodies, &version]).await?;
    }
    if !rules.is_empty() {
        let sql = "INSERT INTO sluice.override (rule, identity, version, body) \
                   SELECT n.rule, ARRAY(SELECT v.value FROM jsonb_array_elements_text(n.identity::jsonb) \
                     WITH ORDINALITY AS v (value, place) ORDER BY v.place), $4, n.body::jsonb \
                   FROM unnest($1::text[], $2::text[], $3::text[]) AS n (rule, identity, body)";
        transaction.execute(sql, &[&rules, &identities, &override_bodies, &version]).await?;
    }
    Ok(unsigned(version))
}

fn row(row: &tokio_postgres::Row) -> Row {
    Row { kind: row.get(0), version: unsigned(row.get(1)), name: row.get(2), identity: row.get(3), body: row.get(4) }
}

/// Versions are never negative in the store, and never that large.
fn unsigned(number: i64) -> u64 {
    u64::try_from(number).unwrap_or(0)
}

/// What no store counts up to is its largest.
fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}
