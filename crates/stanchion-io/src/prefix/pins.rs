//! Datasets that somebody wants to keep: a file each, so that many may pin and none overwrites another's wish.

use std::collections::BTreeSet;

use rustix::io::Errno;
use stanchion_format::ids::Key;
use stanchion_format::index::{DIR, PIN, key_dir};
use stanchion_format::peer::Trouble;

use super::{Prefix, parse_key_dir};
use crate::trouble::At;

fn pin_file(key: Key) -> String {
    format!("{DIR}/pins/{}", key_dir(key))
}

impl Prefix {
    /// All pinned datasets. What each pin says is of no consequence: its name counts.
    pub fn pins(&self) -> Result<BTreeSet<Key>, Trouble> {
        Ok(self.names(&format!("{DIR}/pins"))?.iter().filter_map(|n| parse_key_dir(n)).collect())
    }

    /// Keeps a dataset from being deleted (`EPERM`), durably. True if it was not pinned before.
    pub fn pin(&self, key: Key) -> Result<bool, Trouble> {
        self.put_new(&pin_file(key), PIN)
    }

    /// It may be deleted again. True if it was pinned.
    pub fn unpin(&self, key: Key) -> Result<bool, Trouble> {
        self.writable()?;
        let there = self.is_pinned(key)?;
        self.place.remove(&pin_file(key)).at(pin_file(key))?;
        Ok(there)
    }

    fn is_pinned(&self, key: Key) -> Result<bool, Trouble> {
        self.place.is_there(&pin_file(key)).at(pin_file(key))
    }

    /// `EPERM`, with the pin's file, if it is pinned.
    pub(super) fn not_pinned(&self, key: Key) -> Result<(), Trouble> {
        if self.is_pinned(key)? { Err(Errno::PERM).at(pin_file(key)) } else { Ok(()) }
    }
}
