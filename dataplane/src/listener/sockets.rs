//! Binding: TCP with a listener per core on one port, and the Unix socket.

use std::{
    io,
    net::{SocketAddr, TcpListener, TcpStream},
    os::{fd::OwnedFd, unix::fs::PermissionsExt, unix::net::UnixListener},
    path::{Path, PathBuf},
    time::Duration,
};

use socket2::{Domain, Protocol, Socket, Type};
use thiserror::Error;

/// Connections that may wait to be accepted, per listener.
const BACKLOG: i32 = 4096;
/// How long to wait for an answer when asking whether somebody listens already.
const PROBE_TIMEOUT: Duration = Duration::from_millis(200);

/// Why the server cannot listen.
#[derive(Debug, Error)]
pub enum BindError {
    /// Another process listens there, and would take a share of the connections in silence.
    #[error("another process listens on {0}; stop it, choose another address, or pass --share-port to share it")]
    Taken(SocketAddr),
    /// Another process listens on the Unix socket.
    #[error("another process listens on {}; stop it or choose another path", .0.display())]
    PathTaken(PathBuf),
    /// The path exists and is no socket.
    #[error("{} exists and is not a socket; remove it or choose another path", .0.display())]
    NotASocket(PathBuf),
    /// The system said no.
    #[error("cannot listen on {address}: {error}")]
    System {
        /// Where.
        address: String,
        /// Why.
        error: io::Error,
    },
}

/// One listener per core on the same address. Port 0 is resolved by the first.
///
/// # Errors
///
/// [`BindError::Taken`] where another process listens and `share` is not set; otherwise what the system says.
pub fn tcp(address: SocketAddr, cores: usize, share: bool) -> Result<Vec<TcpListener>, BindError> {
    let failed = |error| BindError::System { address: address.to_string(), error };
    if !share && address.port() != 0 && is_taken(address) {
        return Err(BindError::Taken(address));
    }
    let mut listeners = Vec::with_capacity(cores);
    let mut bound = address;
    for _ in 0..cores {
        let listener = listen(bound).map_err(failed)?;
        bound = listener.local_addr().map_err(failed)?;
        listeners.push(listener);
    }
    Ok(listeners)
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
        _ => TcpStream::connect_timeout(&address, PROBE_TIMEOUT).is_ok(),
    }
}

fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    socket.set_reuse_port(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

/// Listens on a Unix socket. A socket that a dead process left behind is replaced.
///
/// # Errors
///
/// Where another process listens, the path is something else, or the system says no.
pub fn unix(path: &Path, mode: u32) -> Result<UnixListener, BindError> {
    use std::os::unix::{fs::FileTypeExt, net::UnixStream};
    let failed = |error| BindError::System { address: path.display().to_string(), error };
    match std::fs::symlink_metadata(path) {
        Ok(metadata) if !metadata.file_type().is_socket() => return Err(BindError::NotASocket(path.into())),
        Ok(_) if UnixStream::connect(path).is_ok() => return Err(BindError::PathTaken(path.into())),
        Ok(_) => std::fs::remove_file(path).map_err(failed)?,
        Err(_) => {}
    }
    let listener = UnixListener::bind(path).map_err(failed)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    Ok(listener)
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
    }

    #[test]
    fn a_dead_unix_socket_is_replaced_and_a_live_one_is_not() {
        let path = std::env::temp_dir().join(format!("sluice-sockets-{}", std::process::id()));
        drop(unix(&path, 0o660).unwrap());
        let live = unix(&path, 0o660).unwrap();
        assert!(matches!(unix(&path, 0o660), Err(BindError::PathTaken(_))));
        drop(live);
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "").unwrap();
        assert!(matches!(unix(&path, 0o660), Err(BindError::NotASocket(_))));
        std::fs::remove_file(&path).unwrap();
    }
}
