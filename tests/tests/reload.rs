//! A policy is replaced as a whole, under load, or not at all.
#![allow(missing_docs)]
#![allow(clippy::disallowed_methods, reason = "tests wait for real processes")]

use std::{
    fs,
    os::unix::fs::symlink,
    process::Command,
    sync::atomic::{AtomicBool, Ordering},
    time::Instant,
};

use sluice_e2e::{PATIENCE, Server, Setup, Verdict, request};

/// Two rules that apply together; the tighter one decides. Each version has them in the other order, and for the other's
/// attribute. Mixed policies would show: rule and limit belong together.
fn policy(version: u64) -> String {
    let rule = |name: &str, per: &str, capacity: u64| {
        format!(
            "[[rule]]\nname = \"{name}-{version}\"\nper = [\"{per}\"]\n\
             limit = {{ capacity = {capacity}, refill = 1000000, period = \"1ms\" }}\n"
        )
    };
    let (tight, wide) = (1_000_000 + version, 2_000_000 + version);
    if version.is_multiple_of(2) {
        rule("tight", "key", tight) + &rule("wide", "tenant", wide)
    } else {
        rule("wide", "key", wide) + &rule("tight", "tenant", tight)
    }
}

#[test]
fn reload_under_load_loses_no_reply_and_never_mixes_policies() {
    const BATCH: usize = 50;
    const VERSIONS: u64 = 20;
    for setup in Setup::all() {
        let server = Server::start(&setup, &policy(0));
        let done = AtomicBool::new(false);
        let batch = request(&["CHECK", "key", "a", "tenant", "t"]).repeat(BATCH);
        std::thread::scope(|scope| {
            let load: Vec<_> = (0..4)
                .map(|_| {
                    let (mut client, done, batch) = (server.connect(), &done, &batch);
                    scope.spawn(move || {
                        let mut last = 0;
                        let began = Instant::now();
                        // Each core takes the new policy by itself, a moment after it is in force.
                        while !done.load(Ordering::Relaxed) || last < VERSIONS {
                            assert!(began.elapsed() < 4 * PATIENCE, "it stays at policy {last}");
                            client.send(batch);
                            for _ in 0..BATCH {
                                let verdict = Verdict::of(&client.receive().expect("no reply is lost"));
                                let version = u64::try_from(verdict.limit).unwrap() - 1_000_000;
                                assert_eq!(verdict.rule, format!("tight-{version}"), "{verdict:?}");
                                assert!(version >= last, "from policy {last} back to {version}");
                                last = version;
                            }
                        }
                    })
                })
                .collect();
            for version in 1..=VERSIONS {
                server.write_policy(&policy(version));
                server.until("the policy is in force", |server| {
                    server.status()["policy"]["version"].as_u64() == Some(version + 1)
                });
                if version % 5 == 0 {
                    let refused = server.metric("sluice_policy_reloads_total{outcome=\"refused\"}");
                    server.write_policy("[[rule]]\nname = \"half\"\nlimit = { capacity = ");
                    server.until("the bad policy is refused", |server| {
                        server.metric("sluice_policy_reloads_total{outcome=\"refused\"}") > refused
                    });
                }
            }
            done.store(true, Ordering::Relaxed);
            load.into_iter().for_each(|thread| thread.join().unwrap());
        });
        assert_eq!(server.metric("sluice_policy_reloads_total{outcome=\"applied\"}"), VERSIONS);
    }
}

fn one(capacity: u64) -> String {
    format!(
        "[[rule]]\nname = \"one\"\nper = [\"key\"]\nlimit = {{ capacity = {capacity}, refill = 1, period = \"1h\" }}\n"
    )
}

#[test]
fn a_changed_rule_keeps_its_buckets() {
    for setup in Setup::transports() {
        let server = Server::start(&setup, &one(10));
        let mut client = server.connect();
        assert_eq!(client.check(&["COST", "4", "key", "a"]).remaining, 6);
        let mut change = |capacity, version| {
            server.write_policy(&one(capacity));
            server.until("it is in force", |server| server.status()["policy"]["version"].as_u64() == Some(version));
            let verdict = client.check(&["key", "a"]);
            (verdict.limit, verdict.remaining)
        };
        assert_eq!(change(100, 2), (100, 5), "a higher capacity gives nothing away");
        assert_eq!(change(3, 3), (3, 2), "a lower capacity caps it");
        assert_eq!(change(10, 4), (10, 1), "and what it cut off is gone");
    }
}

#[test]
fn a_bad_file_is_reported_and_the_old_policy_goes_on() {
    for setup in Setup::transports() {
        let server = Server::start(&setup, &one(10));
        let mut client = server.connect();
        server.overwrite_policy("[[rule]]\nname = \"one\"\nper = [\"key\"]\nlimt = { capacity = 1 }\n");
        server.until("it is refused", |server| server.status()["policy"]["reloads_refused"].as_u64() >= Some(1));
        let why = server.status()["policy"]["last_refusal"].as_str().unwrap().to_owned();
        assert!(why.contains("policy.toml:4") && why.contains("limt") && why.contains("limit"), "{why}");
        assert_eq!(client.check(&["key", "a"]).limit, 10);
        server.overwrite_policy(&one(20));
        server.until("the good one is taken", |server| server.status()["policy"]["version"].as_u64() == Some(2));
        assert_eq!(client.check(&["key", "a"]).limit, 20);
        // An empty file is what a copy leaves for a moment; it must not switch everything off.
        server.overwrite_policy("");
        server.until("it is refused", |server| server.status()["policy"]["reloads_refused"].as_u64() >= Some(2));
        assert_eq!(client.check(&["key", "a"]).limit, 20);
        let is_refused = |server: &Server| {
            let told = server.status()["policy"]["last_refusal_unix_ms"].as_i64();
            let refused = server.metric("sluice_policy_file_refused") == 1;
            assert!(!refused || told.is_none_or(|unix_ms| unix_ms > 1_700_000_000_000));
            refused
        };
        assert!(is_refused(&server));
        server.overwrite_policy(&one(20));
        server.until("what is in force came back", |server| !is_refused(server));
        assert!(server.status()["policy"]["last_refusal"].is_null());
        server.remove_policy();
        server.until("it is gone", is_refused);
        assert_eq!(client.check(&["key", "a"]).limit, 20);
        server.write_policy(&one(30));
        server.until("it is back", |server| !is_refused(server));
        assert_eq!(client.check(&["key", "a"]).limit, 30);
    }
}

/// As a mounted ConfigMap has it: the file is a link into a folder that is reached by a link, and that one is swapped.
#[test]
fn a_policy_behind_links_is_read_again_when_one_of_them_or_its_end_changes() {
    for setup in Setup::transports() {
        let server = Server::start(&setup, &one(10));
        let folder = server.unix().parent().unwrap().to_owned();
        let at = |name: &str| folder.join(name);
        let in_force = |capacity: i64| {
            server.until(&format!("{capacity} is the limit"), |server| {
                server.connect().check(&["COST", "0", "key", "a"]).limit == capacity
            });
        };
        for (version, capacity) in [("..1", 11), ("..2", 12)] {
            fs::create_dir(at(version)).unwrap();
            fs::write(at(version).join("policy.toml"), one(capacity)).unwrap();
        }
        let swap = |target: &str, name: &str| {
            symlink(target, at("..data_tmp")).unwrap();
            fs::rename(at("..data_tmp"), at(name)).unwrap();
        };
        swap("..1", "..data");
        swap("..data/policy.toml", "policy.toml");
        in_force(11);
        swap("..2", "..data");
        fs::remove_dir_all(at("..1")).unwrap();
        in_force(12);
        fs::write(at("..2/policy.toml"), one(13)).unwrap();
        in_force(13);
        // A link that is made where there is nothing.
        fs::write(at("other.toml"), one(14)).unwrap();
        fs::remove_file(at("policy.toml")).unwrap();
        symlink("other.toml", at("policy.toml")).unwrap();
        in_force(14);
        assert_eq!(server.metric("sluice_policy_file_refused"), 0);
    }
}

/// Written through another of its names: in the folder that is watched nothing happens, so only the signal can tell.
#[test]
fn sighup_alone_reads_the_policy_again() {
    for setup in Setup::transports() {
        let server = Server::start(&setup, &one(10));
        let folder = server.unix().parent().unwrap().to_owned();
        let elsewhere = tempfile::tempdir_in(&folder).unwrap();
        let other_name = elsewhere.path().join("same-file");
        fs::hard_link(folder.join("policy.toml"), &other_name).unwrap();
        let mut client = server.connect();
        let version = |server: &Server| server.status()["policy"]["version"].as_u64();

        // A server that has only just started looks once more by itself; whoever has asked is answered after that.
        server.signal("HUP");
        let answer = "policy read again: nothing changed";
        server.until("whoever asked is answered", |server| server.log().contains(answer));

        fs::write(&other_name, one(20)).unwrap();
        assert_eq!((version(&server), client.check(&["key", "a"]).limit), (Some(1), 10), "nobody has told it");
        server.signal("HUP");
        server.until("it is read", |server| version(server) == Some(2));
        assert_eq!(client.check(&["key", "a"]).limit, 20);

        fs::write(&other_name, "[[rule]]\nname = \"one\"\nper = [\"key\"]\nlimt = { capacity = 1 }\n").unwrap();
        server.signal("HUP");
        server.until("it is refused", |server| server.metric("sluice_policy_file_refused") == 1);
        let why = server.status()["policy"]["last_refusal"].as_str().unwrap().to_owned();
        assert!(why.contains("policy.toml:4") && why.contains("limt"), "{why}");
        server.until("the log says why", |server| server.log().contains("policy refused, the old one goes on:"));
        assert!(server.log().contains(&why), "{why}");
        assert_eq!((version(&server), client.check(&["key", "a"]).limit), (Some(2), 20));

        fs::write(&other_name, one(20)).unwrap();
        server.signal("HUP");
        server.until("it is good again", |server| server.metric("sluice_policy_file_refused") == 0);
        assert_eq!((version(&server), client.check(&["key", "a"]).limit), (Some(2), 20));
    }
}

#[test]
fn a_policy_that_has_become_a_pipe_is_refused_and_holds_nobody_up() {
    for setup in Setup::transports() {
        let mut server = Server::start(&setup, &one(10));
        let folder = server.unix().parent().unwrap().to_owned();
        assert!(Command::new("mkfifo").arg(folder.join("pipe")).status().unwrap().success());
        fs::rename(folder.join("pipe"), folder.join("policy.toml")).unwrap();
        server.until("it is refused", |server| server.metric("sluice_policy_file_refused") == 1);
        let why = server.status()["policy"]["last_refusal"].as_str().unwrap().to_owned();
        assert!(why.contains("is not a regular file"), "{why}");
        assert_eq!(server.connect().check(&["key", "a"]).limit, 10);
        server.signal("TERM");
        assert!(server.wait().success());
    }
}
