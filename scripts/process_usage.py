"""What a process holds and takes: memory, threads, open files and processor time, as Linux counts them; and how many files it may."""

import os
import resource
from pathlib import Path
from typing import NamedTuple


class Usage(NamedTuple):
    rss_mb: float
    threads: int
    handles: int

    def __str__(self):
        return f"{self.rss_mb:.1f} MB, {self.threads} threads, {self.handles} handles"


def usage(pid):
    """None when there is no such process (any more)."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        handles = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return None
    status = dict(line.split(":", 1) for line in lines if ":" in line)
    # A process that has ended and was not waited for has no memory.
    if "VmRSS" not in status:
        return None
    return Usage(int(status["VmRSS"].split()[0]) / 1024, int(status["Threads"]), handles)


def processor_seconds(leader):
    """Processor time that the processes of a session took so far, those that have ended and were waited for included."""
    ticks = 0
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        # From the third field on: state, parent, group, session; user and system time of its own and of its children's.
        if int(fields[3]) == leader:
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def raise_file_limit():
    """As many open files as this process may have; the nodes inherit it. Returns how many."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most
