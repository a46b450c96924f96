#!/usr/bin/env bash
# What a node in front of an engine adds to a request, in time and CPU, beside nginx, vllm-router and SMG in the same run.
# Prints a table and ratios to nginx; there is no verdict. nginx is taken from PATH, or unpacked into the cache without
# being installed; what is not to be had is left out. Takes about five minutes.
#
#   scripts/bench-front.sh [--rounds N] [--effort FACTOR] [--keep-logs]
set -euo pipefail
source "$(dirname "$0")/lib.sh"

ROUTER="vllm-router==0.1.17"
SMG="smg==1.13.0"

# Leaves in NGINX an nginx that runs, if there is one.
find_nginx() {
    local unpacked="$CACHE/nginx/usr/sbin/nginx"
    NGINX="$(command -v nginx || true)"
    if [[ -n "$NGINX" ]]; then return 0; fi
    if [[ ! -x "$unpacked" ]] && command -v apt-get >/dev/null && command -v dpkg >/dev/null; then
        say "Unpacking nginx into $CACHE/nginx"
        scratch
        if (cd "$FOLDER" && apt-get download nginx) >&2; then dpkg -x "$FOLDER"/nginx_*.deb "$CACHE/nginx"; fi
        rm -rf -- "$FOLDER"
    fi
    if [[ -x "$unpacked" ]] && "$unpacked" -v 2>/dev/null; then
        NGINX="$unpacked"
    else
        note "there is no nginx to hold the node against: install it, for example with apt-get install nginx-light"
    fi
}

# router NAME PACKAGE MODULE: leaves in COMMAND the command of a router that comes as a Python package, or nothing.
router() {
    COMMAND=""
    if (need_venv "${2/==/-}" "import $3" "$2"); then COMMAND="$CACHE/venv-${2/==/-}/bin/$1"; else note "without $1"; fi
}

need_python 'import asyncio, venv, ensurepip' "to serve and to load" python3-venv
find_nginx
router vllm-router "$ROUTER" vllm_router.launch_router
ROUTER_COMMAND="$COMMAND"
router smg "$SMG" smg.cli
SMG_COMMAND="$COMMAND"
build_release

say "Measuring"
exec "$PYTHON" "$ROOT/scripts/bench_front.py" --binary "$SHOAL" --nginx "$NGINX" \
    --vllm-router "$ROUTER_COMMAND" --smg "$SMG_COMMAND" "$@"
