//! The `sluice` command: arguments in, exit code out. Everything else is in the library.
#![allow(clippy::print_stderr, reason = "a command speaks to its terminal")]

use std::{
    io::{self, Write},
    path::Path,
    process::ExitCode,
    sync::{Arc, mpsc},
};

use clap::Parser;
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    iterator::Signals,
};
use sluice::{
    cli::{Cli, Command, ServeArgs},
    clock::Clock,
    commands,
    config::{LogFormat, Settings},
    control::{Control, EXAMPLE_NAME},
    server::{self, Process, Request},
};

type Outcome = Result<(), Box<dyn std::error::Error>>;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let outcome = match cli.command {
        None => serve(&cli.serve),
        Some(Command::Serve(args)) => serve(&args),
        Some(Command::CheckConfig { file }) => commands::check_config(&file, &mut io::stdout()).map_err(Into::into),
        Some(Command::Explain { policy, json, attributes }) => {
            let unix_ms = Clock::start().now().unix_ms;
            commands::explain_request(policy.as_deref(), &attributes, unix_ms, json, &mut io::stdout())
                .map_err(Into::into)
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn serve(args: &ServeArgs) -> Outcome {
    let mut settings = args.settings()?;
    start_log(&settings);
    let password = settings.resp.password_file.as_deref().map(read_password).transpose()?;
    sluice::files::fit(&mut settings)?;
    let seed = getrandom::u64().map_err(|error| format!("the system gives no random numbers: {error}"))?;
    let control = Control::new(settings.policy.clone(), seed, settings.limits.rules_max)?;
    let (ask, requests) = mpsc::channel();
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP])?;
    std::thread::Builder::new().name("sluice-signals".into()).spawn(move || {
        for signal in signals.forever() {
            let request = if signal == SIGHUP { Request::Reload } else { Request::Leave };
            if ask.send(request).is_err() {
                return;
            }
        }
    })?;
    server::run(settings, password.as_ref(), control, &requests, announce)?;
    Ok(())
}

fn start_log(settings: &Settings) {
    // The level was checked with the other settings.
    let filter = tracing_subscriber::EnvFilter::try_new(&settings.log.level).unwrap_or_default();
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr);
    match settings.log.format {
        LogFormat::Text => log.with_ansi(io::IsTerminal::is_terminal(&io::stderr())).init(),
        LogFormat::Json => log.json().init(),
    }
}

fn read_password(path: &Path) -> Result<Arc<str>, String> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| format!("resp.password_file {}: cannot be read: {error}", path.display()))?;
    match text.trim_end_matches(['\r', '\n']) {
        "" => {
            Err(format!("resp.password_file {}: is empty; leave the setting out to need no password", path.display()))
        }
        password => Ok(password.into()),
    }
}

/// Says what is served where, and one line to try.
fn announce(process: &Process) {
    let policy = process.policy.load();
    let source = process.settings.policy.as_deref().map_or(EXAMPLE_NAME.into(), |path| path.display().to_string());
    let unix = process.settings.resp.listen_unix.as_deref().map(|path| format!(" and {}", path.display()));
    let transport = process.transport.get().copied().unwrap_or_default();
    let address = process.resp_address;
    let text = format!(
        "sluice {version} serves RESP on {address}{unix}, ops on http://{ops}\n\
         cores {cpus:?} ({transport:?} transport), policy: {source}, {rules} rules\n\
         try: redis-cli -h {host} -p {port} CHECK path /v1/login method POST key ak_1\n",
        version = env!("CARGO_PKG_VERSION"),
        unix = unix.unwrap_or_default(),
        ops = process.ops_address,
        cpus = process.cpus,
        rules = policy.policy.rules.len(),
        host = address.ip(),
        port = address.port(),
    );
    // A closed standard output is no reason not to serve.
    let mut out = io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}
