//! What the records of all processes say together.

use serde::Serialize;
use stanchion_format::profile::{self, CLASS_ENDS, CLASSES, Cell, Kind, NO_RANK, Record};
use std::collections::{BTreeMap, BTreeSet};

/// What is known before any record is read.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Whole {
    /// When the program was started, since 1970.
    #[serde(skip)]
    pub unix_ns: u64,
    /// How long it ran.
    pub run_s: f64,
    /// Without a write for so long, a new burst begins.
    pub gap_ms: u64,
}

/// Writes: how many, their bytes, the time in them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Sum {
    pub writes: u64,
    pub bytes: u64,
    pub ns: u64,
}

impl Sum {
    fn add(&mut self, writes: u64, bytes: u64, ns: u64) {
        self.writes = self.writes.saturating_add(writes);
        self.bytes = self.bytes.saturating_add(bytes);
        self.ns = self.ns.saturating_add(ns);
    }
}

/// One class of sizes.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Class {
    /// Largest size in it; none for the last.
    pub up_to_bytes: Option<u64>,
    #[serde(flatten)]
    pub sum: Sum,
    /// Those of them that went through the C library's streams.
    pub stdio: Sum,
}

/// One process.
#[derive(Clone, Debug, Serialize)]
pub struct Process {
    pub rank: Option<u64>,
    pub node: String,
    pub pid: u64,
    pub program: String,
    #[serde(flatten)]
    pub sum: Sum,
    pub fsyncs: u64,
    pub fsync_ns: u64,
    pub close_ns: u64,
    pub files: u64,
    pub jumps: u64,
    pub bursts: u64,
}

impl Process {
    /// Time that it did not compute.
    pub fn blocked_ns(&self) -> u64 {
        self.sum.ns.saturating_add(self.fsync_ns).saturating_add(self.close_ns)
    }
}

/// One node.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Node {
    pub node: String,
    pub processes: u64,
    #[serde(flatten)]
    pub sum: Sum,
    /// What its processes wrote in the burst in which they wrote the most.
    pub largest_burst_bytes: u64,
}

/// Files whose paths differ in digits only.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Pattern {
    pub pattern: String,
    pub files: u64,
    pub opens: u64,
    #[serde(flatten)]
    pub sum: Sum,
    pub fsyncs: u64,
    pub fsync_ns: u64,
    pub close_ns: u64,
    pub jumps: u64,
    /// Files that several processes of one node wrote.
    pub shared: u64,
    /// Median of the bytes that one opening of a file brought.
    pub bytes_per_open: u64,
    #[serde(skip)]
    sizes: Vec<u64>,
}

/// Writes of all processes with no pause as long as the gap.
#[derive(Clone, Debug, Default, Serialize)]
pub struct JobBurst {
    /// Since the program was started.
    pub begin_s: f64,
    pub seconds: f64,
    pub processes: u64,
    pub writes: u64,
    pub bytes: u64,
    /// The most that one process was in writes, fsync and close.
    pub blocked_s: f64,
    /// By node.
    #[serde(skip)]
    nodes: BTreeMap<String, u64>,
}

/// One burst of one process, in nanoseconds since the start of the program.
#[derive(Clone, Debug)]
struct Piece {
    begin: i128,
    end: i128,
    process: usize,
    node: String,
    writes: u64,
    bytes: u64,
    blocked_ns: u64,
}

/// Everything.
#[derive(Debug, Serialize)]
pub struct Facts {
    #[serde(flatten)]
    pub whole: Whole,
    /// Number of ranks as the launcher said, or 0.
    pub ranks: u64,
    pub total: Sum,
    pub classes: Vec<Class>,
    /// Only of processes that are ranks: a launcher's own small files are nobody's checkpoint.
    #[serde(skip)]
    pub rank_classes: Vec<Class>,
    pub processes: Vec<Process>,
    pub nodes: Vec<Node>,
    pub files: Vec<Pattern>,
    pub bursts: Vec<JobBurst>,
    pub failed_writes: u64,
    pub untracked_writes: u64,
    pub renames: u64,
    pub writable_maps: u64,
    pub writable_map_bytes: u64,
    /// A process had more bursts or files than are told apart.
    pub overflowed: bool,
    pub unreadable: u64,
    #[serde(skip)]
    pieces: Vec<Piece>,
    #[serde(skip)]
    patterns: BTreeMap<String, Pattern>,
    /// Which processes wrote a file of a node.
    #[serde(skip)]
    writers: BTreeMap<(String, String), BTreeSet<u64>>,
}

impl Facts {
    /// Without any record.
    pub fn new(whole: Whole) -> Facts {
        let up_to = |i: usize| CLASS_ENDS.get(i).copied();
        let classes: Vec<Class> =
            (0..CLASSES).map(|i| Class { up_to_bytes: up_to(i), ..Class::default() }).collect();
        Facts {
            whole,
            ranks: 0,
            total: Sum::default(),
            rank_classes: classes.clone(),
            classes,
            processes: Vec::new(),
            nodes: Vec::new(),
            files: Vec::new(),
            bursts: Vec::new(),
            failed_writes: 0,
            untracked_writes: 0,
            renames: 0,
            writable_maps: 0,
            writable_map_bytes: 0,
            overflowed: false,
            unreadable: 0,
            pieces: Vec::new(),
            patterns: BTreeMap::new(),
            writers: BTreeMap::new(),
        }
    }

    /// Adds one process. Numbers are those of a file: they are added without trust.
    pub fn add(&mut self, record: &Record) {
        let head = &record.head;
        self.ranks = self.ranks.max(head.ranks);
        for (count, more) in [
            (&mut self.failed_writes, head.failed),
            (&mut self.untracked_writes, head.untracked),
            (&mut self.renames, head.renames),
            (&mut self.writable_maps, head.maps),
            (&mut self.writable_map_bytes, head.map_bytes),
        ] {
            *count = count.saturating_add(more);
        }
        let mut sum = Sum::default();
        for Cell { count, bytes, ns } in record.classes.iter().flatten() {
            sum.add(*count, *bytes, *ns);
        }
        add_classes(&mut self.classes, record);
        if head.rank != NO_RANK {
            add_classes(&mut self.rank_classes, record);
        }
        // It opened something, and left it at that.
        if sum.writes == 0 {
            return;
        }
        self.total.add(sum.writes, sum.bytes, sum.ns);
        let node = profile::text(&head.host);
        let mut process = Process {
            rank: (head.rank != NO_RANK).then_some(head.rank),
            node: node.clone(),
            pid: head.pid,
            program: profile::text(&head.program),
            sum,
            fsyncs: 0,
            fsync_ns: 0,
            close_ns: 0,
            files: 0,
            jumps: 0,
            bursts: 0,
        };
        self.add_files(record, &mut process);
        self.add_bursts(record, &mut process);
        self.processes.push(process);
    }

    fn add_files(&mut self, record: &Record, process: &mut Process) {
        for (row, file) in record.files.iter().enumerate() {
            if file.writes == 0 && file.opens == 0 {
                continue;
            }
            self.overflowed |= row == 0;
            let path = match profile::text(&file.path) {
                _ if row == 0 => "(others)".to_owned(),
                // No /proc, where the library could have read it.
                path if path.is_empty() => "(unknown)".to_owned(),
                path => path,
            };
            let pattern = pattern_of(&path);
            let p = self.patterns.entry(pattern.clone()).or_default();
            p.pattern = pattern;
            p.opens = p.opens.saturating_add(file.opens);
            p.sum.add(file.writes, file.bytes, file.ns);
            for (mine, all, n) in [
                (&mut process.fsyncs, &mut p.fsyncs, file.syncs),
                (&mut process.fsync_ns, &mut p.fsync_ns, file.sync_ns),
                (&mut process.close_ns, &mut p.close_ns, file.close_ns),
                (&mut process.jumps, &mut p.jumps, file.jumps),
            ] {
                *mine = mine.saturating_add(n);
                *all = all.saturating_add(n);
            }
            if file.writes > 0 {
                process.files += 1;
                p.sizes.push(file.bytes / file.opens.max(1));
                // Not a process that goes by the same rank: its parent or child, in turn.
                let who = process.rank.unwrap_or(process.pid);
                self.writers.entry((process.node.clone(), path)).or_default().insert(who);
            }
        }
    }

    fn add_bursts(&mut self, record: &Record, process: &mut Process) {
        let head = &record.head;
        // Each host's monotonic clock begins where it likes.
        let offset = i128::from(head.began_unix_ns)
            - i128::from(head.began_ns)
            - i128::from(self.whole.unix_ns);
        for burst in record.bursts.iter().filter(|b| b.writes > 0) {
            process.bursts += 1;
            self.pieces.push(Piece {
                begin: i128::from(burst.begin_ns) + offset,
                end: i128::from(burst.end_ns) + offset,
                process: self.processes.len(),
                node: process.node.clone(),
                writes: burst.writes,
                bytes: burst.bytes,
                blocked_ns: burst.ns.saturating_add(burst.sync_ns),
            });
        }
        self.overflowed |= record.bursts[profile::BURSTS - 1].writes > 0;
    }

    /// Puts together what the processes have in common.
    pub fn finish(mut self) -> Facts {
        self.merge_bursts();
        self.processes.sort_by(|a, b| {
            let key = |p: &Process| (p.rank.unwrap_or(NO_RANK), p.node.clone(), p.pid);
            key(a).cmp(&key(b))
        });
        let mut nodes: BTreeMap<String, Node> = BTreeMap::new();
        for p in &self.processes {
            let node = nodes.entry(p.node.clone()).or_default();
            node.node.clone_from(&p.node);
            node.processes += 1;
            node.sum.add(p.sum.writes, p.sum.bytes, p.sum.ns);
        }
        for (name, bytes) in self.bursts.iter().flat_map(|b| &b.nodes) {
            if let Some(node) = nodes.get_mut(name) {
                node.largest_burst_bytes = node.largest_burst_bytes.max(*bytes);
            }
        }
        self.nodes = nodes.into_values().collect();
        for ((_, path), who) in std::mem::take(&mut self.writers) {
            if let Some(p) = self.patterns.get_mut(&pattern_of(&path)) {
                p.files += 1;
                p.shared += u64::from(who.len() > 1 && path.starts_with('/'));
            }
        }
        self.files = std::mem::take(&mut self.patterns).into_values().collect();
        for p in &mut self.files {
            p.sizes.sort_unstable();
            p.bytes_per_open = p.sizes.get(p.sizes.len() / 2).copied().unwrap_or(0);
        }
        self.files.sort_by_key(|p| std::cmp::Reverse(p.sum.bytes));
        self
    }

    fn merge_bursts(&mut self) {
        let gap = i128::from(self.whole.gap_ms) * 1_000_000;
        self.pieces.sort_by_key(|p| p.begin);
        let mut groups: Vec<(i128, Vec<Piece>)> = Vec::new();
        for piece in std::mem::take(&mut self.pieces) {
            match groups.last_mut() {
                Some((end, group)) if piece.begin < *end + gap => {
                    *end = piece.end.max(*end);
                    group.push(piece);
                }
                _ => groups.push((piece.end, vec![piece])),
            }
        }
        self.bursts = groups.into_iter().map(|(end, group)| JobBurst::of(end, &group)).collect();
    }
}

impl JobBurst {
    fn of(end: i128, group: &[Piece]) -> JobBurst {
        let begin = group.first().map_or(end, |p| p.begin);
        let mut burst = JobBurst {
            begin_s: begin as f64 / 1e9,
            seconds: (end - begin) as f64 / 1e9,
            ..JobBurst::default()
        };
        let mut blocked: BTreeMap<usize, u64> = BTreeMap::new();
        for p in group {
            burst.writes = burst.writes.saturating_add(p.writes);
            burst.bytes = burst.bytes.saturating_add(p.bytes);
            let node = burst.nodes.entry(p.node.clone()).or_default();
            *node = node.saturating_add(p.bytes);
            let process = blocked.entry(p.process).or_default();
            *process = process.saturating_add(p.blocked_ns);
        }
        burst.processes = blocked.len() as u64;
        burst.blocked_s = blocked.values().max().copied().unwrap_or(0) as f64 / 1e9;
        burst
    }
}

fn add_classes(classes: &mut [Class], record: &Record) {
    for (kind, cells) in record.classes.iter().enumerate() {
        for (class, Cell { count, bytes, ns }) in classes.iter_mut().zip(cells) {
            class.sum.add(*count, *bytes, *ns);
            if kind == Kind::Stdio as usize {
                class.stdio.add(*count, *bytes, *ns);
            }
        }
    }
}

/// The path with `#` for each number in it.
fn pattern_of(path: &str) -> String {
    let mut pattern = String::with_capacity(path.len());
    for c in path.chars() {
        if !c.is_ascii_digit() {
            pattern.push(c);
        } else if !pattern.ends_with('#') {
            pattern.push('#');
        }
    }
    pattern
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(begin: i128, end: i128, process: usize, node: &str) -> Piece {
        Piece { begin, end, process, node: node.into(), writes: 1, bytes: 10, blocked_ns: 5 }
    }

    #[test]
    fn bursts_of_all_processes_are_one_if_no_gap_is_between_them() {
        let mut facts = Facts::new(Whole { unix_ns: 0, run_s: 1.0, gap_ms: 1 });
        let ms = 1_000_000;
        facts.pieces = vec![
            piece(20 * ms, 21 * ms, 0, "b"),
            piece(0, 5 * ms, 0, "a"),
            piece(2 * ms, 3 * ms, 1, "b"),
            piece(5 * ms + 1, 6 * ms, 1, "b"),
        ];
        facts.merge_bursts();
        assert_eq!(facts.bursts.len(), 2);
        let first = &facts.bursts[0];
        assert_eq!((first.bytes, first.writes, first.processes), (30, 3, 2));
        assert_eq!((first.nodes["a"], first.nodes["b"]), (10, 20));
        assert!((first.seconds - 0.006).abs() < 1e-9 && (first.blocked_s - 1e-8).abs() < 1e-12);
    }

    #[test]
    fn whatever_a_record_says_is_shown() {
        let mut bytes = vec![0xff; profile::RECORD_BYTES];
        for (at, word) in [profile::MAGIC, profile::VERSION, bytes.len() as u64].iter().enumerate()
        {
            bytes[8 * at..8 * (at + 1)].copy_from_slice(&word.to_le_bytes());
        }
        let record = Record::read(&mut &bytes[..]).expect("its head is right");
        let mut facts = Facts::new(Whole { unix_ns: 0, run_s: 0.0, gap_ms: 1000 });
        facts.add(&record);
        facts.add(&record);
        let facts = facts.finish();
        let advice = crate::profile::advice::advise(&facts, Some(1.0));
        let text = crate::profile::show::text(&facts, &advice);
        assert!(text.contains("What to choose") && facts.overflowed, "{text}");
    }

    #[test]
    fn numbers_in_paths_are_one() {
        assert_eq!(pattern_of("/a/ckpt.0012/rank_3.h5"), "/a/ckpt.#/rank_#.h#");
    }
}
