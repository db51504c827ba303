//! The `sluice-admin` command: arguments in, exit code out. Everything else is in the library.

use std::{
    error::Error,
    io::{self, IsTerminal, Write},
    process::ExitCode,
    time::Duration,
};

use clap::Parser;
use sluice_admin::{
    cli::{Cli, Command, PostgresArgs, ServeArgs, TokenCommand},
    connect::{self, Patience},
    migrate, serve,
    terminal::{self, TerminalError, table},
    tokens,
};

/// For commands, which people wait for.
const PATIENCE: Patience = Patience { connect: Duration::from_secs(10), statement: Duration::from_secs(60) };

fn main() -> ExitCode {
    let outcome = run(Cli::parse().command);
    let Err(error) = outcome else { return ExitCode::SUCCESS };
    // Whoever reads has seen enough, as `head` has.
    let is_pipe = |error: &io::Error| error.kind() == io::ErrorKind::BrokenPipe;
    let is_closed = match error.downcast_ref::<TerminalError>() {
        Some(TerminalError::Write(error)) => is_pipe(error),
        _ => error.downcast_ref::<io::Error>().is_some_and(is_pipe),
    };
    if is_closed {
        return ExitCode::SUCCESS;
    }
    let _ = writeln!(io::stderr(), "{error}");
    ExitCode::FAILURE
}

fn run(command: Command) -> Result<(), Box<dyn Error>> {
    match command {
        Command::Migrate { postgres } => on_runtime(migrate(&postgres)),
        Command::Token { command } => on_runtime(token(command)),
        Command::Serve(args) => {
            log(&args);
            on_runtime(async { Ok(serve::run(&args).await?) })
        }
        other => Ok(terminal::run(other, &mut io::stdout().lock())?),
    }
}

fn on_runtime(work: impl Future<Output = Result<(), Box<dyn Error>>>) -> Result<(), Box<dyn Error>> {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?.block_on(work)
}

fn log(args: &ServeArgs) {
    let filter = tracing_subscriber::EnvFilter::new("info,tokio_postgres=warn");
    let log =
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).with_ansi(io::stderr().is_terminal());
    if args.log_format == "json" {
        log.json().init();
    } else {
        log.init();
    }
}

async fn migrate(postgres: &PostgresArgs) -> Result<(), Box<dyn Error>> {
    let config = connect::settings(&postgres.url, postgres.password_file.as_deref())?;
    let applied = migrate::run(&mut connect::connect(&config, PATIENCE).await?).await?;
    let text = match applied.len() {
        0 => "the policy store is up to date".to_owned(),
        _ => format!("applied {}", applied.join(", ")),
    };
    writeln!(io::stdout(), "{text}")?;
    Ok(())
}

async fn token(command: TokenCommand) -> Result<(), Box<dyn Error>> {
    let mut out = io::stdout();
    let (TokenCommand::Create { postgres, .. }
    | TokenCommand::List { postgres, .. }
    | TokenCommand::Revoke { postgres, .. }) = &command;
    let config = connect::settings(&postgres.url, postgres.password_file.as_deref())?;
    let client = connect::connect(&config, PATIENCE).await?;
    match &command {
        TokenCommand::Create { name, write, .. } => writeln!(out, "{}", tokens::create(&client, name, *write).await?)?,
        TokenCommand::List { json, .. } => {
            let list = tokens::list(&client).await?;
            if *json {
                writeln!(out, "{}", serde_json::to_string_pretty(&list)?)?;
            } else {
                let time = |time: &Option<_>| time.as_ref().map_or_else(String::new, table::time);
                let row = |one: &tokens::Listed| {
                    vec![one.name.clone(), one.scope.into(), table::time(&one.created_at), time(&one.revoked_at)]
                };
                let rows = list.iter().map(row).collect();
                write!(out, "{}", table::of(&["NAME", "SCOPE", "CREATED", "REVOKED"], rows))?;
            }
        }
        TokenCommand::Revoke { name, .. } => {
            tokens::revoke(&client, name).await?;
            writeln!(out, "{name} opens nothing any more")?;
        }
    }
    Ok(())
}
