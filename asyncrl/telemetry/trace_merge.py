"""Merges the spans of all processes into one file in the Chrome trace format, which ui.perfetto.dev opens."""

import gzip
import os
from pathlib import Path

SUFFIX = ".trace.jsonl"
COMPRESSION = 1
"""Level of gzip: the next levels take half as long again and save a tenth."""


def merge(run_dir: Path) -> Path:
    """Writes `RUN_DIR/trace.json.gz` from `RUN_DIR/logs/*.trace.jsonl` and returns its path.

    Each worker has a process track, with a track for each thread and as many tracks for calls on its event loop as
    ran at the same time; "calls 1" is used first.
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
    """Returns the events of one process as items of a list, without the torn last line of a killed process."""
    lines, _, _ = path.read_bytes().rpartition(b"\n")
    return lines.replace(b"\n", b",\n")
