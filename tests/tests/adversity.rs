//! What operators and systems do to a server: no files left, nobody who reads the log, a policy that is a pipe.
#![allow(missing_docs)]
#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test that cannot go on must stop, with the reason")]

use std::{
    io::{BufRead, BufReader},
    process::{Command, Stdio},
    time::Duration,
};

use sluice_e2e::{AMPLE, Server, Setup, binary, until};

#[test]
fn running_out_of_files_for_a_while_ends_nothing() {
    for setup in Setup::all() {
        let mut server = Server::start(&setup, AMPLE);
        let pid = server.status()["process_id"].to_string();
        let allow = |files: &str| {
            let limit = format!("--nofile={files}:");
            assert!(Command::new("prlimit").args(["--pid", &pid, &limit]).status().expect("prlimit").success());
        };
        allow("10");
        // Long enough for every core to go to sleep many times without a file to wait with, and to fail at accepting.
        for _ in 0..4 {
            drop(std::net::TcpStream::connect(server.resp));
            std::thread::park_timeout(Duration::from_millis(150));
        }
        allow("1000");
        assert!(server.is_running(), "{setup:?}: it gave up");
        let mut client = server.connect();
        assert_eq!(client.check(&["key", "a"]).allowed, 1, "{setup:?}");
    }
}

#[test]
fn a_log_that_nobody_reads_ends_nothing() {
    for signals in [&["HUP", "TERM"][..], &["TERM"]] {
        let mut child = Command::new(binary())
            .args(["--listen-resp", "127.0.0.1:0", "--listen-ops", "127.0.0.1:0", "--cores", "1"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("starting the server");
        let mut out = BufReader::new(child.stdout.take().expect("stdout is piped"));
        out.read_line(&mut String::new()).expect("it says where it serves");
        drop(child.stderr.take());
        for signal in signals {
            assert!(
                Command::new("kill").args(["-s", signal, &child.id().to_string()]).status().expect("kill").success()
            );
            // So that each is taken by itself.
            std::thread::park_timeout(Duration::from_millis(200));
        }
        let status = child.wait().expect("waiting for the server");
        assert!(status.success(), "{signals:?}: {status}");
    }
}

#[test]
fn a_policy_that_is_a_pipe_is_refused() {
    let mut server = Server::start(&Setup::new("ring"), AMPLE);
    let folder = server.unix().parent().expect("a folder").to_owned();
    assert!(Command::new("mkfifo").arg(folder.join("pipe")).status().expect("mkfifo").success());
    std::fs::rename(folder.join("pipe"), folder.join("policy.toml")).expect("renaming");
    until("it is refused", || server.metric("sluice_policy_file_refused") == 1);
    assert!(server.status()["policy"].to_string().contains("is not a regular file"), "{}", server.status());
    server.signal("TERM");
    assert!(server.wait().success());
}
