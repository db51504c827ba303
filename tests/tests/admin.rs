//! The admin API against a real PostgreSQL: changes, conflicts, refusals, history and rollback, who may do what, and its commands.
#![allow(missing_docs)]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on must stop, with the reason")]

use serde_json::{Value, json};
use sluice_e2e::{
    Server, Setup,
    admin::{Admin, command, printed},
    postgres::Postgres,
    redis_server::Redis,
    until,
};

const NEW: &[(&str, &str)] = &[("if-none-match", "*")];
const ANY: &[(&str, &str)] = &[("if-match", "*")];

fn body(capacity: u64) -> String {
    json!({ "per": ["key"], "limit": { "capacity": capacity, "refill": 10, "period": "1m" } }).to_string()
}

/// A store with the rules `a` and `b` (version 1 and 2), and the API before it.
fn start() -> (Postgres, Admin) {
    let postgres = Postgres::with_store();
    let admin = Admin::start(&postgres, &[]);
    for name in ["a", "b"] {
        let answer = admin.ask("PUT", &format!("/v1/rules/{name}"), NEW, &body(100));
        assert_eq!(answer.status, 200, "{answer:?}");
    }
    (postgres, admin)
}

#[test]
fn migrating_twice_and_by_several_at_once_makes_one_store_and_leaves_others_alone() {
    let postgres = Postgres::start();
    let url = postgres.make_database("several");
    let all: Vec<_> = std::thread::scope(|scope| {
        let runs: Vec<_> =
            (0..4).map(|_| scope.spawn(|| printed(&command(&["migrate", "--postgres", &url])))).collect();
        runs.into_iter().map(|run| run.join().unwrap()).collect()
    });
    assert_eq!(all.iter().filter(|text| text.contains("applied 0001_policy_store")).count(), 1, "{all:?}");
    assert!(printed(&command(&["migrate", "--postgres", &url])).contains("up to date"));
    let refused = |database: &str| {
        let output = command(&["migrate", "--postgres", database]);
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let foreign = postgres.make_database("other");
    let client = |database: &str, sql: &str| {
        let mut psql = std::process::Command::new("psql");
        assert!(psql.args(["-q", "-d", database, "-c", sql]).status().unwrap().success());
    };
    client(&foreign, "CREATE SCHEMA sluice");
    assert!(refused(&foreign).contains("no migration made"));
    client(&url, "INSERT INTO sluice.migration VALUES (99, 'later', '')");
    assert!(refused(&url).contains("use the newer sluice-admin"));
    client(&url, "DELETE FROM sluice.migration WHERE number = 99; UPDATE sluice.migration SET sha256 = 'x'");
    assert!(refused(&url).contains("another text"));
}

#[test]
fn two_people_cannot_overwrite_each_other() {
    let (_postgres, admin) = start();
    let seen = admin.get("/v1/rules/a");
    assert_eq!((seen.etag().as_str(), &seen.json()["rule"]["limit"]["capacity"]), ("\"1\"", &json!(100)));
    let tag = seen.etag();
    let first = admin.ask("PUT", "/v1/rules/a", &[("if-match", &tag)], &body(10));
    assert_eq!((first.status, first.json()["version"].as_u64()), (200, Some(3)));
    assert_eq!(first.json()["differences"][0]["fields"], json!(["limit.capacity"]));
    let second = admin.ask("PUT", "/v1/rules/a", &[("if-match", &tag)], &body(20));
    assert_eq!((second.status, second.problem().as_str()), (412, "conflict"));
    assert_eq!(admin.ask("PUT", "/v1/rules/a", &[], &body(20)).status, 428);
    assert_eq!(admin.ask("PUT", "/v1/rules/a", NEW, &body(20)).problem(), "conflict");
    assert_eq!(admin.ask("DELETE", "/v1/rules/a", &[("if-match", &tag)], "").status, 412);
    assert_eq!(admin.ask("PUT", "/v1/rules/c", ANY, &body(20)).status, 404);
    // The same again is no change.
    let same = admin.ask("PUT", "/v1/rules/a", ANY, &body(10));
    assert_eq!((same.json()["changed"].as_bool(), same.json()["version"].as_u64()), (Some(false), Some(3)));
}

#[test]
fn changes_under_way_at_once_become_visible_in_their_order() {
    let (postgres, admin) = start();
    // Somebody begins a change, and commits it only after the API was asked for another one.
    let slow = std::thread::scope(|scope| {
        let begun = scope.spawn(|| {
            postgres
                .change("SELECT pg_sleep(1);\nINSERT INTO sluice.rule VALUES ('late', :version, '{\"exempt\": true}')")
        });
        until("the first change is under way", || {
            let sql =
                "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'SELECT pg_sleep(1)%' AND state = 'active'";
            postgres.sql(sql).trim() == "1"
        });
        let answer = admin.ask("PUT", "/v1/rules/a", ANY, &body(5));
        // Whoever is second sees what the first one did.
        assert_eq!((answer.status, answer.json()["version"].as_u64()), (200, Some(4)), "{answer:?}");
        begun.join().unwrap()
    });
    assert_eq!(slow, 3);
    let rows = postgres.sql("SELECT kind, version, name FROM sluice.changes_after(2, (SELECT token::text FROM sluice.change WHERE version = 2)) WHERE kind = 'rule' ORDER BY version");
    assert_eq!(rows, "rule|3|late\nrule|4|a\n");
}

#[test]
fn several_operations_are_one_change_or_none() {
    let (_postgres, admin) = start();
    let change = |operations: Value| json!({ "comment": "both", "operations": operations }).to_string();
    let put = |name: &str, capacity: u64, version: u64| {
        let body: Value = serde_json::from_str(&body(capacity)).unwrap();
        json!({ "op": "put", "rule": name, "body": body, "if_version": version })
    };
    let over = json!({ "op": "put", "override": { "rule": "a", "identity": ["k/1"] }, "body": { "exempt": true }, "if_version": 0 });
    let answer = admin.ask("POST", "/v1/changes", &[], &change(json!([put("a", 7, 1), put("b", 8, 2), over])));
    assert_eq!((answer.status, answer.json()["version"].as_u64()), (200, Some(3)), "{answer:?}");
    assert_eq!(admin.get("/v1/override?rule=a&identity=k%2F1").json()["override"], json!({ "exempt": true }));
    // One of the two was seen too long ago: neither is done.
    let stale = admin.ask("POST", "/v1/changes", &[], &change(json!([put("a", 1, 3), put("b", 1, 2)])));
    assert_eq!(stale.status, 412);
    assert_eq!(admin.get("/v1/rules/a").json()["rule"]["limit"]["capacity"], 7);
    let unsaid = json!([{ "op": "delete", "rule": "a" }]);
    assert_eq!(admin.ask("POST", "/v1/changes", &[], &change(unsaid.clone())).status, 428);
    let dangling = admin.ask("POST", "/v1/changes", ANY, &change(unsaid));
    assert_eq!((dangling.status, dangling.problem().as_str()), (422, "invalid-policy"));
    assert_eq!(admin.ask("DELETE", "/v1/rules/a?with_overrides=true", ANY, "").status, 200);
    assert_eq!(admin.get("/v1/overrides").json()["overrides"], json!([]));
}

#[test]
fn a_bad_rule_is_refused_with_the_field_and_a_dry_run_changes_nothing() {
    let (postgres, admin) = start();
    let bad = r#"{"per": ["key"], "limit": {"capacity": 0, "refill": 10, "period": "1m"}}"#;
    let answer = admin.ask("PUT", "/v1/rules/a", ANY, bad);
    assert_eq!((answer.status, answer.problem().as_str()), (422, "invalid-policy"));
    let error = &answer.json()["errors"][0];
    assert_eq!((&error["rule"], &error["field"]), (&json!("a"), &json!("limit.capacity")), "{error}");
    let dry = admin.ask_as(Some(&admin.reader), "PUT", "/v1/rules/a?dry_run=true", ANY, &body(1));
    assert_eq!((dry.status, dry.json()["changed"].as_bool()), (200, Some(false)));
    assert_eq!(dry.json()["differences"][0]["after"]["limit"]["capacity"], 1);
    assert_eq!(postgres.sql("SELECT version FROM sluice.policy").trim(), "2");
    // What was forced into the store by hand can be seen, and mended.
    postgres.put_rules(&[("a", bad)]);
    assert!(!admin.get("/v1/rules/a").json()["rule"].is_null());
    assert_eq!(admin.ask("PUT", "/v1/rules/b", ANY, &body(1)).status, 422);
    assert_eq!(admin.ask("PUT", "/v1/rules/a", ANY, &body(50)).status, 200);
    postgres.put_rules(&[("a", "{\"nonsense\": 1}")]);
    assert!(!admin.get("/v1/rules/a").json()["problems"].as_array().unwrap().is_empty());
    assert_eq!(admin.ask("POST", "/v1/rollback", ANY, r#"{"to": 4}"#).status, 200);
    assert_eq!(admin.get("/v1/rules/a").json()["rule"]["limit"]["capacity"], 50);
}

#[test]
fn the_history_tells_who_and_why_and_everything_has_a_way_back() {
    let (_postgres, admin) = start();
    admin.ask("PUT", "/v1/rules/a?comment=attack%20on%20login", ANY, &body(10));
    admin.ask("PUT", "/v1/rules/b", ANY, &body(20));
    let history = admin.get("/v1/changes?limit=3").json();
    let newest = &history["changes"][1];
    assert_eq!(
        (&newest["author"], &newest["comment"], &history["next"]),
        (&json!("alice"), &json!("attack on login"), &json!(2))
    );
    assert_eq!(admin.get("/v1/changes?rule=a").json()["changes"].as_array().unwrap().len(), 2);
    assert_eq!(admin.get("/v1/changes/3").json()["differences"][0]["before"]["limit"]["capacity"], 100);
    assert_eq!(admin.get("/v1/diff?from=2").json()["differences"].as_array().unwrap().len(), 2);
    // One rule, and then everything.
    let one = admin.ask("POST", "/v1/rollback", ANY, r#"{"to": 2, "rule": "a"}"#);
    assert_eq!(one.json()["differences"].as_array().unwrap().len(), 1, "{one:?}");
    assert_eq!(admin.get("/v1/rules/b").json()["rule"]["limit"]["capacity"], 20);
    let tag = admin.get("/v1/rules").etag();
    assert_eq!(admin.ask("POST", "/v1/rollback", &[("if-match", "\"4\"")], r#"{"to": 2}"#).status, 412);
    assert_eq!(admin.ask("POST", "/v1/rollback", &[("if-match", &tag)], r#"{"to": 2}"#).status, 200);
    assert_eq!(
        admin.get("/v1/policy.toml").text.lines().skip(1).collect::<Vec<_>>(),
        admin.get("/v1/policy.toml?version=2").text.lines().skip(1).collect::<Vec<_>>()
    );
    assert_eq!(admin.get("/v1/changes/6").json()["rolled_back_to"], 2);
    for missing in ["/v1/changes/99", "/v1/changes/x", "/v1/diff?from=99", "/v1/rules/none", "/v1/nothing"] {
        assert_eq!(admin.get(missing).problem(), "not-found", "{missing}");
    }
}

#[test]
fn nobody_without_a_token_sees_anything_and_a_reader_changes_nothing() {
    let (postgres, admin) = start();
    let description = admin.ask_as(None, "GET", "/openapi.json", &[], "").json();
    let paths = description["paths"].as_object().unwrap();
    assert!(paths.len() >= 11, "{paths:?}");
    for (path, methods) in paths {
        for method in methods.as_object().unwrap().keys().filter(|name| *name != "parameters") {
            let path = path.replace("{name}", "a").replace("{version}", "1");
            for token in [None, Some("sluice_wrong"), Some("")] {
                let answer = admin.ask_as(token, &method.to_uppercase(), &path, &[], "{}");
                assert_eq!((answer.status, answer.problem().as_str()), (401, "no-token"), "{method} {path}");
            }
        }
    }
    let reader = Some(admin.reader.as_str());
    assert_eq!(admin.ask_as(reader, "GET", "/v1/rules", &[], "").status, 200);
    for (method, path, body) in [
        ("PUT", "/v1/rules/a", body(1)),
        ("DELETE", "/v1/rules/a", String::new()),
        ("PUT", "/v1/override?rule=a&identity=x", "{\"exempt\": true}".into()),
        ("DELETE", "/v1/override?rule=a&identity=x", String::new()),
        ("POST", "/v1/changes", "{\"operations\": []}".into()),
        ("POST", "/v1/rollback", "{\"to\": 1}".into()),
        ("PUT", "/v1/policy.toml", String::new()),
        ("PATCH", "/v1/policy.toml", String::new()),
    ] {
        assert_eq!(admin.ask_as(reader, method, path, ANY, &body).problem(), "read-only", "{method} {path}");
    }
    // Only a hash of a token is in the store, and a token that was revoked opens nothing.
    assert!(!postgres.sql("SELECT * FROM sluice.api_token").contains(&admin.writer));
    printed(&command(&["token", "revoke", "alice", "--postgres", &postgres.url()]));
    assert_eq!(admin.get("/v1/rules").status, 401);
    let listed = printed(&command(&["token", "list", "--json", "--postgres", &postgres.url()]));
    let listed: Value = serde_json::from_str(&listed).unwrap();
    assert_eq!((&listed[0]["name"], listed[0]["revoked_at"].is_string()), (&json!("alice"), true));
}

#[test]
fn roles_may_do_what_they_are_for_and_no_more() {
    let (postgres, _admin) = start();
    let try_as = |role: &str, sql: &str| {
        let text = format!(
            "DO $do$ BEGIN SET LOCAL ROLE {role}; {sql}; RAISE EXCEPTION 'allowed'; \
             EXCEPTION WHEN insufficient_privilege THEN RAISE EXCEPTION 'denied' USING ERRCODE = 'P0002'; END $do$"
        );
        let wrapped =
            format!("SET client_min_messages = error;\n\\set ON_ERROR_STOP 0\n{text};\n\\echo :LAST_ERROR_MESSAGE");
        postgres.sql(&wrapped).trim().to_owned()
    };
    for role in ["gateway", "admin"] {
        assert_eq!(try_as(role, "PERFORM * FROM sluice.changes_after(0, '')"), "allowed", "{role}");
        for sql in [
            "UPDATE sluice.rule SET body = NULL",
            "DELETE FROM sluice.rule",
            "UPDATE sluice.change SET author = 'x'",
            "DELETE FROM sluice.override",
            "INSERT INTO sluice.api_token (name, sha256, can_write) VALUES ('x', decode(repeat('00', 32), 'hex'), true)",
            "UPDATE sluice.gateway SET problem = 'x'",
            "DROP TABLE sluice.rule",
        ] {
            assert_eq!(try_as(role, sql), "denied", "{role}: {sql}");
        }
    }
    for sql in [
        "PERFORM sluice.begin_change('x', '', NULL)",
        "INSERT INTO sluice.rule VALUES ('x', 1, NULL)",
        "PERFORM * FROM sluice.api_token",
        "PERFORM * FROM sluice.gateway",
        "PERFORM * FROM sluice.shadow_identity",
    ] {
        assert_eq!(try_as("gateway", sql), "denied", "{sql}");
    }
    assert_eq!(try_as("gateway", "PERFORM sluice.report_gateway('g', 1, 's', NULL, 1.0)"), "allowed");
}

#[test]
fn hostile_requests_get_a_problem_and_nothing_else_happens() {
    let postgres = Postgres::with_store();
    let admin = Admin::start(&postgres, &["--body-bytes-max", "4096"]);
    assert_eq!(admin.ask("PUT", "/v1/rules/a", NEW, &body(1)).status, 200);
    let long = "x".repeat(5_000);
    let deep = format!("{}1{}", "{\"limit\":".repeat(400), "}".repeat(400));
    for (method, path, headers, body, status) in [
        ("PUT", "/v1/rules/a", ANY, "{", 400),
        ("PUT", "/v1/rules/a", ANY, "[]", 400),
        ("PUT", "/v1/rules/a", ANY, deep.as_str(), 400),
        ("PUT", "/v1/rules/a", ANY, long.as_str(), 413),
        ("PUT", "/v1/rules/a", ANY, r#"{"exempt": null}"#, 422),
        ("PUT", "/v1/rules/a", ANY, r#"{"match": {"path": "\u0000"}, "exempt": true}"#, 422),
        ("PUT", "/v1/rules/a%00b", NEW, r#"{"exempt": true}"#, 400),
        ("PUT", "/v1/rules/%FF", NEW, r#"{"exempt": true}"#, 400),
        ("PUT", "/v1/rules/a?dryrun=true", ANY, "{}", 400),
        ("PUT", "/v1/rules/a?comment=%00", ANY, "{}", 400),
        ("PUT", "/v1/rules/a", &[("if-match", "1")], "{}", 400),
        ("GET", "/v1/rules?limit=0", &[], "", 400),
        ("GET", "/v1/rules?limit=99999999999", &[], "", 400),
        ("GET", "/v1/overrides?after=%5B", &[], "", 400),
        ("PUT", "/v1/override?rule=a&identity=%00", NEW, r#"{"exempt": true}"#, 400),
        ("GET", "/v1/changes?before=18446744073709551615", &[], "", 200),
        ("GET", "/v1/shadow?from=yesterday", &[], "", 400),
        ("GET", "/v1/shadow?rule=%00", &[], "", 400),
        ("POST", "/v1/changes", ANY, r#"{"operations": [{"op": "put", "rule": "a"}]}"#, 400),
        ("POST", "/v1/rollback", ANY, r#"{"to": 18446744073709551615}"#, 404),
        ("PATCH", "/v1/policy.toml", &[], "[[rule]]\nname = 1", 422),
        ("DELETE", "/v1/policy.toml", &[], "", 405),
        // The last rule: gateways would refuse a policy without any.
        ("POST", "/v1/changes", ANY, r#"{"operations": [{"op": "delete", "rule": "b"}]}"#, 404),
    ] {
        let answer = admin.ask(method, path, headers, body);
        assert_eq!(answer.status, status, "{method} {path} {body:.60}: {answer:?}");
        assert!(status == 200 || !answer.problem().is_empty());
    }
    assert!(admin.raw(b"nonsense\r\n\r\n").starts_with("HTTP/1.1 400"));
    assert_eq!(postgres.sql("SELECT version FROM sluice.policy").trim(), "1");
}

#[test]
fn while_the_store_is_away_the_api_says_so_in_time_and_comes_back() {
    let postgres = Postgres::with_store();
    let admin = Admin::start(&postgres, &["--connect-timeout-ms", "500", "--request-timeout-ms", "3000"]);
    assert_eq!(admin.ask("PUT", "/v1/rules/a", NEW, &body(1)).status, 200);
    assert_eq!(admin.ask_as(None, "GET", "/readyz", &[], "").status, 200);
    postgres.freeze();
    assert_eq!(admin.get("/v1/rules").status, 503);
    assert_eq!(admin.ask_as(None, "GET", "/readyz", &[], "").status, 503);
    postgres.thaw();
    until("it answers again", || admin.get("/v1/rules").status == 200);
    postgres.kill();
    assert_eq!(admin.get("/v1/rules").problem(), "store-away");
    assert_eq!(admin.ask_as(None, "GET", "/livez", &[], "").status, 200);
    postgres.restart();
    until("it answers again", || admin.get("/v1/rules").status == 200);
}

#[test]
fn a_policy_file_goes_in_and_comes_out_the_same() {
    let (_postgres, admin) = start();
    let file = include_str!("../../policy.toml");
    let answer = admin.ask("PUT", "/v1/policy.toml?comment=import", ANY, file);
    assert_eq!(answer.status, 200, "{answer:?}");
    let out = admin.get("/v1/policy.toml");
    let again = admin.ask("PUT", "/v1/policy.toml", &[("if-match", &out.etag())], &out.text);
    assert_eq!(again.json()["changed"], false, "{again:?}");
    let kinds: Vec<_> =
        answer.json()["differences"].as_array().unwrap().iter().map(|one| one["kind"].clone()).collect();
    assert!(kinds.contains(&json!("added")) && kinds.contains(&json!("removed")), "a and b are not in the file");
}

/// The story of the README: somebody tightens a rule under attack, and it is live on every gateway.
#[test]
fn a_rule_is_tightened_by_a_command_and_live_on_every_gateway() {
    let (postgres, redis) = (Postgres::with_store(), Redis::start(&[]));
    let admin = Admin::start(&postgres, &["--redis", &redis.url()]);
    let file = tempfile_with(
        "[[rule]]\nname = \"login-per-key\"\nmatch = { path = \"/v1/login\" }\nper = [\"key\"]\nlimit = { capacity = 100, refill = 100, period = \"1m\" }\n",
    );
    let path = file.path().to_str().unwrap();
    assert!(admin.printed(&["rules", "apply", path, "--comment", "first rules"]).contains("version 1 is made"));
    let config = format!("[postgres]\nurl = {:?}\npoll_ms = 3600000\nnotify = false\n", postgres.gateway_url());
    let setup = Setup::new("ring").with(&config).with_redis(&[redis.url()], "");
    let servers: Vec<Server> = (0..3).map(|_| Server::start_with_store(&setup)).collect();
    for server in &servers {
        server.until("it listens", |server| server.status()["policy"]["store"]["pushes"]["redis"]["listening"] == true);
    }
    let limit = |server: &Server| server.connect().check(&["COST", "0", "path", "/v1/login", "key", "k"]).limit;
    assert!(servers.iter().all(|server| limit(server) == 100));
    let said = admin.printed(&[
        "rules",
        "set",
        "login-per-key",
        "limit.capacity=10",
        "limit.refill=10",
        "--wait",
        "--comment",
        "attack",
    ]);
    assert!(said.contains("limit.capacity") && said.contains("live on 3 of 3 gateways"), "{said}");
    assert!(servers.iter().all(|server| limit(server) == 10));
    assert!(admin.printed(&["gateways"]).contains("3 of 3 live gateways have version 2"));
    assert!(admin.printed(&["rules", "list"]).contains("10 per 1m"));
    assert!(admin.printed(&["rules", "get", "login-per-key"]).contains("\"capacity\": 10"));
    assert!(admin.printed(&["history"]).contains("attack"));
    assert!(admin.printed(&["diff", "1"]).contains("limit.refill"));
    assert!(admin.printed(&["export"]).contains("[[rule]]"));
    assert!(admin.printed(&["shadow"]).contains("no shadow rule"));
    assert!(admin.printed(&["rollback", "1", "--dry-run"]).contains("dry run"));
    assert!(admin.printed(&["rollback", "1", "--wait"]).contains("live on 3 of 3"));
    assert!(servers.iter().all(|server| limit(server) == 100));
    let json: Value = serde_json::from_str(&admin.printed(&["gateways", "--json"])).unwrap();
    assert_eq!((&json["current"], &json["version"]), (&json!(3), &json!(3)));
    let refused = admin.command(&["rules", "set", "login-per-key", "limit.capacity=0"]);
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(!refused.status.success() && said.contains("limit.capacity"), "{said}");
}

fn tempfile_with(text: &str) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), text).unwrap();
    file
}
