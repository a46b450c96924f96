//! The few calls into llama.cpp that its wrapper does not offer safely. All `unsafe` of the engine
//! is in this file.

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_void};
use std::sync::OnceLock;

use llama_cpp_2::LlamaStateSeqFlags;
use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::llama_backend::LlamaBackend;
use llama_cpp_sys_2::{
    GGML_LOG_LEVEL_CONT, GGML_LOG_LEVEL_ERROR, ggml_log_level, ggml_log_set, llama_log_set,
    llama_print_system_info,
};

/// Bytes of llama.cpp's error lines that are kept for our own error text: a few lines.
const KEPT_ERROR_BYTES: usize = 1024;

thread_local! {
    /// Error lines that llama.cpp wrote on this thread since [`take_errors`] was last called.
    /// llama.cpp reports why a load failed only there.
    static ERRORS: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Starts llama.cpp, once per process, with its log going to `tracing` at debug level.
///
/// # Errors
/// Somebody else in this process started it; it is not ours then.
pub(super) fn backend() -> Result<&'static LlamaBackend, String> {
    static BACKEND: OnceLock<Result<LlamaBackend, String>> = OnceLock::new();
    BACKEND
        .get_or_init(|| {
            // The wrapper's own bridge to tracing panics, inside a C callback, on lines without a
            // level, and llama.cpp writes such lines.
            // SAFETY: the callback is a function of this program, takes any text and keeps no pointer.
            unsafe {
                llama_log_set(Some(log_line), std::ptr::null_mut());
                ggml_log_set(Some(log_line), std::ptr::null_mut());
            }
            LlamaBackend::init().map_err(|error| error.to_string())
        })
        .as_ref()
        .map_err(Clone::clone)
}

/// What llama.cpp complained of on this thread since the last call.
pub(super) fn take_errors() -> String {
    ERRORS.take()
}

/// Instruction sets and code paths that llama.cpp was compiled with, in its own words.
pub(super) fn build_features() -> &'static str {
    static FEATURES: OnceLock<String> = OnceLock::new();
    FEATURES.get_or_init(|| {
        // SAFETY: gives a zero-terminated string that lives in a static buffer of llama.cpp. The
        // function rewrites the buffer at every call, so it is called once, here.
        let text = unsafe {
            let text = llama_print_system_info();
            if text.is_null() {
                return String::new();
            }
            CStr::from_ptr(text)
        };
        text.to_string_lossy().into_owned()
    })
}

/// Writes the KV of a sequence to the beginning of `buffer`, and cuts that to its length. What was in it is
/// overwritten: a buffer used again is filled without being zeroed.
///
/// # Errors
/// llama.cpp did not write what it had announced.
pub(super) fn export_sequence(
    context: &LlamaContext<'_>,
    sequence: i32,
    buffer: &mut Vec<u8>,
) -> Result<(), String> {
    let flags = LlamaStateSeqFlags::empty();
    let size = context.state_seq_get_size_ext(sequence, flags);
    buffer.resize(size, 0);
    // SAFETY: the buffer has the bytes that llama.cpp says it writes, counted by the same code that writes them;
    // nothing changes the context between the two calls, as both borrow it on the one thread that owns it.
    let written = unsafe { context.state_seq_get_data_ext(buffer.as_mut_ptr(), sequence, flags) };
    if written == size {
        Ok(())
    } else {
        Err(format!("llama.cpp wrote {written} bytes of KV, not {size}"))
    }
}

/// Replaces the KV of a sequence by one in llama.cpp's form.
///
/// The caller has compared the structure with what this context writes itself, and the sequence exists.
///
/// # Errors
/// llama.cpp did not take it in; the sequence is empty then.
pub(super) fn import_sequence(
    context: &mut LlamaContext<'_>,
    sequence: i32,
    kv: &[u8],
) -> Result<(), String> {
    take_errors();
    // SAFETY: llama.cpp reads within the slice, whose length it is given, and answers what it cannot read with an
    // error; the mistakes it aborts on (an unknown sequence) the caller has excluded.
    let taken =
        unsafe { context.state_seq_set_data_ext(kv, sequence, LlamaStateSeqFlags::empty()) };
    if taken {
        Ok(())
    } else {
        Err(format!("llama.cpp takes in no such KV: {}", take_errors()))
    }
}

/// llama.cpp's log callback. Must not unwind.
unsafe extern "C" fn log_line(level: ggml_log_level, text: *const c_char, _: *mut c_void) {
    if text.is_null() {
        return;
    }
    // SAFETY: llama.cpp passes a zero-terminated string that lives for the time of the call.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
    let line = text.trim();
    // Continuations are the dots of its progress bars.
    if line.is_empty() || level == GGML_LOG_LEVEL_CONT {
        return;
    }
    tracing::debug!(target: "shoal::llama", level, line);
    if level == GGML_LOG_LEVEL_ERROR {
        ERRORS.with_borrow_mut(|errors| {
            if errors.len() + line.len() < KEPT_ERROR_BYTES {
                if !errors.is_empty() {
                    errors.push_str("; ");
                }
                errors.push_str(line);
            }
        });
    }
}
