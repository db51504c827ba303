//! The primary that Sentinel names, and its successor.

use resp_client::{CallError, Code, LinkError, LinkId, ShardIndex};

use crate::world::{Failure, World, ok};

fn named(host: &str, port: u16) -> String {
    let port = port.to_string();
    format!("*2\r\n${}\r\n{host}\r\n${}\r\n{port}\r\n", host.len(), port.len())
}

const ASKED: [&str; 3] = ["SENTINEL", "get-master-addr-by-name", "mymaster"];

/// The primary's handshake, which ends with its role.
fn up(world: &mut World, name: &str, role: &str) -> LinkId {
    let link = world.up(name);
    assert_eq!(world.sent(link), [["ROLE"]]);
    world.reply(link, &format!("*3\r\n${}\r\n{role}\r\n:0\r\n*0\r\n", role.len()));
    link
}

fn begun() -> (World, LinkId, LinkId) {
    let mut world = World::of("redis+sentinel://:secret@s:1,s:2/mymaster");
    let link = world.wants("s:1");
    world.connected(link);
    assert_eq!(world.sent(link), [["HELLO", "3"]], "the password is the primary's");
    world.reply(link, "%0\r\n");
    assert_eq!(world.sent(link), [ASKED]);
    assert_eq!(world.get(1, "k"), Err(CallError::NoShard));
    world.reply(link, &named("a", 7));
    let a = up(&mut world, "a:7", "master");
    (world, link, a)
}

#[test]
fn the_primary_is_found_and_serves() {
    let (mut world, _, a) = begun();
    assert!(world.client.is_ready());
    world.get(1, "k").expect("room");
    world.sent(a);
    world.reply(a, ":1\r\n");
    assert_eq!(world.outcomes(), [(1, ok(1))]);
    assert_eq!(world.client.shard_name(ShardIndex(0)), "a:7");
}

#[test]
fn a_switch_is_followed_by_the_poll() {
    let (mut world, sentinel, a) = begun();
    world.get(1, "k").expect("room");
    world.sent(a);
    world.pass_ms(4);
    world.reply(a, ":1\r\n");
    world.pass_ms(1100);
    assert_eq!(world.sent(sentinel), [ASKED]);
    world.reply(sentinel, &named("b", 8));
    let b = up(&mut world, "b:8", "master");
    world.wants_close(a);
    assert_eq!(world.client.shard_of(0), Some(ShardIndex(1)));
    world.get(2, "k").expect("room");
    world.sent(b);
    world.reply(b, ":2\r\n");
    assert_eq!(world.outcomes(), [(1, ok(1)), (2, ok(2))]);
    assert_eq!(world.client.counters().topology_changes, 2);
}

#[test]
fn a_lost_primary_and_readonly_are_asked_about_at_once() {
    let (mut world, sentinel, a) = begun();
    world.pass_ms(100);
    world.get(1, "k").expect("room");
    world.sent(a);
    world.reply(a, "-READONLY You can't write against a read only replica.\r\n");
    assert_eq!(world.outcomes(), [(1, Err(Failure::Server(Code::ReadOnly)))]);
    assert_eq!(world.sent(sentinel), [ASKED]);
    world.reply(sentinel, &named("a", 7));
    world.pass_ms(100);
    world.closed(a);
    assert_eq!(world.sent(sentinel), [ASKED]);
    world.reply(sentinel, &named("b", 8));
    up(&mut world, "b:8", "master");
    assert!(world.client.is_ready());
}

#[test]
fn a_node_that_is_no_primary_is_not_taken() {
    let (mut world, sentinel, a) = begun();
    world.pass_ms(100);
    world.closed(a);
    world.sent(sentinel);
    world.reply(sentinel, &named("b", 8));
    let b = up(&mut world, "b:8", "slave");
    world.wants_close(b);
    assert_eq!(world.client.shard_problem(ShardIndex(1)), Some(&LinkError::NotPrimary));
    world.pass_ms(75);
    assert_eq!(world.sent(sentinel), [ASKED], "the sentinel is asked again");
    world.reply(sentinel, &named("b", 8));
    let b = up(&mut world, "b:8", "master");
    world.get(1, "k").expect("it is now");
    assert_eq!(world.sent(b), [["GET", "k"]]);
}

#[test]
fn a_sentinel_that_is_down_or_does_not_know_makes_room() {
    let mut world = World::of("redis+sentinel://s:1,s:2,s:3/mymaster");
    let first = world.wants("s:1");
    world.connect_failed(first);
    let second = world.up("s:2");
    assert_eq!(world.sent(second), [ASKED]);
    world.reply(second, "*-1\r\n");
    let third = world.up("s:3");
    assert!(world.sent(third).is_empty(), "sentinels are not asked without a pause");
    world.pass_ms(75);
    assert_eq!(world.sent(third), [ASKED]);
    world.reply(third, &named("a", 7));
    // The sentinel that does not know is let go.
    let mut actions = Vec::new();
    while let Some(action) = world.action() {
        actions.push(action);
    }
    world.pass_ms(10);
    while let Some(action) = world.action() {
        actions.push(action);
    }
    assert!(actions.contains(&resp_client::Action::Close { link: second }), "{actions:?}");
}

#[test]
fn all_sentinels_down_and_the_primary_serves_on() {
    let (mut world, sentinel, a) = begun();
    world.closed(sentinel);
    assert_eq!(world.client.sentinel_problem(), None, "the other one was not tried yet");
    for _ in 0..10 {
        world.pass_ms(300);
        while let Some(action) = world.action() {
            if let resp_client::Action::Connect { link, .. } = action {
                world.connect_failed(link);
            }
        }
    }
    world.get(1, "k").expect("room");
    world.sent(a);
    world.reply(a, ":1\r\n");
    assert_eq!(world.outcomes(), [(1, ok(1))]);
    assert_eq!(world.client.sentinel_problem(), Some(&LinkError::Connect("refused".into())));
    assert_eq!(world.client.counters().sentinels_lost, 1, "it is one event, however long it takes");
    // That a connection is made is no answer.
    let link = loop {
        world.pass_ms(10);
        match world.action() {
            Some(resp_client::Action::Connect { link, .. }) => break link,
            _ => continue,
        }
    };
    world.connected(link);
    world.sent(link);
    world.reply(link, "%0\r\n");
    world.pass_ms(100);
    assert!(world.client.sentinel_problem().is_some());
    assert_eq!(world.sent(link), [ASKED]);
    world.reply(link, &named("a", 7));
    assert_eq!(world.client.sentinel_problem(), None);
}
