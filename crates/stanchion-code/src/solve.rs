//! One lost piece of data from what is left of its stripe: only what is lost is solved for, so that the way back costs as
//! many inversions as there are losses and not as there are members.

use crate::gf::mul;
use crate::rs::{Code, CodeError, inverted};

impl Code {
    /// How `wanted` follows from the pieces of data that are not `lost`, and from the parities `rows`, of which as many
    /// are used as pieces are lost. `lost` are all pieces of data that are not there, `wanted` among them.
    ///
    /// # Errors
    /// [`CodeError::Piece`] if a piece is not the code's or named twice, or `wanted` is not lost; [`CodeError::TooFew`].
    pub fn solve(self, wanted: usize, lost: &[usize], rows: &[usize]) -> Result<Way, CodeError> {
        let mut seen = [false; crate::rs::PIECES_MAX];
        for &piece in lost {
            if piece >= self.data() || std::mem::replace(&mut seen[piece], true) {
                return Err(CodeError::Piece(piece));
            }
        }
        let place = lost.iter().position(|p| *p == wanted).ok_or(CodeError::Piece(wanted))?;
        for &row in rows {
            let piece = self.data().saturating_add(row);
            if row >= self.parities() || std::mem::replace(&mut seen[piece], true) {
                return Err(CodeError::Piece(piece));
            }
        }
        let Some(rows) = rows.get(..lost.len()) else {
            let have = self.data() - lost.len() + rows.len();
            return Err(CodeError::TooFew { have, need: self.data() });
        };
        let square = rows.iter().map(|r| lost.iter().map(|l| self.coefficient(*r, *l)).collect());
        let inverse = inverted(square.collect()).expect("square parts of this matrix have one");
        let parities: Vec<(usize, u8)> =
            rows.iter().copied().zip(inverse[place].iter().copied()).collect();
        Ok(Way { code: self, parities })
    }
}

/// How a lost piece of data follows from parities and the other data.
#[derive(Clone, Debug)]
pub struct Way {
    code: Code,
    /// The parities that are used, and what each is multiplied with; some with 0.
    pub parities: Vec<(usize, u8)>,
}

impl Way {
    /// What a piece of data that is left is multiplied with.
    pub fn data(&self, piece: usize) -> u8 {
        let term = |(row, by): &(usize, u8)| mul(*by, self.code.coefficient(*row, piece));
        self.parities.iter().map(term).fold(0, |sum, a| sum ^ a)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rs::mul_into;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_lost_piece_is_found(
            shape in (1usize..40, 1usize..7),
            choice in proptest::collection::vec(any::<proptest::sample::Index>(), 7),
            turned in any::<proptest::sample::Index>(),
        ) {
            let (k, m) = shape;
            let code = Code::new(k, m).unwrap();
            let data: Vec<Vec<u8>> =
                (0..k).map(|n| (0..20).map(|i| (n * 37 + i * i * 11 + 5) as u8).collect()).collect();
            let parity = |row: usize| {
                let mut sum = vec![0; 20];
                for (n, d) in data.iter().enumerate() {
                    mul_into(&mut sum, d, code.coefficient(row, n));
                }
                sum
            };
            let mut lost: Vec<usize> = choice.iter().take(m).map(|c| c.index(k)).collect();
            lost.sort_unstable();
            lost.dedup();
            let mut rows: Vec<usize> = (0..m).collect();
            rows.rotate_left(turned.index(m));
            for wanted in &lost {
                let way = code.solve(*wanted, &lost, &rows).unwrap();
                let mut sum = vec![0; 20];
                for (row, by) in &way.parities {
                    mul_into(&mut sum, &parity(*row), *by);
                }
                for (n, d) in data.iter().enumerate().filter(|(n, _)| !lost.contains(n)) {
                    mul_into(&mut sum, d, way.data(n));
                }
                prop_assert_eq!(&sum, &data[*wanted]);
            }
        }
    }

    #[test]
    fn too_little_and_nonsense_are_refused() {
        let code = Code::new(3, 2).unwrap();
        let refused = |wanted, lost: &[usize], rows: &[usize]| code.solve(wanted, lost, rows).err();
        assert_eq!(refused(0, &[0, 1], &[1]), Some(CodeError::TooFew { have: 2, need: 3 }));
        assert_eq!(refused(0, &[1], &[0]), Some(CodeError::Piece(0)));
        assert_eq!(refused(1, &[1, 1], &[0, 1]), Some(CodeError::Piece(1)));
        assert_eq!(refused(1, &[1], &[2]), Some(CodeError::Piece(5)));
        assert_eq!(refused(3, &[3], &[0]), Some(CodeError::Piece(3)));
    }
}
