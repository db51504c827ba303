//! A subscriber: RESP3's pushes and RESP2's arrays, silence, and a new connection.

use resp_client::{
    Config, LinkError, Micros, Protocol,
    pubsub::{Event, Subscriber},
};

use crate::world::commands;

fn subscriber(protocol: Protocol) -> Subscriber {
    let mut config = Config::from_urls(&["redis://:secret@h:1"]).expect("URL");
    config.protocol = protocol;
    let address = config.addresses()[0].clone();
    Subscriber::new(config, address, &[b"policy", b"other"]).expect("settings")
}

fn sent(subscriber: &mut Subscriber) -> Vec<Vec<String>> {
    let bytes = subscriber.output().to_vec();
    subscriber.sent(bytes.len());
    commands(&bytes)
}

fn hear(subscriber: &mut Subscriber, bytes: &str, now: u64) -> Result<Vec<String>, LinkError> {
    let mut heard = Vec::new();
    for byte in bytes.bytes() {
        subscriber.received(&[byte], Micros::from_millis(now), &mut |event| {
            heard.push(match event {
                Event::Subscribed => "subscribed".to_owned(),
                Event::Message { channel, payload } => {
                    format!("{}: {}", String::from_utf8_lossy(channel), String::from_utf8_lossy(payload))
                }
            });
        })?;
    }
    Ok(heard)
}

#[test]
fn both_protocols_and_a_new_connection() {
    for (protocol, kind) in [(Protocol::Resp3, '>'), (Protocol::Resp2, '*')] {
        let mut subscriber = subscriber(protocol);
        for _ in 0..2 {
            subscriber.connected(Micros(0)).expect("a handshake");
            let handshake = if protocol == Protocol::Resp3 { "%0\r\n" } else { "+OK\r\n" };
            assert_eq!(sent(&mut subscriber).len(), 1);
            assert_eq!(hear(&mut subscriber, handshake, 1), Ok(vec![]));
            assert_eq!(sent(&mut subscriber), [["SUBSCRIBE", "policy", "other"]]);
            let one = format!("{kind}3\r\n$9\r\nsubscribe\r\n$6\r\npolicy\r\n:1\r\n");
            assert_eq!(hear(&mut subscriber, &one, 2), Ok(vec![]));
            assert!(!subscriber.is_subscribed());
            assert_eq!(hear(&mut subscriber, &one, 2), Ok(vec!["subscribed".to_owned()]));
            assert!(subscriber.is_subscribed());
            let message = format!("{kind}3\r\n$7\r\nmessage\r\n$6\r\npolicy\r\n$2\r\n17\r\n");
            assert_eq!(hear(&mut subscriber, &message, 3), Ok(vec!["policy: 17".to_owned()]));
            subscriber.disconnected();
            assert!(!subscriber.is_subscribed());
        }
    }
}

#[test]
fn silence_is_asked_about_and_then_given_up() {
    let mut subscriber = subscriber(Protocol::Resp3);
    subscriber.connected(Micros(0)).expect("a handshake");
    sent(&mut subscriber);
    hear(&mut subscriber, "%0\r\n", 0).expect("RESP");
    sent(&mut subscriber);
    let tick = |subscriber: &mut Subscriber, millis| subscriber.tick(Micros::from_millis(millis));
    tick(&mut subscriber, 1000).expect("patience");
    assert!(sent(&mut subscriber).is_empty());
    tick(&mut subscriber, 1001).expect("patience");
    tick(&mut subscriber, 1500).expect("patience");
    assert_eq!(sent(&mut subscriber), [["PING"]]);
    assert_eq!(hear(&mut subscriber, "+PONG\r\n", 1900), Ok(vec![]));
    tick(&mut subscriber, 2901).expect("patience");
    assert_eq!(sent(&mut subscriber), [["PING"]]);
    assert_eq!(tick(&mut subscriber, 3901), Err(LinkError::Stalled));
}

#[test]
fn errors_end_the_connection() {
    let mut subscriber = subscriber(Protocol::Resp3);
    subscriber.connected(Micros(0)).expect("a handshake");
    assert!(matches!(hear(&mut subscriber, "-WRONGPASS no\r\n", 0), Err(LinkError::Refused { .. })));
    subscriber.connected(Micros(0)).expect("a handshake");
    assert!(matches!(hear(&mut subscriber, "nonsense\r\n", 0), Err(LinkError::Protocol(_))));
    subscriber.connected(Micros(0)).expect("a handshake");
    assert!(matches!(hear(&mut subscriber, "%0\r\n-NOPERM no channels\r\n", 0), Err(LinkError::Refused { .. })));
    subscriber.connected(Micros(0)).expect("a handshake");
    assert_eq!(subscriber.tick(Micros::from_millis(501)), Err(LinkError::HandshakeTimeout));
    assert!(!format!("{subscriber:?}").contains("secret"));
}
