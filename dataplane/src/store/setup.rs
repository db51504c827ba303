//! From settings to a store: what the cores share, and each core's own part.

use std::sync::Arc;

use resp_client::{Config, Credentials, Secret, TlsConfig};
use thiserror::Error;

use super::{LeaseTerms, StoreSettings, shards::Shards, wire};
use crate::{config, hot::HotSettings};

/// Why there can be no store.
#[derive(Debug, Error)]
#[error("{setting}: {why}")]
pub struct StoreError {
    /// Which setting is wrong.
    pub setting: &'static str,
    /// What is wrong with it; never with a password.
    pub why: String,
}

impl StoreError {
    fn of(setting: &'static str) -> impl FnOnce(String) -> Self {
        move |why| Self { setting, why }
    }
}

/// What all cores share of the store.
#[derive(Clone)]
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
    /// The plan of these settings and those of hot keys; `None` where the counts stay in the process.
    ///
    /// # Errors
    ///
    /// What is wrong with the settings or with a file that they name.
    pub fn new(
        settings: &config::Redis,
        hot: &HotSettings,
        cores: usize,
        seed: u64,
    ) -> Result<Option<Self>, StoreError> {
        let seeds = settings.seeds().map_err(|error| StoreError::of("redis.urls")(error.to_string()))?;
        let Some(mut client) = seeds else { return Ok(None) };
        client.connect_ms = settings.connect_timeout_ms;
        client.client_name = Some("sluice".into());
        client.shards_max = settings.shards_max;
        // A call for each identity of each check that waits; and those that give back.
        client.in_flight_max = 2 * settings.waiting_max;
        client.scripts = vec![wire::token_bucket(settings.functions)];
        if let Some(path) = &settings.password_file {
            let password = config::read_password(path).map_err(StoreError::of("redis.password_file"))?;
            let password = Secret::new(password.as_bytes());
            match &mut client.credentials {
                Some(credentials) => credentials.password = password,
                None => client.credentials = Some(Credentials { user: None, password }),
            }
        }
        if let Some(path) = &settings.ca_file {
            let unreadable = |error| format!("{}: cannot be read: {error}", path.display());
            let ca_pem = std::fs::read(path).map_err(unreadable).map_err(StoreError::of("redis.ca_file"))?;
            client.tls = client.tls.map(|tls| TlsConfig { ca_pem: Some(ca_pem), ..tls });
        }
        let asker = StoreSettings {
            deadline_us: settings.deadline_ms * 1000,
            waiting_max: settings.waiting_max,
            breaker: settings.breaker,
            throttle_on_failure: settings.throttle_on_failure,
            local: settings.local_terms(),
            leases: LeaseTerms { share: hot.lease_share, quiet_us: hot.lease_quiet_ms * 1_000 },
        };
        // Certificates that cannot be used are found out here, not on the cores.
        resp_client::Client::new(client.clone(), seed, resp_client::Micros(0))
            .map_err(|error| StoreError::of("redis.ca_file")(error.to_string()))?;
        let shards = Arc::new(Shards::new(settings.shards_max, cores, hot));
        Ok(Some(Self { client, asker, shards, seed }))
    }
}
