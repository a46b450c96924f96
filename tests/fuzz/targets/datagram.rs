//! Gossip datagrams, as they come from the network, at nodes with and without a key.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| shoal_tests::fuzz::run("datagram", bytes));
