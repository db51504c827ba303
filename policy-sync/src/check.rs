//! What a policy must satisfy beyond its syntax, for whichever way it came in: a file, the admin API, the store.
//!
//! [`check`] looks at everything and reports everything. A [`Finding`] names the rule or override by its position and
//! the field as a policy file spells it (`limit.period`, `rollout_pct`), and has no line: `file` adds that, and the
//! admin API needs none. A policy without findings compiles.
//!
//! The work is linear in the size of the policy: names and identities are compared through hash maps, and the
//! search for a similar name, which looks at every rule, ends after [`SIMILAR_NAMES_MAX`] comparisons.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    fmt,
};

use smallvec::SmallVec;

use crate::{
    model::{
        ATTRIBUTE_NAMES_MAX, ATTRIBUTES_PER_RULE_MAX, Allowance, CAPACITY_MAX, Hot, Lease, Limit, Mode, NAME_BYTES_MAX,
        OVERRIDES_MAX, OnFailure, Override, PERIOD_MS_MAX, Pattern, Policy, ROLLOUT_BP_ALL, RULES_MAX, Rule,
    },
    rate::{MILLISECOND_TICK_PERIOD_MS_MAX, Rate},
    snapshot::RULES_PER_CHECK_MAX,
};

/// The longest value of a matcher or of an override's identity, in bytes.
pub const VALUE_BYTES_MAX: usize = 4096;
/// The most parts that a bucket may be split into.
pub const SPLIT_MAX: u32 = 1024;
/// The most names that one check of a policy compares in search of similar ones; when they are spent, unknown names are
/// reported without a suggestion. At about half a microsecond each this is a twentieth of a second.
pub const SIMILAR_NAMES_MAX: usize = 100_000;

/// Something in a policy that cannot be what was meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The rule or override.
    pub item: Item,
    /// The field of it, as a policy file spells it.
    pub field: Field,
    /// What is wrong, to be read after the field's name.
    pub message: String,
    /// What to write instead.
    pub suggestion: Option<String>,
    /// The other place that makes this one wrong, such as the first rule of the same name.
    pub related: Option<(Item, Field)>,
}

/// What a finding is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Item {
    /// The policy as a whole.
    Policy,
    /// The rule at this position.
    Rule(usize),
    /// The override at this position.
    Override(usize),
}

/// The way to a field inside a rule or an override; the empty one is the whole item.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Field(SmallVec<[Step; 3]>);

/// One step of the way to a field.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// Into a table, by name.
    Key(Cow<'static, str>),
    /// Into an array, by position.
    Index(usize),
}

/// Checks a whole policy.
pub fn check(policy: &Policy) -> Vec<Finding> {
    let mut findings = Findings::default();
    check_counts(policy, &mut findings);
    let rules = RulesByName::new(policy, &mut findings);
    for (index, rule) in policy.rules.iter().enumerate() {
        check_rule(rule, Item::Rule(index), &mut findings);
    }
    check_attribute_names(policy, &mut findings);
    check_together(policy, &mut findings);
    check_overrides(policy, &rules, &mut findings);
    findings.0
}

/// A remark on overrides that were probably meant as patterns, which identities never are. Nothing is wrong with them
/// otherwise: `*` may be what a client sends.
pub fn stars_in_identities(policy: &Policy) -> Option<String> {
    let starred = |over: &&Override| over.identity.iter().any(|value| value.contains('*'));
    let first = policy.overrides.iter().find(starred)?;
    let more = match policy.overrides.iter().filter(starred).count() {
        1 => String::new(),
        count => format!(", and {} more", count - 1),
    };
    let identity = shown_list(&first.identity);
    let rule = quoted(&first.rule);
    Some(format!("override of rule {rule} for [{identity}]{more}: identity values are exact; a * is no pattern here"))
}

impl Field {
    /// The field of this name at the top of an item.
    pub fn new(name: impl Into<Cow<'static, str>>) -> Self {
        Self::default().key(name)
    }

    /// The field of this name inside.
    #[must_use]
    pub fn key(mut self, name: impl Into<Cow<'static, str>>) -> Self {
        self.0.push(Step::Key(name.into()));
        self
    }

    /// The element at this position inside.
    #[must_use]
    pub fn index(mut self, index: usize) -> Self {
        self.0.push(Step::Index(index));
        self
    }

    /// The steps from the item to the field.
    pub fn steps(&self) -> &[Step] {
        &self.0
    }

    /// This field and all that contain it, the whole item last.
    pub(crate) fn ancestors(&self) -> impl Iterator<Item = Self> {
        (0..=self.0.len()).rev().map(|length| Self(self.0[..length].into()))
    }
}

impl fmt::Display for Field {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (position, step) in self.0.iter().enumerate() {
            let dot = if position > 0 { "." } else { "" };
            match step {
                Step::Key(name) if is_bare(name) => write!(f, "{dot}{name}")?,
                Step::Key(name) => write!(f, "{dot}{}", quoted(name))?,
                Step::Index(index) => write!(f, "[{index}]")?,
            }
        }
        Ok(())
    }
}

impl fmt::Display for Item {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Policy => f.write_str("policy"),
            Self::Rule(index) => write!(f, "rule[{index}]"),
            Self::Override(index) => write!(f, "override[{index}]"),
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.item)?;
        if !self.field.0.is_empty() {
            write!(f, ".{}", self.field)?;
        }
        write!(f, ": {}", self.message)?;
        match &self.suggestion {
            Some(suggestion) => write!(f, " ({suggestion})"),
            None => Ok(()),
        }
    }
}

/// Whether TOML lets a key stand without quotes.
fn is_bare(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= NAME_BYTES_MAX
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'))
}

/// A text as messages show it: in quotes, escaped, and cut when it is long.
pub(crate) fn quoted(text: &str) -> String {
    const CHARACTERS_MAX: usize = 64;
    match text.char_indices().nth(CHARACTERS_MAX) {
        Some((end, _)) => format!("{:?}…", &text[..end]),
        None => format!("{text:?}"),
    }
}

/// The candidate that a misspelled word was probably meant to be.
pub(crate) fn nearest<'c>(word: &str, candidates: impl IntoIterator<Item = &'c str>) -> Option<&'c str> {
    if word.len() > NAME_BYTES_MAX {
        return None;
    }
    let folded = word.to_ascii_lowercase().replace('-', "_");
    let distance_max = (word.len() / 3).clamp(1, 3);
    candidates
        .into_iter()
        .filter(|candidate| candidate.len().abs_diff(word.len()) <= distance_max)
        .map(|candidate| {
            let other = candidate.to_ascii_lowercase().replace('-', "_");
            (strsim::osa_distance(&folded, &other), candidate)
        })
        .filter(|&(distance, _)| distance <= distance_max)
        .min_by_key(|&(distance, _)| distance)
        .map(|(_, candidate)| candidate)
}

/// Milliseconds as a policy file writes a duration.
pub(crate) fn written_duration(mut ms: u64) -> String {
    let mut text = String::new();
    for (unit, unit_ms) in [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1)] {
        if ms >= unit_ms {
            text.push_str(&format!("{}{unit}", ms / unit_ms));
            ms %= unit_ms;
        }
    }
    if text.is_empty() { "0s".into() } else { text }
}

/// What was found so far.
#[derive(Default)]
struct Findings(Vec<Finding>);

impl Findings {
    fn add(&mut self, item: Item, field: Field, message: impl Into<String>) -> &mut Finding {
        let at = self.0.len();
        self.0.push(Finding { item, field, message: message.into(), suggestion: None, related: None });
        &mut self.0[at]
    }
}

impl Finding {
    fn suggest(&mut self, suggestion: impl Into<String>) -> &mut Self {
        self.suggestion = Some(suggestion.into());
        self
    }

    fn relate(&mut self, item: Item, field: Field) -> &mut Self {
        self.related = Some((item, field));
        self
    }
}

fn check_counts(policy: &Policy, findings: &mut Findings) {
    let (rules, overrides) = (policy.rules.len(), policy.overrides.len());
    if rules > RULES_MAX {
        let message = format!("is one of {rules} rules; the most is {RULES_MAX}");
        findings.add(Item::Rule(RULES_MAX), Field::default(), message);
    }
    if overrides > OVERRIDES_MAX {
        let message = format!("is one of {overrides} overrides; the most is {OVERRIDES_MAX}");
        findings.add(Item::Override(OVERRIDES_MAX), Field::default(), message);
    }
}

/// The first rule of each name.
struct RulesByName<'p>(HashMap<&'p str, usize>);

impl<'p> RulesByName<'p> {
    fn new(policy: &'p Policy, findings: &mut Findings) -> Self {
        let mut names = HashMap::with_capacity(policy.rules.len());
        for (index, rule) in policy.rules.iter().enumerate() {
            let first = *names.entry(rule.name.as_str()).or_insert(index);
            if first != index {
                findings
                    .add(Item::Rule(index), Field::new("name"), "is already the name of another rule")
                    .relate(Item::Rule(first), Field::new("name"));
            }
        }
        Self(names)
    }
}

fn check_rule(rule: &Rule, item: Item, findings: &mut Findings) {
    check_rule_name(&rule.name, item, findings);
    check_matches(rule, item, findings);
    check_per(rule, item, findings);
    check_allowance(&rule.allowance, item, findings);
    if rule.rollout_bp > ROLLOUT_BP_ALL {
        findings.add(item, Field::new("rollout_pct"), "must be from 0 to 100");
    }
    check_local(rule, item, findings);
    check_hot(&rule.hot, &rule.allowance, item, findings);
}

fn check_rule_name(name: &str, item: Item, findings: &mut Findings) {
    let allowed = |character: char| character.is_ascii_alphanumeric() || matches!(character, '-' | '_' | '.');
    let field = Field::new("name");
    if name.is_empty() {
        findings.add(item, field, "must not be empty");
    } else if name.len() > NAME_BYTES_MAX {
        findings.add(item, field, format!("is {} bytes long; the most is {NAME_BYTES_MAX}", name.len()));
    } else if let Some(character) = name.chars().find(|&character| !allowed(character)) {
        let message =
            format!("has the character {character:?}; allowed are ASCII letters, digits, \"-\", \"_\" and \".\"");
        let instead: String = name.chars().map(|character| if allowed(character) { character } else { '-' }).collect();
        findings.add(item, field, message).suggest(format!("for example {instead:?}"));
    }
}

fn check_matches(rule: &Rule, item: Item, findings: &mut Findings) {
    let matches = Field::new("match");
    if rule.matches.len() > ATTRIBUTES_PER_RULE_MAX {
        let message = format!("has {} attributes; the most is {ATTRIBUTES_PER_RULE_MAX}", rule.matches.len());
        findings.add(item, matches.clone(), message);
    }
    for (name, pattern) in &rule.matches {
        let field = matches.clone().key(name.clone());
        check_attribute_name(name, item, &field, findings);
        match pattern {
            Pattern::Exact(value) => check_value(value, item, &field, findings),
            Pattern::Prefix(prefix) if prefix.is_empty() => {
                findings.add(item, field, "has an empty prefix").suggest("write \"*\" for any value");
            }
            Pattern::Prefix(prefix) => check_value(prefix, item, &field, findings),
            Pattern::Present => {}
        }
    }
    if rule.match_all && rule.matches.is_empty() && rule.per.is_empty() {
        findings
            .add(item, Field::new("match_all"), "allows no attributes at all, so the rule never applies")
            .suggest("name the attributes in match or per");
    }
}

fn check_value(value: &str, item: Item, field: &Field, findings: &mut Findings) {
    if value.len() > VALUE_BYTES_MAX {
        let message = format!("is {} bytes long; the most is {VALUE_BYTES_MAX}", value.len());
        findings.add(item, field.clone(), message);
    }
}

fn check_attribute_name(name: &str, item: Item, field: &Field, findings: &mut Findings) {
    let allowed = |character: char| matches!(character, 'a'..='z' | '0'..='9' | '_' | '-' | '.');
    if name.is_empty() {
        findings.add(item, field.clone(), "has an empty attribute name");
    } else if name.len() > NAME_BYTES_MAX {
        let message = format!("has an attribute name of {} bytes; the most is {NAME_BYTES_MAX}", name.len());
        findings.add(item, field.clone(), message);
    } else if !name.chars().all(allowed) {
        let message = format!("the attribute name {} may have only a-z, 0-9, \"_\", \"-\" and \".\"", quoted(name));
        let finding = findings.add(item, field.clone(), message);
        let lower = name.to_lowercase();
        if lower.chars().all(allowed) {
            finding.suggest(format!("write {lower:?}"));
        }
    }
}

fn check_per(rule: &Rule, item: Item, findings: &mut Findings) {
    let per = Field::new("per");
    if rule.per.len() > ATTRIBUTES_PER_RULE_MAX {
        let message = format!("has {} attributes; the most is {ATTRIBUTES_PER_RULE_MAX}", rule.per.len());
        findings.add(item, per.clone(), message);
    }
    let mut seen = HashSet::with_capacity(rule.per.len());
    for (index, name) in rule.per.iter().enumerate() {
        let field = per.clone().index(index);
        check_attribute_name(name, item, &field, findings);
        if !seen.insert(name.as_str()) {
            findings.add(item, field, format!("names {} a second time", quoted(name)));
        }
    }
}

fn check_allowance(allowance: &Allowance, item: Item, findings: &mut Findings) {
    match allowance {
        Allowance::Limit(limit) => {
            let extremes = ["write deny = true to refuse everything", "write exempt = true for no limit"];
            check_limit(*limit, item, &Field::new("limit"), extremes, findings);
        }
        Allowance::Quota(quota) => {
            findings
                .add(item, Field::new("quota"), "quota is not served yet")
                .suggest("use a limit; its period may be up to 31d");
            if quota.amount == 0 {
                findings
                    .add(item, Field::new("quota").key("amount"), "must be at least 1")
                    .suggest("write deny = true to refuse everything");
            }
        }
        Allowance::Deny | Allowance::Exempt => {}
    }
}

/// `extremes`: what to write instead of a capacity of nothing and of more than fits.
fn check_limit(limit: Limit, item: Item, field: &Field, extremes: [&str; 2], findings: &mut Findings) {
    let (capacity, refill, period) =
        (|| field.clone().key("capacity"), || field.clone().key("refill"), || field.clone().key("period"));
    if limit.capacity == 0 {
        findings.add(item, capacity(), "must be at least 1").suggest(extremes[0]);
    } else if limit.capacity > CAPACITY_MAX {
        findings.add(item, capacity(), format!("must be at most {CAPACITY_MAX}")).suggest(extremes[1]);
    }
    if limit.refill == 0 {
        findings
            .add(item, refill(), "must be at least 1")
            .suggest("a longer period makes the refill slower, and deny = true refuses everything");
    } else if limit.refill > CAPACITY_MAX {
        findings.add(item, refill(), format!("must be at most {CAPACITY_MAX}")).suggest("shorten the period instead");
    }
    if limit.period_ms == 0 {
        findings.add(item, period(), "must be at least 1ms");
    } else if limit.period_ms > PERIOD_MS_MAX {
        findings.add(item, period(), format!("must be at most {}", written_duration(PERIOD_MS_MAX)));
    } else if limit.period_ms > MILLISECOND_TICK_PERIOD_MS_MAX && !limit.period_ms.is_multiple_of(1000) {
        let whole = written_duration(limit.period_ms - limit.period_ms % 1000);
        findings
            .add(
                item,
                period(),
                format!(
                    "must be a whole number of seconds beyond {MILLISECOND_TICK_PERIOD_MS_MAX}ms (about 4.6 hours)"
                ),
            )
            .suggest(format!("for example {whole:?}"));
    }
}

fn has_bucket(allowance: &Allowance) -> bool {
    !matches!(allowance, Allowance::Deny | Allowance::Exempt)
}

fn check_local(rule: &Rule, item: Item, findings: &mut Findings) {
    let Some(local) = rule.local else {
        return;
    };
    let field = Field::new("local");
    if rule.on_failure != OnFailure::Local {
        findings
            .add(item, field.clone(), "acts only with on_failure = \"local\"")
            .suggest("remove it, or write on_failure = \"local\"")
            .relate(item, Field::new("on_failure"));
    } else if !has_bucket(&rule.allowance) {
        findings
            .add(item, field.clone(), "has no meaning in a rule that asks no store (deny or exempt)")
            .suggest("remove it");
    }
    let extremes =
        ["on_failure = \"closed\" answers unavailable meanwhile", "on_failure = \"open\" allows everything meanwhile"];
    check_limit(local, item, &field, extremes, findings);
}

fn check_hot(hot: &Hot, allowance: &Allowance, item: Item, findings: &mut Findings) {
    let field = Field::new("hot");
    if !has_bucket(allowance) {
        if *hot != Hot::default() {
            let whose = if matches!(item, Item::Override(_)) { "an override" } else { "a rule" };
            let message = format!("has no meaning in {whose} without a bucket (deny or exempt)");
            findings.add(item, field, message).suggest("remove it");
        }
        return;
    }
    if let Some(split) = hot.split
        && !(2..=SPLIT_MAX).contains(&split)
    {
        findings
            .add(item, field.clone().key("split"), format!("must be from 2 to {SPLIT_MAX}"))
            .suggest("leave it out for one bucket");
    }
    if let Some(0 | 1) = hot.sample {
        findings
            .add(item, field.clone().key("sample"), "must be at least 2")
            .suggest("leave it out to ask every check");
    }
    if hot.lease == Lease::Batch(0) {
        findings.add(item, field.key("lease"), "must be at least 1").suggest("write lease = \"off\" for none");
    }
    check_hot_fits(hot, allowance, item, findings);
    check_hot_combination(hot, item, findings);
}

/// Each way to meet hot keys takes tokens in pieces that the capacity must have, and that must come back in time.
fn check_hot_fits(hot: &Hot, allowance: &Allowance, item: Item, findings: &mut Findings) {
    let Allowance::Limit(limit) = *allowance else {
        return;
    };
    let capacity = limit.capacity;
    let relate = || (item, Field::new("limit").key("capacity"));
    let mut fits = true;
    for (name, piece, what) in pieces(hot) {
        // A capacity of 0 and a split that is too large have their own findings.
        let known = capacity == 0 || (name == "split" && piece > SPLIT_MAX);
        if u64::from(piece) > capacity {
            fits = false;
            if !known {
                let message = format!("{what} {piece}, which a capacity of {capacity} does not have");
                findings.add(item, Field::new("hot").key(name), message).related = Some(relate());
            }
        }
    }
    // Of a limit that is wrong itself nothing can be said.
    if let (Some(split @ 2..=SPLIT_MAX), true, Ok(rate)) = (hot.split, fits, Rate::new(limit))
        && rate.part(0, split).is_none()
    {
        let message = format!("a part would wait for its refill longer than {}", written_duration(PERIOD_MS_MAX));
        findings.add(item, Field::new("hot").key("split"), message).related =
            Some((item, Field::new("limit").key("refill")));
    }
}

/// How many tokens each setting of `hot` needs at least: its name, the number, and what it does with them.
fn pieces(hot: &Hot) -> impl Iterator<Item = (&'static str, u32, &'static str)> {
    let batch = match hot.lease {
        Lease::Batch(tokens) => Some(tokens),
        Lease::Auto | Lease::Off => None,
    };
    [
        ("split", hot.split, "needs a token for each part, so at least"),
        ("sample", hot.sample, "asks at this many times the cost, so for at least"),
        ("lease", batch, "takes batches of"),
    ]
    .into_iter()
    .filter_map(|(name, piece, what)| piece.map(|piece| (name, piece, what)))
}

fn check_hot_combination(hot: &Hot, item: Item, findings: &mut Findings) {
    let batch = matches!(hot.lease, Lease::Batch(_));
    let conflicts = [
        (batch && hot.split.is_some(), "lease", "split", "a batch comes out of one bucket, and split makes several"),
        (
            batch && hot.sample.is_some(),
            "lease",
            "sample",
            "what a batch answers is never asked, so nothing is left to sample",
        ),
        (
            hot.split.is_some() && hot.sample.is_some(),
            "sample",
            "split",
            "both give up exactness, and together nobody can say how much",
        ),
    ];
    for (_, one, other, why) in conflicts.into_iter().filter(|&(conflict, ..)| conflict) {
        findings
            .add(item, Field::new("hot").key(one), format!("excludes hot.{other}: {why}"))
            .suggest("keep one of them")
            .relate(item, Field::new("hot").key(other));
    }
}

/// Rules that have the same conditions always apply together, so there may not be more of them than may apply to a check.
fn check_together(policy: &Policy, findings: &mut Findings) {
    let mut alike: BTreeMap<_, Vec<usize>> = BTreeMap::new();
    for (index, rule) in policy.rules.iter().enumerate() {
        if rule.mode != Mode::Off && rule.rollout_bp == ROLLOUT_BP_ALL {
            let per: BTreeSet<&String> = rule.per.iter().collect();
            let matches: Vec<_> = rule.matches.iter().map(|(name, pattern)| (name, format!("{pattern:?}"))).collect();
            alike.entry((matches, rule.match_all, per)).or_default().push(index);
        }
    }
    for rules in alike.values().filter(|rules| rules.len() > RULES_PER_CHECK_MAX) {
        let message = format!(
            "has the same conditions as {} others; a check to which more than {RULES_PER_CHECK_MAX} rules apply is an error",
            rules.len() - 1
        );
        let (first, over) = (Item::Rule(rules[0]), Item::Rule(rules[RULES_PER_CHECK_MAX]));
        findings.add(over, Field::default(), message).relate(first, Field::default());
    }
}

fn check_attribute_names(policy: &Policy, findings: &mut Findings) {
    let mut names = HashSet::new();
    for (index, rule) in policy.rules.iter().enumerate() {
        names.extend(rule.matches.keys().chain(&rule.per).map(String::as_str));
        if names.len() > ATTRIBUTE_NAMES_MAX {
            let message = format!(
                "brings the attribute names of the policy to {}; the most is {ATTRIBUTE_NAMES_MAX}",
                names.len()
            );
            findings.add(Item::Rule(index), Field::default(), message);
            return;
        }
    }
}

fn check_overrides(policy: &Policy, rules: &RulesByName<'_>, findings: &mut Findings) {
    let shapes = Shapes::new(policy);
    let mut seen = HashMap::with_capacity(policy.overrides.len());
    let mut comparisons_left = SIMILAR_NAMES_MAX;
    for (index, over) in policy.overrides.iter().enumerate() {
        let item = Item::Override(index);
        let first = *seen.entry((over.rule.as_str(), over.identity.as_slice())).or_insert(index);
        if first != index {
            findings
                .add(item, Field::new("identity"), "has an override of the same rule already")
                .relate(Item::Override(first), Field::new("identity"));
        }
        for (position, value) in over.identity.iter().enumerate() {
            check_value(value, item, &Field::new("identity").index(position), findings);
        }
        check_allowance(&over.allowance, item, findings);
        if let Some(hot) = &over.hot {
            check_hot(hot, &over.allowance, item, findings);
        }
        if over.rule == "*" {
            check_star(over, item, &shapes, findings);
        } else if let Some(&rule) = rules.0.get(over.rule.as_str()) {
            check_override_of(over, item, &policy.rules[rule], Item::Rule(rule), findings);
        } else {
            let finding = findings.add(item, Field::new("rule"), format!("there is no rule {}", quoted(&over.rule)));
            if let Some(left) = comparisons_left.checked_sub(policy.rules.len()) {
                comparisons_left = left;
                let names = policy.rules.iter().map(|rule| rule.name.as_str());
                if let Some(name) = nearest(&over.rule, names) {
                    finding.suggest(format!("did you mean {name:?}?"));
                }
            }
        }
    }
}

/// For each number of `per` attributes that rules have, the rule whose `hot` needs most tokens.
struct Shapes(BTreeMap<usize, (u32, usize)>);

impl Shapes {
    fn new(policy: &Policy) -> Self {
        let mut shapes = BTreeMap::new();
        for (index, rule) in policy.rules.iter().enumerate() {
            let need = pieces(&rule.hot).map(|(_, piece, _)| piece).max().unwrap_or(0);
            let most = shapes.entry(rule.per.len()).or_insert((need, index));
            if need > most.0 {
                *most = (need, index);
            }
        }
        Self(shapes)
    }
}

fn check_star(over: &Override, item: Item, shapes: &Shapes, findings: &mut Findings) {
    let count = over.identity.len();
    match shapes.0.get(&count) {
        Some(&(need, rule)) => check_override_fits(over, item, need, Item::Rule(rule), findings),
        None => {
            let message = format!("has {}, and no rule has that many attributes in per", values(count));
            findings.add(item, Field::new("identity"), message).relate(item, Field::new("rule"));
        }
    }
}

fn check_override_of(over: &Override, item: Item, rule: &Rule, rule_item: Item, findings: &mut Findings) {
    if over.identity.len() != rule.per.len() {
        let (given, wanted) = (values(over.identity.len()), rule.per.len());
        let message = format!("has {given}; the rule's per has {wanted}: [{}]", shown_list(&rule.per));
        findings.add(item, Field::new("identity"), message).relate(rule_item, Field::new("per"));
    }
    let need = pieces(&rule.hot).map(|(_, piece, _)| piece).max().unwrap_or(0);
    check_override_fits(over, item, need, rule_item, findings);
}

fn check_override_fits(over: &Override, item: Item, need: u32, rule_item: Item, findings: &mut Findings) {
    if let Allowance::Limit(Limit { capacity, .. }) = over.allowance
        && over.hot.is_none()
        && (1..u64::from(need)).contains(&capacity)
    {
        findings
            .add(item, Field::new("limit").key("capacity"), format!("must be at least {need} for the hot of its rule"))
            .relate(rule_item, Field::new("hot"));
    }
}

fn values(count: usize) -> String {
    format!("{count} value{}", if count == 1 { "" } else { "s" })
}

fn shown_list(names: &[String]) -> String {
    let shown: Vec<String> = names.iter().take(ATTRIBUTES_PER_RULE_MAX).map(|name| quoted(name)).collect();
    shown.join(", ")
}
