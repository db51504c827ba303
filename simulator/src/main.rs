//! `sluice-simulator`: seeds and experiments from the command line.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command that prints")]

use std::process::ExitCode;

use clap::{Parser, Subcommand, ValueEnum};
use sluice_simulator::{
    experiments,
    scenario::{self, Weather},
    world::World,
};

/// Sluice's decision code in a simulated world: virtual time, one seed, no sockets.
#[derive(Parser)]
#[command(name = "sluice-simulator")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Runs an experiment, or all of them, and prints their figures.
    Measure {
        /// Which; without any, all.
        names: Vec<String>,
        /// The seed.
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
    /// Runs the random worlds of some seeds and checks what must hold.
    Seeds {
        /// The first seed.
        #[arg(long, default_value_t = 0)]
        from: u64,
        /// How many.
        #[arg(long, default_value_t = 1_000)]
        count: u64,
        /// With faults, without, or both.
        #[arg(long, value_enum, default_value_t = Kind::Both)]
        weather: Kind,
    },
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Kind {
    Fair,
    Stormy,
    Both,
}

fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Measure { names, seed } => measure(&names, seed),
        Command::Seeds { from, count, weather } => seeds(from..from + count, weather),
    }
}

fn measure(names: &[String], seed: u64) -> ExitCode {
    let known: Vec<_> = experiments::ALL.iter().map(|(name, _)| *name).collect();
    if let Some(unknown) = names.iter().find(|name| !known.contains(&name.as_str())) {
        eprintln!("there is no experiment {unknown}; there are: {}", known.join(", "));
        return ExitCode::from(2);
    }
    for (name, run) in experiments::ALL {
        if names.is_empty() || names.iter().any(|wanted| wanted == name) {
            println!("## {name}\n");
            for line in run(seed) {
                println!("{line}");
            }
            println!();
        }
    }
    ExitCode::SUCCESS
}

fn seeds(seeds: std::ops::Range<u64>, kind: Kind) -> ExitCode {
    let mut checks = 0;
    for seed in seeds.clone() {
        for weather in [Weather::Fair, Weather::Stormy] {
            let wanted = if weather == Weather::Fair { Kind::Fair } else { Kind::Stormy };
            if kind != Kind::Both && kind != wanted {
                continue;
            }
            let settings = scenario::of_seed(seed, weather);
            let mut world = World::new(settings.clone());
            if let Err(violation) = world.run() {
                eprintln!("{settings:#?}\n{}\nseed {seed}, {weather:?}: {violation}", settings.policy);
                return ExitCode::FAILURE;
            }
            checks += world.told().iter().map(|told| told.checks).sum::<u64>();
        }
        if (seed + 1 - seeds.start).is_multiple_of(500) {
            eprintln!("{} of {} seeds", seed + 1 - seeds.start, seeds.end - seeds.start);
        }
    }
    println!("{} seeds, {checks} checks: everything held", seeds.end - seeds.start);
    ExitCode::SUCCESS
}
