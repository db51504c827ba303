//! One connection: its encoded batches, how far the one in flight is sent, and its verifier.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use crate::{
    identities::Identities,
    replies::{Expectations, Ledger, Verifier, Wrong},
    requests::{Batch, Template},
};

/// A connection. It is free when its batch is sent and answered; only then may the batch be written to.
pub(crate) struct Connection {
    descriptor: OwnedFd,
    /// Among all connections of the run.
    number: u16,
    plain: Batch,
    /// The same with probes in it, every `probe_every` batches.
    probed: Option<Batch>,
    probe_every: u64,
    uses_probed: bool,
    verifier: Verifier,
    /// Requests of the batch in flight.
    requests: u32,
    /// Bytes of it that are sent.
    sent: usize,
    sending: bool,
    /// When the latency of the batch begins.
    pub origin_ns: u64,
    batches: u64,
    /// The last probe's.
    serial: u64,
}

impl Connection {
    /// A connection with batches of `depth`, and with probes at these places every `probe_every` batches.
    pub(crate) fn new(
        descriptor: OwnedFd,
        number: u16,
        template: &Template,
        depth: u32,
        probes: &[u32],
        probe_every: u64,
    ) -> Self {
        Self {
            descriptor,
            number,
            plain: Batch::new(template, depth, &[]),
            probed: (!probes.is_empty()).then(|| Batch::new(template, depth, probes)),
            probe_every,
            uses_probed: false,
            verifier: Verifier::default(),
            requests: 0,
            sent: 0,
            sending: false,
            origin_ns: 0,
            // So that not all connections have their probes at the same time.
            batches: u64::from(number),
            serial: 0,
        }
    }

    /// Makes the next batch, with at most `left` requests that are not probes. Returns how many of those it has.
    pub(crate) fn renew(&mut self, identities: &mut Identities, left: u64) -> u64 {
        self.batches += 1;
        self.uses_probed = self.probed.is_some() && self.batches.is_multiple_of(self.probe_every);
        let whole = self.batch();
        let (mut requests, mut checks) = (whole.len(), u64::from(whole.len() - whole.probes()));
        if checks > left {
            self.uses_probed = false;
            checks = left;
            // Less than the depth.
            requests = left as u32;
        }
        let batch = match &mut self.probed {
            Some(probed) if self.uses_probed => probed,
            _ => &mut self.plain,
        };
        batch.renew(identities, self.number, &mut self.serial);
        self.verifier.begin(requests);
        (self.requests, self.sent) = (requests, 0);
        checks
    }

    /// What is left to send of the batch.
    pub(crate) fn unsent(&self) -> &[u8] {
        &self.batch().bytes(self.requests)[self.sent..]
    }

    /// A send is in flight from now on.
    pub(crate) fn sending(&mut self) {
        self.sending = true;
    }

    /// The send in flight has sent `len` bytes.
    pub(crate) fn sent(&mut self, len: usize) {
        self.sending = false;
        self.sent += len;
    }

    /// Takes what came. Returns how many replies it completed.
    ///
    /// # Errors
    ///
    /// The first reply that is wrong.
    pub(crate) fn feed(
        &mut self,
        bytes: &[u8],
        expectations: &Expectations,
        ledger: &mut Ledger,
    ) -> Result<u32, Wrong> {
        let batch = match &self.probed {
            Some(probed) if self.uses_probed => probed,
            _ => &self.plain,
        };
        self.verifier.feed(bytes, batch, expectations, ledger)
    }

    /// Whether the kernel may still read the batch.
    pub(crate) fn is_sending(&self) -> bool {
        self.sending
    }

    /// Whether all replies of the batch have come.
    pub(crate) fn is_answered(&self) -> bool {
        self.verifier.is_done()
    }

    /// Its socket.
    pub(crate) fn socket(&self) -> RawFd {
        self.descriptor.as_raw_fd()
    }

    /// A name for people.
    pub(crate) fn describe(&self) -> String {
        format!("connection {}", self.number)
    }

    /// Where it is, for people.
    pub(crate) fn describe_state(&self) -> String {
        let (missing, requests) = (self.verifier.missing(), self.requests);
        format!(
            "{missing} of {requests} replies of its batch are missing, the first to request {}",
            self.verifier.index()
        )
    }

    fn batch(&self) -> &Batch {
        match &self.probed {
            Some(probed) if self.uses_probed => probed,
            _ => &self.plain,
        }
    }
}
