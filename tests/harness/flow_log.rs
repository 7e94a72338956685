//! Reads the access log: one JSON object a line, one line for each connection that ended or was refused.

use serde_json::{Map, Value};

/// One line of the access log.
#[derive(Debug, Clone)]
pub struct Flow {
    fields: Map<String, Value>,
}

/// Which side of the connection the node was on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From one of its pods.
    Outbound,
    /// To one of its pods.
    Inbound,
}

impl Flow {
    /// A field as text, numbers included; `None` where the line does not have it.
    pub fn field(&self, name: &str) -> Option<String> {
        match self.fields.get(name)? {
            Value::String(text) => Some(text.clone()),
            other => Some(other.to_string()),
        }
    }

    /// Whether a field is there and reads `value`.
    pub fn is(&self, name: &str, value: &str) -> bool {
        self.field(name).is_some_and(|field| field == value)
    }

    /// Whether it is about this direction.
    pub fn goes(&self, direction: Direction) -> bool {
        self.is(
            "direction",
            match direction {
                Direction::Outbound => "outbound",
                Direction::Inbound => "inbound",
            },
        )
    }

    /// Why the connection failed; `None` when it did not.
    pub fn error(&self) -> Option<String> {
        self.field("error")
    }

    /// Both ends' identities, which only a mutual-TLS connection has.
    pub fn identities(&self) -> Option<(String, String)> {
        Some((self.field("src.identity")?, self.field("dst.identity")?))
    }
}

/// The access log lines in `log`.
pub(crate) fn flows(log: &str) -> Vec<Flow> {
    log.lines()
        .filter_map(|line| serde_json::from_str::<Map<String, Value>>(line).ok())
        .filter(|line| line.get("scope").is_some_and(|scope| scope == "access"))
        .map(|fields| Flow { fields })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_lines_are_no_flows() {
        let log = concat!(
            "starting\n",
            "{\"level\":\"info\",\"scope\":\"app\",\"message\":\"ready\"}\n",
            "{\"scope\":\"access\",\"direction\":\"inbound\",\"bytes_sent\":3,\"error\":\"no\"}\n",
        );
        let flows = flows(log);
        let [flow] = flows.as_slice() else { panic!("{flows:?}") };
        assert!(flow.goes(Direction::Inbound));
        assert!(flow.is("bytes_sent", "3"));
        assert_eq!(flow.error().as_deref(), Some("no"));
        assert_eq!(flow.identities(), None);
    }
}
