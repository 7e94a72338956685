//! Answers that the node gives by itself.

use hickory_proto::{
    ProtoError,
    op::{Edns, Message, Metadata, ResponseCode},
    rr::{
        Name, RData, Record,
        rdata::{A, AAAA, CNAME, SOA},
    },
};

use super::{OWN_LIMIT, Request, Transport};
use crate::resolve::Answer;

/// How long clients may keep what the mesh says, in seconds.
const TTL: u32 = 30;
/// How long they may keep that a name has no address of a family, in seconds.
const NEGATIVE_TTL: u32 = 5;
/// As many addresses as a message has room for, and more.
const MOST_ADDRESSES: usize = 4096;
/// Where a header says that the message was cut short, and by which bit (RFC 1035 §4.1.1).
const FLAGS: usize = 2;
const TRUNCATED: u8 = 0x02;
/// EDNS's version that this speaks (RFC 6891 §6.1.3).
const EDNS_VERSION: u8 = 0;

impl Request {
    /// What the mesh says, in as many bytes as the client takes. `domain` is the cluster's.
    pub(crate) fn answer(
        &self,
        answer: &Answer,
        domain: &str,
        transport: Transport,
    ) -> Result<Vec<u8>, ProtoError> {
        if self.edns.as_ref().is_some_and(|edns| edns.version() > EDNS_VERSION) {
            return self.failure(ResponseCode::BADVERS);
        }
        let mut message = self.response(ResponseCode::NoError);
        message.metadata.authoritative = true;
        let asked = &self.query.name;
        let name = match &answer.canonical {
            Some(canonical) => {
                let canonical = Name::from_ascii(format!("{canonical}."))?;
                let alias = RData::CNAME(CNAME(canonical.clone()));
                message.add_answer(Record::from_rdata(asked.clone(), TTL, alias));
                canonical
            }
            None => asked.clone(),
        };
        let fixed = message.answers.len();
        let addresses = answer.addresses.iter().take(MOST_ADDRESSES);
        message.add_answers(addresses.map(|address| {
            let data = match address {
                std::net::IpAddr::V4(ip) => RData::A(A(*ip)),
                std::net::IpAddr::V6(ip) => RData::AAAA(AAAA(*ip)),
            };
            Record::from_rdata(name.clone(), TTL, data)
        }));
        if answer.addresses.is_empty() {
            message.add_authority(start_of_authority(&name, domain)?);
        }
        let limit = match transport {
            Transport::Udp => self.limit(transport).min(OWN_LIMIT),
            Transport::Tcp => u16::MAX,
        };
        fit(message, fixed, limit.into(), transport)
    }

    /// That the question cannot be answered.
    pub(crate) fn failure(&self, code: ResponseCode) -> Result<Vec<u8>, ProtoError> {
        self.response(code).to_vec()
    }

    fn response(&self, code: ResponseCode) -> Message {
        let mut metadata = Metadata::response_from_request(&self.metadata);
        metadata.recursion_available = true;
        metadata.response_code = code;
        let mut message = Message::response(metadata.id, metadata.op_code);
        message.metadata = metadata;
        message.add_query(self.query.clone());
        if let Some(asked) = &self.edns {
            let mut edns = Edns::new();
            edns.set_max_payload(OWN_LIMIT);
            edns.set_version(EDNS_VERSION);
            edns.set_dnssec_ok(asked.flags().dnssec_ok);
            message.set_edns(edns);
        }
        message
    }
}

/// Leaves out as many of the answers after the first `fixed` as must be. By UDP the client is told to ask by TCP; whoever
/// cannot still has some of them, and by TCP they are as many as a message can hold.
fn fit(
    mut message: Message,
    fixed: usize,
    limit: usize,
    transport: Transport,
) -> Result<Vec<u8>, ProtoError> {
    let fits = |message: &Message| {
        message.to_vec().ok().filter(|bytes| bytes.len() <= limit && !is_truncated(bytes))
    };
    if let Some(bytes) = fits(&message) {
        return Ok(bytes);
    }
    let all = message.answers.split_off(fixed);
    let mut with = |count: usize| {
        message.answers.truncate(fixed);
        message.answers.extend(all.iter().take(count).cloned());
        fits(&message)
    };
    let (mut few, mut many, mut best) = (0, all.len(), with(0));
    while few + 1 < many {
        let middle = few.midpoint(many);
        match with(middle) {
            Some(bytes) => (few, best) = (middle, Some(bytes)),
            None => many = middle,
        }
    }
    // A name and its alias alone can be longer than the shortest limit: then the question comes back.
    let mut bytes = best.map_or_else(|| message.truncate().to_vec(), Ok)?;
    if transport == Transport::Udp
        && let Some(flags) = bytes.get_mut(FLAGS)
    {
        *flags |= TRUNCATED;
    }
    Ok(bytes)
}

fn is_truncated(bytes: &[u8]) -> bool {
    bytes.get(FLAGS).is_some_and(|flags| flags & TRUNCATED != 0)
}

/// Says for how long the absence of records holds (RFC 2308 §3).
fn start_of_authority(name: &Name, domain: &str) -> Result<Record, ProtoError> {
    let cluster = Name::from_ascii(format!("{domain}."))?;
    let apex = if cluster.zone_of(name) { cluster } else { name.clone() };
    // A long name has no room for another label; the records do not have to exist.
    let within = |label| apex.prepend_label(label).unwrap_or_else(|_too_long| apex.clone());
    let soa = SOA::new(within("ns"), within("hostmaster"), 1, 7200, 1800, 86400, NEGATIVE_TTL);
    Ok(Record::from_rdata(apex, NEGATIVE_TTL, RData::SOA(soa)))
}
