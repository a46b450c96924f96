//! The sockets of a connector: frames of JSON, and a file that comes along.

use std::fs::File;
use std::io::{IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use serde_json::Value;

/// A question, and the file that came with it.
pub(super) struct Question {
    pub(super) told: Value,
    pub(super) file: Option<File>,
}

/// What answers the questions of one socket.
pub(super) type Answer = Arc<dyn Fn(Question) -> Value + Send + Sync>;

/// Sockets that are answered. Dropping it removes them.
#[derive(Debug)]
pub(super) struct Answering {
    paths: Vec<PathBuf>,
    over: Arc<AtomicBool>,
}

/// Answers at these names in a folder.
pub(super) fn listen<const N: usize>(folder: &Path, sockets: [(&str, Answer); N]) -> Answering {
    let over = Arc::new(AtomicBool::new(false));
    let paths = sockets.map(|(name, answer)| {
        let path = folder.join(name);
        let listener = UnixListener::bind(&path).expect("a socket in the folder");
        let over = Arc::clone(&over);
        thread::spawn(move || {
            for stream in listener.incoming() {
                if over.load(Ordering::SeqCst) {
                    return;
                }
                let (answer, stream) = (Arc::clone(&answer), stream.expect("a connection"));
                thread::spawn(move || serve(stream, &answer));
            }
        });
        path
    });
    Answering {
        paths: paths.into(),
        over,
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        self.over.store(true, Ordering::SeqCst);
        for path in &self.paths {
            // Wakes the thread that listens; there is nobody left to tell of an error.
            drop(UnixStream::connect(path));
            drop(std::fs::remove_file(path));
        }
    }
}

fn serve(mut stream: UnixStream, answer: &Answer) {
    while let Some(question) = read(&mut stream) {
        let answer = answer(question).to_string();
        let length = u32::try_from(answer.len()).expect("a short answer");
        let mut frame = length.to_be_bytes().to_vec();
        frame.extend(answer.as_bytes());
        if stream.write_all(&frame).is_err() {
            return;
        }
    }
}

fn read(stream: &mut UnixStream) -> Option<Question> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut along = RecvAncillaryBuffer::new(&mut space);
    let mut length = [0; 4];
    let mut slices = [IoSliceMut::new(&mut length)];
    let got = rustix::net::recvmsg(&*stream, &mut slices, &mut along, RecvFlags::WAITALL).ok()?;
    if got.bytes < 4 {
        return None;
    }
    let file = along.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut files) => files.next().map(File::from),
        _ => None,
    });
    let mut body = vec![0; u32::from_be_bytes(length) as usize];
    stream.read_exact(&mut body).ok()?;
    let told = serde_json::from_slice(&body).expect("JSON");
    Some(Question { told, file })
}

/// Writes a file from its beginning; it must have room.
pub(super) fn fill(file: &File, bytes: &[u8]) {
    let room = file.metadata().expect("a file").len();
    assert!(room >= bytes.len() as u64, "{room} for {}", bytes.len());
    file.write_all_at(bytes, 0).expect("a file to write to");
}

/// All of a file.
pub(super) fn contents(file: &File) -> Vec<u8> {
    let length = file.metadata().expect("a file").len();
    let mut bytes = vec![0; usize::try_from(length).expect("a small file")];
    file.read_exact_at(&mut bytes, 0).expect("all of it");
    bytes
}
