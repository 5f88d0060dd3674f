"""Measures what it gains to pack rows and to compute a prompt once for its samples in training: trained tokens a
CPU-second of a whole step of the policy, beside the same step with a padded row for each sample, in turn.

One thread, float32, a Llama of three million random weights, or of 150 million on a device. The goals: 1.5 times as
fast where groups of 8 have prompts four times as long as answers, and never under 0.98.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncrl.bench.benchmark_model import VOCABULARY, write_model
from asyncrl.bench.measurements import MachineLoad, at_least, goal_line, in_turn, number, ratios, round_values, table
from asyncrl.config.schema import Config
from asyncrl.engines.ranks.rank_mesh import RankMesh
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.train_rows import TrainRow
from asyncrl.engines.training.training_step import run_step

GOAL = 1.5
NEVER_UNDER = 0.98
INCARNATION = 0


@dataclass(frozen=True, slots=True)
class StepShape:
    """Tokens of a prompt and of an answer, and samples and groups of a step. goal: least ratio. uneven: answers
    have one to so many tokens."""

    prompt: int
    answer: int
    members: int
    groups: int
    goal: float = NEVER_UNDER
    uneven: bool = False

    def __str__(self) -> str:
        return f"{self.groups} x {self.members}, {self.prompt} + {'1 to ' if self.uneven else ''}{self.answer} tokens"


ON_DEVICE = (
    StepShape(1024, 256, 8, 8, GOAL),
    StepShape(64, 256, 8, 8),
    StepShape(256, 64, 1, 64),
    StepShape(128, 1024, 1, 64, uneven=True),
    StepShape(128, 1024, 8, 8, uneven=True),
)
DEVICE_SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2048,
}
"""Sizes of the model on a device, 150 million weights."""
SHAPES = (
    StepShape(256, 64, 8, 4, GOAL),
    StepShape(64, 64, 8, 4),
    StepShape(9, 4, 16, 8),
    StepShape(16, 256, 8, 2),
    StepShape(256, 64, 1, 16),
    StepShape(32, 256, 1, 32, uneven=True),
    StepShape(32, 256, 8, 4, uneven=True),
)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("asyncrl-bench packed-rows", description=__doc__)
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--device", default="cpu", help="cpu, or cuda for larger shapes in bfloat16 by the wall clock")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    load = MachineLoad()
    on_device = asked.device != "cpu"
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as name:
        model = write_model(Path(name), **DEVICE_SIZES if on_device else {})
        trainers = {side: trainer(model, side == "packed", asked.device) for side in ("packed", "padded")}
        lines = []
        goals = []
        for shape in ON_DEVICE if on_device else SHAPES:
            sides = {side: partial(tokens_per_second, trainers[side], rows_of(shape)) for side in trainers}
            for warm in sides.values():
                warm()
            found = round_values(in_turn(sides, asked.rounds))
            gain = ratios(found["packed"], found["padded"])
            lines.append((str(shape), str(found["packed"]), str(found["padded"]), str(gain)))
            goals.append(goal_line(f"{shape}, packed over padded", gain.median, shape.goal))
    print(f"trained tokens a {'second' if on_device else 'CPU-second'} of a step, {asked.rounds} rounds")
    print(table(("groups x samples, prompt + answer", "packed", "padded", "ratio"), lines))
    print("\n".join(goals))
    print(f"  {load}")


def trainer(model: Path, packs: bool, device: str = "cpu", mesh: RankMesh | None = None) -> PolicyTrainer:
    training: dict[str, Any] = {"micro_batch_tokens": 4096}
    if device != "cpu":
        training = {"micro_batch_tokens": 32_768, "device": device, "precision": "bfloat16"}
    sections = {
        "model": {"name": str(model)},
        "task": {"prompts": "none"},
        "training": training,
        "algorithm": {"preset": "grpo"},
    }
    made = PolicyTrainer(Config.model_validate(sections), model, mesh)
    if not packs:
        made.model.packs = False
    return made


def rows_of(shape: StepShape) -> list[TrainRow]:
    """Returns the samples of a step; the members of a group have one prompt."""
    draw = np.random.default_rng(0)
    rows = []
    for group in range(shape.groups):
        prompt = draw.integers(4, VOCABULARY, shape.prompt)
        for member in range(shape.members):
            answer = int(draw.integers(1, shape.answer + 1)) if shape.uneven else shape.answer
            rows.append(
                TrainRow(
                    *(group, member, 0, INCARNATION),
                    prompt_ids=prompt,
                    response_ids=draw.integers(4, VOCABULARY, answer),
                    logprobs=np.full(answer, -np.log(VOCABULARY), np.float32),
                    versions=np.zeros(answer, np.int64),
                    advantage=float(draw.normal()),
                )
            )
    return rows


def tokens_per_second(made: PolicyTrainer, rows: Sequence[TrainRow]) -> float:
    """Returns the answer tokens that a step trains in a second, of CPU time where the model is on a CPU."""
    clock = time.process_time if made.model.device.type == "cpu" else time.perf_counter
    began = clock()
    outcome = run_step(made, rows, INCARNATION, 0)  # Its metrics are read from the device, which waits for it.
    seconds = clock() - began
    trained = sum(sample.trained for sample in outcome.samples)
    assert trained == sum(len(row.response_ids) for row in rows), f"{number(trained)} tokens were trained"
    return trained / seconds
