//! The one table of settings. Environment variables, file keys, `stanchion config` and docs/config.md are
//! made of it.
//!
//! Precedence: command line, `STANCHION_NAME` in the environment, its SCR alias in the environment,
//! `SCR_Config` of the application, the configuration file, the default.

use crate::limits;
use std::collections::BTreeMap;

/// What values a setting takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Any text.
    Text,
    /// A directory or file.
    Path,
    /// 0 or 1 (also false, true, no, yes, off, on).
    Bool,
    /// A count.
    Count,
    /// Bytes; suffixes K, M, G, T (powers of 1024).
    Bytes,
    /// Milliseconds.
    Millis,
    /// Seconds.
    Seconds,
    /// Per cent, may have a fraction.
    Percent,
    /// One of these words.
    Word(&'static [&'static str]),
}

impl Unit {
    /// For the table.
    pub fn as_str(self) -> String {
        match self {
            Unit::Text => "text".into(),
            Unit::Path => "path".into(),
            Unit::Bool => "0 or 1".into(),
            Unit::Count => "count".into(),
            Unit::Bytes => "bytes (K, M, G, T)".into(),
            Unit::Millis => "ms".into(),
            Unit::Seconds => "s".into(),
            Unit::Percent => "%".into(),
            Unit::Word(words) => words.join(", "),
        }
    }
}

/// When a setting can still change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Only when the job is launched: command line, environment of `stanchion run`, file.
    Launch,
    /// By the application too, before `SCR_Init`; counts from the next dataset on.
    Job,
    /// At any time.
    Live,
}

/// One row.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// Key in files; `STANCHION_` and upper case in the environment.
    pub name: &'static str,
    /// SCR's name for it.
    pub scr: Option<&'static str>,
    /// Value if nobody sets it; empty: none.
    pub default: &'static str,
    /// What values it takes.
    pub unit: Unit,
    /// When it can change.
    pub scope: Scope,
    /// One sentence.
    pub help: &'static str,
}

const fn row(
    name: &'static str,
    scr: Option<&'static str>,
    default: &'static str,
    unit: Unit,
    scope: Scope,
    help: &'static str,
) -> Setting {
    Setting { name, scr, default, unit, scope, help }
}

/// The table.
pub const SETTINGS: &[Setting] = &[
    row(
        "enable",
        Some("SCR_ENABLE"),
        "1",
        Unit::Bool,
        Scope::Job,
        "0: every call of the library passes through; files go straight to the prefix.",
    ),
    row(
        "prefix",
        Some("SCR_PREFIX"),
        "",
        Unit::Path,
        Scope::Launch,
        "The persistent directory; the current directory if not set.",
    ),
    row(
        "cache_dir",
        Some("SCR_CACHE_BASE"),
        "/dev/shm",
        Unit::Path,
        Scope::Launch,
        "Where each node keeps its cache: memory (tmpfs) or a local disk.",
    ),
    row(
        "cache_bytes_max",
        None,
        "0",
        Unit::Bytes,
        Scope::Launch,
        "What a node's cache may hold; 0: what the device has.",
    ),
    row(
        "cache_store",
        None,
        "auto",
        Unit::Word(&["auto", "memory", "segments"]),
        Scope::Launch,
        "Where checkpoints of regions and streams are kept: in the pool (memory), or written from there to segment files \
         in cache_dir, so that their memory serves the next one (segments). auto: segments where cache_dir is on a disk.",
    ),
    row(
        "cache_durable",
        None,
        "0",
        Unit::Bool,
        Scope::Launch,
        "1: a checkpoint counts as protected only when the node's own part is on its disk and synced: then it survives \
         the power loss of its node, if its disk does.",
    ),
    row(
        "cache_datasets",
        Some("SCR_CACHE_SIZE"),
        "2",
        Unit::Count,
        Scope::Job,
        "Checkpoints to keep in the cache. One more exists while the next is written.",
    ),
    row(
        "pool_bytes_max",
        None,
        "0",
        Unit::Bytes,
        Scope::Launch,
        "Shared memory of a node's agent for checkpoints of regions and streams; 0: half of what is free at the \
         start, divided by the agents of this machine.",
    ),
    row(
        "pool_full",
        None,
        "wait",
        Unit::Word(&["wait", "skip", "drop"]),
        Scope::Job,
        "What a checkpoint does when the pool is full: wait for room (pool_wait_ms); skip: be dropped at once; drop: the \
         oldest one whose redundancy is not complete, but never the newest, goes to make room, and then it waits. With \
         wait and drop a checkpoint older than the newest protected one goes first, also below cache_datasets.",
    ),
    row(
        "pool_wait_ms",
        None,
        "60000",
        Unit::Millis,
        Scope::Job,
        "Longest wait of a rank for room in the pool; then its checkpoint is dropped.",
    ),
    row(
        "pool_ready_ms",
        None,
        "5000",
        Unit::Millis,
        Scope::Job,
        "Longest wait of stn_protect for memory to be made warm; what is not ready by then is used cold.",
    ),
    row(
        "pool_idle_ms",
        None,
        "600000",
        Unit::Millis,
        Scope::Job,
        "Memory that the pool did not need in this time and was not reserved is given back.",
    ),
    row(
        "incremental_max",
        None,
        "16",
        Unit::Count,
        Scope::Job,
        "Incremental checkpoints between two full ones.",
    ),
    row(
        "cow_bytes_per_s",
        None,
        "0",
        Unit::Bytes,
        Scope::Job,
        "What is copied behind each rank (STN_COW) in a second, at most, beside what the program waits for; 0: as much as \
         can be. All must be copied within collective_timeout_ms.",
    ),
    row(
        "cow",
        None,
        "auto",
        Unit::Word(&["auto", "userfaultfd", "fork", "copy"]),
        Scope::Live,
        "How a checkpoint with STN_COW goes on behind the program: write protection (userfaultfd), a forked child, or not \
         at all (copy). auto: userfaultfd where it also holds up the kernel's writes and no memory is pinned for a \
         device, or if all regions are declared STN_REGION_NO_IO; otherwise fork.",
    ),
    row(
        "incremental_tracking",
        None,
        "auto",
        Unit::Word(&["auto", "scan", "hash"]),
        Scope::Job,
        "How changed pages are found: asking the kernel (Linux 6.7), comparing hashes, or the first that works.",
    ),
    row(
        "scheme",
        Some("SCR_COPY_TYPE"),
        "XOR",
        Unit::Word(&["SINGLE", "PARTNER", "XOR"]),
        Scope::Job,
        "Redundancy across nodes.",
    ),
    row(
        "set_size",
        Some("SCR_SET_SIZE"),
        "8",
        Unit::Count,
        Scope::Job,
        "Nodes of one redundancy set, at most; 2 or more.",
    ),
    row(
        "chunk_bytes",
        None,
        "4M",
        Unit::Bytes,
        Scope::Launch,
        "Unit of checksums, redundancy and transfer.",
    ),
    row(
        "flush_every",
        Some("SCR_FLUSH"),
        "10",
        Unit::Count,
        Scope::Live,
        "Every so manieth checkpoint goes to the prefix, behind the application; 0: none.",
    ),
    row(
        "flush_at_end",
        None,
        "1",
        Unit::Bool,
        Scope::Live,
        "Flush the newest checkpoint when the job ends.",
    ),
    row(
        "flush_on_restart",
        Some("SCR_FLUSH_ON_RESTART"),
        "0",
        Unit::Bool,
        Scope::Job,
        "Flush the dataset that the job restarts from.",
    ),
    row(
        "fetch",
        Some("SCR_FETCH"),
        "1",
        Unit::Bool,
        Scope::Launch,
        "Restart from the prefix where the cache has nothing.",
    ),
    row(
        "current",
        Some("SCR_CURRENT"),
        "",
        Unit::Text,
        Scope::Launch,
        "Name of the dataset in the prefix to restart from instead of the newest.",
    ),
    row(
        "checkpoint_interval",
        Some("SCR_CHECKPOINT_INTERVAL"),
        "0",
        Unit::Count,
        Scope::Live,
        "need_checkpoint says yes at every so manieth call; 0: not by count.",
    ),
    row(
        "checkpoint_s",
        Some("SCR_CHECKPOINT_SECONDS"),
        "0",
        Unit::Seconds,
        Scope::Live,
        "need_checkpoint says yes when the last checkpoint is so old; 0: not by time.",
    ),
    row(
        "checkpoint_overhead_percent",
        Some("SCR_CHECKPOINT_OVERHEAD"),
        "0",
        Unit::Percent,
        Scope::Live,
        "need_checkpoint says yes while checkpointing takes less than this share of the run time; 0: not by overhead.",
    ),
    row(
        "halt_s",
        Some("SCR_HALT_SECONDS"),
        "0",
        Unit::Seconds,
        Scope::Live,
        "Advise the application to end so long before the allocation does.",
    ),
    row(
        "end_time",
        Some("SCR_END_TIME"),
        "0",
        Unit::Seconds,
        Scope::Launch,
        "When the allocation ends, seconds since 1970; 0: from the scheduler's environment, if it says.",
    ),
    row(
        "halt_enabled",
        Some("SCR_HALT_ENABLED"),
        "0",
        Unit::Bool,
        Scope::Live,
        "1: the runner ends the application itself after the checkpoint at which it was advised to end.",
    ),
    row(
        "runs_max",
        Some("SCR_RUNS"),
        "10",
        Unit::Count,
        Scope::Launch,
        "Launches of the application within one run; SCR's -1 (no limit) is 0.",
    ),
    row(
        "retries_max",
        Some("SCR_RETRIES"),
        "3",
        Unit::Count,
        Scope::Launch,
        "Launches in a row that may fail without a lost node and without a new dataset.",
    ),
    row(
        "job_name",
        Some("SCR_JOB_NAME"),
        "",
        Unit::Text,
        Scope::Launch,
        "Name of the job in messages.",
    ),
    row(
        "config_file",
        Some("SCR_CONF_FILE"),
        "",
        Unit::Path,
        Scope::Launch,
        "File with settings; .stanchion.conf or .scrconf in the prefix if not set.",
    ),
    row("debug", Some("SCR_DEBUG"), "0", Unit::Count, Scope::Live, "1 or 2: more messages."),
    row(
        "run_dir",
        None,
        "",
        Unit::Path,
        Scope::Launch,
        "Where sockets and logs of running jobs are; XDG_RUNTIME_DIR or /tmp if not set.",
    ),
    row(
        "fanout",
        None,
        "8",
        Unit::Count,
        Scope::Launch,
        "Children of an agent in the tree of collectives.",
    ),
    row(
        "collective_timeout_ms",
        None,
        "600000",
        Unit::Millis,
        Scope::Job,
        "Longest wait for the last rank of a collective.",
    ),
    row(
        "init_timeout_ms",
        None,
        "600000",
        Unit::Millis,
        Scope::Launch,
        "Longest wait for the last rank to come.",
    ),
    row(
        "restore_timeout_ms",
        None,
        "3600000",
        Unit::Millis,
        Scope::Launch,
        "Longest time to rebuild or fetch a dataset.",
    ),
    row(
        "flush_timeout_ms",
        None,
        "3600000",
        Unit::Millis,
        Scope::Live,
        "Longest time to write a dataset to the prefix.",
    ),
    row(
        "protect_timeout_ms",
        None,
        "3600000",
        Unit::Millis,
        Scope::Live,
        "Longest time to protect a dataset.",
    ),
    row(
        "start_timeout_ms",
        None,
        "30000",
        Unit::Millis,
        Scope::Launch,
        "Longest time for an agent to start and to answer.",
    ),
    row(
        "silence_timeout_ms",
        None,
        "30000",
        Unit::Millis,
        Scope::Launch,
        "An agent that is silent for so long is asked after by another; silent to both, it is lost.",
    ),
    row(
        "orphan_grace_ms",
        None,
        "2000",
        Unit::Millis,
        Scope::Launch,
        "How long agents without a runner wait for a new one before they flush and leave.",
    ),
    row(
        "shutdown_timeout_ms",
        None,
        "20000",
        Unit::Millis,
        Scope::Launch,
        "Longest time for agents and ranks to end before they are killed.",
    ),
    row(
        "lease_wait_ms",
        None,
        "60000",
        Unit::Millis,
        Scope::Launch,
        "How long a new run waits for another one to leave the prefix.",
    ),
    row(
        "io_threads",
        None,
        "2",
        Unit::Count,
        Scope::Launch,
        "Threads of an agent that read, encode and write, at lowered priority.",
    ),
    row(
        "mpi_launch_grace_ms",
        None,
        "5000",
        Unit::Millis,
        Scope::Launch,
        "How long a launcher may take to end after its ranks were ended.",
    ),
    row(
        "encrypt",
        None,
        "0",
        Unit::Bool,
        Scope::Launch,
        "1: encrypt chunks between nodes too. Control messages always are; chunks always carry checksums.",
    ),
];

/// SCR's variables that have no meaning here, and why. Named once in a warning.
pub const SCR_WITHOUT_MEANING: &[(&str, &str)] = &[
    ("SCR_CACHE_BYPASS", "data always goes through the cache"),
    ("SCR_CNTL_BASE", "there is no control directory"),
    ("SCR_CRC_ON_COPY", "every chunk is always checked"),
    ("SCR_CRC_ON_DELETE", "every chunk is always checked"),
    ("SCR_CRC_ON_FLUSH", "every chunk is always checked"),
    ("SCR_DISTRIBUTE", "files always go to where the ranks run"),
    ("SCR_EXCLUDE_NODES", "leave the node out of the allocation, or give it as a spare"),
    ("SCR_FETCH_WIDTH", "each node reads what its ranks need"),
    ("SCR_FILE_BUF_SIZE", "the unit is the chunk: chunk_bytes"),
    ("SCR_FLUSH_ASYNC", "every flush runs behind the application"),
    ("SCR_FLUSH_WIDTH", "each node writes what its ranks wrote"),
    ("SCR_GLOBAL_RESTART", "flush_on_restart says so"),
    ("SCR_GROUP", "each node is its own failure group"),
    ("SCR_GROUPS", "each node is its own failure group"),
    ("SCR_LOG_ENABLE", "the runner's output is the log"),
    ("SCR_LOG_SYSLOG_ENABLE", "the runner's output is the log"),
    ("SCR_LOG_TXT_ENABLE", "the runner's output is the log"),
    ("SCR_MIN_NODES", "--nodes says how many"),
    ("SCR_MPI_BUF_SIZE", "no data goes through MPI"),
    ("SCR_PURGE", "a run cleans its cache up by itself"),
    ("SCR_SET_FAILURES", "XOR survives one node of a set"),
    ("SCR_WATCHDOG", "every wait has a deadline: collective_timeout_ms"),
    ("SCR_WATCHDOG_TIMEOUT", "every wait has a deadline: collective_timeout_ms"),
    ("SCR_WATCHDOG_TIMEOUT_PFS", "every wait has a deadline: flush_timeout_ms"),
];

/// Why a setting is refused. The message says what would be right.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// No such name.
    #[error("there is no setting '{name}'{}", .nearest.map(|n| format!("; did you mean '{n}'?")).unwrap_or_default())]
    Unknown {
        /// As given, shortened.
        name: Shown,
        /// The nearest that exists.
        nearest: Option<&'static str>,
    },
    /// The value does not fit.
    #[error("the setting '{name}' does not take '{value}'; it takes {}", .unit.as_str())]
    Value {
        /// The setting.
        name: &'static str,
        /// As given, shortened.
        value: Shown,
        /// What it takes.
        unit: Unit,
    },
    /// Not changeable any more.
    #[error("the setting '{name}' cannot be changed by the application; set STANCHION_{} for `stanchion run`", .name.to_uppercase())]
    TooLate {
        /// The setting.
        name: &'static str,
    },
    /// A line of a file that is no `name = value`.
    #[error("line {line} is not of the form 'name = value'")]
    Line {
        /// Which, from 1.
        line: usize,
    },
    /// Longer than allowed.
    #[error(
        "settings exceed their limit of {} entries of {} bytes",
        limits::SETTINGS_MAX,
        limits::SETTING_BYTES_MAX
    )]
    TooMuch,
}

/// Text from outside, safe to show: escaped and shortened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shown(String);

impl Shown {
    /// Makes `text` fit to be shown.
    pub fn new(text: &str) -> Shown {
        let mut shown: String = text.chars().take(60).flat_map(char::escape_debug).collect();
        if text.chars().nth(60).is_some() {
            shown.push('…');
        }
        Shown(shown)
    }
}

impl std::fmt::Display for Shown {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// Finds a setting by its own name or SCR's, in any case, with or without `STANCHION_`.
pub fn find(name: &str) -> Result<&'static Setting, ConfigError> {
    let plain = name.strip_prefix("STANCHION_").unwrap_or(name).to_ascii_lowercase();
    SETTINGS
        .iter()
        .find(|s| s.name == plain || s.scr.is_some_and(|scr| scr.eq_ignore_ascii_case(name)))
        .ok_or_else(|| ConfigError::Unknown {
            name: Shown::new(name),
            nearest: SETTINGS
                .iter()
                .map(|s| (distance(s.name, &plain), s.name))
                .min()
                .filter(|(d, n)| *d <= 2 + n.len() / 6)
                .map(|(_, n)| n),
        })
}

/// Levenshtein's distance, for "did you mean"; inputs are short or cut.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<u8> = b.bytes().take(64).collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let cost = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = cost.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

/// `4M` → 4194304.
pub fn parse_bytes(text: &str) -> Option<u64> {
    let text = text.trim();
    let upper = text.to_ascii_uppercase();
    let digits = upper.trim_end_matches("IB").trim_end_matches('B');
    let (number, shift) = match digits.chars().last()? {
        'K' => (&digits[..digits.len() - 1], 10),
        'M' => (&digits[..digits.len() - 1], 20),
        'G' => (&digits[..digits.len() - 1], 30),
        'T' => (&digits[..digits.len() - 1], 40),
        _ => (digits, 0),
    };
    let number: u64 = number.trim().parse().ok()?;
    number.checked_shl(shift).filter(|v| v >> shift == number)
}

fn parse_bool(text: &str) -> Option<bool> {
    match text.to_ascii_lowercase().as_str() {
        "1" | "true" | "yes" | "on" => Some(true),
        "0" | "false" | "no" | "off" => Some(false),
        _ => None,
    }
}

fn canonical(setting: &'static Setting, value: &str) -> Result<String, ConfigError> {
    let value = value.trim();
    let bad =
        || ConfigError::Value { name: setting.name, value: Shown::new(value), unit: setting.unit };
    if value.len() > limits::SETTING_BYTES_MAX {
        return Err(ConfigError::TooMuch);
    }
    let number = |v: &str| v.parse::<u64>().map(|n| n.to_string()).map_err(|_| bad());
    let text = match setting.unit {
        Unit::Text | Unit::Path if value.bytes().any(|b| b.is_ascii_control()) => return Err(bad()),
        Unit::Text | Unit::Path => value.to_owned(),
        Unit::Bool => u8::from(parse_bool(value).ok_or_else(bad)?).to_string(),
        // SCR writes "no limit" as -1.
        Unit::Count if value == "-1" && setting.name == "runs_max" => "0".into(),
        Unit::Count | Unit::Millis | Unit::Seconds => number(value)?,
        Unit::Bytes => parse_bytes(value).ok_or_else(bad)?.to_string(),
        Unit::Percent => {
            let percent: f64 = value.parse().map_err(|_| bad())?;
            if !(0.0..=100.0).contains(&percent) {
                return Err(bad());
            }
            percent.to_string()
        }
        Unit::Word(words) => {
            words.iter().find(|w| w.eq_ignore_ascii_case(value)).ok_or_else(bad)?.to_string()
        }
    };
    let chunk_range = u64::from(limits::CHUNK_BYTES_MIN)..=u64::from(limits::CHUNK_BYTES_MAX);
    let n: u64 = text.parse().unwrap_or(0);
    let fits = match setting.name {
        "set_size" => (2..=u64::from(limits::SET_SIZE_MAX)).contains(&n),
        "cache_datasets" => (1..=1024).contains(&n),
        "chunk_bytes" => chunk_range.contains(&n),
        "fanout" => (2..=1024).contains(&n),
        "io_threads" => (1..=256).contains(&n),
        name if name.ends_with("_ms") => n >= 1,
        _ => true,
    };
    if fits { Ok(text) } else { Err(bad()) }
}

/// Settings with their values.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings(BTreeMap<&'static str, String>);

impl Settings {
    /// Sets a value that came by name, whatever its scope.
    pub fn set(&mut self, name: &str, value: &str) -> Result<&'static Setting, ConfigError> {
        let setting = find(name)?;
        if value.is_empty() {
            self.0.remove(setting.name);
        } else {
            self.0.insert(setting.name, canonical(setting, value)?);
        }
        Ok(setting)
    }

    /// Sets a value on the application's wish. `running`: after the ranks have come. A value that is
    /// set already to the same is never too late.
    pub fn set_by_application(
        &mut self,
        name: &str,
        value: &str,
        running: bool,
    ) -> Result<(), ConfigError> {
        let setting = find(name)?;
        let late = match setting.scope {
            Scope::Launch => true,
            Scope::Job => running,
            Scope::Live => false,
        };
        if late && !value.is_empty() && canonical(setting, value)? == self.text(setting.name) {
            return Ok(());
        }
        if late {
            return Err(ConfigError::TooLate { name: setting.name });
        }
        self.set(name, value).map(|_| ())
    }

    /// The value or its default.
    pub fn text(&self, name: &str) -> &str {
        let setting = find(name).expect("settings are asked for by names of the table");
        self.0.get(setting.name).map_or(setting.default, String::as_str)
    }

    /// A count, size or time.
    pub fn number(&self, name: &str) -> u64 {
        let setting = find(name).expect("settings are asked for by names of the table");
        let text = canonical(setting, self.text(name)).expect("values are checked when set");
        text.parse().expect("numbers are checked when set")
    }

    /// Yes or no.
    pub fn flag(&self, name: &str) -> bool {
        parse_bool(self.text(name)).expect("values are checked when set")
    }

    /// A share, per cent.
    pub fn percent(&self, name: &str) -> f64 {
        self.text(name).parse().expect("values are checked when set")
    }

    /// Is it set to something other than by default?
    pub fn is_set(&self, name: &str) -> bool {
        find(name).is_ok_and(|s| self.0.contains_key(s.name))
    }

    /// What differs from the defaults, as pairs for the wire.
    pub fn pairs(&self) -> Vec<(String, String)> {
        self.0.iter().map(|(n, v)| ((*n).to_owned(), v.clone())).collect()
    }

    /// From pairs of the wire.
    pub fn from_pairs(pairs: &[(String, String)]) -> Result<Settings, ConfigError> {
        if pairs.len() > limits::SETTINGS_MAX {
            return Err(ConfigError::TooMuch);
        }
        let mut settings = Settings::default();
        for (name, value) in pairs {
            settings.set(name, value)?;
        }
        Ok(settings)
    }

    /// Takes what `other` has set, where this has not.
    pub fn fill_from(&mut self, other: &Settings) {
        for (name, value) in &other.0 {
            self.0.entry(name).or_insert_with(|| value.clone());
        }
    }
}

/// `SCR_COPY_TYPE=FILE` sets nothing: SCR's word for "as the CKPT entries say".
pub fn leaves_it_to_descriptors(name: &str, value: &str) -> bool {
    name == "SCR_COPY_TYPE" && value.trim().eq_ignore_ascii_case("FILE")
}

/// What an environment says: settings, warnings to show once, and errors.
#[derive(Debug, Default)]
pub struct FromEnvironment {
    /// What is set.
    pub settings: Settings,
    /// SCR's variables without a meaning here, with the reason.
    pub without_meaning: Vec<(String, &'static str)>,
    /// What is malformed.
    pub errors: Vec<ConfigError>,
    /// `SCR_…` variables that are neither SCR's that we know nor ours.
    pub unknown: Vec<String>,
}

/// Variables that Stanchion itself passes to ranks and agents, or that its scripts and tests use; no settings.
pub const INTERNAL_VARIABLES: &[&str] = &[
    "STANCHION_NODES",
    "STANCHION_RANK",
    "STANCHION_SIZE",
    "STANCHION_JOB_DIR",
    "STANCHION_MPI_DIR",
    crate::profile::DIR_VARIABLE,
    crate::profile::GAP_VARIABLE,
    crate::profile::LIBRARY_VARIABLE,
    "STANCHION_TEST_KEEP",
];

/// Reads settings from environment variables. Ours come before SCR's.
pub fn from_environment(vars: impl Iterator<Item = (String, String)>) -> FromEnvironment {
    let mut out = FromEnvironment::default();
    let mut scr = Settings::default();
    for (name, value) in vars {
        if INTERNAL_VARIABLES.contains(&name.as_str()) {
            continue;
        }
        let into = if name.starts_with("STANCHION_") {
            &mut out.settings
        } else if name.starts_with("SCR_") {
            if let Some((n, why)) = SCR_WITHOUT_MEANING.iter().find(|(n, _)| *n == name) {
                out.without_meaning.push(((*n).to_owned(), why));
                continue;
            }
            if find(&name).is_err() {
                out.unknown.push(name);
                continue;
            }
            if leaves_it_to_descriptors(&name, &value) {
                continue;
            }
            &mut scr
        } else {
            continue;
        };
        if let Err(error) = into.set(&name, &value) {
            out.errors.push(error);
        }
    }
    out.settings.fill_from(&scr);
    out
}

/// Reads a configuration file: `name = value` lines, `#` comments; SCR's names are understood.
/// Lines of SCR's multi-item descriptors (`CKPT=0 …`, `STORE=…`, `GROUPS=…`) come back as they are.
pub fn from_file(text: &str) -> Result<(Settings, Vec<String>), ConfigError> {
    let mut settings = Settings::default();
    let mut descriptors = Vec::new();
    for (i, line) in text.lines().enumerate() {
        let line = line.split('#').next().unwrap_or("").trim();
        if line.is_empty() {
            continue;
        }
        if i >= 16 * limits::SETTINGS_MAX || line.len() > 2 * limits::SETTING_BYTES_MAX {
            return Err(ConfigError::TooMuch);
        }
        let (name, value) = line.split_once('=').ok_or(ConfigError::Line { line: i + 1 })?;
        let name = name.trim();
        if crate::scr_line::TABLES.contains(&name)
            || SCR_WITHOUT_MEANING.iter().any(|(n, _)| *n == name)
        {
            descriptors.push(line.to_owned());
        } else if !leaves_it_to_descriptors(name, value) {
            settings.set(name, value)?;
        }
    }
    Ok((settings, descriptors))
}

/// docs/config.md, whole.
pub fn markdown() -> String {
    let mut out = String::from(
        "# Settings\n\nGenerated by `stanchion config --markdown`; a test keeps it so.\n\n\
         Where a value comes from, first match first: the command line (`--set name=value`), `STANCHION_NAME` in \
         the environment, SCR's name in the environment, `SCR_Config` of the application, the configuration file, \
         the default. *launch*: fixed when the job starts; *job*: also by the application before `SCR_Init`; \
         *live*: at any time.\n\n\
         | name | SCR's name | default | unit | when | what |\n|---|---|---|---|---|---|\n",
    );
    for s in SETTINGS {
        let scope = match s.scope {
            Scope::Launch => "launch",
            Scope::Job => "job",
            Scope::Live => "live",
        };
        let scr = s.scr.map_or(String::new(), |n| format!("`{n}`"));
        let default = if s.default.is_empty() { String::new() } else { format!("`{}`", s.default) };
        out += &format!(
            "| `{}` | {scr} | {default} | {} | {scope} | {} |\n",
            s.name,
            s.unit.as_str(),
            s.help
        );
    }
    out += "\n## SCR's variables without a meaning here\n\nEach is named once in a warning.\n\n| name | why |\n|---|---|\n";
    for (name, why) in SCR_WITHOUT_MEANING {
        out += &format!("| `{name}` | {why} |\n");
    }
    out
}

#[cfg(test)]
mod tests;
