//! The bench in its smallest size, so that it does not fall behind what it measures.

use std::process::Command;

use culvert_tests::require;

#[test]
fn the_bench_compares_everything_it_promises_to() {
    if !require::mesh() || !require::tool("iptables-restore", &["--version"]) {
        return;
    }
    let output = Command::new(env!("CARGO_BIN_EXE_bench")).arg("--quick").output().unwrap();
    let report = String::from_utf8_lossy(&output.stdout);
    let complaints = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{report}\n{complaints}");
    assert_eq!(
        report.lines().filter(|line| line.starts_with("## ")).count(),
        10,
        "{report}\n{complaints}"
    );
}
