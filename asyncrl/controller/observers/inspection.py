"""Looks into running workers for a person: a profile of torch's operators, and the digests of the trainer's weights."""

import asyncio
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from xxhash import xxh3_64_hexdigest

from asyncrl.errors import DeadlineExceeded, PeerLost, Refused
from asyncrl.fleet.health import HealthPoller
from asyncrl.fleet.remote_worker import RemoteWorker
from asyncrl.protocols.messages import HeldWeights, Profile
from asyncrl.protocols.service_contracts import Contract, Training

PROFILE = Contract.endpoints["profile"]
LONGEST = 600.0
"""Seconds of the longest profile."""
MARGIN = 120.0
"""Seconds beyond its time that a profile may take: the compute thread may be in a long function at its begin and end,
and the trace is written."""
SHOWN = 10
"""Operators, and kernels, that are printed."""


@dataclass
class WorkerProfiles:
    """Records one profile at a time. poller: has the workers. folder: takes the traces."""

    poller: HealthPoller
    folder: Path
    _recording: str = ""

    async def record(self, wanted: str, seconds: float) -> str:
        """Returns where the trace is and what took longest. wanted: a service, or one of its workers. Raises Refused
        for what cannot be profiled."""
        if not 1 <= seconds <= LONGEST:
            raise Refused(f"a profile takes 1 to {LONGEST:g} s, not {seconds:g}")
        if self._recording:
            raise Refused(f"a profile of {self._recording} is recorded now: ask again when it has ended")
        worker = self._find(wanted)
        self._recording = worker.name
        try:
            (found,) = await worker.call(PROFILE, (seconds,), seconds + MARGIN)
        except (PeerLost, DeadlineExceeded) as lost:
            raise Refused(f"{worker.name} did not end its profile: {lost}") from lost
        finally:
            self._recording = ""
        path = await asyncio.to_thread(self._write, worker.instance, found)
        return "\n".join(summary(worker.name, seconds, path, found))

    def _find(self, wanted: str) -> RemoteWorker:
        workers = [worker for worker in self.poller.workers if wanted in (worker.name, worker.service)]
        if not workers:
            names = ", ".join(worker.name for worker in self.poller.workers)
            raise Refused(f"there is no service or worker {wanted!r}; there are {names}")
        alive = [worker for worker in workers if worker.alive]
        if not alive:
            raise Refused(f"{workers[0].name} takes no calls now ({workers[0].status}): ask again when it has started")
        return alive[0]

    def _write(self, instance: str, found: Profile) -> Path:
        self.folder.mkdir(exist_ok=True)
        number = 1 + sum(1 for _ in self.folder.glob(f"{instance}.*.trace.json.gz"))
        path = self.folder / f"{instance}.{number}.trace.json.gz"
        path.write_bytes(found.trace)
        return path


def summary(name: str, seconds: float, path: Path, found: Profile) -> Iterator[str]:
    size = f"{len(found.trace) / 1e6:.1f} MB"
    yield f"{name}: {found.recorded:.1f} of {seconds:g} s are recorded, in {path} ({size}); ui.perfetto.dev opens it"
    if not found.operators:
        yield "no operator of torch ran on its compute thread in that time"
    for title, items in (("operator", found.operators), ("kernel", found.kernels)):
        total = sum(own for _, _, own in items)
        if items:
            yield f"{'ms of its own':>14} {'share':>6} {'calls':>8}  {title}"
        for each, calls, own in items[:SHOWN]:
            yield f"{1e3 * own:>14,.1f} {own / total if total else 0:>6.1%} {calls:>8,}  {each:.80}"


# ---- weights of each pipeline stage, for a person who compares ranks or versions -----------------------------------


async def describe_weights(training: Training, pattern: str) -> str:
    """Returns a line for each stage, and one for each of its tensors whose name matches the pattern. Raises Refused
    when the trainer does not answer, or no name matches."""
    try:
        held = await training.held_weights()
    except (PeerLost, DeadlineExceeded) as lost:
        raise Refused(f"the trainer did not say what weights it holds: {lost}") from lost
    names = [name for stage in held for name in stage.tensors]
    if pattern and not any(fnmatchcase(name, pattern) for name in names):
        raise Refused(f"no tensor is called {pattern!r}; one is called {names[0]!r}")
    return "\n".join(weights_lines(held, pattern))


def weights_lines(held: Sequence[HeldWeights], pattern: str = "") -> Iterator[str]:
    """Yields a table: the digest of a stage is that of the digests of its tensors, in the order of their names."""
    first = held[0]
    yield f"weights of version {first.version}, incarnation {first.incarnation}, between two steps"
    yield f"{'stage':>5}  {'worker':<28} {'tensors':>7} {'norm':>12}  digest"
    for stage in sorted(held, key=lambda each: each.stage):
        digests, norms = zip(*(stage.tensors[name] for name in sorted(stage.tensors)), strict=True)
        own = f"{stage.stage:>5}  {stage.instance:<28} {len(norms):>7}"
        yield f"{own} {math.hypot(*norms):>12.6g}  {xxh3_64_hexdigest(''.join(digests).encode())}"
        for name, (digest, norm) in stage.tensors.items():
            if pattern and fnmatchcase(name, pattern):
                yield f"       {name:<36} {norm:>12.6g}  {digest}"
