//! What the settings ask of the machine that they are to run on.

use std::{fs, io, os::unix::fs::MetadataExt, path::Path, sync::Arc};

use super::{Settings, bounds::Violation};
use crate::{
    buckets::table::{GROUP_BYTES, SLOTS_PER_GROUP},
    server,
    store::setup::StorePlan,
};

/// All that this machine cannot give.
pub(super) fn lacks(settings: &Settings) -> Vec<Violation> {
    let cores = server::data_cpus(&settings.cores).err().map(|message| Violation { setting: "cores", message });
    let passwords = [
        ("resp.password_file", &settings.resp.password_file),
        ("postgres.password_file", &settings.postgres.password_file),
        ("http.token_file", &settings.http.token_file),
        ("shadow.identity_key_file", &settings.shadow.identity_key_file),
    ];
    let unreadable = passwords.into_iter().filter_map(|(setting, path)| {
        let message = read_password(path.as_deref()?).err()?;
        Some(Violation { setting, message })
    });
    // What is wrong with the URLs is not the machine's fault, and was found before.
    let store =
        StorePlan::new(&settings.redis, &settings.hot, 1, 0).err().filter(|error| error.setting != "redis.urls");
    let store = store.map(|error| Violation { setting: error.setting, message: error.why });
    let found = cores.into_iter().chain(unreadable).chain(store);
    found.chain(no_folder(settings)).chain(memory(settings, memory_bytes())).collect()
}

/// Whether the last good policy has no folder to be written into.
fn no_folder(settings: &Settings) -> Option<Violation> {
    let parent = settings.postgres.last_good.as_deref()?.parent()?;
    let folder = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
    let message = || format!("its folder {} does not exist", folder.display());
    (!folder.is_dir()).then(|| Violation { setting: "postgres.last_good", message: message() })
}

/// Whether the bucket table, by far the largest piece of memory, fits.
pub(super) fn lacks_memory(settings: &Settings) -> Option<Violation> {
    memory(settings, memory_bytes())
}

fn memory(settings: &Settings, has: Option<u64>) -> Option<Violation> {
    let groups = settings.limits.buckets.div_ceil(SLOTS_PER_GROUP).next_power_of_two();
    let needs = groups as u64 * GROUP_BYTES as u64;
    let message = |has| format!("needs {}, the system has {}", written(needs), written(has));
    has.filter(|&has| needs > has).map(|has| Violation { setting: "limits.buckets", message: message(has) })
}

/// The machine's memory, or the container's where that is less.
fn memory_bytes() -> Option<u64> {
    const CONTAINER: [&str; 2] = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"];
    let machine = fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
        line.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib * 1024)
    });
    let container = CONTAINER.iter().filter_map(|path| fs::read_to_string(path).ok()?.trim().parse().ok());
    container.chain(machine).min()
}

fn written(bytes: u64) -> String {
    let gib = bytes as f64 / f64::from(1 << 30);
    if gib >= 1.0 { format!("{} GiB", (gib * 10.0).round() / 10.0) } else { format!("{} MiB", bytes >> 20) }
}

/// The password of a file, which holds it as its only line.
///
/// # Errors
///
/// Why there is none, for people.
pub fn read_password(path: &Path) -> Result<Arc<str>, String> {
    let wrong = |why: &str| format!("{}: {why}", path.display());
    let text = fs::read_to_string(path).map_err(|error: io::Error| wrong(&format!("cannot be read: {error}")))?;
    let password = text.strip_suffix('\n').map_or(&*text, |line| line.strip_suffix('\r').unwrap_or(line));
    if password.is_empty() {
        return Err(wrong("is empty; leave the setting out to need no password"));
    }
    if password.contains('\n') {
        return Err(wrong("has more than one line; the password must be its only one"));
    }
    let mode = fs::metadata(path).map_or(0, |metadata| metadata.mode());
    if mode & 0o007 != 0 {
        tracing::warn!(path = %path.display(), "every user of this host can read the password file; try chmod o-rwx");
    }
    Ok(password.into())
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_that_does_not_fit_is_found() {
        let mut settings = Settings::default();
        assert!(memory(&settings, memory_bytes()).is_none());
        settings.limits.buckets = 4_000_000_000;
        let found = memory(&settings, Some(8 << 30)).unwrap();
        assert_eq!(found.message, "needs 128 GiB, the system has 8 GiB");
        assert!(memory(&settings, None).is_none());
    }
}
