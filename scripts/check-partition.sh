#!/usr/bin/env bash
# Cuts a mesh of four nodes in two halves under load and heals it, then loses the packets of one node to another. Needs
# root, for network namespaces. Ends with one line, `PASS partition: figures` or `FAIL partition: figures`.
#
#   scripts/check-partition.sh [--seconds N] [--seed N] [--keep-logs]
set -euo pipefail
source "$(dirname "$0")/lib.sh"

if ((EUID != 0)); then
    echo "FAIL partition: network namespaces need root: run it with sudo"
    exit 1
fi
need_packages "to make network namespaces" iproute2
need_python 'import asyncio, json' "to ask the nodes" python3
build_release

say "Checking"
exec "$PYTHON" "$ROOT/scripts/check_partition.py" --binary "$SHOAL" "$@"
