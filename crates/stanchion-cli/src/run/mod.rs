//! `stanchion run`: agents up, application up, watch, replace nodes, relaunch, wind down.

pub mod agents;
pub mod app;
mod control;
pub mod drive;
pub mod events;
pub mod lease;

use crate::agent::Options;
use crate::args::RunArgs;
use crate::exit::{Exit, Failed, OrExit, of_outcome};
use crate::jobdir::{self, JobDir, JobInfo};
use crate::settings::{self, Gathered};
use crate::{out, prefix as tools, scavenge};
use anyhow::{Context, anyhow};
use app::App;
use events::Reporter;
use serde_json::json;
use stanchion_core::api::Outcome;
use stanchion_core::bugs::Bugs;
use stanchion_core::controller::{ControllerConfig, Purpose};
use stanchion_format::config::Settings;
use stanchion_format::ids::{AgentId, Epoch, JobId};
use stanchion_format::index::{HaltFile, LeaseFile};
use stanchion_format::peer::Severity;
use stanchion_format::{limits, place};
use stanchion_io::prefix::Prefix;
use std::collections::BTreeMap;
use std::io::Read;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// All that a run is made of, before anything of it lives.
struct Plan {
    gathered: Gathered,
    settings: Settings,
    root: PathBuf,
    program: PathBuf,
    name: String,
    base: PathBuf,
    groups: BTreeMap<AgentId, u32>,
}

/// Runs a job to its end.
pub fn run(args: &RunArgs) -> Result<Exit, Failed> {
    let started = Instant::now();
    let plan = plan(args)?;
    let json = args.json_events.as_ref().map(std::fs::File::create).transpose();
    let json = json.context("--json-events").or_exit(Exit::Usage)?;
    let verbose = args.verbose > 0 || plan.settings.number("debug") > 0;
    let mut reporter = Reporter::new(started, verbose, json);
    for warning in &plan.gathered.warnings {
        reporter.own(Severity::Warn, "setting", json!({}), warning.clone());
    }
    let prefix = Prefix::open(&plan.root).map_err(|t| tools::unusable(&plan.root, &t))?;
    let job = prefix.job().map_err(|t| tools::unusable(&plan.root, &t))?;
    let halt = prefix.read_halt().map_err(|t| tools::unusable(&plan.root, &t))?.unwrap_or_default();
    if halted_already(&halt) {
        let wish = tools::halt_words(&halt).unwrap_or_default();
        let text =
            format!("the prefix has a wish to halt {wish}; `stanchion halt --unset` withdraws it");
        return Err(Failed::new(Exit::Halted, anyhow!(text)));
    }
    sweep(args, &plan, &mut reporter, &prefix, job);
    let wait = Duration::from_millis(plan.settings.number("lease_wait_ms"));
    let epoch = lease::take(&prefix, &plan.base, wait, "run")?;
    let result = with_epoch(args, &plan, &mut reporter, Arc::new(prefix), job, epoch, halt);
    if result.is_err() {
        give_back(&plan.root, epoch, &[]);
    }
    result
}

/// Removes what lost jobs left, but for what `stanchion scavenge` could save (FM-A4).
fn sweep(args: &RunArgs, plan: &Plan, reporter: &mut Reporter, prefix: &Prefix, job: JobId) {
    // Without the index nobody knows what is there already: all of it stays.
    let records = prefix.read_index().map_or_else(|_| Vec::new(), |(records, _)| records);
    let keep = |dead: &[jobdir::Found]| {
        scavenge::left::kept(dead, &plan.root, (job, &records), args.from_scratch)
    };
    let (swept, kept) = jobdir::sweep(&plan.base, keep);
    if swept > 0 {
        let text = format!("removed what {swept} lost jobs had left in {}", plan.base.display());
        reporter.own(Severity::Debug, "swept", json!({"jobs": swept}), text);
    }
    let ours = |f: &&jobdir::Found| f.info.as_ref().is_some_and(|i| i.prefix == plan.root);
    for found in kept.iter().filter(ours) {
        let text = format!(
            "a lost job left a checkpoint in {} that is newer than those in the prefix; this run does not start from it: \
             end this one now and call `stanchion scavenge` first, or it is void as soon as this run writes one",
            found.path.display()
        );
        reporter.own(Severity::Warn, "left_behind", json!({"dir": found.path}), text);
    }
}

/// The lease, if it is ours, or of an agent of ours that ended before it could give it back: one that was cut off took it,
/// and was killed when it was late. Nobody leads that could.
pub fn give_back(root: &std::path::Path, epoch: Epoch, ended: &[u32]) {
    let Ok(prefix) = Prefix::open(root) else { return };
    let ours = |lease: LeaseFile| {
        lease.epoch == epoch || lease.host == lease::host() && ended.contains(&lease.pid)
    };
    if prefix.read_lease().is_ok_and(|lease| lease.is_some_and(ours)) {
        let _stale_leases_pass = prefix.remove_lease();
    }
}

fn plan(args: &RunArgs) -> Result<Plan, Failed> {
    let max = limits::SLOTS_MAX;
    let usage = |text: String| Err(Failed::new(Exit::Usage, anyhow!(text)));
    if !(1..=max).contains(&args.nodes) {
        return usage(format!("--nodes {} is not between 1 and {max}", args.nodes));
    }
    if args.spares > max - args.nodes {
        return usage(format!("--nodes and --spares are more than {max} together"));
    }
    let mut options = settings::pairs(&args.set)?;
    for (name, value) in [
        ("prefix", args.prefix.as_ref().map(|p| p.to_string_lossy().into_owned())),
        ("cache_dir", args.cache_dir.as_ref().map(|p| p.to_string_lossy().into_owned())),
        ("scheme", args.scheme.clone()),
        ("set_size", args.set_size.clone()),
        ("flush_every", args.flush_every.clone()),
        ("flush_layout", args.layout.clone()),
        ("runs_max", args.runs_max.clone()),
        ("retries_max", args.retries_max.clone()),
        ("job_name", args.name.clone()),
    ] {
        options.extend(value.map(|value| (name.to_owned(), value)));
    }
    let gathered = settings::gather(&options)?;
    let program = app::resolve(&args.command[0]).or_exit(Exit::Usage)?;
    let root = gathered.prefix()?;
    let mut settings = gathered.settings.clone();
    end_time(&mut settings);
    let name = match settings.text("job_name") {
        "" => program.file_name().map_or("job".into(), |n| n.to_string_lossy().into_owned()),
        name => name.to_owned(),
    };
    let base = jobdir::base(&settings);
    let groups = failure_groups(&settings, args.nodes, args.spares)?;
    Ok(Plan { gathered, settings, root, program, name, base, groups })
}

/// Longest file of failure groups, bytes.
const GROUPS_BYTES_MAX: u64 = 16 << 20;

/// Which nodes fail together. Refuses a job that is too small for the redundancy it asks for.
fn failure_groups(
    settings: &Settings,
    nodes: u32,
    spares: u32,
) -> Result<BTreeMap<AgentId, u32>, Failed> {
    let path = settings.text("failure_groups");
    let mut groups: Vec<u32> = (0..nodes + spares).collect();
    if !path.is_empty() {
        let mut text = String::new();
        std::fs::File::open(path)
            .and_then(|file| file.take(GROUPS_BYTES_MAX).read_to_string(&mut text))
            .with_context(|| format!("the failure groups in {path}"))
            .or_exit(Exit::Usage)?;
        let read = place::read_groups(&text, nodes + spares);
        groups =
            read.with_context(|| format!("the failure groups in {path}")).or_exit(Exit::Usage)?;
    }
    place::sets(settings.redundancy(), &groups[..nodes as usize])
        .context("the job is too small for its redundancy scheme")
        .or_exit(Exit::Usage)?;
    let named = if path.is_empty() { Vec::new() } else { groups };
    Ok((0..).map(AgentId).zip(named).collect())
}

/// When the allocation ends, where only the scheduler says so.
fn end_time(settings: &mut Settings) {
    if settings.number("end_time") == 0
        && let Ok(end) = std::env::var("SLURM_JOB_END_TIME")
    {
        // Not a number: the scheduler says nothing that we know.
        let _as_if_unset = settings.set("end_time", &end);
    }
}

fn halted_already(halt: &HaltFile) -> bool {
    let now = out::unix_s();
    halt.now
        || halt.immediately
        || halt.after_checkpoints == Some(0)
        || halt.before_unix_s.is_some_and(|t| t <= now)
        || halt.after_unix_s.is_some_and(|t| t <= now)
}

/// Where Open MPI 5 makes its session directories.
const PRTE_TMPDIR: &str = "PRTE_MCA_prte_tmpdir_base";

/// What the application sees beside the environment of `stanchion run`.
fn environment(plan: &Plan, job: &JobDir) -> Vec<(String, String)> {
    let text = |path: &std::path::Path| path.to_string_lossy().into_owned();
    // The command line counts more than the environment, for the application's library too.
    let mut env: Vec<(String, String)> = plan
        .gathered
        .command_line
        .pairs()
        .into_iter()
        .map(|(name, value)| (format!("STANCHION_{}", name.to_uppercase()), value))
        .collect();
    env.retain(|(name, _)| name != "STANCHION_PREFIX");
    env.push(("STANCHION_PREFIX".into(), text(&plan.root)));
    env.push(("SCR_PREFIX".into(), text(&plan.root)));
    env.push(("STANCHION_JOB_DIR".into(), text(job.path())));
    // An Open MPI that is killed leaves its session directory, named by its process number alone: where
    // these wrap, a later mpiexec finds it and does not start. Here it goes with the job.
    if std::env::var_os(PRTE_TMPDIR).is_none() {
        env.push((PRTE_TMPDIR.into(), text(job.path())));
    }
    env
}

fn with_epoch(
    args: &RunArgs,
    plan: &Plan,
    reporter: &mut Reporter,
    prefix: Arc<Prefix>,
    job: JobId,
    epoch: Epoch,
    halt: HaltFile,
) -> Result<Exit, Failed> {
    let info = JobInfo {
        name: plan.name.clone(),
        pid: std::process::id(),
        prefix: plan.root.clone(),
        caches: PathBuf::new(),
        command: args.command.iter().map(|a| a.to_string_lossy().into_owned()).collect(),
        nodes: args.nodes,
        spares: args.spares,
        started_unix_s: out::unix_s(),
    };
    let cache_dir = PathBuf::from(plan.settings.text("cache_dir"));
    let cache_dir =
        std::path::absolute(&cache_dir).context("the cache directory").or_exit(Exit::Storage)?;
    let dir = JobDir::create(&plan.base, &cache_dir, info)?;
    reporter.own(
        Severity::Debug,
        "job",
        json!({"dir": dir.path(), "job": job.0, "epoch": epoch.0, "prefix": plan.root}),
        format!(
            "job directory {}, prefix {}, epoch {epoch}",
            dir.path().display(),
            plan.root.display()
        ),
    );
    let settings = plan.settings.clone();
    let core = ControllerConfig {
        job,
        epoch,
        nodes: args.nodes,
        agents: args.nodes + args.spares,
        settings,
        purpose: Purpose::Run,
        from_scratch: args.from_scratch,
        groups: plan.groups.clone(),
        bugs: Bugs::default(),
    };
    let app = App::new(plan.program.clone(), args.command.clone(), environment(plan, &dir));
    let result = in_runtime(&dir, core, app, reporter, prefix, halt);
    dir.remove();
    let ended = result?;
    // Where nothing was forced, ours was given back by whoever led; a higher epoch's is not touched.
    let ours = if ended.forced { epoch } else { Epoch(u64::MAX) };
    give_back(&plan.root, ours, &ended.agents);
    let exit = of_outcome(&ended.outcome);
    reporter.outcome(&ended.outcome, exit);
    Ok(exit)
}

/// A job's secret.
pub fn secret() -> Result<[u8; 32], Failed> {
    let mut secret = [0u8; 32];
    getrandom::fill(&mut secret).map_err(|e| anyhow!("no random numbers: {e}"))?;
    Ok(secret)
}

/// How a run ended.
pub struct Ended {
    outcome: Outcome,
    /// Everything was killed; nobody gave the lease back.
    forced: bool,
    /// Processes of its agents, all of which are gone.
    agents: Vec<u32>,
}

fn in_runtime(
    dir: &JobDir,
    core: ControllerConfig,
    app: App,
    reporter: &mut Reporter,
    prefix: Arc<Prefix>,
    halt: HaltFile,
) -> Result<Ended, Failed> {
    // Descendants of the application that lose their parent become our children.
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
        .context("becoming a subreaper")?;
    let secret = secret()?;
    let options = Options {
        secret,
        id: 0,
        name: dir.info().name.clone(),
        job: core.job.0,
        prefix: dir.info().prefix.clone(),
        cache: PathBuf::new(),
        adopt: false,
        root: PathBuf::new(),
        agents_here: core.agents,
        settings: core.settings.pairs(),
    };
    // On this thread: the application's parent-death signal is bound to the thread that starts it.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let result = runtime.block_on(async {
        let mut driver = drive::Driver::new(dir, core, app, reporter)?;
        let up = driver.start_agents(&options).await;
        let result = match up {
            Ok(()) => driver.lead(secret, prefix, halt).await,
            Err(failed) => Err(failed),
        };
        // Whatever happened: nothing of the job outlives this.
        driver.wind_down(result.is_err()).await;
        let agents = driver.agents_gone();
        result.map(|ended| Ended { agents, ..ended })
    });
    // A thread that hangs in a file system is not waited for.
    runtime.shutdown_background();
    result
}
