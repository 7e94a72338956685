//! Redirection by iptables, as Istio's in-pod mode installs it: what culvert's own steering is compared with.
//!
//! Only for IPv4, which all load uses, and without the rules for DNS and probes, which it does not.

use std::{
    io::Write as _,
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, ensure};
use culvert_tests::netns::Netns;

/// Where connections that the pod makes are redirected to.
pub(crate) const OUTBOUND: u16 = 15001;

/// What the proxy marks is not redirected; what it delivers with the client's address is answered to the proxy.
const RULES: &str = "\
*mangle
-A PREROUTING -m mark --mark 0x539/0xfff -j CONNMARK --set-xmark 0x111/0xfff
-A OUTPUT -m connmark --mark 0x111/0xfff -j CONNMARK --restore-mark --nfmask 0xffffffff --ctmask 0xffffffff
COMMIT
*nat
-A PREROUTING ! -d 127.0.0.1/32 -p tcp -m tcp ! --dport 15008 -m mark ! --mark 0x539/0xfff -j REDIRECT --to-ports 15006
-A OUTPUT -p tcp -m mark --mark 0x111/0xfff -j ACCEPT
-A OUTPUT ! -d 127.0.0.1/32 ! -o lo -p tcp -m mark ! --mark 0x539/0xfff -j REDIRECT --to-ports 15001
COMMIT
";

/// Redirects the TCP connections of the pod in `netns`; the rules go away with it.
pub(crate) fn install(netns: &Netns) -> Result<()> {
    netns.run(|| restore(RULES)).with_context(|| format!("redirect {}", netns.name()))?;
    netns.ip("rule add fwmark 0x111/0xfff pref 32764 lookup 100\n\
         route add local 0.0.0.0/0 dev lo table 100\n")
}

fn restore(rules: &str) -> Result<()> {
    let mut child = Command::new("iptables-restore")
        .arg("--wait=10")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .context("start iptables-restore (is iptables installed?)")?;
    child.stdin.take().context("iptables-restore has no stdin")?.write_all(rules.as_bytes())?;
    let output = child.wait_with_output()?;
    ensure!(
        output.status.success(),
        "iptables-restore: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(())
}
