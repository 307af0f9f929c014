//! What goes wrong, and when.

use crate::rng::Rng;

/// A step of the product at which faults like to strike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Moment {
    /// Directories of a new dataset are made.
    Begin,
    /// A rank writes its files.
    Write,
    /// An agent looks at the files before it votes.
    Stat,
    /// The root sends the commit record.
    Record,
    /// A commit is announced.
    Announce,
    /// An agent checksums its files.
    Digest,
    /// A stripe is encoded.
    Encode,
    /// The root reports a level.
    Level,
    /// Files are written under temporary names.
    FlushPrepare,
    /// Files are renamed.
    FlushPublish,
    /// The record is linked.
    WriteIndex,
    /// Survivors are asked what they hold.
    Survey,
    /// A plan is stored.
    Install,
    /// Files are verified.
    Verify,
    /// A chunk is rebuilt.
    Rebuild,
    /// Files are read from the prefix.
    Fetch,
    /// Ranks are let in.
    Open,
    /// The application is launched.
    Launch,
    /// Ranks read what they restart from.
    Read,
    /// The final flush is asked for.
    Finish,
    /// An orphan takes the lead.
    Lead,
    /// A child begins to copy; only for faults that are made for it.
    Fill,
}

/// All moments that can be chosen.
pub const MOMENTS: &[Moment] = &[
    Moment::Begin,
    Moment::Write,
    Moment::Stat,
    Moment::Record,
    Moment::Announce,
    Moment::Digest,
    Moment::Encode,
    Moment::Level,
    Moment::FlushPrepare,
    Moment::FlushPublish,
    Moment::WriteIndex,
    Moment::Survey,
    Moment::Install,
    Moment::Verify,
    Moment::Rebuild,
    Moment::Fetch,
    Moment::Open,
    Moment::Launch,
    Moment::Read,
    Moment::Finish,
    Moment::Lead,
];

/// When a fault strikes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// Before anything else, for the whole time.
    Always,
    /// At a time, milliseconds.
    At(u64),
    /// So many microseconds after the n-th time of a moment (from 1).
    Moment(Moment, u32, u64),
}

/// What goes wrong. Numbers of nodes and ranks are taken modulo those that live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// A rank dies.
    KillRank(u32),
    /// All ranks die.
    KillAllRanks,
    /// A child that copies dies.
    KillChild(u32),
    /// All ranks die, with their children if so; else their launcher does not know of these.
    KillAllRanksAnd(bool),
    /// An agent dies, its node lives.
    KillAgent(u32),
    /// A node dies.
    KillNode(u32),
    /// Two nodes die at once.
    KillTwoNodes(u32, u32),
    /// Members of one set die: of which slot, how many, and how many milliseconds apart.
    KillMembers(u32, u32, u64),
    /// All nodes of the failure group of a slot die.
    KillGroup(u32),
    /// The runner dies.
    KillRunner,
    /// The runner dies with a node.
    KillRunnerAndNode(u32),
    /// An agent is stopped for so many milliseconds.
    FreezeAgent(u32, u64),
    /// The runner is stopped for so many milliseconds.
    FreezeRunner(u64),
    /// The nodes of the mask are cut off for so many milliseconds, with or without the runner.
    Partition(u32, bool, u64),
    /// The connection between two agents is reset.
    ResetLink(u32, u32),
    /// The connection between the controller and an agent is reset.
    ResetController(u32),
    /// A cache takes no writes for so many milliseconds.
    DiskFull(u32, u64),
    /// The prefix fails for so many milliseconds.
    PrefixBroken(u64),
    /// A byte of a file in a cache flips.
    RotData(u32),
    /// A byte of parity flips.
    RotParity(u32),
    /// A file in a cache is cut.
    Truncate(u32),
    /// A file in a cache is removed.
    Remove(u32),
    /// A file in a cache is replaced by the one of an older dataset, or of another rank.
    Swap(u32),
    /// A byte of a file in the prefix flips.
    RotPrefix,
    /// A rank stops calling.
    RankHangs(u32),
    /// A rank says that its next dataset is not valid.
    RankInvalid(u32),
    /// A rank's next file is shorter than it declares.
    RankShort(u32),
    /// A rank rejects the next restart.
    RankRejects(u32),
    /// So many of a thousand messages are lost.
    NetLoss(u32),
    /// So many of a thousand messages come twice.
    NetTwice(u32),
    /// So many of a thousand messages are late by up to seconds.
    NetSlow(u32),
}

/// One fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// When.
    pub when: When,
    /// What.
    pub what: What,
}

impl What {
    /// Does it take bytes or processes away, so that orphans may not be able to finish?
    pub fn harms_prefix(self) -> bool {
        matches!(self, What::PrefixBroken(_) | What::RotPrefix)
    }
}

/// Faults of one history.
pub fn faults(rng: &mut Rng, horizon_ms: u64) -> Vec<Fault> {
    let mut out = Vec::new();
    for what in [
        What::NetLoss(rng.pick(&[0, 0, 0, 5, 30, 100])),
        What::NetTwice(rng.pick(&[0, 0, 5, 50, 200])),
        What::NetSlow(rng.pick(&[0, 0, 2, 10, 40])),
    ] {
        if !matches!(what, What::NetLoss(0) | What::NetTwice(0) | What::NetSlow(0)) {
            out.push(Fault { when: When::Always, what });
        }
    }
    let count = rng.pick(&[0, 1, 1, 1, 2, 2, 3, 4, 6]);
    for _ in 0..count {
        out.push(match rng.chance(150) {
            true => aimed(rng),
            false => Fault { when: when(rng, horizon_ms), what: what(rng) },
        });
    }
    out
}

/// Faults at the moments they are made for.
fn aimed(rng: &mut Rng) -> Fault {
    let n = rng.below(12) as u32;
    let nth = rng.range(1, 8) as u32;
    let at = |moment, us| When::Moment(moment, nth, us);
    let soon = rng.below(10_000);
    let (when, what) = match rng.below(8) {
        0 => (at(Moment::Encode, rng.below(1_000)), What::RotData(n)),
        1 => (at(Moment::Record, soon / 4), What::KillNode(n)),
        2 => (at(Moment::Rebuild, soon), What::KillNode(n)),
        3 => (at(Moment::Stat, soon), What::KillAllRanks),
        4 => (at(Moment::Announce, soon), What::KillRank(n)),
        5 => (at(Moment::Launch, rng.below(3_000_000)), What::FreezeRunner(40_000)),
        6 => (at(Moment::FlushPublish, soon), What::KillNode(n)),
        _ => (at(Moment::WriteIndex, soon), What::KillRunner),
    };
    Fault { when, what }
}

/// Losses of several members of one set, at once or while the first ones are made good.
pub fn of_sets(rng: &mut Rng, horizon_ms: u64) -> Vec<Fault> {
    let count = rng.pick(&[0, 0, 1, 1, 1, 2]);
    let fault = |_| {
        let (slot, lost) = (rng.below(12) as u32, rng.range(1, 4) as u32);
        let apart = if rng.chance(500) { 0 } else { rng.below(4_000) };
        let moments =
            [Moment::Level, Moment::Encode, Moment::Rebuild, Moment::Verify, Moment::Launch];
        let when = match rng.chance(300) {
            true => When::At(rng.below(horizon_ms.max(1))),
            false => When::Moment(rng.pick(&moments), rng.range(1, 8) as u32, rng.below(100_000)),
        };
        Fault { when, what: What::KillMembers(slot, lost, apart) }
    };
    let mut faults: Vec<Fault> = (0..count).map(fault).collect();
    if rng.chance(300) {
        // A parity that nobody can vouch for is wanted for the rebuild right behind.
        let nth = rng.range(2, 8) as u32;
        let at = |us| When::Moment(Moment::Level, nth, us);
        let (rot, slot) = (rng.below(12) as u32, rng.below(12) as u32);
        faults.push(Fault { when: at(1_000), what: What::RotParity(rot) });
        faults.push(Fault { when: at(2_000), what: What::KillMembers(slot, 1, 0) });
    }
    faults
}

/// The loss of a failure group.
pub fn of_groups(rng: &mut Rng, horizon_ms: u64) -> Fault {
    let when = match rng.chance(300) {
        true => When::At(rng.below(horizon_ms.max(1))),
        false => When::Moment(Moment::Level, rng.range(1, 6) as u32, rng.below(300_000)),
    };
    Fault { when, what: What::KillGroup(rng.below(12) as u32) }
}

/// Faults while children copy.
pub fn of_children(rng: &mut Rng) -> Vec<Fault> {
    let count = rng.pick(&[0, 1, 1, 2, 3]);
    let fault = |_| {
        let n = rng.below(12) as u32;
        let delay = if rng.chance(700) { rng.below(60_000) } else { rng.below(600_000) };
        let when = When::Moment(Moment::Fill, rng.range(1, 20) as u32, delay);
        let what = match rng.below(10) {
            0..3 => What::KillChild(n),
            3..6 => What::KillRank(n),
            6 => What::KillAllRanksAnd(rng.chance(500)),
            7 => What::KillNode(n),
            8 => What::KillRunner,
            _ => What::FreezeAgent(n, rng.range(200, 20_000)),
        };
        Fault { when, what }
    };
    (0..count).map(fault).collect()
}

fn when(rng: &mut Rng, horizon_ms: u64) -> When {
    if rng.chance(350) {
        return When::At(rng.below(horizon_ms.max(1)));
    }
    let delay = if rng.chance(500) { rng.below(3_000) } else { rng.below(200_000) };
    When::Moment(rng.pick(MOMENTS), rng.range(1, 12) as u32, delay)
}

fn what(rng: &mut Rng) -> What {
    let (a, b) = (rng.below(12) as u32, rng.below(12) as u32);
    match rng.below(100) {
        0..8 => What::KillRank(a),
        8..13 => What::KillAllRanks,
        13..21 => What::KillAgent(a),
        21..40 => What::KillNode(a),
        40..45 => What::KillTwoNodes(a, b),
        45..52 => What::KillRunner,
        52..56 => What::KillRunnerAndNode(a),
        56..60 => What::FreezeAgent(a, rng.range(200, 20_000)),
        60..63 => What::FreezeRunner(rng.range(200, 25_000)),
        63..67 => {
            What::Partition(rng.range(1, 4094) as u32, rng.chance(300), rng.range(200, 25_000))
        }
        67..69 => What::ResetLink(a, b),
        69..70 => What::ResetController(a),
        70..73 => What::DiskFull(a, rng.range(100, 8_000)),
        73..77 => What::PrefixBroken(rng.range(100, 15_000)),
        77..80 => What::RotData(a),
        80..82 => What::RotParity(a),
        82..84 => What::Truncate(a),
        84..86 => What::Remove(a),
        86..88 => What::Swap(a),
        88..89 => What::RotPrefix,
        89..91 => What::RankHangs(a),
        91..95 => What::RankInvalid(a),
        95..98 => What::RankShort(a),
        _ => What::RankRejects(a),
    }
}
