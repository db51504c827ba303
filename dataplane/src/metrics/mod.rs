//! What the server counts ([`counters`]), and how it is shown ([`exposition`]), with what the kernel knows of the process
//! (`system`); `store` is the part about Redis.

pub mod counters;
pub mod exposition;
mod policy_store;
mod store;
pub(crate) mod system;
