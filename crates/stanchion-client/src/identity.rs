//! Which rank of how many this process is: explicit, or from the launcher's variables.

use crate::environment::Environment;
use stanchion_format::config::Shown;
use stanchion_format::limits;

/// A rank and the number of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// This rank, below `size`.
    pub rank: u32,
    /// Ranks of the job, or of the part of it that uses Stanchion.
    pub size: u32,
}

/// Why it cannot be told.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IdentityError {
    /// A variable is no number within its limits.
    #[error("{variable}='{value}' is not a number of ranks or a rank below {}", limits::RANKS_MAX)]
    Number {
        /// Its name.
        variable: &'static str,
        /// Its value.
        value: Shown,
    },
    /// One of two is there.
    #[error("{there} is set, but {missing} is not: rank and number of ranks belong together")]
    Half {
        /// The variable that is set.
        there: &'static str,
        /// The one that is not.
        missing: &'static str,
    },
    /// Rank and size contradict each other.
    #[error("rank {rank} of {size} ({source_name}): a rank is below the number of ranks")]
    Range {
        /// The rank.
        rank: u32,
        /// The number.
        size: u32,
        /// The variable that says the rank, or "arguments".
        source_name: &'static str,
    },
}

/// A launcher's pair of variables.
struct Family {
    rank: &'static str,
    /// In order of preference.
    sizes: &'static [&'static str],
    /// Is one variable without the other an error? Not for names that may mean something else.
    strict: bool,
}

/// In order of precedence: who starts a process directly comes before who started the launcher.
const FAMILIES: &[Family] = &[
    Family { rank: "STANCHION_RANK", sizes: &["STANCHION_SIZE"], strict: true },
    Family { rank: "PMI_RANK", sizes: &["PMI_SIZE"], strict: true },
    Family { rank: "OMPI_COMM_WORLD_RANK", sizes: &["OMPI_COMM_WORLD_SIZE"], strict: true },
    Family {
        rank: "PMIX_RANK",
        sizes: &["OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
        strict: true,
    },
    Family {
        rank: "SLURM_PROCID",
        sizes: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
        strict: false,
    },
    Family { rank: "RANK", sizes: &["WORLD_SIZE"], strict: false },
];

fn number(variable: &'static str, value: &str) -> Result<u32, IdentityError> {
    value
        .trim()
        .parse()
        .ok()
        .filter(|n| *n <= limits::RANKS_MAX)
        .ok_or_else(|| IdentityError::Number { variable, value: Shown::new(value) })
}

impl Identity {
    /// Checks explicit arguments.
    pub fn explicit(rank: u32, size: u32) -> Result<Identity, IdentityError> {
        Identity::checked(rank, size, "arguments")
    }

    fn checked(rank: u32, size: u32, source_name: &'static str) -> Result<Identity, IdentityError> {
        if rank < size && size <= limits::RANKS_MAX {
            Ok(Identity { rank, size })
        } else {
            Err(IdentityError::Range { rank, size, source_name })
        }
    }

    /// What the launcher says; alone (0 of 1) where there is none.
    pub fn of_environment(environment: &Environment) -> Result<Identity, IdentityError> {
        if environment.get("STANCHION_SIZE").is_some()
            && environment.get("STANCHION_RANK").is_none()
        {
            let (there, missing) = ("STANCHION_SIZE", "STANCHION_RANK");
            return Err(IdentityError::Half { there, missing });
        }
        for family in FAMILIES {
            let Some(rank) = environment.get(family.rank) else { continue };
            let size = family.sizes.iter().find_map(|n| Some((*n, environment.get(n)?)));
            let Some((size_name, size)) = size else {
                if family.strict {
                    let (there, missing) = (family.rank, family.sizes[0]);
                    return Err(IdentityError::Half { there, missing });
                }
                continue;
            };
            let (rank, size) = (number(family.rank, rank)?, number(size_name, size)?);
            return Identity::checked(rank, size, family.rank);
        }
        Ok(Identity { rank: 0, size: 1 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(pairs: &[(&str, &str)]) -> Result<Identity, IdentityError> {
        Identity::of_environment(&Environment::of_pairs(pairs.iter().copied()))
    }

    fn is(rank: u32, size: u32) -> Result<Identity, IdentityError> {
        Ok(Identity { rank, size })
    }

    #[test]
    fn each_launcher_is_understood() {
        assert_eq!(of(&[]), is(0, 1));
        assert_eq!(of(&[("PMI_RANK", "2"), ("PMI_SIZE", "4")]), is(2, 4));
        assert_eq!(of(&[("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "3")]), is(1, 3));
        assert_eq!(of(&[("PMIX_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "3")]), is(1, 3));
        assert_eq!(of(&[("SLURM_PROCID", "5"), ("SLURM_NTASKS", "8")]), is(5, 8));
        assert_eq!(of(&[("RANK", "5"), ("WORLD_SIZE", "8")]), is(5, 8));
    }

    #[test]
    fn the_inner_launcher_comes_first() {
        // mpiexec inside of a Slurm job, and our own variables before all.
        let slurm = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "1")];
        let both = [slurm[0], slurm[1], ("PMI_RANK", "2"), ("PMI_SIZE", "4")];
        assert_eq!(of(&both), is(2, 4));
        let all = [both[2], both[3], ("STANCHION_RANK", "0"), ("STANCHION_SIZE", "2")];
        assert_eq!(of(&all), is(0, 2));
    }

    #[test]
    fn nonsense_names_its_variable() {
        for (pairs, word) in [
            (&[("PMI_RANK", "x"), ("PMI_SIZE", "4")][..], "PMI_RANK"),
            (&[("PMI_RANK", "1"), ("PMI_SIZE", "-4")], "PMI_SIZE"),
            (&[("PMI_RANK", "1"), ("PMI_SIZE", "99999999999")], "PMI_SIZE"),
            (&[("PMI_RANK", "4"), ("PMI_SIZE", "4")], "PMI_RANK"),
            (&[("PMI_RANK", "0"), ("PMI_SIZE", "0")], "PMI_RANK"),
            (&[("PMI_RANK", "1")], "PMI_SIZE"),
            (&[("STANCHION_SIZE", "1")], "STANCHION_RANK"),
            (&[("PMIX_RANK", "1")], "OMPI_COMM_WORLD_SIZE"),
        ] {
            let text = of(pairs).unwrap_err().to_string();
            assert!(text.contains(word), "{text}");
        }
        assert!(Identity::explicit(3, 3).is_err());
        // A variable of this common name, but not a launcher's.
        assert_eq!(of(&[("RANK", "captain")]), is(0, 1));
    }
}
