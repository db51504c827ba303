//! The commands that do not serve: `check-config` and `explain`; `hot` and `import` have modules of their own.

pub mod hot;
pub mod import;

use std::{
    fmt,
    fs::File,
    io::{self, Read, Write},
    path::{Path, PathBuf},
};

use policy_sync::{
    check,
    explain::{Explanation, Outcome, explain},
    file,
    model::{Allowance, Mode, Policy, QuotaPeriod},
    snapshot::RULES_PER_CHECK_MAX,
    stored::last_good::{self, LastGoodError},
};
use thiserror::Error;
use toml::de::{DeTable, DeValue};

use crate::{
    config::{self, ConfigError, Settings},
    control::{self, PolicyError},
    policy::{LoadedPolicy, LocalTerms, RuleSlots},
};

/// Why a command ends with exit code 1.
#[derive(Debug, Error)]
pub enum CommandError {
    /// A file that was to be checked cannot be read.
    #[error("{}: cannot be read: {error}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// The files that were checked have problems.
    #[error("{}", lines(.0))]
    Faults(Vec<FileFaults>),
    /// The policy has problems.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// The config has problems.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The policy is in the store, and there is no copy of it here.
    #[error(
        "the policy comes from the policy store, and no copy of it is on disk: name a policy file with --policy, or \
         set postgres.last_good"
    )]
    InStore,
    /// The copy of the store's policy cannot be used.
    #[error(transparent)]
    LastGood(#[from] LastGoodError),
    /// The answer could not be written.
    #[error("cannot write: {0}")]
    Write(#[from] io::Error),
}

/// Everything that is wrong with one file.
#[derive(Debug)]
pub struct FileFaults {
    path: PathBuf,
    kind: Kind,
    count: usize,
    /// One line for each.
    text: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Config,
    Policy,
}

/// Checks a config file and the policy that it names, or a policy file; writes what it found to be right. The file is
/// read once, so it may be a pipe.
///
/// # Errors
///
/// Everything that is wrong.
pub fn check_config(path: &Path, unix_ms: i64, out: &mut impl Write) -> Result<(), CommandError> {
    let bytes = read_bounded(path).map_err(|error| CommandError::Read { path: path.into(), error })?;
    let text = String::from_utf8_lossy(&bytes);
    // Nothing that large is a config, and going on after an error would only cost memory.
    let is_large = bytes.len() as u64 > config::FILE_BYTES_MAX;
    let table = if is_large { DeTable::new() } else { DeTable::parse_recoverable(&text).0.into_inner() };
    let mut faults = Vec::new();
    let mut rules_max = Settings::default().limits.rules_max;
    let policy = if is_large || kind_of(&table) == Kind::Policy {
        Some((path.to_path_buf(), control::of_bytes(bytes.clone(), path, file::FIRST_VERSION)))
    } else {
        match check_settings(&bytes, path) {
            Ok(_) if table.is_empty() => {
                let name = path.display();
                writeln!(out, "ok: {name} is empty: a config of defaults; as a policy it would be refused")?;
            }
            Ok(settings) => {
                rules_max = settings.limits.rules_max;
                writeln!(out, "ok: {} is a config file", path.display())?;
            }
            Err(error) => faults.push(FileFaults::new(path, Kind::Config, error.problems.len(), &error)),
        }
        // Even where the config is wrong elsewhere, the policy that it names is worth checking.
        let path = table.get("policy").and_then(|value| value.get_ref().as_str()).map(PathBuf::from);
        path.map(|path| (path.clone(), control::read(Some(&path), file::FIRST_VERSION)))
    };
    if let Some((path, read)) = policy {
        match check_policy(&path, read, rules_max) {
            Ok(policy) => {
                writeln!(out, "ok: {} is a policy file with {}", path.display(), size(&policy, unix_ms))?;
                if let Some(remark) = check::stars_in_identities(&policy) {
                    writeln!(out, "warning: {}: {remark}", path.display())?;
                }
            }
            Err(fault) => faults.push(fault),
        }
    }
    if faults.is_empty() { Ok(()) } else { Err(CommandError::Faults(faults)) }
}

/// Reads as much as the larger of the two kinds of file may have, and one byte: that tells one that is too large.
fn read_bounded(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(file::FILE_BYTES_MAX + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn check_settings(bytes: &[u8], path: &Path) -> Result<Settings, ConfigError> {
    let name = path.display().to_string();
    let settings = Settings::of_bytes(bytes, &name)?;
    settings.check_machine(&String::from_utf8_lossy(bytes), &name)?;
    Ok(settings)
}

/// Which of the two a file is meant to be. A config has at least one setting, or nothing; a policy has `[[rule]]` or
/// `[[override]]`, or another list of sections where these are misspelt.
fn kind_of(table: &DeTable<'_>) -> Kind {
    const SETTINGS: [&str; 12] = [
        "cores",
        "policy",
        "redis",
        "postgres",
        "shadow",
        "hot",
        "resp",
        "limits",
        "transport",
        "ops",
        "shutdown",
        "log",
    ];
    let is_section = |value: &DeValue<'_>| matches!(value, DeValue::Table(_));
    let is_list =
        |value: &DeValue<'_>| value.as_array().is_some_and(|items| items.iter().any(|item| is_section(item.get_ref())));
    if SETTINGS.iter().any(|setting| table.contains_key(*setting)) {
        Kind::Config
    } else if table.contains_key("rule")
        || table.contains_key("override")
        || table.values().any(|value| is_list(value.get_ref()))
    {
        Kind::Policy
    } else {
        Kind::Config
    }
}

/// Compiles a policy that was read, as serving it would.
fn check_policy(path: &Path, read: Result<Policy, PolicyError>, rules_max: usize) -> Result<Policy, FileFaults> {
    let policy = read.map_err(|error| {
        let count = match &error {
            PolicyError::File(file::ReadError::Problems(problems)) => problems.list().len() + problems.more(),
            _ => 1,
        };
        FileFaults::new(path, Kind::Policy, count, &error)
    })?;
    match LoadedPolicy::load(policy.clone(), 0, LocalTerms::default(), &mut RuleSlots::new(rules_max)) {
        Ok(_) => Ok(policy),
        Err(error) => Err(FileFaults::new(path, Kind::Policy, 1, &format!("{}: {error}", path.display()))),
    }
}

fn size(policy: &Policy, unix_ms: i64) -> String {
    let of = |mode| policy.rules.iter().filter(|rule| rule.mode == mode).count();
    let (rules, overrides) = (counted(policy.rules.len(), "rule"), counted(policy.overrides.len(), "override"));
    let expired = policy.overrides.iter().filter_map(|over| over.expires);
    let expired = match expired.filter(|expires| expires.as_millisecond() <= unix_ms).count() {
        0 => String::new(),
        count => format!(" ({count} expired)"),
    };
    format!("{rules} ({} in shadow, {} off) and {overrides}{expired}", of(Mode::Shadow), of(Mode::Off))
}

fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

impl FileFaults {
    fn new(path: &Path, kind: Kind, count: usize, text: &impl fmt::Display) -> Self {
        Self { path: path.into(), kind, count, text: text.to_string() }
    }
}

fn lines(faults: &[FileFaults]) -> String {
    let each = faults.iter().map(|one| {
        let kind = match one.kind {
            Kind::Config => "config",
            Kind::Policy => "policy",
        };
        format!("{}\n{} is a {kind} file with {}", one.text, one.path.display(), counted(one.count, "problem"))
    });
    each.collect::<Vec<_>>().join("\n")
}

/// Explains every rule for a request.
///
/// # Errors
///
/// When config or policy have problems, or the answer cannot be written.
pub fn explain_request(
    config: Option<&Path>,
    policy: Option<&Path>,
    attributes: &[(String, String)],
    unix_ms: i64,
    json: bool,
    out: &mut impl Write,
) -> Result<(), CommandError> {
    let settings = match (config, policy) {
        (Some(config), None) => Some(Settings::read(config)?),
        _ => None,
    };
    let (policy, source) = match settings {
        Some(settings) if settings.postgres.url.is_some() => last_good_policy(settings.postgres.last_good.as_deref())?,
        settings => {
            let source = policy.map(Path::to_path_buf).or(settings.and_then(|settings| settings.policy));
            let source = source.as_deref();
            (control::read(source, file::FIRST_VERSION)?, control::source_name(source))
        }
    };
    let given: Vec<(&str, &[u8])> = attributes.iter().map(|(name, value)| (name.as_str(), value.as_bytes())).collect();
    let explanations = explain(&policy, &given, unix_ms);
    if json {
        let page = serde_json::json!({
            "policy": source,
            "attributes": attributes.iter().cloned().collect::<std::collections::BTreeMap<_, _>>(),
            "rules": explanations.iter().map(as_json).collect::<Vec<_>>(),
        });
        writeln!(out, "{page:#}")?;
    } else {
        writeln!(out, "policy: {source}\n")?;
        write_table(&explanations, out)?;
    }
    Ok(())
}

/// The policy of the store as this host last had it, and what people call it.
fn last_good_policy(path: Option<&Path>) -> Result<(Policy, String), CommandError> {
    let path = path.ok_or(CommandError::InStore)?;
    let stored = last_good::read(path)?.ok_or(CommandError::InStore)?;
    let source = format!("{} (version {} of the policy store)", path.display(), stored.version());
    Ok((stored.policy(), source))
}

fn write_table(explanations: &[Explanation], out: &mut impl Write) -> io::Result<()> {
    let rows: Vec<[String; 4]> = explanations
        .iter()
        .map(|one| {
            let applies = if one.applies() { "yes" } else { "no" };
            [one.rule.clone(), mode(one.mode).into(), applies.into(), reason(&one.outcome)]
        })
        .collect();
    let head = ["RULE", "MODE", "APPLIES", "WHY"].map(String::from);
    let width =
        |column: usize| rows.iter().chain([&head]).map(|row| row[column].chars().count()).max().unwrap_or_default();
    let (first, second) = (width(0), width(1));
    for [rule, mode, applies, why] in [&head].into_iter().chain(&rows) {
        writeln!(out, "{rule:first$}  {mode:second$}  {applies:7}  {why}")?;
    }
    writeln!(out, "\n{}", summary(explanations))
}

/// What can be said about the verdict without knowing what was asked before.
fn summary(explanations: &[Explanation]) -> String {
    let applying: Vec<_> = explanations.iter().filter(|one| one.applies()).collect();
    let denying = |one: &&&Explanation| {
        let denies = matches!(one.outcome, Outcome::Applies { allowance: Allowance::Deny, .. });
        denies && one.mode == Mode::Enforce
    };
    let verdict = match applying.iter().find(denying) {
        _ if applying.len() > RULES_PER_CHECK_MAX => {
            format!("more than {RULES_PER_CHECK_MAX}, so the server answers with an error")
        }
        Some(one) => format!("{} denies the request", one.rule),
        None if applying.iter().any(|one| one.mode == Mode::Enforce) => {
            "the request passes while each has tokens for it".into()
        }
        None => "none decides, so the request passes".into(),
    };
    format!("{} of {} apply: {verdict}", applying.len(), counted(explanations.len(), "rule"))
}

fn mode(mode: Mode) -> &'static str {
    match mode {
        Mode::Enforce => "enforce",
        Mode::Shadow => "shadow",
        Mode::Off => "off",
    }
}

fn granted(allowance: Allowance) -> String {
    match allowance {
        Allowance::Limit(limit) => limit.to_string(),
        Allowance::Quota(quota) => {
            let every = match quota.every {
                QuotaPeriod::Day => "day",
                QuotaPeriod::Month => "month",
            };
            format!("{} each {every}", quota.amount)
        }
        Allowance::Deny => "nothing (deny)".into(),
        Allowance::Exempt => "everything (exempt)".into(),
    }
}

fn reason(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Applies { identity, allowance, overridden_by, point, rollout_bp } => {
            let by = overridden_by.as_ref().map(|by| format!(", by an override for {by}")).unwrap_or_default();
            let rollout = match *rollout_bp {
                policy_sync::model::ROLLOUT_BP_ALL => String::new(),
                covered => format!(", at {} % of a rollout to {} %", percent(*point), percent(covered)),
            };
            format!("{identity} gets {}{by}{rollout}", granted(*allowance))
        }
        Outcome::Off => "the rule is off".into(),
        Outcome::Missing { attribute } => format!("the request has no `{attribute}`"),
        Outcome::Mismatch { attribute, wanted, found } => {
            format!("`{attribute}` is {found:?}, not {wanted:?}")
        }
        Outcome::Extra { attribute } => format!("match_all, and the request also has `{attribute}`"),
        Outcome::OutsideRollout { identity, point, rollout_bp } => {
            format!("{identity} is at {} %, outside a rollout to {} %", percent(*point), percent(*rollout_bp))
        }
    }
}

fn percent(bp: u16) -> String {
    format!("{}.{:02}", bp / 100, bp % 100)
}

fn as_json(one: &Explanation) -> serde_json::Value {
    let mut value = serde_json::json!({
        "rule": one.rule,
        "mode": mode(one.mode),
        "applies": one.applies(),
        "outcome": code(&one.outcome),
        "why": reason(&one.outcome),
    });
    match &one.outcome {
        Outcome::Applies { identity, allowance, overridden_by, point, rollout_bp } => {
            value["identity"] = identity.as_str().into();
            value["allowance"] = serde_json::json!(allowance);
            value["overridden_by"] = serde_json::json!(overridden_by);
            value["rollout"] = rollout(*point, *rollout_bp);
        }
        Outcome::OutsideRollout { identity, point, rollout_bp } => {
            value["identity"] = identity.as_str().into();
            value["rollout"] = rollout(*point, *rollout_bp);
        }
        Outcome::Missing { attribute } | Outcome::Mismatch { attribute, .. } | Outcome::Extra { attribute } => {
            value["attribute"] = attribute.as_str().into();
        }
        Outcome::Off => {}
    }
    value
}

/// Both in percent: the identity is covered where the first is below the second.
fn rollout(point: u16, rollout_bp: u16) -> serde_json::Value {
    serde_json::json!({ "at_pct": f64::from(point) / 100.0, "covers_pct": f64::from(rollout_bp) / 100.0 })
}

/// The outcome's name for programs.
fn code(outcome: &Outcome) -> &'static str {
    match outcome {
        Outcome::Applies { .. } => "applies",
        Outcome::Off => "off",
        Outcome::Missing { .. } => "missing",
        Outcome::Mismatch { .. } => "mismatch",
        Outcome::Extra { .. } => "extra",
        Outcome::OutsideRollout { .. } => "outside_rollout",
    }
}
