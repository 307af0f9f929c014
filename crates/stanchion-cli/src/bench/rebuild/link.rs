//! Agents behind slow links: a network namespace for each, a bridge between them, and a token bucket (tc tbf) at both ends
//! of each link. Needs root.

use anyhow::{Context, bail};
use std::process::{Command, Stdio};

/// What a bucket holds, and the longest that a packet waits in it.
const BURST: &str = "256kb";
const LATENCY: &str = "50ms";

/// The namespaces; removed at the end.
pub(super) struct Net {
    name: String,
    nodes: u32,
}

impl Net {
    /// For so many agents.
    pub(super) fn new(nodes: u32, mbit: u32) -> anyhow::Result<Net> {
        if !rustix::process::geteuid().is_root() {
            bail!("--link-mbit makes network namespaces, which needs root");
        }
        let net = Net { name: format!("stn{}", std::process::id() % 100_000), nodes };
        let name = &net.name;
        ip(&format!("link add {name} type bridge"))?;
        ip(&format!("addr add 10.77.255.254/16 dev {name}"))?;
        ip(&format!("link set {name} up"))?;
        let rate = format!("{mbit}mbit");
        for k in 0..nodes {
            let (ns, out) = (format!("{name}-{k}"), format!("{name}v{k}"));
            ip(&format!("netns add {ns}"))?;
            ip(&format!("link add {out} type veth peer name eth0 netns {ns}"))?;
            ip(&format!("link set {out} master {name} up"))?;
            let address = crate::agent::netns_address(k);
            ip(&format!("-n {ns} addr add {address}/16 dev eth0"))?;
            ip(&format!("-n {ns} link set eth0 up"))?;
            ip(&format!("-n {ns} link set lo up"))?;
            let bucket = format!("root tbf rate {rate} burst {BURST} latency {LATENCY}");
            tool("tc", &format!("qdisc add dev {out} {bucket}"))?;
            tool("tc", &format!("-n {ns} qdisc add dev eth0 {bucket}"))?;
        }
        Ok(net)
    }

    /// What the namespaces' names begin with.
    pub(super) fn name(&self) -> &str {
        &self.name
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        for k in 0..self.nodes {
            let _best_effort = ip(&format!("netns del {}-{k}", self.name));
        }
        let _best_effort = ip(&format!("link del {}", self.name));
    }
}

fn ip(words: &str) -> anyhow::Result<()> {
    tool("ip", words)
}

fn tool(program: &str, words: &str) -> anyhow::Result<()> {
    let done = Command::new(program)
        .args(words.split_whitespace())
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("{program} (Debian: iproute2) cannot be started"))?;
    if !done.status.success() {
        bail!("{program} {words}: {}", String::from_utf8_lossy(&done.stderr).trim());
    }
    Ok(())
}
