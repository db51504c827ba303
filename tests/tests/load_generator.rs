//! `sluice-load` against a real server: its figures are those of the run, and it fails where more passed than may.
#![allow(missing_docs)]
#![allow(clippy::disallowed_methods, reason = "tests wait for real processes")]

use std::process::{Command, Output};

use sluice_e2e::{Server, Setup, load_generator};

const REQUESTS: u64 = 5000;
/// Of one identity; the next token takes longer than the test.
const CAPACITY: u64 = 1000;
const POLICY: &str = r#"
[[rule]]
name = "one"
match = { path = "/v1/login", method = "POST" }
per = ["key"]
limit = { capacity = 1000, refill = 1, period = "1d" }
"#;

/// All requests of one identity, which is new to the server.
fn load(server: &Server, identity_prefix: &str, max_allowed: u64) -> Output {
    Command::new(load_generator())
        .args(["--target", &server.resp.to_string(), "--requests", &REQUESTS.to_string()])
        .args(["--identities", "1", "--identity-prefix", identity_prefix, "--expect-rule", "one"])
        .args(["--max-allowed", &max_allowed.to_string(), "--json", "--quiet"])
        .output()
        .expect("running the load generator")
}

#[test]
fn the_load_generator_counts_what_the_server_decides_and_fails_above_the_limit() {
    for setup in Setup::transports() {
        let server = Server::start(&setup, POLICY);
        for (round, (prefix, max_allowed)) in [("a_", CAPACITY), ("b_", CAPACITY - 1)].into_iter().enumerate() {
            let output = load(&server, prefix, max_allowed);
            let complaint = String::from_utf8_lossy(&output.stderr);
            let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
            let figure = |name: &str| report[name].as_u64().unwrap_or_else(|| panic!("{name}: {report:#}"));
            assert_eq!(figure("checks"), REQUESTS);
            assert_eq!((figure("allowed"), figure("denied")), (CAPACITY, REQUESTS - CAPACITY));
            assert_eq!((figure("unavailable"), figure("errors")), (0, 0));
            assert_eq!(figure("requests"), REQUESTS + figure("probes"));
            assert_eq!(
                server.metric("sluice_checks_total"),
                REQUESTS * (round as u64 + 1),
                "the server counts the same"
            );
            if max_allowed < CAPACITY {
                let expected = format!("expected at most {max_allowed} allowed in the whole run, came {CAPACITY}");
                assert_eq!((output.status.code(), report["failure"].as_str()), (Some(1), Some(&*expected)));
                assert_eq!(complaint.trim(), format!("sluice-load: {expected}"));
            } else {
                assert!(report["failure"].is_null(), "{report:#}");
                assert_eq!((output.status.code(), &*complaint), (Some(0), ""));
            }
        }
    }
}
