//! Bad input and bad clients hurt nobody else, and are told what is wrong.
#![allow(missing_docs)]

use std::{
    io::{ErrorKind, Read, Write},
    os::unix::net::UnixStream,
};

use sluice_e2e::{AMPLE, Reply, Server, Setup, error, request};

/// What must hold after every attack: the server lives, and other clients are answered.
fn is_well(server: &mut Server) {
    assert!(server.is_running(), "the server died");
    assert_eq!(server.connect().check(&["key", "somebody-else"]).allowed, 1);
}

#[test]
fn broken_protocol_is_answered_with_what_is_wrong_and_closed() {
    let cases: &[(&[u8], &str)] = &[
        (b"*x\r\n", "invalid multibulk length"),
        (b"*2147483647\r\n", "at most 256 words"),
        (b"*99999999999999999999\r\n", "invalid multibulk length"),
        (b"*2\r\n:1\r\n", "expected '$', got ':'"),
        (b"*1\r\n$-1\r\n", "invalid bulk length"),
        (b"*1\r\n$99999999\r\n", "at most 16384 bytes"),
        (b"*1\r\n$4\r\nPINGxx\r\n", "must end with CRLF"),
        (b"ECHO \"a b\"\r\n", "cannot quote"),
        (b"*3\r\n$5\r\nCHECK\r\n$3\r\nkey\r\n\x00\x00", "expected '$', got '\\x00'"),
    ];
    for setup in Setup::transports() {
        let mut server = Server::start(&setup, AMPLE);
        for (bytes, expected) in cases {
            let mut client = server.connect();
            client.send(&request(&["PING"]));
            client.send(bytes);
            assert_eq!(client.receive(), Some(Reply::SimpleString(b"PONG".to_vec())), "what came before is answered");
            let reply = client.receive().expect("an error");
            assert!(error(&reply).contains(expected), "{reply:?} should say {expected:?}");
            assert_eq!(client.receive(), None, "closed after {bytes:?}");
        }
        is_well(&mut server);
        assert_eq!(server.metric("sluice_protocol_errors_total"), cases.len() as u64);
    }
}

/// The answer that a client of HTTP gets from this stream.
fn http_answer(mut stream: impl Read + Write, parts: &[&[u8]]) -> String {
    for part in parts {
        stream.write_all(part).expect("sending");
    }
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer, and then the end");
    answer
}

#[test]
fn whoever_speaks_http_is_told_where_it_is_spoken() {
    let requests: &[&[&[u8]]] = &[
        &[b"GET /v1/check HTTP/1.1\r\nHost: sluice\r\n\r\n"],
        &[b"G", b"ET", b" ", b"/", b" HTTP/1.1\r\n\r\n"],
        // A line of the body would be a command.
        &[b"POST /v1/check HTTP/1.1\r\nContent-Length: 14\r\n\r\nCHECK key spy\r\n"],
        &[b"PUT /a HTTP/1.0\r\n\r\n"],
        &[b"DELETE /a HTTP/1.1\r\n\r\n"],
        &[b"OPTIONS * HTTP/1.1\r\n\r\n"],
        &[b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"],
    ];
    for setup in Setup::transports() {
        let mut server = Server::start(&setup, AMPLE);
        let port = |what: &str, port: u16| format!("{what}{port}");
        let expected = [port("redis-cli -p ", server.resp.port()), port("ops port, ", server.ops.port())];
        for parts in requests {
            let tcp = http_answer(server.connect().into_stream(), parts);
            let unix = http_answer(UnixStream::connect(server.unix()).expect("connecting"), parts);
            assert_eq!(tcp, unix);
            let (head, body) = tcp.split_once("\r\n\r\n").expect("a head and a body");
            assert!(head.starts_with("HTTP/1.1 400 Bad Request\r\n"), "{head}");
            assert!(head.ends_with(&format!("Content-Length: {}", body.len())), "{head}");
            assert!(expected.iter().all(|part| body.contains(part)), "{body} should have {expected:?}");
        }
        let head = http_answer(server.connect().into_stream(), &[b"HEAD / HTTP/1.1\r\n\r\n"]);
        assert!(head.starts_with("HTTP/1.1 400 ") && head.ends_with("\r\n\r\n"), "HEAD has no body: {head}");
        assert_eq!(server.metric("sluice_checks_total"), 0, "no line was taken for a command");
        assert_eq!(server.metric("sluice_protocol_errors_total"), 2 * requests.len() as u64 + 1);
        // What only begins like it is somebody's typing.
        let mut client = server.connect();
        client.send(b"GET key\r\n");
        assert!(error(&client.receive().expect("a reply")).contains("unknown command 'GET'"));
        is_well(&mut server);
    }
}

#[test]
fn a_wrong_command_leaves_the_connection_alive() {
    let cases: &[(&[&str], &str)] = &[
        (&["NOSUCH", "a"], "unknown command 'NOSUCH'"),
        (&["CHECK", "key"], "a name without a value"),
        (&["CHECK", "COST", "x", "key", "a"], "COST is not an integer"),
        (&["CHECK", "COST", "-1", "key", "a"], "COST is not an integer"),
        (&["CHECK", "Key", "a"], "names are lower case"),
        (&["CHECK", "key", "a", "key", "b"], "an attribute was given twice"),
        (&["ECHO"], "wrong number of arguments for 'echo'"),
        (&["SELECT", "1"], "DB index is out of range"),
        (&["HELLO", "4"], "NOPROTO"),
        (&["CLIENT", "KILL"], "unknown subcommand 'KILL'"),
        (&["AUTH", "secret"], "without any password configured"),
        (&["", "a"], "unknown command ''"),
    ];
    for setup in Setup::transports() {
        let mut server = Server::start(&setup, AMPLE);
        let mut client = server.connect();
        for (words, expected) in cases {
            let reply = client.ask(words);
            assert!(error(&reply).contains(expected), "{reply:?} should say {expected:?}");
            assert_eq!(client.check(&["key", "a"]).allowed, 1);
        }
        is_well(&mut server);
        assert_eq!(server.metric("sluice_command_errors_total"), cases.len() as u64);
    }
}

#[test]
fn requests_that_come_byte_by_byte_are_understood() {
    for setup in Setup::transports() {
        let server = Server::start(&setup, AMPLE);
        let mut client = server.connect();
        let bytes = [request(&["CHECK", "key", "a"]), request(&["ECHO", "b"]), b"PING\r\n".to_vec()].concat();
        for byte in &bytes {
            client.send(&[*byte]);
        }
        assert!(matches!(client.receive(), Some(Reply::Array(values)) if values.len() == 6));
        assert_eq!(client.receive(), Some(Reply::BulkString(b"b".to_vec())));
        assert_eq!(client.receive(), Some(Reply::SimpleString(b"PONG".to_vec())));
    }
}

#[test]
fn a_client_that_has_said_everything_still_hears_everything() {
    const CHECKS: usize = 500;
    for setup in Setup::all() {
        let mut server = Server::start(&setup, AMPLE);
        for _ in 0..20 {
            let mut client = server.connect();
            client.send(&request(&["CHECK", "key", "a"]).repeat(CHECKS));
            client.stream().shutdown(std::net::Shutdown::Write).unwrap();
            for at in 0..CHECKS {
                assert!(matches!(client.receive(), Some(Reply::Array(_))), "reply {at} is lost");
            }
            assert_eq!(client.receive(), None);
        }
        is_well(&mut server);
    }
}

#[test]
fn what_comes_after_quit_costs_no_reply() {
    for setup in Setup::transports() {
        let mut server = Server::start(&setup, AMPLE);
        for _ in 0..10 {
            let mut client = server.connect();
            let before = request(&["ECHO", &"x".repeat(1000)]).repeat(1000);
            let requests = [before, request(&["QUIT"]), request(&["PING"]).repeat(20_000)].concat();
            let mut writer = client.stream().try_clone().unwrap();
            // The server may close before it has taken everything.
            let sender = std::thread::spawn(move || drop(writer.write_all(&requests)));
            for at in 0..1000 {
                let reply = client.try_receive();
                assert!(matches!(reply, Ok(Some(Reply::BulkString(_)))), "{setup:?}, {at}: {reply:?}");
            }
            assert_eq!(client.receive(), Some(Reply::SimpleString(b"OK".to_vec())));
            assert_eq!(client.receive(), None);
            drop(client);
            sender.join().unwrap();
        }
        is_well(&mut server);
    }
}

#[test]
fn half_a_request_waits_and_holds_up_nobody() {
    for setup in Setup::transports() {
        let mut server = Server::start(&setup, AMPLE);
        let mut half = server.connect();
        let bytes = request(&["CHECK", "key", "a"]);
        half.send(&bytes[..bytes.len() - 3]);
        is_well(&mut server);
        half.send(&bytes[bytes.len() - 3..]);
        assert!(half.receive().is_some());
        // And one that never finishes, gone in the middle.
        server.connect().send(&bytes[..7]);
        is_well(&mut server);
    }
}

#[test]
fn a_request_larger_than_the_limit_is_refused() {
    let setup = Setup::new("ring").with("[resp]\nrequest_bytes_max = 32768\n");
    let mut server = Server::start(&setup, AMPLE);
    let mut client = server.connect();
    let long = "v".repeat(16_000);
    client.send(&request(&["CHECK", "a", &long, "b", &long, "c", &long]));
    let reply = client.receive().expect("an error");
    assert!(error(&reply).contains("at most 32768 bytes"), "{reply:?}");
    is_well(&mut server);
}

#[test]
fn replies_larger_than_any_buffer_come_whole_and_in_order() {
    for setup in Setup::transports() {
        let server = Server::start(&setup, AMPLE);
        let mut client = server.connect();
        let words: Vec<String> = (0..64).map(|index| format!("{index}-{}", "x".repeat(16_000))).collect();
        let requests: Vec<u8> = words.iter().flat_map(|word| request(&["ECHO", word])).collect();
        let mut writer = client.stream().try_clone().unwrap();
        let sender = std::thread::spawn(move || writer.write_all(&requests).unwrap());
        for word in &words {
            assert_eq!(client.receive(), Some(Reply::BulkString(word.clone().into_bytes())));
        }
        sender.join().unwrap();
    }
}

#[test]
fn a_client_that_does_not_read_waits_alone_and_is_closed_in_the_end() {
    for setup in Setup::transports() {
        let limits = "[resp]\noutput_backlog_bytes = 65536\n[limits]\nstall_timeout_ms = 1000\n";
        let mut server = Server::start(&setup.clone().with(limits), AMPLE);
        let mut deaf = server.connect();
        deaf.stream().set_nonblocking(true).unwrap();
        let batch = request(&["ECHO", &"x".repeat(10_000)]).repeat(10);
        // Sends until the server takes no more: it stops reading once its replies pile up.
        let mut sent = 0;
        server.until("the connection is closed", |server| {
            for _ in 0..100 {
                match deaf.stream().write(&batch) {
                    Ok(len) => sent += len,
                    Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                    Err(_) => return true,
                }
                assert!(sent < 100_000_000, "the server takes whatever comes");
            }
            server.connect().check(&["key", "somebody-else"]).allowed == 1
                && server.metric("sluice_connections_closed_total{core=\"0\",why=\"stalled\"}") > 0
        });
        // The plain transport writes before it reads on, so nothing piles up in the first place.
        assert!(setup.transport == "plain" || server.metric("sluice_output_backlogs_total") > 0);
        is_well(&mut server);
    }
}

#[test]
fn a_client_that_reads_slowly_but_steadily_is_not_stalled() {
    for setup in Setup::transports() {
        let server = Server::start(&setup.with("[limits]\nstall_timeout_ms = 1000\n"), AMPLE);
        let mut client = server.connect();
        let mut writer = client.stream().try_clone().unwrap();
        // More than the buffers between hold, and read at a pace at which they take seconds to have room again.
        std::thread::spawn(move || drop(writer.write_all(&request(&["ECHO", &"x".repeat(16_000)]).repeat(3_000))));
        let mut bytes = vec![0; 20_000];
        for _ in 0..120 {
            client.stream().read_exact(&mut bytes).unwrap();
            std::thread::park_timeout(std::time::Duration::from_millis(50));
        }
        assert_eq!(server.metric("sluice_connections_closed_total{core=\"0\",why=\"stalled\"}"), 0);
    }
}

#[test]
fn a_client_that_reads_late_gets_everything() {
    for setup in Setup::transports() {
        let server = Server::start(&setup.clone().with("[resp]\noutput_backlog_bytes = 65536\n"), AMPLE);
        let mut client = server.connect();
        const CHECKS: usize = 200_000;
        let requests = request(&["CHECK", "key", "a"]).repeat(CHECKS);
        let mut writer = client.stream().try_clone().unwrap();
        let sender = std::thread::spawn(move || writer.write_all(&requests).unwrap());
        if setup.transport == "ring" {
            server.until("the server waits for the client", |server| server.metric("sluice_output_backlogs_total") > 0);
        }
        for _ in 0..CHECKS {
            assert!(matches!(client.receive(), Some(Reply::Array(_))));
        }
        sender.join().unwrap();
    }
}

#[test]
fn connections_beyond_the_limit_are_told_so() {
    for setup in Setup::transports() {
        let server = Server::start(&setup.with("[limits]\nconnections_max = 2\n"), AMPLE);
        let (mut first, mut second) = (server.connect(), server.connect());
        assert_eq!(first.check(&["key", "a"]).allowed, 1);
        assert_eq!(second.check(&["key", "a"]).allowed, 1);
        let mut third = server.connect();
        assert!(error(&third.receive().expect("a refusal")).contains("max number of clients"));
        assert_eq!(third.receive(), None);
        drop(first);
        server.until("a place is free", |server| server.metric("sluice_connections_closed_total") == 1);
        assert_eq!(server.connect().check(&["key", "a"]).allowed, 1);
    }
}

#[test]
fn a_flood_of_connections_is_refused_before_files_run_out() {
    for setup in Setup::all() {
        let mut server = Server::start(&setup.clone().with("[limits]\nconnections_max = 20\n"), AMPLE);
        // What the server itself would keep for this many connections, and not one more.
        let each = if setup.transport == "plain" { 2 } else { 1 };
        server.limit_files(20 * each + 128 + 32 * setup.cores + 64);
        for _ in 0..5 {
            let flood: Vec<_> = (0..600).filter_map(|_| std::net::TcpStream::connect(server.resp).ok()).collect();
            server.until("there is room for no more", |server| server.metric("sluice_connections") >= 20);
            assert!(server.is_running(), "{setup:?}: the flood ended it");
            drop(flood);
            server.until("there is room again", |server| server.metric("sluice_connections") == 0);
        }
        is_well(&mut server);
        assert!(server.metric("sluice_connections_refused_total") > 0, "{setup:?}");
    }
}

#[test]
fn running_out_of_files_for_a_while_ends_nothing() {
    for setup in Setup::all() {
        let mut server = Server::start(&setup, AMPLE);
        let mut client = server.connect();
        assert_eq!(client.check(&["key", "a"]).allowed, 1);
        server.limit_files(10);
        for _ in 0..4 {
            // Nobody can say so much as that there is no room; who was there before is served all the same.
            drop(std::net::TcpStream::connect(server.resp));
            std::thread::park_timeout(std::time::Duration::from_millis(200));
            assert!(server.is_running(), "{setup:?}: it gave up");
            assert_eq!(client.check(&["key", "a"]).allowed, 1);
        }
        server.limit_files(1000);
        for _ in 0..4 {
            is_well(&mut server);
        }
        assert_eq!(server.get("/readyz").0, 200);
    }
}

#[test]
fn silent_connections_are_closed_when_that_is_asked_for() {
    for setup in Setup::transports() {
        let server = Server::start(&setup.with("[limits]\nidle_timeout_ms = 300\n"), AMPLE);
        let mut client = server.connect();
        assert_eq!(client.check(&["key", "a"]).allowed, 1);
        assert_eq!(client.receive(), None);
        assert_eq!(server.metric("sluice_connections_closed_total{core=\"0\",why=\"idle\"}"), 1);
    }
}

#[test]
fn passwords_are_required_where_one_is_set() {
    for setup in Setup::transports() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "sesame\n").unwrap();
        let config = format!("[resp]\npassword_file = {:?}\n", file.path());
        let server = Server::start(&setup.with(&config), AMPLE);
        let mut client = server.connect();
        assert!(error(&client.ask(&["CHECK", "key", "a"])).starts_with("NOAUTH"));
        assert!(error(&client.ask(&["PING"])).starts_with("NOAUTH"));
        assert!(error(&client.ask(&["HELLO", "3"])).starts_with("NOAUTH"));
        assert!(error(&client.ask(&["AUTH", "wrong"])).starts_with("WRONGPASS"));
        assert!(error(&client.ask(&["AUTH", "nobody", "sesame"])).starts_with("WRONGPASS"));
        assert_eq!(client.ask(&["AUTH", "sesame"]), Reply::SimpleString(b"OK".to_vec()));
        assert_eq!(client.check(&["key", "a"]).allowed, 1);
        let mut other = server.connect();
        assert!(matches!(other.ask(&["HELLO", "2", "AUTH", "default", "sesame"]), Reply::Array(_)));
        assert_eq!(other.check(&["key", "a"]).allowed, 1);
    }
}

#[test]
fn random_bytes_never_kill_it() {
    for setup in Setup::transports() {
        let mut server = Server::start(&setup, AMPLE);
        // A xorshift generator with a fixed start: what fails once fails again.
        let mut state = 0x9E37_79B9_7F4A_7C15_u64;
        let mut random = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        let valid = request(&["CHECK", "COST", "1", "key", "abc"]);
        for round in 0..300 {
            let mut client = server.connect();
            client.stream().set_nonblocking(true).unwrap();
            let mut bytes = valid.repeat(3);
            for _ in 0..=round % 7 {
                let at = (random() % bytes.len() as u64) as usize;
                match random() % 3 {
                    0 => bytes[at] = random() as u8,
                    1 => bytes.truncate(at.max(1)),
                    _ => bytes.insert(at, b"*$\r\n0-"[(random() % 6) as usize]),
                }
            }
            let _ = client.stream().write(&bytes);
            let _ = client.stream().read(&mut [0; 4096]);
        }
        is_well(&mut server);
    }
}
