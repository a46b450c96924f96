//! Bodies of answers: written event by event, and broken where a fault says so.

use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Body, Frame};
use tokio::sync::mpsc;

use crate::engine_server::fault::{Fault, Met};
use crate::engine_server::seen::{Ending, Note};
use crate::engine_server::wire::ResetCord;

/// The body is over for the one who writes it.
#[derive(Debug)]
pub(super) struct Over;

enum Part {
    Data(Bytes),
    /// What was given so far goes out before the rest.
    Flush,
    /// The connection ends here.
    Break,
}

type Work = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A body that runs the work behind it. Dropping it drops the work.
pub(super) struct Feed {
    work: Option<Work>,
    parts: mpsc::Receiver<Part>,
}

impl fmt::Debug for Feed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Feed").finish_non_exhaustive()
    }
}

impl Feed {
    /// A body written by `write`, which meets `met`.
    pub(super) fn new<W, F>(met: Met, note: Note, cord: ResetCord, write: W) -> Self
    where
        W: FnOnce(Sink) -> F,
        F: Future<Output = Result<(), Over>> + Send + 'static,
    {
        // One at a time: what is not written yet was not asked of the engine either.
        let (to, parts) = mpsc::channel(1);
        let line_end = if met.has(&Fault::CrLf) { "\r\n" } else { "\n" };
        let work = write(Sink {
            split: met.find(|fault| match fault {
                Fault::SplitAt(bytes) => Some(*bytes),
                _ => None,
            }),
            comments: met.has(&Fault::Comments),
            line_end,
            blow: met.blow,
            events: 0,
            to,
            note,
            cord,
        });
        let work = async move { drop(work.await) };
        Self {
            work: Some(Box::pin(work)),
            parts,
        }
    }
}

impl Body for Feed {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        if let Some(work) = &mut self.work
            && work.as_mut().poll(cx).is_ready()
        {
            self.work = None;
        }
        match self.parts.poll_recv(cx) {
            Poll::Ready(Some(Part::Data(data))) => Poll::Ready(Some(Ok(Frame::data(data)))),
            Poll::Ready(Some(Part::Flush)) => {
                // The connection is flushed whenever its body has nothing to say.
                cx.waker().wake_by_ref();
                Poll::Pending
            }
            Poll::Ready(Some(Part::Break)) => {
                let error = io::Error::new(io::ErrorKind::ConnectionAborted, "a fault");
                Poll::Ready(Some(Err(error)))
            }
            Poll::Ready(None) => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    }
}

/// Where the one who writes a body puts it.
#[derive(Debug)]
pub(super) struct Sink {
    to: mpsc::Sender<Part>,
    blow: Option<Fault>,
    split: Option<usize>,
    comments: bool,
    line_end: &'static str,
    /// Events written.
    events: usize,
    note: Note,
    cord: ResetCord,
}

impl fmt::Debug for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Data(_) => "Data",
            Self::Flush => "Flush",
            Self::Break => "Break",
        })
    }
}

impl Sink {
    /// Writes one event with this data.
    pub(super) async fn event(&mut self, data: &str) -> Result<(), Over> {
        let end = self.line_end;
        let frame = match self.blow {
            Some(Fault::LongLine(bytes)) if self.events == 0 => {
                let blanks = " ".repeat(bytes.saturating_sub(data.len()));
                format!("data: {data}{blanks}{end}{end}")
            }
            _ => format!("data: {data}{end}{end}"),
        };
        self.blow_before(&frame).await?;
        if self.comments {
            self.data(format!(": ping{end}{end}").into()).await?;
        }
        self.data(frame.into()).await?;
        self.events += 1;
        Ok(())
    }

    /// Says that all was written.
    pub(super) async fn end(&mut self) -> Result<(), Over> {
        self.blow_before("").await?;
        self.note.ends(Ending::Whole);
        Ok(())
    }

    /// Writes a body that is no stream.
    pub(super) async fn whole(&mut self, body: Bytes) -> Result<(), Over> {
        self.blow_before(std::str::from_utf8(&body).unwrap_or_default())
            .await?;
        if !body.is_empty() {
            self.data(body).await?;
        }
        self.note.ends(Ending::Whole);
        Ok(())
    }

    /// Does what was asked for before the next event, `next`, is written.
    async fn blow_before(&mut self, next: &str) -> Result<(), Over> {
        let written = self.events;
        match self.blow {
            Some(Fault::DieAfterHead) => self.part(true).await,
            Some(Fault::DieAfterEvents(count)) if count == written => self.part(true).await,
            Some(Fault::CutAfterEvents(count)) if count == written => self.part(false).await,
            Some(Fault::StallAfterEvents(count)) if count == written => {
                self.send(Part::Flush).await?;
                std::future::pending().await
            }
            Some(Fault::HalfEvent(count)) if count == written => {
                let half = next.as_bytes()[..next.len() / 2].to_vec();
                self.data(half.into()).await?;
                self.note.ends(Ending::Broken);
                Err(Over)
            }
            _ => Ok(()),
        }
    }

    /// Ends the connection once all that was written has left.
    async fn part(&mut self, reset: bool) -> Result<(), Over> {
        self.send(Part::Flush).await?;
        self.note.ends(Ending::Broken);
        if reset {
            self.cord.pull();
        }
        self.send(Part::Break).await?;
        Err(Over)
    }

    async fn data(&mut self, data: Bytes) -> Result<(), Over> {
        let Some(size) = self.split.filter(|size| *size > 0) else {
            self.send(Part::Data(data)).await?;
            return self.send(Part::Flush).await;
        };
        for piece in data.chunks(size) {
            self.send(Part::Data(data.slice_ref(piece))).await?;
            self.send(Part::Flush).await?;
        }
        Ok(())
    }

    async fn send(&mut self, part: Part) -> Result<(), Over> {
        self.to.send(part).await.map_err(|_| Over)
    }
}
