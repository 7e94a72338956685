//! How errors are shown at the edges of every stage: each cause once, joined by `: `.

use std::error::Error;

/// `error` and its causes in one line.
pub fn chain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text.replace('\n', " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_are_joined_in_one_line() {
        #[derive(Debug, thiserror::Error)]
        #[error("open x")]
        struct Open(#[source] std::io::Error);
        let error = Open(std::io::Error::other("no\nluck"));
        assert_eq!(chain(&error), "open x: no luck");
    }
}
