//! Everything that is not a check: the executor that reloads the policy and serves the ops port.
//!
//! The policy comes from a file, which is followed here, or from the policy store, which `policy_store` follows. A policy file is read again when its file changes and on SIGHUP; it is put in force as a whole, or refused as a whole
//! with every problem logged, and then the old one goes on.

pub(crate) mod force;
mod watch;

use std::{
    collections::HashMap,
    io,
    net::TcpListener,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use arc_swap::{ArcSwap, ArcSwapOption};
use glommio::{ExecutorJoinHandle, LocalExecutorBuilder, Placement, PoolPlacement};
use policy_sync::{file, model::Policy};
use thiserror::Error;

use self::{force::Force, watch::Watch};
use crate::{
    listener::park::Pulse,
    metrics::counters::{CoreCounters, RuleCounts},
    ops,
    policy::{LoadError, LocalTerms, PolicyInForce, RuleSlots},
    policy_store,
    server::{Process, ServerError},
};

/// See `server`: the control executor must not be preempted either.
const PREEMPT_TIMER: Duration = Duration::from_secs(10);
/// Entries of the control executor's ring: ops connections, and glommio's own.
const RING_DEPTH: usize = 1024;

/// The policy that is built in, for a first try without any file.
pub const EXAMPLE_POLICY: &str = include_str!("../../policy.toml");
/// What the built-in policy is called in messages.
pub const EXAMPLE_NAME: &str = "the built-in example policy";

/// Why a policy was not put in force.
#[derive(Debug, Error)]
pub enum PolicyError {
    /// The file has problems; all of them.
    #[error(transparent)]
    File(#[from] file::ReadError),
    /// The file has no rules. That is what a copy in progress looks like, and it would switch everything off.
    #[error("{0}: has no rules, and would allow everything; to mean that, write one rule with mode = \"off\"")]
    NoRules(String),
    /// The built-in policy has problems.
    #[error(transparent)]
    Example(#[from] file::Problems),
    /// It is fine by itself, but not for this process.
    #[error(transparent)]
    Load(#[from] LoadError),
}

impl PolicyError {
    /// Whether there is no file at all.
    fn is_gone(&self) -> bool {
        matches!(self, Self::File(file::ReadError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound)
    }
}

/// The policy's source and its state, on the control executor.
pub struct Control {
    source: Option<PathBuf>,
    force: Force,
    version: u64,
}

/// Where the policy comes from.
pub enum Rules {
    /// From a file, or it is the built-in example. The control executor follows the file.
    File(Control),
    /// From the policy store. An executor of its own follows that.
    Store(Box<policy_store::Follower>),
}

impl Rules {
    /// Where the cores find the policy in force.
    pub fn policy_in_force(&self) -> PolicyInForce {
        self.force().policy_in_force()
    }

    /// The process's random seed.
    pub fn seed(&self) -> u64 {
        self.force().seed()
    }

    fn force(&self) -> &Force {
        match self {
            Self::File(control) => &control.force,
            Self::Store(follower) => follower.force(),
        }
    }
}

impl Control {
    /// Reads the policy for the first time. Without a source the built-in example is taken.
    ///
    /// # Errors
    ///
    /// Everything that is wrong with it.
    pub fn new(source: Option<PathBuf>, seed: u64, local: LocalTerms, rules_max: usize) -> Result<Self, PolicyError> {
        let policy = read(source.as_deref(), 1)?;
        Ok(Self { source, force: Force::new(policy, seed, local, rules_max)?, version: 1 })
    }

    /// Reads the policy again and puts it in force if it is different and has no problem.
    fn reload(&mut self, process: &Process, was_asked: bool) {
        let outcome = read(self.source.as_deref(), self.version + 1).and_then(|policy| {
            if self.force.is_the_same(&policy) {
                return Ok(None);
            }
            Ok(Some(self.force.compile(policy)?))
        });
        let was_refused = outcome.is_ok() && process.reloads.refusal.swap(None).is_some();
        match outcome {
            Ok(None) if was_refused => {
                tracing::info!(version = self.version, "the policy file is good again, and what is in force");
            }
            // A file that was written again as it was is no news; whoever sent SIGHUP wants an answer.
            Ok(None) if !was_asked => {}
            Ok(None) => tracing::info!(version = self.version, "policy read again: nothing changed"),
            Ok(Some(compiled)) => {
                self.version += 1;
                self.force.put(compiled, process);
            }
            Err(error) => {
                process.reloads.refuse(error.to_string(), process.clock.now().unix_ms);
                if error.is_gone() {
                    tracing::error!(version = self.version, %error, "the policy file is gone, the old policy goes on");
                } else {
                    tracing::error!(version = self.version, "policy refused, the old one goes on:\n{error}");
                }
            }
        }
    }
}

/// Reads the policy, or the built-in one without a source.
pub(crate) fn read(source: Option<&Path>, version: u64) -> Result<Policy, PolicyError> {
    let policy = match source {
        Some(path) => file::read(path)?,
        None => file::parse(EXAMPLE_POLICY, EXAMPLE_NAME)?,
    };
    with_rules(policy, source, version)
}

/// As [`read`], of what was read from this file.
pub(crate) fn of_bytes(bytes: Vec<u8>, path: &Path, version: u64) -> Result<Policy, PolicyError> {
    with_rules(file::parse_bytes(bytes, path)?, Some(path), version)
}

fn with_rules(policy: Policy, source: Option<&Path>, version: u64) -> Result<Policy, PolicyError> {
    if policy.rules.is_empty() {
        return Err(PolicyError::NoRules(source_name(source)));
    }
    Ok(Policy { version, ..policy })
}

/// What people call the policy's source.
pub fn source_name(source: Option<&Path>) -> String {
    source.map_or(EXAMPLE_NAME.into(), |path| path.display().to_string())
}

/// What people call the source of the policy of a process.
pub fn source(process: &Process) -> String {
    match &process.policy_store {
        Some(store) => format!("the policy store, {}", store.place),
        None => source_name(process.settings.policy.as_deref()),
    }
}

/// How reloads went, for the scrape; and which names the counters' slots have.
#[derive(Debug, Default)]
pub struct Reloads {
    /// Policies put in force after the first.
    pub applied: AtomicU64,
    /// Policies refused.
    pub refused: AtomicU64,
    /// What is wrong with the policy file as it was last read; nothing once it is good again.
    pub refusal: ArcSwapOption<Refusal>,
    /// Rule names with their slot, and what the slot's counters showed when it got the name.
    pub names: ArcSwap<Vec<RuleCounters>>,
}

/// A policy that was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// What is wrong with it.
    pub why: String,
    /// When it was read.
    pub unix_ms: i64,
}

/// A rule's counters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleCounters {
    /// The rule's name.
    pub name: Box<str>,
    /// Its slot in every core's counters.
    pub slot: u32,
    /// What to subtract, by reason: the counts of the name that had the slot before.
    pub base: RuleCounts,
}

impl Reloads {
    /// A policy was refused.
    pub(crate) fn refuse(&self, why: String, unix_ms: i64) {
        self.refused.fetch_add(1, Ordering::Relaxed);
        self.refusal.store(Some(Arc::new(Refusal { why, unix_ms })));
    }

    /// Slots in `reused` are about to get another name.
    fn rebase(&self, counters: &[Arc<CoreCounters>], reused: &[u32]) {
        let mut names = Vec::clone(&self.names.load());
        names.retain(|rule| !reused.contains(&rule.slot));
        for &slot in reused {
            names.push(RuleCounters { name: "".into(), slot, base: RuleCounts::of(counters, slot) });
        }
        self.names.store(Arc::new(names));
    }

    /// Shows the names that have slots now.
    pub fn publish_names(&self, slots: &RuleSlots) {
        let known: HashMap<u32, RuleCounts> = self.names.load().iter().map(|rule| (rule.slot, rule.base)).collect();
        let base = |slot| known.get(&slot).copied().unwrap_or_default();
        let mut names: Vec<RuleCounters> =
            slots.names().map(|(name, slot)| RuleCounters { name: name.into(), slot, base: base(slot) }).collect();
        names.sort_by(|a, b| a.name.cmp(&b.name));
        self.names.store(Arc::new(names));
    }
}

/// What other threads ask of the control executor, and of the policy store's.
pub struct Orders {
    reload: AtomicBool,
    look: AtomicBool,
    stop: AtomicBool,
    /// Wakes the control executor.
    pub pulse: Arc<Pulse>,
    store: Option<Arc<policy_store::Orders>>,
}

impl Orders {
    /// Read the policy again, from wherever it comes.
    pub fn reload(&self) {
        match &self.store {
            Some(store) => store.fetch(),
            None => {
                self.reload.store(true, Ordering::Release);
                self.pulse.nudge();
            }
        }
    }

    /// Wakes the executors: whatever they wait for has its turn.
    pub fn beat(&self) {
        self.pulse.beat();
        if let Some(store) = &self.store {
            store.pulse.beat();
        }
    }

    /// The policy file may have changed.
    fn look_again(&self) {
        self.look.store(true, Ordering::Release);
        self.pulse.nudge();
    }

    /// End.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.pulse.nudge();
        self.pulse.beat();
        if let Some(store) = &self.store {
            store.stop();
        }
    }
}

/// Starts the control executor, and the one that follows the policy store.
///
/// # Errors
///
/// When a thread or the file watch cannot be started.
pub fn start(
    rules: Rules,
    process: Arc<Process>,
    ops_listener: TcpListener,
) -> Result<(Vec<ExecutorJoinHandle<()>>, Arc<Orders>), ServerError> {
    let (mut control, store) = match rules {
        Rules::File(control) => {
            process.reloads.publish_names(control.force.slots());
            (Some(control), None)
        }
        Rules::Store(follower) => {
            process.reloads.publish_names(follower.force().slots());
            (None, Some(policy_store::start(*follower, Arc::clone(&process))?))
        }
    };
    let (mut handles, store): (Vec<_>, _) = match store {
        Some((handle, orders)) => (vec![handle], Some(orders)),
        None => (Vec::new(), None),
    };
    let pulse = Arc::new(Pulse::default());
    let orders = Arc::new(Orders {
        reload: AtomicBool::new(false),
        // The file may have changed between the first reading and the beginning of the watch.
        look: AtomicBool::new(true),
        stop: AtomicBool::new(false),
        pulse: Arc::clone(&pulse),
        store,
    });
    let source = control.as_ref().and_then(|control| control.source.as_deref());
    let mut watch = source.map(|path| start_watch(path, Arc::clone(&orders))).transpose()?;
    let for_executor = Arc::clone(&orders);
    let handle = LocalExecutorBuilder::new(Placement::Unbound)
        .name("sluice-control")
        .preempt_timer(PREEMPT_TIMER)
        .io_memory(0)
        .ring_depth(RING_DEPTH)
        .blocking_thread_pool_placement(PoolPlacement::Unbound(1))
        .spawn(move || async move {
            let _heart = glommio::spawn_local(Arc::clone(&pulse).keep_alive());
            let _ops = glommio::spawn_local(ops::serve(ops_listener, Arc::clone(&process)));
            while !for_executor.stop.load(Ordering::Acquire) {
                let was_asked = for_executor.reload.swap(false, Ordering::AcqRel);
                let is_due = for_executor.look.swap(false, Ordering::AcqRel) || was_asked;
                if let Some(control) = &mut control {
                    if is_due {
                        watch.iter_mut().for_each(Watch::follow);
                        control.reload(&process, was_asked);
                    }
                    control.force.release();
                }
                pulse.until_nudged().await;
            }
        })
        .map_err(|error| ServerError::Start { what: "the control executor".into(), error: error.to_string() })?;
    handles.push(handle);
    Ok((handles, orders))
}

fn start_watch(path: &Path, orders: Arc<Orders>) -> Result<Watch, ServerError> {
    Watch::start(path, move |_| orders.look_again())
        .map_err(|error| ServerError::Start { what: format!("watching {}", path.display()), error: error.to_string() })
}
