//! HTTP as a client that sends exactly what it is told.

use std::{
    io::{ErrorKind, Read, Write},
    net::{SocketAddr, TcpStream},
};

use serde_json::Value;

use crate::PATIENCE;

/// A connection.
pub struct Http {
    stream: TcpStream,
    /// What has come and was not asked for yet.
    came: Vec<u8>,
}

/// An answer.
#[derive(Debug)]
pub struct Answer {
    /// Its status.
    pub status: u16,
    /// Its head, a line each.
    pub head: String,
    /// Its body.
    pub body: String,
}

impl Answer {
    /// The value of a header.
    pub fn header(&self, name: &str) -> Option<&str> {
        let pair = |line: &'_ str| line.split_once(':').map(|(key, _)| key.eq_ignore_ascii_case(name));
        let line = self.head.lines().find(|line| pair(line) == Some(true))?;
        line.split_once(':').map(|(_, value)| value.trim())
    }

    /// The body, which is JSON.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

impl Http {
    /// A new connection.
    pub fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).expect("connecting");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        stream.set_nodelay(true).expect("no delay");
        Self { stream, came: Vec::new() }
    }

    /// Sends bytes.
    pub fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).expect("sending");
    }

    /// Sends bytes that the server need not take.
    pub fn try_send(&mut self, bytes: &[u8]) {
        let _ = self.stream.write_all(bytes);
    }

    /// Sends a request and waits for its answer.
    pub fn ask(&mut self, method: &str, target: &str, headers: &[(&str, &str)], body: &str) -> Answer {
        self.send(request(method, target, headers, body).as_bytes());
        self.answer().unwrap_or_else(|| panic!("the connection was closed instead of an answer to {method} {target}"))
    }

    /// One check by its JSON.
    pub fn check(&mut self, body: &str) -> Answer {
        self.ask("POST", "/v1/check", &[], body)
    }

    /// The next answer; `None` at the end.
    pub fn answer(&mut self) -> Option<Answer> {
        let head_end = loop {
            if let Some(at) = self.came.windows(4).position(|four| four == b"\r\n\r\n") {
                break at;
            }
            if !self.more() {
                return None;
            }
        };
        let head = String::from_utf8(self.came[..head_end].to_vec()).expect("a head").replace("\r\n", "\n");
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
        let mut answer = Answer { status, head, body: String::new() };
        let len: usize = answer.header("content-length").and_then(|len| len.parse().ok()).unwrap_or(0);
        while self.came.len() < head_end + 4 + len {
            if !self.more() {
                return None;
            }
        }
        answer.body = String::from_utf8(self.came[head_end + 4..head_end + 4 + len].to_vec()).expect("a body");
        self.came.drain(..head_end + 4 + len);
        Some(answer)
    }

    /// Reads more; false at the end.
    fn more(&mut self) -> bool {
        let mut bytes = [0; 16 * 1024];
        match self.stream.read(&mut bytes) {
            Ok(len) => {
                self.came.extend_from_slice(&bytes[..len]);
                len > 0
            }
            Err(error) if matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe) => false,
            Err(error) => panic!("reading: {error}"),
        }
    }

    /// Waits until the server closes; returns what came before.
    pub fn until_closed(mut self) -> String {
        while self.more() {}
        String::from_utf8_lossy(&self.came).into_owned()
    }
}

/// A request as bytes.
pub fn request(method: &str, target: &str, headers: &[(&str, &str)], body: &str) -> String {
    let mut request = format!("{method} {target} HTTP/1.1\r\nhost: sluice\r\n");
    headers.iter().for_each(|(name, value)| request.push_str(&format!("{name}: {value}\r\n")));
    request.push_str(&format!("content-length: {}\r\n\r\n{body}", body.len()));
    request
}
