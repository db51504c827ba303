//! Every command that is not on the hot path: what clients say when they connect, and what people type.

use super::{ConnId, Engine};
use crate::{
    limits::CLIENT_NAME_BYTES_MAX,
    resp::{
        command::{self, CommandError, Dialect, excerpt, number},
        reply,
    },
    secret::same_secret,
};

/// A command as COMMAND describes it.
struct Entry {
    name: &'static str,
    /// Words with the name; negative means at least.
    arity: i64,
    summary: &'static str,
}

/// All commands, by name.
const COMMANDS: &[Entry] = &[
    Entry { name: "auth", arity: -2, summary: "Authenticates the connection" },
    Entry { name: "check", arity: -1, summary: "CHECK [COST n] name value ...: may this request pass?" },
    Entry { name: "cl.throttle", arity: -5, summary: "CL.THROTTLE key max_burst count period [quantity] (redis-cell)" },
    Entry { name: "client", arity: -2, summary: "Names the connection and tells about it" },
    Entry { name: "command", arity: -1, summary: "Describes the commands" },
    Entry { name: "echo", arity: 2, summary: "Returns its word" },
    Entry { name: "hello", arity: -1, summary: "Agrees on the protocol version" },
    Entry { name: "info", arity: -1, summary: "Tells about the server" },
    Entry { name: "ping", arity: -1, summary: "Returns PONG, or its word" },
    Entry { name: "quit", arity: -1, summary: "Closes the connection" },
    Entry { name: "reset", arity: 1, summary: "Forgets what the connection agreed on" },
    Entry { name: "select", arity: 2, summary: "SELECT 0: there is one database" },
    Entry { name: "throttle", arity: -5, summary: "THROTTLE key max_burst count period [quantity] (throttlecrab)" },
];

/// The longest command name, so that a lower-cased copy fits the stack.
const COMMAND_BYTES_MAX: usize = 16;

impl Engine {
    /// Carries out one request with at least one word; an empty line is nothing.
    pub(super) fn execute(&mut self, conn: ConnId, args: &[&[u8]]) {
        let Some((&name, words)) = args.split_first() else {
            return;
        };
        if let Err(error) = self.try_execute(conn, name, words) {
            self.fail(conn, &error);
        }
    }

    fn try_execute(&mut self, conn: ConnId, name: &[u8], words: &[&[u8]]) -> Result<(), CommandError> {
        let unknown = || CommandError::Unknown(excerpt(name));
        if name.len() > COMMAND_BYTES_MAX {
            return Err(unknown());
        }
        let mut lower = [0; COMMAND_BYTES_MAX];
        lower[..name.len()].copy_from_slice(name);
        let lower = &mut lower[..name.len()];
        lower.make_ascii_lowercase();
        let open_to_all = matches!(&*lower, b"auth" | b"hello" | b"quit" | b"reset");
        if !open_to_all && !self.sessions[conn.index()].authenticated {
            return Err(CommandError::Auth("NOAUTH Authentication required."));
        }
        match &*lower {
            b"check" => self.check(conn, words),
            b"cl.throttle" => {
                let call = command::throttle(Dialect::RedisCell, words)?;
                self.throttle(conn, Dialect::RedisCell, &call);
                Ok(())
            }
            b"throttle" => {
                let call = command::throttle(Dialect::Throttlecrab, words)?;
                self.throttle(conn, Dialect::Throttlecrab, &call);
                Ok(())
            }
            b"ping" => match words {
                [] => self.say(conn, |out| reply::simple("PONG", out)),
                [word] => self.say(conn, |out| reply::bulk(word, out)),
                _ => Err(CommandError::Arity("ping")),
            },
            b"echo" => match words {
                [word] => self.say(conn, |out| reply::bulk(word, out)),
                _ => Err(CommandError::Arity("echo")),
            },
            b"hello" => self.hello(conn, words),
            b"auth" => match words {
                [password] => self.auth(conn, b"default", password),
                [user, password] => self.auth(conn, user, password),
                _ => Err(CommandError::Arity("auth")),
            }
            .and_then(|()| self.ok(conn)),
            b"client" => self.client(conn, words),
            b"command" => self.command(conn, words),
            b"info" => {
                let text = self.facts.info();
                self.say(conn, |out| reply::bulk(text.as_bytes(), out))
            }
            b"select" => match words {
                [index] if number::<u32>("DB index", index)? == 0 => self.ok(conn),
                [_] => Err(CommandError::Database),
                _ => Err(CommandError::Arity("select")),
            },
            b"quit" => {
                self.ok(conn)?;
                self.sessions[conn.index()].closing = true;
                Ok(())
            }
            b"reset" => {
                let needs_password = self.settings.password.is_some();
                let session = &mut self.sessions[conn.index()];
                session.resp3 = false;
                session.name.clear();
                session.authenticated = !needs_password;
                self.say(conn, |out| reply::simple("RESET", out))
            }
            _ => Err(unknown()),
        }
    }

    fn say(&mut self, conn: ConnId, write: impl FnOnce(&mut Vec<u8>)) -> Result<(), CommandError> {
        self.reply(conn, write);
        Ok(())
    }

    fn ok(&mut self, conn: ConnId) -> Result<(), CommandError> {
        self.say(conn, |out| reply::simple("OK", out))
    }

    fn auth(&mut self, conn: ConnId, user: &[u8], password: &[u8]) -> Result<(), CommandError> {
        let Some(expected) = &self.settings.password else {
            return Err(CommandError::Auth(
                "ERR AUTH called without any password configured. Set resp.password_file to require one.",
            ));
        };
        if user == b"default" && same_secret(expected.as_bytes(), password) {
            self.sessions[conn.index()].authenticated = true;
            Ok(())
        } else {
            Err(CommandError::Auth("WRONGPASS invalid username-password pair or user is disabled."))
        }
    }

    /// HELLO [version [AUTH user password] [SETNAME name]]
    fn hello(&mut self, conn: ConnId, words: &[&[u8]]) -> Result<(), CommandError> {
        let (version, mut options) = match words {
            [] => (None, words),
            [version, options @ ..] => (Some(number::<u32>("protocol version", version)?), options),
        };
        if !matches!(version, None | Some(2 | 3)) {
            return Err(CommandError::Protocol);
        }
        let mut name = None;
        loop {
            options = match options {
                [] => break,
                [word, user, password, rest @ ..] if word.eq_ignore_ascii_case(b"auth") => {
                    self.auth(conn, user, password)?;
                    rest
                }
                [word, given, rest @ ..] if word.eq_ignore_ascii_case(b"setname") => {
                    name = Some(client_name(given)?);
                    rest
                }
                _ => return Err(CommandError::Syntax("HELLO")),
            };
        }
        let session = &mut self.sessions[conn.index()];
        if !session.authenticated {
            return Err(CommandError::Auth(
                "NOAUTH HELLO must be called with the client already authenticated, otherwise the HELLO <proto> AUTH \
                 <user> <pass> option can be used to authenticate the client and select the RESP protocol version at \
                 the same time",
            ));
        }
        session.resp3 = version.map_or(session.resp3, |version| version == 3);
        if let Some(name) = name {
            session.name = name.to_vec();
        }
        let (resp3, id) = (session.resp3, session.id);
        self.say(conn, |out| {
            reply::map(7, resp3, out);
            for (key, value) in [
                ("server", "sluice"),
                ("version", env!("CARGO_PKG_VERSION")),
                ("mode", "standalone"),
                ("role", "master"),
            ] {
                reply::bulk(key.as_bytes(), out);
                reply::bulk(value.as_bytes(), out);
            }
            reply::bulk(b"proto", out);
            reply::integer(if resp3 { 3 } else { 2 }, out);
            reply::bulk(b"id", out);
            reply::integer(i64::try_from(id).unwrap_or(i64::MAX), out);
            reply::bulk(b"modules", out);
            reply::array(0, out);
        })
    }

    fn client(&mut self, conn: ConnId, words: &[&[u8]]) -> Result<(), CommandError> {
        let (&subcommand, words) = words.split_first().ok_or(CommandError::Arity("client"))?;
        let session = &mut self.sessions[conn.index()];
        match (&*subcommand.to_ascii_lowercase(), words) {
            (b"setname", [name]) => {
                session.name = client_name(name)?.to_vec();
                self.ok(conn)
            }
            (b"getname", []) => {
                let (name, resp3) = (session.name.clone(), session.resp3);
                self.say(conn, |out| {
                    if name.is_empty() {
                        reply::null(resp3, out);
                    } else {
                        reply::bulk(&name, out);
                    }
                })
            }
            (b"id", []) => {
                let id = session.id;
                self.say(conn, |out| reply::integer(i64::try_from(id).unwrap_or(i64::MAX), out))
            }
            (b"info" | b"list", []) => {
                let protocol = if session.resp3 { 3 } else { 2 };
                let name = String::from_utf8_lossy(&session.name);
                let line = format!("id={} name={name} db=0 resp={protocol}\n", session.id);
                self.say(conn, |out| reply::bulk(line.as_bytes(), out))
            }
            // What a library calls itself is of no use here, but clients send it without asking.
            (b"setinfo", [_, _]) | (b"no-evict" | b"no-touch", [_]) => self.ok(conn),
            (b"setname" | b"getname" | b"id" | b"info" | b"list" | b"setinfo" | b"no-evict" | b"no-touch", _) => {
                Err(CommandError::Arity("client"))
            }
            _ => Err(CommandError::UnknownSubcommand { command: "CLIENT", subcommand: excerpt(subcommand) }),
        }
    }

    fn command(&mut self, conn: ConnId, words: &[&[u8]]) -> Result<(), CommandError> {
        let Some((&subcommand, names)) = words.split_first() else {
            return self.say(conn, |out| {
                reply::array(COMMANDS.len(), out);
                COMMANDS.iter().for_each(|entry| describe(entry, out));
            });
        };
        let resp3 = self.sessions[conn.index()].resp3;
        match &*subcommand.to_ascii_lowercase() {
            b"count" => self.say(conn, |out| reply::integer(i64::try_from(COMMANDS.len()).unwrap_or(i64::MAX), out)),
            b"docs" => self.say(conn, |out| {
                let wanted = |entry: &&Entry| names.is_empty() || names.iter().any(|name| is_named(entry, name));
                reply::map(COMMANDS.iter().filter(wanted).count(), resp3, out);
                for entry in COMMANDS.iter().filter(wanted) {
                    reply::bulk(entry.name.as_bytes(), out);
                    reply::map(2, resp3, out);
                    for (key, value) in [("summary", entry.summary), ("since", "0.1.0")] {
                        reply::bulk(key.as_bytes(), out);
                        reply::bulk(value.as_bytes(), out);
                    }
                }
            }),
            b"list" => self.say(conn, |out| {
                reply::array(COMMANDS.len(), out);
                COMMANDS.iter().for_each(|entry| reply::bulk(entry.name.as_bytes(), out));
            }),
            b"info" => self.say(conn, |out| {
                reply::array(names.len(), out);
                for name in names {
                    match COMMANDS.iter().find(|entry| is_named(entry, name)) {
                        Some(entry) => describe(entry, out),
                        None => reply::null(resp3, out),
                    }
                }
            }),
            _ => Err(CommandError::UnknownSubcommand { command: "COMMAND", subcommand: excerpt(subcommand) }),
        }
    }
}

fn is_named(entry: &Entry, name: &[u8]) -> bool {
    entry.name.as_bytes().eq_ignore_ascii_case(name)
}

/// Name, arity, flags, and the positions of keys: none of the commands has a key in Redis Cluster's sense.
fn describe(entry: &Entry, out: &mut Vec<u8>) {
    reply::array(6, out);
    reply::bulk(entry.name.as_bytes(), out);
    reply::integer(entry.arity, out);
    reply::array(1, out);
    reply::simple("fast", out);
    for _ in 0..3 {
        reply::integer(0, out);
    }
}

fn client_name(name: &[u8]) -> Result<&[u8], CommandError> {
    if name.len() <= CLIENT_NAME_BYTES_MAX && name.iter().all(u8::is_ascii_graphic) {
        Ok(name)
    } else {
        Err(CommandError::ClientName)
    }
}
