//! What the server counts ([`counters`]), and how it is shown ([`exposition`]), with what the kernel knows of the process
//! (`system`).

pub mod counters;
pub mod exposition;
pub(crate) mod system;
