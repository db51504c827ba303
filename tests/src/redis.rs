//! A Redis in its own process, on a free port, with nothing on disk.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use crate::PATIENCE;

/// A running Redis. Killed when dropped.
pub struct Redis {
    child: Child,
    address: SocketAddr,
}

impl Redis {
    /// Starts a Redis with these further arguments and waits until it answers.
    pub fn start(args: &[&str]) -> Self {
        // Another process may take the port between the look and the start; then Redis ends and another port is tried.
        (0..10).find_map(|_| Self::try_start(args)).expect("Redis starts")
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    fn try_start(args: &[&str]) -> Option<Self> {
        let free = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = free.local_addr().expect("its address");
        drop(free);
        let child = Command::new("redis-server")
            .args(["--port", &address.port().to_string(), "--save", "", "--appendonly", "no"])
            .args(args)
            .stdout(Stdio::null())
            .spawn()
            .expect("redis-server is installed");
        let mut redis = Self { child, address };
        let began = Instant::now();
        while !redis.answers() {
            assert!(began.elapsed() < PATIENCE, "Redis does not answer");
            if redis.child.try_wait().expect("asking for Redis").is_some() {
                return None;
            }
            std::thread::park_timeout(Duration::from_millis(5));
        }
        Some(redis)
    }

    fn answers(&self) -> bool {
        let ping = || -> std::io::Result<[u8; 5]> {
            let mut stream = TcpStream::connect(self.address)?;
            stream.set_read_timeout(Some(PATIENCE))?;
            stream.write_all(b"PING\r\n")?;
            let mut answer = [0; 5];
            stream.read_exact(&mut answer)?;
            Ok(answer)
        };
        ping().is_ok_and(|answer| &answer == b"+PONG")
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
