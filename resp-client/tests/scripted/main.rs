//! The client against scripted peers: bytes in, bytes out, and a clock that stands still until it is told.
#![allow(missing_docs)]

mod calls;
mod cluster;
mod handshake;
mod links;
mod pubsub;
mod random;
mod scripts;
mod sentinel;
mod tls;
mod world;
