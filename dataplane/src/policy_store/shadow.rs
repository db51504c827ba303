//! Tells the policy store what shadow rules saw: takes the cores' ledgers, adds them up, and sends each batch until it has
//! arrived. On a connection of its own, so that a slow report keeps no change waiting.

use std::{rc::Rc, sync::atomic::Ordering::Relaxed, time::Duration};

use hmac::{Hmac, Mac};
use policy_sync::postgres::{self, Client};
use sha2::Sha256;

use super::{Shared, sleep_or, status::note};
use crate::{
    config,
    shadow::{Exchange, pending::Pending},
};

const ADD: &str =
    "SELECT sluice.add_shadow($1::text::uuid, $2::text::bigint, $3::text::jsonb, $4::text::jsonb, $5::text::integer)";
const WHAT: &str = "telling the policy store what shadow rules saw";
/// Bytes of a keyed hash that are shown.
const HASH_BYTES: usize = 16;

/// Reports every `shadow.flush_ms`, and once more at the end.
pub(super) async fn run(shared: Rc<Shared>) {
    let Some(exchange) = shared.process.shadow.clone() else { return };
    let settings = shared.process.settings.shadow.clone();
    let written = match settings.identity_key_file.as_deref().map(config::read_password).transpose() {
        Ok(key) => Identities { key: key.map(|key| key.as_bytes().to_vec()) },
        Err(why) => {
            // It could be read a moment ago. Without it identities that are secret would leave.
            note(&shared.status.shadow_problem, WHAT, Some(format!("shadow.identity_key_file {why}")));
            return;
        }
    };
    let Ok(source) = source() else { return };
    let mut reporter = Reporter { source, kept: settings.identities_kept.to_string(), client: None };
    let mut pending = Pending::default();
    loop {
        let is_last = shared.is_stopping.get();
        collect(&shared, &exchange, &mut pending, &written);
        let outcome = reporter.send(&shared, &mut pending).await;
        if outcome.is_err() {
            // Whatever it was, a new connection begins without it.
            reporter.client = None;
            shared.status.shadow_failures.add(1);
        }
        note(&shared.status.shadow_problem, WHAT, outcome.err().map(|error| error.to_string()));
        shared.status.shadow_waiting.store(pending.rows() as u64, Relaxed);
        if is_last {
            return;
        }
        sleep_or(&shared.leaving, Duration::from_millis(settings.flush_ms)).await;
    }
}

fn collect(shared: &Shared, exchange: &Exchange, pending: &mut Pending, written: &Identities) {
    let now = shared.process.clock.now();
    let started_unix_ms = now.unix_ms.saturating_sub_unsigned(now.mono_ms);
    let before = pending.dropped;
    while let Some(ledger) = exchange.take() {
        pending.add(&ledger, started_unix_ms, |name| written.of(name));
        exchange.give_back(ledger);
    }
    exchange.dropped.fetch_add(pending.dropped - before, Relaxed);
}

/// How identities are told.
struct Identities {
    key: Option<Vec<u8>>,
}

impl Identities {
    fn of(&self, name: &[u8]) -> Box<str> {
        let Some(key) = &self.key else { return String::from_utf8_lossy(name).into() };
        // A key of any length is one.
        let Ok(mut hash) = Hmac::<Sha256>::new_from_slice(key) else { return "hmac:".into() };
        hash.update(name);
        let digits: String =
            hash.finalize().into_bytes()[..HASH_BYTES].iter().map(|byte| format!("{byte:02x}")).collect();
        format!("hmac:{digits}").into()
    }
}

/// Sends batches.
struct Reporter {
    /// Tells this process from all others, in the form of a UUID.
    source: String,
    kept: String,
    client: Option<Client>,
}

impl Reporter {
    async fn send(&mut self, shared: &Shared, pending: &mut Pending) -> Result<(), postgres::Error> {
        while let Some(batch) = pending.batch() {
            let client = match &mut self.client {
                Some(client) if !client.is_broken() => client,
                _ => self.client.insert(Client::connect(&shared.config, shared.connect_timeout()).await?),
            };
            let sequence = batch.sequence.to_string();
            let words = [&self.source, &sequence, &batch.totals, &batch.identities, &self.kept];
            client.query(ADD, &words.map(|word| Some(word.as_str())), shared.deadline()).await?;
            pending.arrived();
            shared.status.shadow_batches.add(1);
        }
        Ok(())
    }
}

/// A random UUID.
fn source() -> Result<String, getrandom::Error> {
    let (high, low) = (getrandom::u64()?, getrandom::u64()?);
    let digits = format!("{high:016x}{low:016x}");
    let part = |range: std::ops::Range<usize>| digits[range].to_owned();
    Ok([part(0..8), part(8..12), part(12..16), part(16..20), part(20..32)].join("-"))
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_is_told_as_it_is_or_by_its_keyed_hash() {
        assert_eq!(&*Identities { key: None }.of(b"key=ak_1"), "key=ak_1");
        let hashed = |key: &[u8]| Identities { key: Some(key.to_vec()) }.of(b"key=ak_1");
        assert_eq!(hashed(b"k"), hashed(b"k"));
        assert_ne!(hashed(b"k"), hashed(b"l"));
        assert_eq!(hashed(b"k").len(), "hmac:".len() + 2 * HASH_BYTES);
        assert!(!hashed(b"k").contains("ak_1"));
    }

    #[test]
    fn a_source_is_a_uuid() {
        let source = source().unwrap();
        let parts: Vec<usize> = source.split('-').map(str::len).collect();
        assert_eq!(parts, [8, 4, 4, 4, 12]);
    }
}
