//! Which files become an engine, and what is said of the others.

use std::path::{Path, PathBuf};

use shoal_gossip::{Blocks, Tokens};
use shoal_node::engine::batched::TextModel;
use shoal_node::engine::llama::{LlamaConfig, load};
use shoal_tests::tiny_gguf::{CONTEXT, VOCABULARY, tiny_gguf};
use tempfile::TempDir;

use super::{config, tiny};

#[test]
fn the_tiny_model_loads_and_tells_its_facts() {
    let parts = tiny(true);
    let model = &parts.facts.models[0];
    assert_eq!(model.id, "tiny");
    assert_eq!(model.context, Tokens(512));
    assert_eq!(parts.facts.total, Blocks(128));
    assert!(parts.layout.split && parts.facts.capabilities.reproducible);
    assert_eq!(parts.text.vocabulary(), VOCABULARY);

    let shared = tiny(false);
    assert_eq!(shared.layout.tokens_per_slot, Tokens(2048.min(CONTEXT)));
    assert_eq!(shared.facts.total, Blocks(128));
    assert!(!shared.layout.split && !shared.facts.capabilities.reproducible);
    assert_ne!(shared.facts.models[0].fingerprint, model.fingerprint);
    assert_eq!(tiny(true).facts.models[0].fingerprint, model.fingerprint);
}

#[test]
fn an_operator_can_name_the_model() {
    let folder = TempDir::new().expect("a folder");
    let named = LlamaConfig {
        model_id: Some("house-model".to_owned()),
        ..config(&folder, false)
    };
    assert_eq!(
        load(&named).expect("loads").facts.models[0].id,
        "house-model"
    );
}

fn refusal(path: PathBuf) -> String {
    load(&LlamaConfig::new(path))
        .expect_err("refused")
        .to_string()
}

#[test]
fn a_file_that_is_no_model_is_refused_with_the_reason() {
    let folder = TempDir::new().expect("a folder");
    let file = |name: &str, content: &[u8]| {
        let path = folder.path().join(name);
        std::fs::write(&path, content).expect("written");
        path
    };
    let check = |path: &Path, expected: &str| {
        let text = refusal(path.to_owned());
        assert!(text.contains(expected), "{text}");
    };
    check(&folder.path().join("absent.gguf"), "does not exist");
    check(folder.path(), "is not a file");
    check(
        &file("empty", b""),
        "is truncated: needs at least 4 bytes, has 0",
    );
    check(
        &file("page.html", b"<html>not found</html>"),
        "is not a GGUF file",
    );
    check(&file("old", b"GGUF\x01\0\0\0"), "GGUF version 1");
    let model = tiny_gguf();
    let length = model.len();
    check(
        &file("cut", &model[..length - 1]),
        &format!(
            "is truncated: needs at least {length} bytes, has {}",
            length - 1
        ),
    );
}

#[test]
fn a_model_cut_anywhere_is_called_truncated() {
    let folder = TempDir::new().expect("a folder");
    let path = folder.path().join("cut.gguf");
    let model = tiny_gguf();
    for length in (0..model.len()).step_by(997) {
        std::fs::write(&path, &model[..length]).expect("written");
        let text = refusal(path.clone());
        assert!(text.contains("is truncated"), "{length}: {text}");
    }
}

#[test]
fn a_sound_file_that_llama_cpp_cannot_run_is_refused_in_its_words() {
    let folder = TempDir::new().expect("a folder");
    let path = folder.path().join("other.gguf");
    let mut model = tiny_gguf();
    let place = model
        .windows(5)
        .position(|window| window == b"llama")
        .expect("the architecture");
    model[place..place + 5].copy_from_slice(b"mamma");
    std::fs::write(&path, &model).expect("written");
    let text = refusal(path);
    assert!(text.contains("unknown model architecture"), "{text}");
}
