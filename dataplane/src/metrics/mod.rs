//! What the server counts ([`counters`]), and how it is shown ([`exposition`]).

pub mod counters;
pub mod exposition;
