//! Golden tables: objects as they are written, and the resources that nodes get.

mod authentications;
mod incremental;
mod policies;
mod services;
mod workloads;

use culvert_proto::istio::{
    security::Authorization,
    workload::{Address, Service, Workload, address},
};
use prost::Message as _;

use super::*;
use crate::documents::{self, Content};

/// The resources after one or more steps.
#[derive(Default)]
struct Mesh {
    translator: Translator,
    resources: BTreeMap<(Type, String), Arc<Resource>>,
}

impl Mesh {
    #[track_caller]
    fn of(yaml: &str) -> Self {
        let mut mesh = Self::default();
        mesh.set(yaml);
        mesh
    }

    /// Takes objects in; gives the names that changed and those that are gone.
    #[track_caller]
    fn set(&mut self, yaml: &str) -> (Vec<String>, Vec<String>) {
        let changes =
            documents::read("mesh.yaml".as_ref(), yaml).into_iter().map(|content| match content {
                Content::Object(key, object, _) => Change::Set(key, object),
                Content::Mesh(mesh, place) => Change::Mesh(place.document.to_string(), Some(mesh)),
                Content::Bad(problem) => panic!("{problem}"),
            });
        self.apply(changes.collect())
    }

    fn remove(&mut self, kind: Kind, namespace: &str, name: &str) -> (Vec<String>, Vec<String>) {
        let (namespace, name) = (namespace.to_owned(), name.to_owned());
        self.apply(vec![Change::Remove(crate::objects::Key { kind, namespace, name })])
    }

    fn apply(&mut self, changes: Vec<Change>) -> (Vec<String>, Vec<String>) {
        let Update { changed, removed } = self.translator.apply(changes);
        let names = changed.iter().map(|resource| resource.name.to_string()).collect();
        for resource in changed {
            self.resources.insert((resource.kind, resource.name.to_string()), resource);
        }
        let gone: Vec<_> = removed.iter().map(|(_, name)| name.to_string()).collect();
        for (kind, name) in removed {
            assert!(self.resources.remove(&(kind, name.to_string())).is_some(), "{name}");
        }
        (names, gone)
    }

    #[track_caller]
    fn workload(&self, uid: &str) -> Workload {
        match self.address(uid) {
            address::Type::Workload(workload) => workload,
            address::Type::Service(_) => panic!("{uid} is a service"),
        }
    }

    #[track_caller]
    fn pod(&self, name: &str) -> Workload {
        self.workload(&format!("Kubernetes//Pod/shop/{name}"))
    }

    #[track_caller]
    fn service(&self, name: &str) -> Service {
        match self.address(name) {
            address::Type::Service(service) => service,
            address::Type::Workload(_) => panic!("{name} is a workload"),
        }
    }

    #[track_caller]
    fn address(&self, name: &str) -> address::Type {
        let names = || self.resources.keys().map(|(_, name)| name).collect::<Vec<_>>();
        let found = self.resources.get(&(Type::Address, name.to_owned()));
        let found = found.unwrap_or_else(|| panic!("no {name} among {:?}", names()));
        Address::decode(found.body.clone()).unwrap().r#type.unwrap()
    }

    fn policy(&self, name: &str) -> Option<Authorization> {
        let found = self.resources.get(&(Type::Authorization, name.to_owned()))?;
        Some(Authorization::decode(found.body.clone()).unwrap())
    }

    fn faults(&self) -> Vec<String> {
        let fault = |fault: &Fault| {
            let key = fault.key.as_ref().map(ToString::to_string).unwrap_or_default();
            format!("{key}: {}: {}", fault.field, fault.what)
        };
        self.translator.faults().map(fault).collect()
    }
}

/// A pod of namespace `shop` with more metadata, spec and status, each in flow style and after a comma.
fn pod(name: &str, metadata: &str, spec: &str, status: &str) -> String {
    format!(
        "---\napiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: shop{metadata}}}\n\
         spec: {{nodeName: n1, serviceAccountName: web{spec}}}\n\
         status: {{phase: Running, podIP: 10.0.0.1{status}}}\n"
    )
}
