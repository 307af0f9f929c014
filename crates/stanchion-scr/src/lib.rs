//! SCR's C interface (`include/scr.h`) on top of `stanchion-client`: the library `libscr.so`.
//!
//! Here, and only here, there is one global context, because the interface has none. Errors that SCR's
//! interface cannot express are said by the agent ([`stanchion::Client::warn`]), or on standard error
//! where no agent can.

#![allow(non_snake_case)]

mod asked;
mod configf;
mod job;

pub use configf::SCR_Configf;
use job::{Failure, Job};
use stanchion::{Code, Error, Offer, Words};
use stanchion_format::name::NameError;
use std::ffi::{c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

/// All went well.
pub const SCR_SUCCESS: c_int = 0;
/// It did not.
pub const SCR_FAILURE: c_int = 1;
/// Bytes of the longest name or path, the terminating zero included.
pub const SCR_MAX_FILENAME: usize = 1024;
/// Longest text for `SCR_Config`, bytes.
const CONFIG_BYTES_MAX: usize = 1 << 20;

static JOB: Mutex<Job> = Mutex::new(Job::new());
/// The process that `JOB` belongs to since `SCR_Init`; 0 before.
static OWNER: AtomicU32 = AtomicU32::new(0);

unsafe extern "C" {
    /// What the caller of `SCR_Config` frees must be malloc's.
    safe fn malloc(size: usize) -> *mut c_void;
}

/// Runs `f` on the one job. A failure is reported; a panic is one.
fn with<T>(call: &str, f: impl FnOnce(&mut Job) -> Result<T, Failure>) -> Option<T> {
    let (owner, me) = (OWNER.load(Ordering::Acquire), std::process::id());
    if owner != 0 && owner != me {
        // A forked child: its parent may hold the lock for ever, as seen from here.
        return None;
    }
    let attempt = catch_unwind(AssertUnwindSafe(|| {
        let mut job = JOB.lock().unwrap_or_else(PoisonError::into_inner);
        let done = f(&mut job);
        if let Err(failure) = &done {
            job.report(call, failure);
        }
        done.ok()
    }));
    attempt.unwrap_or_else(|payload| {
        let _ = catch_unwind(AssertUnwindSafe(|| {
            let text = payload.downcast_ref::<&str>().copied().unwrap_or("unknown");
            let failure = Failure::Client(Error::Internal { text: Words::new(text) });
            JOB.lock().unwrap_or_else(PoisonError::into_inner).report(call, &failure);
        }));
        None
    })
}

fn code(done: Option<()>) -> c_int {
    if done.is_some() { SCR_SUCCESS } else { SCR_FAILURE }
}

fn null(call: &'static str) -> Failure {
    Error::Argument { call, what: "a null pointer where one is not allowed" }.into()
}

/// A caller's string of less than `max` bytes.
///
/// # Safety
/// `text` is NULL or a string that ends with a zero.
unsafe fn string<'a>(
    call: &'static str,
    text: *const c_char,
    max: usize,
) -> Result<&'a str, Failure> {
    if text.is_null() {
        return Err(null(call));
    }
    // SAFETY: every byte up to the first zero can be read; no further one is.
    let len = (0..max).find(|i| unsafe { *text.add(*i) } == 0);
    // SAFETY: so many bytes were just read.
    let bytes = unsafe { std::slice::from_raw_parts(text.cast::<u8>(), len.unwrap_or(max)) };
    let refused = |cause| {
        let name = Words::name(&String::from_utf8_lossy(bytes));
        Failure::from(Error::Name { what: "argument", name, cause })
    };
    match std::str::from_utf8(bytes) {
        _ if len.is_none() => Err(refused(NameError::TooLong { bytes: max, max: max - 1 })),
        Ok(text) => Ok(text),
        Err(_) => Err(refused(NameError::NotText)),
    }
}

/// Copies `text` and a zero into a caller's buffer of `SCR_MAX_FILENAME` bytes.
///
/// # Safety
/// `buf` is NULL, then nothing happens, or has that many writable bytes.
unsafe fn copy_out(text: &str, buf: *mut c_char) {
    let len = text.len().min(SCR_MAX_FILENAME - 1);
    if !buf.is_null() {
        // SAFETY: `len` + 1 bytes fit, as the caller promises.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr(), buf.cast::<u8>(), len);
            *buf.add(len) = 0;
        }
    }
}

/// Stores a flag.
///
/// # Safety
/// `flag` is NULL, then nothing happens, or writable.
unsafe fn store(flag: *mut c_int, yes: bool) {
    if !flag.is_null() {
        // SAFETY: as the caller promises.
        unsafe { flag.write(c_int::from(yes)) };
    }
}

/// Joins the job. See `scr.h`.
#[unsafe(no_mangle)]
pub extern "C" fn SCR_Init() -> c_int {
    code(with("SCR_Init", |job| {
        job.init()?;
        OWNER.store(std::process::id(), Ordering::Release);
        Ok(())
    }))
}

/// Leaves the job. See `scr.h`.
#[unsafe(no_mangle)]
pub extern "C" fn SCR_Finalize() -> c_int {
    code(with("SCR_Finalize", Job::finalize))
}

/// Name and version. See `scr.h`.
#[unsafe(no_mangle)]
pub extern "C" fn SCR_Get_version() -> *mut c_char {
    let text = concat!("Stanchion ", env!("CARGO_PKG_VERSION"), " (interface of SCR v3.1.0)\0");
    // Nobody may write there; the interface has no const.
    text.as_ptr().cast_mut().cast()
}

/// Sets or asks for a setting. See `scr.h`.
///
/// # Safety
/// `config` is NULL or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn SCR_Config(config: *const c_char) -> *const c_char {
    const CALL: &str = "SCR_Config";
    if config.is_null() {
        return std::ptr::null();
    }
    let value = with(CALL, |job| {
        // SAFETY: as the caller promises.
        job.config(unsafe { string(CALL, config, CONFIG_BYTES_MAX) }?)
    });
    match value.flatten() {
        Some(value) => to_malloc(&value),
        None => std::ptr::null(),
    }
}

/// Called by `configf.c` when `SCR_Configf` cannot make its text.
#[unsafe(no_mangle)]
extern "C" fn stanchion_scr_configf_failed() -> *const c_char {
    with::<()>("SCR_Configf", |_| Err(Failure::Format));
    std::ptr::null()
}

fn to_malloc(text: &str) -> *const c_char {
    let memory = malloc(text.len() + 1).cast::<u8>();
    if !memory.is_null() {
        // SAFETY: just allocated with this size.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr(), memory, text.len());
            *memory.add(text.len()) = 0;
        }
    }
    memory.cast()
}

/// Tells where to open a file. See `scr.h`.
///
/// # Safety
/// `name` is NULL or a string, `file` NULL or a buffer of `SCR_MAX_FILENAME` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn SCR_Route_file(name: *const c_char, file: *mut c_char) -> c_int {
    const CALL: &str = "SCR_Route_file";
    code(with(CALL, |job| {
        if file.is_null() {
            return Err(null(CALL));
        }
        // SAFETY: as the caller promises. Copied, as both may be the same buffer.
        let name = unsafe { string(CALL, name, SCR_MAX_FILENAME) }.map(str::to_owned);
        // SAFETY: as the caller promises.
        unsafe { copy_out("", file) };
        let place = job.client()?.route_within(&name?, SCR_MAX_FILENAME - 1)?;
        // SAFETY: as the caller promises.
        unsafe { copy_out(&place, file) };
        Ok(())
    }))
}

/// The dataset's name, and the flag, out.
///
/// # Safety
/// `flag` is NULL or writable, `name` NULL or a buffer of `SCR_MAX_FILENAME` bytes.
unsafe fn tell(offer: Option<&Offer>, flag: *mut c_int, name: *mut c_char) {
    // SAFETY: as the caller promises.
    unsafe {
        store(flag, offer.is_some());
        copy_out(offer.map_or("", |o| &o.name), name);
    }
}

/// Is there a dataset to restart from? See `scr.h`.
///
/// # Safety
/// `flag` is NULL or writable, `name` NULL or a buffer of `SCR_MAX_FILENAME` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn SCR_Have_restart(flag: *mut c_int, name: *mut c_char) -> c_int {
    const CALL: &str = "SCR_Have_restart";
    // SAFETY: as the caller promises.
    unsafe { tell(None, flag, name) };
    code(with(CALL, |job| {
        let client = job.client()?;
        if flag.is_null() {
            return Err(null(CALL));
        }
        let offer = client.have_restart()?;
        // SAFETY: as the caller promises.
        unsafe { tell(offer.as_ref(), flag, name) };
        Ok(())
    }))
}

/// Begins to read it. See `scr.h`.
///
/// # Safety
/// `name` is NULL or a buffer of `SCR_MAX_FILENAME` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn SCR_Start_restart(name: *mut c_char) -> c_int {
    // SAFETY: as the caller promises.
    unsafe { copy_out("", name) };
    code(with("SCR_Start_restart", |job| {
        let offer = job.client()?.start_restart()?;
        // SAFETY: as the caller promises.
        unsafe { copy_out(&offer.name, name) };
        Ok(())
    }))
}

/// Ends the reading. See `scr.h`.
#[unsafe(no_mangle)]
pub extern "C" fn SCR_Complete_restart(valid: c_int) -> c_int {
    code(with("SCR_Complete_restart", |job| Ok(job.client()?.complete_restart(valid != 0)?)))
}

/// A question with a yes or no.
///
/// # Safety
/// `flag` is NULL or writable.
unsafe fn ask(
    call: &'static str,
    flag: *mut c_int,
    question: fn(&mut stanchion::Client) -> Result<bool, Error>,
) -> c_int {
    // SAFETY: as the caller promises.
    unsafe { store(flag, false) };
    code(with(call, |job| {
        let client = job.client()?;
        if flag.is_null() {
            return Err(null(call));
        }
        let yes = question(client)?;
        // SAFETY: as the caller promises.
        unsafe { store(flag, yes) };
        Ok(())
    }))
}

/// Would this be a good time for a checkpoint? See `scr.h`.
///
/// # Safety
/// `flag` is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn SCR_Need_checkpoint(flag: *mut c_int) -> c_int {
    // SAFETY: as the caller promises.
    unsafe { ask("SCR_Need_checkpoint", flag, stanchion::Client::need_checkpoint) }
}

/// Should the application stop? See `scr.h`.
///
/// # Safety
/// `flag` is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn SCR_Should_exit(flag: *mut c_int) -> c_int {
    // SAFETY: as the caller promises.
    unsafe { ask("SCR_Should_exit", flag, stanchion::Client::should_exit) }
}

fn start(call: &'static str, name: &str, flags: c_int) -> c_int {
    code(with(call, |job| {
        let flags = u32::try_from(flags)
            .map_err(|_| Error::Argument { call, what: "unknown bits in flags" })?;
        job.client()?.begin(name, flags)?;
        Ok(())
    }))
}

/// Begins a dataset. See `scr.h`.
///
/// # Safety
/// `name` is NULL or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn SCR_Start_output(name: *const c_char, flags: c_int) -> c_int {
    const CALL: &str = "SCR_Start_output";
    if name.is_null() {
        return start(CALL, "", flags);
    }
    // SAFETY: as the caller promises.
    match with(CALL, |_| unsafe { string(CALL, name, SCR_MAX_FILENAME) }) {
        Some(name) => start(CALL, name, flags),
        None => SCR_FAILURE,
    }
}

/// Begins a checkpoint with a name of the library's choice. See `scr.h`.
#[unsafe(no_mangle)]
pub extern "C" fn SCR_Start_checkpoint() -> c_int {
    start("SCR_Start_checkpoint", "", stanchion::FLAG_CHECKPOINT as c_int)
}

/// Ends the dataset. See `scr.h`.
#[unsafe(no_mangle)]
pub extern "C" fn SCR_Complete_output(valid: c_int) -> c_int {
    code(with("SCR_Complete_output", |job| Ok(job.client()?.complete(valid != 0)?)))
}

/// Ends the dataset. See `scr.h`.
#[unsafe(no_mangle)]
pub extern "C" fn SCR_Complete_checkpoint(valid: c_int) -> c_int {
    code(with("SCR_Complete_checkpoint", |job| Ok(job.client()?.complete(valid != 0)?)))
}

/// The three calls that take the name of a dataset.
///
/// # Safety
/// `name` is NULL or a string.
unsafe fn manage(
    call: &'static str,
    name: *const c_char,
    gone_is_fine: bool,
    action: fn(&mut stanchion::Client, &str) -> Result<(), Error>,
) -> c_int {
    code(with(call, |job| {
        // SAFETY: as the caller promises.
        let name = unsafe { string(call, name, SCR_MAX_FILENAME) }?;
        match action(job.client()?, name) {
            // What is to go is gone: SCR does not call that a failure.
            Err(e) if gone_is_fine && e.code() == Code::NotFound => Ok(()),
            done => Ok(done?),
        }
    }))
}

/// Makes a dataset the one to restart from. See `scr.h`.
///
/// # Safety
/// `name` is NULL or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn SCR_Current(name: *const c_char) -> c_int {
    // SAFETY: as the caller promises.
    unsafe { manage("SCR_Current", name, false, stanchion::Client::current) }
}

/// Forgets a dataset. See `scr.h`.
///
/// # Safety
/// `name` is NULL or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn SCR_Drop(name: *const c_char) -> c_int {
    // SAFETY: as the caller promises.
    unsafe { manage("SCR_Drop", name, true, stanchion::Client::drop_dataset) }
}

/// Removes a dataset with its files. See `scr.h`.
///
/// # Safety
/// `name` is NULL or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn SCR_Delete(name: *const c_char) -> c_int {
    // SAFETY: as the caller promises.
    unsafe { manage("SCR_Delete", name, true, stanchion::Client::delete) }
}
