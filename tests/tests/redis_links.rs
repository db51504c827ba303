//! The ways to one Redis: Unix socket, TLS, passwords and users, databases, functions, and servers that know no RESP3.
#![allow(missing_docs)]
#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test that cannot go on must stop, with the reason")]

use std::{fs, net::TcpStream, path::PathBuf};

use sluice_e2e::{Client, Server, Setup, Verdict, integer, load::under_load, redis_server::Redis, sluice, text, until};

/// No limit comes back while a test runs. Who decides shows in the limit that a verdict names.
const POLICY: &str = r#"
[[rule]]
name = "load"
match = { kind = "load" }
per = ["key"]
limit = { capacity = 10000, refill = 1, period = "24h" }

[[rule]]
name = "few"
match = { kind = "few" }
per = ["key"]
limit = { capacity = 10, refill = 1, period = "24h" }
local = { capacity = 2, refill = 1, period = "24h" }
"#;

const FEW: i64 = 10;
const FEW_LOCAL: i64 = 2;

/// A deadline that a busy machine keeps, and a breaker that soon looks again.
const PATIENT: &str = "deadline_ms = 1000\nbreaker = { open_ms = 100 }";

/// Neither its bytes nor its escaped form may show anywhere.
const PASSWORD: &str = "pa/ss:w@rd-7f3a";
const ESCAPED: &str = "pa%2Fss%3Aw%40rd-7f3a";
const WRONG: &str = "wr0ng-4c1d";

/// A server on each transport.
fn servers(url: &str, settings: &str) -> Vec<Server> {
    let settings = format!("{PATIENT}\n{settings}");
    let start = |setup: Setup| {
        let setup = setup.with_redis(&[url.to_owned()], &settings).with("[log]\nlevel = \"trace\"\n");
        Server::start(&setup, POLICY)
    };
    Setup::transports().into_iter().map(start).collect()
}

fn few(client: &mut Client<TcpStream>, key: &str) -> Verdict {
    client.check(&["kind", "few", "key", key])
}

/// Redis decides, and exactly.
fn hold_that_redis_counts(servers: &[Server]) {
    for (number, server) in servers.iter().enumerate() {
        let (mut client, key) = (server.connect(), format!("counted-{number}"));
        until("Redis decides", || client.check(&["COST", "0", "kind", "few", "key", &key]).limit == FEW);
        let verdicts: Vec<_> = (0..14).map(|_| few(&mut client, &key)).collect();
        assert_eq!(verdicts.iter().filter(|verdict| verdict.allowed == 1).count(), 10);
        assert!(verdicts.iter().all(|verdict| verdict.limit == FEW), "{verdicts:?}");
    }
}

/// The failure policy decides, the log says why, and no password is anywhere.
fn hold_that_redis_is_refused(servers: &[Server], why: &str) {
    for server in servers {
        let mut client = server.connect();
        until("the log says why", || {
            assert_eq!(few(&mut client, "a").limit, FEW_LOCAL, "decided locally");
            server.log().contains(why)
        });
        let [mut first, mut others] = [0, 0];
        for _ in 0..30 {
            first += few(&mut client, "b").allowed;
            others += few(&mut client, "c").allowed;
        }
        assert_eq!((first, others), (FEW_LOCAL, FEW_LOCAL), "what the failure policy grants");
        assert_eq!(server.decisions("few", "redis"), 0);
    }
    hold_that_no_password_shows(servers);
}

fn hold_that_no_password_shows(servers: &[Server]) {
    for server in servers {
        let places = [server.log(), server.get("/v1/status").1, server.get("/metrics").1];
        let answers = [&["INFO"][..], &["CLIENT", "LIST"], &["CONFIG", "GET", "*"], &["COMMAND", "COUNT"]]
            .map(|words| format!("{:?}", server.connect().ask(words)));
        for place in places.iter().chain(&answers) {
            for secret in [PASSWORD, ESCAPED, WRONG] {
                assert!(!place.contains(secret), "{secret} in {place}");
            }
        }
    }
}

fn url_with(redis: &Redis, credentials: &str) -> String {
    redis.url().replace("://", &format!("://{credentials}@"))
}

/// The connections of the servers, as Redis lists them.
fn listed(redis: &Redis) -> Vec<String> {
    let list = redis.command(&["CLIENT", "LIST"]);
    text(&list).lines().filter(|line| line.contains(" name=sluice ")).map(str::to_owned).collect()
}

#[test]
fn over_tcp_one_named_connection_for_each_core_in_resp3() {
    let redis = Redis::start(&[]);
    let setup = Setup { cores: 2, ..Setup::new("ring") };
    let mut servers = servers(&redis.url(), "");
    servers.push(Server::start(&setup.with_redis(&[redis.url()], PATIENT), POLICY));
    hold_that_redis_counts(&servers);
    until("every core is connected", || listed(&redis).len() == 4);
    assert!(listed(&redis).iter().all(|line| line.contains(" resp=3") && line.contains(" db=0 ")));
    let failed: u64 = servers.iter().map(|server| server.redis_events("connect_failed")).sum();
    assert!(redis.connections_received() <= 4 + failed, "and there were no others");
}

#[test]
fn over_a_unix_socket() {
    let redis = Redis::start(&[]);
    for scheme in ["unix", "redis+unix"] {
        let servers = servers(&format!("{scheme}://{}?db=2", redis.unix_socket().display()), "");
        redis.command(&["FLUSHALL"]);
        hold_that_redis_counts(&servers);
        assert_eq!(listed(&redis).len(), 2);
        assert!(listed(&redis).iter().all(|line| line.contains("redis.sock") && line.contains(" db=2 ")));
    }
}

#[test]
fn over_tls_with_an_authority_of_ones_own() {
    let redis = Redis::start_tls();
    let ca_file = |file: PathBuf| format!("ca_file = \"{}\"", file.display());
    let right = servers(&redis.url(), &ca_file(redis.ca_file()));
    hold_that_redis_counts(&right);
    under_load("TLS", &right, || {});
    // Another authority, the system's, and a name that the certificate does not have.
    let other = Redis::start_tls();
    hold_that_redis_is_refused(&servers(&redis.url(), &ca_file(other.ca_file())), "TLS");
    hold_that_redis_is_refused(&servers(&redis.url(), ""), "TLS");
    let by_address = redis.url().replace("localhost", "127.0.0.1");
    hold_that_redis_is_refused(&servers(&by_address, &ca_file(redis.ca_file())), "TLS");
    // TLS to one who does not speak it.
    let plain = Redis::start(&[]);
    let url = format!("rediss://localhost:{}", plain.port());
    hold_that_redis_is_refused(&servers(&url, &ca_file(redis.ca_file())), "handshake");
    assert!(right.iter().all(|server| few(&mut server.connect(), "at the end").limit == FEW), "the right ones go on");
}

#[test]
fn a_password_in_the_url_or_in_a_file_and_a_user_of_ones_own() {
    let redis = Redis::start(&["--requirepass", PASSWORD]);
    // What the script needs, and nothing else.
    let rights = ["~rl:*", "+evalsha", "+script|load", "+time", "+get", "+mget", "+set", "+del", "+hello", "+auth"];
    let password = format!(">{PASSWORD}");
    let user = [&["ACL", "SETUSER", "gateway", "on", &password], &rights[..]].concat();
    assert_eq!(text(&redis.command(&user)), "OK");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("password");
    fs::write(&file, format!("{PASSWORD}\n")).unwrap();
    let by_file = format!("password_file = \"{}\"", file.display());
    for (url, settings) in [
        (url_with(&redis, &format!(":{ESCAPED}")), ""),
        (redis.url(), by_file.as_str()),
        (url_with(&redis, &format!("gateway:{ESCAPED}")), ""),
    ] {
        let servers = servers(&url, settings);
        redis.command(&["FLUSHALL"]);
        hold_that_redis_counts(&servers);
        hold_that_no_password_shows(&servers);
    }
}

#[test]
fn a_wrong_password_is_refused_and_shown_nowhere() {
    let redis = Redis::start(&["--requirepass", PASSWORD]);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("password");
    fs::write(&file, WRONG).unwrap();
    for (url, settings, why) in [
        (url_with(&redis, &format!(":{WRONG}")), String::new(), "WRONGPASS"),
        (redis.url(), format!("password_file = \"{}\"", file.display()), "WRONGPASS"),
        (url_with(&redis, &format!("nobody:{ESCAPED}")), String::new(), "WRONGPASS"),
        (redis.url(), String::new(), "NOAUTH"),
    ] {
        let servers = servers(&url, &settings);
        hold_that_redis_is_refused(&servers, why);
        // Who is right later is let in later.
        if why == "NOAUTH" {
            redis.command(&["CONFIG", "SET", "requirepass", ""]);
            hold_that_redis_counts(&servers);
        }
    }
}

#[test]
fn a_password_that_changes_while_it_is_in_use() {
    let redis = Redis::start(&[]);
    redis.command(&["ACL", "SETUSER", "gateway", "on", &format!(">{PASSWORD}"), "~*", "+@all"]);
    let servers = servers(&url_with(&redis, &format!("gateway:{ESCAPED}")), "");
    hold_that_redis_counts(&servers);
    under_load("the password is changed, and changed back", &servers, || {
        // Redis closes the connections of a user who is deleted.
        redis.command(&["ACL", "DELUSER", "gateway"]);
        for server in &servers {
            let mut client = server.connect();
            until("it is refused", || few(&mut client, "d").limit == FEW_LOCAL && server.log().contains("WRONGPASS"));
        }
        redis.command(&["ACL", "SETUSER", "gateway", "on", &format!(">{PASSWORD}"), "~*", "+@all"]);
        for server in &servers {
            let mut client = server.connect();
            until("Redis decides again", || few(&mut client, "d").limit == FEW);
        }
    });
    hold_that_no_password_shows(&servers);
}

#[test]
fn what_is_wrong_with_the_settings_is_said_without_the_password() {
    let folder = tempfile::tempdir().unwrap();
    let empty = folder.path().join("empty");
    fs::write(&empty, "").unwrap();
    let no_file = format!("password_file = \"{}\"", folder.path().join("nowhere").display());
    let empty = format!("password_file = \"{}\"", empty.display());
    let cases = [
        (format!("redis://user:{PASSWORD}@host:port"), "", "the port must be"),
        (format!("redis://:{PASSWORD}@host/x"), "", "the database must be"),
        (format!("rediss+cluster://:{PASSWORD}@host/1"), "", "only database 0"),
        (format!("http://:{PASSWORD}@host"), "", "the scheme must be"),
        (format!("redis://:{ESCAPED}@"), "", "a host is missing"),
        ("redis://host".to_owned(), &no_file, "password_file"),
        ("redis://host".to_owned(), &empty, "is empty"),
        ("rediss://host".to_owned(), "ca_file = \"/nowhere\"", "ca_file"),
    ];
    let config = folder.path().join("sluice.toml");
    for (url, settings, why) in cases {
        fs::write(&config, format!("[redis]\nurls = [\"{url}\"]\n{settings}\n")).unwrap();
        for check_only in [true, false] {
            let mut command = sluice();
            match check_only {
                true => command.arg("check-config").arg(&config),
                false => command.arg("--config").arg(&config).args(["--listen-resp", "127.0.0.1:0"]),
            };
            let output = command.output().unwrap();
            let said = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap()).concat();
            assert!(!output.status.success(), "{url}: {said}");
            assert!(said.contains(why), "{why} is not in: {said}");
            assert!(!said.contains(PASSWORD) && !said.contains(ESCAPED), "{said}");
        }
    }
}

#[test]
fn a_database_of_ones_own() {
    let redis = Redis::start(&[]);
    let servers = servers(&format!("{}/3", redis.url()), "");
    hold_that_redis_counts(&servers);
    assert!(redis.info("keyspace").contains("db3:keys=2,"), "{}", redis.info("keyspace"));
    assert_eq!(integer(&redis.command(&["DBSIZE"])), 0, "nothing in database 0");
    assert!(listed(&redis).iter().all(|line| line.contains(" db=3 ")));
    // One that the server does not have.
    let beyond = self::servers(&format!("{}/99", redis.url()), "");
    hold_that_redis_is_refused(&beyond, "out of range");
}

#[test]
fn the_script_as_a_function() {
    let redis = Redis::start(&[]);
    let servers = servers(&redis.url(), "functions = true");
    hold_that_redis_counts(&servers);
    let key = "flushed";
    let ask = |server: &Server| {
        let mut client = server.connect();
        (0..7).map(|_| few(&mut client, key)).collect::<Vec<_>>()
    };
    let passed = |verdicts: &[Verdict]| verdicts.iter().filter(|verdict| verdict.allowed == 1).count();
    let all = || servers.iter().flat_map(ask).collect::<Vec<_>>();
    assert_eq!(passed(&all()), 10);
    // Before it was connected, it decided locally.
    let local = || servers.iter().map(|server| server.decisions("few", "local")).collect::<Vec<_>>();
    let local_before = local();
    under_load("FUNCTION FLUSH", &servers, || {
        for _ in 0..10 {
            assert_eq!(text(&redis.command(&["FUNCTION", "FLUSH"])), "OK");
            let verdicts = all();
            let right = verdicts.iter().all(|verdict| (verdict.allowed, verdict.limit) == (0, FEW));
            assert!(right, "the counts are still there, and Redis decided: {verdicts:?}");
        }
    });
    assert!(redis.calls("fcall") > 0);
    assert_eq!((redis.calls("evalsha"), redis.calls("script")), (0, 0));
    assert!(servers.iter().all(|server| server.redis_events("no_script") > 0));
    assert!(servers.iter().all(|server| server.decisions("load", "local") == 0), "Redis made every decision");
    assert_eq!(local(), local_before);
}

#[test]
fn a_server_that_knows_no_hello() {
    let no_hello = ["--rename-command", "HELLO", ""];
    let redis = Redis::start(&no_hello);
    let by_name = servers(&redis.url(), "");
    hold_that_redis_counts(&by_name);
    assert_eq!(listed(&redis).len(), 2, "named by another command");
    assert!(listed(&redis).iter().all(|line| line.contains(" resp=2")));
    let locked = Redis::start(&[&no_hello[..], &["--requirepass", PASSWORD]].concat());
    let with_password = servers(&format!("{}/1", url_with(&locked, &format!(":{ESCAPED}"))), "");
    hold_that_redis_counts(&with_password);
    hold_that_no_password_shows(&with_password);
    assert!(listed(&locked).iter().all(|line| line.contains(" db=1 ")));
    // It repeats the words that it does not know, and one of them is the password.
    let wrong = servers(&url_with(&locked, &format!(":{WRONG}")), "");
    hold_that_redis_is_refused(&wrong, "WRONGPASS");
}
