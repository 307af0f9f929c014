//! Many sums of many sources at once: a matrix of factors, prepared for the kernels.

use crate::kernel::{Factor, Kernel, Source};
use crate::rs::{Code, PIECES_MAX};

/// Factors of some sources (columns) in some sums (rows).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Matrix {
    rows: usize,
    columns: usize,
    /// Column after column.
    factors: Vec<Factor>,
}

impl Matrix {
    /// With the factors that `factor` gives for a row and a column.
    ///
    /// # Panics
    /// If there are no rows or columns, or more than [`PIECES_MAX`] of either: no code has that.
    pub fn new(rows: usize, columns: usize, factor: impl Fn(usize, usize) -> u8) -> Matrix {
        let fits = |n: usize| (1..=PIECES_MAX).contains(&n);
        assert!(fits(rows) && fits(columns), "no code has {rows} sums of {columns} sources");
        let column = |column| (0..rows).map(move |row| (row, column));
        let all = (0..columns).flat_map(column);
        let factors = all.map(|(row, column)| *Factor::of(factor(row, column))).collect();
        Matrix { rows, columns, factors }
    }

    /// A code's parities, of its data.
    pub fn of(code: Code) -> Matrix {
        Matrix::new(code.parities(), code.data(), |parity, data| code.coefficient(parity, data))
    }

    /// Sums.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Sources.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Adds source `column` into all sums, each time with its factor. `data` may be shorter than a sum (the missing rest
    /// counts as zeros).
    ///
    /// # Panics
    /// If there is no such column, not one sum for each row, or `data` is longer than a sum.
    pub fn update(&self, column: usize, data: &[u8], sums: &mut [&mut [u8]]) {
        self.update_by(Kernel::best(), column, data, sums);
    }

    /// The same by a kernel of one's choice.
    ///
    /// # Panics
    /// As [`Matrix::update`], and if the processor has not what the kernel needs.
    pub fn update_by(&self, kernel: Kernel, column: usize, data: &[u8], sums: &mut [&mut [u8]]) {
        kernel.update(self.column(column), data, sums);
    }

    /// Makes all sums of all sources, whatever was in them. Sources may be shorter than sums (the missing rest counts as
    /// zeros).
    ///
    /// # Panics
    /// If there is not one source for each column, not one sum for each row, or a source is longer than a sum.
    pub fn encode(&self, data: &[&[u8]], sums: &mut [&mut [u8]]) {
        self.encode_by(Kernel::best(), data, sums);
    }

    /// The same by a kernel of one's choice.
    ///
    /// # Panics
    /// As [`Matrix::encode`], and if the processor has not what the kernel needs.
    pub fn encode_by(&self, kernel: Kernel, data: &[&[u8]], sums: &mut [&mut [u8]]) {
        assert_eq!(data.len(), self.columns, "each column has its source");
        assert_eq!(sums.len(), self.rows, "each row has its sum");
        let longest = data.iter().map(|d| d.len()).max().unwrap_or(0);
        let fits = sums.iter().all(|sum| longest <= sum.len());
        assert!(fits, "a contribution is no longer than its parity");
        sums.iter_mut().for_each(|sum| sum[longest..].fill(0));
        // From where one source ends to where the next does, of those that go on.
        let mut at = 0;
        while at < longest {
            let mut sources: [Source<'_>; PIECES_MAX] = [(&[], &[]); PIECES_MAX];
            let (mut n, mut end) = (0, longest);
            for (column, data) in data.iter().enumerate().filter(|(_, data)| data.len() > at) {
                sources[n] = (*data, self.column(column));
                n += 1;
                end = end.min(data.len());
            }
            kernel.encode(&sources[..n], sums, at..end);
            at = end;
        }
    }

    fn column(&self, column: usize) -> &[Factor] {
        assert!(column < self.columns, "there is no column {column}");
        &self.factors[column * self.rows..(column + 1) * self.rows]
    }
}
