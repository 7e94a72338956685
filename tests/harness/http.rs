//! Real HTTP/1.1: a hyper server for apps, and the one-shot client that reads a node's own ports.

use std::{
    convert::Infallible,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use http_body_util::Full;
use hyper::{Request, Response, body::Incoming, service::service_fn};
use hyper_util::rt::TokioIo;

use crate::poll;

/// A reply: status and body.
#[derive(Debug, PartialEq, Eq)]
pub struct Reply {
    /// The status code.
    pub status: u16,
    /// The body.
    pub body: String,
}

/// One request on a connection of its own, from the calling thread's namespace.
pub fn request(method: &str, to: SocketAddr, path: &str) -> Result<Reply> {
    let limit = poll::patient(Duration::from_secs(5));
    let mut stream =
        TcpStream::connect_timeout(&to, limit).with_context(|| format!("dial {to}"))?;
    stream.set_read_timeout(Some(limit))?;
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nhost: {to}\r\naccept: application/openmetrics-text\r\n\
         content-length: 0\r\nconnection: close\r\n\r\n"
    )?;
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).with_context(|| format!("read the reply of {to}{path}"))?;
    parse(&String::from_utf8_lossy(&bytes)).with_context(|| format!("reply of {to}{path}"))
}

fn parse(text: &str) -> Result<Reply> {
    let (head, body) = text.split_once("\r\n\r\n").context("has no end of headers")?;
    let status = head.split(' ').nth(1).and_then(|code| code.parse().ok());
    let chunked = head.to_ascii_lowercase().contains("transfer-encoding: chunked");
    Ok(Reply {
        status: status.context("has no status")?,
        body: if chunked { unchunk(body)? } else { body.to_owned() },
    })
}

fn unchunk(mut rest: &str) -> Result<String> {
    let mut body = String::new();
    loop {
        let (size, after) = rest.split_once("\r\n").context("chunk has no size")?;
        let size = usize::from_str_radix(size.trim(), 16).context("chunk size")?;
        if size == 0 {
            return Ok(body);
        }
        ensure!(after.is_char_boundary(size) && after.len() >= size + 2, "chunk is cut short");
        let (chunk, after) = after.split_at(size);
        body += chunk;
        rest = after.get(2..).context("chunk has no end")?;
    }
}

/// Serves one accepted connection: answers each request with `text` and the peer it sees.
pub(crate) async fn serve(stream: tokio::net::TcpStream, peer: SocketAddr, text: &str) {
    let answer = service_fn(async |request: Request<Incoming>| {
        let body = format!("{text}: {} {} for {}\n", request.method(), request.uri(), peer.ip());
        Ok::<_, Infallible>(Response::new(Full::new(Bytes::from(body))))
    });
    let served =
        hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), answer);
    // The client's way of ending the connection is not this server's concern.
    drop(served.await);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunked_body_is_joined() {
        let text =
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n";
        assert_eq!(parse(text).unwrap(), Reply { status: 200, body: "abcde".to_owned() });
    }

    #[test]
    fn a_plain_body_is_taken_as_it_is() {
        let text = "HTTP/1.1 503 Service Unavailable\r\ncontent-length: 2\r\n\r\nno";
        assert_eq!(parse(text).unwrap(), Reply { status: 503, body: "no".to_owned() });
    }
}
