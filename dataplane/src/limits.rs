//! Every bound of the data plane that is not a setting, each with its unit and its reason. Settings are in `config`.

/// The most cores, and so executors, that one process runs.
pub const CORES_MAX: usize = 256;
/// The most bytes of a line of the inline protocol, as in Redis.
pub const INLINE_BYTES_MAX: usize = 64 * 1024;
/// Digits of a length or count in a RESP header; enough for any 32-bit number, and far from overflow.
pub const HEADER_DIGITS_MAX: usize = 10;
/// Checks that are parsed and prefetched before they are decided. More hide no more cache misses.
pub const BATCH_CHECKS_MAX: usize = 128;
/// Output buffers that a core keeps for reuse, and the capacity above which one is given back to the allocator.
pub const SPARE_BUFFERS_MAX: usize = 1024;
/// See [`SPARE_BUFFERS_MAX`].
pub const SPARE_BUFFER_BYTES_MAX: usize = 64 * 1024;
/// Bytes of a name that a client gives itself by CLIENT SETNAME.
pub const CLIENT_NAME_BYTES_MAX: usize = 128;
/// Lines of the log that may wait to be written, and the bytes of them beyond which no other line may join. Enough for a start
/// and for what an outage says; beyond, standard error has stalled.
pub const LOG_LINES_MAX: usize = 1024;
/// See [`LOG_LINES_MAX`].
pub const LOG_BYTES_MAX: usize = 1024 * 1024;

const _: () = assert!(BATCH_CHECKS_MAX.is_power_of_two());
