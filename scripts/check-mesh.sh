#!/usr/bin/env bash
# Holds a mesh of three nodes against a single idle node, with the official OpenAI client, and then kills
# one of the three. Ends with one line, `PASS mesh: figures` or `FAIL mesh: figures`.
#
#   scripts/check-mesh.sh [--requests N] [--at-once N] [--seed N] [--keep-logs]
set -euo pipefail
source "$(dirname "$0")/lib.sh"

CLIENT="openai==3.57.0"

need_python 'import venv, ensurepip, socket' "to run the OpenAI client" python3-venv
build_release
MODEL="$("$ROOT/scripts/fetch-model.sh")"

VENV="$CACHE/venv-${CLIENT/==/-}"
if ! "$VENV/bin/python" -c 'import openai' 2>/dev/null; then
    say "Installing the OpenAI client ($CLIENT) into $VENV"
    "$PYTHON" -m venv --clear "$VENV"
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check "$CLIENT" >&2
fi

say "Checking"
exec "$VENV/bin/python" "$ROOT/scripts/check_mesh.py" --binary "$SHOAL" --model "$MODEL" "$@"
