#!/usr/bin/env bash
# Holds the simulator against eight real processes under the same requests. Ends with one line,
# `PASS simulator: figures` or `FAIL simulator: figures`.
#
#   scripts/check-simulator.sh [--nodes N] [--rate PER_S] [--requests N] [--lengths NAME] [--speed FACTOR] [--seed N]
#                              [--bound SHARE] [--keep-logs]
#
#   Takes about four minutes. --speed 4 takes a quarter of the time and four times the processor: some three cores, and
#   beyond what the machine has the figures are the machine's.
set -euo pipefail
source "$(dirname "$0")/lib.sh"

need_python 'import asyncio, json' "to ask the nodes" python3
build_release

say "Checking"
exec "$PYTHON" "$ROOT/scripts/check_simulator.py" --binary "$SHOAL" "$@"
