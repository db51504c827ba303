//! Tables for people.

use comfy_table::{Table, presets};
use jiff::Timestamp;

/// A table with these headings.
pub fn of(headings: &[&str], rows: Vec<Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header(headings.iter().copied()).add_rows(
        // What a name or comment holds must not steer the terminal.
        rows.into_iter().map(|row| row.into_iter().map(|text| plain(&text)).collect::<Vec<_>>()),
    );
    let lines: Vec<String> = table.lines().map(|line| format!("{}\n", line.trim_end())).collect();
    lines.concat()
}

/// A text without control characters.
pub fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

/// A time to the second.
pub fn time(time: &Timestamp) -> String {
    time.strftime("%Y-%m-%d %H:%M:%SZ").to_string()
}
