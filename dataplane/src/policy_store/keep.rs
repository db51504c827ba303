//! Keeps the last good policy on disk, off the executor: a disk may take its time, and be full.

use std::{rc::Rc, sync::Arc, time::Duration};

use policy_sync::stored::last_good;

use super::{Shared, sleep_or, status::note};

/// How long until a policy that could not be written is tried again.
const RETRY: Duration = Duration::from_secs(5);

/// Writes each policy that is in force, or the newest when several came while one was written. Never ends.
pub(super) async fn run(shared: Rc<Shared>) {
    let Some(path) = shared.settings().last_good.clone() else { return };
    let mut kept = Arc::clone(&shared.stored.borrow());
    loop {
        let newest = Arc::clone(&shared.stored.borrow());
        if Arc::ptr_eq(&newest, &kept) {
            shared.to_keep.wait().await;
            continue;
        }
        let (target, policy) = (path.clone(), Arc::clone(&newest));
        let outcome = glommio::executor().spawn_blocking(move || last_good::write(&target, &policy)).await;
        match outcome {
            Ok(()) => {
                kept = newest;
                shared.status.kept.add(1);
                note(&shared.status.keep_problem, "the last good policy on disk", None);
            }
            Err(error) => {
                shared.status.keep_failures.add(1);
                let problem = format!(
                    "{error}; until it is written, a restart without the policy store begins with an older one"
                );
                note(&shared.status.keep_problem, "the last good policy on disk", Some(problem));
                sleep_or(&shared.to_keep, RETRY).await;
            }
        }
    }
}
