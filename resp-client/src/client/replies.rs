//! Bytes that arrived: to replies, and what each means.

use super::{Client, Completion};
use crate::{
    clock::Micros,
    config::Mode,
    error::{Code, Error, LinkError, Text},
    link::{self, Asked, Entry, LinkId, State},
    reply::{ProtocolError, Reply},
    topology,
};

impl Client {
    /// Bytes arrived on a link. Replies are read where they are; only the front of one whose rest is missing is copied.
    #[inline]
    pub fn received(&mut self, link: LinkId, bytes: &[u8], now: Micros, on: &mut impl FnMut(Completion<'_>)) {
        let Some(index) = self.live(link) else { return };
        if self.links[index].tls.is_some() {
            return self.received_tls(link, bytes, now, on);
        }
        self.received_plain(link, bytes, now, on);
    }

    fn received_tls(&mut self, link: LinkId, bytes: &[u8], now: Micros, on: &mut impl FnMut(Completion<'_>)) {
        let Some(index) = self.live(link) else { return };
        let target = &mut self.links[index];
        let mut plain = std::mem::take(&mut target.plain);
        let decrypted = target.tls.as_mut().map_or(Ok(()), |tls| tls.decrypt(bytes, &mut plain));
        // The session itself may have something to say.
        self.list(index);
        self.received_plain(link, &plain, now, on);
        if let (Err(why), Some(index)) = (decrypted, self.live(link)) {
            self.close(index, LinkError::Tls(why), now, on);
        }
        plain.clear();
        self.links[index].plain = plain;
    }

    fn received_plain(&mut self, link: LinkId, bytes: &[u8], now: Micros, on: &mut impl FnMut(Completion<'_>)) {
        let Some(index) = self.live(link) else { return };
        if self.links[index].partial.is_empty() {
            let read = self.replies(link, index, bytes, now, on);
            if read < bytes.len() {
                self.links[index].partial.extend_from_slice(&bytes[read..]);
            }
            return;
        }
        let mut partial = std::mem::take(&mut self.links[index].partial);
        partial.extend_from_slice(bytes);
        let read = self.replies(link, index, &partial, now, on);
        partial.drain(..read);
        self.links[index].partial = partial;
    }

    /// Takes whole replies from the front of `bytes`, and says how many bytes they have: all, if the link was closed.
    #[inline]
    fn replies(
        &mut self,
        link: LinkId,
        index: usize,
        bytes: &[u8],
        now: Micros,
        on: &mut impl FnMut(Completion<'_>),
    ) -> usize {
        let mut at = 0;
        while at < bytes.len() {
            match self.links[index].scanner.scan(&bytes[at..], &self.config.limits) {
                Ok(Some(length)) => {
                    let reply = Reply::of_whole(&bytes[at..at + length]);
                    at += length;
                    self.replied(index, reply, now, on);
                    // What a reply leads to may close the link it came on.
                    if self.live(link).is_none() {
                        return bytes.len();
                    }
                }
                Ok(None) => break,
                Err(error) => {
                    self.close(index, LinkError::Protocol(error), now, on);
                    return bytes.len();
                }
            }
        }
        at
    }

    #[inline]
    fn replied(&mut self, index: usize, reply: Reply<'_>, now: Micros, on: &mut impl FnMut(Completion<'_>)) {
        if let Reply::Push(_) = reply {
            return;
        }
        let Some(entry) = self.links[index].asked.pop_front() else {
            return self.close(index, LinkError::Protocol(ProtocolError::Unasked), now, on);
        };
        let Asked::Call(id) = entry.asked else { return self.own_reply(index, entry, &reply, now, on) };
        match (self.calls.find(id), reply) {
            (None, _) => self.count_late(index),
            (Some(_), Reply::Error(text)) => self.call_failed(index, id, &entry, text, now, on),
            (Some(_), reply) => self.complete(id, Ok(reply), on),
        }
    }

    #[cold]
    fn count_late(&mut self, index: usize) {
        if let Some(counters) = self.shard_counters(index) {
            counters.late_replies += 1;
        }
    }

    /// The reply to a command of the client's own.
    fn own_reply(
        &mut self,
        index: usize,
        entry: Entry,
        reply: &Reply<'_>,
        now: Micros,
        on: &mut dyn FnMut(Completion<'_>),
    ) {
        match entry.asked {
            Asked::Step(step) => {
                let progress = link::answered(&mut self.links[index], step, reply, &self.config, now);
                self.progress(index, progress, now, on);
            }
            Asked::Shards | Asked::Slots => self.topology_answered(index, entry.asked, reply, now),
            Asked::Master => self.master_answered(index, reply, now),
            // What an error leads to shows in the call that follows.
            Asked::Call(_) | Asked::Asking | Asked::Script => {}
        }
    }

    /// A call got an error: it goes elsewhere, again, or back to the caller.
    #[cold]
    fn call_failed(
        &mut self,
        index: usize,
        id: super::CallId,
        entry: &Entry,
        text: &[u8],
        now: Micros,
        on: &mut dyn FnMut(Completion<'_>),
    ) {
        let code = Code::of(text);
        self.count_error(index, code);
        let again = self.calls.find(id).is_some_and(|call| call.attempts < self.config.attempts_max);
        let handled = match code {
            Code::Moved => self.moved(index, id, text, again, now, on),
            Code::Ask if again => self.asked(index, id, text, now, on),
            Code::TryAgain => self.pause(id, now),
            Code::NoScript | Code::NoFunction if again => self.load(index, id, entry, now, on),
            _ => false,
        };
        if code.hints_at_a_change() {
            self.refresh_soon(now);
        }
        if !handled {
            self.complete(id, Err(Error::Server { code, text: Text(text) }), on);
        }
        if code == Code::NoAuth && self.links[index].is_up() {
            // The password was set after the handshake; a new one shows whether ours fits.
            self.close(index, LinkError::Refused { code, text: text.to_vec() }, now, on);
        }
    }

    fn count_error(&mut self, index: usize, code: Code) {
        let Some(counters) = self.shard_counters(index) else { return };
        match code {
            Code::Moved => counters.moved += 1,
            Code::Ask => counters.asked += 1,
            Code::TryAgain => counters.try_again += 1,
            Code::NoScript | Code::NoFunction => counters.no_script += 1,
            _ => {}
        }
    }

    /// The slot is elsewhere for good: the table says so at once, and the call goes there.
    fn moved(
        &mut self,
        index: usize,
        id: super::CallId,
        text: &[u8],
        again: bool,
        now: Micros,
        on: &mut dyn FnMut(Completion<'_>),
    ) -> bool {
        let Some((slot, shard)) = self.redirection(index, text) else { return false };
        self.slots[usize::from(slot)] = shard;
        self.shard_link(shard).wanted = true;
        if let Some(call) = self.calls.find_mut(id).filter(|_| again) {
            call.asking = false;
            self.go(id, self.sentinels + usize::from(shard), now, on);
        }
        again
    }

    /// The key is elsewhere for this once: the call goes there, and says that it may.
    fn asked(
        &mut self,
        index: usize,
        id: super::CallId,
        text: &[u8],
        now: Micros,
        on: &mut dyn FnMut(Completion<'_>),
    ) -> bool {
        let Some((_, shard)) = self.redirection(index, text) else { return false };
        if let Some(call) = self.calls.find_mut(id) {
            call.asking = true;
        }
        self.go(id, self.sentinels + usize::from(shard), now, on);
        true
    }

    fn redirection(&mut self, index: usize, text: &[u8]) -> Option<(u16, u16)> {
        let Mode::Cluster { .. } = self.config.mode else { return None };
        let host = self.links[index].address.host().unwrap_or_default();
        let (slot, address) = topology::redirection(text, host)?;
        Some((slot, self.shard_at(address)?))
    }

    fn pause(&mut self, id: super::CallId, now: Micros) -> bool {
        // Only the deadline bounds how often.
        if let Some(call) = self.calls.find_mut(id) {
            call.attempts = call.attempts.saturating_sub(1);
        }
        self.paused.push_back((now + Micros::from_millis(self.config.try_again_ms), id));
        true
    }

    /// The script is missing: loads it, unless it was loaded after this call was written, and calls again.
    fn load(
        &mut self,
        index: usize,
        id: super::CallId,
        entry: &Entry,
        now: Micros,
        on: &mut dyn FnMut(Completion<'_>),
    ) -> bool {
        let script = self.calls.find(id).and_then(|call| call.script);
        let Some(script) = script.map(|script| usize::from(script.0)) else { return false };
        let link = &mut self.links[index];
        if link.state != State::Up {
            return false;
        }
        if link.load(script, &self.config.scripts[script].load(), entry.end, now)
            && let Some(counters) = self.shard_counters(index)
        {
            counters.script_loads += 1;
        }
        self.go(id, index, now, on);
        true
    }
}
