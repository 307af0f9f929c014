//! The functions of the C library that stand before the real ones: streams.
//!
//! What the C library itself writes when a stream's buffer is full goes through no function that could be
//! stood before. Counted are the calls that fill the buffer, with the time that they take, flushes included.

use crate::count::{Call, begin, begin_known};
use crate::fds::{self, Place};
use crate::ffi::{ENOSYS, File, VaList, descriptor, length, position, real, set_errno};
use crate::hooks::call;
use core::ffi::{c_char, c_int, c_void};
use stanchion_format::profile::Kind;

/// A write to a stream begins.
///
/// # Safety
/// `file` is an open stream, as for every function of a stream.
#[inline]
unsafe fn begin_stream(file: *mut File) -> Option<Call> {
    // SAFETY: the caller has it that the stream is open.
    begin(unsafe { descriptor(file) })
}

macro_rules! openers {
    ($($name:ident($($argument:ident: $of:ty),*);)*) => {$(
        /// As in the C library.
        ///
        /// # Safety
        /// As there.
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub unsafe extern "C-unwind" fn $name($($argument: $of),*) -> *mut File {
            let file = call!($name($($argument),*), core::ptr::null_mut());
            if !file.is_null() {
                // SAFETY: it was opened a moment ago.
                fds::opened(unsafe { descriptor(file) });
            }
            file
        }
    )*};
}

openers! {
    fopen(path: *const c_char, mode: *const c_char);
    fopen64(path: *const c_char, mode: *const c_char);
    freopen(path: *const c_char, mode: *const c_char, stream: *mut File);
    freopen64(path: *const c_char, mode: *const c_char, stream: *mut File);
}

/// As in the C library.
///
/// # Safety
/// As there.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn fclose(file: *mut File) -> c_int {
    // SAFETY: the caller closes a stream that is open.
    let fd = unsafe { descriptor(file) };
    let counted = begin_known(fd);
    fds::closing(fd);
    let result = call!(fclose(file), -1);
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
pub unsafe extern "C-unwind" fn fflush(file: *mut File) -> c_int {
    // NULL stands for all streams.
    let counted = if file.is_null() {
        None
    } else {
        // SAFETY: not NULL, hence an open stream.
        begin_known(unsafe { descriptor(file) })
    };
    let result = call!(fflush(file), -1);
    if let Some(counted) = counted {
        counted.closed();
    }
    result
}

macro_rules! block_writers {
    ($($name:ident;)*) => {$(
        /// As in the C library.
        ///
        /// # Safety
        /// As there.
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub unsafe extern "C-unwind" fn $name(
            bytes: *const c_void,
            size: usize,
            n: usize,
            file: *mut File,
        ) -> usize {
            // SAFETY: the caller writes to an open stream.
            let counted = unsafe { begin_stream(file) };
            let done = call!($name(bytes, size, n, file), 0);
            if let Some(counted) = counted {
                let failed = done == 0 && n > 0 && size > 0;
                let wrote = if failed { -1 } else { size.saturating_mul(done) as i64 };
                counted.wrote(wrote, Place::Next, Kind::Stdio);
            }
            done
        }
    )*};
}

block_writers! {
    fwrite;
    fwrite_unlocked;
}

macro_rules! text_writers {
    ($($name:ident;)*) => {$(
        /// As in the C library.
        ///
        /// # Safety
        /// As there.
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub unsafe extern "C-unwind" fn $name(text: *const c_char, file: *mut File) -> c_int {
            // SAFETY: the caller writes to an open stream.
            let counted = unsafe { begin_stream(file) };
            let done = call!($name(text, file), -1);
            if let Some(counted) = counted {
                // SAFETY: the real function has read it to its zero.
                let wrote = if done < 0 { -1 } else { unsafe { length(text) as i64 } };
                counted.wrote(wrote, Place::Next, Kind::Stdio);
            }
            done
        }
    )*};
}

text_writers! {
    fputs;
    fputs_unlocked;
}

macro_rules! letter_writers {
    ($($name:ident;)*) => {$(
        /// As in the C library.
        ///
        /// # Safety
        /// As there.
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub unsafe extern "C-unwind" fn $name(letter: c_int, file: *mut File) -> c_int {
            // SAFETY: the caller writes to an open stream.
            let counted = unsafe { begin_stream(file) };
            let done = call!($name(letter, file), -1);
            if let Some(counted) = counted {
                counted.wrote(if done < 0 { -1 } else { 1 }, Place::Next, Kind::Stdio);
            }
            done
        }
    )*};
}

letter_writers! {
    fputc;
    putc;
}

macro_rules! printers {
    ($($name:ident($to:ident: $of:ty $(, $flag:ident: $flag_of:ty)?), $begin:expr, $kind:expr;)*) => {$(
        /// As in the C library.
        ///
        /// # Safety
        /// As there.
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub unsafe extern "C-unwind" fn $name(
            $to: $of,
            $($flag: $flag_of,)?
            format: *const c_char,
            arguments: VaList,
        ) -> c_int {
            // SAFETY: the caller writes to an open stream or to a descriptor.
            let counted = unsafe { $begin($to) };
            let done = call!($name($to, $($flag,)? format, arguments), -1);
            if let Some(counted) = counted {
                counted.wrote(i64::from(done), Place::Next, $kind);
            }
            done
        }
    )*};
}

/// A write to a descriptor begins.
///
/// # Safety
/// None is needed; it stands beside `begin_stream`.
unsafe fn begin_descriptor(fd: c_int) -> Option<Call> {
    begin(fd)
}

printers! {
    vfprintf(file: *mut File), begin_stream, Kind::Stdio;
    __vfprintf_chk(file: *mut File, flag: c_int), begin_stream, Kind::Stdio;
    vdprintf(fd: c_int), begin_descriptor, Kind::System;
    __vdprintf_chk(fd: c_int, flag: c_int), begin_descriptor, Kind::System;
}

unsafe extern "C" {
    fn stanchion_profile_fprintf(file: *mut File, format: *const c_char, ...) -> c_int;
    fn stanchion_profile_fprintf_chk(file: *mut File, f: c_int, t: *const c_char, ...) -> c_int;
    fn stanchion_profile_dprintf(fd: c_int, format: *const c_char, ...) -> c_int;
    fn stanchion_profile_dprintf_chk(fd: c_int, flag: c_int, t: *const c_char, ...) -> c_int;
}

/// Exports a function of variable arguments as a jump to its body in `printf.c`. A jump as the very first
/// instruction leaves registers and stack as the caller made them.
macro_rules! jumps {
    ($($name:ident to $body:ident;)*) => {$(
        /// As in the C library.
        ///
        /// # Safety
        /// As there.
        #[unsafe(naked)]
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub unsafe extern "C" fn $name() -> c_int {
            #[cfg(target_arch = "x86_64")]
            core::arch::naked_asm!("jmp {body}", body = sym $body);
            #[cfg(target_arch = "aarch64")]
            core::arch::naked_asm!("b {body}", body = sym $body);
            #[cfg(target_arch = "riscv64")]
            core::arch::naked_asm!("tail {body}", body = sym $body);
        }
    )*};
}

jumps! {
    fprintf to stanchion_profile_fprintf;
    __fprintf_chk to stanchion_profile_fprintf_chk;
    dprintf to stanchion_profile_dprintf;
    __dprintf_chk to stanchion_profile_dprintf_chk;
}

macro_rules! seekers {
    ($($name:ident;)*) => {$(
        /// As in the C library.
        ///
        /// # Safety
        /// As there.
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub unsafe extern "C-unwind" fn $name(file: *mut File, offset: i64, whence: c_int) -> c_int {
            let result = call!($name(file, offset, whence), -1);
            // SAFETY: the caller's stream is open.
            unsafe { moved(file) };
            result
        }
    )*};
}

seekers! {
    fseek;
    fseeko;
    fseeko64;
}

/// As in the C library.
///
/// # Safety
/// As there.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn rewind(file: *mut File) {
    call!(rewind(file), ());
    // SAFETY: the caller's stream is open.
    unsafe { moved(file) };
}

/// A stream stands elsewhere now.
///
/// # Safety
/// `file` is an open stream.
unsafe fn moved(file: *mut File) {
    // SAFETY: the caller has it that the stream is open.
    unsafe {
        if let Some(counted) = fds::known(descriptor(file)) {
            counted.seek(position(file));
        }
    }
}
