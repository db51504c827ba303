//! The command line.

use std::{net::SocketAddr, path::PathBuf};

use clap::{Args, Parser, Subcommand};

const AFTER_HELP: &str = "\
Examples:
  sluice-admin migrate --postgres postgres://owner@db/sluice      make or update the policy store
  sluice-admin token create alice --write --postgres ...          let somebody call the API
  sluice-admin serve --postgres ... --redis redis://127.0.0.1     serve the API on 127.0.0.1:8490
  sluice-admin rules apply policy.toml --comment 'first rules'    put the rules of a file into the policy
  sluice-admin rules set login-per-key limit.capacity=10 --wait   tighten a rule, and wait until gateways have it
  sluice-admin rollback 41                                        everything back to what version 41 said

`migrate`, `token` and `serve` speak to PostgreSQL. All others ask the API at --url with the token in SLUICE_ADMIN_TOKEN.
Exit codes: 0 done, 1 it could not be done, 2 usage.";

/// Administers the policy of Sluice: the API, and commands that speak to it.
#[derive(Debug, Parser)]
#[command(name = "sluice-admin", version, after_help = AFTER_HELP)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Make the policy store, or bring it to this version's form. Safe to run twice, and by two at once.
    Migrate {
        /// The store.
        #[command(flatten)]
        postgres: PostgresArgs,
    },
    /// Say who may call the API.
    Token {
        /// What to do.
        #[command(subcommand)]
        command: TokenCommand,
    },
    /// Serve the API.
    Serve(ServeArgs),
    /// Look at rules, and change them.
    Rules {
        /// What to do.
        #[command(subcommand)]
        command: RulesCommand,
    },
    /// Who changed what, when and why.
    History {
        /// Only what touched this rule or its overrides.
        #[arg(long)]
        rule: Option<String>,
        /// How many changes.
        #[arg(long, default_value_t = 20)]
        limit: u32,
        /// The API.
        #[command(flatten)]
        api: ApiArgs,
    },
    /// What differs between two versions.
    Diff {
        /// The one; 0 is the empty policy.
        from: u64,
        /// The other; left out: the newest.
        to: Option<u64>,
        /// The API.
        #[command(flatten)]
        api: ApiArgs,
    },
    /// Bring back what the policy said at a version, as a new version.
    Rollback {
        /// The version.
        to: u64,
        /// Only this rule with its overrides.
        #[arg(long)]
        rule: Option<String>,
        /// How the change is made.
        #[command(flatten)]
        change: ChangeArgs,
        /// The API.
        #[command(flatten)]
        api: ApiArgs,
    },
    /// Who would have been denied by shadow rules.
    Shadow {
        /// Only this rule.
        #[arg(long)]
        rule: Option<String>,
        /// From this hour on, such as 2027-01-01T00:00:00Z; left out: the last 24 hours.
        #[arg(long)]
        from: Option<String>,
        /// Only hours that begin before.
        #[arg(long)]
        to: Option<String>,
        /// How many identities of each rule.
        #[arg(long, default_value_t = 20)]
        limit: u32,
        /// The API.
        #[command(flatten)]
        api: ApiArgs,
    },
    /// Which gateway runs which version.
    Gateways {
        /// The API.
        #[command(flatten)]
        api: ApiArgs,
    },
    /// Write the policy as a policy file on standard output.
    Export {
        /// As it was at this version.
        #[arg(long)]
        version: Option<u64>,
        /// The API.
        #[command(flatten)]
        api: ApiArgs,
    },
}

/// What to do with tokens.
#[derive(Debug, Subcommand)]
pub enum TokenCommand {
    /// Make one, and show it; nobody can show it again.
    Create {
        /// Whose it is: changes are attributed to this name.
        name: String,
        /// It may change the policy; without, it may only read, and try changes.
        #[arg(long)]
        write: bool,
        /// The store.
        #[command(flatten)]
        postgres: PostgresArgs,
    },
    /// Show all, without the tokens themselves.
    List {
        /// JSON for programs instead of a table for people.
        #[arg(long)]
        json: bool,
        /// The store.
        #[command(flatten)]
        postgres: PostgresArgs,
    },
    /// Close one. It opens nothing from then on.
    Revoke {
        /// Whose.
        name: String,
        /// The store.
        #[command(flatten)]
        postgres: PostgresArgs,
    },
}

/// What to do with rules.
#[derive(Debug, Subcommand)]
pub enum RulesCommand {
    /// Show all rules.
    List {
        /// The API.
        #[command(flatten)]
        api: ApiArgs,
    },
    /// Show one rule with its overrides.
    Get {
        /// Its name.
        name: String,
        /// The API.
        #[command(flatten)]
        api: ApiArgs,
    },
    /// Change fields of one rule.
    Set {
        /// Its name.
        name: String,
        /// Such as `limit.capacity=10` or `mode=shadow`; nothing after the `=` removes the field.
        #[arg(required = true, value_name = "field=value")]
        fields: Vec<String>,
        /// How the change is made.
        #[command(flatten)]
        change: ChangeArgs,
        /// The API.
        #[command(flatten)]
        api: ApiArgs,
    },
    /// Put the rules and overrides of a policy file into the policy.
    Apply {
        /// The file; `-` is standard input.
        file: PathBuf,
        /// Delete whatever the file does not have.
        #[arg(long)]
        whole: bool,
        /// How the change is made.
        #[command(flatten)]
        change: ChangeArgs,
        /// The API.
        #[command(flatten)]
        api: ApiArgs,
    },
    /// Delete one rule.
    Delete {
        /// Its name.
        name: String,
        /// Its overrides too; they cannot be without it.
        #[arg(long)]
        with_overrides: bool,
        /// How the change is made.
        #[command(flatten)]
        change: ChangeArgs,
        /// The API.
        #[command(flatten)]
        api: ApiArgs,
    },
}

/// How a change is made.
#[derive(Args, Clone, Debug)]
pub struct ChangeArgs {
    /// Why, for the history.
    #[arg(long, default_value = "")]
    pub comment: String,
    /// Only show what would differ.
    #[arg(long)]
    pub dry_run: bool,
    /// Wait until every live gateway has it, ten seconds at most.
    #[arg(long, conflicts_with = "dry_run")]
    pub wait: bool,
}

/// Where the API is.
#[derive(Args, Clone, Debug)]
pub struct ApiArgs {
    /// The API.
    #[arg(long, env = "SLUICE_ADMIN_URL", default_value = "http://127.0.0.1:8490")]
    pub url: String,
    /// File with the token; left out: the environment variable SLUICE_ADMIN_TOKEN.
    #[arg(long, value_name = "FILE", env = "SLUICE_ADMIN_TOKEN_FILE")]
    pub token_file: Option<PathBuf>,
    /// JSON for programs instead of a table for people.
    #[arg(long)]
    pub json: bool,
}

/// Where the policy store is.
#[derive(Args, Clone, Debug)]
pub struct PostgresArgs {
    /// PostgreSQL, such as `postgres://sluice_admin@db.internal/sluice?sslmode=verify-full`.
    #[arg(long = "postgres", env = "SLUICE_ADMIN_POSTGRES", hide_env_values = true, value_name = "URL")]
    pub url: String,
    /// File with the password, in place of the URL's.
    #[arg(long = "postgres-password-file", env = "SLUICE_ADMIN_POSTGRES_PASSWORD_FILE", value_name = "FILE")]
    pub password_file: Option<PathBuf>,
}

/// How the API is served.
#[derive(Args, Clone, Debug)]
pub struct ServeArgs {
    /// The policy store; a login in the role `sluice_admin` is enough.
    #[command(flatten)]
    pub postgres: PostgresArgs,
    /// The address. The API speaks HTTP without TLS: put a proxy that does before it where others can listen.
    #[arg(long, env = "SLUICE_ADMIN_LISTEN", default_value = "127.0.0.1:8490")]
    pub listen: SocketAddr,
    /// Redis that gateways hear new versions from, as their config has it; repeat it for seeds. Without it they hear NOTIFY.
    #[arg(long, env = "SLUICE_ADMIN_REDIS", value_name = "URL", value_delimiter = ',', hide_env_values = true)]
    pub redis: Vec<String>,
    /// File with the password of Redis, in place of the URL's.
    #[arg(long, env = "SLUICE_ADMIN_REDIS_PASSWORD_FILE", value_name = "FILE")]
    pub redis_password_file: Option<PathBuf>,
    /// Authorities (PEM) that the certificate of Redis may come from, in place of the system's.
    #[arg(long, env = "SLUICE_ADMIN_REDIS_CA_FILE", value_name = "FILE")]
    pub redis_ca_file: Option<PathBuf>,
    /// The channel; gateways have it as postgres.redis_channel.
    #[arg(long, default_value = "sluice:policy")]
    pub redis_channel: String,
    /// Connections to PostgreSQL at most.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub connections_max: u16,
    /// How long a connection to PostgreSQL may take, in milliseconds.
    #[arg(long, default_value_t = 2_000, value_parser = clap::value_parser!(u32).range(1..=60_000))]
    pub connect_timeout_ms: u32,
    /// How long a statement may take, in milliseconds; also how long a change waits for another one.
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=600_000))]
    pub statement_timeout_ms: u32,
    /// How long a request may take, in milliseconds.
    #[arg(long, default_value_t = 15_000, value_parser = clap::value_parser!(u32).range(1..=600_000))]
    pub request_timeout_ms: u32,
    /// The largest body of a request, in bytes.
    #[arg(long, default_value_t = 64 << 20, value_parser = clap::value_parser!(u32).range(1_024..=1 << 30))]
    pub body_bytes_max: u32,
    /// Requests that are answered at a time at most; further ones wait.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=10_000))]
    pub requests_max: u16,
    /// A gateway that was not seen for so many seconds counts as gone. They report every 30 s by default.
    #[arg(long, default_value_t = 90, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub live_secs: u32,
    /// Gateways that were not seen for so many days are forgotten.
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..=3_650))]
    pub forget_gateways_days: u32,
    /// What shadow rules saw is kept for so many days.
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=3_650))]
    pub keep_shadow_days: u32,
    /// The log on standard error: text or json.
    #[arg(long, env = "SLUICE_ADMIN_LOG_FORMAT", default_value = "text", value_parser = ["text", "json"])]
    pub log_format: String,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_sound() {
        super::Cli::command().debug_assert();
    }
}
