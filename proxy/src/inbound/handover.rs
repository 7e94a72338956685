//! How a pod's application gets a connection from the mesh: from the client's address, or, where it takes connections for
//! others, by its loopback interface with a PROXY header.
//!
//! Which port it is, and whether policy allows it, is decided before.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use culvert_carry::{dial::Leg, proxy_protocol};
use culvert_mesh::{
    inbound::Target,
    service::Service,
    workload::{TunnelProtocol, Workload},
};
use tokio::{io::AsyncWriteExt as _, net::TcpStream, time::timeout};

use super::{
    TunnelEnds,
    failure::{Undeliverable, Undelivered},
};
use crate::context::PodContext;

/// What the application is told of a connection.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Handover {
    /// Nothing but the client's address, as the source of the connection.
    Plain,
    /// These bytes before all others.
    Proxy(Vec<u8>),
}

impl Handover {
    /// For a CONNECT to `authority`, which has been found to mean `target`.
    pub(super) fn new(
        local: &Workload,
        tunnel: &TunnelEnds,
        authority: &str,
        target: &Target,
    ) -> Result<Self, Undeliverable> {
        match local.application_tunnel {
            Some(app) if app.protocol == TunnelProtocol::Proxy => {
                let destination = destination(local, authority, target.service.as_deref())
                    .ok_or(Undeliverable::NoAddress)?;
                let identity = tunnel.identity.as_ref().map(ToString::to_string);
                let header = proxy_protocol::header(tunnel.peer, destination, identity.as_deref());
                Ok(Self::Proxy(header))
            }
            Some(_) | None => Ok(Self::Plain),
        }
    }

    /// Dials the application at `app`, and tells it what there is to tell.
    pub(super) async fn deliver(
        &self,
        ctx: &PodContext,
        app: SocketAddr,
        client: IpAddr,
    ) -> Result<TcpStream, Undelivered> {
        let header = match self {
            Self::Plain => return Ok(ctx.dialer.dial(app, Leg::Delivery { client }).await?),
            Self::Proxy(header) => header,
        };
        let loopback: IpAddr = match app.ip() {
            IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
        };
        let dst = SocketAddr::new(loopback, app.port());
        let mut stream = ctx.dialer.dial(dst, Leg::Loopback).await?;
        // It fits the socket's buffer, unless the application has made that a tiny one.
        let written = timeout(ctx.node.timeouts.dial, stream.write_all(header)).await;
        written.map_err(Into::into).flatten().map_err(Undelivered::Header)?;
        Ok(stream)
    }
}

/// What the client asked for: an address, or a virtual address of the service that it named, best of our own network and
/// of IPv4.
fn destination(local: &Workload, authority: &str, service: Option<&Service>) -> Option<SocketAddr> {
    if let Ok(address) = authority.parse() {
        return Some(address);
    }
    let (_, port) = authority.rsplit_once(':')?;
    let vips = &service?.vips;
    let best = vips.iter().min_by_key(|vip| (vip.network != local.network, vip.ip.is_ipv6()))?;
    Some(SocketAddr::new(best.ip, port.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use culvert_mesh::file;

    use super::*;

    /// The destination that is told for `authority` in a mesh whose service has these `vips`.
    #[track_caller]
    fn check(authority: &str, vips: &str, want: Option<&str>) {
        let text = format!(
            "workloads: [{{uid: a, name: a, namespace: n, serviceAccount: s, network: here, workloadIps: [10.0.0.1]}}]\n\
             services: [{{name: s, namespace: n, hostname: s.n, vips: [{vips}], ports: {{80: 8080}}}}]\n"
        );
        let snapshot = file::parse(std::path::Path::new("mesh.yaml"), &text).unwrap();
        let local = snapshot.find_by_address("here", &"10.0.0.1".parse().unwrap()).unwrap();
        let service = snapshot.services().next();
        let got = destination(local, authority, service.map(|s| &**s));
        assert_eq!(got, want.map(|want| want.parse().unwrap()), "{authority} of {vips}");
    }

    #[test]
    fn the_application_is_told_what_the_client_asked_for() {
        let vips = "'far/10.9.0.1', 'here/fd00::9', 'here/10.9.0.2'";
        check("10.1.2.3:80", vips, Some("10.1.2.3:80"));
        check("[fd00::1]:80", vips, Some("[fd00::1]:80"));
        check("s.n:80", vips, Some("10.9.0.2:80"));
        check("s.n:80", "'far/10.9.0.1', 'here/fd00::9'", Some("[fd00::9]:80"));
        check("s.n:80", "'far/10.9.0.1'", Some("10.9.0.1:80"));
        check("s.n:80", "", None);
        check("s.n:x", vips, None);
        check("s.n", vips, None);
    }
}
