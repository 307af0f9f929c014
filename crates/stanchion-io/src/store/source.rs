//! Memory that is written from.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use stanchion_format::checksum::Crc;
use stanchion_format::segment::{BLOCK, Tag};

/// Bytes to be written: a slice, or memory that other processes have mapped too.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    at: NonNull<u8>,
    len: usize,
    lives: PhantomData<&'a [u8]>,
}

// SAFETY: a Source is only ever read from, and whoever made it vouches that nobody in this process writes
// to its bytes during 'a (`From` by the borrow, `Source::raw` by its contract).
unsafe impl Send for Source<'_> {}
// SAFETY: as above; reading from several threads is fine.
unsafe impl Sync for Source<'_> {}

impl<'a> From<&'a [u8]> for Source<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        Source { at: NonNull::from(bytes).cast(), len: bytes.len(), lives: PhantomData }
    }
}

impl<'a> Source<'a> {
    /// `len` bytes at `at`.
    ///
    /// # Safety
    /// They are readable during all of `'a`, and nobody writes to them meanwhile. In memory that is shared
    /// with another process, the protocol with that process has to see to it; should it break the protocol,
    /// what is stored does not match its checksum and reading it fails.
    pub unsafe fn raw(at: NonNull<u8>, len: usize) -> Source<'a> {
        Source { at, len, lives: PhantomData }
    }

    /// How many bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// None?
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Does it begin at a multiple of `align`?
    pub(super) fn is_aligned(&self, align: usize) -> bool {
        self.at.addr().get().is_multiple_of(align)
    }

    /// The bytes themselves.
    pub(super) fn bytes(&self) -> &'a [u8] {
        // SAFETY: `at` and `len` describe bytes that are readable and not written to during 'a: by the borrow
        // for `From`, by the caller's promise for `raw`; parts keep within the whole.
        unsafe { std::slice::from_raw_parts(self.at.as_ptr(), self.len) }
    }

    /// The part from `from` up to `to`.
    pub(super) fn part(&self, from: usize, to: usize) -> Source<'a> {
        Source::from(&self.bytes()[from..to])
    }
}

/// A chunk to be stored.
#[derive(Clone, Copy, Debug)]
pub struct Piece<'a> {
    /// What it is.
    pub tag: Tag,
    /// Its bytes.
    pub from: Source<'a>,
    /// Their checksum, if it is known already.
    pub crc: Option<Crc>,
}

/// Memory of our own that direct I/O takes.
#[derive(Debug)]
pub(super) struct Aligned {
    at: NonNull<u8>,
    len: usize,
}

// SAFETY: owns its memory alone, like a Box<[u8]>.
unsafe impl Send for Aligned {}
// SAFETY: shared references only read.
unsafe impl Sync for Aligned {}

impl Aligned {
    fn layout(len: usize) -> Layout {
        Layout::from_size_align(len, BLOCK).expect("some blocks fit the address space")
    }

    /// So many blocks of zeros.
    pub(super) fn blocks(count: usize) -> Aligned {
        let len = count.max(1) * BLOCK;
        let layout = Aligned::layout(len);
        // SAFETY: the layout's size is at least one block, never 0.
        let at = unsafe { alloc_zeroed(layout) };
        let at = NonNull::new(at).unwrap_or_else(|| handle_alloc_error(layout));
        Aligned { at, len }
    }

    /// The first block.
    pub(super) fn block(&mut self) -> &mut [u8; BLOCK] {
        (&mut self[..BLOCK]).try_into().expect("there is at least one block")
    }
}

impl Deref for Aligned {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `at` owns `len` bytes, zeroed when allocated.
        unsafe { std::slice::from_raw_parts(self.at.as_ptr(), self.len) }
    }
}

impl DerefMut for Aligned {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; the exclusive reference makes it the only one.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), self.len) }
    }
}

impl Drop for Aligned {
    fn drop(&mut self) {
        // SAFETY: allocated in `blocks` with this very layout, and not freed before.
        unsafe { dealloc(self.at.as_ptr(), Aligned::layout(self.len)) }
    }
}
