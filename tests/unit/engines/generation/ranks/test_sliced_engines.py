"""Ranks that share out the layers of an engine, as processes over gloo, sample what one rank does."""

import json
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.engines.generation.block_pool import GB
from asyncrl.engines.generation.flat_model import cut_dims
from asyncrl.engines.generation.torch_engine import TorchEngine
from asyncrl.engines.models.model_shape import layers_of_stage
from asyncrl.protocols.distribute_collect import even_parts
from tests.unit.engines.generation.conftest import engine_config, make_model
from tests.unit.engines.generation.ranks import engine_process
from tests.unit.engines.generation.ranks.engine_process import play, versions_of

pytestmark = pytest.mark.timeout(600)  # The ranks are in the first test.
SHAPE = {"slots": 5, "max_prompt_tokens": 40, "max_new_tokens": 16}
SCARCE = (16 * 2 * 2 * 2 * 12 * 4 * 4 + 1) / GB
"""Gigabytes of 16 blocks of the Llama, of which the longest row needs 14: keys and values, layers, kv heads, head size,
positions, float32."""
CASES: dict[str, dict[str, Any]] = {
    "slices": {
        "layout": (1, 2),
        "family": "qwen3",
        "settings": {"cache_gb": SCARCE * 2, "prefill_tokens": 8, "kv": "recompute", "float32_head": True},
    },
    "stages of slices": {
        "layout": (2, 2),
        "family": "qwen2",
        "shape": {"num_hidden_layers": 3},
        "settings": {"cache_gb": SCARCE * 3 / 2, "prefill_tokens": 8, "kv": "recompute"},
    },
    "four": {
        "layout": (1, 4),
        "family": "llama-biased",
        "shape": {"num_key_value_heads": 4},
        "settings": {"deterministic": True, "slots": 12},
    },
}
"""layout: stages and slices. Heads of Qwen3 have twice the size of the others."""
LEADER = 0


def share(case: dict[str, Any], rank: int = 0) -> Fraction:
    """Returns which part of the keys and values a rank has: its layers and heads. Stages of 3 layers have 2 and 1."""
    pp, tp = case["layout"]
    return (Fraction(1) if pp == 1 else Fraction(2 - rank // tp, 3)) / tp


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder in which ranks have left what they saw."""
    root = tmp_path_factory.mktemp("engines")
    told: dict[int, dict[str, Any]] = {}
    for name, case in CASES.items():
        pp, tp = case["layout"]
        settings = dict(case["settings"])
        model = make_model(case["family"], root / name, **case.get("shape", {}))
        if "cache_gb" in settings:  # Each rank has the memory for its own heads.
            settings["cache_gb"] *= float(share(case))
        settings["layout"] = {"pp": pp}
        told.setdefault(f"{pp}x{tp}", {})[name] = {"model": str(model), "settings": SHAPE | settings}
    (root / "cases.json").write_text(json.dumps(told))
    subprocess.run([sys.executable, engine_process.__file__, str(root)], check=True, timeout=500)
    return root


def seen(folder: Path, name: str) -> list[dict[str, Any]]:
    """Returns what each rank saw."""
    pp, tp = CASES[name]["layout"]
    return [torch.load(folder / f"{pp}x{tp}-{rank}.pt", weights_only=False)[name] for rank in range(pp * tp)]


@pytest.mark.parametrize("name", CASES)
def test_ranks_sample_what_one_rank_does(folder: Path, name: str, small_blocks: None) -> None:
    """While requests end and come, weights change, the engine is put away, and a sample has no time any more."""
    ranks = seen(folder, name)
    case = CASES[name]
    one = play(TorchEngine(folder / name, engine_config(**SHAPE | case["settings"]), 0), versions_of(folder / name))
    leader = ranks[LEADER]
    assert leader["done"].keys() == one["done"].keys()
    for key, (tokens, logprobs, *rest) in one["done"].items():
        found_tokens, found_logprobs, *found_rest = leader["done"][key]
        assert (found_tokens, found_rest) == (tokens, rest)
        torch.testing.assert_close(found_logprobs, logprobs, atol=1e-5, rtol=0)
    assert leader["after"] == pytest.approx(one["after"], abs=1e-5)
    assert (leader["preemptions"], leader["blocks"]) == (one["preemptions"], one["blocks"])
    assert ("cache_gb" in case["settings"]) == (one["preemptions"] > 0)
    assert {each[3] for each in one["done"].values()} >= {"abort", "length"}
    assert {version for each in one["done"].values() for version in each[2]} == {0, 1, 2}
    assert len(one["done"][0, 0, 0][0]) < 16, "its deadline ended it"
    own = [one["bytes"] * share(case, rank) for rank in range(len(ranks))]
    assert [each["bytes"] for each in ranks] == own, "each has its own layers and heads"


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_sample_alike_from_the_same_bits(folder: Path, name: str) -> None:
    ranks = seen(folder, name)
    for each in ranks:
        assert each["logits"] == ranks[LEADER]["logits"]
        assert each["watched"].keys() == ranks[LEADER]["watched"].keys()
        for key, (tokens, logprobs, *rest) in each["watched"].items():
            expected = ranks[LEADER]["watched"][key]
            assert (tokens, *rest) == (expected[0], *expected[2:])
            assert torch.equal(logprobs, expected[1])


@pytest.mark.parametrize("name", ["slices", "four"])
def test_a_rank_takes_weights_of_its_slices(folder: Path, name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / name)
    ranks = seen(folder, name)
    cut = cut_dims(model)
    for parameter, shape in ranks[LEADER]["shapes"].items():
        expected = list(model.get_parameter(parameter).shape)
        if parameter in cut:
            expected[cut[parameter]] //= len(ranks)
        assert list(shape) == expected
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert {each.split(".")[-2] for each in cut} == {*names}
    assert ("model.layers.0.self_attn.q_proj.bias" in cut) == (name == "four")
    assert "model.layers.0.self_attn.o_proj.bias" not in cut, "the sum over ranks gets it once"


def test_a_stage_takes_weights_of_its_layers(folder: Path) -> None:
    """Embedding and head are one tensor of the first and of the last stage."""
    for rank, each in enumerate(seen(folder, "stages of slices")):
        layers = {found[0] for name in each["shapes"] if (found := re.search(r"(?<=layers\.)\d", name))}
        others = {name.removeprefix("model.") for name in each["shapes"] if "layers" not in name}
        assert layers == ({"2"} if rank // 2 else {"0", "1"})
        assert others == {"embed_tokens.weight", *(["norm.weight"] if rank // 2 else [])}


def test_other_rows_change_no_bit_of_a_sample_in_deterministic_mode(folder: Path) -> None:
    """Alone it has the first row, and among others the last one, which gloo would sum in another order of ranks."""
    (tokens, alone, *_), (others_tokens, among_others, *_) = seen(folder, "four")[LEADER]["alone and among others"]
    assert tokens == others_tokens
    assert torch.equal(alone, among_others)


def test_the_death_of_a_rank_is_known_to_the_others(folder: Path) -> None:
    assert (folder / "1x2-1.txt").read_text().startswith("the 2 training ranks could not exchange"), "the leader died"
    for rank in (0, 1, 2):
        for sizes in ("1x4", "2x2"):
            assert "the 4 training ranks could not exchange" in (folder / f"{sizes}-{rank}.txt").read_text()


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_stage_samples_with_the_layers_of_consecutive_stages_that_train(stages: int) -> None:
    """Six layers train as 2, 2, 1 and 1, so that two stages sample with 4 and 2, and not with 3 each."""
    trained = even_parts([1] * 6, 4)
    each = 4 // stages
    for number in range(stages):
        joined = [layer for part in trained[number * each : (number + 1) * each] for layer in part]
        assert list(layers_of_stage(6, 4, stages, number)) == joined
