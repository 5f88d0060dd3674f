"""Evaluation beside training, on virtual time: it never keeps the trainer from writing for long."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config.schema import Config
from asyncrl.controller.observers.evaluation import (
    AnswersFolder,
    Evaluation,
    EvaluationSchedule,
    Evaluator,
    HeldOutAnswer,
    copy_weights,
    summary,
)
from asyncrl.errors import ConfigError, DeadlineExceeded, PeerLost, Refused, WeightsError
from asyncrl.fleet.fleet import Fleet
from asyncrl.lanes.weights.leases import Leases
from asyncrl.protocols.batch import BatchRef, RowRef, SampleName
from asyncrl.protocols.messages import Opening, PromptGroup, Published, SampleText, Score, Using
from asyncrl.simulation import virtual_loop

PATIENCE = 10.0


def config(deadline: float) -> Config:
    """Returns a config that gives a copy of weights this time."""
    fleet = {"start_deadline": 1.0, "call_deadline": deadline - 1.0, "watchdog": 1.0}
    sections = {"model": {"name": "none"}, "task": {"prompts": "none"}, "generation": {"deadline": 10.0}}
    return Config.model_validate({**sections, "fleet": fleet, "staleness": {"publish_deadline": PATIENCE}})


MESSAGE = 0.001
"""Seconds on its way."""
UNUSED: Any = None


class Training:
    """Two slots; writes the next version as soon as it may, `busy` seconds after the one before."""

    def __init__(self, busy: float) -> None:
        self._busy, self._changed = busy, asyncio.Event()
        self.leases = Leases()
        self.version = 0
        self.waited = 0.0
        self.leases.end_write(0)

    async def using(self, readers: tuple[str, ...], version: int) -> None:
        await asyncio.sleep(MESSAGE)
        for reader in readers:
            self.leases.using(reader, version)

    async def detached(self, reader: str) -> None:
        await asyncio.sleep(MESSAGE)
        self.leases.detach(reader)
        self._changed.set()

    async def train(self) -> None:
        while True:
            await asyncio.sleep(self._busy)
            began = asyncio.get_running_loop().time()
            while self.leases.holders(self.version + 1):
                self._changed.clear()
                await self._changed.wait()
            self.waited = max(self.waited, asyncio.get_running_loop().time() - began)
            self.version += 1
            self.leases.begin_write(self.version)
            self.leases.end_write(self.version)


class AwayUntil:
    """An evaluation worker that comes back at this loop time."""

    def __init__(self, back: float) -> None:
        self._back = back

    async def use_weights(self, published: Published) -> Using:
        await asyncio.sleep(max(0.0, self._back - asyncio.get_running_loop().time()))
        return Using((), published.version)


def taken_over(training_busy: float, back: float) -> Training:
    async def main() -> Training:
        training: Any = Training(training_busy)
        evaluation: Any = AwayUntil(back)
        working = asyncio.ensure_future(training.train())
        try:
            await copy_weights(
                Fleet(UNUSED, UNUSED, training, None, evaluation),
                Published(0, 0, "a", 0, ""),
                config(3000.0),
            )
        finally:
            working.cancel()
            assert training.waited <= PATIENCE + 2 * MESSAGE
        return training

    return virtual_loop.run(main())


async def test_weights_that_cannot_be_copied_free_the_lease() -> None:
    class Damaged:
        async def use_weights(self, published: Published) -> Using:
            raise WeightsError("evaluation[0]: weights-0-3.safetensors is damaged")

    training: Any = Training(1.0)
    evaluation: Any = Damaged()
    fleet = Fleet(UNUSED, UNUSED, training, None, evaluation)
    with pytest.raises(WeightsError, match=r"evaluation\[0\]: .* is damaged"):
        await copy_weights(fleet, Published(0, 0, "a", 0, ""), config(3000.0))
    assert not training.leases.holders(0)


def test_a_worker_that_is_away_does_not_keep_the_trainer_from_writing() -> None:
    with pytest.raises(Refused, match="wants to read weights of version 0"):
        taken_over(training_busy=1.0, back=1000.0)


def test_a_version_that_still_lies_in_its_slot_is_waited_for() -> None:
    assert taken_over(training_busy=5000.0, back=1000.0).version == 0


def test_a_worker_that_never_takes_over_is_given_up_with_what_to_raise() -> None:
    with pytest.raises(WeightsError, match=r"within 3000 s, in tries of .* s: raise staleness\.publish_deadline"):
        taken_over(training_busy=50_000.0, back=20_000.0)


def test_a_copy_over_a_network_has_the_time_that_its_bytes_may_take() -> None:
    """A version of many gigabytes takes longer than the trainer may be kept from writing."""

    class Slow:
        tries = 0

        async def use_weights(self, published: Published) -> Using:
            self.tries += 1
            await asyncio.sleep(PATIENCE + published.transfer - MESSAGE)
            return Using((), published.version)

    async def main() -> int:
        training: Any = Training(1.0)
        evaluation: Any = Slow()
        fleet = Fleet(UNUSED, UNUSED, training, None, evaluation)
        await copy_weights(fleet, Published(0, 0, "a", 0, "", transfer=900.0), config(3000.0))
        return int(evaluation.tries)

    assert virtual_loop.run(main()) == 1


class Evaluated:
    """An evaluator whose answers come when they may, or that fails."""

    def __init__(self, may_answer: asyncio.Event, error: Exception | None = None) -> None:
        self._may_answer = may_answer
        self._error = error
        self.versions: list[int] = []

    async def evaluate(self, version: int, incarnation: int) -> Evaluation:
        self.versions.append(version)
        await self._may_answer.wait()
        if self._error:
            raise self._error
        return summary(version, [[1.0]], None, 0.0)


def published(version: int) -> Published:
    return Published(0, version, "a", 0, "")


def scheduled(fleet_back: float, evaluated: Any, told: list[tuple[int, str]], done: list[int]) -> EvaluationSchedule:
    training: Any = Training(1.0)
    evaluation: Any = AwayUntil(fleet_back)
    fleet = Fleet(UNUSED, UNUSED, training, None, evaluation)
    return EvaluationSchedule(
        fleet,
        {"": evaluated} if not isinstance(evaluated, dict) else evaluated,
        config(100.0),
        lambda found: done.append(found.version),
        lambda version, why: told.append((version, why)),
    )


def test_a_version_that_another_one_replaces_is_told_with_that_one() -> None:
    told: list[tuple[int, str]] = []
    done: list[int] = []

    async def main() -> None:
        may_answer = asyncio.Event()
        schedule = scheduled(0.0, Evaluated(may_answer), told, done)
        for version in (0, 0, 3):
            schedule.ask(published(version))
        may_answer.set()
        schedule.fleet.training.leases.end_write(3)  # type: ignore[attr-defined]
        await schedule.finish(published(3))

    virtual_loop.run(main())
    assert told == [(0, "version 3 came before its turn")]
    assert done == [3], "the last version was asked for already, and is evaluated once"


def test_a_version_that_is_given_up_is_told_and_waited_for_once() -> None:
    told: list[tuple[int, str]] = []

    async def main() -> float:
        schedule = scheduled(50_000.0, Evaluated(asyncio.Event()), told, [])
        schedule.ask(published(0))
        await schedule.finish(published(0))
        return asyncio.get_running_loop().time()

    assert virtual_loop.run(main()) < 2 * 100
    ((version, why),) = told
    assert version == 0
    assert "could not be copied within 100 s" in why


def test_a_judge_that_does_not_answer_in_time_ends_the_run() -> None:
    async def main() -> None:
        may_answer = asyncio.Event()
        may_answer.set()
        schedule = scheduled(0.0, Evaluated(may_answer, DeadlineExceeded("reward0.0 did not answer")), [], [])
        await schedule.finish(published(0))

    with pytest.raises(DeadlineExceeded, match=r"reward0\.0"):
        virtual_loop.run(main())


def test_costs_are_averaged_as_rewards_are() -> None:
    rewards = [[1.0, 0.0], [1.0, None], [None, None]]
    costs = [[4.0, 2.0], [None, 1.0], [None, None]]
    found = summary(7, rewards, costs, 1.5)
    assert (found.prompts, found.mean, found.cost, found.unscorable) == (2, 0.75, 2.0, 6)
    assert summary(7, rewards, None, 1.5).cost is None


class Asked:
    """Generation that answers nothing and keeps what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[PromptGroup] = []

    async def generate(self, prompts: PromptGroup) -> AsyncIterator[BatchRef]:
        self.asked.append(prompts)
        yield BatchRef(())

    async def release(self, samples: list[SampleName], oldest: int) -> None:
        return


class ScoresNothing:
    async def score(self, samples: BatchRef, row: dict[str, Any]) -> list[Score]:
        return []


class DiesInAnEpisode(Asked):
    """Generation that dies in the second turn, and notes what it shall free."""

    def __init__(self) -> None:
        super().__init__()
        self.released: list[SampleName] = []

    async def reset(self, prompts: PromptGroup, row: dict[str, Any]) -> Opening:
        return Opening(prompts.prompt)

    async def step(self, samples: BatchRef, row: dict[str, Any]) -> BatchRef:
        return BatchRef(tuple(sample._replace(finish="") for sample in samples))

    async def generate(self, prompts: PromptGroup) -> AsyncIterator[BatchRef]:
        if prompts.continues is not None:
            raise PeerLost("killed")
        yield BatchRef((RowRef(prompts.id, 0, prompts.attempt, 0, 1, 1, 4, 4, "stop", ()),))

    async def release(self, samples: list[SampleName], oldest: int) -> None:
        self.released += samples


def test_a_worker_that_dies_in_an_episode_leaves_nothing_to_a_second_try() -> None:
    dies: Any = DiesInAnEpisode()
    sections = {"model": {"name": "m"}, "task": {"prompts": "p"}, "environment": {"use": "guess"}}
    chosen = Config.model_validate({**sections, "evaluate": {"prompts": "p", "samples": 2, "temperature": 1.0}})
    evaluator = Evaluator(dies, UNUSED, [("one", {})], chosen, environment=dies)
    with pytest.raises(PeerLost, match="killed"):
        virtual_loop.run(evaluator.evaluate(4, 0))
    assert dies.released == [(-1, 0, 4), (-1, 1, 4)] * 2


def test_prompts_are_sampled_as_the_evaluation_says_and_not_as_training_does() -> None:
    generation: Any = Asked()
    reward: Any = ScoresNothing()
    sections = {"model": {"name": "m"}, "task": {"prompts": "p"}, "generation": {"temperature": 0.7}}
    chosen = Config.model_validate({**sections, "evaluate": {"prompts": "p", "temperature": 0.3, "samples": 2}})
    evaluator = Evaluator(generation, reward, [("one", {}), ("two", {"tools": [{"name": "add"}]})], chosen)
    virtual_loop.run(evaluator.evaluate(4, 0))
    assert sorted(len(each.tools) for each in generation.asked) == [0, 1]
    assert [(each.temperature, each.members, each.not_before) for each in generation.asked] == [(0.3, (0, 1), 4)] * 2


SETS = {"easy": {"prompts": "e", "samples": 2, "temperature": 1.0, "every": 5}, "hard": {"prompts": "h", "size": 3}}


class Named(Evaluated):
    """An evaluator of one set, which notes what it evaluates."""

    def __init__(self, name: str, seen: list[tuple[str, int]]) -> None:
        super().__init__(asyncio.Event())
        self._may_answer.set()
        self._name = name
        self._seen = seen

    async def evaluate(self, version: int, incarnation: int) -> Evaluation:
        self._seen.append((self._name, version))
        return replace(await super().evaluate(version, incarnation), name=self._name)


def test_each_set_is_evaluated_when_it_is_asked_for_and_all_of_them_at_the_end() -> None:
    seen: list[tuple[str, int]] = []
    told: list[tuple[int, str]] = []

    async def main() -> None:
        schedule = scheduled(0.0, {name: Named(name, seen) for name in ("", "easy")}, told, [])
        leases: Any = schedule.fleet.training
        schedule.ask(published(0))
        assert schedule.pending == {0}
        await schedule._next()
        leases.leases.end_write(3)
        schedule.ask(published(3), ["easy"])
        await schedule.finish(published(3))
        assert schedule.pending == set()

    virtual_loop.run(main())
    assert seen == [("", 0), ("easy", 0), ("easy", 3), ("", 3)]
    assert told == []


def test_a_version_that_replaces_another_one_is_evaluated_on_the_sets_of_both() -> None:
    seen: list[tuple[str, int]] = []

    async def main() -> None:
        schedule = scheduled(0.0, {name: Named(name, seen) for name in ("", "easy", "hard")}, [], [])
        leases: Any = schedule.fleet.training
        schedule.ask(published(0), ["hard"])
        schedule.ask(published(3), ["easy"])
        leases.leases.end_write(3)
        await schedule._next()

    virtual_loop.run(main())
    assert seen == [("hard", 3), ("easy", 3)]


class Answers(Asked):
    """Generation whose samples of a prompt end after as many tokens as their number says."""

    async def generate(self, prompts: PromptGroup) -> AsyncIterator[BatchRef]:
        self.asked.append(prompts)
        for member in prompts.members:
            yield BatchRef((RowRef(prompts.id, member, prompts.attempt, 0, 1, member + 1, 4, 4, "stop", ()),))

    async def texts(self, refs: BatchRef) -> list[SampleText]:
        return [SampleText(row.group, row.member, "<s>one", "x" * row.tokens) for row in refs]


class ScoresTheSecond:
    async def score(self, samples: BatchRef, row: dict[str, Any]) -> list[Score]:
        values = [float(sample.member == 1 and row["answer"] == "b") for sample in samples]
        return [Score(value, {"right": value, "brief": 0.5}) for value in values]


def answered(saved: list[tuple[str, int, list[HeldOutAnswer]]]) -> tuple[Evaluation, Answers]:
    generation: Any = Answers()
    reward: Any = ScoresTheSecond()
    chosen = Config.model_validate({"model": {"name": "m"}, "task": {"prompts": "p"}, "evaluate": {"sets": SETS}})
    questions: Any = [("one", {"prompt": "one", "answer": "a"}), ("two", {"prompt": "two", "answer": "b"})]
    evaluator = Evaluator(
        generation, reward, questions, chosen, name="easy", save=lambda *each: saved.append((*each[:2], list(each[2])))
    )
    return virtual_loop.run(evaluator.evaluate(4, 0)), generation


def test_a_set_has_its_own_samples_means_of_terms_and_pass_at_k() -> None:
    found, generation = answered([])
    assert [(each.id, each.members, each.temperature) for each in generation.asked] == [
        (-65, (0, 1), 1.0),
        (-66, (0, 1), 1.0),
    ]
    assert (found.name, found.mean, found.terms) == ("easy", 0.25, {"right": 0.25, "brief": 0.5})
    assert {k: rate.mean for k, rate in found.pass_at.items()} == {1: 0.25, 2: 0.5}
    metrics = found.metrics()
    assert (
        metrics["eval/easy/reward/mean"] == metrics["eval/easy/reward/right"] == metrics["eval/easy/pass_at_1"] == 0.25
    )
    assert metrics["eval/easy/pass_at_2"] == 0.5
    assert replace(found, name="").metrics()["eval/reward/brief"] == 0.5
    assert str(found).startswith(
        "held out, set easy, version 4: reward 0.250 ± 0.250, pass@1 0.250, pass@2 0.500 over 2"
    )


def test_answers_are_saved_and_the_oldest_go(tmp_path: Path) -> None:
    saved: list[tuple[str, int, list[HeldOutAnswer]]] = []
    answered(saved)
    ((name, version, answers),) = saved
    assert (name, version, len(answers)) == ("easy", 4, 4)
    last = answers[-1]
    assert (last.set, last.question, last.member, last.prompt, last.text) == ("easy", 1, 1, "<s>one", "xx")
    assert (last.reward, last.terms, last.row) == (1.0, {"right": 1.0, "brief": 0.5}, {"answer": "b"})
    folder = AnswersFolder(tmp_path, keep=2)
    for number in (2, 10, 9):
        folder.save(name, number, answers)
    folder.save("", 9, answers[:1])
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.jsonl")) == [
        "9.jsonl",
        "easy/10.jsonl",
        "easy/9.jsonl",
    ]
    assert len((tmp_path / "easy/10.jsonl").read_text().splitlines()) == 4


class Terms:
    """Gives each answer the same terms, and their weighted sum as the reward, as the reward service does."""

    def __init__(self, terms: dict[str, float], weights: dict[str, float]) -> None:
        self._terms = terms
        self._weights = weights

    async def score(self, samples: BatchRef, row: dict[str, Any]) -> list[Score]:
        total = 0.0
        for name, value in self._terms.items():
            total += self._weights.get(name, 1.0) * value
        return [Score(total, self._terms) for _ in samples]


def evaluated(terms: dict[str, float], weights: dict[str, float] | None = None, **keys: Any) -> Evaluation:
    """Evaluates one prompt with two samples, each of which gets these terms."""
    weights = weights or {}
    generation: Any = Answers()
    reward: Any = Terms(terms, weights)
    functions = [{"use": f"mine.py:{name}", "name": name, "weight": weight} for name, weight in weights.items()]
    sections = {"model": {"name": "m"}, "task": {"prompts": "p"}, "reward": {"functions": functions}}
    held_out = {"prompts": "q", "samples": 2, "temperature": 1.0, **keys}
    config = Config.model_validate({**sections, "evaluate": held_out})
    evaluator = Evaluator(generation, reward, [("one", {"prompt": "one"})], config)
    return virtual_loop.run(evaluator.evaluate(0, 0))


@given(parts=st.lists(st.integers(1, 1000), min_size=1, max_size=8))
@settings(deadline=None)
def test_answers_with_all_they_can_get_pass_whatever_the_weights_are(parts: list[int]) -> None:
    weights = {f"f{number}": part / sum(parts) for number, part in enumerate(parts)}
    assert evaluated(dict.fromkeys(weights, 1.0), weights).pass_at[1].mean == 1.0


@pytest.mark.parametrize(
    ("terms", "weights", "keys", "passes"),
    [
        ({"a": 1.0, "b": 1.0, "c": 1.0}, {"a": 0.7, "b": 0.2, "c": 0.1}, {}, True),
        ({"a": 1.0, "b": 1.0, "c": 0.99}, {"a": 0.7, "b": 0.2, "c": 0.1}, {}, False),
        ({"a": 1.0, "b": 1.0}, {"a": 0.7, "b": 0.2}, {"pass_reward": 0.9}, True),
        ({"a": 1.0, "b": 1.0, "c": 2.0}, {"a": 0.3, "b": -0.1, "c": -0.1}, {"pass_reward": 0.0}, True),
        ({"a": 1.0, "b": 1.0, "c": 2.1}, {"a": 0.3, "b": -0.1, "c": -0.1}, {"pass_reward": 0.0}, False),
        ({"a": 0.99999994}, {"a": 1.0}, {}, True),  # What float32 makes of 0.7 + 0.2 + 0.1.
        ({"a": 0.99999}, {"a": 1.0}, {}, False),
        ({"a": 1e-12}, {"a": 1.0}, {"pass_reward": 1e-10}, False),
        ({"a": 1.0, "b": -0.5}, {"a": 0.7, "b": 0.2}, {"pass_term": "a"}, True),
        ({"a": 0.0, "b": 1.0}, {"a": 0.1, "b": 5.0}, {"pass_term": "a"}, False),
        ({"a/exact": 1.0, "a/brief": 0.0}, {"a": 0.5}, {"pass_term": "a/exact"}, True),
        ({"a/exact": 1.0, "a/brief": -1.0}, {"a": 0.3}, {"pass_reward": 0.3}, False),
        ({"passes_tests": 1.0, "lint": 0.2}, {"passes_tests": 0.9, "lint": 0.1}, {}, True),
        ({"passes_tests": 0.5, "lint": 1.0}, {"passes_tests": 0.9, "lint": 0.9}, {}, False),
    ],
)
def test_an_answer_passes_by_its_reward_or_by_the_term_that_is_named(
    terms: dict[str, float], weights: dict[str, float], keys: dict[str, Any], passes: bool
) -> None:
    assert evaluated(terms, weights, **keys).pass_at[1].mean == float(passes)


def test_a_term_that_no_answer_has_is_an_error_with_the_closest_one() -> None:
    with pytest.raises(ConfigError, match=r"evaluate\.pass_term: no reward of .* the term rihgt; did you mean right\?"):
        evaluated({"right": 1.0, "brief": 0.5}, pass_term="rihgt")


def test_pass_at_k_of_programs_is_printed_once() -> None:
    said = str(evaluated({"compiles": 1.0, "passes_tests": 1.0}, {"compiles": 0.3, "passes_tests": 0.7}))
    assert (said.count("pass@1"), said.count("pass@2")) == (1, 1)
    assert "pass@1 1.000, pass@2 1.000 over 1 prompts; compiles 1.000 [" in said
    alone = str(evaluated({"compiles": 1.0, "passes_tests": 1.0}, samples=1, temperature=0.0))
    assert alone.count("pass@1") == 1
