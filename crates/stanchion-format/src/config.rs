//! The one table of settings. Environment variables, file keys, `stanchion config` and docs/config.md are
//! made of it.
//!
//! Precedence: command line, `STANCHION_NAME` in the environment, its SCR alias in the environment,
//! `SCR_Config` of the application, the configuration file, the default.

mod table;

pub use table::{SCR_WITHOUT_MEANING, SETTINGS};

use crate::layout::{Asked, RS_SET_MAX};
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
    /// A redundancy scheme, as [`Asked::parse`] takes it.
    Scheme,
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
            Unit::Scheme => "SINGLE, PARTNER, XOR, RS, or RS(k,m) with k + m <= 256".into(),
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
        Unit::Scheme => {
            let word = value.to_ascii_uppercase().replace(' ', "");
            Asked::parse(&word, 2, 1).ok_or_else(bad)?;
            word
        }
    };
    let chunk_range = u64::from(limits::CHUNK_BYTES_MIN)..=u64::from(limits::CHUNK_BYTES_MAX);
    let n: u64 = text.parse().unwrap_or(0);
    let fits = match setting.name {
        "set_size" => (2..=u64::from(limits::SET_SIZE_MAX)).contains(&n),
        "parities" => (1..=u64::from(RS_SET_MAX) - 1).contains(&n),
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

    /// The redundancy that is asked for.
    pub fn redundancy(&self) -> Asked {
        let (size, parities) = (self.number("set_size"), self.number("parities"));
        Asked::parse(self.text("scheme"), size, parities).expect("it was parsed when it was set")
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
