//! The memory that ranks share with this agent (FM-P1 to FM-P10); who has what, [`crate::pool`] knows.

use super::Agent;
use super::fill::Attached;
use crate::api::{AgentAction, ConnId};
use crate::bugs::Bug;
use crate::pool::Do;
use stanchion_format::changed::Changed;
use stanchion_format::client::{Answer, Code, Filled, MemoryFile, Own, PartFrom};
use stanchion_format::ids::{ExtentId, RankId};
use stanchion_format::limits::MEMORY_PARTS_MAX;
use stanchion_format::name;
use stanchion_format::peer::{Cause, Trouble};
use std::collections::BTreeSet;

/// What a rank declared in the pool, and the extents that it used.
type Checked = (Vec<(MemoryFile, u64)>, BTreeSet<ExtentId>);

impl Agent {
    pub(super) fn pool_do(&mut self, wishes: Vec<Do>) {
        for wish in wishes {
            match wish {
                Do::Grow(extents) => self.out.push(AgentAction::Grow(extents)),
                Do::Retire(ids) => self.out.push(AgentAction::Retire(ids)),
                Do::Reclaim(bytes) => self.out.push(AgentAction::Reclaim(bytes)),
                Do::Lend(conn, extents) => self.answer(conn, Answer::Lent(extents)),
                Do::Full(conn) => self.pool_full(conn),
            }
        }
    }

    fn pool_full(&mut self, conn: ConnId) {
        self.lend_failed.insert(conn);
        let usage = self.pool.usage();
        let waits = self.settings().text("pool_full") != "skip";
        let waited = match waits {
            true => {
                let ms = self.settings().number("pool_wait_ms");
                format!(" and nothing came back in {ms} ms")
            }
            false => String::new(),
        };
        let text = format!(
            "the pool is full{waited}: {} of {} bytes are datasets that are not evicted yet; raise pool_bytes_max, \
             or take checkpoints further apart",
            usage.held, usage.max
        );
        self.fail(conn, Code::Space, text);
    }

    pub(super) fn on_reserve(&mut self, conn: ConnId, bytes: u64) {
        // One more than is kept: the one that is being written. On a device none is kept in memory but the last.
        let kept = self.settings().number("cache_datasets");
        let sets = if self.cfg.stores { 2 } else { kept.saturating_add(1) };
        let deadline = self.now.mono.after(self.settings().number("pool_ready_ms"));
        let wishes = self.pool.reserve(conn, (bytes, sets), deadline, self.now.mono);
        self.pool_do(wishes);
    }

    pub(super) fn on_lend(&mut self, conn: ConnId, bytes: u64, filled: &[Filled], anew: bool) {
        if self.ranks.open_dataset().is_none() {
            let text = "no dataset is being written: memory is lent between start and complete";
            self.fail(conn, Code::State, text.into());
            return;
        }
        if !self.hand_over(conn, filled) {
            let text = "an extent is handed over that is not lent, or a number twice";
            self.fail(conn, Code::Invalid, text.into());
            return;
        }
        let waits = self.settings().text("pool_full") != "skip";
        let deadline = self.now.mono.after(self.settings().number("pool_wait_ms"));
        if anew {
            self.pool.told_in_vain(conn);
        }
        let wishes = self.pool.lend(conn, bytes, (waits, deadline), self.now.mono);
        self.pool_do(wishes);
        self.tick_pressure();
    }

    pub(super) fn on_open_memory(&mut self, conn: ConnId, path: String, from: u64) {
        let restart = self.view.as_ref().and_then(|v| v.plan.restart).map(|(key, _)| key);
        let behind = self.ranks.behind(conn).filter(|_| self.ranks.reading());
        let (Some(key), Some((rank, slot))) = (restart, behind) else {
            self.fail(conn, Code::State, "no dataset is being read".into());
            return;
        };
        if name::check_path(&path).is_err() {
            self.fail(conn, Code::Invalid, "the path is not one of a dataset".into());
            return;
        }
        self.out.push(AgentAction::OpenMemory { conn, key, slot, rank, path, from });
    }

    /// What the rank has written into the pool becomes its dataset's; what it was lent beside that is free. With a
    /// child that may still write, both only when that is gone; `child`: it is the one that writes all of it.
    pub(super) fn take_memory(
        &mut self,
        conn: ConnId,
        rank: RankId,
        own: Own,
        child: bool,
        trouble: &mut Option<Trouble>,
    ) {
        let failed = self.lend_failed.remove(&conn);
        if let Some(t) = trouble.as_mut().filter(|t| failed && t.cause == Cause::SaidInvalid) {
            // The rank only says what it was told.
            (t.cause, t.file) = (Cause::NoSpace, Some("the pool is full".into()));
        }
        let found = match trouble {
            None => self.check_memory(conn, &own),
            Some(_) => Ok((Vec::new(), BTreeSet::new())),
        };
        let attached = self.attached(conn);
        let (files, used) = found.unwrap_or_else(|cause| {
            *trouble = Some(Trouble::new(cause).rank(rank));
            (Vec::new(), BTreeSet::new())
        });
        let used: Vec<ExtentId> = used.into_iter().collect();
        if child && trouble.is_none() && matches!(attached, Attached::None | Attached::Gone(false))
        {
            // FM-P8
            *trouble = Some(Trouble::new(Cause::ChildDied).rank(rank));
        }
        let key = self.ranks.open_dataset().unwrap_or_default();
        if let Attached::Living(attached) = attached {
            let lent = self.pool.lent_to(conn);
            let copies = child && trouble.is_none();
            let wishes = self.pool.complete(conn, &lent, self.now.mono);
            if copies {
                self.bind_child(attached, key, Some(files), used, lent);
            } else {
                let rest = lent.into_iter().filter(|id| !used.contains(id)).collect();
                self.bind_child(attached, key, None, Vec::new(), rest);
                self.keep(conn, rank, files);
            }
            self.pool_do(wishes);
            return;
        }
        let mut wishes = self.pool.complete(conn, &used, self.now.mono);
        if self.bug(Bug::FreeData) {
            wishes.extend(self.pool.released(&used, self.now.mono));
        }
        self.keep(conn, rank, files);
        // After `Keep`: what is lent next must not be what it refers to.
        self.pool_do(wishes);
    }

    fn keep(&mut self, conn: ConnId, rank: RankId, files: Vec<(MemoryFile, u64)>) {
        let handed = self.handed.remove(&conn).is_some();
        if (handed || !files.is_empty())
            && let Some(key) = self.ranks.open_dataset()
            && let Some((_, slot)) = self.ranks.behind(conn)
        {
            self.out.push(AgentAction::Keep { key, slot, rank, files });
        }
    }

    /// FM-P5: parts lie within extents that are lent to this rank, and make up the declared size, or what of it is not
    /// the base's.
    fn check_memory(&self, conn: ConnId, own: &Own) -> Result<Checked, Cause> {
        let mut files = Vec::new();
        let mut used = BTreeSet::new();
        let mut parts = 0usize;
        let mut last: Option<(ExtentId, u64)> = None;
        for file in &own.memory {
            let declared = own.files.iter().find(|f| f.path == file.path);
            let declared = declared.ok_or(Cause::Malformed)?;
            let changed = file.base.as_ref().map(|base| &base.changed);
            let runs = changed.map_or(0, Changed::runs);
            parts = parts.saturating_add(file.parts.len()).saturating_add(runs);
            if parts > MEMORY_PARTS_MAX {
                return Err(Cause::Malformed);
            }
            let mut bytes = 0u64;
            for part in &file.parts {
                bytes = bytes.checked_add(part.bytes).ok_or(Cause::Malformed)?;
                let ends = |offset: u64| offset.checked_add(part.bytes).ok_or(Cause::Malformed);
                match part.from {
                    PartFrom::Extent { id, offset } => {
                        let lent = match last {
                            Some((known, bytes)) if known == id => bytes,
                            _ => self.pool.lent(conn, id).ok_or(Cause::Malformed)?,
                        };
                        if ends(offset)? > lent || part.bytes == 0 {
                            return Err(Cause::Malformed);
                        }
                        if last.replace((id, lent)).is_none_or(|(known, _)| known != id) {
                            used.insert(id);
                        }
                    }
                    PartFrom::Filled { number, offset } => {
                        let handed = self.handed_bytes(conn, number).ok_or(Cause::Malformed)?;
                        if ends(offset)? > handed || part.bytes == 0 {
                            return Err(Cause::Malformed);
                        }
                    }
                }
            }
            let have = size_with(changed, bytes)?;
            if have != declared.bytes {
                return Err(Cause::Size { want: declared.bytes, have });
            }
            files.push((file.clone(), declared.bytes));
        }
        Ok((files, used))
    }

    pub(super) fn lend_gone(&mut self, conn: ConnId, exited: bool) {
        self.lend_failed.remove(&conn);
        self.forgo(conn);
        let wishes = self.pool.gone(conn, exited || self.bug(Bug::LendMapped), self.now.mono);
        self.pool_do(wishes);
    }

    pub(super) fn lend_grown(&mut self, ids: &[ExtentId], there: bool) {
        let now = self.now.mono;
        let wishes = if there { self.pool.grown(ids, now) } else { self.pool.not_grown(ids, now) };
        self.pool_do(wishes);
    }

    pub(super) fn lend_retired(&mut self, ids: &[ExtentId]) {
        let wishes = self.pool.retired(ids, self.now.mono);
        self.pool_do(wishes);
    }

    pub(super) fn lend_released(&mut self, ids: &[ExtentId]) {
        let wishes = self.pool.released(ids, self.now.mono);
        self.pool_do(wishes);
        self.memory_returned();
    }

    pub(super) fn tick_lend(&mut self) {
        let mut wishes = self.pool.tick(self.now.mono);
        let idle = self.settings().number("pool_idle_ms");
        if self.now.mono.since(self.pool_shrunk) >= idle {
            self.pool_shrunk = self.now.mono;
            wishes.extend(self.pool.shrink());
        }
        self.pool_do(wishes);
    }

    /// Could this extent of the pool be lent or given back at any moment? For those who look whether it should.
    pub fn pool_spare(&self, id: ExtentId) -> bool {
        self.pool.spare(id)
    }

    /// The pool in numbers, for the status.
    pub fn pool_usage(&self) -> crate::pool::Usage {
        self.pool.usage()
    }
}

/// The size of a file of which so many bytes are its own.
fn size_with(changed: Option<&Changed>, own: u64) -> Result<u64, Cause> {
    match changed {
        None => Ok(own),
        Some(changed) if changed.own() == own => Ok(changed.bytes()),
        Some(_) => Err(Cause::Malformed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use stanchion_format::changed::ChangedWriter;

    #[test]
    fn a_file_has_the_bytes_that_its_runs_want() {
        // FM-P5: else it would be filled with what nobody declared.
        let mut writer = ChangedWriter::default();
        writer.same(100);
        writer.own(10);
        let changed = writer.finish();
        assert_eq!(size_with(Some(&changed), 10), Ok(110));
        for own in [0, 9, 11, 110] {
            assert_eq!(size_with(Some(&changed), own), Err(Cause::Malformed));
        }
        assert_eq!(size_with(None, 10), Ok(10));
    }
}
