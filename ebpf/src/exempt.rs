// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Is this connection the proxy's delivery to the application, which inbound capture must let through?
//!
//! The mark alone is no proof, since a pod may set it: `mark_own` asks only about sockets of its own cgroup.

use culvert_abi::{Flow, MARK_DELIVERY};

use crate::endpoint::Connection;

/// Whether a socket of the proxy with this mark delivers to an application.
#[inline(always)]
pub const fn is_delivery(mark: u32) -> bool {
    crate::own_bits(mark) == MARK_DELIVERY
}

/// The key under which the pod will look up a connection that arrives there.
#[inline(always)]
pub const fn arriving(at_pod: &Connection) -> Flow {
    Flow {
        remote: at_pod.remote.addr,
        local: at_pod.local.addr,
        remote_port: at_pod.remote.port,
        local_port: at_pod.local.port,
    }
}

/// The same key from the dialling socket, whose local end is the pod's remote one.
#[inline(always)]
pub const fn dialled(at_proxy: &Connection) -> Flow {
    arriving(&Connection { local: at_proxy.remote, remote: at_proxy.local })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::endpoint::{Endpoint, v4_mapped};

    #[test]
    fn both_ends_build_the_same_key() {
        let client = Endpoint { addr: v4_mapped(u32::from_ne_bytes([192, 0, 2, 7])), port: 40001 };
        let app = Endpoint { addr: v4_mapped(u32::from_ne_bytes([10, 0, 0, 7])), port: 8080 };
        let proxy = Connection { local: client, remote: app };
        let pod = Connection { local: app, remote: client };
        assert_eq!(dialled(&proxy), arriving(&pod));
        assert_eq!(arriving(&pod).local_port, 8080);
    }

    #[test]
    fn a_delivery_is_known_by_culverts_bits_alone() {
        assert!(is_delivery(0xffff_f53a));
        assert!(!is_delivery(0x53b));
        assert!(!is_delivery(0x111));
    }
}
