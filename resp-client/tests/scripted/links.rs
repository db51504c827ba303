//! Links that go down, stall, break the protocol, and come back.

use resp_client::{Action, CallError, LinkError, Micros, ShardIndex};

use crate::world::{Failure, World, ok};

#[test]
fn what_was_sent_fails_and_what_was_not_goes_again() {
    let (mut world, link) = World::single();
    world.get(1, "sent").expect("room");
    world.sent(link);
    world.get(2, "unsent").expect("room");
    world.closed(link);
    assert_eq!(world.outcomes(), [(1, Err(Failure::Disconnected))]);
    assert_eq!(world.get(3, "k"), Err(CallError::NotConnected));
    world.pass_ms(20);
    // Its deadline was sooner than the reconnect.
    assert_eq!(world.outcomes(), [(2, Err(Failure::Timeout))]);
    world.up("h:1");
}

#[test]
fn an_unsent_call_is_sent_by_the_next_connection() {
    let (mut world, link) = World::single_with(|config| config.backoff_ms_min = 1);
    world.get(1, "k").expect("room");
    world.closed(link);
    world.pass_ms(1);
    let next = world.up("h:1");
    assert_ne!(next, link);
    assert_eq!(next.index(), link.index());
    assert_eq!(world.sent(next), [["GET", "k"]]);
    // What the old connection still brings belongs to nobody.
    world.reply(link, ":9\r\n");
    world.closed(link);
    world.reply(next, ":1\r\n");
    assert_eq!(world.outcomes(), [(1, ok(1))]);
}

#[test]
fn a_reconnect_that_fails_ends_who_waits_for_it() {
    let (mut world, link) = World::single_with(|config| config.backoff_ms_min = 1);
    world.get(1, "k").expect("room");
    world.closed(link);
    world.pass_ms(1);
    let next = world.wants("h:1");
    world.connect_failed(next);
    assert_eq!(world.outcomes(), [(1, Err(Failure::NotConnected))]);
    assert_eq!(world.client.shard_problem(ShardIndex(0)), Some(&LinkError::Connect("refused".into())));
}

#[test]
fn the_pause_between_attempts_grows_up_to_the_cap() {
    let mut world = World::of("redis://h:1");
    let mut pauses = Vec::new();
    for _ in 0..14 {
        let link = world.wants("h:1");
        world.connect_failed(link);
        let next = world.client.next_tick().expect("another attempt");
        pauses.push(next.since(world.now).0 / 1000);
        world.pass(next.since(world.now).0);
    }
    assert!((10..=20).contains(&pauses[0]), "{pauses:?}");
    assert!((20..=40).contains(&pauses[1]), "{pauses:?}");
    assert!(pauses[9..].iter().all(|pause| (1000..=2000).contains(pause)), "{pauses:?}");
    assert!(pauses[9..].iter().any(|pause| *pause != pauses[9]), "spread: {pauses:?}");
}

#[test]
fn a_connect_and_a_handshake_take_only_so_long() {
    let mut world = World::of("redis://h:1");
    let link = world.wants("h:1");
    world.pass_ms(49);
    assert_eq!(world.action(), None);
    world.pass_ms(1);
    world.wants_close(link);
    assert_eq!(world.client.shard_problem(ShardIndex(0)), Some(&LinkError::ConnectTimeout));
    world.connected(link);
    assert!(world.client.output(link).is_empty(), "too late");

    world.pass_ms(20);
    let link = world.wants("h:1");
    world.connected(link);
    world.pass_ms(500);
    world.wants_close(link);
    assert_eq!(world.client.shard_problem(ShardIndex(0)), Some(&LinkError::HandshakeTimeout));
}

#[test]
fn a_stalled_link_is_closed_and_made_anew() {
    let (mut world, link) = World::single();
    world.get(1, "k").expect("room");
    world.sent(link);
    world.pass_ms(999);
    assert_eq!(world.outcomes(), [(1, Err(Failure::Timeout))]);
    assert_eq!(world.action(), None);
    world.get(2, "k").expect("still up");
    world.sent(link);
    world.pass_ms(1);
    world.wants_close(link);
    assert_eq!(world.outcomes(), [(2, Err(Failure::Disconnected))]);
    assert_eq!(world.client.counters().total().stalls, 1);
    world.pass_ms(20);
    world.up("h:1");
}

#[test]
fn an_idle_link_does_not_stall() {
    let (mut world, _) = World::single();
    world.pass_ms(100_000);
    assert_eq!(world.action(), None);
    assert_eq!(world.client.next_tick(), None);
}

#[test]
fn garbage_closes_the_link() {
    for garbage in ["HTTP/1.1 400 Bad Request\r\n", ":x\r\n", "$3\r\nabcde\r\n", ":1\r\n:2\r\n"] {
        let (mut world, link) = World::single();
        world.get(1, "k").expect("room");
        world.sent(link);
        world.reply(link, garbage);
        world.wants_close(link);
        assert_eq!(world.client.counters().total().protocol_errors, 1);
        let expected = if garbage.starts_with(":1") { ok(1) } else { Err(Failure::Protocol) };
        assert_eq!(world.outcomes(), [(1, expected)]);
    }
}

#[test]
fn half_a_reply_and_then_silence() {
    let (mut world, link) = World::single();
    world.get(1, "k").expect("room");
    world.sent(link);
    world.reply(link, "$100\r\nabc");
    world.pass_ms(5);
    assert_eq!(world.outcomes(), [(1, Err(Failure::Timeout))]);
    world.pass_ms(1000);
    world.wants_close(link);
    world.pass_ms(20);
    let next = world.up("h:1");
    world.get(2, "k").expect("room");
    world.sent(next);
    world.reply(next, ":2\r\n");
    assert_eq!(world.outcomes(), [(2, ok(2))]);
}

#[test]
fn a_partial_send_shows_the_rest() {
    let (mut world, link) = World::single();
    world.get(1, "k").expect("room");
    let whole = world.client.output(link).to_vec();
    world.client.sent(link, 5);
    assert_eq!(world.client.output(link), &whole[5..]);
    world.get(2, "k").expect("room");
    assert_eq!(world.client.output(link), [&whole[5..], &whole[..]].concat());
    let mut taken = b"left over".to_vec();
    world.client.swap_output(link, &mut taken);
    assert_eq!(taken, [&whole[5..], &whole[..]].concat());
    assert!(world.client.output(link).is_empty());
    world.reply(link, ":1\r\n:2\r\n");
    assert_eq!(world.outcomes(), [(1, ok(1)), (2, ok(2))]);
}

#[test]
fn pushes_are_no_replies() {
    let (mut world, link) = World::single();
    world.get(1, "k").expect("room");
    world.sent(link);
    world.reply(link, ">2\r\n+invalidate\r\n_\r\n:1\r\n");
    assert_eq!(world.outcomes(), [(1, ok(1))]);
}

#[test]
fn a_clock_that_goes_back_does_no_harm() {
    let (mut world, link) = World::single();
    world.get(1, "k").expect("room");
    world.sent(link);
    let now = world.now;
    world.now = Micros(now.0 - 500_000);
    world.pass_ms(0);
    world.now = now;
    world.reply(link, ":1\r\n");
    assert_eq!(world.outcomes(), [(1, ok(1))]);
    assert!(!matches!(world.action(), Some(Action::Close { .. })));
}
