#!/usr/bin/env bash
# Attacks a mesh of two nodes from outside (no key, wrong keys, replays, floods, bombs, slow and half-open clients) while others
# use it, and changes its key under load. Prints a table of what was observed, and ends with one line, `PASS strangers: figures`
# or `FAIL strangers: figures`.
#
#   scripts/check-strangers.sh [--datagrams N] [--connections N] [--at-once N] [--handshakes N] [--keep-logs]
#
#   Takes about five minutes. The QUIC client comes from the package index, once; without it those rows are left to the tests.
set -euo pipefail
source "$(dirname "$0")/lib.sh"

CLIENT="aioquic==1.7.2"

need_python 'import venv, ensurepip, socket' "to attack the nodes" python3-venv
# In a shell of its own: what cannot be fetched ends that one only.
if (need_venv "${CLIENT/==/-}" 'import aioquic' "$CLIENT"); then PYTHON="$CACHE/venv-${CLIENT/==/-}/bin/python"; fi
build_release

say "Checking"
exec "$PYTHON" "$ROOT/scripts/check_strangers.py" --binary "$SHOAL" "$@"
