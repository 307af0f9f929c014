//! The one job that SCR's interface knows: its state, and how its errors reach the user.

use crate::asked::{self, Asked, Late};
use stanchion::{Client, Code, Environment, Error, Options, Words};
use stanchion_format::config::{self, ConfigError, Setting};
use stanchion_format::scr_line::{self, ScrLine, ScrLineError};
use std::collections::BTreeSet;
use std::io::Write;

/// Messages of one process. A program that ignores failures in a loop must not flood its user.
const MESSAGES_MAX: u32 = 64;

/// Why a call of SCR's failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    #[error(transparent)]
    Client(#[from] Error),
    #[error("'{line}': {cause}")]
    Line { line: Words, cause: ScrLineError },
    #[error("not possible before SCR_Init")]
    Before,
    #[error("not possible after SCR_Finalize")]
    After,
    #[error("a process calls this once")]
    Again,
    #[error("{}='{value}' is set by the application, but the job runs with another value: set STANCHION_{} for `stanchion run`", shown(.setting), .setting.name.to_ascii_uppercase())]
    Late { setting: &'static Setting, value: Words },
    #[error("'{name}' is set in the environment, which goes before SCR_Config")]
    Outranked { name: Words },
    #[error("'{name}' cannot be changed after SCR_Init")]
    Fixed { name: Words },
    #[error("the arguments do not fit their format")]
    Format,
}

fn shown(setting: &Setting) -> &'static str {
    setting.scr.unwrap_or(setting.name)
}

impl From<ConfigError> for Failure {
    fn from(error: ConfigError) -> Failure {
        Failure::Client(error.into())
    }
}

impl Failure {
    /// Does the job report it by itself? A dropped dataset is news of its own.
    fn told(&self) -> bool {
        matches!(self, Failure::Client(Error::Refused { code: Code::Dropped, .. }))
    }

    /// Do all ranks have it alike? Then one of them says it.
    fn common(&self) -> bool {
        match self {
            Failure::Client(e) => {
                matches!(e, Error::Refused { .. } | Error::NoAgent | Error::Setting(_))
            }
            Failure::Line { .. } | Failure::Late { .. } => true,
            Failure::Outranked { .. } | Failure::Fixed { .. } | Failure::Format => true,
            Failure::Before | Failure::After | Failure::Again => false,
        }
    }
}

#[derive(Debug)]
enum Stage {
    Before,
    Running(Box<Client>),
    Over,
}

/// State of the process.
#[derive(Debug)]
pub(crate) struct Job {
    stage: Stage,
    asked: Asked,
    /// A line that could not be read before `SCR_Init`, which cannot be reported but by that.
    unread: Option<(Words, ScrLineError)>,
    said: BTreeSet<String>,
    messages: u32,
    /// The connection ends when the failure has been reported by way of it.
    leaving: bool,
}

impl Job {
    pub(crate) const fn new() -> Job {
        Job {
            stage: Stage::Before,
            asked: Asked::new(),
            unread: None,
            said: BTreeSet::new(),
            messages: 0,
            leaving: false,
        }
    }

    /// The client, between init and finalize.
    pub(crate) fn client(&mut self) -> Result<&mut Client, Failure> {
        match &mut self.stage {
            Stage::Before => Err(Failure::Before),
            Stage::Over => Err(Failure::After),
            Stage::Running(client) => Ok(client),
        }
    }

    pub(crate) fn init(&mut self) -> Result<(), Failure> {
        match self.stage {
            Stage::Before => {}
            _ => return Err(Failure::Again),
        }
        if let Some((line, cause)) = self.unread.take() {
            return Err(Failure::Line { line, cause });
        }
        let environment = Environment::of_process();
        let found = environment.settings();
        let meaning = self.asked.meaning(&environment);
        if let Some(error) = meaning.error {
            return Err(error.into());
        }
        let mut settings = meaning.pairs;
        let disabled = match environment.outranks("enable") {
            Some(_) => found.errors.is_empty() && !found.settings.flag("enable"),
            None => settings.iter().any(|(n, v)| n == "enable" && v == "0"),
        };
        if disabled {
            // Nobody else has an opinion about the prefix then.
            let prefix = meaning.late.iter().find(|l| l.setting.name == "prefix");
            settings.extend(prefix.map(|l| (l.setting.name.to_owned(), l.value.clone())));
        }
        let client = Client::connect(&Options { settings, environment, ..Options::default() })?;
        let first = client.identity().rank == 0;
        let late = if client.enabled() { meaning.late } else { Vec::new() };
        self.stage = Stage::Running(Box::new(client));
        if let Err(failure) = self.compare(&late, first) {
            self.leaving = true;
            return Err(failure);
        }
        if first {
            // Each is named once: what a runner launched inherits the environment it has looked at.
            if std::env::var_os("STANCHION_JOB_DIR").is_none() {
                for (name, why) in found.without_meaning {
                    self.once(&format!("{name} has no meaning here: {why}"));
                }
                for name in found.unknown {
                    self.once(&format!("{} is not known here and is ignored", Words::name(&name)));
                }
            }
            for text in meaning.warnings {
                self.once(&text);
            }
        }
        Ok(())
    }

    fn compare(&mut self, late: &[Late], first: bool) -> Result<(), Failure> {
        for late in late {
            if late.met(self.client()?) {
                continue;
            }
            let failure = Failure::Late { setting: late.setting, value: Words::name(&late.value) };
            if late.vital() {
                return Err(failure);
            }
            if first {
                self.once(&format!("SCR_Config: {failure}; it is ignored"));
            }
        }
        Ok(())
    }

    pub(crate) fn finalize(&mut self) -> Result<(), Failure> {
        self.client()?.finalize()?;
        self.stage = Stage::Over;
        Ok(())
    }

    /// Sets or asks; the answer to a question.
    pub(crate) fn config(&mut self, line: &str) -> Result<Option<String>, Failure> {
        let parsed = scr_line::parse(line);
        match (parsed, &self.stage) {
            (Err(cause), Stage::Before) => {
                self.unread.get_or_insert((Words::name(line), cause));
                Ok(None)
            }
            (Err(cause), _) => Err(Failure::Line { line: Words::name(line), cause }),
            (Ok(ScrLine::Empty), _) => Ok(None),
            (Ok(ScrLine::Ask(name)), _) => Ok(self.value(&name)),
            (Ok(ScrLine::AskMember { table, entry, member }), _) => {
                Ok(self.asked.member(&table, &entry, &member).map(str::to_owned))
            }
            (Ok(ScrLine::Set(name, value)), Stage::Before) => {
                self.asked.set(&name, &value)?;
                Ok(None)
            }
            (Ok(ScrLine::Members { table, entry, members }), Stage::Before) => {
                self.asked.set_members(&table, &entry, &members)?;
                Ok(None)
            }
            (Ok(ScrLine::Set(name, value)), _) => self.change(&name, &value).map(|()| None),
            (Ok(ScrLine::Members { table, .. }), _) => {
                Err(Failure::Fixed { name: Words::name(&table) })
            }
        }
    }

    /// A change while the job runs.
    fn change(&mut self, name: &str, value: &str) -> Result<(), Failure> {
        let client = match &mut self.stage {
            Stage::Running(client) => client,
            _ => return Err(Failure::After),
        };
        let named = || Words::name(name);
        if Environment::of_process().outranks(name).is_some() {
            return Err(Failure::Outranked { name: named() });
        }
        if asked::without_meaning(name).is_some() || config::find(name).is_err() {
            return Err(Failure::Fixed { name: named() });
        }
        client.set(name, value)?;
        Ok(self.asked.set(name, value)?)
    }

    /// As it was set: by the environment, by the application, at launch.
    fn value(&self, name: &str) -> Option<String> {
        if let Some(value) = Environment::of_process().outranks(name) {
            return Some(value.to_owned());
        }
        let job = match &self.stage {
            Stage::Running(client) => config::find(name)
                .ok()
                .filter(|s| client.settings().is_set(s.name))
                .map(|s| client.settings().text(s.name)),
            _ => None,
        };
        self.asked.get(name).or(job).map(str::to_owned)
    }

    /// Says something that is worth saying once.
    fn once(&mut self, text: &str) {
        if self.messages < MESSAGES_MAX && self.said.insert(text.to_owned()) {
            self.say(text);
        }
    }

    /// Lets the user know of a failed call: the interface has only a number for it.
    pub(crate) fn report(&mut self, call: &str, failure: &Failure) {
        let rank = match &self.stage {
            Stage::Running(client) => Some(client.identity().rank),
            _ => {
                stanchion::Identity::of_environment(&Environment::of_process()).ok().map(|i| i.rank)
            }
        };
        match rank {
            Some(rank) if failure.told() || (rank != 0 && failure.common()) => {}
            Some(rank) => self.once(&format!("rank {rank}: {call}: {failure}")),
            None => self.once(&format!("{call}: {failure}")),
        }
        if std::mem::take(&mut self.leaving) {
            self.stage = Stage::Before;
        }
    }

    /// The agent says it; where there is none, standard error is all that is left.
    fn say(&mut self, text: &str) {
        let text = match self.messages {
            MESSAGES_MAX.. => return,
            n if n + 1 == MESSAGES_MAX => &format!("{text} (further messages are left out)"),
            _ => text,
        };
        self.messages += 1;
        if let Stage::Running(client) = &mut self.stage
            && client.alive()
            && client.warn(text).is_ok()
        {
            return;
        }
        // Nothing can be done if this fails too.
        let _ = writeln!(std::io::stderr(), "stanchion: {text}");
    }
}
