//! The asker against a store in memory that answers when the test lets it, exactly as the script would.

use std::collections::{HashMap, VecDeque};

use policy_sync::{file, snapshot::Attributes};
use proptest::prelude::*;

use super::*;
use crate::{
    buckets::BucketTable,
    decision::NEVER,
    hot::HotSettings,
    policy::{LoadedPolicy, RuleSlots},
};

const POLICY: &str = r#"
[[rule]]
name = "per-key"
match = { path = "*" }
per = ["key"]
limit = { capacity = 10, refill = 10, period = "1m" }
local = { capacity = 2, refill = 2, period = "1m" }
[[rule]]
name = "per-ip"
match = { ip = "*" }
per = ["ip"]
limit = { capacity = 5, refill = 5, period = "1m" }
on_failure = "closed"
[[rule]]
name = "open"
match = { open = "*" }
per = ["open"]
limit = { capacity = 3, refill = 3, period = "1m" }
on_failure = "open"
[[rule]]
name = "watched"
match = { watched = "*" }
per = ["watched"]
mode = "shadow"
limit = { capacity = 1, refill = 1, period = "1m" }
[[rule]]
name = "per-user"
match = { user = "*" }
per = ["user"]
limit = { capacity = 10, refill = 10, period = "1m" }
local = { capacity = 1, refill = 1, period = "1m" }
"#;

/// A call that was sent and not answered yet.
struct Sent {
    token: u64,
    take: TakeMode,
    cost: u32,
    /// Key and capacity.
    buckets: Vec<(String, u32)>,
    rates: Vec<Rate>,
    at_us: u64,
}

/// The store: buckets that never refill, so that every token can be accounted for.
struct Fake {
    shard: Option<ShardId>,
    levels: HashMap<String, u32>,
    sent: VecDeque<Sent>,
    refuses: Option<Why>,
    now_us: u64,
}

impl Calls for Fake {
    fn slot(&self, tag: &[u8]) -> u16 {
        tag.len() as u16
    }

    fn shard(&mut self, _: u16) -> Option<ShardId> {
        self.shard
    }

    fn send(&mut self, token: u64, call: &Call<'_>) -> Result<(), Why> {
        if let Some(why) = self.refuses {
            return Err(why);
        }
        let mut from = 0;
        let keys = call.buckets.iter().map(|bucket| {
            let key = String::from_utf8(call.keys[from..bucket.key_end as usize].to_vec()).unwrap();
            from = bucket.key_end as usize;
            (key, bucket.rate.capacity)
        });
        let buckets = keys.collect();
        let rates = call.buckets.iter().map(|bucket| bucket.rate).collect();
        self.sent.push_back(Sent { token, take: call.take, cost: call.cost, buckets, rates, at_us: self.now_us });
        Ok(())
    }
}

impl Fake {
    /// Carries out the oldest call, as `lua/token_bucket.lua` does.
    fn answer(&mut self) -> (u64, u64, Vec<i64>) {
        let sent = self.sent.pop_front().expect("a call was sent");
        let levels: Vec<u32> =
            sent.buckets.iter().map(|(key, capacity)| *self.levels.get(key).unwrap_or(capacity)).collect();
        let least = levels.iter().copied().min().unwrap();
        let granted = match sent.take {
            TakeMode::Exactly if least >= sent.cost => sent.cost,
            TakeMode::Exactly => 0,
            TakeMode::UpTo => sent.cost.min(least),
            TakeMode::Back => 0,
        };
        let mut integers = Vec::new();
        for (((key, capacity), level), rate) in sent.buckets.iter().zip(levels).zip(&sent.rates) {
            let after = if sent.take == TakeMode::Back { (level + sent.cost).min(*capacity) } else { level - granted };
            self.levels.insert(key.clone(), after);
            let until = |tokens: u32| {
                let units = u64::from(tokens.saturating_sub(after)) * u64::from(rate.period_ms);
                units.div_ceil(u64::from(rate.refill)).cast_signed()
            };
            let retry = if level >= sent.cost { 0 } else { until(sent.cost) };
            integers.extend([i64::from(granted), i64::from(after), retry, until(*capacity)]);
        }
        (sent.token, sent.at_us, integers)
    }
}

/// A store, and everything around it.
struct Rig {
    store: Store,
    fake: Fake,
    shards: Arc<Shards>,
    policy: Arc<LoadedPolicy>,
    table: BucketTable,
    table_counts: TableCounts,
    counters: Arc<CoreCounters>,
    now_us: u64,
}

impl Rig {
    fn new() -> Self {
        Self::with(|_| {})
    }

    fn with(change: impl FnOnce(&mut StoreSettings)) -> Self {
        Self::under(POLICY, change)
    }

    /// One rule per key with a capacity of 100, whose hot keys are met like this.
    fn meeting(hot: &str) -> Self {
        let rule = "name = \"r\"\nper = [\"key\"]\nlimit = { capacity = 100, refill = 100, period = \"1h\" }";
        Self::under(&format!("[[rule]]\n{rule}\nhot = {{ {hot} }}\n"), |_| {})
    }

    fn under(policy: &str, change: impl FnOnce(&mut StoreSettings)) -> Self {
        let mut settings = StoreSettings {
            deadline_us: 5_000,
            waiting_max: 64,
            breaker: breaker::BreakerSettings { calls_min: 4, ..Default::default() },
            throttle_on_failure: OnFailure::Local,
            local: LocalTerms::default(),
            leases: LeaseTerms { share: 0.1, quiet_us: 1_000_000 },
        };
        change(&mut settings);
        let policy = file::parse(policy, "test").unwrap();
        let (policy, _) = LoadedPolicy::load(policy, 1, settings.local, &mut RuleSlots::new(8)).unwrap();
        let (policy, shards) = (
            Arc::new(policy),
            Arc::new(Shards::new(2, 1, &HotSettings { rejections: 64, leases: 8, ..HotSettings::default() })),
        );
        Self {
            store: Store::new(settings, Arc::clone(&shards), &policy, 1, Chance::new(1)),
            fake: Fake {
                shard: shards.number("a:1"),
                levels: HashMap::new(),
                sent: VecDeque::new(),
                refuses: None,
                now_us: 0,
            },
            shards,
            policy,
            table: BucketTable::new(1_000),
            table_counts: TableCounts::default(),
            counters: CoreCounters::new(8),
            now_us: 1_000_000,
        }
    }

    fn parts(&mut self) -> (&mut Store, &mut Fake, Surroundings<'_>) {
        let around = Surroundings {
            table: &self.table,
            table_counts: &mut self.table_counts,
            counters: &self.counters,
            now_ms: self.now_us / 1000,
            now_us: self.now_us,
            heat: None,
            book: None,
        };
        self.fake.now_us = self.now_us;
        (&mut self.store, &mut self.fake, around)
    }

    fn ask_for(&mut self, cost: u32, words: &[(&str, &str)]) -> Asked {
        let policy = Arc::clone(&self.policy);
        let mut attributes = Attributes::default();
        for (name, value) in words {
            attributes.push(&policy.snapshot, name.as_bytes(), value.as_bytes()).unwrap();
        }
        let mut applied = Vec::new();
        policy.snapshot.applying(&attributes, 0, &mut Vec::new(), &mut applied).unwrap();
        let question = Question { conn: ConnId(0), cost, now_us: self.now_us, is_sampled: false, is_together: false };
        let (store, fake, mut around) = self.parts();
        store.ask(&mut around, fake, question, &applied, &attributes)
    }

    fn ask(&mut self, words: &[(&str, &str)]) -> CheckId {
        match self.ask_for(1, words) {
            Asked::Later(check) => check,
            Asked::Now(verdict) => panic!("decided at once: {verdict:?}"),
        }
    }

    fn flush(&mut self) {
        let (store, fake, mut around) = self.parts();
        store.flush(&mut around, fake);
    }

    /// Answers the oldest call.
    fn answer(&mut self) {
        let (token, sent_at_us, integers) = self.fake.answer();
        let (store, fake, mut around) = self.parts();
        store.completed(&mut around, token, (fake.shard, sent_at_us), Ok(&integers));
    }

    fn fail(&mut self, why: Why) {
        let sent = self.fake.sent.pop_front().expect("a call was sent");
        let (store, fake, mut around) = self.parts();
        store.completed(&mut around, sent.token, (fake.shard, 0), Err((why, true)));
    }

    fn wait(&mut self, us: u64) {
        self.now_us += us;
        let now_us = self.now_us;
        let (store, _, mut around) = self.parts();
        store.expire(&mut around, now_us);
    }

    fn verdict(&mut self, check: CheckId) -> Option<Verdict> {
        self.store.verdict(check).map(|(verdict, _)| verdict)
    }

    /// The answers and what remains, of checks that must be decided; each is read once.
    fn read(&mut self, checks: &[CheckId]) -> Vec<(Answer, i64)> {
        let read = |check: &CheckId| {
            let verdict = self.store.verdict(*check).expect("it is decided").0;
            self.store.release(*check);
            (verdict.answer, verdict.remaining)
        };
        checks.iter().map(read).collect()
    }

    fn level(&self, key: &str) -> Option<u32> {
        self.fake.levels.get(key).copied()
    }

    fn rule(&self, index: usize, reason: Reason) -> u64 {
        self.counters.rule(self.policy.cards[index].slot, reason).value()
    }

    fn by(&self, index: usize, by: By) -> u64 {
        self.counters.decided_by(self.policy.cards[index].slot, by).value()
    }

    /// Nothing is left in any table.
    fn assert_empty(&mut self) {
        while self.store.next_decided().is_some() {}
        let tables = &self.store.tables;
        assert_eq!((tables.checks.used(), tables.parts.used(), tables.groups.used()), (0, 0, 0));
    }
}

const KEY: &[(&str, &str)] = &[("path", "/"), ("key", "a")];
const BOTH: &[(&str, &str)] = &[("path", "/"), ("key", "a"), ("ip", "1")];

#[test]
fn checks_of_one_wake_up_leave_as_one_call_and_are_dealt_in_order() {
    let mut rig = Rig::new();
    let checks: Vec<_> = (0..12).map(|_| rig.ask(KEY)).collect();
    rig.flush();
    assert_eq!(rig.fake.sent.len(), 1);
    assert_eq!((rig.fake.sent[0].take, rig.fake.sent[0].cost), (TakeMode::UpTo, 10), "no more than the capacity");
    assert_eq!(rig.fake.sent[0].buckets[0].0, "rl:{key=a}:per-key");
    rig.answer();
    let seen = rig.read(&checks);
    let expected: Vec<_> = (0..10).rev().map(|left| (Answer::Allow, left)).chain([(Answer::Deny, 0); 2]).collect();
    assert_eq!(seen, expected);
    assert_eq!((rig.rule(0, Reason::Allowed), rig.rule(0, Reason::Denied), rig.by(0, By::Redis)), (10, 2, 12));
    rig.assert_empty();
}

#[test]
fn those_that_come_while_a_call_is_in_flight_leave_as_the_next() {
    let mut rig = Rig::new();
    let first = rig.ask(KEY);
    rig.flush();
    let others = [rig.ask(KEY), rig.ask(KEY)];
    rig.flush();
    assert_eq!(rig.fake.sent.len(), 1, "one call at a time for the same buckets");
    assert_eq!((rig.fake.sent[0].take, rig.fake.sent[0].cost), (TakeMode::Exactly, 1));
    rig.answer();
    rig.flush();
    assert_eq!((rig.fake.sent.len(), rig.fake.sent[0].cost), (1, 2));
    rig.answer();
    assert_eq!(rig.read(&[first]), [(Answer::Allow, 9)]);
    assert_eq!(rig.read(&others), [(Answer::Allow, 8), (Answer::Allow, 7)]);
    rig.assert_empty();
}

#[test]
fn what_of_a_grant_fits_nobody_goes_back() {
    let mut rig = Rig::new();
    rig.fake.levels.insert("rl:{key=a}:per-key".into(), 5);
    let checks: Vec<_> = [3, 4, 1]
        .map(|cost| match rig.ask_for(cost, KEY) {
            Asked::Later(check) => check,
            Asked::Now(_) => panic!("it has to wait"),
        })
        .into();
    rig.flush();
    rig.answer();
    assert_eq!(rig.read(&checks), [(Answer::Allow, 2), (Answer::Deny, 2), (Answer::Allow, 1)]);
    rig.flush();
    assert_eq!((rig.fake.sent[0].take, rig.fake.sent[0].cost), (TakeMode::Back, 1));
    rig.fake.answer();
    assert_eq!(rig.level("rl:{key=a}:per-key"), Some(1));
    rig.assert_empty();
}

#[test]
fn identities_are_asked_in_parallel_and_a_denied_check_takes_nothing() {
    let mut rig = Rig::new();
    rig.fake.levels.insert("rl:{ip=1}:per-ip".into(), 0);
    let check = rig.ask(BOTH);
    rig.flush();
    assert_eq!(rig.fake.sent.len(), 2);
    rig.answer();
    rig.answer();
    let verdict = rig.verdict(check).unwrap();
    assert_eq!((verdict.answer, verdict.rule), (Answer::Deny, Some(1)));
    rig.flush();
    while !rig.fake.sent.is_empty() {
        rig.fake.answer();
    }
    assert_eq!((rig.level("rl:{key=a}:per-key"), rig.level("rl:{ip=1}:per-ip")), (Some(10), Some(0)));
    assert_eq!((rig.rule(0, Reason::Allowed), rig.rule(1, Reason::Denied)), (0, 1));
    rig.store.release(check);
    rig.assert_empty();
}

#[test]
fn a_bucket_that_is_known_to_be_empty_is_not_asked() {
    let mut rig = Rig::new();
    let checks: [CheckId; 10] = std::array::from_fn(|_| rig.ask(KEY));
    rig.flush();
    rig.answer();
    assert!(checks.iter().all(|check| rig.verdict(*check).unwrap().answer == Answer::Allow));
    // Ten of ten are gone, a token comes each 6 s.
    let Asked::Now(said) = rig.ask_for(1, KEY) else { panic!("it is known") };
    assert_eq!((said.answer, said.limit, said.remaining, said.rule), (Answer::Deny, 10, 0, Some(0)));
    assert_eq!((said.retry_after_ms, said.reset_after_ms), (6_000, 60_000));
    // With it fall the rules that would have been asked, and nothing is taken from them.
    assert!(matches!(rig.ask_for(1, BOTH), Asked::Now(Verdict { answer: Answer::Deny, rule: Some(0), .. })));
    assert!(matches!(rig.ask_for(0, KEY), Asked::Later(_)), "who only looks is told by Redis");
    assert!(matches!(rig.ask_for(11, KEY), Asked::Later(_)), "and so is who can never pass");
    assert_eq!((rig.rule(0, Reason::Denied), rig.by(0, By::Rejection)), (2, 2));
    rig.now_us += 6_000_000;
    assert!(matches!(rig.ask_for(2, KEY), Asked::Now(_)));
    assert!(matches!(rig.ask_for(1, KEY), Asked::Later(_)), "there may be one now");
}

#[test]
fn a_bucket_that_something_is_given_back_to_is_asked_again() {
    let mut rig = Rig::new();
    const IP: &[(&str, &str)] = &[("ip", "1")];
    rig.fake.levels.insert("rl:{ip=1}:per-ip".into(), 1);
    rig.fake.levels.insert("rl:{key=a}:per-key".into(), 0);
    let check = rig.ask(BOTH);
    rig.flush();
    // That of the address first.
    (0..2).for_each(|_| rig.answer());
    assert_eq!(rig.verdict(check).unwrap().rule, Some(0));
    assert!(matches!(rig.ask_for(1, IP), Asked::Now(_)), "its last token went to the check that is denied");
    rig.now_us += 10;
    rig.flush();
    assert!(matches!(rig.ask_for(1, IP), Asked::Later(_)), "and comes back");
    assert!(matches!(rig.ask_for(1, KEY), Asked::Now(_)));
}

#[test]
fn a_shadow_rule_whose_bucket_is_empty_records_it_without_a_call() {
    let mut rig = Rig::new();
    for _ in 0..3 {
        rig.ask_for(1, &[("watched", "1")]);
        rig.flush();
        while !rig.fake.sent.is_empty() {
            rig.answer();
        }
    }
    assert_eq!((rig.rule(3, Reason::ShadowAllowed), rig.rule(3, Reason::ShadowDenied)), (1, 2));
    assert_eq!(rig.by(3, By::Rejection), 0, "it decides nothing");
}

const R: &[(&str, &str)] = &[("key", "a")];

/// Asks, and lets the store answer all there is. Returns the answer.
fn decide(rig: &mut Rig, words: &[(&str, &str)]) -> Verdict {
    let asked = rig.ask_for(1, words);
    rig.flush();
    while !rig.fake.sent.is_empty() {
        rig.answer();
    }
    rig.flush();
    match asked {
        Asked::Now(verdict) => verdict,
        Asked::Later(check) => {
            let verdict = rig.verdict(check).expect("all calls are answered");
            rig.store.release(check);
            verdict
        }
    }
}

#[test]
fn a_deny_of_much_does_not_deny_the_little_that_is_there() {
    // Four tokens a millisecond, and the store speaks of whole milliseconds.
    let limit = "limit = { capacity = 3, refill = 400, period = \"100ms\" }";
    let mut rig = Rig::under(&format!("[[rule]]\nname = \"r\"\nper = [\"key\"]\n{limit}\n"), |_| {});
    rig.fake.levels.insert("rl:{key=a}:r".into(), 1);
    let Asked::Later(check) = rig.ask_for(3, R) else { panic!("nothing is known yet") };
    rig.flush();
    rig.answer();
    assert_eq!(rig.verdict(check).unwrap().answer, Answer::Deny);
    assert!(matches!(rig.ask_for(3, R), Asked::Now(said) if said.answer == Answer::Deny), "that is known");
    assert!(matches!(rig.ask_for(1, R), Asked::Later(_)), "the one token that is there is not");
}

#[test]
fn a_lease_is_taken_with_the_first_call_and_spent_without_any() {
    let mut rig = Rig::meeting("lease = 20");
    assert_eq!(decide(&mut rig, R).answer, Answer::Allow);
    assert_eq!(rig.level("rl:{key=a}:r"), Some(79), "one for the check, twenty in advance");
    for spent in 1..=9 {
        let Asked::Now(said) = rig.ask_for(1, R) else { panic!("it is paid from the lease") };
        assert_eq!((said.answer, said.limit, said.remaining), (Answer::Allow, 100, 99 - spent));
    }
    rig.flush();
    assert!(rig.fake.sent.is_empty());
    // The tenth leaves half a batch, and asks for the next one; the eleventh does not wait for it.
    assert!(matches!(rig.ask_for(1, R), Asked::Now(_)) && matches!(rig.ask_for(1, R), Asked::Now(_)));
    rig.flush();
    assert_eq!((rig.fake.sent.len(), rig.fake.sent[0].take, rig.fake.sent[0].cost), (1, TakeMode::UpTo, 20));
    rig.answer();
    assert_eq!(rig.level("rl:{key=a}:r"), Some(59));
    assert_eq!((rig.rule(0, Reason::Allowed), rig.by(0, By::Redis), rig.by(0, By::Lease)), (12, 1, 11));
}

#[test]
fn leases_never_admit_more_than_the_limit_and_find_its_end() {
    let mut rig = Rig::meeting("lease = 20");
    let answers: Vec<_> = (0..300).map(|_| decide(&mut rig, R).answer).collect();
    assert_eq!(answers.iter().filter(|answer| **answer == Answer::Allow).count(), 100);
    assert_eq!(answers[..100], [Answer::Allow; 100], "nobody is denied before");
    assert_eq!(rig.level("rl:{key=a}:r"), Some(0));
}

#[test]
fn a_lease_is_spent_to_its_end_where_others_have_emptied_the_bucket() {
    let mut rig = Rig::meeting("lease = 20");
    decide(&mut rig, R);
    rig.fake.levels.insert("rl:{key=a}:r".into(), 0);
    // Half way it asks for the next batch, and hears that there is none.
    let answers: Vec<_> = (0..30)
        .map(|_| {
            rig.now_us += 1_000;
            decide(&mut rig, R).answer
        })
        .collect();
    assert_eq!(answers.iter().filter(|answer| **answer == Answer::Allow).count(), 20);
    assert_eq!(answers[..20], [Answer::Allow; 20]);
    assert!(rig.by(0, By::Rejection) > 0, "then the bucket is known to be empty");
}

#[test]
fn what_is_left_of_a_lease_goes_back_when_its_key_is_quiet() {
    let mut rig = Rig::meeting("lease = 20");
    decide(&mut rig, R);
    rig.now_us += 900_000;
    assert!(matches!(rig.ask_for(5, R), Asked::Now(_)));
    rig.flush();
    rig.now_us += 900_000;
    rig.flush();
    assert!(rig.fake.sent.is_empty(), "it was used a moment ago");
    rig.now_us += 200_000;
    rig.flush();
    assert_eq!((rig.fake.sent[0].take, rig.fake.sent[0].cost), (TakeMode::Back, 15));
    rig.fake.answer();
    assert_eq!(rig.level("rl:{key=a}:r"), Some(94));
    rig.assert_empty();
    assert!(matches!(rig.ask_for(1, R), Asked::Later(_)), "the next check takes a new one");
}

#[test]
fn leases_go_back_when_the_server_leaves_and_when_the_policy_changes() {
    for change in [
        |rig: &mut Rig| rig.store.give_back_leases(),
        |rig: &mut Rig| {
            let policy = Arc::clone(&rig.policy);
            rig.store.adopt(&policy, 2);
        },
    ] {
        let mut rig = Rig::meeting("lease = 20");
        decide(&mut rig, R);
        change(&mut rig);
        rig.flush();
        assert_eq!((rig.fake.sent[0].take, rig.fake.sent[0].cost), (TakeMode::Back, 20));
        rig.fake.answer();
        assert_eq!(rig.level("rl:{key=a}:r"), Some(99));
        rig.assert_empty();
    }
}

#[test]
fn a_check_that_another_rule_denies_takes_nothing_from_a_lease() {
    let rule = |name: &str, per: &str, capacity: u32, hot: &str| {
        format!(
            "[[rule]]\nname = \"{name}\"\nper = [\"{per}\"]\n\
             limit = {{ capacity = {capacity}, refill = 1, period = \"1h\" }}\nhot = {{ {hot} }}\n"
        )
    };
    let policy = rule("leased", "key", 100, "lease = 20") + &rule("asked", "ip", 3, "lease = \"off\"");
    let mut rig = Rig::under(&policy, |_| {});
    let both = &[("key", "a"), ("ip", "1")];
    let answers: Vec<_> = (0..6).map(|_| decide(&mut rig, both).answer).collect();
    assert_eq!(answers.iter().filter(|answer| **answer == Answer::Allow).count(), 3);
    rig.store.give_back_leases();
    rig.flush();
    while !rig.fake.sent.is_empty() {
        rig.fake.answer();
    }
    assert_eq!(rig.level("rl:{key=a}:leased"), Some(97), "three were taken, whoever paid");
    rig.assert_empty();
}

#[test]
fn a_batch_that_does_not_come_is_asked_for_again() {
    let mut rig = Rig::meeting("lease = 20");
    let check = rig.ask(R);
    rig.flush();
    rig.fail(Why::Down);
    assert_eq!(rig.verdict(check).unwrap().answer, Answer::Allow, "by the local bucket");
    rig.store.release(check);
    let check = rig.ask(R);
    rig.flush();
    assert_eq!(rig.fake.sent[0].cost, 1, "not at once");
    rig.answer();
    rig.store.release(check);
    rig.now_us += 50_000;
    decide(&mut rig, R);
    assert_eq!(rig.level("rl:{key=a}:r"), Some(78));
}

#[test]
fn a_split_bucket_has_its_parts_on_their_own_slots() {
    let mut rig = Rig::meeting("split = 10");
    let answers: Vec<_> = (0..400).map(|_| decide(&mut rig, R).answer).collect();
    assert_eq!(answers.iter().filter(|answer| **answer == Answer::Allow).count(), 100, "together the whole limit");
    let first = answers.iter().position(|answer| *answer == Answer::Deny).unwrap();
    assert!((20..100).contains(&first), "some are denied before: the first after {first}");
    let parts: Vec<_> = rig.fake.levels.iter().filter(|(key, _)| key.starts_with("rl:{key=a#")).collect();
    assert_eq!((parts.len(), parts.iter().filter(|(_, level)| **level == 0).count()), (10, 10));
}

#[test]
fn one_check_in_n_is_asked_for_all_of_them() {
    let mut rig = Rig::meeting("sample = 5");
    let mut calls = 0;
    let mut allowed = 0;
    for _ in 0..1_000 {
        let asked = rig.ask_for(1, R);
        rig.flush();
        calls += rig.fake.sent.len();
        assert!(rig.fake.sent.iter().all(|sent| sent.cost == 5));
        while !rig.fake.sent.is_empty() {
            rig.answer();
        }
        let said = match asked {
            Asked::Now(verdict) => verdict,
            Asked::Later(check) => {
                let verdict = rig.verdict(check).unwrap();
                rig.store.release(check);
                verdict
            }
        };
        allowed += u32::from(said.answer == Answer::Allow);
    }
    // Twenty calls take all; what passes without one is about four times as much, and after the last nothing does.
    assert_eq!(calls, 20);
    assert!((50..=200).contains(&allowed), "{allowed} of a limit of 100");
    assert_eq!(rig.by(0, By::Redis), 20);
    assert!(rig.by(0, By::Rejection) > 700 && rig.by(0, By::Sample) > 30);
    rig.assert_empty();
}

#[test]
fn no_reply_by_the_deadline_and_the_failure_policies_answer() {
    let mut rig = Rig::new();
    let checks = [rig.ask(KEY), rig.ask(&[("path", "/"), ("key", "b")]), rig.ask(&[("open", "1")]), rig.ask(BOTH)];
    rig.flush();
    rig.wait(4_999);
    assert_eq!(rig.verdict(checks[0]), None, "there is time left");
    rig.wait(1);
    let seen: Vec<_> = checks.iter().map(|check| rig.verdict(*check).unwrap()).collect();
    assert_eq!(
        seen.iter().map(|verdict| verdict.answer).collect::<Vec<_>>(),
        [Answer::Allow, Answer::Allow, Answer::Allow, Answer::Unavailable]
    );
    assert_eq!((seen[0].limit, seen[0].remaining), (2, 1), "the rule's own local limit");
    assert_eq!(seen[3].rule, Some(1), "who is closed says so");
    let timeouts = |index: usize| rig.counters.fallback(rig.policy.cards[index].slot, Why::Timeout).value();
    assert_eq!([timeouts(0), timeouts(1), timeouts(2)], [3, 1, 1]);
    assert_eq!((rig.by(0, By::Local), rig.by(1, By::Closed), rig.by(2, By::Open)), (3, 1, 1));
    checks.iter().for_each(|check| rig.store.release(*check));
    // The replies come after all, to nobody.
    while !rig.fake.sent.is_empty() {
        rig.answer();
    }
    rig.flush();
    while !rig.fake.sent.is_empty() {
        rig.fake.answer();
    }
    assert_eq!(rig.level("rl:{ip=1}:per-ip"), Some(5), "what an unavailable check took late goes back");
    rig.assert_empty();
}

#[test]
fn local_buckets_grant_what_they_are_configured_to_and_go_when_the_breaker_closes() {
    let mut rig = Rig::with(|settings| settings.breaker.open_ms = 100);
    rig.fake.refuses = Some(Why::Down);
    let mut allowed = 0;
    for _ in 0..10 {
        let check = rig.ask(KEY);
        rig.flush();
        allowed += u32::from(rig.read(&[check])[0].0 == Answer::Allow);
    }
    assert_eq!(allowed, 2);
    let shard = rig.fake.shard.unwrap();
    assert_eq!(rig.shards.breaker(shard).state(), State::Open);
    // Probes bring it back.
    rig.fake.refuses = None;
    rig.wait(100_000);
    for _ in 0..3 {
        let check = rig.ask(KEY);
        rig.flush();
        rig.answer();
        assert_eq!(rig.read(&[check])[0].0, Answer::Allow);
    }
    rig.flush();
    assert_eq!(rig.shards.breaker(shard).state(), State::Closed);
    // And the next outage starts with full local buckets.
    rig.fake.refuses = Some(Why::Down);
    let check = rig.ask(KEY);
    rig.flush();
    assert_eq!(rig.read(&[check]), [(Answer::Allow, 1)]);
    rig.assert_empty();
}

#[test]
fn a_check_that_one_local_bucket_denies_takes_nothing_from_another_identity_s() {
    let mut rig = Rig::new();
    rig.fake.refuses = Some(Why::Down);
    let mut ask = |words: &[(&str, &str)]| {
        let check = rig.ask(words);
        rig.flush();
        rig.read(&[check])[0]
    };
    let both = [("path", "/"), ("key", "a"), ("user", "u")];
    assert_eq!([ask(&both).0, ask(&both).0], [Answer::Allow, Answer::Deny], "the user has one");
    assert_eq!(ask(KEY), (Answer::Allow, 0), "the key has had one of its two");
}

#[test]
fn an_open_breaker_lets_nothing_out() {
    let mut rig = Rig::new();
    for at in 0..4 {
        let check = rig.ask(&[("open", &at.to_string())]);
        rig.flush();
        rig.fail(Why::Timeout);
        assert_eq!(rig.read(&[check])[0].0, Answer::Allow);
    }
    let check = rig.ask(&[("open", "x")]);
    rig.flush();
    assert!(rig.fake.sent.is_empty());
    assert_eq!(rig.read(&[check]), [(Answer::Allow, -1)]);
    assert_eq!(rig.counters.fallback(rig.policy.cards[2].slot, Why::BreakerOpen).value(), 1);
    rig.assert_empty();
}

#[test]
fn shadow_rules_are_asked_behind_the_answer() {
    let mut rig = Rig::new();
    let seen = [0; 2].map(|_| rig.ask_for(1, &[("watched", "w")]));
    assert!(seen.iter().all(|asked| matches!(asked, Asked::Now(Verdict { answer: Answer::Allow, .. }))));
    rig.flush();
    rig.answer();
    assert_eq!((rig.rule(3, Reason::ShadowAllowed), rig.rule(3, Reason::ShadowDenied)), (1, 1));
    // Beside a rule that denies it only looks.
    rig.fake.levels.insert("rl:{key=a}:per-key".into(), 0);
    let check = rig.ask(&[("path", "/"), ("key", "a"), ("watched", "other")]);
    rig.flush();
    assert_eq!(rig.fake.sent.len(), 1, "it waits for the verdict");
    rig.answer();
    assert_eq!(rig.read(&[check])[0].0, Answer::Deny);
    rig.flush();
    assert_eq!((rig.fake.sent[0].cost, rig.fake.sent[0].take), (0, TakeMode::Exactly));
    rig.answer();
    assert_eq!(rig.rule(3, Reason::ShadowAllowed), 2, "it would have passed");
    assert_eq!(rig.level("rl:{watched=other}:watched"), Some(1));
    rig.assert_empty();
}

#[test]
fn when_as_many_wait_as_may_the_failure_policies_answer_at_once() {
    let mut rig = Rig::with(|settings| settings.waiting_max = 2);
    let checks = [rig.ask(KEY), rig.ask(KEY)];
    let Asked::Now(verdict) = rig.ask_for(1, KEY) else { panic!("there is no room") };
    assert_eq!((verdict.answer, verdict.limit), (Answer::Allow, 2));
    assert_eq!(rig.counters.fallback(rig.policy.cards[0].slot, Why::Overloaded).value(), 1);
    rig.flush();
    rig.answer();
    rig.read(&checks);
    rig.assert_empty();
}

#[test]
fn a_cost_beyond_the_capacity_is_never_granted_and_takes_nothing() {
    let mut rig = Rig::new();
    let Asked::Later(check) = rig.ask_for(11, KEY) else { panic!("the store says what remains") };
    let other = rig.ask(KEY);
    rig.flush();
    rig.answer();
    let verdict = rig.verdict(check).unwrap();
    assert_eq!((verdict.answer, verdict.retry_after_ms), (Answer::Deny, NEVER));
    assert_eq!(rig.read(&[check, other])[1], (Answer::Allow, 9));
    rig.assert_empty();
}

#[test]
fn cost_0_looks() {
    let mut rig = Rig::new();
    let Asked::Later(check) = rig.ask_for(0, KEY) else { panic!("the store knows") };
    rig.flush();
    assert_eq!(rig.fake.sent[0].cost, 0);
    rig.answer();
    assert_eq!(rig.read(&[check]), [(Answer::Allow, 10)]);
    rig.assert_empty();
}

#[test]
fn a_script_that_answers_nonsense_is_no_answer() {
    let mut rig = Rig::new();
    for nonsense in [&[1, 2, 3][..], &[-5, 0, 0, 0], &[]] {
        let check = rig.ask(&[("open", "1")]);
        rig.flush();
        let token = rig.fake.sent.pop_front().unwrap().token;
        let (store, fake, mut around) = rig.parts();
        store.completed(&mut around, token, (fake.shard, 0), Ok(nonsense));
        assert_eq!(rig.read(&[check])[0].0, Answer::Allow);
    }
    assert_eq!(rig.counters.fallback(rig.policy.cards[2].slot, Why::Refused).value(), 3);
    rig.assert_empty();
}

#[test]
fn a_throttle_call_brings_its_limit_along() {
    let mut rig = Rig::new();
    let rate = Rate::new(policy_sync::model::Limit { capacity: 2, refill: 1, period_ms: 1000 }).unwrap();
    let ask = |rig: &mut Rig| {
        let question = Question { conn: ConnId(0), cost: 1, now_us: rig.now_us, is_sampled: false, is_together: false };
        let bucket = ThrottleBucket { family: "throttle", key: b"user 1", hash: 5, rate };
        let (store, fake, mut around) = rig.parts();
        match store.throttle(&mut around, fake, question, &bucket) {
            Asked::Later(check) => check,
            Asked::Now(_) => panic!("it has to wait"),
        }
    };
    let checks = [ask(&mut rig), ask(&mut rig), ask(&mut rig)];
    rig.flush();
    assert_eq!(rig.fake.sent[0].buckets[0].0, "rl:{user%201}:throttle");
    rig.answer();
    let answers: Vec<_> = rig.read(&checks).into_iter().map(|(answer, _)| answer).collect();
    assert_eq!(answers, [Answer::Allow, Answer::Allow, Answer::Deny]);
    rig.assert_empty();
}

#[test]
fn a_check_whose_connection_is_gone_leaves_nothing_behind() {
    let mut rig = Rig::new();
    let check = rig.ask(BOTH);
    rig.flush();
    rig.store.release(check);
    rig.answer();
    rig.answer();
    rig.assert_empty();
}

#[test]
fn checks_that_wait_go_on_under_their_policy() {
    let mut rig = Rig::new();
    let check = rig.ask(KEY);
    rig.flush();
    let policy = Arc::clone(&rig.policy);
    (2..40).for_each(|generation| rig.store.adopt(&policy, generation));
    assert_eq!(rig.store.policies.len(), 2, "its own and the one in force");
    rig.answer();
    assert_eq!(rig.read(&[check]), [(Answer::Allow, 9)]);
    rig.assert_empty();
    rig.store.adopt(&policy, 40);
    assert_eq!(rig.store.policies.len(), 1);
}

#[test]
fn a_check_that_is_known_meets_the_others_of_its_identity() {
    let mut rig = Rig::new();
    let first = rig.ask(KEY);
    let policy = Arc::clone(&rig.policy);
    let mut attributes = Attributes::default();
    KEY.iter().for_each(|(name, value)| {
        attributes.push(&policy.snapshot, name.as_bytes(), value.as_bytes()).unwrap();
    });
    let mut applied = Vec::new();
    policy.snapshot.applying(&attributes, 0, &mut Vec::new(), &mut applied).unwrap();
    let question = Question { conn: ConnId(0), cost: 1, now_us: rig.now_us, is_sampled: false, is_together: false };
    let (store, fake, mut around) = rig.parts();
    let write = |identity: &mut Vec<u8>| identity.extend_from_slice(b"key=a");
    let Asked::Later(second) = store.ask_known(&mut around, fake, question, &applied, write) else {
        panic!("it has to wait")
    };
    rig.flush();
    assert_eq!((rig.fake.sent.len(), rig.fake.sent[0].cost), (1, 2));
    rig.answer();
    assert_eq!(rig.read(&[first, second]), [(Answer::Allow, 9), (Answer::Allow, 8)]);
    rig.assert_empty();
}

/// What can happen to a store, in any order.
#[derive(Clone, Debug)]
enum Event {
    /// A check of this cost for one of the identities, by one of the rule sets.
    Ask(u32, usize, usize),
    Flush,
    /// The call at this place among those in flight is answered, or fails.
    Answer(usize),
    Fail(usize),
    Wait(u64),
    /// A connection with this check is gone.
    Abandon(usize),
    Refuse(bool),
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let one = prop_oneof![
        6 => (0u32..4, 0usize..3, 0usize..4).prop_map(|(cost, who, what)| Event::Ask(cost, who, what)),
        4 => Just(Event::Flush),
        4 => (0usize..8).prop_map(Event::Answer),
        1 => (0usize..8).prop_map(Event::Fail),
        2 => (0u64..4_000).prop_map(Event::Wait),
        1 => (0usize..8).prop_map(Event::Abandon),
        1 => any::<bool>().prop_map(Event::Refuse),
    ];
    prop::collection::vec(one, 0..120)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    /// Whatever happens: every check has exactly one verdict by its deadline, no token is granted that the store did not
    /// grant, and nothing stays behind.
    #[test]
    fn every_check_has_one_verdict_and_nothing_stays(events in events()) {
        let mut rig = Rig::with(|settings| {
            settings.waiting_max = 16;
            settings.breaker.open_ms = 3;
        });
        let mut waiting: Vec<(CheckId, u64)> = Vec::new();
        for event in events {
            match event {
                Event::Ask(cost, who, what) => {
                    let who = ["a", "b", "c"][who];
                    let words: &[(&str, &str)] = match what {
                        0 => &[("path", "/"), ("key", who)],
                        1 => &[("path", "/"), ("key", who), ("ip", "1")],
                        2 => &[("open", who), ("watched", who)],
                        _ => &[("ip", who), ("watched", "w"), ("open", "1")],
                    };
                    if let Asked::Later(check) = rig.ask_for(cost, words) {
                        waiting.push((check, rig.now_us + 5_000));
                    }
                }
                Event::Flush => rig.flush(),
                Event::Answer(at) | Event::Fail(at) if rig.fake.sent.is_empty() || at >= rig.fake.sent.len() => {}
                Event::Answer(at) => {
                    rig.fake.sent.swap(0, at);
                    rig.answer();
                }
                Event::Fail(at) => {
                    rig.fake.sent.swap(0, at);
                    rig.fail(Why::Timeout);
                }
                Event::Wait(us) => rig.wait(us),
                Event::Abandon(at) if at < waiting.len() => {
                    let (check, _) = waiting.swap_remove(at);
                    rig.store.release(check);
                }
                Event::Abandon(_) => {}
                Event::Refuse(refuse) => rig.fake.refuses = refuse.then_some(Why::Down),
            }
            let now_us = rig.now_us;
            waiting.retain(|(check, deadline_us)| {
                let decided = rig.store.verdict(*check).is_some();
                assert!(decided || *deadline_us > now_us, "a check waits beyond its deadline");
                if decided {
                    rig.store.release(*check);
                }
                !decided
            });
        }
        // The end of all that is under way.
        rig.fake.refuses = None;
        rig.wait(5_000);
        waiting.iter().for_each(|(check, _)| rig.store.release(*check));
        for _ in 0..4 {
            rig.flush();
            while !rig.fake.sent.is_empty() {
                rig.answer();
            }
        }
        let over = |key: &String, level: &u32| *level > if key.contains("per-key") { 10 } else { 5 };
        prop_assert!(!rig.fake.levels.iter().any(|(key, level)| over(key, level)), "{:?}", rig.fake.levels);
        rig.assert_empty();
    }
}
