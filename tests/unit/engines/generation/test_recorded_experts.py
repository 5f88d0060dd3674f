"""The record of each token holds the experts of the forward pass that sampled the next one, whatever became of its keys
and values: shared prompts, preemption, new weights, parked turns."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.config.schema import Config
from asyncrl.engines.generation.block_pool import GB
from asyncrl.engines.generation.engine_interface import Completion, SampleRequest
from asyncrl.engines.generation.torch_engine import TorchEngine
from asyncrl.engines.generation.turn_requests import Trajectory
from asyncrl.engines.models.model_families import REPLAYED, RecordShape
from asyncrl.engines.models.router_replay import WEIGHTS
from asyncrl.errors import ConfigError
from tests.unit.engines.generation.conftest import EPISODES, at, drain, engine_config, requests
from tests.unit.engines.generation.test_families import CHOSEN, group, tiny_model
from tests.unit.engines.generation.test_parked_sequences import RandomEpisodes

BLOCK = 4 * 2 * 2 * 12 * 32 * 4


def engine_of(folder: Path, *, router_replay: bool = True, **settings: Any) -> TorchEngine:
    shape = {"slots": 6, "max_prompt_tokens": 40, "max_new_tokens": 24} | settings
    sections = engine_config(**shape).model_dump(exclude_unset=True) | {"training": {"router_replay": router_replay}}
    return TorchEngine(folder, Config.model_validate(sections), 0)


class OwnChoices:
    """Finds the experts [tokens, layers x k] that transformers' own forward chooses, sorted in each layer."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._seen: list[np.ndarray] = []
        for module in self.model.modules():
            if type(module).__name__ in WEIGHTS:
                module.register_forward_hook(lambda _, __, output: self._seen.append(np.sort(output[2].numpy(), -1)))

    @torch.no_grad()
    def of(self, ids: np.ndarray) -> np.ndarray:
        self._seen.clear()
        self.model(input_ids=torch.from_numpy(ids.astype(np.int64))[None], use_cache=False)
        return np.concatenate(self._seen, -1)


def in_order(experts: np.ndarray) -> np.ndarray:
    pairs = experts.reshape(len(experts), -1, 2)
    return np.sort(pairs, -1).reshape(len(experts), -1)


def check(done: Completion, own: OwnChoices) -> None:
    assert done.experts is not None
    assert done.experts.dtype == np.uint8
    ids = np.concatenate([done.request.prompt, done.tokens])
    assert done.experts.shape == (len(ids), 4 * 2)
    assert (done.experts[-1] == 255).all()
    np.testing.assert_array_equal(in_order(done.experts[:-1]), own.of(ids[:-1]))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("family", REPLAYED)
def test_the_experts_are_those_of_transformers_also_of_shared_prompts(family: str, tmp_path: Path) -> None:
    folder = tiny_model(family, tmp_path)
    engine = engine_of(folder, prefill_tokens=8)
    own = OwnChoices(folder)
    for done in drain(engine, group(requests(12, seed=3))).values():
        check(done, own)


@pytest.mark.usefixtures("small_blocks")
def test_a_preempted_sample_keeps_its_record(tmp_path: Path) -> None:
    folder = tiny_model("qwen3_moe", tmp_path)
    engine = engine_of(folder, cache_gb=(20 * BLOCK / 8 + 1) / GB, prefill_tokens=8)
    wanted = requests(10, seed=2, max_new_tokens=24)
    wanted += [replace(wanted[0], key=(50, member, 0), seed=member) for member in range(5)]
    own = OwnChoices(folder)
    found = drain(engine, wanted)
    assert engine.preemptions > 0
    for done in found.values():
        check(done, own)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_new_weights_change_no_record_of_what_was_sampled(kv: str, tmp_path: Path) -> None:
    """With recomputed keys each token's experts are those of the version that sampled the next token over the whole
    sequence. With kept ones a version sees older keys, so that only tokens of one version can be compared."""
    folder = tiny_model("mixtral", tmp_path)
    engine = engine_of(folder, kv=kv, prefill_tokens=8)
    own = [OwnChoices(folder), OwnChoices(folder)]
    with torch.no_grad():
        for name, parameter in own[1].model.named_parameters():
            if "gate.weight" in name:
                parameter.mul_(-1)
    new = dict(own[1].model.named_parameters(remove_duplicate=False))

    mixed = 0
    wanted = requests(8, max_new_tokens=20)
    for done in drain(engine, wanted, at(9, lambda: engine.load(new, 1, share=False))).values():
        assert done.experts is not None
        ids = np.concatenate([done.request.prompt, done.tokens])[:-1]
        given = len(done.request.prompt) - 1
        expected = [each.of(ids) for each in own]
        versions = np.concatenate([np.full(given, done.versions[0]), done.versions])
        compared = len(ids) if kv == "recompute" else int((versions == versions[0]).sum())
        mixed += len(set(versions.tolist())) > 1
        for place in range(compared):
            row = in_order(done.experts[place : place + 1])[0]
            np.testing.assert_array_equal(row, expected[versions[place]][place])
    assert mixed > 2


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("parks", [True, False])
def test_turns_have_the_record_of_all_tokens_before(parks: bool, tmp_path: Path) -> None:
    folder = tiny_model("qwen3_moe", tmp_path)
    engine = engine_of(folder, prefill_tokens=8, max_prompt_tokens=40, max_new_tokens=12, **EPISODES)
    episodes = RandomEpisodes(requests(8), 1, parks=parks)
    own = OwnChoices(folder)
    episodes.play(engine)
    assert (engine.parked.hits > 0) is parks
    for done in episodes.done.values():
        check(done, own)


def completion_of(prompt: list[int], tokens: list[int], experts: list[int]) -> Completion:
    request = SampleRequest((0, 0, 0), np.array(prompt, np.int32), 0, 1.0, 9)
    zeros = np.zeros(len(tokens), np.int32)
    record = np.array(experts, np.uint8)[:, None]
    return Completion(request, np.array(tokens, np.int32), zeros.astype(np.float32), zeros, "stop", "", record)


def test_earlier_turns_keep_what_was_recorded_then_and_contexts_have_their_own() -> None:
    """A later turn computes what came before again, with other experts: only what had no record takes them."""
    first = Trajectory.begin(np.array([7, 8], np.int32)).with_answer(completion_of([7, 8], [9, 10], [1, 2, 3, 255]))
    given = first.with_given(np.array([11], np.int32))
    second = given.with_answer(completion_of([7, 8, 9, 10, 11], [12], [4, 4, 4, 4, 5, 255]))
    assert second.experts is not None
    assert second.experts.tolist() == [1, 2, 3, 4, 5, 255]
    begun = Trajectory.of_row(second.columns()).with_given(np.array([20, 21], np.int32), context=True)
    third = begun.with_answer(completion_of([20, 21], [22], [6, 7, 255]))
    assert third.experts is not None
    assert third.experts.tolist() == [1, 2, 3, 4, 5, 255, 6, 7, 255]


def test_without_the_key_nothing_is_recorded_and_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    engine = engine_of(tiny_model("mixtral", tmp_path / "mixtral"), router_replay=False)
    assert {done.experts for done in drain(engine, requests(2)).values()} == {None}
    with pytest.raises(ConfigError, match=r"family 'llama'.* remove the key"):
        engine_of(tiny_model("llama", tmp_path / "llama"))


def test_plain_layers_have_no_record_and_many_experts_take_two_bytes() -> None:
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 6, **CHOSEN}
    assert RecordShape.of({**config, "mlp_only_layers": [3]}).width == 5 * 2
    assert RecordShape.of({**config, "decoder_sparse_step": 2, "num_experts": 300, "num_local_experts": 300}) == (
        RecordShape(3, 2, 300)
    )
    assert RecordShape(3, 2, 300).dtype == np.dtype("<i2")
    assert (RecordShape(3, 2, 300).none, RecordShape(3, 2, 255).none) == (32767, 255)
