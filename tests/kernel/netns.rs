//! A network namespace that looks like an enrolled pod's: addresses, routes, rules and settings.

use std::{fs, process::Command, thread};

use nix::sched::{CloneFlags, unshare};

/// The pod's IPv4 address.
pub(crate) const OWN_V4: &str = "10.0.0.7";
/// The pod's IPv6 address.
pub(crate) const OWN_V6: &str = "fd00::7";

const COMMANDS: &[&str] = &[
    "link set lo up",
    "link add eth0 type veth peer name peer0",
    "addr add 10.0.0.7/24 dev eth0",
    "addr add fd00::7/64 dev eth0 nodad",
    "link set eth0 up",
    "link set peer0 up",
    // Nobody answers there, but packets leave.
    "neigh add 10.0.0.1 lladdr 02:00:00:00:00:01 dev eth0 nud permanent",
    "neigh add fd00::1 lladdr 02:00:00:00:00:01 dev eth0 nud permanent",
    "route add default via 10.0.0.1 dev eth0",
    "-6 route add default via fd00::1 dev eth0",
    "-4 rule add fwmark 0x111/0xfff lookup 111",
    "-6 rule add fwmark 0x111/0xfff lookup 111",
    "-4 rule add fwmark 0x53a/0xfff lookup 111",
    "-6 rule add fwmark 0x53a/0xfff lookup 111",
    "-4 route add local default dev lo src 10.0.0.7 table 111",
    "-6 route add local default dev lo src fd00::7 table 111",
];

const SETTINGS: &[&str] =
    &["net/ipv4/tcp_fwmark_accept", "net/ipv4/fwmark_reflect", "net/ipv6/fwmark_reflect"];

/// Runs `work` on a thread in a new namespace, which ends with the thread and its sockets.
pub(crate) fn in_new(work: impl FnOnce() + Send) {
    let outcome = thread::scope(|scope| {
        let pod = || {
            unshare(CloneFlags::CLONE_NEWNET).unwrap();
            for command in COMMANDS {
                ip(command);
            }
            for setting in SETTINGS {
                fs::write(format!("/proc/sys/{setting}"), "1").unwrap();
            }
            work();
        };
        scope.spawn(pod).join()
    });
    if let Err(panic) = outcome {
        std::panic::resume_unwind(panic);
    }
}

/// Runs `ip` in the namespace of the calling thread.
pub(crate) fn ip(command: &str) {
    let output = Command::new("ip").args(command.split(' ')).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "ip {command}: {errors}");
}
