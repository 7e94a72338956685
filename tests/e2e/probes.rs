//! kubelet's probes reach a pod that its policies close, and nobody else does.

use std::{
    net::SocketAddr,
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use culvert_tests::{
    apps::{App, Behaviour},
    cgroup::Cgroup,
    client,
    culvert::{Mesh, Remains},
    mesh_file::{Action, MeshFile, Policy},
    netns::Netns,
    poll,
    process::finish,
    require,
    topology::{Family, Topology},
};

const LIMIT: Duration = Duration::from_secs(5);

/// Connects from a process of the cgroup and says whether the application answered.
fn probe(netns: &Netns, cgroup: &Path, to: SocketAddr) -> bool {
    let script = r#"echo $$ > "$0/cgroup.procs" && exec 3<>"/dev/tcp/$1/$2" && echo ready >&3 && read -t 2 -r said <&3 &&
        [ "$said" = ready ]"#;
    let mut command = Command::new("bash");
    command.args(["-c", script]).arg(cgroup);
    command.args([to.ip().to_string(), to.port().to_string()]);
    finish(netns, &mut command, LIMIT).unwrap().code == 0
}

/// A process in a namespace and a cgroup, until it is dropped.
struct Resident(Child);

impl Resident {
    fn start(netns: &Netns, cgroup: &Path) -> Self {
        let script = r#"echo $$ > "$0/cgroup.procs" && echo there && exec sleep 60"#;
        let mut command = Command::new("bash");
        command.args(["-c", script]).arg(cgroup).stdout(Stdio::piped());
        let mut child = netns.run(|| command.spawn()).unwrap();
        let mut said = [0; 6];
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut said).unwrap();
        Self(child)
    }
}

impl Drop for Resident {
    fn drop(&mut self) {
        self.0.kill().and_then(|()| self.0.wait()).unwrap();
    }
}

/// A mesh in which nobody may connect to the pods of a1's namespace.
fn closed_mesh<'t>(topology: &'t Topology, remains: Remains, kubelet: &Path) -> Mesh<'t> {
    let policy = Policy::new("closed", "shop", Action::Deny).port(PORT);
    let file = MeshFile::new(topology).policy(&policy);
    let more = ["--probe-cgroup", kubelet.to_str().unwrap()];
    Mesh::start_with(topology, &file, remains, &more).unwrap()
}

const PORT: u16 = 8080;

fn topology() -> Option<Topology> {
    if require::tool("bash", &["--version"]) { Topology::with_culvert() } else { None }
}

#[test]
fn a_probe_reaches_a_pod_that_is_closed_to_everybody_else() {
    let Some(topology) = topology() else { return };
    let kubelet = Cgroup::create(&topology.a.name, "kubelet").unwrap();
    let other = Cgroup::create(&topology.a.name, "other").unwrap();
    let mut mesh = closed_mesh(&topology, Remains::Pins, kubelet.path());
    let (a1, a2, x, node) = (&topology.a1, &topology.a2, &topology.x, &topology.a.netns);
    let app = App::start_on(&a1.netns, PORT, Behaviour::Echo).unwrap();

    for family in Family::BOTH {
        let to = a1.at(family, PORT);
        assert!(probe(node, kubelet.path(), to), "{to}: kubelet");
        assert!(!probe(node, other.path(), to), "{to}: another process of the node");
        for pod in [a2, x] {
            for mark in [0, 0x111, 0x53a] {
                let dial = || client::dial_prepared(to, |socket| socket.set_mark(mark));
                let reply = pod.netns.run(|| client::ping(&mut dial()?, b"ready"));
                assert!(reply.is_err(), "{to}: {}, marked {mark:#x}", pod.name);
            }
        }
    }
    assert_eq!(app.seen().len(), 2);
    let counted = |outcome| {
        let labels = [("program", "mark_probe"), ("outcome", outcome)];
        mesh.a.metrics().unwrap().sum("culvert_bpf_outcomes_total", &labels)
    };
    assert!((counted("exempted") - 2.0).abs() < f64::EPSILON);
    poll::until(poll::SOON, "the exemptions to be released", || {
        ((counted("released") - 2.0).abs() < f64::EPSILON).then_some(())
    });

    // The pod is as ready as before.
    mesh.a.kill();
    for family in Family::BOTH {
        let to = a1.at(family, PORT);
        assert!(probe(node, kubelet.path(), to), "{to}: kubelet, while no proxy runs");
    }
    mesh.a.set_flag("--probe-cgroup", "off");
    mesh.a.launch().unwrap();
    mesh.a.wait_ready().unwrap();
    assert!(!probe(node, kubelet.path(), a1.at(Family::V4, PORT)), "turned off");
}

#[test]
fn a_cgroup_with_pods_beneath_is_not_taken_for_kubelets() {
    let Some(topology) = topology() else { return };
    let kubelet = Cgroup::create(&topology.a.name, "kubelet").unwrap();
    let _pods = kubelet.child("kubepods").unwrap();
    let mesh = closed_mesh(&topology, Remains::Nothing, kubelet.path());
    let a1 = &topology.a1;
    let _app = App::start_on(&a1.netns, PORT, Behaviour::Echo).unwrap();
    for family in Family::BOTH {
        assert!(!probe(&topology.a.netns, kubelet.path(), a1.at(family, PORT)), "{family:?}");
    }
    assert!(mesh.a.log().contains("not taken for kubelet's cgroup"));
}

#[test]
fn a_cgroup_is_distrusted_once_a_pod_with_a_process_in_it_is_enrolled() {
    let Some(topology) = topology() else { return };
    let kubelet = Cgroup::create(&topology.a.name, "kubelet").unwrap();
    let inner = kubelet.child("inner").unwrap();
    let a2 = &topology.a2;
    let resident = Resident::start(&a2.netns, inner.path());
    let mesh = closed_mesh(&topology, Remains::Nothing, kubelet.path());
    let a1 = &topology.a1;
    let _app = App::start_on(&a1.netns, PORT, Behaviour::Echo).unwrap();
    for family in Family::BOTH {
        let to = a1.at(family, PORT);
        assert!(!probe(&a2.netns, inner.path(), to), "{family:?}: the pod");
        assert!(!probe(&topology.a.netns, kubelet.path(), to), "{family:?}: the node");
    }
    assert!(mesh.a.log().contains("taken for kubelet's cgroup no more"));
    drop(resident);
}
