#!/usr/bin/env bash
# Three nodes on this machine, a real model, and some questions to different nodes.
#
#   scripts/demo.sh          build, start, ask, stop
#   scripts/demo.sh --keep   the same, and leave the mesh running until Ctrl-C
set -euo pipefail
source "$(dirname "$0")/lib.sh"

NODES=3
READY_WITHIN=180 # seconds for three model loads, on a slow disk and a busy machine
KEEP=false
case "${1:-}" in
    "") ;;
    --keep) KEEP=true ;;
    *) die "usage: $0 [--keep]" ;;
esac

# ask NODE PROMPT: streams an answer from one node and says who ran it.
ask() {
    local node="$1" prompt="$2" body headers="$RUN/headers"
    body="$("$PYTHON" -c 'import json, sys; print(json.dumps({
        "model": sys.argv[1], "stream": True, "temperature": 0, "max_tokens": 60,
        "messages": [{"role": "user", "content": sys.argv[2]}]}))' "$MODEL_ID" "$prompt")"
    printf '\n[asked node %s] %s\n  ' "$node" "$prompt"
    curl -sS -N --fail-with-body --max-time 120 -D "$headers" "http://127.0.0.1:${HTTP[$node]}/v1/chat/completions" \
        -H 'content-type: application/json' -d "$body" |
        "$PYTHON" -u -c '
import json, sys
for line in sys.stdin:
    if line.startswith("data: {"):
        event = json.loads(line[6:])
        if "error" in event:
            sys.exit("the answer broke off: " + event["error"]["message"])
        for choice in event["choices"]:
            print((choice["delta"].get("content") or "").replace("\n", "\n  "), end="", flush=True)
    elif line.strip() not in ("", "data: [DONE]"):
        sys.stderr.write(line)
'
    printf '\n  -> ran on node %s\n' "$(name_of "$(tr -d '\r' <"$headers" | awk -F': ' 'tolower($1) == "x-shoal-host" {print $2}')")"
}

# name_of ID: the number under which this script started the node with this id.
name_of() {
    local node
    for ((node = 1; node <= NODES; node++)); do
        if [[ "${ID[$node]}" == "$1" ]]; then
            printf '%s (%s)' "$node" "$1"
            return
        fi
    done
    printf '%s' "$1"
}

# view NODE EXPRESSION: what a line of Python makes of the view of a node.
view() { curl -fsS --max-time 2 "http://127.0.0.1:${HTTP[$1]}/mesh/nodes" 2>/dev/null | "$PYTHON" -c "import json, sys; view = json.load(sys.stdin); print($2)"; }

READY='sum((node["load"] or {}).get("readiness") == "Ready" for node in view["nodes"])'

start_mesh() {
    local node seeds="" log
    mapfile -t ports < <(free_ports "$NODES")
    ((${#ports[@]} == NODES)) || die "no free ports"
    for ((node = 1; node <= NODES; node++)); do
        read -r "HTTP[$node]" "MESH[$node]" <<<"${ports[$((node - 1))]}"
        seeds+="${seeds:+,}127.0.0.1:${MESH[$node]}"
    done
    for ((node = 1; node <= NODES; node++)); do
        log="$RUN/node$node.log"
        NO_COLOR=1 "$SHOAL" node --data-dir "$RUN/node$node" --http-port "${HTTP[$node]}" --mesh-port "${MESH[$node]}" \
            --seeds "$seeds" --cluster demo --cluster-key-file "$RUN/cluster.key" \
            --model "$MODEL" --model-id "$MODEL_ID" --reproducible --threads 1 >"$log" 2>&1 &
        PID[node]=$!
        CHILDREN+=("${PID[$node]}")
        note "node $node: http://127.0.0.1:${HTTP[$node]}, mesh ${MESH[$node]}/udp, log $log"
    done
}

wait_for_mesh() {
    local node deadline=$((SECONDS + READY_WITHIN)) seen told=""
    for ((node = 1; node <= NODES; node++)); do
        until seen="$(view "$node" "$READY" 2>/dev/null || echo 0)" && ((seen == NODES)) &&
            curl -fsS -o /dev/null --max-time 2 "http://127.0.0.1:${HTTP[$node]}/readiness" 2>/dev/null; do
            if ! kill -0 "${PID[$node]}" 2>/dev/null; then
                tail -n 20 "$RUN/node$node.log" >&2
                die "node $node ended; the last lines of its log are above"
            fi
            if ((SECONDS >= deadline)); then
                tail -n 20 "$RUN/node$node.log" >&2
                die "node $node is not ready after $READY_WITHIN s; the last lines of its log are above"
            fi
            if [[ "$node $seen" != "$told" ]]; then
                note "node $node sees $seen of $NODES nodes ready"
                told="$node $seen"
            fi
            sleep 0.25
        done
        ID[node]="$(view "$node" 'view["this"]')"
        note "node $node is ${ID[$node]}: ready, sees all $NODES"
    done
}

started=$SECONDS
need_packages "to talk to the nodes" curl ca-certificates
need_python 'import json, socket' "to fetch the model and read the answers"
build_release
built=$SECONDS

MODEL="$("$ROOT/scripts/fetch-model.sh")"
MODEL_ID="smollm2-135m"
scratch
RUN="$FOLDER"
declare -a HTTP MESH PID ID

say "Starting $NODES nodes"
"$SHOAL" keygen --out "$RUN/cluster.key" >/dev/null
start_mesh
wait_for_mesh

say "Asking different nodes (whoever is asked, any node may run it)"
ask 1 "What is the capital of France? Answer in one sentence."
ask 2 "Name three fish that swim in shoals."
ask 3 "Write one sentence about the sea."
ask 1 "What is 2 + 3?"

say "The mesh as node 2 sees it (shoal status --node http://127.0.0.1:${HTTP[2]})"
"$SHOAL" status --node "http://127.0.0.1:${HTTP[2]}"

cat <<EOT

Build: $((built - started)) s (system packages included). Model, start and questions: $((SECONDS - built)) s.

Ask it yourself while it runs, any node:
  curl -N http://127.0.0.1:${HTTP[1]}/v1/chat/completions -H 'content-type: application/json' \\
    -d '{"model": "$MODEL_ID", "stream": true, "messages": [{"role": "user", "content": "Hello!"}]}'
  OpenAI(base_url="http://127.0.0.1:${HTTP[2]}/v1", api_key="none")      # the official Python client
  curl http://127.0.0.1:${HTTP[3]}/metrics
  $SHOAL status --node http://127.0.0.1:${HTTP[1]}
EOT

if $KEEP; then
    printf '\nThe mesh runs until you press Ctrl-C here. Logs and data: %s\n' "$RUN"
    # Ends early only when a node does.
    wait -n "${PID[@]}" || true
    tail -n 5 "$RUN"/node*.log >&2
    die "a node ended by itself; the last lines of the logs are above"
fi
printf '\nStopping the mesh. scripts/demo.sh --keep leaves it running.\n'
