//! Counters by kind that somebody else keeps, read at each scrape; what the kinds mean is their keeper's.

use std::fmt;

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric as _},
    metrics::{MetricType, counter::ConstCounter},
};

/// Reads the counters.
pub trait ReadKinds: Send + Sync + 'static {
    /// How often each kind happened since the process started.
    fn read_kinds(&self) -> Vec<(&'static str, u64)>;
}

impl<F: Fn() -> Vec<(&'static str, u64)> + Send + Sync + 'static> ReadKinds for F {
    fn read_kinds(&self) -> Vec<(&'static str, u64)> {
        self()
    }
}

/// `<name>_total{kind}`.
pub struct Kinds<R> {
    name: &'static str,
    help: &'static str,
    read: R,
}

impl<R: ReadKinds> Kinds<R> {
    /// A collector over `read`, to be given to `Registry::register_collector`.
    pub fn new(name: &'static str, help: &'static str, read: R) -> Self {
        Self { name, help, read }
    }
}

impl<R> fmt::Debug for Kinds<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kinds").field("name", &self.name).finish_non_exhaustive()
    }
}

impl<R: ReadKinds> Collector for Kinds<R> {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let kinds = self.read.read_kinds();
        if kinds.is_empty() {
            return Ok(());
        }
        let mut family =
            encoder.encode_descriptor(self.name, self.help, None, MetricType::Counter)?;
        for (kind, count) in kinds {
            ConstCounter::new(count).encode(family.encode_family(&[("kind", kind)])?)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::{encoding::text::encode, registry::Registry};

    use super::*;

    #[test]
    fn each_kind_is_a_label() {
        let mut registry = Registry::default();
        let read = || vec![("rule", 0), ("route", 7)];
        registry.register_collector(Box::new(Kinds::new("repairs", "What was put back.", read)));
        registry.register_collector(Box::new(Kinds::new("none", "Nothing.", Vec::new)));
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        let want = "\
            # HELP repairs What was put back.\n\
            # TYPE repairs counter\n\
            repairs_total{kind=\"rule\"} 0\n\
            repairs_total{kind=\"route\"} 7\n\
            # EOF\n";
        assert_eq!(text, want);
    }
}
