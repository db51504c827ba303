//! Slots, redirections, and looks at the topology.

use resp_client::{CallError, Code, ShardIndex};

use crate::world::{DEADLINE_MS, Failure, World, ok, shards};

/// A slot of `a:1` and one of `b:2`.
const ON_A: Option<u16> = Some(5);
const ON_B: Option<u16> = Some(9000);

#[test]
fn calls_go_to_their_slots() {
    let (mut world, a, b) = World::cluster();
    assert!(world.client.is_ready());
    assert_eq!(world.client.shard_of(8191), Some(ShardIndex(0)));
    assert_eq!(world.client.shard_of(8192), Some(ShardIndex(1)));
    assert_eq!(world.client.shard_of(16_384), None);
    assert_eq!(world.client.shard_name(ShardIndex(1)), "b:2");
    world.get_at(1, ON_A, "x").expect("room");
    world.get_at(2, ON_B, "y").expect("room");
    assert_eq!(world.sent(a), [["GET", "x"]]);
    assert_eq!(world.sent(b), [["GET", "y"]]);
    world.reply(b, ":2\r\n");
    world.reply(a, ":1\r\n");
    let ended = world.ended();
    assert_eq!((ended[0].token, ended[0].shard.as_str()), (2, "b:2"));
    assert_eq!((ended[1].token, ended[1].shard.as_str()), (1, "a:1"));
    world.get_at(3, None, "z").expect("any");
    world.get_at(4, None, "z").expect("any");
    assert_eq!((world.sent(a).len(), world.sent(b).len()), (1, 1), "in turn");
}

#[test]
fn nothing_is_taken_before_the_topology_is_known() {
    let mut world = World::of("redis+cluster://a:1");
    assert_eq!(world.get_at(1, ON_A, "k"), Err(CallError::NoShard));
    world.up("a:1");
    assert_eq!(world.get_at(1, ON_A, "k"), Err(CallError::NoShard));
    assert!(!world.client.is_ready());
}

#[test]
fn any_seed_may_be_down() {
    let mut world = World::of("redis+cluster://dead:1,a:1");
    let dead = world.wants("dead:1");
    world.connect_failed(dead);
    let a = world.up("a:1");
    assert_eq!(world.sent(a), [["CLUSTER", "SHARDS"]]);
    world.reply(a, &shards(&[(0, 16_383, "a", 1)]));
    assert!(world.client.is_ready());
    world.pass_ms(10_000);
    assert_eq!(world.action(), None, "a seed that has no slots is not tried again");
}

#[test]
fn redis_before_7_knows_only_slots() {
    let mut world = World::of("redis+cluster://a:1");
    let a = world.up("a:1");
    world.sent(a);
    world.reply(a, "-ERR Unknown subcommand or wrong number of arguments for 'SHARDS'. Try CLUSTER HELP.\r\n");
    assert_eq!(world.sent(a), [["CLUSTER", "SLOTS"]]);
    world.reply(a, "*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$0\r\n\r\n:1\r\n");
    assert_eq!(world.client.shard_of(0), Some(ShardIndex(0)), "an empty host is the node that was asked");
    assert!(world.client.is_ready());
}

#[test]
fn moved_changes_the_table_and_the_call_goes_there() {
    let (mut world, a, b) = World::cluster();
    world.get_at(1, ON_A, "x").expect("room");
    world.sent(a);
    world.reply(a, "-MOVED 5 b:2\r\n");
    assert_eq!(world.client.shard_of(5), Some(ShardIndex(1)));
    assert_eq!(world.client.shard_of(6), Some(ShardIndex(0)));
    assert_eq!(world.sent(b), [["GET", "x"]]);
    world.reply(b, ":1\r\n");
    assert_eq!(world.outcomes(), [(1, ok(1))]);
    let counters = world.client.counters();
    assert_eq!((counters.shards[0].moved, counters.shards[1].replies), (1, 1));
}

#[test]
fn moved_to_a_node_that_is_new() {
    let (mut world, a, _) = World::cluster();
    world.get_at(1, ON_A, "x").expect("room");
    world.sent(a);
    world.reply(a, "-MOVED 5 c:3\r\n");
    let c = world.up("c:3");
    assert_eq!(world.sent(c), [["GET", "x"]]);
    world.reply(c, ":1\r\n");
    assert_eq!(world.outcomes(), [(1, ok(1))]);
    world.get_at(2, ON_A, "x").expect("it is up");
    assert_eq!(world.client.shard_name(world.client.shard_of(5).expect("a shard")), "c:3");
}

#[test]
fn moved_to_nowhere_ends_at_the_deadline() {
    let (mut world, a, _) = World::cluster();
    world.get_at(1, ON_A, "x").expect("room");
    world.sent(a);
    world.reply(a, "-MOVED 5 c:3\r\n");
    world.pass_ms(DEADLINE_MS);
    assert_eq!(world.outcomes(), [(1, Err(Failure::Timeout))]);
    let (mut world, a, _) = World::cluster();
    world.get_at(1, ON_A, "x").expect("room");
    world.sent(a);
    world.reply(a, "-MOVED nonsense\r\n");
    assert_eq!(world.outcomes(), [(1, Err(Failure::Server(Code::Moved)))]);
}

#[test]
fn moved_in_circles_ends() {
    let (mut world, a, b) = World::cluster();
    world.get_at(1, ON_A, "x").expect("room");
    for _ in 0..20 {
        world.sent(a);
        world.reply(a, "-MOVED 5 b:2\r\n");
        if !world.done.is_empty() {
            break;
        }
        world.sent(b);
        world.reply(b, "-MOVED 5 a:1\r\n");
        if !world.done.is_empty() {
            break;
        }
    }
    assert_eq!(world.outcomes(), [(1, Err(Failure::Server(Code::Moved)))]);
}

#[test]
fn a_thousand_redirections_are_one_look() {
    let (mut world, a, b) = World::cluster();
    world.pass_ms(2000);
    assert_eq!(world.client.counters().refreshes, 1);
    for token in 0..1000 {
        world.get_at(token, ON_A, "x").expect("room");
    }
    world.sent(a);
    world.reply(a, &"-MOVED 5 b:2\r\n".repeat(1000));
    assert_eq!(world.client.counters().refreshes, 2);
    let asked = world.sent(b);
    let looks = asked.iter().filter(|command| command[0] == "CLUSTER").count() + world.sent(a).len();
    assert_eq!(looks, 1);
    assert_eq!(asked.iter().filter(|command| command[0] == "GET").count(), 1000);
    // More hints while the question is open, and soon after it: not before the shortest time is over.
    world.reply(b, &(shards(&[(0, 16_383, "b", 2)]) + &":1\r\n".repeat(1000)));
    assert_eq!(world.ended().len(), 1000);
    world.get_at(1, ON_B, "x").expect("room");
    world.sent(b);
    world.reply(b, "-CLUSTERDOWN The cluster is down\r\n");
    assert_eq!(world.outcomes(), [(1, Err(Failure::Server(Code::ClusterDown)))]);
    assert_eq!(world.client.counters().refreshes, 2);
    world.pass_ms(750);
    assert_eq!(world.client.counters().refreshes, 3);
}

#[test]
fn ask_goes_there_for_this_once() {
    let (mut world, a, b) = World::cluster();
    world.get_at(1, ON_A, "x").expect("room");
    world.get_at(2, ON_A, "y").expect("room");
    world.sent(a);
    world.reply(a, "-ASK 5 b:2\r\n:2\r\n");
    assert_eq!(world.sent(b), [&["ASKING"][..], &["GET", "x"][..]]);
    world.reply(b, "+OK\r\n:1\r\n");
    assert_eq!(world.outcomes(), [(2, ok(2)), (1, ok(1))]);
    assert_eq!(world.client.shard_of(5), Some(ShardIndex(0)));
    assert_eq!(world.client.counters().refreshes, 1, "nothing has changed yet");
}

#[test]
fn try_again_tries_again() {
    let (mut world, a, _) = World::cluster();
    world.get_at(1, ON_A, "x").expect("room");
    world.sent(a);
    world.reply(a, "-TRYAGAIN Multiple keys request during rehashing of slot\r\n");
    assert!(world.sent(a).is_empty(), "after a pause");
    assert!(world.client.next_tick().expect("the pause").since(world.now).0 <= 1000);
    world.pass_ms(1);
    assert_eq!(world.sent(a), [["GET", "x"]]);
    world.reply(a, "-TRYAGAIN x\r\n");
    world.pass_ms(DEADLINE_MS);
    assert_eq!(world.outcomes(), [(1, Err(Failure::Timeout))]);
    assert!(world.sent(a).is_empty());
}

#[test]
fn a_shard_that_goes_down_leaves_the_others_alone() {
    let (mut world, a, b) = World::cluster();
    world.pass_ms(2000);
    world.get_at(1, ON_A, "x").expect("room");
    world.get_at(2, ON_B, "y").expect("room");
    world.sent(a);
    world.sent(b);
    world.closed(b);
    world.reply(a, ":1\r\n");
    assert_eq!(world.outcomes(), [(2, Err(Failure::Disconnected)), (1, ok(1))]);
    assert_eq!(world.get_at(3, ON_B, "y"), Err(CallError::NotConnected));
    world.get_at(4, ON_A, "x").expect("a is up");
    // The survivor is asked, and names the replica that took over.
    assert_eq!(world.sent(a).first().map(|command| command.join(" ")), Some("CLUSTER SHARDS".to_owned()));
    world.reply(a, &(shards(&[(0, 8191, "a", 1), (8192, 16_383, "c", 3)]) + ":4\r\n"));
    let c = world.up("c:3");
    world.get_at(5, ON_B, "y").expect("c is up");
    assert_eq!(world.sent(c), [["GET", "y"]]);
    world.pass_ms(10_000);
    assert_eq!(world.outcomes().len(), 2);
}

#[test]
fn while_a_node_with_slots_is_away_the_topology_is_asked_for_again_and_again() {
    // No attempt to connect ends, and so none hints at a change.
    let (mut world, a, b) = World::cluster_with(|config| {
        config.connect_ms = 600_000;
        config.backoff_ms_min = 1;
        config.backoff_ms_max = 1;
    });
    world.pass_ms(2000);
    world.closed(b);
    let ranges = [(0, 8191, "a", 1), (8192, 16_383, "b", 2)];
    let looks = |world: &mut World| {
        let before = world.client.counters().refreshes;
        for _ in 0..1000 {
            world.pass_ms(10);
            if !world.sent(a).is_empty() {
                world.reply(a, &shards(&ranges));
            }
        }
        world.client.counters().refreshes - before
    };
    // Every 500 ms, spread by half.
    let asked = looks(&mut world);
    assert!((13..=40).contains(&asked), "asked {asked} times in 10 s");
    // It is there again, and nothing is left to look for.
    world.up("b:2");
    assert_eq!(looks(&mut world), 0);
}

#[test]
fn the_topology_is_looked_at_from_time_to_time() {
    let (mut world, a, b) = World::cluster();
    for _ in 0..700 {
        world.pass_ms(100);
        for link in [a, b] {
            if !world.sent(link).is_empty() {
                world.reply(link, &shards(&[(0, 8191, "a", 1), (8192, 16_383, "b", 2)]));
            }
        }
    }
    assert_eq!(world.client.counters().refreshes, 2);
    assert!(world.client.next_tick().is_some());
}

#[test]
fn slots_that_nobody_has_are_looked_for_until_somebody_has_them() {
    let (mut world, a, b) = World::cluster();
    let answer = |world: &mut World, ranges: &[(u16, u16, &str, u16)]| {
        let asked = if world.sent(a).is_empty() { b } else { a };
        world.sent(b);
        world.reply(asked, &shards(ranges));
        world.pass_ms(1000);
    };
    world.pass_ms(66_000);
    answer(&mut world, &[(0, 8191, "a", 1), (8193, 16_383, "b", 2)]);
    assert!(!world.client.is_ready());
    answer(&mut world, &[(0, 8191, "a", 1), (8192, 16_383, "b", 2)]);
    assert!(world.client.is_ready());
    assert_eq!((world.sent(a).len(), world.sent(b).len()), (0, 0), "there is nothing to look for");
}

#[test]
fn a_look_that_is_not_answered_goes_to_another_node() {
    let (mut world, a, b) = World::cluster();
    world.pass_ms(66_000);
    let (first, other) = if world.sent(a).is_empty() { (b, a) } else { (a, b) };
    world.sent(first);
    world.pass_ms(1000);
    world.wants_close(first);
    assert_eq!(world.sent(other), [["CLUSTER", "SHARDS"]]);
}

#[test]
fn a_node_that_left_is_closed_and_its_index_is_used_again() {
    let (mut world, a, b) = World::cluster_with(|config| config.shards_max = 2);
    world.pass_ms(66_000);
    let asked = if world.sent(a).is_empty() { b } else { a };
    world.sent(b);
    world.reply(asked, &shards(&[(0, 16_383, "a", 1)]));
    world.pass_ms(10);
    world.wants_close(b);
    world.get_at(1, ON_A, "x").expect("room");
    world.sent(a);
    world.reply(a, "-MOVED 5 c:3\r\n");
    let c = world.up("c:3");
    assert_eq!(c.index(), b.index());
    assert_ne!(c, b);
    world.get_at(2, Some(6), "x").expect("room");
    world.sent(a);
    world.reply(a, "-MOVED 6 d:4\r\n");
    assert_eq!(world.client.counters().shards_refused, 1);
}

#[test]
fn all_nodes_down_begins_with_the_seeds_again() {
    let mut world = World::of("redis+cluster://seed:1");
    let seed = world.up("seed:1");
    world.sent(seed);
    world.reply(seed, &shards(&[(0, 16_383, "a", 1)]));
    let a = world.up("a:1");
    world.pass_ms(10);
    world.wants_close(seed);
    world.closed(a);
    world.pass_ms(30);
    let mut wanted = Vec::new();
    while let Some(resp_client::Action::Connect { address, .. }) = world.action() {
        wanted.push(address.to_string());
    }
    wanted.sort();
    assert_eq!(wanted, ["a:1", "seed:1"]);
}
