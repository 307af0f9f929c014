//! A small pool of real shared memory for the agent of the tests. What it lends is full of stale bytes.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use crate::fake::{Fake, Reply, sealed};
use stanchion_format::client::{
    Answer, Ask, Lent, MemoryAt, MemoryFile, Own, Part, PartFrom, Request,
};
use stanchion_format::ids::ExtentId;
use stanchion_mem::{Extent, fds};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

const STALE: u8 = 0xa5;
/// Parts that one answer names: few, so that files have to be asked for more than once.
const PARTS: usize = 3;

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Free,
    Lent,
    Held,
}

struct Inside {
    chunk: u64,
    max: u64,
    extents: Vec<(Extent, State)>,
    lends: Vec<u64>,
    /// Of the last complete dataset.
    files: BTreeMap<String, (u64, Vec<Part>)>,
    completes: Vec<Own>,
    /// Fails lends from this one on.
    fail_from: Option<(usize, Answer)>,
}

/// Shared by the test and its agent.
#[derive(Clone)]
pub struct Pool(Arc<Mutex<Inside>>);

impl Pool {
    pub fn new(chunk: u64, max: u64) -> Pool {
        Pool(Arc::new(Mutex::new(Inside {
            chunk,
            max,
            extents: Vec::new(),
            lends: Vec::new(),
            files: BTreeMap::new(),
            completes: Vec::new(),
            fail_from: None,
        })))
    }

    /// Lends fail with `answer` after `good` ones.
    pub fn fail_after(&self, good: usize, answer: Answer) {
        self.0.lock().unwrap().fail_from = Some((good, answer));
    }

    /// An agent with this pool.
    pub fn fake(&self) -> Fake {
        self.scripted(|_| None)
    }

    /// The same, which replies otherwise where `script` does.
    pub fn scripted(
        &self,
        mut script: impl FnMut(&Request) -> Option<Reply> + Send + 'static,
    ) -> Fake {
        let pool = self.clone();
        let chunk = self.0.lock().unwrap().chunk.to_string();
        let prepare = |m: &mut crate::fake::Model| m.settings = vec![("chunk_bytes".into(), chunk)];
        Fake::with(prepare, move |_, request| {
            script(request).or_else(|| pool.0.lock().unwrap().reply(request))
        })
    }

    /// What each lend asked for.
    pub fn lends(&self) -> Vec<u64> {
        self.0.lock().unwrap().lends.clone()
    }

    pub fn lent_ever(&self) -> usize {
        self.0.lock().unwrap().extents.len()
    }

    /// Bytes that belong to datasets.
    pub fn held(&self) -> u64 {
        let inside = self.0.lock().unwrap();
        let held = inside.extents.iter().filter(|(_, s)| *s == State::Held);
        held.map(|(e, _)| e.mapping().len() as u64).sum()
    }

    pub fn completes(&self) -> Vec<Own> {
        self.0.lock().unwrap().completes.clone()
    }

    /// A file of the last complete dataset, if it is in memory.
    pub fn file(&self, path: &str) -> Option<Vec<u8>> {
        let inside = self.0.lock().unwrap();
        let (bytes, parts) = inside.files.get(path)?;
        let all = inside.bytes(parts);
        assert_eq!(all.len() as u64, *bytes);
        Some(all)
    }

    /// What a declared file is now; `base`: what it is over, if it is.
    pub fn whole(&self, file: &MemoryFile, base: &[u8]) -> Vec<u8> {
        let own = self.0.lock().unwrap().bytes(&file.parts);
        let Some(over) = &file.base else { return own };
        assert_eq!(over.changed.bytes() as usize, base.len());
        let (mut all, mut own) = (base.to_vec(), &own[..]);
        let mut at = 0;
        for stretch in over.changed.stretches() {
            let (now, later) = own.split_at(stretch.own as usize);
            at += stretch.same as usize;
            all[at..at + now.len()].copy_from_slice(now);
            (at, own) = (at + now.len(), later);
        }
        assert!(at == all.len() && own.is_empty());
        all
    }
}

fn place(part: &Part) -> (ExtentId, u64) {
    match part.from {
        PartFrom::Extent { id, offset } => (id, offset),
        other => panic!("this agent takes nothing over: {other:?}"),
    }
}

impl Inside {
    fn extent(&self, id: ExtentId) -> &(Extent, State) {
        &self.extents[id.0 as usize - 1]
    }

    fn bytes(&self, parts: &[Part]) -> Vec<u8> {
        let mut all = Vec::new();
        for part in parts {
            let (id, offset) = place(part);
            let mut buf = vec![0; part.bytes as usize];
            self.extent(id).0.mapping().read(offset as usize, &mut buf);
            all.extend(buf);
        }
        all
    }

    fn reply(&mut self, request: &Request) -> Option<Reply> {
        match request {
            Request::Lend { bytes, .. } => Some(self.lend(*bytes)),
            Request::OpenMemory { path, from } => Some(self.open(path, *from)),
            Request::Collective { ask: Ask::Complete | Ask::Snapshot, own } => {
                self.complete(own);
                None
            }
            _ => None,
        }
    }

    /// Extents of one or four chunks, in turns; not always all that was asked for.
    fn lend(&mut self, bytes: u64) -> Reply {
        self.lends.push(bytes);
        if let Some((from, answer)) = &self.fail_from
            && self.lends.len() > *from
        {
            return Reply::Answer(answer.clone());
        }
        let lent = self.extents.iter().filter(|(_, s)| *s == State::Lent);
        let lent: u64 = lent.map(|(e, _)| e.mapping().len() as u64).sum();
        let (mut list, mut writers, mut given) = (Vec::new(), Vec::new(), 0);
        if lent + bytes > self.max {
            return with_fds(&Answer::Lent(list), writers);
        }
        for (n, (extent, state)) in self.extents.iter_mut().enumerate() {
            if given < bytes && *state == State::Free {
                *state = State::Lent;
                let (id, bytes) = (ExtentId(n as u64 + 1), extent.mapping().len() as u64);
                list.push(Lent { id, bytes, fresh: false });
                given += bytes;
            }
        }
        while given < bytes && list.len() < 4 {
            let large = self.extents.len() % 2 == 1 && lent + given + 4 * self.chunk <= self.max;
            let size = if large { 4 * self.chunk } else { self.chunk };
            let extent = Extent::create(size).unwrap();
            extent.mapping().write(0, &vec![STALE; size as usize]);
            writers.push(extent.as_fd().try_clone_to_owned().unwrap());
            self.extents.push((extent, State::Lent));
            let id = ExtentId(self.extents.len() as u64);
            list.push(Lent { id, bytes: size, fresh: true });
            given += size;
        }
        with_fds(&Answer::Lent(list), writers)
    }

    fn complete(&mut self, own: &Own) {
        self.completes.push(own.clone());
        let mut used = vec![false; self.extents.len()];
        if own.valid {
            self.files.clear();
            for file in &own.memory {
                let decl = own.files.iter().filter(|f| f.path == file.path).collect::<Vec<_>>();
                assert_eq!(decl.len(), 1, "each file is declared once");
                for part in &file.parts {
                    let (id, offset) = place(part);
                    let (extent, state) = self.extent(id);
                    assert!(*state == State::Lent && part.bytes > 0);
                    assert!(offset + part.bytes <= extent.mapping().len() as u64);
                    used[id.0 as usize - 1] = true;
                }
                self.files.insert(file.path.clone(), (decl[0].bytes, file.parts.clone()));
            }
        }
        for ((_, state), used) in self.extents.iter_mut().zip(used) {
            match *state {
                State::Lent if used => *state = State::Held,
                State::Lent => *state = State::Free,
                _ => {}
            }
        }
    }

    fn open(&self, path: &str, from: u64) -> Reply {
        let (mut parts, mut readers, mut start) = (Vec::new(), Vec::new(), 0);
        for part in self.files.get(path).map_or(&[][..], |(_, parts)| parts) {
            let end = start + part.bytes;
            if end > from && parts.len() < PARTS {
                let ((id, offset), skip) = (place(part), from.saturating_sub(start));
                let fd = readers.len() as u32;
                parts.push(MemoryAt { bytes: part.bytes - skip, fd, offset: offset + skip });
                readers.push(self.extent(id).0.reader().unwrap());
            }
            start = end;
        }
        with_fds(&Answer::Memory(parts), readers)
    }
}

fn with_fds(answer: &Answer, fds: Vec<OwnedFd>) -> Reply {
    let bytes = sealed(answer);
    Reply::Do(Box::new(move |stream: &UnixStream| {
        let borrowed: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        let mut done = fds::send(stream, &bytes, &borrowed)?;
        while done < bytes.len() {
            match fds::send(stream, &bytes[done..], &[]) {
                Ok(n) => done += n,
                Err(rustix::io::Errno::AGAIN) => std::thread::yield_now(),
                Err(e) => return Err(io::Error::from(e)),
            }
        }
        Ok(())
    }))
}
