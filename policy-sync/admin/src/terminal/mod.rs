//! The commands that ask the API: tables for people, `--json` for programs.

mod client;
pub mod table;

use std::{
    fs,
    io::{self, Read, Write},
    path::Path,
    thread,
    time::Duration,
};

use serde_json::{Map, Value, json};
use ureq::http::Method;

pub use self::client::TerminalError;
use self::client::{Answer, Client, escaped};
use crate::cli::{ApiArgs, ChangeArgs, Command, RulesCommand};

/// How long `--wait` waits, and how often it looks.
const WAIT: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_millis(50);

/// Carries a command out.
///
/// # Errors
///
/// What the API says, and whatever else went wrong.
pub fn run(command: Command, out: &mut impl Write) -> Result<(), TerminalError> {
    match command {
        Command::Rules { command } => rules(command, out),
        Command::History { rule, limit, api } => {
            let mut query = vec![("limit", limit.to_string())];
            query.extend(rule.map(|rule| ("rule", rule)));
            show(&api, &Client::new(&api)?.get("/v1/changes", &query)?, out, history)
        }
        Command::Diff { from, to, api } => {
            let mut query = vec![("from", from.to_string())];
            query.extend(to.map(|to| ("to", to.to_string())));
            show(&api, &Client::new(&api)?.get("/v1/diff", &query)?, out, differences)
        }
        Command::Rollback { to, rule, change, api } => {
            let client = Client::new(&api)?;
            let seen = client.get("/v1/rules", &[("limit", "1".into())])?;
            let body = json!({ "to": to, "rule": rule, "comment": change.comment }).to_string();
            let query = [("dry_run", change.dry_run.to_string())];
            let answer = client.send(&Method::POST, "/v1/rollback", &query, seen.etag.as_deref(), body)?;
            changed(&client, &api, &change, &answer, out)
        }
        Command::Shadow { rule, from, to, limit, api } => {
            let mut query = vec![("limit", limit.to_string())];
            query.extend(rule.map(|rule| ("rule", rule)));
            query.extend(from.map(|from| ("from", from)));
            query.extend(to.map(|to| ("to", to)));
            show(&api, &Client::new(&api)?.get("/v1/shadow", &query)?, out, shadow)
        }
        Command::Gateways { api } => show(&api, &Client::new(&api)?.get("/v1/gateways", &[])?, out, gateways),
        Command::Export { version, api } => {
            let query: Vec<_> = version.map(|version| ("version", version.to_string())).into_iter().collect();
            let answer = Client::new(&api)?.get("/v1/policy.toml", &query)?;
            if api.json {
                return Ok(writeln!(out, "{}", json!({ "policy_toml": answer.text }))?);
            }
            Ok(out.write_all(answer.text.as_bytes())?)
        }
        // `main` does these.
        Command::Migrate { .. } | Command::Token { .. } | Command::Serve(_) => Ok(()),
    }
}

fn rules(command: RulesCommand, out: &mut impl Write) -> Result<(), TerminalError> {
    match command {
        RulesCommand::List { api } => {
            let client = Client::new(&api)?;
            let (mut all, mut after) = (Vec::new(), None);
            loop {
                let mut query = vec![("limit", "10000".to_owned())];
                query.extend(after.take().map(|after| ("after", after)));
                let page = client.get("/v1/rules", &query)?.json()?;
                all.extend(page["rules"].as_array().cloned().unwrap_or_default());
                after = page["next"].as_str().map(str::to_owned);
                if after.is_none() {
                    let list = json!({ "version": page["version"], "rules": all });
                    return if api.json {
                        Ok(writeln!(out, "{list:#}")?)
                    } else {
                        Ok(out.write_all(rule_list(&list).as_bytes())?)
                    };
                }
            }
        }
        RulesCommand::Get { name, api } => {
            let client = Client::new(&api)?;
            let mut rule = client.get(&format!("/v1/rules/{}", escaped(&name)), &[])?.json()?;
            let query = [("rule", name), ("limit", "10000".into())];
            rule["overrides"] = client.get("/v1/overrides", &query)?.json()?["overrides"].take();
            if api.json {
                return Ok(writeln!(out, "{rule:#}")?);
            }
            writeln!(out, "{} (changed last by version {})\n{:#}", word(&rule["name"]), rule["version"], rule["rule"])?;
            let overrides = array(&rule["overrides"]);
            let row = |one: &Value| vec![list(&one["identity"]), number(&one["version"]), brief(&one["override"])];
            let rows: Vec<_> = overrides.iter().map(row).collect();
            if !rows.is_empty() {
                write!(out, "\n{}", table::of(&["OVERRIDE FOR", "VERSION", "SAYS"], rows))?;
            }
            Ok(())
        }
        RulesCommand::Set { name, fields, change, api } => {
            let client = Client::new(&api)?;
            let path = format!("/v1/rules/{}", escaped(&name));
            let seen = client.get(&path, &[])?;
            let Value::Object(mut body) = seen.json()?["rule"].take() else {
                return Err(TerminalError::Refused("the answer has no rule".into()));
            };
            for field in &fields {
                set(&mut body, field)?;
            }
            let body = Value::Object(body).to_string();
            let answer = client.send(&Method::PUT, &path, &noted(&change), seen.etag.as_deref(), body)?;
            changed(&client, &api, &change, &answer, out)
        }
        RulesCommand::Apply { file, whole, change, api } => {
            let client = Client::new(&api)?;
            let text = read(&file)?;
            let answer = if whole {
                let seen = client.get("/v1/rules", &[("limit", "1".into())])?;
                client.send(&Method::PUT, "/v1/policy.toml", &noted(&change), seen.etag.as_deref(), text)?
            } else {
                client.send(&Method::PATCH, "/v1/policy.toml", &noted(&change), None, text)?
            };
            changed(&client, &api, &change, &answer, out)
        }
        RulesCommand::Delete { name, with_overrides, change, api } => {
            let client = Client::new(&api)?;
            let path = format!("/v1/rules/{}", escaped(&name));
            let seen = client.get(&path, &[])?;
            let mut query = noted(&change);
            query.push(("with_overrides", with_overrides.to_string()));
            let answer = client.send(&Method::DELETE, &path, &query, seen.etag.as_deref(), String::new())?;
            changed(&client, &api, &change, &answer, out)
        }
    }
}

fn noted(change: &ChangeArgs) -> Vec<(&'static str, String)> {
    vec![("comment", change.comment.clone()), ("dry_run", change.dry_run.to_string())]
}

fn read(path: &Path) -> Result<String, TerminalError> {
    let mut text = String::new();
    let read = if path == Path::new("-") {
        io::stdin().read_to_string(&mut text).map(|_| text)
    } else {
        fs::read_to_string(path)
    };
    read.map_err(|error| TerminalError::File { path: path.display().to_string(), why: error.to_string() })
}

/// Sets one field of a body: `limit.capacity=10`. A value is JSON, or else a text; nothing removes the field.
fn set(body: &mut Map<String, Value>, field: &str) -> Result<(), TerminalError> {
    let wrong = || TerminalError::Field(format!("{field:?} is not field=value, such as limit.capacity=10"));
    let (path, value) = field.split_once('=').ok_or_else(wrong)?;
    let (mut inside, mut names) = (body, path.split('.').peekable());
    while let Some(name) = names.next() {
        if name.is_empty() {
            return Err(wrong());
        }
        if names.peek().is_some() {
            let next = inside.entry(name).or_insert_with(|| json!({}));
            inside = next.as_object_mut().ok_or_else(wrong)?;
        } else if value.is_empty() {
            inside.remove(name);
        } else {
            let value = serde_json::from_str(value).unwrap_or_else(|_| value.into());
            inside.insert(name.into(), value);
        }
    }
    Ok(())
}

fn show(
    api: &ApiArgs,
    answer: &Answer,
    out: &mut impl Write,
    table: impl FnOnce(&Value) -> String,
) -> Result<(), TerminalError> {
    let value = answer.json()?;
    if api.json { Ok(writeln!(out, "{value:#}")?) } else { Ok(out.write_all(table(&value).as_bytes())?) }
}

/// Shows what a change did, and with `--wait` when gateways have it.
fn changed(
    client: &Client,
    api: &ApiArgs,
    change: &ChangeArgs,
    answer: &Answer,
    out: &mut impl Write,
) -> Result<(), TerminalError> {
    let mut value = answer.json()?;
    if !api.json {
        let what = match (value["changed"].as_bool(), value["dry_run"].as_bool()) {
            (Some(true), _) => format!("version {} is made", value["version"]),
            (_, Some(true)) if array(&value["differences"]).is_empty() => "nothing would differ".into(),
            (_, Some(true)) => format!("dry run: this would change version {}", value["version"]),
            _ => format!("nothing differs; the policy stays at version {}", value["version"]),
        };
        writeln!(out, "{}{what}", differences(&value))?;
        out.flush()?;
    }
    if change.wait && value["changed"] == true {
        let waited = wait(client, value["version"].as_u64().unwrap_or(0))?;
        if api.json {
            value["gateways"] = waited;
        } else {
            writeln!(out, "live on {} of {} gateways", waited["current"], waited["live"])?;
        }
    }
    if api.json {
        writeln!(out, "{value:#}")?;
    }
    Ok(())
}

/// Waits until every live gateway runs the version.
fn wait(client: &Client, version: u64) -> Result<Value, TerminalError> {
    let mut looks = WAIT.as_millis() / LOOK.as_millis();
    loop {
        let value = client.get("/v1/gateways", &[])?.json()?;
        let has_it =
            |one: &Value| one["is_live"] != true || one["policy_version"].as_u64().is_some_and(|has| has >= version);
        if array(&value["gateways"]).iter().all(has_it) {
            return Ok(value);
        }
        looks -= 1;
        if looks == 0 {
            let late: Vec<_> =
                array(&value["gateways"]).iter().filter(|one| !has_it(one)).map(|one| word(&one["name"])).collect();
            return Err(TerminalError::Refused(format!(
                "version {version} is made, but after {} s these gateways do not run it: {}; `sluice-admin gateways` says why",
                WAIT.as_secs(),
                late.join(", ")
            )));
        }
        thread::sleep(LOOK);
    }
}

fn array(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn word(value: &Value) -> String {
    table::plain(value.as_str().unwrap_or_default())
}

fn number(value: &Value) -> String {
    if value.is_null() { String::new() } else { value.to_string() }
}

fn list(value: &Value) -> String {
    array(value).iter().map(|one| one.as_str().unwrap_or_default().to_owned()).collect::<Vec<_>>().join(", ")
}

/// A time of the API, to the second.
fn time(value: &Value) -> String {
    value.as_str().and_then(|text| text.parse().ok()).map_or_else(String::new, |parsed| table::time(&parsed))
}

/// What a rule or override allows, in a few words.
fn allows(body: &Value) -> String {
    if let Some(limit) = body["limit"].as_object() {
        let (capacity, refill) = (number(&limit["capacity"]), number(&limit["refill"]));
        let period = word(&limit["period"]);
        return if capacity == refill {
            format!("{capacity} per {period}")
        } else {
            format!("{refill} per {period}, {capacity} at once")
        };
    }
    if let Some(quota) = body["quota"].as_object() {
        return format!("{} per {}", quota["amount"], word(&quota["every"]));
    }
    if body["deny"] == true { "deny" } else { "exempt" }.into()
}

fn brief(body: &Value) -> String {
    match body["expires"].as_str() {
        Some(expires) => format!("{}, until {expires}", allows(body)),
        None => allows(body),
    }
}

fn rule_list(value: &Value) -> String {
    let row = |one: &Value| {
        let body = &one["rule"];
        let matches = body["match"].as_object().map(|all| {
            all.iter().map(|(name, pattern)| format!("{name}={}", word(pattern))).collect::<Vec<_>>().join(" ")
        });
        let mode = body["mode"].as_str().unwrap_or("enforce");
        let mode = match body["rollout_pct"].as_f64() {
            Some(share) => format!("{mode}, {share} %"),
            None => mode.into(),
        };
        let problem = if array(&one["problems"]).is_empty() { "" } else { "GATEWAYS REFUSE IT" };
        vec![
            word(&one["name"]),
            matches.unwrap_or_default(),
            list(&body["per"]),
            allows(body),
            mode,
            number(&one["version"]),
            problem.into(),
        ]
    };
    let rows = array(&value["rules"]).iter().map(row).collect();
    let table = table::of(&["RULE", "MATCH", "PER", "ALLOWS", "MODE", "VERSION", ""], rows);
    format!("{table}the policy is at version {}\n", value["version"])
}

fn history(value: &Value) -> String {
    let row = |one: &Value| {
        let back = one["rolled_back_to"].as_u64().map(|to| format!("back to {to} ")).unwrap_or_default();
        let what = format!("{} rules, {} overrides", one["rules"], one["overrides"]);
        vec![
            number(&one["version"]),
            time(&one["made_at"]),
            word(&one["author"]),
            what,
            format!("{back}{}", word(&one["comment"])),
        ]
    };
    table::of(&["VERSION", "MADE", "BY", "CHANGED", "COMMENT"], array(&value["changes"]).iter().map(row).collect())
}

/// One line for each field that differs.
fn differences(value: &Value) -> String {
    let at = |body: &Value, path: &str| -> String {
        let found = path.split('.').try_fold(body, |inside, name| inside.get(name));
        found.map(ToString::to_string).unwrap_or_default()
    };
    let mut rows = Vec::new();
    for one in array(&value["differences"]) {
        let item = match one["rule"].as_str() {
            Some(name) => format!("rule {name}"),
            None => {
                format!("override of {} for {}", word(&one["override"]["rule"]), list(&one["override"]["identity"]))
            }
        };
        match one["kind"].as_str() {
            Some("changed") => {
                for field in array(&one["fields"]).iter().filter_map(Value::as_str) {
                    rows.push(vec![
                        item.clone(),
                        field.into(),
                        at(&one["before"], field),
                        "→".into(),
                        at(&one["after"], field),
                    ]);
                }
            }
            kind => {
                let body = if one["after"].is_null() { &one["before"] } else { &one["after"] };
                rows.push(vec![item, kind.unwrap_or_default().into(), brief(body), String::new(), String::new()]);
            }
        }
    }
    if rows.is_empty() {
        return String::new();
    }
    let more = value["more"].as_u64().filter(|more| *more > 0).map(|more| format!("and {more} more\n"));
    format!("{}{}", table::of(&["ITEM", "FIELD", "BEFORE", "", "AFTER"], rows), more.unwrap_or_default())
}

fn gateways(value: &Value) -> String {
    let row = |one: &Value| {
        let state = match (one["is_live"] == true, one["is_current"] == true) {
            (false, _) => "gone",
            (true, true) => "current",
            (true, false) => "behind",
        };
        let seen = format!("{} s ago", one["seen_secs_ago"]);
        vec![
            word(&one["name"]),
            number(&one["policy_version"]),
            state.into(),
            seen,
            time(&one["started_at"]),
            word(&one["software"]),
            word(&one["problem"]),
        ]
    };
    let rows: Vec<_> = array(&value["gateways"]).iter().map(row).collect();
    let table = table::of(&["GATEWAY", "VERSION", "STATE", "SEEN", "STARTED", "SOFTWARE", "PROBLEM"], rows);
    format!("{table}{} of {} live gateways have version {}\n", value["current"], value["live"], value["version"])
}

fn shadow(value: &Value) -> String {
    let mut text = String::new();
    for rule in array(&value["rules"]) {
        text.push_str(&format!(
            "{} at version {}: would have denied {} of {} checks ({} %), {} to {}\n",
            word(&rule["rule"]),
            rule["rule_version"],
            rule["denied"],
            rule["checks"],
            rule["denied_pct"],
            time(&rule["first_hour"]),
            time(&rule["last_hour"]),
        ));
        let row = |one: &Value| {
            let share = format!("{} %", one["denied_pct"]);
            vec![
                word(&one["identity"]),
                number(&one["denied"]),
                number(&one["checks"]),
                share,
                time(&one["first_seen"]),
                time(&one["last_seen"]),
            ]
        };
        let rows: Vec<_> = array(&rule["identities"]).iter().map(row).collect();
        if !rows.is_empty() {
            text.push_str(&table::of(&["IDENTITY", "DENIED", "OF", "SHARE", "FIRST SEEN", "LAST SEEN"], rows));
        }
        match rule["identities_more"].as_u64() {
            Some(more) if more > 0 => text.push_str(&format!("and {more} more\n\n")),
            _ => text.push('\n'),
        }
    }
    if text.is_empty() { "no shadow rule saw a check in this time\n".into() } else { text }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on must stop")]

    use super::*;

    #[test]
    fn fields_are_set_by_their_path() {
        let mut body = json!({ "limit": { "capacity": 100 }, "mode": "shadow" }).as_object().cloned().unwrap();
        for field in ["limit.capacity=10", "limit.period=1m", "mode=", "hot.split=4", "per=[\"key\"]"] {
            set(&mut body, field).unwrap();
        }
        let expected = json!({ "limit": { "capacity": 10, "period": "1m" }, "hot": { "split": 4 }, "per": ["key"] });
        assert_eq!(Value::Object(body.clone()), expected);
        for wrong in ["limit", "=1", "limit..capacity=1", "per.x=1"] {
            assert!(set(&mut body, wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn tables_say_what_changed_in_words() {
        let value = json!({ "differences": [{
            "rule": "login", "kind": "changed", "fields": ["limit.capacity"],
            "before": { "limit": { "capacity": 100 } }, "after": { "limit": { "capacity": 10 } },
        }], "more": 2 });
        let text = differences(&value);
        assert!(text.contains("rule login") && text.contains("100") && text.contains("and 2 more"), "{text}");
        let list = json!({ "version": 3, "rules": [{ "name": "a\u{1b}[31m", "version": 2, "rule": {
            "limit": { "capacity": 10, "refill": 10, "period": "1m" }, "rollout_pct": 5 } }] });
        let text = rule_list(&list);
        assert!(text.contains("10 per 1m") && text.contains("enforce, 5 %") && !text.contains('\u{1b}'), "{text}");
    }
}
