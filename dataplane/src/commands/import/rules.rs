//! Rules for a tree's limits, and the overrides that keep each rule to its own requests.
//!
//! A descriptor with a limit becomes a rule: the domain, the path's exact values and prefixes in `match`, and in `per` each
//! attribute whose values have buckets of their own. `match_all` lets it see only requests with exactly the path's keys.
//!
//! A rule then still fits requests that the reference answers by a better sibling (see `routes`). In the order of preference:
//!
//! 1. They are one identity of the rule: an override for it. It has the sibling's own limit, if the sibling answers nothing
//!    else and counts the same way; else it is `exempt`, and the sibling has its own rule.
//! 2. The rule may count them too, because it cannot deny what the sibling allows. A sibling that denies everything takes
//!    nothing from other rules. And where each bucket of both rules stands for the same values, and the sibling's has no
//!    more capacity and no faster refill, then it never has more tokens: both begin full, and each check takes from both or
//!    from none.
//! 3. It cannot be expressed, and that is a problem.

use std::collections::{BTreeMap, HashMap, HashSet};

use policy_sync::{
    model::{Allowance, Hot, Limit, Mode, NAME_BYTES_MAX, OnFailure, Override, Pattern, Policy, ROLLOUT_BP_ALL, Rule},
    rate::Rate,
    snapshot::RULES_PER_CHECK_MAX,
};
use xxhash_rust::xxh3::xxh3_64;

use super::{
    Remark, Report,
    routes::{Route, by_precedence, routes},
    tree::{DOMAIN, Granted, Node, Tree, Wanted},
};

/// The most siblings that a problem names.
const SIBLINGS_SHOWN_MAX: usize = 3;
/// A name is cut to this many bytes and gets its hash, where it is longer than a rule's may be.
const NAME_CUT_BYTES: usize = NAME_BYTES_MAX - 17;

/// The rules and overrides of all trees so far.
#[derive(Default)]
pub(super) struct Translation {
    rules: Vec<Rule>,
    overrides: Vec<Override>,
    names: HashSet<String>,
}

/// An identity of a rule that the reference answers elsewhere.
struct Point {
    rule: usize,
    identity: Vec<String>,
    end: Option<usize>,
}

impl Translation {
    pub(super) fn policy(self, version: u64) -> Policy {
        Policy { version, rules: self.rules, overrides: self.overrides }
    }

    /// Adds a tree's rules. What it cannot express it reports.
    pub(super) fn add(&mut self, tree: &Tree, report: &mut Report) {
        let mut limited = limited(tree);
        let mut unreached = HashSet::new();
        let mut points = Vec::new();
        // How often a descriptor's requests also fit another's rule.
        let mut met: HashMap<usize, usize> = HashMap::new();
        // How many rules may apply to a descriptor's requests, exempt or not.
        let mut fitting: HashMap<usize, usize> = HashMap::new();
        for &(node, granted) in &limited {
            let routes = routes(tree, node);
            if routes.iter().all(|route| route.end != Some(node)) {
                let message = "is never reached in the reference, as a value with a `*` before it takes all its requests: no \
                               rule comes of it";
                report.notes.push(tree.remark(node, message));
                unreached.insert(node);
                continue;
            }
            for end in routes.iter().filter_map(|route| route.end) {
                *fitting.entry(end).or_default() += 1;
            }
            // A rule that limits nothing may fit whatever it likes.
            if granted.allowance == Allowance::Exempt {
                continue;
            }
            let mut strays = Vec::new();
            for route in routes.iter().filter(|route| route.end != Some(node)) {
                route.end.into_iter().for_each(|end| *met.entry(end).or_default() += 1);
                match identity(tree, node, route) {
                    Some(identity) => points.push(Point { rule: node, identity, end: route.end }),
                    None if is_harmless(tree, node, granted, route.end) => {}
                    // That limit has its own problem.
                    None if route.end.is_some_and(|end| tree.nodes[end].refused) => {}
                    None => strays.push(route),
                }
            }
            report_strays(tree, node, granted, &strays, report);
        }
        limited.retain(|(node, _)| !unreached.contains(node));
        report_mixed_up(tree, &limited, report);
        for (node, count) in fitting.into_iter().filter(|&(_, count)| count > RULES_PER_CHECK_MAX) {
            let message = format!("{count} rules would apply to its requests, and the most is {RULES_PER_CHECK_MAX}");
            let suggestion = Some("have fewer values with a `*` that fit the same value".into());
            report.problems.push(Remark { suggestion, ..tree.remark(node, message) });
        }
        let absorbed: HashSet<usize> = points
            .iter()
            .filter_map(|point| point.end.filter(|&end| met[&end] == 1 && is_absorbed(tree, point.rule, end)))
            .collect();
        let mut names = HashMap::new();
        for &(node, granted) in &limited {
            if !absorbed.contains(&node) {
                names.insert(node, self.add_rule(tree, node, granted, report));
            }
        }
        for Point { rule, identity, end } in points {
            let own = end.filter(|end| absorbed.contains(end)).and_then(|end| tree.nodes[end].limit);
            let allowance = own.map_or(Allowance::Exempt, |own| own.allowance);
            // A descriptor that was absorbed has no wildcard, and so no points.
            if let Some(rule) = names.get(&rule) {
                let rule = rule.clone();
                self.overrides.push(Override { rule, identity, allowance, hot: None, expires: None });
            }
        }
    }

    fn add_rule(&mut self, tree: &Tree, node: usize, granted: Granted, report: &mut Report) -> String {
        let mut matches = BTreeMap::from([(DOMAIN.to_owned(), Pattern::Exact(tree.domain.clone()))]);
        let mut per = Vec::new();
        for level in tree.path(node) {
            let Node { attribute, wanted, shared, .. } = &tree.nodes[level];
            let (pattern, text) = match wanted {
                Wanted::Exact(value) => (Some(Pattern::Exact(value.clone())), value.as_str()),
                // Whatever value there is begins with nothing.
                Wanted::Prefix(prefix) if prefix.is_empty() => (shared.then_some(Pattern::Present), ""),
                Wanted::Prefix(prefix) => (Some(Pattern::Prefix(prefix.clone())), prefix.as_str()),
                Wanted::Any => (None, ""),
            };
            if text.contains('*') {
                let message = "has a `*` that is not at the end of its value, where a policy has no way to write it";
                report.problems.push(tree.remark(level, message));
            }
            matches.extend(pattern.map(|pattern| (attribute.clone(), pattern)));
            if has_own_buckets(&tree.nodes[level]) {
                per.push(attribute.clone());
            }
        }
        let name = self.name(tree, node);
        self.rules.push(Rule {
            name: name.clone(),
            matches,
            match_all: true,
            per,
            allowance: granted.allowance,
            mode: if granted.shadow { Mode::Shadow } else { Mode::Enforce },
            rollout_bp: ROLLOUT_BP_ALL,
            on_failure: OnFailure::default(),
            local: None,
            hot: Hot::default(),
        });
        name
    }

    /// A name that nobody has: the domain, and of each level the key and the value.
    fn name(&mut self, tree: &Tree, node: usize) -> String {
        let mut name = part(&tree.domain);
        for level in tree.path(node) {
            let Node { key, wanted, .. } = &tree.nodes[level];
            name.push('.');
            name.push_str(&part(key));
            match wanted {
                Wanted::Exact(value) => name.extend(["-", &part(value)]),
                Wanted::Prefix(prefix) if prefix.is_empty() => name.push_str("-any"),
                Wanted::Prefix(prefix) => name.extend(["-", &part(prefix), "-any"]),
                Wanted::Any => {}
            }
        }
        if name.len() > NAME_BYTES_MAX {
            let hash = xxh3_64(tree.shown(node).as_bytes());
            name.truncate(NAME_CUT_BYTES);
            name.push_str(&format!("-{hash:016x}"));
        }
        // Different texts may have the same letters and digits.
        let mut unique = name.clone();
        for count in 2_u32.. {
            if self.names.insert(unique.clone()) {
                break;
            }
            let count = format!("-{count}");
            unique = format!("{}{count}", &name[..name.len().min(NAME_BYTES_MAX - count.len())]);
        }
        unique
    }
}

/// A text as a part of a rule's name, which has ASCII letters, digits and `-_.` only.
fn part(text: &str) -> String {
    let mut part = String::new();
    for character in text.chars() {
        if character.is_ascii_alphanumeric() || matches!(character, '_' | '.') {
            part.push(character);
        } else if !part.ends_with('-') {
            part.push('-');
        }
    }
    let part = part.trim_matches('-');
    if part.is_empty() { "x".into() } else { part.into() }
}

/// The descriptors with a limit: what the reference prefers comes first, as the first of two equal rules is what a reply
/// names.
fn limited(tree: &Tree) -> Vec<(usize, Granted)> {
    let mut found = Vec::new();
    let mut open = by_precedence(tree, &tree.roots);
    open.reverse();
    while let Some(node) = open.pop() {
        found.extend(tree.nodes[node].limit.map(|granted| (node, granted)));
        let mut children = by_precedence(tree, &tree.nodes[node].children);
        children.reverse();
        open.extend(children);
    }
    found
}

/// Whether each value has a bucket of its own.
fn has_own_buckets(node: &Node) -> bool {
    !node.shared && !matches!(node.wanted, Wanted::Exact(_))
}

/// The one identity of a rule that the requests of a route have, if they have one.
fn identity(tree: &Tree, rule: usize, route: &Route) -> Option<Vec<String>> {
    let path = tree.path(rule);
    let levels = path.iter().zip(&route.values).map(|(&level, value)| (&tree.nodes[level], value));
    // Where values share a bucket, an override of it would be for all of them.
    let mut shared = levels.clone().filter(|(node, _)| node.shared);
    if shared.any(|(node, value)| node.wanted != *value) {
        return None;
    }
    let values = levels.filter(|(node, _)| has_own_buckets(node)).map(|(_, value)| match value {
        Wanted::Exact(value) => Some(value.clone()),
        Wanted::Prefix(_) | Wanted::Any => None,
    });
    values.collect::<Option<Vec<_>>>().filter(|values| !values.is_empty())
}

/// Whether a rule may count requests that arrive elsewhere, because that changes no verdict.
fn is_harmless(tree: &Tree, rule: usize, granted: Granted, end: Option<usize>) -> bool {
    let Some(other) = end.and_then(|end| tree.nodes[end].limit) else {
        return false;
    };
    match (granted.allowance, other.allowance) {
        _ if granted.shadow || other.shadow => false,
        (_, Allowance::Deny) => true,
        (Allowance::Limit(limit), Allowance::Limit(other)) => {
            // Where values share a bucket of the rule, others have emptied it.
            let whole = tree.path(rule).into_iter().all(|level| !tree.nodes[level].shared);
            whole && never_has_more(other, limit)
        }
        _ => false,
    }
}

/// Whether a bucket of the first limit never has more tokens than one of the second, if the same checks take from both.
fn never_has_more(one: Limit, other: Limit) -> bool {
    let (Ok(first), Ok(second)) = (Rate::new(one), Rate::new(other)) else {
        return false;
    };
    let rate = |one: Limit, other: Limit| u128::from(one.refill) * u128::from(other.period_ms);
    // What ticks by the second is late by up to one.
    one.capacity <= other.capacity && rate(one, other) <= rate(other, one) && first.tick_ms >= second.tick_ms
}

/// Whether a descriptor's limit can live in an override of another's rule: it answers one identity, and both count the
/// same way.
fn is_absorbed(tree: &Tree, rule: usize, end: usize) -> bool {
    let exact = tree.path(end).into_iter().all(|level| matches!(tree.nodes[level].wanted, Wanted::Exact(_)));
    let modes = tree.nodes[rule].limit.zip(tree.nodes[end].limit);
    exact && modes.is_some_and(|(rule, end)| rule.shadow == end.shadow)
}

/// Reports requests that a rule would limit, and should not.
fn report_strays(tree: &Tree, node: usize, granted: Granted, strays: &[&Route], report: &mut Report) {
    let Some(first) = strays.first() else {
        return;
    };
    let place = |route: &Route| match (route.end, route.by) {
        (Some(end), _) => format!("{} (line {})", tree.shown(end), tree.nodes[end].line),
        (None, Some(by)) => format!("what has no limit below {} (line {})", tree.shown(by), tree.nodes[by].line),
        (None, None) => "what has no limit".into(),
    };
    let mut shown: Vec<String> = strays.iter().take(SIBLINGS_SHOWN_MAX).map(|route| place(route)).collect();
    if strays.len() > SIBLINGS_SHOWN_MAX {
        shown.push(format!("{} more", strays.len() - SIBLINGS_SHOWN_MAX));
    }
    let others = shown.join(", ");
    if granted.shadow {
        let message =
            format!("is in shadow_mode; its rule also records requests that the reference answers by {others}");
        report.notes.push(tree.remark(node, message));
        return;
    }
    let per: Vec<_> = tree.path(node).into_iter().map(|level| &tree.nodes[level]).collect();
    let per: Vec<_> = per.into_iter().filter(|level| has_own_buckets(level)).map(|level| &*level.attribute).collect();
    let message = format!(
        "its rule would also limit requests that the reference answers by {others}: a rule cannot leave out one value of an \
         attribute, and an override is for one whole identity ({})",
        if per.is_empty() { "here all values share one".into() } else { per.join(", ") }
    );
    let limited = first.end.is_some_and(|end| tree.nodes[end].limit.is_some());
    let suggestion = if limited {
        "where the other limit allows no more than this one, both can hold; else give one of them another key"
    } else {
        "give the requests that are not limited another key"
    };
    report.problems.push(Remark { suggestion: Some(suggestion.into()), ..tree.remark(node, message) });
}

/// Reports limits whose rule would also fit the requests of another descriptor, from which only the order or the spelling of
/// the keys tells theirs. Attributes have neither.
fn report_mixed_up(tree: &Tree, limited: &[(usize, Granted)], report: &mut Report) {
    let mut alike: BTreeMap<Vec<&str>, Vec<usize>> = BTreeMap::new();
    for (node, Node { limit, children, .. }) in tree.nodes.iter().enumerate() {
        // One without a limit that is only on the way to others is not meant to say that its own requests pass.
        if limit.is_some() || children.is_empty() {
            let mut names: Vec<_> = tree.path(node).iter().map(|&level| &*tree.nodes[level].attribute).collect();
            names.sort_unstable();
            alike.entry(names).or_default().push(node);
        }
    }
    let limits: HashSet<usize> =
        limited.iter().filter(|(_, granted)| granted.allowance != Allowance::Exempt).map(|&(node, _)| node).collect();
    let keys = |node: usize| tree.path(node).into_iter().map(|level| tree.nodes[level].key.as_str());
    for nodes in alike.values().filter(|nodes| nodes.iter().any(|&node| !keys(node).eq(keys(nodes[0])))) {
        for (at, &node) in nodes.iter().enumerate() {
            let twin = nodes[..at].iter().find(|other| {
                (limits.contains(&node) || limits.contains(other))
                    && !keys(node).eq(keys(**other))
                    && meet(tree, node, **other)
            });
            if let Some(&twin) = twin {
                let message = format!(
                    "has the attributes of {} (line {}), in another order or from other keys, which requests to Sluice do not \
                     show: what is said of one would hold for both",
                    tree.shown(twin),
                    tree.nodes[twin].line
                );
                let suggestion = Some("keep one of them, or give one another key, here and in Envoy's actions".into());
                report.problems.push(Remark { suggestion, ..tree.remark(node, message) });
            }
        }
    }
}

/// Whether some request has values that fit both.
fn meet(tree: &Tree, one: usize, other: usize) -> bool {
    let others: HashMap<&str, &Wanted> =
        tree.path(other).into_iter().map(|level| (&*tree.nodes[level].attribute, &tree.nodes[level].wanted)).collect();
    tree.path(one).into_iter().all(|level| {
        let Node { attribute, wanted, .. } = &tree.nodes[level];
        others.get(&**attribute).is_some_and(|other| wanted.and(other).is_some())
    })
}
