"""`asyncrl replay` gives a service of a recorded run again what it was given, and says where its answers differ by now.
It does so in this process: run it under a debugger, or after a change of the code."""

import asyncio
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.deploy.commands.command_parser import CommandParser

if TYPE_CHECKING:
    from asyncrl.deploy.commands.replayed_service import RecordedWorker, ReplayedCall

SHOWN = 5
"""Differences of one call that are printed."""


def main(arguments: list[str]) -> int:
    asked = _parser().parse_args(arguments)
    import torch

    from asyncrl.deploy.commands.replayed_service import recorded_worker

    worker = recorded_worker(asked.run, asked.service, asked.replica)
    torch.set_num_threads(worker.spec.facts.config.fleet.threads)  # Sums of other parts have other bits.
    if asked.smallest is not None:
        return _shrink(worker, asked.smallest - 1, asked.when)
    return _replay(worker, asked.first, asked.last)


def _parser() -> CommandParser:
    parser = CommandParser("asyncrl replay", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="Name a run that was recorded (run --record).")
    parser.add_argument("--service", default="training", help="Name the service; default: training.")
    parser.add_argument("--replica", type=int, default=0, help="Number of the replica; default: 0.")
    parser.add_argument("--from", dest="first", type=int, metavar="STEP", help="First step to compare.")
    parser.add_argument("--to", dest="last", type=int, metavar="STEP", help="Last step to compare.")
    text = "Find the smallest set of groups with which this step shows the same (see --when), and compare nothing."
    parser.add_argument("--smallest", type=int, metavar="STEP", help=text)
    text = "What the step shows: skipped (default), or a metric and its bound, such as 'grad_norm > 5'."
    parser.add_argument("--when", default="skipped", metavar="CONDITION", help=text)
    return parser


def _replay(worker: "RecordedWorker", first: int | None, last: int | None) -> int:
    from asyncrl.deploy.commands.replayed_service import replay, steps_from
    from asyncrl.errors import ConfigError

    checkpoint = None
    records = worker.records
    versions = worker.versions
    if versions:
        wanted, end = steps_from((first, last), versions)
        begin, checkpoint = worker.start(wanted) if first is not None else _earliest(worker)
        records = worker.records_from(begin)
        print(f"replays {worker.spec.instance} from {checkpoint or 'the beginning of the run'}, version {begin}")
    elif first is not None or last is not None:
        raise ConfigError(f"--from and --to: {worker.spec.service} learns nothing, and knows no steps")
    shown = _Shown(worker.spec.service, -1 if not versions or first is None else wanted, end if versions else None)
    deadline = worker.spec.facts.config.fleet.call_deadline
    unordered = asyncio.run(replay(worker.spec, records, checkpoint, shown.take, deadline))
    print(shown.summary)
    if unordered:
        print(f"{unordered} values were computed beside an update, on its other side now, and are not compared")
    return 1 if shown.differing else 0


def _earliest(worker: "RecordedWorker") -> "tuple[int, Path | None]":
    """Returns the earliest state from which all that follows is recorded."""
    from asyncrl.errors import ConfigError

    for version in worker.versions:
        try:
            return worker.start(version)
        except ConfigError:
            continue
    return worker.start(worker.versions[-1])


class _Shown:
    """Prints calls that differ. first, last: versions of those that are compared."""

    def __init__(self, service: str, first: int, last: int | None) -> None:
        self.compared = 0
        self.differing = 0
        self._service = service
        self._first = first
        self._last = last

    def take(self, call: "ReplayedCall") -> bool:
        """Returns whether to go on."""
        version = getattr(call.args[0], "version", None) if call.method in ("step", "update") else None
        if call.method in ("release", "prefetch") or (version is not None and version < self._first):
            return True
        if self._last is not None and version is not None and version > self._last:
            return False
        self.compared += 1
        if call.differences or call.tensors:
            self.differing += 1
            print(f"{_named(call, version)} differs{_tensors(call)}:")
            for place, recorded, found in [*call.tensors, *call.differences][:SHOWN]:
                print(f"  {place}: recorded {recorded!r:.100}, now {found!r:.100}")
            if version is not None:
                print("the steps after it begin from other weights, and are not compared")
                return False
        elif version is not None:
            print(f"{_named(call, version)}: the same, {call.tensor_count} tensors to the bit")
        return True

    @property
    def summary(self) -> str:
        same = "the same" if not self.differing else f"{self.differing} differ"
        return f"{self.compared} calls of {self._service} were compared: {same}"


def _named(call: "ReplayedCall", version: int | None) -> str:
    return call.method if version is None else f"step {version + 1}"


def _tensors(call: "ReplayedCall") -> str:
    return (
        f", first in {call.tensors[0][0]} ({len(call.tensors)} of {call.tensor_count} tensors)" if call.tensors else ""
    )


def _shrink(worker: "RecordedWorker", version: int, when: str) -> int:
    """Prints the groups that show it."""
    from asyncrl.deploy.commands.replayed_service import Condition, StepTrials, smallest, trainer_at
    from asyncrl.errors import ConfigError

    if worker.spec.service != "training":
        raise ConfigError("--smallest: only steps of training are shrunk")
    condition, (cuts, rows) = Condition(when), worker.batch(version)
    with closing(StepTrials(trainer_at(worker, version), worker.spec)) as trials:
        outcome = trials.outcome(rows, cuts.incarnation, version)
        if not condition.holds(outcome):
            print(f"step {version + 1} with all {len(rows)} samples does not show {when!r} in this build")
            return 1
        groups = list(dict.fromkeys(row.group for row in rows))
        found = smallest(
            groups,
            lambda some: condition.holds(
                trials.outcome([row for row in rows if row.group in some], cuts.incarnation, version)
            ),
        )
    samples = [f"{row.group}.{row.member}" for row in rows if row.group in found]
    print(f"step {version + 1} shows {when!r} with {len(found)} of {len(groups)} groups: {', '.join(map(str, found))}")
    print(f"their samples: {', '.join(samples)}")
    return 0
