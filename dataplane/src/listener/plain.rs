//! The plain transport: glommio's own streams, a task per connection. It asks of the kernel only what glommio itself
//! needs, and costs a poll, a receive and a send per wake-up of each connection.
#![allow(unsafe_code)]

mod links;

use std::{
    cell::RefCell,
    future::poll_fn,
    io,
    os::fd::{AsFd, FromRawFd, IntoRawFd, OwnedFd},
    pin::Pin,
    rc::Rc,
    sync::Arc,
    task::{Poll, Waker},
    time::Duration,
};

use futures_lite::{AsyncRead, AsyncWriteExt};
use glommio::{Task, net::TcpStream, spawn_local};
use slab::Slab;

use self::links::Links;
use super::{
    Face, GIVE_BACK_MS, GOODBYE_BYTES_MAX, GOODBYE_MS, Port, QUIET_MS, STUCK_MS, park, park::Pulse, placement::Placed,
    sockets,
};
use crate::{
    engine::{ConnId, Engine, Flow},
    lifecycle::Stage,
};

/// Bytes that one receive takes at most.
const RECEIVE_BYTES: usize = 16 * 1024;
/// Connections that a listener accepts before others get their turn.
const ACCEPTS_AT_ONCE: usize = 16;
/// After an accept that failed, how long until the next.
const ACCEPT_AGAIN: Duration = Duration::from_millis(250);

/// What the tasks of a core share.
struct Core {
    port: Port,
    engine: Engine,
    sockets: Slab<Socket>,
    links: Links,
    pulse: Arc<Pulse>,
}

/// What the survey must know of a connection.
struct Socket {
    /// A second descriptor of the same socket: shutting it down wakes the connection's task.
    handle: OwnedFd,
    heard_at_ms: u64,
    /// Since when a write waits, if one does.
    writing_since_ms: Option<u64>,
    /// What the client had not taken when it was last suspected of taking nothing.
    untaken_bytes: u32,
    /// When our side of the connection was closed after the last reply, if it was.
    said_goodbye_at_ms: Option<u64>,
    /// What came since and was thrown away.
    discarded_bytes: usize,
    /// Wakes the connection's task when the store has answered.
    waker: Option<Waker>,
}

impl Socket {
    /// Closes our half of a connection that is owed nothing: closing outright would throw away replies that the client has
    /// not read yet.
    fn say_goodbye(&mut self, now_ms: u64) {
        if self.said_goodbye_at_ms.is_none() {
            self.said_goodbye_at_ms = Some(now_ms);
            let _ = socket2::SockRef::from(&self.handle).shutdown(std::net::Shutdown::Write);
        }
    }
}

type Shared = Rc<RefCell<Core>>;

/// Serves until the lifecycle says that it is over.
///
/// # Errors
///
/// When the doorbell or a listener cannot be waited for.
pub async fn run(mut port: Port, engine: Engine, pulse: &Arc<Pulse>) -> io::Result<()> {
    let listeners: Vec<_> =
        std::mem::take(&mut port.listeners).into_iter().map(|(listener, face)| (Rc::new(listener), face)).collect();
    let (placement, index) = (port.placement.clone(), port.core);
    let core: Shared = Rc::new(RefCell::new(Core {
        port,
        engine,
        sockets: Slab::new(),
        links: Links::default(),
        pulse: Arc::clone(pulse),
    }));
    let mut accepting: Vec<_> = listeners
        .into_iter()
        .map(|(listener, face)| {
            (Some(spawn_local(accept(Rc::clone(&core), Rc::clone(&listener), face))), listener, face)
        })
        .collect();
    loop {
        while let Some((descriptor, face)) = placement.adopt(index) {
            open(&core, descriptor, face);
        }
        let closing = core.borrow().port.lifecycle.stage() == Stage::Closing;
        if closing && core.borrow().port.gate.is_some() {
            // It comes back for what is left if files run out.
            stop_accepting(&core, &mut accepting).await;
        }
        core.borrow_mut().survey(closing);
        if closing && core.borrow_mut().is_over() {
            return Ok(());
        }
        core.borrow_mut().tick();
        links::follow(&core);
        let doorbell = placement.doorbell(index);
        park::sleep(doorbell.descriptor().as_fd(), Some(pulse)).await;
        doorbell.silence();
    }
}

/// Accepts until cancelled, whatever happens.
async fn accept(core: Shared, listener: Rc<OwnedFd>, face: Face) {
    loop {
        match accept_waiting(&core, &listener, face) {
            Ok(Waiting::None) => park::sleep(listener.as_fd(), None).await,
            // The connections that are there get their turn.
            Ok(Waiting::More) => glommio::timer::sleep(Duration::from_nanos(1)).await,
            // Out of files, most likely. Trying again at once would only burn the core.
            Err(error) => {
                tracing::warn!(%error, "accept failed");
                glommio::timer::sleep(ACCEPT_AGAIN).await;
            }
        }
    }
}

/// What accepts from a listener.
type Accepting = (Option<Task<()>>, Rc<OwnedFd>, Face);

/// Takes what still waits and closes the listeners: whoever has connected is served.
async fn stop_accepting(core: &Shared, accepting: &mut Vec<Accepting>) {
    core.borrow_mut().port.socket_file = None;
    while let Some((task, listener, face)) = accepting.last_mut() {
        if let Some(task) = task.take() {
            task.cancel().await;
        }
        loop {
            match accept_waiting(core, listener, *face) {
                Ok(Waiting::More) => {}
                Ok(Waiting::None) => break,
                // Out of files: those that leave make room.
                Err(_) => return,
            }
        }
        sockets::close(listener);
        accepting.pop();
    }
    core.borrow_mut().port.gate = None;
}

/// What a listener has left after some were accepted.
#[derive(PartialEq)]
enum Waiting {
    None,
    More,
}

/// Accepts connections that wait, some at a time.
fn accept_waiting(core: &Shared, listener: &OwnedFd, face: Face) -> io::Result<Waiting> {
    for _ in 0..ACCEPTS_AT_ONCE {
        let Some(socket) = sockets::accept(listener)? else { return Ok(Waiting::None) };
        let placed = {
            let core = core.borrow();
            core.port.placement.place(core.port.core, socket, face)
        };
        match placed {
            Placed::Here(descriptor) => open(core, descriptor, face),
            Placed::There => {}
            Placed::Refused(descriptor) => {
                core.borrow().engine.counters().connections_refused.add(1);
                sockets::refuse(&descriptor, face);
            }
        }
    }
    Ok(Waiting::More)
}

fn open(core: &Shared, descriptor: OwnedFd, face: Face) {
    let peer = if face == Face::Web { sockets::peer(&descriptor) } else { None };
    sockets::send_at_once(&descriptor);
    let _ = socket2::SockRef::from(&descriptor).set_nonblocking(true);
    let mut borrowed = core.borrow_mut();
    let Ok(handle) = descriptor.try_clone() else {
        let index = borrowed.port.core;
        borrowed.port.placement.left(index);
        return;
    };
    let heard_at_ms = borrowed.port.clock.now().mono_ms;
    let slot = borrowed.sockets.insert(Socket {
        handle,
        heard_at_ms,
        writing_since_ms: None,
        untaken_bytes: 0,
        said_goodbye_at_ms: None,
        discarded_bytes: 0,
        waker: None,
    });
    let conn = ConnId(slot as u32);
    match face {
        Face::Resp => borrowed.engine.opened(conn),
        Face::Web => borrowed.engine.opened_web(conn, peer),
    }
    drop(borrowed);
    // SAFETY: the descriptor is open, and the stream becomes its only owner. Receive and send are the same for TCP and
    // for Unix sockets.
    let stream = unsafe { TcpStream::from_raw_fd(descriptor.into_raw_fd()) };
    let core = Rc::clone(core);
    spawn_local(async move {
        // An error of the socket ends the connection, which is all there is to do about it.
        let _ = serve(&core, conn, stream).await;
        let mut core = core.borrow_mut();
        core.engine.closed(conn);
        core.sockets.remove(conn.index());
        core.port.placement.left(core.port.core);
    })
    .detach();
}

async fn serve(core: &Shared, conn: ConnId, mut stream: TcpStream) -> io::Result<()> {
    let mut input = vec![0; RECEIVE_BYTES];
    let mut output = Vec::new();
    let mut finished = false;
    loop {
        // The store may answer what was asked before while nothing new comes.
        match heard(core, conn, &mut stream, &mut input, finished).await? {
            Heard::Bytes(len) => {
                let mut core = core.borrow_mut();
                core.hear(conn, &input[..len]);
                if core.sockets[conn.index()].discarded_bytes > GOODBYE_BYTES_MAX {
                    return Ok(());
                }
            }
            // The client has heard our goodbye, or it has had the time for it.
            Heard::End if core.borrow().sockets[conn.index()].said_goodbye_at_ms.is_some() => return Ok(()),
            Heard::End => finished = true,
            Heard::Answer => {}
        }
        loop {
            let flow = core.borrow_mut().answer(conn, &mut output);
            links::follow(core);
            if output.is_empty() {
                if core.borrow().engine.owes(conn) {
                    break;
                }
                match flow {
                    Flow::Open | Flow::Closing if finished => return Ok(()),
                    Flow::Open => break,
                    Flow::Closing => {
                        core.borrow_mut().say_goodbye(conn);
                        break;
                    }
                    Flow::Paused => {
                        core.borrow_mut().engine.resume(conn);
                        continue;
                    }
                }
            }
            stream.write_all(&output).await?;
            output.clear();
            core.borrow_mut().sockets[conn.index()].writing_since_ms = None;
        }
    }
}

/// What woke a connection's task.
enum Heard {
    /// So many bytes from the client.
    Bytes(usize),
    /// The client has sent everything that it will.
    End,
    /// The store has answered.
    Answer,
}

/// Waits for bytes of the client, unless it has sent its last or must not be read from, or for an answer of the store.
async fn heard(
    core: &Shared,
    conn: ConnId,
    stream: &mut TcpStream,
    input: &mut [u8],
    finished: bool,
) -> io::Result<Heard> {
    poll_fn(|context| {
        let mut core = core.borrow_mut();
        if core.engine.has_output(conn) {
            return Poll::Ready(Ok(Heard::Answer));
        }
        core.sockets[conn.index()].waker = Some(context.waker().clone());
        // One that is told goodbye is read from to see when its client has heard it.
        let parts = core.sockets[conn.index()].said_goodbye_at_ms.is_some();
        let may_read = !finished && (parts || core.engine.flow(conn) == Flow::Open);
        drop(core);
        if !may_read {
            return Poll::Pending;
        }
        match Pin::new(&mut *stream).poll_read(context, input) {
            Poll::Ready(Ok(0)) => Poll::Ready(Ok(Heard::End)),
            Poll::Ready(Ok(len)) => Poll::Ready(Ok(Heard::Bytes(len))),
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}

impl Core {
    fn hear(&mut self, conn: ConnId, bytes: &[u8]) {
        let now = self.port.clock.now();
        self.engine.tick(now);
        let socket = &mut self.sockets[conn.index()];
        socket.heard_at_ms = now.mono_ms;
        if socket.said_goodbye_at_ms.is_some() || self.port.lifecycle.is_deaf(now.mono_ms) {
            socket.discarded_bytes += bytes.len();
        } else {
            self.engine.bytes_in(conn, bytes);
        }
    }

    fn say_goodbye(&mut self, conn: ConnId) {
        let now_ms = self.port.clock.now().mono_ms;
        self.sockets[conn.index()].say_goodbye(now_ms);
    }

    /// Lets the engine do what time brings, and wakes the connections for which that changed something.
    fn tick(&mut self) {
        let now = self.port.clock.now();
        self.engine.tick(now);
        self.wake();
    }

    /// Tells the engine something about a shard's connection, and wakes those for whom that changed something.
    fn act(&mut self, act: impl FnOnce(&mut Engine)) {
        let now = self.port.clock.now();
        self.engine.tick(now);
        act(&mut self.engine);
        self.wake();
    }

    /// Asks the store what was asked of us, and wakes the connections that have got an answer.
    fn wake(&mut self) {
        loop {
            self.engine.settle();
            while let Some((conn, _)) = self.engine.next_dirty() {
                let waker = self.sockets.get_mut(conn.index()).and_then(|socket| socket.waker.take());
                if let Some(waker) = waker {
                    waker.wake();
                }
            }
            if !self.engine.flush_store() {
                // Deadlines are kept by the main task, which sleeps until it is nudged.
                self.pulse.be_eager(self.engine.needs_ticks());
                return;
            }
        }
    }

    /// Decides what was read and moves the replies of this connection into `output`.
    fn answer(&mut self, conn: ConnId, output: &mut Vec<u8>) -> Flow {
        self.wake();
        if self.engine.has_output(conn) {
            self.engine.take_output(conn, output);
            self.sockets[conn.index()].writing_since_ms = Some(self.port.clock.now().mono_ms);
        }
        self.engine.flow(conn)
    }

    /// While leaving: whether the last connection is gone or the time is up.
    fn is_over(&mut self) -> bool {
        let left_ms = self.port.lifecycle.closing_until_ms().saturating_sub(self.port.clock.now().mono_ms);
        let nobody_asks = self.port.placement.is_over(self.port.core) && self.sockets.is_empty();
        if nobody_asks || left_ms <= GIVE_BACK_MS {
            self.engine.leave();
        }
        left_ms == 0 || (nobody_asks && self.engine.has_left())
    }

    /// Looks over all connections for those that have been silent or stuck for too long, and for those that can go
    /// while the server leaves.
    fn survey(&mut self, closing: bool) {
        self.port.clock.resync();
        let now_ms = self.port.clock.now().mono_ms;
        let settings = self.port.settings;
        let is_deaf = self.port.lifecycle.is_deaf(now_ms);
        for (slot, socket) in &mut self.sockets {
            if closing {
                self.engine.part(ConnId(slot as u32));
            }
            let silent_ms = now_ms.saturating_sub(socket.heard_at_ms);
            if socket.writing_since_ms.is_some_and(|since_ms| now_ms.saturating_sub(since_ms) >= STUCK_MS)
                && let Some(bytes) = sockets::untaken_bytes(&socket.handle)
            {
                if bytes < socket.untaken_bytes {
                    socket.writing_since_ms = Some(now_ms);
                }
                socket.untaken_bytes = bytes;
            }
            let stuck_ms = socket.writing_since_ms.map_or(0, |since_ms| now_ms.saturating_sub(since_ms));
            let busy = socket.writing_since_ms.is_some() || self.engine.owes(ConnId(slot as u32));
            let socket_ref = socket2::SockRef::from(&socket.handle);
            if let Some(at_ms) = socket.said_goodbye_at_ms {
                // A client that keeps its connection all the same has had time to read.
                if now_ms.saturating_sub(at_ms) >= GOODBYE_MS {
                    let _ = socket_ref.shutdown(std::net::Shutdown::Both);
                }
            } else if settings.stall_timeout_ms > 0 && stuck_ms >= settings.stall_timeout_ms {
                self.engine.counters().connections_stalled.add(1);
                let _ = socket_ref.shutdown(std::net::Shutdown::Both);
            } else if self.engine.is_overdue(ConnId(slot as u32))
                || (settings.idle_timeout_ms > 0 && !busy && silent_ms >= settings.idle_timeout_ms)
            {
                self.engine.counters().connections_idle.add(1);
                let _ = socket_ref.shutdown(std::net::Shutdown::Both);
            } else if closing
                && !busy
                // Not silent is whoever has not been heard because there was so much else to do.
                && (is_deaf || (silent_ms >= QUIET_MS && !sockets::has_unread(&socket.handle)))
            {
                socket.say_goodbye(now_ms);
            }
        }
    }
}
