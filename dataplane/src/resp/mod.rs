//! RESP, the server side: bytes to requests ([`frame`]), requests to meaning ([`command`]), answers to bytes ([`reply`]).
//!
//! Nothing here touches a socket or keeps state; a request that is not all there yet is `None`, not an error.

pub mod command;
pub mod frame;
pub mod reply;
mod writer;
