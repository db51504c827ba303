//! A path in its normal form, so that nobody gets around a rule for `/v1/login` by asking for `/v1/./login` or
//! `/v1/%6Cogin`.
//!
//! RFC 3986, section 6.2.2: unreserved characters are never encoded, other encodings are in upper case, dot segments are
//! resolved. Beyond that, empty segments are dropped, as most servers take them.

/// Appends the normal form of an absolute path.
pub(super) fn normalize(path: &[u8], into: &mut Vec<u8>) {
    let start = into.len();
    let mut segment = Vec::with_capacity(path.len());
    let ends_open = path.ends_with(b"/") || path.ends_with(b"/.") || path.ends_with(b"/..");
    for raw in path.split(|&byte| byte == b'/') {
        segment.clear();
        decode_unreserved(raw, &mut segment);
        match &*segment {
            b"" | b"." => {}
            b".." => {
                let last = into[start..].iter().rposition(|&byte| byte == b'/').unwrap_or(0);
                into.truncate(start + last);
            }
            _ => {
                into.push(b'/');
                into.extend_from_slice(&segment);
            }
        }
    }
    if ends_open || into.len() == start {
        into.push(b'/');
    }
}

fn decode_unreserved(raw: &[u8], into: &mut Vec<u8>) {
    let digit = |at: usize| raw.get(at).and_then(|&byte| char::from(byte).to_digit(16));
    let mut at = 0;
    while let Some(&byte) = raw.get(at) {
        match (byte, digit(at + 1), digit(at + 2)) {
            (b'%', Some(high), Some(low)) => {
                // Two hexadecimal digits are a byte.
                let decoded = (high << 4 | low) as u8;
                if decoded.is_ascii_alphanumeric() || b"-._~".contains(&decoded) {
                    into.push(decoded);
                } else {
                    into.extend_from_slice(&[b'%', raw[at + 1].to_ascii_uppercase(), raw[at + 2].to_ascii_uppercase()]);
                }
                at += 3;
            }
            _ => {
                into.push(byte);
                at += 1;
            }
        }
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ways_to_write_a_path_are_one() {
        for (path, expected) in [
            ("/v1/login", "/v1/login"),
            ("/v1/./login", "/v1/login"),
            ("//v1///login", "/v1/login"),
            ("/v1/x/../login", "/v1/login"),
            ("/v1/%6cog%69n", "/v1/login"),
            ("/v1/%2e%2E/v1/login", "/v1/login"),
            ("/../../v1/login", "/v1/login"),
            ("/v1/login/", "/v1/login/"),
            ("/v1/a%2fb%zz", "/v1/a%2Fb%zz"),
            ("/", "/"),
            ("", "/"),
            ("/..", "/"),
        ] {
            let mut normal = Vec::new();
            normalize(path.as_bytes(), &mut normal);
            assert_eq!(String::from_utf8(normal).unwrap(), expected, "{path}");
        }
    }
}
