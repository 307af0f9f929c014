//! How a checkpointer writes: the sizes of its calls, one behind the other in a file.

use anyhow::{Context, bail};
use std::io::Read;
use std::path::Path;
use std::process::Command;

/// Calls of a stream at most, and bytes of one.
const CALLS_MAX: usize = 1 << 22;
const CALL_BYTES_MAX: u64 = 1 << 30;

/// One process's BLCR checkpoint of NPB LU, class C, on 64 processes: calls and their size in bytes. How many calls and
/// bytes there are (975 and 23.0 MB) is from Ouyang, Marcarelli and Panda, "Enhancing Checkpoint Performance with
/// Staging IO and SSD" (2010); the classes are from memory of the same group's CRFS paper (2011) and not verified: half
/// of the calls under 64 B, a third of 4 to 16 KB, over half of the bytes in calls over 1 MB.
const LU_C_64: &[(usize, u64)] = &[
    (496, 18),
    (6, 150),
    (2, 1_000),
    (92, 3_800),
    (356, 7_300),
    (7, 25_000),
    (5, 180_000),
    (2, 340_000),
    (6, 920_000),
    (3, 4_255_000),
];

/// The calls above, each class spread evenly over the stream.
pub(super) fn blcr() -> Vec<u64> {
    let mut calls: Vec<(u64, u64)> = Vec::new();
    for (count, bytes) in LU_C_64 {
        // Where of 2^20 places each is; the middle of its share.
        calls.extend((0..*count).map(|n| (((2 * n + 1) << 19) as u64 / *count as u64, *bytes)));
    }
    calls.sort_unstable();
    calls.into_iter().map(|(_, bytes)| bytes).collect()
}

/// The calls of a recorded image: lines `seq,t_us,offset,size,dur_us`, perhaps compressed by gzip. They follow each
/// other in the file.
pub(super) fn trace(path: &Path) -> anyhow::Result<Vec<u64>> {
    let mut text = String::new();
    if path.extension().is_some_and(|e| e == "gz") {
        let done = Command::new("gzip").arg("-dc").arg(path).output();
        let done = done.context("gzip cannot be started")?;
        if !done.status.success() {
            bail!("{}: {}", path.display(), String::from_utf8_lossy(&done.stderr).trim());
        }
        text = String::from_utf8(done.stdout).context("a trace is text")?;
    } else {
        let file = std::fs::File::open(path);
        let mut file = file.with_context(|| format!("{} cannot be read", path.display()))?;
        file.read_to_string(&mut text)?;
    }
    parse(&text).with_context(|| path.display().to_string())
}

fn parse(text: &str) -> anyhow::Result<Vec<u64>> {
    let mut calls = Vec::new();
    let mut end = 0;
    for (n, line) in text.lines().enumerate().skip(1) {
        let fields: Vec<u64> = line.split(',').map_while(|f| f.trim().parse().ok()).collect();
        let &[_, _, offset, bytes, _] = fields.as_slice() else {
            bail!("line {}: five numbers are expected: seq,t_us,offset,size,dur_us", n + 1);
        };
        if offset != end || bytes > CALL_BYTES_MAX || calls.len() >= CALLS_MAX {
            bail!("line {}: calls follow each other, and are not too large nor too many", n + 1);
        }
        end += bytes;
        calls.push(bytes);
    }
    if end == 0 {
        bail!("nothing is written");
    }
    Ok(calls)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_blcr_like_stream_is_as_large_as_it_was_reported() {
        let calls = blcr();
        let bytes: u64 = calls.iter().sum();
        assert_eq!(calls.len(), 975);
        assert!((22_900_000..23_100_000).contains(&bytes), "{bytes}");
        assert_eq!(calls.iter().filter(|b| **b < 64).count(), 496);
        // No class in one place.
        let large: Vec<usize> = (0..calls.len()).filter(|n| calls[*n] > 1 << 20).collect();
        assert!(large[0] < 200 && large[2] > 750, "{large:?}");
    }

    #[test]
    fn traces_are_read_and_refused() {
        assert_eq!(parse("seq,t,o,s,d\n0,0,0,4096,24\n1,56,4096,18,20\n").unwrap(), [4096, 18]);
        for bad in ["", "h\n", "h\n0,0,0,x,1\n", "h\n0,0,1,2,3\n", "h\n0,0,0,2\n", "h\n0,0,0,0,1\n"]
        {
            assert!(parse(bad).is_err(), "{bad:?}");
        }
    }
}
