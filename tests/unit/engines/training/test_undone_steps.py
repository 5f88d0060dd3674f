"""Steps whose updates are forgone in the middle: what of them counts, and what a copy beside a running pass holds."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.config.schema import Config
from asyncrl.engines.ranks.rank_mesh import RankMesh, Ranks
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.trainer_checkpoint import StateCopy, tensor_digests
from asyncrl.engines.training.training_step import run_step
from asyncrl.protocols.messages import CUT_SHORT
from tests.unit.engines.training.ranks.stage_process import rows_of

PLAIN = {"model": {"name": "tiny"}, "task": {"prompts": "none"}}
TINY_PASSES = {"micro_batch_tokens": 32, "logits_chunk": 16}


def config(**training: Any) -> Config:
    return Config.model_validate({**PLAIN, "training": {**TINY_PASSES, **training}})


def same_weights(trainer: PolicyTrainer, before: dict[str, tuple[str, float]]) -> bool:
    return tensor_digests(trainer.named_tensors()) == before


def test_a_copy_beside_a_pass_is_the_state_before_its_step(make_model: Callable[..., Path], tmp_path: Path) -> None:
    settings = config()
    trainer = PolicyTrainer(settings, make_model())
    run_step(trainer, rows_of(0), 0, 0)
    expected = trainer.save(tmp_path / "expected", {"version": 1})
    step = trainer.begin(rows_of(1), 0, 1)
    inside = threading.Event()
    goes_on = threading.Event()

    def wait(gradient: torch.Tensor) -> None:
        inside.set()
        assert goes_on.wait(60)

    hooked = max(trainer.optimizer.parameters, key=torch.Tensor.numel)
    handle = hooked.register_hook(wait)
    ended: list[bool] = []
    passes = threading.Thread(target=lambda: ended.append(all(iter(step.advance, False))))
    passes.start()
    assert inside.wait(60)
    assert step.forgo_updates()
    copied = trainer.copy_beside_pass({"version": 1})
    assert copied is not None
    made = copied.write(tmp_path / "copied")
    assert not goes_on.is_set(), "the pass still runs"
    goes_on.set()
    passes.join(60)
    handle.remove()
    assert ended == [True]
    assert made == expected, "every file, bit for bit"
    assert (step.outcome.updates, step.outcome.trained, trainer.updates) == (0, (), 1)


@pytest.mark.parametrize("after", range(4))
def test_wherever_a_step_is_cut_short_whole_updates_count(make_model: Callable[..., Path], after: int) -> None:
    trainer = PolicyTrainer(config(updates=4, micro_batch_tokens=4096), make_model())
    before = tensor_digests(trainer.named_tensors())
    rows = rows_of(1)
    step = trainer.begin(rows, 0, 1)
    while trainer.updates < after:
        assert step.advance()
    assert step.forgo_updates() == (after == 0)
    while step.advance():
        pass
    outcome = step.outcome
    assert outcome.updates == trainer.updates == after
    assert same_weights(trainer, before) == (after == 0)
    assert outcome.skipped == ("" if after else CUT_SHORT)
    trained = [each.name for each in outcome.samples if each.trained]
    assert sorted(trained) == sorted(outcome.trained)
    left = {each.untrained_because for each in outcome.samples if not each.trained}
    assert left == {CUT_SHORT}
    assert bool(trained) == bool(after)
    assert not any(parameter.grad is not None for parameter in trainer.optimizer.parameters)


def test_a_rank_alone_leaves_out_the_passes_that_are_left(make_model: Callable[..., Path]) -> None:
    trainer = PolicyTrainer(config(), make_model())
    step = trainer.begin(rows_of(1), 0, 1)
    passes = 1
    assert step.advance()
    assert step.forgo_updates()
    while step.advance():
        passes += 1
    whole = trainer.begin(rows_of(1), 0, 1)
    assert passes < sum(1 for _ in iter(whole.advance, False)), "of some passes and an update"


class OtherRank(Ranks):
    """The first of two ranks, of which the other one has no rows, and forgoes the update or not."""

    rank = 0
    size = 2

    def __init__(self, *, forgoes: bool) -> None:
        self.forgoes = forgoes

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        return values if len(values) < 2 else torch.tensor([values[0], max(int(values[1]), int(self.forgoes))])


@pytest.mark.parametrize(("own", "other"), [(False, False), (True, False), (False, True), (True, True)])
def test_ranks_take_an_update_together_or_not_at_all(make_model: Callable[..., Path], own: bool, other: bool) -> None:
    trainer = PolicyTrainer(config(), make_model(), RankMesh(everyone=OtherRank(forgoes=other)))
    step = trainer.begin(rows_of(1), 0, 1)
    assert step.advance()
    if own:
        assert step.forgo_updates()
    while step.advance():
        pass
    assert trainer.updates == step.outcome.updates == int(not (own or other))
    assert step.forgo_updates() == own, "a rank that had agreed does not know what the other one did"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_copies_beside_a_pass_in_its_place_and_exchanges_nothing(
    make_model: Callable[..., Path], tmp_path: Path, rank: int
) -> None:
    class Silent(Ranks):
        """One of two ranks with the same weights, which waits for ever in an exchange."""

        size = 2

        def __init__(self) -> None:
            self.rank = rank

        def sum(self, values: torch.Tensor) -> torch.Tensor:
            raise AssertionError("an exchange")

        largest = gather = sum

    settings = config()
    trainer = PolicyTrainer(settings, make_model(), RankMesh.of_data(Silent()))
    copied = trainer.copy_beside_pass({"version": 0})
    assert isinstance(copied, StateCopy)
    made = set(copied.write(tmp_path / "copied"))
    assert ("trainer.pt" in made, "rank-1.pt" in made) == (rank == 0, rank == 1)
    assert any(name.startswith("model/") for name in made) == (rank == 0)


def test_adapters_are_copied_between_passes_alone(make_model: Callable[..., Path]) -> None:
    settings = Config.model_validate({**PLAIN, "model": {"name": "tiny", "lora": {"rank": 2}}, "training": TINY_PASSES})
    assert PolicyTrainer(settings, make_model()).copy_beside_pass({}) is None
