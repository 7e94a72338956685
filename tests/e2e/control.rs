//! A node that has its mesh from a control plane: before, without and after it.

use culvert_tests::{
    apps::{App, Behaviour},
    ca::Ca,
    client,
    control_plane::{ControlPlane, NAME, Records},
    culvert::{Culvert, Remains, mesh_path},
    flow_log::Direction,
    load::Load,
    mesh_file::MeshFile,
    poll,
    topology::{Family, Topology},
};

use crate::talk::{carried, talks};

/// Where istiod listens.
const PORT: u16 = 15012;

#[test]
fn connections_go_on_without_the_control_plane_and_a_new_one_is_heard() {
    let Some(topology) = Topology::with_culvert() else { return };
    let ca = Ca::create(&topology.dir().join("ca")).unwrap();
    let (a1, a2, b1) = (&topology.a1, &topology.a2, &topology.b1);
    let records = || Records::default().pod(a1, &topology.a).pod(b1, &topology.b);
    let start = |records| ControlPlane::start(&topology.a.netns, PORT, &ca, records).unwrap();

    MeshFile::new(&topology).write(&mesh_path(&topology)).unwrap();
    let on_b = [b1];
    let _b = Culvert::start(&topology, &topology.b, &on_b, &ca, Remains::Nothing).unwrap();
    let plane = start(records().pod(a2, &topology.a));
    let root = ca.dir().join("ca.pem");
    let to_plane = [
        "--mesh",
        "",
        "--xds-address",
        "https://127.0.0.1:15012",
        "--xds-root",
        &root.to_string_lossy(),
        "--alt-xds-hostname",
        NAME,
    ];
    let on_a = [a1, a2];
    let a = Culvert::start_with(&topology, &topology.a, &on_a, &ca, Remains::Nothing, &to_plane)
        .unwrap();
    let app = App::start(&b1.netns, Behaviour::Echo).unwrap();
    let to = b1.at(Family::V4, app.port());
    talks(a1, to, "with a control plane");
    carried(&a, 0, Direction::Outbound, to);
    assert!(a.flows().iter().any(|flow| flow.is("dst.hbone_addr", &to.to_string())));

    let mut open = a1.netns.run(|| client::dial(to)).unwrap();
    assert_eq!(client::ping(&mut open, b"before").unwrap(), b"before");
    let load = Load::start(&a1.netns, &[to], 4);
    drop(plane);
    let terminated = || {
        let metrics = a.metrics().ok()?;
        (metrics.sum("istio_xds_connection_terminations_total", &[]) >= 2.0).then_some(())
    };
    poll::until(poll::SOON, "the node sees that the control plane is gone", terminated);
    talks(a1, to, "without a control plane");
    assert_eq!(client::ping(&mut open, b"without").unwrap(), b"without");

    // Meanwhile somebody decided about the callers from b.
    let app_on_a = App::start(&a1.netns, Behaviour::Echo).unwrap();
    let to_a1 = a1.at(Family::V4, app_on_a.port());
    talks(b1, to_a1, "before the policy");
    let plane = start(records().deny(a1.namespace, b1));
    poll::until(poll::SOON * 2, "the new state decides", || {
        let reply = b1.netns.run(|| client::exchange(to_a1, b"denied?"));
        (!reply.is_ok_and(|reply| reply == b"denied?")).then_some(())
    });
    assert_eq!(client::ping(&mut open, b"after").unwrap(), b"after");
    let tally = load.stop();
    assert_eq!((tally.failed(), tally.done > 0), (0, true), "{tally:?}");

    plane.set(records());
    poll::until(poll::SOON * 2, "the policy is gone", || {
        let reply = b1.netns.run(|| client::exchange(to_a1, b"allowed"));
        reply.is_ok_and(|reply| reply == b"allowed").then_some(())
    });
}
