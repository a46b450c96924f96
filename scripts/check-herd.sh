#!/usr/bin/env bash
# Measures how evenly requests lie on eight nodes that serve a simulated model, with 1, 4 and 8 of them asked by
# clients. Ends with one line, `PASS herd: figures` or `FAIL herd: figures`.
#
#   scripts/check-herd.sh [--nodes N] [--entries 1,4,8] [--rate PER_S] [--warm-up S] [--seconds S] [--seed N]
#                         [--goal RATIO] [--keep-logs] [-- NODE FLAGS]
#
#   Takes about five minutes. NODE FLAGS are those of `shoal node`, for example -- --redirect-below 100000
set -euo pipefail
source "$(dirname "$0")/lib.sh"

need_python 'import asyncio, json' "to watch the nodes" python3
build_release

say "Checking"
exec "$PYTHON" "$ROOT/scripts/check_herd.py" --binary "$SHOAL" "$@"
