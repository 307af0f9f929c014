//! Against Intel ISA-L, whose field is the same: the same matrix makes the same bytes of the same data.
//!
//! Where libisal2 is not installed nothing is compared, and that is said; with TEST_NEEDS_ISAL set it is a failure.

use proptest::prelude::*;
use stanchion_code::kernel::Kernel;
use stanchion_code::rs::{Code, Matrix};
use std::ffi::{CStr, c_char, c_int, c_void};

type InitTables = unsafe extern "C" fn(c_int, c_int, *const u8, *mut u8);
type Encode =
    unsafe extern "C" fn(c_int, c_int, c_int, *const u8, *const *const u8, *const *mut u8);
type Update =
    unsafe extern "C" fn(c_int, c_int, c_int, c_int, *const u8, *const u8, *const *mut u8);

unsafe extern "C" {
    fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

const RTLD_NOW: c_int = 2;

struct Isal {
    init_tables: InitTables,
    encode: Encode,
    update: Update,
}

impl Isal {
    fn load() -> Option<Isal> {
        // SAFETY: the name ends with a zero, as C strings do; loading ISA-L does nothing but choose its kernels.
        let library = unsafe { dlopen(c"libisal.so.2".as_ptr(), RTLD_NOW) };
        if library.is_null() {
            return None;
        }
        let symbol = |name: &CStr| {
            // SAFETY: the library was just opened and is never closed; the name ends with a zero.
            let at = unsafe { dlsym(library, name.as_ptr()) };
            assert!(!at.is_null(), "ISA-L has {name:?}");
            at
        };
        let (init, encode, update) = (
            symbol(c"ec_init_tables"),
            symbol(c"ec_encode_data"),
            symbol(c"ec_encode_data_update"),
        );
        // SAFETY: they are the functions of these names in ISA-L 2, which have these types (its erasure_code.h).
        unsafe {
            Some(Isal {
                init_tables: std::mem::transmute::<*mut c_void, InitTables>(init),
                encode: std::mem::transmute::<*mut c_void, Encode>(encode),
                update: std::mem::transmute::<*mut c_void, Update>(update),
            })
        }
    }

    fn tables(&self, rows: &[Vec<u8>]) -> Vec<u8> {
        let flat = rows.concat();
        let mut tables = vec![0; 32 * flat.len()];
        let (k, m) = (rows[0].len() as c_int, rows.len() as c_int);
        // SAFETY: `flat` has k times m coefficients, `tables` 32 bytes for each: what ISA-L reads and writes.
        unsafe { (self.init_tables)(k, m, flat.as_ptr(), tables.as_mut_ptr()) };
        tables
    }

    fn encode(&self, rows: &[Vec<u8>], data: &[Vec<u8>], len: usize) -> Vec<Vec<u8>> {
        let tables = self.tables(rows);
        let mut sums = vec![vec![0xee; len]; rows.len()];
        let from: Vec<*const u8> = data.iter().map(|d| d[..len].as_ptr()).collect();
        let to: Vec<*mut u8> = sums.iter_mut().map(|s| s.as_mut_ptr()).collect();
        let (k, m) = (data.len() as c_int, rows.len() as c_int);
        // SAFETY: all k sources and m sums have `len` bytes, and the tables are of this shape.
        unsafe {
            (self.encode)(len as c_int, k, m, tables.as_ptr(), from.as_ptr(), to.as_ptr());
        }
        sums
    }

    fn update(&self, rows: &[Vec<u8>], data: &[Vec<u8>], len: usize) -> Vec<Vec<u8>> {
        let tables = self.tables(rows);
        let mut sums = vec![vec![0; len]; rows.len()];
        let to: Vec<*mut u8> = sums.iter_mut().map(|s| s.as_mut_ptr()).collect();
        let (k, m) = (data.len() as c_int, rows.len() as c_int);
        for (n, data) in data.iter().enumerate() {
            let data = data[..len].as_ptr();
            // SAFETY: the source and all m sums have `len` bytes, the tables are of this shape, and n is below k.
            unsafe {
                (self.update)(len as c_int, k, m, n as c_int, tables.as_ptr(), data, to.as_ptr());
            }
        }
        sums
    }
}

fn isal() -> Option<Isal> {
    let isal = Isal::load();
    if isal.is_none() {
        println!("SKIP isal: libisal2 is not installed");
        assert!(std::env::var_os("TEST_NEEDS_ISAL").is_none(), "TEST_NEEDS_ISAL is set");
    }
    isal
}

/// Of a whole stripe, and source by source.
fn ours(kernel: Kernel, rows: &[Vec<u8>], data: &[Vec<u8>], len: usize) -> [Vec<Vec<u8>>; 2] {
    let matrix = Matrix::new(rows.len(), data.len(), |row, column| rows[row][column]);
    let data: Vec<&[u8]> = data.iter().map(|d| &d[..len]).collect();
    let mut whole = vec![vec![0xee; len]; rows.len()];
    let mut sums: Vec<&mut [u8]> = whole.iter_mut().map(Vec::as_mut_slice).collect();
    matrix.encode_by(kernel, &data, &mut sums);
    let mut grown = vec![vec![0; len]; rows.len()];
    let mut sums: Vec<&mut [u8]> = grown.iter_mut().map(Vec::as_mut_slice).collect();
    for (column, data) in data.iter().enumerate() {
        matrix.update_by(kernel, column, data, &mut sums);
    }
    [whole, grown]
}

fn assert_same(isal: &Isal, rows: &[Vec<u8>], data: &[Vec<u8>], len: usize) {
    let theirs = [isal.encode(rows, data, len), isal.update(rows, data, len)];
    for kernel in Kernel::ALL.into_iter().filter(|k| k.runs_here()) {
        assert!(ours(kernel, rows, data, len) == theirs, "{kernel:?}, {rows:?}, {len} bytes");
    }
}

fn data(k: usize, len: usize, seed: u64) -> Vec<Vec<u8>> {
    let byte = |n: usize, at: usize| {
        let x = (seed ^ (n << 32 | at) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (x ^ x >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9).to_be_bytes()[0]
    };
    (0..k).map(|n| (0..len).map(|at| byte(n, at)).collect()).collect()
}

#[test]
fn the_codes_of_schemes() {
    let Some(isal) = isal() else { return };
    for (k, m) in [(1, 1), (8, 1), (8, 2), (16, 4), (10, 3), (20, 7)] {
        let code = Code::new(k, m).unwrap();
        let row = |p: usize| (0..k).map(|d| code.coefficient(p, d)).collect();
        let rows: Vec<Vec<u8>> = (0..m).map(row).collect();
        assert_same(&isal, &rows, &data(k, 65_536 + 33, 7), 65_536 + 33);
    }
}

#[test]
fn any_matrix() {
    let Some(isal) = isal() else { return };
    let shape = (1usize..24, 1usize..10, 1usize..3000, any::<u64>());
    let coefficients = proptest::collection::vec(any::<u8>(), 24 * 10);
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        cases: 200,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    runner
        .run(&(shape, coefficients), |((k, m, len, seed), coefficients)| {
            let rows: Vec<Vec<u8>> = coefficients.chunks(k).take(m).map(<[u8]>::to_vec).collect();
            assert_same(&isal, &rows, &data(k, len, seed), len);
            Ok(())
        })
        .unwrap();
}
