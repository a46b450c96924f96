#!/usr/bin/env bash
# Moves running requests between three nodes that serve a real model, and holds their output against an unmoved
# run; then measures what a move costs. Ends with one line, `PASS handover: figures` or `FAIL handover: figures`.
#
#   scripts/check-handover.sh [--rounds N] [--streams N] [--seed N] [--lengths 128,512,...] [--pool] [--skew] [--keep-logs]
#
#   --rounds 20      as often as the project promises it; one round takes about a minute on two cores
#   --lengths ''     no table of costs, which takes about a quarter of an hour
#   --pool           outputs that differ in the shared pool, with and without moves
#   --skew           a skewed load, with rescheduling on and off
set -euo pipefail
source "$(dirname "$0")/lib.sh"

need_python 'import asyncio, json' "to ask the nodes" python3
build_release
MODEL="$("$ROOT/scripts/fetch-model.sh")"

say "Checking"
exec "$PYTHON" "$ROOT/scripts/check_handover.py" --binary "$SHOAL" --model "$MODEL" "$@"
