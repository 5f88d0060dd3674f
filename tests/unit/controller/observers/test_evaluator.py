"""Evaluation beside training, on virtual time: it never keeps the trainer from writing for long."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.schema import Config
from asyncrl.controller.observers.evaluation import (
    AnswersFolder,
    CodeRates,
    Evaluation,
    EvaluationSchedule,
    Evaluator,
    HeldOutAnswer,
    code_metrics,
    copy_weights,
    summary,
)
from asyncrl.errors import ConfigError, DeadlineExceeded, PeerLost, Refused, WeightsError
from asyncrl.fleet.fleet import Fleet
from asyncrl.lanes.weights.leases import Leases
from asyncrl.protocols.batch import BatchRef, RowRef, SampleName
from asyncrl.protocols.messages import Opening, PromptGroup, Published, SampleText, Score, Using
from asyncrl.simulation import virtual_loop
from tests import golden

PATIENCE = 10.0
MESSAGE = 0.001
"""Seconds on its way."""
UNUSED: Any = None


def config_of(**sections: Any) -> Config:
    return Config.model_validate({"model": {"name": "m"}, "task": {"prompts": "p"}, **sections})


def patient(deadline: float) -> Config:
    """Returns a config that gives a copy of weights this time."""
    fleet = {"start_deadline": 1.0, "call_deadline": deadline - 1.0, "watchdog": 1.0}
    return config_of(fleet=fleet, staleness={"publish_deadline": PATIENCE}, generation={"deadline": 10.0})


# ---- copies of weights -----------------------------------------------------------------------------------------


class Training:
    """Two slots; writes the next version as soon as it may, `busy` seconds after the one before."""

    def __init__(self, busy: float) -> None:
        self._busy = busy
        self._changed = asyncio.Event()
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


class Copying:
    """An evaluation worker. copy: what a copy of this version takes."""

    def __init__(self, copy: Callable[[Published], Coroutine[Any, Any, None]]) -> None:
        self._copy = copy
        self.tries = 0

    async def use_weights(self, published: Published) -> Using:
        self.tries += 1
        await self._copy(published)
        return Using((), published.version)


def away_until(back: float) -> Copying:
    """A worker that comes back at this loop time."""
    return Copying(lambda _: asyncio.sleep(max(0.0, back - asyncio.get_running_loop().time())))


def copied(busy: float, evaluation: Any, transfer: float = 0.0) -> Training:
    """Copies version 0 while a trainer trains."""

    async def main() -> Training:
        training: Any = Training(busy)
        working = asyncio.ensure_future(training.train())
        fleet = Fleet(UNUSED, UNUSED, training, None, evaluation)
        try:
            await copy_weights(fleet, Published(0, 0, "a", 0, "", transfer=transfer), patient(3000.0))
        finally:
            working.cancel()
            assert training.waited <= PATIENCE + transfer + 2 * MESSAGE
            assert "evaluation" not in training.leases.holders(training.version), "the lease is free"
        return training

    return virtual_loop.run(main())


async def damaged(published: Published) -> None:
    raise WeightsError("evaluation[0]: weights-0-3.safetensors is damaged")


@pytest.mark.parametrize(
    ("busy", "made", "error"),
    [
        (1.0, lambda: Copying(damaged), WeightsError),
        (1.0, lambda: away_until(1000.0), Refused),  # Who is away does not keep the trainer from writing.
        (50_000.0, lambda: away_until(20_000.0), WeightsError),
    ],
)
def test_weights_that_are_not_copied_free_the_lease_and_say_why(
    busy: float, made: Callable[[], Copying], error: type[Exception]
) -> None:
    with golden.raises(error):
        copied(busy, made())


def test_a_version_that_still_lies_in_its_slot_is_waited_for() -> None:
    assert copied(5000.0, away_until(1000.0)).version == 0


def test_a_copy_over_a_network_has_the_time_that_its_bytes_may_take() -> None:
    """A version of many gigabytes takes longer than the trainer may be kept from writing."""
    slow = Copying(lambda published: asyncio.sleep(PATIENCE + published.transfer - MESSAGE))
    copied(1.0, slow, transfer=900.0)
    assert slow.tries == 1


# ---- when a version is evaluated -------------------------------------------------------------------------------


class Evaluated:
    """An evaluator of one set, whose answers come when they may, or that fails. seen: sets with their versions."""

    def __init__(self, name: str = "", error: Exception | None = None) -> None:
        self.name = name
        self.error = error
        self.seen: list[tuple[str, int]] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def evaluate(self, version: int, incarnation: int) -> Evaluation:
        self.seen.append((self.name, version))
        await self.may_answer.wait()
        if self.error:
            raise self.error
        return replace(summary(version, [[1.0]], None, 0.0), name=self.name)


def published(version: int) -> Published:
    return Published(0, version, "a", 0, "")


class Schedule(EvaluationSchedule):
    """A schedule of these sets. told: of versions that were skipped; ended: versions; seen: sets with versions."""

    def __init__(self, *evaluators: Evaluated, back: float = 0.0) -> None:
        self.told: list[tuple[int, str]] = []
        self.ended: list[int] = []
        self.seen: list[tuple[str, int]] = []
        for each in evaluators:
            each.seen = self.seen
        training: Any = Training(1.0)
        evaluation: Any = away_until(back)
        super().__init__(
            Fleet(UNUSED, UNUSED, training, None, evaluation),
            {each.name: each for each in evaluators},
            patient(100.0),
            lambda found: self.ended.append(found.version),
            lambda version, why: self.told.append((version, why)),
        )

    def write(self, version: int) -> None:
        leases: Any = self.fleet.training
        leases.leases.end_write(version)


def scheduled(play: Callable[[], Coroutine[Any, Any, Schedule]]) -> Schedule:
    return virtual_loop.run(play())


def test_a_version_that_another_one_replaces_is_told_with_that_one() -> None:
    async def play() -> Schedule:
        evaluator = Evaluated()
        evaluator.may_answer.clear()
        schedule = Schedule(evaluator)
        for version in (0, 0, 3):
            schedule.ask(published(version))
        evaluator.may_answer.set()
        schedule.write(3)
        await schedule.finish(published(3))
        return schedule

    schedule = scheduled(play)
    assert schedule.told == [(0, "version 3 came before its turn")]
    assert schedule.ended == [3], "the last version was asked for already, and is evaluated once"


def test_a_version_that_is_given_up_is_told_and_waited_for_once() -> None:
    async def play() -> Schedule:
        schedule = Schedule(Evaluated(), back=50_000.0)
        schedule.ask(published(0))
        await schedule.finish(published(0))
        assert asyncio.get_running_loop().time() < 2 * 100
        return schedule

    ((version, why),) = scheduled(play).told
    assert version == 0
    golden.says(why)


def test_a_judge_that_does_not_answer_in_time_ends_the_run() -> None:
    async def play() -> Schedule:
        schedule = Schedule(Evaluated(error=DeadlineExceeded("reward0.0 did not answer")))
        await schedule.finish(published(0))
        return schedule

    with pytest.raises(DeadlineExceeded, match=r"reward0\.0"):
        scheduled(play)


def test_each_set_is_evaluated_when_it_is_asked_for_and_all_of_them_at_the_end() -> None:
    async def play() -> Schedule:
        schedule = Schedule(Evaluated(), Evaluated("easy"))
        schedule.ask(published(0))
        assert schedule.pending == {0}
        await schedule._next()
        schedule.write(3)
        schedule.ask(published(3), ["easy"])
        await schedule.finish(published(3))
        assert schedule.pending == set()
        return schedule

    schedule = scheduled(play)
    assert schedule.seen == [("", 0), ("easy", 0), ("easy", 3), ("", 3)]
    assert schedule.told == []


def test_a_version_that_replaces_another_one_is_evaluated_on_the_sets_of_both() -> None:
    async def play() -> Schedule:
        schedule = Schedule(*map(Evaluated, ("", "easy", "hard")))
        schedule.ask(published(0), ["hard"])
        schedule.ask(published(3), ["easy"])
        schedule.write(3)
        await schedule._next()
        return schedule

    assert scheduled(play).seen == [("hard", 3), ("easy", 3)]


# ---- samples and their scores ----------------------------------------------------------------------------------


def test_costs_are_averaged_as_rewards_are() -> None:
    rewards = [[1.0, 0.0], [1.0, None], [None, None]]
    costs = [[4.0, 2.0], [None, 1.0], [None, None]]
    found = summary(7, rewards, costs, 1.5)
    assert (found.prompts, found.mean, found.cost, found.unscorable) == (2, 0.75, 2.0, 6)
    assert summary(7, rewards, None, 1.5).cost is None


class Answers:
    """Generation whose samples of a prompt end after as many tokens as their number says. asked, released: calls."""

    def __init__(self) -> None:
        self.asked: list[PromptGroup] = []
        self.released: list[SampleName] = []

    async def generate(self, prompts: PromptGroup) -> AsyncIterator[BatchRef]:
        self.asked.append(prompts)
        for member in prompts.members:
            yield BatchRef((RowRef(prompts.id, member, prompts.attempt, 0, 1, member + 1, 4, 4, "stop", ()),))

    async def release(self, samples: list[SampleName], oldest: int) -> None:
        self.released += samples

    async def texts(self, refs: BatchRef) -> list[SampleText]:
        return [SampleText(row.group, row.member, "<s>one", "x" * row.tokens) for row in refs]


class DiesInAnEpisode(Answers):
    """Generation that dies in the second turn."""

    async def reset(self, prompts: PromptGroup, row: dict[str, Any]) -> Opening:
        return Opening(prompts.prompt)

    async def step(self, samples: BatchRef, row: dict[str, Any]) -> BatchRef:
        return BatchRef(tuple(sample._replace(finish="") for sample in samples))

    async def generate(self, prompts: PromptGroup) -> AsyncIterator[BatchRef]:
        if prompts.continues is not None:
            raise PeerLost("killed")
        async for samples in super().generate(replace(prompts, members=(0,))):
            yield samples


def test_a_worker_that_dies_in_an_episode_leaves_nothing_to_a_second_try() -> None:
    dies: Any = DiesInAnEpisode()
    chosen = config_of(environment={"use": "guess"}, evaluate={"prompts": "p", "samples": 2, "temperature": 1.0})
    evaluator = Evaluator(dies, UNUSED, [("one", {})], chosen, environment=dies)
    with pytest.raises(PeerLost, match="killed"):
        virtual_loop.run(evaluator.evaluate(4, 0))
    assert dies.released == [(-1, 0, 4), (-1, 1, 4)] * 2


class Scores:
    """A reward service. scores: of one sample, by the row of its prompt."""

    def __init__(self, score: Callable[[RowRef, dict[str, Any]], Score]) -> None:
        self._score = score

    async def score(self, samples: BatchRef, row: dict[str, Any]) -> list[Score]:
        return [self._score(sample, row) for sample in samples]


def test_prompts_are_sampled_as_the_evaluation_says_and_not_as_training_does() -> None:
    generation: Any = Answers()
    reward: Any = Scores(lambda sample, row: Score(1.0, {}))
    held_out = {"prompts": "p", "temperature": 0.3, "samples": 2}
    chosen = config_of(generation={"temperature": 0.7}, evaluate=held_out)
    evaluator = Evaluator(generation, reward, [("one", {}), ("two", {"tools": [{"name": "add"}]})], chosen)
    virtual_loop.run(evaluator.evaluate(4, 0))
    assert sorted(len(each.tools) for each in generation.asked) == [0, 1]
    assert [(each.temperature, each.members, each.not_before) for each in generation.asked] == [(0.3, (0, 1), 4)] * 2


SETS = {"easy": {"prompts": "e", "samples": 2, "temperature": 1.0, "every": 5}, "hard": {"prompts": "h", "size": 3}}


def second_is_right(sample: RowRef, row: dict[str, Any]) -> Score:
    value = float(sample.member == 1 and row["answer"] == "b")
    return Score(value, {"right": value, "brief": 0.5})


def answered() -> tuple[Evaluation, Answers, list[tuple[str, int, list[HeldOutAnswer]]]]:
    """Evaluates the set `easy`; returns what was asked and saved, too."""
    generation: Any = Answers()
    reward: Any = Scores(second_is_right)
    saved: list[Any] = []
    questions: Any = [("one", {"prompt": "one", "answer": "a"}), ("two", {"prompt": "two", "answer": "b"})]
    chosen = config_of(evaluate={"sets": SETS})
    evaluator = Evaluator(generation, reward, questions, chosen, name="easy", save=lambda *each: saved.append(each))
    return virtual_loop.run(evaluator.evaluate(4, 0)), generation, saved


def test_a_set_has_its_own_samples_means_of_terms_and_pass_at_k() -> None:
    found, generation, _ = answered()
    asked = [(each.id, each.members, each.temperature) for each in generation.asked]
    assert asked == [(-65, (0, 1), 1.0), (-66, (0, 1), 1.0)]
    assert (found.name, found.mean, found.terms) == ("easy", 0.25, {"right": 0.25, "brief": 0.5})
    assert {k: rate.mean for k, rate in found.pass_at.items()} == {1: 0.25, 2: 0.5}
    metrics = found.metrics()
    assert {metrics[f"eval/easy/{name}"] for name in ("reward/mean", "reward/right", "pass_at_1")} == {0.25}
    assert metrics["eval/easy/pass_at_2"] == 0.5
    assert replace(found, name="").metrics()["eval/reward/brief"] == 0.5
    golden.says(found)


def test_answers_are_saved_and_the_oldest_go(tmp_path: Path) -> None:
    ((name, version, answers),) = answered()[2]
    assert (name, version, len(answers)) == ("easy", 4, 4)
    last = answers[-1]
    assert (last.set, last.question, last.member, last.prompt, last.text) == ("easy", 1, 1, "<s>one", "xx")
    assert (last.reward, last.terms, last.row) == (1.0, {"right": 1.0, "brief": 0.5}, {"answer": "b"})
    folder = AnswersFolder(tmp_path, keep=2)
    for number in (2, 10, 9):
        folder.save(name, number, answers)
    folder.save("", 9, answers[:1])
    files = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.jsonl"))
    assert files == ["9.jsonl", "easy/10.jsonl", "easy/9.jsonl"]
    assert len((tmp_path / "easy/10.jsonl").read_text().splitlines()) == 4


def evaluated(terms: dict[str, float], weights: dict[str, float] | None = None, **keys: Any) -> Evaluation:
    """Evaluates one prompt with two samples, each of which gets these terms, and their weighted sum as the reward, as
    the reward service does."""
    weights = weights or {}
    total = 0.0
    for name, value in terms.items():
        total += weights.get(name, 1.0) * value
    generation: Any = Answers()
    reward: Any = Scores(lambda sample, row: Score(total, terms))
    functions = [{"use": f"mine.py:{name}", "name": name, "weight": weight} for name, weight in weights.items()]
    held_out = {"prompts": "q", "samples": 2, "temperature": 1.0, **keys}
    chosen = config_of(reward={"functions": functions}, evaluate=held_out)
    return virtual_loop.run(Evaluator(generation, reward, [("one", {"prompt": "one"})], chosen).evaluate(0, 0))


@given(parts=st.lists(st.integers(1, 1000), min_size=1, max_size=8))
def test_answers_with_all_they_can_get_pass_whatever_the_weights_are(parts: list[int]) -> None:
    weights = {f"f{number}": part / sum(parts) for number, part in enumerate(parts)}
    assert evaluated(dict.fromkeys(weights, 1.0), weights).pass_at[1].mean == 1.0


THREE = {"a": 0.7, "b": 0.2, "c": 0.1}
BELOW = {"a": 0.3, "b": -0.1, "c": -0.1}


@pytest.mark.parametrize(
    ("terms", "weights", "keys", "passes"),
    [
        ({"a": 1.0, "b": 1.0, "c": 1.0}, THREE, {}, True),
        ({"a": 1.0, "b": 1.0, "c": 0.99}, THREE, {}, False),
        ({"a": 1.0, "b": 1.0}, {"a": 0.7, "b": 0.2}, {"pass_reward": 0.9}, True),
        ({"a": 1.0, "b": 1.0, "c": 2.0}, BELOW, {"pass_reward": 0.0}, True),
        ({"a": 1.0, "b": 1.0, "c": 2.1}, BELOW, {"pass_reward": 0.0}, False),
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
    with golden.raises(ConfigError):
        evaluated({"right": 1.0, "brief": 0.5}, pass_term="rihgt")


# ---- rates of programs -----------------------------------------------------------------------------------------


def test_pass_at_k_of_programs_is_printed_once() -> None:
    terms = {"compiles": 1.0, "passes_tests": 1.0}
    golden.says(evaluated(terms, {"compiles": 0.3, "passes_tests": 0.7}))
    golden.says(evaluated(terms, samples=1, temperature=0.0))


RIGHT, PARTLY, BROKEN = (
    {"compiles": compiles, "passes_tests": passed} for compiles, passed in ((1.0, 1.0), (1.0, 0.75), (0.0, 0.0))
)


def test_only_programs_that_pass_all_their_tests_pass() -> None:
    assert code_metrics([RIGHT, PARTLY, PARTLY, BROKEN]) == {"code/compile_rate": 0.75, "code/pass_rate": 0.25}
    assert code_metrics([{"exact_match": 1.0}]) == {}


def rates_of(*problems: list[dict[str, float]]) -> CodeRates:
    rates = CodeRates.of(problems)
    assert rates is not None
    return rates


def test_held_out_rates_are_means_over_problems_without_samples_that_could_not_be_scored() -> None:
    found = rates_of([RIGHT, BROKEN, BROKEN], [BROKEN] * 3, [PARTLY, PARTLY, RIGHT]).metrics()
    assert found["eval/code/compile_rate"] == pytest.approx(4 / 9)
    assert [found[f"eval/code/pass_at_{k}"] for k in (1, 2)] == pytest.approx([2 / 9, 4 / 9])
    assert "eval/code/pass_at_4" not in found
    assert found["eval/code/pass_at_1_low"] < found["eval/code/pass_at_1"] < found["eval/code/pass_at_1_high"]
    lost = rates_of([RIGHT, {}], [{}, {}], [RIGHT, BROKEN]).pass_at
    assert {k: rate.mean for k, rate in lost.items()} == {1: 0.75}
    assert str(rates_of(*[[RIGHT]] * 4)) == "pass@1 1.000 [0.510 - 1.000], compiles 1.000 [0.510 - 1.000]"
    assert CodeRates.of([[{"exact_match": 1.0}]]) is None
