//! A response as it is received: resources stay encoded, in the one buffer that the message came in, until each is taken
//! in. A mesh of 100,000 workloads is otherwise in memory three times at once.

use std::vec;

use bytes::Bytes;
use culvert_proto::envoy::service::discovery::v3::{DeltaDiscoveryRequest, Resource};
use futures::channel::mpsc;
use http::uri::PathAndQuery;
use prost::Message;
use tonic::client::Grpc;
use tonic::{Request, Status, Streaming};
use tonic_prost::ProstCodec;

use crate::server::Channel;

/// The method that is called.
const METHOD: &str =
    "/envoy.service.discovery.v3.AggregatedDiscoveryService/DeltaAggregatedResources";

/// `DeltaDiscoveryResponse`, as far as a client looks at it.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Response {
    /// Of [`Resource`] each.
    #[prost(bytes = "bytes", repeated, tag = "2")]
    pub(super) resources: Vec<Bytes>,
    #[prost(string, tag = "4")]
    pub(super) type_url: String,
    #[prost(string, tag = "5")]
    pub(super) nonce: String,
    #[prost(string, repeated, tag = "6")]
    pub(super) removed_resources: Vec<String>,
}

impl Response {
    /// The bytes that it has on the wire.
    pub(super) fn size(&self) -> usize {
        self.encoded_len()
    }
}

/// Each resource, read as it is asked for.
pub(super) struct Resources(vec::IntoIter<Bytes>);

impl Resources {
    pub(super) fn new(encoded: Vec<Bytes>) -> Self {
        Self(encoded.into_iter())
    }
}

impl ExactSizeIterator for Resources {}

impl Iterator for Resources {
    type Item = Result<Resource, prost::DecodeError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.0.next().map(Resource::decode)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.0.size_hint()
    }
}

/// Begins a stream of responses, none longer than `largest` bytes.
pub(super) async fn stream(
    channel: Channel,
    origin: http::Uri,
    largest: usize,
    requests: mpsc::Receiver<DeltaDiscoveryRequest>,
) -> Result<Streaming<Response>, Status> {
    let mut client = Grpc::with_origin(channel, origin).max_decoding_message_size(largest);
    client.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
    let (method, codec) = (PathAndQuery::from_static(METHOD), ProstCodec::default());
    Ok(client.streaming(Request::new(requests), method, codec).await?.into_inner())
}
