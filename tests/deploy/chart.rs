//! The chart: rendered as Helm does, valid for Kubernetes, with the rights and the life that culvert needs.

use std::collections::{BTreeMap, BTreeSet};

use culvert_tests::chart::{self, Rendered, object, objects, render};
use serde_json::{Value, json};

/// Those of the hardened profile; `proxy/capture` asks for the first four, the rest is justified in the chart.
const CAPABILITIES: [&str; 7] =
    ["NET_ADMIN", "NET_RAW", "SYS_ADMIN", "SYS_PTRACE", "BPF", "PERFMON", "SYS_RESOURCE"];

const VERSIONS: [&str; 2] = ["1.30", "1.37"];

/// The objects of each job, which must render and be valid.
fn valid(jobs: &Value) -> BTreeMap<String, Vec<Value>> {
    let rendered = render(jobs, &VERSIONS).unwrap();
    let valid = |(name, rendered)| match rendered {
        Rendered::Done { manifests, problems } => {
            assert_eq!(problems, Vec::<String>::new(), "{name}");
            (name, objects(&manifests).unwrap())
        }
        Rendered::Refused { error } => panic!("{name}: {error}"),
    };
    rendered.into_iter().map(valid).collect()
}

/// The pod that runs on every node.
fn node_pod(objects: &[Value]) -> &Value {
    object(objects, "DaemonSet", "culvert").unwrap().pointer("/spec/template/spec").unwrap()
}

fn container(pod: &Value) -> &Value {
    pod.pointer("/containers/0").unwrap()
}

fn variable<'a>(container: &'a Value, name: &str) -> Option<&'a str> {
    let all = container.get("env")?.as_array()?;
    all.iter().find(|variable| variable["name"] == name)?.get("value")?.as_str()
}

#[test]
fn the_committed_manifests_are_what_the_chart_renders() {
    if !chart::is_available() {
        return;
    }
    let jobs = std::fs::read_to_string(chart::deploy().join("manifests.json")).unwrap();
    let rendered = render(&serde_json::from_str(&jobs).unwrap(), &VERSIONS).unwrap();
    let files = std::fs::read_dir(chart::deploy().join("manifests")).unwrap();
    assert_eq!(files.count(), rendered.len(), "files in deploy/manifests");
    for (name, rendered) in rendered {
        let Rendered::Done { manifests, .. } = rendered else { panic!("{name}: {rendered:?}") };
        let committed = chart::committed(&name).unwrap();
        assert!(
            manifests == committed,
            "deploy/manifests/{name}.yaml is not what the chart renders; run: cargo xtask chart"
        );
    }
}

#[test]
fn every_combination_of_options_is_valid_for_kubernetes() {
    if !chart::is_available() {
        return;
    }
    let mut jobs = serde_json::Map::new();
    for profile in ["privileged", "hardened"] {
        for (source, steering) in [("kubernetes", "ebpf"), ("zds", "ebpf"), ("zds", "redirect")] {
            for plane in [false, true] {
                for all in [false, true] {
                    let mut values = json!({
                        "profile": profile, "podSource": source, "steering": steering,
                        "controlPlane": {"enabled": plane}, "namespace": {"create": all},
                    });
                    if all {
                        values.as_object_mut().unwrap().extend(everything());
                        let controlplane = json!({
                            "enabled": plane, "nodeSelector": {"a": "b"},
                            "tolerations": [{"operator": "Exists"}],
                            "storage": {"size": "2Gi", "className": "fast"}, "configMap": "mesh",
                        });
                        values["controlPlane"] = controlplane;
                    }
                    let name = format!("{profile} {source} {steering} {plane} {all}");
                    jobs.insert(name, json!({ "values": values }));
                }
            }
        }
    }
    let rendered = valid(&jobs.into());
    assert_eq!(rendered.len(), 24);
    for (name, objects) in rendered {
        let has = |kind: &str| objects.iter().any(|object| object["kind"] == kind);
        let words: Vec<_> = name.split(' ').collect();
        // A control plane without a ConfigMap watches the cluster, too.
        let watches = words[1] == "kubernetes" || (words[3], words[4]) == ("true", "false");
        assert_eq!(has("ClusterRole"), watches, "{name}");
        assert_eq!(has("Deployment"), words[3] == "true", "{name}");
        assert_eq!(has("ResourceQuota"), words[4] == "true", "{name}");
    }
}

/// A value for every option that has none.
fn everything() -> serde_json::Map<String, Value> {
    let values = json!({
        "image": {"repository": "r/culvert", "digest": "sha256:00"},
        "imagePullSecrets": [{"name": "s"}],
        "env": {"SECRET_TTL": "1h", "ZTUNNEL_WORKER_THREADS": 4, "CULVERT_BPF_LOG": true},
        "resourceQuota": {"enabled": true},
        "nodeSelector": {"a": "b"},
        "affinity": {"nodeAffinity": {}},
        "podLabels": {"a": "b"},
        "podAnnotations": {"a": "b"},
        "seLinuxOptions": {"type": "spc_t"},
        "serviceAccount": {"annotations": {"a": "b"}},
        "guardHost": true,
        "whenDown": "refuse",
    });
    serde_json::from_value(values).unwrap()
}

#[test]
fn values_that_cannot_be_are_refused_with_the_reason() {
    if !chart::is_available() {
        return;
    }
    let jobs = json!({
        "redirect needs podSource: zds": {"values": {"steering": "redirect"}},
        "/profile": {"values": {"profile": "root"}},
        "/whenDown": {"values": {"whenDown": "close"}},
        "/drainSeconds": {"values": {"drainSeconds": -1}},
    });
    for (reason, rendered) in render(&jobs, &[]).unwrap() {
        match rendered {
            Rendered::Refused { error } => assert!(error.contains(&reason), "{reason}: {error}"),
            Rendered::Done { .. } => panic!("{reason}: rendered"),
        }
    }
}

#[test]
fn hardened_has_exactly_the_capabilities_that_are_justified() {
    let all = objects(&chart::committed("culvert-hardened").unwrap()).unwrap();
    let pod = node_pod(&all);
    let security = &container(pod)["securityContext"];
    let names: BTreeSet<&str> = security["capabilities"]["add"]
        .as_array()
        .unwrap()
        .iter()
        .map(|name| name.as_str().unwrap())
        .collect();
    assert_eq!(names, BTreeSet::from(CAPABILITIES));
    assert_eq!(security["capabilities"]["drop"], json!(["ALL"]));
    assert_eq!(security["privileged"], false);
    assert_eq!(security["readOnlyRootFilesystem"], true);
    // Kubernetes grants Bidirectional to privileged containers only.
    for mount in container(pod)["volumeMounts"].as_array().unwrap() {
        assert_ne!(mount["mountPropagation"], "Bidirectional", "{mount}");
    }
}

#[test]
fn privileged_is_root_with_a_root_file_system_that_cannot_be_written() {
    let all = objects(&chart::committed("culvert").unwrap()).unwrap();
    let security = &container(node_pod(&all))["securityContext"];
    assert_eq!(security["privileged"], true);
    assert_eq!(security["readOnlyRootFilesystem"], true);
    assert_eq!(security.get("capabilities"), None);
}

#[test]
fn a_node_is_updated_by_a_second_process_beside_the_first() {
    for name in ["culvert", "culvert-hardened", "culvert-controlplane"] {
        let all = objects(&chart::committed(name).unwrap()).unwrap();
        let daemon_set = object(&all, "DaemonSet", "culvert").unwrap();
        let update = &daemon_set["spec"]["updateStrategy"]["rollingUpdate"];
        assert_eq!(*update, json!({"maxSurge": 1, "maxUnavailable": 0}), "{name}");
        let pod = node_pod(&all);
        // A declared port is reserved on the node, and the second process would never be scheduled there.
        assert_eq!(container(pod).get("ports"), None, "{name}");
        assert_eq!((&pod["hostNetwork"], &pod["hostPID"]), (&true.into(), &true.into()), "{name}");
        let probe = &container(pod)["readinessProbe"]["httpGet"];
        assert_eq!(*probe, json!({"port": 15021, "path": "/healthz/ready"}), "{name}");
        let drain = variable(container(pod), "CONNECTION_TERMINATION_DEADLINE").unwrap();
        let drain: u64 = drain.strip_suffix('s').unwrap().parse().unwrap();
        let grace = pod["terminationGracePeriodSeconds"].as_u64().unwrap();
        assert!(grace >= drain + 10, "{name}: {grace} s of grace for {drain} s of drain");
    }
}

#[test]
fn the_rights_are_those_that_the_watches_need() {
    let all = objects(&chart::committed("culvert").unwrap()).unwrap();
    let roles: Vec<_> = all
        .iter()
        .filter(|object| object["kind"] == "ClusterRole" || object["kind"] == "Role")
        .collect();
    let rules: Vec<_> =
        roles.iter().flat_map(|role| role["rules"].as_array().unwrap()).cloned().collect();
    let want = [
        json!({"apiGroups": [""], "resources": ["pods", "namespaces"], "verbs": ["list", "watch"]}),
        json!({"apiGroups": [""], "resources": ["pods/status"], "verbs": ["patch"]}),
    ];
    assert_eq!(rules, want);
}

#[test]
fn with_a_control_plane_of_its_own_nodes_ask_that_one() {
    let all = objects(&chart::committed("culvert-controlplane").unwrap()).unwrap();
    let node = container(node_pod(&all));
    let service = "culvert-controlplane.culvert-system.svc";
    for name in ["XDS_ADDRESS", "CA_ADDRESS"] {
        assert_eq!(variable(node, name), Some(format!("https://{service}:15012").as_str()));
    }
    let deployment = object(&all, "Deployment", "culvert-controlplane").unwrap();
    let plane = container(deployment.pointer("/spec/template/spec").unwrap());
    assert_eq!(variable(plane, "CULVERT_NAMES"), Some(service));
    assert_eq!(variable(plane, "CA_TRUSTED_NODE_ACCOUNTS"), Some("culvert-system/culvert"));
    assert_eq!(plane["securityContext"]["capabilities"], json!({"drop": ["ALL"]}));
    assert_eq!(variable(plane, "CULVERT_KUBERNETES"), Some("true"));
    let role = object(&all, "ClusterRole", "culvert-controlplane-culvert-system").unwrap();
    let rules = role["rules"].as_array().unwrap();
    let kinds = rules.iter().flat_map(|rule| rule["resources"].as_array().unwrap());
    assert_eq!(kinds.count(), 10);
    for rule in rules {
        assert_eq!(rule["verbs"], json!(["get", "list", "watch"]), "{rule}");
    }
}

#[test]
fn a_control_plane_that_reads_files_has_no_right_to_the_cluster() {
    if !chart::is_available() {
        return;
    }
    let values = json!({"controlPlane": {"enabled": true, "configMap": "mesh"}});
    let all = &valid(&json!({"files": {"values": values}}))["files"];
    object(all, "ClusterRole", "culvert-controlplane-culvert-system").unwrap_err();
    let account = object(all, "ServiceAccount", "culvert-controlplane").unwrap();
    assert_eq!(account["automountServiceAccountToken"], false);
    let deployment = object(all, "Deployment", "culvert-controlplane").unwrap();
    let plane = container(deployment.pointer("/spec/template/spec").unwrap());
    assert_eq!(variable(plane, "CULVERT_CONFIG"), Some("/etc/culvert/mesh"));
    assert_eq!(variable(plane, "CULVERT_KUBERNETES"), None);
}

#[test]
fn before_a_release_is_deleted_every_node_becomes_one_that_leaves_nothing() {
    if !chart::is_available() {
        return;
    }
    let all = &valid(&json!({"default": {}}))["default"];
    let job = object(all, "Job", "culvert-uninstall").unwrap();
    assert_eq!(job["metadata"]["annotations"]["helm.sh/hook"], "pre-delete");
    let pod = job.pointer("/spec/template/spec").unwrap();
    let arguments: Vec<_> = ["/initContainers/0", "/initContainers/1", "/containers/0"]
        .map(|step| pod.pointer(step).unwrap()["args"].as_array().unwrap())
        .to_vec();
    let word = |step: usize, at: usize| arguments[step][at].as_str().unwrap();
    assert_eq!([word(0, 1), word(1, 1), word(2, 1)], ["patch", "rollout", "wait"]);
    let patch: Value = serde_json::from_str(word(0, 4)).unwrap();
    let patched = &patch["spec"]["template"];
    // Containers and variables are merged by their names.
    let daemon_set = object(all, "DaemonSet", "culvert").unwrap();
    assert_eq!(patched["spec"]["containers"][0]["name"], container(node_pod(all))["name"]);
    assert_eq!(
        patched["spec"]["containers"][0]["env"],
        json!([{"name": "CULVERT_EPHEMERAL", "value": "true"}])
    );
    // What the last step waits for are those that the label does not tell.
    let labels = &daemon_set["spec"]["template"]["metadata"]["labels"];
    assert_eq!((&labels["app"], labels.get("culvert.io/leaves")), (&"culvert".into(), None));
    assert_eq!(patched["metadata"]["labels"], json!({"culvert.io/leaves": "true"}));
    assert!(arguments[2].contains(&"--selector=app=culvert,!culvert.io/leaves".into()));
}
