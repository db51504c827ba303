use super::*;

fn one(url: &str) -> Config {
    Config::from_urls(&[url]).expect(url)
}

fn wrong(url: &str) -> UrlError {
    Config::from_urls(&[url]).expect_err(url)
}

fn tcp(host: &str, port: u16) -> Address {
    Address::tcp(host, port)
}

#[test]
fn every_kind() {
    assert_eq!(one("redis://h").mode, Mode::Single(tcp("h", 6379)));
    assert_eq!(one("redis://[::1]:7000/").mode, Mode::Single(tcp("::1", 7000)));
    assert_eq!(one("redis://h:1/3").database, 3);
    assert!(one("rediss://h").tls.is_some());
    assert!(one("redis://h").tls.is_none());
    for url in ["redis+unix:///run/r.sock", "unix:///run/r.sock?db=0"] {
        assert_eq!(one(url).mode, Mode::Single(Address::Unix("/run/r.sock".into())));
    }
    assert_eq!(one("unix:///r%20s?db=7").database, 7);
    assert_eq!(one("redis+cluster://a:1,b").mode, Mode::Cluster { seeds: vec![tcp("a", 1), tcp("b", 6379)] });
    let sentinel = one("rediss+sentinel://a,b:2/mymaster/5");
    let sentinels = vec![tcp("a", 26_379), tcp("b", 2)];
    assert_eq!(sentinel.mode, Mode::Sentinel { sentinels, master: "mymaster".into() });
    assert_eq!((sentinel.database, sentinel.tls.is_some()), (5, true));
}

#[test]
fn several_urls_are_one_cluster() {
    let config = Config::from_urls(&["redis://:p@a:1", "redis://:p@b:2"]).expect("two seeds");
    assert_eq!(config.mode, Mode::Cluster { seeds: vec![tcp("a", 1), tcp("b", 2)] });
    let config = Config::from_urls(&["redis+sentinel://a/m", "redis+sentinel://b/m"]).expect("two sentinels");
    assert!(matches!(config.mode, Mode::Sentinel { sentinels, .. } if sentinels.len() == 2));
    let mixed = Config::from_urls(&["redis+sentinel://a/m", "redis+sentinel://b/other"]);
    assert!(matches!(mixed, Err(UrlError::Mixed { .. })));
    assert!(matches!(Config::from_urls(&["redis://:p@a", "redis://:q@b"]), Err(UrlError::Mixed { .. })));
    assert_eq!(Config::from_urls::<&str>(&[]).expect_err("nothing"), UrlError::None);
}

#[test]
fn users_and_passwords() {
    let credentials = |url| one(url).credentials.expect("credentials");
    let both = credentials("redis://us%65r:p%40ss%3a%ff%2f@h");
    assert_eq!((both.user.as_deref(), both.password.reveal()), (Some("user"), &b"p@ss:\xff/"[..]));
    let alone = credentials("redis://:pa:ss@h");
    assert_eq!((alone.user, alone.password.reveal()), (None, &b"pa:ss"[..]));
    let unescaped = credentials("redis://u:a@b/c@h:1");
    assert_eq!(unescaped.password.reveal(), b"a@b/c");
    assert!(one("redis://h").credentials.is_none());
}

#[test]
fn mistakes_are_named_and_show_no_password() {
    let at = |url: &str| url.to_owned();
    assert_eq!(wrong("h:1"), UrlError::Scheme { url: at("h:1") });
    assert_eq!(wrong("http://h"), UrlError::Scheme { url: at("http://h") });
    assert_eq!(wrong("redis://u:secret@"), UrlError::NoHost { url: at("redis://…@") });
    assert_eq!(wrong("redis://secret@h"), UrlError::UserOnly { url: at("redis://…@h") });
    assert_eq!(wrong("redis://u:secret@h:0"), UrlError::Port { url: at("redis://…@h:…") });
    assert_eq!(wrong("redis://::1:6379"), UrlError::Brackets { url: at("redis://:…") });
    assert_eq!(wrong("redis://a,b"), UrlError::ManyHosts { url: at("redis://a,b") });
    assert_eq!(wrong("unix://relative"), UrlError::UnixPath { url: at("unix://relative") });
    assert_eq!(wrong("redis://h/x"), UrlError::Database { url: at("redis://h/x") });
    assert_eq!(wrong("redis+cluster://h/1"), UrlError::ClusterDatabase { url: at("redis+cluster://h/1") });
    assert_eq!(wrong("redis+sentinel://h"), UrlError::NoMaster { url: at("redis+sentinel://h") });
    assert!(matches!(wrong("redis://h/1/2"), UrlError::Surplus { .. }));
    assert!(matches!(wrong("redis://h?x=1"), UrlError::Surplus { .. }));
    assert!(matches!(wrong("redis://%ff:x@h"), UrlError::Utf8 { .. }));
    for url in ["redis:/u:secret@h", "http://u:secret@h", "redis://u:secret@h:x/1", "redis://u:sec@secret@h:x"] {
        let error = wrong(url);
        assert!(!format!("{error} {error:?}").contains("secret"), "{error}");
    }
    assert!(!format!("{:?}", one("redis://u:secret@h")).contains("secret"));
}

#[test]
fn a_password_whose_at_sign_was_forgotten_is_not_shown() {
    for url in
        ["redis://user:hunter2", "redis://user:hunter2/0", "redis://user:hun:ter2", "rediss+cluster://a:1,user:hunter2"]
    {
        let error = Config::from_urls(&[url]).unwrap_err().to_string();
        assert!(!error.contains("hunter2") && !error.contains("ter2"), "{error}");
    }
}
