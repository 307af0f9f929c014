//! The calling thread writes.

use super::{Write, Writer, requests};
use crate::fs::{Handle, Result};

/// Writes with `pwritev` in the calling thread: as many requests are under way as threads write. Goes through
/// [`Handle`] alone, so that it works on any file system.
#[derive(Debug, Default)]
pub struct BlockingWriter;

impl Writer for BlockingWriter {
    fn write(&self, file: &dyn Handle, writes: &[Write<'_>]) -> Result<()> {
        for mut request in requests(writes) {
            loop {
                let n = file.write_parts_at(&request.parts, request.offset)?;
                if request.advance(n)? {
                    break;
                }
            }
        }
        Ok(())
    }

    fn name(&self) -> &'static str {
        "blocking"
    }
}
