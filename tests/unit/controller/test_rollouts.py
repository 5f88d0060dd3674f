"""The request of an attempt, and prompts that generation refuses."""

from collections.abc import Callable
from typing import Any

import pytest

from asyncrl.algorithms import grpo
from asyncrl.controller.controller import Algorithm, Controller
from asyncrl.controller.journal.ledger import AttemptStarted
from asyncrl.controller.rollouts import Attempt
from asyncrl.errors import ALL_SLOTS, LostRows, PeerLost, RewardError, TaskError
from asyncrl.fleet.fleet import Fleet
from asyncrl.protocols.batch import Cuts, RowRef
from asyncrl.protocols.messages import PromptGroup, StepReport
from asyncrl.simulation.fakes.generation import FakeGeneration
from asyncrl.simulation.fakes.training import FakeTraining, StepCost
from tests import golden
from tests.unit.scene import Scene


@pytest.mark.trap("redone")
@pytest.mark.trap("seeds")
def test_every_attempt_at_a_group_has_its_seed_and_its_prompt_and_other_groups_have_others() -> None:
    def asked(incarnation: int) -> dict[tuple[int, int], tuple[int, object]]:
        found: dict[tuple[int, int], tuple[int, object]] = {}

        def fail_twice(prompts: PromptGroup) -> None:
            assert prompts.incarnation == incarnation
            found[prompts.id, prompts.attempt] = (prompts.seed, prompts.prompt)
            if prompts.attempt < 2:
                raise PeerLost("the worker died")

        scene = rolled_out(fail_twice)
        if incarnation:
            scene.journal.resume(incarnation, 0)
            for service in (scene.generation, scene.training):
                service.incarnation = incarnation
        scene.play()
        return found

    first = asked(0)
    after_a_resume = asked(2)
    groups = {group for group, attempt in first if attempt == 2}
    assert all(len({first[group, attempt] for attempt in range(3)}) == 1 for group in groups)
    assert all(first[group, 0] == after_a_resume[group, 0] for group in groups)
    assert len({first[group, 0] for group in groups}) == len(groups) >= 6


def rolled_out(fail: Callable[[PromptGroup], object], **parts: Any) -> Scene:
    """Returns a scene whose groups are rolled out after a look at their requests."""

    async def roll_out(fleet: Fleet, control: Controller, group: Attempt) -> None:
        fail(group.prompts)
        await grpo.roll_out(fleet, control, group)

    scene = Scene()
    for name, part in parts.items():
        setattr(scene, name, part)
    scene.algorithm = Algorithm(roll_out, grpo.train)
    return scene


def refuse(prompts: PromptGroup) -> None:
    if prompts.id == 1:
        raise TaskError("the prompt has 9 tokens")


def lose(prompts: PromptGroup) -> None:
    if prompts.id == 1:
        raise PeerLost("reward1.0-0-a: reward1[0]: it raised KeyError") from RewardError("it raised KeyError")


@pytest.mark.parametrize(("fail", "error"), [(refuse, TaskError), (lose, RewardError)])
def test_a_prompt_that_is_refused_is_named_and_a_mistake_that_a_group_meets_everywhere_is_no_poison(
    fail: Any, error: type[Exception]
) -> None:
    with golden.raises(error):
        rolled_out(fail).play()


def test_the_tools_of_a_row_are_asked_for_with_its_prompt() -> None:
    seen: list[object] = []
    rolled_out(lambda prompts: seen.append(prompts.tools), columns={"tools": [{"name": "add"}]}).play()
    assert len(seen) >= 6
    assert set(map(str, seen)) == {"({'name': 'add'},)"}


class LosesARow(FakeTraining):
    """Meets a row that is gone in the second step: the last one of the batch, freed or with its whole owner."""

    def __init__(self, generation: FakeGeneration, *, owner: bool) -> None:
        super().__init__(StepCost(1.0), 1, [generation], seed=0)
        self.generation = generation
        self.owner = owner
        self.lost: RowRef | None = None
        self.batch: set[int] = set()

    async def step(self, cuts: Cuts) -> StepReport:
        if self.version == 1 and self.lost is None:
            self.lost = cuts.batch.rows[-1]
            self.batch = {row.group for row in cuts.batch}
            if self.owner:
                raise LostRows("the owner died", [(self.lost.places[0].owner, ALL_SLOTS)])
            assert self.generation.rows is not None
            self.generation.rows.free(self.lost.places)
        return await super().step(cuts)


@pytest.mark.parametrize("owner", [False, True])
def test_only_groups_that_the_error_names_begin_again(owner: bool) -> None:
    scene = Scene()
    scene.training = training = LosesARow(scene.generation, owner=owner)
    scene.play()
    assert training.lost is not None
    assert len(training.batch) > 1
    again = {attempt.group for attempt in scene.records(AttemptStarted)}
    assert again == (training.batch if owner else {training.lost.group})
    assert scene.gate.version == 3
