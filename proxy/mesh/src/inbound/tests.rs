use std::path::Path;

use super::*;
use crate::file;

const MESH: &str = "
workloads:
- {uid: web, name: web, namespace: n, workloadIps: [10.0.0.1, 'fd00::1'], protocol: HBONE,
   services: {n/web.n: {}, n/own.n: {90: 9091}}}
- {uid: behind, name: behind, namespace: n, workloadIps: [10.0.0.2], protocol: HBONE,
   waypoint: {destination: n/wp.n}}
- {uid: wp, name: wp, namespace: n, workloadIps: [10.0.0.9], protocol: HBONE, services: {n/wp.n: {}}}
- {uid: by-ip, name: by-ip, namespace: n, workloadIps: [10.0.0.8], protocol: HBONE}
- {uid: demux, name: demux, namespace: n, workloadIps: [10.0.0.7], protocol: HBONE,
   applicationTunnel: {protocol: PROXY, port: 15088}}
- {uid: inline, name: inline, namespace: n, workloadIps: [10.0.0.6], protocol: HBONE,
   applicationTunnel: {protocol: PROXY}}
- {uid: looped, name: looped, namespace: n, workloadIps: [10.0.0.5], protocol: HBONE,
   applicationTunnel: {port: 15006}}
services:
- {name: web, namespace: n, hostname: web.n, vips: [/10.1.0.1], ports: {80: 8080, 81: 0, 82: 15008}}
- {name: own, namespace: n, hostname: own.n, ports: {90: 9090}}
- {name: other, namespace: m, hostname: other.m, vips: [/10.1.0.3], ports: {80: 8080}}
- {name: guarded, namespace: n, hostname: guarded.n, vips: [/10.1.0.2], ports: {80: 8081},
   waypoint: {destination: n/wp.n}}
- {name: by-ip, namespace: n, hostname: by-ip.n, vips: [/10.1.0.4], ports: {80: 8082},
   waypoint: {destination: /10.0.0.8}}
- {name: wp, namespace: n, hostname: wp.n, ports: {15008: 15008}}
";

#[track_caller]
fn check(local: &str, authority: &str, want: Result<&str, (u16, &str)>) {
    let mesh = file::parse(Path::new("mesh.yaml"), MESH).unwrap();
    let local = mesh.find_workload(local).unwrap();
    let tunnel = SocketAddr::new(local.addresses[0], HBONE_PORT);
    let got = target(&mesh, local, tunnel, authority, &[15006]);
    let got = got
        .map(|Target { app, service }| {
            let service = service.map_or_else(|| "-".into(), |s| s.name.to_string());
            format!("{app} {service}")
        })
        .map_err(|refusal| (refusal.status(), refusal.to_string()));
    assert_eq!(got, want.map(Into::into).map_err(|(status, text)| (status, text.into())));
}

#[test]
fn own_addresses_choose_the_port() {
    check("web", "10.0.0.1:8080", Ok("10.0.0.1:8080 web"));
    check("web", "10.0.0.1:9091", Ok("10.0.0.1:9091 own"));
    check("web", "10.0.0.1:1234", Ok("10.0.0.1:1234 -"));
    check("web", "[::ffff:10.0.0.1]:8080", Ok("10.0.0.1:8080 web"));
}

#[test]
fn foreign_addresses_are_refused() {
    let mismatch = |ip: &str| format!("ip mismatch: authority names {ip} in a tunnel to 10.0.0.1");
    // Not even another address of the same workload: the tunnel was opened to one of them.
    for (authority, ip) in [
        ("10.0.0.2:80", "10.0.0.2"),
        ("[fd00::1]:80", "fd00::1"),
        ("10.1.0.1:80", "10.1.0.1"),
        ("127.0.0.1:80", "127.0.0.1"),
        ("192.0.2.1:80", "192.0.2.1"),
    ] {
        check("web", authority, Err((400, &mismatch(ip))));
    }
}

#[test]
fn host_names_choose_the_port_through_their_service() {
    check("web", "web.n:80", Ok("10.0.0.1:8080 web"));
    check("web", "WEB.n:80", Ok("10.0.0.1:8080 web"));
    check("web", "own.n:90", Ok("10.0.0.1:9091 own"));
    check("web", "web.n:83", Err((503, "service web.n has no port 83 on this workload")));
    check("web", "web.n:81", Err((503, "service web.n has no port 81 on this workload")));
    check("web", "other.m:80", Err((400, "workload web does not serve other.m")));
    check("web", "nowhere.n:80", Err((503, "no service is called nowhere.n")));
}

#[test]
fn waypoints_are_asked_for_what_is_behind_them() {
    check("wp", "10.0.0.2:80", Ok("10.0.0.9:80 -"));
    check("wp", "10.1.0.2:80", Ok("10.0.0.9:80 -"));
    check("wp", "guarded.n:80", Ok("10.0.0.9:8081 guarded"));
    check("wp", "web.n:80", Err((400, "workload wp does not serve web.n")));
    check("by-ip", "10.1.0.4:80", Ok("10.0.0.8:80 -"));
    let mismatch = "ip mismatch: authority names 10.1.0.3 in a tunnel to 10.0.0.9";
    check("wp", "10.1.0.3:80", Err((400, mismatch)));
}

#[test]
fn application_tunnels_take_everything_on_their_port() {
    check("demux", "192.0.2.1:80", Ok("10.0.0.7:15088 -"));
    check("demux", "web.n:80", Ok("10.0.0.7:15088 web"));
    check("demux", "web.n:81", Ok("10.0.0.7:15088 web"));
    check("inline", "192.0.2.1:80", Ok("10.0.0.6:80 -"));
    check("inline", "web.n:81", Err((503, "service web.n has no port 81 on this workload")));
}

#[test]
fn ports_of_the_proxy_are_refused() {
    check("web", "10.0.0.1:15008", Err((503, "port 15008 belongs to the proxy itself")));
    check("web", "10.0.0.1:15006", Err((503, "port 15006 belongs to the proxy itself")));
    check("web", "web.n:82", Err((503, "port 15008 belongs to the proxy itself")));
    check("looped", "192.0.2.1:80", Err((503, "port 15006 belongs to the proxy itself")));
    check("web", "10.0.0.1:15001", Ok("10.0.0.1:15001 -"));
}

#[test]
fn malformed_authorities_are_refused() {
    let long = format!("{}:80", "a".repeat(64));
    let longer = format!("{}a:80", "a.".repeat(127));
    for authority in [
        "",
        ":",
        ":80",
        "10.0.0.1",
        "10.0.0.1:",
        "10.0.0.1:0",
        "10.0.0.1:65536",
        "10.0.0.1:+80",
        "10.0.0.1:080",
        "10.0.0.1:80 ",
        " 10.0.0.1:80",
        "10.0.0.1:80/",
        "10.0.0.1:80:80",
        "010.0.0.1:80",
        "10.0.1:80",
        "10.0.0.256:80",
        "u@10.0.0.1:80",
        "u:p@10.0.0.1:80",
        "fd00::1:80",
        "[fd00::1]",
        "[fd00::1]80",
        "[fd00::1:80",
        "fd00::1]:80",
        "[[fd00::1]]:80",
        "[fd00::1%eth0]:80",
        "[10.0.0.1]:80",
        "http://web.n:80",
        "web..n:80",
        ".web.n:80",
        "web.n.:80",
        "w\u{e9}b.n:80",
        "web_n*:80",
        "we b.n:80",
        "web.n:8\n0",
        &long,
        &longer,
    ] {
        let shown: String = authority.chars().take(64).collect();
        let want =
            format!("authority {shown:?} is not of the form ip:port, [ip]:port or host:port");
        check("web", authority, Err((400, &want)));
    }
}

#[test]
fn forwarded_hosts_tell_services_of_one_port_apart() {
    let mesh = file::parse(Path::new("mesh.yaml"), MESH).unwrap();
    let web = mesh.find_workload("web").unwrap();
    let name = |port, host| attribute(&mesh, web, port, host).map(|s| &*s.name);
    assert_eq!(name(8080, Some("own.n")), Some("own"));
    assert_eq!(name(8080, Some("OWN.n")), Some("own"));
    // A hint at a service of another workload is worth nothing.
    assert_eq!(name(8080, Some("other.m")), Some("web"));
    assert_eq!(name(9091, None), Some("own"));
    assert_eq!(name(1, None), None);
}
