//! What fuzzers and the tests that do their work in short feed with bytes of any kind.
//!
//! Each function must return, whatever it is given, and panics where something is wrong. They see what a stranger, a peer, a
//! client or an engine can send before anything else has looked at it.

use serde::Serialize;
use serde::de::DeserializeOwned;

pub use crate::engine::remote::fuzz::{engine_load, engine_stream};

use crate::engine::work::RequestKind;
use crate::mesh::codec;
use crate::mesh::messages::{
    Answer, Ask, Envelope, Frame, MAX_CONTROL_BYTES, MAX_SUBMIT_BYTES, Open,
};
use crate::openai::{self, Sketch};

/// Messages of the control plane, both ways.
pub fn control(bytes: &[u8]) {
    envelope::<Ask>(bytes);
    envelope::<Answer>(bytes);
}

fn envelope<T: DeserializeOwned + Serialize>(bytes: &[u8]) {
    let read: Result<Envelope<T>, _> = codec::decode_envelope(bytes);
    if let Ok(envelope) = read {
        same(&codec::encode(&envelope, MAX_CONTROL_BYTES), |bytes| {
            codec::decode_envelope::<T>(bytes).is_ok()
        });
    }
}

/// Messages of the stream plane, both ways.
pub fn streams(bytes: &[u8]) {
    if let Ok(open) = codec::decode::<Open>(bytes) {
        same(&codec::encode(&open, MAX_SUBMIT_BYTES), |bytes| {
            codec::decode::<Open>(bytes).is_ok()
        });
    }
    if let Ok(frame) = codec::decode::<Frame>(bytes) {
        same(&codec::encode(&frame, MAX_SUBMIT_BYTES), |bytes| {
            codec::decode::<Frame>(bytes).is_ok()
        });
    }
}

/// What was read can be written, and read again.
fn same(written: &Result<Vec<u8>, codec::CodecError>, reads: impl Fn(&[u8]) -> bool) {
    if let Ok(written) = written {
        assert!(reads(written), "what was written cannot be read");
    }
}

/// A client's body, on every path that reads one.
pub fn client_body(bytes: &[u8]) {
    for kind in [RequestKind::Chat, RequestKind::Completion] {
        if let Ok(request) = openai::parse(kind, bytes) {
            let sketch = Sketch::of(&request);
            assert_eq!(sketch.model, request.model);
        }
    }
    drop(Sketch::read(bytes));
}
