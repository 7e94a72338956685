//! Messages as bytes: those that are right, and those that somebody would like to be taken for such.

use std::{net::Ipv4Addr, time::Duration};

use hickory_proto::rr::{
    RData, Record,
    rdata::{A, SOA, opt::EdnsOption},
};
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};

use super::*;
use crate::{
    resolve::Answer,
    testing::{NAME, query, reply},
};

const DOMAIN: &str = "cluster.local";

fn request(message: &Message) -> Request {
    Request::parse(&message.to_vec().unwrap()).unwrap()
}

fn plain() -> Request {
    request(&query(NAME, RecordType::A, None))
}

fn addresses(count: u32) -> Answer {
    let address = |n| Ipv4Addr::from_bits(0x0a00_0000 + n).into();
    Answer { canonical: None, addresses: (0..count).map(address).collect() }
}

fn message(bytes: &[u8]) -> Message {
    Message::from_vec(bytes).unwrap()
}

#[track_caller]
fn rejects(bytes: &[u8], code: ResponseCode) {
    let Unfit::Reject(answer) = Request::parse(bytes).unwrap_err() else { panic!("ignored") };
    let answer = message(&answer);
    assert_eq!(answer.metadata.message_type, MessageType::Response);
    assert_eq!((answer.metadata.id, answer.metadata.response_code), (7, code));
}

#[test]
fn a_question_is_read() {
    let request = request(&query("Www.Example.ORG.", RecordType::AAAA, Some(1232)));
    assert_eq!(request.host().as_deref(), Some("www.example.org"));
    assert_eq!(request.record_type(), RecordType::AAAA);
    assert_eq!(request.limit(Transport::Udp), 1232);
    assert_eq!(request.limit(Transport::Tcp), u16::MAX);
    assert!(!request.is_for_server() && !request.is_transfer());
    assert_eq!(plain().limit(Transport::Udp), 512);
}

#[test]
fn what_is_no_question_is_ignored_or_rejected() {
    let good = query(NAME, RecordType::A, None).to_vec().unwrap();
    for len in 0..HEADER {
        assert_eq!(Request::parse(&good[..len]).unwrap_err(), Unfit::Ignore);
    }
    assert_eq!(Request::parse(&reply(&[1])).unwrap_err(), Unfit::Ignore);
    for len in HEADER..good.len() {
        rejects(&good[..len], ResponseCode::FormErr);
    }
    let mut none = good.clone();
    none[5] = 0;
    rejects(&none, ResponseCode::FormErr);
    let mut two = good.clone();
    two[5] = 2;
    rejects(&two, ResponseCode::FormErr);
    let mut stateful = good.clone();
    stateful[2] |= 6 << 3;
    rejects(&stateful, ResponseCode::NotImp);
    // A name that points into the header.
    let mut pointer = good[..HEADER].to_vec();
    pointer.extend([0xc0, 0, 0, 1, 0, 1]);
    rejects(&pointer, ResponseCode::FormErr);
}

#[test]
fn what_no_host_is_called_is_for_the_server() {
    for name in [r"a\.b.example.", "*.example."] {
        assert_eq!(request(&query(name, RecordType::A, None)).host(), None, "{name}");
    }
    let mut bytes = query("aab.example.", RecordType::A, None).to_vec().unwrap();
    for byte in *b" /\0\xc3" {
        bytes[HEADER + 2] = byte;
        assert_eq!(Request::parse(&bytes).unwrap().host(), None, "{byte}");
    }
    assert_eq!(request(&query("_a-1._tcp.b.", RecordType::A, None)).host().unwrap(), "_a-1._tcp.b");
    assert_eq!(request(&query(".", RecordType::NS, None)).host().unwrap(), "");
    let mut chaos = query(NAME, RecordType::TXT, None);
    chaos.queries[0].set_query_class(DNSClass::CH);
    assert!(request(&chaos).is_for_server());
    let mut update = query(NAME, RecordType::SOA, None);
    update.metadata.op_code = OpCode::Update;
    assert!(request(&update).is_for_server());
}

#[test]
fn the_meshs_answer_has_what_clients_expect() {
    let request = request(&query("Www.example.org.", RecordType::A, Some(1232)));
    let answer = request.answer(&addresses(2), DOMAIN, Transport::Udp).unwrap();
    let answer = message(&answer);
    let meta = answer.metadata;
    assert!(meta.authoritative && meta.recursion_available && meta.recursion_desired);
    assert!(!meta.truncation && !meta.authentic_data);
    assert_eq!((meta.id, meta.response_code), (7, ResponseCode::NoError));
    assert!(answer.queries[0].name.eq_case(&Name::from_ascii("Www.example.org.").unwrap()));
    let ttls: Vec<_> = answer.answers.iter().map(|record| record.ttl).collect();
    assert_eq!(ttls, [30, 30]);
    assert_eq!(answer.edns.unwrap().max_payload(), OWN_LIMIT);
    let without = plain().answer(&addresses(1), DOMAIN, Transport::Udp).unwrap();
    assert!(message(&without).edns.is_none());
}

#[test]
fn an_alias_comes_before_what_it_stands_for() {
    let answer = Answer { canonical: Some("api.test".to_owned()), ..addresses(1) };
    let answer = message(&plain().answer(&answer, DOMAIN, Transport::Udp).unwrap());
    let told: Vec<_> = answer.answers.iter().map(ToString::to_string).collect();
    assert_eq!(told, ["www.example.org. 30 IN CNAME api.test.", "api.test. 30 IN A 10.0.0.0"]);
}

#[test]
fn that_there_is_no_address_is_no_denial_of_the_name() {
    for (name, apex) in [("a.b.svc.cluster.local.", "cluster.local."), (NAME, NAME)] {
        let request = request(&query(name, RecordType::AAAA, None));
        let answer = message(&request.answer(&addresses(0), DOMAIN, Transport::Udp).unwrap());
        assert_eq!(answer.metadata.response_code, ResponseCode::NoError);
        assert!(answer.answers.is_empty());
        let [authority] = &answer.authorities[..] else { panic!("{answer}") };
        assert_eq!((authority.name.to_ascii().as_str(), authority.ttl), (apex, 5));
        let RData::SOA(soa) = &authority.data else { panic!("{authority}") };
        assert_eq!(soa.minimum, 5);
    }
}

#[test]
fn an_answer_is_cut_to_what_the_client_takes() {
    let answer = addresses(5000);
    for (edns, limit) in [(None, 512), (Some(100), 512), (Some(1232), 1232), (Some(65535), 4096)] {
        let request = request(&query(NAME, RecordType::A, edns));
        let bytes = request.answer(&answer, DOMAIN, Transport::Udp).unwrap();
        let message = message(&bytes);
        assert!(bytes.len() <= limit && bytes.len() + 16 > limit, "{} of {limit}", bytes.len());
        assert!(message.metadata.truncation);
        assert_eq!(message.edns.is_some(), edns.is_some());
        let some = request.answer(&addresses(20), DOMAIN, Transport::Udp).unwrap();
        assert!(!self::message(&some).metadata.truncation);
    }
    let bytes = plain().answer(&answer, DOMAIN, Transport::Tcp).unwrap();
    assert!(!message(&bytes).metadata.truncation);
    assert!(bytes.len() > 65_500);
}

#[test]
fn names_that_leave_no_room_come_back_alone() {
    let long = Answer { canonical: Some(["a"; 126].join(".")), addresses: Vec::new() };
    let name = format!("{0}.{0}.{0}.{1}.", "c".repeat(63), "c".repeat(61));
    let request = request(&query(&name, RecordType::A, None));
    let answer = message(&request.answer(&long, DOMAIN, Transport::Udp).unwrap());
    assert!(answer.metadata.truncation && answer.answers.is_empty());
    assert_eq!(answer.queries.len(), 1);
}

#[test]
fn another_version_of_edns_is_told_so() {
    let mut message = query(NAME, RecordType::A, Some(1232));
    message.edns.as_mut().unwrap().set_version(1);
    let answer = request(&message).answer(&addresses(1), DOMAIN, Transport::Udp).unwrap();
    let answer = self::message(&answer);
    // 16 is BADSIG's number, too.
    assert_eq!(u16::from(answer.metadata.response_code), u16::from(ResponseCode::BADVERS));
    assert!(answer.answers.is_empty());
}

#[test]
fn only_the_answer_to_the_question_is_taken() {
    let request = plain();
    let good = reply(&[1]);
    assert!(accepts(&request, 7, &good));
    assert!(!accepts(&request, 8, &good));
    assert!(!accepts(&request, 7, request.bytes()));
    let mut capitals = good.clone();
    capitals[HEADER + 1].make_ascii_uppercase();
    assert!(accepts(&request, 7, &capitals));
    for (at, why) in [(2, "opcode"), (HEADER + 1, "name"), (request.question_end - 3, "type")] {
        let mut wrong = good.clone();
        wrong[at] ^= 0x10;
        assert!(!accepts(&request, 7, &wrong), "{why}");
    }
    for len in 0..good.len().min(request.question_end) {
        assert!(!accepts(&request, 7, &good[..len]));
    }
    // A server that cannot read the question.
    let Unfit::Reject(bare) = Request::parse(&request.bytes()[..HEADER]).unwrap_err() else {
        panic!("ignored")
    };
    assert!(accepts(&request, 7, &bare));
    let mut empty = bare;
    empty[3] = 0;
    assert!(!accepts(&request, 7, &empty));
}

#[test]
fn an_answer_lives_as_long_as_its_shortest_record() {
    let span = |ttls: &[u32]| life(&reply(ttls)).map(|life| life.span.as_secs());
    assert_eq!(span(&[300, 20, 40]), Some(20));
    assert_eq!(span(&[1_000_000]), Some(3600));
    assert_eq!(span(&[0]), None);
    assert_eq!(span(&[u32::MAX]), None);
    assert_eq!(span(&[]), None);
    let mut cut = reply(&[20]);
    cut[2] |= 0x02;
    assert_eq!(life(&cut), None);
    let mut failed = reply(&[20]);
    failed[3] |= 2;
    assert_eq!(life(&failed), None);
}

#[test]
fn a_denial_lives_as_long_as_its_authority_says() {
    let denial = |code, ttl, minimum| {
        let mut message = message(&reply(&[]));
        message.metadata.response_code = code;
        let name = Name::from_ascii("org.").unwrap();
        let soa = SOA::new(name.clone(), name.clone(), 1, 2, 3, 4, minimum);
        message.add_authority(Record::from_rdata(name, ttl, RData::SOA(soa)));
        message.to_vec().unwrap()
    };
    let span = |bytes: &[u8]| life(bytes).map(|life| life.span.as_secs());
    for code in [ResponseCode::NXDomain, ResponseCode::NoError] {
        assert_eq!(span(&denial(code, 60, 20)), Some(20));
        assert_eq!(span(&denial(code, 20, 60)), Some(20));
        assert_eq!(span(&denial(code, 9999, 9999)), Some(300));
    }
    assert_eq!(span(&denial(ResponseCode::ServFail, 60, 60)), None);
    let mut lone = reply(&[]);
    lone[3] |= 3;
    assert_eq!(span(&lone), None);
}

#[test]
fn a_denial_of_a_name_that_exists_is_one_of_its_records() {
    let mut denial = reply(&[]);
    denial[3] = 0x83;
    exists(&mut denial);
    assert_eq!(denial[3], 0x80);
    // The alias of the name exists; what it stands for is another's to deny.
    let mut alias = reply(&[1]);
    alias[3] = 0x83;
    exists(&mut alias);
    assert_eq!(alias[3], 0x83);
    exists(&mut []);
}

#[test]
fn a_kept_answer_becomes_the_questions() {
    let request = request(&query("wWw.example.org.", RecordType::A, None)).with_id(99);
    let request = Request::parse(&request).unwrap();
    let mut answer = reply(&[30]);
    let life = life(&answer).unwrap();
    age(&mut answer, &life, Duration::from_secs(12));
    request.adopt(&mut answer);
    let answer = message(&answer);
    assert_eq!((answer.metadata.id, answer.answers[0].ttl), (99, 18));
    assert!(answer.queries[0].name.eq_case(&Name::from_ascii("wWw.example.org.").unwrap()));
}

#[test]
fn answers_are_shared_by_like_questions_only() {
    let key = |message: &Message| request(message).cache_key();
    let base = query(NAME, RecordType::A, None);
    let mut other_case = query(&NAME.to_ascii_uppercase(), RecordType::A, None);
    other_case.metadata.id = 1;
    assert_eq!(key(&base), key(&other_case));
    let mut unlike = vec![
        query(NAME, RecordType::AAAA, None),
        query(NAME, RecordType::A, Some(1232)),
        query("example.org.", RecordType::A, None),
    ];
    let mut checked = base.clone();
    checked.metadata.checking_disabled = true;
    unlike.push(checked);
    let mut signed = query(NAME, RecordType::A, Some(1232));
    signed.edns.as_mut().unwrap().set_dnssec_ok(true);
    unlike.push(signed);
    unlike.push(base);
    let keys: std::collections::HashSet<_> = unlike.iter().map(|m| key(m).unwrap()).collect();
    assert_eq!(keys.len(), unlike.len());

    let mut personal = query(NAME, RecordType::A, Some(1232));
    let option = EdnsOption::Unknown(10, vec![0; 8]);
    personal.edns.as_mut().unwrap().options_mut().insert(option);
    assert_eq!(key(&personal), None);
    let mut more = query(NAME, RecordType::A, None);
    let address = RData::A(A(Ipv4Addr::LOCALHOST));
    more.add_additional(Record::from_rdata(Name::root(), 1, address));
    assert_eq!(key(&more), None);
    assert_eq!(key(&query(NAME, RecordType::AXFR, None)), None);
}

/// Everything that reads bytes of others, with whatever they may be.
fn read_all(bytes: &[u8], original: &Request, count: u32) {
    let parsed = Request::parse(bytes);
    let request = parsed.as_ref().unwrap_or(original);
    let _host = request.host();
    let _key = request.cache_key();
    let answer = Answer { canonical: request.host(), ..addresses(count) };
    for transport in [Transport::Udp, Transport::Tcp] {
        if let Ok(bytes) = request.answer(&answer, DOMAIN, transport) {
            assert!(bytes.len() <= usize::from(request.limit(transport)));
        }
    }
    let _failure = request.failure(ResponseCode::ServFail);
    let _accepted = accepts(request, 7, bytes);
    let mut changed = bytes.to_vec();
    exists(&mut changed);
    if let Some(life) = life(&changed) {
        assert!(!life.span.is_zero());
        age(&mut changed, &life, Duration::from_secs(3));
    }
    request.adopt(&mut changed);
    assert_eq!(changed.len(), bytes.len());
}

#[test]
fn no_bytes_make_it_panic() {
    let mut rng = StdRng::seed_from_u64(0xd5);
    let mut signed = query("a.b.shop.svc.cluster.local.", RecordType::SRV, Some(4096));
    signed.edns.as_mut().unwrap().options_mut().insert(EdnsOption::Unknown(10, vec![1; 8]));
    let denial = {
        let mut message = message(&reply(&[]));
        let name = Name::from_ascii(NAME).unwrap();
        let soa = SOA::new(name.clone(), name.clone(), 1, 2, 3, 4, 5);
        message.add_authority(Record::from_rdata(name, 60, RData::SOA(soa)));
        message.to_vec().unwrap()
    };
    let seeds = [plain().bytes().to_vec(), signed.to_vec().unwrap(), reply(&[1, 20, 300]), denial];
    let original = plain();
    for round in 0..100_000 {
        let mut bytes = seeds[round % seeds.len()].clone();
        for _ in 0..rng.random_range(1..6) {
            let at = rng.random_range(0..bytes.len());
            match rng.random_range(0..5) {
                0 => bytes[at] = rng.random(),
                1 => bytes[at] ^= 1 << rng.random_range(0..8),
                2 => bytes.truncate(at.max(1)),
                3 => bytes.insert(at, rng.random()),
                // A pointer to anywhere.
                _ => {
                    bytes[at] = 0xc0;
                    bytes.push(rng.random());
                }
            }
        }
        // Long answers take most of the time.
        read_all(&bytes, &original, if round % 100 == 0 { 100 } else { 1 });
    }
}
