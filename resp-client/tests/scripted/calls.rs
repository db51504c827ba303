//! Calls on one link: order, deadlines, late replies, bounds.

use resp_client::{CallError, Code, Micros, OwnedReply};

use crate::world::{DEADLINE_MS, Failure, World, ok};

#[test]
fn replies_answer_calls_in_order() {
    let (mut world, link) = World::single();
    for token in 0..3 {
        world.get(token, "k").expect("room");
    }
    assert_eq!(world.client.poll_output(), Some(link));
    assert_eq!(world.client.poll_output(), None, "each link once");
    assert_eq!(world.sent(link), vec![vec!["GET", "k"]; 3]);
    world.reply(link, ":1\r\n$1\r\nx\r\n_\r\n");
    let bulk = Ok(OwnedReply::Bulk(b"x".to_vec()));
    assert_eq!(world.outcomes(), [(0, ok(1)), (1, bulk), (2, Ok(OwnedReply::Nil))]);
    assert_eq!(world.client.in_flight(), 0);
}

#[test]
fn a_reply_in_pieces() {
    let (mut world, link) = World::single();
    let bytes = "*2\r\n:1\r\n$3\r\nabc\r\n";
    for split in 0..bytes.len() {
        world.get(7, "k").expect("room");
        world.get(8, "k").expect("room");
        world.sent(link);
        world.reply(link, &bytes[..split]);
        world.reply(link, &bytes[split..]);
        world.reply(link, ":5\r\n");
        let array = OwnedReply::Array(vec![OwnedReply::Integer(1), OwnedReply::Bulk(b"abc".to_vec())]);
        assert_eq!(world.outcomes(), [(7, Ok(array)), (8, ok(5))], "split at {split}");
    }
}

#[test]
fn a_late_reply_is_dropped_and_shifts_nothing() {
    let (mut world, link) = World::single();
    world.get(1, "k").expect("room");
    world.pass_ms(DEADLINE_MS - 1);
    assert_eq!(world.outcomes(), []);
    world.get(2, "k").expect("room");
    world.sent(link);
    world.pass_ms(1);
    assert_eq!(world.outcomes(), [(1, Err(Failure::Timeout))]);
    // The slot in the table is taken again, under another generation.
    world.get(3, "k").expect("room");
    world.sent(link);
    world.reply(link, ":1\r\n:2\r\n:3\r\n");
    assert_eq!(world.outcomes(), [(2, ok(2)), (3, ok(3))]);
    let total = world.client.counters().total();
    assert_eq!((total.timeouts, total.late_replies, total.replies, total.calls), (1, 1, 2, 3));
}

#[test]
fn next_tick_is_the_earliest_deadline() {
    let (mut world, link) = World::single();
    for (token, millis) in [(1, 900), (2, 30), (3, 5), (4, 5000)] {
        let deadline = world.now + Micros::from_millis(millis);
        world
            .client
            .call(world.now, None, token, deadline, |command| {
                command.word(b"PING");
            })
            .expect("room");
    }
    world.sent(link);
    let mut ends = Vec::new();
    let start = world.now;
    while world.client.in_flight() > 0 {
        let next = world.client.next_tick().expect("a deadline");
        assert!(next > world.now, "no busy waiting");
        world.now = next;
        world.pass_ms(0);
        ends.extend(world.outcomes().iter().map(|(token, _)| (*token, world.now.since(start).0 / 1000)));
        if let Some(resp_client::Action::Close { .. }) = world.action() {
            break;
        }
    }
    // The fourth ends with the link, which has been silent for too long.
    assert_eq!(ends, [(3, 5), (2, 30), (1, 900), (4, 1000)]);
}

#[test]
fn a_full_table_and_a_full_output_refuse() {
    let (mut world, link) = World::single_with(|config| {
        config.in_flight_max = 2;
        config.output_bytes_max = 50;
    });
    let long = "x".repeat(60);
    assert_eq!(world.get(1, &long), Err(CallError::OutputFull));
    world.get(1, "k").expect("room");
    world.get(2, "k").expect("room");
    assert_eq!(world.get(3, "k"), Err(CallError::InFlightFull));
    world.sent(link);
    world.reply(link, ":1\r\n");
    world.get(4, "k").expect("room again");
    assert_eq!(world.outcomes(), [(1, ok(1))]);
    let counters = world.client.counters();
    assert_eq!((counters.refused_in_flight, counters.refused_output, counters.in_flight), (1, 1, 2));
    assert!(!CallError::InFlightFull.is_shard_failure());
    assert!(CallError::OutputFull.is_shard_failure());
}

#[test]
fn a_silent_link_takes_no_more_than_the_table_has() {
    let (mut world, link) = World::single_with(|config| {
        config.in_flight_max = 2;
        config.stall_ms = 60_000;
    });
    for token in 0..2 {
        world.get(token, "k").expect("room");
    }
    world.sent(link);
    world.pass_ms(DEADLINE_MS);
    assert_eq!(world.get(9, "k"), Err(CallError::OutputFull), "two replies are owed");
}

#[test]
fn a_deadline_in_the_past_is_refused() {
    let (mut world, _) = World::single();
    let now = world.now;
    let refused = world.client.call(now, None, 1, now, |command| {
        command.word(b"PING");
    });
    assert_eq!(refused, Err(CallError::TooLate));
}

#[test]
fn errors_of_redis_say_what_they_mean() {
    let (mut world, link) = World::single();
    let errors = [
        ("LOADING Redis is loading the dataset in memory", Code::Loading, true),
        ("CLUSTERDOWN Hash slot not served", Code::ClusterDown, true),
        ("READONLY You can't write against a read only replica.", Code::ReadOnly, true),
        ("MASTERDOWN Link with MASTER is down", Code::MasterDown, true),
        ("BUSY Redis is busy running a script.", Code::Busy, true),
        ("OOM command not allowed when used memory > 'maxmemory'.", Code::OutOfMemory, true),
        ("MISCONF Redis is configured to save RDB snapshots", Code::MisConf, true),
        ("MOVED 1 h:2", Code::Moved, false),
        ("NOPERM this user has no permissions", Code::NoPerm, false),
        ("NOSCRIPT No matching script.", Code::NoScript, false),
        ("TRYAGAIN Multiple keys request during rehashing of slot", Code::TryAgain, false),
        ("WRONGTYPE Operation against a key", Code::WrongType, false),
        ("ERR Error running script (call to f_x): @user_script:1: -OOM command not allowed", Code::OutOfMemory, true),
        ("ERR syntax error", Code::Other, false),
    ];
    for (text, code, _) in errors.iter().filter(|(_, code, _)| *code != Code::TryAgain) {
        world.get(1, "k").expect("room");
        world.sent(link);
        world.reply(link, &format!("-{text}\r\n"));
        assert_eq!(world.outcomes(), [(1, Err(Failure::Server(*code)))], "{text}");
    }
    for (text, code, shard) in errors {
        assert_eq!(Code::of(text.as_bytes()), code);
        let error = resp_client::Error::Server { code, text: resp_client::error::Text(text.as_bytes()) };
        assert_eq!(error.is_shard_failure(), shard, "{text}");
        assert_eq!(error.to_string(), text.escape_default().to_string());
    }
    assert!(resp_client::Error::Timeout.is_shard_failure());
}
