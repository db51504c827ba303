//! What the echo and the load generator share, so that both ends of a measurement move bytes in the same way:
//! [`ring`], a private io_uring with provided receive buffers, and [`cpu`], pinning and CPU time of a thread.
//!
//! Read `ring` first; the echo itself is `main.rs`, the load generator is the package `sluice-load`.

pub mod cpu;
pub mod ring;
