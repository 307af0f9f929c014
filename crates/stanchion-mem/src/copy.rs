//! Copying out of the application's memory.
//!
//! The source may be written by other threads of the application and the destination is seen by the
//! agent; so neither is ever a reference, only pointers.

/// One range to be copied: from the application's memory to memory that the agent can see.
#[derive(Debug, Clone, Copy)]
pub struct Piece {
    /// Where the application has it.
    pub src: *const u8,
    /// Where it goes: a shared mapping, writable, its pages there already.
    pub dst: *mut u8,
    /// Bytes of both.
    pub len: usize,
}

impl Piece {
    /// The part of this piece from `offset` on, `len` bytes long.
    pub(crate) fn part(&self, offset: usize, len: usize) -> Piece {
        debug_assert!(offset + len <= self.len);
        Piece { src: self.src.wrapping_add(offset), dst: self.dst.wrapping_add(offset), len }
    }
}

/// Copies `len` bytes out of the application's memory.
///
/// # Safety
/// `src` is readable and `dst` writable for `len` bytes, and they do not overlap. If another thread or
/// process writes to either meanwhile, the bytes are any mixture, which is for the caller to exclude or
/// to detect; nothing else goes wrong.
#[inline]
pub unsafe fn copy_out(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: both ranges are valid and disjoint by this function's contract; no reference is made.
    unsafe { std::ptr::copy_nonoverlapping(src, dst, len) }
}
