//! What the tests of memory share: mappings, and children as root and as an ordinary user.
#![allow(dead_code)]

use std::panic::{AssertUnwindSafe, catch_unwind};

pub const PAGE: usize = 4096;

/// A mapping that is given back at the end, unless the test has done so.
pub struct Map {
    pub at: *mut u8,
    pub len: usize,
}

impl Map {
    pub fn private(len: usize) -> Map {
        Map::new(len, libc::MAP_PRIVATE)
    }

    pub fn shared(len: usize) -> Map {
        Map::new(len, libc::MAP_SHARED)
    }

    fn new(len: usize, kind: i32) -> Map {
        // SAFETY: a new mapping where the kernel likes.
        let at = unsafe {
            let prot = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(std::ptr::null_mut(), len, prot, kind | libc::MAP_ANONYMOUS, -1, 0)
        };
        assert_ne!(at, libc::MAP_FAILED);
        Map { at: at.cast(), len }
    }

    /// A new private mapping in the place of a part.
    pub fn replace(&self, offset: usize, len: usize) {
        // SAFETY: the place is ours.
        let at = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
            let prot = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(self.ptr(offset).cast(), len, prot, flags, -1, 0)
        };
        assert_eq!(at, self.ptr(offset).cast());
    }

    pub fn unmap(&self, offset: usize, len: usize) {
        // SAFETY: the place is ours, and the test looks at it no more.
        assert_eq!(unsafe { libc::munmap(self.ptr(offset).cast(), len) }, 0);
    }

    pub fn advise(&self, offset: usize, len: usize, advice: i32) {
        // SAFETY: the place is ours.
        assert_eq!(unsafe { libc::madvise(self.ptr(offset).cast(), len, advice) }, 0);
    }

    pub fn ptr(&self, offset: usize) -> *mut u8 {
        assert!(offset <= self.len);
        self.at.wrapping_add(offset)
    }

    pub fn set(&self, offset: usize, value: u8) {
        assert!(offset < self.len);
        // SAFETY: the test has it mapped; others may look at it, so it is a volatile write.
        unsafe { self.at.add(offset).write_volatile(value) }
    }

    pub fn get(&self, offset: usize) -> u8 {
        assert!(offset < self.len);
        // SAFETY: the test has it mapped.
        unsafe { self.at.add(offset).read_volatile() }
    }

    /// What it holds now.
    pub fn bytes(&self, offset: usize, len: usize) -> Vec<u8> {
        assert!(offset + len <= self.len);
        let mut out = vec![0; len];
        // SAFETY: the test has it mapped, and no thread writes to it meanwhile.
        unsafe { std::ptr::copy_nonoverlapping(self.ptr(offset), out.as_mut_ptr(), len) };
        out
    }

    /// A pattern that differs from page to page.
    pub fn fill(&self, seed: usize) {
        for page in 0..self.len / PAGE {
            for word in 0..PAGE / 8 {
                let value = (seed * 1_000_003 + page * 517 + word) as u64;
                // SAFETY: within the mapping, which is aligned to pages.
                unsafe { self.at.add(page * PAGE).cast::<u64>().add(word).write_volatile(value) };
            }
        }
    }

    pub fn has(&self, seed: usize, len: usize) -> bool {
        (0..len / 8).all(|i| {
            let value = (seed * 1_000_003 + i / 512 * 517 + i % 512) as u64;
            // SAFETY: within the mapping, which is aligned to pages.
            unsafe { self.at.cast::<u64>().add(i).read_volatile() == value }
        })
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours; what the test has unmapped already is passed over.
        unsafe { libc::munmap(self.at.cast(), self.len) };
    }
}

// SAFETY: only an address; every access says what it does.
unsafe impl Send for Map {}
// SAFETY: as above.
unsafe impl Sync for Map {}

/// Runs `f` in a forked child, and says whether it went well. A child that hangs is ended.
pub fn in_child(user: bool, f: impl FnOnce()) -> bool {
    // SAFETY: the child runs the closure and leaves with _exit.
    match unsafe { libc::fork() } {
        -1 => panic!("fork"),
        0 => {
            // SAFETY: plain system calls. After setuid /proc/self belongs to root, unless dumpable.
            unsafe {
                libc::alarm(100);
                if user {
                    assert_eq!(libc::setresgid(65534, 65534, 65534), 0);
                    assert_eq!(libc::setresuid(65534, 65534, 65534), 0);
                    assert_eq!(libc::prctl(libc::PR_SET_DUMPABLE, 1, 0, 0, 0), 0);
                }
            }
            let well = catch_unwind(AssertUnwindSafe(f)).is_ok();
            // SAFETY: ends the child.
            unsafe { libc::_exit(if well { 0 } else { 1 }) }
        }
        child => {
            let mut status = 0;
            // SAFETY: waits for the child that was just made.
            assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
            status == 0
        }
    }
}

pub fn is_root() -> bool {
    // SAFETY: a plain system call.
    unsafe { libc::geteuid() == 0 }
}

/// Runs `f` as who we are, in a child, and if that is root also as an ordinary user.
pub fn as_everybody(f: impl Fn()) {
    assert!(in_child(false, &f), "as who runs the tests");
    if is_root() {
        assert!(in_child(true, &f), "as an ordinary user");
    } else {
        println!("not root: tried as this user only");
    }
}
