//! Every named maximum of what comes from outside (FM-C3).

/// Default size of a chunk, bytes. DESIGN.md section 2.
pub const CHUNK_BYTES: u32 = 4 << 20;
/// Largest chunk a peer may offer, bytes.
pub const CHUNK_BYTES_MAX: u32 = 64 << 20;
/// Smallest chunk that may be configured, bytes.
pub const CHUNK_BYTES_MIN: u32 = 4 << 10;
/// Largest body of a control frame between agents, bytes.
pub const PEER_FRAME_BYTES_MAX: u32 = 64 << 20;
/// Largest body of a frame on a rank's local socket, bytes.
pub const CLIENT_FRAME_BYTES_MAX: u32 = 16 << 20;
/// Extents of the pool that one answer to a rank may name: a descriptor goes with each, and the kernel passes at
/// most 253 (SCM_MAX_FD, unix(7)) at once.
pub const EXTENTS_PER_ANSWER_MAX: usize = 200;
/// Parts of a file in the pool that one answer to a rank may name.
pub const PARTS_PER_ANSWER_MAX: usize = 65_536;
/// Chunks that a large extent of the pool has.
pub const EXTENT_CHUNKS: u64 = 16;
/// Parts that a file in the pool may have.
pub const MEMORY_PARTS_MAX: usize = 262_144;
/// Longest path below the prefix, bytes (SCR_MAX_FILENAME is 1024).
pub const PATH_BYTES_MAX: usize = 1023;
/// Longest name of a dataset, bytes.
pub const DATASET_NAME_BYTES_MAX: usize = 255;
/// Longest text of an error or notice, bytes.
pub const TEXT_BYTES_MAX: usize = 4096;
/// Files that one rank may put into one dataset.
pub const RANK_FILES_MAX: usize = 65_536;
/// Ranks of a job.
pub const RANKS_MAX: u32 = 1 << 24;
/// Nodes of a job.
pub const SLOTS_MAX: u32 = 1 << 17;
/// Members of a redundancy set.
pub const SET_SIZE_MAX: u32 = 256;
/// Settings that one rank may send.
pub const SETTINGS_MAX: usize = 1024;
/// Longest value of a setting, bytes.
pub const SETTING_BYTES_MAX: usize = 4096;
/// Ancestors that are remembered.
pub const ANCESTRY_ENTRIES_MAX: usize = 1024;
/// Largest index record or manifest file in the prefix, bytes.
pub const INDEX_FILE_BYTES_MAX: u64 = 256 << 20;
/// Largest record of what a slot holds in a cache, bytes.
pub const HOLDING_BYTES_MAX: u64 = 256 << 20;
/// Names of ranks that an error lists before it says "and more".
pub const MISSING_RANKS_LISTED_MAX: usize = 16;
