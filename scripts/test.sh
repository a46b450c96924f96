#!/usr/bin/env bash
# Everything that must hold before a change goes in: format, clippy, docs, dependencies, tests.
#
#   scripts/test.sh           all of it
#   scripts/test.sh --quick   format and tests only
#
# All in the dev profile, so that llama.cpp is compiled once. Ends with the totals.
set -euo pipefail
source "$(dirname "$0")/lib.sh"

QUICK=false
case "${1:-}" in
    "") ;;
    --quick) QUICK=true ;;
    *) die "usage: $0 [--quick]" ;;
esac

cd "$ROOT"
need_build_packages
scratch
OUTPUT="$FOLDER/output"
PASSED=0 FAILED=0 SKIPPED=0
BROKEN=()

# step NAME COMMAND...: runs one step; a failure is remembered and the next step still runs.
step() {
    local name="$1" began=$SECONDS
    shift
    say "$name"
    if patiently "at it ($name)" "$@"; then
        note "$name: ok, $((SECONDS - began)) s"
    else
        note "$name: FAILED, $((SECONDS - began)) s"
        BROKEN+=("$name")
    fi
}

# tests NAME COMMAND...: the same for a test runner, whose counts are added to the totals.
tests() {
    local name="$1" passed failed skipped
    : >"$OUTPUT"
    # shellcheck disable=SC2016  # the inner shell expands it
    step "$name" bash -c '"${@:2}" 2>&1 | tee "$1"; exit "${PIPESTATUS[0]}"' tests "$OUTPUT" "${@:2}"
    read -r passed failed skipped < <(counts "$OUTPUT")
    PASSED=$((PASSED + passed))
    FAILED=$((FAILED + failed))
    SKIPPED=$((SKIPPED + skipped))
}

# Passed, failed and skipped tests in the output of cargo test or nextest.
counts() {
    awk '
        { gsub(/\033\[[0-9;]*m/, "") }
        /^test result: / {
            for (i = 1; i <= NF; i++) {
                if ($i == "passed;") passed += $(i - 1)
                if ($i == "failed;") failed += $(i - 1)
                if ($i == "ignored;") skipped += $(i - 1)
            }
        }
        /^ *Summary \[/ {
            for (i = 1; i <= NF; i++) {
                word = $i; sub(/,$/, "", word)
                if (word == "passed") passed += $(i - 1)
                if (word == "failed" || word == "timed") failed += $(i - 1)
                if (word == "skipped") skipped += $(i - 1)
            }
        }
        END { print passed + 0, failed + 0, skipped + 0 }
    ' "$1"
}

step "format" cargo fmt --all --check
if ! $QUICK; then
    step "clippy" cargo clippy --locked --workspace --all-targets -- -D warnings
    step "docs" env RUSTDOCFLAGS=-Dwarnings cargo doc --locked --workspace --no-deps --document-private-items
    if command -v cargo-deny >/dev/null; then
        # Not the advisories: a new one must not stop an unrelated change.
        step "dependencies" cargo deny check licenses bans sources
    else
        note "dependencies: not checked, there is no cargo-deny"
    fi
fi
if command -v cargo-nextest >/dev/null; then
    tests "tests" cargo nextest run --locked --workspace --no-fail-fast
else
    tests "tests" cargo test --locked --workspace --all-targets --no-fail-fast
fi
if ! $QUICK; then tests "doc tests" cargo test --locked --workspace --doc; fi
if ! $QUICK; then
    # Two real llama-servers, which come from the package index, once.
    if bash "$ROOT/scripts/check-engines.sh" --prepare; then
        step "real engines" bash "$ROOT/scripts/check-engines.sh" --dev
    else
        note "real engines: not checked, they could not be fetched"
        SKIPPED=$((SKIPPED + 1))
    fi
fi

if ! $QUICK; then
    step "chaos" bash "$ROOT/scripts/chaos.sh" --dev --loopback --seconds 30 --seed 1
fi

say "Totals after $SECONDS s"
if ((${#BROKEN[@]})); then note "broken steps: ${BROKEN[*]}"; fi
printf '%d passed, %d failed, %d skipped\n' "$PASSED" "$FAILED" "$SKIPPED"
((FAILED == 0 && ${#BROKEN[@]} == 0))
