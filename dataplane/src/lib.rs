//! Sluice's data plane: answers "may this request pass?" over RESP, thread per core.
//!
//! Read in this order, the way a check goes:
//!
//! 1. `listener`: sockets to bytes and back, one driver per core.
//! 2. [`engine`]: bytes to requests to verdicts to bytes, on one core, without a socket.
//! 3. [`resp`]: the protocol.
//! 4. [`web`]: HTTP and gRPC, over the same transports and to the same decision.
//! 5. [`decision`]: from the rules that apply to one verdict.
//! 6. [`buckets`]: the state of the limits.
//! 7. [`store`]: the same state in Redis, shared by all gateways, and what happens when it does not answer.
//! 8. [`hot`]: what spares the store the checks whose answer is known.
//! 9. [`heat`]: which buckets are asked for most, for people and for leases.
//! 10. [`shadow`]: what shadow rules saw, and of whom.
//! 11. [`policy`]: the policy in force, and how a new one replaces it.
//! 12. [`control`] and [`policy_store`]: where a new one comes from, a file or the policy store.

pub mod buckets;
pub mod chance;
pub mod cli;
pub mod clock;
pub mod commands;
pub mod config;
pub mod control;
pub mod decision;
pub mod engine;
pub mod files;
pub mod heat;
pub mod hot;
pub mod lifecycle;
pub mod limits;
pub mod listener;
pub mod log;
pub mod metrics;
pub mod ops;
pub mod policy;
pub mod policy_store;
mod prefetch;
pub mod resp;
mod secret;
pub mod server;
pub mod shadow;
pub mod store;
mod sync;
pub mod web;
