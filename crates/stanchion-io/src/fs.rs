//! The system calls that the rest of this crate needs, as a trait.
