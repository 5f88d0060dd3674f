"""A user's algorithm trains with advantages of its own; its mistakes are reported with their line."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from asyncrl.algorithms import ppo
from asyncrl.controller.controller import Algorithm, Controller
from asyncrl.controller.journal.ledger import Trained
from asyncrl.controller.rollouts import Attempt
from asyncrl.errors import AlgorithmError
from asyncrl.fleet.fleet import Fleet
from asyncrl.protocols.batch import BatchRef, Cuts
from asyncrl.protocols.messages import Score
from asyncrl.simulation.fakes.scoring import FakeCritic
from asyncrl.simulation.fakes.training import FakeTraining
from tests import golden
from tests.unit.algorithms.own import OWN, line_of
from tests.unit.scene import Scene


def credited(cuts: Cuts) -> list[float]:
    return [10.0 * row.group + row.member for row in cuts.batch]


async def credits(fleet: Fleet, control: Controller) -> None:
    async for iteration in control.iterations():
        with iteration as cuts:
            own = control.credit(cuts, credited(cuts))
            control.trained(await fleet.training.step(own))


class Seeing(FakeTraining):
    """Keeps the advantages that it trained with."""

    seen: list[tuple[float | None, ...]]

    async def step(self, cuts: Cuts) -> Any:
        self.seen.append(tuple(row.advantage for row in cuts.batch))
        return await super().step(cuts)


def test_advantages_of_a_pages_own_are_trained_with_and_written_down() -> None:
    scene = Scene()
    before = scene.training
    trainer = Seeing(before.cost, 2, [scene.generation], seed=0)
    scene.training = trainer
    trainer.seen = []
    scene.algorithm = replace(OWN, train=credits)
    scene.play()
    trained = scene.records(Trained)
    assert [record.advantages for record in trained] == trainer.seen
    for record in trained:
        rows = [(group, member) for group, members in sorted(record.cuts) for member in members]
        assert list(record.advantages) == [10.0 * group + member for group, member in rows]


def test_a_samples_own_advantage_has_no_place_where_a_critic_judges_tokens() -> None:
    scene = Scene()
    scene.critic = FakeCritic(0.1, 0.1, [scene.generation])
    scene.algorithm = Algorithm(ppo.roll_out, credits, "algorithms:MINE")
    with golden.raises(AlgorithmError):
        scene.play()
    assert scene.records(Trained) == []


async def replaces(fleet: Fleet, control: Controller) -> None:
    async for iteration in control.iterations():
        with iteration as cuts:
            own = BatchRef(tuple(row.with_advantage(2.0) for row in cuts.batch))
            control.trained(await fleet.training.step(replace(cuts, batch=own)))


async def trains_a_part(fleet: Fleet, control: Controller) -> None:
    async for iteration in control.iterations():
        with iteration as cuts:
            control.trained(await fleet.training.step(replace(cuts, batch=cuts.batch.take([0]))))


async def trains_the_old(fleet: Fleet, control: Controller) -> None:
    async for iteration in control.iterations():
        with iteration as cuts:
            control.credit(cuts, credited(cuts))
            control.trained(await fleet.training.step(cuts))


async def credits_a_part(fleet: Fleet, control: Controller) -> None:
    async for iteration in control.iterations():
        with iteration as cuts:
            own = control.credit(replace(cuts, batch=cuts.batch.take([0])), [1.0])
            control.trained(await fleet.training.step(own))


async def credits_too_few(fleet: Fleet, control: Controller) -> None:
    async for iteration in control.iterations():
        with iteration as cuts:
            control.credit(cuts, [1.0])


async def credits_no_number(fleet: Fleet, control: Controller) -> None:
    async for iteration in control.iterations():
        with iteration as cuts:
            control.credit(cuts, [math.nan] * len(cuts.batch))


async def tells_nothing(fleet: Fleet, control: Controller) -> None:
    async for iteration in control.iterations():
        with iteration as cuts:
            await fleet.training.step(cuts)
            control.trained(None)  # type: ignore[arg-type]


async def scores_no_number(fleet: Fleet, control: Controller, group: Attempt) -> None:
    samples = BatchRef.join([finished async for finished in fleet.generation.generate(group.prompts)])
    control.generated(samples)
    control.ready(samples, [Score(math.nan, {})] * len(samples))


OTHER_CUTS = "fleet.training.step got other cuts than those of the iteration that runs: hand on `cuts`"


@pytest.mark.parametrize(
    ("function", "changed", "line", "says"),
    [
        ("train", replaces, "step(", OTHER_CUTS),
        ("train", trains_a_part, "step(", OTHER_CUTS),
        ("train", trains_the_old, "step(", OTHER_CUTS),
        ("train", credits_a_part, "credit(", "control.credit got other cuts than those of the iteration that runs"),
        ("train", credits_too_few, "credit(", "control.credit got 1 advantages for 8 samples: write a finite number"),
        ("train", credits_no_number, "credit(", "control.credit got 8 advantages for 8 samples: write a finite number"),
        (
            "train",
            tells_nothing,
            "trained(",
            "control.trained got a NoneType: hand it what `await fleet.training.step(",
        ),
        (
            "roll_out",
            scores_no_number,
            "ready(",
            "control.ready got the reward nan for sample (0, 0): write None",
        ),
    ],
)
def test_what_would_not_be_what_the_journal_says_is_refused_with_its_line(
    function: str, changed: Callable[..., Any], line: str, says: str
) -> None:
    scene = Scene()
    scene.algorithm = replace(OWN, **{function: changed})
    with pytest.raises(AlgorithmError) as caught:
        scene.play()
    assert str(caught.value).startswith(f"{function} of algorithms:MINE: {says}")
    assert str(caught.value).endswith(f"({__file__}, line {line_of(changed, line)})")
    assert scene.records(Trained) == []
