//! Small files with which processes leave word for each other.

use rustix::io::Errno;
use serde::de::DeserializeOwned;
use stanchion_format::index::{DIR, HaltFile, LeaseFile};
use stanchion_format::peer::{Cause, Trouble};

use super::{NOTE_BYTES_MAX, Prefix, json};
use crate::trouble::At;

impl Prefix {
    fn read_note<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, Trouble> {
        let file = format!("{DIR}/{name}");
        let bytes = match self.place.read(&file, NOTE_BYTES_MAX) {
            Err(Errno::NOENT) => return Ok(None),
            other => other.at(file.as_str())?,
        };
        let parsed = serde_json::from_slice(&bytes);
        parsed.map(Some).map_err(|_| Trouble::new(Cause::Malformed).file(file))
    }

    fn remove_note(&self, name: &str) -> Result<(), Trouble> {
        self.writable()?;
        let file = format!("{DIR}/{name}");
        self.place.remove(&file).at(file)
    }

    /// What `stanchion halt` wants, if anything.
    pub fn read_halt(&self) -> Result<Option<HaltFile>, Trouble> {
        self.read_note("halt.json")
    }

    /// Says what `stanchion halt` wants.
    pub fn write_halt(&self, halt: &HaltFile) -> Result<(), Trouble> {
        self.put(&format!("{DIR}/halt.json"), &json(halt))
    }

    /// Nothing is wanted any more.
    pub fn clear_halt(&self) -> Result<(), Trouble> {
        self.remove_note("halt.json")
    }

    /// Who uses the prefix, if anyone says so (FM-C5). A lease that does not parse was torn by a crash
    /// that its holder did not survive either: nobody's.
    pub fn read_lease(&self) -> Result<Option<LeaseFile>, Trouble> {
        match self.read_note("lease.json") {
            Err(Trouble { cause: Cause::Malformed, file, .. }) => {
                tracing::warn!(?file, "ignored: it does not parse");
                Ok(None)
            }
            other => other,
        }
    }

    /// Says who uses the prefix; `Fenced` if a higher epoch does.
    pub fn write_lease(&self, lease: &LeaseFile) -> Result<(), Trouble> {
        let file = format!("{DIR}/lease.json");
        if self.read_lease()?.is_some_and(|there| there.epoch > lease.epoch) {
            return Err(Trouble::new(Cause::Fenced).file(file));
        }
        self.put(&file, &json(lease))
    }

    /// Nobody uses the prefix any more.
    pub fn remove_lease(&self) -> Result<(), Trouble> {
        self.remove_note("lease.json")
    }
}
