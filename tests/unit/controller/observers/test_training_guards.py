"""Guards see training that comes to nothing, say it once, and say nothing of real runs that learn."""

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import Config, GuardsConfig
from asyncrl.config.sources import load
from asyncrl.controller.journal.ledger import Dropped
from asyncrl.controller.observers.alarms import Alarm
from asyncrl.controller.observers.events import Event, SampleScored, StepDone
from asyncrl.controller.observers.training_guards import GUARDS, WINDOW, TrainingGuards, TrainingHistory
from asyncrl.errors import ConfigError, TrainingStopped
from asyncrl.protocols.batch import BatchRef, Cuts, RowRef
from asyncrl.protocols.messages import Score, StepReport
from tests import golden
from tests.unit.scene import CONFIG, Scene

HEALTHY = sorted((Path(__file__).parents[3] / "data/healthy_runs").glob("*.jsonl"))
LIMIT = 100
ENDS = ("stop", "turn_limit", "token_limit", "time_limit", "environment")
Step = Callable[[int], StepDone]


def guards(
    say: Callable[[str], None], *, members: int = 16, batch: int = 128, limit: int = LIMIT, **keys: Any
) -> TrainingGuards:
    """Returns guards of a history. keys: its further fields, and reactions of [guards]."""
    reactions = {name: keys.pop(name) for name in [*keys] if name in GuardsConfig.model_fields}
    return TrainingGuards(TrainingHistory(limit, members, batch, **keys), Alarm(GuardsConfig(**reactions), say))


def row(number: int, reward: float, finish: str = "stop") -> RowRef:
    return RowRef(number // 16, number % 16, 0, 0, 4, 1, 0, 0, finish, (), reward)


def step(number: int, rewards: Iterable[float], truncated: int = 0, **metrics: float) -> StepDone:
    rows = [row(i, reward, "length" if i < truncated else "stop") for i, reward in enumerate(rewards)]
    measured = {"grad_norm": 1.0, "policy/entropy": 0.4, **{name.replace("__", "/"): v for name, v in metrics.items()}}
    report = StepReport(0, number, 1, "", "", measured, (), None)
    return StepDone(Cuts(0, number - 1, BatchRef(tuple(rows)), 1, 1), report, {}, 1.0)


def changed(event: StepDone, **fields: Any) -> StepDone:
    """Returns a step whose samples have these fields."""
    rows = tuple(row._replace(**fields) for row in event.cuts.batch)
    return replace(event, cuts=replace(event.cuts, batch=BatchRef(rows)))


def of_episodes(event: StepDone, finish: str) -> StepDone:
    """Returns a step whose samples are episodes of four turns, of which the last one has the reward."""
    rows = [
        row._replace(finish=finish, turns=4, given=9, turn_rewards=(0.0, 0.0, 0.0, row.reward or 0.0))
        for row in event.cuts.batch
    ]
    return replace(event, cuts=replace(event.cuts, batch=BatchRef(tuple(rows))))


def in_order(right: int, of: int = 128) -> list[float]:
    """Returns rewards of groups of which at most one has both."""
    return [1.0] * right + [0.0] * (of - right)


def half(right: int = 64, of: int = 128) -> list[float]:
    """Returns rewards of which each group has its share, as far as there are enough."""
    rewards = in_order(right, of)
    return [rewards[member * (of // 16) + group] for group in range(of // 16) for member in range(16)]


def one_in(groups: int, number: int) -> list[float]:
    """Returns rewards of which one group in so many has both, and the others 0 or 1 by turns."""
    rows = [number + place for place in range(8)]
    return [float(row % 2 if row % groups or member else not row % 2) for row in rows for member in range(16)]


def moving(number: int, kl: float, **metrics: float) -> StepDone:
    usual = {"mismatch__kl": kl, "staleness__mean": 1.2, "learning_rate": 1e-7}
    return step(number, half(), **{**usual, **metrics})


def told(events: Iterable[Event], equal_texts: Iterable[float] = (), **keys: Any) -> list[tuple[int, str]]:
    """Returns what guards say, and after which event."""
    said: list[str] = []
    found: list[tuple[int, str]] = []
    watching = guards(said.append, **keys)
    for share in equal_texts:
        watching.take_equal_texts(share)
    for number, event in enumerate(events, 1):
        watching.observe(event)
        found += [(number, text) for text in said]
        said.clear()
    return found


def steps(count: int, made: Step) -> list[StepDone]:
    return [made(number) for number in range(1, count)]


# ---- real runs -----------------------------------------------------------------------------------------------


def recorded(path: Path) -> Iterable[StepDone]:
    """Yields the steps of a real run, whose rewards are 0 or 1, from what its metrics.jsonl held."""
    for line in map(json.loads, path.read_text().splitlines()):
        samples = line["samples"]
        rewards = half(round(line["reward/mean"] * samples), samples)
        truncated = round(line["completions/truncated_fraction"] * samples)
        metrics = {"grad_norm": line["grad_norm"], "policy__entropy": line["policy/entropy"]}
        yield step(line["step"], rewards, truncated, **metrics)


@pytest.mark.parametrize("path", HEALTHY, ids=lambda path: path.stem)
def test_real_runs_that_learn_raise_no_alarm(path: Path) -> None:
    events = list(recorded(path))
    assert len(events) >= 200
    assert told(events, **dict.fromkeys((guard.key for guard in GUARDS), "stop")) == []


def test_real_runs_are_there() -> None:
    assert {path.stem for path in HEALTHY} >= {"quickstart-0", "quickstart-1", "stragglers-0", "stragglers-1"}


# ---- steps of which something is said, once --------------------------------------------------------------------


def broken(number: int, **after: float) -> StepDone:
    return step(number, half()) if number < 10 else step(number, [0.0] * 128, **after)


SAID: dict[str, tuple[int, Step, dict[str, Any], int]] = {
    "a constant reward": (40, lambda n: step(n, [0.5] * 16, grad_norm=0.0), {}, WINDOW),
    # A reward that falls with the prompts is no collapse.
    "equal in each group": (20, lambda n: step(n, in_order(96 if n < 6 else 16), grad_norm=0.0), {}, WINDOW),
    "a gradient of 0": (40, lambda n: broken(n, grad_norm=0.0), {}, 13),
    "an entropy of 0": (40, lambda n: broken(n, policy__entropy=0.001), {}, 14),
    "a rate that moves nothing": (60, lambda n: moving(n, 1.2e-10), {}, 10),
    "a collapse, rows in order": (
        80,
        lambda n: step(n, half(right=0), grad_norm=0.0) if n % 20 >= 10 else step(n, half()),
        {"in_order": True},
        13,
    ),
}
"""Steps, fields of the history, and the step after which one sentence is said."""


@pytest.mark.parametrize(("count", "made", "keys", "after"), SAID.values(), ids=SAID)
def test_training_that_comes_to_nothing_is_told_once(count: int, made: Step, keys: dict[str, Any], after: int) -> None:
    ((number, text),) = told(steps(count, made), **keys)
    golden.says(text)
    assert number == after
    for finish, discount in (("turn_limit", 0.9), ("environment", None)):
        episodes = (of_episodes(each, finish) for each in steps(count, made))
        assert [text for _, text in told(episodes, turn_discount=discount, **keys)] == [text], "also of episodes"


@pytest.mark.parametrize(("equal_texts", "members"), [([0.9], 16), ([0.1], 16), ([], 16), ([0.1], 2), ([0.9], 2)])
def test_equal_groups_are_told_after_a_useful_gradient_with_their_cause(equal_texts: list[float], members: int) -> None:
    events = steps(40, lambda n: step(n, half() if n == 1 else one_in(8, n), grad_norm=0.3))
    ((number, text),) = told(events, equal_texts, members=members, batch=8 * members)
    assert number == 11
    golden.says(text)


def test_truncation_is_said_again_only_after_it_was_over() -> None:
    cut_off = [*[100] * 20, *[0] * 20, *[100] * 20, *[0, 128] * 20]
    found = told(step(number, half(), truncated) for number, truncated in enumerate(cut_off, 1))
    assert [number for number, _ in found] == [5, 44], "twice cut off for long; what alternates after it is no news"
    golden.says(found[0][1])


@pytest.mark.parametrize("finish", ENDS)
@pytest.mark.parametrize(("cut", "late", "speaks"), [(0, 0, False), (1, 0, True), (3, 1, True), (0, 4, False)])
def test_truncation_of_episodes_is_that_of_their_answers(finish: str, cut: int, late: int, speaks: bool) -> None:
    """A larger generation.max_new_tokens changes nothing of an episode that ends by a limit of its own."""
    events = steps(10, lambda n: changed(step(n, half()), finish=finish, turns=4, cut=cut, late=late))
    assert [each.partition(":")[0] for _, each in told(events)] == ["guards.truncation"] * speaks


@pytest.mark.parametrize(("discount", "warns"), [(None, True), (0.9, False)])
def test_equal_totals_of_unequal_turns_teach_where_advantages_are_by_turn(discount: float | None, warns: bool) -> None:
    def made(number: int) -> StepDone:
        done = step(number, [1.0] * 128)
        turns = ((1.0, 0.0), (0.0, 1.0))
        rows = [each._replace(turn_rewards=turns[each.member % 2]) for each in done.cuts.batch]
        return replace(done, cuts=replace(done.cuts, batch=BatchRef(tuple(rows))))

    said = told(steps(30, made), turn_discount=discount)
    assert any("got the same reward" in text for _, text in said) == warns


# ---- steps of which nothing is said ----------------------------------------------------------------------------


def learns_all(number: int) -> StepDone:
    if number < 10:
        return step(number, half(32 + 10 * number))
    return step(number, [1.0] * 128, grad_norm=0.0, policy__entropy=0.001)


def warms_up_and_learns_all(number: int) -> StepDone:
    if number < 40:
        return moving(number, 1e-10 if number < 21 else 1e-4)
    return step(number, [1.0] * 127 + [0.0], mismatch__kl=1e-11, staleness__mean=1.2, learning_rate=1e-7)


QUIET: dict[str, tuple[int, Step, dict[str, Any]]] = {
    "a first gradient": (9, lambda n: step(n, half(), grad_norm=0.1 if n == 1 else 0.0), {}),
    "few samples": (9, lambda n: step(n, half(of=16, right=8), grad_norm=0.0), {}),
    "a run that learnt all": (60, learns_all, {}),
    "small batches without luck": (
        100,
        lambda n: step(n, [1.0, 0.0] if n % 20 < 4 else [0.0, 0.0], grad_norm=0.0),
        {},
    ),
    "equal groups that are not compared": (40, lambda n: step(n, one_in(8, n), grad_norm=0.3), {"by_group": False}),
    "100 quickstart steps at 1e-5": (60, lambda n: moving(n, 1e-6), {}),
    "engine and trainer of one version": (60, lambda n: moving(n, 1e-13, staleness__mean=0.0), {}),
    "no gradient": (60, lambda n: moving(n, 1e-8, grad_norm=0.0), {"no_variance": "off"}),
    "a control run": (60, lambda n: moving(n, 1e-8, learning_rate=0.0), {}),
    "a warm-up, then all is learnt": (80, warms_up_and_learns_all, {"warmup": 20}),
    "guards that are off": (
        40,
        lambda n: step(n, [0.0] * 128, truncated=128, grad_norm=0.0),
        dict.fromkeys((guard.key for guard in GUARDS), "off"),
    ),
}


@pytest.mark.parametrize(("count", "made", "keys"), QUIET.values(), ids=QUIET)
def test_training_that_goes_on_or_cannot_tell_is_no_news(count: int, made: Step, keys: dict[str, Any]) -> None:
    assert told(steps(count, made), **keys) == []


def test_means_that_differ_by_rounding_neither_rise_nor_fall() -> None:
    history = TrainingHistory(LIMIT, members=16, batch=128)
    history.first = 0.7 + 0.2 + 0.1
    history.best = history.highest = 1.0
    assert history.first < history.highest
    assert not history.reward_rose
    history.lowest = history.first
    history.steps.extend([{"reward/mean": history.lowest}] * 5)
    assert not history.reward_fell
    history.lowest = 0.5
    history.steps.extend([{"reward/mean": 0.7}] * 5)
    assert history.reward_fell


# ---- samples ---------------------------------------------------------------------------------------------------


def test_equal_rewards_under_dynamic_sampling_are_told_though_no_step_ends() -> None:
    scene = Scene(replace(CONFIG, need_signal=True), steps=3)
    scene.reward.value_of = lambda sample: Score(0.0, {"f": 0.0})
    scene.observe = guards(print, members=4, batch=8, no_signal="stop").observe
    with golden.raises(TrainingStopped):
        scene.play()


def test_groups_dropped_between_trained_steps_are_no_groups_in_a_row() -> None:
    """With advantages by turn the totals of groups that teach may be equal."""
    history = TrainingHistory(LIMIT, members=16, batch=128, turn_discount=0.9)
    for number in range(1, 200):
        history.observe(Dropped(number, (0,), "no_signal"))
        if number % 20 == 0:
            history.observe(step(number // 20, [1.0] * 128))
    assert history.groups_without_signal == 19


def test_one_group_in_ten_with_a_signal_is_enough() -> None:
    scene = Scene(replace(CONFIG, need_signal=True), steps=20)
    said = list[str]()
    scene.reward.value_of = lambda sample: Score(float(sample.group % 10 == 0 and sample.member == 0), {})
    # All samples of the scene end at the token cap.
    scene.observe = guards(said.append, members=4, batch=8, truncation="off").observe
    scene.play()
    assert said == []


@pytest.mark.parametrize("reward", [None, 0.0])
def test_an_environment_that_always_fails_is_blamed_and_no_function(reward: float | None) -> None:
    """Of four samples one fails by its function in between, which begins the count again."""
    cause = Score(reward, {}, "environment my.py:Game on member 0 of group 0: `step` raised KeyError: 'a'\n  File ...")
    fails = SampleScored(row(0, 0.0)._replace(finish="environment", reward=reward), cause)
    events = [*[fails] * 4, SampleScored(row(0, 0.0), Score(0.0, {}, "f raised")), *[fails] * 5]
    ((number, text),) = told(events, limit=5, no_variance="off")
    assert number == len(events)
    golden.says(text)


def test_a_reward_that_always_fails_is_told_where_its_errors_count_zero() -> None:
    scene = Scene(steps=20)
    said = list[str]()
    scene.reward.value_of = lambda sample: Score(0.0, {"f": 0.0}, "f raised KeyError")
    scene.observe = guards(said.append, no_variance="off", truncation="off").observe
    scene.play()
    (text,) = said
    golden.says(text)


@pytest.mark.parametrize("ever_scored", [False, True])
def test_a_constant_reward_of_failed_calls_is_blamed_on_the_calls(ever_scored: bool) -> None:
    error = "mine.py:reward raised KeyError: 'answer'\n  a traceback"
    scores = [Score(0.0, {"f": 0.0}, "" if ever_scored and number == 3 else error) for number in range(80)]
    events = [
        *(SampleScored(row(0, 0.0), score) for score in scores),
        *steps(10, lambda n: step(n, [0.0] * 16, grad_norm=0.0)),
    ]
    ((_, text),) = told(events, limit=10**6)
    golden.says(text)


@pytest.mark.parametrize("experiment", ["guess", "calculator"])
@pytest.mark.parametrize("reward", [0.0, -1.0])
def test_groups_of_episodes_without_a_signal_are_told(experiment: str, reward: float) -> None:
    said: list[str] = []
    config = load(experiment, ["--algorithm.dynamic_sampling", "true"], {}).config
    watching = TrainingGuards.of(config, LIMIT, Alarm(config.guards, said.append))
    for group in range(200):
        for member in range(config.task.samples_per_prompt):
            episode = row(16 * group + member, reward, "turn_limit")._replace(group=group, member=member, turns=3)
            watching.observe(SampleScored(episode, Score(reward, {"environment": reward})))
        watching.observe(Dropped(group, tuple(range(config.task.samples_per_prompt)), "no_signal"))
    (text,) = said
    golden.says(text)


# ---- keys ------------------------------------------------------------------------------------------------------


def test_each_guard_has_a_key_and_each_key_a_guard() -> None:
    elsewhere = {"learning_rate", "first_failure", "unscored", "poison", "algorithm_drops"}
    assert {guard.key for guard in GUARDS} | elsewhere == set(GuardsConfig.model_fields)


def config_with(flags: str) -> Config:
    pairs = [each.split("=") for each in flags.split()]
    return load("quickstart", [word for key, value in pairs for word in (f"--{key}", value)], {}).config


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ("training.learning_rate=50", "training.learning_rate"),
        ("training.optimizer=adam training.learning_rate=1", "Adam "),
        ("training.optimizer=rprop training.learning_rate=1", "Rprop "),
        ("training.optimizer=sgd training.learning_rate=100", "all weights together"),
        ("training.optimizer=asgd training.learning_rate=1e6", "ASGD "),
        ("training.optimizer=adadelta training.learning_rate=100", "30"),
        ("algorithm.preset=ppo training.learning_rate=0.02", "critic.learning_rate"),
        ("algorithm.preset=ppo critic.learning_rate=1", "critic.learning_rate"),
        ("training.learning_rate=50 guards.learning_rate=off", ""),
        ("training.learning_rate=0.006", ""),
        ("training.optimizer=sgd training.learning_rate=1", ""),
        ("training.optimizer=adadelta training.learning_rate=1", ""),
        ("algorithm.preset=ppo training.learning_rate=1e-3", ""),
    ],
)
def test_a_rate_that_breaks_a_model_is_known_before_the_start_by_optimizer_and_also_of_critics(
    flags: str, names: str
) -> None:
    warnings = [str(each) for each in config_with(flags).warnings if "_rate" in str(each)]
    assert [names in each for each in warnings] == [True] * bool(names)
    for each in warnings:
        golden.says(each)


def test_a_rate_that_breaks_a_model_is_refused_where_the_guard_says_stop() -> None:
    with golden.raises(ConfigError):
        config_with("training.learning_rate=50 guards.learning_rate=stop")
