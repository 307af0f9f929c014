//! The commands that read a prefix: list, inspect, verify; and halt, which leaves a wish there.

use crate::args::{HaltArgs, InspectArgs, PrefixArgs, VerifyArgs};
use crate::exit::{Exit, Failed};
use crate::{out, settings, words};
use anyhow::anyhow;
use serde_json::{Value, json};
use stanchion_format::client::FLAG_CHECKPOINT;
use stanchion_format::config::Shown;
use stanchion_format::ids::SlotId;
use stanchion_format::index::{HaltFile, IndexRecord, Layout, LeaseFile};
use stanchion_format::layout::{Scheme, Sets};
use stanchion_format::manifest::Manifest;
use stanchion_format::peer::{Cause, Trouble};
use stanchion_io::prefix::{BadRecord, Prefix};
use std::io::IsTerminal;
use std::path::PathBuf;

/// An error of the prefix in words, with its code and what to do.
pub fn unusable(root: &std::path::Path, t: &Trouble) -> Failed {
    let hint = match t.cause {
        Cause::NoSpace => "; make room there, or give another with --prefix",
        // EROFS, EACCES, EPERM
        Cause::Os(30) => "; the file system is read-only: give another with --prefix",
        Cause::Os(13 | 1) => {
            "; give this user the right to write there, or another prefix with --prefix"
        }
        // ENOENT, ENOTDIR
        Cause::Missing | Cause::Os(2 | 20) => "; create it, or give another with --prefix",
        Cause::Fenced => "; another run has taken it over",
        _ => "",
    };
    Failed::new(Exit::Storage, anyhow!("the prefix {} cannot be used: {t}{hint}", root.display()))
}

/// A prefix for a tool.
pub struct Opened {
    pub prefix: Prefix,
    pub root: PathBuf,
}

impl Opened {
    /// The prefix of the arguments, environment or file.
    pub fn new(args: &PrefixArgs, write: bool) -> Result<Opened, Failed> {
        let mut options = Vec::new();
        if let Some(prefix) = &args.prefix {
            let text = prefix.to_str().ok_or_else(|| {
                let shown = Shown::new(&prefix.to_string_lossy());
                Failed::new(Exit::Usage, anyhow!("the path of the prefix '{shown}' is not UTF-8"))
            })?;
            options.push(("prefix".to_owned(), text.to_owned()));
        }
        let root = settings::gather(&options)?.prefix()?;
        let opened = if write { Prefix::open(&root) } else { Prefix::open_readonly(&root) };
        let prefix = opened.map_err(|t| unusable(&root, &t))?;
        Ok(Opened { prefix, root })
    }

    /// Its records, and those that cannot be used.
    pub fn index(&self) -> Result<(Vec<IndexRecord>, Vec<BadRecord>), Failed> {
        self.prefix.read_index().map_err(|t| unusable(&self.root, &t))
    }

    fn lease(&self) -> Option<LeaseFile> {
        self.prefix.read_lease().ok().flatten()
    }

    /// The newest record of this number or name.
    pub fn find(&self, wanted: &str) -> Result<IndexRecord, Failed> {
        let (records, bad) = self.index()?;
        let number: Option<u64> = wanted.parse().ok();
        let by_number = records.iter().rev().find(|r| number == Some(r.info.key.no.0));
        let by_name = || records.iter().rev().find(|r| r.info.name == wanted);
        if let Some(record) = by_number.or_else(by_name) {
            return Ok(record.clone());
        }
        let mut text = format!("{} has no dataset '{}'", self.root.display(), Shown::new(wanted));
        text += match records.len() {
            0 => "; it has none at all",
            _ => "; `stanchion list` shows what there is",
        };
        if !bad.is_empty() {
            text += &format!(" ({} of its records cannot be read)", bad.len());
        }
        Err(Failed::new(Exit::Failure, anyhow!(text)))
    }
}

/// The record that a restart would try first.
pub fn newest(records: &[IndexRecord]) -> Option<&IndexRecord> {
    records.iter().rev().find(|r| r.info.flags & FLAG_CHECKPOINT != 0)
}

fn bad_value(bad: &BadRecord) -> Value {
    json!({"file": bad.file, "trouble": words::trouble(&bad.trouble)})
}

/// Tells of records that cannot be used.
pub fn warn_bad(bad: &[BadRecord]) {
    for b in bad {
        let text = format!(
            "warning: the record {} cannot be used ({}); its dataset is left out, its files are still there",
            b.file, b.trouble.cause
        );
        out::say(&text);
    }
}

fn lease_value(lease: Option<&LeaseFile>) -> Value {
    lease.map_or(Value::Null, |l| {
        json!({"epoch": l.epoch.0, "host": l.host, "pid": l.pid, "unix_s": l.unix_s, "role": l.role})
    })
}

/// Records of older versions do not tell.
fn times_value(record: &IndexRecord) -> Value {
    record.times.as_ref().map_or(Value::Null, words::times)
}

/// The word of `flush_layout`.
fn layout(record: &IndexRecord) -> &'static str {
    match record.layout() {
        Layout::Files => "files",
        Layout::Containers => "containers",
    }
}

/// Who holds a lease, in words.
pub fn holder(lease: &LeaseFile) -> String {
    let who = match lease.role.as_str() {
        "orphans" => "the agents of a lost run",
        "scavenge" => "`stanchion scavenge`",
        "prune" => "`stanchion prune`",
        _ => "a run",
    };
    format!("{who} (process {} on {})", lease.pid, Shown::new(&lease.host))
}

/// `stanchion list`.
pub fn list(args: &PrefixArgs) -> Result<Exit, Failed> {
    let opened = Opened::new(args, false)?;
    let (records, bad) = opened.index()?;
    let newest = newest(&records).map(|r| r.info.key);
    let pins = opened.prefix.pins().map_err(|t| unusable(&opened.root, &t))?;
    let state = |r: &IndexRecord| if Some(r.info.key) == newest { "newest" } else { "complete" };
    let pinned = |r: &IndexRecord| pins.contains(&r.info.key);
    if args.json {
        let datasets: Vec<Value> = records
            .iter()
            .map(|r| {
                let mut value = words::dataset(&r.info);
                value["unix_s"] = r.unix_s.into();
                value["state"] = state(r).into();
                value["pinned"] = pinned(r).into();
                value["layout"] = layout(r).into();
                value["times"] = times_value(r);
                value
            })
            .collect();
        out::print_json(&json!({
            "prefix": opened.root, "datasets": datasets, "bad": bad.iter().map(bad_value).collect::<Vec<_>>(),
            "lease": lease_value(opened.lease().as_ref()),
        }))?;
        return Ok(Exit::Success);
    }
    warn_bad(&bad);
    if records.is_empty() {
        out::print(&format!("no datasets in {}\n", opened.root.display()))?;
    } else {
        let rows = records
            .iter()
            .map(|r| {
                vec![
                    r.info.key.no.to_string(),
                    r.info.name.escape_debug().to_string(),
                    words::kind(r.info.flags).into(),
                    r.info.ranks.to_string(),
                    r.info.files.to_string(),
                    out::bytes(r.info.bytes),
                    out::utc(r.unix_s),
                    format!("{}{}", state(r), if pinned(r) { ", pinned" } else { "" }),
                ]
            })
            .collect();
        let header = ["NUMBER", "NAME", "KIND", "RANKS", "FILES", "SIZE", "WHEN", "STATE"];
        out::print(&out::table(&header, &[0, 3, 4, 5], rows))?;
    }
    if let Some(lease) = opened.lease() {
        out::print(&format!("{} uses the prefix now\n", holder(&lease)))?;
    }
    Ok(Exit::Success)
}

/// `stanchion inspect`.
pub fn inspect(args: &InspectArgs) -> Result<Exit, Failed> {
    let opened = Opened::new(&args.common, false)?;
    let record = opened.find(&args.dataset)?;
    let mut slots: Vec<(SlotId, Result<Manifest, Trouble>)> = Vec::new();
    for (slot, _) in &record.slots {
        slots.push((*slot, opened.prefix.read_slot(&record, *slot)));
    }
    let broken = slots.iter().any(|(_, m)| m.is_err());
    let exit = if broken { Exit::Failure } else { Exit::Success };
    if args.common.json {
        let mut value = words::dataset(&record.info);
        value["prefix"] = json!(opened.root);
        value["unix_s"] = record.unix_s.into();
        value["times"] = times_value(&record);
        value["flushed_by"] =
            json!({"epoch": record.epoch.0, "incarnation": record.inc.to_string()});
        value["ranks_on"] = record
            .info
            .placement
            .iter()
            .map(|p| json!({"first": p.first.0, "count": p.count, "node": p.slot.0}))
            .collect();
        value["file_list"] =
            slots.iter().flat_map(|(slot, m)| files_value(*slot, m.as_ref().ok())).collect();
        value["troubles"] = slots
            .iter()
            .filter_map(|(slot, m)| {
                m.as_ref().err().map(|t| words::trouble(&t.clone().slot(*slot)))
            })
            .collect();
        out::print_json(&value)?;
        return Ok(exit);
    }
    out::print(&inspect_text(&record, &slots))?;
    for (slot, trouble) in slots.iter().filter_map(|(s, m)| m.as_ref().err().map(|t| (s, t))) {
        out::say(&format!("the list of files of node {slot} cannot be used: {}", trouble.cause));
    }
    Ok(exit)
}

fn files_value(slot: SlotId, manifest: Option<&Manifest>) -> Vec<Value> {
    manifest
        .into_iter()
        .flat_map(|m| &m.files)
        .map(|f| {
            json!({
                "rank": f.rank.0, "node": slot.0, "path": f.path, "bytes": f.bytes, "mode": f.mode & 0o7777,
                "chunks": f.chunks.len(),
            })
        })
        .collect()
}

fn inspect_text(record: &IndexRecord, slots: &[(SlotId, Result<Manifest, Trouble>)]) -> String {
    let info = &record.info;
    let mut facts = vec![
        vec![
            "dataset".into(),
            format!("'{}' (number {}, key {})", info.name.escape_debug(), info.key.no, info.key),
        ],
        vec!["kind".into(), words::kind(info.flags).into()],
        vec!["persistent since".into(), out::utc(record.unix_s)],
        vec!["ranks".into(), format!("{} on {} nodes", info.ranks, info.sets.slots)],
        vec!["size".into(), format!("{} in {} files", out::bytes(info.bytes), info.files)],
        vec!["redundancy".into(), scheme_words(&info.sets)],
    ];
    facts.push(vec!["chunks".into(), out::bytes(info.chunk_bytes.into())]);
    let mut files: Vec<(u32, Vec<String>)> = Vec::new();
    for (slot, manifest) in slots {
        for f in manifest.iter().flat_map(|m| &m.files) {
            let row = vec![
                f.rank.to_string(),
                slot.to_string(),
                f.bytes.to_string(),
                f.chunks.len().to_string(),
                format!("{:04o}", f.mode & 0o7777),
                f.path.escape_debug().to_string(),
            ];
            files.push((f.rank.0, row));
        }
    }
    files.sort_by_key(|(rank, _)| *rank);
    let rows = files.into_iter().map(|(_, row)| row).collect();
    let header = ["RANK", "NODE", "BYTES", "CHUNKS", "MODE", "FILE"];
    let mut text = out::table(&[], &[], facts);
    if let Some(times) = &record.times {
        let header = ["TIME", "LONGEST", "OF"];
        text += &format!("\n{}", out::table(&header, &[1], words::times_rows(times)));
    }
    format!("{text}\n{}", out::table(&header, &[0, 1, 2, 3], rows))
}

/// `stanchion verify`.
pub fn verify(args: &VerifyArgs) -> Result<Exit, Failed> {
    let opened = Opened::new(&args.common, false)?;
    let (records, bad) = match &args.dataset {
        Some(name) => (vec![opened.find(name)?], Vec::new()),
        None => {
            let (records, bad) = opened.index()?;
            let chosen =
                if args.all { records } else { newest(&records).cloned().into_iter().collect() };
            (chosen, bad)
        }
    };
    if records.is_empty() && bad.is_empty() {
        let root = opened.root.display();
        let text = match args.all {
            true => format!("{root} has no datasets: there is nothing to verify"),
            false => format!(
                "{root} has no checkpoint: there is nothing to verify (--all: outputs, too)"
            ),
        };
        return Err(Failed::new(Exit::Failure, anyhow!(text)));
    }
    warn_bad(&bad);
    let mut damaged = !bad.is_empty();
    let mut values = Vec::new();
    for record in &records {
        let troubles = verify_one(&opened, record)?;
        damaged |= !troubles.is_empty();
        if args.common.json {
            let mut value = words::dataset(&record.info);
            value["troubles"] = troubles.iter().map(words::trouble).collect();
            value["good"] = troubles.is_empty().into();
            values.push(value);
        } else {
            out::print(&verdict(record, &troubles))?;
        }
    }
    if args.common.json {
        out::print_json(&json!({
            "prefix": opened.root, "datasets": values, "bad": bad.iter().map(bad_value).collect::<Vec<_>>(),
            "good": !damaged,
        }))?;
    }
    Ok(if damaged { Exit::Failure } else { Exit::Success })
}

/// Bytes of one dataset, on a terminal only.
pub fn bar(record: &IndexRecord) -> Option<indicatif::ProgressBar> {
    std::io::stderr().is_terminal().then(|| {
        let style = indicatif::ProgressStyle::with_template(
            "{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec}",
        )
        .unwrap_or_else(|_| indicatif::ProgressStyle::default_bar());
        let bar = indicatif::ProgressBar::new(record.info.bytes).with_style(style);
        bar.set_message(record.info.name.escape_debug().to_string());
        bar
    })
}

fn verify_one(opened: &Opened, record: &IndexRecord) -> Result<Vec<Trouble>, Failed> {
    let bar = bar(record);
    let mut progress = |bytes: u64| {
        if let Some(bar) = &bar {
            bar.inc(bytes);
        }
    };
    let troubles = opened.prefix.verify(record, &mut progress);
    if let Some(bar) = &bar {
        bar.finish_and_clear();
    }
    troubles.map_err(|t| unusable(&opened.root, &t))
}

fn verdict(record: &IndexRecord, troubles: &[Trouble]) -> String {
    let info = &record.info;
    let name = format!(
        "{} '{}' (number {})",
        words::kind(info.flags),
        info.name.escape_debug(),
        info.key.no
    );
    if troubles.is_empty() {
        return format!("{name}: good, {} in {} files\n", out::bytes(info.bytes), info.files);
    }
    let mut text = format!("{name}: DAMAGED, not used for a restart unless a cache has it\n");
    for t in troubles {
        text += &format!("  {t}\n");
    }
    text
}

/// `stanchion halt`.
pub fn halt(args: &HaltArgs) -> Result<Exit, Failed> {
    let opened = Opened::new(&args.common, !args.show)?;
    let fail = |t: Trouble| unusable(&opened.root, &t);
    let mut wish = opened.prefix.read_halt().map_err(fail)?.unwrap_or_default();
    if args.unset {
        wish = HaltFile::default();
        opened.prefix.clear_halt().map_err(fail)?;
    } else if !args.show {
        let now = out::unix_s();
        let time = |text: &Option<String>| -> Result<Option<u64>, Failed> {
            let Some(text) = text else { return Ok(None) };
            let time = out::parse_time(text, now).ok_or_else(|| {
                let shown = Shown::new(text);
                let text = format!(
                    "'{shown}' is no time; give seconds since 1970, 2030-01-31T12:00:00Z, or from now +90s, +15m, +2h"
                );
                Failed::new(Exit::Usage, anyhow!(text))
            })?;
            Ok(Some(time))
        };
        wish.before_unix_s = time(&args.before)?.or(wish.before_unix_s);
        wish.after_unix_s = time(&args.after)?.or(wish.after_unix_s);
        wish.after_checkpoints = args.after_checkpoints.or(wish.after_checkpoints);
        wish.immediately |= args.immediately;
        let other = args.immediately
            || args.after_checkpoints.is_some()
            || args.before.is_some()
            || args.after.is_some();
        wish.now |= args.now || !other;
        opened.prefix.write_halt(&wish).map_err(fail)?;
    }
    let lease = opened.lease();
    if args.common.json {
        out::print_json(
            &json!({"prefix": opened.root, "halt": wish, "lease": lease_value(lease.as_ref())}),
        )?;
        return Ok(Exit::Success);
    }
    let who = lease.map_or("no run uses the prefix now; the next one sees".to_owned(), |l| {
        format!("{} sees", holder(&l))
    });
    out::print(&match halt_words(&wish) {
        None => "no wish to halt\n".to_owned(),
        Some(text) => format!("{who} the wish to halt {text}\n"),
    })?;
    Ok(Exit::Success)
}

/// A wish in words; `None` if there is none.
pub fn halt_words(wish: &HaltFile) -> Option<String> {
    let mut parts = Vec::new();
    if wish.immediately {
        parts.push("at once".to_owned());
    }
    if wish.now {
        parts.push("after the next complete checkpoint".to_owned());
    }
    if let Some(n) = wish.after_checkpoints {
        parts.push(format!("after {n} further checkpoints"));
    }
    if let Some(t) = wish.before_unix_s {
        parts.push(format!("before {}", out::utc(t)));
    }
    if let Some(t) = wish.after_unix_s {
        parts.push(format!("after {}", out::utc(t)));
    }
    (!parts.is_empty()).then(|| parts.join(", or "))
}

/// The redundancy of a dataset, in words.
fn scheme_words(sets: &Sets) -> String {
    let size = sets.set_size;
    match sets.scheme {
        Scheme::Rs { parities } => {
            format!("RS, sets of up to {size}, {parities} of which may be lost")
        }
        scheme => format!("{}, sets of up to {size}", scheme.as_str()),
    }
}
