//! The command line as people and scripts meet it: the real binary, its exit codes, what it prints and where.
#![allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a test that cannot go on must stop")]

use std::{
    collections::HashSet,
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    path::Path,
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

use serde_json::Value;
use tempfile::TempDir;

/// How long anything may take. Only reached when something is broken.
const PATIENCE: Duration = Duration::from_secs(30);

const POLICY: &str = r#"
[[rule]]
name = "per-key"
match = { path = "/a*" }
per = ["key"]
limit = { capacity = 2, refill = 1, period = "90s" }

[[rule]]
name = "off"
mode = "off"
per = ["key"]
deny = true

[[rule]]
name = "part"
mode = "shadow"
per = ["key"]
rollout_pct = 0.01
limit = { capacity = 1, refill = 1, period = "1h" }

[[override]]
rule = "*"
identity = ["big"]
limit = { capacity = 50, refill = 50, period = "1m" }
"#;

/// The binary in an empty folder, without the settings of whoever runs the tests.
fn sluice(folder: &TempDir, words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sluice"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("SLUICE_")) {
        command.env_remove(name);
    }
    // Whoever serves has free ports.
    command.envs(["SLUICE_LISTEN_HTTP", "SLUICE_LISTEN_GRPC"].map(|name| (name, "127.0.0.1:0")));
    command.current_dir(folder.path()).args(words).stdin(Stdio::null());
    command
}

fn folder(files: &[(&str, &str)]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in files {
        std::fs::write(folder.path().join(name), text).unwrap();
    }
    folder
}

/// Exit code, standard output and standard error.
fn run(folder: &TempDir, words: &[&str]) -> (i32, String, String) {
    told(sluice(folder, words).output().unwrap())
}

fn told(output: Output) -> (i32, String, String) {
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

#[test]
fn help_tells_what_there_is() {
    let folder = folder(&[]);
    let (code, out, _) = run(&folder, &["--help"]);
    assert_eq!(code, 0);
    let words = ["serve", "check-config", "explain", "Examples:", "Exit codes:", "SLUICE_POLICY", "--cpus", "SIGHUP"];
    for word in words {
        assert!(out.contains(word), "{word:?} in {out}");
    }
    for command in ["serve", "check-config", "explain", "import"] {
        assert_eq!(run(&folder, &[command, "--help"]).0, 0);
    }
    assert_eq!(run(&folder, &["--version"]).1, format!("sluice {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn what_cannot_be_meant_is_usage() {
    let folder = folder(&[]);
    for words in [
        &["--nothing"][..],
        &["--cores", "3-1"],
        &["--cpus", "all"],
        &["--listen-resp", "localhost"],
        &["--log-level", "inof"],
        &["check-config"],
        &["explain"],
        &["explain", "path"],
        &["explain", "Path=/a"],
        &["explain", "path=/a", "path=/b"],
        &["import", "envoy-ratelimit"],
        &["import", "nothing", "config.yaml"],
    ] {
        let (code, out, error) = run(&folder, words);
        assert_eq!((code, out.as_str()), (2, ""), "{words:?}");
        assert!(error.starts_with("error: "), "{words:?}: {error}");
    }
}

#[test]
fn check_config_says_what_is_right() {
    let folder = folder(&[
        ("p.toml", POLICY),
        ("c.toml", "policy = \"p.toml\"\n[limits]\nrules_max = 3\n"),
        ("empty.toml", ""),
        ("no-rules.toml", "policy = \"empty.toml\"\n"),
        ("small.toml", "policy = \"p.toml\"\n[limits]\nrules_max = 2\n"),
    ]);
    let policy = "ok: p.toml is a policy file with 3 rules (1 in shadow, 1 off) and 1 override\n";
    let nothing = String::new();
    assert_eq!(run(&folder, &["check-config", "p.toml"]), (0, policy.into(), nothing.clone()));
    let both = format!("ok: c.toml is a config file\n{policy}");
    assert_eq!(run(&folder, &["check-config", "c.toml"]), (0, both, nothing.clone()));
    let empty = "ok: empty.toml is empty: a config of defaults; as a policy it would be refused\n";
    assert_eq!(run(&folder, &["check-config", "empty.toml"]), (0, empty.into(), nothing));
    // A pipe can be read only once.
    let mut check = sluice(&folder, &["check-config", "/dev/stdin"]);
    let mut check = check.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    check.stdin.take().unwrap().write_all(b"policy = \"p.toml\"\n").unwrap();
    let (code, out, _) = told(check.wait_with_output().unwrap());
    assert_eq!((code, out), (0, format!("ok: /dev/stdin is a config file\n{policy}")));
    // A policy that would be refused at start is refused here.
    let (code, _, error) = run(&folder, &["check-config", "no-rules.toml"]);
    assert_eq!(code, 1);
    assert!(error.starts_with("empty.toml: has no rules"), "{error}");
    let (code, _, error) = run(&folder, &["check-config", "small.toml"]);
    assert_eq!(code, 1);
    assert!(error.contains("3 rules; the most is 2 (setting limits.rules_max)"), "{error}");
}

#[test]
fn check_config_says_everything_that_is_wrong() {
    let folder = folder(&[
        ("c.toml", "policy = \"p.toml\"\ncores = -1\n[resp]\nlisen = 1\n"),
        ("p.toml", "[[rule]]\nname = \"a\"\ncapacity = 1\n\n[[rule]]\nname = \"b\"\n"),
        ("misspelt.toml", "[[rules]]\nname = \"a\"\n"),
        ("mixed.toml", "cores = 1\n[[rule]]\nname = \"a\"\n"),
        ("syntax.toml", "cores = \n"),
    ]);
    let (code, out, error) = run(&folder, &["check-config", "c.toml"]);
    assert_eq!((code, out.as_str()), (1, ""));
    let lines: Vec<_> = error.lines().collect();
    for (at, begin) in [
        (0, "c.toml:2: cores: "),
        (1, "c.toml:4: resp.lisen: there is no such setting (did you mean `listen`?)"),
        (2, "c.toml is a config file with 2 problems"),
        (3, "p.toml:"),
        (lines.len() - 1, "p.toml is a policy file with "),
    ] {
        assert!(lines[at].starts_with(begin), "{begin:?} in {error}");
    }
    let wrong = |file| {
        let (code, _, error) = run(&folder, &["check-config", file]);
        assert_eq!(code, 1);
        error
    };
    assert!(wrong("misspelt.toml").contains("misspelt.toml is a policy file with 1 problem"));
    assert!(wrong("mixed.toml").contains("mixed.toml:2: rule: there is no such setting (rules and overrides stand in"));
    assert!(wrong("syntax.toml").starts_with("syntax.toml:1:"));
    assert!(wrong("missing.toml").starts_with("missing.toml: cannot be read: "));
}

#[test]
fn check_config_asks_this_machine() {
    let folder = folder(&[
        ("c.toml", "cores = [255]\n[limits]\nbuckets = 4294967296\n[resp]\npassword_file = \"none\"\n"),
        ("large.toml", &format!("cores = 1\n{}", "# \n".repeat(400_000))),
        ("same.toml", "[resp]\nlisten = \"127.0.0.1:7000\"\n[ops]\nlisten = \"127.0.0.1:7000\"\n"),
    ]);
    let (code, _, error) = run(&folder, &["check-config", "c.toml"]);
    assert_eq!(code, 1);
    for begin in [
        "c.toml:1: cores: core 255 is not among those that this process may use: ",
        "c.toml:3: limits.buckets: needs 128 GiB, the system has ",
        "c.toml:5: resp.password_file: none: cannot be read: ",
    ] {
        assert!(error.lines().any(|line| line.starts_with(begin)), "{begin:?} in {error}");
    }
    let (code, _, error) = run(&folder, &["check-config", "same.toml"]);
    assert!(
        code == 1 && error.contains("same.toml:4: ops.listen: must be another address than resp.listen"),
        "{error}"
    );
    let (code, _, error) = run(&folder, &["--config", "large.toml"]);
    assert!(code == 1 && error.contains("larger than 1048576 bytes, the most that a config file may have"), "{error}");
}

#[test]
fn what_is_wrong_with_the_store_is_found_and_no_password_is_shown() {
    let cases = [
        ("urls = [\"redis://me:hunter2@host:notaport\"]", "redis.urls"),
        ("urls = [\"http://me:hunter2@host\"]", "redis.urls"),
        ("urls = [\"redis://host\"]\npassword_file = \"missing\"", "redis.password_file: missing: cannot be read"),
        ("urls = [\"rediss://host\"]\nca_file = \"sluice.toml\"", "redis.ca_file"),
        ("deadline_ms = 0", "redis.deadline_ms: must be from 1"),
        ("local_share = 2.0", "redis.local_share: must be from 0.001 to 1"),
        ("breaker = { probes = 0 }", "redis.breaker.probes: must be from 1"),
    ];
    for (setting, expected) in cases {
        let text = format!("[redis]\n{setting}\n");
        let folder = folder(&[("sluice.toml", &text)]);
        let (code, out, err) = run(&folder, &["check-config", "sluice.toml"]);
        assert_eq!(code, 1, "{setting}: {out}");
        assert!(err.contains(expected), "{setting}: {err}");
        assert!(!err.contains("hunter2") && !out.contains("hunter2"), "{setting}: {err}");
    }
    let folder = folder(&[]);
    let (code, _, err) = run(&folder, &["--redis", "redis://me:hunter2@host:notaport", "--listen-resp", "127.0.0.1:0"]);
    assert!(code != 0 && err.contains("redis.urls") && !err.contains("hunter2"), "{err}");
}

#[test]
fn what_the_machine_cannot_hold_is_refused_at_start() {
    let folder = folder(&[("c.toml", "[limits]\nbuckets = 4294967296\n")]);
    let (code, _, error) = run(&folder, &["--config", "c.toml"]);
    assert!(code == 1 && error.starts_with("limits.buckets: needs 128 GiB, the system has "), "{error}");
    let mut shell = Command::new("sh");
    shell.args(["-c", "ulimit -l 256 && exec \"$0\"", env!("CARGO_BIN_EXE_sluice")]).current_dir(folder.path());
    let (code, _, error) = told(shell.output().unwrap());
    assert_eq!(code, 1);
    assert!(error.starts_with("needs 512 KiB of locked memory; raise ulimit -l or LimitMEMLOCK="), "{error}");
}

#[test]
fn overrides_that_do_nothing_are_remarked_on() {
    let stars = POLICY.replace("[\"big\"]", "[\"big*\"]") + "expires = \"2020-01-01T00:00:00Z\"\n";
    let folder = folder(&[("p.toml", &stars)]);
    let (code, out, _) = run(&folder, &["check-config", "p.toml"]);
    let expected = "\
ok: p.toml is a policy file with 3 rules (1 in shadow, 1 off) and 1 override (1 expired)
warning: p.toml: override of rule \"*\" for [\"big*\"]: identity values are exact; a * is no pattern here
";
    assert_eq!((code, out.as_str()), (0, expected));
}

#[test]
fn a_refusal_is_one_event_of_a_json_log() {
    let folder = folder(&[("p.toml", "[[rule]]\nname = \"a\"\nlimt = 1\n\n[[rule]]\nname = \"a\"\n")]);
    let (code, out, error) = run(&folder, &["--policy", "p.toml", "--log-format", "json"]);
    assert_eq!((code, out.as_str()), (1, ""));
    let events: Vec<Value> = error.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let [event] = events.as_slice() else { panic!("{error}") };
    assert_eq!((&event["level"], &event["fields"]["message"]), (&"ERROR".into(), &"cannot serve".into()));
    assert!(event["fields"]["error"].as_str().unwrap().lines().count() > 1, "{error}");
}

#[test]
fn import_gives_a_policy_that_the_other_commands_take() {
    const RULES: &str = "\
domain: d
descriptors:
  - key: user
    rate_limit: { unit: minute, requests_per_unit: 5 }
    detailed_metric: true
  - key: user
    value: big
    rate_limit: { unit: minute, requests_per_unit: 50 }
";
    let folder = folder(&[("d.yaml", RULES)]);
    let import = ["import", "envoy-ratelimit", "d.yaml"];
    let (code, out, error) = run(&folder, &import);
    assert_eq!(code, 0, "{error}");
    assert!(error.starts_with("note: d.yaml:3: d: detailed_metric "), "{error}");
    let (code, told, _) = run(&folder, &[&import[..], &["--output", "p.toml"]].concat());
    assert_eq!((code, told.as_str()), (0, "ok: p.toml is a policy file with 1 rule and 1 override\n"));
    assert_eq!(std::fs::read_to_string(folder.path().join("p.toml")).unwrap(), out);
    assert_eq!(run(&folder, &["check-config", "p.toml"]).0, 0);
    let (_, told, _) = run(&folder, &["explain", "--policy", "p.toml", "domain=d", "user=big"]);
    assert!(told.contains("user=big gets 50 at once, 50 each 1m, by an override for d.user"), "{told}");
    let (_, _, error) = run(&folder, &[&import[..], &["--json"]].concat());
    let report: Value = serde_json::from_str(&error).unwrap();
    assert_eq!((&report["problems"], &report["notes"][0]["line"]), (&Value::Array(Vec::new()), &3.into()));
}

#[test]
fn import_writes_nothing_where_something_cannot_be_said() {
    let folder =
        folder(&[("d.yaml", "domain: d\ndescriptors:\n  - key: a\n    quota_mode: true\n    rate_limit: {}\n")]);
    let import = ["import", "envoy-ratelimit", "d.yaml", "none.yaml", "--output", "p.toml"];
    let (code, out, error) = run(&folder, &import);
    assert_eq!((code, out.as_str()), (1, ""));
    let lines: Vec<&str> = error.lines().collect();
    assert_eq!(lines.len(), 4, "{error}");
    assert!(lines[0].starts_with("d.yaml:3: d / a: quota_mode "), "{error}");
    assert!(lines[1].starts_with("d.yaml:3: d / a: rate_limit has no unit "), "{error}");
    assert!(lines[2].starts_with("none.yaml: cannot be read: "), "{error}");
    assert_eq!(lines[3], "3 problems, so no policy is written");
    assert!(!folder.path().join("p.toml").exists());
    let (code, _, error) = run(&folder, &[&import[..], &["--json"]].concat());
    let report: Value = serde_json::from_str(&error).unwrap();
    assert_eq!((code, report["problems"].as_array().unwrap().len()), (1, 3));
}

#[test]
fn explain_tells_people() {
    let folder = folder(&[("p.toml", POLICY), ("c.toml", "policy = \"p.toml\"\n")]);
    let (code, out, _) = run(&folder, &["explain", "--policy", "p.toml", "path=/a/b", "key=x"]);
    assert_eq!(code, 0);
    let expected = "\
policy: p.toml

RULE     MODE     APPLIES  WHY
per-key  enforce  yes      key=x gets 2 at once, 1 each 90s
off      off      no       the rule is off
";
    assert!(out.starts_with(expected), "{out}");
    assert!(out.contains(" %, outside a rollout to 0.01 %\n"), "{out}");
    assert!(out.ends_with("\n1 of 3 rules apply: the request passes while each has tokens for it\n"), "{out}");
    let (_, out, _) = run(&folder, &["explain", "--config", "c.toml", "path=/b", "key=big"]);
    assert!(out.contains("no       `path` is \"/b\", not \"/a*\""), "{out}");
    let (_, out, _) = run(&folder, &["explain", "path=/v1/login", "method=POST", "key=ak_1"]);
    assert!(out.contains("login-per-key     enforce  yes"), "the built-in policy: {out}");
}

#[test]
fn explain_tells_programs() {
    let folder = folder(&[("p.toml", POLICY)]);
    let (_, out, _) = run(&folder, &["explain", "--json", "--policy", "p.toml", "path=/a", "key=big"]);
    let page: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(page["policy"], "p.toml");
    assert_eq!(page["attributes"]["key"], "big");
    let [first, off, part] = page["rules"].as_array().unwrap().as_slice() else { panic!("{out}") };
    assert_eq!((&first["applies"], &first["outcome"]), (&true.into(), &"applies".into()));
    assert_eq!((&first["identity"], &first["overridden_by"]), (&"key=big".into(), &"*".into()));
    assert_eq!(first["allowance"]["limit"]["capacity"], 50);
    assert_eq!(first["rollout"]["covers_pct"], 100.0);
    assert_eq!((&off["outcome"], &off["mode"]), (&"off".into(), &"off".into()));
    assert_eq!(part["outcome"], "outside_rollout");
    assert_eq!(part["rollout"]["covers_pct"], 0.01);
}

#[test]
fn serve_refuses_what_is_wrong() {
    let folder = folder(&[
        ("c.toml", "[limits]\nbuckets = 1\nconnections_max = 0\n"),
        ("p.toml", "[[rule]]\nname = \"a\"\n"),
        ("empty", ""),
        ("two", "a\nb\n"),
        ("empty.toml", "[resp]\npassword_file = \"empty\"\n"),
        ("two.toml", "[resp]\npassword_file = \"two\"\n"),
    ]);
    for (words, expected) in [
        (["--config", "c.toml"], "c.toml:2: limits.buckets: must be from 1024 to 4294967296, not 1\nc.toml:3: "),
        (["--config", "none.toml"], "none.toml: cannot be read: "),
        (["--policy", "p.toml"], "p.toml:1: rule \"a\": "),
        (["--policy", "none.toml"], "none.toml: cannot be read: "),
        (["--policy", "empty"], "empty: has no rules, and would allow everything"),
        (["--config", "empty.toml"], "resp.password_file empty: is empty"),
        (["--config", "two.toml"], "resp.password_file two: has more than one line"),
    ] {
        let (code, out, error) = run(&folder, &words);
        assert_eq!((code, out.as_str()), (1, ""), "{words:?}");
        assert!(error.starts_with(expected), "{words:?}: {error}");
    }
}

#[test]
fn the_environment_yields_to_flags_and_is_blamed_by_name() {
    let folder = folder(&[]);
    let ask = |words: &[&str], variables: &[(&str, &str)]| {
        let mut command = sluice(&folder, &[words, &["--listen-resp", "192.0.2.1:1"]].concat());
        if variables.iter().any(|(name, _)| *name == "SLUICE_LISTEN_RESP") {
            command = sluice(&folder, words);
        }
        told(command.envs(variables.iter().copied()).output().unwrap())
    };
    // The address is nobody's: whoever gets as far as listening has understood its settings.
    for (words, variable) in [
        (["--cpus", "0"], ("SLUICE_CORES", "1")),
        (["--cores", "1"], ("SLUICE_CPUS", "0")),
        (["--cores", "1"], ("SLUICE_CORES", "0,")),
    ] {
        let (code, _, error) = ask(&words, &[variable]);
        assert!(code == 1 && error.contains("cannot listen on 192.0.2.1:1"), "{words:?}, {variable:?}: {error}");
    }
    for (variable, value, why) in [
        ("SLUICE_LISTEN_RESP", "localhost", "(write it as \"127.0.0.1:6390\" or \"[::1]:6390\")"),
        (
            "SLUICE_LISTEN_RESP",
            "",
            "it is set, and empty; unset it, or write it as \"127.0.0.1:6390\" or \"[::1]:6390\"",
        ),
        ("SLUICE_POLICY", "", "it is set, and empty; unset it for the default"),
        ("SLUICE_TRANSPORT", "tcp", "must be one of auto, ring, plain"),
        ("SLUICE_LOG_LEVEL", "inof", "write error, warn, info"),
    ] {
        let (code, _, error) = ask(&[], &[(variable, value)]);
        let begin = format!("error: the environment variable {variable}={value:?}: ");
        assert!(code == 2 && error.starts_with(&begin) && error.contains(why), "{error}");
    }
    let (code, _, error) = ask(&["--listen-resp", "localhost"], &[("SLUICE_LISTEN_RESP", "localhost")]);
    assert!(code == 2 && error.contains("--listen-resp") && error.contains("write it as"), "{error}");
}

/// A running server. Killed when dropped.
struct Server {
    child: Child,
    /// What it said when it began to serve.
    said: String,
}

impl Server {
    fn start(mut command: Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let said = lines.by_ref().take(5).map(|line| line.unwrap() + "\n").collect();
        Self { child, said }
    }

    fn after(&self, words: &str) -> String {
        let rest = self.said.split(words).nth(1).unwrap_or_else(|| panic!("{words:?} in {:?}", self.said));
        rest.split([' ', ',', '\n']).next().unwrap().to_owned()
    }

    fn ask(&self, words: &[&str]) -> String {
        let mut stream = connect(&self.after("RESP on "));
        let request = words.iter().map(|word| format!("${}\r\n{word}\r\n", word.len())).collect::<String>();
        write!(stream, "*{}\r\n{request}*1\r\n$4\r\nQUIT\r\n", words.len()).unwrap();
        let mut reply = String::new();
        stream.read_to_string(&mut reply).unwrap();
        reply
    }

    /// Head and body of what the ops port answers.
    fn http(&self, request: &str) -> (String, String) {
        let mut stream = connect(&self.after("http://"));
        write!(stream, "{request} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.to_ascii_lowercase(), body.to_owned())
    }

    fn status(&self) -> Value {
        serde_json::from_str(&self.http("GET /v1/status").1).unwrap()
    }

    /// Asks it to leave; returns its exit code.
    fn leave(&mut self) -> Option<i32> {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args(["-s", "TERM", &id]).status().unwrap().success());
        let began = Instant::now();
        while began.elapsed() < PATIENCE {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            std::thread::park_timeout(Duration::from_millis(5));
        }
        panic!("the server does not end");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn connect(address: &str) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

const ANYWHERE: [&str; 6] = ["--listen-resp", "127.0.0.1:0", "--listen-ops", "127.0.0.1:0", "--cores", "1"];

#[test]
fn it_serves_and_tells_where_and_leaves() {
    let folder = folder(&[("p.toml", POLICY)]);
    let mut server = Server::start(sluice(&folder, &[&ANYWHERE[..], &["--policy", "p.toml"]].concat()));
    assert!(server.said.contains("\ncounts in this process alone\n"), "{}", server.said);
    assert!(server.said.contains("\npolicy: p.toml, version 1 with 3 rules\n"), "{}", server.said);
    let port = server.after("RESP on ").rsplit(':').next().unwrap().to_owned();
    let line = format!("\ntry: redis-cli -p {port} CHECK path /v1/login method POST key ak_1\n");
    assert!(server.said.contains(&line), "{}", server.said);
    for allowed in [1, 1, 0] {
        let reply = server.ask(&["CHECK", "path", "/a", "key", "x"]);
        assert!(reply.starts_with(&format!("*6\r\n:{allowed}\r\n:2\r\n")), "{reply}");
    }

    assert!(server.http("GET /readyz").0.starts_with("http/1.1 200 "));
    assert_eq!(server.http("GET /healthz").1, "ok\n");
    assert_eq!(server.http("HEAD /healthz").1, "");
    let (head, body) = server.http("GET /nothing");
    assert!(head.starts_with("http/1.1 404 ") && body.contains("/metrics") && body.contains("/v1/status"));
    let (head, _) = server.http("DELETE /metrics");
    assert!(head.starts_with("http/1.1 405 ") && head.contains("\r\nallow: get, head"), "{head}");
    let status = server.status();
    assert_eq!((&status["stage"], &status["policy"]["source"]), (&"serving".into(), &"p.toml".into()));
    assert_eq!((&status["cores"][0]["checks"], &status["cores"][0]["denied"]), (&3.into(), &1.into()));
    assert_eq!(server.leave(), Some(0));
}

#[test]
fn flags_win_over_the_environment_and_that_over_the_file() {
    let config = "policy = \"file.toml\"\n[limits]\nconnections_max = 77\n[transport]\nkind = \"ring\"\n";
    let folder = folder(&[("c.toml", config), ("env.toml", POLICY), ("flag.toml", POLICY), ("file.toml", POLICY)]);
    let source = |words: &[&str], variables: &[(&str, &str)]| {
        let mut command = sluice(&folder, &[&ANYWHERE[..], words].concat());
        command.envs(variables.iter().copied());
        let mut server = Server::start(command);
        let status = server.status();
        assert_eq!(server.leave(), Some(0));
        let word = |value: &Value| value.as_str().unwrap().to_owned();
        (word(&status["policy"]["source"]), word(&status["transport"]), status["limits"]["connections_max"].clone())
    };
    let everything = [("SLUICE_CONFIG", "c.toml"), ("SLUICE_POLICY", "env.toml"), ("SLUICE_TRANSPORT", "plain")];
    let expected = |policy: &str, transport: &str| (policy.into(), transport.into(), 77.into());
    assert_eq!(source(&["--config", "c.toml"], &[]), expected("file.toml", "ring"));
    assert_eq!(source(&[], &everything), expected("env.toml", "plain"));
    assert_eq!(source(&["--policy", "flag.toml"], &everything), expected("flag.toml", "plain"));
    // The environment of serve is no obstacle to the other commands.
    let mut check = sluice(&folder, &["check-config", "c.toml"]);
    assert!(check.envs(everything).output().unwrap().status.success());
}

#[test]
fn the_password_is_asked_for_and_never_shown() {
    let config = "[resp]\npassword_file = \"password\"\n[log]\nlevel = \"trace\"\nformat = \"json\"\n";
    let folder = folder(&[("c.toml", config), ("password", "s3cret word\n")]);
    let log = std::fs::File::create(folder.path().join("log")).unwrap();
    let mut command = sluice(&folder, &[&ANYWHERE[..], &["--config", "c.toml"]].concat());
    let child = command.stdout(Stdio::piped()).stderr(log).spawn().unwrap();
    let mut server = Server { child, said: String::new() };
    let event = |message: &str| -> Option<Value> {
        let log = read(&folder.path().join("log"));
        let mut events = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        events.find_map(|event| (event["fields"]["message"] == message).then(|| event["fields"].clone()))
    };
    let began = Instant::now();
    let serving = loop {
        match event("serving") {
            Some(fields) => break fields,
            None => assert!(began.elapsed() < PATIENCE, "it does not say that it serves"),
        }
        std::thread::park_timeout(Duration::from_millis(5));
    };
    assert_eq!((&serving["policy_version"], &serving["cpus"]), (&1.into(), &"0".into()));
    assert!(["ring", "plain"].contains(&serving["transport"].as_str().unwrap()));
    let address = |name: &str| serving[name].as_str().unwrap().to_owned();
    server.said = format!("RESP on {} http://{} ", address("resp"), address("ops"));
    assert!(server.ask(&["CHECK", "key", "a"]).starts_with("-NOAUTH"));
    assert!(server.ask(&["AUTH", "wrong"]).starts_with("-WRONGPASS"));
    assert!(server.ask(&["AUTH", "s3cret word"]).starts_with("+OK"));
    assert!(!server.http("GET /v1/status").1.contains("s3cret"));
    assert_eq!(server.leave(), Some(0));
    let mut out = String::new();
    server.child.stdout.take().unwrap().read_to_string(&mut out).unwrap();
    assert_eq!(out, "", "programs read the log");
    let log = read(&folder.path().join("log"));
    assert!(log.trim_end().lines().last().unwrap().contains("\"message\":\"left\""), "{log}");
    assert!(!log.contains("s3cret"), "{log}");
    assert!(log.contains("every user of this host can read the password file"), "{log}");
    for line in log.lines() {
        assert!(serde_json::from_str::<Value>(line).is_ok(), "every line of the log is JSON: {line}");
    }
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap()
}

#[test]
fn metrics_are_openmetrics() {
    let folder = folder(&[("p.toml", POLICY)]);
    let mut server = Server::start(sluice(&folder, &[&ANYWHERE[..], &["--policy", "p.toml"]].concat()));
    for _ in 0..3 {
        server.ask(&["CHECK", "path", "/a", "key", "x"]);
    }
    server.ask(&["CHECK", "path", "/other"]);
    let (head, text) = server.http("GET /metrics");
    let content_type = "content-type: application/openmetrics-text; version=1.0.0; charset=utf-8";
    assert!(head.contains(content_type), "{head}");
    check_openmetrics(&text);
    for line in [
        "sluice_checks_total{core=\"0\"} 4",
        "sluice_checks_denied_total{core=\"0\"} 1",
        "sluice_checks_unruled_total{core=\"0\"} 1",
        "sluice_rule_checks_total{rule=\"per-key\",reason=\"allowed\"} 2",
        "sluice_rule_checks_total{rule=\"per-key\",reason=\"denied\"} 1",
        "sluice_connections_opened_total{core=\"0\"} 4",
        "sluice_connections_closed_total{core=\"0\",why=\"idle\"} 0",
        "sluice_ops_connections_refused_total 0",
        "sluice_policy_file_refused 0.0",
        "sluice_buckets_inserted_total 1",
        "sluice_policy_version 1.0",
        "# UNIT process_start_time_seconds seconds",
    ] {
        assert!(text.lines().any(|given| given == line), "{line:?} in {text}");
    }
    assert_eq!(server.leave(), Some(0));
}

/// What the format asks for, as far as a page of counters and gauges goes: each family has its lines together, help and
/// type first; no sample comes twice; counters end in `_total`; and the page ends with `# EOF`.
fn check_openmetrics(text: &str) {
    let body = text.strip_suffix("# EOF\n").unwrap();
    let (mut families, mut samples) = (HashSet::new(), HashSet::new());
    let (mut family, mut kind) = ("", "");
    for line in body.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').unwrap();
            assert!(families.insert(name), "{name} comes twice");
            assert!(!help.is_empty());
            (family, kind) = (name, "");
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, given) = rest.split_once(' ').unwrap();
            assert!(name == family && ["counter", "gauge"].contains(&given), "{line}");
            kind = given;
        } else if let Some(rest) = line.strip_prefix("# UNIT ") {
            let (name, unit) = rest.split_once(' ').unwrap();
            assert!(name == family && name.ends_with(&format!("_{unit}")), "{line}");
        } else {
            let (series, value) = line.rsplit_once(' ').unwrap();
            assert!(samples.insert(series), "{series} comes twice");
            let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
            assert!(labels.ends_with('}') && !labels.contains(['\\', '\n']), "{line}");
            let expected = if kind == "counter" { format!("{family}_total") } else { family.to_owned() };
            assert!(!kind.is_empty() && name == expected, "{line}");
            assert!(value.parse::<f64>().is_ok_and(|value| value >= 0.0), "{line}");
        }
    }
}

#[test]
fn a_slow_or_silent_client_of_the_ops_port_is_let_go() {
    let folder = folder(&[("c.toml", "[ops]\nconnections_max = 2\n")]);
    let mut server = Server::start(sluice(&folder, &[&ANYWHERE[..], &["--config", "c.toml"]].concat()));
    let address = server.after("http://");
    let mut held: Vec<_> = (0..2).map(|_| connect(&address)).collect();
    held[0].write_all(b"GET /metrics HT").unwrap();
    // On a busy machine the kernel may hand over connections in another order than they were made in: let both arrive.
    std::thread::park_timeout(Duration::from_millis(300));
    // Unlike a single read, this goes on after a signal.
    let ending = |stream: &mut TcpStream| {
        let mut text = String::new();
        stream.read_to_string(&mut text).map(|_| text)
    };
    let is_closed = |end: &std::io::Result<String>| end.as_ref().map_or_else(is_reset, String::is_empty);
    // Both slots are held. The next one is closed at once, whether before or after it could ask.
    let mut third = connect(&address);
    let _ = third.write_all(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n");
    let end = ending(&mut third);
    assert!(is_closed(&end), "{end:?}");
    // But not for ever.
    for stream in &mut held {
        let end = ending(stream);
        assert!(is_closed(&end), "{end:?}");
    }
    assert_eq!(server.http("GET /healthz").1, "ok\n");
    assert!(server.http("GET /metrics").1.contains("\nsluice_ops_connections_refused_total 1\n"));
    assert_eq!(server.leave(), Some(0));
}

#[test]
fn the_line_to_try_says_the_password() {
    let folder = folder(&[("c.toml", "[resp]\npassword_file = \"password\"\n"), ("password", "s3cret\n")]);
    let mut server = Server::start(sluice(&folder, &[&ANYWHERE[..], &["--config", "c.toml"]].concat()));
    assert!(server.said.contains(" -a \"$(cat password)\" CHECK path"), "{}", server.said);
    let info = server.ask(&["AUTH", "s3cret"]);
    assert!(info.starts_with("+OK"), "{info}");
    assert_eq!(server.leave(), Some(0));
}

fn is_reset(error: &std::io::Error) -> bool {
    matches!(error.kind(), std::io::ErrorKind::ConnectionReset | std::io::ErrorKind::BrokenPipe)
}

#[test]
fn nobody_has_to_read_what_it_says() {
    let folder = folder(&[("p.toml", POLICY), ("wrong.toml", "nonsense = 1\n")]);
    for (args, expected) in [
        (&["explain", "--policy", "p.toml", "path=/v1/login"][..], 0),
        (&["check-config", "p.toml"][..], 1),
        (&["check-config", "wrong.toml"][..], 1),
        (&["--policy", "wrong.toml"][..], 1),
        (&["--nonsense"][..], 2),
    ] {
        for full in [false, true] {
            let nowhere = || -> Stdio {
                if full {
                    std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap().into()
                } else {
                    // A pipe whose other end is closed.
                    std::io::pipe().unwrap().1.into()
                }
            };
            let mut command = Command::new(env!("CARGO_BIN_EXE_sluice"));
            let status = command.args(args).current_dir(folder.path()).stdout(nowhere()).stderr(nowhere()).status();
            let expected = if full { expected.max(1) } else { expected };
            assert_eq!(status.unwrap().code(), Some(expected), "{args:?}, full disk: {full}");
        }
    }
}
