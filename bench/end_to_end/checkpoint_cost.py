"""Measures what a checkpoint costs training: seconds of a step of the policy alone, beside a checkpoint that is being
written, and with one that is waited for before each step, in turn.

A Llama of 45 million random weights in float32, 540 MB of checkpoint, which takes about as long as a step. It is
written again and again, so that no moment of a step is without one. The goal: such a step is at most 10 % slower. Of
several ranks each has a process, writes its parts, and counts with the time of the slowest.
CPU seconds of the thread that computes the step leave out that it waits for a core, as on a loaded machine.
"""

import argparse
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from asyncrl.bench.end_to_end.packed_rows import INCARNATION, StepShape, rows_of, trainer
from asyncrl.bench.end_to_end.rank_processes import DEADLINE, run_ranks, write_in_child
from asyncrl.bench.measurements import MachineLoad, at_least, goal_line, in_turn, ratios, round_values, table
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.ranks.rank_mesh import RankMesh
from asyncrl.engines.training.trainer_checkpoint import StateCopy
from asyncrl.engines.training.training_step import run_step
from asyncrl.protocols.rank_layout import Layout

Clock = Callable[[], float]
GOAL = 1.1
SHAPE = StepShape(16, 16, 8, 4)
SIZES = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 11}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("asyncrl-bench checkpoints", description=__doc__)
    parser.add_argument("--rounds", type=at_least(1), default=7)
    parser.add_argument("--threads", type=at_least(1), default=1, help="of each rank of the trainer")
    parser.add_argument("--shard", type=at_least(1), default=1, help="ranks that share out the weights")
    asked = parser.parse_args(arguments)
    load = MachineLoad()
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as name:
        model, folder = write_in_child(Path(name) / "model", **SIZES), Path(name) / "checkpoint"
        layout = Layout(shard=asked.shard)
        work, limit = partial(_measure, model, folder, asked.threads, asked.rounds), DEADLINE * (1 + asked.rounds)
        by_rank = run_ranks(layout, work, limit)
    slowest = {side: [max(each) for each in zip(*(own[side] for own in by_rank), strict=True)] for side in by_rank[0]}
    found = round_values(slowest)
    beside, waiting = (ratios(found[side], found["alone"]) for side in ("beside", "waiting"))
    computing = ratios(found["computing beside"], found["computing"])
    print(f"seconds of a step, {SHAPE}, {asked.rounds} rounds, shard {asked.shard}, {asked.threads} threads of a rank")
    lines = [
        ("alone", str(found["alone"]), ""),
        ("while a checkpoint is written", str(found["beside"]), str(beside)),
        ("after a checkpoint was written", str(found["waiting"]), str(waiting)),
        ("the copy between two steps", str(found["copying"]), str(ratios(found["copying"], found["alone"]))),
        ("CPU seconds of the step's thread", str(found["computing"]), ""),
        ("while a checkpoint is written", str(found["computing beside"]), str(computing)),
    ]
    print(table(("", "seconds", "over alone"), lines))
    print(goal_line("a step beside a checkpoint over a step alone", beside.median, GOAL, at_most=True))
    print(f"  {load}")


def _measure(model: Path, folder: Path, threads: int, rounds: int, mesh: RankMesh) -> dict[str, list[float]]:
    """Returns the seconds of each side in each round on this rank; all ranks take the sides in the same order."""
    torch.set_num_threads(threads)
    made = trainer(model, packs=True, mesh=mesh)
    seconds_of_step(made)
    sides = {
        "alone": partial(seconds_of_step, made),
        "beside": partial(seconds_beside, made, folder),
        "waiting": partial(seconds_with, made, folder),
        "copying": partial(seconds_of_copy, made),
        "computing": partial(seconds_of_step, made, time.thread_time),
        "computing beside": partial(seconds_beside, made, folder, time.thread_time),
    }
    return in_turn(sides, rounds)


def seconds_of_step(made: PolicyTrainer, clock: Clock = time.perf_counter) -> float:
    ranks = made.mesh.rows
    share = len(rows := rows_of(SHAPE)) // ranks.size
    rows = rows[ranks.rank * share :][:share]
    made.mesh.everyone.largest(torch.zeros(1))  # All begin together.
    began = clock()
    run_step(made, rows, INCARNATION, 0)
    return clock() - began


def seconds_of_copy(made: PolicyTrainer) -> float:
    began = time.perf_counter()
    made.copy_state({})
    return time.perf_counter() - began


def seconds_beside(made: PolicyTrainer, folder: Path, clock: Clock = time.perf_counter) -> float:
    with written_again_and_again(made.copy_state({}), folder):
        return seconds_of_step(made, clock)


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
            copy.write_beside_steps(folder)

    thread = threading.Thread(target=write, name="checkpoints")
    thread.start()
    assert begun.wait(10.0), "a thread begins within 10 s"
    try:
        yield
    finally:
        over.set()
        thread.join()
