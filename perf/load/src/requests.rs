//! Requests as bytes, encoded before the run.
//!
//! A [`Batch`] is what one connection writes in one go: `depth` requests one after the other. All requests of a kind
//! have the same length, so that between two uses only the digits of the identities and the tokens of the probes are
//! written over in place. A batch needs no memory beyond its own, whatever the number of identities, and stays in the cache.
//!
//! A probe is `ECHO token` with a token that no other request of the run has. Its reply is the tail of its request:
//!
//! ```text
//!   *2\r\n$4\r\nECHO\r\n$21\r\n0007-0000000000000012\r\n
//!                      └──────────── reply ─────────────┘
//! ```

use crate::{
    args::{Args, Protocol},
    identities::{DIGITS, Identities, write_digits},
};

const PROBE_HEAD: &[u8] = b"*2\r\n$4\r\nECHO\r\n";
const PROBE_LENGTH: &[u8] = b"$21\r\n";
const TOKEN_BYTES: usize = 21;
const PROBE_REPLY_BYTES: usize = PROBE_LENGTH.len() + TOKEN_BYTES + 2;

/// One encoded request, and where its identity's digits are.
pub(crate) struct Template {
    bytes: Vec<u8>,
    digits_at: Option<usize>,
}

/// What one connection writes in one go.
pub(crate) struct Batch {
    bytes: Box<[u8]>,
    /// Where each request ends.
    ends: Vec<u32>,
    /// Where digits go.
    digits_at: Vec<u32>,
    probes: Vec<Probe>,
}

/// A request whose reply is known to the byte.
#[derive(Clone, Copy)]
struct Probe {
    /// Which request of the batch it is.
    index: u32,
    reply_at: u32,
}

impl Template {
    /// The request that the arguments describe.
    pub(crate) fn new(args: &Args) -> Self {
        let identity = format!("{}{:0DIGITS$}", args.identity_prefix, 0);
        let mut words: Vec<String> = Vec::new();
        let mut say = |word: &str| words.push(word.into());
        match args.protocol {
            Protocol::Check | Protocol::EchoBytes => {
                say("CHECK");
                if let Some(cost) = args.cost {
                    say("COST");
                    say(&cost.to_string());
                }
                for (name, value) in args.fixed_attributes() {
                    say(&name);
                    say(&value);
                }
                say(&args.identity_attr);
                say(&identity);
                return Self::encode(&words, Some(words.len() - 1));
            }
            Protocol::ClThrottle | Protocol::Throttle => {
                say(if args.protocol == Protocol::Throttle { "THROTTLE" } else { "CL.THROTTLE" });
                say(&identity);
                for number in [args.burst, args.count, args.period] {
                    say(&number.to_string());
                }
            }
            Protocol::Ping => {
                say("PING");
                return Self::encode(&words, None);
            }
            Protocol::Incr => {
                say("INCR");
                say(&identity);
            }
        }
        Self::encode(&words, Some(1))
    }

    fn encode(words: &[String], identity: Option<usize>) -> Self {
        let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
        let mut digits_at = None;
        for (index, word) in words.iter().enumerate() {
            bytes.extend_from_slice(format!("${}\r\n{word}\r\n", word.len()).as_bytes());
            if identity == Some(index) {
                digits_at = Some(bytes.len() - 2 - DIGITS);
            }
        }
        Self { bytes, digits_at }
    }
}

impl Batch {
    /// `depth` requests, those at `probes` (ascending) being probes.
    pub(crate) fn new(template: &Template, depth: u32, probes: &[u32]) -> Self {
        let mut bytes = Vec::new();
        let mut batch = Self { bytes: Box::default(), ends: Vec::new(), digits_at: Vec::new(), probes: Vec::new() };
        // Offsets have 32 bits: the deepest batch of the longest request that a server takes is far below 4 GiB.
        for index in 0..depth {
            if probes.contains(&index) {
                bytes.extend_from_slice(PROBE_HEAD);
                batch.probes.push(Probe { index, reply_at: bytes.len() as u32 });
                bytes.extend_from_slice(PROBE_LENGTH);
                bytes.extend_from_slice(&[b'0'; TOKEN_BYTES]);
                bytes.extend_from_slice(b"\r\n");
            } else {
                batch.digits_at.extend(template.digits_at.map(|at| (bytes.len() + at) as u32));
                bytes.extend_from_slice(&template.bytes);
            }
            batch.ends.push(bytes.len() as u32);
        }
        batch.bytes = bytes.into();
        batch
    }

    /// New identities and new tokens. Connection and `serial` make a token unique.
    pub(crate) fn renew(&mut self, identities: &mut Identities, connection: u16, serial: &mut u64) {
        for &at in &self.digits_at {
            let at = at as usize;
            if let Some(digits) = self.bytes[at..].first_chunk_mut() {
                write_digits(identities.draw(), digits);
            }
        }
        for probe in &self.probes {
            *serial += 1;
            let at = probe.reply_at as usize + PROBE_LENGTH.len();
            self.bytes[at..at + TOKEN_BYTES].copy_from_slice(format!("{connection:04x}-{serial:016x}").as_bytes());
        }
    }

    /// The bytes of the first `requests` requests.
    pub(crate) fn bytes(&self, requests: u32) -> &[u8] {
        match requests.checked_sub(1) {
            Some(last) => &self.bytes[..self.ends[last as usize] as usize],
            None => &[],
        }
    }

    /// How many requests end within the first `bytes` bytes.
    pub(crate) fn requests_in(&self, bytes: usize) -> u32 {
        // At most `len`. Requests without probes all have one length, which makes this a division.
        match self.ends.first() {
            Some(&first) if self.probes.is_empty() => (bytes / first as usize) as u32,
            _ => self.ends.iter().take_while(|&&end| end as usize <= bytes).count() as u32,
        }
    }

    /// Requests in the batch, probes included.
    pub(crate) fn len(&self) -> u32 {
        // Made from a 32-bit depth.
        self.ends.len() as u32
    }

    /// Probes in the batch.
    pub(crate) fn probes(&self) -> u32 {
        // At most `len`.
        self.probes.len() as u32
    }

    /// Which request the probe with this number is; `u32::MAX` if there is no such probe.
    pub(crate) fn probe_index(&self, number: usize) -> u32 {
        self.probes.get(number).map_or(u32::MAX, |probe| probe.index)
    }

    /// The reply to the probe with this number.
    pub(crate) fn probe_reply(&self, number: usize) -> &[u8] {
        self.probes.get(number).map_or(&[], |probe| {
            let at = probe.reply_at as usize;
            &self.bytes[at..at + PROBE_REPLY_BYTES]
        })
    }
}

/// Where a batch of `depth` has its probes if one request in about `every` is one, and every how many batches.
pub(crate) fn probe_plan(depth: u32, every: u32) -> (Vec<u32>, u64) {
    if every == 0 {
        (Vec::new(), u64::MAX)
    } else if depth >= every {
        ((every - 1..depth).step_by(every as usize).collect(), 1)
    } else {
        (vec![depth / 2], u64::from(every / depth))
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::Distribution;

    fn template(args: &[&str]) -> Template {
        Template::new(&Args::parse_from([&["sluice-load"], args].concat()))
    }

    fn counting() -> Identities {
        Identities::new(Distribution::Sequential, 1.0, 1000, 0, 1, 1)
    }

    #[test]
    fn each_protocol_encodes_its_request() {
        let cases: [(&[&str], &str); 6] = [
            (
                &[],
                "*7\r\n$5\r\nCHECK\r\n$4\r\npath\r\n$9\r\n/v1/login\r\n$6\r\nmethod\r\n$4\r\nPOST\r\n$3\r\nkey\r\n$11\r\nak_00000000\r\n",
            ),
            (
                &["--cost", "3", "--attr", "a=b", "--identity-attr", "ip", "--identity-prefix", "1."],
                "*7\r\n$5\r\nCHECK\r\n$4\r\nCOST\r\n$1\r\n3\r\n$1\r\na\r\n$1\r\nb\r\n$2\r\nip\r\n$10\r\n1.00000000\r\n",
            ),
            (
                &["--protocol", "cl-throttle", "--burst", "15", "--count", "30", "--period", "60"],
                "*5\r\n$11\r\nCL.THROTTLE\r\n$11\r\nak_00000000\r\n$2\r\n15\r\n$2\r\n30\r\n$2\r\n60\r\n",
            ),
            (
                &["--protocol", "throttle"],
                "*5\r\n$8\r\nTHROTTLE\r\n$11\r\nak_00000000\r\n$4\r\n1000\r\n$4\r\n1000\r\n$1\r\n1\r\n",
            ),
            (&["--protocol", "ping"], "*1\r\n$4\r\nPING\r\n"),
            (&["--protocol", "incr"], "*2\r\n$4\r\nINCR\r\n$11\r\nak_00000000\r\n"),
        ];
        for (args, expected) in cases {
            assert_eq!(String::from_utf8_lossy(&template(args).bytes), expected);
        }
    }

    #[test]
    fn renewing_writes_identities_and_tokens_in_place() {
        let mut batch = Batch::new(&template(&["--protocol", "incr"]), 3, &[1]);
        let (mut identities, mut serial) = (counting(), 0x10);
        let len = batch.bytes(3).len();
        batch.renew(&mut identities, 7, &mut serial);
        batch.renew(&mut identities, 7, &mut serial);
        let incr = |digits: &str| format!("*2\r\n$4\r\nINCR\r\n$11\r\nak_{digits}\r\n");
        let echo = "*2\r\n$4\r\nECHO\r\n$21\r\n0007-0000000000000012\r\n";
        let expected = [&incr("00000002"), echo, &incr("00000003")].concat();
        assert_eq!(String::from_utf8_lossy(batch.bytes(3)), expected);
        assert_eq!(batch.bytes(3).len(), len);
        assert_eq!(String::from_utf8_lossy(batch.bytes(1)), incr("00000002"));
        assert_eq!(batch.bytes(0), b"");
        assert_eq!((batch.probe_index(0), batch.probe_index(1)), (1, u32::MAX));
        assert_eq!(batch.probe_reply(0), b"$21\r\n0007-0000000000000012\r\n");
    }

    #[test]
    fn probes_keep_their_distance() {
        assert_eq!(probe_plan(100, 0), (vec![], u64::MAX));
        assert_eq!(probe_plan(100, 64), (vec![63], 1));
        assert_eq!(probe_plan(130, 64), (vec![63, 127], 1));
        assert_eq!(probe_plan(16, 64), (vec![8], 4));
        assert_eq!(probe_plan(1, 64), (vec![0], 64));
        assert_eq!(probe_plan(1, 1), (vec![0], 1));
    }
}
