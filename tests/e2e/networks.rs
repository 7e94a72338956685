//! Two networks: a service of the other one is reached by a tunnel within a tunnel to its gateway, which is nothing of
//! ours and sees no plaintext.

use culvert_tests::{
    apps::{App, Behaviour},
    ca::Ca,
    client,
    culvert::Remains,
    culvert::{Culvert, mesh_path},
    flow_log::Direction,
    mesh_file::{MeshFile, Protocol, VIP_V4, VIP_V6},
    poll,
    tap::HBONE_PORT,
    topology::{Family, Topology},
};
use serde_json::json;

use crate::{
    endpoints::vip,
    third_party::{Nghttpx, have_nghttpx},
};

const CONNECTIONS: usize = 10;

#[test]
fn a_service_of_another_network_is_reached_through_its_gateway() {
    if !have_nghttpx() {
        return;
    }
    let Some(topology) = Topology::with_culvert() else { return };
    let (a1, a2, b1, x) = (&topology.a1, &topology.a2, &topology.b1, &topology.x);
    let app = App::start(&b1.netns, Behaviour::Echo).unwrap();
    let vips = ["near", "far"]
        .map(|network| [VIP_V4, VIP_V6].map(|vip| format!("{network}/{vip}")))
        .concat();
    let gateway = json!({ "destination": format!("far/{}", x.ip(Family::V4)) });
    let mut file = MeshFile::new(&topology)
        .workload(x, &topology.b, Protocol::Hbone)
        .service(b1, app.port())
        .service_field("vips", json!(vips))
        .field(b1, "networkGateway", gateway);
    for (pod, network) in [(a1, "near"), (a2, "near"), (b1, "far"), (x, "far")] {
        file = file.field(pod, "network", json!(network));
    }
    file.write(&mesh_path(&topology)).unwrap();
    let ca = Ca::create(&topology.dir().join("ca")).unwrap();
    let start = |node, pods: &[_], network| {
        let more = ["--network", network];
        Culvert::start_with(&topology, node, pods, &ca, Remains::Nothing, &more).unwrap()
    };
    let near = start(&topology.a, &[a1, a2], "near");
    let far = start(&topology.b, &[b1], "far");
    let gateway = Nghttpx::start(&topology, &ca, x, Some(b1.at(Family::V4, HBONE_PORT)));

    for family in Family::BOTH {
        for number in 0..CONNECTIONS {
            let reply = a1.netns.run(|| client::exchange(vip(family), b"to the other network"));
            let reply = reply.unwrap_or_else(|e| {
                panic!("{family:?} {number}: {e} {:#?} {}", near.flows(), gateway.process.log())
            });
            assert_eq!(reply, b"to the other network");
        }
    }
    // The gateway was asked for few tunnels, and both ends of what was within them know each other.
    let tunnels = gateway.onward.seen().len();
    assert!((1..=4).contains(&tunnels), "{tunnels} tunnels for {} connections", 2 * CONNECTIONS);
    let ends = Some((a1.identity(), b1.identity()));
    for (culvert, direction) in [(&near, Direction::Outbound), (&far, Direction::Inbound)] {
        poll::until(poll::SOON, "both ends to log all connections", || {
            let flows = culvert.flows();
            let of_ends = flows
                .iter()
                .filter(|flow| flow.goes(direction) && flow.error().is_none())
                .filter(|flow| flow.is("dst.hbone_addr", "ledger.bank.svc.cluster.local:80"))
                .filter(|flow| flow.identities() == ends);
            (of_ends.count() == 2 * CONNECTIONS).then_some(())
        });
    }
}
