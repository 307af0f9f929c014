//! The runner's local socket: who asks for `status` gets it as JSON.

use serde_json::{Value, json};
use stanchion_core::controller::Status;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};

/// Longest time for a question, and for its answer to be taken.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Longest question, bytes.
const QUESTION_BYTES_MAX: u64 = 64;
/// Who asks at one time, at most.
const CLIENTS_MAX: usize = 16;

/// Makes the socket, for this user alone (FM-C2).
pub fn bind(path: &Path) -> anyhow::Result<UnixListener> {
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// Answers for ever; `answer` is what is known now.
pub async fn serve(listener: UnixListener, answer: impl Fn() -> Value + Clone + Send + 'static) {
    let turns = std::sync::Arc::new(tokio::sync::Semaphore::new(CLIENTS_MAX));
    loop {
        let Ok(turn) = turns.clone().acquire_owned().await else { return };
        match listener.accept().await {
            Ok((client, _)) => {
                let answer = answer.clone();
                tokio::spawn(async move {
                    let _gone_is_fine = tokio::time::timeout(TIMEOUT, one(client, answer)).await;
                    drop(turn);
                });
            }
            // Out of descriptors, say: somebody will close one.
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

async fn one(mut client: UnixStream, answer: impl Fn() -> Value + Send) -> std::io::Result<()> {
    let uid = client.peer_cred()?.uid();
    if uid != rustix::process::getuid().as_raw() && uid != 0 {
        return Ok(());
    }
    let mut question = Vec::new();
    let mut byte = [0u8; 1];
    while question.len() < QUESTION_BYTES_MAX as usize
        && client.read(&mut byte).await? == 1
        && byte[0] != b'\n'
    {
        question.push(byte[0]);
    }
    let answer = match question.as_slice() {
        b"status" => answer(),
        _ => json!({"error": "the only question is 'status'"}),
    };
    client.write_all(format!("{answer}\n").as_bytes()).await?;
    client.shutdown().await
}

/// What the controller knows, as JSON.
pub fn status(status: &Status) -> Value {
    let datasets: Vec<Value> = status
        .datasets
        .iter()
        .map(|(info, levels)| {
            let mut value = crate::words::dataset(info);
            value["levels"] = levels.iter().map(|l| l.as_str()).collect();
            value
        })
        .collect();
    json!({
        "phase": status.phase, "datasets": datasets, "current": status.current.map(|k| k.no.0),
        "incarnation": status.inc.to_string(),
        "rebuild": status.rebuild.map(|(done, bad)| json!({"done_bytes": done, "bad_bytes": bad})),
        "runs": status.runs, "lost": status.lost, "ranks": status.ranks,
        "slots": status.slots.iter().map(|(slot, agent, alive)| {
            json!({"node": slot.0, "agent": agent.0, "alive": alive})
        }).collect::<Vec<_>>(),
        "spares": status.spares.iter().map(|a| a.0).collect::<Vec<_>>(),
    })
}

/// Variables by which launchers tell a process its rank; see the client library.
const RANK_VARIABLES: [&str; 6] =
    ["STANCHION_RANK", "PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "RANK"];

/// The processes that were started as ranks, as far as they run on this machine: (rank, process). Wrappers
/// between launcher and rank have the same variables: of those the innermost counts. So have processes that a rank
/// forked, as for copy-on-write; those do not.
pub fn ranks(agents: &std::collections::BTreeSet<i32>) -> Vec<(u32, i32)> {
    let own = std::process::id() as i32;
    let family = crate::procs::descendants(own, agents);
    let mut ranks: Vec<(u32, i32, i32)> = family
        .iter()
        .filter_map(|p| {
            let value = RANK_VARIABLES
                .iter()
                .find_map(|name| crate::procs::environment_value(p.pid, name))?;
            Some((value.parse().ok()?, p.pid, p.ppid))
        })
        .collect();
    let known: std::collections::BTreeSet<(u32, i32)> =
        ranks.iter().map(|(rank, pid, _)| (*rank, *pid)).collect();
    ranks.retain(|(rank, pid, parent)| {
        !known.contains(&(*rank, *parent)) || !crate::procs::same_command(*pid, *parent)
    });
    let wrappers: std::collections::BTreeSet<(u32, i32)> =
        ranks.iter().map(|(rank, _, parent)| (*rank, *parent)).collect();
    ranks.retain(|(rank, pid, _)| !wrappers.contains(&(*rank, *pid)));
    ranks.sort_unstable();
    ranks.into_iter().map(|(rank, pid, _)| (rank, pid)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::process::{Command, Stdio};

    #[test]
    fn a_rank_is_neither_its_wrapper_nor_what_it_forked() {
        let _alone = crate::procs::FORKS.write().unwrap_or_else(std::sync::PoisonError::into_inner);
        // env and the outer shell are wrappers, the inner one is the rank, and its subshell is forked.
        let inner = "exec 3<&0; (read x <&3) & echo; wait";
        let mut wrapper = Command::new("sh")
            .args(["-c", "\"$@\"; exit", "sh", "sh", "-c", inner])
            .env("STANCHION_RANK", "4711")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("sh runs");
        let mut word = [0];
        let out = wrapper.stdout.as_mut().expect("it is piped");
        std::io::Read::read_exact(out, &mut word).expect("the subshell is there");
        let family = crate::procs::descendants(wrapper.id() as i32, &BTreeSet::new());
        let inner = family.iter().find(|p| p.ppid == wrapper.id() as i32).map(|p| p.pid);
        let found: Vec<(u32, i32)> =
            ranks(&BTreeSet::new()).into_iter().filter(|(rank, _)| *rank == 4711).collect();
        drop(wrapper.stdin.take());
        wrapper.wait().expect("it ends");
        assert_eq!(family.len(), 2, "the rank and what it forked");
        assert_eq!(found, [(4711, inner.expect("it is there"))]);
    }
}
