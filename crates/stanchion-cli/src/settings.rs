//! Settings from the command line, the environment and a file, and where each came from.

use crate::exit::{Exit, Failed, OrExit};
use anyhow::{Context, anyhow};
use stanchion_format::config::{self, FromEnvironment, Settings, Shown};
use stanchion_format::limits;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Configuration files are text of at most so many bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Where a value came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// An option.
    CommandLine,
    /// This variable.
    Environment(String),
    /// This file.
    File(PathBuf),
    /// Nobody set it.
    Default,
}

impl std::fmt::Display for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Origin::CommandLine => f.write_str("command line"),
            Origin::Environment(name) => write!(f, "environment: {name}"),
            Origin::File(path) => write!(f, "file: {}", path.display()),
            Origin::Default => f.write_str("default"),
        }
    }
}

/// All layers and what comes of them.
#[derive(Debug)]
pub struct Gathered {
    /// What counts.
    pub settings: Settings,
    /// The layer of the command line.
    pub command_line: Settings,
    /// What is to be said once.
    pub warnings: Vec<String>,
    environment: Vec<String>,
    file: Option<(PathBuf, Settings)>,
}

impl Gathered {
    /// Where the value of `name` (as in the table) comes from.
    pub fn origin(&self, name: &str) -> Origin {
        if self.command_line.is_set(name) {
            return Origin::CommandLine;
        }
        let own = format!("STANCHION_{}", name.to_uppercase());
        let scr = config::find(name).ok().and_then(|s| s.scr);
        for variable in std::iter::once(own.as_str()).chain(scr) {
            if self.environment.iter().any(|n| n == variable) {
                return Origin::Environment(variable.to_owned());
            }
        }
        match &self.file {
            Some((path, settings)) if settings.is_set(name) => Origin::File(path.clone()),
            _ => Origin::Default,
        }
    }

    /// The prefix: what is set, otherwise the current directory; absolute, without symbolic links, as
    /// ranks see their working directory.
    pub fn prefix(&self) -> Result<PathBuf, Failed> {
        let text = self.settings.text("prefix");
        let path = if text.is_empty() { Path::new(".") } else { Path::new(text) };
        let shown = Shown::new(&path.to_string_lossy());
        let path = std::fs::canonicalize(path)
            .with_context(|| {
                let hint = match self.origin("prefix") {
                    Origin::Default => "give it with --prefix".to_owned(),
                    origin => format!("it comes from the {origin}; create it, or give another"),
                };
                format!("the prefix '{shown}' cannot be used ({hint})")
            })
            .or_exit(Exit::Storage)?;
        if !path.is_dir() {
            return Err(Failed::new(
                Exit::Storage,
                anyhow!("the prefix '{shown}' is not a directory"),
            ));
        }
        if path.to_str().is_none_or(|p| p.bytes().any(|b| b.is_ascii_control())) {
            let text = "is not plain text: names in the index could not tell it";
            return Err(Failed::new(
                Exit::Usage,
                anyhow!("the path of the prefix '{shown}' {text}"),
            ));
        }
        Ok(path)
    }
}

/// Splits `name=value` of `--set`.
pub fn pairs(set: &[String]) -> Result<Vec<(String, String)>, Failed> {
    set.iter()
        .map(|text| match text.split_once('=') {
            Some((name, value)) => Ok((name.trim().to_owned(), value.to_owned())),
            None => {
                let shown = Shown::new(text);
                Err(Failed::new(
                    Exit::Usage,
                    anyhow!("--set '{shown}' is not of the form NAME=VALUE"),
                ))
            }
        })
        .collect()
}

/// Reads all layers. `options`: settings of the command line in order, later ones first in rank.
pub fn gather(options: &[(String, String)]) -> Result<Gathered, Failed> {
    let mut command_line = Settings::default();
    for (name, value) in options {
        command_line.set(name, value).context("on the command line").or_exit(Exit::Usage)?;
    }
    let (environment, variables) = environment()?;
    let mut warnings: Vec<String> = environment
        .without_meaning
        .iter()
        .map(|(name, why)| format!("{name} has no meaning here: {why}"))
        .collect();
    warnings.extend(environment.unknown.iter().map(|name| {
        format!("{} is no variable of SCR that Stanchion knows; it is ignored", Shown::new(name))
    }));
    let mut settings = command_line.clone();
    settings.fill_from(&environment.settings);
    let file = file(&settings, &mut warnings)?;
    if let Some((_, from_file)) = &file {
        settings.fill_from(from_file);
    }
    Ok(Gathered { settings, command_line, warnings, environment: variables, file })
}

fn environment() -> Result<(FromEnvironment, Vec<String>), Failed> {
    let mut vars = Vec::new();
    for (name, value) in std::env::vars_os() {
        let Some(name) =
            name.to_str().filter(|n| n.starts_with("STANCHION_") || n.starts_with("SCR_"))
        else {
            continue;
        };
        let Some(value) = value.to_str() else {
            let text = format!("the value of {} in the environment is not UTF-8", Shown::new(name));
            return Err(Failed::new(Exit::Usage, anyhow!(text)));
        };
        vars.push((name.to_owned(), value.to_owned()));
    }
    let names = vars.iter().filter(|(_, v)| !v.is_empty()).map(|(n, _)| n.clone()).collect();
    let mut found = config::from_environment(vars.into_iter());
    if !found.errors.is_empty() {
        let texts: Vec<String> = found.errors.drain(..).map(|e| e.to_string()).collect();
        return Err(Failed::new(Exit::Usage, anyhow!("in the environment: {}", texts.join("; "))));
    }
    Ok((found, names))
}

/// The configuration file: the one that is named, which must be there, or one of the usual names in the
/// prefix, which need not.
fn file(
    settings: &Settings,
    warnings: &mut Vec<String>,
) -> Result<Option<(PathBuf, Settings)>, Failed> {
    let named = settings.text("config_file");
    let candidates = if named.is_empty() {
        let prefix = Path::new(settings.text("prefix"));
        vec![prefix.join(".stanchion.conf"), prefix.join(".scrconf")]
    } else {
        vec![PathBuf::from(named)]
    };
    for path in candidates {
        let file = match std::fs::File::open(&path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound && named.is_empty() => continue,
            // The prefix itself is the trouble then; it is reported where it is opened.
            Err(e) if e.kind() == std::io::ErrorKind::NotADirectory && named.is_empty() => continue,
            opened => opened
                .with_context(|| format!("the configuration file {}", path.display()))
                .or_exit(Exit::Usage)?,
        };
        let mut text = String::new();
        file.take(FILE_BYTES_MAX + 1)
            .read_to_string(&mut text)
            .with_context(|| format!("the configuration file {}", path.display()))
            .or_exit(Exit::Usage)?;
        if text.len() as u64 > FILE_BYTES_MAX {
            let text = format!(
                "the configuration file {} is longer than {FILE_BYTES_MAX} bytes",
                path.display()
            );
            return Err(Failed::new(Exit::Usage, anyhow!(text)));
        }
        let (from_file, ignored) = config::from_file(&text)
            .with_context(|| format!("in the configuration file {}", path.display()))
            .or_exit(Exit::Usage)?;
        warnings.extend(ignored.iter().take(limits::MISSING_RANKS_LISTED_MAX).map(|line| {
            format!("{}: '{}' has no meaning here and is ignored", path.display(), Shown::new(line))
        }));
        return Ok(Some((path, from_file)));
    }
    Ok(None)
}
