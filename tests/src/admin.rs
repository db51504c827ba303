//! The admin API in its own process on a free port, in front of a policy store that its own `migrate` made, and its commands.

use std::{
    io::{BufRead, BufReader, Write},
    net::{SocketAddr, TcpStream},
    process::{Child, Command, Output, Stdio},
};

use serde_json::Value;

use crate::{admin_binary, postgres::Postgres};

/// A running admin API with a token that may write and one that may read. Killed when dropped.
pub struct Admin {
    child: Child,
    /// Where it serves.
    pub address: SocketAddr,
    /// May change the policy; its name is `alice`.
    pub writer: String,
    /// May only read; its name is `bob`.
    pub reader: String,
}

/// What the API says.
#[derive(Debug)]
pub struct Answer {
    /// The status.
    pub status: u16,
    /// The headers, as they came.
    pub headers: String,
    /// The body.
    pub text: String,
}

impl Answer {
    /// The body as JSON.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// The ETag.
    pub fn etag(&self) -> String {
        let line = self.headers.lines().find_map(|line| line.strip_prefix("etag: "));
        line.unwrap_or_else(|| panic!("no ETag: {self:?}")).to_owned()
    }

    /// The kind of problem that it tells.
    pub fn problem(&self) -> String {
        assert!(self.headers.contains("content-type: application/problem+json"), "{self:?}");
        let kind = self.json()["type"].as_str().expect("a kind").to_owned();
        kind.trim_start_matches("/problems/").to_owned()
    }
}

/// Runs one of the commands that speak to PostgreSQL.
pub fn command(arguments: &[&str]) -> Output {
    Command::new(admin_binary()).args(arguments).output().expect("running sluice-admin")
}

/// What a command prints, which must work.
pub fn printed(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).expect("UTF-8")
}

impl Admin {
    /// Starts it with these further arguments, on the store of [`Postgres::with_store`]. It logs in as `admin`, who may do
    /// no more than the role for it.
    pub fn start(postgres: &Postgres, arguments: &[&str]) -> Self {
        let owner = postgres.url();
        let token = |arguments: &[&str]| {
            let all = [&["token", "create"], arguments, &["--postgres", &owner]].concat();
            printed(&command(&all)).trim().to_owned()
        };
        let (writer, reader) = (token(&["alice", "--write"]), token(&["bob"]));
        postgres.sql("CREATE ROLE admin LOGIN IN ROLE sluice_admin");
        let url = postgres.url().replace("postgres@", "admin@");
        Self::serve(&url, arguments, writer, reader)
    }

    fn serve(url: &str, arguments: &[&str], writer: String, reader: String) -> Self {
        let mut serve = Command::new(admin_binary());
        serve.args(["serve", "--listen", "127.0.0.1:0", "--postgres", url]).args(arguments).stdout(Stdio::piped());
        let mut child = serve.spawn().expect("starting sluice-admin");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("stdout is piped")).read_line(&mut line).expect("reading");
        let address = line.split("http://").nth(1).and_then(|rest| rest.split(',').next()?.parse().ok());
        let address = address.unwrap_or_else(|| panic!("sluice-admin says {line:?}"));
        Self { child, address, writer, reader }
    }

    /// Asks it as whoever may write; `If-Match` and the like are in `headers`.
    pub fn ask(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Answer {
        self.ask_as(Some(&self.writer), method, path, headers, body)
    }

    /// Asks it for what is there.
    pub fn get(&self, path: &str) -> Answer {
        self.ask("GET", path, &[], "")
    }

    /// Asks it with this token, or none.
    pub fn ask_as(
        &self,
        token: Option<&str>,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> Answer {
        let mut request = format!("{method} {path} HTTP/1.1\r\nhost: admin\r\nconnection: close\r\n");
        request.push_str(&token.map(|token| format!("authorization: Bearer {token}\r\n")).unwrap_or_default());
        headers.iter().for_each(|(name, value)| request.push_str(&format!("{name}: {value}\r\n")));
        request.push_str(&format!("content-length: {}\r\n\r\n{body}", body.len()));
        let text = self.raw(request.as_bytes());
        let (head, text) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {text:?}"));
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
        Answer { status, headers: head.replace("\r\n", "\n"), text: text.to_owned() }
    }

    /// Sends bytes and reads until the end.
    pub fn raw(&self, bytes: &[u8]) -> String {
        let mut stream = TcpStream::connect(self.address).expect("connecting");
        stream.set_read_timeout(Some(crate::PATIENCE)).expect("setting a timeout");
        // It may answer before it has read everything.
        let _ = stream.write_all(bytes);
        let mut answer = Vec::new();
        let _ = std::io::Read::read_to_end(&mut stream, &mut answer);
        String::from_utf8_lossy(&answer).into_owned()
    }

    /// Runs a command that asks it.
    pub fn command(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(admin_binary());
        command.args(arguments).env("SLUICE_ADMIN_URL", format!("http://{}", self.address));
        command.env("SLUICE_ADMIN_TOKEN", &self.writer).output().expect("running sluice-admin")
    }

    /// What a command prints, which must work.
    pub fn printed(&self, arguments: &[&str]) -> String {
        printed(&self.command(arguments))
    }
}

impl Drop for Admin {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
