//! Questions to the connector inside vLLM: JSON over a Unix socket, and memory that both processes see.
//!
//! A frame is a length (four bytes, big-endian) and a JSON object. A question may carry a file descriptor. All calls block:
//! they are made where blocking is allowed.

use std::fs::File;
use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::fs::MemfdFlags;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use serde::de::DeserializeOwned;
use serde_json::Value;

/// Longest frame either way: the ids of a context of some 400,000 tokens.
const MAX_FRAME: usize = 4 << 20;

/// Why a question got no answer that helps.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum CallError {
    /// There is no request of that name any more, or its KV has gone.
    #[error("it is gone: {0}")]
    Gone(String),
    /// Anything else.
    #[error("{0}")]
    Failed(String),
}

impl CallError {
    fn failed(what: &str, error: impl std::fmt::Display) -> Self {
        Self::Failed(format!("{what}: {error}"))
    }
}

/// Asks one question over a connection of its own.
///
/// # Errors
/// When there is nobody, no answer within `patience`, or the answer says no.
pub(super) fn call<T: DeserializeOwned>(
    path: &Path,
    question: &Value,
    file: Option<&File>,
    patience: Duration,
) -> Result<T, CallError> {
    let mut stream = UnixStream::connect(path)
        .map_err(|error| CallError::failed(&path.display().to_string(), error))?;
    let timed = stream
        .set_read_timeout(Some(patience))
        .and_then(|()| stream.set_write_timeout(Some(patience)));
    timed.map_err(|error| CallError::failed("its socket", error))?;
    let body = question.to_string();
    let length = u32::try_from(body.len()).unwrap_or(u32::MAX);
    let mut frame = length.to_be_bytes().to_vec();
    frame.extend_from_slice(body.as_bytes());
    send(&mut stream, &frame, file.map(File::as_fd))
        .map_err(|error| CallError::failed("it takes no question", error))?;
    let answer = read_frame(&mut stream).map_err(|error| CallError::failed("no answer", error))?;
    read_answer(&answer)
}

fn send(
    stream: &mut UnixStream,
    frame: &[u8],
    file: Option<BorrowedFd<'_>>,
) -> std::io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut along = SendAncillaryBuffer::new(&mut space);
    let files: Vec<BorrowedFd<'_>> = file.into_iter().collect();
    if !files.is_empty() {
        along.push(SendAncillaryMessage::ScmRights(&files));
    }
    let slices = [IoSlice::new(frame)];
    let sent = rustix::net::sendmsg(&*stream, &slices, &mut along, SendFlags::NOSIGNAL)?;
    stream.write_all(frame.get(sent..).unwrap_or_default())
}

fn read_frame(stream: &mut UnixStream) -> std::io::Result<Vec<u8>> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let length = u32::from_be_bytes(length) as usize;
    if length > MAX_FRAME {
        let error = format!("a frame of {length} bytes");
        return Err(std::io::Error::other(error));
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body)?;
    Ok(body)
}

fn read_answer<T: DeserializeOwned>(answer: &[u8]) -> Result<T, CallError> {
    let value: Value = serde_json::from_slice(answer)
        .map_err(|error| CallError::failed("its answer is no JSON", error))?;
    if value["ok"] == true {
        return serde_json::from_value(value)
            .map_err(|error| CallError::failed("its answer is another than expected", error));
    }
    let message = value["message"].as_str().unwrap_or("it says no").to_owned();
    Err(match value["why"].as_str() {
        Some("gone") => CallError::Gone(message),
        _ => CallError::Failed(message),
    })
}

/// Memory of so many bytes that can be given to another process.
///
/// # Errors
/// When there is none.
pub(super) fn memory(bytes: u64) -> Result<File, CallError> {
    let made = rustix::fs::memfd_create("shoal-kv", MemfdFlags::CLOEXEC);
    let file = File::from(made.map_err(|error| CallError::failed("no shared memory", error))?);
    file.set_len(bytes)
        .map_err(|error| CallError::failed("no shared memory", error))?;
    Ok(file)
}

/// All that is in it.
///
/// # Errors
/// When it is shorter.
pub(super) fn contents(file: &File, bytes: usize, into: &mut Vec<u8>) -> Result<(), CallError> {
    let before = into.len();
    into.resize(before + bytes, 0);
    let part = into.get_mut(before..).unwrap_or_default();
    file.read_exact_at(part, 0)
        .map_err(|error| CallError::failed("shared memory", error))
}

/// Memory with these bytes.
///
/// # Errors
/// When there is none.
pub(super) fn filled(bytes: &[u8]) -> Result<File, CallError> {
    let file = memory(0)?;
    file.write_all_at(bytes, 0)
        .map_err(|error| CallError::failed("no shared memory", error))?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::thread;

    use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
    use serde_json::json;

    use super::*;

    /// Answers one question with `answer`, and gives the question and the file that came with it.
    fn listen(folder: &Path, answer: &'static [u8]) -> thread::JoinHandle<(Vec<u8>, Option<File>)> {
        let listener = UnixListener::bind(folder.join("sock")).unwrap();
        thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut along = RecvAncillaryBuffer::new(&mut space);
            let mut length = [0; 4];
            let mut slices = [std::io::IoSliceMut::new(&mut length)];
            rustix::net::recvmsg(&stream, &mut slices, &mut along, RecvFlags::empty()).unwrap();
            let file = along.drain().find_map(|message| match message {
                RecvAncillaryMessage::ScmRights(mut files) => files.next().map(File::from),
                _ => None,
            });
            let mut question = vec![0; u32::from_be_bytes(length) as usize];
            stream.read_exact(&mut question).unwrap();
            stream.write_all(answer).unwrap();
            (question, file)
        })
    }

    fn framed(text: &str) -> Vec<u8> {
        let mut frame = (text.len() as u32).to_be_bytes().to_vec();
        frame.extend_from_slice(text.as_bytes());
        frame
    }

    fn ask(answer: Vec<u8>) -> Result<Value, CallError> {
        let folder = tempfile::tempdir().unwrap();
        let listener = listen(folder.path(), answer.leak());
        let question = json!({ "op": "hello" });
        let patience = Duration::from_secs(5);
        let answered = call(&folder.path().join("sock"), &question, None, patience);
        let (asked, file) = listener.join().unwrap();
        assert_eq!(asked, question.to_string().as_bytes());
        assert!(file.is_none());
        answered
    }

    #[test]
    fn a_question_is_answered_refused_or_broken() {
        let good = ask(framed(r#"{"ok":true,"protocol":1}"#));
        assert_eq!(good.unwrap()["protocol"], 1);
        let gone = ask(framed(
            r#"{"ok":false,"why":"gone","message":"no such request"}"#,
        ));
        assert_eq!(gone, Err(CallError::Gone("no such request".into())));
        let busy = ask(framed(r#"{"ok":false,"why":"busy","message":"later"}"#));
        assert_eq!(busy, Err(CallError::Failed("later".into())));
        for broken in [framed("nonsense"), vec![255; 8], vec![0, 0]] {
            assert!(matches!(ask(broken), Err(CallError::Failed(_))));
        }
        let nobody = call::<Value>(
            Path::new("/nonexistent/sock"),
            &json!({}),
            None,
            Duration::from_secs(1),
        );
        assert!(matches!(nobody, Err(CallError::Failed(_))));
    }

    #[test]
    fn memory_goes_along_with_a_question() {
        let folder = tempfile::tempdir().unwrap();
        let listener = listen(folder.path(), framed(r#"{"ok":true}"#).leak());
        let file = filled(b"kv of a block").unwrap();
        let path = folder.path().join("sock");
        let patience = Duration::from_secs(5);
        call::<Value>(&path, &json!({ "op": "stage" }), Some(&file), patience).unwrap();
        let (_, there) = listener.join().unwrap();
        let there = there.unwrap();
        let mut read = b"head ".to_vec();
        contents(&there, 13, &mut read).unwrap();
        assert_eq!(read, b"head kv of a block");
        assert!(contents(&there, 14, &mut read).is_err(), "there is no more");
    }
}
