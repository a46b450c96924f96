//! The few calls into llama.cpp that its wrapper does not offer safely. All `unsafe` of the engine
//! is in this file.

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_void};
use std::sync::OnceLock;

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
