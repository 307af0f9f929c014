//! The job's secret.

use zeroize::Zeroize;

/// What the agents and the controller of one job know and nobody else (FM-C1). Wiped when dropped and
/// never shown.
///
/// The agent stays dumpable: its secret dies with its job, a core file is the user's own (umask 077), and
/// who can attach a debugger has the user's uid, which is not defended against (docs/failure-model.md).
pub struct Secret([u8; 32]);

impl Secret {
    /// Takes the 32 bytes; the caller wipes its own copy.
    pub fn new(bytes: [u8; 32]) -> Secret {
        Secret(bytes)
    }

    pub(crate) fn bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl Drop for Secret {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(..)")
    }
}
