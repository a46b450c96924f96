//! Answers in events of an engine beside the node, cut in two at a place that the first byte names.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| shoal_tests::fuzz::run("engine_stream", bytes));
