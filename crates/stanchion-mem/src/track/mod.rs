//! Which pages of some regions changed, for checkpoints that store only these.
//!
//! Collecting begins a new interval. What an interval brought is forgotten only when a dataset that has
//! it is committed; until then each later collection brings it again (DESIGN.md, rule 9).
//!
//! Nobody may write to a region while it is collected and copied: what is written then counts for the
//! next interval, and the copy may have it or not.

mod hash;
mod runs;
mod scan;
mod slices;

use std::collections::{BTreeMap, BTreeSet};

use rustix::io::Errno;
use thiserror::Error;

use self::hash::Hashes;
use self::runs::Runs;
pub use self::runs::{MAX_RUNS, Run};
use self::scan::{Scan, Seen};
pub use self::slices::SliceTracker;
pub use crate::kernel::Lacking;
use crate::kernel::{is_mapped, own_pid, page_size};
use crate::maps::{Purpose, Span, Why, unsuitable};

/// Intervals that wait for their datasets; beyond it the two oldest merge.
pub const MAX_OPEN: usize = 8;
/// The usual block of hashes.
pub const HASH_BLOCK: usize = 4096;
const MAX_HASH_BLOCK: usize = 4 << 20;

/// How changes are to be found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// By the kernel, if it can; else by hashes of `HASH_BLOCK` bytes.
    Auto,
    /// By the kernel or not at all.
    Scan,
    /// By hashes of blocks of so many bytes, a power of two from 64 on.
    Hash {
        /// Bytes of a block.
        block: usize,
    },
}

/// What a tracker does for its regions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Facts {
    /// Whether the kernel tells, for the regions where it can.
    pub kernel: bool,
    /// Why it does not, if it was asked for.
    pub lacking: Option<Lacking>,
    /// Bytes that changes are rounded to.
    pub block: usize,
}

/// How one region is watched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// By the kernel.
    Scan,
    /// By hashes, and why.
    Hash(Reason),
}

/// Why a region is watched by hashes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// The caller or the machine has it so for all.
    Tracker,
    /// The caller wants it for this region.
    Asked,
    /// It shares whole pages with another one.
    Overlaps(RegionId),
    /// Its memory cannot be watched.
    Memory(Why),
    /// The kernel refused.
    Refused(Errno),
}

/// A region's name, the caller's choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RegionId(pub u64);

impl std::fmt::Display for RegionId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// The end of an interval; later ones are greater.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Mark(u64);

/// What changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Changes {
    /// Everything, as far as is known.
    All,
    /// These, in order, none touching the next.
    Runs(Vec<Run>),
}

/// What a collection found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Collected {
    /// To tell the fate of the dataset by.
    pub mark: Mark,
    /// All that changed since the last interval that was committed.
    pub changes: Changes,
}

/// Why a tracker could not do something.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TrackError {
    /// The kernel cannot do what was wanted.
    #[error("changed pages cannot be had from the kernel: {0}")]
    Lacking(Lacking),
    /// A block of no use.
    #[error("a hash block of {0} bytes: a power of two from 64 to 4194304 is wanted")]
    Block(usize),
    /// There is such a region already.
    #[error("region {0} is watched already")]
    Known(RegionId),
    /// There is no such region.
    #[error("region {0} is not watched")]
    Unknown(RegionId),
    /// The region ends beyond the end of memory.
    #[error("region {0} is not in memory")]
    Range(RegionId),
    /// The region is not mapped, or not all of it.
    #[error("region {0} is not mapped any more")]
    Unmapped(RegionId),
    /// A forked child uses its parent's tracker.
    #[error("the tracker belongs to the process that made it")]
    OtherProcess,
    /// The kernel failed.
    #[error("region {0}: {1}")]
    Os(RegionId, Errno),
}

/// Watches regions of this process.
pub struct Tracker {
    pid: i32,
    page: usize,
    scan: Option<Scan>,
    block: usize,
    regions: BTreeMap<RegionId, Region>,
    /// The whole pages of regions that are scanned: end and name by begin.
    scanned: BTreeMap<usize, (usize, RegionId)>,
    marks: u64,
}

struct Region {
    span: Span,
    how: How,
    /// Intervals whose datasets are not committed, oldest first; `None` is everything.
    open: Vec<(Mark, Option<Runs>)>,
}

enum How {
    Scan(Pages),
    Hash(Hashes, Reason),
}

/// What is known of the pages of a region that the kernel watches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pages {
    /// Nothing: the mapping must be looked at and registered.
    Unknown,
    /// The mapping was looked at and is registered. Another in its place would not be.
    Registered,
    /// They carry marks, from which the next scan can tell.
    Marked,
}

impl Tracker {
    /// A tracker, and what it can do here.
    pub fn new(wanted: Wanted) -> Result<(Tracker, Facts), TrackError> {
        let page = page_size();
        let block = if let Wanted::Hash { block } = wanted { block } else { HASH_BLOCK };
        if !block.is_power_of_two() || !(64..=MAX_HASH_BLOCK).contains(&block) {
            return Err(TrackError::Block(block));
        }
        let (scan, lacking) = match wanted {
            Wanted::Hash { .. } => (None, None),
            Wanted::Scan => (Some(Scan::open(page).map_err(TrackError::Lacking)?), None),
            Wanted::Auto => match Scan::open(page) {
                Ok(scan) => (Some(scan), None),
                Err(lacking) => (None, Some(lacking)),
            },
        };
        let kernel = scan.is_some();
        let facts = Facts { kernel, lacking, block: if kernel { page } else { block } };
        let (regions, scanned) = (BTreeMap::new(), BTreeMap::new());
        Ok((Tracker { pid: own_pid(), page, scan, block, regions, scanned, marks: 0 }, facts))
    }

    /// Watches a region from now on; its first collection brings everything.
    ///
    /// A region that hardware or another process may write to (a communication buffer registered with
    /// a network card, say) is for `watch_hashed`: what bypasses the page tables no kernel reports.
    ///
    /// # Safety
    /// Whenever it is collected, what is mapped of the region is readable.
    pub unsafe fn watch(
        &mut self,
        id: RegionId,
        start: *const u8,
        len: usize,
    ) -> Result<Method, TrackError> {
        // SAFETY: the same contract.
        let methods = unsafe { self.watch_all(&[(id, start, len)]) }?;
        methods.first().copied().ok_or(TrackError::Unknown(id))
    }

    /// Watches several regions; cheaper than one after another, since the mappings are read once.
    ///
    /// # Safety
    /// As for `watch`.
    pub unsafe fn watch_all(
        &mut self,
        regions: &[(RegionId, *const u8, usize)],
    ) -> Result<Vec<Method>, TrackError> {
        let mut spans = Vec::with_capacity(regions.len());
        let mut ids = BTreeSet::new();
        for &(id, start, len) in regions {
            if !ids.insert(id) {
                return Err(TrackError::Known(id));
            }
            spans.push(self.admit(id, start, len)?);
        }
        let mut reasons = vec![None; spans.len()];
        if self.scan.is_some() {
            let found = unsuitable(&spans, Purpose::Protect);
            let first = regions.first().map_or(RegionId(0), |r| r.0);
            for (i, why) in found.map_err(|e| TrackError::Os(first, e))? {
                if why == Why::Unmapped {
                    return Err(TrackError::Unmapped(regions[i].0));
                }
                reasons[i] = Some(Reason::Memory(why));
            }
        }
        let mut methods = Vec::with_capacity(spans.len());
        for ((&(id, ..), span), reason) in regions.iter().zip(spans).zip(reasons) {
            let reason = match (&self.scan, reason) {
                (None, _) => Some(Reason::Tracker),
                (_, Some(reason)) => Some(reason),
                (Some(scan), None) => match self.overlapping(span.pages(self.page)) {
                    Some(other) => Some(Reason::Overlaps(other)),
                    None => scan.register(span.pages(self.page)).err().map(Reason::Refused),
                },
            };
            methods.push(self.insert(id, span, reason));
        }
        Ok(methods)
    }

    /// Watches a region by hashes, whatever the kernel can.
    ///
    /// # Safety
    /// As for `watch`.
    pub unsafe fn watch_hashed(
        &mut self,
        id: RegionId,
        start: *const u8,
        len: usize,
    ) -> Result<Method, TrackError> {
        let span = self.admit(id, start, len)?;
        Ok(self.insert(id, span, Some(Reason::Asked)))
    }

    fn admit(&self, id: RegionId, start: *const u8, len: usize) -> Result<Span, TrackError> {
        self.own()?;
        if self.regions.contains_key(&id) {
            return Err(TrackError::Known(id));
        }
        // The last page of the address space is nobody's; so rounding up never overflows.
        let start = start.expose_provenance();
        match start.checked_add(len).and_then(|end| end.checked_add(self.page)) {
            Some(_) => Ok(Span { start, len }),
            None => Err(TrackError::Range(id)),
        }
    }

    fn insert(&mut self, id: RegionId, span: Span, reason: Option<Reason>) -> Method {
        let (how, method) = match reason {
            None => (How::Scan(Pages::Registered), Method::Scan),
            Some(r) => (How::Hash(Hashes::new(self.block), r), Method::Hash(r)),
        };
        let pages = span.pages(self.page);
        if method == Method::Scan && pages.len > 0 {
            self.scanned.insert(pages.start, (pages.end(), id));
        }
        self.regions.insert(id, Region { span, how, open: Vec::new() });
        method
    }

    /// The region that is scanned and has whole pages in common with this one.
    fn overlapping(&self, pages: Span) -> Option<RegionId> {
        // Those in `scanned` are disjoint, so only the last that begins before the end can reach in.
        let (_, (end, id)) = self.scanned.range(..pages.end()).next_back()?;
        (pages.len > 0 && *end > pages.start).then_some(*id)
    }

    /// Watches a region no more. To be called before its memory is given back, which costs less then;
    /// later does no harm.
    pub fn unwatch(&mut self, id: RegionId) -> Result<(), TrackError> {
        self.own()?;
        let region = self.regions.remove(&id).ok_or(TrackError::Unknown(id))?;
        let pages = region.span.pages(self.page);
        if self.scanned.get(&pages.start).is_some_and(|(_, other)| *other == id) {
            self.scanned.remove(&pages.start);
        }
        if let (Some(scan), How::Scan(_)) = (&self.scan, &region.how) {
            scan.end(pages, self.page);
        }
        Ok(())
    }

    /// How a region is watched now; it may have changed with its memory.
    pub fn method(&self, id: RegionId) -> Result<Method, TrackError> {
        Ok(match &self.regions.get(&id).ok_or(TrackError::Unknown(id))?.how {
            How::Scan(_) => Method::Scan,
            How::Hash(_, reason) => Method::Hash(*reason),
        })
    }

    /// What changed since the last interval that was committed; the next interval begins.
    ///
    /// Pages that a region has only a part of always count as changed when the kernel tells.
    pub fn collect(&mut self, id: RegionId) -> Result<Collected, TrackError> {
        self.own()?;
        let region = self.regions.get_mut(&id).ok_or(TrackError::Unknown(id))?;
        let found = region.look(id, self.scan.as_mut(), self.page, self.block)?;
        self.marks += 1;
        let mark = Mark(self.marks);
        if region.open.len() >= MAX_OPEN {
            let (_, oldest) = region.open.remove(0);
            region.open[0].1 = both(&oldest, &region.open[0].1);
        }
        region.open.push((mark, found));
        let mut open = region.open.iter().map(|(_, found)| found);
        let first = open.next().cloned().unwrap_or_default();
        let changes = match open.fold(first, |sum, found| both(&sum, found)) {
            Some(runs) => Changes::Runs(runs.into_vec()),
            None => Changes::All,
        };
        Ok(Collected { mark, changes })
    }

    /// The dataset with this collection is committed: what it had need not come again.
    pub fn committed(&mut self, id: RegionId, mark: Mark) -> Result<(), TrackError> {
        self.own()?;
        let region = self.regions.get_mut(&id).ok_or(TrackError::Unknown(id))?;
        region.open.retain(|(m, _)| *m > mark);
        Ok(())
    }

    /// The dataset with this collection is dropped: what it had comes again with the next one.
    ///
    /// That holds for every interval of which nothing is heard, so this only checks the name.
    pub fn dropped(&mut self, id: RegionId, _mark: Mark) -> Result<(), TrackError> {
        self.own()?;
        self.regions.get(&id).map(|_| ()).ok_or(TrackError::Unknown(id))
    }

    /// The next collection of a region brings everything: after a restart, say.
    pub fn forget(&mut self, id: RegionId) -> Result<(), TrackError> {
        self.own()?;
        let region = self.regions.get_mut(&id).ok_or(TrackError::Unknown(id))?;
        region.open.clear();
        match &mut region.how {
            How::Scan(Pages::Unknown) => {}
            How::Scan(pages) => *pages = Pages::Registered,
            How::Hash(hashes, _) => hashes.forget(),
        }
        Ok(())
    }

    /// Descriptors act on the process that opened them: a child would disturb its parent.
    fn own(&self) -> Result<(), TrackError> {
        if own_pid() == self.pid { Ok(()) } else { Err(TrackError::OtherProcess) }
    }
}

impl Drop for Tracker {
    fn drop(&mut self) {
        let ids: Vec<RegionId> = self.regions.keys().copied().collect();
        for id in ids {
            // In a child this refuses, as it should.
            let _ = self.unwatch(id);
        }
    }
}

impl Region {
    /// What was written since the last look; `None` is everything.
    fn look(
        &mut self,
        id: RegionId,
        scan: Option<&mut Scan>,
        page: usize,
        block: usize,
    ) -> Result<Option<Runs>, TrackError> {
        let span = self.span;
        if let (How::Scan(state), Some(scan)) = (&mut self.how, scan) {
            match look_at_pages(id, span, state, scan, page)? {
                Ok(found) => return Ok(found),
                Err(reason) => self.how = How::Hash(Hashes::new(block), reason),
            }
        }
        let touched = span.touched(page);
        let How::Hash(hashes, _) = &mut self.how else { return Ok(None) };
        if !is_mapped(touched.start, touched.len) {
            return Err(TrackError::Unmapped(id));
        }
        // SAFETY: it is mapped, and what is mapped is readable by the contract of `watch`.
        Ok(unsafe {
            hashes.look(std::ptr::with_exposed_provenance(span.start), span.len, MAX_RUNS)
        })
    }
}

/// What the kernel tells of a region; or why it cannot tell of it any more.
fn look_at_pages(
    id: RegionId,
    span: Span,
    state: &mut Pages,
    scan: &mut Scan,
    page: usize,
) -> Result<Result<Option<Runs>, Reason>, TrackError> {
    let pages = span.pages(page);
    if pages.len == 0 {
        return Ok(Ok(None));
    }
    // Whatever goes wrong from here on, nothing is known then.
    match std::mem::replace(state, Pages::Unknown) {
        Pages::Marked => match scan.written(pages, span.start, MAX_RUNS) {
            Ok(Seen::Pages(runs)) => {
                *state = Pages::Marked;
                return Ok(Ok(Some(runs.union(&edges(span, pages)))));
            }
            Ok(Seen::Replaced) => {}
            Err(_) if !is_mapped(pages.start, pages.len) => return Err(TrackError::Unmapped(id)),
            Err(e) => return Err(TrackError::Os(id, e)),
        },
        Pages::Registered if scan.mark(pages).is_ok() => {
            *state = Pages::Marked;
            return Ok(Ok(None));
        }
        _ => {}
    }
    let reason =
        match unsuitable(&[span], Purpose::Protect).map_err(|e| TrackError::Os(id, e))?.first() {
            Some((_, Why::Unmapped)) => return Err(TrackError::Unmapped(id)),
            Some((_, why)) => Reason::Memory(*why),
            None => match scan.register(pages).and_then(|()| scan.mark(pages)) {
                Ok(()) => {
                    *state = Pages::Marked;
                    return Ok(Ok(None));
                }
                Err(e) => Reason::Refused(e),
            },
        };
    scan.end(pages, page);
    Ok(Err(reason))
}

/// The parts of a region before and behind its whole pages.
fn edges(span: Span, pages: Span) -> Runs {
    let mut runs = Runs::new(MAX_RUNS);
    runs.push(Run { offset: 0, len: pages.start - span.start });
    runs.push(Run { offset: pages.end() - span.start, len: span.end() - pages.end() });
    runs
}

fn both(a: &Option<Runs>, b: &Option<Runs>) -> Option<Runs> {
    Some(a.as_ref()?.union(b.as_ref()?))
}
