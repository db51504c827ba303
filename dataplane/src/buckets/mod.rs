//! The buckets that live in this process: exact for the host, bounded, shared by all cores without a lock.
//!
//! [`word`] is one bucket: sixteen bytes, and the arithmetic on them. [`table`] is where they live: a fixed array in
//! which each identity has fourteen places, and a small protocol that puts a new one in without ever having it twice.

pub mod table;
pub mod word;

#[cfg(not(loom))]
#[cfg(test)]
mod tests;

#[cfg(all(test, loom))]
mod loom_tests;

pub use self::{
    table::{BucketTable, Probe, TableCounts},
    word::{AT_MS_MAX, Level},
};
