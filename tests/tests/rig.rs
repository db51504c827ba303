//! The rig by itself: what breaks on command breaks as it says, and comes back.
#![allow(missing_docs)]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on must stop, with the reason")]
#![allow(clippy::disallowed_methods, reason = "tests wait for real processes")]

use std::{
    io::{ErrorKind, Read},
    net::TcpStream,
    process::Command,
    time::{Duration, Instant},
};

use sluice_e2e::{
    Client, PATIENCE, Reply, error, integer,
    postgres::Postgres,
    proxy::{Fault, Proxy},
    redis_cluster::Cluster,
    redis_sentinel::Sentinel,
    redis_server::Redis,
    request, text, until,
};

/// Short against [`PATIENCE`], long against what a reply takes.
const A_WHILE: Duration = Duration::from_millis(150);

fn connect(address: std::net::SocketAddr) -> Client<TcpStream> {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_nodelay(true).unwrap();
    Client::new(stream)
}

fn ping(client: &mut Client<TcpStream>) -> Reply {
    client.ask(&["PING"])
}

fn pong() -> Reply {
    Reply::SimpleString(b"PONG".to_vec())
}

/// Whether nothing comes for a while.
fn is_silent(client: &mut Client<TcpStream>) -> bool {
    client.stream().set_read_timeout(Some(A_WHILE)).unwrap();
    let outcome = client.try_receive();
    client.stream().set_read_timeout(Some(PATIENCE)).unwrap();
    matches!(outcome, Err(error) if error.kind() == ErrorKind::WouldBlock)
}

#[test]
fn redis_is_killed_and_comes_back_on_its_port_without_data() {
    let redis = Redis::start(&[]);
    assert_eq!(text(&redis.command(&["SET", "a", "1"])), "OK");
    assert_eq!(connect(redis.address()).ask(&["GET", "a"]), Reply::BulkString(b"1".to_vec()));
    redis.kill();
    assert!(!redis.is_up());
    assert_eq!(TcpStream::connect(redis.address()).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    redis.try_command(&["PING"]).unwrap_err();
    redis.restart();
    assert_eq!(connect(redis.address()).ask(&["GET", "a"]), Reply::Null);
    assert!(redis.unix_socket().exists());
}

#[test]
fn a_frozen_redis_accepts_and_answers_once_it_thaws() {
    let redis = Redis::start(&[]);
    redis.freeze();
    assert!(!redis.is_up());
    let mut client = connect(redis.address());
    client.send(&request(&["PING"]));
    assert!(is_silent(&mut client));
    redis.thaw();
    assert_eq!(client.receive(), Some(pong()));
}

#[test]
fn what_touched_redis_is_counted_and_the_rig_is_not() {
    let redis = Redis::start(&[]);
    assert_eq!((redis.connections_received(), redis.calls("get"), redis.calls("config")), (0, 0, 0));
    let mut client = connect(redis.address());
    client.ask(&["GET", "a"]);
    client.ask(&["GET", "a"]);
    client.ask(&["CONFIG", "GET", "maxmemory"]);
    assert_eq!((redis.connections_received(), redis.calls("get"), redis.calls("config")), (1, 2, 1));
    redis.restart();
    assert_eq!((redis.connections_received(), redis.calls("get"), redis.calls("config")), (0, 0, 0));
}

#[test]
fn redis_with_a_password_starts_and_refuses_others() {
    let redis = Redis::start(&["--requirepass", "secret"]);
    let mut client = connect(redis.address());
    assert!(error(&ping(&mut client)).starts_with("NOAUTH"));
    assert_eq!(text(&client.ask(&["AUTH", "secret"])), "OK");
    assert_eq!(ping(&mut client), pong());
    assert_eq!(redis.command(&["PING"]), pong());
}

#[test]
fn redis_with_tls_proves_that_it_is_localhost() {
    let redis = Redis::start_tls();
    let ask = |more: &[&str]| {
        let mut command = Command::new("redis-cli");
        command.args(["-h", "localhost", "-p", &redis.port().to_string()]).args(more).arg("PING");
        let output = command.output().unwrap();
        [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap()).concat()
    };
    let ca_file = redis.ca_file();
    assert_eq!(ask(&["--tls", "--sni", "localhost", "--cacert", ca_file.to_str().unwrap()]), "PONG\n");
    let other = Redis::start_tls();
    let text = ask(&["--tls", "--cacert", other.ca_file().to_str().unwrap()]);
    assert!(text.contains("certificate verify failed"), "{text}");
    assert!(!ask(&[]).contains("PONG"), "and says nothing without TLS");
    assert_eq!(redis.command(&["PING"]), pong());
}

#[test]
fn a_cluster_is_ready_at_every_node() {
    let mut cluster = Cluster::start(3, 1);
    assert_eq!((cluster.nodes().len(), cluster.urls().len(), cluster.primaries()), (6, 6, vec![0, 1, 2]));
    assert_eq!([0, 1, 2].map(|primary| cluster.replica_of(primary)), [3, 4, 5]);
    for key in ["a", "{b}c", "x{b}c{d}", "{}y", "{open", "rl:{ip=10.0.0.1}:login"] {
        let slot = Cluster::slot_of(key);
        assert_eq!(integer(&cluster.nodes()[0].command(&["CLUSTER", "KEYSLOT", key])), i64::from(slot), "{key}");
        let primary = &cluster.nodes()[cluster.primary_of(slot)];
        assert_eq!(text(&primary.command(&["SET", key, "1"])), "OK");
    }
    let added = cluster.add_node();
    assert_eq!((added, cluster.primaries()), (6, vec![0, 1, 2]), "it has no slots yet");
    cluster.move_slot(0, 0, added);
    assert_eq!((cluster.primary_of(0), cluster.primaries()), (added, vec![0, 1, 2, 6]));
}

#[test]
fn a_slot_on_its_way_is_asked_for_and_then_moved() {
    for args in [&[][..], &["--requirepass", "secret"]] {
        let cluster = Cluster::start_with(2, 0, args);
        let slot = Cluster::slot_of("{a}");
        let from = cluster.primary_of(slot);
        let to = 1 - from;
        let (old, new) = (&cluster.nodes()[from], &cluster.nodes()[to]);
        for key in ["{a}1", "{a}2"] {
            assert_eq!(text(&old.command(&["SET", key, "1"])), "OK");
        }
        let begun = cluster.begin_move(slot, from, to);
        begun.carry(&["{a}1"]);
        assert_eq!(error(&old.command(&["GET", "{a}1"])), format!("ASK {slot} {}", new.address()));
        assert!(error(&old.command(&["MGET", "{a}1", "{a}2"])).starts_with("TRYAGAIN"));
        assert_eq!(error(&new.command(&["GET", "{a}1"])), format!("MOVED {slot} {}", old.address()));
        assert_eq!(text(&old.command(&["GET", "{a}2"])), "1");
        begun.finish();
        assert_eq!(cluster.primary_of(slot), to);
        assert_eq!(text(&new.command(&["GET", "{a}2"])), "1");
        assert_eq!(error(&old.command(&["GET", "{a}2"])), format!("MOVED {slot} {}", new.address()));
    }
}

#[test]
fn clients_of_a_cluster_are_sent_through_a_proxy() {
    let cluster = Cluster::start(3, 1);
    let proxy = Proxy::start(cluster.nodes()[0].address());
    cluster.announce(0, proxy.address());
    assert_eq!(error(&cluster.nodes()[1].command(&["GET", "{b}"])), format!("MOVED 3300 {}", proxy.address()));
    assert_eq!(connect(proxy.address()).ask(&["GET", "{b}"]), Reply::Null);
    assert_eq!(cluster.replica_of(0), 3);
}

#[test]
fn a_killed_primary_is_replaced_and_comes_back_as_a_replica() {
    let cluster = Cluster::start(3, 1);
    let old = cluster.primary_of(0);
    let replica = cluster.replica_of(old);
    cluster.nodes()[old].kill();
    assert_eq!(cluster.wait_for_promotion(old), replica);
    assert_eq!(cluster.primary_of(0), replica);
    cluster.nodes()[old].restart();
    cluster.settle();
    assert_eq!(cluster.replica_of(replica), old);
}

#[test]
fn a_shard_without_a_primary_does_not_stop_the_others() {
    let cluster = Cluster::start(3, 0);
    cluster.nodes()[0].kill();
    let other = &cluster.nodes()[1];
    until("the loss is noticed", || text(&other.command(&["CLUSTER", "NODES"])).contains("master,fail "));
    assert!(cluster.nodes()[1..].iter().all(|node| {
        let info = node.command(&["CLUSTER", "INFO"]);
        text(&info).contains("cluster_state:ok")
    }));
}

#[test]
fn sentinels_switch_on_command() {
    let sentinel = Sentinel::start();
    assert_eq!(sentinel.sentinels().len(), 3);
    assert_eq!(sentinel.url(), format!("redis+sentinel://{}/mymaster", sentinel.sentinels()[0]));
    let [old, new] = [0, 1].map(|node| sentinel.nodes()[node].address());
    assert_eq!(sentinel.master(), old);
    assert_eq!((sentinel.fail_over(), sentinel.master()), (new, new));
    let port = new.port().to_string();
    assert_eq!(text(&sentinel.node_at(old).command(&["REPLICAOF", "127.0.0.1", &port])), "OK");
    sentinel.wait_until_follows(old);
    assert!(error(&sentinel.node_at(old).command(&["SET", "a", "1"])).starts_with("READONLY"));
}

#[test]
fn sentinels_switch_when_the_primary_dies() {
    let sentinel = Sentinel::start();
    let old = sentinel.master();
    sentinel.node_at(old).kill();
    sentinel.sentinel_nodes()[0].freeze();
    let new = sentinel.wait_for_switch(old);
    assert_eq!(new, sentinel.nodes()[1].address());
    assert_eq!(text(&sentinel.node_at(new).command(&["SET", "a", "1"])), "OK");
}

#[test]
fn a_proxy_passes_and_counts() {
    let redis = Redis::start(&[]);
    let proxy = Proxy::start(redis.address());
    let mut client = connect(proxy.address());
    assert_eq!(ping(&mut client), pong());
    assert_eq!((proxy.connections(), proxy.bytes_up(), proxy.bytes_down()), (1, 14, 7));
    redis.kill();
    assert_eq!(client.receive(), None, "the end passes too");
    assert_eq!(connect(proxy.address()).receive(), None, "and so does that nobody is there");
}

#[test]
fn a_delay_makes_replies_late_but_not_slow() {
    let redis = Redis::start(&[]);
    let proxy = Proxy::start(redis.address());
    let mut client = connect(proxy.address());
    assert_eq!(ping(&mut client), pong());
    proxy.set(Fault::Delay(A_WHILE));
    let began = Instant::now();
    // Small pauses make many chunks of them; one after the other they would take 15 seconds.
    for _ in 0..100 {
        client.send(&request(&["PING"]));
        std::thread::yield_now();
    }
    for _ in 0..100 {
        assert_eq!(client.receive(), Some(pong()));
    }
    let took = began.elapsed();
    assert!(took >= A_WHILE && took < 10 * A_WHILE, "{took:?}");
    // What waits leaves when the delay ends.
    proxy.set(Fault::Delay(PATIENCE * 2));
    client.send(&request(&["PING"]));
    assert!(is_silent(&mut client));
    proxy.set(Fault::None);
    assert_eq!(client.receive(), Some(pong()));
}

#[test]
fn a_frozen_proxy_accepts_and_keeps_the_replies() {
    let redis = Redis::start(&[]);
    let proxy = Proxy::start(redis.address());
    proxy.set(Fault::Freeze);
    let mut client = connect(proxy.address());
    client.send(&request(&["INCR", "a"]));
    assert!(is_silent(&mut client));
    assert_eq!(text(&redis.command(&["GET", "a"])), "1", "the request arrived");
    let mut gone = connect(proxy.address());
    gone.send(&request(&["INCR", "a"]));
    proxy.reset_connections();
    assert_eq!(client.try_receive().unwrap_err().kind(), ErrorKind::ConnectionReset);
    let mut client = connect(proxy.address());
    client.send(&request(&["INCR", "b"]));
    proxy.set(Fault::None);
    assert_eq!(client.receive(), Some(Reply::Integer(1)));
}

#[test]
fn a_reset_in_a_reply_comes_after_the_bytes_that_left() {
    let redis = Redis::start(&[]);
    let proxy = Proxy::start(redis.address());
    for after_bytes in [0, 3] {
        let mut client = connect(proxy.address());
        assert_eq!(ping(&mut client), pong());
        proxy.set(Fault::ResetInReply { after_bytes });
        client.send(&request(&["PING"]));
        let mut bytes = Vec::new();
        let error = client.stream().read_to_end(&mut bytes).unwrap_err();
        assert_eq!((error.kind(), bytes.as_slice()), (ErrorKind::ConnectionReset, &b"+PONG"[..after_bytes]));
        proxy.set(Fault::None);
        assert_eq!(ping(&mut connect(proxy.address())), pong());
    }
}

#[test]
fn half_a_reply_is_followed_by_silence_that_stays() {
    let redis = Redis::start(&[]);
    let proxy = Proxy::start(redis.address());
    let mut client = connect(proxy.address());
    proxy.set(Fault::HalfReplyThenSilence);
    client.send(&request(&["PING"]));
    let mut bytes = [0; 3];
    client.stream().read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"+PO");
    proxy.set(Fault::None);
    client.send(&request(&["PING"]));
    assert!(is_silent(&mut client));
    assert_eq!(ping(&mut connect(proxy.address())), pong());
}

#[test]
fn garbage_comes_once_for_each_time_that_it_is_set() {
    let redis = Redis::start(&[]);
    let proxy = Proxy::start(redis.address());
    for _ in 0..2 {
        let mut client = connect(proxy.address());
        proxy.set(Fault::Garbage);
        client.send(&request(&["PING"]));
        assert_eq!(client.try_receive().unwrap_err().kind(), ErrorKind::InvalidData);
        let mut client = connect(proxy.address());
        client.send(&request(&["PING"]));
        client.try_receive().unwrap_err();
        proxy.set(Fault::None);
        assert_eq!(ping(&mut connect(proxy.address())), pong());
    }
}

#[test]
fn connections_are_refused_while_others_go_on() {
    let redis = Redis::start(&[]);
    let proxy = Proxy::start(redis.address());
    let mut before = connect(proxy.address());
    assert_eq!(ping(&mut before), pong());
    proxy.set(Fault::RefuseConnections);
    assert_eq!(connect(proxy.address()).receive(), None);
    assert_eq!(ping(&mut before), pong());
    assert_eq!((proxy.connections(), redis.connections_received()), (2, 1));
    proxy.set(Fault::None);
    assert_eq!(ping(&mut connect(proxy.address())), pong());
}

#[test]
fn a_proxy_ends_though_a_client_does_not_read() {
    let redis = Redis::start(&[]);
    let proxy = Proxy::start(redis.address());
    let address = proxy.address();
    let mut client = connect(address);
    redis.command(&["SET", "a", &"x".repeat(1 << 20)]);
    client.send(&request(&["GET", "a"]).repeat(50));
    until("much is on its way", || proxy.bytes_down() > 1 << 20);
    drop(proxy);
    assert_eq!(TcpStream::connect(address).unwrap_err().kind(), ErrorKind::ConnectionRefused);
}

#[test]
fn postgres_is_killed_and_comes_back_on_its_port_with_its_store() {
    let postgres = Postgres::with_store();
    assert_eq!(postgres.put_rules(&[("a", "{}")]), 1);
    postgres.kill();
    assert_eq!(TcpStream::connect(postgres.address()).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    postgres.restart();
    assert_eq!(postgres.sql("SELECT name, version, body FROM sluice.rule"), "a|1|{}\n");
}

#[test]
fn postgres_that_is_frozen_accepts_and_says_nothing() {
    let postgres = Postgres::start();
    // The question whether it speaks TLS, which it answers with one byte.
    let ask = [0, 0, 0, 8, 4, 210, 22, 47];
    postgres.freeze();
    let mut client = connect(postgres.address());
    client.send(&ask);
    assert!(is_silent(&mut client));
    postgres.thaw();
    let mut answer = [0];
    client.stream().read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"N");
}
