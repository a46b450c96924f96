//! The codec of the control plane: one envelope a substream each way, ended by the end of the stream.

use std::io;
use std::sync::Arc;

use futures::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use libp2p::StreamProtocol;
use libp2p::request_response;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::mesh::codec::{CodecError, decode_envelope, encode};
use crate::mesh::control::ControlCounters;
use crate::mesh::messages::{Answer, Ask, Envelope, MAX_CONTROL_BYTES};

/// Name of the control protocol in libp2p's negotiation. The number is that of the framing; the
/// messages inside carry [`PROTOCOL`](crate::mesh::messages::PROTOCOL).
pub const CONTROL_PROTOCOL: StreamProtocol = StreamProtocol::new("/shoal/control/1");

/// A control message as it came in.
#[derive(Clone, Debug, PartialEq)]
pub enum Received<T> {
    /// In our version of the protocol.
    Ours(Envelope<T>),
    /// In another; its version is all that was read.
    OtherProtocol(u16),
}

/// Postcard over request-response. Junk and oversized messages are `InvalidData`, and counted.
#[derive(Clone, Debug)]
pub(crate) struct ControlCodec {
    counters: Arc<ControlCounters>,
}

impl ControlCodec {
    pub(crate) fn new(counters: Arc<ControlCounters>) -> Self {
        Self { counters }
    }

    async fn read<S, T>(&self, stream: &mut S) -> io::Result<Received<T>>
    where
        S: AsyncRead + Unpin + Send,
        T: DeserializeOwned,
    {
        let received = read_envelope(stream).await;
        if let Err(error) = &received
            && error.kind() == io::ErrorKind::InvalidData
        {
            self.counters.malformed.add();
        }
        received
    }
}

/// Reads to the end of the stream, at most one byte over the bound.
async fn read_envelope<S, T>(stream: &mut S) -> io::Result<Received<T>>
where
    S: AsyncRead + Unpin + Send,
    T: DeserializeOwned,
{
    let mut bytes = Vec::new();
    let limit = MAX_CONTROL_BYTES as u64 + 1;
    stream.take(limit).read_to_end(&mut bytes).await?;
    if bytes.is_empty() {
        return Err(io::Error::new(
            io::ErrorKind::UnexpectedEof,
            "the stream was closed without a message",
        ));
    }
    if bytes.len() > MAX_CONTROL_BYTES {
        return Err(invalid(CodecError::TooLong {
            length: bytes.len(),
            max: MAX_CONTROL_BYTES,
        }));
    }
    match decode_envelope(&bytes) {
        Ok(envelope) => Ok(Received::Ours(envelope)),
        Err(CodecError::OtherProtocol(version)) => Ok(Received::OtherProtocol(version)),
        Err(error) => Err(invalid(error)),
    }
}

async fn write<S, T>(stream: &mut S, message: Received<T>) -> io::Result<()>
where
    S: AsyncWrite + Unpin + Send,
    T: Serialize,
{
    let Received::Ours(envelope) = message else {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    };
    let bytes = encode(&envelope, MAX_CONTROL_BYTES)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
    stream.write_all(&bytes).await
}

fn invalid(error: CodecError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

impl request_response::Codec for ControlCodec {
    type Protocol = StreamProtocol;
    type Request = Received<Ask>;
    type Response = Received<Answer>;

    async fn read_request<T>(
        &mut self,
        _: &Self::Protocol,
        stream: &mut T,
    ) -> io::Result<Self::Request>
    where
        T: AsyncRead + Unpin + Send,
    {
        self.read(stream).await
    }

    async fn read_response<T>(
        &mut self,
        _: &Self::Protocol,
        stream: &mut T,
    ) -> io::Result<Self::Response>
    where
        T: AsyncRead + Unpin + Send,
    {
        self.read(stream).await
    }

    async fn write_request<T>(
        &mut self,
        _: &Self::Protocol,
        stream: &mut T,
        message: Self::Request,
    ) -> io::Result<()>
    where
        T: AsyncWrite + Unpin + Send,
    {
        write(stream, message).await
    }

    async fn write_response<T>(
        &mut self,
        _: &Self::Protocol,
        stream: &mut T,
        message: Self::Response,
    ) -> io::Result<()>
    where
        T: AsyncWrite + Unpin + Send,
    {
        write(stream, message).await
    }
}
