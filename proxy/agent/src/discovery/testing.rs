//! Folders like those of `/proc`, whose networks are real.

use std::{
    fs,
    io::Write as _,
    os::{
        fd::{AsFd as _, AsRawFd as _},
        unix::fs::symlink,
    },
    process::{Command, Stdio},
};

use culvert_sys::netns::Netns;
use tempfile::TempDir;

/// A node's `/proc`, whose process 1 is in this process's network.
pub(crate) struct Node {
    pub(crate) proc: TempDir,
    pub(crate) networks: Vec<Netns>,
}

impl Node {
    pub(crate) fn new() -> Self {
        let node = Self { proc: tempfile::tempdir().unwrap(), networks: Vec::new() };
        node.process(1, "0::/init.scope", 0, "/proc/self/ns/net");
        node
    }

    /// A network with `address` in it.
    pub(crate) fn network(&mut self, address: &str) -> String {
        let netns = std::thread::spawn(|| {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
            Netns::current().unwrap()
        })
        .join()
        .unwrap();
        let commands = format!("link set lo up\naddress add {address} dev lo\n");
        let status = netns.run(|| {
            let mut ip = Command::new("ip").args(["-batch", "-"]).stdin(Stdio::piped()).spawn()?;
            ip.stdin.take().unwrap().write_all(commands.as_bytes())?;
            ip.wait()
        });
        assert!(status.unwrap().unwrap().success());
        let path = format!("/proc/self/fd/{}", netns.as_fd().as_raw_fd());
        self.networks.push(netns);
        path
    }

    /// A process, by its lines in `cgroup`, when it started, and the path of its network.
    pub(crate) fn process(&self, pid: u32, cgroup: &str, started: u64, network: &str) {
        let folder = self.proc.path().join(pid.to_string());
        fs::create_dir_all(folder.join("ns")).unwrap();
        fs::write(folder.join("cgroup"), format!("{cgroup}\n")).unwrap();
        let stat = format!("{pid} (a) b) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 {started} 0 0\n");
        fs::write(folder.join("stat"), stat).unwrap();
        symlink(network, folder.join("ns/net")).unwrap();
    }
}

/// Whether this process may; says so where not.
pub(crate) fn may_make_networks() -> bool {
    let may = nix::unistd::geteuid().is_root();
    if !may {
        println!("skipped: needs root to make a network namespace");
    }
    may
}
