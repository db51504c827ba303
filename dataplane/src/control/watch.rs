//! Tells when the policy file may have new content.
//!
//! Editors and configuration tools replace files rather than write into them, and often what they replace is a link on
//! the way: in a mounted ConfigMap `policy.toml` is a link to `..data/policy.toml` and `..data` one to a folder with a date
//! for a name, and a new version is a new folder and another `..data`. So what is watched is every *step* of the path: each
//! symbolic link that leads to the file, and the file itself, by their names in their folders. What else happens in these
//! folders concerns nobody.
//!
//! Where the links lead may change with any event. So [`Watch::follow`] walks the path anew; it is to be called before the
//! file is read, or what changes in between would be missed.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::MetadataExt,
    path::{Component, Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use notify::{
    Event, EventKind, RecommendedWatcher, RecursiveMode, Watcher,
    event::{AccessKind, AccessMode, ModifyKind},
};

/// Links on one path: as many as the kernel follows.
const LINKS_MAX: usize = 40;

/// Watches one file by its path.
pub(super) struct Watch {
    path: PathBuf,
    watcher: RecommendedWatcher,
    /// Shared with the thread that gets the events.
    steps: Arc<Mutex<BTreeSet<PathBuf>>>,
    /// The folders of the steps.
    folders: BTreeSet<PathBuf>,
}

impl Watch {
    /// Watches the file at this path. `changed` is told the step that changed, on a thread of its own.
    ///
    /// # Errors
    ///
    /// When the system cannot watch, or none of the folders on the way.
    pub(super) fn start(path: &Path, changed: impl Fn(&Path) + Send + 'static) -> notify::Result<Self> {
        let steps = Arc::new(Mutex::new(BTreeSet::new()));
        let known = Arc::clone(&steps);
        let watcher = notify::recommended_watcher(move |event: notify::Result<Event>| match event {
            Ok(event) => {
                let concerned = {
                    let steps = known.lock().unwrap_or_else(PoisonError::into_inner);
                    event.paths.iter().find(|path| steps.contains(*path))
                };
                if let Some(step) = concerned.filter(|step| is_finished(&event.kind, step)) {
                    changed(step);
                }
            }
            Err(error) => tracing::warn!(%error, "watching the policy file failed; SIGHUP still reads it"),
        })?;
        let mut watch = Self { path: path.to_owned(), watcher, steps, folders: BTreeSet::new() };
        watch.try_follow()?;
        Ok(watch)
    }

    /// Watches where the path leads now.
    pub(super) fn follow(&mut self) {
        if let Err(error) = self.try_follow() {
            tracing::warn!(%error, path = %self.path.display(), "the policy file is not watched; SIGHUP still reads it");
        }
    }

    /// The error is that of a folder, where none can be watched.
    fn try_follow(&mut self) -> notify::Result<()> {
        let steps = steps(&self.path)?;
        let wanted: BTreeSet<_> = steps.iter().filter_map(|step| step.parent()).map(Path::to_owned).collect();
        // Known before anything can happen to them.
        *self.steps.lock().unwrap_or_else(PoisonError::into_inner) = steps;
        for left in self.folders.difference(&wanted) {
            // It may be gone, and the watch with it.
            let _ = self.watcher.unwatch(left);
        }
        let (mut folders, mut outcome) = (BTreeSet::new(), Ok(()));
        for folder in wanted {
            // Also those that were watched: another folder may have taken the name.
            match self.watcher.watch(&folder, RecursiveMode::NonRecursive) {
                Ok(()) => drop(folders.insert(folder)),
                Err(error) => outcome = Err(error),
            }
        }
        self.folders = folders;
        if self.folders.is_empty() { outcome } else { Ok(()) }
    }
}

/// The links that lead to a file, and the file itself or what is missing on the way: each one's path without any link.
fn steps(path: &Path) -> std::io::Result<BTreeSet<PathBuf>> {
    let mut steps = BTreeSet::new();
    let mut links = 0;
    let mut at = PathBuf::new();
    // What is still to be walked, the next part last.
    let mut ahead = parts(&std::path::absolute(path)?);
    while let Some(part) = ahead.pop() {
        match part.components().next() {
            Some(Component::Normal(name)) => at.push(name),
            Some(Component::ParentDir) => {
                at.pop();
                continue;
            }
            Some(Component::RootDir) => {
                at = PathBuf::from("/");
                continue;
            }
            _ => continue,
        }
        let target = fs::read_link(&at).ok().filter(|_| links < LINKS_MAX);
        if target.is_some() || ahead.is_empty() || !at.exists() {
            steps.insert(at.clone());
        }
        if let Some(target) = target {
            links += 1;
            at.pop();
            ahead.extend(parts(&target));
        }
    }
    Ok(steps)
}

/// The parts of a path, the first one last.
fn parts(path: &Path) -> Vec<PathBuf> {
    path.components().rev().map(|part| PathBuf::from(part.as_os_str())).collect()
}

/// Whether an event may have put new content in place: a file closed after writing, something renamed or linked; or taken
/// it away, which is worth saying. A write that goes on is no reason to look: half a policy may be a valid one.
fn is_finished(kind: &EventKind, step: &Path) -> bool {
    match kind {
        EventKind::Access(AccessKind::Close(AccessMode::Write))
        | EventKind::Remove(_)
        | EventKind::Modify(ModifyKind::Name(_)) => true,
        // A file that is only just there is still to be written, and then closed. One that has another name was written
        // under that one.
        EventKind::Create(_) => fs::symlink_metadata(step).is_ok_and(|made| !made.is_file() || made.nlink() > 1),
        _ => false,
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use std::{os::unix::fs::symlink, sync::mpsc, time::Duration};

    use tempfile::TempDir;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(30);

    /// A folder whose own path has no link in it.
    fn folder() -> (TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().canonicalize().unwrap();
        (folder, path)
    }

    fn started(path: &Path) -> (Watch, mpsc::Receiver<PathBuf>) {
        let (tell, told) = mpsc::channel();
        let watch = Watch::start(path, move |step| drop(tell.send(step.to_owned()))).unwrap();
        (watch, told)
    }

    #[test]
    fn only_what_concerns_the_file_is_told() {
        let (_keep, folder) = folder();
        let path = folder.join("policy.toml");
        fs::write(&path, "1").unwrap();
        let (watch, told) = started(&path);
        let others_change = || {
            let [one, two] = ["one", "policy.toml.swp"].map(|name| folder.join(name));
            fs::write(&one, "1").unwrap();
            fs::rename(&one, &two).unwrap();
            symlink("two", &one).unwrap();
            fs::remove_file(&one).unwrap();
        };
        let other = folder.join("policy.toml.swp");
        // Each of these is one event; what a new name is for is looked up when its event comes.
        let changes: [&dyn Fn() -> std::io::Result<()>; 4] =
            [&|| fs::remove_file(&path), &|| fs::hard_link(&other, &path), &|| fs::remove_file(&path), &|| {
                symlink(&other, &path)
            }];
        for change in changes {
            others_change();
            change().unwrap();
            assert_eq!(told.recv_timeout(PATIENCE).as_ref(), Ok(&path));
        }
        others_change();
        drop(watch);
        assert_eq!(told.iter().count(), 0, "nothing else was told");
    }

    #[test]
    fn a_new_file_is_told_once_it_is_written() {
        let (_keep, folder) = folder();
        let path = folder.join("policy.toml");
        let (watch, told) = started(&path);
        fs::write(&path, "1").unwrap();
        assert_eq!(told.recv_timeout(PATIENCE).as_ref(), Ok(&path));
        fs::rename(&path, folder.join("away")).unwrap();
        fs::rename(folder.join("away"), &path).unwrap();
        assert_eq!(told.recv_timeout(PATIENCE).as_ref(), Ok(&path));
        drop(watch);
    }

    #[test]
    fn every_link_on_the_way_is_a_step() {
        let (_keep, folder) = folder();
        for version in ["..1", "..2"] {
            fs::create_dir(folder.join(version)).unwrap();
            fs::write(folder.join(version).join("policy.toml"), version).unwrap();
        }
        symlink("..1", folder.join("..data")).unwrap();
        symlink("..data/policy.toml", folder.join("policy.toml")).unwrap();
        let path = folder.join("policy.toml");
        let of = |names: [&str; 3]| -> BTreeSet<PathBuf> { names.iter().map(|name| folder.join(name)).collect() };
        assert_eq!(steps(&path).unwrap(), of(["policy.toml", "..data", "..1/policy.toml"]));
        let (mut watch, told) = started(&path);
        let swap = |version: &str| {
            symlink(version, folder.join("..data_tmp")).unwrap();
            fs::rename(folder.join("..data_tmp"), folder.join("..data")).unwrap();
        };
        swap("..2");
        assert_eq!(told.recv_timeout(PATIENCE).as_ref(), Ok(&folder.join("..data")));
        watch.follow();
        // What was left is nobody's concern, and what is there now is.
        fs::write(folder.join("..1/policy.toml"), "3").unwrap();
        fs::write(folder.join("..2/policy.toml"), "4").unwrap();
        let next = told.iter().find(|step| *step != folder.join("..data"));
        assert_eq!(next, Some(folder.join("..2/policy.toml")));
    }

    #[test]
    fn links_that_lead_nowhere_or_in_circles_are_steps_too() {
        let (_keep, folder) = folder();
        symlink("b", folder.join("a")).unwrap();
        symlink("a", folder.join("b")).unwrap();
        symlink("missing/policy.toml", folder.join("c")).unwrap();
        let of = |names: &[&str]| -> BTreeSet<PathBuf> { names.iter().map(|name| folder.join(name)).collect() };
        assert_eq!(steps(&folder.join("a")).unwrap(), of(&["a", "b"]));
        assert_eq!(steps(&folder.join("c")).unwrap(), of(&["c", "missing", "missing/policy.toml"]));
        assert_eq!(steps(&folder.join("./x/../c")).unwrap(), of(&["c", "missing", "missing/policy.toml", "x"]));
    }
}
