use std::io;

use super::*;

#[test]
fn an_error_is_told_with_its_causes() {
    #[derive(Debug, thiserror::Error)]
    #[error("dial 10.0.0.2:15008")]
    struct Dial(#[source] io::Error);
    let error = Dial(io::Error::from(io::ErrorKind::ConnectionRefused));
    assert_eq!(chain(&error), "dial 10.0.0.2:15008: connection refused");
    assert_eq!(chain(&fmt::Error), fmt::Error.to_string());
}
