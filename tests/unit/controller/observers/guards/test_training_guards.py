"""Guards see training that comes to nothing, say it once, and say nothing of real runs that learn."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import Config, GuardsConfig
from asyncrl.config.sources import load
from asyncrl.controller.journal.ledger import Dropped
from asyncrl.controller.observers.alarms import Alarm
from asyncrl.controller.observers.events import SampleScored, StepDone
from asyncrl.controller.observers.training_guards import GUARDS, WINDOW, TrainingGuards, TrainingHistory
from asyncrl.errors import ConfigError, TrainingStopped
from asyncrl.protocols.batch import BatchRef, Cuts, RowRef
from asyncrl.protocols.messages import Score, StepReport
from tests.unit.scene import CONFIG, Scene

HEALTHY = sorted((Path(__file__).parents[4] / "data/healthy_runs").glob("*.jsonl"))
LIMIT = 100


def guards(said: list[str], limit: int = LIMIT, **reactions: Any) -> TrainingGuards:
    alarm = Alarm(GuardsConfig(**reactions), said.append)
    return TrainingGuards(TrainingHistory(limit, members=16, batch=128), alarm)


def row(number: int, reward: float, finish: str = "stop") -> RowRef:
    return RowRef(number // 16, number % 16, 0, 0, 4, 1, 0, 0, finish, (), reward)


def step(number: int, rewards: Iterable[float], truncated: int = 0, **metrics: float) -> StepDone:
    rows = [row(i, reward, "length" if i < truncated else "stop") for i, reward in enumerate(rewards)]
    measured = {"grad_norm": 1.0, "policy/entropy": 0.4, **{name.replace("__", "/"): v for name, v in metrics.items()}}
    report = StepReport(0, number, 1, "", "", measured, (), None)
    return StepDone(Cuts(0, number - 1, BatchRef(tuple(rows)), 1, 1), report, {}, 1.0)


def in_order(right: int, of: int = 128) -> list[float]:
    """Returns rewards of groups of which at most one has both."""
    return [1.0] * right + [0.0] * (of - right)


def half(right: int = 64, of: int = 128) -> list[float]:
    """Returns rewards of which each group has its share, as far as there are enough."""
    rewards = in_order(right, of)
    return [rewards[member * (of // 16) + group] for group in range(of // 16) for member in range(16)]


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
    said: list[str] = []
    watching = guards(said, **dict.fromkeys((guard.key for guard in GUARDS), "stop"))
    steps = list(recorded(path))
    assert len(steps) >= 200
    for each in steps:
        watching.observe(each)
    assert said == []


def test_real_runs_are_there() -> None:
    assert {path.stem for path in HEALTHY} >= {"quickstart-0", "quickstart-1", "stragglers-0", "stragglers-1"}


def test_a_constant_reward_is_said_once() -> None:
    said: list[str] = []
    watching = guards(said)
    for number in range(1, 40):
        watching.observe(step(number, [0.5] * 16, grad_norm=0.0))
        assert bool(said) == (number >= WINDOW)
    (text,) = said
    assert text.startswith("guards.no_variance: all 80 samples up to step 5 got the same reward, 0.5, and none can")
    assert 'guards.no_variance = "stop" ends such a run' in text


def test_rewards_that_are_equal_in_each_group_are_told_though_groups_differ() -> None:
    said: list[str] = []
    watching = guards(said)
    for number in range(1, 20):
        watching.observe(step(number, in_order(96 if number < 6 else 16), grad_norm=0.0))
    (text,) = said  # A reward that fell with the prompts is no collapse.
    assert "the gradient was 0 in every step up to step 5, for 640 samples: the samples of each group got equal" in text


@pytest.mark.parametrize(("rewards", "first_gradient"), [(half(), 0.1), (half(of=16, right=8), 0.0)])
def test_a_gradient_or_few_samples_are_no_constant_reward(rewards: list[float], first_gradient: float) -> None:
    said: list[str] = []
    watching = guards(said)
    for number in range(1, 9):
        watching.observe(step(number, rewards, grad_norm=first_gradient if number == 1 else 0.0))
    assert said == []


def test_the_end_of_a_run_that_learnt_all_is_no_alarm() -> None:
    said: list[str] = []
    watching = guards(said)
    for number in range(1, 10):
        watching.observe(step(number, half(32 + 10 * number)))
    for number in range(10, 60):
        watching.observe(step(number, [1.0] * 128, grad_norm=0.0, policy__entropy=0.001))
    assert said == []


@pytest.mark.parametrize(
    ("after", "says"),
    [
        ({"grad_norm": 0.0}, "the gradient is 0 since 512 samples, and the mean reward fell from 0.5 to 0.1"),
        ({"policy__entropy": 0.001}, "the entropy of the policy fell from 0.4 to 0.001 nats a token, and the mean"),
    ],
)
def test_a_policy_that_breaks_is_told(after: dict[str, float], says: str) -> None:
    said: list[str] = []
    watching = guards(said)
    for number in range(1, 10):
        watching.observe(step(number, half()))
    for number in range(10, 40):
        watching.observe(step(number, [0.0] * 128, **after))
    (text,) = said
    assert says in text
    assert "smaller training.learning_rate" in text


def test_small_batches_without_luck_are_no_collapse() -> None:
    said: list[str] = []
    watching = guards(said)
    for number in range(1, 100):
        watching.observe(step(number, [1.0, 0.0] if number % 20 < 4 else [0.0, 0.0], grad_norm=0.0))
    assert said == []


def test_truncation_is_said_again_only_after_it_was_over() -> None:
    said: list[str] = []
    watching = guards(said)
    for number, truncated in enumerate([*[100] * 20, *[0] * 20, *[100] * 20, *[0, 128] * 20], 1):
        watching.observe(step(number, half(), truncated))
    assert len(said) == 2, "twice cut off for long; what alternates after it is the same news"
    assert "78% of the samples of the last 5 steps had an answer cut off at generation.max_new_tokens" in said[0]


@pytest.mark.parametrize("finish", ["stop", "turn_limit", "token_limit", "time_limit", "environment"])
@pytest.mark.parametrize(("cut", "late", "speaks"), [(0, 0, False), (1, 0, True), (3, 1, True), (0, 4, False)])
def test_truncation_of_episodes_is_that_of_their_answers(finish: str, cut: int, late: int, speaks: bool) -> None:
    """A larger generation.max_new_tokens changes nothing of an episode that ends by a limit of its own."""
    said: list[str] = []
    watching = guards(said)
    for number in range(1, 10):
        event = step(number, half())
        rows = (row._replace(finish=finish, turns=4, cut=cut, late=late) for row in event.cuts.batch)
        watching.observe(replace(event, cuts=replace(event.cuts, batch=BatchRef(tuple(rows)))))
    assert [each.partition(":")[0] for each in said] == ["guards.truncation"] * speaks


def test_equal_rewards_under_dynamic_sampling_are_told_though_no_step_ends() -> None:
    scene = Scene(replace(CONFIG, need_signal=True), steps=3)
    said = list[str]()
    scene.reward.value_of = lambda sample: Score(0.0, {"f": 0.0})  # type: ignore[method-assign]
    watching = TrainingGuards(TrainingHistory(LIMIT, 4, 8), Alarm(GuardsConfig(no_signal="stop"), said.append))
    scene.observe = watching.observe
    with pytest.raises(TrainingStopped, match=r'guards.no_signal = "stop" ends the run: 128 groups in a row had'):
        scene.play()


@pytest.mark.parametrize(("discount", "warns"), [(None, True), (0.9, False)])
def test_equal_totals_of_unequal_turns_teach_where_advantages_are_by_turn(discount: float | None, warns: bool) -> None:
    said: list[str] = []
    history = TrainingHistory(LIMIT, members=16, batch=128, turn_discount=discount)
    watching = TrainingGuards(history, Alarm(GuardsConfig(), said.append))
    for number in range(1, 30):
        done = step(number, [1.0] * 128)
        turns = ((1.0, 0.0), (0.0, 1.0))
        rows = [each._replace(turn_rewards=turns[each.member % 2]) for each in done.cuts.batch]
        watching.observe(replace(done, cuts=replace(done.cuts, batch=BatchRef(tuple(rows)))))
    assert any("got the same reward" in text for text in said) == warns


def test_groups_dropped_between_trained_steps_are_no_groups_in_a_row() -> None:
    """With advantages by turn the totals of groups that teach may be equal."""
    history = TrainingHistory(LIMIT, members=16, batch=128, turn_discount=0.9)
    for number in range(1, 200):
        history.observe(Dropped(number, (0,), "no_signal"))
        if number % 20 == 0:
            history.observe(step(number // 20, [1.0] * 128))
    assert history.groups_without_signal == 19


def test_one_group_in_ten_with_a_signal_is_enough() -> None:
    scene = Scene(replace(CONFIG, need_signal=True), steps=40)
    said = list[str]()
    scene.reward.value_of = lambda sample: Score(float(sample.group % 10 == 0 and sample.member == 0), {})  # type: ignore[method-assign]
    off = GuardsConfig(truncation="off")  # All samples of the scene end at the token cap.
    scene.observe = TrainingGuards(TrainingHistory(LIMIT, 4, 8), Alarm(off, said.append)).observe
    scene.play()
    assert said == []


@pytest.mark.parametrize("reward", [None, 0.0])
def test_an_environment_that_always_fails_is_blamed_and_no_function(reward: float | None) -> None:
    """Of four samples one fails by its function in between, which begins the count again."""
    said: list[str] = []
    watching = guards(said, limit=5, no_variance="off")
    failed = row(0, 0.0)._replace(finish="environment", reward=reward)
    cause = Score(reward, {}, "environment my.py:Game on member 0 of group 0: `step` raised KeyError: 'a'\n  File ...")
    for _ in range(4):
        watching.observe(SampleScored(failed, cause))
    watching.observe(SampleScored(row(0, 0.0), Score(0.0, {}, "f raised")))
    for _ in range(4):
        watching.observe(SampleScored(failed, cause))
    assert said == []
    watching.observe(SampleScored(failed, cause))
    (text,) = said
    assert "the environment failed on each of the last 5 samples: environment my.py:Game on member 0" in text
    assert "`step` raised KeyError: 'a'; environment.on_error =" in text
    assert "logs/environment*.jsonl" in text
    assert "reward.on_error" not in text


@pytest.mark.parametrize("finish", ["stop", "turn_limit", "token_limit", "time_limit"])
def test_guards_say_of_episodes_what_is_true_of_them(finish: str) -> None:
    """Equal rewards, a fall, a small rate: these are judged by rewards and log-probs, whatever ends an episode."""
    said: list[str] = []
    watching = guards(said)
    for number in range(1, 40):
        done = step(number, [0.0] * 128, grad_norm=0.0)
        rows = (each._replace(finish=finish, turns=3, given=7) for each in done.cuts.batch)
        watching.observe(replace(done, cuts=replace(done.cuts, batch=BatchRef(tuple(rows)))))
    assert [text.partition(":")[0] for text in said] == ["guards.no_variance"]
    assert "all 640 samples up to step 5 got the same reward" in said[0]
    assert "max_new_tokens" not in said[0]


def test_a_reward_that_always_fails_is_told_where_its_errors_count_zero() -> None:
    scene = Scene(steps=20)
    said = list[str]()
    scene.reward.value_of = lambda sample: Score(0.0, {"f": 0.0}, "f raised KeyError")  # type: ignore[method-assign]
    scene.observe = guards(said, no_variance="off", truncation="off").observe
    scene.play()
    (text,) = said
    assert text.startswith("guards.reward_errors: a reward function failed on each of the last 100 samples: f raised")


@pytest.mark.parametrize("ever_scored", [False, True])
def test_a_constant_reward_of_failed_calls_is_blamed_on_the_calls(ever_scored: bool) -> None:
    said: list[str] = []
    watching = guards(said, limit=10**6)
    for number in range(80):
        error = "" if ever_scored and number == 3 else "mine.py:reward raised KeyError: 'answer'\n  a traceback"
        watching.observe(SampleScored(row(0, 0.0), Score(0.0, {"f": 0.0}, error)))
    for number in range(1, 10):
        watching.observe(step(number, [0.0] * 16, grad_norm=0.0))
    (text,) = said
    if ever_scored:
        assert "all 80 samples up to step 5 got the same reward, 0," in text
        assert "make the reward tell better answers from worse" in text
    else:
        assert "a reward failed for each of the 80 samples scored so far, so that all 80 up to step 5 got 0" in text
        assert "none can teach: mine.py:reward raised KeyError: 'answer'; reward.on_error" in text
        assert "better answers" not in text


def one_in(groups: int, number: int) -> list[float]:
    """Returns rewards of which one group in so many has both, and the others 0 or 1 by turns."""
    rows = [number + place for place in range(8)]
    return [float(row % 2 if row % groups or member else not row % 2) for row in rows for member in range(16)]


@pytest.mark.parametrize(
    ("equal_texts", "members", "advice"),
    [
        ([0.9], 16, "are one and the same text in 90% of the recorded groups: raise generation.temperature"),
        ([0.1], 16, "the answers differ, but their rewards do not: look at them with `asyncrl samples RUN`, and make"),
        ([], 16, "teach nothing; look at them with `asyncrl samples RUN`, and make the reward tell better"),
        ([0.1], 2, "2 samples of a prompt are often equal by chance: raise task.samples_per_prompt, to 8 for example"),
        ([0.9], 2, "raise generation.temperature"),
    ],
)
def test_equal_groups_are_told_after_a_useful_gradient_with_their_cause(
    equal_texts: list[float], members: int, advice: str
) -> None:
    said: list[str] = []
    watching = TrainingGuards(TrainingHistory(LIMIT, members, 8 * members), Alarm(GuardsConfig(), said.append))
    for share in equal_texts:
        watching.take_equal_texts(share)
    for number in range(1, 40):
        watching.observe(step(number, half() if number == 1 else one_in(8, number), grad_norm=0.3))
        assert bool(said) == (number > 10)
    (text,) = said
    assert text.startswith(
        "guards.no_variance: in the 10 steps up to step 11 the samples of 88% of the groups got equal"
    )
    assert advice in text


def test_equal_groups_are_no_news_where_advantages_do_not_compare_them() -> None:
    said: list[str] = []
    watching = TrainingGuards(TrainingHistory(LIMIT, 16, 128, by_group=False), Alarm(GuardsConfig(), said.append))
    for number in range(1, 40):
        watching.observe(step(number, one_in(8, number), grad_norm=0.3))
    assert said == []


def moving(number: int, kl: float, **metrics: float) -> StepDone:
    usual = {"mismatch__kl": kl, "staleness__mean": 1.2, "learning_rate": 1e-7}
    return step(number, half(), **{**usual, **metrics})


def test_a_learning_rate_that_moves_nothing_is_told_once() -> None:
    said: list[str] = []
    watching = guards(said)
    for number in range(1, 60):
        watching.observe(moving(number, 1.2e-10))
        assert bool(said) == (number >= 10)
    (text,) = said
    assert text.startswith(
        "guards.no_movement: the policy hardly moves: at training.learning_rate = 1e-07 a step changes"
    )
    assert (
        "of a token by 1.3e-05 nats (from mismatch/kl, 1.2e-10 in step 10, and the staleness), so that 100 steps"
        in text
    )
    assert "change it by at most 0.0013; raise training.learning_rate" in text


@pytest.mark.parametrize(
    "metrics",
    [
        {"kl": 1e-6},  # 100 quickstart steps at 1e-5
        {"kl": 1e-13, "staleness__mean": 0.0},  # engine and trainer are one version
        {"kl": 1e-8, "grad_norm": 0.0},
        {"kl": 1e-8, "learning_rate": 0.0},  # a control run
    ],
)
def test_what_moves_or_cannot_tell_is_no_such_rate(metrics: dict[str, float]) -> None:
    said: list[str] = []
    watching = guards(said, no_variance="off")
    for number in range(1, 60):
        watching.observe(moving(number, **metrics))
    assert said == []


def test_a_warm_up_and_a_policy_that_has_learnt_all_are_no_such_rate() -> None:
    said: list[str] = []
    watching = TrainingGuards(TrainingHistory(LIMIT, 16, 128, warmup=20), Alarm(GuardsConfig(), said.append))
    for number in range(1, 21):
        watching.observe(moving(number, 1e-10))
    for number in range(21, 40):
        watching.observe(moving(number, 1e-4))
    for number in range(40, 80):
        watching.observe(step(number, [1.0] * 127 + [0.0], mismatch__kl=1e-11, staleness__mean=1.2, learning_rate=1e-7))
    assert said == []


def test_a_collapse_is_told_once_and_names_the_order_of_rows() -> None:
    said: list[str] = []
    watching = TrainingGuards(TrainingHistory(LIMIT, 16, 128, in_order=True), Alarm(GuardsConfig(), said.append))
    for number in range(1, 80):
        falls = number % 20 >= 10
        watching.observe(step(number, half(of=128, right=0 if falls else 64), grad_norm=0.0 if falls else 1.0))
    (text,) = said
    assert text.startswith("guards.collapse: the gradient is 0 since 512 samples")
    assert (
        "if the rows become harder in their order, which task.shuffle = false keeps, write true; else the policy"
        in text
    )


def test_means_that_differ_by_rounding_neither_rise_nor_fall() -> None:
    history = TrainingHistory(LIMIT, members=16, batch=128)
    history.first = 0.7 + 0.2 + 0.1
    history.best = 1.0
    history.highest = 1.0
    assert history.first < history.highest
    assert not history.reward_rose
    history.lowest = 0.7 + 0.2 + 0.1
    history.best = 1.0
    history.steps.extend([{"reward/mean": history.lowest}] * 5)
    assert not history.reward_fell
    history.lowest = 0.5
    history.steps.extend([{"reward/mean": 0.7}] * 5)
    assert history.reward_fell


def test_guards_that_are_off_say_nothing() -> None:
    said: list[str] = []
    watching = guards(said, **dict.fromkeys((guard.key for guard in GUARDS), "off"))
    for number in range(1, 40):
        watching.observe(step(number, [0.0] * 128, truncated=128, grad_norm=0.0))
    assert said == []


def test_each_guard_has_a_key_and_each_key_a_guard() -> None:
    elsewhere = {"learning_rate", "first_failure", "unscored", "poison", "algorithm_drops"}
    assert {guard.key for guard in GUARDS} | elsewhere == set(GuardsConfig.model_fields)


def test_a_learning_rate_that_breaks_a_model_is_known_before_the_start() -> None:
    def config(*flags: str) -> Config:
        return load("quickstart", flags, {}).config

    (warning,) = config("--training.learning_rate", "50").warnings
    assert str(warning).startswith("training.learning_rate, guards.learning_rate: AdamW moves every weight by about 50")
    with pytest.raises(ConfigError, match=r"a rate over 0\.03 breaks a model"):
        config("--training.learning_rate", "50", "--guards.learning_rate", "stop")
    for flags in (["50", "--guards.learning_rate", "off"], ["0.006"]):
        assert config("--training.learning_rate", *flags).warnings == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--training.optimizer", "adam", "--training.learning_rate", "1"], "Adam moves every weight by about 1 in"),
        (["--training.optimizer", "rprop", "--training.learning_rate", "1"], "Rprop moves every weight by about 1 in"),
        (["--training.optimizer", "sgd", "--training.learning_rate", "100"], "all weights together by up to 100 in an"),
        (["--training.optimizer", "asgd", "--training.learning_rate", "1e6"], "ASGD moves all weights together by up"),
        (["--training.optimizer", "adadelta", "--training.learning_rate", "100"], "a rate over 30 breaks a model"),
        (
            ["--algorithm.preset", "ppo", "--training.learning_rate", "0.02"],
            "critic.learning_rate, guards.learning_rate",
        ),
        (["--algorithm.preset", "ppo", "--critic.learning_rate", "1"], "critic.learning_rate, guards.learning_rate"),
        (["--training.optimizer", "sgd", "--training.learning_rate", "1"], ""),
        (["--training.optimizer", "adadelta", "--training.learning_rate", "1"], ""),
        (["--algorithm.preset", "ppo", "--training.learning_rate", "1e-3"], ""),
    ],
)
def test_the_rate_that_a_model_stands_depends_on_the_optimizer_and_critics_have_rates_too(
    flags: list[str], said: str
) -> None:
    warnings = [str(each) for each in load("quickstart", flags, {}).config.warnings if "_rate" in str(each)]
    assert [said in each for each in warnings] == ([True] if said else [])


def of_episodes(event: StepDone, finish: str) -> StepDone:
    """Returns a step whose samples are episodes of four turns, of which the last one has the reward."""
    rows = [
        row._replace(finish=finish, turns=4, given=9, turn_rewards=(0.0, 0.0, 0.0, row.reward or 0.0))
        for row in event.cuts.batch
    ]
    return replace(event, cuts=replace(event.cuts, batch=BatchRef(tuple(rows))))


ENDS = ["stop", "turn_limit", "token_limit", "time_limit", "environment"]


@pytest.mark.parametrize("finish", ENDS)
@pytest.mark.parametrize("discount", [None, 0.9])
def test_a_collapse_of_episodes_is_told_as_that_of_answers(finish: str, discount: float | None) -> None:
    said: list[str] = []
    history = TrainingHistory(LIMIT, members=16, batch=128, turn_discount=discount)
    watching = TrainingGuards(history, Alarm(GuardsConfig(), said.append))
    for number in range(1, 40):
        broken = number >= 10
        event = step(number, [0.0] * 128 if broken else half(), grad_norm=0.0 if broken else 1.0)
        watching.observe(of_episodes(event, finish))
    (text,) = said
    assert text.startswith("guards.collapse: the gradient is 0 since 512 samples, and the mean reward fell from 0.5 to")
    assert "resume from a checkpoint before the fall with a smaller training.learning_rate" in text


@pytest.mark.parametrize("finish", ENDS)
@pytest.mark.parametrize("discount", [None, 0.9])
def test_a_rate_that_moves_no_episode_is_told(finish: str, discount: float | None) -> None:
    said: list[str] = []
    history = TrainingHistory(LIMIT, members=16, batch=128, turn_discount=discount)
    watching = TrainingGuards(history, Alarm(GuardsConfig(), said.append))
    for number in range(1, 30):
        watching.observe(of_episodes(moving(number, 1.2e-10), finish))
    (text,) = said
    assert text.startswith("guards.no_movement: the policy hardly moves: at training.learning_rate = 1e-07 a step")
    assert "raise training.learning_rate, tenfold at a time while mismatch/kl stays under 0.01" in text


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
    assert text.startswith("guards.no_signal: 128 groups in a row had equal rewards, the newest")
    assert f"the newest {reward:g}, and algorithm.dynamic_sampling drops such groups, so nothing was trained" in text
