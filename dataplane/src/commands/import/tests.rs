//! What comes of configurations, asked of the compiled policy; and random ones against the reference's lookup.

use std::collections::{BTreeSet, HashMap, HashSet};

use policy_sync::{
    model::Mode,
    snapshot::{Applied, Attributes, Grant, Snapshot},
};

use super::*;

const DATABASES: &str = include_str!("examples/databases.yaml");
const GATEWAY: &str = include_str!("examples/gateway.yaml");
const BEYOND: &str = include_str!("examples/beyond.yaml");

/// A rule that applies: its name, whether it decides, what it grants, and its bucket.
#[derive(Clone, Debug)]
struct Hit {
    rule: String,
    enforces: bool,
    grant: Grant,
    key: u64,
}

fn import(text: &str) -> (Policy, Report) {
    let mut report = Report::default();
    let policy = translate(&[("config.yaml", text)], &mut report);
    (policy, report)
}

/// Imports what must have a policy, which goes through its text and the compiler.
fn compiled(text: &str) -> Snapshot {
    let (policy, report) = import(text);
    assert!(report.problems.is_empty(), "{}", report.shown(false));
    let written = stored::to_toml(&policy);
    assert_eq!(file::parse(&written, "policy.toml").unwrap(), policy, "{written}");
    Snapshot::compile(&policy, 7).unwrap()
}

/// The problems of what has no policy.
fn problems(text: &str) -> Vec<String> {
    let (_, report) = import(text);
    assert!(!report.problems.is_empty());
    report.problems.iter().map(ToString::to_string).collect()
}

fn problem(text: &str) -> String {
    let mut problems = problems(text);
    assert_eq!(problems.len(), 1, "{problems:?}");
    problems.remove(0)
}

fn notes(text: &str) -> Vec<String> {
    import(text).1.notes.iter().map(ToString::to_string).collect()
}

fn hits(snapshot: &Snapshot, pairs: &[(&str, &str)]) -> Vec<Hit> {
    let mut attributes = Attributes::default();
    for (name, value) in pairs {
        attributes.push(snapshot, name.as_bytes(), value.as_bytes()).unwrap();
    }
    let mut applied = Vec::new();
    snapshot.applying(&attributes, 0, &mut Vec::new(), &mut applied).unwrap();
    let hit = |one: &Applied| {
        let rule = &snapshot.rules()[one.rule as usize];
        let enforces = rule.mode == Mode::Enforce;
        Hit { rule: rule.name.to_string(), enforces, grant: *snapshot.grant(*one), key: one.key }
    };
    // Whoever is exempt is not limited by the rule at all.
    applied.iter().map(hit).filter(|hit| hit.grant != Grant::Exempt).collect()
}

/// What limits a request: the rules' names, with capacity, refill and period in seconds, or what else they grant.
fn limits(snapshot: &Snapshot, pairs: &[(&str, &str)]) -> Vec<String> {
    let shown = hits(snapshot, pairs).into_iter().map(|hit| {
        let grant = match hit.grant {
            Grant::Limit(rate) => {
                format!("{}, {} each {} s", rate.capacity, rate.refill, rate.period_ms / 1000)
            }
            other => format!("{other:?}"),
        };
        format!("{}{}: {grant}", hit.rule, if hit.enforces { "" } else { " (shadow)" })
    });
    shown.collect()
}

/// A configuration of one descriptor with these fields, and a limit.
fn limited(fields: &str, limit: &str) -> String {
    format!("domain: d\ndescriptors:\n  - {{{fields}, rate_limit: {{{limit}}}}}\n")
}

#[test]
fn databases() {
    let snapshot = compiled(DATABASES);
    let of = |domain, database| limits(&snapshot, &[("domain", domain), ("database", database)]);
    assert_eq!(of("pools", "orders"), ["pools.database-orders: 300, 300 each 1 s"]);
    assert_eq!(of("pools", "archive"), ["pools.database-archive: 20, 20 each 1 s"]);
    assert!(of("pools", "other").is_empty() && of("others", "orders").is_empty());
    let more = [("domain", "pools"), ("database", "orders"), ("user", "u")];
    assert!(limits(&snapshot, &more).is_empty(), "a descriptor with more entries is another one");
}

#[test]
fn gateway() {
    let snapshot = compiled(GATEWAY);
    let of = |pairs: &[(&str, &str)]| limits(&snapshot, &[&[("domain", "shop")], pairs].concat());
    assert_eq!(
        of(&[("source_cluster", "web"), ("destination_cluster", "cart")]),
        ["shop.source_cluster-web.destination_cluster-cart: 40, 40 each 60 s"]
    );
    assert!(of(&[("source_cluster", "web")]).is_empty() && of(&[("destination_cluster", "cart")]).is_empty());
    assert_eq!(of(&[("api_key", "any")]), ["shop.api_key: 60, 60 each 60 s"]);
    assert_eq!(of(&[("api_key", "partner")]), ["shop.api_key: 6000, 6000 each 60 s"]);
    assert_eq!(of(&[("api_key", "leaked")]), ["shop.api_key: Deny"]);
    assert!(of(&[("api_key", "status-page")]).is_empty());
    assert_eq!(of(&[("api_key", "newcomer")]), ["shop.api_key-newcomer (shadow): 5, 5 each 3600 s"]);
    assert_eq!(of(&[("tenant", "a")]), ["shop.tenant: 30, 30 each 60 s"]);
    assert_eq!(of(&[("tenant", "a"), ("method", "GET")]), ["shop.tenant.Method: 20, 20 each 60 s"]);
    // The rule that decides stands first; the other never has fewer tokens.
    assert_eq!(
        of(&[("tenant", "a"), ("method", "DELETE")]),
        ["shop.tenant.Method-DELETE: 2, 2 each 60 s", "shop.tenant.Method: 20, 20 each 60 s"]
    );
    assert_eq!(of(&[("tenant", "a"), ("method", "TRACE")])[0], "shop.tenant.Method-TRACE: Deny");
    assert!(of(&[("tenant", "a"), ("health", "1")]).is_empty());
    assert_eq!(of(&[("path", "/files/1")]), ["shop.path-files-any: 1000, 1000 each 86400 s"]);
    assert_eq!(of(&[("path", "/users/1")]), ["shop.path-users-any: 100, 100 each 604800 s"]);
    assert_eq!(of(&[("account", "1234")]), ["shop.account-1234: 1000, 50 each 1576800 s"]);
    assert_eq!(of(&[("report", "")]), ["shop.report: 3, 3 each 2592000 s"]);
    let bucket = |name, value| hits(&snapshot, &[("domain", "shop"), (name, value)])[0].key;
    assert_eq!(bucket("path", "/files/1"), bucket("path", "/files/2"), "share_threshold");
    assert_ne!(bucket("path", "/users/1"), bucket("path", "/users/2"));
    let notes = notes(GATEWAY);
    for field in ["detailed_metric", "value_to_metric", "metadata", "name"] {
        assert!(notes.iter().any(|note| note.contains(field)), "{field}: {notes:?}");
    }
}

#[test]
fn beyond() {
    let problems = problems(BEYOND);
    let wanted = [
        ("config.yaml:4: beyond / kind=export: ", "replaces the limit \"for-everybody\""),
        ("config.yaml:18: beyond / user / action: ", "/ user / action=login (line 22), beyond / user / action=view"),
        ("config.yaml:33: beyond / service=one: ", "quota_mode"),
        ("config.yaml:39: beyond / licence: ", "7 each year"),
    ];
    assert_eq!(problems.len(), wanted.len(), "{problems:#?}");
    for (problem, (place, words)) in problems.iter().zip(wanted) {
        assert!(problem.starts_with(place) && problem.contains(words), "{problem}");
    }
    assert!(notes(BEYOND).iter().any(|note| note.contains("a name that no limit of the domain has")));
}

#[test]
fn what_is_no_configuration_is_said_with_its_line() {
    let cases = [
        ("admin:\n  address: 0.0.0.0\n", "config.yaml:1: unknown field `admin`, expected one of domain, descriptors"),
        ("domain: d\ndescriptors:\n  - kye: a\n", "config.yaml:3: unknown field `kye`"),
        ("domain: d\ndescriptors:\n  - key: a\n    rate_limit: { per: 1 }\n", "config.yaml:4: unknown field `per`"),
        ("domain: d\ndomain: e\n", "config.yaml:2: duplicate mapping key: domain"),
        ("domain: d\n---\ndomain: e\n", "config.yaml:3: multiple YAML documents detected"),
        ("descriptors: []\n", "config.yaml: has no domain"),
        ("domain: d*\n", "config.yaml: d*: a `*` in the domain"),
        (
            "domain: d\ndescriptors:\n  - key: a\n    rate_limit: { unit: day, requests_per_unit: -1 }\n",
            "config.yaml:4: is no whole number from 0 to 4294967295",
        ),
        ("domain: d\ndescriptors:\n  - value: x\n", "config.yaml:3: d / =x: has no key"),
    ];
    for (text, wanted) in cases {
        let found = problem(text);
        assert!(found.starts_with(wanted), "{found}");
        assert!(!found.contains('\n'), "{found}");
    }
}

#[test]
fn what_the_reference_refuses_is_refused() {
    let cases = [
        (limited("key: a", "unit: fortnight, requests_per_unit: 1"), "\"fortnight\" is no unit"),
        (limited("key: a", "requests_per_unit: 1"), "rate_limit has no unit"),
        (limited("key: a", "unit: day, unlimited: true"), "unlimited and a unit"),
        (limited("key: a", "unit: day, requests_per_unit: 1, name: n, replaces: [{name: n}]"), "its own name"),
        (limited("key: a", "unit: day, requests_per_unit: 1, replaces: [{}]"), "an entry without a name"),
        (limited("key: a, share_threshold: true", "unit: day, requests_per_unit: 1"), "share_threshold"),
        ("domain: d\ndescriptors: [{key: a}, {key: a}]\n".into(), "the same key and value as line 2"),
        ("domain: d\ndescriptors: [{key: a_b}, {key: a, value: b}]\n".into(), "the same key and value as line 2"),
    ];
    for (text, wanted) in cases {
        let found = problem(&text);
        assert!(found.contains(wanted), "{found}");
    }
}

#[test]
fn a_refused_limit_is_one_problem() {
    let found = problem(
        "domain: d\ndescriptors:\n- key: a\n  descriptors:\n\
         \x20 - {key: b, rate_limit: {unit: day, requests_per_unit: 1}}\n\
         \x20 - {key: b, value: x, rate_limit: {unit: fortnight, requests_per_unit: 1}}\n",
    );
    assert!(found.contains("\"fortnight\" is no unit"), "{found}");
}

#[test]
fn nesting_without_end_is_refused() {
    let text = format!("domain: d\ndescriptors: {}{}", "[{key: a, descriptors: ".repeat(3_000), "}]".repeat(3_000));
    assert!(problem(&text).contains("nested too deep"));
}

#[test]
fn what_attributes_cannot_say_is_a_problem() {
    let cases = [
        (limited("key: Domain", "unit: day, requests_per_unit: 1"), "becomes the attribute `domain`"),
        (limited("key: 'a*'", "unit: day, requests_per_unit: 1"), "a key that ends with `*`"),
        (limited("key: a, value: 'x*y'", "unit: day, requests_per_unit: 1"), "a `*` that is not at the end"),
        (limited("key: a, value: 'x**'", "unit: day, requests_per_unit: 1"), "a `*` that is not at the end"),
        (limited("key: a", "unit: day, requests_per_unit: 4000000000"), "a bucket holds at most 2147483647"),
        (
            "domain: d\ndescriptors: [{key: A, descriptors: [{key: a, rate_limit: {unit: day, requests_per_unit: 1}}]}]"
                .into(),
            "both become the attribute `a`",
        ),
        (
            format!(
                "{}  - {{key: 'a:', rate_limit: {{unit: day, requests_per_unit: 2}}}}\n",
                limited("key: a_", "unit: day, requests_per_unit: 1")
            ),
            "in another order or from other keys",
        ),
        (
            "domain: d\ndescriptors:\n\
             - {key: a, descriptors: [{key: b, rate_limit: {unit: day, requests_per_unit: 1}}]}\n\
             - {key: b, descriptors: [{key: a, rate_limit: {unit: day, requests_per_unit: 1}}]}\n"
                .into(),
            "in another order or from other keys",
        ),
        (
            "domain: d\ndescriptors:\n\
             - {key: a, descriptors: [{key: b, rate_limit: {unit: day, requests_per_unit: 1}}]}\n\
             - {key: a, value: free}\n"
                .into(),
            "what has no limit below d / a=free (line 4)",
        ),
    ];
    for (text, wanted) in cases {
        let found = problem(&text);
        assert!(found.contains(wanted), "{found}");
    }
    let deep = (0..20).rev().fold(String::from("rate_limit: {unlimited: true}"), |inside, level| {
        if level == 19 {
            format!("key: k{level}, {inside}")
        } else {
            format!("key: k{level}, descriptors: [{{{inside}}}]")
        }
    });
    let found = problem(&format!("domain: d\ndescriptors: [{{{deep}}}]"));
    assert!(found.contains("has 20 attributes; the most is 16"), "{found}");
}

#[test]
fn an_exact_value_below_a_wildcard_path_has_an_override() {
    let snapshot = compiled(
        "domain: d\ndescriptors:\n\
         - key: user\n  descriptors:\n  - {key: op, value: get, rate_limit: {unit: second, requests_per_unit: 1}}\n\
         - key: user\n  value: root\n  descriptors:\n  - {key: op, value: put, rate_limit: {unit: day, requests_per_unit: 9}}\n\
         - key: tag\n  value: 'a*b'\n  rate_limit: {unit: day, requests_per_unit: 5}\n\
         - {key: tag, rate_limit: {unit: day, requests_per_unit: 4}}\n",
    );
    let of = |user, op| limits(&snapshot, &[("domain", "d"), ("user", user), ("op", op)]);
    assert_eq!(of("ann", "get"), ["d.user.op-get: 1, 1 each 1 s"]);
    // The lookup goes to `root` and never turns back.
    assert!(of("root", "get").is_empty() && of("ann", "put").is_empty());
    assert_eq!(of("root", "put"), ["d.user-root.op-put: 9, 9 each 86400 s"]);
    // What no pattern can say, an identity can.
    assert_eq!(limits(&snapshot, &[("domain", "d"), ("tag", "a*b")]), ["d.tag: 5, 5 each 86400 s"]);
}

#[test]
fn what_is_never_reached_is_left_out() {
    let text = "domain: d\ndescriptors:\n\
                - {key: a, rate_limit: {unit: day, requests_per_unit: 1}}\n\
                - {key: a, value: 'x*', rate_limit: {unit: day, requests_per_unit: 2}}\n\
                - {key: a, value: 'xy*', rate_limit: {unit: day, requests_per_unit: 3}}\n";
    let (policy, report) = import(text);
    // `a=x*` takes its requests from `a`, which a prefix's identities are too many for.
    assert_eq!(report.problems.len(), 1, "{}", report.shown(false));
    assert!(report.problems[0].message.contains("d / a=x* (line 4)"), "{}", report.shown(false));
    assert!(report.notes[0].message.contains("is never reached"), "{}", report.shown(false));
    assert_eq!(policy.rules.len(), 2);
}

#[test]
fn more_rules_than_a_check_may_have_are_a_problem() {
    let prefixes = |count: usize| -> String {
        let one = |len: usize| {
            format!(
                "- {{key: a, value: '{}*', rate_limit: {{unit: day, requests_per_unit: {}}}}}\n",
                "x".repeat(len),
                99 - len
            )
        };
        format!("domain: d\ndescriptors:\n{}", (1..=count).rev().map(one).collect::<String>())
    };
    compiled(&prefixes(64));
    assert!(problems(&prefixes(65))[0].contains("65 rules would apply"));
}

#[test]
fn names_are_unique_and_short() {
    let long = "v".repeat(200);
    let text = format!(
        "domain: d\ndescriptors:\n\
         - {{key: 'a', value: 'x y', rate_limit: {{unit: day, requests_per_unit: 1}}}}\n\
         - {{key: 'a', value: 'x/y', rate_limit: {{unit: day, requests_per_unit: 1}}}}\n\
         - {{key: 'a', value: '/', rate_limit: {{unit: day, requests_per_unit: 1}}}}\n\
         - {{key: 'a', value: '*', rate_limit: {{unit: day, requests_per_unit: 1}}}}\n\
         - {{key: 'b', value: '{long}', rate_limit: {{unit: day, requests_per_unit: 1}}}}\n\
         - {{key: 'b', value: '{long}w', rate_limit: {{unit: day, requests_per_unit: 1}}}}\n"
    );
    let mut text_without_overrides = text.clone();
    text_without_overrides = text_without_overrides.replace("'*'", "'q*'");
    let (policy, report) = import(&text_without_overrides);
    assert!(report.problems.is_empty(), "{}", report.shown(false));
    let names: Vec<_> = policy.rules.iter().map(|rule| rule.name.as_str()).collect();
    assert_eq!(names[..3], ["d.a-x-y", "d.a-x-y-2", "d.a-x"]);
    assert_eq!(names[5], "d.a-q-any");
    assert!(names.iter().collect::<HashSet<_>>().len() == 6 && names.iter().all(|name| name.len() <= 128), "{names:?}");
    // With a wildcard beside them, exact values are its overrides.
    let (policy, _) = import(&text);
    assert_eq!((policy.rules.len(), policy.overrides.len()), (3, 3));
}

#[test]
fn files_are_one_policy() {
    let mut report = Report::default();
    let policy = translate(&[("one.yaml", DATABASES), ("two.yaml", GATEWAY)], &mut report);
    assert!(report.problems.is_empty() && policy.rules.len() > 10);
    let policy = translate(&[("one.yaml", DATABASES), ("two.yaml", DATABASES), ("three.yaml", "x")], &mut report);
    assert_eq!(policy.rules.len(), 2);
    let problems: Vec<_> = report.problems.iter().map(ToString::to_string).collect();
    assert!(problems[0].starts_with("two.yaml: pools: the domain is already that of one.yaml"), "{problems:?}");
    assert!(problems[1].starts_with("three.yaml:1: "), "{problems:?}");
}

#[test]
fn a_denial_that_is_not_written_is_noted() {
    let text = limited("key: a", "unit: day");
    assert_eq!(limits(&compiled(&text), &[("domain", "d"), ("a", "1")]), ["d.a: Deny"]);
    assert!(notes(&text)[0].contains("no requests_per_unit"));
}

/// A descriptor of a random configuration, and what the reference does with it.
#[derive(Debug, Default)]
struct Random {
    key: &'static str,
    value: &'static str,
    /// Requests each minute, where there are any.
    limit: Option<Option<u32>>,
    shadow: bool,
    shared: bool,
    children: Vec<Random>,
}

/// Numbers below a bound, one after the other.
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB) % bound
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len() as u64) as usize]
    }
}

const KEYS: [&str; 3] = ["a", "b", "c"];
const REQUESTED: [&str; 5] = ["x", "xy", "xyz", "q", ""];

impl Random {
    fn siblings(dice: &mut Dice, used: &[&str]) -> Vec<Self> {
        let mut found: Vec<Self> = Vec::new();
        for _ in 0..dice.below(5) {
            let key = dice.of(&KEYS);
            let value = dice.of(&["", "", "x", "xy", "x*", "xy*", "*"]);
            if used.contains(&key) || found.iter().any(|other| (other.key, other.value) == (key, value)) {
                continue;
            }
            let limit = match dice.below(8) {
                0 | 1 => None,
                2 => Some(None),
                3 => Some(Some(0)),
                _ => Some(Some(dice.of(&[1, 2, 3]))),
            };
            let shared = value.ends_with('*') && dice.below(3) == 0;
            let children = if used.len() < 2 { Self::siblings(dice, &[used, &[key]].concat()) } else { Vec::new() };
            found.push(Self { key, value, limit, shadow: dice.below(8) == 0, shared, children });
        }
        found
    }

    fn yaml(&self) -> String {
        let limit = match self.limit {
            None => String::new(),
            Some(None) => "rate_limit: {unlimited: true}, ".into(),
            Some(Some(requests)) => format!("rate_limit: {{unit: minute, requests_per_unit: {requests}}}, "),
        };
        let children: Vec<_> = self.children.iter().map(Self::yaml).collect();
        format!(
            "{{key: {}, value: '{}', {limit}shadow_mode: {}, share_threshold: {}, descriptors: [{}]}}",
            self.key,
            self.value,
            self.shadow,
            self.shared,
            children.join(", ")
        )
    }
}

/// The reference's lookup: what limits a request, and the bucket that it counts in.
fn lookup<'r>(roots: &'r [Random], entries: &[(&str, &str)]) -> Option<(&'r Random, String)> {
    let (mut level, mut bucket, mut found) = (roots, String::new(), None);
    for &(key, value) in entries {
        let of = |wanted: &str| level.iter().find(|one| one.key == key && one.value == wanted);
        let starred = || {
            let mut starred = level.iter().filter(|one| one.key == key && one.value.ends_with('*'));
            starred.find(|one| value.starts_with(one.value.trim_end_matches('*')))
        };
        // An empty value is not found as a value: only a star or the bare key has it.
        let exact = Some(value).filter(|value| !value.is_empty()).and_then(of);
        let next = exact.or_else(starred).or_else(|| of(""))?;
        let counted = if next.shared { next.value } else { value };
        bucket.push_str(&format!("{key}={counted}/"));
        (level, found) = (&next.children, Some(next));
    }
    found.filter(|found| found.limit.is_some()).map(|found| (found, bucket))
}

fn key_paths(level: &[Random], above: &[&'static str], found: &mut BTreeSet<Vec<&'static str>>) {
    for one in level {
        let path = [above, &[one.key]].concat();
        key_paths(&one.children, &path, found);
        found.insert(path);
    }
}

/// What requests showed of the buckets so far.
#[derive(Default)]
struct Buckets {
    /// By the reference's bucket, the one that decides.
    deciding: HashMap<String, u64>,
    /// By bucket, the reference's whose requests take from it.
    counted: HashMap<u64, String>,
}

/// Every request with these keys.
fn requests(keys: &[&'static str]) -> Vec<Vec<(&'static str, &'static str)>> {
    keys.iter().fold(vec![Vec::new()], |requests, &key| {
        let longer = |request: &Vec<_>| REQUESTED.map(|value| [&request[..], &[(key, value)]].concat());
        requests.iter().flat_map(longer).collect()
    })
}

/// Holds the policy to the reference's answer for one request.
fn compare(
    snapshot: &Snapshot,
    roots: &[Random],
    request: &[(&str, &str)],
    buckets: &mut Buckets,
) -> Result<(), String> {
    let hits = hits(snapshot, &[&[("domain", "d")], request].concat());
    let expected = lookup(roots, request);
    let (enforcing, shadows): (Vec<_>, Vec<_>) = hits.iter().partition(|hit| hit.enforces);
    let wrong = |why: &str| Err(format!("{why}: {request:?} expects {expected:?}, has {hits:?}"));
    let requests = |hit: &Hit| match hit.grant {
        Grant::Limit(rate) => rate.capacity,
        Grant::Deny => 0,
        Grant::Exempt => u32::MAX,
    };
    let (among, wanted, bucket) = match &expected {
        None => return if enforcing.is_empty() { Ok(()) } else { wrong("limited") },
        Some((found, _)) if found.limit == Some(None) => {
            return if enforcing.is_empty() { Ok(()) } else { wrong("not unlimited") };
        }
        Some((found, _)) if found.shadow && !enforcing.is_empty() => {
            return wrong(&format!("shadow {found:?} enforces"));
        }
        Some((found, bucket)) => (if found.shadow { &shadows } else { &enforcing }, found.limit.flatten(), bucket),
    };
    if expected.as_ref().is_some_and(|(found, _)| found.shadow) {
        let there = among.iter().any(|hit| Some(requests(hit)) == wanted);
        return if there { Ok(()) } else { wrong("no shadow") };
    }
    // The first of those that allow least is what decides, and what a reply names.
    let Some(decides) = among.iter().min_by_key(|hit| requests(hit)).filter(|hit| Some(requests(hit)) == wanted) else {
        return wrong("another limit");
    };
    // A denial has no bucket, and nothing is taken from the others.
    if decides.grant == Grant::Deny {
        return Ok(());
    }
    if *buckets.deciding.entry(bucket.clone()).or_insert(decides.key) != decides.key {
        return wrong("another bucket");
    }
    // What others take from a bucket beside it could make that deny.
    let mut own = |hit: &&Hit| buckets.counted.entry(hit.key).or_insert_with(|| bucket.clone()) == bucket;
    if among.iter().copied().all(|hit| own(&hit)) { Ok(()) } else { wrong("a bucket of others") }
}

#[test]
fn random_configurations_limit_what_the_reference_limits() {
    let (mut whole, mut compared) = (0, 0);
    for seed in 0..3_000 {
        let roots = Random::siblings(&mut Dice(seed), &[]);
        let descriptors: Vec<_> = roots.iter().map(Random::yaml).collect();
        let text = format!("domain: d\ndescriptors: [{}]\n", descriptors.join(",\n"));
        let (_, report) = import(&text);
        if !report.problems.is_empty() {
            continue;
        }
        whole += 1;
        let snapshot = compiled(&text);
        let (mut paths, mut buckets) = (BTreeSet::new(), Buckets::default());
        key_paths(&roots, &[], &mut paths);
        // Requests to Sluice have no order, so one order of the same keys is all that can be told.
        let unordered = |path: &[&'static str]| path.iter().copied().collect::<BTreeSet<_>>();
        let alone = |path: &&Vec<_>| paths.iter().filter(|other| unordered(other) == unordered(path)).count() == 1;
        for request in paths.iter().filter(alone).flat_map(|path| requests(path)) {
            compared += 1;
            if let Err(error) = compare(&snapshot, &roots, &request, &mut buckets) {
                panic!("seed {seed}: {error}\n{text}\n{}", stored::to_toml(&import(&text).0));
            }
        }
    }
    assert!(
        whole > 1_000 && compared > 50_000,
        "{whole} configurations had a policy, {compared} requests were compared"
    );
}
