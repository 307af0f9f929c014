//! A file of the dataset that is being read, wherever it lies.

use crate::client::Client;
use crate::error::{Error, Words};
use stanchion_format::client::MemoryAt;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

/// It can be read at any place.
#[derive(Debug)]
pub(crate) struct Source {
    /// Its size, bytes.
    pub bytes: u64,
    /// For messages.
    pub name: String,
    place: Place,
}

#[derive(Debug)]
enum Place {
    File(File),
    /// In the pool of the agent; a window of its parts is known.
    Memory {
        path: String,
        parts: Window,
        fds: Vec<OwnedFd>,
    },
}

impl Source {
    /// Opens the file that the application calls `name`.
    pub(crate) fn open(
        client: &mut Client,
        call: &'static str,
        name: &str,
    ) -> Result<Source, Error> {
        let decl = client.reading_file(name)?;
        let (parts, fds) = client.open_memory(call, &decl.path, 0)?;
        if !parts.is_empty() {
            let parts = Window::new(0, parts);
            let place = Place::Memory { path: decl.path.clone(), parts, fds };
            return Ok(Source { bytes: decl.bytes, name: decl.path, place });
        }
        Source::of_file(client.route(name)?)
    }

    /// Opens a file by its place.
    pub(crate) fn of_file(place: String) -> Result<Source, Error> {
        let failed = |cause| Error::Io {
            what: "cannot read file of the restart",
            path: Words::name(&place),
            cause,
        };
        let file = File::open(&place).map_err(failed)?;
        let bytes = file.metadata().map_err(failed)?.len();
        Ok(Source { bytes, name: place, place: Place::File(file) })
    }

    /// Descriptors that it has, beside that of a file.
    pub(crate) fn held(&self) -> usize {
        match &self.place {
            Place::File(_) => 0,
            Place::Memory { fds, .. } => fds.len(),
        }
    }

    /// Closes those; it asks again when it is read.
    pub(crate) fn release(&mut self) {
        if let Place::Memory { parts, fds, .. } = &mut self.place {
            (*parts, *fds) = Default::default();
        }
    }

    /// Fills `buf` from `offset` on; `UnexpectedEof` beyond the end.
    pub(crate) fn read(
        &mut self,
        client: &mut Client,
        call: &'static str,
        buf: &mut [u8],
        offset: u64,
    ) -> Result<(), Error> {
        let name = self.name.clone();
        let failed = |cause| Error::Io { what: "cannot read", path: Words::name(&name), cause };
        match &mut self.place {
            Place::File(file) => file.read_exact_at(buf, offset).map_err(failed),
            Place::Memory { path, parts, fds } => {
                let mut done = 0;
                while done < buf.len() {
                    let at = offset + done as u64;
                    let Some((part, skip)) = parts.find(at) else {
                        let (more, readers) = client.open_memory(call, path, at)?;
                        if more.is_empty() {
                            return Err(failed(ErrorKind::UnexpectedEof.into()));
                        }
                        (*parts, *fds) = (Window::new(at, more), readers);
                        continue;
                    };
                    let left = usize::try_from(part.bytes - skip).unwrap_or(usize::MAX);
                    let step = left.min(buf.len() - done);
                    let fd = &fds[part.fd as usize];
                    read_all(fd, &mut buf[done..done + step], part.offset + skip)
                        .map_err(failed)?;
                    done += step;
                }
                Ok(())
            }
        }
    }
}

/// Parts that follow each other, and where each begins.
#[derive(Debug, Default)]
struct Window(Vec<(u64, MemoryAt)>);

impl Window {
    fn new(from: u64, parts: Vec<MemoryAt>) -> Window {
        let place = |start: &mut u64, part: MemoryAt| {
            let at = *start;
            *start = at.saturating_add(part.bytes);
            Some((at, part))
        };
        Window(parts.into_iter().scan(from, place).collect())
    }

    /// The part that has the byte at `at`, and how far into it that is.
    fn find(&self, at: u64) -> Option<(MemoryAt, u64)> {
        let next = self.0.partition_point(|(start, _)| *start <= at);
        let (start, part) = self.0.get(next.checked_sub(1)?)?;
        let skip = at - start;
        (skip < part.bytes).then_some((*part, skip))
    }
}

fn read_all(fd: &OwnedFd, mut buf: &mut [u8], mut offset: u64) -> io::Result<()> {
    while !buf.is_empty() {
        match rustix::io::pread(fd, &mut *buf, offset) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(n) => {
                buf = &mut buf[n..];
                offset += n as u64;
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_found_by_their_place() {
        let at = |bytes, fd| MemoryAt { bytes, fd, offset: 7 };
        let parts = [at(10, 0), at(1, 1), at(5, 2)];
        let window = Window::new(100, parts.to_vec());
        assert_eq!(window.find(99), None);
        assert_eq!(window.find(100), Some((parts[0], 0)));
        assert_eq!(window.find(109), Some((parts[0], 9)));
        assert_eq!(window.find(110), Some((parts[1], 0)));
        assert_eq!(window.find(113), Some((parts[2], 2)));
        assert_eq!(window.find(116), None);
        assert_eq!(Window::default().find(0), None);
    }
}
