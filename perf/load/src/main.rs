//! The load generator: sends checks as fast as it is asked to, and verifies every reply.
//!
//! It must need less CPU for a request than the server does, or it measures itself. So requests are encoded beforehand
//! (`requests`), identities cost next to nothing (`identities`), a batch is one send, all sends of a round are one system
//! call on an io_uring of the thread's own (`worker`), and replies are scanned in place (`replies`). What it used is part
//! of what it tells (`report`): near 100 % busy, it is the limit.
//!
//! Read `worker` for how a run goes, `replies` for what is verified, `args` for what can be asked.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command line program")]
#![allow(clippy::disallowed_methods, reason = "measures real time")]

mod args;
mod connection;
mod identities;
mod replies;
mod report;
mod requests;
mod run;
mod worker;

use std::{
    io,
    net::TcpStream,
    os::{fd::OwnedFd, unix::net::UnixStream},
    process::ExitCode,
    sync::{
        Arc, Barrier,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use clap::Parser;

use crate::{
    args::Args,
    replies::Expectations,
    report::Report,
    run::{Outcome, Progress, Run},
    worker::Worker,
};

const INTERRUPTED: u8 = 130;

fn main() -> ExitCode {
    match load(Args::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("sluice-load: {error}");
            ExitCode::FAILURE
        }
    }
}

fn load(args: Args) -> io::Result<ExitCode> {
    if !args.cpus.is_empty() {
        sluice_echo::cpu::pin(&args.cpus)?;
    }
    let interrupted = Arc::new(AtomicBool::new(false));
    // The first Ctrl-C ends the run, a second one the process.
    signal_hook::flag::register_conditional_shutdown(
        signal_hook::consts::SIGINT,
        INTERRUPTED.into(),
        Arc::clone(&interrupted),
    )?;
    signal_hook::flag::register(signal_hook::consts::SIGINT, Arc::clone(&interrupted))?;
    let sockets = connect(&args)?;
    let run = Run {
        expectations: Expectations::new(&args),
        stop: AtomicBool::new(false),
        ready: Barrier::new(usize::from(args.threads)),
        args,
    };
    let outcomes = work(&run, sockets, &interrupted)?;
    let interrupted = interrupted.load(Ordering::Relaxed);
    let report = Report::new(&run.args, &run.expectations, &outcomes, interrupted);
    if run.args.json {
        println!("{}", report.json()?);
    } else {
        print!("{}", report.table());
    }
    if let Some(failure) = report.failure() {
        eprintln!("sluice-load: {failure}");
        return Ok(ExitCode::FAILURE);
    }
    Ok(if interrupted { ExitCode::from(INTERRUPTED) } else { ExitCode::SUCCESS })
}

/// The connections of each thread, with their numbers.
fn connect(args: &Args) -> io::Result<Vec<Vec<(u16, OwnedFd)>>> {
    let mut sockets: Vec<Vec<_>> = (0..args.threads).map(|_| Vec::new()).collect();
    for number in 0..args.connections {
        let socket = match &args.unix {
            Some(path) => UnixStream::connect(path).map(OwnedFd::from),
            None => TcpStream::connect(args.target).and_then(|socket| {
                socket.set_nodelay(true)?;
                Ok(socket.into())
            }),
        };
        let socket = socket.map_err(|error| {
            let target = args.unix.as_ref().map_or_else(|| args.target.to_string(), |path| path.display().to_string());
            io::Error::new(error.kind(), format!("cannot connect to {target}: {error}"))
        })?;
        sockets[usize::from(number % args.threads)].push((number, socket));
    }
    Ok(sockets)
}

/// Runs all threads to their end, and tells how far they are meanwhile.
fn work(run: &Run, sockets: Vec<Vec<(u16, OwnedFd)>>, interrupted: &AtomicBool) -> io::Result<Vec<Outcome>> {
    let progress: Vec<Progress> = sockets.iter().map(|_| Progress::default()).collect();
    thread::scope(|scope| {
        let threads: Vec<_> = (0..run.args.threads)
            .zip(sockets.into_iter().zip(&progress))
            .map(|(thread, (sockets, progress))| {
                scope.spawn(move || {
                    let worker = Worker::new(run, progress, thread, sockets);
                    if worker.is_err() {
                        run.stop.store(true, Ordering::Relaxed);
                    }
                    run.ready.wait();
                    worker.map(Worker::run)
                })
            })
            .collect();
        let mut told = Told::default();
        while !threads.iter().all(thread::ScopedJoinHandle::is_finished) {
            thread::park_timeout(Duration::from_millis(20));
            if interrupted.load(Ordering::Relaxed) {
                run.stop.store(true, Ordering::Relaxed);
            }
            if !run.args.quiet {
                told.tell(&progress);
            }
        }
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|_| Err(io::Error::other("a thread panicked"))))
            .collect()
    })
}

/// The progress line: what the last second brought.
struct Told {
    at: Instant,
    counts: [u64; 3],
}

impl Default for Told {
    fn default() -> Self {
        Self { at: Instant::now(), counts: [0; 3] }
    }
}

impl Told {
    fn tell(&mut self, progress: &[Progress]) {
        let elapsed = self.at.elapsed();
        if elapsed < Duration::from_secs(1) {
            return;
        }
        let sum =
            |of: fn(&Progress) -> &AtomicU64| progress.iter().map(|one| of(one).load(Ordering::Relaxed)).sum::<u64>();
        let counts = [sum(|one| &one.replies), sum(|one| &one.allowed), sum(|one| &one.denied)];
        let [replies, allowed, denied] =
            [0, 1, 2].map(|at| (counts[at] - self.counts[at]) as f64 / elapsed.as_secs_f64());
        eprintln!("{replies:.0} replies/s, {allowed:.0} allowed/s, {denied:.0} denied/s");
        *self = Self { at: Instant::now(), counts };
    }
}
