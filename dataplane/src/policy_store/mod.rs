//! Following the policy store: fetches what changed, puts it in force as a whole or not at all, keeps the last good policy on
//! disk, and tells the store which version runs here.
//!
//! ```text
//!   NOTIFY ───────┐
//!   Redis Pub/Sub ┼─► schedule ─► fetch "everything after N" ─► check, compile ─► in force ─► last good on disk
//!   every 30 s ───┘                                                          └─► "I run N" to the store
//! ```
//!
//! It has an executor of its own, on no core that serves checks: compiling a large policy takes a while. A push only says
//! that something may have changed. What changed is always asked of the store, so a push that is lost, repeated or out of order
//! changes nothing but when it is asked.

mod fetch;
mod hear;
mod keep;
pub mod schedule;
mod shadow;
mod signal;
pub mod status;

use std::{
    cell::{Cell, RefCell},
    path::Path,
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures_lite::future;
use glommio::{ExecutorJoinHandle, LocalExecutorBuilder, Placement, PoolPlacement, timer::Timer};
use policy_sync::{
    model::Policy,
    postgres,
    stored::{StoredPolicy, last_good},
};
use thiserror::Error;

use self::{schedule::Schedule, signal::Signal, status::Status};
use crate::{
    config,
    control::force::Force,
    listener::park::Pulse,
    policy::{LoadError, LocalTerms},
    server::{Process, ServerError},
};

/// See `server`: no executor must be preempted.
const PREEMPT_TIMER: Duration = Duration::from_secs(10);
/// Entries of the executor's ring.
const RING_DEPTH: usize = 256;

/// Why the policy store cannot be followed.
#[derive(Debug, Error)]
pub enum FollowError {
    /// A setting is wrong.
    #[error("{setting}: {why}")]
    Setting {
        /// Which.
        setting: &'static str,
        /// What is wrong with it; never with a password.
        why: String,
    },
    /// The first policy cannot be put in force.
    #[error(transparent)]
    Load(#[from] LoadError),
}

/// What follows the policy store, before it does.
pub struct Follower {
    force: Force,
    config: postgres::Config,
    stored: StoredPolicy,
}

impl Follower {
    /// Puts the last good policy in force, if there is one on disk; and else one without rules, which has version 0.
    ///
    /// # Errors
    ///
    /// What is wrong with the settings. A last good policy that cannot be used is no error: the log says so.
    pub fn new(
        settings: &config::Postgres,
        seed: u64,
        local: LocalTerms,
        rules_max: usize,
    ) -> Result<Self, FollowError> {
        let config = connection(settings)?;
        let stored = settings.last_good.as_deref().and_then(from_disk).unwrap_or_default();
        let force = match Force::of_store(&stored, seed, local, rules_max) {
            Ok(force) => return Ok(Self { force, config, stored }),
            Err(error) => {
                tracing::error!("the last good policy cannot be put in force, starting without it: {error}");
                Force::new(Policy::default(), seed, local, rules_max)?
            }
        };
        Ok(Self { force, config, stored: StoredPolicy::default() })
    }

    /// Where the store is, without the password.
    pub fn place(&self) -> String {
        self.config.to_string()
    }

    /// What puts policies in force.
    pub fn force(&self) -> &Force {
        &self.force
    }
}

fn from_disk(path: &Path) -> Option<StoredPolicy> {
    match last_good::read(path) {
        Ok(Some(stored)) => {
            let (version, rules) = (stored.version(), stored.rules().len());
            tracing::info!(version, rules, "the last good policy is in force until the policy store answers");
            Some(stored)
        }
        Ok(None) => {
            tracing::info!(path = %path.display(), "there is no last good policy yet");
            None
        }
        Err(error) => {
            tracing::error!("the last good policy cannot be used: {error}");
            None
        }
    }
}

/// How the store is reached, by these settings.
///
/// # Errors
///
/// What is wrong with them.
pub fn connection(settings: &config::Postgres) -> Result<postgres::Config, FollowError> {
    let wrong = |setting| move |why: String| FollowError::Setting { setting, why };
    let url = settings.url.as_deref().unwrap_or_default();
    let mut config = postgres::Config::parse(url).map_err(|error| wrong("postgres.url")(error.to_string()))?;
    if let Some(path) = &settings.password_file {
        let password = config::read_password(path).map_err(wrong("postgres.password_file"))?;
        config = config.with_password(password.as_bytes());
    }
    Ok(config)
}

/// What other threads ask of the executor.
pub struct Orders {
    fetch: AtomicBool,
    stop: AtomicBool,
    /// Wakes it.
    pub pulse: Arc<Pulse>,
}

impl Orders {
    /// Ask the store now.
    pub fn fetch(&self) {
        self.fetch.store(true, Ordering::Release);
        self.pulse.nudge();
    }

    /// End.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.pulse.nudge();
        self.pulse.beat();
    }
}

/// What the tasks of the executor share.
struct Shared {
    process: Arc<Process>,
    status: Arc<Status>,
    config: postgres::Config,
    schedule: RefCell<Schedule>,
    /// The schedule has changed.
    sooner: Signal,
    /// There is another policy to keep on disk.
    to_keep: Signal,
    /// The end has come.
    leaving: Signal,
    /// The newest policy that is in force.
    stored: RefCell<Arc<StoredPolicy>>,
    is_stopping: Cell<bool>,
}

impl Shared {
    fn now_ms(&self) -> u64 {
        self.process.clock.now().mono_ms
    }

    /// Something may have changed in the store.
    fn pushed(&self) {
        self.schedule.borrow_mut().pushed();
        self.sooner.set();
    }

    fn settings(&self) -> &config::Postgres {
        &self.process.settings.postgres
    }

    fn deadline(&self) -> Duration {
        Duration::from_millis(self.settings().deadline_ms)
    }

    fn connect_timeout(&self) -> Duration {
        Duration::from_millis(self.settings().connect_timeout_ms)
    }
}

/// Starts the executor.
///
/// # Errors
///
/// When its thread cannot be started.
pub(crate) fn start(
    follower: Follower,
    process: Arc<Process>,
) -> Result<(ExecutorJoinHandle<()>, Arc<Orders>), ServerError> {
    let Follower { force, config, stored } = follower;
    let failed = |error: String| ServerError::Start { what: "the policy store's executor".into(), error };
    let status = process.policy_store.clone().ok_or_else(|| failed("no policy store is set".into()))?;
    let pulse = Arc::new(Pulse::default());
    let orders =
        Arc::new(Orders { fetch: AtomicBool::new(false), stop: AtomicBool::new(false), pulse: Arc::clone(&pulse) });
    let for_executor = Arc::clone(&orders);
    let handle = LocalExecutorBuilder::new(Placement::Unbound)
        .name("sluice-policy")
        .preempt_timer(PREEMPT_TIMER)
        .io_memory(0)
        .ring_depth(RING_DEPTH)
        .blocking_thread_pool_placement(PoolPlacement::Unbound(2))
        .spawn(move || async move {
            let _heart = glommio::spawn_local(Arc::clone(&pulse).keep_alive());
            let seed = force.seed() ^ u64::from(std::process::id());
            let schedule = Schedule::new(process.settings.postgres.poll_ms, process.clock.now().mono_ms, seed);
            let shared = Rc::new(Shared {
                process,
                status,
                config,
                schedule: RefCell::new(schedule),
                sooner: Signal::default(),
                to_keep: Signal::default(),
                leaving: Signal::default(),
                stored: RefCell::new(Arc::new(stored)),
                is_stopping: Cell::new(false),
            });
            let _orders = glommio::spawn_local(obey(Rc::clone(&shared), for_executor));
            let _keep = glommio::spawn_local(keep::run(Rc::clone(&shared)));
            let _notify = glommio::spawn_local(hear::by_notify(Rc::clone(&shared)));
            let _redis = glommio::spawn_local(hear::by_redis(Rc::clone(&shared)));
            let reporter = glommio::spawn_local(shadow::run(Rc::clone(&shared)));
            follow(shared, force).await;
            // What the cores wrote down last; they have ended.
            reporter.await;
        })
        .map_err(|error| failed(error.to_string()))?;
    Ok((handle, orders))
}

/// Carries out what other threads ask.
async fn obey(shared: Rc<Shared>, orders: Arc<Orders>) {
    loop {
        if orders.stop.load(Ordering::Acquire) {
            shared.is_stopping.set(true);
            shared.sooner.set();
            shared.leaving.set();
        }
        if orders.fetch.swap(false, Ordering::AcqRel) {
            shared.pushed();
        }
        orders.pulse.until_nudged().await;
    }
}

/// Fetches whenever it is due, until the process ends.
async fn follow(shared: Rc<Shared>, mut force: Force) {
    let mut client = None;
    while !shared.is_stopping.get() {
        let (due_ms, now_ms) = (shared.schedule.borrow().due_ms(), shared.now_ms());
        if due_ms > now_ms {
            sleep_or(&shared.sooner, Duration::from_millis(due_ms - now_ms)).await;
            force.release();
            continue;
        }
        shared.schedule.borrow_mut().begun(now_ms);
        let stop = async {
            while !shared.is_stopping.get() {
                shared.sooner.wait().await;
            }
            false
        };
        let has_answered = future::or(fetch::fetch(&shared, &mut client, &mut force), stop).await;
        shared.schedule.borrow_mut().ended(has_answered, shared.now_ms());
        force.release();
    }
}

/// Sleeps, or until the signal is set.
async fn sleep_or(signal: &Signal, pause: Duration) {
    let sleep = async {
        Timer::new(pause).await;
    };
    future::or(sleep, signal.wait()).await;
}
