"""Measures what it gains to compute a prompt once for its samples in training: trained tokens a CPU-second of a whole
step of the policy, beside the same step with a row for each sample, in turn.

One thread, float32, a Llama of three million random weights. The goals: 1.5 times as fast at prompts of 256 tokens,
answers of 64 and groups of 8, and never under 0.98.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from asyncrl.bench.end_to_end.benchmark_model import VOCABULARY, write_model
from asyncrl.bench.measurements import MachineLoad, at_least, goal_line, in_turn, number, ratios, round_values, table
from asyncrl.config.schema import Config
from asyncrl.engines.training.batch.train_rows import TrainRow
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.training_step import run_step

GOAL, NEVER_UNDER = 1.5, 0.98
INCARNATION = 0


@dataclass(frozen=True, slots=True)
class StepShape:
    """Tokens of a prompt and of an answer, and samples and groups of a step. goal: least ratio."""

    prompt: int
    answer: int
    members: int
    groups: int
    goal: float = NEVER_UNDER

    def __str__(self) -> str:
        return f"{self.groups} x {self.members}, {self.prompt} + {self.answer} tokens"


SHAPES = (
    StepShape(256, 64, 8, 4, GOAL),
    StepShape(64, 64, 8, 4),
    StepShape(9, 4, 16, 8),
    StepShape(16, 256, 8, 2),
    StepShape(256, 64, 1, 16),
)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("asyncrl-bench shared-prompts", description=__doc__)
    parser.add_argument("--rounds", type=at_least(1), default=5)
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    load = MachineLoad()
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as name:
        trainers = {side: trainer(write_model(Path(name)), side == "shared") for side in ("shared", "separate")}
        lines, goals = [], []
        for shape in SHAPES:
            sides = {side: partial(tokens_per_second, trainers[side], rows_of(shape)) for side in trainers}
            for warm in sides.values():
                warm()
            found = round_values(in_turn(sides, asked.rounds))
            gain = ratios(found["shared"], found["separate"])
            lines.append((str(shape), str(found["shared"]), str(found["separate"]), str(gain)))
            goals.append(goal_line(f"{shape}, shared over separate", gain.median, shape.goal))
    print(f"trained tokens a CPU-second of a step, {asked.rounds} rounds")
    print(table(("groups x samples, prompt + answer", "shared", "separate", "ratio"), lines))
    print("\n".join(goals))
    print(f"  {load}")


def trainer(model: Path, shares: bool) -> PolicyTrainer:
    sections = {
        "model": {"name": str(model)},
        "task": {"prompts": "none"},
        "training": {"micro_batch_tokens": 4096},
        "algorithm": {"preset": "grpo"},
    }
    made = PolicyTrainer(Config.model_validate(sections), model)
    if not shares:
        made.model.sharing_width = 0
    return made


def rows_of(shape: StepShape) -> list[TrainRow]:
    """Returns the samples of a step; the members of a group have one prompt."""
    draw, rows = np.random.default_rng(0), []
    for group in range(shape.groups):
        prompt = draw.integers(4, VOCABULARY, shape.prompt)
        for member in range(shape.members):
            rows.append(
                TrainRow(
                    *(group, member, 0, INCARNATION),
                    prompt_ids=prompt,
                    response_ids=draw.integers(4, VOCABULARY, shape.answer),
                    logprobs=np.full(shape.answer, -np.log(VOCABULARY), np.float32),
                    versions=np.zeros(shape.answer, np.int64),
                    advantage=float(draw.normal()),
                )
            )
    return rows


def tokens_per_second(made: PolicyTrainer, rows: Sequence[TrainRow]) -> float:
    """Returns the answer tokens that a step trains in a second of CPU time."""
    began = time.process_time()
    outcome = run_step(made, rows, INCARNATION, 0)
    seconds = time.process_time() - began
    trained = sum(sample.trained for sample in outcome.samples)
    assert trained == sum(len(row.response_ids) for row in rows), f"{number(trained)} tokens were trained"
    return trained / seconds
