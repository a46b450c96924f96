//! What an engine beside the node says of its load, as the answer to each question.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| shoal_tests::fuzz::run("engine_load", bytes));
