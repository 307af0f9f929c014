//! The socket to the agent: one question, one answer, each with a deadline.

use crate::error::Error;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, send, socket_with,
    sockopt,
};
use stanchion_format::client::{Answer, KIND_ANSWER, KIND_REQUEST, Request};
use stanchion_format::frame::{self, FrameError};
use stanchion_format::limits::{CLIENT_FRAME_BYTES_MAX, EXTENTS_PER_ANSWER_MAX};
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

/// No wait is longer, whatever is asked for.
const LONGEST: Duration = Duration::from_secs(400 * 24 * 3600);

/// How much longer than the agent the library waits: the agent's own deadline passes first, and its
/// error names who is missing. Never short, as giving up ends the link for good: an agent that answers
/// late is one that got no processor, or a slow disk, and no reason to lose the job (FM-V1). A tenth of a
/// second was too little for a node with more ranks than cores.
fn margin(ms: u64) -> Duration {
    Duration::from_millis(ms / 4).clamp(Duration::from_secs(5), Duration::from_secs(10))
}

/// The whole wait for something that the agent gives up after `ms`.
pub(crate) fn patience(ms: u64) -> Duration {
    Duration::from_millis(ms).saturating_add(margin(ms)).min(LONGEST)
}

/// A stream with a deadline over all its reads and writes. Never raises SIGPIPE.
struct Timed<'a> {
    fd: BorrowedFd<'a>,
    until: Instant,
    /// Descriptors that came with what was read.
    fds: Vec<OwnedFd>,
}

impl Timed<'_> {
    fn wait(&self, flags: PollFlags) -> io::Result<()> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        let time = Timespec {
            tv_sec: left.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        };
        match poll(&mut [PollFd::from_borrowed_fd(self.fd, flags)], Some(&time)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }

    /// `step` until it neither would block nor was interrupted.
    fn repeat<T>(
        &self,
        flags: PollFlags,
        mut step: impl FnMut(BorrowedFd<'_>) -> rustix::io::Result<T>,
    ) -> io::Result<T> {
        loop {
            match step(self.fd) {
                Err(Errno::AGAIN) => self.wait(flags)?,
                Err(Errno::INTR) => {}
                other => return Ok(other?),
            }
        }
    }
}

impl Read for Timed<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let mut fds = std::mem::take(&mut self.fds);
        let read = self.repeat(PollFlags::IN, |fd| {
            stanchion_mem::fds::receive(fd, buf, &mut fds, EXTENTS_PER_ANSWER_MAX)
        });
        self.fds = fds;
        read
    }
}

impl Write for Timed<'_> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        self.repeat(PollFlags::OUT, |fd| send(fd, buf, flags))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The connection. `None` after the first failure: what comes later could be an answer to something else.
#[derive(Debug)]
pub(crate) struct Link {
    fd: Option<OwnedFd>,
}

impl Link {
    /// Connects to the agent of `slot`.
    pub(crate) fn connect(path: &Path, slot: u32, wait: Duration) -> Result<Link, Error> {
        let failed = |cause| Error::Connect { slot, cause };
        let address = SocketAddrUnix::new(path).map_err(failed)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let fd =
            socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).map_err(failed)?;
        let until = Instant::now() + wait.min(LONGEST);
        loop {
            match connect(&fd, &address) {
                Ok(()) => break,
                Err(Errno::INTR) => {}
                // The agent's queue is full: all ranks of a node come at once.
                Err(Errno::AGAIN) if Instant::now() < until => {
                    std::thread::sleep(Duration::from_millis(2));
                }
                Err(cause) => return Err(failed(cause)),
            }
        }
        let uid = sockopt::socket_peercred(&fd).map_err(failed)?.uid;
        if uid != rustix::process::geteuid() {
            return Err(Error::Stranger { slot, uid: uid.as_raw() });
        }
        Ok(Link { fd: Some(fd) })
    }

    /// What it goes over.
    pub(crate) fn descriptor(&self, verb: &'static str) -> Result<&OwnedFd, Error> {
        self.fd.as_ref().ok_or(Error::Dead { verb })
    }

    /// The same, for who uses it from now on.
    pub(crate) fn into_descriptor(self, verb: &'static str) -> Result<OwnedFd, Error> {
        self.fd.ok_or(Error::Dead { verb })
    }

    /// Is it still good?
    pub(crate) fn alive(&self) -> bool {
        self.fd.is_some()
    }

    /// Asks, and waits for the answer. `Failed` becomes an error; the link survives that, and no other.
    pub(crate) fn ask(
        &mut self,
        verb: &'static str,
        request: &Request,
        wait: Duration,
    ) -> Result<Answer, Error> {
        self.ask_for_fds(verb, request, wait).map(|(answer, _)| answer)
    }

    /// The same, with the descriptors that come with the answer.
    pub(crate) fn ask_for_fds(
        &mut self,
        verb: &'static str,
        request: &Request,
        wait: Duration,
    ) -> Result<(Answer, Vec<OwnedFd>), Error> {
        // Taken out: every early return leaves the link dead.
        let fd = self.fd.take().ok_or(Error::Dead { verb })?;
        let frame = match frame::encode(KIND_REQUEST, request, CLIENT_FRAME_BYTES_MAX) {
            Ok(frame) => frame,
            Err(cause) => {
                self.fd = Some(fd);
                return Err(Error::Frame { verb, cause });
            }
        };
        let until = Instant::now() + wait.min(LONGEST);
        let mut stream = Timed { fd: fd.as_fd(), until, fds: Vec::new() };
        let explain = |cause: FrameError| match cause {
            FrameError::Io(e) if e.kind() == ErrorKind::TimedOut => {
                Error::Timeout { verb, ms: wait.as_millis() as u64 }
            }
            FrameError::Io(e) => Error::Gone { verb, cause: e.kind() },
            cause => Error::Frame { verb, cause },
        };
        // An agent that refuses may have closed its side already; its last words are still there.
        let sent = stream.write_all(&frame).map_err(FrameError::Io);
        if let Err(FrameError::Io(e)) = &sent
            && e.kind() == ErrorKind::TimedOut
        {
            return Err(sent.map_err(explain).expect_err("it is an error"));
        }
        let (kind, body) = match (frame::read_raw(&mut stream, CLIENT_FRAME_BYTES_MAX), sent) {
            (Ok(read), _) => read,
            (Err(_), Err(cause)) | (Err(cause), Ok(())) => return Err(explain(cause)),
        };
        if kind != KIND_ANSWER {
            return Err(Error::Answer { verb });
        }
        let answer = frame::decode(&body).map_err(explain)?;
        let fds = stream.fds;
        self.fd = Some(fd);
        Ok((answer, fds))
    }

    /// Ends the connection after an answer that does not fit.
    pub(crate) fn give_up(&mut self, verb: &'static str) -> Error {
        self.fd = None;
        Error::Answer { verb }
    }
}
