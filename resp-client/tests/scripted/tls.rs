//! TLS in memory: rustls on both sides.

use std::{
    io::{Read, Write},
    sync::Arc,
};

use resp_client::{Client, Config, LinkError, LinkId, ShardIndex, TlsConfig};
use rustls::{ServerConfig, ServerConnection, crypto::ring, pki_types::PrivateKeyDer};

use crate::world::{World, commands, ok};

struct Server {
    connection: ServerConnection,
    ca_pem: Vec<u8>,
}

fn server(name: &str) -> Server {
    let certified = rcgen::generate_simple_self_signed(vec![name.to_owned()]).expect("a certificate");
    let key = PrivateKeyDer::try_from(certified.signing_key.serialize_der()).expect("a key");
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_no_client_auth()
        .with_single_cert(vec![certified.cert.der().clone()], key)
        .expect("a pair");
    let connection = ServerConnection::new(Arc::new(config)).expect("a server");
    Server { connection, ca_pem: certified.cert.pem().into_bytes() }
}

fn client(server: &Server) -> (World, LinkId) {
    let mut config = Config::from_urls(&["rediss://redis.test:1"]).expect("URL");
    config.tls = Some(TlsConfig { ca_pem: Some(server.ca_pem.clone()), ..TlsConfig::default() });
    let mut world = World::new(config);
    let link = world.wants("redis.test:1");
    world.connected(link);
    (world, link)
}

/// Carries bytes to and fro, so many at a time, until both are silent; says what the server was sent.
fn exchange(world: &mut World, link: LinkId, server: &mut Server, piece: usize) -> Vec<u8> {
    let mut plain = Vec::new();
    loop {
        let sent = world.client.output(link).to_vec();
        world.client.sent(link, sent.len());
        let mut rest = &sent[..];
        while !rest.is_empty() {
            server.connection.read_tls(&mut rest).expect("memory");
            let _ = server.connection.process_new_packets();
        }
        let _ = server.connection.reader().read_to_end(&mut plain);
        let mut back = Vec::new();
        while server.connection.wants_write() {
            server.connection.write_tls(&mut back).expect("memory");
        }
        if sent.is_empty() && back.is_empty() {
            return plain;
        }
        for piece in back.chunks(piece) {
            world.reply_bytes(link, piece);
        }
    }
}

fn is_up(client: &Client) -> bool {
    client.shard_is_up(ShardIndex(0))
}

#[test]
fn a_handshake_and_a_call() {
    for piece in [1, 7, 100_000] {
        let mut server = server("redis.test");
        let (mut world, link) = client(&server);
        let sent = exchange(&mut world, link, &mut server, piece);
        assert_eq!(commands(&sent), [["HELLO", "3"]]);
        server.connection.writer().write_all(b"%0\r\n").expect("memory");
        exchange(&mut world, link, &mut server, piece);
        assert!(is_up(&world.client));
        world.get(1, "k").expect("room");
        assert_eq!(world.client.poll_output(), Some(link));
        assert_eq!(commands(&exchange(&mut world, link, &mut server, piece)), [["GET", "k"]]);
        server.connection.writer().write_all(b":1\r\n").expect("memory");
        exchange(&mut world, link, &mut server, piece);
        assert_eq!(world.outcomes(), [(1, ok(1))]);
    }
}

#[test]
fn a_large_reply() {
    let mut server = server("redis.test");
    let (mut world, link) = client(&server);
    exchange(&mut world, link, &mut server, 100_000);
    let mut reply = b"%0\r\n".to_vec();
    server.connection.set_buffer_limit(None);
    server.connection.writer().write_all(&reply).expect("memory");
    exchange(&mut world, link, &mut server, 100_000);
    world.get(1, "k").expect("room");
    exchange(&mut world, link, &mut server, 100_000);
    reply = format!("$300000\r\n{}\r\n", "x".repeat(300_000)).into_bytes();
    server.connection.writer().write_all(&reply).expect("memory");
    exchange(&mut world, link, &mut server, 100_000);
    let ended = world.outcomes();
    assert_eq!(ended[0].1.as_ref().expect("a reply").as_bytes().map(<[u8]>::len), Some(300_000));
}

#[test]
fn a_certificate_for_another_name_is_refused() {
    let mut server = server("elsewhere.test");
    let (mut world, link) = client(&server);
    exchange(&mut world, link, &mut server, 100_000);
    world.wants_close(link);
    assert!(matches!(world.client.shard_problem(ShardIndex(0)), Some(LinkError::Tls(_))));
}

#[test]
fn the_name_can_be_set() {
    let mut server = server("elsewhere.test");
    let mut config = Config::from_urls(&["rediss://10.0.0.1:1"]).expect("URL");
    let tls = TlsConfig {
        ca_pem: Some(server.ca_pem.clone()),
        server_name: Some("elsewhere.test".into()),
        ..TlsConfig::default()
    };
    config.tls = Some(tls);
    let mut world = World::new(config);
    let link = world.wants("10.0.0.1:1");
    world.connected(link);
    assert_eq!(commands(&exchange(&mut world, link, &mut server, 100_000)), [["HELLO", "3"]]);
}

#[test]
fn no_tls_at_the_other_end() {
    let server = server("redis.test");
    let (mut world, link) = client(&server);
    world.client.output(link);
    world.reply(link, "-ERR unknown command\r\n");
    world.wants_close(link);
}

#[test]
fn settings_that_cannot_work_are_refused_at_once() {
    let mut config = Config::from_urls(&["rediss://h:1"]).expect("URL");
    config.tls = Some(TlsConfig { ca_pem: Some(b"nonsense".to_vec()), ..TlsConfig::default() });
    assert!(Client::new(config, 1, resp_client::Micros(0)).is_err());
}
