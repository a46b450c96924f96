#!/usr/bin/env bash
# Starts two nodes in network namespaces of their own, joined by a wire, without seeds: with `--mdns` they
# must find each other, without it they must not. Needs root, for the namespaces. Ends with one line,
# `PASS mdns: figures` or `FAIL mdns: figures`.
#
#   scripts/check-mdns.sh
set -euo pipefail
source "$(dirname "$0")/lib.sh"

((EUID == 0)) || die "network namespaces need root: run it with sudo"
need_packages "to make network namespaces and to ask the nodes" iproute2 curl
build_release

LEFT="shoal-$$-a"
RIGHT="shoal-$$-b"
remove_namespaces() {
    stop_children
    ip netns del "$LEFT" 2>/dev/null || true
    ip netns del "$RIGHT" 2>/dev/null || true
}
trap 'remove_namespaces; cleanup' EXIT

scratch
"$SHOAL" keygen --out "$FOLDER/key" >&2
ip netns add "$LEFT"
ip netns add "$RIGHT"
ip link add wire netns "$LEFT" type veth peer name wire netns "$RIGHT"
for side in "$LEFT 10.77.0.1" "$RIGHT 10.77.0.2"; do
    read -r name address <<<"$side"
    ip -n "$name" addr add "$address/24" dev wire
    ip -n "$name" link set lo up
    ip -n "$name" link set wire up
    ip -n "$name" route add 224.0.0.0/4 dev wire
done

# start NAMESPACE ADDRESS [FLAG…]
start() {
    local name="$1" address="$2"
    shift 2
    ip netns exec "$name" "$SHOAL" node --listen "$address" --cluster-key-file "$FOLDER/key" \
        --engine sim:a10/llama-2-7b --data-dir "$FOLDER/$address" "$@" >"$FOLDER/$address.log" 2>&1 &
    CHILDREN+=("$!")
}

# Nodes that the left one sees.
seen() {
    ip netns exec "$LEFT" curl -s --max-time 2 http://10.77.0.1:8080/mesh/nodes |
        grep -o '"peer_id"' | wc -l || true
}

# wait_for COUNT SECONDS: the tenths of a second it took are left in TOOK; fails when the time is over.
wait_for() {
    for ((TOOK = 0; TOOK < $2 * 10; TOOK++)); do
        if (($(seen) == $1)); then return 0; fi
        sleep 0.1
    done
    return 1
}

say "Two nodes without seeds and without mDNS"
start "$LEFT" 10.77.0.1
start "$RIGHT" 10.77.0.2
wait_for 1 30 || { echo "FAIL mdns: the first node did not serve within 30 s"; exit 1; }
if wait_for 2 5; then
    echo "FAIL mdns: two nodes without seeds and without --mdns found each other"
    exit 1
fi
stop_children

say "The same with mDNS"
start "$LEFT" 10.77.0.1 --mdns
start "$RIGHT" 10.77.0.2 --mdns
if wait_for 2 30; then
    echo "PASS mdns: two nodes without seeds found each other after 0.1 s x $TOOK, and not within 5 s without --mdns"
else
    echo "FAIL mdns: two nodes with --mdns did not find each other within 30 s"
    exit 1
fi
