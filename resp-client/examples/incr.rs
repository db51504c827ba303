//! Counts keys up, and says who answered.
//!
//! `cargo run -p resp-client --example incr -- redis://127.0.0.1:6379`, or `redis+cluster://…`, `redis+sentinel://…`.
#![allow(clippy::print_stdout, reason = "that is what it is for")]

use std::{error::Error, time::Duration};

use glommio::LocalExecutorBuilder;
use resp_client::{Config, Script, ScriptId, key_slot, runner::Runner};

/// Adds to a key, and says what it was before.
const ADD: &str = "local was = redis.call('GET', KEYS[1]) redis.call('INCRBY', KEYS[1], ARGV[1]) return was";

fn main() -> Result<(), Box<dyn Error>> {
    let mut urls: Vec<String> = std::env::args().skip(1).collect();
    if urls.is_empty() {
        urls.push("redis://127.0.0.1:6379".to_owned());
    }
    let mut config = Config::from_urls(&urls)?;
    config.client_name = Some("example".to_owned());
    config.scripts.push(Script::by_hash(ADD));

    LocalExecutorBuilder::default()
        .spawn(|| async move { count(config).await.map_err(|error| error.to_string()) })
        .map_err(|error| error.to_string())?
        .join()
        .map_err(|error| error.to_string())??;
    Ok(())
}

async fn count(config: Config) -> Result<(), Box<dyn Error>> {
    let redis = Runner::start(config, 100)?;
    if !redis.ready(Duration::from_secs(3)).await {
        return Err(format!("nothing to talk to: {:?}", redis.shards()).into());
    }
    for key in ["apples", "pears", "plums", "cherries"] {
        let count = redis.call(&[b"INCR", key.as_bytes()]).await?;
        let before = redis.script(ScriptId(0), &[key.as_bytes()], &[b"10"]).await?;
        let shard = redis.client().shard_of(key_slot(key.as_bytes()));
        let shard = shard.map_or(String::new(), |shard| redis.client().shard_name(shard).to_owned());
        println!("{key}: {count:?}, then 10 more on {before:?} at {shard}");
    }
    Ok(())
}
