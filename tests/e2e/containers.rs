//! The image and the pod of `deploy`: the Dockerfile's last stage, run with what the manifests give a container and nothing
//! else.

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr},
    path::Path,
    process::Command,
    time::Duration,
};

use culvert_tests::{
    apps::{App, Behaviour},
    ca::Ca,
    chart, client,
    container::{self, Container, Image, Surroundings},
    culvert::{Culvert, Remains, mesh_path, pods_path},
    dns::{self, question},
    http,
    mesh_file::{MeshFile, VIP_V4, VIP_V6, replace},
    poll,
    process::Process,
    topology::{Family, Topology},
};
use hickory_proto::rr::RecordType;
use serde_json::{Value, json};

/// What a container's start may take on a busy machine.
const START: Duration = Duration::from_mins(1);

/// The pod that runs on every node, in a file of manifests.
fn pod(manifests: &str) -> Value {
    let objects = chart::objects(&chart::committed(manifests).unwrap()).unwrap();
    let daemon_set = chart::object(&objects, "DaemonSet", "culvert").unwrap();
    daemon_set["spec"]["template"]["spec"].clone()
}

/// Where the tests' files take the place of the cluster.
fn surroundings(topology: &Topology, ca: &Ca) -> Surroundings<'static> {
    let path = |path: &Path| Some(path.to_string_lossy().into_owned());
    Surroundings {
        variables: vec![
            ("NODE_NAME", Some(topology.a.name.clone())),
            ("CULVERT_KUBERNETES_PODS", None),
            ("CULVERT_PODS", path(&pods_path(&topology.a))),
            ("LOCAL_XDS_PATH", path(&mesh_path(topology))),
            ("CULVERT_CA_DIR", path(ca.dir())),
            ("XDS_ADDRESS", Some(String::new())),
            ("CA_ADDRESS", Some(String::new())),
            ("CONNECTION_TERMINATION_DEADLINE", Some("1s".to_owned())),
        ],
        folders: vec![topology.dir().to_owned()],
    }
}

#[test]
fn the_image_carries_connections_with_what_each_profile_grants() {
    let Some(topology) = Topology::with_culvert() else { return };
    if !container::is_available() {
        return;
    }
    let (a1, b1, x) = (&topology.a1, &topology.b1, &topology.x);
    let build = tempfile::tempdir().unwrap();
    let image = Image::build(build.path()).unwrap();
    let apps = [a1, b1].map(|pod| App::start(&pod.netns, Behaviour::Echo).unwrap());
    let [on_a1, on_b1] = apps.each_ref().map(App::port);
    MeshFile::new(&topology).service(b1, on_b1).write(&mesh_path(&topology)).unwrap();
    let ca = Ca::create(&topology.dir().join("ca")).unwrap();
    let b = Culvert::start(&topology, &topology.b, &[b1], &ca, Remains::Nothing).unwrap();
    // The pod's network is found as that of a process in it, as in a cluster.
    let mut sleep = Command::new("sleep");
    let inside = Process::spawn(&a1.netns, &topology.a.dir, "inside", sleep.arg("1000")).unwrap();
    let pods = json!({"pods": [{
        "name": a1.name, "namespace": a1.namespace, "serviceAccount": a1.service_account,
        "netns": format!("/proc/{}/ns/net", inside.pid()),
    }]});
    replace(&pods_path(&topology.a), &pods.to_string()).unwrap();
    let pins = Path::new("/sys/fs/bpf/culvert").join(&topology.a.name);

    for (manifests, profile) in [("culvert", "privileged"), ("culvert-hardened", "hardened")] {
        let pod = pod(manifests);
        let around = surroundings(&topology, &ca);
        let id = format!("{}-{profile}", topology.a.name);
        let start = |id: &str, arguments: &[&str]| {
            let place = (topology.a.dir.as_path(), id);
            Container::start(&image, place, &topology.a.netns, &pod, &around, arguments).unwrap()
        };
        let mut culvert = start(&id, &[]);
        let ready = poll::within(START, || {
            if let Some(code) = culvert.wait(Duration::ZERO) {
                return Some(Err(code));
            }
            let port = SocketAddr::from((Ipv4Addr::LOCALHOST, 15021));
            let reply = topology.a.netns.run(|| http::request("GET", port, "/healthz/ready"));
            reply.is_ok_and(|reply| reply.status == 200).then_some(Ok(()))
        });
        assert_eq!(ready, Some(Ok(())), "{profile}: {}", culvert.log());
        let pid = culvert.pid().unwrap();

        let granted = container::granted(&pod["containers"][0]).unwrap();
        assert_eq!(container::effective(pid).unwrap(), container::mask(&granted), "{profile}");
        let mounts = fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap();
        let root: Vec<_> =
            mounts.lines().filter(|line| line.split(' ').nth(4) == Some("/")).collect();
        assert!(
            root.iter().all(|line| line.split(' ').nth(5).unwrap().starts_with("ro")),
            "{root:?}"
        );
        // Its own cgroup is beneath the one that the runtime has given it, whose limits go on applying.
        let own = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
        let own = own.lines().find_map(|line| line.strip_prefix("0::")).unwrap();
        assert!(own.starts_with(&format!("/{id}")), "{profile}: cgroup {own}");

        for family in Family::BOTH {
            let there = a1.netns.run(|| client::exchange(b1.at(family, on_b1), b"there"));
            let back = b1.netns.run(|| client::exchange(a1.at(family, on_a1), b"back"));
            let outside = x.netns.run(|| client::exchange(a1.at(family, on_a1), b"outside"));
            for (exchange, want) in [(there, "there"), (back, "back"), (outside, "outside")] {
                assert_eq!(
                    exchange.unwrap_or_else(|e| panic!("{profile} {want} {family:?}: {e}")),
                    want.as_bytes()
                );
            }
            let name = question(
                "ledger.bank.svc.cluster.local.",
                match family {
                    Family::V4 => RecordType::A,
                    Family::V6 => RecordType::AAAA,
                },
            );
            let vip = if family == Family::V4 { VIP_V4 } else { VIP_V6 };
            let vip = vip.parse::<std::net::IpAddr>().unwrap();
            let answer = a1.netns.run(|| dns::ask(x.ip(family), &name)).unwrap();
            assert_eq!(dns::addresses(&answer), [vip], "{profile}");
            let by_tcp = a1.netns.run(|| dns::ask_by_tcp(x.ip(family), &[name])).unwrap();
            assert_eq!(dns::addresses(&by_tcp[0]), [vip], "{profile} by TCP");
        }
        b.flow(profile, |flow| flow.field("src.identity") == Some(a1.identity()));

        culvert.terminate().unwrap();
        assert_eq!(culvert.wait(START), Some(0), "{profile}: {}", culvert.log());
        assert!(pins.is_dir(), "{profile}: nothing holds the pod while culvert is down");
        let id = format!("{id}-cleanup");
        let mut cleanup = start(&id, &["cleanup"]);
        assert_eq!(cleanup.wait(START), Some(0), "{profile}: {}", cleanup.log());
        assert!(!pins.exists(), "{profile}: {} is left", pins.display());
        let plain = x.netns.run(|| client::exchange(a1.at(Family::V4, on_a1), b"plain"));
        assert_eq!(plain.unwrap(), b"plain", "{profile}");
    }
}
