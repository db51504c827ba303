//! A bare io_uring echo: what one core can do with these bytes when it does nothing else.
//!
//! Sluice is measured against it with the same requests on the same core (`perf/compare`): what an echo costs is what the
//! kernel takes for moving bytes, and the rest is Sluice's. So this is as fast as we could make it: bytes go out from the
//! very buffer in which they came in, all sends of a round leave in one system call, and that call waits for the next.
//!
//! A buffer is the kernel's until a receive completes with it, then a connection's until its send has completed, then
//! the kernel's again. Each connection has one send in flight, so that bytes stay in order. A client that does not read
//! holds its buffers; when all are held, nobody is read from until it does.
#![allow(clippy::print_stderr, reason = "a command line program")]

use std::{
    collections::VecDeque,
    io,
    net::SocketAddr,
    ops::Range,
    os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
    path::PathBuf,
    process::ExitCode,
};

use clap::Parser;
use sluice_echo::{
    cpu,
    ring::{Completion, Ring},
};
use socket2::{Domain, SockAddr, SockRef, Socket, Type};

/// Sends back what it receives: one thread, one io_uring.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// Core to run on.
    #[arg(long, value_name = "N")]
    core: Option<usize>,
    /// TCP address to listen on.
    #[arg(long, value_name = "ADDR")]
    listen: Option<SocketAddr>,
    /// Unix socket to listen on.
    #[arg(long, value_name = "PATH", required_unless_present = "listen")]
    unix: Option<PathBuf>,
    /// Receive buffers; a power of two.
    #[arg(long, default_value_t = 256, value_name = "N")]
    buffers: u16,
    /// Bytes of each.
    #[arg(long, default_value_t = 16 * 1024, value_name = "BYTES")]
    buffer_bytes: u32,
}

/// What a completion is for, in the upper half of its tag; the descriptor is in the lower.
const ACCEPT: u64 = 1;
const RECEIVE: u64 = 2;
const SEND: u64 = 3;

/// One client.
struct Connection {
    descriptor: OwnedFd,
    /// What came in and has not gone out, oldest first; a send of the first one is in flight if there is any.
    pending: VecDeque<(u16, Range<u32>)>,
    receiving: bool,
    broken: bool,
}

struct Echo {
    ring: Ring,
    /// Clients by descriptor.
    connections: Vec<Option<Connection>>,
    /// Whose receive ended for want of buffers.
    starved: Vec<RawFd>,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("sluice-echo: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> io::Result<()> {
    if let Some(core) = args.core {
        cpu::pin(&[core])?;
    }
    let listeners = listen(args)?;
    let mut echo =
        Echo { ring: Ring::new(4096, args.buffers, args.buffer_bytes)?, connections: Vec::new(), starved: Vec::new() };
    for listener in &listeners {
        echo.ring.accept(listener.as_raw_fd(), tag(ACCEPT, listener.as_raw_fd()))?;
    }
    let mut completions = Vec::with_capacity(1024);
    loop {
        echo.ring.enter(1, None)?;
        echo.ring.drain(&mut completions);
        for completion in completions.drain(..) {
            echo.complete(completion)?;
        }
        echo.feed_starved()?;
    }
}

fn listen(args: &Args) -> io::Result<Vec<Socket>> {
    let mut listeners = Vec::new();
    if let Some(address) = args.listen {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
        socket.set_reuse_address(true)?;
        // Accepted sockets inherit it.
        socket.set_tcp_nodelay(true)?;
        socket.bind(&address.into())?;
        listeners.push(socket);
    }
    if let Some(path) = &args.unix {
        let _ = std::fs::remove_file(path);
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
        socket.bind(&SockAddr::unix(path)?)?;
        listeners.push(socket);
    }
    for listener in &listeners {
        listener.listen(1024)?;
    }
    Ok(listeners)
}

fn tag(kind: u64, descriptor: RawFd) -> u64 {
    kind << 32 | u64::from(descriptor.cast_unsigned())
}

impl Echo {
    fn complete(&mut self, completion: Completion) -> io::Result<()> {
        // The lower half.
        let descriptor = (completion.tag as u32).cast_signed();
        match completion.tag >> 32 {
            ACCEPT => self.accepted(descriptor, completion),
            RECEIVE => self.received(descriptor, completion),
            _ => self.sent(descriptor, completion.result),
        }
    }

    fn accepted(&mut self, listener: RawFd, completion: Completion) -> io::Result<()> {
        if let Ok(at) = usize::try_from(completion.result) {
            let descriptor = accepted_descriptor(completion.result);
            if self.connections.len() <= at {
                self.connections.resize_with(at + 1, || None);
            }
            self.ring.receive(completion.result, tag(RECEIVE, completion.result))?;
            let pending = VecDeque::with_capacity(8);
            self.connections[at] = Some(Connection { descriptor, pending, receiving: true, broken: false });
        }
        if completion.more { Ok(()) } else { self.ring.accept(listener, tag(ACCEPT, listener)) }
    }

    fn received(&mut self, descriptor: RawFd, completion: Completion) -> io::Result<()> {
        let Some(connection) = find(&mut self.connections, descriptor) else {
            return Ok(());
        };
        if let (Some(id), Ok(len)) = (completion.buffer, u32::try_from(completion.result)) {
            if len == 0 || connection.broken {
                self.ring.give(id);
            } else {
                connection.pending.push_back((id, 0..len));
                if connection.pending.len() == 1 {
                    self.ring.send_buffer(descriptor, id, 0..len, tag(SEND, descriptor))?;
                }
            }
        }
        if completion.more {
            return Ok(());
        }
        let starved = -completion.result == libc::ENOBUFS;
        if (starved || completion.result > 0) && !connection.broken {
            self.starved.push(descriptor);
        } else {
            connection.receiving = false;
            self.close_if_done(descriptor);
        }
        Ok(())
    }

    fn sent(&mut self, descriptor: RawFd, result: i32) -> io::Result<()> {
        let Some(connection) = find(&mut self.connections, descriptor) else {
            return Ok(());
        };
        let Some((id, rest)) = connection.pending.front_mut() else {
            return Ok(());
        };
        match u32::try_from(result) {
            Ok(len) => rest.start += len,
            Err(_) => {
                // The peer is gone. The receive completes because of it, if it has not.
                connection.broken = true;
                let _ = SockRef::from(&connection.descriptor).shutdown(std::net::Shutdown::Both);
                while let Some((id, _)) = connection.pending.pop_front() {
                    self.ring.give(id);
                }
                self.close_if_done(descriptor);
                return Ok(());
            }
        }
        if rest.start == rest.end {
            self.ring.give(*id);
            connection.pending.pop_front();
        }
        match connection.pending.front() {
            Some((id, rest)) => self.ring.send_buffer(descriptor, *id, rest.clone(), tag(SEND, descriptor)),
            None => {
                self.close_if_done(descriptor);
                Ok(())
            }
        }
    }

    /// Goes on receiving where buffers had run out.
    fn feed_starved(&mut self) -> io::Result<()> {
        if self.ring.has_buffers() {
            for descriptor in self.starved.drain(..) {
                self.ring.receive(descriptor, tag(RECEIVE, descriptor))?;
            }
        }
        Ok(())
    }

    /// Forgets a client that has closed once everything is sent. Its descriptor is free for another one then.
    fn close_if_done(&mut self, descriptor: RawFd) {
        if let Some(connection) = find(&mut self.connections, descriptor)
            && !connection.receiving
            && connection.pending.is_empty()
        {
            // A descriptor that was accepted is not negative.
            self.connections[descriptor as usize] = None;
        }
    }
}

fn find(connections: &mut [Option<Connection>], descriptor: RawFd) -> Option<&mut Connection> {
    connections.get_mut(usize::try_from(descriptor).ok()?)?.as_mut()
}

#[allow(unsafe_code)]
fn accepted_descriptor(result: i32) -> OwnedFd {
    // SAFETY: an accept that succeeded hands over a new open descriptor, once.
    unsafe { OwnedFd::from_raw_fd(result) }
}
