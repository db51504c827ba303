//! The small languages inside a policy file's values: durations, patterns, shares, and points in time.

use jiff::Timestamp;

use super::problem::Refusal;
use crate::{
    check::{nearest, quoted},
    model::{Pattern, ROLLOUT_BP_ALL},
};

/// Units of a duration, the largest first, in milliseconds.
const UNITS: [(&str, u64); 5] = [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1)];

/// What people write for the units.
const UNIT_NAMES: [(&str, &str); 18] = [
    ("day", "d"),
    ("days", "d"),
    ("hour", "h"),
    ("hours", "h"),
    ("hr", "h"),
    ("min", "m"),
    ("mins", "m"),
    ("minute", "m"),
    ("minutes", "m"),
    ("sec", "s"),
    ("secs", "s"),
    ("second", "s"),
    ("seconds", "s"),
    ("msec", "ms"),
    ("millis", "ms"),
    ("millisecond", "ms"),
    ("milliseconds", "ms"),
    ("MS", "ms"),
];

/// A duration such as `500ms`, `1m` or `1h30m` in milliseconds: numbers with units, each unit once, the largest first.
/// What does not fit comes out as the largest number, which `check` refuses with the real bound.
pub(super) fn duration(text: &str) -> Result<u64, Refusal> {
    let refusal = || {
        let message = format!("{} is not a duration", quoted(text));
        Refusal::new(message).suggest("write numbers with the units d, h, m, s or ms, as in \"1m\" or \"1m30s\"")
    };
    if text.is_empty() {
        return Err(refusal());
    }
    let (mut rest, mut total_ms, mut smaller) = (text, 0_u64, &UNITS[..]);
    while !rest.is_empty() {
        let (number, tail) = split_while(rest, |byte| byte.is_ascii_digit());
        let (unit, tail) = split_while(tail, |byte| byte.is_ascii_alphabetic());
        if number.is_empty() {
            return Err(refusal());
        }
        if unit.is_empty() && tail.is_empty() && number.len() == text.len() {
            let refusal = Refusal::new(format!("{} has no unit", quoted(text)));
            return Err(refusal.suggest(format!("write \"{number}s\" for seconds or \"{number}ms\" for milliseconds")));
        }
        if tail.starts_with('.') || unit.is_empty() {
            return Err(refusal());
        }
        let Some(position) = UNITS.iter().position(|&(name, _)| name == unit) else {
            return Err(unknown_unit(unit));
        };
        let Some(later) = smaller.iter().position(|&(name, _)| name == unit) else {
            let message = format!("{} has {unit} after a unit that is not larger", quoted(text));
            return Err(Refusal::new(message).suggest("write each unit once, the largest first"));
        };
        // Only digits are here, so the one way to fail is a number too large.
        let number = number.parse::<u64>().unwrap_or(u64::MAX);
        total_ms = total_ms.saturating_add(number.saturating_mul(UNITS[position].1));
        (rest, smaller) = (tail, &smaller[later + 1..]);
    }
    Ok(total_ms)
}

fn unknown_unit(unit: &str) -> Refusal {
    let refusal = Refusal::new(format!("{} is not a unit of time: d, h, m, s or ms", quoted(unit)));
    let lower = unit.to_ascii_lowercase();
    match UNIT_NAMES.iter().find(|&&(name, _)| name.eq_ignore_ascii_case(&lower)) {
        Some((_, meant)) => refusal.suggest(format!("write {meant}")),
        None => refusal,
    }
}

fn split_while(text: &str, belongs: impl Fn(u8) -> bool) -> (&str, &str) {
    text.split_at(text.bytes().take_while(|&byte| belongs(byte)).count())
}

/// `"value"`, `"prefix*"` or `"*"`. A star means itself nowhere, so there is nothing to escape.
pub(super) fn pattern(text: &str) -> Result<Pattern, Refusal> {
    match text.find('*') {
        None => Ok(Pattern::Exact(text.to_owned())),
        Some(0) if text.len() == 1 => Ok(Pattern::Present),
        Some(at) if at + 1 == text.len() => Ok(Pattern::Prefix(text[..at].to_owned())),
        Some(at) => {
            let message = format!("{} has a * before its end, where it cannot stand for anything", quoted(text));
            let suggestion = match at {
                _ if text.starts_with('^') || text.contains(".*") => "patterns are not regular expressions".to_owned(),
                0 => "\"*\" alone matches any value".to_owned(),
                _ => format!("{} matches what starts like this", quoted(&text[..=at])),
            };
            Err(Refusal::new(message).suggest(suggestion))
        }
    }
}

/// A share in percent as hundredths of a percent.
pub(super) fn rollout(percent: f64) -> Result<u16, Refusal> {
    // A number written with two decimals comes out of the multiplication this near to the whole number it means.
    const ROUNDING_MAX: f64 = 1e-9;
    if !(0.0..=100.0).contains(&percent) {
        return Err(Refusal::new(format!("must be from 0 to 100, not {percent}")));
    }
    let bp = percent * f64::from(ROLLOUT_BP_ALL) / 100.0;
    if (bp - bp.round()).abs() > ROUNDING_MAX {
        let refusal = Refusal::new(format!("goes in steps of 0.01, and {percent} lies between two"));
        return Err(refusal.suggest(format!("write {}", bp.round() / 100.0)));
    }
    // The range was checked above: 0..=10,000.
    Ok(bp.round() as u16)
}

/// A point in time with its offset from UTC, RFC 3339.
pub(super) fn timestamp(text: &str) -> Result<Timestamp, Refusal> {
    const EXAMPLE: &str = "2027-01-01T00:00:00Z";
    text.parse().map_err(|_| {
        let refusal = Refusal::new(format!("{} is not a point in time with its offset from UTC", quoted(text)));
        let midnight = format!("{text}T00:00:00Z");
        let zulu = format!("{text}Z");
        let meant = [zulu, midnight].into_iter().find(|meant| meant.parse::<Timestamp>().is_ok());
        match meant {
            Some(meant) => refusal.suggest(format!("write \"{meant}\" if you mean UTC")),
            None => refusal.suggest(format!("write it as in \"{EXAMPLE}\"")),
        }
    })
}

/// One of a few words.
pub(super) fn one_of<T: Copy>(text: &str, words: &[(&'static str, T)]) -> Result<T, Refusal> {
    if let Some((_, value)) = words.iter().find(|(word, _)| *word == text) {
        return Ok(*value);
    }
    let listed: Vec<String> = words.iter().map(|(word, _)| format!("{word:?}")).collect();
    let refusal = Refusal::new(format!("{} is not one of {}", quoted(text), listed.join(", ")));
    Err(match nearest(text, words.iter().map(|&(word, _)| word)) {
        Some(word) => refusal.suggest(format!("did you mean {word:?}?")),
        None => refusal,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations() {
        let cases = [("500ms", 500), ("1s", 1000), ("1m", 60_000), ("1h", 3_600_000), ("1d", 86_400_000)];
        for (text, ms) in cases.into_iter().chain([("7d", 604_800_000), ("1m30s", 90_000), ("1d2h3m4s5ms", 93_784_005)])
        {
            assert_eq!(duration(text), Ok(ms), "{text}");
        }
        assert_eq!(duration("99999999999999999999d"), Ok(u64::MAX));
        assert_eq!(duration("0s"), Ok(0));
        for text in
            ["", "s", "1", "1x", "1.5s", "30s1m", "1s1s", "1m 30s", "-1s", "+1s", " 1s", "1s ", "1ß", "1s5", "1MIN"]
        {
            assert!(duration(text).is_err(), "{text}");
        }
        assert_eq!(duration("5mins").unwrap_err().suggestion.unwrap(), "write m");
    }

    #[test]
    fn patterns() {
        assert_eq!(pattern("*"), Ok(Pattern::Present));
        assert_eq!(pattern("/a*"), Ok(Pattern::Prefix("/a".into())));
        assert_eq!(pattern(""), Ok(Pattern::Exact(String::new())));
        for text in ["**", "*a", "a*b", "a**", "a*b*"] {
            assert!(pattern(text).is_err(), "{text}");
        }
        for text in ["^/a.*$", "/a.*/b", "^/a*$"] {
            assert_eq!(pattern(text).unwrap_err().suggestion.unwrap(), "patterns are not regular expressions");
        }
    }

    #[test]
    fn every_hundredth_of_a_percent_is_a_share() {
        for bp in 0..=10_000_u16 {
            let percent: f64 = format!("{}.{:02}", bp / 100, bp % 100).parse().unwrap();
            assert_eq!(rollout(percent), Ok(bp));
        }
        for percent in [33.333, -0.01, 100.01, f64::NAN, f64::INFINITY, 0.001] {
            assert!(rollout(percent).is_err(), "{percent}");
        }
    }
}
