//! Checks that one direction of a TCP stream is nothing but TLS records (RFC 8446 §5.1).

/// The records of one direction, fed segment by segment.
#[derive(Debug, Default)]
pub(crate) struct TlsRecords {
    next: Option<u32>,
    header: Vec<u8>,
    left: usize,
    count: usize,
    violation: Option<String>,
}

impl TlsRecords {
    /// A stream whose SYN had this sequence number.
    pub(crate) fn from_syn(sequence: u32) -> Self {
        Self { next: Some(sequence.wrapping_add(1)), ..Self::default() }
    }

    /// Complete records so far.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// The first thing that was not TLS.
    pub(crate) fn violation(&self) -> Option<&str> {
        self.violation.as_deref()
    }

    /// Takes in a segment; one that was seen before is skipped.
    pub(crate) fn take_in(&mut self, sequence: u32, payload: &[u8]) {
        if payload.is_empty() || self.violation.is_some() {
            return;
        }
        let Some(next) = self.next else {
            self.violation = Some("payload without a SYN".to_owned());
            return;
        };
        let behind = next.wrapping_sub(sequence);
        if behind > u32::MAX / 2 {
            self.violation = Some(format!("a gap of {} bytes", sequence.wrapping_sub(next)));
            return;
        }
        let Some(fresh) = usize::try_from(behind).ok().and_then(|seen| payload.get(seen..)) else {
            return;
        };
        // Streams of the scenarios stay below 4 GiB, so the cut cannot lose anything.
        self.next = Some(next.wrapping_add(u32::try_from(fresh.len()).unwrap_or(u32::MAX)));
        self.parse(fresh);
    }

    fn parse(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            if self.left > 0 {
                let (_, rest) = bytes.split_at(self.left.min(bytes.len()));
                self.left -= bytes.len() - rest.len();
                self.count += usize::from(self.left == 0);
                bytes = rest;
                continue;
            }
            let (head, rest) = bytes.split_at((5 - self.header.len()).min(bytes.len()));
            self.header.extend_from_slice(head);
            bytes = rest;
            if let [kind, major, minor, high, low] = *self.header.as_slice() {
                let length = usize::from(u16::from_be_bytes([high, low]));
                // change_cipher_spec to application_data; 2^14 + 256 is the longest record.
                if !(20..=23).contains(&kind) || major != 3 || minor > 4 || length > 16_640 {
                    self.violation = Some(format!("record header {:02x?}", self.header));
                    return;
                }
                self.header.clear();
                self.left = length;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(segments: &[(u32, &[u8])], want: Result<usize, &str>) {
        let mut records = TlsRecords::from_syn(99);
        for (sequence, payload) in segments {
            records.take_in(*sequence, payload);
        }
        match want {
            Ok(count) => assert_eq!((records.count(), records.violation()), (count, None)),
            Err(part) => assert!(records.violation().unwrap().contains(part), "{records:?}"),
        }
    }

    #[test]
    fn records_may_be_cut_anywhere() {
        check(&[(100, &[22, 3]), (102, &[1, 0, 2, 7]), (106, &[7, 23, 3, 3, 0, 1, 9])], Ok(2));
    }

    #[test]
    fn a_retransmitted_segment_counts_once() {
        check(&[(100, &[22, 3, 1, 0, 1, 7]), (100, &[22, 3, 1, 0, 1, 7])], Ok(1));
    }

    #[test]
    fn anything_else_is_a_violation() {
        check(&[(100, b"GET / HTTP/1.1\r\n")], Err("record header"));
    }

    #[test]
    fn a_missing_segment_is_a_violation() {
        check(&[(101, &[22, 3, 1, 0, 1, 7])], Err("a gap of 1 bytes"));
    }
}
