//! A call and its reply allocate nothing once the client is warm: counted by this test's own allocator.
//!
//! Without the test harness, whose threads allocate when they like.
#![allow(unsafe_code)]
#![allow(clippy::print_stdout, reason = "it reports like a test")]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use resp_client::{Action, Client, Config, LinkId, Micros, Reply, Script, ScriptId};

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call goes to the system's allocator unchanged; counting touches no memory but the counter's.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Relaxed);
        // SAFETY: the caller keeps `alloc`'s contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: `memory` came from `alloc` or `realloc`, with this layout.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Relaxed);
        // SAFETY: `memory` came from `alloc` or `realloc`, with this layout; the caller keeps the rest of the contract.
        unsafe { System.realloc(memory, layout, bytes) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

struct Rig {
    client: Client,
    link: LinkId,
    now: u64,
    replies: Vec<u8>,
    output: Vec<u8>,
    sum: i64,
    done: usize,
}

impl Rig {
    fn new() -> Self {
        let mut config = Config::from_urls(&["redis://h:1"]).expect("URL");
        config.scripts.push(Script::by_hash("return {1, 2, 3, 4}"));
        let mut client = Client::new(config, 1, Micros(0)).expect("settings");
        client.tick(Micros(0), &mut |_| ());
        let Some(Action::Connect { link, .. }) = client.poll_action() else { panic!("a connect") };
        client.connected(link, Micros(0), &mut |_| ());
        let sent = client.output(link).len();
        client.sent(link, sent);
        client.received(link, b"%0\r\n", Micros(0), &mut |_| ());
        let replies = b"*4\r\n:1\r\n:99\r\n:0\r\n:6000\r\n".repeat(64);
        Self { client, link, now: 1, replies, output: Vec::new(), sum: 0, done: 0 }
    }

    /// One wake-up: 64 calls, one write, their replies in two pieces of which the first ends in the midst of one, a tick.
    fn wake_up(&mut self) {
        self.now += 200;
        let now = Micros(self.now);
        for token in 0..64_u64 {
            let slot = u16::try_from(token * 97).unwrap_or_default();
            let deadline = now + Micros::from_millis(5);
            self.client
                .evalsha(now, Some(slot), token, deadline, ScriptId(0), 1, |command| {
                    command.parts(&[b"rl:{key=ak_", b"12345", b"}:login-per-key"]);
                    command.integer(10).integer(10).integer(60_000).integer(1);
                })
                .expect("room");
        }
        while let Some(link) = self.client.poll_output() {
            self.client.swap_output(link, &mut self.output);
        }
        let (sum, done) = (&mut self.sum, &mut self.done);
        let mut on = |completion: resp_client::Completion<'_>| {
            *done += 1;
            if let Ok(Reply::Array(items)) = completion.outcome {
                *sum += items.integers().flatten().sum::<i64>();
            }
        };
        let split = 1000;
        self.client.received(self.link, &self.replies[..split], now, &mut on);
        self.client.received(self.link, &self.replies[split..], now, &mut on);
        self.client.tick(now, &mut on);
    }
}

fn main() {
    let mut rig = Rig::new();
    for _ in 0..100 {
        rig.wake_up();
    }
    let before = ALLOCATIONS.load(Relaxed);
    let rounds = 1000;
    for _ in 0..rounds {
        rig.wake_up();
    }
    let allocated = ALLOCATIONS.load(Relaxed) - before;
    assert_eq!(rig.done, (100 + rounds) * 64, "each call ended");
    assert_eq!(rig.sum, 6100 * i64::try_from(rig.done).expect("small"), "with its reply");
    assert_eq!(allocated, 0, "allocations in {} calls", rounds * 64);
    println!("test calls and replies allocate nothing ... ok ({} calls)", rounds * 64);
}
