//! One connection without its socket: bytes that arrived in, bytes to send out.
//!
//! ```text
//!   question for TLS ─► start-up, authentication ─► ready ⇄ one query ─► …
//! ```
//!
//! Messages are read by postgres-protocol; before that their length is held against the bounds, so that an announcement
//! of gigabytes costs nothing. What comes at a time at which it cannot come ends the connection with an error that says so.

use std::{collections::VecDeque, mem};

use bytes::BytesMut;
use fallible_iterator::FallibleIterator;
use postgres_protocol::{
    IsNull,
    authentication::{
        md5_hash,
        sasl::{ChannelBinding, SCRAM_SHA_256, ScramSha256},
    },
    message::{
        backend::{DataRowBody, ErrorFields, Message, RowDescriptionBody},
        frontend,
    },
};

use super::{
    config::{Config, Host, Secret, SslMode},
    error::{Error, ProtocolError, RequestError, ServerError, bounded},
    limits::{CHANNEL_BYTES_MAX, Limits, PARAMS_MAX, SHORT_MESSAGE_BYTES_MAX},
    rows::{Column, Rows},
    tls::{Tls, TlsSettings},
};

/// What somebody told all who LISTEN.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notification {
    /// The channel.
    pub channel: String,
    /// What was said.
    pub payload: String,
    /// The server's process for whoever said it.
    pub process_id: i32,
}

/// What a second connection needs to stop this one's query.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct CancelKey {
    process_id: i32,
    secret: i32,
}

impl CancelKey {
    /// The whole of what such a connection says.
    pub fn request(self) -> Vec<u8> {
        let mut buffer = BytesMut::new();
        frontend::cancel_request(self.process_id, self.secret, &mut buffer);
        buffer.to_vec()
    }
}

impl std::fmt::Debug for CancelKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CancelKey").field("process_id", &self.process_id).finish_non_exhaustive()
    }
}

/// How far a connection is.
#[derive(Debug)]
enum State {
    /// It was asked whether the server has TLS.
    AskedForTls,
    /// The TLS handshake is going on.
    Handshake,
    /// Who we are is being settled.
    Startup(Authentication),
    /// Nothing is asked.
    Ready,
    /// A query is on its way.
    Busy(Answer),
    /// It ended with an error.
    Broken,
}

/// How far authentication is.
enum Authentication {
    /// The server has not said what it wants.
    Open,
    /// Our first word of SCRAM is sent.
    ScramFirst(ScramSha256),
    /// Our last word of SCRAM is sent.
    ScramLast(ScramSha256),
    /// The server has proved that it knows the password, or was shown one in another way.
    Shown,
    /// The server let us in.
    Done,
}

impl std::fmt::Debug for Authentication {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Open => "Open",
            Self::ScramFirst(_) => "ScramFirst",
            Self::ScramLast(_) => "ScramLast",
            Self::Shown => "Shown",
            Self::Done => "Done",
        })
    }
}

/// What has come of a query.
#[derive(Debug, Default)]
struct Answer {
    rows: Rows,
    refusal: Option<Box<ServerError>>,
    is_described: bool,
    is_complete: bool,
}

/// One connection, without its socket.
#[derive(Debug)]
pub struct Session {
    state: State,
    user: String,
    password: Option<Secret>,
    database: String,
    application_name: String,
    limits: Limits,
    tls_settings: Option<TlsSettings>,
    tls: Option<Tls>,
    mode: SslMode,
    /// Whether the way to the server is safe for a password in clear text.
    clear_text_is_safe: bool,
    /// What arrived, decrypted.
    input: BytesMut,
    /// What is to be sent, encrypted.
    output: Vec<u8>,
    notifications: VecDeque<Notification>,
    notifications_dropped: u64,
    cancel_key: Option<CancelKey>,
    server_version: String,
    result: Option<Result<Rows, Error>>,
}

impl Session {
    /// A connection that was just opened. `tls` is what [`TlsSettings::read`] gave for the same settings.
    pub fn new(config: &Config, tls: Option<TlsSettings>) -> Self {
        let mut session = Self {
            state: State::AskedForTls,
            user: config.user.clone(),
            password: config.password.clone(),
            database: config.database.clone(),
            application_name: config.application_name.clone(),
            limits: config.limits.clamped(),
            tls_settings: tls,
            tls: None,
            mode: config.ssl_mode,
            clear_text_is_safe: config.allow_clear_text || matches!(config.host, Host::Unix { .. }),
            input: BytesMut::new(),
            output: Vec::new(),
            notifications: VecDeque::new(),
            notifications_dropped: 0,
            cancel_key: None,
            server_version: String::new(),
            result: None,
        };
        if session.tls_settings.is_some() {
            let mut buffer = BytesMut::new();
            frontend::ssl_request(&mut buffer);
            session.output.extend_from_slice(&buffer);
        } else {
            // Nothing can be wrong with it without TLS.
            let _ = session.start_up();
        }
        session
    }

    /// Whether a query can be asked.
    pub fn is_ready(&self) -> bool {
        matches!(self.state, State::Ready)
    }

    /// Whether it ended with an error.
    pub fn is_broken(&self) -> bool {
        matches!(self.state, State::Broken)
    }

    /// What is to be sent; it is taken by this.
    pub fn take_output(&mut self) -> Vec<u8> {
        mem::take(&mut self.output)
    }

    /// What stops this connection's query, once the server has said it.
    pub fn cancel_key(&self) -> Option<CancelKey> {
        self.cancel_key
    }

    /// The server's version, as it says it; empty before it did.
    pub fn server_version(&self) -> &str {
        &self.server_version
    }

    /// The oldest notification that was not taken yet.
    pub fn next_notification(&mut self) -> Option<Notification> {
        self.notifications.pop_front()
    }

    /// Notifications that were dropped for newer ones.
    pub fn notifications_dropped(&self) -> u64 {
        self.notifications_dropped
    }

    /// The result of the query, when it is there; it is taken by this.
    pub fn take_result(&mut self) -> Option<Result<Rows, Error>> {
        self.result.take()
    }

    /// Nothing more can be done with it: the socket is gone, or somebody gave up waiting.
    pub fn break_off(&mut self) {
        self.state = State::Broken;
        self.input = BytesMut::new();
    }

    /// Asks a query. Parameters and results are texts; `None` is NULL.
    ///
    /// # Errors
    ///
    /// When it cannot be sent as it is, or the connection is not ready for it.
    pub fn query(&mut self, sql: &str, params: &[Option<&str>]) -> Result<(), Error> {
        if !self.is_ready() {
            return Err(Error::Broken);
        }
        if params.len() > PARAMS_MAX {
            return Err(RequestError::Params(params.len()).into());
        }
        let bytes = sql.len() + params.iter().flatten().map(|param| param.len() + 4).sum::<usize>();
        if bytes > self.limits.request_bytes_max {
            return Err(RequestError::Bytes { max: self.limits.request_bytes_max }.into());
        }
        if sql.contains('\0') || params.iter().flatten().any(|param| param.contains('\0')) {
            return Err(RequestError::Nul.into());
        }
        let mut buffer = BytesMut::new();
        let put = |param: &Option<&str>, buffer: &mut BytesMut| match param {
            Some(text) => {
                buffer.extend_from_slice(text.as_bytes());
                Ok(IsNull::No)
            }
            None => Ok(IsNull::Yes),
        };
        // What could be wrong with them was looked at above.
        let nul = |_| Error::from(RequestError::Nul);
        frontend::parse("", sql, [], &mut buffer).map_err(nul)?;
        frontend::bind("", "", [], params, put, [], &mut buffer).map_err(|_| Error::from(RequestError::Nul))?;
        frontend::describe(b'P', "", &mut buffer).map_err(nul)?;
        frontend::execute("", 0, &mut buffer).map_err(nul)?;
        frontend::sync(&mut buffer);
        self.result = None;
        self.state = State::Busy(Answer::default());
        self.send(&buffer)
    }

    /// The statement that listens to a channel.
    ///
    /// # Errors
    ///
    /// When no channel has that name.
    pub fn listen_statement(channel: &str) -> Result<String, Error> {
        if channel.is_empty() || channel.len() > CHANNEL_BYTES_MAX {
            return Err(RequestError::Channel(channel.len()).into());
        }
        Ok(format!("LISTEN \"{}\"", channel.replace('"', "\"\"")))
    }

    /// Bytes arrived.
    ///
    /// # Errors
    ///
    /// What ends the connection. What the server says of a query is its result.
    pub fn received(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let outcome = self.take_in(bytes);
        if outcome.is_err() {
            self.break_off();
        }
        outcome
    }

    fn take_in(&mut self, bytes: &[u8]) -> Result<(), Error> {
        match (&self.state, &mut self.tls) {
            (State::Broken, _) => return Err(Error::Broken),
            (State::AskedForTls, _) => return self.answered_tls(bytes),
            (_, Some(tls)) => {
                let input = &mut self.input;
                tls.decrypt(bytes, &mut self.output, &mut |plain| input.extend_from_slice(plain))
                    .map_err(Error::Tls)?;
                if matches!(self.state, State::Handshake) && !tls.is_handshaking() {
                    self.clear_text_is_safe = true;
                    self.start_up()?;
                }
            }
            (_, None) => self.input.extend_from_slice(bytes),
        }
        while let Some(message) = self.next_message()? {
            self.message(message)?;
        }
        Ok(())
    }

    fn answered_tls(&mut self, bytes: &[u8]) -> Result<(), Error> {
        match (bytes, &self.tls_settings) {
            ([], _) => Ok(()),
            ([b'S'], Some(settings)) => {
                let tls = self.tls.insert(settings.connect().map_err(Error::Tls)?);
                self.state = State::Handshake;
                tls.flush(&mut self.output).map_err(Error::Tls)
            }
            ([b'S', ..], _) => Err(ProtocolError::BytesBeforeTls.into()),
            ([b'N', rest @ ..], _) => {
                if self.mode != SslMode::Prefer {
                    return Err(Error::NoTls { mode: self.mode.name() });
                }
                self.start_up()?;
                if rest.is_empty() { Ok(()) } else { self.take_in(rest) }
            }
            // A server that is at its limits may refuse before it knows what was asked.
            ([b'E', ..], _) => {
                self.state = State::Startup(Authentication::Open);
                self.take_in(bytes)
            }
            ([other, ..], _) => Err(ProtocolError::TlsAnswer(*other).into()),
        }
    }

    fn start_up(&mut self) -> Result<(), Error> {
        let mut buffer = BytesMut::new();
        let parameters = [
            ("user", self.user.as_str()),
            ("database", &self.database),
            ("application_name", &self.application_name),
            ("client_encoding", "UTF8"),
            ("DateStyle", "ISO"),
        ];
        frontend::startup_message(parameters, &mut buffer).map_err(|_| Error::from(RequestError::Nul))?;
        self.state = State::Startup(Authentication::Open);
        self.send(&buffer)
    }

    fn send(&mut self, bytes: &[u8]) -> Result<(), Error> {
        match &mut self.tls {
            Some(tls) => tls.encrypt(bytes, &mut self.output).map_err(Error::Tls),
            None => {
                self.output.extend_from_slice(bytes);
                Ok(())
            }
        }
    }

    /// What the connection is doing, for errors.
    fn doing(&self) -> &'static str {
        match self.state {
            State::AskedForTls | State::Handshake => "TLS was being agreed on",
            State::Startup(_) => "logging in",
            State::Ready => "nothing was asked",
            State::Busy(_) => "answering a query",
            State::Broken => "ended",
        }
    }

    fn next_message(&mut self) -> Result<Option<Message>, Error> {
        let [tag, a, b, c, d, ..] = self.input[..] else { return Ok(None) };
        let bytes = u64::from(u32::from_be_bytes([a, b, c, d]));
        let is_long = matches!(tag, b'D' | b'T') && matches!(self.state, State::Busy(_));
        let max = if is_long { self.limits.message_bytes_max } else { SHORT_MESSAGE_BYTES_MAX };
        if bytes < 4 || bytes > max as u64 {
            return Err(ProtocolError::Length { tag, bytes, max }.into());
        }
        if (self.input.len() as u64) <= bytes {
            // One more byte than it says, for the type.
            let missing = bytes as usize + 1 - self.input.len();
            self.input.reserve(missing.min(1 << 20));
            return Ok(None);
        }
        match Message::parse(&mut self.input) {
            Ok(message) => Ok(message),
            Err(_) if !KNOWN.contains(&tag) => Err(ProtocolError::Unexpected { tag, doing: self.doing() }.into()),
            Err(error) => Err(malformed(tag, &error)),
        }
    }

    fn message(&mut self, message: Message) -> Result<(), Error> {
        match message {
            // At any time.
            Message::NoticeResponse(_) => Ok(()),
            Message::ParameterStatus(body) => {
                if body.name().map_err(|error| malformed(b'S', &error))? == "server_version" {
                    self.server_version = bounded(body.value().map_err(|error| malformed(b'S', &error))?.as_bytes());
                }
                Ok(())
            }
            Message::NotificationResponse(body) => {
                let text =
                    |text: std::io::Result<&str>| text.map(str::to_owned).map_err(|error| malformed(b'A', &error));
                let (channel, payload) = (text(body.channel())?, text(body.message())?);
                if self.notifications.len() >= self.limits.notifications_max {
                    self.notifications.pop_front();
                    self.notifications_dropped += 1;
                }
                self.notifications.push_back(Notification { channel, payload, process_id: body.process_id() });
                Ok(())
            }
            Message::ErrorResponse(body) => {
                let error = Box::new(server_error(body.fields())?);
                match &mut self.state {
                    State::Busy(answer) if !error.is_fatal() => {
                        answer.refusal.get_or_insert(error);
                        Ok(())
                    }
                    // While nothing is asked, and at the door, it is the last word.
                    _ => Err(Error::Server(error)),
                }
            }
            message => match mem::replace(&mut self.state, State::Broken) {
                State::Startup(step) => self.authenticate(step, message),
                State::Busy(answer) => self.answer(answer, message),
                state => {
                    self.state = state;
                    Err(self.unexpected(&message))
                }
            },
        }
    }

    fn unexpected(&self, message: &Message) -> Error {
        ProtocolError::Unexpected { tag: tag_of(message), doing: self.doing() }.into()
    }

    fn authenticate(&mut self, step: Authentication, message: Message) -> Result<(), Error> {
        // The state is set again wherever the connection goes on.
        let next = match (step, message) {
            (Authentication::Open | Authentication::Shown, Message::AuthenticationOk) => Authentication::Done,
            (Authentication::Open, Message::AuthenticationCleartextPassword) => {
                if !self.clear_text_is_safe {
                    return Err(Error::ClearText);
                }
                let password = self.password("password")?;
                self.say(|buffer| frontend::password_message(&password, buffer))?;
                Authentication::Shown
            }
            (Authentication::Open, Message::AuthenticationMd5Password(body)) => {
                let password = self.password("md5")?;
                let hash = md5_hash(self.user.as_bytes(), &password, body.salt());
                self.say(|buffer| frontend::password_message(hash.as_bytes(), buffer))?;
                Authentication::Shown
            }
            (Authentication::Open, Message::AuthenticationSasl(body)) => {
                let mechanisms: Vec<String> = body
                    .mechanisms()
                    .map(|mechanism| Ok(bounded(mechanism.as_bytes())))
                    .collect()
                    .map_err(|error| malformed(b'R', &error))?;
                if !mechanisms.iter().any(|mechanism| mechanism == SCRAM_SHA_256) {
                    return Err(Error::Authentication { method: mechanisms.join(", ") });
                }
                let password = self.password("scram-sha-256")?;
                let scram = ScramSha256::new(&password, ChannelBinding::unsupported());
                let first = scram.message().to_vec();
                self.say(|buffer| frontend::sasl_initial_response(SCRAM_SHA_256, &first, buffer))?;
                Authentication::ScramFirst(scram)
            }
            (Authentication::ScramFirst(mut scram), Message::AuthenticationSaslContinue(body)) => {
                scram.update(body.data()).map_err(|error| not_the_server(&error))?;
                let last = scram.message().to_vec();
                self.say(|buffer| frontend::sasl_response(&last, buffer))?;
                Authentication::ScramLast(scram)
            }
            (Authentication::ScramLast(mut scram), Message::AuthenticationSaslFinal(body)) => {
                scram.finish(body.data()).map_err(|error| not_the_server(&error))?;
                Authentication::Shown
            }
            (Authentication::Done, Message::BackendKeyData(body)) => {
                self.cancel_key = Some(CancelKey { process_id: body.process_id(), secret: body.secret_key() });
                Authentication::Done
            }
            (Authentication::Done, Message::ReadyForQuery(_)) => {
                self.state = State::Ready;
                return Ok(());
            }
            (Authentication::ScramFirst(_) | Authentication::ScramLast(_), Message::AuthenticationOk) => {
                return Err(Error::NotTheServer("it let us in before it did".into()));
            }
            (Authentication::Open, message) => match method(&message) {
                Some(method) => return Err(Error::Authentication { method: method.into() }),
                None => return Err(self.out_of_turn(&message)),
            },
            (_, message) => return Err(self.out_of_turn(&message)),
        };
        self.state = State::Startup(next);
        Ok(())
    }

    fn out_of_turn(&self, message: &Message) -> Error {
        ProtocolError::Unexpected { tag: tag_of(message), doing: "logging in" }.into()
    }

    fn password(&self, method: &'static str) -> Result<Vec<u8>, Error> {
        self.password.as_ref().map(|secret| secret.reveal().to_vec()).ok_or(Error::NoPassword { method })
    }

    fn say(&mut self, write: impl FnOnce(&mut BytesMut) -> std::io::Result<()>) -> Result<(), Error> {
        let mut buffer = BytesMut::new();
        write(&mut buffer).map_err(|_| Error::from(RequestError::Nul))?;
        self.send(&buffer)
    }

    fn answer(&mut self, mut answer: Answer, message: Message) -> Result<(), Error> {
        let failed = answer.refusal.is_some();
        match message {
            Message::ReadyForQuery(_) => {
                self.state = State::Ready;
                self.result = Some(match answer.refusal {
                    Some(refusal) => Err(Error::Server(refusal)),
                    None if answer.is_complete => Ok(answer.rows),
                    None => return Err(self.in_the_middle(b'Z')),
                });
                return Ok(());
            }
            Message::CopyInResponse(_) | Message::CopyOutResponse(_) => return Err(Error::Copy),
            message if failed => return Err(self.in_the_middle(tag_of(&message))),
            Message::ParseComplete | Message::BindComplete => {}
            Message::NoData if !answer.is_described => answer.is_described = true,
            Message::RowDescription(body) if !answer.is_described => {
                answer.is_described = true;
                answer.rows = Rows::with_columns(columns(&body)?);
            }
            Message::DataRow(body) if answer.is_described && !answer.is_complete => {
                push_row(&mut answer.rows, &body, &self.limits)?;
            }
            Message::CommandComplete(body) if !answer.is_complete => {
                answer.rows.set_tag(&bounded(body.tag().map_err(|error| malformed(b'C', &error))?.as_bytes()));
                answer.is_complete = true;
            }
            Message::EmptyQueryResponse if !answer.is_complete => answer.is_complete = true,
            message => return Err(self.in_the_middle(tag_of(&message))),
        }
        self.state = State::Busy(answer);
        Ok(())
    }

    fn in_the_middle(&self, tag: u8) -> Error {
        ProtocolError::Unexpected { tag, doing: "answering a query" }.into()
    }
}

fn columns(body: &RowDescriptionBody) -> Result<Vec<Column>, Error> {
    body.fields()
        .map(|field| Ok(Column { name: bounded(field.name().as_bytes()), type_oid: field.type_oid() }))
        .collect()
        .map_err(|error| malformed(b'T', &error))
}

fn push_row(rows: &mut Rows, body: &DataRowBody, limits: &Limits) -> Result<(), Error> {
    let buffer = body.buffer();
    rows.admit(buffer.len(), limits)?;
    let (mut ranges, mut values) = (body.ranges(), 0);
    let expected = rows.columns().len();
    while let Some(range) = ranges.next().map_err(|error| malformed(b'D', &error))? {
        values += 1;
        if values > expected {
            continue;
        }
        let text = range.map(|range| std::str::from_utf8(&buffer[range]).map_err(|_| ProtocolError::NotUtf8));
        rows.push_cell(text.transpose()?);
    }
    if values != expected {
        return Err(ProtocolError::Columns { values, columns: expected }.into());
    }
    rows.end_row();
    Ok(())
}

fn server_error(mut fields: ErrorFields<'_>) -> Result<ServerError, Error> {
    let mut error = ServerError { sqlstate: "?????".into(), severity: "ERROR".into(), ..ServerError::default() };
    let mut severity_is_plain = false;
    while let Some(field) = fields.next().map_err(|error| malformed(b'E', &error))? {
        let text = bounded(field.value_bytes());
        match field.type_() {
            // The one that is not translated comes as V.
            b'S' if !severity_is_plain => error.severity = text,
            b'V' => {
                severity_is_plain = true;
                error.severity = text;
            }
            b'C' => error.sqlstate = text.chars().take(5).collect(),
            b'M' => error.message = text,
            b'D' => error.detail = Some(text),
            b'H' => error.hint = Some(text),
            _ => {}
        }
    }
    Ok(error)
}

fn not_the_server(error: &std::io::Error) -> Error {
    Error::NotTheServer(bounded(error.to_string().as_bytes()))
}

fn malformed(tag: u8, error: &std::io::Error) -> Error {
    ProtocolError::Malformed { tag, why: bounded(error.to_string().as_bytes()) }.into()
}

/// A way of authentication that is not supported.
fn method(message: &Message) -> Option<&'static str> {
    Some(match message {
        Message::AuthenticationGss | Message::AuthenticationGssContinue(_) => "GSSAPI",
        Message::AuthenticationKerberosV5 => "Kerberos V5",
        Message::AuthenticationScmCredential => "SCM credentials",
        Message::AuthenticationSspi => "SSPI",
        _ => return None,
    })
}

/// The types of all messages that postgres-protocol reads.
const KNOWN: &[u8] = b"123ACcDdEGHIKNnRSstTVWZ";

/// The type of a message, for errors.
fn tag_of(message: &Message) -> u8 {
    match message {
        Message::BackendKeyData(_) => b'K',
        Message::BindComplete => b'2',
        Message::CloseComplete => b'3',
        Message::CommandComplete(_) => b'C',
        Message::CopyData(_) => b'd',
        Message::CopyDone => b'c',
        Message::CopyInResponse(_) => b'G',
        Message::CopyOutResponse(_) => b'H',
        Message::DataRow(_) => b'D',
        Message::EmptyQueryResponse => b'I',
        Message::ErrorResponse(_) => b'E',
        Message::NoData => b'n',
        Message::NoticeResponse(_) => b'N',
        Message::NotificationResponse(_) => b'A',
        Message::ParameterDescription(_) => b't',
        Message::ParameterStatus(_) => b'S',
        Message::ParseComplete => b'1',
        Message::PortalSuspended => b's',
        Message::ReadyForQuery(_) => b'Z',
        Message::RowDescription(_) => b'T',
        // What is left is about authentication.
        _ => b'R',
    }
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;

    fn config() -> Config {
        Config::new(Host::Tcp { host: "127.0.0.1".into(), port: 1 }, "me", "db").with_password("secret")
    }

    fn message(tag: u8, body: &[u8]) -> Vec<u8> {
        let length = u32::try_from(body.len() + 4).unwrap().to_be_bytes();
        [&[tag], &length[..], body].concat()
    }

    /// Sessions in each of their states, without TLS.
    fn sessions() -> Vec<Session> {
        let start = || Session::new(&config(), None);
        let let_in = || {
            let mut session = start();
            session.received(&message(b'R', &0_u32.to_be_bytes())).unwrap();
            session.received(&message(b'Z', b"I")).unwrap();
            session
        };
        let asking = || {
            let mut session = let_in();
            session.query("SELECT $1", &[None]).unwrap();
            session
        };
        let reading = || {
            let mut session = asking();
            session.received(&[message(b'1', b""), message(b'2', b"")].concat()).unwrap();
            let column = [b"\0\x01a\0", &[0; 18][..]].concat();
            session.received(&message(b'T', &column)).unwrap();
            session
        };
        let scram = || {
            let mut session = start();
            session.received(&message(b'R', b"\0\0\0\x0aSCRAM-SHA-256\0\0")).unwrap();
            session
        };
        let tls = Config { ssl_mode: SslMode::Require, ..config() };
        let tls = Session::new(&tls, TlsSettings::read(&tls).unwrap());
        vec![start(), let_in(), asking(), reading(), scram(), tls]
    }

    #[test]
    fn rows_come_in_whatever_pieces() {
        let answer = [
            message(b'D', b"\0\x01\0\0\0\x02ab"),
            message(b'D', b"\0\x01\xff\xff\xff\xff"),
            message(b'A', b"\0\0\0\x07chan\0hello\0"),
            message(b'C', b"SELECT 2\0"),
            message(b'Z', b"I"),
        ]
        .concat();
        for piece in 1..answer.len() {
            let mut session = sessions().remove(3);
            answer.chunks(piece).for_each(|bytes| session.received(bytes).unwrap());
            let rows = session.take_result().unwrap().unwrap();
            assert_eq!(rows.iter().map(|row| row.get(0)).collect::<Vec<_>>(), [Some("ab"), None]);
            assert_eq!((rows.tag(), session.next_notification().unwrap().payload.as_str()), ("SELECT 2", "hello"));
            assert!(session.is_ready());
        }
    }

    #[test]
    fn a_refusal_leaves_the_connection_usable_and_a_fatal_one_ends_it() {
        let mut session = sessions().remove(2);
        let error = message(b'E', b"SERROR\0VERROR\0C42601\0Msyntax\nerror\0\0");
        session.received(&[error, message(b'Z', b"I")].concat()).unwrap();
        let refusal = session.take_result().unwrap().unwrap_err();
        assert_eq!(refusal.sqlstate(), Some("42601"));
        assert!(refusal.is_survivable() && session.is_ready() && !refusal.to_string().contains('\n'));
        session.query("SELECT 1", &[]).unwrap();
        let fatal = session.received(&message(b'E', b"SFATAL\0C57P01\0Mbye\0\0")).unwrap_err();
        assert!(!fatal.is_survivable() && session.is_broken());
    }

    #[test]
    fn a_message_of_gigabytes_is_refused_at_its_announcement() {
        for session in &mut sessions()[..5] {
            let error = session.received(b"D\x7f\xff\xff\xff").unwrap_err();
            assert!(matches!(error, Error::Protocol(ProtocolError::Length { .. })), "{error}");
            assert!(session.input.capacity() < 1 << 16);
        }
    }

    #[test]
    fn a_result_beyond_its_bounds_is_an_error() {
        let mut session = sessions().remove(3);
        session.limits.rows_max = 3;
        let rows: Vec<u8> = (0..4).flat_map(|_| message(b'D', b"\0\x01\0\0\0\x02ab")).collect();
        assert!(matches!(session.received(&rows), Err(Error::TooLarge(_))));
        let mut session = sessions().remove(3);
        assert!(matches!(session.received(&message(b'D', b"\0\x02\0\0\0\0\0\0\0\0")), Err(Error::Protocol(_))));
    }

    #[test]
    fn a_password_is_not_said_in_clear_text_and_scram_is_not_skipped() {
        let mut session = sessions().remove(0);
        session.take_output();
        let error = session.received(&message(b'R', &3_u32.to_be_bytes())).unwrap_err();
        assert!(matches!(error, Error::ClearText) && session.take_output().is_empty());
        let mut session = sessions().remove(4);
        let error = session.received(&message(b'R', &0_u32.to_be_bytes())).unwrap_err();
        assert!(matches!(error, Error::NotTheServer(_)), "{error}");
        let mut session = sessions().remove(5);
        assert!(matches!(session.received(b"N"), Err(Error::NoTls { .. })));
        let mut session = sessions().remove(5);
        assert!(matches!(session.received(b"Sx"), Err(Error::Protocol(ProtocolError::BytesBeforeTls))));
    }

    #[test]
    fn a_request_that_cannot_be_sent_sends_nothing() {
        let mut session = sessions().remove(1);
        session.take_output();
        assert!(matches!(session.query("a\0", &[]), Err(Error::Request(RequestError::Nul))));
        assert!(matches!(session.query("a", &[Some("\0")]), Err(Error::Request(RequestError::Nul))));
        assert!(Session::listen_statement(&"x".repeat(64)).is_err());
        assert_eq!(Session::listen_statement("a\"b").unwrap(), "LISTEN \"a\"\"b\"");
        assert!(session.is_ready() && session.take_output().is_empty());
    }

    fn some_message() -> impl Strategy<Value = Vec<u8>> {
        let tags = prop_oneof![proptest::sample::select(KNOWN), any::<u8>()];
        (tags, vec(any::<u8>(), 0..40), option_of_length()).prop_map(|(tag, body, length)| {
            let mut bytes = message(tag, &body);
            if let Some(length) = length {
                bytes[1..5].copy_from_slice(&length.to_be_bytes());
            }
            bytes
        })
    }

    fn option_of_length() -> impl Strategy<Value = Option<u32>> {
        prop_oneof![9 => Just(None), 1 => any::<u32>().prop_map(Some)]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(
            std::env::var("SLUICE_FUZZ_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(2_000)
        ))]

        /// Whatever a server sends, in whatever pieces, at whatever time: no panic, and no memory beyond the bounds.
        #[test]
        fn no_bytes_of_a_server_panic(state in 0..6_usize, messages in vec(some_message(), 0..8), piece in 1..64_usize) {
            let mut session = sessions().remove(state);
            for bytes in messages.concat().chunks(piece) {
                if session.received(bytes).is_err() {
                    break;
                }
                let _ = session.take_result();
                prop_assert!(session.input.len() <= SHORT_MESSAGE_BYTES_MAX + 64 || state == 3);
            }
        }
    }
}
