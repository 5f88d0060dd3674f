"""A training service around an engine of a few lines, for the tests of one rank and of several."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch

from asyncrl.config.schema import Config
from asyncrl.engines.ranks.rank_mesh import RankMesh
from asyncrl.engines.ranks.weight_gathering import TrainedWeights
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.train_rows import TrainRow
from asyncrl.engines.training.training_step import StepOutcome, gather_keys
from asyncrl.fleet.worker.compute_thread import ThreadCompute
from asyncrl.fleet.worker.rank_meeting import MeetingPlace
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.lanes.data.row_store import RowStore
from asyncrl.lanes.weights.arena import open_reader
from asyncrl.lanes.weights.slot_memory import WeightsSpec
from asyncrl.protocols.batch import BatchRef, Cuts, RowRef
from asyncrl.protocols.messages import Canary, Checkpointed, TrainedSample
from asyncrl.services.training import TrainingService

INCARNATION = 3
SPEC = WeightsSpec.of({"w": (1,)}, "float32")


class CountingRun:
    """Two passes; then the weight is the sum of all advantages so far, over all ranks. An infinite one is trouble; one
    of 0 keeps its row out of the loss."""

    is_computed = False

    def __init__(self, engine: "CountingEngine", rows: Sequence[TrainRow]) -> None:
        self._engine = engine
        self._rows = rows
        self.passes = 0
        self._is_cut_short = False
        self._trained: list[tuple[int, int, int]] = []

    def forgo_updates(self) -> bool:
        self._is_cut_short = True
        return self.passes < 2

    def advance(self) -> bool:
        if self._is_cut_short and self.passes < 2:
            return False
        self.passes += 1
        mesh = self._engine.mesh
        if self.passes == 1:
            self._trained = gather_keys(
                mesh.rows, [row.key for row in self._rows if row.advantage and not self._skipped]
            )
        if self.passes == 2 and not self._skipped:
            self._engine.weight += mesh.rows.sum(torch.tensor([sum(row.advantage for row in self._rows)])).item()
            self._engine.updates += 1
        return self.passes < 3

    @property
    def _skipped(self) -> str:
        return "not finite" if any(np.isinf(row.advantage) for row in self._rows) else ""

    @property
    def outcome(self) -> StepOutcome:
        trained = 0 if self._skipped else 1
        samples = tuple(TrainedSample(*row.key, trained * len(row.response_ids), 0) for row in self._rows)
        return StepOutcome(trained, self._skipped, samples, tuple(self._trained), {"grad_norm": 1.0})


def waiting_for_samples(patch: pytest.MonkeyPatch) -> asyncio.Event:
    """Has runs wait for samples after their first pass; returns what is set once one waits."""
    waits = asyncio.Event()

    def is_computed(run: CountingRun) -> bool:
        waits.set()
        return run.passes == 1

    patch.setattr(CountingRun, "is_computed", property(is_computed))
    return waits


class CountingEngine:
    weights_spec = SPEC

    def __init__(self, mesh: RankMesh, weight: float = 0.0) -> None:
        self.mesh = mesh
        self.weight = weight
        self.updates = 0
        self.trained_weights = TrainedWeights(torch.nn.Module(), lambda: None)

    def begin(self, rows: Sequence[TrainRow], incarnation: int, version: int) -> CountingRun:
        return CountingRun(self, rows)

    def named_tensors(self) -> dict[str, torch.Tensor]:
        return {"w": torch.tensor([self.weight])}

    def canary(self) -> Canary:
        return Canary((0,), (0,), (-self.weight,))

    def copy_beside_pass(self, extra: dict[str, Any]) -> "CountedCopy | None":
        return self.copy_state(extra)

    def copy_state(self, extra: dict[str, Any]) -> "CountedCopy":
        name = "state" if self.mesh.rank == 0 else f"rank-{self.mesh.rank}.pt"
        return CountedCopy(name, json.dumps({"weight": self.weight, "extra": extra}))


@dataclass
class CountedCopy:
    """Stands in for a StateCopy. faults: raised by the first calls of `write_beside_steps`."""

    name: str
    text: str
    state: dict[str, Any] = field(default_factory=dict)
    faults: ClassVar[list[OSError]] = []

    def write_beside_steps(self, directory: Path) -> dict[str, str]:
        directory.mkdir(exist_ok=True)
        if self.faults:
            raise self.faults.pop()
        (directory / self.name).write_text(self.text)
        return {self.name: "digest"}


async def saved(service: Any, directory: Path, version: int) -> Checkpointed:
    """Returns the checkpoint of a version, which is copied and written."""
    incarnation = service.context.facts.incarnation
    await service.copy_state(incarnation, version)
    made: Checkpointed = await service.checkpoint(str(directory), incarnation, version)
    return made


class CountingService(TrainingService):
    def open_engine(self, mesh: RankMesh) -> tuple[PolicyTrainer, dict[str, Any]]:
        if self.context.facts.checkpoint_dir is None:
            return CountingEngine(mesh), {}
        state = json.loads((self.context.facts.checkpoint_dir / "state").read_text())
        return CountingEngine(mesh, state["weight"]), state["extra"]

    async def find_meeting(self) -> None:
        """Ranks of this test exchange in memory."""

    def open_mesh(self, meeting: MeetingPlace | None) -> RankMesh:
        return cast(RankMesh, self.context.spec.options.get("mesh", RankMesh()))


class PatientCompute(ThreadCompute):
    """Computes on the event loop, and lets the loop turn before each function, as a thread does."""

    async def run(self, function: Any, *args: Any) -> Any:
        await asyncio.sleep(0)
        return self._booked(function, *args)


def config(**sections: Any) -> Config:
    plain = {"model": {"name": "tiny"}, "task": {"prompts": "none"}, "fleet": {"wire": "inproc"}}
    return Config.model_validate(plain | sections)


def context_maker(worker_context: Callable[..., WorkerContext]) -> Callable[..., WorkerContext]:
    def make(tasks: asyncio.TaskGroup, tmp_path: Path, **changes: Any) -> WorkerContext:
        store = RowStore.private("inproc://rows", 64, 4096)
        values: dict[str, Any] = {
            "config": config(),
            "incarnation": INCARNATION,
            "weights_arena": f"asyncrl-cafe0123-{tmp_path.name}",
            "open_rows": lambda slots, row_bytes: store,
        }
        parts = {"source": store, "make_compute": PatientCompute, **values, **changes}
        return worker_context("training", tasks=tasks, **parts)

    return make


def put(service: CountingService, group: int, advantage: float = 1.0) -> RowRef:
    store = service.context.open_rows(0, 0)
    row = {
        "prompt_ids": np.array([1, 2], np.int32),
        "response_ids": np.array([3, 4, 5], np.int32),
        "logprobs": np.zeros(3, np.float32),
        "versions": np.zeros(3, np.int32),
    }
    place = store.put(row)
    return RowRef(group, 0, 0, INCARNATION, 2, 3, 0, 0, "stop", (place,), 1.0, advantage)


def cuts(service: CountingService, version: int, *groups: int, advantage: float = 1.0) -> Cuts:
    rows = tuple(put(service, group, advantage) for group in groups)
    return Cuts(INCARNATION, version, BatchRef(rows), 3 * len(rows), len(rows))


async def published_weight(service: CountingService) -> float:
    published = await service.published()
    reader = open_reader(published, SPEC)
    try:
        return float(reader.tensors(published)["w"])
    finally:
        reader.close()


@asynccontextmanager
async def served(
    worker_context: Callable[..., WorkerContext], tmp_path: Path, **changes: Any
) -> AsyncIterator[CountingService]:
    """Runs a service while a block uses it. changes: of its context, see `context_maker`."""
    async with asyncio.TaskGroup() as tasks:
        service = CountingService(context_maker(worker_context)(tasks, tmp_path, **changes))
        await service.start()
        try:
            yield service
        finally:
            await service.stop()
