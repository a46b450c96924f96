//! Reads the frames of one request off its stream.

use quinn::RecvStream;
use shoal_gossip::{Epoch, NodeId, RequestId};
use tokio::sync::mpsc;

use crate::mesh::StreamError;
use crate::mesh::codec::FrameReader;
use crate::mesh::messages::{Frame, FrameBody};

/// The reader of one request.
pub(super) struct Reader {
    pub(super) node: NodeId,
    pub(super) request: RequestId,
    pub(super) epoch: Epoch,
    pub(super) frames: FrameReader<RecvStream>,
    pub(super) inbox: mpsc::Sender<Result<Frame, StreamError>>,
}

impl Reader {
    /// Reads to the last frame. A frame of another request or epoch, junk, and an end without a last
    /// frame are all [`StreamError::Broken`]; whatever follows the last frame is never read.
    pub(super) async fn run(mut self) {
        loop {
            let (item, last) = match self.frames.next::<Frame>().await {
                Ok(Some(frame)) if (frame.request, frame.epoch) != (self.request, self.epoch) => {
                    (self.broken("it sent a frame of another request"), true)
                }
                Ok(Some(frame)) => {
                    let last = match frame.body {
                        FrameBody::Finished(_) | FrameBody::Failed(_) => true,
                        FrameBody::Started { .. } | FrameBody::Tokens(_) => false,
                    };
                    (Ok(frame), last)
                }
                Ok(None) => (self.broken("it ended before the request did"), true),
                Err(error) => (self.broken(&error.to_string()), true),
            };
            if self.inbox.send(item).await.is_err() || last {
                return;
            }
        }
    }

    fn broken(&self, reason: &str) -> Result<Frame, StreamError> {
        Err(StreamError::Broken {
            node: self.node,
            reason: reason.to_owned(),
        })
    }
}
