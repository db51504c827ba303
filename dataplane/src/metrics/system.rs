//! What the kernel knows of this process, from /proc/self. A value that cannot be read is left out.

use std::fs;

/// Clock ticks a second in /proc/self/stat; the same on every Linux that Sluice runs on.
const TICKS_PER_SECOND: f64 = 100.0;

/// The process as the kernel sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct System {
    /// User and system time of all threads.
    pub(super) cpu_seconds: Option<f64>,
    /// Memory in use.
    pub(super) resident_bytes: Option<u64>,
    /// Open files, sockets included.
    pub(super) open_files: Option<u64>,
    /// How many may be open.
    pub(super) open_files_max: Option<u64>,
}

impl System {
    pub(super) fn read() -> Self {
        let text = |name: &str| fs::read_to_string(format!("/proc/self/{name}")).ok();
        Self {
            cpu_seconds: text("stat").and_then(|stat| cpu_seconds(&stat)),
            resident_bytes: resident_bytes(),
            // The listing itself has one open.
            open_files: fs::read_dir("/proc/self/fd").ok().map(|files| (files.count() as u64).saturating_sub(1)),
            open_files_max: text("limits").and_then(|limits| open_files_max(&limits)),
        }
    }
}

/// Fields 14 and 15; the second, the command's name in parentheses, may have spaces in it.
fn cpu_seconds(stat: &str) -> Option<f64> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    let mut ticks = || fields.next()?.parse::<f64>().ok();
    Some((ticks()? + ticks()?) / TICKS_PER_SECOND)
}

/// Memory in use.
pub(crate) fn resident_bytes() -> Option<u64> {
    fs::read_to_string("/proc/self/status").ok().and_then(|status| resident_bytes_of(&status))
}

fn resident_bytes_of(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib * 1024)
}

fn open_files_max(limits: &str) -> Option<u64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_words_are_understood() {
        let stat = "42 (a (b) c) S 1 42 42 0 -1 4194304 100 0 0 0 250 50 0 0 20 0 8 0 77 1000 200";
        assert_eq!(cpu_seconds(stat), Some(3.0));
        assert_eq!(resident_bytes_of("Name:\tx\nVmRSS:\t    2048 kB\n"), Some(2 * 1024 * 1024));
        assert_eq!(open_files_max("Max open files            1024                 4096   files\n"), Some(1024));
        assert_eq!(open_files_max("Max open files            unlimited   unlimited   files\n"), None);
        let here = System::read();
        assert!(here.resident_bytes > Some(0) && here.open_files > Some(0) && here.cpu_seconds.is_some());
    }
}
