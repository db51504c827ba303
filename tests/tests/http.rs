//! The HTTP face against the contract: checks as JSON, forward-auth, headers, the token, and hostile clients; with the counts in
//! this process and in Redis, on both transports.
#![allow(missing_docs)]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on must stop, with the reason")]

use std::fs;

use serde_json::{Value, json};
use sluice_e2e::{
    Server, Setup,
    http::{Answer, Http, request},
    redis_server::Redis,
    until,
};

const POLICY: &str = r#"
[[rule]]
name = "login-per-key"
match = { path = "/v1/login" }
per = ["key"]
limit = { capacity = 10, refill = 10, period = "1h" }
[[rule]]
name = "per-ip"
match = { path = "/ip*", ip = "*" }
per = ["ip"]
limit = { capacity = 2, refill = 1, period = "1h" }
[[rule]]
name = "by-header"
match = { path = "/h" }
per = ["api", "session", "q"]
limit = { capacity = 1, refill = 1, period = "1h" }
[[rule]]
name = "banned"
match = { path = "/banned" }
deny = true
[[rule]]
name = "watched"
match = { path = "/watched" }
limit = { capacity = 1, refill = 1, period = "1h" }
mode = "shadow"
[[rule]]
name = "free"
match = { path = "/free" }
exempt = true
"#;

/// Runs a test on both transports, with the counts in this process and in Redis.
fn everywhere(config: &str, test: impl Fn(&Server)) {
    for setup in Setup::transports() {
        let setup = setup.with(config);
        test(&Server::start(&setup, POLICY));
        let redis = Redis::start(&[]);
        let server = Server::start(&setup.with_redis(&[redis.url()], "deadline_ms = 1000"), POLICY);
        until("Redis is there", || server.redis_events("connected") >= 1);
        test(&server);
    }
}

fn login(key: &str, cost: u64) -> String {
    json!({ "attributes": { "path": "/v1/login", "key": key }, "cost": cost }).to_string()
}

fn problem(answer: &Answer, status: u16) -> String {
    assert_eq!(
        (answer.status, answer.header("content-type")),
        (status, Some("application/problem+json")),
        "{answer:?}"
    );
    let body = answer.json();
    assert_eq!(body["status"], status);
    body["detail"].as_str().unwrap().to_owned()
}

#[test]
fn one_check_has_the_status_of_its_verdict() {
    everywhere("", |server| {
        let mut http = Http::connect(server.http);
        let allowed = http.check(&login("a", 8));
        assert_eq!((allowed.status, allowed.header("content-type")), (200, Some("application/json")));
        let body = allowed.json();
        assert_eq!((&body["verdict"], &body["limit"], &body["remaining"]), (&json!("allow"), &json!(10), &json!(2)));
        assert_eq!((&body["allowed"], &body["rule"]), (&json!(true), &json!("login-per-key")));
        assert_eq!(allowed.header("ratelimit-policy"), Some("\"login-per-key\";q=10;w=3600"));
        assert!(allowed.header("ratelimit").unwrap().starts_with("\"login-per-key\";r=2;t=28"), "{allowed:?}");
        assert_eq!(allowed.header("retry-after"), None);

        let denied = http.check(&login("a", 8));
        assert_eq!(denied.status, 429);
        let body = denied.json();
        assert_eq!(
            (&body["verdict"], &body["allowed"], &body["remaining"]),
            (&json!("deny"), &json!(false), &json!(2))
        );
        let wait_s = body["retry_after_ms"].as_u64().unwrap().div_ceil(1000);
        assert_eq!(denied.header("retry-after"), Some(wait_s.to_string().as_str()));
        assert_eq!(denied.header("ratelimit"), Some(format!("\"login-per-key\";r=2;t={wait_s}").as_str()));

        let never = http.check(&login("b", 11));
        assert_eq!((never.status, never.header("retry-after")), (429, Some("86400")));
        assert_eq!(never.json()["retry_after_ms"], Value::Null);
        let looked = http.check(&login("b", 0));
        assert_eq!((looked.status, &looked.json()["remaining"]), (200, &json!(10)));
    });
}

#[test]
fn what_nothing_limits_has_no_headers() {
    everywhere("", |server| {
        let mut http = Http::connect(server.http);
        for (path, rule) in [("/free", json!("free")), ("/none", Value::Null), ("/watched", Value::Null)] {
            for _ in 0..3 {
                let answer = http.check(&json!({ "attributes": { "path": path } }).to_string());
                assert_eq!((answer.status, answer.header("ratelimit")), (200, None), "{answer:?}");
                assert_eq!((&answer.json()["limit"], &answer.json()["rule"]), (&Value::Null, &rule));
            }
        }
        let banned = http.check(r#"{"attributes":{"path":"/banned"}}"#);
        assert_eq!((banned.status, banned.header("retry-after")), (429, Some("86400")));
    });
}

#[test]
fn several_checks_are_decided_each_for_itself_or_together() {
    everywhere("", |server| {
        let mut http = Http::connect(server.http);
        let ask = |http: &mut Http, together: bool, costs: [u64; 3]| {
            let check = |(key, cost)| json!({ "attributes": { "path": "/v1/login", "key": key }, "cost": cost });
            let checks: Vec<_> = ["x", "y", "x"].into_iter().zip(costs).map(check).collect();
            let answer = http.check(&json!({ "checks": checks, "together": together }).to_string());
            assert_eq!(answer.status, 200, "{answer:?}");
            let body = answer.json();
            let results: Vec<_> =
                body["results"].as_array().unwrap().iter().map(|one| one["verdict"].clone()).collect();
            (body["allowed"].clone(), results)
        };
        let left = |http: &mut Http, key: &str| http.check(&login(key, 0)).json()["remaining"].clone();
        let (allow, deny) = (json!("allow"), json!("deny"));
        assert_eq!(ask(&mut http, false, [6, 11, 4]), (json!(false), vec![allow.clone(), deny.clone(), allow.clone()]));
        assert_eq!([left(&mut http, "x"), left(&mut http, "y")], [json!(0), json!(10)]);
        // Together, where one is denied nothing is taken, whatever the others were told.
        let mut other = Http::connect(server.http);
        let (allowed, results) = ask(&mut other, true, [0, 7, 1]);
        assert_eq!((allowed, &results[2]), (json!(false), &deny));
        // What was taken from the other bucket is on its way back.
        until("it is back", || left(&mut http, "y") == json!(10));
        assert_eq!(ask(&mut http, true, [0, 7, 0]), (json!(true), vec![allow.clone(), allow.clone(), allow.clone()]));
        assert_eq!(left(&mut http, "y"), json!(3));
    });
}

#[test]
fn what_cannot_be_meant_is_said_and_the_connection_goes_on() {
    everywhere("", |server| {
        let mut http = Http::connect(server.http);
        let detail = |http: &mut Http, body: &str| problem(&http.check(body), 400);
        assert!(detail(&mut http, "{").contains("EOF while parsing"), "JSON");
        assert_eq!(detail(&mut http, "{}"), "`attributes` or `checks` is missing");
        let upper = detail(&mut http, r#"{"attributes":{"Path":"/a"}}"#);
        assert_eq!(upper, "attribute name 'Path' must be 1 to 128 of a-z 0-9 _ - . (names are lower case)");
        let twice = r#"{"checks":[{"attributes":{"path":"/a"}},{"attributes":{"path":"/a","path":"/b"}}]}"#;
        assert_eq!(detail(&mut http, twice), "checks[1]: an attribute was given twice");
        let long = "x".repeat(70_000);
        let answer = http.check(&login(&long, 1));
        assert!(problem(&answer, 413).contains("65536 bytes (setting http.body_bytes_max)"), "{answer:?}");
        let mut http = Http::connect(server.http);
        assert!(problem(&http.ask("GET", "/v1/check", &[], ""), 405).starts_with("ask by POST"));
        assert!(problem(&http.ask("GET", "/v1/chek", &[], ""), 404).contains("POST /v1/check"));
        assert!(problem(&http.ask("GET", "/v1/forward-auth", &[], ""), 400).contains("x-forwarded-uri is missing"));
        assert_eq!(http.check(&login("fine", 1)).status, 200);
    });
}

#[test]
fn pipelined_requests_are_answered_in_their_order() {
    everywhere("", |server| {
        let mut http = Http::connect(server.http);
        let all: String =
            (0..200).map(|n| request("POST", "/v1/check", &[], &login(&format!("k{}", n % 3), n % 2))).collect();
        http.send(all.as_bytes());
        let mut left = [10_i64; 3];
        for n in 0..200_usize {
            let answer = http.answer().expect("an answer for each");
            let (bucket, cost) = (&mut left[n % 3], i64::from(n % 2 == 1));
            let passes = *bucket >= cost;
            *bucket -= if passes { cost } else { 0 };
            assert_eq!(answer.status, if passes { 200 } else { 429 }, "{n}: {answer:?}");
            assert_eq!(answer.json()["remaining"], *bucket, "{n}: {answer:?}");
        }
    });
}

const SOURCES: &str = r#"
[http]
headers = "x"
trusted_proxies = ["127.0.0.0/8", "10.0.0.0/8"]
forward_auth = { headers = { api = "X-API-Key" }, cookies = { session = "sid" }, query = { q = "q" } }
"#;

fn forward(http: &mut Http, uri: &str, headers: &[(&str, &str)]) -> Answer {
    http.ask(
        "GET",
        "/v1/forward-auth",
        &[&[("x-forwarded-uri", uri), ("x-forwarded-method", "POST")], headers].concat(),
        "",
    )
}

#[test]
fn forward_auth_takes_attributes_from_the_original_request() {
    everywhere(SOURCES, |server| {
        let mut http = Http::connect(server.http);
        let of = |http: &mut Http, client: &str| forward(http, "/ip/x", &[("x-forwarded-for", client)]);
        // Forged: what stands before the last address that no proxy has is the client's own.
        for client in ["192.0.2.1", "198.51.100.7, 192.0.2.1", "192.0.2.1, 10.0.0.9"] {
            let expected = if client.contains("10.0.0.9") { 429 } else { 200 };
            assert_eq!(of(&mut http, client).status, expected, "{client}");
        }
        let denied = of(&mut http, "192.0.2.1");
        assert_eq!((denied.status, denied.header("x-sluice-status")), (429, Some("429")), "{denied:?}");
        assert_eq!(
            (denied.header("x-ratelimit-limit"), denied.header("x-ratelimit-remaining")),
            (Some("2"), Some("0"))
        );
        assert!(denied.header("retry-after").unwrap().parse::<u64>().unwrap() > 1800);
        let body = denied.json();
        assert_eq!(body["type"], "https://iana.org/assignments/http-problem-types#quota-exceeded");
        assert_eq!((&body["violated-policies"], &body["status"]), (&json!(["per-ip"]), &json!(429)));
        assert_eq!(of(&mut http, "192.0.2.2").status, 200);

        // One bucket for each combination of header, cookie and parameter; all three must be there.
        let ask = |http: &mut Http, api, cookie, query| {
            forward(http, &format!("/h?a=1&{query}"), &[("x-api-key", api), ("cookie", cookie)]).status
        };
        assert_eq!(ask(&mut http, "k", "x=1; sid=s", "q=1"), 200);
        assert_eq!(ask(&mut http, "k", "sid=s", "q=%31"), 429);
        assert_eq!(ask(&mut http, "k", "sid=t", "q=1"), 200);
        assert_eq!(ask(&mut http, "k", "other=t", "q=1"), 200);
        assert_eq!(ask(&mut http, "k", "other=t", "q=1"), 200);
    });
}

#[test]
fn forward_auth_knows_a_path_in_every_spelling() {
    everywhere("", |server| {
        let mut http = Http::connect(server.http);
        for uri in ["/banned", "//banned", "/x/../banned", "/%62anned", "/./banned?x=1"] {
            assert_eq!(forward(&mut http, uri, &[]).status, 429, "{uri}");
            // Envoy's way: the path follows.
            assert_eq!(http.ask("PUT", &format!("/v1/forward-auth{uri}"), &[], "").status, 429, "{uri}");
        }
        assert_eq!(forward(&mut http, "/banned/not", &[]).status, 200);
        assert_eq!(http.ask("GET", "/v1/forward-auth/", &[], "").status, 200);
        assert_eq!(http.ask("GET", "/v1/forward-authority", &[], "").status, 404);
    });
}

#[test]
fn nginx_gets_a_status_that_it_understands() {
    everywhere("", |server| {
        let mut http = Http::connect(server.http);
        let headers = [("x-forwarded-uri", "/banned")];
        let denied = http.ask("GET", "/v1/forward-auth?deny=403", &headers, "");
        assert_eq!((denied.status, denied.header("x-sluice-status")), (403, Some("429")), "{denied:?}");
        assert_eq!(denied.header("retry-after"), Some("86400"));
        // Only the gateway chooses: under the original's path a client could have written it.
        assert_eq!(http.ask("GET", "/v1/forward-auth/banned?deny=403", &[], "").status, 429);
        assert!(problem(&http.ask("GET", "/v1/forward-auth?deny=200", &headers, ""), 400).starts_with("deny=200"));
    });
}

#[test]
fn the_token_is_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("token");
    fs::write(&path, "s3cret\n").unwrap();
    everywhere(&format!("[http]\ntoken_file = {path:?}\n"), |server| {
        let mut http = Http::connect(server.http);
        let ask =
            |http: &mut Http, headers: &[(&str, &str)]| http.ask("POST", "/v1/check", headers, &login("a", 0)).status;
        assert_eq!(ask(&mut http, &[]), 401);
        assert_eq!(ask(&mut http, &[("authorization", "Bearer wrong")]), 401);
        assert_eq!(ask(&mut http, &[("authorization", "bearer s3cret")]), 200);
        assert_eq!(ask(&mut http, &[("x-sluice-token", "s3cret")]), 200);
        // At forward-auth `Authorization` is the client's own.
        assert_eq!(forward(&mut http, "/free", &[("authorization", "Bearer s3cret")]).status, 401);
        assert_eq!(forward(&mut http, "/free", &[("x-sluice-token", "s3cret")]).status, 200);
        assert!(!server.log().contains("s3cret"));
    });
}

#[test]
fn slow_and_idle_clients_are_let_go() {
    for setup in Setup::transports() {
        let setup = setup.with("[http]\nrequest_timeout_ms = 300\nidle_timeout_ms = 1000\n");
        let server = Server::start(&setup, POLICY);
        let (silent, mut head, mut body, mut idle) = (
            Http::connect(server.http),
            Http::connect(server.http),
            Http::connect(server.http),
            Http::connect(server.http),
        );
        head.send(b"POST /v1/check HTTP/1.1\r\nhost:");
        body.send(b"POST /v1/check HTTP/1.1\r\nhost: a\r\ncontent-length: 50\r\n\r\n{");
        assert_eq!(idle.check(&login("a", 1)).status, 200);
        for conn in [silent, head, body, idle] {
            assert_eq!(conn.until_closed(), "");
        }
    }
}

#[test]
fn hostile_bytes_end_their_connection_and_no_other() {
    for setup in Setup::transports() {
        let server = Server::start(&setup, POLICY);
        let mut good = Http::connect(server.http);
        assert_eq!(good.check(&login("a", 1)).status, 200);
        let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
        // SETTINGS with a length that its frames must not have, and a flood of headers that never end.
        let bad_frame = [&preface[..], &[0, 0, 5, 4, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5]].concat();
        let mut endless = [&preface[..], &[0, 0, 0, 4, 0, 0, 0, 0, 0], &[0, 0, 1, 1, 0, 0, 0, 0, 1, 0x82]].concat();
        for _ in 0..20_000 {
            endless.extend_from_slice(&[0, 0, 1, 9, 0, 0, 0, 0, 1, 0x84]);
        }
        // Streams that are opened and reset at once (CVE-2023-44487).
        let mut resets = [&preface[..], &[0, 0, 0, 4, 0, 0, 0, 0, 0]].concat();
        for stream in (1..40_001_u32).step_by(2) {
            let id = stream.to_be_bytes();
            resets.extend_from_slice(&[0, 0, 4, 1, 4, id[0], id[1], id[2], id[3], 0x83, 0x84, 0x86, 0x82]);
            resets.extend_from_slice(&[0, 0, 4, 3, 0, id[0], id[1], id[2], id[3], 0, 0, 0, 8]);
        }
        let garbage: Vec<u8> = (0..100_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        let huge_head = format!("GET /{} HTTP/1.1\r\n\r\n", "x".repeat(200_000)).into_bytes();
        for bytes in [bad_frame, endless, resets, garbage, huge_head, b"\x16\x03\x01\x02\x00\x01".to_vec()] {
            let mut bad = Http::connect(server.http);
            bad.try_send(&bytes);
            let _ = bad.until_closed();
            assert_eq!(good.check(&login("a", 0)).status, 200);
        }
    }
}

#[test]
fn a_server_that_leaves_answers_what_was_asked_and_closes() {
    for setup in Setup::transports() {
        let mut server = Server::start(&setup, POLICY);
        let mut http = Http::connect(server.http);
        assert_eq!(http.check(&login("a", 1)).status, 200);
        server.signal("TERM");
        assert!(server.wait().success());
        assert_eq!(http.until_closed(), "");
    }
}

#[test]
fn answers_are_counted_by_their_status() {
    let server = Server::start(&Setup::new("ring"), POLICY);
    let mut http = Http::connect(server.http);
    for (body, status) in [(login("a", 1), 200), (login("a", 11), 429), ("{}".into(), 400)] {
        assert_eq!(http.check(&body).status, status);
    }
    let (_, metrics) = server.get("/metrics");
    for line in [
        "sluice_http_answers_total{status=\"200\"} 1",
        "sluice_http_answers_total{status=\"429\"} 1",
        "sluice_http_answers_total{status=\"400\"} 1",
    ] {
        assert!(metrics.contains(line), "{line} in {metrics}");
    }
}
