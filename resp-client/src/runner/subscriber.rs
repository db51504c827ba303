//! A [`Subscriber`] on glommio: one connection, from its making to its end.

use std::{cell::RefCell, time::Duration};

use futures_lite::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, future, io::split};
use glommio::{net::UnixStream, timer::Timer};

use super::{
    LocalEvent,
    io::{connect_tcp, text},
};
use crate::{
    Address, Micros,
    pubsub::{Event, Subscriber},
};

/// How often the subscriber looks at the time.
const TICK: Duration = Duration::from_millis(250);
/// Bytes that one read takes at most. What is published here is short.
const READ_BYTES: usize = 4 << 10;

/// Connects to the subscriber's address, subscribes, and tells what is heard until the connection ends. Returns why it
/// ended; whoever wants to hear more calls again, after a pause.
///
/// `now` is the clock, and `connect_ms` how long connecting may take, in milliseconds.
pub async fn hear(
    subscriber: &mut Subscriber,
    connect_ms: u64,
    now: impl Fn() -> Micros,
    mut on: impl FnMut(Event<'_>),
) -> String {
    let patience = Duration::from_millis(connect_ms);
    match subscriber.address().clone() {
        Address::Unix(path) => {
            let connect = async { UnixStream::connect(path).await.map_err(text) };
            match in_time(connect, patience).await {
                Ok(stream) => carry(subscriber, stream, now, &mut on).await,
                Err(why) => why,
            }
        }
        Address::Tcp { host, port } => match in_time(connect_tcp(&host, port), patience).await {
            Ok(stream) => carry(subscriber, stream, now, &mut on).await,
            Err(why) => why,
        },
    }
}

async fn in_time<T>(connect: impl Future<Output = Result<T, String>>, patience: Duration) -> Result<T, String> {
    let late = async {
        Timer::new(patience).await;
        Err("connecting took too long".to_owned())
    };
    future::or(connect, late).await
}

async fn carry(
    subscriber: &mut Subscriber,
    stream: impl AsyncRead + AsyncWrite + Unpin,
    now: impl Fn() -> Micros,
    on: &mut impl FnMut(Event<'_>),
) -> String {
    if let Err(why) = subscriber.connected(now()) {
        return why.to_string();
    }
    let (subscriber, output) = (RefCell::new(subscriber), LocalEvent::default());
    let (mut reader, mut writer) = split(stream);
    let read = async {
        let mut buffer = vec![0; READ_BYTES];
        loop {
            let length = match reader.read(&mut buffer).await {
                Ok(0) => return "end of stream".to_owned(),
                Ok(length) => length,
                Err(error) => return text(error),
            };
            let heard = subscriber.borrow_mut().received(&buffer[..length], now(), on);
            if let Err(why) = heard {
                return why.to_string();
            }
            output.set();
        }
    };
    let write = async {
        loop {
            let bytes = subscriber.borrow_mut().output().to_vec();
            if bytes.is_empty() {
                output.wait().await;
            } else if let Err(error) = writer.write_all(&bytes).await {
                return text(error);
            } else {
                subscriber.borrow_mut().sent(bytes.len());
            }
        }
    };
    let tick = async {
        loop {
            Timer::new(TICK).await;
            let alive = subscriber.borrow_mut().tick(now());
            if let Err(why) = alive {
                return why.to_string();
            }
            output.set();
        }
    };
    let why = future::or(read, future::or(write, tick)).await;
    subscriber.borrow_mut().disconnected();
    why
}
