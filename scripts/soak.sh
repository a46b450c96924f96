#!/usr/bin/env bash
# Loads three nodes with a simulated engine with streams, hang-ups, bad requests, bursts and kills, and looks whether a
# process grows. Ends with one line, `PASS soak: figures` or `FAIL soak: figures`.
#
#   scripts/soak.sh [--minutes N] [--overload N] [--nodes N] [--seed N] [--sim-speed FACTOR] [--kill-every SECONDS] [--keep-logs]
#
#   --minutes 5      the first third is warm-up; for a day: scripts/soak.sh --minutes 1440
#   --overload 0     minutes of ten times what fits, after that
#   --sim-speed 8    how many times faster than a real one an engine runs; needs more of the machine
set -euo pipefail
source "$(dirname "$0")/lib.sh"

need_python 'import asyncio, json' "to ask the nodes" python3
build_release

say "Checking"
exec "$PYTHON" "$ROOT/scripts/soak.py" --binary "$SHOAL" "$@"
