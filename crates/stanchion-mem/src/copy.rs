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

/// Stores of this size go past the caches, to places that are multiples of it.
#[cfg(target_arch = "x86_64")]
const LINE: usize = 64;
/// So many lines are asked for ahead: the processor sees by itself what follows, but not beyond the end of a page. Half
/// a page: with 8 lines an increment took 6 to 28 % longer in each of four pairs, with all 64 as long as with 8.
#[cfg(target_arch = "x86_64")]
const SOON_LINES: usize = 32;

/// As [`copy_out`], past the caches where the processor can: for thousands of pages from here and there that nobody
/// here reads soon. A large copy the C library makes so by itself; of a small one it first reads the lines that it is
/// about to overwrite, which takes half as long again. Before others are told of the copies: [`copies_done`].
///
/// # Safety
/// As for [`copy_out`].
pub unsafe fn copy_past_caches(src: *const u8, dst: *mut u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx") && dst.addr().is_multiple_of(LINE) {
        let lines = len / LINE * LINE;
        // SAFETY: the processor has AVX; both ranges are ours by this function's contract, and `dst` is aligned.
        unsafe {
            copy_lines(src, dst, lines);
            copy_out(src.add(lines), dst.add(lines), len - lines);
        }
        return;
    }
    // SAFETY: by this function's contract.
    unsafe { copy_out(src, dst, len) }
}

/// # Safety
/// As for [`copy_out`], on a processor with AVX; `dst` and `len` are multiples of `LINE`.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx")]
unsafe fn copy_lines(src: *const u8, dst: *mut u8, len: usize) {
    use std::arch::x86_64::{_mm256_loadu_si256, _mm256_stream_si256};
    let mut at = 0;
    while at < len {
        // SAFETY: `at + LINE <= len`; loads need no alignment, and the stores have it.
        unsafe {
            let (from, to) = (src.add(at), dst.add(at));
            let low = _mm256_loadu_si256(from.cast());
            let high = _mm256_loadu_si256(from.add(LINE / 2).cast());
            _mm256_stream_si256(to.cast(), low);
            _mm256_stream_si256(to.add(LINE / 2).cast(), high);
        }
        at += LINE;
    }
}

/// What is said from now on of bytes that were copied past the caches does not come before them. Once for many copies:
/// after each page it costs a tenth of the copy.
pub fn copies_done() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: each processor of this kind has SSE, and a fence touches nothing.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// These bytes are copied next: their beginning is on its way while the one before is copied, which of single pages
/// saves a fifth of the time.
pub fn copied_soon(bytes: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    for line in bytes.chunks(LINE).take(SOON_LINES) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a hint, of an address that may be read.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = bytes;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn past_the_caches_it_is_the_same_copy() {
        let from: Vec<u8> = (0..10_000u32).map(|n| (n * 7 + n / 251) as u8).collect();
        for (src, dst, len) in [(0, 0, 4096), (3, 0, 9000), (0, 5, 4096), (1, 64, 63), (9, 9, 0)] {
            let mut memory = vec![0xaau8; 16_384];
            let start = memory.as_ptr().align_offset(4096);
            let to = &mut memory[start..start + 10_240];
            // SAFETY: both ranges are within what we own, and apart.
            unsafe { copy_past_caches(from[src..].as_ptr(), to[dst..].as_mut_ptr(), len) };
            copied_soon(&from[src..src + len]);
            copies_done();
            assert_eq!(to[dst..dst + len], from[src..src + len]);
            assert!(to[..dst].iter().chain(&to[dst + len..]).all(|b| *b == 0xaa), "nothing else");
        }
    }
}
