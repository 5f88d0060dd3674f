"""A cache that is too small for all samples, or memory that a trainer needs meanwhile: the youngest lose their blocks,
and no sample or token is lost."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.engines.generation.block_pool import GB, block_bytes
from asyncrl.engines.generation.engine_interface import SampleRequest
from asyncrl.engines.generation.torch_engine import TorchEngine
from asyncrl.errors import ConfigError
from tests.unit.engines.generation.conftest import EPISODES, Lab, drain, requests
from tests.unit.engines.generation.test_parked_sequences import RandomEpisodes

BLOCK = 2 * 2 * 2 * 12 * 32 * 4
"""Bytes of a block: keys and values, layers, kv heads, head size, positions, float32."""


def memory(blocks: int) -> float:
    """Gigabytes of so many blocks of 4 positions. One row of the longest length needs 16 of them."""
    return (blocks * BLOCK / 8 + 1) / GB


def test_the_bytes_of_a_block_are_those_that_the_cache_takes(lab: Lab) -> None:
    engine = lab.engine()
    engine.submit(*requests(3))
    engine.step()
    cache = engine._flat.cache
    assert cache.bytes == BLOCK * cache.tables.pool.touched
    assert block_bytes(engine._flat.model.config, 4) == BLOCK


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("blocks", "prefill_tokens"), [(16, 0), (16, 8), (40, 8)])
def test_a_preempted_sample_keeps_its_tokens_and_goes_on(lab: Lab, blocks: int, prefill_tokens: int) -> None:
    engine = lab.engine(slots=6, cache_gb=memory(blocks), prefill_tokens=prefill_tokens)
    assert len(engine._flat.cache.tables.pool) == blocks
    wanted = requests(12, seed=2, max_new_tokens=24)
    wanted += [replace(wanted[0], key=(50, member, 0), seed=member) for member in range(5)]
    done = drain(engine, wanted)
    assert engine.preemptions > 0
    assert len(done) == len(wanted)
    free = drain(lab.engine(slots=6), wanted)
    assert {key: each.tokens.tolist() for key, each in done.items()} == {
        key: each.tokens.tolist() for key, each in free.items()
    }
    lab.check(done)
    assert engine.cache_used == 0


@pytest.mark.usefixtures("small_blocks")
def test_samples_that_an_older_prompt_preempts_do_not_decode_in_the_same_step(lab: Lab) -> None:
    """Two members of 10 blocks and two other samples of 5 in a cache of 20. The second member waits for the prompt of
    the first one, finds no block for its copy, and takes those of the others, which are younger and decode already."""
    engine = lab.engine(slots=4, cache_gb=memory(20))
    prompts = np.random.default_rng(0).integers(5, 261, (3, 38)).astype(np.int32)
    wanted = [SampleRequest((0, member, 0), prompts[0], member, 1.0, 20) for member in range(2)]
    wanted += [SampleRequest((group, 0, 0), prompts[group, :18], group, 1.0, 20) for group in (1, 2)]
    done = drain(engine, wanted)
    assert engine.preemptions > 0
    assert len(done) == len(wanted)
    lab.check(done)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("pause", [0.0, 11.0])
def test_the_deadline_of_a_preempted_sample_counts_only_while_it_has_blocks(lab: Lab, pause: float) -> None:
    """100 seconds pass in each step that the younger of two samples waits for the blocks of the older one. `pause`
    seconds pass in a step after it has blocks again; its deadline is 10."""
    engine = lab.engine(slots=2, cache_gb=memory(16))
    now = 0.0
    waited = False
    engine._batch.clock = lambda: now
    prompts = np.random.default_rng(1).integers(5, 261, (2, 38)).astype(np.int32)
    older = SampleRequest((0, 0, 0), prompts[0], 0, 1.0, 24)
    younger = SampleRequest((1, 0, 0), prompts[1, :10], 1, 1.0, 24, deadline=10.0)

    def pass_time(step: int) -> None:
        nonlocal now, waited
        names = [request.key for request in engine._batch.requests]
        if younger.key in names:
            row = names.index(younger.key)
            without = engine._batch.sampled[row] > 0 and not engine._flat.cache.tables.counts[row]
            now += 100.0 if without else pause * waited
            waited |= bool(without)

    done = drain(engine, [older, younger], pass_time)[younger.key].tokens.tolist()
    free = drain(lab.engine(), [younger])[younger.key].tokens.tolist()
    assert waited
    assert len(free) == 24
    assert done == free if pause == 0.0 else 0 < len(done) < 24


@pytest.mark.usefixtures("small_blocks")
def test_episodes_run_through_a_cache_of_one_row(lab: Lab) -> None:
    engine = lab.engine(slots=4, cache_gb=memory(33), **EPISODES)
    played, free = (RandomEpisodes(requests(9, seed=3), 3, parks=True) for _ in range(2))
    played.play(engine)
    free.play(lab.engine(slots=4, **EPISODES))
    assert engine.preemptions > 0
    assert played.done.keys() == free.done.keys()
    for key, each in played.done.items():
        assert each.tokens.tolist() == free.done[key].tokens.tolist()


@pytest.mark.parametrize(("settings", "found"), [({}, "one row"), ({"deterministic": True}, "16 rows")])
def test_a_cache_that_is_too_small_is_refused(lab: Lab, settings: dict[str, Any], found: str) -> None:
    with pytest.raises(ConfigError, match=f"generation.cache_gb: 1e-06 GB do not hold the keys and values of {found}"):
        lab.engine(cache_gb=1e-6, **settings)


INTERRUPTED = (3, 4, 11)
"""Decode steps after which the engine is put away, some of them within prompts or shortly after them."""


def held_bytes(engine: TorchEngine) -> int:
    """Bytes of weights, of the head's copy, and of keys and values."""
    head = engine._flat._head
    parameters = [*engine._flat.model.parameters(), *(head.parameters() if head is not None else ())]
    return sum(parameter.nbytes for parameter in parameters) + engine._flat.cache.bytes


@pytest.mark.parametrize(
    ("family", "settings"),
    [("llama", {}), ("qwen2", {"deterministic": True}), ("qwen2", {"float32_head": True, "cache_gb": 1e-4})],
)
def test_samples_go_on_after_the_engine_was_put_away(lab: Lab, family: str, settings: dict[str, Any]) -> None:
    weights = lab.weights(family, seed=None)
    expected = drain(lab.engine(family, **settings), requests(9))
    engine = lab.engine(family, **settings)
    held = []

    def interrupt(step: int) -> None:
        if step in INTERRUPTED:
            held.append(held_bytes(engine))
            engine.put_away()
            assert (held_bytes(engine), engine.active, engine.running > 0) == (0, False, True)
            engine.load(weights, 0, share=True)

    done = drain(engine, requests(9), interrupt)
    assert len(held) == len(INTERRUPTED)
    assert min(held) > 0
    assert done.keys() == expected.keys()
    for key, completion in done.items():
        assert completion.tokens.tolist() == expected[key].tokens.tolist()
        assert completion.logprobs == pytest.approx(expected[key].logprobs, abs=1e-5)
    assert all(engine._flat.model.get_parameter(name).data_ptr() == weights[name].data_ptr() for name in weights)


@pytest.mark.parametrize("shared_before", [False, True])
@pytest.mark.parametrize("is_put_away", [False, True])
def test_weights_that_are_copied_are_the_engines_own_whatever_it_had_before(
    lab: Lab, shared_before: bool, is_put_away: bool
) -> None:
    """What arrives while the weights are put away is sampled later."""
    engine = lab.engine()
    weights = lab.weights(seed=None)
    lent = {name: tensor.clone() for name, tensor in weights.items()}
    if shared_before:
        engine.load(lent, 0, share=True)
    if is_put_away:
        engine.put_away()
    engine.submit(*requests(3))
    assert (engine.active, engine.waiting) == (not is_put_away, 3)
    others = {name: tensor * 1.5 for name, tensor in weights.items()}
    engine.load(others, 1, share=False)
    assert all(torch.equal(lent[name], weights[name]) for name in weights), "a copy never writes into lent tensors"
    for name, tensor in others.items():
        assert torch.equal(engine._flat.model.get_parameter(name), tensor)
        tensor.zero_()
    engine.load(weights, 2, share=False)
    assert engine.active
    done = drain(engine)
    expected = drain(lab.engine(), requests(3))
    assert {key: each.tokens.tolist() for key, each in done.items()} == {
        key: each.tokens.tolist() for key, each in expected.items()
    }
