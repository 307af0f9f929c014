//! Changed pages by asking the kernel: userfaultfd with asynchronous write protection, PAGEMAP_SCAN.
//!
//! Registered pages carry a mark that the first write takes off, in the kernel, without anybody being
//! woken. A scan reports pages without the mark and puts it on again, in one step for each page. So a
//! page counts as written unless it provably still has the mark: whatever the kernel does to pages that
//! it drops, moves or maps anew, they come without.

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use super::runs::{Run, Runs};
use crate::kernel::{
    Faults, Lacking, PAGE_IS_PRESENT, PAGE_IS_SWAPPED, PAGE_IS_WRITTEN, PageRegion, Pagemap,
    SCAN_CHECK_WPASYNC, SCAN_WP_MATCHING, ScanArg, Uffd, WP_ASYNC, WP_HUGETLBFS_SHMEM,
    WP_UNPOPULATED, is_mapped,
};
use crate::maps::Span;

/// Entries of one PAGEMAP_SCAN: 48 KiB.
const ENTRIES: usize = 2048;

pub(super) struct Scan {
    uffd: Uffd,
    pagemap: Pagemap,
    entries: Box<[PageRegion]>,
}

/// What a scan found.
pub(super) enum Seen {
    Pages(Runs),
    /// Some of the range is not what was registered: unmapped and mapped anew, or moved.
    Replaced,
}

impl Scan {
    /// Opens what is needed and tries it on own memory.
    pub(super) fn open(page: usize) -> Result<Scan, Lacking> {
        let need = WP_ASYNC | WP_UNPOPULATED;
        let uffd = match Uffd::open(Faults::User, need | WP_HUGETLBFS_SHMEM) {
            Err(Lacking::Features { missing: WP_HUGETLBFS_SHMEM }) => {
                Uffd::open(Faults::User, need)
            }
            other => other,
        }?;
        let entries = vec![PageRegion::default(); ENTRIES].into_boxed_slice();
        let mut scan = Scan { uffd, pagemap: Pagemap::open()?, entries };
        scan.try_out(page)?;
        Ok(scan)
    }

    /// Registers whole pages.
    pub(super) fn register(&self, pages: Span) -> Result<(), Errno> {
        if pages.len == 0 { Ok(()) } else { self.uffd.register(pages.start, pages.len) }
    }

    /// Puts the mark on registered pages; fails if some of them are not, or are not mapped.
    pub(super) fn mark(&self, pages: Span) -> Result<(), Errno> {
        self.uffd.protect(pages.start, pages.len, true)?;
        if is_mapped(pages.start, pages.len) { Ok(()) } else { Err(Errno::NOMEM) }
    }

    pub(super) fn end(&self, pages: Span, page: usize) {
        self.uffd.unregister_all(pages.start, pages.len, page);
    }

    /// The written ones of these whole pages, as offsets from `base`; all are marked again.
    ///
    /// After an error the marks say nothing any more, the caller begins anew.
    pub(super) fn written(&mut self, pages: Span, base: usize, max: usize) -> Result<Seen, Errno> {
        // Without CHECK_WPASYNC the kernel passes over mappings that are not registered, in silence.
        let flags = SCAN_WP_MATCHING | SCAN_CHECK_WPASYNC;
        let written = ScanArg {
            flags,
            category_mask: PAGE_IS_WRITTEN,
            return_mask: PAGE_IS_WRITTEN,
            ..ScanArg::default()
        };
        // A page that was dropped together with its page table (madvise, a mapping shrunk and grown
        // again) has no mark that could be missing. Linux 6.18 calls it written; nothing promises that
        // others do, and it is neither there nor swapped out.
        let gone = PAGE_IS_PRESENT | PAGE_IS_SWAPPED;
        let gone =
            ScanArg { flags, category_inverted: gone, category_mask: gone, ..ScanArg::default() };
        let (Some(written), Some(gone)) =
            (self.scan(written, pages, base, max)?, self.scan(gone, pages, base, max)?)
        else {
            return Ok(Seen::Replaced);
        };
        // Scans pass over what is not mapped at all.
        if !is_mapped(pages.start, pages.len) {
            return Err(Errno::NOMEM);
        }
        Ok(Seen::Pages(written.union(&gone)))
    }

    fn scan(
        &mut self,
        what: ScanArg,
        pages: Span,
        base: usize,
        max: usize,
    ) -> Result<Option<Runs>, Errno> {
        let mut runs = Runs::new(max);
        let mut at = pages.start;
        while at < pages.end() {
            match self.pagemap.scan(what, at, pages.end(), &mut self.entries) {
                Ok((found, to)) => {
                    for r in found {
                        let (start, end) = (r.start as usize, r.end as usize);
                        runs.push(Run { offset: start - base, len: end - start });
                    }
                    if to <= at {
                        return Err(Errno::IO);
                    }
                    at = to;
                }
                Err(Errno::INTR) => {}
                Err(Errno::PERM) => return Ok(None),
                Err(e) => return Err(e),
            }
        }
        Ok(Some(runs))
    }

    /// Three pages: one written, one dropped, one left alone.
    fn try_out(&mut self, page: usize) -> Result<(), Lacking> {
        let flags = MapFlags::PRIVATE;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping where the kernel likes.
        let map =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), 3 * page, prot, flags) }
                .map_err(Lacking::Trial)?;
        let start = map as usize;
        let pages = Span { start, len: 3 * page };
        let poke = |n: usize| {
            // SAFETY: the mapping is ours alone and has three pages.
            unsafe { map.cast::<u8>().add(n * page).write_volatile(1) };
        };
        (0..3).for_each(poke);
        let seen = self.register(pages).and_then(|()| self.mark(pages));
        let seen = seen.map_err(Lacking::Trial).and_then(|()| {
            poke(0);
            // SAFETY: as above; nobody reads the page afterwards.
            let drop = unsafe {
                rustix::mm::madvise(map.byte_add(page), page, rustix::mm::Advice::LinuxDontNeed)
            };
            drop.map_err(Lacking::Trial)?;
            self.written(pages, start, 8).map_err(|e| match e {
                Errno::NOTTY | Errno::INVAL => Lacking::PagemapScan(e),
                e => Lacking::Trial(e),
            })
        });
        self.end(pages, page);
        // SAFETY: the mapping is ours, and nothing refers to it any more.
        let _ = unsafe { rustix::mm::munmap(map, 3 * page) };
        match seen? {
            Seen::Pages(runs) if runs.as_slice() == [Run { offset: 0, len: 2 * page }] => Ok(()),
            _ => Err(Lacking::WrongAnswer),
        }
    }
}
