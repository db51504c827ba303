//! The client of the policy store against a real PostgreSQL: how it logs in, what TLS it takes, what it answers, and how long it
//! waits. Arbitrary bytes are tried where it is sans-I/O, in `policy-sync`.
#![allow(missing_docs)]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on must stop, with the reason")]
#![allow(clippy::disallowed_methods, reason = "tests wait for real processes")]

use std::time::{Duration, Instant};

use glommio::LocalExecutorBuilder;
use policy_sync::postgres::{Client, Config, Error, TooLarge};
use sluice_e2e::{
    PATIENCE,
    postgres::Postgres,
    proxy::{Fault, Proxy},
    until,
};

/// Who may enter, where a test asks for a password.
const PASSWORDS: &str = "host all trusted all trust
host all scram all scram-sha-256
host all md5 all md5
host all clear all password
hostssl all tls all scram-sha-256
hostnossl all tls all reject
local all all scram-sha-256";

/// Runs it as the server's executors run: nothing is preempted.
fn on_glommio<T: Send + 'static>(work: impl AsyncFnOnce() -> T + Send + 'static) -> T {
    let executor = LocalExecutorBuilder::default().preempt_timer(Duration::from_secs(10)).io_memory(0);
    executor.spawn(move || async move { work().await }).unwrap().join().unwrap()
}

fn config(url: &str) -> Config {
    Config::parse(url).unwrap()
}

/// What came of logging in: the name that the server knows, and whether the connection has TLS.
fn log_in(config: Config) -> Result<(String, bool), Error> {
    on_glommio(async move || {
        let mut client = Client::connect(&config, PATIENCE).await?;
        let asked = "SELECT current_user, ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()";
        let rows = client.query(asked, &[], PATIENCE).await?;
        let row = rows.get(0).unwrap();
        Ok((row.get(0).unwrap().to_owned(), row.get(1) == Some("t")))
    })
}

/// A server with a user for each way to log in. Their password has what SASLprep leaves as it is and UTF-8 needs two bytes for.
fn with_users(settings: &[&str]) -> Postgres {
    let postgres = Postgres::start_with(PASSWORDS, settings);
    postgres.make_store();
    postgres.sql(
        "CREATE ROLE trusted LOGIN; CREATE ROLE scram LOGIN PASSWORD 'pÄss,=word'; CREATE ROLE tls LOGIN PASSWORD 'pÄss,=word';
         CREATE ROLE clear LOGIN PASSWORD 'pÄss,=word';
         SET password_encryption = 'md5'; CREATE ROLE md5 LOGIN PASSWORD 'pÄss,=word';",
    );
    postgres
}

#[test]
fn it_logs_in_as_the_server_wants_it_and_never_says_the_password() {
    let postgres = with_users(&[]);
    let of = |user: &str| config(&format!("postgres://{user}@{}/sluice", postgres.address()));
    assert_eq!(log_in(of("trusted")).unwrap(), ("trusted".into(), false));
    for user in ["scram", "md5"] {
        assert_eq!(log_in(of(user).with_password("pÄss,=word")).unwrap(), (user.into(), false));
        let error = log_in(of(user).with_password("wrong-secret")).unwrap_err();
        assert_eq!(error.sqlstate(), Some("28P01"), "{error}");
        assert!(!error.to_string().contains("wrong-secret") && !format!("{error:?}").contains("wrong-secret"));
        assert!(matches!(log_in(of(user)).unwrap_err(), Error::NoPassword { .. }));
    }
    // The password in the clear is for encrypted connections, or for who says so.
    let clear = of("clear").with_password("pÄss,=word");
    assert!(matches!(log_in(clear.clone()).unwrap_err(), Error::ClearText));
    assert_eq!(log_in(Config { allow_clear_text: true, ..clear }).unwrap().0, "clear");
    // A URL holds it with percent signs.
    let url = format!("postgres://scram:p%C3%84ss%2C%3Dword@{}/sluice", postgres.address());
    assert_eq!(log_in(config(&url)).unwrap().0, "scram");
    let socket = postgres.socket_folder().display();
    let url = format!("postgres://scram:p%C3%84ss%2C%3Dword@/sluice?host={socket}&port={}", postgres.address().port());
    assert_eq!(log_in(config(&url)).unwrap().0, "scram");
    let error = log_in(of("nobody-of-this-name").with_password("x")).unwrap_err();
    assert_eq!(error.sqlstate(), Some("28000"), "{error}");
    let error = log_in(config(&format!("postgres://trusted@{}/no_such", postgres.address()))).unwrap_err();
    assert_eq!(error.sqlstate(), Some("3D000"), "{error}");
}

#[test]
fn tls_is_taken_and_checked_as_sslmode_says() {
    let postgres = with_users(&["ssl=on", "ssl_cert_file=../server.crt", "ssl_key_file=../server.key"]);
    let (ca, port) = (postgres.ca_file().display().to_string(), postgres.address().port());
    let of = |host: &str, user: &str, rest: &str| {
        config(&format!("postgres://{user}@{host}:{port}/sluice?{rest}")).with_password("pÄss,=word")
    };
    let with_ca = |mode: &str| format!("sslmode={mode}&sslrootcert={ca}");
    // SCRAM over TLS binds to the certificate, so it succeeds only if both ends see the same one.
    for mode in ["require", "verify-ca", "verify-full"] {
        assert_eq!(log_in(of("localhost", "tls", &with_ca(mode))).unwrap(), ("tls".into(), true), "{mode}");
    }
    for mode in ["prefer", "require"] {
        assert_eq!(log_in(of("127.0.0.1", "tls", &format!("sslmode={mode}"))).unwrap(), ("tls".into(), true), "{mode}");
    }
    assert_eq!(log_in(of("127.0.0.1", "tls", &with_ca("verify-ca"))).unwrap(), ("tls".into(), true));
    // The certificate is for another name.
    let error = log_in(of("127.0.0.1", "tls", &with_ca("verify-full"))).unwrap_err();
    assert!(matches!(error, Error::Tls(_)), "{error}");
    // Nobody whom the system trusts signed it.
    let error = log_in(of("localhost", "tls", "sslmode=verify-full")).unwrap_err();
    assert!(matches!(error, Error::Tls(_) | Error::TlsSettings(_)), "{error}");
    // Another authority.
    let other = Postgres::start();
    let rest = format!("sslmode=verify-full&sslrootcert={}", other.ca_file().display());
    let error = log_in(of("localhost", "tls", &rest)).unwrap_err();
    assert!(matches!(error, Error::Tls(_)), "{error}");
    let error = log_in(of("localhost", "tls", "sslmode=verify-full&sslrootcert=/no/such/file")).unwrap_err();
    assert!(error.to_string().contains("/no/such/file"), "{error}");
    // Without TLS the server does not let it in.
    let error = log_in(of("localhost", "tls", "sslmode=disable")).unwrap_err();
    assert_eq!(error.sqlstate(), Some("28000"), "{error}");
    // Encrypted, the password may go as it is.
    assert_eq!(log_in(of("localhost", "clear", &with_ca("verify-full"))).unwrap(), ("clear".into(), true));
}

#[test]
fn a_server_without_tls_is_refused_where_tls_is_wanted() {
    let postgres = with_users(&[]);
    let of = |mode: &str| config(&format!("postgres://trusted@{}/sluice?sslmode={mode}", postgres.address()));
    for mode in ["require", "verify-full"] {
        assert!(matches!(log_in(of(mode)).unwrap_err(), Error::NoTls { .. }), "{mode}");
    }
    for mode in ["disable", "prefer"] {
        assert_eq!(log_in(of(mode)).unwrap(), ("trusted".into(), false), "{mode}");
    }
}

#[test]
fn queries_take_parameters_and_give_rows_or_the_servers_error() {
    let postgres = Postgres::with_store();
    let config = config(&postgres.url());
    on_glommio(async move || {
        let mut client = Client::connect(&config, PATIENCE).await.unwrap();
        assert!(client.server_version().split('.').next().unwrap().parse::<u32>().unwrap() >= 13);
        let hard = "it's \"$1\"; DROP TABLE x; -- \\ é 漢 \u{1F980}\n";
        let sql = "SELECT $1::text AS a, $2::text::bigint + 1 AS b, $3::text AS c, '' AS d, $1 = $4 AS e";
        let rows = client.query(sql, &[Some(hard), Some("41"), None, Some(hard)], PATIENCE).await.unwrap();
        assert_eq!(rows.len(), 1);
        let row = rows.get(0).unwrap();
        assert_eq!([0, 1, 2, 3, 4].map(|column| row.get(column)), [Some(hard), Some("42"), None, Some(""), Some("t")]);
        assert_eq!((row.by_name("b"), row.by_name("no"), row.get(5)), (Some("42"), None, None));
        // Many rows, more than one read takes; and none.
        let rows =
            client.query("SELECT i, repeat('x', 1000) FROM generate_series(1, 5000) i", &[], PATIENCE).await.unwrap();
        assert_eq!(rows.len(), 5000);
        assert!(rows.iter().enumerate().all(|(at, row)| row.get(0) == Some(&*(at + 1).to_string())));
        assert!(client.query("SELECT 1 WHERE false", &[], PATIENCE).await.unwrap().is_empty());
        let rows = client.query("CREATE TABLE t AS SELECT generate_series(1, 3)", &[], PATIENCE).await.unwrap();
        assert_eq!((rows.tag(), rows.affected()), ("SELECT 3", 3));
        // The server says no, and goes on.
        for (sql, state) in [("SELECT 1/0", "22012"), ("SELECT * FROM no_such", "42P01"), ("SELEC", "42601")] {
            let error = client.query(sql, &[], PATIENCE).await.unwrap_err();
            assert_eq!(error.sqlstate(), Some(state), "{error}");
            assert!(error.is_survivable() && !client.is_broken());
        }
        // What cannot be sent is not sent.
        assert!(matches!(client.query("SELECT $1", &[Some("a\0b")], PATIENCE).await.unwrap_err(), Error::Request(_)));
        assert!(matches!(client.query("COPY t TO STDOUT", &[], PATIENCE).await.unwrap_err(), Error::Copy));
    });
}

#[test]
fn a_result_beyond_the_bounds_ends_the_connection_and_not_the_memory() {
    let postgres = Postgres::with_store();
    let mut few = config(&postgres.url());
    few.limits.rows_max = 100;
    let mut short = config(&postgres.url());
    short.limits.result_bytes_max = 100_000;
    on_glommio(async move || {
        let sql = "SELECT repeat('x', 1000), generate_series(1, 100000000)";
        let mut client = Client::connect(&few, PATIENCE).await.unwrap();
        let error = client.query(sql, &[], PATIENCE).await.unwrap_err();
        assert!(matches!(error, Error::TooLarge(TooLarge::Rows { .. })), "{error}");
        assert!(client.is_broken());
        assert!(matches!(client.query("SELECT 1", &[], PATIENCE).await.unwrap_err(), Error::Broken));
        let mut client = Client::connect(&short, PATIENCE).await.unwrap();
        let error = client.query(sql, &[], PATIENCE).await.unwrap_err();
        assert!(matches!(error, Error::TooLarge(TooLarge::ResultBytes { .. })), "{error}");
    });
}

#[test]
fn notifications_are_heard_in_order_and_between_queries() {
    let postgres = Postgres::with_store();
    let config = config(&postgres.url());
    on_glommio(async move || {
        let mut hears = Client::connect(&config, PATIENCE).await.unwrap();
        let mut says = Client::connect(&config, PATIENCE).await.unwrap();
        hears.listen("Some \"channel\"", PATIENCE).await.unwrap();
        assert!(hears.wait_notification(Some(Duration::from_millis(20))).await.unwrap().is_none());
        for number in 0..10 {
            let say = "SELECT pg_notify('Some \"channel\"', $1)";
            says.query(say, &[Some(&number.to_string())], PATIENCE).await.unwrap();
            // One that comes while something is asked is kept.
            hears.query("SELECT 1", &[], PATIENCE).await.unwrap();
        }
        for number in 0..10 {
            let heard = hears.wait_notification(Some(PATIENCE)).await.unwrap().expect("it was said");
            assert_eq!((&*heard.channel, &*heard.payload), ("Some \"channel\"", &*number.to_string()));
        }
    });
}

#[test]
fn a_query_that_takes_too_long_is_stopped_in_the_server() {
    let postgres = Postgres::with_store();
    let url = config(&postgres.url());
    on_glommio(async move || {
        let mut client = Client::connect(&url, PATIENCE).await.unwrap();
        let error = client.query("SELECT pg_sleep(3600)", &[], Duration::from_millis(100)).await.unwrap_err();
        assert!(matches!(error, Error::Timeout { .. }), "{error}");
        assert!(client.is_broken());
    });
    let running = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%sleep(3600)%' AND pid <> pg_backend_pid()";
    until("the query has ended", || postgres.sql(running).trim() == "0");
}

#[test]
fn a_server_that_is_frozen_killed_or_cut_off_fails_in_time() {
    let postgres = Postgres::with_store();
    let short = Duration::from_millis(200);
    let began = Instant::now();
    postgres.freeze();
    let url = config(&postgres.url());
    let error = on_glommio(async move || Client::connect(&url, short).await.map(drop).unwrap_err());
    assert!(matches!(error, Error::Timeout { .. }), "{error}");
    postgres.thaw();

    let (to_kill, killed) = (std::sync::mpsc::channel(), std::sync::mpsc::channel());
    let (url, tell, wait) = (config(&postgres.url()), to_kill.0, killed.1);
    let client = std::thread::spawn(move || {
        on_glommio(async move || {
            let mut client = Client::connect(&url, PATIENCE).await.unwrap();
            tell.send(()).unwrap();
            wait.recv().unwrap();
            let error = client.query("SELECT 1", &[], PATIENCE).await.unwrap_err();
            assert!(!error.is_survivable() && client.is_broken(), "{error}");
            error
        })
    });
    to_kill.1.recv().unwrap();
    postgres.kill();
    killed.0.send(()).unwrap();
    let error = client.join().unwrap();
    assert!(matches!(error, Error::Closed { .. } | Error::Io { .. } | Error::Server(_)), "{error}");
    let url = config(&postgres.url());
    let error = on_glommio(async move || Client::connect(&url, PATIENCE).await.map(drop).unwrap_err());
    assert!(matches!(error, Error::Connect { .. }), "{error}");

    postgres.restart();
    for (fault, is_it) in [
        (
            Fault::ResetInReply { after_bytes: 1 },
            (|e| matches!(e, Error::Closed { .. } | Error::Io { .. })) as fn(&Error) -> bool,
        ),
        (Fault::HalfReplyThenSilence, |e| matches!(e, Error::Timeout { .. })),
        (Fault::Garbage, |e| matches!(e, Error::Protocol(_))),
        (Fault::RefuseConnections, |e| matches!(e, Error::Closed { .. } | Error::Io { .. } | Error::Connect { .. })),
    ] {
        let proxy = Proxy::start(postgres.address());
        proxy.set(fault);
        let url = config(&format!("postgres://postgres@{}/sluice", proxy.address()));
        let error = on_glommio(async move || Client::connect(&url, short).await.map(drop).unwrap_err());
        assert!(is_it(&error), "{fault:?}: {error:?}");
    }
    assert!(began.elapsed() < PATIENCE, "nothing waited for ever");
}
