//! JSON with its members in the order they are written: clients of one engine see one order.

use serde_json::value::RawValue;

/// A value as it will be sent.
pub(super) type Json = Box<RawValue>;

/// A list of members with their values as they will be sent.
macro_rules! members {
    ($($name:literal: $value:expr),* $(,)?) => {
        vec![$(($name, serde_json::value::to_raw_value(&$value).expect("plain values"))),*]
    };
}

/// An object with its members in this order.
macro_rules! ordered {
    ($($name:literal: $value:expr),* $(,)?) => {
        $crate::engine_server::json::object(&[
            $(($name, serde_json::value::to_raw_value(&$value).expect("plain values"))),*
        ])
    };
}

pub(super) use {members, ordered};

/// An object of these members, in this order.
pub(super) fn object(members: &[(&str, Json)]) -> Json {
    let parts: Vec<String> = members
        .iter()
        .map(|(name, value)| format!("{}:{}", quoted(name), value.get()))
        .collect();
    RawValue::from_string(format!("{{{}}}", parts.join(","))).expect("an object of JSON values")
}

fn quoted(name: &str) -> String {
    serde_json::to_string(name).expect("a name")
}
