//! `stanchion agent`: the process of a node's agent, around `stanchion_agent::daemon`.

use crate::exit::{Exit, Failed};
use crate::jobdir::NodeDir;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Name of the ranks' socket in the agent's directory.
pub const SOCKET: &str = "agent.sock";
/// Longest line of options, bytes.
const OPTIONS_BYTES_MAX: u64 = 8 << 20;

/// What the runner tells an agent through its standard input: nobody else can read it there.
#[derive(Clone, Serialize, Deserialize)]
pub struct Options {
    /// The job's secret.
    pub secret: [u8; 32],
    /// Its identity.
    pub id: u32,
    /// The job's name.
    pub name: String,
    /// The job's id.
    pub job: u64,
    /// The prefix.
    pub prefix: PathBuf,
    /// Its cache.
    pub cache: PathBuf,
    /// Its directory: socket, log.
    pub root: PathBuf,
    /// The job's settings that differ from the defaults.
    pub settings: Vec<(String, String)>,
}

/// What an agent answers on its standard output.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Ready {
    /// It listens for peers here.
    Addr(String),
    /// It cannot.
    Failed {
        /// Exit code.
        exit: u8,
        /// Why.
        text: String,
    },
}
