//! Hot keys from end to end: one key is asked for far more than all others, and everybody is told which.
#![allow(missing_docs)]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on must stop, with the reason")]
#![allow(clippy::disallowed_methods, reason = "tests wait for real processes")]

use std::{
    io::{BufRead, BufReader, Read},
    net::TcpListener,
    process::{Command, Output, Stdio},
};

use serde_json::Value;
use sluice_e2e::{AMPLE, Client, Server, Setup, redis_server::Redis, request, sluice, until};

/// How many other keys each round asks for, once; and how often the hot one.
const OTHERS: usize = 50;
const HOT_PER_ROUND: usize = 200;

/// One round of requests on each connection, and all its replies.
fn round(connections: &mut [Client<std::net::TcpStream>], at: usize, hot: &str) {
    let others = (0..OTHERS).map(|other| format!("k{}", at * OTHERS + other));
    let keys: Vec<_> = others.chain((0..HOT_PER_ROUND).map(|_| hot.to_owned())).collect();
    for connection in connections.iter_mut() {
        let requests: Vec<u8> = keys.iter().flat_map(|key| request(&["CHECK", "key", key])).collect();
        connection.send(&requests);
    }
    for connection in connections {
        for _ in &keys {
            connection.receive().unwrap();
        }
    }
}

/// The hottest key that `/v1/status` names, once it names any that is hot.
fn hottest(server: &Server, connections: usize, hot: &str) -> Value {
    let mut connections: Vec<_> = (0..connections).map(|_| server.connect()).collect();
    let (mut at, mut first) = (0, Value::Null);
    until("a key is hot", || {
        round(&mut connections, at, hot);
        at += 1;
        first = server.status()["hot"][0].clone();
        first["heat"] == "hot"
    });
    first
}

fn sluice_hot(server: &Server, words: &[&str]) -> Output {
    let mut command = sluice();
    command.arg("hot").args(["--ops", &server.ops.to_string()]).args(words).output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[test]
fn the_hottest_key_of_all_cores_is_named_first() {
    for setup in Setup::all() {
        let setup = setup.with("[hot]\nlease_auto_above = 200\n");
        let server = Server::start(&setup, AMPLE);
        let first = hottest(&server, 4, "ak_hot");
        assert_eq!((&first["key"], &first["rule"]), (&"key=ak_hot".into(), &"one".into()), "{setup:?}");
        assert_eq!(first["decided_by"], serde_json::json!({ "memory": 1.0 }));
        assert!(first["saved_calls_per_second"].is_null(), "there is no Redis");
        assert!(first["checks_per_second"].as_f64() <= first["checks_per_second_max"].as_f64());
        assert!(!server.get("/metrics").1.contains("ak_hot"), "labels are not for clients to choose");

        let out = sluice_hot(&server, &["--once", "--json", "--top", "1"]);
        assert!(out.status.success(), "{out:?}");
        let keys: Value = serde_json::from_slice(&out.stdout).unwrap();
        assert_eq!((keys.as_array().unwrap().len(), &keys[0]["key"]), (1, &"key=ak_hot".into()));
        let out = sluice_hot(&server, &["--once"]);
        let table = text(&out.stdout);
        assert!(table.starts_with("KEY") && table.lines().nth(1).unwrap().starts_with("key=ak_hot "), "{table}");
        assert!(!table.contains('\x1b'), "it is no terminal");
    }
}

#[test]
fn redis_decides_and_coalescing_saves_calls() {
    let redis = Redis::start(&[]);
    // A deadline that a busy machine keeps.
    let settings = "deadline_ms = 50\n";
    let setup = Setup::new("ring").with("[hot]\nlease_auto_above = 200\n").with_redis(&[redis.url()], settings);
    let server = Server::start(&setup, AMPLE);
    // Calls before that would fail, and the breaker would open.
    server.until("Redis is connected", |server| server.redis_events("connected") > 0);
    let first = hottest(&server, 1, "ak_hot");
    assert_eq!(first["key"], "key=ak_hot");
    assert!(first["decided_by"]["redis"].as_f64().unwrap() > 0.5, "{first}");
    let (rate, saved) = (&first["checks_per_second"], &first["saved_calls_per_second"]);
    let (rate, saved) = (rate.as_f64().unwrap(), saved.as_f64().unwrap());
    assert!(saved > 0.8 * rate && saved <= 1.01 * rate, "200 checks of a round are a few calls: {first}");
}

#[test]
fn what_clients_call_themselves_harms_nobody() {
    let server = Server::start(&Setup::new("ring").with("[hot]\nlease_auto_above = 200\n"), AMPLE);
    let first = hottest(&server, 1, "\x1b[2J\"}<\r\n\u{202E}");
    assert_eq!(first["key"], "key=%1B%5B2J%22%7D%3C%0D%0A%E2%80%AE");
    let out = sluice_hot(&server, &["--once"]);
    assert!(text(&out.stdout).chars().all(|character| character == '\n' || !character.is_control()));
}

#[test]
fn throttle_calls_are_counted_too() {
    let server = Server::start(&Setup::new("plain").with("[hot]\nlease_auto_above = 200\n"), AMPLE);
    let mut client = server.connect();
    let mut first = Value::Null;
    until("a key is hot", || {
        client.send(&request(&["CL.THROTTLE", "user:1", "100", "100", "60"]).repeat(200));
        for _ in 0..200 {
            client.receive().unwrap();
        }
        first = server.status()["hot"][0].clone();
        first["heat"] == "hot"
    });
    assert_eq!(first["key"], "user%3A1");
    assert_eq!(first["decided_by"], serde_json::json!({ "memory": 1.0 }));
}

#[test]
fn tables_follow_each_other_until_ctrl_c() {
    let server = Server::start(&Setup::new("ring"), AMPLE);
    let mut child = sluice()
        .args(["hot", "--ops", &server.ops.to_string(), "--interval", "0.1", "--json"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    for _ in 0..3 {
        assert_eq!(lines.next().unwrap().unwrap(), "[]");
    }
    assert!(Command::new("kill").args(["-s", "INT", &child.id().to_string()]).status().unwrap().success());
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn whoever_asks_the_wrong_port_is_told() {
    let server = Server::start(&Setup::new("ring"), AMPLE);
    let refused = |address: String, why: &str| {
        let out = sluice().args(["hot", "--once", "--ops", &address]).output().unwrap();
        assert_eq!(out.status.code(), Some(1));
        let said = text(&out.stderr);
        assert!(said.contains(why) && said.contains(&address), "{why:?} in {said}");
    };
    // RESP is no HTTP.
    refused(server.resp.to_string(), "not as the ops port");
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    refused(nobody.to_string(), "nothing listens at");
    let rude = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = rude.local_addr().unwrap();
    std::thread::spawn(move || {
        let (mut socket, _) = rude.accept().unwrap();
        let _ = socket.read(&mut [0; 1024]);
    });
    refused(address.to_string(), "not as the ops port");
}
