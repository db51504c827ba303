//! A configuration file of envoyproxy/ratelimit as a tree of descriptors, with each field looked at.
//!
//! Fields and what is refused are those of the reference's own reader: a key must be there, a value may be missing, and two
//! siblings may not have the same key and value. What Sluice has no word for is reported here where it shows in one field;
//! what shows only in how descriptors stand to each other is for `routes` and `rules`.

use std::collections::{BTreeMap, HashMap, HashSet};

use policy_sync::model::{Allowance, CAPACITY_MAX, Limit, PERIOD_MS_MAX, attribute_name};
use serde::{Deserialize, de::IgnoredAny};
use serde_saphyr::Spanned;

use super::{Remark, Report};

/// The attribute that says which domain a request is for.
pub(super) const DOMAIN: &str = "domain";
/// The most lines that a note lists.
const LINES_SHOWN_MAX: usize = 8;
/// Units of a limit, in milliseconds. A month is 30 days and a year 365, as in the reference.
const UNITS: [(&str, u64); 7] = [
    ("second", 1_000),
    ("minute", 60_000),
    ("hour", 3_600_000),
    ("day", 86_400_000),
    ("week", 7 * 86_400_000),
    ("month", 30 * 86_400_000),
    ("year", 365 * 86_400_000),
];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Root {
    domain: Option<String>,
    descriptors: Option<Vec<Spanned<Descriptor>>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Descriptor {
    key: Option<String>,
    value: Option<String>,
    rate_limit: Option<RateLimit>,
    descriptors: Option<Vec<Spanned<Descriptor>>>,
    shadow_mode: Option<bool>,
    quota_mode: Option<bool>,
    detailed_metric: Option<bool>,
    value_to_metric: Option<bool>,
    share_threshold: Option<bool>,
    metadata: Option<IgnoredAny>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RateLimit {
    unit: Option<String>,
    requests_per_unit: Option<u32>,
    unlimited: Option<bool>,
    name: Option<String>,
    replaces: Option<Vec<Replaces>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Replaces {
    name: Option<String>,
}

/// What a descriptor, or a request, has as the value of one entry.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Wanted {
    /// Exactly this.
    Exact(String),
    /// What starts with this: a value that was written with a `*` at its end.
    Prefix(String),
    /// Anything: a key without a value.
    Any,
}

/// A descriptor.
pub(super) struct Node {
    pub(super) parent: Option<usize>,
    pub(super) children: Vec<usize>,
    pub(super) line: u64,
    pub(super) key: String,
    /// The key as rules say it.
    pub(super) attribute: String,
    pub(super) wanted: Wanted,
    /// All values share one bucket.
    pub(super) shared: bool,
    pub(super) limit: Option<Granted>,
    /// There is a limit, which was refused: what it would allow is not known.
    pub(super) refused: bool,
}

/// What a descriptor with `rate_limit` grants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Granted {
    pub(super) allowance: Allowance,
    pub(super) shadow: bool,
}

/// A file.
pub(super) struct Tree {
    pub(super) file: String,
    pub(super) domain: String,
    /// Parents before children, in the order of the file.
    pub(super) nodes: Vec<Node>,
    pub(super) roots: Vec<usize>,
}

/// What is only seen once the whole file is read.
#[derive(Default)]
struct Later {
    /// Names of limits.
    names: HashSet<String>,
    /// Who replaces which name.
    replaces: Vec<(usize, String)>,
    /// By what a note says of it, the lines that have it.
    notes: BTreeMap<&'static str, Vec<u64>>,
}

impl Tree {
    /// Reads a file. `None` where it is no such configuration, which is reported.
    pub(super) fn parse(file: &str, text: &str, report: &mut Report) -> Option<Self> {
        let remark =
            |line, message| Remark { file: Some(file.into()), line, path: String::new(), message, suggestion: None };
        let root: Root = match serde_saphyr::from_str(text) {
            Ok(root) => root,
            Err(error) => {
                let line = error.location().map(|location| location.line());
                report.problems.push(remark(line, yaml_message(&error)));
                return None;
            }
        };
        let Some(domain) = root.domain.filter(|domain| !domain.is_empty()) else {
            report.problems.push(remark(None, "has no domain, without which no request finds it".into()));
            return None;
        };
        let mut tree = Self { file: file.into(), domain, nodes: Vec::new(), roots: Vec::new() };
        if tree.domain.contains('*') {
            let message = "a `*` in the domain cannot be written in a policy, where it stands for any text".into();
            report.problems.push(tree.remark_on_domain(message));
        }
        let mut later = Later::default();
        tree.add_all(None, root.descriptors.unwrap_or_default(), &mut later, report);
        tree.finish(later, report);
        Some(tree)
    }

    /// The descriptors from the outermost to this one.
    pub(super) fn path(&self, node: usize) -> Vec<usize> {
        let mut path: Vec<usize> = std::iter::successors(Some(node), |&node| self.nodes[node].parent).collect();
        path.reverse();
        path
    }

    /// The path as people read it: `domain / key / key=value`.
    pub(super) fn shown(&self, node: usize) -> String {
        let levels = self.path(node).into_iter().map(|level| {
            let Node { key, wanted, .. } = &self.nodes[level];
            match wanted {
                Wanted::Exact(value) => format!(" / {}={}", key.escape_debug(), value.escape_debug()),
                Wanted::Prefix(prefix) => format!(" / {}={}*", key.escape_debug(), prefix.escape_debug()),
                Wanted::Any => format!(" / {}", key.escape_debug()),
            }
        });
        std::iter::once(self.domain.escape_debug().to_string()).chain(levels).collect()
    }

    pub(super) fn remark(&self, node: usize, message: impl Into<String>) -> Remark {
        Remark {
            file: Some(self.file.clone()),
            line: Some(self.nodes[node].line),
            path: self.shown(node),
            message: message.into(),
            suggestion: None,
        }
    }

    pub(super) fn remark_on_domain(&self, message: String) -> Remark {
        let path = self.domain.escape_debug().to_string();
        Remark { file: Some(self.file.clone()), line: None, path, message, suggestion: None }
    }

    fn add_all(
        &mut self,
        parent: Option<usize>,
        descriptors: Vec<Spanned<Descriptor>>,
        later: &mut Later,
        report: &mut Report,
    ) {
        // The reference tells siblings apart by this text.
        let mut seen: HashMap<String, usize> = HashMap::new();
        for Spanned { value: descriptor, referenced, .. } in descriptors {
            let node = self.add(parent, descriptor, referenced.line(), later, report);
            let Node { key, wanted, .. } = &self.nodes[node];
            let text = match wanted {
                Wanted::Exact(value) => format!("{key}_{value}"),
                Wanted::Prefix(prefix) => format!("{key}_{prefix}*"),
                Wanted::Any => key.clone(),
            };
            if let Some(first) = seen.insert(text, node) {
                let message = format!(
                    "stands for the same key and value as line {}, which the reference refuses",
                    self.nodes[first].line
                );
                let remark = Remark { suggestion: Some("remove one of them".into()), ..self.remark(node, message) };
                report.problems.push(remark);
            }
        }
    }

    fn add(
        &mut self,
        parent: Option<usize>,
        descriptor: Descriptor,
        line: u64,
        later: &mut Later,
        report: &mut Report,
    ) -> usize {
        let node = self.nodes.len();
        later.note_fields(&descriptor, line);
        let key = descriptor.key.unwrap_or_default();
        let value = descriptor.value.unwrap_or_default();
        let wanted = match value.strip_suffix('*') {
            _ if value.is_empty() => Wanted::Any,
            Some(prefix) => Wanted::Prefix(prefix.into()),
            None => Wanted::Exact(value),
        };
        let shared = descriptor.share_threshold == Some(true);
        let attribute = attribute_name(&key).into_owned();
        self.nodes.push(Node {
            parent,
            children: Vec::new(),
            line,
            key,
            attribute,
            wanted,
            shared,
            limit: None,
            refused: false,
        });
        match parent {
            Some(parent) => self.nodes[parent].children.push(node),
            None => self.roots.push(node),
        }
        self.check_key(node, report);
        if shared && !matches!(self.nodes[node].wanted, Wanted::Prefix(_)) {
            let message = "share_threshold stands at a value without a `*` at its end, which the reference refuses";
            report.problems.push(self.remark(node, message));
        }
        if let Some(limit) = descriptor.rate_limit {
            if descriptor.quota_mode == Some(true) {
                let message = "quota_mode denies only where every descriptor of a request with quota_mode is over its limit, \
                               and rules deny each by themselves";
                let suggestion = Some("without quota_mode each limit holds alone; decide whether that is meant".into());
                report.problems.push(Remark { suggestion, ..self.remark(node, message) });
            }
            let allowance = self.allowance(node, &limit, later, report);
            let shadow = descriptor.shadow_mode == Some(true);
            self.nodes[node].limit = allowance.map(|allowance| Granted { allowance, shadow });
            self.nodes[node].refused = allowance.is_none();
            self.take_names(node, limit, later, report);
        }
        self.add_all(Some(node), descriptor.descriptors.unwrap_or_default(), later, report);
        node
    }

    fn check_key(&self, node: usize, report: &mut Report) {
        let Node { key, attribute, parent, .. } = &self.nodes[node];
        let problem = if key.is_empty() {
            Some("has no key, which the reference refuses".to_owned())
        } else if key.ends_with('*') {
            Some(
                "a key that ends with `*` stands for every key and value that starts so, and attribute names are exact"
                    .into(),
            )
        } else if attribute == DOMAIN {
            Some(format!("the key {key:?} becomes the attribute `{DOMAIN}`, which has the request's domain"))
        } else {
            let path = parent.map(|parent| self.path(parent)).unwrap_or_default();
            let twin = path.into_iter().map(|level| &self.nodes[level]).find(|level| level.attribute == *attribute);
            twin.map(|twin| {
                let other = &twin.key;
                format!(
                    "the keys {other:?} of line {} and {key:?} of one path both become the attribute `{attribute}`, which a \
                     request has once",
                    twin.line
                )
            })
        };
        if let Some(message) = problem {
            let suggestion =
                (!key.is_empty()).then(|| "give the descriptor another key, here and in Envoy's actions".into());
            report.problems.push(Remark { suggestion, ..self.remark(node, message) });
        }
    }

    /// What a `rate_limit` allows; `None` where it is refused.
    fn allowance(&self, node: usize, limit: &RateLimit, later: &mut Later, report: &mut Report) -> Option<Allowance> {
        let unit = limit.unit.as_deref().unwrap_or_default();
        let known = UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit)).map(|&(_, unit_ms)| unit_ms);
        let mut refuse = |message: String, suggestion: Option<&str>| {
            let suggestion = suggestion.map(Into::into);
            report.problems.push(Remark { suggestion, ..self.remark(node, message) });
            None
        };
        if limit.unlimited == Some(true) {
            if known.is_some() {
                return refuse(
                    "has unlimited and a unit, which the reference refuses".into(),
                    Some("remove one of them"),
                );
            }
            if limit.requests_per_unit.is_some() {
                let note = "requests_per_unit beside unlimited does nothing in the reference: it is left out";
                later.notes.entry(note).or_default().push(self.nodes[node].line);
            }
            return Some(Allowance::Exempt);
        }
        let Some(unit_ms) = known else {
            let message = match unit {
                "" => "rate_limit has no unit".into(),
                unit => format!("{unit:?} is no unit"),
            };
            return refuse(message, Some("write second, minute, hour, day, week, month or year"));
        };
        let requests = match limit.requests_per_unit {
            None => {
                let note =
                    "rate_limit has no requests_per_unit, which the reference reads as 0: the rule denies everything";
                later.notes.entry(note).or_default().push(self.nodes[node].line);
                0
            }
            Some(requests) => u64::from(requests),
        };
        match (requests, token_bucket(requests, unit_ms)) {
            (0, _) => Some(Allowance::Deny),
            (_, Some(limit)) => Some(Allowance::Limit(limit)),
            (..=CAPACITY_MAX, None) => {
                let message = format!(
                    "{requests} each {unit} cannot be written with a period of at most 31 days: no divisor of {requests} from 12 \
                     on divides 365 days into whole seconds"
                );
                refuse(message, Some("take a multiple of 12, or a limit by the month"))
            }
            _ => {
                let message = format!("requests_per_unit is {requests}, and a bucket holds at most {CAPACITY_MAX}");
                refuse(message, Some("write unlimited: true, or a limit by a shorter unit"))
            }
        }
    }

    fn take_names(&self, node: usize, limit: RateLimit, later: &mut Later, report: &mut Report) {
        let own = limit.name.filter(|name| !name.is_empty());
        for replaced in limit.replaces.unwrap_or_default() {
            match replaced.name.filter(|name| !name.is_empty()) {
                None => {
                    let message = "replaces has an entry without a name, which the reference refuses";
                    report.problems.push(self.remark(node, message));
                }
                Some(name) if own.as_ref() == Some(&name) => {
                    let message = format!("replaces its own name {name:?}, which the reference refuses");
                    report.problems.push(self.remark(node, message));
                }
                Some(name) => later.replaces.push((node, name)),
            }
        }
        if let Some(name) = own {
            let note = "a limit's name is not kept: replies and metrics name the rule";
            later.notes.entry(note).or_default().push(self.nodes[node].line);
            later.names.insert(name);
        }
    }

    /// Reports what needed the whole file.
    fn finish(&self, mut later: Later, report: &mut Report) {
        for (node, name) in later.replaces {
            // Only a limit of the same domain can come in the same request.
            if !later.names.contains(&name) {
                let note = "replaces a name that no limit of the domain has, which does nothing: it is left out";
                later.notes.entry(note).or_default().push(self.nodes[node].line);
                continue;
            }
            let message = format!(
                "replaces the limit {name:?} where both are in one request; each descriptor is a check of its own here, which \
                 knows nothing of the others"
            );
            let suggestion = "let Envoy send only the descriptor that is meant, or make it one path with both keys";
            report.problems.push(Remark { suggestion: Some(suggestion.into()), ..self.remark(node, message) });
        }
        for (note, lines) in later.notes {
            let shown: Vec<_> = lines.iter().take(LINES_SHOWN_MAX).map(ToString::to_string).collect();
            let more = match lines.len().saturating_sub(LINES_SHOWN_MAX) {
                0 => String::new(),
                more => format!(" and {more} more"),
            };
            let message = match lines.len() {
                1 => note.to_owned(),
                _ => format!("{note} (lines {}{more})", shown.join(", ")),
            };
            report.notes.push(Remark { line: lines.first().copied(), ..self.remark_on_domain(message) });
        }
        if report.problems.is_empty() && self.nodes.iter().all(|node| node.limit.is_none()) {
            report.notes.push(self.remark_on_domain("has no limit, so no rule comes of it".into()));
        }
    }
}

impl Later {
    /// Notes the fields of a descriptor that change no verdict.
    fn note_fields(&mut self, descriptor: &Descriptor, line: u64) {
        for (given, note) in [
            (
                descriptor.detailed_metric == Some(true),
                "detailed_metric shapes metrics, which are per rule here: it is left out",
            ),
            (
                descriptor.value_to_metric == Some(true),
                "value_to_metric shapes metrics, which are per rule here: it is left out",
            ),
            (
                descriptor.metadata.is_some(),
                "metadata goes into replies of the reference, and not into those of Sluice: it is left out",
            ),
            (
                descriptor.shadow_mode == Some(true) && descriptor.rate_limit.is_none(),
                "shadow_mode without a rate_limit does nothing in the reference: it is left out",
            ),
            (
                descriptor.quota_mode == Some(true) && descriptor.rate_limit.is_none(),
                "quota_mode without a rate_limit does nothing in the reference: it is left out",
            ),
        ] {
            if given {
                self.notes.entry(note).or_default().push(line);
            }
        }
    }
}

/// So many a unit as a token bucket: all of them at once, and as many again in each unit. A unit that is longer than a
/// period may be is divided, and the requests with it, by the least number that leaves both whole. `None`: there is none.
fn token_bucket(requests: u64, unit_ms: u64) -> Option<Limit> {
    if requests > CAPACITY_MAX {
        return None;
    }
    // Long periods are of whole seconds. What divides both divides their greatest common divisor, which is small.
    let common = gcd(requests, unit_ms / 1000);
    let divisor = (unit_ms.div_ceil(PERIOD_MS_MAX)..=common).find(|&divisor| common.is_multiple_of(divisor))?;
    Some(Limit { capacity: requests, refill: requests / divisor, period_ms: unit_ms / divisor })
}

fn gcd(mut one: u64, mut other: u64) -> u64 {
    while other != 0 {
        (one, other) = (other, one % other);
    }
    one
}

/// What the YAML reader says, without its hints for programmers. Its line stands before it.
fn yaml_message(error: &serde_saphyr::Error) -> String {
    let text = error.without_snippet().to_string();
    let text = text.lines().next().unwrap_or_default();
    let text = text.strip_prefix("error: ").unwrap_or(text);
    let place = error.location().map(|at| format!("line {} column {}: ", at.line(), at.column())).unwrap_or_default();
    let text = text.strip_prefix(&place).unwrap_or(text);
    let ends = [", set DuplicateKeyPolicy", "; use from_str", " at line "];
    let end = ends.iter().filter_map(|end| text.rfind(end)).min();
    match &text[..end.unwrap_or(text.len())] {
        "invalid u32" => format!("is no whole number from 0 to {}", u32::MAX),
        text if text.starts_with("budget breached") => "is nested too deep or too large to be read".into(),
        text => text.to_owned(),
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_year_is_divided_into_periods_of_whole_seconds() {
        let year_ms = UNITS[6].1;
        let limit = |requests| token_bucket(requests, year_ms);
        let day_ms = 86_400_000;
        assert_eq!(limit(1200), Some(Limit { capacity: 1200, refill: 100, period_ms: year_ms / 12 }));
        assert_eq!(limit(1000), Some(Limit { capacity: 1000, refill: 50, period_ms: year_ms / 20 }));
        assert_eq!(limit(365), Some(Limit { capacity: 365, refill: 5, period_ms: 5 * day_ms }));
        for odd in [1, 7, 11, 13, 2_147_483_647] {
            assert_eq!(limit(odd), None, "{odd}");
        }
        assert_eq!(token_bucket(7, 30 * day_ms), Some(Limit { capacity: 7, refill: 7, period_ms: 30 * day_ms }));
        assert_eq!(token_bucket(1 << 31, 1_000), None);
    }
}
