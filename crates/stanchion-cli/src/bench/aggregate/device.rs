//! Devices: a directory on the disk as it is, and a loop device that the block-I/O controller holds to a bandwidth.

use anyhow::{Context, anyhow, bail};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

const BLKIO: &str = "/sys/fs/cgroup/blkio";

/// A file system on a device that is held to a number of bytes a second. Gone when dropped.
#[derive(Debug)]
pub(in crate::bench) struct Held {
    image: PathBuf,
    device: Option<String>,
    mounted: Option<PathBuf>,
    /// Where the limit is written, and the device's number.
    limits: Vec<PathBuf>,
    number: String,
}

fn call(program: &str, args: &[&str]) -> anyhow::Result<String> {
    let done = Command::new(program).args(args).output();
    let done = done.with_context(|| format!("{program} cannot be started"))?;
    if !done.status.success() {
        let words = String::from_utf8_lossy(&done.stderr).into_owned();
        bail!("{program} {}: {}", args.join(" "), words.trim());
    }
    Ok(String::from_utf8_lossy(&done.stdout).trim().to_owned())
}

fn text(path: &Path) -> anyhow::Result<&str> {
    path.to_str().ok_or_else(|| anyhow!("{} is not UTF-8", path.display()))
}

impl Held {
    /// Makes one of `size` bytes in a file in `dir`, mounted there, held to `bytes` bytes a second. `Err`: why it is not
    /// to be had.
    pub(in crate::bench) fn make(dir: &Path, size: u64, bytes: u64) -> anyhow::Result<Held> {
        if !rustix::process::geteuid().is_root() {
            bail!("it takes root to make a loop device and to hold it");
        }
        let limits = limits()?;
        let mut held = Held {
            image: dir.join("held.img"),
            device: None,
            mounted: None,
            limits,
            number: String::new(),
        };
        let image = text(&held.image)?.to_owned();
        call("fallocate", &["-l", &size.to_string(), &image])?;
        let device = call("losetup", &["--find", "--show", "--direct-io=on", &image])?;
        held.device = Some(device.clone());
        call("mkfs.ext4", &["-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", &device])?;
        let place = dir.join("held");
        std::fs::create_dir(&place)?;
        call("mount", &[&device, text(&place)?])?;
        held.mounted = Some(place);
        let number = std::fs::metadata(&device)?.rdev();
        held.number = format!("{}:{}", rustix::fs::major(number), rustix::fs::minor(number));
        held.limit(bytes).context("the device cannot be held")?;
        Ok(held)
    }

    pub(in crate::bench) fn dir(&self) -> &Path {
        self.mounted.as_deref().unwrap_or(&self.image)
    }

    fn limit(&self, bytes: u64) -> std::io::Result<()> {
        self.limits
            .iter()
            .try_for_each(|path| std::fs::write(path, format!("{} {bytes}", self.number)))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if !self.number.is_empty() {
            // 0: no limit.
            let _goes_with_the_device = self.limit(0);
        }
        if let Some(place) = self.mounted.as_deref().and_then(Path::to_str) {
            let _best_effort = call("umount", &[place]);
            let _best_effort = std::fs::remove_dir(place);
        }
        if let Some(device) = &self.device {
            let _best_effort = call("losetup", &["-d", device]);
        }
        let _best_effort = std::fs::remove_file(&self.image);
    }
}

/// The controller's files for this process, and for the kernel's threads that write pages back.
fn limits() -> anyhow::Result<Vec<PathBuf>> {
    let name = "blkio.throttle.write_bps_device";
    let root = Path::new(BLKIO).join(name);
    if !root.exists() {
        bail!("there is no block-I/O controller (cgroup v1) that could hold it");
    }
    let groups = std::fs::read_to_string("/proc/self/cgroup")?;
    let mine = groups.lines().find_map(|line| {
        let (_, rest) = line.split_once(':')?;
        let (names, path) = rest.split_once(':')?;
        names.split(',').any(|n| n == "blkio").then(|| path.to_owned())
    });
    let mine = mine.context("this process has no group of the block-I/O controller")?;
    let own = Path::new(BLKIO).join(mine.trim_start_matches('/')).join(name);
    Ok(if own == root { vec![root] } else { vec![root, own] })
}
