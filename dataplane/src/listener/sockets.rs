//! Binding: TCP with a listener per core on one port, and the Unix socket.

use std::{
    io,
    net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream},
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::{
            fs::{MetadataExt, PermissionsExt},
            net::UnixListener,
        },
    },
    path::{Path, PathBuf},
    time::Duration,
};

use socket2::{Domain, Protocol, SockAddr, Socket, Type};
use thiserror::Error;

use super::{Face, REFUSAL, WEB_REFUSAL};

/// Connections that may wait to be accepted, per listener.
const BACKLOG: i32 = 4096;
/// How long to wait for an answer when asking whether somebody listens already.
const PROBE_TIMEOUT: Duration = Duration::from_millis(200);
/// How often a taken port is asked for again, and how long after each time. The kernel closes the files of an io_uring a
/// little after their process has ended, so the port of a server that has just left may still look taken.
const TAKEN_ASKED_AGAIN: u32 = 50;
/// See [`TAKEN_ASKED_AGAIN`].
const TAKEN_PAUSE: Duration = Duration::from_millis(20);

/// Why the server cannot listen.
#[derive(Debug, Error)]
pub enum BindError {
    /// Another process listens there, and would take a share of the connections in silence.
    #[error("another process listens on {0}; stop it, choose another address, or pass --share-port to share it")]
    Taken(SocketAddr),
    /// The same for the ops port, which answers for one process and so is never shared.
    #[error("the ops port {0} is taken; give the new process another --listen-ops (share_port is for RESP only)")]
    OpsTaken(SocketAddr),
    /// Another process listens on the Unix socket.
    #[error("another process listens on {}; stop it or choose another path", .0.display())]
    PathTaken(PathBuf),
    /// The system does not say whether another process listens on the Unix socket.
    #[error("{} exists, and may belong to another process: {error}; stop that, or choose another path", path.display())]
    PathUnknown {
        /// Where.
        path: PathBuf,
        /// Why connecting failed.
        error: io::Error,
    },
    /// The path exists and is no socket.
    #[error("{} exists and is not a socket; remove it or choose another path", .0.display())]
    NotASocket(PathBuf),
    /// The system said no.
    #[error("cannot listen on {address}: {error}{}", hint(error))]
    System {
        /// Where.
        address: String,
        /// Why.
        error: io::Error,
    },
}

/// What to do about an error of the system, where that is known.
fn hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrNotAvailable => "; no interface of this host has that address",
        _ => "",
    }
}

/// Sockets that have their address and do not listen yet: whoever connects is refused.
pub struct Bound {
    address: SocketAddr,
    sockets: Vec<Socket>,
}

impl Bound {
    /// Their address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Listens on all of them.
    ///
    /// # Errors
    ///
    /// What the system says.
    pub fn listen(self) -> Result<Vec<TcpListener>, BindError> {
        let failed = |error| BindError::System { address: self.address.to_string(), error };
        let listen = |socket: Socket| socket.listen(BACKLOG).map(|()| socket.into());
        self.sockets.into_iter().map(listen).collect::<io::Result<_>>().map_err(failed)
    }
}

/// One socket per core on the same address. Port 0 is resolved by the first.
///
/// # Errors
///
/// [`BindError::Taken`] where another process listens and `share` is not set; otherwise what the system says.
pub fn bind(address: SocketAddr, cores: usize, share: bool) -> Result<Bound, BindError> {
    let failed = |error| BindError::System { address: address.to_string(), error };
    if !share && address.port() != 0 && stays_taken(address) {
        return Err(BindError::Taken(address));
    }
    let mut sockets = Vec::with_capacity(cores);
    let mut bound = address;
    for _ in 0..cores {
        let socket = bound_socket(bound).map_err(failed)?;
        bound = socket.local_addr().map_err(failed)?.as_socket().unwrap_or(bound);
        sockets.push(socket);
    }
    Ok(Bound { address: bound, sockets })
}

/// As [`bind`], and listens.
///
/// # Errors
///
/// As for [`bind`].
pub fn tcp(address: SocketAddr, cores: usize, share: bool) -> Result<Vec<TcpListener>, BindError> {
    bind(address, cores, share)?.listen()
}

/// The listener of the ops port.
///
/// # Errors
///
/// [`BindError::OpsTaken`] where another process listens; otherwise what the system says.
pub fn ops(address: SocketAddr) -> Result<TcpListener, BindError> {
    match tcp(address, 1, false) {
        Ok(mut listeners) => Ok(listeners.remove(0)),
        Err(BindError::Taken(address)) => Err(BindError::OpsTaken(address)),
        Err(error) => Err(error),
    }
}

/// Listeners that stop listening when this is dropped, whoever else still holds them; see [`close`].
pub struct Doors(Vec<TcpListener>);

impl Doors {
    /// These.
    ///
    /// # Errors
    ///
    /// When a descriptor cannot be duplicated.
    pub fn of<'a>(listeners: impl IntoIterator<Item = &'a TcpListener>) -> io::Result<Self> {
        listeners.into_iter().map(TcpListener::try_clone).collect::<io::Result<_>>().map(Self)
    }
}

impl Drop for Doors {
    fn drop(&mut self) {
        for listener in &self.0 {
            let _ = socket2::SockRef::from(listener).shutdown(Shutdown::Both);
        }
    }
}

/// Whether somebody listens, and goes on doing so.
fn stays_taken(address: SocketAddr) -> bool {
    for _ in 0..TAKEN_ASKED_AGAIN {
        if !is_taken(address) {
            return false;
        }
        tracing::debug!(%address, "the address is taken; it may belong to a process that has just ended: asking again");
        std::thread::park_timeout(TAKEN_PAUSE);
    }
    is_taken(address)
}

/// Whether somebody listens: binding without SO_REUSEPORT tells, for listeners with and without it.
fn is_taken(address: SocketAddr) -> bool {
    let probe = || -> io::Result<()> {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
        socket.set_reuse_address(true)?;
        socket.bind(&address.into())?;
        socket.listen(1)
    };
    match probe() {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => true,
        // Not an address of ours, or not allowed: listening will say so.
        Err(_) => false,
        Ok(()) => TcpStream::connect_timeout(&address, PROBE_TIMEOUT).is_ok(),
    }
}

fn bound_socket(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    socket.set_reuse_port(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    Ok(socket)
}

/// Listens on a Unix socket. A socket that a dead process left behind is replaced.
///
/// # Errors
///
/// Where another process listens, the path is something else, or the system says no.
pub fn unix(path: &Path, mode: u32) -> Result<(UnixListener, SocketFile), BindError> {
    use std::os::unix::fs::FileTypeExt;
    let failed = |error| BindError::System { address: path.display().to_string(), error };
    match std::fs::symlink_metadata(path) {
        Ok(metadata) if !metadata.file_type().is_socket() => return Err(BindError::NotASocket(path.into())),
        Ok(_) => match ask_unix(path) {
            Ok(()) => return Err(BindError::PathTaken(path.into())),
            // Nobody listens: a process that is gone has left it.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                std::fs::remove_file(path).map_err(failed)?;
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(BindError::PathUnknown { path: path.into(), error }),
        },
        Err(_) => {}
    }
    let listener = UnixListener::bind(path).map_err(failed)?;
    let file = SocketFile::of(path);
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    Ok((listener, file))
}

/// Whether somebody listens on a Unix socket.
fn ask_unix(path: &Path) -> io::Result<()> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    // Else it would wait for as long as the other process's queue is full.
    socket.set_nonblocking(true)?;
    match socket.connect(&SockAddr::unix(path)?) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
        outcome => outcome,
    }
}

/// The file of a Unix socket. Removed when this is dropped, unless another process has put its own in its place.
pub struct SocketFile {
    path: PathBuf,
    id: Option<(u64, u64)>,
}

impl SocketFile {
    /// The file that is there now.
    pub fn of(path: &Path) -> Self {
        Self { path: path.into(), id: identity(path) }
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if self.id.is_some() && identity(&self.path) == self.id {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Device and inode.
fn identity(path: &Path) -> Option<(u64, u64)> {
    std::fs::symlink_metadata(path).ok().map(|metadata| (metadata.dev(), metadata.ino()))
}

/// Accepts a connection, if one waits.
///
/// # Errors
///
/// What the system says, most likely that there are too many files open; not that a connection went before it was
/// accepted.
pub fn accept(listener: &OwnedFd) -> io::Result<Option<OwnedFd>> {
    loop {
        match socket2::SockRef::from(listener).accept() {
            Ok((socket, _)) => return Ok(Some(socket.into())),
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock => return Ok(None),
                io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted => {}
                _ => return Err(error),
            },
        }
    }
}

/// The other end's address, where it has one.
pub fn peer(socket: &OwnedFd) -> Option<IpAddr> {
    socket2::SockRef::from(socket).peer_addr().ok()?.as_socket().map(|address| address.ip())
}

/// Stops listening, whoever else still holds the listener: a poll that io_uring has in hand keeps its socket open for a
/// while after everything else is closed, and with it the port.
pub fn close(listener: &OwnedFd) {
    let _ = socket2::SockRef::from(listener).shutdown(Shutdown::Both);
}

/// Tells a client that there are too many, if its socket takes the line at once; the caller closes it.
pub fn refuse(socket: &OwnedFd, face: Face) {
    let socket = socket2::SockRef::from(socket);
    let _ = socket.set_nonblocking(true);
    let _ = socket.send(match face {
        Face::Resp => REFUSAL,
        Face::Web => WEB_REFUSAL,
    });
    let _ = socket.shutdown(Shutdown::Write);
}

/// Bytes that were sent and that the peer has not taken. When they get fewer, the peer reads, though there may be no room
/// for more for a long time: the kernel waits until a third of its buffer, which may be megabytes, is free.
pub fn untaken_bytes(socket: &OwnedFd) -> Option<u32> {
    // Another name of SIOCOUTQ.
    bytes_of(socket, libc::TIOCOUTQ)
}

/// Whether bytes have come that nobody has read yet.
pub fn has_unread(socket: &OwnedFd) -> bool {
    bytes_of(socket, libc::FIONREAD).is_some_and(|bytes| bytes > 0)
}

/// What the kernel holds of a socket, in one direction.
#[allow(unsafe_code)]
fn bytes_of(socket: &OwnedFd, request: libc::Ioctl) -> Option<u32> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: both requests write one integer, and nothing else.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), request, &raw mut bytes) };
    if result == 0 { u32::try_from(bytes).ok() } else { None }
}

/// Sends the replies of a socket at once. Unix sockets have no such option, and need none.
pub fn send_at_once(socket: &OwnedFd) {
    let _ = socket2::SockRef::from(socket).set_tcp_nodelay(true);
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_taken_port_is_refused_unless_shared() {
        let first = tcp("127.0.0.1:0".parse().unwrap(), 2, false).unwrap();
        let address = first[0].local_addr().unwrap();
        assert_eq!(first[1].local_addr().unwrap(), address);
        assert!(matches!(tcp(address, 1, false), Err(BindError::Taken(taken)) if taken == address));
        assert_eq!(tcp(address, 1, true).unwrap()[0].local_addr().unwrap(), address);
        let text = ops(address).unwrap_err().to_string();
        let expected = format!("the ops port {address} is taken; give the new process another --listen-ops ");
        assert!(text.starts_with(&expected), "{text}");
    }

    #[test]
    fn a_port_that_is_freed_a_little_late_is_waited_for() {
        let first = tcp("127.0.0.1:0".parse().unwrap(), 1, false).unwrap();
        let address = first[0].local_addr().unwrap();
        let late = std::thread::spawn(move || {
            std::thread::park_timeout(Duration::from_millis(100));
            drop(first);
        });
        assert!(tcp(address, 1, false).is_ok());
        late.join().unwrap();
    }

    #[test]
    fn closed_doors_are_closed_for_every_holder() {
        let held = tcp("127.0.0.1:0".parse().unwrap(), 2, false).unwrap();
        let address = held[0].local_addr().unwrap();
        drop(Doors::of(&held).unwrap());
        assert!(!is_taken(address));
    }

    #[test]
    fn an_address_of_another_host_is_not_called_taken() {
        // TEST-NET-1 of RFC 5737: nobody's.
        let text = tcp("192.0.2.1:6390".parse().unwrap(), 1, false).unwrap_err().to_string();
        assert!(text.ends_with("no interface of this host has that address"), "{text}");
    }

    #[test]
    fn the_file_of_another_processs_socket_is_left_alone() {
        let path = std::env::temp_dir().join(format!("sluice-socket-file-{}", std::process::id()));
        let (ours, file) = unix(&path, 0o660).unwrap();
        std::fs::rename(&path, path.with_extension("old")).unwrap();
        let (theirs, their_file) = unix(&path, 0o660).unwrap();
        drop(file);
        assert!(path.exists());
        drop(their_file);
        assert!(!path.exists());
        std::fs::remove_file(path.with_extension("old")).unwrap();
        drop((ours, theirs));
    }

    #[test]
    fn a_dead_unix_socket_is_replaced_and_a_live_one_is_not() {
        let path = std::env::temp_dir().join(format!("sluice-sockets-{}", std::process::id()));
        let (dead, file) = unix(&path, 0o660).unwrap();
        drop(dead);
        let live = unix(&path, 0o660).unwrap();
        assert!(matches!(unix(&path, 0o660), Err(BindError::PathTaken(_))));
        drop(live);
        drop(file);
        assert!(!path.exists());
        // One that cannot be asked for what it is: no stream can be connected to it.
        let datagrams = std::os::unix::net::UnixDatagram::bind(&path).unwrap();
        assert!(matches!(unix(&path, 0o660), Err(BindError::PathUnknown { .. })));
        drop(datagrams);
        assert!(path.exists());
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "").unwrap();
        assert!(matches!(unix(&path, 0o660), Err(BindError::NotASocket(_))));
        std::fs::remove_file(&path).unwrap();
    }
}
