//! culvert's own control plane: what changes in its files reaches the nodes, and what happens to it reaches nobody.

use std::process::Command;

use culvert_tests::{
    apps::{App, Behaviour},
    ca::Ca,
    client,
    culvert::{self, Culvert, Mesh, Remains, mesh_path},
    flow_log::Direction,
    load::Load,
    mesh_file::{Action, MeshFile, Policy},
    plane::Plane,
    poll,
    process::finish,
    topology::{Family, Node, Pod, Topology},
};

use crate::talk::{carried, talks};

/// The pod as Kubernetes would describe it.
fn object(pod: &Pod, node: &Node) -> String {
    let (v4, v6) = (pod.ip(Family::V4), pod.ip(Family::V6));
    format!(
        "---\napiVersion: v1\nkind: Pod\nmetadata:\n  name: {}\n  namespace: {}\n  labels: {{istio.io/dataplane-mode: ambient, app: {}}}\n\
         spec: {{nodeName: {}, serviceAccountName: {}}}\nstatus: {{phase: Running, podIPs: [{{ip: {v4}}}, {{ip: '{v6}'}}]}}\n",
        pod.name, pod.namespace, pod.name, node.name, pod.service_account,
    )
}

#[test]
fn pods_services_and_policies_as_kubernetes_writes_them_make_a_mesh() {
    let Some(topology) = Topology::with_culvert() else { return };
    let (a1, a2, b1) = (&topology.a1, &topology.a2, &topology.b1);
    let ca = Ca::create(&topology.dir().join("ca")).unwrap();
    let plane = Plane::start(&topology, &ca).unwrap();
    plane.set("a.yaml", &(object(a1, &topology.a) + &object(a2, &topology.a))).unwrap();
    let on_a = [a1, a2];
    let a = Culvert::start_on(&plane, &topology.a, &on_a, Remains::Nothing, &[]).unwrap();
    let b = Culvert::start_on(&plane, &topology.b, &[b1], Remains::Nothing, &[]).unwrap();
    let app = App::start(&b1.netns, Behaviour::Echo).unwrap();
    let direct = b1.at(Family::V4, app.port());

    // Nobody knows b1 yet.
    plane.set("b.yaml", &object(b1, &topology.b)).unwrap();
    poll::until(poll::SOON * 2, "the pod is known on both nodes", || {
        let reply = a1.netns.run(|| client::exchange(direct, b"hello"));
        (reply.is_ok_and(|reply| reply == b"hello")
            && a.flows().iter().any(|flow| flow.is("dst.hbone_addr", &direct.to_string())))
        .then_some(())
    });

    let vip = "10.96.0.77:80".parse().unwrap();
    let service = format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{name: ledger, namespace: {}}}\n\
         spec: {{clusterIP: 10.96.0.77, selector: {{app: {}}}, ports: [{{port: 80, targetPort: {}}}]}}\n",
        b1.namespace,
        b1.name,
        app.port(),
    );
    plane.set("service.yaml", &service).unwrap();
    poll::until(poll::SOON * 2, "the service is known", || {
        let reply = a2.netns.run(|| client::exchange(vip, b"hello"));
        reply.is_ok_and(|reply| reply == b"hello").then_some(())
    });

    let policy = format!(
        "apiVersion: security.istio.io/v1\nkind: AuthorizationPolicy\nmetadata: {{name: no-cart, namespace: {}}}\n\
         spec: {{action: DENY, rules: [{{from: [{{source: {{principals: [{}]}}}}]}}]}}\n",
        b1.namespace,
        a2.identity().trim_start_matches("spiffe://"),
    );
    plane.set("policy.yaml", &policy).unwrap();
    poll::until(poll::SOON * 2, "the policy decides", || {
        a2.netns.run(|| client::exchange(vip, b"hello")).is_err().then_some(())
    });
    talks(a1, vip, "whom the policy does not name");

    // A mistake in the policy leaves it in force.
    plane.set("policy.yaml", &policy.replace("principals", "princpals")).unwrap();
    poll::until(poll::SOON, "the mistake is reported", || {
        let log = plane.log();
        let mut lines = log.lines();
        lines.find(|line| line.contains("policy.yaml") && line.contains("princpals")).map(drop)
    });
    assert!(a2.netns.run(|| client::exchange(vip, b"hello")).is_err(), "the policy is gone");
    talks(a1, vip, "whom the policy does not name");
    assert!(b.metrics().unwrap().sum("istio_tcp_connections_opened_total", &[]) > 0.0);
    let pushes = plane.metrics().unwrap();
    assert!(pushes.sum("pilot_xds_pushes", &[("type", "wds")]) >= 2.0);
    assert!((pushes.sum("pilot_xds", &[]) - 2.0).abs() < 0.5, "two nodes are connected");
}

#[test]
fn a_node_gets_no_identity_that_does_not_run_on_it() {
    let Some(topology) = Topology::with_culvert() else { return };
    let mut mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    poll::until(poll::SOON, "the certificate of b1", || {
        let issued = mesh.plane.as_ref()?.issued();
        issued.contains(&topology.b1.identity()).then_some(())
    });
    // It gives b1 up.
    mesh.b.terminate(poll::SOON).unwrap();
    let plane = mesh.plane.as_ref().unwrap();
    // Node a is told to enrol a pod that, for all the mesh knows, is on node b.
    mesh.a.set_pods(&[&topology.a1, &topology.b1]).unwrap();
    let refused = poll::within(poll::SOON * 2, || {
        let log = plane.log();
        let mut lines = log.lines();
        let found = lines.find(|line| {
            line.contains("certificate refused")
                && line.contains(&topology.b1.identity())
                && line.contains(&topology.a.name)
        })?;
        Some(found.to_owned())
    });
    let refused = refused.unwrap_or_else(|| panic!("no refusal in:\n{}", plane.log()));
    assert!(refused.contains("does not run on"), "{refused}");
    let caller = format!("node {}", topology.a.name);
    let record = plane.issued();
    let got = |line: &str| line.contains(&caller) && line.contains(&topology.b1.identity());
    assert!(!record.lines().any(got), "{record}");
    for node in [&topology.a, &topology.b] {
        let token = format!("token-of-{}", node.name);
        assert!(!plane.log().contains(&token) && !record.contains(&token), "a token is shown");
    }
}

#[test]
fn connections_go_on_while_the_control_plane_is_killed_and_comes_back() {
    let Some(topology) = Topology::with_culvert() else { return };
    let (a1, a2, b1) = (&topology.a1, &topology.a2, &topology.b1);
    let file = MeshFile::new(&topology);
    let mut mesh = Mesh::start(&topology, &file, Remains::Nothing).unwrap();
    let app = App::start(&b1.netns, Behaviour::Echo).unwrap();
    let to = b1.at(Family::V4, app.port());
    talks(a1, to, "before");
    talks(a2, to, "before");
    let mut open = a1.netns.run(|| client::dial(to)).unwrap();
    let load = Load::start(&a1.netns, &[to], 4);

    let plane = mesh.plane.as_mut().unwrap();
    plane.kill();
    let cut = || {
        let metrics = mesh.a.metrics().ok()?;
        (metrics.sum("istio_xds_connection_terminations_total", &[]) > 0.0).then_some(())
    };
    poll::until(poll::SOON, "the node has lost its control plane", cut);
    talks(a2, to, "without a control plane");
    assert_eq!(client::ping(&mut open, b"without").unwrap(), b"without");

    // What is decided meanwhile is heard once it is back.
    let deny = Policy::new("no-cart", b1.namespace, Action::Deny).principal(&a2.identity());
    file.policy(&deny).write(&mesh_path(&topology)).unwrap();
    plane.launch().unwrap();
    plane.wait_ready().unwrap();
    poll::until(poll::SOON * 4, "the new policy decides", || {
        a2.netns.run(|| client::exchange(to, b"denied?")).is_err().then_some(())
    });
    assert_eq!(client::ping(&mut open, b"after").unwrap(), b"after");
    let tally = load.stop();
    assert_eq!((tally.failed(), tally.done > 0), (0, true), "{tally:?}");
    carried(&mesh.a, 0, Direction::Outbound, to);
    let pushed = mesh.plane.as_ref().unwrap().metrics().unwrap();
    let resources = pushed.sum("pilot_xds_config_size_bytes_sum", &[("type", "wds")]);
    assert!(resources < 200.0, "nodes are told again what they know: {resources} bytes");
}

#[test]
fn a_control_plane_that_cannot_start_says_why_in_one_line() {
    let Some(topology) = Topology::with_culvert() else { return };
    let ca = topology.dir().join("ca");
    let run = |arguments: &[&str]| {
        let mut command = Command::new(culvert::binary().unwrap());
        command.arg("controlplane").args(arguments).args(["--ca-dir", &ca.to_string_lossy()]);
        finish(&topology.a.netns, &mut command, poll::SOON * 3).unwrap()
    };
    let tokens = topology.dir().join("none.yaml").to_string_lossy().into_owned();
    let bad = topology.dir().join("mesh/policy.yaml");
    let config = topology.dir().join("mesh").to_string_lossy().into_owned();
    for (arguments, want) in [
        (vec!["--config", "/nowhere", "--node-tokens", &tokens], "read /nowhere"),
        (vec!["--config", &config], "no node can prove who it is"),
        (vec!["--config", &config, "--node-tokens", &tokens], "read the nodes' tokens"),
    ] {
        let finished = run(&arguments);
        assert_eq!(finished.code, 2, "{finished:?}");
        assert_eq!(finished.stderr.lines().count(), 1, "{}", finished.stderr);
        assert!(finished.stderr.contains(want), "{}", finished.stderr);
    }
    std::fs::write(&bad, "apiVersion: security.istio.io/v1\nkind: PeerAuthentication\nmetadata: {name: p}\nspec: {mtls: {mode: STRIC}}\n").unwrap();
    let finished = run(&["--config", &config, "--node-tokens", &tokens]);
    assert_eq!(finished.code, 2, "{finished:?}");
    assert!(
        finished
            .stderr
            .contains("policy.yaml:1: document 1: PeerAuthentication default/p: spec.mtls.mode"),
        "{}",
        finished.stderr
    );
}
