//! Memory lent for the dataset that is being written, given out in pieces of any size: what one stream leaves of an
//! extent serves the next one.

use crate::error::Error;
use crate::pool::PoolTimes;
use stanchion_format::client::{Filled, Lent, Part, PartFrom};
use stanchion_format::ids::ExtentId;
use stanchion_format::limits::EXTENT_CHUNKS;
use stanchion_mem::Mapping;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

/// Where pieces begin: a line of the processor's cache.
const LINE: u64 = 64;
/// The system's unit of memory.
pub(crate) const PAGE: u64 = 4096;

/// Who lends.
pub(crate) trait Lender {
    /// Memory of about `bytes` bytes, mapped. Empty: there is none for so much.
    fn lend(&mut self, bytes: u64) -> Result<Vec<Lent>, Error>;
    /// What was lent.
    fn mapping(&self, id: ExtentId) -> &Mapping;
    /// Is what is full to be handed over?
    fn stores(&self) -> bool {
        false
    }
    /// It is full, and not written to any more: the next time that memory is lent it may be this.
    fn hand(&mut self, filled: Filled) {
        let _ = filled;
    }
}

/// What was lent, under a name of this dataset's own: the extent may be lent again when it was handed over.
#[derive(Clone, Copy, Debug)]
struct Loan {
    id: ExtentId,
    bytes: u64,
    /// Of these it has been said what they are: when that is all, it is full.
    good: u64,
    handed: bool,
}

/// A piece of an extent. `id` is the name that [`Alloc`] gave it; see [`Alloc::extent`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub id: ExtentId,
    pub offset: u64,
    pub bytes: u64,
}

/// What is lent and in no stream.
#[derive(Debug, Default)]
pub(crate) struct Alloc {
    chunk: u64,
    lent: BTreeMap<ExtentId, Loan>,
    /// Extents that are lent and not handed over.
    here: BTreeSet<ExtentId>,
    /// Those that are full and not handed over.
    full: Vec<ExtentId>,
    /// Nothing more is handed over: streams are scattered over too many pieces.
    keeps: bool,
    total: u64,
    /// By place; neighbours are one.
    free: BTreeMap<(ExtentId, u64), u64>,
    /// The same by size.
    sizes: BTreeSet<(u64, ExtentId, u64)>,
}

impl Alloc {
    /// Nothing yet, of a pool with chunks of this size.
    pub(crate) fn new(chunk: u64) -> Alloc {
        Alloc { chunk: chunk.max(PAGE), ..Alloc::default() }
    }

    /// The pool's unit.
    pub(crate) fn chunk(&self) -> u64 {
        self.chunk
    }

    /// The extent of a piece, for [`Lender::mapping`].
    pub(crate) fn extent(&self, name: ExtentId) -> ExtentId {
        self.lent.get(&name).map_or(name, |loan| loan.id)
    }

    /// Was it handed over? Then nobody writes there.
    pub(crate) fn is_handed(&self, name: ExtentId) -> bool {
        self.lent.get(&name).is_some_and(|loan| loan.handed)
    }

    /// Gives parts of files, which have the names of pieces, those that the agent knows: when nothing more is written,
    /// since what is full may still be handed over until then.
    pub(crate) fn declare(&self, parts: &mut [Part]) {
        for part in parts {
            if let PartFrom::Extent { id: name, offset } = part.from {
                part.from = match self.is_handed(name) {
                    true => PartFrom::Filled { number: name.0, offset },
                    false => PartFrom::Extent { id: self.extent(name), offset },
                };
            }
        }
    }

    /// So many more bytes of an extent are as they will be.
    pub(crate) fn good(&mut self, name: ExtentId, bytes: u64) {
        let Some(loan) = self.lent.get_mut(&name).filter(|_| bytes > 0) else { return };
        loan.good += bytes;
        debug_assert!(loan.good <= loan.bytes, "{loan:?}");
        if loan.good == loan.bytes {
            self.full.push(name);
        }
    }

    /// They are to be used otherwise.
    pub(crate) fn not_good(&mut self, name: ExtentId, bytes: u64) {
        let Some(loan) = self.lent.get_mut(&name).filter(|_| bytes > 0) else { return };
        loan.good -= bytes.min(loan.good);
        self.full.retain(|full| *full != name);
    }

    /// From now on nothing is handed over.
    pub(crate) fn keep_all(&mut self) {
        self.keeps = true;
    }

    /// A piece of at most `want` bytes, which is not 0; if it can be, what follows `after`; of fewer than `least` only
    /// if more cannot be had. `None`: the pool is too small.
    pub(crate) fn take(
        &mut self,
        lender: &mut impl Lender,
        (want, least): (u64, u64),
        after: Option<Span>,
        times: &mut PoolTimes,
    ) -> Result<Option<Span>, Error> {
        let want = want.next_multiple_of(LINE);
        if let Some(span) = after.and_then(|a| self.following(a)).or_else(|| self.best(want, least))
        {
            return Ok(Some(self.cut(span, want)));
        }
        let start = Instant::now();
        let done = self.borrow(lender, want);
        times.wait += start.elapsed();
        // However small: it is what there is.
        Ok(if done? { self.best(want, 1).map(|span| self.cut(span, want)) } else { None })
    }

    /// Takes a piece back.
    pub(crate) fn give(&mut self, mut span: Span) {
        if span.bytes == 0 {
            return;
        }
        let before = self.free.range(..(span.id, span.offset)).next_back();
        if let Some((&(id, offset), &bytes)) = before
            && id == span.id
            && offset + bytes == span.offset
        {
            self.forget(Span { id, offset, bytes });
            span = Span { id, offset, bytes: bytes + span.bytes };
        }
        if let Some(next) = self.following(span) {
            self.forget(next);
            span.bytes += next.bytes;
        }
        self.free.insert((span.id, span.offset), span.bytes);
        self.sizes.insert((span.bytes, span.id, span.offset));
    }

    /// Gives the end of a piece back, as far as that can be a piece again; what the rest is.
    pub(crate) fn trim(&mut self, span: Span, bytes: u64) -> Span {
        let keep = bytes.next_multiple_of(LINE).min(span.bytes);
        let (offset, left) = (span.offset + keep, span.bytes - keep);
        self.give(Span { id: span.id, offset, bytes: left });
        Span { bytes: keep, ..span }
    }

    /// Asks for more, the more the more there is already. False: the pool is too small.
    fn borrow(&mut self, lender: &mut impl Lender, want: u64) -> Result<bool, Error> {
        let need = want.checked_next_multiple_of(self.chunk).unwrap_or(want);
        let most = self.chunk.saturating_mul(EXTENT_CHUNKS);
        let step = (self.total / 2 / self.chunk * self.chunk).min(most).max(need);
        if lender.stores() && !self.keeps {
            for name in std::mem::take(&mut self.full) {
                let loan = self.lent.get_mut(&name).expect("what is full was lent");
                loan.handed = true;
                self.here.remove(&loan.id);
                lender.hand(Filled { id: loan.id, number: name.0 });
            }
        }
        let mut lent = lender.lend(step)?;
        if lent.is_empty() && step > need {
            lent = lender.lend(need)?;
        }
        for Lent { id, bytes, .. } in &lent {
            // Twice the same memory would be two streams in one place.
            if *bytes == 0 || !self.here.insert(*id) {
                return Err(Error::Answer { verb: "write" });
            }
            let name = ExtentId(self.lent.len() as u64 + 1);
            self.lent.insert(name, Loan { id: *id, bytes: *bytes, good: 0, handed: false });
            self.total = self.total.saturating_add(*bytes);
            self.give(Span { id: name, offset: 0, bytes: *bytes });
        }
        Ok(!lent.is_empty())
    }

    /// The free piece that begins where `span` ends.
    fn following(&self, span: Span) -> Option<Span> {
        let at = (span.id, span.offset + span.bytes);
        self.free.get(&at).map(|bytes| Span { id: at.0, offset: at.1, bytes: *bytes })
    }

    /// The smallest that is large enough, or the largest, which is not smaller than `least` or what is wanted.
    fn best(&self, want: u64, least: u64) -> Option<Span> {
        let fits = self.sizes.range((want, ExtentId(0), 0)..).next();
        let found = fits.or_else(|| self.sizes.last().filter(|(bytes, ..)| *bytes >= least));
        found.map(|&(bytes, id, offset)| Span { id, offset, bytes })
    }

    fn cut(&mut self, span: Span, want: u64) -> Span {
        self.forget(span);
        let bytes = want.min(span.bytes);
        let rest = Span { id: span.id, offset: span.offset + bytes, bytes: span.bytes - bytes };
        self.give(rest);
        Span { bytes, ..span }
    }

    fn forget(&mut self, span: Span) {
        self.free.remove(&(span.id, span.offset));
        self.sizes.remove(&(span.bytes, span.id, span.offset));
    }
}

#[cfg(test)]
pub(crate) mod tests;
