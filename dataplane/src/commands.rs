//! The commands that do not serve: `check-config` and `explain`.

use std::{
    io::{self, Write},
    path::Path,
};

use policy_sync::{
    explain::{Explanation, Outcome, explain},
    file,
    model::{Allowance, Mode, Policy},
};
use thiserror::Error;

use crate::{
    config::{ConfigError, Settings},
    control::{EXAMPLE_NAME, EXAMPLE_POLICY},
};

/// Why a command ends with exit code 1.
#[derive(Debug, Error)]
pub enum CommandError {
    /// The policy has problems.
    #[error(transparent)]
    Policy(#[from] file::ReadError),
    /// The built-in policy has problems.
    #[error(transparent)]
    Example(#[from] file::Problems),
    /// The config has problems.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The answer could not be written.
    #[error("cannot write: {0}")]
    Write(#[from] io::Error),
}

/// Checks a config file and the policy that it names, or a policy file; writes what it found to be right.
///
/// # Errors
///
/// Everything that is wrong.
pub fn check_config(path: &Path, out: &mut impl Write) -> Result<(), CommandError> {
    if is_policy(path) {
        let policy = file::read(path)?;
        return Ok(writeln!(out, "ok: {} is a policy with {}", path.display(), size(&policy))?);
    }
    let settings = Settings::read(path)?;
    settings.check()?;
    writeln!(out, "ok: {} is a config file", path.display())?;
    if let Some(policy_path) = &settings.policy {
        let policy = file::read(policy_path)?;
        writeln!(out, "ok: {} is a policy with {}", policy_path.display(), size(&policy))?;
    }
    Ok(())
}

/// Whether a file is a policy: it has `[[rule]]` or `[[override]]`. What is neither readable nor TOML is taken for one too,
/// since most files that people check are.
fn is_policy(path: &Path) -> bool {
    match std::fs::read_to_string(path).map(|text| toml::from_str::<toml::Table>(&text)) {
        Ok(Ok(table)) => table.contains_key("rule") || table.contains_key("override"),
        _ => true,
    }
}

fn size(policy: &Policy) -> String {
    format!("{} rules and {} overrides", policy.rules.len(), policy.overrides.len())
}

/// Explains every rule for a request.
///
/// # Errors
///
/// When the policy has problems, or the answer cannot be written.
pub fn explain_request(
    policy: Option<&Path>,
    attributes: &[(String, String)],
    unix_ms: i64,
    json: bool,
    out: &mut impl Write,
) -> Result<(), CommandError> {
    let policy = match policy {
        Some(path) => file::read(path)?,
        None => file::parse(EXAMPLE_POLICY, EXAMPLE_NAME)?,
    };
    let attributes: Vec<(&str, &[u8])> =
        attributes.iter().map(|(name, value)| (name.as_str(), value.as_bytes())).collect();
    let explanations = explain(&policy, &attributes, unix_ms);
    if json {
        let rules: Vec<_> = explanations.iter().map(as_json).collect();
        serde_json::to_writer_pretty(&mut *out, &serde_json::json!({ "rules": rules })).map_err(io::Error::from)?;
        writeln!(out)?;
    } else {
        write_table(&explanations, out)?;
    }
    Ok(())
}

fn write_table(explanations: &[Explanation], out: &mut impl Write) -> io::Result<()> {
    let rows: Vec<[String; 4]> = explanations
        .iter()
        .map(|one| {
            let applies = if matches!(one.outcome, Outcome::Applies { .. }) { "yes" } else { "no" };
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
    let count = rows.iter().filter(|row| row[2] == "yes").count();
    writeln!(out, "\n{count} of {} rules apply{}", rows.len(), if count == 0 { ": the request is allowed" } else { "" })
}

fn mode(mode: Mode) -> &'static str {
    match mode {
        Mode::Enforce => "enforce",
        Mode::Shadow => "shadow",
        Mode::Off => "off",
    }
}

fn allowance(allowance: Allowance) -> String {
    match allowance {
        Allowance::Limit(limit) => limit.to_string(),
        Allowance::Quota(quota) => format!("{} each {:?}", quota.amount, quota.every),
        Allowance::Deny => "denies everything".into(),
        Allowance::Exempt => "exempt".into(),
    }
}

fn reason(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Applies { identity, allowance: granted, overridden_by } => {
            let by = overridden_by.as_ref().map(|by| format!(" (override for {by})")).unwrap_or_default();
            format!("identity {identity}: {}{by}", allowance(*granted))
        }
        Outcome::Off => "the rule is off".into(),
        Outcome::Missing { attribute } => format!("the request has no `{attribute}`"),
        Outcome::Mismatch { attribute, wanted, found } => {
            format!("`{attribute}` is {found:?}, not {wanted:?}")
        }
        Outcome::Extra { attribute } => format!("match_all: the request also has `{attribute}`"),
        Outcome::OutsideRollout { identity, point, rollout_bp } => {
            let percent = |bp: u16| format!("{}.{:02}", bp / 100, bp % 100);
            format!(
                "identity {identity} is at {} %, outside the rollout of {} %",
                percent(*point),
                percent(*rollout_bp)
            )
        }
    }
}

fn as_json(one: &Explanation) -> serde_json::Value {
    let mut value = serde_json::json!({
        "rule": one.rule,
        "mode": mode(one.mode),
        "applies": matches!(one.outcome, Outcome::Applies { .. }),
        "why": reason(&one.outcome),
    });
    if let Outcome::Applies { identity, allowance, overridden_by } = &one.outcome {
        value["identity"] = identity.as_str().into();
        value["allowance"] = serde_json::json!(allowance);
        value["overridden_by"] = serde_json::json!(overridden_by);
    }
    value
}
