//! `stanchion status`: this user's jobs, as their runners tell.

use crate::args::StatusArgs;
use crate::exit::{Exit, Failed};
use crate::jobdir::{self, Found};
use crate::{out, settings};
use anyhow::{Context, anyhow};
use serde_json::{Value, json};
use stanchion_format::config::Shown;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// A runner answers at once or is stuck.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest answer, bytes.
const ANSWER_BYTES_MAX: u64 = 64 << 20;

/// Asks a runner.
pub(crate) fn ask(job: &Path) -> anyhow::Result<Value> {
    let mut socket =
        UnixStream::connect(job.join("runner.sock")).context("the runner cannot be reached")?;
    socket.set_read_timeout(Some(ANSWER_TIMEOUT))?;
    socket.set_write_timeout(Some(ANSWER_TIMEOUT))?;
    socket.write_all(b"status\n")?;
    let mut bytes = Vec::new();
    socket.take(ANSWER_BYTES_MAX).read_to_end(&mut bytes).context("the runner does not answer")?;
    serde_json::from_slice(&bytes).context("the runner's answer does not parse")
}

/// `running`, `orphaned` or `dead`.
fn state(found: &Found) -> &'static str {
    match (found.runner, found.agents.is_empty()) {
        (true, _) => "running",
        (false, false) => "orphaned",
        (false, true) => "dead",
    }
}

/// Shows the jobs.
pub fn status(args: &StatusArgs) -> Result<Exit, Failed> {
    let mut options = Vec::new();
    if let Some(dir) = &args.run_dir {
        options.push(("run_dir".to_owned(), dir.to_string_lossy().into_owned()));
    }
    let gathered = settings::gather(&options)?;
    let base = jobdir::base(&gathered.settings);
    let mut jobs = jobdir::all(&base);
    if let Some(wanted) = &args.job {
        jobs.retain(|f| {
            f.path == Path::new(wanted) || f.info.as_ref().is_some_and(|info| info.name == *wanted)
        });
        if jobs.is_empty() {
            let text = format!("there is no job '{}' below {}", Shown::new(wanted), base.display());
            return Err(Failed::new(Exit::Failure, anyhow!(text)));
        }
    }
    let mut values = Vec::new();
    for found in &jobs {
        let answer =
            if found.runner { ask(&found.path) } else { Err(anyhow!("the runner is gone")) };
        if args.json {
            values.push(json!({
                "dir": found.path, "state": state(found), "info": found.info, "agents_alive": found.agents,
                "error": answer.as_ref().err().map(|e| format!("{e:#}")),
                "status": answer.unwrap_or(Value::Null),
            }));
        } else {
            out::print(&text(found, answer))?;
        }
    }
    if args.json {
        out::print_json(&json!({"run_dir": base, "jobs": values}))?;
    } else if jobs.is_empty() {
        out::print(&format!("no jobs below {}\n", base.display()))?;
    }
    Ok(Exit::Success)
}

fn text(found: &Found, answer: anyhow::Result<Value>) -> String {
    let name = found.info.as_ref().map_or("?", |info| info.name.as_str());
    let mut text = format!("job '{}' in {}: ", Shown::new(name), found.path.display());
    match (state(found), answer) {
        ("orphaned", _) => {
            text += &format!(
                "its runner is gone; {} agents write the newest checkpoint to the prefix and leave\n",
                found.agents.len()
            );
        }
        ("dead", _) => {
            text += "nobody of it lives; the next `stanchion run` removes what it left\n"
        }
        (_, Err(e)) => text += &format!("{e:#}\n"),
        (_, Ok(status)) => text += &running(&status),
    }
    text
}

fn running(s: &Value) -> String {
    let number = |v: &Value| v.as_u64().unwrap_or(0);
    let mut text = format!(
        "{} for {}, {} ranks, launch {}, {} nodes lost\n",
        s["phase"].as_str().unwrap_or("?"),
        out::millis(number(&s["uptime_ms"])),
        s["ranks"].as_u64().map_or("?".into(), |n| n.to_string()),
        number(&s["runs"]),
        number(&s["lost"]),
    );
    if s["rebuild"].is_object() {
        let (done, bad) = (number(&s["rebuild"]["done_bytes"]), number(&s["rebuild"]["bad_bytes"]));
        text += &format!("  rebuilt {} of {}\n", out::bytes(done), out::bytes(bad));
    }
    let empty = Vec::new();
    let agents = s["agents"].as_array().unwrap_or(&empty);
    let rows = agents
        .iter()
        .map(|a| {
            let role = match (a["node"].as_u64(), a["alive"].as_bool()) {
                (_, Some(false)) => "lost".to_owned(),
                (Some(node), _) => format!("node {node}"),
                (None, _) => "spare".to_owned(),
            };
            let pid = a["pid"].as_u64().map_or("-".into(), |pid| pid.to_string());
            vec![
                format!("  {role}"),
                a["id"].to_string(),
                pid,
                a["root"].as_str().unwrap_or("-").into(),
            ]
        })
        .collect();
    text += &out::table(&["  ROLE", "AGENT", "PROCESS", "DIRECTORY"], &[1, 2], rows);
    let datasets = s["datasets"].as_array().unwrap_or(&empty);
    let rows: Vec<Vec<String>> = datasets
        .iter()
        .map(|d| {
            let levels: Vec<&str> =
                d["levels"].as_array().unwrap_or(&empty).iter().filter_map(Value::as_str).collect();
            vec![
                format!("  {}", number(&d["number"])),
                Shown::new(d["name"].as_str().unwrap_or("?")).to_string(),
                out::bytes(number(&d["bytes"])),
                levels.join(", "),
            ]
        })
        .collect();
    if !rows.is_empty() {
        text += &out::table(&["  NUMBER", "NAME", "SIZE", "LEVELS"], &[2], rows);
    }
    text
}
