//! Host names to addresses, off the core: the system's resolver blocks.
//!
//! A thread for each question, which there is one of per connection that is opened to a host with a name; it is gone
//! when it has the answer. The answer waits in a queue, and the core's doorbell is rung.

use std::{
    io,
    net::{IpAddr, SocketAddr, ToSocketAddrs},
    sync::Arc,
};

use crossbeam_queue::ArrayQueue;
use resp_client::LinkId;

use super::placement::Placement;

/// Answers that may wait; a core asks for one address per link at a time.
const ANSWERS_MAX: usize = 1024;

/// A link's addresses, best first, or why there are none.
pub(super) type Answer = (LinkId, io::Result<Vec<SocketAddr>>);

/// The addresses of a host, best first. Blocks where they are not written as such.
pub(super) fn look_up(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    let mut found: Vec<_> = (host, port).to_socket_addrs()?.collect();
    // A Redis that listens on one family only mostly does so on the older one.
    found.sort_by_key(SocketAddr::is_ipv6);
    Ok(found)
}

/// The resolver of one core.
pub(super) struct Names {
    answers: Arc<ArrayQueue<Answer>>,
}

impl Names {
    pub(super) fn new() -> Self {
        Self { answers: Arc::new(ArrayQueue::new(ANSWERS_MAX)) }
    }

    /// Asks for the addresses of a host. Those that are written as addresses need no thread.
    pub(super) fn ask(&self, link: LinkId, host: &str, port: u16, placement: &Arc<Placement>, core: usize) {
        if host.parse::<IpAddr>().is_ok() {
            let _ = self.answers.push((link, look_up(host, port)));
            return;
        }
        let (answers, placement, host) = (Arc::clone(&self.answers), Arc::clone(placement), host.to_owned());
        let spawned = std::thread::Builder::new().name("sluice-names".into()).spawn(move || {
            let _ = answers.push((link, look_up(&host, port)));
            placement.doorbell(core).ring();
        });
        if let Err(error) = spawned {
            let _ = self.answers.push((link, Err(error)));
        }
    }

    /// The next answer.
    pub(super) fn next(&self) -> Option<Answer> {
        self.answers.pop()
    }

    /// Whether there is one.
    pub(super) fn has_answer(&self) -> bool {
        !self.answers.is_empty()
    }
}
