"""Data-parallel ranks: gradients as of one rank; the real collective in real processes."""

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from asyncrl.config import Config
from asyncrl.engines.training.interface import StepOutcome, TrainRow, run_step
from asyncrl.engines.training.torch import TorchTraining

DEADLINE = 30.0

TWO_SUMS = """
import sys, torch
from pathlib import Path
from asyncrl.engines.training.ranks import Gloo
rank = int(sys.argv[2])
ranks = Gloo(Path(sys.argv[1]), rank, 2, 30.0)
print(ranks.sum(torch.tensor([1.0, rank])).tolist(), ranks.largest(torch.tensor([-rank, 5 * rank])).tolist())
ranks.close()
"""


class ThreadRanks:
    """Ranks that are threads of this process."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=DEADLINE)
        self._given: dict[int, torch.Tensor] = {}

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange(values)).sum(0)

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange(values)).amax(0)

    def _exchange(self, values: torch.Tensor) -> list[torch.Tensor]:
        self._given[threading.get_ident()] = values.clone()
        self._barrier.wait()
        everything = [self._given[thread] for thread in sorted(self._given)]
        self._barrier.wait()
        return everything


def on_ranks(config: Config, folder: Path, shares: list[list[TrainRow]]) -> list[tuple[TorchTraining, StepOutcome]]:
    ranks, results = ThreadRanks(len(shares)), {}
    # Loaded one after the other: transformers patches global state while it loads.
    engines = [TorchTraining(config, folder, ranks) for _ in shares]

    def work(rank: int) -> None:
        results[rank] = (engines[rank], run_step(engines[rank], shares[rank], 1, 5))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(shares))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * DEADLINE)
    return [results[rank] for rank in range(len(shares))]


@pytest.mark.parametrize("first", [4, 7, 0])
def test_t13_two_ranks_train_what_one_does(first: int, tiny: Path, make_rows: Callable, make_config: Callable) -> None:
    """Ragged rows in uneven shares; one rank may have none at all."""
    rows, config = make_rows(10), make_config(training={"max_grad_norm": 1e9})
    alone = TorchTraining(config, tiny)
    expected = run_step(alone, rows, 1, 5)
    (one, report), (other, _) = on_ranks(config, tiny, [rows[:first], rows[first:]])
    assert report.metrics == pytest.approx(expected.metrics, abs=1e-6)
    for name in alone.named_tensors():
        assert torch.equal(one.named_tensors()[name], other.named_tensors()[name]), "ranks must not drift apart"
    for ours, whole in zip(_moments(one), _moments(alone), strict=True):
        torch.testing.assert_close(ours, whole, atol=1e-7, rtol=1e-4)


def test_t30_one_rank_with_a_broken_loss_stops_the_step_of_all(
    tiny: Path, make_rows: Callable, make_config: Callable
) -> None:
    good, bad = make_rows(4), make_rows(4, advantage=float("nan"))
    outcomes = [outcome for _, outcome in on_ranks(make_config(), tiny, [good, bad])]
    assert [outcome.skipped for outcome in outcomes] == ["not finite", "not finite"]


def _moments(engine: TorchTraining) -> list[torch.Tensor]:
    """First moments after one step: the gradients times 0.1."""
    state = engine._trainer.optimizer.adamw.state
    return [state[parameter]["exp_avg"] for parameter in engine._trainer.optimizer.parameters]


def test_gloo_sums_over_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TWO_SUMS, str(tmp_path / "meeting")]
    processes = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(2)]
    answers = [process.communicate(timeout=60)[0].strip() for process in processes]
    assert answers == ["[2.0, 1.0] [0, 5]"] * 2
