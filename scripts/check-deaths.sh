#!/usr/bin/env bash
# Kills, stops and restarts nodes of a mesh of four that serves a real model, under load, and holds every stream
# against an unbroken run. Ends with one line, `PASS deaths: figures` or `FAIL deaths: figures`.
#
#   scripts/check-deaths.sh [--rounds N] [--streams N] [--parts deaths,rolling,slow] [--seed N] [--keep-logs]
#
#   --rounds 20      as often as the project promises it; one round takes about 40 seconds on two cores
#   --parts LIST     deaths: kill -9 of a busy host; rolling: each node restarted in order; slow: a host that stands still
set -euo pipefail
source "$(dirname "$0")/lib.sh"

need_python 'import asyncio, json' "to ask the nodes" python3
build_release
MODEL="$("$ROOT/scripts/fetch-model.sh")"

say "Checking"
exec "$PYTHON" "$ROOT/scripts/check_deaths.py" --binary "$SHOAL" --model "$MODEL" "$@"
