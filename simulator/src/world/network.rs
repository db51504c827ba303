//! Connections between cores and nodes, and the nodes' queues: bytes keep their order on a connection, take their time,
//! and can be late or lost.

use std::collections::VecDeque;

use resp_client::LinkId;

use super::{Node, Owner, Pipes};
use crate::random::Random;

/// One connection.
pub(super) struct Pipe {
    pub(super) owner: Owner,
    pub(super) link: LinkId,
    pub(super) node: usize,
    /// The node's end is open.
    pub(super) is_open: bool,
    /// The core's end is.
    pub(super) is_wanted: bool,
    /// Nothing arrives any more, and nobody notices.
    pub(super) is_mute: bool,
    /// What has come of a command.
    buffer: Vec<u8>,
    /// The last thing on the way to the node, and to the core, arrives then.
    to_node_us: u64,
    to_core_us: u64,
}

/// A node with its queue.
pub(super) struct Site {
    pub(super) node: Node,
    /// Calls that were carried out.
    pub(super) calls: u64,
    queue: VecDeque<(usize, Vec<Vec<u8>>)>,
    is_serving: bool,
    /// It does nothing before.
    pub(super) frozen_until_us: u64,
    /// Everything to and from it takes so much longer, until then.
    pub(super) slow: (u64, u64),
}

/// All of it.
pub(super) struct Network {
    pub(super) nodes: Vec<Site>,
    pub(super) pipes: Vec<Pipe>,
    by_link: Pipes,
    random: Random,
    one_way_us: (u64, u64),
    service_us: u64,
}

impl Network {
    pub(super) fn new(nodes: usize, random: Random, one_way_us: (u64, u64), service_us: u64) -> Self {
        let site = || Site {
            node: Node::new(),
            calls: 0,
            queue: VecDeque::new(),
            is_serving: false,
            frozen_until_us: 0,
            slow: (0, 0),
        };
        Self {
            nodes: (0..nodes).map(|_| site()).collect(),
            pipes: Vec::new(),
            by_link: Pipes::new(),
            random,
            one_way_us,
            service_us,
        }
    }

    fn delay_us(&mut self, node: usize, now_us: u64) -> u64 {
        let (extra_us, until_us) = self.nodes[node].slow;
        let extra_us = if now_us < until_us { extra_us } else { 0 };
        self.random.within(self.one_way_us.0, self.one_way_us.1) + extra_us
    }

    /// A core asks for a connection. Returns when the node hears of it.
    pub(super) fn dial(&mut self, owner: Owner, link: LinkId, node: usize, now_us: u64) -> (usize, u64) {
        let at_us = now_us + self.delay_us(node, now_us);
        self.hang_up(owner, link);
        self.pipes.push(Pipe {
            owner,
            link,
            node,
            is_open: false,
            is_wanted: true,
            is_mute: false,
            buffer: Vec::new(),
            to_node_us: at_us,
            to_core_us: at_us,
        });
        let pipe = self.pipes.len() - 1;
        self.by_link.insert((owner, link.index()), pipe);
        (pipe, at_us)
    }

    /// A core closes its end. What it sent before still arrives.
    pub(super) fn hang_up(&mut self, owner: Owner, link: LinkId) {
        if let Some(pipe) = self.by_link.remove(&(owner, link.index())) {
            self.pipes[pipe].is_wanted = false;
        }
    }

    /// All connections of a gateway's life are gone at its end.
    pub(super) fn forget(&mut self, life: u64) {
        self.by_link.retain(|(owner, _), _| owner.1 != life);
        self.pipes.iter_mut().filter(|pipe| pipe.owner.1 == life).for_each(|pipe| pipe.is_wanted = false);
    }

    /// Connections that a node has open.
    pub(super) fn open_at(&self, node: usize) -> Vec<usize> {
        (0..self.pipes.len()).filter(|&pipe| self.pipes[pipe].node == node && self.pipes[pipe].is_open).collect()
    }

    /// When bytes that a core sends now arrive, and where.
    pub(super) fn send_to_node(&mut self, owner: Owner, link: LinkId, now_us: u64) -> Option<(usize, u64)> {
        let pipe = *self.by_link.get(&(owner, link.index()))?;
        let at_us = now_us + self.delay_us(self.pipes[pipe].node, now_us);
        let way = &mut self.pipes[pipe];
        way.to_node_us = way.to_node_us.max(at_us);
        Some((pipe, way.to_node_us))
    }

    /// When something that a node sends now arrives at the core, if it does.
    pub(super) fn send_to_core(&mut self, pipe: usize, now_us: u64) -> Option<u64> {
        let at_us = now_us + self.delay_us(self.pipes[pipe].node, now_us);
        let way = &mut self.pipes[pipe];
        way.to_core_us = way.to_core_us.max(at_us);
        (way.is_wanted && !way.is_mute).then_some(way.to_core_us)
    }

    /// Bytes arrive at a node. Returns when it serves what is in them, if it does nothing now.
    pub(super) fn arrive(&mut self, pipe: usize, bytes: &[u8], now_us: u64) -> Option<u64> {
        let way = &mut self.pipes[pipe];
        let site = &mut self.nodes[way.node];
        if !way.is_open || way.is_mute || !site.node.is_up {
            return None;
        }
        way.buffer.extend_from_slice(bytes);
        while let Some(command) = Node::next_command(&mut way.buffer) {
            site.queue.push_back((pipe, command));
        }
        (!std::mem::replace(&mut site.is_serving, true)).then_some(now_us + self.service_us)
    }

    /// The command that a node is done with now. `None` where it is frozen, or has none.
    pub(super) fn next_command(&mut self, node: usize, now_us: u64) -> Option<(usize, Vec<Vec<u8>>)> {
        let site = &mut self.nodes[node];
        if !site.node.is_up {
            site.queue.clear();
        }
        if now_us < site.frozen_until_us { None } else { site.queue.pop_front() }
    }

    /// When a node is done with its next command. `None` where it has none and waits.
    pub(super) fn serves_next(&mut self, node: usize, now_us: u64) -> Option<u64> {
        let site = &mut self.nodes[node];
        site.is_serving = !site.queue.is_empty();
        site.is_serving.then_some(site.frozen_until_us.max(now_us) + self.service_us)
    }
}
