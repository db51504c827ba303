//! Policy files: what they mean, and what is said about those that mean nothing.

use std::{collections::BTreeMap, fmt::Write, path::PathBuf};

use policy_sync::{
    check::{self, Item},
    file::{self, PROBLEMS_MAX, Problems, ReadError},
    model::{
        Allowance, CAPACITY_MAX, Hot, Lease, Limit, Mode, OVERRIDES_MAX, OnFailure, Override, PERIOD_MS_MAX, Pattern,
        Policy, RULES_MAX, Rule,
    },
    rate::{MILLISECOND_TICK_PERIOD_MS_MAX, Rate},
    snapshot::Snapshot,
};
use proptest::prelude::*;

fn problems(text: &str) -> Problems {
    match file::parse(text, "p.toml") {
        Ok(policy) => panic!("accepted {policy:#?}\nof\n{text}"),
        Err(problems) => problems,
    }
}

/// A rule with this in it, and nothing else wrong.
fn rule_with(fields: &str) -> String {
    format!(
        "[[rule]]\nname = \"r\"\nper = [\"key\"]\nlimit = {{ capacity = 10, refill = 10, period = \"1m\" }}\n{fields}\n"
    )
}

fn override_with(fields: &str) -> String {
    rule_with(&format!("[[override]]\n{fields}"))
}

/// Fields in a rule that already has a name, `per` and a limit, and what is said about them on line 5.
const RULE_CASES: &[(&str, &str)] = &[
    ("nam = 1", "nam: unknown field (did you mean `name`?)"),
    (
        "colour = 1",
        "colour: unknown field; known here are name, match, match_all, per, limit, quota, deny, exempt, mode, rollout_pct, on_failure, local, hot",
    ),
    ("refill = 10", "refill: unknown field (it belongs into `limit = { … }`)"),
    ("deny = true", "deny: excludes limit (keep one of them)"),
    (
        "mode = \"enforced\"",
        "mode: \"enforced\" is not one of \"enforce\", \"shadow\", \"off\" (did you mean \"enforce\"?)",
    ),
    ("mode = true", "mode: expected a string, found true"),
    ("on_failure = \"allow\"", "on_failure: \"allow\" is not one of \"open\", \"closed\", \"local\""),
    ("rollout_pct = 33.333", "rollout_pct: goes in steps of 0.01, and 33.333 lies between two (write 33.33)"),
    ("rollout_pct = 101", "rollout_pct: must be from 0 to 100, not 101"),
    ("rollout_pct = -1", "rollout_pct: must be from 0 to 100, not -1"),
    ("rollout_pct = nan", "rollout_pct: must be from 0 to 100, not NaN"),
    ("rollout_pct = \"50\"", "rollout_pct: expected a number from 0 to 100, found the string \"50\""),
    (
        "match = \"/login\"",
        "match: expected a table of attribute names and values, found the string \"/login\" (write it as in match = { path = \"/v1/login\" })",
    ),
    (
        "match = { path = \"/a*b\" }",
        "match.path: \"/a*b\" has a * before its end, where it cannot stand for anything (\"/a*\" matches what starts like this)",
    ),
    ("match = { path = 7 }", "match.path: expected a string, found the number 7 (write \"7\")"),
    (
        "match = { user.id = \"7\" }",
        "match.user: expected a string, found a table (an attribute name with a dot is written in quotes, as in \"user.id\" = \"7\")",
    ),
    (
        "match = { User-Agent = \"curl*\" }",
        "match.User-Agent: the attribute name \"User-Agent\" may have only a-z, 0-9, \"_\", \"-\" and \".\" (write \"user-agent\")",
    ),
    ("match = { \"\" = \"x\" }", "match.\"\": has an empty attribute name"),
    ("match_all = 1", "match_all: expected true or false, found the number 1"),
    (
        "local = { capacity = 0, refill = 1, period = \"1s\" }",
        "local.capacity: must be at least 1 (on_failure = \"closed\" answers unavailable meanwhile)",
    ),
    (
        "local = { capacity = 1, refill = 1, period = \"1s\" }\non_failure = \"open\"",
        "local: acts only with on_failure = \"local\" (remove it, or write on_failure = \"local\")",
    ),
    ("hot = { lease = 0 }", "hot.lease: must be at least 1 (write lease = \"off\" for none)"),
    ("hot = { lease = 11 }", "hot.lease: takes batches of 11, which a capacity of 10 does not have"),
    ("hot = { lease = \"of\" }", "hot.lease: \"of\" is not one of \"auto\", \"off\" (did you mean \"off\"?)"),
    ("hot = { lease = true }", "hot.lease: expected \"auto\", \"off\" or a number of tokens, found true"),
    ("hot = { split = 1 }", "hot.split: must be from 2 to 1024 (leave it out for one bucket)"),
    (
        "hot = { split = 11 }",
        "hot.split: needs a token for each part, so at least 11, which a capacity of 10 does not have",
    ),
    ("hot = { split = 1025 }", "hot.split: must be from 2 to 1024 (leave it out for one bucket)"),
    ("hot = { sample = 1 }", "hot.sample: must be at least 2 (leave it out to ask every check)"),
    (
        "hot = { sample = 11 }",
        "hot.sample: asks at this many times the cost, so for at least 11, which a capacity of 10 does not have",
    ),
    (
        "hot = { split = 2, sample = 2 }",
        "hot.sample: excludes hot.split: both give up exactness, and together nobody can say how much (keep one of them)",
    ),
    (
        "hot = { split = 2, lease = 2 }",
        "hot.lease: excludes hot.split: a batch comes out of one bucket, and split makes several (keep one of them)",
    ),
    ("hot = \"auto\"", "hot: expected a table with lease, split, sample, found the string \"auto\""),
];

/// Limits, and what is said about them.
const LIMIT_CASES: &[(&str, &str)] = &[
    (
        "capacity = 0, refill = 1, period = \"1s\"",
        "limit.capacity: must be at least 1 (write deny = true to refuse everything)",
    ),
    (
        "capacity = -5, refill = 1, period = \"1s\"",
        "limit.capacity: must be at least 1 (write deny = true to refuse everything)",
    ),
    (
        "capacity = 2147483648, refill = 1, period = \"1s\"",
        "limit.capacity: must be at most 2147483647 (write exempt = true for no limit)",
    ),
    (
        "capacity = 99999999999999999999999999999999999999999999, refill = 1, period = \"1s\"",
        "limit.capacity: must be at most 2147483647 (write exempt = true for no limit)",
    ),
    (
        "capacity = \"10\", refill = 1, period = \"1s\"",
        "limit.capacity: expected a whole number, found the string \"10\" (remove the quotes)",
    ),
    ("capacity = 1.5, refill = 1, period = \"1s\"", "limit.capacity: expected a whole number, found the number 1.5"),
    (
        "capacity = 1, refill = 0, period = \"1s\"",
        "limit.refill: must be at least 1 (a longer period makes the refill slower, and deny = true refuses everything)",
    ),
    ("capacity = 1, refil = 1, period = \"1s\"", "limit.refil: unknown field (did you mean `refill`?)"),
    ("capacity = 1, period = \"1s\"", "limit.refill: is missing"),
    (
        "capacity = 1, refill = 1, period = 60",
        "limit.period: expected a duration such as \"1m\", found the number 60 (write \"60s\" for seconds or \"60ms\" for milliseconds)",
    ),
    (
        "capacity = 1, refill = 1, period = \"60\"",
        "limit.period: \"60\" has no unit (write \"60s\" for seconds or \"60ms\" for milliseconds)",
    ),
    (
        "capacity = 1, refill = 1, period = \"1min\"",
        "limit.period: \"min\" is not a unit of time: d, h, m, s or ms (write m)",
    ),
    (
        "capacity = 1, refill = 1, period = \"30s1m\"",
        "limit.period: \"30s1m\" has m after a unit that is not larger (write each unit once, the largest first)",
    ),
    (
        "capacity = 1, refill = 1, period = \"1.5s\"",
        "limit.period: \"1.5s\" is not a duration (write numbers with the units d, h, m, s or ms, as in \"1m\" or \"1m30s\")",
    ),
    ("capacity = 1, refill = 1, period = \"0s\"", "limit.period: must be at least 1ms"),
    ("capacity = 1, refill = 1, period = \"31d1s\"", "limit.period: must be at most 31d"),
    (
        "capacity = 1, refill = 1, period = \"5h1ms\"",
        "limit.period: must be a whole number of seconds beyond 16777216ms (about 4.6 hours) (for example \"5h\")",
    ),
];

/// Overrides of a rule `r` with one `per` attribute, and what is said about them.
const OVERRIDE_CASES: &[(&str, &str)] = &[
    (
        "rule = \"r\"\nidentity = []\nexempt = true",
        "p.toml:7: override of \"r\": identity: has 0 values; the rule's per has 1: [\"key\"], see line 3",
    ),
    (
        "rule = \"R\"\nidentity = [\"a\"]\nexempt = true",
        "p.toml:6: override of \"R\": rule: there is no rule \"R\" (did you mean \"r\"?)",
    ),
    (
        "rule = \"other\"\nidentity = [\"a\"]\nexempt = true",
        "p.toml:6: override of \"other\": rule: there is no rule \"other\"",
    ),
    (
        "rule = \"*\"\nidentity = [\"a\", \"b\"]\nexempt = true",
        "p.toml:7: override of \"*\": identity: has 2 values, and no rule has that many attributes in per",
    ),
    (
        "rule = \"r\"\nidentity = \"a\"\nexempt = true",
        "p.toml:7: override of \"r\": identity: expected an array of strings, found the string \"a\" (write [\"a\"])",
    ),
    (
        "rule = \"r\"\nidentity = [7]\nexempt = true",
        "p.toml:7: override of \"r\": identity[0]: expected a string, found the number 7 (write \"7\")",
    ),
    ("identity = [\"a\"]\nexempt = true", "p.toml:5: override[0]: rule: is missing"),
    ("rule = \"r\"\nexempt = true", "p.toml:5: override of \"r\": identity: is missing"),
    (
        "rule = \"r\"\nidentity = [\"a\"]",
        "p.toml:5: override of \"r\": does not say what it allows (write limit = { … }, deny = true or exempt = true)",
    ),
    (
        "rule = \"r\"\nidentity = [\"a\"]\nexempt = false",
        "p.toml:8: override of \"r\": exempt: can only be true (leave it out otherwise)",
    ),
    (
        "rule = \"r\"\nidentity = [\"a\"]\nexempt = true\nmode = \"off\"",
        "p.toml:9: override of \"r\": mode: unknown field; known here are rule, identity, limit, quota, deny, exempt, hot, expires",
    ),
    (
        "rule = \"r\"\nidentity = [\"a\"]\nexempt = true\nexpires = 2027-01-01",
        "p.toml:9: override of \"r\": expires: \"2027-01-01\" is not a point in time with its offset from UTC (write \"2027-01-01T00:00:00Z\" if you mean UTC)",
    ),
    (
        "rule = \"r\"\nidentity = [\"a\"]\nexempt = true\nexpires = \"2027-01-01T00:00:00\"",
        "p.toml:9: override of \"r\": expires: \"2027-01-01T00:00:00\" is not a point in time with its offset from UTC (write \"2027-01-01T00:00:00Z\" if you mean UTC)",
    ),
    (
        "rule = \"r\"\nidentity = [\"a\"]\nexempt = true\nexpires = \"soon\"",
        "p.toml:9: override of \"r\": expires: \"soon\" is not a point in time with its offset from UTC (write it as in \"2027-01-01T00:00:00Z\")",
    ),
    (
        "rule = \"r\"\nidentity = [\"a\"]\nexempt = true\nexpires = 1",
        "p.toml:9: override of \"r\": expires: expected a point in time, found the number 1 (write it as in \"2027-01-01T00:00:00Z\")",
    ),
    (
        "rule = \"r\"\nidentity = [\"a\"]\nquota = { amount = 1, every = \"day\" }",
        "p.toml:8: override of \"r\": quota: quota is not served yet (use a limit; its period may be up to 31d)",
    ),
];

/// Whole files, and what is said about them.
const FILE_CASES: &[(&str, &str)] = &[
    (
        "[rule]\nname = \"r\"",
        "p.toml:1: rule: expected an array of tables, found a table (write [[rule]] with two brackets)",
    ),
    ("rule = 1", "p.toml:1: rule: expected an array of tables, found the number 1"),
    (
        "rule = [1]",
        "p.toml:1: rule[0]: expected a table with name, match, match_all, per, limit, quota, deny, exempt, mode, rollout_pct, on_failure, local, hot, found the number 1",
    ),
    (
        "\n[[rules]]\nname = \"r\"\n[[override]]\nrule = \"r\"\nidentity = []\nexempt = true",
        "p.toml:2: rules: unknown field (did you mean `rule`?)",
    ),
    ("[[rule]]\ndeny = true", "p.toml:1: rule[0]: name: is missing"),
    ("[[rule]]\nname = \"\"\ndeny = true", "p.toml:2: rule[0]: name: must not be empty"),
    (
        "[[rule]]\nname = \"log in\"\ndeny = true",
        "p.toml:2: rule \"log in\": name: has the character ' '; allowed are ASCII letters, digits, \"-\", \"_\" and \".\" (for example \"log-in\")",
    ),
    (
        "[[rule]]\nname = \"r\"",
        "p.toml:1: rule \"r\": does not say what it allows (write limit = { … }, deny = true or exempt = true)",
    ),
    (
        "[[rule]]\nname = \"r\"\nlimits = { capacity = 1, refill = 1, period = \"1s\" }",
        "p.toml:3: rule \"r\": limits: unknown field (did you mean `limit`?)",
    ),
    (
        "[[rule]]\nname = \"r\"\nlimit = 10",
        "p.toml:3: rule \"r\": limit: expected a table with capacity, refill, period, found the number 10",
    ),
    (
        "[[rule]]\nname = \"r\"\nquota = { amount = 5, every = \"day\" }",
        "p.toml:3: rule \"r\": quota: quota is not served yet (use a limit; its period may be up to 31d)",
    ),
    (
        "[[rule]]\nname = \"r\"\ndeny = true\n[[rule]]\nname = \"r\"\ndeny = true",
        "p.toml:5: rule \"r\": name: is already the name of another rule, see line 2",
    ),
    (
        "[[rule]]\nname = \"r\"\ndeny = true\nmatch_all = true",
        "p.toml:4: rule \"r\": match_all: allows no attributes at all, so the rule never applies (name the attributes in match or per)",
    ),
    (
        "[[rule]]\nname = \"r\"\nper = [\"ip\", \"ip\"]\ndeny = true",
        "p.toml:3: rule \"r\": per[1]: names \"ip\" a second time",
    ),
    (
        "[[rule]]\nname = \"r\"\ndeny = true\nhot = { lease = \"off\" }",
        "p.toml:4: rule \"r\": hot: has no meaning in a rule without a bucket (deny or exempt) (remove it)",
    ),
    (
        "[[rule]]\nname = \"r\"\nlimit = { capacity = 10, refill = 1, period = \"30d\" }\nhot = { split = 2 }",
        "p.toml:4: rule \"r\": hot.split: a part would wait for its refill longer than 31d",
    ),
    (
        "[[rule]]\nname = \"r\"\nper = [\"key\"]\ndeny = true\n[[override]]\nrule = \"r\"\nidentity = [\"a\"]\nexempt = true\nhot = { split = 2 }",
        "p.toml:9: override of \"r\": hot: has no meaning in an override without a bucket (deny or exempt) (remove it)",
    ),
    (
        "[[rule]]\nname = \"r\"\nper = [\"key\"]\ndeny = true\n[[override]]\nrule = \"r\"\nidentity = [\"a\"]\nlimit = { capacity = 1, refill = 1, period = \"1s\" }\nhot = { split = 2 }",
        "p.toml:9: override of \"r\": hot.split: needs a token for each part, so at least 2, which a capacity of 1 does not have",
    ),
    (
        "[[rule]]\nname = \"r\"\ndeny = true\nlocal = { capacity = 1, refill = 1, period = \"1s\" }",
        "p.toml:4: rule \"r\": local: has no meaning in a rule that asks no store (deny or exempt) (remove it)",
    ),
    (
        "[[rule]]\nname = \"r\"\n[rule.limit]\ncapacity = 1\nrefill = 0\nperiod = \"1s\"",
        "p.toml:5: rule \"r\": limit.refill: must be at least 1 (a longer period makes the refill slower, and deny = true refuses everything)",
    ),
];

fn assert_only(text: &str, expected: &str) {
    assert_eq!(problems(text).to_string(), expected, "for the file\n{text}");
}

#[test]
fn each_mistake_is_named_with_its_line() {
    for (fields, expected) in RULE_CASES {
        assert_only(&rule_with(fields), &format!("p.toml:5: rule \"r\": {expected}"));
    }
    for (limit, expected) in LIMIT_CASES {
        let text = format!("[[rule]]\nname = \"r\"\nlimit = {{ {limit} }}\n");
        assert_only(&text, &format!("p.toml:3: rule \"r\": {expected}"));
    }
    for (fields, expected) in OVERRIDE_CASES {
        assert_only(&override_with(fields), expected);
    }
    for (text, expected) in FILE_CASES {
        assert_only(text, expected);
    }
}

#[test]
fn ten_mistakes_are_ten_problems() {
    let text = r#"
[[rule]]
name = "login per key"
match = { Path = "/v1/login" }
per = ["key", "key"]
limit = { capacity = 0, refil = 10, period = 60 }
mode = "shadowed"
rollout_pct = 33.333

[[rule]]
name = "api"
match = { path = "/api/*/x" }
deny = true
exempt = true

[[override]]
rule = "apo"
identity = []
exempt = true
"#;
    let problems = problems(text);
    let found: Vec<(usize, usize, String)> =
        problems.list().iter().map(|problem| (problem.line, problem.column, problem.field.to_string())).collect();
    let expected = [
        (3, 8, "name"),
        (4, 18, "match.Path"),
        (5, 15, "per[1]"),
        (6, 22, "limit.capacity"),
        (6, 25, "limit.refil"),
        (6, 46, "limit.period"),
        (7, 8, "mode"),
        (8, 15, "rollout_pct"),
        (12, 18, "match.path"),
        (14, 10, "exempt"),
        (17, 8, "rule"),
    ];
    let expected: Vec<_> = expected.map(|(line, column, field)| (line, column, field.to_owned())).into();
    assert_eq!(found, expected, "{problems}");
    assert_eq!(problems.more(), 0);
    assert_eq!(problems.list()[8].item, Item::Rule(1));
    assert_eq!(problems.list()[10].suggestion.as_deref(), Some("did you mean \"api\"?"));
}

#[test]
fn syntax_errors_have_line_and_column() {
    assert_only("[[rule]]\nname = r\n", "p.toml:2:8: string values must be quoted, expected literal string");
    assert_only("[[rule]]\nname = \"a\"\nname = \"b\"\ndeny = true\n", "p.toml:3:1: duplicate key");
    let both = problems("a = 1\na = 2\nb = 1\nb = 2\n");
    let lines: Vec<usize> = both.list().iter().map(|problem| problem.line).collect();
    assert_eq!(lines, [2, 4], "{both}");
    // A large file is not searched for more than the first.
    let large = format!("a = 1\na = 2\nb = 1\nb = 2\n{}", "#\n".repeat(1 << 19));
    assert_only(&large, "p.toml:2:1: duplicate key");
}

#[test]
fn columns_count_characters() {
    assert_eq!(problems("\"ä\" = 1 # é\nrule = [ [ ], 1 ]").list()[0].column, 1);
    assert_eq!(problems("rule = [ { name = \"äöü\", deny = 1 } ]").list()[0].column, 19);
    assert_eq!(problems("rule = [ { name = \"äöü\", deny = 1 } ]").list()[1].column, 33);
}

#[test]
fn only_the_first_problems_are_listed() {
    let text: String = (0..PROBLEMS_MAX + 7).fold(String::new(), |mut text, index| {
        let _ = writeln!(text, "unknown-{index} = 1");
        text
    });
    let problems = problems(&text);
    assert_eq!((problems.list().len(), problems.more()), (PROBLEMS_MAX, 7));
    assert!(problems.to_string().ends_with("\nand 7 more"));
}

#[test]
fn what_is_refused_is_not_refused_again_by_its_placeholder() {
    // The wrong `per` must not make the override's identity wrong, nor the wrong name its rule's duplicate.
    let text = "[[rule]]\nname = \"r\"\nper = \"key\"\ndeny = true\n[[override]]\nrule = \"r\"\nidentity = [\"a\"]\nexempt = true\n";
    assert_eq!(problems(text).list().len(), 1);
    let text = "[[rule]]\nname = 1\ndeny = true\n[[rule]]\nname = 2\ndeny = true\n";
    assert_eq!(problems(text).list().len(), 2);
}

#[test]
fn the_example_is_valid_and_read_as_it_says() {
    let path = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../policy.toml"));
    let policy = file::read(&path).unwrap();
    let names: Vec<&str> = policy.rules.iter().map(|rule| rule.name.as_str()).collect();
    assert_eq!(names, ["login-per-key", "api-per-ip", "search-stricter", "upload-new-limit", "admin-closed"]);
    let [login, api, search, upload, admin] = &policy.rules[..] else { unreachable!("five names") };
    assert_eq!(login.matches["path"], Pattern::Exact("/v1/login".into()));
    assert_eq!(login.per, ["key"]);
    assert_eq!(login.allowance, Allowance::Limit(Limit { capacity: 10, refill: 10, period_ms: 60_000 }));
    assert_eq!(api.matches["path"], Pattern::Prefix("/v1/".into()));
    assert_eq!(search.mode, Mode::Shadow);
    assert_eq!((upload.rollout_bp, upload.on_failure), (2500, OnFailure::Local));
    assert_eq!(upload.local, Some(Limit { capacity: 3, refill: 3, period_ms: 60_000 }));
    assert_eq!(admin.allowance, Allowance::Deny);
    assert_eq!(policy.overrides[0].expires.unwrap().to_string(), "2030-01-01T00:00:00Z");
    assert_eq!(policy.overrides[1].allowance, Allowance::Exempt);
    assert_eq!(file::parse(&written(&policy), "again").unwrap(), policy);
}

/// A field that the reader knows and the example does not mention would be one that nobody finds.
#[test]
fn the_example_mentions_every_field() {
    let text = include_str!("../../policy.toml");
    let unknown = problems("[[rule]]\nzzzzzzzzzz = 1\n[[override]]\nzzzzzzzzzz = 1\n");
    let listed = unknown.list().iter().filter_map(|problem| problem.message.split_once("known here are "));
    let fields: Vec<&str> = listed.flat_map(|(_, fields)| fields.split(", ")).collect();
    assert_eq!(fields.len(), 21);
    for field in fields {
        assert!(text.contains(&format!("{field} = ")), "{field}");
    }
}

#[test]
fn an_empty_file_is_an_empty_policy() {
    for text in ["", "\n# nothing\n", "\u{feff}", "rule = []\noverride = []"] {
        let policy = file::parse(text, "p.toml").unwrap();
        assert!(policy.rules.is_empty() && policy.overrides.is_empty());
    }
}

#[test]
fn ways_to_write_a_time() {
    for expires in [
        "\"2027-01-01T00:00:00Z\"",
        "2027-01-01T00:00:00Z",
        "2027-01-01 00:00:00Z",
        "2027-01-01T02:00:00+02:00",
        "\"2026-12-31T23:00:00-01:00\"",
        "2027-01-01T00:00:00.000Z",
    ] {
        let text = override_with(&format!("rule = \"r\"\nidentity = [\"a\"]\nexempt = true\nexpires = {expires}"));
        let expires = file::parse(&text, "p.toml").unwrap().overrides[0].expires.unwrap();
        assert_eq!(expires.to_string(), "2027-01-01T00:00:00Z");
    }
}

#[test]
fn files_that_cannot_be_read_say_why() {
    let directory = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let missing = directory.join("no-such-policy.toml");
    assert!(matches!(file::read(&missing), Err(ReadError::Io { .. })));
    assert!(file::read(&missing).unwrap_err().to_string().contains("no-such-policy.toml"));
    assert!(matches!(file::read(&directory), Err(ReadError::NotAFile { .. })));

    let binary = directory.join("binary-policy.toml");
    std::fs::write(&binary, b"# one\n# two \xff\n").unwrap();
    assert!(matches!(file::read(&binary), Err(ReadError::NotUtf8 { line: 2, .. })));

    let large = directory.join("large-policy.toml");
    std::fs::File::create(&large).unwrap().set_len(file::FILE_BYTES_MAX + 1).unwrap();
    assert!(matches!(file::read(&large), Err(ReadError::TooLarge { .. })));

    let wrong = directory.join("wrong-policy.toml");
    std::fs::write(&wrong, "nonsense = 1").unwrap();
    assert!(file::read(&wrong).unwrap_err().to_string().contains("wrong-policy.toml:1: nonsense: unknown field"));
    for path in [binary, large, wrong] {
        std::fs::remove_file(path).unwrap();
    }
}

/// Ten thousand rules and as many overrides, each of which has its own problem when `mistaken`.
fn large(count: usize, mistaken: bool) -> String {
    let mut text = String::new();
    for index in 0..count {
        let _ = writeln!(text, "[[rule]]\nname = \"rule-{index}\"\nmatch = {{ path = \"/{index}\" }}");
        let _ = writeln!(text, "per = [\"key\"]\ndeny = true");
    }
    for index in 0..count {
        let rule = if mistaken { "rulle" } else { "rule" };
        let _ = writeln!(text, "[[override]]\nrule = \"{rule}-{index}\"\nidentity = [\"a\"]\nexempt = true");
    }
    text
}

#[test]
fn ten_thousand_rules_are_read() {
    let policy = file::parse(&large(10_000, false), "p.toml").unwrap();
    assert_eq!((policy.rules.len(), policy.overrides.len()), (10_000, 10_000));
}

/// The one thing that looks at every rule for one finding is the search for a similar name: it makes a bounded number of
/// comparisons, however many overrides are wrong.
#[test]
fn the_search_for_similar_names_is_bounded() {
    let problems = problems(&large(2_000, true));
    assert_eq!((problems.list().len(), problems.more()), (PROBLEMS_MAX, 2_000 - PROBLEMS_MAX));
    let mut policy = file::parse(&large(2_000, false), "p.toml").unwrap();
    for over in &mut policy.overrides {
        over.rule.push('x');
    }
    let findings = check::check(&policy);
    assert_eq!(findings.len(), 2_000);
    let suggested = findings.iter().filter(|finding| finding.suggestion.is_some()).count();
    assert_eq!(suggested, check::SIMILAR_NAMES_MAX / 2_000);
}

#[test]
fn counts_have_bounds() {
    let rule = file::parse(&rule_with(""), "p.toml").unwrap().rules.remove(0);
    let mut policy = Policy { rules: vec![rule], ..Policy::default() };
    policy.overrides = (0..=OVERRIDES_MAX)
        .map(|index| Override {
            rule: "r".into(),
            identity: vec![index.to_string()],
            allowance: Allowance::Exempt,
            hot: None,
            expires: None,
        })
        .collect();
    let findings = check::check(&policy);
    assert_eq!(findings.len(), 1);
    assert_eq!(findings[0].to_string(), "override[1000000]: is one of 1000001 overrides; the most is 1000000");

    let mut text = String::new();
    for index in 0..=RULES_MAX {
        let _ = writeln!(text, "[[rule]]\nname = \"r{index}\"\nmatch = {{ path = \"/{index}\" }}\ndeny = true");
    }
    assert_only(
        &text,
        &format!("p.toml:{}: rule \"r65536\": is one of 65537 rules; the most is 65536", RULES_MAX * 4 + 1),
    );

    let names: Vec<String> = (0..17).map(|index| format!("\"a{index}\"")).collect();
    let text = format!("[[rule]]\nname = \"r\"\nper = [{}]\ndeny = true", names.join(", "));
    assert_only(&text, "p.toml:3: rule \"r\": per: has 17 attributes; the most is 16");

    let mut text = String::new();
    for rule in 0..16 {
        let names: Vec<String> = (0..16).map(|name| format!("a{rule}-{name} = \"x\"")).collect();
        let _ = writeln!(text, "[[rule]]\nname = \"r{rule}\"\ndeny = true\nmatch = {{ {} }}", names.join(", "));
    }
    assert_only(&text, "p.toml:61: rule \"r15\": brings the attribute names of the policy to 256; the most is 255");
}

#[test]
fn lengths_have_bounds() {
    let long = "a".repeat(129);
    assert!(problems(&rule_with(&format!("match = {{ {long} = \"x\" }}"))).to_string().contains("129 bytes"));
    let text = format!("[[rule]]\nname = \"{long}\"\ndeny = true");
    assert!(problems(&text).to_string().contains("is 129 bytes long; the most is 128"));
    let long = "a".repeat(check::VALUE_BYTES_MAX + 1);
    for text in [
        rule_with(&format!("match = {{ path = \"{long}*\" }}")),
        override_with(&format!("rule = \"r\"\nidentity = [\"{long}\"]\nexempt = true")),
    ] {
        let problems = problems(&text);
        assert_eq!(problems.list()[0].message, "is 4097 bytes long; the most is 4096");
    }
}

#[test]
fn two_overrides_of_one_identity_are_one_too_many() {
    let over = "rule = \"r\"\nidentity = [\"a\"]\nexempt = true";
    assert_only(
        &override_with(&format!("{over}\n[[override]]\n{over}")),
        "p.toml:11: override of \"r\": identity: has an override of the same rule already, see line 7",
    );
}

#[test]
fn an_overrides_capacity_must_suit_the_rules_pieces() {
    let hot = "hot = { split = 4 }\n[[override]]\nrule = \"RULE\"\nidentity = [\"a\"]\nlimit = { capacity = 3, refill = 1, period = \"1s\" }";
    for rule in ["r", "*"] {
        assert_only(
            &rule_with(&hot.replace("RULE", rule)),
            &format!(
                "p.toml:9: override of \"{rule}\": limit.capacity: must be at least 4 for the hot of its rule, see line 5"
            ),
        );
    }
}

/// Values are walked and dropped by recursion, which the parser keeps shallow.
#[test]
fn a_deep_key_does_no_harm() {
    let deep = vec!["a"; 100_000].join(".");
    for text in
        [format!("{deep} = 1"), format!("[{deep}]"), format!("[[rule]]\n{deep} = 1\n={deep}"), "[".repeat(100_000)]
    {
        assert!(!problems(&text).list().is_empty());
    }
}

/// The policy as a file. Only for policies whose strings need no escapes beyond Rust's.
fn written(policy: &Policy) -> String {
    let mut text = String::new();
    for rule in &policy.rules {
        let _ = writeln!(text, "[[rule]]\nname = {:?}\nmatch_all = {}", rule.name, rule.match_all);
        let matches: Vec<String> = rule
            .matches
            .iter()
            .map(|(name, pattern)| {
                format!(
                    "{name:?} = {:?}",
                    match pattern {
                        Pattern::Exact(value) => value.clone(),
                        Pattern::Prefix(prefix) => format!("{prefix}*"),
                        Pattern::Present => "*".into(),
                    }
                )
            })
            .collect();
        let _ = writeln!(text, "match = {{ {} }}\nper = {:?}", matches.join(", "), rule.per);
        text.push_str(&written_allowance(&rule.allowance));
        let mode = match rule.mode {
            Mode::Enforce => "enforce",
            Mode::Shadow => "shadow",
            Mode::Off => "off",
        };
        let failure = match rule.on_failure {
            OnFailure::Open => "open",
            OnFailure::Closed => "closed",
            OnFailure::Local => "local",
        };
        let _ = writeln!(text, "mode = {mode:?}\non_failure = {failure:?}");
        let _ = writeln!(text, "rollout_pct = {}.{:02}", rule.rollout_bp / 100, rule.rollout_bp % 100);
        if let Some(local) = rule.local {
            let _ = writeln!(text, "local = {}", written_limit(local));
        }
        text.push_str(&written_hot("rule", &rule.hot));
    }
    for over in &policy.overrides {
        let _ = writeln!(text, "[[override]]\nrule = {:?}\nidentity = {:?}", over.rule, over.identity);
        text.push_str(&written_allowance(&over.allowance));
        if let Some(expires) = over.expires {
            let _ = writeln!(text, "expires = {expires}");
        }
        if let Some(hot) = &over.hot {
            text.push_str(&written_hot("override", hot));
        }
    }
    text
}

fn written_hot(item: &str, hot: &Hot) -> String {
    let lease = match hot.lease {
        Lease::Auto => "\"auto\"".into(),
        Lease::Off => "\"off\"".into(),
        Lease::Batch(tokens) => tokens.to_string(),
    };
    let mut text = format!("[{item}.hot]\nlease = {lease}\n");
    for (name, number) in [("split", hot.split), ("sample", hot.sample)] {
        if let Some(number) = number {
            let _ = writeln!(text, "{name} = {number}");
        }
    }
    text
}

fn written_allowance(allowance: &Allowance) -> String {
    match allowance {
        Allowance::Limit(limit) => format!("limit = {}\n", written_limit(*limit)),
        Allowance::Deny => "deny = true\n".into(),
        Allowance::Exempt => "exempt = true\n".into(),
        Allowance::Quota(_) => unreachable!("quotas are refused"),
    }
}

fn written_limit(limit: Limit) -> String {
    let Limit { capacity, refill, period_ms } = limit;
    format!("{{ capacity = {capacity}, refill = {refill}, period = \"{}s{}ms\" }}", period_ms / 1000, period_ms % 1000)
}

fn limits() -> impl Strategy<Value = Limit> {
    let periods =
        prop_oneof![1..=MILLISECOND_TICK_PERIOD_MS_MAX, (1..=PERIOD_MS_MAX / 1000).prop_map(|secs| secs * 1000)];
    (1100..=CAPACITY_MAX, 1..=CAPACITY_MAX, periods).prop_map(|(capacity, refill, period_ms)| Limit {
        capacity,
        refill,
        period_ms,
    })
}

fn allowances() -> impl Strategy<Value = Allowance> {
    prop_oneof![3 => limits().prop_map(Allowance::Limit), 1 => Just(Allowance::Deny), 1 => Just(Allowance::Exempt)]
}

fn hots() -> impl Strategy<Value = Hot> {
    let lease = prop_oneof![Just(Lease::Auto), Just(Lease::Off)];
    prop_oneof![
        lease.clone().prop_map(|lease| Hot { lease, ..Hot::default() }),
        (1..=1000_u32).prop_map(|tokens| Hot { lease: Lease::Batch(tokens), ..Hot::default() }),
        (lease.clone(), 2..=1024_u32).prop_map(|(lease, split)| Hot { lease, split: Some(split), sample: None }),
        (lease, 2..=1000_u32).prop_map(|(lease, sample)| Hot { lease, split: None, sample: Some(sample) }),
    ]
}

fn patterns() -> impl Strategy<Value = Pattern> {
    prop_oneof![
        "[ -)+-~äß☃]{0,20}".prop_map(Pattern::Exact),
        "[ -)+-~äß☃]{1,20}".prop_map(Pattern::Prefix),
        Just(Pattern::Present)
    ]
}

/// A rule whose `per` has one or two attributes, always with the same names.
fn rules() -> impl Strategy<Value = Rule> {
    let matches = prop::collection::btree_map("[a-z0-9_.-]{1,6}", patterns(), 0..3);
    let modes = prop_oneof![Just(Mode::Enforce), Just(Mode::Shadow), Just(Mode::Off)];
    let failures = prop_oneof![Just(OnFailure::Open), Just(OnFailure::Closed), Just(OnFailure::Local)];
    let per = prop::sample::subsequence(vec!["ip".to_owned(), "key".to_owned()], 1..=2);
    let first = ("[A-Za-z0-9_.-]{1,12}", matches, any::<bool>(), per, allowances());
    (first, modes, 0..=10_000_u16, failures, prop::option::of(limits()), hots()).prop_map(
        |((name, matches, match_all, per, allowance), mode, rollout_bp, on_failure, local, hot)| {
            let bucket = matches!(allowance, Allowance::Limit(_));
            let local = local.filter(|_| bucket && on_failure == OnFailure::Local);
            let hot = if bucket { hot } else { Hot::default() };
            Rule { name, matches, match_all, per, allowance, mode, rollout_bp, on_failure, local, hot }
        },
    )
}

fn policies() -> impl Strategy<Value = Policy> {
    let expires_ms = prop::option::of(0..4_000_000_000_000_i64);
    let terms = (allowances(), prop::option::of(hots()));
    let over = (any::<prop::sample::Index>(), any::<bool>(), "[ -~äß☃]{0,8}", terms, expires_ms);
    (prop::collection::vec(rules(), 1..6), prop::collection::vec(over, 0..6)).prop_map(|(rules, overs)| {
        let rules: Vec<Rule> =
            rules.into_iter().map(|rule| (rule.name.clone(), rule)).collect::<BTreeMap<_, _>>().into_values().collect();
        let overs = overs.into_iter().map(|(rule, star, value, (allowance, hot), expires_ms)| {
            let expires = expires_ms.and_then(|ms| jiff::Timestamp::from_millisecond(ms).ok());
            let rule = &rules[rule.index(rules.len())];
            let identity = vec![value; rule.per.len()];
            let hot = hot.filter(|_| matches!(allowance, Allowance::Limit(_)));
            let name = if star { "*".to_owned() } else { rule.name.clone() };
            ((name.clone(), identity.clone()), Override { rule: name, identity, allowance, hot, expires })
        });
        let overrides = overs.collect::<BTreeMap<_, _>>().into_values().collect();
        Policy { version: file::FIRST_VERSION, rules, overrides }
    })
}

/// Pieces of policy files, put together without sense.
fn soup() -> impl Strategy<Value = String> {
    let pieces = [
        "[[rule]]\n",
        "[[override]]\n",
        "[rule.limit]\n",
        "[rule]\n",
        "name = ",
        "rule = ",
        "per = ",
        "match = ",
        "match_all = ",
        "limit = ",
        "quota = ",
        "deny = ",
        "exempt = ",
        "mode = ",
        "rollout_pct = ",
        "on_failure = ",
        "local = ",
        "hot = ",
        "identity = ",
        "expires = ",
        "capacity = ",
        "refill = ",
        "period = ",
        "split = ",
        "sample = ",
        "lease = ",
        "true\n",
        "false\n",
        "0\n",
        "-1\n",
        "0xff\n",
        "1e400\n",
        "nan\n",
        "33.333\n",
        "\"r\"\n",
        "\"*\"\n",
        "\"a*b\"\n",
        "\"1m\"\n",
        "\"é\"\n",
        "[\"a\"]\n",
        "[]\n",
        "[[1]]\n",
        "{}\n",
        "{ capacity = 0, refill = 1, period = \"1s\" }\n",
        "{ split = 1, sample = 1, lease = 0 }\n",
        "{ path = \"/*\" }\n",
        "2027-01-01\n",
        "2027-01-01T00:00:60Z\n",
        "9999-12-31T23:59:59-23:59\n",
        "99999999999999999999999999999999999999999\n",
        "\"",
        "'''",
        "{",
        "}",
        "[",
        "]",
        ".",
        ",",
        "=",
        "#",
        "\r",
    ];
    prop::collection::vec(prop::sample::select(pieces.to_vec()), 0..40).prop_map(|pieces| pieces.concat())
}

proptest! {
    #[test]
    fn a_valid_policy_survives_being_written(policy in policies()) {
        prop_assert_eq!(check::check(&policy), vec![]);
        prop_assert!(Snapshot::compile(&policy, 7).is_ok());
        let text = written(&policy);
        let read = file::parse(&text, "p.toml").map_err(|problems| TestCaseError::fail(format!("{problems}\n{text}")))?;
        prop_assert_eq!(read, policy);
    }

    #[test]
    fn check_refuses_what_cannot_be_computed_with(
        capacity in prop_oneof![0..3_u64, CAPACITY_MAX - 1..=CAPACITY_MAX + 1],
        refill in prop_oneof![0..3_u64, CAPACITY_MAX - 1..=CAPACITY_MAX + 1],
        period_ms in prop_oneof![0..3_u64, 16_777_000..16_778_001_u64, PERIOD_MS_MAX - 1..=PERIOD_MS_MAX + 1],
    ) {
        let limit = Limit { capacity, refill, period_ms };
        let mut rule = file::parse(&rule_with(""), "p.toml").unwrap().rules.remove(0);
        rule.allowance = Allowance::Limit(limit);
        let policy = Policy { rules: vec![rule], ..Policy::default() };
        prop_assert_eq!(check::check(&policy).is_empty(), Rate::new(limit).is_ok());
    }

    #[test]
    fn any_bytes_are_a_policy_or_problems(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let text = String::from_utf8_lossy(&bytes);
        if let Err(problems) = file::parse(&text, "p.toml") {
            prop_assert!(!problems.list().is_empty() && !problems.to_string().is_empty());
        }
    }

    #[test]
    fn any_pieces_are_a_policy_or_problems(text in soup()) {
        if let Err(problems) = file::parse(&text, "p.toml") {
            prop_assert!(!problems.list().is_empty() && !problems.to_string().is_empty());
            let lines = text.split('\n').count();
            prop_assert!(problems.list().iter().all(|problem| (1..=lines).contains(&problem.line) && problem.column >= 1));
        }
    }
}

#[test]
fn more_rules_than_a_check_may_have_cannot_share_their_conditions() {
    let rules = |count: usize, more: &str| -> String {
        let rule = |at| {
            format!(
                "[[rule]]\nname = \"r{at}\"\nper = [\"key\"]\n{more}limit = {{ capacity = 1, refill = 1, period = \"1s\" }}\n"
            )
        };
        (0..count).map(rule).collect()
    };
    assert!(file::parse(&rules(64, ""), "test").is_ok());
    let text = file::parse(&rules(65, ""), "test").unwrap_err().to_string();
    assert!(text.contains("more than 64 rules apply"), "{text}");
    assert!(file::parse(&rules(65, "mode = \"off\"\n"), "test").is_ok(), "rules that are off do not apply");
}
