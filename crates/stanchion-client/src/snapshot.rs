//! Copy-on-write: a child copies the regions behind the caller, who may change them at once.
//!
//! The child is forked when all memory is lent, and holds nothing of this process's but its own connection to the agent
//! and the extents that it writes to: they are inherited for the moment of the fork only. What a child would not see as
//! it is (maps.rs of stanchion-mem) is copied at once, and so is all where there can be no child.

use crate::client::{Begun, Client};
use crate::error::Error;
use crate::pool::{PoolWriter, Put};
use crate::regions::{Region, placed};
use stanchion_format::client::{KIND_REQUEST, Request};
use stanchion_format::frame;
use stanchion_format::limits::CLIENT_FRAME_BYTES_MAX;
use stanchion_format::regions;
use stanchion_mem::copy::Piece;
use stanchion_mem::forked::{Forked, Manner, forked_copy_unchecked};
use stanchion_mem::maps::{Judged, Span};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

const CALL: &str = "checkpoint";

/// The children that may still copy.
#[derive(Debug, Default)]
pub(crate) struct Children {
    all: Vec<Forked>,
    /// What of the regions a child sees as it is.
    judged: Judged,
    /// It was said why there are none.
    told: bool,
}

impl Children {
    /// Those that have ended leave nothing behind.
    pub(crate) fn reap(&mut self) {
        self.all.retain_mut(|child| {
            use stanchion_mem::forked::ForkError::Timeout;
            // What that means for the dataset its agent knows.
            let ended = child.wait(Duration::ZERO);
            if ended.is_err_and(|e| e != Timeout) {
                self.judged.forget();
            }
            ended == Err(Timeout)
        });
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        // What was begun is completed: nobody needs this process for it.
        self.all.drain(..).for_each(Forked::leave);
    }
}

impl Client {
    /// As [`Client::checkpoint`], but returns when all ranks' regions are safe from being changed: children copy them
    /// behind the callers, and only then the dataset is complete ([`Client::wait`] for `Cached` tells) or, if a child
    /// died, dropped. Collective.
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
        // A failure here must not keep the others waiting.
        match self.snapshot_regions(&begun.name, regions) {
            Ok(child) => {
                let copies = child.is_some();
                // Not asked for any more if this fails: it ends here.
                self.snapshot(true, copies)?;
                // All ranks are on their way again: no child was in the way of one of them.
                child.iter().for_each(Forked::go);
                self.children.all.extend(child);
                Ok(begun)
            }
            Err(error) => {
                let _dropped_as_asked = self.snapshot(false, false);
                Err(error)
            }
        }
    }

    fn snapshot_regions(
        &mut self,
        dataset: &str,
        regions: &[Region<'_>],
    ) -> Result<Option<Forked>, Error> {
        let name = self.regions_file(dataset);
        let (placed, end) = placed(&name, regions)?;
        let mut writer = PoolWriter::new(end);
        let mut pieces = Vec::new();
        let mut put = writer.put(self, &regions::encode(&placed))?;
        for (region, at) in regions.iter().zip(&placed) {
            if put == Put::Done {
                put = writer.pad(self, at.offset)?;
            }
            if put == Put::Done {
                put = writer.put_later(self, region.bytes, &mut pieces)?;
            }
        }
        if put == Put::TooLarge {
            return self.file_regions(&name, regions, &placed, end).map(|()| None);
        }
        assert_eq!(writer.written(), end, "regions are where the layout says");
        let start = Instant::now();
        let spans: Vec<Span> = regions
            .iter()
            .filter(|r| !r.bytes.is_empty())
            .map(|r| Span { start: r.bytes.as_ptr().addr(), len: r.bytes.len() })
            .collect();
        let (at_once, behind) = match self.children.judged.unsuitable(&spans) {
            Ok(bad) => pieces.into_iter().partition(|piece: &Piece| {
                bad.iter().any(|(n, _)| within(&spans[*n], piece.src.addr()))
            }),
            Err(_) => (pieces, Vec::new()),
        };
        // SAFETY: pieces are parts of the caller's slices and of extents that are lent to this rank, which nobody
        // else writes to; they do not overlap.
        let copy = |piece: &Piece| unsafe { copy_piece(piece) };
        at_once.iter().for_each(copy);
        let child = match behind.is_empty() {
            true => None,
            false => match self.fork_child(&behind, &writer) {
                Ok(child) => Some(child),
                Err(why) => {
                    behind.iter().for_each(copy);
                    self.tell_why_not(&why)?;
                    None
                }
            },
        };
        writer.copied(start.elapsed());
        let (file, bytes, times) = writer.finish(self.regions_path(dataset), None);
        self.add_memory(file, bytes, times);
        Ok(child)
    }

    /// A child that copies all pieces and says so on a connection of its own.
    fn fork_child(&mut self, pieces: &[Piece], writer: &PoolWriter) -> Result<Forked, Error> {
        let link = self.attach(CALL)?;
        let copied = frame::encode(KIND_REQUEST, &Request::Copied, CLIENT_FRAME_BYTES_MAX)
            .map_err(|cause| Error::Frame { verb: CALL, cause })?;
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

    /// Once: where there are no children a checkpoint takes as long as a copy.
    fn tell_why_not(&mut self, why: &Error) -> Result<(), Error> {
        if std::mem::replace(&mut self.children.told, true) {
            return Ok(());
        }
        let rank = self.identity().rank;
        self.warn(&format!("rank {rank} copies its regions at once, without copy-on-write: {why}"))
    }
}

fn within(span: &Span, at: usize) -> bool {
    span.start <= at && at < span.end()
}

/// # Safety
/// As for [`stanchion_mem::copy::copy_out`].
unsafe fn copy_piece(piece: &Piece) {
    // SAFETY: as the caller promises.
    unsafe { stanchion_mem::copy::copy_out(piece.src, piece.dst, piece.len) }
}
