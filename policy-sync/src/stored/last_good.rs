//! The last good policy on disk, from which a gateway starts while the store does not answer.
//!
//! The file is text, one JSON object a line: what it is and its layout, the rows of [`StoredPolicy::rows`], and the XXH3
//! checksum of everything before the last line. It is written beside its place and moved there, so a reader finds the old
//! one or the new one and nothing between. A file that was cut, changed or written by another layout is refused.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, BufRead, BufReader, BufWriter, Read, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use thiserror::Error;
use xxhash_rust::xxh3::Xxh3Default;

use super::{ApplyError, StoredPolicy, policy::DiskRow};

/// The largest file that is read, in bytes: 1 GiB.
pub const BYTES_MAX: u64 = 1 << 30;
/// The layout of the file that this version writes and reads.
pub const LAYOUT: u32 = 1;

/// What the file says that it is.
const FORMAT: &str = "sluice last good policy";

/// Why there is no policy from the file, or none in it.
#[derive(Debug, Error)]
pub enum LastGoodError {
    /// It cannot be read or written.
    #[error("{}: {doing}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What was tried.
        doing: &'static str,
        /// What the system says.
        source: io::Error,
    },
    /// It is not what was written.
    #[error("{}: {what}; remove it, and it is written again when the store has answered", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// What it says is not a policy any more.
    #[error("{}: {source}", path.display())]
    Refused {
        /// The file.
        path: PathBuf,
        /// Why.
        source: ApplyError,
    },
}

#[derive(Deserialize, Serialize)]
struct Head {
    format: String,
    layout: u32,
}

#[derive(Deserialize, Serialize)]
struct Foot {
    xxh3: String,
}

/// Writes the policy to disk; when this returns it survives a loss of power.
///
/// # Errors
///
/// Whatever the file system has against it; the file that was there before is then still there.
pub fn write(path: &Path, policy: &StoredPolicy) -> Result<(), LastGoodError> {
    let mut beside = path.as_os_str().to_owned();
    beside.push(format!(".{}.new", std::process::id()));
    let beside = PathBuf::from(beside);
    let written = write_beside(&beside, policy).and_then(|()| {
        fs::rename(&beside, path)?;
        // The new name itself must reach the disk.
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        File::open(folder)?.sync_all()
    });
    written.map_err(|source| {
        let _ = fs::remove_file(&beside);
        LastGoodError::Io { path: path.into(), doing: "cannot be written", source }
    })
}

fn write_beside(path: &Path, policy: &StoredPolicy) -> io::Result<()> {
    // Identities in it may be secrets.
    let file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    let mut out = BufWriter::new(file);
    let mut checksum = Xxh3Default::new();
    let mut line = Vec::new();
    let mut put = |line: &mut Vec<u8>, out: &mut BufWriter<File>| {
        line.push(b'\n');
        checksum.update(line);
        out.write_all(line)?;
        line.clear();
        io::Result::Ok(())
    };
    serde_json::to_writer(&mut line, &Head { format: FORMAT.into(), layout: LAYOUT })?;
    put(&mut line, &mut out)?;
    for row in policy.rows() {
        let row = DiskRow::new(row).ok_or_else(|| io::Error::other("a row that no file can hold"))?;
        serde_json::to_writer(&mut line, &row)?;
        put(&mut line, &mut out)?;
    }
    serde_json::to_writer(&mut line, &Foot { xxh3: format!("{:016x}", checksum.digest()) })?;
    line.push(b'\n');
    out.write_all(&line)?;
    out.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()
}

/// Reads the policy from disk; `None` when there is no file.
///
/// # Errors
///
/// See [`LastGoodError`].
pub fn read(path: &Path) -> Result<Option<StoredPolicy>, LastGoodError> {
    let io_error = |source| LastGoodError::Io { path: path.into(), doing: "cannot be read", source };
    let damaged = |what: String| LastGoodError::Damaged { path: path.into(), what };
    let file = match File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file.map_err(io_error)?,
    };
    let metadata = file.metadata().map_err(io_error)?;
    if !metadata.is_file() {
        return Err(damaged("is not a regular file".into()));
    }
    if metadata.len() > BYTES_MAX {
        return Err(damaged(format!("is larger than {BYTES_MAX} bytes")));
    }
    let mut lines = BufReader::new(file.take(BYTES_MAX));
    let mut checksum = Xxh3Default::new();
    let (mut line, mut number, mut rows) = (Vec::new(), 0_usize, Vec::new());
    loop {
        line.clear();
        let length = lines.read_until(b'\n', &mut line).map_err(io_error)?;
        number += 1;
        if length == 0 {
            return Err(damaged("ends before its last line, the checksum".into()));
        }
        if number == 1 {
            let head: Head = serde_json::from_slice(&line)
                .map_err(|_| damaged("does not begin as a last good policy does".into()))?;
            if head.format != FORMAT || head.layout != LAYOUT {
                return Err(damaged(format!("has layout {} of {:?}; this is {LAYOUT}", head.layout, head.format)));
            }
        } else if let Ok(foot) = serde_json::from_slice::<Foot>(&line) {
            if foot.xxh3 != format!("{:016x}", checksum.digest()) {
                return Err(damaged("was changed since it was written: its checksum is another".into()));
            }
            break;
        } else {
            let row: DiskRow =
                serde_json::from_slice(&line).map_err(|error| damaged(format!("line {number}: {error}")))?;
            rows.push(row.into_row());
        }
        checksum.update(&line);
    }
    let refused = |source| LastGoodError::Refused { path: path.into(), source };
    StoredPolicy::default().apply(&rows).map_err(refused)
}
