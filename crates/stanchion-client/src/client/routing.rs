//! Routed files: where the application opens what it calls by a name of the prefix.

use super::{Client, PATHS_BYTES_MAX, Phase};
use crate::error::{Error, Words};
use crate::route::{self, Lookup, Prefix};
use stanchion_format::client::RestartInfo;
use stanchion_format::manifest::FileDecl;
use stanchion_format::{limits, name};
use std::time::Instant;

impl Client {
    /// Where to open the file that the application calls `file`. While a dataset is written it becomes
    /// part of that, and its directories exist afterwards; while one is read it must be part of that.
    /// Otherwise the name itself. Local.
    pub fn route(&mut self, file: &str) -> Result<String, Error> {
        self.route_within(file, usize::MAX)
    }

    /// As [`Client::route`]; a place of more than `room` bytes is an error, and nothing was done.
    pub fn route_within(&mut self, file: &str, room: usize) -> Result<String, Error> {
        const CALL: &str = "route";
        self.not_finished(CALL)?;
        let fitting = |place: String| match place.len() {
            len if len <= room => Ok(place),
            len => Err(Error::Buffer { call: CALL, have: room, need: len }),
        };
        let start = Instant::now();
        let refuse = |cause| Error::Name { what: "file", name: Words::name(file), cause };
        match &mut self.phase {
            Phase::Idle | Phase::Finished => match file.len() {
                0 => Err(refuse(name::NameError::Empty)),
                bytes if bytes > limits::PATH_BYTES_MAX => {
                    Err(refuse(name::NameError::TooLong { bytes, max: limits::PATH_BYTES_MAX }))
                }
                _ => fitting(file.to_owned()),
            },
            Phase::Writing { .. } if self.link.is_none() => fitting(self.pass_through(file)?),
            Phase::Writing { dir, files, bytes, blocked, .. } => {
                let path = self.prefix.route(file).map_err(refuse)?;
                let place = fitting(format!("{dir}/{path}"))?;
                self.streams.free(&path)?;
                if !files.contains(&path) {
                    if files.len() + self.streams.in_memory() >= limits::RANK_FILES_MAX
                        || *bytes + path.len() > PATHS_BYTES_MAX
                    {
                        return Err(Error::TooManyFiles);
                    }
                    route::make_parents(dir, &path, 0o700)?;
                    *bytes += path.len() + 16;
                }
                files.insert(path);
                *blocked += start.elapsed();
                Ok(place)
            }
            Phase::Reading(info) => {
                let decl = lookup(info, &self.prefix, file, self.me.rank)?;
                let place = fitting(format!("{}/{}", info.dir, decl.path))?;
                std::fs::File::open(&place).map_err(|cause| Error::Io {
                    what: "cannot read file of the restart",
                    path: Words::name(file),
                    cause,
                })?;
                Ok(place)
            }
        }
    }

    /// What the dataset that is being read knows of the file that the application calls `file`.
    pub(crate) fn reading_file(&self, file: &str) -> Result<FileDecl, Error> {
        match &self.phase {
            Phase::Reading(info) => lookup(info, &self.prefix, file, self.me.rank).cloned(),
            _ => Err(Error::State { call: "route", phase: "while no dataset is being read" }),
        }
    }

    /// Disabled: the file's place in the prefix, or the name itself where none was said or it lies elsewhere.
    pub(super) fn pass_through_place(&self, file: &str) -> Result<String, Error> {
        match self.prefix.route(file) {
            Ok(path) if self.prefix_said => Ok(format!("{}/{path}", self.prefix.as_str())),
            Ok(_) | Err(name::NameError::Escapes) => Ok(file.to_owned()),
            Err(cause) => Err(Error::Name { what: "file", name: Words::name(file), cause }),
        }
    }

    /// The same, and its directories.
    pub(super) fn pass_through(&self, file: &str) -> Result<String, Error> {
        let place = self.pass_through_place(file)?;
        match place.rsplit_once('/') {
            None | Some(("", _)) => {}
            Some((parents, _)) => {
                std::fs::create_dir_all(parents).map_err(|cause| Error::Io {
                    what: "cannot create directory",
                    path: Words::name(parents),
                    cause,
                })?;
            }
        }
        Ok(place)
    }
}

fn lookup<'a>(
    info: &'a RestartInfo,
    prefix: &Prefix,
    file: &str,
    rank: u32,
) -> Result<&'a FileDecl, Error> {
    let (dataset, name) = (|| Words::name(&info.name), Words::name(file));
    route::find_in(&info.files, prefix, file).map_err(|e| match e {
        Lookup::Name(cause) => Error::Name { what: "file", name, cause },
        Lookup::None => Error::NoFile { dataset: dataset(), name, rank },
        Lookup::Several => Error::Ambiguous { dataset: dataset(), name, rank },
    })
}
