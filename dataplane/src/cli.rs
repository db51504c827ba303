//! The command line: what is asked, and the settings that flags, environment and file give together.

use std::{
    error::Error as _,
    ffi::{OsStr, OsString},
    net::SocketAddr,
    path::PathBuf,
};

use clap::{
    ArgMatches, Args, CommandFactory, FromArgMatches, Parser, Subcommand,
    builder::BoolishValueParser,
    error::{ContextKind, ContextValue, ErrorKind},
    parser::ValueSource,
};

use crate::{
    config::{self, ConfigError, Cores, Listen, LogFormat, Settings},
    listener::TransportChoice,
    resp::command::is_attribute_name,
};

const AFTER_HELP: &str = "\
Examples:
  sluice                                   serve the built-in example policy on 127.0.0.1:6390
  sluice --config sluice.toml --cores 2    serve with a config file, on two cores
  sluice check-config policy.toml          say everything that is wrong with a file
  sluice explain path=/v1/login method=POST key=ak_1
                                           which rules apply to a request, and why not the others
  sluice hot                               which keys are asked for most, as they come
  sluice import envoy-ratelimit config.yaml --output policy.toml
                                           a policy of the rules of Envoy's ratelimit service

Precedence: flag, environment variable, config file, default. sluice.toml documents every setting.
Signals: SIGHUP reads the policy again; SIGTERM and SIGINT leave (a second one at once).
Exit codes: 0 done, 1 something is wrong with config, policy or system, 2 usage.";

/// Answers "may this request pass?" for API gateways, thread per core.
#[derive(Debug, Parser)]
#[command(name = "sluice", version, after_help = AFTER_HELP, args_conflicts_with_subcommands = true)]
pub struct Cli {
    /// What to do; serve when nothing is said.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// The flags of serve.
    #[command(flatten)]
    pub serve: ServeArgs,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve checks (the default).
    Serve(Box<ServeArgs>),
    /// Say everything that is wrong with a config file or a policy file.
    CheckConfig {
        /// The file; which of the two it is shows from its content.
        file: PathBuf,
    },
    /// Show for each rule whether it applies to a request, and why not.
    Explain {
        /// Config file that names the policy.
        #[arg(long, env = "SLUICE_CONFIG", value_name = "FILE")]
        config: Option<PathBuf>,
        /// Policy file; left out: the config's, or else the built-in example.
        #[arg(long, env = "SLUICE_POLICY", value_name = "FILE")]
        policy: Option<PathBuf>,
        /// JSON for programs instead of a table for people.
        #[arg(long)]
        json: bool,
        /// The request's attributes.
        #[arg(required = true, value_name = "name=value", value_parser = attribute)]
        attributes: Vec<(String, String)>,
    },
    /// Show the keys that a running server is asked for most, live.
    Hot(HotArgs),
    /// Make a policy of the rules of another rate limiter.
    Import {
        /// Which limiter the files are for.
        #[command(subcommand)]
        from: ImportFrom,
    },
}

/// Whose rules are imported.
#[derive(Clone, Debug, Subcommand)]
pub enum ImportFrom {
    /// Take the YAML configuration of envoyproxy/ratelimit, Envoy's rate limit service.
    ///
    /// What Sluice cannot express is listed on standard error with file and line; then no policy is written, and the exit
    /// code is 1. What changes no verdict is noted there, and the exit code stays 0.
    EnvoyRatelimit(ImportArgs),
}

/// What is imported, and where it goes.
#[derive(Args, Clone, Debug)]
pub struct ImportArgs {
    /// The files, one for each domain, as the service reads them.
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// Where the policy is written; left out: standard output.
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// The list of problems and notes, on standard error, as JSON for programs.
    #[arg(long)]
    pub json: bool,
}

/// What `hot` shows, and of which server.
#[derive(Args, Clone, Debug)]
pub struct HotArgs {
    /// Config file that says where the ops port is.
    #[arg(long, env = "SLUICE_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Address of the server's ops port; left out: the config's, or else 127.0.0.1:9390.
    #[arg(long, env = "SLUICE_LISTEN_OPS", value_name = "ADDR", value_parser = address)]
    pub ops: Option<SocketAddr>,
    /// How many keys at most.
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u16).range(1..=100))]
    pub top: u16,
    /// Seconds from one table to the next.
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, value_parser = interval_secs)]
    pub interval: f64,
    /// One table, and then the end.
    #[arg(long)]
    pub once: bool,
    /// JSON for programs instead of a table for people: a line each time.
    #[arg(long)]
    pub json: bool,
}

/// The flags of serve.
#[derive(Args, Clone, Debug, Default)]
pub struct ServeArgs {
    /// Config file (TOML); `sluice.toml` in the repository documents every setting.
    #[arg(long, env = "SLUICE_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Policy file (TOML); left out: the config's, or else the built-in example.
    #[arg(long, env = "SLUICE_POLICY", value_name = "FILE")]
    pub policy: Option<PathBuf>,
    /// Cores that serve checks: a count (0 = all), or a list such as `0,2`, `0-3`, or `0,` for core 0 alone [default: 0].
    #[arg(long, env = "SLUICE_CORES", value_name = "N|LIST")]
    pub cores: Option<Cores>,
    /// The same as a list always: `0` is core 0, `0,2-3` are three.
    #[arg(long, env = "SLUICE_CPUS", value_name = "LIST", value_parser = Cores::list)]
    pub cpus: Option<Cores>,
    /// TCP address of the RESP face [default: 127.0.0.1:6390].
    #[arg(long, env = "SLUICE_LISTEN_RESP", value_name = "ADDR", value_parser = address)]
    pub listen_resp: Option<SocketAddr>,
    /// Unix socket of the RESP face.
    #[arg(long, env = "SLUICE_LISTEN_UNIX", value_name = "PATH")]
    pub listen_unix: Option<PathBuf>,
    /// Where the counts are: redis:// or rediss://, redis+cluster://, redis+sentinel://host:port/master, unix://. May come
    /// several times, as seeds. Left out: the config's, or else this process's memory.
    #[arg(long, env = "SLUICE_REDIS", value_name = "URL", value_delimiter = ',', hide_env_values = true)]
    pub redis: Vec<String>,
    /// Where the policy comes from in place of a file: postgres://user@host/database. Every way to connect and its TLS is
    /// described at postgres.url in sluice.toml.
    #[arg(long, env = "SLUICE_POSTGRES", value_name = "URL", hide_env_values = true)]
    pub postgres: Option<String>,
    /// TCP address of the HTTP face, or `off` [default: 127.0.0.1:8390].
    #[arg(long, env = "SLUICE_LISTEN_HTTP", value_name = "ADDR")]
    pub listen_http: Option<Listen>,
    /// TCP address of the gRPC face (Envoy's rate limit service), or `off` [default: 127.0.0.1:8391].
    #[arg(long, env = "SLUICE_LISTEN_GRPC", value_name = "ADDR")]
    pub listen_grpc: Option<Listen>,
    /// Address of the ops port [default: 127.0.0.1:9390].
    #[arg(long, env = "SLUICE_LISTEN_OPS", value_name = "ADDR", value_parser = address)]
    pub listen_ops: Option<SocketAddr>,
    /// How bytes move between sockets and decisions [default: auto].
    #[arg(long, env = "SLUICE_TRANSPORT", value_name = "KIND", value_enum)]
    pub transport: Option<TransportChoice>,
    /// Start even where another process listens on the same port [default: false].
    #[arg(
        long,
        env = "SLUICE_SHARE_PORT",
        value_name = "BOOL",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "true",
        value_parser = BoolishValueParser::new()
    )]
    pub share_port: Option<bool>,
    /// What is logged: a level, or target=level pairs [default: info].
    #[arg(long, env = "SLUICE_LOG_LEVEL", value_name = "LEVEL", value_parser = log_level)]
    pub log_level: Option<String>,
    /// How log lines look [default: text].
    #[arg(long, env = "SLUICE_LOG_FORMAT", value_name = "FORMAT", value_enum)]
    pub log_format: Option<LogFormat>,
}

impl Cli {
    /// The command line of this process. Ends the process, with exit code 2, where it cannot be meant.
    pub fn of_process() -> Self {
        Self::of(std::env::args_os()).unwrap_or_else(|error| error.exit())
    }

    /// The command line of these words, the first of which is the program.
    ///
    /// # Errors
    ///
    /// What cannot be meant, for people; or the help that was asked for.
    pub fn of(words: impl IntoIterator<Item = impl Into<OsString>>) -> Result<Self, clap::Error> {
        let words: Vec<OsString> = words.into_iter().map(Into::into).collect();
        let parse = |words: &[OsString]| Self::command().try_get_matches_from(words);
        let matches = match (parse(&words), serve_first(&words)) {
            (Ok(matches), _) => matches,
            // Flags of serve before the word itself: they mean the same.
            (Err(error), Some(words)) if error.kind() == ErrorKind::ArgumentConflict => {
                parse(&words).map_err(|_| error)?
            }
            (Err(error), _) => return Err(blamed(error, &words)),
        };
        let mut cli = Self::from_arg_matches(&matches)?;
        match (&mut cli.command, matches.subcommand()) {
            (Some(Command::Serve(args)), Some((_, matches))) => args.choose_cores(matches),
            (Some(Command::Explain { attributes, .. }), _) => {
                if let Some(name) = twice(attributes) {
                    let message = format!("the attribute `{name}` comes twice");
                    return Err(Self::command().error(ErrorKind::ArgumentConflict, message));
                }
            }
            _ => cli.serve.choose_cores(&matches),
        }
        Ok(cli)
    }
}

/// The words with `serve`, if it comes later, as the first.
fn serve_first(words: &[OsString]) -> Option<Vec<OsString>> {
    let at = words.iter().rposition(|word| word == "serve").filter(|&at| at > 1)?;
    let mut words = words.to_vec();
    let serve = words.remove(at);
    words.insert(1, serve);
    Some(words)
}

/// Where a value comes from an environment variable, the error must name that: the flag is nowhere on the command line.
fn blamed(error: clap::Error, words: &[OsString]) -> clap::Error {
    let Some(ContextValue::String(argument)) = error.get(ContextKind::InvalidArg) else {
        return error;
    };
    let flag = argument.split([' ', '=', '[']).next().unwrap_or_default();
    let is_flag = |word: &OsStr| word.as_encoded_bytes().split(|&byte| byte == b'=').next() == Some(flag.as_bytes());
    let serve = ServeArgs::augment_args(clap::Command::new("sluice"));
    let known = serve.get_arguments().find(|known| known.get_long() == flag.strip_prefix("--"));
    let is_address = argument.contains("<ADDR>");
    let variable = known.and_then(clap::Arg::get_env).map(OsStr::to_string_lossy);
    let value = variable.as_deref().and_then(std::env::var_os);
    let (Some(variable), Some(value), false) = (variable, value, words.iter().any(|word| is_flag(word))) else {
        return error;
    };
    let why = match (error.source(), error.get(ContextKind::ValidValue)) {
        _ if value.is_empty() && is_address => format!("it is set, and empty; unset it, or {}", config::ADDRESS_HINT),
        _ if value.is_empty() => "it is set, and empty; unset it for the default".to_owned(),
        (Some(why), _) => why.to_string(),
        (None, Some(valid)) => format!("must be one of {valid}"),
        (None, None) => "cannot be understood".into(),
    };
    let message = format!("the environment variable {variable}={value:?}: {why}");
    Cli::command().error(error.kind(), message)
}

impl ServeArgs {
    /// `--cores` and `--cpus` say the same, so one of them counts: a flag before the environment, the later flag before the
    /// earlier, and `SLUICE_CPUS` before `SLUICE_CORES`.
    fn choose_cores(&mut self, matches: &ArgMatches) {
        let rank = |name| {
            let is_flag = matches.value_source(name) == Some(ValueSource::CommandLine);
            (is_flag, matches.index_of(name).filter(|_| is_flag))
        };
        if self.cores.is_some() && rank("cores") > rank("cpus") {
            self.cpus = None;
        }
    }

    /// The settings: the file's, and over them what flags and environment say.
    ///
    /// # Errors
    ///
    /// Everything that is wrong with the file or with a value.
    pub fn settings(&self) -> Result<Settings, ConfigError> {
        let mut settings = match &self.config {
            Some(path) => Settings::read(path)?,
            None => Settings::default(),
        };
        let args = self.clone();
        settings.policy = args.policy.or(settings.policy);
        settings.cores = args.cpus.or(args.cores).unwrap_or(settings.cores);
        settings.resp.listen = args.listen_resp.unwrap_or(settings.resp.listen);
        settings.resp.listen_unix = args.listen_unix.or(settings.resp.listen_unix);
        settings.resp.share_port = args.share_port.unwrap_or(settings.resp.share_port);
        if !args.redis.is_empty() {
            settings.redis.urls = args.redis;
        }
        settings.postgres.url = args.postgres.or(settings.postgres.url);
        settings.http.listen = args.listen_http.unwrap_or(settings.http.listen);
        settings.grpc.listen = args.listen_grpc.unwrap_or(settings.grpc.listen);
        settings.ops.listen = args.listen_ops.unwrap_or(settings.ops.listen);
        settings.transport.kind = args.transport.unwrap_or(settings.transport.kind);
        settings.log.level = args.log_level.unwrap_or(settings.log.level);
        settings.log.format = args.log_format.unwrap_or(settings.log.format);
        settings.check()?;
        Ok(settings)
    }
}

fn attribute(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if is_attribute_name(name.as_bytes()) => Ok((name.into(), value.into())),
        Some((name, _)) => Err(format!("{name:?} is not an attribute name: those have a-z, 0-9, _, - and .")),
        None => Err("an attribute is written name=value".into()),
    }
}

/// The first name that comes twice.
fn twice(attributes: &[(String, String)]) -> Option<&str> {
    let earlier = |at: usize| attributes[..at].iter().any(|(name, _)| *name == attributes[at].0);
    (0..attributes.len()).find(|&at| earlier(at)).map(|at| attributes[at].0.as_str())
}

fn address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|error| format!("{error} ({})", config::ADDRESS_HINT))
}

fn interval_secs(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(secs) if (0.1..=3600.0).contains(&secs) => Ok(secs),
        _ => Err("write seconds from 0.1 to 3600".into()),
    }
}

fn log_level(text: &str) -> Result<String, String> {
    if config::is_log_filter(text) {
        Ok(text.into())
    } else {
        Err("write error, warn, info, debug or trace, or target=level pairs such as warn,sluice=debug".into())
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn flags_win_over_the_file() {
        let path = std::env::temp_dir().join(format!("sluice-cli-{}.toml", std::process::id()));
        std::fs::write(&path, "cores = 3\n[resp]\nlisten = \"127.0.0.1:1\"\n[ops]\nlisten = \"127.0.0.1:2\"\n")
            .unwrap();
        let cli = Cli::parse_from(["sluice", "--config", path.to_str().unwrap(), "--listen-resp", "127.0.0.1:9"]);
        let settings = cli.serve.settings().unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!((settings.resp.listen.port(), settings.ops.listen.port()), (9, 2));
        assert_eq!(settings.cores, Cores::Count(3));
    }

    #[test]
    fn the_later_of_cores_and_cpus_wins() {
        let cores = |words: &[&str]| {
            let cli = Cli::of([&["sluice"], words].concat()).unwrap();
            cli.serve.settings().unwrap().cores
        };
        assert_eq!(cores(&["--cores", "2"]), Cores::Count(2));
        assert_eq!(cores(&["--cores", "0,"]), Cores::List(vec![0]));
        assert_eq!(cores(&["--cpus", "0"]), Cores::List(vec![0]));
        assert_eq!(cores(&["--cores", "2", "--cpus", "1"]), Cores::List(vec![1]));
        assert_eq!(cores(&["--cpus", "1", "--cores", "2"]), Cores::Count(2));
    }

    #[test]
    fn flags_of_serve_may_come_before_the_word() {
        let cli = Cli::of(["sluice", "--listen-resp", "127.0.0.1:9", "serve", "--cores", "1"]).unwrap();
        let Some(Command::Serve(args)) = cli.command else { panic!("{cli:?}") };
        assert_eq!(args.listen_resp, Some(SocketAddr::from(([127, 0, 0, 1], 9))));
        assert_eq!(args.cores, Some(Cores::Count(1)));
        assert!(Cli::of(["sluice", "--cores", "1", "explain", "path=/a"]).is_err());
    }
}
