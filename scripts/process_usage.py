"""What a process holds: memory, threads and open files, as Linux counts them; and how many files it may."""

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


def raise_file_limit():
    """As many open files as this process may have; the nodes inherit it. Returns how many."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most
