"""A run that is paused by command: what is in flight ends, nothing else begins, and every bound holds afterwards."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from asyncrl.controller.controller import PauseSwitch
from asyncrl.controller.gate.group_state import Stage
from asyncrl.controller.journal.ledger import Drawn, Trained
from asyncrl.controller.observers.events import StepBegan
from asyncrl.simulation import virtual_loop
from asyncrl.simulation.fakes.generation import FakeGeneration, stragglers
from asyncrl.simulation.fakes.training import FakeTraining, StepCost
from tests.unit.scene import CONFIG, Scene

LONG = 1000.0
"""Seconds of a pause in which a run that did not hold would train hundreds of steps."""


def paused_scene(at: int, during: Any = None, **settings: Any) -> Scene:
    """Plays a run of 8 steps that is paused for LONG after a version; `during` runs meanwhile."""
    scene = Scene(replace(CONFIG, **settings), steps=8)
    scene.generation = FakeGeneration(16, 0.1, stragglers(10, 0.3, 2))
    scene.training = FakeTraining(StepCost(1.0), scene.gate.config.limit, [scene.generation], seed=0)
    waits: list[asyncio.Task[None]] = []

    async def pause() -> None:
        await asyncio.sleep(60)
        before = (scene.gate.version, scene.gate.next_group, len(scene.told(StepBegan)))
        if during is not None:
            await during(scene)
        await asyncio.sleep(LONG - 60)
        after = (scene.gate.version, scene.gate.next_group, len(scene.told(StepBegan)))
        assert before == after, "nothing was drawn or trained"
        assert not any(scene.gate.counts[stage] for stage in (Stage.RUNNING, Stage.SCORING, Stage.TRAINING))
        assert bool(scene.gate.counts[Stage.READY]) == bool(at), "what is finished waits"
        assert scene.pauses.turn(on=False)

    async def between(version: int) -> None:
        if version == at and not waits:
            scene.pauses.turn(on=True)
            waits.append(asyncio.ensure_future(pause()))

    scene.between = between
    scene.play()
    waits[0].result()
    return scene


@pytest.mark.parametrize(("policy", "at"), [("mask", 0), ("mask", 3), ("drop", 3), ("block", 7)])
def test_a_pause_holds_draws_and_steps_and_nothing_gets_too_old(policy: str, at: int) -> None:
    scene = paused_scene(at, policy=policy)
    assert [record.version for record in scene.records(Trained)] == [*range(1, 9)]
    staleness = [begun.cuts.batch.rows for begun in scene.told(StepBegan)]
    for version, rows in enumerate(staleness):
        oldest = min(row.last if policy == "mask" else row.first for row in rows)
        assert version - oldest <= CONFIG.limit
    drawn = len(scene.records(Drawn))
    ended = scene.gate.counts[Stage.TRAINED] + scene.gate.counts[Stage.DROPPED]
    assert drawn * CONFIG.members == ended + scene.gate.in_flight, "no sample is lost"


def test_samples_lost_during_a_pause_are_sampled_again() -> None:
    async def lose(scene: Scene) -> None:
        assert scene.generation.stored_rows
        await scene.lose_the_generator()

    scene = paused_scene(3, lose)
    assert scene.gate.version == 8


def test_a_paused_run_that_is_stopped_ends() -> None:
    scene = Scene(steps=8)

    async def between(version: int) -> None:
        if version == 2:
            scene.pauses.turn(on=True)
            asyncio.get_running_loop().call_later(30, scene.controller.stop)

    scene.between = between
    scene.play()
    assert scene.gate.version == 2


def test_the_seconds_of_pauses_are_counted_once() -> None:
    async def main() -> None:
        switch = PauseSwitch()
        changes = list[bool]()
        switch.subscribers.append(lambda: changes.append(switch.on))
        assert switch.take_seconds() == 0
        assert switch.turn(on=True)
        assert not switch.turn(on=True)
        await asyncio.sleep(5)
        assert switch.take_seconds() == 5, "also while it is on"
        await asyncio.sleep(2)
        assert switch.turn(on=False)
        await asyncio.sleep(100)
        switch.turn(on=True)
        await asyncio.sleep(1)
        switch.turn(on=False)
        assert (switch.take_seconds(), switch.take_seconds()) == (3, 0)
        assert changes == [True, False, True, False]

    virtual_loop.run(main())
