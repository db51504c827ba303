//! Starting, spreading connections, and leaving.
#![allow(missing_docs)]

use std::{
    io::{BufRead, BufReader},
    net::TcpStream,
    os::unix::net::UnixStream,
    process::{Command, Stdio},
};

use sluice_e2e::{AMPLE, Client, Reply, Server, Setup, request, sluice};

#[test]
fn a_few_long_lived_connections_use_all_cores() {
    for setup in Setup::transports() {
        let server = Server::start(&Setup { cores: 2, ..setup }, AMPLE);
        let mut clients: Vec<_> = (0..8).map(|_| server.connect()).collect();
        for client in &mut clients {
            assert_eq!(client.check(&["key", "a"]).allowed, 1);
        }
        let status = server.status();
        let connections: Vec<_> =
            status["cores"].as_array().unwrap().iter().map(|core| core["connections"].as_u64().unwrap()).collect();
        assert_eq!(connections, [4, 4]);
    }
}

#[test]
fn ready_while_serving_and_not_while_leaving() {
    for setup in Setup::all() {
        let mut server = Server::start(&setup.with("[shutdown]\ndrain_ms = 700\ngrace_ms = 20000\n"), AMPLE);
        assert_eq!(server.get("/readyz"), (200, "ready\n".into()));
        assert_eq!(server.get("/healthz"), (200, "ok\n".into()));
        assert_eq!(server.get("/nothing").0, 404);
        let mut client = server.connect();
        assert_eq!(client.check(&["key", "a"]).allowed, 1);
        server.signal("TERM");
        server.until("it says that it leaves", |server| server.get("/readyz").0 == 503);
        assert_eq!(server.get("/healthz").0, 200);
        assert_eq!(client.check(&["key", "a"]).allowed, 1, "what is connected is served");
        assert_eq!(server.connect().check(&["key", "a"]).allowed, 1, "and so is what still comes");
        // The client keeps its connection, as a pool would; it has nothing in hand and holds nobody up.
        assert!(server.wait().success());
        assert!(!server.unix().exists(), "the socket file is gone");
    }
}

#[test]
fn what_is_in_hand_is_answered_before_the_end() {
    const CHECKS: usize = 2_000;
    for setup in Setup::all() {
        for signal in ["TERM", "INT"] {
            let mut server = Server::start(&setup, AMPLE);
            let mut client = server.connect();
            client.send(&request(&["CHECK", "key", "a"]).repeat(CHECKS));
            assert!(client.receive().is_some());
            server.signal(signal);
            for at in 1..CHECKS {
                assert!(matches!(client.receive(), Some(Reply::Array(_))), "reply {at} of {CHECKS} is lost");
            }
            assert_eq!(client.receive(), None);
            drop(client);
            assert!(server.wait().success());
        }
    }
}

#[test]
fn whoever_has_connected_is_answered_before_the_end() {
    const CHECKS: usize = 200;
    for setup in Setup::all() {
        for _ in 0..3 {
            let mut server = Server::start(&setup, AMPLE);
            // Some of them are accepted when the signal comes, some are on their way to another core, and some wait.
            let mut clients: Vec<_> = (0..40).map(|_| server.connect()).collect();
            let mut local = Client::new(UnixStream::connect(server.unix()).unwrap());
            clients.iter_mut().for_each(|client| client.send(&request(&["CHECK", "key", "a"]).repeat(CHECKS)));
            local.send(&request(&["CHECK", "key", "a"]));
            server.signal("TERM");
            for (number, client) in clients.iter_mut().enumerate() {
                for at in 0..CHECKS {
                    let reply = client.try_receive();
                    assert!(matches!(reply, Ok(Some(Reply::Array(_)))), "{setup:?}, client {number}, {at}: {reply:?}");
                }
                assert_eq!(client.try_receive().unwrap(), None);
            }
            assert!(local.receive().is_some());
            drop((clients, local));
            assert!(server.wait().success());
        }
    }
}

#[test]
fn busy_clients_get_their_last_answers_and_a_proper_end() {
    for setup in Setup::all() {
        let mut server = Server::start(&setup.clone().with("[shutdown]\ngrace_ms = 2000\n"), AMPLE);
        let clients: Vec<_> = (0..6).map(|_| server.connect()).collect();
        std::thread::scope(|scope| {
            for mut client in clients {
                let setup = &setup;
                scope.spawn(move || {
                    let mut number = 0;
                    loop {
                        let words: Vec<_> = (0..50).map(|at| (number + at).to_string()).collect();
                        let batch: Vec<u8> = words.iter().flat_map(|word| request(&["ECHO", word])).collect();
                        client.send(&batch);
                        for word in words {
                            match client.try_receive() {
                                Ok(Some(reply)) => assert_eq!(reply, Reply::BulkString(word.into_bytes())),
                                Ok(None) => return,
                                Err(error) => panic!("{setup:?}: {error}"),
                            }
                            number += 1;
                        }
                    }
                });
            }
            std::thread::park_timeout(std::time::Duration::from_millis(200));
            server.signal("TERM");
            assert!(server.wait().success());
        });
    }
}

#[test]
fn an_old_server_leaves_the_socket_of_the_new_one_alone() {
    for setup in Setup::transports() {
        let mut old = Server::start(&setup.with("[shutdown]\ngrace_ms = 2000\n"), AMPLE);
        let (path, mut client) = (old.unix(), old.connect());
        std::thread::spawn(move || while client.try_ask(&["PING"]).is_ok() {});
        old.signal("TERM");
        old.until("the path is free", |_| !path.exists());
        let mut new = sluice();
        new.args(["--listen-resp", "127.0.0.1:0", "--listen-ops", "127.0.0.1:0", "--cores", "1", "--listen-unix"]);
        let mut new = new.arg(&path).stdout(Stdio::piped()).spawn().unwrap();
        BufReader::new(new.stdout.take().unwrap()).read_line(&mut String::new()).unwrap();
        assert!(old.is_running(), "both are there at once");
        assert!(old.wait().success());
        let answer = Client::new(UnixStream::connect(&path).unwrap()).ask(&["PING"]);
        new.kill().unwrap();
        new.wait().unwrap();
        assert_eq!(answer, Reply::SimpleString(b"PONG".to_vec()));
    }
}

#[test]
fn a_start_that_fails_leaves_no_socket_behind() {
    let server = Server::start(&Setup::new("ring"), AMPLE);
    let path = server.unix().with_extension("other");
    let mut command = sluice();
    command.args(["--listen-resp", "127.0.0.1:0", "--listen-ops", &server.ops.to_string(), "--listen-unix"]).arg(&path);
    assert_eq!(command.output().unwrap().status.code(), Some(1));
    assert!(!path.exists());
}

#[test]
fn a_client_that_never_stops_does_not_keep_it() {
    for setup in Setup::transports() {
        let mut server = Server::start(&setup.with("[shutdown]\ngrace_ms = 300\n"), AMPLE);
        let mut client = server.connect();
        let batch = request(&["CHECK", "key", "a"]).repeat(100);
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let stop = &stop;
            let stream = client.stream();
            stream.set_nonblocking(true).unwrap();
            scope.spawn(move || {
                use std::io::{Read, Write};
                let mut sink = vec![0; 65536];
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    let _ = stream.write(&batch);
                    let _ = stream.read(&mut sink);
                }
            });
            server.signal("TERM");
            let status = server.wait();
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
            assert!(status.success());
        });
    }
}

#[test]
fn a_log_that_nobody_reads_or_that_cannot_be_written_ends_nothing() {
    let full = || std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap().into();
    let to: [fn() -> Stdio; 2] = [Stdio::piped, full];
    for log in to {
        let mut command = sluice();
        command.args(["--listen-resp", "127.0.0.1:0", "--listen-ops", "127.0.0.1:0", "--cores", "1"]);
        let mut child = command.stdout(Stdio::piped()).stderr(log()).spawn().unwrap();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut String::new()).unwrap();
        drop(child.stderr.take());
        for signal in ["HUP", "TERM"] {
            Command::new("kill").args(["-s", signal, &child.id().to_string()]).status().unwrap();
            std::thread::park_timeout(std::time::Duration::from_millis(300));
        }
        let status = child.wait().unwrap();
        assert!(status.success(), "{status}");
    }
}

#[test]
fn it_does_not_share_a_port_unless_told_to() {
    let server = Server::start(&Setup::new("ring"), AMPLE);
    let address = server.resp.to_string();
    let start = |more: &[&str]| {
        let mut command = sluice();
        command.args(["--listen-resp", &address, "--listen-ops", "127.0.0.1:0", "--cores", "1"]).args(more);
        command
    };
    let output = start(&[]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("another process listens on") && text.contains("--share-port"), "{text}");
    let mut second = start(&["--share-port"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(second.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.contains(&address), "{line}");
    second.kill().unwrap();
    second.wait().unwrap();
}

#[test]
fn it_starts_again_where_it_has_just_left() {
    for transport in ["ring", "plain"] {
        let (resp, ops) = {
            let server = Server::start(&Setup::new(transport), AMPLE);
            (server.resp.to_string(), server.ops.to_string())
        };
        for round in 0..10 {
            let mut command = sluice();
            command.args(["--listen-resp", &resp, "--listen-ops", &ops, "--cores", "2", "--transport", transport]);
            let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
            let mut said = BufReader::new(child.stdout.take().unwrap());
            let mut line = String::new();
            said.read_line(&mut line).unwrap();
            let mut client = line.contains(&resp).then(|| Client::new(TcpStream::connect(&resp).unwrap()));
            if let Some(client) = &mut client {
                client.ask(&["PING"]);
                Command::new("kill").args(["-s", "TERM", &child.id().to_string()]).status().unwrap();
            }
            let output = child.wait_with_output().unwrap();
            let log = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{transport}, round {round}: {log}");
            assert!(!log.contains("accept failed"), "{transport}, round {round}: {log}");
        }
    }
}

#[test]
fn a_port_is_handed_over_with_an_ops_port_of_its_own() {
    let server = Server::start(&Setup::new("ring"), AMPLE);
    let mut command = sluice();
    command.args(["--share-port", "--listen-resp", &server.resp.to_string(), "--listen-ops", &server.ops.to_string()]);
    let output = command.output().unwrap();
    let expected = format!(
        "the ops port {} is taken; give the new process another --listen-ops (share_port is for RESP only)\n",
        server.ops
    );
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && text.ends_with(&expected), "{text}");
}

#[test]
fn an_idle_server_wakes_for_every_request() {
    // Each round finds the core asleep: the pause is longer than it looks for work. A lost wake-up would hang here.
    for setup in Setup::all() {
        let server = Server::start(&setup.with("[transport]\nbusy_poll_us = 0\n"), AMPLE);
        let mut clients: Vec<_> = (0..3).map(|_| server.connect()).collect();
        for round in 0..2_000 {
            std::thread::park_timeout(std::time::Duration::from_micros(round % 300));
            assert_eq!(clients[round as usize % 3].check(&["key", "a"]).allowed, 1);
        }
    }
}
