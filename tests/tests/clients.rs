//! Clients that people have connect unchanged.
#![allow(missing_docs)]

use std::process::Command;

use sluice_e2e::{Server, Setup};

const POLICY: &str = r#"
[[rule]]
name = "ten"
match = { path = "/login" }
per = ["key"]
limit = { capacity = 10, refill = 1, period = "1h" }
"#;

fn output(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{command:?}: {text}{}", String::from_utf8_lossy(&output.stderr));
    text
}

#[test]
fn redis_cli() {
    for setup in Setup::transports() {
        let server = Server::start(&setup, POLICY);
        let port = server.resp.port().to_string();
        let cli = |words: &[&str]| output(Command::new("redis-cli").args(["-p", &port]).args(words));
        assert_eq!(cli(&["PING"]), "PONG\n");
        assert_eq!(cli(&["CHECK", "path", "/login", "key", "a"]).lines().collect::<Vec<_>>()[..3], ["1", "10", "9"]);
        assert_eq!(cli(&["-3", "CHECK", "path", "/login", "key", "a"]).lines().nth(2), Some("8"));
        assert_eq!(cli(&["ECHO", "hello"]), "hello\n");
        assert_eq!(cli(&["CL.THROTTLE", "u", "15", "30", "60"]), "0\n16\n15\n-1\n2\n");
        let info = cli(&["INFO"]);
        assert!(info.contains("total_checks:2"));
        // What `redis-cli --stat` shows.
        for field in
            ["connected_clients:", "blocked_clients:0", "total_commands_processed:", "total_connections_received:"]
        {
            assert!(info.contains(field), "{field:?} in {info}");
        }
        assert!(!info.contains("used_memory:0"), "{info}");
        assert!(cli(&["COMMAND", "COUNT"]).trim().parse::<u32>().unwrap() > 10);
        assert!(cli(&["COMMAND", "DOCS", "check"]).contains("may this request pass"));
        assert_eq!(cli(&["SELECT", "0"]), "OK\n");
        assert!(cli(&["CLIENT", "ID"]).trim().parse::<u64>().unwrap() > 0);
        assert_eq!(cli(&["QUIT"]), "OK\n");
        // Its prompt asks for COMMAND DOCS first, and typed lines come as arrays.
        let unix = output(Command::new("redis-cli").arg("-s").arg(server.unix()).args(["PING"]));
        assert_eq!(unix, "PONG\n");
    }
}

#[test]
fn redis_benchmark() {
    for setup in Setup::all() {
        let server = Server::start(&setup, POLICY);
        let port = server.resp.port().to_string();
        for depth in ["1", "16"] {
            let mut command = Command::new("redis-benchmark");
            command.args(["-p", &port, "-n", "20000", "-c", "20", "-P", depth, "-r", "1000", "--csv"]);
            let text = output(command.args(["CHECK", "path", "/login", "key", "k__rand_int__"]));
            assert!(text.contains("CHECK"), "{text}");
        }
        // It may send one batch more than asked for.
        assert!(server.metric("sluice_checks_total") >= 40_000);
        let text = output(Command::new("redis-benchmark").args(["-p", &port, "-n", "1000", "-t", "ping", "--csv"]));
        assert!(text.contains("PING_INLINE") && text.contains("PING_MBULK"), "{text}");
    }
}

#[test]
fn redis_py() {
    const SCRIPT: &str = r#"
import sys, redis
client = redis.Redis(port=int(sys.argv[1]), client_name="test", health_check_interval=1)
assert client.ping()
reply = client.execute_command("CHECK", "path", "/login", "key", "py")
assert reply[:3] == [1, 10, 9] and reply[5] == b"ten", reply
with client.pipeline(transaction=False) as pipe:
    for _ in range(20):
        pipe.execute_command("CHECK", "path", "/login", "key", "py")
    replies = pipe.execute()
assert [r[0] for r in replies] == [1] * 9 + [0] * 11, replies
try:
    client.execute_command("CHECK", "path")
    raise SystemExit("an error was expected")
except redis.ResponseError as error:
    assert "without a value" in str(error), error
assert client.client_getname() in ("test", b"test")
assert client.info()["total_checks"] == 21
print("ok")
"#;
    for setup in Setup::transports() {
        let server = Server::start(&setup, POLICY);
        let port = server.resp.port().to_string();
        assert_eq!(output(Command::new("/usr/bin/python3").args(["-c", SCRIPT, &port])), "ok\n");
    }
}

#[test]
fn the_redis_crate() {
    for setup in Setup::transports() {
        for protocol in ["", "?protocol=resp3"] {
            let server = Server::start(&setup, POLICY);
            let client = redis::Client::open(format!("redis://{}/{protocol}", server.resp)).unwrap();
            let mut connection = client.get_connection().unwrap();
            let mut check = redis::cmd("CHECK");
            check.arg("path").arg("/login").arg("key").arg("rust");
            let (allowed, limit, remaining, retry, _reset, rule): (i64, i64, i64, i64, i64, String) =
                check.query(&mut connection).unwrap();
            assert_eq!((allowed, limit, remaining, retry, rule.as_str()), (1, 10, 9, 0, "ten"));
            let mut pipeline = redis::pipe();
            for _ in 0..12 {
                pipeline.add_command(check.clone());
            }
            let replies: Vec<Vec<redis::Value>> = pipeline.query(&mut connection).unwrap();
            let allowed = replies.iter().filter(|reply| reply[0] == redis::Value::Int(1)).count();
            assert_eq!(allowed, 9);
            assert!(redis::cmd("CHECK").arg("path").query::<redis::Value>(&mut connection).is_err());
            assert_eq!(redis::cmd("PING").query::<String>(&mut connection).unwrap(), "PONG");
        }
    }
}
