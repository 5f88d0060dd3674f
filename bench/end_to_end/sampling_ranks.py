"""Measures what a trainer's rank that samples too takes in each phase of an iteration, beside what `asyncrl plan`
predicts: at the start, while it gathers weights, while it samples, and in a step.

Each rank has a trainer and an engine in one process, as a worker does. What is measured is counted as in
rank_memory.py, with the blocks of the KV cache that were used, which torch does not allocate.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.bench.end_to_end.packed_rows import INCARNATION, StepShape, rows_of
from asyncrl.bench.end_to_end.rank_processes import run_ranks
from asyncrl.bench.end_to_end.torch_memory import NOT_OF_TORCH, PredictedRank, held_bytes, most_beside
from asyncrl.config.schema import Config
from asyncrl.deploy.checks.memory_needs import TrainedModel
from asyncrl.deploy.checks.row_lengths import RowLengths
from asyncrl.deploy.service_specs import rank_layout
from asyncrl.engines.generation.forward.layer_slices import ALONE
from asyncrl.engines.generation.scheduling.sample_requests import SampleRequest
from asyncrl.engines.generation.torch_engine import TorchEngine
from asyncrl.engines.model_shape import shape_of
from asyncrl.engines.training.batch.train_rows import TrainRow
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.ranks.rank_mesh import RankMesh
from asyncrl.engines.training.ranks.weight_gathering import gather_for_generation, regrouping_of
from asyncrl.engines.training.training_step import run_step
from asyncrl.protocols.rank_layout import Layout

SAMPLING: tuple[dict[str, Any], ...] = (
    {"layout": {"tp": 2}},
    {"layout": {"tp": 2}, "grouping": "vanilla"},
    {"layout": {"tp": 2}, "groups of": 2},
    {"layout": {"tp": 2}, "groups of": 2, "grouping": "vanilla"},
    {"layout": {"shard": 2}},
    {"layout": {"pp": 2}},
    {"layout": {"pp": 2}, "grouping": "vanilla"},
    {"layout": {"dp": 2}},
    {"layout": {"dp": 2}, "colocate": "halves"},
)
"""Layouts of ranks that sample, with keys of `generation`. groups of: ranks that sample together, all of them."""
SAMPLED = StepShape(64, 64, 16, 2)
"""Rows of a step. A rank samples a group at a time, as many as it has slots."""
STEPS, TURNS = 2, 3
"""Iterations: the second step finds the moments of the first; and of halves, which then have trained in turns."""
Phases = dict[str, int]
"""Bytes in each phase."""


def measure_phases(
    trial: Mapping[str, Any], model: Path, micro_batch: int, rows: StepShape = SAMPLED
) -> Iterator[PredictedRank]:
    """Yields the memory of each rank in each phase; of gathering that of the rank of which most was seen, which is a
    part where threads of gloo free buckets unseen. Raises RuntimeError as `run_ranks`."""
    chosen = {"colocate": "training", **trial}
    layout, size = Layout(**chosen.pop("layout")), chosen.pop("groups of", 1)
    gathered = 1 if chosen.get("grouping") == "vanilla" else size
    layout = replace(layout, generation_pp=1, generation_tp=gathered)
    config = config_of(model, trial["layout"], {**chosen, "layout": {"tp": size}}, rows, micro_batch)
    layout = replace(layout, takes_turns=chosen["colocate"] == "halves")
    settings = [*trial["layout"].items(), *((key, value) for key, value in trial.items() if key != "layout")]
    text = ", ".join([model.name, *(f"{key} {value}" for key, value in settings)])
    found = run_ranks(layout, partial(phases_of_rank, config, model, rows, layout))
    for phase in found[0][0]:
        if phase == "start" and size > 1:
            continue  # Of the model that each rank reads, it holds slices by the time that its memory is looked at.
        pairs = [(rank, *(each[phase] for each in bytes_of)) for rank, bytes_of in enumerate(found)]
        for rank, predicted, measured in [max(pairs, key=lambda each: each[2])] if phase == "gathering" else pairs:
            yield PredictedRank(f"{text}, {phase}", rank, predicted, measured, is_partly_seen=phase == "gathering")


def config_of(
    model: Path, layout: Mapping[str, int], generation: Mapping[str, Any], rows: StepShape, micro_batch: int
) -> Config:
    halves = generation["colocate"] == "halves"
    staleness = {"admission": "lockstep", "limit": 1} if halves else {"limit": 0}
    return Config.model_validate(
        {
            "model": {"name": str(model)},
            "task": {"prompts": "none", "prompts_per_step": rows.groups, "samples_per_prompt": rows.members},
            "generation": {"max_new_tokens": rows.answer, "slots": rows.members, **generation},
            "staleness": staleness,
            "training": {"micro_batch_tokens": micro_batch, "layout": {**layout}},
            "algorithm": {"preset": "grpo"},
        }
    )


def phases_of_rank(config: Config, model: Path, rows: StepShape, layout: Layout, mesh: RankMesh) -> list[Phases]:
    """Returns the predicted and the measured bytes of this rank."""
    predicted = _predicted(config, model, rows, mesh.rank)
    measured = MeasuredRank(config, model, layout, mesh).iterations(rows_of(rows))
    return [predicted, {phase: measured[phase] for phase in predicted}]


def _predicted(config: Config, model: Path, rows: StepShape, rank: int) -> Phases:
    shape, layout = shape_of(str(model)), config.training.layout
    assert shape is not None, "the shape of this family is known"
    lengths = RowLengths(rows.prompt, rows.prompt, 1)
    trained = TrainedModel("training", config, shape, lengths, "cpu", layout)
    likely = trained.likely_phases(rank_layout(layout).place(rank).pp)
    return {
        phase: sum(size for name, size in parts.items() if name not in NOT_OF_TORCH) for phase, parts in likely.items()
    }


class MeasuredRank:
    """Has trainer and engine of one rank. layout: with the sizes of generation."""

    def __init__(self, config: Config, model: Path, layout: Layout, mesh: RankMesh) -> None:
        self._config = config
        self._layout = layout
        self._mesh = mesh
        self._before = held_bytes()
        slices = RankMesh(everyone=mesh.tensor, tensor=mesh.tensor)
        self._engine = TorchEngine(model, config, ranks=slices if config.generation.layout.tp > 1 else ALONE)
        self._engine._flat.cache.free_memory()  # Its reserve counts as it is used.
        self._trainer = PolicyTrainer(config, model, mesh)
        self._found: Phases = {}

    def iterations(self, rows: Sequence[TrainRow]) -> Phases:
        """Returns the most bytes of each phase."""
        for version in range(TURNS if self._layout.takes_turns else STEPS):
            self._iterate([replace(row, versions=np.full_like(row.versions, version)) for row in rows], version)
        return self._found

    def _iterate(self, rows: Sequence[TrainRow], version: int) -> None:
        trains = not self._layout.samples(self._mesh.rank, version)
        in_halves = self._layout.takes_turns
        tensors = self._measured("gathering" if version else "first gathering", self._gather)
        if not version:
            self._found["start"] = held_bytes() - self._before
        self._engine.load(tensors, version, share=True)
        del tensors
        if not in_halves or not trains:
            workers = self._layout.size // (2 if in_halves else 1)
            self._measured("sampling", partial(self._sample, rows[: len(rows) // workers], version))
        self._engine.put_away()
        trained = self._trainer.trained_weights
        trained.hold_apart()
        place, ranks = (0, 1) if in_halves else (self._mesh.rows.rank, self._mesh.rows.size)
        own = rows[place::ranks] if trains else []
        self._measured("step", lambda: run_step(self._trainer, own, INCARNATION, version))

    def _measured(self, phase: str, work: Callable[[], Any]) -> Any:
        held = held_bytes() - self._before
        most, done = most_beside(work)
        found = held + most + self._engine._flat.cache.bytes
        self._found[phase] = max(self._found.get(phase, 0), found)
        return done

    def _gather(self) -> dict[str, Any]:
        trainer = self._trainer
        groups = regrouping_of(self._layout, self._config.generation)
        tensors, _ = gather_for_generation(trainer.named_tensors(), trainer.weights_spec, groups, self._mesh)
        if groups.grouping == "zero-redundancy":
            trainer.trained_weights.hold_once(tensors)
        return tensors

    def _sample(self, rows: Sequence[TrainRow], version: int) -> None:
        answer, prompts = self._config.generation.max_new_tokens, dict[int, Any]()
        for row in rows:
            prompt = prompts.setdefault(row.group, row.prompt_ids.astype(np.int32))
            self._engine.submit(SampleRequest((row.group, row.member, version), prompt, version, 1.0, answer))
        while self._engine.active:
            self._engine.step()
