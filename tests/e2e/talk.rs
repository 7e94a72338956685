//! What most scenarios of steering ask: does it get through, and was it captured?

use culvert_tests::{
    client,
    culvert::Culvert,
    flow_log::{Direction, Flow},
    inspect,
    netns::Netns,
    poll,
    topology::Pod,
};
use std::{collections::BTreeSet, net::SocketAddr, time::Duration};

/// How long a node may have no proxy before its peers' proxies give up dialling: they do so for ten seconds, in which the
/// last SYN is sent after seven. An emulated machine may take longer to start a proxy.
pub(crate) const PEER_DIALS: Duration = Duration::from_secs(6);

/// `from` reaches the echoing app at `to`.
#[track_caller]
pub(crate) fn talks(from: &Pod, to: SocketAddr, what: &str) {
    let reply = from.netns.run(|| client::exchange(to, b"hello there"));
    let reply = reply.unwrap_or_else(|e| panic!("{what}: {} -> {to}: {e}", from.name));
    assert_eq!(reply, b"hello there", "{what}: {} -> {to}", from.name);
}

/// The node says that it carried a connection, and without an error, to `to`; `since` is how many it had logged.
#[track_caller]
pub(crate) fn carried(culvert: &Culvert<'_>, since: usize, direction: Direction, to: SocketAddr) {
    let to = to.to_string();
    let wanted = |flow: &Flow| {
        flow.goes(direction)
            && flow.error().is_none()
            && (flow.is("dst.addr", &to) || flow.is("dst.hbone_addr", &to))
    };
    let found =
        poll::within(poll::SOON, || culvert.flows().iter().skip(since).any(wanted).then_some(()));
    assert!(found.is_some(), "{}: nothing carried to {to}: {:#?}", culvert.node(), culvert.flows());
}

/// What a counter of the node stands at.
#[track_caller]
pub(crate) fn count(culvert: &Culvert<'_>, name: &str, labels: &[(&str, &str)]) -> u64 {
    let sum = culvert.metrics().unwrap().sum(name, labels);
    sum.to_string().parse().unwrap_or_else(|e| panic!("{name} is {sum}: {e}"))
}

/// Waits until the pod has the filters of one that is captured, or has none.
#[track_caller]
pub(crate) fn await_filters(netns: &Netns, interface: &str, there: &[&str]) {
    let wanted: BTreeSet<&str> = there.iter().copied().collect();
    poll::until(poll::SOON * 2, &format!("the filters {there:?} on {interface}"), || {
        let filters = inspect::filters(netns, interface).ok()?;
        let ours: BTreeSet<&str> =
            filters.iter().filter(|f| f.is_ours()).map(|f| f.name.as_str()).collect();
        (ours == wanted).then_some(())
    });
}
