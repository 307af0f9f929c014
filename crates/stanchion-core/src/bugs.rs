//! Deliberate bugs, for the simulator to find. Compiled in only with the feature `deliberate-bugs`;
//! without it [`Bugs::on`] is always false and the compiler removes what depends on it.

/// What can be broken on purpose. Each breaks a rule of docs/failure-model.md.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Bug {
    /// FM-S2: the root announces a record before all agents have stored it.
    AnnounceBeforeStored,
    /// FM-S1: messages of other incarnations are taken.
    AcceptOldIncarnation,
    /// FM-S5: a repeated contribution is added again.
    ApplyTwice,
    /// FM-S6: predecessors are evicted when the new dataset is only cached.
    EvictBeforeProtected,
    /// FM-S7: what is restored is not verified.
    SkipVerify,
    /// FM-S2: a rank's "invalid" is lost on its way up.
    ForgetVote,
    /// FM-S2: an agent votes without looking whether it holds every byte.
    SkipStat,
    /// FM-S4: after a loss, datasets are committed without a certificate.
    CommitWithoutCertificate,
    /// FM-L4: `protected` is reported when the root's own set has it.
    ProtectWithoutChildren,
    /// FM-S3: ranks are let in before all agents have restored.
    OpenBeforeRestored,
    /// FM-S11: a lower epoch is obeyed.
    ObeyFenced,
    /// FM-S8: the checksum of a rebuilt chunk's sources is not compared.
    SkipSourceChecksum,
    /// FM-S9: the index record is written before all files are in place.
    IndexBeforePublish,
    /// FM-S14: with nothing recoverable, the job starts anew.
    SilentFreshStart,
    /// FM-S13: a decided collective is decided again when a vote is repeated.
    DecideAgain,
    /// FM-S17: what waits for its flush is evicted.
    EvictBeforeFlush,
    /// FM-P2: memory that a living process still maps is lent to another one.
    LendMapped,
    /// FM-P11: what a rank handed over is lent again before it is stored.
    LendUnstored,
    /// FM-P3: extents of a dataset are free as soon as its rank has completed.
    FreeData,
    /// FM-S18: a full pool takes the newest dataset.
    DropNewest,
    /// FM-P9: an agent says that its part is copied before the children of its ranks have done it.
    CommitUnfilled,
    /// FM-L2: nodes that fail together share a set.
    IgnoreGroups,
    /// FM-S5: every parity of a stripe is the same sum.
    OneRow,
    /// FM-S8: sources of a lost chunk are added up as they are.
    NoFactors,
    /// FM-S5: two parities of one holder are stored in one place.
    OneIndex,
    /// FM-L4: an agent says that its parity is stored when the first stripe's is.
    ParityDoneEarly,
    /// FM-S7: a slot is called whole when the first of its lost chunks is.
    RestoredEarly,
    /// FM-L5: what was protected before a loss is called protected after it.
    SkipReprotect,
    /// FM-L2: losses in different sets are counted together.
    CountAllSets,
    /// FM-L2: one spare takes the places of all that are lost.
    OneSpareForAll,
    /// FM-L2: a source that failed is asked again and again, though others would do.
    IgnoreAvoid,
    /// FM-P10: what a child writes to is free as soon as its rank is gone.
    FreeChild,
    /// FM-S19: the record names the first attempt's containers, whichever wrote them.
    NameFirstAttempt,
    /// FM-S20: one checkpoint less than asked for is kept.
    PruneOneMore,
}

/// Which bugs are switched on.
#[derive(Clone, Copy, Debug, Default)]
pub struct Bugs {
    #[cfg(feature = "deliberate-bugs")]
    bug: Option<Bug>,
}

impl Bugs {
    /// One bug.
    #[cfg(feature = "deliberate-bugs")]
    pub fn only(bug: Bug) -> Bugs {
        Bugs { bug: Some(bug) }
    }

    /// Is it switched on?
    #[inline]
    pub fn on(self, bug: Bug) -> bool {
        #[cfg(feature = "deliberate-bugs")]
        return self.bug == Some(bug);
        #[cfg(not(feature = "deliberate-bugs"))]
        {
            let _ = bug;
            false
        }
    }
}
