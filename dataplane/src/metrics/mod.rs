//! What the server counts, and how it is shown.

pub mod counters;
