//! One cookie out of the Cookie header (RFC 6265, section 4.2), and one parameter out of a query.

use std::borrow::Cow;

use percent_encoding::percent_decode;

/// The value of the first cookie of that name.
pub(super) fn cookie<'a>(header: &'a [u8], name: &str) -> Option<&'a [u8]> {
    header.split(|&byte| byte == b';').find_map(|pair| {
        let (key, value) = split_at(pair.trim_ascii(), b'=')?;
        (key == name.as_bytes()).then(|| value.strip_prefix(b"\"").and_then(|v| v.strip_suffix(b"\"")).unwrap_or(value))
    })
}

/// The value of the first parameter of that name, decoded.
pub(super) fn parameter<'a>(query: &'a [u8], name: &str) -> Option<Cow<'a, [u8]>> {
    query.split(|&byte| byte == b'&').find_map(|pair| {
        let (key, value) = split_at(pair, b'=').unwrap_or((pair, b""));
        let key: Cow<'_, [u8]> = percent_decode(key).into();
        (key == name.as_bytes()).then(|| {
            let value: Cow<'_, [u8]> = percent_decode(value).into();
            value
        })
    })
}

fn split_at(bytes: &[u8], at: u8) -> Option<(&[u8], &[u8])> {
    let place = memchr::memchr(at, bytes)?;
    Some((&bytes[..place], &bytes[place + 1..]))
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cookie_is_found_among_others() {
        let header = b"theme=dark; session=\"ab=c\"; sessionid=x";
        assert_eq!(cookie(header, "session"), Some(&b"ab=c"[..]));
        assert_eq!(cookie(header, "sessionid"), Some(&b"x"[..]));
        assert_eq!(cookie(header, "none"), None);
    }

    #[test]
    fn a_parameter_is_found_and_decoded() {
        assert_eq!(parameter(b"a=1&api%5Fkey=x%20y&api_key=z", "api_key").as_deref(), Some(&b"x y"[..]));
        assert_eq!(parameter(b"flag&b=", "flag").as_deref(), Some(&b""[..]));
        assert_eq!(parameter(b"", "a"), None);
    }
}
