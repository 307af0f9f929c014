//! A history's conditions: everything that follows from the seed before the first event.

use crate::fault::{self, Fault};
use crate::rng::Rng;
use stanchion_core::bugs::Bugs;
use stanchion_format::config::Settings;
use stanchion_format::place;

/// How the application behaves.
#[derive(Clone, Debug)]
pub struct App {
    /// Ranks.
    pub ranks: u32,
    /// Steps to its end.
    pub steps: u64,
    /// Time for a step, milliseconds.
    pub step_ms: u64,
    /// Files of a rank in a dataset, at most.
    pub files: u64,
    /// One of so many files has several chunks; 0: none.
    pub large_in: u64,
    /// Every so manieth dataset is an output too; 0: none.
    pub output_every: u64,
    /// File names carry no step: each dataset replaces the one before in the prefix.
    pub same_names: bool,
    /// Ranks write into their agents' shared memory.
    pub memory: bool,
    /// Children of the ranks copy behind them; only with `memory`.
    pub cow: bool,
    /// What of a file is as in the dataset before is not written again.
    pub increments: bool,
    /// Ranks wait for a level after so many of a thousand datasets.
    pub wait_permille: u32,
}

/// The conditions.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// All follows from it.
    pub seed: u64,
    /// Slots.
    pub nodes: u32,
    /// Idle agents.
    pub spares: u32,
    /// Failure groups of all nodes, spares behind; none: each fails alone.
    pub groups: Vec<u32>,
    /// The job's settings.
    pub settings: Settings,
    /// The application.
    pub app: App,
    /// Shared memory of each agent, bytes.
    pub pool_bytes_max: u64,
    /// Do agents store what is in their pools, and give its memory back?
    pub stores: bool,
    /// Messages keep their order between two processes.
    pub fifo: bool,
    /// Longest usual way of a message, microseconds.
    pub hop_us: u64,
    /// Longest usual step of a task, microseconds.
    pub work_us: u64,
    /// The controller can end a silent agent's process.
    pub fence: bool,
    /// The launcher dies with the runner.
    pub launcher_dies: bool,
    /// Runs over one prefix, at most.
    pub runs: u32,
    /// What goes wrong.
    pub faults: Vec<Fault>,
    /// A rule that is broken on purpose.
    pub bugs: Bugs,
}

impl Scenario {
    /// The conditions of `seed`.
    pub fn new(seed: u64) -> Scenario {
        let rng = &mut Rng::new(seed, 1);
        let nodes = rng.pick(&[1, 2, 2, 3, 3, 4, 4, 5, 6, 8, 12]);
        let spares = rng.pick(&[0, 1, 1, 2, 3, 4]);
        let app = App {
            ranks: ranks(rng, nodes),
            steps: rng.range(3, 9),
            step_ms: rng.range(50, 900),
            files: rng.range(1, 3),
            large_in: rng.pick(&[0, 5, 3]),
            output_every: rng.pick(&[0, 0, 2, 3]),
            same_names: rng.chance(150),
            wait_permille: rng.pick(&[0, 300, 800]),
            memory: rng.chance(500),
            cow: Rng::new(seed, 4).chance(500),
            increments: Rng::new(seed, 6).chance(500),
        };
        let cow = app.memory && app.cow;
        let stores = rng.chance(500);
        let pool_bytes_max = 4096 * rng.pick(&[2, 6, 20, 60, 200]);
        let mut settings = settings(rng);
        if Rng::new(seed, 10).chance(300) {
            settings.set("flush_layout", "containers").expect("a word of the table");
        }
        let mut keep = Rng::new(seed, 11);
        if keep.chance(400) {
            settings.set("keep_last", keep.pick(&["1", "2"])).expect("a value of the table");
            settings.set("keep_every", keep.pick(&["0", "4"])).expect("a value of the table");
        }
        let horizon = 2_000 + app.steps * (app.step_ms + 400);
        let mut faults = fault::faults(&mut Rng::new(seed, 2), horizon);
        let groups = groups(&mut Rng::new(seed, 8), nodes, spares, &settings);
        if !groups.is_empty() {
            let rng = &mut Rng::new(seed, 9);
            faults.extend(rng.chance(600).then(|| fault::of_groups(rng, horizon)));
        }
        if settings.text("scheme") == "RS" {
            faults.extend(fault::of_sets(&mut Rng::new(seed, 7), horizon));
        }
        if cow {
            faults.extend(fault::of_children(&mut Rng::new(seed, 5)));
        }
        Scenario {
            seed,
            nodes,
            spares,
            groups,
            settings,
            app,
            pool_bytes_max,
            stores,
            fifo: rng.chance(500),
            hop_us: rng.pick(&[300, 3_000, 20_000]),
            work_us: rng.pick(&[1_000, 10_000, 60_000]),
            fence: rng.chance(600),
            launcher_dies: rng.chance(500),
            runs: rng.pick(&[1, 2, 2, 3]),
            faults,
            bugs: Bugs::default(),
        }
    }

    /// Two nodes, two ranks, nothing goes wrong.
    pub fn calm(seed: u64) -> Scenario {
        let mut s = Scenario::new(seed);
        (s.nodes, s.spares, s.runs) = (2, 1, 1);
        (s.app.ranks, s.app.steps) = (2, 5);
        s.faults.clear();
        s.groups.clear();
        s
    }
}

/// One or two a node and sometimes one more; or so few that some nodes have none.
fn ranks(rng: &mut Rng, nodes: u32) -> u32 {
    let a_node = rng.pick(&[1, 1, 1, 2]);
    if rng.chance(100) { nodes.div_ceil(2) } else { nodes * a_node + rng.pick(&[0, 0, 0, 1]) }
}

/// Racks of a few nodes each, in runs or dealt out; none where a job on them would be refused.
fn groups(rng: &mut Rng, nodes: u32, spares: u32, settings: &Settings) -> Vec<u32> {
    let racks = rng.range(2, 5) as u32;
    let wide = (nodes + spares).div_ceil(racks);
    let runs = rng.chance(500);
    let group = |i: u32| if runs { i / wide } else { i % racks };
    let groups: Vec<u32> = (0..nodes + spares).map(group).collect();
    let fits = place::sets(settings.redundancy(), &groups[..nodes as usize]).is_ok();
    if nodes > 2 && fits && rng.chance(400) { groups } else { Vec::new() }
}

fn settings(rng: &mut Rng) -> Settings {
    let mut s = Settings::default();
    let scheme = rng.pick(&["XOR", "RS", "RS", "RS", "PARTNER", "SINGLE"]);
    let mut set = |name: &str, value: u64| {
        s.set(name, &value.to_string()).expect("a value of the table");
    };
    set("set_size", rng.range(2, 8));
    set("parities", rng.range(1, 4));
    set("chunk_bytes", 4096);
    set("cache_datasets", rng.range(1, 3));
    set("flush_every", rng.pick(&[0, 1, 2, 3]));
    set("flush_at_end", u64::from(rng.chance(800)));
    set("flush_on_restart", u64::from(rng.chance(150)));
    set("fanout", rng.range(2, 8));
    set("checkpoint_interval", rng.pick(&[0, 0, 2]));
    set("collective_timeout_ms", rng.range(6_000, 15_000));
    set("init_timeout_ms", 10_000);
    set("restore_timeout_ms", 40_000);
    set("flush_timeout_ms", rng.range(8_000, 15_000));
    set("protect_timeout_ms", rng.range(8_000, 20_000));
    set("start_timeout_ms", 5_000);
    set("silence_timeout_ms", rng.range(2_500, 6_000));
    set("orphan_grace_ms", rng.range(500, 2_000));
    set("pool_wait_ms", rng.range(300, 4_000));
    set("pool_ready_ms", rng.range(10, 500));
    set("pool_idle_ms", rng.range(500, 3_000));
    s.set("pool_full", rng.pick(&["wait", "drop", "skip"])).expect("a word of the table");
    s.set("scheme", scheme).expect("a scheme of the table");
    s
}
