//! Where a key lives in a cluster.

/// Slots of a cluster.
pub const SLOTS: u16 = 16_384;

/// The slot of a key: CRC-16 of its hash tag, the bytes between the first `{` and the next `}`, or of the whole key if
/// there is no such part or it is empty (Redis cluster specification, "Hash tags").
#[inline]
pub fn key_slot(key: &[u8]) -> u16 {
    redis_protocol::redis_keyslot(key)
}

/// The slot of a key whose hash tag this is: all of it counts, whatever braces it has.
#[inline]
pub fn tag_slot(tag: &[u8]) -> u16 {
    crc16::State::<crc16::XMODEM>::calculate(tag) % SLOTS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_specification_s_examples() {
        assert_eq!(key_slot(b"123456789"), 0x31c3 % SLOTS);
        assert_eq!(key_slot(b"{user1000}.following"), key_slot(b"user1000"));
        assert_eq!(key_slot(b"foo{{bar}}zap"), key_slot(b"{bar"));
        assert_eq!(key_slot(b"foo{bar}{zap}"), key_slot(b"bar"));
        assert_eq!(key_slot(b"foo{}{bar}"), key_slot(b"foo{}{bar}"));
        assert_ne!(key_slot(b"foo{}{bar}"), key_slot(b"bar"));
        assert_eq!(key_slot(b"{"), key_slot(b"{"));
        assert_eq!(key_slot(b""), 0);
        assert_eq!(tag_slot(b"user1000"), key_slot(b"{user1000}.following"));
    }
}
