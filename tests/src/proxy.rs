//! A TCP proxy that spoils what passes through it: late, silent, cut, or garbled replies.
//!
//! Requests pass as they are. Replies pass through a line that each connection has: one thread reads them from upstream
//! and notes when each chunk came, another hands them on when the fault in force allows it. So a delay makes every reply
//! late and none slower, and silence can end without a byte lost. A chunk is what one read from upstream returned.
//!
//! A client that closes its half is taken for gone, as Redis itself takes it: what waits for it is dropped.
//!
//! Everything is bounded: connections, and chunks in a line. When a line is full, the proxy stops reading from upstream.

use std::{
    io::{ErrorKind, Read, Write},
    net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Condvar, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use socket2::SockRef;

use crate::{PATIENCE, redis_server::free_port};

/// How many connections live at the same time; further ones are closed at once. Each has three threads.
const CONNECTIONS_MAX: usize = 256;

/// How many bytes a chunk has at most.
const CHUNK_BYTES: usize = 16 * 1024;

/// How many chunks wait in a connection's line: 16 MiB if all are full.
const LINE_CHUNKS: usize = 1024;

/// How long a reply that its client does not read may block, before the proxy looks whether the connection was cut.
const WRITE_PAUSE: Duration = Duration::from_millis(20);

/// What is not RESP, in either version: no reply begins with a zero byte.
const GARBAGE: &[u8] = b"\0\xffthis is not a reply\r\n";

/// What the proxy does to replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Nothing.
    None,
    /// Each reply, and the end of the connection, leaves this much after it came. As many pass as without it.
    Delay(Duration),
    /// Connections are accepted and requests reach upstream, which acts on them, but no reply leaves. The replies wait
    /// and leave when the fault ends, in order, as after an outage of the network.
    Freeze,
    /// Of the next chunk this many bytes leave, then the connection is reset. 0 resets it instead of replying.
    ResetInReply {
        /// How many.
        after_bytes: usize,
    },
    /// Of the next chunk the first half leaves, and then nothing, for as long as the connection lives, even after the
    /// fault has ended. What comes from upstream is thrown away.
    HalfReplyThenSilence,
    /// Bytes that are not RESP leave instead of the next chunk. Once per connection each time it is set; the chunks that
    /// follow pass.
    Garbage,
    /// New connections are accepted and closed at once. Those that live go on as without a fault.
    RefuseConnections,
}

/// A running proxy. When it is dropped, its connections are cut and its port is free.
pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    listener: Option<JoinHandle<()>>,
}

struct Shared {
    upstream: SocketAddr,
    state: Mutex<State>,
    /// Signalled when the fault changes or a connection ends.
    changed: Condvar,
    closing: AtomicBool,
    connections: AtomicU64,
    bytes_up: AtomicU64,
    bytes_down: AtomicU64,
}

struct State {
    fault: Fault,
    /// How often a fault was set.
    setting: u64,
    /// Those that live.
    live: Vec<Arc<Connection>>,
}

struct Connection {
    /// Held in this one place, so that the reset leaves as soon as the last thread lets go.
    client: TcpStream,
    upstream: TcpStream,
    /// Changed under the lock of [`State`].
    ended: AtomicBool,
}

/// What was read from upstream at once. Empty at its end.
struct Chunk {
    came: Instant,
    bytes: Vec<u8>,
}

impl Proxy {
    /// Starts a proxy in front of this address, without a fault.
    pub fn start(upstream: SocketAddr) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, free_port())).expect("listening");
        let address = listener.local_addr().expect("its address");
        let shared = Arc::new(Shared {
            upstream,
            state: Mutex::new(State { fault: Fault::None, setting: 0, live: Vec::new() }),
            changed: Condvar::new(),
            closing: AtomicBool::new(false),
            connections: AtomicU64::new(0),
            bytes_up: AtomicU64::new(0),
            bytes_down: AtomicU64::new(0),
        });
        let listener = thread::spawn({
            let shared = shared.clone();
            move || accept(&listener, &shared)
        });
        Self { address, shared, listener: Some(listener) }
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Changes the fault, for connections that live as well as for new ones. Chunks that already wait are subject to the
    /// new fault only.
    pub fn set(&self, fault: Fault) {
        let mut state = self.shared.state();
        state.fault = fault;
        state.setting += 1;
        drop(state);
        self.shared.changed.notify_all();
    }

    /// Resets all connections that live, now. New ones are not affected.
    pub fn reset_connections(&self) {
        let live = self.shared.state().live.clone();
        live.iter().for_each(|connection| connection.reset(&self.shared));
    }

    /// How many connections came, those that were refused included.
    pub fn connections(&self) -> u64 {
        self.shared.connections.load(Ordering::Relaxed)
    }

    /// How many bytes clients sent.
    pub fn bytes_up(&self) -> u64 {
        self.shared.bytes_up.load(Ordering::Relaxed)
    }

    /// How many bytes left for clients, garbage included.
    pub fn bytes_down(&self) -> u64 {
        self.shared.bytes_down.load(Ordering::Relaxed)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::SeqCst);
        self.reset_connections();
        // Wakes the listener. It waits for the threads of the connections.
        let _ = TcpStream::connect(self.address);
        if let Some(listener) = self.listener.take() {
            let _ = listener.join();
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic while it was held")
    }

    fn is_closing(&self) -> bool {
        self.closing.load(Ordering::SeqCst)
    }

    /// Waits until a chunk that came then may leave; returns the fault that it is subject to and which setting that was.
    /// `None` where the connection has ended.
    fn wait_to_leave(&self, connection: &Connection, came: Instant) -> Option<(Fault, u64)> {
        let mut state = self.state();
        loop {
            let wait = match state.fault {
                Fault::Freeze => Duration::MAX,
                Fault::Delay(delay) => (came + delay).saturating_duration_since(Instant::now()),
                _ => Duration::ZERO,
            };
            if connection.has_ended() {
                return None;
            }
            if wait.is_zero() {
                return Some((state.fault, state.setting));
            }
            state = self.changed.wait_timeout(state, wait).expect("no panic while it was held").0;
        }
    }
}

impl Connection {
    /// The client sees ECONNRESET instead of an end, after what has left already.
    fn reset(&self, shared: &Shared) {
        let _ = SockRef::from(&self.client).set_linger(Some(Duration::ZERO));
        self.end(shared);
    }

    /// Wakes its threads. It sends nothing to the client: that is up to the close that follows.
    fn end(&self, shared: &Shared) {
        let state = shared.state();
        self.ended.store(true, Ordering::SeqCst);
        drop(state);
        shared.changed.notify_all();
        let _ = self.client.shutdown(Shutdown::Read);
        let _ = self.upstream.shutdown(Shutdown::Both);
    }

    fn has_ended(&self) -> bool {
        self.ended.load(Ordering::SeqCst)
    }

    /// Whether the client took all of it.
    fn send(&self, mut bytes: &[u8], shared: &Shared) -> bool {
        // Counted first: who has received it finds it counted.
        shared.bytes_down.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        while !bytes.is_empty() {
            match (&self.client).write(bytes) {
                Ok(len) => bytes = &bytes[len..],
                Err(error) if error.kind() == ErrorKind::WouldBlock && !self.has_ended() => {}
                Err(_) => return false,
            }
        }
        true
    }
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    let mut threads: Vec<JoinHandle<()>> = Vec::new();
    for client in listener.incoming() {
        if shared.is_closing() {
            break;
        }
        threads.retain(|thread| !thread.is_finished());
        let Ok(client) = client else { continue };
        shared.connections.fetch_add(1, Ordering::Relaxed);
        let refuses = shared.state().fault == Fault::RefuseConnections;
        if !refuses && threads.len() < CONNECTIONS_MAX {
            let shared = shared.clone();
            threads.push(thread::spawn(move || serve(client, &shared)));
        }
    }
    threads.into_iter().for_each(|thread| drop(thread.join()));
}

/// Serves one connection until both of its directions have ended.
fn serve(client: TcpStream, shared: &Shared) {
    let Ok(upstream) = TcpStream::connect_timeout(&shared.upstream, PATIENCE) else { return };
    let _ = (client.set_nodelay(true), upstream.set_nodelay(true));
    client.set_write_timeout(Some(WRITE_PAUSE)).expect("a timeout");
    let connection = Arc::new(Connection { client, upstream, ended: AtomicBool::new(false) });
    shared.state().live.push(connection.clone());
    // The proxy may have ended before the connection was among those that it cut.
    if shared.is_closing() {
        connection.reset(shared);
    }
    let (line_in, line_out) = sync_channel(LINE_CHUNKS);
    thread::scope(|scope| {
        scope.spawn(|| carry_up(&connection, shared));
        scope.spawn(|| fill_line(&connection, line_in));
        carry_down(&connection, line_out, shared);
    });
    shared.state().live.retain(|other| !Arc::ptr_eq(other, &connection));
}

/// Requests, as they are.
fn carry_up(connection: &Connection, shared: &Shared) {
    let mut bytes = vec![0; CHUNK_BYTES];
    loop {
        match (&connection.client).read(&mut bytes) {
            Ok(0) | Err(_) => break connection.end(shared),
            Ok(len) => {
                shared.bytes_up.fetch_add(len as u64, Ordering::Relaxed);
                if (&connection.upstream).write_all(&bytes[..len]).is_err() {
                    break connection.end(shared);
                }
            }
        }
    }
}

/// Replies, into the line.
#[expect(clippy::needless_pass_by_value, reason = "the line ends with its only writer")]
fn fill_line(connection: &Connection, line: SyncSender<Chunk>) {
    let mut bytes = vec![0; CHUNK_BYTES];
    loop {
        let len = (&connection.upstream).read(&mut bytes).unwrap_or(0);
        let chunk = Chunk { came: Instant::now(), bytes: bytes[..len].to_vec() };
        if line.send(chunk).is_err() || len == 0 {
            break;
        }
    }
}

/// Replies, out of the line, which ends with this: a writer that waits for room goes on.
fn carry_down(connection: &Connection, line: Receiver<Chunk>, shared: &Shared) {
    let send = |bytes: &[u8]| connection.send(bytes, shared);
    let mut silent = false;
    let mut garbled_in = None;
    for Chunk { came, bytes } in line {
        let Some((fault, setting)) = shared.wait_to_leave(connection, came) else { return };
        if bytes.is_empty() {
            return drop(connection.client.shutdown(Shutdown::Write));
        }
        let goes_on = match fault {
            _ if silent => true,
            Fault::ResetInReply { after_bytes } => {
                send(&bytes[..after_bytes.min(bytes.len())]);
                return connection.reset(shared);
            }
            Fault::HalfReplyThenSilence => {
                silent = true;
                send(&bytes[..bytes.len() / 2])
            }
            Fault::Garbage if garbled_in != Some(setting) => {
                garbled_in = Some(setting);
                send(GARBAGE)
            }
            _ => send(&bytes),
        };
        if !goes_on {
            return connection.end(shared);
        }
    }
}
