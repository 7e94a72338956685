//! Who this node says it is to the control plane.

use std::collections::BTreeMap;
use std::fmt;

use culvert_proto::envoy::config::core::v3::Node;
use prost_types::value::Kind;
use prost_types::{ListValue, Struct, Value};

/// This node, as the first message of a stream describes it.
#[derive(Clone, Debug, Default)]
pub struct NodeIdentity {
    /// The proxy's own address; part of its id.
    pub ip: String,
    /// The proxy's own pod.
    pub pod: String,
    /// That pod's namespace.
    pub namespace: String,
    /// The node.
    pub node: String,
    /// What else the control plane may want to know, by key without `ISTIO_META_`.
    pub metadata: BTreeMap<String, String>,
    /// The same for values that are not texts.
    pub structured: BTreeMap<String, serde_json::Value>,
}

/// The id of a node's proxy: kind, address, pod and domain (Istio's form).
impl fmt::Display for NodeIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ip, pod, namespace, .. } = self;
        write!(f, "ztunnel~{ip}~{pod}.{namespace}~{namespace}.svc.cluster.local")
    }
}

impl NodeIdentity {
    pub(super) fn message(&self) -> Node {
        let text = |text: &str| Value { kind: Some(Kind::StringValue(text.to_owned())) };
        let ips = ListValue { values: vec![text(&self.ip)] };
        let own = [
            ("NAME", text(&self.pod)),
            ("NAMESPACE", text(&self.namespace)),
            ("INSTANCE_IPS", Value { kind: Some(Kind::ListValue(ips)) }),
            ("NODE_NAME", text(&self.node)),
        ];
        let texts = self.metadata.iter().map(|(key, value)| (key.clone(), text(value)));
        let structured = self.structured.iter().map(|(key, value)| (key.clone(), from_json(value)));
        // What the proxy knows of itself is not overridden from outside.
        let own = own.map(|(key, value)| (key.to_owned(), value));
        let fields = texts.chain(structured).chain(own).collect();
        Node { id: self.to_string(), metadata: Some(Struct { fields }), ..Node::default() }
    }
}

/// The same value as protobuf has it. The JSON that a parser gives is not deep.
fn from_json(json: &serde_json::Value) -> Value {
    use serde_json::Value as Json;
    let kind = match json {
        Json::Null => Kind::NullValue(0),
        Json::Bool(value) => Kind::BoolValue(*value),
        // Protobuf has no other numbers.
        Json::Number(number) => Kind::NumberValue(number.as_f64().unwrap_or_default()),
        Json::String(text) => Kind::StringValue(text.clone()),
        Json::Array(values) => {
            Kind::ListValue(ListValue { values: values.iter().map(from_json).collect() })
        }
        Json::Object(fields) => {
            let fields = fields.iter().map(|(key, value)| (key.clone(), from_json(value)));
            Kind::StructValue(Struct { fields: fields.collect() })
        }
    };
    Value { kind: Some(kind) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_described_in_the_form_of_istio() {
        let identity = NodeIdentity {
            ip: "10.0.0.1".into(),
            pod: "culvert-x".into(),
            namespace: "istio-system".into(),
            node: "n1".into(),
            metadata: [("CLUSTER_ID", "c"), ("NAME", "somebody else")]
                .map(|(key, value)| (key.to_owned(), value.to_owned()))
                .into(),
            structured: [("N".to_owned(), serde_json::json!({ "a": [1, "b", null, true] }))].into(),
        };
        let message = identity.message();
        assert_eq!(
            message.id,
            "ztunnel~10.0.0.1~culvert-x.istio-system~istio-system.svc.cluster.local"
        );
        let fields = message.metadata.expect("is given").fields;
        let text = |key: &str| match &fields[key].kind {
            Some(Kind::StringValue(text)) => text.clone(),
            other => panic!("{key} is {other:?}"),
        };
        assert_eq!(
            ["NAME", "NAMESPACE", "NODE_NAME", "CLUSTER_ID"].map(text),
            ["culvert-x", "istio-system", "n1", "c"]
        );
        let Some(Kind::StructValue(structured)) = &fields["N"].kind else {
            panic!("{:?} is no struct", fields["N"]);
        };
        let Some(Kind::ListValue(list)) = &structured.fields["a"].kind else {
            panic!("{structured:?} has no list");
        };
        let kinds: Vec<_> = list.values.iter().map(|value| value.kind.clone().unwrap()).collect();
        let text = Kind::StringValue("b".into());
        assert_eq!(
            kinds,
            [Kind::NumberValue(1.0), text, Kind::NullValue(0), Kind::BoolValue(true)]
        );
        assert_eq!(fields.len(), 6);
    }
}
