"""Commands of a person to a running run."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.controller.controller import PauseSwitch
from asyncrl.deploy.process.interrupts import StopSignals
from asyncrl.deploy.process.run_commands import RunCommands
from asyncrl.errors import Refused
from asyncrl.protocols.messages import Call, HeldWeights


def call(method: str, *args: Any) -> Call:
    return Call(1, method, args, 10.0)


class Scene:
    def __init__(self) -> None:
        self.said: list[str] = []
        self.pauses = PauseSwitch()
        self.signals = StopSignals(self.said.append)
        display: Any = SimpleNamespace(say=self.said.append)
        nothing: Any = None
        self.commands = RunCommands(nothing, nothing, self.pauses, self.signals, display, {})


async def test_a_pause_is_turned_on_and_off_once() -> None:
    scene = Scene()
    with pytest.raises(Refused, match="the run is going on already"):
        await scene.commands.run(call("unpause"))
    assert (await scene.commands.run(call("pause"))).startswith("the run is paused")
    assert scene.pauses.on
    with pytest.raises(Refused, match="the run is paused already"):
        await scene.commands.run(call("pause"))
    assert await scene.commands.run(call("unpause")) == "the run goes on"
    assert not scene.pauses.on
    assert len(scene.said) == 2, "both are said where the run prints"


async def test_a_run_is_stopped_only_where_it_can_end_in_order() -> None:
    scene = Scene()
    ended = asyncio.Event()
    with pytest.raises(Refused, match="does not train yet, or it is ending already"):
        await scene.commands.run(call("stop"))
    with scene.signals.ending_in_order(ended.set):
        assert "ends with a checkpoint" in await scene.commands.run(call("stop"))
    assert ended.is_set()


async def test_weights_are_shown_by_stage() -> None:
    scene = Scene()
    tensors = [{"b": ("02", 4.0), "a": ("01", 3.0)}, {"c": ("03", 1.0)}]
    stages = [HeldWeights(f"training0.{stage}", stage, 0, 7, each) for stage, each in enumerate(tensors)]

    async def held_weights() -> list[HeldWeights]:
        return stages

    training = SimpleNamespace(held_weights=held_weights)
    scene.commands.running = SimpleNamespace(handle=lambda service, contract: training)  # type: ignore[assignment]
    title, _, first, named, last = (await scene.commands.run(call("weights", "[b]"))).splitlines()
    assert "version 7, incarnation 0" in title
    assert first.split()[:4] == ["0", "training0.0", "2", "5"]
    assert named.split() == ["b", "4", "02"]
    assert last.split()[:4] == ["1", "training0.1", "1", "1"]
    stages[0].tensors["b"] = ("09", 4.0)
    assert (await scene.commands.run(call("weights", ""))).splitlines()[2] != first, "one bit changes the digest"


@pytest.mark.parametrize(("method", "args"), [("pause", (1,)), ("stop", ("now",)), ("scale", ("a",)), ("kill", ())])
async def test_other_commands_are_refused(method: str, args: tuple[Any, ...]) -> None:
    with pytest.raises(Refused, match=f"this run takes no command '{method}' like this"):
        await Scene().commands.run(call(method, *args))
