//! The k-ary tree of a job's agents, by their order in the plan.

use stanchion_format::ids::AgentId;

/// The tree as one agent sees it. Agents that host no slot are not in it.
#[derive(Clone, Debug, Default)]
pub struct Tree {
    members: Vec<AgentId>,
    me: Option<usize>,
    fanout: usize,
}

impl Tree {
    /// The tree over the agents that host `slots`, in the order of their first slots.
    pub fn new(slots: &[AgentId], fanout: u32, me: AgentId) -> Tree {
        let mut members: Vec<AgentId> = Vec::new();
        let mut seen = std::collections::BTreeSet::new();
        for agent in slots {
            if seen.insert(*agent) {
                members.push(*agent);
            }
        }
        let place = members.iter().position(|a| *a == me);
        Tree { members, me: place, fanout: fanout.max(2) as usize }
    }

    /// Am I in it?
    pub fn is_member(&self) -> bool {
        self.me.is_some()
    }

    /// Am I its root?
    pub fn is_root(&self) -> bool {
        self.me == Some(0)
    }

    /// The root, if there are members.
    pub fn root(&self) -> Option<AgentId> {
        self.members.first().copied()
    }

    /// My parent, unless I am the root or not in it.
    pub fn parent(&self) -> Option<AgentId> {
        self.me.filter(|me| *me > 0).map(|me| self.members[(me - 1) / self.fanout])
    }

    /// My children.
    pub fn children(&self) -> &[AgentId] {
        let Some(me) = self.me else { return &[] };
        let len = self.members.len();
        let first = (me * self.fanout + 1).min(len);
        &self.members[first..(first + self.fanout).min(len)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_member_but_the_root_has_the_parent_that_has_it_as_child() {
        for n in 1..40u32 {
            for fanout in 2..5 {
                let slots: Vec<AgentId> = (0..n).map(AgentId).collect();
                for me in &slots {
                    let tree = Tree::new(&slots, fanout, *me);
                    match tree.parent() {
                        None => assert!(tree.is_root()),
                        Some(parent) => {
                            assert!(Tree::new(&slots, fanout, parent).children().contains(me))
                        }
                    }
                }
            }
        }
    }
}
