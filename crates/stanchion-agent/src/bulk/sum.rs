//! Adding the pieces of a stripe up, side by side: a window of each, then the next window of each, so that what is added to
//! stays in the processor's cache until its checksum is made.

use std::time::Instant;

use stanchion_core::api::ChunkSource;
use stanchion_core::fold::{Coming, Fold, FoldError};
use stanchion_format::checksum::{Crc, Crc64};
use stanchion_format::ids::Key;
use stanchion_format::peer::{Cause, Trouble};
use stanchion_io::cache::OpenPiece;

use super::client::{Asked, Incoming, blame, fits};
use super::work::{Failure, Scratch, Tools, micros};

/// Two of them, what is added to and what is added, fit into the processor's second cache.
pub(super) const WINDOW_BYTES: usize = 256 << 10;
/// So many sources come in side by side; of more, the next ones come when these are added up. Each is a connection.
const BESIDE_MAX: usize = 16;

/// The result is in [`Scratch::sum`].
pub(super) struct Sum {
    /// Of its first `len` bytes.
    pub crc: Crc,
    pub transfer_us: u64,
}

/// How far the asking has come: sources that are the agent's own need none.
enum Begun {
    Own(Box<Own>),
    Asked(Asked),
}

enum Way {
    Own(Box<Own>),
    Peer(Box<Incoming>),
}

/// A piece that this agent holds.
struct Own {
    piece: OpenPiece,
    /// Of parity: what was read.
    crc: Crc64,
    done: u32,
}

struct Flow {
    source: usize,
    coming: Coming,
    way: Way,
}

/// One adding-up.
struct Adding<'a> {
    tools: &'a Tools,
    key: Key,
    sources: &'a [ChunkSource],
    trusting: bool,
    cancelled: &'a (dyn Fn() -> bool + Sync),
    transfer_us: u64,
}

fn by(source: usize, trouble: Trouble) -> Failure {
    Failure { trouble, source: Some(source) }
}

impl Tools {
    /// Adds the sources up in `scratch.sum`; the checksum is of its first `len` bytes. `trusting`: the caller knows what it must
    /// be, so the sources are not verified one by one.
    pub(super) fn add_up(
        &self,
        key: Key,
        (sources, len): (&[ChunkSource], u32),
        trusting: bool,
        scratch: &mut Scratch,
        cancelled: &(dyn Fn() -> bool + Sync),
    ) -> Result<Sum, Failure> {
        let longest = sources.iter().map(|s| s.len).max().unwrap_or(0).max(len) as usize;
        let Scratch { sum, buf } = scratch;
        sum.resize(longest, 0);
        let mut fold = Fold::new(sources, sum, len as usize);
        if trusting {
            fold = fold.trusting();
        }
        let mut adding = Adding { tools: self, key, sources, trusting, cancelled, transfer_us: 0 };
        for first in (0..sources.len()).step_by(BESIDE_MAX) {
            let last = sources.len().min(first + BESIDE_MAX);
            let mut flows = adding.begin(first..last, &mut fold)?;
            for at in (0..longest).step_by(WINDOW_BYTES) {
                for flow in &mut flows {
                    adding.window(flow, &mut fold, buf)?;
                }
                if last == sources.len() {
                    fold.settle(at + WINDOW_BYTES);
                }
            }
            for flow in flows {
                adding.end(flow, &mut fold, buf)?;
            }
        }
        Ok(Sum { crc: fold.finish(), transfer_us: adding.transfer_us })
    }
}

impl Adding<'_> {
    /// Asks all of them before it waits for any.
    fn begin(
        &mut self,
        which: std::ops::Range<usize>,
        fold: &mut Fold<'_>,
    ) -> Result<Vec<Flow>, Failure> {
        let began = Instant::now();
        let mut begun = Vec::with_capacity(which.len());
        for i in which.clone() {
            begun.push(self.ask(&self.sources[i]).map_err(|t| by(i, t))?);
        }
        let mut flows = Vec::with_capacity(which.len());
        for (i, begun) in which.zip(begun) {
            let way = match begun {
                Begun::Own(own) => Way::Own(own),
                Begun::Asked(asked) => {
                    let clients = &self.tools.clients;
                    let begun = clients.begin(self.key, &self.sources[i], asked, self.cancelled);
                    Way::Peer(Box::new(begun.map_err(|t| by(i, t))?))
                }
            };
            flows.push(Flow { source: i, coming: fold.begin(i), way });
        }
        self.transfer_us += micros(began);
        Ok(flows)
    }

    fn ask(&self, source: &ChunkSource) -> Result<Begun, Trouble> {
        if source.agent != self.tools.me {
            return self.tools.clients.ask(self.key, source).map(Begun::Asked);
        }
        let what = (self.key, source.slot, source.piece);
        let open = self.tools.published.open(&self.tools.cache, what);
        let piece = open.map_err(|t| t.agent(source.agent))?;
        fits(source, piece.len).map_err(|cause| blame(source, cause))?;
        Ok(Begun::Own(Box::new(Own { piece, crc: Crc64::new(), done: 0 })))
    }

    /// The next window of one source.
    fn window(
        &mut self,
        flow: &mut Flow,
        fold: &mut Fold<'_>,
        buf: &mut Vec<u8>,
    ) -> Result<(), Failure> {
        if (self.cancelled)() {
            return Err(Trouble::new(Cause::Timeout).into());
        }
        let Flow { source: i, coming, way } = flow;
        let source = &self.sources[*i];
        let unseen = (self.trusting, self.cancelled);
        let taken = fold.take_from(coming, WINDOW_BYTES, buf, |to| match way {
            Way::Own(own) => own.take(source, to, self.trusting),
            Way::Peer(incoming) => {
                let began = Instant::now();
                let taken = self.tools.clients.take(source, incoming, to, unseen);
                self.transfer_us += micros(began);
                taken
            }
        });
        taken.map_err(|t| by(*i, t))
    }

    fn end(&mut self, flow: Flow, fold: &mut Fold<'_>, buf: &mut Vec<u8>) -> Result<(), Failure> {
        let Flow { source: i, coming, way } = flow;
        let source = &self.sources[i];
        let ended = match way {
            Way::Own(own) => own.end(source, buf, self.trusting),
            Way::Peer(incoming) => {
                let unseen = (self.trusting, self.cancelled);
                self.tools.clients.end(source, *incoming, buf, unseen)
            }
        };
        ended.map_err(|t| by(i, t))?;
        let right = fold.end(coming);
        right.map_err(|FoldError::Damaged { source: i }| {
            by(i, blame(&self.sources[i], Cause::Damaged))
        })
    }
}

impl Own {
    fn take(&mut self, source: &ChunkSource, to: &mut [u8], trusting: bool) -> Result<(), Trouble> {
        let at = self.piece.offset + u64::from(self.done);
        let read = stanchion_io::fs::read_full(&*self.piece.file, to, at);
        let have = read.map_err(|e| blame(source, stanchion_io::trouble::cause(e)))?;
        if have < to.len() {
            return Err(blame(source, Cause::Missing));
        }
        if !trusting && source.crc.is_none() {
            self.crc.update(to);
        }
        self.done += to.len() as u32;
        Ok(())
    }

    fn end(
        mut self,
        source: &ChunkSource,
        buf: &mut Vec<u8>,
        trusting: bool,
    ) -> Result<(), Trouble> {
        if trusting || source.crc.is_some() {
            return Ok(());
        }
        while self.done < self.piece.len {
            buf.resize(WINDOW_BYTES.min((self.piece.len - self.done) as usize), 0);
            self.take(source, buf, trusting)?;
        }
        if self.crc.crc() == self.piece.crc { Ok(()) } else { Err(blame(source, Cause::Damaged)) }
    }
}
