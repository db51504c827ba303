//! Which core a new connection goes to: the one with the fewest.
//!
//! The kernel spreads connections over the listeners of one port by a hash, which leaves a handful of long-lived
//! connections (all that a gateway opens) on one core. So whoever accepts looks at the counts and hands the socket over
//! where another core has fewer. Only accepting takes this path; nothing here is touched by a check.

use std::{
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use crossbeam_queue::ArrayQueue;
use crossbeam_utils::CachePadded;

use super::Face;

/// Sockets that may wait for another core at once; beyond, the accepting core keeps them.
const INBOX_SOCKETS_MAX: usize = 1024;

/// All data cores, as far as connections are concerned.
pub struct Placement {
    seats: Box<[Seat]>,
    connections_max: usize,
    /// Cores that may still accept; see [`Gate`].
    open_gates: AtomicUsize,
}

/// Held by a core for as long as it may accept, and so hand a socket to another. While any is held, no core knows that
/// its inbox stays empty.
pub struct Gate(Arc<Placement>);

impl Drop for Gate {
    fn drop(&mut self) {
        self.0.open_gates.fetch_sub(1, Ordering::AcqRel);
    }
}

struct Seat {
    connections: CachePadded<AtomicUsize>,
    inbox: ArrayQueue<(OwnedFd, Face)>,
    doorbell: Doorbell,
}

/// An eventfd that wakes one core's driver.
pub struct Doorbell(OwnedFd);

/// What becomes of an accepted socket.
pub enum Placed {
    /// It stays on the accepting core.
    Here(OwnedFd),
    /// It went to another core.
    There,
    /// There are too many connections.
    Refused(OwnedFd),
}

impl Placement {
    /// Seats for `cores` cores and at most `connections_max` connections in all.
    ///
    /// # Errors
    ///
    /// When the kernel gives no eventfd.
    pub fn new(cores: usize, connections_max: usize) -> io::Result<Self> {
        let seats = (0..cores)
            .map(|_| {
                Ok(Seat {
                    connections: CachePadded::new(AtomicUsize::new(0)),
                    inbox: ArrayQueue::new(INBOX_SOCKETS_MAX),
                    doorbell: Doorbell::new()?,
                })
            })
            .collect::<io::Result<_>>()?;
        Ok(Self { seats, connections_max, open_gates: AtomicUsize::new(0) })
    }

    /// Lets a core accept.
    pub fn gate(self: &Arc<Self>) -> Gate {
        self.open_gates.fetch_add(1, Ordering::AcqRel);
        Gate(Arc::clone(self))
    }

    /// Whether nobody accepts any more, and every socket that was handed to this core has been taken by it.
    pub fn is_over(&self, here: usize) -> bool {
        // In this order: what was handed over before the last gate closed is seen.
        self.open_gates.load(Ordering::Acquire) == 0 && !self.has_waiting(here)
    }

    /// Decides where a socket that core `here` accepted goes, and hands it over if that is elsewhere.
    pub fn place(&self, here: usize, socket: OwnedFd, face: Face) -> Placed {
        let total: usize = self.seats.iter().map(|seat| seat.connections.load(Ordering::Relaxed)).sum();
        if total >= self.connections_max {
            return Placed::Refused(socket);
        }
        let fewest = |&at: &usize| (self.seats[at].connections.load(Ordering::Relaxed), at != here);
        let at = (0..self.seats.len()).min_by_key(fewest).unwrap_or(here);
        // Counted at once, so that a burst of accepts spreads even before the other core has looked.
        self.seats[at].connections.fetch_add(1, Ordering::Relaxed);
        if at == here {
            return Placed::Here(socket);
        }
        match self.seats[at].inbox.push((socket, face)) {
            Ok(()) => {
                self.seats[at].doorbell.ring();
                Placed::There
            }
            Err((socket, _)) => {
                self.seats[at].connections.fetch_sub(1, Ordering::Relaxed);
                self.seats[here].connections.fetch_add(1, Ordering::Relaxed);
                Placed::Here(socket)
            }
        }
    }

    /// The next socket that another core handed to this one.
    #[inline]
    pub fn adopt(&self, here: usize) -> Option<(OwnedFd, Face)> {
        let inbox = &self.seats[here].inbox;
        if inbox.is_empty() { None } else { inbox.pop() }
    }

    /// Whether sockets wait for this core.
    pub fn has_waiting(&self, here: usize) -> bool {
        !self.seats[here].inbox.is_empty()
    }

    /// A connection of this core is gone.
    pub fn left(&self, here: usize) {
        self.seats[here].connections.fetch_sub(1, Ordering::Relaxed);
    }

    /// Connections of a core, those that wait for it included.
    pub fn connections(&self, core: usize) -> usize {
        self.seats[core].connections.load(Ordering::Relaxed)
    }

    /// How many cores there are.
    pub fn cores(&self) -> usize {
        self.seats.len()
    }

    /// What wakes a core's driver.
    pub fn doorbell(&self, core: usize) -> &Doorbell {
        &self.seats[core].doorbell
    }
}

#[allow(unsafe_code)]
impl Doorbell {
    fn new() -> io::Result<Self> {
        // SAFETY: eventfd takes two integers; a non-negative result is a new descriptor that nobody else owns.
        unsafe {
            let fd = libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK);
            if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(Self(OwnedFd::from_raw_fd(fd))) }
        }
    }

    /// Wakes whoever waits.
    pub fn ring(&self) {
        let one = 1u64.to_ne_bytes();
        // SAFETY: the buffer is eight readable bytes. A full counter (EAGAIN) means the driver is awake already.
        let _ = unsafe { libc::write(self.0.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    }

    /// Makes the bell silent again.
    pub fn silence(&self) {
        let mut count = [0; 8];
        // SAFETY: the buffer is eight writable bytes. EAGAIN means that it was silent.
        let _ = unsafe { libc::read(self.0.as_raw_fd(), count.as_mut_ptr().cast(), count.len()) };
    }

    /// The descriptor, for io_uring and for [`park`](super::park).
    pub fn descriptor(&self) -> &OwnedFd {
        &self.0
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;

    fn socket() -> OwnedFd {
        std::os::unix::net::UnixStream::pair().unwrap().0.into()
    }

    #[test]
    fn few_connections_use_all_cores() {
        let placement = Placement::new(3, 100).unwrap();
        for _ in 0..6 {
            // The kernel may give every one of them to the same listener.
            let _ = placement.place(1, socket(), Face::Resp);
        }
        assert_eq!([0, 1, 2].map(|core| placement.connections(core)), [2, 2, 2]);
        assert!(placement.adopt(0).is_some() && placement.adopt(0).is_some() && placement.adopt(0).is_none());
    }

    #[test]
    fn it_is_over_when_nobody_accepts_and_nothing_waits() {
        let placement = Arc::new(Placement::new(2, 100).unwrap());
        let gates = [placement.gate(), placement.gate()];
        assert!(!placement.is_over(0));
        let _ = (placement.place(0, socket(), Face::Resp), placement.place(0, socket(), Face::Resp));
        drop(gates);
        assert_eq!([0, 1].map(|core| placement.is_over(core)), [true, false]);
        assert!(placement.adopt(1).is_some() && placement.is_over(1));
    }

    #[test]
    fn beyond_the_limit_connections_are_refused() {
        let placement = Placement::new(2, 2).unwrap();
        assert!(matches!(placement.place(0, socket(), Face::Resp), Placed::Here(_)));
        assert!(matches!(placement.place(0, socket(), Face::Resp), Placed::There));
        assert!(matches!(placement.place(0, socket(), Face::Resp), Placed::Refused(_)));
        placement.left(0);
        assert!(matches!(placement.place(0, socket(), Face::Resp), Placed::Here(_)));
    }
}
