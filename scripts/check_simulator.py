"""Holds the simulator against real processes under the same requests.

Run by check-simulator.sh, which gets the binary ready. Eight nodes with the simulated engine serve a workload in real time,
over loopback, with all that the product does between processes; then the simulator runs the same requests. What must hold:

1. The load generator and the simulator draw the same requests from the same seed, one by one.
2. No request fails in either.
3. TTFT mean, TBT mean and TBT P99 are within the bound of the simulator's.

Placement is by chance in both, so the simulator runs the same requests with twenty seeds, and its mean is what counts; the
table shows how far apart these runs are, and the one run with the seed of the requests.

The last line is `PASS simulator: figures` or `FAIL simulator: figures`.
"""

import argparse
import csv
import json
import subprocess

from mesh_nodes import Failure, SimulatedNodes, conclude, environment, load, note

READY_WITHIN = 60
SIMULATED_WITHIN = 120
PROFILE = "a10/llama-7b"
# The context of the profile: a longer request is refused.
CONTEXT = 8192
# Runs of the simulator with other chance. Their mean TTFTs are 2 to 3 % apart (one standard deviation).
PLACEMENTS = 20
# Arrivals are written in microseconds, each rounded by itself.
SAME_ARRIVAL_S = 2e-6
# A generator that starts requests later than a decode step takes adds to each TTFT what the simulator has not.
START_DELAY = 0.04

# Key, name, unit, factor to the unit, and whether it counts. Shown only are TTFT P50, to which the 3 to 6 ms that a request
# spends between processes are close to the bound already, TTFT P99, which hangs on six requests in six hundred, and the
# end-to-end time, which follows from TBT.
FIGURES = [
    ("ttft_mean", "TTFT mean", "ms", 1e3, True),
    ("ttft_p50", "TTFT P50", "ms", 1e3, False),
    ("ttft_p99", "TTFT P99", "ms", 1e3, False),
    ("tbt_mean", "TBT mean", "ms", 1e3, True),
    ("tbt_p99", "TBT P99", "ms", 1e3, True),
    ("e2e_mean", "E2E mean", "s", 1, False),
]


def simulate(options, arguments):
    """One call of the simulator; its figures."""
    command = [options.binary, "simulate", "--json", "--nodes", str(options.nodes), "--profile", PROFILE, *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=SIMULATED_WITHIN, env=environment())
    if ran.returncode != 0:
        raise Failure(f"the simulator ended with {ran.returncode}: {ran.stderr[-500:]}")
    return json.loads(ran.stdout)["cases"][0]["policies"]["shoal"]


def rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def differing(real, simulated, speed):
    """Requests that are not the same in both; None where they are not even as many."""
    if len(real) != len(simulated):
        return None

    def same(one, other):
        apart = abs(float(one["arrival_s"]) * speed - float(other["arrival_s"]))
        lengths = all(one[key] == other[key] for key in ("prompt_tokens", "output_tokens"))
        return lengths and apart <= SAME_ARRIVAL_S * speed

    return sum(not same(one, other) for one, other in zip(real, simulated))


async def serve(options, folder, workload):
    """The real processes; what the load generator says."""
    nodes = SimulatedNodes(options.binary, PROFILE, folder)
    try:
        nodes.start_mesh(options.nodes, ["--sim-speed", str(options.speed)], seeds=1)
        await nodes.wait_until_ready(nodes.all(), READY_WITHIN)
        rate = ["--rate", str(options.rate * options.speed)]
        return await load(options.binary, nodes.all(), [*workload, *rate, "--csv", str(folder / "real.csv")])
    finally:
        await nodes.stop_all()


def table(options, real, alone, many):
    """Prints the figures side by side; gives the ratios that count."""
    note(f"           |    real | simulated, mean of {PLACEMENTS} | ratio | same seed | ratio")
    counting = {}
    for key, name, unit, factor, counts in FIGURES:
        # Of an engine that is so many times faster everything takes so much less.
        here, mean, one = real[key] * options.speed * factor, many[key] * factor, alone[key] * factor
        spread = many[f"{key}_ci95"] * factor
        note(
            f"{name:10} | {here:7.1f} | {mean:7.1f} ± {spread:<5.1f} {unit:2}        | {here / mean:5.3f} | "
            f"{one:9.1f} | {here / one:5.3f}{'' if counts else '   shown only'}"
        )
        if counts:
            counting[name] = here / mean
    return counting


async def compare(options, folder):
    workload = ["--lengths", options.lengths, "--requests", str(options.requests), "--seed", str(options.seed),
                "--max-tokens-total", str(CONTEXT)]
    drawn = folder / "simulated.csv"
    alone = simulate(options, [*workload, "--rate", str(options.rate), "--csv", str(drawn)])
    many = simulate(options, ["--trace", str(drawn), "--seeds", str(PLACEMENTS)])
    last = max(float(row["arrival_s"]) + float(row["e2e_s"] or 0) for row in rows(drawn)) / options.speed
    note(f"{options.requests} requests over {options.nodes} processes; the simulator says that it takes {last:.0f} s")
    said = await serve(options, folder, workload)
    real, complaints = said["summary"], []
    if real["failed"] or alone["failed"]:
        raise Failure(f"{real['failed']} real requests failed, {alone['failed']:.0f} simulated ones: {said['reasons']}")
    differ = differing(rows(folder / "real.csv"), rows(drawn), options.speed)
    if differ != 0:
        share = "another number" if differ is None else f"{differ} of {options.requests}"
        complaints.append(f"the same seed gave other requests: {share}")
    late = said["worst_start_delay_s"] * options.speed
    if late > START_DELAY or said["late_starts"]:
        complaints.append(f"this machine is too slow: requests started up to {1e3 * late:.0f} ms late")
    counting = table(options, real, alone, many)
    for name, ratio in counting.items():
        if abs(ratio - 1) > options.bound:
            complaints.append(f"{name} is {ratio:.3f} of the simulator's, more than {options.bound:.0%} apart")
    ratios = ", ".join(f"{name} {ratio:.3f}" for name, ratio in counting.items())
    return [f"real to simulated: {ratios}", f"{real['finished']} requests, started {1e3 * late:.0f} ms late at most"], complaints


async def check(options, folder):
    try:
        return await compare(options, folder)
    except (Failure, OSError, subprocess.SubprocessError) as error:
        return [], [f"{type(error).__name__}: {error}"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", required=True, help="the shoal binary")
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--rate", type=float, default=3.5, help="arrivals a second at the engine's own speed")
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--lengths", default="llumnix-sharegpt", help="of `shoal bench load`")
    parser.add_argument("--speed", type=float, default=1.0, help="how many times faster engines and arrivals are")
    parser.add_argument("--seed", type=int, default=1, help="decides arrivals and lengths")
    parser.add_argument("--bound", type=float, default=0.10, help="how far from the simulator's a figure may be")
    parser.add_argument("--keep-logs", action="store_true", help="keep the nodes' folders even if all is well")
    conclude("simulator", parser.parse_args(), check)


if __name__ == "__main__":
    main()
