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
//! A mapping belongs to one userfaultfd: a region that a `Tracker` watches by the kernel's help cannot be
//! protected here (EBUSY), nor the other way round.

use rustix::io::Errno;
use thiserror::Error;

use crate::copy::{Piece, copy_out};
pub use crate::kernel::Lacking;
use crate::kernel::{
    Faults, PAGEFAULT_FLAG_WP, Pagemap, Uffd, WP_UNPOPULATED, own_pid, page_size, read_self,
};
use crate::maps::{Purpose, Span, Why, quickly_unsuitable};

/// A good block: greater ones bring nothing more.
pub const USUAL_BLOCK: usize = 256 << 10;
/// The least block: smaller ones cost more in faults than in copying.
pub const MIN_BLOCK: usize = 64 << 10;
/// The greatest block: who waits for one waits for all of it.
pub const MAX_BLOCK: usize = 4 << 20;

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
    /// Pagemap entries of a block.
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
}

// SAFETY: the pointers are addresses of memory that, by the contract of `begin`, stays what it is
// until the snapshot is over, whichever thread copies it; nothing else is tied to a thread.
unsafe impl Send for Snapshot {}

/// Whether this process may take such snapshots, and if not, why.
pub fn probe() -> Result<(), Lacking> {
    open().map(|_| ())
}

fn open() -> Result<(Uffd, Pagemap), Lacking> {
    let uffd = Uffd::open(Faults::All, PAGEFAULT_FLAG_WP | WP_UNPOPULATED)?;
    let pagemap = Pagemap::open()?;
    let (from, mut to) = ([1u8; 8], [0u8; 8]);
    read_self(own_pid(), from.as_ptr(), to.as_mut_ptr(), 8).map_err(Lacking::ReadSelf)?;
    if from == to { Ok((uffd, pagemap)) } else { Err(Lacking::WrongAnswer) }
}

impl Snapshot {
    /// Protects all pieces and copies their partial pages; whole pages are for `run`.
    ///
    /// Pieces must be free of communication: what a network card writes into a page is not held up.
    /// Whether a piece is MADV_DONTFORK, a sign of that, takes long to find out, so it is not looked at
    /// here: see `maps::unsuitable`.
    ///
    /// # Safety
    /// No thread writes to the pieces before this returns. Every `dst` is writable, overlaps nothing and
    /// is nobody else's until the snapshot is dropped. The thread that runs it must not be needed by
    /// those who hold locks while they write to a piece.
    pub unsafe fn begin(pieces: &[Piece], block: usize) -> Result<Snapshot, CowError> {
        if !block.is_power_of_two() || !(MIN_BLOCK..=MAX_BLOCK).contains(&block) {
            return Err(CowError::Block(block));
        }
        let page = page_size();
        let spans: Vec<Span> =
            pieces.iter().map(|p| Span { start: p.src.addr(), len: p.len }).collect();
        let bad = quickly_unsuitable(&spans, Purpose::Protect)
            .map_err(|errno| CowError::Os { index: 0, errno })?;
        if let Some(&(index, why)) = bad.first() {
            return Err(CowError::Unsuitable { index, why });
        }
        let (uffd, pagemap) = open().map_err(CowError::Lacking)?;
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
            entries: vec![0; block / page * 8],
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
    pub fn run(mut self) -> Result<Copied, CowError> {
        if own_pid() != self.pid {
            return Err(CowError::OtherProcess);
        }
        let _quiet = Quiet::new();
        let copied = self.copy_all();
        self.release();
        copied
    }

    fn copy_all(&mut self) -> Result<Copied, CowError> {
        let mut copied = Copied { blocks: self.blocks, faults: 0 };
        let mut next = 0;
        loop {
            while let Some(address) = self.uffd.next_fault() {
                copied.faults += 1;
                match self.block_of(address) {
                    // Who waits for one block will soon want the next.
                    Some((area, block)) => {
                        self.copy_block(area, block)?;
                        next = block + 1;
                    }
                    None => self.uffd.wake(address / self.page * self.page, self.page),
                }
            }
            let Some(block) = self.next_open(next).or_else(|| self.next_open(0)) else {
                return Ok(copied);
            };
            let area = self.areas.partition_point(|a| a.first_block <= block) - 1;
            self.copy_block(area, block)?;
            next = block + 1;
        }
    }

    /// The area and the block of an address.
    fn block_of(&self, address: usize) -> Option<(usize, usize)> {
        let i = self.areas.partition_point(|a| a.start() <= address).checked_sub(1)?;
        let a = &self.areas[i];
        let offset = address - a.start();
        (offset < a.piece.len).then(|| (i, a.first_block + offset / self.block))
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

    fn copy_block(&mut self, area: usize, block: usize) -> Result<(), CowError> {
        let a = &self.areas[area];
        let offset = (block - a.first_block) * self.block;
        let part = a.piece.part(offset, self.block.min(a.piece.len - offset));
        let start = part.src.addr();
        if self.done[block / 64] >> (block % 64) & 1 == 1 {
            // Its waiter came to sleep while it was being freed.
            self.uffd.wake(start, part.len);
            return Ok(());
        }
        let entries = &mut self.entries[..part.len / self.page * 8];
        if read_self(self.pid, part.src, part.dst, part.len).is_err()
            || !self.pagemap.all_protected(start, self.page, entries)
        {
            return Err(CowError::Torn { index: a.index, offset: a.offset + offset });
        }
        self.done[block / 64] |= 1 << (block % 64);
        if self.uffd.protect(start, part.len, false).is_err() {
            // Unmapped since; the copy is good. What is left of it is freed page by page.
            self.uffd.unregister_all(start, part.len, self.page);
        }
        Ok(())
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
        blocks += a.piece.len.div_ceil(block);
    }
    Ok((areas, blocks))
}

/// Keeps signals from a thread while it lives.
pub(crate) struct Quiet {
    before: libc::sigset_t,
    set: bool,
}

impl Quiet {
    pub(crate) fn new() -> Quiet {
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
