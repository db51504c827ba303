//! The `sluice` command: arguments in, exit code out. Everything else is in the library.
#![allow(clippy::print_stderr, reason = "a command speaks to its terminal")]

use std::{
    io::{self, Write},
    net::Ipv4Addr,
    os::unix::fs::MetadataExt,
    path::Path,
    process::ExitCode,
    sync::{Arc, mpsc},
};

use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    iterator::Signals,
};
use sluice::{
    cli::{Cli, Command, ServeArgs},
    clock::Clock,
    commands,
    config::{LogFormat, Settings},
    control::{self, Control},
    listener::TransportChoice,
    server::{self, Process, Request},
};

type Outcome = Result<(), Box<dyn std::error::Error>>;

fn main() -> ExitCode {
    let cli = Cli::of_process();
    let outcome = match cli.command {
        None => serve(&cli.serve),
        Some(Command::Serve(args)) => serve(&args),
        Some(Command::CheckConfig { file }) => commands::check_config(&file, &mut io::stdout()).map_err(Into::into),
        Some(Command::Explain { config, policy, json, attributes }) => {
            let (config, policy, unix_ms) = (config.as_deref(), policy.as_deref(), Clock::start().now().unix_ms);
            commands::explain_request(config, policy, &attributes, unix_ms, json, &mut io::stdout()).map_err(Into::into)
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
    let control = Control::new(settings.policy.clone(), seed, settings.redis.local_terms(), settings.limits.rules_max)?;
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

/// The password of a file, which holds it as its only line.
fn read_password(path: &Path) -> Result<Arc<str>, String> {
    let wrong = |why: &str| format!("resp.password_file {}: {why}", path.display());
    let text = std::fs::read_to_string(path).map_err(|error| wrong(&format!("cannot be read: {error}")))?;
    let password = text.strip_suffix('\n').map_or(&*text, |line| line.strip_suffix('\r').unwrap_or(line));
    if password.is_empty() {
        return Err(wrong("is empty; leave the setting out to need no password"));
    }
    if password.contains('\n') {
        return Err(wrong("has more than one line; the password must be its only one"));
    }
    let mode = std::fs::metadata(path).map_or(0, |metadata| metadata.mode());
    if mode & 0o007 != 0 {
        tracing::warn!(path = %path.display(), "every user of this host can read the password file; try chmod o-rwx");
    }
    Ok(password.into())
}

/// Says what is served where, and one line to try.
fn announce(process: &Process) {
    let (settings, loaded) = (&process.settings, process.policy.load());
    let unix = settings.resp.listen_unix.as_deref().map(|path| format!(" and {}", path.display()));
    let transport = match process.transport {
        TransportChoice::Auto => "auto",
        TransportChoice::Ring => "ring",
        TransportChoice::Plain => "plain",
    };
    let cpus: Vec<_> = process.cpus.iter().map(ToString::to_string).collect();
    let address = process.resp_address;
    // What redis-cli asks by itself needs not be said.
    let host = match address.ip() {
        ip if ip == Ipv4Addr::LOCALHOST || ip.is_unspecified() => String::new(),
        ip => format!(" -h {ip}"),
    };
    let text = format!(
        "sluice {version} serves RESP on {address}{unix}, ops on http://{ops}\n\
         cores {cpus} ({transport} transport)\n\
         policy: {source}, version {policy_version} with {rules} rules\n\
         try: redis-cli{host} -p {port} CHECK path /v1/login method POST key ak_1\n",
        version = env!("CARGO_PKG_VERSION"),
        unix = unix.unwrap_or_default(),
        ops = process.ops_address,
        cpus = cpus.join(","),
        source = control::source_name(settings.policy.as_deref()),
        policy_version = loaded.policy.version,
        rules = loaded.policy.rules.len(),
        port = address.port(),
    );
    // A closed standard output is no reason not to serve.
    let mut out = io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}
