//! What stays when files are wrong, and what goes when they do.

use std::fs;

use super::*;

struct Files {
    dir: tempfile::TempDir,
    directory: Directory,
}

fn pod(name: &str, ip: &str) -> String {
    format!(
        "---\napiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: shop}}\nstatus: {{podIP: {ip}}}\n"
    )
}

impl Files {
    fn new(files: &[(&str, &str)]) -> (Self, Vec<String>) {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            fs::write(dir.path().join(name), text).unwrap();
        }
        let mut directory = Directory::new(dir.path().to_owned());
        let changes = shown(directory.open().unwrap());
        (Self { dir, directory }, changes)
    }

    /// Replaces a file as a whole, and gives what that changes.
    fn replace(&mut self, name: &str, text: &str) -> Vec<String> {
        let fresh = self.dir.path().join(".new");
        fs::write(&fresh, text).unwrap();
        fs::rename(&fresh, self.dir.path().join(name)).unwrap();
        self.again()
    }

    fn again(&mut self) -> Vec<String> {
        loop {
            let found = self.directory.again().unwrap();
            if !found.unrest {
                return shown(found.changes);
            }
        }
    }

    fn problems(&self) -> Vec<String> {
        let root = format!("{}/", self.dir.path().display());
        self.directory.problems().iter().map(|p| p.to_string().replace(&root, "")).collect()
    }
}

fn shown(changes: Vec<Change>) -> Vec<String> {
    let show = |change: &Change| match change {
        Change::Set(key, Object::Pod(pod)) => format!("{key}={}", pod.addresses()[0]),
        Change::Set(key, _) => key.to_string(),
        Change::Remove(key) => format!("-{key}"),
        Change::Mesh(origin, mesh) => {
            let sign = if mesh.is_some() { "" } else { "-" };
            format!("{sign}mesh {}", origin.rsplit('/').next().unwrap())
        }
    };
    changes.iter().map(show).collect()
}

#[test]
fn files_come_change_and_go() {
    let (mut files, changes) =
        Files::new(&[("a.yaml", &pod("a", "10.0.0.1")), ("b.txt", "no"), (".c.yaml", "no: {")]);
    assert_eq!(changes, ["Pod shop/a=10.0.0.1"]);
    assert!(files.again().is_empty());
    assert_eq!(files.replace("b.yml", &pod("b", "10.0.0.2")), ["Pod shop/b=10.0.0.2"]);
    assert_eq!(files.replace("a.yaml", &pod("a", "10.0.0.3")), ["Pod shop/a=10.0.0.3"]);
    fs::remove_file(files.dir.path().join("a.yaml")).unwrap();
    assert_eq!(files.again(), ["-Pod shop/a"]);
    assert!(files.problems().is_empty());
}

#[test]
fn directories_within_are_read_too() {
    let (mut files, _) = Files::new(&[]);
    fs::create_dir_all(files.dir.path().join("x/y")).unwrap();
    assert_eq!(files.replace("x/y/a.yaml", &pod("a", "10.0.0.1")), ["Pod shop/a=10.0.0.1"]);
}

#[test]
fn a_list_is_its_items() {
    let list = "apiVersion: v1\nkind: List\nitems:\n- {apiVersion: v1, kind: Pod, metadata: {name: a, namespace: shop}, status: {podIP: 10.0.0.1}}\n- {apiVersion: apps/v1, kind: Deployment, metadata: {name: x}}\n";
    let (files, changes) = Files::new(&[("a.yaml", list)]);
    assert_eq!(changes, ["Pod shop/a=10.0.0.1"]);
    assert!(files.problems().is_empty(), "other kinds are no mistake");
}

#[test]
fn a_mistake_in_one_object_leaves_its_last_version_and_the_others() {
    let (mut files, _) =
        Files::new(&[("a.yaml", &format!("{}{}", pod("a", "10.0.0.1"), pod("b", "10.0.0.2")))]);
    let text = format!("{}{}{}", pod("a", "nonsense"), pod("b", "10.0.0.9"), pod("c", "10.0.0.3"));
    let changes = files.replace("a.yaml", &text);
    assert_eq!(changes, ["Pod shop/b=10.0.0.9", "Pod shop/c=10.0.0.3"]);
    assert_eq!(
        files.problems(),
        [
            "a.yaml:1: document 1: Pod shop/a: status.podIP: `nonsense` is not an IP address; write one, such as 10.0.0.1"
        ]
    );
    assert_eq!(files.replace("a.yaml", &pod("a", "10.0.0.7")).len(), 3, "b and c go, a changes");
    assert!(files.problems().is_empty());
}

#[test]
fn a_file_that_cannot_be_parsed_takes_nothing_away() {
    let (mut files, _) = Files::new(&[("a.yaml", &pod("a", "10.0.0.1"))]);
    let text = format!("---\nkind: [\n{}", pod("b", "10.0.0.2"));
    assert_eq!(files.replace("a.yaml", &text), ["Pod shop/b=10.0.0.2"]);
    let problems = files.problems();
    assert_eq!(problems.len(), 1);
    assert!(
        problems[0].starts_with("a.yaml:") && problems[0].ends_with("correct the YAML"),
        "{problems:?}"
    );
}

#[test]
fn a_problem_says_in_which_document_and_field() {
    let policy = "---\napiVersion: security.istio.io/v1\nkind: AuthorizationPolicy\nmetadata: {name: p, namespace: shop}\n\
                  spec: {rules: [{from: [{source: {princpals: [x]}}]}]}\n";
    let (files, changes) = Files::new(&[("a.yaml", &format!("{}{policy}", pod("a", "10.0.0.1")))]);
    assert_eq!(changes, ["Pod shop/a=10.0.0.1"]);
    let problems = files.problems();
    let want = "a.yaml:6: document 2: AuthorizationPolicy shop/p: spec.rules[0].from[0].source";
    assert!(problems[0].starts_with(want), "{problems:?}");
    assert!(files.directory.problems()[0].is_grave());
}

#[test]
fn an_object_that_is_defined_twice_is_the_first_files() {
    let (mut files, changes) =
        Files::new(&[("a.yaml", &pod("a", "10.0.0.1")), ("b.yaml", &pod("a", "10.0.0.2"))]);
    assert_eq!(changes, ["Pod shop/a=10.0.0.1"]);
    assert_eq!(files.problems().len(), 1);
    fs::remove_file(files.dir.path().join("a.yaml")).unwrap();
    assert_eq!(files.again(), ["Pod shop/a=10.0.0.2"]);
    assert!(files.problems().is_empty());
}

#[test]
fn a_file_that_is_written_in_place_is_read_when_it_rests() {
    let (mut files, _) = Files::new(&[("a.yaml", &pod("a", "10.0.0.1"))]);
    let path = files.dir.path().join("a.yaml");
    fs::write(&path, "").unwrap();
    let first = files.directory.again().unwrap();
    assert!(first.unrest && first.changes.is_empty(), "half a file takes nothing away");
    fs::write(&path, pod("a", "10.0.0.22")).unwrap();
    let second = files.directory.again().unwrap();
    assert!(second.unrest && second.changes.is_empty());
    assert_eq!(files.again(), ["Pod shop/a=10.0.0.22"]);
}

#[test]
fn mesh_documents_are_kept_as_a_whole() {
    let mesh = |ip: &str| {
        format!("workloads: [{{uid: u, name: a, namespace: shop, workloadIps: [{ip}]}}]\n")
    };
    let (mut files, changes) = Files::new(&[("m.yaml", &mesh("10.0.0.1"))]);
    assert_eq!(changes, ["mesh m.yaml: document 1"]);
    assert!(files.replace("m.yaml", &mesh("nonsense")).is_empty());
    assert!(
        files.problems()[0].starts_with("m.yaml:1: document 1: workloads[0].workloadIps[0]"),
        "{:?}",
        files.problems()
    );
    fs::remove_file(files.dir.path().join("m.yaml")).unwrap();
    assert_eq!(files.again(), ["-mesh m.yaml: document 1"]);
}

#[test]
fn mutated_files_change_nothing_that_they_do_not_name() {
    let good = format!("{}{}", pod("a", "10.0.0.1"), pod("b", "10.0.0.2"));
    for at in 0..good.len() {
        for byte in [b'\0', b'\n', b'[', b'&', b'-', 0xff] {
            let mut bytes = good.clone().into_bytes();
            bytes[at] = byte;
            let contents = documents::read("f".as_ref(), &String::from_utf8_lossy(&bytes));
            assert!(contents.len() <= 3, "{contents:?}");
        }
    }
}

#[test]
fn the_example_of_the_deployment_is_right() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/controlplane/mesh");
    let mut directory = Directory::new(root);
    let changes = directory.open().unwrap();
    assert_eq!(directory.problems(), []);
    let mut translator = crate::translate::Translator::new(crate::world::MeshConfig::default());
    let update = translator.apply(changes);
    assert_eq!(translator.faults().count(), 0);
    let names: Vec<_> = update.changed.iter().map(|resource| &*resource.name).collect();
    assert_eq!(
        names,
        [
            "Kubernetes//Pod/shop/db",
            "Kubernetes//Pod/shop/web",
            "shop/db.shop.svc.cluster.local",
            "istio-system/istio_converted_static_strict",
            "shop/db-clients",
        ]
    );
}
