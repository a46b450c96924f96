//! The inputs that fuzzing begins with: one good message of each kind, and texts as they come. Written anew by
//! `cargo nextest run --workspace -E 'test(the_corpus_is_written)' --run-ignored all`.

use std::fs;
use std::time::Duration;

use bytes::Bytes;
use shoal_gossip::{
    ClusterKey, Epoch, Framing, KeyRing, LoadSummary, NodeId, RequestId, Sealer, SenderId, Tokens,
    testing,
};
use shoal_migrate::session::Claim;
use shoal_migrate::transfer::wire::{self, Opening, PartOpening, Reply};
use shoal_migrate::transfer::{ParcelHeader, ParcelKind};
use shoal_migrate::{ClaimAnswer, KvRange, MigrationId, StageIndex};
use shoal_node::engine::work::{Fit, HttpAsk, Prepared, Priority, RequestKind};
use shoal_node::engine::{EngineError, TokenBatch};
use shoal_node::mesh::codec;
use shoal_node::mesh::messages::{
    Answer, Ask, Attach, Envelope, Frame, FrameBody, MAX_SUBMIT_BYTES, Offer, Open, PROTOCOL,
    RefuseReason, Submit,
};

use super::folder;

const REQUEST: RequestId = RequestId {
    home: NodeId(1),
    serial: 2,
};

const CHAT: &str = r#"{"model":"m","messages":[{"role":"system","content":"Be brief."},{"role":"user","content":[{"type":"text","text":"Hi \u00e9"}]}],"max_completion_tokens":12,"temperature":0.7,"top_p":0.9,"stop":["\n\n"],"stream":true,"stream_options":{"include_usage":true},"logprobs":true,"top_logprobs":2,"seed":-5}"#;
const COMPLETION: &str = r#"{"model":"m","prompt":[1,2,3],"max_tokens":5,"ignore_eos":true,"priority":3,"n":1,"logit_bias":{},"unknown":[[{}]]}"#;
const EVENTS: &str = "\u{20}data: {\"id\":\"c\",\"created\":1,\"model\":\"m\",\"choices\":[{\"index\":0,\"text\":\"a\",\"token_ids\":[5],\"logprobs\":{\"content\":[{\"id\":5,\"bytes\":[97]}]}}],\"prompt_token_ids\":[1]}\r\n\r\n: comment\n\ndata: [DONE]\n\n";
const METRICS: &str = "# HELP x y\nvllm:num_requests_running{engine=\"0\",model_name=\"m\"} 2.0\nvllm:num_requests_waiting{model_name=\"m\"} NaN\nvllm:kv_cache_usage_perc{model_name=\"m\"} 0.25\nvllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"100\"} 1.0\nsglang:num_running_reqs 1\n";
const SLOTS: &str = r#"[{"id":0,"n_ctx":4096,"is_processing":true,"n_prompt_tokens":7},{"id":1,"n_ctx":4096,"is_processing":false}]"#;

fn messages() -> Vec<Vec<u8>> {
    let asks = [
        Ask::Probe,
        Ask::Drain,
        Ask::Claim {
            request: REQUEST,
            claim: Claim {
                epoch: Epoch(2),
                output: 7,
            },
        },
        Ask::Offer(Offer {
            request: REQUEST,
            epoch: Epoch(1),
            model: "m".into(),
            fit: Fit::Same(9),
            prompt: Tokens(10),
            generated: Tokens(3),
            max_output: Tokens(20),
            priority: Priority(-1),
            hops: 1,
            waited: Duration::from_millis(1_500),
            resumed: true,
            excluded: vec![NodeId(4), NodeId(5)],
        }),
    ];
    let answers = [
        Answer::Accept {
            reservation: 3,
            lease_ms: 5_000,
        },
        Answer::Redirect {
            to: NodeId(3),
            load: LoadSummary::default(),
        },
        Answer::Refuse(RefuseReason::QueueFull),
        Answer::Claim(ClaimAnswer::Granted { from: 4 }),
    ];
    let asks = asks.into_iter().map(|body| encode(&envelope(body)));
    asks.chain(answers.into_iter().map(|body| encode(&envelope(body))))
        .collect()
}

fn envelope<T>(body: T) -> Envelope<T> {
    Envelope {
        protocol: PROTOCOL,
        load: LoadSummary::default(),
        body,
    }
}

fn encode(message: &impl serde::Serialize) -> Vec<u8> {
    codec::encode(message, MAX_SUBMIT_BYTES).unwrap()
}

fn streams() -> Vec<Vec<u8>> {
    let submit = Submit {
        request: REQUEST,
        epoch: Epoch(1),
        reservation: Some(3),
        model: "m".into(),
        kind: Some(RequestKind::Chat),
        http: HttpAsk {
            path: "/v1/chat/completions".into(),
            headers: vec![("x-a".into(), "b".into())],
        },
        body: Bytes::from_static(CHAT.as_bytes()),
        seed: 5,
        prepared: Some(Prepared::unread("m")),
        generated: vec![1, 2, 3],
        spoken: Vec::new(),
    };
    let attach = Attach {
        request: REQUEST,
        epoch: Epoch(2),
        from: 3,
    };
    let frame = |body| {
        encode(&Frame {
            request: REQUEST,
            epoch: Epoch(1),
            body,
        })
    };
    vec![
        encode(&Open::from(submit)),
        encode(&Open::from(attach)),
        frame(FrameBody::Started {
            prepared: None,
            prompt_tokens: 3,
        }),
        frame(FrameBody::Tokens(TokenBatch {
            index: 3,
            ids: vec![7, 8],
            text: "ab".into(),
            ..TokenBatch::default()
        })),
        frame(FrameBody::Failed(EngineError::Broken("x".into()))),
    ]
}

fn parcels() -> Vec<Vec<u8>> {
    let header = ParcelHeader {
        migration: MigrationId {
            request: REQUEST,
            epoch: Epoch(1),
            target: NodeId(3),
            attempt: 1,
        },
        stage: StageIndex(2),
        kind: ParcelKind::Stage(KvRange::new(Tokens(16), Tokens(48)).unwrap()),
        head_bytes: 10,
        body_bytes: 4_096,
    };
    let opening = Opening {
        serial: 9,
        header,
        parts: 1,
    };
    let part = PartOpening { serial: 9, part: 1 };
    vec![
        wire::encode(&opening).unwrap().to_vec(),
        wire::encode(&part).unwrap().to_vec(),
        wire::encode(&Reply::Taken).unwrap().to_vec(),
    ]
}

fn datagrams() -> Vec<Vec<u8>> {
    let now = Duration::from_secs(1_800_000_000);
    // Of another cluster: the target's key is another one.
    let ring = KeyRing::new(ClusterKey::from_bytes([9; 32]));
    let sealer = Sealer::new(&ring, SenderId([2; 8])).unwrap();
    vec![
        Framing::Sealed(Box::new(sealer))
            .seal(now, b"hello")
            .unwrap(),
        Framing::Open.seal(now, b"hello").unwrap(),
    ]
}

#[test]
#[ignore = "writes into the source tree"]
fn the_corpus_is_written() {
    let texts = |all: &[&str]| all.iter().map(|text| text.as_bytes().to_vec()).collect();
    let facts = testing::facts(7, 3);
    let record = testing::record(&facts, &LoadSummary::default()).unwrap();
    let all: [(&str, Vec<Vec<u8>>); 10] = [
        ("datagram", datagrams()),
        ("record", texts(&[&record[0], &record[1]])),
        ("control", messages()),
        ("streams", streams()),
        ("parcel", parcels()),
        ("client_body", texts(&[CHAT, COMPLETION])),
        ("engine_stream", texts(&[EVENTS])),
        ("engine_load", texts(&[METRICS, SLOTS])),
        (
            "ledger",
            vec![(0..120).collect(), vec![3, 2, 4, 4, 1, 2, 2, 5, 0, 1]],
        ),
        (
            "sessions",
            vec![(0..200).collect(), vec![0; 40], vec![1; 40]],
        ),
    ];
    for (name, inputs) in all {
        let folder = folder(name);
        fs::create_dir_all(&folder).unwrap();
        for (number, input) in inputs.iter().enumerate() {
            fs::write(folder.join(format!("{number:02}")), input).unwrap();
        }
    }
}
