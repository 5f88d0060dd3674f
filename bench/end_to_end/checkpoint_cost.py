"""Measures what a checkpoint costs training: seconds of a step of the policy alone, beside a checkpoint that is being
written, and with one that is waited for before each step, in turn.

A Llama of 45 million random weights in float32, 540 MB of checkpoint, which takes about as long as a step. It is
written again and again, so that no moment of a step is without one. The goal: such a step is at most 10 % slower.
"""

import argparse
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from transformers.utils import logging

from asyncrl.bench.end_to_end.benchmark_model import write_model
from asyncrl.bench.end_to_end.packed_rows import INCARNATION, StepShape, rows_of, trainer
from asyncrl.bench.measurements import MachineLoad, at_least, goal_line, in_turn, ratios, round_values, table
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.trainer_checkpoint import StateCopy
from asyncrl.engines.training.training_step import run_step

GOAL = 1.1
SHAPE = StepShape(16, 16, 8, 4)
SIZES = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 11}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("asyncrl-bench checkpoints", description=__doc__)
    parser.add_argument("--rounds", type=at_least(1), default=7)
    parser.add_argument("--threads", type=at_least(1), default=1, help="of the trainer")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(asked.threads)
    logging.disable_progress_bar()  # transformers shows one for each file of a model that it writes.
    load = MachineLoad()
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as name:
        made, folder = trainer(write_model(Path(name) / "model", **SIZES), packs=True), Path(name) / "checkpoint"
        seconds_of_step(made)
        sides = {
            "alone": partial(seconds_of_step, made),
            "beside": partial(seconds_beside, made, folder),
            "waiting": partial(seconds_with, made, folder),
            "copying": partial(seconds_of_copy, made),
        }
        found = round_values(in_turn(sides, asked.rounds))
    beside, waiting = (ratios(found[side], found["alone"]) for side in ("beside", "waiting"))
    print(f"seconds of a step, {SHAPE}, {asked.rounds} rounds, {asked.threads} threads of the trainer")
    lines = [
        ("alone", str(found["alone"]), ""),
        ("while a checkpoint is written", str(found["beside"]), str(beside)),
        ("after a checkpoint was written", str(found["waiting"]), str(waiting)),
        ("the copy between two steps", str(found["copying"]), str(ratios(found["copying"], found["alone"]))),
    ]
    print(table(("", "seconds", "over alone"), lines))
    print(goal_line("a step beside a checkpoint over a step alone", beside.median, GOAL, at_most=True))
    print(f"  {load}")


def seconds_of_step(made: PolicyTrainer) -> float:
    rows = rows_of(SHAPE)
    began = time.perf_counter()
    run_step(made, rows, INCARNATION, 0)
    return time.perf_counter() - began


def seconds_of_copy(made: PolicyTrainer) -> float:
    began = time.perf_counter()
    made.copy_state({})
    return time.perf_counter() - began


def seconds_beside(made: PolicyTrainer, folder: Path) -> float:
    with written_again_and_again(made.copy_state({}), folder):
        return seconds_of_step(made)


def seconds_with(made: PolicyTrainer, folder: Path) -> float:
    began = time.perf_counter()
    made.save(folder, {})
    return time.perf_counter() - began + seconds_of_step(made)


@contextmanager
def written_again_and_again(copy: StateCopy, folder: Path) -> Iterator[None]:
    """Writes a copy beside the block from its beginning to its end."""
    begun, over = threading.Event(), threading.Event()

    def write() -> None:
        while not over.is_set():
            begun.set()
            copy.write(folder)

    thread = threading.Thread(target=write, name="checkpoints")
    thread.start()
    assert begun.wait(10.0), "a thread begins within 10 s"
    try:
        yield
    finally:
        over.set()
        thread.join()
