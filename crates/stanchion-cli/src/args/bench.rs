//! Arguments of the benchmarks.

use clap::{Args, Subcommand, ValueEnum};
use std::path::PathBuf;

/// `stanchion bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// What to measure.
    #[command(subcommand)]
    pub bench: Bench,
}

/// The benchmarks.
#[derive(Debug, Subcommand)]
pub enum Bench {
    /// Time a program is blocked by a checkpoint of its own files, with Stanchion and without
    Routed(RoutedArgs),
    /// Write checkpoints of many processes until they are durable: files, the pool, and raw direct writes
    Aggregate(AggregateArgs),
    /// The job of `bench aggregate`
    #[command(hide = true)]
    AggregateRanks(AggregateRankArgs),
    /// A writer of it
    #[command(hide = true)]
    AggregateRank(AggregateRankArgs),
    /// Time a program is blocked by a checkpoint of its memory, beside what the copy alone costs
    Blocked(BlockedArgs),
    /// The job of `bench blocked`
    #[command(hide = true)]
    BlockedRanks(BlockedRankArgs),
    /// A rank of it
    #[command(hide = true)]
    BlockedRank(BlockedRankArgs),
    /// The codes on one core: XOR beside memcpy, Reed-Solomon beside Intel ISA-L
    Code(CodeArgs),
    /// Time that ranks wait for the agreement on a dataset, by the number of nodes: simulated, and real ones beside it
    Commit(CommitArgs),
    /// The job of `bench commit`
    #[command(hide = true)]
    CommitRanks(CommitRankArgs),
    /// A rank of it
    #[command(hide = true)]
    CommitRank(CommitRankArgs),
    /// Time until a dataset is protected, by scheme and nodes, in memory and on a slow disk, beside a slow prefix; and what
    /// redundancy adds to the blocked time
    Schemes(SchemesArgs),
    /// The job of `bench schemes`
    #[command(hide = true)]
    SchemesRanks(SchemesRankArgs),
    /// A rank of it
    #[command(hide = true)]
    SchemesRank(SchemesRankArgs),
    /// Time after a loss until the data can be read, beside the bare writes of a checkpoint; also over slow links
    Rebuild(RebuildArgs),
    /// The job of `bench rebuild`
    #[command(hide = true)]
    RebuildRanks(RebuildRankArgs),
    /// A rank of it
    #[command(hide = true)]
    RebuildRank(RebuildRankArgs),
    /// Time that checkpoints cost a job which computes, with what is done behind it
    Overhead(OverheadArgs),
    /// The job of `bench overhead`
    #[command(hide = true)]
    OverheadRanks(OverheadRankArgs),
    /// A rank of it
    #[command(hide = true)]
    OverheadRank(OverheadRankArgs),
    /// What the agent's shared memory costs: asking, making, copying cold and warm, waiting for it
    Pool(PoolArgs),
    /// The job of `bench pool`
    #[command(hide = true)]
    PoolRanks(PoolRankArgs),
    /// A rank of it
    #[command(hide = true)]
    PoolRank(PoolRankArgs),
}

/// `stanchion bench code`.
#[derive(Debug, Args)]
pub struct CodeArgs {
    /// Rounds
    #[arg(long, default_value_t = 9)]
    pub rounds: u32,
    /// Data that goes through at each measurement, MiB
    #[arg(long, default_value_t = 256)]
    pub mb: u64,
    /// Sizes of a piece, KiB
    #[arg(long, value_name = "KIB,...", value_delimiter = ',', default_value = "64,256,4096")]
    pub sizes: Vec<u32>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Exit with 1 if a goal is missed
    #[arg(long)]
    pub check: bool,
}

/// `stanchion bench commit`.
#[derive(Debug, Args)]
pub struct CommitArgs {
    /// Simulated nodes
    #[arg(long, value_delimiter = ',', default_value = "64,256,1024,4096,16384")]
    pub nodes: Vec<u32>,
    /// Ranks of each
    #[arg(long, default_value_t = 1)]
    pub ranks_per_node: u32,
    /// Checkpoints of each number of nodes
    #[arg(long, default_value_t = 5)]
    pub rounds: u32,
    /// From node to node
    #[arg(long, value_name = "US", default_value_t = 50.0)]
    pub hop_us: f64,
    /// What each of both ends spends on a message
    #[arg(long, value_name = "US", default_value_t = 10.0)]
    pub message_us: f64,
    /// What an agent takes to handle a message; measured in this run if it is not given
    #[arg(long, value_name = "US")]
    pub handling_us: Option<f64>,
    /// Real agents on this machine; 0: none
    #[arg(long, default_value_t = 64)]
    pub real: u32,
    /// Checkpoints of them
    #[arg(long, default_value_t = 100)]
    pub real_rounds: u32,
    /// A directory for what the job needs
    #[arg(long, value_name = "DIR", default_value = "/tmp")]
    pub disk: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Exit with 1 if a goal is missed
    #[arg(long)]
    pub check: bool,
}

/// Inside of `stanchion bench commit`.
#[derive(Debug, Args)]
pub struct CommitRankArgs {
    #[arg(long, default_value_t = 0)]
    pub rank: u32,
    #[arg(long)]
    pub ranks: u32,
    #[arg(long)]
    pub rounds: u32,
    #[arg(long)]
    pub dir: PathBuf,
}

/// `stanchion bench schemes`.
#[derive(Debug, Args)]
pub struct SchemesArgs {
    /// Nodes, a rank on each
    #[arg(long, value_delimiter = ',', default_value = "2,4,8,16")]
    pub nodes: Vec<u32>,
    /// What each rank has, MiB
    #[arg(long, default_value_t = 16)]
    pub mb: u64,
    /// Checkpoints of each job that count
    #[arg(long, default_value_t = 3)]
    pub rounds: u32,
    /// Caches also on a loop device held to so many MB/s (root); 0: not
    #[arg(long, value_name = "MB/S", default_value_t = 200)]
    pub disk_held: u64,
    /// A flush to a prefix on a loop device held to so many MB/s (root); 0: none
    #[arg(long, value_name = "MB/S", default_value_t = 200)]
    pub prefix_held: u64,
    /// What each of six ranks has where blocked times are compared, MiB
    #[arg(long, default_value_t = 256)]
    pub blocked_mb: u64,
    /// Rounds of that, a job of each scheme in each; 0: none
    #[arg(long, default_value_t = 5)]
    pub blocked_rounds: u32,
    /// Checkpoints of such a job that count
    #[arg(long, default_value_t = 9)]
    pub blocked_checkpoints: u32,
    /// A directory for what the jobs need
    #[arg(long, value_name = "DIR", default_value = "/tmp")]
    pub disk: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Exit with 1 if a goal is missed
    #[arg(long)]
    pub check: bool,
}

/// Inside of `stanchion bench schemes`.
#[derive(Debug, Args)]
pub struct SchemesRankArgs {
    #[arg(long, default_value_t = 0)]
    pub rank: u32,
    #[arg(long)]
    pub ranks: u32,
    #[arg(long)]
    pub mb: u64,
    #[arg(long)]
    pub checkpoints: u32,
    #[arg(long)]
    pub dir: PathBuf,
    #[arg(long)]
    pub sync: Option<PathBuf>,
    #[arg(long)]
    pub persistent: bool,
    #[arg(long, default_value_t = 0)]
    pub pause_ms: u64,
}

/// `stanchion bench rebuild`.
#[derive(Debug, Args)]
pub struct RebuildArgs {
    /// What each of four ranks on four nodes has, MiB
    #[arg(long, default_value_t = 256)]
    pub mb: u64,
    /// Losses of each kind
    #[arg(long, default_value_t = 5)]
    pub rounds: u32,
    /// The ranks write files themselves; otherwise regions go through the pool
    #[arg(long)]
    pub files: bool,
    /// Every agent behind a link of so many Mbit/s, in network namespaces (root); 0: all on the loopback
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub link_mbit: u32,
    /// A directory for what the job needs
    #[arg(long, value_name = "DIR", default_value = "/tmp")]
    pub disk: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Exit with 1 if a goal is missed
    #[arg(long)]
    pub check: bool,
}

/// Inside of `stanchion bench rebuild`.
#[derive(Debug, Args)]
pub struct RebuildRankArgs {
    #[arg(long, default_value_t = 0)]
    pub rank: u32,
    #[arg(long)]
    pub ranks: u32,
    #[arg(long)]
    pub mb: u64,
    #[arg(long)]
    pub files: bool,
    #[arg(long)]
    pub dir: PathBuf,
    #[arg(long)]
    pub cache: PathBuf,
}

/// `stanchion bench pool`.
#[derive(Debug, Args)]
pub struct PoolArgs {
    /// Ranks, at most: it is measured with 1, 2, 4 and so on
    #[arg(long, default_value_t = 4)]
    pub ranks: u32,
    /// Memory of each, MiB
    #[arg(long, default_value_t = 64)]
    pub mb: u64,
    /// Rounds
    #[arg(long, default_value_t = 9)]
    pub repeats: u32,
    /// A directory for what the job needs
    #[arg(long, value_name = "DIR", default_value = "/tmp")]
    pub disk: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Exit with 1 if a goal is missed
    #[arg(long)]
    pub check: bool,
}

/// Inside of `stanchion bench pool`.
#[derive(Debug, Args)]
pub struct PoolRankArgs {
    #[arg(long, default_value_t = 0)]
    pub rank: u32,
    #[arg(long)]
    pub ranks: u32,
    #[arg(long)]
    pub mb: u64,
    #[arg(long)]
    pub repeats: u32,
    #[arg(long)]
    pub full: bool,
    #[arg(long)]
    pub dir: PathBuf,
}

/// How a computing job makes its state safe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Way {
    /// Not at all
    None,
    /// Each rank writes its own file in place, and fsync
    Files,
    /// Through the pool; safe in the caches
    Pool,
    /// Through the pool, and every checkpoint is flushed to the disk
    Flush,
    /// Through the pool, copied behind the ranks
    Cow,
    /// Through the pool, only what changed
    Incremental,
}

impl Way {
    /// As an argument.
    pub fn word(self) -> &'static str {
        match self {
            Way::None => "none",
            Way::Files => "files",
            Way::Pool => "pool",
            Way::Flush => "flush",
            Way::Cow => "cow",
            Way::Incremental => "incremental",
        }
    }

    /// For people.
    pub fn title(self) -> &'static str {
        match self {
            Way::None => "no checkpoints",
            Way::Files => "files in place, fsync",
            Way::Pool => "interleaved, caches",
            Way::Flush => "interleaved, to disk",
            Way::Cow => "copy-on-write, caches",
            Way::Incremental => "incremental, caches",
        }
    }
}

/// Where a computing job runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Place {
    /// On all cores
    Busy,
    /// On all but one
    Spare,
}

impl Place {
    /// As an argument.
    pub fn word(self) -> &'static str {
        match self {
            Place::Busy => "busy",
            Place::Spare => "spare",
        }
    }
}

/// `stanchion bench overhead`.
#[derive(Debug, Args)]
pub struct OverheadArgs {
    /// Ranks
    #[arg(long, default_value_t = 4)]
    pub ranks: u32,
    /// Memory of each, MiB
    #[arg(long, default_value_t = 256)]
    pub mb: u64,
    /// How long the job computes without checkpoints
    #[arg(long, value_name = "S", default_value_t = 60.0)]
    pub seconds: f64,
    /// Checkpoints in this time, evenly
    #[arg(long, default_value_t = 3)]
    pub checkpoints: u32,
    /// Pairs of windows, with and without a checkpoint, in one run of each way
    #[arg(long, default_value_t = 6)]
    pub pairs: u32,
    /// Also whole runs, with and without checkpoints, in every way: so many rounds
    #[arg(long, default_value_t = 0)]
    pub repeats: u32,
    /// How the state is made safe
    #[arg(long, value_enum, value_delimiter = ',', default_value = "files,cow,flush")]
    pub ways: Vec<Way>,
    /// On which cores the job runs
    #[arg(long, value_enum, value_delimiter = ',', default_value = "busy,spare")]
    pub place: Vec<Place>,
    /// A directory on a disk
    #[arg(long, value_name = "DIR", default_value = "/tmp")]
    pub disk: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Exit with 1 if a goal is missed
    #[arg(long)]
    pub check: bool,
}

/// Inside of `stanchion bench overhead`.
#[derive(Debug, Args)]
pub struct OverheadRankArgs {
    #[arg(long, default_value_t = 0)]
    pub rank: u32,
    #[arg(long)]
    pub ranks: u32,
    #[arg(long)]
    pub mb: u64,
    #[arg(long)]
    pub steps: u64,
    #[arg(long, allow_hyphen_values = true)]
    pub plan: String,
    #[arg(long, default_value_t = 0)]
    pub cores: usize,
    #[arg(long, value_enum)]
    pub way: Way,
    #[arg(long)]
    pub dir: PathBuf,
}

/// `stanchion bench aggregate`.
#[derive(Debug, Args)]
pub struct AggregateArgs {
    /// A directory on the disk to be measured
    #[arg(long, value_name = "DIR", default_value = "/var/tmp")]
    pub dir: PathBuf,
    /// Processes that write
    #[arg(long, default_value_t = 8)]
    pub writers: u32,
    /// Size of a checkpoint of all of them on the disk as it is, MiB
    #[arg(long, default_value_t = 2048)]
    pub mb: u64,
    /// Rounds that count; in each, every way of writing has its turn
    #[arg(long, default_value_t = 9)]
    pub repeats: u32,
    /// Also on a loop device that is held to so many MB/s (as root). Several with commas
    #[arg(long, value_name = "MB/S", value_delimiter = ',')]
    pub held: Vec<u64>,
    /// Also the calls that were recorded in these files (lines seq,t_us,offset,size,dur_us, perhaps gzipped), a
    /// process each in turn
    #[arg(long, value_name = "FILE", num_args = 1..)]
    pub trace: Vec<PathBuf>,
    /// Not the built-in stream, only the traces
    #[arg(long, requires = "trace")]
    pub only_traces: bool,
    /// Not the disk as it is
    #[arg(long)]
    pub no_plain: bool,
    /// Not the files whose every call is durable when it returns (on the disk as it is): they take long
    #[arg(long)]
    pub no_dsync: bool,
    /// A setting of the job
    #[arg(long, value_name = "NAME=VALUE")]
    pub set: Vec<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Exit with 1 if a goal is missed
    #[arg(long)]
    pub check: bool,
}

/// Inside of `stanchion bench aggregate`.
#[derive(Debug, Args)]
pub struct AggregateRankArgs {
    #[arg(long, default_value_t = 0)]
    pub rank: u32,
    #[arg(long)]
    pub ranks: u32,
    #[arg(long)]
    pub copies: u64,
    #[arg(long)]
    pub repeats: u32,
    #[arg(long)]
    pub work: PathBuf,
    #[arg(long)]
    pub dsync: bool,
}

/// `stanchion bench blocked`.
#[derive(Debug, Args)]
pub struct BlockedArgs {
    /// Ranks
    #[arg(long, default_value_t = 4)]
    pub ranks: u32,
    /// Memory of each, MiB
    #[arg(long, default_value_t = 256)]
    pub mb: u64,
    /// Checkpoints; the first counts by itself
    #[arg(long, default_value_t = 8)]
    pub repeats: u32,
    /// A directory on a disk
    #[arg(long, value_name = "DIR", default_value = "/tmp")]
    pub disk: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Exit with 1 if a goal is missed
    #[arg(long)]
    pub check: bool,
}

/// Inside of `stanchion bench blocked`.
#[derive(Debug, Args)]
pub struct BlockedRankArgs {
    #[arg(long, default_value_t = 0)]
    pub rank: u32,
    #[arg(long)]
    pub ranks: u32,
    #[arg(long)]
    pub mb: u64,
    #[arg(long)]
    pub repeats: u32,
    #[arg(long)]
    pub disk: PathBuf,
    #[arg(long)]
    pub tmpfs: PathBuf,
    #[arg(long)]
    pub incremental_only: bool,
    #[arg(long)]
    pub cow_only: bool,
}

/// `stanchion bench routed`.
#[derive(Debug, Args)]
pub struct RoutedArgs {
    /// examples/heat2d, built
    #[arg(long, value_name = "PATH")]
    pub program: PathBuf,
    /// The MPI launcher
    #[arg(long, default_value = "mpiexec")]
    pub mpiexec: String,
    /// An option for the launcher. May be repeated
    #[arg(long, allow_hyphen_values = true, value_name = "OPTION")]
    pub mpiexec_arg: Vec<String>,
    /// Ranks
    #[arg(long, default_value_t = 4)]
    pub ranks: u32,
    /// Nodes
    #[arg(long, default_value_t = 4)]
    pub nodes: u32,
    /// MB each rank writes in a checkpoint
    #[arg(long, default_value_t = 256)]
    pub mb: u32,
    /// Pairs of runs, one with and one without Stanchion each
    #[arg(long, default_value_t = 7)]
    pub repeats: u32,
    /// Checkpoints in each run; the first of each run is warm-up and reported on its own
    #[arg(long, default_value_t = 4)]
    pub checkpoints: u32,
    /// Computing between two checkpoints, milliseconds
    #[arg(long, default_value_t = 3000)]
    pub pause_ms: u32,
    /// Redundancy scheme
    #[arg(long, default_value = "XOR")]
    pub scheme: String,
    /// Where both write: node caches, and the plain files
    #[arg(long, value_name = "DIR", default_value = "/dev/shm")]
    pub dir: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    /// Exit 1 where a goal is not reached
    #[arg(long)]
    pub check: bool,
}
