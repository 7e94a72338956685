//! The addresses of the calling thread's network namespace.

use std::{collections::BTreeSet, io, net::IpAddr};

use nix::ifaddrs::getifaddrs;

/// Every address of every interface.
pub fn addresses() -> io::Result<BTreeSet<IpAddr>> {
    let addresses = getifaddrs()?.filter_map(|interface| {
        let address = interface.address?;
        let v4 = address.as_sockaddr_in().map(|address| IpAddr::V4(address.ip()));
        v4.or_else(|| address.as_sockaddr_in6().map(|address| IpAddr::V6(address.ip())))
    });
    Ok(addresses.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_among_them() {
        // A network that was just made has no address at all.
        let all = addresses().unwrap();
        assert!(all.is_empty() || all.iter().any(IpAddr::is_loopback), "{all:?}");
    }
}
