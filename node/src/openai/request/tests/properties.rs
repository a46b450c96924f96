//! Whatever is sent, it is an answer or an error.

use proptest::prelude::*;

use super::*;

fn answers_or_refuses(body: &[u8]) -> bool {
    [Chat, Completion].into_iter().all(|kind| {
        matches!(
            parse(kind, body),
            Ok(_) | Err(EngineError::BadRequest { .. })
        )
    })
}

proptest! {
    #[test]
    fn any_bytes_are_an_answer_or_an_error(body in proptest::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(answers_or_refuses(&body));
    }

    #[test]
    fn any_value_of_any_field_is_an_answer_or_an_error(
        field in "(model|messages|prompt|max_tokens|n|top_p|stop|logprobs|stream_options|tools)",
        value in r#"[\[\]{}",:0-9a-z\\.\-e ]{0,24}"#,
    ) {
        let body = format!(r#"{{"{field}":{value}}}"#);
        prop_assert!(answers_or_refuses(body.as_bytes()));
    }
}
