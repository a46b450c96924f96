//! Messages of the stream plane, both ways.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| shoal_tests::fuzz::run("streams", bytes));
