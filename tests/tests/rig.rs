//! The rig by itself: what breaks on command breaks as it says, and comes back.
#![allow(missing_docs)]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on must stop, with the reason")]
#![allow(clippy::disallowed_methods, reason = "tests wait for real processes")]

use std::{io::ErrorKind, net::TcpStream, process::Command, time::Duration};

use sluice_e2e::{Client, PATIENCE, Reply, error, redis_server::Redis, request, text};

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
