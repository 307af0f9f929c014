//! A snapshot by write protection: the application goes on at once, a thread copies behind its back.
//!
//! `begin` write-protects the regions; `run`, on a thread of the caller's, copies block after block and
//! frees each. Who writes to a block that is still protected sleeps in the kernel until that block is
//! copied, which then comes first.
//!
//! A block counts as copied only if all its pages still had the protection after the copy. Nothing but
//! `run` takes it off, and pages that were unmapped, dropped, moved or mapped anew do not have it. So
//! what happens to the memory in between gives a whole copy or `Torn`, without waiting for the kernel's
//! events of unmapping, which come when the memory is gone and would stop the application until read.
//!
//! `run` must not wait for anybody who may wait for it: it takes no lock and no memory (free() writes
//! into the block it frees with the arena's lock held), blocks signals, whose handlers are the
//! application's, and reads by process_vm_readv, so memory that goes away gives an error and no signal.
//! Only whole pages inside a region are protected, so nothing of the allocator's is.
//!
//! Whose writes are held up: with `Faults::All` everybody's that go through page tables, the kernel's in a
//! system call too, and another process's by process_vm_writev; with `Faults::User` only the instructions'
//! of this process, and the kernel's fail (EFAULT). What a device writes into pages that were pinned for it
//! before is never held up (`pinned` tells whether there are any); to pin a page that is protected counts as
//! writing to it.
//!
//! A mapping belongs to one userfaultfd: a region that a `Tracker` watches by the kernel's help cannot be
//! protected here (EBUSY), nor the other way round.

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use thiserror::Error;

use crate::copy::{Piece, copy_out};
pub use crate::kernel::{Faults, Lacking, pinned};
use crate::kernel::{
    PAGEFAULT_FLAG_WP, Pagemap, Uffd, WP_UNPOPULATED, own_pid, page_size, read_self,
};
use crate::maps::{Purpose, Span, Why, quickly_unsuitable};

/// A good block: greater ones bring nothing more.
pub const USUAL_BLOCK: usize = 256 << 10;
/// The least block: smaller ones cost more in faults than in copying.
pub const MIN_BLOCK: usize = 64 << 10;
/// The greatest block: who waits for one waits for all of it.
pub const MAX_BLOCK: usize = 4 << 20;

/// A page of this size is copied in one: to free a part of it the kernel would split it, for good.
const HUGE_PAGE: usize = 2 << 20;

/// Why a snapshot did not come about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CowError {
    /// The machine does not allow it.
    #[error("no snapshot by write protection: {0}")]
    Lacking(Lacking),
    /// A block of no use.
    #[error("a block of {0} bytes: a power of two from 65536 to 4194304 is wanted")]
    Block(usize),
    /// This piece is to be copied at once.
    #[error("piece {index} cannot be write-protected ({why:?})")]
    Unsuitable {
        /// Which of the pieces.
        index: usize,
        /// Why.
        why: Why,
    },
    /// This piece and another have whole pages in common.
    #[error("piece {0} overlaps another")]
    Overlap(usize),
    /// The memory was unmapped, dropped, moved or replaced before it was copied.
    #[error(
        "the memory of piece {index} at offset {offset} was gone or another before it was copied"
    )]
    Torn {
        /// Which of the pieces.
        index: usize,
        /// Where in it.
        offset: usize,
    },
    /// A forked child uses its parent's snapshot.
    #[error("the snapshot belongs to the process that made it")]
    OtherProcess,
    /// Who waited for it does not want it any more.
    #[error("the copy was not wanted any more before it was complete")]
    Stopped,
    /// The kernel failed.
    #[error("piece {index}: {errno}")]
    Os {
        /// Which of the pieces.
        index: usize,
        /// What it said.
        errno: Errno,
    },
}

/// What a snapshot cost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Copied {
    /// Blocks in all.
    pub blocks: usize,
    /// Times that somebody had to wait for a block.
    pub faults: usize,
}

/// Memory that is being copied while it is in use.
#[derive(Debug)]
pub struct Snapshot {
    pid: i32,
    page: usize,
    block: usize,
    uffd: Uffd,
    pagemap: Pagemap,
    /// By address.
    areas: Vec<Area>,
    /// So many of them, the first ones, are registered.
    registered: usize,
    /// A bit for each block: it is copied.
    done: Vec<u64>,
    blocks: usize,
    /// Pagemap entries of a block or a huge page.
    entries: Vec<u8>,
}

/// The whole pages of a piece.
#[derive(Debug)]
struct Area {
    index: usize,
    /// Where in the piece they begin.
    offset: usize,
    piece: Piece,
    first_block: usize,
}

impl Area {
    fn start(&self) -> usize {
        self.piece.src.addr()
    }

    fn end(&self) -> usize {
        self.start() + self.piece.len
    }

    /// The part of it that these addresses are.
    fn part(&self, start: usize, end: usize) -> Piece {
        let (start, end) = (start.max(self.start()), end.min(self.end()));
        self.piece.part(start - self.start(), end - start)
    }
}

// SAFETY: the pointers are addresses of memory that, by the contract of `begin`, stays what it is
// until the snapshot is over, whichever thread copies it; nothing else is tied to a thread.
unsafe impl Send for Snapshot {}

/// What a copying thread may do; only ever more, and last of all end.
const HELD: u8 = 0;
const PACED: u8 = 1;
const HURRIED: u8 = 2;
const STOPPED: u8 = 3;

/// By what a copy is led from another thread.
#[derive(Debug)]
pub struct Reins {
    may: AtomicU8,
    bell: OwnedFd,
}

impl Reins {
    /// Held: who waits for a block gets it, no other is copied.
    pub fn held() -> Result<Reins, Errno> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Reins { may: AtomicU8::new(HELD), bell })
    }

    /// All is copied, at the speed that was said.
    pub fn go(&self) {
        self.raise(PACED);
    }

    /// All is copied, as fast as it can be: somebody waits for it.
    pub fn hurry(&self) {
        self.raise(HURRIED);
    }

    /// Nothing more is copied.
    pub fn stop(&self) {
        self.raise(STOPPED);
    }

    /// Does somebody wait for its end?
    pub fn is_urged(&self) -> bool {
        self.may.load(Ordering::SeqCst) >= HURRIED
    }

    fn raise(&self, to: u8) {
        self.may.fetch_max(to, Ordering::SeqCst);
        // It fails only where it has been rung very often and not been heard yet.
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }

    fn heard(&self) {
        let mut count = [0; 8];
        // Not rung: then it was heard before.
        let _ = rustix::io::read(&self.bell, &mut count);
    }
}

/// How a snapshot is copied.
#[derive(Debug, Clone, Copy, Default)]
pub struct Manner<'a> {
    /// Leads it; none: it goes ahead.
    pub reins: Option<&'a Reins>,
    /// A socket to somebody who stops it by shutting down his direction.
    pub link: Option<BorrowedFd<'a>>,
    /// Bytes a second at most, beside those that somebody waits for; 0: as fast as it can.
    pub bytes_per_s: u64,
}

impl Manner<'_> {
    fn may(&self) -> u8 {
        self.reins.map_or(PACED, |r| r.may.load(Ordering::SeqCst))
    }

    /// Waits, not longer than `ms` (below 0: for ever), and tells if there are faults.
    fn wait(&self, faults: RawFd, ms: libc::c_int) -> Result<bool, CowError> {
        let look = |fd, events| libc::pollfd { fd, events, revents: 0 };
        let mut looks = [
            look(faults, libc::POLLIN),
            look(self.link.map_or(-1, |l| l.as_raw_fd()), libc::POLLRDHUP),
            look(self.reins.map_or(-1, |r| r.bell.as_raw_fd()), libc::POLLIN),
        ];
        // SAFETY: three descriptors of our own, or -1.
        if unsafe { libc::poll(looks.as_mut_ptr(), 3, ms) } < 0 {
            let errno = Errno::from_io_error(&std::io::Error::last_os_error());
            return match errno {
                Some(Errno::INTR) => Ok(false),
                errno => Err(CowError::Os { index: 0, errno: errno.unwrap_or(Errno::IO) }),
            };
        }
        if looks[1].revents & (libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR) != 0 {
            return Err(CowError::Stopped);
        }
        if let Some(reins) = self.reins.filter(|_| looks[2].revents != 0) {
            reins.heard();
        }
        Ok(looks[0].revents & libc::POLLIN != 0)
    }
}

/// Holds a copy to its speed.
struct Pace {
    bytes_per_s: u64,
    due: Instant,
}

impl Pace {
    fn copied(&mut self, bytes: usize) {
        let nanos = (bytes as u64).saturating_mul(1_000_000_000).checked_div(self.bytes_per_s);
        // What was not used meanwhile is not made up for.
        self.due = self.due.max(Instant::now()) + Duration::from_nanos(nanos.unwrap_or(0));
    }

    /// Whole milliseconds: what is less adds up.
    fn pause_ms(&self) -> libc::c_int {
        let left = self.due.saturating_duration_since(Instant::now()).as_millis();
        left.try_into().unwrap_or(libc::c_int::MAX)
    }
}

/// Whose writes such a snapshot of this process could hold up; or why it may take none.
pub fn probe() -> Result<Faults, Lacking> {
    match open(Faults::All) {
        Ok(_) => Ok(Faults::All),
        Err(Lacking::UserModeOnly) => open(Faults::User).map(|_| Faults::User),
        Err(lacking) => Err(lacking),
    }
}

fn open(faults: Faults) -> Result<(Uffd, Pagemap), Lacking> {
    let uffd = Uffd::open(faults, PAGEFAULT_FLAG_WP | WP_UNPOPULATED)?;
    let pagemap = Pagemap::open()?;
    let (from, mut to) = ([1u8; 8], [0u8; 8]);
    read_self(own_pid(), from.as_ptr(), to.as_mut_ptr(), 8).map_err(Lacking::ReadSelf)?;
    if from == to { Ok((uffd, pagemap)) } else { Err(Lacking::WrongAnswer) }
}

impl Snapshot {
    /// Protects all pieces and copies their partial pages; whole pages are for `run`.
    ///
    /// Whether a piece is MADV_DONTFORK, a sign of a device that writes to it, takes long to find out, so it is
    /// not looked at here: see `maps::unsuitable`.
    ///
    /// # Safety
    /// No thread writes to the pieces before this returns. Every `dst` is writable, overlaps nothing and
    /// is nobody else's until the snapshot is dropped. The thread that runs it must not be needed by
    /// those who hold locks while they write to a piece.
    pub unsafe fn begin(
        pieces: &[Piece],
        block: usize,
        faults: Faults,
    ) -> Result<Snapshot, CowError> {
        let spans: Vec<Span> =
            pieces.iter().map(|p| Span { start: p.src.addr(), len: p.len }).collect();
        let bad = quickly_unsuitable(&spans, Purpose::Protect)
            .map_err(|errno| CowError::Os { index: 0, errno })?;
        if let Some(&(index, why)) = bad.first() {
            return Err(CowError::Unsuitable { index, why });
        }
        // SAFETY: as our caller promises.
        unsafe { Snapshot::begin_unchecked(pieces, block, faults) }
    }

    /// The same where the pieces are known to be what can be protected. Those that cannot, tear it at worst.
    ///
    /// # Safety
    /// As for [`Snapshot::begin`].
    pub unsafe fn begin_unchecked(
        pieces: &[Piece],
        block: usize,
        faults: Faults,
    ) -> Result<Snapshot, CowError> {
        if !block.is_power_of_two() || !(MIN_BLOCK..=MAX_BLOCK).contains(&block) {
            return Err(CowError::Block(block));
        }
        let page = page_size();
        let spans: Vec<Span> =
            pieces.iter().map(|p| Span { start: p.src.addr(), len: p.len }).collect();
        let (uffd, pagemap) = open(faults).map_err(CowError::Lacking)?;
        let (areas, blocks) = areas(pieces, &spans, page, block)?;
        let mut snapshot = Snapshot {
            pid: own_pid(),
            page,
            block,
            uffd,
            pagemap,
            areas,
            registered: 0,
            done: vec![0; blocks.div_ceil(64)],
            blocks,
            entries: vec![0; block.max(HUGE_PAGE) / page * 8],
        };
        for (piece, span) in pieces.iter().zip(&spans) {
            let inner = span.pages(page);
            let head = if inner.len == 0 { span.len } else { inner.start - span.start };
            let tail = if inner.len == 0 { 0 } else { span.end() - inner.end() };
            for part in [piece.part(0, head), piece.part(piece.len - tail, tail)] {
                // SAFETY: parts of a piece, by this function's contract.
                unsafe { copy_out(part.src, part.dst, part.len) };
            }
        }
        for i in 0..snapshot.areas.len() {
            let a = &snapshot.areas[i];
            let (index, start, len) = (a.index, a.start(), a.piece.len);
            let failed = |errno| CowError::Os { index, errno };
            snapshot.uffd.register(start, len).map_err(failed)?;
            snapshot.registered = i + 1;
            snapshot.uffd.protect(start, len, true).map_err(failed)?;
        }
        Ok(snapshot)
    }

    /// Copies all; returns when that is done, or when it cannot be. Either way nothing is protected
    /// any more and nobody waits.
    pub fn run(self) -> Result<Copied, CowError> {
        self.run_as(Manner::default())
    }

    /// The same in a certain manner.
    pub fn run_as(mut self, manner: Manner<'_>) -> Result<Copied, CowError> {
        if own_pid() != self.pid {
            return Err(CowError::OtherProcess);
        }
        let _quiet = Quiet::new();
        let copied = self.copy_all(manner);
        self.release();
        copied
    }

    fn copy_all(&mut self, manner: Manner<'_>) -> Result<Copied, CowError> {
        let mut copied = Copied { blocks: self.blocks, faults: 0 };
        let mut pace = Pace { bytes_per_s: manner.bytes_per_s, due: Instant::now() };
        let mut next = 0;
        loop {
            let Some(block) = self.next_open(next).or_else(|| self.next_open(0)) else {
                return Ok(copied);
            };
            let pause = match manner.may() {
                HELD => -1,
                PACED => pace.pause_ms(),
                HURRIED => 0,
                _ => return Err(CowError::Stopped),
            };
            if manner.wait(self.uffd.raw(), pause)? {
                // Who waits for one block will soon want the next.
                next = self.serve(&mut copied)?.unwrap_or(next);
            } else if pause == 0 {
                let area = self.areas.partition_point(|a| a.first_block <= block) - 1;
                pace.copied(self.copy_block(area, block)?);
                next = block + 1;
            }
        }
    }

    /// Copies what somebody waits for; the block behind the last one.
    fn serve(&mut self, copied: &mut Copied) -> Result<Option<usize>, CowError> {
        let mut next = None;
        while let Some(address) = self.uffd.next_fault() {
            copied.faults += 1;
            match self.block_of(address) {
                Some((area, block)) => {
                    self.copy_block(area, block)?;
                    next = Some(block + 1);
                }
                None => self.uffd.wake(address / self.page * self.page, self.page),
            }
        }
        Ok(next)
    }

    /// The area and the block of an address.
    fn block_of(&self, address: usize) -> Option<(usize, usize)> {
        let i = self.areas.partition_point(|a| a.start() <= address).checked_sub(1)?;
        let a = &self.areas[i];
        (address < a.end())
            .then(|| (i, a.first_block + address / self.block - a.start() / self.block))
    }

    /// The first block from `from` on that is not copied.
    fn next_open(&self, from: usize) -> Option<usize> {
        let mut word = from / 64;
        let mut skip = !0u64 << (from % 64);
        while let Some(bits) = self.done.get(word) {
            let open = !bits & skip;
            if open != 0 {
                let block = word * 64 + open.trailing_zeros() as usize;
                return (block < self.blocks).then_some(block);
            }
            (word, skip) = (word + 1, !0);
        }
        None
    }

    /// How many bytes that were.
    fn copy_block(&mut self, area: usize, block: usize) -> Result<usize, CowError> {
        let a = &self.areas[area];
        // Blocks lie at multiples of their size.
        let at = (block - a.first_block + a.start() / self.block) * self.block;
        if self.is_done(block) {
            // Its waiter came to sleep while it was being freed.
            let part = a.part(at, at + self.block);
            self.uffd.wake(part.src.addr(), part.len);
            return Ok(0);
        }
        let (start, end) = self.huge_page(a, block, at).unwrap_or((at, at + self.block));
        let part = a.part(start, end);
        let (first, blocks) = (block - (at - start) / self.block, (end - start) / self.block);
        let start = part.src.addr();
        let entries = &mut self.entries[..part.len / self.page * 8];
        if read_self(self.pid, part.src, part.dst, part.len).is_err()
            || !self.pagemap.all_protected(start, self.page, entries)
        {
            let offset = a.offset + (start - a.start());
            return Err(CowError::Torn { index: a.index, offset });
        }
        for copied in first..first + blocks {
            self.done[copied / 64] |= 1 << (copied % 64);
        }
        if self.uffd.protect(start, part.len, false).is_err() {
            // Unmapped since; the copy is good. What is left of it is freed page by page.
            self.uffd.unregister_all(start, part.len, self.page);
        }
        Ok(part.len)
    }

    fn is_done(&self, block: usize) -> bool {
        self.done[block / 64] >> (block % 64) & 1 == 1
    }

    /// The huge page, by its addresses, that the block at `at` is a part of, if none of it was copied yet.
    fn huge_page(&self, a: &Area, block: usize, at: usize) -> Option<(usize, usize)> {
        let start = at / HUGE_PAGE * HUGE_PAGE;
        let end = start + HUGE_PAGE;
        if self.block >= HUGE_PAGE || start < a.start() || end > a.end() {
            return None;
        }
        let first = block - (at - start) / self.block;
        let open = (first..first + HUGE_PAGE / self.block).all(|b| !self.is_done(b));
        (open && self.pagemap.is_huge(start, HUGE_PAGE)).then_some((start, end))
    }

    fn release(&mut self) {
        let registered = std::mem::take(&mut self.registered);
        if own_pid() != self.pid {
            return;
        }
        // Closing alone would not do: a forked child may have the descriptor too.
        for a in &self.areas[..registered] {
            self.uffd.unregister_all(a.start(), a.piece.len, self.page);
        }
    }
}

impl Drop for Snapshot {
    fn drop(&mut self) {
        self.release();
    }
}

/// The whole pages of the pieces by address, and the number of blocks.
fn areas(
    pieces: &[Piece],
    spans: &[Span],
    page: usize,
    block: usize,
) -> Result<(Vec<Area>, usize), CowError> {
    let mut areas = Vec::with_capacity(pieces.len());
    for (index, (piece, span)) in pieces.iter().zip(spans).enumerate() {
        let inner = span.pages(page);
        if inner.len > 0 {
            let offset = inner.start - span.start;
            let piece = piece.part(offset, inner.len);
            areas.push(Area { index, offset, piece, first_block: 0 });
        }
    }
    areas.sort_by_key(Area::start);
    if let Some(w) = areas.windows(2).find(|w| w[0].start() + w[0].piece.len > w[1].start()) {
        return Err(CowError::Overlap(w[0].index.max(w[1].index)));
    }
    let mut blocks = 0;
    for a in &mut areas {
        a.first_block = blocks;
        blocks += a.end().div_ceil(block) - a.start() / block;
    }
    Ok((areas, blocks))
}

/// Keeps signals from a thread while it lives, and from those that it starts meanwhile for good.
#[derive(Debug)]
pub struct Quiet {
    before: libc::sigset_t,
    set: bool,
}

impl Quiet {
    /// From now on.
    #[expect(clippy::new_without_default, reason = "it does something")]
    pub fn new() -> Quiet {
        // SAFETY: a sigset_t is plain data, which sigfillset and pthread_sigmask fill in.
        unsafe {
            let mut all: libc::sigset_t = std::mem::zeroed();
            let mut before: libc::sigset_t = std::mem::zeroed();
            libc::sigfillset(&mut all);
            let set = libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before) == 0;
            Quiet { before, set }
        }
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        if self.set {
            // SAFETY: restores this thread's mask, which `new` has read.
            unsafe {
                libc::pthread_sigmask(libc::SIG_SETMASK, &self.before, std::ptr::null_mut());
            }
        }
    }
}
