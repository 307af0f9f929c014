//! Puts what the controller says into words for people and JSON for programs.

use crate::out;
use serde_json::{Value, json};
use stanchion_core::api::{GiveUp, Notice, Outcome};
use stanchion_format::client::{FLAG_CHECKPOINT, FLAG_OUTPUT};
use stanchion_format::ids::{Key, Level, SlotId};
use stanchion_format::peer::{Cause, DatasetInfo, Report, Times, Trouble};
use std::collections::BTreeMap;

/// One thing that happened, in both languages.
#[derive(Debug)]
pub struct Said {
    /// Its kind.
    pub event: &'static str,
    /// Its facts; an object.
    pub facts: Value,
    /// Its sentence.
    pub text: String,
}

fn said(event: &'static str, facts: Value, text: impl Into<String>) -> Said {
    Said { event, facts, text: text.into() }
}

/// `checkpoint`, `output`, or both.
pub fn kind(flags: u32) -> &'static str {
    match (flags & FLAG_CHECKPOINT != 0, flags & FLAG_OUTPUT != 0) {
        (true, false) => "checkpoint",
        (false, true) => "output",
        (true, true) => "checkpoint and output",
        (false, false) => "dataset",
    }
}

/// `node 2`, `nodes 2 and 5`.
pub fn nodes(slots: &[SlotId]) -> String {
    match slots {
        [] => "no node".into(),
        [one] => format!("node {one}"),
        [first @ .., last] => {
            let first: Vec<String> = first.iter().map(SlotId::to_string).collect();
            format!("nodes {} and {last}", first.join(", "))
        }
    }
}

/// An exit code of the application as the shell would have it.
pub fn code(code: i32) -> String {
    match code {
        129..=192 => {
            let name = match code - 128 {
                1 => " (SIGHUP)",
                2 => " (SIGINT)",
                3 => " (SIGQUIT)",
                4 => " (SIGILL)",
                6 => " (SIGABRT)",
                7 => " (SIGBUS)",
                8 => " (SIGFPE)",
                9 => " (SIGKILL)",
                11 => " (SIGSEGV)",
                13 => " (SIGPIPE)",
                15 => " (SIGTERM)",
                _ => "",
            };
            format!("exit code {code}: signal {}{name}", code - 128)
        }
        _ => format!("exit code {code}"),
    }
}

fn key(key: Key) -> Value {
    json!({"number": key.no.0, "epoch": key.inc.epoch.0, "incarnation": key.inc.count})
}

fn opt_key(of: Option<Key>) -> Value {
    of.map_or(Value::Null, key)
}

/// A trouble for programs; also used by `verify`.
pub fn trouble(t: &Trouble) -> Value {
    json!({
        "cause": t.cause.to_string(), "node": t.slot.map(|s| s.0), "agent": t.agent.map(|a| a.0),
        "rank": t.rank.map(|r| r.0), "file": t.file, "text": t.to_string(),
    })
}

fn opt_trouble(t: Option<&Trouble>) -> Value {
    t.map_or(Value::Null, trouble)
}

/// Where a dataset's time went, for programs.
pub fn times(t: &Times) -> Value {
    json!({
        "write_us": t.write_us, "blocked_us": t.blocked_us, "copy_us": t.copy_us, "pool_us": t.pool_us, "coordinate_us": t.coordinate_us,
        "digest_us": t.digest_us, "transfer_us": t.transfer_us, "encode_us": t.encode_us,
        "storage_us": t.storage_us, "copy_sum_us": t.copy_sum_us, "pool_sum_us": t.pool_sum_us,
    })
}

/// The same for people: what, how long, and of whom.
pub fn times_rows(t: &Times) -> Vec<Vec<String>> {
    const RANK: &str = "the slowest rank";
    const AGENT: &str = "the slowest agent";
    let all = |us: u64| format!("{RANK}; all together {}", micros(us));
    let rows: [(&str, u64, String); 9] = [
        ("written by the application", t.write_us, RANK.into()),
        ("blocked", t.blocked_us, RANK.into()),
        ("  copied", t.copy_us, all(t.copy_sum_us)),
        ("  waited for the pool", t.pool_us, all(t.pool_sum_us)),
        ("coordinated", t.coordinate_us, "from the first vote to the decision".into()),
        ("checksummed", t.digest_us, AGENT.into()),
        ("encoded", t.encode_us, AGENT.into()),
        ("transferred", t.transfer_us, AGENT.into()),
        ("stored", t.storage_us, AGENT.into()),
    ];
    rows.into_iter().map(|(what, us, whose)| vec![what.into(), micros(us), whose]).collect()
}

/// A dataset for programs.
pub fn dataset(info: &DatasetInfo) -> Value {
    json!({
        "number": info.key.no.0, "epoch": info.key.inc.epoch.0, "incarnation": info.key.inc.count,
        "name": info.name, "checkpoint": info.flags & FLAG_CHECKPOINT != 0,
        "output": info.flags & FLAG_OUTPUT != 0, "ranks": info.ranks, "nodes": info.sets.slots,
        "scheme": info.sets.scheme.as_str(), "parities": info.sets.scheme.losses(),
        "set_size": info.sets.set_size, "files": info.files,
        "bytes": info.bytes, "chunk_bytes": info.chunk_bytes,
    })
}

/// An agent's words on one line. They are sentences: quotes stay as they are.
fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// Microseconds as a duration.
pub fn micros(us: u64) -> String {
    out::millis(us.div_ceil(1000))
}

fn plural(n: u64, one: &str) -> String {
    format!("{n} {one}{}", if n == 1 { "" } else { "s" })
}

/// Knows the names of datasets, so that sentences can use them.
#[derive(Debug, Default)]
pub struct Teller {
    names: BTreeMap<Key, (String, u32)>,
}

impl Teller {
    fn learn(&mut self, info: &DatasetInfo) {
        self.names.insert(info.key, (info.name.clone(), info.flags));
        // Keys grow; the oldest names are the least asked for.
        while self.names.len() > 4096 {
            self.names.pop_first();
        }
    }

    /// `checkpoint 'ckpt.20' (number 3)`.
    pub fn name(&self, key: Key) -> String {
        match self.names.get(&key) {
            Some((name, flags)) => {
                format!("{} '{}' (number {})", kind(*flags), name.escape_debug(), key.no)
            }
            None => format!("dataset number {}", key.no),
        }
    }

    /// Puts a notice into words.
    pub fn tell(&mut self, notice: &Notice) -> Said {
        match notice {
            Notice::Report(report) => self.report(report),
            Notice::Started { nodes, spares } => said(
                "started",
                json!({"nodes": nodes, "spares": spares}),
                match spares {
                    0 => format!("{} up, no spare", plural((*nodes).into(), "node")),
                    n => format!(
                        "{} up, {} ready",
                        plural((*nodes).into(), "node"),
                        plural((*n).into(), "spare")
                    ),
                },
            ),
            Notice::NodeLost { slots, agent, silent } => {
                let how = if *silent { "answers nobody any more" } else { "is gone" };
                let facts = json!({
                    "nodes": slots.iter().map(|s| s.0).collect::<Vec<_>>(), "agent": agent.0, "silent": silent,
                });
                let who = if slots.is_empty() { "a spare".to_owned() } else { nodes(slots) };
                let is = if slots.len() > 1 { "are" } else { "is" };
                said("node_lost", facts, format!("{who} {is} lost: agent {agent} {how}"))
            }
            Notice::AppLost { code: c } => said(
                "app_lost",
                json!({"code": c}),
                format!("the application ended with {}", code(*c)),
            ),
            Notice::SpareUsed { slot, agent } => said(
                "spare_used",
                json!({"node": slot.0, "agent": agent.0}),
                format!("the spare with agent {agent} takes the place of node {slot}"),
            ),
            Notice::Agent { agent, text } => said(
                "agent",
                json!({"agent": agent.0, "message": text}),
                format!("agent {agent}: {}", plain(text)),
            ),
            Notice::Launching { run } => said(
                "launching",
                json!({"run": run}),
                match run {
                    0 => "launching the application".to_owned(),
                    n => format!("launching the application again (launch {})", n + 1),
                },
            ),
            Notice::PrefixTrouble(t) => said(
                "prefix_trouble",
                trouble(t),
                format!("the prefix cannot be read: {t}; the job goes on without it"),
            ),
            other => self.restart(other),
        }
    }

    /// Notices around a restart and the end.
    fn restart(&mut self, notice: &Notice) -> Said {
        match notice {
            Notice::Skipped { key: k, name, trouble: t } => {
                let mut facts = json!({"name": name, "trouble": trouble(t)});
                facts["dataset"] = key(*k);
                let text = format!(
                    "dataset '{}' (number {}) cannot be used: {t}; an older one is looked for",
                    name.escape_debug(),
                    k.no
                );
                said("skipped", facts, text)
            }
            Notice::RestartChosen { dataset, from_prefix, rebuild } => {
                let facts = json!({
                    "dataset": opt_key(dataset.as_ref().map(|(k, _)| *k)),
                    "name": dataset.as_ref().map(|(_, n)| n), "from_prefix": from_prefix,
                    "rebuild": rebuild.iter().map(|s| s.0).collect::<Vec<_>>(),
                });
                said("restart_chosen", facts, chosen(dataset.as_ref(), *from_prefix, rebuild))
            }
            Notice::Rebuilding { done_bytes, bad_bytes } => {
                let facts = json!({"done_bytes": done_bytes, "bad_bytes": bad_bytes});
                let (done, bad) = (out::bytes(*done_bytes), out::bytes(*bad_bytes));
                said("rebuilding", facts, format!("rebuilt {done} of {bad}"))
            }
            Notice::RestoreDone {
                since_loss_ms,
                restore_ms,
                rebuilt_bytes,
                fetched_bytes,
                repaired_files,
            } => {
                let facts = json!({
                    "since_loss_ms": since_loss_ms, "restore_ms": restore_ms, "rebuilt_bytes": rebuilt_bytes,
                    "fetched_bytes": fetched_bytes, "repaired_files": repaired_files,
                });
                let mut text = format!(
                    "every byte is verified and in place after {}",
                    out::millis(*restore_ms)
                );
                for (n, what) in [
                    (rebuilt_bytes, "rebuilt from redundancy"),
                    (fetched_bytes, "read from the prefix"),
                ] {
                    if *n > 0 {
                        text += &format!(", {} {what}", out::bytes(*n));
                    }
                }
                if !repaired_files.is_empty() {
                    text += &format!(", damage repaired in {}", list(repaired_files));
                }
                if *since_loss_ms > 0 {
                    text += &format!("; {} since the loss", out::millis(*since_loss_ms));
                }
                said("restore_done", facts, text)
            }
            Notice::FinalFlush => {
                said("final_flush", json!({}), "writing what is not yet there to the prefix")
            }
            Notice::FinalFlushDone { persistent, trouble: t } => {
                let facts =
                    json!({"persistent": opt_key(*persistent), "trouble": opt_trouble(t.as_ref())});
                let there = match persistent {
                    Some(k) => format!("{} is the newest in the prefix", self.name(*k)),
                    None => "the prefix has no checkpoint".to_owned(),
                };
                let text = match t {
                    Some(t) => format!(
                        "the last checkpoint could not be written to the prefix: {t}; {there}"
                    ),
                    None => there,
                };
                said("final_flush_done", facts, text)
            }
            // The others are `tell`'s.
            other => said("notice", json!({}), format!("{other:?}")),
        }
    }

    fn report(&mut self, report: &Report) -> Said {
        let of =
            |k: Key, t: Option<&Trouble>| json!({"dataset": key(k), "trouble": opt_trouble(t)});
        match report {
            Report::RanksReady { ranks } => said(
                "ranks_ready",
                json!({"ranks": ranks}),
                format!("{} came", plural((*ranks).into(), "rank")),
            ),
            Report::Began(info) => {
                self.learn(info);
                said("began", dataset(info), format!("{} begins", self.name(info.key)))
            }
            Report::Committed(info, t) => {
                self.learn(info);
                let mut facts = dataset(info);
                facts["times"] = times(t);
                let text = format!(
                    "{} is complete: {} in {}; ranks were blocked for {}",
                    self.name(info.key),
                    out::bytes(info.bytes),
                    plural(info.files, "file"),
                    micros(t.blocked_us)
                );
                said("committed", facts, text)
            }
            Report::Dropped(k, t) => {
                said("dropped", of(*k, Some(t)), format!("{} is dropped: {t}", self.name(*k)))
            }
            Report::Level(k, level, t) => {
                let facts = json!({"dataset": key(*k), "level": level.as_str(), "times": times(t)});
                said("level", facts, self.level(*k, *level, t))
            }
            Report::ProtectFailed(k, t) if t.cause == Cause::Damaged => said(
                "protect_failed",
                of(*k, Some(t)),
                format!(
                    "{} was damaged before it had redundancy: {t}; a restart does not use it, the one before stays",
                    self.name(*k)
                ),
            ),
            Report::ProtectFailed(k, t) => said(
                "protect_failed",
                of(*k, Some(t)),
                format!(
                    "{} has no redundancy: {t}; it survives a crash of the application, not the loss of a node",
                    self.name(*k)
                ),
            ),
            Report::FlushFailed(k, t) => said(
                "flush_failed",
                of(*k, Some(t)),
                format!(
                    "{} could not be written to the prefix: {t}; the job goes on",
                    self.name(*k)
                ),
            ),
            Report::Evicted { key: k, protected } => {
                let mut facts = of(*k, None);
                facts["protected"] = (*protected).into();
                let why = match protected {
                    true => "a newer one is protected",
                    false => "before its redundancy was complete, as pool_full=drop says",
                };
                let text = format!("{} goes: a pool is full; {why}", self.name(*k));
                said("evicted", facts, text)
            }
            Report::Forgotten(k) => said(
                "forgotten",
                of(*k, None),
                format!("{} is forgotten, as the application asked", self.name(*k)),
            ),
            Report::RestartDone(k) => said(
                "restart_done",
                of(*k, None),
                format!("the application has restarted from {}", self.name(*k)),
            ),
            Report::Finalized => said("finalized", json!({}), "all ranks have finished"),
            Report::ExitAdvised => {
                said("exit_advised", json!({}), "the application was told to end")
            }
            Report::HaltDue => said(
                "halt_due",
                json!({}),
                "a halt condition holds and a checkpoint is written: the application is ended (halt_enabled)",
            ),
            Report::CollectiveFailed(t) => {
                said("collective_failed", trouble(t), format!("a call of all ranks failed: {t}"))
            }
        }
    }

    fn level(&self, k: Key, level: Level, t: &Times) -> String {
        let name = self.name(k);
        match level {
            Level::Cached => format!("{name} is cached"),
            Level::Protected => {
                let took = micros(t.transfer_us.max(t.encode_us));
                format!(
                    "{name} is protected: it survives the loss of nodes within its scheme (took {took})"
                )
            }
            Level::Persistent => {
                format!("{name} is persistent: it is in the prefix (took {})", micros(t.storage_us))
            }
        }
    }

    /// How the run ended, in a sentence that says what to do next.
    pub fn outcome(&self, outcome: &Outcome) -> Said {
        let there = |persistent: &Option<Key>| match persistent {
            Some(k) => format!("the next run with this prefix goes on from {}", self.name(*k)),
            None => "the prefix has no checkpoint to go on from".to_owned(),
        };
        let (facts, text) = match outcome {
            Outcome::Success { flush_trouble: None } => (json!({}), "success".to_owned()),
            Outcome::Success { flush_trouble: Some(t) } => (
                trouble(t),
                format!(
                    "the application succeeded, but its last checkpoint is not in the prefix: {t}"
                ),
            ),
            Outcome::Halted => (
                json!({}),
                "halted, as asked; `stanchion halt --unset` before the next run".to_owned(),
            ),
            Outcome::Interrupted => (json!({}), "interrupted".to_owned()),
            Outcome::AppFailed { code: c, reason } => {
                let why = match reason {
                    GiveUp::Runs => "the number of launches is used up (setting runs_max)",
                    GiveUp::NoProgress => {
                        "it failed again and again without a new dataset (setting retries_max)"
                    }
                    GiveUp::NotWanted => "only one launch was asked for",
                };
                (json!({"code": c}), format!("the application ended with {}; {why}", code(*c)))
            }
            Outcome::Unrecoverable { key: k } => (
                key(*k),
                format!(
                    "{} was lost with its nodes, and neither it nor an older one can be recovered from caches or \
                     prefix. Nothing was started from the beginning: run again (with --from-scratch if the prefix \
                     holds other datasets) to do so, and set flush_every lower to lose less",
                    self.name(*k)
                ),
            ),
            Outcome::NoSpare { have, want, persistent } => (
                json!({"have": have, "want": want, "persistent": opt_key(*persistent)}),
                format!(
                    "{want} nodes are wanted and {have} are left; give more with --spares. {}",
                    there(persistent)
                ),
            ),
            Outcome::AgentsFailed(t) => {
                (trouble(t), format!("the agents failed: {t}; see their logs"))
            }
            Outcome::BadRestart(t) => (
                trouble(t),
                format!(
                    "the job cannot restart as asked: {t}. `stanchion list` shows what there is"
                ),
            ),
            Outcome::Fenced(epoch) => (
                json!({"epoch": epoch.0}),
                format!(
                    "another run (epoch {epoch}) has taken over the prefix; this one ends without a word in it"
                ),
            ),
            Outcome::WoundDown { persistent, trouble: t } => (
                json!({"persistent": opt_key(*persistent), "trouble": opt_trouble(t.as_ref())}),
                match t {
                    Some(t) => format!("wound down with trouble: {t}; {}", there(persistent)),
                    None => format!("wound down; {}", there(persistent)),
                },
            ),
        };
        said("outcome", facts, text)
    }
}

fn chosen(dataset: Option<&(Key, String)>, from_prefix: bool, rebuild: &[SlotId]) -> String {
    let Some((k, name)) = dataset else {
        return "the application starts from the beginning: there is no checkpoint yet".to_owned();
    };
    let mut text =
        format!("going on from checkpoint '{}' (number {}), ", name.escape_debug(), k.no);
    text += if from_prefix { "read from the prefix" } else { "from the nodes' caches" };
    if !rebuild.is_empty() {
        text += &format!("; what {} held is rebuilt from redundancy", nodes(rebuild));
    }
    text
}

/// A few names, and how many more.
fn list(names: &[String]) -> String {
    const SHOWN: usize = 4;
    let shown: Vec<String> =
        names.iter().take(SHOWN).map(|n| n.escape_debug().to_string()).collect();
    match names.len().checked_sub(SHOWN + 1) {
        Some(more) => format!("{} and {} more", shown.join(", "), more + 1),
        None => shown.join(", "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use stanchion_format::ids::{AgentId, DatasetNo, Incarnation, RankId};

    #[test]
    fn sentences_name_dataset_node_rank_file_and_cause() {
        let k = Key { no: DatasetNo(7), inc: Incarnation::default() };
        let t = Trouble::new(Cause::Damaged).slot(SlotId(2)).rank(RankId(5)).file("a/b\n");
        let said =
            Teller::default().tell(&Notice::Skipped { key: k, name: "x\ny".into(), trouble: t });
        for part in ["'x\\ny'", "number 7", "node 2", "rank 5", "a/b\\n", "checksum"] {
            assert!(said.text.contains(part), "{part} in {}", said.text);
        }
        assert_eq!(said.text.lines().count(), 1);
        assert_eq!(said.facts["trouble"]["rank"], 5);
    }

    #[test]
    fn a_lost_node_and_its_spare() {
        let mut teller = Teller::default();
        let lost = Notice::NodeLost {
            slots: vec![SlotId(1), SlotId(2)],
            agent: AgentId(3),
            silent: false,
        };
        assert_eq!(teller.tell(&lost).text, "nodes 1 and 2 are lost: agent 3 is gone");
    }
}
