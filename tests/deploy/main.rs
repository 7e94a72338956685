//! What is in `deploy`: every combination of the chart's options is valid and means what it promises.

#![cfg(test)]
#![forbid(unsafe_code)]

mod chart;
