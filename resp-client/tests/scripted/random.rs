//! Whatever happens in whatever order: each accepted call ends exactly once, by its deadline, and with its own reply.

use proptest::prelude::*;
use resp_client::{Action, LinkId, Micros, OwnedReply, Reply};

use crate::world::{DEADLINE_MS, World, shards};

#[derive(Clone, Debug)]
enum Event {
    Call {
        slot: u16,
    },
    /// Time passes.
    Pass {
        micros: u64,
    },
    /// A peer takes so many bytes.
    Take {
        link: usize,
        bytes: usize,
    },
    /// A peer answers so many commands, in pieces of that many bytes.
    Answer {
        link: usize,
        commands: usize,
        piece: usize,
    },
    /// A peer answers with an error instead.
    Refuse {
        link: usize,
        error: usize,
    },
    Close {
        link: usize,
    },
    Garbage {
        link: usize,
    },
    FailConnects,
}

const ERRORS: [&str; 5] =
    ["-MOVED 5 a:1\r\n", "-MOVED 9000 c:3\r\n", "-ASK 5 b:2\r\n", "-TRYAGAIN x\r\n", "-LOADING x\r\n"];

fn events() -> impl Strategy<Value = Event> {
    let link = 0_usize..4;
    prop_oneof![
        6 => (0_u16..16_384).prop_map(|slot| Event::Call { slot }),
        3 => (0_u64..3000).prop_map(|micros| Event::Pass { micros }),
        6 => (link.clone(), 1_usize..200).prop_map(|(link, bytes)| Event::Take { link, bytes }),
        6 => (link.clone(), 1_usize..5, 1_usize..40)
            .prop_map(|(link, commands, piece)| Event::Answer { link, commands, piece }),
        2 => (link.clone(), 0..ERRORS.len()).prop_map(|(link, error)| Event::Refuse { link, error }),
        1 => link.clone().prop_map(|link| Event::Close { link }),
        1 => link.prop_map(|link| Event::Garbage { link }),
        1 => Just(Event::FailConnects),
    ]
}

/// A peer: what it was sent, as far as it has not answered.
struct Peer {
    link: LinkId,
    unread: Vec<u8>,
}

struct Run {
    world: World,
    peers: Vec<Peer>,
    /// Deadlines of the calls that have not ended, by token.
    open: std::collections::HashMap<u64, Micros>,
    tokens: u64,
}

impl Run {
    fn begin() -> Self {
        let (world, a, b) = World::cluster_with(|config| {
            config.backoff_ms_min = 1;
            config.in_flight_max = 16;
        });
        let peers = [a, b].map(|link| Peer { link, unread: Vec::new() }).into();
        Self { world, peers, open: Default::default(), tokens: 0 }
    }

    fn step(&mut self, event: &Event) {
        match *event {
            Event::Call { slot } => {
                let deadline = self.world.now + Micros::from_millis(DEADLINE_MS);
                if self.world.get_at(self.tokens, Some(slot), &self.tokens.to_string()).is_ok() {
                    self.open.insert(self.tokens, deadline);
                }
                self.tokens += 1;
            }
            Event::Pass { micros } => self.world.pass(micros),
            Event::Take { link, bytes } => self.take(link, bytes),
            Event::Answer { link, commands, piece } => (0..commands).for_each(|_| self.answer(link, piece, None)),
            Event::Refuse { link, error } => self.answer(link, 100, Some(ERRORS[error])),
            Event::Close { link } => {
                if let Some(peer) = self.peer(link).map(|peer| peer.link) {
                    self.world.closed(peer);
                }
            }
            Event::Garbage { link } => {
                if let Some(peer) = self.peer(link).map(|peer| peer.link) {
                    self.world.reply(peer, "garbage\r\n");
                }
            }
            Event::FailConnects => self.act(false),
        }
        if !matches!(event, Event::FailConnects) {
            self.act(true);
        }
        self.check();
    }

    fn peer(&mut self, link: usize) -> Option<&mut Peer> {
        let count = self.peers.len().max(1);
        self.peers.get_mut(link % count)
    }

    fn act(&mut self, connects: bool) {
        while let Some(action) = self.world.action() {
            match action {
                Action::Connect { link, .. } if connects => {
                    self.world.connected(link);
                    self.peers.retain(|peer| peer.link.index() != link.index());
                    self.peers.push(Peer { link, unread: Vec::new() });
                }
                Action::Connect { link, .. } => self.world.connect_failed(link),
                Action::Close { link } => self.peers.retain(|peer| peer.link != link),
            }
        }
    }

    fn take(&mut self, link: usize, bytes: usize) {
        let count = self.peers.len().max(1);
        let Self { world, peers, .. } = self;
        let Some(peer) = peers.get_mut(link % count) else { return };
        let output = world.client.output(peer.link);
        let bytes = bytes.min(output.len());
        peer.unread.extend_from_slice(&output[..bytes]);
        world.client.sent(peer.link, bytes);
    }

    /// Answers the oldest whole command: GET with its key, everything else as a server does.
    fn answer(&mut self, link: usize, piece: usize, error: Option<&str>) {
        let Some(peer) = self.peer(link) else { return };
        let Ok(Some((command, end))) = Reply::parse(&peer.unread, &Default::default()) else { return };
        let words: Vec<_> =
            command.items().expect("a command").map(|word| word.as_bytes().expect("a word").to_vec()).collect();
        peer.unread.drain(..end);
        let link = peer.link;
        let answer = match (&words[0][..], error) {
            (b"GET", None) => format!("${}\r\n{}\r\n", words[1].len(), String::from_utf8_lossy(&words[1])),
            (b"GET", Some(error)) => error.to_owned(),
            (b"CLUSTER", _) => shards(&[(0, 8191, "a", 1), (8192, 16_383, "b", 2)]),
            (b"HELLO", _) => "%0\r\n".to_owned(),
            _ => "+OK\r\n".to_owned(),
        };
        for piece in answer.as_bytes().chunks(piece) {
            self.world.reply_bytes(link, piece);
        }
    }

    fn check(&mut self) {
        for done in self.world.ended() {
            assert!(self.open.remove(&done.token).is_some(), "{} ended twice", done.token);
            if let Ok(reply) = done.outcome {
                assert_eq!(reply, OwnedReply::Bulk(done.token.to_string().into_bytes()), "another call's reply");
            }
        }
        assert_eq!(self.world.client.in_flight(), self.open.len());
    }

    fn overdue(&self) -> bool {
        self.open.values().any(|deadline| *deadline <= self.world.now)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn each_call_ends_once_in_time_with_its_own_reply(events in proptest::collection::vec(events(), 1..150)) {
        let mut run = Run::begin();
        for event in &events {
            run.step(event);
            if matches!(event, Event::Pass { .. }) {
                prop_assert!(!run.overdue(), "a tick ends what is due");
            }
        }
        // Nobody answers any more; the client says itself when it wants a tick.
        while !run.open.is_empty() {
            let next = run.world.client.next_tick().expect("calls are open");
            prop_assert!(run.open.values().all(|deadline| next <= *deadline), "no later than a deadline");
            let step = next.since(run.world.now).0;
            run.world.pass(step);
            run.act(true);
            run.check();
            prop_assert!(!run.overdue());
        }
    }
}
