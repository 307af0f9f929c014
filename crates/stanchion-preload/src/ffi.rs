//! The real functions, and the little of the C library that is used beside them.

use core::ffi::{c_char, c_int, c_void};
use core::ptr::null_mut;
use core::sync::atomic::{AtomicPtr, Ordering};

/// A stream of the C library.
#[repr(C)]
pub struct File {
    _private: [u8; 0],
}

/// One piece of a gathering write.
#[repr(C)]
pub struct IoVec {
    base: *mut c_void,
    len: usize,
}

/// A `va_list` as an argument: on x86_64, aarch64 and riscv64 it is passed in one register, as the address
/// of the list's state or the list itself. It is handed on as it came.
pub type VaList = *mut c_void;

unsafe extern "C" {
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
    fn __errno_location() -> *mut c_int;
    fn fileno(file: *mut File) -> c_int;
    fn ftello(file: *mut File) -> i64;
    fn getenv(name: *const c_char) -> *const c_char;
    fn strlen(text: *const c_char) -> usize;
}

/// `RTLD_NEXT`: the next one in the order of the search, after this library.
const NEXT: *mut c_void = usize::MAX as *mut c_void;
/// The function does not exist.
pub const ENOSYS: c_int = 38;

/// errno of this thread.
pub fn errno() -> c_int {
    // SAFETY: the C library gives the address of this thread's own errno, valid while the thread lives.
    unsafe { *__errno_location() }
}

/// Sets errno of this thread.
pub fn set_errno(value: c_int) {
    // SAFETY: as in `errno`.
    unsafe { *__errno_location() = value }
}

/// Looks a function up behind this library.
#[cold]
pub fn look_up(name: &core::ffi::CStr, at: &AtomicPtr<c_void>) -> *mut c_void {
    let before = errno();
    // SAFETY: the name ends with a zero; RTLD_NEXT is a handle that dlsym knows.
    let found = unsafe { dlsym(NEXT, name.as_ptr()) };
    set_errno(before);
    at.store(found, Ordering::Release);
    found
}

/// The descriptor of a stream, or -1; errno stays.
///
/// # Safety
/// `file` is an open stream.
pub unsafe fn descriptor(file: *mut File) -> c_int {
    let before = errno();
    // SAFETY: the caller has it that the stream is open.
    let fd = unsafe { fileno(file) };
    set_errno(before);
    fd
}

/// Where a stream stands; errno stays.
///
/// # Safety
/// `file` is an open stream.
pub unsafe fn position(file: *mut File) -> i64 {
    let before = errno();
    // SAFETY: the caller has it that the stream is open.
    let at = unsafe { ftello(file) };
    set_errno(before);
    at
}

/// Length of a text.
///
/// # Safety
/// `text` ends with a zero.
pub unsafe fn length(text: *const c_char) -> u64 {
    // SAFETY: the caller has it that there is a zero.
    unsafe { strlen(text) as u64 }
}

/// Copies a variable's value with a zero behind it; `None` if it is not there or does not fit.
///
/// To be called before the program's own code runs: nobody changes the environment meanwhile.
pub fn variable(name: &core::ffi::CStr, into: &mut [u8]) -> Option<usize> {
    // SAFETY: the name ends with a zero; the answer is NULL or a text that ends with a zero.
    let value = unsafe { getenv(name.as_ptr()) };
    if value.is_null() {
        return None;
    }
    // SAFETY: not NULL, hence a text with a zero that nobody changes meanwhile.
    let value = unsafe { core::ffi::CStr::from_ptr(value) }.to_bytes_with_nul();
    into.get_mut(..value.len())?.copy_from_slice(value);
    Some(value.len().wrapping_sub(1))
}

/// Declares the real functions: each is looked up once, all of them before the program begins.
macro_rules! reals {
    ($($name:ident($($argument:ty),*) -> $result:ty;)*) => {
        /// The functions behind this library.
        pub mod real {
            use super::*;
            $(
                /// The real one; `None` if the C library has none.
                #[inline]
                pub fn $name() -> Option<unsafe extern "C-unwind" fn($($argument),*) -> $result> {
                    let mut found = at::$name.load(Ordering::Acquire);
                    if found.is_null() {
                        found = name_of::$name();
                    }
                    // SAFETY: NULL is None; anything else is what the dynamic linker has under the name of
                    // this function, whose type the C library's documentation gives.
                    unsafe { core::mem::transmute(found) }
                }
            )*
        }
        #[allow(non_upper_case_globals, reason = "named like the functions they stand for")]
        mod at {
            use super::*;
            $(pub static $name: AtomicPtr<c_void> = AtomicPtr::new(null_mut());)*
        }
        mod name_of {
            use super::*;
            $(
                #[cold]
                pub fn $name() -> *mut c_void {
                    const NAME: &core::ffi::CStr = match core::ffi::CStr::from_bytes_with_nul(
                        concat!(stringify!($name), "\0").as_bytes(),
                    ) {
                        Ok(name) => name,
                        Err(_) => c"",
                    };
                    look_up(NAME, &at::$name)
                }
            )*
        }
        /// Looks all of them up, so that no signal handler has to.
        pub fn look_all_up() {
            $(name_of::$name();)*
        }
    };
}

reals! {
    open(*const c_char, c_int, u32) -> c_int;
    open64(*const c_char, c_int, u32) -> c_int;
    openat(c_int, *const c_char, c_int, u32) -> c_int;
    openat64(c_int, *const c_char, c_int, u32) -> c_int;
    creat(*const c_char, u32) -> c_int;
    creat64(*const c_char, u32) -> c_int;
    close(c_int) -> c_int;
    close_range(u32, u32, c_int) -> c_int;
    closefrom(c_int) -> ();
    dup(c_int) -> c_int;
    dup2(c_int, c_int) -> c_int;
    dup3(c_int, c_int, c_int) -> c_int;
    write(c_int, *const c_void, usize) -> isize;
    pwrite(c_int, *const c_void, usize, i64) -> isize;
    pwrite64(c_int, *const c_void, usize, i64) -> isize;
    writev(c_int, *const IoVec, c_int) -> isize;
    pwritev(c_int, *const IoVec, c_int, i64) -> isize;
    pwritev64(c_int, *const IoVec, c_int, i64) -> isize;
    pwritev2(c_int, *const IoVec, c_int, i64, c_int) -> isize;
    pwritev64v2(c_int, *const IoVec, c_int, i64, c_int) -> isize;
    lseek(c_int, i64, c_int) -> i64;
    lseek64(c_int, i64, c_int) -> i64;
    fsync(c_int) -> c_int;
    fdatasync(c_int) -> c_int;
    rename(*const c_char, *const c_char) -> c_int;
    renameat(c_int, *const c_char, c_int, *const c_char) -> c_int;
    renameat2(c_int, *const c_char, c_int, *const c_char, u32) -> c_int;
    mmap(*mut c_void, usize, c_int, c_int, c_int, i64) -> *mut c_void;
    mmap64(*mut c_void, usize, c_int, c_int, c_int, i64) -> *mut c_void;
    fopen(*const c_char, *const c_char) -> *mut File;
    fopen64(*const c_char, *const c_char) -> *mut File;
    freopen(*const c_char, *const c_char, *mut File) -> *mut File;
    freopen64(*const c_char, *const c_char, *mut File) -> *mut File;
    fclose(*mut File) -> c_int;
    fflush(*mut File) -> c_int;
    fwrite(*const c_void, usize, usize, *mut File) -> usize;
    fwrite_unlocked(*const c_void, usize, usize, *mut File) -> usize;
    fputs(*const c_char, *mut File) -> c_int;
    fputs_unlocked(*const c_char, *mut File) -> c_int;
    fputc(c_int, *mut File) -> c_int;
    putc(c_int, *mut File) -> c_int;
    vfprintf(*mut File, *const c_char, VaList) -> c_int;
    __vfprintf_chk(*mut File, c_int, *const c_char, VaList) -> c_int;
    vdprintf(c_int, *const c_char, VaList) -> c_int;
    __vdprintf_chk(c_int, c_int, *const c_char, VaList) -> c_int;
    fseek(*mut File, i64, c_int) -> c_int;
    fseeko(*mut File, i64, c_int) -> c_int;
    fseeko64(*mut File, i64, c_int) -> c_int;
    rewind(*mut File) -> ();
}
