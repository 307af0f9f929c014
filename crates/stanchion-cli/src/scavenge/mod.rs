//! `stanchion scavenge`: what a job's agents left in their caches, when the runner and all of them are gone, is rebuilt
//! and written to the prefix (FM-A1).

mod lead;
pub mod left;

use crate::args::ScavengeArgs;
use crate::exit::{Exit, Failed, OrExit};
use crate::jobdir::{self, Found, JobDir, JobInfo};
use crate::run::events::Reporter;
use crate::run::{give_back, lease};
use crate::settings;
use crate::words::nodes as node_words;
use crate::{out, prefix as tools, procs};
use anyhow::{Context, anyhow};
use left::{Looked, Worth};
use serde_json::{Value, json};
use stanchion_core::api::Outcome;
use stanchion_core::bugs::Bugs;
use stanchion_core::controller::{ControllerConfig, Purpose};
use stanchion_format::config::Settings;
use stanchion_format::holding::Holding;
use stanchion_format::ids::{Epoch, JobId, Key, SlotId};
use stanchion_format::index::IndexRecord;
use stanchion_format::limits;
use stanchion_format::peer::{Cause, Severity};
use stanchion_io::prefix::Prefix;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// What there is to be saved, and where to.
struct Task<'a> {
    args: &'a ScavengeArgs,
    settings: Settings,
    root: PathBuf,
    base: PathBuf,
    prefix: Prefix,
    job: JobId,
    records: Vec<IndexRecord>,
}

/// Dead jobs, held so that nobody else removes them, and the caches to look at.
#[derive(Default)]
struct Leftovers {
    jobs: Vec<(Found, File)>,
    caches: Vec<PathBuf>,
}

/// How it ended.
struct Ended {
    exit: Exit,
    text: String,
    facts: Value,
}

/// Saves what there is.
pub fn scavenge(args: &ScavengeArgs) -> Result<Exit, Failed> {
    let mut options = settings::pairs(&args.set)?;
    let prefix = args.common.prefix.as_ref();
    options.extend(prefix.map(|p| ("prefix".to_owned(), p.to_string_lossy().into_owned())));
    let gathered = settings::gather(&options)?;
    let root = gathered.prefix()?;
    let settings = gathered.settings;
    let base = jobdir::base(&settings);
    let prefix = Prefix::open(&root).map_err(|t| tools::unusable(&root, &t))?;
    let job = prefix.job().map_err(|t| tools::unusable(&root, &t))?;
    let wait = Duration::from_millis(settings.number("lease_wait_ms"));
    // Agents that live save their checkpoint themselves: this waits for them.
    let epoch = lease::take(&prefix, &base, wait, "scavenge")?;
    let records = prefix.read_index().map_err(|t| tools::unusable(&root, &t));
    let ended = records.and_then(|(records, _)| {
        let task = Task { args, settings, root: root.clone(), base, prefix, job, records };
        task.perform(epoch)
    });
    give_back(&root, epoch, &[]);
    let ended = ended?;
    if args.common.json {
        let mut value = json!({"outcome": ended.exit.word(), "exit_code": ended.exit as u8});
        if let (Some(value), Value::Object(facts)) = (value.as_object_mut(), ended.facts) {
            value.extend(facts);
        }
        out::print_json(&value)?;
    } else {
        out::print(&format!("{}\n", ended.text))?;
    }
    Ok(ended.exit)
}

impl Task<'_> {
    fn perform(&self, epoch: Epoch) -> Result<Ended, Failed> {
        let leftovers = self.leftovers()?;
        if self.args.discard {
            remove(&leftovers, &leftovers.caches);
            let dirs = leftovers.caches.len();
            let text = format!("removed what {dirs} nodes had left");
            return Ok(Ended { exit: Exit::Success, text, facts: json!({"removed": dirs}) });
        }
        for (found, _) in &leftovers.jobs {
            // A rank that still writes would spoil what is verified.
            procs::end_application(&found.path, Duration::ZERO);
        }
        let looked = left::look(&leftovers.caches, self.job);
        for (file, why) in &looked.refused {
            out::say(&format!("warning: {} is not believed: {why}", file.display()));
        }
        let holdings: Vec<&Holding> = looked.nodes.iter().flat_map(|n| &n.holdings).collect();
        let worth = left::worth(&holdings, &self.records);
        let mut ended = match worth {
            Worth::Savable(key) => self.save(&looked, &holdings, key, epoch)?,
            other => self.without(other, &leftovers, &looked),
        };
        let removed = ended.exit == Exit::Success;
        if removed {
            let used: Vec<PathBuf> = looked.nodes.iter().map(|n| n.cache.clone()).collect();
            remove(&leftovers, &used);
        } else if !leftovers.caches.is_empty() {
            let dirs: Vec<String> =
                leftovers.caches.iter().map(|d| d.display().to_string()).collect();
            ended.text +=
                &format!("; nothing is removed ({}; --discard does that)", dirs.join(", "));
        }
        ended.facts["refused"] = looked
            .refused
            .iter()
            .map(|(file, why)| json!({"file": file, "why": why}))
            .collect::<Vec<_>>()
            .into();
        ended.facts["directories"] = json!(looked.nodes.len());
        ended.facts["left"] = if removed { json!([]) } else { json!(leftovers.caches) };
        Ok(ended)
    }

    /// What dead jobs of this prefix left, or what is in the directories that are named.
    fn leftovers(&self) -> Result<Leftovers, Failed> {
        if !self.args.caches.is_empty() {
            let mut caches = Vec::new();
            for dir in &self.args.caches {
                let dir = std::fs::canonicalize(dir)
                    .with_context(|| format!("the cache {}", dir.display()))
                    .or_exit(Exit::Storage)?;
                let nodes = jobdir::nodes_below(&dir);
                caches.extend(if nodes.is_empty() { vec![dir] } else { nodes });
            }
            caches.sort();
            caches.dedup();
            return Ok(Leftovers { jobs: Vec::new(), caches });
        }
        let mut left = Leftovers::default();
        for found in jobdir::all(&self.base).into_iter().filter(|f| !f.alive()) {
            let Some(info) = &found.info else { continue };
            let wanted = self
                .args
                .job
                .as_ref()
                .is_none_or(|job| *job == info.name || Path::new(job) == found.path);
            if info.prefix != self.root || !wanted {
                continue;
            }
            if let Some(lock) = jobdir::hold(&found) {
                left.caches.extend(jobdir::node_caches(&found));
                left.jobs.push((found, lock));
            }
        }
        Ok(left)
    }

    /// Nothing is to be saved.
    fn without(&self, worth: Worth, leftovers: &Leftovers, looked: &Looked) -> Ended {
        let prefix = self.root.display();
        let (exit, text, key) = match worth {
            Worth::Persistent(key) => {
                let text = format!("dataset number {} is in the prefix {prefix} already", key.no);
                (Exit::Success, text, Some(key))
            }
            Worth::Unrecoverable(key) => {
                let text = format!(
                    "dataset number {} is lost: more nodes of a set are missing than its redundancy makes good",
                    key.no
                );
                (Exit::Unrecoverable, text, Some(key))
            }
            Worth::Stale(key) => {
                let text = format!(
                    "a later run wrote dataset number {} and did not go on from what is left: that is void",
                    key.no
                );
                (Exit::BadRestart, text, Some(key))
            }
            _ if !looked.refused.is_empty() => {
                let text = format!(
                    "of what is left in {} directories nothing can be believed",
                    leftovers.caches.len()
                );
                (Exit::Unrecoverable, text, None)
            }
            _ => (Exit::BadRestart, format!("no dead job left anything of {prefix} here"), None),
        };
        Ended { exit, text, facts: json!({"dataset": key.map(|k| json!({"number": k.no.0}))}) }
    }

    fn save(
        &self,
        looked: &Looked,
        holdings: &[&Holding],
        wanted: Key,
        epoch: Epoch,
    ) -> Result<Ended, Failed> {
        let count = u32::try_from(looked.nodes.len()).unwrap_or(u32::MAX);
        if count > limits::SLOTS_MAX {
            return Err(Failed::new(Exit::Usage, anyhow!("{count} caches are too many")));
        }
        let info = JobInfo {
            name: "scavenge".into(),
            pid: std::process::id(),
            prefix: self.root.clone(),
            caches: PathBuf::new(),
            command: vec!["stanchion".into(), "scavenge".into()],
            nodes: count,
            spares: 0,
            started_unix_s: out::unix_s(),
        };
        let cache_dir = std::path::absolute(self.settings.text("cache_dir"))
            .context("the cache directory")
            .or_exit(Exit::Storage)?;
        let dir = JobDir::create(&self.base, &cache_dir, info)?;
        let core = ControllerConfig {
            job: self.job,
            epoch,
            nodes: count,
            agents: count,
            settings: self.settings.clone(),
            purpose: Purpose::WindDown,
            from_scratch: false,
            groups: BTreeMap::new(),
            bugs: Bugs::default(),
        };
        let caches = looked.nodes.iter().map(|n| n.cache.clone()).collect();
        let verbose = self.settings.number("debug") > 0;
        let mut reporter = Reporter::new(Instant::now(), verbose, None);
        let text = format!(
            "dataset number {}: {count} nodes left something; it is verified, and what is lost is rebuilt",
            wanted.no
        );
        reporter.own(Severity::Info, "scavenge", json!({}), text);
        let outcome = lead::save(&dir, core, caches, &mut reporter);
        dir.remove();
        Ok(self.saved(&outcome?, holdings, wanted))
    }

    fn saved(&self, outcome: &Outcome, holdings: &[&Holding], wanted: Key) -> Ended {
        let before: BTreeSet<Key> = self.records.iter().map(|r| r.info.key).collect();
        let after: BTreeSet<Key> = match self.prefix.read_index() {
            Ok((records, _)) => records.into_iter().map(|r| r.info.key).collect(),
            Err(_) => before.clone(),
        };
        let saved = after.difference(&before).copied().max();
        let failed = |exit, text: String| Ended { exit, text, facts: json!({"dataset": null}) };
        match (outcome, saved) {
            (Outcome::WoundDown { trouble: None, .. }, Some(key)) => {
                self.told(key, holdings, wanted)
            }
            (Outcome::WoundDown { trouble: Some(t), .. }, _) if t.cause != Cause::BeyondScheme => {
                failed(Exit::Storage, format!("it could not be written to the prefix: {t}"))
            }
            (Outcome::WoundDown { .. }, _) => {
                let text = "is lost: what is there of it is too damaged to be rebuilt";
                failed(Exit::Unrecoverable, format!("dataset number {} {text}", wanted.no))
            }
            (Outcome::Interrupted, _) => failed(Exit::Interrupted, "interrupted".into()),
            (Outcome::Fenced(epoch), _) => failed(
                Exit::Fenced,
                format!("another run (epoch {epoch}) has taken the prefix over"),
            ),
            (Outcome::AgentsFailed(t), _) => {
                failed(Exit::AgentsFailed, format!("the agents did not come up or answer: {t}"))
            }
            (other, _) => failed(Exit::Failure, format!("it ended in a way of its own: {other:?}")),
        }
    }

    fn told(&self, key: Key, holdings: &[&Holding], wanted: Key) -> Ended {
        let info = holdings.iter().map(|h| &h.info).find(|i| i.key == key);
        let there = left::slots_there(holdings, key);
        let slots = info.map_or(0, |i| i.sets.slots);
        let lost: Vec<SlotId> = (0..slots).map(SlotId).filter(|s| !there.contains(s)).collect();
        let name = info.map_or_else(String::new, |i| i.name.clone());
        let shown = stanchion_format::config::Shown::new(&name);
        let mut text =
            format!("dataset number {} '{shown}' of {slots} nodes is in the prefix now", key.no);
        if !lost.is_empty() {
            text += &format!("; that of {} was rebuilt", node_words(&lost));
        }
        if key != wanted {
            text += &format!("; number {} could not be had", wanted.no);
        }
        let rebuilt: Vec<u32> = lost.iter().map(|s| s.0).collect();
        let facts = json!({"dataset": {"number": key.no.0, "name": name}, "rebuilt": rebuilt});
        Ended { exit: Exit::Success, text, facts }
    }
}

/// What was left is not needed any more.
fn remove(leftovers: &Leftovers, caches: &[PathBuf]) {
    for (found, _) in &leftovers.jobs {
        jobdir::discard(found);
    }
    if !leftovers.jobs.is_empty() {
        return;
    }
    for cache in caches {
        if let Err(e) = std::fs::remove_dir_all(cache) {
            out::say(&format!("warning: {} could not be removed: {e}", cache.display()));
        }
        let own = |dir: &&Path| {
            dir.file_name().is_some_and(|name| name.to_string_lossy().starts_with("stanchion-"))
        };
        let _others_are_there = cache.parent().filter(own).map(std::fs::remove_dir);
    }
}
