"""Episodes over simulated services: every algorithm plays them, and one that does not is told."""

import asyncio
from collections import Counter

from asyncrl.algorithms import grpo, ppo, remax
from asyncrl.config.gate_config import GateConfig
from asyncrl.controller.controller import Algorithm, Controller
from asyncrl.controller.journal.audit import Audit
from asyncrl.controller.observers.events import SampleScored
from asyncrl.controller.rollouts import Attempt
from asyncrl.errors import AlgorithmError, AsyncrlError
from asyncrl.fleet.fleet import Fleet
from asyncrl.objectives.advantages import greedy_baseline, plain_rewards
from asyncrl.protocols.batch import GREEDY, RowRef
from asyncrl.protocols.messages import PromptGroup, Score
from asyncrl.simulation.fakes.generation import FakeGeneration, FakeSequence, constant
from asyncrl.simulation.fakes.scoring import FakeCritic, FakeReward
from asyncrl.simulation.fakes.training import FakeTraining, StepCost
from asyncrl.simulation.faults.trial_services import FakeEnvironment
from tests import golden
from tests.unit.scene import CONFIG, Scene

COMPARED = GateConfig(groups=2, members=4, limit=1, policy="mask", slots=16, cut_at=2, baseline=1, greedy=True)


class Judge(FakeReward):
    """Notes the turns of each greedy answer."""

    def __init__(self, delay: float) -> None:
        super().__init__(delay)
        self.greedy: list[int] = []

    def value_of(self, sample: RowRef) -> Score:
        if sample.member == GREEDY:
            self.greedy.append(sample.turns)
        return super().value_of(sample)


def scene(config: GateConfig = CONFIG, turns: int = 4) -> Scene:
    made = Scene(config)
    made.environment = FakeEnvironment(0.1, turns, [made.generation])
    made.generation.read_from([made.generation, made.environment])
    made.training.read_from([made.generation, made.environment])
    return made


def check(made: Scene, tokens: int = 20) -> None:
    """Checks that every sample was trained with all its turns, and that no row is left of what ended."""
    assert made.environment is not None
    scored = [event.sample for event in made.told(SampleScored)]
    assert {1, 2, 3} <= {sample.turns for sample in scored}
    for sample in scored:
        assert sample.finish == "stop"
        assert sample.tokens == tokens * sample.turns
        assert sample.turns == made.environment.turns_of(sample)
    assert len(made.training.trained) >= 24
    assert Audit(made.store).ok
    in_flight = made.gate.in_flight + made.gate.awaited
    assert made.environment.stored_rows <= in_flight
    assert made.generation.stored_rows <= in_flight


def test_grpo_plays_episodes() -> None:
    made = scene()
    made.play()
    check(made)


def test_ppo_plays_episodes() -> None:
    made = scene()
    made.critic = FakeCritic(0.1, 0.5, [made.generation, made.environment])
    made.training.read_from([made.generation, made.environment, made.critic])
    made.algorithm = ppo.ALGORITHM
    made.estimate = plain_rewards
    made.play()
    check(made)


def test_the_greedy_answer_of_remax_is_an_episode_too() -> None:
    made = scene(COMPARED)
    made.algorithm = remax.ALGORITHM
    made.estimate = greedy_baseline
    made.reward = reward = Judge(0.1)
    made.play()
    check(made)
    assert len(reward.greedy) >= 6
    assert len(set(reward.greedy)) > 1


class Asked(FakeGeneration):
    """Notes the turns that it is asked for: attempt, and turns before."""

    def __init__(self) -> None:
        super().__init__(16, 0.1, constant(20))
        self.asked: list[tuple[int, int]] = []

    async def _sequence(
        self, prompts: PromptGroup, member: int, answers: asyncio.Queue[RowRef | AsyncrlError]
    ) -> FakeSequence:
        sequence = await super()._sequence(prompts, member, answers)
        self.asked.append((prompts.attempt, 0 if sequence.before is None else sequence.before.turns))
        return sequence


async def lose_the_generator_in_time(made: Scene) -> None:
    """Kills the generator while the second turns of the first groups are sampled."""
    await asyncio.sleep(3.5)
    await made.lose_the_generator()


def test_episodes_go_on_after_the_turn_that_was_answered_when_their_generator_dies() -> None:
    made = scene()
    made.generation = asked = Asked()
    assert made.environment is not None
    made.environment.read_from([asked, made.environment])
    made.generation.read_from([asked, made.environment])
    made.training = FakeTraining(StepCost(1.0), 1, [asked, made.environment], seed=0)

    async def train(fleet: Fleet, control: Controller) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(lose_the_generator_in_time(made))
            await grpo.train(fleet, control)

    made.algorithm = Algorithm(grpo.roll_out, train)
    made.play()
    check(made)
    again = Counter(turns for attempt, turns in asked.asked if attempt)
    assert again[1] > again[0], again  # Most episodes had an answered turn, and none of those began anew.


def test_an_algorithm_that_does_not_play_is_told_what_to_write() -> None:
    async def roll_out(fleet: Fleet, control: Controller, group: Attempt) -> None:
        async for samples in fleet.generation.generate(group.prompts):
            control.generated(samples)
            await grpo.score(fleet, control, group, samples)

    made = scene()
    made.algorithm = Algorithm(roll_out, grpo.train, "mine")
    with golden.raises(AlgorithmError):
        made.play()
