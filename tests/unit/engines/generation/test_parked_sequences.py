"""Turns that go on with parked keys and values are those of a full forward, and nothing is kept beyond its bound."""

from collections.abc import Callable
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest

from asyncrl.engines.generation.block_pool import KV_BLOCK, BlockTables, blocks_for
from asyncrl.engines.generation.engine_interface import Completion, SampleRequest
from asyncrl.engines.generation.running_batch import ParkedSequence, ParkedSequences
from asyncrl.engines.generation.torch_engine import TorchEngine
from tests.unit.engines.generation.conftest import EPISODES, Lab, at, drain, going_on, requests


class RandomEpisodes:
    """Plays episodes of up to four turns side by side; environments answer late, and in any order. parks: whether
    turns are parked. What is drawn does not depend on what the engine does."""

    def __init__(self, requests: list[SampleRequest], seed: int, *, parks: bool) -> None:
        self.parks = parks
        self.done: dict[tuple[int, int], Completion] = {}
        self._lengths = {request.key[0]: np.random.default_rng([seed, request.key[0]]) for request in requests}
        self._asked = {
            step: [replace(request, max_new_tokens=self._tokens(request.key[0]), may_go_on=parks)]
            for step, request in enumerate(requests)
        }
        self._turn = dict.fromkeys(self._lengths, 0)

    def _tokens(self, number: int) -> int:
        return int(self._lengths[number].integers(1, 12))

    def play(self, engine: TorchEngine, between: Callable[[int], None] = lambda step: None) -> None:
        for step in range(1000):
            engine.submit(*self._asked.pop(step, []))
            between(step)
            for completion in engine.step():
                self._answer(completion, step)
            if not engine.active and not self._asked:
                return
        raise AssertionError("the episodes do not end")

    def _answer(self, done: Completion, step: int) -> None:
        number = done.request.key[0]
        random = self._lengths[number]
        self.done[number, self._turn[number]] = done
        self._turn[number] += 1
        given = random.integers(5, 261, random.integers(0, 9)).astype(np.int32)
        delay = int(random.integers(1, 9))
        if self._turn[number] < 4:
            self._asked.setdefault(step + delay, []).append(going_on(done, self._tokens(number), given.tolist()))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("family", "seed"), [("llama", 0), ("llama", 1), ("qwen3", 2), ("llama-gelu", 3)])
def test_turns_are_those_of_a_full_forward_whatever_was_parked(lab: Lab, family: str, seed: int) -> None:
    """Many episodes through few slots, in forwards of few tokens, some sequences evicted. llama-gelu runs in the
    model's own modules."""
    wanted = requests(11, seed=seed, temperature=(0.7, 1.0)[seed % 2])
    again, parked = (RandomEpisodes(wanted, seed, parks=parks) for parks in (False, True))
    again.play(lab.engine(family, **EPISODES))
    engine = lab.engine(family, prefill_tokens=(0, 20)[seed % 2], **EPISODES)

    def evict(step: int) -> None:
        while step % 13 == 12 and engine.parked.blocks > 8:
            engine.parked.evict_one()

    parked.play(engine, evict)
    assert engine.parked.hits > 5
    assert seed or engine.parked.misses > 0
    assert {key: done.tokens.tolist() for key, done in parked.done.items()} == {
        key: done.tokens.tolist() for key, done in again.done.items()
    }
    lab.check(parked.done, family)


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_new_weights_while_an_environment_is_asked_are_those_between_two_steps(lab: Lab, kv: str) -> None:
    """A sample that was interrupted and parked at the flip is the same as one that ran through it."""
    weights = lab.weights()
    wanted = requests(4, seed=4, max_new_tokens=20)
    running = lab.engine(kv=kv, **EPISODES)
    engine = lab.engine(kv=kv, **EPISODES)
    whole = drain(running, wanted, at(6, lambda: running.load(weights, 1, share=False)))
    cut = drain(engine, [replace(request, max_new_tokens=6, may_go_on=True) for request in wanted])
    engine.load(weights, 1, share=False)
    rest = drain(engine, [going_on(done, 14) for done in cut.values() if done.finish == "length"])
    assert len(rest) > 1
    assert (engine.parked.hits, engine.parked.misses) == ((len(rest), 0) if kv == "keep" else (0, len(rest)))
    for key, done in rest.items():
        assert [*cut[key].tokens, *done.tokens] == whole[key].tokens.tolist()
        np.testing.assert_allclose(done.logprobs, whole[key].logprobs[6:], atol=1e-5, rtol=0)
        full = lab.plain(done, weights=weights)
        assert (np.abs(full - done.logprobs).max() < 1e-5) == (kv == "recompute"), "the keys are the old ones or not"


@pytest.mark.parametrize("prompt", [1, 9, KV_BLOCK + 1])
def test_a_conversation_that_begins_again_computes_its_newest_token(lab: Lab, prompt: int) -> None:
    """After an answer of one token, what is parked is the whole prompt."""
    engine = lab.engine(**EPISODES)
    first = SampleRequest((0, 0, 0), np.arange(5, 5 + prompt, dtype=np.int32), 1, 1.0, 1, may_go_on=True)
    drain(engine, [first])
    beside = SampleRequest((1, 0, 0), np.arange(20, 29, dtype=np.int32), 2, 1.0, 9)
    lab.check(drain(engine, [beside, replace(first, drawn=1, max_new_tokens=5)]))
    assert engine.parked.hits == (prompt > 1)


def test_deterministic_mode_prefills_again(lab: Lab) -> None:
    engine = lab.engine(deterministic=True, **EPISODES)
    first = drain(engine, requests(4, may_go_on=True))
    assert not engine.parked
    drain(engine, [going_on(done, 4) for done in first.values()])
    assert (engine.parked.hits, engine.parked.misses) == (0, 4)


@pytest.mark.usefixtures("small_blocks")
def test_running_and_parked_sequences_together_have_the_blocks_of_a_full_cache(lab: Lab) -> None:
    engine = lab.engine(slots=2, **EPISODES)
    most = 2 * blocks_for(130)
    seen = []

    def check(step: int) -> None:
        tables = engine._flat.cache.tables
        assert engine.parked.blocks + tables.counts[: engine.running].sum() == most - tables.pool.room
        kept = chain(engine.parked._parked.values(), engine.parked._queued.values())
        assert engine.parked.blocks == sum(each.blocks for each in kept)
        seen.append(engine.parked.blocks)

    RandomEpisodes(requests(25, seed=1), 1, parks=True).play(engine, check)
    assert max(seen) > most / 2
    assert engine.parked.misses > 0, "some were evicted"
    assert engine.preemptions == 0, "each slot has room for the longest row"


def test_what_ends_is_parked_no_longer(lab: Lab) -> None:
    engine = lab.engine(kv="recompute", **EPISODES)
    wanted = requests(5, may_go_on=True)
    drain(engine, wanted)
    assert len(engine.parked) == 5
    engine.end([wanted[0].key], "abort")
    engine.parked.forget([wanted[1].key])
    engine.parked.forget([], oldest=4)
    assert len(engine.parked) == 1
    aborted = replace(wanted[0], key=(9, 0, 0), max_new_tokens=20)
    engine.submit(aborted)
    engine.step()
    engine.end([aborted.key], "abort")
    assert len(engine.parked) == 1, "an aborted turn is not parked"
    engine.load(lab.weights(seed=None), 1, share=False)
    assert not engine.parked


def park(parked: ParkedSequences, tables: BlockTables, number: int, length: int, attempt: int = 0) -> None:
    """Parks a sequence of a slot, which then ends."""
    tables.allocate(0, length)
    kept = tables.keep(0, blocks_for(length))
    tables.free(0)
    parked.park((number, 0), ParkedSequence(np.arange(length), kept, attempt))


def test_those_are_evicted_first_that_are_needed_last() -> None:
    """Turns of 1, then of 0, wait for a slot; the environments of 2 and 3 are still asked."""
    tables = BlockTables(1, 1, 8)
    parked = ParkedSequences(tables)
    for number in range(4):
        park(parked, tables, number, 3)
    for number in (1, 0, 7):
        parked.queue((number, 0))
    evicted = list[int]()
    while parked.evict_one():
        left = {sample[0] for sample in (*parked._parked, *parked._queued)}
        evicted += set(range(4)) - left - set(evicted)
        assert (len(parked), parked.blocks, tables.pool.room) == (len(left), len(left), 8 - len(left))
    assert evicted == [2, 3, 0, 1]


def test_the_oldest_is_evicted_first_and_a_sequence_that_differs_is_not_taken() -> None:
    tables = BlockTables(2, 4, 8)
    parked = ParkedSequences(tables)
    for number, length in enumerate((KV_BLOCK, 2 * KV_BLOCK, 5, 9)):
        park(parked, tables, number, length)
    assert parked.blocks == 5
    assert parked.evict_one()
    assert (len(parked), parked.blocks, tables.pool.room) == (3, 4, 4)
    assert parked.take((0, 0), np.arange(99, dtype=np.int32), 1) == 0
    assert parked.take((2, 0), np.arange(7, dtype=np.int32), 1) == 5
    assert (tables.counts[1], tables.pool.room) == (1, 4)
    tables.free(1)
    assert parked.take((3, 0), np.arange(1, 30, dtype=np.int32), 1) == 0
    assert (parked.hits, parked.misses, parked.blocks, len(parked)) == (1, 2, 2, 1)
    park(parked, tables, 1, 3)
    assert (parked.blocks, len(parked), tables.pool.room) == (1, 1, 7)
    parked.clear()
    assert not parked.evict_one()
    assert tables.pool.room == 8


def test_the_release_of_an_earlier_attempt_leaves_the_sequence_of_a_later_one() -> None:
    tables = BlockTables(1, 1, 4)
    parked = ParkedSequences(tables)
    park(parked, tables, 4, 3, attempt=2)
    parked.forget([(4, 0, 1), (4, 1, 2), (5, 0, 2)])
    assert len(parked) == 1
    parked.forget([(4, 0, 2)])
    assert (len(parked), parked.blocks) == (0, 0)
