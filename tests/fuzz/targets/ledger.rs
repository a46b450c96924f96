//! What happens to the ledger of a request: each byte says what comes next.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| shoal_tests::fuzz::run("ledger", bytes));
