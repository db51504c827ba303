//! The connections to the store's shards, as glommio streams: a task for each that reads, and one that writes when there
//! is something to write.

use std::{
    cell::RefCell,
    collections::HashMap,
    future::poll_fn,
    io,
    os::fd::{FromRawFd, IntoRawFd, OwnedFd},
    pin::Pin,
    rc::Rc,
    task::{Poll, Waker},
    time::Duration,
};

use futures_lite::{AsyncRead, AsyncWrite};
use glommio::{net::TcpStream, spawn_local};
use resp_client::{Action, Address, LinkId};
use socket2::{Domain, SockAddr, Socket, Type};

use super::Shared;
use crate::listener::{names, sockets};

/// Bytes that one receive takes at most.
const RECEIVE_BYTES: usize = 64 * 1024;

/// How long a connect may keep its thread. The client gives up much earlier, by its setting.
const CONNECT_MAX: Duration = Duration::from_secs(1);

/// What is known of the links' tasks.
#[derive(Default)]
pub(super) struct Links {
    live: HashMap<LinkId, Rc<RefCell<Line>>>,
}

/// One link, shared by its task and by whoever has something for it.
#[derive(Default)]
struct Line {
    waker: Option<Waker>,
    /// The client does not want it any more.
    closed: bool,
}

/// Does what the client wants done with its links: connect, close, send.
pub(super) fn follow(core: &Shared) {
    loop {
        let Some(action) = core.borrow_mut().engine.next_link_action() else { break };
        match action {
            Action::Connect { link, address } => {
                let line = Rc::new(RefCell::new(Line::default()));
                core.borrow_mut().links.live.insert(link, Rc::clone(&line));
                let core = Rc::clone(core);
                spawn_local(async move { run(&core, link, address, &line).await }).detach();
            }
            Action::Close { link } => {
                let line = core.borrow_mut().links.live.remove(&link);
                if let Some(line) = line {
                    line.borrow_mut().closed = true;
                    wake(&line);
                }
            }
        }
    }
    loop {
        let Some(link) = core.borrow_mut().engine.next_link_output() else { break };
        let line = core.borrow().links.live.get(&link).cloned();
        if let Some(line) = line {
            wake(&line);
        }
    }
}

fn wake(line: &RefCell<Line>) {
    let waker = line.borrow_mut().waker.take();
    if let Some(waker) = waker {
        waker.wake();
    }
}

/// Connects a link and moves its bytes until it ends.
async fn run(core: &Shared, link: LinkId, address: Address, line: &RefCell<Line>) {
    let stream = match connect(address).await {
        Ok(stream) => stream,
        Err(error) => {
            core.borrow_mut().act(|engine| engine.link_failed(link, &error.to_string()));
            return end(core, link);
        }
    };
    core.borrow_mut().act(|engine| engine.link_connected(link));
    follow(core);
    let outcome = serve(core, link, stream, line).await;
    if !line.borrow().closed {
        let why = outcome.map_or_else(|error| error.to_string(), |()| "by the peer".into());
        core.borrow_mut().act(|engine| engine.link_closed(link, &why));
    }
    end(core, link);
}

fn end(core: &Shared, link: LinkId) {
    core.borrow_mut().links.live.remove(&link);
    follow(core);
}

/// Moves bytes both ways until the peer or the client ends it.
async fn serve(core: &Shared, link: LinkId, mut stream: TcpStream, line: &RefCell<Line>) -> io::Result<()> {
    let mut input = vec![0; RECEIVE_BYTES];
    let (mut output, mut sent) = (Vec::new(), 0);
    loop {
        let read = poll_fn(|context| {
            if line.borrow().closed {
                return Poll::Ready(Ok(0));
            }
            line.borrow_mut().waker = Some(context.waker().clone());
            loop {
                if sent == output.len() {
                    output.clear();
                    sent = 0;
                    core.borrow_mut().engine.take_link_output(link, &mut output);
                }
                if output.is_empty() {
                    break;
                }
                match Pin::new(&mut stream).poll_write(context, &output[sent..]) {
                    Poll::Ready(Ok(0)) => return Poll::Ready(Ok(0)),
                    Poll::Ready(Ok(len)) => sent += len,
                    Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                    Poll::Pending => break,
                }
            }
            Pin::new(&mut stream).poll_read(context, &mut input)
        })
        .await?;
        if read == 0 {
            return Ok(());
        }
        core.borrow_mut().act(|engine| engine.link_bytes_in(link, &input[..read]));
        follow(core);
    }
}

async fn connect(address: Address) -> io::Result<TcpStream> {
    match address {
        Address::Unix(path) => open(Domain::UNIX, SockAddr::unix(path)?).await,
        Address::Tcp { host, port } => {
            let mut last = io::Error::other("the host has no address");
            // On another thread, since the system's resolver blocks.
            let found = glommio::executor().spawn_blocking(move || names::look_up(&host, port)).await?;
            for address in found {
                match open(Domain::for_address(address), address.into()).await {
                    Ok(stream) => return Ok(stream),
                    Err(error) => last = error,
                }
            }
            Err(last)
        }
    }
}

/// Connects without blocking the core: the kernel is asked on another thread, since that takes as long as it takes.
#[allow(unsafe_code)]
async fn open(domain: Domain, peer: SockAddr) -> io::Result<TcpStream> {
    let descriptor: OwnedFd = glommio::executor()
        .spawn_blocking(move || {
            let socket = Socket::new(domain, Type::STREAM, None)?;
            socket.connect_timeout(&peer, CONNECT_MAX)?;
            socket.set_nonblocking(true)?;
            Ok::<OwnedFd, io::Error>(socket.into())
        })
        .await?;
    sockets::send_at_once(&descriptor);
    // SAFETY: the descriptor is open, and the stream becomes its only owner. Receive and send are the same for TCP and
    // for Unix sockets.
    Ok(unsafe { TcpStream::from_raw_fd(descriptor.into_raw_fd()) })
}
