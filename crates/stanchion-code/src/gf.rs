//! The field GF(2^8) with the polynomial x^8 + x^4 + x^3 + x^2 + 1 (0x11d), as in RAID-6 (Anvin, "The mathematics of
//! RAID-6", 2004) and in Intel ISA-L.

/// The polynomial without x^8.
const POLYNOMIAL: u8 = 0x1d;
/// Elements but zero.
const ORDER: usize = 255;

const fn times_x(a: u8) -> u8 {
    (a << 1) ^ (if a & 0x80 != 0 { POLYNOMIAL } else { 0 })
}

/// Powers of x, twice over, so that two logarithms are added without a remainder.
const EXP: [u8; 2 * ORDER] = {
    let mut table = [0; 2 * ORDER];
    let (mut i, mut a) = (0, 1u8);
    while i < 2 * ORDER {
        table[i] = a;
        a = times_x(a);
        i += 1;
    }
    table
};

/// Logarithms to the base x; of zero there is none.
const LOG: [u8; 256] = {
    let mut table = [0; 256];
    let mut i = 0;
    while i < ORDER {
        table[EXP[i] as usize] = i as u8;
        i += 1;
    }
    table
};

/// The product.
pub const fn mul(a: u8, b: u8) -> u8 {
    if a == 0 || b == 0 {
        return 0;
    }
    EXP[LOG[a as usize] as usize + LOG[b as usize] as usize]
}

/// What `a` is to be multiplied with to give 1; nothing for zero.
pub const fn inverse(a: u8) -> Option<u8> {
    if a == 0 { None } else { Some(EXP[ORDER - LOG[a as usize] as usize]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By the definition: shift and add.
    fn slow(mut a: u8, mut b: u8) -> u8 {
        let mut sum = 0;
        while b != 0 {
            sum ^= if b & 1 != 0 { a } else { 0 };
            (a, b) = (times_x(a), b >> 1);
        }
        sum
    }

    #[test]
    fn products_are_those_of_polynomials() {
        for a in 0..=255 {
            for b in 0..=255 {
                assert_eq!(mul(a, b), slow(a, b), "{a} {b}");
            }
        }
    }

    #[test]
    fn everything_but_zero_has_an_inverse() {
        assert_eq!(inverse(0), None);
        for a in 1..=255u8 {
            assert_eq!(mul(a, inverse(a).unwrap()), 1, "{a}");
        }
    }
}
