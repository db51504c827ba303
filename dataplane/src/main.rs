//! The `sluice` command: arguments in, exit code out. Everything else is in the library.

use std::{
    io::{self, Write},
    net::{Ipv4Addr, SocketAddr},
    path::PathBuf,
    process::ExitCode,
    sync::mpsc,
};

use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    iterator::Signals,
};
use sluice::{
    cli::{Cli, Command, HotArgs, ImportArgs, ImportFrom, ServeArgs},
    clock::Clock,
    commands::{
        self, CommandError,
        hot::{self, HotError, Stop},
        import::{self, ImportError},
    },
    config::{self, Log, LogFormat, Settings},
    control::{self, Control, Rules},
    listener::TransportChoice,
    log,
    policy_store::Follower,
    server::{self, Process, Request, Secrets},
};

type Outcome = Result<(), Box<dyn std::error::Error>>;

fn main() -> ExitCode {
    let cli = Cli::of_process();
    let unix_ms = Clock::start().now().unix_ms;
    let outcome = match cli.command {
        None => return serve(&cli.serve),
        Some(Command::Serve(args)) => return serve(&args),
        Some(Command::CheckConfig { file }) => commands::check_config(&file, unix_ms, &mut io::stdout()),
        Some(Command::Explain { config, policy, json, attributes }) => {
            let (config, policy) = (config.as_deref(), policy.as_deref());
            match commands::explain_request(config, policy, &attributes, unix_ms, json, &mut io::stdout()) {
                // Whoever reads has seen enough, as `head` has.
                Err(CommandError::Write(error)) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
                outcome => outcome,
            }
        }
        Some(Command::Hot(args)) => return show_hot(&args),
        Some(Command::Import { from: ImportFrom::EnvoyRatelimit(args) }) => return import_rules(&args),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain(&error);
            ExitCode::FAILURE
        }
    }
}

/// Shows the hottest keys of a running server, until somebody has seen enough.
fn show_hot(args: &HotArgs) -> ExitCode {
    let outcome = Stop::on_signals().map_err(HotError::Write).and_then(|stop| {
        let out = io::stdout();
        let is_terminal = io::IsTerminal::is_terminal(&out);
        hot::show(args, is_terminal, &stop, &mut out.lock())
    });
    match outcome {
        Err(HotError::Write(error)) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain(&error);
            ExitCode::FAILURE
        }
    }
}

/// Makes a policy of another limiter's rules.
fn import_rules(args: &ImportArgs) -> ExitCode {
    match import::envoy_ratelimit(args, &mut io::stdout().lock(), &mut io::stderr().lock()) {
        Ok(()) => ExitCode::SUCCESS,
        // Whoever reads has seen enough.
        Err(ImportError::Write(error)) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => {
            complain(&error);
            ExitCode::FAILURE
        }
    }
}

/// Says what is wrong on the terminal. Nobody may read it, as behind `| head`; that is no reason to abort.
fn complain(error: &dyn std::error::Error) {
    let _ = writeln!(io::stderr(), "{error}");
}

/// Serves, and says why not: to whoever reads the log, where that is a program, and else to the terminal.
fn serve(args: &ServeArgs) -> ExitCode {
    let settings = args.settings();
    let how = match &settings {
        Ok(settings) => settings.log.clone(),
        Err(_) => Log { format: args.log_format.unwrap_or_default(), ..Log::default() },
    };
    let thread = match log::start(&how) {
        Ok(thread) => thread,
        Err(error) => {
            complain(&error);
            return ExitCode::FAILURE;
        }
    };
    let mut outcome = settings.map_err(Into::into).and_then(serve_with);
    let code = if outcome.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    if how.format == LogFormat::Json
        && tracing::enabled!(tracing::Level::ERROR)
        && let Err(error) = std::mem::replace(&mut outcome, Ok(()))
    {
        tracing::error!(%error, "cannot serve");
    }
    thread.finish();
    if let Err(error) = outcome {
        complain(&*error);
    }
    code
}

fn serve_with(mut settings: Settings) -> Outcome {
    let read = |setting: &str, path: &Option<PathBuf>| {
        let wrong = |error| format!("{setting} {error}");
        path.as_deref().map(config::read_password).transpose().map_err(wrong)
    };
    let secrets = Secrets {
        password: read("resp.password_file", &settings.resp.password_file)?,
        token: read("http.token_file", &settings.http.token_file)?,
    };
    settings.check_memory()?;
    sluice::files::check_locked_memory()?;
    sluice::files::fit(&mut settings)?;
    let seed = getrandom::u64().map_err(|error| format!("the system gives no random numbers: {error}"))?;
    let (local, rules_max) = (settings.redis.local_terms(), settings.limits.rules_max);
    let rules = match &settings.postgres.url {
        Some(_) => Rules::Store(Box::new(Follower::new(&settings.postgres, seed, local, rules_max)?)),
        None => Rules::File(Control::new(settings.policy.clone(), seed, local, rules_max)?),
    };
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
    server::run(settings, &secrets, rules, &requests, announce)?;
    tracing::info!("left");
    Ok(())
}

/// Where the counts are, for people.
fn counts(process: &Process) -> String {
    match &process.store {
        None => "this process alone".into(),
        Some(plan) => {
            let seeds: Vec<_> = plan.client.addresses().iter().map(ToString::to_string).collect();
            format!("Redis, by {}", seeds.join(", "))
        }
    }
}

/// Says what is served where: to programs in the log, and to people, with one line to try, on standard output.
/// Where a face listens, if it does.
fn address(address: Option<SocketAddr>) -> String {
    address.map_or_else(|| "off".into(), |address| address.to_string())
}

fn announce(process: &Process) {
    let (settings, loaded) = (&process.settings, process.policy.load());
    let transport = match process.transport {
        TransportChoice::Auto => "auto",
        TransportChoice::Ring => "ring",
        TransportChoice::Plain => "plain",
    };
    let cpus: Vec<_> = process.cpus.iter().map(ToString::to_string).collect();
    let cpus = cpus.join(",");
    let (resp, ops) = (process.resp_address, process.ops_address);
    let source = control::source(process);
    let (version, rules) = (loaded.policy.version, loaded.policy.rules.len());
    let unix = settings.resp.listen_unix.as_deref().map(|path| path.display().to_string());
    let counts = counts(process);
    let (http, grpc) = (address(process.http_address), address(process.grpc_address));
    tracing::info!(%resp, unix, %http, %grpc, %ops, cpus, transport, counts, policy = source, policy_version = version, rules, "serving");
    if settings.log.format == LogFormat::Json {
        return;
    }
    // What redis-cli asks by itself needs not be said.
    let host = match resp.ip() {
        ip if ip == Ipv4Addr::LOCALHOST || ip.is_unspecified() => String::new(),
        ip => format!(" -h {ip}"),
    };
    let password = settings.resp.password_file.as_deref();
    let password = password.map(|path| format!(" -a \"$(cat {})\"", path.display())).unwrap_or_default();
    let text = format!(
        "sluice {program} serves RESP on {resp}{unix}, HTTP on {http}, gRPC on {grpc}, ops on http://{ops}\n\
         cores {cpus} ({transport} transport)\n\
         counts in {counts}\n\
         policy: {source}, version {version} with {rules} rules\n\
         try: redis-cli{host} -p {port}{password} CHECK path /v1/login method POST key ak_1\n",
        program = env!("CARGO_PKG_VERSION"),
        unix = unix.map(|path| format!(" and {path}")).unwrap_or_default(),
        port = resp.port(),
    );
    // A closed standard output is no reason not to serve.
    let mut out = io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}
