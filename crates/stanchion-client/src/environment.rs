//! The process's environment, as far as it concerns us: a copy, so that everything made of it is pure.

use stanchion_format::config::{self, FromEnvironment};
use stanchion_format::limits;
use std::collections::BTreeMap;

/// Prefixes and names of the variables that are looked at.
const PREFIXES: &[&str] = &["STANCHION_", "SCR_", "PMI_", "PMIX_", "OMPI_COMM_WORLD_", "SLURM_"];
const NAMES: &[&str] = &["RANK", "WORLD_SIZE"];

/// Variables and their values. A value that is no text is kept as `None`: it is an error only for whom
/// it concerns.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Environment(BTreeMap<String, Option<String>>);

impl Environment {
    /// Of this process, now.
    pub fn of_process() -> Environment {
        let ours = |name: &String| {
            NAMES.contains(&name.as_str()) || PREFIXES.iter().any(|p| name.starts_with(p))
        };
        Environment(
            std::env::vars_os()
                .filter_map(|(name, value)| Some((name.into_string().ok()?, value)))
                .filter(|(name, _)| ours(name))
                .map(|(name, value)| (name, value.into_string().ok()))
                .collect(),
        )
    }

    /// Of pairs, for tests and embedding.
    pub fn of_pairs<'a>(pairs: impl IntoIterator<Item = (&'a str, &'a str)>) -> Environment {
        Environment(pairs.into_iter().map(|(n, v)| (n.to_owned(), Some(v.to_owned()))).collect())
    }

    /// The value; `None` where it is not set or empty; `Some("")` never.
    /// What is no text reads as a replacement character, which no parser accepts.
    pub fn get(&self, name: &str) -> Option<&str> {
        match self.0.get(name) {
            None => None,
            Some(None) => Some("\u{fffd}"),
            Some(Some(value)) if value.is_empty() => None,
            Some(Some(value)) => Some(value),
        }
    }

    /// What it sets, by [`config::from_environment`].
    pub fn settings(&self) -> FromEnvironment {
        let names = self.0.keys().filter(|n| n.starts_with("STANCHION_") || n.starts_with("SCR_"));
        config::from_environment(
            names
                .take(4 * limits::SETTINGS_MAX)
                .filter_map(|name| Some((name.clone(), self.get(name)?.to_owned()))),
        )
    }

    /// The value that outranks the application's for the setting or variable `name`, as it was given.
    pub fn outranks(&self, name: &str) -> Option<&str> {
        match config::find(name) {
            Ok(setting) => self
                .get(&format!("STANCHION_{}", setting.name.to_ascii_uppercase()))
                .or_else(|| self.get(setting.scr?)),
            Err(_) => self.get(name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ours_outranks_scr_and_empty_is_unset() {
        let e = Environment::of_pairs([
            ("SCR_FLUSH", "3"),
            ("STANCHION_FLUSH_EVERY", "4"),
            ("SCR_FETCH", ""),
            ("SCR_LOG_ENABLE", "0"),
        ]);
        assert_eq!(e.outranks("SCR_FLUSH"), Some("4"));
        assert_eq!(e.outranks("flush_every"), Some("4"));
        assert_eq!(e.outranks("SCR_FETCH"), None);
        assert_eq!(e.outranks("SCR_LOG_ENABLE"), Some("0"));
        assert_eq!(e.settings().settings.number("flush_every"), 4);
    }

    #[test]
    fn what_is_no_text_is_malformed() {
        let mut e = Environment::default();
        e.0.insert("SCR_FLUSH".into(), None);
        assert_eq!(e.settings().errors.len(), 1);
    }
}
