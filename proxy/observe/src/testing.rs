//! Workloads, flows and a log for this crate's tests.

use std::io;
use std::sync::{Arc, Mutex};

use culvert_mesh::service::{LoadBalancer, Service, Visibility};
use culvert_mesh::workload::{
    Health, Locality, NetworkMode, Protocol, ServiceName, Workload, WorkloadType,
};

use crate::flow::{Flow, Party, SecurityPolicy};
use crate::log_line::LogLine;

/// Which ends of a plaintext flow the mesh knows nothing of.
#[derive(Clone, Copy)]
pub(crate) enum Unknown {
    Source,
    Destination,
    Both,
}

/// `web` calls the service `db` over HBONE.
pub(crate) fn flow() -> Flow {
    Flow {
        dst: ([10, 0, 0, 2], 15008).into(),
        hbone_authority: Some("10.0.0.2:5432".into()),
        source: proved(workload("web")),
        destination: proved(workload("db")),
        service: Some(Arc::new(service())),
        security: SecurityPolicy::MutualTls,
        trace_id: None,
    }
}

/// The same in plaintext, where nobody proves who they are.
pub(crate) fn plain(unknown: Unknown) -> Flow {
    let known = |name| Party { workload: Some(Arc::new(workload(name))), ..Party::default() };
    let (source, destination) = match unknown {
        Unknown::Source => (Party::default(), known("db")),
        Unknown::Destination => (known("web"), Party::default()),
        Unknown::Both => (Party::default(), Party::default()),
    };
    Flow {
        dst: ([10, 0, 0, 2], 5432).into(),
        hbone_authority: None,
        source,
        destination,
        service: None,
        security: SecurityPolicy::Unknown,
        trace_id: None,
    }
}

fn proved(workload: Workload) -> Party {
    let identity = Some(workload.identity.clone());
    Party { workload: Some(Arc::new(workload)), identity, claims: None }
}

fn workload(name: &str) -> Workload {
    Workload {
        uid: format!("Kubernetes//Pod/shop/{name}-1").into(),
        name: format!("{name}-1").into(),
        identity: format!("spiffe://cluster.local/ns/shop/sa/{name}").parse().unwrap(),
        addresses: vec![],
        protocol: Protocol::Hbone,
        network: "".into(),
        network_mode: NetworkMode::Standard,
        node: "node".into(),
        hostname: "".into(),
        waypoint: None,
        network_gateway: None,
        workload_name: name.into(),
        workload_type: WorkloadType::Deployment,
        canonical_name: name.into(),
        canonical_revision: "v1".into(),
        native_tunnel: false,
        application_tunnel: None,
        policies: vec![],
        health: Health::Healthy,
        cluster_id: "Kubernetes".into(),
        locality: Locality { region: "r1".into(), zone: "z1".into(), subzone: "".into() },
        capacity: 1,
        services: vec![],
    }
}

fn service() -> Service {
    Service {
        name: "db".into(),
        key: ServiceName { namespace: "shop".into(), hostname: "db.shop.svc.cluster.local".into() },
        vips: vec![],
        cidr_vips: vec![],
        ports: [(5432, 5432)].into(),
        subject_alt_names: vec![],
        waypoint: None,
        weighted_waypoints: vec![],
        load_balancer: LoadBalancer::default(),
        ip_families: None,
        canonical: false,
        visibility: Visibility::Public,
    }
}

/// Collects what is logged.
#[derive(Clone, Default)]
pub(crate) struct Lines(Arc<Mutex<Vec<u8>>>);

impl Lines {
    /// Writes everything that `log` logs in the form of `line`.
    pub(crate) fn collect(&self, line: LogLine, log: impl FnOnce()) {
        let lines = self.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(tracing::Level::TRACE)
            .with_ansi(false)
            .event_format(line)
            .with_writer(move || lines.clone())
            .finish();
        tracing::subscriber::with_default(subscriber, log);
    }

    /// The lines, each with its time replaced by `TIME` after a check of its form.
    pub(crate) fn without_times(&self) -> Vec<String> {
        let text = String::from_utf8(self.0.lock().unwrap().clone()).unwrap();
        text.lines().map(without_time).collect()
    }
}

fn without_time(line: &str) -> String {
    let start = match line.split_once("\"time\":\"") {
        Some((before, _)) => before.len() + "\"time\":\"".len(),
        None => 0,
    };
    let time: String = line.chars().skip(start).take("2026-01-02T03:04:05.000006Z".len()).collect();
    let shape: String = time.chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect();
    assert_eq!(shape, "0000-00-00T00:00:00.000000Z", "{line}");
    line.replacen(&time, "TIME", 1)
}

impl io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
