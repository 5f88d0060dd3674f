"""DeepSpeed's ZeRO on two ranks: numbers of one rank of torch, and checkpoints that any layout resumes."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncrl.config.placement import deepspeed_problems
from asyncrl.config.schema import Config
from asyncrl.engines.models.model_folder import is_in_parts
from asyncrl.engines.ranks.rank_mesh import Ranks
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.training_step import run_step
from asyncrl.engines.training.zero_optimizer import FlatTensor, own_flat_part, refuse_stale_lock
from asyncrl.errors import ConfigError
from asyncrl.lanes.weights.slot_memory import whole_tensor
from tests.unit.engines.training.optimizers import zero_process
from tests.unit.engines.training.optimizers.zero_process import STEPS
from tests.unit.engines.training.ranks.stage_process import rows_of

needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="DeepSpeed is not installed; scripts/test deepspeed installs it"
)
TRIALS: dict[str, dict[str, Any]] = {
    "1": {"deepspeed": {"stage": 1}},
    "2": {"deepspeed": {"stage": 2}},
    "1 offload": {"deepspeed": {"stage": 1, "offload": True}},
    "2 offload": {"deepspeed": {"stage": 2, "offload": True}},
    "3": {"deepspeed": {"stage": 3}},
    "3 offload": {"deepspeed": {"stage": 3, "offload": True}, "gradient_checkpointing": True},
    "3 untied": {"deepspeed": {"stage": 3}},
    "3 experts": {"deepspeed": {"stage": 3}},
}
TRAINING = {
    "learning_rate": 1e-4,
    "schedule": "linear",
    "warmup_steps": 2,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "updates": 2,
    "micro_batch_tokens": 64,
    "logits_chunk": 16,
}


def config_of(**training: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"name": "tiny"},
            "task": {"prompts": "none"},
            "steps": 30,
            "algorithm": {"entropy_bonus": 0.01},
            "training": {**TRAINING, **training},
        }
    )


def _of_one_rank(model: Path, folder: Path) -> dict[str, Any]:
    """Trains one rank of torch, and leaves its checkpoint in the folder."""
    one = PolicyTrainer(config_of(), model)
    steps = [run_step(one, rows_of(version), 0, version) for version in range(STEPS)]
    one.save(folder, {})
    weights = {name: each.clone() for name, each in one.named_tensors().items()}
    canary = one.canary()
    steps.append(run_step(one, rows_of(STEPS), 0, STEPS))
    reports = [[each.updates, each.skipped, list(each.trained), each.metrics] for each in steps]
    return {"steps": reports, "weights": weights, "canary": canary}


@pytest.fixture(scope="module")
def found(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns what each rank of each trial saw; under "of one" what one rank of torch did, and under "folder" where
    the checkpoints are."""
    folder = tmp_path_factory.mktemp("zero")
    tied = make_model("llama", tie_word_embeddings=True)
    untied = make_model("llama", tie_word_embeddings=False, mlp_bias=True, intermediate_size=33)  # Odd numbers.
    experts = make_model("qwen3_moe")
    models = {name: {"3 untied": untied, "3 experts": experts}.get(name, tied) for name in TRIALS}
    of_one = {model: _of_one_rank(model, folder / f"of {model.name}") for model in (tied, untied, experts)}
    trials = {
        name: {
            "model": str(models[name]),
            "of_one_rank": str(folder / f"of {models[name].name}"),
            "config": config_of(engine="deepspeed", layout={"dp": 2}, **training).model_dump(
                mode="json", exclude_unset=True
            ),
        }
        for name, training in TRIALS.items()
    }
    (folder / "trials.json").write_text(json.dumps(trials))
    subprocess.run([sys.executable, zero_process.__file__, str(folder)], check=True, timeout=500)
    ranks = {name: [torch.load(folder / f"{name}-{rank}.pt") for rank in (0, 1)] for name in TRIALS}
    return {"folder": folder, "of one": {name: of_one[models[name]] for name in TRIALS}, **ranks}


def _same(reported: list[Any], expected: list[Any]) -> None:
    assert [*reported[:2], [*reported[2]]] == expected[:3]
    assert reported[3] == pytest.approx(expected[3], rel=1e-4, abs=1e-5)


@needs_deepspeed
@pytest.mark.timeout(540)
@pytest.mark.parametrize("name", TRIALS)
def test_each_step_is_that_of_one_rank(name: str, found: dict[str, Any]) -> None:
    """Uneven shares, ranks without rows, an update without rows, and one whose loss is not finite are among them."""
    one = found["of one"][name]
    reasons = {report[1] for report in one["steps"]}
    assert "not finite" in reasons or any(report[0] == 1 for report in one["steps"])
    for rank in found[name]:
        for report, expected in zip(rank["steps"], one["steps"][:STEPS], strict=True):
            _same(report, expected)
            for key in ("policy/loss", "grad_norm"):
                if key in expected[3]:
                    assert abs(report[3][key] - expected[3][key]) < 1e-5
        assert rank["canary"] == pytest.approx(one["canary"].logprobs, abs=1e-5)
        for key, weights in rank["weights"].items():
            torch.testing.assert_close(weights, one["weights"][key], atol=1e-5, rtol=1e-4)


@needs_deepspeed
@pytest.mark.parametrize("name", TRIALS)
def test_a_checkpoint_is_resumed_by_the_same_ranks_and_by_one(name: str, found: dict[str, Any]) -> None:
    folder = found["folder"] / name
    expected = found["of one"][name]["steps"][STEPS]
    assert is_in_parts(folder / "model")
    for rank in found[name]:
        assert rank["extra"] == {"steps": STEPS}
        assert rank["again"] == rank["next"]
        _same(rank["again"], expected)
        _same(rank["after_one_rank"], expected)
    resumed, _ = PolicyTrainer.resume(config_of(), folder)
    for key, weights in resumed.named_tensors().items():
        saved = found[name][0]["weights"]
        assert key not in saved or torch.equal(weights, saved[key])
    outcome = run_step(resumed, rows_of(STEPS), 0, STEPS)
    _same([outcome.updates, outcome.skipped, outcome.trained, outcome.metrics], expected)


@needs_deepspeed
@pytest.mark.parametrize("name", TRIALS)
def test_ranks_of_stage_3_hold_their_parts_alone_between_steps(name: str, found: dict[str, Any]) -> None:
    whole = {key: each.numel() for key, each in found["of one"][name]["weights"].items()}
    is_parted = name.startswith("3")
    for rank in found[name]:
        assert rank["held"] == {key: -(-size // 2) if is_parted else size for key, size in whole.items()}
        assert (rank["gathered"] == 0) is is_parted
        assert rank["noted"] == 0


def test_the_lock_of_a_dead_process_is_named(tmp_path: Path) -> None:
    lock = tmp_path / "py311_cpu" / "op" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    refuse_stale_lock(tmp_path)
    os.utime(lock, (time.time() - 3600,) * 2)
    with pytest.raises(ConfigError, match=rf"would wait without end for {lock}, .*: delete that file$"):
        refuse_stale_lock(tmp_path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layout": {"dp": 1}}, r"training\.layout, .*one rank is not supported"),
        ({"layout": {"shard": 2}}, r"training\.layout, .*shard is not supported"),
        ({"layout": {"tp": 2}}, r"training\.layout, .*tp is not supported"),
        ({"optimizer": "sgd"}, r"training\.optimizer, .*sgd is not supported"),
        ({"router_replay": True}, r"training\.router_replay, .*not supported"),
    ],
)
def test_what_deepspeed_does_not_train_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        config_of(**{"engine": "deepspeed", "layout": {"dp": 2}, **changes})


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"model": {"name": "tiny", "lora": {"rank": 2}}}, "model.lora"),
        ({"generation": {"colocate": "training"}, "staleness": {"limit": 0}}, "generation.colocate"),
    ],
)
def test_sections_that_deepspeed_does_not_support_are_named(sections: dict[str, Any], key: str) -> None:
    training = {"engine": "deepspeed", "layout": {"dp": 2}}
    values = {"model": {"name": "tiny"}, "task": {"prompts": "none"}, "training": training, **sections}
    with pytest.raises(ValueError, match=rf"{key}, training\.engine: .*not supported with training\.engine"):
        Config.model_validate(values)


def test_a_table_that_nothing_reads_gets_a_warning() -> None:
    problems = deepspeed_problems(config_of(deepspeed={"stage": 1}))
    assert [(each.key, each.is_warning) for each in problems] == [("training.deepspeed", True)]


# Weights in flat parts: the parts of all ranks give the whole again, cast before they are gathered.


class RanksWithParts(Ranks):
    """Ranks that hold the flat parts of one tensor."""

    def __init__(self, whole: Tensor, size: int) -> None:
        self.size = size
        self._parts = [own_flat_part(whole, rank, size) for rank in range(size)]

    def gather_equal(self, values: Tensor) -> list[Tensor]:
        return [part.to(values.dtype) for part in self._parts]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("shape", [(5, 2), (7,), (1,)])
def test_flat_parts_give_the_whole_tensor(shape: tuple[int, ...], ranks: int) -> None:
    whole = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
    parts = [own_flat_part(whole, rank, ranks) for rank in range(ranks)]
    assert {len(part) for part in parts} == {-(-whole.numel() // ranks)}
    found = whole_tensor(FlatTensor(parts[0], whole.shape, RanksWithParts(whole, ranks)), torch.bfloat16)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, whole.bfloat16())
