//! Rules and overrides, and the snapshot that the hot path asks.
//!
//! Read in this order:
//!
//! 1. [`model`]: what a policy says, as plain data (rules, overrides, limits).
//! 2. [`file`](mod@file): a policy file (TOML) into the model, with every problem of the file reported at once.
//! 3. [`check`]: what a policy must satisfy beyond its syntax, for whichever way it came in.
//! 4. [`stored`]: the policy as the store keeps it (JSON), brought forward by what happened since; the last good one on disk.
//! 5. `postgres` (a feature): the client that asks the store.
//! 6. [`rate`]: a limit as the integers that a bucket computes with.
//! 7. [`identity`]: the encoded identity, which rollout and the store keys hash.
//! 8. [`snapshot`]: the policy compiled: from the attributes of a request to the rules that apply.
//! 9. [`explain`](mod@explain): the same walk for people, with the reason for each rule that does not apply.
#![forbid(unsafe_code)]

mod bytes;
pub mod check;
pub mod explain;
pub mod file;
pub mod identity;
pub mod model;
#[cfg(feature = "postgres")]
pub mod postgres;
pub mod rate;
pub mod snapshot;
pub mod stored;
