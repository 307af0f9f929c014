//! A controller and agents that answer as they should, or not.

use super::*;
use stanchion_format::ids::Ancestry;
use stanchion_format::ids::DatasetNo;
use stanchion_format::layout::{Scheme, Sets};
use stanchion_format::peer::{DatasetHolding, Restored, SlotHolding};

struct Job {
    ctrl: Controller,
    now: u64,
    /// What was said last to each agent, pings and acknowledgements aside.
    said: BTreeMap<AgentId, Msg>,
    launched: bool,
    ended: Option<Outcome>,
    /// How often the index was asked for.
    reads: u32,
    /// What the prefix says.
    index: ControllerEvent,
}

/// What agents were in before.
const INC: Incarnation = Incarnation { epoch: Epoch(1), count: 1 };

fn addr(id: u32) -> AgentAddr {
    AgentAddr { id: AgentId(id), addr: format!("a{id}") }
}

impl Job {
    fn new(agents: u32) -> Job {
        let cfg = ControllerConfig {
            job: JobId(1),
            epoch: Epoch(1),
            nodes: 1,
            agents,
            settings: Settings::default(),
            groups: BTreeMap::new(),
            purpose: Purpose::Run,
            from_scratch: false,
            bugs: Bugs::default(),
        };
        let now = Now { mono: Millis(0), unix_s: 0 };
        let index = ControllerEvent::Index(Vec::new());
        let ctrl = Controller::new(cfg, now);
        Job { ctrl, now: 0, said: BTreeMap::new(), launched: false, ended: None, reads: 0, index }
    }

    fn step(&mut self, event: ControllerEvent) {
        let now = Now { mono: Millis(self.now), unix_s: self.now / 1000 };
        for action in self.ctrl.step(now, event) {
            match action {
                ControllerAction::Send { msg, .. }
                    if matches!(*msg, Msg::Ping(_) | Msg::ReportAck(..)) => {}
                ControllerAction::Send { to, msg } => {
                    self.said.insert(to, *msg);
                }
                ControllerAction::LaunchApp { .. } => self.launched = true,
                ControllerAction::ReadIndex => self.reads += 1,
                ControllerAction::Exit(outcome) => {
                    assert_eq!(self.ended.replace(outcome), None, "it ends twice");
                }
                _ => {}
            }
        }
    }

    fn hear(&mut self, id: u32, msg: Msg) {
        self.step(ControllerEvent::Message { from: AgentId(id), msg });
    }

    /// Agent 1 alone, until the slots are to be made whole.
    fn until_restore(&mut self) -> Incarnation {
        self.until_plan(Vec::new()).inc
    }

    /// The same, if the agent has these; what was decided.
    fn until_plan(&mut self, datasets: Vec<DatasetHolding>) -> Arc<Plan> {
        self.step(ControllerEvent::AgentUp(addr(1)));
        while self.ctrl.phase == Phase::Starting {
            self.now += 1_000;
            self.hear(1, Msg::Pong(0));
            self.step(ControllerEvent::Tick);
        }
        self.answer_survey(datasets);
        let Msg::Install(plan) = self.said[&AgentId(1)].clone() else { panic!("{:?}", self.said) };
        self.hear(1, Msg::Installed(plan.inc));
        assert_eq!(self.said[&AgentId(1)], Msg::Restore(plan.inc));
        plan
    }

    /// The agent says what it has, if it is asked.
    fn answer_survey(&mut self, datasets: Vec<DatasetHolding>) {
        let index = std::mem::replace(&mut self.index, ControllerEvent::Index(Vec::new()));
        self.step(index);
        let Msg::Survey { epoch, round, .. } = self.said[&AgentId(1)] else {
            panic!("{:?}", self.said)
        };
        let holdings = Holdings {
            epoch,
            round,
            inc: INC,
            ancestry: Ancestry::default(),
            datasets,
            newest_committed: None,
        };
        self.hear(1, Msg::Holdings(Box::new(holdings)));
    }

    fn restored_and_open(&mut self, inc: Incarnation) {
        let restored = Restored::Ok {
            verified_bytes: 0,
            rebuilt_bytes: 0,
            fetched_bytes: 0,
            repaired_files: Vec::new(),
        };
        self.hear(1, Msg::Restored(inc, restored));
        self.hear(1, Msg::Opened(inc));
    }
}

#[test]
fn an_agent_that_comes_after_the_plan_is_not_waited_for() {
    let mut job = Job::new(2);
    let inc = job.until_restore();
    job.step(ControllerEvent::AgentUp(addr(2)));
    job.now += RESEND_MS;
    job.step(ControllerEvent::Tick);
    job.restored_and_open(inc);
    assert!(job.launched);
    assert_eq!(job.said.get(&AgentId(2)), None, "what it cannot know it is not asked");
    // In the next survey it is.
    job.step(ControllerEvent::AppExited { success: false, code: 1 });
    assert!(matches!(job.said[&AgentId(2)], Msg::Survey { .. }));
}

/// FM-S15: the processes may end sooner than the report of what they were told arrives.
#[test]
fn ranks_that_were_refused_are_not_launched_again() {
    let trouble = Trouble::new(Cause::Ranks { want: 2, have: 4 });
    let report = |inc| Msg::Report(inc, 1, Report::CollectiveFailed(trouble.clone()));
    let exited = || ControllerEvent::AppExited { success: false, code: 6 };
    for (report_first, runs_max) in [(true, 0), (false, 0), (true, 1), (false, 1)] {
        let mut job = Job::new(1);
        job.ctrl.cfg.settings.set("runs_max", &runs_max.to_string()).expect("a setting");
        let plan = job.until_plan(Vec::new());
        job.restored_and_open(plan.inc);
        assert!(std::mem::take(&mut job.launched));
        if report_first {
            job.hear(1, report(plan.inc));
            job.step(exited());
        } else {
            job.step(exited());
            job.hear(1, report(plan.inc));
            if runs_max == 0 {
                job.answer_survey(Vec::new());
            } else {
                job.hear(1, Msg::Finished(plan.inc, None, None));
            }
        }
        assert_eq!(job.ended, Some(Outcome::BadRestart(trouble.clone())));
        assert!(!job.launched);
    }
}

/// What ranks were refused in one launch says nothing about the next.
#[test]
fn a_refusal_ends_with_its_launch() {
    let mut job = Job::new(1);
    let plan = job.until_plan(Vec::new());
    job.restored_and_open(plan.inc);
    let trouble = Trouble::new(Cause::Setting);
    job.hear(1, Msg::Report(plan.inc, 1, Report::CollectiveFailed(trouble)));
    assert_eq!(job.ended, None, "the ranks may go on");
    job.step(ControllerEvent::AppExited { success: true, code: 0 });
    job.hear(1, Msg::Finished(plan.inc, None, None));
    assert!(matches!(job.ended, Some(Outcome::Success { .. })), "{:?}", job.ended);
}

/// FM-L2: an agent that is lost while others are asked may have ended a flush after the index was read.
#[test]
fn what_the_lost_brought_into_the_prefix_is_found() {
    let mut job = Job::new(2);
    (1..=2).for_each(|id| job.step(ControllerEvent::AgentUp(addr(id))));
    assert_eq!((job.ctrl.phase, job.reads), (Phase::Surveying, 1));
    let host = job.ctrl.slots[0];
    // Once after the answer, once before it: that one is of before the loss.
    job.step(ControllerEvent::Index(Vec::new()));
    job.step(ControllerEvent::AgentDown(host));
    assert_eq!((job.reads, job.ctrl.index.is_some()), (2, false));
    job.ctrl.read_index();
    job.step(ControllerEvent::Index(Vec::new()));
    assert!(job.ctrl.index.is_none(), "the answer to the last question is not there yet");
    job.step(ControllerEvent::Index(Vec::new()));
    assert!(job.ctrl.index.is_some());
}

#[test]
fn what_a_runner_slept_is_nobodys_silence_and_no_deadline() {
    let mut job = Job::new(1);
    let inc = job.until_restore();
    job.now += 10 * Settings::default().number("restore_timeout_ms");
    job.step(ControllerEvent::Tick);
    assert_eq!(job.said[&AgentId(1)], Msg::Restore(inc));
    job.restored_and_open(inc);
    assert!(job.launched && job.ctrl.lost == 0);
}

#[test]
fn what_is_not_in_the_prefix_any_more_is_not_persistent() {
    let info = DatasetInfo {
        key: Key { no: DatasetNo(4), inc: INC },
        name: "ckpt.4".into(),
        flags: FLAG_CHECKPOINT,
        ranks: 1,
        sets: Sets::new(Scheme::Single, 1, 2),
        chunk_bytes: 4096,
        bytes: 0,
        files: 0,
        placement: Vec::new().into(),
    };
    let held = DatasetHolding {
        info: info.clone(),
        certified: true,
        levels: vec![Level::Cached, Level::Persistent],
        slots: vec![SlotHolding { slot: SlotId(0), data: true, parity: true }],
    };
    let record = |no| stanchion_format::index::IndexRecord {
        version: stanchion_format::index::INDEX_VERSION,
        job: JobId(1),
        epoch: Epoch(1),
        inc: INC,
        ancestry: Ancestry::default(),
        info: DatasetInfo { key: Key { no: DatasetNo(no), inc: INC }, flags: 0, ..info.clone() },
        unix_s: 0,
        slots: Vec::new(),
        containers: None,
        times: None,
        crc: stanchion_format::checksum::Crc(0),
    };
    let unread = ControllerEvent::IndexFailed(Trouble::new(Cause::Timeout));
    for (index, persistent) in [
        (ControllerEvent::Index(vec![record(4)]), true),
        // A newer one is there in its place.
        (ControllerEvent::Index(vec![record(3), record(5)]), true),
        // One began to replace it, and is lost.
        (ControllerEvent::Index(vec![record(3)]), false),
        (unread, true),
    ] {
        let said = format!("{index:?}");
        let mut job = Job::new(1);
        job.index = index;
        let plan = job.until_plan(vec![held.clone()]);
        let of: Vec<_> = plan.ledger.iter().filter(|e| e.info.key.no.0 == 4).collect();
        assert_eq!(of.len(), 1, "{said}");
        assert_eq!(of[0].persistent, persistent, "{said}");
    }
}
