use std::{path::Path, time::Duration};

use culvert_mesh::file;
use tokio::time::timeout;

use super::*;

const POLICY: &str = "policies:\n\
    - {name: nobody, namespace: shop, scope: WorkloadSelector, action: Allow}\n";

/// The pod's record, which names these policies.
fn workload(policies: &str) -> String {
    format!(
        "workloads:\n- {{uid: a, name: a, namespace: shop, serviceAccount: web, protocol: HBONE, \
         workloadIps: [10.0.0.1], authorizationPolicies: [{policies}]}}\n"
    )
}

fn snapshot(text: &str) -> Snapshot {
    file::parse(Path::new("mesh.yaml"), text).unwrap()
}

fn pod() -> PodRef {
    PodRef { name: "a".into(), namespace: "shop".into(), service_account: "web".into() }
}

fn connection() -> policy::Connection {
    policy::Connection {
        source: [10, 0, 0, 2].into(),
        identity: None,
        destination: ([10, 0, 0, 1], 80).into(),
    }
}

#[test]
fn the_pods_record_as_of_now_decides() {
    let pod = pod();
    let state = State::new(snapshot(&workload("")));
    assert!(Permit::check(&state, &pod, connection()).is_ok());
    state.replace_file(&snapshot(&(workload("shop/nobody") + POLICY)));
    let denied = Permit::check(&state, &pod, connection()).err().unwrap();
    assert!(matches!(denied, Denied::AtOnce(Denial::NoneAllowed)), "{denied}");
    state.replace_file(&Snapshot::default());
    assert!(matches!(Permit::check(&state, &pod, connection()), Err(Denied::Gone)));
}

#[tokio::test(start_paused = true)]
async fn a_permit_is_withdrawn_by_the_change_that_denies_and_by_no_other() {
    let pod = pod();
    let state = State::new(snapshot(&workload("")));
    let mut permit = Permit::check(&state, &pod, connection()).ok().unwrap();
    state.replace_file(&snapshot(&(workload("") + POLICY)));
    assert!(timeout(Duration::from_secs(1), permit.withdrawn()).await.is_err());
    state.replace_file(&snapshot(&(workload("shop/nobody") + POLICY)));
    let denied = timeout(Duration::from_secs(1), permit.withdrawn()).await.unwrap();
    assert!(matches!(denied, Denied::Later(Denial::NoneAllowed)), "{denied}");
}

#[tokio::test(start_paused = true)]
async fn a_permit_ends_with_the_pods_record() {
    let pod = pod();
    let state = State::new(snapshot(&workload("")));
    let mut permit = Permit::check(&state, &pod, connection()).ok().unwrap();
    state.replace_file(&Snapshot::default());
    let denied = timeout(Duration::from_secs(1), permit.withdrawn()).await.unwrap();
    assert!(matches!(denied, Denied::Gone), "{denied}");
}
