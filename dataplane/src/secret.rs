//! Comparing secrets.

/// Compares without telling by its time where the first difference is.
pub(crate) fn same_secret(expected: &[u8], given: &[u8]) -> bool {
    let differences = expected.iter().zip(given).fold(0, |all, (a, b)| all | (a ^ b));
    expected.len() == given.len() && differences == 0
}
