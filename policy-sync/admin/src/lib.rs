//! The admin API of Sluice's policy store, the commands that speak to it, and the store's migrations.
//!
//! Read in this order, the way a change goes:
//!
//! 1. [`cli`]: what is asked.
//! 2. [`migrate`] and [`tokens`]: what the store's owner does with it directly: make it, and say who may call the API.
//! 3. [`connect`]: a PostgreSQL URL to a pool of connections.
//! 4. [`held`]: the policy as the admin API holds it: what is in the store, sound or not.
//! 5. [`plan`]: operations on it, the difference that they make, and what they presuppose.
//! 6. [`store`]: reads it, and carries a change out in one transaction.
//! 7. [`push`]: tells gateways through Redis that there is a new version.
//! 8. [`api`]: all this over HTTP.
//! 9. [`serve`](mod@serve): starts it, keeps house, and ends it.
//! 10. [`terminal`]: the commands that ask the API.
#![forbid(unsafe_code)]

pub mod api;
pub mod cli;
pub mod connect;
pub mod held;
pub mod migrate;
pub mod plan;
pub mod push;
pub mod serve;
pub mod store;
pub mod terminal;
pub mod tokens;
