//! How the program ends: one code for each kind of end, and errors that carry theirs.

use stanchion_core::api::Outcome;

/// The exit codes. Scripts rely on them: numbers never change their meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// All is well.
    Success = 0,
    /// Anything without a code of its own.
    Failure = 1,
    /// The command line, a setting or the configuration file is wrong.
    Usage = 2,
    /// The application failed too often.
    AppFailed = 3,
    /// FM-S14.
    Unrecoverable = 4,
    /// A node was lost and no spare is left.
    NoSpare = 5,
    /// Ended as `stanchion halt` asked.
    Halted = 6,
    /// Prefix, cache or run directory is unusable.
    Storage = 7,
    /// FM-C5.
    PrefixInUse = 8,
    /// The dataset asked for does not fit.
    BadRestart = 9,
    /// FM-S11.
    Fenced = 10,
    /// Agents did not start or do not answer.
    AgentsFailed = 11,
    /// The application succeeded, its last checkpoint is not in the prefix.
    FlushFailed = 12,
    /// SIGINT, SIGTERM or SIGHUP.
    Interrupted = 130,
}

/// Every code with its word for programs and its meaning for people.
pub const TABLE: &[(Exit, &str, &str)] = &[
    (Exit::Success, "success", "success"),
    (
        Exit::Failure,
        "failure",
        "another failure; the message says which (verify: damage was found)",
    ),
    (Exit::Usage, "usage", "wrong usage: an option, a setting or the configuration file"),
    (
        Exit::AppFailed,
        "app_failed",
        "the application failed, and no further try is made (runs_max, retries_max)",
    ),
    (
        Exit::Unrecoverable,
        "unrecoverable",
        "a checkpoint of this run was lost and no other can be recovered; nothing was started from the beginning \
         (scavenge: too little is left of it)",
    ),
    (Exit::NoSpare, "no_spare", "a node was lost and no spare node is left"),
    (Exit::Halted, "halted", "halted, as `stanchion halt` or the time limit asked"),
    (
        Exit::Storage,
        "storage",
        "the prefix, the cache or the run directory is missing, read-only, full or broken",
    ),
    (
        Exit::PrefixInUse,
        "prefix_in_use",
        "another run uses the prefix, and did not leave within lease_wait_ms",
    ),
    (
        Exit::BadRestart,
        "bad_restart",
        "the dataset to restart from does not exist or was written by another number of ranks (scavenge: nothing is left, or \
         it is void)",
    ),
    (
        Exit::Fenced,
        "fenced",
        "another run has taken the prefix over; this one may not decide any more",
    ),
    (Exit::AgentsFailed, "agents_failed", "the agents did not start or do not answer"),
    (
        Exit::FlushFailed,
        "flush_failed",
        "the application succeeded, but its last checkpoint could not be written to the prefix",
    ),
    (Exit::Interrupted, "interrupted", "interrupted by a signal"),
];

impl Exit {
    /// Its word for programs.
    pub fn word(self) -> &'static str {
        TABLE.iter().find(|(e, _, _)| *e == self).map_or("failure", |(_, word, _)| word)
    }
}

/// The code of a run's end.
pub fn of_outcome(outcome: &Outcome) -> Exit {
    match outcome {
        Outcome::Success { flush_trouble: None } => Exit::Success,
        Outcome::Success { flush_trouble: Some(_) } => Exit::FlushFailed,
        Outcome::Halted => Exit::Halted,
        Outcome::Interrupted => Exit::Interrupted,
        Outcome::AppFailed { .. } => Exit::AppFailed,
        Outcome::Unrecoverable { .. } => Exit::Unrecoverable,
        Outcome::NoSpare { .. } => Exit::NoSpare,
        Outcome::AgentsFailed(_) => Exit::AgentsFailed,
        Outcome::BadRestart(_) => Exit::BadRestart,
        Outcome::Fenced(_) => Exit::Fenced,
        // Orphans wind down; a runner that ends so was told to by nobody.
        Outcome::WoundDown { .. } => Exit::Failure,
    }
}

/// An error and the code the program ends with.
#[derive(Debug)]
pub struct Failed {
    /// The code.
    pub exit: Exit,
    /// What the user reads.
    pub error: anyhow::Error,
}

impl Failed {
    /// An error with its code.
    pub fn new(exit: Exit, error: impl Into<anyhow::Error>) -> Failed {
        Failed { exit, error: error.into() }
    }
}

impl<E: Into<anyhow::Error>> From<E> for Failed {
    fn from(error: E) -> Failed {
        Failed { exit: Exit::Failure, error: error.into() }
    }
}

/// Gives errors their code.
pub trait OrExit<T> {
    /// With this code.
    fn or_exit(self, exit: Exit) -> Result<T, Failed>;
}

impl<T, E: Into<anyhow::Error>> OrExit<T> for Result<T, E> {
    fn or_exit(self, exit: Exit) -> Result<T, Failed> {
        self.map_err(|e| Failed::new(exit, e))
    }
}

/// What `stanchion help exit-codes` shows.
pub fn help() -> String {
    let mut out = String::from("Exit codes of stanchion:\n\n");
    for (exit, word, meaning) in TABLE {
        out += &format!("{:>5}  {word:<14} {meaning}\n", *exit as u8);
    }
    out
}
