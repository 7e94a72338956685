//! Port translations: which port of a workload serves a port of a service.

/// Service ports and their target ports, ordered by service port, each once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ports(Vec<(u16, u16)>);

impl Ports {
    /// The target of service port `port`. `None`: it is not among these. 0: left to others.
    pub fn get(&self, port: u16) -> Option<u16> {
        let found = self.0.binary_search_by_key(&port, |(service, _)| *service).ok()?;
        self.0.get(found).map(|(_, target)| *target)
    }

    /// Whether service port `port` is among these.
    pub fn contains(&self, port: u16) -> bool {
        self.get(port).is_some()
    }

    /// Service port and target port of each.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (u16, u16)> {
        self.0.iter().copied()
    }
}

/// Those of a workload that translates none by itself.
pub(crate) static NONE: &Ports = &Ports(Vec::new());

/// Of equal service ports the last one counts.
impl FromIterator<(u16, u16)> for Ports {
    fn from_iter<I: IntoIterator<Item = (u16, u16)>>(ports: I) -> Self {
        let mut ports: Vec<_> = ports.into_iter().collect();
        // Stable, so that of equals the first after reversing is the last that was given.
        ports.reverse();
        ports.sort_by_key(|(service, _)| *service);
        ports.dedup_by_key(|(service, _)| *service);
        ports.shrink_to_fit();
        Self(ports)
    }
}

impl<const N: usize> From<[(u16, u16); N]> for Ports {
    fn from(ports: [(u16, u16); N]) -> Self {
        ports.into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_ordered_and_the_last_of_equals_counts() {
        let ports = Ports::from([(443, 1), (80, 2), (443, 3), (80, 0)]);
        assert!(ports.iter().eq([(80, 0), (443, 3)]));
        assert_eq!((ports.get(443), ports.get(80), ports.get(81)), (Some(3), Some(0), None));
        assert!(ports.contains(80) && !ports.contains(81));
    }
}
