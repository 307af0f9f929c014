//! The k-ary tree of a job's agents, by their order in the plan.

use stanchion_format::ids::AgentId;

/// The tree as one agent sees it: who is above and below it. Agents that host no slot are not in it.
#[derive(Clone, Debug, Default)]
pub struct Tree {
    root: Option<AgentId>,
    me: Option<usize>,
    parent: Option<AgentId>,
    children: Vec<AgentId>,
}

impl Tree {
    /// The tree over the agents that host `slots`, in the order of their first slots.
    pub fn new(slots: &[AgentId], fanout: u32, me: AgentId) -> Tree {
        let members = members(slots);
        let place = members.iter().position(|a| *a == me);
        let fanout = fanout.max(2) as usize;
        let Some(place) = place else {
            return Tree { root: members.first().copied(), ..Tree::default() };
        };
        let first = (place * fanout + 1).min(members.len());
        Tree {
            root: members.first().copied(),
            me: Some(place),
            parent: place.checked_sub(1).map(|before| members[before / fanout]),
            children: members[first..(first + fanout).min(members.len())].to_vec(),
        }
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
        self.root
    }

    /// My parent, unless I am the root or not in it.
    pub fn parent(&self) -> Option<AgentId> {
        self.parent
    }

    /// My children.
    pub fn children(&self) -> &[AgentId] {
        &self.children
    }
}

/// Each agent once, in the order of first slots. Sorting takes little: slots are in order but where spares took over.
fn members(slots: &[AgentId]) -> Vec<AgentId> {
    let mut first: Vec<(AgentId, u32)> = slots.iter().copied().zip(0..).collect();
    first.sort();
    first.dedup_by_key(|(agent, _)| *agent);
    first.sort_by_key(|(_, slot)| *slot);
    first.into_iter().map(|(agent, _)| agent).collect()
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
