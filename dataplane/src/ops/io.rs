//! glommio's stream as hyper wants it.
#![allow(unsafe_code)]

use std::{
    io,
    os::fd::{FromRawFd, IntoRawFd, OwnedFd},
    pin::Pin,
    task::{Context, Poll, ready},
};

use futures_lite::{AsyncRead, AsyncWrite};
use glommio::net::TcpStream;
use hyper::rt::{Read, ReadBufCursor, Write};

/// Bytes that one receive takes at most.
const RECEIVE_BYTES: usize = 4096;

/// A connection of the ops port.
pub(super) struct HyperStream(TcpStream);

impl HyperStream {
    pub(super) fn new(socket: OwnedFd) -> io::Result<Self> {
        socket2::SockRef::from(&socket).set_nonblocking(true)?;
        // SAFETY: the descriptor is open, and the stream becomes its only owner.
        Ok(Self(unsafe { TcpStream::from_raw_fd(socket.into_raw_fd()) }))
    }
}

impl Read for HyperStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        mut into: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        let mut bytes = [0; RECEIVE_BYTES];
        let room = into.remaining().min(RECEIVE_BYTES);
        let len = ready!(Pin::new(&mut self.0).poll_read(context, &mut bytes[..room]))?;
        into.put_slice(&bytes[..len]);
        Poll::Ready(Ok(()))
    }
}

impl Write for HyperStream {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_close(context)
    }
}
