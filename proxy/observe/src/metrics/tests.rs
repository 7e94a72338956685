use std::net::SocketAddr;

use prometheus_client::encoding::text::encode;

use super::*;
use crate::claims::{self, Claims};
use crate::flow::{Observe, Party, SecurityPolicy};
use crate::testing::{Unknown, flow, plain};

const SRC: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1)), 40000);
const DST: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::new(10, 96, 0, 1)), 80);

/// The samples of `registry`, sorted; families have no order of their own.
fn samples(observe: &Observe, registry: &Registry) -> Vec<String> {
    let text = observe.encode(registry).unwrap();
    let mut samples: Vec<_> =
        text.lines().filter(|line| !line.starts_with('#')).map(ToOwned::to_owned).collect();
    samples.sort();
    samples
}

/// Name, flag and value of the traffic samples.
fn brief(observe: &Observe, registry: &Registry) -> Vec<String> {
    let brief = samples(observe, registry).into_iter().filter_map(|sample| {
        let (name, rest) = sample.split_once("{reporter=")?;
        let flag = rest
            .split_once("response_flags=\"")
            .map_or("", |(_, rest)| rest.split('"').next().unwrap());
        Some(format!("{name} {flag} {}", sample.rsplit(' ').next().unwrap()))
    });
    brief.collect()
}

fn observed() -> (Observe, Registry) {
    let mut registry = Registry::default();
    let observe = Observe::register(&mut registry, "0.1.0");
    (observe, registry)
}

// Contract.
#[test]
fn a_flow_between_workloads_is_exposed_with_every_label_in_order() {
    let (observe, registry) = observed();
    let record = observe.begin(Direction::Outbound, SRC, DST).open(flow());
    record.transferred().add_request(100);
    record.transferred().add_response(2000);
    record.finish();
    let labels = "reporter=\"source\",source_workload=\"web\",source_canonical_service=\"web\",\
        source_canonical_revision=\"v1\",source_workload_namespace=\"shop\",\
        source_principal=\"spiffe://cluster.local/ns/shop/sa/web\",source_app=\"web\",source_version=\"v1\",\
        source_cluster=\"Kubernetes\",destination_service=\"db.shop.svc.cluster.local\",\
        destination_service_namespace=\"shop\",destination_service_name=\"db\",destination_workload=\"db\",\
        destination_canonical_service=\"db\",destination_canonical_revision=\"v1\",\
        destination_workload_namespace=\"shop\",destination_principal=\"spiffe://cluster.local/ns/shop/sa/db\",\
        destination_app=\"db\",destination_version=\"v1\",destination_cluster=\"Kubernetes\",request_protocol=\"tcp\",\
        response_flags=\"-\",connection_security_policy=\"mutual_tls\",source_region=\"r1\",source_zone=\"z1\",\
        destination_region=\"r1\",destination_zone=\"z1\"";
    let text = observe.encode(&registry).unwrap();
    let want = format!(
        "\
# HELP istio_tcp_connections_opened The total number of TCP connections opened.
# TYPE istio_tcp_connections_opened counter
istio_tcp_connections_opened_total{{{labels}}} 1
# HELP istio_tcp_connections_closed The total number of TCP connections closed.
# TYPE istio_tcp_connections_closed counter
istio_tcp_connections_closed_total{{{labels}}} 1
# HELP istio_tcp_received_bytes The size of total bytes received during request.
# TYPE istio_tcp_received_bytes counter
istio_tcp_received_bytes_total{{{labels}}} 100
# HELP istio_tcp_sent_bytes The size of total bytes sent during response.
# TYPE istio_tcp_sent_bytes counter
istio_tcp_sent_bytes_total{{{labels}}} 2000
# HELP istio_build Which build this is.
# TYPE istio_build gauge
istio_build{{component=\"ztunnel\",tag=\"0.1.0\"}} 1
# EOF
"
    );
    assert_eq!(text, want);
}

// Contract.
#[test]
fn what_is_not_known_is_unknown() {
    let (observe, registry) = observed();
    observe.begin(Direction::Inbound, SRC, DST).open(plain(Unknown::Both)).finish();
    let sample = samples(&observe, &registry)
        .into_iter()
        .find(|sample| sample.starts_with("istio_tcp_connections_opened_total"))
        .unwrap();
    let unknown = [
        "source_workload",
        "source_canonical_service",
        "source_canonical_revision",
        "source_workload_namespace",
        "source_principal",
        "source_app",
        "source_version",
        "source_cluster",
        "destination_service",
        "destination_service_namespace",
        "destination_service_name",
        "destination_workload",
        "destination_canonical_service",
        "destination_canonical_revision",
        "destination_workload_namespace",
        "destination_principal",
        "destination_app",
        "destination_version",
        "destination_cluster",
    ]
    .map(|name| format!("{name}=\"unknown\""))
    .join(",");
    let want = format!(
        "istio_tcp_connections_opened_total{{reporter=\"destination\",{unknown},request_protocol=\"tcp\",\
         response_flags=\"-\",connection_security_policy=\"unknown\"}} 1"
    );
    assert_eq!(sample, want);
}

#[test]
fn principals_and_localities_of_plaintext_are_those_that_are_known() {
    #[track_caller]
    fn check(unknown: Unknown, want: &[&str], absent: &[&str]) {
        let (observe, registry) = observed();
        observe.begin(Direction::Inbound, SRC, DST).open(plain(unknown)).finish();
        let text = observe.encode(&registry).unwrap();
        for label in want {
            assert!(text.contains(label), "{label} is not in {text}");
        }
        for label in absent {
            assert!(!text.contains(label), "{label} is in {text}");
        }
    }
    check(
        Unknown::Source,
        &[
            "source_principal=\"unknown\"",
            "destination_principal=\"spiffe://cluster.local/ns/shop/sa/db\"",
            "source_region=\"unknown\",source_zone=\"unknown\",destination_region=\"r1\"",
        ],
        &[],
    );
    check(
        Unknown::Destination,
        &[
            "source_principal=\"unknown\"",
            "source_workload=\"web\"",
            "destination_region=\"unknown\"",
        ],
        &[],
    );
    check(Unknown::Both, &["source_principal=\"unknown\""], &["region", "zone"]);
}

#[test]
fn a_failed_flow_is_closed_and_failed_with_its_flag() {
    let flags = [
        (ResponseFlag::Deny, "DENY"),
        (ResponseFlag::Connect, "CONNECT"),
        (ResponseFlag::TlsFailure, "TLS_FAILURE"),
        (ResponseFlag::H2HandshakeFailure, "H2_HANDSHAKE_FAILURE"),
        (ResponseFlag::NetworkPolicy, "NETWORK_POLICY"),
        (ResponseFlag::IdentityError, "IDENTITY_ERROR"),
        (ResponseFlag::CertRevoked, "CERT_REVOKED"),
    ];
    for (flag, want) in flags {
        let (observe, registry) = observed();
        observe.begin(Direction::Outbound, SRC, DST).open(flow()).fail(flag, &fmt::Error);
        let want = [
            format!("istio_tcp_connections_closed_total {want} 1"),
            format!("istio_tcp_connections_failed_total {want} 1"),
            "istio_tcp_connections_opened_total - 1".to_owned(),
            "istio_tcp_received_bytes_total - 0".to_owned(),
            "istio_tcp_sent_bytes_total - 0".to_owned(),
        ];
        assert_eq!(brief(&observe, &registry), want);
    }
}

#[test]
fn bytes_of_open_flows_are_counted_once_each() {
    let (observe, registry) = observed();
    let bytes = || -> Vec<_> {
        brief(&observe, &registry).into_iter().filter(|sample| sample.contains("bytes")).collect()
    };
    let counts = |received: u64, sent: u64| {
        [
            format!("istio_tcp_received_bytes_total - {received}"),
            format!("istio_tcp_sent_bytes_total - {sent}"),
        ]
    };
    let (one, two) = (
        observe.begin(Direction::Outbound, SRC, DST).open(flow()),
        observe.begin(Direction::Outbound, SRC, DST).open(flow()),
    );
    one.transferred().add_request(10);
    assert_eq!(bytes(), counts(10, 0));
    assert_eq!(bytes(), counts(10, 0));
    two.transferred().add_request(5);
    two.transferred().add_response(7);
    assert_eq!(bytes(), counts(15, 7));
    one.transferred().add_response(1);
    one.finish();
    two.transferred().add_request(2);
    drop(two);
    assert_eq!(bytes(), counts(17, 8));
}

#[test]
fn bytes_counted_while_scraped_are_not_lost() {
    const CHUNKS: u64 = 20_000;
    let (observe, registry) = observed();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            let record = observe.begin(Direction::Outbound, SRC, DST).open(flow());
            scope.spawn(move || {
                let transferred = record.transferred();
                (0..CHUNKS).for_each(|_| transferred.add_request(3));
                record.finish();
            });
        }
        (0..50).for_each(|_| observe.settle());
    });
    let received = format!("istio_tcp_received_bytes_total - {}", 2 * CHUNKS * 3);
    assert!(brief(&observe, &registry).contains(&received));
}

#[test]
fn client_ports_and_addresses_make_no_label_sets() {
    let (observe, registry) = observed();
    for port in 1..200 {
        let src = SocketAddr::new(SRC.ip(), port);
        observe.begin(Direction::Outbound, src, DST).open(flow()).finish();
    }
    assert_eq!(brief(&observe, &registry)[1], "istio_tcp_connections_opened_total - 199");
}

#[test]
fn sockets_are_open_while_their_guards_live() {
    let (observe, registry) = observed();
    let one = observe.socket(Direction::Inbound);
    let two = observe.socket(Direction::Inbound);
    let other = observe.socket(Direction::Outbound);
    drop((one, other));
    let sockets: Vec<_> = samples(&observe, &registry)
        .into_iter()
        .filter(|sample| sample.contains("sockets"))
        .collect();
    assert_eq!(
        sockets,
        [
            "istio_tcp_sockets_open{reporter=\"destination\"} 1",
            "istio_tcp_sockets_open{reporter=\"source\"} 0"
        ]
    );
    drop(two);
}

#[test]
fn early_refusals_count_by_reason_and_nothing_else() {
    let (observe, registry) = observed();
    observe.begin(Direction::Outbound, SRC, DST).refuse(Denial::NoRoute, &fmt::Error);
    observe.begin(Direction::Inbound, SRC, DST).refuse(Denial::Handshake, &fmt::Error);
    observe.begin(Direction::Inbound, SRC, DST).refuse(Denial::Handshake, &fmt::Error);
    drop(observe.begin(Direction::Inbound, SRC, DST));
    assert_eq!(
        samples(&observe, &registry),
        [
            "culvert_connections_denied_early_total{reason=\"abandoned\"} 1",
            "culvert_connections_denied_early_total{reason=\"handshake\"} 2",
            "culvert_connections_denied_early_total{reason=\"no_route\"} 1",
            "istio_build{component=\"ztunnel\",tag=\"0.1.0\"} 1",
        ]
    );
}

#[test]
fn label_values_are_escaped() {
    #[derive(Clone, Debug, PartialEq, Eq, Hash)]
    struct One(&'static str);
    impl EncodeLabelSet for One {
        fn encode(&self, encoder: &mut LabelSetEncoder<'_>) -> fmt::Result {
            label(encoder, "a", self.0)
        }
    }
    let cases = [
        ("plain", "plain"),
        ("q\"q", "q\\\"q"),
        ("b\\b", "b\\\\b"),
        ("n\nn", "n\\nn"),
        ("", "unknown"),
    ];
    for (value, want) in cases {
        let mut registry = Registry::default();
        let family = Family::<One, Counter>::default();
        family.get_or_create(&One(value)).inc();
        registry.register("x", "x", family);
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        assert!(text.contains(&format!("x_total{{a=\"{want}\"}} 1\n")), "{text}");
    }
}

#[test]
fn security_of_a_flow_is_a_label() {
    for (security, want) in
        [(SecurityPolicy::MutualTls, "mutual_tls"), (SecurityPolicy::Unknown, "unknown")]
    {
        let (observe, registry) = observed();
        observe.begin(Direction::Outbound, SRC, DST).open(Flow { security, ..flow() }).finish();
        let text = observe.encode(&registry).unwrap();
        assert!(text.contains(&format!("connection_security_policy=\"{want}\"")), "{text}");
    }
}

#[test]
fn a_closed_flow_is_held_no_longer() {
    let (observe, _registry) = observed();
    let record = observe.begin(Direction::Outbound, SRC, DST).open(flow());
    let transferred = Arc::downgrade(&record.transferred());
    record.finish();
    assert!(transferred.upgrade().is_none());
}

/// A flow from somebody whom the mesh does not know, and who says to be `workload`.
fn claimed(workload: &str) -> Flow {
    let claims =
        Claims { workload: workload.into(), namespace: "shop".into(), ..Claims::default() };
    let identity = flow().source.identity;
    Flow { source: Party { identity, claims: Some(Arc::new(claims)), workload: None }, ..flow() }
}

#[test]
fn what_an_unknown_source_says_of_itself_is_shown() {
    let (observe, registry) = observed();
    observe.begin(Direction::Inbound, SRC, DST).open(claimed("vm")).finish();
    let text = observe.encode(&registry).unwrap();
    let want = "source_workload=\"vm\",source_canonical_service=\"unknown\",\
        source_canonical_revision=\"unknown\",source_workload_namespace=\"shop\",\
        source_principal=\"spiffe://cluster.local/ns/shop/sa/web\"";
    assert!(text.contains(want), "{text}");
}

#[test]
fn sources_that_say_ever_new_things_do_not_grow_the_metrics() {
    let (observe, registry) = observed();
    let samples = |observe: &Observe| {
        let text = observe.encode(&registry).unwrap();
        text.lines().filter(|line| line.starts_with("istio_tcp_connections_opened_total")).count()
    };
    for number in 0..2 * claims::MOST {
        observe.begin(Direction::Inbound, SRC, DST).open(claimed(&number.to_string())).finish();
    }
    // One for all those that came too late.
    assert_eq!(samples(&observe), claims::MOST + 1);
    observe.begin(Direction::Inbound, SRC, DST).open(claimed("0")).finish();
    assert_eq!(samples(&observe), claims::MOST + 1);
}
