//! Shared memory that killed MPI ranks leave behind: POSIX shared memory belongs to nobody once its
//! processes are gone, and MPICH's, for one, stays for ever (FM-V4).

use rustix::process::getuid;
use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Where POSIX shared memory is on Linux.
const DIR: &str = "/dev/shm";
/// how MPI libraries name theirs: MPICH (mpich_shm_, mpich_shar_tmp); Open MPI 5, 4 and its one-sided part; Intel MPI; UCX.
const NAMES: [&str; 6] =
    ["mpich_sh", "sm_segment.", "vader_segment.", "osc_rdma.", "Intel_MPI_", "ucx_shm_posix_"];

/// Removes what an MPI made since `since`, is ours, and is neither open in nor mapped by any process.
/// Returns how many. To be called when no rank of the job lives; other jobs' is in use and stays.
pub fn sweep(since: SystemTime) -> usize {
    let candidates = candidates(Path::new(DIR), since);
    if candidates.is_empty() {
        return 0;
    }
    // In this order: who makes one after the list was read is not in it, who made one before has it still.
    let used = in_use();
    let unused = candidates.iter().filter(|path| !used.contains(*path));
    unused.filter(|path| std::fs::remove_file(path).is_ok()).count()
}

fn candidates(dir: &Path, since: SystemTime) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
    entries
        .flatten()
        .filter(|e| {
            e.file_name().to_str().is_some_and(|name| NAMES.iter().any(|n| name.starts_with(n)))
        })
        .filter(|e| {
            e.metadata().is_ok_and(|m| {
                m.is_file()
                    && m.uid() == getuid().as_raw()
                    && m.modified().is_ok_and(|t| t >= since)
            })
        })
        .map(|e| e.path())
        .collect()
}

/// Files below `DIR` that any process of ours has open or mapped.
fn in_use() -> BTreeSet<PathBuf> {
    let mut used = BTreeSet::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        if !entry.file_name().as_encoded_bytes().iter().all(u8::is_ascii_digit) {
            continue;
        }
        for fd in std::fs::read_dir(entry.path().join("fd")).into_iter().flatten().flatten() {
            if let Ok(target) = std::fs::read_link(fd.path()) {
                used.insert(target);
            }
        }
        let maps = std::fs::read_to_string(entry.path().join("maps")).unwrap_or_default();
        // proc(5): the path is the rest of the line after five fields.
        let paths =
            maps.lines().filter_map(|line| line.find(DIR).map(|at| PathBuf::from(&line[at..])));
        used.extend(paths);
    }
    used
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn only_what_nobody_uses_and_an_mpi_made() {
        let name = |what: &str| Path::new(DIR).join(format!("{what}{}_test", std::process::id()));
        let [left, open, other] = ["mpich_sh", "sm_segment.", "someone_elses_"].map(name);
        for path in [&left, &open, &other] {
            std::fs::write(path, "x").expect("shared memory can be written");
        }
        let held = std::fs::File::open(&open).expect("it is there");
        let hour = Duration::from_secs(3600);
        assert!(
            !candidates(Path::new(DIR), SystemTime::now() + hour).contains(&left),
            "older ones stay"
        );
        assert!(sweep(SystemTime::now() - Duration::from_secs(60)) >= 1);
        assert!(!left.exists() && open.exists() && other.exists());
        drop(held);
        for path in [&open, &other] {
            std::fs::remove_file(path).expect("it is still there");
        }
    }
}
