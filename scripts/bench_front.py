"""What a node in front of an engine adds to a request, beside other ways to get there, in one run.

Run by bench-front.sh, which gets the binary and the others ready. The engine is bench_stub.py, which takes no time; the ways
to it are direct, through a node, through nginx as a reverse proxy, and through vllm-router and SMG where they are there.
Each round asks by every way in turn, so that whatever else the machine does hits all of them; what a way adds is its median
less that of the direct way. CPU is that of the way's processes, all threads, as the kernel counts it.

There is no verdict: the output is the table, and the ratios to nginx.
"""

import argparse
import asyncio
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench_stub import MODEL
from bench_ways import Direct, NginxWay, NodeWay, RouterWay, SmgWay, start_stub
from mesh_nodes import Failure, note, share

# Streams at once, milliseconds between two events, and requests of each stream in a round.
LEVELS = [(1, 5, 8), (32, 5, 3), (256, 20, 2)]
EVENTS = 64
# What an event costs is the slope between streams of these lengths.
SHORT, LONG = 16, 256
SLOPE_STREAMS, SLOPE_EVERY_MS = 32, 5
# Seconds one wave of requests may take; beyond it something hangs.
WAVE_WITHIN = 120
IDLE_SECONDS = 2.0


class Stream(asyncio.Protocol):
    """One kept connection that asks one streamed chat after the other, and notes when the bytes came."""

    def __init__(self):
        self.end, self.lost = None, None

    def connection_made(self, transport):
        self.transport = transport

    def connection_lost(self, error):
        self.lost = f"connection lost: {error}"
        self.done(Failure(self.lost))

    def done(self, error=None):
        if self.end is not None and not self.end.done():
            if error:
                self.end.set_exception(error)
            else:
                self.end.set_result(None)

    async def ask(self, request):
        """Seconds to the first event and to the last byte, and all bytes."""
        if self.lost:
            raise Failure(self.lost)
        self.end, self.parts, self.first = asyncio.get_running_loop().create_future(), [], None
        began = time.perf_counter()
        self.transport.write(request)
        await self.end
        return self.first - began, self.last - began, b"".join(self.parts)

    def data_received(self, data):
        now = time.perf_counter()
        # The head may come before the first event does.
        if self.first is None and b"data:" in data:
            self.first = now
        self.parts.append(data)
        if data.endswith(b"0\r\n\r\n") or b"HTTP/1.1 200" not in self.parts[0][:16]:
            self.last = now
            if self.first is None:
                self.done(Failure(f"no stream, but {b''.join(self.parts)[:300]!r}"))
            else:
                self.done()


def request(port, events, every_ms):
    body = (
        f'{{"model":"{MODEL}","messages":[{{"role":"user","content":"Tell me three things about bread."}}],'
        f'"max_tokens":{events},"seed":{every_ms},"temperature":0,"stream":true}}'
    )
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n{body}".encode()


def events_in(raw):
    """Events of a stream that carry a piece, whatever chunks they were cut into on the way."""
    body, text = raw.partition(b"\r\n\r\n")[2], b""
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        text += body[:length]
        body = body[length + 2:]
    return text.count(b'"content":')


async def wave(way, streams, each, events, every_ms):
    """So many streams at once, each with so many requests in turn: times to the first and the last byte, and the way's CPU."""
    loop = asyncio.get_running_loop()
    opened = [await loop.create_connection(Stream, "127.0.0.1", way.port) for _ in range(streams)]
    text, short = request(way.port, events, every_ms), request(way.port, 2, 1)
    firsts, totals = [], []

    async def one(stream, number):
        # Not all at the same moment: so do clients come.
        await asyncio.sleep(number / streams * every_ms / 1e3)
        for _ in range(each):
            first, total, raw = await stream.ask(text)
            # The first event has an empty piece, and each other a token.
            if (seen := events_in(raw)) != events + 1:
                raise Failure(f"{way.name}: {seen} events of {events + 1}: {raw[-300:]!r}")
            firsts.append(first)
            totals.append(total)

    try:
        # Connections to the engine are opened now, and kept: what is measured is a client and a way that know each other.
        await asyncio.wait_for(asyncio.gather(*(stream.ask(short) for _, stream in opened)), WAVE_WITHIN)
        before = way.cpu_seconds()
        await asyncio.wait_for(asyncio.gather(*(one(stream, number) for number, (_, stream) in enumerate(opened))), WAVE_WITHIN)
        cpu = way.cpu_seconds() - before
    except asyncio.TimeoutError:
        raise Failure(f"{way.name}: {streams} streams hang") from None
    finally:
        for transport, _ in opened:
            transport.close()
    return firsts, totals, cpu


class Tally:
    """What was measured of one way at one level."""

    def __init__(self):
        self.firsts, self.totals, self.cpu = [], [], 0.0

    async def add(self, way, streams, each, events, every_ms):
        firsts, totals, cpu = await wave(way, streams, each, events, every_ms)
        self.cpu += cpu
        self.firsts += firsts
        self.totals += totals

    def cpu_ms(self):
        return 1e3 * self.cpu / len(self.totals)


def millis(values, part):
    return 1e3 * share(values, part)


async def level(ways, rounds, streams, every_ms, each, events):
    """All ways in turn, so many rounds; a tally by way."""
    tallies = {way.name: Tally() for way in ways}
    for number in range(rounds):
        # Another way is first each time.
        for way in ways[number % len(ways):] + ways[:number % len(ways)]:
            await tallies[way.name].add(way, streams, each, events, every_ms)
    return tallies


def table(ways, levels):
    print("way          | streams | first byte p50/p99 ms | total p50/p99 ms  | added p50: first, total ms | CPU ms/request")
    for (streams, every_ms, _), tallies in levels:
        direct = tallies["direct"]
        for way in ways:
            tally = tallies[way.name]
            first, total = millis(tally.firsts, 0.5), millis(tally.totals, 0.5)
            added = (first - millis(direct.firsts, 0.5), total - millis(direct.totals, 0.5))
            beside = "            -              |       -" if way.name == "direct" else \
                f"{added[0]:11.3f} {added[1]:11.3f}    | {tally.cpu_ms():9.3f}"
            print(f"{way.name:12} | {streams:7} | {first:9.3f} {millis(tally.firsts, 0.99):9.3f}   | "
                  f"{total:8.2f} {millis(tally.totals, 0.99):8.2f} | {beside}")


def costs(ways, short, long, idle, memory):
    """The second half of the table; CPU microseconds an event by way."""
    print("way          | CPU us/event | CPU ms/request with 16 events | idle CPU ms/s | memory at start, at end, growth MB")
    slopes = {}
    for way in ways:
        if way.name == "direct":
            continue
        slopes[way.name] = 1e3 * (long[way.name].cpu_ms() - short[way.name].cpu_ms()) / (LONG - SHORT)
        start, end = memory[way.name], way.memory_mb()
        print(f"{way.name:12} | {slopes[way.name]:12.2f} | {short[way.name].cpu_ms():29.3f} | {idle[way.name]:13.2f} | "
              f"{start:8.1f} {end:8.1f} {end - start:8.1f}")
    return slopes


def ratios(ways, levels, slopes):
    """Each way's figures as multiples of nginx's."""
    for way in ways:
        if way.name in ("direct", "nginx"):
            continue
        said = [f"CPU/event {slopes[way.name] / slopes['nginx']:.2f}"]
        for (streams, _, _), tallies in levels:
            theirs, own, base = tallies["nginx"], tallies[way.name], millis(tallies["direct"].firsts, 0.5)
            added, nginx = millis(own.firsts, 0.5) - base, millis(theirs.firsts, 0.5) - base
            first = f"{added / nginx:.2f}" if nginx > 0.01 else "-"
            said.append(f"at {streams} CPU/request {own.cpu_ms() / theirs.cpu_ms():.2f}, added first byte {first}")
        print(f"ratio to nginx, {way.name}: {'; '.join(said)}")


async def measure(ways, options):
    memory, idle = {}, {}
    for way in ways:
        # Opens what each way opens at its first request.
        await wave(way, 4, 2, SHORT, 1)
    befores = {way.name: way.cpu_seconds() for way in ways}
    await asyncio.sleep(IDLE_SECONDS)
    for way in ways:
        idle[way.name] = 1e3 * (way.cpu_seconds() - befores[way.name]) / IDLE_SECONDS
        memory[way.name] = way.memory_mb()
    levels = []
    for streams, every_ms, each in LEVELS:
        each = max(1, round(each * options.effort))
        note(f"{streams} streams of {EVENTS} events every {every_ms} ms, {each} requests each, {options.rounds} rounds")
        levels.append(((streams, every_ms, each), await level(ways, options.rounds, streams, every_ms, each, EVENTS)))
    note(f"{SLOPE_STREAMS} streams of {SHORT} and of {LONG} events")
    short = await level(ways, options.rounds, SLOPE_STREAMS, SLOPE_EVERY_MS, max(1, round(8 * options.effort)), SHORT)
    long = await level(ways, options.rounds, SLOPE_STREAMS, SLOPE_EVERY_MS, max(1, round(2 * options.effort)), LONG)
    table(ways, levels)
    slopes = costs(ways, short, long, idle, memory)
    if "nginx" in slopes:
        ratios(ways, levels, slopes)


async def bench(options, folder):
    stub, ways = await start_stub(folder), []
    wanted = [Direct(stub), NodeWay(options.binary, stub, folder), NginxWay(options.nginx, stub, folder),
              RouterWay(options.vllm_router, stub, folder), SmgWay(options.smg, stub, folder)]
    try:
        for way in wanted:
            if not way.there():
                note(f"without {way.name}")
                continue
            ways.append(way)
            await way.start()
        await measure(ways, options)
    finally:
        for way in ways:
            way.stop()
        stub.stop()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", help="the shoal binary")
    parser.add_argument("--nginx", help="the nginx binary")
    parser.add_argument("--vllm-router", help="the vllm-router command")
    parser.add_argument("--smg", help="the smg command")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--effort", type=float, default=1.0, help="how many times as many requests as usual")
    parser.add_argument("--keep-logs", action="store_true")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="shoal-bench."))
    failed = None
    try:
        asyncio.run(bench(options, folder))
    except (Failure, OSError, subprocess.SubprocessError) as error:
        failed = f"{type(error).__name__}: {error}"
    except KeyboardInterrupt:
        failed = "interrupted"
    if failed or options.keep_logs:
        note(f"logs: {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    if failed:
        sys.exit(f"bench-front: {failed}")


if __name__ == "__main__":
    main()
