//! Intel ISA-L, where it is installed: loaded when the benchmark runs, and only then.

use std::ffi::{CStr, c_int, c_void};

/// Pieces of one kind, at most.
pub(super) const PIECES_MAX: usize = 32;
/// Its name, as the loader finds it.
pub(super) const LIBRARY: &CStr = c"libisal.so.2";

type InitTables = unsafe extern "C" fn(c_int, c_int, *const u8, *mut u8);
type Encode =
    unsafe extern "C" fn(c_int, c_int, c_int, *const u8, *const *const u8, *const *mut u8);
type Update =
    unsafe extern "C" fn(c_int, c_int, c_int, c_int, *const u8, *const u8, *const *mut u8);

/// Its functions.
#[derive(Clone, Copy)]
pub(super) struct Isal {
    init_tables: InitTables,
    encode: Encode,
    update: Update,
}

impl Isal {
    /// Nothing if it is not installed.
    pub(super) fn load() -> Option<Isal> {
        // SAFETY: the name ends with a zero, as C strings do; loading ISA-L does nothing but choose its kernels.
        let library = unsafe { libc::dlopen(LIBRARY.as_ptr(), libc::RTLD_NOW) };
        if library.is_null() {
            return None;
        }
        let symbol = |name: &CStr| {
            // SAFETY: the library was just opened and is never closed; the name ends with a zero.
            let at = unsafe { libc::dlsym(library, name.as_ptr()) };
            (!at.is_null()).then_some(at)
        };
        let init = symbol(c"ec_init_tables")?;
        let encode = symbol(c"ec_encode_data")?;
        let update = symbol(c"ec_encode_data_update")?;
        // SAFETY: they are the functions of these names in ISA-L 2, which have these types (its erasure_code.h).
        unsafe {
            Some(Isal {
                init_tables: std::mem::transmute::<*mut c_void, InitTables>(init),
                encode: std::mem::transmute::<*mut c_void, Encode>(encode),
                update: std::mem::transmute::<*mut c_void, Update>(update),
            })
        }
    }

    /// With the factors of `m` sums of `k` sources, sum after sum.
    pub(super) fn tables(self, (k, m): (usize, usize), factors: &[u8]) -> Tables {
        assert!(k <= PIECES_MAX && m <= PIECES_MAX && factors.len() == k * m);
        let mut bytes = vec![0; 32 * factors.len()];
        // SAFETY: there are k times m factors, and 32 bytes for each of them: what it reads and writes.
        unsafe {
            (self.init_tables)(k as c_int, m as c_int, factors.as_ptr(), bytes.as_mut_ptr());
        }
        Tables { isal: self, k, m, bytes }
    }
}

/// A prepared matrix.
pub(super) struct Tables {
    isal: Isal,
    k: usize,
    m: usize,
    bytes: Vec<u8>,
}

impl Tables {
    /// A whole stripe; all pieces are equally long.
    pub(super) fn encode(&self, data: &[&[u8]], sums: &mut [&mut [u8]]) {
        let len = data[0].len();
        assert!(data.len() == self.k && data.iter().all(|d| d.len() == len));
        let mut from = [std::ptr::null(); PIECES_MAX];
        from.iter_mut().zip(data).for_each(|(from, data)| *from = data.as_ptr());
        let to = self.sums(sums, len);
        let (k, m) = (self.k as c_int, self.m as c_int);
        let bytes = c_int::try_from(len).expect("a piece is small");
        // SAFETY: the k sources and m sums have `len` bytes each, as was asserted, and the tables are of this shape.
        unsafe {
            (self.isal.encode)(bytes, k, m, self.bytes.as_ptr(), from.as_ptr(), to.as_ptr());
        }
    }

    /// One source into all sums, which are as long.
    pub(super) fn update(&self, column: usize, data: &[u8], sums: &mut [&mut [u8]]) {
        assert!(column < self.k);
        let to = self.sums(sums, data.len());
        let (k, m, column) = (self.k as c_int, self.m as c_int, column as c_int);
        let bytes = c_int::try_from(data.len()).expect("a piece is small");
        let (tables, data) = (self.bytes.as_ptr(), data.as_ptr());
        // SAFETY: the source and the m sums have `bytes` bytes each, as was asserted; the tables are of this shape, and the
        // column is below k.
        unsafe { (self.isal.update)(bytes, k, m, column, tables, data, to.as_ptr()) };
    }

    fn sums(&self, sums: &mut [&mut [u8]], len: usize) -> [*mut u8; PIECES_MAX] {
        assert!(sums.len() == self.m && sums.iter().all(|s| s.len() == len));
        let mut to = [std::ptr::null_mut(); PIECES_MAX];
        to.iter_mut().zip(sums).for_each(|(to, sum)| *to = sum.as_mut_ptr());
        to
    }
}
