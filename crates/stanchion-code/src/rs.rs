//! Reed-Solomon codes: k pieces of data, m parities, and any k of the k + m give all of them (Reed and Solomon, 1960;
//! with a Cauchy matrix, Bloemer et al. 1995, of which every square part can be inverted, so that no choice of losses has
//! to be tried out).
//!
//! A parity is a sum over the data, each times a coefficient: it grows as pieces arrive, in any order, and a piece that is
//! shorter than the others counts as if zeros followed.

use crate::gf::{inverse, mul};
use crate::kernel::Kernel;
pub use crate::matrix::Matrix;
use std::fmt;

/// Data and parities of one code together: as many as the field has elements, which name them.
pub const PIECES_MAX: usize = 256;

/// A code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Code {
    data: usize,
    parities: usize,
}

/// Why there is no such code, or no way back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CodeError {
    /// No data, no parities, or more than [`PIECES_MAX`] together. Who chose the scheme must choose another.
    Shape {
        /// Pieces of data asked for.
        data: usize,
        /// Parities asked for.
        parities: usize,
    },
    /// A piece is named that the code has not, or one twice. The caller's error.
    Piece(usize),
    /// Fewer pieces are left than there are of data: these bytes are lost.
    TooFew {
        /// Pieces that are left.
        have: usize,
        /// Pieces that are needed.
        need: usize,
    },
}

impl fmt::Display for CodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CodeError::Shape { data, parities } => write!(
                f,
                "no code has {data} pieces of data and {parities} parities: at least one of each, at most {PIECES_MAX} together"
            ),
            CodeError::Piece(n) => write!(f, "piece {n} is not one of the code's, or named twice"),
            CodeError::TooFew { have, need } => {
                write!(f, "{have} pieces are left and {need} are needed")
            }
        }
    }
}

impl std::error::Error for CodeError {}

/// How a lost piece follows from others: each times its coefficient, all added.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recipe {
    /// The piece that comes of it.
    pub piece: usize,
    /// Which pieces, and what each is multiplied with; none with zero.
    pub terms: Vec<(usize, u8)>,
}

impl Code {
    /// Of `data` pieces and `parities` of them; pieces are numbered in this order.
    ///
    /// # Errors
    /// [`CodeError::Shape`].
    pub fn new(data: usize, parities: usize) -> Result<Code, CodeError> {
        let fits = data.checked_add(parities).is_some_and(|n| n <= PIECES_MAX);
        if data == 0 || parities == 0 || !fits {
            return Err(CodeError::Shape { data, parities });
        }
        Ok(Code { data, parities })
    }

    /// Pieces of data, k.
    pub fn data(self) -> usize {
        self.data
    }

    /// Parities, m: as many pieces may be lost.
    pub fn parities(self) -> usize {
        self.parities
    }

    /// What piece `data` is multiplied with in parity `parity` (both from 0): 1 / (x + y), where no x is any y. The first
    /// row is scaled to ones, and so is the first column, which changes nothing about the inverses: one parity is XOR.
    ///
    /// # Panics
    /// If the code has no such piece or parity.
    pub fn coefficient(self, parity: usize, data: usize) -> u8 {
        assert!(parity < self.parities && data < self.data, "a code has its pieces");
        let cauchy = |row: usize, column: usize| {
            let sum = (self.data + row) as u8 ^ column as u8;
            inverse(sum).expect("rows and columns have names of their own")
        };
        let scaled = |row, column| {
            let first = inverse(cauchy(0, column)).expect("no inverse is zero");
            mul(cauchy(row, column), first)
        };
        let unit = inverse(scaled(parity, 0)).expect("no product of others is zero");
        mul(scaled(parity, data), unit)
    }

    /// The row of the whole matrix that makes `piece` of the data.
    fn row(self, piece: usize) -> Vec<u8> {
        let entry = |column| match piece.checked_sub(self.data) {
            None => u8::from(piece == column),
            Some(parity) => self.coefficient(parity, column),
        };
        (0..self.data).map(entry).collect()
    }

    /// How each of `lost` follows from those of `left` that it needs; of more than enough the first ones are taken.
    ///
    /// # Errors
    /// [`CodeError::Piece`] if a piece is not the code's, or is named twice; [`CodeError::TooFew`].
    pub fn recipes(self, left: &[usize], lost: &[usize]) -> Result<Vec<Recipe>, CodeError> {
        let mut seen = [false; PIECES_MAX];
        for &piece in left.iter().chain(lost) {
            if piece >= self.data + self.parities || std::mem::replace(&mut seen[piece], true) {
                return Err(CodeError::Piece(piece));
            }
        }
        let Some(used) = left.get(..self.data) else {
            return Err(CodeError::TooFew { have: left.len(), need: self.data });
        };
        let rows: Vec<Vec<u8>> = used.iter().map(|piece| self.row(*piece)).collect();
        let inverse = inverted(rows).expect("any rows of this matrix are independent");
        let recipe = |&piece: &usize| {
            let row = self.row(piece);
            let term = |n: usize| {
                let add = |sum, (of, made): (&u8, &Vec<u8>)| sum ^ mul(*of, made[n]);
                (used[n], row.iter().zip(&inverse).fold(0, add))
            };
            let terms = (0..self.data).map(term).filter(|(_, by)| *by != 0).collect();
            Recipe { piece, terms }
        };
        Ok(lost.iter().map(recipe).collect())
    }
}

/// The inverse of a square matrix, by Gauss and Jordan; nothing if it has none.
pub(crate) fn inverted(mut rows: Vec<Vec<u8>>) -> Option<Vec<Vec<u8>>> {
    let n = rows.len();
    for (i, row) in rows.iter_mut().enumerate() {
        row.extend((0..n).map(|j| u8::from(i == j)));
    }
    for column in 0..n {
        let pivot = (column..n).find(|&i| rows[i][column] != 0)?;
        rows.swap(column, pivot);
        let by = inverse(rows[column][column])?;
        rows[column].iter_mut().for_each(|a| *a = mul(*a, by));
        let row = rows[column].clone();
        for (i, other) in rows.iter_mut().enumerate() {
            let by = other[column];
            if i != column && by != 0 {
                other.iter_mut().zip(&row).for_each(|(a, b)| *a ^= mul(*b, by));
            }
        }
    }
    Some(rows.into_iter().map(|row| row[n..].to_vec()).collect())
}

/// Adds `data` times `by` into `sum`, by the fastest kernel there is here. `data` may be shorter than `sum` (the missing
/// rest counts as zeros).
///
/// # Panics
/// If `data` is longer than `sum`.
pub fn mul_into(sum: &mut [u8], data: &[u8], by: u8) {
    Kernel::best().mul_into(sum, data, by);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Pieces of uneven length, as nodes have them, and the parities behind them.
    fn encoded(code: Code, data: &[Vec<u8>], order: &[usize]) -> Vec<Vec<u8>> {
        let longest = data.iter().map(Vec::len).max().unwrap_or(0);
        let mut parities = vec![vec![0; longest]; code.parities()];
        for &n in order {
            for (p, parity) in parities.iter_mut().enumerate() {
                mul_into(parity, &data[n], code.coefficient(p, n));
            }
        }
        data.iter().cloned().chain(parities).collect()
    }

    fn assert_rebuilt(code: Code, pieces: &[Vec<u8>], lost: &[usize]) {
        let left: Vec<usize> = (0..pieces.len()).filter(|n| !lost.contains(n)).collect();
        for recipe in code.recipes(&left, lost).unwrap() {
            let longest = pieces.iter().map(Vec::len).max().unwrap_or(0);
            let mut sum = vec![0; longest];
            for (from, by) in &recipe.terms {
                assert!(left.contains(from));
                mul_into(&mut sum, &pieces[*from], *by);
            }
            let (whole, rest) = sum.split_at(pieces[recipe.piece].len());
            assert_eq!(whole, pieces[recipe.piece], "{code:?} lost {lost:?}");
            assert!(rest.iter().all(|b| *b == 0));
        }
    }

    fn bytes(seed: usize, len: usize) -> Vec<u8> {
        (0..len).map(|i| (i * 131 + seed * 71 + (i * i) / 7) as u8).collect()
    }

    #[test]
    fn every_loss_of_small_codes_is_rebuilt() {
        for (k, m) in [(1, 1), (1, 3), (2, 1), (2, 2), (3, 2), (4, 2), (5, 3), (6, 3), (4, 4)] {
            let code = Code::new(k, m).unwrap();
            let data: Vec<Vec<u8>> = (0..k).map(|n| bytes(n, 40 + 3 * n)).collect();
            let order: Vec<usize> = (0..k).collect();
            let pieces = encoded(code, &data, &order);
            for pattern in 0u32..1 << (k + m) {
                let lost: Vec<usize> = (0..k + m).filter(|n| pattern >> n & 1 == 1).collect();
                if lost.len() <= m {
                    assert_rebuilt(code, &pieces, &lost);
                } else {
                    let left: Vec<usize> = (0..k + m).filter(|n| !lost.contains(n)).collect();
                    let have = left.len();
                    assert_eq!(
                        code.recipes(&left, &lost),
                        Err(CodeError::TooFew { have, need: k })
                    );
                }
            }
        }
    }

    #[test]
    fn one_parity_is_xor() {
        let code = Code::new(200, 3).unwrap();
        assert!((0..200).all(|n| code.coefficient(0, n) == 1));
        assert!((0..3).all(|p| code.coefficient(p, 0) == 1));
    }

    #[test]
    fn shapes_that_no_code_has_are_refused() {
        for (data, parities) in [(0, 1), (1, 0), (255, 2), (usize::MAX, 1)] {
            assert_eq!(Code::new(data, parities), Err(CodeError::Shape { data, parities }));
        }
        assert!(Code::new(255, 1).is_ok() && Code::new(1, 255).is_ok());
    }

    #[test]
    fn pieces_that_are_not_there_are_refused() {
        let code = Code::new(2, 2).unwrap();
        assert_eq!(code.recipes(&[0, 1, 1], &[2]), Err(CodeError::Piece(1)));
        assert_eq!(code.recipes(&[0, 1], &[1]), Err(CodeError::Piece(1)));
        assert_eq!(code.recipes(&[0, 4], &[1]), Err(CodeError::Piece(4)));
    }

    proptest! {
        #[test]
        fn any_losses_of_any_code_are_rebuilt(
            shape in (1usize..60, 1usize..9),
            lens in proptest::collection::vec(0usize..50, 60),
            choice in proptest::collection::vec(any::<proptest::sample::Index>(), 8),
            turned in any::<proptest::sample::Index>(),
        ) {
            let (k, m) = shape;
            let code = Code::new(k, m).unwrap();
            let data: Vec<Vec<u8>> = (0..k).map(|n| bytes(n, lens[n])).collect();
            // Parities grow in any order.
            let mut order: Vec<usize> = (0..k).collect();
            order.rotate_left(turned.index(k));
            let pieces = encoded(code, &data, &order);
            let mut lost: Vec<usize> = choice.iter().take(m).map(|c| c.index(k + m)).collect();
            lost.sort_unstable();
            lost.dedup();
            assert_rebuilt(code, &pieces, &lost);
        }
    }
}
