//! Hearing that the policy has changed: by NOTIFY, from the store itself, and by Redis Pub/Sub, from the admin API.
//!
//! Each way has a connection of its own, made again whenever it ends. What is heard says only that the store is to be asked;
//! so is a connection that was just made, because something may have been missed before.

use std::{rc::Rc, sync::atomic::Ordering::Relaxed, time::Duration};

use glommio::timer::Timer;
use policy_sync::postgres::{self, Client};
use resp_client::{Address, Micros, pubsub};

use super::{
    Shared,
    status::{Way, note},
};
use crate::chance::Chance;

/// The channel of NOTIFY; see the store's migrations.
const CHANNEL: &str = "sluice_policy";
/// How long a silent connection is trusted.
const SILENCE: Duration = Duration::from_secs(15);
/// The first pause before a connection is made again; each further one doubles it.
const RETRY_MS: u64 = 200;
/// The longest.
const RETRY_MS_MAX: u64 = 10_000;

/// Pauses between attempts.
struct Pauses {
    next_ms: u64,
    chance: Chance,
}

impl Pauses {
    fn new(shared: &Shared) -> Self {
        let seed = shared.process.clock.micros() ^ u64::from(std::process::id());
        Self { next_ms: RETRY_MS, chance: Chance::new(seed) }
    }

    /// After an attempt; `worked` if there was a connection in the end.
    async fn pause(&mut self, worked: bool) {
        self.next_ms = if worked { RETRY_MS } else { (self.next_ms * 2).min(RETRY_MS_MAX) };
        // At least half of it, so that gateways spread.
        let half = self.next_ms / 2;
        Timer::new(Duration::from_millis(half + u64::from(self.chance.below(half as u32)))).await;
    }
}

/// A way has a connection now, or has none, and why.
fn is_up(shared: &Shared, way: &Way, what: &str, problem: Option<String>) {
    way.is_up.store(problem.is_none(), Relaxed);
    if problem.is_none() {
        shared.pushed();
    }
    note(&way.problem, what, problem);
}

/// Hears NOTIFY. Never ends, unless that way is off.
pub(super) async fn by_notify(shared: Rc<Shared>) {
    const WHAT: &str = "pushes by NOTIFY";
    let way = &shared.status.notify;
    if !way.is_used {
        return;
    }
    let mut pauses = Pauses::new(&shared);
    loop {
        let why = match listen(&shared, way, WHAT).await {
            Ok(()) => "the connection ended".to_owned(),
            Err(error) => error.to_string(),
        };
        let worked = way.is_up.load(Relaxed);
        is_up(&shared, way, WHAT, Some(why));
        pauses.pause(worked).await;
    }
}

async fn listen(shared: &Shared, way: &Way, what: &str) -> Result<(), postgres::Error> {
    let mut client = Client::connect(&shared.config, shared.connect_timeout()).await?;
    client.listen(CHANNEL, shared.deadline()).await?;
    is_up(shared, way, what, None);
    while !client.is_broken() {
        if client.wait_notification(Some(SILENCE)).await?.is_some() {
            way.heard.add(1);
            shared.pushed();
        } else {
            // A connection that was cut without a word looks like one on which nothing happens.
            client.query("SELECT 1", &[], shared.deadline()).await?;
        }
    }
    Ok(())
}

/// Hears Redis. Never ends, unless that way is off.
pub(super) async fn by_redis(shared: Rc<Shared>) {
    const WHAT: &str = "pushes by Redis";
    let way = &shared.status.redis;
    let (Some(plan), true) = (&shared.process.store, way.is_used) else { return };
    let channel = shared.settings().redis_channel.clone();
    let mut pauses = Pauses::new(&shared);
    let mut attempt = 0;
    let clock = shared.process.clock;
    let now = || Micros(clock.micros());
    loop {
        let addresses = addresses(&shared);
        let Some(address) = addresses.get(attempt % addresses.len().max(1)).cloned() else {
            is_up(&shared, way, WHAT, Some("no address of Redis is known yet".into()));
            pauses.pause(false).await;
            continue;
        };
        attempt += 1;
        let subscriber = pubsub::Subscriber::new(plan.client.clone(), address.clone(), &[channel.as_bytes()]);
        let why = match subscriber {
            Ok(mut subscriber) => {
                let on = |event: pubsub::Event<'_>| match event {
                    pubsub::Event::Subscribed => is_up(&shared, way, WHAT, None),
                    pubsub::Event::Message { .. } => {
                        way.heard.add(1);
                        shared.pushed();
                    }
                };
                resp_client::runner::hear(&mut subscriber, shared.settings().connect_timeout_ms, now, on).await
            }
            Err(error) => error.to_string(),
        };
        let worked = way.is_up.load(Relaxed);
        is_up(&shared, way, WHAT, Some(format!("{address}: {why}")));
        pauses.pause(worked).await;
    }
}

/// Where Redis can be: what was found so far, and then the seeds. Any node of a cluster hears everything. Sentinels are no
/// seeds: they publish only what is theirs.
fn addresses(shared: &Shared) -> Vec<Address> {
    let Some(plan) = &shared.process.store else { return Vec::new() };
    let found = plan.shards.known().into_iter().filter_map(|(_, name)| address(&name));
    let seeds = match &plan.client.mode {
        resp_client::Mode::Sentinel { .. } => &[],
        _ => plan.client.addresses(),
    };
    let mut all: Vec<Address> = Vec::new();
    for address in found.chain(seeds.iter().cloned()) {
        if !all.contains(&address) {
            all.push(address);
        }
    }
    all
}

/// The address of a shard, by its name.
fn address(name: &str) -> Option<Address> {
    if name.contains('/') {
        return Some(Address::Unix(name.into()));
    }
    let (host, port) = name.rsplit_once(':')?;
    Some(Address::tcp(host.trim_start_matches('[').trim_end_matches(']'), port.parse().ok()?))
}
