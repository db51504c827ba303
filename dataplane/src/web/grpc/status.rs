//! What a call comes to where it brings no message: gRPC's codes, and a text.

use hyper::header::HeaderValue;
use percent_encoding::{AsciiSet, CONTROLS, percent_encode};

/// gRPC's codes that are used here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub(super) enum Code {
    Ok = 0,
    InvalidArgument = 3,
    NotFound = 5,
    ResourceExhausted = 8,
    Unimplemented = 12,
    Unavailable = 14,
    Unauthenticated = 16,
}

/// Why a call brings no message.
#[derive(Debug)]
pub(super) struct Status {
    pub(super) code: Code,
    text: String,
}

/// What must be encoded in `grpc-message`: everything but printable ASCII, and the percent sign.
const ENCODED: &AsciiSet = &CONTROLS.add(b'%');

impl Status {
    pub(super) fn new(code: Code, text: impl Into<String>) -> Self {
        Self { code, text: text.into() }
    }

    /// The text as a header.
    pub(super) fn message(&self) -> HeaderValue {
        let text = percent_encode(self.text.as_bytes(), ENCODED).to_string();
        HeaderValue::try_from(text).unwrap_or_else(|_| HeaderValue::from_static(""))
    }
}
