"""Scores samples with the functions of the user, which run in child processes that can be killed."""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.children.containment import Containment
from asyncrl.concurrency import gather
from asyncrl.config.gate_config import GateConfig
from asyncrl.config.schema import Scorer
from asyncrl.environments.transcript import FAILED, failure_in, token_texts
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.lanes.data.row_store import bytes_of_row
from asyncrl.protocols.batch import SPANS, TOKEN_REWARDS, BatchRef, sampled_places, token_reward_columns
from asyncrl.protocols.messages import Score
from asyncrl.protocols.prompt_row import PackedRow
from asyncrl.protocols.service_contracts import Reward
from asyncrl.rewards.execution.child_pool import ChildPool, SplitPool
from asyncrl.rewards.execution.scoring import (
    FunctionChoice,
    GroupBarrier,
    reward_tokens,
    score_of,
    stores_token_rewards,
    token_rewards,
)
from asyncrl.rewards.execution.thread_pool import InProcessPool, named
from asyncrl.rewards.functions import FunctionSpec, function_specs, held_out_specs, load, overlong_specs
from asyncrl.rewards.row_cache import RowCache
from asyncrl.rewards.sample import Function, FunctionResult, Sample
from asyncrl.rewards.trl_verl_adapters import takes_token_ids
from asyncrl.services.pooled_service import PooledService
from asyncrl.telemetry.run_directory import RunDirectory

TEXT = "text"
"""Column that generation writes: the completion as uint8 UTF-8."""

EPISODE = ("transcript", "turn_rewards")
"""Columns of an episode: its messages as JSON, and the rewards of the environment."""

SHARE_OF_CALL = 0.9
"""Share of the deadline of a call that a group waits for its members; the rest is for scoring them."""


class RewardService(PooledService, Reward):
    """Scores each sample with all functions of `reward.functions`; the score is their weighted sum. The service `cost`
    uses the functions of `cost.functions`. functions: replace those of the config; they exist only in this process."""

    renews = True
    _pool: SplitPool | InProcessPool

    def __init__(self, context: WorkerContext, functions: Sequence[Function] = ()) -> None:
        super().__init__(context)
        config = context.config
        service: Scorer = "cost" if context.spec.service == "cost" else "reward"
        self._section = config.scorers[service]
        self._plays = bool(config.environment.use)
        printed = RunDirectory(context.facts.run_dir).printed_by(f"{service}{context.spec.replica}")
        held_out = held_out_specs(config) if service == "reward" and not functions else {}
        if functions:
            shaping = [(spec.name, load(spec)) for spec in overlong_specs(config)]
            self._pool = InProcessPool([*named(functions), *shaping], self._section.deadline, printed)
        else:
            specs = [*function_specs(config, service), *(spec for own in held_out.values() for spec in own)]
            containment = self.containment([spec.use for spec in specs if spec.is_users])
            self._pool = SplitPool(specs, containment, partial(self._child_pool, printed))
        own = len(self._pool.specs) - sum(map(len, held_out.values()))
        self._functions = FunctionChoice.of(config, self._pool.specs[:own], held_out)
        self._specs: tuple[FunctionSpec, ...] = self._functions.run.specs
        group_deadline = SHARE_OF_CALL * min(config.generation.deadline, config.fleet.call_deadline)
        self._barrier = GroupBarrier(self._score_group, group_deadline, context.tasks)
        self._rows = RowCache()
        self._by_token = service == "reward" and reward_tokens(config)
        uses: list[Function | str] = [*functions, *(spec.use for spec in self._pool.specs)]
        self._reads_ids = self._by_token or any(takes_token_ids(each) for each in uses)
        self._text_of: Callable[[int], str] = str
        self._told_unjudged: set[str] = set()

    def _child_pool(self, printed: Path, specs: Sequence[FunctionSpec], containment: Containment | None) -> ChildPool:
        return ChildPool(
            specs,
            self.context.tasks,
            workers=self._section.workers,
            deadline=self._section.deadline,
            start_deadline=self.context.config.fleet.start_deadline,
            printed=printed,
            first_failure_only=self._section.on_error == "fail",
            containment=containment,
            variables=self.context.config.children.variables,
        )

    async def score(self, samples: BatchRef, row: dict[str, Any] | PackedRow) -> list[Score]:
        """Scores samples that share the prompt row `row`. Raises RewardError when a function failed under on_error =
        "fail", and LostRows when a sample is gone."""
        scored = await self._samples(samples, row)
        scores = []
        chosen = self._functions.of_group(samples.rows[0].group) if len(samples) else self._functions.run
        score_all = self._call_functions if chosen.is_own else self._score_all
        found = await score_all(samples, scored)
        specs = chosen.specs if chosen.is_own else self._specs
        for sample, results, row_ref in zip(scored, found, samples, strict=True):
            place = self._functions.place(sample.group)
            failure = self._failure(sample)
            left_out = failure and self.context.config.environment.on_error == "ignore"
            score = Score(None, {}) if left_out else score_of(sample, specs, results, self._section.on_error, place)
            if self.rows is not None and sample.group >= 0 and score.reward is not None:
                rewards = token_rewards(sample, specs, results).astype(np.float32)
                score = replace(score, place=self.keep(row_ref.name, {TOKEN_REWARDS: rewards}))
            scores.append(replace(score, error=failure) if failure else score)
            if score.error:
                self.add_to_counters(failed=1)
            unjudged = {spec.use for spec, result in zip(specs, results, strict=True) if result.unjudged}
            if score.error and not (unjudged and unjudged <= self._told_unjudged):  # Those are told once.
                self._told_unjudged |= unjudged
                self.context.log.warning("reward failed", group=sample.group, member=sample.member, error=score.error)
        self.add_to_counters(samples=len(scores))
        return scores

    async def start(self) -> None:
        """Starts the functions, and opens rows for the rewards of tokens, if there are any."""
        config = self.context.config
        context = self.context
        if self._by_token:
            self._text_of = await asyncio.to_thread(token_texts, context.facts.model_dir)
        if self._by_token and stores_token_rewards(config):
            row_bytes = bytes_of_row(token_reward_columns(config.response_tokens))
            self.rows = context.open_rows(GateConfig.of(config).row_slots, row_bytes)
        await super().start()

    async def _samples(self, samples: BatchRef, row: dict[str, Any] | PackedRow) -> list[Sample]:
        by_token = ["response_ids", *([SPANS] if self._plays else [])] if self._reads_ids else []
        wanted = [TEXT, *(EPISODE if self._plays else ()), *by_token]
        async with self.context.reader.views(samples, wanted) as found:
            texts = [bytes(text).decode("utf-8", errors="replace") for text in found[TEXT]]
            turns = [json.loads(bytes(transcript)) for transcript in found[EPISODE[0]]] if self._plays else []
            rewards = [each.tolist() for each in found[EPISODE[1]]] if self._plays else []
            spans = list(found[SPANS]) if self._reads_ids and self._plays else [None] * len(texts)
            ids = zip(found["response_ids"], spans, strict=True) if self._reads_ids else ()
            tokens = [self._tokens(*each) for each in ids]
        columns = await self._rows.row(row)
        steps = self.context.config.steps
        made = [
            Sample(columns["prompt"], text, columns, ref.group, ref.member, ref.finish, ref.tokens, *episode)
            for ref, text, *episode in zip(samples, texts, *([turns, rewards] if self._plays else []), strict=True)
        ]
        own = tokens or [{} for _ in made]
        return [
            replace(sample, given=ref.given, version=ref.last, steps=steps, opened=ref.opened, **each)
            for sample, ref, each in zip(made, samples, own, strict=True)
        ]

    def _tokens(self, ids: NDArray[np.int32], spans: NDArray[np.int32] | None) -> dict[str, Any]:
        """Returns what functions by token, and those of TRL, are told of the sampled tokens."""
        sampled = (ids if spans is None else ids[sampled_places(spans)]).tolist()
        turns = [] if spans is None else spans[::2].tolist()
        texts = [self._text_of(each) for each in sampled] if self._by_token else []
        return {"token_ids": sampled, "token_texts": texts, "turn_tokens": turns}

    def _failure(self, sample: Sample) -> str:
        """Returns why the environment of a sample failed; "" where it did not."""
        if sample.finish != FAILED:
            return ""
        place = self._functions.place(sample.group)
        return failure_in(sample.turns) or f"the environment failed on member {sample.member} of {place}"

    async def _score_all(self, refs: BatchRef, samples: list[Sample]) -> list[list[FunctionResult]]:
        """Returns all results for each sample, in the order of `_specs`."""
        return await self._call_functions(refs, samples)

    async def _call_functions(self, refs: BatchRef, samples: list[Sample]) -> list[list[FunctionResult]]:
        """Returns the results of the functions of the group for each sample, in their order. Functions of groups score
        once the other members of the group have arrived."""
        if not samples:
            return []
        chosen = self._functions.of_group(samples[0].group)
        singly, in_groups = await gather(
            gather(*(self._run(number, samples) for number in chosen.single)),
            gather(*(self._score_member(sample, refs.rows[0].attempt) for sample in samples)),
        )
        results = []
        for index, of_groups in enumerate(in_groups):
            own = dict(zip(chosen.single, (of_function[index] for of_function in singly), strict=True))
            own |= zip(chosen.grouped, of_groups, strict=True)
            results.append([own[number] for number in sorted(own)])
        return results

    async def _score_member(self, sample: Sample, attempt: int) -> list[FunctionResult]:
        if not self._functions.of_group(sample.group).grouped:
            return []
        members = self._functions.members(sample.group)
        return await self._barrier.results((sample.group, attempt), members, sample)

    async def _score_group(self, samples: list[Sample]) -> list[list[FunctionResult]]:
        grouped = self._functions.of_group(samples[0].group).grouped
        by_function = [await self._run(number, samples) for number in grouped]
        return [list(own) for own in zip(*by_function, strict=True)]

    async def _run(self, function: int, samples: list[Sample]) -> list[FunctionResult]:
        with self.context.occupancy.computing():
            return await self._pool.run(function, samples)
