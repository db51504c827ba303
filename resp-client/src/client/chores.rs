//! What time brings: deadlines, retries, connects, stalls, and looks at the topology.

use super::{Client, Completion};
use crate::{
    clock::Micros,
    error::{Error, LinkError},
    link::State,
};

/// The longest time between two looks at the links while there is traffic.
const LOOK_MS: u64 = 5;

impl Client {
    /// Does what is due: to be called when [`Client::next_tick`] says, and no harm more often. It costs little while
    /// nothing is due. Calls whose deadline has come end here, so they end no later than the ticks come.
    #[inline]
    pub fn tick(&mut self, now: Micros, on: &mut impl FnMut(Completion<'_>)) {
        while let Some(id) = self.calls.due(now) {
            self.complete(id, Err(Error::Timeout), on);
        }
        if !self.paused.is_empty() {
            self.try_paused(now, on);
        }
        if now >= self.chores_at {
            self.chores(now, on);
        }
    }

    /// When [`Client::tick`] is to be called next, at the latest; `None` if nothing will be due.
    pub fn next_tick(&self) -> Option<Micros> {
        let paused = self.paused.front().map_or(Micros::NEVER, |(at, _)| *at);
        let next = self.next_link_tick().min(paused).min(self.calls.next_due()).min(self.next_look());
        (next != Micros::NEVER).then_some(next)
    }

    /// Tries calls again whose pause is over; all pauses are equal, so they end in order.
    fn try_paused(&mut self, now: Micros, on: &mut dyn FnMut(Completion<'_>)) {
        while let Some(&(_, id)) = self.paused.front().filter(|(at, _)| *at <= now) {
            self.paused.pop_front();
            let Some(call) = self.calls.find_mut(id) else { continue };
            call.asking = false;
            let link = match call.slot {
                Some(slot) => self.link_of(slot),
                None => self.link_of_any(),
            };
            match link {
                Some(link) => self.go(id, link, now, on),
                None => self.complete(id, Err(Error::NotConnected), on),
            }
        }
    }

    pub(super) fn chores(&mut self, now: Micros, on: &mut dyn FnMut(Completion<'_>)) {
        self.chores_at = Micros::NEVER;
        for index in 0..self.links.len() {
            self.look_at(index, now, on);
        }
        self.look_around(now);
        // A tick that comes when `next_tick` says must find its work: whatever moves a link's time forward, or the next
        // look's, sets this back.
        let latest = now + Micros::from_millis(LOOK_MS.min(self.config.stall_ms));
        self.chores_at = self.chores_at.min(latest).min(self.next_link_tick()).min(self.next_look());
    }

    fn next_link_tick(&self) -> Micros {
        self.links.iter().map(|link| link.next_tick(&self.config)).min().unwrap_or(Micros::NEVER)
    }

    fn look_at(&mut self, index: usize, now: Micros, on: &mut dyn FnMut(Completion<'_>)) {
        let link = &self.links[index];
        match link.state {
            State::Down { retry_at } if link.wanted && retry_at <= now => self.connect(index, now),
            State::Down { .. } => {}
            State::Connecting { until } if until <= now => self.close(index, LinkError::ConnectTimeout, now, on),
            State::Handshake { until } if until <= now => self.close(index, LinkError::HandshakeTimeout, now, on),
            State::Connecting { .. } | State::Handshake { .. } => {}
            State::Up => {
                let idle = link.asked.is_empty() && link.waiting.is_empty();
                if link.next_tick(&self.config) <= now {
                    self.close(index, LinkError::Stalled, now, on);
                } else if !link.wanted && idle {
                    self.close(index, LinkError::Retired, now, on);
                }
            }
        }
    }
}
