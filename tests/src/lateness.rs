//! How late the machine itself was, so that a test can tell a server that is slow from one that is not given a CPU.

use std::{
    fs,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use crate::Server;

/// How long the watch sleeps at a time.
const NAP: Duration = Duration::from_millis(1);

/// Watches how late the machine is, until [`Watch::stop`].
pub struct Watch {
    process: String,
    waited_before: Duration,
    stop: Arc<AtomicBool>,
    overslept_us_max: Arc<AtomicU64>,
    sleeper: JoinHandle<()>,
}

impl Watch {
    /// Begins to watch what this server, and this process, get of the machine.
    pub fn start(server: &Server) -> Self {
        let process = server.status()["process_id"].to_string();
        let (stop, overslept_us_max) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let sleeper = std::thread::spawn({
            let (stop, overslept_us_max) = (Arc::clone(&stop), Arc::clone(&overslept_us_max));
            move || {
                while !stop.load(Ordering::Acquire) {
                    let began = Instant::now();
                    std::thread::sleep(NAP);
                    let overslept = began.elapsed().saturating_sub(NAP);
                    overslept_us_max.fetch_max(overslept.as_micros() as u64, Ordering::AcqRel);
                }
            }
        });
        Self { waited_before: waited_for_a_cpu(&process), process, stop, overslept_us_max, sleeper }
    }

    /// By how much an answer may have been late since the beginning without the server's doing: all that its threads
    /// waited for a CPU, and the longest that a sleeper of this process was woken too late.
    pub fn stop(self) -> Duration {
        let waited = waited_for_a_cpu(&self.process).saturating_sub(self.waited_before);
        self.stop.store(true, Ordering::Release);
        self.sleeper.join().expect("sleeping does not fail");
        waited + Duration::from_micros(self.overslept_us_max.load(Ordering::Acquire))
    }
}

/// What the threads of a process waited for a CPU in all: the second figure of `schedstat`, in nanoseconds.
fn waited_for_a_cpu(process: &str) -> Duration {
    let of_thread = |entry: fs::DirEntry| -> Option<u64> {
        let figures = fs::read_to_string(entry.path().join("schedstat")).ok()?;
        figures.split(' ').nth(1)?.parse().ok()
    };
    let threads = fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    Duration::from_nanos(threads.filter_map(of_thread).sum())
}
