//! The whole server: binds, starts an executor per core and one for everything else, and waits for the end.
//!
//! ```text
//!   main thread       signals, heartbeat, lifecycle
//!   data core 0..n    one pinned glommio executor each: transport + engine, nothing else
//!   control           one glommio executor: ops port, policy file
//!   policy            one glommio executor where there is a policy store: follows it
//! ```
//!
//! Data cores and control share nothing but the policy in force, the counters and the lifecycle.

use std::{
    io,
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
        mpsc,
    },
    time::Duration,
};

use glommio::{ExecutorJoinHandle, LocalExecutorBuilder, Placement as CpuPlacement, PoolPlacement};
use thiserror::Error;

use crate::{
    buckets::BucketTable,
    clock::Clock,
    config::{Cores, Listen, Settings, WithoutPolicy},
    control::{self, Orders, Reloads, Rules},
    engine::{Engine, Facts, RespSettings, Shared},
    files::{self, TooFewFiles},
    heat::{Heat, board::Board},
    lifecycle::{Lifecycle, Stage},
    limits::CORES_MAX,
    listener::{
        Face, Port, TransportChoice, TransportSettings,
        park::Pulse,
        placement::{Gate, Placement},
        plain,
        ring::Driver,
        sockets::{self, BindError, Bound, Doors, SocketFile},
    },
    metrics::{counters::CoreCounters, system},
    policy::PolicyInForce,
    policy_store,
    resp::frame::RequestLimits,
    shadow,
    store::{
        setup::{StoreError, StorePlan},
        wire::Redis,
    },
};

/// Executors must never be preempted by glommio's own timer; see `listener::park`.
const PREEMPT_TIMER: Duration = Duration::from_secs(10);
/// How often every data core is woken. This is what an idle server costs: 3 to 4 % of each core.
const BEAT: Duration = Duration::from_millis(1);
/// How many beats until the control executor is woken: nobody minds if a scrape is some milliseconds late.
const BEATS_PER_CONTROL_BEAT: u64 = 10;
/// How many beats until idle drivers look at clock and lifecycle.
const BEATS_PER_NUDGE: u64 = 100;
/// After so many without a first policy the log says that it is waited for: one that comes at once is no news.
const BEATS_UNTIL_PATIENCE_ENDS: u64 = 1000;
/// How long the control executor may take to end, however short the grace time is.
const CONTROL_GRACE_MIN: Duration = Duration::from_millis(500);
/// Entries of glommio's own rings on a data core with the ring transport; its driver hardly uses them.
const DATA_RING_DEPTH: usize = 256;
/// The kernel's most for a ring.
const RING_DEPTH_MAX: usize = 32_768;

/// Why the server cannot start, or ended badly.
#[derive(Debug, Error)]
pub enum ServerError {
    /// io_uring is missing or forbidden.
    #[error(
        "io_uring is not available: {0}. Sluice needs Linux 5.8 or newer with io_uring allowed: check \
         `sysctl kernel.io_uring_disabled`, and in containers the seccomp profile"
    )]
    IoUring(io::Error),
    /// The ring transport was asked for by name, and the kernel cannot do it.
    #[error("this kernel lacks what the ring transport needs (Linux 6.1): {0}. Use --transport plain, or auto")]
    Ring(io::Error),
    /// An address is taken or invalid.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// The cores setting names cores that the process may not use.
    #[error("cores: {0}")]
    Cores(String),
    /// The process may open too few files.
    #[error(transparent)]
    Files(#[from] TooFewFiles),
    /// The settings of the store cannot be used.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// An executor or a thread could not be started.
    #[error("cannot start {what}: {error}")]
    Start {
        /// What.
        what: String,
        /// Why.
        error: String,
    },
    /// A core stopped with an error.
    #[error("core {core} stopped: {error}")]
    Core {
        /// Its number among the data cores.
        core: usize,
        /// Why.
        error: io::Error,
    },
    /// The system refused something else.
    #[error("{what}: {error}")]
    System {
        /// What was tried.
        what: &'static str,
        /// Why not.
        error: io::Error,
    },
}

/// What the shell asks of a running server, from signals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// SIGHUP: read the policy again.
    Reload,
    /// SIGTERM or SIGINT: leave. The second time: at once.
    Leave,
}

/// What is true of the process from start to end; the ops port and INFO show it.
pub struct Process {
    /// The settings in force.
    pub settings: Settings,
    /// Where RESP is served.
    pub resp_address: std::net::SocketAddr,
    /// Where HTTP is served, if it is.
    pub http_address: Option<std::net::SocketAddr>,
    /// Where gRPC is served, if it is.
    pub grpc_address: Option<std::net::SocketAddr>,
    /// Where the ops port is served.
    pub ops_address: std::net::SocketAddr,
    /// By data core.
    pub counters: Vec<Arc<CoreCounters>>,
    /// Where connections are counted.
    pub placement: Arc<Placement>,
    /// The policy in force.
    pub policy: PolicyInForce,
    /// The buckets.
    pub table: Arc<BucketTable>,
    /// The store of the counts, if they are not in `table`.
    pub store: Option<StorePlan>,
    /// The hottest keys of each core.
    pub heat: Arc<Board>,
    /// The stage.
    pub lifecycle: Arc<Lifecycle>,
    /// The transport in use.
    pub transport: TransportChoice,
    /// The kernel's numbers of the data cores.
    pub cpus: Vec<usize>,
    /// How reloads of the policy went.
    pub reloads: Reloads,
    /// How following the policy store goes, if the policy comes from one.
    pub policy_store: Option<Arc<policy_store::status::Status>>,
    /// Where the cores hand over what shadow rules saw, if the policy comes from a store.
    pub shadow: Option<Arc<shadow::Exchange>>,
    /// What is counted outside the cores.
    pub tallies: Tallies,
    /// The clock.
    pub clock: Clock,
}

/// What clients must know; never logged.
#[derive(Clone, Default)]
pub struct Secrets {
    /// What AUTH must give.
    pub password: Option<Arc<str>>,
    /// What HTTP and gRPC requests must bring along.
    pub token: Option<Arc<str>>,
}

/// What is counted outside the cores.
#[derive(Debug)]
pub struct Tallies {
    /// Connections of the ops port that were closed at once, because there were `ops.connections_max`.
    pub ops_refused: AtomicU64,
    /// By core: connections closed otherwise than at a timeout, as of the last scrape. Kept because it is a difference of
    /// counters that are read one after the other, and a counter that goes down looks like a restart.
    pub closed_otherwise: Vec<AtomicU64>,
}

impl Tallies {
    fn new(cores: usize) -> Self {
        Self { ops_refused: AtomicU64::new(0), closed_otherwise: (0..cores).map(|_| AtomicU64::new(0)).collect() }
    }
}

/// Serves until a [`Request::Leave`] comes, and has been carried out.
///
/// `rules` reads and follows the policy. `ready` is told once everything listens. Where
/// the policy store has not answered yet, there is no last good policy, and `postgres.without_policy` is to wait, only the ops
/// port is served until there is a policy.
///
/// # Errors
///
/// What keeps the server from starting; after that, only what no client can cause.
pub fn run(
    mut settings: Settings,
    secrets: &Secrets,
    rules: Rules,
    requests: &mpsc::Receiver<Request>,
    ready: impl FnOnce(&Process),
) -> Result<(), ServerError> {
    check_io_uring()?;
    let transport = choose_transport(&settings)?;
    if transport != settings.transport.kind && transport == TransportChoice::Plain {
        // It needs more files than what was thought to be chosen.
        settings.transport.kind = transport;
        files::fit(&mut settings)?;
    }
    let cpus = data_cpus(&settings.cores).map_err(ServerError::Cores)?;
    let clock = Clock::start();
    let store = StorePlan::new(&settings.redis, &settings.hot, cpus.len(), rules.seed())?;
    let bound = sockets::bind(settings.resp.listen, cpus.len(), settings.resp.share_port)?;
    let share = settings.resp.share_port;
    let web = |listen: Listen| listen.0.map(|address| sockets::bind(address, cpus.len(), share)).transpose();
    let (http, grpc) = (web(settings.http.listen)?, web(settings.grpc.listen)?);
    let ops = sockets::ops(settings.ops.listen)?;
    let system = |what| move |error| ServerError::System { what, error };
    let _ops_door = Doors::of([&ops]).map_err(system("ops listener"))?;
    let followed = policy_store(&settings, &rules, store.is_some());
    let process = Arc::new(Process {
        resp_address: bound.address(),
        http_address: http.as_ref().map(Bound::address),
        grpc_address: grpc.as_ref().map(Bound::address),
        ops_address: ops.local_addr().map_err(system("ops address"))?,
        counters: cpus.iter().map(|_| CoreCounters::new(settings.limits.rules_max)).collect(),
        placement: Arc::new(
            Placement::new(cpus.len(), settings.limits.connections_max).map_err(system("eventfd for a core"))?,
        ),
        policy: rules.policy_in_force(),
        table: Arc::new(BucketTable::new(settings.limits.buckets)),
        store,
        heat: Arc::new(Board::new(cpus.len(), settings.hot.heat_keys)),
        lifecycle: Arc::new(Lifecycle::default()),
        transport,
        reloads: Reloads::default(),
        shadow: followed
            .is_some()
            .then(|| shadow::Exchange::new(cpus.len(), settings.shadow.flush_ms, settings.shadow.identities)),
        policy_store: followed,
        tallies: Tallies::new(cpus.len()),
        cpus,
        clock,
        settings,
    });
    let shared = Shared {
        policy: Arc::clone(&process.policy),
        table: Arc::clone(&process.table),
        seed: rules.seed(),
        facts: Arc::clone(&process) as _,
    };
    let (control, orders) = control::start(rules, Arc::clone(&process), ops)?;
    let running = Arc::new(AtomicUsize::new(0));
    let grace = Duration::from_millis(process.settings.shutdown.grace_ms);
    if must_wait(&process) && !wait_for_policy(&process, &orders, requests) {
        orders.stop();
        return join_control(control, &orders, grace);
    }
    let mut listeners = Vec::new();
    for (face, bound) in [(Face::Resp, Some(bound)), (Face::Web, http), (Face::Web, grpc)] {
        let Some(bound) = bound else { continue };
        listeners.push((face, bound.listen()?));
    }
    // The cores close their listeners, once these are empty. These are for an end that comes earlier.
    let all = listeners.iter().flat_map(|(_, listeners)| listeners);
    let _doors = Doors::of(all).map_err(system("listener"))?;
    let settings = &process.settings.resp;
    let unix = settings.listen_unix.as_deref().map(|path| sockets::unix(path, settings.unix_mode)).transpose()?;
    let (unix, socket_file) = unix.unzip();
    let (mut pulses, mut cores, mut seats) = (Vec::new(), Vec::new(), Vec::new());
    let (up, started) = mpsc::channel();
    let (mut unix, mut socket_file) = (unix, socket_file);
    for core in 0..process.cpus.len() {
        let mut listening: Vec<(OwnedFd, Face)> = Vec::new();
        for (face, listeners) in &mut listeners {
            listening.extend(listeners.pop().map(|listener| (listener.into(), *face)));
        }
        listening.extend(unix.take().map(|listener| (OwnedFd::from(listener), Face::Resp)));
        let pulse = Arc::new(Pulse::default());
        pulses.push(Arc::clone(&pulse));
        let (gate, socket_file) = (process.placement.gate(), socket_file.take());
        seats.push(Seat { core, listening, gate, socket_file, pulse, running: Arc::clone(&running), up: up.clone() });
    }
    drop(up);
    let mut shell = Shell { process: &process, pulses: &pulses, orders: &orders, running: &running, beats: 0 };
    let seated = seats.into_iter().try_for_each(|seat| {
        cores.push(start_core(&process, &shared, secrets, seat)?);
        Ok(())
    });
    // Every core reports once it listens; one that fails drops its end instead.
    if seated.is_ok() && shell.wait_for_all(&started, cores.len()) {
        process.lifecycle.advance(Stage::Serving);
        ready(&process);
        shell.serve(requests);
    } else {
        process.lifecycle.close(0, 0);
        shell.beat_until_idle();
    }
    let outcome = seated.and(join(cores));
    orders.stop();
    join_control(control, &orders, grace)?;
    outcome
}

/// What is known of the policy store, if there is one.
fn policy_store(settings: &Settings, rules: &Rules, has_redis: bool) -> Option<Arc<policy_store::status::Status>> {
    let Rules::Store(follower) = rules else { return None };
    let by_redis = has_redis && !settings.postgres.redis_channel.is_empty();
    Some(Arc::new(policy_store::status::Status::new(follower.place(), settings.postgres.notify, by_redis)))
}

/// Whether there is no policy yet, and the settings say to wait for one.
fn must_wait(process: &Process) -> bool {
    process.policy_store.is_some()
        && process.policy.load().policy.version == 0
        && process.settings.postgres.without_policy == WithoutPolicy::Wait
}

/// Waits for the first policy; false when asked to leave meanwhile.
fn wait_for_policy(process: &Process, orders: &Orders, requests: &mpsc::Receiver<Request>) -> bool {
    let mut beats = 0_u64;
    while must_wait(process) {
        match requests.recv_timeout(BEAT) {
            Ok(Request::Reload) => orders.reload(),
            Ok(Request::Leave) => return false,
            Err(mpsc::RecvTimeoutError::Timeout) => {}
            Err(mpsc::RecvTimeoutError::Disconnected) => std::thread::park_timeout(BEAT),
        }
        beats += 1;
        if beats == BEATS_UNTIL_PATIENCE_ENDS {
            tracing::warn!(
                "there is no policy yet: waiting for the policy store, and serving only the ops port until it has one \
                 (postgres.without_policy = \"serve\" would allow everything meanwhile)"
            );
        }
        if beats.is_multiple_of(BEATS_PER_CONTROL_BEAT) {
            orders.beat();
        }
        if beats.is_multiple_of(BEATS_PER_NUDGE) {
            orders.pulse.nudge();
        }
    }
    true
}

/// What the main thread does while the others work.
struct Shell<'a> {
    process: &'a Process,
    /// Of the data cores.
    pulses: &'a [Arc<Pulse>],
    orders: &'a Orders,
    running: &'a AtomicUsize,
    beats: u64,
}

impl Shell<'_> {
    /// Waits until all cores listen; false when one of them stopped instead.
    fn wait_for_all(&mut self, started: &mpsc::Receiver<()>, cores: usize) -> bool {
        let mut up = 0;
        while up < cores {
            match started.recv_timeout(BEAT) {
                Ok(()) => up += 1,
                Err(mpsc::RecvTimeoutError::Timeout) => self.beat(),
                Err(mpsc::RecvTimeoutError::Disconnected) => return false,
            }
        }
        true
    }

    /// Carries out requests until every core has stopped.
    fn serve(&mut self, requests: &mpsc::Receiver<Request>) {
        let mut close_at_ms = None;
        let cores = self.process.cpus.len();
        loop {
            match requests.recv_timeout(BEAT) {
                Ok(Request::Reload) => self.orders.reload(),
                Ok(Request::Leave) if close_at_ms.is_none() => {
                    tracing::info!(drain_ms = self.process.settings.shutdown.drain_ms, "leaving: /readyz is 503");
                    self.process.lifecycle.advance(Stage::Draining);
                    close_at_ms = Some(self.now_ms() + self.process.settings.shutdown.drain_ms);
                }
                Ok(Request::Leave) => {
                    tracing::warn!("asked again: leaving at once");
                    self.close(0);
                }
                Err(mpsc::RecvTimeoutError::Timeout) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => std::thread::park_timeout(BEAT),
            }
            self.beat();
            if close_at_ms.is_some_and(|at_ms| self.now_ms() >= at_ms)
                && self.process.lifecycle.stage() < Stage::Closing
            {
                self.close(self.process.settings.shutdown.grace_ms);
            }
            match self.running.load(Ordering::Acquire) {
                0 => return,
                still if still < cores && self.process.lifecycle.stage() < Stage::Closing => {
                    tracing::error!("a core stopped: leaving");
                    self.close(self.process.settings.shutdown.grace_ms);
                }
                _ => {}
            }
        }
    }

    fn close(&mut self, grace_ms: u64) {
        tracing::info!(grace_ms, "listeners close");
        self.process.lifecycle.close(self.now_ms(), grace_ms);
        self.pulses.iter().for_each(|pulse| pulse.nudge());
        self.orders.pulse.nudge();
    }

    fn beat_until_idle(&mut self) {
        while self.running.load(Ordering::Acquire) > 0 {
            std::thread::park_timeout(BEAT);
            self.beat();
        }
    }

    fn beat(&mut self) {
        self.beats += 1;
        // While leaving, drivers look after every connection at each beat.
        let nudge = self.beats.is_multiple_of(BEATS_PER_NUDGE) || self.process.lifecycle.stage() == Stage::Closing;
        for pulse in self.pulses {
            pulse.beat();
            if nudge {
                pulse.nudge();
            }
        }
        if nudge || self.beats.is_multiple_of(BEATS_PER_CONTROL_BEAT) {
            self.orders.beat();
        }
        if nudge {
            self.orders.pulse.nudge();
        }
    }

    fn now_ms(&self) -> u64 {
        self.process.clock.now().mono_ms
    }
}

/// What one core starts with.
struct Seat {
    core: usize,
    listening: Vec<(OwnedFd, Face)>,
    gate: Gate,
    socket_file: Option<SocketFile>,
    pulse: Arc<Pulse>,
    running: Arc<AtomicUsize>,
    up: mpsc::Sender<()>,
}

/// A core that runs. Tells the shell that it has stopped, however it stopped.
struct Running(Arc<AtomicUsize>);

impl Running {
    fn new(count: Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::AcqRel);
        Self(count)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

type CoreHandle = ExecutorJoinHandle<io::Result<()>>;

fn start_core(
    process: &Arc<Process>,
    shared: &Shared,
    secrets: &Secrets,
    seat: Seat,
) -> Result<CoreHandle, ServerError> {
    let settings = &process.settings;
    let port = Port {
        core: seat.core,
        socket_file: seat.socket_file,
        listeners: seat.listening,
        gate: Some(seat.gate),
        placement: Arc::clone(&process.placement),
        settings: transport_settings(settings),
        lifecycle: Arc::clone(&process.lifecycle),
        clock: process.clock,
    };
    let resp = resp_settings(settings, secrets.password.clone());
    let web = settings.http.web(&settings.grpc, secrets.token.clone());
    let counters = Arc::clone(&process.counters[seat.core]);
    let shared = Shared {
        policy: Arc::clone(&shared.policy),
        table: Arc::clone(&shared.table),
        seed: shared.seed,
        facts: Arc::clone(&shared.facts),
    };
    let (process, pulse, up) = (Arc::clone(process), seat.pulse, seat.up);
    let running = Running::new(seat.running);
    let cores = process.cpus.len();
    let depth = ring_depth(&process.settings, process.transport, cores);
    LocalExecutorBuilder::new(CpuPlacement::Fixed(process.cpus[seat.core]))
        .name(&format!("sluice-{}", seat.core))
        .preempt_timer(PREEMPT_TIMER)
        .io_memory(0)
        .ring_depth(depth)
        .blocking_thread_pool_placement(PoolPlacement::Unbound(1))
        .spawn(move || async move {
            let _running = running;
            let _heart = glommio::spawn_local(Arc::clone(&pulse).keep_alive());
            // glommio's first sleep may take tens of milliseconds; better now than for the first client.
            glommio::timer::sleep(Duration::from_nanos(1)).await;
            let heat = Heat::new(&process.settings.hot, &process.heat, port.core, shared.seed);
            let mut engine = Engine::new(&shared, resp, counters, (port.core, cores)).with_heat(heat).with_web(web);
            if let Some(exchange) = &process.shadow {
                engine = engine.with_book(shadow::Book::new(Arc::clone(exchange)));
            }
            if let Some(plan) = &process.store {
                let (seed, times) = (plan.seed ^ port.core as u64, (plan.asker.deadline_us, port.clock.micros()));
                let redis = Redis::new(plan.client.clone(), &plan.shards, port.core, seed, times)
                    .map_err(|error| io::Error::other(error.to_string()))?;
                engine = engine.with_store(plan.asker, &plan.shards, redis);
            }
            serve_core(&process, port, engine, &pulse, up).await
        })
        .map_err(|error| ServerError::Start { what: format!("core {}", seat.core), error: error.to_string() })
}

async fn serve_core(
    process: &Process,
    port: Port,
    engine: Engine,
    pulse: &Arc<Pulse>,
    up: mpsc::Sender<()>,
) -> io::Result<()> {
    if process.transport == TransportChoice::Plain {
        report(up);
        return plain::run(port, engine, pulse).await;
    }
    let driver = Driver::new(port, engine)?;
    report(up);
    driver.run(pulse).await
}

/// Tells the shell that a core listens. The sender goes with it: when a core has failed, the others' must not keep the
/// shell waiting for it.
#[allow(clippy::needless_pass_by_value, reason = "to be dropped is what it is passed for")]
fn report(up: mpsc::Sender<()>) {
    let _ = up.send(());
}

/// The transport that this kernel can do. Asked before the executors start, because the size of their rings depends on it.
fn choose_transport(settings: &Settings) -> Result<TransportChoice, ServerError> {
    let chosen = match settings.transport.kind {
        TransportChoice::Plain => TransportChoice::Plain,
        wanted => match (Driver::probe(&transport_settings(settings)), wanted) {
            (Ok(()), _) => TransportChoice::Ring,
            (Err(error), TransportChoice::Ring) => return Err(ServerError::Ring(error)),
            (Err(error), _) => {
                tracing::warn!(%error, "this kernel lacks what the ring transport needs; using the plain one");
                TransportChoice::Plain
            }
        },
    };
    tracing::info!(transport = ?chosen, "transport");
    Ok(chosen)
}

fn transport_settings(settings: &Settings) -> TransportSettings {
    TransportSettings {
        idle_timeout_ms: settings.limits.idle_timeout_ms,
        stall_timeout_ms: settings.limits.stall_timeout_ms,
        busy_poll_us: settings.transport.busy_poll_us,
        ring_buffers: settings.transport.ring_buffers,
        ring_buffer_bytes: settings.transport.ring_buffer_bytes,
        ring_entries: settings.transport.ring_entries,
    }
}

fn resp_settings(settings: &Settings, password: Option<Arc<str>>) -> RespSettings {
    RespSettings {
        request: RequestLimits {
            args_max: settings.resp.args_max,
            arg_bytes_max: settings.resp.arg_bytes_max,
            request_bytes_max: settings.resp.request_bytes_max,
        },
        output_backlog_bytes: settings.resp.output_backlog_bytes,
        password,
    }
}

/// glommio's own ring has an entry per wait: with the plain transport each connection waits in it.
fn ring_depth(settings: &Settings, transport: TransportChoice, cores: usize) -> usize {
    let waits = match transport {
        TransportChoice::Plain => settings.limits.connections_max.div_ceil(cores),
        TransportChoice::Ring | TransportChoice::Auto => DATA_RING_DEPTH,
    };
    waits.clamp(DATA_RING_DEPTH, RING_DEPTH_MAX).next_power_of_two()
}

fn join(cores: Vec<CoreHandle>) -> Result<(), ServerError> {
    let mut outcome = Ok(());
    for (core, handle) in cores.into_iter().enumerate() {
        let result = match handle.join() {
            Ok(result) => result,
            Err(error) => Err(io::Error::other(error.to_string())),
        };
        if let Err(error) = result {
            outcome = Err(ServerError::Core { core, error });
        }
    }
    outcome
}

/// Waits for the executors that serve no checks, but not for ever: what it is reading may not come, and nobody needs it any more.
fn join_control(control: Vec<ExecutorJoinHandle<()>>, orders: &Orders, grace: Duration) -> Result<(), ServerError> {
    let failed = |error: String| ServerError::Start { what: "control".into(), error };
    let (done, ended) = mpsc::channel();
    std::thread::Builder::new()
        .name("sluice-join".into())
        .spawn(move || {
            let ended = control.into_iter().try_for_each(|one| one.join().map_err(|error| error.to_string()));
            let _ = done.send(ended);
        })
        .map_err(|error| failed(error.to_string()))?;
    let beats = grace.max(CONTROL_GRACE_MIN).as_millis() / BEAT.as_millis();
    for _ in 0..beats {
        match ended.recv_timeout(BEAT) {
            Ok(outcome) => return outcome.map_err(failed),
            Err(mpsc::RecvTimeoutError::Timeout) => orders.beat(),
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
        }
    }
    tracing::warn!("the control executor does not end: leaving without it");
    Ok(())
}

/// glommio ends the process with a bare message where io_uring is missing, so this asks first.
fn check_io_uring() -> Result<(), ServerError> {
    io_uring::IoUring::new(2).map(drop).map_err(ServerError::IoUring)
}

/// The kernel's numbers of the cores that serve checks.
pub(crate) fn data_cpus(wanted: &Cores) -> Result<Vec<usize>, String> {
    let usable: Vec<usize> = glommio::CpuSet::online()
        .map_err(|error| error.to_string())?
        .filter(|location| is_usable(location.cpu))
        .iter()
        .map(|location| location.cpu)
        .collect();
    let mut usable = usable;
    usable.sort_unstable();
    let cpus = match wanted {
        Cores::Count(0) => usable,
        Cores::Count(count) if *count <= usable.len() => usable[..*count].to_vec(),
        Cores::Count(count) => {
            return Err(format!("{count} are asked for, and this process may use {}", usable.len()));
        }
        Cores::List(list) => {
            if let Some(missing) = list.iter().find(|cpu| !usable.contains(cpu)) {
                return Err(format!("core {missing} is not among those that this process may use: {usable:?}"));
            }
            let mut list = list.clone();
            list.sort_unstable();
            list.dedup();
            list
        }
    };
    if cpus.is_empty() || cpus.len() > CORES_MAX {
        return Err(format!("from 1 to {CORES_MAX} cores can serve, not {}", cpus.len()));
    }
    Ok(cpus)
}

/// Whether the process may run on this core: containers and taskset restrict it.
fn is_usable(cpu: usize) -> bool {
    affinity().is_none_or(|mask| mask.contains(&cpu))
}

/// The cores of `Cpus_allowed_list` in /proc/self/status, such as `0-3,8`.
fn affinity() -> Option<Vec<usize>> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    let mut cpus = Vec::new();
    for part in list.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        cpus.extend(first.parse::<usize>().ok()?..=last.parse().ok()?);
    }
    Some(cpus)
}

/// Where a face listens, for people.
fn port(address: Option<std::net::SocketAddr>) -> String {
    address.map_or_else(|| "off".into(), |address| address.port().to_string())
}

impl Facts for Process {
    fn is_serving(&self) -> bool {
        self.lifecycle.stage() == Stage::Serving
    }

    fn ports(&self) -> String {
        format!(
            "This is the RESP port of Sluice, which speaks the Redis protocol: try redis-cli -p {resp}.\n\
             HTTP is spoken on port {http} (POST /v1/check, /v1/forward-auth), gRPC on port {grpc}, and on the ops port, {ops}, \
             there are /healthz, /readyz, /v1/status and /metrics.\n",
            resp = self.resp_address.port(),
            http = port(self.http_address),
            grpc = port(self.grpc_address),
            ops = self.ops_address.port(),
        )
    }

    fn info(&self) -> String {
        let policy = self.policy.load();
        let sum = |read: fn(&CoreCounters) -> u64| self.counters.iter().map(|core| read(core)).sum::<u64>();
        format!(
            "# Server\r\nsluice_version:{}\r\nprocess_id:{}\r\ntcp_port:{}\r\nuptime_in_seconds:{}\r\ncores:{}\r\n\r\n\
             # Clients\r\nconnected_clients:{}\r\nmaxclients:{}\r\nblocked_clients:0\r\n\r\n\
             # Memory\r\nused_memory:{}\r\n\r\n\
             # Stats\r\ntotal_connections_received:{}\r\ntotal_commands_processed:{}\r\ntotal_checks:{}\r\n\
             total_denied:{}\r\n\r\n\
             # Policy\r\npolicy_version:{}\r\nrules:{}\r\noverrides:{}\r\n",
            env!("CARGO_PKG_VERSION"),
            std::process::id(),
            self.resp_address.port(),
            self.clock.now().mono_ms / 1000,
            self.cpus.len(),
            (0..self.placement.cores()).map(|core| self.placement.connections(core)).sum::<usize>(),
            self.settings.limits.connections_max,
            system::resident_bytes().unwrap_or_default(),
            sum(|core| core.connections_opened.value()),
            // Those that are counted: what is asked once per connection (PING, HELLO, AUTH and the like) is not.
            sum(|core| {
                core.checks.value()
                    + core.throttles_allowed.value()
                    + core.throttles_denied.value()
                    + core.command_errors.value()
            }),
            sum(|core| core.checks.value()),
            sum(|core| core.denied.value()),
            policy.policy.version,
            policy.policy.rules.len(),
            policy.policy.overrides.len(),
        )
    }
}
