"""All processes' spans as one file in the Chrome trace format, which ui.perfetto.dev opens."""

import gzip
import json
import os
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any

from asyncrl.telemetry.trace import CALLS

Event = dict[str, Any]
Open = list[tuple[int, int | str]]
"""Slices open on a lane, outermost first: when each ends, and its number."""

SUFFIX = ".trace.jsonl"
WRITTEN_TOGETHER = 1000
"""Events. One by one they would cost twice as much."""
SHORTEST = 1000
"""Nanoseconds. Perfetto does not draw slices of no length, and an arrow needs a slice to sit in."""


def merge(run_dir: Path) -> Path:
    """Write `RUN_DIR/trace.json.gz` from `RUN_DIR/logs/*.trace.jsonl` and return its path.

    One process track a worker. Below it one for each thread, and as many for the calls on its event loop as there were
    at a time: "calls 1" is taken first. Arrows keep the names given to `flow_start` and `flow_end`.
    """
    files = [_read(path) for path in sorted((run_dir / "logs").glob(f"*{SUFFIX}"))]
    start = min((_wall(event, events[0]) for events in files for event in events if "at" in event), default=0.0)
    target, unfinished = run_dir / "trace.json.gz", run_dir / "trace.json.gz.part"
    with gzip.open(unfinished, "wt", encoding="utf-8", compresslevel=5) as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        everything = chain.from_iterable(_process(pid, events, start) for pid, events in enumerate(files, 1))
        separator = ""
        while many := list(islice(everything, WRITTEN_TOGETHER)):
            file.write(separator + json.dumps(many, separators=(",", ":"))[1:-1])
            separator = ",\n"
        file.write("\n]}\n")
    os.replace(unfinished, target)
    return target


def _read(path: Path) -> list[Event]:
    """The events of one process, its header first; the torn last line of a killed process is left out."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    events: list[Event] = json.loads(f"[{','.join(lines)}]")
    return events or [{"process": path.name.removesuffix(SUFFIX), "clock": 0.0, "wall": 0.0}]


def _wall(event: Event, header: Event) -> float:
    return float(header["wall"]) + float(event["at"]) - float(header["clock"])


def _process(pid: int, events: list[Event], start: float) -> Iterator[Event]:
    header = events[0]
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": header["process"]}}

    def nanoseconds(event: Event, later: float = 0.0) -> int:
        return round((_wall(event, header) + later - start) * 1e9)

    slices = {event["span"]: _slice(event, nanoseconds) for event in events if "span" in event}
    flows = [(event, nanoseconds(event)) for event in events if "flow" in event]
    homes = [_home(event, at, slices) for event, at in flows]
    slices |= {home["span"]: home for home in homes}
    yield from _placed(pid, slices)
    for (event, at), home in zip(flows, homes, strict=True):
        yield _arrow(pid, event, at, home)
    for event in events:
        if "counter" in event:
            point = {"ts": nanoseconds(event) / 1000, "args": event["values"]}
            yield {"ph": "C", "name": event["counter"], "pid": pid, "tid": 0, **point}
        if "left_out" in event:
            named = {"name": f"{header['process']} ({event['left_out']} events left out)"}
            yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": named}


def _slice(event: Event, nanoseconds: Callable[[Event, float], int]) -> Event:
    begin = nanoseconds(event, 0.0)
    return {**event, "begin": begin, "end": max(begin + SHORTEST, nanoseconds(event, event["for"]))}


def _home(event: Event, at: int, slices: Mapping[int | str, Event]) -> Event:
    """The slice an arrow sits in. A task keeps the span that it was created in, which may be over: then a mark of the
    arrow's own."""
    home = slices.get(event["in"])
    if home is not None and home["begin"] <= at <= home["end"]:
        return home
    number = f"{event['end']} {event['flow']}"
    return {"span": number, "name": event["name"], "begin": at, "end": at + SHORTEST, "track": event["track"]}


def _placed(pid: int, slices: Mapping[int | str, Event]) -> Iterator[Event]:
    """Give each slice a lane where it lies inside the span that it was opened in, or alone."""
    tracks: dict[str, list[Open]] = {}
    tids: dict[tuple[str, int], int] = {}
    for piece in sorted(slices.values(), key=lambda piece: (piece["begin"], -piece["end"])):
        track = piece["track"]
        lane = _lane(tracks.setdefault(track, []), piece)
        if (track, lane) not in tids:
            tids[track, lane] = len(tids) + 1
            yield from _named(pid, tids[track, lane], track, lane)
        piece["tid"] = tids[track, lane]
        drawn = {"name": piece["name"], "ts": piece["begin"] / 1000, "dur": (piece["end"] - piece["begin"]) / 1000}
        args = {"args": piece["args"]} if "args" in piece else {}
        yield {"ph": "X", "cat": "asyncrl", "pid": pid, "tid": piece["tid"], **drawn, **args}


def _named(pid: int, tid: int, track: str, lane: int) -> Iterator[Event]:
    """Threads above the calls, those in their order."""
    name = f"{track} {lane + 1}" if track == CALLS or lane else track
    yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
    order = lane + 1 if track == CALLS else 0
    yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": order}}


def _lane(lanes: list[Open], piece: Event) -> int:
    """The lane of the span that this one was opened in, if it lies inside that; else the first free one."""
    for lane in lanes:
        while lane and lane[-1][0] <= piece["begin"]:
            lane.pop()
    inside = (number for number, lane in enumerate(lanes) if lane and _holds(lane[-1], piece))
    free = (number for number, lane in enumerate(lanes) if not lane)
    found = next(inside, next(free, len(lanes)))
    if found == len(lanes):
        lanes.append([])
    lanes[found].append((piece["end"], piece["span"]))
    return found


def _holds(innermost: tuple[int, int | str], piece: Event) -> bool:
    end, number = innermost
    return number == piece.get("in") and piece["end"] <= end


def _arrow(pid: int, event: Event, at: int, home: Event) -> Event:
    common = {"cat": "sample", "name": "sample", "id": event["flow"], "pid": pid, "tid": home["tid"], "ts": at / 1000}
    return {"ph": "s", **common} if event["end"] == "start" else {"ph": "f", "bp": "e", **common}
