use super::*;
use crate::gf::mul;
use crate::rs::Matrix;
use proptest::prelude::*;

/// Those that run here; of the others it is said that they were not tested.
fn kernels() -> impl Iterator<Item = Kernel> {
    Kernel::ALL.into_iter().filter(|k| k.runs_here())
}

fn bytes(seed: usize, len: usize) -> Vec<u8> {
    let mut state = seed as u64 ^ 0x9e37_79b9_7f4a_7c15;
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    (0..len).map(next).collect()
}

/// What `Matrix::encode` is to give, by the definition.
fn sums(matrix: &[Vec<u8>], data: &[&[u8]], len: usize) -> Vec<Vec<u8>> {
    let product = |at: usize, by: u8, data: &[u8]| data.get(at).map_or(0, |d| mul(*d, by));
    let byte = |row: &[u8], at| {
        row.iter().zip(data).fold(0, |sum, (by, data)| sum ^ product(at, *by, data))
    };
    matrix.iter().map(|row| (0..len).map(|at| byte(row, at)).collect()).collect()
}

#[test]
fn what_was_not_tested_is_said() {
    for kernel in Kernel::ALL.into_iter().filter(|k| !k.runs_here()) {
        println!("SKIP kernel {}: this processor has none", kernel.name());
    }
}

#[test]
fn every_product_by_every_kernel() {
    let data: Vec<u8> = (0..=255).chain(0..=255).collect();
    for kernel in kernels() {
        for by in 0..=255 {
            let mut sum = vec![0x5a; data.len()];
            kernel.mul_into(&mut sum, &data, by);
            let right = data.iter().map(|d| 0x5a ^ mul(*d, by));
            assert!(sum.iter().copied().eq(right), "{kernel:?} by {by}");
        }
    }
}

#[test]
fn the_best_one_runs_here() {
    assert!(Kernel::best().runs_here());
    assert!(Kernel::Plain.runs_here());
}

#[test]
#[should_panic(expected = "no longer than its parity")]
fn more_data_than_parity_is_a_bug() {
    Kernel::Plain.mul_into(&mut [0; 3], &[0; 4], 7);
}

#[test]
#[should_panic(expected = "no longer than its parity")]
fn a_longer_source_than_a_sum_is_a_bug() {
    let (mut long, mut short) = ([0; 200], [0; 100]);
    Matrix::new(2, 1, |_, _| 3).encode(&[&[1; 101]], &mut [&mut long, &mut short]);
}

#[test]
#[should_panic(expected = "each sum has its factor")]
fn a_sum_too_few_is_a_bug() {
    Matrix::new(2, 1, |_, _| 3).update(0, &[1; 10], &mut [&mut [0; 10]]);
}

/// More sums than a group has are made in blocks: their borders.
#[test]
fn many_sums_of_much_data() {
    for (rows, columns, len) in [(5, 1, BLOCK + 77), (6, 40, 3 * BLOCK_MIN + 5)] {
        let factor = |row: usize, column: usize| (row * 57 + column * 3 + 1) as u8;
        let matrix = Matrix::new(rows, columns, factor);
        let data: Vec<Vec<u8>> = (0..columns).map(|n| bytes(n, len)).collect();
        let data: Vec<&[u8]> = data.iter().map(Vec::as_slice).collect();
        let rows: Vec<Vec<u8>> =
            (0..rows).map(|row| (0..columns).map(|c| factor(row, c)).collect()).collect();
        let right = sums(&rows, &data, len);
        for kernel in kernels() {
            let mut made = vec![vec![0xee; len]; rows.len()];
            let mut to: Vec<&mut [u8]> = made.iter_mut().map(Vec::as_mut_slice).collect();
            matrix.encode_by(kernel, &data, &mut to);
            assert!(made == right, "{kernel:?} encodes");
            let mut made = vec![vec![0; len]; rows.len()];
            let mut to: Vec<&mut [u8]> = made.iter_mut().map(Vec::as_mut_slice).collect();
            for (column, data) in data.iter().enumerate() {
                matrix.update_by(kernel, column, data, &mut to);
            }
            assert!(made == right, "{kernel:?} accumulates");
        }
    }
}

/// What lies before the first whole cache line of a sum, wherever that is; the sums differ in it.
#[test]
fn sums_that_begin_anywhere_in_a_line() {
    let len = HEAD_MIN + 77;
    let rows = vec![vec![1, 1], vec![7, 9], vec![0x8e, 0]];
    let matrix = Matrix::new(3, 2, |row, column| rows[row][column]);
    let data = [bytes(1, len), bytes(2, len)];
    let data: Vec<&[u8]> = data.iter().map(Vec::as_slice).collect();
    let right = sums(&rows, &data, len);
    for (kernel, skip) in kernels().flat_map(|k| (0..66).step_by(5).map(move |skip| (k, skip))) {
        let mut made = vec![vec![0xc3; len + 70]; 3];
        let mut to: Vec<&mut [u8]> =
            made.iter_mut().enumerate().map(|(n, m)| &mut m[skip + n..][..len]).collect();
        matrix.encode_by(kernel, &data, &mut to);
        assert!(to.iter().zip(&right).all(|(to, right)| *to == right), "{kernel:?} encodes");
        to.iter_mut().for_each(|sum| sum.fill(0));
        (0..2).for_each(|n| matrix.update_by(kernel, n, data[n], &mut to));
        assert!(to.iter().zip(&right).all(|(to, right)| *to == right), "{kernel:?} accumulates");
        let outside = |(n, m): (usize, &Vec<u8>)| {
            m[..skip + n].iter().chain(&m[skip + n + len..]).all(|b| *b == 0xc3)
        };
        assert!(made.iter().enumerate().all(outside), "{kernel:?} writes elsewhere");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_lengths_and_places(
        data in proptest::collection::vec(any::<u8>(), 0..400),
        skip in (0usize..70, 0usize..70),
        longer in 0usize..70,
        by: u8,
    ) {
        for kernel in kernels() {
            let from = &data[skip.0.min(data.len())..];
            let mut memory = vec![0xc3; skip.1 + from.len() + longer];
            kernel.mul_into(&mut memory[skip.1..], from, by);
            for (at, found) in memory.iter().enumerate() {
                let product = at.checked_sub(skip.1).and_then(|n| from.get(n)).map_or(0, |d| mul(*d, by));
                prop_assert_eq!(*found, 0xc3 ^ product, "{:?} at {}", kernel, at);
            }
        }
    }

    /// Whole stripes and sources one by one, by every kernel, are the sums of the definition; nothing else is written.
    #[test]
    fn any_matrix_of_any_sources(
        shape in (1usize..12, 1usize..20),
        seed: u16,
        longest in 0usize..500,
        shorter in proptest::collection::vec(0usize..700, 20),
        skip in (0usize..70, 0usize..70),
        longer in 0usize..70,
        ones: bool,
        even: bool,
    ) {
        let (rows, columns) = shape;
        let mut factors: Vec<Vec<u8>> =
            (0..rows).map(|row| bytes(usize::from(seed) + row, columns)).collect();
        if ones {
            factors[0].fill(1);
        }
        let matrix = Matrix::new(rows, columns, |row, column| factors[row][column]);
        let data: Vec<Vec<u8>> = (0..columns).map(|n| bytes(n + 99, skip.0 + longest)).collect();
        let length = |n: usize| if even { longest } else { longest.saturating_sub(shorter[n]) };
        let data: Vec<&[u8]> =
            data.iter().enumerate().map(|(n, d)| &d[skip.0..skip.0 + length(n)]).collect();
        let len = longest + longer;
        let right = sums(&factors, &data, len);
        for kernel in kernels() {
            let mut made = vec![vec![0xc3; skip.1 + len]; rows];
            let mut to: Vec<&mut [u8]> = made.iter_mut().map(|m| &mut m[skip.1..]).collect();
            matrix.encode_by(kernel, &data, &mut to);
            for (made, right) in made.iter_mut().zip(&right) {
                prop_assert_eq!(&made[skip.1..], &right[..], "{:?} encodes", kernel);
                made[skip.1..].fill(0);
            }
            let mut to: Vec<&mut [u8]> = made.iter_mut().map(|m| &mut m[skip.1..]).collect();
            for (column, data) in data.iter().enumerate().rev() {
                matrix.update_by(kernel, column, data, &mut to);
            }
            for (made, right) in made.iter().zip(&right) {
                prop_assert_eq!(&made[skip.1..], &right[..], "{:?} accumulates", kernel);
                prop_assert!(made[..skip.1].iter().all(|b| *b == 0xc3));
            }
        }
    }
}
