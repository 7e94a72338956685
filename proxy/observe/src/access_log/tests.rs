use std::time::Duration;

use culvert_mesh::reason::ResponseFlag;
use prometheus_client::registry::Registry;
use tokio::time::advance;

use crate::testing::{Lines, Unknown, flow, plain};
use crate::{Denial, Direction, FlowRecord, LogLine, Observe, Pending};

fn begin(direction: Direction) -> Pending {
    let observe = Observe::register(&mut Registry::default(), "0.1.0");
    observe.begin(direction, ([10, 0, 0, 1], 40000).into(), ([10, 96, 0, 1], 80).into())
}

async fn carried(direction: Direction) -> FlowRecord {
    let pending = begin(direction);
    advance(Duration::from_micros(12_900)).await;
    let record = pending.open(flow());
    record.transferred().add_request(84);
    record.transferred().add_response(386);
    record
}

/// What `end` logs.
fn logged(form: LogLine, end: impl FnOnce()) -> Vec<String> {
    let lines = Lines::default();
    lines.collect(form, end);
    lines.without_times()
}

const ENDS: &str = "src.addr=10.0.0.1:40000 src.workload=\"web-1\" src.namespace=\"shop\" \
    src.identity=\"spiffe://cluster.local/ns/shop/sa/web\" src.cluster=\"Kubernetes\" dst.addr=10.0.0.2:15008 \
    dst.hbone_addr=10.0.0.2:5432 dst.service=\"db.shop.svc.cluster.local\" dst.workload=\"db-1\" \
    dst.namespace=\"shop\" dst.identity=\"spiffe://cluster.local/ns/shop/sa/db\" dst.cluster=\"Kubernetes\"";

// Contract.
#[tokio::test(start_paused = true)]
async fn an_outbound_flow_that_ended_well_is_one_line() {
    let record = carried(Direction::Outbound).await;
    let want = format!(
        "TIME\tinfo\taccess\tconnection complete\t{ENDS} direction=\"outbound\" bytes_sent=84 bytes_recv=386 \
         duration=\"12ms\""
    );
    assert_eq!(logged(LogLine::Plain, || record.finish()), [want]);
}

// Contract.
#[tokio::test(start_paused = true)]
async fn an_inbound_flow_sends_what_its_pod_answered() {
    let record = carried(Direction::Inbound).await;
    let want = format!(
        "TIME\tinfo\taccess\tconnection complete\t{ENDS} direction=\"inbound\" bytes_sent=386 bytes_recv=84 \
         duration=\"12ms\""
    );
    assert_eq!(logged(LogLine::Plain, || record.finish()), [want]);
}

// Contract.
#[tokio::test(start_paused = true)]
async fn a_flow_that_failed_is_an_error_with_its_reason() {
    let record = carried(Direction::Outbound).await;
    let error = std::io::Error::other("no way");
    let want = format!(
        "TIME\terror\taccess\tconnection complete\t{ENDS} direction=\"outbound\" bytes_sent=84 bytes_recv=386 \
         duration=\"12ms\" error=\"no way\""
    );
    assert_eq!(logged(LogLine::Plain, || record.fail(ResponseFlag::Connect, &error)), [want]);
}

#[tokio::test(start_paused = true)]
async fn a_flow_that_was_cut_is_one_line_too() {
    let record = carried(Direction::Outbound).await;
    let lines = logged(LogLine::Plain, || drop(record));
    assert_eq!(lines.len(), 1);
    assert!(
        lines[0].ends_with("duration=\"12ms\" error=\"connection cut before its end\""),
        "{lines:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_panic_of_the_flow_leaves_its_line() {
    let record = carried(Direction::Outbound).await;
    let lines = logged(LogLine::Plain, || {
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _record = record;
            std::panic::resume_unwind(Box::new("as a bug would"));
        }));
        assert!(outcome.is_err());
    });
    assert_eq!(lines.len(), 1);
}

// Contract.
#[tokio::test(start_paused = true)]
async fn what_is_not_known_is_left_out() {
    let record = begin(Direction::Inbound).open(plain(Unknown::Source));
    let want = "TIME\tinfo\taccess\tconnection complete\tsrc.addr=10.0.0.1:40000 dst.addr=10.0.0.2:5432 \
        dst.workload=\"db-1\" dst.namespace=\"shop\" dst.cluster=\"Kubernetes\" direction=\"inbound\" bytes_sent=0 \
        bytes_recv=0 duration=\"0ms\"";
    assert_eq!(logged(LogLine::Plain, || record.finish()), [want]);
}

#[tokio::test(start_paused = true)]
async fn identities_that_tls_did_not_prove_are_left_out() {
    let mut flow = flow();
    flow.security = crate::SecurityPolicy::Unknown;
    let record = begin(Direction::Outbound).open(flow);
    let lines = logged(LogLine::Plain, || record.finish());
    assert!(!lines[0].contains("identity"), "{lines:?}");
}

#[tokio::test(start_paused = true)]
async fn opening_is_told_to_those_who_debug() {
    let pending = begin(Direction::Outbound);
    let mut record = None;
    let lines = logged(LogLine::Plain, || record = Some(pending.open(flow())));
    assert_eq!(
        lines,
        [format!("TIME\tdebug\taccess\tconnection opened\t{ENDS} direction=\"outbound\"")]
    );
}

// Contract.
#[tokio::test(start_paused = true)]
async fn an_early_refusal_is_a_warning() {
    let ends = "src.addr=10.0.0.1:40000 dst.addr=10.96.0.1:80";
    let pending = begin(Direction::Inbound);
    let error = std::io::Error::other("peer sent no certificate");
    assert_eq!(
        logged(LogLine::Plain, || pending.refuse(Denial::Handshake, &error)),
        [format!(
            "TIME\twarn\taccess\tconnection failed\t{ends} direction=\"inbound\" error=\"peer sent no certificate\""
        )]
    );
    let pending = begin(Direction::Outbound);
    assert_eq!(
        logged(LogLine::Plain, || drop(pending)),
        [format!(
            "TIME\twarn\taccess\tconnection failed\t{ends} direction=\"outbound\" error=\"ended before it was decided\""
        )]
    );
}

// Contract.
#[tokio::test(start_paused = true)]
async fn the_json_form_has_the_same_keys_in_the_same_order() {
    let record = carried(Direction::Outbound).await;
    let want = "{\"level\":\"info\",\"time\":\"TIME\",\"scope\":\"access\",\"src.addr\":\"10.0.0.1:40000\",\
        \"src.workload\":\"web-1\",\"src.namespace\":\"shop\",\
        \"src.identity\":\"spiffe://cluster.local/ns/shop/sa/web\",\"src.cluster\":\"Kubernetes\",\
        \"dst.addr\":\"10.0.0.2:15008\",\"dst.hbone_addr\":\"10.0.0.2:5432\",\
        \"dst.service\":\"db.shop.svc.cluster.local\",\"dst.workload\":\"db-1\",\"dst.namespace\":\"shop\",\
        \"dst.identity\":\"spiffe://cluster.local/ns/shop/sa/db\",\"dst.cluster\":\"Kubernetes\",\
        \"direction\":\"outbound\",\"bytes_sent\":84,\"bytes_recv\":386,\"duration\":\"12ms\",\
        \"message\":\"connection complete\"}";
    assert_eq!(logged(LogLine::Json, || record.finish()), [want]);
}

#[tokio::test(start_paused = true)]
async fn the_trace_comes_last() {
    let flow = crate::Flow { trace_id: Some(0xab), ..flow() };
    let lines = logged(LogLine::Plain, || begin(Direction::Inbound).open(flow).finish());
    assert!(lines[0].ends_with(" trace_id=000000000000000000000000000000ab"), "{lines:?}");
}
