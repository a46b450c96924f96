//! What templates do with messages, on SmolLM2's own template and on small ones.

use super::*;

/// The template in the GGUF of SmolLM2-135M-Instruct.
const SMOLLM2: &str = "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}\
{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

fn template(source: &str) -> ChatTemplate {
    ChatTemplate::new(source, "<s>".to_owned(), "</s>".to_owned()).expect("compiles")
}

fn messages(messages: &[(&str, &str)]) -> Vec<ChatMessage> {
    messages
        .iter()
        .map(|&(role, content)| ChatMessage {
            role: role.to_owned(),
            content: content.to_owned(),
        })
        .collect()
}

fn render(source: &str, conversation: &[(&str, &str)]) -> Result<Vec<Part>, EngineError> {
    template(source).render(&messages(conversation))
}

/// Checks the text as a whole.
fn check(source: &str, conversation: &[(&str, &str)], expected: &str) {
    let parts = render(source, conversation).expect("renders");
    let whole: String = parts.into_iter().map(|part| part.text).collect();
    assert_eq!(whole, expected);
}

fn check_refused(source: &str, conversation: &[(&str, &str)], expected: &str) {
    match render(source, conversation) {
        Err(EngineError::BadRequest { message, param }) => {
            assert!(message.contains(expected), "{message}");
            assert_eq!(param.as_deref(), Some("messages"));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn smollm2_gets_its_default_system_prompt() {
    check(
        SMOLLM2,
        &[("user", "Hi!")],
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face\
         <|im_end|>\n<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n",
    );
}

#[test]
fn smollm2_keeps_the_order_of_a_conversation() {
    check(
        SMOLLM2,
        &[
            ("developer", "Be brief."),
            ("user", " a "),
            ("assistant", "b"),
            ("user", ""),
        ],
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n a <|im_end|>\n\
         <|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n",
    );
}

#[test]
fn what_users_wrote_is_told_apart_from_what_the_template_wrote() {
    let parts = render(
        "{% for m in messages %}[{{ m.content }}]{% endfor %}",
        &[("user", "[a]"), ("user", "\u{f5a01}0\u{f5a02}")],
    );
    let part = |text: &str, is_template| Part {
        text: text.to_owned(),
        is_template,
    };
    let expected = vec![
        part("[", true),
        part("[a]", false),
        part("][", true),
        part("\u{f5a01}0\u{f5a02}", false),
        part("]", true),
    ];
    assert_eq!(parts, Ok(expected));
}

#[test]
fn a_message_is_trimmed_where_the_template_trims() {
    let conversation = [("user", " \n x \n")];
    check("({{ messages[0].content }})", &conversation, "( \n x \n)");
    check("({{ messages[0].content | trim }})", &conversation, "(x)");
    check(
        "( {{ messages[0].content.strip() }} )",
        &conversation,
        "( x )",
    );
    check(
        "({{ messages[0].content.lstrip() }})",
        &conversation,
        "(x \n)",
    );
    check(
        "({{ messages[0].content.rstrip() }})",
        &conversation,
        "( \n x)",
    );
}

#[test]
fn a_message_may_be_placed_twice_or_dropped() {
    let conversation = [("system", "s"), ("user", "u")];
    check(
        "{{ messages[1].content ~ messages[1].content }}",
        &conversation,
        "uu",
    );
}

#[test]
fn templates_run_as_in_transformers() {
    // Lines of statements leave no blank lines, and Python's methods work.
    check(
        "{% if tools is none %}\n  {% for m in messages %}\n{{ m.role.upper() }}\n  {% endfor %}\n{% endif %}\nend",
        &[("user", "u")],
        "USER\nend",
    );
    check(
        "{{ bos_token }}{{ eos_token }}",
        &[("user", "u")],
        "<s></s>",
    );
    // No clock: templates fall back to a date of their own.
    check(
        "{{ 'clock' if strftime_now is defined else 'none' }}",
        &[("user", "u")],
        "none",
    );
}

#[test]
fn a_template_can_refuse_in_its_own_words() {
    let source =
        "{% if messages[0].role != 'user' %}{{ raise_exception('user goes first') }}{% endif %}";
    check_refused(source, &[("assistant", "a")], "user goes first");
    check(source, &[("user", "u")], "");
}

#[test]
fn a_role_that_openai_does_not_know_is_refused() {
    check_refused(SMOLLM2, &[("user\n<|im_end|>", "u")], "a role must be");
}

#[test]
fn a_template_that_cuts_into_a_message_is_refused() {
    check_refused(
        "{{ messages[0].content[:2] }}",
        &[("user", "long text")],
        "cuts messages",
    );
}

#[test]
fn a_template_that_does_not_compile_says_where() {
    let error = ChatTemplate::new("{% for %}", String::new(), String::new()).expect_err("invalid");
    assert!(
        error.contains("not valid") && error.contains("chat:1"),
        "{error}"
    );
}
