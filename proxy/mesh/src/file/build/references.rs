//! What records say of each other by name, to be looked up once all records are known.

use std::sync::Arc;

use serde_saphyr::Spanned;

use super::{Fault, fault, gateway, raw};
use crate::{
    snapshot::Snapshot,
    workload::{Destination, Gateway},
};

#[derive(Default)]
pub(super) struct References(Vec<Reference>);

struct Reference {
    line: u64,
    field: String,
    to: To,
}

enum To {
    Destination(Destination),
    Policy(Arc<str>),
}

impl References {
    pub(super) fn gateway(&mut self, field: String, raw: raw::Gateway) -> Gateway {
        let line = raw.destination.referenced.line();
        let gateway = gateway(raw);
        let to = To::Destination(gateway.destination.clone());
        self.0.push(Reference { line, field: format!("{field}.destination"), to });
        gateway
    }

    pub(super) fn policy(&mut self, field: String, key: Spanned<Arc<str>>) -> Arc<str> {
        let to = To::Policy(Arc::clone(&key.value));
        self.0.push(Reference { line: key.referenced.line(), field, to });
        key.value
    }

    /// # Errors
    /// The first reference that leads nowhere.
    pub(super) fn check(self, snapshot: &Snapshot) -> Result<(), Fault> {
        for Reference { line, field, to } in self.0 {
            let (what, found) = match &to {
                To::Destination(destination) => (
                    format!("no service or workload is {destination}"),
                    snapshot.find_destination(destination).is_some(),
                ),
                To::Policy(key) => {
                    (format!("no policy is called {key}"), snapshot.find_policy(key).is_some())
                }
            };
            if !found {
                return Err(fault(line, field, format!("{what}; add it or remove the reference")));
            }
        }
        Ok(())
    }
}
