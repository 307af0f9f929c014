//! Copy-on-write: the regions are copied behind the caller, who may change them at once.
//!
//! By a thread of this process: the regions' pages are write-protected (userfaultfd), and a write waits until its block is
//! copied. Or by a child, forked when all memory is lent: it holds nothing of this process's but its own connection to the
//! agent and the extents that it writes to, which are inherited for the moment of the fork only. What neither can copy as
//! it is (maps.rs of stanchion-mem) is copied at once, and so is all where nothing else can be had.

use crate::behind::{Copier, Copies, Copying};
use crate::client::{Begun, Client};
use crate::error::Error;
use crate::pool::{PoolWriter, Put};
use crate::regions::{Region, placed};
use stanchion_format::client::{KIND_REQUEST, Request};
use stanchion_format::frame;
use stanchion_format::limits::CLIENT_FRAME_BYTES_MAX;
use stanchion_format::regions::{self, RegionAt};
use stanchion_mem::copy::Piece;
use stanchion_mem::cow::{Faults, Lacking, Snapshot, USUAL_BLOCK, pinned, probe};
use stanchion_mem::forked::{Forked, Manner, forked_copy_unchecked};
use stanchion_mem::maps::{self, Purpose, Span};
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::AsFd;
use std::time::Instant;

const CALL: &str = "checkpoint";

/// By what a copy-on-write checkpoint was copied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CopiedBy {
    /// There was none yet, or it had nothing to copy.
    #[default]
    Nothing,
    /// A thread, behind write protection that holds up system calls too.
    Userfaultfd,
    /// A thread, behind write protection that holds up this process's instructions only.
    UserfaultfdUserMode,
    /// A forked child.
    Fork,
    /// The caller, before the call returned.
    AtOnce,
}

impl CopiedBy {
    fn words(self) -> &'static str {
        match self {
            CopiedBy::Nothing => "nothing to copy",
            CopiedBy::Userfaultfd => "userfaultfd",
            CopiedBy::UserfaultfdUserMode => "userfaultfd, user mode only",
            CopiedBy::Fork => "fork",
            CopiedBy::AtOnce => "copied at once",
        }
    }
}

/// Why it was not by something better.
#[derive(Debug, thiserror::Error)]
enum Reason {
    #[error("the setting cow says so")]
    Setting,
    #[error("{0}")]
    Lacking(Lacking),
    #[error("{}, and region {region} is not declared STN_REGION_NO_IO", Lacking::UserModeOnly)]
    UserMode { region: u64 },
    #[error(
        "memory of this process is pinned for a device, and region {region} is not declared STN_REGION_NO_IO"
    )]
    Pinned { region: u64 },
    #[error("region {region} is memory that cannot be copied behind ({why:?})")]
    Unsuitable { region: u64, why: maps::Why },
    #[error("the kernel tracks which pages of region {region} change")]
    Tracked { region: u64 },
    #[error("only what changed")]
    Changed,
    #[error("{0}")]
    Failed(Error),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Protect(Faults),
    Fork,
    AtOnce,
}

/// A thread may be stopped before it has gathered all, and the system may have no huge pages: so often it is tried.
const GATHER_TRIES_MAX: u8 = 3;

/// What is remembered between such checkpoints.
#[derive(Debug, Default)]
pub(crate) struct Snapshots {
    pub(crate) copies: Copies,
    /// Regions that nothing but this process's instructions writes to.
    no_io: BTreeSet<u64>,
    /// How often a thread was to gather memory in huge pages.
    gathered: BTreeMap<(usize, usize), u8>,
    by: CopiedBy,
    reason: Option<Reason>,
    /// It was said why they are slow.
    told: bool,
}

impl Snapshots {
    /// Nothing was left to be copied behind; `changed`: since that was only what changed.
    pub(crate) fn copied_at_once(&mut self, changed: bool) {
        (self.by, self.reason) = (CopiedBy::AtOnce, changed.then_some(Reason::Changed));
    }
}

/// How the next one is to be copied.
struct Plan {
    way: Way,
    /// Regions, by their place in the list, that are copied before the call returns.
    at_once: BTreeSet<usize>,
}

impl Client {
    /// As [`Client::checkpoint`], but returns when all ranks' regions are safe from being changed: they are copied behind
    /// the callers, by children or by threads that let a write wait until its block is copied. Only then the dataset is
    /// complete ([`Client::wait`] for `Cached` tells) or, if one of those died, dropped. Before memory of a region is
    /// unmapped, [`Client::settle`] is due. Collective.
    pub fn checkpoint_cow(
        &mut self,
        dataset: &str,
        flags: u32,
        regions: &[Region<'_>],
    ) -> Result<Begun, Error> {
        let begun = self.begin(dataset, flags)?;
        if !self.enabled() {
            return self.complete(true).map(|()| begun);
        }
        let copier = self.snapshot_regions(&begun, regions);
        self.snapshot_copies(copier).map(|()| begun)
    }

    /// Ends a dataset of regions that `copier` may still copy.
    pub(crate) fn snapshot_copies(
        &mut self,
        copier: Result<Option<Copier>, Error>,
    ) -> Result<(), Error> {
        match copier {
            Ok(copier) => {
                let copies = copier.is_some();
                // Not asked for any more if this fails: it ends here.
                self.snapshot(true, copies)?;
                if let Some(copier) = copier {
                    copier.go();
                    self.snapshots.copies.add(copier);
                }
                Ok(())
            }
            // A failure here must not keep the others waiting.
            Err(error) => {
                let _dropped_as_asked = self.snapshot(false, false);
                Err(error)
            }
        }
    }

    /// Declares that while a copy-on-write checkpoint is under way nothing writes to a region but this process's
    /// instructions: no system call, no other process, no device. It holds until it is taken back. Local.
    pub fn declare_no_io(&mut self, region: u64, no_io: bool) {
        match no_io {
            true => self.snapshots.no_io.insert(region),
            false => self.snapshots.no_io.remove(&region),
        };
    }

    /// Where the setting `region_huge_pages` is `always`: gathers a region's memory in huge pages. Local.
    pub fn gather(&self, memory: &[u8]) {
        self.gather_at(Span { start: memory.as_ptr().addr(), len: memory.len() });
    }

    /// The same; it need not be there.
    pub(crate) fn gather_at(&self, memory: Span) {
        if self.settings().text("region_huge_pages") == "always" {
            maps::gather_huge_pages(memory);
        }
    }

    /// Waits until no thread of this process copies any more: from then on the memory of regions may be unmapped or
    /// moved without harm to the last checkpoint. Local.
    pub fn settle(&mut self) {
        self.snapshots.copies.settle();
    }

    /// By what the last copy-on-write checkpoint was copied here, and in words also why it was not by something better.
    pub fn copied_by(&self) -> (CopiedBy, String) {
        let by = self.snapshots.by;
        match &self.snapshots.reason {
            Some(reason) => (by, format!("{}: {reason}", by.words())),
            None => (by, by.words().to_owned()),
        }
    }

    /// What went wrong behind the caller is told before the next collective call.
    pub(crate) fn tell_failures(&mut self) {
        self.snapshots.copies.reap();
        for text in self.snapshots.copies.untold() {
            let text = format!("rank {}: {text}", self.identity().rank);
            // Who cannot be told will be heard no more either.
            let _ = self.warn(&text);
        }
    }

    fn snapshot_regions(
        &mut self,
        begun: &Begun,
        regions: &[Region<'_>],
    ) -> Result<Option<Copier>, Error> {
        let name = self.regions_file(&begun.name);
        let (placed, end) = placed(&name, regions)?;
        match self.pool_regions_behind(begun, regions, &placed, end)? {
            (Put::Done, copier) => Ok(copier),
            (Put::TooLarge, _) => self.file_regions(&name, regions, &placed, end).map(|()| None),
        }
    }

    /// Has all of the regions copied into the pool, behind the caller if that is possible.
    pub(crate) fn pool_regions_behind(
        &mut self,
        begun: &Begun,
        regions: &[Region<'_>],
        placed: &[RegionAt],
        end: u64,
    ) -> Result<(Put, Option<Copier>), Error> {
        let start = Instant::now();
        let plan = self.plan(regions);
        let mut writer = PoolWriter::new(end);
        writer.copied(start.elapsed());
        let (mut pieces, mut firsts) = (Vec::new(), Vec::new());
        let mut put = writer.put(self, &regions::encode(placed))?;
        for (n, (region, at)) in regions.iter().zip(placed).enumerate() {
            if put == Put::Done {
                put = writer.pad(self, at.offset)?;
            }
            if put == Put::Done {
                firsts.push((pieces.len(), region.id));
                put = match plan.at_once.contains(&n) {
                    true => writer.put(self, region.bytes)?,
                    false => writer.put_later(self, region.bytes, &mut pieces)?,
                };
            }
        }
        if put == Put::TooLarge {
            self.snapshots.copied_at_once(false);
            return Ok((put, None));
        }
        assert_eq!(writer.written(), end, "regions are where the layout says");
        let start = Instant::now();
        let copier = match pieces.is_empty() {
            true => {
                if regions.iter().any(|r| !r.bytes.is_empty()) {
                    self.snapshots.by = CopiedBy::AtOnce;
                }
                None
            }
            false => self.copy_behind(plan.way, begun, (&pieces, firsts), &writer)?,
        };
        writer.copied(start.elapsed());
        let (file, bytes, times) = writer.finish(self.regions_path(&begun.name), None);
        self.add_memory(file, bytes, times);
        Ok((Put::Done, copier))
    }

    /// How this is to be copied; what cannot be, goes at once.
    fn plan(&mut self, regions: &[Region<'_>]) -> Plan {
        let no_io = &self.snapshots.no_io;
        let open = |r: &&Region<'_>| !r.bytes.is_empty() && !no_io.contains(&r.id);
        let undeclared = regions.iter().find(open).map(|r| r.id);
        let (way, reason) = match self.settings().text("cow") {
            "copy" => (Way::AtOnce, Some(Reason::Setting)),
            "fork" => (Way::Fork, Some(Reason::Setting)),
            wanted => self.best(wanted == "auto", undeclared, regions),
        };
        let mut at_once = BTreeSet::new();
        if matches!(way, Way::Protect(_)) && reason.is_some() {
            let all = regions.iter().enumerate();
            at_once.extend(all.filter(|(_, r)| !no_io.contains(&r.id)).map(|(n, _)| n));
        }
        self.snapshots.by = CopiedBy::Nothing;
        self.snapshots.reason = reason;
        if way != Way::AtOnce {
            self.unsuitable(way, regions, &mut at_once);
        }
        Plan { way, at_once }
    }

    /// Write protection, where that is possible and safe; otherwise, as `auto` says, fork or none of both.
    fn best(
        &self,
        auto: bool,
        undeclared: Option<u64>,
        regions: &[Region<'_>],
    ) -> (Way, Option<Reason>) {
        let otherwise = if auto { Way::Fork } else { Way::AtOnce };
        // FM-P13. A mapping has one userfaultfd: to take it from the tracker would cost what the tracker knows.
        if let Some(region) = self.increment.tracked(regions) {
            return (otherwise, Some(Reason::Tracked { region }));
        }
        let (faults, reason) = protection(undeclared);
        match faults {
            // Where it is insisted on: of those that are declared.
            Ok(faults) if reason.is_none() || !auto => (Way::Protect(faults), reason),
            Ok(_) => (otherwise, reason),
            Err(lacking) => (otherwise, Some(Reason::Lacking(lacking))),
        }
    }

    /// Adds those that cannot be copied behind.
    fn unsuitable(&mut self, way: Way, regions: &[Region<'_>], at_once: &mut BTreeSet<usize>) {
        let with_bytes = || regions.iter().enumerate().filter(|(_, r)| !r.bytes.is_empty());
        let span = |r: &Region<'_>| Span { start: r.bytes.as_ptr().addr(), len: r.bytes.len() };
        let spans: Vec<Span> = with_bytes().map(|(_, r)| span(r)).collect();
        let places: Vec<usize> = with_bytes().map(|(n, _)| n).collect();
        let purpose = if way == Way::Fork { Purpose::Fork } else { Purpose::Protect };
        let judged = self.snapshots.copies.judged.unsuitable(&spans, purpose);
        match &judged {
            Ok(bad) => at_once.extend(bad.iter().map(|(n, _)| places[*n])),
            // Nothing is known to be safe.
            Err(_) => at_once.extend(&places),
        }
        if let Ok(bad) = judged
            && let Some(&(n, why)) = bad.first()
        {
            let region = regions[places[n]].id;
            self.snapshots.reason.get_or_insert(Reason::Unsuitable { region, why });
        }
    }

    /// Copies all pieces behind the caller by the best way there is, or at once. `firsts`: where each region begins.
    fn copy_behind(
        &mut self,
        mut way: Way,
        begun: &Begun,
        (pieces, firsts): (&[Piece], Vec<(usize, u64)>),
        writer: &PoolWriter,
    ) -> Result<Option<Copier>, Error> {
        if let Way::Protect(faults) = way {
            match self.protect(begun, (pieces, firsts), faults) {
                Ok(thread) => {
                    self.snapshots.by = match faults {
                        Faults::All => CopiedBy::Userfaultfd,
                        Faults::User => CopiedBy::UserfaultfdUserMode,
                    };
                    return Ok(Some(Copier::Thread(thread)));
                }
                Err(why) => {
                    let auto = self.settings().text("cow") == "auto";
                    way = if auto { Way::Fork } else { Way::AtOnce };
                    self.snapshots.reason = Some(Reason::Failed(why));
                }
            }
        }
        if way == Way::Fork {
            match self.fork_child(pieces, writer) {
                Ok(child) => {
                    self.snapshots.by = CopiedBy::Fork;
                    return Ok(Some(Copier::Child(child)));
                }
                Err(why) => self.snapshots.reason = Some(Reason::Failed(why)),
            }
        }
        for piece in pieces {
            // SAFETY: pieces are parts of the caller's slices and of extents that are lent to this rank, which nobody
            // else writes to; they do not overlap.
            unsafe { stanchion_mem::copy::copy_out(piece.src, piece.dst, piece.len) };
        }
        self.snapshots.by = CopiedBy::AtOnce;
        self.tell_why_not().map(|()| None)
    }

    /// A thread that copies all pieces behind write protection.
    fn protect(
        &mut self,
        begun: &Begun,
        (pieces, firsts): (&[Piece], Vec<(usize, u64)>),
        faults: Faults,
    ) -> Result<Copying, Error> {
        let link = self.attach(CALL, true)?.into_descriptor(CALL)?;
        let copied = copied()?;
        // SAFETY: the sources are borrowed by our caller, so nobody changes them before this returns, and from then on
        // writes wait; the destinations are extents that are lent to this rank, which nobody else writes to until the
        // agent sees the thread's connection end. The thread needs nobody who may wait for it.
        let snapshot = unsafe { Snapshot::begin_unchecked(pieces, USUAL_BLOCK, faults) }
            .map_err(|cause| Error::Protect { cause })?;
        let bytes_per_s = self.settings().number("cow_bytes_per_s");
        let scattered = self.scattered(pieces, &firsts);
        Copying::start((begun.no, snapshot), (link, copied), bytes_per_s, firsts, scattered)
    }

    /// What is to be gathered in huge pages behind the caller: where a region is now, if that was not tried often.
    fn scattered(&mut self, pieces: &[Piece], firsts: &[(usize, u64)]) -> Vec<Span> {
        if self.settings().text("region_huge_pages") != "auto" {
            return Vec::new();
        }
        let ends = firsts.iter().skip(1).map(|(first, _)| *first).chain([pieces.len()]);
        let all = firsts.iter().zip(ends).filter_map(|((first, _), end)| {
            let region = &pieces[*first..end];
            let start = region.first()?.src.addr();
            Some(Span { start, len: region.iter().map(|p| p.len).sum() })
        });
        let before = std::mem::take(&mut self.snapshots.gathered);
        let mut scattered = Vec::new();
        for memory in all {
            let at = (memory.start, memory.len);
            let tries = before.get(&at).copied().unwrap_or(0);
            if tries < GATHER_TRIES_MAX {
                scattered.push(memory);
            }
            self.snapshots.gathered.insert(at, tries.saturating_add(1));
        }
        scattered
    }

    /// A child that copies all pieces and says so on a connection of its own.
    fn fork_child(&mut self, pieces: &[Piece], writer: &PoolWriter) -> Result<Forked, Error> {
        let link = self.attach(CALL, false)?;
        let copied = copied()?;
        let fd = link.descriptor(CALL)?;
        let manner = Manner {
            ready: Some((fd.as_fd(), copied.as_slice())),
            bytes_per_s: self.settings().number("cow_bytes_per_s"),
        };
        let ids = writer.extents();
        self.pool().inherit(&ids, true)?;
        // SAFETY: the sources are borrowed by our caller, so nobody changes them before this returns; the destinations
        // are extents that are lent to this rank, shared, now inherited, and nobody else's until the agent sees the
        // child's connection end.
        let child = unsafe { forked_copy_unchecked(pieces, manner) };
        self.pool().inherit(&ids, false)?;
        child.map_err(|cause| Error::Fork { cause })
    }

    /// Once: such a checkpoint takes as long as a copy, and nobody asked for that.
    fn tell_why_not(&mut self) -> Result<(), Error> {
        let asked = self.settings().text("cow") == "copy";
        if asked || std::mem::replace(&mut self.snapshots.told, true) {
            return Ok(());
        }
        let (rank, (_, why)) = (self.identity().rank, self.copied_by());
        self.warn(&format!("rank {rank} does without copy-on-write: its regions are {why}"))
    }
}

/// What is said on the connection of a child or thread at the end.
fn copied() -> Result<Vec<u8>, Error> {
    frame::encode(KIND_REQUEST, &Request::Copied, CLIENT_FRAME_BYTES_MAX)
        .map_err(|cause| Error::Frame { verb: CALL, cause })
}

/// Whose writes can be held up here, and what speaks against that, given the first region that others may write to.
fn protection(undeclared: Option<u64>) -> (Result<Faults, Lacking>, Option<Reason>) {
    let faults = probe();
    let reason = match (faults, undeclared) {
        (Ok(Faults::User), Some(region)) => Some(Reason::UserMode { region }),
        // To register memory later counts as writing to it; what was before is not seen to be written.
        (Ok(Faults::All), Some(region)) if pinned() => Some(Reason::Pinned { region }),
        _ => None,
    };
    (faults, reason)
}
