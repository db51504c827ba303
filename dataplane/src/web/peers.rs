//! Whose address a request has: the socket's, or what a trusted proxy says of whom it asks for.
//!
//! `X-Forwarded-For` is a list to which each proxy appends whom it heard from. Anybody may send one, so it is read from its
//! end, and only for as long as the word is a trusted proxy's: the first address that is none of theirs is the client's.

use std::{
    io::Write,
    net::{IpAddr, Ipv6Addr},
};

use ipnet::IpNet;

/// Whose word is taken.
#[derive(Clone, Debug)]
pub struct Peers {
    /// Proxies that may speak for others.
    pub trusted: Vec<IpNet>,
    /// The header in which they do, in lower case.
    pub header: String,
    /// IPv6 addresses that have so many leading bits in common are one client: a customer has at least a /64.
    pub ipv6_prefix_bits: u8,
}

impl Peers {
    fn trusts(&self, address: IpAddr) -> bool {
        self.trusted.iter().any(|network| network.contains(&address))
    }

    /// The client's address, from the socket's and the values of the header, in their order.
    pub fn client<'a>(
        &self,
        socket: Option<IpAddr>,
        values: impl DoubleEndedIterator<Item = &'a [u8]>,
    ) -> Option<IpAddr> {
        // Who comes through the Unix socket is of this host, and was let in by its permissions.
        let mut client = socket.map(|address| address.to_canonical());
        if client.is_some_and(|address| !self.trusts(address)) {
            return client;
        }
        for word in values.rev().flat_map(|value| value.rsplit(|&byte| byte == b',')) {
            // What is not an address was not written by a proxy that is to be trusted.
            let Some(address) = address_of(word) else { return client };
            client = Some(address);
            if !self.trusts(address) {
                return client;
            }
        }
        client
    }

    /// Writes an address as an identity.
    pub fn write(&self, address: IpAddr, into: &mut Vec<u8>) {
        // Writing to memory does not fail.
        let _ = match address {
            IpAddr::V6(address) if self.ipv6_prefix_bits < 128 => {
                let mask = u128::MAX.checked_shl(128 - u32::from(self.ipv6_prefix_bits)).unwrap_or(0);
                write!(into, "{}/{}", Ipv6Addr::from(u128::from(address) & mask), self.ipv6_prefix_bits)
            }
            address => write!(into, "{address}"),
        };
    }
}

/// An address as proxies write it: bare, with a port, or in brackets.
fn address_of(word: &[u8]) -> Option<IpAddr> {
    let word = std::str::from_utf8(word).ok()?.trim();
    let bare = |word: &str| word.parse::<IpAddr>().ok();
    let in_brackets = || bare(word.strip_prefix('[')?.split_once(']')?.0);
    let with_port = || bare(word.split_once(':').filter(|(_, port)| !port.contains(':'))?.0);
    bare(word).or_else(in_brackets).or_else(with_port).map(|address| address.to_canonical())
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;

    fn peers() -> Peers {
        Peers {
            trusted: vec!["127.0.0.0/8".parse().unwrap(), "10.0.0.0/8".parse().unwrap()],
            header: "x-forwarded-for".into(),
            ipv6_prefix_bits: 64,
        }
    }

    fn client(socket: &str, values: &[&str]) -> String {
        let peers = peers();
        let found = peers.client(socket.parse().ok(), values.iter().map(|value| value.as_bytes()));
        let mut text = Vec::new();
        if let Some(address) = found {
            peers.write(address, &mut text);
        }
        String::from_utf8(text).unwrap()
    }

    #[test]
    fn only_trusted_proxies_speak_for_others() {
        assert_eq!(client("192.0.2.9", &["198.51.100.1"]), "192.0.2.9");
        assert_eq!(client("127.0.0.1", &["198.51.100.1"]), "198.51.100.1");
        assert_eq!(client("127.0.0.1", &[]), "127.0.0.1");
        assert_eq!(client("", &["198.51.100.1"]), "198.51.100.1");
    }

    #[test]
    fn what_a_client_sends_itself_is_never_reached() {
        assert_eq!(client("127.0.0.1", &["203.0.113.7, 198.51.100.1"]), "198.51.100.1");
        assert_eq!(client("127.0.0.1", &["203.0.113.7, 198.51.100.1, 10.1.2.3"]), "198.51.100.1");
        assert_eq!(client("127.0.0.1", &["203.0.113.7", "198.51.100.1"]), "198.51.100.1");
        assert_eq!(client("127.0.0.1", &["203.0.113.7, nonsense, 10.0.0.1"]), "10.0.0.1");
        assert_eq!(client("127.0.0.1", &["10.0.0.2, 10.0.0.1"]), "10.0.0.2");
    }

    #[test]
    fn addresses_are_read_as_proxies_write_them() {
        assert_eq!(client("127.0.0.1", &["198.51.100.1:4711"]), "198.51.100.1");
        assert_eq!(client("127.0.0.1", &["[2001:db8:1:2:3::4]:80"]), "2001:db8:1:2::/64");
        assert_eq!(client("::ffff:127.0.0.1", &["2001:db8:1:2:3::4"]), "2001:db8:1:2::/64");
        assert_eq!(client("127.0.0.1", &["::ffff:198.51.100.1"]), "198.51.100.1");
    }
}
