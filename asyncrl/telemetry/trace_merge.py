"""All processes' spans as one file in the Chrome trace format, which ui.perfetto.dev opens."""

import gzip
import os
from pathlib import Path

SUFFIX = ".trace.jsonl"
COMPRESSION = 1
"""Of gzip's levels: the next ones take half as long again, for a tenth less."""


def merge(run_dir: Path) -> Path:
    """Write `RUN_DIR/trace.json.gz` from `RUN_DIR/logs/*.trace.jsonl` and return its path.

    One process track a worker. Below it one for each thread, and as many for the calls on its event loop as there were
    at a time: "calls 1" is taken first.
    """
    target, unfinished = run_dir / "trace.json.gz", run_dir / "trace.json.gz.part"
    with gzip.open(unfinished, "wb", compresslevel=COMPRESSION) as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        separator = b""
        for path in sorted((run_dir / "logs").glob(f"*{SUFFIX}")):
            if events := _events(path):
                file.write(separator + events)
                separator = b",\n"
        file.write(b"\n]}\n")
    os.replace(unfinished, target)
    return target


def _events(path: Path) -> bytes:
    """Of one process, as items of a list; the torn last line of a killed process is left out."""
    lines, _, _ = path.read_bytes().rpartition(b"\n")
    return lines.replace(b"\n", b",\n")
