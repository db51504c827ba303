//! What the owner of the sockets reports, and what that changes.

use super::{Action, Client, Completion};
use crate::{
    clock::Micros,
    error::{Error, LinkError},
    link::{self, Asked, Handshake, LinkId, Progress, State},
};

impl Client {
    /// The connection of [`Action::Connect`] is made.
    pub fn connected(&mut self, link: LinkId, now: Micros, on: &mut impl FnMut(Completion<'_>)) {
        let Some(index) = self.live(link) else { return };
        if !matches!(self.links[index].state, State::Connecting { .. }) {
            return;
        }
        self.chores_at = Micros(0);
        let until = now + Micros::from_millis(self.config.handshake_ms);
        let target = &mut self.links[index];
        if let Err(why) = target.connected(self.tls.as_ref(), until) {
            self.close(index, LinkError::Tls(why), now, on);
            return;
        }
        let progress = link::begin(target, &self.config, now);
        self.progress(index, progress, now, on);
        self.list(index);
    }

    /// The connection of [`Action::Connect`] was not made.
    pub fn connect_failed(&mut self, link: LinkId, now: Micros, why: &str, on: &mut impl FnMut(Completion<'_>)) {
        if let Some(index) = self.live(link) {
            self.down(index, LinkError::Connect(why.to_owned()), now, on);
        }
    }

    /// The connection is gone: the peer closed it, or reading or writing failed.
    pub fn closed(&mut self, link: LinkId, now: Micros, why: &str, on: &mut impl FnMut(Completion<'_>)) {
        if let Some(index) = self.live(link) {
            self.down(index, LinkError::Closed(why.to_owned()), now, on);
        }
    }

    /// What is to be sent on a link. Bytes that were shown count as possibly sent.
    #[inline]
    pub fn output(&mut self, link: LinkId) -> &[u8] {
        match self.live(link) {
            // An error of TLS shows again at the next bytes that arrive, or by the stall.
            Some(index) => self.links[index].output().unwrap_or_default(),
            None => &[],
        }
    }

    /// So many bytes of the output are sent. What is left is shown again by [`Client::output`].
    #[inline]
    pub fn sent(&mut self, link: LinkId, bytes: usize) {
        if let Some(index) = self.live(link) {
            self.links[index].sent(bytes);
        }
    }

    /// Hands the whole output of a link over in exchange for `buffer`, which is emptied: for owners who need bytes that
    /// stay where they are while they are sent. All of it counts as sent.
    #[inline]
    pub fn swap_output(&mut self, link: LinkId, buffer: &mut Vec<u8>) {
        buffer.clear();
        if let Some(index) = self.live(link) {
            // As with `output`.
            let _ = self.links[index].swap_output(buffer);
        }
    }

    /// Closes a link from this side.
    pub(super) fn close(&mut self, index: usize, why: LinkError, now: Micros, on: &mut dyn FnMut(Completion<'_>)) {
        self.actions.push_back(Action::Close { link: self.links[index].id() });
        self.down(index, why, now, on);
    }

    /// Starts an attempt to connect.
    pub(super) fn connect(&mut self, index: usize, now: Micros) {
        let until = now + Micros::from_millis(self.config.connect_ms);
        let link = &mut self.links[index];
        let id = link.connect(until);
        link.handshake = match () {
            () if index < self.sentinels => Handshake::of_sentinel(),
            () if self.sentinels > 0 => Handshake::of_primary(),
            () => Handshake::default(),
        };
        self.actions.push_back(Action::Connect { link: id, address: link.address.clone() });
        if let Some(counters) = self.shard_counters(index) {
            counters.connects += 1;
        }
    }

    /// Goes on after a step of the handshake.
    pub(super) fn progress(
        &mut self,
        index: usize,
        progress: Progress,
        now: Micros,
        on: &mut dyn FnMut(Completion<'_>),
    ) {
        match progress {
            Progress::Waiting => self.list(index),
            Progress::Failed(why) => self.close(index, why, now, on),
            Progress::Done => {
                self.links[index].up();
                if let Some(counters) = self.shard_counters(index) {
                    counters.connected += 1;
                }
                self.chores_at = Micros(0);
                self.flush_waiting(index, now, on);
                self.list(index);
                self.look_around(now);
            }
        }
    }

    /// Sends the calls that waited for a link.
    fn flush_waiting(&mut self, index: usize, now: Micros, on: &mut dyn FnMut(Completion<'_>)) {
        for id in std::mem::take(&mut self.links[index].waiting) {
            self.go(id, index, now, on);
        }
    }

    /// Sends an accepted call on a link: now, or when the link is up if that may be soon.
    pub(super) fn go(&mut self, id: super::CallId, index: usize, now: Micros, on: &mut dyn FnMut(Completion<'_>)) {
        let Some(call) = self.calls.find(id) else { return };
        let bytes = call.command().len();
        if call.deadline <= now {
            return self.complete(id, Err(Error::Timeout), on);
        }
        let link = &mut self.links[index];
        match link.state {
            State::Up if link.has_room(bytes, &self.config) => self.send(id, index, now),
            State::Up => self.complete(id, Err(Error::OutputFull), on),
            State::Down { .. } if !link.may_come_up() => self.complete(id, Err(Error::NotConnected), on),
            _ => {
                link.wanted = true;
                link.waiting.push(id);
                self.chores_at = Micros(0);
            }
        }
    }

    /// The connection of a link is gone. Calls that may have been executed fail; those that certainly were not go where
    /// their slot is now. Calls that waited for a link that did not come up fail.
    pub(super) fn down(&mut self, index: usize, why: LinkError, now: Micros, on: &mut dyn FnMut(Completion<'_>)) {
        self.count_down(index, &why);
        let link = &mut self.links[index];
        let was_up = link.is_up();
        let error = match &why {
            LinkError::Protocol(error) => Error::Protocol(*error),
            _ => Error::Disconnected,
        };
        let mut asked = std::mem::take(&mut link.asked);
        let written = asked.iter().position(|entry| !link.may_have_left(entry)).unwrap_or(asked.len());
        let waiting = std::mem::take(&mut link.waiting);
        link.down(why, now, &self.config, &mut self.chance);
        self.chores_at = Micros(0);
        self.lost(index, was_up, now);

        let call = |asked: Asked| if let Asked::Call(id) = asked { Some(id) } else { None };
        for id in asked.iter().take(written).filter_map(|entry| call(entry.asked)) {
            self.complete(id, Err(error), on);
        }
        for id in asked.iter().skip(written).filter_map(|entry| call(entry.asked)).chain(waiting) {
            self.go_again(id, index, was_up, now, on);
        }
        asked.clear();
        self.links[index].asked = asked;
    }

    /// A call whose link is gone and that was not sent.
    fn go_again(
        &mut self,
        id: super::CallId,
        gone: usize,
        was_up: bool,
        now: Micros,
        on: &mut dyn FnMut(Completion<'_>),
    ) {
        let Some(call) = self.calls.find_mut(id) else { return };
        call.asking = false;
        let link = match call.slot {
            Some(slot) => self.link_of(slot),
            None => self.link_of_any().or(Some(gone)),
        };
        match link {
            Some(link) if link != gone || was_up => self.go(id, link, now, on),
            _ => self.complete(id, Err(Error::NotConnected), on),
        }
    }

    fn count_down(&mut self, index: usize, why: &LinkError) {
        let was_up = self.links[index].is_up();
        let Some(counters) = self.shard_counters(index) else { return };
        if was_up {
            counters.disconnects += u64::from(*why != LinkError::Retired);
            counters.stalls += u64::from(*why == LinkError::Stalled);
        } else {
            counters.connect_failures += 1;
        }
        counters.protocol_errors += u64::from(matches!(why, LinkError::Protocol(_)));
    }

    pub(super) fn shard_counters(&mut self, index: usize) -> Option<&mut crate::counters::ShardCounters> {
        self.counters.shards.get_mut(index.checked_sub(self.sentinels)?)
    }
}
