//! What ranks ask, and what they are told.

use super::coll::of_ranks;
use super::{Agent, Dataset, Phase, SlotPart, TaskFor};
use crate::api::{AgentAction, ConnId, Millis, TaskResult, Work};
use crate::bugs::Bug;
use stanchion_format::client::{Answer, Ask, Code, Own, Request, RestartInfo, SettingPair};
use stanchion_format::ids::{AgentId, DatasetNo, Key, Level, RankId, SlotId};
use stanchion_format::layout::block_slot;
use stanchion_format::manifest::FileDecl;
use stanchion_format::peer::{
    Cause, CollId, Contrib, DatasetInfo, RankRange, Record, Severity, Times, Trouble, Verdict,
};
use stanchion_format::{index, limits, name};
use std::collections::{BTreeMap, BTreeSet};

/// One rank.
#[derive(Debug)]
struct Rank {
    conn: ConnId,
    slot: SlotId,
    /// Collectives it has joined.
    seq: u64,
    /// The one it waits for.
    waiting: Option<u64>,
    gone: bool,
    finalized: bool,
}

/// A rank that waits for a level.
#[derive(Debug)]
struct Wait {
    conn: ConnId,
    no: DatasetNo,
    level: Level,
    deadline: Millis,
}

/// What a rank waits for across a restart decision while it lives.
#[derive(Debug)]
struct Across {
    conn: ConnId,
    ask: Ask,
}

/// The ranks of this agent.
#[derive(Debug, Default)]
pub(super) struct Ranks {
    ranks: BTreeMap<RankId, Rank>,
    by_conn: BTreeMap<ConnId, RankId>,
    /// Connections that have said hello and wait for all to come.
    hello: Vec<ConnId>,
    /// All ranks have come; nobody joins later.
    welcome: bool,
    size: u32,
    subtrees: BTreeMap<AgentId, u32>,
    waits: Vec<Wait>,
    across: Vec<Across>,
    /// The dataset between begin and complete.
    open: Option<Key>,
    restart_started: bool,
    pub(super) restart_done: bool,
    /// Stat tasks of a Complete under way: seq → open ones.
    stats: BTreeMap<u64, usize>,
    /// Asks of the ranks by seq, to check and to answer.
    asks: BTreeMap<u64, (Ask, BTreeSet<RankId>)>,
    /// Newest seq that any rank has joined, or that was answered.
    newest: u64,
    /// They were ended within an incarnation: it decides nothing for ranks any more.
    ended: bool,
}

impl Ranks {
    pub(super) fn newest_seq(&self) -> u64 {
        self.newest
    }

    /// Ranks, or those of other agents, have gone so far.
    pub(super) fn answered(&mut self, seq: u64) {
        self.newest = self.newest.max(seq);
    }

    /// All have come, and none of them to this agent: it speaks for its children alone.
    pub(super) fn none_here(&self) -> bool {
        self.welcome && self.ranks.is_empty()
    }

    pub(super) fn any(&self) -> bool {
        !self.by_conn.is_empty()
    }

    /// Were they ended since the plan was installed?
    pub(super) fn ended(&self) -> bool {
        self.ended
    }

    pub(super) fn open_dataset(&self) -> Option<Key> {
        self.open
    }

    pub(super) fn close_dataset(&mut self) {
        self.open = None;
    }

    /// The rank behind a connection, and its slot.
    pub(super) fn behind(&self, conn: ConnId) -> Option<(RankId, SlotId)> {
        let rank = self.by_conn.get(&conn)?;
        Some((*rank, self.ranks.get(rank)?.slot))
    }

    /// The connection of a rank that is there, and its slot.
    pub(super) fn living(&self, rank: RankId) -> Option<(ConnId, SlotId)> {
        let rank = self.ranks.get(&rank).filter(|r| !r.gone && self.welcome)?;
        Some((rank.conn, rank.slot))
    }

    /// Is the restart dataset being read?
    pub(super) fn reading(&self) -> bool {
        self.restart_started
    }

    pub(super) fn slot_of(&self, rank: RankId) -> Option<SlotId> {
        self.ranks.get(&rank).map(|r| r.slot)
    }

    pub(super) fn set_subtrees(&mut self, subtrees: BTreeMap<AgentId, u32>) {
        self.subtrees = subtrees;
    }

    pub(super) fn subtree_has_ranks(&self, child: AgentId) -> bool {
        self.subtrees.get(&child).is_some_and(|n| *n > 0)
    }

    pub(super) fn missing(&self, seq: u64) -> Vec<RankId> {
        let joined = self.asks.get(&seq).map(|a| &a.1);
        self.ranks
            .keys()
            .filter(|r| joined.is_none_or(|j| !j.contains(r)))
            .take(limits::MISSING_RANKS_LISTED_MAX)
            .copied()
            .collect()
    }

    /// Ranks that live on start counting anew; all wait in `across` or compute.
    pub(super) fn new_incarnation(&mut self) {
        for rank in self.ranks.values_mut() {
            if let Some(seq) = rank.waiting.take()
                && let Some((ask, _)) = self.asks.get(&seq)
            {
                self.across.push(Across { conn: rank.conn, ask: ask.clone() });
            }
            rank.seq = 0;
        }
        self.asks.clear();
        self.stats.clear();
        self.newest = 0;
        self.open = None;
        self.restart_started = false;
        self.restart_done = false;
        self.ended = false;
    }

    pub(super) fn any_on(&self, slot: SlotId) -> bool {
        self.ranks.values().any(|r| r.slot == slot)
    }

    fn local_on(&self, slot: SlotId) -> Vec<RankId> {
        self.ranks.iter().filter(|(_, r)| r.slot == slot).map(|(id, _)| *id).collect()
    }
}

impl Agent {
    pub(super) fn answer(&mut self, conn: ConnId, answer: Answer) {
        self.out.push(AgentAction::Answer { conn, answer: Box::new(answer) });
    }

    pub(super) fn fail(&mut self, conn: ConnId, code: Code, text: String) {
        let mut text = text;
        if text.len() > limits::TEXT_BYTES_MAX {
            let mut cut = limits::TEXT_BYTES_MAX;
            while !text.is_char_boundary(cut) {
                cut -= 1;
            }
            text.truncate(cut);
        }
        self.answer(conn, Answer::Failed { code, text });
    }

    pub(super) fn end_ranks(&mut self) {
        // A part of the ranks is gone: what the others asked must not be decided without them.
        self.ranks = Ranks { ended: true, ..Ranks::default() };
        self.colls.retain(|id, _| !of_ranks(*id));
        self.fill.stop();
        self.root_ranks_ended();
        self.out.push(AgentAction::EndRanks(Vec::new()));
    }

    pub(super) fn on_rank_request(&mut self, conn: ConnId, request: Request) {
        match request {
            Request::Hello { rank, size, settings, .. } => {
                self.on_hello(conn, rank, size, settings)
            }
            Request::Attach { rank, .. } => self.on_attach(conn, rank),
            request if self.fill.is_child(conn) => self.on_child_request(conn, request),
            request if !self.ranks.by_conn.contains_key(&conn) => {
                let _ = request;
                self.fail(conn, Code::Protocol, "the first request must be hello".into());
            }
            Request::Collective { ask, own } => self.on_collective(conn, ask, own),
            Request::Wait { no, level, timeout_ms } => {
                let deadline = self.now.mono.after(timeout_ms);
                self.ranks.waits.push(Wait { conn, no, level, deadline });
                self.tick_waits();
            }
            Request::Warn { text } => {
                // The runner escapes what it shows; here only lines are kept whole.
                let shown: String = text
                    .chars()
                    .take(limits::TEXT_BYTES_MAX)
                    .map(|c| if c.is_control() { ' ' } else { c })
                    .collect();
                self.log(Severity::Warn, shown);
                self.answer(conn, Answer::Ok);
            }
            Request::Reserve { bytes } => self.on_reserve(conn, bytes),
            Request::Lend { bytes, filled, anew } => self.on_lend(conn, bytes, &filled, anew),
            Request::OpenMemory { path, from } => self.on_open_memory(conn, path, from),
            Request::Copied => {
                self.fail(conn, Code::Protocol, "a rank has no such request".into());
            }
            Request::GetSetting { name } => {
                let value = stanchion_format::config::find(&name)
                    .ok()
                    .map(|s| self.settings().text(s.name).to_owned())
                    .filter(|v| !v.is_empty());
                self.answer(conn, Answer::Setting(value));
            }
        }
    }

    fn on_hello(&mut self, conn: ConnId, rank: RankId, size: u32, settings: Vec<SettingPair>) {
        let refuse = if self.phase != Phase::Open || self.orphan.orphaned() {
            Some((
                Code::Closing,
                "this job takes no ranks now: it is starting, restoring or winding down".to_owned(),
            ))
        } else if self.view.as_ref().is_none_or(|v| !v.plan.ranks_welcome) {
            Some((Code::Closing, "the job is winding down and takes no new ranks".to_owned()))
        } else if size == 0 || size > limits::RANKS_MAX || rank.0 >= size {
            Some((Code::Invalid, format!("rank {rank} of {size} cannot be")))
        } else if self.ranks.by_conn.contains_key(&conn) {
            Some((Code::Protocol, "hello was said already".to_owned()))
        } else if self.ranks.welcome {
            Some((
                Code::State,
                format!(
                    "rank {rank} comes too late: all {} ranks are there already",
                    self.ranks.size
                ),
            ))
        } else if self.ranks.ranks.contains_key(&rank) {
            Some((
                Code::Invalid,
                format!(
                    "rank {rank} is there already: two processes claim its number; check the launcher's environment"
                ),
            ))
        } else {
            None
        };
        if let Some((code, text)) = refuse {
            self.fail(conn, code, text);
            return;
        }
        let slots = self.view.as_ref().map_or(1, |v| v.plan.slots.len() as u32);
        let mine = self.my_slots();
        let block = block_slot(rank.0, size, slots);
        let Some(first) = mine.first().copied() else {
            self.fail(conn, Code::Closing, "this node is a spare and takes no ranks".into());
            return;
        };
        let slot = if mine.contains(&block) { block } else { first };
        self.ranks.by_conn.insert(conn, rank);
        self.ranks.hello.push(conn);
        self.ranks.ranks.insert(
            rank,
            Rank { conn, slot, seq: 0, waiting: None, gone: false, finalized: false },
        );
        let part = Contrib {
            ranks: 1,
            ask: Some(Ask::Barrier),
            ask_rank: rank,
            settings,
            ranges: vec![RankRange { first: rank, count: 1, slot }],
            size,
            ..Contrib::default()
        };
        super::coll::merge(&mut self.coll(CollId::Init).own, &part);
        self.advance(CollId::Init);
    }

    pub(super) fn deliver_init(&mut self, verdict: Verdict) {
        let waiting = std::mem::take(&mut self.ranks.hello);
        if let Verdict::Failed(code, trouble) = verdict {
            for conn in waiting {
                self.fail(conn, code, format!("the job cannot start: {trouble}"));
            }
            return;
        }
        self.learn_subtrees();
        self.ranks.welcome = true;
        let timeout = self.settings().number("collective_timeout_ms");
        let settings = self.settings().pairs();
        let prefix = self.cfg.prefix.clone();
        for conn in waiting {
            let Some(rank) = self.ranks.by_conn.get(&conn) else { continue };
            let slot = self.ranks.ranks[rank].slot;
            let stores = self.cfg.stores;
            let answer = Answer::Welcome {
                stores,
                slot,
                prefix: prefix.clone(),
                settings: settings.clone(),
                answer_timeout_ms: timeout.saturating_add(30_000),
            };
            self.answer(conn, answer);
        }
    }

    fn on_collective(&mut self, conn: ConnId, ask: Ask, own: Own) {
        let rank_id = self.ranks.by_conn[&conn];
        let Some(rank) = self.ranks.ranks.get_mut(&rank_id) else { return };
        if !self.ranks.welcome || rank.waiting.is_some() {
            self.fail(conn, Code::Protocol, "one call at a time, after the welcome".into());
            return;
        }
        if self.phase != Phase::Open || self.orphan.orphaned() {
            self.fail(conn, Code::Closing, "the job is being restored or winds down".into());
            return;
        }
        rank.seq += 1;
        rank.waiting = Some(rank.seq);
        let seq = rank.seq;
        let slot = rank.slot;
        self.ranks.newest = self.ranks.newest.max(seq);
        self.ranks
            .asks
            .entry(seq)
            .or_insert_with(|| (ask.clone(), BTreeSet::new()))
            .1
            .insert(rank_id);
        let mut part = Contrib {
            ranks: 1,
            ask: Some(ask.clone()),
            ask_rank: rank_id,
            settings: own.settings.clone(),
            times: Times {
                write_us: own.write_us,
                blocked_us: own.blocked_us,
                copy_us: own.copy_us,
                pool_us: own.pool_us,
                copy_sum_us: own.copy_us,
                pool_sum_us: own.pool_us,
                ..Times::default()
            },
            ..Contrib::default()
        };
        match ask {
            Ask::Complete | Ask::Snapshot => {
                part.ranges = vec![RankRange { first: rank_id, count: 1, slot }];
                part.trouble = self.take_files(rank_id, slot, &own, &mut part);
                let child = own.child && ask == Ask::Snapshot;
                self.take_memory(conn, rank_id, own, child, &mut part.trouble);
            }
            Ask::CompleteRestart if !own.valid => {
                part.trouble = Some(Trouble::new(Cause::SaidInvalid).rank(rank_id).slot(slot));
            }
            _ => {}
        }
        let id = CollId::Seq(seq);
        super::coll::merge(&mut self.coll(id).own, &part);
        if self.coll(id).verdict.is_some() {
            self.deliver_late(seq, rank_id);
            return;
        }
        self.own_part(seq);
    }

    /// Checks and keeps what a rank declared at complete.
    fn take_files(
        &mut self,
        rank: RankId,
        slot: SlotId,
        own: &Own,
        part: &mut Contrib,
    ) -> Option<Trouble> {
        let here = |cause| Trouble::new(cause).rank(rank).slot(slot);
        if !own.valid {
            return Some(here(Cause::SaidInvalid));
        }
        if own.files.len() > limits::RANK_FILES_MAX {
            return Some(here(Cause::Malformed));
        }
        let Some(dataset) = self.ranks.open.and_then(|k| self.datasets.get_mut(&k)) else {
            return Some(here(Cause::State));
        };
        let declared = dataset.slots.entry(slot).or_default().declared.get_or_insert_default();
        for file in &own.files {
            if file.rank != rank || name::check_path(&file.path).is_err() {
                return Some(here(Cause::Name).file(file.path.clone()));
            }
            if let Some(other) = declared.iter().find(|d| d.path == file.path) {
                // FM-S16
                let _ = other;
                return Some(here(Cause::SamePath).file(file.path.clone()));
            }
            declared.push(file.clone());
            part.bytes = part.bytes.saturating_add(file.bytes);
            part.files += 1;
        }
        None
    }

    /// Is this agent's part of collective `seq` whole? A Complete also looks at the files.
    fn own_part(&mut self, seq: u64) {
        let id = CollId::Seq(seq);
        if self.coll(id).own_done {
            return;
        }
        let joined = self.ranks.asks.get(&seq).map_or(0, |a| a.1.len());
        let gone = self.ranks.ranks.iter().find(|(_, r)| r.gone && r.seq < seq);
        if let Some((rank, r)) = gone {
            let trouble = Trouble::new(Cause::Unreachable).rank(*rank).slot(r.slot);
            self.coll(id).urgent.get_or_insert(trouble);
            self.advance(id);
            return;
        }
        if joined < self.ranks.ranks.len() {
            return;
        }
        let ask = self.ranks.asks.get(&seq).map(|(ask, _)| ask.clone());
        let complete = ask == Some(Ask::Complete);
        if (complete || ask == Some(Ask::Snapshot))
            && let Some(trouble) = self.open_trouble()
        {
            self.coll(id).own.trouble.get_or_insert(trouble);
        }
        if complete && self.bug(Bug::SkipStat) {
            let open = self.ranks.open;
            for part in open
                .and_then(|k| self.datasets.get_mut(&k))
                .into_iter()
                .flat_map(|d| d.slots.values_mut())
            {
                part.data = true;
            }
            self.own_part_done(seq);
        } else if !complete || self.coll(id).own.trouble.is_some() {
            self.own_part_done(seq);
        } else {
            self.look_at_files(seq);
        }
    }

    fn own_part_done(&mut self, seq: u64) {
        self.coll(CollId::Seq(seq)).own_done = true;
        self.advance(CollId::Seq(seq));
    }

    /// FM-S2: the vote includes that every declared byte is here.
    fn look_at_files(&mut self, seq: u64) {
        let Some(key) = self.ranks.open else {
            self.own_part_done(seq);
            return;
        };
        let stats = self.files_to_look_at(key);
        if stats.is_empty() {
            self.own_part_done(seq);
            return;
        }
        self.ranks.stats.insert(seq, stats.len());
        for (slot, files) in stats {
            self.run(TaskFor::Stat(key, slot, seq), Work::Stat { key, slot, files });
        }
    }

    /// What was declared on each of my slots; one of which nothing was declared has all its data.
    pub(super) fn files_to_look_at(&mut self, key: Key) -> Vec<(SlotId, Vec<FileDecl>)> {
        let mut stats = Vec::new();
        for slot in self.my_slots() {
            let Some(dataset) = self.datasets.get_mut(&key) else { continue };
            let part = dataset.slots.entry(slot).or_default();
            match part.declared.clone().filter(|files| !files.is_empty()) {
                Some(files) => stats.push((slot, files)),
                None => part.data = true,
            }
        }
        stats
    }

    pub(super) fn on_stat_done(&mut self, key: Key, slot: SlotId, seq: u64, result: TaskResult) {
        let failed = match result {
            TaskResult::Done(_) => None,
            other => Some(Self::trouble_of(other)),
        };
        if let Some(trouble) = failed {
            let trouble = trouble.slot(slot);
            self.coll(CollId::Seq(seq)).own.trouble.get_or_insert(trouble);
        } else if let Some(part) = self.datasets.get_mut(&key).and_then(|d| d.slots.get_mut(&slot))
        {
            part.data = true;
        }
        let Some(left) = self.ranks.stats.get_mut(&seq) else { return };
        *left -= 1;
        if *left == 0 {
            self.ranks.stats.remove(&seq);
            self.own_part_done(seq);
        }
    }

    /// A rank joined a collective that was answered before it came.
    fn deliver_late(&mut self, seq: u64, rank: RankId) {
        let id = CollId::Seq(seq);
        if !self.coll(id).delivered {
            self.deliver(id);
            return;
        }
        let Some(conn) = self.ranks.ranks.get(&rank).map(|r| r.conn) else { return };
        let text = match self.coll(id).verdict.clone() {
            Some(Verdict::Failed(_, trouble)) => {
                format!("this call failed before this rank made it: {trouble}")
            }
            _ => "this call was answered before this rank made it".to_owned(),
        };
        if let Some(r) = self.ranks.ranks.get_mut(&rank) {
            r.waiting = None;
        }
        self.fail(conn, Code::Timeout, text);
    }

    /// The answer to collective `seq` is known and may be told.
    pub(super) fn deliver_seq(&mut self, seq: u64, verdict: Verdict) {
        if let Verdict::Begun(info) = &verdict {
            if self.datasets.contains_key(&info.key) || self.orphan.orphaned() {
                // Told late, or again after the ranks were ended: what is there of it stays as it is.
                return;
            }
            // Also on a node without ranks: it keeps parity of the others.
            self.begin(seq, (**info).clone());
            return;
        }
        let Some((ask, _)) = self.ranks.asks.get(&seq).cloned() else { return };
        match (&ask, &verdict) {
            (Ask::CompleteRestart, Verdict::Ok) => {
                self.ranks.restart_done = true;
                self.ranks.restart_started = false;
            }
            (Ask::StartRestart, Verdict::Ok) => self.ranks.restart_started = true,
            (Ask::Snapshot, Verdict::Ok) => self.start_filling(),
            (Ask::Finalize, Verdict::Ok) => {
                self.ranks.ranks.values_mut().for_each(|r| r.finalized = true);
            }
            _ => {}
        }
        for (conn, rank) in self.take_waiting(seq) {
            let answer = self.answer_for(&ask, &verdict, rank);
            match answer {
                Answer::Failed { code, text } => self.fail(conn, code, text),
                answer => self.answer(conn, answer),
            }
        }
        self.advance_fill();
    }

    fn take_waiting(&mut self, seq: u64) -> Vec<(ConnId, RankId)> {
        let mut out = Vec::new();
        for (id, rank) in &mut self.ranks.ranks {
            if rank.waiting == Some(seq) {
                rank.waiting = None;
                out.push((rank.conn, *id));
            }
        }
        out
    }

    fn answer_for(&self, ask: &Ask, verdict: &Verdict, rank: RankId) -> Answer {
        match verdict {
            Verdict::Failed(code, trouble) => {
                Answer::Failed { code: *code, text: format!("{} failed: {trouble}", ask.verb()) }
            }
            Verdict::Flag(flag) => Answer::Flag(*flag),
            Verdict::Record(n) => match self.records.get(*n) {
                Some(Record::Drop(key, trouble)) => Answer::Failed {
                    code: if trouble.cause == Cause::NoSpace { Code::Space } else { Code::Dropped },
                    text: format!(
                        "dataset {key} is dropped: {trouble}; nothing of it will be used, the one before stays"
                    ),
                },
                _ => Answer::Ok,
            },
            Verdict::Begun(_) => Answer::Ok,
            Verdict::Ok => match ask {
                Ask::HaveRestart | Ask::StartRestart => self.restart_answer(rank),
                _ => Answer::Ok,
            },
        }
    }

    fn restart_answer(&self, rank: RankId) -> Answer {
        let Some(view) = &self.view else { return Answer::Restart(None) };
        let Some((key, _)) = view.plan.restart.filter(|_| !self.ranks.restart_done) else {
            return Answer::Restart(None);
        };
        let Some(dataset) = self.datasets.get(&key) else { return Answer::Restart(None) };
        let Some(slot) = self.ranks.slot_of(rank) else { return Answer::Restart(None) };
        let files: Vec<FileDecl> = dataset
            .manifests
            .get(&slot)
            .map(|m| {
                m.files
                    .iter()
                    .filter(|f| f.rank == rank)
                    .map(|f| FileDecl { rank, path: f.path.clone(), bytes: f.bytes })
                    .collect()
            })
            .unwrap_or_default();
        Answer::Restart(Some(RestartInfo {
            key,
            name: dataset.info.name.clone(),
            flags: dataset.info.flags,
            dir: index::cache_rank_dir(&self.cfg.cache, key, slot, rank),
            files,
        }))
    }

    /// The restart dataset, while ranks may still read it.
    pub(super) fn pinned_restart(&self) -> Option<Key> {
        let (key, _) = self.view.as_ref()?.plan.restart?;
        (!self.ranks.restart_done).then_some(key)
    }

    /// A dataset was agreed on: make directories, then tell the ranks.
    fn begin(&mut self, seq: u64, info: DatasetInfo) {
        let key = info.key;
        // Whoever writes has what it needs: the restart dataset need not stay for its sake.
        self.ranks.restart_done = true;
        self.ranks.open = Some(key);
        let mut dataset = Dataset::new(info);
        let mut dirs = Vec::new();
        for slot in self.my_slots() {
            let ranks = self.ranks.local_on(slot);
            let part = SlotPart { data: ranks.is_empty(), ..SlotPart::default() };
            dataset.slots.insert(slot, part);
            if !ranks.is_empty() {
                dirs.push((slot, ranks));
            }
        }
        self.datasets.insert(key, dataset);
        if dirs.is_empty() {
            return;
        }
        self.ranks.stats.insert(seq, dirs.len());
        for (slot, ranks) in dirs {
            self.run(TaskFor::MakeDirs(key), Work::MakeDirs { key, slot, ranks });
        }
    }

    pub(super) fn on_dirs_made(&mut self, key: Key, result: TaskResult) {
        let failed = match result {
            TaskResult::Done(_) => None,
            other => Some(Self::trouble_of(other)),
        };
        if let (Some(trouble), Some(dataset)) = (failed, self.datasets.get_mut(&key)) {
            dataset.trouble.get_or_insert(trouble);
        }
        let begun = self
            .ranks
            .asks
            .iter()
            .rev()
            .find_map(|(seq, (ask, _))| matches!(ask, Ask::Begin { .. }).then_some(*seq));
        let Some(seq) = begun else { return };
        let Some(left) = self.ranks.stats.get_mut(&seq) else { return };
        *left -= 1;
        if *left > 0 {
            return;
        }
        self.ranks.stats.remove(&seq);
        let Some(dataset) = self.datasets.get(&key) else { return };
        let (name, trouble) = (dataset.info.name.clone(), dataset.trouble.clone());
        for (conn, rank) in self.take_waiting(seq) {
            let slot = self.ranks.ranks[&rank].slot;
            match &trouble {
                None => {
                    let dir = index::cache_rank_dir(&self.cfg.cache, key, slot, rank);
                    self.answer(conn, Answer::Began { key, name: name.clone(), dir });
                }
                Some(t) => {
                    let code = if t.cause == Cause::NoSpace { Code::Space } else { Code::Io };
                    let text = format!(
                        "dataset {name} cannot be written here: {t}; check the cache directory, \
                         then call complete with valid = 0"
                    );
                    self.fail(conn, code, text);
                }
            }
        }
    }

    pub(super) fn on_rank_gone(&mut self, conn: ConnId) {
        self.ranks.hello.retain(|c| *c != conn);
        self.ranks.waits.retain(|w| w.conn != conn);
        self.ranks.across.retain(|a| a.conn != conn);
        let Some(id) = self.ranks.by_conn.remove(&conn) else { return };
        let Some(rank) = self.ranks.ranks.get_mut(&id) else { return };
        rank.gone = true;
        rank.waiting = None;
        if rank.finalized || !self.ranks.welcome {
            return;
        }
        let waiting: Vec<u64> = self.ranks.ranks.values().filter_map(|r| r.waiting).collect();
        for seq in waiting {
            self.own_part(seq);
        }
    }

    /// Answers ranks that lived through a restart decision.
    pub(super) fn answer_across(&mut self) {
        let restart = self.view.as_ref().and_then(|v| v.plan.restart).map(|(k, _)| k);
        let name = restart.and_then(|k| self.datasets.get(&k)).map(|d| d.info.name.clone());
        for waiting in std::mem::take(&mut self.ranks.across) {
            match waiting.ask {
                Ask::Current { name: wanted } if name.as_ref() == Some(&wanted) => {
                    self.answer(waiting.conn, Answer::Ok);
                }
                Ask::Current { name: wanted_name } => {
                    self.fail(
                        waiting.conn,
                        Code::NotFound,
                        format!("there is no usable dataset '{}'", wanted_name.escape_debug()),
                    );
                }
                Ask::Drop { .. } | Ask::Delete { .. } => self.answer(waiting.conn, Answer::Ok),
                Ask::CompleteRestart => {
                    let next = match &name {
                        Some(name) => format!(
                            "dataset {} comes next: ask again whether there is a restart",
                            name.escape_debug()
                        ),
                        None => "there is no older one".to_owned(),
                    };
                    let text = format!("a rank rejected the dataset; {next}");
                    self.fail(waiting.conn, Code::Rejected, text);
                }
                _ => self.fail(
                    waiting.conn,
                    Code::Closing,
                    "the job was restored while this call was under way; make it again".into(),
                ),
            }
        }
    }

    /// Answers waits whose level is reached, cannot be reached any more, or that are late.
    pub(super) fn tick_waits(&mut self) {
        let now = self.now.mono;
        let waits = std::mem::take(&mut self.ranks.waits);
        for wait in waits {
            let dataset = self.datasets.iter().rev().find(|(k, _)| k.no == wait.no).map(|(_, d)| d);
            let (reached, lost, name) = match dataset {
                // FM-L6
                Some(d) => (
                    d.levels.range(wait.level..).next().is_some(),
                    wait.level == Level::Protected && d.protect_failed,
                    d.info.name.clone(),
                ),
                None => (false, true, format!("number {}", wait.no)),
            };
            if reached {
                self.answer(wait.conn, Answer::Ok);
            } else if lost {
                let text =
                    format!("dataset {name} does not reach '{}' any more", wait.level.as_str());
                self.fail(wait.conn, Code::Level, text);
            } else if now >= wait.deadline {
                let text =
                    format!("dataset {name} has not reached '{}' in time", wait.level.as_str());
                self.fail(wait.conn, Code::Timeout, text);
            } else {
                self.ranks.waits.push(wait);
            }
        }
    }

    /// The trouble of `part` for the vote on the open dataset, if this agent has one of its own.
    pub(super) fn open_trouble(&self) -> Option<Trouble> {
        self.ranks.open.and_then(|k| self.datasets.get(&k)).and_then(|d| d.trouble.clone())
    }
}
