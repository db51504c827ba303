//! The sketch against exact counts: Zipf, what hurts Space-Saving most, and whatever proptest comes up with.

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

fn exact(stream: &[u64]) -> HashMap<u64, f32> {
    let mut counts = HashMap::new();
    stream.iter().for_each(|&key| *counts.entry(key).or_default() += 1.0);
    counts
}

/// What must hold of a sketch that has seen this stream, in which nothing has faded.
fn check(sketch: &Sketch, stream: &[u64]) {
    let (counts, bound) = (exact(stream), stream.len() as f32 / sketch.entries_max as f32);
    let entries: HashMap<u64, &Entry> = sketch.entries().map(|entry| (entry.key, entry)).collect();
    assert_eq!(entries.len(), sketch.entries.len(), "no key has two entries");
    for (key, entry) in &entries {
        let true_count = counts[key];
        assert!(entry.count >= true_count && entry.count - entry.error <= true_count, "{key}: {true_count}");
        assert!(entry.error <= bound, "{key}: error {} of {bound}", entry.error);
    }
    for (key, count) in &counts {
        assert!(*count <= bound || entries.contains_key(key), "{key} came {count} times of {bound}");
    }
    let total: f32 = sketch.entries().map(|entry| entry.count).sum();
    assert_eq!(total, stream.len() as f32, "every addition is somewhere");
    well_formed(sketch);
}

fn well_formed(sketch: &Sketch) {
    for (at, &number) in sketch.heap.iter().enumerate() {
        assert_eq!(sketch.entries[number as usize].at as usize, at);
        assert!(at == 0 || sketch.count((at - 1) / 2) <= sketch.count(at), "the heap at {at}");
    }
    for (number, entry) in sketch.entries.iter().enumerate() {
        assert_eq!(sketch.number(entry.key), Some(number as u32), "every key is found");
    }
    let linked = sketch.index.iter().filter(|&&number| number != EMPTY).count();
    assert_eq!(linked, sketch.entries.len(), "and nothing else is");
}

fn fed(entries_max: usize, stream: &[u64]) -> Sketch {
    let mut sketch = Sketch::new(entries_max);
    stream.iter().for_each(|&key| {
        sketch.add(key);
    });
    sketch
}

/// Numbers that are spread as hashes are, from a seed.
fn random(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed;
    move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let mixed = (state ^ (state >> 33)).wrapping_mul(0xFF51_AFD7_ED55_8CCD);
        mixed ^ (mixed >> 33)
    }
}

/// Ranks by Zipf's law with exponent 1, by its inverse.
fn zipf(keys: f64, len: usize, seed: u64) -> Vec<u64> {
    let mut random = random(seed);
    (0..len).map(|_| keys.powf((random() >> 11) as f64 / (1u64 << 53) as f64) as u64).collect()
}

#[test]
fn the_hottest_of_a_zipf_stream_are_named_in_order() {
    let stream = zipf(100_000.0, 200_000, 1);
    let sketch = fed(128, &stream);
    check(&sketch, &stream);
    let mut entries: Vec<_> = sketch.entries().collect();
    entries.sort_by(|one, other| (other.count - other.error).total_cmp(&(one.count - one.error)));
    let hottest: Vec<_> = entries.iter().take(10).map(|entry| entry.key).collect();
    assert_eq!(hottest, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
    for entry in &entries[..10] {
        let (estimate, count) = (entry.count - entry.error, exact(&stream)[&entry.key]);
        assert!(estimate > 0.95 * count, "{}: {estimate} of {count}", entry.key);
    }
}

#[test]
fn a_flood_of_new_keys_hides_no_hot_one() {
    // Each new key pushes the least one out; the hot one comes a little more often than one in m.
    let mut random = random(2);
    let stream: Vec<_> = (0..100_000).map(|at| if at % 100 == 0 { 7 } else { random() }).collect();
    let sketch = fed(128, &stream);
    check(&sketch, &stream);
    let entry = sketch.entries().find(|entry| entry.key == 7).expect("1/100 is more than 1/128");
    assert!(entry.count >= 1000.0);
    let others = sketch.entries().filter(|entry| entry.key != 7).map(|entry| entry.count - entry.error);
    assert!(others.fold(0.0, f32::max) <= 2.0, "no key of the flood looks hot");
}

proptest! {
    #[test]
    fn every_stream_is_counted_within_the_bounds(
        entries_max in 1usize..20,
        stream in prop::collection::vec(prop_oneof![3 => 0u64..10, 2 => 0u64..60, 1 => any::<u64>()], 1..600),
    ) {
        let sketch = fed(entries_max, &stream);
        check(&sketch, &stream);
    }

    /// Keys that share a slot of the index, at its end too: what is taken out leaves no search broken.
    #[test]
    fn keys_are_found_however_they_collide(stream in prop::collection::vec(0u64..40, 1..400)) {
        // The multiplier's inverse makes keys of slots: a handful, beginning with the last.
        let inverse = (0..6).fold(1u64, |x, _| x.wrapping_mul(2u64.wrapping_sub(0x9E37_79B9_7F4A_7C15u64.wrapping_mul(x))));
        let slots = (SLOTS_PER_ENTRY * 8u64 as usize).next_power_of_two() as u64;
        let key = |at: u64| (((slots - 2 + at % 5) % slots) << (64 - slots.trailing_zeros()) | at).wrapping_mul(inverse);
        let stream: Vec<_> = stream.into_iter().map(key).collect();
        let sketch = fed(8, &stream);
        check(&sketch, &stream);
    }

    #[test]
    fn what_fades_keeps_its_order(
        stream in prop::collection::vec(0u64..40, 1..400),
        shares in prop::collection::vec(0.0f32..1.0, 1..8),
    ) {
        let mut sketch = Sketch::new(8);
        for part in stream.chunks(stream.len() / shares.len() + 1).zip(&shares) {
            part.0.iter().for_each(|&key| { sketch.add(key); });
            sketch.fade(*part.1);
            well_formed(&sketch);
            for entry in sketch.entries() {
                prop_assert!(entry.count >= entry.error && entry.error >= 0.0);
            }
        }
    }
}
