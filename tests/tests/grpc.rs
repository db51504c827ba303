//! Envoy's rate limit service, asked by a published client (tonic) with Envoy's own message definitions (envoy-types); with the
//! counts in this process and in Redis, on both transports.
#![allow(missing_docs)]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on must stop, with the reason")]

use std::time::Duration;

use envoy_types::pb::{
    envoy::{
        extensions::common::ratelimit::v3::{
            RateLimitDescriptor,
            rate_limit_descriptor::{Entry, RateLimitOverride},
        },
        service::ratelimit::v3::{
            RateLimitRequest, RateLimitResponse, rate_limit_response::Code,
            rate_limit_service_client::RateLimitServiceClient,
        },
        r#type::v3::RateLimitUnit,
    },
    google::protobuf::UInt64Value,
};
use sluice_e2e::{Server, Setup, redis_server::Redis, until};
use tonic::{Code as Grpc, Request, Status, transport::Channel};

const POLICY: &str = r#"
[[rule]]
name = "per-key"
match = { domain = "shop", path = "*" }
per = ["path", "key"]
limit = { capacity = 10, refill = 10, period = "1m" }
[[rule]]
name = "user"
match = { domain = "shop", user = "*" }
per = ["user"]
limit = { capacity = 3, refill = 3, period = "1h" }
[[rule]]
name = "watched"
match = { domain = "shop", watched = "*" }
limit = { capacity = 1, refill = 1, period = "1h" }
mode = "shadow"
[[rule]]
name = "free"
match = { domain = "shop", free = "*" }
exempt = true
[[rule]]
name = "exactly"
match = { domain = "exact", a = "1" }
match_all = true
limit = { capacity = 1, refill = 1, period = "1d" }
[[rule]]
name = "second-of-two"
match = { domain = "twice", "k.2" = "y" }
deny = true
[[rule]]
name = "mapped"
match = { domain = "mapped", x_request__id = "1" }
deny = true
"#;

struct Client {
    client: RateLimitServiceClient<Channel>,
    runtime: tokio::runtime::Runtime,
}

impl Client {
    fn connect(server: &Server) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let address = format!("http://{}", server.grpc);
        let client = runtime.block_on(RateLimitServiceClient::connect(address)).unwrap();
        Self { client, runtime }
    }

    fn ask(&mut self, request: impl tonic::IntoRequest<RateLimitRequest>) -> Result<RateLimitResponse, Status> {
        self.runtime.block_on(self.client.should_rate_limit(request)).map(tonic::Response::into_inner)
    }

    /// The overall code, and of each descriptor its code and what remains.
    fn codes(&mut self, descriptors: Vec<RateLimitDescriptor>) -> (Code, Vec<(Code, u32)>) {
        let response = self.ask(request("shop", descriptors)).unwrap();
        let statuses = response.statuses.iter().map(|status| (status.code(), status.limit_remaining)).collect();
        (response.overall_code(), statuses)
    }
}

fn request(domain: &str, descriptors: Vec<RateLimitDescriptor>) -> RateLimitRequest {
    RateLimitRequest { domain: domain.into(), descriptors, hits_addend: 0 }
}

fn descriptor(entries: &[(&str, &str)]) -> RateLimitDescriptor {
    let entry = |&(key, value): &(&str, &str)| Entry { key: key.into(), value: value.into() };
    RateLimitDescriptor { entries: entries.iter().map(entry).collect(), ..RateLimitDescriptor::default() }
}

fn with_hits(mut descriptor: RateLimitDescriptor, hits: u64) -> RateLimitDescriptor {
    descriptor.hits_addend = Some(UInt64Value { value: hits });
    descriptor
}

/// Runs a test on both transports, with the counts in this process and in Redis.
fn everywhere(config: &str, test: impl Fn(&Server, &mut Client)) {
    for setup in Setup::transports() {
        let setup = setup.with(config);
        let server = Server::start(&setup, POLICY);
        test(&server, &mut Client::connect(&server));
        let redis = Redis::start(&[]);
        let server = Server::start(&setup.with_redis(&[redis.url()], "deadline_ms = 1000"), POLICY);
        until("Redis is there", || server.redis_events("connected") >= 1);
        test(&server, &mut Client::connect(&server));
    }
}

#[test]
fn each_descriptor_has_its_status_in_its_place() {
    everywhere("", |_, client| {
        let login = || descriptor(&[("path", "/login"), ("key", "a")]);
        let response = client.ask(request("shop", vec![with_hits(login(), 4), descriptor(&[("none", "x")])])).unwrap();
        assert_eq!((response.overall_code(), response.statuses.len()), (Code::Ok, 2));
        let first = &response.statuses[0];
        assert_eq!((first.code(), first.limit_remaining), (Code::Ok, 6));
        let limit = first.current_limit.as_ref().unwrap();
        assert_eq!((limit.requests_per_unit, limit.unit, &*limit.name), (10, RateLimitUnit::Minute as i32, "per-key"));
        let reset = first.duration_until_reset.as_ref().unwrap();
        assert!((22..=24).contains(&reset.seconds), "{reset:?}");
        let second = &response.statuses[1];
        assert_eq!((second.code(), &second.current_limit, second.limit_remaining), (Code::Ok, &None, 0));
        assert!(response.response_headers_to_add.is_empty());

        // Over: until when this cost fits.
        let response = client.ask(request("shop", vec![with_hits(login(), 8)])).unwrap();
        assert_eq!(response.overall_code(), Code::OverLimit);
        let status = &response.statuses[0];
        assert_eq!((status.code(), status.limit_remaining), (Code::OverLimit, 6));
        let reset = status.duration_until_reset.as_ref().unwrap();
        assert!((10..=12).contains(&reset.seconds), "{reset:?}");

        // Exempt is unlimited; shadow never says no; the same twice is counted twice.
        let free = || descriptor(&[("free", "x")]);
        let watched = || descriptor(&[("watched", "x")]);
        assert_eq!(client.codes(vec![free()]), (Code::Ok, vec![(Code::Ok, u32::MAX)]));
        assert_eq!(client.codes(vec![watched(), watched(), watched()]).0, Code::Ok);
        let user = || descriptor(&[("user", "twice")]);
        assert_eq!(client.codes(vec![user(), user()]), (Code::Ok, vec![(Code::Ok, 2), (Code::Ok, 1)]));
    });
}

#[test]
fn where_one_descriptor_is_over_the_others_take_nothing() {
    everywhere("", |_, client| {
        let (user, path) = (descriptor(&[("user", "u")]), descriptor(&[("path", "/x"), ("key", "u")]));
        assert_eq!(client.codes(vec![with_hits(path.clone(), 9)]).0, Code::Ok);
        let (overall, statuses) = client.codes(vec![user.clone(), with_hits(path.clone(), 2), user.clone()]);
        assert_eq!(
            (overall, statuses[0].0, statuses[1].0, statuses[2].0),
            (Code::OverLimit, Code::Ok, Code::OverLimit, Code::Ok)
        );
        let looks = || with_hits(user.clone(), 0);
        until("it is given back", || client.codes(vec![looks()]).1[0].1 == 3);
        assert_eq!(client.codes(vec![with_hits(user, 3), with_hits(path, 1)]).0, Code::Ok);
    });
}

#[test]
fn all_are_counted_where_the_setting_says_so() {
    everywhere("[grpc]\ncount_all = true\n", |_, client| {
        let (user, path) = (descriptor(&[("user", "u")]), descriptor(&[("path", "/x"), ("key", "u")]));
        assert_eq!(client.codes(vec![user.clone(), with_hits(path, 11)]).0, Code::OverLimit);
        assert_eq!(client.codes(vec![with_hits(user, 0)]).1, [(Code::Ok, 2)]);
    });
}

#[test]
fn hits_are_of_the_request_or_of_the_descriptor() {
    everywhere("", |_, client| {
        let path = |key: &str| descriptor(&[("path", "/hits"), ("key", key)]);
        let all = vec![path("a"), with_hits(path("b"), 2), with_hits(path("c"), 0)];
        let response = client.ask(RateLimitRequest { hits_addend: 5, ..request("shop", all) }).unwrap();
        let left: Vec<_> = response.statuses.iter().map(|status| status.limit_remaining).collect();
        assert_eq!(left, [5, 8, 10]);
        assert_eq!(client.codes(vec![path("a")]).1, [(Code::Ok, 4)]);
    });
}

#[test]
fn giving_back_is_a_setting() {
    let refund = |hits| RateLimitDescriptor { is_negative_hits: true, ..with_hits(descriptor(&[("user", "r")]), hits) };
    everywhere("", |_, client| {
        let refused = client.ask(request("shop", vec![refund(1)])).unwrap_err();
        assert_eq!(refused.code(), Grpc::InvalidArgument);
        assert_eq!(refused.message(), "descriptor 0: giving back is not allowed (setting grpc.allow_refunds)");
    });
    everywhere("[grpc]\nallow_refunds = true\n", |_, client| {
        let user = || descriptor(&[("user", "r")]);
        assert_eq!(client.codes(vec![with_hits(user(), 3)]).0, Code::Ok);
        assert_eq!(client.codes(vec![user()]).0, Code::OverLimit);
        assert_eq!(client.codes(vec![refund(2)]).0, Code::Ok);
        until("it is given back", || client.codes(vec![with_hits(user(), 0)]).1 == [(Code::Ok, 2)]);
        // Never more than fits.
        client.codes(vec![refund(100)]);
        until("it is full", || client.codes(vec![with_hits(user(), 0)]).1 == [(Code::Ok, 3)]);
    });
}

#[test]
fn a_descriptor_may_bring_its_limit() {
    everywhere("", |_, client| {
        let limited = |requests_per_unit, unit: RateLimitUnit| {
            let limit = Some(RateLimitOverride { requests_per_unit, unit: unit as i32 });
            RateLimitDescriptor { limit, ..descriptor(&[("path", "/own"), ("key", "a")]) }
        };
        let response = client.ask(request("shop", vec![with_hits(limited(2, RateLimitUnit::Day), 2)])).unwrap();
        let status = &response.statuses[0];
        let limit = status.current_limit.as_ref().unwrap();
        assert_eq!((limit.requests_per_unit, limit.unit, status.limit_remaining), (2, RateLimitUnit::Day as i32, 0));
        assert_eq!(client.codes(vec![limited(2, RateLimitUnit::Day)]).0, Code::OverLimit);
        // The rule's own bucket is another one.
        assert_eq!(client.codes(vec![descriptor(&[("path", "/own"), ("key", "a")])]).1, [(Code::Ok, 9)]);
        assert_eq!(client.codes(vec![limited(0, RateLimitUnit::Day)]).0, Code::OverLimit);
        // Of a domain that nobody knows nothing is limited.
        let unknown = client.ask(request("nobody's", vec![limited(0, RateLimitUnit::Day)])).unwrap();
        assert_eq!((unknown.overall_code(), unknown.statuses.len()), (Code::Ok, 1));
        let refused = client.ask(request("shop", vec![limited(1, RateLimitUnit::Unknown)])).unwrap_err();
        assert_eq!(refused.code(), Grpc::InvalidArgument);
    });
}

#[test]
fn entries_become_attributes() {
    everywhere("", |server, client| {
        let is_over = |client: &mut Client, domain: &str, entries: &[(&str, &str)]| {
            client.ask(request(domain, vec![descriptor(entries)])).unwrap().overall_code() == Code::OverLimit
        };
        assert!(!is_over(client, "exact", &[("a", "1"), ("b", "2")]));
        assert!(!is_over(client, "exact", &[("a", "1")]));
        assert!(is_over(client, "exact", &[("a", "1")]));
        assert!(is_over(client, "twice", &[("k", "x"), ("k", "y")]));
        assert!(!is_over(client, "twice", &[("k", "y"), ("k", "x")]));
        assert!(
            is_over(client, "mapped", &[("X_Request:$Id", "1")])
                || is_over(client, "mapped", &[("X_Request:_Id", "1")])
        );
        assert!(!is_over(client, "nobody's", &[("a", "1")]));
        assert!(server.get("/metrics").1.contains("sluice_grpc_unknown_domains_total{core=\"0\"} 1"));
        // A key that is called as the domain is.
        assert!(!is_over(client, "shop", &[("domain", "exact")]));
    });
}

#[test]
fn requests_that_cannot_be_meant_are_errors_never_unknown() {
    everywhere("", |_, client| {
        let mut refused = |domain: &str, descriptors| client.ask(request(domain, descriptors)).unwrap_err();
        let one = || vec![descriptor(&[("path", "/a")])];
        let empty_domain = refused("", one());
        assert_eq!((empty_domain.code(), empty_domain.message()), (Grpc::InvalidArgument, "the domain is empty"));
        assert_eq!(refused("shop", vec![]).message(), "there are no descriptors");
        assert_eq!(refused("shop", vec![descriptor(&[])]).message(), "descriptor 0 has no entries");
        let many = refused("shop", vec![descriptor(&[("path", "/a")]); 65]);
        assert_eq!(many.message(), "there are more than 64 descriptors (setting http.checks_max)");
        let large = refused("shop", vec![descriptor(&[("path", &"x".repeat(70_000))])]);
        assert_eq!(large.code(), Grpc::ResourceExhausted);
    });
}

#[test]
fn headers_for_the_client_are_a_choice() {
    everywhere("[grpc]\nheaders = \"draft10\"\n", |_, client| {
        let ask = |client: &mut Client| client.ask(request("shop", vec![descriptor(&[("user", "h")])])).unwrap();
        let names = |response: &RateLimitResponse| -> Vec<String> {
            response.response_headers_to_add.iter().map(|header| header.key.clone()).collect()
        };
        assert_eq!(names(&ask(client)), ["ratelimit-policy", "ratelimit"]);
        ask(client);
        ask(client);
        let denied = ask(client);
        assert_eq!(names(&denied), ["ratelimit-policy", "ratelimit", "retry-after"]);
        assert_eq!(denied.response_headers_to_add[0].value, "\"user\";q=3;w=3600");
    });
}

#[test]
fn what_nobody_can_decide_is_unavailable() {
    const CLOSED: &str = r#"
[[rule]]
name = "closed"
match = { domain = "shop", user = "*" }
per = ["user"]
limit = { capacity = 3, refill = 3, period = "1h" }
on_failure = "closed"
[[rule]]
name = "local"
match = { domain = "shop", path = "*" }
limit = { capacity = 4, refill = 1, period = "1h" }
local = { capacity = 1, refill = 1, period = "1h" }
"#;
    for setup in Setup::transports() {
        let redis = Redis::start(&[]);
        let server = Server::start(&setup.with_redis(&[redis.url()], "deadline_ms = 50"), CLOSED);
        until("Redis is there", || server.redis_events("connected") >= 1);
        let mut client = Client::connect(&server);
        redis.freeze();
        let refused = client.ask(request("shop", vec![descriptor(&[("user", "u")])])).unwrap_err();
        assert_eq!(refused.code(), Grpc::Unavailable);
        assert_eq!(refused.message(), "the store does not answer, and the rule closed is closed on failure");
        let path = || vec![descriptor(&[("path", "/")])];
        assert_eq!(client.codes(path()), (Code::Ok, vec![(Code::Ok, 0)]));
        assert_eq!(client.codes(path()).0, Code::OverLimit);
        // Who waits for less long is answered sooner.
        let mut hurried = Request::new(request("shop", vec![descriptor(&[("user", "u")])]));
        hurried.set_timeout(Duration::from_millis(10));
        let code = client.ask(hurried).unwrap_err().code();
        assert!(matches!(code, Grpc::Unavailable | Grpc::DeadlineExceeded | Grpc::Cancelled), "{code:?}");
        redis.thaw();
    }
}

#[test]
fn many_streams_at_once_are_each_answered() {
    everywhere("", |_, client| {
        let all = (0..400).map(|n| {
            let mut stub = client.client.clone();
            let path = descriptor(&[("path", "/many"), ("key", if n % 2 == 0 { "even" } else { "odd" })]);
            async move { stub.should_rate_limit(request("shop", vec![path])).await.unwrap().into_inner() }
        });
        let tasks: Vec<_> = all.map(|one| client.runtime.spawn(one)).collect();
        let passed = client.runtime.block_on(async {
            let mut passed = 0;
            for task in tasks {
                passed += usize::from(task.await.unwrap().overall_code() == Code::Ok);
            }
            passed
        });
        // Ten of each bucket, and what may have come in since.
        assert!((20..=24).contains(&passed), "{passed}");
    });
}
