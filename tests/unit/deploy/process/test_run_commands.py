"""Commands of a person to a running run."""

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.controller.controller import PauseSwitch
from asyncrl.deploy.process.interrupts import StopSignals
from asyncrl.deploy.process.run_commands import RunCommands, Scaled, keep, scaled_specs
from asyncrl.errors import ConfigError, Refused
from asyncrl.fleet.fleet import ServiceSpec
from asyncrl.protocols.messages import Call, HeldWeights
from asyncrl.protocols.service_contracts import Generation, Reward, Training
from tests import golden


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


GENERATION = ServiceSpec("generation", Generation, "x:Y", replicas=2, joined=2)
SPECS = (GENERATION, ServiceSpec("reward", Reward, "x:Y"), ServiceSpec("training", Training, "x:Y"))


def begun(file: Path, *specs: ServiceSpec) -> tuple[list[tuple[str, int, int]], str]:
    """Returns name, replicas and awaited workers of each service that a start has, and what it says."""
    said: list[str] = []
    found = scaled_specs(specs or SPECS, file, said.append)
    return [(spec.name, spec.replicas, spec.joined) for spec in found], "\n".join(said)


def test_a_resume_begins_with_the_numbers_of_the_last_start(tmp_path: Path) -> None:
    """One host is enough to begin, and only the workers of fleet.joined are waited for. A config that was changed since
    counts, and a number that cannot be any more gives way."""
    file = tmp_path / "scaled.json"
    assert begun(file) == ([("generation", 2, 2), ("reward", 1, 0), ("training", 1, 0)], "")
    keep(file, "reward", Scaled(config=1, workers=3))
    keep(file, "generation", Scaled(config=2, workers=1))
    numbers, said = begun(file)
    assert numbers == [("generation", 1, 1), ("reward", 3, 0), ("training", 1, 0)]
    golden.says(said)
    keep(file, "reward", Scaled(config=1, workers=1))
    keep(file, "generation", Scaled(config=2, workers=4))
    assert begun(file)[0][:2] == [("generation", 4, 2), ("reward", 1, 0)]
    changed = replace(GENERATION, replicas=5)
    placed = replace(GENERATION, devices=[("cuda:0",), ("cuda:1",)])
    for spec, workers in ((changed, 5), (placed, 2)):
        numbers, said = begun(file, spec)
        assert numbers == [("generation", workers, 2)]
        golden.says(said)


@pytest.mark.parametrize("content", ["{", "[]", '{"generation": 3}', '{"generation": {"workers": 3}}'])
def test_a_damaged_file_is_named(content: str, tmp_path: Path) -> None:
    file = tmp_path / "scaled.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"scaled\.json is damaged .*: delete it"):
        begun(file)
