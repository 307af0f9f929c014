//! `stanchion export`: a dataset's files under their own names.

use crate::args::ExportArgs;
use crate::exit::{Exit, Failed};
use crate::prefix::{Opened, bar, newest, warn_bad};
use crate::{out, words};
use anyhow::anyhow;
use serde_json::json;
use stanchion_format::config::Shown;
use stanchion_format::index::IndexRecord;
use stanchion_format::peer::{Cause, Trouble};
use stanchion_io::fs::PosixFs;
use stanchion_io::prefix::Export;
use stanchion_io::trouble::cause;

/// EEXIST.
const EXISTS: Cause = Cause::Os(17);

/// Writes the files.
pub fn export(args: &ExportArgs) -> Result<Exit, Failed> {
    let opened = Opened::new(&args.common, false)?;
    let record = match &args.dataset {
        Some(name) => opened.find(name)?,
        None => newest_of(&opened)?,
    };
    if opened.prefix.is_within(&args.to) {
        // A file that a record vouches for would be replaced behind the index's back (FM-S10).
        let text = format!("{} is the prefix itself; give another directory", args.to.display());
        return Err(Failed::new(Exit::Usage, anyhow!(text)));
    }
    let bar = bar(&record);
    let mut progress = |bytes: u64| {
        if let Some(bar) = &bar {
            bar.inc(bytes);
        }
    };
    let exported = PosixFs::open(&args.to, true)
        .map_err(|e| Trouble::new(cause(e)).file(args.to.display().to_string()))
        .and_then(|to| {
            let (name, replace) = (args.to.as_path(), args.replace);
            opened
                .prefix
                .export(&record, Export { to: &to, name, replace, progress: &mut progress })
        });
    if let Some(bar) = &bar {
        bar.finish_and_clear();
    }
    let done = exported.map_err(|t| failed(args, &record, &t))?;
    if args.common.json {
        let mut value = words::dataset(&record.info);
        value["to"] = json!(args.to);
        value["written"] = json!({"files": done.files, "bytes": done.bytes});
        value["same"] = done.same.into();
        out::print_json(&value)?;
    } else {
        let same = match done.same {
            0 => String::new(),
            n => format!("; {n} were there already"),
        };
        out::print(&format!(
            "{} '{}' (number {}): {} in {} files written to {}{same}\n",
            words::kind(record.info.flags),
            record.info.name.escape_debug(),
            record.info.key.no,
            out::bytes(done.bytes),
            done.files,
            args.to.display()
        ))?;
    }
    Ok(Exit::Success)
}

fn newest_of(opened: &Opened) -> Result<IndexRecord, Failed> {
    let (records, bad) = opened.index()?;
    warn_bad(&bad);
    newest(&records).cloned().ok_or_else(|| {
        let text = format!(
            "{} has no checkpoint; `stanchion list` shows what there is",
            opened.root.display()
        );
        Failed::new(Exit::Failure, anyhow!(text))
    })
}

fn failed(args: &ExportArgs, record: &IndexRecord, t: &Trouble) -> Failed {
    let (code, hint) = match t.cause {
        EXISTS => (
            Exit::Failure,
            "; it differs from what is exported: give another directory, or --replace",
        ),
        Cause::SamePath => (
            Exit::Failure,
            "; two ranks wrote files of this name, which cannot both have it: nothing was written",
        ),
        Cause::Damaged | Cause::Malformed | Cause::Size { .. } => (
            Exit::Failure,
            "; `stanchion verify` shows all that is damaged, `stanchion list` what else there is",
        ),
        Cause::NoSpace => (Exit::Storage, "; make room there, or give another directory"),
        Cause::Missing if t.file.as_deref() == args.to.to_str() => (Exit::Storage, "; create it"),
        _ => (Exit::Storage, "; what was written stays, the same command goes on from there"),
    };
    let name = Shown::new(&record.info.name);
    Failed::new(code, anyhow!("'{name}' cannot be exported to {}: {t}{hint}", args.to.display()))
}
