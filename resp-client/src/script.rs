//! Scripts: Lua that runs in Redis, called by its hash or as a function.

use std::fmt;

use crate::command::append_word;

/// Which of the scripts in the settings, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ScriptId(pub u16);

/// A script, and how it is called.
#[derive(Clone, PartialEq, Eq)]
pub struct Script {
    source: Vec<u8>,
    kind: Kind,
    /// The words that every call starts with, as they go over the wire.
    prefix: Vec<u8>,
}

#[derive(Clone, PartialEq, Eq)]
enum Kind {
    Hash { sha1: String },
    Function { name: String },
}

impl Script {
    /// A script called by EVALSHA; NOSCRIPT is answered with SCRIPT LOAD.
    pub fn by_hash(source: impl Into<Vec<u8>>) -> Self {
        let source = source.into();
        let sha1 = sha1_smol::Sha1::from(&source).digest().to_string();
        let prefix = prefix(b"EVALSHA", sha1.as_bytes());
        Self { source, kind: Kind::Hash { sha1 }, prefix }
    }

    /// A function called by FCALL; its library (`source`, with the `#!lua name=…` line) is loaded by FUNCTION LOAD
    /// REPLACE where it is missing.
    pub fn as_function(source: impl Into<Vec<u8>>, name: &str) -> Self {
        let prefix = prefix(b"FCALL", name.as_bytes());
        Self { source: source.into(), kind: Kind::Function { name: name.to_owned() }, prefix }
    }

    /// The SHA-1 of the source in hexadecimal, or the function's name.
    pub fn name(&self) -> &str {
        match &self.kind {
            Kind::Hash { sha1 } => sha1,
            Kind::Function { name } => name,
        }
    }

    /// The two words that every call starts with.
    #[inline]
    pub(crate) fn prefix(&self) -> &[u8] {
        &self.prefix
    }

    /// The command that makes the script known to a node.
    pub(crate) fn load(&self) -> Vec<&[u8]> {
        match self.kind {
            Kind::Hash { .. } => vec![b"SCRIPT", b"LOAD", &self.source],
            Kind::Function { .. } => vec![b"FUNCTION", b"LOAD", b"REPLACE", &self.source],
        }
    }
}

fn prefix(command: &[u8], name: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    append_word(&mut bytes, command);
    append_word(&mut bytes, name);
    bytes
}

impl fmt::Debug for Script {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Script").field(&self.name()).finish()
    }
}
