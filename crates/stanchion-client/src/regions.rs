//! Regions of the caller's memory: a file of the dataset that nobody but this library writes and reads.

use crate::client::{Begun, Client, Offer};
use crate::error::{Error, Words};
use crate::pool::{PoolTimes, PoolWriter, Put};
use crate::source::Source;
use stanchion_format::regions::{self, HEADER_BYTES, RegionAt, RegionsError};
use std::fs::OpenOptions;
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::time::Instant;

/// Memory to be stored.
#[derive(Clone, Copy, Debug)]
pub struct Region<'a> {
    /// The caller's number for it, unique in the rank.
    pub id: u64,
    /// Its contents.
    pub bytes: &'a [u8],
}

/// Memory to be filled.
#[derive(Debug)]
pub struct RegionMut<'a> {
    /// The caller's number for it, unique in the rank.
    pub id: u64,
    /// Where its contents go.
    pub bytes: &'a mut [u8],
}

impl Client {
    /// A dataset of this rank's `regions`, whose ids ascend, beside those of all other ranks. Collective.
    /// Disabled: nothing is stored.
    pub fn checkpoint(
        &mut self,
        dataset: &str,
        flags: u32,
        regions: &[Region<'_>],
    ) -> Result<Begun, Error> {
        let begun = self.begin(dataset, flags)?;
        // A failure here must not keep the others waiting: they hear of it in complete.
        let stored = if self.enabled() { self.store_regions(&begun.name, regions) } else { Ok(()) };
        self.complete_regions(stored).map(|()| begun)
    }

    /// Ends a dataset of regions.
    pub(crate) fn complete_regions(&mut self, stored: Result<(), Error>) -> Result<(), Error> {
        match stored {
            Ok(()) => self.complete(true),
            Err(error) => {
                let _dropped_as_asked = self.complete(false);
                Err(error)
            }
        }
    }

    fn store_regions(&mut self, dataset: &str, regions: &[Region<'_>]) -> Result<(), Error> {
        let name = self.regions_file(dataset);
        let (placed, end) = placed(&name, regions)?;
        match self.pool_regions(dataset, regions, &placed, end)? {
            Put::Done => Ok(()),
            Put::TooLarge => self.file_regions(&name, regions, &placed, end),
        }
    }

    pub(crate) fn pool_regions(
        &mut self,
        dataset: &str,
        regions: &[Region<'_>],
        placed: &[RegionAt],
        end: u64,
    ) -> Result<Put, Error> {
        let mut writer = PoolWriter::new(end).handing(self);
        if writer.put(self, &regions::encode(placed))? == Put::TooLarge {
            return Ok(Put::TooLarge);
        }
        for (region, at) in regions.iter().zip(placed) {
            if writer.pad(self, at.offset)? == Put::TooLarge
                || writer.put(self, region.bytes)? == Put::TooLarge
            {
                return Ok(Put::TooLarge);
            }
        }
        assert_eq!(writer.written(), end, "regions are where the layout says");
        let (file, bytes, times) = writer.finish(self.regions_path(dataset), None);
        self.add_memory(file, bytes, times);
        Ok(Put::Done)
    }

    /// Where the pool is too small: a file in the cache directory.
    pub(crate) fn file_regions(
        &mut self,
        name: &str,
        regions: &[Region<'_>],
        placed: &[RegionAt],
        end: u64,
    ) -> Result<(), Error> {
        let place = self.route(name)?;
        let failed = |cause| Error::Io {
            what: "cannot store the regions in",
            path: Words::name(&place),
            cause,
        };
        let start = Instant::now();
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600);
        let file = options.open(&place).map_err(failed)?;
        file.set_len(end).map_err(failed)?;
        file.write_all_at(&regions::encode(placed), 0).map_err(failed)?;
        for (region, at) in regions.iter().zip(placed) {
            file.write_all_at(region.bytes, at.offset).map_err(failed)?;
        }
        self.spend(PoolTimes { copy: start.elapsed(), ..PoolTimes::default() });
        Ok(())
    }

    /// The file's path in the dataset.
    pub(crate) fn regions_path(&self, dataset: &str) -> String {
        format!("{dataset}/rank.{:06}.stn", self.identity().rank)
    }

    /// Below the prefix, as an application would name its own file.
    pub(crate) fn regions_file(&self, dataset: &str) -> String {
        format!("{}/{}", self.prefix(), self.regions_path(dataset))
    }

    /// This rank's regions in the dataset that is being read, by ascending id. Local.
    pub fn regions_stored(&mut self) -> Result<Vec<RegionAt>, Error> {
        Ok(self.open_regions("region_bytes")?.1)
    }

    fn open_regions(&mut self, call: &'static str) -> Result<(Source, Vec<RegionAt>), Error> {
        let dataset = self.reading(call)?.name;
        let name = self.regions_file(&dataset);
        let mut source = Source::open(self, call, &name)?;
        let short = |e: Error| match e {
            Error::Io { cause, .. } if cause.kind() == ErrorKind::UnexpectedEof => {
                refused(&name, RegionsError::Damaged)
            }
            e => e,
        };
        let mut head = [0; HEADER_BYTES];
        source.read(self, call, &mut head, 0).map_err(short)?;
        let bytes = regions::table_bytes(&head).map_err(|cause| refused(&name, cause))?;
        let mut table = vec![0; bytes];
        source.read(self, call, &mut table, 0).map_err(short)?;
        let found = regions::parse(&table, source.bytes).map_err(|cause| refused(&name, cause))?;
        Ok((source, found))
    }

    /// Fills `regions`, whose ids ascend, from the dataset to restart from, and ends the restart; begins it, if
    /// that was not done. All regions of the dataset must be there, with their sizes. Collective.
    pub fn restore(&mut self, regions: &mut [RegionMut<'_>]) -> Result<Offer, Error> {
        const CALL: &str = "restore";
        let offer = match self.reading(CALL) {
            Ok(offer) => offer,
            Err(_) => {
                if self.have_restart()?.is_none() {
                    return Err(Error::NoRestart);
                }
                self.start_restart()?
            }
        };
        self.settle();
        let filled = self.fill(&offer.name, regions);
        // Its own reason says more to this rank than that somebody rejected.
        let ended = self.complete_restart(filled.is_ok());
        filled.and(ended).map(|()| offer)
    }

    fn fill(&mut self, dataset: &str, regions: &mut [RegionMut<'_>]) -> Result<(), Error> {
        let (mut source, found) = self.open_regions("restore")?;
        let differs = |id, protected, stored| Error::Region {
            dataset: Words::name(dataset),
            id,
            protected,
            stored,
        };
        // Before anything is overwritten.
        for r in regions.iter() {
            let (have, stored) = (r.bytes.len() as u64, found.iter().find(|f| f.id == r.id));
            if stored.is_none_or(|f| f.bytes != have) {
                return Err(differs(r.id, Some(have), stored.map(|f| f.bytes)));
            }
        }
        if let Some(f) = found.iter().find(|f| !regions.iter().any(|r| r.id == f.id)) {
            return Err(differs(f.id, None, Some(f.bytes)));
        }
        for region in regions {
            let Some(at) = found.iter().find(|f| f.id == region.id) else { continue };
            source.read(self, "restore", region.bytes, at.offset)?;
        }
        Ok(())
    }
}

/// Where each region is in the file `name`, and the file's length.
pub(crate) fn placed(name: &str, regions: &[Region<'_>]) -> Result<(Vec<RegionAt>, u64), Error> {
    let sizes: Vec<(u64, u64)> = regions.iter().map(|r| (r.id, r.bytes.len() as u64)).collect();
    regions::layout(&sizes).map_err(|cause| refused(name, cause))
}

fn refused(place: &str, cause: RegionsError) -> Error {
    Error::Regions { path: Words::name(place), cause }
}
