//! A service's endpoints, shared between the versions of the mesh that differ in some of them.
//! Choosing among them is left to `route`.

use std::sync::Arc;

use crate::{
    ports::{self, Ports},
    service::Service,
    workload::{Health, Membership, Workload},
};

/// A workload in its role as an endpoint of one of its services.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    workload: Arc<Workload>,
    /// Which of the workload's services: its place in `workload.services`.
    role: usize,
}

impl Endpoint {
    /// The endpoints that `workload` is: one for each of its services, by that service's place.
    pub(crate) fn new(workload: &Arc<Workload>, role: usize) -> Self {
        Self { workload: Arc::clone(workload), role }
    }

    /// The workload.
    pub fn workload(&self) -> &Arc<Workload> {
        &self.workload
    }

    /// Whether it is ready to serve this service.
    pub fn health(&self) -> Health {
        self.membership().and_then(|member| member.health).unwrap_or(self.workload.health)
    }

    /// The port that serves `port` of `service`. `None`: it does not serve it.
    pub fn target_port(&self, service: &Service, port: u16) -> Option<u16> {
        self.workload.target_port(self.ports(), service, port)
    }

    /// Its own target ports, which come before the service's.
    pub fn ports(&self) -> &Ports {
        self.membership().map_or(ports::NONE, |member| &member.ports)
    }

    fn membership(&self) -> Option<&Membership> {
        self.workload.services.get(self.role)
    }
}

/// The endpoints of one service, ordered by uid. Cloning is cheap; a change copies one block and
/// the list of blocks, whatever else shares them.
#[derive(Clone, Debug, Default)]
pub struct Endpoints {
    /// None is empty; ordered within and among each other.
    #[expect(clippy::rc_buffer, reason = "grows in place until a version shares it")]
    blocks: Arc<Vec<Arc<Vec<Endpoint>>>>,
    len: usize,
    /// How many have a capacity of 1.
    plain: usize,
}

impl Endpoints {
    /// How many there are, healthy or not.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = &Endpoint> {
        self.blocks.iter().flat_map(|block| block.iter())
    }

    /// The one that is the workload `uid`.
    pub fn find(&self, uid: &str) -> Option<&Endpoint> {
        let block = self.blocks.get(self.block_of(uid))?;
        block.get(place(block, uid).ok()?)
    }

    /// The one at `index` of the order.
    pub(crate) fn get(&self, mut index: usize) -> Option<&Endpoint> {
        for block in self.blocks.iter() {
            match block.get(index) {
                Some(endpoint) => return Some(endpoint),
                None => index -= block.len(),
            }
        }
        None
    }

    /// Whether all have a capacity of 1, so that chance need not look at each.
    pub(crate) fn are_equal(&self) -> bool {
        self.plain == self.len
    }

    /// Adds `endpoint`, or puts it in the place of the one with its uid.
    pub(crate) fn insert(&mut self, endpoint: Endpoint) {
        let uid = Arc::clone(&endpoint.workload.uid);
        let index = self.block_of(&uid);
        self.plain += usize::from(is_plain(&endpoint));
        let blocks = Arc::make_mut(&mut self.blocks);
        let Some(block) = blocks.get_mut(index) else {
            self.len += 1;
            return blocks.push(Arc::new(vec![endpoint]));
        };
        let block = Arc::make_mut(block);
        match place(block, &uid) {
            Ok(place) => {
                let Some(old) = block.get_mut(place) else { return };
                self.plain -= usize::from(is_plain(old));
                *old = endpoint;
            }
            Err(place) => {
                block.insert(place, endpoint);
                self.len += 1;
                if block.len() > BLOCK {
                    let upper = block.split_off(BLOCK / 2);
                    blocks.insert(index + 1, Arc::new(upper));
                }
            }
        }
    }

    /// Removes the one that is the workload `uid`, if there is one.
    pub(crate) fn remove(&mut self, uid: &str) {
        let index = self.block_of(uid);
        let Some(place) = self.blocks.get(index).and_then(|block| place(block, uid).ok()) else {
            return;
        };
        let blocks = Arc::make_mut(&mut self.blocks);
        let Some(block) = blocks.get_mut(index) else { return };
        let block = Arc::make_mut(block);
        let old = block.remove(place);
        self.len -= 1;
        self.plain -= usize::from(is_plain(&old));
        if block.is_empty() {
            blocks.remove(index);
        }
    }

    /// The block that holds `uid`, or would.
    fn block_of(&self, uid: &str) -> usize {
        let starts_before = |block: &Arc<Vec<Endpoint>>| {
            block.first().is_some_and(|first| *first.workload.uid <= *uid)
        };
        self.blocks.partition_point(starts_before).saturating_sub(1)
    }
}

impl FromIterator<Endpoint> for Endpoints {
    fn from_iter<I: IntoIterator<Item = Endpoint>>(endpoints: I) -> Self {
        let mut new = Self::default();
        for endpoint in endpoints {
            new.insert(endpoint);
        }
        new
    }
}

fn place(block: &[Endpoint], uid: &str) -> Result<usize, usize> {
    block.binary_search_by(|endpoint| (*endpoint.workload.uid).cmp(uid))
}

fn is_plain(endpoint: &Endpoint) -> bool {
    endpoint.workload.capacity == 1
}

/// A change of a service of 10,000 endpoints then copies about as much for its block as for the
/// list of blocks.
const BLOCK: usize = 128;

#[cfg(test)]
mod tests;
