//! The home's side of a request: one stream, on the connection to its host.

use std::sync::Arc;

use shoal_gossip::NodeId;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::mesh::codec::{FrameReader, encode_frame};
use crate::mesh::messages::{MAX_FRAME_BYTES, MAX_SUBMIT_BYTES, Open};
use crate::mesh::stream::dial::{DIAL_PATIENCE, Pool};
use crate::mesh::stream::{FRAMES, SUBMIT_PATIENCE, read};
use crate::mesh::{FrameReceiver, StreamError};

/// Submits a request at a host, or attaches to one that it runs. Safe to drop: the host sees a submission cut short, or a stream
/// that nobody reads.
pub(super) async fn open(
    pool: &Arc<Pool>,
    to: NodeId,
    open: Open,
) -> Result<FrameReceiver, StreamError> {
    let host = pool.find(to);
    let host = host.ok_or(StreamError::UnknownNode(to))?;
    let (request, epoch) = (open.request(), open.epoch());
    let unreachable = |reason: String| StreamError::Unreachable { node: to, reason };
    let bytes =
        encode_frame(&open, MAX_SUBMIT_BYTES).map_err(|error| unreachable(error.to_string()))?;
    drop(open);
    let link = pool.link(host).await.map_err(unreachable)?;
    let (mut send, recv) = timeout(DIAL_PATIENCE, link.connection.open_bi())
        .await
        .map_err(|_| unreachable("it takes no more streams from us".into()))?
        .map_err(|error| unreachable(error.to_string()))?;

    // From here on the host may have seen the submission.
    let broken = |reason: String| StreamError::Broken { node: to, reason };
    timeout(SUBMIT_PATIENCE, send.write_all(&bytes))
        .await
        .map_err(|_| broken("it does not read the submission".into()))?
        .map_err(|error| broken(error.to_string()))?;
    // Only a stream that the host has stopped cannot be finished; reading will tell.
    drop(send.finish());

    let (inbox, frames) = mpsc::channel(FRAMES);
    let cancel = CancellationToken::new();
    let reader = read::Reader {
        node: to,
        request,
        epoch,
        frames: FrameReader::new(recv, MAX_FRAME_BYTES),
        inbox,
    };
    let cancelled = cancel.clone();
    pool.dialler.tasks.spawn(async move {
        tokio::select! {
            biased;
            // Dropping the reader stops the stream, and the host with it.
            () = cancelled.cancelled() => {}
            () = reader.run() => {}
        }
        drop(link);
    });
    Ok(FrameReceiver::remote(frames, Some(cancel.drop_guard())))
}
