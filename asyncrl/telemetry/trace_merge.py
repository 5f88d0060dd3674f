"""All processes' spans as one file in the Chrome trace format, which ui.perfetto.dev opens."""

import gzip
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

Event = dict[str, Any]

SUFFIX = ".trace.jsonl"
SHORTEST_US = 1.0
"""Perfetto does not draw slices of no length, and an arrow needs a slice to sit in."""


def merge(run_dir: Path) -> Path:
    """Write `RUN_DIR/trace.json.gz` from `RUN_DIR/logs/*.trace.jsonl` and return its path.

    One process track a worker, one thread track below it for each thread, further ones where spans of concurrent
    tasks overlap. Arrows keep the names given to `flow_start` and `flow_end`.
    """
    files = [_read(path) for path in sorted((run_dir / "logs").glob(f"*{SUFFIX}"))]
    start = min((_wall(event, events[0]) for events in files for event in events if "at" in event), default=0.0)
    target, unfinished = run_dir / "trace.json.gz", run_dir / "trace.json.gz.part"
    with gzip.open(unfinished, "wt", encoding="utf-8", compresslevel=5) as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        separator = ""
        for pid, events in enumerate(files, 1):
            for event in _process(pid, events, start):
                file.write(separator + json.dumps(event, separators=(",", ":")))
                separator = ",\n"
        file.write("\n]}\n")
    os.replace(unfinished, target)
    return target


def _read(path: Path) -> list[Event]:
    """The events of one process, its header first; the torn last line of a killed process is left out."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    events: list[Event] = [json.loads(line) for line in lines]
    return events or [{"process": path.name.removesuffix(SUFFIX), "clock": 0.0, "wall": 0.0}]


def _wall(event: Event, header: Event) -> float:
    return float(header["wall"]) + float(event["at"]) - float(header["clock"])


def _process(pid: int, events: list[Event], start: float) -> Iterator[Event]:
    header = events[0]
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": header["process"]}}

    def microseconds(event: Event) -> float:
        return round((_wall(event, header) - start) * 1e6, 3)

    slices = [_slice(event, microseconds(event)) for event in events if "span" in event]
    flows = [(event, microseconds(event)) for event in events if "flow" in event]
    homes = {piece["span"]: piece for piece in slices}
    marks = [_mark(event, at) for event, at in flows if event["in"] not in homes]
    slices += marks
    homes |= {piece["span"]: piece for piece in marks}
    yield from _placed(pid, slices)
    for event, at in flows:
        home = homes.get(event["in"]) or homes[_mark_number(event)]
        yield _arrow(pid, event, at, home)
    for event in events:
        if "counter" in event:
            at = microseconds(event)
            yield {"ph": "C", "name": event["counter"], "pid": pid, "tid": 0, "ts": at, "args": event["values"]}
        if "left_out" in event:
            named = {"name": f"{header['process']} ({event['left_out']} events left out)"}
            yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": named}


def _slice(event: Event, at: float) -> Event:
    length = max(SHORTEST_US, round(event["for"] * 1e6, 3))
    return {**event, "ts": at, "dur": length}


def _mark_number(event: Event) -> str:
    return f"{event['end']} {event['flow']}"


def _mark(event: Event, at: float) -> Event:
    """A slice of its own for an arrow that no span holds."""
    number = _mark_number(event)
    return {"span": number, "name": event["name"], "ts": at, "dur": SHORTEST_US, "thread": event["thread"]}


def _placed(pid: int, slices: list[Event]) -> Iterator[Event]:
    """Give each slice a track on which it overlaps no other but by lying inside it."""
    tracks: dict[str, list[list[float]]] = {}
    tids: dict[tuple[str, int], int] = {}
    for piece in sorted(slices, key=lambda piece: (piece["ts"], -piece["dur"])):
        thread = piece["thread"]
        lane = _lane(tracks.setdefault(thread, []), piece["ts"], piece["ts"] + piece["dur"])
        if (thread, lane) not in tids:
            tids[thread, lane] = len(tids) + 1
            name = thread if lane == 0 else f"{thread} ({lane + 1})"
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tids[thread, lane], "args": {"name": name}}
        piece["tid"] = tids[thread, lane]
        yield {"ph": "X", "cat": "asyncrl", "pid": pid, **_kept(piece, ("name", "ts", "dur", "tid", "args"))}


def _lane(lanes: list[list[float]], start: float, end: float) -> int:
    """The first lane where [start, end) is free or lies inside the innermost open slice; `lanes` holds open ends."""
    for number, open_ends in enumerate(lanes):
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        if not open_ends or end <= open_ends[-1]:
            open_ends.append(end)
            return number
    lanes.append([end])
    return len(lanes) - 1


def _arrow(pid: int, event: Event, at: float, home: Event) -> Event:
    inside = min(max(at, home["ts"]), home["ts"] + home["dur"])
    common = {"cat": "sample", "name": "sample", "id": event["flow"], "pid": pid, "tid": home["tid"], "ts": inside}
    return {"ph": "s", **common} if event["end"] == "start" else {"ph": "f", "bp": "e", **common}


def _kept(event: Event, keys: Iterable[str]) -> Event:
    return {key: event[key] for key in keys if key in event}
