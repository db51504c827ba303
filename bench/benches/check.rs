//! Nanoseconds per check, bytes to bytes: `cargo bench -p sluice-bench --bench check`.
#![allow(missing_docs)]

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use sluice_bench::{ONE_RULE, Rig, THREE_RULES, many_rules, pipeline, request};

fn checks(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("check");
    for depth in [1, 16, 100] {
        for (name, policy) in [("one_rule", ONE_RULE), ("three_rules", THREE_RULES)] {
            let mut rig = Rig::new(policy, 1 << 16);
            let requests = pipeline(depth);
            group.throughput(Throughput::Elements(depth));
            group.bench_function(format!("{name}/depth_{depth}"), |bencher| {
                bencher.iter(|| rig.round(&requests).len());
            });
        }
    }
    for rules in [10, 10_000] {
        let mut rig = Rig::new(&many_rules(rules), 1 << 16);
        let requests = pipeline(100);
        group.throughput(Throughput::Elements(100));
        group.bench_function(format!("of_{rules}_rules/depth_100"), |bencher| {
            bencher.iter(|| rig.round(&requests).len());
        });
    }
    // A million identities do not fit any cache: every check misses.
    let mut rig = Rig::new(ONE_RULE, 4 << 20);
    let rounds: Vec<Vec<u8>> = (0..10_000u64)
        .map(|round| (0..100).flat_map(|at| request((round * 100 + at).wrapping_mul(7_919) % 1_000_000)).collect())
        .collect();
    let mut next = rounds.iter().cycle();
    group.throughput(Throughput::Elements(100));
    group.bench_function("million_identities/depth_100", |bencher| {
        bencher.iter(|| next.next().map(|requests| rig.round(requests).len()));
    });
}

criterion_group!(benches, checks);
criterion_main!(benches);
