//! What agents take over from caches whose agents are gone, and what who leads them makes of it (FM-A2, FM-S1).

use std::collections::BTreeMap;

use stanchion_core::agent::{Agent, AgentConfig};
use stanchion_core::api::{
    AgentAction, AgentEvent, ControllerAction, ControllerEvent, Millis, Now, Outcome,
};
use stanchion_core::bugs::Bugs;
use stanchion_core::controller::{Controller, ControllerConfig, Purpose};
use stanchion_format::checksum::Crc;
use stanchion_format::client::FLAG_CHECKPOINT;
use stanchion_format::config::Settings;
use stanchion_format::holding::Holding;
use stanchion_format::ids::*;
use stanchion_format::layout::{Scheme, Sets};
use stanchion_format::manifest::{FileEntry, Manifest};
use stanchion_format::peer::{AgentAddr, DatasetInfo, Holdings, Msg, Plan};

const SLOTS: u32 = 3;

fn inc(count: u32) -> Incarnation {
    Incarnation { epoch: Epoch(1), count }
}

fn key(no: u64, count: u32) -> Key {
    Key { no: DatasetNo(no), inc: inc(count) }
}

fn manifest(key: Key, slot: u32) -> Manifest {
    let (rank, path) = (RankId(slot), format!("x.{slot}"));
    let file = FileEntry { rank, path, bytes: 10, mode: 0o600, chunks: vec![Crc(7)] };
    Manifest { key, slot: SlotId(slot), chunk_bytes: 4096, files: vec![file] }
}

fn holding(key: Key, slot: u32, line: (Incarnation, &Ancestry)) -> Holding {
    let info = DatasetInfo {
        key,
        name: format!("step.{}", key.no),
        flags: FLAG_CHECKPOINT,
        ranks: SLOTS,
        sets: Sets::new(Scheme::Xor, SLOTS, SLOTS),
        chunk_bytes: 4096,
        bytes: 30,
        files: 3,
        placement: [].into(),
    };
    Holding {
        no: 1,
        job: JobId(1),
        inc: line.0,
        ancestry: line.1.clone(),
        info,
        slot: SlotId(slot),
        data: true,
        parity: true,
        manifests: (0..SLOTS).map(|s| manifest(key, s).into()).collect(),
    }
}

fn now() -> Now {
    Now { mono: Millis(1), unix_s: 1 }
}

/// What an agent that adopts all this tells to a survey.
fn told(id: u32, holdings: Vec<Holding>) -> Holdings {
    let config = AgentConfig {
        id: AgentId(id),
        job: JobId(1),
        cache: "/c".into(),
        prefix: "/p".into(),
        settings: Settings::default(),
        pool_bytes_max: 1 << 20,
        stores: false,
        bugs: Bugs::default(),
    };
    let mut agent = Agent::new(config, now()).adopting(holdings);
    let msg = Msg::Survey { epoch: Epoch(2), round: 1, end_ranks: true };
    let actions = agent.step(now(), AgentEvent::Message { from: PeerId::Controller, msg });
    let answer = actions.into_iter().find_map(|a| match a {
        AgentAction::Send { msg, .. } => match *msg {
            Msg::Holdings(h) => Some(*h),
            _ => None,
        },
        _ => None,
    });
    answer.expect("a survey is answered")
}

/// The plan of who leads agents that told this, or how it ended.
fn planned(all: BTreeMap<u32, Holdings>) -> Result<Plan, Outcome> {
    let count = all.len() as u32;
    let config = ControllerConfig {
        job: JobId(1),
        epoch: Epoch(2),
        nodes: count,
        agents: count,
        settings: Settings::default(),
        groups: BTreeMap::new(),
        purpose: Purpose::WindDown,
        from_scratch: false,
        bugs: Bugs::default(),
    };
    let mut leader = Controller::new(config, now());
    let addr = |id: u32| AgentAddr { id: AgentId(id), addr: format!("a:{id}") };
    let up = all.keys().map(|id| ControllerEvent::AgentUp(addr(*id)));
    let told = all.iter().map(|(id, h)| ControllerEvent::Message {
        from: AgentId(*id),
        msg: Msg::Holdings(Box::new(h.clone())),
    });
    let events: Vec<_> = up.chain([ControllerEvent::Index(Vec::new())]).chain(told).collect();
    let actions = events.into_iter().flat_map(|e| leader.step(now(), e));
    let decided = actions.filter_map(|a| match a {
        ControllerAction::Send { msg, .. } => match *msg {
            Msg::Install(plan) => Some(Ok((*plan).clone())),
            _ => None,
        },
        ControllerAction::Exit(outcome) => Some(Err(outcome)),
        _ => None,
    });
    decided.last().expect("something is decided")
}

#[test]
fn a_survey_hears_of_what_was_adopted() {
    let none = Ancestry::default();
    let went_on = Ancestry(vec![(inc(1), DatasetNo(5))]);
    // 6 was written before the restart from 5, which another 6 followed; one is of another job.
    let mut foreign = holding(key(9, 1), 1, (inc(3), &went_on));
    (foreign.job, foreign.info.key.inc) = (JobId(2), inc(3));
    let h = told(
        0,
        vec![
            holding(key(6, 1), 1, (inc(1), &none)),
            holding(key(5, 1), 1, (inc(2), &went_on)),
            foreign,
        ],
    );
    assert_eq!((h.inc, &h.ancestry), (inc(2), &went_on));
    assert_eq!(h.newest_committed, Some(key(5, 1)));
    let keys: Vec<Key> = h.datasets.iter().map(|d| d.info.key).collect();
    assert_eq!(keys, [key(5, 1), key(6, 1)]);
    let d = &h.datasets[0];
    assert!(d.certified && d.slots.len() == 1 && d.slots[0].data && d.slots[0].parity);
    assert_eq!(told(0, Vec::new()).datasets, []);
}

#[test]
fn the_newest_line_counts_and_nothing_of_another() {
    // FM-S1: nodes 0 and 1 went on from 5; the directory of one that was lost before that lies beside theirs, with a newer
    // number and a higher name, and what took its place is gone.
    let none = Ancestry::default();
    let went_on = Ancestry(vec![(inc(1), DatasetNo(5))]);
    let of = |slot| vec![holding(key(5, 1), slot, (inc(2), &went_on))];
    let stale = vec![
        holding(key(5, 1), 1, (inc(1), &none)),
        holding(key(6, 1), 1, (inc(1), &none)),
        holding(key(6, 1), 2, (inc(1), &none)),
    ];
    let all = [(0, told(0, of(0))), (1, told(1, of(1))), (7, told(7, stale))];
    let plan = planned(all.into()).unwrap();
    assert_eq!(plan.restart.map(|r| r.0), Some(key(5, 1)));
    assert_eq!(plan.slots, [0, 1, 7].map(AgentId));
    assert!(plan.ledger.iter().all(|e| e.info.key != key(6, 1)), "{:?}", plan.ledger);
    // Slot 2 has nothing of 5: it is made again.
    assert_eq!(plan.ledger[0].no_data, [SlotId(2)]);
}

#[test]
fn what_is_beyond_the_scheme_is_not_planned() {
    // FM-S14
    let none = Ancestry::default();
    let one = told(0, vec![holding(key(5, 1), 0, (inc(1), &none))]);
    match planned([(0, one)].into()) {
        Err(Outcome::WoundDown { persistent: None, trouble: Some(_) }) => {}
        other => panic!("{other:?}"),
    }
}

#[test]
fn parity_leads_to_a_slot_whose_data_was_in_memory() {
    // FM-A3
    let none = Ancestry::default();
    let of = |slot| {
        let mut h = holding(key(5, 1), slot, (inc(1), &none));
        h.info.sets = Sets::new(Scheme::Partner, SLOTS, SLOTS);
        h.data = false;
        vec![h]
    };
    let all = [(3, told(3, of(2))), (4, told(4, of(0))), (5, told(5, of(1)))];
    let plan = planned(all.into()).unwrap();
    assert_eq!(plan.restart.map(|r| r.0), Some(key(5, 1)));
    assert_eq!(plan.slots, [4, 5, 3].map(AgentId));
}
