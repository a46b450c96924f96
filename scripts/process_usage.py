"""What a process holds: memory, threads and open files, as Linux counts them."""

import os
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
