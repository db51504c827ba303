//! A connection's bytes in memory, as hyper wants its sockets: the engine puts in what has come and takes out what is to go.
//!
//! Nothing here waits by itself. Who reads from an empty pipe is polled again when bytes were put in, so no waker is kept.

use std::{
    cell::RefCell,
    io,
    pin::Pin,
    rc::Rc,
    task::{Context, Poll},
};

use hyper::rt::{Read, ReadBufCursor, Write};

/// Both directions.
#[derive(Default)]
struct Bytes {
    input: Vec<u8>,
    /// How much of `input` was read.
    read: usize,
    output: Vec<u8>,
    /// hyper has closed its side.
    closed: bool,
}

/// One end of the pipe; its clones are the same pipe.
#[derive(Clone, Default)]
pub(crate) struct Pipe(Rc<RefCell<Bytes>>);

impl Pipe {
    /// Bytes have come.
    pub(crate) fn put(&self, bytes: &[u8]) {
        let mut pipe = self.0.borrow_mut();
        if pipe.read == pipe.input.len() {
            pipe.input.clear();
            pipe.read = 0;
        }
        pipe.input.extend_from_slice(bytes);
    }

    /// Moves what is to go behind what is already there.
    pub(crate) fn take(&self, into: &mut Vec<u8>) {
        let output = &mut self.0.borrow_mut().output;
        if into.is_empty() {
            std::mem::swap(into, output);
        } else {
            into.append(output);
        }
    }

    /// Bytes that nobody has read yet.
    pub(crate) fn unread_bytes(&self) -> usize {
        let pipe = self.0.borrow();
        pipe.input.len() - pipe.read
    }

    /// Whether nothing more goes out.
    pub(crate) fn is_closed(&self) -> bool {
        self.0.borrow().closed
    }
}

impl Read for Pipe {
    fn poll_read(self: Pin<&mut Self>, _: &mut Context<'_>, mut into: ReadBufCursor<'_>) -> Poll<io::Result<()>> {
        let mut pipe = self.0.borrow_mut();
        let len = (pipe.input.len() - pipe.read).min(into.remaining());
        if len == 0 {
            return Poll::Pending;
        }
        let from = pipe.read;
        into.put_slice(&pipe.input[from..from + len]);
        pipe.read += len;
        Poll::Ready(Ok(()))
    }
}

impl Write for Pipe {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.0.borrow_mut().output.extend_from_slice(bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let output = &mut self.0.borrow_mut().output;
        slices.iter().for_each(|slice| output.extend_from_slice(slice));
        Poll::Ready(Ok(slices.iter().map(|slice| slice.len()).sum()))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.0.borrow_mut().closed = true;
        Poll::Ready(Ok(()))
    }
}
