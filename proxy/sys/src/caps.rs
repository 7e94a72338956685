//! The capabilities of this process, by name; what needs which is the caller's knowledge.

use std::{fs, io};

/// A capability, with its bit in `capabilities(7)` order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Capability {
    /// `CAP_NET_ADMIN`.
    NetAdmin = 12,
    /// `CAP_NET_RAW`.
    NetRaw = 13,
    /// `CAP_SYS_ADMIN`.
    SysAdmin = 21,
    /// `CAP_SYS_RESOURCE`.
    SysResource = 24,
    /// `CAP_BPF`, Linux 5.8.
    Bpf = 39,
}

impl Capability {
    /// The name as `capabilities(7)` and Kubernetes manifests spell it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::NetAdmin => "CAP_NET_ADMIN",
            Self::NetRaw => "CAP_NET_RAW",
            Self::SysAdmin => "CAP_SYS_ADMIN",
            Self::SysResource => "CAP_SYS_RESOURCE",
            Self::Bpf => "CAP_BPF",
        }
    }
}

/// The effective capabilities of the calling thread.
#[derive(Clone, Copy, Debug)]
pub struct Effective(u64);

impl Effective {
    /// Reads them from `/proc/thread-self/status`.
    pub fn read() -> io::Result<Self> {
        let status = fs::read_to_string("/proc/thread-self/status")?;
        parse(&status).map(Self).ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidData, "no CapEff in /proc/thread-self/status")
        })
    }

    /// Whether `capability` is among them. `CAP_SYS_ADMIN` stands in for `CAP_BPF`, as the kernel has it.
    pub const fn has(self, capability: Capability) -> bool {
        self.bit(capability)
            || (matches!(capability, Capability::Bpf) && self.bit(Capability::SysAdmin))
    }

    const fn bit(self, capability: Capability) -> bool {
        self.0 & (1 << capability as u32) != 0
    }
}

fn parse(status: &str) -> Option<u64> {
    let hex = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    u64::from_str_radix(hex.trim(), 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn effective_set_is_read_from_status() {
        assert_eq!(parse("Name:\tx\nCapEff:\t0000000000003000\n"), Some(0x3000));
        assert_eq!(parse("Name:\tx\n"), None);
        let caps = Effective(0x3000);
        assert!(caps.has(Capability::NetAdmin) && caps.has(Capability::NetRaw));
        assert!(!caps.has(Capability::Bpf));
    }

    #[test]
    fn sys_admin_implies_bpf() {
        assert!(Effective(1 << 21).has(Capability::Bpf));
    }
}
