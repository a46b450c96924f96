# Shared by the scripts in this folder: source it, do not run it.
# shellcheck shell=bash

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck disable=SC2034  # used by the scripts that source this
CACHE="${XDG_CACHE_HOME:-$HOME/.cache}/shoal"
CHILDREN=()   # process ids of everything a script started and must stop
SCRATCH=()    # folders to remove at the end

# Progress goes to standard error, so that a script's standard output is its result.
say() { printf '\n==> %s\n' "$*" >&2; }
note() { printf '    %s\n' "$*" >&2; }
die() {
    printf '\n%s: %s\n' "$(basename "$0")" "$*" >&2
    exit 1
}

# Stops the children, politely first, and removes the scratch folders. Runs at every exit.
cleanup() {
    local status=$?
    trap - EXIT INT TERM
    stop_children
    if ((${#SCRATCH[@]})); then rm -rf -- "${SCRATCH[@]}"; fi
    exit "$status"
}

stop_children() {
    local pid deadline=$((SECONDS + 10))
    for pid in ${CHILDREN[@]+"${CHILDREN[@]}"}; do
        kill -TERM "$pid" 2>/dev/null || true
    done
    for pid in ${CHILDREN[@]+"${CHILDREN[@]}"}; do
        while kill -0 "$pid" 2>/dev/null && ((SECONDS < deadline)); do sleep 0.1; done
        if kill -KILL "$pid" 2>/dev/null; then note "process $pid did not stop in time and was killed"; fi
        wait "$pid" 2>/dev/null || true
    done
    CHILDREN=()
}

trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# A fresh folder that is removed at the end; its path is left in FOLDER.
scratch() {
    FOLDER="$(mktemp -d "${TMPDIR:-/tmp}/shoal.XXXXXX")"
    SCRATCH+=("$FOLDER")
}

# Runs a command as root.
as_root() {
    if ((EUID == 0)); then
        "$@"
    elif command -v sudo >/dev/null; then
        sudo "$@"
    else
        die "this needs root: run it as root, install sudo, or run by hand: $*"
    fi
}

# need_packages WHY PACKAGE...: installs what is missing of these Debian packages, and says so.
need_packages() {
    local why="$1" package missing=()
    shift
    command -v dpkg-query >/dev/null ||
        die "this is not Debian or Ubuntu: install by hand what these packages hold ($why): $*"
    for package in "$@"; do
        if ! dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed'; then
            missing+=("$package")
        fi
    done
    ((${#missing[@]})) || return 0
    say "Installing system packages $why: ${missing[*]}"
    as_root env DEBIAN_FRONTEND=noninteractive apt-get update -q >&2
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${missing[@]}" >&2
}

need_build_packages() {
    need_packages "to build llama.cpp and its bindings" cmake make g++ libclang-dev
    if ! command -v cargo >/dev/null && [[ -f "$HOME/.cargo/env" ]]; then
        # shellcheck source=/dev/null
        source "$HOME/.cargo/env"
    fi
    command -v cargo >/dev/null || die "there is no cargo: install Rust (rustup) first"
}

# need_python TRY WHY PACKAGE...: leaves in PYTHON a Python 3 that can run TRY, a line of Python.
need_python() {
    local try="$1" why="$2" attempt candidate
    shift 2
    for attempt in 1 2; do
        for candidate in python3 /usr/bin/python3; do
            if "$candidate" -c "$try" >/dev/null 2>&1; then
                PYTHON="$candidate"
                return 0
            fi
        done
        if ((attempt == 1)); then need_packages "$why" python3 "$@"; fi
    done
    die "no Python 3 that can '$try'"
}

# need_venv NAME TRY PACKAGE...: leaves in VENV a cached environment of PYTHON that can run TRY, and installs these
# packages into a fresh one where there is none.
need_venv() {
    local name="$1" try="$2"
    shift 2
    VENV="$CACHE/venv-$name"
    if "$VENV/bin/python" -c "$try" >/dev/null 2>&1; then return 0; fi
    say "Installing $* into $VENV"
    "$PYTHON" -m venv --clear "$VENV"
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check "$@" >&2 ||
        die "$* could not be installed: this needs the package index, once; afterwards it is cached in $CACHE"
    "$VENV/bin/python" -c "$try" >&2 || die "$* was installed into $VENV, but does not run on this machine"
}

# patiently WHAT COMMAND...: runs a command and says every half minute that it still runs.
patiently() {
    local what="$1" started=$SECONDS teller status=0
    shift
    # Waiting on a pipe that never says anything: a `sleep` would outlive its loop and hold our output open.
    (
        exec {never}<> <(:)
        until read -r -t 30 -u "$never"; do note "… still $what, $((SECONDS - started)) s so far"; done
    ) &
    teller=$!
    CHILDREN+=("$teller")
    "$@" || status=$?
    kill "$teller" 2>/dev/null || true
    wait "$teller" 2>/dev/null || true
    return "$status"
}

# Builds the release binary if it is not up to date; its path is left in SHOAL.
build_release() {
    need_build_packages
    say "Building the release binary (the first time llama.cpp is compiled, which takes some minutes)"
    (cd "$ROOT" && patiently "building" cargo build --release --locked -p shoal-node --bin shoal >&2)
    SHOAL="${CARGO_TARGET_DIR:-$ROOT/target}/release/shoal"
    [[ -x "$SHOAL" ]] || die "cargo built no $SHOAL"
}

# The binary that the tests are run with, which scripts/test.sh has built; and time for a machine that others use as well.
dev_binary() {
    SHOAL="${CARGO_TARGET_DIR:-$ROOT/target}/debug/shoal"
    export CHECK_PATIENCE=10
    [[ -x "$SHOAL" ]] || die "there is no $SHOAL: scripts/test.sh builds it"
}

# free_ports N: prints N lines "HTTP MESH" of ports that nobody uses now; MESH + 1 is free as well.
free_ports() {
    "$PYTHON" - "$1" <<'PYTHON'
import socket, sys

def bound(kind, port):
    taken = socket.socket(socket.AF_INET, kind)
    taken.bind(("127.0.0.1", port))
    return taken

held, found = [], []
while len(found) < int(sys.argv[1]):
    http = bound(socket.SOCK_STREAM, 0)
    mesh = bound(socket.SOCK_DGRAM, 0)
    held += [http, mesh]
    port = mesh.getsockname()[1]
    if port == 65535:
        continue
    try:
        held.append(bound(socket.SOCK_DGRAM, port + 1))
    except OSError:
        continue
    found.append((http.getsockname()[1], port))
for http, mesh in found:
    print(http, mesh)
PYTHON
}
