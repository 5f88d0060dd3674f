"""A rank with a copy of the weights goes on alone after another one died: its state is that of all."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.config.schema import Config
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.ranks.rank_group import FormerRanks, Ranks
from asyncrl.engines.training.ranks.rank_mesh import RankMesh
from asyncrl.engines.training.trainer_checkpoint import tensor_digests
from asyncrl.engines.training.training_step import run_step
from asyncrl.errors import PeerLost, Refused
from tests.unit.engines.training.ranks.stage_process import rows_of

CONFIG = {
    "model": {"name": "tiny"},
    "task": {"prompts": "none"},
    "training": {"micro_batch_tokens": 64, "logits_chunk": 16},
}


class MortalRanks(Ranks):
    """The second of two ranks, whose other one gives nothing, and is gone after so many exchanges."""

    rank, size = 1, 2

    def __init__(self, exchanges: int) -> None:
        self.left = exchanges

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        self._exchange()
        return values

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        self._exchange()
        return values

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        self._exchange()
        return rows

    def _exchange(self) -> None:
        if not self.left:
            raise PeerLost("the other rank is gone")
        self.left -= 1


def test_wherever_another_rank_dies_a_rank_without_an_update_has_the_weights_before(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    config, ranks = Config.model_validate(CONFIG), MortalRanks(0)
    trainer = PolicyTrainer(config, make_model(), RankMesh.of_data(ranks))
    before, exchanges = tensor_digests(trainer.named_tensors()), 0
    while trainer.updates == 0:
        ranks.left = exchanges
        with pytest.raises(PeerLost):
            run_step(trainer, rows_of(0), 0, 0)
        assert (tensor_digests(trainer.named_tensors()) == before) == (trainer.updates == 0)
        exchanges += 1
    assert exchanges > 3, "of keys, counts, denominators and gradients"
    held = tensor_digests(trainer.named_tensors())
    trainer.leave_ranks()
    trainer.save(tmp_path / "checkpoint", {"version": 1})
    resumed, extra = PolicyTrainer.resume(config, tmp_path / "checkpoint")
    assert (tensor_digests(resumed.named_tensors()), resumed.updates, extra) == (held, 1, {"version": 1})
    run_step(resumed, rows_of(1), 0, 1)
    run_step(trainer, rows_of(1), 0, 1)
    assert tensor_digests(resumed.named_tensors()) == tensor_digests(trainer.named_tensors())


@pytest.mark.parametrize(
    ("model", "mesh"),
    [({}, RankMesh(zero=1)), ({"lora": {}}, RankMesh(stages=FormerRanks(0, 2)))],
    ids=["moments of DeepSpeed", "adapters"],
)
def test_a_rank_with_a_part_that_all_save_together_does_not_leave_the_others(
    model: dict[str, Any], mesh: RankMesh, make_model: Callable[..., Path]
) -> None:
    config = Config.model_validate(CONFIG | {"model": {"name": "tiny", **model}})
    trainer = PolicyTrainer(config, make_model())
    trainer.mesh = mesh
    with pytest.raises(Refused, match=r"rank 0 of training\.layout holds a part of the state alone"):
        trainer.leave_ranks()
