#!/usr/bin/env bash
# Kills, stops, cuts off, drains and joins the nodes of a mesh under load, and checks every stream token by token. Ends
# with one line, `PASS chaos: figures` or `FAIL chaos: figures`.
#
#   scripts/chaos.sh [--seconds N] [--nodes N] [--seed N] [--streams N] [--engine sim|model] [--loopback] [--keep-logs]
#
#   --seconds 60     for which events begin, one every few seconds
#   --seed N         decides which events happen, in which order; a run says its own
#   --engine model   the demo model instead of a simulated engine, which needs more of the machine
#   --loopback       no network namespaces, so no cable is pulled; the same without root or without `ip`
set -euo pipefail
source "$(dirname "$0")/lib.sh"

need_python 'import asyncio, json' "to ask the nodes" python3
if [[ "${1:-}" == --dev ]]; then shift && dev_binary; else build_release; fi
MODEL=()
for word in "$@"; do
    if [[ "$word" == model || "$word" == --engine=model ]]; then MODEL=(--model "$("$ROOT/scripts/fetch-model.sh")"); fi
done

say "Checking"
exec "$PYTHON" "$ROOT/scripts/chaos.py" --binary "$SHOAL" ${MODEL[@]+"${MODEL[@]}"} "$@"
