//! Random worlds: what must hold does, for every seed; a seed is the same world each time; and a fault does not go unseen.
//!
//! `SIMULATOR_SEEDS=100000 cargo test --release -p sluice-simulator --test seeds` looks further than CI does.
#![allow(missing_docs)]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on must stop, with the reason")]

use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    thread,
};

use sluice_simulator::{
    scenario::{Weather, of_seed},
    world::{Quirk, World},
};

fn seeds() -> u64 {
    std::env::var("SIMULATOR_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(2_000)
}

/// Runs the worlds of all seeds, on all cores. Returns how many checks were asked.
fn all_hold(weather: Weather) -> u64 {
    let (next, checks) = (AtomicU64::new(0), AtomicU64::new(0));
    let work = || {
        loop {
            let seed = next.fetch_add(1, Relaxed);
            if seed >= seeds() {
                return;
            }
            let mut world = World::new(of_seed(seed, weather));
            if let Err(violation) = world.run() {
                panic!("seed {seed}, {weather:?}: {violation}");
            }
            checks.fetch_add(world.told().iter().map(|told| told.checks).sum(), Relaxed);
        }
    };
    thread::scope(|scope| {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        (0..cores).for_each(|_| drop(scope.spawn(work)));
    });
    checks.into_inner()
}

#[test]
fn what_is_exact_is_exact_while_nothing_goes_wrong() {
    assert!(all_hold(Weather::Fair) > 100 * seeds());
}

#[test]
fn never_over_and_never_late_whatever_goes_wrong() {
    assert!(all_hold(Weather::Stormy) > 100 * seeds());
}

#[test]
fn a_seed_is_the_same_world_each_time() {
    for seed in 0..20 {
        let run = |seed| {
            let mut world = World::new(of_seed(seed, Weather::Stormy));
            world.run().unwrap();
            (world.fingerprint(), world.calls())
        };
        assert_eq!(run(seed), run(seed), "seed {seed}");
        assert_ne!(run(seed).0, run(seed + 1_000_000).0);
    }
}

#[test]
fn a_fault_of_the_accounts_does_not_go_unseen() {
    let seen = |quirk, weather| {
        let broken = (0..100).filter_map(|seed| {
            let settings = sluice_simulator::world::WorldSettings { quirk: Some(quirk), ..of_seed(seed, weather) };
            World::new(settings).run().err()
        });
        broken.map(|violation| violation.what).collect::<Vec<_>>()
    };
    for (quirk, weather, what, least) in [
        (Quirk::Forgets, Weather::Fair, "admitted", 10),
        (Quirk::Denies, Weather::Fair, "was denied", 3),
        (Quirk::GivesBackTwice, Weather::Stormy, "given back of", 10),
        (Quirk::Sleeps, Weather::Stormy, "had its verdict after", 30),
    ] {
        let seen = seen(quirk, weather);
        let of_it = seen.iter().filter(|violation| violation.contains(what)).count();
        assert!(of_it >= least, "{quirk:?}: {of_it} of {}: {:?}", seen.len(), seen.first());
    }
}
