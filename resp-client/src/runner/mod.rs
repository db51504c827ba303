//! The client on glommio: tasks that connect, read and write, a timer, and calls to await.
//!
//! ```text
//!   call ──► Client ──► poll_action ──► the actor: a task per link, which connects, then reads and writes
//!                   ──► poll_output ──► the actor: wakes the link's task
//!            received ◄── the link's task          tick ◄── the timer
//! ```
//!
//! For who has no driver of their own; every reply costs an allocation or two here, and every wait one of glommio's. The
//! sockets are glommio's streams; host names are looked up on its pool of blocking threads, not on the core.

mod event;
mod io;
mod subscriber;

use std::{
    cell::{Cell, Ref, RefCell},
    collections::HashMap,
    pin::Pin,
    rc::Rc,
    task::{Context, Poll, Waker},
    time::{Duration, Instant},
};

use futures_lite::future;
use glommio::{Task, spawn_local, timer::Timer};

pub use self::subscriber::hear;

use self::event::LocalEvent;
use crate::{
    Action, CallError, Client, Completion, Config, LinkId, Micros, OwnedError, OwnedReply, ScriptId, ShardIndex,
    TlsError, key_slot,
};

/// The longest sleep of the timer while nothing is due.
const IDLE_MS: u64 = 100;

/// A client on this executor. Clones share it; when the last is gone, its connections close.
#[derive(Clone)]
pub struct Runner {
    shared: Rc<Shared>,
    _tasks: Rc<[Task<()>; 2]>,
}

struct Shared {
    client: RefCell<Client>,
    calls: RefCell<Calls>,
    started: Instant,
    deadline: Micros,
    /// There is something for the actor.
    work: LocalEvent,
    /// The timer may be sleeping too long.
    sooner: LocalEvent,
    /// When the timer wakes up.
    planned: Cell<Micros>,
    links: RefCell<HashMap<usize, LinkTask>>,
    /// Something changed about who is up.
    changed: LocalEvent,
}

/// What waits for completions.
#[derive(Default)]
struct Calls {
    next: u64,
    open: HashMap<u64, Call>,
}

enum Call {
    Waiting(Option<Waker>),
    Done(Result<OwnedReply, OwnedError>),
}

struct LinkTask {
    id: LinkId,
    output: Rc<LocalEvent>,
    _task: Task<()>,
}

impl Runner {
    /// Starts a client on the executor that this is called on. `deadline_ms` is that of every call.
    pub fn start(config: Config, deadline_ms: u64) -> Result<Self, TlsError> {
        let seed = getrandom::u64().unwrap_or(u64::from(std::process::id()));
        let shared = Rc::new(Shared {
            client: RefCell::new(Client::new(config, seed, Micros(0))?),
            calls: RefCell::default(),
            started: clock(),
            deadline: Micros::from_millis(deadline_ms),
            work: LocalEvent::default(),
            sooner: LocalEvent::default(),
            planned: Cell::new(Micros(0)),
            links: RefCell::default(),
            changed: LocalEvent::default(),
        });
        let tasks = [spawn_local(act(Rc::clone(&shared))), spawn_local(tick(Rc::clone(&shared)))];
        Ok(Self { shared, _tasks: Rc::new(tasks) })
    }

    /// Makes a call whose second word is its key, as it is of most commands, and awaits the reply.
    pub async fn call(&self, words: &[&[u8]]) -> Result<OwnedReply, OwnedError> {
        self.call_at(words.get(1).map(|key| key_slot(key)), words).await
    }

    /// Makes a call to the shard of a slot, or to any shard, and awaits the reply.
    pub async fn call_at(&self, slot: Option<u16>, words: &[&[u8]]) -> Result<OwnedReply, OwnedError> {
        self.begin(|client, now, token, deadline| {
            client.call(now, slot, token, deadline, |command| {
                command.words(words.iter().copied());
            })
        })?
        .await
    }

    /// Calls a script of the settings, and awaits the reply. The keys must be in one slot.
    pub async fn script(&self, script: ScriptId, keys: &[&[u8]], args: &[&[u8]]) -> Result<OwnedReply, OwnedError> {
        let slot = keys.first().map(|key| key_slot(key));
        self.begin(|client, now, token, deadline| {
            client.evalsha(now, slot, token, deadline, script, keys.len(), |command| {
                command.words(keys.iter().chain(args).copied());
            })
        })?
        .await
    }

    /// Waits until every slot has a shard that is up; `false` if that takes longer.
    pub async fn ready(&self, patience: Duration) -> bool {
        let shared = Rc::clone(&self.shared);
        let up = async {
            while !shared.client.borrow().is_ready() {
                shared.changed.wait().await;
            }
            true
        };
        let late = async {
            Timer::new(patience).await;
            false
        };
        future::or(up, late).await
    }

    /// The client: its counters, shards and settings.
    pub fn client(&self) -> Ref<'_, Client> {
        self.shared.client.borrow()
    }

    /// The name of each shard, and why it is not up, if it is not.
    pub fn shards(&self) -> Vec<(String, Option<String>)> {
        let client = self.client();
        let shards = (0..client.shards()).map(|shard| ShardIndex(u16::try_from(shard).unwrap_or(u16::MAX)));
        shards
            .map(|shard| {
                let problem = client.shard_problem(shard).map(ToString::to_string);
                (client.shard_name(shard).to_owned(), problem)
            })
            .collect()
    }

    /// Makes a call; what it returns waits for the completion.
    fn begin(
        &self,
        call: impl FnOnce(&mut Client, Micros, u64, Micros) -> Result<(), CallError>,
    ) -> Result<Awaited, OwnedError> {
        let shared = Rc::clone(&self.shared);
        let now = shared.now();
        let token = {
            let mut calls = shared.calls.borrow_mut();
            calls.next += 1;
            calls.next
        };
        let deadline = now + shared.deadline;
        call(&mut shared.client.borrow_mut(), now, token, deadline)?;
        shared.calls.borrow_mut().open.insert(token, Call::Waiting(None));
        shared.work.set();
        if deadline < shared.planned.get() {
            shared.sooner.set();
        }
        Ok(Awaited { shared, token })
    }
}

/// A call in flight. Dropped before its end, it is let go: its completion reaches nobody.
struct Awaited {
    shared: Rc<Shared>,
    token: u64,
}

impl Future for Awaited {
    type Output = Result<OwnedReply, OwnedError>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.shared.calls.borrow_mut().poll(self.token, context.waker())
    }
}

impl Drop for Awaited {
    fn drop(&mut self) {
        self.shared.calls.borrow_mut().open.remove(&self.token);
    }
}

impl Calls {
    fn poll(&mut self, token: u64, waker: &Waker) -> Poll<Result<OwnedReply, OwnedError>> {
        match self.open.get_mut(&token) {
            Some(Call::Waiting(waiting)) => {
                *waiting = Some(waker.clone());
                Poll::Pending
            }
            Some(Call::Done(_)) => match self.open.remove(&token) {
                Some(Call::Done(outcome)) => Poll::Ready(outcome),
                _ => Poll::Pending,
            },
            None => Poll::Pending,
        }
    }

    fn complete(&mut self, completion: Completion<'_>) {
        let Some(call) = self.open.get_mut(&completion.token) else { return };
        let outcome = completion.outcome.map(OwnedReply::from).map_err(OwnedError::from);
        if let Call::Waiting(Some(waker)) = std::mem::replace(call, Call::Done(outcome)) {
            waker.wake();
        }
    }
}

impl Shared {
    fn now(&self) -> Micros {
        let micros = clock().duration_since(self.started).as_micros();
        Micros(u64::try_from(micros).unwrap_or(u64::MAX))
    }

    /// Lets the client do something, and hands its completions out.
    fn with(&self, act: impl FnOnce(&mut Client, Micros, &mut dyn FnMut(Completion<'_>))) {
        let mut calls = self.calls.borrow_mut();
        act(&mut self.client.borrow_mut(), self.now(), &mut |completion| calls.complete(completion));
        drop(calls);
        self.work.set();
        self.changed.set();
    }
}

#[expect(clippy::disallowed_methods, reason = "the runner is the shell that has a clock")]
fn clock() -> Instant {
    Instant::now()
}

/// Does what the client asks for.
async fn act(shared: Rc<Shared>) {
    loop {
        while let Some(action) = { shared.client.borrow_mut().poll_action() } {
            match action {
                Action::Connect { link, address } => {
                    let output = Rc::new(LocalEvent::default());
                    // The task must not keep its own handle alive, nor the runner.
                    let task = spawn_local(io::run(Rc::downgrade(&shared), link, address, Rc::clone(&output)));
                    let index = link.index();
                    shared.links.borrow_mut().insert(index, LinkTask { id: link, output, _task: task });
                }
                Action::Close { link } => {
                    let mut links = shared.links.borrow_mut();
                    if links.get(&link.index()).is_some_and(|task| task.id == link) {
                        links.remove(&link.index());
                    }
                }
            }
        }
        while let Some(link) = { shared.client.borrow_mut().poll_output() } {
            if let Some(task) = shared.links.borrow().get(&link.index()).filter(|task| task.id == link) {
                task.output.set();
            }
        }
        shared.work.wait().await;
    }
}

/// Lets the client do what time brings.
async fn tick(shared: Rc<Shared>) {
    loop {
        shared.with(|client, now, mut on| client.tick(now, &mut on));
        let now = shared.now();
        let next = shared.client.borrow().next_tick().map_or(Micros::NEVER, |next| next.since(now));
        let sleep = Micros(next.0.clamp(200, IDLE_MS * 1000));
        shared.planned.set(now + sleep);
        future::or(
            async {
                Timer::new(Duration::from_micros(sleep.0)).await;
            },
            shared.sooner.wait(),
        )
        .await;
    }
}
