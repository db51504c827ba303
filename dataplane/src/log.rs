//! The log's way out: whoever logs hands a line over and goes on, and one thread writes the lines.
//!
//! Standard error may stall: a pipe that nobody reads, a terminal that was stopped. A core that wrote there itself would
//! stall with it, and with it every client that it serves. So lines wait in a bounded queue; beyond the bound they are
//! dropped, and counted. [`LogThread::finish`] writes what waits at an orderly end.
//!
//! `tracing-appender` has the same queue, but its end gives up after a second however well the writing goes, and where the
//! queue is full it says so on standard output, which may be the same pipe.

use std::{
    fs::File,
    io::{self, Write},
    os::fd::AsFd,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
        mpsc,
    },
    time::Duration,
};

use crate::{
    config::{Log, LogFormat},
    limits::{LOG_BYTES_MAX, LOG_LINES_MAX},
};

/// How long an end waits for a line that is not being taken.
const STALL_MS: u64 = 1_000;
/// How often it looks.
const LOOK_MS: u64 = 10;

/// Lines that were not written, of the process's log.
static DROPPED: AtomicU64 = AtomicU64::new(0);

/// How many lines of the log were dropped, because it took them too slowly or not at all.
pub fn lines_dropped() -> u64 {
    DROPPED.load(Relaxed)
}

/// Starts logging to standard error.
///
/// # Errors
///
/// When there can be no thread for it.
pub fn start(settings: &Log) -> io::Result<LogThread> {
    // The level was checked with the other settings.
    let mut filter = tracing_subscriber::EnvFilter::try_new(&settings.level).unwrap_or_default();
    let is_chatty = filter.max_level_hint().is_none_or(|level| level > tracing::Level::INFO);
    if is_chatty
        && !settings.level.contains("notify=")
        && let Ok(quiet) = "notify=info".parse()
    {
        // The file watch would tell of every event in the policy's folder. Where the log is written there too, each line
        // is an event, and so there would be no end to it.
        filter = filter.add_directive(quiet);
    }
    // Not `io::stderr`, whose lock would be held while it stalls: a panic's message needs it.
    let out: Box<dyn Write + Send> = match io::stderr().as_fd().try_clone_to_owned() {
        Ok(descriptor) => Box::new(File::from(descriptor)),
        Err(_) => Box::new(io::stderr()),
    };
    let thread = LogThread::start(out, &DROPPED)?;
    let lines = Arc::clone(&thread.lines);
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(lines).log_internal_errors(false);
    match settings.format {
        LogFormat::Text => log.with_ansi(io::IsTerminal::is_terminal(&io::stderr())).init(),
        LogFormat::Json => log.json().init(),
    }
    Ok(thread)
}

/// The thread that writes the log.
pub struct LogThread {
    lines: Arc<Lines>,
}

/// Where lines are handed over; each write is one line.
struct Lines {
    queue: mpsc::SyncSender<Message>,
    /// Of the lines that wait.
    bytes: AtomicUsize,
    written: AtomicU64,
    dropped: &'static AtomicU64,
}

enum Message {
    Line(Vec<u8>),
    /// Everything before it is written.
    End(mpsc::Sender<()>),
}

impl LogThread {
    fn start(mut out: impl Write + Send + 'static, dropped: &'static AtomicU64) -> io::Result<Self> {
        let (queue, messages) = mpsc::sync_channel(LOG_LINES_MAX);
        let lines = Arc::new(Lines { queue, bytes: AtomicUsize::new(0), written: AtomicU64::new(0), dropped });
        let shared = Arc::clone(&lines);
        std::thread::Builder::new().name("sluice-log".into()).spawn(move || {
            for message in messages {
                match message {
                    Message::Line(line) => {
                        // Where it cannot be written, nobody could be told so either.
                        let outcome = out.write_all(&line);
                        shared.bytes.fetch_sub(line.len(), Relaxed);
                        let count = if outcome.is_ok() { &shared.written } else { shared.dropped };
                        count.fetch_add(1, Relaxed);
                    }
                    Message::End(reached) => {
                        let _ = out.flush();
                        let _ = reached.send(());
                    }
                }
            }
        })?;
        Ok(Self { lines })
    }

    /// Waits until every line is written that was logged before, for as long as lines are taken.
    pub fn finish(self) {
        let (reached, end) = mpsc::channel();
        let mut message = Some(Message::End(reached));
        let (mut written, mut still_ms) = (self.lines.written.load(Relaxed), 0);
        while still_ms < STALL_MS {
            if let Some(end) = message.take()
                && let Err(mpsc::TrySendError::Full(end)) = self.lines.queue.try_send(end)
            {
                message = Some(end);
            }
            if end.recv_timeout(Duration::from_millis(LOOK_MS)) != Err(mpsc::RecvTimeoutError::Timeout) {
                return;
            }
            let before = std::mem::replace(&mut written, self.lines.written.load(Relaxed));
            still_ms = if written == before { still_ms + LOOK_MS } else { 0 };
        }
    }
}

impl Write for &Lines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        // One line may exceed the bound: a refused policy has as many problems as it has.
        let has_room = self.bytes.fetch_add(line.len(), Relaxed) < LOG_BYTES_MAX;
        if !has_room || self.queue.try_send(Message::Line(line.to_vec())).is_err() {
            self.bytes.fetch_sub(line.len(), Relaxed);
            self.dropped.fetch_add(1, Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    /// Takes a line for each permit, and all of them once nobody gives any.
    struct Slow {
        permits: mpsc::Receiver<()>,
        taken: Arc<Mutex<Vec<u8>>>,
    }

    impl Write for Slow {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let _ = self.permits.recv();
            self.taken.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn log(dropped: &'static AtomicU64) -> (LogThread, mpsc::Sender<()>, Arc<Mutex<Vec<u8>>>) {
        let (permit, permits) = mpsc::channel();
        let taken = Arc::new(Mutex::new(Vec::new()));
        let thread = LogThread::start(Slow { permits, taken: Arc::clone(&taken) }, dropped).unwrap();
        (thread, permit, taken)
    }

    #[test]
    fn an_end_writes_all_lines_in_order() {
        static NONE: AtomicU64 = AtomicU64::new(0);
        let (thread, permit, taken) = log(&NONE);
        let mut expected = Vec::new();
        for number in 0..LOG_LINES_MAX {
            let line = format!("line {number}\n").into_bytes();
            (&*thread.lines).write_all(&line).unwrap();
            expected.extend(line);
        }
        drop(permit);
        thread.finish();
        assert_eq!(*taken.lock().unwrap(), expected);
        assert_eq!(NONE.load(Relaxed), 0);
    }

    #[test]
    fn what_nobody_takes_is_dropped_and_holds_nobody_up() {
        static SOME: AtomicU64 = AtomicU64::new(0);
        let (thread, permit, taken) = log(&SOME);
        // One is being written.
        let fit = LOG_LINES_MAX as u64 + 1;
        for _ in 0..fit + 100 {
            (&*thread.lines).write_all(b"line\n").unwrap();
        }
        assert!((100..=101).contains(&SOME.load(Relaxed)), "{SOME:?} dropped");
        thread.finish();
        assert_eq!(taken.lock().unwrap().len(), 0);
        drop(permit);
    }

    #[test]
    fn long_lines_are_bounded_too() {
        static SOME: AtomicU64 = AtomicU64::new(0);
        let (thread, permit, _taken) = log(&SOME);
        let line = vec![b'x'; LOG_BYTES_MAX / 4 + 1];
        for _ in 0..10 {
            (&*thread.lines).write_all(&line).unwrap();
        }
        assert_eq!(SOME.load(Relaxed), 6, "four reach the bound");
        drop(permit);
        thread.finish();
    }
}
