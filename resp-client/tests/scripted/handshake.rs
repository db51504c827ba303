//! The way from a connection to a link that takes calls.

use resp_client::{Client, Code, Config, LinkError, LinkId, Protocol, ShardIndex};

use crate::world::World;

fn begin(set: impl FnOnce(&mut Config)) -> (World, LinkId) {
    let mut config = Config::from_urls(&["redis://us:se%20cret@h:1/3"]).expect("URL");
    config.client_name = Some("sluice".to_owned());
    set(&mut config);
    let mut world = World::new(config);
    let link = world.wants("h:1");
    world.connected(link);
    (world, link)
}

fn is_up(client: &Client) -> bool {
    client.shard_is_up(ShardIndex(0)) && client.is_ready()
}

#[test]
fn hello_settles_everything_but_the_database() {
    let (mut world, link) = begin(|_| ());
    assert_eq!(world.client.poll_output(), Some(link));
    assert_eq!(world.sent(link), [["HELLO", "3", "AUTH", "us", "se cret", "SETNAME", "sluice"]]);
    world.reply(link, "%1\r\n+server\r\n+redis\r\n");
    assert!(!is_up(&world.client));
    assert_eq!(world.client.poll_output(), Some(link));
    assert_eq!(world.sent(link), [["SELECT", "3"]]);
    world.reply(link, "+OK\r\n");
    assert!(is_up(&world.client));
}

#[test]
fn where_hello_is_not_known() {
    for answer in ["ERR unknown command `HELLO`, with args beginning with: `3`, `AUTH`", "NOPROTO sorry", "NOPERM no"] {
        let (mut world, link) = begin(|_| ());
        world.sent(link);
        world.reply(link, &format!("-{answer}\r\n"));
        let expected: [&[&str]; 3] = [&["AUTH", "us", "se cret"], &["CLIENT", "SETNAME", "sluice"], &["SELECT", "3"]];
        assert_eq!(world.sent(link), expected);
        world.reply(link, "+OK\r\n-ERR unknown subcommand\r\n+OK\r\n");
        assert!(is_up(&world.client), "a refused name does no harm");
    }
}

#[test]
fn resp2_on_request() {
    let (mut world, link) = begin(|config| {
        config.protocol = Protocol::Resp2;
        config.client_name = None;
        config.database = 0;
        config.credentials.as_mut().expect("credentials").user = None;
    });
    assert_eq!(world.sent(link), [["AUTH", "se cret"]]);
    world.reply(link, "+OK\r\n");
    assert!(is_up(&world.client));
    let mut config = Config::from_urls(&["redis://h:1"]).expect("URL");
    config.protocol = Protocol::Resp2;
    let mut world = World::new(config);
    let link = world.wants("h:1");
    world.connected(link);
    assert!(world.sent(link).is_empty(), "nothing to settle");
    assert!(is_up(&world.client));
}

#[test]
fn a_wrong_password_is_said_and_not_shown() {
    for (answer, code) in [
        ("WRONGPASS invalid username-password pair or user is disabled.", Code::WrongPass),
        ("ERR max number of clients reached", Code::MaxClients),
        ("DENIED Redis is running in protected mode", Code::Denied),
    ] {
        let (mut world, link) = begin(|_| ());
        world.sent(link);
        world.reply(link, &format!("-{answer}\r\n"));
        world.wants_close(link);
        let problem = world.client.shard_problem(ShardIndex(0)).expect("a problem");
        assert_eq!(*problem, LinkError::Refused { code, text: answer.as_bytes().to_vec() });
        assert_eq!(world.client.counters().total().connect_failures, 1);
    }
}

#[test]
fn an_error_that_repeats_the_password_is_cut() {
    let (mut world, link) = begin(|config| config.protocol = Protocol::Resp2);
    world.sent(link);
    world.reply(link, "-ERR unknown command `AUTH`, with args beginning with: `us`, `se cret`, \r\n");
    world.wants_close(link);
    let problem = world.client.shard_problem(ShardIndex(0)).expect("a problem");
    assert!(!format!("{problem} {problem:?}").contains("cret"), "{problem}");
    assert!(problem.to_string().contains("unknown command `AUTH`"), "{problem}");
    assert!(!format!("{:?} {:?}", world.client, world.client.config()).contains("cret"));
}

#[test]
fn a_database_that_is_none() {
    let (mut world, link) = begin(|_| ());
    world.sent(link);
    world.reply(link, "%0\r\n");
    world.sent(link);
    world.reply(link, "-ERR DB index is out of range\r\n");
    world.wants_close(link);
}

#[test]
fn noauth_makes_the_link_anew() {
    let (mut world, link) = World::single();
    world.get(1, "k").expect("room");
    world.sent(link);
    world.reply(link, "-NOAUTH Authentication required.\r\n");
    world.wants_close(link);
    assert_eq!(world.ended().len(), 1);
}
