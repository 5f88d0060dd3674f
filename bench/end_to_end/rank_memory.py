"""Compares the memory that `asyncrl plan` predicts of each rank of a trainer with what torch allocates in a step.

For each layout a process for each rank trains two steps of a Llama with random weights on CPUs, of a Qwen3-MoE in
layouts of experts, or of a Qwen2.5-VL whose prompts have pictures; of the first also in layouts of ranks that sample
too, and of the first two with each stage of DeepSpeed's ZeRO on two ranks, where DeepSpeed is installed. What a rank
took is all tensors that it has between steps, and the most that torch had at one moment of the second step beside them.
A process takes more: the interpreter, its libraries, and what malloc keeps.
"""

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from asyncrl.bench.end_to_end.packed_rows import INCARNATION, StepShape, rows_of
from asyncrl.bench.end_to_end.picture_rows import patches_of, rows_with_pictures
from asyncrl.bench.end_to_end.rank_processes import run_ranks, write_in_child
from asyncrl.bench.end_to_end.sampling_ranks import SAMPLING, measure_phases
from asyncrl.bench.end_to_end.torch_memory import NOT_OF_TORCH, PredictedRank, held_bytes, most_beside
from asyncrl.bench.measurements import goal_line, table
from asyncrl.config.install_hints import install_extra
from asyncrl.config.schema import Config
from asyncrl.deploy.checks.memory_needs import TrainedModel
from asyncrl.deploy.checks.row_lengths import RowLengths
from asyncrl.deploy.service_specs import rank_layout
from asyncrl.engines.model_shape import shape_of
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.ranks.rank_mesh import RankMesh
from asyncrl.engines.training.training_step import run_step
from asyncrl.protocols.rank_layout import Layout

LAYOUTS: tuple[dict[str, Any], ...] = (
    {"dp": 1},
    {"dp": 2},
    {"shard": 2},
    {"tp": 2},
    {"pp": 2},
    {"tp": 2, "shard": 2},
    {"tp": 2, "dp": 2},
    {"pp": 2, "tp": 2},
    {"pp": 2, "dp": 2},
    {"sp": 2},
    {"sp": 2, "dp": 2},
)
LAYOUTS_OF_EXPERTS: tuple[dict[str, Any], ...] = ({"dp": 1}, {"ep": 2}, {"dp": 2, "ep": 2}, {"shard": 2})
LAYOUTS_WITH_PICTURES: tuple[dict[str, Any], ...] = ({"dp": 1}, {"dp": 2})
ZERO: tuple[dict[str, Any], ...] = (
    *({"stage": stage, "offload": offload} for stage in (1, 2, 3) for offload in (False, True)),
)
ZERO_OF_EXPERTS: tuple[dict[str, Any], ...] = ({"stage": 2}, {"stage": 3})
"""Shares of DeepSpeed, each on two ranks."""
ROWS = StepShape(64, 64, 32, 1)
"""Rows of a step, all of one prompt."""
OF_PICTURES = StepShape(96, 32, 4, 8)
"""Rows of a step whose prompts have a picture each."""
EYES = "qwen2_5_vl"
MICRO_BATCH = 1024
SIZES = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8}
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "head_dim": 64}
WITHIN = 0.1


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("asyncrl-bench rank-memory", description=__doc__)
    parser.add_argument("--engine", choices=("torch", "deepspeed"), help="compare ranks of one engine alone")
    engine = parser.parse_args(arguments).engine
    if engine == "deepspeed" and find_spec("deepspeed") is None:
        parser.error(f"DeepSpeed is not installed; run: {install_extra('deepspeed')}")
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as name:
        model, of_experts = Path(name) / "llama", Path(name) / "qwen3_moe"
        write_in_child(model, **SIZES, **HEADS)
        write_in_child(of_experts, of_experts.name, **{**SIZES, **HEADS, **EXPERTS})
        with_eyes = write_in_child(Path(name) / EYES, EYES, **SIZES, **HEADS)
        found = []
        if engine != "deepspeed":
            found += [each for layout in LAYOUTS for each in measure(layout, model)]
            found += [each for layout in LAYOUTS_OF_EXPERTS for each in measure(layout, of_experts)]
            found += [each for layout in LAYOUTS_WITH_PICTURES for each in measure(layout, with_eyes, OF_PICTURES)]
            found += [each for trial in SAMPLING for each in measure_phases(trial, model, MICRO_BATCH)]
        if engine != "torch" and find_spec("deepspeed") is not None:
            found += [each for zero in ZERO for each in measure({"dp": 2}, model, zero=zero)]
            found += [each for zero in ZERO_OF_EXPERTS for each in measure({"dp": 2}, of_experts, zero=zero)]
    head = ("layout", "rank", "predicted, MB", "measured, MB", "ratio")
    lines = [
        (each.layout, str(each.rank), f"{each.predicted / 1e6:.1f}", f"{each.measured / 1e6:.1f}", f"{each.ratio:.3f}")
        for each in found
    ]
    print(table(head, lines))
    worst = max(each.error for each in found)
    print(goal_line("predicted over measured bytes, farthest from 1", worst, WITHIN, at_most=True))


def measure(
    layout: dict[str, Any], model: Path, rows: StepShape = ROWS, zero: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[PredictedRank]:
    """Yields the memory of each rank. zero: the table of DeepSpeed, where it trains. Raises RuntimeError as
    `run_ranks`."""
    settings = {**layout, **{key: value for key, value in zero.items() if value}}
    text = ", ".join([model.name, *(f"{key} {value}" for key, value in settings.items())])
    training = {"layout": layout, **({"engine": "deepspeed", "deepspeed": {**zero}} if zero else {})}
    work = partial(_memory, training, model, rows)
    for rank, taken in enumerate(run_ranks(Layout(**layout), work, zero=zero.get("stage", 0))):
        yield PredictedRank(text, rank, *taken)


def _memory(training: dict[str, Any], model: Path, rows: StepShape, mesh: RankMesh) -> list[int]:
    """Returns the predicted and the measured bytes of this rank. training: keys of that section."""
    config = Config.model_validate(
        {
            "model": {"name": str(model)},
            "task": {"prompts": "none", "prompts_per_step": rows.groups, "samples_per_prompt": rows.members},
            "generation": {"max_new_tokens": rows.answer},
            "training": {"micro_batch_tokens": MICRO_BATCH, **training},
            "algorithm": {"preset": "grpo"},
        }
    )
    return [predicted(config, model, rows, mesh.rank), measured(config, model, rows, mesh)]


def predicted(config: Config, model: Path, rows: StepShape, rank: int) -> int:
    """Returns the bytes that are predicted of what torch allocates on this rank."""
    shape, layout = shape_of(str(model)), config.training.layout
    assert shape is not None, "the shape of these families is known"
    lengths = RowLengths(rows.prompt, rows.prompt, 1, patches_of(rows) if shape.encoder else 0)
    trained = TrainedModel("training", config, shape, lengths, "cpu", layout)
    parts = trained.parts(trained.likely_pass, rank_layout(layout).place(rank).pp)
    return sum(size for name, size in parts.items() if name not in NOT_OF_TORCH)


def measured(config: Config, model: Path, shape: StepShape, mesh: RankMesh) -> int:
    """Returns the most bytes that torch had at one moment of the second step, which finds the moments of the first."""
    trainer = PolicyTrainer(config, model, mesh)
    all_rows = rows_with_pictures(shape) if model.name == EYES else rows_of(shape)
    rows = all_rows[mesh.rows.rank :: mesh.rows.size]
    run_step(trainer, rows, INCARNATION, 0)
    held = held_bytes()
    return held + most_beside(partial(run_step, trainer, rows, INCARNATION, 1))[0]
