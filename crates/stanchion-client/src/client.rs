//! One rank's calls, in their order.

use crate::environment::Environment;
use crate::error::{Error, Fault, Words};
use crate::identity::Identity;
use crate::increment::Increment;
use crate::pool::{PoolMap, PoolTimes};
use crate::route::Prefix;
use crate::snapshot::Snapshots;
use crate::wire::{self, Link};
use stanchion_format::client::{
    Answer, Ask, Code, Filled, Lent, MemoryAt, MemoryFile, Own, Request, RestartInfo, SettingPair,
};
use stanchion_format::config::{self, Scope, Settings};
use stanchion_format::ids::{DatasetNo, Key, Level, RankId};
use stanchion_format::layout::block_slot;
use stanchion_format::manifest::FileDecl;
use stanchion_format::{limits, name};
use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

mod routing;
pub(crate) mod streams;

/// Bytes of paths that fit into one request, with room for all else.
const PATHS_BYTES_MAX: usize = limits::CLIENT_FRAME_BYTES_MAX as usize / 2;

/// Who, where, and with which settings.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// This rank and the number of ranks; from the environment if not given.
    pub identity: Option<(u32, u32)>,
    /// The agents' sockets in the order of slots; from `STANCHION_NODES` if not given.
    pub nodes: Option<Vec<PathBuf>>,
    /// The application's settings. The environment goes before them.
    pub settings: Vec<SettingPair>,
    /// The environment.
    pub environment: Environment,
}

impl Options {
    /// Everything from this process's environment.
    pub fn from_environment() -> Options {
        Options { environment: Environment::of_process(), ..Options::default() }
    }

    /// The application's settings, and over them the environment's. The environment's that only count
    /// at launch are the runner's business: a rank does not repeat them.
    fn settings(&self) -> Result<Settings, Error> {
        let mut environment = self.environment.settings();
        if let Some(error) = environment.errors.pop() {
            return Err(error.into());
        }
        let mut settings = Settings::from_pairs(&self.settings)?;
        for (name, value) in environment.settings.pairs() {
            let setting = config::find(&name)?;
            if setting.scope == Scope::Launch {
                settings.set(&name, "")?;
            } else {
                settings.set(&name, &value)?;
            }
        }
        Ok(settings)
    }

    fn node(&self, me: Identity) -> Result<(PathBuf, u32), Error> {
        let nodes = match (&self.nodes, self.environment.get("STANCHION_NODES")) {
            (Some(nodes), _) => nodes.clone(),
            (None, Some(list)) => {
                list.split(':').take(limits::SLOTS_MAX as usize + 1).map(PathBuf::from).collect()
            }
            (None, None) => return Err(Error::NoAgent),
        };
        let bad = |p: &PathBuf| p.as_os_str().is_empty() || p.as_os_str().len() > 4096;
        if let Some(entry) = nodes.iter().position(bad) {
            return Err(Error::Nodes { entry });
        }
        if nodes.is_empty() || nodes.len() > limits::SLOTS_MAX as usize {
            return Err(Error::Nodes { entry: nodes.len().saturating_sub(1) });
        }
        let slot = block_slot(me.rank, me.size, nodes.len() as u32).0;
        Ok((nodes[slot as usize].clone(), slot))
    }
}

/// A dataset that was begun.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Begun {
    /// Its number.
    pub no: DatasetNo,
    /// Its name, made from the number where none was given.
    pub name: String,
}

/// A dataset to restart from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Its number.
    pub no: DatasetNo,
    /// Its name.
    pub name: String,
    /// `FLAG_…`
    pub flags: u32,
}

#[derive(Debug)]
enum Phase {
    Idle,
    Writing {
        /// `None`: disabled.
        key: Option<Key>,
        dir: String,
        files: BTreeSet<String>,
        bytes: usize,
        /// Files in the pool, with their sizes.
        memory: Vec<(MemoryFile, u64)>,
        spent: PoolTimes,
        asked: Instant,
        begun: Instant,
        blocked: Duration,
    },
    Reading(RestartInfo),
    Finished,
}

impl Phase {
    fn words(&self) -> &'static str {
        match self {
            Phase::Idle => "while no dataset is open: call its begin or start first",
            Phase::Writing { .. } => "while a dataset is being written: complete it first",
            Phase::Reading(_) => "while a dataset is being read: complete the restart first",
            Phase::Finished => "after finalize",
        }
    }
}

/// One rank's connection to Stanchion.
#[derive(Debug)]
pub struct Client {
    pid: u32,
    me: Identity,
    /// `None`: disabled, calls pass through.
    link: Option<Link>,
    phase: Phase,
    prefix: Prefix,
    /// Was a prefix said? Otherwise names stay as they are when calls pass through.
    prefix_said: bool,
    settings: Settings,
    pending: Vec<SettingPair>,
    wait: Duration,
    /// For pass-through: calls of need_checkpoint, datasets begun.
    needs: u64,
    last_no: u64,
    /// Before the pool: what still copies has ended when that is unmapped.
    pub(crate) snapshots: Snapshots,
    pool: PoolMap,
    streams: streams::Streams,
    /// The agent's socket, and its slot.
    place: (PathBuf, u32),
    pub(crate) increment: Increment,
}

impl Client {
    /// Joins the job: returns when all ranks have come.
    pub fn connect(options: &Options) -> Result<Client, Error> {
        let settings = options.settings()?;
        let me = match options.identity {
            Some((rank, size)) => Identity::explicit(rank, size)?,
            None => Identity::of_environment(&options.environment)?,
        };
        if !settings.flag("enable") {
            return Ok(Client::disabled(options, me, settings));
        }
        let (path, slot) = options.node(me)?;
        let ms = init_timeout(options);
        let wait = wire::patience(ms);
        let mut link = Link::connect(&path, slot, wait)?;
        let (rank, size, pid) = (RankId(me.rank), me.size, std::process::id());
        let hello = Request::Hello { rank, size, pid, settings: settings.pairs() };
        let (prefix, said, stores, timeout) = match link.ask("init", &hello, wait)? {
            Answer::Welcome { prefix, settings, stores, answer_timeout_ms, .. }
                if prefix.starts_with('/') && prefix.len() <= 4096 =>
            {
                (prefix, settings, stores, answer_timeout_ms)
            }
            Answer::Failed { code, text } => return Err(refused(code, &text)),
            _ => return Err(link.give_up("init")),
        };
        let settings = Settings::from_pairs(&said)?;
        // Switched off by the job's file: nothing more is said to the agents.
        let link = settings.flag("enable").then_some(link);
        Ok(Client {
            pid,
            me,
            link,
            phase: Phase::Idle,
            prefix: Prefix::new(&prefix),
            prefix_said: true,
            settings,
            pending: Vec::new(),
            wait: wire::patience(timeout),
            needs: 0,
            last_no: 0,
            pool: PoolMap::new(stores),
            streams: streams::Streams::default(),
            place: (path, slot),
            snapshots: Snapshots::default(),
            increment: Increment::default(),
        })
    }

    fn disabled(options: &Options, me: Identity, settings: Settings) -> Client {
        let said = options.environment.outranks("prefix").map(str::to_owned);
        let said =
            said.or_else(|| Some(settings.text("prefix").to_owned()).filter(|p| !p.is_empty()));
        let cwd = std::env::current_dir().ok().and_then(|p| p.into_os_string().into_string().ok());
        let cwd = cwd.unwrap_or_else(|| "/".into());
        let prefix = match &said {
            Some(said) if said.starts_with('/') => said.clone(),
            Some(said) => format!("{cwd}/{said}"),
            None => cwd,
        };
        Client {
            pid: std::process::id(),
            me,
            link: None,
            phase: Phase::Idle,
            prefix: Prefix::new(&prefix),
            prefix_said: said.is_some(),
            settings,
            pending: Vec::new(),
            wait: Duration::ZERO,
            needs: 0,
            last_no: 0,
            pool: PoolMap::default(),
            streams: streams::Streams::default(),
            place: Default::default(),
            snapshots: Snapshots::default(),
            increment: Increment::default(),
        }
    }

    /// Who this is.
    pub fn identity(&self) -> Identity {
        self.me
    }

    /// The persistent directory.
    pub fn prefix(&self) -> &str {
        self.prefix.as_str()
    }

    /// Is `path` the prefix, by this or another name?
    pub fn is_prefix(&self, path: &str) -> bool {
        self.prefix.is(path)
    }

    /// False when `enable` is 0 and calls pass through.
    pub fn enabled(&self) -> bool {
        self.link.is_some()
    }

    /// Can the agent still be talked to?
    pub fn alive(&self) -> bool {
        self.link.as_ref().is_some_and(Link::alive)
    }

    /// The job's settings that differ from their defaults, as they were at the start and as this
    /// application changed them.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    fn own_process(&self) -> Result<(), Error> {
        if std::process::id() == self.pid { Ok(()) } else { Err(Error::Forked { owner: self.pid }) }
    }

    fn idle(&self, call: &'static str) -> Result<(), Error> {
        self.own_process()?;
        match self.phase {
            Phase::Idle => Ok(()),
            _ => Err(Error::State { call, phase: self.phase.words() }),
        }
    }

    fn not_finished(&self, call: &'static str) -> Result<(), Error> {
        self.own_process()?;
        match self.phase {
            Phase::Finished => Err(Error::State { call, phase: self.phase.words() }),
            _ => Ok(()),
        }
    }

    fn link(&mut self, call: &'static str, code: Code) -> Result<&mut Link, Error> {
        self.link.as_mut().ok_or(Error::Disabled { call, code })
    }

    /// Asks what all ranks ask; an answer that `fits` does not know ends the connection.
    fn collective<T>(
        &mut self,
        ask: Ask,
        mut own: Own,
        fits: impl FnOnce(Answer, Identity) -> Option<T>,
    ) -> Result<T, Error> {
        let (verb, wait, me) = (ask.verb(), self.wait, self.me);
        own.settings = std::mem::take(&mut self.pending);
        self.tell_failures();
        let link = self.link(verb, Code::State)?;
        match link.ask(verb, &Request::Collective { ask, own }, wait)? {
            Answer::Failed { code, text } => Err(refused(code, &text)),
            answer => fits(answer, me).ok_or_else(|| link.give_up(verb)),
        }
    }

    fn simple(&mut self, ask: Ask) -> Result<(), Error> {
        self.collective(ask, Own::default(), |a, _| (a == Answer::Ok).then_some(()))
    }

    fn flag(&mut self, ask: Ask) -> Result<bool, Error> {
        let own = Own::default();
        self.collective(ask, own, |a, _| if let Answer::Flag(f) = a { Some(f) } else { None })
    }

    /// Shall a checkpoint be taken now? Collective. Disabled: only by `checkpoint_interval`, the one
    /// policy that ranks can follow without talking.
    pub fn need_checkpoint(&mut self) -> Result<bool, Error> {
        self.idle("need_checkpoint")?;
        if self.link.is_none() {
            self.needs += 1;
            let interval = self.settings.number("checkpoint_interval");
            return Ok(interval > 0 && self.needs.is_multiple_of(interval));
        }
        self.flag(Ask::NeedCheckpoint)
    }

    /// Shall the application end? Collective.
    pub fn should_exit(&mut self) -> Result<bool, Error> {
        self.idle("should_exit")?;
        if self.link.is_none() { Ok(false) } else { self.flag(Ask::ShouldExit) }
    }

    /// Returns when all ranks have called it.
    pub fn barrier(&mut self) -> Result<(), Error> {
        self.not_finished("barrier")?;
        self.simple(Ask::Barrier)
    }

    /// Begins a dataset; an empty name leaves the choice to the agents. Collective.
    pub fn begin(&mut self, dataset: &str, flags: u32) -> Result<Begun, Error> {
        const CALL: &str = "start";
        self.idle(CALL)?;
        if !dataset.is_empty() {
            check_dataset(dataset)?;
        }
        let known =
            stanchion_format::client::FLAG_CHECKPOINT | stanchion_format::client::FLAG_OUTPUT;
        if flags & !known != 0 {
            return Err(Error::Argument { call: CALL, what: "unknown bits in flags" });
        }
        let asked = Instant::now();
        let (begun, key, dir) = if self.link.is_none() {
            self.last_no += 1;
            let name = match dataset {
                "" => format!("dataset.{}", self.last_no),
                name => name.to_owned(),
            };
            (Begun { no: DatasetNo(self.last_no), name }, None, String::new())
        } else {
            let ask = Ask::Begin { name: dataset.to_owned(), flags };
            self.collective(ask, Own::default(), |answer, _| match answer {
                Answer::Began { key, name, dir }
                    if absolute(&dir) && name::check_dataset(&name).is_ok() =>
                {
                    Some((Begun { no: key.no, name }, Some(key), dir))
                }
                _ => None,
            })?
        };
        self.begin_streams();
        self.snapshots.copies.stop();
        let (files, begun_at) = (BTreeSet::new(), Instant::now());
        let blocked = begun_at - asked;
        self.phase = Phase::Writing {
            key,
            dir,
            files,
            bytes: 0,
            memory: Vec::new(),
            spent: PoolTimes::default(),
            asked,
            begun: begun_at,
            blocked,
        };
        Ok(begun)
    }

    /// The dataset that is being written.
    pub(crate) fn writing_key(&self) -> Result<Key, Error> {
        match &self.phase {
            Phase::Writing { key: Some(key), .. } => Ok(*key),
            phase => Err(Error::State { call: "checkpoint", phase: phase.words() }),
        }
    }

    /// A file of the dataset that is being written is in the pool.
    pub(crate) fn add_memory(&mut self, file: MemoryFile, bytes: u64, took: PoolTimes) {
        self.spend(took);
        if let Phase::Writing { memory, .. } = &mut self.phase {
            memory.push((file, bytes));
        }
    }

    /// The caller was kept from its work for so long.
    pub(crate) fn spend(&mut self, took: PoolTimes) {
        if let Phase::Writing { spent, blocked, .. } = &mut self.phase {
            *blocked += took.wait + took.copy;
            spent.add(took);
        }
    }

    /// Shared memory of the agent for what is being written, mapped. Empty: it has none for this.
    pub(crate) fn lend(&mut self, call: &'static str, bytes: u64) -> Result<Vec<Lent>, Error> {
        let ms = self.settings.number("pool_wait_ms");
        let request = self.pool.wish(bytes);
        self.ask_lent(call, &request, wire::patience(ms))
    }

    fn ask_lent(
        &mut self,
        call: &'static str,
        request: &Request,
        wait: Duration,
    ) -> Result<Vec<Lent>, Error> {
        ask_lent(&mut self.link, &mut self.pool, call, request, wait)
    }

    /// A part of this rank's datasets will have `new` bytes in memory, where it had `old`: the agent makes room for
    /// all of them, and it is mapped here, so that the first copy is as fast as the later ones. Without an agent, or
    /// where it has no room, nothing happens. Local.
    pub fn expect(&mut self, old: u64, new: u64) -> Result<(), Error> {
        const CALL: &str = "protect";
        self.own_process()?;
        let Some(bytes) = self.pool.expect(old, new).filter(|_| self.alive()) else {
            return Ok(());
        };
        let ms = self.settings.number("pool_ready_ms");
        match self.ask_lent(CALL, &Request::Reserve { bytes }, wire::patience(ms)) {
            // The agent is restoring or leaving, or there is no room to map it now: no reason not to go on.
            Err(Error::Refused { .. } | Error::Memory(_)) => Ok(()),
            other => other.map(drop),
        }
    }

    /// Hands over what is full with the next wish for memory.
    pub(crate) fn hand_over(&mut self, filled: Filled) {
        self.pool.hand(filled);
    }

    /// The mapped memory.
    pub(crate) fn pool(&self) -> &PoolMap {
        &self.pool
    }

    /// Where a file of the dataset that is being read lies in the pool, from `from` on; nothing if it does not.
    pub(crate) fn open_memory(
        &mut self,
        call: &'static str,
        path: &str,
        from: u64,
    ) -> Result<(Vec<MemoryAt>, Vec<OwnedFd>), Error> {
        let wait = self.wait;
        let link = self.link(call, Code::State)?;
        let request = Request::OpenMemory { path: path.to_owned(), from };
        match link.ask_for_fds(call, &request, wait)? {
            (Answer::Memory(parts), fds)
                if parts.iter().all(|p| (p.fd as usize) < fds.len() && p.bytes > 0) =>
            {
                Ok((parts, fds))
            }
            (Answer::Failed { code, text }, _) => Err(refused(code, &text)),
            _ => Err(link.give_up(call)),
        }
    }

    /// Ends the dataset: succeeds if all ranks stand for their parts and every routed file is there.
    /// Collective. Whatever comes of it, the dataset is not open any more.
    pub fn complete(&mut self, valid: bool) -> Result<(), Error> {
        self.declare_all("complete", Ask::Complete, valid, false)
    }

    /// Ends the dataset for this rank: its memory may change. A `child` or thread still copies it, or it is copied.
    pub(crate) fn snapshot(&mut self, valid: bool, child: bool) -> Result<(), Error> {
        self.declare_all("checkpoint", Ask::Snapshot, valid, child)
    }

    /// A connection to the agent that a child or a thread is to have.
    pub(crate) fn attach(&mut self, call: &'static str, thread: bool) -> Result<Link, Error> {
        let (path, slot) = &self.place;
        let mut link = Link::connect(path, *slot, self.wait)?;
        let attach = Request::Attach { rank: RankId(self.me.rank), thread };
        match link.ask(call, &attach, self.wait)? {
            Answer::Ok => Ok(link),
            Answer::Failed { code, text } => Err(refused(code, &text)),
            _ => Err(link.give_up(call)),
        }
    }

    fn declare_all(
        &mut self,
        call: &'static str,
        ask: Ask,
        valid: bool,
        child: bool,
    ) -> Result<(), Error> {
        self.own_process()?;
        if !matches!(self.phase, Phase::Writing { .. }) {
            return Err(Error::State { call, phase: self.phase.words() });
        }
        let streams = self.end_streams();
        let Phase::Writing { dir, files, memory, spent, asked, begun, mut blocked, .. } =
            std::mem::replace(&mut self.phase, Phase::Idle)
        else {
            unreachable!("the phase was looked at above")
        };
        let now = Instant::now();
        if self.link.is_none() {
            let done = if valid { streams } else { Err(Fault::Said) };
            return done.map_err(|fault| self.dropped(fault));
        }
        let declared = match valid {
            true => streams.and_then(|()| self.declare(&dir, files)),
            false => Err(Fault::Said),
        };
        let (mut files, fault) = match declared {
            Ok(files) => (files, None),
            Err(fault) => (Vec::new(), Some(fault)),
        };
        blocked += now.elapsed();
        debug_assert!(asked <= begun);
        let rank = RankId(self.me.rank);
        let decl = |(file, bytes): &(MemoryFile, u64)| FileDecl {
            rank,
            path: file.path.clone(),
            bytes: *bytes,
        };
        files.extend(memory.iter().map(decl));
        let own = Own {
            valid: fault.is_none(),
            files,
            write_us: micros(now - begun),
            blocked_us: micros(blocked),
            memory: memory.into_iter().map(|(file, _)| file).collect(),
            pool_us: micros(spent.wait),
            copy_us: micros(spent.copy),
            child,
            settings: Vec::new(),
        };
        let done = self.collective(ask, own, |a, _| (a == Answer::Ok).then_some(()));
        match (done, fault) {
            (Ok(()), None) => Ok(()),
            (Err(Error::Refused { code: Code::Dropped, .. }) | Ok(()), Some(fault)) => {
                Err(self.dropped(fault))
            }
            (Err(error), _) => Err(error),
        }
    }

    fn dropped(&self, fault: Fault) -> Error {
        Error::Dropped { rank: self.me.rank, fault }
    }

    fn declare(&self, dir: &str, files: BTreeSet<String>) -> Result<Vec<FileDecl>, Fault> {
        let rank = RankId(self.me.rank);
        files
            .into_iter()
            .map(|path| match std::fs::symlink_metadata(format!("{dir}/{path}")) {
                Ok(meta) if meta.is_file() => Ok(FileDecl { rank, path, bytes: meta.len() }),
                Ok(_) => Err(Fault::NoFile { path: Words::name(&path) }),
                Err(cause) => Err(Fault::File { path: Words::name(&path), cause }),
            })
            .collect()
    }

    /// Returns when the dataset has reached the level or one that survives as much (FM-L6). Local.
    pub fn wait(&mut self, no: DatasetNo, level: Level, timeout_ms: u64) -> Result<(), Error> {
        const CALL: &str = "wait";
        self.not_finished(CALL)?;
        let link = self.link(CALL, Code::Level)?;
        let wait = wire::patience(timeout_ms);
        match link.ask(CALL, &Request::Wait { no, level, timeout_ms }, wait)? {
            Answer::Ok => Ok(()),
            // This rank may know more of it.
            Answer::Failed { code: Code::Level, text } => {
                let text = self.snapshots.copies.failure(no).map_or(text, Error::to_string);
                Err(refused(Code::Level, &text))
            }
            Answer::Failed { code, text } => Err(refused(code, &text)),
            _ => Err(link.give_up(CALL)),
        }
    }

    fn restart(&mut self, ask: Ask) -> Result<Option<RestartInfo>, Error> {
        self.increment.forget();
        self.collective(ask, Own::default(), |answer, me| match answer {
            Answer::Restart(info) if info.as_ref().is_none_or(|i| sound(i, me)) => Some(info),
            _ => None,
        })
    }

    /// Is there a dataset to restart from? Collective. Disabled: none.
    pub fn have_restart(&mut self) -> Result<Option<Offer>, Error> {
        self.idle("have_restart")?;
        if self.link.is_none() {
            return Ok(None);
        }
        Ok(self.restart(Ask::HaveRestart)?.as_ref().map(offer))
    }

    /// The dataset that is being read.
    pub(crate) fn reading(&self, call: &'static str) -> Result<Offer, Error> {
        self.own_process()?;
        match &self.phase {
            Phase::Reading(info) => Ok(offer(info)),
            _ => Err(Error::State { call, phase: "while no dataset is being read" }),
        }
    }

    /// Begins to read the dataset that is offered. Collective.
    pub fn start_restart(&mut self) -> Result<Offer, Error> {
        const CALL: &str = "start_restart";
        const NONE: Error = Error::State { call: CALL, phase: "without a dataset to restart from" };
        self.idle(CALL)?;
        if self.link.is_none() {
            return Err(NONE);
        }
        let info = self.restart(Ask::StartRestart)?.ok_or(NONE)?;
        let offer = offer(&info);
        self.phase = Phase::Reading(info);
        Ok(offer)
    }

    /// Ends the reading: succeeds if all ranks could read theirs; otherwise `have_restart` tells the next
    /// older dataset. Collective.
    pub fn complete_restart(&mut self, valid: bool) -> Result<(), Error> {
        self.own_process()?;
        if !matches!(self.phase, Phase::Reading(_)) {
            return Err(Error::State { call: "complete_restart", phase: self.phase.words() });
        }
        self.phase = Phase::Idle;
        self.streams.close_all();
        let own = Own { valid, ..Own::default() };
        self.collective(Ask::CompleteRestart, own, |a, _| (a == Answer::Ok).then_some(()))
    }

    fn manage(
        &mut self,
        call: &'static str,
        dataset: &str,
        ask: impl FnOnce(String) -> Ask,
    ) -> Result<(), Error> {
        self.idle(call)?;
        check_dataset(dataset)?;
        if self.link.is_none() { Ok(()) } else { self.simple(ask(dataset.to_owned())) }
    }

    /// Makes this dataset the one to restart from, or says that it was loaded by own means. Collective.
    pub fn current(&mut self, dataset: &str) -> Result<(), Error> {
        self.manage("current", dataset, |name| Ask::Current { name })
    }

    /// Forgets this dataset; files in the prefix stay. Collective.
    pub fn drop_dataset(&mut self, dataset: &str) -> Result<(), Error> {
        self.manage("drop", dataset, |name| Ask::Drop { name })
    }

    /// Forgets this dataset and deletes its files. Collective.
    pub fn delete(&mut self, dataset: &str) -> Result<(), Error> {
        self.manage("delete", dataset, |name| Ask::Delete { name })
    }

    /// Changes a setting that may change while the job runs; all ranks set the same before their next
    /// collective call, with which it counts.
    pub fn set(&mut self, name: &str, value: &str) -> Result<(), Error> {
        self.not_finished("config_set")?;
        let setting = config::find(name)?;
        self.settings.set_by_application(name, value, true)?;
        if self.link.is_some() {
            self.pending.retain(|(n, _)| n != setting.name);
            let value = if value.is_empty() { "" } else { self.settings.text(setting.name) };
            self.pending.push((setting.name.to_owned(), value.to_owned()));
        }
        Ok(())
    }

    /// The value of a setting now. Local.
    pub fn get(&mut self, name: &str) -> Result<Option<String>, Error> {
        const CALL: &str = "config_get";
        self.not_finished(CALL)?;
        let setting = config::find(name)?;
        let wait = self.wait;
        let local = Some(self.settings.text(setting.name).to_owned()).filter(|v| !v.is_empty());
        if self.link.is_none() || self.pending.iter().any(|(n, _)| n == setting.name) {
            return Ok(local);
        }
        let link = self.link(CALL, Code::State)?;
        match link.ask(CALL, &Request::GetSetting { name: setting.name.to_owned() }, wait)? {
            Answer::Setting(value) => Ok(value),
            Answer::Failed { code, text } => Err(refused(code, &text)),
            _ => Err(link.give_up(CALL)),
        }
    }

    /// Has the agent tell the user something. Local.
    pub fn warn(&mut self, text: &str) -> Result<(), Error> {
        const CALL: &str = "warn";
        self.own_process()?;
        let wait = self.wait;
        let link = self.link(CALL, Code::State)?;
        let text = Words::new(text).as_str().to_owned();
        match link.ask(CALL, &Request::Warn { text }, wait)? {
            Answer::Ok => Ok(()),
            Answer::Failed { code, text } => Err(refused(code, &text)),
            _ => Err(link.give_up(CALL)),
        }
    }

    /// The rank has no more to say. Collective.
    pub fn finalize(&mut self) -> Result<(), Error> {
        self.idle("finalize")?;
        let done = if self.link.is_none() { Ok(()) } else { self.simple(Ask::Finalize) };
        if done.is_ok() {
            self.phase = Phase::Finished;
            self.link = None;
        }
        done
    }
}

/// Asks for memory, and maps what comes.
fn ask_lent(
    link: &mut Option<Link>,
    pool: &mut PoolMap,
    call: &'static str,
    request: &Request,
    wait: Duration,
) -> Result<Vec<Lent>, Error> {
    let link = link.as_mut().ok_or(Error::Disabled { call, code: Code::State })?;
    match link.ask_for_fds(call, request, wait)? {
        (Answer::Lent(lent), fds) if lent.len() <= limits::EXTENTS_PER_ANSWER_MAX => {
            if pool.take(&lent, fds)? { Ok(lent) } else { Err(link.give_up(call)) }
        }
        (Answer::Failed { code, text }, _) => {
            pool.refused();
            Err(refused(code, &text))
        }
        _ => Err(link.give_up(call)),
    }
}

/// What is known about the wait for all ranks before anybody answered.
fn init_timeout(options: &Options) -> u64 {
    let mut settings = Settings::default();
    if let Some(value) = options.environment.outranks("init_timeout_ms") {
        // Malformed values were refused before.
        let _ = settings.set("init_timeout_ms", value);
    }
    settings.number("init_timeout_ms")
}

fn refused(code: Code, text: &str) -> Error {
    Error::Refused { code, text: Words::new(text) }
}

fn micros(time: Duration) -> u64 {
    time.as_micros().try_into().unwrap_or(u64::MAX)
}

fn offer(info: &RestartInfo) -> Offer {
    Offer { no: info.key.no, name: info.name.clone(), flags: info.flags }
}

fn check_dataset(dataset: &str) -> Result<(), Error> {
    name::check_dataset(dataset).map_err(|cause| Error::Name {
        what: "dataset",
        name: Words::name(dataset),
        cause,
    })
}

fn absolute(dir: &str) -> bool {
    dir.starts_with('/') && dir.len() <= 4096 && !dir.bytes().any(|b| b == 0)
}

fn sound(info: &RestartInfo, me: Identity) -> bool {
    absolute(&info.dir)
        && name::check_dataset(&info.name).is_ok()
        && info.files.len() <= limits::RANK_FILES_MAX
        && info.files.iter().all(|f| f.rank.0 == me.rank && name::check_path(&f.path).is_ok())
}
