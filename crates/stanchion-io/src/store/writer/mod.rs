//! Writers: how bytes get into a file, several requests at once where the system can.

use std::fmt;
use std::io::IoSlice;

use rustix::io::Errno;
use stanchion_format::segment::BLOCK;

use super::source::Source;
use crate::fs::{Handle, Result};

mod blocking;
mod uring;

pub use blocking::BlockingWriter;
pub use uring::UringWriter;

/// Most bytes of one request to the system: larger ones gain nothing and keep others waiting.
const REQUEST_BYTES_MAX: usize = 8 << 20;
/// Most parts of one request (`IOV_MAX`).
const REQUEST_PARTS_MAX: usize = 1024;

/// Bytes and where in the file they go.
#[derive(Clone, Copy, Debug)]
pub struct Write<'a> {
    /// What.
    pub from: Source<'a>,
    /// Where; a multiple of [`BLOCK`].
    pub offset: u64,
}

/// Writes to files.
pub trait Writer: Send + Sync + fmt::Debug {
    /// Writes all of `writes`, in any order, and returns when nothing is under way any more. After an error any
    /// part of them may have been written.
    fn write(&self, file: &dyn Handle, writes: &[Write<'_>]) -> Result<()>;

    /// What users read.
    fn name(&self) -> &'static str;
}

/// Writes that follow one another in the file, as one call to the system.
#[derive(Debug)]
struct Request<'a> {
    parts: Vec<IoSlice<'a>>,
    offset: u64,
    len: usize,
    /// The last time nothing was gained.
    stalled: bool,
}

/// `writes`, adjacent ones put together.
fn requests<'a>(writes: &[Write<'a>]) -> Vec<Request<'a>> {
    let mut out: Vec<Request<'a>> = Vec::new();
    for write in writes {
        debug_assert!(write.offset.is_multiple_of(BLOCK as u64), "at {}", write.offset);
        let mut done = 0;
        while done < write.from.len() {
            let n = (write.from.len() - done).min(REQUEST_BYTES_MAX);
            let part = IoSlice::new(write.from.part(done, done + n).bytes());
            let offset = write.offset + done as u64;
            done += n;
            match out.last_mut() {
                Some(last)
                    if last.offset + last.len as u64 == offset
                        && last.len + n <= REQUEST_BYTES_MAX
                        && last.parts.len() < REQUEST_PARTS_MAX =>
                {
                    last.parts.push(part);
                    last.len += n;
                }
                _ => out.push(Request { parts: vec![part], offset, len: n, stalled: false }),
            }
        }
    }
    out
}

impl Request<'_> {
    /// After `n` bytes were written: is that all? What is left begins at a block again, as direct I/O needs
    /// it, so that part of a block is written twice.
    fn advance(&mut self, n: usize) -> Result<bool> {
        assert!(n <= self.len, "{n} bytes written of {}", self.len);
        if n == self.len {
            return Ok(true);
        }
        let whole = n - n % BLOCK;
        // Two calls without a block: taking that for progress might spin.
        if whole == 0 && self.stalled {
            return Err(Errno::IO);
        }
        self.stalled = whole == 0;
        let mut parts = self.parts.as_mut_slice();
        IoSlice::advance_slices(&mut parts, whole);
        let left = parts.len();
        self.parts.drain(..self.parts.len() - left);
        self.offset += whole as u64;
        self.len -= whole;
        Ok(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adjacent_writes_are_one_request_up_to_the_limit() {
        let bytes = vec![1; REQUEST_BYTES_MAX + 3 * BLOCK];
        let at = |from: usize, to: usize, offset: usize| Write {
            from: Source::from(&bytes[from..to]),
            offset: offset as u64,
        };
        let some = requests(&[at(0, BLOCK, 0), at(0, 2 * BLOCK, BLOCK), at(0, BLOCK, 4 * BLOCK)]);
        let seen: Vec<_> = some.iter().map(|r| (r.offset, r.len, r.parts.len())).collect();
        assert_eq!(seen, [(0, 3 * BLOCK, 2), (4 * BLOCK as u64, BLOCK, 1)]);
        let large = requests(&[at(0, bytes.len(), 0)]);
        let seen: Vec<_> = large.iter().map(|r| (r.offset, r.len)).collect();
        assert_eq!(seen, [(0, REQUEST_BYTES_MAX), (REQUEST_BYTES_MAX as u64, 3 * BLOCK)]);
    }

    #[test]
    fn a_short_write_goes_on_at_a_block() {
        let bytes = vec![1; 3 * BLOCK];
        let write = |from, to, offset| Write { from: Source::from(&bytes[from..to]), offset };
        let mut some = requests(&[write(0, BLOCK, 0), write(BLOCK, 3 * BLOCK, BLOCK as u64)]);
        let request = &mut some[0];
        assert_eq!(request.advance(2 * BLOCK + 7), Ok(false));
        assert_eq!((request.offset, request.len), (2 * BLOCK as u64, BLOCK));
        assert_eq!(request.parts.iter().map(|p| p.len()).sum::<usize>(), BLOCK);
        assert_eq!(request.advance(1), Ok(false));
        assert_eq!(request.advance(0), Err(Errno::IO));
        assert_eq!(request.advance(BLOCK), Ok(true));
    }
}
