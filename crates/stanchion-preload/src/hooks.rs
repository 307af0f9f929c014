//! The functions of the C library that stand before the real ones: descriptors.
//!
//! Each does what the real one does, with its arguments and its errno. The third argument of open, which is
//! there only if a file may be made, is taken as if it always were: the conventions of x86_64, aarch64 and
//! riscv64 pass it in a register either way, and what is in it goes on to the real function, which looks at
//! it only when it is there.
//!
//! All of them are `C-unwind`: a thread that is cancelled in the real function unwinds through them.

use crate::count::{begin, begin_known};
use crate::fds::{self, Place};
use crate::ffi::{ENOSYS, IoVec, real, set_errno};
use crate::record::{field, present};
use core::ffi::{c_char, c_int, c_void};
use core::sync::atomic::Ordering;
use stanchion_format::profile::Kind;

/// Calls the real function; without one the call fails.
macro_rules! call {
    ($name:ident($($argument:expr),*), $failed:expr) => {
        match real::$name() {
            // SAFETY: the caller's arguments, as they came, to the function that it meant to call.
            Some(function) => unsafe { function($($argument),*) },
            None => {
                set_errno(ENOSYS);
                $failed
            }
        }
    };
}
pub(crate) use call;

macro_rules! openers {
    ($($name:ident($($argument:ident: $of:ty),*);)*) => {$(
        /// As in the C library.
        ///
        /// # Safety
        /// As there.
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub unsafe extern "C-unwind" fn $name($($argument: $of),*) -> c_int {
            let fd = call!($name($($argument),*), -1);
            fds::opened(fd);
            fd
        }
    )*};
}

openers! {
    open(path: *const c_char, flags: c_int, mode: u32);
    open64(path: *const c_char, flags: c_int, mode: u32);
    openat(dir: c_int, path: *const c_char, flags: c_int, mode: u32);
    openat64(dir: c_int, path: *const c_char, flags: c_int, mode: u32);
    creat(path: *const c_char, mode: u32);
    creat64(path: *const c_char, mode: u32);
}

/// A write: counts what the real function says it wrote.
macro_rules! writers {
    ($($name:ident($fd:ident $(, $argument:ident: $of:ty)*) at $place:expr;)*) => {$(
        /// As in the C library.
        ///
        /// # Safety
        /// As there.
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub unsafe extern "C-unwind" fn $name($fd: c_int $(, $argument: $of)*) -> isize {
            let counted = begin($fd);
            let n = call!($name($fd $(, $argument)*), -1);
            if let Some(counted) = counted {
                counted.wrote(n as i64, $place, Kind::System);
            }
            n
        }
    )*};
}

/// pwritev2 takes -1 for "where the descriptor stands".
fn place_v2(offset: i64) -> Place {
    if offset == -1 { Place::Next } else { Place::At(offset) }
}

writers! {
    write(fd, bytes: *const c_void, n: usize) at Place::Next;
    pwrite(fd, bytes: *const c_void, n: usize, offset: i64) at Place::At(offset);
    pwrite64(fd, bytes: *const c_void, n: usize, offset: i64) at Place::At(offset);
    writev(fd, pieces: *const IoVec, n: c_int) at Place::Next;
    pwritev(fd, pieces: *const IoVec, n: c_int, offset: i64) at Place::At(offset);
    pwritev64(fd, pieces: *const IoVec, n: c_int, offset: i64) at Place::At(offset);
    pwritev2(fd, pieces: *const IoVec, n: c_int, offset: i64, flags: c_int) at place_v2(offset);
    pwritev64v2(fd, pieces: *const IoVec, n: c_int, offset: i64, flags: c_int) at place_v2(offset);
}

macro_rules! syncers {
    ($($name:ident;)*) => {$(
        /// As in the C library.
        ///
        /// # Safety
        /// As there.
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub unsafe extern "C-unwind" fn $name(fd: c_int) -> c_int {
            let counted = begin_known(fd);
            let result = call!($name(fd), -1);
            if let Some(counted) = counted {
                counted.synced(result == 0);
            }
            result
        }
    )*};
}

syncers! {
    fsync;
    fdatasync;
}

macro_rules! seekers {
    ($($name:ident;)*) => {$(
        /// As in the C library.
        ///
        /// # Safety
        /// As there.
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub unsafe extern "C-unwind" fn $name(fd: c_int, offset: i64, whence: c_int) -> i64 {
            let position = call!($name(fd, offset, whence), -1);
            if let Some(file) = fds::known(fd) {
                file.seek(position);
            }
            position
        }
    )*};
}

seekers! {
    lseek;
    lseek64;
}

/// As in the C library.
///
/// # Safety
/// As there.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn close(fd: c_int) -> c_int {
    let counted = begin_known(fd);
    // Before: afterwards the number may be another thread's file already.
    fds::closing(fd);
    let result = call!(close(fd), -1);
    if let Some(counted) = counted {
        counted.closed();
    }
    result
}

/// As in the C library.
///
/// # Safety
/// As there.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn close_range(first: u32, last: u32, flags: c_int) -> c_int {
    // With flags they may stay open (CLOSE_RANGE_CLOEXEC); what is forgotten is looked at again.
    fds::closing_range(first, last);
    call!(close_range(first, last, flags), -1)
}

/// As in the C library.
///
/// # Safety
/// As there.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn closefrom(first: c_int) {
    fds::closing_range(first.max(0) as u32, u32::MAX);
    call!(closefrom(first), ());
}

/// As in the C library.
///
/// # Safety
/// As there.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn dup(fd: c_int) -> c_int {
    let new = call!(dup(fd), -1);
    if new >= 0 {
        fds::copied(fd, new);
    }
    new
}

/// As in the C library.
///
/// # Safety
/// As there.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn dup2(fd: c_int, to: c_int) -> c_int {
    let new = call!(dup2(fd, to), -1);
    if new >= 0 {
        fds::copied(fd, new);
    }
    new
}

/// As in the C library.
///
/// # Safety
/// As there.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn dup3(fd: c_int, to: c_int, flags: c_int) -> c_int {
    let new = call!(dup3(fd, to, flags), -1);
    if new >= 0 {
        fds::copied(fd, new);
    }
    new
}

macro_rules! renamers {
    ($($name:ident($($argument:ident: $of:ty),*);)*) => {$(
        /// As in the C library.
        ///
        /// # Safety
        /// As there.
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub unsafe extern "C-unwind" fn $name($($argument: $of),*) -> c_int {
            let result = call!($name($($argument),*), -1);
            // Who has written nothing has no record, and needs none for this.
            if result == 0 && let Some(rec) = present() {
                field!(rec, .head.renames).fetch_add(1, Ordering::Relaxed);
            }
            result
        }
    )*};
}

renamers! {
    rename(from: *const c_char, to: *const c_char);
    renameat(from_dir: c_int, from: *const c_char, to_dir: c_int, to: *const c_char);
    renameat2(from_dir: c_int, from: *const c_char, to_dir: c_int, to: *const c_char, flags: u32);
}

const PROT_WRITE: c_int = 2;
/// MAP_SHARED and MAP_SHARED_VALIDATE have it, MAP_PRIVATE has not.
const MAP_SHARED: c_int = 1;
const MAP_ANONYMOUS: c_int = 0x20;

macro_rules! mappers {
    ($($name:ident;)*) => {$(
        /// As in the C library.
        ///
        /// # Safety
        /// As there.
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub unsafe extern "C-unwind" fn $name(
            at: *mut c_void,
            bytes: usize,
            protection: c_int,
            flags: c_int,
            fd: c_int,
            offset: i64,
        ) -> *mut c_void {
            let mapped = call!($name(at, bytes, protection, flags, fd, offset), usize::MAX as *mut c_void);
            let shared = flags & MAP_SHARED != 0 && flags & MAP_ANONYMOUS == 0;
            if shared && protection & PROT_WRITE != 0 && mapped.addr() != usize::MAX
                && let Some(file) = fds::counted(fd)
            {
                field!(file.rec, .head.maps).fetch_add(1, Ordering::Relaxed);
                field!(file.rec, .head.map_bytes).fetch_add(bytes as u64, Ordering::Relaxed);
            }
            mapped
        }
    )*};
}

mappers! {
    mmap;
    mmap64;
}
