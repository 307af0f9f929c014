//! What the application asked for with `SCR_Config`, and what that means here.

use stanchion::Environment;
use stanchion_format::client::SettingPair;
use stanchion_format::config::{self, ConfigError, Scope, Setting, Settings, Shown};
use stanchion_format::limits;
use std::collections::BTreeMap;

/// Everything said so far, as it was said: questions get it back.
#[derive(Debug)]
pub(crate) struct Asked {
    simple: BTreeMap<String, String>,
    entries: BTreeMap<(String, String), BTreeMap<String, String>>,
}

/// A setting that the job has since it was launched.
#[derive(Clone, Debug)]
pub(crate) struct Late {
    pub(crate) setting: &'static Setting,
    pub(crate) value: String,
}

/// What it means.
#[derive(Debug, Default)]
pub(crate) struct Meaning {
    /// For `Hello`.
    pub(crate) pairs: Vec<SettingPair>,
    /// To be compared with what the job has.
    pub(crate) late: Vec<Late>,
    /// To be said once.
    pub(crate) warnings: Vec<String>,
    /// The first thing that is malformed.
    pub(crate) error: Option<ConfigError>,
}

/// One key for all names of a setting.
fn key(name: &str) -> String {
    config::find(name).map_or_else(|_| name.to_owned(), |s| s.name.to_owned())
}

/// Why a name of SCR's has no meaning here.
pub(crate) fn without_meaning(name: &str) -> Option<&'static str> {
    config::SCR_WITHOUT_MEANING.iter().find(|(n, _)| *n == name).map(|(_, why)| *why)
}

impl Asked {
    pub(crate) const fn new() -> Asked {
        Asked { simple: BTreeMap::new(), entries: BTreeMap::new() }
    }

    fn room(&self) -> bool {
        let members: usize = self.entries.values().map(BTreeMap::len).sum();
        self.simple.len() + self.entries.len() + members < limits::SETTINGS_MAX
    }

    /// Sets; an empty value takes back.
    pub(crate) fn set(&mut self, name: &str, value: &str) -> Result<(), ConfigError> {
        if value.is_empty() {
            self.simple.remove(&key(name));
            return Ok(());
        }
        if value.len() > limits::SETTING_BYTES_MAX || !self.room() {
            return Err(ConfigError::TooMuch);
        }
        self.simple.insert(key(name), value.to_owned());
        Ok(())
    }

    /// Sets members of an entry; the others stay.
    pub(crate) fn set_members(
        &mut self,
        table: &str,
        entry: &str,
        members: &[(String, String)],
    ) -> Result<(), ConfigError> {
        for (name, value) in members {
            if !value.is_empty() && !self.room() {
                return Err(ConfigError::TooMuch);
            }
            let known = self.entries.entry((table.to_owned(), entry.to_owned())).or_default();
            if value.is_empty() {
                known.remove(name);
            } else {
                known.insert(name.clone(), value.clone());
            }
        }
        Ok(())
    }

    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        self.simple.get(&key(name)).map(String::as_str)
    }

    pub(crate) fn member(&self, table: &str, entry: &str, member: &str) -> Option<&str> {
        let entry = self.entries.get(&(table.to_owned(), entry.to_owned()))?;
        entry.get(member).map(String::as_str)
    }

    /// What all of it means, given an environment that goes before it.
    pub(crate) fn meaning(&self, environment: &Environment) -> Meaning {
        let mut meaning = Meaning::default();
        let mut settings = Settings::default();
        for (name, value) in &self.simple {
            if environment.outranks(name).is_some() {
                continue;
            }
            self.simple_meaning(name, value, &mut settings, &mut meaning);
        }
        let chosen = environment.outranks("scheme").filter(|v| !v.eq_ignore_ascii_case("FILE"));
        let by_entry = chosen.is_none() && !settings.is_set("scheme");
        for ((table, entry), members) in &self.entries {
            for (member, value) in members {
                let means = match (table.as_str(), entry.as_str(), member.as_str()) {
                    ("CKPT", "0", "TYPE") if by_entry => Some("scheme"),
                    ("CKPT", "0", "SET_SIZE") if by_entry => Some("set_size"),
                    ("CKPT", "0", "SET_FAILURES") if by_entry => Some("parities"),
                    _ => None,
                };
                match means {
                    Some(name) if environment.outranks(name).is_some_and(|v| v != "FILE") => {}
                    Some(name) => meaning.note(settings.set(name, value)),
                    None if (member.as_str(), value.as_str()) == ("INTERVAL", "1") => {}
                    None => meaning.warnings.push(format!(
                        "{}={} {}={} has no meaning here: one redundancy scheme serves all datasets, \
                         SCR_COPY_TYPE and SCR_SET_SIZE or entry 0 of CKPT say which",
                        Shown::new(table),
                        Shown::new(entry),
                        Shown::new(member),
                        Shown::new(value),
                    )),
                }
            }
        }
        meaning.pairs = settings.pairs();
        meaning
    }

    fn simple_meaning(
        &self,
        name: &str,
        value: &str,
        settings: &mut Settings,
        meaning: &mut Meaning,
    ) {
        if let Some(why) = without_meaning(name) {
            meaning.warnings.push(format!("SCR_Config: {name} has no meaning here: {why}"));
            return;
        }
        let Ok(setting) = config::find(name) else {
            let name = Shown::new(name);
            meaning.warnings.push(format!("SCR_Config: {name} is not known here and is ignored"));
            return;
        };
        if setting.name == "scheme" && value.eq_ignore_ascii_case("FILE") {
            return;
        }
        if setting.scope == Scope::Launch {
            // Only checked: what the job has counts.
            meaning.note(Settings::default().set(name, value));
            meaning.late.push(Late { setting, value: value.to_owned() });
        } else {
            meaning.note(settings.set(name, value));
        }
    }
}

impl Meaning {
    fn note<T>(&mut self, set: Result<T, ConfigError>) {
        if let Err(error) = set {
            self.error.get_or_insert(error);
        }
    }
}

impl Late {
    /// Does the job have it as the application wants it?
    pub(crate) fn met(&self, job: &stanchion::Client) -> bool {
        if self.setting.name == "prefix" {
            return job.is_prefix(&self.value);
        }
        let mut wanted = Settings::default();
        wanted.set(self.setting.name, &self.value).is_ok()
            && wanted.text(self.setting.name) == job.settings().text(self.setting.name)
    }

    /// Would going on do something else than the application believes? Where files are, and what is
    /// restarted from; the rest costs comfort only.
    pub(crate) fn vital(&self) -> bool {
        matches!(self.setting.name, "prefix" | "fetch" | "current")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(name: &str, value: &str) -> SettingPair {
        (name.into(), value.into())
    }

    #[test]
    fn descriptors_say_the_scheme_unless_it_is_said_otherwise() {
        let mut asked = Asked::new();
        let members = [pair("TYPE", "partner"), pair("SET_SIZE", "4"), pair("INTERVAL", "1")];
        asked.set_members("CKPT", "0", &members).unwrap();
        let none = Environment::default();
        let meaning = asked.meaning(&none);
        assert_eq!(meaning.pairs, [pair("scheme", "PARTNER"), pair("set_size", "4")]);
        assert!(meaning.warnings.is_empty() && meaning.error.is_none());
        assert_eq!(asked.member("CKPT", "0", "TYPE"), Some("partner"), "as it was said");

        let mut two = Asked::new();
        two.set_members("CKPT", "0", &[pair("TYPE", "rs"), pair("SET_FAILURES", "3")]).unwrap();
        assert_eq!(two.meaning(&none).pairs, [pair("parities", "3"), pair("scheme", "RS")]);

        asked.set("SCR_COPY_TYPE", "FILE").unwrap();
        assert_eq!(asked.meaning(&none).pairs.len(), 2);
        let file = Environment::of_pairs([("SCR_COPY_TYPE", "FILE")]);
        assert_eq!(asked.meaning(&file).pairs.len(), 2);
        let single = Environment::of_pairs([("SCR_COPY_TYPE", "SINGLE")]);
        assert!(asked.meaning(&single).pairs.is_empty());
        asked.set("SCR_COPY_TYPE", "SINGLE").unwrap();
        assert_eq!(asked.meaning(&none).pairs, [pair("scheme", "SINGLE")]);
    }

    #[test]
    fn what_has_no_meaning_is_named() {
        let mut asked = Asked::new();
        asked.set_members("CKPT", "1", &[pair("TYPE", "XOR")]).unwrap();
        asked.set_members("STORE", "/ssd", &[pair("COUNT", "3")]).unwrap();
        asked.set("SCR_CRC_ON_COPY", "1").unwrap();
        asked.set("SCR_SOMETHING", "1").unwrap();
        let meaning = asked.meaning(&Environment::default());
        let all = meaning.warnings.join("\n");
        for word in ["CKPT=1 TYPE=XOR", "STORE=/ssd COUNT=3", "SCR_CRC_ON_COPY", "SCR_SOMETHING"] {
            assert!(all.contains(word), "{all}");
        }
        assert!(meaning.pairs.is_empty() && meaning.error.is_none());
    }

    #[test]
    fn malformed_values_are_errors_and_launch_settings_come_late() {
        let mut asked = Asked::new();
        asked.set("SCR_SET_SIZE", "many").unwrap();
        asked.set("SCR_PREFIX", "/p").unwrap();
        let meaning = asked.meaning(&Environment::default());
        assert!(meaning.error.unwrap().to_string().contains("set_size"));
        assert_eq!(meaning.late.len(), 1);
        assert!(meaning.late[0].vital());
        let env = Environment::of_pairs([("STANCHION_SET_SIZE", "4"), ("SCR_PREFIX", "/q")]);
        let meaning = asked.meaning(&env);
        assert!(meaning.error.is_none() && meaning.late.is_empty(), "the environment goes before");
    }

    #[test]
    fn questions_and_limits() {
        let mut asked = Asked::new();
        asked.set("SCR_FLUSH", "3").unwrap();
        assert_eq!(asked.get("SCR_FLUSH"), Some("3"));
        assert_eq!(asked.get("flush_every"), Some("3"));
        asked.set("SCR_FLUSH", "").unwrap();
        assert_eq!(asked.get("SCR_FLUSH"), None);
        for i in 0..limits::SETTINGS_MAX {
            asked.set(&format!("X{i}"), "1").unwrap();
        }
        assert_eq!(asked.set("Y", "1"), Err(ConfigError::TooMuch));
        assert!(asked.set_members("CKPT", "0", &[pair("TYPE", "XOR")]).is_err());
    }
}
