"""Mistakes of a user's algorithm: each error names the call to write instead."""

import re
from dataclasses import replace
from typing import Any

import pytest

from asyncrl.algorithms import grpo, ppo, remax, safe_rlhf
from asyncrl.algorithms.algorithm_by_name import FROM_PYTHON, algorithm_problems
from asyncrl.config.schema import Config, GuardsConfig
from asyncrl.config.sections.algorithm_config import expanded
from asyncrl.controller.controller import Algorithm, AlgorithmChecks, Controller
from asyncrl.controller.observers.alarms import Alarm, AlgorithmDrops
from asyncrl.controller.observers.events import DroppedByAlgorithm, Event, SampleScored
from asyncrl.controller.rollouts import Attempt
from asyncrl.errors import AlgorithmError
from asyncrl.fleet.fleet import Fleet
from asyncrl.protocols.batch import GREEDY, BatchRef, Place, RowRef
from asyncrl.protocols.messages import Score
from asyncrl.simulation.fakes.generation import FakeGeneration, constant
from asyncrl.simulation.fakes.scoring import FakeCritic, FakeReference, FakeReward
from asyncrl.simulation.fakes.training import FakeTraining, StepCost
from tests import golden
from tests.unit.algorithms.own import OWN, line_of, played, roll_out
from tests.unit.scene import CONFIG, Scene


def alarm() -> Alarm:
    return Alarm(GuardsConfig(), lambda text: None)


# ---- what an algorithm hands in ------------------------------------------------------------------------------------


async def generated(fleet: Fleet, control: Controller, group: Attempt) -> BatchRef:
    samples = BatchRef.join([finished async for finished in fleet.generation.generate(group.prompts)])
    control.generated(samples)
    return samples


async def drops_all(fleet: Fleet, control: Controller, group: Attempt) -> None:
    samples = await generated(fleet, control, group)
    if control.version:
        control.drop(samples, "all")
    else:
        control.ready(samples, await fleet.reward.score(samples, group.row))


def test_an_algorithm_that_drops_every_sample_ends_the_run() -> None:
    scene = Scene(steps=9)
    patience = 2 * CONFIG.cap * CONFIG.members
    drops = AlgorithmDrops(patience, CONFIG.baseline, 0, alarm())

    def observe(event: Event) -> None:
        scene.events.append(event)
        drops.observe(event)

    scene.observe, scene.algorithm = observe, replace(OWN, roll_out=drops_all)
    with pytest.raises(AlgorithmError) as caught:
        scene.play()
    assert 1 <= scene.gate.version < 5, "what was ready before still trained"
    says = f": {patience} samples were dropped as 'all' and none trained since step {scene.gate.version}: "
    assert says in str(caught.value)
    assert patience <= scene.journal.ledger.dropped["all"] < 2 * patience


async def drops_most(fleet: Fleet, control: Controller, group: Attempt) -> None:
    samples = await generated(fleet, control, group)
    if group.prompts.id % 4:
        control.drop(samples, f"like {group.prompts.id % 4}")
    else:
        control.ready(samples, await fleet.reward.score(samples, group.row))


async def drops_all_but_one(fleet: Fleet, control: Controller, group: Attempt) -> None:
    samples = await generated(fleet, control, group)
    first = samples.take([0])
    others = samples.take(list(range(1, len(samples))))
    control.drop(others, "not the first")
    control.ready(first, await fleet.reward.score(first, group.row))


def test_an_algorithm_that_leaves_too_few_of_each_group_for_a_baseline_ends_the_run() -> None:
    scene = Scene()
    patience = 2 * CONFIG.cap * CONFIG.members
    drops = AlgorithmDrops(patience, CONFIG.baseline, 0, alarm())
    scene.observe, scene.algorithm = drops.observe, replace(OWN, roll_out=drops_all_but_one)
    with golden.raises(AlgorithmError, match="step 0.*2 samples"):
        scene.play()
    assert scene.journal.ledger.dropped["no_baseline"] > 0


def test_an_algorithm_may_drop_most_of_its_samples() -> None:
    scene = Scene()
    drops = AlgorithmDrops(2 * CONFIG.cap * CONFIG.members, CONFIG.baseline, 0, alarm())
    scene.observe, scene.algorithm = drops.observe, replace(OWN, roll_out=drops_most)
    scene.play()
    assert scene.gate.version == 3
    assert scene.journal.ledger.dropped["like 3"] >= 2 * CONFIG.members


async def ready_then_drop(fleet: Fleet, control: Controller, group: Attempt) -> None:
    samples = await generated(fleet, control, group)
    control.ready(samples, await fleet.reward.score(samples, group.row))
    control.drop(samples.take([0]), "late")


async def drop_then_ready(fleet: Fleet, control: Controller, group: Attempt) -> None:
    samples = await generated(fleet, control, group)
    control.drop(samples, "early")
    control.ready(samples, await fleet.reward.score(samples, group.row))


async def no_reason(fleet: Fleet, control: Controller, group: Attempt) -> None:
    control.drop(await generated(fleet, control, group), " ")


async def too_few_scores(fleet: Fleet, control: Controller, group: Attempt) -> None:
    samples = await generated(fleet, control, group)
    control.ready(samples, (await fleet.reward.score(samples, group.row))[1:])


async def floats(fleet: Fleet, control: Controller, group: Attempt) -> None:
    samples = await generated(fleet, control, group)
    control.ready(samples, [1.0] * len(samples))  # type: ignore[list-item]


async def trains_twice(fleet: Fleet, control: Controller) -> None:
    async for iteration in control.iterations():
        with iteration as cuts:
            report = await fleet.training.step(cuts)
            control.trained(report)
            control.trained(replace(report))


@pytest.mark.parametrize(
    ("changed", "line", "says"),
    [
        (
            ready_then_drop,
            "control.drop",
            "control.drop got sample (0, 0), which was handed to `control.ready`: call one of them",
        ),
        (
            drop_then_ready,
            "control.ready",
            "control.ready got sample (0, 0), which was handed to `control.drop`: call one of them",
        ),
        (no_reason, "control.drop", "control.drop got the reason ' ': write a word that data/dropped/WORD shall count"),
        (too_few_scores, "control.ready", "control.ready got 4 samples and 3 scores"),
        (
            floats,
            "control.ready",
            "control.ready: scores are what `await fleet.reward.score(samples, group.row)` answered, not floats",
        ),
        (
            trains_twice,
            "replace(report)",
            "control.trained was called twice, or after its iteration had ended: call it once in each `with "
            "iteration as "
            "cuts`",
        ),
    ],
)
def test_what_an_algorithm_hands_in_wrongly_is_told_with_its_line(changed: Any, line: str, says: str) -> None:
    function = "train" if changed is trains_twice else "roll_out"
    with pytest.raises(AlgorithmError) as caught:
        played(**{function: changed})
    number = line_of(changed, line)
    assert str(caught.value) == f"{function} of algorithms:MINE: {says} ({__file__}, line {number})"


def test_samples_that_the_gate_has_dropped_may_still_be_handed_in() -> None:
    """Their greedy answer cannot be scored, which drops the group while its samples are judged."""

    class NoGreedy(FakeReward):
        async def score(self, samples: BatchRef, row: dict[str, Any]) -> list[Score]:
            greedy = samples.rows[0].member == GREEDY and row["row"] == 1
            return [Score(None, {})] if greedy else await super().score(samples, row)

    async def all_at_last(fleet: Fleet, control: Controller, group: Attempt) -> None:
        samples = await generated(fleet, control, group)
        await remax.compare(fleet, control, group)
        control.ready(samples.take([0]), await fleet.reward.score(samples.take([0]), group.row))
        control.drop(samples.take([1]), "mine")
        control.ready(samples.take([2, 3]), await fleet.reward.score(samples.take([2, 3]), group.row))

    scene = Scene(replace(CONFIG, greedy=True, baseline=1))
    scene.reward, scene.algorithm = NoGreedy(0.1), replace(OWN, roll_out=all_at_last)
    scene.play()
    assert scene.gate.version == 3
    assert scene.journal.ledger.dropped["greedy_unscorable"] == 4


async def judged_in_full(fleet: Fleet, control: Controller, group: Attempt, without: str) -> None:
    samples = await generated(fleet, control, group)
    scores = await fleet.reward.score(samples, group.row)
    costs = await safe_rlhf.cost_of(fleet).score(samples, group.row)
    for service in ("critic", "cost_critic"):
        if service != without:
            samples = control.holds(samples.also_at(await getattr(fleet, service).values(samples)))
    control.ready(samples, scores, None if without == "cost" else costs)


@pytest.mark.parametrize(
    ("without", "says"),
    [
        ("nothing", ""),
        ("critic", r"\(values\), .*: write `samples = control\.holds\(samples\.also_at\(await fleet\.critic\.values\("),
        ("cost_critic", r"\(cost_values\), .*also_at\(await fleet\.cost_critic\.values\(samples\)\)\)` before"),
        (
            "cost",
            r"no costs, .*: write `control\.ready\(samples, scores, await fleet\.cost\.score\(samples, ",
        ),
    ],
)
def test_an_algorithm_that_forgets_what_its_algorithm_trains_with_is_told_the_call(without: str, says: str) -> None:
    async def forgetful(fleet: Fleet, control: Controller, group: Attempt) -> None:
        await judged_in_full(fleet, control, group, without)

    scene = Scene()
    scene.cost = FakeReward(0.1)
    scene.critic = FakeCritic(0.1, 0.1, [scene.generation])
    scene.cost_critic = FakeCritic(0.1, 0.1, [scene.generation, scene.critic], "cost")
    scene.training.read_from((scene.generation, scene.critic, scene.cost_critic))
    scene.algorithm = Algorithm(forgetful, safe_rlhf.train, "algorithms:MINE")
    if says:
        with pytest.raises(AlgorithmError, match=f"^roll_out of algorithms:MINE: control.ready got .*{says}"):
            scene.play()
    else:
        scene.play()
        assert scene.gate.version == 3


def test_forgotten_log_probabilities_of_the_reference_are_told() -> None:
    generation = FakeGeneration(16, 0.1, constant(20))
    reference = FakeReference(0.1, [generation])
    training = FakeTraining(StepCost(1.0), 1, [generation, reference], seed=0)
    checks = AlgorithmChecks(Fleet(generation, FakeReward(0.1), training, reference=reference))
    unseen = BatchRef((SAMPLE,))
    seen = unseen.with_places([PLACE._replace(columns=("reference_logprobs",))])
    checks.check_ready(seen, [Score(1.0, {})], None)
    checks.check_ready(unseen, [Score(None, {})], None)
    with pytest.raises(AlgorithmError, match=r"control\.holds\(await fleet\.reference\.logprobs\(samples\)\)` before"):
        checks.check_ready(unseen, [Score(1.0, {})], None)


def test_a_score_without_the_rewards_of_tokens_that_the_trainer_reads_is_told() -> None:
    generation = FakeGeneration(16, 0.1, constant(20))
    fleet = Fleet(generation, FakeReward(0.1), FakeTraining(StepCost(1.0), 1, [generation], seed=0))
    checks = AlgorithmChecks(fleet, by_token=True)
    samples = BatchRef((SAMPLE,))
    stored = Score(1.0, {}, place=PLACE._replace(columns=("token_rewards",)))
    checks.check_ready(samples, [replace(stored, reward=0.5)], None)
    checks.check_ready(samples, [Score(None, {})], None)
    with golden.raises(AlgorithmError, match="0, 1"):
        checks.check_ready(samples, [Score(0.5, {})], None)


PLACE = Place("sim://generation0.0", 0, 0, ("versions",))
SAMPLE = RowRef(0, 1, 0, 0, 1, 1, 0, 0, "stop", (PLACE,))


def test_one_number_is_no_list_of_scores() -> None:
    with golden.raises(AlgorithmError):
        checks_without_columns().check_scores("ready", BatchRef((SAMPLE,)), 1.0)  # type: ignore[arg-type]


def test_drops_of_groups_that_are_done_are_forgotten() -> None:
    checks = checks_without_columns()
    later = SAMPLE._replace(group=1)
    checks.remember_drop(SAMPLE, {0: None})
    checks.remember_drop(later, {1: None})
    checks.check_ready(BatchRef((SAMPLE,)), [Score(1.0, {})], None)
    with golden.raises(AlgorithmError, match=r"1, 1.*`control\.drop`"):
        checks.check_ready(BatchRef((later,)), [Score(1.0, {})], None)


def checks_without_columns() -> AlgorithmChecks:
    generation = FakeGeneration(16, 0.1, constant(20))
    training = FakeTraining(StepCost(1.0), 1, [generation], seed=0)
    return AlgorithmChecks(Fleet(generation, FakeReward(0.1), training))


def test_one_sample_that_is_ready_begins_the_count_of_drops_anew() -> None:
    drops = AlgorithmDrops(3, 1, 0, alarm())
    dropped = DroppedByAlgorithm(0, (0, 1), "mine")
    for score in (Score(1.0, {}), Score(0.0, {}), Score(None, {})):
        drops.observe(dropped)
        drops.observe(SampleScored(SAMPLE, score))
    with pytest.raises(AlgorithmError, match="4 samples"):
        drops.observe(dropped)


# ---- an algorithm that is not the algorithm's ----------------------------------------------------------------------


def mistakes(algorithm: str, preset: str, given: Algorithm | None = None) -> str:
    algorithm = expanded({"custom": algorithm, "preset": preset}, preset)
    cost = {"model": "m", "limit": 0.0} if preset == "safe_rlhf" else {}
    config = {"model": {"name": "m"}, "task": {"prompts": "p"}, "algorithm": algorithm, "cost": cost}
    return "\n".join(map(str, algorithm_problems(Config.model_validate(config), given)))


@pytest.mark.parametrize(
    ("algorithm", "preset", "says"),
    [
        ("ppo", "grpo", 'made for advantage = "gae" .*: write preset = "ppo", or leave `custom` out to run .*grpo'),
        ("remax", "rloo", 'made for advantage = "greedy", .*: write preset = "remax"'),
        ("safe_rlhf", "ppo", 'made for constraint = "lagrangian", .*: write preset = "safe_rlhf"'),
        ("ppo", "safe_rlhf", 'this config has constraint = "lagrangian": .* to run asyncrl.algorithms.safe_rlhf'),
        ("grpo", "remax", 'this config has advantage = "greedy": .* to run asyncrl.algorithms.remax'),
        ("grpo", "ppo", 'this config has advantage = "gae" without .* to run asyncrl.algorithms.ppo'),
        ("ppo", "ppo", ""),
        ("remax", "remax", ""),
        ("grpo", "rloo", ""),
    ],
)
def test_an_algorithm_of_asyncrl_under_another_algorithm_is_refused(algorithm: str, preset: str, says: str) -> None:
    found = mistakes(f"asyncrl.algorithms.{algorithm}:ALGORITHM", preset)
    assert re.search(says, found) if says else found == ""


def test_half_an_algorithm_of_asyncrl_is_looked_at_too() -> None:
    own = Algorithm(roll_out, ppo.train, "custom")
    golden.says(mistakes(FROM_PYTHON, "grpo", own), "asyncrl.algorithms.ppo")
    assert mistakes(FROM_PYTHON, "ppo", own) == ""
    assert mistakes(FROM_PYTHON, "ppo", Algorithm(roll_out, grpo.train, "custom")) == "", "a critic that others teach"


@pytest.mark.parametrize(
    ("ask", "preset"),
    [(ppo.critic_of, "ppo"), (safe_rlhf.cost_of, "safe_rlhf"), (safe_rlhf.cost_critic_of, "safe_rlhf")],
)
def test_a_service_that_does_not_run_is_named_with_the_preset_that_starts_it(ask: Any, preset: str) -> None:
    scene = Scene()
    with golden.raises(AssertionError, match=f'preset = "{preset}"'):
        ask(Fleet(scene.generation, scene.reward, scene.training))
