//! Messages for tests.

use std::net::Ipv4Addr;

use hickory_proto::{
    op::{Edns, Message, OpCode, Query},
    rr::{DNSClass, Name, RData, Record, RecordType, rdata::A},
};

/// The name that all of these messages are about.
pub(crate) const NAME: &str = "www.example.org.";

/// An answer with an address for each `ttl`.
pub(crate) fn reply(ttls: &[u32]) -> Vec<u8> {
    let mut message = Message::response(7, OpCode::Query);
    let name = Name::from_ascii(NAME).unwrap();
    message.add_query(Query::query(name.clone(), RecordType::A));
    for ttl in ttls {
        let address = RData::A(A(Ipv4Addr::new(192, 0, 2, 9)));
        message.add_answer(Record::from_rdata(name.clone(), *ttl, address));
    }
    message.to_vec().unwrap()
}

/// A question.
pub(crate) fn query(name: &str, record_type: RecordType, edns: Option<u16>) -> Message {
    let mut message = Message::query();
    message.metadata.id = 7;
    message.metadata.recursion_desired = true;
    let mut query = Query::query(Name::from_ascii(name).unwrap(), record_type);
    query.set_query_class(DNSClass::IN);
    message.add_query(query);
    if let Some(payload) = edns {
        let mut edns = Edns::new();
        edns.set_max_payload(payload);
        message.set_edns(edns);
    }
    message
}
