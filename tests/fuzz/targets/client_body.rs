//! Bodies of clients' requests, on every path that reads one.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| shoal_tests::fuzz::run("client_body", bytes));
