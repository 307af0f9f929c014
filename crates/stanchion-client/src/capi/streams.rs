//! Streams across the C boundary.

use super::{Error, call, check_out, stn_ctx, store, text};
use crate::client::streams::{Mode, StreamId};
use std::ffi::{c_char, c_int, c_void};

/// `STN_READ`.
pub const STN_READ: c_int = 1;
/// `STN_WRITE`.
pub const STN_WRITE: c_int = 2;

/// See `stanchion.h`.
///
/// # Safety
/// `ctx` is NULL or a context; the text has its length; `stream` is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stn_open(
    ctx: *mut stn_ctx,
    path: *const c_char,
    path_len: usize,
    mode: c_int,
    stream: *mut u64,
) -> c_int {
    const CALL: &str = "open";
    // SAFETY: as the caller promises.
    unsafe {
        store(stream, 0);
        call(ctx, |c| {
            check_out(CALL, stream)?;
            let mode = match mode {
                STN_READ => Mode::Read,
                STN_WRITE => Mode::Write,
                _ => return Err(Error::Argument { call: CALL, what: "no such mode" }),
            };
            let id = c.stream_open(text("file", path, path_len)?, mode)?;
            store(stream, id.0);
            Ok(())
        })
    }
}

/// A null pointer with a size, or a size that no memory has, is refused.
fn check_memory(call: &'static str, buf: *const c_void, bytes: usize) -> Result<(), Error> {
    let refuse = |what| Err(Error::Argument { call, what });
    if buf.is_null() && bytes != 0 {
        return refuse("a null pointer with a size");
    }
    if isize::try_from(bytes).is_err() || (buf as usize).checked_add(bytes).is_none() {
        return refuse("the buffer goes beyond the address space");
    }
    Ok(())
}

/// See `stanchion.h`.
///
/// # Safety
/// `ctx` is NULL or a context; `buf` is NULL with 0 bytes or points to `bytes` readable bytes that nobody changes
/// meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stn_write(
    ctx: *mut stn_ctx,
    stream: u64,
    buf: *const c_void,
    bytes: usize,
) -> c_int {
    // SAFETY: as the caller promises; pointer and size were looked at before they become a slice.
    unsafe {
        call(ctx, |c| {
            check_memory("write", buf, bytes)?;
            let bytes = match bytes {
                0 => &[],
                bytes => std::slice::from_raw_parts(buf.cast::<u8>(), bytes),
            };
            // `call` has looked at the process.
            c.write_here(StreamId(stream), bytes)
        })
    }
}

/// See `stanchion.h`.
///
/// # Safety
/// `ctx` is NULL or a context; `buf` is NULL with 0 bytes or points to `bytes` writable bytes that nobody else uses
/// meanwhile; `got` is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stn_read(
    ctx: *mut stn_ctx,
    stream: u64,
    buf: *mut c_void,
    bytes: usize,
    got: *mut usize,
) -> c_int {
    const CALL: &str = "read";
    // SAFETY: as the caller promises; pointer and size were looked at before they become a slice. What it holds need
    // not be initialised for the caller, but bytes that are only written over may have any value.
    unsafe {
        store(got, 0);
        call(ctx, |c| {
            check_out(CALL, got)?;
            check_memory(CALL, buf, bytes)?;
            let buf = match bytes {
                0 => &mut [],
                bytes => std::slice::from_raw_parts_mut(buf.cast::<u8>(), bytes),
            };
            let read = c.stream_read(StreamId(stream), buf)?;
            store(got, read);
            Ok(())
        })
    }
}

/// See `stanchion.h`.
///
/// # Safety
/// `ctx` is NULL or a context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stn_seek(ctx: *mut stn_ctx, stream: u64, offset: u64) -> c_int {
    // SAFETY: as the caller promises.
    unsafe { call(ctx, |c| c.stream_seek(StreamId(stream), offset)) }
}

/// See `stanchion.h`.
///
/// # Safety
/// `ctx` is NULL or a context; `bytes` is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stn_size(ctx: *mut stn_ctx, stream: u64, bytes: *mut u64) -> c_int {
    // SAFETY: as the caller promises.
    unsafe {
        store(bytes, 0);
        call(ctx, |c| {
            check_out("size", bytes)?;
            let size = c.stream_size(StreamId(stream))?;
            store(bytes, size);
            Ok(())
        })
    }
}

/// See `stanchion.h`.
///
/// # Safety
/// `ctx` is NULL or a context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stn_close(ctx: *mut stn_ctx, stream: u64) -> c_int {
    // SAFETY: as the caller promises.
    unsafe { call(ctx, |c| c.stream_close(StreamId(stream))) }
}
