#!/usr/bin/env bash
# Holds nodes beside two real llama-servers to what a client and an operator expect: every request answered, rows that
# follow the engines' own numbers, an engine killed, streams moved with their KV, also while the target dies and while nodes
# leave. Ends with one line, `PASS engines: figures` or `FAIL engines: figures`. Everything that is fetched is cached; without
# a network it runs once that is there.
#
#   scripts/check-engines.sh [--prepare|--dev] [--requests N] [--at-once N] [--streams N] [--without-kv] [--keep-logs]
#                            [--parts 'mixed,freeness,models,hanging up,hand-over,moving,target killed,rolling drain,nothing held,killed engine']
#   --prepare     fetch what it needs and stop
#   --dev         as the tests do it: with the binary that they built, and ten times the patience
#   --without-kv  requests move by recompute, as with servers that give no KV away
#   --kv-streams, --kv-tokens, --kv-clients, --engine-kills, --node-kills: how much of it the parts about KV do
set -euo pipefail
source "$(dirname "$0")/lib.sh"

MANNER=release
case "${1:-}" in
    --prepare | --dev) MANNER="${1#--}" && shift ;;
esac

CLIENT="openai==3.57.0"
SERVER="xllamacpp==2026.10.11549"

need_python 'import venv, ensurepip, socket' "to run llama-server and the OpenAI client" python3-venv
need_venv "llama-server-${SERVER#*==}" 'import xllamacpp' "$SERVER"
ENGINE="$VENV/bin/python"
need_venv "${CLIENT/==/-}" 'import openai' "$CLIENT"
MODEL="$("$ROOT/scripts/fetch-model.sh")"
case "$MANNER" in
    prepare) exit 0 ;;
    release) build_release ;;
    dev) dev_binary ;;
esac

say "Checking"
exec "$VENV/bin/python" "$ROOT/scripts/check_engines.py" --binary "$SHOAL" --model "$MODEL" --engine-python "$ENGINE" "$@"
