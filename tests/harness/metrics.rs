//! Reads the `OpenMetrics` text of a node.

use std::collections::BTreeMap;

/// Samples of one scrape.
#[derive(Debug, Default)]
pub struct Metrics {
    samples: Vec<Sample>,
}

/// One line of a scrape.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// The sample's name, `_total` included.
    pub name: String,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Its value.
    pub value: f64,
}

impl Metrics {
    /// Parses a scrape; lines that are no samples are skipped.
    pub fn parse(text: &str) -> Self {
        Self { samples: text.lines().filter_map(sample).collect() }
    }

    /// All samples called `name` whose labels include `labels`.
    pub fn find<'a>(
        &'a self,
        name: &'a str,
        labels: &'a [(&'a str, &'a str)],
    ) -> impl Iterator<Item = &'a Sample> {
        self.samples.iter().filter(move |sample| {
            sample.name == name
                && labels
                    .iter()
                    .all(|(key, value)| sample.labels.get(*key).is_some_and(|v| v == value))
        })
    }

    /// The sum over [`Metrics::find`]; 0 where there are none, as counters without samples are left out.
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        self.find(name, labels).map(|sample| sample.value).sum()
    }
}

fn sample(line: &str) -> Option<Sample> {
    if line.starts_with('#') {
        return None;
    }
    let (name, labels, value) = if let Some((name, rest)) = line.split_once('{') {
        let (labels, value) = rest.rsplit_once('}')?;
        (name, parse_labels(labels)?, value)
    } else {
        let (name, value) = line.split_once(' ')?;
        (name, BTreeMap::new(), value)
    };
    let value = value.split_whitespace().next()?.parse().ok()?;
    Some(Sample { name: name.to_owned(), labels, value })
}

/// `key="value",…` with `\\`, `\"` and `\n` escaped in values.
fn parse_labels(text: &str) -> Option<BTreeMap<String, String>> {
    let mut labels = BTreeMap::new();
    let mut rest = text.chars().peekable();
    while rest.peek().is_some() {
        let key: String = rest.by_ref().take_while(|c| *c != '=').collect();
        if rest.next()? != '"' {
            return None;
        }
        let mut value = String::new();
        loop {
            match rest.next()? {
                '"' => break,
                '\\' => match rest.next()? {
                    'n' => value.push('\n'),
                    escaped => value.push(escaped),
                },
                plain => value.push(plain),
            }
        }
        labels.insert(key.trim_start_matches(',').to_owned(), value);
    }
    Some(labels)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# HELP a_total what\n# TYPE a counter\n\
        a_total{x=\"1\",y=\"q\\\"{}\"} 3\na_total{x=\"2\"} 4\nb 0.5\n# EOF\n";

    #[test]
    fn samples_are_found_by_part_of_their_labels() {
        let metrics = Metrics::parse(TEXT);
        assert!((metrics.sum("a_total", &[]) - 7.0).abs() < f64::EPSILON);
        assert!((metrics.sum("a_total", &[("x", "2")]) - 4.0).abs() < f64::EPSILON);
        assert!((metrics.sum("b", &[]) - 0.5).abs() < f64::EPSILON);
        assert!(metrics.sum("absent", &[]).abs() < f64::EPSILON);
    }

    #[test]
    fn label_values_are_unescaped() {
        let metrics = Metrics::parse(TEXT);
        let sample = metrics.find("a_total", &[("x", "1")]).next().unwrap();
        assert_eq!(sample.labels["y"], "q\"{}");
    }
}
