//! Which node has which slots: from a cluster's answer to a table.
//!
//! CLUSTER SHARDS (Redis 7.0) names for each shard its slots and nodes; CLUSTER SLOTS (before) names for each range of
//! slots its primary and replicas. A node that does not know its own address leaves it empty: it is the node that was
//! asked.

use crate::{config::Address, reply::Reply, slot::SLOTS};

/// A range of slots, both ends included, and the primary that has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) first: u16,
    pub(crate) last: u16,
    pub(crate) primary: Address,
}

/// What is needed to read a node's answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked<'a> {
    /// The host that was asked, for nodes without a host.
    pub(crate) host: &'a str,
    /// Whether links use TLS, and so the other port.
    pub(crate) tls: bool,
}

/// Reads the answer to CLUSTER SHARDS. `None` if it is none. A shard without a primary has no ranges.
pub(crate) fn shards(reply: &Reply<'_>, asked: Asked<'_>) -> Option<Vec<Range>> {
    let mut ranges = Vec::new();
    for shard in reply.items()? {
        let slots = field(&shard, b"slots")?.items()?;
        let Some(primary) = primary(&field(&shard, b"nodes")?, asked) else { continue };
        let mut ends = slots.map(|end| slot(&end));
        while let Some(first) = ends.next() {
            ranges.push(range(first?, ends.next()??, primary.clone())?);
        }
    }
    Some(ranges)
}

/// The node that takes writes: a primary that is online, or else any primary.
fn primary(nodes: &Reply<'_>, asked: Asked<'_>) -> Option<Address> {
    let mut found = None;
    for node in nodes.items()? {
        if text(&node, b"role") != Some(b"master") {
            continue;
        }
        let Some(address) = node_address(&node, asked) else { continue };
        if text(&node, b"health") == Some(b"online") {
            return Some(address);
        }
        found = found.or(Some(address));
    }
    found
}

fn node_address(node: &Reply<'_>, asked: Asked<'_>) -> Option<Address> {
    let port = field(node, if asked.tls { b"tls-port" } else { b"port" })?.as_integer()?;
    let known = |name: &[u8]| text(node, name).filter(|host| !host.is_empty() && *host != b"?");
    // `endpoint` is what the cluster is set to announce; nil means "as you reached me", `?` that it does not know.
    let host = match field(node, b"endpoint") {
        Some(Reply::Nil) => None,
        _ => known(b"endpoint").or_else(|| known(b"ip")),
    };
    address(host, port, asked.host)
}

/// Reads the answer to CLUSTER SLOTS. `None` if it is none.
pub(crate) fn slots(reply: &Reply<'_>, asked: Asked<'_>) -> Option<Vec<Range>> {
    reply.items()?.map(|entry| slots_entry(&entry, asked)).collect()
}

fn slots_entry(entry: &Reply<'_>, asked: Asked<'_>) -> Option<Range> {
    let mut entry = entry.items()?;
    let first = slot(&entry.next()?)?;
    let last = slot(&entry.next()?)?;
    let mut node = entry.next()?.items()?;
    let host = node.next()?.as_bytes().filter(|host| !host.is_empty() && *host != b"?");
    range(first, last, address(host, node.next()?.as_integer()?, asked.host)?)
}

/// Reads where a redirection points: `MOVED 3999 127.0.0.1:6381` or `ASK …`; the host may be empty, the port follows
/// the last colon.
pub(crate) fn redirection(text: &[u8], asked_host: &str) -> Option<(u16, Address)> {
    let text = std::str::from_utf8(text).ok()?;
    let mut words = text.split(' ').skip(1);
    let slot = words.next()?.parse().ok().filter(|&slot| slot < SLOTS)?;
    let (host, port) = words.next()?.rsplit_once(':')?;
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let host = Some(host.as_bytes()).filter(|host| !host.is_empty() && *host != b"?");
    Some((slot, address(host, port.parse().ok()?, asked_host)?))
}

/// Reads the answer to SENTINEL get-master-addr-by-name.
pub(crate) fn master(reply: &Reply<'_>) -> Option<Address> {
    let mut items = reply.items()?;
    let host = items.next()?.as_bytes()?;
    let port = std::str::from_utf8(items.next()?.as_bytes()?).ok()?.parse().ok()?;
    address(Some(host), port, "")
}

fn address(host: Option<&[u8]>, port: i64, otherwise: &str) -> Option<Address> {
    let host = match host {
        Some(host) => std::str::from_utf8(host).ok()?,
        None => otherwise,
    };
    let port = u16::try_from(port).ok().filter(|&port| port != 0)?;
    (!host.is_empty()).then(|| Address::tcp(host, port))
}

fn range(first: u16, last: u16, primary: Address) -> Option<Range> {
    (first <= last).then_some(Range { first, last, primary })
}

fn slot(reply: &Reply<'_>) -> Option<u16> {
    u16::try_from(reply.as_integer()?).ok().filter(|&slot| slot < SLOTS)
}

/// A value by its name, in a map or an array of names and values.
fn field<'a>(map: &Reply<'a>, name: &[u8]) -> Option<Reply<'a>> {
    let mut items = map.items()?;
    while let (Some(key), Some(value)) = (items.next(), items.next()) {
        if key.as_bytes() == Some(name) {
            return Some(value);
        }
    }
    None
}

fn text<'a>(map: &Reply<'a>, name: &[u8]) -> Option<&'a [u8]> {
    field(map, name)?.as_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reply::{Limits, Reply};

    const ASKED: Asked<'_> = Asked { host: "asked", tls: false };

    fn read<T>(bytes: &str, read: impl FnOnce(&Reply<'_>) -> T) -> T {
        let bytes = bytes.replace(' ', "\r\n");
        let (reply, end) = Reply::parse(bytes.as_bytes(), &Limits::default()).expect("RESP").expect("whole");
        assert_eq!(end, bytes.len());
        read(&reply)
    }

    fn range(first: u16, last: u16, host: &str, port: u16) -> Range {
        Range { first, last, primary: Address::tcp(host, port) }
    }

    /// One shard with two ranges; a failed primary, a replica, and the primary, whose endpoint is given.
    fn shard(endpoint: &str) -> String {
        let node = |role: &str, health: &str, ip: &str, endpoint: &str| {
            format!("%6 +port :7000 +tls-port :7100 +ip {ip} +endpoint {endpoint} +role +{role} +health +{health} ")
        };
        format!(
            "*1 %2 +slots *4 :0 :99 :200 :299 +nodes *3 {}{}{}",
            node("master", "fail", "+10.0.0.9", "+10.0.0.9"),
            node("replica", "online", "+10.0.0.8", "+10.0.0.8"),
            node("master", "online", "+10.0.0.1", endpoint),
        )
    }

    #[test]
    fn shards_of_redis_7() {
        for (endpoint, host) in [("+redis-1", "redis-1"), ("_", "asked"), ("$-1", "asked"), ("+?", "10.0.0.1")] {
            let expected = vec![range(0, 99, host, 7000), range(200, 299, host, 7000)];
            assert_eq!(read(&shard(endpoint), |reply| shards(reply, ASKED)), Some(expected), "{endpoint}");
        }
        let tls = read(&shard("+h"), |reply| shards(reply, Asked { tls: true, ..ASKED })).expect("shards");
        assert_eq!(tls[0].primary, Address::tcp("h", 7100));
    }

    #[test]
    fn a_shard_without_a_primary_is_skipped() {
        let text = "*1 %2 +slots *2 :0 :99 +nodes *0 ";
        assert_eq!(read(text, |reply| shards(reply, ASKED)), Some(vec![]));
    }

    #[test]
    fn what_is_no_answer_is_refused() {
        for text in ["+OK ", "*1 :1 ", "*1 %1 +slots *1 :1 ", "*1 %2 +slots *1 :1 +nodes *0 ", "*1 *1 :1 "] {
            let answer = read(text, |reply| shards(reply, ASKED));
            assert!(answer.is_none_or(|ranges| ranges.is_empty()), "{text}");
            assert_eq!(read(text, |reply| slots(reply, ASKED)), None, "{text}");
        }
        let outside = "*1 *3 :0 :16384 *2 +h :1 ";
        assert_eq!(read(outside, |reply| slots(reply, ASKED)), None);
    }

    #[test]
    fn slots_of_older_ones() {
        let text = "*2 *4 :0 :99 *3 +10.0.0.1 :7000 +id *3 +10.0.0.2 :7001 +id *3 :100 :16383 *2 $0  :7002 ";
        let expected = vec![range(0, 99, "10.0.0.1", 7000), range(100, 16_383, "asked", 7002)];
        assert_eq!(read(text, |reply| slots(reply, ASKED)), Some(expected));
    }

    #[test]
    fn redirections() {
        let at = |text: &[u8]| redirection(text, "asked");
        assert_eq!(at(b"MOVED 3999 127.0.0.1:6381"), Some((3999, Address::tcp("127.0.0.1", 6381))));
        assert_eq!(at(b"ASK 1 ::1:6381"), Some((1, Address::tcp("::1", 6381))));
        assert_eq!(at(b"MOVED 1 :6381"), Some((1, Address::tcp("asked", 6381))));
        for wrong in [&b"MOVED"[..], b"MOVED 1", b"MOVED 16384 h:1", b"MOVED x h:1", b"MOVED 1 h", b"MOVED 1 h:0"] {
            assert_eq!(at(wrong), None);
        }
    }
}
