//! A Redis node as the gateways' clients see it: commands in as bytes, replies out as bytes.
//!
//! It knows what the client asks for: HELLO, CLUSTER SHARDS, SCRIPT LOAD and EVALSHA of the one script.

use std::{io::Write, ops::RangeInclusive};

use policy_sync::model::Limit;
use resp_client::{Limits, Reply, SLOTS};

use crate::bucket::{Answer, Buckets, Part, Take};

/// Where a cluster's slots are: one range per shard, in order.
#[derive(Clone, Debug)]
pub struct SlotMap {
    /// By shard: the number of the node that has its slots.
    pub primaries: Vec<usize>,
}

impl SlotMap {
    /// The shard of a slot.
    pub fn shard_of(&self, slot: u16) -> usize {
        usize::from(slot) * self.primaries.len() / usize::from(SLOTS)
    }

    fn slots(&self, shard: usize) -> RangeInclusive<usize> {
        let (shards, slots) = (self.primaries.len(), usize::from(SLOTS));
        // The first slot whose product reaches the shard's number.
        let first = |shard: usize| (shard * slots).div_ceil(shards);
        first(shard)..=first(shard + 1) - 1
    }
}

/// The port of a node, by its number.
pub fn port(node: usize) -> u16 {
    // There are a few dozen.
    7_000 + node as u16
}

/// The node that has a port.
pub fn node_of_port(port: u16) -> usize {
    usize::from(port.saturating_sub(7_000))
}

/// What a call did to one bucket.
#[derive(Clone, Debug)]
pub struct Moved {
    /// Its key.
    pub key: String,
    /// Its limit.
    pub limit: Limit,
    /// How it was called.
    pub take: Take,
    /// What was asked for.
    pub cost: u64,
    /// What was answered.
    pub answer: Answer,
}

/// One node.
#[derive(Clone, Debug)]
pub struct Node {
    /// Its buckets.
    pub buckets: Buckets,
    /// What its clock is ahead of the world's time, in milliseconds.
    pub ahead_ms: i64,
    /// It runs.
    pub is_up: bool,
    has_script: bool,
}

/// The time at which every node's clock begins, so that it can go back.
const CLOCK_STARTS_MS: u64 = 1_800_000_000_000;

impl Node {
    /// A node that knows nothing.
    pub fn new() -> Self {
        Self { buckets: Buckets::default(), ahead_ms: 0, is_up: true, has_script: false }
    }

    /// What its clock shows.
    pub fn clock_ms(&self, now_us: u64) -> u64 {
        (CLOCK_STARTS_MS + now_us / 1_000).saturating_add_signed(self.ahead_ms)
    }

    /// It comes up again; what it ran with is lost, its buckets are not.
    pub fn start(&mut self) {
        (self.is_up, self.has_script) = (true, false);
    }

    /// Takes the first command out of `buffer`, if it is whole. A command that is none is the client's fault, and ends
    /// the simulation.
    pub fn next_command(buffer: &mut Vec<u8>) -> Option<Vec<Vec<u8>>> {
        let (words, len) = match Reply::parse(buffer, &Limits::default()) {
            Ok(Some((reply, len))) => (reply.items()?.map(|word| word.as_bytes().map(<[u8]>::to_vec)).collect(), len),
            Ok(None) => return None,
            Err(error) => panic!("the client sent no command: {error}: {}", buffer.escape_ascii()),
        };
        buffer.drain(..len);
        words
    }

    /// Carries out a command. Returns what it moved.
    pub fn execute(&mut self, now_us: u64, slots: &SlotMap, words: &[Vec<u8>], reply: &mut Vec<u8>) -> Vec<Moved> {
        let name = words.first().map_or(&b""[..], |word| word);
        match name {
            b"HELLO" => reply.extend_from_slice(b"%1\r\n$5\r\nproto\r\n:3\r\n"),
            b"CLUSTER" => describe(slots, reply),
            b"SCRIPT" => {
                self.has_script = true;
                reply.extend_from_slice(b"$40\r\n0000000000000000000000000000000000000000\r\n");
            }
            b"EVALSHA" if !self.has_script => reply.extend_from_slice(b"-NOSCRIPT No matching script.\r\n"),
            b"EVALSHA" => return self.call(now_us, words, reply),
            _ => reply.extend_from_slice(b"-ERR unknown command\r\n"),
        }
        Vec::new()
    }

    /// `EVALSHA sha N key… mode (capacity refill period cost)…`
    fn call(&mut self, now_us: u64, words: &[Vec<u8>], reply: &mut Vec<u8>) -> Vec<Moved> {
        let text = |at: usize| std::str::from_utf8(&words[at]).unwrap_or_default();
        let number = |at: usize| text(at).parse::<u64>().unwrap_or_default();
        let count = number(2) as usize;
        let Some(take) = Take::of_word(&words[3 + count]) else { panic!("no way to take: {}", text(3 + count)) };
        let parts: Vec<Part<'_>> = (0..count)
            .map(|index| {
                let at = 4 + count + 4 * index;
                let limit = Limit { capacity: number(at), refill: number(at + 1), period_ms: number(at + 2) };
                (text(3 + index), limit, number(at + 3))
            })
            .collect();
        let answers = self.buckets.call(self.clock_ms(now_us), take, &parts);
        let mut put = |text: String| reply.extend_from_slice(text.as_bytes());
        put(format!("*{}\r\n", 4 * count));
        for Answer { granted, remaining, retry_ms, reset_ms } in &answers {
            put(format!(":{granted}\r\n:{remaining}\r\n:{retry_ms}\r\n:{reset_ms}\r\n"));
        }
        let moved = parts.iter().zip(answers).map(|(&(key, limit, cost), answer)| Moved {
            key: key.to_owned(),
            limit,
            take,
            cost,
            answer,
        });
        moved.collect()
    }
}

impl Default for Node {
    fn default() -> Self {
        Self::new()
    }
}

/// The answer to CLUSTER SHARDS.
fn describe(slots: &SlotMap, reply: &mut Vec<u8>) {
    let mut text = format!("*{}\r\n", slots.primaries.len());
    for (shard, &node) in slots.primaries.iter().enumerate() {
        let range = slots.slots(shard);
        text += &format!("%2\r\n$5\r\nslots\r\n*2\r\n:{}\r\n:{}\r\n$5\r\nnodes\r\n*1\r\n", range.start(), range.end());
        text += &format!("%4\r\n$8\r\nendpoint\r\n$5\r\nredis\r\n$4\r\nport\r\n:{}\r\n", port(node));
        text += "$4\r\nrole\r\n$6\r\nmaster\r\n$6\r\nhealth\r\n$6\r\nonline\r\n";
    }
    // Memory takes it.
    let _ = reply.write_all(text.as_bytes());
}
