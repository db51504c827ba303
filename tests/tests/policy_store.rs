//! Gateways that follow a policy store: how a change reaches them, what they refuse, and what they do while the store is away.
//! The PostgreSQL and the Redis are real, and so is what is done to them.
#![allow(missing_docs)]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on must stop, with the reason")]
#![allow(clippy::disallowed_methods, reason = "tests wait for real processes")]

use std::{
    fs,
    io::{BufRead, BufReader},
    net::TcpStream,
    path::Path,
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use sluice_e2e::{
    Client, PATIENCE, Server, Setup,
    postgres::Postgres,
    proxy::{Fault, Proxy},
    redis_server::{Redis, free_port},
    sluice, until,
};

/// So seldom that no test sees it: whatever comes, comes by a push.
const NEVER_MS: u64 = 3_600_000;

/// A rule by key with buckets of this many.
fn body(capacity: i64) -> String {
    format!(r#"{{"per": ["key"], "limit": {{"capacity": {capacity}, "refill": {capacity}, "period": "1h"}}}}"#)
}

fn setup(url: &str, settings: &str) -> Setup {
    Setup::new("ring").with(&format!("[postgres]\nurl = {url:?}\n{settings}\n"))
}

/// A gateway that hears NOTIFY and nothing else.
fn by_notify(postgres: &Postgres) -> Setup {
    setup(&postgres.gateway_url(), &format!("poll_ms = {NEVER_MS}\nredis_channel = \"\""))
}

/// A gateway that hears nothing, and asks this often.
fn by_poll(url: &str, poll_ms: u64) -> Setup {
    setup(
        url,
        &format!(
            "poll_ms = {poll_ms}\nnotify = false\nredis_channel = \"\"\ndeadline_ms = 500\nconnect_timeout_ms = 500"
        ),
    )
}

fn limit(server: &Server) -> i64 {
    server.connect().check(&["COST", "0", "key", "a"]).limit
}

fn in_force(server: &Server, capacity: i64) {
    server.until(&format!("{capacity} is the limit"), |server| limit(server) == capacity);
}

fn version(server: &Server) -> u64 {
    server.status()["policy"]["version"].as_u64().unwrap()
}

/// What `/v1/status` says of following the store.
fn store(server: &Server) -> serde_json::Value {
    server.status()["policy"]["store"].clone()
}

fn problem(server: &Server) -> String {
    store(server)["problem"].as_str().unwrap_or_default().to_owned()
}

fn fetches(server: &Server) -> u64 {
    server.metric("sluice_policy_store_fetches_total")
}

fn listens(server: &Server, way: &str) -> bool {
    store(server)["pushes"][way]["listening"] == true
}

/// Three gateways, once all of them listen.
fn three(setup: &Setup, way: &str) -> Vec<Server> {
    let servers: Vec<Server> = (0..3).map(|_| Server::start_with_store(setup)).collect();
    servers.iter().for_each(|server| server.until("it listens", |server| listens(server, way)));
    servers
}

#[test]
fn a_change_reaches_every_gateway_by_notify_alone() {
    let postgres = Postgres::with_store();
    postgres.put_rules(&[("one", &body(10))]);
    let servers = three(&by_notify(&postgres), "notify");
    servers.iter().for_each(|server| in_force(server, 10));
    for capacity in 11..21 {
        let number = postgres.put_rules(&[("one", &body(capacity))]);
        servers.iter().for_each(|server| in_force(server, capacity));
        assert!(servers.iter().all(|server| version(server) == number));
    }
    // Which of them runs what is in the store.
    let current = "SELECT count(*) FROM sluice.gateway g, sluice.policy p WHERE g.policy_version = p.version AND g.problem IS NULL";
    until("the store knows", || postgres.sql(current).trim() == "3");
    for server in &servers {
        assert_eq!(server.status()["policy"]["reloads_applied"], 11, "each change once");
        assert!(server.metric("sluice_policy_store_pushes_total{way=\"notify\"}") >= 10);
    }
}

#[test]
fn a_change_reaches_every_gateway_by_redis_alone() {
    let (postgres, redis) = (Postgres::with_store(), Redis::start(&[]));
    postgres.put_rules(&[("one", &body(10))]);
    let setup = setup(&postgres.gateway_url(), &format!("poll_ms = {NEVER_MS}\nnotify = false"));
    let servers = three(&setup.with_redis(&[redis.url()], ""), "redis");
    for capacity in 11..21 {
        let number = postgres.put_rules(&[("one", &body(capacity))]);
        redis.command(&["PUBLISH", "sluice:policy", &number.to_string()]);
        servers.iter().for_each(|server| in_force(server, capacity));
    }
    // Redis is away for a while, and what was published meanwhile is lost: it is asked for when Redis is heard again.
    redis.kill();
    servers.iter().for_each(|server| server.until("nothing is heard", |server| !listens(server, "redis")));
    let number = postgres.put_rules(&[("one", &body(30))]);
    redis.restart();
    // Not by the limit that a check tells: where the breaker has opened meanwhile, that is the local one.
    servers.iter().for_each(|server| server.until("it has it", |server| version(server) == number));
}

#[test]
fn with_every_push_cut_a_change_is_there_after_the_poll_interval() {
    let postgres = Postgres::with_store();
    postgres.put_rules(&[("one", &body(10))]);
    let servers: Vec<Server> =
        (0..3).map(|_| Server::start_with_store(&by_poll(&postgres.gateway_url(), 200))).collect();
    for capacity in 11..14 {
        postgres.put_rules(&[("one", &body(capacity))]);
        servers.iter().for_each(|server| in_force(server, capacity));
    }
    // Asked to, it looks at once.
    let server = Server::start_with_store(&by_poll(&postgres.gateway_url(), NEVER_MS));
    in_force(&server, 13);
    postgres.put_rules(&[("one", &body(14))]);
    server.signal("HUP");
    in_force(&server, 14);
}

#[test]
fn pushes_that_are_lost_repeated_or_out_of_order_lose_nothing_and_apply_nothing_twice() {
    let (postgres, redis) = (Postgres::with_store(), Redis::start(&[]));
    postgres.put_rules(&[("one", &body(10))]);
    let setup = setup(&postgres.gateway_url(), &format!("poll_ms = {NEVER_MS}")).with_redis(&[redis.url()], "");
    let server = Server::start_with_store(&setup);
    server.until("it listens", |server| listens(server, "notify") && listens(server, "redis"));
    server.until("nothing is left to ask", |server| fetches(server) >= 2);
    // Old numbers, future ones, no numbers, again and again, both ways at once.
    for _ in 0..20 {
        for push in ["1", "0", "99999999999999999999", "-1", "", "garbage"] {
            redis.command(&["PUBLISH", "sluice:policy", push]);
            postgres.sql(&format!("SELECT pg_notify('sluice_policy', '{push}')"));
        }
    }
    server.until("all were heard", |server| server.metric("sluice_policy_store_pushes_total") >= 240);
    // A burst is answered by few fetches: far fewer than there are pushes.
    let before = fetches(&server);
    postgres.sql("SELECT pg_notify('sluice_policy', 'burst ' || i) FROM generate_series(1, 200) i");
    server.until("the burst was heard", |server| {
        server.metric("sluice_policy_store_pushes_total{way=\"notify\"}") >= 120 + 200
    });
    let number = postgres.put_rules(&[("one", &body(11))]);
    in_force(&server, 11);
    assert!(fetches(&server) - before <= 10, "{} fetches for one burst", fetches(&server) - before);
    assert_eq!((version(&server), server.status()["policy"]["reloads_applied"].as_u64()), (number, Some(2)));
}

#[test]
fn what_is_wrong_in_the_store_is_refused_whole_and_said_everywhere() {
    let postgres = Postgres::with_store();
    postgres.put_rules(&[("one", &body(10)), ("two", &body(1000))]);
    let server = Server::start_with_store(&by_notify(&postgres));
    in_force(&server, 10);
    // Forced into the store by hand: one rule is fine and the other is not.
    let bad = r#"{"per": ["key"], "limt": {"capacity": 1, "refill": 1, "period": "1h"}}"#;
    let number = postgres.put_rules(&[("one", &body(20)), ("two", bad)]);
    server.until("it is refused", |server| server.metric("sluice_policy_store_refused") == 1);
    let why = server.status()["policy"]["last_refusal"].as_str().unwrap().to_owned();
    assert!(why.contains("two") && why.contains("limt") && why.contains("limit"), "{why}");
    assert_eq!((limit(&server), version(&server)), (10, number - 1), "the good half is not taken either");
    assert_eq!(server.get("/readyz").0, 200);
    assert!(server.log().contains("policy of the store refused, the old one goes on"));
    until("the store knows why", || {
        postgres.sql("SELECT problem FROM sluice.gateway WHERE policy_version = 1").contains("limt")
    });
    // Nor is what has bodies that are no objects, names that no rule may have, or no rules at all.
    postgres.put_rules(&[("two", "[1]")]);
    postgres.put_rules(&[("two", &body(5)), ("n\u{e9} \u{1f}", &body(5))]);
    server.until("it is refused", |server| {
        server.status()["policy"]["last_refusal"].as_str().is_some_and(|why| why.contains("\u{e9}"))
    });
    let gone = "INSERT INTO sluice.rule (name, version, body) SELECT DISTINCT name, :version::bigint, NULL::jsonb FROM sluice.rule";
    postgres.change(gone);
    server.until("it is refused", |server| {
        server.status()["policy"]["last_refusal"].as_str().is_some_and(|why| why.contains("no rules"))
    });
    assert_eq!((limit(&server), version(&server)), (10, 1));
    let number = postgres.put_rules(&[("one", &body(30))]);
    in_force(&server, 30);
    assert_eq!((version(&server), server.metric("sluice_policy_store_refused")), (number, 0));
    assert!(server.status()["policy"]["last_refusal"].is_null());
}

#[test]
fn overrides_and_rollouts_come_through_the_store() {
    let postgres = Postgres::with_store();
    postgres.put_rules(&[("one", &body(10))]);
    let server = Server::start_with_store(&by_notify(&postgres));
    in_force(&server, 10);
    let put = |override_body: &str| {
        postgres.change(&format!(
            "INSERT INTO sluice.override (rule, identity, version, body) VALUES ('one', ARRAY['a'], :version, {override_body})"
        ))
    };
    put(r#"'{"limit": {"capacity": 99, "refill": 1, "period": "1s"}}'"#);
    in_force(&server, 99);
    assert_eq!(server.connect().check(&["key", "b"]).limit, 10, "nobody else");
    put("NULL");
    in_force(&server, 10);
    let share = body(1).replacen('{', r#"{"rollout_pct": 50, "#, 1);
    postgres.put_rules(&[("one", &share)]);
    server.until("half of them have it", |server| server.status()["policy"]["version"] == 4);
    let mut client = server.connect();
    let limited = (0..400).filter(|key| client.check(&["key", &format!("k{key}")]).limit == 1).count();
    assert!((120..280).contains(&limited), "{limited} of 400");
}

#[test]
fn gateways_go_on_while_the_store_is_killed_frozen_or_talks_nonsense_and_say_so() {
    let postgres = Postgres::with_store();
    postgres.put_rules(&[("one", &body(10))]);
    let proxy = Proxy::start(postgres.address());
    let url = format!("postgres://gateway@{}/sluice", proxy.address());
    let server = Server::start_with_store(&by_poll(&url, 100));
    in_force(&server, 10);
    let mut capacity = 10;
    let mut after = |fault: &str, begin: &dyn Fn(), end: &dyn Fn()| {
        begin();
        server.until(&format!("it says that something is wrong: {fault}"), |server| !problem(server).is_empty());
        assert_eq!((limit(&server), server.get("/readyz").0), (capacity, 200), "{fault}");
        let failed = server.metric("sluice_policy_store_fetches_total{outcome=\"failed\"}");
        server.until("it tries again", |server| {
            server.metric("sluice_policy_store_fetches_total{outcome=\"failed\"}") > failed
        });
        end();
        capacity += 1;
        postgres.put_rules(&[("one", &body(capacity))]);
        in_force(&server, capacity);
        server.until("it is well again", |server| problem(server).is_empty());
    };
    after("killed", &|| postgres.kill(), &|| postgres.restart());
    after("frozen", &|| postgres.freeze(), &|| postgres.thaw());
    // It answers, later than it may.
    let slow = "ALTER FUNCTION sluice.changes_after RENAME TO changes_after_at_once;
        CREATE FUNCTION sluice.changes_after(after bigint, after_token text) RETURNS TABLE (kind text, version bigint, name text, identity text, body text)
        LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(3600); END $$;
        GRANT EXECUTE ON FUNCTION sluice.changes_after(bigint, text) TO sluice_gateway";
    let fast =
        "DROP FUNCTION sluice.changes_after; ALTER FUNCTION sluice.changes_after_at_once RENAME TO changes_after";
    after("slow", &|| drop(postgres.sql(slow)), &|| drop(postgres.sql(fast)));
    for fault in [Fault::ResetInReply { after_bytes: 3 }, Fault::HalfReplyThenSilence, Fault::RefuseConnections] {
        after(&format!("{fault:?}"), &|| proxy.set(fault), &|| proxy.set(Fault::None));
        // What an earlier fault left of a connection is cut, so that the next one begins anew.
        proxy.reset_connections();
    }
    // Garbage comes once on each connection, whenever it is set.
    proxy.set(Fault::Garbage);
    server.until("it says that something is wrong", |server| !problem(server).is_empty());
    proxy.set(Fault::None);
    in_force(&server, capacity);
    // Its schema is another: what it answers are no rows of a policy.
    let other = "ALTER FUNCTION sluice.changes_after RENAME TO changes_after_at_once;
        CREATE FUNCTION sluice.changes_after(after bigint, after_token text) RETURNS TABLE (kind text, version text, name text, identity text, body text)
        LANGUAGE sql AS $$ VALUES ('policy', '7', 'x', NULL, 'since'), ('surprise', 'a', NULL, '{', '[') $$;
        GRANT EXECUTE ON FUNCTION sluice.changes_after(bigint, text) TO sluice_gateway";
    postgres.sql(other);
    server.until("it is refused", |server| server.metric("sluice_policy_store_refused") == 1);
    assert_eq!(limit(&server), capacity);
    postgres.sql(fast);
    server.until("it is good again", |server| server.metric("sluice_policy_store_refused") == 0);
}

/// A backup was restored: the numbers are used again, for other changes.
#[test]
fn a_store_that_went_back_in_time_is_followed_as_it_is_now() {
    let postgres = Postgres::with_store();
    postgres.put_rules(&[("one", &body(10))]);
    postgres.put_rules(&[("one", &body(11)), ("gone", &body(1))]);
    let server = Server::start_with_store(&by_notify(&postgres));
    server.until("both are there", |server| server.status()["policy"]["rules"] == 2);
    postgres.sql("DELETE FROM sluice.rule WHERE version = 2; DELETE FROM sluice.change WHERE version = 2; UPDATE sluice.policy SET version = 1");
    let number = postgres.put_rules(&[("other", &body(500))]);
    assert_eq!(number, 2);
    in_force(&server, 10);
    // It may have looked between the statements above.
    server.until("the other one is there", |server| server.status()["policy"]["rules"] == 2);
}

#[test]
fn wrong_credentials_are_said_without_the_password() {
    let postgres = Postgres::start_with("host all all all scram-sha-256\nlocal all all trust", &[]);
    postgres.make_store();
    postgres.put_rules(&[("one", &body(10))]);
    let folder = tempfile::tempdir().unwrap();
    let (password, last_good) = (folder.path().join("password"), folder.path().join("last-good"));
    fs::write(&password, "secret\n").unwrap();
    let with_file = |setup: Setup| {
        setup.with(&format!("password_file = {:?}\nlast_good = {:?}\n", password.display(), last_good.display()))
    };
    let server = Server::start_with_store(&with_file(by_poll(&postgres.gateway_url(), 100)));
    in_force(&server, 10);
    server.until("it is on disk", |_| last_good.exists());
    postgres.sql("ALTER ROLE gateway PASSWORD 'another'");
    postgres.restart();
    server.until("it says so", |server| problem(server).contains("28P01"));
    assert_eq!((limit(&server), server.get("/readyz").0), (10, 200));
    let url = postgres.gateway_url().replace("gateway@", "gateway:secret-in-url@");
    let other = Server::start_with_store(&by_poll(&url, 100).with(&format!("last_good = {:?}\n", last_good.display())));
    other.until("it says so", |server| problem(server).contains("28P01"));
    for text in
        [server.log(), server.get("/v1/status").1, other.log(), other.get("/v1/status").1, other.get("/metrics").1]
    {
        assert!(!text.contains("secret"), "{text}");
    }
    postgres.sql("ALTER ROLE gateway PASSWORD 'secret'");
    server.until("it is well again", |server| problem(server).is_empty());
}

/// A gateway on a fixed ops port, which need not serve yet.
struct Waiting {
    child: Child,
    ops: u16,
}

impl Waiting {
    fn start(folder: &Path, url: &str, settings: &str) -> Self {
        let (ops, poll) =
            (free_port(), "poll_ms = 100\nnotify = false\nredis_channel = \"\"\nconnect_timeout_ms = 200");
        fs::write(folder.join("sluice.toml"), format!("[postgres]\nurl = {url:?}\n{poll}\n{settings}\n")).unwrap();
        let mut command = sluice();
        command.args(["--config", "sluice.toml", "--cores", "1", "--listen-resp", "127.0.0.1:0"]);
        command.args(["--listen-ops", &format!("127.0.0.1:{ops}")]).current_dir(folder);
        let log = fs::File::create(folder.join("log")).unwrap();
        Self { child: command.stdout(Stdio::piped()).stderr(log).spawn().unwrap(), ops }
    }

    fn readyz(&self) -> String {
        let Ok(stream) = TcpStream::connect(("127.0.0.1", self.ops)) else { return String::new() };
        let mut stream = stream;
        std::io::Write::write_all(&mut stream, b"GET /readyz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            .unwrap();
        std::io::read_to_string(stream).unwrap_or_default()
    }

    /// What it prints once it serves; waits for it.
    fn address(&mut self) -> String {
        let mut line = String::new();
        BufReader::new(self.child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        line.split("RESP on ").nth(1).unwrap().split([' ', ',']).next().unwrap().to_owned()
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn check(address: &str) -> i64 {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    Client::new(stream).check(&["COST", "0", "key", "a"]).limit
}

#[test]
fn without_the_store_it_starts_from_the_last_good_policy_or_waits_or_serves_as_it_is_told() {
    let postgres = Postgres::with_store();
    postgres.put_rules(&[("one", &body(10))]);
    let url = postgres.gateway_url();
    let folder = tempfile::tempdir().unwrap();
    let last_good = folder.path().join("last-good");
    let keeps = format!("last_good = {:?}\n", last_good.display().to_string());
    {
        let server = Server::start_with_store(&by_poll(&url, 100).with(&keeps));
        in_force(&server, 10);
        server.until("it is on disk", |server| {
            server.metric("sluice_policy_last_good_writes_total{outcome=\"written\"}") == 1
        });
    }
    postgres.kill();
    {
        let server = Server::start_with_store(&by_poll(&url, 100).with(&keeps));
        assert_eq!((limit(&server), version(&server)), (10, 1));
        server.until("it says that the store is away", |server| !problem(server).is_empty());
        postgres.restart();
        postgres.put_rules(&[("one", &body(11))]);
        in_force(&server, 11);
        server.until("that is on disk", |server| {
            server.metric("sluice_policy_last_good_writes_total{outcome=\"written\"}") == 1
        });
        postgres.kill();
    }
    // Damaged, it is not taken.
    let mut bytes = fs::read(&last_good).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&last_good, &bytes).unwrap();
    let mut waiting = Waiting::start(folder.path(), &url, &keeps);
    until("it waits", || waiting.readyz().contains("there is no policy yet"));
    assert!(waiting.readyz().starts_with("HTTP/1.1 503"));
    let log = fs::read_to_string(folder.path().join("log")).unwrap();
    assert!(log.contains("the last good policy cannot be used"), "{log}");
    postgres.restart();
    assert_eq!(check(&waiting.address()), 11);
    until("it is ready", || waiting.readyz().starts_with("HTTP/1.1 200"));
    drop(waiting);
    postgres.kill();
    // Told to leave while it waits, it leaves.
    fs::remove_file(&last_good).unwrap();
    let mut waiting = Waiting::start(folder.path(), &url, &keeps);
    until("it waits", || waiting.readyz().contains("there is no policy yet"));
    assert!(Command::new("kill").arg(waiting.child.id().to_string()).status().unwrap().success());
    assert!(waiting.child.wait().unwrap().success());
    // Told to serve, it allows everything.
    let mut serving = Waiting::start(folder.path(), &url, "without_policy = \"serve\"");
    let address = serving.address();
    assert_eq!(check(&address), -1, "no rule, no limit");
    assert!(serving.readyz().starts_with("HTTP/1.1 200"));
    postgres.restart();
    until("it has the policy", || check(&address) == 11);
}

#[test]
fn a_disk_that_takes_no_last_good_policy_is_said_and_stops_nothing() {
    let postgres = Postgres::with_store();
    postgres.put_rules(&[("one", &body(10))]);
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().join("disk");
    fs::create_dir(&disk).unwrap();
    // A small disk of its own, where the tests may mount one; elsewhere a folder that goes away.
    let mut mount = Command::new("mount");
    mount.args(["-t", "tmpfs", "-o", "size=16k", "tmpfs"]).arg(&disk).stderr(Stdio::null());
    let mounted = mount.status().is_ok_and(|status| status.success());
    let last_good = disk.join("last-good");
    let server = Server::start_with_store(
        &by_poll(&postgres.gateway_url(), 100).with(&format!("last_good = {:?}\n", last_good.display().to_string())),
    );
    server.until("it is on disk", |_| last_good.exists());
    let before = fs::read(&last_good).unwrap();
    if mounted {
        let _ = fs::write(disk.join("filler"), vec![0; 64 << 10]);
    } else {
        fs::rename(&disk, folder.path().join("elsewhere")).unwrap();
    }
    postgres.put_rules(&[("one", &body(11))]);
    in_force(&server, 11);
    server.until("it says so", |server| server.metric("sluice_policy_last_good_failing") == 1);
    let why = store(&server)["last_good"]["problem"].as_str().unwrap().to_owned();
    assert!(why.contains("last-good"), "{why}");
    if mounted {
        assert_eq!(fs::read(&last_good).unwrap(), before, "the older one is still whole");
        fs::remove_file(disk.join("filler")).unwrap();
    } else {
        fs::rename(folder.path().join("elsewhere"), &disk).unwrap();
    }
    server.until("it is written in the end", |server| server.metric("sluice_policy_last_good_failing") == 0);
    drop(server);
    if mounted {
        assert!(Command::new("umount").arg(&disk).status().unwrap().success());
    }
}

/// Of each version one of two rules is the tighter one, and a mixture of two versions has a limit that neither has.
#[test]
fn a_change_to_two_rules_is_never_seen_half() {
    const CHANGES: u32 = 10_000;
    let postgres = Postgres::with_store();
    let versions = [[10, 20], [30, 5]];
    let put = |[one, two]: [i64; 2]| postgres.put_rules(&[("one", &body(one)), ("two", &body(two))]);
    put(versions[0]);
    let setup = by_notify(&postgres);
    let servers: Vec<Server> = ["ring", "plain"]
        .iter()
        .map(|transport| Server::start_with_store(&Setup { transport, cores: 2, ..setup.clone() }))
        .collect();
    let over = AtomicBool::new(false);
    let script: String = (0..CHANGES)
        .map(|number| {
            let [one, two] = versions[(number % 2) as usize].map(body);
            format!(
                "BEGIN; SELECT sluice.begin_change('a test', '') AS version \\gset new_\n\
                 INSERT INTO sluice.rule VALUES ('one', :new_version, '{one}'), ('two', :new_version, '{two}'); COMMIT;\n"
            )
        })
        .collect();
    std::thread::scope(|scope| {
        let watchers: Vec<_> = servers
            .iter()
            .map(|server| {
                scope.spawn(|| {
                    let mut client = server.connect();
                    let (mut seen, mut key) = ([0_u64; 2], 0_u64);
                    while !over.load(Ordering::Relaxed) {
                        key += 1;
                        // A key of its own, so that every bucket is full and the smaller rule is the tighter one.
                        let verdict = client.check(&["COST", "0", "key", &format!("k{key}")]);
                        match (verdict.limit, verdict.remaining) {
                            (10, 10) => seen[0] += 1,
                            (5, 5) => seen[1] += 1,
                            other => panic!("no version has a limit of which {other:?} is left"),
                        }
                    }
                    seen
                })
            })
            .collect();
        postgres.sql(&script);
        over.store(true, Ordering::Relaxed);
        for watcher in watchers {
            let seen = watcher.join().unwrap();
            assert!(seen.iter().all(|&count| count > 100), "{seen:?}");
        }
    });
    for server in &servers {
        server.until("the last one is there", |server| version(server) == u64::from(CHANGES) + 1);
        assert_eq!(limit(server), 5);
        assert!(server.status()["policy"]["reloads_applied"].as_u64().unwrap() > 5, "many were seen on the way");
    }
}

/// Not one more second than the poll interval must pass before what one gateway has seen is seen by all; this only shows that it is
/// no matter of luck.
#[test]
fn a_gateway_that_was_cut_off_catches_up_with_all_that_it_missed() {
    let postgres = Postgres::with_store();
    postgres.put_rules(&[("one", &body(10))]);
    let proxy = Proxy::start(postgres.address());
    let url = format!("postgres://gateway@{}/sluice", proxy.address());
    let server = Server::start_with_store(&by_poll(&url, 100));
    in_force(&server, 10);
    proxy.set(Fault::RefuseConnections);
    proxy.reset_connections();
    server.until("it is cut off", |server| !problem(server).is_empty());
    for number in 0..50 {
        postgres.put_rules(&[(&*format!("rule-{number}"), &body(1000 + number))]);
    }
    postgres.change("INSERT INTO sluice.rule (name, version, body) VALUES ('rule-7', :version, NULL)");
    std::thread::park_timeout(Duration::from_millis(50));
    proxy.set(Fault::None);
    server.until("it has all of them", |server| server.status()["policy"]["rules"] == 50);
    assert_eq!(version(&server), 52);
}
