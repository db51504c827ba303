//! The parser against a naive twin (read the whole frame again whenever a byte comes) and against `redis-protocol`.

use proptest::prelude::*;
use redis_protocol::resp3::{decode::complete::decode, types::OwnedFrame};

use super::*;

/// A twin of a reply, and how it goes over the wire.
fn encode(reply: &OwnedReply, out: &mut Vec<u8>) {
    let mut line = |kind: &str, bytes: &[u8]| {
        out.extend_from_slice(kind.as_bytes());
        out.extend_from_slice(bytes);
        out.extend_from_slice(b"\r\n");
    };
    match reply {
        OwnedReply::Nil => line("_", b""),
        OwnedReply::Integer(value) => line(":", value.to_string().as_bytes()),
        OwnedReply::Boolean(value) => line("#", if *value { b"t" } else { b"f" }),
        OwnedReply::Double(value) => line(",", value.to_string().as_bytes()),
        OwnedReply::BigNumber(digits) => line("(", digits),
        OwnedReply::Simple(text) => line("+", text),
        OwnedReply::Error(text) => line("-", text),
        OwnedReply::Bulk(bytes) => {
            line("$", bytes.len().to_string().as_bytes());
            line("", bytes);
        }
        OwnedReply::Verbatim { format, text } => {
            line("=", (text.len() + 4).to_string().as_bytes());
            line("", &[format, &b":"[..], text].concat());
        }
        OwnedReply::Array(items) => encode_all(b'*', items, out),
        OwnedReply::Set(items) => encode_all(b'~', items, out),
        OwnedReply::Push(items) => encode_all(b'>', items, out),
        OwnedReply::Map(pairs) => {
            line("%", pairs.len().to_string().as_bytes());
            for (key, value) in pairs {
                encode(key, out);
                encode(value, out);
            }
        }
    }
}

fn encode_all(kind: u8, items: &[OwnedReply], out: &mut Vec<u8>) {
    out.push(kind);
    out.extend_from_slice(format!("{}\r\n", items.len()).as_bytes());
    for item in items {
        encode(item, out);
    }
}

fn replies() -> impl Strategy<Value = OwnedReply> {
    let text = || "[ -~]{0,20}".prop_map(String::into_bytes);
    let leaf = prop_oneof![
        Just(OwnedReply::Nil),
        any::<i64>().prop_map(OwnedReply::Integer),
        (-1000_i64..1000).prop_map(OwnedReply::Integer),
        any::<bool>().prop_map(OwnedReply::Boolean),
        (-1e6..1e6).prop_map(OwnedReply::Double),
        "-?[0-9]{1,40}".prop_map(|digits| OwnedReply::BigNumber(digits.into_bytes())),
        text().prop_map(OwnedReply::Simple),
        text().prop_map(OwnedReply::Error),
        proptest::collection::vec(any::<u8>(), 0..40).prop_map(OwnedReply::Bulk),
        text().prop_map(|text| OwnedReply::Verbatim { format: b"txt".to_vec(), text }),
    ];
    leaf.prop_recursive(4, 40, 6, |inner| {
        let items = || proptest::collection::vec(inner.clone(), 0..6);
        prop_oneof![
            items().prop_map(OwnedReply::Array),
            items().prop_map(OwnedReply::Set),
            items().prop_map(OwnedReply::Push),
            proptest::collection::vec((inner.clone(), inner.clone()), 0..4).prop_map(OwnedReply::Map),
        ]
    })
}

/// Everything a scanner finds when bytes come in pieces, as a link does it: only what is left is kept.
fn in_pieces(bytes: &[u8], ends: impl IntoIterator<Item = usize>) -> Result<Vec<OwnedReply>, ProtocolError> {
    let (mut scanner, limits) = (Scanner::default(), Limits::default());
    let (mut kept, mut found, mut start) = (Vec::new(), Vec::new(), 0);
    for end in ends.into_iter().chain([bytes.len()]) {
        kept.extend_from_slice(&bytes[start..end.max(start)]);
        start = end.max(start);
        while let Some(length) = scanner.scan(&kept, &limits)? {
            found.push(Reply::of_whole(&kept[..length]).into());
            kept.drain(..length);
        }
    }
    assert!(kept.is_empty(), "whole frames leave nothing");
    Ok(found)
}

proptest! {
    #[test]
    fn replies_come_out_as_they_went_in(replies in proptest::collection::vec(replies(), 1..6)) {
        let mut bytes = Vec::new();
        replies.iter().for_each(|reply| encode(reply, &mut bytes));
        prop_assert_eq!(&in_pieces(&bytes, [])?, &replies);
        prop_assert_eq!(&in_pieces(&bytes, 0..bytes.len())?, &replies, "byte by byte");
        for split in 0..bytes.len() {
            prop_assert_eq!(&in_pieces(&bytes, [split])?, &replies, "split at {}", split);
        }
    }

    #[test]
    fn every_front_of_a_reply_is_incomplete(reply in replies()) {
        let mut bytes = Vec::new();
        encode(&reply, &mut bytes);
        for end in 0..bytes.len() {
            prop_assert_eq!(Reply::parse(&bytes[..end], &Limits::default()), Ok(None));
        }
    }

    /// `redis-protocol` takes a few things that we refuse (streams) and reads some that no Redis sends in its own way,
    /// so: what both take, both read to the same length and alike.
    #[test]
    fn what_redis_protocol_reads_we_read_alike(
        bytes in prop_oneof![
            "[+:$*_#,(%~>=!-]{1,3}[0-9tf.-]{0,3}\r\n([+:$*_#,(%~>=-][0-9a-z-]{0,3}\r\n){0,4}",
            "[*%~>][0-3]\r\n([+:$*_#,-][0-9]{0,2}\r\n){0,6}",
        ].prop_map(String::into_bytes)
    ) {
        let ours = Reply::parse(&bytes, &Limits::default());
        if let (Ok(Some((reply, length))), Ok(Some((frame, theirs)))) = (ours, decode(&bytes)) {
            prop_assert_eq!(length, theirs);
            prop_assert!(alike(&reply, &frame), "{:?} {:?}", reply, frame);
        }
    }

    #[test]
    fn noise_never_panics(bytes in proptest::collection::vec(prop_oneof![
        any::<u8>(), proptest::sample::select(b"+-:$*_#,(!=%~>|\r\n0123456789-".to_vec()),
    ], 0..60)) {
        let (mut scanner, limits) = (Scanner::default(), Limits::default());
        let mut at = 0;
        while let Ok(Some(length)) = scanner.scan(&bytes[at..], &limits) {
            let _ = format!("{:?}", Reply::of_whole(&bytes[at..at + length]));
            at += length;
        }
    }
}

fn alike(reply: &Reply<'_>, frame: &OwnedFrame) -> bool {
    let all = |items: Items<'_>, frames: &[OwnedFrame]| {
        items.len() == frames.len() && items.zip(frames).all(|(item, frame)| alike(&item, frame))
    };
    match (reply, frame) {
        (Reply::Nil, OwnedFrame::Null) => true,
        (Reply::Integer(value), OwnedFrame::Number { data, .. }) => value == data,
        (Reply::Boolean(value), OwnedFrame::Boolean { data, .. }) => value == data,
        (Reply::Double(value), OwnedFrame::Double { data, .. }) => value == data || value.is_nan() && data.is_nan(),
        (Reply::Simple(text), OwnedFrame::SimpleString { data, .. }) => text == data,
        (Reply::Bulk(bytes), OwnedFrame::BlobString { data, .. }) => bytes == data,
        (Reply::Error(text), OwnedFrame::SimpleError { data, .. }) => *text == data.as_bytes(),
        (Reply::Array(items), OwnedFrame::Array { data, .. }) => all(*items, data),
        (Reply::Push(items), OwnedFrame::Push { data, .. }) => all(*items, data),
        // Theirs are hashed, so the order and equal keys are lost.
        (Reply::Set(_), OwnedFrame::Set { .. }) | (Reply::Map(_), OwnedFrame::Map { .. }) => true,
        (Reply::BigNumber(digits), OwnedFrame::BigNumber { data, .. }) => digits == data,
        (Reply::Error(text), OwnedFrame::BlobError { data, .. }) => text == data,
        (Reply::Verbatim { text, .. }, OwnedFrame::VerbatimString { data, .. }) => text == data,
        _ => false,
    }
}

fn parsed(bytes: &[u8]) -> Result<Option<OwnedReply>, ProtocolError> {
    Reply::parse(bytes, &Limits::default()).map(|found| found.map(|(reply, _)| reply.into()))
}

#[test]
fn resp2_s_nulls_and_both_errors() {
    for nil in [&b"$-1\r\n"[..], b"*-1\r\n", b"_\r\n"] {
        assert_eq!(parsed(nil), Ok(Some(OwnedReply::Nil)));
    }
    assert_eq!(parsed(b"!5\r\nERR x\r\n"), Ok(Some(OwnedReply::Error(b"ERR x".to_vec()))));
}

#[test]
fn attributes_are_skipped_wherever_they_stand() {
    let bytes = b"|1\r\n+ttl\r\n:1\r\n*2\r\n|1\r\n+a\r\n|1\r\n+b\r\n:9\r\n*1\r\n:7\r\n:1\r\n+x\r\n";
    let (reply, length) = Reply::parse(bytes, &Limits::default()).expect("RESP").expect("whole");
    assert_eq!(length, bytes.len());
    assert_eq!(
        OwnedReply::from(reply),
        OwnedReply::Array(vec![OwnedReply::Integer(1), OwnedReply::Simple(b"x".to_vec())])
    );
}

#[test]
fn integers_to_the_last() {
    for value in [i64::MIN, i64::MAX, 0, -1, 999_999_999_999_999_999, 1_000_000_000_000_000_000] {
        assert_eq!(parsed(format!(":{value}\r\n").as_bytes()), Ok(Some(OwnedReply::Integer(value))));
    }
    assert_eq!(parsed(b":+5\r\n"), Ok(Some(OwnedReply::Integer(5))));
    for wrong in [&b":9223372036854775808\r\n"[..], b":\r\n", b":-\r\n", b":1x\r\n", b": 1\r\n"] {
        assert_eq!(parsed(wrong), Err(ProtocolError::Number));
    }
}

#[test]
fn what_is_malformed_is_named() {
    assert_eq!(parsed(b"HTTP/1.1 400\r\n"), Err(ProtocolError::UnknownKind { byte: b'H' }));
    assert_eq!(parsed(b"+OK\n"), Err(ProtocolError::LineEnd));
    assert_eq!(parsed(b"$3\r\nabcde"), Err(ProtocolError::BulkEnd));
    assert_eq!(parsed(b"$-2\r\n"), Err(ProtocolError::Length));
    assert_eq!(parsed(b"$?\r\n"), Err(ProtocolError::Length));
    assert_eq!(parsed(b"*x\r\n"), Err(ProtocolError::Length));
    assert_eq!(parsed(b"#y\r\n"), Err(ProtocolError::Scalar));
    assert_eq!(parsed(b"=3\r\ntxt\r\n"), Err(ProtocolError::Scalar));
}

#[test]
fn every_bound_holds() {
    let limits = Limits { depth_max: 2, items_max: 5, bulk_bytes_max: 4, line_bytes_max: 12, reply_bytes_max: 26 };
    let parsed = |bytes: &[u8]| Reply::parse(bytes, &limits).map(|found| found.is_some());
    assert_eq!(parsed(b"*1\r\n*1\r\n:1\r\n"), Ok(true));
    assert_eq!(parsed(b"*1\r\n*1\r\n*1\r\n"), Err(ProtocolError::TooDeep { depth_max: 2 }));
    assert_eq!(parsed(b"*6\r\n"), Err(ProtocolError::TooManyItems { items_max: 5 }));
    assert_eq!(parsed(b"%3\r\n"), Err(ProtocolError::TooManyItems { items_max: 5 }));
    assert_eq!(parsed(b"*9999999999\r\n"), Err(ProtocolError::TooManyItems { items_max: 5 }));
    assert_eq!(parsed(b"$5\r\n"), Err(ProtocolError::BulkTooLong { bytes_max: 4 }));
    assert_eq!(parsed(b"+123456789012"), Err(ProtocolError::LineTooLong { bytes_max: 12 }));
    assert_eq!(parsed(b"+123456789012\r\n"), Err(ProtocolError::LineTooLong { bytes_max: 12 }));
    let items = b"*5\r\n$4\r\nabcd\r\n$4\r\nabcd\r\n$4\r\n";
    assert_eq!(parsed(items), Err(ProtocolError::ReplyTooLong { bytes_max: 26 }));
}

/// The same number of steps for a frame in one piece and byte by byte, but for one look at each new byte.
#[test]
fn many_pieces_are_not_walked_again() {
    let mut bytes = b"*20000\r\n".to_vec();
    (0..20_000).for_each(|_| bytes.extend_from_slice(b"$3\r\nabc\r\n"));
    bytes.extend_from_slice(format!("${}\r\n{}\r\n", 200_000, "x".repeat(200_000)).as_bytes());
    let (mut scanner, limits) = (Scanner::default(), Limits::default());
    let mut found = 0;
    let mut start = 0;
    for end in 1..=bytes.len() {
        // Walking 180,000 bytes again for each of 380,000 would take minutes.
        if let Some(length) = scanner.scan(&bytes[start..end], &limits).expect("RESP") {
            start += length;
            found += 1;
        }
    }
    assert_eq!((found, start), (2, bytes.len()));
}
