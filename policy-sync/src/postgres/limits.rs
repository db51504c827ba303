//! Bounds on what a connection keeps, so that no server can make it take more memory than somebody chose.

/// The largest value of [`Limits::result_bytes_max`] and of the message limits that counts: 1 GiB. What is above is cut to it.
pub const BYTES_MAX: usize = 1 << 30;
/// The longest message that a server may send before it let the client in, and the longest one ever of the kinds that are short by nature, in bytes.
pub const SHORT_MESSAGE_BYTES_MAX: usize = 30_000;
/// The longest text kept of an error's message, detail or hint, in bytes; what is longer is cut.
pub const ERROR_TEXT_BYTES_MAX: usize = 1_024;
/// The longest name of a channel, in bytes: PostgreSQL cuts what is longer, and then nothing is heard.
pub const CHANNEL_BYTES_MAX: usize = 63;
/// The most parameters of a query: their number has 16 bits on the wire.
pub const PARAMS_MAX: usize = 65_535;

/// What each cell of a result costs beside its text, in bytes. It is counted, since a row of nothing but NULL has a size too.
pub(crate) const CELL_BYTES: usize = 4;

// A cell keeps where it ends in 31 bits.
const _: () = assert!(BYTES_MAX < 1 << 31);

/// Bounds of one connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The longest message that is taken, in bytes; so also the longest row. By default 64 MiB.
    pub message_bytes_max: usize,
    /// The most rows of one result. By default 2,000,000.
    pub rows_max: usize,
    /// The most bytes of one result: texts, and four bytes for each value. By default 256 MiB.
    pub result_bytes_max: usize,
    /// The longest query with its parameters, in bytes. By default 16 MiB.
    pub request_bytes_max: usize,
    /// The most notifications that are kept until somebody asks for them; of more, the oldest are dropped and counted. By default 1,024; each
    /// is shorter than 30,000 bytes, and PostgreSQL's own are shorter than 8,192.
    pub notifications_max: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            message_bytes_max: 64 << 20,
            rows_max: 2_000_000,
            result_bytes_max: 256 << 20,
            request_bytes_max: 16 << 20,
            notifications_max: 1_024,
        }
    }
}

impl Limits {
    /// The same with every value in the range that the code counts with.
    pub(crate) fn clamped(&self) -> Self {
        Self {
            message_bytes_max: self.message_bytes_max.clamp(SHORT_MESSAGE_BYTES_MAX, BYTES_MAX),
            result_bytes_max: self.result_bytes_max.min(BYTES_MAX),
            request_bytes_max: self.request_bytes_max.min(BYTES_MAX),
            ..*self
        }
    }
}
