//! The application: ranks that compute, write checkpoints, restart; and their launcher.

use crate::agents::CACHE;
use crate::fault::{Moment, What};
use crate::judge::Piece;
use crate::rng::mix;
use crate::world::{CtrlId, Event, Peer, World};
use stanchion_core::api::{ConnId, ControllerEvent};
use stanchion_format::client::{
    Answer, Ask, Code, FLAG_CHECKPOINT, FLAG_OUTPUT, Lent, Own, Request, RestartInfo,
};
use stanchion_format::ids::{AgentId, Key, Level, RankId, SlotId};
use stanchion_format::index::cache_rank_dir;
use stanchion_format::layout::block_slot;
use stanchion_format::manifest::FileDecl;
use std::collections::BTreeMap;

/// Something happens to a rank.
#[derive(Debug)]
pub enum RankEvent {
    /// Its process starts.
    Start,
    /// Its agent answers.
    Answer(Box<Answer>),
    /// What it was doing takes no longer.
    Go,
    /// Its connection is gone.
    Closed,
}

/// What a rank waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// To start.
    New,
    /// `Welcome`.
    Hello,
    /// Memory of its own.
    Reserve,
    /// The answer to have_restart.
    Have,
    /// The answer to start_restart.
    StartRestart,
    /// Its own reading.
    Reading,
    /// The answer to complete_restart.
    CompleteRestart,
    /// Its own computing.
    Computing,
    /// The answer to need_checkpoint.
    Need,
    /// The answer to begin.
    Begin,
    /// Memory to write to.
    Lend,
    /// Its own writing.
    Writing,
    /// The answer to complete.
    Complete,
    /// The agent to know the connection of its child.
    Attach,
    /// The answer to the snapshot.
    Snapshot,
    /// A level.
    Level,
    /// The answer to should_exit.
    ShouldExit,
    /// The answer to finalize.
    Finalize,
    /// Nothing ever again.
    Over,
}

/// A process of the application.
#[derive(Debug)]
pub struct Rank {
    /// Its agent.
    pub agent: AgentId,
    /// Its slot, as it was told.
    pub slot: SlotId,
    /// Its connection.
    pub conn: Option<ConnId>,
    /// What it waits for.
    pub state: State,
    /// Steps computed.
    pub step: u64,
    /// What it has computed: the same on all ranks.
    pub value: u64,
    /// It runs.
    pub alive: bool,
    /// Collectives it has made, for comparing answers.
    pub calls: u64,
    open: Option<(Key, bool)>,
    restart: Option<RestartInfo>,
    /// Files of the open dataset as declared.
    files: Vec<FileDecl>,
    /// What it was lent for the open dataset.
    lent: Vec<Lent>,
    /// What of it was handed over: number, bytes.
    handed: Vec<(u64, u64)>,
    /// Of its grid as it is written: its dataset, path and bytes.
    grid: Option<Grid>,
    /// Of the last dataset that was completed.
    pub(crate) base: Option<Grid>,
    /// The pool is too small: this dataset goes into files.
    to_files: bool,
    hangs: bool,
    /// What it says at the snapshot, until its child is attached.
    pub(crate) said: Option<Own>,
    level: Level,
}

/// A file that changes in parts: its dataset, path and bytes.
pub type Grid = (Key, String, Vec<u8>);

/// One launch.
#[derive(Debug)]
pub struct App {
    /// Who launched it.
    pub ctrl: CtrlId,
    /// That one still runs.
    pub ctrl_lives: bool,
    /// Different for each launch: two launches never compute the same.
    pub nonce: u64,
    /// Its ranks.
    pub ranks: Vec<Rank>,
    /// Those of each agent.
    by_agent: BTreeMap<AgentId, Vec<usize>>,
    /// The launcher runs.
    pub alive: bool,
    killing: bool,
    failed: Option<i32>,
    /// The controller waits for its end.
    stopping: bool,
}

/// Blocks of a grid.
const GRID_BLOCKS: u64 = 16;
/// Bytes of one.
pub const GRID_BLOCK: usize = 64;

/// The files that a rank writes after a step.
fn planned(
    cfg: &crate::scenario::App,
    id: RankId,
    step: u64,
    value: u64,
) -> Vec<(String, Vec<u8>)> {
    let file = |n: u64| {
        let dice = mix(value ^ mix(n ^ (u64::from(id.0) << 8)));
        let large = cfg.large_in > 0 && dice.is_multiple_of(cfg.large_in);
        let len = if large { 4096 + dice % 9000 } else { dice % 700 } as usize;
        let rank = id.0;
        let path = if cfg.same_names {
            format!("state/r{rank}.{n}")
        } else {
            format!("step.{step}/r{rank}.{n}")
        };
        (path, content(value, id, n, len))
    };
    let mut files: Vec<_> = (0..mix(value ^ u64::from(id.0)) % (cfg.files + 1)).map(file).collect();
    if cfg.increments {
        let rank = id.0;
        let path =
            if cfg.same_names { format!("state/g{rank}") } else { format!("step.{step}/g{rank}") };
        files.push((path, grid(value, id)));
    }
    files
}

/// A file of which most is as it was in the dataset before: a fourth of its blocks are a function of what was computed.
fn grid(value: u64, id: RankId) -> Vec<u8> {
    let block = |n: u64| {
        let changed = mix(value ^ n).is_multiple_of(4);
        content(if changed { value } else { 0 }, id, 1 << 20 | n, GRID_BLOCK)
    };
    (0..GRID_BLOCKS).flat_map(block).collect()
}

/// The bytes of a file: a function of what was computed, the rank and the file's number.
pub fn content(value: u64, rank: RankId, file: u64, len: usize) -> Vec<u8> {
    let mut x = mix(value ^ mix((u64::from(rank.0) << 32) | file));
    let mut out = Vec::with_capacity(len + 8);
    while out.len() < len {
        x = mix(x);
        out.extend_from_slice(&x.to_le_bytes());
    }
    out.truncate(len);
    out
}

impl World {
    /// The application is launched.
    pub(crate) fn launch(&mut self, c: CtrlId, slots: &[AgentId], run: u64) {
        let count = self.sc.app.ranks;
        let app = self.apps.len();
        let nonce = mix(self.sc.seed ^ mix(app as u64 + 1));
        self.note(|| format!("launch {run} of {count} ranks on {slots:?}"));
        let ranks: Vec<Rank> = (0..count)
            .map(|r| {
                let slot = block_slot(r, count, slots.len() as u32);
                Rank {
                    agent: slots[slot.0 as usize],
                    slot,
                    conn: None,
                    state: State::New,
                    step: 0,
                    value: nonce,
                    alive: true,
                    calls: 0,
                    open: None,
                    restart: None,
                    files: Vec::new(),
                    lent: Vec::new(),
                    handed: Vec::new(),
                    grid: None,
                    base: None,
                    to_files: false,
                    hangs: false,
                    said: None,
                    level: Level::Cached,
                }
            })
            .collect();
        let mut by_agent: BTreeMap<AgentId, Vec<usize>> = BTreeMap::new();
        for (n, rank) in ranks.iter().enumerate() {
            by_agent.entry(rank.agent).or_default().push(n);
        }
        self.apps.push(App {
            ctrl: c,
            ctrl_lives: true,
            nonce,
            ranks,
            by_agent,
            alive: true,
            killing: false,
            failed: None,
            stopping: false,
        });
        if let Some(p) = self.ctrls.get_mut(&c) {
            p.app = Some(app);
        }
        for rank in 0..count as usize {
            let delay = 1_000 + self.rng.below(60_000);
            self.push(delay, Event::Rank(app, rank, RankEvent::Start));
        }
    }

    /// Living ranks of an agent, of all launches.
    pub(crate) fn ranks_on(&self, id: AgentId) -> Vec<(usize, usize)> {
        (0..)
            .zip(&self.apps)
            .flat_map(|(app, a)| {
                let mine = a.by_agent.get(&id).into_iter().flatten();
                mine.filter(|r| a.ranks[**r].alive).map(move |r| (app, *r))
            })
            .collect()
    }

    pub(crate) fn rank(&mut self, app: usize, rank: usize) -> &mut Rank {
        &mut self.apps[app].ranks[rank]
    }

    pub(crate) fn rank_event(&mut self, app: usize, rank: usize, event: RankEvent) {
        if !self.rank(app, rank).alive {
            return;
        }
        match event {
            RankEvent::Start => self.rank_starts(app, rank),
            RankEvent::Closed => self.kill_rank(app, rank, 1),
            RankEvent::Answer(answer) => self.rank_answer(app, rank, *answer),
            RankEvent::Go => match self.rank(app, rank).state {
                State::Reading => self.rank_reads(app, rank),
                State::Computing => self.rank_computed(app, rank),
                State::Writing => self.rank_writes(app, rank),
                _ => {}
            },
        }
    }

    fn rank_starts(&mut self, app: usize, rank: usize) {
        self.connections += 1;
        let conn = ConnId(self.connections);
        self.conns.insert(conn, (app, rank));
        let size = self.apps[app].ranks.len() as u32;
        let r = self.rank(app, rank);
        r.conn = Some(conn);
        let hello =
            Request::Hello { rank: RankId(rank as u32), size, pid: 1, settings: Vec::new() };
        self.ask_raw(app, rank, State::Hello, hello);
    }

    fn ask_raw(&mut self, app: usize, rank: usize, state: State, request: Request) {
        let r = self.rank(app, rank);
        r.state = state;
        let (agent, Some(conn)) = (r.agent, r.conn) else { return };
        if r.hangs {
            return;
        }
        let chance = 10 + self.rng.below(500);
        let delay = if self.costs.is_some() { 0 } else { chance };
        self.push(delay, Event::Request(agent, conn, Box::new(request)));
    }

    fn ask(&mut self, app: usize, rank: usize, state: State, ask: Ask, own: Own) {
        self.rank(app, rank).calls += 1;
        self.ask_raw(app, rank, state, Request::Collective { ask, own });
    }

    fn rank_waits(&mut self, app: usize, rank: usize, state: State, us: u64) {
        self.rank(app, rank).state = state;
        let chance = us / 2 + self.rng.below(us.max(1));
        let priced = (state == State::Writing).then(|| self.cost_writing()).flatten();
        self.push(priced.unwrap_or(chance), Event::Rank(app, rank, RankEvent::Go));
    }

    fn rank_answer(&mut self, app: usize, rank: usize, answer: Answer) {
        let state = self.rank(app, rank).state;
        self.cost_answered(app, rank);
        self.note(|| format!("    rank {rank} {state:?} gets {}", short(&answer)));
        self.judge_answer(app, rank, state, &answer);
        if self.violation.is_some() {
            return;
        }
        match (state, answer) {
            (State::Hello, Answer::Welcome { slot, .. }) => {
                self.rank(app, rank).slot = slot;
                if self.sc.app.memory && self.rng.chance(500) {
                    let bytes = 1 + self.rng.below(20_000);
                    return self.ask_raw(app, rank, State::Reserve, Request::Reserve { bytes });
                }
                self.ask(app, rank, State::Have, Ask::HaveRestart, Own::default());
            }
            (State::Reserve, Answer::Lent(lent)) => {
                self.rank_maps(app, rank, &lent, false);
                self.ask(app, rank, State::Have, Ask::HaveRestart, Own::default());
            }
            (State::Have, Answer::Restart(Some(_))) => {
                self.ask(app, rank, State::StartRestart, Ask::StartRestart, Own::default());
            }
            (State::Have, Answer::Restart(None)) => self.rank_computes(app, rank),
            (State::StartRestart, Answer::Restart(Some(info))) => {
                self.rank(app, rank).restart = Some(info);
                self.rank_waits(app, rank, State::Reading, 20_000);
            }
            (State::CompleteRestart, Answer::Ok) => self.rank_computes(app, rank),
            (State::CompleteRestart, Answer::Failed { code: Code::Rejected, .. }) => {
                let nonce = self.apps[app].nonce;
                let r = self.rank(app, rank);
                (r.step, r.value) = (0, nonce);
                self.ask(app, rank, State::Have, Ask::HaveRestart, Own::default());
            }
            (State::Need, Answer::Flag(true)) => self.rank_begins(app, rank),
            (State::Need, Answer::Flag(false)) => self.rank_ends_step(app, rank),
            (State::Begin, Answer::Began { key, .. }) => {
                let memory = self.sc.app.memory;
                let r = self.rank(app, rank);
                r.open = Some((key, true));
                r.lent.clear();
                r.handed.clear();
                r.to_files = !memory;
                self.rank_lends(app, rank);
            }
            (State::Lend, Answer::Lent(lent)) => {
                self.rank_maps(app, rank, &lent, true);
                let r = self.rank(app, rank);
                r.to_files = lent.is_empty();
                r.lent.extend(lent);
                self.rank_lends(app, rank);
            }
            // No room: the others hear of it.
            (State::Lend, Answer::Failed { code: Code::Space | Code::Timeout, .. }) => {
                self.rank(app, rank).files.clear();
                self.rank_declares(app, rank, Own::default());
            }
            // The dataset has a number, this rank has no directory.
            (State::Begin, Answer::Failed { code: Code::Space | Code::Io, .. }) => {
                self.rank(app, rank).files.clear();
                self.rank_declares(app, rank, Own::default());
            }
            (State::Complete | State::Snapshot, Answer::Ok) => self.rank_completed(app, rank),
            (
                State::Complete | State::Snapshot,
                Answer::Failed { code: Code::Dropped | Code::Space, .. },
            ) => {
                let r = self.rank(app, rank);
                (r.grid, r.base) = (None, None);
                self.children_stop(app, rank);
                self.rank_ends_step(app, rank);
            }
            (State::Level, _) => self.rank_ends_step(app, rank),
            (State::ShouldExit, Answer::Flag(exit)) => {
                let over = exit || self.rank(app, rank).step >= self.sc.app.steps;
                if over {
                    self.ask(app, rank, State::Finalize, Ask::Finalize, Own::default());
                } else {
                    self.rank_computes(app, rank);
                }
            }
            (State::Finalize, Answer::Ok) => self.rank_exits(app, rank),
            // Whatever else fails: a sensible program gives up.
            _ => self.kill_rank(app, rank, 1),
        }
    }

    fn rank_computes(&mut self, app: usize, rank: usize) {
        let us = self.sc.app.step_ms * 1000;
        self.rank_waits(app, rank, State::Computing, us);
    }

    fn rank_computed(&mut self, app: usize, rank: usize) {
        let nonce = self.apps[app].nonce;
        let r = self.rank(app, rank);
        r.step += 1;
        r.value = mix(r.value ^ mix(nonce ^ r.step));
        self.take_armed(app, rank, |w| matches!(w, What::RankHangs(_)));
        self.ask(app, rank, State::Need, Ask::NeedCheckpoint, Own::default());
    }

    fn rank_begins(&mut self, app: usize, rank: usize) {
        let step = self.rank(app, rank).step;
        let every = self.sc.app.output_every;
        let output = every > 0 && step.is_multiple_of(every);
        let flags = FLAG_CHECKPOINT | if output { FLAG_OUTPUT } else { 0 };
        let ask = Ask::Begin { name: format!("ckpt.{step}"), flags };
        self.ask(app, rank, State::Begin, ask, Own::default());
    }

    /// Asks for memory until there is enough for what it will write.
    fn rank_lends(&mut self, app: usize, rank: usize) {
        let cfg = self.sc.app.clone();
        let r = self.rank(app, rank);
        let files = planned(&cfg, RankId(rank as u32), r.step, r.value);
        let handed: u64 = r.handed.iter().map(|h| h.1).sum();
        let all: u64 = files.iter().map(|(_, bytes)| bytes.len() as u64).sum();
        let need = all - handed;
        let have: u64 = r.lent.iter().map(|l| l.bytes).sum();
        if r.to_files || have >= need {
            return self.rank_waits(app, rank, State::Writing, 30_000);
        }
        let (agent, number) = (r.agent, r.handed.len() as u64);
        let (mut filled, mut bytes) = (Vec::new(), need - have);
        // A child copies into what is lent, all of it when all is there.
        if self.sc.stores && !self.sc.app.cow && self.rng.chance(600) {
            let lent = std::mem::take(&mut self.rank(app, rank).lent);
            let whole: Vec<u8> = files.into_iter().flat_map(|(_, bytes)| bytes).collect();
            filled = self.hand_in(agent, &lent, &whole[handed as usize..], number);
            let handed = filled.iter().zip(&lent).map(|(f, l)| (f.number, l.bytes));
            self.rank(app, rank).handed.extend(handed);
            bytes = need - have;
        }
        let request = Request::Lend { bytes, filled, anew: false };
        self.ask_raw(app, rank, State::Lend, request);
    }

    fn rank_maps(&mut self, app: usize, rank: usize, lent: &[Lent], lending: bool) {
        let r = self.rank(app, rank);
        let (agent, Some(conn)) = (r.agent, r.conn) else { return };
        if self.agents.get(&agent).is_some_and(|p| p.alive) {
            self.mapped(agent, conn, lent, lending);
        }
    }

    fn rank_writes(&mut self, app: usize, rank: usize) {
        self.moment(Moment::Write);
        if !self.rank(app, rank).alive {
            return;
        }
        let cfg = self.sc.app.clone();
        let id = RankId(rank as u32);
        let r = self.rank(app, rank);
        let (Some((key, _)), value, step) = (r.open, r.value, r.step) else { return };
        let (agent, slot) = (r.agent, r.slot);
        let short = self.take_armed(app, rank, |w| matches!(w, What::RankShort(_)));
        let invalid = self.take_armed(app, rank, |w| matches!(w, What::RankInvalid(_)));
        let now = self.now;
        let to_files = self.rank(app, rank).to_files;
        let mut files = Vec::new();
        let mut copies = Vec::new();
        let mut grid = None;
        let mut ok = !invalid;
        for (path, bytes) in planned(&cfg, id, step, value) {
            files.push(FileDecl { rank: id, path: path.clone(), bytes: bytes.len() as u64 });
            let Some(p) = self.agents.get_mut(&agent).filter(|p| p.alive) else { return };
            if to_files && p.store.full_until > now {
                ok = false;
                continue;
            }
            let mut written = bytes.clone();
            if short {
                written.truncate(bytes.len() / 2);
            }
            if to_files {
                p.store.files.insert((key, slot, id, path.clone()), written);
            } else {
                if cfg.increments && path.ends_with(&format!("/g{rank}")) {
                    grid = Some((key, path.clone(), written.clone()));
                }
                copies.push((path.clone(), written));
            }
            self.judge.wrote(key, Piece { rank: id, path, bytes });
        }
        let lent = std::mem::take(&mut self.rank(app, rank).lent);
        let handed = std::mem::take(&mut self.rank(app, rank).handed);
        // Some of it may be memory that a child would not see as it is.
        let cow = self.sc.app.memory && self.sc.app.cow && !to_files && self.rng.chance(850);
        let mut later = Vec::new();
        // A child copies all, and what was handed over is the beginning of all.
        let base = self.rank(app, rank).base.clone().filter(|_| !cow && handed.is_empty());
        self.rank(app, rank).grid = grid;
        let later_of = cow.then_some(&mut later);
        let memory = self.copy_in(agent, &lent, (&copies, base), &handed, later_of);
        if self.violation.is_some() {
            return;
        }
        ok &= memory.is_some();
        let memory = memory.unwrap_or_default();
        self.judge_wrote(key, id, step, value, ok);
        let r = self.rank(app, rank);
        r.files.clone_from(&files);
        r.open = Some((key, ok));
        let own = Own { valid: ok, files, memory, write_us: 1, blocked_us: 1, ..Own::default() };
        if cow && ok {
            return self.rank_attaches(app, rank, own, later);
        }
        self.rank_declares(app, rank, own);
    }

    pub(crate) fn rank_declares(&mut self, app: usize, rank: usize, own: Own) {
        let cow = self.sc.app.memory && self.sc.app.cow;
        let (state, ask) =
            if cow { (State::Snapshot, Ask::Snapshot) } else { (State::Complete, Ask::Complete) };
        self.ask(app, rank, state, ask, own);
    }

    fn rank_completed(&mut self, app: usize, rank: usize) {
        let r = self.rank(app, rank);
        r.base = r.grid.take();
        let Some((key, _)) = r.open.take() else {
            return self.rank_ends_step(app, rank);
        };
        let dice = mix(self.rank(app, rank).value) % 1000;
        if dice < u64::from(self.sc.app.wait_permille) {
            let level = match dice % 3 {
                _ if dice.is_multiple_of(2) => Level::Protected,
                0 if self.sc.app.cow => Level::Cached,
                _ => Level::Persistent,
            };
            self.rank(app, rank).level = level;
            let wait = Request::Wait { no: key.no, level, timeout_ms: 100 + dice * 3 };
            self.rank(app, rank).open = Some((key, true));
            self.ask_raw(app, rank, State::Level, wait);
        } else {
            self.rank_ends_step(app, rank);
        }
    }

    /// The dataset whose level the rank waits for.
    pub(crate) fn waited_for(&self, app: usize, rank: usize) -> Option<Key> {
        self.apps[app].ranks[rank].open.map(|(k, _)| k)
    }

    /// The level that the rank waits for.
    pub(crate) fn level_of(&self, app: usize, rank: usize) -> Level {
        self.apps[app].ranks[rank].level
    }

    fn rank_ends_step(&mut self, app: usize, rank: usize) {
        self.rank(app, rank).open = None;
        self.ask(app, rank, State::ShouldExit, Ask::ShouldExit, Own::default());
    }

    /// Reads what it restarts from, and compares every byte with what was written.
    fn rank_reads(&mut self, app: usize, rank: usize) {
        self.moment(Moment::Read);
        let r = self.rank(app, rank);
        if !r.alive {
            return;
        }
        let Some(info) = r.restart.take() else { return };
        let (agent, slot, id) = (r.agent, r.slot, RankId(rank as u32));
        if info.dir != cache_rank_dir(CACHE, info.key, slot, id) {
            return self.violate("FM-S7", format!("rank {id} is sent to {}", info.dir));
        }
        let Some(p) = self.agents.get(&agent).filter(|p| p.alive) else { return };
        let read: Vec<(String, Option<Vec<u8>>)> = info
            .files
            .iter()
            .map(|f| {
                let bytes = p.store.files.get(&(info.key, slot, id, f.path.clone())).cloned();
                (f.path.clone(), bytes)
            })
            .collect();
        let Some((step, value)) = self.judge_read(info.key, id, &read) else { return };
        let reject = self.take_armed(app, rank, |w| matches!(w, What::RankRejects(_)));
        let r = self.rank(app, rank);
        (r.step, r.value) = (step, value);
        let own = Own { valid: !reject, ..Own::default() };
        if reject {
            self.judge_rejected(info.key);
        }
        self.ask(app, rank, State::CompleteRestart, Ask::CompleteRestart, own);
    }

    /// Is this rank the one that was told to misbehave now?
    fn take_armed(&mut self, app: usize, rank: usize, is: impl Fn(&What) -> bool) -> bool {
        let count = self.apps[app].ranks.len();
        let found = self.armed.iter().position(|w| {
            let (What::RankHangs(n)
            | What::RankInvalid(n)
            | What::RankShort(n)
            | What::RankRejects(n)) = w
            else {
                return false;
            };
            is(w) && *n as usize % count == rank
        });
        let Some(place) = found else { return false };
        let what = self.armed.remove(place);
        self.note(|| format!("rank {rank} misbehaves: {what:?}"));
        if matches!(what, What::RankHangs(_)) {
            self.rank(app, rank).hangs = true;
        }
        true
    }

    fn rank_exits(&mut self, app: usize, rank: usize) {
        self.rank_ended(app, rank, 0);
    }

    /// A rank dies.
    pub(crate) fn kill_rank(&mut self, app: usize, rank: usize, code: i32) {
        self.rank_ended(app, rank, code);
    }

    fn rank_ended(&mut self, app: usize, rank: usize, code: i32) {
        let r = self.rank(app, rank);
        if !r.alive {
            return;
        }
        r.alive = false;
        r.state = State::Over;
        let (agent, conn) = (r.agent, r.conn);
        self.note(|| format!("rank {rank} ends with {code}"));
        self.rank_leaves_children(app, rank);
        if let Some(conn) = conn {
            let delay = 20 + self.rng.below(300);
            self.push(delay, Event::ConnGone(agent, conn));
        }
        let a = &mut self.apps[app];
        if code != 0 {
            a.failed.get_or_insert(code);
        }
        if a.ranks.iter().all(|r| !r.alive) {
            self.app_over(app);
        } else if code != 0 && !std::mem::replace(&mut a.killing, true) {
            let delay = 1_000 + self.rng.below(200_000);
            self.push(delay, Event::LauncherKills(app));
        }
    }

    /// A launcher whose rank died ends the others.
    pub(crate) fn launcher_kills(&mut self, app: usize) {
        for rank in 0..self.apps[app].ranks.len() {
            self.kill_rank(app, rank, 137);
        }
    }

    /// Ends the application: what the launcher can reach.
    pub(crate) fn stop_ranks(&mut self, app: usize) {
        self.launcher_kills(app);
    }

    /// A controller wants the application to end.
    pub(crate) fn stop_app(&mut self, c: CtrlId) {
        let Some(app) = self.ctrls[&c].app else {
            return self.push(1_000, Event::Ctrl(c, Box::new(ControllerEvent::AppStopped)));
        };
        self.apps[app].stopping = true;
        if self.apps[app].alive {
            self.stop_ranks(app);
        } else {
            self.push(1_000, Event::Ctrl(c, Box::new(ControllerEvent::AppStopped)));
        }
    }

    /// The last rank ended: the launcher ends too.
    fn app_over(&mut self, app: usize) {
        let a = &mut self.apps[app];
        if !std::mem::replace(&mut a.alive, false) {
            return;
        }
        let (c, stopping, lives) = (a.ctrl, a.stopping, a.ctrl_lives);
        let (success, code) = (a.failed.is_none(), a.failed.unwrap_or(0));
        if success {
            self.judge.app_succeeded = true;
        }
        let event = if stopping {
            ControllerEvent::AppStopped
        } else {
            ControllerEvent::AppExited { success, code }
        };
        if lives && self.place(Peer::Ctrl(c)).is_some() {
            let delay = 1_000 + self.rng.below(20_000);
            self.push(delay, Event::Ctrl(c, Box::new(event)));
        }
    }
}

fn short(answer: &Answer) -> String {
    match answer {
        Answer::Welcome { slot, .. } => format!("welcome to {slot:?}"),
        other => format!("{other:?}").chars().take(200).collect(),
    }
}
