//! Answers of name servers: whether one belongs to a question, and how long it may be kept.

use std::time::Duration;

use hickory_proto::{
    op::{Header, MessageType, ResponseCode},
    rr::{Name, RecordType},
    serialize::binary::{BinDecodable as _, BinDecoder, DecodeError},
};

use super::{HEADER, Request};

/// Nothing is kept for longer: a server's mistake ends one day.
const LONGEST: Duration = Duration::from_hours(1);
/// The same for answers that there is nothing (RFC 2308 §5).
const LONGEST_NEGATIVE: Duration = Duration::from_mins(5);

/// Whether `reply` answers `request` as it was sent, with the identifier `id` (RFC 5452 §9.1).
pub(crate) fn accepts(request: &Request, id: u16, reply: &[u8]) -> bool {
    let mut decoder = BinDecoder::new(reply);
    let Ok(Header { metadata, counts }) = Header::read(&mut decoder) else { return false };
    if metadata.message_type != MessageType::Response
        || metadata.id != id
        || metadata.op_code != request.metadata.op_code
    {
        return false;
    }
    let asked = request.bytes.get(HEADER..request.question_end);
    let (Some(asked), Some(told)) = (asked, reply.get(HEADER..request.question_end)) else {
        // A server that could not read the question does not repeat it.
        return counts.queries == 0 && is_failure(metadata.response_code);
    };
    let (Some((asked, kind)), Some((told, told_kind))) =
        (asked.split_last_chunk::<4>(), told.split_last_chunk::<4>())
    else {
        return false;
    };
    match counts.queries {
        0 => is_failure(metadata.response_code),
        1 => kind == told_kind && asked.eq_ignore_ascii_case(told),
        _ => false,
    }
}

fn is_failure(code: ResponseCode) -> bool {
    matches!(
        code,
        ResponseCode::FormErr
            | ResponseCode::ServFail
            | ResponseCode::NotImp
            | ResponseCode::Refused
    )
}

/// Turns the denial of a name into one of the records that were asked for: the mesh knows that the name exists.
pub(crate) fn exists(reply: &mut [u8]) {
    let denies = |header: &[u8; HEADER]| header[3] & 0x0f == 3 && header[6..8] == [0, 0];
    if let Some(header) = reply.first_chunk_mut::<HEADER>().filter(|header| denies(header)) {
        header[3] &= 0xf0;
    }
}

/// For how long an answer may be kept, and where in it that is said.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Life {
    /// From when it was received.
    pub(crate) span: Duration,
    /// Where its records say how many seconds they have left.
    ttls: Box<[u16]>,
}

/// Reads how long an accepted answer may be kept. `None`: not at all.
pub(crate) fn life(reply: &[u8]) -> Option<Life> {
    read_life(reply).ok().flatten()
}

fn read_life(reply: &[u8]) -> Result<Option<Life>, DecodeError> {
    let mut decoder = BinDecoder::new(reply);
    let Header { metadata, counts } = Header::read(&mut decoder)?;
    let denied = metadata.response_code == ResponseCode::NXDomain;
    if metadata.truncation || !(denied || metadata.response_code == ResponseCode::NoError) {
        return Ok(None);
    }
    for _ in 0..counts.queries {
        Name::read(&mut decoder)?;
        decoder.read_slice(4)?;
    }
    let (answers, authorities) = (usize::from(counts.answers), usize::from(counts.authorities));
    let records = answers + authorities + usize::from(counts.additionals);
    let (mut ttls, mut shortest, mut authority) = (Vec::new(), u32::MAX, None);
    for number in 0..records {
        Name::read(&mut decoder)?;
        let kind = RecordType::read(&mut decoder)?;
        decoder.read_slice(2)?;
        let at = decoder.index();
        let ttl = decoder.read_u32()?.unverified(/* any number is one of seconds */);
        let len = decoder.read_u16()?.unverified(/* the decoder checks it */);
        let data = decoder.read_slice(len.into())?.unverified(/* looked at below, if at all */);
        if kind == RecordType::OPT {
            // Its first byte is the rest of the response code (RFC 6891 §6.1.3).
            if ttl >> 24 != 0 {
                return Ok(None);
            }
            continue;
        }
        let Ok(at) = u16::try_from(at) else { return Ok(None) };
        ttls.push(at);
        shortest = shortest.min(ttl);
        let in_authority = (answers..answers + authorities).contains(&number);
        if kind == RecordType::SOA && in_authority {
            let minimum = data.last_chunk().map_or(0, |bytes| u32::from_be_bytes(*bytes));
            authority = Some(ttl.min(minimum));
        }
    }
    let negative = denied || answers == 0;
    // One that names no authority may be the fault of a server on the way (RFC 2308 §5).
    let (seconds, longest) = match (negative, authority) {
        (true, None) => return Ok(None),
        (true, Some(minimum)) => (shortest.min(minimum), LONGEST_NEGATIVE),
        (false, minimum) => (shortest.min(minimum.unwrap_or(u32::MAX)), LONGEST),
    };
    // The highest bit means none at all (RFC 2181 §8).
    let seconds = if seconds > i32::MAX.unsigned_abs() { 0 } else { seconds };
    let span = Duration::from_secs(seconds.into()).min(longest);
    Ok((!span.is_zero()).then(|| Life { span, ttls: ttls.into() }))
}

/// Takes `passed` off what the records of a kept answer have left.
pub(crate) fn age(reply: &mut [u8], life: &Life, passed: Duration) {
    let passed = u32::try_from(passed.as_secs()).unwrap_or(u32::MAX);
    for at in &life.ttls {
        let ttl = reply.get_mut(usize::from(*at)..).and_then(<[u8]>::first_chunk_mut::<4>);
        if let Some(ttl) = ttl {
            *ttl = u32::from_be_bytes(*ttl).saturating_sub(passed).to_be_bytes();
        }
    }
}
