//! Descriptors over a Unix socket (`SCM_RIGHTS`, unix(7)).

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Descriptors that go with one message: `SCM_MAX_FD` of unix(7).
pub const FDS_MAX: usize = 253;

/// Room for that many.
const SPACE: usize = rustix::cmsg_space!(ScmRights(FDS_MAX));

/// Sends bytes, the descriptors with the first of them; how many bytes went. Does not wait, raises no SIGPIPE. With
/// descriptors `bytes` must not be empty.
pub fn send(to: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<usize, Errno> {
    if fds.len() > FDS_MAX || (bytes.is_empty() && !fds.is_empty()) {
        return Err(Errno::INVAL);
    }
    let mut space = [MaybeUninit::uninit(); SPACE];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::INVAL);
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    sendmsg(to, &[IoSlice::new(bytes)], &mut control, flags)
}

/// Receives bytes, and adds the descriptors that come with them to `fds`, which never grows beyond `max`: what is
/// more is closed. Does not wait.
pub fn receive(
    from: impl AsFd,
    buf: &mut [u8],
    fds: &mut Vec<OwnedFd>,
    max: usize,
) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); SPACE];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let got = recvmsg(from, &mut [IoSliceMut::new(buf)], &mut control, flags)?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            for fd in rights {
                if fds.len() < max {
                    fds.push(fd);
                }
            }
        }
    }
    Ok(got.bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Extent;
    use std::os::unix::net::UnixStream;

    #[test]
    fn descriptors_come_with_the_first_byte() {
        let (a, b) = UnixStream::pair().unwrap();
        let extents: Vec<Extent> = (1..=FDS_MAX as u64)
            .map(|n| {
                let extent = Extent::create(4096 * n).unwrap();
                extent.mapping().write(0, &n.to_le_bytes());
                extent
            })
            .collect();
        let all: Vec<BorrowedFd<'_>> = extents.iter().map(|e| e.as_fd()).collect();
        assert_eq!(send(&a, b"hello", &all).unwrap(), 5);
        let (mut buf, mut fds) = ([0; 2], Vec::new());
        assert_eq!(receive(&b, &mut buf, &mut fds, FDS_MAX).unwrap(), 2);
        assert_eq!(fds.len(), FDS_MAX);
        for (n, fd) in (1u64..).zip(&fds) {
            let mut first = [0; 8];
            rustix::io::pread(fd, &mut first, 0).unwrap();
            assert_eq!(u64::from_le_bytes(first), n);
        }
        assert_eq!(receive(&b, &mut buf, &mut fds, FDS_MAX).unwrap(), 2);
        assert_eq!(fds.len(), FDS_MAX, "the rest of the bytes brings none");
    }

    #[test]
    fn what_is_too_much_is_refused_or_closed() {
        let (a, b) = UnixStream::pair().unwrap();
        let extent = Extent::create(4096).unwrap();
        let many = vec![extent.as_fd(); FDS_MAX + 1];
        assert_eq!(send(&a, b"x", &many), Err(Errno::INVAL));
        assert_eq!(send(&a, b"", &many[..1]), Err(Errno::INVAL));
        send(&a, b"x", &many[..9]).unwrap();
        let (mut buf, mut fds) = ([0; 1], Vec::new());
        receive(&b, &mut buf, &mut fds, 4).unwrap();
        assert_eq!(fds.len(), 4);
        assert_eq!(receive(&b, &mut buf, &mut fds, 4), Err(Errno::AGAIN));
    }
}
