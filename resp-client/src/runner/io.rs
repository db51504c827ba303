//! One connection: made, read and written by one task, which ends when either fails.

use std::{
    fmt::Display,
    net::{IpAddr, SocketAddr, ToSocketAddrs},
    rc::{Rc, Weak},
};

use futures_lite::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, future, io::split};
use glommio::{
    executor,
    net::{TcpStream, UnixStream},
};

use super::{LocalEvent, Shared};
use crate::{Address, LinkId};

/// Bytes that one read takes at most.
const READ_BYTES: usize = 64 << 10;

/// Connects, and carries bytes until the connection ends. Dropping the task closes it.
pub(super) async fn run(shared: Weak<Shared>, link: LinkId, address: Address, output: Rc<LocalEvent>) {
    let connected = match &address {
        Address::Unix(path) => match UnixStream::connect(path).await {
            Ok(stream) => return carry(shared, link, stream, output).await,
            Err(error) => Err(error.to_string()),
        },
        Address::Tcp { host, port } => connect_tcp(host, *port).await,
    };
    match connected {
        Ok(stream) => carry(shared, link, stream, output).await,
        Err(why) => {
            if let Some(shared) = shared.upgrade() {
                shared.with(|client, now, mut on| client.connect_failed(link, now, &why, &mut on));
                shared.sooner.set();
            }
        }
    }
}

pub(super) async fn connect_tcp(host: &str, port: u16) -> Result<TcpStream, String> {
    let mut why = "the name has no address".to_owned();
    for address in look_up(host, port).await? {
        match TcpStream::connect(address).await {
            Ok(stream) => {
                stream.set_nodelay(true).map_err(text)?;
                return Ok(stream);
            }
            Err(error) => why = text(error),
        }
    }
    Err(why)
}

/// The addresses of a host. Looking up a name may take seconds, so it is done elsewhere.
async fn look_up(host: &str, port: u16) -> Result<Vec<SocketAddr>, String> {
    if let Ok(address) = host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(address, port)]);
    }
    let host = host.to_owned();
    let found = executor().spawn_blocking(move || (host.as_str(), port).to_socket_addrs().map(Vec::from_iter)).await;
    found.map_err(text)
}

async fn carry(
    shared: Weak<Shared>,
    link: LinkId,
    stream: impl AsyncRead + AsyncWrite + Unpin,
    output: Rc<LocalEvent>,
) {
    {
        let Some(shared) = shared.upgrade() else { return };
        shared.with(|client, now, mut on| client.connected(link, now, &mut on));
        shared.sooner.set();
    }
    output.set();
    let (reader, writer) = split(stream);
    let why = future::or(read(&shared, link, reader), write(&shared, link, writer, &output)).await;
    if let Some(shared) = shared.upgrade() {
        shared.with(|client, now, mut on| client.closed(link, now, &why, &mut on));
        shared.sooner.set();
    }
}

async fn read(shared: &Weak<Shared>, link: LinkId, mut reader: impl AsyncRead + Unpin) -> String {
    let mut buffer = vec![0; READ_BYTES];
    loop {
        match reader.read(&mut buffer).await {
            Ok(0) => return "end of stream".to_owned(),
            Ok(length) => {
                let Some(shared) = shared.upgrade() else { return String::new() };
                shared.with(|client, now, mut on| client.received(link, &buffer[..length], now, &mut on));
            }
            Err(error) => return text(error),
        }
    }
}

async fn write(
    shared: &Weak<Shared>,
    link: LinkId,
    mut writer: impl AsyncWrite + Unpin,
    output: &LocalEvent,
) -> String {
    let mut buffer = Vec::new();
    loop {
        {
            let Some(shared) = shared.upgrade() else { return String::new() };
            shared.client.borrow_mut().swap_output(link, &mut buffer);
        }
        if buffer.is_empty() {
            output.wait().await;
        } else if let Err(error) = writer.write_all(&buffer).await {
            return text(error);
        }
    }
}

pub(super) fn text(error: impl Display) -> String {
    error.to_string()
}
