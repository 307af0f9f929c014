//! From what the system says to what the user hears.

use rustix::io::Errno;
use stanchion_format::peer::{Cause, Trouble};

/// What an errno means to us.
pub fn cause(errno: Errno) -> Cause {
    match errno {
        Errno::NOSPC | Errno::DQUOT => Cause::NoSpace,
        Errno::NOENT => Cause::Missing,
        // Also what file systems say of a block whose checksum is wrong.
        Errno::BADMSG => Cause::Damaged,
        other => Cause::Os(other.raw_os_error()),
    }
}

/// Names the file that a failed call was about.
pub(crate) trait At<T> {
    /// The same, as trouble with `file`.
    fn at(self, file: impl Into<String>) -> Result<T, Trouble>;
}

impl<T> At<T> for crate::fs::Result<T> {
    fn at(self, file: impl Into<String>) -> Result<T, Trouble> {
        self.map_err(|errno| Trouble::new(cause(errno)).file(file))
    }
}
