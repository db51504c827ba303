//! Which descriptor of the tree answers which requests, as the reference looks them up.
//!
//! The reference takes a request's entries in turn. At each it looks among the children of where it stands: first for the
//! very value, then for the values with a `*` in the order of the file, then for the key without a value. It never turns
//! back: where an entry finds nothing, nothing limits the request, whatever another child would have had. What limits the
//! request is the descriptor at which its last entry arrives.
//!
//! A rule looks at all requests that fit its own path, and knows nothing of siblings. [`routes`] walks the tree for all
//! requests that fit one descriptor's path at once, and says where they arrive: at the descriptor itself, or, those whose
//! values are better met by a sibling on the way, elsewhere or nowhere.

use super::tree::{Tree, Wanted};

/// Some of the requests that fit a path, and where they arrive.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Route {
    /// The descriptor; `None` where the reference has none for them.
    pub(super) end: Option<usize>,
    /// Which requests: of each entry's value. It may be more than those that arrive, as what a sibling took before is not
    /// cut out of it.
    pub(super) values: Vec<Wanted>,
    /// The sibling that first leads them off the path; `None` where they stay on it.
    pub(super) by: Option<usize>,
}

/// Where the requests that fit a descriptor's path arrive.
pub(super) fn routes(tree: &Tree, node: usize) -> Vec<Route> {
    let mut walk = Walk { tree, path: tree.path(node), values: Vec::new(), found: Vec::new() };
    walk.descend(None, None);
    walk.found
}

/// Children in the order in which the reference prefers them.
pub(super) fn by_precedence(tree: &Tree, children: &[usize]) -> Vec<usize> {
    let mut children = children.to_vec();
    children.sort_by_key(|&child| match tree.nodes[child].wanted {
        Wanted::Exact(_) => 0,
        Wanted::Prefix(_) => 1,
        Wanted::Any => 2,
    });
    children
}

struct Walk<'t> {
    tree: &'t Tree,
    path: Vec<usize>,
    /// Of each entry so far.
    values: Vec<Wanted>,
    found: Vec<Route>,
}

impl Walk<'_> {
    /// Goes on from a descriptor, or from the domain, with the next entry.
    fn descend(&mut self, from: Option<usize>, by: Option<usize>) {
        let level = self.values.len();
        let Some(&own) = self.path.get(level) else {
            self.found.push(Route { end: from, values: self.values.clone(), by });
            return;
        };
        let tree = self.tree;
        let Some(wanted) = by.is_none().then_some(own).filter(|_| matches!(tree.nodes[own].wanted, Wanted::Exact(_)))
        else {
            return self.choose(from, own, by);
        };
        // Nothing is preferred to the very value.
        self.step(wanted, tree.nodes[wanted].wanted.clone(), None);
    }

    /// Splits the requests by which child they take.
    fn choose(&mut self, from: Option<usize>, own: usize, by: Option<usize>) {
        let tree = self.tree;
        let (key, wanted) = (&tree.nodes[own].key, &tree.nodes[own].wanted);
        let children = from.map_or(&tree.roots, |from| &tree.nodes[from].children);
        let children: Vec<usize> = children.iter().copied().filter(|&child| tree.nodes[child].key == *key).collect();
        let mut taken: Vec<&str> = Vec::new();
        for child in by_precedence(tree, &children) {
            let theirs = &tree.nodes[child].wanted;
            if let Wanted::Prefix(prefix) = theirs {
                // A shorter prefix that comes first leaves it nothing.
                if taken.iter().any(|earlier| prefix.starts_with(earlier)) {
                    continue;
                }
                taken.push(prefix);
            }
            let Some(both) = wanted.and(theirs) else {
                continue;
            };
            let all = both == *wanted;
            let by = by.or_else(|| (child != own).then_some(child));
            self.step(child, both, by);
            if all {
                return;
            }
        }
        // No child, and so no limit: it is the last step that leads off the path, if none did before.
        self.values.push(wanted.clone());
        let rest = self.path[self.values.len()..].iter().map(|&level| tree.nodes[level].wanted.clone());
        let values = self.values.iter().cloned().chain(rest).collect();
        self.found.push(Route { end: None, values, by });
        self.values.pop();
    }

    fn step(&mut self, child: usize, value: Wanted, by: Option<usize>) {
        self.values.push(value);
        self.descend(Some(child), by);
        self.values.pop();
    }
}

impl Wanted {
    /// What fits both; `None` where nothing does.
    pub(super) fn and(&self, other: &Self) -> Option<Self> {
        match (self, other) {
            (Self::Any, one) | (one, Self::Any) => Some(one.clone()),
            (Self::Exact(one), Self::Exact(other)) => (one == other).then(|| self.clone()),
            (exact @ Self::Exact(value), Self::Prefix(prefix)) | (Self::Prefix(prefix), exact @ Self::Exact(value)) => {
                value.starts_with(prefix).then(|| exact.clone())
            }
            (Self::Prefix(one), Self::Prefix(other)) => {
                let longer = if one.len() >= other.len() { self } else { &Self::Prefix(other.clone()) };
                (one.starts_with(other.as_str()) || other.starts_with(one.as_str())).then(|| longer.clone())
            }
        }
    }
}
