use rand::{SeedableRng as _, rngs::StdRng};

use super::*;

const TRACE: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

fn headers(name: &HeaderName, values: &[&[u8]]) -> HeaderMap {
    let mut map = HeaderMap::new();
    for value in values {
        map.append(name, HeaderValue::from_bytes(value).unwrap());
    }
    map
}

fn full() -> Baggage {
    Baggage {
        cluster: "east".to_owned(),
        namespace: "shop".to_owned(),
        kind: WorkloadKind::CronJob,
        workload: "cart-v1".to_owned(),
        service: "cart".to_owned(),
        version: "v1".to_owned(),
        region: "r1".to_owned(),
        zone: "z1".to_owned(),
    }
}

#[test]
fn baggage_is_written_as_peers_expect_it() {
    assert_eq!(
        full().to_value().unwrap(),
        "k8s.cluster.name=east,k8s.namespace.name=shop,k8s.cronjob.name=cart-v1,service.name=cart,\
         service.version=v1,cloud.region=r1,cloud.availability_zone=z1"
    );
}

#[test]
fn empty_baggage_has_no_header() {
    assert_eq!(Baggage::default().to_value(), None);
}

#[test]
fn baggage_survives_a_round_trip_whatever_state_holds() {
    for name in ["cart", "a,b=c;d", "100%", "new\r\nline", "\"q\\", "ünï", " space ", "\u{7f}"] {
        let sent = Baggage { workload: name.to_owned(), ..full() };
        let value = sent.to_value().unwrap();
        assert_eq!(value.to_str().unwrap().split(',').count(), 7, "{name:?}");
        let received = Baggage::parse(&headers(&BAGGAGE, &[value.as_bytes()]));
        let hides_control = name.contains(char::is_control);
        assert_eq!(received == sent, !hides_control, "{name:?} became {received:?}");
        assert!(!received.workload.contains(char::is_control), "{name:?}");
    }
}

#[test]
fn foreign_baggage_is_read_leniently() {
    let long = format!("service.name={}", "x".repeat(257));
    let cases: [(&[&[u8]], Baggage); 7] = [
        (&[b"k8s.pod.name=p , service.name = s ;prop=1"], {
            let (workload, service) = ("p".to_owned(), "s".to_owned());
            Baggage { kind: WorkloadKind::Pod, workload, service, ..Baggage::default() }
        }),
        (&[b"service.name=a", b"cloud.region=b"], {
            Baggage { service: "a".to_owned(), region: "b".to_owned(), ..Baggage::default() }
        }),
        (&[b"service.name=a=b"], Baggage { service: "a".to_owned(), ..Baggage::default() }),
        (&[b"service.name=%zz"], Baggage { service: "%zz".to_owned(), ..Baggage::default() }),
        (&[b"service.name=,,=,unknown=1,novalue"], Baggage::default()),
        (&[b"service.name=\xff"], Baggage::default()),
        (&[long.as_bytes()], Baggage::default()),
    ];
    for (values, want) in cases {
        assert_eq!(Baggage::parse(&headers(&BAGGAGE, values)), want, "{values:?}");
    }
}

#[test]
fn forwarded_is_written_as_peers_expect_it() {
    let client = |text: &str| text.parse().ok();
    for (client, host, want) in [
        (client("10.0.0.1:80"), "a.b.svc", Some("for=\"10.0.0.1:80\";host=a.b.svc")),
        (client("[2001:db8::1]:80"), "", Some("for=\"[2001:db8::1]:80\"")),
        (None, "*.example.com", Some("host=*.example.com")),
        (None, "evil;for=\"1\"\r\n", None),
    ] {
        let value = Forwarded { client, host: host.to_owned() }.to_value();
        assert_eq!(value.as_ref().map(HeaderValue::as_bytes), want.map(str::as_bytes), "{host}");
    }
}

#[test]
fn foreign_forwarded_is_read_leniently() {
    let client: Option<SocketAddr> = "10.0.0.1:80".parse().ok();
    let cases: [(&[u8], Option<SocketAddr>, &str); 6] = [
        (b"for=\"10.0.0.1:80\";host=a.b", client, "a.b"),
        (b"For=10.0.0.1:80; Host=\"a\"", client, "a"),
        (b"host=a;host=b, host=c", None, "a"),
        (b"for=unknown;proto=http", None, ""),
        (b"host=\xff", None, ""),
        (b"host=;host=a b", None, ""),
    ];
    for (value, client, host) in cases {
        let got = Forwarded::parse(&headers(&FORWARDED, &[value]));
        assert_eq!(got, Forwarded { client, host: host.to_owned() }, "{value:?}");
    }
}

#[test]
fn traceparent_is_strict() {
    let longer = format!("{TRACE}-more").replacen("00", "cc", 1);
    for (text, good) in [
        (TRACE, true),
        (longer.as_str(), true),
        (&TRACE.replacen("00", "cc", 1), true),
        (&format!("{TRACE}-more"), false),
        (&format!("{TRACE}more").replacen("00", "cc", 1), false),
        (&TRACE.replacen("00", "ff", 1), false),
        (&TRACE.to_uppercase(), false),
        (&TRACE.replace('-', "0"), false),
        (&"0".repeat(55), false),
        (&"-".repeat(55), false),
        ("00-00000000000000000000000000000000-b7ad6b7169203331-01", false),
        ("00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01", false),
        ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0", false),
        ("", false),
    ] {
        let parsed = TraceParent::parse(&headers(&TRACEPARENT, &[text.as_bytes()]));
        assert_eq!(parsed.is_some(), good, "{text}");
    }
}

#[test]
fn two_traceparents_are_none() {
    let map = headers(&TRACEPARENT, &[TRACE.as_bytes(), TRACE.as_bytes()]);
    assert_eq!(TraceParent::parse(&map), None);
}

#[test]
fn a_generated_traceparent_parses_back() {
    let mut rng = StdRng::seed_from_u64(7);
    for _ in 0..100 {
        let made = TraceParent::random(&mut rng);
        let map = headers(&TRACEPARENT, &[made.to_value().unwrap().as_bytes()]);
        assert_eq!(TraceParent::parse(&map), Some(made));
    }
}

#[test]
fn no_bytes_make_a_parser_panic() {
    let seeds = [
        full().to_value().unwrap().as_bytes().to_vec(),
        b"for=\"10.0.0.1:80\";host=a.b.svc".to_vec(),
        TRACE.as_bytes().to_vec(),
        vec![b'0'; 55],
    ];
    let mut rng = StdRng::seed_from_u64(1);
    for round in 0..100_000 {
        let mut bytes = seeds[round % seeds.len()].clone();
        for _ in 0..rng.random_range(1..8) {
            let at = rng.random_range(0..bytes.len());
            match rng.random_range(0..3) {
                0 => bytes[at] = rng.random(),
                1 => bytes.insert(at, rng.random()),
                _ => bytes.truncate(at.max(1)),
            }
        }
        let Ok(value) = HeaderValue::from_bytes(&bytes) else { continue };
        for name in [&BAGGAGE, &FORWARDED, &TRACEPARENT] {
            let map = headers(name, &[value.as_bytes()]);
            let baggage = Baggage::parse(&map);
            let Baggage { cluster, namespace, workload, service, version, region, zone, .. } =
                &baggage;
            for text in [cluster, namespace, workload, service, version, region, zone] {
                assert!(text.len() <= MAX_VALUE && !text.contains(char::is_control), "{text:?}");
            }
            baggage.to_value();
            Forwarded::parse(&map).to_value();
            TraceParent::parse(&map).and_then(TraceParent::to_value);
        }
    }
}
