//! Heat as the engine uses it: sampled, fading, published.

use policy_sync::identity;

use super::*;

const OWNER: Owner = Owner::Rule(3);

fn settings(lease_auto_above: u32) -> HotSettings {
    HotSettings { heat_keys: 64, lease_auto_above, ..HotSettings::default() }
}

struct Cores {
    board: Arc<Board>,
    cores: Vec<Heat>,
    now_ms: u64,
}

impl Cores {
    fn new(count: usize, lease_auto_above: u32) -> Self {
        let settings = settings(lease_auto_above);
        let board = Arc::new(Board::new(count, settings.heat_keys));
        let cores = (0..count).map(|core| Heat::new(&settings, &board, core, 42)).collect();
        Self { board, cores, now_ms: 1 }
    }

    /// So many milliseconds of checks: of each key so many a millisecond, on one core, answered by Redis in calls that
    /// answer four.
    fn run(&mut self, core: usize, duration_ms: u64, keys: &[(u64, u32)]) {
        for _ in 0..duration_ms {
            self.now_ms += 1;
            self.cores.iter_mut().for_each(|heat| heat.tick(self.now_ms));
            let heat = &mut self.cores[core];
            for &(key, times) in keys {
                for _ in 0..times {
                    if heat.samples() {
                        if heat.touch(key, OWNER).is_nameless {
                            heat.name(key, format!("key={key}").as_bytes());
                        }
                        heat.decided(key, DecidedBy::Redis, 0.25);
                    }
                }
            }
        }
    }

    fn hottest(&self) -> Vec<board::HotKey> {
        self.board.hottest(self.now_ms, 100)
    }
}

fn is_about(value: f32, expected: f32) -> bool {
    (value - expected).abs() < 0.15 * expected
}

#[test]
fn rates_shares_and_saved_calls_are_told() {
    let mut cores = Cores::new(1, 1000);
    cores.run(0, 10_000, &[(1, 20), (2, 5), (3, 1)]);
    let hottest = cores.hottest();
    let names: Vec<_> = hottest.iter().map(|key| key.name.as_str()).collect();
    assert_eq!(names, ["key=1", "key=2", "key=3"]);
    assert!(is_about(hottest[0].per_second, 20_000.0), "{}", hottest[0].per_second);
    assert!(is_about(hottest[1].per_second, 5_000.0), "{}", hottest[1].per_second);
    assert!(is_about(hottest[0].saved_calls_per_second(), 15_000.0), "{}", hottest[0].saved_calls_per_second());
    assert_eq!(hottest[0].shares().collect::<Vec<_>>(), [(DecidedBy::Redis, 1.0)]);
    assert_eq!(hottest[0].owner, OWNER);
}

#[test]
fn a_key_that_goes_quiet_leaves() {
    let mut cores = Cores::new(1, 1000);
    cores.run(0, 5_000, &[(1, 20), (2, 20)]);
    cores.run(0, FADES_WITHIN_MS, &[(2, 20)]);
    let rate = |cores: &Cores, name| cores.hottest().iter().find(|key| key.name == name).map(|key| key.per_second);
    let left = rate(&cores, "key=1").unwrap();
    assert!((5_000.0..10_000.0).contains(&left), "a time constant leaves about a third: {left}");
    cores.run(0, 15 * FADES_WITHIN_MS, &[(2, 20)]);
    assert_eq!(rate(&cores, "key=1"), None);
    assert!(is_about(rate(&cores, "key=2").unwrap(), 20_000.0));
}

#[test]
fn a_core_that_sleeps_leaves_no_heat_behind() {
    let mut cores = Cores::new(1, 1000);
    cores.run(0, 5_000, &[(1, 20)]);
    assert!(cores.board.hottest(cores.now_ms + FADES_WITHIN_MS, 100)[0].per_second < 12_000.0);
    assert!(cores.board.hottest(cores.now_ms + 20 * FADES_WITHIN_MS, 100).is_empty());
}

#[test]
fn leases_start_above_the_rate_and_stop_below_half_of_it() {
    let mut cores = Cores::new(1, 10_000);
    let mut seen = Vec::new();
    for per_ms in [5, 14, 14, 14, 7, 7, 7, 7, 3, 3, 3, 7, 7, 7] {
        cores.run(0, 2_000, &[(1, per_ms)]);
        seen.push(cores.cores[0].warmth(1));
    }
    use Warmth::{Cold, Hot, Warm};
    assert_eq!(seen[0], Cold);
    assert_eq!(seen[3], Hot);
    assert_eq!(seen[7], Warm, "between the thresholds a lease goes on, and none begins");
    assert_eq!(seen[10], Cold);
    assert_eq!(seen[13], Warm);
    assert_eq!(cores.cores[0].warmth(99), Cold, "nobody knows it");
}

#[test]
fn a_very_hot_key_is_hot_at_once() {
    let mut cores = Cores::new(1, 1000);
    cores.run(0, 100, &[(1, 100)]);
    assert_eq!(cores.cores[0].warmth(1), Warmth::Hot, "100,000 a second for 100 ms");
}

#[test]
fn the_rate_of_a_lease_is_that_of_all_cores() {
    let mut cores = Cores::new(2, 10_000);
    for _ in 0..100 {
        cores.run(0, 50, &[(1, 14)]);
        cores.run(1, 50, &[(1, 14)]);
    }
    // 7,000 on each.
    assert_eq!(cores.cores.iter_mut().map(|heat| heat.warmth(1)).collect::<Vec<_>>(), [Warmth::Hot; 2]);
    let merged = cores.hottest();
    assert!(merged.len() == 1 && is_about(merged[0].per_second, 14_000.0), "{merged:?}");
}

#[test]
fn a_reader_holds_no_core_up() {
    let mut cores = Cores::new(1, 1000);
    cores.run(0, 2_000, &[(1, 20)]);
    let before = cores.hottest()[0].per_second;
    let board = Arc::clone(&cores.board);
    board.look(0, cores.now_ms, |_, _| {
        // Whoever reads has the page; the core goes on without it.
        let heat = &mut cores.cores[0];
        heat.tick(cores.now_ms + 10 * STEP_MS);
    });
    assert!(board.hottest(cores.now_ms, 1)[0].per_second >= before * 0.99);
}

/// Every estimate lies within the bounds of Space-Saving and of sampling: five standard deviations.
#[test]
fn sampled_estimates_are_within_their_bounds() {
    let settings = settings(1000);
    let mut heat = Heat::new(&settings, &Arc::new(Board::new(1, settings.heat_keys)), 0, 9);
    let (mut counts, mut total, mut state) = (std::collections::HashMap::new(), 0u32, 1u64);
    for _ in 0..1_000_000 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        // Zipf's law, by its inverse.
        let key = 50_000f64.powf((state >> 11) as f64 / (1u64 << 53) as f64) as u64;
        *counts.entry(key).or_insert(0u32) += 1;
        total += 1;
        if heat.samples() {
            heat.touch(key, OWNER);
        }
    }
    let every = SAMPLE_EVERY as f32;
    let bound = total as f32 / settings.heat_keys as f32;
    for (&key, &count) in &counts {
        let slack = 5.0 * (count as f32 * every).sqrt() + every;
        match heat.sketch.find(key) {
            Some(entry) => {
                let (least, most) = ((entry.count - entry.error) * every, entry.count * every);
                assert!(least <= count as f32 + slack && most + slack >= count as f32, "{key}: {least} {count} {most}");
            }
            None => assert!(count as f32 <= bound + slack, "{key} came {count} times and is not there"),
        }
    }
}

#[test]
fn hostile_identities_are_harmless_and_bounded() {
    let mut cores = Cores::new(1, 1000);
    let hostile: &[&[u8]] =
        &[b"\x1b[2J\x07", b"\"},{\"", b"a\r\nb\0", &[0xFF, 0xC2, 0x9B], "\u{202E}".as_bytes(), &[b'\n'; 5_000]];
    for (key, value) in hostile.iter().enumerate() {
        let mut name = Vec::new();
        identity::encode([("key", *value)], &mut name);
        let heat = &mut cores.cores[0];
        for _ in 0..100 {
            heat.touch(key as u64, OWNER);
        }
        heat.name(key as u64, &name);
    }
    cores.run(0, STEP_MS + 1, &[]);
    let names: Vec<_> = cores.hottest().into_iter().map(|key| key.name).collect();
    assert_eq!(names.len(), hostile.len());
    for name in names {
        assert!(name.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'"'), "{name:?}");
        assert!(name.len() <= NAME_BYTES_MAX);
    }
}
