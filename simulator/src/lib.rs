//! Many gateways and many shards in virtual time: the real engines, a modelled Redis and network, and what must always hold.
//!
//! Real processes cannot be made to lose a reply at a given microsecond, or to have their clock set while a replica is
//! promoted. Here they can: everything but the decision code is simulated, everything that happens by chance comes from
//! one seed, and a seed that shows a fault shows it again.
//!
//! 1. [`gateway`]: the seam: real engines, byte for byte.
//! 2. [`redis`], [`bucket`]: a node, and the script's exact model.
//! 3. [`world`]: events in the order of their time; network, faults, those who ask.
//! 4. [`ledger`]: what must hold at each step.
//! 5. [`scenario`]: a random world from a seed.
//! 6. [`experiments`]: worlds that are made up to measure something; `sluice-simulator` prints their figures.

pub mod bucket;
pub mod experiments;
pub mod gateway;
pub mod ledger;
pub mod random;
pub mod redis;
pub mod scenario;
pub mod world;
