//! The C ABI: `include/stanchion.h` says what each function means.
//!
//! Nothing panics across the boundary, no pointer is believed without its length, and a process that
//! was forked gets an error instead of its parent's connection.

#![allow(non_camel_case_types)]

use crate::client::{Client, Options};
use crate::error::{Error, Words};
use stanchion_format::config;
use stanchion_format::ids::{DatasetNo, Level};
use stanchion_format::limits;
use stanchion_format::name::NameError;
use std::any::Any;
use std::collections::BTreeMap;
use std::ffi::{c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

pub mod regions;
pub mod streams;

/// Longest text that is taken from a caller, bytes.
const ARGUMENT_BYTES_MAX: usize = 1 << 20;
/// Smallest buffer for a dataset's name, bytes.
pub const STN_NAME_SIZE: usize = limits::DATASET_NAME_BYTES_MAX + 1;
/// `STN_LEVEL_CACHED`.
pub const STN_LEVEL_CACHED: c_int = 1;
/// `STN_LEVEL_PROTECTED`.
pub const STN_LEVEL_PROTECTED: c_int = 2;
/// `STN_LEVEL_PERSISTENT`; 3 is kept for datasets on staging servers.
pub const STN_LEVEL_PERSISTENT: c_int = 4;

/// Options of [`stn_init`]. `struct_size` tells which fields the caller knows; those it does not know
/// count as zero, those that only a newer caller knows must be.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct stn_options {
    struct_size: u32,
    flags: u32,
    rank: i64,
    ranks: i64,
    nodes: *const c_char,
    nodes_len: usize,
    settings: *const c_char,
    settings_len: usize,
}

/// A context. Only pointers to it leave the library.
#[derive(Debug)]
pub struct stn_ctx {
    pid: u32,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    /// `None`: initialisation failed, and there is nothing but its error.
    client: Option<Client>,
    error: String,
    regions: Regions,
}

/// What is protected: where it begins, and its bytes.
type Regions = BTreeMap<u64, (*mut u8, usize)>;

/// What is read of [`stn_options`], owned.
#[derive(Default)]
struct Wishes {
    identity: Option<(u32, u32)>,
    nodes: Option<Vec<PathBuf>>,
    settings: Vec<(String, String)>,
}

fn bug(payload: Box<dyn Any + Send>) -> Error {
    let text = payload.downcast_ref::<&str>().map(|s| (*s).to_owned());
    let text = text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_default();
    Error::Internal { text: Words::new(&text) }
}

/// Runs `f`; a panic becomes [`Error::Internal`].
fn guarded<T>(f: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|payload| Err(bug(payload)))
}

impl stn_ctx {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        // A panic in another call is no reason to refuse this one: the client is in a phase in any case.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Calls `f` with the context's client, keeps the error's text, returns its code.
///
/// # Safety
/// `ctx` is NULL or came from [`stn_init`] and was not given to [`stn_free`].
unsafe fn call(ctx: *mut stn_ctx, f: impl FnOnce(&mut Client) -> Result<(), Error>) -> c_int {
    // SAFETY: as the caller promises.
    unsafe { call_with_regions(ctx, |client, _| f(client)) }
}

/// As [`call`], with the regions.
///
/// # Safety
/// As [`call`].
unsafe fn call_with_regions(
    ctx: *mut stn_ctx,
    f: impl FnOnce(&mut Client, &mut Regions) -> Result<(), Error>,
) -> c_int {
    // SAFETY: as the caller promises; only shared references are made, the rest is behind the lock.
    let Some(ctx) = (unsafe { ctx.as_ref() }) else { return invalid() };
    if ctx.pid != std::process::id() {
        // The lock may have been held by a thread that does not exist here: it is not touched.
        return code_of(&Error::Forked { owner: ctx.pid });
    }
    let inner = &mut *ctx.lock();
    let done = match &mut inner.client {
        // The text of the failed initialisation stays.
        None => return code_of(&Error::Dead { verb: "init" }),
        Some(client) => guarded(|| f(client, &mut inner.regions)),
    };
    match done {
        Ok(()) => 0,
        Err(error) => {
            inner.error = error.to_string();
            code_of(&error)
        }
    }
}

fn code_of(error: &Error) -> c_int {
    -(error.code() as c_int)
}

fn invalid() -> c_int {
    -(stanchion_format::client::Code::Invalid as c_int)
}

/// A caller's text.
///
/// # Safety
/// `text` is NULL or points to `len` readable bytes, unchanged while the result lives.
unsafe fn text<'a>(what: &'static str, text: *const c_char, len: usize) -> Result<&'a str, Error> {
    if len == 0 {
        return Ok("");
    }
    if text.is_null() {
        return Err(Error::Argument { call: what, what: "a null pointer with a length" });
    }
    let refuse = |cause| Error::Name { what, name: Words::name(""), cause };
    if len > ARGUMENT_BYTES_MAX {
        return Err(refuse(NameError::TooLong { bytes: len, max: ARGUMENT_BYTES_MAX }));
    }
    // SAFETY: not NULL, and the caller vouches for `len` bytes, which is below isize::MAX.
    let bytes = unsafe { std::slice::from_raw_parts(text.cast::<u8>(), len) };
    std::str::from_utf8(bytes).map_err(|_| refuse(NameError::NotText))
}

/// Copies `text` and a zero into a caller's buffer, as much as fits; with `len` 0 nothing.
///
/// # Safety
/// `buf` points to `len` writable bytes, or `len` is 0.
unsafe fn copy_out(text: &str, buf: *mut c_char, len: usize) {
    if buf.is_null() || len == 0 {
        return;
    }
    let mut end = text.len().min(len - 1);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    // SAFETY: `end` < `len`, for which the caller vouches; text and buffer are different objects.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr(), buf.cast::<u8>(), end);
        *buf.add(end) = 0;
    }
}

/// Stores through an optional output pointer.
///
/// # Safety
/// `to` is NULL or points to a writable, aligned `T`.
unsafe fn store<T>(to: *mut T, value: T) {
    if !to.is_null() {
        // SAFETY: as the caller promises.
        unsafe { to.write(value) };
    }
}

/// Refuses a missing output pointer, and a buffer that could be too small, before anything is asked.
fn check_out<T>(call: &'static str, pointer: *mut T) -> Result<(), Error> {
    if pointer.is_null() {
        return Err(Error::Argument { call, what: "a null pointer for the result" });
    }
    Ok(())
}

fn check_name_buffer(call: &'static str, buf: *mut c_char, len: usize) -> Result<(), Error> {
    if buf.is_null() || len >= STN_NAME_SIZE {
        return Ok(());
    }
    Err(Error::Argument { call, what: "a name needs a buffer of STN_NAME_SIZE bytes" })
}

/// # Safety
/// As [`stn_init`] says of `options`.
unsafe fn read_options(options: *const stn_options) -> Result<Wishes, Error> {
    const CALL: &str = "init";
    let bad = |what| Err(Error::Argument { call: CALL, what });
    if options.is_null() {
        return Ok(Wishes::default());
    }
    let known = size_of::<stn_options>();
    // SAFETY: every version begins with the size.
    let size = unsafe { (*options).struct_size } as usize;
    if !(8..=4096).contains(&size) {
        return bad("struct_size is not sizeof(stn_options)");
    }
    // Zero is a value of each field but rank and ranks, for which absent is -1.
    let mut o = stn_options {
        struct_size: 0,
        flags: 0,
        rank: -1,
        ranks: -1,
        nodes: std::ptr::null(),
        nodes_len: 0,
        settings: std::ptr::null(),
        settings_len: 0,
    };
    // SAFETY: the caller vouches for `size` bytes; `o` has `known`, and is plain data.
    unsafe {
        let (from, to) = (options.cast::<u8>(), (&raw mut o).cast::<u8>());
        std::ptr::copy_nonoverlapping(from, to, size.min(known));
        if size > known {
            let tail = std::slice::from_raw_parts(from.add(known), size - known);
            if tail.iter().any(|b| *b != 0) {
                return bad("an option that this version does not know");
            }
        }
    }
    if o.flags != 0 {
        return bad("unknown bits in flags");
    }
    let identity = match (u32::try_from(o.rank), u32::try_from(o.ranks)) {
        _ if o.rank == -1 && o.ranks == -1 => None,
        (Ok(rank), Ok(ranks)) => Some((rank, ranks)),
        _ => return bad("rank and ranks are two numbers, or both -1"),
    };
    // SAFETY: the caller vouches for both texts.
    let (nodes, settings) = unsafe {
        (text("nodes", o.nodes, o.nodes_len)?, text("settings", o.settings, o.settings_len)?)
    };
    let nodes = (!nodes.is_empty()).then(|| nodes.split(':').map(PathBuf::from).collect());
    Ok(Wishes { identity, nodes, settings: config::from_file(settings)?.0.pairs() })
}

/// See `stanchion.h`.
///
/// # Safety
/// `options` is NULL or points to `struct_size` bytes with texts of the lengths they say; `ctx` points
/// to a writable pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stn_init(options: *const stn_options, ctx: *mut *mut stn_ctx) -> c_int {
    if ctx.is_null() {
        return invalid();
    }
    let connected = guarded(|| {
        // SAFETY: as the caller promises.
        let Wishes { identity, nodes, settings } = unsafe { read_options(options) }?;
        Client::connect(&Options { identity, nodes, settings, ..Options::from_environment() })
    });
    let (code, client, error) = match connected {
        Ok(client) => (0, Some(client), String::new()),
        Err(error) => (code_of(&error), None, error.to_string()),
    };
    let inner = Mutex::new(Inner { client, error, regions: Regions::new() });
    // SAFETY: not NULL, and the caller vouches for it.
    unsafe { ctx.write(Box::into_raw(Box::new(stn_ctx { pid: std::process::id(), inner }))) };
    code
}

/// See `stanchion.h`.
///
/// # Safety
/// `ctx` is NULL or a context that is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stn_free(ctx: *mut stn_ctx) {
    // SAFETY: as the caller promises.
    let owner = unsafe { ctx.as_ref() }.map(|c| c.pid);
    // A forked child leaves it alone: another thread may have been changing it at the fork.
    if owner == Some(std::process::id()) {
        let _ = guarded(|| {
            // SAFETY: made by Box::into_raw in stn_init, and given back once.
            drop(unsafe { Box::from_raw(ctx) });
            Ok(())
        });
    }
}

/// See `stanchion.h`.
///
/// # Safety
/// `ctx` is NULL or a context; `buf` has room for `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stn_error_text(ctx: *mut stn_ctx, buf: *mut c_char, len: usize) -> usize {
    let forked;
    // SAFETY: as the caller promises.
    let Some(ctx) = (unsafe { ctx.as_ref() }) else {
        // SAFETY: as the caller promises.
        unsafe { copy_out("", buf, len) };
        return 0;
    };
    let guard;
    let text = if ctx.pid == std::process::id() {
        guard = match ctx.inner.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => ctx.lock(),
        };
        guard.error.as_str()
    } else {
        forked = Error::Forked { owner: ctx.pid }.to_string();
        forked.as_str()
    };
    // SAFETY: as the caller promises.
    unsafe { copy_out(text, buf, len) };
    text.len()
}

/// See `stanchion.h`.
#[unsafe(no_mangle)]
pub extern "C" fn stn_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// See `stanchion.h`.
///
/// # Safety
/// `ctx` is NULL or a context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stn_finalize(ctx: *mut stn_ctx) -> c_int {
    // SAFETY: as the caller promises.
    unsafe { call(ctx, Client::finalize) }
}

/// See `stanchion.h`.
///
/// # Safety
/// `ctx` is NULL or a context; the texts have their lengths.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stn_config_set(
    ctx: *mut stn_ctx,
    name: *const c_char,
    name_len: usize,
    value: *const c_char,
    value_len: usize,
) -> c_int {
    // SAFETY: as the caller promises.
    unsafe {
        call(ctx, |c| c.set(text("setting", name, name_len)?, text("value", value, value_len)?))
    }
}

/// See `stanchion.h`.
///
/// # Safety
/// `ctx` is NULL or a context; the text has its length, the buffer its room.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stn_config_get(
    ctx: *mut stn_ctx,
    name: *const c_char,
    name_len: usize,
    buf: *mut c_char,
    len: usize,
) -> c_int {
    const CALL: &str = "config_get";
    // SAFETY: as the caller promises.
    unsafe {
        call(ctx, |c| {
            check_out(CALL, buf)?;
            copy_out("", buf, len);
            let value = c.get(text("setting", name, name_len)?)?.unwrap_or_default();
            if value.len() >= len {
                let have = len.saturating_sub(1);
                return Err(Error::Buffer { call: CALL, have, need: value.len() });
            }
            copy_out(&value, buf, len);
            Ok(())
        })
    }
}

/// The two questions with a yes or no.
///
/// # Safety
/// `ctx` is NULL or a context, `flag` NULL or writable.
unsafe fn ask_flag(
    ctx: *mut stn_ctx,
    flag: *mut c_int,
    question: fn(&mut Client) -> Result<bool, Error>,
) -> c_int {
    // SAFETY: as the caller promises.
    unsafe {
        store(flag, 0);
        call(ctx, |c| {
            check_out("flag", flag)?;
            let yes = question(c)?;
            store(flag, c_int::from(yes));
            Ok(())
        })
    }
}

/// See `stanchion.h`.
///
/// # Safety
/// `ctx` is NULL or a context, `flag` NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stn_need_checkpoint(ctx: *mut stn_ctx, flag: *mut c_int) -> c_int {
    // SAFETY: as the caller promises.
    unsafe { ask_flag(ctx, flag, Client::need_checkpoint) }
}

/// See `stanchion.h`.
///
/// # Safety
/// `ctx` is NULL or a context, `flag` NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stn_should_exit(ctx: *mut stn_ctx, flag: *mut c_int) -> c_int {
    // SAFETY: as the caller promises.
    unsafe { ask_flag(ctx, flag, Client::should_exit) }
}

/// See `stanchion.h`.
///
/// # Safety
/// `ctx` is NULL or a context; the text has its length; `no` is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stn_begin(
    ctx: *mut stn_ctx,
    name: *const c_char,
    name_len: usize,
    flags: u32,
    no: *mut u64,
) -> c_int {
    // SAFETY: as the caller promises.
    unsafe {
        store(no, 0);
        call(ctx, |c| {
            let begun = c.begin(text("dataset", name, name_len)?, flags)?;
            store(no, begun.no.0);
            Ok(())
        })
    }
}

/// See `stanchion.h`.
///
/// # Safety
/// `ctx` is NULL or a context; the text has its length, the buffer its room.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stn_route(
    ctx: *mut stn_ctx,
    path: *const c_char,
    path_len: usize,
    buf: *mut c_char,
    len: usize,
) -> c_int {
    // SAFETY: as the caller promises. The name may lie in the buffer: it is copied before.
    unsafe {
        call(ctx, |c| {
            check_out("route", buf)?;
            let path = text("file", path, path_len)?.to_owned();
            copy_out("", buf, len);
            let place = c.route_within(&path, len.saturating_sub(1))?;
            copy_out(&place, buf, len);
            Ok(())
        })
    }
}

/// See `stanchion.h`.
///
/// # Safety
/// `ctx` is NULL or a context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stn_complete(ctx: *mut stn_ctx, valid: c_int) -> c_int {
    // SAFETY: as the caller promises.
    unsafe { call(ctx, |c| c.complete(valid != 0)) }
}

/// See `stanchion.h`.
///
/// # Safety
/// `ctx` is NULL or a context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stn_wait(
    ctx: *mut stn_ctx,
    dataset_no: u64,
    level: c_int,
    timeout_ms: u64,
) -> c_int {
    // SAFETY: as the caller promises.
    unsafe {
        call(ctx, |c| {
            let level = match level {
                STN_LEVEL_CACHED => Level::Cached,
                STN_LEVEL_PROTECTED => Level::Protected,
                STN_LEVEL_PERSISTENT => Level::Persistent,
                _ => return Err(Error::Argument { call: "wait", what: "no such level" }),
            };
            c.wait(DatasetNo(dataset_no), level, timeout_ms)
        })
    }
}

/// See `stanchion.h`.
///
/// # Safety
/// `ctx` is NULL or a context; `flag` and `no` are NULL or writable; the buffer has its room.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stn_have_restart(
    ctx: *mut stn_ctx,
    flag: *mut c_int,
    name: *mut c_char,
    name_size: usize,
    no: *mut u64,
) -> c_int {
    const CALL: &str = "have_restart";
    // SAFETY: as the caller promises.
    unsafe {
        store(flag, 0);
        store(no, 0);
        copy_out("", name, name_size);
        call(ctx, |c| {
            check_out(CALL, flag)?;
            check_name_buffer(CALL, name, name_size)?;
            if let Some(offer) = c.have_restart()? {
                store(flag, 1);
                store(no, offer.no.0);
                copy_out(&offer.name, name, name_size);
            }
            Ok(())
        })
    }
}

/// See `stanchion.h`.
///
/// # Safety
/// `ctx` is NULL or a context; `no` is NULL or writable; the buffer has its room.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stn_start_restart(
    ctx: *mut stn_ctx,
    name: *mut c_char,
    name_size: usize,
    no: *mut u64,
) -> c_int {
    // SAFETY: as the caller promises.
    unsafe {
        store(no, 0);
        copy_out("", name, name_size);
        call(ctx, |c| {
            check_name_buffer("start_restart", name, name_size)?;
            let offer = c.start_restart()?;
            store(no, offer.no.0);
            copy_out(&offer.name, name, name_size);
            Ok(())
        })
    }
}

/// See `stanchion.h`.
///
/// # Safety
/// `ctx` is NULL or a context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stn_complete_restart(ctx: *mut stn_ctx, valid: c_int) -> c_int {
    // SAFETY: as the caller promises.
    unsafe { call(ctx, |c| c.complete_restart(valid != 0)) }
}

/// See `stanchion.h`.
///
/// # Safety
/// `ctx` is NULL or a context; the text has its length.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stn_current(
    ctx: *mut stn_ctx,
    name: *const c_char,
    name_len: usize,
) -> c_int {
    // SAFETY: as the caller promises.
    unsafe { call(ctx, |c| c.current(text("dataset", name, name_len)?)) }
}

/// See `stanchion.h`.
///
/// # Safety
/// `ctx` is NULL or a context; the text has its length.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stn_drop(
    ctx: *mut stn_ctx,
    name: *const c_char,
    name_len: usize,
) -> c_int {
    // SAFETY: as the caller promises.
    unsafe { call(ctx, |c| c.drop_dataset(text("dataset", name, name_len)?)) }
}

/// See `stanchion.h`.
///
/// # Safety
/// `ctx` is NULL or a context; the text has its length.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stn_delete(
    ctx: *mut stn_ctx,
    name: *const c_char,
    name_len: usize,
) -> c_int {
    // SAFETY: as the caller promises.
    unsafe { call(ctx, |c| c.delete(text("dataset", name, name_len)?)) }
}

/// See `stanchion.h`.
///
/// # Safety
/// `ctx` is NULL or a context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stn_barrier(ctx: *mut stn_ctx) -> c_int {
    // SAFETY: as the caller promises.
    unsafe { call(ctx, Client::barrier) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dead(pid: u32) -> stn_ctx {
        let inner =
            Mutex::new(Inner { client: None, error: "no agent".into(), regions: Regions::new() });
        stn_ctx { pid, inner }
    }

    fn error_text(ctx: &mut stn_ctx, room: usize) -> (usize, String) {
        let mut buf = vec![1u8; room + 1];
        // SAFETY: the context lives, and the buffer has its room.
        let len = unsafe { stn_error_text(ctx, buf.as_mut_ptr().cast(), room) };
        assert_eq!(buf[room], 1, "nothing beyond the buffer");
        let end = buf.iter().position(|b| *b == 0).unwrap_or(0);
        (len, String::from_utf8(buf[..end].to_vec()).unwrap())
    }

    #[test]
    fn a_panic_becomes_a_code() {
        // FM-V5
        let error = guarded::<()>(|| panic!("the {}th bug", 4)).unwrap_err();
        assert_eq!(code_of(&error), -15);
        assert!(error.to_string().contains("the 4th bug"));
    }

    #[test]
    fn texts_are_cut_to_their_buffers() {
        let mut ctx = dead(std::process::id());
        assert_eq!(error_text(&mut ctx, 64), (8, "no agent".into()));
        assert_eq!(error_text(&mut ctx, 3), (8, "no".into()));
        assert_eq!(error_text(&mut ctx, 1), (8, String::new()));
        assert_eq!(error_text(&mut ctx, 0).0, 8);
        ctx.lock().error = "aä".into();
        assert_eq!(error_text(&mut ctx, 3), (3, "a".into()), "no half characters");
    }

    #[test]
    fn null_and_dead_contexts_are_codes() {
        let mut ctx = dead(std::process::id());
        // SAFETY: NULL is allowed everywhere, and the context lives.
        unsafe {
            assert_eq!(stn_barrier(std::ptr::null_mut()), -1);
            assert_eq!(stn_init(std::ptr::null(), std::ptr::null_mut()), -1);
            stn_free(std::ptr::null_mut());
            assert_eq!(stn_error_text(std::ptr::null_mut(), std::ptr::null_mut(), 9), 0);
            assert_eq!(stn_barrier(&mut ctx), -4);
            let mut flag = 7;
            assert_eq!(stn_need_checkpoint(&mut ctx, &mut flag), -4);
            assert_eq!(flag, 0);
        }
        assert_eq!(error_text(&mut ctx, 64).1, "no agent", "the first error stays");
    }

    #[test]
    fn a_child_process_is_refused_without_touching_the_lock() {
        let mut ctx = dead(std::process::id().wrapping_add(1));
        let pointer: *mut stn_ctx = &mut ctx;
        // SAFETY: the context lives; the lock is held as by a thread that a fork left behind.
        unsafe {
            let _held = (*pointer).lock();
            assert_eq!(stn_barrier(pointer), -2);
            assert!(stn_error_text(pointer, std::ptr::null_mut(), 0) > 0);
            stn_free(pointer);
        }
    }

    #[test]
    fn options_of_other_versions() {
        let full = stn_options {
            struct_size: size_of::<stn_options>() as u32,
            flags: 0,
            rank: 1,
            ranks: 2,
            nodes: c"/a:/b".as_ptr(),
            nodes_len: 5,
            settings: c"flush_every = 3".as_ptr(),
            settings_len: 15,
        };
        // SAFETY: all pointers are to live data of the size they say.
        unsafe {
            let wishes = read_options(&full).unwrap();
            assert_eq!(wishes.identity, Some((1, 2)));
            assert_eq!(wishes.nodes.unwrap().len(), 2);
            assert_eq!(wishes.settings, [("flush_every".to_owned(), "3".to_owned())]);
            let older = stn_options { struct_size: 24, ..full };
            assert!(read_options(&older).unwrap().nodes.is_none());
            assert!(read_options(&stn_options { struct_size: 0, ..full }).is_err());
            assert!(read_options(&stn_options { flags: 1, ..full }).is_err());
            assert!(read_options(&stn_options { rank: -1, ..full }).is_err());
            #[repr(C)]
            struct Newer {
                known: stn_options,
                more: u64,
            }
            let known = stn_options { struct_size: size_of::<Newer>() as u32, ..full };
            let newer = Newer { known, more: 0 };
            assert!(read_options((&raw const newer).cast()).is_ok());
            let newer = Newer { known, more: 1 };
            assert!(read_options((&raw const newer).cast()).is_err());
        }
    }
}
