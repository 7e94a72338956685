//! What culvert cannot run with: exit code 2, one line on standard error that names it, and nothing left behind.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use culvert_tests::{
    apps::{App, Behaviour},
    ca::Ca,
    culvert::{self, Culvert, ENVIRONMENT, Mesh, Remains},
    mesh_file::MeshFile,
    poll,
    process::finish,
    require,
    topology::{Family, Node, Topology},
};

/// Everything in order for node a; each scenario breaks one thing.
struct Scene {
    topology: Topology,
    ca: Ca,
}

impl Scene {
    fn build() -> Option<Self> {
        let topology = Topology::with_culvert()?;
        let ca = Ca::create(&topology.dir().join("ca")).unwrap();
        MeshFile::new(&topology).write(&culvert::mesh_path(&topology)).unwrap();
        culvert::write_pods(&topology.a, &[&topology.a1, &topology.a2]).unwrap();
        Some(Self { topology, ca })
    }

    fn pods_file(&self) -> PathBuf {
        culvert::pods_path(&self.topology.a)
    }

    fn mesh_file(&self) -> PathBuf {
        culvert::mesh_path(&self.topology)
    }

    /// Runs culvert behind `wrapper` and wants it refused with one line that has every one of `parts`.
    #[track_caller]
    fn refused_behind(&self, wrapper: &[&str], parts: &[&str]) {
        let node = &self.topology.a;
        let arguments = culvert::arguments(node, &self.mesh_file(), self.ca.dir());
        let binary = culvert::binary().unwrap();
        let mut command = match wrapper {
            [] => Command::new(&binary),
            [program, options @ ..] => {
                let mut command = Command::new(program);
                command.args(options).arg(&binary);
                command
            }
        };
        command.args(arguments).envs(ENVIRONMENT);
        let finished = finish(&node.netns, &mut command, poll::SOON).unwrap();
        assert_eq!(finished.code, 2, "{finished:?}");
        assert_eq!(finished.stderr.lines().count(), 1, "{}", finished.stderr);
        for part in parts {
            assert!(finished.stderr.contains(part), "{part:?} is not in: {}", finished.stderr);
        }
        assert_eq!(pins(node), Vec::<PathBuf>::new());
    }

    #[track_caller]
    fn refused(&self, parts: &[&str]) {
        self.refused_behind(&[], parts);
    }
}

/// Pinned objects of the node; folders do not count.
fn pins(node: &Node) -> Vec<PathBuf> {
    let mut folders = vec![Path::new("/sys/fs/bpf/culvert").join(&node.name)];
    let mut pins = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                folders.push(entry.path());
            } else {
                pins.push(entry.path());
            }
        }
    }
    pins
}

#[test]
fn a_user_without_privileges_is_refused() {
    if !require::tool("setpriv", &["--version"]) {
        return;
    }
    let Some(scene) = Scene::build() else { return };
    // Only the privileges may be what is missing.
    for folder in [scene.topology.dir(), &scene.topology.a.dir] {
        fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let key = scene.ca.dir().join("ca-key.pem");
    std::os::unix::fs::chown(key, Some(65534), Some(65534)).unwrap();
    scene.refused_behind(
        &["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"],
        &["CAP_"],
    );
}

#[test]
fn a_missing_capability_is_named() {
    if !require::tool("setpriv", &["--version"]) {
        return;
    }
    let Some(scene) = Scene::build() else { return };
    for (dropped, name) in [("-net_admin", "CAP_NET_ADMIN"), ("-sys_admin", "CAP_SYS_ADMIN")] {
        scene.refused_behind(&["setpriv", &format!("--bounding-set={dropped}")], &[name]);
    }
}

#[test]
fn a_netns_path_that_is_no_netns_is_named() {
    let Some(scene) = Scene::build() else { return };
    let pods_file = scene.pods_file();
    let good = fs::read_to_string(&pods_file).unwrap();
    let netns = scene.topology.a2.netns.path().to_string_lossy().into_owned();
    for bad in [scene.mesh_file().to_string_lossy().as_ref(), "/run/netns/cv-not-there", "/proc"] {
        fs::write(&pods_file, good.replace(&netns, bad)).unwrap();
        scene.refused(&[bad, "a2"]);
    }
}

#[test]
fn two_pods_with_one_address_are_named() {
    let Some(scene) = Scene::build() else { return };
    let (a1, a2) = (&scene.topology.a1, &scene.topology.a2);
    for (family, length) in [(Family::V4, 32), (Family::V6, 128)] {
        let ip = a1.ip(family);
        a2.netns.ip(&format!("addr add {ip}/{length} dev eth0\n")).unwrap();
        scene.refused(&["a1", "a2", &ip.to_string()]);
        a2.netns.ip(&format!("addr del {ip}/{length} dev eth0\n")).unwrap();
    }
}

#[test]
fn a_pods_or_mesh_file_that_cannot_be_used_is_named() {
    let Some(scene) = Scene::build() else { return };
    for path in [scene.pods_file(), scene.mesh_file()] {
        let good = fs::read_to_string(&path).unwrap();
        let name = path.to_string_lossy().into_owned();
        for bad in ["pods: [", "workloads: [", "nonsense: true", "pods: 7\nworkloads: 7"] {
            fs::write(&path, bad).unwrap();
            scene.refused(&[&name]);
        }
        fs::remove_file(&path).unwrap();
        scene.refused(&[&name]);
        fs::write(&path, good).unwrap();
    }
}

#[test]
fn an_authority_that_cannot_be_used_is_named() {
    let Some(scene) = Scene::build() else { return };
    for file in ["ca.pem", "ca-key.pem"] {
        let path = scene.ca.dir().join(file);
        let good = fs::read_to_string(&path).unwrap();
        fs::write(&path, "no PEM at all").unwrap();
        scene.refused(&[&path.to_string_lossy()]);
        fs::remove_file(&path).unwrap();
        scene.refused(&[&path.to_string_lossy()]);
        fs::write(&path, good).unwrap();
    }
}

#[test]
fn a_port_that_is_taken_is_named() {
    let Some(scene) = Scene::build() else { return };
    for port in [15000, 15020, 15021] {
        let _taken = App::start_on(&scene.topology.a.netns, port, Behaviour::Echo).unwrap();
        scene.refused(&[&port.to_string()]);
    }
}

#[test]
fn a_second_culvert_of_the_same_node_names_the_first() {
    let Some(topology) = Topology::with_culvert() else { return };
    let mut mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    let pid = mesh.a.pid().unwrap().to_string();
    // In the other node's namespace, so that the ports are not what it trips over.
    mesh.b.terminate(poll::SOON).unwrap();
    let arguments = culvert::arguments(&topology.a, &culvert::mesh_path(&topology), mesh.ca.dir());
    let mut command = Command::new(culvert::binary().unwrap());
    command.args(arguments).envs(ENVIRONMENT);
    let finished = finish(&topology.b.netns, &mut command, poll::SOON).unwrap();
    assert_eq!(finished.code, 2, "{finished:?}");
    assert_eq!(finished.stderr.lines().count(), 1, "{}", finished.stderr);
    assert!(finished.stderr.contains(&pid), "{pid} is not in: {}", finished.stderr);
    assert_eq!(mesh.a.admin("GET", "/").map(|_| ()).ok(), Some(()), "the first one is gone");
}

#[test]
fn an_ephemeral_node_leaves_nothing_when_it_is_told_to_stop() {
    let Some(topology) = Topology::with_culvert() else { return };
    let ca = Ca::create(&topology.dir().join("ca")).unwrap();
    MeshFile::new(&topology).write(&culvert::mesh_path(&topology)).unwrap();
    let settings = || topology.a1.netns.run(settings);
    let before = settings();
    let pods = [&topology.a1];
    let mut culvert = Culvert::start(&topology, &topology.a, &pods, &ca, Remains::Nothing).unwrap();
    assert_ne!(settings(), before, "nothing was captured");
    let status = culvert.terminate(poll::SOON).unwrap();
    assert_eq!(status.code(), Some(0));
    assert_eq!(settings(), before);
    assert_eq!(pins(&topology.a), Vec::<PathBuf>::new());
}

/// What enrolment changes in a pod: rules, routes, queueing disciplines and sysctls.
fn settings() -> String {
    let ip = |args: &[&str]| {
        let output = Command::new(args[0]).args(&args[1..]).output().unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let sysctl = |key: &str| fs::read_to_string(Path::new("/proc/sys/net").join(key)).unwrap();
    [
        ip(&["ip", "rule", "list"]),
        ip(&["ip", "-6", "rule", "list"]),
        ip(&["ip", "route", "list", "table", "all"]),
        ip(&["ip", "-6", "route", "list", "table", "all"]),
        ip(&["tc", "qdisc", "list"]),
        sysctl("ipv4/tcp_fwmark_accept"),
        sysctl("ipv4/fwmark_reflect"),
        sysctl("ipv6/fwmark_reflect"),
        sysctl("ipv4/conf/lo/accept_local"),
    ]
    .join("\n")
}
