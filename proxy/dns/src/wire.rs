//! Messages: what a question says, what the mesh's answer to it looks like, and whether a server's answer is one.
//!
//! Questions and answers of others are passed on byte for byte; nothing here rewrites what it does not have to know.
//! Whom to ask is `forward`'s business, what to say `resolve`'s.

mod local;
mod reply;
#[cfg(test)]
mod tests;

use hickory_proto::{
    op::{Edns, Header, Message, MessageType, Metadata, OpCode, Query, ResponseCode},
    rr::{DNSClass, Name, RecordType},
    serialize::binary::{BinDecodable as _, BinDecoder},
};

pub(crate) use self::reply::{Life, accepts, age, exists, life};

/// Length of a message's header (RFC 1035 §4.1.1).
const HEADER: usize = 12;
/// What a client takes by UDP that does not say more (RFC 1035 §4.2.1).
const SMALLEST_LIMIT: u16 = 512;
/// The longest answer that the mesh gives by UDP, and says it takes.
const OWN_LIMIT: u16 = 4096;

/// How a message travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Transport {
    /// A datagram.
    Udp,
    /// A stream of messages, each after its length.
    Tcp,
}

impl Transport {
    /// Its name in lower case.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Udp => "udp",
            Self::Tcp => "tcp",
        }
    }
}

/// A question as it was received.
#[derive(Debug)]
pub(crate) struct Request {
    bytes: Vec<u8>,
    metadata: Metadata,
    query: Query,
    /// Where the question ends in `bytes`.
    question_end: usize,
    edns: Option<Edns>,
    /// Whether anyone may get the answer: nothing in it is about the client.
    plain: bool,
}

/// Why something is not answered as a question.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Unfit {
    /// It must not be answered at all: it is an answer itself, or too short to be anything.
    Ignore,
    /// The answer says what is wrong with it.
    Reject(Vec<u8>),
}

impl Request {
    /// Reads one message.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, Unfit> {
        let mut decoder = BinDecoder::new(bytes);
        let Ok(Header { metadata, counts }) = Header::read(&mut decoder) else {
            return Err(Unfit::Ignore);
        };
        // An answer to an answer would be answered.
        if metadata.message_type == MessageType::Response {
            return Err(Unfit::Ignore);
        }
        let reject = |code| Unfit::Reject(bare(&metadata, code));
        if let OpCode::Unknown(_) = metadata.op_code {
            return Err(reject(ResponseCode::NotImp));
        }
        if counts.queries != 1 {
            return Err(reject(ResponseCode::FormErr));
        }
        let query =
            Query::read(&mut decoder).map_err(|_unreadable| reject(ResponseCode::FormErr))?;
        let question_end = decoder.index();
        if uncompressed_name_end(bytes, HEADER) != question_end.checked_sub(4) {
            return Err(reject(ResponseCode::FormErr));
        }
        // What cannot be read may still be understood by the server that it is for.
        let whole = Message::from_vec(bytes).ok();
        let extra = usize::from(counts.additionals) + usize::from(counts.answers);
        let plain = whole.as_ref().is_some_and(|message| {
            let options = message.edns.as_ref().map(|edns| edns.options().as_ref().len());
            match options {
                None => extra == 0,
                Some(options) => extra == 1 && options == 0,
            }
        });
        let edns = whole.and_then(|message| message.edns);
        Ok(Self { bytes: bytes.to_owned(), metadata, query, question_end, edns, plain })
    }

    /// The whole message.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// An answer gets this question's identifier.
    pub(crate) fn adopt_id(&self, answer: &mut [u8]) {
        set_id(answer, self.metadata.id);
    }

    /// The message with another identifier.
    pub(crate) fn with_id(&self, id: u16) -> Vec<u8> {
        let mut bytes = self.bytes.clone();
        set_id(&mut bytes, id);
        bytes
    }

    /// What type of records it asks for.
    pub(crate) const fn record_type(&self) -> RecordType {
        self.query.query_type
    }

    /// The name that it asks about.
    pub(crate) const fn name(&self) -> &Name {
        &self.query.name
    }

    /// Whether it is for the server to say: nothing that a mesh has names for.
    pub(crate) fn is_for_server(&self) -> bool {
        self.metadata.op_code != OpCode::Query || self.query.query_class != DNSClass::IN
    }

    /// Whether many messages answer it.
    pub(crate) const fn is_transfer(&self) -> bool {
        matches!(self.query.query_type, RecordType::AXFR | RecordType::IXFR)
    }

    /// The name that it asks about as `resolve` takes it; `None` if no host can have it.
    pub(crate) fn host(&self) -> Option<String> {
        let plain = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
        let mut host = String::new();
        for label in &self.query.name {
            if !label.iter().all(plain) {
                return None;
            }
            if !host.is_empty() {
                host.push('.');
            }
            host.extend(label.iter().map(|byte| char::from(byte.to_ascii_lowercase())));
        }
        Some(host)
    }

    /// The longest answer that its sender takes.
    pub(crate) fn limit(&self, transport: Transport) -> u16 {
        match transport {
            Transport::Udp => self.edns.as_ref().map_or(0, Edns::max_payload).max(SMALLEST_LIMIT),
            Transport::Tcp => u16::MAX,
        }
    }

    /// What answers have to be kept apart by; `None` if none may be given to another question.
    pub(crate) fn cache_key(&self) -> Option<Box<[u8]>> {
        if !self.plain || self.metadata.op_code != OpCode::Query || self.is_transfer() {
            return None;
        }
        let question = self.bytes.get(HEADER..self.question_end)?;
        let (name, kind) = question.split_at_checked(question.len().checked_sub(4)?)?;
        let dnssec = self.edns.as_ref().is_some_and(|edns| edns.flags().dnssec_ok);
        let asked = [
            self.metadata.recursion_desired,
            self.metadata.checking_disabled,
            self.metadata.authentic_data,
            self.edns.is_some(),
            dnssec,
        ];
        // A length byte is none of a letter's, so that this changes letters only.
        let key = name.iter().map(u8::to_ascii_lowercase).chain(kind.iter().copied());
        Some(key.chain(asked.map(u8::from)).collect())
    }

    /// The question of an answer becomes this one: its identifier, and its name's capitals.
    pub(crate) fn adopt(&self, answer: &mut [u8]) {
        self.adopt_id(answer);
        let question = self.bytes.get(HEADER..self.question_end);
        if let Some((question, into)) = question.zip(answer.get_mut(HEADER..self.question_end)) {
            into.copy_from_slice(question);
        }
    }
}

/// An answer that is a header and no more.
fn bare(request: &Metadata, code: ResponseCode) -> Vec<u8> {
    let mut metadata = Metadata::response_from_request(request);
    metadata.response_code = code;
    let mut message = Message::response(metadata.id, metadata.op_code);
    message.metadata = metadata;
    message.to_vec().unwrap_or_default()
}

fn set_id(bytes: &mut [u8], id: u16) {
    if let Some(into) = bytes.first_chunk_mut() {
        *into = id.to_be_bytes();
    }
}

/// Where the name that begins at `start` ends, if no label of it is a pointer.
fn uncompressed_name_end(bytes: &[u8], start: usize) -> Option<usize> {
    let mut at = start;
    loop {
        match *bytes.get(at)? {
            0 => return Some(at + 1),
            len @ 1..=63 => at += usize::from(len) + 1,
            _ => return None,
        }
    }
}
