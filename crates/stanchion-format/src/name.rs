//! Names that come from applications: datasets and paths below the prefix.

use crate::limits;

/// Why a name is refused. `Display` is a full sentence without the name itself (it may hold anything).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// Nothing was given.
    #[error("the name is empty")]
    Empty,
    /// Too many bytes.
    #[error("the name has {bytes} bytes, the limit is {max}")]
    TooLong {
        /// What was given.
        bytes: usize,
        /// What is allowed.
        max: usize,
    },
    /// A newline, NUL or other control byte.
    #[error("the name holds a control character (byte {0:#04x})")]
    Control(u8),
    /// Not UTF-8: index and messages are text.
    #[error("the name is not UTF-8")]
    NotText,
    /// `/` where a plain name is wanted.
    #[error("the name holds a '/'")]
    Slash,
    /// Would leave the prefix.
    #[error("the path leaves the prefix")]
    Escapes,
    /// Names a directory, such as `.` or `a/`.
    #[error("the path names a directory, not a file")]
    Directory,
    /// `.stanchion` is ours.
    #[error("'.stanchion' at the top of the prefix is reserved")]
    Reserved,
}

fn check_text(name: &str, max: usize) -> Result<(), NameError> {
    if name.is_empty() {
        return Err(NameError::Empty);
    }
    if name.len() > max {
        return Err(NameError::TooLong { bytes: name.len(), max });
    }
    match name.bytes().find(|b| b.is_ascii_control()) {
        Some(byte) => Err(NameError::Control(byte)),
        None => Ok(()),
    }
}

/// Checks the name of a dataset: text without control characters or `/`, not `.` or `..`.
pub fn check_dataset(name: &str) -> Result<(), NameError> {
    check_text(name, limits::DATASET_NAME_BYTES_MAX)?;
    if name.contains('/') {
        return Err(NameError::Slash);
    }
    if name == "." || name == ".." {
        return Err(NameError::Directory);
    }
    Ok(())
}

/// Brings a path that an application names into its one form below the prefix: no `.`, no `..`, no
/// double or leading `/`. An absolute path must lie below `prefix`; a relative one is taken from `cwd`
/// if that lies below the prefix, otherwise from the prefix itself.
pub fn route(name: &str, prefix: &str, cwd: &str) -> Result<String, NameError> {
    check_text(name, 4 * limits::PATH_BYTES_MAX)?;
    if name.ends_with('/') {
        return Err(NameError::Directory);
    }
    let prefix = normal(prefix).ok_or(NameError::Escapes)?;
    let absolute = if name.starts_with('/') {
        name.to_owned()
    } else {
        let base = match normal(cwd) {
            Some(cwd) if cwd.starts_with(&prefix) => cwd,
            _ => prefix.clone(),
        };
        format!("/{}/{name}", base.join("/"))
    };
    let full = normal(&absolute).ok_or(NameError::Escapes)?;
    let rest = full.strip_prefix(&prefix[..]).ok_or(NameError::Escapes)?;
    let path = rest.join("/");
    check_path(&path)?;
    Ok(path)
}

/// Checks that `path` is in the one form that [`route`] makes.
pub fn check_path(path: &str) -> Result<(), NameError> {
    if path.is_empty() {
        return Err(NameError::Directory);
    }
    check_text(path, limits::PATH_BYTES_MAX)?;
    for (i, part) in path.split('/').enumerate() {
        match part {
            "" | "." => return Err(NameError::Directory),
            ".." => return Err(NameError::Escapes),
            ".stanchion" if i == 0 => return Err(NameError::Reserved),
            _ => {}
        }
    }
    Ok(())
}

/// The parts of an absolute path with `.` and `..` resolved by name; `None` if it climbs above `/`.
fn normal(path: &str) -> Option<Vec<&str>> {
    let mut parts = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop()?;
            }
            part => parts.push(part),
        }
    }
    Some(parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_form_for_every_spelling() {
        for name in ["d/f", "./d/f", "d//f", "/p/x/d/f", "e/../d/f", "/p/x/../x/d/f"] {
            assert_eq!(route(name, "/p/x", "/elsewhere").as_deref(), Ok("d/f"), "{name}");
        }
        assert_eq!(route("f", "/p/x", "/p/x/run").as_deref(), Ok("run/f"));
    }

    #[test]
    fn two_directories_stay_two_files() {
        // FM-S16; SCR makes one file of these.
        assert_ne!(route("a/f", "/p", "/p"), route("b/f", "/p", "/p"));
    }

    #[test]
    fn refuses_what_could_harm() {
        assert_eq!(route("../f", "/p/x", "/p/x"), Err(NameError::Escapes));
        assert_eq!(route("/q/f", "/p/x", "/p/x"), Err(NameError::Escapes));
        assert_eq!(route("../../../../f", "/p/x", "/p/x"), Err(NameError::Escapes));
        assert_eq!(route("a\nb", "/p", "/p"), Err(NameError::Control(b'\n')));
        assert_eq!(route(".stanchion/job", "/p", "/p"), Err(NameError::Reserved));
        assert_eq!(route("a/", "/p", "/p"), Err(NameError::Directory));
        assert_eq!(route(".", "/p", "/p"), Err(NameError::Directory));
        assert!(matches!(route(&"x".repeat(5000), "/p", "/p"), Err(NameError::TooLong { .. })));
        assert_eq!(check_dataset("a/b"), Err(NameError::Slash));
        assert_eq!(check_dataset(".."), Err(NameError::Directory));
        assert!(matches!(check_dataset(&"x".repeat(5000)), Err(NameError::TooLong { .. })));
    }
}
