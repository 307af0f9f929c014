//! The command line.

use clap::{Args, Parser, Subcommand};
use std::ffi::OsString;
use std::path::PathBuf;

mod bench;
pub use bench::*;

/// Keeps long parallel jobs alive: checkpoints in memory on several nodes, restart on a spare within seconds.
#[derive(Debug, Parser)]
#[command(name = "stanchion", version, disable_help_subcommand = true, max_term_width = 100)]
#[command(
    after_help = "`stanchion help exit-codes` lists the exit codes, `stanchion config` the settings."
)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a parallel program, and restart it from its checkpoints when it or a node is lost
    Run(RunArgs),
    /// Save the newest checkpoint from the files of a job whose runner and agents are all gone
    Scavenge(ScavengeArgs),
    /// List the datasets in a prefix
    List(PrefixArgs),
    /// Show one dataset of a prefix: its files by rank
    Inspect(InspectArgs),
    /// Read every byte of datasets in a prefix and compare it with its checksum
    Verify(VerifyArgs),
    /// Write a dataset's files under their own names into a directory
    Export(ExportArgs),
    /// Keep a dataset from being deleted
    Pin(PinArgs),
    /// Let a pinned dataset be deleted again
    Unpin(PinArgs),
    /// Delete datasets from a prefix: those named, or all checkpoints but the newest ones
    Prune(PruneArgs),
    /// Show this user's running jobs
    Status(StatusArgs),
    /// Ask a running job to end, or show and withdraw what was asked
    Halt(HaltArgs),
    /// Show the settings, their values and where these come from
    Config(ConfigArgs),
    /// Measure Stanchion against its goals
    Bench(BenchArgs),
    /// Run any program and show how it writes its checkpoints, and what to choose for them
    Profile(ProfileArgs),
    /// Show help on a command or on `exit-codes`
    Help {
        /// A command, or `exit-codes`.
        topic: Option<String>,
    },
    /// A node's agent; started by `stanchion run`
    #[command(hide = true)]
    Agent(AgentArgs),
}

/// `stanchion agent`: for people who look at the list of processes. What counts comes by standard input.
#[derive(Debug, Args)]
pub struct AgentArgs {
    /// Its number
    #[arg(long)]
    pub id: u32,
    /// The job's name
    #[arg(long)]
    pub job: String,
}

/// Where the datasets are.
#[derive(Debug, Args)]
pub struct PrefixArgs {
    /// The persistent directory; otherwise from the environment, or the current directory
    #[arg(long, value_name = "DIR")]
    pub prefix: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `stanchion run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// Nodes; each has its own agent, cache and share of the ranks
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub nodes: u32,
    /// Further nodes that take over when one is lost
    #[arg(long, value_name = "M", default_value_t = 0)]
    pub spares: u32,
    /// The persistent directory [setting: prefix]
    #[arg(long, value_name = "DIR")]
    pub prefix: Option<PathBuf>,
    /// Where nodes keep their caches [setting: cache_dir]
    #[arg(long, value_name = "DIR")]
    pub cache_dir: Option<PathBuf>,
    /// Redundancy: SINGLE, PARTNER, XOR, RS or RS(k,m) [setting: scheme]
    #[arg(long)]
    pub scheme: Option<String>,
    /// Nodes of a redundancy set [setting: set_size]
    #[arg(long, value_name = "N")]
    pub set_size: Option<String>,
    /// Every so manieth checkpoint goes to the prefix [setting: flush_every]
    #[arg(long, value_name = "N")]
    pub flush_every: Option<String>,
    /// What a dataset is in the prefix: files or containers [setting: flush_layout]
    #[arg(long, value_name = "LAYOUT")]
    pub layout: Option<String>,
    /// Launches of the application at most [setting: runs_max]
    #[arg(long, value_name = "N")]
    pub runs_max: Option<String>,
    /// Launches in a row that may fail without progress [setting: retries_max]
    #[arg(long, value_name = "N")]
    pub retries_max: Option<String>,
    /// Any setting; see `stanchion config`. May be repeated
    #[arg(long = "set", value_name = "NAME=VALUE")]
    pub set: Vec<String>,
    /// Name of the job in messages and directories [setting: job_name]
    #[arg(long)]
    pub name: Option<String>,
    /// Do not restart from what is in the prefix; it stays there
    #[arg(long)]
    pub from_scratch: bool,
    /// Write what happens to FILE, one JSON object a line
    #[arg(long, value_name = "FILE")]
    pub json_events: Option<PathBuf>,
    /// More messages (twice: still more)
    #[arg(short, long, action = clap::ArgAction::Count)]
    pub verbose: u8,
    /// The launch command, unchanged: `mpiexec -n 8 ./app ...`
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

/// `stanchion scavenge`.
#[derive(Debug, Args)]
pub struct ScavengeArgs {
    #[command(flatten)]
    pub common: PrefixArgs,
    /// A node's cache, or a directory of such; otherwise what this user's dead jobs left on this machine. May be repeated
    #[arg(long = "cache", value_name = "DIR")]
    pub caches: Vec<PathBuf>,
    /// Only jobs of this name, or whose job directory this is
    #[arg(long, value_name = "JOB", conflicts_with = "caches")]
    pub job: Option<String>,
    /// Remove what is left instead of saving it
    #[arg(long, conflicts_with = "caches")]
    pub discard: bool,
    /// Any setting; see `stanchion config`. May be repeated
    #[arg(long = "set", value_name = "NAME=VALUE")]
    pub set: Vec<String>,
}

/// `stanchion inspect`.
#[derive(Debug, Args)]
pub struct InspectArgs {
    /// The dataset's name or number
    #[arg(value_name = "NAME|NUMBER")]
    pub dataset: String,
    #[command(flatten)]
    pub common: PrefixArgs,
}

/// `stanchion verify`.
#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// The dataset's name or number; the newest if not given
    #[arg(value_name = "NAME|NUMBER", conflicts_with = "all")]
    pub dataset: Option<String>,
    /// All datasets
    #[arg(long)]
    pub all: bool,
    #[command(flatten)]
    pub common: PrefixArgs,
}

/// `stanchion export`.
#[derive(Debug, Args)]
pub struct ExportArgs {
    /// The dataset's name or number; the newest checkpoint if not given
    #[arg(value_name = "NAME|NUMBER")]
    pub dataset: Option<String>,
    /// An existing directory for the files
    #[arg(long, value_name = "DIR")]
    pub to: PathBuf,
    /// Replace files that are there and differ
    #[arg(long)]
    pub replace: bool,
    #[command(flatten)]
    pub common: PrefixArgs,
}

/// `stanchion pin` and `stanchion unpin`.
#[derive(Debug, Args)]
pub struct PinArgs {
    /// The dataset's name or number
    #[arg(value_name = "NAME|NUMBER")]
    pub dataset: String,
    #[command(flatten)]
    pub common: PrefixArgs,
}

/// `stanchion prune`.
#[derive(Debug, Args)]
pub struct PruneArgs {
    /// Datasets to delete, by name or number
    #[arg(value_name = "NAME|NUMBER", conflicts_with_all = ["keep_last", "keep_every"])]
    pub datasets: Vec<String>,
    /// Checkpoints to keep [setting: keep_last]
    #[arg(long, value_name = "N")]
    pub keep_last: Option<u64>,
    /// Keep those, too, whose number is a multiple of K [setting: keep_every]
    #[arg(long, value_name = "K")]
    pub keep_every: Option<u64>,
    /// Only say what would be deleted
    #[arg(long)]
    pub dry_run: bool,
    #[command(flatten)]
    pub common: PrefixArgs,
}

/// `stanchion status`.
#[derive(Debug, Args)]
pub struct StatusArgs {
    /// Only jobs of this name, or whose job directory this is
    #[arg(value_name = "JOB")]
    pub job: Option<String>,
    /// Where job directories are [setting: run_dir]
    #[arg(long, value_name = "DIR")]
    pub run_dir: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `stanchion halt`.
#[derive(Debug, Args)]
pub struct HaltArgs {
    #[command(flatten)]
    pub common: PrefixArgs,
    /// End after the next complete checkpoint (the default)
    #[arg(long, group = "wish")]
    pub now: bool,
    /// End at once, without a further checkpoint
    #[arg(long, group = "wish")]
    pub immediately: bool,
    /// End after N further checkpoints
    #[arg(long, value_name = "N", group = "wish")]
    pub after_checkpoints: Option<u64>,
    /// End before TIME, less the setting halt_s: seconds since 1970, 2030-01-31T12:00:00Z, or +90s, +15m, +2h
    #[arg(long, value_name = "TIME", group = "wish")]
    pub before: Option<String>,
    /// End at the first opportunity after TIME
    #[arg(long, value_name = "TIME", group = "wish")]
    pub after: Option<String>,
    /// Withdraw all wishes
    #[arg(long, group = "wish")]
    pub unset: bool,
    /// Show the wishes
    #[arg(long, group = "wish")]
    pub show: bool,
}

/// `stanchion config`.
#[derive(Debug, Args)]
pub struct ConfigArgs {
    /// Only this setting, by its own name or SCR's
    #[arg(conflicts_with = "markdown")]
    pub name: Option<String>,
    /// Print docs/config.md
    #[arg(long, conflicts_with = "json")]
    pub markdown: bool,
    /// Values as a run with this prefix would see them
    #[arg(long, value_name = "DIR")]
    pub prefix: Option<PathBuf>,
    /// As for `run`. May be repeated
    #[arg(long = "set", value_name = "NAME=VALUE")]
    pub set: Vec<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `stanchion profile`.
#[derive(Debug, Args)]
pub struct ProfileArgs {
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    /// Write what is shown to FILE instead of standard output, which the program uses, too
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Seconds without a write after which a new burst, that is a checkpoint, begins
    #[arg(long, value_name = "S", default_value_t = 1.0)]
    pub gap_s: f64,
    /// Mean time between failures of the whole job, seconds: tells the interval between checkpoints
    #[arg(long, value_name = "S")]
    pub mtbf_s: Option<f64>,
    /// Keep the record of each process in DIR, which all nodes must see; otherwise they are temporary
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// The launch command, unchanged: `mpiexec -n 8 ./app ...`
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}
