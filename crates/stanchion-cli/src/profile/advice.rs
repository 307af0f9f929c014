//! What to choose, each with the numbers that it follows from.

use super::facts::{Class, Facts, JobBurst};
use crate::out;
use serde::Serialize;
use stanchion_format::config::Settings;
use stanchion_format::limits::CHUNK_BYTES;

/// A burst of less than this part of the largest is a log line, not a checkpoint.
const CHECKPOINT_SHARE: u64 = 10;
/// Smaller ones cost more in metadata than they save.
const CHUNK_BYTES_SMALL: u64 = 64 << 10;
/// Writes up to this size are small: a page.
const SMALL_BYTES: u64 = 4 << 10;
/// Writes above this size are large.
const LARGE_BYTES: u64 = 1 << 20;

/// How a program's data comes in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Way {
    /// It writes nothing.
    None,
    /// Its own files, at paths that Stanchion gives.
    RoutedFiles,
    /// Its many small writes are gathered.
    Streams,
    /// Its arrays, without files.
    Regions,
}

/// The advice.
#[derive(Clone, Debug, Serialize)]
pub struct Advice {
    pub way_in: Way,
    /// For each node.
    pub pool_bytes: u64,
    pub chunk_bytes: u64,
    /// Checkpoints among the bursts.
    pub checkpoints: u64,
    /// From one's begin to the next one's, if there are two.
    pub interval_s: Option<f64>,
    /// The most that one process was in writes, fsync and close, of the whole run.
    pub blocked_s: f64,
    /// By Daly's formula.
    pub best_interval_s: Option<f64>,
    pub text: Vec<String>,
}

/// Looks at the facts.
pub fn advise(facts: &Facts, mtbf_s: Option<f64>) -> Advice {
    let largest = facts.bursts.iter().map(|b| b.bytes).max().unwrap_or(0);
    let checkpoints: Vec<&JobBurst> = facts
        .bursts
        .iter()
        .filter(|b| b.bytes > 0 && b.bytes >= largest / CHECKPOINT_SHARE)
        .collect();
    let blocked = facts.processes.iter().map(|p| p.blocked_ns()).max().unwrap_or(0);
    let mut advice = Advice {
        way_in: Way::None,
        pool_bytes: 0,
        chunk_bytes: u64::from(CHUNK_BYTES),
        checkpoints: checkpoints.len() as u64,
        interval_s: interval(&checkpoints),
        blocked_s: blocked as f64 / 1e9,
        best_interval_s: None,
        text: Vec::new(),
    };
    if facts.total.bytes == 0 {
        advice.text.push("Nothing was written: there is nothing to advise.".into());
        return advice;
    }
    if facts.ranks > 0 && facts.processes.iter().all(|p| p.rank.is_none()) {
        let text =
            "No rank wrote: what is above is the launcher's, and there is nothing to advise.";
        advice.text.push(text.into());
        return advice;
    }
    let (way, text) = way_in(facts);
    advice.way_in = way;
    advice.text.push(text);
    chunk(facts, &mut advice);
    pool(facts, &mut advice);
    mode(facts, &mut advice);
    best_interval(&checkpoints, mtbf_s, &mut advice);
    advice
}

fn percent(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 * 100.0 / whole as f64 }
}

fn sum(numbers: impl Iterator<Item = u64>) -> u64 {
    numbers.fold(0, u64::saturating_add)
}

fn way_in(facts: &Facts) -> (Way, String) {
    let small = |bytes: Option<u64>| bytes.is_some_and(|b| b <= SMALL_BYTES);
    let large = |bytes: Option<u64>| bytes.is_none_or(|b| b > LARGE_BYTES);
    // What the C library gathers is no system call yet.
    let calls_of = |c: &Class| c.sum.writes.saturating_sub(c.stdio.writes);
    let classes = if facts.ranks > 0 { &facts.rank_classes } else { &facts.classes };
    let writes = sum(classes.iter().map(|c| c.sum.writes));
    let bytes = sum(classes.iter().map(|c| c.sum.bytes));
    let calls = sum(classes.iter().map(calls_of));
    let small_calls = sum(classes.iter().filter(|c| small(c.up_to_bytes)).map(calls_of));
    let large_bytes = sum(classes.iter().filter(|c| large(c.up_to_bytes)).map(|c| c.sum.bytes));
    let ours = facts.processes.iter().filter(|p| facts.ranks == 0 || p.rank.is_some());
    let jumps = sum(ours.map(|p| p.jumps));
    let shared = sum(facts.files.iter().map(|f| f.shared));
    let small_share = percent(small_calls, calls);
    let large_share = percent(large_bytes, bytes);
    let jump_share = percent(jumps, writes);
    if shared > 0 {
        let text = format!(
            "Way in: routed files, after a change: {shared} files are written by several processes, \
             and a routed file belongs to one rank. Give each rank a file of its own, or protect its \
             part of the data as regions."
        );
        return (Way::RoutedFiles, text);
    }
    if jump_share > 1.0 {
        let text = format!(
            "Way in: routed files, unchanged: {jump_share:.0} % of the writes do not begin where the one \
             before ended, which a stream cannot do."
        );
        return (Way::RoutedFiles, text);
    }
    if calls > 0 && small_share >= 50.0 && calls >= writes / 2 {
        let text = format!(
            "Way in: streams: {small_share:.0} % of the {calls} system calls write 4 KiB or less, in \
             order; gathered in the pool they would cost a copy each and no system call. Routed files \
             work without a change, but do not make these calls fewer."
        );
        return (Way::Streams, text);
    }
    if large_share >= 90.0 {
        let text = format!(
            "Way in: regions: {large_share:.0} % of the bytes are in writes above 1 MiB, in order, that \
             is, whole arrays; protected as regions they need no files. Routed files do without a \
             change, and write the same."
        );
        return (Way::Regions, text);
    }
    let text = format!(
        "Way in: routed files, unchanged: each process writes its own files in order; {small_share:.0} % \
         of the system calls write 4 KiB or less, and {large_share:.0} % of the bytes are in writes \
         above 1 MiB."
    );
    (Way::RoutedFiles, text)
}

fn chunk(facts: &Facts, advice: &mut Advice) {
    // The files that carry most of the data.
    let size = facts.files.first().map_or(0, |f| f.bytes_per_open);
    let shown = out::bytes(size);
    let default = u64::from(CHUNK_BYTES);
    if size >= default / 4 {
        advice.text.push(format!(
            "Chunk: {}, the default: the files of most of the data have {shown} (median).",
            out::bytes(default)
        ));
        return;
    }
    advice.chunk_bytes = size.max(1).next_power_of_two().clamp(CHUNK_BYTES_SMALL, default);
    advice.text.push(format!(
        "Chunk: {}: a chunk holds data of one file only, and the files of most of the data have {shown} \
         (median).",
        out::bytes(advice.chunk_bytes)
    ));
}

fn pool(facts: &Facts, advice: &mut Advice) {
    let Some(node) = facts.nodes.iter().max_by_key(|n| n.largest_burst_bytes) else { return };
    let kept = Settings::default().number("cache_datasets");
    let sets = kept.saturating_add(1);
    let chunk = advice.chunk_bytes.max(1);
    // Each file of it ends with a chunk that is not full; rounding up is for one, the rest is left out.
    let one = node.largest_burst_bytes.div_ceil(chunk).saturating_mul(chunk);
    advice.pool_bytes = one.saturating_mul(sets);
    advice.text.push(format!(
        "Pool: {} for each node: the largest burst of one is {} ({}), in whole chunks, times \
         {kept} datasets kept (cache_datasets) and one that is being written. Redundancy comes on top: \
         with XOR over n nodes 1/(n-1) of it, with PARTNER as much again.",
        out::bytes(advice.pool_bytes),
        out::bytes(node.largest_burst_bytes),
        node.node.escape_debug(),
    ));
}

fn mode(facts: &Facts, advice: &mut Advice) {
    let share = advice.blocked_s * 100.0 / facts.whole.run_s.max(1e-9);
    advice.text.push(format!(
        "Mode: the process that wrote the longest was in writes, fsync and close for {:.3} s of {:.3} s \
         ({share:.1} %): that is the most that interleaving them with the computation can win. Whether \
         copy-on-write or incremental checkpoints would pay cannot be known from writes: they do not \
         show which memory changed between two of them.",
        advice.blocked_s, facts.whole.run_s,
    ));
}

fn interval(checkpoints: &[&JobBurst]) -> Option<f64> {
    let (first, last) = (checkpoints.first()?, checkpoints.last()?);
    let between = checkpoints.len().checked_sub(1).filter(|n| *n > 0)?;
    Some((last.begin_s - first.begin_s) / between as f64)
}

/// Daly's higher-order estimate of the best time between two checkpoints, each of which takes `cost`.
fn daly(cost: f64, mtbf: f64) -> f64 {
    if cost >= 2.0 * mtbf {
        return mtbf;
    }
    let ratio = cost / (2.0 * mtbf);
    (2.0 * cost * mtbf).sqrt() * (1.0 + ratio.sqrt() / 3.0 + ratio / 9.0) - cost
}

fn best_interval(checkpoints: &[&JobBurst], mtbf_s: Option<f64>, advice: &mut Advice) {
    let Some(mtbf) = mtbf_s else { return };
    if checkpoints.is_empty() {
        return;
    }
    let cost = checkpoints.iter().map(|b| b.blocked_s).sum::<f64>() / checkpoints.len() as f64;
    let best = daly(cost, mtbf);
    advice.best_interval_s = Some(best);
    let now =
        advice.interval_s.map_or(String::new(), |now| format!("; now they begin every {now:.1} s"));
    advice.text.push(format!(
        "Interval: {best:.1} s of computing between two checkpoints, by Daly's formula, for {cost:.3} s \
         that one blocks (mean of {} bursts) and a failure every {mtbf:.0} s{now}. Blocked for less, the \
         best interval is shorter, and less work is lost with a failure.",
        checkpoints.len(),
    ));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dalys_formula() {
        // Small costs: Young's sqrt(2 c M) is near.
        let best = daly(10.0, 86_400.0);
        assert!((best - ((2.0 * 10.0 * 86_400.0_f64).sqrt() - 10.0)).abs() < 4.0, "{best}");
        assert!((daly(100.0, 40.0) - 40.0).abs() < 1e-9);
        // Where both branches meet, they give the same but for the formula's own error.
        assert!((daly(79.999, 40.0) - 40.0).abs() < 5.0);
    }
}
