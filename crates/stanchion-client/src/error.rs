//! Why a call failed: a code for programs, a sentence for people.

use crate::identity::IdentityError;
use stanchion_format::client::Code;
use stanchion_format::config::ConfigError;
use stanchion_format::frame::FrameError;
use stanchion_format::ids::DatasetNo;
use stanchion_format::limits;
use stanchion_format::name::NameError;
use stanchion_format::regions::RegionsError;
use stanchion_mem::cow::CowError;
use std::fmt;

/// Text from outside that a message repeats: control characters are escaped, the length is limited.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Words(String);

impl Words {
    /// Makes `text` fit to be shown.
    pub fn new(text: &str) -> Words {
        Words::made(text, limits::TEXT_BYTES_MAX, |c| c.is_control() && c != '\n')
    }

    /// A name or path: as [`Words::new`], without line breaks, and shorter.
    pub fn name(text: &str) -> Words {
        Words::made(text, 512, char::is_control)
    }

    fn made(text: &str, max: usize, escape: impl Fn(char) -> bool) -> Words {
        // What one more character and the ellipsis may need.
        const ROOM: usize = 16;
        let mut words = String::with_capacity(text.len().min(max));
        for c in text.chars() {
            if words.len() + ROOM > max {
                words.push('…');
                break;
            }
            if escape(c) {
                words.extend(c.escape_default());
            } else {
                words.push(c);
            }
        }
        Words(words)
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Words {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Why a call failed. `Display` says what to do where that is known.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nothing says where the agents are.
    #[error("no agent: start the program with `stanchion run`")]
    NoAgent,
    /// `STANCHION_NODES` is not a list of sockets.
    #[error("STANCHION_NODES is not a list of sockets: entry {entry} is empty or too long")]
    Nodes {
        /// Which, from 0.
        entry: usize,
    },
    /// The agent's socket does not answer.
    #[error("the agent of node {slot} cannot be reached: {cause}")]
    Connect {
        /// The slot.
        slot: u32,
        /// Why.
        cause: rustix::io::Errno,
    },
    /// The socket belongs to somebody else (FM-C2).
    #[error("the agent's socket of node {slot} belongs to another user (uid {uid})")]
    Stranger {
        /// The slot.
        slot: u32,
        /// Whose it is.
        uid: u32,
    },
    /// Nothing came in time. The client is dead: the answer may still come, and would be taken for
    /// that to a later question.
    #[error("{verb}: the agent did not answer within {ms} ms; the connection is given up")]
    Timeout {
        /// What was asked.
        verb: &'static str,
        /// The whole wait.
        ms: u64,
    },
    /// The connection closed.
    #[error("{verb}: the agent is gone ({cause})")]
    Gone {
        /// What was asked.
        verb: &'static str,
        /// The system's word for it.
        cause: std::io::ErrorKind,
    },
    /// What came is not the protocol.
    #[error("{verb}: {cause}; the connection is given up")]
    Frame {
        /// What was asked.
        verb: &'static str,
        /// Why.
        cause: FrameError,
    },
    /// The answer does not belong to the question, or holds what it must not.
    #[error("{verb}: the agent's answer is not one to this question; the connection is given up")]
    Answer {
        /// What was asked.
        verb: &'static str,
    },
    /// Shared memory of the agent cannot be used here.
    #[error("{0}")]
    Memory(#[from] stanchion_mem::MemError),
    /// Nobody can tell what changed.
    #[error("incremental checkpoint: {0}")]
    Track(#[from] stanchion_mem::track::TrackError),
    /// An earlier failure ended the connection.
    #[error("{verb}: the connection to the agent was lost before")]
    Dead {
        /// What was asked.
        verb: &'static str,
    },
    /// The agent's words.
    #[error("{text}")]
    Refused {
        /// For programs.
        code: Code,
        /// For people.
        text: Words,
    },
    /// The dataset was dropped, and this rank's own files are the reason.
    #[error("the dataset was dropped: rank {rank}: {fault}")]
    Dropped {
        /// This rank.
        rank: u32,
        /// What is wrong here.
        fault: Fault,
    },
    /// The call does not fit what was called before.
    #[error("{call} is not possible {phase}")]
    State {
        /// The call.
        call: &'static str,
        /// Where the caller is.
        phase: &'static str,
    },
    /// The library is switched off (`enable` is 0), and this cannot pass through.
    #[error("{call}: Stanchion is disabled (enable=0)")]
    Disabled {
        /// The call.
        call: &'static str,
        /// For programs.
        code: Code,
    },
    /// A name is refused.
    #[error("{what} '{name}': {cause}")]
    Name {
        /// Of a dataset, of a file.
        what: &'static str,
        /// As given.
        name: Words,
        /// Why.
        cause: NameError,
    },
    /// An argument is refused.
    #[error("{call}: {what}")]
    Argument {
        /// The call.
        call: &'static str,
        /// Which, and what is wrong.
        what: &'static str,
    },
    /// A caller's buffer is too small.
    #[error("{call}: the buffer has room for {have} bytes, the answer has {need}")]
    Buffer {
        /// The call.
        call: &'static str,
        /// What fits, without the terminating zero.
        have: usize,
        /// What would have to.
        need: usize,
    },
    /// More files than a rank may have.
    #[error("a rank may put {} files into one dataset, not more", limits::RANK_FILES_MAX)]
    TooManyFiles,
    /// No region of this number is known.
    #[error("{call}: there is no region {id}")]
    NoRegion {
        /// The call.
        call: &'static str,
        /// The region.
        id: u64,
    },
    /// No stream of this number is open.
    #[error("{call}: there is no stream {id}")]
    NoStream {
        /// The call.
        call: &'static str,
        /// The stream.
        id: u64,
    },
    /// A path that a dataset cannot have beside another one.
    #[error("'{path}' cannot be added to the dataset, which has '{by}' already")]
    Taken {
        /// Below the prefix.
        path: Words,
        /// The same, a directory of it, or a file below it.
        by: Words,
    },
    /// There is nothing to restart from.
    #[error("there is no dataset to restart from")]
    NoRestart,
    /// What is protected is not what the dataset has.
    #[error("{}", region_words(.dataset, *.id, *.protected, *.stored))]
    Region {
        /// The dataset.
        dataset: Words,
        /// The region.
        id: u64,
        /// Its size in this program, bytes, if it is protected.
        protected: Option<u64>,
        /// Its size in the dataset, bytes, if it is there.
        stored: Option<u64>,
    },
    /// Regions cannot be laid out, or their file makes no sense.
    #[error("regions in '{path}': {cause}")]
    Regions {
        /// The file.
        path: Words,
        /// Why.
        cause: RegionsError,
    },
    /// No such file in the dataset that is restarted from.
    #[error("dataset '{dataset}' has no file '{name}' of rank {rank}")]
    NoFile {
        /// The dataset.
        dataset: Words,
        /// As given.
        name: Words,
        /// This rank.
        rank: u32,
    },
    /// A name without a directory that several files have.
    #[error("dataset '{dataset}' has several files '{name}' of rank {rank}: name its directory")]
    Ambiguous {
        /// The dataset.
        dataset: Words,
        /// As given.
        name: Words,
        /// This rank.
        rank: u32,
    },
    /// The operating system refuses.
    #[error("{what} '{path}': {cause}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// With what.
        path: Words,
        /// Why.
        cause: std::io::Error,
    },
    /// A setting is refused.
    #[error(transparent)]
    Setting(#[from] ConfigError),
    /// Who this rank is cannot be told.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// There is no child to copy.
    #[error("{cause}")]
    Fork {
        /// Why.
        cause: stanchion_mem::forked::ForkError,
    },
    /// Memory cannot be write-protected, or not now.
    #[error("{cause}")]
    Protect {
        /// Why.
        cause: CowError,
    },
    /// There is no thread to copy.
    #[error("no thread can be started: {cause}")]
    Thread {
        /// Why.
        cause: std::io::Error,
    },
    /// What was copied behind the program was not whole.
    #[error("{}", behind_words(*.no, *.region, cause))]
    Behind {
        /// The dataset.
        no: DatasetNo,
        /// Which region, if that is known.
        region: Option<u64>,
        /// Why.
        cause: CowError,
    },
    /// A child process uses what its parent opened.
    #[error("this connection belongs to process {owner}; a child process cannot use it")]
    Forked {
        /// Whose it is.
        owner: u32,
    },
    /// A bug.
    #[error("a bug in Stanchion was caught: {text}")]
    Internal {
        /// The panic's message.
        text: Words,
    },
}

/// What is wrong with a rank's own part of a dataset.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// The application says so.
    #[error("the application called its part invalid")]
    Said,
    /// A routed file cannot be found or seen.
    #[error("file '{path}' was routed, but cannot be read: {cause}")]
    File {
        /// Its path below the prefix.
        path: Words,
        /// Why.
        cause: std::io::Error,
    },
    /// A routed path is a directory, link or device.
    #[error("'{path}' was routed as a file, but is none")]
    NoFile {
        /// Its path below the prefix.
        path: Words,
    },
    /// A stream was not closed.
    #[error("stream '{path}' is still open")]
    Open {
        /// Its path below the prefix.
        path: Words,
    },
    /// A stream could not be written.
    #[error("stream '{path}' could not be written: {cause}")]
    Stream {
        /// Its path below the prefix.
        path: Words,
        /// What the caller heard then.
        cause: Words,
    },
}

fn behind_words(no: DatasetNo, region: Option<u64>, cause: &CowError) -> String {
    match (region, cause) {
        (Some(id), CowError::Torn { .. }) => format!(
            "dataset {no} cannot be completed: memory of region {id} was unmapped, moved or dropped before it was copied (stn_unprotect waits for the copy)"
        ),
        (Some(id), cause) => format!("dataset {no} cannot be completed: region {id}: {cause}"),
        (None, cause) => format!("dataset {no} cannot be completed: {cause}"),
    }
}

fn region_words(dataset: &Words, id: u64, protected: Option<u64>, stored: Option<u64>) -> String {
    match (protected, stored) {
        (Some(have), Some(stored)) => format!(
            "region {id} is protected with {have} bytes, dataset '{dataset}' has {stored}: it is of another division of the problem"
        ),
        (Some(_), None) => {
            format!("region {id} is protected, dataset '{dataset}' has none of that number")
        }
        (None, _) => format!("dataset '{dataset}' has a region {id}, which is not protected"),
    }
}

impl Error {
    /// For programs.
    pub fn code(&self) -> Code {
        match self {
            Error::NoAgent | Error::Connect { .. } | Error::Stranger { .. } => Code::Agent,
            Error::Gone { .. } | Error::Dead { .. } => Code::Agent,
            Error::Timeout { .. } => Code::Timeout,
            Error::Frame { .. } | Error::Answer { .. } => Code::Protocol,
            Error::Refused { code, .. } | Error::Disabled { code, .. } => *code,
            Error::Dropped { .. } => Code::Dropped,
            Error::State { .. } | Error::Forked { .. } => Code::State,
            Error::Setting(ConfigError::Unknown { .. }) | Error::NoFile { .. } => Code::NotFound,
            Error::NoRestart | Error::NoRegion { .. } => Code::NotFound,
            Error::Region { .. } | Error::NoStream { .. } | Error::Taken { .. } => Code::Invalid,
            Error::Regions { cause: RegionsError::TooMany(_) | RegionsError::TooLarge, .. } => {
                Code::Invalid
            }
            Error::Regions { .. } => Code::Io,
            Error::Nodes { .. } | Error::Name { .. } | Error::Argument { .. } => Code::Invalid,
            Error::Buffer { .. } | Error::TooManyFiles | Error::Ambiguous { .. } => Code::Invalid,
            Error::Setting(_) | Error::Identity(_) => Code::Invalid,
            Error::Io { cause, .. } if cause.kind() == std::io::ErrorKind::StorageFull => {
                Code::Space
            }
            Error::Memory(_) => Code::Space,
            Error::Fork { .. } | Error::Protect { .. } | Error::Thread { .. } => Code::Internal,
            Error::Behind { .. } => Code::Level,
            Error::Track(_) => Code::Invalid,
            Error::Io { .. } => Code::Io,
            Error::Internal { .. } => Code::Internal,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_harmless_and_short() {
        assert_eq!(Words::new("a\u{1b}[1m\nb").as_str(), "a\\u{1b}[1m\nb");
        assert_eq!(Words::name("a\nb").as_str(), "a\\nb");
        assert!(Words::new(&"ä".repeat(10_000)).as_str().len() <= limits::TEXT_BYTES_MAX);
        assert!(Words::name(&"x".repeat(5_000)).as_str().len() <= 512);
        assert_eq!(Words::name("it's").as_str(), "it's");
    }
}
