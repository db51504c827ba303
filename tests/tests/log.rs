//! The log may stall, and nothing else does.
#![allow(missing_docs)]
#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test that cannot go on must stop, with the reason")]

use std::{fs, path::Path};

use sluice_e2e::{AMPLE, Server, Setup, redis_server::Redis};

/// The file watch tells of everything that happens in the policy's folder: more lines than any pipe takes.
const CHATTY: &str = "[log]\nlevel = \"info,notify=trace\"\n";

/// Something that is logged.
fn make_noise(folder: &Path) {
    for _ in 0..100 {
        fs::write(folder.join("noise"), "").expect("writing");
    }
}

#[test]
fn a_log_that_nobody_reads_holds_nobody_up() {
    for setup in Setup::transports() {
        let redis = Redis::start(&[]);
        let setup = Setup { log_stalls: true, ..setup.with(CHATTY).with_redis(&[redis.url()], "") };
        let mut server = Server::start(&setup, AMPLE);
        let folder = server.unix().parent().unwrap().to_owned();
        let mut client = server.connect();
        let decided = |server: &Server, by: &str| server.decisions("one", by);
        server.until("Redis decides", |server| {
            client.check(&["key", "a"]);
            decided(server, "redis") > 0
        });
        server.until("more was logged than fits", |server| {
            make_noise(&folder);
            server.metric("sluice_log_lines_dropped_total") > 0
        });
        // Each core says that Redis is gone.
        redis.kill();
        let lost = |server: &Server| server.redis_events("disconnected") > 0;
        server.until("it is noticed", |server| {
            assert_eq!(client.check(&["key", "a"]).allowed, 1);
            lost(server) && decided(server, "local") > 0
        });
        let dropped = server.metric("sluice_log_lines_dropped_total");
        // And the control executor that a policy is bad.
        server.write_policy("nonsense");
        server.until("it is refused", |server| server.metric("sluice_policy_file_refused") == 1);
        assert!(server.metric("sluice_log_lines_dropped_total") > dropped);
        assert_eq!(client.check(&["key", "a"]).allowed, 1);
        drop(client);
        server.signal("TERM");
        assert!(server.wait().success(), "it ends all the same");
    }
}

#[test]
fn an_orderly_end_loses_no_line() {
    for setup in Setup::transports() {
        let mut server = Server::start(&setup.with(CHATTY), AMPLE);
        make_noise(server.unix().parent().unwrap());
        server.signal("TERM");
        assert!(server.wait().success());
        let log = server.log();
        assert!(log.lines().last().is_some_and(|line| line.ends_with(" left")), "{log}");
    }
}
