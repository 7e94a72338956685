//! How an event is written as one line of the log; which events are, and where lines go, is the subscriber's.
//!
//! Contract: both forms are those of the reference proxy, which log pipelines parse.

use std::fmt::{self, Write as _};

use serde_json::Value;
use time::OffsetDateTime;
use time::macros::format_description;
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, FormattedFields};
use tracing_subscriber::registry::LookupSpan;

/// The form of a log line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogLine {
    /// `time level target[:span{fields}] message key=value …`, separated by tabs and the pairs by blanks. Texts are
    /// quoted, what only has a display form is not.
    #[default]
    Plain,
    /// One object: `level`, `time`, `scope`, the fields in their order, `message`.
    Json,
}

impl<S, N> FormatEvent<S, N> for LogLine
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'w> FormatFields<'w> + 'static,
{
    fn format_event(
        &self,
        ctx: &FmtContext<'_, S, N>,
        mut line: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let metadata = event.metadata();
        let level = metadata.level().as_str().to_ascii_lowercase();
        let time = now()?;
        let spans =
            ctx.event_scope().into_iter().flat_map(tracing_subscriber::registry::Scope::from_root);
        let spans = spans.map(|span| {
            let extensions = span.extensions();
            let fields =
                extensions.get::<FormattedFields<N>>().map_or("", |fields| fields.fields.as_str());
            (span.name(), fields.to_owned())
        });
        match self {
            Self::Plain => {
                let mut parts = Plain::default();
                event.record(&mut parts);
                write!(line, "{time}\t{level}\t{}", metadata.target())?;
                for (name, fields) in spans {
                    write!(line, ":{name}{{{fields}}}")?;
                }
                writeln!(line, "\t{}\t{}", parts.message, parts.fields)
            }
            Self::Json => {
                let mut parts = Json::default();
                event.record(&mut parts);
                write!(
                    line,
                    "{{\"level\":\"{level}\",\"time\":\"{time}\",\"scope\":{}",
                    quoted(metadata.target())
                )?;
                write!(line, "{}", parts.fields)?;
                for (name, fields) in spans {
                    write!(line, ",{}:{}", quoted(name), quoted(&fields))?;
                }
                writeln!(line, ",\"message\":{}}}", quoted(&parts.message))
            }
        }
    }
}

/// RFC 3339 with microseconds, UTC.
fn now() -> Result<String, fmt::Error> {
    let format =
        format_description!("[year]-[month]-[day]T[hour]:[minute]:[second].[subsecond digits:6]Z");
    OffsetDateTime::now_utc().format(&format).map_err(|_never| fmt::Error)
}

fn quoted(text: &str) -> Value {
    Value::String(text.to_owned())
}

#[derive(Default)]
struct Plain {
    message: String,
    fields: String,
}

impl Plain {
    fn push(&mut self, field: &Field, value: fmt::Arguments<'_>) {
        if field.name() == "message" {
            self.message = value.to_string();
            return;
        }
        let separator = if self.fields.is_empty() { "" } else { " " };
        // Writing to a String cannot fail.
        let _infallible = write!(self.fields, "{separator}{}={value}", field.name());
    }
}

impl Visit for Plain {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.push(field, format_args!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "message" {
            self.push(field, format_args!("{value}"));
        } else {
            self.push(field, format_args!("{value:?}"));
        }
    }
}

#[derive(Default)]
struct Json {
    message: String,
    /// Each with a comma before it.
    fields: String,
}

impl Json {
    fn push(&mut self, field: &Field, value: &Value) {
        // Writing to a String cannot fail.
        let _infallible = write!(self.fields, ",{}:{value}", quoted(field.name()));
    }
}

impl Visit for Json {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.record_str(field, &format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "message" {
            value.clone_into(&mut self.message);
        } else {
            self.push(field, &quoted(value));
        }
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.push(field, &value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.push(field, &value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.push(field, &value.into());
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.push(field, &value.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Lines;

    #[track_caller]
    fn check(log: impl Fn(), plain: &str, json: &str) {
        for (form, want) in [(LogLine::Plain, plain), (LogLine::Json, json)] {
            let lines = Lines::default();
            lines.collect(form, &log);
            assert_eq!(lines.without_times(), [want]);
        }
    }

    #[test]
    fn values_are_written_by_their_kind() {
        check(
            || {
                tracing::warn!(
                    target: "t",
                    text = "a \"b\"\n",
                    shown = %"a b",
                    dumped = ?Some(1),
                    absent = None::<&str>,
                    whole = 7_u64,
                    less = -7_i64,
                    part = 0.5,
                    yes = true,
                    "hello {}",
                    "you"
                );
            },
            "TIME\twarn\tt\thello you\ttext=\"a \\\"b\\\"\\n\" shown=a b dumped=Some(1) whole=7 less=-7 part=0.5 yes=true",
            "{\"level\":\"warn\",\"time\":\"TIME\",\"scope\":\"t\",\"text\":\"a \\\"b\\\"\\n\",\"shown\":\"a b\",\
             \"dumped\":\"Some(1)\",\"whole\":7,\"less\":-7,\"part\":0.5,\"yes\":true,\"message\":\"hello you\"}",
        );
    }

    #[test]
    fn spans_are_named_from_the_outside_in() {
        check(
            || {
                let _outer = tracing::info_span!("outer", a = 1).entered();
                let _inner = tracing::info_span!("inner").entered();
                tracing::info!(target: "t", "hello");
            },
            "TIME\tinfo\tt:outer{a=1}:inner{}\thello\t",
            "{\"level\":\"info\",\"time\":\"TIME\",\"scope\":\"t\",\"outer\":\"a=1\",\"inner\":\"\",\"message\":\"hello\"}",
        );
    }
}
