//! Which checkpoints in the prefix nobody needs any more (FM-S20).

use std::collections::BTreeSet;

use crate::bugs::{Bug, Bugs};
use stanchion_format::client::{FLAG_CHECKPOINT, FLAG_OUTPUT};
use stanchion_format::ids::Key;
use stanchion_format::index::IndexRecord;

/// What stays whatever comes after it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Keep {
    /// So many of the newest checkpoints; 0: all.
    pub last: u64,
    /// Those whose number is a multiple of this; 0: none of them for that.
    pub every: u64,
}

/// Checkpoints that may go, oldest first.
///
/// Counted are those of the line that the newest record goes on with: what was left behind when the job went on from something
/// older is no reason to drop what it goes on from. Outputs and pinned ones stay.
pub fn doomed(records: &[IndexRecord], pinned: &BTreeSet<Key>, keep: Keep, bugs: Bugs) -> Vec<Key> {
    let checkpoint = |r: &&IndexRecord| r.info.flags & FLAG_CHECKPOINT != 0;
    let Some(head) = records.iter().filter(checkpoint).max_by_key(|r| (r.inc, r.info.key)) else {
        return Vec::new();
    };
    let of_line = |r: &&IndexRecord| head.ancestry.admits(head.inc, r.info.key);
    let mut line: Vec<Key> =
        records.iter().filter(checkpoint).filter(of_line).map(|r| r.info.key).collect();
    line.sort_unstable_by(|a, b| b.cmp(a));
    let more = usize::from(bugs.on(Bug::PruneOneMore));
    let nth =
        usize::try_from(keep.last).ok().and_then(|last| line.get(last.checked_sub(1 + more)?));
    let Some(oldest_kept) = nth else { return Vec::new() };
    let goes = |r: &&IndexRecord| {
        let no = r.info.key.no.0;
        r.info.key < *oldest_kept
            && r.info.flags & FLAG_OUTPUT == 0
            && !pinned.contains(&r.info.key)
            && !(keep.every > 0 && no.is_multiple_of(keep.every))
    };
    let mut gone: Vec<Key> =
        records.iter().filter(checkpoint).filter(goes).map(|r| r.info.key).collect();
    gone.sort_unstable();
    gone
}

#[cfg(test)]
mod tests {
    use super::*;
    use stanchion_format::checksum::Crc;
    use stanchion_format::ids::{Ancestry, DatasetNo, Epoch, Incarnation, JobId};
    use stanchion_format::index::INDEX_VERSION;
    use stanchion_format::layout::{Scheme, Sets};
    use stanchion_format::peer::DatasetInfo;

    fn inc(count: u32) -> Incarnation {
        Incarnation { epoch: Epoch(1), count }
    }

    /// Dataset `no` of the incarnation `by`, whose line is `line`.
    fn record(no: u64, by: u32, line: &[(u32, u64)], flags: u32) -> IndexRecord {
        IndexRecord {
            version: INDEX_VERSION,
            job: JobId(1),
            epoch: Epoch(1),
            inc: inc(by),
            ancestry: Ancestry(line.iter().map(|(i, no)| (inc(*i), DatasetNo(*no))).collect()),
            info: DatasetInfo {
                key: Key { no: DatasetNo(no), inc: inc(by) },
                name: format!("ckpt.{no}"),
                flags,
                ranks: 1,
                sets: Sets::new(Scheme::Single, 1, 2),
                chunk_bytes: 4096,
                bytes: 0,
                files: 0,
                placement: Vec::new().into(),
            },
            unix_s: 0,
            slots: Vec::new(),
            containers: None,
            times: None,
            crc: Crc(0),
        }
    }

    fn numbers(records: &[IndexRecord], pinned: &[u64], last: u64, every: u64) -> Vec<u64> {
        let of = |no: &u64| records.iter().map(|r| r.info.key).find(|k| k.no.0 == *no);
        let pinned = pinned.iter().filter_map(of).collect();
        doomed(records, &pinned, Keep { last, every }, Bugs::default())
            .iter()
            .map(|k| k.no.0)
            .collect()
    }

    #[test]
    fn the_last_ones_each_kth_outputs_and_pinned_ones_stay() {
        // FM-S20
        let mut records: Vec<IndexRecord> =
            (1..=9).map(|no| record(no, 1, &[], FLAG_CHECKPOINT)).collect();
        records[2].info.flags |= FLAG_OUTPUT;
        records.push(record(10, 1, &[], FLAG_OUTPUT));
        assert_eq!(numbers(&records, &[], 0, 0), Vec::<u64>::new());
        assert_eq!(numbers(&records, &[], 9, 0), Vec::<u64>::new());
        assert_eq!(numbers(&records, &[], 2, 0), [1, 2, 4, 5, 6, 7]);
        assert_eq!(numbers(&records, &[5], 2, 4), [1, 2, 6, 7]);
        assert_eq!(numbers(&records, &[], u64::MAX, 0), Vec::<u64>::new());
        assert_eq!(numbers(&[], &[], 1, 0), Vec::<u64>::new());
    }

    #[test]
    fn what_was_left_behind_does_not_count() {
        // FM-S20, FM-S1: 1 to 7, then on from 5: 6 and 7 of the first line are no reason to drop 5 or 4.
        let mut records: Vec<IndexRecord> =
            (1..=7).map(|no| record(no, 1, &[], FLAG_CHECKPOINT)).collect();
        records.push(record(6, 2, &[(1, 5)], FLAG_CHECKPOINT));
        assert_eq!(numbers(&records, &[], 3, 0), [1, 2, 3]);
        // Older than what is kept they go like others.
        let on = (7..=9).map(|no| record(no, 2, &[(1, 5)], FLAG_CHECKPOINT));
        records.extend(on);
        assert_eq!(numbers(&records, &[], 2, 0), [1, 2, 3, 4, 5, 6, 6, 7, 7]);
        // None of a new line yet: the old one is all there is.
        assert_eq!(numbers(&records[..7], &[], 3, 0), [1, 2, 3, 4]);
    }
}
