//! What happens, on standard error for people and in a file for programs; and where the time went.

use crate::out;
use crate::words::{Said, Teller, micros};
use serde_json::{Value, json};
use stanchion_core::api::{Notice, Outcome};
use stanchion_format::ids::Level;
use stanchion_format::peer::{Report, Severity};
use std::fs::File;
use std::io::Write;
use std::time::{Duration, Instant};

/// Tells what happens.
#[derive(Debug)]
pub struct Reporter {
    teller: Teller,
    started: Instant,
    verbose: bool,
    json: Option<File>,
    spent: Spent,
}

/// Where the time of a run went.
#[derive(Debug, Default)]
struct Spent {
    ready: Option<Duration>,
    app: Duration,
    app_since: Option<Instant>,
    launches: u64,
    checkpoints: u64,
    blocked_us: u64,
    protected: u64,
    persistent: u64,
    lost: u64,
    restores: u64,
    restore_ms: u64,
    down: Duration,
    down_since: Option<Instant>,
    flush: Duration,
    flush_since: Option<Instant>,
}

fn word(severity: Severity) -> &'static str {
    match severity {
        Severity::Debug => "debug",
        Severity::Info => "info",
        Severity::Warn => "warning",
        Severity::Error => "error",
    }
}

impl Reporter {
    /// `json`: a file for programs.
    pub fn new(started: Instant, verbose: bool, json: Option<File>) -> Reporter {
        Reporter { teller: Teller::default(), started, verbose, json, spent: Spent::default() }
    }

    /// What the controller says.
    pub fn notice(&mut self, severity: Severity, notice: &Notice) {
        let said = self.teller.tell(notice);
        self.account(notice);
        self.say(severity, &said);
    }

    /// What the runner itself says.
    pub fn own(&mut self, severity: Severity, event: &'static str, facts: Value, text: String) {
        self.say(severity, &Said { event, facts, text });
    }

    fn say(&mut self, severity: Severity, said: &Said) {
        let elapsed = self.started.elapsed();
        if severity != Severity::Debug || self.verbose {
            let mark = match severity {
                Severity::Debug | Severity::Info => String::new(),
                worse => format!("{}: ", word(worse)),
            };
            out::say(&format!("[{:9.3} s] {mark}{}", elapsed.as_secs_f64(), said.text));
        }
        let Some(file) = &mut self.json else { return };
        let mut line = json!({
            "ms": elapsed.as_millis() as u64, "unix_s": out::unix_s(), "severity": word(severity),
            "event": said.event, "text": said.text,
        });
        // One level: programs look for "event" and its facts beside it.
        if let (Some(line), Value::Object(facts)) = (line.as_object_mut(), said.facts.clone()) {
            for (name, value) in facts {
                line.entry(name).or_insert(value);
            }
        }
        // In one write: whoever follows the file sees whole lines.
        let written = file.write_all(format!("{line}\n").as_bytes());
        if let Err(e) = written {
            self.json = None;
            out::say(&format!("warning: --json-events cannot be written any more: {e}"));
        }
    }

    fn account(&mut self, notice: &Notice) {
        let spent = &mut self.spent;
        match notice {
            Notice::Started { .. } => spent.ready = Some(self.started.elapsed()),
            Notice::NodeLost { slots, .. } if !slots.is_empty() => {
                spent.lost += 1;
                spent.down_since.get_or_insert_with(Instant::now);
            }
            Notice::AppLost { .. } => {
                spent.down_since.get_or_insert_with(Instant::now);
            }
            Notice::RestoreDone { restore_ms, .. } => {
                spent.restores += 1;
                spent.restore_ms += restore_ms;
            }
            Notice::FinalFlush => spent.flush_since = Some(Instant::now()),
            Notice::FinalFlushDone { .. } => {
                spent.flush += spent.flush_since.take().map_or(Duration::ZERO, |t| t.elapsed());
            }
            Notice::Report(Report::Committed(_, times)) => {
                spent.checkpoints += 1;
                spent.blocked_us += times.blocked_us;
            }
            Notice::Report(Report::Level(_, Level::Protected, _)) => spent.protected += 1,
            Notice::Report(Report::Level(_, Level::Persistent, _)) => spent.persistent += 1,
            _ => {}
        }
    }

    /// The application was launched.
    pub fn launched(&mut self) {
        let spent = &mut self.spent;
        spent.launches += 1;
        spent.app_since = Some(Instant::now());
        spent.down += spent.down_since.take().map_or(Duration::ZERO, |t| t.elapsed());
    }

    /// Nothing of the application runs any more.
    pub fn ended(&mut self) {
        self.spent.app += self.spent.app_since.take().map_or(Duration::ZERO, |t| t.elapsed());
    }

    /// How it ended and where the time went.
    pub fn outcome(&mut self, outcome: &Outcome, exit: crate::exit::Exit) {
        self.ended();
        self.summary();
        let mut said = self.teller.outcome(outcome);
        if let Value::Object(facts) = &mut said.facts {
            facts.insert("exit_code".into(), (exit as u8).into());
            facts.insert("outcome".into(), exit.word().into());
        }
        let severity = match outcome {
            Outcome::Success { flush_trouble: None } | Outcome::Halted => Severity::Info,
            Outcome::Success { .. } | Outcome::Interrupted | Outcome::WoundDown { .. } => {
                Severity::Warn
            }
            _ => Severity::Error,
        };
        self.say(severity, &said);
    }

    fn summary(&mut self) {
        let s = &self.spent;
        let ms = |d: Duration| d.as_millis() as u64;
        let total = self.started.elapsed();
        let facts = json!({
            "total_ms": ms(total), "start_ms": s.ready.map(ms), "app_ms": ms(s.app), "launches": s.launches,
            "datasets": s.checkpoints, "blocked_us": s.blocked_us, "protected": s.protected,
            "persistent": s.persistent, "nodes_lost": s.lost, "restores": s.restores,
            "restore_ms": s.restore_ms, "down_ms": ms(s.down), "flush_ms": ms(s.flush),
        });
        let launches = if s.launches == 1 { "launch" } else { "launches" };
        let mut text = format!(
            "{} in all: application {} in {} {launches}, start {}",
            out::millis(ms(total)),
            out::millis(ms(s.app)),
            s.launches,
            out::millis(s.ready.map_or(0, ms)),
        );
        if s.checkpoints > 0 {
            text += &format!(
                "; {} datasets ({} protected, {} persistent) blocked it for {}",
                s.checkpoints,
                s.protected,
                s.persistent,
                micros(s.blocked_us)
            );
        }
        if s.down > Duration::ZERO {
            text += &format!(
                "; down for {} after losses, of it {} restoring",
                out::millis(ms(s.down)),
                out::millis(s.restore_ms)
            );
        }
        if s.flush > Duration::ZERO {
            text += &format!("; final flush {}", out::millis(ms(s.flush)));
        }
        self.own(Severity::Info, "summary", facts, text);
    }
}
