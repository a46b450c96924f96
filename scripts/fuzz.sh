#!/usr/bin/env bash
# Fuzzes, guided by coverage, what reads bytes of strangers, peers, clients and engines, and the cores of ledger and
# hand-over. Ends with one line, `PASS fuzz: figures` or `FAIL fuzz: figures`.
#
#   scripts/fuzz.sh [--seconds N] [--targets a,b]
#
#   --seconds 60     for each target, one after the other
#   --targets LIST   some of tests/fuzz/targets; else all
#
# Begins with the inputs in tests/fuzz/corpus, which stay as they are, and those that earlier runs found, which are kept
# in target/fuzz/corpus. Needs no nightly compiler. The first time it compiles everything, which takes some minutes.
set -euo pipefail
source "$(dirname "$0")/lib.sh"

# The version that is installed where there is none.
CARGO_FUZZ=0.13.2

# KiB of addresses that a target may take, so that a decoder that takes memory for a length it was told breaks.
MEMORY=$((1 << 20))

usage() { sed -n '2,/^set -e/ s/^# \{0,1\}//p' "$0"; }

EACH=60
TARGETS=()
while (($#)); do
    case "$1" in
        --seconds) EACH="${2:-}" ;;
        --targets) IFS=, read -r -a TARGETS <<<"${2:-}" ;;
        -h | --help) usage && exit 0 ;;
        *) usage >&2 && exit 2 ;;
    esac
    shift 2 || die "$1 wants a value"
done
[[ "$EACH" =~ ^[1-9][0-9]*$ ]] || die "--seconds wants a number of seconds"

cd "$ROOT"
if ! ((${#TARGETS[@]})); then
    for path in tests/fuzz/targets/*.rs; do TARGETS+=("$(basename "$path" .rs)"); done
fi
for name in "${TARGETS[@]}"; do
    [[ -f "tests/fuzz/targets/$name.rs" ]] || die "there is no target '$name' in tests/fuzz/targets"
done

need_cargo_fuzz() {
    export PATH="$PATH:$CACHE/cargo-fuzz/bin"
    if command -v cargo-fuzz >/dev/null; then return 0; fi
    say "Installing cargo-fuzz $CARGO_FUZZ into $CACHE/cargo-fuzz"
    patiently "installing" cargo install --quiet --locked --root "$CACHE/cargo-fuzz" "cargo-fuzz@$CARGO_FUZZ" >&2 ||
        die "cargo-fuzz could not be installed: this needs the package registry, once; afterwards it is in $CACHE"
}

# Builds all targets; the folder of the binaries is left in BUILT.
build() {
    local host
    host="$(rustc -vV | sed -n 's/^host: //p')"
    BUILT="$FOUND/$host/release"
    mkdir -p "$FOUND"
    # What is fuzzed has the dependencies that are shipped.
    if ! cmp -s Cargo.lock "$FOUND/Cargo.lock" || [[ ! -f tests/fuzz/Cargo.lock ]]; then
        cp Cargo.lock tests/fuzz/Cargo.lock
        cp Cargo.lock "$FOUND/Cargo.lock"
    fi
    say "Building the targets (the first time everything is compiled, which takes some minutes)"
    # No sanitizer: that would need a nightly compiler, and unsafe code of ours is out of reach here. `cfg(fuzzing)`
    # would change dependencies. Comparisons with constant texts stay calls of `memcmp`, which libFuzzer sees and learns
    # the texts from. llama.cpp is out of reach as well, and compiles faster without a profile.
    RUSTFLAGS="${RUSTFLAGS:-} -Cllvm-args=-max-loads-per-memcmp=0" LLAMA_LIB_PROFILE=None \
        patiently "building" cargo fuzz build --fuzz-dir tests/fuzz --sanitizer none --no-cfg-fuzzing \
        --target "$host" --target-dir "$FOUND" >&2
}

# The last number behind a word in the log of a target.
figure() { grep -oE "$1 *[0-9]+" "$2" | tail -1 | grep -oE '[0-9]+$' || echo 0; }

# Runs one target and prints its line.
fuzz() {
    local name="$1" log="$FOUND/$1.log" corpus="$FOUND/corpus/$1" artifacts="$FOUND/artifacts/$1" status=0 executions
    mkdir -p "$corpus" "$artifacts"
    # shellcheck disable=SC2016  # the inner shell expands it
    patiently "fuzzing $name" bash -c 'ulimit -v "$1" && exec "${@:3}" >"$2" 2>&1' fuzz "$MEMORY" "$log" \
        "$BUILT/$name" -max_total_time="$EACH" -timeout=10 -print_final_stats=1 -artifact_prefix="$artifacts/" \
        "$corpus" "tests/fuzz/corpus/$name" || status=$?
    executions="$(figure 'stat::number_of_executed_units:' "$log")"
    EXECUTIONS=$((EXECUTIONS + executions))
    printf '%-14s %12d executions %8d/s   coverage %6d   inputs %5d   %4d MB\n' "$name" "$executions" \
        "$(figure 'stat::average_exec_per_sec:' "$log")" "$(figure 'cov:' "$log")" "$(figure 'corp:' "$log")" \
        "$(figure 'stat::peak_rss_mb:' "$log")"
    if ((status)); then explain "$name" "$log" "$status"; fi
}

# What a target broke on, and how to see it again.
explain() {
    local name="$1" log="$2" status="$3" input
    input="$(sed -n 's/.*Test unit written to //p' "$log" | tail -1)"
    BROKEN+=("$name breaks on ${input:-no input that was written, see $log}")
    say "$name ended with status $status:"
    grep -m1 -A2 'panicked at\|ERROR: libFuzzer\|memory allocation of' "$log" >&2 || tail -3 "$log" >&2
    if [[ -z "$input" ]]; then return 0; fi
    note "all it said: $log"
    note "once more: (ulimit -v $MEMORY; $BUILT/$name $input)"
    note "in the tests, from now on: cp $input tests/fuzz/corpus/$name/ &&"
    note "    cargo test -p shoal-tests --test scenarios nothing_that_comes_in"
}

FOUND="${CARGO_TARGET_DIR:-$ROOT/target}/fuzz"
EXECUTIONS=0
BROKEN=()
need_build_packages
need_cargo_fuzz
build
say "Fuzzing each of ${#TARGETS[@]} targets for $EACH s"
for name in "${TARGETS[@]}"; do fuzz "$name"; done

if ((${#BROKEN[@]})); then
    printf -v list '%s; ' "${BROKEN[@]}"
    echo "FAIL fuzz: $list$EXECUTIONS executions of ${#TARGETS[@]} targets"
    exit 1
fi
echo "PASS fuzz: ${#TARGETS[@]} targets, $EACH s each, $EXECUTIONS executions, and nothing broke"
