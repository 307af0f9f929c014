//! `stanchion profile`: runs a program with `libstanchion_profile.so` in all its processes and shows how it
//! wrote its files.

mod advice;
mod facts;
mod show;

use crate::args::ProfileArgs;
use crate::exit::{Exit, Failed, OrExit};
use crate::{out, run};
use anyhow::{Context, anyhow};
use facts::{Facts, Whole};
use rustix::process::{Pid, Signal, kill_process};
use stanchion_format::config::Shown;
use stanchion_format::profile::{
    DIR_VARIABLE, GAP_VARIABLE, LIBRARY, LIBRARY_VARIABLE, Record, SUFFIX,
};
use std::ffi::OsString;
use std::fs::{DirBuilder, File};
use std::io::Write;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::signal::unix::{SignalKind, signal};

/// Longest gap and mean time between failures, seconds: a hundred years.
const SECONDS_MAX: f64 = 3.2e9;

/// Runs the command. Gives the program's own exit code.
pub fn profile(args: &ProfileArgs) -> Result<u8, Failed> {
    let gap_ms = seconds("--gap-s", args.gap_s)?.as_millis() as u64;
    if let Some(mtbf_s) = args.mtbf_s {
        seconds("--mtbf-s", mtbf_s)?;
    }
    let first = args.command.first().ok_or_else(|| anyhow!("there is no command"))?;
    let program = run::app::resolve(first).or_exit(Exit::Usage)?;
    let library = library()?;
    let records = Records::new(args.dir.as_deref())?;
    // Before the program runs for hours.
    let file = args.out.as_deref().map(|path| Ok((path, create(path)?))).transpose();
    let file: Option<(&Path, File)> = file.map_err(|e: Failed| e)?;
    let unix_ns = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos() as u64);
    let began = Instant::now();
    let status = launch(&program, args, &preload(&library)?, &records.dir, gap_ms)?;
    let whole = Whole { unix_ns, run_s: began.elapsed().as_secs_f64(), gap_ms };
    let mut facts = Facts::new(whole);
    records.read(&mut facts)?;
    let facts = facts.finish();
    let advice = advice::advise(&facts, args.mtbf_s);
    let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
    let text = if args.json {
        format!("{:#}\n", show::json(&args.command, code, &facts, &advice))
    } else {
        show::text(&facts, &advice)
    };
    match file {
        None => out::print(&text)?,
        Some((path, mut file)) => file
            .write_all(text.as_bytes())
            .with_context(|| format!("--out {}", path.display()))
            .or_exit(Exit::Storage)?,
    }
    Ok(code as u8)
}

fn create(path: &Path) -> Result<File, Failed> {
    File::create(path).with_context(|| format!("--out {}", path.display())).or_exit(Exit::Storage)
}

fn seconds(option: &str, value: f64) -> Result<Duration, Failed> {
    if (0.001..=SECONDS_MAX).contains(&value) {
        return Ok(Duration::from_secs_f64(value));
    }
    let text = anyhow!("{option} {value} is not between 0.001 and {SECONDS_MAX:.0} seconds");
    Err(Failed::new(Exit::Usage, text))
}

/// Where the library is: said by the environment, beside this program, or in the `lib` next to its directory.
fn library() -> Result<PathBuf, Failed> {
    if let Some(named) = std::env::var_os(LIBRARY_VARIABLE) {
        let path = PathBuf::from(&named);
        return std::fs::canonicalize(&path)
            .with_context(|| format!("{LIBRARY_VARIABLE}={}", path.display()))
            .or_exit(Exit::Usage);
    }
    let program = std::env::current_exe().context("the path of this program")?;
    let beside = program.parent().unwrap_or(Path::new("/"));
    let places = [beside.join(LIBRARY), beside.join("../lib").join(LIBRARY)];
    places.iter().find_map(|p| std::fs::canonicalize(p).ok()).ok_or_else(|| {
        let tried = places.map(|p| p.display().to_string()).join(" and ");
        anyhow!("{LIBRARY} is not where it belongs ({tried}); name it with {LIBRARY_VARIABLE}")
            .into()
    })
}

/// What LD_PRELOAD is to be: what is there stays in front.
fn preload(library: &Path) -> Result<OsString, Failed> {
    let text = library.to_string_lossy();
    if text.contains([' ', ':', '\t', '\n']) {
        return Err(anyhow!(
            "the path {} has a blank or colon, with which it cannot be preloaded; name another with \
             {LIBRARY_VARIABLE}",
            Shown::new(&text)
        )
        .into());
    }
    let mut value = std::env::var_os("LD_PRELOAD").unwrap_or_default();
    if !value.is_empty() {
        value.push(":");
    }
    value.push(library);
    Ok(value)
}

/// Runs the program to its end. What the terminal sends goes to it as well as to us; what only we get is
/// handed on.
fn launch(
    program: &Path,
    args: &ProfileArgs,
    preload: &OsString,
    dir: &Path,
    gap_ms: u64,
) -> Result<ExitStatus, Failed> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.context("the runtime cannot be made")?;
    let status: anyhow::Result<ExitStatus> = runtime.block_on(async {
        let mut int = signal(SignalKind::interrupt())?;
        let mut quit = signal(SignalKind::quit())?;
        let mut term = signal(SignalKind::terminate())?;
        let mut hup = signal(SignalKind::hangup())?;
        let mut command = tokio::process::Command::new(program);
        command.args(args.command.iter().skip(1));
        if let Some(name) = args.command.first() {
            command.arg0(name);
        }
        command.env("LD_PRELOAD", preload).env(DIR_VARIABLE, dir);
        command.env(GAP_VARIABLE, gap_ms.to_string()).env_remove(LIBRARY_VARIABLE);
        let mut child =
            command.spawn().with_context(|| format!("{} cannot be started", program.display()))?;
        let pid = child.id().and_then(|pid| Pid::from_raw(pid as i32));
        let hand_on = |signal| {
            if let Some(pid) = pid {
                let _gone_is_fine = kill_process(pid, signal);
            }
        };
        loop {
            tokio::select! {
                status = child.wait() => return Ok(status?),
                _ = term.recv() => hand_on(Signal::TERM),
                _ = hup.recv() => hand_on(Signal::HUP),
                _ = int.recv() => {}
                _ = quit.recv() => {}
            }
        }
    });
    Ok(status?)
}

/// The directory of the records.
struct Records {
    dir: PathBuf,
    temporary: bool,
}

impl Drop for Records {
    fn drop(&mut self) {
        if self.temporary {
            let _best_effort = std::fs::remove_dir_all(&self.dir);
        }
    }
}

impl Records {
    fn new(wanted: Option<&Path>) -> Result<Records, Failed> {
        let made = match wanted {
            Some(dir) => DirBuilder::new().recursive(true).create(dir).map(|()| dir.to_owned()),
            None => {
                let name = format!("stanchion-profile-{}", std::process::id());
                let dir = std::env::temp_dir().join(name);
                DirBuilder::new().mode(0o700).create(&dir).map(|()| dir)
            }
        };
        let named = wanted.unwrap_or(Path::new("a temporary directory")).display().to_string();
        // Absolute: programs change their directory.
        let dir = made
            .and_then(std::fs::canonicalize)
            .with_context(|| format!("records in {named}"))
            .or_exit(Exit::Storage)?;
        let records = Records { dir, temporary: wanted.is_none() };
        if !records.names()?.is_empty() {
            let text = anyhow!("--dir {named} has records of another run; give an empty one");
            return Err(Failed::new(Exit::Usage, text));
        }
        Ok(records)
    }

    fn names(&self) -> Result<Vec<PathBuf>, Failed> {
        let context = || format!("records in {}", self.dir.display());
        let mut names = Vec::new();
        for entry in std::fs::read_dir(&self.dir).with_context(context).or_exit(Exit::Storage)? {
            let path = entry.with_context(context).or_exit(Exit::Storage)?.path();
            if path.to_string_lossy().ends_with(SUFFIX) {
                names.push(path);
            }
        }
        names.sort();
        Ok(names)
    }

    fn read(&self, facts: &mut Facts) -> Result<(), Failed> {
        for path in self.names()? {
            let read = File::open(&path).map_err(Into::into).and_then(|mut f| Record::read(&mut f));
            match read {
                Ok(record) => facts.add(&record),
                Err(e) => {
                    out::say(&format!(
                        "warning: the record {} {e}; it is left out",
                        path.display()
                    ));
                    facts.unreadable += 1;
                }
            }
        }
        Ok(())
    }
}
