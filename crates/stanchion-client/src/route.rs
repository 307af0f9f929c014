//! Where an application's file belongs: names from it, paths below the prefix, places in the cache.

use crate::error::{Error, Words};
use stanchion_format::manifest::FileDecl;
use stanchion_format::name::{self, NameError};
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

/// The prefix, and what the system calls it where links are in its name: a working directory is
/// always reported by that.
#[derive(Clone, Debug)]
pub(crate) struct Prefix {
    given: String,
    real: Option<String>,
}

impl Prefix {
    pub(crate) fn new(given: &str) -> Prefix {
        let real =
            std::fs::canonicalize(given).ok().and_then(|p| p.into_os_string().into_string().ok());
        Prefix { given: given.to_owned(), real: real.filter(|r| r != given) }
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.given
    }

    /// Is `other` another name of the same directory?
    pub(crate) fn is(&self, other: &str) -> bool {
        let other = Prefix::new(other.trim_end_matches('/'));
        let real = |p: &Prefix| p.real.clone().unwrap_or_else(|| p.given.clone());
        real(self) == real(&other)
    }

    /// The path below the prefix for a name that an application uses in its present working directory.
    pub(crate) fn route(&self, name: &str) -> Result<String, NameError> {
        let cwd = std::env::current_dir().ok().and_then(|p| p.into_os_string().into_string().ok());
        self.route_from(name, cwd.as_deref().unwrap_or("/"))
    }

    fn route_from(&self, name: &str, cwd: &str) -> Result<String, NameError> {
        let rest = self.real.as_deref().and_then(|real| Path::new(cwd).strip_prefix(real).ok());
        let known =
            rest.and_then(|r| Path::new(&self.given).join(r).into_os_string().into_string().ok());
        let cwd = known.as_deref().unwrap_or(cwd);
        match (name::route(name, &self.given, cwd), &self.real) {
            (Err(NameError::Escapes), Some(real)) if name.starts_with('/') => {
                name::route(name, real, real)
            }
            (routed, _) => routed,
        }
    }
}

/// The file of this rank that `name` means in a dataset that is restarted from: by its path, or, as
/// SCR allows, by its last component alone where that is unique.
pub(crate) fn find_in<'a>(
    files: &'a [FileDecl],
    prefix: &Prefix,
    name: &str,
) -> Result<&'a FileDecl, Lookup> {
    let routed = prefix.route(name);
    if let Ok(path) = &routed
        && let Some(file) = files.iter().find(|f| f.path == *path)
    {
        return Ok(file);
    }
    if name.contains('/') {
        return Err(routed.err().map_or(Lookup::None, Lookup::Name));
    }
    let mut same = files.iter().filter(|f| f.path.rsplit('/').next() == Some(name));
    match (same.next(), same.next()) {
        (Some(file), None) => Ok(file),
        (Some(_), Some(_)) => Err(Lookup::Several),
        (None, _) => Err(routed.err().map_or(Lookup::None, Lookup::Name)),
    }
}

/// Why [`find_in`] finds nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lookup {
    Name(NameError),
    None,
    Several,
}

/// Makes the directories between `dir` and the file `path` below it.
pub(crate) fn make_parents(dir: &str, path: &str, mode: u32) -> Result<(), Error> {
    let Some((parents, _)) = path.rsplit_once('/') else { return Ok(()) };
    let full = format!("{dir}/{parents}");
    std::fs::DirBuilder::new().recursive(true).mode(mode).create(&full).map_err(|cause| Error::Io {
        what: "cannot create directory",
        path: Words::name(&full),
        cause,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use stanchion_format::ids::RankId;

    #[test]
    fn a_linked_prefix_is_one_prefix() {
        let tmp = tempfile::tempdir().unwrap();
        let root = std::fs::canonicalize(tmp.path()).unwrap();
        std::fs::create_dir_all(root.join("real/run")).unwrap();
        std::os::unix::fs::symlink(root.join("real"), root.join("link")).unwrap();
        let at = |s: &str| root.join(s).to_str().unwrap().to_owned();
        let prefix = Prefix::new(&at("link"));
        assert_eq!(prefix.route_from("f", &at("real/run")).unwrap(), "run/f");
        assert_eq!(prefix.route_from(&at("real/a/f"), "/").unwrap(), "a/f");
        assert_eq!(prefix.route_from(&at("link/a/f"), "/").unwrap(), "a/f");
        assert_eq!(prefix.route_from(&at("other/f"), "/"), Err(NameError::Escapes));
        assert!(prefix.is(&at("real")) && prefix.is(&at("link/")) && !prefix.is(&at("other")));
    }

    #[test]
    fn bare_names_find_the_only_file_they_can_mean() {
        let file = |path: &str| FileDecl { rank: RankId(0), path: path.into(), bytes: 1 };
        let files = [file("a/f"), file("b/f"), file("c/g")];
        let prefix = Prefix::new("/no/such/prefix");
        assert_eq!(find_in(&files, &prefix, "a/f").unwrap().path, "a/f");
        assert_eq!(find_in(&files, &prefix, "g").unwrap().path, "c/g");
        assert_eq!(find_in(&files, &prefix, "f"), Err(Lookup::Several));
        assert_eq!(find_in(&files, &prefix, "x/g"), Err(Lookup::None));
        assert_eq!(find_in(&files, &prefix, "../g"), Err(Lookup::Name(NameError::Escapes)));
    }
}
