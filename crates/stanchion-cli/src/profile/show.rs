//! The facts and the advice for people, and as JSON.

use super::advice::Advice;
use super::facts::{Facts, Pattern, Process, Sum};
use crate::out;
use serde_json::{Value, json};
use stanchion_format::config::Shown;
use std::ffi::OsString;
use std::fmt::Write as _;

/// Rows of a table that people read; the JSON has all.
const ROWS: usize = 24;

/// One object with all there is.
pub fn json(command: &[OsString], code: i32, facts: &Facts, advice: &Advice) -> Value {
    let command: Vec<String> = command.iter().map(|a| a.to_string_lossy().into_owned()).collect();
    json!({"command": command, "exit_code": code, "profile": facts, "advice": advice})
}

fn seconds(ns: u64) -> String {
    format!("{:.3} s", ns as f64 / 1e9)
}

/// `1 node`, `2 nodes`, `3 processes`.
fn count(n: u64, what: &str) -> String {
    let ending = match n {
        1 => "",
        _ if what.ends_with('s') => "es",
        _ => "s",
    };
    format!("{n} {what}{ending}")
}

fn share(part: u64, whole: u64) -> String {
    if whole == 0 { String::new() } else { format!("{:.1}", part as f64 * 100.0 / whole as f64) }
}

fn shown(text: &str) -> String {
    Shown::new(text).to_string()
}

/// The whole report.
pub fn text(facts: &Facts, advice: &Advice) -> String {
    let mut text = String::new();
    if facts.total.writes == 0 {
        text += "no write to a file was seen\n";
        text += "(not seen: programs that are linked statically, setuid, or on nodes that do not see --dir)\n";
        return text;
    }
    head(facts, &mut text);
    section(&mut text, "By size of a write", facts.classes.len(), classes(facts));
    section(&mut text, "By process", facts.processes.len(), processes(facts));
    section(&mut text, "By node", facts.nodes.len(), nodes(facts));
    let written: Vec<&Pattern> = facts.files.iter().filter(|f| f.sum.writes > 0).collect();
    section(&mut text, "By files (# stands for a number)", written.len(), files(&written));
    let title =
        format!("Bursts (no write for {} s begins the next)", facts.whole.gap_ms as f64 / 1e3);
    section(&mut text, &title, facts.bursts.len(), bursts(facts));
    text += "\nWhat to choose\n";
    for line in &advice.text {
        text += &wrap(line);
    }
    text
}

fn section(text: &mut String, title: &str, rows: usize, table: String) {
    let _never_fails = write!(text, "\n{title}\n{table}");
    if rows > ROWS {
        let _never_fails = writeln!(text, "... and {} more", rows - ROWS);
    }
}

fn head(facts: &Facts, text: &mut String) {
    let t = &facts.total;
    let fsync_ns: u64 = facts.processes.iter().map(|p| p.fsync_ns).fold(0, u64::saturating_add);
    let fsyncs: u64 = facts.processes.iter().map(|p| p.fsyncs).fold(0, u64::saturating_add);
    let mut line = |s: String| {
        text.push_str(&s);
        text.push('\n');
    };
    line(format!(
        "{} in {} by {} on {}; {} in them, {} in {}; the run took {:.3} s",
        out::bytes(t.bytes),
        count(t.writes, "write"),
        count(facts.processes.len() as u64, "process"),
        count(facts.nodes.len() as u64, "node"),
        seconds(t.ns),
        seconds(fsync_ns),
        count(fsyncs, "fsync"),
        facts.whole.run_s,
    ));
    if facts.ranks > 0 {
        let mut wrote: Vec<u64> = facts.processes.iter().filter_map(|p| p.rank).collect();
        wrote.dedup();
        line(format!("{} of {} ranks wrote", wrote.len(), facts.ranks));
    }
    for (n, what) in [
        (facts.failed_writes, "writes failed"),
        (facts.untracked_writes, "writes went to descriptors above 65535 and are not counted"),
        (facts.renames, "files were renamed"),
        (facts.writable_maps, "writable mappings of files: what goes through them is not counted"),
        (facts.unreadable, "records could not be read"),
    ] {
        if n > 0 {
            line(format!("{n} {what}"));
        }
    }
    if facts.overflowed {
        line("a process had more files or bursts than are told apart: the rest is in `(others)` and its last burst".into());
    }
}

fn sums(sum: &Sum, of: &Sum) -> [String; 6] {
    [
        sum.writes.to_string(),
        share(sum.writes, of.writes),
        out::bytes(sum.bytes),
        share(sum.bytes, of.bytes),
        seconds(sum.ns),
        share(sum.ns, of.ns),
    ]
}

fn classes(facts: &Facts) -> String {
    let mut low = 0;
    let mut rows = Vec::new();
    for class in &facts.classes {
        let name = match class.up_to_bytes {
            Some(end) => format!("{} - {}", size(low), size(end)),
            None => format!("> {}", size(low)),
        };
        low = class.up_to_bytes.unwrap_or(low);
        let mut row = vec![name];
        row.extend(sums(&class.sum, &facts.total));
        row.push(class.stdio.writes.to_string());
        rows.push(row);
    }
    let header = ["SIZE", "WRITES", "%", "BYTES", "%", "TIME", "%", "OF THESE STDIO"];
    out::table(&header, &[1, 2, 3, 4, 5, 6, 7], rows)
}

/// `256 K`: the ends of classes are whole.
fn size(bytes: u64) -> String {
    match bytes {
        0..1024 => format!("{bytes}"),
        1024..1_048_576 => format!("{} K", bytes >> 10),
        _ => format!("{} M", bytes >> 20),
    }
}

fn processes(facts: &Facts) -> String {
    let row = |p: &Process| {
        vec![
            p.rank.map_or("-".to_owned(), |r| r.to_string()),
            p.pid.to_string(),
            shown(&p.node),
            shown(p.program.rsplit('/').next().unwrap_or_default()),
            p.sum.writes.to_string(),
            out::bytes(p.sum.bytes),
            seconds(p.sum.ns),
            seconds(p.fsync_ns),
            seconds(p.close_ns),
            p.files.to_string(),
            p.jumps.to_string(),
        ]
    };
    let header = [
        "RANK", "PID", "NODE", "PROGRAM", "WRITES", "BYTES", "TIME", "FSYNC", "CLOSE", "FILES",
        "JUMPS",
    ];
    let rows = facts.processes.iter().take(ROWS).map(row).collect();
    out::table(&header, &[0, 1, 4, 5, 6, 7, 8, 9, 10], rows)
}

fn nodes(facts: &Facts) -> String {
    let rows = facts
        .nodes
        .iter()
        .take(ROWS)
        .map(|n| {
            vec![
                shown(&n.node),
                n.processes.to_string(),
                n.sum.writes.to_string(),
                out::bytes(n.sum.bytes),
                seconds(n.sum.ns),
                out::bytes(n.largest_burst_bytes),
            ]
        })
        .collect();
    let header = ["NODE", "PROCESSES", "WRITES", "BYTES", "TIME", "LARGEST BURST"];
    out::table(&header, &[1, 2, 3, 4, 5], rows)
}

fn files(written: &[&Pattern]) -> String {
    let rows = written
        .iter()
        .take(ROWS)
        .map(|f| {
            vec![
                f.files.to_string(),
                f.opens.to_string(),
                f.sum.writes.to_string(),
                out::bytes(f.sum.bytes),
                seconds(f.sum.ns),
                f.fsyncs.to_string(),
                f.jumps.to_string(),
                f.shared.to_string(),
                f.pattern.escape_debug().to_string(),
            ]
        })
        .collect();
    let header =
        ["FILES", "OPENS", "WRITES", "BYTES", "TIME", "FSYNCS", "JUMPS", "SHARED", "PATHS"];
    out::table(&header, &[0, 1, 2, 3, 4, 5, 6, 7], rows)
}

fn bursts(facts: &Facts) -> String {
    let mut before: Option<f64> = None;
    let mut rows = Vec::new();
    for (i, b) in facts.bursts.iter().take(ROWS).enumerate() {
        let interval = before.map_or(String::new(), |at| format!("{:.3} s", b.begin_s - at));
        before = Some(b.begin_s);
        rows.push(vec![
            (i + 1).to_string(),
            format!("{:.3} s", b.begin_s),
            interval,
            format!("{:.3} s", b.seconds),
            b.processes.to_string(),
            b.writes.to_string(),
            out::bytes(b.bytes),
            format!("{:.3} s", b.blocked_s),
        ]);
    }
    let header =
        ["#", "AT", "SINCE LAST", "LENGTH", "PROCESSES", "WRITES", "BYTES", "BLOCKED AT MOST"];
    out::table(&header, &[0, 1, 2, 3, 4, 5, 6, 7], rows)
}

/// Lines of a hundred columns, the second and further ones indented.
fn wrap(text: &str) -> String {
    const WIDTH: usize = 100;
    let mut out = String::from("-");
    let mut used = 1;
    for word in text.split_whitespace() {
        let length = word.chars().count();
        if used + 1 + length > WIDTH {
            out += "\n ";
            used = 1;
        }
        out.push(' ');
        out += word;
        used += 1 + length;
    }
    out.push('\n');
    out
}
