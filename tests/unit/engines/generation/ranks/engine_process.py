"""Ranks that share out the layers of an engine, forked from this process. They play what the test describes, leave what
they saw in files, and then one of them dies.

python engine_process.py FOLDER
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from asyncrl.engines.generation import attention, block_pool, flat_model, running_batch
from asyncrl.engines.generation.engine_interface import Completion, SampleRequest
from asyncrl.engines.generation.flat_model import cut_dims
from asyncrl.engines.generation.ranked_generation import FollowingEngine, LeadingEngine
from asyncrl.engines.generation.torch_engine import TorchEngine
from asyncrl.engines.ranks.rank_mesh import RankMesh
from asyncrl.errors import PeerLost
from asyncrl.protocols.rank_layout import Layout
from tests.unit.engines.generation.conftest import engine_config
from tests.unit.engines.training.ranks.forked_ranks import run_ranks

PATIENCE = 60.0
NEXT_CASE = "next case"
STEPS = 3
"""Steps of a slice."""
Weights = Callable[[int], Mapping[str, Tensor]]
"""Returns the weights of a version, or slices of them."""


def use_small_blocks() -> None:
    """Makes KV blocks of 4 positions: they are taken, given back, shared and moved all the time."""
    for module in (block_pool, running_batch, attention, flat_model):
        module.KV_BLOCK = 4  # type: ignore[attr-defined]


def requests() -> Iterator[SampleRequest]:
    """Yields groups of three members of one prompt, of which the first has no time."""
    random = np.random.default_rng(2)
    for group in range(4):
        prompt = random.integers(5, 261, random.integers(1, 40)).astype(np.int32)
        for member in range(3):
            deadline = 300.0 if group == member == 0 else np.inf
            yield SampleRequest((group, member, 0), prompt, 10 * group + member, 1.0, 16, deadline=deadline)


def play(engine: TorchEngine, weights: Weights) -> dict[str, Any]:
    """Samples, while requests end and come, weights change, and the engine is put away. 100 s pass with each slice."""
    now = 0.0
    done = list[Completion]()
    wanted = list(requests())
    set_clock(engine, lambda: now)
    engine.submit(*wanted[:9])
    for number in count():
        with engine.slice():
            for _ in range(STEPS if engine.active else 0):
                done += engine.step()
        now += 100.0
        if number == 1:
            done += engine.end([wanted[1].key, wanted[8].key], "abort")
            engine.submit(*wanted[9:])
        if number == 3:
            engine.load(weights(1), 1, share=True)
        if number == 5:
            engine.put_away()
            engine.load(weights(2), 2, share=True)
        if not engine.active:
            break
    cache = engine._flat.cache
    alone = (-1, 0) if engine._config.generation.deterministic else ()
    return {
        "done": {each.request.key: recorded(each) for each in done},
        "preemptions": engine.preemptions,
        "blocks": [len(cache.tables.pool), cache.tables.pool.touched],
        "bytes": cache.bytes,
        "after": engine.logprobs_after(np.arange(5, 20)),
        "alone and among others": [finished(engine, wanted[first:])[wanted[-1].key] for first in alone],
    }


def finished(engine: TorchEngine, wanted: list[SampleRequest]) -> dict[Any, Any]:
    engine.submit(*wanted)
    done: list[Completion] = []
    while engine.active:
        with engine.slice():
            done += engine.step()
    return {each.request.key: recorded(each) for each in done}


def recorded(completion: Completion) -> tuple[list[int], Tensor, list[int], str]:
    logprobs = torch.from_numpy(completion.logprobs)
    return completion.tokens.tolist(), logprobs, completion.versions.tolist(), completion.finish


def set_clock(engine: TorchEngine, clock: Callable[[], float]) -> None:
    if isinstance(engine, LeadingEngine):
        engine._clock = clock
    else:
        engine._batch.clock = clock


def versions_of(folder: Path, rank: int = 0, ranks: int = 1) -> Weights:
    """Returns what makes slices of changed weights."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    dims = cut_dims(model) if ranks > 1 else {}

    def weights(version: int) -> dict[str, Tensor]:
        changed = {name: each.detach() * (1 + version / 20) for name, each in model.named_parameters()}
        return {
            name: each.chunk(ranks, dims[name])[rank].contiguous() if name in dims else each
            for name, each in changed.items()
        }

    return weights


class Watched:
    """Notes what an engine samples from, and what it finishes. logits: digest of all of them."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine_sample = engine._sample
        self._engine_finish = engine._finish
        self.logits, self.done = hashlib.sha256(), dict[Any, Any]()
        engine._sample = self._sample  # type: ignore[method-assign]
        engine._finish = self._finish  # type: ignore[method-assign]

    def _sample(self, logits: Tensor, rows: Any) -> Any:
        self.logits.update(logits.float().numpy().tobytes())
        return self._engine_sample(logits, rows)

    def _finish(self, *args: Any) -> Completion:
        completion = self._engine_finish(*args)
        self.done[completion.request.key] = recorded(completion)
        return completion


def play_case(case: dict[str, Any], mesh: RankMesh) -> dict[str, Any]:
    folder = Path(case["model"])
    config = engine_config(**case["settings"])
    weights = versions_of(folder, mesh.tensor.rank, mesh.tensor.size)
    assert mesh.announcements is not None, "the ranks are led"
    if mesh.rank == 0:
        leader = LeadingEngine(folder, config, 0, ranks=mesh, tell=mesh.announcements.tell)
        watched = Watched(leader)
        found = play(leader, weights)
        mesh.announcements.tell(NEXT_CASE)
        shapes = {each.name: each.shape for each in leader.spec.tensors}
        return found | {"watched": watched.done, "logits": watched.logits.hexdigest(), "shapes": shapes}
    follower = FollowingEngine(folder, config, 0, ranks=mesh)
    watched = Watched(follower)
    while (call := mesh.announcements.next()) != NEXT_CASE:
        follower.apply(call, weights(call[2]) if call[0] == "load" else {})
    assert (follower.running, follower.waiting, follower.version) == (0, 0, 2)
    return {
        "watched": watched.done,
        "logits": watched.logits.hexdigest(),
        "bytes": follower._flat.cache.bytes,
        "shapes": {each.name: each.shape for each in follower.spec.tensors},
    }


def die(case: dict[str, Any], mesh: RankMesh, dead: int) -> str:
    """Returns what this rank finds out about the death of another one, which all others meet in an exchange of the
    second step of a slice."""
    folder = Path(case["model"])
    config = engine_config(**case["settings"])
    assert mesh.announcements is not None, "the ranks are led"
    try:
        if mesh.rank == 0:
            leader = LeadingEngine(folder, config, 0, ranks=mesh, tell=mesh.announcements.tell)
            leader.submit(*requests())
            with leader.slice():
                leader.step()
                if dead == 0:
                    os._exit(0)
                leader.step()
        else:
            follower = FollowingEngine(folder, config, 0, ranks=mesh)
            if dead == mesh.rank:
                dies_in_second_step(follower)
            while call := mesh.announcements.next():
                follower.apply(call)
    except PeerLost as lost:
        return str(lost)
    return ""


def dies_in_second_step(follower: FollowingEngine) -> None:
    step = follower.step
    made = list[int]()

    def counted() -> list[Completion]:
        made.append(len(made))
        if len(made) == 2:
            os._exit(0)
        return step()

    follower.step = counted  # type: ignore[method-assign]


def play_cases(layout: Layout, folder: Path, cases: dict[str, Any], mesh: RankMesh) -> None:
    found = {name: play_case(case, mesh) for name, case in cases.items()}
    last = next(iter(cases.values()))
    torch.save(found, folder / f"{layout.pp}x{layout.tp}-{mesh.rank}.pt")
    lost = die(last, mesh, dead=0 if layout.size == 2 else layout.size - 1)
    (folder / f"{layout.pp}x{layout.tp}-{mesh.rank}.txt").write_text(lost)


if __name__ == "__main__":
    torch.set_num_threads(1)
    use_small_blocks()
    root = Path(sys.argv[1])
    for sizes, cases in json.loads((root / "cases.json").read_text()).items():
        pp, tp = sizes.split("x")
        layout = Layout(pp=int(pp), tp=int(tp))
        codes = run_ranks(layout, partial(play_cases, layout, root, cases), PATIENCE, is_led=True)
        assert codes == [0] * layout.size, f"{layout.size} ranks ended with {codes}"
