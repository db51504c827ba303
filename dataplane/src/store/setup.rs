//! From settings to a store: what the cores share, and each core's own part.

use std::{path::Path, sync::Arc};

use resp_client::{Config, Credentials, Secret, TlsConfig, TlsError};
use thiserror::Error;

use super::{StoreSettings, shards::Shards, wire};
use crate::config;

/// Why there can be no store.
#[derive(Debug, Error)]
pub enum StoreError {
    /// The URLs are wrong.
    #[error("redis.urls: {0}")]
    Url(#[from] resp_client::UrlError),
    /// A file of the settings cannot be used.
    #[error("{setting} {path}: {why}")]
    File {
        /// Which setting.
        setting: &'static str,
        /// The file.
        path: String,
        /// What is wrong with it.
        why: String,
    },
    /// The certificates cannot be used.
    #[error("redis.ca_file: {0}")]
    Tls(#[from] TlsError),
}

/// What all cores share of the store.
#[derive(Clone, Debug)]
pub struct StorePlan {
    /// How the RESP client of a core is set up.
    pub client: Config,
    /// How a core's asker is.
    pub asker: StoreSettings,
    /// The shards.
    pub shards: Arc<Shards>,
    /// Spreads in time what the cores should not do at once.
    pub seed: u64,
}

impl StorePlan {
    /// The plan of these settings; `None` where the counts stay in the process.
    ///
    /// # Errors
    ///
    /// What is wrong with the settings or with a file that they name.
    pub fn new(settings: &config::Redis, cores: usize, seed: u64) -> Result<Option<Self>, StoreError> {
        let Some(mut client) = settings.seeds()? else { return Ok(None) };
        client.connect_ms = settings.connect_timeout_ms;
        client.client_name = Some("sluice".into());
        client.shards_max = settings.shards_max;
        // A call for each identity of each check that waits; and those that give back.
        client.in_flight_max = 2 * settings.waiting_max;
        client.scripts = vec![wire::token_bucket(settings.functions)];
        if let Some(path) = &settings.password_file {
            let password = Secret::new(read_password(path)?);
            match &mut client.credentials {
                Some(credentials) => credentials.password = password,
                None => client.credentials = Some(Credentials { user: None, password }),
            }
        }
        if let Some(path) = &settings.ca_file {
            let ca_pem = std::fs::read(path).map_err(|error| wrong("redis.ca_file", path, error))?;
            client.tls = client.tls.map(|tls| TlsConfig { ca_pem: Some(ca_pem), ..tls });
        }
        let asker = StoreSettings {
            deadline_us: settings.deadline_ms * 1000,
            waiting_max: settings.waiting_max,
            breaker: settings.breaker,
            throttle_on_failure: settings.throttle_on_failure,
            local: settings.local_terms(),
        };
        // Certificates that cannot be used are found out here, not on the cores.
        resp_client::Client::new(client.clone(), seed, resp_client::Micros(0))?;
        let shards = Arc::new(Shards::new(settings.shards_max, cores));
        Ok(Some(Self { client, asker, shards, seed }))
    }
}

fn wrong(setting: &'static str, path: &Path, why: impl ToString) -> StoreError {
    StoreError::File { setting, path: path.display().to_string(), why: why.to_string() }
}

/// The password of a file, which holds it as its only line.
fn read_password(path: &Path) -> Result<String, StoreError> {
    let setting = "redis.password_file";
    let text = std::fs::read_to_string(path).map_err(|error| wrong(setting, path, error))?;
    match text.strip_suffix('\n').unwrap_or(&text) {
        "" => Err(wrong(setting, path, "is empty")),
        line if line.contains('\n') => Err(wrong(setting, path, "has more than one line")),
        line => Ok(line.to_owned()),
    }
}
