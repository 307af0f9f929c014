//! What goes from a prefix and what stays: `stanchion pin`, `unpin`, `prune`.

use crate::args::{PinArgs, PruneArgs};
use crate::exit::{Exit, Failed};
use crate::prefix::{Opened, unusable, warn_bad};
use crate::run::{give_back, lease};
use crate::{jobdir, out, settings, words};
use anyhow::anyhow;
use serde_json::json;
use stanchion_core::bugs::Bugs;
use stanchion_core::retention::{self, Keep};
use stanchion_format::index::IndexRecord;
use stanchion_format::peer::{Cause, Trouble};
use std::time::Duration;

/// EPERM: it is pinned.
const PINNED: Cause = Cause::Os(1);

fn named(record: &IndexRecord) -> String {
    let info = &record.info;
    format!("{} '{}' (number {})", words::kind(info.flags), info.name.escape_debug(), info.key.no)
}

/// `stanchion pin`.
pub fn pin(args: &PinArgs) -> Result<Exit, Failed> {
    change(args, true)
}

/// `stanchion unpin`.
pub fn unpin(args: &PinArgs) -> Result<Exit, Failed> {
    change(args, false)
}

fn change(args: &PinArgs, pinned: bool) -> Result<Exit, Failed> {
    let opened = Opened::new(&args.common, true)?;
    let record = opened.find(&args.dataset)?;
    let key = record.info.key;
    let done = if pinned { opened.prefix.pin(key) } else { opened.prefix.unpin(key) };
    let changed = done.map_err(|t| unusable(&opened.root, &t))?;
    if args.common.json {
        let mut value = words::dataset(&record.info);
        value["pinned"] = pinned.into();
        value["changed"] = changed.into();
        out::print_json(&value)?;
    } else {
        let now = match (pinned, changed) {
            (true, true) => "is kept until `stanchion unpin`",
            (true, false) => "was pinned before",
            (false, true) => "is pinned no more",
            (false, false) => "was not pinned",
        };
        out::print(&format!("{} {now}\n", named(&record)))?;
    }
    Ok(Exit::Success)
}

/// `stanchion prune`.
pub fn prune(args: &PruneArgs) -> Result<Exit, Failed> {
    let opened = Opened::new(&args.common, !args.dry_run)?;
    let settings = settings::gather(&[])?.settings;
    let keep = Keep {
        last: args.keep_last.unwrap_or(settings.number("keep_last")),
        every: args.keep_every.unwrap_or(settings.number("keep_every")),
    };
    if args.datasets.is_empty() && keep.last == 0 {
        let text = "name the datasets to delete, or how many checkpoints to keep (--keep-last N)";
        return Err(Failed::new(Exit::Usage, anyhow!(text)));
    }
    if args.dry_run {
        let doomed = doomed(args, &opened, keep)?;
        return tell(args, &opened, &doomed, None);
    }
    // A run deletes by itself, and must not lose what it is reading.
    let base = jobdir::base(&settings);
    let wait = Duration::from_millis(settings.number("lease_wait_ms"));
    let epoch = lease::take(&opened.prefix, &base, wait, "prune")?;
    let ended = doomed(args, &opened, keep).and_then(|doomed| {
        let mut gone = Vec::new();
        let mut failed = None;
        for record in doomed {
            match opened.prefix.delete(record.info.key) {
                Ok(()) => gone.push(record),
                Err(trouble) => {
                    failed = Some((record, trouble));
                    break;
                }
            }
        }
        tell(args, &opened, &gone, failed)
    });
    give_back(&opened.root, epoch, &[]);
    ended
}

fn doomed(args: &PruneArgs, opened: &Opened, keep: Keep) -> Result<Vec<IndexRecord>, Failed> {
    let pins = opened.prefix.pins().map_err(|t| unusable(&opened.root, &t))?;
    let (records, bad) = opened.index()?;
    warn_bad(&bad);
    if args.datasets.is_empty() {
        let keys = retention::doomed(&records, &pins, keep, Bugs::default());
        return Ok(records.into_iter().filter(|r| keys.contains(&r.info.key)).collect());
    }
    let found: Result<Vec<IndexRecord>, Failed> =
        args.datasets.iter().map(|name| opened.find(name)).collect();
    let found = found?;
    if let Some(pinned) = found.iter().find(|r| pins.contains(&r.info.key)) {
        let text =
            format!("{} is pinned; `stanchion unpin` it first; nothing was deleted", named(pinned));
        return Err(Failed::new(Exit::Failure, anyhow!(text)));
    }
    Ok(found)
}

fn tell(
    args: &PruneArgs,
    opened: &Opened,
    gone: &[IndexRecord],
    failed: Option<(IndexRecord, Trouble)>,
) -> Result<Exit, Failed> {
    if args.common.json {
        let gone: Vec<_> = gone.iter().map(|r| words::dataset(&r.info)).collect();
        let failed = failed.as_ref().map(
            |(r, t)| json!({"dataset": words::dataset(&r.info), "trouble": words::trouble(t)}),
        );
        out::print_json(&json!({
            "prefix": opened.root, "dry_run": args.dry_run, "deleted": gone, "failed": failed,
        }))?;
    } else {
        let done = if args.dry_run { "would be deleted" } else { "deleted" };
        let mut text = String::new();
        for record in gone {
            text += &format!("{}, {}: {done}\n", named(record), out::bytes(record.info.bytes));
        }
        if gone.is_empty() && failed.is_none() {
            text = "nothing is to be deleted\n".into();
        }
        out::print(&text)?;
    }
    let Some((record, trouble)) = failed else { return Ok(Exit::Success) };
    let hint = match trouble.cause {
        PINNED => "; it was pinned meanwhile",
        _ => "; its record is gone or whole, the same command goes on from there",
    };
    let text = format!("{} cannot be deleted: {trouble}{hint}", named(&record));
    Err(Failed::new(Exit::Storage, anyhow!(text)))
}
